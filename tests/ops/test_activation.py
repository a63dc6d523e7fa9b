"""Activations: the class, and arrays of any type, shape and layout."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import retrograd as rg
from retrograd import Activation, _core
from retrograd.lab import cases, reference
from retrograd.lab.cases import ACTIVATION_PARAMETERS, FUSED_ACTIVATIONS
from retrograd.lab.verify import fused_activation
from retrograd.ops.activation import ACTIVATIONS
from support.activation import BOUNDS, DTYPES
from support.arrays import MEMORY, Array, assert_same_bits, assert_untouched_around, fenced, placed
from support.errors import KINDS

# ---- the class -------------------------------------------------------------------------------------------------------


def test_there_are_29_of_apples_with_their_numbers_and_one_of_ours() -> None:
    numbers = [*range(9), 12, *range(15, 21), *range(22, 29), *range(30, 36), 64]
    assert len(numbers) == 29 + 1
    assert [kind.code for kind in ACTIVATIONS.values()] == numbers
    assert tuple(ACTIVATIONS) == reference.ACTIVATIONS == tuple(ACTIVATION_PARAMETERS)


@pytest.mark.parametrize(
    ("name", "alpha", "beta"),
    [
        ("identity", 0, 0),
        ("relu", 0, 0),
        ("leaky_relu", 0.01, 0),
        ("scaled_tanh", 1, 1),
        ("hard_sigmoid", 1 / 6, 0.5),
        ("closed_hard_sigmoid", 1 / 6, 0.5),
        ("softplus", 1, 1),
        ("elu", 1, 0),
        ("celu", 1, 0),
        ("hard_shrink", 0.5, 0),
        ("soft_shrink", 0.5, 0),
        ("relu6", 0, 0),
    ],
)
def test_customary_parameters(name: str, alpha: float, beta: float) -> None:
    activation = Activation(name)
    assert (activation.name, activation.alpha, activation.beta) == (name, alpha, beta)
    assert isinstance(activation.alpha, float)
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    by_name, _ = rg.batch_norm_forward(x, activation=name, slope_from="input")
    by_object, _ = rg.batch_norm_forward(x, activation=activation, slope_from="input")
    np.testing.assert_array_equal(by_name, by_object)


def test_customary_gelu_tanh() -> None:
    activation = Activation("gelu_tanh")
    assert (activation.alpha, activation.beta) == (math.sqrt(2 / math.pi), 0.044715)
    z = np.linspace(-4, 4, 101)
    difference = reference.activation_value("gelu_tanh", z, activation.alpha, activation.beta) - (
        reference.activation_value("gelu", z)
    )
    assert 1e-4 < np.max(np.abs(difference)) < 5e-4  # as good an approximation as it is known to be


def test_none_is_the_identity() -> None:
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    plain, _ = rg.batch_norm_forward(x)
    for identity in (None, "identity", Activation("identity"), Activation("linear", alpha=1)):
        y, _ = rg.batch_norm_forward(x, activation=identity)
        np.testing.assert_array_equal(y, plain)


def test_immutable_hashable_copyable() -> None:
    activation = Activation("clamp", alpha=-1, beta=2)
    for field in ("alpha", "beta", "name", "code", "anything"):
        with pytest.raises(AttributeError, match=f"immutable; make a new one instead of setting {field}"):
            setattr(activation, field, 1)
    for twin in (
        Activation("clamp", -1.0, 2.0),
        copy.copy(activation),
        copy.deepcopy(activation),
        pickle.loads(pickle.dumps(activation)),
    ):
        assert twin == activation
        assert hash(twin) == hash(activation)
        assert (twin.name, twin.code, twin.alpha, twin.beta) == ("clamp", 8, -1.0, 2.0)
    assert activation != Activation("clamp", -1, 2.5)
    assert activation != Activation("threshold", -1, 2)
    assert activation != "clamp"
    assert len({activation, Activation("clamp", -1, 2), Activation("relu")}) == 2


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_repr_and_pickle_lead_back(name: str) -> None:
    activation = fused_activation(name, *ACTIVATION_PARAMETERS[name])
    assert eval(repr(activation), {"Activation": Activation}) == activation
    assert pickle.loads(pickle.dumps(activation)) == activation


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("rellu",), ValueError, r"activation 'rellu' is unknown; there are identity, relu, .*relu6"),
        (("gelu", 1.0), ValueError, r"'gelu' takes no alpha"),
        ((3,), TypeError, r"activation must be a name or an Activation, not int"),
        ((None,), TypeError, r"activation must be a name or an Activation, not NoneType"),
        (("swish",), ValueError, r"'swish' is unknown; here it is called 'silu'"),
        (("mish",), ValueError, r"'mish' is unknown; there are identity, relu, .*gelu_sigmoid"),
        (("softmax",), ValueError, r"'softmax' cannot be fused: it is not elementwise"),
        (("log_softmax",), ValueError, r"'log_softmax' cannot be fused: it is not elementwise"),
        (("relu", 0.1), ValueError, r"'relu' takes no alpha"),
        (("elu", 1.0, 1.0), ValueError, r"'elu' takes no beta"),
        (("linear",), ValueError, r"'linear' needs alpha"),
        (("clamp", 0.0), ValueError, r"'clamp' needs beta"),
        (("clamped_leaky_relu",), ValueError, r"'clamped_leaky_relu' needs beta"),
        (("threshold",), ValueError, r"'threshold' needs alpha"),
        (("linear_with_bias", 1.0), ValueError, r"'linear_with_bias' needs beta"),
        (("celu", 0.0), ValueError, r"'celu' with alpha = 0 divides by 0; use 'relu'"),
        (("clamp", 2.0, 1.0), ValueError, r"'clamp': the lower bound alpha = 2 is above the upper.* beta = 1"),
        (("elu", math.nan), ValueError, r"'elu': alpha is NaN"),
        (("clamp", 0.0, math.nan), ValueError, r"'clamp': beta is NaN"),
        (("elu", "1"), TypeError, r"'elu': alpha must be a number, not str"),
        (("elu", [1]), TypeError, r"'elu': alpha must be a number, not list"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        Activation(*arguments)
    assert type(caught.value) is KINDS[error]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("abs",), r"'abs': the output does not tell the slope: the sign of its input is lost"),
        (("silu",), r"'silu': the output does not tell the slope: it is not monotone"),
        (("gelu",), r"'gelu': the output does not tell"),
        (("gelu_tanh",), r"'gelu_tanh': the output does not tell"),
        (("gelu_sigmoid",), r"'gelu_sigmoid': the output does not tell"),
        (("hard_swish",), r"'hard_swish': the output does not tell"),
        (("erf",), r"'erf': .*near 1 and -1 the output is rounded too coarsely"),
        (("closed_hard_sigmoid",), r"'closed_hard_sigmoid': .*at outputs 0 and 1 it is alpha if the input is on"),
        (("leaky_relu", 0.0), r"'leaky_relu' with alpha = 0: .*only for alpha > 0 \(or use 'relu'\)"),
        (("leaky_relu", -0.5), r"'leaky_relu' with alpha = -0.5: .*only for alpha > 0"),
        (("clamped_leaky_relu", 0.0, 1.0), r"'clamped_leaky_relu' with alpha = 0"),
        (("elu", 0.0), r"'elu' with alpha = 0"),
        (("celu", -1.0), r"'celu' with alpha = -1"),
        (("softplus", 0.0), r"'softplus' with alpha = 0 is constant"),
        (("softplus", 1.0, 0.0), r"'softplus' with beta = 0 is constant"),
        (("scaled_tanh", 0.0), r"'scaled_tanh' with alpha = 0 is constant"),
    ],
)
def test_a_normalization_refuses_what_the_output_cannot_tell(arguments: tuple[Any, ...], message: str) -> None:
    """The activation itself is fine."""
    activation = Activation(*arguments)
    assert eval(repr(activation), {"Activation": Activation}) == activation
    x = np.zeros((3, 4), np.float32)
    with pytest.raises(ValueError, match=rf"^batch_norm_forward: activation {message}.*; slope_from='input' finds it"):
        rg.batch_norm_forward(x, activation=activation)
    with pytest.raises(ValueError, match=rf"^activation_backward: activation {message}.*; give x instead of y"):
        rg.activation_backward(x, activation, y=x)
    rg.batch_norm_forward(x, activation=activation, slope_from="input")
    rg.activation_backward(x, activation, x=x)
    with pytest.raises(ValueError, match=rf"^layer_norm_forward: activation {message}"):
        rg.layer_norm_forward(x, activation=arguments[0] if len(arguments) == 1 else activation)


def test_what_can_be_fused_is_what_the_cases_say() -> None:
    x = np.ones((2, 3), np.float32)
    for name in ACTIVATIONS:
        activation = fused_activation(name, *ACTIVATION_PARAMETERS[name])
        if name in FUSED_ACTIVATIONS:
            rg.batch_norm_forward(x, activation=activation)
        else:
            with pytest.raises(ValueError, match="the output does not tell the slope"):
                rg.batch_norm_forward(x, activation=activation)
    assert len(FUSED_ACTIVATIONS) == 22


# ---- of arrays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_and_type(name: str, dtype: str, isa: str) -> None:
    """Arithmetic in float32 for 16 bits, rounded once: what the same call says of the same numbers in float32."""
    storage = cases.storage_dtype(dtype)
    alpha, beta = BOUNDS[name][0][:2]
    activation = fused_activation(name, alpha, beta)
    z, dy = np.random.default_rng(6).normal(0, 3, (2, 3, 50)).astype(storage)
    wide = np.float64 if dtype == "float64" else np.float32
    y = rg.activation_forward(z, activation)
    dx = rg.activation_backward(dy, activation, x=z)
    assert y.dtype == dx.dtype == storage
    np.testing.assert_array_equal(y, rg.activation_forward(z.astype(wide), activation).astype(storage))
    expected = rg.activation_backward(dy.astype(wide), activation, x=z.astype(wide))
    np.testing.assert_array_equal(dx, expected.astype(storage))
    # And it is right: within the slack of 6 ulp, or of a part that cancels.
    exact = reference.apply_input_slope(name, z, dy, alpha, beta).astype(np.float64)
    unit = float(np.finfo(wide).eps) + (0 if dtype in ("float32", "float64") else 2.0**-8)
    np.testing.assert_allclose(dx.astype(np.float64), exact, rtol=8 * unit, atol=20 * unit)
    if name in FUSED_ACTIVATIONS:
        exact = reference.apply_slope(name, y, dy, alpha, beta).astype(np.float64)
        by_output = rg.activation_backward(dy, activation, y=y).astype(np.float64)
        np.testing.assert_allclose(by_output, exact, rtol=8 * unit, atol=20 * unit)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data(), level=st.sampled_from(_core.isa_levels()), threads=st.sampled_from((1, 2, 3, 7)))
def test_any_shape_and_strides(data: st.DataObject, level: str, threads: int) -> None:
    """Against the same elements in one run, bit by bit; nothing beside a result is written."""
    assert _core.select_isa(level)
    shape = data.draw(st.lists(st.sampled_from((0, 1, 2, 3, 5, 8, 17, 33, 130)), min_size=1, max_size=4).map(tuple))
    if math.prod(shape) > 60_000:
        shape = shape[:2]
    dtype = cases.storage_dtype(data.draw(st.sampled_from(DTYPES)))
    name = data.draw(st.sampled_from(("relu", "sigmoid", "clamp", "leaky_relu")))
    activation = fused_activation(name, *ACTIVATION_PARAMETERS[name])
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    order = data.draw(st.permutations(range(len(shape))))

    def array(values: Array) -> Array:
        return placed(values, data.draw(st.sampled_from(MEMORY)), order)

    x, dy, total = (array(rng.normal(0, 2, shape).astype(dtype)) for _ in range(3))
    y = rg.activation_forward(x, activation, out=array(np.full(shape, math.nan, dtype)), num_threads=threads)
    np.testing.assert_array_equal(y.ravel(), rg.activation_forward(x.ravel(), activation, num_threads=1))
    for words in ({"x": x}, {"y": y}):
        flat = {key: value.ravel() for key, value in words.items()}
        expected = rg.activation_backward(dy.ravel(), activation, num_threads=1, **flat)
        dx = array(np.full(shape, math.nan, dtype))
        assert rg.activation_backward(dy, activation, out=dx, num_threads=threads, **words) is dx
        np.testing.assert_array_equal(dx.ravel(), expected)
        np.testing.assert_array_equal(rg.activation_backward(dy, activation, **words).ravel(), expected)
        sums = total.copy()
        rg.activation_backward(dy, activation, out=sums, accumulate=True, num_threads=threads, **words)
        if dtype.itemsize > 2:
            np.testing.assert_array_equal(sums.ravel(), (total.ravel() + expected))
        for result in (y, dx):
            assert_untouched_around(result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_arrays_have_the_same_bits_at_any_number_of_threads(dtype: str, isa: str) -> None:
    """Large enough to be shared, and for results to go past the cache; in place they do not."""
    x, dy = np.random.default_rng(7).normal(0, 2, (2, 700, 1031)).astype(np.float32).astype(cases.storage_dtype(dtype))
    expected = rg.activation_forward(x, "silu", num_threads=1), rg.activation_backward(dy, "silu", x=x, num_threads=1)
    few = slice(0, 700, 233)
    np.testing.assert_array_equal(expected[0][few], rg.activation_forward(x[few], "silu"))
    for threads in (2, 3, 7):
        y, dx = x.copy(), dy.copy()
        rg.activation_backward(dx, "silu", x=y, out=dx, num_threads=threads)
        rg.activation_forward(y, "silu", out=y, num_threads=threads)
        assert_same_bits((y, dx), expected)
        assert_same_bits([rg.activation_forward(x, "silu", num_threads=threads)], expected[:1])


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_outside_the_arrays_is_read(dtype: str, at_end: bool, isa: str) -> None:
    """Arrays against pages without access: on their own, and with z made again."""
    rng = np.random.default_rng(10)
    storage = cases.storage_dtype(dtype)
    parameters = np.float64 if dtype == "float64" else np.float32
    for shape in ((3, 5), (7, 33), (2, 4099)):
        x, dy = (fenced(rng.normal(size=shape).astype(storage), at_end) for _ in range(2))
        out = fenced(np.zeros(shape, storage), at_end)
        rg.activation_forward(x, "gelu", out=out)
        rg.activation_backward(dy, "gelu", x=x, out=out)
        rg.activation_backward(dy, "tanh", y=x, out=out)
        gamma, beta = (fenced(rng.normal(size=shape[1]).astype(parameters), at_end) for _ in range(2))
        for forward, backward in (
            (rg.batch_norm_forward, rg.batch_norm_backward),
            (rg.layer_norm_forward, rg.layer_norm_backward),
        ):
            _, cache = forward(x, gamma, beta, activation="gelu", slope_from="input", out=out)
            backward(dy, cache, out={"dx": out})


def test_accumulation_in_16_bits_rounds_once() -> None:
    for dtype in ("float16", "bfloat16"):
        storage = cases.storage_dtype(dtype)
        x, dy, total = np.random.default_rng(8).normal(0, 2, (3, 1000)).astype(storage)
        out = total.copy()
        rg.activation_backward(dy, "tanh", x=x, out=out, accumulate=True)
        wide = rg.activation_backward(dy.astype(np.float32), "tanh", x=x.astype(np.float32)) + total.astype(np.float32)
        np.testing.assert_array_equal(out, wide.astype(storage))


def test_scalars_and_array_likes() -> None:
    y = rg.activation_forward(np.float32(-2.0), "abs")
    assert (y.shape, y.dtype, float(y)) == ((), np.float32, 2.0)
    np.testing.assert_array_equal(rg.activation_backward([1.0, 2.0], "relu", x=[-1.0, 3.0]), [0.0, 2.0])
    assert rg.activation_forward(np.zeros((3, 0, 2)), "gelu").shape == (3, 0, 2)


def test_activations_refuse() -> None:
    x = np.arange(8, dtype=np.float32)
    saved = x.copy()
    forward, backward = rg.activation_forward, rg.activation_backward
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: forward(x.astype(int), "relu"), TypeError, "activation_forward: x has dtype int64"),
        (lambda: forward(x, ["relu"]), TypeError, "activation_forward: activation must be a name .*, not list"),
        (lambda: forward(x, "rellu"), ValueError, "activation_forward: activation 'rellu' is unknown"),
        (lambda: forward(x, "relu", out=x[:4]), ValueError, r"activation_forward: out has shape \(4,\), .*\(8,\)"),
        (lambda: forward(x[:6], "relu", out=x[2:]), ValueError, "activation_forward: out .*overlaps x"),
        (lambda: forward(x, "relu", out=x[::-1]), ValueError, "activation_forward: out .*overlaps x"),
        (lambda: forward(x, "relu", num_threads=0), ValueError, "activation_forward: the number of threads is 0"),
        (lambda: backward(x, "relu"), ValueError, "activation_backward: .*give one of them, not neither"),
        (lambda: backward(x, "relu", x=x, y=x), ValueError, "activation_backward: .*give one of them, not both"),
        (lambda: backward(x, "relu", x=x[:3]), ValueError, r"activation_backward: x has shape \(3,\), .*\(8,\)"),
        (
            lambda: backward(x, "relu", y=x.astype(float)),
            TypeError,
            "activation_backward: y has dtype float64, must be",
        ),
        (lambda: backward(x, "relu", x=x, accumulate=True), ValueError, "activation_backward: accumulate=True adds to"),
        (lambda: backward(x[:6], "relu", x=x[:6], out=x[2:]), ValueError, "activation_backward: out .*overlaps dy"),
        (lambda: backward(x[:6] * 1, "relu", y=x[:6], out=x[2:]), ValueError, "activation_backward: out .*overlaps y"),
        (lambda: backward(x, "silu", y=x), ValueError, "activation_backward: activation 'silu': .*give x instead"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match="^" + message):
            call()
    np.testing.assert_array_equal(x, saved)


def test_views_that_interleave_do_not_overlap() -> None:
    room = np.random.default_rng(9).normal(size=40).astype(np.float32)
    expected = rg.activation_forward(room[::2].copy(), "tanh")
    rg.activation_forward(room[::2], "tanh", out=room[1::2])
    np.testing.assert_array_equal(room[1::2], expected)


def test_the_engine_checks_its_views() -> None:
    z = np.zeros(8, np.float32)

    def reason(refusal: Any) -> tuple[str, str]:
        assert type(refusal) is _core.Refusal
        return refusal.argument, refusal.reason.name

    for out, why in (
        (np.zeros(7, np.float32), "shape"),
        (np.zeros(8, np.float64), "dtype"),
        (np.broadcast_to(np.zeros(1, np.float32), 8), "type"),
        (z[::-1], "overlap"),
    ):
        assert reason(_core.activation_forward(1, 0.0, 0.0, 0, z, out, False, 1)) == ("out", why)
    half = np.zeros(8, np.float16)
    assert reason(_core.activation_backward(1, 0.0, 0.0, 0, z, half, True, z, False, False, 1)) == ("x", "dtype")
    fields = np.zeros(8, np.dtype([("a", "u1"), ("b", "f4")]))["b"]
    assert reason(_core.activation_backward(1, 0.0, 0.0, 0, z, fields, True, z, False, False, 1)) == ("x", "layout")
    with pytest.raises(ValueError, match="the output does not determine the slope"):
        _core.activation_backward(ACTIVATIONS["gelu"].code, 0.0, 0.0, 0, z, z, False, z, False, False, 1)
