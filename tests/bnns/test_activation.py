"""BNNS activation filters and the functions that apply them."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.lab import reference
from retrograd.ops.activation import ACTIVATIONS
from support.bnns import BF16, F16, F32, Allocator, Descriptor, created, fails, normal, not_created, succeeds

ELEMENTWISE = {kind.code: name for name, kind in ACTIVATIONS.items() if kind.code <= 35}
SHAPE = (3, 2, 5)
# Activations whose slope needs the input: the header's second list, and those in neither list that are not monotone.
FROM_INPUT = ("abs", "gelu_tanh", "hard_swish", "silu", "erf", "gelu", "gelu_sigmoid")


def image(data: Any = None, *, shape: tuple[int, ...] = SHAPE, **fields: Any) -> Any:
    return Descriptor(
        **{"layout": bnns.BNNSDataLayoutImageCHW, "size": shape[::-1], "data": data, "data_type": F32, **fields}
    )


def create(code: int, alpha: float = 0.75, beta: float = 1.25, axis_flags: int = 0, **descriptors: Any) -> Any:
    layer = bnns.BNNSLayerParametersActivation(
        i_desc=descriptors.get("i_desc", image()),
        o_desc=descriptors.get("o_desc", image()),
        activation=bnns.BNNSActivation(code, alpha, beta),
        axis_flags=axis_flags,
    )
    return bnns.BNNSFilterCreateLayerActivation(layer)


def given(name: str) -> dict[str, float]:
    kind = ACTIVATIONS[name]
    return {p: v for p, v in {"alpha": 0.75, "beta": 1.25}.items() if getattr(kind, p) != 0.0}


def backward(filter: Any, dy: np.ndarray, x: Any = None, y: Any = None, **options: Any) -> tuple[int, np.ndarray]:
    dx = np.full(dy.shape, 7, np.float32)
    status = bnns.BNNSFilterApplyBackwardBatch(
        filter, len(dy), x, 30, image(dx, flags=options.get("flags", 0)), 30, y, 30, image(dy), 30,
        options.get("weights_delta"), options.get("bias_delta"),
    )  # fmt: skip
    return status, dx


@pytest.mark.parametrize("code", ELEMENTWISE)
def test_every_elementwise_function_forward_and_backward(code: int) -> None:
    """Bit for bit the array functions; slopes from the output where it tells them, from the input otherwise."""
    name = ELEMENTWISE[code]
    function = rg.Activation(name, **given(name))
    x, dy = normal(4, *SHAPE), normal(4, *SHAPE, seed=1)
    y = np.empty_like(x)
    filter = create(code)
    assert bnns.BNNSFilterApplyBatch(filter, 4, x, 30, y, 30) == 0
    assert np.array_equal(y, rg.activation_forward(x, function))
    slope = reference.activation_input_slope(name, x, function.alpha, function.beta)
    status, dx = backward(filter, dy, x)
    assert status == 0
    assert np.array_equal(dx, rg.activation_backward(dy, function, x=x))
    assert np.allclose(dx, dy * slope, rtol=1e-5, atol=1e-6)
    status, dx = backward(filter, dy, None, y)
    if name in FROM_INPUT:
        assert status == -1
        assert (dx == 7).all()
    else:
        assert status == 0
        if name != "identity":
            assert np.array_equal(dx, rg.activation_backward(dy, function, y=y))


def test_one_sample() -> None:
    x, y = normal(*SHAPE), np.empty(SHAPE, np.float32)
    assert bnns.BNNSFilterApply(create(bnns.BNNSActivationFunctionTanh), x, y) == 0
    assert np.array_equal(y, rg.activation_forward(x, "tanh"))


@pytest.mark.parametrize("flags", [0, 0b001, 0b010, 0b100, 0b110, 0b111, 0b1000, 0b1010, 0b1111])
@pytest.mark.parametrize("layout", [bnns.BNNSDataLayoutImageCHW, bnns.BNNSDataLayout3DFirstMajor])
@pytest.mark.parametrize("function", ["Softmax", "LogSoftmax"])
def test_softmax_over_the_flagged_axes(function: str, layout: int, flags: int, torch: Any) -> None:
    x, dy = normal(4, *SHAPE) * 30, normal(4, *SHAPE, seed=1)
    sizes = SHAPE if layout == bnns.BNNSDataLayout3DFirstMajor else SHAPE[::-1]
    sample = image(layout=layout, size=sizes)
    filter = create(getattr(bnns, f"BNNSActivationFunction{function}"), axis_flags=flags, i_desc=sample, o_desc=sample)
    y = np.empty_like(x)
    assert bnns.BNNSFilterApplyBatch(filter, 4, x, 30, y, 30) == 0
    listed = [k for k in range(4) if flags >> k & 1] or [0]
    axes = [1 + k if layout == bnns.BNNSDataLayout3DFirstMajor else 3 - k for k in listed if k < 3]
    axes += [0] if flags >> 3 else []
    tx = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    ty = tx - torch.logsumexp(tx, axes, keepdim=True)
    ty = ty if function == "LogSoftmax" else ty.exp()
    ty.backward(torch.tensor(dy, dtype=torch.float64))
    assert np.allclose(y, ty.detach().numpy(), rtol=1e-5, atol=1e-7)
    delta = image(dy, layout=layout, size=sizes)
    for source, out in ((None, y), (x, None)):
        dx = np.empty_like(x)
        result = image(dx, layout=layout, size=sizes)
        succeeds(bnns.BNNSFilterApplyBackwardBatch(
            filter, 4, source, 30, result, 30, out, 30, delta, 30, None, None
        ))  # fmt: skip
        assert np.allclose(dx, tx.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_softmax_over_the_batch_of_a_vector() -> None:
    """Bit 1 of a vector: each entry over the samples."""
    vector = Descriptor(layout=bnns.BNNSDataLayoutVector, size=(2,), data_type=F32)
    filter = create(bnns.BNNSActivationFunctionSoftmax, axis_flags=2, i_desc=vector, o_desc=vector)
    x = np.log(np.array([[1, 5], [3, 15]], np.float32))
    y = np.empty_like(x)
    assert bnns.BNNSFilterApplyBatch(filter, 2, x, 2, y, 2) == 0
    assert np.allclose(y, [[0.25, 0.25], [0.75, 0.75]], rtol=1e-6)
    assert bnns.BNNSFilterApplyBatch(filter, 1, x, 2, y, 2) == 0
    assert y[0].tolist() == [1, 1]


def test_softmax_axes_that_are_not_there() -> None:
    assert create(bnns.BNNSActivationFunctionSoftmax, axis_flags=0b10000) is None
    assert "axis_flags is 0x10, but i_desc has 3 axes, and bit 3 is the batch" in (bnns.last_error() or "")


def test_types_may_differ_and_identity_converts() -> None:
    x = normal(4, *SHAPE)
    for data_type, dtype in ((F16, np.float16), (BF16, ml_dtypes.bfloat16)):
        filter = create(0, o_desc=image(data_type=data_type))
        y = np.empty(x.shape, dtype)
        assert bnns.BNNSFilterApplyBatch(filter, 4, x, 30, y, 30) == 0
        assert np.array_equal(y, x.astype(dtype))


# ---- conversion ------------------------------------------------------------------------------------------------------

INTEGER_TYPES = {
    getattr(bnns, f"BNNSDataType{name}"): np.dtype(name.lower())
    for name in ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
}


def convert(x: np.ndarray, source: dict[str, Any], target: dict[str, Any], dtype: Any) -> np.ndarray:
    """x, an array of one axis, through an identity filter."""
    i_desc, o_desc = (
        Descriptor(layout=bnns.BNNSDataLayoutVector, size=x.shape, **fields) for fields in (source, target)
    )
    filter = created(create(0, i_desc=i_desc, o_desc=o_desc))
    y = np.full(x.shape, 99, dtype)
    assert bnns.BNNSFilterApply(filter, x, y) == 0, bnns.last_error()
    return y


@pytest.mark.parametrize("code", INTEGER_TYPES)
def test_identity_rounds_half_to_even_and_saturates(code: int) -> None:
    dtype, limits = INTEGER_TYPES[code], np.iinfo(INTEGER_TYPES[code])
    x = np.array([1.5, 2.5, 0.5, 3.4, -2.5, -0.5, -0.51, 3e30, -3e30, np.inf, -np.inf, np.nan, limits.max], np.float32)
    y = convert(x, {"data_type": F32}, {"data_type": code}, dtype)
    low, high = limits.min, limits.max
    expected = [2, 2, 0, 3, max(-2, low), 0, max(-1, low), high, low, high, low, 0, high]
    assert y.tolist() == expected
    back = convert(y, {"data_type": code}, {"data_type": F32}, np.float32)
    assert np.array_equal(back, y.astype(np.float32))


@pytest.mark.parametrize("source", INTEGER_TYPES)
@pytest.mark.parametrize("target", INTEGER_TYPES)
def test_identity_between_integers_is_exact(source: int, target: int) -> None:
    from_, to = INTEGER_TYPES[source], INTEGER_TYPES[target]
    edges = {np.iinfo(t).min for t in (from_, to)} | {np.iinfo(t).max for t in (from_, to)} | {-1, 0, 1, 2**53 + 1}
    given = [value for value in edges if np.iinfo(from_).min <= value <= np.iinfo(from_).max]
    y = convert(np.array(given, from_), {"data_type": source}, {"data_type": target}, to)
    assert y.tolist() == [min(max(value, np.iinfo(to).min), np.iinfo(to).max) for value in given]
    # The same scale on both sides changes nothing.
    scaled = {"data_scale": 0.1, "data_bias": 3.0}
    again = convert(np.array(given, from_), {"data_type": source, **scaled}, {"data_type": target, **scaled}, to)
    assert np.array_equal(again, y)


def test_identity_applies_scale_and_bias() -> None:
    """value = scale * stored + bias, on both sides; a scale of 0 counts as 1; floats have none."""
    int8 = {"data_type": bnns.BNNSDataTypeInt8, "data_scale": 0.5, "data_bias": -1.0}
    stored = np.array([-128, -1, 0, 3, 127], np.int8)
    values = convert(stored, int8, {"data_type": F32, "data_scale": 9.0, "data_bias": 9.0}, np.float32)
    assert values.tolist() == [-65, -1.5, -1, 0.5, 62.5]
    assert np.array_equal(convert(values, {"data_type": F32}, int8, np.int8), stored)
    uint8 = {"data_type": bnns.BNNSDataTypeUInt8, "data_scale": 0.0, "data_bias": 2.0}
    assert convert(values, {"data_type": F32}, uint8, np.uint8).tolist() == [0, 0, 0, 0, 60]
    assert convert(stored, int8, uint8, np.uint8).tolist() == [0, 0, 0, 0, 60]
    half = convert(stored, int8, {"data_type": F16}, np.float16)
    assert half.tolist() == values.tolist()
    assert convert(half, {"data_type": F16}, {"data_type": bnns.BNNSDataTypeInt32}, np.int32).tolist() == [
        -65,
        -2,
        -1,
        0,
        62,
    ]


def test_identity_converts_in_place_and_in_another_shape() -> None:
    memory = bytearray(np.array([1.5, -2.5, 7, 4], np.float32).tobytes())
    vector = Descriptor(layout=bnns.BNNSDataLayoutVector, size=(4,), data_type=F32)
    matrix = Descriptor(layout=bnns.BNNSDataLayoutRowMajorMatrix, size=(2, 2), data_type=bnns.BNNSDataTypeInt32)
    filter = create(0, i_desc=vector, o_desc=matrix)
    assert bnns.BNNSFilterApply(filter, memory, memory) == 0
    assert np.frombuffer(memory, np.int32).tolist() == [2, -2, 7, 4]


def test_identity_of_no_elements_more_or_of_strange_types() -> None:
    int8 = image(data_type=bnns.BNNSDataTypeInt8)
    for o_desc, reason in (
        (image(data_type=bnns.BNNSDataTypeInt4), "o_desc.data_type is BNNSDataTypeInt4"),
        (image(data_type=bnns.BNNSDataTypeBoolean), "o_desc.data_type is BNNSDataTypeBoolean"),
        (image(data_type=bnns.BNNSDataTypeInt8, data_scale=np.inf), "o_desc.data_scale is inf, must be finite"),
        (image(data_type=bnns.BNNSDataTypeInt8, data_bias=np.nan), "o_desc.data_bias is nan, must be finite"),
        (image(data_type=bnns.BNNSDataTypeInt8, size=(5, 2, 4)), "o_desc has 40 elements, expected 30"),
    ):
        not_created(create(0, o_desc=o_desc), reason)
    not_created(create(bnns.BNNSActivationFunctionTanh, o_desc=int8), "must be Float32, Float16 or BFloat16")
    status, dx = backward(create(0, o_desc=int8), normal(4, *SHAPE))
    fails(status, "converts BNNSDataTypeFloat32 to BNNSDataTypeInt8, and integers have no gradient")
    assert (dx == 7).all()


# ---- shapes and memory -----------------------------------------------------------------------------------------------


def test_a_batch_stride_of_zero_is_packed() -> None:
    x, dy = normal(4, *SHAPE), normal(4, *SHAPE, seed=1)
    filter = create(bnns.BNNSActivationFunctionTanh)
    y, dx = np.empty_like(x), np.empty_like(x)
    assert bnns.BNNSFilterApplyBatch(filter, 4, x, 0, y, 0) == 0
    assert np.array_equal(y, rg.activation_forward(x, "tanh"))
    assert bnns.BNNSFilterApplyBackwardBatch(filter, 4, x, 0, image(dx), 0, y, 0, image(dy), 0, None, None) == 0
    assert np.array_equal(dx, rg.activation_backward(dy, "tanh", y=y))
    # With gaps inside the sample, a packed sample ends with those of its slowest axis.
    gaps = image(stride=(2, 10, 20))
    wide = np.zeros((4, 3, 2, 5, 2), np.float32)
    wide[..., 0] = x
    filter = create(bnns.BNNSActivationFunctionTanh, i_desc=gaps)
    assert bnns.BNNSFilterApplyBatch(filter, 4, wide, 0, dx, 0) == 0
    assert np.array_equal(dx, y)
    fails(bnns.BNNSFilterApplyBatch(filter, 5, wide, 0, dx, 0), "out has 480 bytes, but 5 samples")


def test_gradients_in_another_shape() -> None:
    """Apple compares numbers of elements: a vector goes where an image was declared."""
    x, dy = normal(4, *SHAPE), normal(4, *SHAPE, seed=1)
    filter = create(bnns.BNNSActivationFunctionTanh)
    want = rg.activation_backward(dy, "tanh", x=x)
    dx = np.empty_like(x)
    vectors = [Descriptor(layout=bnns.BNNSDataLayoutVector, size=(30,), data_type=F32, data=a) for a in (dx, dy)]
    assert bnns.BNNSFilterApplyBackwardBatch(filter, 4, x, 30, vectors[0], 30, None, 0, vectors[1], 30, None, None) == 0
    assert np.array_equal(dx, want)
    swapped = image(dx, size=(3, 2, 5))
    assert bnns.BNNSFilterApplyBackwardBatch(filter, 4, x, 30, swapped, 30, None, 0, vectors[1], 30, None, None) == -1
    assert "in_delta.size is (3, 2, 5), expected size=(W, H, C)=(5, 2, 3) as in i_desc" in (bnns.last_error() or "")
    vectors[0].size, vectors[0].stride = (30,), (2,)
    status = bnns.BNNSFilterApplyBackwardBatch(filter, 4, x, 30, vectors[0], 60, None, 0, vectors[1], 30, None, None)
    assert status == -1
    assert "in_delta.size is (30,), expected size=(W, H, C)=(5, 2, 3) as in i_desc" in (bnns.last_error() or "")


def test_shapes_may_differ_if_elements_agree() -> None:
    vector = Descriptor(layout=bnns.BNNSDataLayoutVector, size=(30,), data_type=F32)
    filter = create(bnns.BNNSActivationFunctionTanh, o_desc=vector)
    x, y = normal(4, *SHAPE), np.empty((4, 30), np.float32)
    assert bnns.BNNSFilterApplyBatch(filter, 4, x, 30, y, 30) == 0
    assert np.array_equal(y.reshape(x.shape), rg.activation_forward(x, "tanh"))
    other = Descriptor(layout=bnns.BNNSDataLayoutVector, size=(29,), data_type=F32)
    assert create(bnns.BNNSActivationFunctionTanh, o_desc=other) is None
    assert "o_desc has 29 elements, expected 30 as in i_desc with its size=(W, H, C)=(5, 2, 3)" in (
        bnns.last_error() or ""
    )


@pytest.mark.parametrize("shift", [0, 9])
def test_in_place_and_half_over_the_input(shift: int) -> None:
    memory = np.zeros(150, np.float32)
    x = normal(4, *SHAPE)
    memory[:120] = x.ravel()
    assert bnns.BNNSFilterApplyBatch(create(4), 4, memory, 30, memory[shift:], 30) == 0
    assert np.array_equal(memory[shift:][:120].reshape(x.shape), rg.activation_forward(x, "tanh"))


@pytest.mark.parametrize("code", [0, 3, 6, bnns.BNNSActivationFunctionSoftmax, 29])
def test_gradients_accumulate_by_flag(code: int) -> None:
    x, dy = normal(4, *SHAPE), normal(4, *SHAPE, seed=1)
    filter = create(code)
    _, plain = backward(filter, dy, x)
    status, added = backward(filter, dy, x, flags=bnns.BNNSNDArrayFlagBackpropAccumulate)
    assert status == 0
    assert np.allclose(added, plain + 7, rtol=1e-6)


@pytest.mark.parametrize("shift", [0, 9])
def test_input_gradient_over_the_output_gradient(shift: int) -> None:
    x, dy = normal(4, *SHAPE), normal(4, *SHAPE, seed=1)
    filter = create(3)
    _, want = backward(filter, dy, x)
    memory = np.zeros(150, np.float32)
    memory[:120] = dy.ravel()
    dx = memory[shift:][:120]
    status = bnns.BNNSFilterApplyBackwardBatch(filter, 4, x, 30, image(dx), 30, None, 30, image(memory), 30, None, None)
    assert status == 0
    assert np.array_equal(dx.reshape(x.shape), want)


def test_relu_backward_from_its_output_in_the_memory_of_the_gradient() -> None:
    """As a public program does: the input is not given, and one array is the gradient of both output and input."""
    vector = bnns.BNNSNDArrayDescriptor(layout=bnns.BNNSDataLayoutVector, size=6, data_type=bnns.BNNSDataTypeFloat32)
    relu = bnns.BNNSActivation(bnns.BNNSActivationFunctionRectifiedLinear)
    filter = bnns.BNNSFilterCreateLayerActivation(bnns.BNNSLayerParametersActivation(vector, vector, relu))
    y = np.array([-5, 20, -0.5, 7, 0, 1], np.float32)
    assert bnns.BNNSFilterApply(filter, y, y) == 0  # in place
    assert y.tolist() == [0, 20, 0, 7, 0, 1]
    delta = np.arange(2, 8, dtype=np.float32)
    vector.data = delta
    assert bnns.BNNSFilterApplyBackwardBatch(filter, 1, None, 0, vector, 0, y, 0, vector, 0, None, None) == 0
    assert delta.tolist() == [0, 3, 0, 5, 0, 7]


def test_direct_apply_takes_data_from_the_descriptors() -> None:
    x, y = normal(4, *SHAPE), np.full((4, *SHAPE), 7, np.float32)
    layer = bnns.BNNSLayerParametersActivation(image(x), image(y), bnns.BNNSActivation(4))
    assert bnns.BNNSDirectApplyActivationBatch(layer, None, 4, 30, 30) == 0
    assert np.array_equal(y, rg.activation_forward(x, "tanh"))
    assert bnns.BNNSDirectApplyActivationBatch(layer, bnns.BNNSFilterParameters(n_threads=1), 4, 0, 0) == 0
    softmax = bnns.BNNSLayerParametersActivation(image(x), image(y), bnns.BNNSActivation(11), 0b1000)
    assert bnns.BNNSDirectApplyActivationBatch(softmax, None, 4, 30, 30) == 0
    assert np.allclose(y.sum(0), 1, rtol=1e-6)


def test_direct_apply_frees_what_it_allocates() -> None:
    allocator = Allocator()
    x = normal(4, *SHAPE)
    layer = bnns.BNNSLayerParametersActivation(image(x), image(np.empty_like(x)), bnns.BNNSActivation(4))
    for batch, status in ((4, 0), (5, -1)):
        assert bnns.BNNSDirectApplyActivationBatch(layer, allocator.parameters(), batch, 30, 30) == status
        assert len(allocator.given) == len(allocator.freed) > 0


def test_direct_apply_fails_and_touches_nothing() -> None:
    x, y = normal(4, *SHAPE), np.full((4, *SHAPE), 7, np.float32)
    cases: list[tuple[Any, Any, tuple[Any, ...], str]] = [
        (None, y, (4, 30, 30), "i_desc.data is NULL"),
        (x, None, (4, 30, 30), "o_desc.data is NULL"),
        (x, y, (5, 30, 30), "o_desc.data has 480 bytes, but 5 samples"),
        (x[:3], y, (4, 30, 30), "i_desc.data has 360 bytes"),
        (x, y, (0, 30, 30), "batch_size is 0"),
        (x, y, (4, 30, 29), "out_stride is 29, but a sample of o_desc.data spans 30"),
        (x, y, (4, "x", 30), "in_stride is 'x'"),
        (x, bytes(480), (4, 30, 30), "o_desc.data is read-only"),
    ]
    for source, target, arguments, reason in cases:
        layer = bnns.BNNSLayerParametersActivation(image(source), image(target), bnns.BNNSActivation(4))
        fails(bnns.BNNSDirectApplyActivationBatch(layer, None, *arguments), f"BNNSDirectApplyActivationBatch: {reason}")
        assert (y == 7).all()
    fails(bnns.BNNSDirectApplyActivationBatch(None, None, 1, 0, 0), "layer_params is NULL")  # type: ignore[arg-type]


# ---- parameters of activations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [bnns.BNNSActivationFunctionLeakyRectifiedLinear, 29])
def test_alpha_can_be_trained(code: int) -> None:
    """weights_delta is its gradient; BNNSGetPointer leads to it."""
    x, dy = normal(4, *SHAPE), normal(4, *SHAPE, seed=1)
    filter = create(code, alpha=0.25)
    alpha = bnns.BNNSGetPointer(filter, bnns.BNNSPointerSpecifierAlpha)
    size = 3 if code == 29 else 1
    assert alpha.view().tolist() == [0.25] * size
    terms = np.where(x < 0, x, 0).astype(np.float64) * dy
    expected = terms.sum((0, 2, 3)) if code == 29 else terms.sum().reshape(1)
    for flags in (0, 1):
        dalpha = np.ones(size, np.float32)
        status, _ = backward(filter, dy, x, weights_delta=Descriptor.from_array(dalpha, flags=flags))
        assert status == 0
        assert np.allclose(dalpha, expected + flags, rtol=1e-6)
    alpha.view()[:] = [0.5, 2.0, -1.0][:size]
    y = np.empty_like(x)
    assert bnns.BNNSFilterApplyBatch(filter, 4, x, 30, y, 30) == 0
    slopes = np.array([0.5, 2.0, -1.0])[:size].reshape(-1, 1, 1)
    assert np.allclose(y, np.where(x < 0, slopes * x, x), rtol=1e-6)
    status, dx = backward(filter, dy, x)
    assert np.allclose(dx, np.where(x < 0, slopes * dy, dy), rtol=1e-6)


def test_pointer_to_beta() -> None:
    filter = create(bnns.BNNSActivationFunctionLinearWithBias, 2.0, 3.0)
    bnns.BNNSGetPointer(filter, bnns.BNNSPointerSpecifierBeta).view()[0] = -1
    x, y = normal(*SHAPE), np.empty(SHAPE, np.float32)
    assert bnns.BNNSFilterApply(filter, x, y) == 0
    assert np.allclose(y, 2 * x - 1, rtol=1e-6)


def test_pointer_failures_have_no_data() -> None:
    assert bnns.BNNSGetPointer(None, 0).data is None
    not_created(bnns.BNNSGetPointer(create(3), 2).data, "target is 2")


def test_prelu_needs_an_image_and_its_input() -> None:
    vector = Descriptor(layout=bnns.BNNSDataLayoutVector, size=(30,), data_type=F32)
    assert create(29, i_desc=vector, o_desc=vector) is None
    status, dx = backward(create(29), normal(4, *SHAPE), None, normal(4, *SHAPE))
    assert status == -1
    assert (dx == 7).all()


def test_a_pointer_into_a_filter_keeps_its_memory() -> None:
    libc = ctypes.CDLL(None)
    layer = bnns.BNNSLayerParametersActivation(image(), image(), bnns.BNNSActivation(2, 0.25))
    parameters = bnns.BNNSFilterParameters(0, 0, libc.posix_memalign, libc.free)
    pointer = bnns.BNNSGetPointer(bnns.BNNSFilterCreateLayerActivation(layer, parameters), 0)
    gc.collect()
    assert pointer.view().tolist() == [0.25]


def test_constant_slopes_need_neither_input_nor_output() -> None:
    dy = normal(4, *SHAPE)
    for code, slope in ((0, 1.0), (7, 0.75), (20, 0.75)):
        status, dx = backward(create(code), dy)
        assert status == 0
        assert np.allclose(dx, slope * dy, rtol=1e-6)


def test_gradients_over_one_another_are_refused() -> None:
    dy = normal(4, *SHAPE)
    memory = np.full(120, 7, np.float32)
    status = bnns.BNNSFilterApplyBackwardBatch(
        create(2), 4, dy, 30, image(memory), 30, None, 30, image(dy), 30, Descriptor.from_array(memory[:1]), None
    )
    assert status == -1
    assert (memory == 7).all()


def test_infinity_is_quiet() -> None:
    x = np.full((1, *SHAPE), -np.inf, np.float32)
    y = np.empty_like(x)
    assert bnns.BNNSFilterApplyBatch(create(29, alpha=0.0), 1, x, 30, y, 30) == 0
    assert backward(create(29, alpha=0.0), x, x)[0] == 0


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Gumbel", "GumbelMax", "IntegerLinearSaturate", "IntegerLinearSaturatePerChannel"])
def test_random_and_integer_functions_are_not_offered(name: str) -> None:
    not_created(create(getattr(bnns, f"BNNSActivationFunction{name}")), f"BNNSActivationFunction{name}")


def test_creation_fails_without_parameters() -> None:
    for nothing in (None, 3, bnns.BNNSActivation()):
        assert bnns.BNNSFilterCreateLayerActivation(nothing) is None  # type: ignore[arg-type]
    assert create(36) is None
    assert create(3, i_desc=image(size=(0, 2, 5))) is None


@pytest.mark.parametrize(
    ("batch", "x", "y", "reason"),
    [
        (0, bytearray(480), bytearray(480), "batch_size is 0"),
        (4, None, bytearray(480), "in is NULL"),
        (4, bytearray(480), None, "out is NULL"),
        (4, bytearray(479), bytearray(480), "in has 479 bytes"),
        (4, bytearray(480), bytearray(479), "out has 479 bytes"),
        (4, bytearray(480), bytes(480), "out is read-only"),
    ],
)
def test_apply_fails(batch: int, x: Any, y: Any, reason: str) -> None:
    fails(bnns.BNNSFilterApplyBatch(create(3), batch, x, 30, y, 30), reason)


def test_backward_fails_and_touches_nothing() -> None:
    dy = normal(4, *SHAPE)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "in and out are NULL"),
        ({"x": dy, "bias_delta": Descriptor.from_array(np.zeros(1, np.float32))}, "no bias"),
        ({"x": dy, "weights_delta": Descriptor.from_array(np.zeros(1, np.float32))}, "no parameter to train"),
        ({"x": dy[:3]}, "in has 360 bytes"),
    ]
    for options, reason in cases:
        status, dx = backward(create(3), dy, **options)
        fails(status, reason)
        assert (dx == 7).all()
    leaky = create(2)
    for delta in (np.zeros(2, np.float32), np.zeros(1, np.float16)):
        status, dx = backward(leaky, dy, dy, weights_delta=Descriptor.from_array(delta))
        assert status == -1
        assert (dx == 7).all()
