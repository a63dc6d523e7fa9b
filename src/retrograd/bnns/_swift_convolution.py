"""Swift's ``BNNS.ConvolutionLayer`` and its types."""

from __future__ import annotations

from enum import Enum

from ._convolution import (
    BNNSFilterCreateLayerConvolution,
    BNNSFilterCreateLayerTransposedConvolution,
    BNNSLayerParametersConvolution,
)
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import ActivationFunction
from ._swift_layers import UnaryLayer
from ._swift_pooling import ConvolutionPadding


class ConvolutionType(Enum):
    standard = 0
    transposed = 1


def convolution(
    input: BNNSNDArrayDescriptor,
    weights: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    bias: BNNSNDArrayDescriptor | None,
    padding: ConvolutionPadding,
    groups: int,
    stride: tuple[int, int],
    dilationStride: tuple[int, int],
) -> BNNSLayerParametersConvolution:
    """The structure of the C function, without an activation."""
    return BNNSLayerParametersConvolution(
        i_desc=input,
        w_desc=weights,
        o_desc=output,
        bias=BNNSNDArrayDescriptor() if bias is None else bias,
        x_stride=stride[0],
        y_stride=stride[1],
        x_dilation_stride=dilationStride[0],
        y_dilation_stride=dilationStride[1],
        groups=groups,
        **padding.fields,
    )


class ConvolutionLayer(UnaryLayer):
    """A convolution, or a transposed one."""

    def __init__(
        self,
        *,
        type: ConvolutionType,
        input: BNNSNDArrayDescriptor,
        weights: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        bias: BNNSNDArrayDescriptor | None,
        padding: ConvolutionPadding,
        activation: ActivationFunction,
        groupCount: int,
        stride: tuple[int, int],
        dilationStride: tuple[int, int],
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        parameters = convolution(input, weights, output, bias, padding, groupCount, stride, dilationStride)
        parameters.activation = activation.bnnsActivation
        transposed = type is ConvolutionType.transposed
        create = BNNSFilterCreateLayerTransposedConvolution if transposed else BNNSFilterCreateLayerConvolution
        super().__init__(lambda: create(parameters, filterParameters))
