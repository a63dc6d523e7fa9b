"""Train a multilayer perceptron with BNNS filters and a cost made of arithmetic, as a tensor library over BNNS does.

Activations are filters of their own. They overwrite the output of the layer before them, and their backward calls
overwrite the gradient of that output: slopes are computed from outputs, so no input has to be kept. The cost is half
the squared error, whose gradient is the difference of output and target: an arithmetic filter over whole batches, whose
three operands are constants. Stochastic gradient descent with momentum divides that gradient by the number of samples.
"""

from __future__ import annotations

import sys
from typing import TypeVar

import numpy as np

from retrograd import bnns
from retrograd.bnns import BNNSNDArrayDescriptor as Descriptor

INPUTS, HIDDEN, BATCH, STEPS = 4, 32, 64, 1200

Made = TypeVar("Made")


def function(x: np.ndarray) -> np.ndarray:
    """What the network learns: a smooth wave, a product and a kink."""
    a, b, c, d = x.T
    return (np.sin(3 * a) + b * c - np.abs(d))[:, None].astype(np.float32)


def vector(size: int, data: np.ndarray | None = None) -> Descriptor:
    return Descriptor(layout=bnns.BNNSDataLayoutVector, size=(size,), data=data, data_type=bnns.BNNSDataTypeFloat32)


def created(filter: Made | None) -> Made:
    if filter is None:
        sys.exit(bnns.last_error())
    return filter


def check(status: int) -> None:
    if status != 0:
        sys.exit(bnns.last_error())


class Dense:
    """A fully connected layer of a batch, without an activation."""

    def __init__(self, rng: np.random.Generator, inputs: int, outputs: int) -> None:
        bound = np.sqrt(6 / (inputs + outputs))
        weights, bias = rng.uniform(-bound, bound, (outputs, inputs)).astype(np.float32), np.zeros(outputs, np.float32)
        self.parameters = [Descriptor.from_array(array) for array in (weights, bias)]
        self.gradients = [Descriptor.from_array(np.zeros_like(array)) for array in (weights, bias)]
        self.inputs, self.outputs = inputs, outputs
        self.out, self.in_delta = np.zeros((BATCH, outputs), np.float32), np.zeros((BATCH, inputs), np.float32)
        layer = bnns.BNNSLayerParametersFullyConnected(
            i_desc=vector(inputs), w_desc=self.parameters[0], o_desc=vector(outputs), bias=self.parameters[1]
        )
        settings = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)
        self.filter = created(bnns.BNNSFilterCreateLayerFullyConnected(layer, settings))

    def forward(self, source: np.ndarray) -> np.ndarray:
        self.source = source
        check(bnns.BNNSFilterApplyBatch(self.filter, BATCH, source, self.inputs, self.out, self.outputs))
        return self.out

    def backward(self, delta: np.ndarray) -> np.ndarray:
        check(
            bnns.BNNSFilterApplyBackwardBatch(
                self.filter,
                BATCH,
                self.source,
                self.inputs,
                vector(self.inputs, self.in_delta),
                self.inputs,
                None,  # the output is only needed by a fused activation
                0,
                vector(self.outputs, delta),
                self.outputs,
                *self.gradients,
            )
        )
        return self.in_delta


class Activation:
    """An activation in place, of arrays with `size` values for each sample."""

    def __init__(self, function: int, size: int) -> None:
        self.size = size
        layer = bnns.BNNSLayerParametersActivation(
            i_desc=vector(size), o_desc=vector(size), activation=bnns.BNNSActivation(function)
        )
        self.filter = created(bnns.BNNSFilterCreateLayerActivation(layer, None))

    def forward(self, values: np.ndarray) -> np.ndarray:
        self.out = values
        check(bnns.BNNSFilterApplyBatch(self.filter, BATCH, values, self.size, values, self.size))
        return values

    def backward(self, delta: np.ndarray) -> np.ndarray:
        in_delta = out_delta = vector(self.size, delta)
        check(
            bnns.BNNSFilterApplyBackwardBatch(
                self.filter,
                BATCH,
                None,
                0,
                in_delta,
                self.size,
                self.out,
                self.size,
                out_delta,
                self.size,
                None,
                None,
            )
        )
        return delta


def main() -> int:
    rng = np.random.default_rng(0)
    first, second, third = Dense(rng, INPUTS, HIDDEN), Dense(rng, HIDDEN, HIDDEN), Dense(rng, HIDDEN, 1)
    relu = Activation(bnns.BNNSActivationFunctionRectifiedLinear, HIDDEN)
    tanh = Activation(bnns.BNNSActivationFunctionTanh, HIDDEN)
    layers = [first, relu, second, tanh, third]
    dense = [first, second, third]

    # The difference of two whole batches: constants have no batch axis, so the batch is part of the descriptor.
    batch = vector(BATCH)
    constant = bnns.BNNSConstant
    operands = bnns.BNNSArithmeticBinary(batch, constant, batch, constant, batch, constant)
    subtract = created(
        bnns.BNNSFilterCreateLayerArithmetic(bnns.BNNSLayerParametersArithmetic(bnns.BNNSArithmeticSubtract, operands))
    )

    parameters = [parameter for layer in dense for parameter in layer.parameters]
    gradients = [gradient for layer in dense for gradient in layer.gradients]
    velocities = [Descriptor.from_array(np.zeros_like(parameter.data)) for parameter in parameters]
    sgd = bnns.BNNSOptimizerSGDMomentumFields(learning_rate=0.05, momentum=0.9, gradient_scale=1 / BATCH)

    def forward(x: np.ndarray) -> np.ndarray:
        for layer in layers:
            x = layer.forward(x)
        return x

    difference = np.zeros((BATCH, 1), np.float32)
    losses: list[float] = []
    for step in range(STEPS + 1):
        if step == STEPS * 2 // 3:
            sgd.learning_rate /= 10
        x = rng.uniform(-1, 1, (BATCH, INPUTS)).astype(np.float32)
        output = forward(x)
        check(bnns.BNNSArithmeticFilterApplyBatch(subtract, 1, 2, [output, function(x)], [0, 0], difference, 0))
        losses.append(float(np.square(difference).mean()) / 2)
        if step % 200 == 0:
            print(f"step {step:4}: loss {np.mean(losses[-200:]):.5f}")
        delta = difference
        for layer in reversed(layers):
            delta = layer.backward(delta)
        check(
            bnns.BNNSOptimizerStep(
                bnns.BNNSOptimizerFunctionSGDMomentum, sgd, len(parameters), parameters, gradients, velocities, None
            )
        )

    x = rng.uniform(-1, 1, (BATCH, INPUTS)).astype(np.float32)
    target = function(x)
    explained = 1 - float(np.square(forward(x) - target).sum() / np.square(target - target.mean()).sum())
    print(f"{100 * explained:.1f} % of the variance of new values is explained")
    for filter in (*(layer.filter for layer in layers), subtract):
        bnns.BNNSFilterDestroy(filter)
    return 0 if explained > 0.98 else 1


if __name__ == "__main__":
    sys.exit(main())
