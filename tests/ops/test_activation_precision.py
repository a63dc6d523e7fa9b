"""Activations element by element: errors in units in the last place, special points, saturation and NaN."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import retrograd as rg
from retrograd import Activation
from retrograd.lab import cases, reference
from retrograd.lab.bounds.precision import activation_roundings
from retrograd.lab.cases import ACTIVATION_PARAMETERS, FUSED_ACTIVATIONS
from retrograd.lab.verify import fused_activation
from retrograd.ops.activation import ACTIVATIONS
from support.activation import BOUNDS, DTYPES, Bound
from support.arrays import Array

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


@functools.cache
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
    z = np.concatenate([everything[np.isfinite(everything)], *(p.astype(dtype) for p in parts)])
    z.flags.writeable = False  # shared by all tests
    return z


@functools.cache
def exact_value(name: str, dtype: Any) -> Array:
    """Of the whole range, once for all levels."""
    alpha, beta, *_ = ULP_BOUNDS[name]
    return reference.activation_value(name, whole_range(dtype), alpha, beta)


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
    assert ulp_error(y, exact_value(name, dtype)) <= value_bound
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


# ---- the tables of docs/numerics.md ----------------------------------------------------------------------------------


def documented(heading: str) -> dict[str, list[str]]:
    """The rows of a table of "Slopes of saturated activations", by their first column."""
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
    table = page.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {row[0]: row[1:] for row in rows}


def saturated_errors(name: str, z: float, slope_from: str) -> tuple[Array, Array]:
    """Relative errors of dx in float32 near z, and their bounds."""
    x = (z + np.linspace(-0.01, 0.01, 2001)).astype(np.float32)
    wide = x.astype(np.float64)
    y = np.tanh(wide) if name == "tanh" else 1 / (1 + np.exp(-wide))
    slope = 1 / np.cosh(wide) ** 2 if name == "tanh" else np.exp(-wide) / (1 + np.exp(-wide)) ** 2
    u, roundings = 2.0**-24, activation_roundings(name, 0, 0, double=False)
    if slope_from == "input":
        bound = np.full(x.shape, 12 * u)  # as in lab/bounds/norm.py
    else:
        change = np.abs(2 * y if name == "tanh" else 1 - 2 * y)  # of the slope, with y
        bound = u * (roundings.value * np.abs(y) * change / slope + roundings.slope)
    return np.abs(run(Activation(name), x, slope_from=slope_from)[1] / slope - 1), bound


def test_errors_of_saturated_slopes_are_as_documented(isa: str) -> None:
    columns = [(name, slope_from) for name in ("tanh", "sigmoid") for slope_from in ("output", "input")]
    rows = documented("z")
    assert "5" in rows
    for z, row in rows.items():
        for (name, slope_from), error in zip(columns, row, strict=True):
            errors, bounds = saturated_errors(name, float(z), slope_from)
            assert f"{errors.max():.1e}" == error, (name, slope_from, z)
            assert (errors <= bounds).all(), (name, slope_from, z)


def test_slopes_from_y_vanish_where_documented(isa: str) -> None:
    rows = documented("dtype of y")
    assert set(rows) == {"float64", "float32", "float16", "bfloat16"}
    for dtype, row in rows.items():
        for name, z in zip(("tanh", "sigmoid"), row, strict=True):
            x = np.linspace(1, 40, 39001).astype(cases.storage_dtype(dtype))
            slopes = rg.activation_backward(np.ones_like(x), name, y=rg.activation_forward(x, name))
            first = float(x[np.argmax(slopes.astype(np.float64) == 0)])
            assert f"{first:.1f}" == z, (dtype, name)


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
