"""Train the network of Apple's sample "Training a neural network using MPSGraph", call by call, with PyObjC's names.

    python mpsgraph_digits_pyobjc.py         # 1,797 images of 8 x 8 pixels that come with scikit-learn
    python mpsgraph_digits_pyobjc.py FOLDER  # MNIST: FOLDER has its four files, packed (.gz) or not

`mpsgraph_digits.py` is the same program in Swift's spelling, and prints the same numbers.
"""

from __future__ import annotations

import math
import sys

import mpsgraph_digits
import numpy as np
from mpsgraph_digits import BATCH, CLASSES, RATE

import retrograd.mps.pyobjc as Metal
import retrograd.mpsgraph.pyobjc as MPSGraph

FLOAT = Metal.MPSDataTypeFloat32


class Network:
    """The graph, and the tensors by which it is run."""

    def __init__(self, rng: np.random.Generator, height: int, width: int) -> None:
        device = Metal.MTLCreateSystemDefaultDevice()
        self.rng, self.device = rng, MPSGraph.MPSGraphDevice.deviceWithMTLDevice_(device)
        self.queue = device.newCommandQueue()
        self.pixels = height * width
        self.graph = graph = MPSGraph.MPSGraph.alloc().init()
        self.variables: list[MPSGraph.MPSGraphTensor] = []

        self.source = graph.placeholderWithShape_dataType_name_([-1, self.pixels], FLOAT, "images")
        self.labels = graph.placeholderWithShape_dataType_name_([-1, CLASSES], FLOAT, "labels")

        x = graph.reshapeTensor_withShape_name_(self.source, [-1, height, width, 1], None)
        for inputs, outputs in ((1, 32), (32, 64)):
            x = self.convolution(x, inputs, outputs)
            height, width = math.ceil(height / 2), math.ceil(width / 2)
        flat = 64 * height * width
        x = graph.reshapeTensor_withShape_name_(x, [-1, flat], None)
        x = graph.reLUWithTensor_name_(self.dense(x, flat, 1024), None)
        logits = self.dense(x, 1024, CLASSES)
        self.inference = graph.softMaxWithTensor_axis_name_(logits, -1, None)

        loss = graph.softMaxCrossEntropyWithSourceTensor_labelsTensor_axis_reductionType_name_(
            logits, self.labels, -1, MPSGraph.MPSGraphLossReductionTypeSum, None
        )
        batch = graph.constantWithScalar_shape_dataType_(BATCH, [1], FLOAT)
        self.loss = graph.divisionWithPrimaryTensor_secondaryTensor_name_(loss, batch, "loss")

        gradients = graph.gradientForPrimaryTensor_withTensors_name_(self.loss, self.variables, None)
        rate = graph.constantWithScalar_shape_dataType_(RATE, [1], FLOAT)
        self.updates = []
        for variable in self.variables:
            value = graph.stochasticGradientDescentWithLearningRateTensor_valuesTensor_gradientTensor_name_(
                rate, variable, gradients[variable], None
            )
            self.updates.append(graph.assignVariable_withValueOfTensor_name_(variable, value, None))

    def variable(self, value: np.ndarray) -> MPSGraph.MPSGraphTensor:
        data = value.astype(np.float32).tobytes()
        made = self.graph.variableWithData_shape_dataType_name_(data, list(value.shape), FLOAT, None)
        self.variables.append(made)
        return made

    def convolution(self, x: MPSGraph.MPSGraphTensor, inputs: int, outputs: int) -> MPSGraph.MPSGraphTensor:
        graph = self.graph
        weights = self.variable(self.rng.uniform(-0.2, 0.2, (5, 5, inputs, outputs)))
        bias = self.variable(np.full(outputs, 0.1))
        describe = MPSGraph.MPSGraphConvolution2DOpDescriptor
        convolution = describe.descriptorWithStrideInX_strideInY_dilationRateInX_dilationRateInY_groups_paddingStyle_dataLayout_weightsLayout_(  # noqa: E501
            1,
            1,
            1,
            1,
            1,
            MPSGraph.MPSGraphPaddingStyleTF_SAME,
            MPSGraph.MPSGraphTensorNamedDataLayoutNHWC,
            MPSGraph.MPSGraphTensorNamedDataLayoutHWIO,
        )
        describe = MPSGraph.MPSGraphPooling2DOpDescriptor
        pooling = describe.descriptorWithKernelWidth_kernelHeight_strideInX_strideInY_paddingStyle_dataLayout_(
            2, 2, 2, 2, MPSGraph.MPSGraphPaddingStyleTF_SAME, MPSGraph.MPSGraphTensorNamedDataLayoutNHWC
        )
        convolved = graph.convolution2DWithSourceTensor_weightsTensor_descriptor_name_(x, weights, convolution, None)
        biased = graph.additionWithPrimaryTensor_secondaryTensor_name_(convolved, bias, None)
        activated = graph.reLUWithTensor_name_(biased, None)
        return graph.maxPooling2DWithSourceTensor_descriptor_name_(activated, pooling, None)

    def dense(self, x: MPSGraph.MPSGraphTensor, inputs: int, outputs: int) -> MPSGraph.MPSGraphTensor:
        weights = self.variable(self.rng.uniform(-0.2, 0.2, (inputs, outputs)))
        bias = self.variable(np.full(outputs, 0.1))
        product = self.graph.matrixMultiplicationWithPrimaryTensor_secondaryTensor_name_(x, weights, None)
        return self.graph.additionWithPrimaryTensor_secondaryTensor_name_(product, bias, None)

    def data(self, values: np.ndarray) -> MPSGraph.MPSGraphTensorData:
        content = values.astype(np.float32).tobytes()
        made = MPSGraph.MPSGraphTensorData.alloc()
        return made.initWithDevice_data_shape_dataType_(self.device, content, list(values.shape), FLOAT)

    def train(self, images: np.ndarray, labels: np.ndarray, done: MPSGraph.MPSGraphExecutionDescriptor) -> None:
        """Encode one step. The descriptor's handler gets the loss."""
        commands = self.queue.commandBuffer()
        self.graph.encodeToCommandBuffer_feeds_targetTensors_targetOperations_executionDescriptor_(
            commands,
            {
                self.source: self.data(images.reshape(-1, self.pixels)),
                self.labels: self.data(np.eye(CLASSES)[labels]),
            },
            [self.loss],
            self.updates,
            done,
        )
        commands.commit()

    def read(self, images: np.ndarray) -> np.ndarray:
        """Which digit each image shows."""
        results = self.graph.runWithMTLCommandQueue_feeds_targetTensors_targetOperations_(
            self.queue, {self.source: self.data(images.reshape(-1, self.pixels))}, [self.inference], None
        )
        return results[self.inference].numpy().argmax(1)


if __name__ == "__main__":
    sys.exit(mpsgraph_digits.main(Network))
