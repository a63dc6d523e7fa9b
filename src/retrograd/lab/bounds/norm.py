"""Tolerances of normalization."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, cast

import numpy as np

from ..cases.types import Array, Float64s, Kind
from .precision import DOUBLE_UNIT, PRECISIONS, SLOPE_IS_A_DIFFERENCE, Precision, activation_roundings, as_float64

__all__ = [
    "NORM_ROUNDINGS",
    "BackwardBound",
    "ForwardBound",
    "backward_bound",
    "forward_bound",
    "input_slope_error",
]


class NormRoundings(NamedTuple):
    """How many u the results of a normalization may be off by. docs/numerics.md has the same numbers in a table.

    Roundings of a sum are independent of each other, so they add up as squares do. In sums of 16 float numbers of
    either sign they come to 1.6 u of each on average, and 8 u allows five times that for the worst of many sums. Where
    the terms agree in sign so may their roundings: 4 u of the result, of which one is its own.
    """

    mean: float  # of the standard deviation
    var: float  # of the variance
    product: float  # of gamma * xhat, on the way to z
    sum: float  # of a sum over a channel
    terms: float  # and of the root of the sum of its terms' squares


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
    """Which statistics set, and which gamma, each element belongs to, as numbers in the shape of x.

    A pair is the elements that have both in common. Pairs are numbered so that the parameter counts fastest.
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
        """Sums over each pair, squared and added up for each parameter."""
        sums = self._sum(values, self.pair_of, self.pairs)
        return cast(Float64s, np.sum((sums * sums).reshape(-1, max(self.parameters, 1)), axis=0))[: self.parameters]

    def _sum(self, values: Float64s, index: Array, length: int) -> Float64s:
        weights = np.broadcast_to(values, index.shape)
        return cast(Float64s, np.bincount(index.ravel(), weights=weights.ravel(), minlength=length))


def _statistics_error(
    dtype: Precision, index: _Indices, mean: Float64s, std: Float64s, given: bool
) -> tuple[Float64s, Float64s]:
    """How far mean and var may be off, per set: absolute.

    The mean is a center plus the mean of x - center. That difference rounds by up to u, and for all x of one binade
    alike, so the mean over many does not hide it; sums of float run in float over at most 16 vectors a lane, where
    roundings come to about 1 u of each number, and then in double. A square doubles the error of the difference and is
    rounded and summed itself. The center is the mean rounded, so that constant data have differences of u|mean|. In
    double the sums stay in double, and all their roundings count: twice as many, and more the longer they are.
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
            # Where channels are last, each has a mean of its own, and the group's variance is in part that of those
            # means. Where channels are first, the center is that of the first, and squares about a center that is off
            # cancel.
            mean_error = mean_error + u * math.sqrt(index.channels_per_group) * std
            var_error = 2 * var_error
    return mean_error, var_error


def _longer(count: int) -> float:
    """How the roundings of a sum in double grow: partial sums grow with the root of their length, at least.

    This is for arrays whose memory is in one order. Where they differ in it, a set may fall into many short pieces,
    whose sums are added one after the other.
    """
    return math.sqrt(1 + count / 2**16)


def _sum_roundings(dtype: Precision, count: int) -> tuple[float, float]:
    """Of a sum, in u: of its value, and of the root of the sum of its terms' squares."""
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
    """Tolerances of y, mean and var. `activate` is f as the oracle computes it."""
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
        # f is monotone but for a jump or two: the ends of the interval say how far y can be.
        for sign in (-1, 1):
            moved = np.maximum(moved, np.abs(as_float64(activate(z + sign * z_error) - np.asarray(expected.y))))
    y_error = moved + u * (r.value * magnitude + r.value_offset)
    # Below the normal range a weight that is off by one of the smallest numbers is multiplied by z.
    y_error = y_error + (2 + np.abs(as_float64(z))) * _least(dtype)
    y_error = y_error + dtype.storage * (magnitude + y_error) + dtype.smallest
    return ForwardBound(y_error, mean_error.reshape(expected.mean.shape), var_error.reshape(expected.var.shape))


def _least(dtype: Precision) -> float:
    """The smallest number of the arithmetic, or a larger one whose square is not 0 here."""
    return max(2 * PRECISIONS["float64" if dtype.double else "float32"].smallest, 1e-150)


def _input_error(
    dtype: Precision, index: _Indices, gamma: Array | None, beta: Array | None, expected: Statistics, given: bool
) -> Float64s:
    """How far z, the input of the activation, may be off."""
    u = dtype.unit
    mu, v, rstd = (index.per_set(s) for s in (expected.mean, expected.var, expected.rstd))
    mean_error, var_error = _statistics_error(dtype, index, mu, np.sqrt(v), given)
    g = np.abs(index.spread_parameters(gamma, 1.0))
    b = np.abs(index.spread_parameters(beta, 0.0))
    scaled = g * np.abs(as_float64(expected.xhat))
    # The center is the mean rounded to the arithmetic's type; what that leaves, times rstd, is at most this.
    offset = g * index.spread_sets(np.abs(mu) * rstd) * u
    # z = (x - center) * scale + shift. Of the product: the difference, rstd, gamma * rstd, and the product itself where
    # there is no fused multiply-add: 4. (Rows: the same 4, and xhat, which is rounded before it meets gamma: 5.) Of
    # shift: itself, and offset twice. Then the sum. What mean and rstd are off by comes on top.
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
    """How far f'(z) may be off where backward makes z again. `input_slope` is f' as the oracle computes it.

    As far as f' moves with the error of z: a kink within reach counts. Parameters that z is compared with are rounded,
    and so is the ramp a z + b. Then 6 ulp of the slope itself, or of the parts of one that is a difference.
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
    """Tolerances of the gradients, where the oracle's backward was given the engine's y.

    Or where the slope is found from the input: then `slope_error` says how far it may be off.
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

    # dz: the slope's own roundings.
    r = activation_roundings(activation, alpha, act_beta, dtype.double)
    dz_error = u * r.slope * np.abs(dz)
    if slope_error is not None:
        dz_error = u * np.abs(dz) + slope_error * np.abs(as_float64(dy))
    elif r.slope_offset:  # 0 times an infinite dy is not 0
        dz_error = dz_error + u * r.slope_offset * np.abs(as_float64(dy))
    lost = _least(dtype)  # a slope may underflow where the oracle's does not
    if activation != "identity":
        dz_error = dz_error + lost * (1 + np.abs(as_float64(dy)))

    # xhat = (x - center) * rstd + offset. What is the same for all elements of a set adds up in a sum: the rounding of
    # rstd and the error of var stretch xhat, the error of the mean shifts it, and so does the rounding of x - center
    # (by u of 1, the size of xhat: see _statistics_error). Per element: that, the product if it is not fused, the sum.
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

    # dx = a * dz + (b * (x - center) + k). a = gamma * rstd: 2, and the product; b = rstd^2 * mean(g xhat): 3, the
    # difference, the product; k: 2; and the sums, 1 of each term. The means carry their sums' errors over the count.
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
    # Below the normal range a and b are off by one of the smallest numbers, and are multiplied.
    dx_error = dx_error + (2 + np.abs(dz)) * lost
    if not frozen:
        dx_error = dx_error + np.abs(xhat / scale) * lost
    dx_error = dx_error + dtype.storage * (np.abs(as_float64(expected.dx)) + dx_error) + dtype.smallest
    return BackwardBound(
        dx_error,
        (dgamma_error + lost).reshape(expected.dgamma.shape),
        (dbeta_error + lost).reshape(expected.dbeta.shape),
    )
