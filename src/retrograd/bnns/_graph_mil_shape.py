"""The operations of MIL that move elements: shapes, slices, joining, gather and scatter. See ``_graph_mil``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .. import graph as G
from ..graph import Tensor
from ..graph.tensor import current_graph
from ..ops._types import Array
from ._graph_mil import BOOL, I32, OPERATIONS, as_dtype, axis_of, bools, by_floats, ints, mil

__all__ = ["OPERATIONS"]

_MOST: Final = 1 << 26  # elements of a range

# ---- shapes ----------------------------------------------------------------------------------------------------------


@mil
def _shape(x: Tensor) -> Tensor:
    return _constant(np.asarray(x.shape, I32))


def _constant(value: Array) -> Tensor:
    """A tensor inside a trace, else the array."""
    return value if current_graph() is None else G.constant(value)  # type: ignore[return-value]


@mil
def _reshape(x: Tensor, *, shape: Any) -> Tensor:
    """A size of 0 is that of the same axis of x."""
    wanted = ints(shape)
    if 0 in wanted and x.size and len(wanted) == x.ndim:
        wanted = tuple(n or x.shape[i] for i, n in enumerate(wanted))
    return G.reshape(x, wanted)


@mil
def _reshape_like(x: Tensor, *ref_tensors: Tensor, begins: Any, ends: Any, end_masks: Any) -> Tensor:
    parts = zip(ref_tensors, begins, ends, end_masks, strict=True)
    shapes = [t.shape[int(b) :] if mask else t.shape[int(b) : int(e)] for t, b, e, mask in parts]
    return G.reshape(x, [n for shape in shapes for n in shape])


@mil
def _flatten2d(x: Tensor, *, axis: int = 1) -> Tensor:
    lead = x.shape[: int(axis)]
    return G.reshape(x, (math.prod(lead), math.prod(x.shape[len(lead) :])))


@mil
def _expand_dims(x: Tensor, *, axes: Any) -> Tensor:
    return G.expand_dims(x, ints(axes))


@mil
def _squeeze(x: Tensor, *, axes: Any = None) -> Tensor:
    """Axes of another size than 1 stay, as in PyTorch."""
    given = range(x.ndim) if axes is None else {axis_of(a, x.ndim) for a in ints(axes)}
    return G.squeeze(x, [a for a in given if x.shape[a] == 1])


@mil
def _transpose(x: Tensor, *, perm: Any) -> Tensor:
    return G.transpose(x, ints(perm))


@mil
def _reverse(x: Tensor, *, axes: Any = None) -> Tensor:
    return G.flip(x, None if axes is None else ints(axes))


@mil
def _reverse_sequence(x: Tensor, lengths: Tensor, *, seq_axis: int = 0, batch_axis: int = 0) -> Tensor:
    time, batch = axis_of(seq_axis, x.ndim), axis_of(batch_axis, x.ndim)

    def along(axis: int) -> tuple[int, ...]:
        return tuple(-1 if i == axis else 1 for i in range(x.ndim))

    steps = np.arange(x.shape[time], dtype=I32).reshape(along(time))
    ends = G.reshape(lengths, along(batch))
    places = G.where(G.greater(ends, steps), G.subtract(G.subtract(ends, 1), steps), steps)
    return G.take_along_axis(x, G.broadcast_to(places, x.shape), time)


# ---- blocks of images ------------------------------------------------------------------------------------------------


def _blocks(x: Tensor, shape: Sequence[int], order: Sequence[int], result: Sequence[int]) -> Tensor:
    return G.reshape(G.transpose(G.reshape(x, shape), order), result)


@mil
def _depth_to_space(x: Tensor, *, block_size: int) -> Tensor:
    (n, c, h, w), b = x.shape, int(block_size)
    return _blocks(x, (n, b, b, c // b**2, h, w), (0, 3, 4, 1, 5, 2), (n, c // b**2, h * b, w * b))


@mil
def _space_to_depth(x: Tensor, *, block_size: int) -> Tensor:
    (n, c, h, w), b = x.shape, int(block_size)
    return _blocks(x, (n, c, h // b, b, w // b, b), (0, 3, 5, 1, 2, 4), (n, c * b**2, h // b, w // b))


@mil
def _pixel_shuffle(x: Tensor, *, upscale_factor: int) -> Tensor:
    (n, c, h, w), b = x.shape, int(upscale_factor)
    return _blocks(x, (n, c // b**2, b, b, h, w), (0, 1, 4, 2, 5, 3), (n, c // b**2, h * b, w * b))


@mil
def _pixel_unshuffle(x: Tensor, *, downscale_factor: int) -> Tensor:
    (n, c, h, w), b = x.shape, int(downscale_factor)
    return _blocks(x, (n, c, h // b, b, w // b, b), (0, 1, 3, 5, 2, 4), (n, c * b**2, h // b, w // b))


@mil
def _space_to_batch(x: Tensor, *, block_shape: Any, paddings: Any) -> Tensor:
    (p, q), (top, bottom, left, right) = ints(block_shape), ints(paddings)
    n, c, h, w = (padded := G.pad(x, [(0, 0), (0, 0), (top, bottom), (left, right)])).shape
    return _blocks(padded, (n, c, h // p, p, w // q, q), (3, 5, 0, 1, 2, 4), (n * p * q, c, h // p, w // q))


@mil
def _batch_to_space(x: Tensor, *, block_shape: Any, crops: Any) -> Tensor:
    (p, q), (top, bottom, left, right), (n, c, h, w) = ints(block_shape), ints(crops), x.shape
    whole = _blocks(x, (p, q, n // (p * q), c, h, w), (2, 3, 4, 0, 5, 1), (n // (p * q), c, h * p, w * q))
    return G.take_slice(whole, (..., slice(top, h * p - bottom), slice(left, w * q - right)))


# ---- slices ----------------------------------------------------------------------------------------------------------


def _index(
    x: Tensor, begin: Any, end: Any, stride: Any, begin_mask: Any, end_mask: Any, squeeze_mask: Any
) -> tuple[int | slice, ...]:
    """NumPy's index for a slice with masks."""
    n = x.ndim
    starts, ends = ints(begin), ints(end)
    steps = (1,) * n if stride is None else ints(stride)
    masks = [bools(mask, n) for mask in (begin_mask, end_mask, squeeze_mask)]
    for name, given in zip(("begin", "end", "stride"), (starts, ends, steps), strict=True):
        if len(given) != n:
            raise ValueError(f"{name} has {len(given)} elements, but x has shape {x.shape}")
    index: list[int | slice] = []
    for start, stop, step, open_start, open_end, single in zip(starts, ends, steps, *masks, strict=True):
        if single:
            index.append(0 if open_start else start)
        else:
            index.append(slice(None if open_start else start, None if open_end else stop, step))
    return tuple(index)


