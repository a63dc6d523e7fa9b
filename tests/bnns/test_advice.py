"""What works as documented but few programs mean is logged as a warning, once, and changes no result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from support.bnns import F32, Descriptor, created, describe, fails, image, normal, succeeds, vector
from support.bnns_attention import Layer as Attention
from support.bnns_inside import advise_once
from support.bnns_lstm import DEFAULT_ACTIVATIONS, forward
from support.bnns_lstm import Layer as Lstm
from support.bnns_norm import Layer

IDENTITY = bnns.BNNSActivationFunctionIdentity


class Advice:
    """The warnings that calls log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def taken(self) -> list[str]:
        found = [one.getMessage() for one in self._caplog.records if one.levelno == logging.WARNING]
        self._caplog.clear()
        return found

    def once(self, call: Callable[[], object], message: str) -> None:
        """The call logs exactly this, and when it is repeated nothing."""
        for expected in ([message], []):
            call()
            assert self.taken() == expected


@pytest.fixture
def advice(caplog: pytest.LogCaptureFixture) -> Iterator[Advice]:
    advise_once.cache_clear()
    with caplog.at_level(logging.WARNING, "retrograd.bnns"):
        yield Advice(caplog)
    advise_once.cache_clear()


def relu(size: int, stride: int = 0) -> Any:
    layer = bnns.BNNSLayerParametersActivation(
        i_desc=vector(size, stride=stride),
        o_desc=vector(size),
        activation=bnns.BNNSActivation(bnns.BNNSActivationFunctionRectifiedLinear),
    )
    return created(bnns.BNNSFilterCreateLayerActivation(layer))


# ---- strides ---------------------------------------------------------------------------------------------------------


def test_a_stride_smaller_than_a_sample(advice: Advice) -> None:
    x, y = normal(12), np.empty((4, 6), np.float32)
    filter = relu(6)

    def call() -> None:
        y.fill(np.nan)
        assert bnns.BNNSFilterApplyBatch(filter, 4, x, 2, y, 6) == 0, bnns.last_error()
        assert np.array_equal(y, np.maximum(np.lib.stride_tricks.sliding_window_view(x, 6)[::2], 0))

    advice.once(call, "in_stride is 2, but a sample of in spans 6 values: samples overlap")
    # A single sample has no neighbour; 0 means packed; a stride of a whole sample is the usual one.
    for batch, stride in ((1, 2), (2, 0), (2, 6)):
        assert bnns.BNNSFilterApplyBatch(filter, batch, x, stride, y, 6) == 0
    assert advice.taken() == []


def test_interleaved_samples_do_not_overlap(advice: Advice) -> None:
    x, y = normal(6, 4), np.empty((4, 6), np.float32)
    assert bnns.BNNSFilterApplyBatch(relu(6, stride=4), 4, x, 1, y, 6) == 0, bnns.last_error()
    assert np.array_equal(y, np.maximum(x.T, 0))
    assert advice.taken() == []


def test_elements_of_a_sample_that_share_memory(advice: Advice) -> None:
    x, y = normal(5), np.empty((2, 3, 1), np.float32)
    rows = {"layout": bnns.BNNSDataLayout2DFirstMajor, "size": (3, 2), "data_type": F32}
    layer = bnns.BNNSLayerParametersReduction(
        i_desc=Descriptor(**rows, stride=(1, 1)),
        o_desc=Descriptor(**{**rows, "size": (3, 1)}),
        reduce_func=bnns.BNNSReduceFunctionSum,
    )
    filter = created(bnns.BNNSFilterCreateLayerReduction(layer))

    def call() -> None:
        assert bnns.BNNSFilterApplyBatch(filter, 1, x, 0, y, 0) == 0, bnns.last_error()
        assert np.allclose(y[0, :, 0], x[:3] + x[1:4])

    advice.once(call, "in.stride is (1, 1), with which elements of size=(3, 2) (slowest first) share memory")


def test_strides_of_results_are_refused(advice: Advice) -> None:
    """Two samples cannot be written to one place: an output or a gradient, of every kind of filter."""
    x, y = normal(4, 6), np.full(24, 7, np.float32)
    fails(bnns.BNNSFilterApplyBatch(relu(6), 4, x, 6, y, 2), "out_stride is 2, but a sample of out spans 6 values")
    given = None, 0, vector(6, y), 2, x, 6, vector(6, normal(4, 6, seed=1)), 6, None, None
    assert bnns.BNNSFilterApplyBackwardBatch(relu(6), 4, *given) == -1
    assert "in_delta_stride is 2, but a sample of in_delta spans 6 values" in (bnns.last_error() or "")
    fails(bnns.BNNSFilterApplyBatch(relu(6), 0, x, 6, y, 6), "batch_size is 0")
    assert (y == 7).all()
    assert advice.taken() == []


