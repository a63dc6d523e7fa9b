"""The oracle: normalization, LSTM, linear layers, losses, their gradients and optimizer steps, slow NumPy on purpose.

Nothing here is shared with the engine, so the two cannot share a mistake. Arithmetic is float64 for float32, float16
and bfloat16 data and `numpy.longdouble` for float64 data, so that the oracle is the more precise of the two. (Where the
platform's long double is a float64, as on Windows and Apple silicon, float64 data gets no extra digits.)

All four norms are one formula on x seen as [N, G, K, R]: a statistics set is one (n, g), `gamma` and `beta` are indexed
by (g, k). N here counts independent samples: it is 1 for batch norm, whose batch axis is part of R.

The LSTM is one cell, applied step by step to the samples that take part in the step; layers, directions, sequence
lengths and dropout are what it is handed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "ACTIVATIONS",
    "LSTM_ACTIVATIONS",
    "Kind",
    "LstmBackward",
    "LstmCell",
    "LstmForward",
    "NormBackward",
    "NormForward",
    "activation_input_slope",
    "activation_slope",
    "activation_value",
    "active_from_batch_sizes",
    "active_from_lengths",
    "adam_step",
    "apply_input_slope",
    "apply_slope",
    "clipped_gradients",
    "dropout_mask",
    "embedding_backward",
    "huber",
    "linear_backward",
    "linear_forward",
    "lstm_backward",
    "lstm_forward",
    "mean_squared_error",
    "norm_backward",
    "norm_forward",
    "philox4x32",
    "philox_mask",
    "rmsprop_step",
    "running_update",
    "sgd_step",
    "softmax_cross_entropy",
]

Array: TypeAlias = npt.NDArray[Any]
Kind: TypeAlias = Literal["batch", "instance", "layer", "group"]

ACTIVATIONS = (
    "identity",
    "relu",
    "leaky_relu",
    "sigmoid",
    "tanh",
    "scaled_tanh",
    "abs",
    "linear",
    "clamp",
    "gelu_tanh",
    "hard_sigmoid",
    "softplus",
    "softsign",
    "elu",
    "clamped_leaky_relu",
    "linear_with_bias",
    "log_sigmoid",
    "selu",
    "celu",
    "hard_shrink",
    "soft_shrink",
    "tanh_shrink",
    "threshold",
    "hard_swish",
    "silu",
    "relu6",
    "erf",
    "gelu",
    "gelu_sigmoid",
    "closed_hard_sigmoid",
)
# Of these the output does not tell the slope: two inputs share one, or (erf) nearly do.
_SLOPE_NEEDS_INPUT = ("abs", "gelu_tanh", "hard_swish", "silu", "erf", "gelu", "gelu_sigmoid", "closed_hard_sigmoid")

# Strings, because these have more digits than a float64 literal keeps.
_SELU_SCALE = "1.0507009873554804934193349852946"
_SELU_ALPHA = "1.6732632423543772848170429916717"
_GELU_SIGMOID = "1.702"
_PI = "3.14159265358979323846264338327950288"


def _working(a: npt.ArrayLike) -> tuple[Array, type[np.floating[Any]]]:
    """`a` as an array, and the type to compute in: one step wider than the type of `a`."""
    a = np.asarray(a)
    if a.dtype.kind in "biu":
        a = a.astype(np.float64)
    wide = a.dtype == np.float64 or a.dtype == np.longdouble
    return a, np.longdouble if wide else np.float64


# --- activations: a = alpha, b = beta ---------------------------------------------------------------------------------


@np.errstate(all="ignore")
def activation_value(name: str, z: npt.ArrayLike, alpha: float = 0.0, beta: float = 0.0) -> Array:
    """f(z)."""
    z, work = _working(z)
    return _value(name, z.astype(work), alpha, beta)


@np.errstate(all="ignore")
def activation_input_slope(name: str, z: npt.ArrayLike, alpha: float = 0.0, beta: float = 0.0) -> Array:
    """f'(z) from z itself: defined for every activation and all its parameters.

    At a kink it is what `activation_slope` finds, where that can. Under NaN a slope made of constants is that of the
    piece that is left when all comparisons fail; the others are NaN.
    """
    z, work = _working(z)
    return _input_slope(name, z.astype(work), alpha, beta)


@np.errstate(all="ignore")
def activation_slope(name: str, y: npt.ArrayLike, alpha: float = 0.0, beta: float = 0.0) -> Array:
    """f'(z), recovered from y = f(z). At a kink between a constant piece and another it is 0."""
    y, work = _working(y)
    return np.where(_flat(name, y, alpha, beta), 0.0, _slope(name, y.astype(work), alpha, beta))


@np.errstate(all="ignore")
def apply_slope(name: str, y: npt.ArrayLike, dy: npt.ArrayLike, alpha: float = 0.0, beta: float = 0.0) -> Array:
    """dz = dy * f'(z).

    Where f is constant dz is 0 whatever dy is, Inf and NaN included. A smooth slope that happens to round to 0 (tanh at
    y = 1) and a parameter that is 0 (linear with alpha = 0) are multiplied as usual.
    """
    y, work = _working(y)
    return _dz(name, y, np.asarray(dy).astype(work), work, alpha, beta)


@np.errstate(all="ignore")
def apply_input_slope(name: str, z: npt.ArrayLike, dy: npt.ArrayLike, alpha: float = 0.0, beta: float = 0.0) -> Array:
    """dz = dy * f'(z), the slope from z. Where f is constant dz is 0, as in `apply_slope`."""
    z, work = _working(z)
    z = z.astype(work)
    flat = _flat_input(name, z, alpha, beta)
    return np.where(flat, 0.0, np.asarray(dy).astype(work) * _input_slope(name, z, alpha, beta))


def _dz(name: str, y: Array, dy: Array, work: type[np.floating[Any]], a: float, b: float) -> Array:
    return np.where(_flat(name, y, a, b), 0.0, dy * _slope(name, y.astype(work), a, b))


