"""BNNSTile and its gradient, BNNSShuffle, BNNSBandPart and BNNSCompareTensor."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import BNNS
from support.arrays import assert_same_bits
from support.bnns import all_fail, fails, inner, normal, reason, succeeds
from support.bnns_arrays import FLOATS, INTEGERS, LAYOUTS, TYPES, Array, any_bits, described
from support.onnx_cases import OnnxCase, collect_onnx_cases

Descriptor = bnns.BNNSNDArrayDescriptor
PIXEL_SHUFFLE, PIXEL_UNSHUFFLE = bnns.BNNSShuffleTypePixelShuffleNCHW, bnns.BNNSShuffleTypePixelUnshuffleNCHW
DEPTH_TO_SPACE, SPACE_TO_DEPTH = bnns.BNNSShuffleTypeDepthToSpaceNCHW, bnns.BNNSShuffleTypeSpaceToDepthNCHW


def first(array: Any, dtype: Any = np.float32) -> Any:
    """The descriptor of a first-major array."""
    return described(np.array(array, dtype)).descriptor


def test_constants_of_shuffles_and_comparisons() -> None:
    shuffles = ["PixelShuffleNCHW", "PixelUnshuffleNCHW", "DepthToSpaceNCHW", "SpaceToDepthNCHW"]
    assert [getattr(bnns, f"BNNSShuffleType{name}") for name in shuffles] == list(range(4))
    names = ["Equal", "Less", "LessEqual", "Greater", "GreaterEqual", "NotEqual"]
    names += [f"Logical{name}" for name in ("AND", "OR", "NOT", "NAND", "NOR", "XOR")]
    assert [getattr(bnns, f"BNNSRelationalOperator{name}") for name in names] == list(range(12))


# ---- tiles -----------------------------------------------------------------------------------------------------------

TILES = {
    1: ((3,), (4,)),
    2: ((2, 3), (3, 2)),
    3: ((2, 1, 3), (1, 5, 2)),
    4: ((1, 2, 1, 3), (3, 1, 1, 2)),
    8: ((1, 2, 1, 1, 2, 1, 1, 2), (2, 1, 1, 3, 1, 1, 2, 2)),
}
EVERY_TILE = [(rank, layout) for rank in TILES for layout in LAYOUTS[rank]]


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize(("rank", "layout"), EVERY_TILE)
def test_tiles_of_every_layout(rank: int, layout: str, gap: int) -> None:
    shape, repeats = TILES[rank]
    x = normal(*shape)
    source = described(x, layout, gap=gap, by_size=True)
    target = described(np.tile(x, repeats) * 0, layout, gap=gap, by_size=True)
    assert tuple(target.descriptor.size[:rank]) == tuple(n * r for n, r in zip(shape, repeats, strict=True))
    assert bnns.BNNSTile(source.descriptor, target.descriptor, None) == 0, reason()
    assert np.array_equal(target.array, np.tile(x, repeats))
    target.check_gaps()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tiles_of_every_type(dtype: np.dtype[Any]) -> None:
    x = any_bits((5, 3), dtype)
    output = first(np.zeros((10, 9)), dtype)
    assert bnns.BNNSTile(first(x, dtype), output) == 0, reason()
    assert_same_bits([output.data], [np.tile(x, (2, 3))])


def test_tiles_from_one_layout_to_another() -> None:
    """Axes correspond as size lists them, as in a copy."""
    x = normal(2, 3)
    target = described(np.zeros((4, 9), np.float32), "2DLastMajor", gap=1)
    assert bnns.BNNSTile(described(x, "2DFirstMajor").descriptor, target.descriptor) == 0, reason()
    assert np.array_equal(target.array, np.tile(x, (2, 3)))


def test_tiles_as_apples_library_computes_them() -> None:
    """With sizes in the opposite order: what was measured, and what Apple prints for a row-major matrix."""
    output = first(np.zeros((2, 3)))
    assert bnns.BNNSTile(first([[1, 2, 3]]), output, opposite_axes=True) == 0, reason()
    assert output.data.reshape(-1).tolist() == [1, 1, 2, 2, 3, 3]
    assert bnns.BNNSTile(first([[1, 2, 3]]), output) == 0  # by default as the layout says
    assert output.data.tolist() == [[1, 2, 3], [1, 2, 3]]
    for size, expected in (((4, 3), [1, 2, 1, 2, 3, 4, 3, 4, 5, 6, 5, 6]), ((2, 6), [1, 2, 3, 4, 5, 6] * 2)):
        output = first(np.zeros(size))
        assert bnns.BNNSTile(first([[1, 2, 3], [4, 5, 6]]), output, opposite_axes=True) == 0
        assert output.data.reshape(-1).tolist() == expected
    shape = BNNS.Shape.matrixRowMajor
    matrix, result = np.arange(1, 7, dtype=np.float32), np.zeros(36, np.float32)
    BNNS.tile(input=shape(2, 3).descriptor(matrix), output=shape(6, 6).descriptor(result), oppositeAxes=True)
    assert result.reshape(6, 6).tolist() == [[1, 2, 3, 1, 2, 3], [4, 5, 6, 4, 5, 6]] * 3
    BNNS.tile(input=shape(2, 3).descriptor(matrix), output=shape(6, 6).descriptor(result))
    assert np.array_equal(result.reshape(6, 6), np.tile(matrix.reshape(3, 2), (2, 3)))


@pytest.mark.parametrize("opposite", [False, True])
@pytest.mark.parametrize(("rank", "layout"), EVERY_TILE)
def test_the_gradient_of_tiles(rank: int, layout: str, opposite: bool) -> None:
    """<dy, f(x)> = <f*(dy), x>, where f is linear; and by differences along a random direction."""
    shape, repeats = TILES[rank]
    whole = tuple(n * r for n, r in zip(shape, repeats, strict=True))

    def tiled(x: Array) -> Array:
        y = described(np.zeros(whole, np.float32), layout, by_size=True)
        source = described(x, layout, by_size=True).descriptor
        assert bnns.BNNSTile(source, y.descriptor, opposite_axes=opposite) == 0, reason()
        return y.array

    x, direction = normal(*shape), normal(*shape, seed=2)
    dy = described(normal(*whole, seed=1), layout, by_size=True)
    dx = described(np.full(shape, 9, np.float32), layout, by_size=True)
    assert bnns.BNNSTileBackward(dx.descriptor, dy.descriptor, None, opposite_axes=opposite) == 0, reason()
    assert np.isclose(inner(dy.array, tiled(x)), inner(dx.array, x), rtol=1e-5, atol=1e-6)
    difference = tiled(x + direction).astype(np.float64) - tiled(x)
    assert np.isclose(inner(dy.array, difference), inner(dx.array, direction), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("layout", ["3DFirstMajor", "3DLastMajor"])
def test_the_gradient_of_tiles_is_set_or_added(layout: str, gap: int) -> None:
    dy = normal(4, 3, 10)
    expected = dy.reshape(2, 2, 1, 3, 5, 2).sum(axis=(0, 2, 4), dtype=np.float64)
    incoming = described(dy, layout, gap=gap)
    for flags in (0, 1):
        dx = described(np.full((2, 3, 2), 2, np.float32), layout, gap=gap)
        dx.descriptor.flags = flags
        assert bnns.BNNSTileBackward(dx.descriptor, incoming.descriptor) == 0, reason()
        assert np.allclose(dx.array, expected + 2 * flags, rtol=1e-6)
        dx.check_gaps()
    assert np.array_equal(incoming.array, dy)


def test_the_measured_gradient_of_tiles() -> None:
    dx = first(np.zeros((1, 3)))
    assert bnns.BNNSTileBackward(dx, first([[1, 2, 3], [10, 20, 30]])) == 0
    assert dx.data.tolist() == [[11, 22, 33]]
    large = first(np.full((1, 1), np.nan))
    assert bnns.BNNSTileBackward(large, first([[2.0**25], [1], [1], [-(2.0**25)]])) == 0
    assert large.data.item() == 2  # summed in float64


def test_tiles_over_their_source() -> None:
    memory = np.arange(8, dtype=np.float32)
    source, whole = Descriptor.from_array(memory[2:4]), Descriptor.from_array(memory)
    assert bnns.BNNSTile(source, whole) == 0, reason()
    assert memory.tolist() == [2, 3] * 4
    memory = np.arange(8, dtype=np.float32)
    dx, dy = Descriptor.from_array(memory[3:5]), Descriptor.from_array(memory)
    assert bnns.BNNSTileBackward(dx, dy) == 0, reason()
    assert memory.tolist() == [0, 1, 2, 12, 16, 5, 6, 7]


def test_tiles_fail_and_touch_nothing() -> None:
    x, y = first(np.zeros((2, 3))), first(np.full((4, 6), 7))
    strided = described(np.full((4, 6), 7, np.float32), gap=1).descriptor
    rotated = Descriptor(layout=0x40002, size=(1, 1, 2, 3), data=np.zeros(6, np.float32), data_type=x.data_type)
    reasons: list[tuple[Any, str]] = [
        (
            lambda: bnns.BNNSTile(x, first(np.zeros((5, 6)))),
            "output.size is (5, 6), expected multiples of (2, 3) as in",
        ),
        (lambda: bnns.BNNSTile(y, x), "output.size is (2, 3), expected multiples of (4, 6) as in input"),
        (lambda: bnns.BNNSTile(first(np.zeros(6)), y), "output.size is (4, 6), expected multiples of (6,) as in input"),
        (
            lambda: bnns.BNNSTile(first(np.zeros((2, 3)), np.int8), y),
            "output.data_type is BNNSDataTypeFloat32, expected",
        ),
        (lambda: bnns.BNNSTile(x, strided, opposite_axes=True), "with opposite_axes the array must be contiguous"),
        (lambda: bnns.BNNSTile(rotated, y), "input.layout is BNNSDataLayoutConvolutionWeightsIOHrWr; kernels must not"),
        (lambda: bnns.BNNSTile(x, None), "output is of type NoneType"),
        (lambda: bnns.BNNSTile(x, y, 1), "filter_params is of type int"),
        (lambda: bnns.BNNSTileBackward(y, x), "out_delta.size is (2, 3), expected multiples of (4, 6) as in in_delta"),
        (lambda: bnns.BNNSTileBackward(y, first(np.zeros((4, 6)), np.float16)), "out_delta.data_type is BNNSDataTypeF"),
        (
            lambda: bnns.BNNSTileBackward(first(np.zeros((4, 6)), np.int32), y),
            "in_delta.data_type is BNNSDataTypeInt32",
        ),
    ]
    all_fail(reasons)
    flagged = y.copy()
    flagged.flags = 2
    fails(bnns.BNNSTileBackward(flagged, y), "in_delta.flags is 2, must be 0 (set) or 1 (accumulate)")
    assert (y.data == 7).all()
    assert (strided.data == 7).all()


@pytest.mark.parametrize("case", collect_onnx_cases("tile", ("Tile",)), ids=lambda case: case.name)
def test_tiles_of_onnx(case: OnnxCase) -> None:
    x, expected = np.asarray(case.inputs[0]), case.outputs[0]
    output = first(np.zeros(expected.shape), expected.dtype)
    assert bnns.BNNSTile(first(x, x.dtype), output) == 0, reason()
    assert np.array_equal(output.data, expected)


# ---- shuffles --------------------------------------------------------------------------------------------------------

BLOCKS = [(1, 1, 1, 1, 2), (2, 3, 2, 5, 2), (1, 2, 3, 1, 3), (3, 1, 1, 7, 1), (2, 2, 5, 3, 4)]  # N, C, H, W, r


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("block", BLOCKS)
def test_shuffles_move_channels_to_blocks_of_pixels(block: tuple[int, ...], gap: int) -> None:
    n, c, h, w, r = block
    x = normal(n, c * r * r, h, w)
    for spread, back, pixel_fastest in (
        (PIXEL_SHUFFLE, PIXEL_UNSHUFFLE, True),
        (DEPTH_TO_SPACE, SPACE_TO_DEPTH, False),
    ):
        expected = np.empty((n, c, h * r, w * r), np.float32)
        for channel, i, j in np.ndindex(c, r, r):
            source = channel * r * r + i * r + j if pixel_fastest else (i * r + j) * c + channel
            expected[:, channel, i::r, j::r] = x[:, source]
        deep, wide = described(x, gap=gap), described(expected * 0, gap=gap)
        assert bnns.BNNSShuffle(spread, deep.descriptor, wide.descriptor, None) == 0, reason()
        assert np.array_equal(wide.array, expected)
        wide.check_gaps()
        again = described(np.zeros_like(x), gap=gap)
        assert bnns.BNNSShuffle(back, wide.descriptor, again.descriptor, None) == 0, reason()
        assert np.array_equal(again.array, x)
        again.check_gaps()


def test_a_shuffle_as_measured() -> None:
    x, y = first(np.arange(1, 17).reshape(1, 4, 2, 2)), first(np.zeros((1, 1, 4, 4)))
    assert bnns.BNNSShuffle(PIXEL_SHUFFLE, x, y) == 0
    assert y.data[0, 0].tolist() == [[1, 5, 2, 6], [9, 13, 10, 14], [3, 7, 4, 8], [11, 15, 12, 16]]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_shuffles_of_every_type(dtype: np.dtype[Any]) -> None:
    x = any_bits((2, 8, 3, 5), dtype)
    y, back = first(np.zeros((2, 2, 6, 10)), dtype), first(np.zeros(x.shape), dtype)
    assert bnns.BNNSShuffle(PIXEL_SHUFFLE, first(x, dtype), y) == 0, reason()
    assert bnns.BNNSShuffle(PIXEL_UNSHUFFLE, y, back) == 0, reason()
    assert_same_bits([back.data], [x])
    assert y.data.tobytes() != x.tobytes()


@pytest.mark.parametrize("block", BLOCKS)
def test_shuffles_against_torch(block: tuple[int, ...], torch: Any) -> None:
    n, c, h, w, r = block
    x = normal(n, c * r * r, h, w)
    wide = torch.nn.functional.pixel_shuffle(torch.from_numpy(x), r)
    y, back = first(np.zeros(wide.shape)), first(np.zeros_like(x))
    assert bnns.BNNSShuffle(PIXEL_SHUFFLE, first(x), y) == 0, reason()
    assert np.array_equal(y.data, wide.numpy())
    image = normal(n, c, h * r, w * r, seed=1)
    assert bnns.BNNSShuffle(PIXEL_UNSHUFFLE, first(image), back) == 0, reason()
    assert np.array_equal(back.data, torch.nn.functional.pixel_unshuffle(torch.from_numpy(image), r).numpy())


SHUFFLES = {
    ("DepthToSpace", b"CRD"): PIXEL_SHUFFLE,
    ("DepthToSpace", b"DCR"): DEPTH_TO_SPACE,
    ("SpaceToDepth", b"CRD"): PIXEL_UNSHUFFLE,
    ("SpaceToDepth", b"DCR"): SPACE_TO_DEPTH,
}


@pytest.mark.parametrize(
    "case", collect_onnx_cases("depth", ("DepthToSpace", "SpaceToDepth")), ids=lambda case: case.name
)
def test_shuffles_of_onnx(case: OnnxCase) -> None:
    output = first(np.zeros(case.outputs[0].shape))
    kind = SHUFFLES[case.op_type, case.attributes["mode"]]
    assert bnns.BNNSShuffle(kind, first(case.inputs[0]), output) == 0, reason()
    assert np.array_equal(output.data, case.outputs[0].astype(np.float32))


def test_a_shuffle_in_place() -> None:
    x = normal(2, 8, 3, 5)
    expected = first(np.zeros((2, 2, 6, 10)))
    assert bnns.BNNSShuffle(DEPTH_TO_SPACE, first(x), expected) == 0
    memory = x.copy()
    y = described(memory.reshape(2, 2, 6, 10)).descriptor
    y.data = memory.reshape(2, 2, 6, 10)
    source = Descriptor.from_array(memory)
    assert bnns.BNNSShuffle(DEPTH_TO_SPACE, source, y) == 0, reason()
    assert np.array_equal(y.data, expected.data)
    assert np.shares_memory(memory, y.data)


def test_shuffles_fail_and_touch_nothing() -> None:
    x, y = first(np.zeros((1, 4, 2, 2))), first(np.full((1, 1, 4, 4), 7))
    last = described(np.zeros((1, 4, 2, 2), np.float32), "4DLastMajor").descriptor
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((4, x, y), "type is 4, which is not a BNNSShuffleType"),
        ((None, x, y), "type is None, must be an integer"),
        ((PIXEL_SHUFFLE, last, y), "input.layout is BNNSDataLayout4DLastMajor; it must be BNNSDataLayout4DFirstMajor"),
        (
            (PIXEL_SHUFFLE, y, x),
            "input.size is (1, 1, 4, 4) and output.size (1, 4, 2, 2), expected (N, C r r, H, W) and",
        ),
        ((SPACE_TO_DEPTH, x, y), "output.size is (1, 1, 4, 4) and input.size (1, 4, 2, 2), expected (N, C r r, H, W)"),
        ((PIXEL_SHUFFLE, first(np.zeros((1, 4, 2, 4))), y), "expected (N, C r r, H, W) and (N, C, H r, W r)"),
        ((PIXEL_SHUFFLE, first(np.zeros((1, 4, 3, 3))), y), "expected (N, C r r, H, W) and (N, C, H r, W r)"),
        ((PIXEL_SHUFFLE, first(np.zeros((1, 8, 2, 2))), y), "expected (N, C r r, H, W) and (N, C, H r, W r)"),
        ((PIXEL_SHUFFLE, first(np.zeros((2, 4, 2, 2))), y), "expected (N, C r r, H, W) and (N, C, H r, W r)"),
        (
            (PIXEL_SHUFFLE, first(np.zeros((1, 4, 2, 2)), np.int8), y),
            "output.data_type is BNNSDataTypeFloat32, expected",
        ),
        ((PIXEL_SHUFFLE, x, None), "output is of type NoneType"),
        ((PIXEL_SHUFFLE, x, y, {}), "filter_params is of type dict"),
    ]
    for arguments, why in cases:
        fails(bnns.BNNSShuffle(*arguments), why)
    assert (y.data == 7).all()


# ---- bands -----------------------------------------------------------------------------------------------------------

BANDS = [(0, 0), (1, 1), (0, 2), (3, 0), (-1, 0), (0, -1), (-1, -1), (-7, 1), (2, -2), (100, 2**31 - 1), (-(2**31), 0)]


def band(x: Array, lower: int, upper: int) -> Array:
    x = x if lower < 0 else np.triu(x, -lower)
    return x if upper < 0 else np.tril(x, upper)


@pytest.mark.parametrize(("lower", "upper"), BANDS)
@pytest.mark.parametrize(
    "shape", [(1, 1), (4, 4), (2, 7), (7, 2), (1, 5), (3, 5, 4), (2, 1, 3, 3), (2, 1, 2, 1, 1, 3, 2, 5)]
)
def test_bands_against_triu_and_tril(shape: tuple[int, ...], lower: int, upper: int) -> None:
    x = normal(*shape)
    layouts = LAYOUTS[2] if len(shape) == 2 else [f"{len(shape)}DFirstMajor"]
    for layout in layouts:
        for gap in (0, 3):
            target = described(np.full(shape, 7, np.float32), layout, gap=gap)
            succeeds(bnns.BNNSBandPart(lower, upper, described(x, layout, gap=gap).descriptor, target.descriptor, None))
            assert np.array_equal(target.array, band(x, lower, upper))
            target.check_gaps()


def test_bands_as_apple_prints_them() -> None:
    x = np.array([[10 * row + column for column in range(1, 9)] for row in range(1, 9)], np.float32)
    shape, y = BNNS.Shape.matrixRowMajor(8, 8), np.zeros((8, 8), np.float32)
    assert bnns.BNNSBandPart(4, 1, shape.descriptor(x), shape.descriptor(y), None) == 0
    assert y[0].tolist() == [11, 12, 0, 0, 0, 0, 0, 0]
    assert y[4].tolist() == [51, 52, 53, 54, 55, 56, 0, 0]
    assert y[7].tolist() == [0, 0, 0, 84, 85, 86, 87, 88]
    assert bnns.BNNSBandPart(0, -1, shape.descriptor(x), shape.descriptor(y)) == 0
    assert np.array_equal(y, np.triu(x))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_bands_of_every_type(dtype: np.dtype[Any]) -> None:
    x, y = any_bits((5, 7), dtype), first(np.ones((5, 7)), dtype)
    assert bnns.BNNSBandPart(1, 2, first(x, dtype), y) == 0, reason()
    kept = band(np.ones((5, 7)), 1, 2) != 0
    assert_same_bits([y.data[kept]], [x[kept]])
    assert not y.data[~kept].view(np.uint8).any()


def test_a_band_in_place_and_from_one_layout_to_another() -> None:
    x = normal(4, 6)
    matrix = first(x)
    assert bnns.BNNSBandPart(1, 1, matrix, matrix) == 0
    assert np.array_equal(matrix.data, band(x, 1, 1))
    columns = described(np.zeros((4, 6), np.float32), "ColumnMajorMatrix")
    assert bnns.BNNSBandPart(1, 1, described(x, "RowMajorMatrix").descriptor, columns.descriptor) == 0
    assert np.array_equal(columns.array, band(x, 1, 1))


def test_bands_fail_and_touch_nothing() -> None:
    x, y = first(np.zeros((3, 4))), first(np.full((3, 4), 7))
    image = described(np.zeros((2, 3, 4), np.float32), "ImageCHW").descriptor
    last = described(np.zeros((2, 3, 4), np.float32), "3DLastMajor").descriptor
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((2**31, 0, x, y), "num_lower is 2147483648, which an int32_t cannot hold"),
        ((0, -(2**31) - 1, x, y), "num_upper is -2147483649, which an int32_t cannot hold"),
        ((0, 1.5, x, y), "num_upper is 1.5, must be an integer"),
        ((0, 0, first(np.zeros((4, 3))), y), "output has the extents (3, 4), rows and columns last, expected (4, 3)"),
        ((0, 0, first(np.zeros((3, 4)), np.int8), y), "output.data_type is BNNSDataTypeFloat32, expected"),
        ((0, 0, image, image), "input.layout is BNNSDataLayoutImageCHW; it must be a matrix or nDFirstMajor"),
        ((0, 0, last, last), "input.layout is BNNSDataLayout3DLastMajor; it must be a matrix or nDFirstMajor"),
        ((0, 0, first(np.zeros(3)), y), "input.layout is BNNSDataLayout1DFirstMajor; it must be a matrix"),
        ((0, 0, x, None), "output is of type NoneType"),
        ((0, 0, x, y, 0), "filter_params is of type int"),
    ]
    for arguments, why in cases:
        fails(bnns.BNNSBandPart(*arguments), why)
    assert (y.data == 7).all()


# ---- comparisons -----------------------------------------------------------------------------------------------------

COMPARISONS = {
    "Equal": operator.eq,
    "Less": operator.lt,
    "LessEqual": operator.le,
    "Greater": operator.gt,
    "GreaterEqual": operator.ge,
    "NotEqual": operator.ne,
}
LOGICAL: dict[str, Any] = {
    "AND": lambda a, b: a and b,
    "OR": lambda a, b: a or b,
    "NOT": lambda a, b: not a,
    "NAND": lambda a, b: not (a and b),
    "NOR": lambda a, b: not (a or b),
    "XOR": lambda a, b: a != b,
}


def compared(a: Any, b: Any, name: str) -> list[Any]:
    output = described(np.zeros(a.geometry().shape, np.bool_))
    succeeds(bnns.BNNSCompareTensor(a, b, getattr(bnns, f"BNNSRelationalOperator{name}"), output.descriptor))
    return list(output.array.tolist())


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_comparisons_of_every_type(dtype: np.dtype[Any], name: str) -> None:
    random = np.random.default_rng(0)
    a, b = (random.integers(0, 2 if dtype == np.bool_ else 4, 101) for _ in range(2))
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        a, b = (np.array([limits.min, limits.max, limits.max - 1, *one], dtype) for one in (a, b[::-1]))
    expected = [COMPARISONS[name](int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert compared(first(a, dtype), first(b, dtype), name) == expected
    assert True in expected
    assert False in expected


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_comparisons_with_nan_infinity_and_zeros(dtype: np.dtype[Any]) -> None:
    values = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0]
    pairs = [(a, b) for a in values for b in values]
    sides = [first([pair[k] for pair in pairs], dtype) for k in range(2)]
    for name, function in COMPARISONS.items():
        assert compared(*sides, name) == [function(a, b) for a, b in pairs]


@pytest.mark.parametrize("name", LOGICAL)
def test_logical_functions(name: str) -> None:
    a, b = np.array([[0, 0, 1, 1], [0, 1, 0, 1]], np.bool_)
    expected = [bool(LOGICAL[name](x, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert compared(first(a, np.bool_), first(b, np.bool_), f"Logical{name}") == expected


def test_bytes_other_than_0_and_1_are_true() -> None:
    sides = [
        Descriptor(layout=0x10000, size=(4,), data=bytearray(raw), data_type=bnns.BNNSDataTypeBoolean)
        for raw in ((0, 2, 255, 1), (0, 1, 64, 0))
    ]
    assert compared(*sides, "Equal") == [True, True, True, False]
    assert compared(*sides, "LogicalAND") == [False, True, True, False]
    assert compared(*sides, "Greater") == [False, False, False, True]
    assert compared(*sides, "LogicalXOR") == [False, False, False, True]
    assert compared(sides[0], None, "LogicalNOT") == [True, False, False, False]


def test_comparisons_as_apple_prints_them() -> None:
    assert compared(first([1, 2, 3, 4]), first([5, 4, 3, 2]), "Equal") == [False, False, True, False]
    a, b = first([1, 0, 0, 1], np.bool_), first([0, 0, 1, 1], np.bool_)
    assert compared(a, b, "LogicalAND") == [False, False, False, True]


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 8])
def test_comparisons_of_every_layout(rank: int, gap: int) -> None:
    """Elements with equal indices in size are compared, whatever their layouts."""
    shape = (3, 2, 5, 1, 2, 1, 2, 1)[:rank]
    a, b = np.random.default_rng(0).integers(0, 3, (2, *shape)).astype(np.int16)
    for layouts in zip(LAYOUTS[rank], LAYOUTS[rank][1:] + LAYOUTS[rank][:1], strict=True):
        x, y = (described(one, layout, gap=gap, by_size=True) for one, layout in zip((a, b), layouts, strict=True))
        for layout in LAYOUTS[rank]:
            output = described(np.zeros(shape, np.bool_), layout, gap=gap, by_size=True)
            assert bnns.BNNSCompareTensor(x.descriptor, y.descriptor, 3, output.descriptor) == 0, reason()
            assert np.array_equal(output.array, a > b)
            output.check_gaps()


def test_integers_compare_as_what_they_stand_for() -> None:
    a, b = first([2, 4, 6], np.int8), first([2, 2, 2], np.int8)
    a.data_scale = 0.5
    assert compared(a, b, "Less") == [True, False, False]
    assert compared(a, b, "Equal") == [False, True, False]
    b.data_bias = 1.0
    assert compared(a, b, "Equal") == [False, False, True]
    b.data_bias, a.data_scale, b.data_scale = 0.0, -1.0, -1.0
    assert compared(a, b, "Less") == [False, True, True]  # -2 < -2, -4 < -2, -6 < -2
    large = [first([2**62 + 1], np.int64), first([2**62], np.int64)]
    for one in large:
        one.data_scale = 2.0
    assert compared(*large, "Greater") == [True]  # equal scales need no rounding


def test_a_comparison_in_place() -> None:
    a, b = np.array([0, 1, 1, 0], np.bool_), first([1, 1, 0, 0], np.bool_)
    inputs = Descriptor.from_array(a)
    assert bnns.BNNSCompareTensor(inputs, b, bnns.BNNSRelationalOperatorLogicalXOR, inputs) == 0
    assert a.tolist() == [True, False, True, False]
    memory = np.array([1, 2, 3, 4], np.uint8)
    numbers, output = Descriptor.from_array(memory[:3]), Descriptor.from_array(memory.view(np.bool_)[1:])
    assert bnns.BNNSCompareTensor(numbers, first([2, 2, 2], np.uint8), 0, output) == 0, reason()
    assert memory.tolist() == [1, 0, 1, 0]


def test_comparisons_fail_and_touch_nothing() -> None:
    a, flags = first(np.zeros((2, 3))), first(np.ones((2, 3)), np.bool_)
    rotated = Descriptor(layout=0x40001, size=(1, 1, 2, 3), data=np.zeros(6, np.float32), data_type=a.data_type)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((a, a, 0, first(np.zeros((2, 3)))), "out.data_type is BNNSDataTypeFloat32; it must be Boolean"),
        ((a, a, 12, flags), "op is 12, which is not a BNNSRelationalOperator"),
        ((a, a, -1, flags), "op is -1, which a size_t cannot hold"),
        ((a, a, "==", flags), "op is '==', must be an integer"),
        ((a, flags, 0, flags), "in1.data_type is BNNSDataTypeBoolean, expected BNNSDataTypeFloat32 as in in0"),
        ((a, a, 6, flags), "in0.data_type is BNNSDataTypeFloat32; it must be Boolean"),
        ((flags, a, 7, flags), "in1.data_type is BNNSDataTypeFloat32; it must be Boolean"),
        ((a, first(np.zeros((3, 2))), 0, flags), "in1.size is (3, 2), expected (2, 3) as in out"),
        ((first(np.zeros(6)), a, 0, flags), "in0.size is (6,), expected (2, 3) as in out"),
        ((a, None, 0, flags), "in1 is of type NoneType"),
        ((None, a, 8, flags), "in0 is of type NoneType"),
        (
            (rotated, rotated, 0, flags),
            "in0.layout is BNNSDataLayoutConvolutionWeightsOIHrWr; kernels must not be rotated",
        ),
    ]
    for arguments, why in cases:
        fails(bnns.BNNSCompareTensor(*arguments), why)
    assert flags.data.all()


# ---- Swift -----------------------------------------------------------------------------------------------------------


def test_swift_tiles_shuffles_bands_and_comparisons() -> None:
    x, whole, dx = normal(2, 3), np.zeros((4, 9), np.float32), np.zeros((2, 3), np.float32)
    small, large = BNNS.Shape.matrixFirstMajor(2, 3), BNNS.Shape.matrixFirstMajor(4, 9)
    BNNS.tile(input=small.descriptor(x), output=large.descriptor(whole))
    assert np.array_equal(whole, np.tile(x, (2, 3)))
    for opposite in (False, True):
        gradient: dict[str, Any] = {"generatingInputGradient": small.descriptor(dx), "oppositeAxes": opposite}
        BNNS.tileBackward(outputGradient=large.descriptor(whole), **gradient)
        axes = whole.reshape(3, 3, 2, 2) if opposite else whole.reshape(2, 2, 3, 3)
        assert np.allclose(dx.reshape(-1), axes.sum(axis=(0, 2)).reshape(-1), rtol=1e-6)
    deep, wide = BNNS.Shape.tensor4DFirstMajor(1, 8, 2, 2), BNNS.Shape.tensor4DFirstMajor(1, 2, 4, 4)  # type: ignore[attr-defined]
    channels, pixels, expected = normal(1, 8, 2, 2), np.zeros((2, 4, 4), np.float32), first(np.zeros((1, 2, 4, 4)))
    BNNS.shuffle(BNNS.ShuffleType.depthToSpaceNCHW, input=deep.descriptor(channels), output=wide.descriptor(pixels))
    assert bnns.BNNSShuffle(PIXEL_SHUFFLE, deep.descriptor(channels), expected) == 0
    assert np.array_equal(pixels, expected.data[0])
    back = np.zeros_like(channels)
    BNNS.shuffle(BNNS.ShuffleType.spaceToDepthNCHW, input=wide.descriptor(pixels), output=deep.descriptor(back))
    assert np.array_equal(back, channels)
    for counts, part in (
        ((0, None), np.triu(x)),
        ((None, 0), np.tril(x)),
        ((None, None), x),
        ((0, 0), x * np.eye(2, 3)),
    ):
        bands = {"lowerBandCount": counts[0], "upperBandCount": counts[1]}
        BNNS.copyBandPart(small.descriptor(x), to=small.descriptor(dx), **bands)
        assert np.array_equal(dx, part.astype(np.float32))
    output = np.zeros((2, 3), np.bool_)
    flags, sides = small.descriptor(output, bnns.BNNSDataTypeBoolean), [small.descriptor(one) for one in (x, dx)]
    BNNS.compare(*sides, using=BNNS.RelationalOperator.notEqual, output=flags)
    assert np.array_equal(output, x != dx)
    before = output.copy()
    BNNS.compare(flags, None, using=BNNS.RelationalOperator.not_, output=flags)
    assert np.array_equal(output, ~before)
    names = ["equal", "less", "lessEqual", "greater", "greaterEqual", "notEqual"]
    names += ["and_", "or_", "not_", "nand", "nor", "xor"]
    assert [BNNS.RelationalOperator[name].value for name in names] == list(range(12))
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: BNNSTile: output\.size is \(2, 3\), expected multiples"):
        BNNS.tile(input=large.descriptor(whole), output=small.descriptor(x))
    with pytest.raises(BNNS.Error, match="arrayDescriptorInvalidData: to has no data"):
        BNNS.copyBandPart(small.descriptor(x), to=small.descriptor(), lowerBandCount=1, upperBandCount=1)
    with pytest.raises(BNNS.Error, match="layerApplyFail: BNNSCompareTensor: out"):
        BNNS.compare(*sides, using=BNNS.RelationalOperator.less, output=sides[0])
