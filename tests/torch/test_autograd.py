"""What autograd and its users expect of a layer."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core
from support.torch_layers import compare, exact, gradients_of, outputs_of, rt, same_bits, torch

_recurrent, _norm = rt._recurrent, rt._norm

# A layer of each kind, in float64, and an input.
MAKERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "batch norm": (lambda: rt.BatchNorm2d(4), (3, 4, 2, 3)),
    "batch norm, activation": (lambda: rt.BatchNorm1d(4, activation="silu"), (5, 4)),
    "batch norm, evaluation": (lambda: rt.BatchNorm2d(4).eval(), (3, 4, 2, 3)),
    "instance norm": (lambda: rt.InstanceNorm1d(4, affine=True), (3, 4, 5)),
    "layer norm": (lambda: rt.LayerNorm((4, 5)), (3, 4, 5)),
    "group norm": (lambda: rt.GroupNorm(2, 4, activation="tanh"), (3, 4, 5)),
    "LSTM": (lambda: rt.LSTM(4, 3, 2, bidirectional=True), (3, 2, 4)),
    "LSTM, peephole": (lambda: rt.LSTM(4, 3, peephole="full", batch_first=True), (3, 2, 4)),
    "LSTM, recompute": (lambda: rt.LSTM(4, 3, recompute=True), (3, 2, 4)),
    "LSTM, projection": (lambda: rt.LSTM(4, 3, 2, proj_size=2, bidirectional=True), (3, 2, 4)),
    "LSTM, clip": (lambda: rt.LSTM(4, 3, clip=0.6, cell_clip=0.4, coupled=True), (3, 2, 4)),
    "GRU": (lambda: rt.GRU(4, 3, 2, bidirectional=True), (3, 2, 4)),
    "GRU, before": (lambda: rt.GRU(4, 3, kind="before", flip=True, batch_first=True), (3, 2, 4)),
    "GRU, zoneout": (lambda: rt.GRU(4, 3, zoneout=0.2).eval(), (3, 2, 4)),
    "RNN": (lambda: rt.RNN(4, 3, 2, bidirectional=True), (3, 2, 4)),
    "LSTM, norm": (lambda: rt.LSTM(4, 3, 2, norm="haste"), (3, 2, 4)),
    "LSTM, norm of the cell state": (lambda: rt.LSTM(4, 3, norm="cell", norm_eps=1e-3), (3, 2, 4)),
    "GRU, norm": (lambda: rt.GRU(4, 3, bidirectional=True, norm="haste"), (3, 2, 4)),
    "RNNCell, norm": (lambda: rt.RNNCell(4, 3, norm="haste"), (2, 4)),
    "RNN, ELU": (lambda: rt.RNN(4, 3, nonlinearity=rg.Activation("elu", alpha=0.7)), (3, 2, 4)),
    "LSTMCell": (lambda: rt.LSTMCell(4, 3), (2, 4)),
    "GRUCell": (lambda: rt.GRUCell(4, 3), (2, 4)),
    "RNNCell": (lambda: rt.RNNCell(4, 3, nonlinearity="relu"), (2, 4)),
}
NORMS = [name for name in MAKERS if name.split(",")[0].endswith("norm")]


def make(name: str, dtype: Any = torch.float64) -> tuple[Any, Any]:
    torch.manual_seed(0)
    maker, shape = MAKERS[name]
    layer = maker().to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer, torch.randn(shape, dtype=dtype, requires_grad=True)


def first(result: Any) -> Any:
    return outputs_of(result)[0]


@pytest.mark.parametrize("name", MAKERS)
def test_gradcheck(name: str) -> None:
    layer, x = make(name)
    names = [key for key, _ in layer.named_parameters()]

    def call(x: Any, *parameters: Any) -> Any:
        result = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))
        return tuple(outputs_of(result))

    assert torch.autograd.gradcheck(call, (x, *layer.parameters()))


@pytest.mark.parametrize("name", MAKERS)
def test_functional_call_uses_the_given_parameters(name: str) -> None:
    layer, x = make(name)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    given = {key: value.clone() for key, value in other.named_parameters()}
    found = torch.func.functional_call(layer, given, (x,))
    assert same_bits(first(found), first(other(x)))
    assert not same_bits(first(layer(x)), first(found))


@pytest.mark.parametrize("name", MAKERS)
def test_copies_and_pickles(name: str) -> None:
    layer, x = make(name)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]
    expected = first(layer(x))
    for again in copies:
        assert type(again) is type(layer)
        assert repr(again) == repr(layer)
        assert same_bits(first(again(x)), expected)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = MAKERS[name][0]().double()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    fresh.train(layer.training)
    assert same_bits(first(fresh(x)), first(layer(x)))


@pytest.mark.parametrize("name", MAKERS)
def test_there_is_no_second_derivative(name: str) -> None:
    """Asking for one is an error; a graph that is created but not differentiated is none."""
    layer, x = make(name)
    y = first(layer(x))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert same_bits(dx.detach(), torch.autograd.grad(first(layer(x)).square().sum(), x)[0])
    with pytest.raises(
        NotImplementedError, match=r"(norm|LSTM|GRU|RNN|Cell): there is no second derivative. Use torch.nn's layer"
    ):
        dx.sum().backward()


@pytest.mark.parametrize("name", MAKERS)
def test_backward_twice(name: str) -> None:
    layer, x = make(name)
    y = first(layer(x))
    once = gradients_of([y], [x])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients_of([y], [x])
    y = first(layer(x))
    dy = torch.ones_like(y)
    twice = [torch.autograd.grad(y, [x, *layer.parameters()], dy, retain_graph=True) for _ in range(2)]
    assert all(same_bits(a, b) for a, b in zip(*twice, strict=True))
    assert once[0].shape == x.shape


@pytest.mark.parametrize("name", MAKERS)
def test_modified_inputs_are_detected(name: str) -> None:
    layer, x = make(name)
    given = x * 1.0
    y = first(layer(given))
    given.mul_(2.0)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.sum().backward()
    y = first(layer(x))
    with torch.no_grad():
        next(layer.parameters()).mul_(2.0)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", NORMS)
def test_outputs_may_be_modified(name: str) -> None:
    """Backward needs x, not y, also with an activation, unless y determines the slope exactly."""
    layer, x = make(name)
    y = layer(x)
    expected = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]
    y.add_(1.0)
    assert same_bits(torch.autograd.grad(y, x, torch.ones_like(y))[0], expected)


@pytest.mark.parametrize("activation", ["relu", "relu6", "leaky_relu"])
def test_a_modified_output_is_detected_where_backward_needs_it(activation: str) -> None:
    """As with PyTorch's ReLU."""
    layer, x = rt.LayerNorm(4, activation=activation), torch.randn(3, 4, requires_grad=True)
    y = layer(x)
    y.add_(1.0)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.sum().backward()


