"""Packed sequences: checks, and dropout between the layers that read them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ._arrays import check_storage
from ._autograd import is_eager

__all__ = ["check_packed", "dropped"]


def dropped(y: Tensor, rate: float, batch_sizes: Tensor | None) -> Tensor:
    """The outputs of a layer, [T, N, H], after the dropout of PyTorch's layer."""
    if batch_sizes is None:
        return torch.nn.functional.dropout(y, rate)
    kept = torch.nn.functional.dropout(y.new_ones(int(batch_sizes.sum()), y.shape[-1]), rate)
    return y * pad_packed_sequence(PackedSequence(kept, batch_sizes))[0]


def _check_made_by_torch(title: str, packed: PackedSequence) -> None:
    """Raise for a PackedSequence that PyTorch did not make: its functions do not check, and end the process."""
    if not (is_eager(packed.data) and is_eager(packed.batch_sizes)):
        return
    for name, tensor in packed._asdict().items():
        if tensor is None:
            continue
        check_storage(tensor, title, f"input.{name}")
        axes = 2 if name == "data" else 1
        if tensor.dim() != axes:
            raise ValueError(f"{title}: input.{name} has shape {tuple(tensor.shape)}, expected {axes} axes")
        if name != "data" and tensor.dtype is not torch.int64:
            raise TypeError(f"{title}: input.{name} has dtype {tensor.dtype}, expected torch.int64")
    sizes = packed.batch_sizes.tolist()
    if not sizes or sizes[-1] < 1 or sizes != sorted(sizes, reverse=True):
        wrong = next((n for n, before in zip(sizes, [math.inf, *sizes], strict=False) if not 0 < n <= before), None)
        found = "is empty" if wrong is None else f"has {wrong} in {_shortened(sizes)}"
        raise ValueError(f"{title}: input.batch_sizes {found}, expected sizes of at least 1 that do not increase")
    if sum(sizes) != len(packed.data):
        raise ValueError(
            f"{title}: input.batch_sizes has the sum {sum(sizes)}, expected {len(packed.data)}, the rows of data"
        )
    for name in ("sorted_indices", "unsorted_indices"):
        indices = getattr(packed, name)
        if indices is not None and sorted(indices.tolist()) != list(range(sizes[0])):
            raise ValueError(
                f"{title}: input.{name} has {_shortened(indices.tolist())}, expected a permutation of {sizes[0]} "
                "samples"
            )


# The values are not known to a compiler, which stops at PyTorch's functions for them anyway.
check_packed: Callable[[str, PackedSequence], None] = torch.compiler.disable(_check_made_by_torch)


def _shortened(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