def _value(name: str, z: Array, a: float, b: float) -> Array:
    number = z.dtype.type
    match name:
        case "identity":
            y = z
        case "relu":
            y = np.maximum(z, 0.0)  # np.maximum and np.minimum hand NaN on
        case "leaky_relu":
            y = np.where(z < 0, a * z, z)
        case "sigmoid":
            y = _sigmoid(z)
        case "tanh":
            y = np.tanh(z)
        case "scaled_tanh":
            y = a * np.tanh(b * z)
        case "linear":
            y = a * z
        case "clamp":
            y = np.minimum(np.maximum(z, a), b)
        case "hard_sigmoid" | "closed_hard_sigmoid":
            y = np.maximum(np.minimum(a * z + b, 1.0), 0.0)
        case "softplus":
            y = a * (np.maximum(b * z, 0.0) + np.log1p(np.exp(-np.abs(b * z))))
        case "softsign":
            y = z / (1 + np.abs(z))
        case "elu":
            y = np.where(z < 0, a * np.expm1(np.minimum(z, 0.0)), z)
        case "clamped_leaky_relu":
            y = np.minimum(np.where(z < 0, a * z, z), b)
        case "linear_with_bias":
            y = a * z + b
        case "log_sigmoid":
            y = np.minimum(z, 0.0) - np.log1p(np.exp(-np.abs(z)))
        case "selu":
            scale, low = number(_SELU_SCALE), number(_SELU_SCALE) * number(_SELU_ALPHA)
            y = np.where(z < 0, low * np.expm1(np.minimum(z, 0.0)), scale * z)
        case "celu":
            y = np.where(z < 0, a * np.expm1(np.minimum(z, 0.0) / a), z)
        case "hard_shrink":
            y = np.where(np.abs(z) < abs(a), 0.0, z)
        case "soft_shrink":
            y = np.where(np.abs(z) < abs(a), 0.0, z - np.copysign(number(a), z))
        case "tanh_shrink":
            y = _tanh_shrink(z)
        case "threshold":
            y = np.where(z <= a, b, z)
        case "relu6":
            y = np.minimum(np.maximum(z, 0.0), 6.0)
        case "abs":
            y = np.abs(z)
        case "erf":
            y = 1 - _erfc(z)
            y = np.where(np.abs(z) < 1, _erf_series(np.where(np.abs(z) < 1, z, 0.0)), y)
        case "gelu":
            y = _gated(z, _normal_cdf(z))
        case "gelu_tanh":
            # (1 + tanh u) / 2 is sigmoid(2u), which keeps its digits where tanh u approaches -1.
            y = _gated(z, _sigmoid(2 * a * (z + b * z**3)))
        case "gelu_sigmoid":
            y = _gated(z, _sigmoid(number(_GELU_SIGMOID) * z))
        case "silu":
            y = _gated(z, _sigmoid(z))
        case "hard_swish":
            y = _gated(z, np.minimum(np.maximum(z + 3, 0.0), 6.0) / 6)
        case _:
            raise ValueError(f"unknown activation {name!r}")
    return np.asarray(y, dtype=number)


def _input_slope(name: str, z: Array, a: float, b: float) -> Array:
    number = z.dtype.type
    one = np.ones_like(z)
    match name:
        case "identity":
            slope = one
        case "relu":
            slope = np.where(z <= 0, 0.0, one)
        case "leaky_relu":
            slope = np.where(z < 0, a, one)
        case "sigmoid":
            slope = _sigmoid(z) * _sigmoid(-z)
        case "tanh":
            slope = 1 / np.cosh(z) ** 2
        case "scaled_tanh":
            slope = number(a) * b / np.cosh(b * z) ** 2
        case "abs":
            slope = np.sign(z)
        case "linear" | "linear_with_bias":
            slope = a * one
        case "clamp":
            slope = np.where((z <= a) | (z >= b), 0.0, one)
        case "hard_sigmoid":
            ramp = a * z + b
            slope = np.where((ramp <= 0) | (ramp >= 1), 0.0, a)
        case "closed_hard_sigmoid":
            ramp = a * z + b
            slope = np.where((ramp < 0) | (ramp > 1), 0.0, a)
        case "softplus":
            slope = number(a) * b * _sigmoid(b * z)
        case "softsign":
            slope = 1 / (1 + np.abs(z)) ** 2
        case "elu":
            slope = np.where(z < 0, a * np.exp(np.minimum(z, 0.0)), one)
        case "clamped_leaky_relu":
            slope = np.where(z < 0, a, one)
            slope = np.where(np.where(z < 0, a * z, z) >= b, 0.0, slope)
        case "log_sigmoid":
            slope = _sigmoid(-z)
        case "selu":
            scale, low = number(_SELU_SCALE), number(_SELU_SCALE) * number(_SELU_ALPHA)
            slope = np.where(z < 0, low * np.exp(np.minimum(z, 0.0)), scale)
        case "celu":
            slope = np.where(z < 0, np.exp(np.minimum(z, 0.0) / a), one)
        case "hard_shrink" | "soft_shrink":
            slope = np.where(np.abs(z) < abs(a), 0.0, one)
        case "tanh_shrink":
            slope = np.tanh(z) ** 2
        case "threshold":
            slope = np.where(z <= a, 0.0, one)
        case "relu6":
            slope = np.where((z <= 0) | (z >= 6), 0.0, one)
        case "erf":
            slope = 2 / np.sqrt(number(_PI)) * _exp_minus_square(z, 1.0)
        case "gelu":
            slope = _normal_cdf(z) + _gated(z, _exp_minus_square(z, 0.5) / np.sqrt(2 * number(_PI)))
        case "gelu_tanh":
            t, dt = 2 * a * (z + b * z**3), 2 * a * (1 + 3 * b * z**2)
            slope = _sigmoid(t) + _gated(z * dt, _sigmoid(t) * _sigmoid(-t))
        case "gelu_sigmoid":
            t = number(_GELU_SIGMOID) * z
            slope = _sigmoid(t) + _gated(t, _sigmoid(t) * _sigmoid(-t))
        case "silu":
            slope = _sigmoid(z) + _gated(z, _sigmoid(z) * _sigmoid(-z))
        case "hard_swish":
            slope = np.where(z < -3, 0.0, np.where(z > 3, 1.0, (2 * z + 3) / 6))
        case _:
            raise ValueError(f"unknown activation {name!r}")
    return np.asarray(slope, dtype=number)


def _flat_input(name: str, z: Array, a: float, b: float) -> npt.NDArray[np.bool_]:
    """Where z lies on a constant piece of f, its kinks included where the slope there is 0. NaN never does."""
    match name:
        case "relu":
            flat = z <= 0
        case "clamp":
            flat = (z <= a) | (z >= b)
        case "hard_sigmoid":
            flat = (a * z + b <= 0) | (a * z + b >= 1)
        case "closed_hard_sigmoid":
            flat = (a * z + b < 0) | (a * z + b > 1)
        case "clamped_leaky_relu":
            flat = np.where(z < 0, a * z, z) >= b
        case "hard_shrink" | "soft_shrink":
            flat = np.abs(z) < abs(a)
        case "threshold":
            flat = z <= a
        case "relu6":
            flat = (z <= 0) | (z >= 6)
        case "hard_swish":
            flat = z < -3
        case _:
            flat = np.zeros(z.shape, dtype=np.bool_)
    return np.asarray(flat, dtype=np.bool_)


def _flat(name: str, y: Array, alpha: float, beta: float) -> npt.NDArray[np.bool_]:
    """Where y lies on a constant piece of f. NaN never does.

    A bound is compared as the number y can hold: in a float32 y, clamp to 0.1 wrote float32(0.1), which exceeds 0.1.
    """
    a, b = np.asarray(alpha).astype(y.dtype), np.asarray(beta).astype(y.dtype)
    match name:
        case "relu":
            flat = y <= 0
        case "clamp":
            flat = (y <= a) | (y >= b)
        case "hard_sigmoid":
            flat = (y <= 0) | (y >= 1)
        case "clamped_leaky_relu":
            flat = y >= b
        case "hard_shrink" | "soft_shrink":
            flat = (y == 0) & (alpha != 0)  # with alpha = 0 they are the identity, which has no flat piece
        case "threshold":
            flat = y == b
        case "relu6":
            flat = (y <= 0) | (y >= 6)
        case _:
            flat = np.zeros(y.shape, dtype=np.bool_)
    return np.asarray(flat, dtype=np.bool_)


