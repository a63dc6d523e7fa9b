"""Activations: the class, and what the engine makes of it, element by element, fused and on its own."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
from arrays import MEMORY, assert_same_bits, assert_untouched_around, fenced, placed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import retrograd as rg
from retrograd import Activation, _core
from retrograd.lab import cases, reference
from retrograd.lab.cases import ACTIVATION_PARAMETERS, FUSED_ACTIVATIONS
from retrograd.lab.verify import fused_activation
from retrograd.ops.activation import ACTIVATIONS

Array = np.ndarray[Any, Any]
DTYPES = ("float32", "float64", "float16", "bfloat16")


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
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("abs",), r"'abs': the output does not tell the slope: the sign of its input is lost"),
        (("silu",), r"'silu': the output does not tell the slope: it is not monotone"),
        (("gelu",), r"'gelu': the output does not tell"),
        (("gelu_tanh",), r"'gelu_tanh': the output does not tell"),
        (("gelu_sigmoid",), r"'gelu_sigmoid': the output does not tell"),
        (("hard_swish",), r"'hard_swish': the output does not tell"),
        (("erf",), r"'erf': .*an output near 1 or -1 no longer tells it"),
        (("closed_hard_sigmoid",), r"'closed_hard_sigmoid': .*outputs 0 and 1 may be those of a bound"),
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


# ---- fused, element by element ---------------------------------------------------------------------------------------


def run(activation: Activation, z: Array, dy: Array | float = 1.0, slope_from: str = "output") -> tuple[Array, Array]:
    """y = f(z) and dz = dy f'(z): with constants 0 and 1 for statistics, z is x and dx is dz."""
    x = z.reshape(1, 1, -1)
    options = {"training": False, "mean": np.zeros(1), "var": np.ones(1), "eps": 0.0}
    y, cache = rg.batch_norm_forward(x, activation=activation, slope_from=slope_from, **options)
    slopes = np.broadcast_to(np.asarray(dy).astype(z.dtype), z.shape).reshape(x.shape)
    dz = rg.batch_norm_backward(slopes, cache, need="dx").dx
    assert dz is not None
    return y.reshape(z.shape), dz.reshape(z.shape)


def whole_range(dtype: Any) -> Array:
    """Every exponent of both signs, subnormals included, and more where functions bend and saturate."""
    rng = np.random.default_rng(1)
    if dtype == np.float32:
        everything = np.arange(0, 2**32, 40009, dtype=np.uint64).astype(np.uint32).view(np.float32)
        ends = 120
    else:
        everything = rng.integers(0, 2**64, 40_000, dtype=np.uint64).view(np.float64)
        ends = 800
    small = np.exp(rng.uniform(-40, 0, 10_000))
    parts = (rng.uniform(-ends, ends, 20_000), rng.uniform(-10, 10, 30_000), rng.uniform(-1, 1, 20_000), small, -small)
    return np.concatenate([everything[np.isfinite(everything)], *(p.astype(dtype) for p in parts)])


# (alpha, beta), and the largest error of the value and of the slope, in units in the last place of the exact result.
# exp is within 1.1 of them, expm1 and log1p within 2, a division or a product adds a half.
ULP_BOUNDS: dict[str, tuple[float, float, float, float]] = {
    "sigmoid": (0, 0, 3, 2),
    "tanh": (0, 0, 3, 2),
    "scaled_tanh": (1, 1, 3, 2),
    "softplus": (1, 1, 3, 2),
    "softsign": (0, 0, 2, 2),
    "elu": (1, 0, 2, 1),
    "log_sigmoid": (0, 0, 3, 2),
    "celu": (1, 0, 2, 1),
    "relu": (0, 0, 0, 0),
    "leaky_relu": (0.25, 0, 0.5, 0.5),
    "linear": (-1.5, 0, 0.5, 0.5),
    "clamp": (-0.75, 2, 0, 0),
    "clamped_leaky_relu": (0.25, 2, 0.5, 0.5),
    "hard_shrink": (0.5, 0, 0, 0),
    "soft_shrink": (0.5, 0, 0.5, 0),
    "threshold": (0.25, -2, 0, 0),
    "relu6": (0, 0, 0, 0),
    "identity": (0, 0, 0, 0),
}


