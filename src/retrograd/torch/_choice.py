"""Which normalizations run PyTorch's kernel: those where autograd's Python steps cost more than ours saves.

A Python function in autograd takes about 20 µs more than PyTorch's own in C++, and its stable ABI has no autograd.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..ops._norm_problem import NormKind


class _Range(NamedTuple):
    """Numbers of elements for which retrograd's kernel runs."""

    first: float
    end: float = math.inf


_NEVER: Final = _Range(math.inf)
_ALWAYS: Final = _Range(0)
# By kind: one thread, with gradients and without; more threads, with gradients and without. Measured with modules at
# AVX2, PyTorch 2.13. PyTorch's waiting workers slow the threads of others, so more threads need larger sizes.
_RANGES: Final[dict[NormKind, tuple[_Range, _Range, _Range, _Range]]] = {
    "layer_norm": (_Range(3 << 17), _Range(1 << 16, 1 << 20), _Range(1 << 21), _Range(1 << 18, 1 << 19)),
    "group_norm": (_Range(1 << 22), _Range(1 << 22), _Range(1 << 22), _NEVER),
    "batch_norm": (_Range(1 << 17), _NEVER, _Range(1 << 20), _NEVER),
    "instance_norm": (_ALWAYS,) * 4,
}
_LEAST: Final = {kind: min(r.first for r in ranges) for kind, ranges in _RANGES.items()}
_ROWS: Final = 1 << 20  # batch norms without positions, which PyTorch computes in one pass

_chosen: int | None = None


def use_torch_below(elements: int | None) -> None:
    """Run PyTorch's kernel for normalizations of fewer elements; ``None`` restores the measured sizes.

    With 0 every normalization runs retrograd's kernel. Those with an activation, and compiled ones, always do.
    """
    global _chosen
    if elements is not None and (type(elements) is not int or elements < 0):
        raise ValueError(f"use_torch_below: elements is {elements!r}, must be an int of at least 0, or None")
    _chosen = elements


def prefers_torch(kind: NormKind, x: Any, weight: Any, bias: Any) -> bool:
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
    first, end = _RANGES[kind][2 * (torch.get_num_threads() > 1) + (not recorded)]
    if kind == "batch_norm" and size == x.shape[0] * x.shape[1]:
        first = max(first, _ROWS)
    return not first <= size < end