def _slope(name: str, y: Array, a: float, b: float) -> Array:
    """f'(z) from y, on the pieces where f is not constant.

    A y that was rounded when it was stored may lie beyond the asymptote; the slope there is 0, not below it.
    """
    number = y.dtype.type
    needs_at_least_0 = name in ("leaky_relu", "clamped_leaky_relu")
    needs_positive = name in ("elu", "celu")
    needs_nonzero = name in ("softplus", "scaled_tanh")
    refused = (needs_at_least_0 and a < 0) or (needs_positive and a <= 0) or (needs_nonzero and a == 0)
    if refused or name in _SLOPE_NEEDS_INPUT:
        raise ValueError(f"{name} with alpha = {a}: y does not determine the slope")
    one = np.ones_like(y)
    match name:
        case "identity" | "relu" | "clamp" | "hard_shrink" | "soft_shrink" | "threshold" | "relu6":
            slope = one
        case "leaky_relu" | "clamped_leaky_relu":
            # y = 0 comes from z = 0 when alpha > 0, and from all of z <= 0 when alpha = 0.
            slope = np.where((y < 0) | ((y == 0) & (a == 0)), a, one)
        case "sigmoid":
            slope = y * (1 - y)
        case "tanh":
            slope = (1 - y) * (1 + y)  # 1 - y*y would round y*y first and lose digits near 1
        case "scaled_tanh":
            slope = np.maximum((a - y) * (a + y), 0.0) * (b / number(a))
        case "linear" | "linear_with_bias" | "hard_sigmoid":
            slope = a * one
        case "softplus":
            slope = number(a) * b * -np.expm1(-y / a)
        case "softsign":
            slope = (1 - np.abs(y)) ** 2
        case "elu":
            slope = np.where(y < 0, np.maximum(y + a, 0.0), one)
        case "log_sigmoid":
            slope = -np.expm1(y)
        case "selu":
            scale, low = number(_SELU_SCALE), number(_SELU_SCALE) * number(_SELU_ALPHA)
            slope = np.where(y < 0, np.maximum(y + low, 0.0), scale)
        case "celu":
            slope = np.where(y < 0, np.maximum(1 + y / a, 0.0), one)
        case "tanh_shrink":
            slope = np.tanh(_tanh_shrink_inverse(np.abs(y))) ** 2
        case _:
            raise ValueError(f"unknown activation {name!r}")
    return np.asarray(slope, dtype=number)


def _sigmoid(z: Array) -> Array:
    e = np.exp(-np.abs(z))  # never overflows
    return np.asarray(np.where(z < 0, e, 1.0) / (1 + e))


def _gated(z: Array, weight: Array) -> Array:
    """z * weight, with its limit 0 where the weight has vanished and z is infinite."""
    return np.where(weight == 0, 0.0, z * weight)


def _exp_minus_square(z: Array, scale: float) -> Array:
    """exp(-scale z^2). The square of z's leading 24 bits is exact; so the rounding of z^2, large where exp is small,
    does not show."""
    z = np.minimum(np.abs(z), 200.0)  # exp(-200^2 / 2) is 0 in every type
    head = z.astype(np.float32).astype(z.dtype)
    return np.asarray(np.exp(-scale * head**2) * np.exp(-scale * (z - head) * (z + head)))


def _normal_cdf(z: Array) -> Array:
    """The integral of the normal density up to z: half of erfc(-z / sqrt 2), relatively precise for z < 0."""
    if z.dtype == np.float64:
        return 0.5 * _erfc(-z / math.sqrt(2))  # the argument's rounding costs z^2 units: little, seen from a float32
    x = np.abs(z) / np.sqrt(z.dtype.type(2))
    far = x >= 1.5
    tail = np.where(far, _exp_minus_square(z, 0.5) * _scaled_erfc(np.where(far, x, 2.0)), _erfc(np.where(far, 0.0, x)))
    return np.where(z < 0, tail, 2 - tail) / 2


def _erfc(x: Array) -> Array:
    """1 - erf(x): the C library's for float64, which has no wider one."""
    if x.dtype == np.float64:
        return np.asarray(np.vectorize(math.erfc, otypes=[np.float64])(x))
    magnitude = np.abs(x)
    far = magnitude >= 1.5
    near = 1 - _erf_series(np.where(far, 0.0, magnitude))
    tail = np.where(far, _exp_minus_square(x, 1.0) * _scaled_erfc(np.where(far, magnitude, 2.0)), near)
    return np.where(x < 0, 2 - tail, tail)


def _erf_series(x: Array) -> Array:
    """erf(x) = 2 / sqrt(pi) exp(-x^2) times the sum over n of 2^n x^(2n+1) / (2n+1)!!, all of one sign.

    For |x| < 1.5 fifty terms leave out less than 1e-40.
    """
    term = total = x
    for n in range(1, 50):
        term = term * (2 * x * x) / (2 * n + 1)
        total = total + term
    return np.asarray(2 / np.sqrt(x.dtype.type(_PI)) * np.exp(-x * x) * total)


def _scaled_erfc(x: Array) -> Array:
    """exp(x^2) erfc(x) for x >= 1.5, by its continued fraction x + (1/2) / (x + (2/2) / (x + (3/2) / ...)).

    Three hundred levels leave out e^(-4 x sqrt(150)), 1e-31 at 1.5.
    """
    fraction = x
    for n in range(300, 0, -1):
        fraction = x + (n / 2) / fraction
    return np.asarray(1 / (np.sqrt(x.dtype.type(_PI)) * fraction))


def _tanh_shrink(z: Array) -> Array:
    """z - tanh(z), without the cancellation near 0.

    z - tanh z = (z cosh z - sinh z) / cosh z, and the numerator is the sum over k >= 1 of 2k z^(2k+1) / (2k+1)!, whose
    terms have one sign. For |z| < 2 nineteen of them leave out 1e-36 of the sum, less than the widest long double sees.
    """
    small = np.abs(z) < 2
    s = np.where(small, z, 0.0)
    total = np.zeros_like(s)
    for k in range(19, 0, -1):  # smallest term first
        total = total + s ** (2 * k + 1) * (z.dtype.type(2 * k) / math.factorial(2 * k + 1))
    return np.where(small, total / np.cosh(s), z - np.tanh(z))


