"""Swift's ``ActivationLayer`` and ``applyActivation``."""

from __future__ import annotations

from collections.abc import Sequence

from ._activation_filter import BNNSDirectApplyActivationBatch, BNNSFilterCreateLayerActivation
from ._structures import BNNSFilterParameters, BNNSLayerParametersActivation, BNNSNDArrayDescriptor
from ._swift import ActivationFunction, axis_flags, batch_stride, check_data, checked_call
from ._swift_layers import UnaryLayer


def _parameters(
    function: ActivationFunction,
    axes: Sequence[int] | None,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
) -> BNNSLayerParametersActivation:
    return BNNSLayerParametersActivation(
        i_desc=input, o_desc=output, activation=function.bnnsActivation, axis_flags=axis_flags(axes)
    )


class ActivationLayer(UnaryLayer):
    """An activation. `axes` are those of a softmax; one more than the last axis is the batch."""

    def __init__(
        self,
        *,
        function: ActivationFunction,
        axes: Sequence[int] | None = None,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        parameters = _parameters(function, axes, input, output)
        super().__init__(lambda: BNNSFilterCreateLayerActivation(parameters, filterParameters))


def applyActivation(
    *,
    activation: ActivationFunction,
    axes: Sequence[int] | None = None,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    batchSize: int,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Apply an activation to a packed batch, without a layer."""
    check_data(input=input, output=output)
    checked_call(
        BNNSDirectApplyActivationBatch,
        _parameters(activation, axes, input, output),
        filterParameters,
        batchSize,
        batch_stride(input),
        batch_stride(output),
    )
