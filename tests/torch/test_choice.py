"""Which normalizations run PyTorch's kernel, and that they compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.nn.utils import prune

from support.torch_layers import assert_close, gradients_of, outputs_of, rt, same_bits, torch


@pytest.fixture(autouse=True)
def measured_sizes() -> Iterator[None]:
    rt.use_torch_below(None)
    yield
    rt.use_torch_below(0)


def name_of(y: Any) -> str:
    return str(type(y.grad_fn).__name__)


CASES = {
    "LayerNorm": ((64,), (7, 64), (1 << 15, 64)),
    "GroupNorm": ((2, 8), (3, 8, 5), (1 << 10, 8, 513)),
    "BatchNorm1d": ((8,), (3, 8, 5), (1 << 7, 8, 129)),
    "BatchNorm2d": ((8,), (3, 8, 5, 2), (1 << 7, 8, 43, 3)),
    "InstanceNorm2d": ((8,), (3, 8, 5, 2), (1 << 7, 8, 43, 3)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_small_normalizations_are_pytorchs(name: str) -> None:
    arguments, small, large = CASES[name]
    torch.manual_seed(0)
    ours, theirs = getattr(rt, name)(*arguments), getattr(torch.nn, name)(*arguments)
    x = torch.randn(small, requires_grad=True)
    y, z = ours(x), theirs(x)
    assert name_of(y) == name_of(z) != "_NormBackward"
    assert same_bits(y, z)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert same_bits(a, b)
    x = torch.randn(large, requires_grad=True)
    y, z = ours(x), theirs(x)
    assert name_of(y) == "_NormBackward"
    assert_close(y, z)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    outgoing = [torch.randn_like(y)]
    found, expected = gradients_of([y], [x], outgoing), gradients_of([z], [x], outgoing)
    assert_close(found[0], expected[0])


def test_the_size_can_be_chosen() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    norm = rt.LayerNorm(6)
    for below, name in ((24, "_NormBackward"), (25, "NativeLayerNormBackward0"), (0, "_NormBackward")):
        rt.use_torch_below(below)
        assert name_of(norm(x)) == name
        assert name_of(rt.functional.layer_norm(x, (6,), norm.weight, norm.bias)) == name
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="use_torch_below: elements is"):
            rt.use_torch_below(wrong)


def test_fused_and_compiled_normalizations_are_retrograds() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    assert name_of(rt.LayerNorm(6, activation="tanh")(x)) == "_NormBackward"
    graphs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.code))
        return graph

    torch.compile(rt.LayerNorm(6), backend=backend, fullgraph=True)(x)
    assert "retrograd.norm" in graphs[0]


def kernel_of(layer: Any, x: Any) -> bool:
    """Whether retrograd's kernel runs."""
    return name_of(layer(x)) == "_NormBackward"


def test_memory_orders_and_types_have_sizes_of_their_own() -> None:
    x = torch.randn(8, 64, 32, 32, requires_grad=True)
    norm = rt.BatchNorm2d(64)
    assert kernel_of(norm, x)
    assert not kernel_of(norm, x.detach().to(memory_format=torch.channels_last))
    assert not kernel_of(norm.bfloat16(), x.detach().bfloat16())
    assert not kernel_of(rt.BatchNorm2d(64).eval(), x)
    assert kernel_of(rt.BatchNorm2d(64, track_running_stats=False).eval(), x)
    layer = rt.LayerNorm(64)
    assert not kernel_of(layer, x.detach().view(-1, 64))
    assert kernel_of(layer, x.permute(0, 2, 3, 1))
    assert not kernel_of(rt.LayerNorm(32), torch.randn(1 << 16, 32))
    assert kernel_of(rt.LayerNorm(64), torch.randn(1 << 15, 64))
    for wrong in (torch.randn(1 << 18), torch.randn(())):
        with pytest.raises(ValueError, match=r"expected 4D input"):
            norm(wrong)
        with pytest.raises(ValueError, match="batch_norm: input has shape"):
            rt.functional.batch_norm(wrong, None, None, training=True)


