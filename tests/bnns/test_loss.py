"""Loss filters of retrograd.bnns: Apple's formulas and numbers, memory, gradients, failures, Swift."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNS
from retrograd.bnns import BNNSNDArrayDescriptor as Descriptor
from support.bnns import F32, fails, not_created, vector

NONE, SUM, WEIGHTED, MEAN, NONZERO = range(5)
SOFTMAX, SIGMOID, SQUARE, HUBER, YOLO, LOG, COSINE, HINGE, ABSOLUTE, CATEGORICAL = range(1, 11)
OF_SAMPLES = (SOFTMAX, COSINE, CATEGORICAL)
FUNCTIONS = [function for function in range(1, 11) if function != YOLO]
STRUCTURES: dict[int, type[Any]] = {
    SOFTMAX: bnns.BNNSLayerParametersLossSoftmaxCrossEntropy,
    SIGMOID: bnns.BNNSLayerParametersLossSigmoidCrossEntropy,
    HUBER: bnns.BNNSLayerParametersLossHuber,
}
N, C = 4, 5


def create(function: int, reduction: int = MEAN, parameters: Any = None, size: int = C, **options: Any) -> Any:
    fields: dict[str, Any] = {"i_desc": vector(size), "o_desc": vector(1), **options}
    extra = {key: fields.pop(key) for key in ("divide_by_classes",) if key in fields}
    if function == HUBER:
        fields.setdefault("huber_delta", 0.7)
    structure = STRUCTURES.get(function, bnns.BNNSLayerParametersLossBase)
    layer = structure(function=function, reduction=reduction, **fields)
    return bnns.BNNSFilterCreateLayerLoss(layer, parameters, **extra)


def draw(function: int, batch: int = N, size: int = C, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, t = rng.normal(0, 1.5, (batch, size)), rng.normal(0, 1, (batch, size))
    if function in (SOFTMAX, SIGMOID):
        t = rng.random((batch, size))
    elif function in (HINGE, CATEGORICAL):
        t = np.round(rng.random((batch, size)))
        t[:, 0] = 1
    elif function == LOG:
        x, t = rng.uniform(0.05, 0.95, (batch, size)), rng.random((batch, size))
    elif function == COSINE:
        x, t = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (x, t))
    return x.astype(np.float32), t.astype(np.float32)


def specified(function: int, x: np.ndarray, t: np.ndarray, w: Any = 1.0, smooth: float = 0.0) -> tuple[Any, Any]:
    """The specification's table, word for word: the losses and their gradients."""
    x, t = x.astype(float), t.astype(float)
    e = x - t
    if function in (SOFTMAX, CATEGORICAL):
        p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        if function == SOFTMAX:
            t = t * (1 - smooth) + smooth / C
            losses = -(w / C) * (t * np.log(p)).sum(-1)
            return losses, np.reshape(w, (-1, 1)) / C * (p * t.sum(-1, keepdims=True) - t)
        m = (t != 0).sum(-1)
        return -(w * t * np.log(p)).sum(-1) / m, np.where(t != 0, p - 1 / m[:, None], p)
    if function == SIGMOID:
        s, t = 1 / (1 + np.exp(-x)), t * (1 - smooth) + smooth / 2
        return w * (-t * np.log(s) - (1 - t) * np.log(1 - s)), w * (s - t)
    if function == SQUARE:
        return w * e**2, 2 * w * e
    if function == HUBER:
        d = float(np.float32(0.7))
        return w * np.where(abs(e) <= d, e**2 / 2, d * (abs(e) - d / 2)), w * np.clip(e, -d, d)
    if function == ABSOLUTE:
        return w * abs(e), w * np.where(x >= t, 1, -1)
    if function == LOG:
        p, q = x + 1e-7, 1 - x + 1e-7
        return w * (-t * np.log(p) - (1 - t) * np.log(q)), w * (p - t) / (p * q)
    if function == COSINE:
        losses = 1 - (np.reshape(w, (-1, 1)) * t * x).sum(-1)
        return losses, -t + (1 - losses)[:, None] * x
    side = 2 * t - 1
    return w * np.maximum(0, 1 - side * x), w * np.where(side * x <= 1, -side, 0)


