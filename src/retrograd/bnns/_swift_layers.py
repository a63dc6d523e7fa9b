"""Swift's layers with one input, over the functions that apply any filter, and its copies of arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import _constants as c
from ._apply import BNNSFilterApplyBackwardBatch, BNNSFilterApplyBatch
from ._copy import BNNSCopy, BNNSTranspose
from ._embedding import BNNSFilterCreateLayerEmbedding, BNNSLayerParametersEmbedding
from ._fully_connected import BNNSFilterCreateLayerFullyConnected, BNNSLayerParametersFullyConnected
from ._memory import dtype_of
from ._sample_map import (
    BNNSFilterCreateLayerDropout,
    BNNSFilterCreateLayerPadding,
    BNNSFilterCreateLayerPermute,
    BNNSLayerParametersDropout,
    BNNSLayerParametersPadding,
    BNNSLayerParametersPermute,
)
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import ActivationFunction, Layer, batch_stride, check_data, check_like, checked_call


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


class DropoutLayer(UnaryLayer):
    """Dropout. `seed` 0 means a different mask in every process."""

    def __init__(
        self,
        *,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        rate: float,
        seed: int,
        control: int,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        parameters = BNNSLayerParametersDropout(input, output, rate, seed, control)
        super().__init__(lambda: BNNSFilterCreateLayerDropout(parameters, filterParameters))


class PermuteLayer(UnaryLayer):
    """A permutation of axes."""

    def __init__(
        self,
        *,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        permutation: Sequence[int],
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        parameters = BNNSLayerParametersPermute(input, output, permutation)
        super().__init__(lambda: BNNSFilterCreateLayerPermute(parameters, filterParameters))


class PaddingMode:
    """What is padded with: ``PaddingMode.constantScalar(0.5)``, ``PaddingMode.reflect``."""

    def __init__(self, mode: int, scalar: float | None = None, bits: int = 0) -> None:
        self.mode, self._scalar, self._bits = mode, scalar, bits

    reflect: PaddingMode
    symmetric: PaddingMode

    @classmethod
    def constantScalar(cls, value: float) -> PaddingMode:
        return cls(c.BNNSPaddingModeConstant, scalar=value)

    @classmethod
    def constantBitPattern(cls, bits: int) -> PaddingMode:
        return cls(c.BNNSPaddingModeConstant, bits=bits)

    def bits_for(self, data_type: int) -> int:
        """The constant as elements of this type store it."""
        if self._scalar is None:
            return self._bits
        with np.errstate(all="ignore"):
            image = np.array(self._scalar).astype(dtype_of(data_type)).tobytes()
        return int.from_bytes(image[:4], "little")


PaddingMode.reflect = PaddingMode(c.BNNSPaddingModeReflect)
PaddingMode.symmetric = PaddingMode(c.BNNSPaddingModeSymmetric)


class PaddingLayer(UnaryLayer):
    """Padding. `size` has the padding before and after each axis."""

    def __init__(
        self,
        *,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        mode: PaddingMode,
        size: Sequence[tuple[int, int]],
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        bits = mode.bits_for(input.data_type)
        parameters = BNNSLayerParametersPadding(input, output, size, mode.mode, bits)
        super().__init__(lambda: BNNSFilterCreateLayerPadding(parameters, filterParameters))


class Norm:
    """A norm by its exponent."""

    def __init__(self, rawValue: float) -> None:
        self.rawValue = rawValue

    l1: Norm
    taxicab: Norm
    l2: Norm
    euclidean: Norm
    lInfinity: Norm
    maximum: Norm


Norm.l1 = Norm.taxicab = Norm(1.0)
Norm.l2 = Norm.euclidean = Norm(2.0)
Norm.lInfinity = Norm.maximum = Norm(float("inf"))


class EmbeddingLayer(Layer):
    """A lookup of items in a dictionary."""

    def __init__(
        self,
        *,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        dictionary: BNNSNDArrayDescriptor,
        paddingIndex: int,
        maximumNorm: float,
        normType: Norm,
        scalesGradientByFrequency: bool,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        flags = c.BNNSEmbeddingFlagScaleGradientByFrequency if scalesGradientByFrequency else 0
        parameters = BNNSLayerParametersEmbedding(
            flags, input, output, dictionary, paddingIndex, maximumNorm, normType.rawValue
        )
        super().__init__(lambda: BNNSFilterCreateLayerEmbedding(parameters, filterParameters))

    def apply(self, *, batchSize: int, input: BNNSNDArrayDescriptor, output: BNNSNDArrayDescriptor) -> None:
        """Look up the items of a packed batch of indices."""
        check_data(input=input, output=output)
        check_like("input", input, getattr(self._filter, "input", None))
        check_like("output", output, getattr(self._filter, "output", None))
        self._call(BNNSFilterApplyBatch, batchSize, input.data, batch_stride(input), output.data, batch_stride(output))

    def applyBackward(
        self,
        *,
        batchSize: int,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor | None = None,
        outputGradient: BNNSNDArrayDescriptor,
        generatingWeightsGradient: BNNSNDArrayDescriptor,
    ) -> None:
        """Compute the gradient of the dictionary. `output` is ignored."""
        check_data(input=input, outputGradient=outputGradient, generatingWeightsGradient=generatingWeightsGradient)
        check_like("input", input, getattr(self._filter, "input", None))
        self._call(
            BNNSFilterApplyBackwardBatch,
            batchSize,
            input.data,
            batch_stride(input),
            None,
            0,
            None,
            0,
            outputGradient,
            batch_stride(outputGradient),
            generatingWeightsGradient,
            None,
        )


def copy(
    source: BNNSNDArrayDescriptor, *, to: BNNSNDArrayDescriptor, filterParameters: BNNSFilterParameters | None = None
) -> None:
    """Copy an array, converting its type."""
    check_data(source=source, to=to)
    checked_call(BNNSCopy, to, source, filterParameters)


def transpose(
    *,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    firstTransposeAxis: int,
    secondTransposeAxis: int,
    filterParameters: BNNSFilterParameters | None = None,
) -> None:
    """Copy an array with two axes exchanged."""
    check_data(input=input, output=output)
    checked_call(BNNSTranspose, output, input, firstTransposeAxis, secondTransposeAxis, filterParameters)
