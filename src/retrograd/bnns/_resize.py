"""Resize filters, and the points that crop-resize interpolates at too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from ..ops.linear import LinearGradients
from . import _constants as c
from ._declare import creates
from ._direct import check_unrotated
from ._failure import Invalid, Unsupported
from ._filter import FLOATS, put
from ._layer import Gradients, logical, stored
from ._memory import Array
from ._sample_map import SampleMap
from ._structures import BNNSNDArrayDescriptor, Bool, Structure, UInt32

_MOST_LINEAR: Final = 2  # axes that Linear interpolates


class BNNSLayerParametersResize(Structure):
    """A resize layer: the axes whose extents differ between ``i_desc`` and ``o_desc`` are resized.

    ``align_corners``: the first and the last element of the output are those of the input.
    """

    method: UInt32
    i_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor
    align_corners: Bool

    _prefixes: ClassVar[Mapping[str, str]] = {"method": "BNNSInterpolationMethod"}


def checked_method(method: Any) -> bool:
    """Whether the method is Linear."""
    methods = (c.BNNSInterpolationMethodNearest, c.BNNSInterpolationMethodLinear)
    if not isinstance(method, int) or method not in methods:
        raise Invalid(f"method is {method!r}, which is not a BNNSInterpolationMethod")
    return method == c.BNNSInterpolationMethodLinear


# ---- interpolation --------------------------------------------------------------------------------------------------


class Points(NamedTuple):
    """Where elements are interpolated along an axis: ``weight`` of the way from element ``low`` to ``high``.

    `weight` is below 1, and where it is 0, `high` is `low`: an element that has no part in a result cannot spoil it.
    """

    low: Array
    high: Array
    weight: Array  # float64


def points_at(low: Array, weight: Array) -> Points:
    """Points between elements `low` and the next ones."""
    return Points(low, np.where(weight > 0, low + 1, low), weight)


def _interpolated(values: Array, points: Points, axis: int) -> Array:
    """The values at these points of an axis; in float64, unless all points are elements."""
    low = np.take(values, points.low, axis)
    none = points.weight == 0
    if none.all():
        return low
    high = np.take(values, points.high, axis)
    with np.errstate(all="ignore"):
        result: Array = np.multiply(low, _along(1 - points.weight, axis, values.ndim), dtype=np.float64)
        added = np.multiply(high, _along(points.weight, axis, values.ndim), dtype=np.float64)
        added[_at(none, axis)] = 0  # an infinity times 0 would be NaN
        result += added
    return result


def _collected(g: Array, points: Points, axis: int, extent: int) -> Array:
    """The transpose of :func:`_interpolated`, in float64: what each element receives. Points must not go back."""
    total = np.zeros([extent if k == axis else n for k, n in enumerate(g.shape)])
    some = points.weight > 0
    sides = [(g, points.low, 1 - points.weight)]
    if some.any():
        sides.append((np.compress(some, g, axis), points.high[some], points.weight[some]))
    with np.errstate(all="ignore"):
        for part, index, weight in sides:
            starts = np.flatnonzero(np.diff(index, prepend=-1))  # equal indices follow one another
            shares = np.multiply(part, _along(weight, axis, g.ndim), dtype=np.float64)
            total[_at(index[starts], axis)] += np.add.reduceat(shares, starts, axis)
    return total


def _at(index: Array, axis: int) -> tuple[Any, ...]:
    """What selects these elements of an axis."""
    return (*[slice(None)] * axis, index)


def _along(weight: Array, axis: int, rank: int) -> Array:
    return weight.reshape(-1, *(1,) * (rank - 1 - axis))


def _nearest(extent: int, count: int, align: bool) -> Points:
    """The elements of `extent` that are nearest to the points of :func:`_linear`; of two, the later."""
    i = np.arange(count)
    if align:
        steps = max(count - 1, 1)
        low = (2 * i * (extent - 1) + steps) // (2 * steps)
    else:
        low = (2 * i + 1) * extent // (2 * count)
    return points_at(low, np.zeros(count))


def _linear(extent: int, count: int, align: bool) -> Points:
    """`count` points over an axis of `extent` elements, in exact integers up to the division.

    Aligned, from the first element to the last. Otherwise elements are intervals of length 1, and the points are the
    middles of `count` equal parts of them all.
    """
    i = np.arange(count)
    if align:
        position, unit = i * (extent - 1), max(count - 1, 1)
    else:
        unit = 2 * count
        position = np.clip((2 * i + 1) * extent - count, 0, unit * (extent - 1))
    return points_at(position // unit, position % unit / unit)


# ---- the filter -----------------------------------------------------------------------------------------------------


class ResizeFilter(SampleMap):
    """See :func:`BNNSFilterCreateLayerResize`."""

    title = "a resize"

    def __init__(self, layer: BNNSLayerParametersResize, parameters: object) -> None:
        super().__init__(parameters)
        self._linear = checked_method(layer.method)
        self._align = bool(layer.align_corners)
        self.describe(layer, FLOATS, FLOATS)
        check_unrotated("i_desc", self.input)
        check_unrotated("o_desc", self.output)
        size, new = self.input.size, self.output.size
        if len(size) != len(new):
            raise Invalid(f"o_desc has {len(new)} axes, expected {len(size)} as in i_desc")
        # (axis of a sample, extent of the input, extent of the output)
        self._axes = [(k, a, b) for k, (a, b) in enumerate(zip(size, new, strict=True)) if a != b]
        if len({a < b for _, a, b in self._axes}) > 1:
            raise Invalid(f"o_desc.size is {new} and i_desc.size {size}: all axes must grow, or all must shrink")
        for axis, a, b in self._axes:
            if max(a, b) % min(a, b):
                raise Invalid(f"o_desc.size[{axis}] is {b}, must be a multiple of i_desc's {a}, or divide it")
        if self._linear and len(self._axes) > _MOST_LINEAR:
            raise Unsupported(
                f"o_desc.size is {new} and i_desc.size {size}: {len(self._axes)} axes differ, and "
                f"BNNSInterpolationMethodLinear resizes {_MOST_LINEAR} at most"
            )

    def _points(self) -> list[tuple[int, int, Points]]:
        """(axis, extent of the input, points) of each axis that is resized."""
        points = _linear if self._linear else _nearest
        return [(axis, extent, points(extent, count, self._align)) for axis, extent, count in self._axes]

    def forward(self, arrays: Mapping[str, Array], out: Array | None) -> Array:
        source, axes = logical(arrays["in"], self.input.layout), self._points()
        y = np.empty((len(source), *self.output.size), self.output.dtype)
        for values, result in zip(source, y, strict=True):  # one by one, so that they stay in the cache
            for axis, _, points in axes:
                values = _interpolated(values, points, axis)
            put(result, values, False)
        return stored(y, self.output.layout)

    def backward(self, wanted: Gradients) -> LinearGradients:
        source, axes = logical(wanted.dy, self.output.layout), self._points()
        dx = np.empty((len(source), *self.input.size))
        for values, result in zip(source, dx, strict=True):
            for axis, extent, points in axes:
                values = _collected(values, points, axis, extent)
            result[...] = values
        return LinearGradients(dx=stored(dx, self.input.layout))


@creates(ResizeFilter, BNNSLayerParametersResize)
def BNNSFilterCreateLayerResize() -> None:
    """Create a filter that resizes axes by a whole factor, by the nearest element or by interpolation. None on failure.

    All axes that differ must grow, or all must shrink.
    """
