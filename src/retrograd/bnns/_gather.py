"""Gathering and scattering: elements or slices of an array, selected by indices.

Gathering reads the array that the indices select from; scattering writes it, and is the gradient of gathering if it
adds. Axes are counted as ``size`` lists them, but in a RowMajorMatrix rows come before columns, as in the examples that
Apple prints.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from . import _constants as c
from ._conversion import INTEGERS, PLAIN, converted
from ._direct import Descriptor, Given, Operand, Operands, Parameters
from ._failure import IndexOutOfRange, Invalid, ShapeMismatch, Unsupported, status
from ._filter import FLOATS, checked_parameters
from ._layer import rows_first
from ._memory import Array, as_size, check_indices
from ._names import constant_name
from ._sample_map import ANY_TYPE

_Shape: TypeAlias = tuple[int, ...]
_LOW: Final = 0xFFFFFFFF  # the lower half of 64 bits


def _operands(types: tuple[int, ...]) -> Operands:
    return Operands(
        Operand("input", types, order=rows_first),
        Operand("indices", INTEGERS, order=rows_first),
        Operand("output", types, like="input", written=True, order=rows_first),
    )


_GATHERED: Final = _operands(ANY_TYPE)
# By the operation of a scatter.
_SCATTERED: Final = {c.BNNSReduceFunctionNone: _GATHERED, c.BNNSReduceFunctionSum: _operands((*FLOATS, *INTEGERS))}


class _Selection(NamedTuple):
    """Elements or slices of an array, in the order of the indices."""

    whole: Array  # the array that is selected from, with the axes that the indices count first
    part: Array  # the selected elements or slices, with the axes of the indices first
    key: tuple[Array, ...]  # the index along each of the first axes of `whole`; broadcast


def _size(given: Given, shape: _Shape) -> _Shape:
    """A shape in the order of this operand's ``size``, for messages."""
    return shape[::-1] if given.geometry.layout == c.BNNSDataLayoutRowMajorMatrix else shape


def _along(axis: object, at: Given, whole: Given, part: Given) -> _Selection:
    """The elements or slices of `whole` that indices along one axis select; `part` has their shape."""
    k, shape, selected = as_size("axis", axis), whole.array.shape, part.array.shape
    if k >= len(shape):
        raise Invalid(f"axis is {k}, but {whole.name} has {len(shape)} axes")
    if len(selected) != len(shape):
        raise ShapeMismatch(f"{part.name} has {len(selected)} axes, expected {len(shape)} as in {whole.name}")
    wanted = (*shape[:k], selected[k], *shape[k + 1 :])
    if selected != wanted:
        raise ShapeMismatch(
            f"{part.name}.size is {part.size}, expected {_size(part, wanted)}: the extents of {whole.name}, except "
            f"along axis {k}"
        )
    if at.array.shape not in ((selected[k],), selected):
        raise ShapeMismatch(
            f"indices.size is {at.size}, expected {(selected[k],)} for axis {k}, or {part.size} as in {part.name}"
        )
    positions = _positions(at.array, k, whole)
    if positions.ndim == 1:
        return _Selection(np.moveaxis(whole.array, k, 0), np.moveaxis(part.array, k, 0), (positions,))
    key = list(np.ogrid[tuple(slice(extent) for extent in selected)])
    key[k] = positions
    return _Selection(whole.array, part.array, tuple(key))


def _vectors(at: Given, whole: Given, part: Given) -> _Selection:
    """The elements or slices of `whole` that vectors of indices select; `part` has their shape."""
    shape = whole.array.shape
    *grid, length = at.array.shape
    if length > len(shape):
        raise ShapeMismatch(f"indices has vectors of {length} indices, but {whole.name} has {len(shape)} axes")
    wanted = (*grid, *shape[length:]) or (1,)
    if part.array.shape != wanted:
        raise ShapeMismatch(
            f"{part.name}.size is {part.size}, expected {_size(part, wanted)}: the axes of indices but its last, then "
            f"those of {whole.name} from axis {length} on"
        )
    vectors = at.array.reshape(-1, length)
    return _Selection(whole.array, part.array, tuple(_positions(vectors[:, k], k, whole) for k in range(length)))


def _positions(indices: Array, axis: int, whole: Given) -> Array:
    """A copy of indices along an axis, in the type that NumPy uses; checked, and safe from other threads."""
    own: Array = indices.copy()
    bound = whole.array.shape[axis]
    what = f"{whole.name} has {bound} elements along axis {axis}"
    check_indices("indices", own, bound, what, IndexOutOfRange)
    return own.astype(np.intp)


def _gather(selected: _Selection) -> None:
    values = selected.whole[selected.key]  # a copy: the arrays may overlap
    selected.part[...] = values.reshape(selected.part.shape)


# ---- scattering -----------------------------------------------------------------------------------------------------


def _scattered(op: object) -> Operands:
    """The operands of this operation."""
    code = as_size("op", op)
    if code not in _SCATTERED:
        shown = constant_name("BNNSReduceFunction", code)
        raise Unsupported(f"op is {shown}; it must be BNNSReduceFunctionNone or BNNSReduceFunctionSum")
    return _SCATTERED[code]


