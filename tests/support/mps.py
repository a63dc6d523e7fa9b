"""MPS matrices, vectors and kernels for tests, and the formulas of Apple's documents in float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
    MTLCommandBufferStatus,
    MTLCreateSystemDefaultDevice,
)
from retrograd.ops.normalization import NormGradients
from support.arrays import Array

DEVICE = MTLCreateSystemDefaultDevice()
QUEUE = DEVICE.makeCommandQueue()
TYPES = {np.dtype(np.float32): MPSDataType.float32, np.dtype(np.float16): MPSDataType.float16}
# Parameters that reach all pieces, and that leave the three-parameter neurons inside their domain for |z| < 4.
PARAMETERS = {
    "none": (0, 0, 0),
    "reLU": (0.2, 0, 0),
    "linear": (-1.5, 0.25, 0),
    "sigmoid": (0, 0, 0),
    "hardSigmoid": (0.3, 0.4, 0),
    "tanH": (1.2, 0.5, 0),
    "absolute": (0, 0, 0),
    "softPlus": (0.7, 1.5, 0),
    "softSign": (0, 0, 0),
    "elu": (0.8, 0, 0),
    "reLUN": (0.1, 0.75, 0),
    "power": (0.25, 2.0, 2.5),
    "exponential": (0.5, -0.25, 3.0),
    "logarithm": (0.25, 2.0, 10.0),
    "geLU": (0, 0, 0),
}


def f32(*rows: Any) -> Array:
    return np.array(rows, np.float32)


def matrix(array: Array, pad: int = 0, offset: int = 0) -> MPSMatrix:
    """Over the array's own memory, of [rows, columns] or [matrices, rows, columns]; `pad` elements end each row."""
    whole = array if array.ndim == 3 else array[None]
    assert whole.flags.c_contiguous
    matrices, rows, columns = whole.shape
    descriptor = MPSMatrixDescriptor(
        rows=rows,
        columns=columns - pad,
        matrices=matrices,
        rowBytes=columns * array.itemsize,
        matrixBytes=rows * columns * array.itemsize,
        dataType=TYPES[array.dtype],
    )
    return MPSMatrix(buffer=DEVICE.makeBuffer(bytesNoCopy=array), offset=offset, descriptor=descriptor)


def vector(array: Array | None) -> MPSVector | None:
    if array is None:
        return None
    vectors, length = np.atleast_2d(array).shape
    descriptor = MPSVectorDescriptor(
        length=length, vectors=vectors, vectorBytes=length * array.itemsize, dataType=TYPES[array.dtype]
    )
    return MPSVector(buffer=DEVICE.makeBuffer(bytesNoCopy=array), descriptor=descriptor)


def commit(kernel: Any, *operands: Any) -> None:
    buffer = QUEUE.makeCommandBuffer()
    kernel.encode(buffer, *operands)
    buffer.commit()
    buffer.waitUntilCompleted()
    assert buffer.status == MTLCommandBufferStatus.completed, buffer.error


def forward_kernel(**members: Any) -> MPSMatrixBatchNormalization:
    return configured(MPSMatrixBatchNormalization(device=DEVICE), members)


def gradient_kernel(**members: Any) -> MPSMatrixBatchNormalizationGradient:
    return configured(MPSMatrixBatchNormalizationGradient(device=DEVICE), members)


def configured(kernel: Any, members: dict[str, Any]) -> Any:
    for name, value in members.items():
        if name == "neuron":
            kernel.setNeuronType(value, *PARAMETERS[value.name])
        else:
            setattr(kernel, name, value)
    return kernel


def forward(kernel: Any, x: Array, mean: Array, var: Array, gamma: Array | None, beta: Array | None) -> Array:
    y = np.empty_like(x)
    commit(kernel, matrix(x), vector(mean), vector(var), vector(gamma), vector(beta), matrix(y))
    return y


