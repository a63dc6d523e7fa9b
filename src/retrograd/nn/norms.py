"""BatchNorm, InstanceNorm, LayerNorm and GroupNorm, each with an optional fused activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

import retrograd as rg

from .module import Array, Module

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm"]

_ALL: Final = rg.NormGradients._fields


class _Norm(Module):
    """The common part: gamma and beta if `affine`, eps, and the activation, whose slope is computed from its input."""

    gamma: Array
    dgamma: Array
    beta: Array
    dbeta: Array
    _backward: Callable[..., rg.NormGradients]

    def _start(
        self,
        shape: tuple[int, ...],
        eps: float,
        affine: bool,
        activation: str | rg.Activation | None,
        dtype: npt.DTypeLike,
    ) -> None:
        self.affine = affine
        self.eps = eps
        self.activation = rg.Activation(activation) if isinstance(activation, str) else activation
        self._shape = shape
        if affine:
            self.add_parameter("gamma", np.ones(shape, dtype))
            self.add_parameter("beta", np.zeros(shape, dtype))

    def _result(self, result: tuple[Array, rg.NormCache]) -> Array:
        y, cache = result
        self.keep(cache=cache)
        return y

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array | None:
        cache: rg.NormCache = self.kept("cache")
        if not (need_dx or self.affine):
            return None
        dx = self.reuse("dx", cache.shape, cache.dtype) if need_dx else None
        if dx is not None and accumulate:
            dx.fill(0)
        need = _ALL if need_dx and self.affine else ("dx",) if need_dx else ("dgamma", "dbeta")
        out = rg.NormGradients(dx, self.dgamma, self.dbeta) if self.affine else rg.NormGradients(dx)
        self._backward(dy, cache, need=need, out=out, accumulate=accumulate, num_threads=self.num_threads)
        return dx

    def _parameters_of_norm(self) -> tuple[Array | None, Array | None]:
        return (self.gamma, self.beta) if self.affine else (None, None)

    def describe(self) -> str:
        size = str(self._shape[0]) if len(self._shape) == 1 else str(self._shape)
        fused = "" if self.activation is None else f", activation={self.activation!r}"
        return f"{size}, eps={self.eps}" + ("" if self.affine else ", affine=False") + fused


class _RunningNorm(_Norm):
    """A norm with optional running statistics, which evaluation uses."""

    running_mean: Array
    running_var: Array

    def _start_running(self, running: bool, update: rg.RunningUpdate, channel_axis: int, dtype: npt.DTypeLike) -> None:
        self.running, self.update, self.channel_axis = running, update, channel_axis
        if running:
            self.add_buffer("running_mean", np.zeros(self._shape, dtype))
            self.add_buffer("running_var", np.ones(self._shape, dtype))

    def _run(self, function: Callable[..., tuple[Array, rg.NormCache]], x: Array) -> Array:
        result = function(
            x,
            *self._parameters_of_norm(),
            training=self.training or not self.running,
            running_mean=self.running_mean if self.running else None,
            running_var=self.running_var if self.running else None,
            update=self.update,
            eps=self.eps,
            channel_axis=self.channel_axis,
            activation=self.activation,
            slope_from="input",
            out=self.reuse("y", x.shape, x.dtype),
            num_threads=self.num_threads,
        )
        return self._result(result)


class BatchNorm(_RunningNorm):
    """Normalize each channel over samples and positions. Channels are at `channel_axis` of x.

    Evaluation uses the running statistics, which `update` defines. With ``running=False`` there are none, and
    evaluation uses the statistics of the batch, as training does.
    """

    _backward = staticmethod(rg.batch_norm_backward)

    def __init__(
        self,
        channels: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        running: bool = True,
        update: rg.RunningUpdate | None = None,
        channel_axis: int = 1,
        activation: str | rg.Activation | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        self._start((channels,), eps, affine, activation, dtype)
        self._start_running(running, update or rg.RunningUpdate.pytorch(), channel_axis, dtype)

    def forward(self, x: Array) -> Array:
        return self._run(rg.batch_norm_forward, x)


class InstanceNorm(_RunningNorm):
    """Normalize each channel of each sample over positions. `affine` and `running` are off by default."""

    _backward = staticmethod(rg.instance_norm_backward)

    def __init__(
        self,
        channels: int,
        *,
        eps: float = 1e-5,
        affine: bool = False,
        running: bool = False,
        update: rg.RunningUpdate | None = None,
        channel_axis: int = 1,
        activation: str | rg.Activation | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        self._start((channels,), eps, affine, activation, dtype)
        self._start_running(running, update or rg.RunningUpdate.pytorch(), channel_axis, dtype)

    def forward(self, x: Array) -> Array:
        return self._run(rg.instance_norm_forward, x)


class LayerNorm(_Norm):
    """Normalize over the last axes, whose extents are `shape`."""

    _backward = staticmethod(rg.layer_norm_backward)

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        affine: bool = True,
        activation: str | rg.Activation | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        self._start(extents, eps, affine, activation, dtype)

    def forward(self, x: Array) -> Array:
        axes = len(self._shape)
        if x.shape[-axes:] != self._shape:
            raise ValueError(f"LayerNorm.forward: x has shape {x.shape}, but its last axes must be {self._shape}")
        result = rg.layer_norm_forward(
            x,
            *self._parameters_of_norm(),
            axis=-axes,
            eps=self.eps,
            activation=self.activation,
            slope_from="input",
            out=self.reuse("y", x.shape, x.dtype),
            num_threads=self.num_threads,
        )
        return self._result(result)


class GroupNorm(_Norm):
    """Normalize each group of consecutive channels of each sample, over its channels and positions."""

    _backward = staticmethod(rg.group_norm_backward)

    def __init__(
        self,
        groups: int,
        channels: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        channel_axis: int = 1,
        activation: str | rg.Activation | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        if groups < 1 or channels % groups:
            raise ValueError(f"GroupNorm: {channels} channels cannot be cut into {groups} groups")
        self._start((channels,), eps, affine, activation, dtype)
        self.groups, self.channel_axis = groups, channel_axis

    def forward(self, x: Array) -> Array:
        result = rg.group_norm_forward(
            x,
            *self._parameters_of_norm(),
            num_groups=self.groups,
            eps=self.eps,
            channel_axis=self.channel_axis,
            activation=self.activation,
            slope_from="input",
            out=self.reuse("y", x.shape, x.dtype),
            num_threads=self.num_threads,
        )
        return self._result(result)

    def describe(self) -> str:
        return f"{self.groups}, {super().describe()}"
