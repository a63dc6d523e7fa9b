"""Every operation of the builder, and its gradients, against PyTorch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from retrograd.bnns import BNNSGraph
from retrograd.bnns._graph_operations import OPERATIONS, OPERATORS
from retrograd.bnns._graph_values import EPSILON as E0
from support.bnns_graph import Array, executed

torch = pytest.importorskip("torch")
F = torch.nn.functional
Builder = BNNSGraph.Builder
RNG = np.random.default_rng(7)


class Case(NamedTuple):
    """Operands, the tensor itself first, the other arguments of the method, and the same in PyTorch."""

    operands: dict[str, Array]
    options: dict[str, Any]
    torch: Callable[..., Any]


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape)


def positive(*shape: int) -> Array:
    return RNG.uniform(0.5, 2.0, shape)


def inside(*shape: int) -> Array:
    return RNG.uniform(-0.9, 0.9, shape)


def case(function: Callable[..., Any], /, *operands: Array, **named: Any) -> Case:
    """Arrays among the named arguments are operands too."""
    arrays = {"": operands[0], **{f"@{i}": a for i, a in enumerate(operands[1:])}}
    arrays |= {k: v for k, v in named.items() if isinstance(v, np.ndarray)}
    return Case(arrays, {k: v for k, v in named.items() if not isinstance(v, np.ndarray)}, function)


X = (3, 4, 5)


def unary(function: Callable[..., Any], x: Array, **options: Any) -> list[Case]:
    return [case(lambda x: function(x), x, **options)]


def binary(function: Callable[..., Any], label: str = "y") -> list[Case]:
    pairs = (
        (normal(*X), normal(*X)),
        (normal(3, 1, 5), normal(4, 1)),
        (normal(0, 4), normal(4)),
        (normal(), normal(1)),
    )
    return [case(lambda x, y: function(x, y), a, **{label: b}) for a, b in pairs]


def operator(function: Callable[..., Any], positive_too: bool = False) -> list[Case]:
    cases = [case(function, normal(*X), positive(*X)), case(function, normal(3, 1, 5), positive(4, 1))]
    return [*cases, case(function, normal(0, 4), positive(4)), case(function, normal(), positive(1))]


def compared(function: Callable[..., Any]) -> list[Case]:
    a, b = RNG.integers(-2, 3, X).astype(float), RNG.integers(-2, 3, X).astype(float)
    return [case(function, a, b), case(function, a, b[0])]


def logical(function: Callable[..., Any]) -> list[Case]:
    return [case(function, RNG.random(X) < 0.5, RNG.random(X) < 0.5)]


def reduced(function: Callable[..., Any], fill: Callable[..., Array] = normal) -> list[Case]:
    return [
        case(lambda x, a=axes, k=keep: function(x, a, k), fill(*X), axes=axes, keepDimensions=keep)
        for axes in ([0], [1, 2], [0, 1, 2], [-1])
        for keep in (True, False)
    ]


def product(x: Any, axes: list[int], keep: bool) -> Any:
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = x.prod(axis, keepdim=True)
    return x if keep else x.reshape([n for i, n in enumerate(x.shape) if i not in {a % 3 for a in axes}])


def l2_over_samples(x: Any) -> Any:
    return x / (x.square().flatten(1).sum(1).reshape(-1, *[1] * (x.ndim - 1)) + E0).sqrt()


def of_channels(p: Any, x: Any) -> Any:
    return p.reshape(-1, *[1] * (x.ndim - 2))


def batch_norm(x: Any, mean: Any, variance: Any, weight: Any = None, bias: Any = None) -> Any:
    y = (x - of_channels(mean, x)) / (of_channels(variance, x) + E0).sqrt()
    y = y if weight is None else y * of_channels(weight, x)
    return y if bias is None else y + of_channels(bias, x)


def normalized(x: Any, axes: list[int], eps: float) -> Any:
    mean = x.mean(axes, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(axes, keepdim=True) + eps).sqrt()


def trained_norm(x: Any, weight: Any = None, bias: Any = None) -> Any:
    axes = [0, *range(2, x.ndim)]
    y = normalized(x, axes, E0)
    y = y if weight is None else y * of_channels(weight, x) + of_channels(bias, x)
    return y, x.mean(axes), x.var(axes, unbiased=False)


def channel_norm(x: Any, weight: Any = None, bias: Any = None) -> Any:
    y = normalized(x, [1], E0)
    return y if weight is None else y * of_channels(weight, x) + of_channels(bias, x)


def convolutions() -> list[Case]:
    padding = Builder.ConvolutionPadding
    cases = []
    for pads, before, after in ((padding.valid, 0, 0), (padding.custom([1, 2]), 1, 2)):
        cases.append(
            case(
                lambda x, weight, bias, b=before, a=after: F.conv1d(F.pad(x, (b, a)), weight, bias, stride=2),
                normal(2, 4, 9), weight=normal(6, 4, 3), bias=normal(6), strides=[2], padding=pads,
            )
        )  # fmt: skip
    # An input of 8 with stride 2 and 3 taps: 4 outputs, one padded element, at the end or at the start.
    for pads, both in ((padding.same, (0, 1, 0, 1)), (padding.lower, (1, 0, 1, 0))):
        cases.append(
            case(
                lambda x, weight, p=both: F.conv2d(F.pad(x, p), weight, stride=2, groups=2),
                normal(2, 4, 8, 8), weight=normal(6, 2, 3, 3), strides=[2, 2], padding=pads, groupCount=2,
            )
        )  # fmt: skip
    cases.append(
        case(
            lambda x, weight: F.conv2d(x, weight, padding=(2, 1), dilation=(2, 1)),
            normal(1, 3, 7, 5), weight=normal(2, 3, 3, 3), strides=[1, 1], padding=padding.same, dilations=[2, 1],
        )
    )  # fmt: skip
    return cases


def transposed_convolutions() -> list[Case]:
    padding = Builder.ConvolutionPadding
    return [
        case(
            lambda x, weight, bias: F.conv_transpose2d(x, weight, bias, stride=2, padding=1, output_padding=1),
            normal(2, 4, 5, 6), weight=normal(4, 3, 3, 3), bias=normal(3), strides=[2, 2],
            padding=padding.custom([1, 1, 1, 1]), outputPaddingValues=[1, 1],
        ),
        case(
            lambda x, weight: F.conv_transpose1d(x, weight, stride=2, padding=1),
            normal(2, 4, 5), weight=normal(4, 3, 4), strides=[2], padding=padding.same,
        ),
        case(
            lambda x, weight: F.conv_transpose1d(x, weight, groups=2),
            normal(2, 4, 5), weight=normal(4, 3, 4), strides=[1], padding=padding.valid, groupCount=2,
        ),
    ]  # fmt: skip


def poolings() -> list[Case]:
    kinds, pads, mode = Builder.PoolingFunction, Builder.PoolingPadding, Builder.CeilingMode
    one = {"kernelSize": [3, 3], "strides": [2, 2], "padding": pads.custom([1, 1, 1, 1])}
    return [
        case(lambda x: F.max_pool2d(x, 3, 2, 1), normal(2, 3, 8, 7), function=kinds.max, **one),
        case(
            lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), normal(2, 3, 8, 7), function=kinds.max, kernelSize=[3, 3],
            strides=[2, 2], padding=pads.valid, ceilingMode=mode.ceiling,
        ),
        case(lambda x: F.avg_pool2d(x, 3, 2, 1), normal(2, 3, 8, 7), function=kinds.average(True), **one),
        case(
            lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), normal(2, 3, 8, 7),
            function=kinds.average(includePadding=False), **one,
        ),
        case(
            lambda x: F.avg_pool1d(x.square(), 3, 2).mul(3).sqrt(), normal(2, 3, 8), function=kinds.l2Norm,
            kernelSize=[3], strides=[2], padding=pads.valid,
        ),
    ]  # fmt: skip


def cell(kind: Any, reverse: bool, outputs: bool, weights: list[Any], states: list[Any], x: Any) -> Any:
    """PyTorch's recurrent layer with these weights, aligned with the input."""
    layer = kind(x.shape[-1], weights[1].shape[-1], bias=len(weights) > 2).double()
    layer = layer if kind is not torch.nn.RNN else torch.nn.RNN(x.shape[-1], weights[1].shape[-1]).double()
    names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
    given = x.flip(0) if reverse else x
    start = [s[None] for s in states]
    parameters = dict(zip(names, weights, strict=False))
    y, last = torch.func.functional_call(layer, parameters, (given, tuple(start) if len(start) == 2 else start[0]))
    ends = [s[0] for s in (last if isinstance(last, tuple) else (last,))]
    return (y.flip(0) if reverse else y) if outputs else ends[0][None], *ends