@mil
def _slice_by_index(
    x: Tensor,
    *,
    begin: Any,
    end: Any,
    stride: Any = None,
    begin_mask: Any = None,
    end_mask: Any = None,
    squeeze_mask: Any = None,
) -> Tensor:
    return G.take_slice(x, _index(x, begin, end, stride, begin_mask, end_mask, squeeze_mask))


@mil
def _slice_by_size(x: Tensor, *, begin: Any, size: Any) -> Tensor:
    starts = [b + n if b < 0 else b for b, n in zip(ints(begin), x.shape, strict=True)]
    stops = [n if s == -1 else b + s for b, s, n in zip(starts, ints(size), x.shape, strict=True)]
    if any(stop > n or start > stop for start, stop, n in zip(starts, stops, x.shape, strict=True)):
        raise ValueError(f"begin is {starts} and size {list(ints(size))}, but x has shape {x.shape}")
    return G.take_slice(x, tuple(slice(a, b) for a, b in zip(starts, stops, strict=True)))


@mil
def _sliding_windows(x: Tensor, *, axis: int, size: int, stride: int = 1) -> Tensor:
    number = axis_of(axis, x.ndim)
    count = (x.shape[number] - int(size)) // int(stride) + 1
    places = np.arange(count)[:, None] * int(stride) + np.arange(int(size))
    return G.take(x, places, number)


