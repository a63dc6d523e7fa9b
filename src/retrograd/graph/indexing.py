"""Gather, softmax, one-hot vectors, and counters for random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import _core
from ..ops._types import Array
from .elementwise import add, cast, equal, exp, identity
from .operation import Operation, Spec
from .operators import Operators
from .reduction import INT64, as_axes, refuse, sum
from .shaping import expand_dims, moveaxis, reshape, take_slice, transpose
from .tensor import FLOATS, Node, Operand, Tensor, Variable, apply, apply_one, current_graph, fail


def refuse_index(answer: _core.Refusal | None, indices: Array | None = None, limit: int = 0) -> None:
    """Raise for an index out of range, outside programs. With `indices` the error has the first that is."""
    if answer is not None and answer.reason is _core.Reason.out_of_range:
        if indices is not None and (wrong := indices[(indices < 0) | (indices >= limit)]).size:
            raise IndexError(f"{answer.argument}: an index is {wrong.flat[0]}, must be from 0 to below {limit}")
        raise IndexError(f"{answer.argument} has an index out of range")
    refuse(answer)


def as_indices(name: str, indices: Operand) -> Any:
    """Indices as int64."""
    if isinstance(indices, Operators):
        if indices.dtype.kind != "i":
            raise fail(name, f"indices has dtype {indices.dtype}, must be integers", TypeError)
        return cast(indices, INT64)
    array = np.asarray(indices)
    if array.dtype.kind not in "iu" and array.size:
        raise fail(name, f"indices has dtype {array.dtype}, must be integers", TypeError)
    return array.astype(INT64)


def around(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """The elements before an axis, along it, and after it."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


# ---- rows along an axis ----------------------------------------------------------------------------------------------


