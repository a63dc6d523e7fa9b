"""BNNS pooling filters and Swift's PoolingLayer."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNS
from retrograd.lab import reference
from support.bnns import BF16, F16, F32, Array, Descriptor, fails, image, normal, not_created, succeeds, vector

U64, U32 = bnns.BNNSDataTypeUInt64, bnns.BNNSDataTypeUInt32
MAX, UNMAX, L2 = bnns.BNNSPoolingFunctionMax, bnns.BNNSPoolingFunctionUnMax, bnns.BNNSPoolingFunctionL2Norm
INCLUDE, EXCLUDE = (
    bnns.BNNSPoolingFunctionAverageCountIncludePadding,
    bnns.BNNSPoolingFunctionAverageCountExcludePadding,
)
RELU, TANH = bnns.BNNSActivationFunctionRectifiedLinear, bnns.BNNSActivationFunctionTanh


def layer(
    function: int,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    kernel: int | tuple[int, int] = 2,
    **fields: Any,
) -> Any:
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    given = {"i_desc": image(inputs), "o_desc": image(outputs), "x_stride": 2, "y_stride": 2}
    parameters = {**given, "k_width": width, "k_height": height, "pooling_function": function, **fields}
    return bnns.BNNSLayerParametersPooling(**parameters)


def create(*arguments: Any, filter_params: Any = None, **fields: Any) -> Any:
    return bnns.BNNSFilterCreateLayerPooling(layer(*arguments, **fields), filter_params)


def apply(filter: Any, x: Array, outputs: tuple[int, ...], indices: Any = None, index_type: int | None = None) -> Array:
    y = np.full((len(x), *outputs), 7, np.float32)
    if index_type is None:
        status = bnns.BNNSPoolingFilterApplyBatch(filter, len(x), x, 0, y, 0, indices, 0)
    else:
        status = bnns.BNNSPoolingFilterApplyBatchEx(filter, len(x), x, 0, y, 0, index_type, indices, 0)
    assert status == 0, bnns.last_error()
    return y


def windows(kernel: int = 2, stride: int = 2, before: int = 0, after: int = 0) -> tuple[Any, ...]:
    return (kernel,) * 2, (stride,) * 2, ((before, after),) * 2


# ---- the structure ---------------------------------------------------------------------------------------------------


def test_pooling_parameters_in_memory() -> None:
    kind = bnns.BNNSLayerParametersPooling
    given = layer(L2, (3, 4, 6), (3, 2, 3), pad=(1, 2, 3, 4), x_dilation_stride=1)
    picture = given.to_bytes()
    assert picture[576:580] == (4).to_bytes(4, "little")
    assert picture[648:] == b"".join(n.to_bytes(8, "little") for n in (1, 2, 3, 4))
    assert kind.from_bytes(picture) == given
    assert "pooling_function=BNNSPoolingFunctionL2Norm" in repr(given)
    with pytest.raises(ValueError, match=r"pad is .* which C cannot hold"):
        layer(MAX, (1, 2, 2), (1, 1, 1), pad=(1, 2)).to_bytes()


def test_pooling_constants() -> None:
    assert (MAX, INCLUDE, EXCLUDE, UNMAX, L2) == (0, 1, 2, 3, 4)
    assert bnns.BNNSPoolingFunctionAverage == 1


# ---- forward ---------------------------------------------------------------------------------------------------------


def forward_of(function: int, x: Array, *geometry: Any) -> Array:
    if function == MAX:
        return reference.max_pool_forward(x, *geometry, (1, 1))[0]
    if function == L2:
        return reference.l2_pool_forward(x, *geometry)
    return reference.average_pool_forward(x, *geometry, function == INCLUDE)


@pytest.mark.parametrize("function", [MAX, INCLUDE, EXCLUDE, L2])
@pytest.mark.parametrize("padding", [0, 1])
def test_every_pooling_function_forward(function: int, padding: int) -> None:
    x = normal(4, 3, 6, 8)
    outputs = (3, 3 + padding, 4 + padding)
    filter = create(function, (3, 6, 8), outputs, x_padding=padding, y_padding=padding)
    expected = forward_of(function, x, *windows(before=padding, after=padding))
    np.testing.assert_allclose(apply(filter, x, outputs), expected.astype(float), rtol=1e-6, atol=1e-7)
    y = np.empty(outputs, np.float32)  # the function for any filter, on one sample
    assert bnns.BNNSFilterApply(filter, x[1], y) == 0
    np.testing.assert_allclose(y, expected[1].astype(float), rtol=1e-6, atol=1e-7)


def test_bias_and_activation_are_fused() -> None:
    x, bias = normal(2, 3, 4, 4), np.array([1, -1, 0.5], np.float32)
    activation = bnns.BNNSActivation(TANH)
    for function in (MAX, INCLUDE):
        filter = create(function, (3, 4, 4), (3, 2, 2), bias=vector(bias), activation=activation)
        expected = np.tanh(forward_of(function, x, *windows()).astype(float) + bias[:, None, None])
        np.testing.assert_allclose(apply(filter, x, (3, 2, 2)), expected, rtol=1e-6, atol=1e-7)


def test_a_bias_is_copied_unless_the_client_keeps_it() -> None:
    x = normal(1, 2, 2, 2)
    for client in (False, True):
        bias = np.zeros(2, np.float32)
        flags = bnns.BNNSFlagsUseClientPtr if client else 0
        parameters = bnns.BNNSFilterParameters(flags=flags)
        filter = create(MAX, (2, 2, 2), (2, 1, 1), bias=vector(bias), filter_params=parameters)
        before = apply(filter, x, (2, 1, 1))
        bias += 10
        np.testing.assert_array_equal(apply(filter, x, (2, 1, 1)), before + (10 if client else 0))


@pytest.mark.parametrize(("index_type", "dtype"), [(None, np.uint64), (U64, np.uint64), (U32, np.uint32)])
def test_max_writes_its_indices(index_type: int | None, dtype: Any) -> None:
    x = np.round(normal(2, 3, 6, 6))
    y, expected = reference.max_pool_forward(x, *windows(), (1, 1))
    indices = np.zeros((2, 3, 3, 3), dtype)
    np.testing.assert_array_equal(apply(create(MAX, (3, 6, 6), (3, 3, 3)), x, (3, 3, 3), indices, index_type), y)
    np.testing.assert_array_equal(indices, expected)
    # Other functions ignore them.
    untouched = np.full(indices.shape, 9, dtype)
    apply(create(INCLUDE, (3, 6, 6), (3, 3, 3)), x, (3, 3, 3), untouched, index_type)
    assert (untouched == 9).all()


def test_padding_on_each_side() -> None:
    """`pad` counts only if both paddings are 0."""
    x = normal(1, 2, 5, 6)
    pad = (1, 0, 2, 1)  # left, right, up, down
    filter = create(MAX, (2, 5, 6), (2, 6, 5), kernel=(3, 3), x_stride=1, y_stride=1, pad=pad)
    expected = reference.max_pool_forward(x, (3, 3), (1, 1), ((2, 1), (1, 0)), (1, 1))[0]
    np.testing.assert_array_equal(apply(filter, x, (2, 6, 5)), expected)
    filter = create(MAX, (2, 5, 6), (2, 5, 6), kernel=(3, 3), x_stride=1, y_stride=1, x_padding=1, y_padding=1, pad=pad)
    expected = reference.max_pool_forward(x, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))[0]
    np.testing.assert_array_equal(apply(filter, x, (2, 5, 6)), expected)


def test_strides_and_dilation_of_zero_are_one() -> None:
    x = normal(1, 1, 3, 4)
    filter = create(MAX, (1, 3, 4), (1, 2, 3), x_stride=0, y_stride=0)
    np.testing.assert_array_equal(apply(filter, x, (1, 2, 3)), rg.max_pool_forward(x, 2, stride=1).y)
    filter = create(MAX, (1, 3, 4), (1, 1, 2), x_stride=1, y_stride=1, x_dilation_stride=2, y_dilation_stride=2)
    np.testing.assert_array_equal(apply(filter, x, (1, 1, 2)), rg.max_pool_forward(x, 2, stride=1, dilation=2).y)


def test_windows_overhang_and_inputs_remain() -> None:
    """Only the starts of the windows have to be inside; elements that no window reaches are ignored."""
    x, dy = normal(2, 2, 5, 5), normal(2, 2, 3, 3, seed=1)
    padding = ((0, 1), (0, 1))
    for function in (MAX, INCLUDE, EXCLUDE, L2):
        filter = create(function, (2, 5, 5), (2, 3, 3))
        expected = forward_of(function, x, (2, 2), (2, 2), padding)
        np.testing.assert_allclose(apply(filter, x, (2, 3, 3)), expected.astype(float), rtol=1e-6, atol=1e-7)
    x = normal(2, 2, 7, 8)
    indices = np.zeros((2, 2, 2, 2), np.uint64)
    for function in (MAX, INCLUDE, L2):
        filter = create(function, (2, 7, 8), (2, 2, 2))
        y = apply(filter, x, (2, 2, 2), indices)
        np.testing.assert_allclose(y, forward_of(function, x[:, :, :4, :4], *windows()).astype(float), rtol=1e-6)
        dy = normal(2, 2, 2, 2, seed=2)
        dx = gradients(filter, (2, 7, 8), x, dy, indices=indices if function == MAX else None)[0]
        used = gradients(create(function, (2, 4, 4), (2, 2, 2)), (2, 4, 4), np.ascontiguousarray(x[:, :, :4, :4]), dy)[
            0
        ]
        np.testing.assert_array_equal(dx[:, :, :4, :4], used)
        assert not dx[:, :, 4:].any()
        assert not dx[:, :, :, 4:].any()
    values = np.take_along_axis(x.reshape(2, 2, 56), indices.astype(np.int64).reshape(2, 2, 4), 2)
    np.testing.assert_array_equal(values.reshape(2, 2, 2, 2), apply(create(MAX, (2, 7, 8), (2, 2, 2)), x, (2, 2, 2)))


def test_half_precision_forward() -> None:
    import ml_dtypes

    for code, dtype in ((F16, np.float16), (BF16, ml_dtypes.bfloat16)):
        x = normal(2, 3, 4, 4).astype(dtype)
        descriptors = {"i_desc": image((3, 4, 4), data_type=code), "o_desc": image((3, 2, 2), data_type=code)}
        y = np.empty((2, 3, 2, 2), dtype)
        for function in (MAX, INCLUDE):
            filter = create(function, (3, 4, 4), (3, 2, 2), **descriptors)
            assert bnns.BNNSFilterApplyBatch(filter, 2, x, 48, y, 12) == 0
            expected = forward_of(function, x.astype(np.float32), *windows()).astype(np.float32).astype(dtype)
            np.testing.assert_array_equal(y, expected)
        delta = image((3, 2, 2), np.ones((2, 3, 2, 2), np.float32))
        arguments = (
            2,
            x,
            48,
            image((3, 4, 4), np.zeros((2, 3, 4, 4), np.float32)),
            48,
            None,
            0,
            delta,
            12,
            None,
            None,
            0,
        )
        fails(bnns.BNNSPoolingFilterApplyBackwardBatch(filter, *arguments), "backward needs Float32")


def test_batch_strides_and_layouts() -> None:
    """Samples with gaps between them, rows with gaps, and the generic layouts of rank 3."""
    x = normal(2, 3, 4, 4)
    expected = rg.max_pool_forward(x, 2).y
    memory = np.full((2, 60), np.nan, np.float32)
    memory[:, :48] = x.reshape(2, 48)
    out = np.full((2, 20), 7, np.float32)
    filter = create(MAX, (3, 4, 4), (3, 2, 2))
    assert bnns.BNNSPoolingFilterApplyBatch(filter, 2, memory, 60, out, 20, None, 0) == 0
    np.testing.assert_array_equal(out[:, :12].reshape(2, 3, 2, 2), expected)
    assert (out[:, 12:] == 7).all()
    wide = np.full((2, 3, 4, 7), np.nan, np.float32)
    wide[..., :4] = x
    filter = create(MAX, (3, 4, 4), (3, 2, 2), i_desc=image((3, 4, 4), stride=(1, 7, 28)))
    y = np.empty((2, 3, 2, 2), np.float32)
    assert bnns.BNNSFilterApplyBatch(filter, 2, wide, 84, y, 12) == 0
    np.testing.assert_array_equal(y, expected)
    for layout, sizes in ((bnns.BNNSDataLayout3DLastMajor, -1), (bnns.BNNSDataLayout3DFirstMajor, 1)):
        descriptors = {
            "i_desc": image((3, 4, 4), layout=layout, size=(3, 4, 4)[::sizes]),
            "o_desc": image((3, 2, 2), layout=layout, size=(3, 2, 2)[::sizes]),
        }
        np.testing.assert_array_equal(apply(create(MAX, (3, 4, 4), (3, 2, 2), **descriptors), x, (3, 2, 2)), expected)


# ---- backward --------------------------------------------------------------------------------------------------------


def gradients(
    filter: Any, inputs: tuple[int, ...], x: Any, dy: Array, y: Any = None, indices: Any = None, **fields: Any
) -> tuple[Array, Array]:
    dx, dbias = np.full((len(dy), *inputs), 3, np.float32), np.full(inputs[0], 3, np.float32)
    flags = fields.get("flags", 0)
    succeeds(bnns.BNNSPoolingFilterApplyBackwardBatch(
        filter, len(dy), x, 0, image(inputs, dx, flags=flags), 0, y, 0, image(dy.shape[1:], dy), 0,
        vector(dbias, flags=flags), indices, 0,
    ))  # fmt: skip
    return dx, dbias


@pytest.mark.parametrize("function", [MAX, INCLUDE, EXCLUDE, L2])
@pytest.mark.parametrize("padding", [0, 1])
def test_every_pooling_function_backward(function: int, padding: int) -> None:
    x = normal(4, 3, 6, 8)
    outputs = (3, 3 + padding, 4 + padding)
    filter = create(function, (3, 6, 8), outputs, x_padding=padding, y_padding=padding)
    dy = normal(4, *outputs, seed=1)
    dx, dbias = gradients(filter, (3, 6, 8), x, dy)
    geometry = windows(before=padding, after=padding)
    if function == MAX:
        at = reference.max_pool_forward(x, *geometry, (1, 1))[1]
        expected = reference.max_pool_backward(dy, at, x.shape)
        again, _ = gradients(filter, (3, 6, 8), None, dy, indices=at.astype(np.uint64))
        np.testing.assert_array_equal(again, dx)
    elif function == L2:
        expected = reference.l2_pool_backward(dy, x, reference.l2_pool_forward(x, *geometry), *geometry)
    else:
        expected = reference.average_pool_backward(dy, x.shape, *geometry, function == INCLUDE)
        again, _ = gradients(filter, (3, 6, 8), None, dy)  # the input is not needed
        np.testing.assert_array_equal(again, dx)
    np.testing.assert_allclose(dx, expected.astype(float), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dbias, dy.astype(float).sum((0, 2, 3)), rtol=1e-5, atol=1e-5)
    added, added_bias = gradients(filter, (3, 6, 8), x, dy, flags=bnns.BNNSNDArrayFlagBackpropAccumulate)
    np.testing.assert_allclose(added, dx + 3, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(added_bias, dbias + 3, rtol=1e-6, atol=1e-5)
    # The function for any filter finds the same.
    generic = np.empty_like(dx)
    status = bnns.BNNSFilterApplyBackwardBatch(
        filter, 4, x, 144, image((3, 6, 8), generic), 144, None, 0, image(outputs, dy), 0, None, None
    )
    assert status == 0
    np.testing.assert_array_equal(generic, dx)


def test_backward_through_an_activation() -> None:
    """dz = dy f' from the output; also with a bias; by differences."""
    x, bias = normal(2, 2, 4, 4).astype(np.float32), np.array([0.3, -0.2], np.float32)
    filter = create(INCLUDE, (2, 4, 4), (2, 2, 2), bias=vector(bias), activation=bnns.BNNSActivation(TANH))
    y, dy = apply(filter, x, (2, 2, 2)), normal(2, 2, 2, 2, seed=1)
    dx, dbias = gradients(filter, (2, 4, 4), None, dy, y)
    dz = dy * (1 - np.tanh(rg.average_pool_forward(x, 2).astype(float) + bias[:, None, None]) ** 2)
    expected = reference.average_pool_backward(dz, x.shape, *windows())
    np.testing.assert_allclose(dx, expected.astype(float), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dbias, dz.sum((0, 2, 3)), rtol=1e-4, atol=1e-6)
    delta = image((2, 4, 4), np.zeros_like(x))
    arguments = (2, x, 0, delta, 0, None, 0, image((2, 2, 2), dy), 0, None, None, 0)
    fails(bnns.BNNSPoolingFilterApplyBackwardBatch(filter, *arguments), "out is NULL")
    silu = create(MAX, (2, 4, 4), (2, 2, 2), activation=bnns.BNNSActivation(bnns.BNNSActivationFunctionSiLU))
    assert bnns.BNNSPoolingFilterApplyBackwardBatch(silu, *arguments[:5], y, *arguments[6:]) == -1
    linear = create(MAX, (2, 4, 4), (2, 2, 2), activation=bnns.BNNSActivation(bnns.BNNSActivationFunctionLinear, 2.0))
    plain = create(MAX, (2, 4, 4), (2, 2, 2))
    np.testing.assert_array_equal(gradients(linear, (2, 4, 4), x, dy)[0], gradients(plain, (2, 4, 4), x, 2 * dy)[0])


