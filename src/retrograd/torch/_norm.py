"""Normalization of tensors by the array functions: forward, backward and running statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..ops._norm_problem import NormKind, NormProblem, norm_problem
from ..ops._types import Array
from ..ops.activation import ACTIVATIONS, Activation
from ..ops.normalization import (
    BareNormCache,
    NormCache,
    NormGradients,
    NormStatistics,
    RunningUpdate,
    run_backward,
    run_forward,
    update_running,
)
from ._arrays import array, empty_like, in_float, is_half, num_threads

_DTYPES: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
GRADIENT: Final = "the gradient of the output"


class Norm(NamedTuple):
    """The arguments of a normalization: those of the operator, in its order."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None  # constants to normalize by, instead of the statistics of x
    var: Tensor | None
    kind: NormKind
    axis: int  # of the channels, or the first normalized axis of a layer norm
    groups: int
    eps: float
    activation: str = "identity"
    alpha: float | None = None  # parameters of the activation; None: its default
    beta: float | None = None

    @property
    def problem(self) -> NormProblem:
        return problem_of(self.x.shape, self.x.dtype, *self[5:])

    @property
    def needs_y(self) -> bool:
        """Whether the slope of the activation is computed from y, as PyTorch does: only if y determines it exactly.

        This takes less time. Otherwise it is computed from the input, and y may be modified in place.
        """
        return _needs_y(*self[9:])

    @property
    def channel_shape(self) -> tuple[int, ...]:
        """The shape of weight and bias."""
        return tuple(self.x.shape[self.axis :]) if self.kind == "layer_norm" else (self.x.shape[self.axis],)


class Running(NamedTuple):
    """Running statistics of a batch or instance norm, which the statistics of x update."""

    mean: Tensor
    var: Tensor
    momentum: float | None  # the weight of x in an update; None: of one batch after `batches` others
    batches: Tensor | None


def forward(norm: Norm, running: Running | None, given: NormStatistics | None = None) -> tuple[Tensor, BareNormCache]:
    """Normalize x by its statistics, or by those `given`, which it is a part of, or by constants."""
    problem = norm.problem
    data, gamma, beta = arrays_of(norm.kind, *norm[:3])
    mean = var = None
    count, frozen = problem.set_size, False
    if given is not None:
        count, mean, var = given
    elif norm.mean is not None and norm.var is not None:
        # An instance norm has statistics for each sample.
        constants = _running_arrays(norm.kind, norm.mean, norm.var)
        mean, var = (np.broadcast_to(s, problem.statistics_shape) for s in constants)
        frozen = True
    y, out = empty_like(norm.x, data)
    cache = run_forward(problem, data, gamma, beta, mean, var, frozen, out, None, num_threads())[1]
    if running is not None:
        update(norm.kind, running, cache.statistics, count)
    return y, cache.without_arrays()


def saved_for_backward(norm: Norm, y: Tensor, needs_y: bool) -> tuple[Tensor | None, ...]:
    """The tensors that backward needs: y or the bias only for the slope of an activation."""
    bias = None if needs_y or norm.activation == "identity" else norm.bias
    return norm.x, norm.weight, bias, y if needs_y else None


def cache_of(bare: BareNormCache, x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor | None) -> NormCache:
    """The cache of the forward pass, from the tensors that were saved."""
    kind = bare.problem.kind
    data, gamma, beta = arrays_of(kind, x, weight, bias)
    return bare.with_arrays(data, None if y is None else array(y, kind, "the output"), gamma, beta)