@mil
def _split(x: Tensor, *, axis: int, num_splits: Any = None, split_sizes: Any = None) -> list[Tensor]:
    number = axis_of(axis, x.ndim)
    if split_sizes is None:
        return G.split(x, int(num_splits), number)
    sizes = ints(split_sizes)
    if sum(sizes) != x.shape[number] or min(sizes, default=0) < 0:
        raise ValueError(f"split_sizes is {list(sizes)}, but axis {number} of x has size {x.shape[number]}")
    return G.split(x, [int(v) for v in np.cumsum(sizes)[:-1]], number)


@mil
def _slice_update(
    x: Tensor,
    update: Tensor,
    *,
    begin: Any,
    end: Any,
    stride: Any = None,
    begin_mask: Any = None,
    end_mask: Any = None,
    squeeze_mask: Any = None,
) -> Tensor:
    index = _index(x, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    expected = tuple(
        len(range(*part.indices(n))) for part, n in zip(index, x.shape, strict=True) if isinstance(part, slice)
    )
    if update.shape != expected:
        raise ValueError(f"update has shape {update.shape}, but the slice of x has {expected}")
    whole = [part if isinstance(part, slice) else _single(part, n) for part, n in zip(index, x.shape, strict=True)]
    kept = [len(range(*part.indices(n))) for part, n in zip(whole, x.shape, strict=True)]
    starts, ends, steps = zip(*((part.start, part.stop, part.step or 1) for part in whole), strict=True)
    return G.slice_update(x, G.reshape(update, kept), starts, ends, steps)


def _single(place: int, size: int) -> slice:
    if not -size <= place < size:
        raise ValueError(f"begin is {place}, but the axis has size {size}")
    return slice(place % size, place % size + 1)


@mil
def _band_part(x: Tensor, *, lower: int = -1, upper: int = -1) -> Tensor:
    return G.band_part(x, int(lower), int(upper))


# ---- joining ---------------------------------------------------------------------------------------------------------


@mil
def _concat(*values: Tensor, axis: int, interleave: bool = False) -> Tensor:
    if values[0].ndim == 0:
        return G.stack(values, 0)
    number = axis_of(axis, values[0].ndim)
    if not interleave:
        return G.concatenate(values, number)
    shape = list(values[0].shape)
    shape[number] *= len(values)
    return G.reshape(G.stack(values, number + 1), shape)


@mil
def _stack(*values: Tensor, axis: int) -> Tensor:
    return G.stack(values, int(axis))


@mil
def _tile(x: Tensor, *, reps: Any) -> Tensor:
    return G.tile(x, ints(reps))


_MODES: Final = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


@mil
def _pad(x: Tensor, *, pad: Any, mode: str = "constant", constant_val: float = 0.0) -> Tensor:
    """`pad` is for the last axes."""
    given = ints(pad)
    if len(given) % 2 or len(given) > 2 * x.ndim:
        raise ValueError(f"pad is {list(given)}, must have two numbers for each of the last axes of x, {x.shape}")
    if mode not in _MODES:
        raise ValueError(f"mode is {mode!r}, must be one of {', '.join(_MODES)}")
    pairs = [(0, 0)] * (x.ndim - len(given) // 2) + list(zip(given[::2], given[1::2], strict=True))
    if mode == "reflect" and any(max(pair) >= n for pair, n in zip(pairs, x.shape, strict=True) if any(pair)):
        raise ValueError(f"pad is {list(given)}, too much to reflect x of shape {x.shape}")
    return by_floats(lambda t: G.pad(t, pairs, _MODES[mode], float(constant_val)), x)


# ---- values ----------------------------------------------------------------------------------------------------------


@mil
def _fill(*, shape: Any, value: Any = 0.0) -> Tensor:
    return _filled(ints(shape), value)


@mil
def _fill_like(ref_tensor: Tensor, *, value: Any = 0.0) -> Tensor:
    return _filled(ref_tensor.shape, value)


def _filled(shape: Sequence[int], value: Any) -> Tensor:
    if min(shape, default=0) < 0:
        raise ValueError(f"shape is {list(shape)}, must not be negative")
    scalar = np.asarray(value).reshape(())
    dtype = BOOL if scalar.dtype == BOOL else I32 if scalar.dtype.kind in "iu" else np.dtype(np.float32)
    return G.full(shape, scalar.item(), dtype)


@mil
def _range_1d(*, end: Any, start: Any, step: Any) -> Tensor:
    first, last, by = (np.asarray(v).reshape(()) for v in (start, end, step))
    if by == 0 or (last - first) / by > _MOST:
        raise ValueError(f"start is {first}, end {last} and step {by}: too many elements")
    return _constant(
        np.arange(first.item(), last.item(), by.item()).astype(I32 if first.dtype.kind == "i" else np.float32)
    )


@mil
def _one_hot(
    indices: Tensor, *, one_hot_vector_size: Any, axis: int = -1, on_value: Any = 1, off_value: Any = 0
) -> Tensor:
    size = int(np.asarray(one_hot_vector_size).reshape(()))
    number = axis_of(axis, indices.ndim + 1)
    classes = np.arange(size, dtype=I32).reshape(-1, *(1,) * (indices.ndim - number))
    hit = G.equal(G.expand_dims(as_dtype(indices, I32), number), classes)
    shape = (*indices.shape[:number], size, *indices.shape[number:])
    return G.where(hit, _filled(shape, on_value), _filled(shape, off_value))


# ---- gather and scatter ----------------------------------------------------------------------------------------------


def _places(indices: Tensor, size: Any) -> Tensor:
    """Indices from 0: a negative one counts from the end."""
    return G.where(G.less(indices, 0), G.add(indices, size), indices)


@mil
def _gather(
    x: Tensor, indices: Tensor, *, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False
) -> Tensor:
    del validate_indices  # they are always checked
    number = axis_of(axis, x.ndim)
    return G.take(x, _places(indices, x.shape[number]), number, int(batch_dims))


@mil
def _gather_along_axis(x: Tensor, indices: Tensor, *, axis: int = 0, validate_indices: bool = False) -> Tensor:
    del validate_indices
    number = axis_of(axis, x.ndim)
    return G.take_along_axis(x, _places(indices, x.shape[number]), number)


def _vectors(indices: Tensor, shape: Sequence[int]) -> Tensor:
    """Index vectors for the first of these axes."""
    depth = indices.shape[-1] if indices.ndim else 0
    if not 0 < depth <= len(shape):
        raise ValueError(f"indices has shape {indices.shape}, for axes of sizes {list(shape)}")
    return _places(indices, np.asarray(shape[:depth], I32))


@mil
def _gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0, validate_indices: bool = False) -> Tensor:
    del validate_indices
    return G.gather_nd(x, _vectors(indices, x.shape[int(batch_dims) :]), int(batch_dims))


_SCATTER: Final = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "min": "minimum", "max": "maximum",
    "update": "set",
}  # fmt: skip


def _scatter_mode(mode: str) -> str:
    if mode not in _SCATTER:
        raise ValueError(f"mode is {mode!r}, must be one of {', '.join(_SCATTER)}")
    return _SCATTER[mode]


@mil
def _scatter(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    *,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    del validate_indices
    number = axis_of(axis, data.ndim)
    return G.scatter(data, _places(indices, data.shape[number]), updates, number, _scatter_mode(mode))


@mil
def _scatter_along_axis(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    *,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    del validate_indices
    number = axis_of(axis, data.ndim)
    return G.scatter_along_axis(data, _places(indices, data.shape[number]), updates, number, _scatter_mode(mode))


@mil
def _scatter_nd(
    data: Tensor, indices: Tensor, updates: Tensor, *, mode: str = "add", validate_indices: bool = False
) -> Tensor:
    del validate_indices
    return G.scatter_nd(data, _vectors(indices, data.shape), updates, _scatter_mode(mode))
