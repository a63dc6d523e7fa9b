"""What the builder's operations are in retrograd.graph, where that is more than one call of a function there.

Each takes the tensor, the operands of Swift's operation in their order, and its other arguments by Swift's labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from .. import graph
from ..graph import Tensor
from ..graph.recording import UnknownValue
from ..graph.tensor import compute
from ..ops._types import Array
from ..ops.activation import Activation as EngineActivation
from ..ops.recurrent.types import GruActivations, GruWeights, LstmActivations, LstmWeights, RnnWeights
from ._graph_values import (
    Activation,
    CeilingMode,
    ConvolutionPadding,
    Direction,
    Padding,
    PoolingFunction,
    Reduction,
    ScatterMode,
    SortOrder,
)

_INT32: Final = np.dtype(np.int32)
_CHANNELS: Final = 1  # the axis of channels


def renamed(function: Callable[..., Any], **names: str) -> Callable[..., Any]:
    """A function of retrograd.graph whose options have Swift's labels: ``label="option"``."""

    def call(*operands: Tensor | None, **labels: Any) -> Any:
        return function(*operands, **{names.get(label, label): value for label, value in labels.items()})

    return call


def activated(name: str) -> Callable[..., Tensor]:
    """One of the engine's activations, with its parameters."""

    def call(x: Tensor, *, alpha: float | None = None, beta: float | None = None) -> Tensor:
        return graph.activation(x, EngineActivation(name, alpha, beta))

    return call


# ---- elementwise -----------------------------------------------------------------------------------------------------


def log(x: Tensor, *, epsilon: float) -> Tensor:
    return graph.log(x + epsilon)


def reciprocal(x: Tensor, *, epsilon: float) -> Tensor:
    return graph.reciprocal(x + epsilon)


def rsqrt(x: Tensor, *, epsilon: float) -> Tensor:
    return graph.rsqrt(x + epsilon)


def clip(x: Tensor, *, to: tuple[float, float]) -> Tensor:
    return graph.clip(x, *to)


def threshold(x: Tensor, *, to: float) -> Tensor:
    return graph.maximum(x, to)


def thresholded_relu(x: Tensor, *, alpha: float) -> Tensor:
    return graph.where(x >= alpha, x, 0.0)


def softplus(x: Tensor, *, alpha: float) -> Tensor:
    return graph.softplus(x) * alpha


