"""BNNS reduction filters."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import created, fails, not_created

Descriptor = bnns.BNNSNDArrayDescriptor
F32, IMAGE, FIRST3 = bnns.BNNSDataTypeFloat32, bnns.BNNSDataLayoutImageCHW, bnns.BNNSDataLayout3DFirstMajor
SHAPE = (3, 2, 5)
CLIENT = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)

# Code by code, in float64: the value over axes of u, the input times the weights.
ORACLE: dict[int, Any] = {
    0: lambda u, axes: u.max(axes, keepdims=True),
    1: lambda u, axes: u.min(axes, keepdims=True),
    4: lambda u, axes: u.mean(axes, keepdims=True),
    6: lambda u, axes: u.sum(axes, keepdims=True),
    7: lambda u, axes: (u**2).sum(axes, keepdims=True),
    8: lambda u, axes: np.log(u + 0.5).sum(axes, keepdims=True),
    9: lambda u, axes: np.abs(u).sum(axes, keepdims=True),
    12: lambda u, axes: np.sqrt((u**2).sum(axes, keepdims=True)),
    13: lambda u, axes: np.log(np.exp(u).sum(axes, keepdims=True)),
    14: lambda u, axes: u.prod(axes, keepdims=True),
    16: lambda u, axes: np.log(u.sum(axes, keepdims=True)),
}


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """Positive, so that logarithms exist."""
    return np.random.default_rng(seed).uniform(0.2, 2.0, shape).astype(np.float32)


def image(shape: tuple[int, ...] = SHAPE, data: Any = None, **fields: Any) -> Any:
    return Descriptor(**{"layout": IMAGE, "size": shape[::-1], "data": data, "data_type": F32, **fields})


def layer(code: int, out: Any, weights: np.ndarray | None = None, **fields: Any) -> Any:
    w_desc = Descriptor() if weights is None else image(weights.shape, weights)
    given = {"i_desc": image(), "o_desc": out, "w_desc": w_desc, "reduce_func": code, "epsilon": 0.5}
    return bnns.BNNSLayerParametersReduction(**{**given, **fields})


def create(code: int, out: tuple[int, ...], weights: np.ndarray | None = None, **fields: Any) -> Any:
    return created(bnns.BNNSFilterCreateLayerReduction(layer(code, image(out), weights, **fields), CLIENT))


def applied(filter: Any, x: np.ndarray, out: tuple[int, ...]) -> np.ndarray:
    y = np.empty((len(x), *out), np.float32)
    assert bnns.BNNSFilterApplyBatch(filter, len(x), x, 0, y, 0) == 0, bnns.last_error()
    return y


def backward(filter: Any, x: Any, dy: np.ndarray, dx: Any = None, dw: Any = None, bias: Any = None) -> int:
    in_delta = None if dx is None else image(data=dx)
    weights_delta = None if dw is None else image(data=dw)
    return bnns.BNNSFilterApplyBackwardBatch(
        filter, len(dy), x, 0, in_delta, 0, None, 0, image(dy.shape[1:], dy), 0, weights_delta, bias
    )


@pytest.mark.parametrize("out", [(3, 1, 1), (1, 2, 5), (1, 1, 1), (3, 2, 1), SHAPE])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("code", ORACLE)
def test_every_function_and_its_gradients(code: int, weighted: bool, out: tuple[int, ...]) -> None:
    """Values against float64 formulas, gradients against finite differences of those."""
    x, w = drawn(4, *SHAPE), drawn(*SHAPE, seed=1) if weighted else None
    axes = tuple(1 + k for k in range(3) if out[k] == 1)
    filter = create(code, out, w)
    wide, weights = x.astype(np.float64), np.ones(SHAPE) if w is None else w.astype(np.float64)

    def value(x: Any, w: Any) -> Any:
        return ORACLE[code](x * w, axes)

    assert np.allclose(applied(filter, x, out), value(wide, weights), rtol=1e-6, atol=1e-6)
    dy = drawn(4, *out, seed=2) - 1
    dx, dw = np.full_like(x, 7), np.full(SHAPE, 7, np.float32)
    assert backward(filter, x, dy, dx, dw if weighted else None) == 0, bnns.last_error()
    step = 1e-6
    for k, (gradient, at) in enumerate(((dx, wide), (dw, weights))):
        if k == 1 and not weighted:
            continue
        for seed in range(3):
            direction = np.random.default_rng(seed).normal(size=at.shape)
            ends = [
                (value(*((wide + s * direction, weights) if k == 0 else (wide, weights + s * direction))) * dy).sum()
                for s in (step, -step)
            ]
            slope = (gradient * direction).sum()
            assert np.isclose((ends[0] - ends[1]) / (2 * step), slope, rtol=1e-4, atol=1e-4)


def test_the_mean_of_what_is_not_zero() -> None:
    x = drawn(4, *SHAPE)
    x[:, 0, :, :2] = 0
    y = applied(create(5, (3, 1, 1)), x, (3, 1, 1))
    counts = (x != 0).sum((2, 3), keepdims=True)
    assert np.allclose(y, x.sum((2, 3), keepdims=True) / counts, rtol=1e-6)
    assert (applied(create(5, (3, 1, 1)), np.zeros_like(x), (3, 1, 1)) == 0).all()
    w = drawn(*SHAPE, seed=1)
    w[:, 1, :] = 0
    filter = create(5, (3, 1, 1), w)
    y = applied(filter, x, (3, 1, 1))
    assert np.allclose(y[..., 0, 0], (x * w).sum((2, 3)) / 5, rtol=1e-6)
    dy, dx = drawn(4, 3, 1, 1, seed=2), np.empty_like(x)
    assert backward(filter, x, dy, dx) == 0
    assert np.allclose(dx, dy * w / 5, rtol=1e-6)


@pytest.mark.parametrize("data_type", [F32, bnns.BNNSDataTypeInt32, bnns.BNNSDataTypeUInt64])
def test_the_index_of_a_maximum_or_minimum(data_type: int) -> None:
    dtype = {F32: np.float32, bnns.BNNSDataTypeInt32: np.int32}.get(data_type, np.uint64)
    x = drawn(4, *SHAPE)
    x[:, :, 1, 3] = x[:, :, 1].max(-1)  # a tie: the lowest index wins
    for code, expected in ((2, x.argmax(-1)), (3, x.argmin(-1))):
        made = layer(code, image((3, 2, 1), data_type=data_type))
        filter, y = bnns.BNNSFilterCreateLayerReduction(made), np.empty((4, 3, 2), dtype)
        assert bnns.BNNSFilterApplyBatch(filter, 4, x, 0, y, 0) == 0, bnns.last_error()
        assert np.array_equal(y, expected)
    assert bnns.BNNSFilterCreateLayerReduction(layer(2, image((3, 1, 1)))) is None
    assert "an index of a maximum or minimum is along one axis" in (bnns.last_error() or "")


def test_ties_of_extrema_give_the_gradient_to_one() -> None:
    x = np.ones((1, *SHAPE), np.float32)
    dx = np.empty_like(x)
    assert backward(create(0, (3, 1, 1)), x, np.ones((1, 3, 1, 1), np.float32), dx) == 0
    assert dx.reshape(3, 10).tolist() == [[1] + [0] * 9] * 3


def test_products_with_zeros() -> None:
    x = np.array([[2, 3, 4, 0, 5], [0, 3, 0, 1, 1], [2, 1, 1, 1, 3]], np.float32).reshape(1, 3, 1, 5)
    sample = image((3, 1, 5))
    filter = bnns.BNNSFilterCreateLayerReduction(layer(14, image((3, 1, 1)), i_desc=sample))
    dx = np.empty_like(x)
    dy = np.ones((1, 3, 1, 1), np.float32)
    status = bnns.BNNSFilterApplyBackwardBatch(
        filter, 1, x, 0, image((3, 1, 5), dx), 0, None, 0, image((3, 1, 1), dy), 0, None, None
    )
    assert status == 0
    assert dx.reshape(3, 5).tolist() == [[0, 0, 0, 120, 0], [0] * 5, [3, 6, 6, 6, 2]]


def test_norms_and_exponentials_of_large_numbers() -> None:
    x = np.full((1, *SHAPE), 1e30, np.float32)
    assert np.allclose(applied(create(12, (1, 1, 1)), x, (1, 1, 1)), 1e30 * np.sqrt(30), rtol=1e-6)
    y = applied(create(13, (1, 1, 1)), np.full_like(x, 500), (1, 1, 1))
    assert np.allclose(y, 500 + np.log(30), rtol=1e-6)
    dx = np.full_like(x, 7)
    assert backward(create(12, (1, 1, 1)), np.zeros_like(x), np.ones((1, 1, 1, 1), np.float32), dx) == 0
    assert (dx == 0).all()
    assert np.isnan(applied(create(6, (1, 1, 1)), np.full_like(x, np.nan), (1, 1, 1))).all()


def test_logical_functions_and_booleans() -> None:
    x = np.random.default_rng(0).random((4, *SHAPE)) < 0.5
    boolean = bnns.BNNSDataTypeBoolean
    for code, expected in ((10, x.any((2, 3))), (11, x.all((2, 3)))):
        made = layer(code, image((3, 1, 1), data_type=boolean), i_desc=image(data_type=boolean))
        filter, y = bnns.BNNSFilterCreateLayerReduction(made), np.empty((4, 3), np.bool_)
        assert bnns.BNNSFilterApplyBatch(filter, 4, x, 0, y, 0) == 0, bnns.last_error()
        assert np.array_equal(y, expected)
        numbers = applied(create(code, (3, 1, 1)), x.astype(np.float32), (3, 1, 1))
        assert np.array_equal(numbers[..., 0, 0], expected.astype(np.float32))
        assert backward(create(code, (3, 1, 1)), x.astype(np.float32), numbers, np.empty((4, *SHAPE), np.float32)) == -1
        assert "has no gradient" in (bnns.last_error() or "")


def test_layouts_types_and_weights_of_the_client() -> None:
    x = drawn(2, *SHAPE).astype(ml_dtypes.bfloat16)
    made = bnns.BNNSLayerParametersReduction(
        Descriptor(layout=FIRST3, size=SHAPE, data_type=bnns.BNNSDataTypeBFloat16),
        Descriptor(layout=FIRST3, size=(3, 1, 5), data_type=F32),
        reduce_func=bnns.BNNSReduceFunctionSum,
    )
    filter, y = bnns.BNNSFilterCreateLayerReduction(made), np.empty((2, 3, 1, 5), np.float32)
    assert bnns.BNNSFilterApplyBatch(filter, 2, x, 0, y, 0) == 0, bnns.last_error()
    assert np.array_equal(y, x.astype(np.float64).sum(2, keepdims=True).astype(np.float32))
    vector = Descriptor(layout=bnns.BNNSDataLayoutVector, size=(1,), data_type=F32)
    x32, w = drawn(2, *SHAPE), drawn(*SHAPE, seed=1)
    for parameters in (None, CLIENT):
        weights = w.copy()
        filter = bnns.BNNSFilterCreateLayerReduction(layer(6, vector, weights), parameters)
        weights *= 2
        y = applied(filter, x32, (1,))
        assert np.allclose(y[:, 0], (x32 * (w if parameters is None else weights)).sum((1, 2, 3)), rtol=1e-6)


def test_gradients_that_need_no_input_and_accumulation() -> None:
    dy, dx = drawn(4, 3, 1, 1), np.ones((4, *SHAPE), np.float32)
    assert backward(create(4, (3, 1, 1)), None, dy, dx) == 0, bnns.last_error()
    assert np.allclose(dx, np.broadcast_to(dy / 10, dx.shape), rtol=1e-6)
    delta = image(data=dx, flags=1)
    status = bnns.BNNSFilterApplyBackwardBatch(
        create(6, (3, 1, 1)), 4, None, 0, delta, 0, None, 0, image((3, 1, 1), dy), 0, None, None
    )
    assert status == 0
    assert np.allclose(dx, np.broadcast_to(1.1 * dy, dx.shape), rtol=1e-6)


def test_the_direct_function() -> None:
    x, y = drawn(*SHAPE), np.full((3, 1, 1), 7, np.float32)
    made = layer(6, image((3, 1, 1), y), i_desc=image(data=x))
    assert bnns.BNNSDirectApplyReduction(made) == 0
    assert np.allclose(y[:, 0, 0], x.sum((1, 2)), rtol=1e-6)
    fails(bnns.BNNSDirectApplyReduction(layer(6, image((3, 1, 1), y))), "i_desc.data is NULL")
    assert bnns.BNNSDirectApplyReduction(None) == -1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (layer(15, image((3, 1, 1))), "reduce_func is 15, which this layer does not have"),
        (layer(6, image((2, 1, 1))), "o_desc.size is (1, 1, 2), expected that of i_desc, (5, 2, 3), with 1 for"),
        (layer(6, image((3, 1, 1)), drawn(3, 5, 2)), "w_desc.size is (2, 5, 3), expected (5, 2, 3) as in i_desc"),
        (
            layer(6, image((3, 1, 1)), i_desc=image(data_type=bnns.BNNSDataTypeInt32)),
            "i_desc.data_type is BNNSDataTypeInt32",
        ),
        (layer(6, image((3, 1, 1), data_type=bnns.BNNSDataTypeInt32)), "o_desc.data_type is BNNSDataTypeInt32"),
        (None, "layer_params is NULL"),
    ],
)
def test_creation_fails(made: Any, reason: str) -> None:
    not_created(bnns.BNNSFilterCreateLayerReduction(made), reason)


def test_backward_fails_and_touches_nothing() -> None:
    x, dy, dx = drawn(4, *SHAPE), drawn(4, 3, 1, 1), np.full((4, *SHAPE), 7, np.float32)
    square = create(7, (3, 1, 1))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (square, {"x": None, "dx": dx}, "in is NULL, and in_delta is computed from it"),
        (square, {"x": x, "dx": dx, "dw": dx}, "weights_delta is given, but w_desc.data was NULL"),
        (square, {"x": x, "dx": dx, "bias": image((3, 1, 1), dy)}, "bias_delta is given, but a reduction has no bias"),
        (create(6, (3, 1, 1), drawn(*SHAPE)), {"x": x, "dx": dx, "dw": dx[0]}, "overlaps"),
    ]
    for filter, given, reason in cases:
        fails(backward(filter, dy=dy, **given), reason)
        assert (dx == 7).all()


def test_swifts_reductions() -> None:
    shape, out = BNNS.Shape.imageCHW(5, 2, 3), BNNS.Shape.imageCHW(1, 1, 3)
    x, w, y = drawn(4, *SHAPE), drawn(*SHAPE, seed=1), np.empty((4, 3), np.float32)
    dy, dx, dw = drawn(4, 3, seed=2), np.empty_like(x), np.empty_like(w)
    with BNNS.ReductionLayer(
        function=BNNS.ReductionFunction.sum,
        input=shape.descriptor(),
        output=out.descriptor(),
        weights=shape.descriptor(w),
    ) as swift:
        swift.apply(batchSize=4, input=shape.descriptor(x), output=out.descriptor(y))
        swift.applyBackward(
            batchSize=4,
            input=shape.descriptor(x),
            outputGradient=out.descriptor(dy),
            generatingInputGradient=shape.descriptor(dx),
            generatingWeightsGradient=shape.descriptor(dw),
        )
    assert np.allclose(y, (x * w).sum((2, 3)), rtol=1e-6)
    assert np.allclose(dx, dy[:, :, None, None] * w, rtol=1e-6)
    assert np.allclose(dw, (dy[:, :, None, None] * x).sum(0), rtol=1e-5)
    function = BNNS.ReductionFunction.sumOfLogs(epsilon=0.25)
    BNNS.applyReduction(function, input=shape.descriptor(x[0]), output=out.descriptor(y[0]))
    assert np.allclose(y[0], np.log(x[0].astype(np.float64) + 0.25).sum((1, 2)), rtol=1e-5)
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: BNNSDirectApplyReduction: o_desc\.size"):
        BNNS.applyReduction(function, input=out.descriptor(y[0]), output=shape.descriptor(x[0]))
