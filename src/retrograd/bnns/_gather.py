"""Gathering and scattering: elements or slices of an array, selected by indices.

Gathering reads the array that the indices select from; scattering writes it, and is the gradient of gathering if it
adds. Axes are counted as ``size`` lists them, but in a RowMajorMatrix rows come before columns, as in the examples that
Apple prints.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from . import _constants as c
from ._conversion import INTEGERS, PLAIN, converted
from ._copy import check_unrotated, source_of, target_of
from ._failure import IndexOutOfRange, Invalid, ShapeMismatch, Unsupported, status
from ._filter import FLOATS, check_same_type, checked_parameters
from ._layer import rows_first
from ._memory import Array, as_size, check_indices
from ._names import constant_name
from ._sample_map import ANY_TYPE
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor

_Shape: TypeAlias = tuple[int, ...]
_LOW: Final = 0xFFFFFFFF  # the lower half of 64 bits


class _Operand(NamedTuple):
    name: str
    array: Array  # rows first
    layout: int

    @property
    def shape(self) -> _Shape:
        return self.array.shape

    def size(self, shape: _Shape) -> _Shape:
        """Extents in the order of this operand's ``size``, for messages."""
        return shape[::-1] if self.layout == c.BNNSDataLayoutRowMajorMatrix else shape


class _Selection(NamedTuple):
    """Elements or slices of an array, in the order of the indices."""

    whole: Array  # the array that is selected from, with the axes that the indices count first
    part: Array  # the selected elements or slices, with the axes of the indices first
    key: tuple[Array, ...]  # the index along each of the first axes of `whole`; broadcast


def _operands(
    input: Any, indices: Any, output: Any, types: tuple[int, ...] = ANY_TYPE
) -> tuple[_Operand, _Operand, _Operand]:
    given = (
        ("input", source_of("input", input, types, rows_first)),
        ("indices", source_of("indices", indices, INTEGERS, rows_first)),
        ("output", target_of("output", output, types, rows_first)),
    )
    check_same_type("output", output, "input", input)
    for name, (_, geometry) in given:
        check_unrotated(name, geometry)
    source, at, target = (_Operand(name, array, geometry.layout) for name, (array, geometry) in given)
    return source, at, target


def _along(axis: Any, at: _Operand, whole: _Operand, part: _Operand) -> _Selection:
    """The elements or slices of `whole` that indices along one axis select; `part` has their shape."""
    k, rank = as_size("axis", axis), len(whole.shape)
    if k >= rank:
        raise Invalid(f"axis is {k}, but {whole.name} has {rank} axes")
    if len(part.shape) != rank:
        raise ShapeMismatch(f"{part.name} has {len(part.shape)} axes, expected {rank} as in {whole.name}")
    wanted = (*whole.shape[:k], part.shape[k], *whole.shape[k + 1 :])
    if part.shape != wanted:
        raise ShapeMismatch(
            f"{part.name}.size is {part.size(part.shape)}, expected {part.size(wanted)}: the extents of {whole.name}, "
            f"except along axis {k}"
        )
    if at.shape not in ((part.shape[k],), part.shape):
        raise ShapeMismatch(
            f"indices.size is {at.size(at.shape)}, expected {(part.shape[k],)} for axis {k}, or "
            f"{part.size(part.shape)} as in {part.name}"
        )
    positions = _positions(at.array, k, whole)
    if positions.ndim == 1:
        return _Selection(np.moveaxis(whole.array, k, 0), np.moveaxis(part.array, k, 0), (positions,))
    key = list(np.ogrid[tuple(slice(extent) for extent in part.shape)])
    key[k] = positions
    return _Selection(whole.array, part.array, tuple(key))


def _vectors(at: _Operand, whole: _Operand, part: _Operand) -> _Selection:
    """The elements or slices of `whole` that vectors of indices select; `part` has their shape."""
    *grid, length = at.shape
    if length > len(whole.shape):
        raise ShapeMismatch(f"indices has vectors of {length} indices, but {whole.name} has {len(whole.shape)} axes")
    wanted = (*grid, *whole.shape[length:]) or (1,)
    if part.shape != wanted:
        raise ShapeMismatch(
            f"{part.name}.size is {part.size(part.shape)}, expected {part.size(wanted)}: the axes of indices but its "
            f"last, then those of {whole.name} from axis {length} on"
        )
    vectors = at.array.reshape(-1, length)
    return _Selection(whole.array, part.array, tuple(_positions(vectors[:, k], k, whole) for k in range(length)))


