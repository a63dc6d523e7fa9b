"""Train a small network whose hidden layer is normalized by Metal Performance Shaders' matrix kernels.

The steps are those of a program for Apple's library: get the device, make a command queue, put data into buffers,
describe matrices and vectors over them, make the kernels once, and for every batch encode, commit and wait. The network
learns to classify points on two rings:

    hidden = x @ w1                               NumPy
    active = relu(batch norm(hidden))             MPSMatrixBatchNormalization
    score  = active @ w2                          NumPy

Prints the loss. The exit status is 1 if it does not decrease.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from retrograd.mps import (
    MPSCNNNeuronType,
    MPSDataType,
    MPSMatrix,
    MPSMatrixBatchNormalization,
    MPSMatrixBatchNormalizationGradient,
    MPSMatrixDescriptor,
    MPSVector,
    MPSVectorDescriptor,
    MTLCreateSystemDefaultDevice,
)

Array = np.ndarray[Any, Any]
BATCH, INPUTS, HIDDEN = 128, 2, 48
RATE = 0.3

# The device, and a queue that runs command buffers in order.
device = MTLCreateSystemDefaultDevice()
commandQueue = device.makeCommandQueue()


def makeMatrix(rows: int, columns: int) -> tuple[MPSMatrix, Array]:
    """A matrix in a new buffer, and an array over the same memory."""
    rowBytes = MPSMatrixDescriptor.rowBytes(forColumns=columns, dataType=MPSDataType.float32)
    buffer = device.makeBuffer(length=rows * rowBytes)
    descriptor = MPSMatrixDescriptor(rows=rows, columns=columns, rowBytes=rowBytes, dataType=MPSDataType.float32)
    array = np.frombuffer(buffer.contents(), np.float32).reshape(rows, rowBytes // 4)[:, :columns]
    return MPSMatrix(buffer=buffer, descriptor=descriptor), array


def makeVector(length: int, value: float = 0.0) -> tuple[MPSVector, Array]:
    buffer = device.makeBuffer(length=4 * length)
    descriptor = MPSVectorDescriptor(length=length, dataType=MPSDataType.float32)
    array = np.frombuffer(buffer.contents(), np.float32)
    array[...] = value
    return MPSVector(buffer=buffer, descriptor=descriptor), array


def rings(rng: np.random.Generator) -> tuple[Array, Array]:
    """Points on an inner and an outer ring, and labels: 1 for the outer ring."""
    outer = rng.integers(0, 2, BATCH)
    radius = np.where(outer, 2.0, 1.0) + 0.15 * rng.standard_normal(BATCH)
    angle = rng.uniform(0, 2 * np.pi, BATCH)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return points.astype(np.float32), outer.astype(np.float32)


def main() -> int:
    rng = np.random.default_rng(0)
    w1 = rng.normal(0, 1, (INPUTS, HIDDEN)).astype(np.float32)
    w2 = rng.normal(0, HIDDEN**-0.5, HIDDEN).astype(np.float32)

    # Operands of the kernels, each with a NumPy array over the same memory.
    inputMatrix, hidden = makeMatrix(BATCH, HIDDEN)
    resultMatrix, active = makeMatrix(BATCH, HIDDEN)
    gradientMatrix, d_active = makeMatrix(BATCH, HIDDEN)
    resultGradient, d_hidden = makeMatrix(BATCH, HIDDEN)
    meanVector, _ = makeVector(HIDDEN)
    varianceVector, _ = makeVector(HIDDEN)
    gammaVector, gamma = makeVector(HIDDEN, 1.0)
    betaVector, beta = makeVector(HIDDEN)
    gammaGradient, d_gamma = makeVector(HIDDEN)
    betaGradient, d_beta = makeVector(HIDDEN)

    # The kernels are made once. The gradient kernel needs the same settings as the forward kernel.
    normalization = MPSMatrixBatchNormalization(device=device)
    normalization.computeStatistics = True
    gradient = MPSMatrixBatchNormalizationGradient(device=device)
    for kernel in (normalization, gradient):
        kernel.epsilon = 1e-5
        kernel.setNeuronType(MPSCNNNeuronType.reLU, parameterA=0.0, parameterB=0.0, parameterC=0.0)

    losses = []
    for step in range(801):
        x, outer = rings(rng)
        np.matmul(x, w1, out=hidden)

        commandBuffer = commandQueue.makeCommandBuffer()
        normalization.encode(
            commandBuffer=commandBuffer,
            inputMatrix=inputMatrix,
            meanVector=meanVector,
            varianceVector=varianceVector,
            gammaVector=gammaVector,
            betaVector=betaVector,
            resultMatrix=resultMatrix,
        )
        commandBuffer.commit()
        commandBuffer.waitUntilCompleted()

        # The logistic loss, and its gradient with respect to the forward kernel's result.
        score = active @ w2
        losses.append(float(np.mean(np.logaddexp(0, score) - outer * score)))
        d_score = (1 / (1 + np.exp(-score)) - outer) / BATCH
        d_w2 = active.T @ d_score
        np.multiply(d_score[:, None], w2, out=d_active)

        commandBuffer = commandQueue.makeCommandBuffer()
        gradient.encode(
            to=commandBuffer,
            gradientMatrix=gradientMatrix,
            inputMatrix=inputMatrix,
            mean=meanVector,
            varianceVector=varianceVector,
            gammaVector=gammaVector,
            betaVector=betaVector,
            resultGradientForDataMatrix=resultGradient,
            resultGradientForGammaVector=gammaGradient,
            resultGradientForBetaVector=betaGradient,
        )
        commandBuffer.commit()
        commandBuffer.waitUntilCompleted()

        for parameter, derivative in ((w1, x.T @ d_hidden), (w2, d_w2), (gamma, d_gamma), (beta, d_beta)):
            parameter -= RATE * derivative
        if step % 200 == 0:
            print(f"step {step}: loss {np.mean(losses[-200:]):.4f}")  # the mean since the last line

    return 0 if np.mean(losses[-20:]) < 0.2 * losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
