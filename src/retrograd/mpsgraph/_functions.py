"""What MPSGraph's operations are in terms of retrograd.graph: functions of tensors, without arithmetic of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import graph as G
from ._types import (
    MPSGraphLossReductionType,
    MPSGraphPaddingMode,
    MPSGraphScatterMode,
)

Tensor = G.Tensor
_INT32 = np.dtype(np.int32)


def pullback(function: Callable[..., Any], inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """The partial derivatives of ``sum(gradient * function(*inputs))``: no other path to the inputs counts."""
    apart = [G.stop_gradient(t) for t in inputs]
    y = function(*apart)
    if gradient.shape != y.shape:
        raise ValueError(f"the incoming gradient has shape {gradient.shape}, but the result has shape {y.shape}")
    return G.gradients(y, apart, seed=gradient)


def scalar(tensor: Tensor) -> Tensor:
    """One element without axes, so that it does not change the rank of what it is combined with."""
    return G.reshape(tensor, ()) if tensor.size == 1 else tensor


# ---- logic -----------------------------------------------------------------------------------------------------------


def _truth(x: Tensor) -> Tensor:
    return x if x.dtype.kind == "b" else G.not_equal(x, 0)


def _logical(function: Callable[..., Tensor], negated: bool, doc: str) -> Callable[..., Tensor]:
    """A function of bools for operands of any type; the result has their type."""

    def logical(*operands: Tensor) -> Tensor:
        for other in operands[1:]:
            if other.dtype != operands[0].dtype:
                raise TypeError(f"operands have types {operands[0].dtype} and {other.dtype}")
        found = function(*map(_truth, operands))
        return G.cast(G.logical_not(found) if negated else found, operands[0].dtype)

    logical.__doc__ = doc + " The result has the operands' type."
    return logical


logical_and = _logical(G.logical_and, False, "Whether both are not 0.")
logical_or = _logical(G.logical_or, False, "Whether one of them is not 0.")
logical_xor = _logical(G.logical_xor, False, "Whether exactly one of them is not 0.")
logical_nand = _logical(G.logical_and, True, "Whether one of them is 0.")
logical_nor = _logical(G.logical_or, True, "Whether both are 0.")
logical_xnor = _logical(G.logical_xor, True, "Whether both or none are 0.")
logical_not = _logical(G.logical_not, False, "Whether it is 0.")


def signbit(x: Tensor) -> Tensor:
    """1 where the sign is negative, -0 too, else 0. The result has the operand's type."""
    return G.cast(G.signbit(x), x.dtype)


