"""Models with these layers in torch.fx, torch.jit.trace and torch.jit.script."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from support.torch_layers import gradients_of, outputs_of, rt, same_bits, torch

nn: Any = torch.nn

LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "batch norm": (lambda: rt.BatchNorm2d(4, activation="relu"), (3, 4, 5, 5)),
    "batch norm, cumulative": (lambda: rt.BatchNorm1d(4, momentum=None), (3, 4, 5)),
    "instance norm": (lambda: rt.InstanceNorm1d(4, affine=True, track_running_stats=True), (3, 4, 5)),
    "layer norm": (lambda: rt.LayerNorm(5, activation="gelu"), (3, 4, 5)),
    "group norm": (lambda: rt.GroupNorm(2, 4), (3, 4, 5)),
    "synchronised batch norm": (lambda: rt.SyncBatchNorm(4), (3, 4, 5)),
    "LSTM": (lambda: rt.LSTM(5, 6, 2, bidirectional=True), (3, 4, 5)),
    "LSTM, dropout": (lambda: rt.LSTM(5, 6, 2, dropout=0.3), (3, 4, 5)),
    "LSTM, recompute": (lambda: rt.LSTM(5, 6, recompute=True), (3, 4, 5)),
    "LSTM, projection": (lambda: rt.LSTM(5, 6, proj_size=2), (3, 4, 5)),
    "GRU": (lambda: rt.GRU(5, 6, 2, bidirectional=True), (3, 4, 5)),
    "RNN": (lambda: rt.RNN(5, 6, nonlinearity="relu"), (3, 4, 5)),
    "LSTMCell": (lambda: rt.LSTMCell(5, 6), (4, 5)),
    "GRUCell": (lambda: rt.GRUCell(5, 6), (4, 5)),
}


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Identity(), layer)

    def forward(self, x: Any) -> Any:
        y = self.layers(2.0 * x)
        if isinstance(self.layers[1], (rt.LSTM, rt.LSTMCell)):
            y, states = y
            return y + states[0][-1].sum()
        if isinstance(self.layers[1], (rt.GRU, rt.RNN)):
            y, hn = y
            return y + hn[-1].sum()
        return y + 1.0


def make(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    maker, shape = LAYERS[name]
    return Model(maker()), torch.randn(shape)


def assert_same(ours: Any, traced: Any, x: Any) -> None:
    """The same outputs, gradients and buffers in training, then the same outputs in evaluation."""
    results = []
    for model in (ours.train(), traced.train()):
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        outputs = outputs_of(model(given))
        results.append([*outputs, *gradients_of(outputs, [given, *model.parameters()]), *model.buffers()])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


# ---- torch.fx --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_layers_are_leaves_in_torch_fx(name: str) -> None:
    model, x = make(name)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["layers.0", "layers.1"]
    assert type(traced.get_submodule("layers.1")) is type(model.layers[1])
    assert_same(model, traced, x)
    other = torch.randn(5, *x.shape[1:])
    assert same_bits(traced.eval()(other), model.eval()(other))


def test_traced_models_can_be_pickled() -> None:
    model = nn.Sequential(nn.Linear(5, 4), rt.LayerNorm(4, activation="silu"))
    assert_same(model, pickle.loads(pickle.dumps(torch.fx.symbolic_trace(model))), torch.randn(3, 5))


def test_states_and_lengths_in_torch_fx() -> None:
    class Carried(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lstm = rt.LSTM(5, 6)

        def forward(self, x: Any, h: Any, c: Any, lengths: Any) -> Any:
            y, (hn, cn) = self.lstm(x, (h, c), lengths=lengths)
            return y, hn, cn

    model = Carried()
    traced = torch.fx.symbolic_trace(model)
    given = torch.randn(3, 4, 5), torch.randn(1, 4, 6), torch.randn(1, 4, 6), torch.tensor([3, 1, 2, 0])
    for a, b in zip(traced(*given), model(*given), strict=True):
        assert same_bits(a, b)


def test_functions_in_torch_fx() -> None:
    class Functional(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x: Any) -> Any:
            x = rt.functional.layer_norm(x, (5,), activation="relu")
            x = rt.functional.group_norm(x, 2, self.weight)
            x = rt.functional.instance_norm(x)
            return rt.functional.batch_norm(x, self.mean, self.var, self.weight, training=True)

    model = Functional()
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    assert len([node for node in traced.graph.nodes if node.op == "call_function"]) == 4
    assert_same(model, traced, torch.randn(3, 4, 5))


def test_what_torch_fx_cannot_trace_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"LayerNorm: torch\.fx can trace a model with this layer, not"):
        torch.fx.symbolic_trace(rt.LayerNorm(5))
    model, _ = make("layer norm")
    model.layers[1].register_forward_hook(lambda layer, given, y: 2.0 * y)
    with pytest.raises(NotImplementedError, match="LayerNorm: it has hooks, which would run twice"):
        torch.fx.symbolic_trace(model)


# ---- torch.jit -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", sorted(set(LAYERS) - {"synchronised batch norm"}))
def test_traces(name: str, grad: bool) -> None:
    """With gradients and without, whatever the mode was when the model was traced, and for other sizes of batches."""
    model, x = make(name)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(copy.deepcopy(model), (x,))
    traced.load_state_dict(model.state_dict())
    assert_same(model, traced, torch.randn(x.shape[0] + 4, *x.shape[1:]))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", sorted(LAYERS))
def test_scripts_are_refused(name: str) -> None:
    model, _ = make(name)
    kind = type(model.layers[1]).__name__
    message = f"{kind}: torch.jit.script cannot compile retrograd's layers; use torch.jit.trace, torch.compile or"
    for given in (model, model.layers[1]):
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            torch.jit.script(given)
