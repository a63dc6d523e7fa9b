"""Swift's loss layer: ``BNNS.LossLayer`` and its types."""

from __future__ import annotations

import enum
from typing import Any

from . import _constants as c
from ._loss import (
    BNNSFilterCreateLayerLoss,
    BNNSLayerParametersLossBase,
    BNNSLayerParametersLossHuber,
    BNNSLayerParametersLossSigmoidCrossEntropy,
    BNNSLayerParametersLossSoftmaxCrossEntropy,
    BNNSLayerParametersLossYolo,
    BNNSLossFilterApplyBatch,
)
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import Layer, batch_stride, check_data, check_like


class LossReduction(enum.Enum):
    """How the losses of a batch become one."""

    none = c.BNNSLossReductionNone
    sum = c.BNNSLossReductionSum
    weightedMean = c.BNNSLossReductionWeightedMean
    reductionMean = c.BNNSLossReductionMean
    zeroWeightMean = c.BNNSLossReductionNonZeroWeightMean

    @property
    def bnnsLossReductionFunction(self) -> int:
        return int(self.value)


class YoloParameters:
    """The parameters of YOLO's loss, by the names of the C structure's fields."""

    def __init__(self, **fields: Any) -> None:
        BNNSLayerParametersLossYolo(**fields)  # raises for other names
        self.fields = fields


class LossFunction:
    """A loss: ``LossFunction.meanSquareError``, ``LossFunction.huber(huberDelta=1.0)``."""

    def __init__(self, function: int, structure: type[Any] = BNNSLayerParametersLossBase, **fields: Any) -> None:
        self.bnnsLossFunction, self._structure, self._fields = function, structure, fields

    meanSquareError: LossFunction
    meanAbsoluteError: LossFunction
    log: LossFunction
    cosineDistance: LossFunction
    hinge: LossFunction
    categoricalCrossEntropy: LossFunction

    @classmethod
    def softmaxCrossEntropy(cls, labelSmoothing: float) -> LossFunction:
        structure = BNNSLayerParametersLossSoftmaxCrossEntropy
        return cls(c.BNNSLossFunctionSoftmaxCrossEntropy, structure, label_smooth=labelSmoothing)

    @classmethod
    def sigmoidCrossEntropy(cls, labelSmoothing: float) -> LossFunction:
        structure = BNNSLayerParametersLossSigmoidCrossEntropy
        return cls(c.BNNSLossFunctionSigmoidCrossEntropy, structure, label_smooth=labelSmoothing)

    @classmethod
    def huber(cls, huberDelta: float) -> LossFunction:
        return cls(c.BNNSLossFunctionHuber, BNNSLayerParametersLossHuber, huber_delta=huberDelta)

    @classmethod
    def yolo(cls, parameters: YoloParameters) -> LossFunction:
        return cls(c.BNNSLossFunctionYolo, BNNSLayerParametersLossYolo, **parameters.fields)

    def parameters(self, input: BNNSNDArrayDescriptor, output: BNNSNDArrayDescriptor, reduction: LossReduction) -> Any:
        """The C structure."""
        common = {"function": self.bnnsLossFunction, "i_desc": input, "o_desc": output}
        return self._structure(**{**self._fields, **common, "reduction": reduction.bnnsLossReductionFunction})


LossFunction.meanSquareError = LossFunction(c.BNNSLossFunctionMeanSquareError)
LossFunction.meanAbsoluteError = LossFunction(c.BNNSLossFunctionMeanAbsoluteError)
LossFunction.log = LossFunction(c.BNNSLossFunctionLog)
LossFunction.cosineDistance = LossFunction(c.BNNSLossFunctionCosineDistance)
LossFunction.hinge = LossFunction(c.BNNSLossFunctionHinge)
LossFunction.categoricalCrossEntropy = LossFunction(c.BNNSLossFunctionCategoricalCrossEntropy)


class LossLayer(Layer):
    """A loss layer. `dividesByClasses`, which Swift does not have, is `divide_by_classes` of the C function."""

    def __init__(
        self,
        *,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        lossFunction: LossFunction,
        lossReduction: LossReduction,
        filterParameters: BNNSFilterParameters | None = None,
        dividesByClasses: bool = True,
    ) -> None:
        parameters = lossFunction.parameters(input, output, lossReduction)
        super().__init__(
            lambda: BNNSFilterCreateLayerLoss(parameters, filterParameters, divide_by_classes=dividesByClasses)
        )

    def apply(
        self,
        *,
        batchSize: int,
        input: BNNSNDArrayDescriptor,
        labels: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        weights: BNNSNDArrayDescriptor | None = None,
        broadcastsWeights: bool = False,
        generatingInputGradient: BNNSNDArrayDescriptor,
    ) -> None:
        """Compute the loss of a packed batch and the gradient of its input.

        With `broadcastsWeights` the first of the `weights` is that of all losses; otherwise each has its own.
        """
        check_data(input=input, labels=labels, output=output, weights=weights)
        check_data(generatingInputGradient=generatingInputGradient)
        for name, descriptor in (("input", input), ("labels", labels)):
            check_like(name, descriptor, getattr(self._filter, "input", None))
        size = 0
        if weights is not None:
            size = 1 if broadcastsWeights else batchSize * getattr(self._filter, "values", 1)
        self._call(
            BNNSLossFilterApplyBatch,
            batchSize,
            input.data,
            batch_stride(input),
            labels.data,
            batch_stride(labels),
            None if weights is None else weights.data,
            size,
            output.data,
            generatingInputGradient,
            batch_stride(generatingInputGradient),
        )