def rnns() -> list[Case]:
    def run(
        x: Any, initialHiddenStates: Any, inputHiddenWeight: Any, hiddenHiddenWeight: Any, bias: Any, r: bool, o: bool
    ) -> Any:
        weights = [inputHiddenWeight, hiddenHiddenWeight, bias, torch.zeros_like(bias)]
        return cell(torch.nn.RNN, r, o, weights, [initialHiddenStates], x)

    return [
        case(
            lambda x, r=reverse, o=outputs, **a: run(x, r=r, o=o, **a), normal(5, 2, 3),
            initialHiddenStates=normal(2, 4),
            inputHiddenWeight=normal(4, 3), hiddenHiddenWeight=normal(4, 4), bias=normal(4),
            direction=Builder.Direction.reverse if reverse else Builder.Direction.forward,
            activation=Builder.Activation.tanh, outputSequence=outputs,
        )
        for reverse, outputs in ((False, True), (True, True), (True, False))
    ]  # fmt: skip


def gates(a: Any, order: list[int]) -> Any:
    parts = a.chunk(len(order))
    return torch.cat([parts[i] for i in order])


def lstm(x: Any, h: Any, c: Any, wx: Any, wh: Any, b: Any, reverse: bool, outputs: bool) -> Any:
    order = [0, 1, 3, 2]  # from i f o g
    weights = [gates(wx, order), gates(wh, order), gates(b, order), torch.zeros_like(b)]
    return cell(torch.nn.LSTM, reverse, outputs, weights, [h, c], x)


