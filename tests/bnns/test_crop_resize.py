"""BNNSCropResize and its gradient."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import BF16, F16, F32, TYPES, fails, normal, succeeds

Descriptor = bnns.BNNSNDArrayDescriptor
NEAREST, LINEAR = bnns.BNNSInterpolationMethodNearest, bnns.BNNSInterpolationMethodLinear
DEFAULT, ALIGN, UNALIGN, STRICT, OFFSET = range(5)
LAST4, LAST2, LAST5 = (bnns.BNNSDataLayout4DLastMajor, bnns.BNNSDataLayout2DLastMajor, bnns.BNNSDataLayout5DLastMajor)
FIRST4, FIRST2, FIRST5 = LAST4 | 1, LAST2 | 1, LAST5 | 1


def described(layout: int, array: np.ndarray, **fields: Any) -> Any:
    """An array, its last axis fastest, in a layout of as many axes."""
    size = array.shape if layout & 1 else array.shape[::-1]
    data_type = next(t for t, d in TYPES.items() if d == array.dtype)
    return Descriptor(**{"layout": layout, "size": size, "data": array, "data_type": data_type, **fields})


def parameters(mode: int = DEFAULT, box: int = 0, method: int = LINEAR, **fields: Any) -> Any:
    given = {"spatial_scale": 1.0, "sampling_mode": mode, "box_coordinate_mode": box, "method": method}
    return bnns.BNNSLayerParametersCropResize(**{**given, **fields})


def crop(x: np.ndarray, boxes: Any, size: tuple[int, int], given: Any, dtype: Any = np.float32) -> np.ndarray:
    """Crops [boxes, N, C, h, w] of images [N, C, H, W]."""
    roi = np.array(boxes, np.float32)
    y = np.full((len(roi), *x.shape[:2], *size), 7, dtype)
    succeeds(bnns.BNNSCropResize(given, described(LAST4, x), described(LAST2, roi), described(LAST5, y)))
    return y


def crop_backward(dx: np.ndarray, boxes: Any, dy: np.ndarray, given: Any, flags: int = 0) -> None:
    roi = np.array(boxes, np.float32)
    status = bnns.BNNSCropResizeBackward(
        given, described(LAST4, dx, flags=flags), described(LAST2, roi), described(LAST5, dy)
    )
    assert status == 0, bnns.last_error()


# ---- an oracle -------------------------------------------------------------------------------------------------------


def points(start: float, end: float, count: int, mode: int) -> list[float]:
    """The documented grids, for a box whose size, `xin`, counts its first and last element."""
    xin = abs(end - start) + 1
    found = []
    for i in range(count):
        if mode == DEFAULT:
            step = i * (xin - xin / count) / (count - 1) if count > 1 else 0.0
        elif mode == UNALIGN:
            step = i * xin / count + 0.5 * xin / count - 0.5
        elif mode == OFFSET:
            step = 0.5 * max(1.0, xin - 1) / count + i * max(1.0, xin - 1) / count
        elif mode == ALIGN and count == 1:
            step = (xin - 1) / 2
        else:
            step = i * (xin - 1) / (count - 1) if count > 1 else 0.0
        step = min(xin - 1, max(0.0, step))
        found.append(start + step if end >= start else start - step)
    return found


def corners(box: Any, mode: int, shape: tuple[int, int], scale: float, normalized: bool) -> list[tuple[float, float]]:
    """(start, end) in rows and in columns."""
    values = [float(v) * scale for v in box]
    pairs = [(values[0], values[2]), (values[1], values[3])]
    if mode in (bnns.BNNSCornersWidthFirst, bnns.BNNSCenterSizeWidthFirst):
        pairs.reverse()
    if normalized:
        pairs = [(a * (extent - 1), b * (extent - 1)) for (a, b), extent in zip(pairs, shape, strict=True)]
    if mode in (bnns.BNNSCenterSizeHeightFirst, bnns.BNNSCenterSizeWidthFirst):
        pairs = [(center - size / 2, center + size / 2) for center, size in pairs]
    return pairs


def jacobian(boxes: Any, shape: tuple[int, int], size: tuple[int, int], given: Any) -> tuple[np.ndarray, np.ndarray]:
    """What each pixel contributes to each point, [boxes, h, w, H, W], and which points are outside; point by point."""
    weights = np.zeros((len(boxes), *size, *shape))
    outside = np.zeros((len(boxes), *size), bool)
    for b, box in enumerate(boxes):
        ends = corners(box, given.box_coordinate_mode, shape, given.spatial_scale, given.normalized_coordinates)
        grids = [points(*pair, count, given.sampling_mode) for pair, count in zip(ends, size, strict=True)]
        for (i, row), (j, column) in itertools.product(enumerate(grids[0]), enumerate(grids[1])):
            if not (0 <= row <= shape[0] - 1 and 0 <= column <= shape[1] - 1):
                outside[b, i, j] = True
            elif given.method == NEAREST:
                weights[b, i, j, int(row + 0.5), int(column + 0.5)] = 1
            else:
                for r, c in itertools.product(range(shape[0]), range(shape[1])):
                    weights[b, i, j, r, c] = max(0.0, 1 - abs(row - r)) * max(0.0, 1 - abs(column - c))
    return weights, outside


def check(x: np.ndarray, boxes: Any, size: tuple[int, int], given: Any) -> np.ndarray:
    """Compare crops and their gradient with the oracle."""
    weights, outside = jacobian(boxes, x.shape[2:], size, given)
    exact = np.einsum("bijrc,nkrc->bnkij", weights, x.astype(np.float64))
    exact = np.where(outside[:, None, None], np.float32(given.extrapolation_value), exact)
    y = crop(x, boxes, size, given)
    assert np.allclose(y, exact, rtol=1e-5, atol=1e-5)
    dy = normal(*y.shape, seed=9)
    gradient = np.einsum("bijrc,bnkij->nkrc", weights, dy.astype(np.float64))
    for flags in (0, 1):
        dx = np.ones_like(x)
        crop_backward(dx, boxes, dy, given, flags)
        assert np.allclose(dx, gradient + flags, rtol=1e-5, atol=1e-5)
    return y


BOXES = {
    bnns.BNNSCornersHeightFirst: [
        (0, 0, 4, 6),
        (1, 2, 3, 3),
        (0.5, 1.25, 3.25, 5),
        (2, 3, 2, 3),
        (3, 5, 1, 0),
        (1, 2, 1.25, 2.5),
    ],
    bnns.BNNSCornersWidthFirst: [
        (0, 0, 6, 4),
        (2, 1, 3, 3),
        (1.25, 0.5, 5, 3.25),
        (3, 2, 3, 2),
        (5, 3, 0, 1),
        (2, 1, 2.5, 1.25),
    ],
    bnns.BNNSCenterSizeHeightFirst: [(2, 3, 4, 6), (2, 2.5, 2, 1), (1.5, 2.75, 2.5, 3.5), (2, 3, 0, 0), (3, 4, -2, 1)],
    bnns.BNNSCenterSizeWidthFirst: [(3, 2, 6, 4), (2.5, 2, 1, 2), (2.75, 1.5, 3.5, 2.5), (3, 2, 0, 0), (4, 3, 1, -2)],
}


@pytest.mark.parametrize("method", [NEAREST, LINEAR])
@pytest.mark.parametrize("mode", range(5))
@pytest.mark.parametrize("box", BOXES)
def test_every_sampling_and_box_mode(box: int, mode: int, method: int) -> None:
    x = normal(2, 3, 5, 7)
    for size in ((4, 3), (1, 1), (5, 7), (2, 11)):
        check(x, BOXES[box], size, parameters(mode, box, method, extrapolation_value=2.5))
    small = [[v / 6 for v in one] for one in BOXES[box]]
    check(x, small, (3, 4), parameters(mode, box, method, normalized_coordinates=True, extrapolation_value=-1.0))
    large = [[v * 8 for v in one] for one in BOXES[box]]
    check(x, large, (3, 4), parameters(mode, box, method, spatial_scale=0.125, extrapolation_value=-1.0))


def test_grids_as_documented() -> None:
    """Apple documents the points of a box of two elements; an image of its column numbers shows them."""
    x = np.arange(2, dtype=np.float32).reshape(1, 1, 1, 2)
    expected = {
        DEFAULT: {5: [0, 0.4, 0.8, 1, 1], 1: [0]},
        ALIGN: {5: [0, 0.25, 0.5, 0.75, 1], 1: [0.5]},
        UNALIGN: {5: [0, 0.1, 0.5, 0.9, 1], 1: [0.5]},
        STRICT: {5: [0, 0.25, 0.5, 0.75, 1], 1: [0]},
        OFFSET: {5: [0.1, 0.3, 0.5, 0.7, 0.9], 1: [0.5]},
    }
    for mode, grids in expected.items():
        for count, grid in grids.items():
            y = crop(x, [(0, 0, 0, 1)], (1, count), parameters(mode))
            assert np.allclose(y.ravel(), grid, atol=1e-6), mode


def test_crop_resize_as_apple_prints_it() -> None:
    values = [
        [0, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 1, 0, 9, 0, 9],
        [0, 0, 0, 0, 9, 0],
        [0, 0, 0, 9, 0, 9],
    ]
    x = np.array(values, np.float32).reshape(1, 1, 5, 6)
    given = parameters(bnns.BNNSLinearSamplingOffsetCorners, bnns.BNNSCenterSizeWidthFirst)
    y = crop(x, [(1, 1, 3, 3), (4, 3, 3, 3)], (3, 3), given)
    assert y[0, 0, 0].tolist() == [[0, 1, 0], [1, 1, 1], [0, 1, 0]]
    assert y[1, 0, 0].tolist() == [[9, 0, 9], [0, 9, 0], [9, 0, 9]]


def test_crop_resize_as_core_ml_computes_it() -> None:
    """The values that the tests of Apple's coremltools expect of the operation of the same name."""
    x = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
    aligned = parameters(ALIGN, bnns.BNNSCornersHeightFirst)
    assert crop(x, [(1, 1, 2, 2)], (2, 2), aligned).ravel().tolist() == [6, 7, 10, 11]
    assert crop(x, [(1, 1, 2, 2)], (1, 1), aligned).ravel().tolist() == [8.5]
    assert crop(x, [(2, 2, 1, 1)], (2, 2), aligned).ravel().tolist() == [11, 10, 7, 6]
    four = crop(x, [(1, 1, 2, 2)], (4, 4), aligned)[0, 0, 0]
    assert np.allclose(four, [[6 + (4 * i + j) / 3 for j in range(4)] for i in range(4)], atol=1e-5)
    normalized = parameters(ALIGN, bnns.BNNSCornersHeightFirst, normalized_coordinates=True)
    assert crop(x, [(0, 0, 1 / 3, 1 / 3)], (2, 2), normalized).ravel().tolist() == [1, 2, 5, 6]