@pytest.mark.parametrize(("index_type", "dtype"), [(U64, np.uint64), (U32, np.uint32)])
def test_unpooling(index_type: int, dtype: Any) -> None:
    whole = normal(2, 3, 4, 6)
    x, at = reference.max_pool_forward(whole, *windows(), (1, 1))
    indices = at.astype(dtype)
    filter = create(UNMAX, (3, 2, 3), (3, 4, 6))
    y = apply(filter, x, (3, 4, 6), indices, index_type)
    np.testing.assert_array_equal(y, reference.max_unpool_forward(x, at, whole.shape))
    dx = np.empty_like(x)
    status = bnns.BNNSPoolingFilterApplyBackwardBatchEx(
        filter, 2, None, 0, image((3, 2, 3), dx), 0, None, 0, image((3, 4, 6), whole), 0, None, index_type, indices, 0
    )
    assert status == 0
    np.testing.assert_array_equal(dx, reference.max_unpool_backward(whole, at))
    fails(bnns.BNNSFilterApplyBatch(filter, 2, x, 0, y, 0), "UnMax needs them")


def test_a_gradient_in_the_memory_of_another_array() -> None:
    x = normal(2, 3, 4, 4)
    filter = create(MAX, (3, 4, 4), (3, 4, 4), kernel=3, x_stride=1, y_stride=1, x_padding=1, y_padding=1)
    dy = normal(2, 3, 4, 4, seed=1)
    expected, _ = gradients(filter, (3, 4, 4), x, dy)
    for shared in (dy.copy(), x.copy()):
        source, gradient = (shared, dy) if np.array_equal(shared, x) else (x, shared)
        status = bnns.BNNSPoolingFilterApplyBackwardBatch(
            filter, 2, source, 0, image((3, 4, 4), shared), 0, None, 0, image((3, 4, 4), gradient), 0, None, None, 0
        )
        assert status == 0
        np.testing.assert_array_equal(shared, expected)


