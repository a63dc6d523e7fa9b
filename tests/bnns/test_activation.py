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

Descriptor = bnns.BNNSNDArrayDescriptor
F32, F16, BF16 = bnns.BNNSDataTypeFloat32, bnns.BNNSDataTypeFloat16, bnns.BNNSDataTypeBFloat16
ELEMENTWISE = {kind.code: name for name, kind in ACTIVATIONS.items() if kind.code <= 35}
SHAPE = (3, 2, 5)
# Activations whose slope needs the input: the header's second list, and those in neither list that are not monotone.
FROM_INPUT = ("abs", "gelu_tanh", "hard_swish", "silu", "erf", "gelu", "gelu_sigmoid")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.2, 1.5, shape).astype(np.float32)


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


@pytest.mark.parametrize("flags", [0, 0b001, 0b010, 0b100, 0b110, 0b111])
@pytest.mark.parametrize("layout", [bnns.BNNSDataLayoutImageCHW, bnns.BNNSDataLayout3DFirstMajor])
@pytest.mark.parametrize("function", ["Softmax", "LogSoftmax"])
def test_softmax_over_the_flagged_axes(function: str, layout: int, flags: int, torch: Any) -> None:
    x, dy = normal(4, *SHAPE) * 30, normal(4, *SHAPE, seed=1)
    sizes = SHAPE if layout == bnns.BNNSDataLayout3DFirstMajor else SHAPE[::-1]
    sample = image(layout=layout, size=sizes)
    filter = create(getattr(bnns, f"BNNSActivationFunction{function}"), axis_flags=flags, i_desc=sample, o_desc=sample)
    y = np.empty_like(x)
    assert bnns.BNNSFilterApplyBatch(filter, 4, x, 30, y, 30) == 0
    listed = [k for k in range(3) if flags >> k & 1] or [0]
    axes = [1 + k if layout == bnns.BNNSDataLayout3DFirstMajor else 3 - k for k in listed]
    tx = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    ty = tx - torch.logsumexp(tx, axes, keepdim=True)
    ty = ty if function == "LogSoftmax" else ty.exp()
    ty.backward(torch.tensor(dy, dtype=torch.float64))
    assert np.allclose(y, ty.detach().numpy(), rtol=1e-5, atol=1e-7)
    delta = image(dy, layout=layout, size=sizes)
    for source, out in ((None, y), (x, None)):
        dx = np.empty_like(x)
        result = image(dx, layout=layout, size=sizes)
        status = bnns.BNNSFilterApplyBackwardBatch(
            filter, 4, source, 30, result, 30, out, 30, delta, 30, None, None
        )  # fmt: skip
        assert status == 0, bnns.last_error()
        assert np.allclose(dx, tx.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_softmax_axes_that_are_not_there() -> None:
    assert create(bnns.BNNSActivationFunctionSoftmax, axis_flags=0b1000) is None


def test_types_may_differ_and_identity_converts() -> None:
    x = normal(4, *SHAPE)
    for data_type, dtype in ((F16, np.float16), (BF16, ml_dtypes.bfloat16)):
        filter = create(0, o_desc=image(data_type=data_type))
        y = np.empty(x.shape, dtype)
        assert bnns.BNNSFilterApplyBatch(filter, 4, x, 30, y, 30) == 0
        assert np.array_equal(y, x.astype(dtype))
    assert create(0, o_desc=image(data_type=bnns.BNNSDataTypeInt8)) is None


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
    assert bnns.BNNSGetPointer(create(3), 2).data is None
    assert "target is 2" in (bnns.last_error() or "")


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
    assert create(getattr(bnns, f"BNNSActivationFunction{name}")) is None
    assert f"BNNSActivationFunction{name}" in (bnns.last_error() or "")


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
    assert bnns.BNNSFilterApplyBatch(create(3), batch, x, 30, y, 30) == -1
    assert reason in (bnns.last_error() or "")


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
        assert status == -1
        assert reason in (bnns.last_error() or "")
        assert (dx == 7).all()
    leaky = create(2)
    for delta in (np.zeros(2, np.float32), np.zeros(1, np.float16)):
        status, dx = backward(leaky, dy, dy, weights_delta=Descriptor.from_array(delta))
        assert status == -1
        assert (dx == 7).all()
