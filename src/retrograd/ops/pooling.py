"""Pooling of images, forward and backward: largest value, average, L2 norm, and unpooling.

Arrays are [N, C, W] or [N, C, H, W], or with ``channels_last=True`` [N, W, C] or [N, H, W, C]. The engine needs
contiguous columns or contiguous channels, whatever the order of the axes. Other arrays are copied first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from .. import _core
from . import _args, _memory
from ._call import Reason, Refusal, enter, public
from ._errors import ArgumentName, ArgumentTypeError, ArgumentValueError
from ._images import Padding, PerAxis, as_given, as_images, paddings, per_axis
from ._images import spatial as spatial_axes
from ._records import IndexedPlanes, PoolBackward, PoolForward
from ._types import INT32, Array, MaybeArray, is_float64

__all__ = [
    "MaxPoolResult",
    "average_pool_backward",
    "average_pool_forward",
    "l2_pool_backward",
    "l2_pool_forward",
    "max_pool_backward",
    "max_pool_forward",
    "max_unpool_backward",
    "max_unpool_forward",
]

_MOST: Final = 2**31 - 1  # the pixels that an index tells apart
_MAX, _AVERAGE, _L2 = range(3)  # the engine's kinds
_ADD, _ASSIGN, _PICK = range(3)


class MaxPoolResult(NamedTuple):
    """The largest values, and their positions h * W + w in the planes of x. Also passed as ``out=``, with buffers."""

    y: MaybeArray = None
    indices: MaybeArray = None


class _Windows(NamedTuple):
    """Windows that fit their input."""

    engine: list[int]  # kernel, stride, dilation, padding before; of each, rows and columns
    outputs: tuple[int, ...]  # the spatial axes of the result


@public
def max_pool_forward(
    x: Array,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    channels_last: bool = False,
    return_indices: bool = True,
    out: MaxPoolResult | Mapping[str, Array | None] | None = None,
    num_threads: int | None = None,
) -> MaxPoolResult:
    """Find the largest value of each window, and with `return_indices` its position in the plane, as int32.

    Of equal values the first counts, of several NaN the last. Padding never does. `stride` is that of the kernel unless
    given.
    """
    x = _args.as_array("x", x)
    f64 = is_float64("x", x)
    spatial = spatial_axes("x", x.shape, channels_last)
    _check_plane("x", spatial)
    windows = pool_windows(spatial, kernel, stride, padding, dilation, "the largest value")
    threads = _args.thread_count(num_threads)
    y, indices = _result_buffers(out)
    if indices is not None and not return_indices:
        raise ArgumentValueError(
            "out", "{out} has a buffer for {indices}, which {return_indices}=False does not ask for"
        )
    shape = pooled_shape(x.shape, windows.outputs, channels_last)
    images = _Source("x", x, channels_last)
    to_y = _Target("out.y", y, shape, x.dtype, images)
    to_indices = _Target("out.indices", indices, shape, INT32, images) if return_indices else None
    results = {"out.y": to_y.array, "out.indices": None if to_indices is None else to_indices.array}
    checked = _check_copies(results, {"x": x}, images, to_y, to_indices)
    at = None if to_indices is None else to_indices.images
    arguments = (_MAX, f64, images.images, windows.engine, False, to_y.images, at, checked, threads)
    enter(PoolForward, _core.pool_forward, arguments, _args.disjoint_arguments, results, {"x": x})
    return MaxPoolResult(to_y.finished(), None if to_indices is None else to_indices.finished())


@public
def max_pool_backward(
    dy: Array,
    indices: Array,
    x_shape: Sequence[int],
    *,
    channels_last: bool = False,
    out: Array | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> Array:
    """``dx[index] += dy`` in every plane, for the `indices` of the forward pass, of any integer dtype.

    dx has shape `x_shape` and starts from 0, or from `out` with ``accumulate=True``. The gradients of one element are
    added in the order of the outputs.
    """
    return _indexed(_ADD, "dy", dy, indices, "x_shape", x_shape, channels_last, out, accumulate, num_threads)


@public
def average_pool_forward(
    x: Array,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    count_includes_padding: bool = True,
    channels_last: bool = False,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """Average each window. Padding is 0, and counts as elements of the window unless `count_includes_padding` is False.

    `stride` is that of the kernel unless given.
    """
    x = _args.as_array("x", x)
    needs = "" if count_includes_padding else "the average of its elements"
    return _forward(
        _AVERAGE, x, kernel, stride, padding, needs, bool(count_includes_padding), channels_last, out, num_threads
    )


@public
def average_pool_backward(
    dy: Array,
    x_shape: Sequence[int],
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    count_includes_padding: bool = True,
    channels_last: bool = False,
    out: Array | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> Array:
    """Compute dx of :func:`average_pool_forward`: each element of a window gets dy divided by the window's count.

    dx overwrites `out`, or is added to it with ``accumulate=True``.
    """
    dy = _args.as_array("dy", dy)
    shape = _as_shape("x_shape", x_shape)
    needs = "" if count_includes_padding else "the average of its elements"
    windows = pool_windows(spatial_axes("x_shape", shape, channels_last), kernel, stride, padding, 1, needs)
    return _backward(
        _AVERAGE, dy, None, None, shape, windows, bool(count_includes_padding), channels_last, out, accumulate,
        num_threads,
    )  # fmt: skip


@public
def l2_pool_forward(
    x: Array,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    channels_last: bool = False,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """Compute ``sqrt(sum(x**2))`` of each window, summed in float64. `stride` is that of the kernel unless given."""
    return _forward(
        _L2, _args.as_array("x", x), kernel, stride, padding, "", False, channels_last, out, num_threads
    )  # fmt: skip


@public
def l2_pool_backward(
    dy: Array,
    x: Array,
    y: Array,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    channels_last: bool = False,
    out: Array | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> Array:
    """Compute dx of :func:`l2_pool_forward`, the sum of ``dy * x / y`` over the windows of an element; 0 where y is 0.

    dx overwrites `out`, or is added to it with ``accumulate=True``.
    """
    dy = _args.as_array("dy", dy)
    x = _args.as_array("x", x)
    y = _args.as_array("y", y)
    windows = pool_windows(spatial_axes("x", x.shape, channels_last), kernel, stride, padding, 1, "")
    return _backward(_L2, dy, x, y, x.shape, windows, False, channels_last, out, accumulate, num_threads)


@public
def max_unpool_forward(
    x: Array,
    indices: Array,
    y_shape: Sequence[int],
    *,
    channels_last: bool = False,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Array:
    """``y[index] = x`` in every plane, and 0 elsewhere, for the `indices` of a max pooling from `y_shape` to x's shape.

    If an index occurs more than once, the last element stays.
    """
    return _indexed(_ASSIGN, "x", x, indices, "y_shape", y_shape, channels_last, out, False, num_threads)


@public
def max_unpool_backward(
    dy: Array,
    indices: Array,
    *,
    channels_last: bool = False,
    out: Array | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> Array:
    """``dx = dy[index]`` in every plane, of the shape of `indices`, for indices that occur once.

    dx overwrites `out`, or is added to it with ``accumulate=True``.
    """
    dy = _args.as_array("dy", dy)
    f64 = is_float64("dy", dy)
    spatial = spatial_axes("dy", dy.shape, channels_last)
    _check_plane("dy", spatial)
    indices = _args.as_array("indices", indices)
    _check_planes("indices", indices.shape, "dy", dy.shape, channels_last)
    threads = _args.thread_count(num_threads)
    _check_accumulated(accumulate, out)
    whole = _Source("dy", dy, channels_last, flat=True)
    at = _Source("indices", _as_int32(indices), channels_last, whole.by_channels, flat=True)
    to_dx = _Target("out", out, indices.shape, dy.dtype, whole, accumulate, flat=True)
    _call_indexed(_PICK, f64, to_dx, at, whole, indices, math.prod(spatial), accumulate, to_dx, {"dy": dy}, threads)
    return to_dx.finished()


# ---- what the functions share ----------------------------------------------------------------------------------------


def _forward(
    kind: int,
    x: Array,
    kernel: PerAxis,
    stride: PerAxis | None,
    padding: Padding,
    needs: str,
    count_padding: bool,
    channels_last: bool,
    out: Array | None,
    num_threads: int | None,
) -> Array:
    f64 = is_float64("x", x)
    windows = pool_windows(spatial_axes("x", x.shape, channels_last), kernel, stride, padding, 1, needs)
    threads = _args.thread_count(num_threads)
    images = _Source("x", x, channels_last)
    to_y = _Target("out", out, pooled_shape(x.shape, windows.outputs, channels_last), x.dtype, images)
    results = {"out": to_y.array}
    checked = _check_copies(results, {"x": x}, images, to_y)
    arguments = (kind, f64, images.images, windows.engine, count_padding, to_y.images, None, checked, threads)
    enter(PoolForward, _core.pool_forward, arguments, _args.disjoint_arguments, results, {"x": x})
    return to_y.finished()


def _backward(
    kind: int,
    dy: Array,
    x: Array | None,
    y: Array | None,
    x_shape: tuple[int, ...],
    windows: _Windows,
    count_padding: bool,
    channels_last: bool,
    out: Array | None,
    accumulate: bool,
    num_threads: int | None,
) -> Array:
    f64 = is_float64("dy", dy)
    shape = pooled_shape(x_shape, windows.outputs, channels_last)
    for name, array, expected in (("dy", dy, shape), ("y", y, shape), ("x", x, x_shape)):
        if array is None:
            continue
        if array.shape != expected:
            raise ArgumentValueError(
                name,
                "{argument} has shape {}, but {x} of shape {} and its windows need {}",
                array.shape,
                x_shape,
                expected,
            )
        _args.check_dtype(name, array, dy.dtype, "as {dy} is")
    threads = _args.thread_count(num_threads)
    _check_accumulated(accumulate, out)
    images = _Source("dy", dy, channels_last)
    others = [None if a is None else _Source(n, a, channels_last, images.by_channels) for n, a in (("x", x), ("y", y))]
    to_dx = _Target("out", out, x_shape, dy.dtype, images, accumulate)
    results, inputs = {"out": to_dx.array}, {"dy": dy, "x": x, "y": y}
    checked = _check_copies(results, inputs, images, to_dx, *others)
    x_images, y_images = (None if other is None else other.images for other in others)
    arguments = (
        kind, f64, images.images, x_images, y_images, windows.engine, count_padding, to_dx.images, bool(accumulate),
        checked, threads,
    )  # fmt: skip
    enter(PoolBackward, _core.pool_backward, arguments, _args.disjoint_arguments, results, inputs)
    return to_dx.finished()


def _indexed(
    kind: int,
    name: str,
    part: Array,
    indices: Array,
    whole_name: str,
    whole_shape: Sequence[int],
    channels_last: bool,
    out: Array | None,
    accumulate: bool,
    num_threads: int | None,
) -> Array:
    """Write or add the elements of `part` to the positions that `indices` gives, in planes of `whole_shape`."""
    part = _args.as_array(name, part)
    f64 = is_float64(name, part)
    indices = _args.as_array("indices", indices)
    shape = _as_shape(whole_name, whole_shape)
    spatial = spatial_axes(whole_name, shape, channels_last)
    _check_plane(whole_name, spatial)
    _check_planes(name, part.shape, whole_name, shape, channels_last)
    if indices.shape != part.shape:
        raise ArgumentValueError(
            "indices", "{indices} has shape {}, but {} has shape {}", indices.shape, ArgumentName(name), part.shape
        )
    threads = _args.thread_count(num_threads)
    _check_accumulated(accumulate, out)
    source = _Source(name, part, channels_last, flat=True)
    at = _Source("indices", _as_int32(indices), channels_last, source.by_channels, flat=True)
    to = _Target("out", out, shape, part.dtype, source, accumulate, flat=True)
    _call_indexed(kind, f64, source, at, to, indices, math.prod(spatial), accumulate, to, {name: part}, threads)
    return to.finished()


def _call_indexed(
    kind: int,
    f64: bool,
    part: _Source | _Target,
    at: _Source,
    whole: _Source | _Target,
    indices: Array,
    pixels: int,
    accumulate: bool,
    target: _Target,
    inputs: dict[str, Array],
    threads: int,
) -> None:
    results, inputs = {"out": target.array}, {**inputs, "indices": indices}
    checked = _check_copies(results, inputs, part, whole, at, None if at.given is indices else target)
    arguments = (kind, f64, part.images, at.images, whole.images, bool(accumulate), checked, threads)

    def fix(refusal: Refusal, arguments: IndexedPlanes) -> IndexedPlanes:
        if refusal.reason is Reason.out_of_range:
            _args.raise_out_of_range("indices", indices, pixels, "the pixels of a plane are")
        return _args.disjoint_arguments(refusal, arguments, results, inputs)

    enter(IndexedPlanes, _core.indexed_planes, arguments, fix)


# ---- arrays as the engine takes them ---------------------------------------------------------------------------------


class _Source:
    """An input as images [N, C, H, W], or with `flat` as planes [N, C, H * W]; a copy if the strides require it."""

    def __init__(
        self, name: str, array: Array, channels_last: bool, by_channels: bool | None = None, flat: bool = False
    ) -> None:
        _args.check_aligned(name, array)
        self.given, self.channels_last = array, channels_last
        images = as_images(array, channels_last)
        if by_channels is None and images.shape[2:] == (1, 1):
            by_channels = bool(channels_last)  # the strides of one pixel do not say what those of other arrays are
        elif by_channels is None:
            by_channels = _prefers_channels(images)
            if not by_channels and not _is_contiguous(images, 3):
                by_channels = bool(channels_last)
        self.by_channels = by_channels
        self.copied = not _usable(images, by_channels, flat)
        if self.copied:
            images = _in_memory_order(np.ascontiguousarray(_memory_order(images, by_channels)), by_channels)
        self.images = _flattened(images) if flat else images


class _Target:
    """A result: the array that is returned, and its images as the engine writes them, in a buffer if need be."""

    def __init__(
        self,
        name: str,
        given: Array | None,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        like: _Source,
        keep: bool = False,
        flat: bool = False,
    ) -> None:
        channels_last, by_channels = like.channels_last, like.by_channels
        self.copied = False
        if given is not None:
            _args.check_result(name, given, shape, dtype)
            images = as_images(_args.as_plain(given), channels_last)
            self.copied = not _usable(images, by_channels, flat)
        self._given = images if self.copied else None
        if given is None or self.copied:
            extents = _image_shape(shape, channels_last)
            order = (extents[0], *extents[2:], extents[1]) if by_channels else extents
            images = _in_memory_order(_memory.empty(order, dtype), by_channels)
            if keep and self._given is not None:
                images[...] = self._given
        self.array = as_given(images, len(shape), channels_last) if given is None else given
        self._images = images
        self.images = _flattened(images) if flat else images

    def finished(self) -> Array:
        """The array that is returned, with the results in it."""
        if self._given is not None:
            self._given[...] = self._images
        return self.array


def _image_shape(shape: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    channels, spatial = (shape[-1], shape[1:-1]) if channels_last else (shape[1], shape[2:])
    return (shape[0], channels, *(1,) * (2 - len(spatial)), *spatial)


def _is_contiguous(images: Array, axis: int) -> bool:
    return images.shape[axis] <= 1 or images.strides[axis] == images.itemsize


def _prefers_channels(images: Array) -> bool:
    """Whether the channels of a pixel are contiguous, rather than the columns of a channel."""
    return _is_contiguous(images, 1) and (not _is_contiguous(images, 3) or images.shape[1] > images.shape[3])


def _usable(images: Array, by_channels: bool, flat: bool) -> bool:
    """Whether the engine can use them as they are."""
    if not by_channels and images.flags.c_contiguous:
        return True  # the common case
    if flat:
        height, width = images.shape[2:]
        if height > 1 and width > 1 and images.strides[2] != width * images.strides[3]:
            return False
        images = _flattened(images)
    return _is_contiguous(images, 1 if by_channels else images.ndim - 1)


def _memory_order(images: Array, by_channels: bool) -> Array:
    return images.transpose(0, 2, 3, 1) if by_channels else images


def _in_memory_order(array: Array, by_channels: bool) -> Array:
    return array.transpose(0, 3, 1, 2) if by_channels else array


def _flattened(images: Array) -> Array:
    n, channels, height, width = images.shape
    return images.reshape(n, channels, height * width)


def _as_int32(indices: Array) -> Array:
    """The indices as the engine takes them; those that int32 cannot hold become others that are out of range, too."""
    if indices.dtype is INT32 or indices.dtype == INT32:
        return indices
    if indices.dtype.kind not in "iu":
        raise ArgumentTypeError("indices", "{indices} has dtype {}; it must be of integers", indices.dtype)
    if indices.dtype.itemsize >= 4:
        low = -1 if indices.dtype.kind == "i" else 0
        indices = np.clip(indices, low, _MOST)
    return indices.astype(INT32)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_copies(
    results: Mapping[str, Array | None], inputs: Mapping[str, Array | None], *arrays: _Source | _Target | None
) -> bool:
    """Check for overlap here if the engine gets a copy, of which it cannot know. Returns whether that was so."""
    copied = any(array is not None and array.copied for array in arrays)
    if copied:
        _args.check_disjoint(results, inputs)
    return copied


def _result_buffers(out: object) -> tuple[Any, Any]:
    """The caller's buffers for y and indices."""
    if out is None or isinstance(out, MaxPoolResult):
        return out or (None, None)
    if not isinstance(out, Mapping):
        raise ArgumentTypeError("out", "{out} must be MaxPoolResult or a mapping, not {}", type(out))
    for name in set(out).difference(MaxPoolResult._fields):
        raise ArgumentValueError("out", "{out} has {!r}; the results are {}", name, ", ".join(MaxPoolResult._fields))
    return out.get("y"), out.get("indices")


