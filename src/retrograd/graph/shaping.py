"""Views, slices, concatenation: operations that move elements. Views cost nothing when a program runs."""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

import retrograd.graph as G

from ..ops._types import Array
from .elementwise import broadcast, identity, run_map, where
from .operation import Operation, Spec
from .reduction import as_axes, sum_to
from .tensor import (
    BOOL,
    FLOATS,
    INTEGERS,
    Node,
    Operand,
    Tensor,
    apply,
    apply_one,
    as_array,
    current_graph,
    fail,
    in_trace,
)

_Part: TypeAlias = int | slice | types.EllipsisType | None
Index: TypeAlias = _Part | tuple[_Part, ...]


# ---- views -----------------------------------------------------------------------------------------------------------


def _reshape_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (x,), (g,) = node.inputs, given
    assert x is not None
    assert g is not None
    return [reshape(g, x.shape)]


_RESHAPE: Final = Operation(
    "reshape",
    lambda x, *, shape: (Spec(shape, x.dtype),),
    view=lambda array, *, shape: array.reshape(shape),
    gradient=_reshape_gradient,
    contiguous=(0,),
)


def reshape(x: Operand, shape: int | Sequence[int]) -> Tensor:
    """The same elements in another shape; one extent may be -1."""
    tensor = identity(x)
    given = (shape,) if isinstance(shape, int) else tuple(int(extent) for extent in shape)
    wanted = list(given)
    if wanted.count(-1) == 1:
        rest = math.prod(extent for extent in wanted if extent != -1)
        wanted[wanted.index(-1)] = tensor.size // rest if rest else 0
    if math.prod(wanted) != tensor.size or any(extent < 0 for extent in wanted):
        raise fail("reshape", f"x of shape {tensor.shape} has {tensor.size} elements, but shape is {given}")
    if tuple(wanted) == tensor.shape:
        return tensor
    return apply_one(_RESHAPE, (tensor,), {"shape": tuple(wanted)})


def _transpose_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (g,) = given
    assert g is not None
    axes = node.attributes["axes"]
    return [transpose(g, tuple(axes.index(i) for i in range(len(axes))))]


_TRANSPOSE: Final = Operation(
    "transpose",
    lambda x, *, axes: (Spec(tuple(x.shape[a] for a in axes), x.dtype),),
    view=lambda array, *, axes: array.transpose(axes),
    gradient=_transpose_gradient,
    contiguous=(),
)


def transpose(x: Operand, axes: Sequence[int] | None = None) -> Tensor:
    """The axes in another order; None: reversed."""
    tensor = identity(x)
    order = tuple(range(tensor.ndim))[::-1] if axes is None else tuple(a + tensor.ndim if a < 0 else a for a in axes)
    if sorted(order) != list(range(tensor.ndim)):
        raise fail("transpose", f"axes is {axes}, must name each of the {tensor.ndim} axes of x once")
    if order == tuple(range(tensor.ndim)):
        return tensor
    return apply_one(_TRANSPOSE, (tensor,), {"axes": order})


def swapaxes(x: Operand, first: int, second: int) -> Tensor:
    """Two axes exchanged."""
    tensor = identity(x)
    order = list(range(tensor.ndim))
    order[first], order[second] = order[second], order[first]
    return transpose(tensor, order)


def moveaxis(x: Operand, source: int, destination: int) -> Tensor:
    """One axis moved to another position."""
    tensor = identity(x)
    order = list(range(tensor.ndim))
    axis = order.pop(source)
    order.insert(destination % tensor.ndim, axis)
    return transpose(tensor, order)


def _broadcast_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (x,), (g,) = node.inputs, given
    assert x is not None
    assert g is not None
    return [sum_to(g, x.shape)]


_BROADCAST: Final = Operation(
    "broadcast_to",
    lambda x, *, shape: (Spec(shape, x.dtype),),
    view=lambda array, *, shape: np.broadcast_to(array, shape),
    gradient=_broadcast_gradient,
    contiguous=(),
)


