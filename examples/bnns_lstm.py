"""Train an LSTM with Apple's BNNS functions: it learns to continue a noisy sine wave.

The arrays are described once and updated in place. Each training step runs forward, which fills a cache for backward;
backward, which writes the gradients of all weights; and an update of the weights. The readout, the loss and the update
(Adam) are a few lines of NumPy.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from retrograd import bnns

STEPS, BATCH, UNITS = 24, 32, 16
GATES = ("input_gate", "forget_gate", "candidate_gate", "output_gate")

Array = np.ndarray[Any, np.dtype[np.float32]]


def waves(rng: np.random.Generator) -> tuple[Array, Array]:
    """Noisy sine waves of random frequency and phase, and the clean values one step later."""
    t = np.arange(STEPS + 1)[:, None]
    clean = np.sin(rng.uniform(0.2, 0.8, BATCH) * t + rng.uniform(0, 2 * np.pi, BATCH))
    noisy = clean + rng.normal(0, 0.1, clean.shape)
    return noisy[:-1, :, None].astype(np.float32), clean[1:, :, None].astype(np.float32)


def layer(x: Array, y: Array, weights: dict[str, Array]) -> bnns.BNNSLayerParametersLSTM:
    """Parameters of the layer, or of its gradients: then x and y are dL/dx and dL/dy."""
    describe = bnns.BNNSNDArrayDescriptor.from_array
    params = bnns.BNNSLayerParametersLSTM(input_size=1, hidden_size=UNITS, batch_size=BATCH, num_layers=1)
    params.seq_len = STEPS
    params.lstm_flags = bnns.BNNSLayerFlagsLSTMDefaultActivations
    params.input_descriptor.data_desc = describe(x, bnns.BNNSDataLayoutSNE)
    params.output_descriptor.data_desc = describe(y, bnns.BNNSDataLayoutSNE)
    for name in GATES:
        gate = getattr(params, name)
        gate.iw_desc[0] = describe(weights[f"{name}.iw"])
        gate.hw_desc = describe(weights[f"{name}.hw"])
        gate.b_desc = describe(weights[f"{name}.b"])
    return params


def check(status: int) -> None:
    if status != 0:
        raise RuntimeError(bnns.last_error())


def main() -> int:
    rng = np.random.default_rng(0)
    shapes = {"iw": (UNITS, 1), "hw": (UNITS, UNITS), "b": (UNITS,)}
    weights = {
        f"{gate}.{name}": rng.uniform(-0.25, 0.25, shape).astype(np.float32)
        for gate in GATES
        for name, shape in shapes.items()
    }
    weights["forget_gate.b"] += 1  # start with an open forget gate
    weights["readout"] = rng.uniform(-0.25, 0.25, (UNITS, 1)).astype(np.float32)
    gradients = {name: np.zeros_like(array) for name, array in weights.items()}

    x, y, dy = (np.zeros((STEPS, BATCH, width), np.float32) for width in (1, UNITS, UNITS))
    params = layer(x, y, weights)
    deltas = layer(x, dy, gradients)
    deltas.input_descriptor.data_desc.data = None  # dx is not needed

    capacity = bnns.BNNSComputeLSTMTrainingCacheCapacity(params)
    cache = bytearray(capacity)

    moments = {name: (np.zeros_like(array), np.zeros_like(array)) for name, array in weights.items()}
    losses = []
    for step in range(1, 301):
        x[...], target = waves(rng)
        check(bnns.BNNSDirectApplyLSTMBatchTrainingCaching(params, None, cache, capacity))

        error = y @ weights["readout"] - target
        losses.append(float(np.square(error).mean()))
        d_output = 2 / error.size * error
        gradients["readout"][...] = np.einsum("tbh,tbo->ho", y, d_output)
        dy[...] = d_output @ weights["readout"].T

        check(bnns.BNNSDirectApplyLSTMBatchBackward(params, deltas, None, cache, capacity))

        for name, array in weights.items():
            gradient, (mean, square) = gradients[name], moments[name]
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (np.square(gradient) - square)
            rate = 0.01 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            array -= np.float32(rate) * mean / (np.sqrt(square) + np.float32(1e-8))
        if step % 50 == 0:
            print(f"step {step:3}: loss {np.mean(losses[-50:]):.4f}")

    fell = np.mean(losses[-20:]) < 0.2 * np.mean(losses[:20])
    if not fell:
        print("the loss did not fall")
    return 0 if fell else 1


if __name__ == "__main__":
    sys.exit(main())