def test_deltas_of_another_shape() -> None:
    """As in Apple's sample: the gradient of a fully connected layer is a vector."""
    x, dy = normal(2, 3, 4, 4), normal(2, 12, seed=1)
    dx = np.empty((2, 48), np.float32)
    filter = create(MAX, (3, 4, 4), (3, 2, 2))
    delta = Descriptor(layout=bnns.BNNSDataLayoutVector, size=(48,), data=dx, data_type=F32)
    given = Descriptor(layout=bnns.BNNSDataLayoutVector, size=(12,), data=dy, data_type=F32)
    arguments = (2, x, 48, delta, 48, None, 0, given, 12, None, None, 0)
    assert bnns.BNNSPoolingFilterApplyBackwardBatch(filter, *arguments) == 0
    expected, _ = gradients(filter, (3, 4, 4), x, dy.reshape(2, 3, 2, 2))
    np.testing.assert_array_equal(dx.reshape(2, 3, 4, 4), expected)
    wide = np.full((2, 6, 9), 7, np.float32)  # rows of 8 with gaps, which no strides describe as an image
    matrix = Descriptor(
        layout=bnns.BNNSDataLayoutRowMajorMatrix, size=(8, 6), stride=(1, 9), data=wide, data_type=F32, flags=1
    )
    assert bnns.BNNSPoolingFilterApplyBackwardBatch(filter, 2, x, 48, matrix, 54, *arguments[5:]) == 0
    np.testing.assert_array_equal(wide[:, :, :8].reshape(2, 3, 4, 4), expected + 7)
    assert (wide[:, :, 8] == 7).all()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling_function": 5}, "pooling_function is 5, which is not a BNNSPoolingFunction"),
        ({"o_desc": image((2, 2, 2))}, "o_desc has 2 channels, expected 3 as in i_desc"),
        ({"o_desc": image((3, 2, 2), data_type=F16)}, "i_desc.data_type is BNNSDataTypeFloat32, but o_desc"),
        ({"i_desc": image((3, 4, 4), layout=bnns.BNNSDataLayoutVector)}, "i_desc.layout is BNNSDataLayoutVector"),
        ({"k_width": 0}, "k_width is 0, must be at least 1"),
        ({"o_desc": image((3, 2, 3))}, "3 elements along x, whose windows with stride 2 start up to 4, but"),
        ({"x_dilation_stride": 2, "pooling_function": INCLUDE}, "x_dilation_stride is 2, but only Max and UnMax"),
        ({"pad": (1, 2)}, r"pad is \(1, 2\), must have 4 entries"),
        ({"x_padding": -1}, "x_padding is -1, which a size_t cannot hold"),
        ({"bias": vector(np.zeros(2, np.float32))}, "expected 3 elements, one for each channel"),
        ({"x_padding": 2}, "has no element of i_desc"),
        ({"k_width": 2**32}, "must be at most 2147483647"),
        ({"o_desc": image((3, 2, 2), stride=(1, 1, 1))}, "o_desc.stride .* share memory"),
        ({"i_desc": image((3, 4, 4), data_type=bnns.BNNSDataTypeInt8)}, "it must be Float32, Float16 or BFloat16"),
        ({"activation": bnns.BNNSActivation(99)}, "which is not a BNNSActivationFunction"),
    ],
)  # fmt: skip
def test_pooling_layers_that_cannot_be_made(fields: dict[str, Any], message: str) -> None:
    assert create(MAX, (3, 4, 4), (3, 2, 2), **fields) is None
    assert re.search(message, str(bnns.last_error())), bnns.last_error()


