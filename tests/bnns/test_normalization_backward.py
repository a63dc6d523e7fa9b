"""BNNS normalization filters: forward in place, backward, and fused activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core, bnns
from retrograd.ops.activation import ACTIVATIONS
from support.bnns import BF16, F16, F32, TYPES, Allocator, describe, fails, image, normal, succeeds
from support.bnns_norm import KINDS, Layer, activation, tanh

# ---- forward in place, backward (section 8) --------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_in_place(kind: str, training: bool) -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer, other = (Layer(kind, (3, 2, 5), groups=1, activation=tanh()) for _ in range(2))
    y = other.forward(x, training)
    place = x.copy()
    layer.forward(place, training, y=place)
    assert np.array_equal(place, y)
    if training:
        parameter = (3, 2, 5) if kind == "layer" else (3,)
        for got, want in zip(layer.gradients(dy, place, parameter), other.gradients(dy, y, parameter), strict=True):
            assert np.array_equal(got, want)


def test_output_half_over_the_input() -> None:
    memory = np.zeros(150, np.float32)
    x = normal(4, 3, 2, 5)
    for training in (True, False):
        memory[:120] = x.ravel()
        layer = Layer("batch", (3, 2, 5))
        succeeds(bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, memory, 30, memory[15:], 30, training))
        assert np.array_equal(memory[15:135].reshape(x.shape), Layer("batch", (3, 2, 5)).forward(x, training))


def test_the_input_may_lie_where_its_copy_goes() -> None:
    """The client knows that memory: its own allocator gave it."""
    allocator = Allocator()
    layer, other = Layer("batch", (3, 2, 5), parameters=allocator.parameters()), Layer("batch", (3, 2, 5))
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer.forward(x)
    (block,) = allocator.given
    for first in (0, 30):  # all of it; its tail, of fewer samples
        memory = np.frombuffer(block, np.float32, 120)[first:].reshape(-1, 3, 2, 5)
        memory[...] = x[: len(memory)]
        y = layer.forward(memory)
        assert np.array_equal(y, other.forward(x[: len(memory)]))
        gradients = (one.gradients(dy[: len(y)], y, (3,)) for one in (layer, other))
        assert all(map(np.array_equal, *gradients))


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_with_gaps_or_unaligned_is_kept(kind: str) -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    parameter = (3, 2, 5) if kind == "layer" else (3,)
    other = Layer(kind, (3, 2, 5), groups=1)
    y = other.forward(x)
    expected = other.gradients(dy, y, parameter)
    gaps = np.full((4, 37), np.nan, np.float32)
    gaps[:, :30] = x.reshape(4, 30)
    unaligned = memoryview(b"\0" + x.tobytes())[1:]
    for memory, stride in ((gaps, 37), (unaligned, 30)):
        layer, out = Layer(kind, (3, 2, 5), groups=1), np.empty_like(y)
        succeeds(bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, memory, stride, out, 30, True))
        assert np.array_equal(out, y)
        assert all(map(np.array_equal, layer.gradients(dy, out, parameter), expected))


def test_the_client_may_change_its_input_before_backward() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer, other = Layer("batch", (3, 2, 5)), Layer("batch", (3, 2, 5))
    scratch = x.copy()
    y = layer.forward(scratch)
    scratch[:] = np.nan
    other.forward(x)
    assert np.array_equal(layer.gradients(dy, y, (3,))[0], other.gradients(dy, y, (3,))[0])


def test_gradients_that_are_null_are_not_produced_and_all_null_is_no_error() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), activation=tanh())
    y = layer.forward(x)
    dx, dgamma, dbeta = layer.gradients(dy, y, (3,))
    assert layer.backward(dy, y) == 0
    one = np.empty_like(x)
    assert layer.backward(dy, y, in_delta=image((3, 2, 5), one)) == 0
    assert np.array_equal(one, dx)
    for name, want in (("beta_delta", dbeta), ("gamma_delta", dgamma)):
        small = np.empty(3, np.float32)
        assert layer.backward(dy, y, **{name: describe(small)}) == 0
        assert np.array_equal(small, want)


@pytest.mark.parametrize("flags", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_each_gradient_is_set_or_accumulated_by_its_own_flag(flags: tuple[int, int, int]) -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("group", (3, 2, 5), groups=1, activation=tanh())
    y = layer.forward(x)
    plain = layer.gradients(dy, y, (3,))
    results = [np.full_like(x, 10), np.full(3, 10, np.float32), np.full(3, 10, np.float32)]
    status = layer.backward(
        dy,
        y,
        in_delta=image((3, 2, 5), results[0], flags=flags[0]),
        gamma_delta=describe(results[1], flags=flags[1]),
        beta_delta=describe(results[2], flags=flags[2]),
    )
    assert status == 0
    for got, want, flag in zip(results, plain, flags, strict=True):
        assert np.allclose(got, want + 10 * flag, rtol=1e-6)
        if not flag:
            assert np.array_equal(got, want)


def test_backward_may_run_twice_and_inference_may_come_between() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), activation=tanh())
    y = layer.forward(x)
    first = layer.gradients(dy, y, (3,))
    layer.forward(normal(9, 3, 2, 5), training=False)
    for got, want in zip(layer.gradients(dy, y, (3,)), first, strict=True):
        assert np.array_equal(got, want)


def test_backward_needs_a_training_pass_of_the_same_batch() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5))
    dx = np.full_like(x, 7)
    assert layer.backward(dy, None, in_delta=image((3, 2, 5), dx)) == -1
    layer.forward(x, training=False)
    fails(layer.backward(dy, None, in_delta=image((3, 2, 5), dx)), "no training pass")
    layer.forward(x)
    assert layer.backward(dy[:3], None, in_delta=image((3, 2, 5), dx)) == -1
    assert "batch_size is 3, but the last training pass had 4" in (bnns.last_error() or "")
    assert (dx == 7).all()


def test_gamma_gradient_of_an_absent_gamma() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    absent, ones = Layer("batch", (3, 2, 5)), Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32))
    y = absent.forward(x)
    ones.forward(x)
    for got, want in zip(absent.gradients(dy, y, (3,)), ones.gradients(dy, y, (3,)), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("shift", [0, 7])
def test_input_gradient_over_the_output_gradient(shift: int) -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), activation=tanh())
    y = layer.forward(x)
    want = layer.gradients(dy, y, (3,))[0]
    memory = np.zeros(140, np.float32)
    memory[:120] = dy.ravel()
    dx = memory[shift:][:120]
    status = bnns.BNNSNormalizationFilterApplyBackwardBatch(
        layer.filter, 4, image((3, 2, 5), dx), 30, y, 30, image((3, 2, 5), memory), 30, None, None
    )
    assert status == 0, bnns.last_error()
    assert np.array_equal(dx.reshape(x.shape), want)


def test_input_gradient_over_the_output() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), activation=tanh())
    y = layer.forward(x)
    want = layer.gradients(dy, y, (3,))[0]
    assert layer.backward(dy, y, in_delta=image((3, 2, 5), y)) == 0
    assert np.array_equal(y, want)


@pytest.mark.parametrize("place", ["its own", "out", "out_delta", "half of out_delta"])
def test_backward_enters_the_engine_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the gradient goes: it is known before whether the engine can write there."""
    x, memory = normal(4, 3, 2, 5), np.zeros(180, np.float32)
    dy = memory[:120].reshape(x.shape)
    dy[...] = normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), activation=tanh())
    y = layer.forward(x)
    want = layer.gradients(dy.copy(), y, (3,))[0]
    places = {"its own": np.empty_like(x), "out": y, "out_delta": dy}
    dx = places.get(place, memory[60:].reshape(x.shape))
    entered = []
    engine = _core.NormProblem.backward

    def counted(problem: _core.NormProblem, *given: Any) -> Any:
        entered.append(problem)
        return engine(problem, *given)

    monkeypatch.setattr(_core.NormProblem, "backward", counted)
    assert layer.backward(dy, y, in_delta=image((3, 2, 5), dx)) == 0, bnns.last_error()
    assert np.array_equal(dx, want)
    assert len(entered) == 1


