"""Which calls run PyTorch's kernel: those where autograd's Python steps cost more than retrograd's kernel saves.

A Python function in autograd takes about 20 µs more than PyTorch's own in C++, and its stable ABI has no autograd.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

# A batch norm is frozen if it normalizes by its running statistics.
Kind: TypeAlias = Literal["layer_norm", "group_norm", "batch_norm", "frozen_batch_norm", "instance_norm"]


class _Range(NamedTuple):
    """Numbers of elements for which retrograd's kernel runs."""

    first: float
    end: float = math.inf


class _Ranges(NamedTuple):
    """With one thread or more, with gradients or without."""

    one: _Range
    one_without: _Range
    more: _Range
    more_without: _Range


def _ranges(one: int, one_without: tuple[int, int], more: int, more_without: tuple[int, int]) -> _Ranges:
    """From powers of two. PyTorch's waiting workers slow the threads of others, so more threads need larger sizes."""
    return _Ranges(
        _Range(2**one),
        _Range(2 ** one_without[0], 2 ** one_without[1]),
        _Range(2**more),
        _Range(2 ** more_without[0], 2 ** more_without[1]),
    )


_NO: Final = (63, 63)
_NEVER: Final = _ranges(63, _NO, 63, _NO)
# Where retrograd's module took less time at AVX2 and at AVX-512, PyTorch 2.13. Contiguous: contiguous tensors with
# positions or rows in a channel. Others: tensors in another order, and batch norms of rows.
_CONTIGUOUS: Final[dict[Kind, _Ranges]] = {
    "layer_norm": _ranges(20, (16, 20), 21, (18, 19)),
    "group_norm": _ranges(22, (16, 20), 22, _NO),
    "batch_norm": _ranges(17, _NO, 20, _NO),
    "frozen_batch_norm": _ranges(23, _NO, 23, _NO),
    "instance_norm": _ranges(14, (12, 63), 14, (12, 63)),
}
_OTHERS: Final[dict[Kind, _Ranges]] = {
    "layer_norm": _ranges(17, _NO, 21, _NO),
    "group_norm": _ranges(20, (16, 18), 21, _NO),
    "batch_norm": _ranges(22, _NO, 22, _NO),
    "frozen_batch_norm": _ranges(23, _NO, 23, _NO),
    "instance_norm": _ranges(14, (12, 63), 14, (12, 63)),
}
# In half precision PyTorch converts in fewer passes.
_HALF_OTHERS: Final[dict[Kind, _Ranges]] = {
    "layer_norm": _ranges(17, _NO, 63, _NO),
    "group_norm": _ranges(14, (14, 18), 16, _NO),
}
_LEAST: Final = {
    kind: min(r.first for one in (_CONTIGUOUS, _OTHERS, _HALF_OTHERS) for r in one.get(kind, _NEVER))
    for kind in _CONTIGUOUS
}
_HALF: Final = (torch.bfloat16, torch.float16)
_NARROW: Final = 64  # layer norms of fewer features
_LEAST_NARROW: Final = 1 << 22  # need so many elements, with gradients

# Single steps. For one sample PyTorch calls a product of a matrix and a vector, which retrograd does not have.
_VECTOR_UNITS: Final = 256
_RNN_STEP: Final = 1 << 13  # elements of the state of an RNN layer, with gradients

_chosen: int | None = None


def use_torch_below(elements: int | None) -> None:
    """Run PyTorch's kernel for normalizations of fewer elements; ``None`` restores the measured sizes.

    With 0 every normalization runs retrograd's kernel. Those with an activation, and compiled ones, always do. With a
    number, recurrent layers do too; with ``None``, PyTorch's computes a few kinds of single steps.
    """
    global _chosen
    if elements is not None and (type(elements) is not int or elements < 0):
        raise ValueError(f"use_torch_below: elements is {elements!r}, must be an int of at least 0, or None")
    _chosen = elements


def prefers_torch(kind: Kind, x: Any, weight: Any, bias: Any) -> bool:
    """Whether PyTorch's kernel takes less time for this input, or the same."""
    # A size in a graph would be a constant of it. Operators have no such choice.
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    size = x.numel()
    if _chosen is not None:
        return size < _chosen
    if size < _LEAST[kind]:
        return True
    recorded = torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    )
    shape = x.shape
    if not x.is_contiguous() or (kind == "batch_norm" and len(shape) > 1 and size == shape[0] * shape[1]):
        ranges = (_HALF_OTHERS if x.dtype in _HALF else _OTHERS).get(kind, _NEVER)
    else:
        ranges = _NEVER if x.dtype in _HALF else _CONTIGUOUS[kind]
    first, end = ranges[2 * (torch.get_num_threads() > 1) + (not recorded)]
    if kind == "layer_norm" and recorded and shape[-1] < _NARROW:
        first = max(first, _LEAST_NARROW)
    return not first <= size < end


def step_prefers_torch(layer: str, samples: int, units: int, recorded: bool) -> bool:
    """Whether PyTorch's layer takes less time for a single step of so many samples and units."""
    if _chosen is not None or layer == "LSTM":  # PyTorch's LSTM calls oneDNN, which takes longer
        return False
    if samples == 1 and (units >= _VECTOR_UNITS or (layer == "RNNCell" and recorded)):
        return True
    return layer == "RNN" and recorded and samples * units < _RNN_STEP
