"""Precision of the data types, roundings of the activations, and the error measure."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from ..cases.types import Array, Float64s

__all__ = ["error_in_tolerances"]


class _Roundings(NamedTuple):
    """The rounding error that an activation adds, in units of u."""

    argument: float = 0.0  # of |z|, before f
    value: float = 0.0  # of |y|
    value_offset: float = 0.0  # absolute: the rounding of added parameters
    slope: float = 0.0  # of |dz|
    slope_offset: float = 0.0  # of |dy|


def activation_roundings(name: str, alpha: float, beta: float, double: bool) -> _Roundings:
    """Return the roundings of an activation. Parameters are also rounded to the arithmetic's type.

    The engine's elementary functions have these bounds in ulp (an ulp is up to 2 u): exp 1.1, expm1 and log1p 2, tanh
    and sigmoid 3 (tests/support/activation.py).
    """
    a, b = abs(alpha), abs(beta)
    match name:
        case "leaky_relu" | "clamped_leaky_relu" | "linear":
            return _Roundings(value=2, value_offset=b, slope=2)  # alpha, product; the bound beta
        case "sigmoid":
            return _Roundings(value=6, slope=3)  # 1 - y, two products
        case "tanh":
            return _Roundings(value=6, slope=4)  # 1 - y, 1 + y, two products
        case "scaled_tanh":
            # a - y keeps the rounding of a, however small the difference: b/a * u|a| * (a + y) is 2 u|ab|.
            return _Roundings(argument=2, value=8, slope=6, slope_offset=2 * a * b)
        case "clamp":
            return _Roundings(value_offset=max(a, b))
        case "hard_sigmoid" | "closed_hard_sigmoid" | "linear_with_bias":
            return _Roundings(argument=2, value=1, value_offset=b, slope=2)
        case "softplus":
            # The sum of max(t, 0) and log1p(exp(-|t|)) has one sign: 1 + 4 roundings, a, two products.
            return _Roundings(argument=2, value=8, slope=9)  # expm1 4, y/a 2, a*b 1, products 2
        case "softsign":
            return _Roundings(value=2, slope=3)
        case "elu":
            return _Roundings(value=6, slope=2, slope_offset=a)  # y + a keeps the rounding of a
        case "log_sigmoid":
            return _Roundings(value=7, slope=5)
        case "selu":
            # lambda * alpha = 1.76 is a product of two rounded numbers, rounded: 3.
            return _Roundings(value=8, slope=2, slope_offset=3 * 1.76)
        case "celu":
            return _Roundings(argument=2, value=6, slope=2, slope_offset=2)  # 1 + y/a keeps the roundings of y/a
        case "soft_shrink":
            return _Roundings(value=1, value_offset=a)
        case "tanh_shrink":
            # float32 is computed in float64 and rounded once. In float64 z - tanh z has the error of tanh, 3 u of a
            # number below 1. The slope is the square of t = x - y, where x, up to 20, is rounded to 16 u: 32 u.
            if double:
                return _Roundings(value=2, value_offset=3, slope=4, slope_offset=40)
            return _Roundings(value=1, slope=2)
        case "threshold":
            return _Roundings(value_offset=b)
        case "gelu" | "gelu_sigmoid" | "silu" | "hard_swish" | "erf":
            return _Roundings(argument=2, value=12)  # 6 ulp
        case "gelu_tanh":
            return _Roundings(argument=7, value=12)  # alpha, beta and five operations
        case _:
            return _Roundings()


class Precision(NamedTuple):
    unit: float  # u of the arithmetic
    storage: float  # largest relative error of storing a result; 0: it is stored as computed
    smallest: float  # largest absolute error near 0: half of the smallest subnormal
    double: bool = False


DOUBLE_UNIT: Final = 2.0**-53
# Where long double is no wider than float64, the oracle's roundings are as large as the engine's.
_DOUBLE_ORACLE: Final = 1.0 if float(np.finfo(np.longdouble).eps) < 2.0**-60 else 2.0
PRECISIONS: Final[dict[str, Precision]] = {
    "float32": Precision(2.0**-24, 0.0, 2.0**-150),
    "float64": Precision(DOUBLE_UNIT * _DOUBLE_ORACLE, 0.0, 2.0**-1074, double=True),
    "float16": Precision(2.0**-24, 2.0**-11, 2.0**-25),
    "bfloat16": Precision(2.0**-24, 2.0**-8, 2.0**-134),
}


def as_float64(values: Array) -> Float64s:
    return np.asarray(values, dtype=np.float64)


@np.errstate(all="ignore")
def error_in_tolerances(got: Array, expected: Array, tolerance: Array) -> float:
    """Return the maximum of |got - expected| / tolerance; infinite if a NaN or infinity is not in both."""
    wide = np.longdouble if expected.dtype == np.longdouble else np.float64
    actual, oracle = np.asarray(got).astype(wide), np.asarray(expected).astype(wide)
    if actual.shape != oracle.shape:
        return math.inf
    same = (actual == oracle) | (np.isnan(actual) & np.isnan(oracle))
    error = np.abs(actual - oracle)
    ratio = np.where(same, 0.0, error / np.broadcast_to(tolerance, oracle.shape))
    ratio = np.where(np.isnan(ratio), math.inf, ratio)
    return float(ratio.max(initial=0.0))


# Activations whose slope is a difference of numbers of size 1, which may cancel.
SLOPE_IS_A_DIFFERENCE: Final = ("gelu", "gelu_tanh", "gelu_sigmoid", "silu", "hard_swish")
