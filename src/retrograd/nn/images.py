"""Conv, ConvTranspose, MaxPool and AveragePool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from .. import graph
from ..ops._images import Padding, PerAxis
from ..ops.activation import Activation
from .init import Rng, generator
from .layers import set_weights
from .module import Layer, Parameter
from .sizes import check_channels, operand, size, sizes

__all__ = ["AveragePool", "Conv", "ConvTranspose", "MaxPool"]

_DEFAULTS: Final = {
    "padding": (0,), "output_padding": (0,), "dilation": (1,), "groups": (1,),
    "channels_last": (False,), "count_includes_padding": (True,),
}  # fmt: skip


class _OfImages(Layer):
    """A layer that is a function of images, with options."""

    _function: Any
    _usual_stride: int | None = 1
    options: dict[str, Any]

    def _described(self) -> list[str]:
        usual = {**_DEFAULTS, "stride": (self._usual_stride,)}
        return [f"{name}={value}" for name, value in self.options.items() if value not in usual[name]]


class Conv(_OfImages):
    """A convolution of images, as :func:`retrograd.conv_forward`. w is [out_channels, in_channels / groups, *kernel].

    `kernel` is one number for a square kernel, ``(height, width)``, or ``(width,)`` for images with one spatial axis.
    With ``padding="same"`` y has the size of x, if `stride` is 1.
    `init` is as for :class:`Linear`, with the terms of one element of y as inputs.
    """

    w: Parameter
    b: Parameter
    _function = staticmethod(graph.conv)
    _transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | Sequence[int],
        *,
        stride: PerAxis = 1,
        padding: Padding | Literal["same", "valid"] = 0,
        dilation: PerAxis = 1,
        groups: int = 1,
        bias: bool = True,
        activation: str | Activation | None = None,
        channels_last: bool = False,
        init: Literal["pytorch", "keras", "he"] = "pytorch",
        dtype: npt.DTypeLike = np.float32,
        rng: Rng = None,
    ) -> None:
        name = type(self).__name__
        in_channels, out_channels = size(name, "in_channels", in_channels), size(name, "out_channels", out_channels)
        groups = size(name, "groups", groups, 1)
        given = sizes(name, "kernel", kernel)
        taps = (given, given) if isinstance(given, int) else given
        if len(taps) not in (1, 2) or min(taps) < 1:
            raise ValueError(f"{name}: kernel is {kernel}, must be one or two sizes of at least 1")
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{name}: groups is {groups}, which does not divide the {in_channels} channels of x and the "
                f"{out_channels} of y"
            )
        if isinstance(padding, str):
            padding = _named_padding(name, padding, taps, stride, dilation, self._transposed)
        self.in_channels, self.out_channels, self.bias = in_channels, out_channels, bias
        self.activation = Activation(activation) if isinstance(activation, str) else activation
        self.options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        self.options["channels_last"] = channels_last
        rows, columns = (in_channels, out_channels) if self._transposed else (out_channels, in_channels)
        shape = (rows, columns // groups, *taps)
        inputs, outputs = math.prod(shape[1:]), rows * math.prod(taps)  # as PyTorch and Keras count them
        set_weights(self, shape, inputs, outputs, out_channels, init, dtype, generator(rng))

    def forward(self, x: Any) -> Any:
        name, last, axes = type(self).__name__, self.options["channels_last"], self.w.ndim
        check_channels(name, x, self.in_channels, -1 if last else 1, axes)
        if x.ndim != axes:
            spatial = ["H", "W"][4 - axes :]
            wanted = ", ".join(["N", *spatial, "C"] if last else ["N", "C", *spatial])
            raise ValueError(f"{name}: x has shape {x.shape}, must have {axes} axes, [{wanted}], as the kernel needs")
        return self._function(x, self.w, self.b if self.bias else None, activation=self.activation, **self.options)

    def describe(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, {self.w.shape[2:]}", *self._described()]
        if self.activation is not None:
            parts.append(f"activation={self.activation}")
        return ", ".join(parts if self.bias else [*parts, "bias=False"])


def _named_padding(
    name: str, padding: str, taps: Sequence[int], stride: PerAxis, dilation: PerAxis, transposed: bool
) -> Padding:
    """Sizes for "same" or "valid"; of an odd number "same" has the smaller half first, as PyTorch's."""
    if padding == "valid":
        return 0
    if padding != "same":
        raise ValueError(f"{name}: padding is {padding!r}; there are 'same', 'valid', and sizes")
    if transposed or any(s != 1 for s in ([stride] if isinstance(stride, int) else stride)):
        raise ValueError(f"{name}: padding is 'same', which needs a Conv with stride 1; stride is {stride}; give sizes")
    steps = [dilation] * len(taps) if isinstance(dilation, int) else dilation
    spans = [step * (tap - 1) for step, tap in zip(steps, taps, strict=True)]
    return [(span // 2, span - span // 2) for span in spans]


class ConvTranspose(Conv):
    """A transposed convolution, as :func:`retrograd.conv_transpose_forward`.

    w is ``[in_channels, out_channels / groups, *kernel]``. The rest is as for :class:`Conv`.
    """

    _function = staticmethod(graph.conv_transpose)
    _transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | Sequence[int],
        *,
        output_padding: PerAxis = 0,
        **options: Any,
    ) -> None:
        """Other options are as in :class:`Conv`."""
        super().__init__(in_channels, out_channels, kernel, **options)
        self.options["output_padding"] = output_padding


class _Pool(_OfImages):
    kernel: PerAxis
    _usual_stride = None  # the kernel's

    def forward(self, x: Any) -> Any:
        return self._function(operand(type(self).__name__, "x", x), self.kernel, **self.options)

    def describe(self) -> str:
        return ", ".join([f"{self.kernel}", *self._described()])


class MaxPool(_Pool):
    """The largest value of each window of x, [N, C, W] or [N, C, H, W]; see :func:`retrograd.max_pool_forward`."""

    _function = staticmethod(graph.max_pool)

    def __init__(
        self,
        kernel: PerAxis,
        *,
        stride: PerAxis | None = None,
        padding: Padding = 0,
        dilation: PerAxis = 1,
        channels_last: bool = False,
    ) -> None:
        self.kernel = sizes(type(self).__name__, "kernel", kernel, 1)
        self.options = {"stride": stride, "padding": padding, "dilation": dilation, "channels_last": channels_last}


class AveragePool(_Pool):
    """The average of each window of x, [N, C, W] or [N, C, H, W]; see :func:`retrograd.average_pool_forward`."""

    _function = staticmethod(graph.average_pool)

    def __init__(
        self,
        kernel: PerAxis,
        *,
        stride: PerAxis | None = None,
        padding: Padding = 0,
        count_includes_padding: bool = True,
        channels_last: bool = False,
    ) -> None:
        self.kernel = sizes(type(self).__name__, "kernel", kernel, 1)
        self.options = {"stride": stride, "padding": padding, "count_includes_padding": count_includes_padding}
        self.options["channels_last"] = channels_last