# ---- normalization ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["batch", "instance", "layer", "group"])
def test_backward_after_an_evaluation_pass(kind: str, advice: Advice) -> None:
    layer = Layer(kind, (4, 2, 3), groups=2 if kind == "group" else 0)
    x, dy = normal(3, 4, 2, 3), normal(3, 4, 2, 3, seed=1)
    dx, again = np.empty_like(x), np.empty_like(x)
    y = layer.forward(x)
    assert layer.backward(dy, y, in_delta=image((4, 2, 3), dx)) == 0
    assert advice.taken() == []
    layer.forward(normal(3, 4, 2, 3, seed=2), training=False)

    def call() -> None:
        again.fill(np.nan)
        assert layer.backward(dy, y, in_delta=image((4, 2, 3), again)) == 0
        assert np.array_equal(again, dx)

    message = "the last forward call had training false: backward computes the gradients of the training pass before it"
    advice.once(call, message)
    advise_once.cache_clear()
    layer.forward(x)
    call()  # the training pass came last
    assert advice.taken() == []


def test_epsilon_of_0(advice: Advice) -> None:
    advice.once(
        lambda: Layer("batch", (4, 2, 3), epsilon=0),
        "epsilon is 0: where all values that are normalized together are equal, the output is NaN",
    )
    assert np.isnan(Layer("batch", (4, 2, 3), epsilon=0).forward(np.ones((3, 4, 2, 3), np.float32))).all()


# ---- optimizers ------------------------------------------------------------------------------------------------------

SGD, ADAM, RMSPROP = (
    (getattr(bnns, f"BNNSOptimizer{name}Fields"), getattr(bnns, f"BNNSOptimizerFunction{name}"), kinds, fields)
    for name, kinds, fields in (
        ("SGDMomentum", 0, {}),
        ("Adam", 2, {"beta1": 0.9, "beta2": 0.99, "time_step": 1, "epsilon": 1e-3}),
        ("RMSProp", 1, {"alpha": 0.9, "epsilon": 1e-3}),
    )
)
USUAL = {"learning_rate": 0.5, "gradient_scale": 1.0}
STILL = {
    "learning_rate is 0: the parameters do not change": {"learning_rate": 0},
    "gradient_scale is 0: gradients have no effect": {"gradient_scale": 0},
    "clip_gradients_min and clip_gradients_max are 0: gradients have no effect": {"clip_gradients": True},
}


def step(optimizer: Any, gradient: list[float], **changed: Any) -> np.ndarray:
    kind, function, kinds, fields = optimizer
    p, g = np.ones(2, np.float32), np.array(gradient, np.float32)
    accumulators = [describe(np.zeros(2, np.float32)) for _ in range(kinds)]
    given = kind(**{**USUAL, **fields, **changed})
    succeeds(bnns.BNNSOptimizerStep(function, given, 1, [describe(p)], [describe(g)], accumulators or None))
    return p


@pytest.mark.parametrize("message", STILL)
@pytest.mark.parametrize("optimizer", [SGD, ADAM, RMSPROP], ids=["sgd", "adam", "rmsprop"])
def test_fields_that_freeze_training(optimizer: Any, message: str, advice: Advice) -> None:
    assert (step(optimizer, [1, 2]) < 1).all()
    assert advice.taken() == []

    def call() -> None:
        assert (step(optimizer, [1, 2], **STILL[message]) == 1).all()

    advice.once(call, message)


@pytest.mark.parametrize("optimizer", [ADAM, RMSPROP], ids=["adam", "rmsprop"])
def test_an_optimizer_with_epsilon_of_0(optimizer: Any, advice: Advice) -> None:
    def call() -> None:
        p = step(optimizer, [1, 0], epsilon=0)
        assert p[0] < 1
        assert np.isnan(p[1])

    advice.once(call, "epsilon is 0: parameters whose gradient is 0 become NaN")


# ---- LSTM ------------------------------------------------------------------------------------------------------------


def activations(layer: Lstm, gates: int, candidate: int, hidden: int) -> None:
    params = layer.params
    params.lstm_flags &= ~DEFAULT_ACTIVATIONS
    for gate in (params.input_gate, params.forget_gate, params.output_gate):
        gate.activation = bnns.BNNSActivation(gates)
    params.candidate_gate.activation = bnns.BNNSActivation(candidate)
    params.hidden_activation = bnns.BNNSActivation(hidden)


