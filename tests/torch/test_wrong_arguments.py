"""What is not a model, a choice of layers or a tensor is named before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd import nn
from support.torch_layers import rt, torch


@pytest.mark.parametrize("function", [rt.replace, rt.restore])
@pytest.mark.parametrize(
    ("model", "found"),
    [
        (None, "model is a NoneType, must be a torch.nn.Module"),
        ([torch.nn.LSTM(4, 3)], "model is a list, must be a torch.nn.Module"),
        (nn.Linear(4, 3), "model is a Linear, must be a torch.nn.Module"),
        (torch.nn.LSTM, "model is the class LSTM, must be a model, an instance of one"),
    ],
)
def test_what_is_no_model(function: Any, model: Any, found: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{function.__name__}: {found}")):
        function(model)


def replaced(only: Any) -> object:
    return rt.replace(torch.nn.LSTM(4, 3), only=only)


@pytest.mark.parametrize("function", [replaced, lambda only: rt.patch(only=only)], ids=["replace", "patch"])
@pytest.mark.parametrize(
    ("only", "found"),
    [
        (3, "only is 3, must be a class, a pattern, a function or several of these"),
        ([3], "only is 3, must be a class, a pattern, a function or several of these"),
        (b"lstm", "only is b'lstm', must be a class, a pattern"),
        (torch.nn.LSTM(4, 3), "only is a layer, LSTM(); give its class, or its name"),
    ],
)
def test_what_is_no_choice_of_layers(function: Callable[[Any], object], only: Any, found: str) -> None:
    name = "replace" if function is replaced else "patch"
    with pytest.raises(TypeError, match=re.escape(f"{name}: {found}")):
        function(only)
    assert type(torch.nn.LSTM(4, 3)) is torch.nn.LSTM  # nothing is patched


@pytest.mark.parametrize(
    "layer",
    [rt.LSTM(4, 3), rt.GRU(4, 3), rt.RNN(4, 3), rt.LSTMCell(4, 3), rt.LayerNorm(4), rt.BatchNorm1d(4),
     rt.InstanceNorm1d(4), rt.GroupNorm(2, 4)],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_what_is_no_tensor(layer: Any) -> None:
    with pytest.raises(TypeError, match="input is None, must be a tensor"):
        layer(None)
    with pytest.raises(TypeError, match=re.escape("input is a ndarray, must be a tensor; write torch.from_numpy(x)")):
        layer(np.ones((5, 4), np.float32))


def test_masks_and_sequences_are_tensors() -> None:
    x = torch.ones(5, 2, 4)
    with pytest.raises(TypeError, match="LSTM: mask is a ndarray, must be a tensor"):
        rt.LSTM(4, 3)(x, mask=np.ones(3, np.float32))
    with pytest.raises(TypeError, match="GRU: reset is a ndarray, must be a tensor"):
        rt.GRU(4, 3)(x, reset=np.ones((5, 2), bool))
    with pytest.raises(TypeError, match="scan: a is None, must be a tensor"):
        rt.scan(None, x)
    with pytest.raises(TypeError, match="scan: h0 is a ndarray, must be a tensor"):
        rt.scan(x, x, np.ones((2, 4), np.float32))
