"""Convolution and pooling: descriptors and layouts of MPSGraph, in terms of retrograd.graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import graph as G
from ..mps import MPSDataType
from ._functions import pullback
from ._types import MPSGraphPaddingStyle, MPSGraphPoolingReturnIndicesMode, MPSGraphTensorNamedDataLayout

Tensor = G.Tensor
_Layout = MPSGraphTensorNamedDataLayout
_Style = MPSGraphPaddingStyle
_Indices = MPSGraphPoolingReturnIndicesMode


def _padding(
    style: MPSGraphPaddingStyle, given: tuple[int, int], size: int, kernel: int, stride: int, dilation: int
) -> tuple[int, int]:
    """(before, after) of an axis."""
    if style == _Style.explicit:
        return given
    if style == _Style.TF_VALID:
        return 0, 0
    if style not in (_Style.TF_SAME, _Style.ONNX_SAME_LOWER):
        raise NotImplementedError(f"the padding style {style.name} is not documented by Apple, and not supported")
    total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    less, more = total // 2, total - total // 2
    return (less, more) if style == _Style.TF_SAME else (more, less)


def _channels_last(layout: MPSGraphTensorNamedDataLayout) -> bool:
    if layout not in (_Layout.NCHW, _Layout.NHWC):
        raise ValueError(f"dataLayout is {layout.name}, must be NCHW or NHWC")
    return layout == _Layout.NHWC


def _windows(descriptor: Any, shape: Sequence[int], kernel: tuple[int, int]) -> dict[str, Any]:
    """The geometry of windows over images of this shape."""
    if len(shape) != 4:
        raise ValueError(f"images have shape {tuple(shape)}, must have 4 axes")
    d, last = descriptor, _channels_last(descriptor._dataLayout)
    sizes = shape[1:3] if last else shape[2:]
    strides, dilations = (d._strideInY, d._strideInX), (d._dilationRateInY, d._dilationRateInX)
    given = (d._paddingTop, d._paddingBottom), (d._paddingLeft, d._paddingRight)
    padding = tuple(
        _padding(d._paddingStyle, *axis) for axis in zip(given, sizes, kernel, strides, dilations, strict=True)
    )
    return {"stride": strides, "padding": padding, "dilation": dilations, "channels_last": last}


# ---- convolution -----------------------------------------------------------------------------------------------------

_FROM = {_Layout.OIHW: (0, 1, 2, 3), _Layout.HWIO: (3, 2, 0, 1)}  # axes of OIHW in each layout
_TO = {_Layout.OIHW: (0, 1, 2, 3), _Layout.HWIO: (2, 3, 1, 0)}


def _filters(descriptor: Any, weights: Tensor) -> Tensor:
    """The weights as OIHW."""
    _check_filters(descriptor, weights.shape)
    return G.transpose(weights, _FROM[descriptor._weightsLayout])


def _check_filters(descriptor: Any, shape: Sequence[int]) -> None:
    layout = descriptor._weightsLayout
    if layout not in _FROM:
        raise ValueError(f"weightsLayout is {layout.name}, must be OIHW or HWIO")
    if len(shape) != 4:
        raise ValueError(f"weights have shape {tuple(shape)}, must have 4 axes")


class _Convolution(NamedTuple):
    """A convolution of images of a shape with filters of a shape."""

    options: dict[str, Any]
    filters: tuple[int, ...]  # as OIHW


def _convolution(descriptor: Any, x: Sequence[int], weights: Sequence[int]) -> _Convolution:
    _check_filters(descriptor, weights)
    filters = tuple(weights[a] for a in _FROM[descriptor._weightsLayout])
    options = _windows(descriptor, x, (filters[2], filters[3]))
    return _Convolution({**options, "groups": descriptor._groups}, filters)


def convolution(x: Tensor, weights: Tensor, *, descriptor: Any) -> Tensor:
    """The convolution (cross-correlation) of images, without a bias."""
    found = _convolution(descriptor, x.shape, weights.shape)
    return G.conv(x, _filters(descriptor, weights), **found.options)


def convolution_data_gradient(
    gradient: Tensor, weights: Tensor, *, outputShape: Sequence[int], descriptor: Any
) -> Tensor:
    """The gradient of the images, of shape `outputShape`, of a convolution with this descriptor."""
    found = _convolution(descriptor, outputShape, weights.shape)
    return G.conv_input_gradient(gradient, _filters(descriptor, weights), tuple(outputShape), **found.options)


def convolution_weights_gradient(
    gradient: Tensor, source: Tensor, *, outputShape: Sequence[int], descriptor: Any
) -> Tensor:
    """The gradient of the weights, of shape `outputShape`, of a convolution with this descriptor."""
    found = _convolution(descriptor, source.shape, outputShape)
    dw = G.conv_weight_gradient(gradient, source, found.filters, **found.options)
    return G.transpose(dw, _TO[descriptor._weightsLayout])


def transposed_convolution(source: Tensor, weights: Tensor, *, outputShape: Sequence[int], descriptor: Any) -> Tensor:
    """The gradient of the images of a convolution with this descriptor, as a layer of its own."""
    return convolution_data_gradient(source, weights, outputShape=outputShape, descriptor=descriptor)


def transposed_data_gradient(
    gradient: Tensor, weights: Tensor, *, outputShape: Sequence[int], descriptor: Any
) -> Tensor:
    """The gradient of the source of a transposed convolution: the convolution of the gradient."""
    found = convolution(gradient, weights, descriptor=descriptor)
    if found.shape != tuple(outputShape):
        raise ValueError(f"the gradient has shape {found.shape}, but outputShape is {list(outputShape)}")
    return found


def transposed_weights_gradient(
    gradient: Tensor, source: Tensor, *, outputShape: Sequence[int], descriptor: Any
) -> Tensor:
    """The gradient of the weights of a transposed convolution."""
    return convolution_weights_gradient(source, gradient, outputShape=outputShape, descriptor=descriptor)


def depthwise(x: Tensor, weights: Tensor, *, descriptor: Any) -> Tensor:
    """The convolution of each channel with its own filters."""
    # Filters are [multiplier, C, kh, kw] in the layout OIHW; channel c has the results from c * multiplier on.
    filters = _filters(descriptor, weights)
    options = _windows(descriptor, x.shape, (filters.shape[2], filters.shape[3]))
    channels = x.shape[3 if options["channels_last"] else 1]
    multiplier, given, *kernel = filters.shape
    if given != channels:
        raise ValueError(f"weights of shape {weights.shape} are for {given} channels, but the images have {channels}")
    apart = G.reshape(G.swapaxes(filters, 0, 1), (channels * multiplier, 1, *kernel))
    return G.conv(x, apart, groups=channels, **options)


def depthwise_data_gradient(
    gradient: Tensor, weights: Tensor, *, outputShape: Sequence[int], descriptor: Any
) -> Tensor:
    """The gradient of the images, of shape `outputShape`."""
    images = G.zeros(outputShape, gradient.dtype)
    return pullback(lambda x: depthwise(x, G.stop_gradient(weights), descriptor=descriptor), [images], gradient)[0]


def depthwise_weights_gradient(
    gradient: Tensor, source: Tensor, *, outputShape: Sequence[int], descriptor: Any
) -> Tensor:
    """The gradient of the weights, of shape `outputShape`."""
    weights = G.zeros(outputShape, gradient.dtype)
    return pullback(lambda w: depthwise(G.stop_gradient(source), w, descriptor=descriptor), [weights], gradient)[0]


# ---- pooling ---------------------------------------------------------------------------------------------------------


class _Pool(NamedTuple):
    """A pooling: the order of axes in which the windows are over the last two, and the options."""

    order: tuple[int, ...]
    kernel: tuple[int, int]
    options: dict[str, Any]
    count_padding: bool


def _pool(descriptor: Any, shape: Sequence[int]) -> _Pool:
    if len(shape) != 4:
        raise ValueError(f"images have shape {tuple(shape)}, must have 4 axes")
    ceil = {"ceil_mode": descriptor._ceilMode}
    if hasattr(descriptor, "_kernelWidth"):
        kernel = descriptor._kernelHeight, descriptor._kernelWidth
        options = _windows(descriptor, shape, kernel)
        return _Pool((0, 1, 2, 3), kernel, {**options, **ceil}, descriptor._includeZeroPadToAverage)
    d = descriptor
    pads = [d._paddingValues[2 * i : 2 * i + 2] for i in range(4)]
    used = [i for i in range(4) if d._kernelSizes[i] != 1 or d._strides[i] != 1 or any(pads[i])]
    if len(used) > 2:
        raise NotImplementedError(
            f"kernelSizes is {list(d._kernelSizes)} and strides {list(d._strides)}: windows over more than two axes "
            "are not supported"
        )
    spatial = sorted([*used, *[i for i in (3, 2, 1, 0) if i not in used][: 2 - len(used)]])
    order = tuple(i for i in range(4) if i not in spatial) + tuple(spatial)
    padding = tuple(
        _padding(d._paddingStyle, tuple(pads[i]), shape[i], d._kernelSizes[i], d._strides[i], d._dilationRates[i])
        for i in spatial
    )
    options = {
        "stride": tuple(d._strides[i] for i in spatial), "padding": padding,
        "dilation": tuple(d._dilationRates[i] for i in spatial), "channels_last": False, **ceil,
    }  # fmt: skip
    return _Pool(order, tuple(d._kernelSizes[i] for i in spatial), options, d._includeZeroPadToAverage)


def _back(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(i) for i in range(4))


def _undilated(pool: _Pool) -> dict[str, Any]:
    options = dict(pool.options)
    if any(step != 1 for step, kernel in zip(options.pop("dilation"), pool.kernel, strict=True) if kernel > 1):
        raise NotImplementedError("windows with dilation are supported for the maximum only")
    return options


def max_pool(x: Tensor, *, descriptor: Any) -> Tensor:
    """The largest element of each window. Padding is never the largest."""
    pool = _pool(descriptor, x.shape)
    y = G.max_pool(G.transpose(x, pool.order), pool.kernel, **pool.options)
    return G.transpose(y, _back(pool.order))


def average_pool(x: Tensor, *, descriptor: Any) -> Tensor:
    """The mean of each window. Padding counts with includeZeroPadToAverage."""
    pool = _pool(descriptor, x.shape)
    images = G.transpose(x, pool.order)
    y = G.average_pool(images, pool.kernel, count_includes_padding=pool.count_padding, **_undilated(pool))
    return G.transpose(y, _back(pool.order))


def l2_pool(x: Tensor, *, descriptor: Any) -> Tensor:
    """The L2 norm of each window."""
    pool = _pool(descriptor, x.shape)
    return G.transpose(G.l2_pool(G.transpose(x, pool.order), pool.kernel, **_undilated(pool)), _back(pool.order))


def max_pool_gradient(gradient: Tensor, source: Tensor, *, descriptor: Any) -> Tensor:
    """The gradient at the first largest element of each window of the source, and zeros elsewhere."""
    return pullback(lambda x: max_pool(x, descriptor=descriptor), [source], gradient)[0]


def average_pool_gradient(gradient: Tensor, source: Tensor, *, descriptor: Any) -> Tensor:
    """The gradient of the source of a mean over windows."""
    return pullback(lambda x: average_pool(x, descriptor=descriptor), [source], gradient)[0]


def l2_pool_gradient(gradient: Tensor, source: Tensor, *, descriptor: Any) -> Tensor:
    """The gradient of the source of an L2 norm over windows."""
    return pullback(lambda x: l2_pool(x, descriptor=descriptor), [source], gradient)[0]


def _mode(descriptor: Any) -> MPSGraphPoolingReturnIndicesMode:
    mode: MPSGraphPoolingReturnIndicesMode = descriptor._returnIndicesMode
    layout = getattr(descriptor, "_dataLayout", _Layout.NCHW)
    planes = mode == _Indices.globalFlatten2D and layout == _Layout.NCHW
    if not planes and mode != _Indices.globalFlatten4D:
        raise NotImplementedError(
            f"returnIndicesMode is {mode.name} with the layout {layout.name}; supported are globalFlatten4D, and "
            "globalFlatten2D with NCHW"
        )
    return mode


def max_pool_indices(x: Tensor, *, descriptor: Any) -> tuple[Tensor, Tensor]:
    """The largest element of each window and its index: in its plane, or in the whole tensor (globalFlatten4D)."""
    mode = _mode(descriptor)
    pool = _pool(descriptor, x.shape)
    if mode == _Indices.globalFlatten2D and pool.order != (0, 1, 2, 3):
        raise NotImplementedError("globalFlatten2D needs windows over the last two axes")
    y, places = G.max_pool_indices(G.transpose(x, pool.order), pool.kernel, **pool.options)
    if mode == _Indices.globalFlatten4D:
        places = G.take(
            _flat_positions(x.shape, pool), G.add(G.cast(places, np.int64), _plane_starts(y.shape, pool, x))
        )
    dtype = np.int64 if descriptor._returnIndicesDataType == MPSDataType.int64 else np.int32
    return G.transpose(y, _back(pool.order)), G.cast(G.transpose(places, _back(pool.order)), dtype)


def _flat_positions(shape: tuple[int, ...], pool: _Pool) -> np.ndarray[Any, Any]:
    """The position in the tensor of each element, in the engine's order of planes, rows and columns."""
    positions: np.ndarray[Any, Any] = np.arange(math.prod(shape)).reshape(shape).transpose(pool.order)
    if pool.options["channels_last"]:
        positions = positions.transpose(0, 3, 1, 2)
    return positions.reshape(-1)


