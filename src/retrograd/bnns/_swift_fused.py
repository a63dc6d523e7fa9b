"""Swift's fused layers: a convolution or a fully connected layer, and a normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _constants as c
from ._convolution import BNNSLayerParametersConvolution
from ._fully_connected import BNNSLayerParametersFullyConnected
from ._fused import BNNSFilterCreateFusedLayer, BNNSFusedFilterApplyBackwardBatch, BNNSFusedFilterApplyBatch
from ._structures import BNNSFilterParameters, BNNSLayerParametersNormalization, BNNSNDArrayDescriptor
from ._swift import (
    ActivationFunction,
    Layer,
    LearningPhase,
    NormalizationType,
    batch_stride,
    check_data,
    check_like,
)
from ._swift_layers import stride_of
from ._swift_pooling import ConvolutionPadding


class FusedLayer(Layer):
    """A layer and a normalization of its output."""

    def apply(
        self, *, batchSize: int, input: BNNSNDArrayDescriptor, output: BNNSNDArrayDescriptor, for_: LearningPhase
    ) -> None:
        """Apply the layer to a packed batch. `for_` is Swift's label ``for``."""
        if not isinstance(for_, LearningPhase):
            raise TypeError(f"for_ must be a LearningPhase, not {for_!r}")
        check_data(input=input, output=output)
        check_like("input", input, getattr(self._filter, "input", None))
        check_like("output", output, getattr(self._filter, "output", None))
        self._call(
            BNNSFusedFilterApplyBatch,
            batchSize,
            input.data,
            batch_stride(input),
            output.data,
            batch_stride(output),
            for_ is LearningPhase.training,
        )

    def applyBackward(
        self,
        *,
        batchSize: int,
        input: BNNSNDArrayDescriptor | None = None,
        output: BNNSNDArrayDescriptor | None = None,
        outputGradient: BNNSNDArrayDescriptor,
        generatingInputGradient: BNNSNDArrayDescriptor | None = None,
        generatingParameterGradients: Sequence[BNNSNDArrayDescriptor | None],
    ) -> None:
        """Compute the gradients of the last training pass, those of the parameters in the order of the C function."""
        check_data(outputGradient=outputGradient, generatingInputGradient=generatingInputGradient)
        for index, gradient in enumerate(generatingParameterGradients):
            check_data(**{f"generatingParameterGradients[{index}]": gradient})
        for name, array in (("input", input), ("output", output)):
            if array is not None and array.data is not None:
                check_like(name, array, getattr(self._filter, name, None))
        self._call(
            BNNSFusedFilterApplyBackwardBatch,
            batchSize,
            None if input is None else input.data,
            stride_of(input),
            generatingInputGradient,
            stride_of(generatingInputGradient),
            None if output is None else output.data,
            stride_of(output),
            outputGradient,
            stride_of(outputGradient),
            generatingParameterGradients,
        )


class FusedConvolutionNormalizationLayer(FusedLayer):
    """A convolution and a normalization. The parameter gradients are those of weights, bias, beta and gamma.

    `momentumWeighs`, which Swift does not have, is that of the normalization layer.
    """

    def __init__(
        self,
        *,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        convolutionWeights: BNNSNDArrayDescriptor,
        convolutionBias: BNNSNDArrayDescriptor | None,
        convolutionStride: tuple[int, int],
        convolutionDilationStride: tuple[int, int],
        convolutionPadding: ConvolutionPadding,
        normalization: NormalizationType,
        normalizationBeta: BNNSNDArrayDescriptor | None,
        normalizationGamma: BNNSNDArrayDescriptor | None,
        normalizationMomentum: float,
        normalizationEpsilon: float,
        normalizationActivation: ActivationFunction,
        filterParameters: BNNSFilterParameters | None = None,
        momentumWeighs: str = "old",
    ) -> None:
        convolution = BNNSLayerParametersConvolution(
            i_desc=input,
            w_desc=convolutionWeights,
            o_desc=_without_data(output),
            bias=BNNSNDArrayDescriptor() if convolutionBias is None else convolutionBias,
            x_stride=convolutionStride[0],
            y_stride=convolutionStride[1],
            x_dilation_stride=convolutionDilationStride[0],
            y_dilation_stride=convolutionDilationStride[1],
            **convolutionPadding.fields,
        )
        super().__init__(
            lambda: _create(
                c.BNNSConvolution,
                convolution,
                output,
                normalization,
                normalizationBeta,
                normalizationGamma,
                normalizationMomentum,
                normalizationEpsilon,
                normalizationActivation,
                filterParameters,
                momentumWeighs,
            )
        )


class FusedFullyConnectedNormalizationLayer(FusedLayer):
    """A fully connected layer and a normalization. The parameter gradients are those of weights, bias, beta and gamma.

    `momentumWeighs`, which Swift does not have, is that of the normalization layer.
    """

    def __init__(
        self,
        *,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        fullyConnectedWeights: BNNSNDArrayDescriptor,
        fullyConnectedBias: BNNSNDArrayDescriptor | None,
        normalization: NormalizationType,
        normalizationBeta: BNNSNDArrayDescriptor | None,
        normalizationGamma: BNNSNDArrayDescriptor | None,
        normalizationMomentum: float,
        normalizationEpsilon: float,
        normalizationActivation: ActivationFunction,
        filterParameters: BNNSFilterParameters | None = None,
        momentumWeighs: str = "old",
    ) -> None:
        layer = BNNSLayerParametersFullyConnected(
            i_desc=input,
            w_desc=fullyConnectedWeights,
            o_desc=_without_data(output),
            bias=BNNSNDArrayDescriptor() if fullyConnectedBias is None else fullyConnectedBias,
        )
        super().__init__(
            lambda: _create(
                c.BNNSFullyConnected,
                layer,
                output,
                normalization,
                normalizationBeta,
                normalizationGamma,
                normalizationMomentum,
                normalizationEpsilon,
                normalizationActivation,
                filterParameters,
                momentumWeighs,
            )
        )


def _without_data(descriptor: BNNSNDArrayDescriptor) -> BNNSNDArrayDescriptor:
    empty = descriptor.copy()
    empty.data = None
    return empty


def _create(
    filter_type: int,
    layer: Any,
    output: BNNSNDArrayDescriptor,
    normalization: NormalizationType,
    beta: BNNSNDArrayDescriptor | None,
    gamma: BNNSNDArrayDescriptor | None,
    momentum: float,
    epsilon: float,
    activation: ActivationFunction,
    parameters: BNNSFilterParameters | None,
    momentum_weighs: str,
) -> Any:
    """The filter of a layer whose normalized output has the shape of `output`."""
    empty = BNNSNDArrayDescriptor()
    norm = BNNSLayerParametersNormalization(
        i_desc=_without_data(output),
        o_desc=output,
        beta_desc=empty if beta is None else beta,
        gamma_desc=empty if gamma is None else gamma,
        momentum=momentum,
        epsilon=epsilon,
        activation=activation.bnnsActivation,
        **normalization.fields,
    )
    types = (filter_type, normalization.norm_type)
    return BNNSFilterCreateFusedLayer(2, types, (layer, norm), parameters, momentum_weighs=momentum_weighs)
