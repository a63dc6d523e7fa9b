"""Batch, instance, layer and group normalization, with fused activations."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..ops import _args
from ..ops._call import named
from ..ops._errors import ArgumentValueError
from ..ops._norm_problem import NormProblem, check_parameter, check_set_values, norm_problem
from ..ops.activation import Activation
from ._ffi import BYTE, Static, as_operand, call, is_perturbed, nonzero, values


class BatchNormOutput(NamedTuple):
    """The output of a batch norm, and the mean and the biased variance of each channel that it used."""

    y: jax.Array
    mean: jax.Array
    var: jax.Array


@named
def batch_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    mean: Any = None,
    var: Any = None,
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
    num_threads: int | None = None,
) -> BatchNormOutput:
    """Normalize each channel over samples and space: ``y = f(gamma * (x - mean) * rstd + beta)``.

    In training the batch's statistics are used, and returned for running averages. In evaluation pass `mean`
    and `var`. Gradients flow through all three results, and to `mean` and `var`.
    """
    x = as_operand("x", x)
    problem = norm_problem("batch_norm", x, channel_axis, 1, eps, activation, slope_from)
    if mean is None and var is None:
        return BatchNormOutput(*_run(problem, True, x, gamma, beta, None, None, num_threads))
    if mean is None or var is None:
        missing = "mean" if mean is None else "var"
        raise ArgumentValueError(missing, "{argument} is missing: give both {mean} and {var}, or neither")
    mean, var = as_operand("mean", mean), as_operand("var", var)
    for name, array in (("mean", mean), ("var", var)):
        check_set_values(problem, name, array)
        _args.check_dtype(name, array, problem.arithmetic, "for such data")
    (y,) = _run(problem, False, x, gamma, beta, mean, var, num_threads)
    return BatchNormOutput(y, mean, var)


@named
def instance_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
    num_threads: int | None = None,
) -> jax.Array:
    """Normalize each channel of each sample over space."""
    x = as_operand("x", x)
    problem = norm_problem("instance_norm", x, channel_axis, 1, eps, activation, slope_from)
    return _run(problem, False, x, gamma, beta, None, None, num_threads)[0]


@named
def layer_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    activation: str | Activation | None = None,
    slope_from: str = "output",
    num_threads: int | None = None,
) -> jax.Array:
    """Normalize over the axes from `axis` to the last. gamma and beta have the shape ``x.shape[axis:]``."""
    x = as_operand("x", x)
    problem = norm_problem("layer_norm", x, axis, 1, eps, activation, slope_from)
    return _run(problem, False, x, gamma, beta, None, None, num_threads)[0]


@named
def group_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    num_groups: int,
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
    num_threads: int | None = None,
) -> jax.Array:
    """Normalize each sample over space and over groups of consecutive channels."""
    x = as_operand("x", x)
    problem = norm_problem("group_norm", x, channel_axis, num_groups, eps, activation, slope_from)
    return _run(problem, False, x, gamma, beta, None, None, num_threads)[0]


class _Options(NamedTuple):
    """What is known while tracing."""

    problem: NormProblem  # without its engine: the engine of an equal problem is another object
    statistics: bool  # return them
    threads: int

    @property
    def attributes(self) -> dict[str, Any]:
        settings = self.problem.settings._asdict()
        del settings["dtype"]  # x's dtype
        return settings

    @property
    def channels(self) -> tuple[int, ...]:
        """The shape of a value for each channel of a batch norm that broadcasts with x."""
        roles = zip(self.problem.shape, self.problem.settings.roles, strict=True)
        return tuple(extent if role == "c" else 1 for extent, role in roles)


def _run(
    problem: NormProblem,
    statistics: bool,
    x: jax.Array,
    gamma: Any,
    beta: Any,
    mean: jax.Array | None,
    var: jax.Array | None,
    num_threads: int | None,
) -> tuple[jax.Array, ...]:
    if gamma is not None:
        gamma = as_operand("gamma", gamma)
        check_parameter(problem, "gamma", gamma)
    if beta is not None:
        beta = as_operand("beta", beta)
        check_parameter(problem, "beta", beta)
    options = _Options(problem._replace(engine=None), statistics, _args.thread_count(num_threads))
    found: tuple[jax.Array, ...] = _compiled(options, x, gamma, beta, mean, var)
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalized(options: _Options, x: Any, gamma: Any, beta: Any, mean: Any, var: Any) -> tuple[jax.Array, ...]:
    """y, and if they are to be returned, mean and var."""
    return tuple(_call_forward(options, x, gamma, beta, mean, var, save=False).values())


def _call_forward(
    options: _Options, x: Any, gamma: Any, beta: Any, mean: Any, var: Any, save: bool
) -> dict[str, jax.Array]:
    problem = options.problem
    results: dict[str, tuple[tuple[int, ...], Any]] = {"y": (x.shape, x.dtype)}
    if options.statistics:
        results.update(dict.fromkeys(("mean", "var"), (problem.statistics_shape, problem.arithmetic)))
    if save:  # in float64, as bytes
        results.update(dict.fromkeys(("saved_mean", "saved_var"), ((*problem.statistics_shape, 8), BYTE)))
    arguments = {"x": x, "gamma": gamma, "beta": beta, "mean": mean, "var": var}
    return call("retrograd_norm_forward", arguments, results, options.threads, **options.attributes)


class _Saved(NamedTuple):
    """What forward saves for backward."""

    need: Static  # which gradients: of x, gamma, beta, mean and var
    x: jax.Array
    y: jax.Array | None
    gamma: jax.Array | None
    beta: jax.Array | None
    mean: jax.Array  # as given, or as bytes
    var: jax.Array
    batch_mean: jax.Array | None  # as returned


def _forward(options: _Options, *primals: Any) -> tuple[tuple[jax.Array, ...], _Saved]:
    problem = options.problem
    x, gamma, beta, mean, var = values(primals)
    given = mean is not None
    found = _call_forward(options, x, gamma, beta, mean, var, save=not given)
    outputs = [found["y"]] + ([found["mean"], found["var"]] if options.statistics else [])
    saved = _Saved(
        Static(tuple(map(is_perturbed, primals))),
        x,
        found["y"] if problem.needs_y else None,
        gamma,
        beta if problem.needs_beta else None,
        mean if given else found["saved_mean"],
        var if given else found["saved_var"],
        found.get("mean"),
    )
    return tuple(outputs), saved


def _backward(options: _Options, saved: _Saved, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    need_dx, need_dgamma, need_dbeta, need_dmean, need_dvar = saved.need.value
    dy = nonzero(cotangents[0])
    dx = dgamma = dbeta = dmean = dvar = None
    if dy is not None:
        parameter = (options.problem.parameter_shape, options.problem.arithmetic)
        results = {"dx": (saved.x.shape, saved.x.dtype)} if need_dx else {}
        if need_dgamma or need_dvar:
            results["dgamma"] = parameter
        if need_dbeta or need_dmean:
            results["dbeta"] = parameter
        arguments = {
            "x": saved.x,
            "dy": dy,
            "y": saved.y,
            "gamma": saved.gamma,
            "beta": saved.beta,
            "saved_mean": saved.mean,
            "saved_var": saved.var,
        }
        frozen = saved.mean.dtype != BYTE
        found = call(
            "retrograd_norm_backward", arguments, results, options.threads, frozen=frozen, **options.attributes
        )
        dx = found.get("dx")
        dgamma = found["dgamma"] if need_dgamma else None
        dbeta = found["dbeta"] if need_dbeta else None
        if frozen:
            dmean, dvar = _given_statistics_gradients(options, saved, found.get("dbeta"), found.get("dgamma"))
    if options.statistics and need_dx:
        dx = _with_statistics(options, saved, dx, *map(nonzero, cotangents[1:]))
    return dx, dgamma, dbeta, dmean if need_dmean else None, dvar if need_dvar else None


def _given_statistics_gradients(
    options: _Options, saved: _Saved, sum_dz: jax.Array | None, sum_dz_xhat: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """The gradients of given statistics, from the sums over each channel that are dbeta and dgamma."""
    slope = jax.lax.rsqrt(saved.var + options.problem.eps)
    factor = slope if saved.gamma is None else slope * saved.gamma
    dmean = None if sum_dz is None else -factor * sum_dz
    dvar = None if sum_dz_xhat is None else -0.5 * slope * factor * sum_dz_xhat
    return dmean, dvar


def _with_statistics(
    options: _Options, saved: _Saved, dx: jax.Array | None, dmean: jax.Array | None, dvar: jax.Array | None
) -> jax.Array | None:
    """Add to dx what flows through the mean and the variance that forward returned."""
    if (dmean is None and dvar is None) or not options.problem.set_size:
        return dx
    x = saved.x.astype(options.problem.arithmetic)
    total = jnp.zeros_like(x) if dx is None else dx.astype(x.dtype)
    if dmean is not None:
        total += dmean.reshape(options.channels) / options.problem.set_size
    if dvar is not None:
        assert saved.batch_mean is not None
        centred = x - saved.batch_mean.reshape(options.channels)
        axes = tuple(axis for axis, role in enumerate(options.problem.settings.roles) if role == "r")
        centred -= centred.mean(axes, keepdims=True)  # batch_mean has been rounded
        total += dvar.reshape(options.channels) * (2 / options.problem.set_size) * centred
    return total.astype(saved.x.dtype)


_normalized.defvjp(_forward, _backward, symbolic_zeros=True)
_compiled = jax.jit(_normalized, static_argnums=0)
