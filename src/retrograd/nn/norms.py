"""BatchNorm, InstanceNorm, LayerNorm and GroupNorm, each with an optional fused activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import graph
from ..ops.activation import Activation
from ..ops.normalization import RunningUpdate
from .module import Buffer, Layer, Parameter
from .sizes import check_channels, float_dtype, number, operand, size, sizes

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm"]


class _Norm(Layer):
    """The common part: gamma and beta if `affine`, eps, and the activation, whose slope is exact."""

    gamma: Parameter
    beta: Parameter

    def _start(
        self,
        shape: tuple[int, ...],
        eps: float,
        affine: bool,
        activation: str | Activation | None,
        dtype: npt.DTypeLike,
    ) -> None:
        dtype = float_dtype(type(self).__name__, dtype)
        self.affine = affine
        self.eps = number(type(self).__name__, "eps", eps)
        self.activation = Activation(activation) if isinstance(activation, str) else activation
        self.shape = shape
        if affine:
            self.gamma = Parameter(np.ones(shape, dtype))
            self.beta = Parameter(np.zeros(shape, dtype))

    def _common(self) -> dict[str, Any]:
        """The options that all norms have."""
        gamma, beta = (self.gamma, self.beta) if self.affine else (None, None)
        # Of ReLU the slope is the same from its output, and backward does not compute the input again.
        source = "output" if self.activation == Activation("relu") else "input"
        return {
            "gamma": gamma, "beta": beta, "eps": self.eps, "activation": self.activation, "slope_from": source
        }  # fmt: skip

    def describe(self) -> str:
        size = str(self.shape[0]) if len(self.shape) == 1 else str(self.shape)
        fused = "" if self.activation is None else f", activation={self.activation!r}"
        return f"{size}, eps={self.eps}" + ("" if self.affine else ", affine=False") + fused


class _RunningNorm(_Norm):
    """A norm with optional running statistics, which evaluation uses."""

    running_mean: Buffer
    running_var: Buffer
    _function: Any

    def __init__(
        self,
        channels: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        running: bool = True,
        update: RunningUpdate | None = None,
        channel_axis: int = 1,
        activation: str | Activation | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        name = type(self).__name__
        if not isinstance(update, (RunningUpdate, type(None))):
            raise TypeError(f"{name}: update is {update!r}, must be a RunningUpdate such as RunningUpdate.pytorch(0.1)")
        channels = size(name, "channels", channels)
        self._start((channels,), eps, affine, activation, dtype)
        self.running, self.channel_axis = running, channel_axis
        self.update = update or RunningUpdate.pytorch()
        if running:
            self.running_mean = Buffer(np.zeros(channels, dtype))
            self.running_var = Buffer(np.ones(channels, dtype))

    def forward(self, x: Any) -> Any:
        check_channels(type(self).__name__, x, self.shape[0], self.channel_axis)
        mean, var = (self.running_mean, self.running_var) if self.running else (None, None)
        return self._function(
            x,
            training=self.training or not self.running,
            running_mean=mean,
            running_var=var,
            update=self.update,
            channel_axis=self.channel_axis,
            **self._common(),
        )


class BatchNorm(_RunningNorm):
    """Normalize each channel over samples and positions. Channels are at `channel_axis` of x.

    Evaluation uses the running statistics, which `update` defines. With ``running=False`` there are none, and
    evaluation uses the statistics of the batch, as training does.
    """

    _function = staticmethod(graph.batch_norm)


class InstanceNorm(_RunningNorm):
    """Normalize each channel of each sample over positions. `affine` and `running` are off by default."""

    _function = staticmethod(graph.instance_norm)

    def __init__(self, channels: int, *, affine: bool = False, running: bool = False, **options: Any) -> None:
        """Other options are as in :class:`BatchNorm`."""
        super().__init__(channels, affine=affine, running=running, **options)


class LayerNorm(_Norm):
    """Normalize over the last axes, whose extents are `shape`."""

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        affine: bool = True,
        activation: str | Activation | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        given = sizes("LayerNorm", "shape", shape)
        if given == ():
            raise ValueError("LayerNorm: shape is (), must have at least one size")
        self._start((given,) if isinstance(given, int) else given, eps, affine, activation, dtype)

    def forward(self, x: Any) -> Any:
        x, axes = operand("LayerNorm", "x", x), len(self.shape)
        if x.shape[-axes:] != self.shape:
            raise ValueError(f"LayerNorm: x has shape {x.shape}, but its last axes must be {self.shape}")
        return graph.layer_norm(x, axis=-axes, **self._common())


class GroupNorm(_Norm):
    """Normalize each group of consecutive channels of each sample, over its channels and positions."""

    def __init__(
        self,
        groups: int,
        channels: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        channel_axis: int = 1,
        activation: str | Activation | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        groups, channels = size("GroupNorm", "groups", groups), size("GroupNorm", "channels", channels)
        if groups < 1 or channels % groups:
            raise ValueError(f"GroupNorm: {channels} channels cannot be cut into {groups} groups")
        self._start((channels,), eps, affine, activation, dtype)
        self.groups, self.channel_axis = groups, channel_axis

    def forward(self, x: Any) -> Any:
        check_channels("GroupNorm", x, self.shape[0], self.channel_axis)
        return graph.group_norm(x, num_groups=self.groups, channel_axis=self.channel_axis, **self._common())

    def describe(self) -> str:
        return f"{self.groups}, {super().describe()}"
