"""Layers with kernels of their own: activations, normalization, embedding and dropout; and some made of operations.

The gradients of the former are single calls of the engine, without second derivatives, but for the embedding's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

import retrograd as rg

from .. import _core
from ..ops import _args
from ..ops._norm_problem import NormKind, NormProblem, norm_problem_of
from ..ops._types import Array
from ..ops.activation import Activation
from ..ops.normalization import RunningUpdate
from .elementwise import add, cast, greater_equal, identity, multiply, rsqrt, run_map, where
from .indexing import as_seed, refuse_index
from .operation import Operation, Spec
from .operators import Axes
from .reduction import INT64, as_axes, mean, refuse, sum_of_squares
from .shaping import broadcast_to, expand_dims, reshape, stack, take_slice
from .tensor import Node, Operand, Tensor, Variable, apply, apply_one, fail

ONCE: Final = "it is a single call of the engine; second derivatives need a layer made of operations"


# ---- activations -----------------------------------------------------------------------------------------------------


def _activation_shapes(x: Spec, *, activation: Activation) -> Sequence[Spec]:
    if x.dtype.kind != "f":
        raise TypeError(f"x has dtype {x.dtype}, must be float32 or float64; convert it with .astype")
    return (x,)


def _activation(inputs: Sequence[Array], results: Sequence[Array], *, activation: Activation) -> None:
    rg.activation_forward(inputs[0], activation, out=results[0])


def _activation_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    return list(apply(_ACTIVATION_BACKWARD, (given[0], node.inputs[0]), node.attributes))


def _activation_backward(inputs: Sequence[Array], results: Sequence[Array], *, activation: Activation) -> None:
    rg.activation_backward(inputs[0], activation, x=inputs[1], out=results[0])


ACTIVATION: Final = Operation(
    "activation", _activation_shapes, compute=_activation, gradient=_activation_gradient, contiguous=(),
    in_place=[(0, 0)], flops=lambda inputs, results, **_: inputs[0].elements,
)  # fmt: skip
_ACTIVATION_BACKWARD: Final = Operation(
    "activation_backward", lambda dy, x, *, activation: (x,), compute=_activation_backward, contiguous=(),
    in_place=[(0, 0), (0, 1)], why_not=ONCE, flops=lambda inputs, results, **_: inputs[0].elements,
)  # fmt: skip


def activation(x: Operand, function: str | Activation) -> Tensor:
    """One of the engine's activations, by name; docs/activations.md lists them."""
    try:
        chosen = _args.as_activation(function)
    except (TypeError, ValueError) as error:
        raise fail("activation", str(error), type(error)) from None
    if chosen.name == "identity":
        return identity(x)
    return apply_one(ACTIVATION, (x,), {"activation": chosen})


def gelu(x: Operand) -> Tensor:
    """x times the probability that a normal variable is below it."""
    return activation(x, "gelu")


def silu(x: Operand) -> Tensor:
    """``x * sigmoid(x)``"""
    return activation(x, "silu")


def softplus(x: Operand) -> Tensor:
    """``log(1 + exp(x))``"""
    return activation(x, "softplus")


def elu(x: Operand, alpha: float = 1.0) -> Tensor:
    """x, or ``alpha * (exp(x) - 1)`` below 0."""
    return activation(x, Activation("elu", alpha))


def leaky_relu(x: Operand, alpha: float = 0.01) -> Tensor:
    """x, or ``alpha * x`` below 0."""
    return activation(x, Activation("leaky_relu", alpha))


def prelu(x: Operand, alpha: Operand, axis: int = 1) -> Tensor:
    """x, or ``alpha * x`` below 0. A vector `alpha` is along `axis`; any other one is broadcast to x."""
    tensor, slopes = identity(x), identity(alpha)
    if slopes.ndim == 1 and tensor.ndim > 1:
        try:
            (number,) = as_axes(axis, tensor.ndim)
        except ValueError as error:
            raise fail("prelu", str(error)) from None
        if slopes.size not in (1, tensor.shape[number]):
            raise fail("prelu", f"alpha has shape {slopes.shape}, but axis {axis} of x, shape {tensor.shape}, differs")
        slopes = reshape(slopes, tuple(slopes.size if i == number else 1 for i in range(tensor.ndim)))
    above = greater_equal(tensor, 0.0)
    # Not alpha * x itself, whose gradient is NaN where x is infinite.
    return where(above, tensor, multiply(slopes, where(above, 0.0, tensor)))


# ---- normalization ---------------------------------------------------------------------------------------------------


def _norm(
    x: Spec, kind: NormKind, axis: int, groups: int, eps: float, activation: Activation, slope_from: str
) -> NormProblem:
    return norm_problem_of(kind, x.shape, x.dtype, axis, groups, eps, activation, slope_from)


