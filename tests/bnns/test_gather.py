"""BNNSGather, BNNSScatter, BNNSGatherND and BNNSScatterND."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import BNNS
from support.arrays import assert_same_bits
from support.bnns import fails, inner, normal, reason, succeeds
from support.bnns_arrays import FLOATS, INTEGERS, LAYOUTS, TYPES, Array, Described, any_bits, described
from support.onnx_cases import OnnxCase, collect_onnx_cases

Descriptor = bnns.BNNSNDArrayDescriptor
NONE, SUM = bnns.BNNSReduceFunctionNone, bnns.BNNSReduceFunctionSum
SHAPE_MISMATCH, OUT_OF_RANGE = -1003, -1005
SHAPES = {1: (7,), 2: (3, 5), 3: (2, 5, 3), 4: (3, 1, 2, 4), 5: (2, 1, 3, 2, 2), 8: (1, 2, 1, 3, 1, 2, 1, 2)}
EVERY_LAYOUT = [(rank, layout) for rank in SHAPES for layout in LAYOUTS[rank]]


def drawn(bound: int, shape: tuple[int, ...], seed: int = 0, dtype: Any = np.int32) -> Array:
    return np.random.default_rng(seed).integers(0, bound, shape).astype(dtype)


def row_major(array: Any, dtype: Any = np.float32) -> Any:
    """The descriptor of a vector, a row-major matrix, or a first-major array."""
    array = np.array(array, dtype)
    return Descriptor.from_array(array, None if array.ndim < 3 else array.ndim << 16 | 0x8001)


def along(shape: tuple[int, ...], axis: int, extent: int) -> tuple[int, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])


def places(at: Array, axis: int, part: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """For every element of the smaller array, its own position and the one that the indices select, one by one."""
    found = []
    for own in np.ndindex(*part):
        other = list(own)
        other[axis] = int(at[own[axis]] if at.ndim == 1 else at[own])
        found.append((own, tuple(other)))
    return found


def scattered(start: Array, pairs: list[Any], values: Array, op: int) -> Array:
    """What scattering computes, element by element, in the order of the indices."""
    result = start.copy()
    wide = start.astype(np.float64)
    for own, other in pairs:
        wide[other] = (wide[other] if op == SUM else 0) + values[own].astype(np.float64)
        result[other] = wide[other].astype(start.dtype) if op == SUM else values[own]
    return result


# ---- what Apple prints -----------------------------------------------------------------------------------------------


def test_gather_as_apple_prints_it() -> None:
    output = row_major(np.zeros(4))
    status = bnns.BNNSGather(0, row_major(np.arange(10, 90, 10)), row_major([1, 3, 7, 5], np.int32), output, None)
    assert status == 0
    assert output.data.tolist() == [20, 40, 80, 60]
    # Axis 1 of a RowMajorMatrix is along its rows, although size lists columns first.
    matrix, output = row_major([[10, 20, 30], [40, 50, 60], [70, 80, 90]]), row_major(np.zeros((3, 2)))
    assert bnns.BNNSGather(1, matrix, row_major([[0, 1], [2, 0], [1, 1]], np.int32), output) == 0
    assert output.data.tolist() == [[10, 20], [60, 40], [80, 80]]


def test_scatter_as_apple_prints_it() -> None:
    output = row_major(np.arange(10, 90, 10))
    assert bnns.BNNSScatter(0, SUM, row_major([2, 4, 6, 8]), row_major([1, 3, 7, 5], np.int32), output, None) == 0
    assert output.data.tolist() == [10, 22, 30, 44, 50, 68, 70, 86]
    rows, output = row_major([[10, 11, 12], [30, 31, 32], [40, 41, 42]]), row_major(np.zeros((5, 3)))
    assert bnns.BNNSScatter(0, NONE, rows, row_major([1, 3, 4], np.int32), output) == 0
    assert output.data.tolist() == [[0, 0, 0], [10, 11, 12], [0, 0, 0], [30, 31, 32], [40, 41, 42]]
    values, output = row_major([[10, 20, 30], [40, 50, 60], [70, 80, 90]]), row_major(np.zeros((5, 3)))
    assert bnns.BNNSScatter(0, NONE, values, row_major([[4, 2, 3], [0, 0, 0], [2, 4, 4]], np.int32), output) == 0
    assert output.data.tolist() == [[40, 50, 60], [0, 0, 0], [70, 20, 0], [0, 0, 30], [10, 80, 90]]


@pytest.mark.parametrize(
    ("indices", "shape", "slice"),
    [([1], (2, 2), np.s_[1:2]), ([[1, 0]], (1, 2), np.s_[1:2, :1]), ([[[1, 1, 1]]], (1, 1), np.s_[1:2, 1:, 1:])],
)
def test_slices_as_apple_prints_them(indices: Any, shape: Any, slice: Any) -> None:
    cube = np.array([[[10, 11], [12, 13]], [[20, 21], [22, 23]], [[30, 31], [32, 33]]], np.float32)
    expected = cube[slice].reshape(shape)
    at = row_major(indices, np.int32)
    gathered, back = row_major(np.zeros(shape)), row_major(np.zeros_like(cube))
    assert bnns.BNNSGatherND(row_major(cube), at, gathered, None) == 0, reason()
    assert np.array_equal(gathered.data, expected)
    assert bnns.BNNSScatterND(NONE, gathered, at, back, None) == 0, reason()
    whole = np.zeros_like(cube)
    whole[slice] = cube[slice]
    assert np.array_equal(back.data, whole)


def test_what_was_measured_of_apples_library() -> None:
    output = row_major([100, 200, 300])
    assert bnns.BNNSScatter(0, SUM, row_major([1, 2, 3]), row_major([0, 0, 2], np.int32), output) == 0
    assert output.data.tolist() == [103, 200, 303]
    square = described(np.arange(1, 10, dtype=np.float32).reshape(3, 3), "2DFirstMajor").descriptor
    elements = described(np.array([[0, 0], [1, 2], [2, 1]], np.int32), "2DFirstMajor").descriptor
    output = row_major(np.zeros(3))
    assert bnns.BNNSGatherND(square, elements, output) == 0
    assert output.data.tolist() == [1, 6, 8]
    rows = described(np.array([[2], [0]], np.int32), "2DFirstMajor").descriptor
    output = described(np.zeros((2, 3), np.float32), "2DFirstMajor").descriptor
    assert bnns.BNNSGatherND(square, rows, output) == 0
    assert output.data.tolist() == [[7, 8, 9], [1, 2, 3]]
    output = row_major([-1])
    assert bnns.BNNSGather(0, row_major([10, 20, 30, 40]), row_major([4], np.int32), output) == OUT_OF_RANGE
    long = described(np.zeros((2, 3), np.int32), "2DFirstMajor").descriptor
    assert bnns.BNNSGatherND(square, long, output) == SHAPE_MISMATCH
    assert output.data.tolist() == [-1]


# ---- along one axis --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize(("rank", "layout"), EVERY_LAYOUT)
def test_gather_along_every_axis(rank: int, layout: str, gap: int) -> None:
    x = normal(*SHAPES[rank])
    source = described(x, layout, gap=gap)
    for axis in range(rank):
        for extent in (1, 2, 7):
            part = along(x.shape, axis, extent)
            for shape in {(extent,), part}:
                at = drawn(x.shape[axis], shape, seed=extent)
                indices = described(at, layout if shape == part else "Vector", gap=gap)
                target = described(np.zeros(part, np.float32), layout, gap=gap)
                succeeds(bnns.BNNSGather(axis, source.descriptor, indices.descriptor, target.descriptor))
                expected = np.empty(part, np.float32)
                for own, other in places(at, axis, part):
                    expected[own] = x[other]
                assert np.array_equal(target.array, expected)
                target.check_gaps()
    assert np.array_equal(source.array, x)


@pytest.mark.parametrize("op", [NONE, SUM])
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize(("rank", "layout"), EVERY_LAYOUT)
def test_scatter_along_every_axis(rank: int, layout: str, gap: int, op: int) -> None:
    start = normal(*SHAPES[rank])
    for axis in range(rank):
        for extent in (1, 2, 7):
            part = along(start.shape, axis, extent)
            values = normal(*part, seed=1)
            source = described(values, layout, gap=gap)
            for shape in {(extent,), part}:
                at = drawn(start.shape[axis], shape, seed=extent)
                indices = described(at, layout if shape == part else "1DLastMajor", gap=gap)
                target = described(start, layout, gap=gap)
                succeeds(bnns.BNNSScatter(axis, op, source.descriptor, indices.descriptor, target.descriptor))
                assert_same_bits([target.array], [scattered(start, places(at, axis, part), values, op)])
                target.check_gaps()
            assert np.array_equal(source.array, values)


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("layouts", [("3DFirstMajor", "ImageCHW", "3DLastMajor"), ("NSE", "3DFirstMajor", "SNE")])
def test_each_array_has_a_layout_of_its_own(layouts: tuple[str, ...], gap: int) -> None:
    x, at = normal(4, 3, 5), drawn(3, (4, 2, 5))
    source, indices = described(x, layouts[0], gap=gap), described(at, layouts[1], gap=gap)
    target = described(np.zeros((4, 2, 5), np.float32), layouts[2], gap=gap)
    assert bnns.BNNSGather(1, source.descriptor, indices.descriptor, target.descriptor) == 0, reason()
    assert np.array_equal(target.array, np.take_along_axis(x, at, 1))
    back = described(np.zeros_like(x), layouts[0], gap=gap)
    assert bnns.BNNSScatter(1, SUM, target.descriptor, indices.descriptor, back.descriptor) == 0, reason()
    pairs = places(at, 1, at.shape)
    assert np.array_equal(back.array, scattered(np.zeros_like(x), pairs, target.array, SUM))


# ---- vectors of indices ----------------------------------------------------------------------------------------------

ND = [((), 1), ((), 3), ((4,), 1), ((4,), 2), ((5,), 3), ((2, 3), 1), ((2, 3), 3), ((1, 2, 2), 2), ((3, 1), 1)]


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("grid", "length"), ND)
def test_vectors_select_elements_and_slices(grid: tuple[int, ...], length: int, last: bool, gap: int) -> None:
    x = normal(2, 5, 3)

    def laid_out(array: Array) -> Described:
        return described(array, LAYOUTS[array.ndim][-1 if last else -2], gap=gap)

    at = np.stack([drawn(n, grid, seed=k) for k, n in enumerate(x.shape[:length])], axis=-1).astype(np.int32)
    part = (*grid, *x.shape[length:])
    expected = np.empty(part, np.float32)
    for own in np.ndindex(*grid):
        expected[own] = x[tuple(at[own])]
    shape = part or (1,)
    source, indices, target = laid_out(x), laid_out(at), laid_out(np.zeros(shape, np.float32))
    assert bnns.BNNSGatherND(source.descriptor, indices.descriptor, target.descriptor) == 0, reason()
    assert np.array_equal(target.array, expected.reshape(shape))
    target.check_gaps()
    pairs = [
        ((*own, *rest), (*at[own].tolist(), *rest))
        for own in np.ndindex(*grid)
        for rest in np.ndindex(*x.shape[length:])
    ]
    values = normal(*part, seed=5)
    given = laid_out(values.reshape(shape))
    for op in (NONE, SUM):
        back = laid_out(x)
        assert bnns.BNNSScatterND(op, given.descriptor, indices.descriptor, back.descriptor) == 0, reason()
        assert_same_bits([back.array], [scattered(x, pairs, values, op)])
        back.check_gaps()


def test_vectors_in_matrix_layouts_are_rows() -> None:
    """A RowMajorMatrix of size (2, 4) holds four vectors of two indices; so does a ColumnMajorMatrix of size (4, 2)."""
    x = normal(5, 3)
    at = np.stack([drawn(5, (4,)), drawn(3, (4,), seed=1)], axis=-1)
    for layout, size in (("RowMajorMatrix", (2, 4)), ("ColumnMajorMatrix", (4, 2))):
        indices, output = described(at, layout).descriptor, row_major(np.zeros(4))
        assert tuple(indices.size[:2]) == size
        assert bnns.BNNSGatherND(described(x, layout).descriptor, indices, output) == 0, reason()
        assert np.array_equal(output.data, x[at[:, 0], at[:, 1]])


# ---- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_elements_of_every_type_are_moved_bit_by_bit(dtype: np.dtype[Any]) -> None:
    x, at = any_bits((5, 7), dtype), drawn(7, (4,))
    output = row_major(np.zeros((5, 4)), dtype)
    assert bnns.BNNSGather(1, row_major(x, dtype), row_major(at, np.int32), output) == 0, reason()
    assert_same_bits([output.data], [np.take(x, at, 1)])
    start, at = any_bits((5, 9), dtype, seed=1), np.array([8, 0, 3, 4, 5, 7, 1])
    output = row_major(start, dtype)
    assert bnns.BNNSScatter(1, NONE, row_major(x, dtype), row_major(at, np.int32), output) == 0, reason()
    expected = start.copy()
    expected[:, at] = x
    assert_same_bits([output.data], [expected])


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_indices_of_every_integer_type(dtype: np.dtype[Any]) -> None:
    x, at = normal(100), drawn(100, (2, 31))
    for shape in ((62,), (31, 2)):
        vectors = at.reshape(shape if len(shape) == 1 else (62, 1))
        output = row_major(np.zeros(62))
        call = bnns.BNNSGather(0, row_major(x), row_major(vectors.reshape(-1), dtype), output)
        assert call == 0, reason()
        assert np.array_equal(output.data, x[at.reshape(-1)])
        succeeds(bnns.BNNSGatherND(row_major(x), row_major(vectors.reshape(62, 1), dtype), output))
        assert np.array_equal(output.data, x[at.reshape(-1)])


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("function", ["gather", "scatter", "gather nd", "scatter nd"])
def test_indices_out_of_range(dtype: np.dtype[Any], function: str) -> None:
    limits = np.iinfo(dtype)
    wrong = [5, 6, limits.max, *([-1, limits.min] if limits.min else [])]
    small, large = row_major([7.0, 7.0, 7.0]), row_major(np.arange(5))
    for index in wrong:
        at = row_major([1, index, 0] if "nd" not in function else [[1], [index], [0]], dtype)
        name = "input" if function.startswith("gather") else "output"
        status = {
            "gather": lambda at=at: bnns.BNNSGather(0, large, at, small),
            "scatter": lambda at=at: bnns.BNNSScatter(0, SUM, small, at, large),
            "gather nd": lambda at=at: bnns.BNNSGatherND(large, at, small),
            "scatter nd": lambda at=at: bnns.BNNSScatterND(NONE, small, at, large),
        }[function]()
        assert status == OUT_OF_RANGE
        assert reason().endswith(f": indices has the index {index}, but {name} has 5 elements along axis 0")
    assert small.data.tolist() == [7, 7, 7]
    assert large.data.tolist() == [0, 1, 2, 3, 4]


def test_vectors_out_of_range_name_their_axis() -> None:
    output = row_major([7.0])
    for vector, index, axis, bound in ([[2, 0], 2, 0, 2], [[0, 3], 3, 1, 3], [[0, -1], -1, 1, 3]):
        assert bnns.BNNSGatherND(row_major(normal(2, 3)), row_major([vector], np.int64), output) == OUT_OF_RANGE
        assert f"the index {index}, but input has {bound} elements along axis {axis}" in reason()
    assert output.data.tolist() == [7]


# ---- several inputs for one element ----------------------------------------------------------------------------------


def test_the_last_of_several_inputs_stays() -> None:
    """Apple does not say which one does. Many, so that no chance order passes."""
    at, values = drawn(50, (5000,)), normal(5000)
    expected = np.zeros(60, np.float32)
    for index, value in zip(at, values, strict=True):
        expected[index] = value
    output = row_major(np.zeros(60))
    assert bnns.BNNSScatter(0, NONE, row_major(values), row_major(at, np.int32), output) == 0
    assert np.array_equal(output.data, expected)
    output.data[:] = 0
    assert bnns.BNNSScatterND(NONE, row_major(values), row_major(at[:, None], np.int32), output) == 0
    assert np.array_equal(output.data, expected)
    # The vectors of a grid come in the order of its axes, the last one fastest.
    grid, output = described(at.reshape(50, 100, 1), "3DLastMajor").descriptor, row_major(np.zeros(60))
    source = described(values.reshape(50, 100), "2DLastMajor").descriptor
    assert bnns.BNNSScatterND(NONE, source, grid, output) == 0, reason()
    assert np.array_equal(output.data, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_are_rounded_once(dtype: np.dtype[Any]) -> None:
    small = float(np.finfo(dtype).eps if dtype.kind == "f" else 2.0**-8) / 4
    output = row_major([1, 5], dtype)
    count = 40
    assert bnns.BNNSScatter(0, SUM, row_major([small] * count, dtype), row_major([0] * count, np.int8), output) == 0
    assert output.data[0] == np.asarray(1 + count * small).astype(dtype)  # one by one they would all be lost
    assert output.data[1] == 5


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_sums_of_integers_are_exact_and_saturate(dtype: np.dtype[Any]) -> None:
    limits = np.iinfo(dtype)
    random = np.random.default_rng(3)
    terms = [int(n) for n in random.integers(limits.min // 2, limits.max // 2, 60, dtype=dtype)]
    below = -1 if limits.min else 0
    terms += [limits.max, limits.max, limits.min // 2, below, 1, limits.max, below * limits.max]
    at = [k % 7 for k in range(60)] + [7, 7, 8, 8, 9, 9, 9]
    start = [int(n) for n in random.integers(limits.min, limits.max, 11, dtype=dtype, endpoint=True)]
    start[7], start[8], start[9] = limits.max, limits.min, 5
    output = row_major(start, dtype)
    assert bnns.BNNSScatter(0, SUM, row_major(terms, dtype), row_major(at, np.uint16), output) == 0, reason()
    expected = list(start)
    for index, term in zip(at, terms, strict=True):
        expected[index] += term
    assert output.data.tolist() == [min(max(n, limits.min), limits.max) for n in expected]
    assert limits.max in output.data
    assert sum(limits.min < n < limits.max for n in expected) > 0


def test_elements_that_are_not_selected_keep_their_bits() -> None:
    start = np.array([0x7F800001, 0x80000000, 0x7F800001], np.uint32).view(np.float32)  # a signalling NaN, and -0
    for op in (NONE, SUM):
        output = row_major(start)
        output.data.view(np.uint32)[:] = start.view(np.uint32)
        assert bnns.BNNSScatter(0, op, row_major([1.0]), row_major([2], np.int32), output) == 0
        assert output.data.view(np.uint32)[:2].tolist() == [0x7F800001, 0x80000000]


def test_nan_and_infinity_are_summed_as_arithmetic_says() -> None:
    output = row_major([0, 0, 1, np.inf, 3e38])
    at = row_major([0, 1, 1, 3, 4], np.int32)
    assert bnns.BNNSScatter(0, SUM, row_major([np.nan, np.inf, -np.inf, 1, 3e38]), at, output) == 0
    assert np.array_equal(output.data, np.array([np.nan, np.nan, 1, np.inf, np.inf], np.float32), equal_nan=True)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS[3])
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("shaped", [False, True])
def test_the_gradient_of_gathering_is_scattering_that_adds(layout: str, axis: int, shaped: bool) -> None:
    x = normal(4, 5, 3)
    part = along(x.shape, axis, 11)
    at = drawn(x.shape[axis], part if shaped else (11,))
    indices = described(at, layout if shaped else "Vector").descriptor
    y, dx = described(np.zeros(part, np.float32), layout), described(np.zeros_like(x), layout)
    dy = described(normal(*part, seed=1), layout)
    assert bnns.BNNSGather(axis, described(x, layout).descriptor, indices, y.descriptor) == 0, reason()
    assert bnns.BNNSScatter(axis, SUM, dy.descriptor, indices, dx.descriptor) == 0, reason()
    assert np.isclose(inner(dy.array, y.array), inner(dx.array, x), rtol=1e-5)
    # And by differences, which are exact for what is linear, along one random direction.
    direction = normal(*x.shape, seed=2)
    moved = described(np.zeros(part, np.float32), layout)
    assert bnns.BNNSGather(axis, described(x + direction, layout).descriptor, indices, moved.descriptor) == 0
    difference = moved.array.astype(np.float64) - y.array
    assert np.isclose(inner(dy.array, difference), inner(dx.array, direction), rtol=1e-4)


@pytest.mark.parametrize(("grid", "length"), ND)
def test_the_gradient_of_gathering_slices(grid: tuple[int, ...], length: int) -> None:
    x = normal(4, 3, 2)
    at = np.stack([drawn(n, grid, seed=k) for k, n in enumerate(x.shape[:length])], axis=-1)
    shape = (*grid, *x.shape[length:]) or (1,)
    indices, dy = row_major(at, np.int32), row_major(normal(*shape, seed=1))
    y, dx = row_major(np.zeros(shape)), row_major(np.zeros_like(x))
    assert bnns.BNNSGatherND(row_major(x), indices, y) == 0, reason()
    assert bnns.BNNSScatterND(SUM, dy, indices, dx) == 0, reason()
    assert np.isclose(inner(dy.data, y.data), inner(dx.data, x), rtol=1e-5)


# ---- other libraries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", range(3))
def test_along_an_axis_against_torch(axis: int, torch: Any) -> None:
    x, part = normal(3, 5, 4), along((3, 5, 4), axis, 7)
    at = drawn(x.shape[axis], part, dtype=np.int64)
    output = row_major(np.zeros(part))
    assert bnns.BNNSGather(axis, row_major(x), row_major(at, np.int64), output) == 0
    tensor, indices = torch.from_numpy(x), torch.from_numpy(at)
    assert np.array_equal(output.data, torch.take_along_dim(tensor, indices, axis).numpy())
    line = indices.reshape(-1)[:7]
    assert bnns.BNNSGather(axis, row_major(x), row_major(line.numpy(), np.int64), output) == 0
    assert np.array_equal(output.data, torch.index_select(tensor, axis, line).numpy())
    values = normal(*part, seed=1)
    output = row_major(x)
    assert bnns.BNNSScatter(axis, SUM, row_major(values), row_major(at, np.int64), output) == 0
    summed = tensor.double().scatter_add(axis, indices, torch.from_numpy(values).double())
    assert np.array_equal(output.data, summed.float().numpy())
    once = np.argsort(normal(*x.shape, seed=4), axis=axis)  # no index twice, where torch has no answer
    output = row_major(np.zeros_like(x))
    assert bnns.BNNSScatter(axis, NONE, row_major(x), row_major(once, np.int64), output) == 0
    assert np.array_equal(output.data, torch.zeros(3, 5, 4).scatter(axis, torch.from_numpy(once), tensor).numpy())


def test_the_gradient_of_take_along_dim(torch: Any) -> None:
    x = torch.from_numpy(normal(4, 6)).requires_grad_()
    at, dy = drawn(6, (4, 9), dtype=np.int64), normal(4, 9, seed=1)
    torch.take_along_dim(x, torch.from_numpy(at), 1).backward(torch.from_numpy(dy))
    dx = row_major(np.zeros((4, 6)))
    assert bnns.BNNSScatter(1, SUM, row_major(dy), row_major(at, np.int64), dx) == 0
    assert np.allclose(dx.data, x.grad.numpy(), rtol=1e-6)


GATHERS = [
    case
    for case in collect_onnx_cases("gather", ("Gather", "GatherElements", "GatherND"))
    if case.attributes.get("batch_dims", 0) == 0 and "2d_indices" not in case.name  # which BNNS does not have
]


@pytest.mark.parametrize("case", GATHERS, ids=lambda case: case.name)
def test_gathering_of_onnx(case: OnnxCase) -> None:
    x, at = (np.asarray(one) for one in case.inputs)
    expected = case.outputs[0]
    output = row_major(np.zeros(expected.shape), expected.dtype)
    operands = row_major(x, x.dtype), row_major(at, at.dtype), output
    axis = () if case.op_type == "GatherND" else (case.attributes["axis"],)
    status = (bnns.BNNSGather if axis else bnns.BNNSGatherND)(*axis, *operands)
    if (at < 0).any():  # ONNX counts them from the end, BNNS does not
        assert status == OUT_OF_RANGE
        return
    assert status == 0, reason()
    assert np.array_equal(output.data, expected)


SCATTERS = [
    case
    for case in collect_onnx_cases("scatter", ("ScatterElements", "ScatterND"))
    if case.attributes["reduction"] in (b"none", b"add")
]


@pytest.mark.parametrize("case", SCATTERS, ids=lambda case: case.name)
def test_scattering_of_onnx(case: OnnxCase) -> None:
    start, at, values = (np.asarray(one) for one in case.inputs)
    op = SUM if case.attributes["reduction"] == b"add" else NONE
    output = row_major(start, start.dtype)
    operands = op, row_major(values, values.dtype), row_major(at, at.dtype), output
    if case.op_type == "ScatterND":
        status = bnns.BNNSScatterND(*operands)
    else:
        status = bnns.BNNSScatter(case.attributes["axis"], *operands)
    if (at < 0).any():
        assert status == OUT_OF_RANGE
        return
    assert status == 0, reason()
    assert np.array_equal(output.data, case.outputs[0])


# ---- overlap ---------------------------------------------------------------------------------------------------------


def test_results_over_their_arguments() -> None:
    """Everything is read before anything is written."""
    x, at = normal(6, 6), np.random.default_rng(0).permutation(6)
    matrix = row_major(x)
    assert bnns.BNNSGather(0, matrix, row_major(at, np.int32), matrix) == 0
    assert np.array_equal(matrix.data, x[at])
    matrix = row_major(x)
    assert bnns.BNNSScatter(1, NONE, matrix, row_major(at, np.int32), matrix) == 0
    assert np.array_equal(matrix.data[:, at], x)
    memory = np.arange(10, dtype=np.float32)
    shifted = Descriptor.from_array(memory[:8]), Descriptor.from_array(memory[2:])
    assert bnns.BNNSScatter(0, SUM, shifted[0], row_major(np.arange(8), np.int32), shifted[1]) == 0
    assert memory.tolist() == [0, 1, 2, 4, 6, 8, 10, 12, 14, 16]
    # Over the indices, too: the same bytes as integers and as floating-point numbers.
    raw = np.array([2, 0, 1], np.int32)
    output = Descriptor.from_array(raw.view(np.float32))
    assert bnns.BNNSGather(0, row_major([1, 2, 3]), Descriptor.from_array(raw), output) == 0
    assert output.data.tolist() == [3, 1, 2]
    raw = np.array([2, 0, 1], np.int32)
    assert (
        bnns.BNNSScatter(
            0, NONE, row_major([1, 2, 3]), Descriptor.from_array(raw), Descriptor.from_array(raw.view(np.float32))
        )
        == 0
    )
    assert raw.view(np.float32).tolist() == [2, 3, 1]


# ---- failures --------------------------------------------------------------------------------------------------------


def float32(layout: str, *size: int, **fields: Any) -> Any:
    """A descriptor as it is, over 24 zeros."""
    given = {"data": np.zeros(24, np.float32), "data_type": bnns.BNNSDataTypeFloat32, **fields}
    return Descriptor(layout=getattr(bnns, f"BNNSDataLayout{layout}"), size=size, **given)


X, AT, Y = row_major(normal(3, 4)), row_major([0, 2], np.int32), row_major(np.full((2, 4), 7))
THREE, TALL, FLAGS = (row_major(np.zeros(n), t) for n, t in ((3, np.int32), ((4, 2), np.int32), (2, np.bool_)))
MATRIX = "RowMajorMatrix"
FAILURES: list[tuple[tuple[Any, ...], int, str]] = [
    ((2, X, AT, Y), -1, "axis is 2, but input has 2 axes"),
    ((-1, X, AT, Y), -1, "axis is -1, which a size_t cannot hold"),
    (("0", X, AT, Y), -1, "axis is '0', must be an integer"),
    ((0, None, AT, Y), -1, "input is of type NoneType, not BNNSNDArrayDescriptor"),
    ((0, X, AT, Y, 3), -1, "filter_params is of type int"),
    ((1, X, AT, Y), SHAPE_MISMATCH, "output.size is (4, 2), expected (4, 3): the extents of input, except along"),
    ((0, X, THREE, Y), SHAPE_MISMATCH, "indices.size is (3,), expected (2,) for axis 0, or (4, 2) as in output"),
    ((0, X, TALL, Y), SHAPE_MISMATCH, "indices.size is (2, 4), expected (2,) for axis 0, or (4, 2) as in output"),
    ((0, X, AT, row_major(np.zeros((1, 2, 4)))), SHAPE_MISMATCH, "output has 3 axes, expected 2 as in input"),
    ((0, X, AT, row_major(Y.data, np.int32)), -1, "output.data_type is BNNSDataTypeInt32, expected BNNSDataTypeFloat"),
    ((0, X, Y, Y), -1, "indices.data_type is BNNSDataTypeFloat32; it must be Int8"),
    ((0, X, FLAGS, Y), -1, "indices.data_type is BNNSDataTypeBoolean; it must be Int8"),
    ((0, X, AT, float32(MATRIX, 4, 2, data=bytes(32))), -1, "output.data is read-only"),
    ((0, X, AT, float32(MATRIX, 4, 2, data=None)), -1, "output.data is NULL"),
    ((0, X, AT, float32(MATRIX, 4, 0)), -1, "output.size is (4, 0), and an extent must be at least 1"),
    ((0, X, AT, float32(MATRIX, 4, 2, stride=(1, 2))), -1, "elements of size=(columns, rows)=(4, 2) share memory"),
    ((0, float32("ConvolutionWeightsOIHrWr", 1, 1, 3, 4), AT, Y), -1, "OIHrWr; kernels must not be rotated"),
]


@pytest.mark.parametrize(("arguments", "code", "why"), FAILURES, ids=[failure[-1] for failure in FAILURES])
def test_gather_fails_and_touches_nothing(arguments: tuple[Any, ...], code: int, why: str) -> None:
    assert bnns.BNNSGather(*arguments) == code
    assert reason().startswith("BNNSGather: ")
    assert why in reason()
    assert (Y.data == 7).all()


@pytest.mark.parametrize(
    ("op", "input", "indices", "output", "code", "why"),
    [
        (0, Y, AT, X, -1, "op is BNNSReduceFunctionMax; it must be BNNSReduceFunctionNone or BNNSReduceFunctionSum"),
        (None, Y, AT, X, -1, "op is None, must be an integer"),
        (99, Y, AT, X, -1, "op is 0x63; it must be"),
        (NONE, Y, THREE, X, SHAPE_MISMATCH, "indices.size is (3,), expected (2,) for axis 0, or (4, 2) as in input"),
        (NONE, X, AT, float32(MATRIX, 5, 3), SHAPE_MISMATCH, "input.size is (4, 3), expected (5, 3): the extents of"),
        (SUM, FLAGS, AT, FLAGS, -1, "input.data_type is BNNSDataTypeBoolean; it must be Float32"),
    ],
)
def test_scatter_fails_and_touches_nothing(op: Any, input: Any, indices: Any, output: Any, code: int, why: str) -> None:
    before = output.data.copy()
    assert bnns.BNNSScatter(0, op, input, indices, output) == code
    assert why in reason()
    assert np.array_equal(output.data, before)


@pytest.mark.parametrize(
    ("indices", "shape", "why"),
    [
        (np.zeros((2, 3)), (2,), "indices has vectors of 3 indices, but {} has 2 axes"),
        (
            np.zeros((2, 1)),
            (2, 3),
            "expected (4, 2): the axes of indices but its last, then those of {} from axis 1 on",
        ),
        (np.zeros(2), (2,), ".size is (2,), expected (1,)"),
    ],
)
def test_slices_fail_and_touch_nothing(indices: Any, shape: Any, why: str) -> None:
    at, part, whole = row_major(indices, np.int32), row_major(np.full(shape, 7)), row_major(np.full((3, 4), 5))
    assert bnns.BNNSGatherND(whole, at, part) == SHAPE_MISMATCH
    assert why.format("input") in reason()
    assert bnns.BNNSScatterND(SUM, part, at, whole) == SHAPE_MISMATCH
    assert why.format("output") in reason()
    fails(bnns.BNNSScatterND(bnns.BNNSReduceFunctionMean, part, at, whole), "op is BNNSReduceFunctionMean")
    assert (part.data == 7).all()
    assert (whole.data == 5).all()


def test_statuses_that_an_exception_carries_are_logged_like_others(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("ERROR", "retrograd.bnns"):
        assert bnns.BNNSGather(0, X, row_major([0, 9], np.int32), Y) == OUT_OF_RANGE
    assert [record.message for record in caplog.records] == [reason()]
    assert bnns.BNNSGather(0, X, AT, row_major(np.zeros((2, 4)))) == 0
    assert bnns.last_error() is None


# ---- Swift -----------------------------------------------------------------------------------------------------------


def test_swift_gathers_and_scatters() -> None:
    x, at = normal(4, 3), np.array([3, 0], np.int32)
    shape, small = BNNS.Shape.matrixFirstMajor(4, 3), BNNS.Shape.matrixFirstMajor(2, 3)
    indices, rows = BNNS.Shape.vector(2).descriptor(at, bnns.BNNSDataTypeInt32), np.zeros((2, 3), np.float32)
    BNNS.gather(input=shape.descriptor(x), indices=indices, output=small.descriptor(rows), axis=0)
    assert np.array_equal(rows, x[at])
    back = np.ones((4, 3), np.float32)
    BNNS.scatter(input=small.descriptor(rows), indices=indices, output=shape.descriptor(back), axis=0)
    assert np.array_equal(back[at], x[at])
    sums = BNNS.ReductionFunction.sum
    scatter: dict[str, Any] = {"input": small.descriptor(rows), "indices": indices, "output": shape.descriptor(back)}
    BNNS.scatter(**scatter, axis=0, reductionFunction=sums)
    assert np.array_equal(back[at], 2 * x[at])
    assert (back[[1, 2]] == 1).all()
    vectors = BNNS.Shape.matrixFirstMajor(2, 1).descriptor(at, bnns.BNNSDataTypeInt32)
    BNNS.gatherND(input=shape.descriptor(x), indices=vectors, output=small.descriptor(rows))
    assert np.array_equal(rows, x[at])
    scatter["indices"] = vectors
    BNNS.scatterND(**scatter)
    assert np.array_equal(back[at], x[at])
    BNNS.scatterND(**scatter, reductionFunction=sums)
    assert np.array_equal(back[at], 2 * x[at])
    at[1] = 4
    with pytest.raises(BNNS.Error, match="layerApplyFail: BNNSGather: indices has the index 4, but input has 4"):
        BNNS.gather(input=shape.descriptor(x), indices=indices, output=small.descriptor(rows), axis=0)
    with pytest.raises(BNNS.Error, match="arrayDescriptorInvalidData: indices has no data"):
        BNNS.scatterND(input=small.descriptor(rows), indices=small.descriptor(), output=shape.descriptor(back))
    with pytest.raises(BNNS.Error, match="op is BNNSReduceFunctionMax"):
        BNNS.scatterND(**scatter, reductionFunction=BNNS.ReductionFunction.max)