def ulp_error(got: Array, exact: Array) -> float:
    """The largest, in units in the last place of the exact result; the same infinity or NaN counts as exact."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(got.dtype)
        finite = np.isfinite(rounded)
        unit = np.abs(np.spacing(np.where(finite, rounded, 1)))
        error = np.where(finite, np.abs(got - exact) / unit, np.where(got == rounded, 0, math.inf))
        error = np.where(np.isnan(got) & np.isnan(rounded), 0, error)
        return float(np.max(np.where(np.isnan(error), math.inf, error)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ULP_BOUNDS)
def test_ulp_over_the_whole_range(name: str, dtype: Any, isa: str) -> None:
    alpha, beta, value_bound, slope_bound = ULP_BOUNDS[name]
    z = whole_range(dtype)
    y, slope = run(fused_activation(name, alpha, beta), z)
    assert ulp_error(y, reference.activation_value(name, z, alpha, beta)) <= value_bound
    # The slope of that y. The exact one vanishes with some y, where it is compared with the largest it can be.
    exact = reference.activation_slope(name, y, alpha, beta)
    assert ulp_error(slope, exact) <= slope_bound


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["selu", "hard_sigmoid", "linear_with_bias", "tanh_shrink"])
def test_errors_over_the_whole_range_of_those_that_cancel(name: str, dtype: Any, isa: str) -> None:
    """a z + b, y + a and z - tanh z are as good as their parts, not as their result."""
    alpha, beta = ACTIVATION_PARAMETERS[name]
    z = whole_range(dtype)[:: 10 if name == "tanh_shrink" else 1]  # its oracle is slow
    y, slope = run(fused_activation(name, alpha, beta), z)
    u = float(np.finfo(dtype).eps) / 2
    exact = reference.activation_value(name, z, alpha, beta)
    double = dtype == np.float64
    # Of the parts: |a z| + |b| for the two that add, 1.76 for selu's asymptote, 1 for tanh (in double; float is exact).
    wide = z.astype(exact.dtype)
    parts = {
        "selu": 6 * np.abs(exact),
        "hard_sigmoid": 3 * np.minimum(np.abs(alpha * wide), 2) + 2 * beta,
        "linear_with_bias": 3 * np.abs(alpha * wide) + 2 * abs(beta),
        "tanh_shrink": np.abs(exact) + (3 * np.minimum(np.abs(wide), 1) if double else 0),
    }[name]
    with np.errstate(all="ignore"):
        finite = np.isfinite(exact.astype(dtype))
        np.testing.assert_array_equal(y[~finite], exact.astype(dtype)[~finite])
        smallest = float(np.finfo(dtype).smallest_subnormal)
        assert np.all((np.abs(y - exact) <= u * parts + smallest)[finite])
    bound = {"selu": 8, "hard_sigmoid": 1, "linear_with_bias": 2, "tanh_shrink": 40 if double else 2}[name]
    assert np.max(np.abs(slope - reference.activation_slope(name, y, alpha, beta))) <= bound * u


def test_tanh_shrink_slope_keeps_relative_precision(isa: str) -> None:
    """For a tiny y it is (3y)^(2/3), far from the rounding of 1."""
    for dtype, lowest in ((np.float32, 1e-44), (np.float64, 1e-300)):
        z = np.cbrt(3 * np.geomspace(lowest, 1e-3, 2000)).astype(dtype)
        y, slope = run(Activation("tanh_shrink"), z)
        exact = reference.activation_slope("tanh_shrink", y)
        assert np.max(np.abs(slope - exact) / exact) <= 6 * np.finfo(dtype).eps


# Where pieces meet, and where numbers end; together with the numbers beside them.
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 0.25, 2.0, -0.75, 6.0, 20.0, -20.0, 100.0, -100.0, 1e4, -1e4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSED_ACTIVATIONS)
def test_special_points(name: str, dtype: str, isa: str) -> None:
    """Values within two units in the last place, slopes at kinks and zeros exactly the oracle's, NaN where it is."""
    alpha, beta = ULP_BOUNDS.get(name, ACTIVATION_PARAMETERS[name])[:2]
    storage = cases.storage_dtype(dtype)
    largest = float(np.finfo(storage).max) if dtype != "bfloat16" else 3.3895313892515355e38
    points = [*SPECIAL, alpha, -alpha, beta, -beta, largest, -largest, math.inf, -math.inf, math.nan]
    z = np.array(points, np.float64).astype(storage)
    bits = z.view({2: np.int16, 4: np.int32, 8: np.int64}[storage.itemsize])
    beside = np.concatenate([(bits + step).astype(bits.dtype) for step in (-1, 0, 1)]).view(storage)
    with np.errstate(all="ignore"):
        y, slope = run(fused_activation(name, alpha, beta), beside)
        wide = np.float64 if dtype != "float64" else np.longdouble
        exact = reference.activation_value(name, beside, alpha, beta)
        expected = exact.astype(storage)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(y[~finite].astype(wide), expected[~finite].astype(wide))
        unit = np.abs(np.spacing(np.where(finite, expected, 1).astype(storage))).astype(wide)
        # tanh_shrink, hard_sigmoid and linear_with_bias cancel; see above.
        slack = np.where(np.abs(exact) < 1, float(np.finfo(np.float32 if dtype != "float64" else np.float64).eps), 0)
        error = np.abs(y.astype(wide) - exact)
        assert np.all((error <= 3 * unit + 4 * slack)[finite])

        exact_slope = reference.activation_slope(name, y, alpha, beta)
        mine = slope.astype(wide)
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(exact_slope))
        flat = exact_slope == 0
        if name in ("sigmoid", "tanh", "softsign", "softplus", "log_sigmoid", "elu", "celu", "selu", "scaled_tanh"):
            flat &= False  # smooth: they vanish by rounding
        np.testing.assert_array_equal(mine[flat], 0)
        defined = ~np.isnan(exact_slope)
        steep = np.abs(exact_slope[defined])
        close = np.abs(mine[defined] - exact_slope[defined]) <= 4 * float(np.finfo(np.float32).eps) + steep * float(
            2.0**-7 if dtype == "bfloat16" else np.finfo(storage).eps
        )
        assert np.all(close)
        # And a zero is a zero where the oracle has one: nothing negative, nothing tiny.
        assert np.all(mine[defined] * np.sign(exact_slope[defined]) >= 0)


