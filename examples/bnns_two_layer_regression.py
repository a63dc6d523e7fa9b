"""Fit one sample with two fully connected BNNS layers, a squared error and Adam, as a small C program would.

Each layer is a filter over the client's weights, so it sees every update by the optimizer, which runs once for the
weights and once for the bias of each layer. The loss filter computes the sum of squared errors and its gradient in one
call. Batch strides are 0 throughout: samples are packed.
"""

from __future__ import annotations

import sys

import numpy as np

from retrograd import bnns
from retrograd.bnns import BNNSNDArrayDescriptor as Descriptor

STEPS = 100


def vector(size: int, data: np.ndarray | None = None) -> Descriptor:
    return Descriptor(layout=bnns.BNNSDataLayoutVector, size=(size,), data=data, data_type=bnns.BNNSDataTypeFloat32)


def check(status: int) -> None:
    if status != 0:
        sys.exit(bnns.last_error())


class Dense:
    """A fully connected layer with its gradients and the accumulators of Adam."""

    def __init__(self, rng: np.random.Generator, inputs: int, outputs: int) -> None:
        self.weights = rng.random((outputs, inputs), dtype=np.float32)
        self.bias = rng.random(outputs, dtype=np.float32)
        self.out, self.in_delta = np.zeros(outputs, np.float32), np.zeros(inputs, np.float32)
        self.weights_delta, self.bias_delta = np.zeros_like(self.weights), np.zeros_like(self.bias)
        self.moments = [np.zeros_like(array) for array in (self.weights, self.weights, self.bias, self.bias)]
        layer = bnns.BNNSLayerParametersFullyConnected(
            i_desc=vector(inputs),
            w_desc=Descriptor(
                layout=bnns.BNNSDataLayoutRowMajorMatrix,
                size=(inputs, outputs),
                data=self.weights,
                data_type=bnns.BNNSDataTypeFloat32,
            ),
            o_desc=vector(outputs),
            bias=vector(outputs, self.bias),
            activation=bnns.BNNSActivation(bnns.BNNSActivationFunctionIdentity),
        )
        settings = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)
        self.filter = bnns.BNNSFilterCreateLayerFullyConnected(layer, settings)
        if self.filter is None:
            sys.exit(bnns.last_error())

    def forward(self, source: np.ndarray) -> np.ndarray:
        check(bnns.BNNSFilterApply(self.filter, source, self.out))
        return self.out

    def backward(self, source: np.ndarray, out_delta: np.ndarray, adam: bnns.BNNSOptimizerAdamFields) -> np.ndarray:
        """Compute the gradients, update weights and bias, and return the gradient of the input."""
        check(
            bnns.BNNSFilterApplyBackwardBatch(
                self.filter,
                1,
                source,
                0,
                vector(len(self.in_delta), self.in_delta),
                0,
                self.out,
                0,
                vector(len(out_delta), out_delta),
                0,
                Descriptor.from_array(self.weights_delta),
                Descriptor.from_array(self.bias_delta),
            )
        )
        for parameter, gradient, moments in (
            (self.weights, self.weights_delta, self.moments[:2]),
            (self.bias, self.bias_delta, self.moments[2:]),
        ):
            arrays = [[Descriptor.from_array(array) for array in group] for group in ([parameter], [gradient], moments)]
            check(bnns.BNNSOptimizerStep(bnns.BNNSOptimizerFunctionAdam, adam, 1, *arrays, None))
        return self.in_delta


def main() -> int:
    rng = np.random.default_rng(0)
    source, target = np.array([1, 2, 3, 4], np.float32), np.array([1, 3, 5], np.float32)
    first, second = Dense(rng, 4, 8), Dense(rng, 8, 3)
    error = bnns.BNNSLayerParametersLossBase(
        function=bnns.BNNSLossFunctionMeanSquareError,
        i_desc=vector(3),
        o_desc=vector(1),
        reduction=bnns.BNNSLossReductionSum,
    )
    cost = bnns.BNNSFilterCreateLayerLoss(error, None)
    if cost is None:
        sys.exit(bnns.last_error())
    adam = bnns.BNNSOptimizerAdamFields(
        learning_rate=0.01,
        beta1=0.9,
        beta2=0.9,
        time_step=1,
        epsilon=1e-2,
        gradient_scale=1,
        clip_gradients=True,
        clip_gradients_min=-1000,
        clip_gradients_max=1000,
    )

    loss, delta = np.zeros(1, np.float32), np.zeros(3, np.float32)
    losses = []
    for step in range(STEPS + 1):
        hidden = first.forward(source)
        output = second.forward(hidden)
        check(bnns.BNNSLossFilterApplyBatch(cost, 1, output, 0, target, 0, None, 0, loss, vector(3, delta), 0))
        losses.append(float(loss[0]))
        if step % 20 == 0:
            print(f"step {step:3}: loss {losses[-1]:.4f}, output {np.round(output, 2)}")
        hidden_delta = second.backward(hidden, delta, adam)
        first.backward(source, hidden_delta, adam)
        adam.time_step += 1

    for filter in (first.filter, second.filter, cost):
        bnns.BNNSFilterDestroy(filter)
    return 0 if losses[-1] < 0.01 * losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