def apply(
    filter: Any, x: np.ndarray, t: np.ndarray, weights: Any = None, count: int = 1, flags: int = 0
) -> tuple[int, np.ndarray, np.ndarray]:
    batch, size = x.shape
    out, dx = np.full(count, 7, np.float32), np.full(x.shape, 7, np.float32)
    weights_size = 0 if weights is None else weights.size
    status = bnns.BNNSLossFilterApplyBatch(
        filter, batch, x, size, t, size, weights, weights_size, out, vector(size, dx, flags=flags), size
    )
    return status, out, dx


def backward(
    filter: Any, x: np.ndarray, t: np.ndarray, out_delta: Any, stride: int = 0, weights: Any = None, flags: int = 0
) -> tuple[int, np.ndarray]:
    batch, size = x.shape
    dx = np.full(x.shape, 7, np.float32)
    weights_size = 0 if weights is None else weights.size
    in_delta = vector(size, dx, flags=flags)
    status = bnns.BNNSLossFilterApplyBackwardBatch(
        filter, batch, x, size, in_delta, size, t, size, weights, weights_size, out_delta, stride
    )
    return status, dx


def values_of(function: int) -> int:
    return N if function in OF_SAMPLES else N * C


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_losses_are_those_of_the_specification(function: int) -> None:
    x, t = draw(function)
    losses, gradient = specified(function, x, t)
    count = values_of(function)
    for reduction, divisor in ((NONE, 1), (SUM, 1), (MEAN, count), (WEIGHTED, count), (NONZERO, count)):
        filter = create(function, reduction)
        status, out, dx = apply(filter, x, t, count=count if reduction == NONE else 1)
        assert status == 0
        expected = losses.ravel() if reduction == NONE else losses.sum() / divisor
        np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(dx, gradient / divisor, rtol=5e-6, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("reduction", [NONE, SUM, WEIGHTED, MEAN, NONZERO])
def test_weights_one_for_all_or_one_for_each_loss(function: int, reduction: int) -> None:
    x, t = draw(function, seed=1)
    count = values_of(function)
    each = np.random.default_rng(2).random(count).astype(np.float32)
    each[::3] = 0
    for weights in (np.array([0.5], np.float32), each):
        w = np.broadcast_to(weights.astype(float), count).reshape((N,) if function in OF_SAMPLES else (N, C))
        losses, _ = specified(function, x, t, w[:, None] if function == CATEGORICAL else w)
        divisor = {NONE: 1, SUM: 1, MEAN: count, WEIGHTED: w.sum(), NONZERO: np.count_nonzero(w)}[reduction]
        status, out, dx = apply(create(function, reduction), x, t, weights, count if reduction == NONE else 1)
        assert status == 0
        expected = losses.ravel() if reduction == NONE else losses.sum() / divisor
        np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-6)
        _, slopes = specified(function, x, t)
        wide = w[:, None] if function in OF_SAMPLES else w
        np.testing.assert_allclose(dx, wide * slopes / divisor, rtol=5e-6, atol=1e-6)


def test_the_measured_mean_is_over_all_elements() -> None:
    """Three entries, one sample: 10/3, as Apple's library gives."""
    x, t = np.array([[1, 2, 3]], np.float32), np.array([[2, 2, 0]], np.float32)
    status, out, dx = apply(create(SQUARE, MEAN, size=3), x, t)
    assert status == 0
    assert out[0] == np.float32(10 / 3)
    np.testing.assert_allclose(dx, [[-2 / 3, 0, 2]], rtol=1e-7)
    assert np.array_equal(apply(create(SQUARE, NONE, size=3), x, t, count=3)[2], [[-2, 0, 6]])  # 2 (x - t), as measured


@pytest.mark.parametrize("function", [SOFTMAX, SIGMOID])
def test_label_smoothing(function: int) -> None:
    x, t = draw(function)
    status, out, dx = apply(create(function, SUM, label_smooth=0.25), x, t)
    losses, gradient = specified(function, x, t, smooth=0.25)
    assert status == 0
    np.testing.assert_allclose(out, losses.sum(), rtol=2e-6)
    np.testing.assert_allclose(dx, gradient, rtol=5e-6, atol=1e-7)


def test_the_division_by_classes_is_a_switch() -> None:
    x, t = draw(SOFTMAX)
    _, divided, dx = apply(create(SOFTMAX), x, t)
    _, whole, dx_whole = apply(create(SOFTMAX, divide_by_classes=False), x, t)
    assert whole[0] == pytest.approx(C * divided[0], rel=1e-6)
    np.testing.assert_allclose(dx_whole, C * dx, rtol=1e-6)
    expected, gradient = rg.softmax_cross_entropy(x, t)
    assert whole[0] == np.float32(expected)
    assert np.array_equal(dx_whole, np.asarray(gradient))


