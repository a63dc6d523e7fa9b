"""Swift's functions of arrays, each a call of one C function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from .. import bnns as c
from . import _swift_values  # noqa: F401  # declares the types of labels
from ._failure import raising
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import Decorator, calls, check_data, checked_call, public


def _with_parameters(function: Callable[..., int], declared: str, passed: str) -> Decorator:
    """Declare a call of a C function whose last argument is that of filters' parameters."""
    return calls(function, f"{declared} filterParameters?", f"{passed} filterParameters")


@calls(
    c.BNNSDirectApplyActivationBatch,
    "activation axes? input output batchSize filterParameters?",
    "layer filterParameters batchSize +input +output",
    layer=c.BNNSLayerParametersActivation,
)
def applyActivation() -> None:
    """Apply an activation to a packed batch, without a layer."""


@public
def clip(*, to: Sequence[float], input: BNNSNDArrayDescriptor, output: BNNSNDArrayDescriptor) -> None:
    """Limit every value to the range `to`, both ends included."""
    check_data(input=input, output=output)
    low, high = to
    checked_call(c.BNNSClipByValue, output, input, low, high)


@calls(c.BNNSClipByNorm, "threshold input output axes?", "output input threshold axes")
def clipByNorm() -> None:
    """Scale an array, or each slice along `axes`, to a norm of at most `threshold`."""


@public
def clipByGlobalNorm(
    *,
    threshold: float,
    inputs: Sequence[BNNSNDArrayDescriptor],
    outputs: Sequence[BNNSNDArrayDescriptor],
    globalNorm: float = 0.0,
) -> None:
    """Scale several arrays by one factor, so that their norm is at most `threshold`."""
    for name, arrays in (("inputs", inputs), ("outputs", outputs)):
        check_data(**{f"{name}[{k}]": array for k, array in enumerate(arrays)})
    count = max(len(inputs), len(outputs))  # if they differ, the call says which has too few
    checked_call(c.BNNSClipByGlobalNorm, outputs, inputs, count, threshold, globalNorm)


@calls(c.BNNSComputeNorm, "input output axes?", f"output input ({c.BNNSL2Norm}) axes")
def computeNorm() -> None:
    """Compute the L2 norms over `axes`, or of the whole array."""


@calls(
    c.BNNSComputeNormBackward,
    "input output axes? outputGradient generatingInputGradient",
    f".input generatingInputGradient .output outputGradient ({c.BNNSL2Norm}) axes",
)
def computeNormBackward() -> None:
    """Compute the gradient of :func:`computeNorm`."""


_quantizer = partial(
    calls,
    c.BNNSDirectApplyQuantizer,
    "batchSize input output axis? scale|None bias|None filterParameters?",
    "layer filterParameters batchSize +input +output",
    data="input output scale bias",
    layer=c.BNNSLayerParametersQuantization,
)


@_quantizer(function=c.BNNSQuantizerFunctionQuantize)
def quantize() -> None:
    """Round ``scale * input + bias`` to integers. `axis` is that of scale and bias; None: they have one element."""


@_quantizer(function=c.BNNSQuantizerFunctionDequantize)
def dequantize() -> None:
    """Compute ``(input - bias) / scale`` of integers."""


@_with_parameters(c.BNNSCopy, "source * to", "to source")
def copy() -> None:
    """Copy an array, converting its type."""


@_with_parameters(
    c.BNNSTranspose,
    "input output firstTransposeAxis secondTransposeAxis",
    "output input firstTransposeAxis secondTransposeAxis",
)
def transpose() -> None:
    """Copy an array with two axes exchanged."""


@calls(
    c.BNNSDirectApplyReduction,
    "function:ReductionFunction * input output weights? filterParameters?",
    "layer filterParameters",
    data="input output",
    layer=c.BNNSLayerParametersReduction,
)
def applyReduction() -> None:
    """Reduce one array into another."""


@_with_parameters(
    c.BNNSMatMul,
    "inputA transposedA=False inputB transposedB=False output alpha workspace=None",
    "transposedA transposedB alpha inputA inputB output workspace",
)
def applyMatrixMultiplication() -> None:
    """Multiply matrices, broadcast over leading axes."""


@public
def matrixMultiplicationWorkspaceSize(
    *,
    inputA: BNNSNDArrayDescriptor,
    transposedA: bool = False,
    inputB: BNNSNDArrayDescriptor,
    transposedB: bool = False,
    output: BNNSNDArrayDescriptor,
    alpha: float,
    filterParameters: BNNSFilterParameters | None = None,
) -> int | None:
    """Return the bytes that the product needs, or None if it would fail."""
    with raising():
        size = c.BNNSMatMulWorkspaceSize(transposedA, transposedB, alpha, inputA, inputB, output, filterParameters)
    return None if size < 0 else size


@_with_parameters(
    c.BNNSDirectApplyTopK,
    "k input bestValues bestIndices axis batchSize",
    "k axis batchSize input+ bestValues+ bestIndices+",
)
def applyTopK() -> None:
    """Find the `k` largest values along an axis of a packed batch, in descending order, and their indices."""


@_with_parameters(
    c.BNNSDirectApplyInTopK, "k input testIndices output axis batchSize", "k axis batchSize input+ testIndices+ output+"
)
def applyInTopK() -> None:
    """Whether the values at `testIndices` are among the `k` largest along an axis of a packed batch."""


@_with_parameters(c.BNNSGather, "input indices output axis", "axis input indices output")
def gather() -> None:
    """Copy the elements, or whole slices, that `indices` select along one axis."""


@_with_parameters(c.BNNSGatherND, "input indices output", "input indices output")
def gatherND() -> None:
    """Copy the elements or slices that vectors of indices select."""


@_with_parameters(
    c.BNNSScatter,
    "input indices output axis reductionFunction:ReductionFunction?",
    "axis reductionFunction input indices output",
)
def scatter() -> None:
    """Write elements, or whole slices, to those that `indices` select along one axis, or add them with ``sum``."""


@_with_parameters(
    c.BNNSScatterND,
    "input indices output reductionFunction:ReductionFunction?",
    "reductionFunction input indices output",
)
def scatterND() -> None:
    """Write elements or slices to those that vectors of indices select, or add them with ``sum``."""


@calls(
    c.BNNSTile,
    "input output filterParameters? oppositeAxes=False",
    "input output filterParameters opposite_axes=oppositeAxes",
)
def tile() -> None:
    """Fill an array with copies of another. `oppositeAxes` is `opposite_axes` of the C function."""


@calls(
    c.BNNSTileBackward,
    "outputGradient generatingInputGradient filterParameters? oppositeAxes=False",
    "generatingInputGradient outputGradient filterParameters opposite_axes=oppositeAxes",
)
def tileBackward() -> None:
    """Compute the gradient of :func:`tile`."""


@_with_parameters(c.BNNSShuffle, "shuffleType:ShuffleType * input output", "shuffleType input output")
def shuffle() -> None:
    """Rearrange channels as blocks of pixels, or back."""


@_with_parameters(
    c.BNNSBandPart, "source * to lowerBandCount|None upperBandCount|None", "lowerBandCount upperBandCount source to"
)
def copyBandPart() -> None:
    """Copy the diagonals of matrices around the main one; None means all of them. Other elements become 0."""


@calls(c.BNNSCompareTensor, "inputA inputB|None * using:RelationalOperator output", "inputA inputB using output")
def compare() -> None:
    """Compare two arrays elementwise, or combine Boolean ones."""