GATES = {
    "activation": Builder.Activation.tanh, "recurrentActivation": Builder.Activation.sigmoid,
    "cellActivation": Builder.Activation.tanh,
}  # fmt: skip


def lstms() -> list[Case]:
    def run(
        x: Any,
        initialHiddenStates: Any,
        initialCellStates: Any,
        inputHiddenWeight: Any,
        hiddenHiddenWeight: Any,
        bias: Any,
        r: bool,
        o: bool,
    ) -> Any:
        weights = inputHiddenWeight, hiddenHiddenWeight, bias
        return lstm(x, initialHiddenStates, initialCellStates, *weights, r, o)

    return [
        case(
            lambda x, r=reverse, o=outputs, **a: run(x, r=r, o=o, **a), normal(5, 2, 3),
            initialHiddenStates=normal(2, 4),
            initialCellStates=normal(2, 4), inputHiddenWeight=normal(16, 3), hiddenHiddenWeight=normal(16, 4),
            bias=normal(16), direction=Builder.Direction.reverse if reverse else Builder.Direction.forward,
            outputSequence=outputs, **GATES,
        )
        for reverse, outputs in ((False, True), (True, True), (False, False))
    ]  # fmt: skip


def both_lstms() -> list[Case]:
    def run(
        x: Any,
        initialHiddenStates: Any,
        initialCellStates: Any,
        inputHiddenWeight: Any,
        hiddenHiddenWeight: Any,
        bias: Any,
        inputHiddenWeightBack: Any,
        hiddenHiddenWeightBack: Any,
        biasBack: Any,
        o: bool,
    ) -> Any:
        h, c = initialHiddenStates.chunk(2, -1), initialCellStates.chunk(2, -1)
        first = lstm(x, h[0], c[0], inputHiddenWeight, hiddenHiddenWeight, bias, False, o)
        back = lstm(x, h[1], c[1], inputHiddenWeightBack, hiddenHiddenWeightBack, biasBack, True, o)
        return tuple(torch.cat(pair, -1) for pair in zip(first, back, strict=True))

    return [
        case(
            lambda x, o=outputs, **a: run(x, o=o, **a), normal(5, 2, 3), initialHiddenStates=normal(2, 8),
            initialCellStates=normal(2, 8), inputHiddenWeight=normal(16, 3), hiddenHiddenWeight=normal(16, 4),
            bias=normal(16), inputHiddenWeightBack=normal(16, 3), hiddenHiddenWeightBack=normal(16, 4),
            biasBack=normal(16), outputSequence=outputs, **GATES,
        )
        for outputs in (True, False)
    ]  # fmt: skip


