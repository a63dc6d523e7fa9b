"""Apple's Metal Performance Shaders for matrices, on the CPU: batch normalization, recurrent layers, their gradients.

Names, argument labels and rules are Swift's: ``MPSMatrixBatchNormalizationGradient(device=device)``,
``kernel.epsilon = 0.001``, ``kernel.encode(to=commandBuffer, gradientMatrix=...)``. A label that is a Python keyword
ends in an underscore. :mod:`retrograd.mps.pyobjc` has the same objects under PyObjC's names. A failed call raises an
exception and writes nothing. See ``docs/mps.md``.
"""

from __future__ import annotations

from ._archive import NSKeyedArchiver, NSKeyedUnarchiver
from ._batch_normalization import MPSMatrixBatchNormalization, MPSMatrixBatchNormalizationGradient
from ._kernel import MPSKernel, MPSMatrixBinaryKernel, MPSMatrixUnaryKernel
from ._matrix import (
    MPSMatrix,
    MPSMatrixDescriptor,
    MPSTemporaryMatrix,
    MPSTemporaryVector,
    MPSVector,
    MPSVectorDescriptor,
)
from ._metal import (
    MPSSupportsMTLDevice,
    MTLBlitCommandEncoder,
    MTLBuffer,
    MTLCommandBuffer,
    MTLCommandQueue,
    MTLCopyAllDevices,
    MTLCreateSystemDefaultDevice,
    MTLDevice,
)
from ._rnn import MPSRNNMatrixTrainingLayer
from ._rnn_descriptor import (
    MPSCNNConvolutionDataSource,
    MPSCNNConvolutionDescriptor,
    MPSGRUDescriptor,
    MPSLSTMDescriptor,
    MPSNNNeuronDescriptor,
    MPSRNNDescriptor,
    MPSRNNSingleGateDescriptor,
)
from ._rnn_state import MPSRNNMatrixTrainingState, MPSRNNRecurrentMatrixState, MPSState
from ._types import (
    FLT_MIN,
    MPSCNNNeuronType,
    MPSDataType,
    MPSKernelOptions,
    MPSRNNMatrixId,
    MPSRNNSequenceDirection,
    MTLCommandBufferStatus,
    MTLOrigin,
    MTLOriginMake,
    MTLResourceOptions,
    MTLSize,
    MTLSizeMake,
    MTLStorageMode,
    NSError,
    NSMakeRange,
    NSRange,
    NSUIntegerMax,
)

__all__ = [
    "FLT_MIN",
    "MPSCNNConvolutionDataSource",
    "MPSCNNConvolutionDescriptor",
    "MPSCNNNeuronType",
    "MPSDataType",
    "MPSGRUDescriptor",
    "MPSKernel",
    "MPSKernelOptions",
    "MPSLSTMDescriptor",
    "MPSMatrix",
    "MPSMatrixBatchNormalization",
    "MPSMatrixBatchNormalizationGradient",
    "MPSMatrixBinaryKernel",
    "MPSMatrixDescriptor",
    "MPSMatrixUnaryKernel",
    "MPSNNNeuronDescriptor",
    "MPSRNNDescriptor",
    "MPSRNNMatrixId",
    "MPSRNNMatrixTrainingLayer",
    "MPSRNNMatrixTrainingState",
    "MPSRNNRecurrentMatrixState",
    "MPSRNNSequenceDirection",
    "MPSRNNSingleGateDescriptor",
    "MPSState",
    "MPSSupportsMTLDevice",
    "MPSTemporaryMatrix",
    "MPSTemporaryVector",
    "MPSVector",
    "MPSVectorDescriptor",
    "MTLBlitCommandEncoder",
    "MTLBuffer",
    "MTLCommandBuffer",
    "MTLCommandBufferStatus",
    "MTLCommandQueue",
    "MTLCopyAllDevices",
    "MTLCreateSystemDefaultDevice",
    "MTLDevice",
    "MTLOrigin",
    "MTLOriginMake",
    "MTLResourceOptions",
    "MTLSize",
    "MTLSizeMake",
    "MTLStorageMode",
    "NSError",
    "NSKeyedArchiver",
    "NSKeyedUnarchiver",
    "NSMakeRange",
    "NSRange",
    "NSUIntegerMax",
]