# ---- fused activations (section 9) -----------------------------------------------------------------------------------

PARAMETERS = {"alpha": 0.75, "beta": 1.25}
ELEMENTWISE = {kind.code: name for name, kind in ACTIVATIONS.items() if kind.code <= 35}
REJECTED = ("Softmax", "LogSoftmax", "Gumbel", "GumbelMax", "IntegerLinearSaturate", "IntegerLinearSaturatePerChannel")


@pytest.mark.parametrize("code", ELEMENTWISE)
@pytest.mark.parametrize("training", [True, False])
def test_forward_with_every_elementwise_activation(code: int, training: bool) -> None:
    x = normal(4, 3, 2, 5)
    y = Layer("batch", (3, 2, 5), activation=activation(code)).forward(x, training)
    z = Layer("batch", (3, 2, 5)).forward(x)
    kind = ACTIVATIONS[ELEMENTWISE[code]]
    given_ = {name: value for name, value in PARAMETERS.items() if getattr(kind, name) != 0.0}
    expected = rg.activation_forward(z, rg.Activation(ELEMENTWISE[code], **given_))
    assert np.allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REJECTED)
def test_activations_that_are_not_elementwise_are_rejected(name: str) -> None:
    assert not Layer("batch", (3, 2, 5), activation=activation(getattr(bnns, f"BNNSActivationFunction{name}"))).made


