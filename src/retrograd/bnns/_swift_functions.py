"""Swift's layers and functions for reductions, products of matrices, Gram matrices and largest values."""

from __future__ import annotations

from . import _constants as c
from ._apply import BNNSFilterApplyBackwardTwoInputBatch, BNNSFilterApplyTwoInputBatch
from ._contraction import BNNSFilterCreateLayerGram, BNNSLayerParametersGram
from ._failure import raising
from ._matmul import (
    BNNSFilterCreateLayerBroadcastMatMul,
    BNNSLayerParametersBroadcastMatMul,
    BNNSMatMul,
    BNNSMatMulWorkspaceSize,
)
from ._reduction import BNNSDirectApplyReduction, BNNSFilterCreateLayerReduction, BNNSLayerParametersReduction
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import batch_stride, check_data, check_like, checked_call
from ._swift_layers import UnaryLayer, stride_of
from ._topk import BNNSDirectApplyInTopK, BNNSDirectApplyTopK


class ReductionFunction:
    """A reduction: ``ReductionFunction.sum``, ``ReductionFunction.sumOfLogs(epsilon=1e-6)``."""

    def __init__(self, function: int, epsilon: float = 0.0) -> None:
        self.function, self.epsilon = function, epsilon

    max: ReductionFunction
    min: ReductionFunction
    argMax: ReductionFunction
    argMin: ReductionFunction
    mean: ReductionFunction
    meanNonZero: ReductionFunction
    sum: ReductionFunction
    sumOfSquares: ReductionFunction
    sumOfAbsolutes: ReductionFunction
    logicalOr: ReductionFunction
    any: ReductionFunction
    logicalAnd: ReductionFunction
    all: ReductionFunction
    l2Norm: ReductionFunction
    logSumExp: ReductionFunction
    product: ReductionFunction

    @classmethod
    def sumOfLogs(cls, epsilon: float) -> ReductionFunction:
        return cls(c.BNNSReduceFunctionSumLog, epsilon)


for _name, _function in {
    "max": c.BNNSReduceFunctionMax,
    "min": c.BNNSReduceFunctionMin,
    "argMax": c.BNNSReduceFunctionArgMax,
    "argMin": c.BNNSReduceFunctionArgMin,
    "mean": c.BNNSReduceFunctionMean,
    "meanNonZero": c.BNNSReduceFunctionMeanNonZero,
    "sum": c.BNNSReduceFunctionSum,
    "sumOfSquares": c.BNNSReduceFunctionSumSquare,
    "sumOfAbsolutes": c.BNNSReduceFunctionL1Norm,
    "logicalOr": c.BNNSReduceFunctionLogicalOr,
    "any": c.BNNSReduceFunctionAny,
    "logicalAnd": c.BNNSReduceFunctionLogicalAnd,
    "all": c.BNNSReduceFunctionAll,
    "l2Norm": c.BNNSReduceFunctionL2Norm,
    "logSumExp": c.BNNSReduceFunctionLogSumExp,
    "product": c.BNNSReduceFunctionProduct,
}.items():
    setattr(ReductionFunction, _name, ReductionFunction(_function))


def _reduction(
    function: ReductionFunction,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    weights: BNNSNDArrayDescriptor | None,
) -> BNNSLayerParametersReduction:
    given = BNNSNDArrayDescriptor() if weights is None else weights
    return BNNSLayerParametersReduction(input, output, given, function.function, function.epsilon)