def _tanh_shrink_inverse(y: Array) -> Array:
    """The root X of X - tanh X = y, for y >= 0, by Newton's method; X - tanh X is convex there."""
    root = np.where(y < 1, np.cbrt(3 * y), y + 1)
    # Below, X^3/3 = y is exact to the last digit; above, tanh X is 1. Neither needs (or survives) a Newton step.
    settled = (root * root < np.finfo(y.dtype).eps) | (y > 100)
    x = np.where(settled, 1.0, root)
    target = np.where(settled, 1.0, y)
    for _ in range(8):  # quadratic from a start within 30 %: four steps reach 80 bits, five the widest long double
        x = x - (_tanh_shrink(x) - target) / np.tanh(x) ** 2
    return np.where(settled, root, x)


# --- normalization ----------------------------------------------------------------------------------------------------


class NormForward(NamedTuple):
    """y, z, xhat have the shape of x; mean, var, rstd one value per statistics set."""

    y: Array
    z: Array
    xhat: Array
    mean: Array
    var: Array
    rstd: Array


class NormBackward(NamedTuple):
    """The gradients in the order of forward's arguments, then what they were made of."""

    dx: Array
    dgamma: Array
    dbeta: Array
    dz: Array
    xhat: Array
    rstd: Array


class _Form(NamedTuple):
    """How a kind of norm sees x: its axes in `order`, then reshaped to `blocks` = [N, G, K, R]."""

    order: tuple[int, ...]
    ordered_shape: tuple[int, ...]
    blocks: tuple[int, int, int, int]
    statistics_shape: tuple[int, ...]
    parameter_shape: tuple[int, ...]

    def split(self, a: Array) -> Array:
        # Contiguous, so that every sum below runs along memory, where NumPy adds pairwise.
        return np.ascontiguousarray(a.transpose(self.order)).reshape(self.blocks)

    def join(self, a: Array) -> Array:
        return np.ascontiguousarray(a.reshape(self.ordered_shape).transpose(np.argsort(self.order)))


def _form(shape: tuple[int, ...], kind: Kind, channel_axis: int, axis: int, num_groups: int) -> _Form:
    rank = len(shape)
    if kind == "layer":
        first = range(rank)[axis]
        rows, row = shape[:first], shape[first:]
        return _Form(tuple(range(rank)), shape, (math.prod(rows), 1, math.prod(row), 1), rows, row)
    if kind not in ("batch", "instance", "group"):
        raise ValueError(f"unknown kind {kind!r}")
    channel = range(rank)[channel_axis]
    channels = shape[channel]
    if kind == "batch":
        order = (channel, *(k for k in range(rank) if k != channel))
        ordered_shape = tuple(shape[k] for k in order)
        return _Form(order, ordered_shape, (1, channels, 1, math.prod(ordered_shape[1:])), (channels,), (channels,))
    if channel == 0:
        raise ValueError(f"{kind} norm: axis 0 is the batch, so it cannot be the channel axis")
    groups = channels if kind == "instance" else num_groups
    if kind == "group" and (groups < 1 or channels % groups != 0):
        raise ValueError(f"group norm: num_groups {groups} does not divide {channels} channels")
    order = (0, channel, *(k for k in range(1, rank) if k != channel))
    ordered_shape = tuple(shape[k] for k in order)
    size = channels // groups if groups else 1
    blocks = (shape[0], groups, size, math.prod(ordered_shape[2:]))
    return _Form(order, ordered_shape, blocks, (shape[0], groups), (channels,))


def _parameter(name: str, p: npt.ArrayLike | None, absent: float, form: _Form, work: type[np.floating[Any]]) -> Array:
    """gamma or beta as [1, G, K, 1]."""
    _, groups, size, _ = form.blocks
    if p is None:
        return np.full((1, groups, size, 1), absent, dtype=work)
    p = np.asarray(p)
    if p.shape != form.parameter_shape:
        raise ValueError(f"{name} has shape {p.shape}, expected {form.parameter_shape}")
    return p.astype(work).reshape(1, groups, size, 1)


def _set_mean(a: Array) -> Array:
    """Mean over each statistics set, as [N, G, 1, 1]; 0 for a set without elements."""
    n, groups, size, rest = a.shape
    count = size * rest
    total = a.reshape(n, groups, count).sum(axis=-1)
    return np.asarray(total / max(count, 1)).reshape(n, groups, 1, 1)


def _parameter_sum(a: Array, form: _Form) -> Array:
    """Sum over all elements that use one gamma or beta, in the shape of the parameter."""
    n, groups, size, rest = form.blocks
    aligned = np.ascontiguousarray(a.transpose(1, 2, 0, 3)).reshape(groups, size, n * rest)
    return np.asarray(aligned.sum(axis=-1)).reshape(form.parameter_shape)


def _standardize(
    x: Array, form: _Form, eps: float, mean: npt.ArrayLike | None, var: npt.ArrayLike | None
) -> tuple[Array, Array, Array, Array]:
    """xhat as [N, G, K, R]; mean, var, rstd as [N, G, 1, 1]. A set without elements has mean 0 and var 0."""
    if (mean is None) != (var is None):
        raise ValueError("mean and var must be given together")
    if mean is not None and var is not None:
        per_set = (*form.blocks[:2], 1, 1)
        mu, v = (
            np.broadcast_to(np.asarray(s).astype(x.dtype), form.statistics_shape).reshape(per_set) for s in (mean, var)
        )
        centred = x - mu
    else:
        rough = _set_mean(x)
        # The rounding of `rough` is the mean of what is left. Subtracting it from the differences, not from x, keeps
        # digits that the sum of the two cannot hold when the mean is large.
        rest = _set_mean(x - rough)
        centred = (x - rough) - rest
        mu = np.where(np.isfinite(rough), rough + rest, rough)  # an infinite mean stays infinite
        v = _set_mean(centred * centred)
    rstd = 1 / np.sqrt(v + eps)
    return centred * rstd, mu, v, rstd


@np.errstate(all="ignore")
def norm_forward(
    x: npt.ArrayLike,
    gamma: npt.ArrayLike | None = None,
    beta: npt.ArrayLike | None = None,
    *,
    kind: Kind,
    channel_axis: int = 1,
    axis: int = -1,
    num_groups: int = 1,
    eps: float = 1e-5,
    mean: npt.ArrayLike | None = None,
    var: npt.ArrayLike | None = None,
    activation: str = "identity",
    alpha: float = 0.0,
    act_beta: float = 0.0,
) -> NormForward:
    """y = f(gamma * xhat + beta), xhat = (x - mean) / sqrt(var + eps).

    `channel_axis` matters to batch, instance and group norm, `num_groups` to group norm, `axis` (the first normalised
    one) to layer norm. `mean` and `var`, if given, replace the statistics of x; they may be anything that broadcasts to
    one value per set, so running statistics [C] serve instance norm's [N, C]. A set without elements has mean 0, var 0.
    """
    x, work = _working(x)
    form = _form(x.shape, kind, channel_axis, axis, num_groups)
    xhat, mu, v, rstd = _standardize(form.split(x.astype(work)), form, eps, mean, var)
    z = _parameter("gamma", gamma, 1.0, form, work) * xhat + _parameter("beta", beta, 0.0, form, work)
    y = _value(activation, z, alpha, act_beta)
    mu, v, rstd = (np.array(s.reshape(form.statistics_shape)) for s in (mu, v, rstd))
    return NormForward(form.join(y), form.join(z), form.join(xhat), mu, v, rstd)