def test_slopes_at_kinks_are_the_documented_ones() -> None:
    x = np.array([[0, 1, -1, 2]], np.float32)
    assert np.array_equal(apply(create(ABSOLUTE, SUM, size=4), x, x)[2], [[1, 1, 1, 1]])
    t = np.array([[1, 1, 0, 1]], np.float32)
    assert np.array_equal(apply(create(HINGE, SUM, size=4), x, t)[2], [[-1, -1, 1, 0]])


def test_weights_of_classes_of_a_categorical_cross_entropy() -> None:
    x, t = draw(CATEGORICAL)
    w = np.random.default_rng(5).random((N, C)).astype(np.float32)
    status, out, dx = apply(create(CATEGORICAL, NONE), x, t, w, N)
    assert status == 0
    np.testing.assert_allclose(out, specified(CATEGORICAL, x, t, w.astype(float))[0], rtol=2e-6)
    _, gradient = rg.categorical_cross_entropy(x, t, weights=w, reduction="none")
    assert np.array_equal(dx, np.asarray(gradient))
    fails(apply(create(CATEGORICAL, WEIGHTED), x, t, w)[0], "a weight for each class")


def test_a_mean_over_weights_of_zero_is_zero() -> None:
    x, t = draw(SQUARE)
    for reduction in (WEIGHTED, NONZERO):
        status, out, dx = apply(create(SQUARE, reduction), x, t, np.zeros(N * C, np.float32))
        assert status == 0
        assert out[0] == 0
        assert not dx.any()


