"""Normalization functions with the arguments of `torch.nn.functional`, and an optional fused `activation`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch.fx
from torch import Tensor
from torch.nn import functional as plain

from ..ops.activation import Activation
from ._arrays import check_tensor
from ._choice import Kind, prefers_torch
from ._norm import Norm, Running
from ._norm_autograd import normalize

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm"]

# Each is one node in a graph of torch.fx.
torch.fx.wrap("batch_norm")
torch.fx.wrap("group_norm")
torch.fx.wrap("instance_norm")
torch.fx.wrap("layer_norm")

AnyActivation: TypeAlias = str | Activation | None


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    activation: AnyActivation = None,
    batches: Tensor | None = None,
) -> Tensor:
    """Normalize each channel over samples and positions.

    With ``momentum=None`` the running statistics become means over this batch and the `batches` before it.
    """
    _check_axes("batch_norm", input)
    if training and input.numel() == input.shape[1] != 0:
        raise ValueError(f"batch_norm: training needs more than 1 value per channel, input has shape {_shape(input)}")
    kind: Kind = "batch_norm" if training else "frozen_batch_norm"
    if activation is None and momentum is not None and prefers_torch(kind, input, weight, bias):
        return plain.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    constants, running = _statistics("batch_norm", running_mean, running_var, training, momentum, batches)
    return normalize(Norm(input, weight, bias, *constants, "batch_norm", 1, 1, eps, *fused(activation)), running)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: AnyActivation = None,
) -> Tensor:
    """Normalize each channel of each sample over positions."""
    _check_axes("instance_norm", input)
    if use_input_stats and math.prod(input.shape[2:]) == 1:
        raise ValueError(
            f"instance_norm: training needs more than 1 position per channel, input has shape {_shape(input)}"
        )
    if activation is None and prefers_torch("instance_norm", input, weight, bias):
        return plain.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    constants, running = _statistics("instance_norm", running_mean, running_var, use_input_stats, momentum, None)
    return normalize(Norm(input, weight, bias, *constants, "instance_norm", 1, 1, eps, *fused(activation)), running)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: AnyActivation = None,
) -> Tensor:
    """Normalize over the last axes, whose extents are `normalized_shape`."""
    axes = len(normalized_shape)
    check_tensor("layer_norm", "input", input)
    if not axes or input.shape[-axes:] != tuple(normalized_shape):
        raise ValueError(
            f"layer_norm: normalized_shape is {tuple(normalized_shape)}, but input has shape {_shape(input)}"
        )
    if activation is None and prefers_torch("layer_norm", input, weight, bias):
        return plain.layer_norm(input, list(normalized_shape), weight, bias, eps)
    axis = input.dim() - axes
    return normalize(Norm(input, weight, bias, None, None, "layer_norm", axis, 1, eps, *fused(activation)))


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: AnyActivation = None,
) -> Tensor:
    """Normalize each sample over positions and over groups of consecutive channels."""
    _check_axes("group_norm", input)
    if input.numel() == num_groups != 0:  # with more samples PyTorch takes one value per group, and y is the bias
        raise ValueError(
            f"group_norm: 1 sample needs more than 1 value per group, input has shape {_shape(input)} and num_groups "
            f"is {num_groups}"
        )
    if activation is None and prefers_torch("group_norm", input, weight, bias):
        return plain.group_norm(input, num_groups, weight, bias, eps)
    return normalize(Norm(input, weight, bias, None, None, "group_norm", 1, num_groups, eps, *fused(activation)))


def fused(activation: AnyActivation) -> tuple[Any, ...]:
    """The last arguments of a Norm: the activation and its parameters."""
    if activation is None:
        return ()
    return (activation,) if isinstance(activation, str) else (activation.name, activation.alpha, activation.beta)


def _check_axes(function: str, input: Tensor) -> None:
    check_tensor(function, "input", input)
    if input.dim() < 2:
        raise ValueError(f"{function}: input has shape {_shape(input)}, needs at least 2 axes: samples and channels")


def _statistics(
    function: str,
    mean: Tensor | None,
    var: Tensor | None,
    updated: bool,
    momentum: float | None,
    batches: Tensor | None,
) -> tuple[tuple[Tensor | None, Tensor | None], Running | None]:
    """The constants to normalize by, and the running statistics to update."""
    if mean is not None and var is not None:
        return ((None, None), Running(mean, var, momentum, batches)) if updated else ((mean, var), None)
    if mean is not None or var is not None or not updated:
        missing = "running_mean" if mean is None else "running_var"
        raise ValueError(
            f"{function}: {missing} is None; give both running_mean and running_var, or neither in training"
        )
    return (None, None), None


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
