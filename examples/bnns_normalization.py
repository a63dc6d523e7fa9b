"""Train a small classifier with BNNS: a batch normalization filter with fused ReLU, and BNNSOptimizerStep.

The network is linear -> batch norm + ReLU -> linear, and classifies points on three interleaved spirals. The linear
layers are NumPy. The normalization filter and the optimizer are used as in a Swift or C program: describe the arrays
once, create the filter, apply it, apply it backward, run an optimizer step, and destroy the filter at the end.
"""

from __future__ import annotations

import sys

import numpy as np

from retrograd import bnns

CLASSES, HIDDEN, BATCH, STEPS = 3, 64, 300, 400


def spirals(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(BATCH) % CLASSES
    radius = rng.uniform(0.1, 1.0, BATCH)
    angle = 4 * radius + labels * 2 * np.pi / CLASSES + rng.normal(0, 0.1, BATCH)
    return np.stack([radius * np.sin(angle), radius * np.cos(angle)], 1).astype(np.float32), labels


def described(array: np.ndarray) -> bnns.BNNSNDArrayDescriptor:
    return bnns.BNNSNDArrayDescriptor.from_array(array)


def main() -> int:
    rng = np.random.default_rng(0)
    w1 = rng.normal(0, 1, (2, HIDDEN)).astype(np.float32)
    gamma, beta = np.ones(HIDDEN, np.float32), np.zeros(HIDDEN, np.float32)
    w2 = rng.normal(0, HIDDEN**-0.5, (HIDDEN, CLASSES)).astype(np.float32)
    parameters = [w1, gamma, beta, w2]
    gradients = [np.zeros_like(p) for p in parameters]
    moving_mean, moving_variance = np.zeros(HIDDEN, np.float32), np.ones(HIDDEN, np.float32)

    # One sample is a vector; a batch is contiguous.
    vector = bnns.BNNSNDArrayDescriptor(
        layout=bnns.BNNSDataLayoutVector, size=(HIDDEN,), data_type=bnns.BNNSDataTypeFloat32
    )
    layer = bnns.BNNSLayerParametersNormalization(
        i_desc=vector,
        o_desc=vector,
        beta_desc=described(beta),
        gamma_desc=described(gamma),
        moving_mean_desc=described(moving_mean),
        moving_variance_desc=described(moving_variance),
        momentum=0.9,
        epsilon=1e-5,
        activation=bnns.BNNSActivation(function=bnns.BNNSActivationFunctionRectifiedLinear),
    )
    # The filter reads gamma and beta in place, so it sees every update by the optimizer.
    settings = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)
    norm = bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, layer, settings)
    if norm is None:
        print(bnns.last_error(), file=sys.stderr)
        return 1

    # Adam keeps two moments per parameter: all first moments, then all second moments.
    adam = bnns.BNNSOptimizerAdamFields(
        learning_rate=0.01, beta1=0.9, beta2=0.999, time_step=1, epsilon=1e-8, gradient_scale=1
    )
    moments = [np.zeros_like(p) for p in parameters * 2]
    parameter_descs, gradient_descs, moment_descs = (
        [described(array) for array in arrays] for arrays in (parameters, gradients, moments)
    )

    y, dy, dx = (np.empty((BATCH, HIDDEN), np.float32) for _ in range(3))
    in_delta, out_delta = vector.copy(), vector.copy()
    in_delta.data, out_delta.data = dx, dy
    dw1, dgamma, dbeta, dw2 = gradients
    beta_delta, gamma_delta = described(dbeta), described(dgamma)

    losses = []
    for step in range(STEPS + 1):
        points, labels = spirals(rng)
        x = points @ w1
        status = bnns.BNNSNormalizationFilterApplyBatch(norm, BATCH, x, HIDDEN, y, HIDDEN, True)

        logits = y @ w2
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses.append(-np.log(p[np.arange(BATCH), labels] + 1e-9).mean())
        if step % 100 == 0:
            print(f"step {step:3}: loss {losses[-1]:.4f}, {np.mean(p.argmax(1) == labels):.0%} correct")

        p[np.arange(BATCH), labels] -= 1
        p /= BATCH
        dw2[:] = y.T @ p
        dy[:] = p @ w2.T
        status |= bnns.BNNSNormalizationFilterApplyBackwardBatch(
            norm, BATCH, in_delta, HIDDEN, y, HIDDEN, out_delta, HIDDEN, beta_delta, gamma_delta
        )
        dw1[:] = points.T @ dx
        status |= bnns.BNNSOptimizerStep(
            bnns.BNNSOptimizerFunctionAdam, adam, len(parameters), parameter_descs, gradient_descs, moment_descs, None
        )
        adam.time_step += 1
        if status:
            print(bnns.last_error(), file=sys.stderr)
            return 1

    # For inference the filter uses the moving statistics.
    points, labels = spirals(rng)
    bnns.BNNSNormalizationFilterApplyBatch(norm, BATCH, points @ w1, HIDDEN, y, HIDDEN, False)
    print(f"with moving statistics: {np.mean((y @ w2).argmax(1) == labels):.0%} correct")
    bnns.BNNSFilterDestroy(norm)
    return 0 if losses[-1] < 0.3 * losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
