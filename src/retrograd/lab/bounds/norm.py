"""Tolerances of normalization."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, cast

import numpy as np

from ..cases.types import Array, Float64s, Kind
from .precision import DOUBLE_UNIT, PRECISIONS, SLOPE_IS_A_DIFFERENCE, Precision, activation_roundings, as_float64

__all__ = ["NORM_ROUNDINGS", "BackwardBound", "ForwardBound", "backward_bound", "forward_bound", "input_slope_error"]


class NormRoundings(NamedTuple):
    """The tolerances of a normalization, in u. docs/numerics.md has the same numbers in a table.

    The roundings of a sum are independent, so their squares add up. In sums of 16 float32 numbers of either sign they
    are 1.6 u per term on average; 8 u allows five times that for the maximum over many sums. If the terms have the same
    sign, so may their roundings: 4 u of the result, including the rounding of the result itself.
    """

    mean: float  # of the standard deviation
    var: float  # of the variance
    product: float  # of gamma * xhat, a term of z
    sum: float  # of a sum over a channel
    terms: float  # of the root of the sum of the squares of its terms


NORM_ROUNDINGS: Final = {
    False: NormRoundings(mean=2, var=5, product=5, sum=4, terms=8),
    True: NormRoundings(mean=4, var=10, product=5, sum=8, terms=12),  # float64
}


class Statistics(Protocol):
    """What the bounds need of the oracle's forward results."""

    @property
    def y(self) -> Array: ...
    @property
    def z(self) -> Array: ...
    @property
    def xhat(self) -> Array: ...
    @property
    def mean(self) -> Array: ...
    @property
    def var(self) -> Array: ...
    @property
    def rstd(self) -> Array: ...


class Gradients(Protocol):
    """What the bounds need of the oracle's backward results."""

    @property
    def dx(self) -> Array: ...
    @property
    def dgamma(self) -> Array: ...
    @property
    def dbeta(self) -> Array: ...
    @property
    def dz(self) -> Array: ...
    @property
    def xhat(self) -> Array: ...
    @property
    def rstd(self) -> Array: ...


class ForwardBound(NamedTuple):
    y: Float64s
    mean: Float64s
    var: Float64s


class BackwardBound(NamedTuple):
    dx: Float64s
    dgamma: Float64s
    dbeta: Float64s


