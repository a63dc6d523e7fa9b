"""Crop-resize: parts of images, sampled on a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final, NamedTuple

import numpy as np

from . import _constants as c
from ._direct import Descriptor, Given, Operand, Operands, Parameters, as_stored
from ._failure import Invalid, note_extension, status
from ._filter import FLOATS, checked_parameters
from ._layer import Result, checked_layer, float32_delta
from ._memory import Array, as_float, size_of
from ._names import layout_name
from ._resize import Points, checked_method, points_at
from ._structures import Bool, Float, Structure, UInt32

_MODES: Final = (
    c.BNNSLinearSamplingDefault,
    c.BNNSLinearSamplingAlignCorners,
    c.BNNSLinearSamplingUnalignCorners,
    c.BNNSLinearSamplingStrictAlignCorners,
    c.BNNSLinearSamplingOffsetCorners,
)
# Whether the first coordinate is a height, and whether boxes are corners; otherwise a center and sizes.
_BOXES: Final = {
    c.BNNSCornersHeightFirst: (True, True),
    c.BNNSCornersWidthFirst: (False, True),
    c.BNNSCenterSizeHeightFirst: (True, False),
    c.BNNSCenterSizeWidthFirst: (False, False),
}


class BNNSLayerParametersCropResize(Structure):
    """How boxes are written, and which points of them are sampled.

    ``normalized_coordinates``: 0 is the first pixel and 1 the last. ``spatial_scale`` multiplies coordinates. Points
    outside of the image get ``extrapolation_value``.
    """

    normalized_coordinates: Bool
    spatial_scale: Float
    extrapolation_value: Float
    sampling_mode: UInt32
    box_coordinate_mode: UInt32
    method: UInt32

    _prefixes: ClassVar[Mapping[str, str]] = {
        "sampling_mode": "BNNSLinearSampling",
        "method": "BNNSInterpolationMethod",
    }


class _Sampling:
    """The parameters, checked."""

    def __init__(self, parameters: object) -> None:
        layer = checked_layer(BNNSLayerParametersCropResize, parameters)
        self.mode, box = layer.sampling_mode, layer.box_coordinate_mode
        if not isinstance(self.mode, int) or self.mode not in _MODES:
            raise Invalid(f"sampling_mode is {self.mode!r}, which is not a BNNSLinearSamplingMode")
        if not isinstance(box, int) or box not in _BOXES:
            raise Invalid(f"box_coordinate_mode is {box!r}, which is not a BNNSBoxCoordinateMode")
        self.height_first, self.corners = _BOXES[box]
        self.linear = checked_method(layer.method)
        self.normalized = bool(layer.normalized_coordinates)
        self.scale = as_float("spatial_scale", layer.spatial_scale)
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise Invalid(f"spatial_scale is {self.scale:g}, must be positive and finite")
        self.outside = as_float("extrapolation_value", layer.extrapolation_value)

    def intervals(self, roi: Array, height: int, width: int) -> tuple[Array, Array]:
        """Start and end of each box, [boxes, 2], in rows and in columns of an image; in float32, as C computes."""
        rows, columns = ((0, 2), (1, 3)) if self.height_first else ((1, 3), (0, 2))
        found = []
        with np.errstate(all="ignore"):
            boxes = roi.astype(np.float32) * np.float32(self.scale)
            for pair, extent in ((rows, height), (columns, width)):
                ends = boxes[:, pair]
                if self.normalized:
                    ends = ends * np.float32(extent - 1)
                if not self.corners:
                    center, half = ends[:, 0], ends[:, 1] / np.float32(2)
                    ends = np.stack([center - half, center + half], axis=1)
                found.append(ends)
        bad = ~np.isfinite(np.concatenate(found, axis=1)).all(axis=1)
        if bad.any():
            box = int(np.flatnonzero(bad)[0])
            raise Invalid(f"roi has the box {roi[box].tolist()} at index {box}, which is not finite in pixels")
        return found[0], found[1]

    def grid(self, ends: Array, count: int) -> Array:
        """`count` points of each interval, [boxes, count]. In an interval whose end is before its start, mirrored."""
        start, end = ends.astype(np.float64).T[:, :, None]
        length = np.abs(end - start)  # from the first element of a box to the last: one less than its size
        i, size = np.arange(count), length + 1
        # Multiplied before they are divided, so that points on an element are exact.
        if self.mode == c.BNNSLinearSamplingDefault:
            steps = i * size / count
        elif self.mode == c.BNNSLinearSamplingUnalignCorners:
            steps = (i + 0.5) * size / count - 0.5
        elif self.mode == c.BNNSLinearSamplingOffsetCorners:
            steps = (i + 0.5) * np.maximum(length, 1) / count
        elif self.mode == c.BNNSLinearSamplingAlignCorners and count == 1:
            steps = length / 2
        else:
            steps = i * length / max(count - 1, 1)
        steps = np.clip(steps, 0, length)
        # The end itself, which a start far away would round off.
        return np.asarray(np.where(steps == length, end, start + np.where(end < start, -steps, steps)))

    def points(self, grid: Array, extent: int) -> tuple[Points, Array]:
        """The elements to interpolate between, and which points are inside of the axis."""
        inside = (grid >= 0) & (grid <= extent - 1)
        known = np.where(inside, grid, 0.0)
        if not self.linear:
            return points_at(np.floor(known + 0.5).astype(np.intp), np.zeros(grid.shape)), inside
        low = np.floor(known)
        return points_at(low.astype(np.intp), known - low), inside


class _Taps(NamedTuple):
    """The points of all boxes."""

    rows: Points  # [boxes, h]
    columns: Points  # [boxes, w]
    inside: Array  # [boxes, h, w]

    def corners(self) -> Iterator[tuple[Array, Array, Array]]:
        """(row, column, weight) of the four elements that surround each point, [boxes, h, w] after broadcasting."""
        for row, down in _sides(self.rows):
            for column, right in _sides(self.columns):
                yield row[:, :, None], column[:, None, :], down[:, :, None] * right[:, None, :]


def _sides(points: Points) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The elements on both sides of each point, with their weights."""
    return (points.low, 1 - points.weight), (points.high, points.weight)


