"""Apple's Metal Performance Shaders Graph, its training subset, on the CPU.

Names, argument labels and rules are Swift's::

    graph = MPSGraph()
    x = graph.placeholder(shape=[-1, 4], dataType=MPSDataType.float32, name="x")
    w = graph.variable(with_=w0.tobytes(), shape=[4, 3], dataType=MPSDataType.float32, name="w")
    y = graph.matrixMultiplication(primary=x, secondary=w, name=None)
    results = graph.run(feeds={x: MPSGraphTensorData(array)}, targetTensors=[y])

A label that is a Python keyword ends in an underscore. :mod:`retrograd.mpsgraph.pyobjc` has the same objects under
PyObjC's names. A failed call raises an exception that names the tensor, and writes nothing. See ``docs/mpsgraph.md``.
"""

from __future__ import annotations

from ..mps import MPSDataType
from ._control import MPSGraph
from ._data import MPSCommandBuffer, MPSGraphTensorData, MPSNDArray
from ._graph import MPSGraphOperation, MPSGraphTensor, MPSGraphVariableOp
from ._running import MPSGraphExecutable
from ._types import (
    MPSGraphCompilationDescriptor,
    MPSGraphConvolution2DOpDescriptor,
    MPSGraphDepthwiseConvolution2DOpDescriptor,
    MPSGraphDevice,
    MPSGraphDeviceType,
    MPSGraphExecutableExecutionDescriptor,
    MPSGraphExecutableSerializationDescriptor,
    MPSGraphExecutionDescriptor,
    MPSGraphExecutionStage,
    MPSGraphGRUDescriptor,
    MPSGraphLossReductionType,
    MPSGraphLSTMDescriptor,
    MPSGraphObject,
    MPSGraphOptimization,
    MPSGraphOptions,
    MPSGraphPaddingMode,
    MPSGraphPaddingStyle,
    MPSGraphPooling2DOpDescriptor,
    MPSGraphPooling4DOpDescriptor,
    MPSGraphPoolingReturnIndicesMode,
    MPSGraphRandomDistribution,
    MPSGraphRandomNormalSamplingMethod,
    MPSGraphRandomOpDescriptor,
    MPSGraphReductionMode,
    MPSGraphRNNActivation,
    MPSGraphScatterMode,
    MPSGraphShapedType,
    MPSGraphSingleGateRNNDescriptor,
    MPSGraphTensorNamedDataLayout,
    MPSGraphType,
)

__all__ = [
    "MPSCommandBuffer",
    "MPSDataType",
    "MPSGraph",
    "MPSGraphCompilationDescriptor",
    "MPSGraphConvolution2DOpDescriptor",
    "MPSGraphDepthwiseConvolution2DOpDescriptor",
    "MPSGraphDevice",
    "MPSGraphDeviceType",
    "MPSGraphExecutable",
    "MPSGraphExecutableExecutionDescriptor",
    "MPSGraphExecutableSerializationDescriptor",
    "MPSGraphExecutionDescriptor",
    "MPSGraphExecutionStage",
    "MPSGraphGRUDescriptor",
    "MPSGraphLSTMDescriptor",
    "MPSGraphLossReductionType",
    "MPSGraphObject",
    "MPSGraphOperation",
    "MPSGraphOptimization",
    "MPSGraphOptions",
    "MPSGraphPaddingMode",
    "MPSGraphPaddingStyle",
    "MPSGraphPooling2DOpDescriptor",
    "MPSGraphPooling4DOpDescriptor",
    "MPSGraphPoolingReturnIndicesMode",
    "MPSGraphRNNActivation",
    "MPSGraphRandomDistribution",
    "MPSGraphRandomNormalSamplingMethod",
    "MPSGraphRandomOpDescriptor",
    "MPSGraphReductionMode",
    "MPSGraphScatterMode",
    "MPSGraphShapedType",
    "MPSGraphSingleGateRNNDescriptor",
    "MPSGraphTensor",
    "MPSGraphTensorData",
    "MPSGraphTensorNamedDataLayout",
    "MPSGraphType",
    "MPSGraphVariableOp",
    "MPSNDArray",
]