# ---- backward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("reduction", [NONE, SUM, WEIGHTED, MEAN, NONZERO])
@pytest.mark.parametrize("weighted", [False, True])
def test_backward_with_ones_is_apply(function: int, reduction: int, weighted: bool) -> None:
    x, t = draw(function)
    count = values_of(function)
    weights = np.linspace(0, 1, count).astype(np.float32) if weighted else None
    filter = create(function, reduction)
    _, _, expected = apply(filter, x, t, weights, count if reduction == NONE else 1)
    ones = np.ones(count if reduction == NONE else 1, np.float32)
    per_sample = count // N if reduction == NONE else 1
    status, dx = backward(filter, x, t, vector(per_sample, ones), per_sample, weights)
    assert status == 0
    np.testing.assert_allclose(dx, expected, rtol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_backward_multiplies_by_the_gradient_of_each_loss(function: int) -> None:
    x, t = draw(function)
    count = values_of(function)
    dloss = np.random.default_rng(3).standard_normal(count).astype(np.float32)
    _, _, slopes = apply(create(function, NONE), x, t, count=count)
    expected = slopes * (dloss.reshape(N, 1) if function in OF_SAMPLES else dloss.reshape(N, C))
    per_sample = count // N
    padded = np.zeros((N, per_sample + 2), np.float32)
    padded[:, :per_sample] = dloss.reshape(N, per_sample)
    deltas = [(vector(per_sample, dloss), per_sample), (vector(per_sample, dloss), 0), (vector(count, dloss), 0)]
    for descriptor, stride in (*deltas, (vector(per_sample, padded), per_sample + 2)):
        status, dx = backward(create(function, NONE), x, t, descriptor, stride)
        assert status == 0
        np.testing.assert_allclose(dx, expected, rtol=1e-6, atol=1e-7)
    status, dx = backward(create(function, MEAN), x, t, vector(1, np.array([-2], np.float32)))
    assert status == 0
    np.testing.assert_allclose(dx, slopes * (-2 / count), rtol=1e-6)


def test_gradients_are_set_or_accumulated_by_their_flag() -> None:
    x, t = draw(HUBER)
    for filter in (create(HUBER), create(HUBER, SUM)):
        _, _, plain = apply(filter, x, t)
        status, _, added = apply(filter, x, t, flags=bnns.BNNSNDArrayFlagBackpropAccumulate)
        assert status == 0
        np.testing.assert_allclose(added, plain + 7, rtol=1e-6)
        one = vector(1, np.ones(1, np.float32))
        np.testing.assert_allclose(backward(filter, x, t, one, flags=1)[1], plain + 7, rtol=1e-6)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_strides_between_samples_and_elements(function: int) -> None:
    x, t = draw(function)
    count = values_of(function)
    _, out, dx = apply(create(function, NONE), x, t, count=count)
    strided = Descriptor(layout=bnns.BNNSDataLayoutVector, size=(C,), stride=(2,), data_type=F32)
    filter = create(function, NONE, i_desc=strided)
    wide_x, wide_t, wide_dx = (np.full((N, 13), 9, np.float32) for _ in range(3))
    wide_x[:, : 2 * C : 2], wide_t[:, : 2 * C : 2] = x, t
    strided.data = wide_dx
    again = np.zeros(count, np.float32)
    assert bnns.BNNSLossFilterApplyBatch(filter, N, wide_x, 13, wide_t, 13, None, 0, again, strided, 13) == 0
    assert np.array_equal(again, out)
    assert np.array_equal(wide_dx[:, : 2 * C : 2], dx)
    wide_dx[:, : 2 * C : 2] = 9
    assert (wide_dx == 9).all()


def test_a_batch_stride_of_zero_is_packed() -> None:
    x, t = draw(SQUARE)
    _, out, dx = apply(create(SQUARE), x, t)
    again, gradient = np.zeros(1, np.float32), np.zeros_like(x)
    status = bnns.BNNSLossFilterApplyBatch(create(SQUARE), N, x, 0, t, 0, None, 0, again, vector(C, gradient), 0)
    assert status == 0
    assert np.array_equal(again, out)
    assert np.array_equal(gradient, dx)


def test_without_a_gradient() -> None:
    x, t = draw(SQUARE)
    out = np.zeros(1, np.float32)
    assert bnns.BNNSLossFilterApplyBatch(create(SQUARE), N, x, C, t, C, None, 0, out, None, 0) == 0
    assert out[0] == apply(create(SQUARE), x, t)[1][0]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("over", ["in", "labels", "weights", "half in"])
def test_the_gradient_may_overlap_an_input(function: int, over: str) -> None:
    x, t = draw(function)
    weights = np.linspace(0.1, 1, values_of(function)).astype(np.float32)
    _, out, dx = apply(create(function), x, t, weights)
    memory = np.zeros(2 * N * C, np.float32)
    arrays = {"in": x.copy(), "labels": t.copy(), "weights": weights.copy()}
    name = over.rpartition(" ")[2]
    place = memory[: arrays[name].size]
    place[:] = arrays[name].ravel()
    arrays[name] = place
    target = memory[7:] if over.startswith("half") else memory
    again = np.zeros(1, np.float32)
    status = bnns.BNNSLossFilterApplyBatch(
        create(function), N, arrays["in"], C, arrays["labels"], C, arrays["weights"], weights.size, again,
        vector(C, target), C,
    )  # fmt: skip
    assert status == 0
    assert np.array_equal(again, out)
    assert np.array_equal(target[: N * C].reshape(N, C), dx)


def test_an_image_may_be_the_gradient_of_a_vector() -> None:
    x, t = draw(SQUARE, 2, 12)
    _, _, dx = apply(create(SQUARE, size=12), x, t)
    gradient, out = np.zeros((2, 3, 2, 2), np.float32), np.zeros(1, np.float32)
    image = Descriptor(layout=bnns.BNNSDataLayoutImageCHW, size=(2, 2, 3), data=gradient, data_type=F32)
    filter = create(SQUARE, size=12)
    assert bnns.BNNSLossFilterApplyBatch(filter, 2, x, 12, t, 12, None, 0, out, image, 12) == 0
    assert np.array_equal(gradient.reshape(2, 12), dx)


def test_entrywise_losses_of_images() -> None:
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((2, 2, 3, 4, 5), dtype=np.float32)
    image = Descriptor(layout=bnns.BNNSDataLayoutImageCHW, size=(5, 4, 3), data_type=F32)
    out = np.zeros(1, np.float32)
    filter = create(ABSOLUTE, i_desc=image)
    assert bnns.BNNSLossFilterApplyBatch(filter, 2, x, 60, t, 60, None, 0, out, None, 0) == 0
    assert out[0] == np.float32(rg.mean_absolute_error(x, t)[0])
    not_created(create(SOFTMAX, i_desc=image), "the loss of a sample needs a vector")
    flat = Descriptor(layout=bnns.BNNSDataLayoutImageCHW, size=(1, 1, 60), data_type=F32)
    assert create(SOFTMAX, i_desc=flat) is not None


def test_filters_do_not_depend_on_the_number_of_threads() -> None:
    x, t = draw(SIGMOID, 300, 1000)
    results = [
        apply(create(SIGMOID, size=1000, parameters=bnns.BNNSFilterParameters(0, threads)), x, t) for threads in (1, 3)
    ]
    assert np.array_equal(results[0][1], results[1][1])
    assert np.array_equal(results[0][2], results[1][2])


# ---- failures --------------------------------------------------------------------------------------------------------


def test_yolo_is_not_supported(caplog: pytest.LogCaptureFixture) -> None:
    layer = bnns.BNNSLayerParametersLossYolo(function=YOLO, reduction=SUM, i_desc=vector(C), o_desc=vector(1))
    with caplog.at_level(logging.INFO, "retrograd.bnns"):
        assert bnns.BNNSFilterCreateLayerLoss(layer) is None
    assert "BNNSLossFunctionYolo: Apple has not published" in (bnns.last_error() or "")
    assert caplog.records[-1].levelno == logging.INFO
    with pytest.raises(BNNS.Error, match=r"unableToCreateLayer: .*BNNSLossFunctionYolo"):
        BNNS.LossLayer(
            input=vector(C),
            output=vector(1),
            lossFunction=BNNS.LossFunction.yolo(parameters=BNNS.YoloParameters(number_of_anchor_boxes=2)),
            lossReduction=BNNS.LossReduction.sum,
        )


@pytest.mark.parametrize(
    ("function", "fields", "reason"),
    [
        (0, {}, "function is 0x0, which is not a BNNSLossFunction"),
        (11, {}, "function is 0xb, which is not a BNNSLossFunction"),
        (SQUARE, {"reduction": 5}, "reduction is 0x5, which is not a BNNSLossReductionFunction"),
        (SOFTMAX, {"label_smooth": 1.5}, "label_smooth is 1.5, must be from 0 to 1"),
        (SIGMOID, {"label_smooth": math.nan}, "label_smooth is nan, must be from 0 to 1"),
        (HUBER, {"huber_delta": 0.0}, "huber_delta is 0.0, must be a finite number above 0"),
        (SQUARE, {"o_desc": vector(2)}, "o_desc has 2 elements, expected 1 for a reduced loss"),
        (SQUARE, {"i_desc": vector(0)}, "i_desc.size is (0,), and an extent must be at least 1"),
        (
            SQUARE,
            {"i_desc": Descriptor(layout=bnns.BNNSDataLayoutVector, size=(C,), data_type=bnns.BNNSDataTypeFloat16)},
            "i_desc.data_type is BNNSDataTypeFloat16; a loss needs BNNSDataTypeFloat32",
        ),
    ],
)
def test_creation_fails(function: int, fields: dict[str, Any], reason: str) -> None:
    options = {"reduction": MEAN, **fields}
    not_created(create(function, **options), reason)


def test_structures_go_with_their_function() -> None:
    for nothing in (None, 3, bnns.BNNSActivation()):
        assert bnns.BNNSFilterCreateLayerLoss(nothing) is None  # type: ignore[arg-type]
        assert "must be BNNSLayerParametersLossBase" in (bnns.last_error() or "")
    layer = bnns.BNNSLayerParametersLossHuber(SOFTMAX, vector(C), vector(1), MEAN, 1.0)
    assert bnns.BNNSFilterCreateLayerLoss(layer) is None
    assert "BNNSLossFunctionSoftmaxCrossEntropy, but layer_params is of type" in (bnns.last_error() or "")
    base = bnns.BNNSLayerParametersLossBase(SOFTMAX, vector(C), vector(1), MEAN)  # without smoothing
    assert bnns.BNNSFilterCreateLayerLoss(base) is not None
    assert "function=BNNSLossFunctionSoftmaxCrossEntropy" in repr(base)
    assert "reduction=BNNSLossReductionMean" in repr(base)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"batch": 0}, "batch_size is 0"),
        ({"x": None}, "in is NULL"),
        ({"x": bytearray(79)}, "in has 79 bytes"),
        ({"t": None}, "labels is NULL"),
        ({"t": np.zeros(20)}, "labels has elements of type float64"),
        ({"weights_size": 3}, "weights_size is 3, expected 0, 1, 20 for a batch of 4"),
        ({"weights_size": 20}, "weights is NULL"),
        ({"weights": np.zeros(19, np.float32), "weights_size": 20}, "weights has 76 bytes"),
        ({"out": None}, "out is NULL"),
        ({"out": bytes(4)}, "out is read-only"),
        ({"delta": vector(4, np.zeros(20, np.float32))}, "in_delta.size is (4,), expected size=(5,) as in i_desc"),
        ({"delta": vector(C)}, "in_delta.data is NULL"),
        ({"delta": vector(C, np.zeros(19, np.float32))}, "in_delta.data has 76 bytes"),
        ({"delta": vector(C, np.zeros(20, np.float32), flags=2)}, "in_delta.flags is 2"),
        ({"delta": vector(C, np.zeros(20, np.float32)), "stride": 3}, "in_delta_stride is 3"),
        ({"delta": 5}, "in_delta is of type int"),
    ],
)
def test_apply_fails_and_touches_nothing(fields: dict[str, Any], reason: str) -> None:
    x, t = draw(SQUARE)
    out, dx = np.full(1, 7, np.float32), np.full((N, C), 7, np.float32)
    given = {"batch": N, "x": x, "t": t, "weights": None, "weights_size": 0, "out": out, "delta": vector(C, dx)}
    given |= {"stride": C, **fields}
    fails(bnns.BNNSLossFilterApplyBatch(
        create(SQUARE), given["batch"], given["x"], C, given["t"], C, given["weights"], given["weights_size"],
        given["out"], given["delta"], given["stride"],
    ), reason)  # fmt: skip
    assert (out == 7).all()
    assert (dx == 7).all()


