"""Conv and ConvTranspose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

import retrograd as rg

from .init import Rng, generator, glorot_bound, normal, uniform
from .module import Array, Module

__all__ = ["Conv", "ConvTranspose"]

_DEFAULTS: Final = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1, "channels_last": False}


class _Convolution(Module):
    """What a convolution and a transposed one share: parameters, their initial values, and the two passes."""

    w: Array
    dw: Array
    b: Array
    db: Array

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | Sequence[int],
        transposed: bool,
        options: dict[str, Any],
        activation: str | rg.Activation | None,
        bias: bool,
        init: str,
        dtype: npt.DTypeLike,
        rng: Rng,
    ) -> None:
        name, groups = type(self).__name__, options["groups"]
        taps = (kernel, kernel) if isinstance(kernel, int) else tuple(kernel)
        if len(taps) not in (1, 2) or min(taps) < 1:
            raise ValueError(f"{name}: kernel is {kernel}, must be one or two sizes of at least 1")
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{name}: groups is {groups}, which does not divide the {in_channels} channels of x and the "
                f"{out_channels} of y"
            )
        rows, columns = (in_channels, out_channels) if transposed else (out_channels, in_channels)
        shape, draw = (rows, columns // groups, *taps), generator(rng)
        inputs, outputs = math.prod(shape[1:]), rows * math.prod(taps)  # as PyTorch and Keras count them
        bound = 1.0 / math.sqrt(max(inputs, 1))
        if init == "pytorch":
            w = uniform(draw, shape, bound, dtype)
        elif init == "keras":
            w = uniform(draw, shape, glorot_bound(inputs, outputs), dtype)
        elif init == "he":
            w = normal(draw, shape, math.sqrt(2.0) * bound, dtype)
        else:
            raise ValueError(f"{name}: init is {init!r}; there are 'pytorch', 'keras' and 'he'")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.activation = rg.Activation(activation) if isinstance(activation, str) else activation
        self.options = options
        self._transposed = transposed
        self.add_parameter("w", w)
        self.bias = bias
        if bias:
            b = uniform(draw, (out_channels,), bound, dtype) if init == "pytorch" else np.zeros(out_channels, dtype)
            self.add_parameter("b", b)

    def forward(self, x: Array) -> Array:
        function = rg.conv_transpose_forward if self._transposed else rg.conv_forward
        # The largest result of the training passes so far; one of fewer samples is written to its beginning.
        shape, buffer = self._kept.get("buffer", (None, None))
        fits = self.training and shape == x.shape[1:] and len(x) <= len(buffer)
        y = function(
            x,
            self.w,
            self.b if self.bias else None,
            activation=self.activation,
            out=buffer[: len(x)] if fits else None,
            num_threads=self.num_threads,
            **self.options,
        )
        self.keep(x=x, y=y)
        if self.training and not fits:
            self.keep(buffer=(x.shape[1:], y))
        return y

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array | None:
        x: Array = self.kept("x")
        dx = self.reuse("dx", x.shape, x.dtype) if need_dx else None
        if dx is not None and accumulate:
            dx.fill(0)
        out = rg.ConvGradients(dx, self.dw, self.db if self.bias else None)
        function = rg.conv_transpose_backward if self._transposed else rg.conv_backward
        function(
            dy,
            x,
            self.w,
            activation=self.activation,
            y=self.kept("y"),
            need=[name for name, buffer in out._asdict().items() if buffer is not None],
            out=out,
            accumulate=accumulate,
            num_threads=self.num_threads,
            **self.options,
        )
        return dx

    def describe(self) -> str:
        kernel = self.w.shape[2:]
        parts = [f"{self.in_channels}, {self.out_channels}, {kernel}"]
        parts += [f"{name}={value}" for name, value in self.options.items() if value != _DEFAULTS[name]]
        if self.activation is not None:
            parts.append(f"activation={self.activation}")
        return ", ".join(parts if self.bias else [*parts, "bias=False"])


class Conv(_Convolution):
    """A convolution of images, as :func:`retrograd.conv_forward`. w is [out_channels, in_channels / groups, *kernel].

    `kernel` is one number for a square kernel, ``(height, width)``, or ``(width,)`` for images with one spatial axis.
    `init` is as for :class:`Linear`, with the terms of one element of y as inputs. The slope of a fused `activation` is
    computed from y: it must be one that this determines.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int | Sequence[int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        activation: str | rg.Activation | None = None,
        channels_last: bool = False,
        init: Literal["pytorch", "keras", "he"] = "pytorch",
        dtype: npt.DTypeLike = np.float32,
        rng: Rng = None,
    ) -> None:
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        options["channels_last"] = channels_last
        super().__init__(in_channels, out_channels, kernel, False, options, activation, bias, init, dtype, rng)


class ConvTranspose(_Convolution):
    """A transposed convolution, as :func:`retrograd.conv_transpose_forward`.

    w is ``[in_channels, out_channels / groups, *kernel]``. The rest is as for :class:`Conv`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int | Sequence[int]] = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        activation: str | rg.Activation | None = None,
        channels_last: bool = False,
        init: Literal["pytorch", "keras", "he"] = "pytorch",
        dtype: npt.DTypeLike = np.float32,
        rng: Rng = None,
    ) -> None:
        options = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
        options |= {"groups": groups, "channels_last": channels_last}
        super().__init__(in_channels, out_channels, kernel, True, options, activation, bias, init, dtype, rng)
