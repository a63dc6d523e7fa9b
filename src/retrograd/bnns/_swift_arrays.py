"""Swift's functions of whole arrays: clipping, norms and quantization."""

from __future__ import annotations

from collections.abc import Sequence

from . import _constants as c
from ._clipping import (
    BNNSClipByGlobalNorm,
    BNNSClipByNorm,
    BNNSClipByValue,
    BNNSComputeNorm,
    BNNSComputeNormBackward,
)
from ._quantization import BNNSDirectApplyQuantizer, BNNSLayerParametersQuantization
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import axis_flags, batch_stride, check_data, checked_call


def clip(*, to: Sequence[float], input: BNNSNDArrayDescriptor, output: BNNSNDArrayDescriptor) -> None:
    """Limit every value to the range `to`, both ends included."""
    check_data(input=input, output=output)
    low, high = to
    checked_call(BNNSClipByValue, output, input, low, high)


def clipByNorm(
    *,
    threshold: float,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    axes: Sequence[int] | None = None,
) -> None:
    """Scale an array, or each slice along `axes`, to a norm of at most `threshold`."""
    check_data(input=input, output=output)
    checked_call(BNNSClipByNorm, output, input, threshold, axis_flags(axes))


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
    checked_call(BNNSClipByGlobalNorm, outputs, inputs, count, threshold, globalNorm)


def computeNorm(
    *, input: BNNSNDArrayDescriptor, output: BNNSNDArrayDescriptor, axes: Sequence[int] | None = None
) -> None:
    """Compute the L2 norms over `axes`, or of the whole array."""
    check_data(input=input, output=output)
    checked_call(BNNSComputeNorm, output, input, c.BNNSL2Norm, axis_flags(axes))


def computeNormBackward(
    *,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    axes: Sequence[int] | None = None,
    outputGradient: BNNSNDArrayDescriptor,
    generatingInputGradient: BNNSNDArrayDescriptor,
) -> None:
    """Compute the gradient of :func:`computeNorm`."""
    check_data(input=input, output=output, outputGradient=outputGradient)
    check_data(generatingInputGradient=generatingInputGradient)
    checked_call(
        BNNSComputeNormBackward,
        input.data,
        generatingInputGradient,
        output.data,
        outputGradient,
        c.BNNSL2Norm,
        axis_flags(axes),
    )


def quantize(
    *,
    batchSize: int,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    axis: int | None = None,
    scale: BNNSNDArrayDescriptor | None,
    bias: BNNSNDArrayDescriptor | None,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Round ``scale * input + bias`` to integers. `axis` is that of scale and bias; None: they have one element."""
    _quantizer(c.BNNSQuantizerFunctionQuantize, batchSize, input, output, axis, scale, bias, filterParameters)


def dequantize(
    *,
    batchSize: int,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    axis: int | None = None,
    scale: BNNSNDArrayDescriptor | None,
    bias: BNNSNDArrayDescriptor | None,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Compute ``(input - bias) / scale`` of integers."""
    _quantizer(c.BNNSQuantizerFunctionDequantize, batchSize, input, output, axis, scale, bias, filterParameters)


def _quantizer(
    function: int,
    batchSize: int,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    axis: int | None,
    scale: BNNSNDArrayDescriptor | None,
    bias: BNNSNDArrayDescriptor | None,
    filterParameters: BNNSFilterParameters | None,
) -> None:
    check_data(input=input, output=output, scale=scale, bias=bias)
    layer = quantization(function, input, output, axis, scale, bias)
    checked_call(
        BNNSDirectApplyQuantizer, layer, filterParameters, batchSize, batch_stride(input), batch_stride(output)
    )


def quantization(
    function: int,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    axis: int | None,
    scale: BNNSNDArrayDescriptor | None,
    bias: BNNSNDArrayDescriptor | None,
) -> BNNSLayerParametersQuantization:
    """The structure of the C function."""
    empty = BNNSNDArrayDescriptor()
    return BNNSLayerParametersQuantization(
        axis_flags(None if axis is None else [axis]),
        function,
        input,
        output,
        empty if scale is None else scale,
        empty if bias is None else bias,
    )