def _taps(sampling: _Sampling, images: Array, roi: Array, crops: Array) -> _Taps:
    (*_, height, width), (*_, h, w) = images.shape, crops.shape
    vertical, horizontal = sampling.intervals(roi, height, width)
    rows, inside_rows = sampling.points(sampling.grid(vertical, h), height)
    columns, inside_columns = sampling.points(sampling.grid(horizontal, w), width)
    return _Taps(rows, columns, inside_rows[:, :, None] & inside_columns[:, None, :])


def _between(low: Array, high: Array, weight: Array) -> Array:
    """``(1 - weight) low + weight high`` in float64."""
    low, high = low.astype(np.float64), high.astype(np.float64)
    with np.errstate(all="ignore"):  # an infinity times 0 would be NaN
        return np.where(weight == 0, low, (1 - weight) * low + weight * high)


def _sums_by_index(values: Array, index: Array, extent: int) -> Array:
    """For each index below `extent`, the sum of the rows of `values` that have it; in float64. There is a row."""
    total = np.zeros((extent, *values.shape[1:]))
    order = np.argsort(index, kind="stable")
    found = index[order]
    starts = np.flatnonzero(np.concatenate([[True], found[1:] != found[:-1]]))
    with np.errstate(all="ignore"):
        total[found[starts]] = np.add.reduceat(values[order], starts, axis=0)
    return total


# ---- arguments ------------------------------------------------------------------------------------------------------


def _operand(name: str, written: bool = False) -> Operand:
    return Operand(name, FLOATS, written=written, rotated=True, order=as_stored)


_FORWARD: Final = Operands(_operand("input"), _operand("roi"), _operand("output", written=True), disjoint=True)
_BACKWARD: Final = Operands(_operand("in_delta", written=True), _operand("roi"), _operand("out_delta"), disjoint=True)


