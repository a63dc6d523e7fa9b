"""The functions of maps, element by element: errors in units in the last place, and special values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd import _core
from support.arrays import Array, same_bits
from support.maps import ARITIES, apply, without_nan_payload

FLOATS = (np.float32, np.float64)
Long = np.longdouble


def erf(x: Array) -> Array:
    return np.array([math.erf(v) for v in x.astype(np.float64).tolist()], Long)


# The exact function, and the largest error in ulp for float32 and float64.
FUNCTIONS: dict[str, tuple[Callable[..., Any], float, float]] = {
    "exp": (np.exp, 1.1, 1.1),
    "exp2": (np.exp2, 1.2, 1.2),
    "expm1": (np.expm1, 2, 2),
    "log": (np.log, 3, 3),
    "log2": (np.log2, 0.51, 1),
    "log10": (np.log10, 0.51, 1),
    "log1p": (np.log1p, 0.51, 1),
    "sin": (np.sin, 0.51, 1),
    "cos": (np.cos, 0.51, 1),
    "tan": (np.tan, 0.51, 3),
    "asin": (np.arcsin, 0.51, 2),
    "acos": (np.arccos, 0.51, 2),
    "atan": (np.arctan, 0.51, 2.5),
    "sinh": (np.sinh, 3, 3),
    "cosh": (np.cosh, 3, 3),
    "tanh": (np.tanh, 3, 3),
    "asinh": (np.arcsinh, 0.51, 3),
    "acosh": (np.arccosh, 0.51, 3),
    "atanh": (np.arctanh, 0.51, 3),
    "erf": (erf, 4, 4 + 1),  # the C library's own error
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 3, 3),
    "pow": (np.power, 0.51, 2),
    "atan2": (np.arctan2, 0.51, 3),
}


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
    near = 1 + small * rng.choice((-1, 1), small.size)
    turns = rng.integers(-(10**6), 10**6, 5000) * (math.pi / 2)
    powers = np.concatenate([10.0 ** np.arange(-30, 30), 2.0 ** np.arange(-100, 100)])
    parts = (rng.uniform(-ends, ends, 20_000), rng.uniform(-10, 10, 30_000), rng.uniform(-1, 1, 20_000), small, -small)
    all_parts = [*parts, near, near - 2, turns, powers]
    return np.concatenate([everything[np.isfinite(everything)], *(p.astype(dtype) for p in all_parts)])


def operands_of(name: str, dtype: Any) -> list[Array]:
    x = whole_range(dtype)
    if ARITIES[name] == 1:
        return [x]
    rng = np.random.default_rng(2)
    y = rng.permutation(x)
    if name == "pow":  # results that neither overflow nor vanish
        base = np.exp(rng.uniform(-60, 60, 60_000)).astype(dtype)
        reach = 87 if dtype == np.float32 else 708
        exponent = (rng.uniform(-reach, reach, base.size) / np.log(base.astype(np.float64))).astype(dtype)
        whole = rng.integers(-30, 30, 4000).astype(dtype)
        x, y = np.concatenate([x, base, -base[:4000]]), np.concatenate([y, exponent, whole])
    return [x, y]


def errors_in_ulp(got: Array, exact: Array) -> Array:
    """Relative to the spacing of results; NaN and infinities must be the same."""
    info = np.finfo(got.dtype)
    with np.errstate(all="ignore"):
        rounded = exact.astype(got.dtype)
        spacing = np.maximum(np.spacing(np.abs(rounded)).astype(Long), Long(info.smallest_subnormal))
        error = np.abs(got.astype(Long) - exact) / spacing
    finite = np.isfinite(rounded) & np.isfinite(got)
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    # Just below overflow either is near enough.
    edge = (np.abs(np.where(np.isfinite(rounded), rounded, got)) >= info.max * (1 - 4 * info.eps)) & ~np.isnan(got)
    return np.where(finite, error, np.where(same | edge, 0, np.inf))


@pytest.mark.skipif(np.finfo(Long).nmant < 63, reason="long double is not more precise than double")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_in_ulp(name: str, dtype: Any) -> None:
    function, single, double = FUNCTIONS[name]
    operands = operands_of(name, dtype)
    with np.errstate(all="ignore"):
        exact = function(*(operand.astype(Long) for operand in operands))
    got = apply(name, *operands)
    errors = errors_in_ulp(got, exact)
    # A subnormal result may be off by one smallest subnormal.
    tiny = np.abs(exact) < np.finfo(dtype).tiny
    bound = np.where(tiny, 1 + (single if dtype == np.float32 else double), single if dtype == np.float32 else double)
    worst = int(np.argmax(errors - bound))
    assert errors[worst] <= bound[worst], ([float(o[worst]) for o in operands], got[worst], exact[worst])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_levels_have_the_same_bits(name: str, dtype: Any) -> None:
    operands = operands_of(name, dtype)
    reference = None
    for level in _core.isa_levels():
        assert _core.select_isa(level)
        got = without_nan_payload(apply(name, *operands, threads=2))
        reference = got if reference is None else reference
        assert same_bits(got, reference), level


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("erf", "sigmoid")])
def test_special_values_are_numpys(name: str, dtype: Any, isa: str) -> None:
    info = np.finfo(dtype)
    positive = [0, 1, 2, 3, 0.5, 1.5, 2.5, 1e3, math.inf, math.nan, float(info.max), float(info.tiny)]
    positive += [float(info.smallest_subnormal), 1 / float(info.eps), 2 / float(info.eps) + 2]
    values = np.array([*positive, *(-v for v in positive)], dtype)
    grid = np.meshgrid(*[values] * ARITIES[name], indexing="ij")
    operands = [np.ascontiguousarray(axis.ravel()) for axis in grid]
    got = apply(name, *operands)
    with np.errstate(all="ignore"):
        expected = FUNCTIONS[name][0](*operands)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isinf(got), np.isinf(expected))
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(got[numbers], expected[numbers], rtol=8 * float(info.eps), atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_erf_and_sigmoid_at_their_ends(dtype: Any, isa: str) -> None:
    x = np.array([0, -0.0, math.inf, -math.inf, math.nan], dtype)
    np.testing.assert_array_equal(apply("erf", x), np.array([0, -0.0, 1, -1, math.nan], dtype))
    np.testing.assert_array_equal(apply("sigmoid", x), np.array([0.5, 0.5, 1, 0, math.nan], dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_powers_that_are_exact(dtype: Any, isa: str) -> None:
    n = np.arange(-120, 120).astype(dtype)
    np.testing.assert_array_equal(apply("exp2", n), np.ldexp(dtype(1), n.astype(int)))
    np.testing.assert_array_equal(apply("log2", np.ldexp(dtype(1), n.astype(int))), n)
    np.testing.assert_array_equal(apply("pow", np.full_like(n, -2), n), (-1.0) ** n * np.ldexp(dtype(1), n.astype(int)))
    tens = np.arange(0, 11 if dtype == np.float32 else 23)
    np.testing.assert_array_equal(apply("log10", (10.0**tens).astype(dtype)), tens.astype(dtype))
    x = np.linspace(-30, 30, 1001).astype(dtype)
    np.testing.assert_array_equal(apply("pow", x, np.ones_like(x)), x)
