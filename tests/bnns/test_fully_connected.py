"""BNNS fully connected filters."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNS
from retrograd.lab import reference
from support.bnns import CLIENT, F16, F32, Descriptor, created, fails, normal, not_created, succeeds, vector

ACCUMULATE = bnns.BNNSNDArrayFlagBackpropAccumulate
LAYOUTS = [
    bnns.BNNSDataLayoutRowMajorMatrix,
    bnns.BNNSDataLayoutColumnMajorMatrix,
    bnns.BNNSDataLayout2DLastMajor,
    bnns.BNNSDataLayout2DFirstMajor,
]


def layer(w: np.ndarray, b: np.ndarray | None = None, **fields: Any) -> Any:
    outputs, inputs = w.shape
    given = {
        "i_desc": vector(inputs),
        "w_desc": Descriptor.from_array(w),
        "o_desc": vector(outputs),
        "bias": Descriptor() if b is None else Descriptor.from_array(b),
        "activation": bnns.BNNSActivation(),
    }
    return bnns.BNNSLayerParametersFullyConnected(**{**given, **fields})


def create(w: np.ndarray, b: np.ndarray | None = None, parameters: Any = CLIENT, **fields: Any) -> Any:
    return created(bnns.BNNSFilterCreateLayerFullyConnected(layer(w, b, **fields), parameters))


def applied(filter: Any, x: np.ndarray, outputs: int, dtype: Any = np.float32) -> np.ndarray:
    y = np.empty((len(x), outputs), dtype)
    assert bnns.BNNSFilterApplyBatch(filter, len(x), x, x[0].size, y, outputs) == 0, bnns.last_error()
    return y


def backward(filter: Any, dy: np.ndarray, deltas: dict[str, Any], x: Any = None, y: Any = None) -> int:
    """0 strides: the batch is packed."""
    return bnns.BNNSFilterApplyBackwardBatch(
        filter, len(dy), x, 0, deltas.get("dx"), 0, y, 0, vector(dy.shape[1], dy), 0, deltas.get("dw"), deltas.get("db")
    )


# ---- values that Apple's library has printed -------------------------------------------------------------------------


def test_nine_inputs_and_two_outputs() -> None:
    w = (0.02 * np.arange(18)).astype(np.float32).reshape(2, 9)
    x = (1 + 0.1 * np.arange(9)).astype(np.float32)
    y = np.zeros(2, np.float32)
    assert bnns.BNNSFilterApply(create(w, np.array([0.3, 0.7], np.float32)), x, y) == 0
    assert np.allclose(y, [1.428, 4.096], rtol=1e-6)


def test_one_weight_with_a_linear_activation() -> None:
    linear = bnns.BNNSActivation(bnns.BNNSActivationFunctionLinear, 2.0)
    filter = create(np.full((1, 1), 2, np.float32), np.ones(1, np.float32), activation=linear)
    assert applied(filter, np.ones((1, 1), np.float32), 1).tolist() == [[6.0]]


# ---- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "inputs", "outputs"), [(1, 1, 1), (3, 5, 2), (4, 17, 31), (2, 1, 7), (5, 7, 1)])
def test_forward_is_a_matrix_product(layout: int, batch: int, inputs: int, outputs: int) -> None:
    w, b, x = normal(outputs, inputs), normal(outputs, seed=1), normal(batch, inputs, seed=2)
    filter = create(w, b, w_desc=Descriptor.from_array(w, layout))
    y = applied(filter, x, outputs)
    assert np.array_equal(y, rg.linear_forward(x, w, b))
    assert np.allclose(y, reference.linear_forward(x, w, b), rtol=1e-5, atol=1e-5)


def test_a_batch_stride_of_zero_is_packed_and_gaps_are_kept() -> None:
    w, x = normal(3, 5), normal(4, 5, seed=1)
    filter = create(w)
    expected = rg.linear_forward(x, w)
    y = np.empty((4, 3), np.float32)
    assert bnns.BNNSFilterApplyBatch(filter, 4, x, 0, y, 0) == 0
    assert np.array_equal(y, expected)
    wide, gaps = np.zeros((4, 8), np.float32), np.full((4, 7), 9, np.float32)
    wide[:, :5] = x
    assert bnns.BNNSFilterApplyBatch(filter, 4, wide, 8, gaps, 7) == 0
    assert np.array_equal(gaps[:, :3], expected)
    assert (gaps[:, 3:] == 9).all()


def test_shapes_of_samples_may_be_anything_with_as_many_elements() -> None:
    w, x = normal(6, 12), normal(2, 12, seed=1)
    image = Descriptor(layout=bnns.BNNSDataLayoutImageCHW, size=(3, 2, 2), data_type=F32)
    strided = Descriptor(layout=bnns.BNNSDataLayoutRowMajorMatrix, size=(3, 2), stride=(2, 8), data_type=F32)
    filter = create(w, i_desc=image, o_desc=strided)
    y = np.full((2, 16), 9, np.float32)
    assert bnns.BNNSFilterApplyBatch(filter, 2, x, 12, y, 16) == 0
    expected = rg.linear_forward(x, w)
    assert np.array_equal(y.reshape(2, 2, 8)[:, :, :6:2].reshape(2, 6), expected)
    assert (y.reshape(2, 2, 8)[:, :, 1::2] == 9).all()


@pytest.mark.parametrize("data_type", [bnns.BNNSDataTypeFloat16, bnns.BNNSDataTypeInt8, bnns.BNNSDataTypeInt16])
@pytest.mark.parametrize("parameters", [None, CLIENT])
def test_types_of_input_and_weights(data_type: int, parameters: Any) -> None:
    dtype = {0x10010: np.float16, 0x20008: np.int8, 0x20010: np.int16}[data_type]
    rng = np.random.default_rng(0)
    w, x = (rng.integers(-100, 100, shape).astype(dtype) for shape in ((3, 40), (4, 40)))
    b = normal(3)
    integer = dtype is not np.float16
    w_desc = Descriptor.from_array(w)
    w_desc.data_scale, w_desc.data_bias = 0.5, 0.25
    i_desc = vector(40, data_type=data_type, data_scale=0.0, data_bias=-1.0)  # a scale of 0 counts as 1
    filter = create(w, b, parameters, i_desc=i_desc, w_desc=w_desc)
    wide_w, wide_x = w.astype(np.float64), x.astype(np.float64)
    if integer:
        wide_w, wide_x = 0.5 * wide_w + 0.25, wide_x - 1
    expected = wide_x @ wide_w.T + b
    assert np.allclose(applied(filter, x, 3), expected, rtol=1e-5, atol=1e-2)
    deltas = {"dx": vector(40, np.zeros((4, 40), np.float32))}
    fails(backward(filter, normal(4, 3), deltas), "backward needs Float32")


def test_outputs_of_other_types_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    w, x = normal(3, 5), normal(4, 5, seed=1)
    with caplog.at_level("INFO", "retrograd.bnns"):
        filter = create(w, o_desc=vector(3, data_type=bnns.BNNSDataTypeBFloat16))
    assert "o_desc.data_type is BNNSDataTypeBFloat16; this is accepted here" in caplog.text
    y = applied(filter, x, 3, ml_dtypes.bfloat16)
    assert np.array_equal(y, rg.linear_forward(x, w).astype(ml_dtypes.bfloat16))


def test_weights_are_copied_unless_they_stay_the_clients() -> None:
    for parameters in (None, CLIENT):
        w, b, x = normal(3, 5), normal(3, seed=1), normal(2, 5, seed=2)
        filter = create(w, b, parameters)
        before = applied(filter, x, 3)
        w *= 2
        b += 1
        after = applied(filter, x, 3)
        if parameters is None:
            assert np.array_equal(after, before)
        else:
            assert np.array_equal(after, rg.linear_forward(x, w, b))


@pytest.mark.parametrize("activation", [("Tanh", "tanh"), ("RectifiedLinear", "relu"), ("SiLU", "silu")])
def test_a_fused_activation(activation: tuple[str, str]) -> None:
    w, b, x = normal(3, 5), normal(3, seed=1), normal(4, 5, seed=2)
    function = bnns.BNNSActivation(getattr(bnns, f"BNNSActivationFunction{activation[0]}"))
    y = applied(create(w, b, activation=function), x, 3)
    assert np.array_equal(y, rg.activation_forward(rg.linear_forward(x, w, b), activation[1]))


# ---- backward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [(0, "identity"), (3, "sigmoid"), (7, "linear"), (35, "gelu_sigmoid")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(activation: tuple[int, str], layout: int) -> None:
    code, name = activation
    w, b, x, dy = normal(3, 5), normal(3, seed=1), normal(4, 5, seed=2), normal(4, 3, seed=3)
    alpha = 0.5 if name == "linear" else 0.0
    function = bnns.BNNSActivation(code, alpha)
    filter = create(w, b, activation=function, w_desc=Descriptor.from_array(w, layout))
    y = applied(filter, x, 3)
    dx, dw, db = np.empty_like(x), np.empty_like(w), np.empty_like(b)
    deltas = {"dx": vector(5, dx), "dw": Descriptor.from_array(dw, layout), "db": vector(3, db)}
    assert backward(filter, dy, deltas, x, y) == 0, bnns.last_error()
    slope = reference.activation_input_slope(name, reference.linear_forward(x, w, b), alpha)
    for got, want in zip((dx, dw, db), reference.linear_backward(dy * slope, x, w), strict=True):
        assert np.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_gradients_against_finite_differences() -> None:
    w, b, x, dy = (normal(*shape, seed=k) for k, shape in enumerate([(3, 5), (3,), (4, 5), (4, 3)]))
    filter = create(w, b, activation=bnns.BNNSActivation(bnns.BNNSActivationFunctionTanh))
    y = applied(filter, x, 3)
    dx, dw, db = np.empty_like(x), np.empty_like(w), np.empty_like(b)
    deltas = {"dx": vector(5, dx), "dw": Descriptor.from_array(dw), "db": vector(3, db)}
    assert backward(filter, dy, deltas, x, y) == 0

    def loss(w: Any, b: Any, x: Any) -> float:
        return float((np.tanh(x @ w.T + b) * dy).sum())

    wide = [array.astype(np.float64) for array in (w, b, x)]
    step = 1e-6
    for k, gradient in enumerate((dw, db, dx)):
        direction = np.random.default_rng(k).normal(size=wide[k].shape)
        ends = [loss(*(a + s * step * direction if k == j else a for j, a in enumerate(wide))) for s in (1, -1)]
        assert np.isclose((ends[0] - ends[1]) / (2 * step), (gradient * direction).sum(), rtol=1e-4, atol=1e-5)


def test_each_gradient_alone_and_by_its_own_flag() -> None:
    w, x, dy = normal(3, 5), normal(4, 5, seed=1), normal(4, 3, seed=2)
    filter = create(w)
    expected = dict(zip(("dx", "dw", "db"), rg.linear_backward(dy, x, w), strict=True))
    for flags in ((0, 0, 0), (1, 1, 1), (0, 1, 0), (1, 0, 1)):
        arrays = {"dx": np.full_like(x, 7), "dw": np.full_like(w, 7), "db": np.full(3, 7, np.float32)}
        deltas = {name: Descriptor.from_array(array[0] if name == "dx" else array) for name, array in arrays.items()}
        deltas["dx"].data = arrays["dx"]
        for name, flag in zip(deltas, flags, strict=True):
            deltas[name].flags = flag
        assert backward(filter, dy, deltas, x) == 0, bnns.last_error()
        for name, flag in zip(deltas, flags, strict=True):
            assert np.allclose(arrays[name], expected[name] + 7 * flag, rtol=1e-6, atol=1e-6)
    for name in ("dx", "db"):  # without the input
        array = np.empty_like(expected[name])
        delta = vector(5, array) if name == "dx" else vector(3, array)
        assert backward(filter, dy, {name: delta}) == 0, bnns.last_error()
        assert np.array_equal(array, expected[name])
    assert backward(filter, dy, {}) == 0


def test_gradients_in_the_memory_of_inputs() -> None:
    """Every result is that of separate arrays, whatever is overwritten."""
    w, x, dy = normal(5, 5), normal(4, 5, seed=1), normal(4, 5, seed=2)
    expected = rg.linear_backward(dy, x, w)
    for over in ("x", "dy"):
        arrays = {"w": w.copy(), "x": x.copy(), "dy": dy.copy()}
        dw = np.empty_like(w)
        deltas = {"dx": vector(5, arrays[over]), "dw": Descriptor.from_array(dw)}
        assert backward(create(arrays["w"]), arrays["dy"], deltas, arrays["x"]) == 0, bnns.last_error()
        assert np.array_equal(arrays[over], expected.dx)
        assert np.array_equal(dw, expected.dw)
    weights = w.copy()
    deltas = {"dx": vector(5, np.empty_like(x)), "dw": Descriptor.from_array(weights)}
    assert backward(create(weights), dy, deltas, x) == 0
    assert np.array_equal(weights, expected.dw)


def test_gradients_of_another_shape_or_with_strides() -> None:
    w, x, dy = normal(6, 4), normal(2, 4, seed=1), normal(2, 6, seed=2)
    expected = rg.linear_backward(dy, x, w)
    image = Descriptor(layout=bnns.BNNSDataLayoutImageCHW, size=(3, 2, 1), data=dy, data_type=F32)
    dx, dw = np.full((2, 8), 9, np.float32), np.full((6, 8), 9, np.float32)
    deltas = (
        Descriptor(layout=bnns.BNNSDataLayoutVector, size=(4,), stride=(2,), data=dx, data_type=F32),
        Descriptor(layout=bnns.BNNSDataLayoutRowMajorMatrix, size=(4, 6), stride=(1, 8), data=dw, data_type=F32),
    )
    succeeds(bnns.BNNSFilterApplyBackwardBatch(
        create(w), 2, x, 0, deltas[0], 8, None, 0, image, 0, deltas[1], None
    ))  # fmt: skip
    assert np.array_equal(dx[:, ::2], expected.dx)
    assert (dx[:, 1::2] == 9).all()
    assert np.array_equal(dw[:, :4], expected.dw)
    assert (dw[:, 4:] == 9).all()


def test_against_torch(torch: Any) -> None:
    w, b, x, dy = normal(33, 65), normal(33, seed=1), normal(7, 65, seed=2), normal(7, 33, seed=3)
    filter = create(w, b, activation=bnns.BNNSActivation(bnns.BNNSActivationFunctionSigmoid))
    y = applied(filter, x, 33)
    tensors = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (x, w, b)]
    out = torch.sigmoid(torch.nn.functional.linear(*tensors))
    out.backward(torch.tensor(dy, dtype=torch.float64))
    assert np.allclose(y, out.detach().numpy(), rtol=1e-5, atol=1e-6)
    arrays = [np.empty_like(x), np.empty_like(w), np.empty_like(b)]
    deltas = {"dx": vector(65, arrays[0]), "dw": Descriptor.from_array(arrays[1]), "db": vector(33, arrays[2])}
    assert backward(filter, dy, deltas, x, y) == 0
    for got, tensor in zip(arrays, tensors, strict=True):
        assert np.allclose(got, tensor.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_nan_and_infinity_come_out_as_arithmetic_says() -> None:
    w = np.eye(2, dtype=np.float32)
    y = applied(create(w, np.zeros(2, np.float32)), np.array([[np.inf, 1], [np.nan, 2]], np.float32), 2)
    assert np.isinf(y[0, 0])
    assert np.isnan(y[1]).all()  # 0 * nan


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"w_desc": Descriptor.from_array(normal(5, 3))}, "w_desc.size is (3, 5), expected (5, 3) for 5 elements"),
        (
            {"w_desc": Descriptor.from_array(normal(3, 5, 1))},
            "w_desc.layout is BNNSDataLayoutImageCHW; it must be RowMajorMatrix, ColumnMajorMatrix or a 2D layout",
        ),
        ({"w_desc": Descriptor(layout=0x21001, data_type=F32)}, "w_desc.layout is BNNSDataLayoutFullyConnectedSparse"),
        ({"w_desc": Descriptor(layout=0x20000, size=(5, 3), data_type=F32)}, "w_desc.data is NULL"),
        (
            {"w_desc": Descriptor.from_array(np.zeros((3, 5), np.int8))},
            "w_desc.data_type is BNNSDataTypeInt8, but i_desc.data_type is BNNSDataTypeFloat32",
        ),
        ({"bias": Descriptor.from_array(normal(4))}, "bias has 4 elements, expected 3 as in o_desc"),
        (
            {"i_desc": vector(5, data_type=bnns.BNNSDataTypeUInt8)},
            "i_desc.data_type is BNNSDataTypeUInt8; it must be Float32, Float16, Int8, Int16",
        ),
        (
            {"o_desc": vector(3, data_type=bnns.BNNSDataTypeInt32)},
            "o_desc.data_type is BNNSDataTypeInt32; it must be Float32, Float16, BFloat16",
        ),
        ({"o_desc": vector(0)}, "o_desc.size is (0,)"),
        ({"activation": bnns.BNNSActivation(bnns.BNNSActivationFunctionSoftmax)}, "not an elementwise"),
    ],
)
def test_creation_fails(fields: dict[str, Any], reason: str) -> None:
    not_created(bnns.BNNSFilterCreateLayerFullyConnected(layer(normal(3, 5), **fields)), reason)


def test_creation_fails_without_parameters() -> None:
    for nothing, shown in ((None, "NULL"), (bnns.BNNSActivation(), "of type BNNSActivation")):
        assert bnns.BNNSFilterCreateLayerFullyConnected(nothing) is None  # type: ignore[arg-type]
        assert f"layer_params is {shown}, must be BNNSLayerParametersFullyConnected" in (bnns.last_error() or "")


def test_apply_fails_and_touches_nothing() -> None:
    w = normal(3, 5)
    y = np.full(12, 7, np.float32)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((0, normal(4, 5), 5, y, 3), "batch_size is 0"),
        ((4, None, 5, y, 3), "in is NULL"),
        ((4, normal(4, 4), 5, y, 3), "in has 64 bytes"),
        ((5, normal(5, 5), 5, y, 3), "out has 48 bytes"),
        ((4, normal(4, 5), 5, y, 2), "out_stride is 2, but a sample of out spans 3 values"),
        ((2, y, 5, y, 3), "out overlaps in in memory"),
        ((1, normal(5), 5, w.reshape(-1), 3), "out overlaps w_desc.data in memory"),
    ]
    filter = create(w)
    for arguments, reason in cases:
        fails(bnns.BNNSFilterApplyBatch(filter, *arguments), reason)
    assert (y == 7).all()
    assert np.array_equal(w, normal(3, 5))


def test_backward_fails_and_touches_nothing() -> None:
    w, x, dy = normal(3, 5), normal(4, 5, seed=1), normal(4, 3, seed=2)
    dx, dw = np.full_like(x, 7), np.full_like(w, 7)
    plain, tanh, silu, sigmoid = (create(w, activation=bnns.BNNSActivation(code)) for code in (0, 4, 31, 35))
    good = {"dx": vector(5, dx), "dw": Descriptor.from_array(dw)}
    cases: list[tuple[Any, dict[str, Any], Any, Any, str]] = [
        (plain, good, None, None, "in is NULL, and weights_delta is computed from it"),
        (sigmoid, {"dx": vector(5, dx)}, None, dy, "in is NULL, and the activation's slope is computed from it"),
        (tanh, good, x, None, "out is NULL; a filter with an activation needs it"),
        (
            silu,
            good,
            x,
            dy,
            "the output does not tell the slope: it is not monotone; an activation filter trains it",
        ),
        (plain, {**good, "dx": vector(4, dx)}, x, None, "in_delta has 4 elements, expected 5 as in i_desc"),
        (plain, {**good, "dw": Descriptor.from_array(dw.T.copy())}, x, None, "weights_delta.size is (3, 5), expected"),
        (plain, {**good, "db": vector(4, np.zeros(4, np.float32))}, x, None, "bias_delta.size is (4,), expected"),
        (plain, {**good, "dx": vector(5)}, x, None, "in_delta.data is NULL"),
        (plain, {**good, "dx": vector(5, dx, data_type=F16)}, x, None, "must be BNNSDataTypeFloat32"),
        (plain, {**good, "db": vector(3, dx)}, x, None, "overlaps"),
        (plain, {**good, "dx": vector(5, dx, flags=2)}, x, None, "in_delta.flags is 2"),
        (plain, {**good, "dx": vector(5, bytes(80))}, x, None, "in_delta.data is read-only"),
        (plain, good, x[:3], None, "in has 60 bytes"),
    ]
    for filter, deltas, source, out, reason in cases:
        assert backward(filter, dy, deltas, source, out) == -1, reason
        assert reason in (bnns.last_error() or "")
        assert (dx == 7).all()
        assert (dw == 7).all()
    assert bnns.BNNSFilterApplyBackwardBatch(plain, 4, x, 0, good["dx"], 0, None, 0, None, 0, None, None) == -1
    assert "out_delta is NULL" in (bnns.last_error() or "")
    bnns.BNNSFilterDestroy(plain)
    fails(backward(plain, dy, good, x), "filter has been destroyed")


# ---- Swift -----------------------------------------------------------------------------------------------------------


def test_the_layer_of_swift() -> None:
    """An image of as many elements goes for the layer's vector, as in Apple's sample."""
    w, b, x, dy = normal(3, 8), normal(3, seed=1), normal(4, 8, seed=2), normal(4, 3, seed=3)
    y, dx, dw, db = np.empty_like(dy), np.empty_like(x), np.empty_like(w), np.empty_like(b)
    image, outputs = BNNS.Shape.imageCHW(2, 2, 2), BNNS.Shape.vector(3)
    matrix = BNNS.Shape.matrixRowMajor(8, 3)
    with BNNS.FullyConnectedLayer(
        input=BNNS.Shape.vector(8).descriptor(),
        output=outputs.descriptor(),
        weights=matrix.descriptor(w),
        bias=outputs.descriptor(b),
        activation=BNNS.ActivationFunction.tanh,
        filterParameters=CLIENT,
    ) as swift:
        swift.apply(batchSize=4, input=image.descriptor(x), output=outputs.descriptor(y))
        swift.applyBackward(
            batchSize=4,
            input=image.descriptor(x),
            output=outputs.descriptor(y),
            outputGradient=outputs.descriptor(dy),
            generatingInputGradient=image.descriptor(dx),
            generatingWeightsGradient=matrix.descriptor(dw),
            generatingBiasGradient=outputs.descriptor(db),
        )
        with pytest.raises(BNNS.Error, match="layerApplyFail: input has 6 elements of BNNSDataTypeFloat32, but"):
            swift.apply(batchSize=4, input=BNNS.Shape.vector(6).descriptor(x), output=outputs.descriptor(y))
        with pytest.raises(BNNS.Error, match="arrayDescriptorInvalidData: output has no data"):
            swift.apply(batchSize=4, input=image.descriptor(x), output=outputs.descriptor())
        assert bnns.BNNSFilterApply(swift.bnnsFilter, x[0], y[0]) == 0
    dz = rg.activation_backward(dy, "tanh", y=y)
    assert np.array_equal(y, rg.activation_forward(rg.linear_forward(x, w, b), "tanh"))
    for got, want in zip((dx, dw, db), rg.linear_backward(dz, x, w), strict=True):
        assert np.array_equal(got, want)
    with pytest.raises(BNNS.Error, match=r"unableToCreateLayer: .*expected"):
        BNNS.FullyConnectedLayer(input=outputs.descriptor(), output=outputs.descriptor(), weights=matrix.descriptor(w))
