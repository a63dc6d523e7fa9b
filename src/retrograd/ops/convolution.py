"""Convolutions of images and transposed convolutions, forward and backward.

Arrays of images are [N, C, W] or [N, C, H, W], or with ``channels_last=True`` [N, W, C] or [N, H, W, C], with any
strides. Weights are [O, C / groups, kernel] whatever the layout of images, with any strides. As everywhere in neural
networks, kernels are not flipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .. import _core
from . import _args, _memory
from ._call import enter, public, raise_unexplained
from ._errors import ArgumentValueError
from ._images import Padding, PerAxis, as_images, paddings, per_axis, spatial, with_spatial
from ._records import ChannelSums, Convolve, ConvWeights
from ._types import Array, MaybeArray, is_float64
from .activation import Activation, check_output_tells_slope
from .elementwise import activation_backward

__all__ = [
    "ConvGradients",
    "conv_backward",
    "conv_forward",
    "conv_transpose_backward",
    "conv_transpose_forward",
]


class ConvGradients(NamedTuple):
    """Gradients by name; None for those not requested. Also passed as ``out=``, holding buffers to write to."""

    dx: MaybeArray = None
    dw: MaybeArray = None
    db: MaybeArray = None


_GRADIENTS: Final = ConvGradients._fields


class ConvProblem(NamedTuple):
    """A convolution, or the one whose gradient a transposed convolution is, with all arguments checked."""

    channels_last: bool
    geometry: tuple[int, ...]  # stride, dilation and padding before, of rows and columns each; groups
    y_shape: tuple[int, ...]  # of the layer's result
    outputs: int  # the channels of the result

    def images(self, array: Array) -> Array:
        """The array as the engine takes it."""
        return as_images(array, self.channels_last)


@public
def conv_forward(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    channels_last: bool = False,
    activation: str | Activation | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """``y[n, o] = f(b[o] + sum of w[o, i, k] * x[n, i, p * stride + k * dilation - padding])`` for every pixel p.

    x is [N, C, spatial], w [O, C / groups, kernel] and b [O]. `padding` is one number, one for each spatial axis, or
    (before, after) for each. Channels of a group are connected only with each other. The result has
    ``(size + before + after - dilation * (kernel - 1) - 1) // stride + 1`` pixels along each axis.
    """
    x, w = _operands(x, w)
    problem = conv_problem(x.shape, w.shape, stride, padding, None, dilation, groups, channels_last)
    return _forward(problem, False, x, w, b, activation, out, num_threads)


@public
def conv_backward(
    dy: Array,
    x: Array,
    w: Array,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    channels_last: bool = False,
    activation: str | Activation | None = None,
    y: Array | None = None,
    need: Sequence[str] = _GRADIENTS,
    out: ConvGradients | Mapping[str, Array | None] | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> ConvGradients:
    """Compute dx, dw and db of :func:`conv_forward`; those that `need` names.

    With an `activation`, `y` is the result of forward, from which the slope is computed. Gradients overwrite the
    buffers of `out`, or are added to them with ``accumulate=True``. db is accumulated in float64.
    """
    x, w = _operands(x, w)
    problem = conv_problem(x.shape, w.shape, stride, padding, None, dilation, groups, channels_last)
    return _backward(problem, False, dy, x, w, activation, y, need, out, accumulate, num_threads)


@public
def conv_transpose_forward(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    output_padding: PerAxis = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    channels_last: bool = False,
    activation: str | Activation | None = None,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """Compute a transposed convolution: ``y[n, o, p * stride + k * dilation - padding] += w[i, o, k] * x[n, i, p]``.

    It is the gradient of a convolution's input, with a bias and an activation of its own. x is [N, C, spatial], w
    [C, O / groups, kernel] and b [O]. The result has ``(size - 1) * stride + dilation * (kernel - 1) + 1 +
    output_padding - before - after`` pixels along each axis.
    """
    x, w = _operands(x, w)
    problem = conv_problem(x.shape, w.shape, stride, padding, output_padding, dilation, groups, channels_last)
    return _forward(problem, True, x, w, b, activation, out, num_threads)


@public
def conv_transpose_backward(
    dy: Array,
    x: Array,
    w: Array,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    output_padding: PerAxis = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    channels_last: bool = False,
    activation: str | Activation | None = None,
    y: Array | None = None,
    need: Sequence[str] = _GRADIENTS,
    out: ConvGradients | Mapping[str, Array | None] | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> ConvGradients:
    """Compute dx, dw and db of :func:`conv_transpose_forward`, as :func:`conv_backward` does those of a convolution."""
    x, w = _operands(x, w)
    problem = conv_problem(x.shape, w.shape, stride, padding, output_padding, dilation, groups, channels_last)
    return _backward(problem, True, dy, x, w, activation, y, need, out, accumulate, num_threads)


# ---- the two passes, of convolutions and transposed ones -------------------------------------------------------------


def _forward(
    problem: ConvProblem,
    transposed: bool,
    x: Array,
    w: Array,
    b: Array | None,
    activation: str | Activation | None,
    out: Array | None,
    num_threads: int | None,
) -> Array:
    f = _args.as_activation(activation)
    bias = None if b is None else _as_bias(_args.as_array("b", b), problem.outputs, x.dtype)
    threads = _args.thread_count(num_threads)
    if out is None:
        out = _memory.empty(problem.y_shape, x.dtype)
    else:
        _args.check_result("out", out, problem.y_shape, x.dtype)
    arguments = _convolve(problem, transposed, f, x, w, bias, out, False, False, threads)
    inputs = {"x": x, "w": w, "b": b}
    enter(Convolve, _core.convolve, arguments, _args.disjoint_arguments, {"out": out}, inputs)
    return out


def _backward(
    problem: ConvProblem,
    transposed: bool,
    dy: Array,
    x: Array,
    w: Array,
    activation: str | Activation | None,
    y: Array | None,
    need: Sequence[str],
    out: ConvGradients | Mapping[str, Array | None] | None,
    accumulate: bool,
    num_threads: int | None,
) -> ConvGradients:
    dy = _args.as_array("dy", dy)
    if dy.shape != problem.y_shape:
        raise ArgumentValueError(
            "dy",
            "{dy} has shape {}, but {x} of shape {} and {w} of shape {} need {}",
            dy.shape,
            x.shape,
            w.shape,
            problem.y_shape,
        )
    _args.check_dtype("dy", dy, x.dtype, "as {x} is")
    _args.check_aligned("dy", dy)
    f = _args.as_activation(activation)
    buffers = _args.gradient_buffers(out, ConvGradients)
    wanted = _args.needed_gradients(need, _GRADIENTS, buffers)
    if accumulate:
        _args.check_accumulated(_GRADIENTS, wanted, buffers)
    threads = _args.thread_count(num_threads)
    shapes = (x.shape, w.shape, (problem.outputs,))
    results = []
    for name, want, buffer, shape in zip(_GRADIENTS, wanted, buffers, shapes, strict=True):
        if want and buffer is not None:
            _args.check_result(f"out.{name}", buffer, shape, x.dtype)
        results.append(None if not want else _memory.empty(shape, x.dtype) if buffer is None else buffer)
    gradients = ConvGradients(*results)
    inputs: dict[str, Array | None] = {"dy": dy, "x": x, "w": w}
    if f.name != "identity":
        if y is None:
            raise ArgumentValueError("y", "{y} is missing: the slope of the activation {} is computed from it", f.name)
        check_output_tells_slope(f, "apply it on its own, with activation_forward")
        y = inputs["y"] = _args.as_array("y", y)
        if y.shape != dy.shape:
            raise ArgumentValueError("y", "{y} has shape {}, but {dy} has {}", y.shape, dy.shape)
        _args.check_dtype("y", y, x.dtype, "as {x} is")
        _args.check_aligned("y", y)
    # Several calls of the engine, of which the first would write before the last is checked.
    if _core.may_overlap(gradients, inputs.values()):
        _args.check_disjoint(_args.named_results(gradients), inputs)
    dz = dy if f.name == "identity" else activation_backward(dy, f, y=y, num_threads=num_threads)
    f64 = is_float64("x", x)
    dx, dw, db = gradients
    if dx is not None:
        identity = _args.as_activation(None)
        to_dx = _convolve(problem, not transposed, identity, dz, w, None, dx, accumulate, True, threads)
        enter(Convolve, _core.convolve, to_dx, raise_unexplained)
    if dw is not None:
        small, large = (x, dz) if transposed else (dz, x)
        to_dw = (
            f64,
            problem.images(large),
            problem.images(small),
            _kernels(_args.as_plain(dw)),
            problem.geometry,
            bool(accumulate),
            True,
            threads,
        )
        enter(ConvWeights, _core.conv_weights, to_dw, raise_unexplained)
    if db is not None:
        target = _args.contiguous_result(db, accumulate)
        to_db = (f64, problem.images(dz), target, bool(accumulate), True, threads)
        enter(ChannelSums, _core.channel_sums, to_db, raise_unexplained)
        if target is not db:
            db[...] = target
    return gradients


def _convolve(
    problem: ConvProblem,
    transposed: bool,
    f: Activation,
    source: Array,
    w: Array,
    bias: Array | None,
    target: Array,
    accumulate: bool,
    overlap_checked: bool,
    threads: int,
) -> tuple[Any, ...]:
    return (
        is_float64("x", source),
        transposed,
        f.code,
        *_args.rounded_parameters(f, source.dtype),
        problem.images(source),
        _kernels(w),
        bias,
        problem.images(_args.as_plain(target)),
        problem.geometry,
        bool(accumulate),
        overlap_checked,
        threads,
    )


# ---- checks ----------------------------------------------------------------------------------------------------------


def _operands(x: Any, w: Any) -> tuple[Array, Array]:
    x, w = _args.as_array("x", x), _args.as_array("w", w)
    is_float64("x", x)
    _args.check_dtype("w", w, x.dtype, "as {x} is")
    _args.check_aligned("x", x)
    _args.check_aligned("w", w)
    return x, w


def _as_bias(b: Array, outputs: int, dtype: np.dtype[Any]) -> Array:
    if b.shape != (outputs,):
        raise ArgumentValueError(
            "b", "{b} has shape {}, but the result has {} channels and needs {}", b.shape, outputs, (outputs,)
        )
    _args.check_dtype("b", b, dtype, "as {x} is")
    return b if b.flags.carray else np.array(b, order="C")


def _kernels(w: Array) -> Array:
    """A view [O, I, H, W]."""
    return w[:, :, None] if w.ndim == 3 else w


class _Axis(NamedTuple):
    """A spatial axis of x and what is done along it."""

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def span(self) -> int:
        """The number of pixels from the first tap of the kernel to the last."""
        return (self.kernel - 1) * self.dilation + 1


def conv_problem(
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    stride: PerAxis,
    padding: Padding,
    output_padding: PerAxis | None,  # of a transposed convolution
    dilation: PerAxis,
    groups: int,
    channels_last: bool,
) -> ConvProblem:
    transposed = output_padding is not None
    channels_last = _args.as_flag("channels_last", channels_last)
    sizes = spatial("x", x_shape, channels_last)
    if len(w_shape) != len(x_shape):
        form = "[C, O / groups, kernel]" if transposed else "[O, C / groups, kernel]"
        raise ArgumentValueError(
            "w", "{w} has shape {}, but {x} of shape {} needs {} axes, {}", w_shape, x_shape, len(x_shape), form
        )
    if 0 in w_shape[2:]:
        raise ArgumentValueError("w", "{w} has shape {}, whose kernel has no elements", w_shape)
    groups = _args.as_count("groups", groups)
    channels = x_shape[-1 if channels_last else 1]
    outputs = (_transposed_outputs if transposed else _conv_outputs)(w_shape, channels, groups)
    strides, dilations = per_axis("stride", stride, len(sizes), 1), per_axis("dilation", dilation, len(sizes), 1)
    pads = paddings(padding, len(sizes))
    axes = [
        _Axis(size, kernel, step, apart, *pad)
        for size, kernel, step, apart, pad in zip(sizes, w_shape[2:], strides, dilations, pads, strict=True)
    ]
    if output_padding is None:
        pixels = [_conv_pixels(number, axis) for number, axis in enumerate(axes)]
    else:
        extras = per_axis("output_padding", output_padding, len(sizes), 0)
        pixels = [_transposed_pixels(number, axis, extras[number]) for number, axis in enumerate(axes)]
    one, zero = (1,) * (2 - len(axes)), (0,) * (2 - len(axes))
    geometry = (*one, *strides, *one, *dilations, *zero, *(axis.before for axis in axes), groups)
    return ConvProblem(channels_last, geometry, with_spatial(x_shape[0], outputs, pixels, channels_last), outputs)


def _conv_outputs(w_shape: tuple[int, ...], channels: int, groups: int) -> int:
    if w_shape[1] * groups != channels:
        raise ArgumentValueError(
            "w",
            "{w} has shape {}, whose {} inputs in {} groups are {} channels, but {x} has {}",
            w_shape,
            w_shape[1],
            groups,
            w_shape[1] * groups,
            channels,
        )
    if w_shape[0] % groups:
        raise ArgumentValueError(
            "groups", "{groups} is {}, which does not divide the {} outputs of {w}", groups, w_shape[0]
        )
    return w_shape[0]


def _transposed_outputs(w_shape: tuple[int, ...], channels: int, groups: int) -> int:
    if w_shape[0] != channels:
        raise ArgumentValueError(
            "w", "{w} has shape {}, whose inputs are {}, but {x} has {} channels", w_shape, w_shape[0], channels
        )
    if channels % groups:
        raise ArgumentValueError(
            "groups", "{groups} is {}, which does not divide the {} channels of {x}", groups, channels
        )
    return w_shape[1] * groups


def _conv_pixels(number: int, axis: _Axis) -> int:
    padded = axis.size + axis.before + axis.after
    if axis.span > padded:
        raise ArgumentValueError(
            "w",
            "the kernel of {w} is {} with {dilation} {}, which spans {} pixels, but spatial axis {} of {x} has {}, "
            "with {padding} {} and {}",
            axis.kernel,
            axis.dilation,
            axis.span,
            number,
            axis.size,
            axis.before,
            axis.after,
        )
    return (padded - axis.span) // axis.stride + 1


def _transposed_pixels(number: int, axis: _Axis, extra: int) -> int:
    if axis.size == 0:
        raise ArgumentValueError("x", "spatial axis {} of {x} has no pixels", number)
    if extra >= max(axis.stride, axis.dilation):
        raise ArgumentValueError(
            "output_padding",
            "{output_padding} is {}, must be below the {stride} {} or the {dilation} {}: those pixels would get no "
            "input",
            extra,
            axis.stride,
            axis.dilation,
        )
    count = (axis.size - 1) * axis.stride + axis.span + extra - axis.before - axis.after
    if count < 1:
        raise ArgumentValueError(
            "padding",
            "{padding} is {} and {}, which leaves {} pixels of spatial axis {}",
            axis.before,
            axis.after,
            count,
            number,
        )
    return count