@np.errstate(all="ignore")
def norm_backward(
    dy: npt.ArrayLike,
    x: npt.ArrayLike,
    y: npt.ArrayLike | None,
    gamma: npt.ArrayLike | None = None,
    beta: npt.ArrayLike | None = None,
    *,
    kind: Kind,
    channel_axis: int = 1,
    axis: int = -1,
    num_groups: int = 1,
    eps: float = 1e-5,
    mean: npt.ArrayLike | None = None,
    var: npt.ArrayLike | None = None,
    frozen: bool = False,
    activation: str = "identity",
    alpha: float = 0.0,
    act_beta: float = 0.0,
    slope_from: Literal["output", "input"] = "output",
) -> NormBackward:
    """Gradients of `norm_forward`; y is its output, or the engine's, and may be None without an activation.

    The activation's slope is found from y, or with `slope_from` "input" from z = gamma * xhat + beta: only then are y
    not needed and `beta` looked at.

    With g = gamma * dz and means over the statistics set,
        dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),
    also when `mean` and `var` are given: they are taken as the statistics of x. `frozen` says they are constants
    instead, so that dx = rstd * g. dgamma = sum(dz * xhat) and dbeta = sum(dz) exist whether or not gamma does.
    """
    x, work = _working(x)
    dy = np.asarray(dy).astype(work)
    if dy.shape != x.shape:
        raise ValueError(f"dy has shape {dy.shape}, x has {x.shape}")
    form = _form(x.shape, kind, channel_axis, axis, num_groups)
    xhat, _, _, rstd = _standardize(form.split(x.astype(work)), form, eps, mean, var)
    if activation == "identity":
        dz = dy
    elif slope_from == "input":
        z = _parameter("gamma", gamma, 1.0, form, work) * xhat + _parameter("beta", beta, 0.0, form, work)
        z = form.join(z)
        slope = _input_slope(activation, z, alpha, act_beta)
        dz = np.where(_flat_input(activation, z, alpha, act_beta), 0.0, dy * slope)
    elif y is None:
        raise ValueError(f"the slope of {activation} needs y")
    else:
        y = _working(y)[0]
        if y.shape != x.shape:
            raise ValueError(f"y has shape {y.shape}, x has {x.shape}")
        dz = _dz(activation, y, dy, work, alpha, act_beta)
    dz = form.split(dz)
    g = _parameter("gamma", gamma, 1.0, form, work) * dz
    dx = rstd * g if frozen else rstd * (g - _set_mean(g) - xhat * _set_mean(g * xhat))
    return NormBackward(
        form.join(dx),
        _parameter_sum(dz * xhat, form),
        _parameter_sum(dz, form),
        form.join(dz),
        form.join(xhat),
        np.array(rstd.reshape(form.statistics_shape)),
    )


@np.errstate(all="ignore")
def running_update(
    old_mean: npt.ArrayLike,
    old_var: npt.ArrayLike,
    mean: npt.ArrayLike,
    var: npt.ArrayLike,
    count: int,
    keep: float,
    unbiased: bool,
) -> tuple[Array, Array]:
    """new = keep * old + (1 - keep) * batch, for the mean and the variance of sets of `count` elements.

    `var` is the biased variance; `unbiased` multiplies it by count / (count - 1), except for count = 1, where that is
    0 / 0: the biased variance (0) is used, so no NaN enters the running values. Statistics [N, C] (instance norm) are
    averaged over n first. Sets without elements, or no sets at all, leave the old values as they are.
    """
    old_m, old_v, m, v = (np.asarray(s).astype(np.longdouble) for s in (old_mean, old_var, mean, var))
    if count == 0 or (m.ndim > old_m.ndim and m.shape[0] == 0):
        return old_m, old_v
    if m.ndim > old_m.ndim:
        m, v = m.mean(axis=0), v.mean(axis=0)
    if unbiased and count > 1:
        v = v * count / (count - 1)
    new = np.longdouble(1) - keep
    return keep * old_m + new * m, keep * old_v + new * v


# --- LSTM -------------------------------------------------------------------------------------------------------------

LSTM_ACTIVATIONS: tuple[tuple[str, float, float], ...] = (
    ("sigmoid", 0.0, 0.0),
    ("sigmoid", 0.0, 0.0),
    ("tanh", 0.0, 0.0),
    ("sigmoid", 0.0, 0.0),
    ("tanh", 0.0, 0.0),
)


class LstmCell(NamedTuple):
    """The parameters of one layer and direction, or their gradients. Gates come in the order i f g o."""

    wx: Array  # [4, H, I]
    wh: Array  # [4, H, H]
    b: Array | None = None  # [4, H]
    peephole: Array | None = None  # [4, H]: diagonals; [4, H, H]: full matrices


class LstmForward(NamedTuple):
    """The results, then what they were made of: one array per cell, `inputs` one per layer.

    In `gates`, `z` and `cells` a sample has 0 where it takes no part; `h_prev` and `c_prev` hold the state it arrives
    with at every step, which it then carries on.
    """

    y: Array  # [T, N, D*H]
    hn: Array  # [L*D, N, H]
    cn: Array  # [L*D, N, H]
    gates: list[Array]  # [T, N, 4, H], the values of i f g o
    z: list[Array]  # [T, N, 4, H], their pre-activations
    cells: list[Array]  # [T, N, H], the cell state after the step
    h_prev: list[Array]  # [T, N, H]
    c_prev: list[Array]  # [T, N, H]
    inputs: list[Array]  # [T, N, I] of layer 0, [T, N, D*H] of those above, dropout applied


class LstmBackward(NamedTuple):
    """The gradients in the order of forward's arguments."""

    dx: Array  # [T, N, I]
    cells: list[LstmCell]  # None where the parameter is
    dh0: Array  # [L*D, N, H]
    dc0: Array  # [L*D, N, H]


class _Lstm(NamedTuple):
    """Checked arguments in the type to compute in."""

    x: Array
    cells: list[LstmCell]
    h0: Array
    c0: Array
    active: npt.NDArray[np.bool_]
    masks: list[Array]


def active_from_lengths(lengths: npt.ArrayLike, T: int) -> npt.NDArray[np.bool_]:
    """[T, N]: sample n takes part in the steps t < lengths[n]."""
    return np.arange(T)[:, None] < np.asarray(lengths)[None, :]


def active_from_batch_sizes(batch_sizes: npt.ArrayLike, N: int) -> npt.NDArray[np.bool_]:
    """[T, N]: the samples n < batch_sizes[t] take part in step t."""
    return np.arange(N)[None, :] < np.asarray(batch_sizes)[:, None]