def test_pooling_calls_that_fail_write_nothing() -> None:
    x, y = normal(2, 3, 4, 4), np.full((2, 3, 2, 2), 7, np.float32)
    filter = create(MAX, (3, 4, 4), (3, 2, 2))
    dx = np.full((2, 3, 4, 4), 7, np.float32)
    at = np.zeros((2, 3, 2, 2), np.uint64)
    delta, given = image((3, 4, 4), dx), image((3, 2, 2), np.ones((2, 3, 2, 2), np.float32))
    forward: dict[str, Any] = {
        "filter": filter, "batch_size": 2, "in_": x, "in_stride": 0, "out": y, "out_stride": 0, "indices": None,
        "idx_stride": 0,
    }  # fmt: skip
    for changes, message in (
        ({"filter": None}, "filter is NULL"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 3}, "out has 96 bytes, but 3 samples"),
        ({"in_": None}, "in is NULL"),
        ({"out": None}, "out is NULL"),
        ({"out": x}, "out overlaps in in memory"),
        ({"indices": at[:1]}, "indices has 96 bytes"),
        ({"indices": at.astype(np.int32)}, "indices has elements of type int32"),
        ({"indices": y}, "indices has elements of type float32"),
    ):
        assert bnns.BNNSPoolingFilterApplyBatch(**{**forward, **changes}) == -1, message
        assert message in str(bnns.last_error()), bnns.last_error()
    assert bnns.BNNSPoolingFilterApplyBatchEx(**{**forward, "indices": at}, indices_data_type=F32) == -1
    assert "indices_data_type is BNNSDataTypeFloat32, must be" in str(bnns.last_error())
    backward: dict[str, Any] = {
        "filter": filter, "batch_size": 2, "in_": x, "in_stride": 0, "in_delta": delta, "in_delta_stride": 0,
        "out": None, "out_stride": 0, "out_delta": given, "out_delta_stride": 0, "bias_delta": None, "indices": None,
        "idx_stride": 0,
    }  # fmt: skip
    for changes, message in (
        ({"out_delta": None}, "out_delta is NULL"),
        ({"in_": None}, "in is NULL, and the positions of the largest elements are found from it"),
        ({"indices": at + np.uint64(16)}, "is 16, but the pixels of a plane are 16"),
        ({"out_delta": image((3, 4, 4), dx)}, "out_delta has 48 elements, expected 12"),
        ({"bias_delta": vector(np.zeros(4, np.float32))}, "bias_delta has 4 elements, expected 3"),
        ({"bias_delta": vector(dx.reshape(-1)[:3])}, "in_delta overlaps bias_delta"),
        ({"in_delta": image((3, 4, 4), dx, flags=2)}, "in_delta.flags is 2"),
        ({"in_delta": image((3, 4, 4))}, "in_delta.data is NULL"),
    ):
        assert bnns.BNNSPoolingFilterApplyBackwardBatch(**{**backward, **changes}) == -1, message
        assert message in str(bnns.last_error()), bnns.last_error()
    assert bnns.BNNSFilterApplyBackwardBatch(filter, 2, x, 0, delta, 0, None, 0, given, 0, given, None) == -1
    assert "a pooling has no weights" in str(bnns.last_error())
    assert (y == 7).all()
    assert (dx == 7).all()
    assert not at.any()
    other = bnns.BNNSFilterCreateLayerActivation(
        bnns.BNNSLayerParametersActivation(i_desc=image((3, 4, 4)), o_desc=image((3, 4, 4)))
    )
    fails(bnns.BNNSPoolingFilterApplyBatch(other, 2, x, 0, y, 0, None, 0), "filter is not a pooling filter")
    bnns.BNNSFilterDestroy(filter)
    fails(bnns.BNNSPoolingFilterApplyBatch(filter, 2, x, 0, y, 0, None, 0), "filter has been destroyed")
    not_created(bnns.BNNSFilterCreateLayerPooling(None), "layer_params is NULL")