def select(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if x.dtype != np.bool_:
        raise TypeError(f"the condition has type {x.dtype.name}, must be bool")
    return graph.where(x, a, b)


def prelu(x: Tensor, alpha: Tensor) -> Tensor:
    _of_channels("alpha", alpha, x)
    return graph.prelu(x, alpha, _CHANNELS)


# ---- products, convolutions, poolings --------------------------------------------------------------------------------


def matmul(x: Tensor, other: Tensor, bias: Tensor | None, *, transpose: bool, transposeOther: bool) -> Tensor:
    left, right = (
        graph.swapaxes(t, -1, -2) if turned else t for t, turned in ((x, transpose), (other, transposeOther))
    )
    product = graph.matmul(left, right)
    return product if bias is None else product + bias


def _pairs(padding: Sequence[int], axes: int) -> list[tuple[int, int]]:
    if len(padding) != 2 * axes:
        raise ValueError(f"padding has {len(padding)} numbers, expected {2 * axes}: before and after, for each axis")
    return list(zip(padding[::2], padding[1::2], strict=True))


def _shared(totals: Sequence[int], padding: ConvolutionPadding) -> list[tuple[int, int]]:
    """Padding of these sums, with an odd one at the end, or at the start."""
    halves = [(total // 2, total - total // 2) for total in totals]
    return [(after, before) for before, after in halves] if padding.case == "lower" else halves


def _window_padding(
    padding: ConvolutionPadding,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    spread: Sequence[int],
) -> list[tuple[int, int]]:
    if padding.case == "valid":
        return [(0, 0)] * len(sizes)
    if padding.case == "custom":
        return _pairs(padding.parameter, len(sizes))
    reaches = [(k - 1) * d + 1 for k, d in zip(kernel, spread, strict=True)]
    totals = [max((-(-n // s) - 1) * s + k - n, 0) for n, s, k in zip(sizes, strides, reaches, strict=True)]
    return _shared(totals, padding)


def _per_axis(name: str, given: Sequence[int] | None, axes: int) -> tuple[int, ...]:
    numbers = (1,) * axes if given is None else tuple(given)
    if len(numbers) != axes:
        raise ValueError(f"{name} has {len(numbers)} numbers, but there are {axes} spatial axes")
    if any(number < 1 for number in numbers):
        raise ValueError(f"{name} is {list(numbers)}, must be at least 1")
    return numbers


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    strides: Sequence[int],
    padding: ConvolutionPadding,
    dilations: Sequence[int] | None,
    groupCount: int,
) -> Tensor:
    sizes = x.shape[2:]
    steps, spread = _per_axis("strides", strides, len(sizes)), _per_axis("dilations", dilations, len(sizes))
    pads = _window_padding(padding, sizes, weight.shape[2:], steps, spread)
    return graph.conv(x, weight, bias, stride=steps, padding=pads, dilation=spread, groups=groupCount)


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    strides: Sequence[int],
    padding: ConvolutionPadding,
    outputPaddingValues: Sequence[int] | None,
    dilations: Sequence[int] | None,
    groupCount: int,
) -> Tensor:
    axes = x.ndim - 2
    steps, spread = _per_axis("strides", strides, axes), _per_axis("dilations", dilations, axes)
    if padding.case == "custom":
        pads = _pairs(padding.parameter, axes)
    elif padding.case == "valid":
        pads = [(0, 0)] * axes
    else:  # the output has `stride` times the size of the input
        reaches = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], spread, strict=True)]
        pads = _shared([max(k - s, 0) for k, s in zip(reaches, steps, strict=True)], padding)
    extra = (0,) * axes if outputPaddingValues is None else tuple(outputPaddingValues)
    return graph.conv_transpose(
        x, weight, bias, stride=steps, padding=pads, output_padding=extra, dilation=spread, groups=groupCount
    )


def pooling(
    x: Tensor,
    *,
    function: PoolingFunction,
    kernelSize: Sequence[int],
    strides: Sequence[int],
    padding: ConvolutionPadding,
    ceilingMode: CeilingMode,
) -> Tensor:
    if x.dtype.kind != "f":
        raise TypeError(f"the tensor has type {x.dtype.name}, must be float32 or float64")
    sizes = x.shape[2:]
    kernel, steps = _per_axis("kernelSize", kernelSize, len(sizes)), _per_axis("strides", strides, len(sizes))
    pads = _window_padding(padding, sizes, kernel, steps, (1,) * len(sizes))
    if ceilingMode is CeilingMode.ceiling:
        pads = [_rounded_up(*one) for one in zip(sizes, kernel, steps, pads, strict=True)]
    if function.case == "max":
        return graph.max_pool(x, kernel, stride=steps, padding=pads)
    if function.case == "l2Norm":
        return graph.l2_pool(x, kernel, stride=steps, padding=pads)
    return graph.average_pool(x, kernel, stride=steps, padding=pads, count_includes_padding=function.parameter)


def _rounded_up(size: int, kernel: int, stride: int, pads: tuple[int, int]) -> tuple[int, int]:
    """Padding with which a last window that is not full counts, unless it would begin beyond the input."""
    before, after = pads
    outputs = -(-max(size + before + after - kernel, 0) // stride) + 1
    if (outputs - 1) * stride >= size + before:
        outputs -= 1
    return before, max((outputs - 1) * stride + kernel - size - before, after)


def pad(x: Tensor, *, mode: Padding, padding: Sequence[int]) -> Tensor:
    widths = _pairs(padding, x.ndim)
    if mode.case == "constant":
        return graph.pad(x, widths, value=mode.parameter)
    return graph.pad(x, widths, {"reflection": "reflect", "replication": "edge"}[mode.case])


# ---- normalization ---------------------------------------------------------------------------------------------------


def _of_channels(name: str, parameter: Tensor, x: Tensor) -> Tensor:
    """One number for each channel, to be broadcast."""
    channels = x.shape[_CHANNELS] if x.ndim > _CHANNELS else 0
    if parameter.shape != (channels,):
        raise ValueError(f"{name} has shape {list(parameter.shape)}, expected [{channels}], one for each channel")
    return graph.reshape(parameter, (-1, *(1,) * (x.ndim - 2)))


def _affine(weight: Tensor | None, bias: Tensor | None, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    scale = None if weight is None else _of_channels("weight", weight, x)
    return scale, None if bias is None else _of_channels("bias", bias, x)


def batch_norm(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, *, epsilon: float
) -> Tensor:
    center, spread = _of_channels("mean", mean, x), _of_channels("variance", variance, x)
    return graph.normalize(x, center, spread, *_affine(weight, bias, x), epsilon)


def training_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    axes = tuple(axis for axis in range(x.ndim) if axis != _CHANNELS)
    y = graph.batch_norm(x, weight, bias, eps=epsilon)
    return y, graph.mean(x, axes), graph.var(x, axes)


def instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, epsilon: float) -> Tensor:
    _check_space("instanceNorm", x)
    return graph.instance_norm(x, weight, bias, eps=epsilon)


def _check_space(name: str, x: Tensor) -> None:
    if x.ndim < 3:
        raise ValueError(f"{name} needs at least 3 axes, but the tensor has shape {list(x.shape)}")


def channel_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, epsilon: float) -> Tensor:
    _check_space("channelNorm", x)
    last = graph.layer_norm(graph.moveaxis(x, _CHANNELS, -1), weight, bias, eps=epsilon)
    return graph.moveaxis(last, -1, _CHANNELS)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, axes: Sequence[int], epsilon: float) -> Tensor:
    wanted = sorted({axis % x.ndim for axis in axes}) if x.ndim else []
    if not wanted or len(wanted) != len(axes):
        raise ValueError(f"axes is {list(axes)}, must be different axes of a tensor of shape {list(x.shape)}")
    first, trailing = wanted[0], wanted == list(range(wanted[0], x.ndim))
    parameters = [p for p in (weight, bias) if p is not None]
    if trailing and all(p.shape == x.shape[first:] for p in parameters):
        return graph.layer_norm(x, weight, bias, axis=first, eps=epsilon)
    mean, var = graph.mean(x, wanted, keepdims=True), graph.var(x, wanted, keepdims=True)
    return graph.normalize(x, mean, var, *_affine(weight, bias, x), epsilon)


def rms_norm(x: Tensor, scale: Tensor, *, epsilon: float) -> Tensor:
    return graph.rms_norm(x, scale, range(1, x.ndim), epsilon)


def l2_norm(x: Tensor, *, axes: Sequence[int] | None, keepDimensions: bool | None, epsilon: float) -> Tensor:
    if axes is None:
        return graph.l2_normalize(x, range(1, x.ndim), epsilon)
    return graph.l2_norm(x, tuple(axes), keepdims=bool(keepDimensions))


# ---- reductions, order, indices --------------------------------------------------------------------------------------


def reduced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, *, axes: Sequence[int], keepDimensions: bool) -> Tensor:
        return function(x, tuple(axes), keepdims=keepDimensions)

    return call