def test_running_statistics_count_their_versions() -> None:
    """An update is an in-place operation like any other."""
    norm = rt.BatchNorm1d(4)
    y = (norm.running_mean * torch.ones(4, requires_grad=True)).sum()
    norm(torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("name", MAKERS)
def test_hooks(name: str) -> None:
    layer, x = make(name)
    seen: list[str] = []
    layer.register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    layer.register_forward_hook(lambda module, inputs, result: seen.append("after"))
    layer.register_full_backward_hook(lambda module, dx, dy: seen.append("backward"))
    parameter = next(layer.parameters())
    parameter.register_hook(lambda gradient: seen.append("parameter") or 2.0 * gradient)
    y = first(layer(x))
    y.sum().backward()
    assert seen[:2] == ["before", "after"]
    assert sorted(seen[2:]) == ["backward", "parameter"]
    plain, x = make(name)
    first(plain(x)).sum().backward()
    assert same_bits(parameter.grad, 2.0 * next(plain.parameters()).grad)


# ---- only what is needed ---------------------------------------------------------------------------------------------


class Watched:
    """The engine of a normalization. Others see the arguments of its calls first."""

    def __init__(self, engine: Any, forward: Any, backward: Any) -> None:
        self.engine, self.forward, self.backward = engine, forward, backward

    def forward_at(self, *arguments: Any) -> Any:
        self.forward(*arguments)
        return self.engine.forward_at(*arguments)

    def backward_at(self, *arguments: Any) -> Any:
        self.backward(*arguments)
        return self.engine.backward_at(*arguments)


def watch_engine(monkeypatch: pytest.MonkeyPatch, forward: Any, backward: Any) -> None:
    problem_of = _norm.problem_of
    monkeypatch.setattr(
        _norm, "problem_of", lambda *a: (p := problem_of(*a))._replace(engine=Watched(p.engine, forward, backward))
    )


def wanted(monkeypatch: pytest.MonkeyPatch, layer: Any, x: Any) -> set[str]:
    """The gradients that a backward pass computes."""
    found: set[str] = set()
    functions = _recurrent.FUNCTIONS["lstm"]

    def norm(*arguments: Any) -> None:
        found.update(name for name, address in zip(("dx", "dgamma", "dbeta"), arguments[8:11], strict=True) if address)

    def lstm(*arguments: Any, need: Any, **options: Any) -> Any:
        found.update(need)
        return functions.backward(*arguments, need=need, **options)

    watch_engine(monkeypatch, lambda *_: None, norm)
    monkeypatch.setitem(_recurrent.FUNCTIONS, "lstm", functions._replace(backward=lstm))
    y = first(layer(x))
    y.backward(torch.ones_like(y))
    return found


def test_gradients_that_nobody_needs_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 2, 4)
    for frozen, needed in (((), {"dgamma", "dbeta"}), (("weight",), {"dbeta"}), (("bias",), {"dgamma"})):
        norm = rt.LayerNorm(4)
        for name in frozen:
            getattr(norm, name).requires_grad_(False)
        with monkeypatch.context() as patch:
            assert wanted(patch, norm, x) == needed
        with monkeypatch.context() as patch:
            assert wanted(patch, norm, x.clone().requires_grad_()) == {*needed, "dx"}
    lstm = rt.LSTM(4, 3, 2)
    with monkeypatch.context() as patch:
        assert wanted(patch, lstm, x) == {"dwx", "dwh", "db"}
    lstm.zero_grad()
    for name, parameter in lstm.named_parameters():
        parameter.requires_grad_(name == "bias_hh_l1")
    with monkeypatch.context() as patch:
        assert wanted(patch, lstm, x) == {"db"}
    assert lstm.bias_hh_l1.grad is not None
    assert lstm.bias_ih_l1.grad is None
    lstm.requires_grad_(False)
    with monkeypatch.context() as patch:
        assert wanted(patch, lstm, x.clone().requires_grad_()) == {"dx"}


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_kept_without_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(name)
    expected = first(layer(x))
    buffers: list[Any] = []
    forward = _core.RecurrentProblem.forward
    monkeypatch.setattr(
        _core.RecurrentProblem, "forward", lambda self, *given: buffers.append(given[1]) or forward(self, *given)
    )
    with torch.no_grad():
        assert same_bits(first(layer(x)), expected.detach())
    with torch.inference_mode():
        assert same_bits(first(layer(x)), expected.detach())
    layer.requires_grad_(False)
    y = first(layer(x.detach()))
    assert same_bits(y, expected.detach())
    assert y.grad_fn is None
    assert buffers == ([] if name in NORMS else [None] * 3)