@pytest.mark.parametrize("code", ELEMENTWISE)
def test_backward_with_every_activation_that_its_output_tells(code: int) -> None:
    """Against finite differences of the filter's own forward pass; class X fails."""
    name = ELEMENTWISE[code]
    x, dy = normal(3, 2, 2, 3), normal(3, 2, 2, 3, seed=1)
    layer = Layer("batch", (2, 2, 3), activation=activation(code))
    y = layer.forward(x)
    dx = np.full_like(x, 7)
    status = layer.backward(dy, y, in_delta=image((2, 2, 3), dx))
    trainable = name not in ("abs", "gelu_tanh", "hard_swish", "silu", "erf", "gelu")
    assert status == (0 if trainable else -1), bnns.last_error()
    if not trainable:
        assert (dx == 7).all()
        opted = Layer("batch", (2, 2, 3), activation=activation(code), slopes_from_input=True)
        y = opted.forward(x)
        assert opted.backward(dy, y, in_delta=image((2, 2, 3), dx)) == 0
    kind = ACTIVATIONS[name]
    given_ = {p: v for p, v in PARAMETERS.items() if getattr(kind, p) != 0.0}
    _, cache = rg.batch_norm_forward(
        x, eps=float(np.float32(1e-3)), activation=rg.Activation(name, **given_), slope_from="input"
    )
    assert np.allclose(dx, rg.batch_norm_backward(dy, cache).dx, rtol=2e-3, atol=2e-5)


def test_activation_parameters_that_hide_the_slope() -> None:
    """Leaky ReLUs and ELUs need alpha > 0; alpha 0 of a leaky ReLU is a ReLU."""
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    cases = {
        ("LeakyRectifiedLinear", -0.5): -1,
        ("LeakyRectifiedLinear", 0.0): 0,
        ("ClampedLeakyRectifiedLinear", -0.5): -1,
        ("ClampedLeakyRectifiedLinear", 0.0): 0,
        ("ELU", 0.0): -1,
        ("CELU", -1.0): -1,
        ("Softplus", 0.0): -1,
        ("ScaledTanh", 0.0): -1,
    }
    same = {"LeakyRectifiedLinear": "relu", "ClampedLeakyRectifiedLinear": rg.Activation("clamp", 0.0, 1.25)}
    for (name, alpha), expected in cases.items():
        layer = Layer("batch", (3, 2, 5), activation=activation(getattr(bnns, f"BNNSActivationFunction{name}"), alpha))
        y, dx = layer.forward(x), np.full_like(x, 7)
        assert layer.backward(dy, y, in_delta=image((3, 2, 5), dx)) == expected, (name, alpha)
        if expected:
            assert (dx == 7).all(), (name, alpha)
            continue
        want, cache = rg.batch_norm_forward(x, eps=float(np.float32(1e-3)), activation=same[name])
        assert np.array_equal(y, want), (name, alpha)
        assert np.array_equal(dx, rg.batch_norm_backward(dy, cache).dx), (name, alpha)
        assert y.min() == 0
        assert (y.max() == np.float32(1.25)) == name.startswith("Clamped"), y.max()


def test_leaky_relu_with_alpha_zero_is_relu() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    results = []
    for code in (bnns.BNNSActivationFunctionLeakyRectifiedLinear, bnns.BNNSActivationFunctionRectifiedLinear):
        layer = Layer("batch", (3, 2, 5), activation=activation(code, 0.0))
        y = layer.forward(x)
        results.append((y, *layer.gradients(dy, y, (3,))))
    for got, want in zip(*results, strict=True):
        assert np.array_equal(got, want)


def test_prelu_per_channel_runs_forward_and_does_not_train() -> None:
    x = normal(4, 3, 2, 5)
    layer = Layer("batch", (3, 2, 5), activation=activation(bnns.BNNSActivationFunctionPReLUPerChannel, 0.25))
    z = Layer("batch", (3, 2, 5)).forward(x)
    y = layer.forward(x)
    assert np.allclose(y, np.where(z < 0, 0.25 * z, z), rtol=1e-6)
    assert layer.backward(x, y, in_delta=image((3, 2, 5), np.empty_like(x))) == -1
    assert not Layer("batch", (3,), activation=activation(bnns.BNNSActivationFunctionPReLUPerChannel)).made