def test_results_over_one_another_are_refused() -> None:
    x, t = draw(SQUARE)
    memory = np.full(N * C, 7, np.float32)
    filter = create(SQUARE)
    fails(bnns.BNNSLossFilterApplyBatch(filter, N, x, C, t, C, None, 0, memory[3:4], vector(C, memory), C), "overlaps")
    assert (memory == 7).all()


def test_backward_fails_and_touches_nothing() -> None:
    x, t = draw(SQUARE)
    one = np.ones(1, np.float32)
    for reduction, out_delta, reason in (
        (MEAN, None, "out_delta is NULL"),
        (MEAN, vector(2, np.ones(2, np.float32)), "out_delta has 2 elements, but the losses of a batch of 4 are 1"),
        (NONE, vector(1, one), "out_delta has 1 elements, but the losses of a batch of 4 are 20"),
        (NONE, vector(C, np.ones(19, np.float32)), "out_delta.data has 76 bytes"),
        (MEAN, vector(1), "out_delta.data is NULL"),
    ):
        status, dx = backward(create(SQUARE, reduction), x, t, out_delta)
        fails(status, reason)
        assert (dx == 7).all()
    status = bnns.BNNSLossFilterApplyBackwardBatch(create(SQUARE), N, x, C, None, C, t, C, None, 0, vector(1, one), 0)
    assert status == -1
    assert "in_delta is NULL" in (bnns.last_error() or "")


