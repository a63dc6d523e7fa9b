"""Normalization with gradients: a Function for eager tensors, operators for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ._arrays import array, is_half
from ._autograd import apply_of, check_traceable, define, differentiate, differentiate_once, is_eager
from ._norm import (
    Kept,
    Norm,
    Running,
    backward,
    channel_shape,
    check,
    check_running,
    forward,
    needs_y,
    problem_of,
    saved_for_backward,
    update,
)


def normalize(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running | None = None
) -> Tensor:
    """Normalize x by its own statistics, or by running ones."""
    if running is not None:
        check_running(norm, x, running)
    if not is_eager(x):
        check_traceable(norm.kind, x)
        return _through_operators(norm, x, weight, bias, running)
    try:
        if torch.is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            y: Tensor = _apply(x, weight, bias, norm, running)
            return y
        return forward(norm, x, weight, bias, running)[0]
    except (TypeError, ValueError):
        check(norm, x, weight, bias)  # raises with PyTorch's names if it finds the reason
        raise


# ---- eager tensors ---------------------------------------------------------------------------------------------------


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm, running: Running | None
    ) -> Tensor:
        y, ctx.kept = forward(norm, x, weight, bias, running)
        ctx.save_for_backward(*saved_for_backward(ctx.kept.problem, x, weight, bias, y))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept: Kept = ctx.kept
        if torch.is_grad_enabled():
            again = partial(backward, ctx.needs_input_grad, kept)
            return *differentiate_once(kept.problem.kind, again, dy, *ctx.saved_tensors), None, None
        dx, dweight, dbias = backward(ctx.needs_input_grad, kept, dy, *ctx.saved_tensors)
        return dx, dweight, dbias, None, None


_apply: Final = apply_of(_Norm)


# ---- operators -------------------------------------------------------------------------------------------------------

_NORM_SCHEMA: Final = "str kind, int axis, int groups, float eps, str activation, float? alpha, float? beta"


def _through_operators(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running | None
) -> Tensor:
    constants = (None, None) if running is None or running.updated else (running.mean, running.var)
    y: Tensor
    y, statistics = _norm_operator(x, weight, bias, *constants, *norm)
    if running is not None and running.updated:
        _update_operator(running.mean, running.var, statistics, x.detach(), running.momentum, running.batches)
    return y


def _norm_kernel(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, *norm: Any
) -> tuple[Tensor, Tensor]:
    running = None if mean is None or var is None else Running(mean, var, False)
    y, kept = forward(Norm(*norm), x, weight, bias, running)
    return y, torch.from_numpy(kept.statistics)


def _norm_shapes(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    norm = Norm(*options)
    check(norm, x, weight, bias)
    sets = {
        "batch_norm": x.shape[1:2],
        "instance_norm": x.shape[:2],
        "layer_norm": x.shape[: norm.axis],
        "group_norm": (x.shape[0], norm.groups),
    }
    return torch.empty_like(x), x.new_empty((2, *sets[norm.kind]), dtype=torch.float64)


def _backward_kernel(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    statistics: Tensor,
    need: Sequence[bool],
    frozen: bool,
    *norm: Any,
) -> list[Tensor]:
    kept = Kept(problem_of(Norm(*norm), x.shape, x.dtype), array(statistics, "norm", "statistics"), frozen, frozen)
    return [gradient for gradient in backward(need, kept, dy, x, weight, bias, y) if gradient is not None]


def _backward_shapes(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    statistics: Tensor,
    need: Sequence[bool],
    frozen: bool,
    *norm: Any,
) -> list[Tensor]:
    dtype = torch.float32 if is_half(x) else x.dtype
    parameters = [x.new_empty(channel_shape(Norm(*norm), x), dtype=dtype) for needed in need[1:] if needed]
    return [torch.empty_like(x), *parameters] if need[0] else parameters


def _set_up_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, mean, _, *norm = inputs
    ctx.norm, ctx.frozen = Norm(*norm), mean is not None
    y = output[0] if needs_y(ctx.norm) else None
    ctx.save_for_backward(x, weight, None if y is not None or ctx.norm.activation == "identity" else bias, y, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate_operator(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad[:3]
    found = iter(_backward_operator(dy, *ctx.saved_tensors, need, ctx.frozen, *ctx.norm))
    return *(next(found) if needed else None for needed in need), *(None,) * (2 + len(ctx.norm))


def _update_kernel(
    mean: Tensor, var: Tensor, statistics: Tensor, x: Tensor, momentum: float | None, batches: Tensor | None
) -> None:
    # x has the number of values per set. An integer would be a constant in a trace of torch.jit.
    count = x.numel() // max(statistics[0].numel(), 1)
    update("norm", Running(mean, var, True, momentum, batches), array(statistics, "norm", "statistics"), count)


_norm_operator: Final = define(
    "norm",
    f"(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? var, {_NORM_SCHEMA}) -> (Tensor, Tensor)",
    _norm_kernel,
    _norm_shapes,
)
_backward_operator: Final = define(
    "norm_backward",
    "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? y, Tensor statistics, bool[] need, bool frozen, "
    f"{_NORM_SCHEMA}) -> Tensor[]",
    _backward_kernel,
    _backward_shapes,
)
differentiate("norm", _set_up_operator, _differentiate_operator)
_update_operator: Final = define(
    "update_running",
    "(Tensor(a!) mean, Tensor(b!) var, Tensor statistics, Tensor x, float? momentum, Tensor? batches) -> ()",
    _update_kernel,
    lambda *arguments: None,
)
