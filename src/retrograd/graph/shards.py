"""Batch norm over several shards, each with a program of its own: the programs exchange statistics by calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

import retrograd as rg

from ..ops import _args
from ..ops._norm_problem import NormProblem
from ..ops._types import Array
from ..ops.activation import Activation
from ..ops.normalization import RunningUpdate
from .callback import call
from .elementwise import cast, greater, run_map, where
from .layer import ONCE, _check_parameters, _norm, moved
from .operation import Operation, Spec
from .reduction import refuse
from .shaping import take_slice
from .tensor import Node, Operand, Tensor, Variable, apply_one, as_array, current_graph, fail, in_trace

_F64: Final = np.dtype(np.float64)
# Waits for all shards, and returns the values of all, in the order of shards.
Exchange: TypeAlias = Callable[[Any], Sequence[Any]]


def _problem(x: Spec, axis: int, eps: float, activation: Activation, slope_from: str) -> NormProblem:
    return _norm(x, "batch_norm", axis, 1, eps, activation, slope_from)


def _of_array(x: Array, options: dict[str, Any]) -> NormProblem:
    return _problem(Spec(x.shape, x.dtype), **options)


def _check_sets(problem: NormProblem, **given: Spec) -> None:
    for name, spec in given.items():
        expected = Spec(() if name == "count" else problem.cache_shape, _F64)
        if spec != expected:
            raise ValueError(f"{name} is {spec!r}, expected {expected!r}")


# ---- forward ---------------------------------------------------------------------------------------------------------


def _statistics_shapes(x: Spec, *, axis: int) -> Sequence[Spec]:
    return (Spec(_problem(x, axis, 0.0, Activation("identity"), "output").cache_shape, _F64),)


def _statistics(inputs: Sequence[Array], results: Sequence[Array], *, axis: int) -> None:
    (x,), (statistics,) = inputs, results
    problem = _problem(Spec(x.shape, x.dtype), axis, 0.0, Activation("identity"), "output")
    if problem.engine is None:
        run_map([], [], [0.0], [statistics], [0])
    else:
        refuse(problem.engine.forward(x, None, None, None, None, statistics, False, False, 0))


# Mean and biased variance of each channel, float64 [2, C].
_STATISTICS: Final = Operation(
    "norm_statistics", _statistics_shapes, compute=_statistics, contiguous=(),
    why_not="the gradient of sync_batch_norm includes that of its statistics; for others use mean and var",
    flops=lambda inputs, results, **_: 4.0 * inputs[0].elements,
)  # fmt: skip


def _sync_shapes(
    x: Spec, gamma: Spec | None, beta: Spec | None, statistics: Spec, count: Spec, *, exchange: Exchange, **options: Any
) -> Sequence[Spec]:
    problem = _problem(x, **options)
    _check_parameters(problem, gamma, beta)
    _check_sets(problem, statistics=statistics, count=count)
    return (x,)


def _sync_forward(
    inputs: Sequence[Array | None], results: Sequence[Array], *, exchange: Exchange, **options: Any
) -> None:
    x, gamma, beta, statistics, _ = inputs
    assert x is not None
    problem = _of_array(x, options)
    if problem.engine is not None:
        refuse(problem.engine.forward(x, gamma, beta, results[0], None, statistics, True, False, 0))


def _sync_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    x, gamma, beta, statistics, count = node.inputs
    assert x is not None
    options = {name: value for name, value in node.attributes.items() if name != "exchange"}
    y = node.results[0] if _problem(x.spec, **options).needs_y else None
    saved = (given[0], x, y, gamma, beta, statistics)
    sums = apply_one(_SUMS, saved, options)
    dgamma = None if gamma is None else cast(take_slice(sums, 1), gamma.dtype)
    dbeta = None if beta is None else cast(take_slice(sums, 0), beta.dtype)
    dx = None
    if needed[0]:
        total = call(_add_sums(node.attributes["exchange"]), sums.spec, sums)
        dx = apply_one(_DX, (*saved, total, count), options)
    # That of the statistics is part of dx.
    return [dx, dgamma, dbeta, None, None]


def _add_sums(exchange: Exchange) -> Callable[[Array], Array]:
    def add_sums(sums: Array) -> Array:
        total, *others = exchange(sums.copy())  # other shards read it when this one may run on
        for part in others:
            total = total + part
        found: Array = total
        return found

    return add_sums


# Normalization with the statistics of all shards, which have `count` elements per channel.
_SYNC: Final = Operation(
    "sync_norm", _sync_shapes, compute=_sync_forward, gradient=_sync_gradient, contiguous=(1, 2, 3, 4),
    flops=lambda inputs, results, **_: 4.0 * inputs[0].elements,
)  # fmt: skip


# ---- backward --------------------------------------------------------------------------------------------------------


def _sums_shapes(
    dy: Spec, x: Spec, y: Spec | None, gamma: Spec | None, beta: Spec | None, statistics: Spec, **options: Any
) -> Sequence[Spec]:
    problem = _problem(x, **options)
    _check_sets(problem, statistics=statistics)
    return (Spec(problem.cache_shape, _F64),)


def _sums(inputs: Sequence[Array | None], results: Sequence[Array], **options: Any) -> None:
    dy, x, *others = inputs
    assert x is not None
    problem, (sums,) = _of_array(x, options), results
    if problem.engine is None:
        run_map([], [], [0.0], [sums], [0])
    else:
        cache = (problem, x, *others, True, False)
        refuse(problem.engine.gradient_sums(dy, cache, sums[0], sums[1], False, 0))


# The sums of dz and of dz * xhat over the elements of this shard, float64 [2, C]: its part of dbeta and of dgamma.
_SUMS: Final = Operation(
    "norm_sums", _sums_shapes, compute=_sums, contiguous=(3, 4, 5), why_not=ONCE,
    flops=lambda inputs, results, **_: 5.0 * inputs[0].elements,
)  # fmt: skip


def _dx_shapes(
    dy: Spec, x: Spec, y: Spec | None, gamma: Spec | None, beta: Spec | None, statistics: Spec, sums: Spec, count: Spec,
    **options: Any,
) -> Sequence[Spec]:  # fmt: skip
    _check_sets(_problem(x, **options), statistics=statistics, sums=sums, count=count)
    return (x,)


def _dx(inputs: Sequence[Array | None], results: Sequence[Array], **options: Any) -> None:
    dy, x, *others, sums, count = inputs
    assert x is not None
    assert sums is not None
    problem = _of_array(x, options)
    if problem.engine is not None:
        cache = (problem, x, *others, True, False)
        refuse(
            problem.engine.backward(
                dy, cache, sums[0], sums[1], count, results[0], None, None, False, False, 0
            )
        )  # fmt: skip


# dx, of the sums of all shards.
_DX: Final = Operation(
    "norm_dx", _dx_shapes, compute=_dx, contiguous=(3, 4, 5, 6, 7), in_place=[(0, 0)], why_not=ONCE,
    flops=lambda inputs, results, **_: 7.0 * inputs[0].elements,
)  # fmt: skip


# ---- the layer -------------------------------------------------------------------------------------------------------


def sync_batch_norm(
    x: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    *,
    exchange: Exchange,
    running_mean: Variable | None = None,
    running_var: Variable | None = None,
    update: RunningUpdate = RunningUpdate.pytorch(),  # noqa: B008 (immutable)
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
) -> Tensor:
    """Batch norm in training with the statistics of several shards, whose programs run at the same time.

    ``exchange(value)`` waits until all shards have called it and returns the values of all, in the order of shards, as
    :meth:`retrograd.distributed.Group.exchange` does. All shards compile the same function. Statistics and sums are
    combined in that order, so all shards have the same running statistics. The gradients of gamma and beta are this
    shard's part: add up the parts of all shards. For evaluation there is ``batch_norm(..., training=False)``.
    """
    if (running_mean is None) != (running_var is None):
        raise fail("sync_batch_norm", "running_mean and running_var belong together; one of them is missing")
    operand = x if in_trace((x,)) else as_array(x)
    assert isinstance(operand, (Tensor, Variable, np.ndarray))
    own = apply_one(_STATISTICS, (operand,), {"axis": channel_axis})
    elements = operand.size // max(1, own.shape[1])
    results = (Spec(own.shape, _F64), Spec((), _F64))
    statistics, count = call(_combine_shards(exchange, elements), results, own)
    options = {
        "axis": channel_axis, "eps": float(eps), "activation": _args.as_activation(activation),
        "slope_from": slope_from, "exchange": exchange,
    }  # fmt: skip
    y = apply_one(_SYNC, (operand, gamma, beta, statistics, count), options)
    if running_mean is not None and running_var is not None and current_graph() is not None:
        _update_running(running_mean, running_var, statistics, count, update)
    return y


def _combine_shards(exchange: Exchange, count: int) -> Callable[[Array], tuple[Array, Any]]:
    def combine_shards(statistics: Array) -> tuple[Array, Any]:
        mean, var = statistics.copy()  # other shards read them when this one may run on
        total, mean, var = rg.combine_statistics(exchange(rg.NormStatistics(count, mean, var)))
        return np.stack([mean, var]), np.float64(total)

    return combine_shards


def _update_running(
    running_mean: Variable, running_var: Variable, statistics: Tensor, count: Tensor, update: RunningUpdate
) -> None:
    mean, var = take_slice(statistics, 0), take_slice(statistics, 1)
    if update.unbiased:  # the unbiased variance of one element is undefined
        var = var * where(greater(count, 1.0), count / (count - 1.0), 1.0)
    for variable, batch in ((running_mean, mean), (running_var, var)):
        old, new = moved(variable, batch, update)
        variable.assign(cast(where(greater(count, 0.0), new, old), variable.dtype))