def test_general_and_loss_functions_fail_on_other_filters() -> None:
    x, t = draw(SQUARE)
    filter, y = create(SQUARE), np.full((N, C), 7, np.float32)
    assert bnns.BNNSFilterApply(filter, x, y) == -1
    fails(bnns.BNNSFilterApplyBatch(filter, N, x, C, y, C), "BNNSLossFilterApplyBatch")
    status = bnns.BNNSFilterApplyBackwardBatch(filter, N, x, C, vector(C, y), C, None, 0, vector(C, t), C, None, None)
    assert status == -1
    assert (y == 7).all()
    layer = bnns.BNNSLayerParametersActivation(vector(C), vector(C), bnns.BNNSActivation(1))
    other = bnns.BNNSFilterCreateLayerActivation(layer)
    fails(apply(other, x, t)[0], "filter is not a loss filter")
    bnns.BNNSFilterDestroy(filter)
    fails(apply(filter, x, t)[0], "destroyed")


def test_images_of_a_loss_structure() -> None:
    layer = bnns.BNNSLayerParametersLossHuber(HUBER, vector(C), vector(1), SUM, 0.5)
    image = layer.to_bytes()
    assert len(image) == 368
    assert np.frombuffer(image[364:368], np.float32)[0] == 0.5
    assert bnns.BNNSLayerParametersLossHuber.from_bytes(image) == layer
    # All variants begin alike: a Huber structure read as the base is the same loss without its parameter.
    assert bnns.BNNSLayerParametersLossBase.from_bytes(image).reduction == SUM