def gradient(
    kernel: Any, dy: Array, x: Array, mean: Array, var: Array, gamma: Array | None, beta: Array | None
) -> NormGradients:
    dx, dgamma, dbeta = np.empty_like(x), np.empty_like(mean), np.empty_like(mean)
    sources = (matrix(dy), matrix(x), *map(vector, (mean, var, gamma, beta)))
    commit(kernel, *sources, matrix(dx), vector(dgamma), vector(dbeta))
    return NormGradients(dx, dgamma, dbeta)


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def value_and_slope(kind: MPSCNNNeuronType, x: Array, a: float, b: float, c: float) -> tuple[Array, Array]:
    erf = np.vectorize(math.erf, otypes=[float])
    u = a * x + b
    match kind.name:
        case "none":
            return x, np.ones_like(x)
        case "reLU":
            return np.where(x >= 0, x, a * x), np.where(x >= 0, 1, a)
        case "linear":
            return u, np.full_like(x, a)
        case "sigmoid":
            return sigmoid(x), sigmoid(x) * sigmoid(-x)
        case "hardSigmoid":
            return np.clip(u, 0, 1), np.where((u >= 0) & (u <= 1), a, 0)
        case "tanH":
            return a * np.tanh(b * x), a * b * (1 - np.tanh(b * x) ** 2)
        case "absolute":
            return abs(x), np.sign(x)
        case "softPlus":
            return a * np.logaddexp(0, b * x), a * b * sigmoid(b * x)
        case "softSign":
            return x / (1 + abs(x)), 1 / (1 + abs(x)) ** 2
        case "elu":
            return np.where(x >= 0, x, a * np.expm1(x)), np.where(x >= 0, 1, a * np.exp(x))
        case "reLUN":
            leaky = np.where(x >= 0, x, a * x)
            return np.minimum(leaky, b), np.where(leaky >= b, 0, np.where(x >= 0, 1, a))
        case "power":
            return u**c, a * c * u ** (c - 1)
        case "exponential":
            base = math.e if c == -1 else c
            return base**u, a * math.log(base) * base**u
        case "logarithm":
            scale = 1.0 if c == -1 else math.log(c)
            return np.log(u) / scale, a / (u * scale)
        case "geLU":
            cdf = 0.5 * (1 + erf(x * math.sqrt(0.5)))
            return x * cdf, cdf + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    raise AssertionError(kind)


class Oracle(NamedTuple):
    z: Array
    y: Array
    dx: Array
    dgamma: Array
    dbeta: Array
    dx_scale: float  # the size of the terms whose difference dx is


def oracle(
    kernel: Any, x: Array, mean: Array, var: Array, gamma: Any, beta: Any, dy: Array, frozen: bool = False
) -> Oracle:
    """With the kernel's epsilon and neuron, as they are: rounded to float32."""
    x, mean, var, dy = (a.astype(np.float64) for a in (x, mean, var, dy))
    gamma = 1.0 if gamma is None else gamma.astype(np.float64)
    beta = 0.0 if beta is None else beta.astype(np.float64)
    s = np.sqrt(var + kernel.epsilon)
    xhat = (x - mean) / s
    z = gamma * xhat + beta
    parameters = kernel.neuronParameterA(), kernel.neuronParameterB(), kernel.neuronParameterC()
    with np.errstate(all="ignore"):
        y, slope = value_and_slope(kernel.neuronType(), z, *parameters)
    dz = dy * slope
    dbeta, dgamma = dz.sum(axis=0), (dz * xhat).sum(axis=0)
    centred = dz if frozen else dz - dbeta / len(x) - xhat * dgamma / len(x)
    dx_scale = float((np.abs(gamma / s * dz) * (1 + xhat**2)).max())
    return Oracle(z, y, gamma / s * centred, dgamma, dbeta, dx_scale)


def assert_close(got: Any, expected: Array, dtype: Any = np.float32, factor: float = 60.0, scale: float = 0.0) -> None:
    """Within so many roundings of the largest element, or of `scale` where that is larger."""
    bound = factor * float(np.finfo(dtype).eps) * max(float(np.abs(expected).max()), scale)
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=0, atol=bound)


def data(seed: int, rows: int, columns: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(0.5, 1.5, (rows, columns)).astype(np.float32)
    return {
        "x": x,
        "mean": (x.mean(axis=0) + 0.1).astype(np.float32),  # not quite the data's own
        "var": (x.var(axis=0) * 1.2 + 0.05).astype(np.float32),
        "gamma": rng.uniform(0.5, 1.5, columns).astype(np.float32),
        "beta": rng.uniform(-0.5, 0.5, columns).astype(np.float32),
        "dy": rng.standard_normal((rows, columns)).astype(np.float32),
    }


X = f32((1, 2, 3), (4, 5, 7), (2, 8, 1), (9, 1, 5))
MEAN, VAR, GAMMA, BETA = f32(4, 5, 4), f32(8, 6, 6), f32(1.5, 0.75, 2), f32(0.5, -0.5, 1)
EXAMPLE_C_DY = f32((0.5, -1, 2), (1, 0.25, -0.5), (-0.75, 1.5, 1), (2, -0.5, 0.25))


def forward_operands(**changed: Any) -> dict[str, Any]:
    operands: dict[str, Any] = {
        "commandBuffer": QUEUE.makeCommandBuffer(),
        "inputMatrix": matrix(X.copy()),
        "meanVector": vector(MEAN),
        "varianceVector": vector(VAR),
        "gammaVector": vector(GAMMA),
        "betaVector": vector(BETA),
        "resultMatrix": matrix(np.full_like(X, 7)),
    }
    return operands | changed