def broadcast_to(x: Operand, shape: Sequence[int]) -> Tensor:
    """x repeated along axes of extent 1, or new ones in front, to this shape."""
    tensor, wanted = identity(x), tuple(shape)
    if tensor.shape == wanted:
        return tensor
    try:
        fits = broadcast([tensor.shape, wanted]) == wanted
    except ValueError:
        fits = False
    if not fits:
        raise fail("broadcast_to", f"x has shape {tensor.shape}, which does not broadcast to {wanted}")
    return apply_one(_BROADCAST, (tensor,), {"shape": wanted})


def expand_dims(x: Operand, axis: int | Sequence[int]) -> Tensor:
    """New axes of extent 1, at these positions of the result."""
    tensor = identity(x)
    given = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = as_axes(given, tensor.ndim + len(given))
    extents = iter(tensor.shape)
    return reshape(tensor, tuple(1 if i in axes else next(extents) for i in range(tensor.ndim + len(given))))


def squeeze(x: Operand, axis: int | Sequence[int] | None = None) -> Tensor:
    """Without axes of extent 1; None: without all of them."""
    tensor = identity(x)
    given = tuple(i for i, e in enumerate(tensor.shape) if e == 1) if axis is None else axis
    axes = as_axes(given, tensor.ndim)
    if any(tensor.shape[a] != 1 for a in axes):
        raise fail("squeeze", f"axis is {axis}, but x has shape {tensor.shape}, with another extent than 1 there")
    return reshape(tensor, tuple(e for i, e in enumerate(tensor.shape) if i not in axes))


# ---- slices ----------------------------------------------------------------------------------------------------------

# An index as the graph keeps it: (start, stop, step) for each axis of x, with a stop of None below the first element.
_Slices: TypeAlias = tuple[tuple[int, int | None, int], ...]


def _taken(array: Array, slices: _Slices) -> Array:
    view: Array = array[tuple(slice(*part) for part in slices)]
    return view


def _extents(shape: tuple[int, ...], slices: _Slices) -> tuple[int, ...]:
    return tuple(len(range(*slice(*part).indices(e))) for e, part in zip(shape, slices, strict=True))


def _slice_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (x,), (g,) = node.inputs, given
    assert x is not None
    assert g is not None
    return [apply(_PLACE, (g,), {"shape": x.shape, "slices": node.attributes["slices"]})[0]]


_SLICE: Final = Operation(
    "slice",
    lambda x, *, slices: (Spec(_extents(x.shape, slices), x.dtype),),
    view=lambda array, *, slices: _taken(array, slices),
    gradient=_slice_gradient,
    contiguous=(),
)


def _place(inputs: Sequence[Array], results: Sequence[Array], *, shape: tuple[int, ...], slices: _Slices) -> None:
    run_map([], [], [0.0], results, [0])
    run_map([], inputs, [], [_taken(results[0], slices)], [0])


def _place_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    return [apply(_SLICE, given, {"slices": node.attributes["slices"]})[0]]


# Zeros with x in a slice.
_PLACE: Final = Operation(
    "place",
    lambda x, *, shape, slices: (Spec(shape, x.dtype),),
    compute=_place,
    gradient=_place_gradient,
    contiguous=(),
)


def _update_shapes(x: Spec, update: Spec, *, slices: _Slices) -> Sequence[Spec]:
    if x.dtype != update.dtype:
        raise TypeError(f"x has dtype {x.dtype}, but update has {update.dtype}; convert one with .astype")
    expected = _extents(x.shape, slices)
    if update.shape != expected:
        raise ValueError(f"update has shape {update.shape}, but the slice of x has {expected}")
    return (x,)


def _update(inputs: Sequence[Array], results: Sequence[Array], *, slices: _Slices) -> None:
    run_map([], inputs[:1], [], results, [0])
    run_map([], inputs[1:], [], [_taken(results[0], slices)], [0])