def _check_parameters(problem: Any, gamma: Spec | None, beta: Spec | None) -> None:
    for name, spec in (("gamma", gamma), ("beta", beta)):
        if spec is not None and spec.shape != problem.parameter_shape:
            raise ValueError(
                f"{name} has shape {spec.shape}, expected {problem.parameter_shape} to match x of shape {problem.shape}"
            )
        if spec is not None and spec.dtype != problem.arithmetic:
            raise TypeError(f"{name} has dtype {spec.dtype}, expected {problem.arithmetic}")


def _norm_shapes(
    x: Spec, gamma: Spec | None, beta: Spec | None, statistics: Spec | None, *, frozen: bool, **options: Any
) -> Sequence[Spec]:
    problem = _norm(x, **options)
    _check_parameters(problem, gamma, beta)
    shape = problem.cache_shape
    if statistics is not None and statistics != Spec(shape, np.dtype(np.float64)):
        raise ValueError(f"mean and variance are {statistics!r}, expected float64{list(shape)}")
    if statistics is not None:
        return (x,)
    return x, Spec(shape, np.dtype(np.float64))


def _norm_forward(
    inputs: Sequence[Array | None], results: Sequence[Array | None], *, frozen: bool, **options: Any
) -> None:
    x, gamma, beta, statistics = inputs
    assert x is not None
    given = statistics is not None
    problem = _norm(Spec(x.shape, x.dtype), **options)
    if problem.engine is None:
        return
    if statistics is None:
        statistics = results[1]
    refuse(problem.engine.forward(x, gamma, beta, results[0], None, statistics, given, False, 0))


def _norm_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    x, gamma, beta, statistics = node.inputs
    if len(given) > 1 and given[1] is not None:
        raise fail("gradients", "the statistics of a normalization have no gradient; use mean and var", TypeError)
    if needed[3]:
        raise fail("gradients", "given statistics of a normalization have no gradient; use mean and var", TypeError)
    if given[0] is None:
        return [None] * 4
    saved = statistics if statistics is not None else node.results[1]
    problem = _norm(x.spec, **{k: v for k, v in node.attributes.items() if k != "frozen"})  # type: ignore[union-attr]
    y = node.results[0] if problem.needs_y else None
    attributes = {**node.attributes, "given": statistics is not None}
    dx, dgamma, dbeta = apply(NORM_BACKWARD, (given[0], x, y, gamma, beta, saved), attributes)
    return [dx, dgamma if gamma is not None else None, dbeta if beta is not None else None, None]


NORM: Final = Operation(
    "norm", _norm_shapes, compute=_norm_forward, gradient=_norm_gradient, contiguous=(1, 2, 3),
    flops=lambda inputs, results, **_: 8.0 * inputs[0].elements,
)  # fmt: skip


def _norm_backward(
    inputs: Sequence[Array | None], results: Sequence[Array | None], *, frozen: bool, given: bool, **options: Any
) -> None:
    dy, x, y, gamma, beta, statistics = inputs
    assert x is not None
    problem = _norm(Spec(x.shape, x.dtype), **options)
    dx, dgamma, dbeta = results
    if problem.engine is None:
        for array in (dgamma, dbeta):
            if array is not None:
                run_map([], [], [0.0], [array], [0])
        return
    cache = (problem, x, y, gamma, beta, statistics, given, frozen)
    refuse(problem.engine.backward(dy, cache, None, None, None, dx, dgamma, dbeta, False, False, 0))


def _norm_backward_shapes(
    dy: Spec, x: Spec, y: Spec | None, gamma: Spec | None, beta: Spec | None, statistics: Spec, **options: Any
) -> Sequence[Spec]:
    problem = _norm(x, **{k: v for k, v in options.items() if k not in ("frozen", "given")})
    parameter = Spec(problem.parameter_shape, problem.arithmetic)
    return x, parameter, parameter


NORM_BACKWARD: Final = Operation(
    "norm_backward", _norm_backward_shapes, compute=_norm_backward, contiguous=(3, 4, 5), in_place=[(0, 0)],
    optional=(0, 1, 2), why_not=ONCE, flops=lambda inputs, results, **_: 12.0 * inputs[0].elements,
)  # fmt: skip


def _normalize(
    kind: NormKind,
    x: Operand,
    gamma: Operand | None,
    beta: Operand | None,
    statistics: Operand | None,
    axis: int,
    groups: int,
    eps: float,
    activation: str | Activation | None,
    slope_from: str,
    frozen: bool = False,
) -> tuple[Any, ...]:
    options = {
        "kind": kind, "axis": axis, "groups": groups, "eps": float(eps), "activation": _args.as_activation(activation),
        "slope_from": slope_from, "frozen": frozen,
    }  # fmt: skip
    return apply(NORM, (x, gamma, beta, statistics), options)