def gru_steps(x: Any, h: Any, wx: Any, wh: Any, bias: Any, b: Any, kind: str) -> Any:
    """As the pages print it, gates r n z."""
    (wr, wn, wz), (rr, rn, rz), (cr, cn, cz), (br, bn, bz) = (a.chunk(3) for a in (wx, wh, bias, b))
    outputs = []
    for step in x:
        r = torch.sigmoid(step @ wr.T + br + h @ rr.T + cr)
        z = torch.sigmoid(step @ wz.T + bz + h @ rz.T + cz)
        if kind == "after":
            n = torch.tanh(step @ wn.T + bn + r * (h @ rn.T + cn))
        elif kind == "printed":
            n = torch.tanh(step @ wn.T + bn + r * (h @ rn.T) + cn)
        else:
            n = torch.tanh(step @ wn.T + bn + (r * h) @ rn.T + cn)
        h = (1 - z) * n + z * h
        outputs.append(h)
    return torch.stack(outputs), h


def grus() -> list[Case]:
    def run(
        x: Any,
        initialHiddenStates: Any,
        inputHiddenWeight: Any,
        hiddenHiddenWeight: Any,
        bias: Any,
        inputBias: Any,
        k: str,
    ) -> Any:
        return gru_steps(x, initialHiddenStates, inputHiddenWeight, hiddenHiddenWeight, bias, inputBias, k)

    return [
        case(
            lambda x, k=kind, **a: run(x, k=k, **a), normal(5, 2, 3), initialHiddenStates=normal(2, 4),
            inputHiddenWeight=normal(12, 3), hiddenHiddenWeight=normal(12, 4), bias=normal(12), inputBias=normal(12),
            direction=Builder.Direction.forward, activation=Builder.Activation.tanh,
            recurrentActivation=Builder.Activation.sigmoid, applyResetGateAfterMatMul=kind == "after",
            outputSequence=True, resetsState=kind == "before",
        )
        for kind in ("after", "printed", "before")
    ]  # fmt: skip


def scattered(name: str) -> list[Case]:
    modes, rows = Builder.ScatterMode, np.array([2, 0, 3], np.int32)
    cases = []
    for mode, change in (
        (modes.add, lambda a, u: a + u),
        (modes.subtract, lambda a, u: a - u),
        (modes.multiply, lambda a, u: a * u),
        (modes.divide, lambda a, u: a / u),
        (modes.maximum, torch.maximum),
        (modes.minimum, torch.minimum),
        (modes.update, lambda a, u: u),
    ):
        if name == "scatter":

            def run(x: Any, updates: Any, indices: Any, c: Any = change) -> Any:
                y = x.clone()
                y[:, indices.long()] = c(x[:, indices.long()], updates)
                return y

            cases.append(case(run, normal(3, 5, 2), updates=positive(3, 3, 2), indices=rows, mode=mode, axis=1))
        elif name == "scatterAlongAxis":
            index = np.stack([RNG.permutation(5)[:3] for _ in range(3)]).astype(np.int32)

            def run(x: Any, updates: Any, indices: Any, c: Any = change) -> Any:
                return x.scatter(1, indices.long(), c(x.gather(1, indices.long()), updates))

            cases.append(case(run, normal(3, 5), updates=positive(3, 3), indices=index, mode=mode, axis=1))
        else:
            vectors = np.array([[0, 1], [2, 4], [1, 1]], np.int32)

            def run(x: Any, updates: Any, indices: Any, c: Any = change) -> Any:
                at = tuple(indices.long().T)
                y = x.clone()
                y[at] = c(x[at], updates)
                return y

            cases.append(case(run, normal(3, 5, 2), updates=positive(3, 2), indices=vectors, mode=mode))
    return cases


def losses(function: Callable[..., Any], **options: Any) -> list[Case]:
    return [
        case(
            lambda x, target, r=reduction: function(x, target, reduction=r.value), normal(4, 3), target=inside(4, 3),
            reduction=reduction, **options,
        )
        for reduction in BNNSGraph.Builder.Reduction
    ]  # fmt: skip


def quantized(function: Callable[..., Any]) -> list[Case]:
    return [case(function, normal(*X) * 3), case(function, np.array([-2.5, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5]))]