def _update_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (_, update), (g,) = node.inputs, given
    assert update is not None
    assert g is not None
    hole = zeros(update.shape, update.dtype)
    return [
        apply_one(_UPDATE, (g, hole), node.attributes) if needed[0] else None,
        apply_one(_SLICE, (g,), node.attributes) if needed[1] else None,
    ]


# x with a slice replaced.
_UPDATE: Final = Operation(
    "slice_update", _update_shapes, compute=_update, gradient=_update_gradient, contiguous=(), in_place=[(0, 0)]
)


def slice_update(
    x: Operand,
    update: Operand,
    starts: Sequence[int | None],
    ends: Sequence[int | None],
    strides: Sequence[int] | None = None,
) -> Tensor:
    """x with `update`, broadcast, in place of ``x[starts[0]:ends[0]:strides[0], ...]``.

    Negative starts and ends count from the end, None is the first or last; axes that are not named are whole.
    """
    tensor = identity(x)
    steps = [1] * len(starts) if strides is None else list(strides)
    if not len(starts) == len(ends) == len(steps) <= tensor.ndim or 0 in steps:
        raise fail(
            "slice_update", f"starts is {starts}, ends {ends} and strides {strides}, for x of shape {tensor.shape}: "
            "they must have equal lengths, up to the number of axes, and no stride may be 0",
        )  # fmt: skip
    slices = []
    for axis, extent in enumerate(tensor.shape):
        part = slice(starts[axis], ends[axis], steps[axis]) if axis < len(steps) else slice(None)
        start, stop, step = part.indices(extent)
        slices.append((start, None if stop < 0 else stop, step))
    kept = tuple(slices)
    # A number takes on the dtype of x.
    given = np.asarray(update, tensor.dtype) if isinstance(update, (bool, int, float)) else update
    return apply_one(_UPDATE, (tensor, broadcast_to(given, _extents(tensor.shape, kept))), {"slices": kept})


def take_slice(x: Operand, index: Index) -> Tensor:
    """``x[index]``, for integers, slices, None and ``...``. `take` is for tensors and arrays of indices."""
    tensor = identity(x)
    parts = list(index) if isinstance(index, tuple) else [index]
    for part in parts:
        if not (part is None or part is ... or isinstance(part, (int, np.integer, slice))) or isinstance(part, bool):
            raise fail(
                "slice", f"index has {type(part).__name__}, must be integers, slices, None or ...; use graph.take for "
                "indices in arrays and graph.where for conditions", TypeError,
            )  # fmt: skip
    used = len(parts) - parts.count(None) - parts.count(...)
    if used > tensor.ndim or parts.count(...) > 1:
        raise fail("slice", f"index {index!r} has {used} entries, but x has shape {tensor.shape}", IndexError)
    if ... not in parts:
        parts.append(...)
    at = parts.index(...)
    parts[at : at + 1] = [slice(None)] * (tensor.ndim - used)
    slices, shape, axis = [], [], 0
    for part in parts:
        if part is None:
            shape.append(1)
            continue
        extent = tensor.shape[axis]
        if isinstance(part, slice):
            start, stop, step = part.indices(extent)
            slices.append((start, None if stop < 0 else stop, step))
            shape.append(len(range(start, stop, step)))
        else:
            number = int(part) + (extent if part < 0 else 0)  # type: ignore[arg-type, operator]
            if not 0 <= number < extent:
                raise fail(
                    "slice", f"index {part} is out of range for axis {axis} of x, shape {tensor.shape}", IndexError
                )
            slices.append((number, number + 1, 1))
        axis += 1
    kept = tuple(slices)
    if any(part != (0, extent, 1) for part, extent in zip(kept, tensor.shape, strict=True)):
        tensor = apply(_SLICE, (tensor,), {"slices": kept})[0]
    return reshape(tensor, shape)


def flip(x: Operand, axis: int | Sequence[int] | None = None) -> Tensor:
    """The elements in reverse order along axes; None: along all."""
    tensor = identity(x)
    axes = as_axes(axis, tensor.ndim)
    return take_slice(tensor, tuple(slice(None, None, -1) if i in axes else slice(None) for i in range(tensor.ndim)))


