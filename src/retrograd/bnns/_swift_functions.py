"""Swift's functions of arrays, each a call of one C function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from .. import bnns as c
from . import _swift_values  # noqa: F401  # declares the types of labels
from ._failure import raising
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import calls, check_data, checked_call, public


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


@calls(c.BNNSCopy, "source * to filterParameters?", "to source filterParameters")
def copy() -> None:
    """Copy an array, converting its type."""


@calls(
    c.BNNSTranspose,
    "input output firstTransposeAxis secondTransposeAxis filterParameters?",
    "output input firstTransposeAxis secondTransposeAxis filterParameters",
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


@calls(
    c.BNNSMatMul,
    "inputA transposedA=False inputB transposedB=False output alpha workspace=None filterParameters?",
    "transposedA transposedB alpha inputA inputB output workspace filterParameters",
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


@calls(
    c.BNNSDirectApplyTopK,
    "k input bestValues bestIndices axis batchSize filterParameters?",
    "k axis batchSize input+ bestValues+ bestIndices+ filterParameters",
)
def applyTopK() -> None:
    """Find the `k` largest values along an axis of a packed batch, in descending order, and their indices."""


@calls(
    c.BNNSDirectApplyInTopK,
    "k input testIndices output axis batchSize filterParameters?",
    "k axis batchSize input+ testIndices+ output+ filterParameters",
)
def applyInTopK() -> None:
    """Whether the values at `testIndices` are among the `k` largest along an axis of a packed batch."""


@calls(c.BNNSGather, "input indices output axis filterParameters?", "axis input indices output filterParameters")
def gather() -> None:
    """Copy the elements, or whole slices, that `indices` select along one axis."""


@calls(c.BNNSGatherND, "input indices output filterParameters?", "input indices output filterParameters")
def gatherND() -> None:
    """Copy the elements or slices that vectors of indices select."""


@calls(
    c.BNNSScatter,
    "input indices output axis reductionFunction:ReductionFunction? filterParameters?",
    "axis reductionFunction input indices output filterParameters",
)
def scatter() -> None:
    """Write elements, or whole slices, to those that `indices` select along one axis, or add them with ``sum``."""


@calls(
    c.BNNSScatterND,
    "input indices output reductionFunction:ReductionFunction? filterParameters?",
    "reductionFunction input indices output filterParameters",
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


@calls(
    c.BNNSShuffle,
    "shuffleType:ShuffleType * input output filterParameters?",
    "shuffleType input output filterParameters",
)
def shuffle() -> None:
    """Rearrange channels as blocks of pixels, or back."""


@calls(
    c.BNNSBandPart,
    "source * to lowerBandCount|None upperBandCount|None filterParameters?",
    "lowerBandCount upperBandCount source to filterParameters",
)
def copyBandPart() -> None:
    """Copy the diagonals of matrices around the main one; None means all of them. Other elements become 0."""


@calls(c.BNNSCompareTensor, "inputA inputB|None * using:RelationalOperator output", "inputA inputB using output")
def compare() -> None:
    """Compare two arrays elementwise, or combine Boolean ones."""
