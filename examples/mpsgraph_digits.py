"""Train the network of Apple's sample "Training a neural network using MPSGraph", call by call, in Swift's spelling.

    python mpsgraph_digits.py         # 1,797 images of 8 x 8 pixels that come with scikit-learn
    python mpsgraph_digits.py FOLDER  # MNIST: FOLDER has its four files, packed (.gz) or not

Two convolutions of 5 x 5 with ReLU and max pooling, a dense layer of 1,024 units, softmax cross entropy, and stochastic
gradient descent with batches of 16. `mpsgraph_digits_pyobjc.py` is the same program with PyObjC's names.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Semaphore

import numpy as np
from bnns_handwritten_digits import Digits, mnist_digits, scikit_learn_digits

from retrograd.mps import MPSDataType, MTLCreateSystemDefaultDevice
from retrograd.mpsgraph import (
    MPSGraph,
    MPSGraphConvolution2DOpDescriptor,
    MPSGraphDevice,
    MPSGraphExecutionDescriptor,
    MPSGraphLossReductionType,
    MPSGraphPaddingStyle,
    MPSGraphPooling2DOpDescriptor,
    MPSGraphTensor,
    MPSGraphTensorData,
    MPSGraphTensorNamedDataLayout,
)

BATCH, CLASSES, RATE, GOAL = 16, 10, 0.01, 0.97
STEPS = {8: 1800}  # by the images' height; else 300, as in the sample


class Network:
    """The graph, and the tensors by which it is run."""

    def __init__(self, rng: np.random.Generator, height: int, width: int) -> None:
        self.rng, self.device = rng, MPSGraphDevice(mtlDevice=MTLCreateSystemDefaultDevice())
        self.queue = self.device.metalDevice.makeCommandQueue()
        self.pixels = height * width
        self.graph = graph = MPSGraph()
        self.variables: list[MPSGraphTensor] = []

        self.source = graph.placeholder(shape=[-1, self.pixels], dataType=MPSDataType.float32, name="images")
        self.labels = graph.placeholder(shape=[-1, CLASSES], dataType=MPSDataType.float32, name="labels")

        x = graph.reshape(self.source, shape=[-1, height, width, 1], name=None)
        for inputs, outputs in ((1, 32), (32, 64)):
            x = self.convolution(x, inputs, outputs)
            height, width = math.ceil(height / 2), math.ceil(width / 2)
        flat = 64 * height * width
        x = graph.reshape(x, shape=[-1, flat], name=None)
        x = graph.reLU(with_=self.dense(x, flat, 1024), name=None)
        logits = self.dense(x, 1024, CLASSES)
        self.inference = graph.softMax(with_=logits, axis=-1, name=None)

        loss = graph.softMaxCrossEntropy(
            logits, labels=self.labels, axis=-1, reuctionType=MPSGraphLossReductionType.sum, name=None
        )
        batch = graph.constant(BATCH, shape=[1], dataType=MPSDataType.float32)
        self.loss = graph.division(loss, batch, name="loss")

        gradients = graph.gradients(of=self.loss, with_=self.variables, name=None)
        rate = graph.constant(RATE, shape=[1], dataType=MPSDataType.float32)
        self.updates = []
        for variable in self.variables:
            value = graph.stochasticGradientDescent(
                learningRate=rate, values=variable, gradient=gradients[variable], name=None
            )
            self.updates.append(graph.assign(variable, tensor=value, name=None))

    def variable(self, value: np.ndarray) -> MPSGraphTensor:
        data = value.astype(np.float32).tobytes()
        made = self.graph.variable(with_=data, shape=list(value.shape), dataType=MPSDataType.float32, name=None)
        self.variables.append(made)
        return made

    def convolution(self, x: MPSGraphTensor, inputs: int, outputs: int) -> MPSGraphTensor:
        weights = self.variable(self.rng.uniform(-0.2, 0.2, (5, 5, inputs, outputs)))
        bias = self.variable(np.full(outputs, 0.1))
        convolution = MPSGraphConvolution2DOpDescriptor(
            strideInX=1,
            strideInY=1,
            dilationRateInX=1,
            dilationRateInY=1,
            groups=1,
            paddingStyle=MPSGraphPaddingStyle.TF_SAME,
            dataLayout=MPSGraphTensorNamedDataLayout.NHWC,
            weightsLayout=MPSGraphTensorNamedDataLayout.HWIO,
        )
        pooling = MPSGraphPooling2DOpDescriptor(
            kernelWidth=2,
            kernelHeight=2,
            strideInX=2,
            strideInY=2,
            paddingStyle=MPSGraphPaddingStyle.TF_SAME,
            dataLayout=MPSGraphTensorNamedDataLayout.NHWC,
        )
        convolved = self.graph.convolution2D(x, weights=weights, descriptor=convolution, name=None)
        activated = self.graph.reLU(with_=self.graph.addition(convolved, bias, name=None), name=None)
        return self.graph.maxPooling2D(withSourceTensor=activated, descriptor=pooling, name=None)

    def dense(self, x: MPSGraphTensor, inputs: int, outputs: int) -> MPSGraphTensor:
        weights = self.variable(self.rng.uniform(-0.2, 0.2, (inputs, outputs)))
        bias = self.variable(np.full(outputs, 0.1))
        product = self.graph.matrixMultiplication(primary=x, secondary=weights, name=None)
        return self.graph.addition(product, bias, name=None)

    def data(self, values: np.ndarray) -> MPSGraphTensorData:
        return MPSGraphTensorData(
            device=self.device,
            data=values.astype(np.float32).tobytes(),
            shape=list(values.shape),
            dataType=MPSDataType.float32,
        )

    def train(self, images: np.ndarray, labels: np.ndarray, done: MPSGraphExecutionDescriptor) -> None:
        """Encode one step. The descriptor's handler gets the loss."""
        commands = self.queue.makeCommandBuffer()
        self.graph.encode(
            to=commands,
            feeds={
                self.source: self.data(images.reshape(-1, self.pixels)),
                self.labels: self.data(np.eye(CLASSES)[labels]),
            },
            targetTensors=[self.loss],
            targetOperations=self.updates,
            executionDescriptor=done,
        )
        commands.commit()

    def read(self, images: np.ndarray) -> np.ndarray:
        """Which digit each image shows."""
        results = self.graph.run(
            with_=self.queue,
            feeds={self.source: self.data(images.reshape(-1, self.pixels))},
            targetTensors=[self.inference],
            targetOperations=None,
        )
        return results[self.inference].numpy().argmax(1)


