"""Swift's arithmetic layers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from . import _constants as c
from ._arithmetic_filter import (
    BNNSArithmeticBinary,
    BNNSArithmeticFilterApplyBackwardBatch,
    BNNSArithmeticFilterApplyBatch,
    BNNSArithmeticTernary,
    BNNSArithmeticUnary,
    BNNSFilterCreateLayerArithmetic,
    BNNSLayerParametersArithmetic,
)
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor, Structure
from ._swift import ActivationFunction, Layer, batch_stride, check_data, check_like
from ._swift_layers import stride_of


class DescriptorType(enum.IntEnum):
    """What an operand is: the same for all samples, one of each sample, or the same for all and trained."""

    constant = c.BNNSConstant
    sample = c.BNNSSample
    parameter = c.BNNSParameter


class ArithmeticUnaryFunction(enum.IntEnum):
    """Functions of one operand."""

    abs = c.BNNSArithmeticAbs
    acos = c.BNNSArithmeticAcos
    acosh = c.BNNSArithmeticAcosh
    asin = c.BNNSArithmeticAsin
    asinh = c.BNNSArithmeticAsinh
    atan = c.BNNSArithmeticAtan
    atanh = c.BNNSArithmeticAtanh
    ceil = c.BNNSArithmeticCeil
    cos = c.BNNSArithmeticCos
    cosh = c.BNNSArithmeticCosh
    erf = c.BNNSArithmeticErf
    exp = c.BNNSArithmeticExp
    exp2 = c.BNNSArithmeticExp2
    floor = c.BNNSArithmeticFloor
    log = c.BNNSArithmeticLog
    log2 = c.BNNSArithmeticLog2
    negate = c.BNNSArithmeticNegate
    reciprocal = c.BNNSArithmeticReciprocal
    reciprocalSquareRoot = c.BNNSArithmeticReciprocalSquareRoot
    round = c.BNNSArithmeticRound
    sign = c.BNNSArithmeticSign
    sin = c.BNNSArithmeticSin
    sinh = c.BNNSArithmeticSinh
    square = c.BNNSArithmeticSquare
    squareRoot = c.BNNSArithmeticSquareRoot
    tan = c.BNNSArithmeticTan
    tanh = c.BNNSArithmeticTanh


class ArithmeticBinaryFunction(enum.IntEnum):
    """Functions of two operands."""

    add = c.BNNSArithmeticAdd
    subtract = c.BNNSArithmeticSubtract
    multiply = c.BNNSArithmeticMultiply
    divide = c.BNNSArithmeticDivide
    pow = c.BNNSArithmeticPow
    multiplyNoNaN = c.BNNSArithmeticMultiplyNoNaN
    divideNoNaN = c.BNNSArithmeticDivideNoNaN
    min = c.BNNSArithmeticMinimum
    max = c.BNNSArithmeticMaximum
    flooringDivide = c.BNNSArithmeticFloorDivide
    truncatingDivide = c.BNNSArithmeticTruncDivide
    truncatingRemainder = c.BNNSArithmeticTruncRemainder


class ArithmeticTernaryFunction(enum.IntEnum):
    """Functions of three operands."""

    multiplyAdd = c.BNNSArithmeticMultiplyAdd
    select = c.BNNSArithmeticSelect


def operands(
    inputs: Sequence[BNNSNDArrayDescriptor],
    types: Sequence[DescriptorType],
    output: BNNSNDArrayDescriptor,
    outputType: DescriptorType,
) -> Structure:
    """The structure of the operands, for the C function."""
    kind = (BNNSArithmeticUnary, BNNSArithmeticBinary, BNNSArithmeticTernary)[len(inputs) - 1]
    pairs = [part for pair in zip(inputs, types, strict=True) for part in pair]
    return kind(*pairs, output, outputType)


class _ArithmeticLayer(Layer):
    _names: tuple[str, ...] = ()  # of the inputs

    def __init__(
        self, function: int, fields: Any, activation: ActivationFunction, filterParameters: BNNSFilterParameters | None
    ) -> None:
        parameters = BNNSLayerParametersArithmetic(function, fields, activation.bnnsActivation)
        super().__init__(lambda: BNNSFilterCreateLayerArithmetic(parameters, filterParameters))

    def _apply(self, batchSize: int, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> None:
        check_data(**dict(zip(self._names, inputs, strict=True)), output=output)
        self._check_like(inputs, output)
        self._call(
            BNNSArithmeticFilterApplyBatch,
            batchSize,
            len(inputs),
            [one.data for one in inputs],
            [batch_stride(one) for one in inputs],
            output.data,
            batch_stride(output),
        )

    def _apply_backward(
        self,
        batchSize: int,
        inputs: Sequence[BNNSNDArrayDescriptor],
        output: BNNSNDArrayDescriptor | None,
        outputGradient: BNNSNDArrayDescriptor,
        gradients: Sequence[BNNSNDArrayDescriptor | None],
    ) -> None:
        check_data(outputGradient=outputGradient)
        self._check_like(inputs, output)
        self._call(
            BNNSArithmeticFilterApplyBackwardBatch,
            batchSize,
            len(inputs),
            [one.data for one in inputs],
            [batch_stride(one) for one in inputs],
            list(gradients),
            [stride_of(one) for one in gradients],
            None if output is None else output.data,
            stride_of(output),
            outputGradient,
            batch_stride(outputGradient),
        )

    def _check_like(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor | None) -> None:
        operands = getattr(self._filter, "operands", ())  # none: the layer was closed
        for name, given, operand in zip(self._names, inputs, operands, strict=False):
            check_like(name, given, operand.geometry)
        if output is not None and operands:
            check_like("output", output, self._filter.output.geometry)


class UnaryArithmeticLayer(_ArithmeticLayer):
    """An elementwise function of one input."""

    _names = ("input",)

    def __init__(
        self,
        *,
        input: BNNSNDArrayDescriptor,
        inputDescriptorType: DescriptorType,
        output: BNNSNDArrayDescriptor,
        outputDescriptorType: DescriptorType,
        function: ArithmeticUnaryFunction,
        activation: ActivationFunction = ActivationFunction.identity,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        fields = operands([input], [inputDescriptorType], output, outputDescriptorType)
        super().__init__(function, fields, activation, filterParameters)

    def apply(self, *, batchSize: int, input: BNNSNDArrayDescriptor, output: BNNSNDArrayDescriptor) -> None:
        """Apply the layer to a packed batch."""
        self._apply(batchSize, [input], output)

    def applyBackward(
        self,
        *,
        batchSize: int,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor | None = None,
        outputGradient: BNNSNDArrayDescriptor,
        generatingInputGradient: BNNSNDArrayDescriptor | None,
    ) -> None:
        """Compute the gradient of the input."""
        self._apply_backward(batchSize, [input], output, outputGradient, [generatingInputGradient])


class BinaryArithmeticLayer(_ArithmeticLayer):
    """An elementwise function of two inputs."""

    _names = ("inputA", "inputB")

    def __init__(
        self,
        *,
        inputA: BNNSNDArrayDescriptor,
        inputADescriptorType: DescriptorType,
        inputB: BNNSNDArrayDescriptor,
        inputBDescriptorType: DescriptorType,
        output: BNNSNDArrayDescriptor,
        outputDescriptorType: DescriptorType,
        function: ArithmeticBinaryFunction,
        activation: ActivationFunction = ActivationFunction.identity,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        types = [inputADescriptorType, inputBDescriptorType]
        fields = operands([inputA, inputB], types, output, outputDescriptorType)
        super().__init__(function, fields, activation, filterParameters)

    def apply(
        self,
        *,
        batchSize: int,
        inputA: BNNSNDArrayDescriptor,
        inputB: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
    ) -> None:
        """Apply the layer to a packed batch."""
        self._apply(batchSize, [inputA, inputB], output)

    def applyBackward(
        self,
        *,
        batchSize: int,
        inputA: BNNSNDArrayDescriptor,
        inputB: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor | None = None,
        outputGradient: BNNSNDArrayDescriptor,
        generatingInputAGradient: BNNSNDArrayDescriptor | None,
        generatingInputBGradient: BNNSNDArrayDescriptor | None,
    ) -> None:
        """Compute the gradients of the inputs."""
        gradients = [generatingInputAGradient, generatingInputBGradient]
        self._apply_backward(batchSize, [inputA, inputB], output, outputGradient, gradients)


class TernaryArithmeticLayer(_ArithmeticLayer):
    """An elementwise function of three inputs."""

    _names = ("inputA", "inputB", "inputC")

    def __init__(
        self,
        *,
        inputA: BNNSNDArrayDescriptor,
        inputADescriptorType: DescriptorType,
        inputB: BNNSNDArrayDescriptor,
        inputBDescriptorType: DescriptorType,
        inputC: BNNSNDArrayDescriptor,
        inputCDescriptorType: DescriptorType,
        output: BNNSNDArrayDescriptor,
        outputDescriptorType: DescriptorType,
        function: ArithmeticTernaryFunction,
        activation: ActivationFunction = ActivationFunction.identity,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        types = [inputADescriptorType, inputBDescriptorType, inputCDescriptorType]
        fields = operands([inputA, inputB, inputC], types, output, outputDescriptorType)
        super().__init__(function, fields, activation, filterParameters)

    def apply(
        self,
        *,
        batchSize: int,
        inputA: BNNSNDArrayDescriptor,
        inputB: BNNSNDArrayDescriptor,
        inputC: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
    ) -> None:
        """Apply the layer to a packed batch."""
        self._apply(batchSize, [inputA, inputB, inputC], output)

    def applyBackward(
        self,
        *,
        batchSize: int,
        inputA: BNNSNDArrayDescriptor,
        inputB: BNNSNDArrayDescriptor,
        inputC: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor | None = None,
        outputGradient: BNNSNDArrayDescriptor,
        generatingInputAGradient: BNNSNDArrayDescriptor | None,
        generatingInputBGradient: BNNSNDArrayDescriptor | None,
        generatingInputCGradient: BNNSNDArrayDescriptor | None,
    ) -> None:
        """Compute the gradients of the inputs."""
        gradients = [generatingInputAGradient, generatingInputBGradient, generatingInputCGradient]
        self._apply_backward(batchSize, [inputA, inputB, inputC], output, outputGradient, gradients)
