"""The operators: torch.compile, torch.export, fake tensors, tensor subclasses and transforms."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import retrograd as rg
from support.torch_layers import assert_close, gradients_of, outputs_of, rt, same_bits, torch

LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "batch norm": (lambda: rt.BatchNorm2d(4), (3, 4, 5, 5)),
    "batch norm, cumulative, relu": (lambda: rt.BatchNorm1d(4, momentum=None, activation="relu"), (3, 4)),
    "batch norm, evaluation": (lambda: rt.BatchNorm2d(4).eval(), (3, 4, 5, 5)),
    "instance norm": (lambda: rt.InstanceNorm2d(4, affine=True, track_running_stats=True), (3, 4, 5, 5)),
    "instance norm, one sample": (lambda: rt.InstanceNorm1d(4), (4, 5)),
    "layer norm": (lambda: rt.LayerNorm(5), (3, 4, 5)),
    "group norm": (lambda: rt.GroupNorm(2, 4, activation=rg.Activation("leaky_relu", alpha=0.1)), (3, 4, 5)),
    "LSTM": (lambda: rt.LSTM(5, 6, 2, bidirectional=True), (3, 4, 5)),
    "LSTM, options": (
        lambda: rt.LSTM(
            5, 6, batch_first=True, peephole="diagonal", activations=("sigmoid", "sigmoid", "relu", "sigmoid", "tanh")
        ),
        (3, 4, 5),
    ),
    "LSTM, recompute": (lambda: rt.LSTM(5, 6, recompute=True), (3, 4, 5)),
    "LSTM, dropout": (lambda: rt.LSTM(5, 6, 2, dropout=0.3), (3, 4, 5)),
    "LSTM, projection": (lambda: rt.LSTM(5, 6, 2, proj_size=3, bidirectional=True), (3, 4, 5)),
    "GRU": (lambda: rt.GRU(5, 6, 2, bidirectional=True), (3, 4, 5)),
    "GRU, options": (lambda: rt.GRU(5, 6, batch_first=True, kind="before", flip=True, clip=0.5), (3, 4, 5)),
    "GRU, zoneout and dropout": (lambda: rt.GRU(5, 6, 2, zoneout=0.2, dropout=0.3), (3, 4, 5)),
    "GRU, norm": (lambda: rt.GRU(5, 6, norm="haste"), (3, 4, 5)),
    "RNN": (lambda: rt.RNN(5, 6, nonlinearity="relu"), (3, 4, 5)),
    "LSTMCell": (lambda: rt.LSTMCell(5, 6), (4, 5)),
    "GRUCell": (lambda: rt.GRUCell(5, 6), (4, 5)),
    "RNNCell": (lambda: rt.RNNCell(5, 6), (4, 5)),
}


NORMS = [name for name in LAYERS if name.split(",")[0].endswith("norm")]


def make(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    maker, shape = LAYERS[name]
    return maker(), torch.randn(shape)


def run(layer: Any, call: Any, x: Any, seed: int = 3) -> list[Any]:
    """Outputs, gradients and buffers, after a step."""
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    outputs = outputs_of(call(x))
    return [*outputs, *gradients_of(outputs, [x, *layer.parameters()]), *layer.buffers()]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operators_of(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.nodes if "retrograd" in str(node.target)]


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_layers_have_the_same_bits(name: str) -> None:
    """A whole graph, by the compiler's own partition into forward and backward; then with other shapes."""
    layer, x = make(name)
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for found, expected in zip(run(layer, compiled, x), run(eager, eager, x), strict=True):
        assert same_bits(found, expected)
    if "batch" in name or name not in NORMS:
        larger = torch.cat((x, x), 0 if name in NORMS or "Cell" in name else 1)
        for found, expected in zip(run(layer, compiled, larger), run(eager, eager, larger), strict=True):
            assert same_bits(found, expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own
@pytest.mark.parametrize("name", ["batch norm", "LSTM", "GRU", "RNNCell"])
def test_inductor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # another one may know other operators
    layer, x = make(name)
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True)
    for found, expected in zip(run(layer, compiled, x), run(eager, eager, x), strict=True):
        assert_close(found, expected) if found.is_floating_point() else None