CASES: dict[str, list[Case]] = {
    "+": operator(lambda x, y: x + y),
    "-": operator(lambda x, y: x - y),
    "*": operator(lambda x, y: x * y),
    "/": operator(lambda x, y: x / y),
    "==": compared(lambda x, y: x == y),
    "!=": compared(lambda x, y: x != y),
    "<": compared(lambda x, y: x < y),
    "<=": compared(lambda x, y: x <= y),
    ">": compared(lambda x, y: x > y),
    ">=": compared(lambda x, y: x >= y),
    "&": logical(lambda x, y: x & y),
    "|": logical(lambda x, y: x | y),
    "^": logical(lambda x, y: x ^ y),
    "~": [case(lambda x: ~x, RNG.random(X) < 0.5)],
    "select": [case(torch.where, RNG.random(X) < 0.5, normal(*X), normal(5))],
    "abs": unary(torch.abs, normal(*X)),
    "sqrt": unary(torch.sqrt, positive(*X)),
    "exp": unary(torch.exp, normal(*X)),
    "exp2": unary(torch.exp2, normal(*X)),
    **{name: unary(getattr(torch, name), normal(*X)) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "erf")},
    **{name: unary(getattr(torch, name), inside(*X)) for name in ("asin", "acos", "atanh")},
    "atan": unary(torch.atan, normal(*X)),
    "asinh": unary(torch.asinh, normal(*X)),
    "acosh": unary(torch.acosh, positive(*X) + 1),
    "floor": quantized(torch.floor),
    "ceil": quantized(torch.ceil),
    "round": quantized(torch.round),
    "log": [*unary(lambda x: torch.log(x + E0), positive(*X)), *unary(torch.log, positive(3), epsilon=0.0)],
    "reciprocal": [*unary(lambda x: 1 / (x + E0), positive(*X)), *unary(torch.reciprocal, positive(3), epsilon=0)],
    "rsqrt": [*unary(lambda x: (x + E0).rsqrt(), positive(*X)), *unary(torch.rsqrt, positive(3), epsilon=0.0)],
    "pow": [case(lambda x, y: x**y, positive(*X), y=normal(*X)), case(lambda x: x**3, normal(4), y=3)],
    "max": binary(torch.maximum),
    "min": binary(torch.minimum),
    "fma": [case(lambda x, y, z: x * y + z, normal(*X), y=normal(*X), z=normal(5))],
    "clip": unary(lambda x: x.clip(-0.5, 1), normal(*X), to=(-0.5, 1)),
    "threshold": unary(lambda x: x.clip(0.25), normal(*X), to=0.25),
    "cast": [
        case(lambda x: x.to(torch.int32), normal(*X) * 9, to=np.int32),
        case(lambda x: x.bool(), np.arange(3.0), to=bool),
    ],
    "relu": unary(F.relu, normal(*X)),
    "relu6": unary(F.relu6, normal(*X) * 5),
    "silu": unary(F.silu, normal(*X)),
    "gelu": unary(F.gelu, normal(*X)),
    "geluTanhApproximation": unary(lambda x: F.gelu(x, approximate="tanh"), normal(*X)),
    "geluSigmoidApproximation": unary(lambda x: x * torch.sigmoid(1.702 * x), normal(*X)),
    "hardSwish": unary(F.hardswish, normal(*X) * 3),
    "sigmoid": unary(torch.sigmoid, normal(*X)),
    "softsign": unary(F.softsign, normal(*X)),
    "elu": unary(lambda x: F.elu(x, 0.7), normal(*X), alpha=0.7),
    "leakyReLU": [*unary(F.leaky_relu, normal(*X)), *unary(lambda x: F.leaky_relu(x, 0.3), normal(*X), alpha=0.3)],
    "clampedReLU": unary(lambda x: F.leaky_relu(x, 0.2).clip(max=0.9), normal(*X), alpha=0.2, beta=0.9),
    "thresholdedReLU": unary(lambda x: torch.where(x >= 0.4, x, 0.0), normal(*X), alpha=0.4),
    "prelu": [case(lambda x, alpha: F.prelu(x, alpha), normal(*X), alpha=positive(4))],
    "hardSigmoid": unary(lambda x: (0.3 * x + 0.4).clip(0, 1), normal(*X) * 2, alpha=0.3, beta=0.4),
    "scaledTanh": unary(lambda x: 1.7 * torch.tanh(0.6 * x), normal(*X), alpha=1.7, beta=0.6),
    "softplus": unary(lambda x: 1.5 * F.softplus(x), normal(*X), alpha=1.5),
    "softmax": [case(lambda x, a=axis: x.softmax(a), normal(*X), axis=axis) for axis in (0, 1, -1)],
    "logSoftmax": [case(lambda x, a=axis: x.log_softmax(a), normal(*X), axis=axis) for axis in (0, 2)],
    "linear": [
        case(lambda x, weight, bias: F.linear(x, weight, bias), normal(*X), weight=normal(6, 5), bias=normal(6)),
        case(lambda x, weight: F.linear(x, weight), normal(2, 5), weight=normal(1, 5)),
    ],
    "matmul": [
        case(lambda x, other: x @ other, normal(2, 3, 4), other=normal(4, 5)),
        case(
            lambda x, other, bias: x.mT @ other.mT + bias, normal(2, 4, 3), other=normal(2, 5, 4), bias=normal(5),
            transpose=True, transposeOther=True,
        ),
        case(lambda x, other: x @ other, normal(2, 1, 3, 4), other=normal(5, 4, 2)),
    ],
    "conv": convolutions(),
    "convTranspose": transposed_convolutions(),
    "pooling": poolings(),
    "pad": [
        case(
            lambda x: F.pad(x, (2, 0, 1, 3), value=0.5), normal(3, 4), mode=Builder.Padding.constant(0.5),
            padding=[1, 3, 2, 0],
        ),
        case(
            lambda x: F.pad(x, (2, 1), "reflect"), normal(2, 3, 4), mode=Builder.Padding.reflection,
            padding=[[0, 0], [0, 0], [2, 1]],
        ),
        case(
            lambda x: F.pad(x, (2, 1), "replicate"), normal(2, 3, 4), mode=Builder.Padding.replication,
            padding=[0, 0, 0, 0, 2, 1],
        ),
    ],
    "batchNorm": [
        case(batch_norm, normal(2, 3, 4), mean=normal(3), variance=positive(3), weight=normal(3), bias=normal(3)),
        case(batch_norm, normal(2, 3), mean=normal(3), variance=positive(3)),
    ],
    "instanceNorm": [
        case(
            lambda x, weight, bias: F.instance_norm(x, weight=weight, bias=bias, eps=E0), normal(2, 3, 4, 2),
            weight=normal(3), bias=normal(3),
        ),
        case(lambda x: F.instance_norm(x, eps=E0), normal(2, 3, 4)),
    ],
    "channelNorm": [
        case(channel_norm, normal(2, 3, 4, 2), weight=normal(3), bias=normal(3)), case(channel_norm, normal(2, 3, 4)),
    ],
    "layerNorm": [
        case(
            lambda x, weight, bias: F.layer_norm(x, (5,), weight, bias, E0), normal(*X), weight=normal(5),
            bias=normal(5), axes=[-1],
        ),
        case(lambda x: F.layer_norm(x, (4, 5), eps=E0), normal(*X), axes=[1, 2]),
        case(lambda x: normalized(x, [0, 2], 0.1), normal(*X), axes=[0, 2], epsilon=0.1),
        case(
            lambda x, weight, bias: normalized(x, [1, 2], E0) * of_channels(weight, x) + of_channels(bias, x),
            normal(*X), weight=normal(4), bias=normal(4), axes=[1, 2],
        ),
    ],
    "rmsNorm": [
        case(
            lambda x, scale: x / (x.square().mean((1, 2), keepdim=True) + E0).sqrt() * scale, normal(*X),
            scale=normal(5),
        )
    ],
    "sum": reduced(lambda x, a, k: x.sum(a, k)),
    "mean": reduced(lambda x, a, k: x.mean(a, k)),
    "maximum": reduced(lambda x, a, k: x.amax(a, k)),
    "minimum": reduced(lambda x, a, k: x.amin(a, k)),
    "product": reduced(product),
    "l1Norm": reduced(lambda x, a, k: x.abs().sum(a, k)),
    "l2Norm": [*reduced(lambda x, a, k: x.square().sum(a, k).sqrt()), case(l2_over_samples, normal(*X))],
    "sumOfSquares": reduced(lambda x, a, k: x.square().sum(a, k)),
    "logSum": reduced(lambda x, a, k: x.sum(a, k).log(), positive),
    "logSumExp": reduced(lambda x, a, k: x.logsumexp(a, k)),
    "argMax": [
        case(lambda x, k=keep: x.argmax(1, k).int(), normal(*X), axis=1, keepDimension=keep) for keep in (True, False)
    ],
    "argMin": [case(lambda x: x.argmin(-1).int(), normal(*X), axis=-1, keepDimension=False)],
    "cumulativeSum": [case(lambda x, a=axis: x.cumsum(a), normal(*X), axis=axis) for axis in (0, -1)],
    "argSort": [
        case(lambda x, d=down: x.argsort(dim=1, descending=d, stable=True).int(), normal(*X), axis=1, sortOrder=order)
        for down, order in ((False, Builder.SortOrder.ascending), (True, Builder.SortOrder.descending))
    ],
    "topK": [
        case(lambda x, up=largest: (x.topk(2, 1, up)[0], x.topk(2, 1, up)[1].int()), normal(*X), k=2, axis=1,
            findLargest=largest)
        for largest in (True, False)
    ],
    "reshape": [case(lambda x: x.reshape(2, 30), normal(*X), to=[2, -1])],
    "transpose": [case(lambda x: x.permute(2, 0, 1), normal(*X), axes=[2, 0, 1])],
    "squeeze": [case(lambda x: x.squeeze(1), normal(3, 1, 5), axis=1)],
    "unsqueeze": [case(lambda x: x.unsqueeze(-1), normal(*X), axis=-1)],
    "tensorShape": [case(lambda x: torch.tensor(x.shape, dtype=torch.int32), normal(*X))],
    "gather": [
        case(lambda x, indices: x[:, indices.long()], normal(*X), indices=np.array([[1, 3, 1]], np.int32), axis=1),
        case(
            lambda x, indices: torch.stack([a[:, i.long()] for a, i in zip(x, indices, strict=True)]), normal(3, 2, 4),
            indices=np.array([[1, 3], [0, 0], [2, 1]], np.int32), axis=2, batchDimensionCount=1,
        ),
    ],
    "gatherAlongAxis": [
        case(
            lambda x, indices: x.gather(1, indices.long()), normal(3, 4), indices=np.array([[1, 3]] * 3, np.int32),
            axis=1,
        )
    ],
    "gatherND": [
        case(
            lambda x, indices: x[tuple(indices.long().T)], normal(*X),
            indices=np.array([[0, 1], [2, 3], [0, 1]], np.int32),
        )
    ],
    "scatter": scattered("scatter"),
    "scatterAlongAxis": scattered("scatterAlongAxis"),
    "scatterND": scattered("scatterND"),
    "rnn": rnns(),
    "lstm": lstms(),
    "bidirectionalLSTM": both_lstms(),
    "gru": grus(),
    "meanSquaredError": losses(F.mse_loss),
    "meanAbsoluteError": losses(F.l1_loss),
    "huber": losses(lambda x, t, reduction: F.huber_loss(x, t, reduction=reduction, delta=0.4), delta=0.4),
    "softmaxCrossEntropy": [
        case(lambda x, target: F.cross_entropy(x, target.long()), normal(4, 3), target=np.array([0, 2, 1, 1])),
        case(
            lambda x, target: F.cross_entropy(x, target.long(), label_smoothing=0.1, reduction="sum"), normal(4, 3),
            target=np.array([0, 2, 1, 1]), labelSmoothing=0.1, reduction=Builder.Reduction.sum,
        ),
    ],
    "sigmoidCrossEntropy": [
        case(lambda x, target: F.binary_cross_entropy_with_logits(x, target), normal(4, 3), target=positive(4, 3) / 2)
    ],
    "dropout": [case(lambda x, seed: x * 0 + x, normal(4, 3), seed=np.array(3), rate=0.0)],
    "trainingBatchNorm": [
        case(trained_norm, normal(4, 3, 2), weight=normal(3), bias=normal(3)), case(trained_norm, normal(4, 3)),
    ],
    "stopGradient": [case(lambda x: x.detach(), normal(3))],
}  # fmt: skip
ALL = [pytest.param(name, one, id=f"{name}-{i}") for name, cases in CASES.items() for i, one in enumerate(cases)]
SYMBOLS = {sign: f"__{name}__" for sign, name in OPERATORS.items()}
BY_POSITION = {"topK": ["k"], "pooling": ["function"], "pad": ["mode"]}


