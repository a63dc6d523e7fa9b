"""Clipping, norms and their gradient."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from retrograd import bnns
from support.bnns import Descriptor, all_fail, describe, fails, normal

L2 = bnns.BNNSL2Norm


# ---- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_clip_by_value(dtype: Any) -> None:
    x = np.array([-3, -1, -0.5, 0, 0.25, 1, np.inf, -np.inf, np.nan], dtype)
    y = np.full(x.shape, 7, dtype)
    assert bnns.BNNSClipByValue(describe(y), describe(x), -1, 0.25) == 0
    assert np.array_equal(y, np.array([-1, -1, -0.5, 0, 0.25, 0.25, 0.25, -1, np.nan], dtype), equal_nan=True)
    assert bnns.BNNSClipByValue(describe(x), describe(x), -1, 0.25) == 0  # in place
    assert np.array_equal(x, y, equal_nan=True)


def test_clip_by_value_half_over_the_source_and_strided() -> None:
    memory = np.arange(-6, 6, dtype=np.float32)
    assert bnns.BNNSClipByValue(describe(memory[2:10]), describe(memory[:8]), -2, 1) == 0
    assert memory.tolist() == [-6, -5, -2, -2, -2, -2, -2, -1, 0, 1, 4, 5]
    wide = np.full((3, 8), 9, np.float32)
    assert bnns.BNNSClipByValue(describe(wide[:, ::2]), describe(normal(3, 4) * 9), -1, 1) == 0
    assert (np.abs(wide[:, ::2]) <= 1).all()
    assert (wide[:, 1::2] == 9).all()


def test_clip_by_norm_as_apple_prints_it() -> None:
    """Axis 1 of a row-major matrix: each row."""
    x = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
    y = np.empty_like(x)
    assert bnns.BNNSClipByNorm(describe(y), describe(x), 10, 0b10) == 0
    assert np.allclose(y, [[1, 2, 3], [4, 5, 6], [5.0257072, 5.743665, 6.461623]], rtol=1e-7)


@pytest.mark.parametrize("flags", range(4))
@pytest.mark.parametrize(
    ("layout", "first"),
    [
        (bnns.BNNSDataLayoutRowMajorMatrix, 0),  # bit 0: rows, the slower axis
        (bnns.BNNSDataLayoutColumnMajorMatrix, 1),
        (bnns.BNNSDataLayout2DLastMajor, 1),
        (bnns.BNNSDataLayout2DFirstMajor, 0),
    ],
)
def test_axes_of_matrices(layout: int, first: int, flags: int) -> None:
    x = normal(4, 5)
    axes = tuple(first if k == 0 else 1 - first for k in range(2) if flags >> k & 1) or (0, 1)
    norm = np.sqrt((x.astype(np.float64) ** 2).sum(axis=axes, keepdims=True))
    y = np.empty_like(x)
    assert bnns.BNNSClipByNorm(describe(y, layout), describe(x, layout), 2.5, flags) == 0
    assert np.allclose(y, x * np.minimum(1, 2.5 / norm), rtol=1e-6)
    result = np.empty(norm.size, np.float32)
    assert bnns.BNNSComputeNorm(describe(result), describe(x, layout), L2, flags) == 0
    assert np.allclose(result, norm.ravel(), rtol=1e-6)


def test_clip_by_norm_of_extremes() -> None:
    zeros = np.zeros(5, np.float32)
    assert bnns.BNNSClipByGlobalNorm([describe(zeros)], [describe(zeros)], 1, 0, 0) == 0
    assert bnns.BNNSClipByNorm(describe(zeros), describe(zeros), 0, 0) == 0
    assert not zeros.any()
    large = np.full(4, 3e38, np.float32)  # its squares are beyond float32
    assert bnns.BNNSClipByNorm(describe(large), describe(large), 1, 0) == 0
    assert np.allclose(large, 0.5, rtol=1e-6)
    small = np.full(4, 1e-30, np.float32)
    assert bnns.BNNSClipByNorm(describe(small), describe(small), 1e-31, 0) == 0
    assert np.allclose(small, 5e-32, rtol=1e-5)
    strange = np.array([1, np.nan, 2], np.float32)
    assert bnns.BNNSClipByNorm(describe(strange), describe(strange), 1, 0) == 0
    assert np.isnan(strange).all()  # as with any other arithmetic
    below = normal(7)
    before = below.copy()
    assert bnns.BNNSClipByNorm(describe(below), describe(below), 1e9, 0) == 0
    assert np.array_equal(below, before)


@pytest.mark.parametrize("known", [0.0, 20.0])
def test_clip_by_global_norm(known: float) -> None:
    sources = [normal(3, 4), normal(5, seed=1), normal(1, seed=2)]
    norm = known or np.sqrt(sum((a.astype(np.float64) ** 2).sum() for a in sources))
    results = [np.empty_like(a) for a in sources]
    status = bnns.BNNSClipByGlobalNorm([describe(a) for a in results], [describe(a) for a in sources], 3, 1.5, known)
    assert status == 0
    for source, result in zip(sources, results, strict=True):
        assert np.allclose(result, source * (1.5 / norm), rtol=1e-6)
    if not known:
        total = np.sqrt(sum((a.astype(np.float64) ** 2).sum() for a in results))
        assert np.isclose(total, 1.5, rtol=1e-6)
    # In place, in places of one another, and fewer than are listed.
    swapped = [a.copy() for a in sources[1:]]
    descriptors = [describe(swapped[0][:1]), describe(swapped[1])]
    assert bnns.BNNSClipByGlobalNorm(descriptors, descriptors[::-1], 2, 1e9, known) == 0
    assert (swapped[0][0], swapped[1][0]) == (sources[2][0], sources[1][0])
    assert bnns.BNNSClipByGlobalNorm([], [], 0, 1, 0) == 0


def test_what_clipping_refuses() -> None:
    x, y = normal(3, 4), np.full((3, 4), 7, np.float32)
    other = normal(4, 3)
    integers = np.zeros((3, 4), np.int32)
    fixed = y.copy()
    fixed.flags.writeable = False
    wrong: list[tuple[Any, Any, str]] = [
        (describe(y), describe(other), "dest.size is (4, 3), expected size=(columns, rows)=(3, 4) as in src"),
        (describe(y), describe(integers), "src.data_type is BNNSDataTypeInt32"),
        (describe(integers), describe(x), "dest.data_type is BNNSDataTypeInt32"),
        (describe(y.astype(np.float16)), describe(x), "dest.data_type is BNNSDataTypeFloat16, expected"),
        (describe(fixed), describe(x), "dest.data is read-only"),
        (None, describe(x), "dest is of type NoneType"),
        (describe(y), Descriptor(layout=0x20000, size=(4, 3), data_type=bnns.BNNSDataTypeFloat32), "src.data is NULL"),
    ]
    for dest, src, reason in wrong:
        for status in (
            bnns.BNNSClipByValue(dest, src, -1, 1),
            bnns.BNNSClipByNorm(dest, src, 1, 0),
            bnns.BNNSClipByGlobalNorm([dest], [src], 1, 1, 0),
        ):
            assert status == -1
            assert reason in (bnns.last_error() or "").replace("[0]", "")
    good = describe(y), describe(x)
    for status, reason in (
        (lambda: bnns.BNNSClipByValue(*good, 1, -1), "min_val is 1.0, must be at most max_val, which is -1.0"),
        (lambda: bnns.BNNSClipByValue(*good, float("nan"), 1), "min_val is nan"),
        (lambda: bnns.BNNSClipByNorm(*good, -1, 0), "max_norm is -1.0, must be at least 0"),
        (lambda: bnns.BNNSClipByNorm(*good, 1, 0b100), "axis_flags is 0x4, but src has 2 axes"),
        (lambda: bnns.BNNSClipByNorm(*good, 1, -1), "axis_flags is -1"),
        (lambda: bnns.BNNSClipByGlobalNorm([good[0]], [good[1]], 2, 1, 0), "dest has 1 descriptors, must have 2"),
        (lambda: bnns.BNNSClipByGlobalNorm(None, [good[1]], 1, 1, 0), "dest is of type NoneType"),  # type: ignore[arg-type]
        (lambda: bnns.BNNSClipByGlobalNorm([good[0]], [good[1]], 1, 1, -2), "use_norm is -2.0, must be at least 0"),
        (lambda: bnns.BNNSClipByGlobalNorm([good[0]] * 2, [good[1]] * 2, 2, 1, 0), "dest[0] overlaps dest[1]"),
    ):
        fails(status(), reason)  # type: ignore[no-untyped-call]
    assert (y == 7).all()


# ---- norms -----------------------------------------------------------------------------------------------------------

APPLES = np.array([[1, 2, 3], [4, 5, 6]], np.float32) * np.array([1, 10, 100, 1000], np.float32)[:, None, None]


@pytest.mark.parametrize(
    ("flags", "layout", "shape", "printed"),
    [
        (0b111, bnns.BNNSDataLayoutVector, (1,), [9587.45]),
        (0, bnns.BNNSDataLayoutVector, (1,), [9587.45]),
        (
            0b100,
            bnns.BNNSDataLayoutColumnMajorMatrix,
            (2, 3),
            [1005.0378, 2010.075, 3015.113, 4020.1511, 5025.189, 6030.227],
        ),
        (0b101, bnns.BNNSDataLayoutVector, (2,), [3760.507, 8819.171]),
    ],
)
def test_norms_as_apple_prints_them(flags: int, layout: int, shape: tuple[int, ...], printed: list[float]) -> None:
    y = np.empty(shape, np.float32)
    assert bnns.BNNSComputeNorm(describe(y, layout), describe(APPLES), L2, flags) == 0
    assert np.allclose(y.ravel(), printed, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("flags", range(8))
def test_gradient_of_norms_against_finite_differences(flags: int, accumulate: int) -> None:
    x = normal(2, 3, 5)
    axes = tuple(2 - k for k in range(3) if flags >> k & 1) or (0, 1, 2)
    left = tuple(extent for axis, extent in enumerate(x.shape) if axis not in axes) or (1,)
    y, dy, dx = np.empty(left, np.float32), normal(*left, seed=1), np.ones_like(x)
    assert bnns.BNNSComputeNorm(describe(y), describe(x), L2, flags) == 0
    status = bnns.BNNSComputeNormBackward(x, describe(dx, flags=accumulate), y, describe(dy), L2, flags)
    assert status == 0

    def loss(values: np.ndarray) -> float:
        return float((np.sqrt((values**2).sum(axis=axes)) * dy.reshape(left if len(axes) < 3 else ())).sum())

    direction = normal(2, 3, 5, seed=2).astype(np.float64)
    step = 1e-6
    slope = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    assert np.isclose(((dx - accumulate) * direction).sum(), slope, rtol=1e-5, atol=1e-5)


def test_gradient_of_a_norm_of_zero_is_zero() -> None:
    x = np.array([[0, 0], [3, 4]], np.float32)
    y, dy, dx = np.empty(2, np.float32), np.array([5, 10], np.float32), np.full((2, 2), 7, np.float32)
    assert bnns.BNNSComputeNorm(describe(y), describe(x), L2, 0b10) == 0
    assert y.tolist() == [0, 5]
    assert bnns.BNNSComputeNormBackward(x, describe(dx), y, describe(dy), L2, 0b10) == 0
    assert dx.tolist() == [[0, 0], [6, 8]]
    assert bnns.BNNSComputeNormBackward(x, describe(x), y, describe(dy), L2, 0b10) == 0  # over the input
    assert x.tolist() == [[0, 0], [6, 8]]


def test_what_norms_refuse() -> None:
    x, y, dx = normal(3, 4), np.full(3, 7, np.float32), np.full((3, 4), 7, np.float32)
    four = np.zeros(4, np.float32)
    norm, backward = bnns.BNNSComputeNorm, bnns.BNNSComputeNormBackward
    cases: list[tuple[Any, str]] = [
        (lambda: norm(describe(y), describe(x), 2, 0b10), "norm_type is 2; it must be BNNSL2Norm"),
        (lambda: norm(describe(y), describe(x), L2, 0), "dest.size is (3,), expected the extents (1,)"),
        (lambda: norm(describe(y), describe(x), L2, 0b01), "dest.size is (3,), expected the extents (4,)"),
        (lambda: norm(describe(y), describe(x), L2, 8), "axis_flags is 0x8, but src has 2 axes"),
        (lambda: norm(describe(y), None, L2, 0), "src is of type NoneType"),
        (lambda: backward(x, describe(dx), y, describe(four), L2, 0b10), "out_delta.size is (4,), expected"),
        (lambda: backward(None, describe(dx), y, describe(y), L2, 0b10), "in is NULL"),
        (lambda: backward(x, describe(dx), None, describe(y), L2, 0b10), "out is NULL"),
        (lambda: backward(x[:2], describe(dx), y, describe(y), L2, 0b10), "in has 32 bytes"),
        (lambda: backward(x, describe(dx, flags=2), y, describe(y), L2, 0b10), "in_delta.flags is 2"),
        (lambda: backward(x, None, y, describe(y), L2, 0b10), "in_delta is of type NoneType"),
        (lambda: backward(x, describe(dx), y, describe(y), 0, 0b10), "norm_type is 0"),
        (lambda: backward(x, describe(dx.astype(np.float16)), y, describe(y), L2, 2), "in_delta.data_type"),
    ]
    all_fail(cases, y, dx)