def select(predicate: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    """The elements of the true tensor where the predicate is not 0, else those of the false tensor."""
    return G.where(_truth(predicate), chosen, other)


# ---- reductions ------------------------------------------------------------------------------------------------------


def _axes(x: Tensor, axes: Sequence[int] | None) -> tuple[int, ...]:
    """Axes counted once each; None: all."""
    if axes is None:
        return tuple(range(x.ndim))
    for axis in axes:
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(f"axis is {axis}, but the tensor has shape {x.shape}")
    return tuple(sorted({axis % x.ndim for axis in axes}))


def _axis(x: Tensor, axis: int) -> int:
    return _axes(x, (axis,))[0]


def reduction(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A reduction that keeps the reduced axes, with size 1."""

    def reduce(x: Tensor, *, axes: Sequence[int] | None = None, axis: int | None = None) -> Tensor:
        wanted = _axes(x, axes if axis is None else (axis,))
        return function(x, wanted, keepdims=True) if wanted else x

    reduce.__doc__ = function.__doc__
    return reduce


def _truths(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(x: Tensor, axes: Sequence[int], keepdims: bool) -> Tensor:
        return G.cast(function(_truth(x), tuple(axes), keepdims=keepdims), x.dtype)

    reduce.__doc__ = (function.__doc__ or "").replace("true", "not 0") + " The result has the operand's type."
    return reduce


reduction_and = reduction(_truths(G.all))
reduction_or = reduction(_truths(G.any))


def arg_maximum(x: Tensor, *, axis: int) -> Tensor:
    """The index of the first largest element along an axis, as int32. The axis stays, with size 1."""
    number = _axis(x, axis)
    return G.cast(G.expand_dims(G.argmax(x, number), number), _INT32)


def arg_minimum(x: Tensor, *, axis: int) -> Tensor:
    """The index of the first smallest element along an axis, as int32. The axis stays, with size 1."""
    number = _axis(x, axis)
    return G.cast(G.expand_dims(G.argmin(x, number), number), _INT32)


def mean(x: Tensor, *, axes: Sequence[int]) -> Tensor:
    """The mean over axes, which stay with size 1."""
    return G.mean(x, _axes(x, axes), keepdims=True)


def variance(x: Tensor, *, axes: Sequence[int]) -> Tensor:
    """The variance over axes, divided by the number of elements. The axes stay with size 1."""
    return G.var(x, _axes(x, axes), keepdims=True)


def variance_around(x: Tensor, center: Tensor, *, axes: Sequence[int]) -> Tensor:
    """The mean of ``(x - mean)^2`` over axes, for a mean that is given. The axes stay with size 1."""
    return G.mean(G.square(G.subtract(x, center)), _axes(x, axes), keepdims=True)


def cumulative(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scan(x: Tensor, *, axis: int, exclusive: bool = False, reverse: bool = False) -> Tensor:
        return function(x, _axis(x, axis), exclusive=exclusive, reverse=reverse)

    scan.__doc__ = function.__doc__
    return scan


# ---- shapes ----------------------------------------------------------------------------------------------------------


def transpose(x: Tensor, *, permutation: Sequence[int]) -> Tensor:
    """The axes in another order."""
    return G.transpose(x, permutation)


def swap(x: Tensor, *, dimension: int, withDimension: int) -> Tensor:
    """Two axes exchanged."""
    return G.swapaxes(x, _axis(x, dimension), _axis(x, withDimension))


def expand_dims(x: Tensor, *, axis: int | None = None, axes: Sequence[int] = ()) -> Tensor:
    """New axes of size 1, at these positions of the result."""
    return G.expand_dims(x, tuple(axes) if axis is None else (axis,))


def squeeze(x: Tensor, *, axis: int | None = None, axes: Sequence[int] | None = None) -> Tensor:
    """Without axes of size 1: these, or all of them."""
    return G.squeeze(x, axes if axis is None else (axis,))


def reverse(x: Tensor, *, axes: Sequence[int] | None = None) -> Tensor:
    """The elements in reverse order along axes, or along all."""
    return G.flip(x, _axes(x, axes))


def flatten(x: Tensor, *, axis: int) -> Tensor:
    """Two axes: the product of the sizes before `axis`, and of those from it on."""
    if not -x.ndim <= axis <= x.ndim:
        raise ValueError(f"axis is {axis}, but the tensor has shape {x.shape}")
    number = axis + x.ndim if axis < 0 else axis
    return G.reshape(x, (math.prod(x.shape[:number]), math.prod(x.shape[number:])))


def broadcast(x: Tensor, *, shape: Sequence[int]) -> Tensor:
    """x repeated along axes of size 1, or new ones in front, to this shape."""
    return G.broadcast_to(x, shape)


def shape_of(x: Tensor) -> Tensor:
    """The sizes of the axes, as int32."""
    return G.constant(np.asarray(x.shape, _INT32))


def cast(x: Tensor, *, type: np.dtype[Any]) -> Tensor:
    """x with another data type."""
    return G.cast(x, type)


def concatenate(*tensors: Tensor, dimension: int, interleave: bool = False) -> Tensor:
    """Tensors joined along an axis; interleaved, element c of tensor i is at i + c times their number."""
    if not interleave:
        return G.concatenate(tensors, dimension)
    first = tensors[0]
    axis = _axis(first, dimension)
    for other in tensors[1:]:
        if other.shape != first.shape:
            raise ValueError(f"interleaved tensors need equal shapes, these have {first.shape} and {other.shape}")
    together = G.stack(tensors, axis + 1)
    return G.reshape(together, (*first.shape[:axis], first.shape[axis] * len(tensors), *first.shape[axis + 1 :]))


def stack(*tensors: Tensor, axis: int) -> Tensor:
    """Tensors of one shape joined along a new axis."""
    return G.stack(tensors, axis)


def split_sizes(x: Tensor, *, splitSizes: Sequence[int], axis: int) -> list[Tensor]:
    """Parts of these sizes along an axis."""
    number = _axis(x, axis)
    if sum(splitSizes) != x.shape[number] or min(splitSizes, default=0) < 0:
        raise ValueError(f"splitSizes is {list(splitSizes)}, but axis {axis} has size {x.shape[number]}")
    ends = np.cumsum(splitSizes)[:-1].tolist()
    return G.split(x, ends, number)


def split_count(x: Tensor, *, numSplits: int, axis: int) -> list[Tensor]:
    """Parts of one size along an axis."""
    return G.split(x, numSplits, _axis(x, axis))


def tile(x: Tensor, *, multiplier: Sequence[int]) -> Tensor:
    """x repeated along each axis."""
    if len(multiplier) != x.ndim or min(multiplier, default=0) < 0:
        raise ValueError(f"withMultiplier is {list(multiplier)}, must have a number for each axis of {x.shape}")
    return G.tile(x, multiplier)


def tile_gradient(gradient: Tensor, source: Tensor, *, multiplier: Sequence[int]) -> Tensor:
    """The sum of the gradient over the copies."""
    return pullback(lambda x: tile(x, multiplier=multiplier), [source], gradient)[0]


# ---- slices ----------------------------------------------------------------------------------------------------------


def _index(
    shape: Sequence[int], starts: Sequence[int], ends: Sequence[int], strides: Sequence[int], masks: tuple[int, ...]
) -> tuple[Any, ...]:
    """An index of NumPy. Bit d of the masks: start at the first element, end at the last, drop the axis."""
    start_mask, end_mask, squeeze_mask = masks
    count = len(shape)
    if not len(starts) == len(ends) == len(strides) == count:
        raise ValueError(
            f"starts, ends and strides are {list(starts)}, {list(ends)} and {list(strides)}, but the tensor has shape "
            f"{tuple(shape)}"
        )
    parts: list[Any] = []
    for d, (start, end, stride, size) in enumerate(zip(starts, ends, strides, shape, strict=True)):
        if stride == 0:
            raise ValueError(f"strides is {list(strides)}; a stride is not 0")
        part = slice(None if start_mask >> d & 1 else start, None if end_mask >> d & 1 else end, stride)
        first = part.indices(size)[0]
        if squeeze_mask >> d & 1 and not 0 <= first < size:
            raise ValueError(f"starts is {list(starts)}, but axis {d}, which is dropped, has size {size}")
        parts.append(first if squeeze_mask >> d & 1 else part)
    return tuple(parts)


def strided_slice(
    x: Tensor,
    *,
    starts: Sequence[int],
    ends: Sequence[int],
    strides: Sequence[int],
    startMask: int = 0,
    endMask: int = 0,
    squeezeMask: int = 0,
) -> Tensor:
    """The elements from `starts` to below `ends`, every stride-th; negative positions count from the end."""
    return G.take_slice(x, _index(x.shape, starts, ends, strides, (startMask, endMask, squeezeMask)))


def slice_length(x: Tensor, *, dimension: int, start: int, length: int) -> Tensor:
    """`length` elements along an axis from `start` on, which counts from the end if it is negative."""
    axis = _axis(x, dimension)
    size = x.shape[axis]
    first = start + size if start < 0 else start
    if not 0 <= first <= size or not 0 <= length <= size - first:
        raise ValueError(f"start is {start} and length {length}, but axis {dimension} has size {size}")
    return G.take_slice(x, (*[slice(None)] * axis, slice(first, first + length)))


def slice_sizes(x: Tensor, *, start: Sequence[int], size: Sequence[int], squeezeMask: int = 0) -> Tensor:
    """A block of this size that begins at `start`; a size of -1 is the rest."""
    return G.take_slice(x, _block(x.shape, start, size, squeezeMask))


def _block(shape: Sequence[int], start: Sequence[int], size: Sequence[int], squeeze: int) -> tuple[Any, ...]:
    if not len(start) == len(size) == len(shape):
        raise ValueError(f"start and size are {list(start)} and {list(size)}, but the tensor has shape {tuple(shape)}")
    ends = [e if n == -1 else s + n for s, n, e in zip(start, size, shape, strict=True)]
    for s, end, extent in zip(start, ends, shape, strict=True):
        if not 0 <= s <= end <= extent:
            raise ValueError(f"a block from {list(start)} to {ends} is outside of shape {tuple(shape)}")
    return _index(shape, start, ends, [1] * len(ends), (0, 0, squeeze))


def slice_gradient(
    gradient: Tensor,
    *,
    shape: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    strides: Sequence[int],
    startMask: int = 0,
    endMask: int = 0,
    squeezeMask: int = 0,
) -> Tensor:
    """The gradient at the elements of the slice, and zeros elsewhere."""
    index = _index(shape, starts, ends, strides, (startMask, endMask, squeezeMask))
    return pullback(lambda x: G.take_slice(x, index), [G.zeros(shape, gradient.dtype)], gradient)[0]


def slice_sizes_gradient(
    gradient: Tensor, *, shape: Sequence[int], start: Sequence[int], size: Sequence[int], squeezeMask: int = 0
) -> Tensor:
    """The gradient in the block, and zeros elsewhere."""
    index = _block(shape, start, size, squeezeMask)
    return pullback(lambda x: G.take_slice(x, index), [G.zeros(shape, gradient.dtype)], gradient)[0]


def slice_update(
    data: Tensor,
    update: Tensor,
    *,
    starts: Sequence[int],
    ends: Sequence[int],
    strides: Sequence[int],
    startMask: int = 0,
    endMask: int = 0,
    squeezeMask: int = 0,
) -> Tensor:
    """The data with the elements of a slice replaced."""
    index = _index(data.shape, starts, ends, strides, (startMask, endMask, squeezeMask))
    parts = [slice(part, part + 1) if isinstance(part, int) else part for part in index]
    dropped = tuple(d for d, part in enumerate(index) if isinstance(part, int))
    whole = tuple(len(range(*part.indices(size))) for part, size in zip(parts, data.shape, strict=True))
    expected = tuple(size for d, size in enumerate(whole) if d not in dropped)
    if update.shape != expected:
        raise ValueError(f"the update has shape {update.shape}, but the slice has shape {expected}")
    block = G.reshape(update, whole)
    return G.slice_update(data, block, [p.start for p in parts], [p.stop for p in parts], list(strides))


# ---- padding ---------------------------------------------------------------------------------------------------------

_PADDING = {
    MPSGraphPaddingMode.constant: "constant",
    MPSGraphPaddingMode.zero: "constant",
    MPSGraphPaddingMode.reflect: "reflect",
    MPSGraphPaddingMode.symmetric: "symmetric",
    MPSGraphPaddingMode.clampToEdge: "edge",
    MPSGraphPaddingMode.periodic: "wrap",
}


def pad(
    x: Tensor,
    *,
    mode: MPSGraphPaddingMode,
    leftPadding: Sequence[int],
    rightPadding: Sequence[int],
    constantValue: float = 0.0,
) -> Tensor:
    """x with elements around it: of a value, or taken from x by the mode."""
    if not len(leftPadding) == len(rightPadding) == x.ndim:
        raise ValueError(
            f"leftPadding is {list(leftPadding)}, rightPadding {list(rightPadding)}, but the tensor has shape {x.shape}"
        )
    if mode not in _PADDING:
        raise NotImplementedError(f"the padding mode {mode.name} is not supported; Apple's library refuses it too")
    value = constantValue if mode == MPSGraphPaddingMode.constant else 0.0
    return G.pad(x, list(zip(leftPadding, rightPadding, strict=True)), mode=_PADDING[mode], value=value)


def pad_gradient(
    gradient: Tensor,
    source: Tensor,
    *,
    mode: MPSGraphPaddingMode,
    leftPadding: Sequence[int],
    rightPadding: Sequence[int],
) -> Tensor:
    """The gradient of the source: cropped, with what fell on its elements added."""
    padded = {"mode": mode, "leftPadding": leftPadding, "rightPadding": rightPadding}
    return pullback(lambda x: pad(x, **padded), [source], gradient)[0]  # type: ignore[arg-type]


# ---- activations -----------------------------------------------------------------------------------------------------


def leaky_relu(x: Tensor, *, alpha: float) -> Tensor:
    """x, or alpha x where x is negative."""
    return G.leaky_relu(x, alpha)


def leaky_relu_tensor(x: Tensor, alpha: Tensor) -> Tensor:
    """x, or alpha x where x is negative, for a tensor alpha."""
    return G.where(G.greater(x, 0), x, G.multiply(scalar(alpha), x))


def relu_gradient(gradient: Tensor, source: Tensor) -> Tensor:
    """The gradient where the source is above 0, else 0."""
    return pullback(G.relu, [source], gradient)[0]


def sigmoid_gradient(gradient: Tensor, source: Tensor) -> Tensor:
    """``g s(x) (1 - s(x))``, for the source x of the sigmoid."""
    return pullback(G.sigmoid, [source], gradient)[0]


def leaky_relu_gradient(gradient: Tensor, source: Tensor, alpha: Tensor) -> Tensor:
    """The gradient, times alpha where the source is not above 0."""
    return pullback(lambda x: leaky_relu_tensor(x, alpha), [source], gradient)[0]


def softmax_gradient(gradient: Tensor, source: Tensor, *, axis: int) -> Tensor:
    """``y (g - sum(g y))`` along an axis, for the output y of the softmax."""
    inner = G.sum(G.multiply(gradient, source), (_axis(source, axis),), keepdims=True)
    return G.multiply(source, G.subtract(gradient, inner))


# ---- loss ------------------------------------------------------------------------------------------------------------

_REDUCTIONS = {
    MPSGraphLossReductionType.none: "none",
    MPSGraphLossReductionType.sum: "sum",
    MPSGraphLossReductionType.mean: "mean",
}


def cross_entropy(source: Tensor, labels: Tensor, *, axis: int, reduction: MPSGraphLossReductionType) -> Tensor:
    """``-sum(labels * log softmax(source))`` along an axis; none keeps it with size 1, sum and mean have no axes."""
    if labels.spec != source.spec:
        raise ValueError(f"labels are {labels.spec!r}, but the source is {source.spec!r}")
    number = _axis(source, axis)
    logits, targets = (G.moveaxis(t, number, source.ndim - 1) for t in (source, labels))
    loss = G.softmax_cross_entropy(logits, targets, reduction=_REDUCTIONS[reduction])  # type: ignore[arg-type]
    return G.expand_dims(loss, number) if reduction == MPSGraphLossReductionType.none else loss


def cross_entropy_gradient(
    gradient: Tensor, source: Tensor, labels: Tensor, *, axis: int, reduction: MPSGraphLossReductionType
) -> Tensor:
    """The gradient of the source, for the gradient of the loss."""

    def loss(x: Tensor) -> Tensor:
        return cross_entropy(x, G.stop_gradient(labels), axis=axis, reduction=reduction)

    reduced = reduction != MPSGraphLossReductionType.none
    return pullback(loss, [source], scalar(gradient) if reduced else gradient)[0]


# ---- normalization ---------------------------------------------------------------------------------------------------


def normalize(
    x: Tensor, center: Tensor, spread: Tensor, gamma: Tensor | None, beta: Tensor | None, *, epsilon: float
) -> Tensor:
    """``gamma (x - mean) / sqrt(variance + epsilon) + beta``"""
    return G.normalize(x, center, spread, gamma, beta, epsilon)


def normalization_beta_gradient(gradient: Tensor, source: Tensor, *, reductionAxes: Sequence[int]) -> Tensor:
    """The sum of the gradient over the axes, which stay with size 1."""
    return G.sum(gradient, _axes(source, reductionAxes), keepdims=True)


def normalization_gamma_gradient(
    gradient: Tensor, source: Tensor, center: Tensor, spread: Tensor, *, reductionAxes: Sequence[int], epsilon: float
) -> Tensor:
    """The sum of the gradient times the normalized source over the axes, which stay with size 1."""
    product = G.multiply(gradient, G.normalize(source, center, spread, eps=epsilon))
    return G.sum(product, _axes(source, reductionAxes), keepdims=True)


def normalization_gradient(
    gradient: Tensor,
    source: Tensor,
    center: Tensor,
    spread: Tensor,
    gamma: Tensor | None,
    gamma_gradient: Tensor | None,
    beta_gradient: Tensor | None,
    *,
    reductionAxes: Sequence[int],
    epsilon: float,
) -> Tensor:
    """The gradient of the source, through its mean and variance over the axes too."""
    axes = _axes(source, reductionAxes)
    count = float(math.prod(source.shape[a] for a in axes))
    if gamma_gradient is None:
        gamma_gradient = normalization_gamma_gradient(
            gradient, source, center, spread, reductionAxes=axes, epsilon=epsilon
        )
    if beta_gradient is None:
        beta_gradient = normalization_beta_gradient(gradient, source, reductionAxes=axes)
    xhat = G.normalize(source, center, spread, eps=epsilon)
    through = G.add(G.divide(beta_gradient, count), G.multiply(xhat, G.divide(gamma_gradient, count)))
    scale = G.rsqrt(G.add(spread, epsilon))
    return G.multiply(G.subtract(gradient, through), scale if gamma is None else G.multiply(gamma, scale))


# ---- optimizers ------------------------------------------------------------------------------------------------------


def gradient_descent(rate: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
    """``values - learningRate * gradient``"""
    return G.sgd_update(values, gradient, rate)


def adam(
    rate: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    epsilon: Tensor,
    power1: Tensor,
    power2: Tensor,
    values: Tensor,
    momentum: Tensor,
    velocity: Tensor,
    maximum: Tensor | None,
    gradient: Tensor,
) -> list[Tensor]:
    """New values, momentum, velocity (and its maximum) of Adam, for the given powers of beta1 and beta2."""
    correction = G.divide(G.sqrt(G.subtract(1.0, scalar(power2))), G.subtract(1.0, scalar(power1)))
    now = G.multiply(scalar(rate), correction)
    return adam_current(now, beta1, beta2, epsilon, values, momentum, velocity, maximum, gradient)


def adam_current(
    rate: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    epsilon: Tensor,
    values: Tensor,
    momentum: Tensor,
    velocity: Tensor,
    maximum: Tensor | None,
    gradient: Tensor,
) -> list[Tensor]:
    """New values, momentum, velocity (and its maximum) of Adam, for a learning rate that has been corrected."""
    settings = {"learning_rate": rate, "beta1": beta1, "beta2": beta2, "eps": epsilon}
    return list(G.adam_update(values, gradient, momentum, velocity, maximum, **settings))


# ---- indices ---------------------------------------------------------------------------------------------------------


def top_k(x: Tensor, *, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest elements along an axis, in descending order, and their indices as int32."""
    number = _axis(x, axis)
    values, places = G.top_k(x, k, largest=largest, axis=number)
    return values, G.cast(places, _INT32)


def bottom_k(x: Tensor, *, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The k smallest elements along an axis, in ascending order, and their indices as int32."""
    return top_k(x, k=k, axis=axis, largest=False)


def top_k_gradient(gradient: Tensor, source: Tensor, *, k: int, axis: int = -1) -> Tensor:
    """The gradient at the k largest elements of the source, and zeros elsewhere."""
    return pullback(lambda x: top_k(x, k=k, axis=axis)[0], [source], gradient)[0]


def bottom_k_gradient(gradient: Tensor, source: Tensor, *, k: int, axis: int = -1) -> Tensor:
    """The gradient at the k smallest elements of the source, and zeros elsewhere."""
    return pullback(lambda x: bottom_k(x, k=k, axis=axis)[0], [source], gradient)[0]


def sort(x: Tensor, *, axis: int, descending: bool = False) -> Tensor:
    """The elements in order along an axis."""
    return G.sort(x, _axis(x, axis), descending=descending)


def arg_sort(x: Tensor, *, axis: int, descending: bool = False) -> Tensor:
    """The indices of the elements in order along an axis, as int32."""
    return G.cast(G.argsort(x, _axis(x, axis), descending=descending), _INT32)


def gather(updates: Tensor, indices: Tensor, *, axis: int, batchDimensions: int) -> Tensor:
    """Slices of the updates along an axis; the first `batchDimensions` axes of both are paired."""
    return G.take(updates, indices, _axis(updates, axis), batch_dims=batchDimensions)


def gather_nd(updates: Tensor, indices: Tensor, *, batchDimensions: int) -> Tensor:
    """Slices of the updates at the positions in the last axis of the indices."""
    return G.gather_nd(updates, indices, batch_dims=batchDimensions)


def gather_along(updates: Tensor, indices: Tensor, *, axis: int) -> Tensor:
    """The elements of the updates at the indices along an axis."""
    return G.take_along_axis(updates, indices, _axis(updates, axis))


_MODES = {
    MPSGraphScatterMode.add: "add",
    MPSGraphScatterMode.sub: "subtract",
    MPSGraphScatterMode.mul: "multiply",
    MPSGraphScatterMode.div: "divide",
    MPSGraphScatterMode.min: "minimum",
    MPSGraphScatterMode.max: "maximum",
    MPSGraphScatterMode.set: "set",
}


def _fresh(shape: Sequence[int], updates: Tensor, mode: MPSGraphScatterMode) -> Tensor:
    """What updates are scattered into where no data is given: the mode's neutral element."""
    neutral: dict[MPSGraphScatterMode, float] = {
        MPSGraphScatterMode.mul: 1, MPSGraphScatterMode.div: 1,
        MPSGraphScatterMode.min: _largest(updates.dtype, 1), MPSGraphScatterMode.max: _largest(updates.dtype, -1),
    }  # fmt: skip
    return G.full(shape, neutral.get(mode, 0), updates.dtype)


def _largest(dtype: np.dtype[Any], sign: int) -> float:
    if dtype.kind == "f":
        return sign * math.inf
    return np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min


def scatter(updates: Tensor, indices: Tensor, *, shape: Sequence[int], axis: int, mode: MPSGraphScatterMode) -> Tensor:
    """Slices put at the indices of an axis of a new tensor; what none reaches is the mode's neutral element."""
    return scatter_data(_fresh(shape, updates, mode), updates, indices, axis=axis, mode=mode)


def scatter_data(data: Tensor, updates: Tensor, indices: Tensor, *, axis: int, mode: MPSGraphScatterMode) -> Tensor:
    """The data with slices at the indices of an axis combined with the updates."""
    return G.scatter(data, indices, updates, _axis(data, axis), mode=_MODES[mode])


def scatter_nd(
    updates: Tensor,
    indices: Tensor,
    *,
    shape: Sequence[int],
    batchDimensions: int,
    mode: MPSGraphScatterMode = MPSGraphScatterMode.add,
) -> Tensor:
    """Slices put at the positions in the last axis of the indices, in a new tensor."""
    fresh = _fresh(shape, updates, mode)
    return scatter_nd_data(fresh, updates, indices, batchDimensions=batchDimensions, mode=mode)


def scatter_nd_data(
    data: Tensor, updates: Tensor, indices: Tensor, *, batchDimensions: int, mode: MPSGraphScatterMode
) -> Tensor:
    """The data with slices at the positions in the last axis of the indices combined with the updates."""
    return G.scatter_nd(data, indices, updates, batch_dims=batchDimensions, mode=_MODES[mode])


def scatter_along(
    updates: Tensor, indices: Tensor, *, axis: int, shape: Sequence[int], mode: MPSGraphScatterMode
) -> Tensor:
    """The updates put at the indices along an axis of a new tensor."""
    return scatter_along_data(_fresh(shape, updates, mode), updates, indices, axis=axis, mode=mode)


def scatter_along_data(
    data: Tensor, updates: Tensor, indices: Tensor, *, axis: int, mode: MPSGraphScatterMode
) -> Tensor:
    """The data with the elements at the indices along an axis combined with the updates."""
    return G.scatter_along_axis(data, indices, updates, _axis(data, axis), mode=_MODES[mode])


def one_hot(
    indices: Tensor,
    *,
    depth: int,
    axis: int = -1,
    dataType: np.dtype[Any] = np.dtype(np.float32),  # noqa: B008 (immutable)
    onValue: float = 1.0,
    offValue: float = 0.0,
) -> Tensor:
    """`onValue` at each index along a new axis, `offValue` elsewhere."""
    if not -indices.ndim - 1 <= axis <= indices.ndim:
        raise ValueError(f"axis is {axis}, but the indices have shape {indices.shape}")
    hot = G.one_hot(indices, depth, np.bool_)
    chosen = G.where(hot, *(G.full((), value, dataType) for value in (onValue, offValue)))
    return G.moveaxis(chosen, indices.ndim, axis % (indices.ndim + 1))


def coordinate(*, axis: int, shape: Sequence[int]) -> Tensor:
    """The position along an axis of each element of a tensor of this shape, as int32."""
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis is {axis}, but shape is {list(shape)}")
    return G.coordinates(shape, axis % len(shape))


def band_part(x: Tensor, *, numLower: int, numUpper: int) -> Tensor:
    """The diagonals of the last two axes from `numLower` below to `numUpper` above the main one; negative: all."""
    return G.band_part(x, numLower, numUpper)