def test_every_operation_has_cases() -> None:
    assert set(CASES) == set(OPERATIONS)


@pytest.mark.parametrize(("name", "one"), ALL)
def test_an_operation_and_its_gradients_are_those_of_pytorch(name: str, one: Case) -> None:
    arrays = list(one.operands.values())
    floats = [i for i, array in enumerate(arrays) if array.dtype.kind == "f"]
    tensors = [torch.tensor(array, requires_grad=i in floats) for i, array in enumerate(arrays)]
    labels = list(one.operands)
    named = {label: t for label, t in zip(labels, tensors, strict=True) if label and label[0] != "@"}
    others = [t for label, t in zip(labels, tensors, strict=True) if label.startswith("@")]
    wanted = one.torch(tensors[0], *others, **named)
    results = list(wanted) if isinstance(wanted, tuple) else [wanted]
    depends = [i for i in floats if results[0].requires_grad]
    if name == "sigmoidCrossEntropy":  # not of the target
        depends = depends[:1]
    weights = [RNG.standard_normal(r.shape) if r.is_floating_point() else None for r in results]
    given: list[Any] = []
    if depends:
        total = sum((r * torch.tensor(w)).sum() for r, w in zip(results, weights, strict=True) if w is not None)
        given = list(
            torch.autograd.grad(total, [tensors[i] for i in depends], allow_unused=True, materialize_grads=True)
        )

    def block(builder: Any, *x: Any) -> list[Any]:
        passed = {label: t for label, t in zip(labels, x, strict=True) if label and label[0] != "@"} | one.options
        first = [t for label, t in zip(labels, x, strict=True) if label.startswith("@")]
        first += [passed.pop(label) for label in BY_POSITION.get(name, ())]
        found = getattr(x[0], SYMBOLS.get(name, name))(*first, **passed)
        outputs = list(found) if isinstance(found, tuple) else [found]
        if depends:
            parts = [
                (o * builder.constant(values=w)).sum(axes=range(w.ndim), keepDimensions=False) if w.ndim else o * w
                for o, w in zip(outputs, weights, strict=True)
                if w is not None
            ]
            loss = parts[0]
            for part in parts[1:]:
                loss = loss + part
            outputs += builder.gradient(of=loss, withRespectTo=[x[i] for i in depends])
        return outputs

    found = executed(block, arrays)
    for result, expected in zip(found, [*results, *given], strict=True):
        array = expected.detach().numpy()
        assert result.dtype == array.dtype
        assert result.shape == array.shape
        np.testing.assert_allclose(result, array, rtol=1e-9, atol=1e-11)