def test_an_lstm_whose_activations_were_left_at_identity(advice: Advice) -> None:
    sigmoid, tanh = bnns.BNNSActivationFunctionSigmoid, bnns.BNNSActivationFunctionTanh
    layer = Lstm()
    assert forward(layer.params, None, None, 0) == 0
    usual = layer.values.y.copy()
    activations(layer, sigmoid, tanh, tanh)
    assert forward(layer.params, None, None, 0) == 0
    assert np.array_equal(layer.values.y, usual)
    assert advice.taken() == []
    missing = "lstm_flags has no BNNSLayerFlagsLSTMDefaultActivations, and these are Identity: "
    gates = "input_gate.activation, forget_gate.activation, candidate_gate.activation, output_gate.activation"

    def call() -> None:
        layer.params.seq_len = layer.T  # a new version of the structure
        assert forward(layer.params, None, None, 0) == 0, bnns.last_error()

    activations(layer, sigmoid, tanh, IDENTITY)
    advice.once(call, f"{missing}hidden_activation")
    assert not np.allclose(layer.values.y, usual)
    activations(layer, IDENTITY, IDENTITY, IDENTITY)
    advice.once(call, f"{missing}{gates}, hidden_activation")
    # With identities everywhere, c = i g + f c and h = o c.
    values = layer.values
    x, h, c = values.x[0], values.h0[0, 0], values.c0[0, 0]
    i, f, g, o = (x @ one["iw"][0, 0].T + h @ one["hw"][0, 0].T + one["b"][0, 0] for one in values.gates)
    np.testing.assert_allclose(values.y[0], o * (i * g + f * c), rtol=1e-5, atol=1e-6)


def test_dropout_of_an_lstm_with_one_layer(advice: Advice) -> None:
    layer = Lstm()
    cache = np.zeros(bnns.BNNSComputeLSTMTrainingCacheCapacity(layer.params), np.uint8)
    assert forward(layer.params, None, cache, cache.size) == 0
    usual = layer.values.y.copy()
    layer.params.dropout = 0.5

    def call() -> None:
        assert forward(layer.params, None, cache, cache.size) == 0
        assert np.array_equal(layer.values.y, usual)

    message = "dropout is 0.5, but num_layers is 1: dropout is applied between layers, so there is none"
    advice.once(call, message)


# ---- other fields that are 0 in a new structure ----------------------------------------------------------------------


def test_products_with_alpha_of_0(advice: Advice) -> None:
    a, y = normal(3, 2), np.full((3, 3), 7, np.float32)
    square = {"layout": bnns.BNNSDataLayout2DFirstMajor, "data_type": F32}
    layer = bnns.BNNSLayerParametersBroadcastMatMul(
        transB=True, quadratic=True, iA_desc=Descriptor(**square, size=(3, 2)), o_desc=Descriptor(**square, size=(3, 3))
    )

    def call() -> None:
        filter = bnns.BNNSFilterCreateLayerBroadcastMatMul(layer)
        assert bnns.BNNSFilterApply(filter, a, y) == 0, bnns.last_error()
        assert (y == 0).all()

    advice.once(call, "alpha is 0: the product and all gradients are 0")
    layer.alpha = 1.0
    assert bnns.BNNSFilterApply(bnns.BNNSFilterCreateLayerBroadcastMatMul(layer), a, y) == 0
    assert np.allclose(y, a @ a.T)
    assert advice.taken() == []


@pytest.mark.parametrize(
    ("name", "alpha", "beta", "value"),
    [
        ("Linear", 0, 0, 0),
        ("LinearWithBias", 0, 3, 3),
        ("ScaledTanh", 0, 1, 0),
        ("ScaledTanh", 1, 0, 0),
        ("Clamp", 2, 2, 2),
        ("HardSigmoid", 0, 0.25, 0.25),
        ("Softplus", 0, 1, 0),
    ],
)
def test_activations_that_are_constant(name: str, alpha: float, beta: float, value: float, advice: Advice) -> None:
    code, x, y = getattr(bnns, f"BNNSActivationFunction{name}"), normal(6), np.empty(6, np.float32)
    layer = bnns.BNNSLayerParametersActivation(i_desc=vector(6), o_desc=vector(6))

    def call() -> None:
        layer.activation = bnns.BNNSActivation(code, alpha, beta)
        filter = created(bnns.BNNSFilterCreateLayerActivation(layer))
        assert bnns.BNNSFilterApply(filter, x, y) == 0
        assert (y == value).all()

    shown = f"BNNSActivationFunction{name} with alpha {alpha:g} and beta {beta:g}"
    advice.once(call, f"{shown} is constant: no gradient passes through it")


@pytest.mark.parametrize("rate", [50.0, 1.0, -0.5, float("nan")])
def test_a_dropout_of_attention_that_means_none(rate: float, advice: Advice) -> None:
    usual = Attention()
    usual.run()

    def call() -> None:
        layer = Attention(dropout=rate)
        layer.run()
        assert np.array_equal(layer.output.view, usual.output.view)

    assert advice.taken() == []
    advice.once(call, f"dropout is {rate:g}, not between 0 and 1: nothing is dropped")