# ---- joining ---------------------------------------------------------------------------------------------------------


def _joined(*specs: Spec, axis: int) -> Sequence[Spec]:
    first = specs[0]
    for spec in specs[1:]:
        if spec.dtype != first.dtype:
            raise TypeError(f"tensors have dtypes {first.dtype} and {spec.dtype}; convert one with .astype")
        same = len(spec.shape) == len(first.shape) and all(
            i == axis or a == b for i, (a, b) in enumerate(zip(spec.shape, first.shape, strict=False))
        )
        if not same:
            raise ValueError(f"shapes {first.shape} and {spec.shape} differ in another axis than {axis}")
    total = sum(spec.shape[axis] for spec in specs)
    return (Spec((*first.shape[:axis], total, *first.shape[axis + 1 :]), first.dtype),)


def _join(inputs: Sequence[Array], results: Sequence[Array], *, axis: int) -> None:
    start = 0
    for array in inputs:
        stop = start + array.shape[axis]
        if array.size:
            run_map([], [array], [], [results[0][(slice(None),) * axis + (slice(start, stop),)]], [0])
        start = stop


def _join_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (g,), axis, start, found = given, node.attributes["axis"], 0, list[Tensor | None]()
    assert g is not None
    for tensor, wanted in zip(node.inputs, needed, strict=True):
        assert tensor is not None
        stop = start + tensor.shape[axis]
        found.append(take_slice(g, (*(slice(None),) * axis, slice(start, stop))) if wanted else None)
        start = stop
    return found


_CONCATENATE: Final = Operation("concatenate", _joined, compute=_join, gradient=_join_gradient, contiguous=())


def concatenate(tensors: Sequence[Operand], axis: int = 0) -> Tensor:
    """Tensors joined along an axis."""
    parts = [identity(t) for t in tensors]
    if not parts:
        raise fail("concatenate", "tensors is empty, needs at least 1")
    try:
        (number,) = as_axes(axis, parts[0].ndim)
    except ValueError as error:
        raise fail("concatenate", str(error)) from None
    return apply_one(_CONCATENATE, parts, {"axis": number})


def stack(tensors: Sequence[Operand], axis: int = 0) -> Tensor:
    """Tensors of one shape joined along a new axis."""
    return concatenate([expand_dims(t, axis) for t in tensors], axis)


