"""The normalization layers of `torch.nn`, on retrograd's engine, each with an optional fused `activation`.

They are subclasses of PyTorch's layers, with the same constructors, attributes and `state_dict`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..ops.activation import Activation
from ._arrays import check_tensor
from ._choice import Kind, prefers_torch
from ._leaf import Leaf, Proxy
from .functional import AnyActivation, batch_norm, group_norm, instance_norm, layer_norm

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
]


class Fused(Leaf):
    """A normalization that ends with an activation, if it has one."""

    activation: Activation | None = None

    def __init__(self, *arguments: Any, activation: AnyActivation = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if activation is not None:
            self.activation = Activation(activation) if isinstance(activation, str) else activation

    def _affine(self) -> tuple[Any, Any]:
        """Weight and bias. An attribute of a module that is in no class takes microseconds to find."""
        named = self._parameters
        try:
            return named["weight"], named["bias"]
        except KeyError:  # a parametrized one is an attribute instead
            return self.weight, self.bias

    def _running(self) -> tuple[Any, Any, Any]:
        named = self._buffers
        try:
            return named["running_mean"], named["running_var"], named["num_batches_tracked"]
        except KeyError:
            return self.running_mean, self.running_var, self.num_batches_tracked

    def extra_repr(self) -> str:
        described: str = super().extra_repr()
        return described if self.activation is None else f"{described}, activation={self.activation!r}"


class BatchNorm(Fused, torch.nn.modules.batchnorm._BatchNorm):
    """What the batch norms have in common."""

    def forward(self, input: Any) -> Any:
        weight, bias = self._affine()
        momentum = self.momentum
        own = self.training or not self.track_running_stats
        kind: Kind = "batch_norm" if own else "frozen_batch_norm"
        by_torch = self.activation is None and prefers_torch(kind, input, weight, bias)
        if by_torch and (momentum is None or input.dim() < 2 or input.numel() == input.shape[1]):
            return super().forward(input)
        if isinstance(input, Proxy):
            return self._record(input)
        check_tensor(type(self).__name__, "input", input)
        self._check_input_dim(input)
        mean, var, batches = self._running()
        if not self.training:
            batches = None
        elif not self.track_running_stats:
            mean = var = batches = None
        training = self.training or (mean is None and var is None)
        if by_torch and momentum is not None:  # what PyTorch's layer does, in fewer steps
            if batches is not None:
                batches.add_(1)
            return torch.batch_norm(input, weight, bias, mean, var, training, momentum, self.eps, False)
        y = batch_norm(
            input,
            mean,
            var,
            weight,
            bias,
            training,
            momentum,
            self.eps,
            activation=self.activation,
            batches=batches,
        )
        if batches is not None:
            batches.add_(1)
        return y


class BatchNorm1d(BatchNorm, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, with an optional fused `activation`."""


class BatchNorm2d(BatchNorm, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, with an optional fused `activation`."""


class BatchNorm3d(BatchNorm, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, with an optional fused `activation`."""


class _InstanceNorm(Fused, torch.nn.modules.instancenorm._InstanceNorm):
    _unbatched: int  # axes of a single sample

    def forward(self, input: Any) -> Any:
        weight, bias = self._affine()
        if self.activation is None and prefers_torch("instance_norm", input, weight, bias):
            shape = input.shape
            if len(shape) != self._unbatched + 1 or shape[1] != self.num_features or shape.numel() == shape[:2].numel():
                return super().forward(input)
            momentum = 0.0 if self.momentum is None else self.momentum
            mean, var, _ = self._running()
            by_batch = self.training or not self.track_running_stats
            return torch.instance_norm(input, weight, bias, mean, var, by_batch, momentum, self.eps, False)
        if isinstance(input, Proxy):
            return self._record(input)
        check_tensor(type(self).__name__, "input", input)
        self._check_input_dim(input)
        x = input.unsqueeze(0) if input.dim() == self._unbatched else input
        if x.shape[1] != self.num_features:
            problem = f"input has {x.shape[1]} channels, but num_features is {self.num_features}"
            if self.affine:
                raise ValueError(f"{type(self).__name__}: {problem}")
            warnings.warn(f"{type(self).__name__}: {problem}, which only affine=True needs", stacklevel=2)
        y = instance_norm(
            x,
            self.running_mean,
            self.running_var,
            weight,
            bias,
            self.training or not self.track_running_stats,
            self.momentum if self.momentum is not None else 0.0,
            self.eps,
            activation=self.activation,
        )
        return y if x is input else y.squeeze(0)


class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d`, with an optional fused `activation`."""

    _unbatched = 2


class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d`, with an optional fused `activation`."""

    _unbatched = 3


class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d`, with an optional fused `activation`."""

    _unbatched = 4


class LayerNorm(Fused, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, with an optional fused `activation`."""

    def forward(self, input: Any) -> Any:
        weight, bias = self._affine()
        if self.activation is None and prefers_torch("layer_norm", input, weight, bias):
            return torch.layer_norm(input, self.normalized_shape, weight, bias, self.eps, False)
        if isinstance(input, Proxy):
            return self._record(input)
        return layer_norm(input, self.normalized_shape, weight, bias, self.eps, activation=self.activation)


class GroupNorm(Fused, torch.nn.GroupNorm):
    """`torch.nn.GroupNorm`, with an optional fused `activation`."""

    def forward(self, input: Any) -> Any:
        weight, bias = self._affine()
        if self.activation is None and prefers_torch("group_norm", input, weight, bias):
            if input.dim() < 2 or input.numel() == self.num_groups:  # which it refuses
                return super().forward(input)
            return torch.group_norm(input, self.num_groups, weight, bias, self.eps, False)
        if isinstance(input, Proxy):
            return self._record(input)
        return group_norm(input, self.num_groups, weight, bias, self.eps, activation=self.activation)
