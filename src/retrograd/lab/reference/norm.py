"""The oracle: normalization.

All four norms are one formula on x viewed as [N, G, K, R]: a statistics set is one (n, g), and `gamma` and `beta` are
indexed by (g, k). N is 1 for batch norm, whose batch axis is part of R.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .activation import input_slope_at, is_flat_at, slope_times, value_at
from .precision import Array, working_type

__all__ = ["Kind", "NormBackward", "NormForward", "norm_backward", "norm_forward", "running_update"]

Kind: TypeAlias = Literal["batch", "instance", "layer", "group"]


class NormForward(NamedTuple):
    """y, z, xhat have the shape of x; mean, var, rstd one value per statistics set."""

    y: Array
    z: Array
    xhat: Array
    mean: Array
    var: Array
    rstd: Array


class NormBackward(NamedTuple):
    """The gradients in the order of forward's arguments, then the intermediate values."""

    dx: Array
    dgamma: Array
    dbeta: Array
    dz: Array
    xhat: Array
    rstd: Array


class _Form(NamedTuple):
    """How a kind of norm views x: with its axes in `order`, then reshaped to `blocks` = [N, G, K, R]."""

    order: tuple[int, ...]
    ordered_shape: tuple[int, ...]
    blocks: tuple[int, int, int, int]
    statistics_shape: tuple[int, ...]
    parameter_shape: tuple[int, ...]

    def split(self, a: Array) -> Array:
        # Contiguous, so that every sum below is over contiguous elements, which NumPy adds pairwise.
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
        # The rounding error of `rough` is the mean of the differences. Subtracting it from those, not from x, keeps
        # digits that rough + rest loses if the mean is large.
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

    `channel_axis` is for batch, instance and group norm, `num_groups` for group norm, `axis` (the first normalized
    axis) for layer norm. `mean` and `var`, if given, replace the statistics of x; they are broadcast to one value per
    set, so running statistics [C] work for instance norm's [N, C]. An empty set has mean 0 and var 0.
    """
    x, work = working_type(x)
    form = _form(x.shape, kind, channel_axis, axis, num_groups)
    xhat, mu, v, rstd = _standardize(form.split(x.astype(work)), form, eps, mean, var)
    z = _parameter("gamma", gamma, 1.0, form, work) * xhat + _parameter("beta", beta, 0.0, form, work)
    y = value_at(activation, z, alpha, act_beta)
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
    """Gradients of `norm_forward`. y is its output, or the engine's; it may be None without an activation.

    The activation's slope is computed from y, or with `slope_from` "input" from z = gamma * xhat + beta; then y is not
    needed. `beta` is used only for z.

    With g = gamma * dz and means over the statistics set,
        dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),
    also if `mean` and `var` are given: they are treated as the statistics of x. With `frozen` they are constants, and
    dx = rstd * g. dgamma = sum(dz * xhat) and dbeta = sum(dz) are computed even without gamma and beta.
    """
    x, work = working_type(x)
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
        slope = input_slope_at(activation, z, alpha, act_beta)
        dz = np.where(is_flat_at(activation, z, alpha, act_beta), 0.0, dy * slope)
    elif y is None:
        raise ValueError(f"the slope of {activation} needs y")
    else:
        y = working_type(y)[0]
        if y.shape != x.shape:
            raise ValueError(f"y has shape {y.shape}, x has {x.shape}")
        dz = slope_times(activation, y, dy, work, alpha, act_beta)
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
    averaged over n first. Empty sets, or no sets at all, leave the old values unchanged.
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