class ReductionLayer(UnaryLayer):
    """A reduction over the axes whose extent in the output is 1."""

    def __init__(
        self,
        *,
        function: ReductionFunction,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        weights: BNNSNDArrayDescriptor | None = None,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        parameters = _reduction(function, input, output, weights)
        super().__init__(lambda: BNNSFilterCreateLayerReduction(parameters, filterParameters))


class BroadcastMatrixMultiplyLayer(UnaryLayer):
    """A product of matrices: of one input and weights, of one input with itself, or of two inputs."""

    def __init__(
        self,
        *,
        inputA: BNNSNDArrayDescriptor,
        transposedA: bool,
        isWeightsA: bool,
        inputB: BNNSNDArrayDescriptor,
        transposedB: bool,
        isWeightsB: bool,
        output: BNNSNDArrayDescriptor,
        alpha: float,
        accumulatesToOutput: bool,
        isQuadratic: bool,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        """Swift repeats the labels ``transposed`` and ``isWeights``; here they carry the letter of their input."""
        parameters = BNNSLayerParametersBroadcastMatMul(
            alpha,
            1.0 if accumulatesToOutput else 0.0,
            transposedA,
            transposedB,
            isQuadratic,
            isWeightsA,
            isWeightsB,
            inputA,
            inputB,
            output,
        )
        super().__init__(lambda: BNNSFilterCreateLayerBroadcastMatMul(parameters, filterParameters))

    def applyTwo(
        self,
        *,
        batchSize: int,
        inputA: BNNSNDArrayDescriptor,
        inputB: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
    ) -> None:
        """Multiply two inputs: Swift's ``apply(batchSize:inputA:inputB:output:)``."""
        check_data(inputA=inputA, inputB=inputB, output=output)
        operands = getattr(self._filter, "operands", (None, None))
        check_like("inputA", inputA, operands[0])
        check_like("inputB", inputB, operands[1])
        check_like("output", output, getattr(self._filter, "output", None))
        self._call(
            BNNSFilterApplyTwoInputBatch,
            batchSize,
            inputA.data,
            batch_stride(inputA),
            inputB.data,
            batch_stride(inputB),
            output.data,
            batch_stride(output),
        )

    def applyBackwardTwo(
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
        """Compute the gradients of two inputs. `output` is ignored."""
        check_data(inputA=inputA, inputB=inputB, outputGradient=outputGradient)
        self._call(
            BNNSFilterApplyBackwardTwoInputBatch,
            batchSize,
            inputA.data,
            batch_stride(inputA),
            generatingInputAGradient,
            stride_of(generatingInputAGradient),
            inputB.data,
            batch_stride(inputB),
            generatingInputBGradient,
            stride_of(generatingInputBGradient),
            None,
            0,
            outputGradient,
            batch_stride(outputGradient),
            None,
            None,
        )


class GramLayer(UnaryLayer):
    """The scalar products of all pairs of channels."""

    def __init__(
        self,
        *,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        alpha: float,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        parameters = BNNSLayerParametersGram(alpha, input, output)
        super().__init__(lambda: BNNSFilterCreateLayerGram(parameters, filterParameters))


def applyReduction(
    function: ReductionFunction,
    *,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    weights: BNNSNDArrayDescriptor | None = None,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Reduce one array into another."""
    check_data(input=input, output=output)
    checked_call(BNNSDirectApplyReduction, _reduction(function, input, output, weights), filterParameters)


def applyMatrixMultiplication(
    *,
    inputA: BNNSNDArrayDescriptor,
    transposedA: bool = False,
    inputB: BNNSNDArrayDescriptor,
    transposedB: bool = False,
    output: BNNSNDArrayDescriptor,
    alpha: float,
    workspace: object = None,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Multiply matrices, broadcast over leading axes."""
    check_data(inputA=inputA, inputB=inputB, output=output)
    checked_call(BNNSMatMul, transposedA, transposedB, alpha, inputA, inputB, output, workspace, filterParameters)


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
        size = BNNSMatMulWorkspaceSize(transposedA, transposedB, alpha, inputA, inputB, output, filterParameters)
    return None if size < 0 else size


def applyTopK(
    *,
    k: int,
    input: BNNSNDArrayDescriptor,
    bestValues: BNNSNDArrayDescriptor,
    bestIndices: BNNSNDArrayDescriptor,
    axis: int,
    batchSize: int,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Find the `k` largest values along an axis of a packed batch, in descending order, and their indices."""
    check_data(input=input, bestValues=bestValues, bestIndices=bestIndices)
    checked_call(
        BNNSDirectApplyTopK,
        k,
        axis,
        batchSize,
        input,
        batch_stride(input),
        bestValues,
        batch_stride(bestValues),
        bestIndices,
        batch_stride(bestIndices),
        filterParameters,
    )


def applyInTopK(
    *,
    k: int,
    input: BNNSNDArrayDescriptor,
    testIndices: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    axis: int,
    batchSize: int,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Whether the values at `testIndices` are among the `k` largest along an axis of a packed batch."""
    check_data(input=input, testIndices=testIndices, output=output)
    checked_call(
        BNNSDirectApplyInTopK,
        k,
        axis,
        batchSize,
        input,
        batch_stride(input),
        testIndices,
        batch_stride(testIndices),
        output,
        batch_stride(output),
        filterParameters,
    )
