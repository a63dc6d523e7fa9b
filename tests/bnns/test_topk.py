"""The largest values along an axis: BNNSDirectApplyTopK, BNNSDirectApplyInTopK, and Swift's names for them."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import Descriptor, describe, sample, succeeds

Array = np.ndarray[Any, Any]
ROW, COLUMN = bnns.BNNSDataLayoutRowMajorMatrix, bnns.BNNSDataLayoutColumnMajorMatrix
FIRST2, LAST2 = bnns.BNNSDataLayout2DFirstMajor, bnns.BNNSDataLayout2DLastMajor
IMAGE, FIRST3 = bnns.BNNSDataLayoutImageCHW, bnns.BNNSDataLayout3DFirstMajor
# Apple's matrix, of its pages on both functions.
SOURCE = np.array([[1, 2, 3, 9], [1, 6, 7, 1], [9, 0, 1, 3], [4, 5, 8, 1]], np.float32)


def oracle(x: Array, k: int, axis: int) -> tuple[Array, Array]:
    """By sorting Python tuples: NaN first, then larger values, then lower indices."""
    rows = np.moveaxis(x, axis, -1)
    at = np.empty((*rows.shape[:-1], k), np.int64)
    for where in np.ndindex(rows.shape[:-1]):
        row = [float(value) for value in rows[where]]
        order = sorted(
            range(len(row)), key=lambda i, row=row: (row[i] == row[i], -row[i] if row[i] == row[i] else 0, i)
        )
        at[where] = order[:k]
    return np.moveaxis(np.take_along_axis(rows, at, -1), -1, axis), np.moveaxis(at, -1, axis)


def topk(x: Array, k: int, axis: int, position: int, layout: int | None = None) -> tuple[Array, Array]:
    """Values and indices of a batch. `position` is where the axis is in a sample, slowest first."""
    shape = list(x.shape)
    shape[1 + position] = k
    values, indices = np.full(shape, 7, x.dtype), np.full(shape, -7, np.int32)
    status = bnns.BNNSDirectApplyTopK(
        k, axis, len(x), sample(x, layout), 0, sample(values, layout), 0, sample(indices, layout), 0
    )
    assert status == 0, bnns.last_error()
    return values, indices


def in_topk(x: Array, k: int, axis: int, test: Array) -> Array:
    output = np.zeros(test.shape, np.bool_)
    succeeds(bnns.BNNSDirectApplyInTopK(k, axis, len(x), sample(x), 0, sample(test), 0, sample(output), 0))
    return output


# ---- what Apple prints -----------------------------------------------------------------------------------------------


def test_the_largest_of_each_column_as_apple_prints_them() -> None:
    values, indices = np.full((2, 4), -1, np.float32), np.full((2, 4), -1, np.int32)
    status = bnns.BNNSDirectApplyTopK(2, 0, 1, describe(SOURCE), 16, describe(values), 8, describe(indices), 8, None)
    assert status == 0
    assert values.tolist() == [[9, 6, 8, 9], [4, 5, 7, 3]]
    assert indices.tolist() == [[2, 1, 3, 0], [3, 3, 1, 2]]


def test_elements_of_rows_among_the_largest_as_apple_prints_them() -> None:
    test, output = np.array([3, 2, 1, 0], np.int32), np.zeros(4, np.bool_)
    status = bnns.BNNSDirectApplyInTopK(2, 1, 1, describe(SOURCE), 16, describe(test), 4, describe(output), 4, None)
    assert status == 0
    assert output.tolist() == [True, True, False, False]


def test_the_batch_of_apples_header() -> None:
    """Three matrices; the ties of the third are all among the largest."""
    x = np.array(
        [
            [[1, 3, 5, 7], [2, 5, 1, 9], [1, 5, 3, 2]],
            [[1, 8, 3, 4], [8, 1, 3, 5], [1, 7, 2, 3]],
            [[4, 8, 7, 7], [4, 3, 8, 5], [5, 7, 3, 1]],
        ],
        np.float32,
    )
    test = np.array([[0, 3, 1], [2, 2, 0], [3, 2, 1]], np.int32)
    # The header takes the value at index 3 of (2, 5, 1, 9) for 1. It is 9, and among the two largest.
    expected = [[False, True, True], [False, False, False], [True, True, True]]
    assert in_topk(x, 2, 1, test).tolist() == expected


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "first"),
    [(ROW, 0), (COLUMN, 1), (LAST2, 1), (FIRST2, 0)],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_top_k_axes_of_matrices(layout: int, first: int, axis: int) -> None:
    """Axis 0 of a row-major matrix is that of its rows, although ``size`` lists columns first."""
    x = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(np.float32)
    position = first if axis == 0 else 1 - first
    values, indices = topk(x, 3, axis, position, layout)
    expected, at = oracle(x, 3, 1 + position)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(indices, at)


@pytest.mark.parametrize(
    ("layout", "order"),
    [(IMAGE, (2, 1, 0)), (FIRST3, (0, 1, 2)), (bnns.BNNSDataLayoutMHA_DHK, (2, 0, 1))],
)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_top_k_axes_of_images(layout: int, order: tuple[int, ...], axis: int) -> None:
    x = np.random.default_rng(axis).integers(0, 4, (2, 3, 5, 4)).astype(np.float32)
    position = order[axis]
    values, indices = topk(x, 2, axis, position, layout)
    expected, at = oracle(x, 2, 1 + position)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(indices, at)


@pytest.mark.parametrize("extent", [1, 2, 3, 13, 31, 32, 257])
def test_every_k_of_difficult_extents(extent: int) -> None:
    """Few different values, so that almost all are ties."""
    x = np.random.default_rng(extent).integers(0, 3, (2, 3, extent)).astype(np.float32)
    for k in {1, 2, extent // 2, extent - 1, extent} - {0}:
        if k <= extent:
            values, indices = topk(x, k, 1, 1)
            expected, at = oracle(x, k, 2)
            np.testing.assert_array_equal(values, expected)
            np.testing.assert_array_equal(indices, at)


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=40), st.integers(1, 40))
def test_any_numbers(row: list[float], k: int) -> None:
    x = np.array([row], np.float32)
    k = min(k, len(row))
    values, indices = topk(x, k, 0, 0)
    expected, at = oracle(x, k, 1)
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))  # NaN and -0 as they are
    np.testing.assert_array_equal(indices, at)


def test_nan_is_the_largest_and_zeros_are_equal() -> None:
    nan, negative = np.nan, np.copysign(np.nan, -1)  # of other bits
    x = np.array([[-0.0, 0.0, np.inf, negative, -np.inf, -0.0, nan, 1e-45, -1e-45]], np.float32)
    values, indices = topk(x, 9, 0, 0)
    assert indices.tolist() == [[3, 6, 2, 7, 0, 1, 5, 8, 4]]
    assert np.signbit(values[0, 4:7]).tolist() == [True, False, True]
    test = np.arange(9, dtype=np.int32).reshape(9, 1)
    among = in_topk(np.repeat(x, 9, 0).reshape(9, 1, 9), 3, 1, test)
    assert np.flatnonzero(among).tolist() == [2, 3, 6]
    among = in_topk(np.repeat(x, 9, 0).reshape(9, 1, 9), 5, 1, test)  # three zeros at the border
    assert np.flatnonzero(among).tolist() == [0, 1, 2, 3, 5, 6, 7]


def test_top_k_against_torch(torch: Any) -> None:
    x = np.random.default_rng(3).permutation(3 * 101).reshape(3, 101).astype(np.float32)
    x[1, 5] = np.nan
    x[2, 50] = np.inf
    values, indices = topk(x, 10, 0, 0)
    expected = torch.topk(torch.from_numpy(x), 10)
    np.testing.assert_array_equal(values, expected.values.numpy())
    np.testing.assert_array_equal(indices, expected.indices.numpy())


@pytest.mark.parametrize(
    "dtype",
    [np.float16, ml_dtypes.bfloat16, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64],
)
def test_top_k_of_every_type(dtype: Any) -> None:
    """The extremes of integers too: no key overflows, and none of 64 bits is rounded."""
    rng = np.random.default_rng(1)
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        x = rng.integers(limits.min, limits.max, (2, 17), dtype=dtype, endpoint=True)
        x[0, :4] = [limits.max, limits.min, limits.max - 1, limits.min + 1]
        order = [sorted(range(17), key=lambda i, row=row: (-int(row[i]), i))[:5] for row in x]
    else:
        x = rng.normal(size=(2, 17)).astype(dtype)
        x[1, 3] = np.nan
        order = oracle(x, 5, 1)[1].tolist()
    values, indices = topk(x, 5, 0, 0)
    assert indices.tolist() == order
    assert values.tobytes() == np.take_along_axis(x, np.array(order), 1).tobytes()


def test_more_than_one_block_of_rows() -> None:
    rows = 2**19 // 37 + 1  # a block has 2**18 keys
    x = np.random.default_rng(0).integers(0, 50, (1, rows, 37)).astype(np.float32)
    values, indices = topk(x, 4, 1, 1)
    at = np.argsort(-x, axis=-1, kind="stable")[..., :4]
    np.testing.assert_array_equal(indices, at)
    np.testing.assert_array_equal(values, np.take_along_axis(x, at, -1))


@pytest.mark.parametrize("k", [1, 3, 7])
def test_ties_at_the_border_are_inside(k: int) -> None:
    x = np.random.default_rng(2).integers(0, 4, (3, 5, 7)).astype(np.float32)
    for test in np.random.default_rng(3).integers(0, 7, (4, 3, 5)).astype(np.int32):
        value = np.take_along_axis(x, test[..., None].astype(np.int64), -1)
        np.testing.assert_array_equal(in_topk(x, k, 1, test), value[..., 0] >= np.sort(x, -1)[..., 7 - k])


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_strides_of_batches_and_of_elements() -> None:
    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    wide = np.full((3, 60), np.nan, np.float32)
    spaced = wide[:, :56].reshape(3, 4, 14)[:, :, 0:10:2]
    spaced[...] = x
    source = Descriptor(layout=ROW, size=(5, 4), stride=(2, 14), data=wide, data_type=bnns.BNNSDataTypeFloat32)
    values, indices = np.full((3, 20), 7, np.float32), np.full((3, 4, 4), -7, np.int32)
    best = Descriptor(layout=ROW, size=(2, 4), stride=(1, 4), data=values, data_type=bnns.BNNSDataTypeFloat32)
    at = Descriptor(layout=ROW, size=(2, 4), stride=(2, 4), data=indices, data_type=bnns.BNNSDataTypeInt32)
    assert bnns.BNNSDirectApplyTopK(2, 1, 3, source, 60, best, 20, at, 16) == 0, bnns.last_error()
    expected, where = oracle(x, 2, 2)
    np.testing.assert_array_equal(values[:, :16].reshape(3, 4, 4)[:, :, :2], expected)
    np.testing.assert_array_equal(indices[:, :, ::2], where)
    assert (values[:, 16:] == 7).all()
    assert (values[:, :16].reshape(3, 4, 4)[:, :, 2:] == 7).all()
    assert (indices[:, :, 1::2] == -7).all()


def test_without_indices_in_place_and_with_axes_left_out() -> None:
    x = np.array([3, 1, 2], np.float32)
    assert bnns.BNNSDirectApplyTopK(3, 0, 1, describe(x), 0, describe(x), 0, None, 0) == 0
    assert x.tolist() == [3, 2, 1]
    matrix, values = SOURCE.copy(), np.empty(4, np.float32)  # one value of each column: a vector
    assert bnns.BNNSDirectApplyTopK(1, 0, 1, describe(matrix), 0, describe(values), 0, None, 0) == 0
    assert values.tolist() == [9, 6, 8, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"K": 5}, r"K is 5, must be from 1 to 4, the extent of axis 0 of input"),
        ({"K": 0}, r"K is 0, must be from 1 to 4"),
        ({"K": -1}, "K is -1, which a size_t cannot hold"),
        ({"axis": 2}, "axis is 2, but input has 2 axes"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2}, r"input.data has 64 bytes, but 2 samples of .* span 128"),
        ({"input_batch_stride": -1}, "input_batch_stride is -1"),
        ({"best_values_batch_stride": "a"}, "best_values_batch_stride is 'a', must be an integer"),
        ({"input": None}, "input is of type NoneType"),
        ({"input": Descriptor(layout=ROW, size=(4, 4), data_type=0x10020)}, "input.data is NULL"),
        ({"input": describe(np.zeros((4, 4), np.bool_))}, "input.data_type is BNNSDataTypeBoolean"),
        (
            {"best_values": describe(np.zeros((2, 4), np.float16))},
            "best_values.data_type is BNNSDataTypeFloat16, exp",
        ),
        (
            {"best_values": describe(np.zeros((4, 2), np.float32))},
            r"best_values.size is \(2, 4\), expected the extents \(4, 2\) \(fastest first\) of input, with K along",
        ),
        ({"best_indices": describe(np.zeros((3, 4), np.int32))}, r"best_indices.size is \(4, 3\), expected"),
        (
            {"best_indices": describe(np.zeros((2, 4), np.int64))},
            "best_indices.data_type is BNNSDataTypeInt64; it must",
        ),
        (
            {"input": describe(np.zeros((1, 1, 4, 4), np.float32), bnns.BNNSDataLayoutConvolutionWeightsOIHrWr)},
            "input.layout is BNNSDataLayoutConvolutionWeightsOIHrWr; kernels must not be rotated",
        ),
        ({"filter_params": 3}, "filter_params is of type int"),
    ],
)
def test_top_k_fails_and_touches_nothing(changes: dict[str, Any], message: str) -> None:
    values, indices = np.full((2, 4), 7, np.float32), np.full((2, 4), -7, np.int32)
    arguments = {
        "K": 2, "axis": 0, "batch_size": 1, "input": describe(SOURCE), "input_batch_stride": 0,
        "best_values": describe(values), "best_values_batch_stride": 0, "best_indices": describe(indices),
        "best_indices_batch_stride": 0,
    }  # fmt: skip
    assert bnns.BNNSDirectApplyTopK(**{**arguments, **changes}) == -1
    assert re.search(f"BNNSDirectApplyTopK: {message}", bnns.last_error() or ""), bnns.last_error()
    assert (values == 7).all()
    assert (indices == -7).all()


def test_results_that_overlap_each_other_or_themselves_fail() -> None:
    memory = np.full(8, 7, np.float32)
    values, indices = memory.reshape(2, 4), memory.view(np.int32).reshape(2, 4)
    assert bnns.BNNSDirectApplyTopK(2, 0, 1, describe(SOURCE), 0, describe(values), 0, describe(indices), 0) == -1
    assert "best_values overlaps best_indices in memory" in (bnns.last_error() or "")
    two = np.concatenate([SOURCE, SOURCE])
    both = Descriptor(layout=ROW, size=(4, 4), data=two, data_type=bnns.BNNSDataTypeFloat32)
    assert bnns.BNNSDirectApplyTopK(1, 0, 2, both, 0, describe(memory[:4]), 3, None, 0) == -1
    assert "best_values_batch_stride is 3, but a sample of best_values spans 4 values" in (bnns.last_error() or "")
    assert (memory == 7).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"K": 5}, r"K is 5, must be from 1 to 4, the extent of axis 1 of input"),
        (
            {"test_indices": describe(np.array([0, 1, 4, 0], np.int32))},
            "test_indices has the index 4, but axis 1",
        ),
        (
            {"test_indices": describe(np.array([0, -1, 2, 0], np.int32))},
            "test_indices has the index -1, but axis 1",
        ),
        (
            {"test_indices": describe(np.zeros(3, np.int32))},
            r"test_indices.size is \(3,\), expected the extents \(4,\)",
        ),
        ({"test_indices": describe(np.zeros(4, np.int64))}, "test_indices.data_type is BNNSDataTypeInt64; it must be"),
        ({"test_indices_batch_stride": 2.5}, "test_indices_batch_stride is 2.5, must be an integer"),
        ({"output": describe(np.zeros(4, np.uint8))}, "output.data_type is BNNSDataTypeUInt8; it must be Boolean"),
        ({"output": describe(np.zeros(5, np.bool_))}, r"output.size is \(5,\), expected .* of input without axis 1"),
        ({"input": describe(SOURCE.astype(np.float16))}, "input.data_type is BNNSDataTypeFloat16; it must be Float32"),
    ],
)
def test_in_top_k_fails_and_touches_nothing(changes: dict[str, Any], message: str) -> None:
    output = np.ones(4, np.bool_)
    arguments = {
        "K": 2, "axis": 1, "batch_size": 1, "input": describe(SOURCE), "input_batch_stride": 0,
        "test_indices": describe(np.zeros(4, np.int32)), "test_indices_batch_stride": 0, "output": describe(output),
        "output_batch_stride": 0,
    }  # fmt: skip
    assert bnns.BNNSDirectApplyInTopK(**{**arguments, **changes}) == -1
    assert re.search(f"BNNSDirectApplyInTopK: {message}", bnns.last_error() or ""), bnns.last_error()
    assert output.all()


# ---- Swift -----------------------------------------------------------------------------------------------------------


def test_swifts_largest_values() -> None:
    shape, best = BNNS.Shape.matrixRowMajor(4, 4), BNNS.Shape.matrixRowMajor(4, 2)
    x = np.stack([SOURCE, -SOURCE])
    values, indices = np.empty((2, 2, 4), np.float32), np.empty((2, 2, 4), np.int32)
    BNNS.applyTopK(
        k=2,
        input=shape.descriptor(x),
        bestValues=best.descriptor(values),
        bestIndices=best.descriptor(indices, bnns.BNNSDataTypeInt32),
        axis=0,
        batchSize=2,
    )
    expected, at = oracle(x, 2, 1)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(indices, at)
    test, among = np.array([[3, 2, 1, 0]] * 2, np.int32), np.empty((2, 4), np.bool_)
    BNNS.applyInTopK(
        k=2,
        input=shape.descriptor(x),
        testIndices=BNNS.Shape.vector(4).descriptor(test, bnns.BNNSDataTypeInt32),
        output=BNNS.Shape.vector(4).descriptor(among, bnns.BNNSDataTypeBoolean),
        axis=1,
        batchSize=2,
    )
    assert among.tolist() == [[True, True, False, False], [False, False, True, True]]
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: BNNSDirectApplyTopK: K is 5, must be from 1 to 4"):
        BNNS.applyTopK(
            k=5,
            input=shape.descriptor(x),
            bestValues=best.descriptor(values),
            bestIndices=best.descriptor(indices, bnns.BNNSDataTypeInt32),
            axis=0,
            batchSize=2,
        )
    with pytest.raises(BNNS.Error, match="arrayDescriptorInvalidData: testIndices has no data"):
        BNNS.applyInTopK(
            k=1,
            input=shape.descriptor(x),
            testIndices=BNNS.Shape.vector(4).descriptor(None, bnns.BNNSDataTypeInt32),
            output=BNNS.Shape.vector(4).descriptor(among, bnns.BNNSDataTypeBoolean),
            axis=1,
            batchSize=2,
        )
