"""Normalization of tensors by the array functions: forward, backward and running statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from ..ops._call import Reason, Refusal
from ..ops._norm_problem import NormKind, NormProblem, as_statistics, norm_problem
from ..ops._types import Array
from ..ops.activation import ACTIVATIONS, Activation
from ..ops.normalization import (
    BareNormCache,
    NormCache,
    NormStatistics,
    RunningUpdate,
    update_running,
)
from ._arrays import array, dense, empty_like, in_float, is_half, num_threads

_DTYPES: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
GRADIENT: Final = "the gradient of the output"
_NAMES: Final = {"x": "input", "gamma": "weight", "beta": "bias", "dy": GRADIENT}  # PyTorch's


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


class Saved(NamedTuple):
    """What backward needs besides tensors."""

    problem: NormProblem
    statistics: Array
    given: bool
    frozen: bool  # gradients do not flow through the statistics
    channels_last: bool  # the order of the axes in memory

    def cache(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor | None) -> NormCache:
        """The cache of the array functions, from the tensors that were saved."""
        kind = self.problem.kind
        arrays = [None if tensor is None else array(tensor, kind, "input or output") for tensor in (x, y)]
        parameters = [
            None if tensor is None else array(in_float(tensor, kind, name), kind, name)
            for tensor, name in ((weight, "weight"), (bias, "bias"))
        ]
        assert arrays[0] is not None
        return BareNormCache(*self[:4]).with_arrays(arrays[0], arrays[1], *parameters)


_new_saved: Final[Callable[[tuple[Any, ...]], Saved]] = partial(tuple.__new__, Saved)


def forward(norm: Norm, running: Running | None, given: NormStatistics | None = None) -> tuple[Tensor, Tensor, Saved]:
    """Normalize x by its statistics, or by those `given`, which it is a part of, or by constants.

    Returns y, the input in dense memory and what else backward needs. The results of a layer or instance norm are
    contiguous, and those of others in the memory format that x suggests, as PyTorch's are.
    """
    x, weight, bias, constant_mean, constant_var, kind = norm[:6]
    problem = problem_of(x.shape, x.dtype, *norm[5:])
    channels_last = has_channels_last(x, kind)
    x = dense(x, kind, "input", channels_last)
    weight, bias = _parameter(norm, problem, weight, "weight"), _parameter(norm, problem, bias, "bias")
    count, frozen, has_statistics = problem.set_size, False, True
    if given is not None:
        count, mean, var = given
        statistics = as_statistics(problem, mean, var)
    elif constant_mean is not None and constant_var is not None:
        # An instance norm has statistics for each sample.
        constants = _running_arrays(kind, constant_mean, constant_var)
        statistics = as_statistics(problem, *(np.broadcast_to(s, problem.statistics_shape) for s in constants))
        frozen = True
    else:
        statistics, has_statistics = np.empty(problem.cache_shape), False
    y = empty_like(x)
    if problem.engine is not None:
        refusal = problem.engine.forward_at(
            x.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            statistics,
            has_statistics,
            channels_last,
            num_threads() or 0,
        )
        if refusal is not None:
            _raise_refusal(kind, refusal)
    elif not has_statistics:
        statistics.fill(0.0)
    if running is not None:
        update(kind, running, statistics, count)
    return y, x, _new_saved((problem, statistics, has_statistics, frozen, channels_last))


def saved_for_backward(norm: Norm, x: Tensor, y: Tensor, needs_y: bool) -> tuple[Tensor | None, ...]:
    """The tensors that backward needs: y or the bias only for the slope of an activation."""
    bias = None if needs_y or norm.activation == "identity" else norm.bias
    return x, norm.weight, bias, y if needs_y else None


def backward(
    need: Sequence[bool],
    saved: Saved,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    problem, statistics, given, frozen, channels_last = saved
    kind, engine = problem.kind, problem.engine
    dy, x = dense(dy, kind, GRADIENT, channels_last), dense(x, kind, "input", channels_last)
    y = None if y is None else dense(y, kind, "the output", channels_last)
    if weight is not None:
        weight = dense(in_float(weight, kind, "weight"), kind, "weight")
    if bias is not None:
        bias = dense(in_float(bias, kind, "bias"), kind, "bias")
    dx = empty_like(x) if need[0] else None
    like = weight  # PyTorch makes a tensor like another in less time
    if like is None and (need[1] or need[2]):
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        like = torch.empty(problem.parameter_shape, dtype=dtype)
    dweight = torch.empty_like(like) if like is not None and need[1] else None
    dbias = torch.empty_like(like) if like is not None and need[2] else None
    if engine is None:
        for empty_sum in (dweight, dbias):
            if empty_sum is not None:
                empty_sum.zero_()
        return dx, dweight, dbias
    refusal = engine.backward_at(
        dy.data_ptr(),
        x.data_ptr(),
        0 if y is None else y.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        statistics,
        given,
        frozen,
        0 if dx is None else dx.data_ptr(),
        0 if dweight is None else dweight.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
        channels_last,
        num_threads() or 0,
    )
    if refusal is not None:
        _raise_refusal(kind, refusal)
    return dx, dweight, dbias


def has_channels_last(x: Tensor, kind: NormKind) -> bool:
    """Whether PyTorch's layer would return a result with the channels last."""
    if kind in ("layer_norm", "instance_norm") or x.is_contiguous() or x.dim() not in (4, 5):
        return False
    return suggest_memory_format(x) is not torch.contiguous_format


def empty_result(x: Tensor, kind: NormKind) -> Tensor:
    """An uninitialized y or dx, by shape and strides."""
    form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return torch.empty_like(x, memory_format=form if has_channels_last(x, kind) else torch.contiguous_format)


def _parameter(norm: Norm, problem: NormProblem, tensor: Tensor | None, name: str) -> Tensor | None:
    """Weight or bias, checked, in dense memory and the dtype of the arithmetic."""
    if tensor is None:
        return None
    if tensor.shape != problem.parameter_shape or tensor.dtype is not norm.x.dtype:
        check(norm)
        tensor = in_float(tensor, norm.kind, name)
    elif is_half(tensor):
        tensor = in_float(tensor, norm.kind, name)
    return dense(tensor, norm.kind, name)


def _raise_refusal(kind: NormKind, refusal: Refusal) -> NoReturn:
    what = (
        "is not aligned to its elements" if refusal.reason is Reason.layout else f"was refused: {refusal.reason.name}"
    )
    raise ValueError(f"{kind}: {_NAMES.get(refusal.argument, refusal.argument)} {what}")


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