def _take_shapes(x: Spec, indices: Spec, *, axis: int) -> Sequence[Spec]:
    return (Spec((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype),)


def _take(inputs: Sequence[Array], results: Sequence[Array], *, axis: int) -> None:
    (x, indices), (y,) = inputs, results
    outer, count, inner = around(x.shape, axis)
    source, target = x.reshape(outer, count, inner), y.reshape(outer, indices.size, inner)
    refuse_index(_core.gather(x.dtype.itemsize, source, indices.reshape(-1), target, False, 0), indices, count)


def _take_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    x, indices = node.inputs
    assert x is not None
    return [apply(PUT_ADD, (given[0], indices), {"shape": x.shape, **node.attributes})[0], None]


TAKE: Final = Operation("take", _take_shapes, compute=_take, gradient=_take_gradient)


def _put_add(inputs: Sequence[Array], results: Sequence[Array], *, shape: tuple[int, ...], axis: int) -> None:
    (dy, indices), (dx,) = inputs, results
    outer, count, inner = around(shape, axis)
    source, target = dy.reshape(outer, indices.size, inner), dx.reshape(outer, count, inner)
    refuse_index(_core.scatter_add(dy.dtype.itemsize == 8, source, indices.reshape(-1), target, False, False, 0))


def _put_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    return [apply(TAKE, (given[0], node.inputs[1]), {"axis": node.attributes["axis"]})[0], None]


# Zeros of a shape, with rows added at indices along an axis, in the order of the indices.
PUT_ADD: Final = Operation(
    "put_add", lambda dy, indices, *, shape, axis: (Spec(shape, dy.dtype),), compute=_put_add, gradient=_put_gradient
)


def take(x: Operand, indices: Operand, axis: int = 0, batch_dims: int = 0) -> Tensor:
    """The elements at integer `indices` along an axis, which their axes replace. Indices count from 0.

    The first `batch_dims` axes of x and of the indices are the same: there, x has its own indices.
    """
    tensor, places = identity(x), as_indices("take", indices)
    try:
        (number,) = as_axes(axis, tensor.ndim)
    except ValueError as error:
        raise fail("take", str(error)) from None
    if not batch_dims:
        return apply_one(TAKE, (tensor, places), {"axis": number})
    if not 0 < batch_dims <= number:
        raise fail("take", f"batch_dims is {batch_dims}, must be from 0 to axis {number}")
    found = gather_nd(moveaxis(tensor, number, batch_dims), expand_dims(places, places.ndim), batch_dims)
    between, own = number - batch_dims, places.ndim - batch_dims
    order = [*range(batch_dims), *range(batch_dims + own, batch_dims + own + between)]
    order += range(batch_dims, batch_dims + own)
    return transpose(found, [*order, *range(batch_dims + own + between, found.ndim)])


def row_indices(name: str, shape: tuple[int, ...], indices: Operand, batch_dims: int) -> tuple[Tensor, int]:
    """The rows that index vectors select of a tensor of this shape, as numbers from 0; and the axes of a vector.

    A vector, along the last axis of `indices`, has an index for each of the axes after the first `batch_dims`. Each is
    looked up in a table of its multiples, which refuses one that is out of range.
    """
    places = as_indices(name, indices)
    depth = places.shape[-1] if places.ndim else 0
    lead = shape[:batch_dims]
    if not 0 <= batch_dims < max(1, places.ndim) or batch_dims + depth > len(shape) or not depth:
        raise fail(
            name, f"indices has shape {places.shape}, which with {batch_dims} batch axes do not fit the shape {shape}"
        )
    if places.shape[:batch_dims] != lead:
        raise fail(name, f"indices has shape {places.shape}, whose first axes must be {lead}, as in the shape {shape}")
    limits = shape[batch_dims : batch_dims + depth]
    total: Tensor | None = None
    for axis, limit in enumerate(limits):
        table = np.arange(limit, dtype=INT64) * math.prod(limits[axis + 1 :])
        part: Tensor = apply_one(TAKE, (table, take_slice(places, (..., axis))), {"axis": 0})
        total = part if total is None else add(total, part)
    assert total is not None
    if batch_dims:
        first = np.arange(math.prod(lead), dtype=INT64) * math.prod(limits)
        total = add(total, first.reshape(*lead, *(1,) * (total.ndim - batch_dims)))
    return total, depth


def gather_nd(x: Operand, indices: Operand, batch_dims: int = 0) -> Tensor:
    """The elements or parts of x that index vectors, along the last axis of `indices`, select.

    The first `batch_dims` axes of x and of the indices are the same: there, x has its own indices.
    """
    tensor = identity(x)
    rows, depth = row_indices("gather_nd", tensor.shape, indices, batch_dims)
    kept = tensor.shape[batch_dims + depth :]
    count = math.prod(tensor.shape[: batch_dims + depth])
    return apply_one(TAKE, (reshape(tensor, (count, *kept)), rows), {"axis": 0})


# ---- elements along an axis ------------------------------------------------------------------------------------------


def _along_shapes(x: Spec, indices: Spec, *, axis: int) -> Sequence[Spec]:
    same = len(x.shape) == len(indices.shape) and all(
        i == axis or a == b for i, (a, b) in enumerate(zip(x.shape, indices.shape, strict=False))
    )
    if not same:
        raise ValueError(f"indices has shape {indices.shape}, but x has {x.shape}: only axis {axis} may differ")
    return (Spec(indices.shape, x.dtype),)


def _take_along(inputs: Sequence[Array], results: Sequence[Array], *, axis: int) -> None:
    (x, indices), (y,) = inputs, results
    source, places, target = (a.reshape(around(a.shape, axis)) for a in (x, indices, y))
    refuse_index(_core.gather_along(x.dtype.itemsize, source, places, target, False, 0), places, x.shape[axis])


def _along_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    x, indices = node.inputs
    assert x is not None
    return [apply(PUT_ALONG, (given[0], indices), {"shape": x.shape, **node.attributes})[0], None]


TAKE_ALONG: Final = Operation("take_along_axis", _along_shapes, compute=_take_along, gradient=_along_gradient)


def _put_along(inputs: Sequence[Array], results: Sequence[Array], *, shape: tuple[int, ...], axis: int) -> None:
    (dy, indices), (dx,) = inputs, results
    source, places, target = (a.reshape(around(a.shape, axis)) for a in (dy, indices, dx))
    refuse_index(_core.scatter_along_add(dy.dtype.itemsize == 8, source, places, target, False, False, 0))


def _put_along_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    return [apply(TAKE_ALONG, (given[0], node.inputs[1]), {"axis": node.attributes["axis"]})[0], None]


PUT_ALONG: Final = Operation(
    "put_along_axis_add",
    lambda dy, indices, *, shape, axis: (Spec(shape, dy.dtype),),
    compute=_put_along,
    gradient=_put_along_gradient,
)


def take_along_axis(x: Operand, indices: Operand, axis: int) -> Tensor:
    """For each of the integer `indices`, the element of x at that place along an axis, as NumPy's."""
    tensor = identity(x)
    try:
        (number,) = as_axes(axis, tensor.ndim)
    except ValueError as error:
        raise fail("take_along_axis", str(error)) from None
    return apply_one(TAKE_ALONG, (tensor, as_indices("take_along_axis", indices)), {"axis": number})


def place_along_axis(x: Operand, indices: Operand, extent: int, axis: int) -> Tensor:
    """Zeros with the elements of x at `indices` along an axis of this extent, added where indices are equal."""
    tensor, places = identity(x), as_indices("place_along_axis", indices)
    (number,) = as_axes(axis, tensor.ndim)
    shape = (*tensor.shape[:number], int(extent), *tensor.shape[number + 1 :])
    return apply_one(PUT_ALONG, (tensor, places), {"shape": shape, "axis": number})


# ---- softmax ---------------------------------------------------------------------------------------------------------


def _softmax_shapes(x: Spec, *, log: bool) -> Sequence[Spec]:
    if x.dtype.kind != "f":
        raise TypeError(f"x has dtype {x.dtype}, must be float32 or float64")
    return (x,)


def _softmax(inputs: Sequence[Array], results: Sequence[Array], *, log: bool) -> None:
    x, y = (a.reshape(-1, a.shape[-1]) if a.size else a.reshape(0, a.shape[-1]) for a in (inputs[0], results[0]))
    if x.size:
        refuse(_core.softmax(log, x.dtype.itemsize == 8, x, y, False, 0))


def _softmax_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    return [apply(_SOFTMAX_BACKWARD, (given[0], node.result), node.attributes)[0]]


_SOFTMAX: Final = Operation(
    "softmax", _softmax_shapes, compute=_softmax, gradient=_softmax_gradient, in_place=[(0, 0)],
    flops=lambda inputs, results, **_: 4.0 * inputs[0].elements,
)  # fmt: skip


def _softmax_backward(inputs: Sequence[Array], results: Sequence[Array], *, log: bool) -> None:
    dy, y, dx = (a.reshape(-1, a.shape[-1]) if a.size else a.reshape(0, a.shape[-1]) for a in (*inputs, results[0]))
    if dy.size:
        refuse(_core.softmax_backward(log, dy.dtype.itemsize == 8, dy, y, dx, False, 0))


def _softmax_second(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    """dx = y (dy - s), s = sum(dy y); or with the logarithm dx = dy - exp(y) sum(dy)."""
    (dy, y), (g,) = node.inputs, given
    assert dy is not None
    assert y is not None
    assert g is not None
    if node.attributes["log"]:
        p = exp(y)
        inner = sum(g * p, -1, keepdims=True)
        return [g - inner, -(g * p * sum(dy, -1, keepdims=True))]
    s = sum(dy * y, -1, keepdims=True)
    gy = sum(g * y, -1, keepdims=True)
    return [y * (g - gy), g * (dy - s) - dy * gy]


_SOFTMAX_BACKWARD: Final = Operation(
    "softmax_backward", lambda dy, y, *, log: (y,), compute=_softmax_backward, gradient=_softmax_second,
    in_place=[(0, 0)], flops=lambda inputs, results, **_: 4.0 * inputs[0].elements,
)  # fmt: skip


def softmax(x: Operand, axis: int = -1) -> Tensor:
    """``exp(x) / sum(exp(x))`` along an axis, without overflow."""
    return _along_last(x, axis, False)


def log_softmax(x: Operand, axis: int = -1) -> Tensor:
    """``log(softmax(x))`` along an axis."""
    return _along_last(x, axis, True)


def softmax_gradient(dy: Operand, y: Operand, axis: int = -1) -> Tensor:
    """The gradient of x of ``y = softmax(x, axis)``: ``y * (dy - sum(dy * y))``."""
    found, given = identity(y), identity(dy)
    if found.shape != given.shape:
        raise fail("softmax_gradient", f"dy has shape {given.shape}, but y has {found.shape}")
    try:
        (number,) = as_axes(axis, found.ndim)
    except ValueError as error:
        raise fail("softmax_gradient", str(error)) from None
    rows = (moveaxis(given, number, -1), moveaxis(found, number, -1))
    return moveaxis(apply_one(_SOFTMAX_BACKWARD, rows, {"log": False}), -1, number)


def _along_last(x: Operand, axis: int, log: bool) -> Tensor:
    tensor = identity(x)
    try:
        (number,) = as_axes(axis, tensor.ndim)
    except ValueError as error:
        raise fail("softmax", str(error)) from None
    last = number == tensor.ndim - 1
    found: Tensor = apply(_SOFTMAX, (tensor if last else moveaxis(tensor, number, -1),), {"log": log})[0]
    return found if last else moveaxis(found, -1, number)


# ---- classes and counters --------------------------------------------------------------------------------------------


def one_hot(indices: Operand, classes: int, dtype: npt.DTypeLike = FLOATS[0]) -> Tensor:
    """Vectors with a 1 at each index and 0 elsewhere, along a new last axis; all 0 for an index out of range."""
    places = as_indices("one_hot", indices)
    wide = reshape(places, (*places.shape, 1))
    return cast(equal(wide, np.arange(int(classes), dtype=INT64)), dtype)


def counter(start: int = 0, *, name: str = "counter") -> Variable:
    """A variable that counts the runs of a program that uses :func:`next_count`; int64."""
    return Variable(np.asarray(start, INT64), name=name)


def next_count(count: Variable) -> Tensor:
    """Add 1 to a counter in every run, and return its new value."""
    if current_graph() is None:
        count.value += 1
        now: Any = count.value.copy()
        return now  # type: ignore[no-any-return]
    new = identity(count) + 1
    count.assign(new)
    return new


def as_seed(seed: Operand) -> Any:
    """A seed as one int64."""
    if isinstance(seed, int):
        if not -(1 << 63) <= seed < 1 << 64:
            raise fail("seed", f"it is {seed}, must be from 0 to below 2**64")
        return np.asarray(seed - (1 << 64) if seed >= 1 << 63 else seed, INT64)
    return seed