def _scatter(op: int, selected: _Selection) -> None:
    """Write the selected elements, and no others, after everything has been read."""
    whole, part, key = selected
    counted, rest = whole.shape[: len(key)], whole.shape[len(key) :]
    at = np.ravel_multi_index(key, counted).reshape(-1)
    # Each place that is written once or more often, and which of them each index means.
    written = np.zeros(math.prod(counted), np.bool_)
    written[at] = True
    places = np.flatnonzero(written)
    place = np.empty(written.size, np.intp)
    place[places] = np.arange(places.size)
    at = place[at]
    values = part.reshape(at.size, -1)
    target = np.unravel_index(places, counted)
    if op == c.BNNSReduceFunctionSum:
        width = values.shape[1]
        each = (at[:, None] * width + np.arange(width)).reshape(-1)
        results = _sums(whole[target].reshape(-1), each, values.reshape(-1))
    else:
        # NumPy does not say which of several assignments to one element comes last.
        last = np.zeros(places.size, np.intp)
        np.maximum.at(last, at, np.arange(at.size))
        results = values[last]
    whole[target] = results.reshape(places.size, *rest)


def _sums(start: Array, at: Array, terms: Array) -> Array:
    """`start` with terms added at some positions, in their order; rounded, or saturated, once."""
    integers = start.dtype.kind in "iu"
    if integers and start.dtype.itemsize == 8:
        return _long_sums(start, at, terms)
    wide = np.int64 if integers else np.float64
    with np.errstate(all="ignore"):
        total = start.astype(wide)
        np.add.at(total, at, terms.astype(wide))
        return converted(total, PLAIN, start.dtype, PLAIN)


def _long_sums(start: Array, at: Array, terms: Array) -> Array:
    """The same for 64-bit integers. Upper and lower halves are added apart, so that nothing is lost to overflow."""
    high, low = (start >> 32).astype(np.int64), (start & _LOW).astype(np.int64)
    np.add.at(high, at, (terms >> 32).astype(np.int64))
    np.add.at(low, at, (terms & _LOW).astype(np.int64))
    high, low = high + (low >> 32), low & _LOW
    exact: Array = (high.view(np.uint64) << np.uint64(32) | low.view(np.uint64)).view(start.dtype)
    limits = np.iinfo(start.dtype)
    exact[high > limits.max >> 32] = limits.max
    exact[high < limits.min >> 32] = limits.min
    return exact


# ---- Apple's functions ----------------------------------------------------------------------------------------------


@status(-1)
def BNNSGather(
    axis: int, input: Descriptor, indices: Descriptor, output: Descriptor, filter_params: Parameters = None
) -> int:
    """Copy the elements, or whole slices, that `indices` select along one axis of the input.

    `indices` has one axis and selects slices, or the shape of the output and selects an element for each of its
    elements. 0; -1003 if shapes do not fit, -1005 if an index is out of range, -1 on other failures.
    """
    checked_parameters(filter_params)
    source, at, target = _GATHERED(input, indices, output)
    _gather(_along(axis, at, source, target))
    return 0


@status(-1)
def BNNSScatter(
    axis: int, op: int, input: Descriptor, indices: Descriptor, output: Descriptor, filter_params: Parameters = None
) -> int:
    """Write or add elements of the input to the elements, or slices, that `indices` select along an axis of the output.

    `indices` has one axis, or the shape of the input. `op` is BNNSReduceFunctionNone, which writes (of several inputs
    for one element, the last one stays), or BNNSReduceFunctionSum, which adds all of them. Other elements of the output
    keep their values. 0; -1003 if shapes do not fit, -1005 if an index is out of range, -1 on other failures.
    """
    checked_parameters(filter_params)
    source, at, target = _scattered(op)(input, indices, output)
    _scatter(op, _along(axis, at, target, source))
    return 0


@status(-1)
def BNNSGatherND(input: Descriptor, indices: Descriptor, output: Descriptor, filter_params: Parameters = None) -> int:
    """Copy the elements or slices of the input that vectors of indices select.

    The last axis of `indices` holds the vectors. A vector with fewer indices than the input has axes selects a slice.
    The output has the other axes of `indices`, then those of the slices. 0; -1003 if shapes do not fit, -1005 if an
    index is out of range, -1 on other failures.
    """
    checked_parameters(filter_params)
    source, at, target = _GATHERED(input, indices, output)
    _gather(_vectors(at, source, target))
    return 0


@status(-1)
def BNNSScatterND(
    op: int, input: Descriptor, indices: Descriptor, output: Descriptor, filter_params: Parameters = None
) -> int:
    """Write or add elements or slices to those of the output that vectors of indices select.

    The input has the shape that :func:`BNNSGatherND` would give from an array like the output; `op` is that of
    :func:`BNNSScatter`. 0; -1003 if shapes do not fit, -1005 if an index is out of range, -1 on other failures.
    """
    checked_parameters(filter_params)
    source, at, target = _scattered(op)(input, indices, output)
    _scatter(op, _vectors(at, target, source))
    return 0