def test_reshape_to_sizes_that_follow_from_shapes(tmp_path: Path) -> None:
    def build(builder: Any) -> Any:
        x = builder.argument(name="x", dataType=float, shape=[-1, 4, 3])
        shape = x.tensorShape()
        rows = shape[0:1] * shape[1:2]
        y = x.reshape(to=builder.concatenate([rows, builder.constant(values=np.array([-1], np.int32))], axis=0))
        return [y, *builder.gradient(of=y * y, withRespectTo=[x])]

    context, path = BNNSGraph.makeContext(build), tmp_path / "graph"
    context.write(to=path)
    for one in (context, BNNSGraph.Context(compileFromPath=path)):
        for count in (2, 5):
            x = np.arange(12 * count, dtype=np.float32).reshape(count, 4, 3)
            y, dx = np.zeros((4 * count, 3), np.float32), np.zeros_like(x)
            one.executeFunction(arguments=[y, dx, x])
            np.testing.assert_array_equal(y, x.reshape(-1, 3))
            np.testing.assert_array_equal(dx, 2 * x)


def test_reshape_to_sizes_that_are_data_is_refused() -> None:
    with pytest.raises(ValueError, match="to does not follow from constants and shapes"):
        executed(lambda builder, x, to: x.reshape(to=to), [np.zeros(6, np.float32), np.array([2, 3], np.int32)])
    with pytest.raises(TypeError, match="vector of integers"):
        executed(lambda builder, x, to: x.reshape(to=to), [np.zeros(6, np.float32), np.zeros(2, np.float32)])


def test_epsilon_is_not_zero() -> None:
    assert math.isclose(E0, math.sqrt(np.finfo(np.float32).eps), rel_tol=1e-7)
    (y,) = executed(lambda builder, x: x.reciprocal(), [np.zeros(1, np.float32)])
    assert math.isclose(y[0], 1 / E0, rel_tol=1e-6)
