"""Swift's functions that gather, scatter, rearrange and compare elements of arrays."""

from __future__ import annotations

import enum

from . import _constants as c
from ._gather import BNNSGather, BNNSGatherND, BNNSScatter, BNNSScatterND
from ._rearrange import BNNSBandPart, BNNSCompareTensor, BNNSShuffle, BNNSTile, BNNSTileBackward
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import check_data, checked_call
from ._swift_functions import ReductionFunction


class RelationalOperator(enum.IntEnum):
    """Comparisons, and logical functions. Names that Python reserves have an underscore."""

    equal = c.BNNSRelationalOperatorEqual
    less = c.BNNSRelationalOperatorLess
    lessEqual = c.BNNSRelationalOperatorLessEqual
    greater = c.BNNSRelationalOperatorGreater
    greaterEqual = c.BNNSRelationalOperatorGreaterEqual
    notEqual = c.BNNSRelationalOperatorNotEqual
    and_ = c.BNNSRelationalOperatorLogicalAND
    or_ = c.BNNSRelationalOperatorLogicalOR
    not_ = c.BNNSRelationalOperatorLogicalNOT
    nand = c.BNNSRelationalOperatorLogicalNAND
    nor = c.BNNSRelationalOperatorLogicalNOR
    xor = c.BNNSRelationalOperatorLogicalXOR


class ShuffleType(enum.IntEnum):
    """Swift's two cases are the pixel shuffle and its inverse, whose channels count blocks fastest."""

    depthToSpaceNCHW = c.BNNSShuffleTypePixelShuffleNCHW
    spaceToDepthNCHW = c.BNNSShuffleTypePixelUnshuffleNCHW


def gather(
    *,
    input: BNNSNDArrayDescriptor,
    indices: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    axis: int,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Copy the elements, or whole slices, that `indices` select along one axis."""
    check_data(input=input, indices=indices, output=output)
    checked_call(BNNSGather, axis, input, indices, output, filterParameters)


def gatherND(
    *,
    input: BNNSNDArrayDescriptor,
    indices: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Copy the elements or slices that vectors of indices select."""
    check_data(input=input, indices=indices, output=output)
    checked_call(BNNSGatherND, input, indices, output, filterParameters)


def _operation(function: ReductionFunction | None) -> int:
    return c.BNNSReduceFunctionNone if function is None else function.function


def scatter(
    *,
    input: BNNSNDArrayDescriptor,
    indices: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    axis: int,
    reductionFunction: ReductionFunction | None = None,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Write elements, or whole slices, to those that `indices` select along one axis, or add them with ``sum``."""
    check_data(input=input, indices=indices, output=output)
    checked_call(BNNSScatter, axis, _operation(reductionFunction), input, indices, output, filterParameters)


def scatterND(
    *,
    input: BNNSNDArrayDescriptor,
    indices: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    reductionFunction: ReductionFunction | None = None,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Write elements or slices to those that vectors of indices select, or add them with ``sum``."""
    check_data(input=input, indices=indices, output=output)
    checked_call(BNNSScatterND, _operation(reductionFunction), input, indices, output, filterParameters)


def tile(
    *,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    filterParameters: BNNSFilterParameters | None = None,
    oppositeAxes: bool = False,
) -> None:
    """Fill an array with copies of another. `oppositeAxes` is `opposite_axes` of the C function."""
    check_data(input=input, output=output)
    checked_call(BNNSTile, input, output, filterParameters, opposite_axes=oppositeAxes)


def tileBackward(
    *,
    outputGradient: BNNSNDArrayDescriptor,
    generatingInputGradient: BNNSNDArrayDescriptor,
    filterParameters: BNNSFilterParameters | None = None,
    oppositeAxes: bool = False,
) -> None:
    """Compute the gradient of :func:`tile`."""
    check_data(outputGradient=outputGradient, generatingInputGradient=generatingInputGradient)
    checked_call(
        BNNSTileBackward, generatingInputGradient, outputGradient, filterParameters, opposite_axes=oppositeAxes
    )


def shuffle(
    shuffleType: ShuffleType,
    *,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Rearrange channels as blocks of pixels, or back."""
    check_data(input=input, output=output)
    checked_call(BNNSShuffle, shuffleType, input, output, filterParameters)


def copyBandPart(
    source: BNNSNDArrayDescriptor,
    *,
    to: BNNSNDArrayDescriptor,
    lowerBandCount: int | None,
    upperBandCount: int | None,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Copy the diagonals of matrices around the main one; None means all of them. Other elements become 0."""
    check_data(source=source, to=to)
    lower, upper = (-1 if count is None else count for count in (lowerBandCount, upperBandCount))
    checked_call(BNNSBandPart, lower, upper, source, to, filterParameters)


def compare(
    inputA: BNNSNDArrayDescriptor,
    inputB: BNNSNDArrayDescriptor | None,
    *,
    using: RelationalOperator,
    output: BNNSNDArrayDescriptor,
) -> None:
    """Compare two arrays elementwise, or combine Boolean ones."""
    check_data(inputA=inputA, inputB=inputB, output=output)
    checked_call(BNNSCompareTensor, inputA, inputB, using, output)