def _check_accumulated(accumulate: bool, out: Array | None) -> None:
    if accumulate and out is None:
        raise ArgumentValueError("out", "{accumulate}=True adds to {out}, which is missing")


def pooled_shape(shape: tuple[int, ...], outputs: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    return (shape[0], *outputs, shape[-1]) if channels_last else (*shape[:2], *outputs)


def _check_plane(name: str, spatial: tuple[int, ...]) -> None:
    if math.prod(spatial) > _MOST:
        raise ArgumentValueError(
            name, "{argument} has planes of {} pixels, but {indices} are int32, at most {}", math.prod(spatial), _MOST
        )


def _check_planes(
    name: str, shape: tuple[int, ...], other_name: str, other: tuple[int, ...], channels_last: bool
) -> None:
    """Check that two arrays have the same rank, samples and channels."""
    channel = -1 if channels_last else 1
    if len(shape) != len(other) or shape[0] != other[0] or shape[channel] != other[channel]:
        which = "the same number of axes, samples and channels"
        raise ArgumentValueError(
            name, "{argument} has shape {}, but {} is {}: they need {}", shape, ArgumentName(other_name), other, which
        )


def _as_shape(name: str, value: Sequence[int]) -> tuple[int, ...]:
    try:
        extents = tuple(value)
    except TypeError:
        raise ArgumentTypeError(name, "{argument} must be a sequence of ints, not {}", type(value)) from None
    for extent in extents:
        if type(extent) is not int or extent < 0:
            return tuple(_args.as_count(f"{name}[{i}]", extent, least=0) for i, extent in enumerate(extents))
    return extents


def pool_windows(
    spatial: tuple[int, ...],
    kernel: PerAxis,
    stride: PerAxis | None,
    padding: Padding,
    dilation: PerAxis,
    needs: str,
) -> _Windows:
    """Check the windows and count them. `needs`: what a window without any element does not have; or nothing."""
    axes = len(spatial)
    kernels = per_axis("kernel", kernel, axes, 1)
    strides = kernels if stride is None else per_axis("stride", stride, axes, 1)
    return _checked_windows(
        spatial, kernels, strides, paddings(padding, axes), per_axis("dilation", dilation, axes, 1), needs
    )


@lru_cache(maxsize=512)
def _checked_windows(
    spatial: tuple[int, ...],
    kernels: tuple[int, ...],
    strides: tuple[int, ...],
    paddings: tuple[tuple[int, int], ...],
    dilations: tuple[int, ...],
    needs: str,
) -> _Windows:
    outputs = []
    for axis, (inputs, kernel, stride, (before, after), dilation) in enumerate(
        zip(spatial, kernels, strides, paddings, dilations, strict=True)
    ):
        span = (kernel - 1) * dilation + 1
        if span > inputs + before + after:
            raise ArgumentValueError(
                "kernel",
                "{kernel} is {} with {dilation} {}, which spans {} elements, but spatial axis {} of {x} has "
                "{}, with {padding} {} and {}",
                kernel,
                dilation,
                span,
                axis,
                inputs,
                before,
                after,
            )
        count = (inputs + before + after - span) // stride + 1
        if needs:
            empty = _first_empty(inputs, count, kernel, stride, before, dilation)
            if empty is not None:
                raise ArgumentValueError(
                    "kernel",
                    "window {} of spatial axis {} has no element of {x}, so {} does not exist: the axis has {}, "
                    "{padding} is {} and {}, {kernel} {}, {dilation} {}",
                    empty,
                    axis,
                    needs,
                    inputs,
                    before,
                    after,
                    kernel,
                    dilation,
                )
        outputs.append(count)
    one = (1,) * (2 - len(spatial))
    befores = (0,) * (2 - len(spatial)) + tuple(before for before, _ in paddings)
    return _Windows([*one, *kernels, *one, *strides, *one, *dilations, *befores], tuple(outputs))


def _first_empty(inputs: int, count: int, kernel: int, stride: int, before: int, dilation: int) -> int | None:
    """The first window that has no element in it."""
    # Windows that start in the padding: the first one has the fewest taps behind it. With a dilation above the number
    # of inputs the taps may also step over all of them; where they land repeats after as many windows at most.
    for window in range(min(-(-before // stride), count, 1 if dilation <= inputs else inputs + 1)):
        start = window * stride - before
        taps = -(start // dilation)
        if taps >= kernel or start + taps * dilation >= inputs:
            return window
    behind = -(-(inputs + before) // stride)  # the first that starts behind the last input
    return behind if behind < count else None
