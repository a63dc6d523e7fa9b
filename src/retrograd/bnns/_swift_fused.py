"""Swift's fused layers: two layers, applied as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ._fused import (
    BNNSFilterCreateFusedLayer,
    BNNSFusedFilterApplyBackwardBatch,
    BNNSFusedFilterApplyBackwardMultiInputBatch,
    BNNSFusedFilterApplyBatch,
    BNNSFusedFilterApplyMultiInputBatch,
)
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import (
    ActivationFunction,
    BNNSError,
    Layer,
    LearningPhase,
    NormalizationType,
    batch_stride,
    check_data,
    check_like,
)
from ._swift_convolution import ConvolutionType
from ._swift_fused_parameters import (
    FusableLayerParameters,
    FusedConvolutionParameters,
    FusedFullyConnectedParameters,
    FusedNormalizationParameters,
)
from ._swift_layers import stride_of
from ._swift_pooling import ConvolutionPadding


class FusedLayer(Layer):
    """A layer, and another one that is applied to its output."""

    def __init__(
        self,
        inputs: Mapping[str, BNNSNDArrayDescriptor],
        output: BNNSNDArrayDescriptor,
        parts: Sequence[FusableLayerParameters],
        filterParameters: BNNSFilterParameters | None,
        momentumWeighs: str,
    ) -> None:
        """`inputs` are named as the arguments of `apply`."""
        self._names = tuple(inputs)
        if len(parts) != 2:
            raise BNNSError("unableToCreateLayer", f"fusedLayerParameters has {len(parts)} entries, must have 2")
        first, second = parts
        for part, count in ((first, len(inputs)), (second, 1)):
            if part.inputs != count:
                name = type(part).__name__
                raise BNNSError("unableToCreateLayer", f"{name} has {part.inputs} inputs, but is given {count}")
        arrays = list(inputs.values())
        between = output.copy()
        between.data, between.data_type = None, second.input_type(arrays[0].data_type, output.data_type)
        types = (first.filter_type, second.filter_type)
        layers = (first.layer(arrays, between), second.layer([between], output))
        super().__init__(
            lambda: BNNSFilterCreateFusedLayer(2, types, layers, filterParameters, momentum_weighs=momentumWeighs)
        )

    def _check_like(self, arrays: Mapping[str, BNNSNDArrayDescriptor | None]) -> None:
        """Compare inputs and output with what the layer was made for."""
        filter = self._filter
        if filter.destroyed:
            return
        inputs = [operand.geometry for operand in filter.first.operands] if filter.many else [filter.input]
        made = {**dict(zip(self._names, inputs, strict=True)), "output": filter.output}
        for name, array in arrays.items():
            if array is not None and array.data is not None:
                check_like(name, array, made[name])

    def _apply(
        self,
        batchSize: int,
        inputs: Mapping[str, BNNSNDArrayDescriptor],
        output: BNNSNDArrayDescriptor,
        for_: LearningPhase,
    ) -> None:
        if not isinstance(for_, LearningPhase):
            raise TypeError(f"for_ must be a LearningPhase, not {for_!r}")
        check_data(**inputs, output=output)
        self._check_like({**inputs, "output": output})
        arrays = [array.data for array in inputs.values()]
        strides = [batch_stride(array) for array in inputs.values()]
        rest = (output.data, batch_stride(output), for_ is LearningPhase.training)
        if getattr(self._filter, "many", False):
            self._call(BNNSFusedFilterApplyMultiInputBatch, batchSize, len(arrays), arrays, strides, *rest)
        else:
            self._call(BNNSFusedFilterApplyBatch, batchSize, arrays[0], strides[0], *rest)

    def _apply_backward(
        self,
        batchSize: int,
        inputs: Mapping[str, BNNSNDArrayDescriptor | None],
        output: BNNSNDArrayDescriptor | None,
        outputGradient: BNNSNDArrayDescriptor,
        gradients: Mapping[str, BNNSNDArrayDescriptor | None],
        parameterGradients: Sequence[BNNSNDArrayDescriptor | None],
    ) -> None:
        """`gradients` has the names of the inputs."""
        check_data(outputGradient=outputGradient)
        check_data(**{f"generatingI{name[1:]}Gradient": gradient for name, gradient in gradients.items()})
        for index, gradient in enumerate(parameterGradients):
            check_data(**{f"generatingParameterGradients[{index}]": gradient})
        self._check_like({**inputs, "output": output})
        arrays = [None if array is None else array.data for array in inputs.values()]
        strides = [stride_of(array) for array in inputs.values()]
        wanted = list(gradients.values())
        steps = [stride_of(gradient) for gradient in wanted]
        rest = (
            None if output is None else output.data,
            stride_of(output),
            outputGradient,
            stride_of(outputGradient),
            parameterGradients,
        )
        if getattr(self._filter, "many", False):
            given = (len(arrays), arrays, strides, wanted, steps)
            self._call(BNNSFusedFilterApplyBackwardMultiInputBatch, batchSize, *given, *rest)
        else:
            first = (arrays[0], strides[0], wanted[0], steps[0])
            self._call(BNNSFusedFilterApplyBackwardBatch, batchSize, *first, *rest)

    def apply(
        self, *, batchSize: int, input: BNNSNDArrayDescriptor, output: BNNSNDArrayDescriptor, for_: LearningPhase
    ) -> None:
        """Apply the layer to a packed batch. `for_` is Swift's label ``for``."""
        self._apply(batchSize, {"input": input}, output, for_)

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
        self._apply_backward(
            batchSize,
            {"input": input},
            output,
            outputGradient,
            {"input": generatingInputGradient},
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
        first = FusedConvolutionParameters(
            type=ConvolutionType.standard,
            weights=convolutionWeights,
            bias=convolutionBias,
            stride=convolutionStride,
            dilationStride=convolutionDilationStride,
            groupSize=1,
            padding=convolutionPadding,
        )
        second = FusedNormalizationParameters(
            type=normalization,
            beta=normalizationBeta,
            gamma=normalizationGamma,
            momentum=normalizationMomentum,
            epsilon=normalizationEpsilon,
            activation=normalizationActivation,
        )
        super().__init__({"input": input}, output, [first, second], filterParameters, momentumWeighs)


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
        first = FusedFullyConnectedParameters(weights=fullyConnectedWeights, bias=fullyConnectedBias)
        second = FusedNormalizationParameters(
            type=normalization,
            beta=normalizationBeta,
            gamma=normalizationGamma,
            momentum=normalizationMomentum,
            epsilon=normalizationEpsilon,
            activation=normalizationActivation,
        )
        super().__init__({"input": input}, output, [first, second], filterParameters, momentumWeighs)


class FusedParametersLayer(FusedLayer):
    """Two layers, given by their parameters. The first has one input, or two or three if it is arithmetic.

    An arithmetic layer is followed by a normalization, whose beta and gamma have the parameter gradients; other layers
    are followed by a normalization or a quantization. `momentumWeighs`, which Swift does not have, is that of the
    normalization layer.
    """

    def __init__(
        self,
        *,
        input: BNNSNDArrayDescriptor | None = None,
        inputA: BNNSNDArrayDescriptor | None = None,
        inputB: BNNSNDArrayDescriptor | None = None,
        inputC: BNNSNDArrayDescriptor | None = None,
        output: BNNSNDArrayDescriptor,
        fusedLayerParameters: Sequence[FusableLayerParameters],
        filterParameters: BNNSFilterParameters | None = None,
        momentumWeighs: str = "old",
    ) -> None:
        given = {"input": input, "inputA": inputA, "inputB": inputB, "inputC": inputC}
        inputs = {name: array for name, array in given.items() if array is not None}
        if tuple(inputs) not in (("input",), ("inputA", "inputB"), ("inputA", "inputB", "inputC")):
            shown = ", ".join(inputs) or "nothing"
            raise TypeError(f"give input; or inputA and inputB; or inputA, inputB and inputC: not {shown}")
        super().__init__(inputs, output, fusedLayerParameters, filterParameters, momentumWeighs)

    def _own(self, given: Mapping[str, BNNSNDArrayDescriptor | None]) -> dict[str, BNNSNDArrayDescriptor | None]:
        """The arrays of this layer's inputs."""
        for name, array in given.items():
            if array is not None and name not in self._names:
                inputs = " and ".join(self._names)
                raise BNNSError("layerApplyFail", f"{name}, or its gradient, is given, but the layer has {inputs}")
        return {name: given[name] for name in self._names}

    def apply(
        self,
        *,
        batchSize: int,
        input: BNNSNDArrayDescriptor | None = None,
        inputA: BNNSNDArrayDescriptor | None = None,
        inputB: BNNSNDArrayDescriptor | None = None,
        inputC: BNNSNDArrayDescriptor | None = None,
        output: BNNSNDArrayDescriptor,
        for_: LearningPhase,
    ) -> None:
        """Apply the layer to a packed batch of each input. `for_` is Swift's label ``for``."""
        inputs: dict[str, BNNSNDArrayDescriptor] = {}
        given = {"input": input, "inputA": inputA, "inputB": inputB, "inputC": inputC}
        for name, array in self._own(given).items():
            if array is None:
                raise BNNSError("layerApplyFail", f"{name} is not given")
            inputs[name] = array
        self._apply(batchSize, inputs, output, for_)

    def applyBackward(
        self,
        *,
        batchSize: int,
        input: BNNSNDArrayDescriptor | None = None,
        inputA: BNNSNDArrayDescriptor | None = None,
        inputB: BNNSNDArrayDescriptor | None = None,
        inputC: BNNSNDArrayDescriptor | None = None,
        output: BNNSNDArrayDescriptor | None = None,
        outputGradient: BNNSNDArrayDescriptor,
        generatingInputGradient: BNNSNDArrayDescriptor | None = None,
        generatingInputAGradient: BNNSNDArrayDescriptor | None = None,
        generatingInputBGradient: BNNSNDArrayDescriptor | None = None,
        generatingInputCGradient: BNNSNDArrayDescriptor | None = None,
        generatingParameterGradients: Sequence[BNNSNDArrayDescriptor | None],
    ) -> None:
        """Compute the gradients of the last training pass, those of the parameters in the order of the C function."""
        inputs = {"input": input, "inputA": inputA, "inputB": inputB, "inputC": inputC}
        gradients = {
            "input": generatingInputGradient,
            "inputA": generatingInputAGradient,
            "inputB": generatingInputBGradient,
            "inputC": generatingInputCGradient,
        }
        self._apply_backward(
            batchSize,
            self._own(inputs),
            output,
            outputGradient,
            self._own(gradients),
            generatingParameterGradients,
        )
