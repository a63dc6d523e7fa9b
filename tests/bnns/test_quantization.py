"""Quantizers: BNNSDirectApplyQuantizer, Swift's names for it, and quantization as the second stage of fused filters."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import Descriptor, created, describe, fails, sample

Array = np.ndarray[Any, Any]
QUANTIZE, DEQUANTIZE = bnns.BNNSQuantizerFunctionQuantize, bnns.BNNSQuantizerFunctionDequantize
F32 = bnns.BNNSDataTypeFloat32
HIGHER = (np.int32, np.float16, np.float32)
LOWER = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32)
CLIENT = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)


def apply(
    function: int,
    x: Array,
    dtype: Any,
    mask: int = 0,
    scale: Array | None = None,
    bias: Array | None = None,
    layout: int | None = None,
) -> Array:
    y = np.full(x.shape, 7, dtype)
    layer = bnns.BNNSLayerParametersQuantization(
        mask, function, sample(x, layout), sample(y, layout), describe(scale), describe(bias)
    )
    assert bnns.BNNSDirectApplyQuantizer(layer, None, len(x), 0, 0) == 0, bnns.last_error()
    return y


def rounded(value: Fraction, dtype: Any) -> int:
    """Half to even, as Python rounds fractions, and saturated."""
    limits = np.iinfo(dtype)
    return min(max(round(value), int(limits.min)), int(limits.max))


# ---- what Apple prints -----------------------------------------------------------------------------------------------


def test_quantize_as_apple_prints_it() -> None:
    x, scale = np.arange(1, 9, dtype=np.float32).reshape(1, 2, 4), np.array([1, 10, 100, 1000], np.float32)
    assert apply(QUANTIZE, x, np.int16, 1, scale).tolist() == [[[1, 20, 300, 4000], [5, 60, 700, 8000]]]


def test_swifts_dequantize_as_apple_prints_it() -> None:
    """The scale is of integers, of the type of the input."""
    shape = BNNS.Shape.matrixRowMajor(4, 2)
    source = Descriptor.allocate(initializingFrom=np.arange(1000, 9000, 1000, dtype=np.int16), shape=shape)
    output = Descriptor.allocateUninitialized(scalarType=float, shape=shape)
    scale = Descriptor.allocate(initializingFrom=np.array([1, 10, 100, 1000], np.int16), shape=BNNS.Shape.vector(4))
    BNNS.dequantize(batchSize=1, input=source, output=output, axis=0, scale=scale, bias=None)
    assert output.makeArray(of=float).tolist() == [1000, 200, 30, 4, 5000, 600, 70, 8]


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("higher", HIGHER)
@pytest.mark.parametrize("lower", LOWER)
def test_every_pair_of_types(higher: Any, lower: Any) -> None:
    """Against exact fractions: numbers at halves, at the limits of the integers and beyond."""
    limits, rng = np.iinfo(lower), np.random.default_rng(0)
    drawn = rng.normal(0, 300, 64)
    special = [0.5, 1.5, 2.5, -0.5, -1.5, 0, limits.min, limits.max, limits.max + 1.0, limits.min - 1.0, 65504, -65504]
    low, high = (-65504, 65504) if higher == np.float16 else (-(2.0**31), 2.0**31 - 128)
    x = np.clip([*drawn, *special], low, high).astype(higher)[None]
    scale, bias = np.array([0.5], np.float32), np.array([1.25], np.float32)
    y = apply(QUANTIZE, x, lower, 0, scale, bias)
    exact = [Fraction(value.item()) / 2 + Fraction(5, 4) for value in x[0]]
    assert y[0].tolist() == [rounded(value, lower) for value in exact]
    # And back, of all kinds of integers of the lower type.
    stored = np.array([*rng.integers(limits.min, limits.max, 64, endpoint=True), limits.min, limits.max], lower)[None]
    z = apply(DEQUANTIZE, stored, higher, 0, np.array([3], np.float32), bias)
    exact = [(Fraction(int(value)) - Fraction(5, 4)) / 3 for value in stored[0]]
    if higher == np.int32:
        assert z[0].tolist() == [rounded(value, np.int32) for value in exact]
    else:
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(z[0], np.array([float(value) for value in exact]).astype(higher))


@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(width=32, min_value=-1000, max_value=1000),
    st.integers(-128, 127),
)
def test_any_number_scale_and_bias(value: float, scale: float, bias: int) -> None:
    """The product of two float32 is exact in float64; the sum is rounded once before it is rounded to an integer."""
    y = apply(QUANTIZE, np.array([[value]], np.float32), np.int8, 0, np.float32([scale]), np.int8([bias]))
    inexact = Fraction(float(Fraction(value) * Fraction(scale) + bias))
    assert y.item() == rounded(inexact, np.int8)


def test_nan_infinity_and_division_by_zero() -> None:
    x = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    assert apply(QUANTIZE, x, np.uint8).tolist() == [[0, 255, 0]]
    assert apply(QUANTIZE, x, np.int16, 0, np.float32([-1])).tolist() == [[0, -32768, 32767]]
    stored, zero = np.array([[-3, 0, 5]], np.int8), np.zeros(1, np.float32)
    np.testing.assert_array_equal(apply(DEQUANTIZE, stored, np.float32, 0, zero), [[-np.inf, np.nan, np.inf]])
    assert apply(DEQUANTIZE, stored, np.int32, 0, zero).tolist() == [[-(2**31), 0, 2**31 - 1]]
    large = apply(DEQUANTIZE, np.array([[127]], np.int8), np.float16, 0, np.float32([1e-4]))
    np.testing.assert_array_equal(large, [[np.inf]])  # beyond the largest float16


def test_without_scale_and_bias_numbers_are_converted() -> None:
    x = np.array([[-1.5, 0.5, 2.5, 300, -300]], np.float32)
    assert apply(QUANTIZE, x, np.int8).tolist() == [[-2, 0, 2, 127, -128]]
    assert apply(DEQUANTIZE, np.array([[-128, 127]], np.int8), np.float16).tolist() == [[-128, 127]]
    exact = np.array([[2**31 - 1, -(2**31), 2**24 + 1]], np.int32)
    np.testing.assert_array_equal(apply(QUANTIZE, exact, np.int32), exact)
    np.testing.assert_array_equal(apply(DEQUANTIZE, exact, np.int32, 0, None, np.int32([0])), exact)


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        (bnns.BNNSDataLayoutImageCHW, (2, 1, 0)),
        (bnns.BNNSDataLayout3DFirstMajor, (0, 1, 2)),
        (bnns.BNNSDataLayoutMHA_DHK, (2, 0, 1)),
    ],
)
@pytest.mark.parametrize("bit", [0, 1, 2, 3])
@pytest.mark.parametrize("present", ["scale", "bias", "both"])
def test_axes_and_the_batch(layout: int, order: tuple[int, ...], bit: int, present: str) -> None:
    """Bit k is the axis of size[k], bit 3 the batch."""
    rng = np.random.default_rng(bit)
    x = rng.normal(0, 40, (5, 2, 3, 7)).astype(np.float32)
    axis = 0 if bit == 3 else 1 + order[bit]
    scale = rng.uniform(0.1, 2, x.shape[axis]).astype(np.float32) if present != "bias" else None
    bias = rng.normal(0, 9, x.shape[axis]).astype(np.float32) if present != "scale" else None
    shape = [-1 if k == axis else 1 for k in range(4)]
    one, zero = np.ones(1), np.zeros(1)
    wide_scale = (one if scale is None else scale.astype(np.float64)).reshape(shape if scale is not None else -1)
    wide_bias = (zero if bias is None else bias.astype(np.float64)).reshape(shape if bias is not None else -1)
    expected = np.clip(np.rint(wide_scale * x + wide_bias), -128, 127)
    y = apply(QUANTIZE, x, np.int8, 1 << bit, scale, bias, layout)
    np.testing.assert_array_equal(y, expected)
    back = apply(DEQUANTIZE, y, np.float32, 1 << bit, scale, bias, layout)
    np.testing.assert_array_equal(back, ((y - wide_bias) / wide_scale).astype(np.float32))


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.uint64]
)
def test_types_of_scale_and_bias(dtype: Any) -> None:
    """Their values are taken as they are stored: scale and bias of their descriptors are ignored, as all are."""
    x, y = np.array([1.5, -2.25, 7], np.float32), np.empty(3, np.int32)
    scale, bias = np.array([2], dtype), np.array([100], dtype)
    layer = bnns.BNNSLayerParametersQuantization(0, QUANTIZE, describe(x), describe(y), describe(scale), describe(bias))
    for descriptor in (layer.o_desc, layer.scale, layer.bias):
        descriptor.data_scale, descriptor.data_bias = 3.0, 5.0
    assert bnns.BNNSDirectApplyQuantizer(layer, None, 1, 0, 0) == 0, bnns.last_error()
    assert y.tolist() == [103, 96, 114]


def test_quantizers_against_torch(torch: Any) -> None:
    """torch divides by its scale: the formulas coincide if it is a power of two."""
    x = np.random.default_rng(0).normal(0, 3, (5, 4, 6)).astype(np.float32)
    scale, zero = np.float32([0.25, 8, 1, 32]), np.array([3, -7, 0, 100], np.int32)
    expected = torch.fake_quantize_per_channel_affine(
        torch.from_numpy(x), torch.from_numpy(1 / scale), torch.from_numpy(zero), 1, -128, 127
    )
    # As a batch of matrices (columns, rows): bit 1 is the axis of the rows.
    y = apply(QUANTIZE, x, np.int8, 0b10, scale, zero)
    assert (y == 127).any()
    np.testing.assert_array_equal(apply(DEQUANTIZE, y, np.float32, 0b10, scale, zero), expected.numpy())


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_strides_layouts_and_gaps() -> None:
    x = np.random.default_rng(0).normal(0, 50, (3, 4, 5)).astype(np.float32)
    memory, out = np.full((3, 70), np.nan, np.float32), np.full((3, 50), 7, np.int8)
    memory[:, :60].reshape(3, 4, 15)[:, :, 0:15:3] = x
    source = Descriptor(
        layout=bnns.BNNSDataLayoutRowMajorMatrix, size=(5, 4), stride=(3, 15), data=memory, data_type=F32
    )
    # The same sizes in the opposite order of memory: element (i, j) goes to element (i, j).
    target = Descriptor(
        layout=bnns.BNNSDataLayout2DFirstMajor, size=(5, 4), stride=(2, 9), data=out,
        data_type=bnns.BNNSDataTypeInt8,
    )  # fmt: skip
    layer = bnns.BNNSLayerParametersQuantization(0, QUANTIZE, source, target)
    assert bnns.BNNSDirectApplyQuantizer(layer, None, 3, 70, 50) == 0, bnns.last_error()
    written = np.lib.stride_tricks.as_strided(out, (3, 5, 4), (50, 9, 2))
    np.testing.assert_array_equal(written, np.clip(np.rint(x), -128, 127).transpose(0, 2, 1))
    written[...] = 7
    assert (out == 7).all()


def test_weights_with_rotated_kernels() -> None:
    """Elements of one layout correspond, and their channels too; those of a rotated kernel have no index."""
    w = np.random.default_rng(0).normal(0, 50, (4, 3, 2, 5)).astype(np.float32)
    y, scale = np.full(w.shape, 7, np.int8), np.float32([0.5, 1, 2, 3])
    plain, rotated = bnns.BNNSDataLayoutConvolutionWeightsOIHW, bnns.BNNSDataLayoutConvolutionWeightsOIHrWr
    layer = bnns.BNNSLayerParametersQuantization(
        0b1000, QUANTIZE, describe(w, rotated), describe(y, rotated), describe(scale)
    )
    assert bnns.BNNSDirectApplyQuantizer(layer, None, 1, 0, 0) == 0, bnns.last_error()
    expected = w * scale[:, None, None, None].astype(np.float64)
    np.testing.assert_array_equal(y, np.clip(np.rint(expected), -128, 127))
    along = bnns.BNNSLayerParametersQuantization(
        0b10, QUANTIZE, describe(w, rotated), describe(y, rotated), describe(scale[:2])
    )
    other = bnns.BNNSLayerParametersQuantization(0, QUANTIZE, describe(w, plain), describe(y, rotated))
    for wrong in (along, other):
        assert bnns.BNNSDirectApplyQuantizer(wrong, None, 1, 0, 0) == -1
        assert "layout is BNNSDataLayoutConvolutionWeightsOIHrWr; kernels must not be" in (bnns.last_error() or "")


def test_in_place_of_a_wider_type() -> None:
    memory = np.array([1.5, 2.5, -3.5, 1e9], np.float32)
    target = memory.view(np.int32)
    layer = bnns.BNNSLayerParametersQuantization(0, QUANTIZE, describe(memory), describe(target))
    assert bnns.BNNSDirectApplyQuantizer(layer, None, 1, 0, 0) == 0
    assert target.tolist() == [2, 2, -4, 10**9]


def test_the_image_of_the_structure() -> None:
    layer = bnns.BNNSLayerParametersQuantization(
        axis_mask=2, function=DEQUANTIZE, scale=Descriptor(layout=bnns.BNNSDataLayoutVector, size=(3,))
    )
    image = layer.to_bytes()
    assert len(image) == 720
    assert image[:12] == (2).to_bytes(8, "little") + (1).to_bytes(4, "little")
    assert image[372:384] == (0x10000).to_bytes(4, "little") + (3).to_bytes(8, "little")
    assert bnns.BNNSLayerParametersQuantization.from_bytes(image) == layer
    assert "function=BNNSQuantizerFunctionDequantize" in repr(layer)


X, Y, SCALE = np.zeros((2, 3), np.float32), np.full((2, 3), 7, np.int8), np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("fields", "call", "message"),
    [
        ({"function": 2}, {}, "function is 2, which is not a BNNSQuantizerFunction"),
        ({"function": True}, {}, "function is True, which is not"),
        ({"axis_mask": 3}, {}, "axis_mask is 0x3, must have one bit at most"),
        ({"axis_mask": 4}, {}, "axis_mask is 0x4, but i_desc has 1 axes, and bit 1 is the batch"),
        ({"axis_mask": -1}, {}, "axis_mask is -1, which a size_t cannot hold"),
        ({"axis_mask": 0}, {}, "scale has 3 elements, expected 1 for an axis_mask of 0"),
        ({"scale": describe(SCALE[:2])}, {}, "scale has 2 elements, expected 3 as axis 0 of i_desc"),
        ({"bias": describe(SCALE[:1])}, {}, "bias has 1 elements, expected 3 as axis 0 of i_desc"),
        ({"bias": describe(X)}, {}, "bias.layout is BNNSDataLayoutRowMajorMatrix, must be BNNSDataLayoutVector"),
        ({"scale": describe(SCALE > 0)}, {}, "scale.data_type is BNNSDataTypeBoolean"),
        ({"axis_mask": 2}, {}, "batch_size is 2, but scale has 3 elements, one for each sample"),
        (
            {"axis_mask": 2, "bias": describe(SCALE[:2])},
            {},
            "bias has 2 elements, but scale has 3, one for each sample",
        ),
        (
            {"i_desc": sample(X.astype(np.int16))},
            {},
            "i_desc.data_type is BNNSDataTypeInt16; it must be Int32, Float16",
        ),
        (
            {"function": DEQUANTIZE},
            {},
            "i_desc.data_type is BNNSDataTypeFloat32; it must be Int8, UInt8, Int16, UInt16",
        ),
        ({"o_desc": sample(Y.astype(np.int64))}, {}, "o_desc.data_type is BNNSDataTypeInt64; it must be"),
        ({"o_desc": sample(Y[:, :2].copy())}, {}, r"o_desc.size is \(2,\), expected \(3,\) as in i_desc"),
        ({"i_desc": Descriptor(layout=0x10000, size=(3,), data_type=F32)}, {}, "i_desc.data is NULL"),
        ({"o_desc": Descriptor(layout=0x10000, size=(3,), data_type=0x20008)}, {}, "o_desc.data is NULL"),
        ({}, {"batch_size": 0}, "batch_size is 0"),
        ({}, {"batch_size": 3}, "o_desc.data has 6 bytes, but 3 samples of"),
        ({}, {"input_stride": -1}, "input_stride is -1, which a size_t cannot hold"),
        ({}, {"output_stride": 2}, "output_stride is 2, but a sample of o_desc spans 3 values"),
        ({}, {"filter_params": "x"}, "filter_params is of type str"),
        ({}, {"layer_params": None}, "layer_params is NULL"),
    ],
)
def test_quantizers_fail_and_touch_nothing(fields: dict[str, Any], call: dict[str, Any], message: str) -> None:
    given = {"axis_mask": 1, "i_desc": sample(X), "o_desc": sample(Y), "scale": describe(SCALE), **fields}
    arguments = {"filter_params": None, "batch_size": 2, "input_stride": 0, "output_stride": 0}
    arguments["layer_params"] = bnns.BNNSLayerParametersQuantization(**given)
    assert bnns.BNNSDirectApplyQuantizer(**{**arguments, **call}) == -1
    assert re.search(f"BNNSDirectApplyQuantizer: {message}", bnns.last_error() or ""), bnns.last_error()
    assert (Y == 7).all()


def test_an_output_over_the_scale_fails() -> None:
    memory = np.ones(3, np.float32)
    layer = bnns.BNNSLayerParametersQuantization(
        1, QUANTIZE, describe(np.zeros(3, np.float32)), describe(memory.view(np.int32)), describe(memory)
    )
    fails(bnns.BNNSDirectApplyQuantizer(layer, CLIENT, 1, 0, 0), "o_desc.data overlaps scale.data in memory")
    assert (memory == 1).all()


# ---- Swift -----------------------------------------------------------------------------------------------------------


def test_swifts_quantizers() -> None:
    shape = BNNS.Shape.matrixRowMajor(4, 2)
    x = np.random.default_rng(0).normal(0, 9, (3, 2, 4)).astype(np.float32)
    y, back = np.empty((3, 2, 4), np.int8), np.empty((3, 2, 4), np.float32)
    scale, bias = np.float32([0.5, 2]), np.float32([3, -4])
    operands = {
        "scale": BNNS.Shape.vector(2).descriptor(scale),
        "bias": BNNS.Shape.vector(2).descriptor(bias),
    }
    stored = shape.descriptor(y, bnns.BNNSDataTypeInt8)
    BNNS.quantize(batchSize=3, input=shape.descriptor(x), output=stored, axis=1, **operands)
    wide = x * scale[:, None].astype(np.float64) + bias[:, None]
    np.testing.assert_array_equal(y, np.rint(wide))
    BNNS.dequantize(batchSize=3, input=stored, output=shape.descriptor(back), axis=1, **operands)
    np.testing.assert_array_equal(back, ((y - bias[:, None]) / scale[:, None]).astype(np.float32))
    BNNS.quantize(batchSize=3, input=shape.descriptor(x), output=stored, scale=None, bias=None)
    np.testing.assert_array_equal(y, np.rint(x))
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: BNNSDirectApplyQuantizer: scale has 2 elements, expected 4"):
        BNNS.quantize(batchSize=3, input=shape.descriptor(x), output=stored, axis=0, **operands)
    with pytest.raises(BNNS.Error, match="arrayDescriptorInvalidData: scale has no data"):
        BNNS.quantize(batchSize=3, input=shape.descriptor(x), output=stored, scale=shape.descriptor(), bias=None)
    with pytest.raises(ValueError, match="axes has -1"):
        BNNS.quantize(batchSize=3, input=shape.descriptor(x), output=stored, axis=-1, **operands)


# ---- fused -----------------------------------------------------------------------------------------------------------


def image(shape: tuple[int, ...], data_type: int = F32) -> Any:
    return Descriptor(layout=bnns.BNNSDataLayoutImageCHW, size=shape[::-1], data_type=data_type)


def convolution(w: Array, b: Array, data_type: int = F32, **fields: Any) -> Any:
    weights = Descriptor.from_array(w, bnns.BNNSDataLayoutConvolutionWeightsOIHW)
    given = {"i_desc": image((2, 5, 6), data_type), "w_desc": weights, "o_desc": image((4, 5, 6), data_type)}
    return bnns.BNNSLayerParametersConvolution(
        **{**given, "bias": describe(b), "x_padding": 1, "y_padding": 1, **fields}
    )


@pytest.mark.parametrize("kind", [bnns.BNNSConvolution, bnns.BNNSTransposedConvolution, bnns.BNNSFullyConnected])
@pytest.mark.parametrize("bit", [0, 2, 3])
def test_a_fused_quantization_is_one_filter_after_the_other(kind: int, bit: int) -> None:
    rng = np.random.default_rng(bit)
    x = rng.normal(0, 2, (3, 2, 5, 6)).astype(np.float32)
    relu = bnns.BNNSActivation(bnns.BNNSActivationFunctionRectifiedLinear)  # not only the identity: it is no training
    shape: tuple[int, ...] = (4, 5, 6)
    if kind == bnns.BNNSFullyConnected:
        shape, bit = (5,), {0: 0, 2: 0, 3: 1}[bit]
        inputs, outputs = (Descriptor(layout=0x10000, size=(n,), data_type=F32) for n in (60, 5))
        w = rng.normal(0, 1, (5, 60)).astype(np.float32)
        first = bnns.BNNSLayerParametersFullyConnected(inputs, describe(w), outputs, activation=relu)
        create = bnns.BNNSFilterCreateLayerFullyConnected
        stored = outputs.copy()
        length = 3 if bit == 1 else 5
    else:
        w, b = rng.normal(0, 1, (4, 2, 3, 3)).astype(np.float32), rng.normal(0, 1, 4).astype(np.float32)
        first = convolution(w, b, activation=relu)
        transposed = kind == bnns.BNNSTransposedConvolution
        create = (
            bnns.BNNSFilterCreateLayerTransposedConvolution if transposed else bnns.BNNSFilterCreateLayerConvolution
        )
        outputs = image(shape)
        stored = image(shape)
        length = {0: 6, 2: 4, 3: 3}[bit]
    stored.data_type = bnns.BNNSDataTypeUInt8
    scale, bias = rng.uniform(9, 90, length).astype(np.float32), rng.normal(9, 3, length).astype(np.float32)
    second = bnns.BNNSLayerParametersQuantization(1 << bit, QUANTIZE, outputs, stored, describe(scale), describe(bias))
    fused = created(bnns.BNNSFilterCreateFusedLayer(2, (kind, bnns.BNNSQuantization), (first, second)))
    y = np.full((3, *shape), 7, np.uint8)
    assert bnns.BNNSFusedFilterApplyBatch(fused, 3, x, 0, y, 0, False) == 0, bnns.last_error()
    z, expected = np.empty((3, *shape), np.float32), np.empty((3, *shape), np.uint8)
    assert bnns.BNNSFilterApplyBatch(create(first), 3, x, 0, z, 0) == 0, bnns.last_error()
    second.i_desc.data, second.o_desc.data = z, expected
    assert bnns.BNNSDirectApplyQuantizer(second, None, 3, 0, 0) == 0
    np.testing.assert_array_equal(y, expected)
    assert 0 < np.count_nonzero(y == 255) < y.size  # some saturate
    spaced = np.full((3, y[0].size + 5), 7, np.uint8)
    assert bnns.BNNSFusedFilterApplyBatch(fused, 3, x, 0, spaced, y[0].size + 5, True) == 0  # training changes nothing
    np.testing.assert_array_equal(spaced[:, :-5], expected.reshape(3, -1))
    assert (spaced[:, -5:] == 7).all()
    if bit == len(shape):
        assert bnns.BNNSFusedFilterApplyBatch(fused, 2, x, 0, spaced, 0, False) == -1
        assert "batch_size is 2, but scale has 3 elements, one for each sample" in (bnns.last_error() or "")
    bnns.BNNSFilterDestroy(fused)
    assert bnns.BNNSFusedFilterApplyBatch(fused, 3, x, 0, y, 0, False) == -1


def test_a_fused_dequantization_of_integers() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.integers(-3, 4, (2, 2, 5, 6), np.int8), rng.integers(-3, 4, (4, 2, 3, 3), np.int8)
    first = convolution(w, np.zeros(4, np.int32), bnns.BNNSDataTypeInt8)
    scale = np.float32([0.5, 1, 2, 4])
    second = bnns.BNNSLayerParametersQuantization(
        0b100, DEQUANTIZE, image((4, 5, 6), bnns.BNNSDataTypeInt8), image((4, 5, 6)), describe(scale)
    )
    types = (bnns.BNNSConvolution, bnns.BNNSQuantization)
    fused, y = bnns.BNNSFilterCreateFusedLayer(2, types, (first, second)), np.empty((2, 4, 5, 6), np.float32)
    assert fused is not None, bnns.last_error()
    assert bnns.BNNSFusedFilterApplyBatch(fused, 2, x, 0, y, 0, False) == 0, bnns.last_error()
    z = np.empty((2, 4, 5, 6), np.int8)
    assert bnns.BNNSFilterApplyBatch(bnns.BNNSFilterCreateLayerConvolution(first), 2, x, 0, z, 0) == 0
    np.testing.assert_array_equal(y, z / scale[:, None, None])


def test_scales_are_copied_unless_they_stay_the_clients() -> None:
    w, x = np.ones((1, 1, 1, 1), np.float32), np.float32([[[[3]]]])
    for parameters in (None, CLIENT):
        scale = np.float32([2])
        first = bnns.BNNSLayerParametersConvolution(
            image((1, 1, 1)), Descriptor.from_array(w, bnns.BNNSDataLayoutConvolutionWeightsOIHW), image((1, 1, 1))
        )
        second = bnns.BNNSLayerParametersQuantization(
            0, QUANTIZE, image((1, 1, 1)), image((1, 1, 1), bnns.BNNSDataTypeInt8), describe(scale)
        )
        types = (bnns.BNNSConvolution, bnns.BNNSQuantization)
        fused = bnns.BNNSFilterCreateFusedLayer(2, types, (first, second), parameters)
        scale[0] = 5
        y = np.zeros(1, np.int8)
        assert bnns.BNNSFusedFilterApplyBatch(fused, 1, x, 0, y, 0, False) == 0
        assert y.item() == (6 if parameters is None else 15)


def test_fused_quantizations_fail() -> None:
    w, b = np.zeros((4, 2, 3, 3), np.float32), np.zeros(4, np.float32)
    types = (bnns.BNNSConvolution, bnns.BNNSQuantization)
    good = bnns.BNNSLayerParametersQuantization(
        0, QUANTIZE, image((4, 5, 6)), image((4, 5, 6), bnns.BNNSDataTypeInt8), describe(np.ones(1, np.float32))
    )
    wrong = good.copy()
    wrong.i_desc.data_type = bnns.BNNSDataTypeFloat16
    assert bnns.BNNSFilterCreateFusedLayer(2, types, (convolution(w, b), wrong)) is None
    assert "has size=(W, H, C)=(6, 5, 4), stride=(1, 6, 30) and float32, but i_desc of layer_params[1]" in (
        bnns.last_error() or ""
    )
    wrong = good.copy()
    wrong.axis_mask = 5
    assert bnns.BNNSFilterCreateFusedLayer(2, types, (convolution(w, b), wrong)) is None
    assert "layer_params[1]: axis_mask is 0x5, must have one bit at most" in (bnns.last_error() or "")
    fused = bnns.BNNSFilterCreateFusedLayer(2, types, (convolution(w, b), good))
    x, dx, dy = np.zeros((1, 2, 5, 6), np.float32), np.full((1, 2, 5, 6), 7, np.float32), np.ones((1, 120), np.float32)
    in_delta, out_delta = image((2, 5, 6)), image((4, 5, 6))
    in_delta.data, out_delta.data = dx, dy
    status = bnns.BNNSFusedFilterApplyBackwardBatch(fused, 1, x, 0, in_delta, 0, None, 0, out_delta, 0, None)
    assert status == -1
    assert "the second filter is a quantization: rounding to integers has no gradient" in (bnns.last_error() or "")
    assert (dx == 7).all()
    y = np.full((1, 4, 5, 6), 7, np.int8)
    fails(bnns.BNNSFusedFilterApplyBatch(fused, 1, None, 0, y, 0, False), "in is NULL")
    assert (y == 7).all()