def test_compiled_model() -> None:
    """Our layers between PyTorch's, trained for a few steps."""
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = torch.nn.Sequential(torch.nn.Linear(5, 8), rt.LayerNorm(8, activation="gelu"))
            self.lstm = rt.LSTM(8, 6)
            self.head = torch.nn.Linear(6, 2)

        def forward(self, x: Any, lengths: Any) -> Any:
            y, _ = self.lstm(self.features(x), lengths=lengths)
            return self.head(y)

    model = Model()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, target = torch.randn(4, 3, 5), torch.randn(4, 3, 2)
    losses: list[list[float]] = []
    for net, call in ((model, compiled), (eager, eager)):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        losses.append([])
        for step in range(4):
            loss = (call(x, torch.tensor([4, 1 + step % 3, 2])) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("name", [name for name in LAYERS if "dropout" not in name])
def test_export(name: str) -> None:
    layer, x = make(name)
    layer.eval()
    program = torch.export.export(layer, (x,))
    assert operators_of(program.graph) == [f"retrograd.{'norm' if name in NORMS else 'recurrent'}.default"]
    assert same_bits(outputs_of(program.module()(x))[0], outputs_of(layer(x))[0].detach())


def test_export_of_training() -> None:
    """Updates of running statistics are part of the program."""
    layer, x = make("batch norm")
    expected = copy.deepcopy(layer)
    module = torch.export.export(layer, (x,)).module()
    assert same_bits(module(x), expected(x))
    state = module.state_dict()
    for name, buffer in expected.named_buffers():
        assert same_bits(state[name], buffer)


def flat_weights(layer: Any) -> list[Any]:
    return [getattr(layer, name) for name in layer._flat_weights_names]


@pytest.mark.parametrize("name", NORMS)
def test_norm_operators_pass_the_checks_of_torch_library(name: str) -> None:
    layer, x = make(name)
    batched = x if x.dim() > 2 or "batch" in name else x[None]
    kind = name.split(",")[0].replace(" ", "_")
    axis, groups = (2, 1) if kind == "layer_norm" else (1, getattr(layer, "num_groups", 1))
    activation = layer.activation
    fused = (activation.name, activation.alpha, activation.beta) if activation else ("identity", None, None)
    constants = (None, None) if layer.training else (layer.running_mean, layer.running_var)
    arguments = (batched.requires_grad_(), layer.weight, layer.bias, *constants, kind, axis, groups, 1e-5, *fused)
    torch.library.opcheck(torch.ops.retrograd.norm.default, arguments)


def test_update_operator_passes_the_checks_of_torch_library() -> None:
    statistics = torch.rand(2, 4, dtype=torch.float64)
    for momentum, batches in ((0.1, None), (None, torch.tensor(3))):
        arguments = (torch.zeros(4), torch.ones(4), statistics, torch.rand(3, 4, 4), momentum, batches)
        torch.library.opcheck(torch.ops.retrograd.update_running.default, arguments)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_recurrent_operators_pass_the_checks_of_torch_library(name: str, keep: bool, ragged: bool) -> None:
    layer = getattr(rt, name)(5, 6)
    weights = flat_weights(layer) if keep else [w.detach() for w in flat_weights(layer)]
    x, h, c = torch.randn(3, 4, 5, requires_grad=keep), *torch.randn(2, 1, 4, 6)
    lengths = torch.tensor([3, 1, 2, 3]) if ragged else None
    reset, mask = torch.rand(3, 4) < 0.3, torch.rand(1, 1, 4, 6)
    tensors = (x, h, c if name == "LSTM" else None, weights, lengths, None, reset, mask, None)
    parameters = "weight_ih weight_hh bias_ih bias_hh"
    arguments = (*tensors, keep, name, parameters, "", False, False, 0.0, False)
    # A cache has a stamp and unused bytes, so it differs from run to run; the other checks do not compare it.
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"] + ["test_aot_dispatch_dynamic"] * (
        not keep
    )
    torch.library.opcheck(torch.ops.retrograd.recurrent.default, arguments, test_utils=checks)


class Intercepted(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """Sees every operator, as profilers and counters of operations do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_the_second_derivative_of_an_operator_is_an_error() -> None:
    layer, x = make("layer norm")
    x.requires_grad_()
    with Intercepted() as mode:
        y = layer(x)
    assert "retrograd.norm.default" in mode.seen
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="norm: there is no second derivative"):
        dx.sum().backward()


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in LAYERS:
        layer, x = make(name)
        expected = [(y.shape, y.stride(), y.dtype) for y in outputs_of(layer(x))]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            outputs = outputs_of(layer(mode.from_tensor(x)))
        assert [(y.shape, y.stride(), y.dtype) for y in outputs] == expected


def test_traced_graphs_compute_with_their_inputs() -> None:
    """A tracer that runs real tensors sees an operator, not a constant."""
    from torch.fx.experimental.proxy_tensor import make_fx

    layer, x = make("layer norm")
    traced = make_fx(lambda x: layer(x) + 1.0)(x)
    assert operators_of(traced.graph) == ["retrograd.norm.default"]
    other = torch.randn_like(x)
    assert same_bits(traced(other), layer(other) + 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.trace(layer, x)
        assert same_bits(scripted(other), layer(other))


def test_tensor_subclasses() -> None:
    class Tagged(torch.Tensor):
        pass

    layer, x = make("group norm")
    tagged = x.as_subclass(Tagged).requires_grad_()
    y = layer(tagged)
    assert type(y) is Tagged
    assert same_bits(y.detach().as_subclass(torch.Tensor), layer(x).detach())
    y.sum().backward()
    assert tagged.grad is not None


def test_a_wrong_shape_is_refused_while_tracing() -> None:
    compiled = torch.compile(
        lambda x: rt.functional.group_norm(x, 2, torch.ones(5)), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match=r"group_norm: weight has shape \(5,\), expected \(4,\)"):
        compiled(torch.randn(3, 4, 2))