def batch_norm(
    x: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    *,
    training: bool = True,
    running_mean: Variable | None = None,
    running_var: Variable | None = None,
    update: RunningUpdate = RunningUpdate.pytorch(),  # noqa: B008 (immutable)
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
) -> Tensor:
    """Each channel normalized over samples and space, as :func:`retrograd.batch_norm_forward`.

    In training the running statistics, if given, are assigned their new values; in evaluation they are used.
    """
    options = {"axis": channel_axis, "eps": eps, "activation": activation, "slope_from": slope_from}
    return _running_norm(
        "batch_norm", x, gamma, beta, options, training=training, running=(running_mean, running_var), update=update
    )


def _running_norm(
    kind: NormKind,
    x: Operand,
    gamma: Operand | None,
    beta: Operand | None,
    options: dict[str, Any],
    *,
    training: bool,
    running: tuple[Variable | None, Variable | None],
    update: RunningUpdate,
) -> Tensor:
    running_mean, running_var = running
    if (running_mean is None) != (running_var is None):
        raise fail(kind, "running_mean and running_var belong together; one of them is missing")
    if not training:
        if running_mean is None or running_var is None:
            raise fail(kind, "evaluation needs running_mean and running_var")
        given = stack([cast(running_mean, np.float64), cast(running_var, np.float64)])
        if kind == "instance_norm":  # the same for every sample
            samples = identity(x).shape[0]
            given = broadcast_to(expand_dims(given, 1), (2, samples, running_mean.size))
        evaluated: Tensor = _normalize(kind, x, gamma, beta, given, groups=1, frozen=True, **options)[0]
        return evaluated
    y, statistics = _normalize(kind, x, gamma, beta, None, groups=1, **options)
    sets = statistics.size // 2
    if running_mean is not None and running_var is not None and sets:
        if kind == "instance_norm":
            statistics = mean(statistics, 1)
        _update_running(running_mean, running_var, statistics, y.size // sets, update)
    normalized: Tensor = y
    return normalized


def _update_running(
    running_mean: Variable, running_var: Variable, statistics: Tensor, count: int, update: RunningUpdate
) -> None:
    if count == 0:
        return
    center, var = take_slice(statistics, 0), take_slice(statistics, 1)
    if update.unbiased and count > 1:
        var = var * (count / (count - 1))
    for variable, batch in ((running_mean, center), (running_var, var)):
        variable.assign(cast(moved(variable, batch, update)[1], variable.dtype))


def moved(variable: Variable, batch: Tensor, update: RunningUpdate) -> tuple[Tensor, Tensor]:
    """A running statistic before and after a batch, in float64."""
    old = cast(identity(variable), np.float64)
    return old, add(old * update.keep, batch * (1.0 - update.keep))


def instance_norm(
    x: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    *,
    training: bool = True,
    running_mean: Variable | None = None,
    running_var: Variable | None = None,
    update: RunningUpdate = RunningUpdate.pytorch(),  # noqa: B008 (immutable)
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
) -> Tensor:
    """Each channel of each sample normalized over space, as :func:`retrograd.instance_norm_forward`.

    Running statistics are per channel, updated by the mean over the samples.
    """
    options = {"axis": channel_axis, "eps": eps, "activation": activation, "slope_from": slope_from}
    return _running_norm(
        "instance_norm", x, gamma, beta, options, training=training, running=(running_mean, running_var), update=update
    )


def layer_norm(
    x: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    activation: str | Activation | None = None,
    slope_from: str = "output",
) -> Tensor:
    """Normalized over the axes from `axis` to the last, as :func:`retrograd.layer_norm_forward`."""
    found: Tensor = _normalize("layer_norm", x, gamma, beta, None, axis, 1, eps, activation, slope_from)[0]
    return found


def group_norm(
    x: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    *,
    num_groups: int,
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
) -> Tensor:
    """Normalized over space and groups of channels, as :func:`retrograd.group_norm_forward`."""
    found: Tensor = _normalize(
        "group_norm", x, gamma, beta, None, channel_axis, num_groups, eps, activation, slope_from
    )[0]  # fmt: skip
    return found


def layer_of_norm(
    kind: NormKind, x: Operand, gamma: Operand | None, beta: Operand | None, axis: int, eps: float
) -> Tensor:
    """A normalization by the statistics of x, of any kind without groups."""
    found: Tensor = _normalize(kind, x, gamma, beta, None, axis, 1, eps, None, "output")[0]
    return found


def rms_norm(x: Operand, scale: Operand | None = None, axes: Axes | Sequence[int] = -1, eps: float = 1e-5) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * scale``, with the mean over these axes; None: over all."""
    tensor = identity(x)
    square = sum_of_squares(tensor, axes, keepdims=True)
    normalized = multiply(tensor, rsqrt(add(multiply(square, square.size / max(1, tensor.size)), float(eps))))
    return normalized if scale is None else multiply(normalized, scale)


def l2_normalize(x: Operand, axes: Axes | Sequence[int] = -1, eps: float = 1e-12) -> Tensor:
    """``x / sqrt(sum(x**2) + eps)``, with the sum over these axes; None: over all."""
    tensor = identity(x)
    return multiply(tensor, rsqrt(add(sum_of_squares(tensor, axes, keepdims=True), float(eps))))


# ---- embedding -------------------------------------------------------------------------------------------------------


def _embedding_shapes(indices: Spec, table: Spec) -> Sequence[Spec]:
    if indices.dtype != INT64:
        raise TypeError(f"indices has dtype {indices.dtype}, must be int64; convert it with .astype")
    if len(table.shape) != 2 or table.dtype.kind != "f":
        raise ValueError(f"table is {table!r}, must be [rows, width] of floats")
    return (Spec((*indices.shape, table.shape[1]), table.dtype),)


def _embedding(inputs: Sequence[Array], results: Sequence[Array]) -> None:
    (indices, table), (y,) = inputs, results
    rows = y.reshape(-1, table.shape[1]) if y.size else y.reshape(indices.size, table.shape[1])
    answer = _core.embedding_forward(table.dtype.itemsize == 8, indices.reshape(-1), table, rows, False, 0)
    refuse_index(answer, indices, table.shape[0])


def _embedding_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    indices, table = node.inputs
    assert table is not None
    return [None, apply(_EMBEDDING_BACKWARD, (given[0], indices), {"rows": table.shape[0]})[0]]


EMBEDDING: Final = Operation(
    "embedding", _embedding_shapes, compute=_embedding, gradient=_embedding_gradient, contiguous=(0,)
)


def _embedding_backward(inputs: Sequence[Array], results: Sequence[Array], *, rows: int) -> None:
    (dy, indices), (dtable,) = inputs, results
    flat = dy.reshape(indices.size, dy.shape[-1])
    refuse_index(
        _core.embedding_backward(dy.dtype.itemsize == 8, flat, indices.reshape(-1), dtable, False, False, 0)
    )  # fmt: skip


def _embedding_second(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    return [apply(EMBEDDING, (node.inputs[1], given[0]))[0], None]


_EMBEDDING_BACKWARD: Final = Operation(
    "embedding_backward",
    lambda dy, indices, *, rows: (Spec((rows, dy.shape[-1]), dy.dtype),),
    compute=_embedding_backward,
    gradient=_embedding_second,
)


def embedding(indices: Operand, table: Operand) -> Tensor:
    """The rows of `table` that integer `indices`, of any shape, select."""
    return apply_one(EMBEDDING, (identity(indices), table), dtype=INT64)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def _dropout_shapes(x: Spec, seed: Spec, *, rate: float) -> Sequence[Spec]:
    if x.dtype.kind != "f":
        raise TypeError(f"x has dtype {x.dtype}, must be float32 or float64")
    if seed != Spec((), INT64):
        raise TypeError(f"seed is {seed!r}, must be one int64")
    return (x,)


def _dropout(inputs: Sequence[Array], results: Sequence[Array], *, rate: float) -> None:
    x, seed = inputs
    refuse(_core.dropout(x.dtype.itemsize == 8, x.reshape(-1), rate, seed, results[0].reshape(-1), False, 0))


def _dropout_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    return [apply(DROPOUT, (given[0], node.inputs[1]), node.attributes)[0], None]


DROPOUT: Final = Operation(
    "dropout", _dropout_shapes, compute=_dropout, gradient=_dropout_gradient, in_place=[(0, 0)],
    flops=lambda inputs, results, **_: inputs[0].elements,
)  # fmt: skip


def dropout(x: Operand, rate: float, *, seed: Operand) -> Tensor:
    """x with a fraction `rate` of its elements set to 0, the others divided by ``1 - rate``.

    The mask is the one that :func:`retrograd.dropout` draws for the seed, an int64 without axes: a number, or a counter
    that the program keeps, `graph.counter()`, so that every run has another mask.
    """
    if not isinstance(rate, (int, float)) or not 0 <= rate < 1:
        raise fail("dropout", f"rate is {rate}, must be at least 0 and below 1")
    if rate == 0:
        return identity(x)
    return apply_one(DROPOUT, (x, as_seed(seed)), {"rate": float(rate)})