def _lstm(
    x: npt.ArrayLike,
    cells: Sequence[LstmCell],
    h0: npt.ArrayLike | None,
    c0: npt.ArrayLike | None,
    directions: int,
    active: npt.ArrayLike | None,
    activations: Sequence[tuple[str, float, float]],
    output_reads: str,
    masks: Sequence[npt.ArrayLike] | None,
) -> _Lstm:
    x, work = _working(x)

    def checked(name: str, a: npt.ArrayLike, *shapes: tuple[int, ...]) -> Array:
        a = np.asarray(a)
        if a.shape not in shapes:
            raise ValueError(f"{name} has shape {a.shape}, expected {' or '.join(map(str, shapes))}")
        return a.astype(work)

    if x.ndim != 3:
        raise ValueError(f"x has shape {x.shape}, expected [T, N, I]")
    if directions not in (1, 2) or not cells or len(cells) % directions != 0:
        raise ValueError(f"{len(cells)} cells do not make layers of {directions} directions")
    if len(activations) != 5:
        raise ValueError(f"{len(activations)} activations, expected 5: i, f, g, o and the hidden output")
    if output_reads not in ("new", "old"):
        raise ValueError(f"output_reads is {output_reads!r}, expected 'new' or 'old'")
    T, N, I = x.shape  # noqa: E741
    H = np.shape(cells[0].wh)[-1]
    layers = len(cells) // directions
    parameters = []
    for number, cell in enumerate(cells):
        width = I if number < directions else directions * H
        parameters.append(
            LstmCell(
                checked(f"wx of cell {number}", cell.wx, (4, H, width)),
                checked(f"wh of cell {number}", cell.wh, (4, H, H)),
                None if cell.b is None else checked(f"b of cell {number}", cell.b, (4, H)),
                None
                if cell.peephole is None
                else checked(f"peephole of cell {number}", cell.peephole, (4, H), (4, H, H)),
            )
        )
    state = (len(cells), N, H)
    if masks is not None and len(masks) != layers - 1:
        raise ValueError(f"{len(masks)} masks, expected {layers - 1}: one between each two layers")
    return _Lstm(
        x.astype(work),
        parameters,
        np.zeros(state, dtype=work) if h0 is None else checked("h0", h0, state),
        np.zeros(state, dtype=work) if c0 is None else checked("c0", c0, state),
        np.ones((T, N), dtype=np.bool_) if active is None else checked("active", active, (T, N)).astype(np.bool_),
        [checked("mask", mask, (T, N, directions * H)) for mask in masks or ()],
    )


def _steps(T: int, direction: int) -> range:
    """The order in which a direction visits the steps."""
    return range(T) if direction == 0 else range(T - 1, -1, -1)


def _through(p: Array, c: Array) -> Array:
    """Rows of c seen through one gate's peephole, a diagonal or a matrix."""
    return c * p if p.ndim == 1 else c @ p.T


def _through_back(p: Array, dz: Array) -> Array:
    """What rows of dz mean for the c that `_through` saw."""
    return dz * p if p.ndim == 1 else dz @ p


def _gate_slope(activation: tuple[str, float, float], z: Array) -> Array:
    name, alpha, beta = activation
    return activation_input_slope(name, z, alpha, beta).astype(z.dtype)