def arg_reduced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, *, axis: int, keepDimension: bool) -> Tensor:
        found = graph.cast(function(x, axis), _INT32)
        return graph.expand_dims(found, axis) if keepDimension else found

    return call


def arg_sort(x: Tensor, *, axis: int, sortOrder: SortOrder) -> Tensor:
    return graph.cast(graph.argsort(x, axis, descending=sortOrder is SortOrder.descending), _INT32)


def top_k(x: Tensor, *, k: int, axis: int, findLargest: bool) -> tuple[Tensor, Tensor]:
    values, indices = graph.top_k(x, k, axis=axis, largest=findLargest)
    return values, graph.cast(indices, _INT32)


def reshape(x: Tensor, *, to: Sequence[int]) -> Tensor:
    return graph.reshape(x, to)


def reshape_to(x: Tensor, to: Tensor) -> Tensor:
    """With sizes that follow from constants and from tensorShape, which are constants once the shapes are known."""
    if to.ndim != 1 or to.dtype.kind != "i":
        raise TypeError(f"to is {to.spec!r}, must be a vector of integers")
    return graph.reshape(x, _known("to", to).tolist())


def _known(name: str, tensor: Tensor) -> Array:
    """The value of a tensor that depends on constants alone."""
    node = tensor.node
    if node.operation.name == "constant":
        value: Array = node.attributes["value"]
        return value
    if not node.inputs or node.operation.updates:
        raise UnknownValue(f"{name} does not follow from constants and shapes")
    inputs = [None if one is None else _known(name, one) for one in node.inputs]
    return compute(node.operation, inputs, node.attributes)[tensor.index]