OPTIONS: dict[str, dict[str, Any]] = {"batch": {}, "instance": {}, "layer": {"axis": 1}, "group": {"groups": 3}}


@pytest.mark.parametrize("types", [(F32, F32), (F16, F16), (F32, BF16)])
@pytest.mark.parametrize("name", ["Identity", "Tanh", "RectifiedLinear", "Clamp", "GELUApproximationSigmoid"])
@pytest.mark.parametrize("kind", KINDS)
def test_backward_recomputes_an_output_that_is_null(kind: str, name: str, types: tuple[int, int]) -> None:
    """The same bits as with the output, for all but instance norms, which need it under an activation."""
    x, dy = normal(4, 3, 2, 5).astype(TYPES[types[0]]), normal(4, 3, 2, 5, seed=1)
    parameter = (2, 5) if kind == "layer" else (3,)
    act = activation(getattr(bnns, f"BNNSActivationFunction{name}"), -0.75)
    layer = Layer(
        kind,
        (3, 2, 5),
        gamma=normal(*parameter, seed=2),
        beta=normal(*parameter, seed=3),
        activation=act,
        types=types,
        **OPTIONS[kind],
    )
    want = layer.gradients(dy, layer.forward(x), parameter)
    if kind == "instance" and name != "Identity":
        dx = np.full_like(dy, 7)
        assert layer.backward(dy, None, in_delta=image((3, 2, 5), dx)) == -1
        assert "out is NULL; an instance norm with an activation needs it" in (bnns.last_error() or "")
        assert (dx == 7).all()
    else:
        for got, expected in zip(layer.gradients(dy, None, parameter), want, strict=True):
            assert np.array_equal(got, expected)


def test_an_output_that_is_null_with_parameters_of_every_element() -> None:
    """The gradient of an absent gamma of a layer norm, for every element: the pass is recomputed in that form."""
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    for beta in (None, normal(3, 2, 5, seed=2)):
        layer = Layer("layer", (3, 2, 5), axis=1, beta=beta, activation=tanh())
        y = layer.forward(x)
        for got, want in zip(layer.gradients(dy, None, (3, 2, 5)), layer.gradients(dy, y, (3, 2, 5)), strict=True):
            assert np.allclose(got, want, rtol=1e-5, atol=1e-6)  # that form rounds y in another order


def test_recomputing_the_output_leaves_moving_statistics_alone() -> None:
    mean, variance = np.zeros(3, np.float32), np.ones(3, np.float32)
    layer = Layer("batch", (3, 2, 5), mean=mean, variance=variance, activation=tanh())
    x = normal(4, 3, 2, 5)
    layer.forward(x)
    before = mean.copy(), variance.copy()
    assert layer.backward(x, None, in_delta=image((3, 2, 5), np.empty_like(x))) == 0
    assert all(map(np.array_equal, (mean, variance), before))


def test_a_batch_stride_of_zero_is_packed_in_a_normalization() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), activation=tanh())
    y = layer.forward(x)
    want = layer.gradients(dy, y, (3,))[0]
    out, dx = np.empty_like(x), np.empty_like(x)
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 0, out, 0, True) == 0
    assert np.array_equal(out, y)
    status = bnns.BNNSNormalizationFilterApplyBackwardBatch(
        layer.filter, 4, image((3, 2, 5), dx), 0, y, 0, image((3, 2, 5), dy), 0, None, None
    )
    assert status == 0
    assert np.array_equal(dx, want)


def test_all_gradients_null_needs_no_slope() -> None:
    x = normal(4, 3, 2, 5)
    layer = Layer("batch", (3, 2, 5), activation=activation(bnns.BNNSActivationFunctionSiLU))
    layer.forward(x)
    assert layer.backward(x, None) == 0


@pytest.mark.parametrize("strided", [False, True])
def test_beta_is_read_by_backward_where_it_tells_the_slope(strided: bool) -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    memory = np.zeros(6, np.float32)
    beta = memory[::2] if strided else memory[:3]
    flags = bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr)
    silu = activation(bnns.BNNSActivationFunctionSiLU)
    layer = Layer("batch", (3, 2, 5), beta=beta, activation=silu, parameters=flags, slopes_from_input=True)
    y = layer.forward(x)
    beta[:] = 1
    got = layer.gradients(dy, y, (3,))[0]
    other = Layer("batch", (3, 2, 5), beta=np.ones(3, np.float32), activation=silu, slopes_from_input=True)
    other.forward(x)
    assert np.array_equal(got, other.gradients(dy, y, (3,))[0])