# ---- other ways to train ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(name: str, reentrant: bool) -> None:
    """Forward runs again before backward. The gradients are those without checkpointing."""
    layer, x = make(name)
    layer.eval()  # a batch norm in training would update its running statistics twice, as PyTorch's does
    plain, y = copy.deepcopy(layer), None
    expected = first(plain(x))
    y = torch.utils.checkpoint.checkpoint(lambda x: first(layer(x)), x, use_reentrant=reentrant)
    y.backward(torch.ones_like(y))
    found = [x.grad, *(p.grad for p in layer.parameters())]
    x.grad = None
    expected.backward(torch.ones_like(expected))
    assert all(same_bits(a, b) for a, b in zip(found, [x.grad, *(p.grad for p in plain.parameters())], strict=True))


def test_checkpointing_frees_what_backward_needs() -> None:
    """The LSTM's cache is a saved tensor, so hooks on saved tensors see it."""
    lstm, x = rt.LSTM(4, 3), torch.randn(3, 2, 4, requires_grad=True)
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        lstm(x)
    assert [t.dtype for t in saved].count(torch.uint8) == 1
    assert any(t.data_ptr() == x.data_ptr() for t in saved)


@pytest.mark.parametrize("name", [name for name in MAKERS if "evaluation" not in name])
def test_autocast(name: str) -> None:
    """Under autocast the arithmetic is float32: a norm of bfloat16 gives bfloat16, a recurrent layer float32."""
    layer, x = make(name, torch.float32)
    low = x.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = first(copy.deepcopy(layer)(low))
    expected = first(copy.deepcopy(layer)(low.detach().float()))
    assert y.dtype is (torch.bfloat16 if name in NORMS else torch.float32)
    assert same_bits(y.float(), expected.to(y.dtype).float())
    y.sum().backward()
    assert low.grad.dtype is torch.bfloat16