# ---- Swift -----------------------------------------------------------------------------------------------------------


def test_swift_pooling_layer() -> None:
    shape, smaller = BNNS.Shape.imageCHW(8, 6, 3), BNNS.Shape.imageCHW(4, 3, 3)
    x, y = normal(2, 3, 6, 8), np.empty((2, 3, 3, 4), np.float32)
    dy, dx = normal(2, 36, seed=1), np.empty_like(x)
    indices = np.zeros((2, 3, 3, 4), np.int64)
    kinds: list[tuple[Any, int]] = [
        (BNNS.PoolingType.max(indices=indices, xDilationStride=1, yDilationStride=1), MAX),
        (BNNS.PoolingType.max(), MAX),
        (BNNS.PoolingType.maxEx(), MAX),
        (BNNS.PoolingType.average(countIncludesPadding=True), INCLUDE),
        (BNNS.PoolingType.average(countIncludesPadding=False), EXCLUDE),
        (BNNS.PoolingType.l2Norm, L2),
    ]
    for kind, function in kinds:
        with BNNS.PoolingLayer(
            type=kind,
            input=shape.descriptor(),
            output=smaller.descriptor(),
            bias=None,
            activation=BNNS.ActivationFunction.identity,
            kernelSize=(2, 2),
            stride=(2, 2),
            padding=BNNS.ConvolutionPadding.zero,
        ) as pool:
            pool.apply(batchSize=2, input=shape.descriptor(x), output=smaller.descriptor(y))
            np.testing.assert_allclose(y, forward_of(function, x, *windows()).astype(float), rtol=1e-6, atol=1e-7)
            pool.applyBackward(
                batchSize=2,
                input=shape.descriptor(x),
                output=smaller.descriptor(y),
                outputGradient=BNNS.Shape.vector(36).descriptor(dy),
                generatingInputGradient=shape.descriptor(dx),
            )
            expected, _ = gradients(create(function, (3, 6, 8), (3, 3, 4)), (3, 6, 8), x, dy.reshape(y.shape))
            np.testing.assert_array_equal(dx, expected)
        with pytest.raises(BNNS.Error, match=r"layerApplyFail: .*destroyed"):
            pool.apply(batchSize=2, input=shape.descriptor(x), output=smaller.descriptor(y))
    np.testing.assert_array_equal(indices, reference.max_pool_forward(x, *windows(), (1, 1))[1])
    at = indices.astype(np.uint32)
    descriptor = BNNS.Shape.imageCHW(4, 3, 3).descriptor(at, U32)
    for kind in (BNNS.PoolingType.unMax(indices), BNNS.PoolingType.unMaxEx(descriptor)):
        unpool = BNNS.PoolingLayer(
            type=kind, input=smaller.descriptor(), output=shape.descriptor(), kernelSize=(2, 2), stride=(2, 2)
        )
        out = np.empty_like(x)
        unpool.apply(batchSize=2, input=smaller.descriptor(y), output=shape.descriptor(out))
        np.testing.assert_array_equal(out, reference.max_unpool_forward(y, indices, x.shape))


