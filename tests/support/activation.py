"""Activations with parameters, and the largest errors that they may have."""

from __future__ import annotations

import math
from typing import NamedTuple

DTYPES = ("float32", "float64", "float16", "bfloat16")


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