def split(x: Operand, sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Equal parts, or parts that end at these positions, as views."""
    tensor = identity(x)
    (number,) = as_axes(axis, tensor.ndim)
    extent = tensor.shape[number]
    if isinstance(sections, int):
        if sections < 1 or extent % sections:
            raise fail("split", f"axis {axis} of x has extent {extent}, which is not a multiple of {sections}")
        ends = [extent // sections * (i + 1) for i in range(sections)]
    else:
        ends = [*sections, extent]
    starts = [0, *ends[:-1]]
    lead = (slice(None),) * number
    return [take_slice(tensor, (*lead, slice(a, b))) for a, b in zip(starts, ends, strict=True)]


_PAD_MODES: Final = ("constant", "reflect", "symmetric", "edge", "wrap")


def pad(x: Operand, widths: Sequence[tuple[int, int]], mode: str = "constant", value: float = 0.0) -> Tensor:
    """x with (before, after) more elements along each axis, as NumPy's.

    `mode`: "constant": of `value`; "edge": copies of the nearest element; "reflect" and "symmetric": mirrored, without
    and with the nearest element; "wrap": from the other end. Copies add to the gradient of their element.
    """
    tensor = identity(x)
    if len(widths) != tensor.ndim or any(w < 0 for pair in widths for w in pair):
        raise fail("pad", f"widths is {widths}, must have (before, after) for each of the {tensor.ndim} axes of x")
    if mode not in _PAD_MODES:
        raise fail("pad", f"mode is {mode!r}, must be one of {', '.join(_PAD_MODES)}")
    if mode == "constant":
        return _pad_constant(tensor, widths, value)
    for axis, (pair, extent) in enumerate(zip(widths, tensor.shape, strict=True)):
        if any(pair):
            if not extent:
                raise fail("pad", f"axis {axis} of x, shape {tensor.shape}, has no elements for mode {mode!r}")
            kind: Any = mode
            tensor = G.take(tensor, np.pad(np.arange(extent), pair, mode=kind), axis)
    return tensor


def _pad_constant(tensor: Tensor, widths: Sequence[tuple[int, int]], value: float) -> Tensor:
    shape = tuple(a + e + b for e, (a, b) in zip(tensor.shape, widths, strict=True))
    slices = tuple((a, a + e, 1) for e, (a, _) in zip(tensor.shape, widths, strict=True))
    attributes: dict[str, Any] = {"shape": shape, "slices": slices}
    placed: Tensor = apply(_PLACE, (tensor,), attributes)[0]
    if not value:
        return placed
    inside: Tensor = apply(_PLACE, (ones(tensor.shape, BOOL),), attributes)[0]
    return where(inside, placed, value)


def band_part(x: Operand, lower: int, upper: int) -> Tensor:
    """Matrices, in the last two axes, with zeros below diagonal -`lower` and above diagonal `upper`.

    A negative one keeps all diagonals on its side.
    """
    tensor = identity(x)
    if tensor.ndim < 2:
        raise fail("band_part", f"x has shape {tensor.shape}, must have 2 axes or more")
    rows, columns = np.ogrid[: tensor.shape[-2], : tensor.shape[-1]]
    below, above = rows - columns, columns - rows
    inside = ((below <= lower) | (lower < 0)) & ((above <= upper) | (upper < 0))
    return where(inside, tensor, False if tensor.dtype == BOOL else 0)


def tile(x: Operand, repeats: Sequence[int]) -> Tensor:
    """x repeated along each axis."""
    tensor = identity(x)
    axes = max(tensor.ndim, len(repeats))
    counts = (1,) * (axes - len(repeats)) + tuple(repeats)
    shape = (1,) * (axes - tensor.ndim) + tensor.shape
    spread = reshape(tensor, tuple(v for e in shape for v in (1, e)))
    whole = broadcast_to(spread, tuple(v for e, r in zip(shape, counts, strict=True) for v in (r, e)))
    return reshape(whole, tuple(e * r for e, r in zip(shape, counts, strict=True)))


# ---- constants -------------------------------------------------------------------------------------------------------


def full(shape: Sequence[int], value: float, dtype: npt.DTypeLike = FLOATS[0]) -> Tensor:
    """A tensor of one value."""
    scalar = np.asarray(value, dtype)
    graph = current_graph()
    return broadcast_to(scalar if graph is None else graph.constant(scalar), tuple(shape))


def zeros(shape: Sequence[int], dtype: npt.DTypeLike = FLOATS[0]) -> Tensor:
    """A tensor of zeros."""
    return full(shape, 0, dtype)


def ones(shape: Sequence[int], dtype: npt.DTypeLike = FLOATS[0]) -> Tensor:
    """A tensor of ones."""
    return full(shape, 1, dtype)


def coordinates(shape: Sequence[int], axis: int, dtype: npt.DTypeLike = INTEGERS[0]) -> Tensor:
    """The index along an axis of each element of a tensor of this shape."""
    (number,) = as_axes(axis, len(shape))
    line = np.arange(shape[number], dtype=dtype).reshape([-1 if i == number else 1 for i in range(len(shape))])
    graph = current_graph()
    return broadcast_to(line if graph is None else graph.constant(line), tuple(shape))


def constant(value: Operand, dtype: npt.DTypeLike | None = None) -> Tensor:
    """A tensor that always has this value."""
    graph = current_graph()
    if graph is None or in_trace((value,)):
        raise fail("constant", "it makes a tensor of an array, inside a trace", TypeError)
    return graph.constant(np.asarray(as_array(value), dtype))