def test_swift_pooling_padding_and_errors() -> None:
    shape = BNNS.Shape.imageCHW(5, 4, 1)
    x, y = normal(1, 1, 4, 5), np.empty((1, 1, 4, 5), np.float32)
    for padding, pads in (
        (BNNS.ConvolutionPadding.symmetric(x=1, y=1), ((1, 1), (1, 1))),
        (BNNS.ConvolutionPadding.asymmetric(left=2, right=0, up=0, down=2), ((0, 2), (2, 0))),
    ):
        pool = BNNS.PoolingLayer(
            type=BNNS.PoolingType.average(countIncludesPadding=False),
            input=shape.descriptor(),
            output=shape.descriptor(),
            kernelSize=(3, 3),
            stride=(1, 1),
            padding=padding,
        )
        pool.apply(batchSize=1, input=shape.descriptor(x), output=shape.descriptor(y))
        expected = reference.average_pool_forward(x, (3, 3), (1, 1), pads, False)
        np.testing.assert_allclose(y, expected.astype(float), rtol=1e-6, atol=1e-7)
    with pytest.raises(BNNS.Error, match="arrayDescriptorInvalidData: input has no data"):
        pool.apply(batchSize=1, input=shape.descriptor(), output=shape.descriptor(y))
    small = BNNS.Shape.vector(19).descriptor(x.reshape(-1)[:19])
    with pytest.raises(BNNS.Error, match="input has 19 elements of BNNSDataTypeFloat32, but the layer was made for 20"):
        pool.apply(batchSize=1, input=small, output=shape.descriptor(y))
    with pytest.raises(BNNS.Error, match=r"unableToCreateLayer: .* along y"):
        BNNS.PoolingLayer(
            type=BNNS.PoolingType.max(), input=shape.descriptor(), output=shape.descriptor(), kernelSize=(2, 2),
            stride=(2, 2),
        )  # fmt: skip
    assert math.isfinite(float(y.sum()))