def tensor_shape(x: Tensor) -> Tensor:
    return graph.constant(np.array(x.shape, _INT32))


Index = int | tuple[int | None, int | None, int | None]


def _as_index(index: Sequence[Index]) -> tuple[Any, ...]:
    return tuple(part if isinstance(part, int) else slice(*part) for part in index)


def take_slice(x: Tensor, *, index: Sequence[Index]) -> Tensor:
    return graph.take_slice(x, _as_index(index))


def slice_update(x: Tensor, update: Tensor, *, index: Sequence[Index]) -> Tensor:
    # An index of one element leaves its axis out.
    parts = [(i, i + 1 or None, 1) if isinstance(i, int) else i for i in index]
    ahead = x.ndim - len(index)  # axes that are not named
    single = [axis - ahead - len(index) for axis, part in enumerate(index) if isinstance(part, int)]
    wide = graph.expand_dims(update, single) if single and update.ndim else update
    starts, ends, strides = zip(*((a, b, s or 1) for a, b, s in parts), strict=True)
    return graph.slice_update(x, wide, starts, ends, strides)


def gather(x: Tensor, indices: Tensor, *, axis: int, batchDimensionCount: int) -> Tensor:
    return graph.take(x, indices, axis, batchDimensionCount)


def scattered(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, updates: Tensor, indices: Tensor, *, mode: ScatterMode, **axis: int) -> Tensor:
        return function(x, indices, updates, mode="set" if mode is ScatterMode.update else mode.value, **axis)

    return call


def concatenate(*tensors: Tensor, axis: int) -> Tensor:
    return graph.concatenate(tensors, axis)


# ---- recurrent cells -------------------------------------------------------------------------------------------------

_ACTIVATIONS: Final = {
    Activation.hardSigmoid: EngineActivation("hard_sigmoid", 0.2, 0.5),
    Activation.linear: EngineActivation("identity"),
    Activation.relu: EngineActivation("relu"),
    Activation.scaledTanh: EngineActivation("scaled_tanh", 1.0, 1.0),
    Activation.sigmoid: EngineActivation("sigmoid"),
    Activation.tanh: EngineActivation("tanh"),
}


def _gates(stacked: Tensor | None, order: Sequence[int]) -> Tensor | None:
    """Gates in the engine's order."""
    if stacked is None:
        return None
    rows, rest = divmod(stacked.shape[0] if stacked.ndim else 1, len(order))
    if rest:
        raise ValueError(
            f"a weight or bias has shape {list(stacked.shape)}: its rows are not a multiple of {len(order)} gates"
        )
    return graph.concatenate([stacked[gate * rows : (gate + 1) * rows] for gate in order])


def _check_matrices(*tensors: Tensor) -> None:
    if any(one.ndim != 2 for one in tensors):
        shapes = ", ".join(str(list(one.shape)) for one in tensors)
        raise ValueError(f"the initial states and the weights have shapes {shapes}, must be matrices")