def test_mixed_precision_model() -> None:
    """A whole model under autocast: PyTorch's linear layers in bfloat16, retrograd's between them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), rt.LayerNorm(8), torch.nn.Linear(8, 3))
    lstm = rt.LSTM(3, 4)
    x = torch.randn(5, 2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = lstm(model(x))
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in (*model.parameters(), *lstm.parameters()))
    with torch.no_grad():
        assert float((y - lstm(model(x))[0]).abs().max()) < 0.05  # a few units of bfloat16, 2**-8


def test_an_input_without_gradient_and_one_used_twice() -> None:
    ours, theirs = rt.LayerNorm(4), exact(torch.nn.LayerNorm(4))
    compare(ours.double(), theirs, [torch.randn(3, 4, dtype=torch.float64)], lambda layer, x: layer(layer(x) + x))


def test_an_lstm_copies_no_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []
    forward, backward = _core.RecurrentProblem.forward, _core.RecurrentProblem.backward

    def addresses(arguments: Any) -> set[int]:
        """Of arrays in nested tuples and lists."""
        found: set[int] = set()
        for part in arguments:
            if isinstance(part, (tuple, list)):
                found |= addresses(part)
            elif isinstance(part, np.ndarray):
                found.add(part.ctypes.data)
        return found

    monkeypatch.setattr(_core.RecurrentProblem, "forward", lambda *a: seen.append(addresses(a)) or forward(*a))
    monkeypatch.setattr(_core.RecurrentProblem, "backward", lambda *a: seen.append(addresses(a)) or backward(*a))
    lstm, x = rt.LSTM(4, 3), torch.randn(5, 2, 4, requires_grad=True)
    y, (hn, cn) = lstm(x)
    dy = torch.randn_like(y)
    dx, dwh = torch.autograd.grad(y, (x, lstm.weight_hh_l0), dy)
    weights = {lstm.weight_ih_l0.data_ptr(), lstm.weight_hh_l0.data_ptr()}
    assert {t.data_ptr() for t in (x, y, hn, cn)} | weights <= seen[0]
    assert {t.data_ptr() for t in (x, dy, dx, dwh)} | weights <= seen[1]


def test_inputs_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reads and writes the tensors' own memory."""
    seen: list[set[int]] = []

    watch_engine(
        monkeypatch,
        lambda *given: seen.append(set(given[:4])),
        lambda *given: seen.append({given[0], given[1], given[3], given[8]}),
    )
    for norm, x in (
        (rt.BatchNorm2d(4), torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)),
        (rt.GroupNorm(2, 4), torch.randn(3, 4, 3, 6)[1:]),
        (rt.LayerNorm(3), torch.randn(2, 4, 3, 3, dtype=torch.float32)),
    ):
        x.requires_grad_()
        y = norm(x)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert {t.data_ptr() for t in (x, y, norm.weight, norm.bias)} == seen.pop(0)
        assert {t.data_ptr() for t in (x, dy, dx, norm.weight)} == seen.pop(0)
    assert not seen