def _positions(indices: Array, axis: int, whole: _Operand) -> Array:
    """A copy of indices along an axis, in the type that NumPy uses; checked, and safe from other threads."""
    own: Array = indices.copy()
    bound = whole.shape[axis]
    what = f"{whole.name} has {bound} elements along axis {axis}"
    check_indices("indices", own, bound, what, IndexOutOfRange)
    return own.astype(np.intp)


def _gather(selected: _Selection) -> None:
    values = selected.whole[selected.key]  # a copy: the arrays may overlap
    selected.part[...] = values.reshape(selected.part.shape)


# ---- scattering -----------------------------------------------------------------------------------------------------


def _scatter_types(op: Any) -> tuple[int, ...]:
    """The types that can be scattered by this operation."""
    code = as_size("op", op)
    if code == c.BNNSReduceFunctionNone:
        return ANY_TYPE
    if code == c.BNNSReduceFunctionSum:
        return (*FLOATS, *INTEGERS)
    shown = constant_name("BNNSReduceFunction", code)
    raise Unsupported(f"op is {shown}; it must be BNNSReduceFunctionNone or BNNSReduceFunctionSum")


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
    axis: int,
    input: BNNSNDArrayDescriptor,
    indices: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    filter_params: BNNSFilterParameters | None = None,
) -> int:
    """Copy the elements, or whole slices, that `indices` select along one axis of the input.

    `indices` has one axis and selects slices, or the shape of the output and selects an element for each of its
    elements. 0; -1003 if shapes do not fit, -1005 if an index is out of range, -1 on other failures.
    """
    checked_parameters(filter_params)
    source, at, target = _operands(input, indices, output)
    _gather(_along(axis, at, source, target))
    return 0


@status(-1)
def BNNSScatter(
    axis: int,
    op: int,
    input: BNNSNDArrayDescriptor,
    indices: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    filter_params: BNNSFilterParameters | None = None,
) -> int:
    """Write or add elements of the input to the elements, or slices, that `indices` select along an axis of the output.

    `indices` has one axis, or the shape of the input. `op` is BNNSReduceFunctionNone, which writes (of several inputs
    for one element, the last one stays), or BNNSReduceFunctionSum, which adds all of them. Other elements of the output
    keep their values. 0; -1003 if shapes do not fit, -1005 if an index is out of range, -1 on other failures.
    """
    checked_parameters(filter_params)
    source, at, target = _operands(input, indices, output, _scatter_types(op))
    _scatter(op, _along(axis, at, target, source))
    return 0


@status(-1)
def BNNSGatherND(
    input: BNNSNDArrayDescriptor,
    indices: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    filter_params: BNNSFilterParameters | None = None,
) -> int:
    """Copy the elements or slices of the input that vectors of indices select.

    The last axis of `indices` holds the vectors. A vector with fewer indices than the input has axes selects a slice.
    The output has the other axes of `indices`, then those of the slices. 0; -1003 if shapes do not fit, -1005 if an
    index is out of range, -1 on other failures.
    """
    checked_parameters(filter_params)
    source, at, target = _operands(input, indices, output)
    _gather(_vectors(at, source, target))
    return 0


@status(-1)
def BNNSScatterND(
    op: int,
    input: BNNSNDArrayDescriptor,
    indices: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    filter_params: BNNSFilterParameters | None = None,
) -> int:
    """Write or add elements or slices to those of the output that vectors of indices select.

    The input has the shape that :func:`BNNSGatherND` would give from an array like the output; `op` is that of
    :func:`BNNSScatter`. 0; -1003 if shapes do not fit, -1005 if an index is out of range, -1 on other failures.
    """
    checked_parameters(filter_params)
    source, at, target = _operands(input, indices, output, _scatter_types(op))
    _scatter(op, _vectors(at, target, source))
    return 0
