"""Normalization with gradients: a Function for eager tensors, operators for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as plain

from ._arrays import array, is_half
from ._autograd import (
    UseTorch,
    apply_of,
    check_traceable,
    define,
    differentiate,
    differentiate_once,
    is_eager,
    is_plain,
    warn_of_torch,
)
from ._norm import (
    GRADIENT,
    Norm,
    Running,
    Saved,
    backward,
    check,
    check_running,
    empty_result,
    forward,
    has_channels_last,
    saved_for_backward,
    update,
)


def normalize(norm: Norm, running: Running | None = None) -> Tensor:
    """Normalize x by its own statistics, which update the running ones; or by constants."""
    x, weight, bias, mean, var = norm[:5]
    if running is not None:
        check_running(norm.kind, x, running.mean, running.var)
    elif mean is not None and var is not None:
        check_running(norm.kind, x, mean, var)
    if not (is_eager(x) and is_plain(weight) and is_plain(bias)):
        try:
            check_traceable(norm.kind, x)
        except UseTorch as reason:
            if norm.activation != "identity":
                raise
            warn_of_torch(reason)
            return _through_torch(norm, running)
        return _through_operators(norm, running)
    try:
        if torch.is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            y: Tensor = _apply(x, weight, bias, norm, running)
            return y
        return forward(norm, running)[0]
    except (TypeError, ValueError):
        check(norm)  # raises with PyTorch's names if it finds the reason
        raise


def _through_torch(norm: Norm, running: Running | None) -> Tensor:
    """PyTorch's function of the same arguments."""
    x, weight, bias, mean, var, kind, axis, groups, eps = norm[:9]
    if kind == "layer_norm":
        return plain.layer_norm(x, x.shape[axis:], weight, bias, eps)
    if kind == "group_norm":
        return plain.group_norm(x, groups, weight, bias, eps)
    function = plain.batch_norm if kind == "batch_norm" else plain.instance_norm
    if running is None:
        return function(x, mean, var, weight, bias, mean is None, 0.0, eps)
    momentum = running.momentum
    if momentum is None:
        momentum = 0.0 if running.batches is None else 1.0 / (int(running.batches) + 1)
    return function(x, running.mean, running.var, weight, bias, True, momentum, eps)


# ---- eager tensors ---------------------------------------------------------------------------------------------------


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm, running: Running | None
    ) -> Tensor:
        y, dense, ctx.saved = forward(norm, running)
        ctx.save_for_backward(*saved_for_backward(norm, dense, y, ctx.saved.problem.needs_y))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved: Saved = ctx.saved
        if torch.is_grad_enabled():
            again = partial(backward, ctx.needs_input_grad, saved)
            return *differentiate_once(saved.problem.kind, again, dy, *ctx.saved_tensors), None, None
        dx, dweight, dbias = backward(ctx.needs_input_grad, saved, dy, *ctx.saved_tensors)
        return dx, dweight, dbias, None, None


_apply: Final = apply_of(_Norm)


# ---- operators -------------------------------------------------------------------------------------------------------

_NORM_SCHEMA: Final = "str kind, int axis, int groups, float eps, str activation, float? alpha, float? beta"


def _through_operators(norm: Norm, running: Running | None) -> Tensor:
    y: Tensor
    y, statistics = _norm_operator(*norm)
    if running is not None:
        _update_operator(running.mean, running.var, statistics, norm.x.detach(), running.momentum, running.batches)
    return y


def _norm_kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
    y, _, saved = forward(Norm(*arguments), None)
    return y, torch.from_numpy(saved.statistics)


def _norm_shapes(*arguments: Any) -> tuple[Tensor, Tensor]:
    norm = Norm(*arguments)
    check(norm)
    x = norm.x
    sets = {
        "batch_norm": x.shape[1:2],
        "instance_norm": x.shape[:2],
        "layer_norm": x.shape[: norm.axis],
        "group_norm": (x.shape[0], norm.groups),
    }
    return empty_result(x, norm.kind), x.new_empty((2, *sets[norm.kind]), dtype=torch.float64)


def _backward_arguments(arguments: Sequence[Any]) -> tuple[Norm, Tensor | None, Tensor, Sequence[bool], bool]:
    """The arguments of forward, y, the statistics, which gradients are needed, and whether statistics are constant."""
    x, weight, bias, y, statistics, need, frozen, *options = arguments
    return Norm(x, weight, bias, None, None, *options), y, statistics, need, frozen


def _backward_kernel(dy: Tensor, *arguments: Any) -> list[Tensor]:
    norm, y, statistics, need, frozen = _backward_arguments(arguments)
    x = norm.x
    if dy.shape != x.shape or dy.dtype is not x.dtype:
        raise ValueError(
            f"{norm.kind}: {GRADIENT} has shape {tuple(dy.shape)} and dtype {dy.dtype}, expected {tuple(x.shape)} and "
            f"{x.dtype}"
        )
    saved = Saved(
        norm.problem,
        array(statistics, "norm", "statistics"),
        frozen,
        frozen,
        has_channels_last(norm.x, norm.kind),
    )
    return [gradient for gradient in backward(need, saved, dy, *norm[:3], y) if gradient is not None]


def _backward_shapes(dy: Tensor, *arguments: Any) -> list[Tensor]:
    norm, _, _, need, _ = _backward_arguments(arguments)
    x = norm.x
    dtype = torch.float32 if is_half(x) else x.dtype
    parameters = [x.new_empty(norm.channel_shape, dtype=dtype) for needed in need[1:] if needed]
    return [empty_result(x, norm.kind), *parameters] if need[0] else parameters


def _set_up_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    norm = Norm(*inputs)
    ctx.others = (norm.mean is not None, *norm[5:])
    ctx.save_for_backward(*saved_for_backward(norm, norm.x, output[0], norm.needs_y), output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate_operator(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad[:3]
    found = iter(_backward_operator(dy, *ctx.saved_tensors, need, *ctx.others))
    return *(next(found) if needed else None for needed in need), *(None,) * (len(Norm._fields) - 3)


def _update_kernel(
    mean: Tensor, var: Tensor, statistics: Tensor, x: Tensor, momentum: float | None, batches: Tensor | None
) -> None:
    # x has the number of values per set. An integer would be a constant in a trace of torch.jit.
    count = x.numel() // max(statistics[0].numel(), 1)
    update("norm", Running(mean, var, momentum, batches), array(statistics, "norm", "statistics"), count)


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
