"""Swift's ``BNNS.PoolingLayer`` and its types."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _constants as c
from ._pooling import (
    BNNSFilterCreateLayerPooling,
    BNNSLayerParametersPooling,
    BNNSPoolingFilterApplyBackwardBatchEx,
    BNNSPoolingFilterApplyBatchEx,
)
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import ActivationFunction, Layer, batch_stride, check_data, check_like
from ._swift_layers import stride_of


class ConvolutionPadding:
    """The padding of an image, made by :meth:`symmetric` or :meth:`asymmetric`; ``ConvolutionPadding.zero`` is none."""

    zero: ConvolutionPadding

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    @classmethod
    def symmetric(cls, x: int, y: int) -> ConvolutionPadding:
        return cls({"x_padding": x, "y_padding": y})

    @classmethod
    def asymmetric(cls, left: int, right: int, up: int, down: int) -> ConvolutionPadding:
        return cls({"pad": (left, right, up, down)})


ConvolutionPadding.zero = ConvolutionPadding.symmetric(0, 0)


class PoolingType:
    """A kind of pooling with its own parameters.

    Indices are an array of Swift's Int (int64) or of uint64, or a descriptor of UInt64 or UInt32.
    """

    def __init__(self, function: int, indices: Any = None, xDilationStride: int = 0, yDilationStride: int = 0) -> None:
        self.function = function
        self.fields = {"x_dilation_stride": xDilationStride, "y_dilation_stride": yDilationStride}
        self.index_type, self.indices = c.BNNSDataTypeUInt64, indices
        if isinstance(indices, BNNSNDArrayDescriptor):
            self.index_type, self.indices = indices.data_type, indices.data
        elif isinstance(indices, np.ndarray) and indices.dtype == np.int64:
            self.indices = indices.view(np.uint64)

    @classmethod
    def max(cls, indices: Any = None, xDilationStride: int = 0, yDilationStride: int = 0) -> PoolingType:
        return cls(c.BNNSPoolingFunctionMax, indices, xDilationStride, yDilationStride)

    @classmethod
    def maxEx(
        cls,
        indicesDescriptor: BNNSNDArrayDescriptor | None = None,
        xDilationStride: int = 0,
        yDilationStride: int = 0,
    ) -> PoolingType:
        return cls(c.BNNSPoolingFunctionMax, indicesDescriptor, xDilationStride, yDilationStride)

    @classmethod
    def unMax(cls, indices: Any, xDilationStride: int = 0, yDilationStride: int = 0) -> PoolingType:
        return cls(c.BNNSPoolingFunctionUnMax, indices, xDilationStride, yDilationStride)

    @classmethod
    def unMaxEx(
        cls, indicesDescriptor: BNNSNDArrayDescriptor, xDilationStride: int = 0, yDilationStride: int = 0
    ) -> PoolingType:
        return cls(c.BNNSPoolingFunctionUnMax, indicesDescriptor, xDilationStride, yDilationStride)

    @classmethod
    def average(cls, countIncludesPadding: bool) -> PoolingType:
        including = c.BNNSPoolingFunctionAverageCountIncludePadding
        return cls(including if countIncludesPadding else c.BNNSPoolingFunctionAverageCountExcludePadding)

    l2Norm: PoolingType


PoolingType.l2Norm = PoolingType(c.BNNSPoolingFunctionL2Norm)


class PoolingLayer(Layer):
    """A pooling layer."""

    def __init__(
        self,
        *,
        type: PoolingType,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        bias: BNNSNDArrayDescriptor | None = None,
        activation: ActivationFunction = ActivationFunction.identity,
        kernelSize: tuple[int, int],
        stride: tuple[int, int],
        padding: ConvolutionPadding = ConvolutionPadding.zero,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        self._type = type
        parameters = BNNSLayerParametersPooling(
            i_desc=input,
            o_desc=output,
            bias=BNNSNDArrayDescriptor() if bias is None else bias,
            activation=activation.bnnsActivation,
            pooling_function=type.function,
            k_width=kernelSize[0],
            k_height=kernelSize[1],
            x_stride=stride[0],
            y_stride=stride[1],
            **type.fields,
            **padding.fields,
        )
        super().__init__(lambda: BNNSFilterCreateLayerPooling(parameters, filterParameters))

    def apply(self, *, batchSize: int, input: BNNSNDArrayDescriptor, output: BNNSNDArrayDescriptor) -> None:
        """Pool a packed batch."""
        check_data(input=input, output=output)
        check_like("input", input, getattr(self._filter, "input", None))
        check_like("output", output, getattr(self._filter, "output", None))
        self._call(
            BNNSPoolingFilterApplyBatchEx,
            batchSize,
            input.data,
            batch_stride(input),
            output.data,
            batch_stride(output),
            self._type.index_type,
            self._type.indices,
            0,
        )

    def applyBackward(
        self,
        *,
        batchSize: int,
        input: BNNSNDArrayDescriptor | None = None,
        output: BNNSNDArrayDescriptor | None = None,
        outputGradient: BNNSNDArrayDescriptor,
        generatingInputGradient: BNNSNDArrayDescriptor | None = None,
        generatingBiasGradient: BNNSNDArrayDescriptor | None = None,
    ) -> None:
        """Compute the gradients of a packed batch."""
        check_data(outputGradient=outputGradient, generatingInputGradient=generatingInputGradient)
        check_data(generatingBiasGradient=generatingBiasGradient)
        for name, array in (("input", input), ("output", output)):
            if array is not None and array.data is not None:
                check_like(name, array, getattr(self._filter, name, None))
        self._call(
            BNNSPoolingFilterApplyBackwardBatchEx,
            batchSize,
            None if input is None else input.data,
            stride_of(input),
            generatingInputGradient,
            stride_of(generatingInputGradient),
            None if output is None else output.data,
            stride_of(output),
            outputGradient,
            stride_of(outputGradient),
            generatingBiasGradient,
            self._type.index_type,
            self._type.indices,
            0,
        )