class _Indices:
    """The index of each element's statistics set and of its gamma, as arrays of the shape of x.

    A pair is the elements that share both. In the index of a pair the parameter varies fastest.
    """

    def __init__(self, shape: tuple[int, ...], kind: Kind, channel_axis: int, axis: int, num_groups: int) -> None:
        rank = len(shape)
        self.channels_per_group = 1
        if kind == "layer":
            first = range(rank)[axis]
            sets = math.prod(shape[:first])
            per_set = math.prod(shape[first:])
            set_of = np.arange(sets).reshape(*shape[:first], *(1,) * (rank - first))
            parameter_of = np.arange(per_set).reshape(shape[first:])
            self.sets, self.parameters = sets, per_set
            self.pairs, self.pair_of = sets * per_set, np.arange(sets * per_set).reshape(shape)
        else:
            channel = range(rank)[channel_axis]
            channels = shape[channel]
            parameter_of = np.arange(channels).reshape(-1, *(1,) * (rank - 1 - channel))
            sample_of = np.arange(shape[0]).reshape(-1, *(1,) * (rank - 1))
            if kind == "batch":
                set_of, self.sets = parameter_of, channels
                pair_of, pairs = parameter_of, channels
            else:
                groups = channels if kind == "instance" else num_groups
                self.channels_per_group = max(channels // max(groups, 1), 1)
                set_of = sample_of * groups + parameter_of // self.channels_per_group
                self.sets = shape[0] * groups
                pair_of, pairs = sample_of * channels + parameter_of, shape[0] * channels
            self.parameters = channels
            self.pairs, self.pair_of = pairs, np.broadcast_to(pair_of, shape)
        self.set_of = np.broadcast_to(set_of, shape)
        self.parameter_of = np.broadcast_to(parameter_of, shape)
        self.count = math.prod(shape) // max(self.sets, 1)

    def per_set(self, values: Array | None) -> Float64s:
        """Statistics [sets], as float64."""
        assert values is not None
        return np.asarray(values, dtype=np.float64).reshape(-1)

    def spread_sets(self, values: Float64s) -> Float64s:
        return values[self.set_of]

    def spread_parameters(self, values: Array | None, absent: float) -> Float64s:
        if values is None:
            return np.full((1,) * self.set_of.ndim, absent)
        return np.asarray(values, dtype=np.float64).reshape(-1)[self.parameter_of]

    def sum_sets(self, values: Float64s) -> Float64s:
        return self._sum(values, self.set_of, self.sets)

    def sum_parameters(self, values: Float64s) -> Float64s:
        return self._sum(values, self.parameter_of, self.parameters)

    def square_pairs(self, values: Float64s) -> Float64s:
        """Sum over each pair, and return the sum of the squares of those for each parameter."""
        sums = self._sum(values, self.pair_of, self.pairs)
        return cast(Float64s, np.sum((sums * sums).reshape(-1, max(self.parameters, 1)), axis=0))[: self.parameters]

    def _sum(self, values: Float64s, index: Array, length: int) -> Float64s:
        weights = np.broadcast_to(values, index.shape)
        return cast(Float64s, np.bincount(index.ravel(), weights=weights.ravel(), minlength=length))


def _statistics_error(
    dtype: Precision, index: _Indices, mean: Float64s, std: Float64s, given: bool
) -> tuple[Float64s, Float64s]:
    """Return the absolute tolerances of mean and var, per set.

    The mean is a center plus the mean of x - center. That difference has a rounding error of up to u, the same for all
    x of one binade, so it does not average out. Sums of float32 run in float32 over at most 16 vectors per lane, with
    roundings of about 1 u of each number, and then in float64. A square doubles the error of the difference, and is
    itself rounded and summed. The center is the rounded mean, so constant data have differences of u |mean|. float64
    data are summed in float64, where all roundings count: twice as many, and more for longer sums.
    """
    if given:
        nothing = np.zeros_like(mean)
        return nothing, nothing
    u, count = dtype.unit, NORM_ROUNDINGS[dtype.double]
    spread = std + u * np.abs(mean)
    mean_error = count.mean * (u * spread + DOUBLE_UNIT * np.abs(mean))
    var_error = count.var * u * spread * spread
    if dtype.double:
        longer = _longer(index.count)
        mean_error, var_error = longer * mean_error, longer * var_error
        if index.channels_per_group > 1:
            # Channels last: each channel has its own mean, and the variance of these means is part of the group's.
            # Channels first: the center comes from the first channel, and sums about a wrong center cancel.
            mean_error = mean_error + u * math.sqrt(index.channels_per_group) * std
            var_error = 2 * var_error
    return mean_error, var_error


def _longer(count: int) -> float:
    """Return the factor by which roundings of a float64 sum grow: partial sums grow at least as the root of the length.

    This holds if all arrays have the same memory order. Otherwise a set may be split into many short pieces, whose sums
    are added one after the other.
    """
    return math.sqrt(1 + count / 2**16)


def _sum_roundings(dtype: Precision, count: int) -> tuple[float, float]:
    """Return the error of a sum in u: relative to its value, and to the root of the sum of its terms' squares."""
    roundings = NORM_ROUNDINGS[dtype.double]
    longer = _longer(count) if dtype.double else 1.0
    return roundings.sum * longer, roundings.terms * longer


@np.errstate(all="ignore")
def forward_bound(
    x: Array,
    gamma: Array | None,
    beta: Array | None,
    expected: Statistics,
    activate: Callable[[Array], Array],
    *,
    kind: Kind,
    channel_axis: int = 1,
    axis: int = -1,
    num_groups: int = 1,
    eps: float = 1e-5,
    mean: Array | None = None,
    var: Array | None = None,
    activation: str = "identity",
    alpha: float = 0.0,
    act_beta: float = 0.0,
) -> ForwardBound:
    """Return the tolerances of y, mean and var. `activate` is f as the oracle computes it."""
    dtype = PRECISIONS[x.dtype.name]
    u = dtype.unit
    index = _Indices(x.shape, kind, channel_axis, axis, num_groups)
    mu, v = (index.per_set(s) for s in (expected.mean, expected.var))
    mean_error, var_error = _statistics_error(dtype, index, mu, np.sqrt(v), mean is not None)
    z = np.asarray(expected.z)
    z_error = _input_error(dtype, index, gamma, beta, expected, mean is not None)

    r = activation_roundings(activation, alpha, act_beta, dtype.double)
    z_error = z_error + u * r.argument * np.abs(as_float64(z))
    y = as_float64(expected.y)
    magnitude = np.abs(y)
    moved = np.zeros_like(y)
    if activation == "identity":
        moved = z_error
    else:
        # f is monotone except for a jump or two, so the ends of the interval bound the change of y.
        for sign in (-1, 1):
            moved = np.maximum(moved, np.abs(as_float64(activate(z + sign * z_error) - np.asarray(expected.y))))
    y_error = moved + u * (r.value * magnitude + r.value_offset)
    # A subnormal factor of z has an absolute error of the smallest number, which is multiplied by z.
    y_error = y_error + (2 + np.abs(as_float64(z))) * _least(dtype)
    y_error = y_error + dtype.storage * (magnitude + y_error) + dtype.smallest
    return ForwardBound(y_error, mean_error.reshape(expected.mean.shape), var_error.reshape(expected.var.shape))


def _least(dtype: Precision) -> float:
    """Return the smallest positive number of the arithmetic, or a larger one whose square is not 0 in float64."""
    return max(2 * PRECISIONS["float64" if dtype.double else "float32"].smallest, 1e-150)


def _input_error(
    dtype: Precision, index: _Indices, gamma: Array | None, beta: Array | None, expected: Statistics, given: bool
) -> Float64s:
    """Return the tolerance of z, the input of the activation."""
    u = dtype.unit
    mu, v, rstd = (index.per_set(s) for s in (expected.mean, expected.var, expected.rstd))
    mean_error, var_error = _statistics_error(dtype, index, mu, np.sqrt(v), given)
    g = np.abs(index.spread_parameters(gamma, 1.0))
    b = np.abs(index.spread_parameters(beta, 0.0))
    scaled = g * np.abs(as_float64(expected.xhat))
    # The center is the mean rounded to the arithmetic's type; that rounding error times rstd is at most this.
    offset = g * index.spread_sets(np.abs(mu) * rstd) * u
    # z = (x - center) * scale + shift. Roundings of the product: the difference, rstd, gamma * rstd, and the product
    # itself if there is no fused multiply-add: 4. (Rows: also xhat, which is rounded before the product with gamma: 5.)
    # Of shift: itself, and offset twice. Then the sum. The errors of mean and rstd are added.
    z_error = u * (NORM_ROUNDINGS[dtype.double].product * scaled + b + 3 * offset + np.abs(as_float64(expected.z)))
    z_error = z_error + g * index.spread_sets(rstd * mean_error)
    return z_error + scaled * index.spread_sets(0.5 * var_error * rstd * rstd)


@np.errstate(all="ignore")
def input_slope_error(
    x: Array,
    gamma: Array | None,
    beta: Array | None,
    expected: Statistics,
    input_slope: Callable[[Array], Array],
    *,
    kind: Kind,
    channel_axis: int = 1,
    axis: int = -1,
    num_groups: int = 1,
    eps: float = 1e-5,
    mean: Array | None = None,
    var: Array | None = None,
    activation: str = "identity",
    alpha: float = 0.0,
    act_beta: float = 0.0,
) -> Float64s:
    """Return the tolerance of f'(z) if backward recomputes z. `input_slope` is f' as the oracle computes it.

    It is the change of f' over the error interval of z, so a kink inside it counts. Parameters that z is compared with
    are rounded, and so is the ramp a z + b. Then 6 ulp of the slope, or of the terms if it is a difference.
    """
    dtype = PRECISIONS[x.dtype.name]
    u = dtype.unit
    index = _Indices(x.shape, kind, channel_axis, axis, num_groups)
    z = np.asarray(expected.z)
    r = activation_roundings(activation, alpha, act_beta, dtype.double)
    reach = _input_error(dtype, index, gamma, beta, expected, mean is not None)
    reach = reach + u * ((2 + r.argument) * np.abs(as_float64(z)) + abs(alpha) + abs(act_beta))
    if activation in ("hard_sigmoid", "closed_hard_sigmoid"):
        reach = reach + 2 * u * abs(act_beta / alpha)
    slope = input_slope(z)
    moved = np.zeros(z.shape)
    for sign in (-1, 1):
        moved = np.maximum(moved, np.abs(as_float64(input_slope(z + sign * reach) - slope)))
    return moved + u * (12 * np.abs(as_float64(slope)) + 4 * (activation in SLOPE_IS_A_DIFFERENCE))


@np.errstate(all="ignore")
def backward_bound(
    dy: Array,
    x: Array,
    gamma: Array | None,
    expected: Gradients,
    *,
    kind: Kind,
    channel_axis: int = 1,
    axis: int = -1,
    num_groups: int = 1,
    eps: float = 1e-5,
    mean: Array | None = None,
    var: Array | None = None,
    frozen: bool = False,
    activation: str = "identity",
    alpha: float = 0.0,
    act_beta: float = 0.0,
    slope_error: Float64s | None = None,
) -> BackwardBound:
    """Return the tolerances of the gradients, if the oracle's backward was given the engine's y.

    If the slope is computed from the input instead, `slope_error` is its tolerance.
    """
    dtype = PRECISIONS[x.dtype.name]
    u = dtype.unit
    index = _Indices(x.shape, kind, channel_axis, axis, num_groups)
    count = max(index.count, 1)
    x64, xhat, dz = as_float64(x), as_float64(expected.xhat), as_float64(expected.dz)
    rstd = index.per_set(expected.rstd)
    if mean is None:
        mu = index.sum_sets(x64) / count
        std = np.sqrt(np.maximum(1 / (rstd * rstd) - eps, 0))
    else:
        mu = as_float64(np.broadcast_to(as_float64(mean), expected.rstd.shape)).reshape(-1)
        std = np.zeros_like(mu)
    mean_error, var_error = _statistics_error(dtype, index, mu, std, mean is not None)

    # dz: the roundings of the slope.
    r = activation_roundings(activation, alpha, act_beta, dtype.double)
    dz_error = u * r.slope * np.abs(dz)
    if slope_error is not None:
        dz_error = u * np.abs(dz) + slope_error * np.abs(as_float64(dy))
    elif r.slope_offset:  # 0 times an infinite dy is not 0
        dz_error = dz_error + u * r.slope_offset * np.abs(as_float64(dy))
    lost = _least(dtype)  # a slope may underflow where the oracle's does not
    if activation != "identity":
        dz_error = dz_error + lost * (1 + np.abs(as_float64(dy)))

    # xhat = (x - center) * rstd + offset. Errors that all elements of a set share add up in a sum: the rounding of rstd
    # and the error of var scale xhat; the error of the mean shifts it, and so does the rounding of x - center (by u
    # times 1, the size of xhat: see _statistics_error). Per element: that rounding, the product if it is not fused, and
    # the sum.
    shift = index.spread_sets(rstd * mean_error + u * u * np.abs(mu) * rstd) + u
    stretch = index.spread_sets(u + 0.5 * var_error * rstd * rstd)
    xhat_error = 3 * u * np.abs(xhat)
    products = dz * xhat
    products_error = np.abs(xhat) * dz_error + np.abs(dz) * xhat_error

    of_sum, of_terms = _sum_roundings(dtype, x.size // max(index.parameters, 1))
    dbeta_error = of_sum * u * np.abs(as_float64(expected.dbeta)).reshape(-1)
    dbeta_error = dbeta_error + np.sqrt(index.sum_parameters((of_terms * u * dz) ** 2 + dz_error**2))
    dgamma_error = of_sum * u * np.abs(as_float64(expected.dgamma)).reshape(-1)
    dgamma_error = dgamma_error + np.sqrt(
        index.sum_parameters((of_terms * u * products) ** 2 + products_error**2)
        + index.square_pairs(dz * shift)
        + index.square_pairs(products * stretch)
    )

    # dx = a * dz + (b * (x - center) + k). Roundings: a = gamma * rstd 2, and the product; b = rstd^2 * mean(g xhat) 3,
    # the difference, the product; k 2; the sums, 1 per term. A mean has the error of its sum divided by the count.
    gamma64 = index.spread_parameters(gamma, 1.0)
    g = gamma64 * dz
    g_error = np.abs(gamma64) * dz_error
    scale = index.spread_sets(rstd)
    dx_error = scale * (np.abs(g) * (3 * u + stretch) + g_error)
    if not frozen:
        of_sum, of_terms = _sum_roundings(dtype, count)
        sum_g, sum_g_xhat = index.sum_sets(g), index.sum_sets(g * xhat)
        off_g = of_sum * u * np.abs(sum_g) + np.sqrt(index.sum_sets((of_terms * u * g) ** 2 + g_error**2))
        off_g_xhat = of_sum * u * np.abs(sum_g_xhat) + np.sqrt(
            index.sum_sets((of_terms * u * g * xhat) ** 2 + (np.abs(g) * xhat_error + np.abs(xhat) * g_error) ** 2)
        )
        mean_g, mean_g_xhat, off_g, off_g_xhat = (
            index.spread_sets(s / count) for s in (sum_g, sum_g_xhat, off_g, off_g_xhat)
        )
        off_g_xhat = off_g_xhat + np.abs(mean_g) * shift + np.abs(mean_g_xhat) * stretch
        dx_error = dx_error + scale * (
            np.abs(mean_g) * (2 * u + stretch)
            + off_g
            + np.abs(xhat * mean_g_xhat) * (3 * u + 2 * stretch)
            + np.abs(mean_g_xhat) * shift
            + np.abs(xhat) * off_g_xhat
        )
    # Subnormal a and b have an absolute error of the smallest number, which is multiplied.
    dx_error = dx_error + (2 + np.abs(dz)) * lost
    if not frozen:
        dx_error = dx_error + np.abs(xhat / scale) * lost
    dx_error = dx_error + dtype.storage * (np.abs(as_float64(expected.dx)) + dx_error) + dtype.smallest
    return BackwardBound(
        dx_error,
        (dgamma_error + lost).reshape(expected.dgamma.shape),
        (dbeta_error + lost).reshape(expected.dbeta.shape),
    )