def _in_time(x: Tensor, direction: Direction, cell: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What a cell computes, with its output aligned with the input."""
    backward = direction is Direction.reverse
    y, *states = cell(graph.flip(x, 0) if backward else x)
    return (graph.flip(y, 0) if backward else y, *states)


def _outputs(results: tuple[Tensor, ...], outputSequence: bool) -> tuple[Tensor, ...]:
    y, *states = results
    return (y if outputSequence else graph.expand_dims(states[0], 0), *states)


def rnn(
    x: Tensor, h0: Tensor, wx: Tensor, wh: Tensor, b: Tensor | None, *,
    direction: Direction, activation: Activation, outputSequence: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_matrices(h0, wx, wh)
    weights = RnnWeights(wx, wh, b)
    found = _in_time(x, direction, lambda t: graph.rnn(t, weights, h0, activation=_ACTIVATIONS[activation]))
    return _outputs(found, outputSequence)


_LSTM_ORDER: Final = (0, 1, 3, 2)  # Apple's i f o g


def _lstm_weights(*parts: Tensor | None) -> LstmWeights:
    return LstmWeights(*(_gates(part, _LSTM_ORDER) for part in parts))  # type: ignore[arg-type]


def _lstm_activations(activation: Activation, recurrent: Activation, cell: Activation) -> LstmActivations:
    gate = _ACTIVATIONS[recurrent]
    return LstmActivations(gate, gate, _ACTIVATIONS[cell], gate, _ACTIVATIONS[activation])


def lstm(
    x: Tensor, h0: Tensor, c0: Tensor, wx: Tensor, wh: Tensor, b: Tensor | None, *, direction: Direction,
    activation: Activation, recurrentActivation: Activation, cellActivation: Activation, outputSequence: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_matrices(h0, c0, wx, wh)
    weights, chosen = _lstm_weights(wx, wh, b), _lstm_activations(activation, recurrentActivation, cellActivation)
    return _outputs(
        _in_time(x, direction, lambda t: graph.lstm(t, weights, h0, c0, activations=chosen)), outputSequence
    )


def bidirectional_lstm(
    x: Tensor, h0: Tensor, c0: Tensor, wx: Tensor, wh: Tensor, b: Tensor | None, wxb: Tensor, whb: Tensor,
    bb: Tensor | None, *, activation: Activation, recurrentActivation: Activation, cellActivation: Activation,
    outputSequence: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    cells = [_lstm_weights(wx, wh, b), _lstm_weights(wxb, whb, bb)]
    chosen = _lstm_activations(activation, recurrentActivation, cellActivation)
    _check_matrices(h0, c0, wx, wh, wxb, whb)
    units = wh.shape[-1]
    states = [graph.stack([s[:, :units], s[:, units:]]) for s in (h0, c0)]
    y, *last = graph.lstm(x, cells, *states, bidirectional=True, activations=chosen)
    return _outputs((y, *(graph.concatenate([s[0], s[1]], -1) for s in last)), outputSequence)


_GRU_ORDER: Final = (0, 2, 1)  # Apple's r n z


def gru(
    x: Tensor, h0: Tensor, wx: Tensor, wh: Tensor, bias: Tensor | None, inputBias: Tensor | None, *,
    direction: Direction, activation: Activation, recurrentActivation: Activation, applyResetGateAfterMatMul: bool,
    outputSequence: bool, resetsState: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_matrices(h0, wx, wh)
    b, bh, kind = _gates(inputBias, _GRU_ORDER), _gates(bias, _GRU_ORDER), "after"
    if resetsState:
        if applyResetGateAfterMatMul:
            raise ValueError("resetsState is set, and so is applyResetGateAfterMatMul; they exclude each other")
        kind = "before"
    elif not applyResetGateAfterMatMul and bh is not None:
        # As printed: the bias of n is added outside of the reset product, that is, to the input's bias.
        units = wh.shape[-1]
        outside = graph.pad(bh[2 * units :], [(2 * units, 0)])
        b, bh = outside if b is None else b + outside, graph.pad(bh[: 2 * units], [(0, units)])
    gate = _ACTIVATIONS[recurrentActivation]
    chosen = GruActivations(gate, gate, _ACTIVATIONS[activation])
    weights = GruWeights(_gates(wx, _GRU_ORDER), _gates(wh, _GRU_ORDER), b, bh)
    found = _in_time(x, direction, lambda t: graph.gru(t, weights, h0, kind=kind, activations=chosen))
    return _outputs(found, outputSequence)


# ---- losses ----------------------------------------------------------------------------------------------------------


def loss(function: Callable[..., Tensor], **names: str) -> Callable[..., Tensor]:
    def call(x: Tensor, target: Tensor, weights: Tensor | None, *, reduction: Reduction, **options: Any) -> Tensor:
        passed = {names.get(label, label): value for label, value in options.items()}
        if weights is not None and weights.dtype != x.dtype:
            raise TypeError(f"weights has type {weights.dtype.name}, but the tensor has {x.dtype.name}")
        return function(x, target, weights=weights, reduction=reduction.value, **passed)

    return call


def dropout(x: Tensor, seed: Tensor, *, rate: float) -> Tensor:
    return graph.dropout(x, rate, seed=seed)
