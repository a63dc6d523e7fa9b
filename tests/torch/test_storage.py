"""Tensors whose storage was freed, or is smaller than their shape and strides need."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from support.torch_layers import gradients_of, outputs_of, rt, same_bits, torch

LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "batch_norm": (lambda: rt.BatchNorm1d(4), (3, 4, 5)),
    "instance_norm": (lambda: rt.InstanceNorm1d(4, affine=True, track_running_stats=True), (3, 4, 5)),
    "layer_norm": (lambda: rt.LayerNorm(5), (3, 4, 5)),
    "group_norm": (lambda: rt.GroupNorm(2, 4, activation="silu"), (3, 4, 5)),
    "LSTM": (lambda: rt.LSTM(5, 6, bidirectional=True), (3, 4, 5)),
    "GRU": (lambda: rt.GRU(5, 6, 2), (3, 4, 5)),
    "RNN": (lambda: rt.RNN(5, 6), (3, 4, 5)),
    "GRUCell": (lambda: rt.GRUCell(5, 6), (3, 5)),
}


def make(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    maker, shape = LAYERS[name]
    return maker(), torch.randn(shape)


def freed(tensor: Any, size: int = 0) -> Any:
    tensor.untyped_storage().resize_(size)
    return tensor


def refusal(name: str, argument: str, size: int, needed: int) -> str:
    return re.escape(f"{name}: {argument} has a storage of {size} bytes, expected at least {needed}")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in sorted(LAYERS)
        for dtype in ["float32", "bfloat16"]
        if dtype != "bfloat16" or "norm" in name
    ],
)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("size", [0, 8])
def test_an_input_without_its_storage_is_refused(name: str, size: int, grad: bool, dtype: str) -> None:
    layer, x = make(name)
    if dtype == "bfloat16":
        x = x.bfloat16()
    expected, needed = outputs_of(layer(x)), x.nbytes
    layer, x = make(name)
    x = x.to(getattr(torch, dtype))
    copy, statistics = x.clone(), [buffer.clone() for buffer in layer.buffers()]
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=refusal(name, "input", size, needed)):
        layer(freed(x, size))
    assert all(same_bits(a, b) for a, b in zip(layer.buffers(), statistics, strict=True))
    x.untyped_storage().resize_(needed)  # the refused tensor can be used again
    x.copy_(copy)
    assert all(same_bits(a, b) for a, b in zip(outputs_of(layer(x)), expected, strict=True))


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_parameters_and_buffers_without_their_storage_are_refused(name: str) -> None:
    """As while a model is sharded, which frees parameters between their uses."""
    names = [key for key, tensor in make(name)[0].state_dict().items() if tensor.dim()]
    assert names
    for key in names:
        layer, x = make(name)
        tensor = layer.state_dict(keep_vars=True)[key]
        needed = tensor.nbytes
        freed(tensor)
        training = [True, False] if "running" in key else [True]
        for mode in training:
            with torch.set_grad_enabled(mode), pytest.raises(ValueError, match=refusal(name, key, 0, needed)):
                layer.train(mode)(x)


@pytest.mark.parametrize("name", ["batch_norm", "layer_norm"])
def test_parameters_and_buffers_in_half_precision(name: str) -> None:
    """These are converted, by PyTorch."""
    for key in [key for key, tensor in make(name)[0].state_dict().items() if tensor.dim()]:
        layer, x = make(name)
        layer = layer.bfloat16()
        tensor = layer.state_dict(keep_vars=True)[key]
        needed = tensor.nbytes
        freed(tensor)
        with pytest.raises(ValueError, match=refusal(name, key, 0, needed)):
            layer(x.bfloat16())


@pytest.mark.parametrize("name", sorted(set(LAYERS) - {"GRUCell"}))
def test_an_outgoing_gradient_without_its_storage_is_refused(name: str) -> None:
    layer, x = make(name)
    x.requires_grad_()
    y = outputs_of(layer(x))[0]
    dy = torch.ones(y.shape)
    needed = dy.nbytes
    with pytest.raises(ValueError, match=refusal(name, "the gradient of the output", 0, needed)):
        gradients_of([y], [x], [freed(dy)])


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_compiled_layers_refuse_too(name: str) -> None:
    layer, x = make(name)
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        compiled(x.clone())
        with pytest.raises(ValueError, match=refusal(name, "input", 0, x.nbytes)):
            compiled(freed(x.clone()))


def test_states_and_lengths_of_an_lstm_and_an_input_that_is_converted() -> None:
    lstm, x = make("LSTM")
    for index in (0, 1):
        states = [torch.zeros(2, 4, 6), torch.zeros(2, 4, 6)]
        freed(states[index])
        with pytest.raises(ValueError, match=refusal("LSTM", f"hx[{index}]", 0, 192)):
            lstm(x, tuple(states))
    with pytest.raises(ValueError, match=refusal("LSTM", "lengths", 0, 32)):
        lstm(x, lengths=freed(torch.tensor([3, 2, 1, 3])))
    with pytest.raises(ValueError, match=refusal("LSTM", "input", 0, x.nbytes)), torch.autocast("cpu"):
        lstm.double()(freed(x.clone()))


def test_tensors_in_part_of_a_storage_and_empty_ones_are_taken() -> None:
    layer = rt.LayerNorm(4)
    base = torch.randn(6, 9)
    for part in (base[2:, 1:5], base[:, 5:], base[1:5, 2:6].t(), base[:1, :4].expand(3, 4), base[6:, :4]):
        assert same_bits(layer(part), layer(part.clone()))
    assert layer(freed(torch.empty(0, 4))).shape == (0, 4)
