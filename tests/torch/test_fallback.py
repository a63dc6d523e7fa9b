"""Calls that PyTorch's own layers compute, because retrograd does not: with a warning, once."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

from retrograd.torch import _autograd
from support.torch_layers import assert_close, outputs_of, rt, same_bits, torch

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "LSTM": (lambda m: m.LSTM(4, 6, 2, bidirectional=True, batch_first=True), (3, 2, 4)),
    "GRU": (lambda m: m.GRU(4, 6), (3, 2, 4)),
    "RNN": (lambda m: m.RNN(4, 6, nonlinearity="relu"), (3, 4)),
    "LSTMCell": (lambda m: m.LSTMCell(4, 6), (2, 4)),
    "GRUCell": (lambda m: m.GRUCell(4, 6), (2, 4)),
    "RNNCell": (lambda m: m.RNNCell(4, 6), (2, 4)),
    "layer_norm": (lambda m: m.LayerNorm(4), (3, 4)),
    "group_norm": (lambda m: m.GroupNorm(2, 4), (3, 4, 5)),
    "batch_norm": (lambda m: m.BatchNorm1d(4).eval(), (3, 4)),
    "instance_norm": (lambda m: m.InstanceNorm1d(4, affine=True), (3, 4, 5)),
}


@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_autograd, "_warned", set())


def pair(name: str) -> tuple[Any, Any, Any]:
    maker, shape = LAYERS[name]
    torch.manual_seed(0)
    theirs, ours = maker(torch.nn), maker(rt)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs, torch.randn(shape)


def total(layer: Any, x: Any) -> Any:
    return sum((y * y).sum() for y in outputs_of(layer(x)))


@pytest.mark.parametrize("name", [name for name in LAYERS if "norm" not in name])
def test_weights_in_half_precision(name: str) -> None:
    ours, theirs, x = pair(name)
    ours, theirs, x = ours.bfloat16(), theirs.bfloat16(), x.bfloat16()
    with pytest.warns(RuntimeWarning, match=f"{name}: its weights are torch.bfloat16, .* PyTorch's own computes"):
        found = outputs_of(ours(x))
    assert all(same_bits(a, b) for a, b in zip(found, outputs_of(theirs(x)), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(x)  # warned already
    assert rt.replace(copy.deepcopy(theirs), verbose=False).left != {}


@pytest.mark.parametrize("name", LAYERS)
def test_transforms_of_functions(name: str) -> None:
    ours, theirs, x = pair(name)
    with pytest.warns(RuntimeWarning, match=rf"{name}: retrograd has no torch\.func transforms"):
        found = torch.func.grad(lambda x: total(ours, x))(x)
    assert_close(found, torch.func.grad(lambda x: total(theirs, x))(x))
    parameters = dict(theirs.named_parameters())
    if "norm" in name:
        calls = [
            lambda p, layer=layer: total(lambda x: torch.func.functional_call(layer, p, (x,)), x)
            for layer in (ours, theirs)
        ]
        first, second = (torch.func.grad(call)(parameters) for call in calls)
        for key in first:
            assert_close(first[key], second[key], key)
        batch = torch.stack([x, 2 * x])
        assert_close(torch.func.vmap(ours)(batch), torch.func.vmap(theirs)(batch))


def test_what_pytorch_has_not_is_refused() -> None:
    x = torch.randn(3, 2, 4)
    message = r"torch\.func transforms"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.grad(lambda x: rt.LayerNorm(4, activation="silu")(x).sum())(x)
    with pytest.raises(NotImplementedError, match=message):
        torch.func.grad(lambda x: rt.LSTM(4, 5, clip=1.0)(x)[0].sum())(x)
    with pytest.raises(NotImplementedError, match=message):
        torch.func.grad(lambda x: rt.LSTM(4, 5)(x, lengths=[3, 1])[0].sum())(x)
    with pytest.raises(NotImplementedError, match="its weights are"):
        rt.LSTM(4, 5, peephole="full").half()(x.half())
