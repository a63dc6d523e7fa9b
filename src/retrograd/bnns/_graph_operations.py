"""The operations of ``BNNSGraph.Builder.Tensor``: one table, from which their methods, stub and docs are made.

A row has Swift's name, its labels and the function of retrograd.graph. Labels are declared as ``label:kind``, or
without the kind if it is that of :data:`_KIND_OF`; ``label?`` may be None, and is if it is not given; ``label=0.5`` has
a default; those before a ``*`` have no label in Swift, and may be given by position. Labels of kind ``tensor`` are
operands: tensors, numbers or arrays. The function gets the tensor, the operands in order, and the others by label.
"""

from __future__ import annotations

import ast
import enum
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import graph
from . import _graph_lowering as lowering
from ._graph_lowering import activated, arg_reduced, loss, reduced, renamed, scattered
from ._graph_values import ENUMERATIONS, EPSILON, Case, as_dtype

# ---- kinds of labels ------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What a label takes: its annotation, and what is kept of an argument, or an exception."""

    annotation: Any
    kept: Callable[[Any], Any]


def _number(value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number)):
        raise TypeError("must be a number")
    return float(value)


def _integers(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)):
        raise TypeError("must be integers")
    return tuple(operator.index(one) for one in value)


def _flag(value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError("must be a bool")
    return bool(value)


def _bounds(value: Any) -> tuple[float, float]:
    low, high = value
    if not _number(low) <= _number(high):
        raise ValueError("must be a lower and an upper bound")
    return float(low), float(high)


def _widths(value: Any) -> tuple[int, ...]:
    pairs = [one if isinstance(one, Sequence) else (one,) for one in value]
    return _integers([width for pair in pairs for width in pair])


def _case_of(kind: Any) -> Callable[[Any], Any]:
    def kept(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"must be a {kind.__name__}")
        return value

    return kept


KINDS: Final[dict[str, Kind]] = {
    "tensor": Kind("Operand", None),  # type: ignore[arg-type]  # the builder makes tensors of them
    "int": Kind(int, operator.index),
    "float": Kind(float, _number),
    "bool": Kind(bool, _flag),
    "ints": Kind(Sequence[int], _integers),
    "widths": Kind(Sequence[int], _widths),
    "sizes": Kind("Tensor | Sequence[int]", _integers),  # a tensor is an operand of INTERNAL's reshapeTo
    "bounds": Kind(tuple[float, float], _bounds),
    "dtype": Kind(npt.DTypeLike, as_dtype),
    **{name: Kind(kind, _case_of(kind)) for name, kind in ENUMERATIONS.items()},
}
_KIND_OF: Final = {
    label: kind
    for kind, labels in {
        "int": "axis k groupCount batchDimensionCount",
        "float": "alpha beta epsilon rate delta labelSmoothing",
        "bool": "transpose transposeOther keepDimensions keepDimension findLargest outputSequence resetsState "
        "applyResetGateAfterMatMul",
        "ints": "axes strides dilations outputPaddingValues kernelSize",
        "ConvolutionPadding": "padding",
        "Direction": "direction",
        "Activation": "activation recurrentActivation cellActivation",
        "Reduction": "reduction",
    }.items()
    for label in labels.split()
}


class Label(NamedTuple):
    name: str
    kind: str
    default: Any  # inspect.Parameter.empty: none
    optional: bool
    positional: bool


def _labels(declared: str) -> tuple[Label, ...]:
    found, words = [], declared.split()
    for place, word in enumerate(words):
        if word == "*":
            continue
        label, _, default = word.partition("=")
        optional = label.endswith("?")
        name, _, kind = label.removesuffix("?").partition(":")
        kind = kind or _KIND_OF.get(name, "tensor")
        value: Any = None if optional else inspect.Parameter.empty
        if default == "e0":
            value = EPSILON
        elif default.startswith("."):
            value = getattr(KINDS[kind].annotation, default[1:])
        elif default:
            value = ast.literal_eval(default)
        found.append(Label(name, kind, value, optional, "*" in words[place:]))
    return tuple(found)


# ---- the table ------------------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """A row: an operation of tensors. An operator has the name of Python's."""

    name: str
    group: str
    labels: tuple[Label, ...]
    function: Callable[..., Any]
    doc: str
    results: tuple[str, ...] = ()  # their names, if there are several

    @property
    def operands(self) -> list[Label]:
        return [label for label in self.labels if label.kind == "tensor"]

    @property
    def options(self) -> list[Label]:
        return [label for label in self.labels if label.kind != "tensor"]

    def kept(self, label: Label, value: Any) -> Any:
        """An option as it is recorded; an error names the operation and the label."""
        if value is None and label.optional:
            return None
        try:
            return KINDS[label.kind].kept(value)
        except (TypeError, ValueError) as error:
            what = str(error) if str(error).startswith("must") else f"must be {label.kind}"
            shown = (
                value if isinstance(value, (int, float, str, tuple, list, enum.Enum, Case)) else type(value).__name__
            )
            raise type(error)(f"{self.name}: {label.name} is {shown!r}, {what}") from None


OPERATIONS: Final[dict[str, Operation]] = {}
# Python's operators: of Swift's + - * / .== .!= .< .<= .> .>= .& .| .^ .!
OPERATORS: Final = {
    **{"+": "add", "-": "sub", "*": "mul", "/": "truediv", "==": "eq", "!=": "ne", "<": "lt", "<=": "le"},
    **{">": "gt", ">=": "ge", "&": "and", "|": "or", "^": "xor", "~": "invert"},
}


def _rows(group: str, *rows: tuple[Any, ...]) -> None:
    for name, labels, function, doc, *results in rows:
        names = tuple(results[0].split()) if results else ()
        OPERATIONS[name] = Operation(name, group, _labels(labels), function, doc, names)


_rows(
    "operators",
    *(
        (sign, "y", function, f"``x {sign} y``, broadcast; of one type.")
        for sign, function in {
            "+": graph.add, "-": graph.subtract, "*": graph.multiply, "/": graph.divide,
        }.items()
    ),
    *(
        (sign, "y", function, f"Whether ``x {sign} y``, as Bool.")
        for sign, function in {
            "==": graph.equal, "!=": graph.not_equal, "<": graph.less, "<=": graph.less_equal, ">": graph.greater,
            ">=": graph.greater_equal,
        }.items()
    ),
    ("&", "y", graph.logical_and, "Whether both are true, of Bool."),
    ("|", "y", graph.logical_or, "Whether one is true, of Bool."),
    ("^", "y", graph.logical_xor, "Whether just one is true, of Bool."),
    ("~", "", graph.logical_not, "Whether it is false, of Bool."),
    ("select", "trueValue falseValue *", lowering.select, "The one value where a Bool tensor is true, else the other."),
)  # fmt: skip
_rows(
    "mathematics",
    ("abs", "", graph.absolute, "The absolute value."),
    ("sqrt", "", graph.sqrt, "The square root."),
    ("exp", "", graph.exp, "``e**x``"),
    ("exp2", "", graph.exp2, "``2**x``"),
    ("sin", "", graph.sin, "The sine."),
    ("cos", "", graph.cos, "The cosine."),
    ("tan", "", graph.tan, "The tangent."),
    ("asin", "", graph.arcsin, "The inverse sine."),
    ("acos", "", graph.arccos, "The inverse cosine."),
    ("atan", "", graph.arctan, "The inverse tangent."),
    ("sinh", "", graph.sinh, "The hyperbolic sine."),
    ("cosh", "", graph.cosh, "The hyperbolic cosine."),
    ("tanh", "", graph.tanh, "The hyperbolic tangent."),
    ("asinh", "", graph.arcsinh, "The inverse hyperbolic sine."),
    ("acosh", "", graph.arccosh, "The inverse hyperbolic cosine."),
    ("atanh", "", graph.arctanh, "The inverse hyperbolic tangent."),
    ("erf", "", graph.erf, "The error function."),
    ("floor", "", graph.floor, "The largest integer that is not above x."),
    ("ceil", "", graph.ceil, "The smallest integer that is not below x."),
    ("round", "", graph.round, "The nearest integer; halves to the even one."),
    ("log", "epsilon=e0", lowering.log, "``log(x + epsilon)``; the default is not 0."),
    ("reciprocal", "epsilon=e0", lowering.reciprocal, "``1 / (x + epsilon)``; the default is not 0."),
    ("rsqrt", "epsilon=e0", lowering.rsqrt, "``1 / sqrt(x + epsilon)``; the default is not 0."),
    ("pow", "y", graph.power, "``x**y``"),
    ("max", "y", graph.maximum, "The larger one."),
    ("min", "y", graph.minimum, "The smaller one."),
    ("fma", "y z", graph.fma, "``x * y + z``, rounded once."),
    ("clip", "to:bounds", lowering.clip, "Limited to a range."),
    ("threshold", "to:float", lowering.threshold, "``max(x, to)``"),
    ("cast", "to:dtype", renamed(graph.cast, to="dtype"), "Elements of another type."),
)
_rows(
    "activations",
    ("relu", "", graph.relu, "``max(x, 0)``"),
    ("relu6", "", activated("relu6"), "``min(max(x, 0), 6)``"),
    ("silu", "", graph.silu, "``x * sigmoid(x)``"),
    ("gelu", "", graph.gelu, "x times the probability that a normal variable is below it."),
    ("geluTanhApproximation", "", activated("gelu_tanh"), "GELU, approximated with a hyperbolic tangent."),
    ("geluSigmoidApproximation", "", activated("gelu_sigmoid"), "GELU, approximated with a sigmoid."),
    ("hardSwish", "", activated("hard_swish"), "``x * min(max(x + 3, 0), 6) / 6``"),
    ("sigmoid", "", graph.sigmoid, "``1 / (1 + e**-x)``"),
    ("softsign", "", activated("softsign"), "``x / (1 + |x|)``"),
    ("elu", "alpha", activated("elu"), "x, or ``alpha * (e**x - 1)`` below 0."),
    ("leakyReLU", "alpha=0.01", activated("leaky_relu"), "x, or ``alpha * x`` below 0."),
    ("clampedReLU", "alpha beta", activated("clamped_leaky_relu"), "``min(x, beta)``, or ``alpha * x`` below 0."),
    ("thresholdedReLU", "alpha", lowering.thresholded_relu, "x, or 0 below alpha."),
    ("prelu", "alpha:tensor", lowering.prelu, "x, or ``alpha * x`` below 0, with one alpha for each channel."),
    ("hardSigmoid", "alpha beta", activated("hard_sigmoid"), "``min(max(alpha * x + beta, 0), 1)``"),
    ("scaledTanh", "alpha beta", activated("scaled_tanh"), "``alpha * tanh(beta * x)``"),
    ("softplus", "alpha", lowering.softplus, "``alpha * log(1 + e**x)``"),
    ("softmax", "axis", graph.softmax, "Exponentials that sum to 1 along an axis."),
    ("logSoftmax", "axis", graph.log_softmax, "The logarithm of softmax."),
)
_rows(
    "products and windows",
    ("linear", "weight bias?", graph.linear, "``x @ weight.T + bias``"),
    (
        *("matmul", "transpose=False other transposeOther=False bias?", lowering.matmul),
        "``x @ other + bias``, of matrices; leading axes are broadcast.",
    ),
    (
        *("conv", "weight strides bias? padding dilations? groupCount=1", lowering.conv),
        "A convolution of x (N, C, 1 or 2 spatial axes) with weight (O, C / groups, kernel).",
    ),
    (
        *("convTranspose", "weight strides bias? padding outputPaddingValues? dilations? groupCount=1"),
        *(lowering.conv_transpose, "A transposed convolution, with weight (C, O / groups, kernel)."),
    ),
    (
        *("pooling", "function:PoolingFunction * kernelSize strides padding ceilingMode:CeilingMode=.floor"),
        *(lowering.pooling, "The largest value, the average or the norm of each window."),
    ),
    ("pad", "mode:Padding * padding:widths", lowering.pad, "More elements before and after, in pairs for each axis."),
)
_rows(
    "normalization",
    (
        *("batchNorm", "mean variance weight? bias? epsilon=e0", lowering.batch_norm),
        "``(x - mean) / sqrt(variance + epsilon) * weight + bias``, each with one element for each channel (axis 1).",
    ),
    ("instanceNorm", "weight? bias? epsilon=e0", lowering.instance_norm, "Each channel of a sample, over space."),
    ("channelNorm", "weight? bias? epsilon=e0", lowering.channel_norm, "Each position of a sample, over channels."),
    ("layerNorm", "weight? bias? axes epsilon=e0", lowering.layer_norm, "Over these axes."),
    (
        *("rmsNorm", "scale epsilon=e0", lowering.rms_norm),
        "``x / sqrt(mean(x**2) + epsilon) * scale``, with the mean over all axes but the first.",
    ),
)
_rows(
    "reductions",
    *(
        (name, "axes keepDimensions", reduced(function), f"{doc} over these axes.")
        for name, function, doc in (
            ("sum", graph.sum, "The sum"),
            ("mean", graph.mean, "The mean"),
            ("maximum", graph.max, "The largest"),
            ("minimum", graph.min, "The smallest"),
            ("product", graph.prod, "The product"),
            ("l1Norm", graph.l1_norm, "The sum of absolute values"),
            ("sumOfSquares", graph.sum_of_squares, "The sum of squares"),
            ("logSum", graph.log_sum, "The logarithm of the sum"),
            ("logSumExp", graph.logsumexp, "The logarithm of the sum of exponentials"),
        )
    ),
    (
        *("l2Norm", "axes? keepDimensions? epsilon=e0", lowering.l2_norm),
        "The Euclidean norm over these axes; without them ``x / sqrt(sum(x**2) + epsilon)``, over all but the first.",
    ),
    ("argMax", "axis keepDimension", arg_reduced(graph.argmax), "The index of the largest, as Int32."),
    ("argMin", "axis keepDimension", arg_reduced(graph.argmin), "The index of the smallest, as Int32."),
    ("cumulativeSum", "axis", graph.cumsum, "The sums of the elements up to each."),
    ("argSort", "axis sortOrder:SortOrder", lowering.arg_sort, "The indices of the elements in order, as Int32."),
    (
        *("topK", "k * axis findLargest=True", lowering.top_k),
        *("The k largest or smallest elements in order, and their indices as Int32.", "values indices"),
    ),
)
_rows(
    "shape and indices",
    ("reshape", "to:sizes", lowering.reshape, "The elements in another shape; one size may be -1."),
    ("transpose", "axes", graph.transpose, "The axes in another order."),
    ("squeeze", "axis", graph.squeeze, "Without an axis of size 1."),
    ("unsqueeze", "axis", graph.expand_dims, "With another axis of size 1."),
    ("tensorShape", "", lowering.tensor_shape, "The sizes, as Int32."),
    (
        *("gather", "indices axis batchDimensionCount=0", lowering.gather),
        "The slices that indices select along an axis.",
    ),
    ("gatherAlongAxis", "indices axis", graph.take_along_axis, "The elements that indices select along an axis."),
    (
        *("gatherND", "indices batchDimensionCount=0", renamed(graph.gather_nd, batchDimensionCount="batch_dims")),
        "The elements or slices that vectors of indices, along their last axis, select.",
    ),
    (
        *("scatter", "updates indices mode:ScatterMode axis", scattered(graph.scatter)),
        "The tensor with slices changed at indices along an axis.",
    ),
    (
        *("scatterAlongAxis", "updates indices mode:ScatterMode axis", scattered(graph.scatter_along_axis)),
        "The tensor with elements changed at indices along an axis.",
    ),
    (
        *("scatterND", "updates indices mode:ScatterMode", scattered(graph.scatter_nd)),
        "The tensor with elements or slices changed at vectors of indices.",
    ),
)
_STATES: Final = "inputHiddenWeight hiddenHiddenWeight bias?"
_GATES: Final = "activation recurrentActivation cellActivation outputSequence"
_rows(
    "recurrent cells",
    (
        *("rnn", f"initialHiddenStates {_STATES} direction activation outputSequence", lowering.rnn),
        *("An RNN over x (L, N, I).", "output hiddenStates"),
    ),
    (
        *("lstm", f"initialHiddenStates initialCellStates {_STATES} direction {_GATES}", lowering.lstm),
        *("An LSTM over x (L, N, I), with gates in the order i f o g.", "output hiddenStates cellStates"),
    ),
    (
        "bidirectionalLSTM",
        f"initialHiddenStates initialCellStates {_STATES} inputHiddenWeightBack hiddenHiddenWeightBack biasBack? "
        + _GATES,
        lowering.bidirectional_lstm,
        *("Two LSTMs in opposite directions; states have (N, 2 H).", "output hiddenStates cellStates"),
    ),
    (
        "gru",
        f"initialHiddenStates {_STATES} inputBias? direction activation recurrentActivation applyResetGateAfterMatMul "
        "outputSequence resetsState=False",
        lowering.gru,
        *("A GRU over x (L, N, I), with gates in the order r n z.", "output hiddenStates"),
    ),
)
_LOSS: Final = "target weights? reduction=.mean"
_rows(
    "for training",
    ("meanSquaredError", _LOSS, loss(graph.mean_squared_error), "``(x - target)**2``"),
    ("meanAbsoluteError", _LOSS, loss(graph.mean_absolute_error), "``|x - target|``"),
    ("huber", f"{_LOSS} delta=1.0", loss(graph.huber), "``d**2 / 2`` for a difference up to delta, linear beyond."),
    (
        *("softmaxCrossEntropy", f"{_LOSS} labelSmoothing=0.0"),
        loss(graph.softmax_cross_entropy, labelSmoothing="label_smoothing"),
        "The cross entropy of logits with integer labels, or with probabilities.",
    ),
    (
        *("sigmoidCrossEntropy", f"{_LOSS} labelSmoothing=0.0"),
        loss(graph.sigmoid_cross_entropy, labelSmoothing="label_smoothing"),
        "The cross entropy of logits with probabilities of two classes.",
    ),
    (
        "dropout",
        "seed rate",
        lowering.dropout,
        "A fraction of the elements set to 0; the mask is that of an Int64 seed.",
    ),
    (
        *("trainingBatchNorm", "weight? bias? epsilon=e0", lowering.training_batch_norm),
        *("Normalized by the statistics of the batch, which are returned.", "output mean variance"),
    ),
    ("stopGradient", "", graph.stop_gradient, "The same elements, which no gradient passes."),
)
# What has no method: how the builder's own functions and subscripts are recorded.
INTERNAL: Final[dict[str, Operation]] = {
    name: Operation(name, "internal", (), function, "")
    for name, function in (
        ("concatenate", lowering.concatenate),
        ("reshapeTo", lowering.reshape_to),
        ("slice", lowering.take_slice),
        ("sliceUpdate", lowering.slice_update),
    )
}