@pytest.mark.parametrize("align", [False, True])
def test_whole_images_against_torch(align: bool, torch: Any) -> None:
    x = normal(2, 3, 5, 7)
    tensor = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.interpolate(tensor, (8, 6), mode="bilinear", align_corners=align)
    given = parameters(STRICT if align else UNALIGN, normalized_coordinates=True)
    y = crop(x, [(0, 0, 1, 1)], (8, 6), given)
    assert np.allclose(y[0], expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    dy, dx = normal(1, 2, 3, 8, 6, seed=1), np.empty_like(x)
    expected.backward(torch.tensor(dy[0], dtype=torch.float64))
    crop_backward(dx, [(0, 0, 1, 1)], dy, given)
    assert np.allclose(dx, tensor.grad.numpy(), rtol=1e-5, atol=1e-5)


def test_boxes_against_torch(torch: Any) -> None:
    """Boxes that overlap, inside of the image, by grid_sample and its gradient."""
    x, boxes = normal(2, 3, 5, 7), [(0.5, 1, 3.5, 6), (1, 0.25, 4, 2.5), (1, 1, 3, 3)]
    dy = normal(3, 2, 3, 4, 5, seed=1)
    tensor = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    total = 0
    for k, box in enumerate(boxes):
        rows, columns = np.linspace(box[0], box[2], 4), np.linspace(box[1], box[3], 5)
        grid = np.stack(np.meshgrid(2 * columns / 6 - 1, 2 * rows / 4 - 1), axis=-1)
        grids = torch.tensor(np.broadcast_to(grid, (2, *grid.shape)).copy())
        expected = torch.nn.functional.grid_sample(tensor, grids, align_corners=True)
        assert np.allclose(crop(x, [box], (4, 5), parameters(STRICT))[0], expected.detach().numpy(), atol=1e-5)
        total = total + (expected * torch.tensor(dy[k], dtype=torch.float64)).sum()
    total.backward()  # type: ignore[attr-defined]
    dx = np.empty_like(x)
    crop_backward(dx, boxes, dy, parameters(STRICT))
    assert np.allclose(dx, tensor.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [NEAREST, LINEAR])
def test_points_outside_get_the_extrapolation_value_and_no_gradient(method: int) -> None:
    x = normal(1, 2, 3, 3)
    given = parameters(STRICT, method=method, extrapolation_value=np.nan)
    y = crop(x, [(-1, -1, 3, 3), (-2.5, 0, -2, 2)], (5, 5), given)
    inside = np.zeros((5, 5), bool)
    inside[1:4, 1:4] = True
    assert np.array_equal(np.isnan(y[0]), np.broadcast_to(~inside, (1, 2, 5, 5)))
    assert np.array_equal(y[0, 0, :, 1:4, 1:4], x[0])
    assert np.isnan(y[1]).all()
    dx, dy = np.full_like(x, 7), np.full_like(y, np.nan)
    dy[0, 0, :, 1:4, 1:4] = x[0]
    crop_backward(dx, [(-1, -1, 3, 3), (-2.5, 0, -2, 2)], dy, given)
    assert np.array_equal(dx, x)
    check(x, [(-1.5, -1, 1.25, 5), (9, 9, 12, 12)], (4, 3), parameters(OFFSET, method=method, extrapolation_value=4.0))


def test_the_border_is_inside_although_coordinates_are_scaled() -> None:
    """0.1 times 70 is 7 in float32, the last column of eight; in exact arithmetic it would be beyond."""
    x = normal(1, 1, 8, 8)
    y = crop(x, [(0, 0, 70, 70)], (8, 8), parameters(STRICT, spatial_scale=0.1, extrapolation_value=99.0))
    assert np.allclose(y[0], x, rtol=1e-5, atol=1e-5)
    assert y[0, 0, 0, 7, 7] == x[0, 0, 7, 7]
    y = crop(x, [(-1e30, -1e30, 7, 7), (7, 7, -1e30, -1e30)], (8, 8), parameters(STRICT, extrapolation_value=99.0))
    assert y[0, 0, 0, 7, 7] == y[1, 0, 0, 0, 0] == x[0, 0, 7, 7]
    assert (y == 99).sum() == 2 * 63


def test_nan_and_infinity_reach_only_points_beside_them() -> None:
    for bad in (np.nan, np.inf):
        x = np.ones((1, 1, 3, 4), np.float32)
        x[0, 0, 1, 2] = bad
        for mode in (ALIGN, STRICT):
            assert np.array_equal(crop(x, [(0, 0, 2, 3)], (3, 4), parameters(mode))[0], x, equal_nan=True)
        y = crop(x, [(0, 0, 1, 1)], (3, 3), parameters(STRICT))
        assert np.isfinite(y).all()
        y = crop(x, [(0.5, 0.5, 0.5, 2.5)], (1, 3), parameters(STRICT))
        assert np.isfinite(y).ravel().tolist() == [True, False, False]
        dx, dy = np.empty_like(x), np.ones((1, 1, 1, 3, 4), np.float32)
        dy[0, 0, 0, 1, 2] = bad
        crop_backward(dx, [(0, 0, 2, 3)], dy, parameters(STRICT))
        assert np.array_equal(dx, x, equal_nan=True)


def test_the_same_box_twice_adds_its_gradients() -> None:
    dy, dx = normal(2, 1, 2, 3, 3), np.empty((1, 2, 4, 4), np.float32)
    crop_backward(dx, [(0, 0, 2, 2), (0, 0, 2, 2)], dy, parameters(STRICT))
    assert np.allclose(dx[:, :, :3, :3], dy.sum(0), rtol=1e-6, atol=1e-6)
    assert (dx[:, :, 3] == 0).all()
    assert (dx[:, :, :, 3] == 0).all()


def test_layouts_by_memory_and_strides(caplog: pytest.LogCaptureFixture) -> None:
    x, boxes = normal(2, 3, 5, 7), np.array([(0.5, 1, 3.5, 6), (1, 0.25, 4, 2.5)], np.float32)
    given = parameters(OFFSET)
    expected = crop(x, boxes, (4, 3), given)
    y = np.full_like(expected, 7)
    caplog.set_level(logging.INFO, "retrograd.bnns")
    first = described(FIRST4, x), described(FIRST2, boxes), described(FIRST5, y)
    assert bnns.BNNSCropResize(given, *first) == 0, bnns.last_error()
    assert np.array_equal(y, expected)
    assert bnns.BNNSCropResize(given, first[0], Descriptor.from_array(boxes), first[2]) == 0  # RowMajorMatrix
    assert not caplog.records
    wide, rows = np.full((2, 3, 5, 9), np.nan, np.float32)[..., 1:8], np.zeros((2, 6), np.float32)[:, :4]
    target = np.full((2, 2, 3, 4, 5), 7, np.float32)
    wide[...], rows[...] = x, boxes
    strided = Descriptor.from_array(wide), Descriptor.from_array(rows), Descriptor.from_array(target[..., ::2][..., :3])
    assert bnns.BNNSCropResize(given, *strided) == 0, bnns.last_error()
    assert np.array_equal(target[..., ::2], expected)
    assert (target[..., 1::2] == 7).all()
    assert "input is not contiguous; this is accepted here, but not by Apple's headers" in caplog.text
    dx, dense = np.full((2, 3, 5, 9), 7, np.float32), np.empty_like(x)
    dy = normal(*y.shape, seed=3)
    crop_backward(dense, boxes, dy, given)
    status = bnns.BNNSCropResizeBackward(
        given, Descriptor.from_array(dx[..., 1:8]), Descriptor.from_array(rows), described(FIRST5, dy)
    )
    assert status == 0, bnns.last_error()
    assert np.array_equal(dx[..., 1:8], dense)
    assert (dx[..., [0, 8]] == 7).all()


@pytest.mark.parametrize("types", [(F16, F16, F16), (BF16, F32, BF16), (F32, F16, BF16)])
def test_types_of_a_crop_resize(types: tuple[int, int, int]) -> None:
    x = normal(1, 2, 4, 5).astype(TYPES[types[0]])
    roi = np.array([(0, 0, 3, 4), (1, 0.5, 2, 3)]).astype(TYPES[types[1]])
    given = parameters(STRICT, extrapolation_value=0.5)
    weights, _ = jacobian(roi.astype(np.float64), (4, 5), (3, 3), given)
    exact = np.einsum("bijrc,nkrc->bnkij", weights, x.astype(np.float64))
    y = np.empty((2, 1, 2, 3, 3), TYPES[types[2]])
    assert bnns.BNNSCropResize(given, described(LAST4, x), described(LAST2, roi), described(LAST5, y)) == 0
    bound = float(ml_dtypes.finfo(y.dtype).eps) * np.abs(exact) + 1e-6
    assert (np.abs(y.astype(np.float64) - exact) <= bound).all()
    status = bnns.BNNSCropResizeBackward(given, described(LAST4, x), described(LAST2, roi), described(LAST5, y))
    assert status == -1
    assert ".data_type is BNNSDataType" in (bnns.last_error() or "")


def test_crop_resize_calls_that_fail_write_nothing() -> None:
    x, y = normal(2, 3, 5, 7), np.full((1, 2, 3, 4, 4), 7, np.float32)
    boxes, image, out = np.array([(0, 0, 4, 4)], np.float32), described(LAST4, x), described(LAST5, y)
    roi, good = described(LAST2, boxes), parameters()
    five = np.zeros((1, 5), np.float32)
    nan = np.array([(0, 0, 4, np.nan)], np.float32)
    huge = np.array([(0, 0, 1e38, 4)], np.float32)
    integers = described(LAST4, x, data_type=bnns.BNNSDataTypeInt32)
    weights = described(bnns.BNNSDataLayoutConvolutionWeightsOIHW, x)
    cases: list[tuple[Any, str]] = [
        ((parameters(5), image, roi, out), "sampling_mode is 5, which is not a BNNSLinearSamplingMode"),
        ((parameters(box=4), image, roi, out), "box_coordinate_mode is 4, which is not a BNNSBoxCoordinateMode"),
        ((parameters(method=2), image, roi, out), "method is 2, which is not a BNNSInterpolationMethod"),
        ((parameters(spatial_scale=0.0), image, roi, out), "spatial_scale is 0, must be positive and finite"),
        ((parameters(spatial_scale=np.inf), image, roi, out), "spatial_scale is inf"),
        ((parameters(extrapolation_value="x"), image, roi, out), "extrapolation_value is 'x'"),
        ((None, image, roi, out), "layer_params is NULL, must be BNNSLayerParametersCropResize"),
        ((good, None, roi, out), "input is of type NoneType, not BNNSNDArrayDescriptor"),
        ((good, integers, roi, out), "input.data_type is BNNSDataTypeInt32"),
        ((good, Descriptor.from_array(x[0]), roi, out), "input.layout is BNNSDataLayoutImageCHW; it must be of 4 axes"),
        ((good, weights, roi, out), "input.layout is BNNSDataLayoutConvolutionWeightsOIHW; it must be of 4 axes"),
        ((good, image, Descriptor.from_array(boxes[0]), out), "roi.layout is BNNSDataLayoutVector; it must be of 2"),
        ((good, image, described(LAST2, five), out), "roi has size=(5, 1) (fastest first), expected 4 coordinates"),
        (
            (good, image, described(LAST2, nan), out),
            "roi has the box [0.0, 0.0, 4.0, nan] at index 0, which is not finite",
        ),
        ((parameters(spatial_scale=10.0), image, described(LAST2, huge), out), "which is not finite in pixels"),
        (
            (good, image, described(LAST2, np.zeros((2, 4), np.float32)), out),
            "output has size=(4, 4, 3, 2, 1) (fastest first): its channels, images and boxes are (3, 2, 1), expected "
            "(3, 2, 2) as in input and roi",
        ),
        ((good, image, roi, described(LAST5, y, data=bytes(y.nbytes))), "output.data is read-only"),
        ((good, image, roi, described(LAST5, y, data=x)), "output overlaps input in memory"),
        ((good, image, roi, described(LAST5, y, data=None)), "output.data is NULL"),
        ((good, described(LAST4, x, data=x[0]), roi, out), "input.data has 420 bytes, but"),
        ((good, image, roi, out, 3), "filter_params is of type int"),
    ]
    before = x.copy()
    for arguments, reason in cases:
        fails(bnns.BNNSCropResize(*arguments), reason)
    dx, dy = np.full_like(x, 7), normal(*y.shape)
    delta, incoming = described(LAST4, dx), described(LAST5, dy)
    backward: list[tuple[Any, str]] = [
        ((good, described(LAST4, dx, flags=2), roi, incoming), "in_delta.flags is 2"),
        ((good, described(LAST4, dx, data=None), roi, incoming), "in_delta.data is NULL"),
        ((good, delta, roi, described(LAST5, dy, data=dx)), "in_delta overlaps out_delta in memory"),
        ((good, delta, described(LAST2, nan), incoming), "which is not finite in pixels"),
        ((good, described(LAST4, dx, stride=(1, 1, 1, 1)), roi, incoming), "in_delta.stride is (1, 1, 1, 1)"),
        ((good, delta, roi, described(LAST5, dy[:, :1].copy())), "images and boxes are (3, 1, 1), expected (3, 2, 1)"),
        ((good, delta, None, incoming), "roi is of type NoneType"),
    ]
    for arguments, reason in backward:
        fails(bnns.BNNSCropResizeBackward(*arguments), reason)
    assert np.array_equal(x, before)
    assert (y == 7).all()
    assert (dx == 7).all()


def test_swifts_crop_resize_layer() -> None:
    layer = BNNS.CropResizeLayer
    x, roi = normal(2, 3, 5, 7), np.array([(0.25, 0.5, 0.75, 1), (0, 0, 0.5, 0.5)], np.float32)
    shapes = [BNNS.Shape.tensor4DLastMajor(7, 5, 3, 2), BNNS.Shape.matrixLastMajor(4, 2)]  # type: ignore[attr-defined]
    out = BNNS.Shape.tensor5DLastMajor(3, 4, 3, 2, 2)  # type: ignore[attr-defined]
    y, dy, dx = np.empty((2, 2, 3, 4, 3), np.float32), normal(2, 2, 3, 4, 3, seed=1), np.empty_like(x)
    gradient = np.empty_like(x)
    for mode, box in itertools.product(layer.LinearSamplingMode, layer.BoxCoordinateMode):
        made = layer(
            coordinatesAreNormalized=True,
            spatialScale=0.5,
            extrapolationValue=3.0,
            samplingMode=mode,
            boxCoordinateMode=box,
        )
        given = {"regionOfInterest": shapes[1].descriptor(roi)}
        made.apply(input=shapes[0].descriptor(x), output=out.descriptor(y), **given)
        made.applyBackward(outputGradient=out.descriptor(dy), generatingInputGradient=shapes[0].descriptor(dx), **given)
        same = parameters(
            mode.value, box.value, normalized_coordinates=True, spatial_scale=0.5, extrapolation_value=3.0
        )
        assert np.array_equal(y, crop(x, roi, (4, 3), same))
        crop_backward(gradient, roi, dy, same)
        assert np.array_equal(dx, gradient)
    assert [mode.value for mode in layer.LinearSamplingMode] == [DEFAULT, ALIGN, UNALIGN, STRICT, OFFSET]
    corners = layer.BoxCoordinateMode.cornersHeightFirst
    plain = layer(coordinatesAreNormalized=False, spatialScale=1, boxCoordinateMode=corners)
    plain.apply(input=shapes[0].descriptor(x), output=out.descriptor(y), regionOfInterest=shapes[1].descriptor(roi))
    assert np.array_equal(y, crop(x, roi, (4, 3), parameters()))
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: BNNSCropResize: output overlaps"):
        plain.apply(input=shapes[0].descriptor(x), output=out.descriptor(x), regionOfInterest=shapes[1].descriptor(roi))
    with pytest.raises(BNNS.Error, match="arrayDescriptorInvalidData: regionOfInterest has no data"):
        plain.apply(input=shapes[0].descriptor(x), output=out.descriptor(y), regionOfInterest=shapes[1].descriptor())