@np.errstate(all="ignore")
def lstm_forward(
    x: npt.ArrayLike,
    cells: Sequence[LstmCell],
    h0: npt.ArrayLike | None = None,
    c0: npt.ArrayLike | None = None,
    *,
    directions: int = 1,
    active: npt.ArrayLike | None = None,
    activations: Sequence[tuple[str, float, float]] = LSTM_ACTIVATIONS,
    output_reads: str = "new",
    masks: Sequence[npt.ArrayLike] | None = None,
) -> LstmForward:
    """Stacked LSTM over x [T, N, I]. One step of one cell, with the state h-, c- before it, is

        zi = wx_i u + wh_i h- + p_i c- + b_i        i = act_i(zi)        and in the same way f and g
        c  = f c- + i g
        zo = wx_o u + wh_o h- + p_o c + b_o         o = act_o(zo)        (p_o c- if output_reads is "old")
        h  = o act_h(c)

    `cells` are L*D in number, layer by layer, the directions of a layer next to each other. Direction 1 visits the
    steps from the last to the first; its output stands at the step it has read. Layer 0 reads x, the others read the
    outputs of both directions of the layer below, times `masks[l-1]` [T, N, D*H] if given.

    `active` [T, N] says which samples take part in which step, None that all do. One that does not keeps its state and
    has y = 0 there; what x holds there is never looked at. `activations` are (name, alpha, beta) of i, f, g, o, h.
    """
    lstm = _lstm(x, cells, h0, c0, directions, active, activations, output_reads, masks)
    T, N, _ = lstm.x.shape
    H = lstm.h0.shape[-1]
    work = lstm.x.dtype
    z, gates = np.zeros((2, len(cells), T, N, 4, H), dtype=work)
    states, h_prev, c_prev = np.zeros((3, len(cells), T, N, H), dtype=work)
    hn, cn = lstm.h0.copy(), lstm.c0.copy()  # brought forward step by step
    inputs: list[Array] = []
    y = lstm.x  # of the layer below
    for layer in range(len(cells) // directions):
        u = y * lstm.masks[layer - 1] if lstm.masks and layer > 0 else y
        inputs.append(u)
        y = np.zeros((T, N, directions * H), dtype=work)
        for direction in range(directions):
            number = layer * directions + direction
            cell = lstm.cells[number]
            h, c = hn[number], cn[number]  # views
            for t in _steps(T, direction):
                h_prev[number, t], c_prev[number, t] = h, c
                on = lstm.active[t]
                old = c[on]
                zt = u[t, on] @ cell.wx.reshape(4 * H, -1).T + h[on] @ cell.wh.reshape(4 * H, H).T
                zt = zt.reshape(len(old), 4, H)
                if cell.b is not None:
                    zt = zt + cell.b
                if cell.peephole is not None:
                    for k in range(3):
                        zt[:, k] += _through(cell.peephole[k], old)
                i, f, g = (_value(name, zt[:, k], a, b) for k, (name, a, b) in enumerate(activations[:3]))
                new = f * old + i * g
                if cell.peephole is not None:
                    zt[:, 3] += _through(cell.peephole[3], new if output_reads == "new" else old)
                o = _value(activations[3][0], zt[:, 3], *activations[3][1:])
                h[on] = o * _value(activations[4][0], new, *activations[4][1:])
                c[on] = new
                z[number, t, on], gates[number, t, on] = zt, np.stack([i, f, g, o], axis=1)
                states[number, t, on] = new
                y[t, on, direction * H : (direction + 1) * H] = h[on]
    return LstmForward(y, hn, cn, list(gates), list(z), list(states), list(h_prev), list(c_prev), inputs)


@np.errstate(all="ignore")
def lstm_backward(
    dy: npt.ArrayLike | None,
    dhn: npt.ArrayLike | None,
    dcn: npt.ArrayLike | None,
    x: npt.ArrayLike,
    cells: Sequence[LstmCell],
    h0: npt.ArrayLike | None = None,
    c0: npt.ArrayLike | None = None,
    *,
    directions: int = 1,
    active: npt.ArrayLike | None = None,
    activations: Sequence[tuple[str, float, float]] = LSTM_ACTIVATIONS,
    output_reads: str = "new",
    masks: Sequence[npt.ArrayLike] | None = None,
) -> LstmBackward:
    """Gradients of `lstm_forward` for the gradients of y, hn and cn, each of which may be None, meaning zero.

    With dh and dc those of the state after a step, dy included in dh, the step gives
        dzo = dh act_h(c) act_o'(zo)
        dc += dh o act_h'(c) + p_o^T dzo               (the last term only if output_reads is "new")
        dzi = dc g act_i'(zi)    dzf = dc c- act_f'(zf)    dzg = dc i act_g'(zg)
        dh- = sum_k wh_k^T dzk                         du  = sum_k wx_k^T dzk
        dc- = dc f + p_i^T dzi + p_f^T dzf + p_g^T dzg (and p_o^T dzo if it is "old")
    and dzk times u, h-, 1 and the c its peephole saw is what it adds to the gradients of wx, wh, b and the peephole.
    Where a sample takes no part dh and dc go through unchanged, dx is 0, and dy is not looked at.
    """
    lstm = _lstm(x, cells, h0, c0, directions, active, activations, output_reads, masks)
    options: dict[str, Any] = {"activations": activations, "output_reads": output_reads, "masks": masks}
    out = lstm_forward(x, cells, h0, c0, directions=directions, active=active, **options)
    work = lstm.x.dtype
    T = len(lstm.x)
    H = lstm.h0.shape[-1]

    def incoming(name: str, d: npt.ArrayLike | None, like: Array) -> Array:
        if d is None:
            return np.zeros_like(like)
        d = np.asarray(d)
        if d.shape != like.shape:
            raise ValueError(f"{name} has shape {d.shape}, expected {like.shape}")
        return d.astype(work)

    dlayer = incoming("dy", dy, out.y)  # of the output of the layer at hand
    dh0, dc0 = incoming("dhn", dhn, out.hn), incoming("dcn", dcn, out.cn)  # become what they are called step by step
    gradients = [LstmCell(*(None if p is None else np.zeros_like(p) for p in cell)) for cell in lstm.cells]  # type: ignore[arg-type]
    for layer in range(len(cells) // directions - 1, -1, -1):
        u = out.inputs[layer]
        du = np.zeros_like(u)
        for direction in range(directions):
            number = layer * directions + direction
            cell, gradient = lstm.cells[number], gradients[number]
            dh, dc = dh0[number], dc0[number]  # views
            for t in reversed(_steps(T, direction)):
                on = lstm.active[t]
                i, f, g, o = out.gates[number][t, on].transpose(1, 0, 2)
                z = out.z[number][t, on]
                new, old = out.cells[number][t, on], out.c_prev[number][t, on]
                slopes = [_gate_slope(activation, z[:, k]) for k, activation in enumerate(activations[:4])]
                hidden = _value(activations[4][0], new, *activations[4][1:])

                dht = dh[on] + dlayer[t, on, direction * H : (direction + 1) * H]
                dzo = dht * hidden * slopes[3]
                dct = dc[on] + dht * o * _gate_slope(activations[4], new)
                if cell.peephole is not None and output_reads == "new":
                    dct = dct + _through_back(cell.peephole[3], dzo)
                dz = np.stack([dct * g * slopes[0], dct * old * slopes[1], dct * i * slopes[2], dzo], axis=1)
                dold = dct * f
                if cell.peephole is not None:
                    assert gradient.peephole is not None
                    for k in range(4):
                        sees_new = k == 3 and output_reads == "new"
                        if not sees_new:
                            dold = dold + _through_back(cell.peephole[k], dz[:, k])
                        seen = new if sees_new else old
                        diagonal = cell.peephole[k].ndim == 1
                        gradient.peephole[k] += (dz[:, k] * seen).sum(axis=0) if diagonal else dz[:, k].T @ seen
                rows = dz.reshape(len(dz), 4 * H)
                gradient.wx[...] += (rows.T @ u[t, on]).reshape(cell.wx.shape)
                gradient.wh[...] += (rows.T @ out.h_prev[number][t, on]).reshape(cell.wh.shape)
                if gradient.b is not None:
                    gradient.b[...] += dz.sum(axis=0)
                du[t, on] += rows @ cell.wx.reshape(4 * H, -1)
                dh[on] = rows @ cell.wh.reshape(4 * H, H)
                dc[on] = dold
        dlayer = du * lstm.masks[layer - 1] if lstm.masks and layer > 0 else du
    return LstmBackward(dlayer, gradients, dh0, dc0)


# --- dropout ----------------------------------------------------------------------------------------------------------


def philox4x32(counter: npt.ArrayLike, key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 of Salmon et al. (2011): four 32-bit words for each counter [..., 4] of four 32-bit words."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, dtype=np.uint64), -1, 0)
    for number in range(10):
        k0, k1 = (
            np.uint64((k + number * weyl) & 0xFFFFFFFF) for k, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
        )
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (second >> half) ^ c1 ^ k0, second & low, (first >> half) ^ c3 ^ k1, first & low
    return np.stack([c0, c1, c2, c3], axis=-1)


def philox_mask(seed: int, layer: int, shape: tuple[int, int, int], p: float) -> Array:
    """The dropout mask [T, N, W] between `layer` and the next one: 0 with probability p, else 1 / (1 - p).

    Element (t, n, j) looks at one word of a counter made of row = t*N + n and of j, so it depends on no other element.
    A counter serves four columns, 16 apart.
    """
    T, N, W = shape
    row, j = np.arange(T * N, dtype=np.uint64)[:, None], np.arange(W, dtype=np.uint64)[None, :]
    row, j = np.broadcast_arrays(row, j)
    words = [row & 0xFFFFFFFF, row >> 32, 16 * (j // 64) + j % 16, np.full_like(j, layer)]
    drawn = philox4x32(np.stack(words, axis=-1), (seed & 0xFFFFFFFF, seed >> 32))
    word = np.take_along_axis(drawn, ((j % 64) // 16).astype(np.intp)[..., None], axis=-1)
    dropped = word.reshape(shape) < math.floor(p * 2**32)
    return np.where(dropped, 0.0, 1 / (1 - p))


def dropout_mask(seed: int, shape: tuple[int, ...], rate: float) -> Array:
    """Of an array by itself: its elements in C order are rows of 4096 of a layer that no LSTM has."""
    count = math.prod(shape)
    mask = philox_mask(seed, 0xFFFFFFFF, (-(-count // 4096), 1, 4096), rate)
    return mask.reshape(-1)[:count].reshape(shape)


# --- linear layers and embeddings -------------------------------------------------------------------------------------


def linear_forward(x: Array, w: Array, b: Array | None = None) -> Array:
    y: Array = np.einsum("...i,oi->...o", _wide(x), _wide(w))
    return y if b is None else y + _wide(b)


def linear_backward(dy: Array, x: Array, w: Array) -> tuple[Array, Array, Array]:
    """dx, dw and db."""
    dy, x, w = _wide(dy), _wide(x), _wide(w)
    rows = math.prod(x.shape[:-1])
    flat = dy.reshape(rows, w.shape[0])
    return np.einsum("...o,oi->...i", dy, w), np.einsum("ro,ri->oi", flat, x.reshape(rows, w.shape[1])), flat.sum(0)


def embedding_backward(dy: Array, indices: Array, rows: int) -> Array:
    dy = _wide(dy)
    dtable = np.zeros((rows, dy.shape[-1]), dy.dtype)
    for position in np.ndindex(indices.shape):
        dtable[indices[position]] += dy[position]
    return dtable


# --- losses: the loss of every element or row, and the gradient of their sum ------------------------------------------


def softmax_cross_entropy(
    logits: Array, labels: Array, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[Array, Array]:
    """The cross entropy of softmax(logits) and the smoothed targets; rows with `ignore_index` have none."""
    x = _wide(logits)
    V = x.shape[-1]
    kept = labels != ignore_index
    target = np.full(x.shape, label_smoothing / max(V, 1), x.dtype)
    for position in map(tuple, np.argwhere(kept)):
        row = target[position]
        row[labels[position]] += 1 - label_smoothing
    d = x - x.max(-1, keepdims=True, initial=-math.inf)
    log_sum = np.log(np.exp(d).sum(-1, keepdims=True))
    # A target of 0 leaves out even an infinite distance.
    terms = np.where(target == 0, 0.0, target * (log_sum - d))
    losses = np.where(kept, terms.sum(-1), 0.0)
    return losses, np.where(kept[..., None], np.exp(d - log_sum) - target, 0.0)


def mean_squared_error(y: Array, target: Array) -> tuple[Array, Array]:
    d = _wide(y) - _wide(target)
    return d**2, 2 * d


def huber(y: Array, target: Array, *, delta: float = 1.0) -> tuple[Array, Array]:
    d = _wide(y) - _wide(target)
    inside = np.abs(d) <= delta
    return np.where(inside, d**2 / 2, delta * (np.abs(d) - delta / 2)), np.where(inside, d, delta * np.sign(d))


# --- optimizers -------------------------------------------------------------------------------------------------------


def clipped_gradients(
    gradients: Sequence[Array],
    *,
    scale: float = 1.0,
    clip: tuple[float, float] | None = None,
    maximum_norm: float | None = None,
    maximum_norm_each: float | None = None,
    known_norm: float | None = None,
    clip_before_scale: bool = False,
) -> list[Array]:
    """Scaled and clipped, in either order, as arrays of the oracle's precision."""
    wide = [_wide(g) for g in gradients]
    if not clip_before_scale:
        wide = [scale * g for g in wide]
    norms = [np.sqrt(np.sum(g * g)) for g in wide]
    if clip is not None:
        wide = [np.clip(g, *clip) for g in wide]
    if maximum_norm is not None:
        whole = np.sqrt(sum(norm * norm for norm in norms))
        if known_norm is not None:
            whole = known_norm if clip_before_scale else abs(scale) * known_norm
        wide = [g * min(1.0, maximum_norm / whole) if whole > 0 else g for g in wide]
    if maximum_norm_each is not None:
        wide = [g * min(1.0, maximum_norm_each / norm) if norm > 0 else g for g, norm in zip(wide, norms, strict=True)]
    return [scale * g for g in wide] if clip_before_scale else wide


def sgd_step(
    p: Array,
    g: Array,
    velocity: Array | None = None,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    velocity_of: str = "gradient",
    weight_decay: float = 0.0,
    l1: float = 0.0,
) -> tuple[Array, ...]:
    """The new parameter and the new velocity, if there is one. `g`: scaled and clipped."""
    p, g = _wide(p), _wide(g)
    g = g + weight_decay * p + l1 * np.sign(p)
    if velocity is None:
        return (p - learning_rate * g,)
    return _with_velocity(p, g, _wide(velocity), learning_rate, momentum, nesterov, velocity_of)


def adam_step(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    largest: Array | None = None,
    *,
    step: float,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    epsilon_hat: bool = False,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    l1: float = 0.0,
) -> tuple[Array, ...]:
    """The new parameter and the new states."""
    p, g, m, v = _wide(p), _wide(g), _wide(m), _wide(v)
    g = g + l1 * np.sign(p) + (0.0 if decoupled else weight_decay) * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    w = v if largest is None else np.maximum(v, _wide(largest))
    first, second = 1 - np.longdouble(beta1) ** step, 1 - np.longdouble(beta2) ** step
    root = (np.sqrt(w) + eps) / np.sqrt(second) if epsilon_hat else np.sqrt(w / second) + eps
    moved = (m / first) / root
    p = p - learning_rate * moved - (learning_rate * weight_decay * p if decoupled else 0.0)
    return (p, m, v) if largest is None else (p, m, v, w)


def rmsprop_step(
    p: Array,
    g: Array,
    square: Array,
    mean: Array | None = None,
    velocity: Array | None = None,
    *,
    learning_rate: float,
    alpha: float = 0.99,
    eps: float = 1e-8,
    eps_inside_root: bool = False,
    momentum: float = 0.0,
    velocity_of: str = "gradient",
    weight_decay: float = 0.0,
    l1: float = 0.0,
) -> tuple[Array, ...]:
    """The new parameter and the new states that there are."""
    p, g, square = _wide(p), _wide(g), _wide(square)
    g = g + weight_decay * p + l1 * np.sign(p)
    square = alpha * square + (1 - alpha) * g * g
    spread = square
    states = [square]
    if mean is not None:
        mean = alpha * _wide(mean) + (1 - alpha) * g
        spread = np.maximum(square - mean * mean, 0)
        states.append(mean)
    d = g / (np.sqrt(spread + eps) if eps_inside_root else np.sqrt(spread) + eps)
    if velocity is None:
        return (p - learning_rate * d, *states)
    p, velocity = _with_velocity(p, d, _wide(velocity), learning_rate, momentum, False, velocity_of)
    return (p, *states, velocity)


def _wide(a: Array) -> Array:
    a, dtype = _working(a)
    return a.astype(dtype)


def _with_velocity(
    p: Array, d: Array, u: Array, learning_rate: float, momentum: float, nesterov: bool, velocity_of: str
) -> tuple[Array, Array]:
    if velocity_of == "gradient":
        u = momentum * u + d
        return p - learning_rate * (momentum * u + d if nesterov else u), u
    if velocity_of == "step":
        old, u = u, momentum * u - learning_rate * d
        return p + (u + momentum * (u - old) if nesterov else u), u
    u = momentum * u + learning_rate * d
    return p - (momentum * u + learning_rate * d if nesterov else u), u
