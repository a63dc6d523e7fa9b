"""BNNS convolution filters and Swift's ConvolutionLayer."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import BF16, F16, F32, Array, Descriptor, fails, image, normal, succeeds, vector

I8, U8 = bnns.BNNSDataTypeInt8, bnns.BNNSDataTypeUInt8
OIHW = bnns.BNNSDataLayoutConvolutionWeightsOIHW
ROTATED = bnns.BNNSDataLayoutConvolutionWeightsOIHrWr
IO_ROTATED = bnns.BNNSDataLayoutConvolutionWeightsIOHrWr
PACKED = bnns.BNNSDataLayoutConvolutionWeightsOIHW_Pack32
RELU, TANH = bnns.BNNSActivationFunctionRectifiedLinear, bnns.BNNSActivationFunctionTanh
LINEAR, SILU = bnns.BNNSActivationFunctionLinear, bnns.BNNSActivationFunctionSiLU


def stored(w: Array, layout: int) -> Array:
    """Weights [O, I, H, W] as Apple's layouts have them in memory."""
    outputs, inputs, height, width = w.shape
    if layout == PACKED:
        memory = np.zeros(-(-outputs // 32) * 32 * inputs * height * width, w.dtype)
        for o, i, y, x in np.ndindex(w.shape):
            memory[o % 32 + 32 * (x + width * (y + height * (i + inputs * (o // 32))))] = w[o, i, y, x]
        return memory
    if layout != OIHW:
        w = w[:, :, ::-1, ::-1]
    return np.ascontiguousarray(w.swapaxes(0, 1) if layout == IO_ROTATED else w)


def weights(w: Array, layout: int = OIHW, data: Any = None, **fields: Any) -> Any:
    outputs, inputs, height, width = w.shape
    channels = (outputs, inputs) if layout == IO_ROTATED else (inputs, outputs)
    size = (width, height, *channels)
    memory = stored(w, layout) if data is None else data
    return Descriptor(**{"layout": layout, "size": size, "data": memory, "data_type": F32, **fields})


def layer(x_shape: tuple[int, ...], w: Array, y_shape: tuple[int, ...], b: Array | None = None, **fields: Any) -> Any:
    given = {"i_desc": image(x_shape), "w_desc": weights(w), "o_desc": image(y_shape)}
    if b is not None:
        given["bias"] = vector(b)
    return bnns.BNNSLayerParametersConvolution(**{**given, **fields})


def create(*arguments: Any, transposed: bool = False, filter_params: Any = None, **fields: Any) -> Any:
    make = bnns.BNNSFilterCreateLayerTransposedConvolution if transposed else bnns.BNNSFilterCreateLayerConvolution
    return make(layer(*arguments, **fields), filter_params)


def apply(filter: Any, x: Array, y_shape: tuple[int, ...]) -> Array:
    y = np.full((len(x), *y_shape), np.nan, np.float32)
    assert bnns.BNNSFilterApplyBatch(filter, len(x), x, 0, y, 0) == 0, bnns.last_error()
    return y


def padded(x: Array, pad: tuple[int, int, int, int]) -> Array:
    left, right, up, down = pad
    return np.pad(x.astype(np.float64), ((0, 0), (0, 0), (up, down), (left, right)))


def by_the_formula(
    x: Array,
    w: Array,
    b: Array | None,
    y_shape: tuple[int, ...],
    stride: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    pad: tuple[int, int, int, int] = (0, 0, 0, 0),
    groups: int = 1,
) -> Array:
    """z[o,y,x] = b[o] + sum W[o,i,ky,kx] xpad[i, sy y + ky dy - up, sx x + kx dx - left]; (x, y) in options."""
    large = padded(x, pad)
    z = np.zeros((len(x), *y_shape))
    per_group = y_shape[0] // groups
    for o, row, column in np.ndindex(y_shape):
        for i, ky, kx in np.ndindex(w.shape[1:]):
            at = (stride[1] * row + ky * dilation[1], stride[0] * column + kx * dilation[0])
            z[:, o, row, column] += float(w[o, i, ky, kx]) * large[:, o // per_group * w.shape[1] + i, at[0], at[1]]
    return z if b is None else z + b.astype(np.float64)[:, None, None]


def backward(
    filter: Any, dy: Array, x: Any, y: Any, x_shape: tuple[int, ...], w: Array, **options: Any
) -> tuple[int, Array, Array, Array]:
    layout, flags = options.get("layout", OIHW), options.get("flags", 0)
    start = float(flags) if flags else np.nan
    dx = np.full((len(dy), *x_shape), start, np.float32)
    memory = np.full_like(stored(w, layout), start)
    db = np.full(dy.shape[1], start, np.float32)
    status = bnns.BNNSFilterApplyBackwardBatch(
        filter, len(dy), x, 0, image(x_shape, dx, flags=flags), 0, y, 0, image(dy.shape[1:], dy), 0,
        weights(w, layout, memory, flags=flags), vector(db, flags=flags),
    )  # fmt: skip
    return status, dx, memory, db


CASES: dict[str, dict[str, Any]] = {
    "plain": {"x": (3, 7, 8), "w": (5, 3, 3, 2), "y": (5, 5, 7)},
    "same": {"x": (2, 6, 6), "w": (3, 2, 3, 3), "y": (3, 6, 6), "pad": (1, 1, 1, 1)},
    "strides": {"x": (2, 9, 11), "w": (7, 2, 2, 3), "y": (7, 4, 3), "stride": (4, 2)},
    "dilation": {"x": (2, 9, 9), "w": (3, 2, 3, 3), "y": (3, 5, 3), "dilation": (3, 2)},
    "sides": {"x": (2, 5, 6), "w": (6, 2, 3, 3), "y": (6, 6, 6), "pad": (2, 0, 1, 2)},
    "surplus": {"x": (2, 9, 9), "w": (6, 2, 3, 3), "y": (6, 3, 2), "stride": (2, 2), "pad": (1, 1, 1, 1)},
    "groups": {"x": (4, 5, 5), "w": (6, 2, 3, 3), "y": (6, 3, 3), "groups": 2},
    "depthwise": {"x": (5, 6, 6), "w": (5, 1, 3, 3), "y": (5, 4, 4), "groups": 5},
    "text": {"x": (1, 1, 20), "w": (9, 1, 1, 20), "y": (9, 1, 1)},  # KeyModel's
}


def fields_of(case: dict[str, Any]) -> dict[str, Any]:
    stride, dilation = case.get("stride", (0, 0)), case.get("dilation", (0, 1))
    return {
        "x_stride": stride[0],
        "y_stride": stride[1],
        "x_dilation_stride": dilation[0],
        "y_dilation_stride": dilation[1],
        "pad": case.get("pad", (0, 0, 0, 0)),
        "groups": case.get("groups", 0),
    }


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in ("stride", "dilation", "pad", "groups") if name in case}


@pytest.mark.parametrize("layout", [OIHW, ROTATED])
@pytest.mark.parametrize("name", CASES)
def test_convolutions_forward(name: str, layout: int) -> None:
    case = CASES[name]
    x, w, b = normal(3, *case["x"]), normal(*case["w"], seed=1), normal(case["w"][0], seed=2)
    filter = create(case["x"], w, case["y"], b, w_desc=weights(w, layout), **fields_of(case))
    expected = by_the_formula(x, w, b, case["y"], **options_of(case))
    np.testing.assert_allclose(apply(filter, x, case["y"]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [OIHW, ROTATED])
@pytest.mark.parametrize("name", CASES)
def test_convolutions_backward(name: str, layout: int) -> None:
    """The gradients are those of the formula, which is linear in x, in w and in b: one entry after the other."""
    case = CASES[name]
    x, w, b = normal(2, *case["x"]), normal(*case["w"], seed=1), normal(case["w"][0], seed=2)
    dy = normal(2, *case["y"], seed=3)
    filter = create(case["x"], w, case["y"], b, w_desc=weights(w, layout), **fields_of(case))
    status, dx, dw, db = backward(filter, dy, x, None, case["x"], w, layout=layout)
    assert status == 0, bnns.last_error()
    options = options_of(case)
    for _ in range(6):
        for gradient, value, f in (
            (dx, x, lambda v: by_the_formula(v, w, None, case["y"], **options)),
            (dw.reshape(-1), w, lambda v: by_the_formula(x, v, None, case["y"], **options)),
        ):
            direction = np.random.default_rng(_).standard_normal(value.shape)
            seen = direction if gradient is dx else stored(direction, layout).reshape(-1)
            assert (gradient * seen).sum() == pytest.approx(float((f(direction) * dy).sum()), rel=1e-4, abs=1e-3)
    np.testing.assert_allclose(db, dy.sum((0, 2, 3)), rtol=1e-5, atol=1e-5)
    status, *sums = backward(filter, dy, x, None, case["x"], w, layout=layout, flags=1)
    assert status == 0
    for total, added in zip(sums, (dx, dw, db), strict=True):
        np.testing.assert_allclose(total, 1 + added, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("layout", [IO_ROTATED, PACKED])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("outputs", [3, 32, 40])
def test_weights_in_other_layouts(layout: int, transposed: bool, outputs: int) -> None:
    x, w, b = normal(2, 4, 6, 5), normal(outputs, 4, 3, 2, seed=1), normal(outputs, seed=2)
    shape = (outputs, 8, 6) if transposed else (outputs, 4, 4)
    plain = create((4, 6, 5), w, shape, b, transposed=transposed)
    other = create((4, 6, 5), w, shape, b, transposed=transposed, w_desc=weights(w, layout))
    y = apply(plain, x, shape)
    np.testing.assert_array_equal(apply(other, x, shape), y)
    dy = normal(*y.shape, seed=3)
    status, dx, dw, db = backward(plain, dy, x, y, (4, 6, 5), w)
    assert status == 0
    for flags in (0, 1):
        status, *got = backward(other, dy, x, y, (4, 6, 5), w, layout=layout, flags=flags)
        assert status == 0, bnns.last_error()
        np.testing.assert_allclose(got[0], dx + flags, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got[1], stored(dw, layout) + np.float32(flags), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got[2], db + flags, rtol=1e-6, atol=1e-5)


def test_two_equal_kernels_on_four_by_four_pixels() -> None:
    """Values that Apple's library has printed."""
    kernel = np.array([[-2, 0, 1], [0, 1, 0], [-1, -2, 0]], np.float32)
    x = np.array([[0, 43, 3, 30], [0, 98, 0, 0], [7, 38, 0, 0], [19, 20, 175, 50]], np.float32)
    w, b = np.stack([kernel, kernel])[:, None], np.full(2, 0.5, np.float32)
    filter = create((1, 4, 4), w, (2, 2, 2), b)
    y = np.zeros((2, 2, 2), np.float32)
    assert bnns.BNNSFilterApply(filter, x, y) == 0
    np.testing.assert_array_equal(y, [[[18.5, -93.5], [-20.5, -565.5]]] * 2)


def test_one_pixel_and_one_weight() -> None:
    """Values that Apple's library has printed."""
    one = create((1, 1, 1), np.full((1, 1, 1, 1), 2, np.float32), (1, 1, 1), np.ones(1, np.float32))
    y = np.zeros(1, np.float32)
    assert bnns.BNNSFilterApply(one, np.float32([-2]), y) == 0
    assert y == [-3]


@pytest.mark.parametrize("surplus", [0, 2])
@pytest.mark.parametrize("pad", [(0, 0, 0, 0), (1, 2, 0, 1)])
def test_transposed_convolutions(surplus: int, pad: tuple[int, int, int, int]) -> None:
    """Each pixel of the input is scattered through the kernels, without a flip; more pixels get the bias alone."""
    left, right, up, down = pad
    x, w, b = normal(2, 3, 4, 5), normal(2, 3, 3, 2, seed=1), normal(2, seed=2)
    height, width = 3 * 2 + 3, 4 * 3 + 2  # strides 2 and 3
    shape = (2, height - up - down + surplus, width - left - right + surplus)
    options = {"x_stride": 3, "y_stride": 2, "pad": pad}
    filter = create((3, 4, 5), w, shape, b, transposed=True, **options)
    whole = np.zeros((2, 2, height + surplus, width + surplus))
    for n, o, i, row, column, ky, kx in np.ndindex(2, 2, 3, 4, 5, 3, 2):
        whole[n, o, 2 * row + ky, 3 * column + kx] += float(w[o, i, ky, kx]) * x[n, i, row, column]
    expected = whole[:, :, up : up + shape[1], left : left + shape[2]] + b[:, None, None]
    if surplus:  # beyond what kernels reach, padding cuts nothing off
        expected = np.zeros((2, *shape)) + b[:, None, None]
        reached = whole[:, :, up : up + shape[1], left : left + shape[2]]
        expected[:, :, : reached.shape[2], : reached.shape[3]] += reached
    y = apply(filter, x, shape)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    dy = normal(*y.shape, seed=3)
    status, dx, dw, db = backward(filter, dy, x, None, (3, 4, 5), w)
    assert status == 0, bnns.last_error()
    np.testing.assert_allclose(db, dy.sum((0, 2, 3)), rtol=1e-5, atol=1e-5)
    for gradient, value, make in ((dx, x, lambda v: (v, w)), (dw, w, lambda v: (x, v))):
        direction = normal(*value.shape, seed=4)
        moved, kernels = make(direction)
        z = apply(create((3, 4, 5), kernels, shape, transposed=True, **options), moved, shape)
        assert (gradient * direction).sum() == pytest.approx(float((z * dy).sum()), rel=1e-4)


def test_transposed_convolution_in_groups_has_no_gradient() -> None:
    x, w = normal(2, 4, 3, 3), normal(6, 2, 2, 2, seed=1)
    filter = create((4, 3, 3), w, (6, 4, 4), transposed=True, groups=2)
    halves = [create((2, 3, 3), w[k : k + 3], (3, 4, 4), transposed=True) for k in (0, 3)]
    expected = [
        apply(half, np.ascontiguousarray(x[:, k : k + 2]), (3, 4, 4)) for half, k in zip(halves, (0, 2), strict=True)
    ]
    y = apply(filter, x, (6, 4, 4))
    np.testing.assert_allclose(y, np.concatenate(expected, axis=1), rtol=1e-6)
    status, dx, dw, db = backward(filter, y, x, y, (4, 3, 3), w)
    fails(status, "groups is 2; a transposed convolution with groups has no gradient")
    assert all(np.isnan(a).all() for a in (dx, dw, db))


@pytest.mark.parametrize("code", [RELU, TANH, LINEAR])
@pytest.mark.parametrize("transposed", [False, True])
def test_an_activation_fused_into_a_convolution(code: int, transposed: bool) -> None:
    x, w, b = normal(2, 3, 6, 6), normal(5, 3, 3, 3, seed=1), normal(5, seed=2)
    shape = (5, 8, 8) if transposed else (5, 4, 4)
    activation = bnns.BNNSActivation(code, 0.5, 0.0)
    filter = create((3, 6, 6), w, shape, b, transposed=transposed, activation=activation)
    plain = create((3, 6, 6), w, shape, b, transposed=transposed)
    function = rg.Activation({RELU: "relu", TANH: "tanh"}.get(code, "linear"), *([0.5] if code == LINEAR else []))
    z, y = apply(plain, x, shape), apply(filter, x, shape)
    np.testing.assert_array_equal(y, rg.activation_forward(z, function))
    dy = normal(*y.shape, seed=3)
    status, *got = backward(filter, dy, x, y, (3, 6, 6), w)
    assert status == 0, bnns.last_error()
    _, *expected = backward(plain, rg.activation_backward(dy, function, x=z), x, None, (3, 6, 6), w)
    for a, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)
    status, *got = backward(filter, dy, x, None, (3, 6, 6), w)
    assert status == (0 if code == LINEAR else -1)
    if code != LINEAR:
        assert "out is NULL" in str(bnns.last_error())
        assert all(np.isnan(a).all() for a in got)


def test_an_activation_that_cannot_be_trained_fused() -> None:
    x, w = normal(1, 1, 4, 4), normal(2, 1, 3, 3)
    filter = create((1, 4, 4), w, (2, 2, 2), activation=bnns.BNNSActivation(SILU, 0.0, 0.0))
    y = apply(filter, x, (2, 2, 2))
    fails(backward(filter, y, x, y, (1, 4, 4), w)[0], "an activation filter trains it")


def test_which_padding_is_in_force() -> None:
    x, w = normal(1, 1, 5, 5), normal(1, 1, 3, 3, seed=1)
    both = create((1, 5, 5), w, (1, 5, 5), x_padding=1, y_padding=1, pad=(9, 9, 9, 9))
    np.testing.assert_allclose(
        apply(both, x, (1, 5, 5)), by_the_formula(x, w, None, (1, 5, 5), pad=(1, 1, 1, 1)), rtol=1e-5, atol=1e-5
    )
    one = create((1, 5, 5), w, (1, 3, 5), x_padding=1, pad=(0, 0, 1, 1))
    np.testing.assert_allclose(
        apply(one, x, (1, 3, 5)), by_the_formula(x, w, None, (1, 3, 5), pad=(1, 1, 0, 0)), rtol=1e-5, atol=1e-5
    )
    sides = create((1, 5, 5), w, (1, 4, 4), pad=(1, 0, 0, 1))
    np.testing.assert_allclose(
        apply(sides, x, (1, 4, 4)), by_the_formula(x, w, None, (1, 4, 4), pad=(1, 0, 0, 1)), rtol=1e-5, atol=1e-5
    )


def test_convolution_weights_are_copied_unless_the_client_keeps_them() -> None:
    x, w, b = normal(1, 1, 3, 3), normal(1, 1, 2, 2, seed=1), normal(1, seed=2)
    memory = w.copy()
    copied = create((1, 3, 3), w, (1, 2, 2), b, w_desc=weights(w, OIHW, memory))
    kept = create(
        (1, 3, 3), w, (1, 2, 2), b, w_desc=weights(w, OIHW, memory),
        filter_params=bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr),
    )  # fmt: skip
    before = apply(copied, x, (1, 2, 2))
    memory *= 2
    np.testing.assert_array_equal(apply(copied, x, (1, 2, 2)), before)
    np.testing.assert_allclose(apply(kept, x, (1, 2, 2)), 2 * before - b, rtol=1e-5)


@pytest.mark.parametrize("data_type", [F16, I8, U8])
def test_convolution_of_other_types(data_type: int) -> None:
    dtype: Any = {F16: np.float16, I8: np.int8, U8: np.uint8}[data_type]
    rng = np.random.default_rng(0)
    x, w = (rng.integers(0, 9, shape).astype(dtype) for shape in ((2, 3, 5, 5), (4, 3, 3, 3)))
    scale = {} if data_type == F16 else {"data_scale": 0.5, "data_bias": 1.0}
    value = (lambda a: a.astype(float)) if data_type == F16 else (lambda a: 0.5 * a + 1)
    parameters = layer((3, 5, 5), np.zeros(w.shape, np.float32), (4, 3, 3))
    parameters.i_desc = image((3, 5, 5), data_type=data_type, **scale)
    parameters.w_desc = weights(w, data_type=data_type, **scale)
    expected = by_the_formula(value(x), value(w), None, (4, 3, 3))
    filter = bnns.BNNSFilterCreateLayerConvolution(parameters)
    y = apply(filter, x, (4, 3, 3))
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    fails(backward(filter, y, x, y, (3, 5, 5), np.zeros(w.shape, np.float32))[0], "backward needs Float32")
    for out_type, out_dtype in ((F16, np.float16), (I8, np.int8), (U8, np.uint8)):
        parameters.o_desc = image((4, 3, 3), data_type=out_type, data_scale=4.0)
        rounded = np.zeros((2, 4, 3, 3), out_dtype)
        assert bnns.BNNSFilterApplyBatch(bnns.BNNSFilterCreateLayerConvolution(parameters), 2, x, 0, rounded, 0) == 0
        if out_type == F16:
            np.testing.assert_array_equal(rounded, y.astype(np.float16))
        else:
            limits = np.iinfo(out_dtype)
            np.testing.assert_array_equal(rounded, np.clip(np.rint(y / 4), limits.min, limits.max))


def test_convolution_strides_batches_and_deltas_of_another_shape() -> None:
    x, w, b = normal(2, 3, 5, 6), normal(4, 3, 2, 2, seed=1), normal(4, seed=2)
    plain = create((3, 5, 6), w, (4, 4, 5), b)
    y, dy = apply(plain, x, (4, 4, 5)), normal(2, 4, 4, 5, seed=3)
    _, dx, dw, db = backward(plain, dy, x, None, (3, 5, 6), w)
    wide, out = np.full((2, 3, 7, 10), np.nan, np.float32), np.full((2, 4, 4, 9), np.nan, np.float32)
    wide[:, :, :5, :6] = x
    strided = create(
        (3, 5, 6), w, (4, 4, 5), b,
        i_desc=image((3, 5, 6), stride=(1, 10, 70)), o_desc=image((4, 4, 5), stride=(1, 9, 36)),
    )  # fmt: skip
    assert bnns.BNNSFilterApplyBatch(strided, 2, wide, 210, out, 144) == 0
    np.testing.assert_array_equal(out[..., :5], y)
    assert np.isnan(out[..., 5:]).all()
    flat_dx = np.zeros((2, 90), np.float32)
    succeeds(bnns.BNNSFilterApplyBackwardBatch(
        plain, 2, x, 90, vector(flat_dx[0], data=flat_dx), 90, None, 0, vector(dy[0].reshape(-1), data=dy), 80,
        None, None,
    ))  # fmt: skip
    np.testing.assert_array_equal(flat_dx.reshape(dx.shape), dx)
    gaps = np.full((4, 3, 2, 3), np.nan, np.float32)
    succeeds(bnns.BNNSFilterApplyBackwardBatch(
        plain, 2, x, 0, None, 0, None, 0, image((4, 4, 5), dy), 0,
        weights(w, OIHW, gaps, stride=(1, 3, 6, 18)), None,
    ))  # fmt: skip
    np.testing.assert_array_equal(gaps[..., :2], dw)
    assert np.isnan(gaps[..., 2]).all()
    only = np.zeros(4, np.float32)
    status = bnns.BNNSFilterApplyBackwardBatch(
        plain, 2, None, 0, None, 0, None, 0, image((4, 4, 5), dy), 0, None, vector(only)
    )
    assert status == 0
    np.testing.assert_array_equal(only, db)


def test_a_convolution_gradient_in_the_memory_of_another_array() -> None:
    x, w = normal(2, 3, 4, 4), normal(3, 3, 1, 1, seed=1)
    filter = create((3, 4, 4), w, (3, 4, 4))
    dy = normal(2, 3, 4, 4, seed=3)
    _, dx, dw, db = backward(filter, dy, x, None, (3, 4, 4), w)
    for place in (x.copy(), dy.copy()):
        own_x, own_dy = (place if np.array_equal(place, a) else a for a in (x, dy))
        got_dw, got_db = np.empty_like(w), np.empty(3, np.float32)
        succeeds(bnns.BNNSFilterApplyBackwardBatch(
            filter, 2, own_x, 0, image((3, 4, 4), place), 0, None, 0, image((3, 4, 4), own_dy), 0,
            weights(w, OIHW, got_dw), vector(got_db),
        ))  # fmt: skip
        for got, expected in ((place, dx), (got_dw, dw), (got_db, db)):
            np.testing.assert_allclose(got, expected, rtol=1e-6)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"i_desc": vector(normal(90))}, "i_desc.layout is BNNSDataLayoutVector; it must be ImageCHW"),
    ({"w_desc": vector(normal(9))}, "w_desc.layout is BNNSDataLayoutVector; it must be ConvolutionWeightsOIHW"),
    ({"w_desc": Descriptor(layout=OIHW, size=(3, 3, 2, 5), data_type=F32)}, "w_desc.data is NULL"),
    ({"o_desc": image((5, 4, 4))}, "o_desc has 4 pixels along y, whose kernels of 3 with stride 1 and dilation 1"),
    ({"o_desc": image((4, 3, 3))}, "w_desc has 5 outputs and 2 inputs, expected 4 and 2"),
    ({"i_desc": image((3, 5, 5))}, "w_desc has 5 outputs and 2 inputs, expected 5 and 3"),
    ({"groups": 2}, "groups is 2, which does not divide the 5 channels of o_desc"),
    ({"groups": 2, "w_desc": weights(normal(5, 2, 3, 3), IO_ROTATED)}, "groups is 2, which w_desc.layout"),
    ({"bias": vector(normal(4))}, "bias has 4 elements, expected 5, one for each channel of o_desc"),
    ({"x_stride": 2}, "o_desc has 3 pixels along x, whose kernels of 3 with stride 2 and dilation 1 span 7"),
    ({"y_dilation_stride": 2}, "dilation 2 span 7, but i_desc has 5, with padding 0 and 0"),
    ({"x_padding": 2**31}, f"x_padding is {2**31}, must be at most {2**31 - 1}"),
    ({"x_stride": -1}, "x_stride is -1"),
    ({"pad": (1, 1)}, "pad is (1, 1), must have 4 entries: left, right, up, down"),
    ({"i_desc": image((2, 5, 5), data_type=bnns.BNNSDataTypeInt32)}, "i_desc.data_type is BNNSDataTypeInt32; it must"),
    ({"o_desc": image((5, 3, 3), stride=(1, 1, 9))}, "o_desc.stride is (1, 1, 9), with which elements"),
    ({"w_desc": Descriptor(layout=OIHW, size=(3, 3, 2, 0), data_type=F32)}, "w_desc.size is (3, 3, 2, 0), and an"),
    ({"activation": bnns.BNNSActivation(99)}, "activation.function is 0x63"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=range(len(REFUSED)))
def test_convolution_layers_that_cannot_be_made(fields: dict[str, Any], message: str) -> None:
    assert create((2, 5, 5), normal(5, 2, 3, 3), (5, 3, 3)) is not None
    assert create((2, 5, 5), normal(5, 2, 3, 3), (5, 3, 3), **fields) is None
    assert re.search(re.escape(message), str(bnns.last_error())), bnns.last_error()


def test_transposed_convolution_layers_that_cannot_be_made() -> None:
    w = normal(5, 2, 3, 3)
    assert create((2, 5, 5), w, (5, 6, 7), transposed=True) is None
    assert "i_desc has 5 pixels along y, whose kernels of 3 with stride 1" in str(bnns.last_error())
    assert "span 7, but o_desc has 6" in str(bnns.last_error())
    assert create((2, 5, 5), w, (5, 7, 7), transposed=True, x_padding=7) is None
    assert "the padding along x is 7 and 7, which leaves none of the 7 pixels" in str(bnns.last_error())
    assert create((2, 5, 5), w, (5, 7, 7), transposed=True, i_desc=image((2, 5, 5), data_type=F16)) is None
    assert "i_desc.data_type is BNNSDataTypeFloat16; it must be Float32" in str(bnns.last_error())
    assert bnns.BNNSFilterCreateLayerConvolution(None) is None  # type: ignore[arg-type]
    assert "layer_params is NULL, must be BNNSLayerParametersConvolution" in str(bnns.last_error())


def test_convolution_calls_that_fail_write_nothing() -> None:
    x, w, b = normal(2, 2, 5, 5), normal(5, 2, 3, 3, seed=1), normal(5, seed=2)
    filter = create((2, 5, 5), w, (5, 3, 3), b)
    y, dy = np.full((2, 5, 3, 3), 7, np.float32), normal(2, 5, 3, 3, seed=3)

    def failed(message: str, status: int) -> None:
        fails(status, message)
        assert (y == 7).all()

    failed("batch_size is 0", bnns.BNNSFilterApplyBatch(filter, 0, x, 0, y, 0))
    failed("in is NULL", bnns.BNNSFilterApplyBatch(filter, 2, None, 0, y, 0))
    failed("in has 200 bytes", bnns.BNNSFilterApplyBatch(filter, 2, x[:1], 0, y, 0))
    failed("out_stride is 44", bnns.BNNSFilterApplyBatch(filter, 2, x, 0, y, 44))
    memory = np.full(200, 7, np.float32)
    failed("out overlaps in", bnns.BNNSFilterApplyBatch(filter, 2, memory[:100], 0, memory[50:140], 0))
    dx, dw, db = np.full((2, 2, 5, 5), 7, np.float32), np.full(w.shape, 7, np.float32), np.full(5, 7, np.float32)
    good = [
        2, x, 0, image((2, 5, 5), dx), 0, None, 0, image((5, 3, 3), dy), 0, weights(w, OIHW, dw), vector(db),
    ]  # fmt: skip

    def refused(message: str, **changes: Any) -> None:
        arguments = list(good)
        for place, value in changes.items():
            arguments[int(place[1:])] = value
        fails(bnns.BNNSFilterApplyBackwardBatch(filter, *arguments), message)
        assert all((a == 7).all() for a in (dx, dw, db))

    refused("out_delta is NULL", _7=None)
    refused("in is NULL, and weights_delta is computed from it", _1=None)
    refused("out_delta.size is (3, 3, 4), expected", _7=image((4, 3, 3), dy))
    refused("weights_delta.size is (3, 3, 5, 2)", _9=weights(w.swapaxes(0, 1), OIHW, dw))
    refused("weights_delta.layout is BNNSDataLayoutConvolutionWeightsOIHrWr, expected", _9=weights(w, ROTATED, dw))
    refused("bias_delta.size is (4,)", _10=vector(db[:4]))
    refused("bias_delta.data is NULL", _10=vector(db, data=None))
    refused("in_delta.data_type is BNNSDataTypeBFloat16", _3=image((2, 5, 5), dx, data_type=BF16))
    refused("in_delta.flags is 3", _3=image((2, 5, 5), dx, flags=3))
    refused("in_delta overlaps bias_delta", _10=vector(dx.reshape(-1)[:5]))
    read_only = db.copy()
    read_only.flags.writeable = False
    refused("bias_delta.data is read-only", _10=vector(read_only))
    bnns.BNNSFilterDestroy(filter)
    failed("filter has been destroyed", bnns.BNNSFilterApplyBatch(filter, 2, x, 0, y, 0))


def test_swift_convolution_layer() -> None:
    x, w, b = normal(2, 2, 6, 6), normal(4, 2, 3, 3, seed=1), normal(4, seed=2)
    shape = BNNS.Shape
    data = Descriptor.allocate(initializingFrom=x.reshape(-1), shape=shape.imageCHW(6, 6, 2), batchSize=2)
    y = Descriptor.allocate(repeating=0.0, shape=shape.imageCHW(3, 3, 4), batchSize=2)
    kernels = shape.convolutionWeightsOIHW(3, 3, 2, 4).descriptor(w)
    with BNNS.ConvolutionLayer(
        type=BNNS.ConvolutionType.standard,
        input=data,
        weights=kernels,
        output=y,
        bias=shape.vector(4).descriptor(b),
        padding=BNNS.ConvolutionPadding.symmetric(x=1, y=1),
        activation=BNNS.ActivationFunction.rectifiedLinear,
        groupCount=1,
        stride=(2, 2),
        dilationStride=(1, 1),
    ) as layer:
        layer.apply(batchSize=2, input=data, output=y)
        expected = rg.conv_forward(x, w, b, stride=2, padding=((1, 0), (1, 0)), activation="relu")
        np.testing.assert_array_equal(np.asarray(y.data).reshape(2, 4, 3, 3), expected)
        dy = normal(2, 4, 3, 3, seed=3)
        dx, dw, db = np.zeros_like(x), np.zeros_like(w), np.zeros_like(b)
        layer.applyBackward(
            batchSize=2,
            input=data,
            output=y,
            outputGradient=shape.imageCHW(3, 3, 4).descriptor(dy),
            generatingInputGradient=shape.imageCHW(6, 6, 2).descriptor(dx),
            generatingWeightsGradient=shape.convolutionWeightsOIHW(3, 3, 2, 4).descriptor(dw),
            generatingBiasGradient=shape.vector(4).descriptor(db),
        )
        options: dict[str, Any] = {"stride": 2, "padding": ((1, 0), (1, 0)), "activation": "relu", "y": expected}
        for got, right in zip((dx, dw, db), rg.conv_backward(dy, x, w, **options), strict=True):
            np.testing.assert_array_equal(got, right)
    up = BNNS.ConvolutionLayer(
        type=BNNS.ConvolutionType.transposed,
        input=shape.imageCHW(2, 2, 2).descriptor(x),
        weights=kernels,
        output=shape.imageCHW(3, 4, 4).descriptor(),
        bias=None,
        padding=BNNS.ConvolutionPadding.asymmetric(left=1, right=0, up=0, down=0),
        activation=BNNS.ActivationFunction.identity,
        groupCount=1,
        stride=(1, 1),
        dilationStride=(1, 1),
    )
    out = np.zeros((1, 4, 4, 3), np.float32)
    up.apply(batchSize=1, input=shape.imageCHW(2, 2, 2).descriptor(x), output=shape.imageCHW(3, 4, 4).descriptor(out))
    small = x.reshape(-1)[:8].reshape(1, 2, 2, 2)
    expected = rg.conv_transpose_forward(small, w.swapaxes(0, 1), padding=((0, 0), (1, 0)))
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(BNNS.Error, match=r"unableToCreateLayer: .*w_desc has 4 outputs and 2 inputs"):
        BNNS.ConvolutionLayer(
            type=BNNS.ConvolutionType.standard,
            input=shape.imageCHW(6, 6, 3).descriptor(),
            weights=kernels,
            output=y,
            bias=None,
            padding=BNNS.ConvolutionPadding.zero,
            activation=BNNS.ActivationFunction.identity,
            groupCount=1,
            stride=(1, 1),
            dilationStride=(1, 1),
        )