def _checked(function: str, given: tuple[Given, ...]) -> list[Array]:
    """The arrays. Raises unless these are images, boxes, and a crop of every image for every box."""
    for (name, geometry, _), words in zip(given, ("W, H, C, N", "4, boxes", "w, h, C, N, boxes"), strict=True):
        rank = words.count(",") + 1
        # Only these say nothing of what their axes mean; matrices of boxes have a layout of their own too.
        generic = geometry.layout & 0x8000 or rank == 2
        if len(geometry.extents) != rank or not generic:
            shown = layout_name(geometry.layout)
            raise Invalid(f"{name}.layout is {shown}; it must be of {rank} axes, ({words}) from the fastest on")
    image, roi, crops = (one.geometry for one in given)
    if roi.extents[0] != 4:
        raise Invalid(f"roi has {size_of(roi)}, expected 4 coordinates of each box along its fastest axis")
    wanted = (*image.extents[2:], roi.extents[1])
    if crops.extents[2:] != wanted:
        raise Invalid(
            f"{given[2].name} has {size_of(crops)}: its channels, images and boxes are {crops.extents[2:]}, expected "
            f"{wanted} as in {given[0].name} and roi"
        )
    for one in given:
        if not one.geometry.dense:
            note_extension(function, f"{one.name} is not contiguous")
    return [one.array for one in given]


# ---- Apple's functions ----------------------------------------------------------------------------------------------


@status(-1)
def BNNSCropResize(
    layer_params: BNNSLayerParametersCropResize,
    input: Descriptor,
    roi: Descriptor,
    output: Descriptor,
    filter_params: Parameters = None,
) -> int:
    """Sample every box of every image on a grid of the output's size. 0, or -1 on failure.

    From the fastest axis on, `input` is (W, H, C, N), `roi` (4, boxes) and `output` (w, h, C, N, boxes).
    """
    checked_parameters(filter_params)
    sampling = _Sampling(layer_params)
    x, boxes, y = _checked("BNNSCropResize", _FORWARD(input, roi, output))
    taps = _taps(sampling, x, boxes, y)
    values = _sampled(x, taps, sampling.linear)
    with np.errstate(all="ignore"):
        y[...] = np.moveaxis(np.where(taps.inside, values, sampling.outside), 2, 0)
    return 0


def _sampled(x: Array, taps: _Taps, linear: bool) -> Array:
    """The value of every point of every box, [N, C, boxes, h, w]."""
    found = []
    for row in (taps.rows.low, taps.rows.high) if linear else (taps.rows.low,):
        values = x[:, :, row[:, :, None], taps.columns.low[:, None, :]]
        if linear:
            high = x[:, :, row[:, :, None], taps.columns.high[:, None, :]]
            values = _between(values, high, taps.columns.weight[:, None, :])
        found.append(values)
    return _between(found[0], found[1], taps.rows.weight[:, :, None]) if linear else found[0].astype(np.float64)


@status(-1)
def BNNSCropResizeBackward(
    layer_params: BNNSLayerParametersCropResize,
    in_delta: Descriptor,
    roi: Descriptor,
    out_delta: Descriptor,
    filter_params: Parameters = None,
) -> int:
    """Compute the gradient of the images of :func:`BNNSCropResize`: the transpose of its interpolation. 0, or -1."""
    checked_parameters(filter_params)
    sampling = _Sampling(layer_params)
    for name, delta in (("in_delta", in_delta), ("out_delta", out_delta)):
        float32_delta(name, delta)
    dx, boxes, dy = _checked("BNNSCropResizeBackward", _BACKWARD(in_delta, roi, out_delta))
    result = Result("in_delta", in_delta, dx)
    taps = _taps(sampling, dx, boxes, dy)
    n, channels, height, width = dx.shape
    g = np.moveaxis(dy, 0, 2).reshape(n * channels, -1).T  # [points, images and channels]
    total = np.zeros((height * width, n * channels))
    for row, column, weight in taps.corners():
        used = (taps.inside & (weight > 0)).ravel()
        if not used.any():
            continue
        index = np.broadcast_to(row * width + column, taps.inside.shape).ravel()[used]
        with np.errstate(all="ignore"):
            total += _sums_by_index(weight.ravel()[used, None] * g[used], index, height * width)
    result.put(total.T.reshape(dx.shape))
    return 0