def _plane_starts(result: tuple[int, ...], pool: _Pool, x: Tensor) -> np.ndarray[Any, Any]:
    """What to add to an index in a plane to get one into all planes, for each element of the result."""
    shape = [x.shape[i] for i in pool.order]
    last = pool.options["channels_last"]
    planes, size = (shape[0], shape[3]) if last else (shape[0], shape[1]), math.prod(shape[1:3] if last else shape[2:])
    starts = (np.arange(planes[0] * planes[1]) * size).reshape(planes)
    return starts[:, None, None, :] if last else starts[:, :, None, None]


def max_pool_indices_gradient(
    gradient: Tensor, indices: Tensor, *, outputShape: Sequence[int], descriptor: Any
) -> Tensor:
    """The gradient added at the indices of maxPoolingReturnIndices, in zeros of shape `outputShape`."""
    if indices.shape != gradient.shape:
        raise ValueError(f"indices have shape {indices.shape}, but the gradient has shape {gradient.shape}")
    if _mode(descriptor) == _Indices.globalFlatten2D:
        return G.max_unpool(gradient, indices, tuple(outputShape))
    flat = G.zeros((math.prod(outputShape),), gradient.dtype)
    sums = G.scatter_add(flat, G.reshape(indices, (-1,)), G.reshape(gradient, (-1,)))
    return G.reshape(sums, tuple(outputShape))