def backward(
    need: Sequence[bool],
    bare: BareNormCache,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    problem, cache = bare.problem, cache_of(bare, x, weight, bias, y)
    dx, out = empty_like(x, cache.x) if need[0] else (None, None)
    dweight = np.empty(problem.parameter_shape, problem.arithmetic) if need[1] else None
    dbias = np.empty(problem.parameter_shape, problem.arithmetic) if need[2] else None
    outgoing = array(dy, problem.kind, GRADIENT)
    run_backward(problem, outgoing, cache, NormGradients(out, dweight, dbias), False, num_threads() or 0)
    return (
        dx,
        None if dweight is None else torch.from_numpy(dweight),
        None if dbias is None else torch.from_numpy(dbias),
    )


def update(function: str, running: Running, statistics: Array, count: int) -> None:
    """Update running statistics, each of [C], by a batch's: [2, C], or [2, N, C] for an instance norm."""
    mean, var, momentum, batches = running
    exact = _running_arrays(function, mean, var)
    if statistics.ndim == 3:
        if not statistics.shape[1]:
            return
        statistics = statistics.mean(axis=1)
    if momentum is None:
        momentum = 0.0 if batches is None else 1.0 / (int(batches) + 1)
    update_running(exact, statistics[0], statistics[1], count, RunningUpdate.pytorch(momentum))
    for tensor, values in zip((mean, var), exact, strict=True):
        if is_half(tensor):
            tensor.copy_(torch.from_numpy(values))
        else:
            torch.autograd.graph.increment_version(tensor)


def _running_arrays(function: str, mean: Tensor, var: Tensor) -> tuple[Array, Array]:
    """The running statistics. Those in half precision are copies in float32."""
    return (
        array(in_float(mean, function, "running_mean"), function, "running_mean"),
        array(in_float(var, function, "running_var"), function, "running_var"),
    )


def arrays_of(
    function: str, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Array, Array | None, Array | None]:
    """The arrays of a layer. With half-precision data, half-precision parameters are converted to float32."""
    if is_half(x):
        weight = None if weight is None else in_float(weight, function, "weight")
        bias = None if bias is None else in_float(bias, function, "bias")
    return (
        array(x, function, "input"),
        None if weight is None else array(weight, function, "weight"),
        None if bias is None else array(bias, function, "bias"),
    )


@lru_cache(maxsize=512)
def problem_of(
    shape: torch.Size, dtype: torch.dtype, kind: NormKind, axis: int, groups: int, eps: float, *fused: Any
) -> NormProblem:
    like = array(torch.empty((), dtype=dtype).expand(shape), kind, "input")
    slope_from = "output" if _needs_y(*fused) else "input"
    return norm_problem(kind, like, axis, groups, eps, fused_activation(*fused), slope_from)


def _needs_y(*fused: Any) -> bool:
    activation = fused_activation(*fused)
    return activation.name in ("relu", "relu6") or (activation.name == "leaky_relu" and activation.alpha > 0)


@lru_cache(maxsize=512)
def fused_activation(name: str, alpha: float | None, beta: float | None) -> Activation:
    """The activation with this name and these parameters, None for the default."""
    kind = ACTIVATIONS.get(name)
    if kind is not None:  # an Activation has 0 for a parameter that its function does not have
        alpha, beta = (None if kind.alpha == 0.0 else alpha), (None if kind.beta == 0.0 else beta)
    return Activation(name, alpha, beta)


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(norm: Norm) -> None:
    x = norm.x
    if x.dtype not in _DTYPES:
        raise TypeError(f"{norm.kind}: input has dtype {x.dtype}, must be float32, float64, float16 or bfloat16")
    if not 0 <= norm.eps < math.inf:
        raise ValueError(f"{norm.kind}: eps is {norm.eps}, must be a finite number of at least 0")
    if norm.kind == "group_norm" and (norm.groups < 1 or x.shape[norm.axis] % norm.groups):
        raise ValueError(
            f"group_norm: num_groups is {norm.groups}, which does not divide the {x.shape[norm.axis]} channels of input"
        )
    allowed = (x.dtype, torch.float32) if is_half(x) else (x.dtype,)
    for name, tensor in (("weight", norm.weight), ("bias", norm.bias)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != norm.channel_shape:
            raise ValueError(
                f"{norm.kind}: {name} has shape {tuple(tensor.shape)}, expected {norm.channel_shape} for an input "
                f"of shape {tuple(x.shape)}"
            )
        if tensor.dtype not in allowed:
            raise TypeError(f"{norm.kind}: {name} has dtype {tensor.dtype}, but input has {x.dtype}")


def check_running(function: str, x: Tensor, mean: Tensor, var: Tensor) -> None:
    for name, tensor in (("running_mean", mean), ("running_var", var)):
        if tensor.shape != (x.shape[1],):
            raise ValueError(
                f"{function}: {name} has shape {tuple(tensor.shape)}, expected {(x.shape[1],)} for an input of shape "
                f"{tuple(x.shape)}"
            )
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{function}: {name} has dtype {tensor.dtype}, must be float32, float64, float16 or bfloat16"
            )
