"""The parts of Swift's ``BNNS.FusedParametersLayer``: structures whose fields may be changed before it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from . import _constants as c
from ._arithmetic_filter import BNNSLayerParametersArithmetic
from ._filter import FLOATS
from ._fully_connected import BNNSLayerParametersFullyConnected
from ._structures import BNNSNDArrayDescriptor, Structure
from ._swift import ActivationFunction, NormalizationType, normalization
from ._swift_arithmetic import (
    ArithmeticBinaryFunction,
    ArithmeticTernaryFunction,
    ArithmeticUnaryFunction,
    DescriptorType,
    operands,
)
from ._swift_arrays import quantization
from ._swift_convolution import ConvolutionType, convolution
from ._swift_pooling import ConvolutionPadding


class FusableLayerParameters:
    """A layer that can be fused with another one."""

    inputs: ClassVar[int] = 1

    @property
    def filter_type(self) -> int:
        """The number of the C function's filter."""
        raise NotImplementedError

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        """The structure of the C function."""
        raise NotImplementedError

    def input_type(self, first: int, output: int) -> int:
        """The data type of the input of a second layer, given those of the first layer's input and of the output."""
        return output


@dataclasses.dataclass(kw_only=True)
class FusedConvolutionParameters(FusableLayerParameters):
    """A convolution, or a transposed one. `groupSize` is the number of groups."""

    type: ConvolutionType
    weights: BNNSNDArrayDescriptor
    bias: BNNSNDArrayDescriptor | None
    stride: tuple[int, int]
    dilationStride: tuple[int, int]
    groupSize: int
    padding: ConvolutionPadding

    @property
    def filter_type(self) -> int:
        return c.BNNSTransposedConvolution if self.type is ConvolutionType.transposed else c.BNNSConvolution

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        (input,) = inputs
        return convolution(
            input, self.weights, output, self.bias, self.padding, self.groupSize, self.stride, self.dilationStride
        )


@dataclasses.dataclass(kw_only=True)
class FusedFullyConnectedParameters(FusableLayerParameters):
    """A fully connected layer."""

    weights: BNNSNDArrayDescriptor
    bias: BNNSNDArrayDescriptor | None

    @property
    def filter_type(self) -> int:
        return c.BNNSFullyConnected

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        (input,) = inputs
        bias = BNNSNDArrayDescriptor() if self.bias is None else self.bias
        return BNNSLayerParametersFullyConnected(input, self.weights, output, bias)


@dataclasses.dataclass(kw_only=True)
class FusedNormalizationParameters(FusableLayerParameters):
    """A normalization."""

    type: NormalizationType
    beta: BNNSNDArrayDescriptor | None = None
    gamma: BNNSNDArrayDescriptor | None = None
    momentum: float = 0.0
    epsilon: float
    activation: ActivationFunction

    @property
    def filter_type(self) -> int:
        return self.type.norm_type

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        (input,) = inputs
        return normalization(
            self.type, input, output, self.beta, self.gamma, self.momentum, self.epsilon, self.activation
        )


@dataclasses.dataclass(kw_only=True)
class FusedQuantizationParameters(FusableLayerParameters):
    """A quantization. `axis` is that of scale and bias; None, as it is at first: they have one element."""

    function: ClassVar[int] = c.BNNSQuantizerFunctionQuantize

    scale: BNNSNDArrayDescriptor | None
    bias: BNNSNDArrayDescriptor | None
    axis: int | None = dataclasses.field(default=None, init=False)

    @property
    def filter_type(self) -> int:
        return c.BNNSQuantization

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        (input,) = inputs
        return quantization(self.function, input, output, self.axis, self.scale, self.bias)

    def input_type(self, first: int, output: int) -> int:
        # A layer with an input of integers has a floating-point output.
        return first if first in FLOATS else c.BNNSDataTypeFloat32


@dataclasses.dataclass(kw_only=True)
class FusedDequantizationParameters(FusedQuantizationParameters):
    """A dequantization of a layer whose input and output are integers."""

    function: ClassVar[int] = c.BNNSQuantizerFunctionDequantize

    def input_type(self, first: int, output: int) -> int:
        return first


class _ArithmeticParameters(FusableLayerParameters):
    outputDescriptorType: DescriptorType
    function: int

    def _types(self) -> tuple[DescriptorType, ...]:
        """What the inputs are."""
        raise NotImplementedError

    @property
    def filter_type(self) -> int:
        return c.BNNSArithmetic

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        fields = operands(inputs, self._types(), output, self.outputDescriptorType)
        return BNNSLayerParametersArithmetic(self.function, fields)


@dataclasses.dataclass(kw_only=True)
class FusedUnaryArithmeticParameters(_ArithmeticParameters):
    """An elementwise function of one input."""

    inputDescriptorType: DescriptorType
    outputDescriptorType: DescriptorType
    function: ArithmeticUnaryFunction

    def _types(self) -> tuple[DescriptorType, ...]:
        return (self.inputDescriptorType,)


@dataclasses.dataclass(kw_only=True)
class FusedBinaryArithmeticParameters(_ArithmeticParameters):
    """An elementwise function of two inputs."""

    inputs: ClassVar[int] = 2

    inputADescriptorType: DescriptorType
    inputBDescriptorType: DescriptorType
    outputDescriptorType: DescriptorType
    function: ArithmeticBinaryFunction

    def _types(self) -> tuple[DescriptorType, ...]:
        return self.inputADescriptorType, self.inputBDescriptorType


@dataclasses.dataclass(kw_only=True)
class FusedTernaryArithmeticParameters(_ArithmeticParameters):
    """An elementwise function of three inputs."""

    inputs: ClassVar[int] = 3

    inputADescriptorType: DescriptorType
    inputBDescriptorType: DescriptorType
    inputCDescriptorType: DescriptorType
    outputDescriptorType: DescriptorType
    function: ArithmeticTernaryFunction

    def _types(self) -> tuple[DescriptorType, ...]:
        return self.inputADescriptorType, self.inputBDescriptorType, self.inputCDescriptorType
