"""BNNS dropout, permute and padding filters, copies and transposes."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import Descriptor, all_fail, created, fails, normal, not_created, sized, succeeds

F32, F16 = bnns.BNNSDataTypeFloat32, bnns.BNNSDataTypeFloat16
IMAGE, VECTOR = bnns.BNNSDataLayoutImageCHW, bnns.BNNSDataLayoutVector
FIRST3, LAST3 = bnns.BNNSDataLayout3DFirstMajor, bnns.BNNSDataLayout3DLastMajor
SHAPE = (3, 2, 5)


def backward(filter: Any, batch: int, in_delta: Any, out_delta: Any, **more: Any) -> int:
    return bnns.BNNSFilterApplyBackwardBatch(
        filter, batch, None, 0, in_delta, 0, None, 0, out_delta, 0, more.get("weights"), more.get("bias")
    )


def is_adjoint(x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> bool:
    """<dy, y> = <dx, x> for a linear map y of x, and its gradient dx of dy."""
    terms = (dy.astype(np.float64) * y).sum(), (dx.astype(np.float64) * x).sum()
    return bool(np.isclose(*terms, rtol=1e-5, atol=1e-5))


# ---- dropout ---------------------------------------------------------------------------------------------------------


def dropout(rate: float = 0.4, seed: int = 7, control: int = 0, **descriptors: Any) -> Any:
    image = sized(IMAGE, *SHAPE[::-1])
    layer = bnns.BNNSLayerParametersDropout(
        descriptors.get("i_desc", image), descriptors.get("o_desc", image), rate, seed, control
    )
    return bnns.BNNSFilterCreateLayerDropout(layer)


def test_dropout_drops_scales_and_keeps_its_mask_for_backward() -> None:
    x, y, dy, dx = normal(50, *SHAPE), *(normal(50, *SHAPE, seed=k) for k in (1, 2, 3))
    filter = dropout()
    assert bnns.BNNSFilterApplyBatch(filter, 50, x, 30, y, 30) == 0, bnns.last_error()
    kept = y != 0
    assert np.array_equal(y[kept], (x * np.float32(1 / (1 - np.float32(0.4))))[kept])
    assert abs(kept.mean() - 0.6) < 0.05
    image = sized(IMAGE, *SHAPE[::-1], data=dx)
    delta = sized(IMAGE, *SHAPE[::-1], data=dy)
    assert backward(filter, 50, image, delta) == 0, bnns.last_error()
    assert np.array_equal(dx != 0, kept)
    assert is_adjoint(x, y, dy, dx)
    before = dx.copy()
    image.flags = bnns.BNNSNDArrayFlagBackpropAccumulate
    assert backward(filter, 50, image, delta) == 0
    assert np.allclose(dx, 2 * before, rtol=1e-6)


def test_dropout_draws_anew_and_repeatably() -> None:
    x = np.ones((4, *SHAPE), np.float32)

    def masks(seed: int, count: int = 3) -> list[bytes]:
        filter, y = dropout(seed=seed), np.empty_like(x)
        found = []
        for _ in range(count):
            assert bnns.BNNSFilterApplyBatch(filter, 4, x, 30, y, 30) == 0
            found.append(y.tobytes())
        return found

    assert len(set(masks(7))) == 3
    assert masks(7) == masks(7)
    assert masks(8) != masks(7)
    assert masks(0) != masks(0)  # not seeded


def test_dropout_with_a_rate_of_zero_is_the_identity() -> None:
    x, y = normal(4, *SHAPE), np.empty((4, *SHAPE), np.float32)
    assert bnns.BNNSFilterApplyBatch(dropout(0.0), 4, x, 30, y, 30) == 0
    assert np.array_equal(y, x)


@pytest.mark.parametrize("control", [0b0001, 0b0010, 0b0100, 0b1000, 0b0011, 0b1110])
@pytest.mark.parametrize("layout", [IMAGE, FIRST3])
def test_dropout_shares_decisions_along_axes(control: int, layout: int) -> None:
    size = SHAPE if layout == FIRST3 else SHAPE[::-1]
    x, y, dx = np.ones((8, *SHAPE), np.float32), np.empty((8, *SHAPE), np.float32), np.empty((8, *SHAPE), np.float32)
    sample = sized(layout, *size)
    filter = dropout(0.5, 3, control, i_desc=sample, o_desc=sample)
    assert bnns.BNNSFilterApplyBatch(filter, 8, x, 30, y, 30) == 0, bnns.last_error()
    axes = [k if layout == FIRST3 else 2 - k for k in range(3)]  # of size[k] in SHAPE
    shared = [0] * (control >> 3 & 1) + [1 + axes[k] for k in range(3) if control >> k & 1]
    for axis in range(4):
        constant = bool((y == y.take([0], axis)).all())
        assert constant is (axis in shared)
    delta = sized(layout, *size, data=x)
    assert backward(filter, 8, sized(layout, *size, data=dx), delta) == 0
    assert np.array_equal(dx, y)


def test_dropout_of_other_types_and_of_nan() -> None:
    x = np.full((4, *SHAPE), np.nan, np.float16)
    sample = sized(IMAGE, *SHAPE[::-1], data_type=F16)
    y = np.empty_like(x)
    for control in (0, 1):
        filter = dropout(0.5, control=control, i_desc=sample, o_desc=sample)
        assert bnns.BNNSFilterApplyBatch(filter, 4, x, 30, y, 30) == 0, bnns.last_error()
        assert set(np.isnan(y).ravel()) == {True, False}  # what is dropped is 0
        assert (y[~np.isnan(y)] == 0).all()
        delta = sized(IMAGE, *SHAPE[::-1], data=normal(4, *SHAPE))
        fails(backward(filter, 4, delta, delta), "this filter maps float16 to float16; backward needs Float32")


def test_dropout_fails() -> None:
    for fields, reason in (
        ({"rate": 1.0}, "rate is 1, must be at least 0 and below 1"),
        ({"rate": -0.5}, "rate is -0.5"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"control": 16}, "control is 0x10, but i_desc has 3 axes, and bit 3 is the batch"),
        ({"o_desc": sized(IMAGE, 5, 3, 2)}, "o_desc.size is (5, 3, 2), expected (5, 2, 3) as in i_desc"),
        ({"i_desc": sized(IMAGE, 5, 2, 3, data_type=0x20008)}, "i_desc.data_type is BNNSDataTypeInt8"),
    ):
        not_created(dropout(**fields), reason)  # type: ignore[arg-type]
    assert bnns.BNNSFilterCreateLayerDropout(None) is None  # type: ignore[arg-type]
    filter, x = dropout(), normal(4, *SHAPE)
    dx = np.full_like(x, 7)
    deltas = [sized(IMAGE, *SHAPE[::-1], data=data) for data in (dx, x)]
    fails(backward(filter, 4, *deltas), "there was no forward pass")
    assert bnns.BNNSFilterApplyBatch(filter, 3, x, 30, np.empty_like(x), 30) == 0
    fails(backward(filter, 4, *deltas), "batch_size is 4, but the last forward pass had 3")
    fails(backward(filter, 3, *deltas, weights=deltas[0]), "weights_delta is given, but dropout has nothing to train")
    assert backward(filter, 3, deltas[0], None) == -1
    assert (dx == 7).all()


# ---- permutation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("permutation", [(0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("layouts", [(IMAGE, IMAGE), (FIRST3, FIRST3), (FIRST3, LAST3)])
@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.bool_, ml_dtypes.bfloat16])
def test_permute(permutation: tuple[int, ...], layouts: tuple[int, int], dtype: Any) -> None:
    size = (3, 2, 5)  # in the order of the layout's size
    new_size = tuple(size[k] for k in permutation)
    x = (normal(4, 30) * 20).astype(dtype)
    data_type = Descriptor.from_array(x).data_type
    made = [sized(layout, *s, data_type=data_type) for layout, s in zip(layouts, (size, new_size), strict=True)]
    filter = created(bnns.BNNSFilterCreateLayerPermute(bnns.BNNSLayerParametersPermute(*made, permutation)))
    y = np.empty_like(x)
    assert bnns.BNNSFilterApplyBatch(filter, 4, x, 30, y, 30) == 0, bnns.last_error()

    def by_size(array: np.ndarray, layout: int, size: tuple[int, ...]) -> np.ndarray:
        return array.reshape(size) if layout == FIRST3 else array.reshape(size[::-1]).T

    for before, after in zip(x, y, strict=True):
        expected = by_size(before, layouts[0], size).transpose(permutation)
        assert np.array_equal(by_size(after, layouts[1], new_size), expected)
    if dtype is np.float32:
        dx = np.empty_like(x)
        deltas = [sized(layouts[0], *size, data=dx), sized(layouts[1], *new_size, data=y)]
        assert bnns.BNNSPermuteFilterApplyBackwardBatch(filter, 4, deltas[0], 30, deltas[1], 30) == 0
        assert np.array_equal(dx, x)
        assert backward(filter, 4, *deltas) == 0  # the function for any filter
        assert np.array_equal(dx, x)


def test_permute_in_place_and_from_a_reshaped_gradient() -> None:
    x = normal(2, 6)
    made = [sized(bnns.BNNSDataLayoutRowMajorMatrix, *s) for s in ((3, 2), (2, 3))]
    filter = bnns.BNNSFilterCreateLayerPermute(bnns.BNNSLayerParametersPermute(*made, (1, 0)))
    expected = x.reshape(2, 2, 3).transpose(0, 2, 1).reshape(2, 6)
    y = x.copy()
    assert bnns.BNNSFilterApplyBatch(filter, 2, y, 6, y, 6) == 0
    assert np.array_equal(y, expected)
    vector = sized(VECTOR, 6, data=y)
    assert bnns.BNNSPermuteFilterApplyBackwardBatch(filter, 2, vector, 0, vector, 0) == 0, bnns.last_error()
    assert np.array_equal(y, x)


def test_permute_fails() -> None:
    image = sized(IMAGE, 5, 2, 3)

    def reason(i_desc: Any, o_desc: Any, *permutation: int) -> str:
        layer = bnns.BNNSLayerParametersPermute(i_desc, o_desc, permutation)
        assert bnns.BNNSFilterCreateLayerPermute(layer) is None
        return bnns.last_error() or ""

    assert "permutation is (0, 0, 1), which is not a permutation of 3 axes" in reason(image, image, 0, 0, 1)
    assert "o_desc.size is (5, 2, 3), expected (2, 5, 3) for i_desc.size (5, 2, 3)" in reason(image, image, 1, 0, 2)
    assert "o_desc has 1 axes, expected 3" in reason(image, sized(VECTOR, 30), 0, 1, 2)
    half = sized(IMAGE, 5, 2, 3, data_type=F16)
    assert "o_desc.data_type is BNNSDataTypeFloat16, expected BNNSDataTypeFloat32" in reason(image, half, 0, 1, 2)
    filter = dropout()
    fails(bnns.BNNSPermuteFilterApplyBackwardBatch(filter, 1, image, 0, image, 0), "filter is not a permute filter")


# ---- padding ---------------------------------------------------------------------------------------------------------


def padded(x: np.ndarray, pads: Any, mode: int, bits: int = 0, layout: int = bnns.BNNSDataLayout2DFirstMajor) -> Any:
    """A filter for an array in the order of FirstMajor."""
    shape = tuple(n + a + b for n, (a, b) in zip(x.shape[1:], pads, strict=True))
    data_type = Descriptor.from_array(x).data_type
    made = [sized(layout, *s, data_type=data_type) for s in (x.shape[1:], shape)]
    filter = bnns.BNNSFilterCreateLayerPadding(bnns.BNNSLayerParametersPadding(*made, pads, mode, bits))
    return filter, np.empty((len(x), *shape), x.dtype), made


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("pads", [((2, 1), (0, 3)), ((0, 0), (0, 0)), ((1, 0), (3, 1))])
def test_padding(mode: int, pads: Any) -> None:
    x, dy_seed = normal(3, 4, 5), 5
    bits = int(np.float32(2.5).view(np.uint32))
    filter, y, made = padded(x, pads, mode, bits)
    assert bnns.BNNSFilterApplyBatch(filter, 3, x, 0, y, 0) == 0, bnns.last_error()
    options: Any = {0: {"constant_values": 2.5}, 1: {"mode": "reflect"}, 2: {"mode": "symmetric"}}[mode]
    assert np.array_equal(y, np.pad(x, ((0, 0), *pads), **options))
    dy, dx = normal(*y.shape, seed=dy_seed), np.full_like(x, 7)
    made[0].data, made[1].data = dx, dy
    assert backward(filter, 3, made[0], made[1]) == 0, bnns.last_error()
    inside = y - np.pad(np.zeros_like(x), ((0, 0), *pads), **options)  # without the constant
    assert is_adjoint(x, inside, dy, dx)


def test_padding_as_printed() -> None:
    x = np.arange(4, dtype=np.float32)[None]
    for mode, expected in ((1, [2, 1, 0, 1, 2, 3]), (2, [1, 0, 0, 1, 2, 3])):
        filter, y, _ = padded(x, ((2, 0),), mode, layout=VECTOR)
        assert bnns.BNNSFilterApply(filter, x, y) == 0
        assert y[0].tolist() == expected


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8, np.uint16, np.int64, np.bool_])
def test_padding_value_is_the_bits_of_an_element(dtype: Any) -> None:
    x = np.ones((1, 2), dtype)
    value = np.array(1, dtype) if dtype is np.bool_ else np.array(-3).astype(dtype)
    bits = int.from_bytes(value.tobytes()[:4], "little")
    filter, y, _ = padded(x, ((1, 0),), 0, bits, VECTOR)
    assert bnns.BNNSFilterApply(filter, x, y) == 0, bnns.last_error()
    want = value if dtype is not np.int64 else np.int64(2**32 - 3)  # only the first four bytes are given
    assert y[0].tolist() == [want.item(), 1, 1]


def test_padding_is_listed_in_the_order_of_size() -> None:
    image = sized(IMAGE, 2, 1, 1)
    wide = sized(IMAGE, 5, 2, 1)
    layer = bnns.BNNSLayerParametersPadding(image, wide, [(1, 2), (0, 1)], 0, 0)
    x, y = np.array([3, 4], np.float32), np.full((2, 5), 9, np.float32)
    assert bnns.BNNSFilterApply(bnns.BNNSFilterCreateLayerPadding(layer), x, y) == 0
    assert y.tolist() == [[0, 3, 4, 0, 0], [0] * 5]
    assert layer.padding_size == ((1, 2), (0, 1), *((0, 0),) * 6)
    image_bytes = layer.to_bytes()
    assert struct.unpack_from("<4Q", image_bytes, 352) == (1, 2, 0, 1)
    assert bnns.BNNSLayerParametersPadding.from_bytes(image_bytes).padding_size == layer.padding_size
    with pytest.raises(ValueError, match="padding_size has 8 entries of 2 numbers each"):
        layer.padding_size = ((1, 2, 3),)  # type: ignore[assignment]


def test_padding_fails() -> None:
    small, large = sized(VECTOR, 3), sized(VECTOR, 6)

    def reason(*fields: Any) -> str:
        assert bnns.BNNSFilterCreateLayerPadding(bnns.BNNSLayerParametersPadding(*fields)) is None
        return bnns.last_error() or ""

    assert "padding_mode is 3, which is not a BNNSPaddingMode" in reason(small, large, [(3, 0)], 3)
    assert "o_desc.size is (6,), expected (5,) for i_desc.size (3,), padded" in reason(small, large, [(2, 0)])
    assert "padding_size[0] is (3, 0), but an axis of 3 elements mirrors at most 2" in reason(small, large, [(3, 0)], 1)
    five = sized(bnns.BNNSDataLayout5DLastMajor, 1, 1, 1, 1, 1)
    assert "i_desc has 5 axes" in reason(five, five)
    assert "padding_size[0][1] is -1" in reason(small, large, [(4, -1)])
    huge = sized(VECTOR, 2**62)
    layer = bnns.BNNSLayerParametersPadding(small, huge, [(2**62 - 3, 0)])
    filter, y = bnns.BNNSFilterCreateLayerPadding(layer), np.full(3, 7, np.float32)
    assert bnns.BNNSFilterApply(filter, y.copy(), y) == -1
    assert (y == 7).all()


def test_samples_at_any_address() -> None:
    image = sized(IMAGE, *SHAPE[::-1])
    padded_image, turned = sized(IMAGE, 7, 2, 3), sized(IMAGE, *SHAPE)
    filters = [
        dropout(0.0),
        bnns.BNNSFilterCreateLayerPermute(bnns.BNNSLayerParametersPermute(image, turned, (2, 1, 0))),
        bnns.BNNSFilterCreateLayerPadding(bnns.BNNSLayerParametersPadding(image, padded_image, [(1, 1)], 0, 0)),
    ]
    x, results = normal(4, 30), np.zeros((2, 4 * 42 * 4 + 1), np.uint8)
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    unaligned[...] = x
    for filter in filters:
        expected, got = results[0, :-1].view(np.float32), results[1, 1:].view(np.float32)
        succeeds(bnns.BNNSFilterApplyBatch(filter, 4, x, 0, expected, 0))
        succeeds(bnns.BNNSFilterApplyBatch(filter, 4, unaligned, 0, got, 0))
        assert np.array_equal(got, expected)
        assert expected.any()


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_copy_converts_types() -> None:
    x = np.array([[1.5, -2.5, 300.0], [0.49, -0.5, np.nan]], np.float32)
    for dtype, expected in (
        (np.int8, [[2, -2, 127], [0, 0, 0]]),
        (np.uint8, [[2, 0, 255], [0, 0, 0]]),
        (np.float16, x.astype(np.float16).tolist()),
    ):
        y = np.full(x.shape, 9, dtype)
        assert bnns.BNNSCopy(Descriptor.from_array(y), Descriptor.from_array(x)) == 0, bnns.last_error()
        assert str(y.tolist()) == str(expected)
    scaled = np.zeros(x.shape, np.int8)
    dest = Descriptor.from_array(scaled)
    dest.data_scale, dest.data_bias = 0.5, 1.0
    assert bnns.BNNSCopy(dest, Descriptor.from_array(x)) == 0
    assert scaled.tolist() == [[1, -7, 127], [-1, -3, 0]]
    back = np.zeros(x.shape, np.float32)
    assert bnns.BNNSCopy(Descriptor.from_array(back), dest) == 0
    assert back.tolist() == [[1.5, -2.5, 64.5], [0.5, -0.5, 1.0]]


def test_copy_of_floats_to_bytes_with_strides() -> None:
    """Columns to bytes that are not contiguous, as a public program does; nothing between them changes."""
    x = np.arange(6, dtype=np.float32)
    memory = np.full(16, 9, np.int8)
    source = sized(bnns.BNNSDataLayoutColumnMajorMatrix, 2, 3, data=x)
    dest = sized(bnns.BNNSDataLayoutColumnMajorMatrix, 2, 3, data=memory, data_type=0x20008, stride=(2, 4))
    assert bnns.BNNSCopy(dest, source) == 0, bnns.last_error()
    assert memory.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9, 5, 9, 9, 9, 9, 9]


def test_copy_to_another_layout() -> None:
    source = sized(bnns.BNNSDataLayoutColumnMajorMatrix, 2, 3, data=np.arange(6, dtype=np.float32))
    y = np.empty(6, np.float32)
    first = sized(bnns.BNNSDataLayout2DFirstMajor, 2, 3, data=y)
    assert bnns.BNNSCopy(first, source) == 0
    assert y.tolist() == [0, 2, 4, 1, 3, 5]  # the elements with the same indices, not the same memory


def test_transpose_is_its_own_inverse() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y, back = np.empty((3, 2), np.float32), np.empty_like(x)
    source, dest = Descriptor.from_array(x), Descriptor.from_array(y)  # sizes (3, 2) and (2, 3)
    assert bnns.BNNSTranspose(dest, source, 0, 1) == 0, bnns.last_error()
    assert np.array_equal(y, x.T)
    assert bnns.BNNSTranspose(Descriptor.from_array(back), dest, 1, 0) == 0
    assert np.array_equal(back, x)
    image = np.arange(30, dtype=np.int32).reshape(3, 2, 5)
    turned = np.empty((5, 2, 3), np.int32)
    assert bnns.BNNSTranspose(Descriptor.from_array(turned), Descriptor.from_array(image), 0, 2) == 0
    assert np.array_equal(turned, image.T)


def test_copies_fail_and_touch_nothing() -> None:
    x, y = normal(2, 3), np.full((2, 3), 7, np.float32)
    source, dest = Descriptor.from_array(x), Descriptor.from_array(y)
    half = Descriptor.from_array(np.zeros((3, 2), np.float16))
    cases: list[tuple[Any, str]] = [
        (lambda: bnns.BNNSCopy(dest, Descriptor.from_array(x.T.copy())), "dest.size is (3, 2), expected (2, 3) as in"),
        (lambda: bnns.BNNSCopy(dest, None), "src is of type NoneType, not BNNSNDArrayDescriptor"),
        (lambda: bnns.BNNSCopy(sized(VECTOR, 6), source), "dest.data is NULL"),
        (lambda: bnns.BNNSCopy(dest, dest), "dest overlaps src in memory"),
        (lambda: bnns.BNNSCopy(sized(VECTOR, 3, data=bytes(12)), source), "dest.data is read-only"),
        (lambda: bnns.BNNSTranspose(half, source, 0, 1), "dest.data_type is BNNSDataTypeFloat16, expected"),
        (lambda: bnns.BNNSTranspose(dest, source, 0, 2), "axis1 is 2, but src has 2 axes"),
        (lambda: bnns.BNNSTranspose(dest, source, 0, 1), "dest.size is (3, 2), expected (2, 3) for src.size (3, 2)"),
        (lambda: bnns.BNNSCopy(dest, source, 3), "filter_params is of type int"),
    ]
    all_fail(cases, y)


# ---- Swift -----------------------------------------------------------------------------------------------------------


def test_swifts_layers_and_copies() -> None:
    shape = BNNS.Shape.imageCHW(5, 2, 3)
    x, y, dx = normal(4, *SHAPE), np.empty((4, *SHAPE), np.float32), np.empty((4, *SHAPE), np.float32)
    plain, source, result = shape.descriptor(), shape.descriptor(x), shape.descriptor(y)
    with BNNS.DropoutLayer(input=plain, output=plain, rate=0.5, seed=1, control=0) as layer:
        layer.apply(batchSize=4, input=source, output=result)
        layer.applyBackward(batchSize=4, outputGradient=source, generatingInputGradient=shape.descriptor(dx))
        assert np.array_equal(dx, y)
        assert np.array_equal(y != 0, rg.dropout(np.ones_like(x), 0.0, seed=0) * y != 0)
    turned = BNNS.Shape.imageCHW(3, 2, 5)
    with BNNS.PermuteLayer(input=plain, output=turned.descriptor(), permutation=[2, 1, 0]) as permute:
        permute.apply(batchSize=4, input=source, output=turned.descriptor(y))
        assert np.array_equal(y.reshape(4, 5, 2, 3), x.transpose(0, 3, 2, 1))
    wide = BNNS.Shape.imageCHW(7, 2, 3)
    for mode, options in (
        (BNNS.PaddingMode.constantScalar(1.5), {"constant_values": 1.5}),
        (BNNS.PaddingMode.constantBitPattern(0), {}),
        (BNNS.PaddingMode.reflect, {"mode": "reflect"}),
        (BNNS.PaddingMode.symmetric, {"mode": "symmetric"}),
    ):
        z = np.empty((4, 3, 2, 7), np.float32)
        padding = BNNS.PaddingLayer(input=plain, output=wide.descriptor(), mode=mode, size=[(1, 1), (0, 0), (0, 0)])
        padding.apply(batchSize=4, input=source, output=wide.descriptor(z))
        assert np.array_equal(z, np.pad(x, ((0, 0), (0, 0), (0, 0), (1, 1)), **options))  # type: ignore[call-overload]
    one = shape.descriptor(x[0].copy())
    BNNS.copy(one, to=shape.descriptor(y[0]))
    assert np.array_equal(y[0], x[0])
    BNNS.transpose(input=one, output=turned.descriptor(y[1]), firstTransposeAxis=0, secondTransposeAxis=2)
    assert np.array_equal(y[1].reshape(5, 2, 3), x[0].T)
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: BNNSCopy: dest\.size"):
        BNNS.copy(one, to=turned.descriptor(y[0]))
    with pytest.raises(BNNS.Error, match=r"unableToCreateLayer: .*rate is 2"):
        BNNS.DropoutLayer(input=plain, output=plain, rate=2, seed=1, control=0)
