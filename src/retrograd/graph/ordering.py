"""What depends on the order of elements along an axis: cumulative sums, products and extremes, and sorting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from .. import _core
from ..ops._types import Array
from .elementwise import cast, identity
from .indexing import PUT_ALONG, around, take_along_axis
from .operation import Operation, Spec
from .reduction import INT64, as_axes, refuse
from .scan import scan
from .shaping import concatenate, flip, full, moveaxis, ones, reshape, take_slice, zeros
from .tensor import FLOATS, INTEGERS, Node, Operand, Tensor, apply, apply_one, fail


def _cumulative(
    inputs: Sequence[Array], results: Sequence[Array], *, axis: int, exclusive: bool, reverse: bool
) -> None:
    x, y = (a.reshape(around(a.shape, axis)) for a in (inputs[0], results[0]))
    refuse(_core.cumulative_sum(x.dtype.itemsize == 8, x, y, exclusive, reverse, False, 0))


def _cumulative_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    attributes = {**node.attributes, "reverse": not node.attributes["reverse"]}
    return [apply(_CUMULATIVE, given, attributes)[0]]


def _cumulative_shapes(x: Spec, **_: object) -> Sequence[Spec]:
    if x.dtype.kind != "f":
        raise TypeError(f"x has dtype {x.dtype}, must be float32 or float64")
    return (x,)


_CUMULATIVE: Final = Operation("cumsum", _cumulative_shapes, compute=_cumulative, gradient=_cumulative_gradient)


def _along(name: str, x: Operand, axis: int | None) -> tuple[Tensor, int]:
    """The tensor and the axis as a number from 0; None: of all elements in one row."""
    tensor = identity(x)
    if axis is None:
        return reshape(tensor, (-1,)), 0
    try:
        return tensor, as_axes(axis, tensor.ndim)[0]
    except ValueError as error:
        raise fail(name, str(error)) from None


def cumsum(x: Operand, axis: int | None = None, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """The sums of the elements up to each, along an axis; `exclusive`: without itself, `reverse`: from the end."""
    tensor, number = _along("cumsum", x, axis)
    attributes = {"axis": number, "exclusive": bool(exclusive), "reverse": bool(reverse)}
    return apply_one(_CUMULATIVE, (tensor,), attributes)


def cumprod(x: Operand, axis: int | None = None, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """The products of the elements up to each, with the options of `cumsum`. Its gradient is right where some are 0."""
    tensor, number = _along("cumprod", x, axis)
    ordered = flip(tensor, number) if reverse else tensor
    start = ones((*tensor.shape[:number], *tensor.shape[number + 1 :]), tensor.dtype)
    found = scan(ordered, zeros(tensor.shape, tensor.dtype), start, axis=number).y
    if exclusive:
        found = _later(found, number, 1.0, False)
    return flip(found, number) if reverse else found


def _later(x: Tensor, axis: int, first: float, reverse: bool) -> Tensor:
    """The elements moved one place towards the end, or with `reverse` the start, and `first` in the free place."""
    count = x.shape[axis]
    if not count:
        return x
    start = full((*x.shape[:axis], 1, *x.shape[axis + 1 :]), first, x.dtype)
    kept = take_slice(x, (*(slice(None),) * axis, slice(1, None) if reverse else slice(0, count - 1)))
    return concatenate([kept, start] if reverse else [start, kept], axis)


def _extreme_shapes(x: Spec, *, axis: int, largest: bool, reverse: bool) -> Sequence[Spec]:
    if x.dtype.kind != "f":
        raise TypeError(f"x has dtype {x.dtype}, must be float32 or float64")
    return x, Spec(x.shape, INT64)


def _extreme(inputs: Sequence[Array], results: Sequence[Array], *, axis: int, largest: bool, reverse: bool) -> None:
    x, y, indices = (a.reshape(around(a.shape, axis)) for a in (inputs[0], *results))
    refuse(_core.cumulative_extreme(x.dtype.itemsize == 8, x, y, indices, largest, reverse, False, 0))


def _extreme_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    assert x is not None
    attributes = {"shape": x.shape, "axis": node.attributes["axis"]}
    return [apply_one(PUT_ALONG, (given[0], node.results[1]), attributes)]


_EXTREME: Final = Operation("cumulative_extreme", _extreme_shapes, compute=_extreme, gradient=_extreme_gradient)


def cummax(x: Operand, axis: int | None = None, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """The largest of the elements up to each, with the options of `cumsum`; NaN from the first one on.

    The gradient goes to the last of equal elements, as in PyTorch. With `exclusive`, the first is minus infinity.
    """
    return _cumulative_extreme("cummax", x, axis, True, exclusive, reverse)


def cummin(x: Operand, axis: int | None = None, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """The smallest of the elements up to each, as `cummax`; with `exclusive`, the first is infinity."""
    return _cumulative_extreme("cummin", x, axis, False, exclusive, reverse)


def _cumulative_extreme(
    name: str, x: Operand, axis: int | None, largest: bool, exclusive: bool, reverse: bool
) -> Tensor:
    tensor, number = _along(name, x, axis)
    found = apply_one(_EXTREME, (tensor,), {"axis": number, "largest": largest, "reverse": bool(reverse)})
    return _later(found, number, -math.inf if largest else math.inf, bool(reverse)) if exclusive else found


class TopK(NamedTuple):
    """The selected values along an axis, and their indices."""

    values: Tensor
    indices: Tensor


def _top_shapes(x: Spec, *, k: int, largest: bool) -> Sequence[Spec]:
    if x.dtype.kind != "f":
        raise TypeError(f"x has dtype {x.dtype}, must be float32 or float64")
    if not x.shape or not 0 <= k <= x.shape[-1]:
        raise ValueError(f"k is {k}, but the last axis of x, shape {x.shape}, has fewer elements")
    shape = (*x.shape[:-1], k)
    return Spec(shape, x.dtype), Spec(shape, INT64)


def _top(inputs: Sequence[Array], results: Sequence[Array], *, k: int, largest: bool) -> None:
    x, values, indices = (a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) for a in (inputs[0], *results))
    refuse(_core.top_k(x.dtype.itemsize == 8, x, values, indices, largest, False, 0))


def _top_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    assert x is not None
    attributes = {"shape": x.shape, "axis": x.ndim - 1}
    return [None if given[0] is None else apply(PUT_ALONG, (given[0], node.results[1]), attributes)[0]]


_TOP: Final = Operation("top_k", _top_shapes, compute=_top, gradient=_top_gradient)


def top_k(x: Operand, k: int, *, largest: bool = True, axis: int = -1) -> TopK:
    """The k largest, or smallest, elements along an axis, in order, and their int64 indices.

    Of equal ones the first is first; NaN is larger than any number. x may be int32.
    """
    tensor, number = _along("top_k", x, axis)
    last = moveaxis(tensor, number, -1)
    attributes = {"k": int(k), "largest": bool(largest)}
    if tensor.dtype == INTEGERS[0]:
        indices = apply(_TOP, (cast(last, FLOATS[1]),), attributes)[1]
        values = take_along_axis(last, indices, -1)
    else:
        values, indices = apply(_TOP, (last,), attributes)
    return TopK(moveaxis(values, -1, number), moveaxis(indices, -1, number))


def sort(x: Operand, axis: int = -1, descending: bool = False) -> Tensor:
    """The elements in order along an axis; the gradient goes back to where they were."""
    return _sorted("sort", x, axis, descending).values


def argsort(x: Operand, axis: int = -1, descending: bool = False) -> Tensor:
    """The int64 indices that put the elements in order along an axis; of equal ones the first is first."""
    return _sorted("argsort", x, axis, descending).indices


def _sorted(name: str, x: Operand, axis: int, descending: bool) -> TopK:
    tensor, number = _along(name, x, axis)
    return top_k(tensor, tensor.shape[number], largest=descending, axis=number)
