"""Swift's layers with one input, over the functions that apply any filter."""

from __future__ import annotations

from ._apply import BNNSFilterApplyBackwardBatch, BNNSFilterApplyBatch
from ._fully_connected import BNNSFilterCreateLayerFullyConnected, BNNSLayerParametersFullyConnected
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import ActivationFunction, Layer, batch_stride, check_data, check_like


class UnaryLayer(Layer):
    """A layer with one input."""

    def apply(self, *, batchSize: int, input: BNNSNDArrayDescriptor, output: BNNSNDArrayDescriptor) -> None:
        """Apply the layer to a packed batch."""
        check_data(input=input, output=output)
        check_like("input", input, getattr(self._filter, "input", None))
        check_like("output", output, getattr(self._filter, "output", None))
        self._call(BNNSFilterApplyBatch, batchSize, input.data, batch_stride(input), output.data, batch_stride(output))

    def applyBackward(
        self,
        *,
        batchSize: int,
        input: BNNSNDArrayDescriptor | None = None,
        output: BNNSNDArrayDescriptor | None = None,
        outputGradient: BNNSNDArrayDescriptor,
        generatingInputGradient: BNNSNDArrayDescriptor | None = None,
        generatingWeightsGradient: BNNSNDArrayDescriptor | None = None,
        generatingBiasGradient: BNNSNDArrayDescriptor | None = None,
    ) -> None:
        """Compute the gradients of a packed batch."""
        check_data(outputGradient=outputGradient, generatingInputGradient=generatingInputGradient)
        check_data(generatingWeightsGradient=generatingWeightsGradient, generatingBiasGradient=generatingBiasGradient)
        for name, array in (("input", input), ("output", output)):
            if array is not None and array.data is not None:
                check_like(name, array, getattr(self._filter, name, None))
        self._call(
            BNNSFilterApplyBackwardBatch,
            batchSize,
            None if input is None else input.data,
            stride_of(input),
            generatingInputGradient,
            stride_of(generatingInputGradient),
            None if output is None else output.data,
            stride_of(output),
            outputGradient,
            stride_of(outputGradient),
            generatingWeightsGradient,
            generatingBiasGradient,
        )


def stride_of(descriptor: BNNSNDArrayDescriptor | None) -> int:
    """The stride of a packed batch; 0 for an array that is not given."""
    return 0 if descriptor is None else batch_stride(descriptor)


class FullyConnectedLayer(UnaryLayer):
    """A fully connected layer."""

    def __init__(
        self,
        *,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        weights: BNNSNDArrayDescriptor,
        bias: BNNSNDArrayDescriptor | None = None,
        activation: ActivationFunction = ActivationFunction.identity,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        parameters = BNNSLayerParametersFullyConnected(
            i_desc=input,
            w_desc=weights,
            o_desc=output,
            bias=BNNSNDArrayDescriptor() if bias is None else bias,
            activation=activation.bnnsActivation,
        )
        super().__init__(lambda: BNNSFilterCreateLayerFullyConnected(parameters, filterParameters))