@pytest.mark.parametrize(
    ("kind", "arguments", "shape"),
    [
        ("BatchNorm2d", (4,), (3, 4, 2, 2)),
        ("BatchNorm1d", (4, 1e-3, None), (3, 4)),
        ("BatchNorm1d", (4, 1e-3, 0.1, False), (3, 4)),
        ("BatchNorm1d", (4, 1e-3, 0.1, True, False), (3, 4)),
        ("InstanceNorm1d", (4, 1e-3, 0.1, True, True), (3, 4, 5)),
        ("LayerNorm", (4, 1e-3, False), (3, 4)),
        ("GroupNorm", (2, 4, 1e-3, False), (3, 4)),
    ],
)
@pytest.mark.parametrize("changed", ["nothing", "parametrized", "pruned", "a plain buffer"])
def test_options_and_parameters_of_small_normalizations(kind: str, arguments: Any, shape: Any, changed: str) -> None:
    """PyTorch's results, its gradients and its running statistics, in training and in evaluation."""
    torch.manual_seed(0)
    found = []
    for module in (torch.nn, rt):
        layer = getattr(module, kind)(*arguments)
        if layer._parameters.get("weight") is not None:
            with torch.no_grad():
                layer.weight.copy_(torch.linspace(1, 2, 4))
            if changed == "parametrized":
                torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Tanh())
            elif changed == "pruned":
                prune.l1_unstructured(layer, "weight", 2)
        if changed == "a plain buffer" and layer._buffers.get("running_mean") is not None:
            mean = layer.running_mean
            del layer.running_mean
            layer.running_mean = mean.clone()
        torch.manual_seed(1)
        x = torch.randn(shape, requires_grad=True)
        outputs = [layer(x), layer.eval()(x)]
        parameters = [p for p in layer.parameters() if p.requires_grad]
        found.append([*outputs, *gradients_of(outputs, [x, *parameters]), *layer.buffers()])
    assert name_of(found[1][0]) == name_of(found[0][0])
    for a, b in zip(*found, strict=True):
        assert same_bits(a, b)


def test_one_value_per_channel_is_refused_as_by_pytorch() -> None:
    for layer, x in ((rt.BatchNorm1d(4), torch.randn(1, 4)), (rt.GroupNorm(2, 4), torch.randn(1, 2))):
        with pytest.raises((ValueError, RuntimeError), match=r"Expected more than 1 value per channel|number of"):
            layer(x)


def test_a_result_can_be_viewed_and_changed_in_place() -> None:
    """Large results are in reused memory, which must not be a view for autograd."""
    x = torch.randn(1 << 9, 64, 32).transpose(1, 2).requires_grad_()
    y = rt.LayerNorm(64)(x)
    assert y.nbytes >= 1 << 20
    assert y.view(-1, 64).shape == (1 << 14, 64)
    expected = torch.relu(torch.nn.LayerNorm(64)(x))
    assert_close(y.relu_(), expected)
    outgoing = [torch.randn_like(y)]
    assert_close(gradients_of([y], [x], outgoing)[0], gradients_of([expected], [x], outgoing)[0])


@pytest.mark.parametrize(
    ("layer", "shape", "torchs"),
    [
        (rt.GRU(8, 256), (1, 1, 8), True),
        (rt.GRU(8, 256, batch_first=True), (2, 1, 8), False),  # one step of two samples
        (rt.GRU(8, 256), (2, 1, 8), False),
        (rt.GRU(8, 128), (1, 8), False),
        (rt.GRU(8, 256, 2, bidirectional=True), (1, 8), True),
        (rt.GRU(8, 256, clip=9.0), (1, 8), False),
        (rt.LSTM(8, 256), (1, 8), False),
        (rt.RNN(8, 16), (1, 32, 8), True),
        (rt.RNN(8, 16, nonlinearity="relu", batch_first=True), (32, 1, 8), True),
        (rt.RNN(8, 16, nonlinearity="sigmoid"), (1, 32, 8), False),
        (rt.RNN(8, 512), (1, 32, 8), False),
        (rt.LSTMCell(8, 256), (1, 8), True),
        (rt.LSTMCell(8, 256), (8,), True),
        (rt.LSTMCell(8, 256), (2, 8), False),
        (rt.LSTMCell(8, 16), (1, 8), False),
        (rt.LSTMCell(8, 256, peephole="diagonal"), (1, 8), False),
        (rt.RNNCell(8, 16), (1, 8), True),
        (rt.RNNCell(8, 16), (2, 8), False),
    ],
    ids=str,
)
def test_single_steps(layer: Any, shape: tuple[int, ...], torchs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    forward = rt.recurrent.Recurrent._torch_forward
    monkeypatch.setattr(rt.recurrent.Recurrent, "_torch_forward", lambda *given: calls.append(1) or forward(*given))
    x = torch.randn(shape)
    y = layer(x)
    assert len(calls) == torchs
    rt.use_torch_below(0)
    assert_close(outputs_of(y)[0], outputs_of(layer(x))[0])
    assert len(calls) == torchs
    rt.use_torch_below(None)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert_close(outputs_of(compiled(x))[0], outputs_of(y)[0])
    assert len(calls) == torchs
    torch._dynamo.reset()