# ---- Swift -----------------------------------------------------------------------------------------------------------

SWIFT = {
    SOFTMAX: BNNS.LossFunction.softmaxCrossEntropy(labelSmoothing=0.0),
    SIGMOID: BNNS.LossFunction.sigmoidCrossEntropy(labelSmoothing=0.0),
    SQUARE: BNNS.LossFunction.meanSquareError,
    HUBER: BNNS.LossFunction.huber(huberDelta=0.7),
    LOG: BNNS.LossFunction.log,
    COSINE: BNNS.LossFunction.cosineDistance,
    HINGE: BNNS.LossFunction.hinge,
    ABSOLUTE: BNNS.LossFunction.meanAbsoluteError,
    CATEGORICAL: BNNS.LossFunction.categoricalCrossEntropy,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("reduction", list(BNNS.LossReduction))
def test_swift_gives_the_same_numbers(function: int, reduction: Any) -> None:
    x, t = draw(function)
    count = values_of(function)
    shape = BNNS.Shape.vector(C)
    output = count if reduction is BNNS.LossReduction.none else 1
    weights = np.linspace(0, 1, count).astype(np.float32)
    for given, broadcast in ((None, False), (weights, False), (weights[3:], True)):
        used = None if given is None else given[:1] if broadcast else given
        _, expected, gradient = apply(create(function, reduction.value), x, t, used, output)
        out, dx = np.zeros(output, np.float32), np.zeros((N, C), np.float32)
        with BNNS.LossLayer(
            input=shape.descriptor(),
            output=BNNS.Shape.vector(1).descriptor(),
            lossFunction=SWIFT[function],
            lossReduction=reduction,
        ) as layer:
            layer.apply(
                batchSize=N,
                input=shape.descriptor(x),
                labels=shape.descriptor(t),
                output=BNNS.Shape.vector(output).descriptor(out),
                weights=None if given is None else BNNS.Shape.vector(given.size).descriptor(given),
                broadcastsWeights=broadcast,
                generatingInputGradient=shape.descriptor(dx),
            )
        assert np.array_equal(out, expected)
        assert np.array_equal(dx, gradient)


def test_swift_throws() -> None:
    shape, one = BNNS.Shape.vector(C), BNNS.Shape.vector(1)
    with pytest.raises(BNNS.Error, match=r"unableToCreateLayer: .*huber_delta is 0.0"):
        BNNS.LossLayer(
            input=shape.descriptor(),
            output=one.descriptor(),
            lossFunction=BNNS.LossFunction.huber(huberDelta=0),
            lossReduction=BNNS.LossReduction.sum,
        )
    layer = BNNS.LossLayer(
        input=shape.descriptor(),
        output=one.descriptor(),
        lossFunction=BNNS.LossFunction.meanSquareError,
        lossReduction=BNNS.LossReduction.reductionMean,
    )
    x, t = draw(SQUARE)
    out, dx = np.zeros(1, np.float32), np.zeros((N, C), np.float32)
    good = {
        "batchSize": N,
        "input": shape.descriptor(x),
        "labels": shape.descriptor(t),
        "output": one.descriptor(out),
        "generatingInputGradient": shape.descriptor(dx),
    }
    for name, wrong, reason in (
        ("input", shape.descriptor(), "arrayDescriptorInvalidData: input has no data"),
        ("labels", BNNS.Shape.vector(4).descriptor(t), r"layerApplyFail: labels has 4 elements .* for 5"),
        ("batchSize", N + 1, r"layerApplyFail: .*in has 80 bytes"),
    ):
        with pytest.raises(BNNS.Error, match=reason):
            layer.apply(**{**good, name: wrong})
    image = BNNS.Shape.imageCHW(1, 1, C)
    layer.apply(**{**good, "input": image.descriptor(x), "generatingInputGradient": image.descriptor(dx)})
    assert np.array_equal(dx, apply(create(SQUARE), x, t)[2])
    layer.close()
    with pytest.raises(BNNS.Error, match="destroyed"):
        layer.apply(**good)