def train(network: Network, digits: Digits, steps: int, rng: np.random.Generator) -> None:
    """Two steps are under way at any time, as in the sample: one runs while the next one is prepared."""
    under_way, losses = Semaphore(2), []

    def completed(results: dict[MPSGraphTensor, MPSGraphTensorData], error: Exception | None) -> None:
        losses.append(math.nan if error else float(results[network.loss].numpy().item()))
        if len(losses) % (steps // 10) == 0:
            print(f"step {len(losses):5}: loss {np.mean(losses[-steps // 10 :]):.4f}", flush=True)
        under_way.release()

    descriptor = MPSGraphExecutionDescriptor()
    descriptor.completionHandler = completed
    for _ in range(steps):
        chosen = rng.integers(0, len(digits.images), BATCH)
        under_way.acquire()
        network.train(digits.images[chosen], digits.labels[chosen], descriptor)
    for _ in range(2):
        under_way.acquire()


def main(make: Callable[[np.random.Generator, int, int], Network] = Network) -> int:
    parser = argparse.ArgumentParser(description="Train a small network to read handwritten digits with MPSGraph.")
    parser.add_argument("folder", nargs="?", type=Path, help="has MNIST's four files; scikit-learn's digits without")
    options = parser.parse_args()
    try:
        learned, held_out = mnist_digits(options.folder) if options.folder else scikit_learn_digits()
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    rng = np.random.default_rng(0)
    network = make(rng, *learned.images.shape[1:])
    train(network, learned, STEPS.get(learned.images.shape[1], 300), rng)
    answers = np.concatenate([network.read(held_out.images[n : n + 100]) for n in range(0, len(held_out.images), 100)])
    right = int((answers == held_out.labels).sum())
    print(f"{right} of {len(answers)} new digits are right: {100 * right / len(answers):.1f} %")
    return 0 if right >= GOAL * len(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