@pytest.mark.parametrize(
    ("name", "z", "y", "slope"),
    [
        ("relu", [-1.0, -0.0, 0.0, 1e-30], [0.0, 0.0, 0.0, 1e-30], [0.0, 0.0, 0.0, 1.0]),
        ("leaky_relu", [-1.0, -0.0, 0.0, 1.0], [-0.25, 0.0, 0.0, 1.0], [0.25, 1.0, 1.0, 1.0]),
        ("clamp", [-1.0, -0.75, 0.0, 2.0, 3.0], [-0.75, -0.75, 0.0, 2.0, 2.0], [0.0, 0.0, 1.0, 0.0, 0.0]),
        ("relu6", [-0.0, 0.0, 1.0, 6.0, 7.0], [0.0, 0.0, 1.0, 6.0, 6.0], [0.0, 0.0, 1.0, 0.0, 0.0]),
        ("clamped_leaky_relu", [-4.0, 0.0, 2.0, 3.0], [-1.0, 0.0, 2.0, 2.0], [0.25, 1.0, 0.0, 0.0]),
        ("hard_shrink", [-0.5, -0.25, 0.0, 0.5], [-0.5, 0.0, 0.0, 0.5], [1.0, 0.0, 0.0, 1.0]),
        ("soft_shrink", [-1.5, -0.5, 0.25, 0.5, 1.0], [-1.0, 0.0, 0.0, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0, 1.0]),
        ("threshold", [0.0, 0.25, 0.5], [-2.0, -2.0, 0.5], [0.0, 0.0, 1.0]),
        ("tanh", [-40.0, 0.0, 40.0], [-1.0, 0.0, 1.0], [0.0, 1.0, 0.0]),
        ("sigmoid", [-800.0, 0.0, 800.0], [0.0, 0.5, 1.0], [0.0, 0.25, 0.0]),
        ("softplus", [-800.0, 800.0], [0.0, 800.0], [0.0, 1.0]),
        ("log_sigmoid", [-800.0, 800.0], [-800.0, 0.0], [1.0, 0.0]),
        ("elu", [-100.0, -0.0, 0.0, 3.0], [-1.0, 0.0, 0.0, 3.0], [0.0, 1.0, 1.0, 1.0]),
        ("celu", [-100.0, 0.0, 3.0], [-1.0, 0.0, 3.0], [0.0, 1.0, 1.0]),
        ("softsign", [-1.0, 0.0, 1e30], [-0.5, 0.0, 1.0], [0.25, 1.0, 0.0]),
        ("tanh_shrink", [0.0, 1e6], [0.0, 1e6 - 1], [0.0, 1.0]),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_saturation_kinks_and_zeros(
    name: str, z: list[float], y: list[float], slope: list[float], dtype: Any, isa: str
) -> None:
    alpha, beta = ULP_BOUNDS.get(name, (0.0, 0.0))[:2]
    got_y, got_slope = run(fused_activation(name, alpha, beta), np.array(z, dtype))
    np.testing.assert_array_equal(got_y, np.array(y, dtype))
    np.testing.assert_array_equal(got_slope, np.array(slope, dtype))


@pytest.mark.parametrize("name", ["hard_shrink", "soft_shrink"])
def test_shrinks_by_nothing_are_the_identity(name: str, isa: str) -> None:
    z = np.array([-1.0, -0.0, 0.0, 1e-40, 2.0], np.float32)
    y, slope = run(Activation(name, alpha=0.0), z)
    np.testing.assert_array_equal(y, z)
    np.testing.assert_array_equal(slope, np.ones(5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "z"),
    [
        (Activation("relu"), [-1.0, 0.0]),
        (Activation("relu6"), [-1.0, 0.0, 6.0, 9.0]),
        (Activation("clamp", 0.1, 0.7), [-1.0, 0.1, 0.7, 3.0]),
        (Activation("hard_sigmoid", 1.0, 0.5), [-3.0, -0.5, 0.5, 4.0]),
        (Activation("clamped_leaky_relu", 0.3, 0.7), [0.7, 5.0]),
        (Activation("hard_shrink", 0.3), [-0.25, 0.0, 0.125]),
        (Activation("soft_shrink", 0.3), [-0.25, 0.0, 0.125]),
        (Activation("threshold", 0.5, 0.1), [-4.0, 0.25, 0.5]),
        (Activation("threshold", 0.5, 20.1), [-4.0, 0.25, 0.5]),
    ],
    ids=lambda v: v.name if isinstance(v, Activation) else "",
)
def test_flat_pieces_ignore_dy(activation: Activation, z: list[float], dtype: str, isa: str) -> None:
    """Also where a bound (0.1, 0.7) is not a number of the storage type: y holds it rounded, and is compared so."""
    storage = cases.storage_dtype(dtype)
    # Enough of them for whole vectors and a rest.
    points = np.tile(np.array(z, np.float64), 23).astype(storage)
    for dy in (3.0, math.inf, -math.inf, math.nan):
        y, dz = run(activation, points, dy)
        np.testing.assert_array_equal(dz, np.zeros(points.shape))
        slopes = np.full(points.shape, dy).astype(storage)
        from_y = rg.activation_backward(slopes, activation, y=y)
        from_x = rg.activation_backward(slopes, activation, x=points)
        np.testing.assert_array_equal(from_y, np.zeros(points.shape))
        np.testing.assert_array_equal(from_x, np.zeros(points.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_slope_from_the_input_is_that_on_its_own(name: str, dtype: str, isa: str) -> None:
    """With constants 0 and 1 for statistics z is x, to the bit, so the slope is found at x itself, kinks included."""
    # Bounds that every type holds, so that the two round nothing.
    alpha, beta = BOUNDS[name][0][:2]
    activation = fused_activation(name, alpha, beta)
    z = np.concatenate([np.linspace(-8, 8, 129), np.array([alpha, beta])]).astype(cases.storage_dtype(dtype))
    y, dz = run(activation, z, 1.5, "input")
    np.testing.assert_array_equal(y, rg.activation_forward(z, activation))
    slopes = np.full(z.shape, 1.5).astype(z.dtype)
    np.testing.assert_array_equal(dz, rg.activation_backward(slopes, activation, x=z))


@pytest.mark.parametrize("name", FUSED_ACTIVATIONS)
def test_nan_goes_through(name: str, isa: str) -> None:
    alpha, beta = ACTIVATION_PARAMETERS[name]
    for dtype in DTYPES:
        z = np.full(37, math.nan).astype(cases.storage_dtype(dtype))
        y, dz = run(fused_activation(name, alpha, beta), z, 2.5)
        assert np.isnan(y.astype(np.float64)).all()
        expected = reference.apply_slope(name, y, np.full(37, 2.5), alpha, beta)
        np.testing.assert_allclose(dz.astype(np.float64), expected.astype(np.float64), rtol=0.01)
    if name in ("relu", "relu6", "clamp", "identity", "leaky_relu", "threshold", "hard_shrink", "soft_shrink"):
        assert (dz.astype(np.float64) == 2.5).all()


@pytest.mark.parametrize("name", ["elu", "celu", "selu", "scaled_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slope_is_never_of_the_wrong_sign(name: str, dtype: str, isa: str) -> None:
    """A stored y may lie beyond the asymptote by its rounding."""
    activation = {
        "elu": Activation("elu", 0.7),
        "celu": Activation("celu", 0.7),
        "selu": Activation("selu"),
        "scaled_tanh": Activation("scaled_tanh", 0.7, 1.3),
    }[name]
    z = np.linspace(-60, 60, 1201).astype(cases.storage_dtype(dtype))
    _, slope = run(activation, z)
    assert (slope.astype(np.float64) >= 0).all()


def test_parameters_are_those_given(isa: str) -> None:
    """Several alphas of one function in turn: nothing is remembered from the last."""
    z = np.linspace(-3, 3, 101).astype(np.float32)
    for alpha in (0.5, 0.25, 2.0, 0.5):
        y, slope = run(Activation("leaky_relu", alpha), z)
        np.testing.assert_array_equal(y, np.where(z < 0, np.float32(alpha) * z, z))
        np.testing.assert_array_equal(slope, np.where(z < 0, alpha, 1))


# ---- on their own: value and slope from the input --------------------------------------------------------------------


def value_and_slope(name: str, z: Array, alpha: float, beta: float) -> tuple[Array, Array]:
    activation = fused_activation(name, alpha, beta)
    return rg.activation_forward(z, activation), rg.activation_backward(np.ones_like(z), activation, x=z)


class Bound(NamedTuple):
    """Parameters that the arithmetic holds exactly, and the largest errors in ulp of the exact result; where a result
    is a difference, or the argument of an exponential is rounded, `parts` adds to that."""

    alpha: float
    beta: float
    value: float
    slope: float


# exp is within 1.1 ulp, expm1 and log1p within 2, tanh and sigmoid within 3, erf within 4; a product adds a half.
# The smooth slopes are products of two or three of these. A factor of 2 doubles the unit that a subnormal is off by.
BOUNDS: dict[str, list[Bound]] = {
    "identity": [Bound(0, 0, 0, 0)],
    "relu": [Bound(0, 0, 0, 0)],
    "leaky_relu": [Bound(0.25, 0, 0.5, 0), Bound(-0.75, 0, 0.5, 0), Bound(0, 0, 0, 0)],
    "sigmoid": [Bound(0, 0, 3, 5)],
    "tanh": [Bound(0, 0, 3, 5)],
    "scaled_tanh": [Bound(1, 1, 3, 5), Bound(-2, 0.5, 3, 5), Bound(0, 1, 0, 0), Bound(1, 0, 0, 0)],
    "abs": [Bound(0, 0, 0, 0)],
    "linear": [Bound(-1.5, 0, 0.5, 0), Bound(0, 0, 0, 0)],
    "clamp": [Bound(-0.75, 2, 0, 0), Bound(1, 1, 0, 0)],
    "gelu_tanh": [
        Bound(math.sqrt(2 / math.pi), 0.044715, 4, 4),
        Bound(0.75, -0.0625, 4, 4),
        Bound(-0.5, 0.125, 4, 4),
        Bound(0, 0.0625, 1, 1),
    ],
    "hard_sigmoid": [Bound(0.25, 0.5, 1, 0), Bound(-0.125, 0.25, 1, 0), Bound(0, 0.5, 0, 0), Bound(0, 2, 0, 0)],
    "closed_hard_sigmoid": [Bound(0.25, 0.5, 1, 0), Bound(-0.125, 0.25, 1, 0), Bound(0, 0.5, 0, 0), Bound(0, 2, 0, 0)],
    "softplus": [Bound(1, 1, 3, 3), Bound(2, -0.5, 3, 3), Bound(-0.5, 1, 3, 3), Bound(0, 1, 0, 0), Bound(1, 0, 2, 0)],
    "softsign": [Bound(0, 0, 2, 4)],
    "elu": [Bound(1, 0, 2, 1.1), Bound(-2, 0, 2, 2), Bound(0, 0, 0, 0)],
    "clamped_leaky_relu": [Bound(0.25, 2, 0.5, 0), Bound(-0.5, 2, 0.5, 0), Bound(0, -1, 0, 0)],
    "linear_with_bias": [Bound(0.75, -0.5, 1, 0), Bound(0, 1.5, 0, 0)],
    "log_sigmoid": [Bound(0, 0, 3, 3)],
    "selu": [Bound(0, 0, 4, 3)],
    "celu": [Bound(1, 0, 2, 1.1), Bound(-1, 0, 2, 1.1), Bound(2, 0, 3, 1.1)],
    "hard_shrink": [Bound(0.5, 0, 0, 0), Bound(-0.5, 0, 0, 0), Bound(0, 0, 0, 0)],
    "soft_shrink": [Bound(0.5, 0, 0.5, 0), Bound(-0.5, 0, 0.5, 0), Bound(0, 0, 0, 0)],
    "tanh_shrink": [Bound(0, 0, 1, 6)],
    "threshold": [Bound(0.25, -2, 0, 0), Bound(0.25, 2, 0, 0)],
    "hard_swish": [Bound(0, 0, 2, 1.5)],
    "silu": [Bound(0, 0, 4, 4)],
    "relu6": [Bound(0, 0, 0, 0)],
    "erf": [Bound(0, 0, 4, 3)],
    "gelu": [Bound(0, 0, 6, 6)],
    "gelu_sigmoid": [Bound(0, 0, 4, 4)],
}
EVERY_BOUND = [pytest.param(name, bound, id=f"{name}-{i}") for name in BOUNDS for i, bound in enumerate(BOUNDS[name])]


def parts(name: str, z: Array, alpha: float, beta: float, dtype: Any) -> tuple[Array, Array]:
    """What the value and the slope may be off by beyond ulps of the result; z in the oracle's type."""
    nothing = np.zeros_like(z)
    u = float(np.finfo(dtype).eps) / 2
    smallest = z.dtype.type(np.finfo(dtype).smallest_subnormal)
    argument, steepness = nothing, nothing + 1  # of the sigmoid: the argument's error in units of u, and its slope
    match name:
        case "linear_with_bias":
            return 2 * u * (np.abs(alpha * z) + abs(beta)), nothing
        case "hard_sigmoid" | "closed_hard_sigmoid":
            return 2 * u * (np.minimum(np.abs(alpha * z), 2) + abs(beta)), nothing
        case "tanh_shrink":  # float is computed in double
            return nothing if dtype == np.float32 else 3 * u * np.minimum(np.abs(z), 1), nothing
        case "gelu":
            weight = np.where(z == 0, 0.5, reference.activation_value("gelu", z) / np.where(z == 0, 1, z))
            density = reference.activation_input_slope("erf", z / np.sqrt(z.dtype.type(2))) / np.sqrt(z.dtype.type(8))
            spread = nothing
        case "silu" | "gelu_sigmoid" | "gelu_tanh":
            t = z
            if name == "gelu_sigmoid":  # 1.702 and the product are rounded
                t = 1.702 * z
                argument, steepness = 2 * np.abs(t), 1.702 * steepness
            if name == "gelu_tanh":  # alpha, beta and five operations; z + beta z^3 may cancel
                z = np.clip(z, -1e9, 1e9)  # long saturated there
                t = 2 * alpha * (z + beta * z**3)
                argument = 7 * 2 * abs(alpha) * (np.abs(z) + np.abs(beta * z**3))
                steepness = 2 * abs(alpha) * (1 + 3 * abs(beta) * z**2)
            weight = reference.activation_value("sigmoid", t)
            spread = reference.activation_input_slope("sigmoid", t)
            density = steepness * spread
        case _:
            return nothing, nothing
    # value = z * weight, slope = weight + z * density. The argument's error moves the weight by spread; and a weight
    # that is subnormal, or rounds to 0, is off by a unit before it is multiplied.
    z = np.abs(z)
    value = z * (u * argument * spread + np.minimum(smallest, 4 * weight))
    slope = u * (6 * (weight + z * density) + argument * (spread + z * density))
    return value, slope + z * np.minimum(smallest * steepness, 4 * density)


class Expected(NamedTuple):
    z: Array
    value: Array
    value_parts: Array
    slope: Array
    slope_parts: Array


@functools.cache
def expected(name: str, bound: Bound, dtype: Any) -> Expected:
    few = dtype == np.float64 and name in ("tanh_shrink", "erf", "gelu")  # their oracle is slow
    far = np.array([1e4, 1e9, 1e19, 1e30, 3e38])
    kinks = np.array([0.0, -0.0, -3.0, 3.0, 6.0])
    z = np.concatenate([whole_range(dtype)[:: 10 if few else 1], *(p.astype(dtype) for p in (far, -far, kinks))])
    value = reference.activation_value(name, z, bound.alpha, bound.beta)
    if (
        name in ("hard_sigmoid", "closed_hard_sigmoid") and bound.alpha
    ):  # a z + b is compared after rounding: at 0 and 1 it may be either
        ramp = bound.alpha * z.astype(value.dtype) + bound.beta
        sure = np.minimum(np.abs(ramp), np.abs(ramp - 1)) > 2 * np.finfo(dtype).eps
        z, value = z[sure], value[sure]
    slope = reference.activation_input_slope(name, z, bound.alpha, bound.beta)
    with np.errstate(all="ignore"):
        value_parts, slope_parts = parts(name, z.astype(value.dtype), bound.alpha, bound.beta, dtype)
    return Expected(z, value, value_parts, slope, slope_parts)


def worst(got: Array, exact: Array, ulps: float, extra: Array) -> float:
    """The largest error in units of what is allowed; where nothing is, there must be none."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(got.dtype)
        finite = np.isfinite(rounded)
        np.testing.assert_array_equal(got[~finite], rounded[~finite])
        allowed = ulps * np.abs(np.spacing(np.where(finite, rounded, 1))).astype(exact.dtype) + extra
        error = np.abs(got - exact)
        ratio = np.where(error == 0, 0, error / allowed)[finite]
        assert not np.isnan(ratio).any()
        return float(np.max(ratio))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("name", "bound"), EVERY_BOUND)
def test_value_and_input_slope_over_the_whole_range(name: str, bound: Bound, dtype: Any, isa: str) -> None:
    """Every exponent, 0 and up to the largest numbers; exp itself as the slope of elu (z < 0) and of celu (-1)."""
    z, value, value_parts, slope, slope_parts = expected(name, bound, dtype)
    got_value, got_slope = value_and_slope(name, z, bound.alpha, bound.beta)
    assert worst(got_value, value, bound.value, value_parts) <= 1
    assert worst(got_slope, slope, bound.slope, slope_parts) <= 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_infinity_and_nan_on_their_own(name: str, dtype: Any, isa: str) -> None:
    """Limits where there are any: silu is 0 at -infinity, its slope 1 at +infinity."""
    alpha, beta = BOUNDS[name][0][:2]
    z = np.array([-math.inf, math.inf, math.nan, -math.nan] * 5, dtype)
    value, slope = value_and_slope(name, z, alpha, beta)
    for got, exact in (
        (value, reference.activation_value(name, z, alpha, beta)),
        (slope, reference.activation_input_slope(name, z, alpha, beta)),
    ):
        np.testing.assert_allclose(got, exact.astype(dtype), rtol=2 * np.finfo(dtype).eps)  # for selu's constants
    assert np.isnan(value[2:4]).all()


@pytest.mark.parametrize(
    ("name", "alpha", "beta"),
    [
        ("gelu_tanh", 0.0, 3e38),
        ("gelu_tanh", 3e38, 0.0),
        ("gelu_tanh", -3e38, 3e38),
        ("gelu_tanh", 1e20, -1e-38),
        ("softplus", 0.0, 3e38),
        ("softplus", 1e-20, 3e38),
        ("scaled_tanh", 0.0, 3e38),
        ("scaled_tanh", 1e-20, 3e38),
        ("hard_sigmoid", 3e38, -3e38),
        ("elu", -3e38, 0.0),
        ("celu", 1e-38, 0.0),
        ("leaky_relu", -3e38, 0.0),
    ],
)
def test_huge_parameters_make_no_nan(name: str, alpha: float, beta: float, isa: str) -> None:
    z = np.array([-3e38, -1e19, -1e4, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 1e4, 1e19, 3e38], np.float32)
    value, slope = value_and_slope(name, z, alpha, beta)
    assert not np.isnan(value).any()
    assert not np.isnan(slope).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_any_count_has_the_same_bits(name: str, dtype: Any, isa: str) -> None:
    """Around the width of a vector, in place as well, and nothing is written past the end."""
    activation = fused_activation(name, *ACTIVATION_PARAMETERS[name])
    z, dy = np.random.default_rng(5).normal(0, 3, (2, 40)).astype(dtype)
    value, dz = rg.activation_forward(z, activation), rg.activation_backward(dy, activation, x=z)
    for count in (0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33):
        for source, whole in ((z, value), (dy, dz), (z, dz)):
            out = source.copy()
            part = out[:count]
            if whole is value:
                assert rg.activation_forward(part, activation, out=part) is part
            else:
                other = {"x": part if source is z else z[:count]}
                assert (
                    rg.activation_backward(dy[:count] if source is z else part, activation, out=part, **other) is part
                )
            np.testing.assert_array_equal(part, whole[:count])
            np.testing.assert_array_equal(out[count:], source[count:])


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
