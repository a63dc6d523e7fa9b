"""retrograd.mps: the two kernels, against the formulas of Apple's documents in float64 and against Apple's numbers.

Archives, PyObjC's spelling and what is Metal's have files of their own.
"""

from __future__ import annotations

import copy
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from arrays import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd import Activation
from retrograd.lab import reference
from retrograd.mps import (
    FLT_MIN,
    MPSCNNNeuronType,
    MPSDataType,
    MPSKernelOptions,
    MPSMatrix,
    MPSMatrixBatchNormalization,
    MPSMatrixBatchNormalizationGradient,
    MPSMatrixBinaryKernel,
    MPSMatrixDescriptor,
    MPSMatrixUnaryKernel,
    MPSTemporaryMatrix,
    MPSTemporaryVector,
    MPSVector,
    MPSVectorDescriptor,
    MTLCommandBufferStatus,
    MTLCreateSystemDefaultDevice,
    MTLDevice,
    MTLOrigin,
    MTLOriginMake,
    MTLSize,
    MTLSizeMake,
    NSUIntegerMax,
)
from retrograd.ops.normalization import NormGradients, batch_norm_backward, batch_norm_cache, batch_norm_forward

Array = np.ndarray[Any, Any]
DEVICE = MTLCreateSystemDefaultDevice()
QUEUE = DEVICE.makeCommandQueue()
TYPES = {np.dtype(np.float32): MPSDataType.float32, np.dtype(np.float16): MPSDataType.float16}
NEURONS = [kind for kind in MPSCNNNeuronType if kind.name not in ("pReLU", "count")]
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


# ---- operands --------------------------------------------------------------------------------------------------------


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


# ---- the oracle: float64, from the formulas --------------------------------------------------------------------------


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


# ---- what Apple's library printed ------------------------------------------------------------------------------------

X = f32((1, 2, 3), (4, 5, 7), (2, 8, 1), (9, 1, 5))
MEAN, VAR, GAMMA, BETA = f32(4, 5, 4), f32(8, 6, 6), f32(1.5, 0.75, 2), f32(0.5, -0.5, 1)


def printed(got: Array, expected: Array, digits: int) -> None:
    """As the library printed it: float32, with so many significant digits."""
    np.testing.assert_allclose(got, expected, rtol=0.5 * 10.0 ** (1 - digits), atol=2e-6)


def test_gradient_measured_case_1() -> None:
    dx, dgamma, dbeta = gradient(gradient_kernel(epsilon=0.001), X, X, MEAN, VAR, GAMMA, None)
    printed(dx.ravel()[:8], f32(0.298056, -0.0766294, -0.136185, 0, 0.306161, 0.408554, 0.198704, 0.688951), 6)
    formula = [
        [0.29805591, -0.07662946, -0.13618480],
        [0, 0.30616071, 0.40855440],
        [0.19870394, 0.68895087, -0.40855440],
        [-0.49675985, -0.20422618, 0.13618480],
    ]
    np.testing.assert_allclose(dx, formula, rtol=2e-6, atol=1e-6)
    # Apple's library left these unwritten in this case; its header promises them.
    np.testing.assert_allclose(dgamma, [13.4341892320, 5.7149998363, 8.1642854805], rtol=1e-6)
    np.testing.assert_allclose(dbeta, [16, 16, 16], rtol=1e-6)


CASE_2 = {
    "dy": f32((4, 1, 6), (2, 2, 7), (3, 8, 9), (3, 5, 1)),
    "x": f32((1, 2, 5), (8, 3, 9), (1, 6, 7), (4, 11, 2)),
    "mean": f32(2, 5, 4),
    "var": f32(7, 3, 9),
    "gamma": GAMMA,
    "beta": None,
}


@pytest.mark.parametrize(
    ("swapped", "library"), [((), 0.778845072), (("x", "dy"), -1.68092501), (("mean", "var"), -34.5620041)]
)
def test_gradient_measured_case_2(swapped: tuple[str, ...], library: float) -> None:
    operands = dict(CASE_2)
    if swapped:
        one, other = swapped
        operands[one], operands[other] = operands[other], operands[one]
    dx = gradient(gradient_kernel(epsilon=0.125), **operands).dx
    assert dx is not None
    np.testing.assert_allclose(dx[0, 0], library, rtol=1e-6)


def test_gradient_measured_case_3_unit_probe() -> None:
    """A unit gradient where x is the mean, and one where it is not: what it does there and to a row like it."""
    kernel, x = gradient_kernel(epsilon=0.125), f32((2,), (0,), (0,), (2,))
    found = []
    for row, like in ((0, 3), (1, 2)):
        dy = np.zeros_like(x)
        dy[row] = 1
        dx = gradient(kernel, dy, x, f32(2), f32(7), f32(1.5), None).dx
        assert dx is not None
        found += [dx[row, 0], dx[like, 0]]
    printed(np.array(found), f32(0.4215, -0.1405, 0.3426, -0.2194), 4)
    np.testing.assert_allclose(found, [0.421464, -0.140488, 0.342593, -0.219358], rtol=2e-6)


def test_gradient_is_linear_and_columns_do_not_meet() -> None:
    kernel, operands = gradient_kernel(epsilon=0.125), dict(CASE_2)
    whole = gradient(kernel, **operands).dx
    assert whole is not None
    twice = gradient(kernel, **{**operands, "dy": 2 * operands["dy"]}).dx
    np.testing.assert_array_equal(twice, 2 * whole)
    changed = dict(operands, x=operands["x"].copy(), dy=operands["dy"].copy())
    changed["x"][:, 1] += 3
    changed["dy"][:, 1] *= -1
    others = gradient(kernel, **changed).dx
    assert others is not None
    np.testing.assert_array_equal(others[:, [0, 2]], whole[:, [0, 2]])


def test_forward_measured() -> None:
    y = forward(forward_kernel(epsilon=0.001), X, MEAN, VAR, GAMMA, BETA)
    library = [
        [-1.090891, -1.418482, 0.183571],
        [0.5, -0.5, 3.449286],
        [-0.560594, 0.418482, -1.449286],
        [3.151485, -1.724643, 1.816429],
    ]
    printed(y, np.array(library), 7)


def test_worked_example_b() -> None:
    mean, var = np.empty(3, np.float32), np.empty(3, np.float32)
    y = forward(forward_kernel(epsilon=0.001, computeStatistics=True), X, mean, var, None, None)
    np.testing.assert_array_equal(mean, [4, 4, 4])
    np.testing.assert_array_equal(var, [9.5, 7.5, 5])  # divided by n, without epsilon
    expected = [
        [-0.9732773030, -0.7302480618, -0.4471688808],
        [0.0000000000, 0.3651240309, 1.3415066425],
        [-0.6488515353, 1.4604961235, -1.3415066425],
        [1.6221288384, -1.0953720926, 0.4471688808],
    ]
    np.testing.assert_allclose(y, expected, rtol=3e-7, atol=1e-7)


EXAMPLE_C_DY = f32((0.5, -1, 2), (1, 0.25, -0.5), (-0.75, 1.5, 1), (2, -0.5, 0.25))


def test_worked_example_c() -> None:
    mean, var = np.empty(3, np.float32), np.empty(3, np.float32)
    neuron = MPSCNNNeuronType.tanH
    y = forward(forward_kernel(epsilon=0.001, computeStatistics=True, neuron=neuron), X, mean, var, GAMMA, BETA)
    expected = [
        [-0.5354519460, -0.5767927417, 0.0633384254],
        [0.2939023949, -0.1351187667, 1.1411274681],
        [-0.2787819748, 0.3470323240, -0.8239275062],
        [1.0787114807, -0.6946463792, 0.8861983889],
    ]
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=2e-7)
    dx, dgamma, dbeta = gradient(gradient_kernel(epsilon=0.001, neuron=neuron), EXAMPLE_C_DY, X, mean, var, GAMMA, BETA)
    expected_dx = [
        [0.0921034273, -0.0570154049, 0.6260874531],
        [0.2003920135, -0.0261466643, -0.0824521046],
        [-0.2484075944, 0.0231119198, -0.3541729398],
        [-0.0440878465, 0.0600501494, -0.1894624086],
    ]
    np.testing.assert_allclose(dx, expected_dx, rtol=2e-6, atol=5e-7)
    np.testing.assert_allclose(dgamma, [0.4159813567, 1.8140072331, -0.9685838064], rtol=2e-6)
    np.testing.assert_allclose(dbeta, [0.6088831725, 0.3119771841, 1.5532787522], rtol=2e-6)


def test_worked_example_c_against_torch(torch: Any) -> None:
    x, gamma, beta = (torch.tensor(a, requires_grad=True) for a in (X, GAMMA, BETA))
    z = torch.nn.functional.batch_norm(x, None, None, gamma, beta, training=True, eps=0.001)
    y = 1.2 * torch.tanh(0.5 * z)
    y.backward(torch.tensor(EXAMPLE_C_DY))
    mean, var = np.empty(3, np.float32), np.empty(3, np.float32)
    neuron = MPSCNNNeuronType.tanH
    ours = forward(forward_kernel(epsilon=0.001, computeStatistics=True, neuron=neuron), X, mean, var, GAMMA, BETA)
    np.testing.assert_allclose(ours, y.detach().numpy(), rtol=2e-6, atol=1e-6)
    gradients = gradient(gradient_kernel(epsilon=0.001, neuron=neuron), EXAMPLE_C_DY, X, mean, var, GAMMA, BETA)
    for got, parameter in zip(gradients, (x, gamma, beta), strict=True):
        np.testing.assert_allclose(got, parameter.grad.numpy(), rtol=1e-5, atol=1e-6)


# ---- neurons ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NEURONS, ids=lambda kind: kind.name)
def test_oracle_slopes_against_finite_differences(kind: MPSCNNNeuronType) -> None:
    """The oracle of this file, in both forms: through the statistics and with constant ones."""
    parameters = PARAMETERS[kind.name]
    operands = {name: array.astype(np.float64) for name, array in data(1, 6, 3).items()}
    kernel = gradient_kernel(epsilon=0.01, neuron=kind)
    x, dy, gamma, beta = (operands[name] for name in ("x", "dy", "gamma", "beta"))

    def loss(at: Array, gamma: Array, beta: Array, statistics: tuple[Array, Array] | None) -> float:
        mean, var = (at.mean(axis=0), at.var(axis=0)) if statistics is None else statistics
        z = gamma * (at - mean) / np.sqrt(var + kernel.epsilon) + beta
        assert np.abs(z).max() < 4
        return float((dy * value_and_slope(kind, z, *map(np.float32, parameters))[0]).sum())

    rng = np.random.default_rng(2)
    for frozen in (False, True):
        fixed = (operands["mean"], operands["var"]) if frozen else None
        mean, var = fixed or (x.mean(axis=0), x.var(axis=0))
        exact = oracle(kernel, x, mean, var, gamma, beta, dy, frozen)
        for gradients, place in ((exact.dx, 0), (exact.dgamma, 1), (exact.dbeta, 2)):
            direction = rng.standard_normal(gradients.shape)
            step = 1e-6
            ends = []
            for sign in (1, -1):
                moved = [x, gamma, beta]
                moved[place] = moved[place] + sign * step * direction
                ends.append(loss(moved[0], moved[1], moved[2], fixed))
            np.testing.assert_allclose((gradients * direction).sum(), (ends[0] - ends[1]) / (2 * step), atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", NEURONS, ids=lambda kind: kind.name)
def test_every_neuron_forward_and_gradient(kind: MPSCNNNeuronType, dtype: Any) -> None:
    operands = {name: a.astype(dtype if name in ("x", "dy") else np.float32) for name, a in data(3, 37, 21).items()}
    dy = operands.pop("dy")
    y = forward(forward_kernel(epsilon=0.01, neuron=kind), **operands)
    kernel = gradient_kernel(epsilon=0.01, neuron=kind)
    gradients = gradient(kernel, dy, **operands)
    expected = oracle(kernel, **operands, dy=dy)
    assert_close(y, expected.y, dtype)
    assert_close(gradients.dx, expected.dx, dtype)
    assert_close(gradients.dgamma, expected.dgamma)
    assert_close(gradients.dbeta, expected.dbeta)


KINKS = {
    # neuron, parameters: z and the slope there
    "reLU": ((0.5, 0, 0), [(-1, 0.5), (0, 1), (1, 1)]),
    "absolute": ((0, 0, 0), [(-2, -1), (0, 0), (2, 1)]),
    "elu": ((0.5, 0, 0), [(0, 1), (1, 1)]),
    "hardSigmoid": ((0.5, 0.5, 0), [(-1, 0.5), (0, 0.5), (1, 0.5), (1.25, 0), (-1.25, 0)]),
    "reLUN": ((0.5, 2, 0), [(-1, 0.5), (0, 1), (1, 1), (2, 0), (3, 0)]),  # 0 above the clamp, not b
    "softSign": ((0, 0, 0), [(0, 1), (-1, 0.25)]),
    "logarithm": ((1, 0, -1), [(-2, -0.5), (2, 0.5), (0, math.inf)]),  # also where the logarithm is none
    "power": ((1, 0, 2), [(-3, -6), (0, 0), (2, 4)]),
    "exponential": ((1, 0, -1), [(0, 1), (1, math.e)]),
    "geLU": ((0, 0, 0), [(0, 0.5), (1, 1.0833154705876864), (-1, -0.08331547058768635)]),
}


@pytest.mark.parametrize("name", KINKS)
def test_slopes_at_kinks_and_beyond_the_domain(name: str) -> None:
    """With mean 0, variance 1 and epsilon 0, z is x; dbeta of a single row is the slope."""
    parameters, points = KINKS[name]
    kernel = gradient_kernel(epsilon=0)
    kernel.setNeuronType(MPSCNNNeuronType[name], *parameters)
    x = f32([z for z, _ in points])
    width = x.shape[1]
    zeros, ones = np.zeros(width, np.float32), np.ones(width, np.float32)
    dbeta = gradient(kernel, np.ones_like(x), x, zeros, ones, None, None).dbeta
    np.testing.assert_allclose(dbeta, [slope for _, slope in points], rtol=1e-6)


@pytest.mark.parametrize("c", [-1.0, 2.0])
@pytest.mark.parametrize("name", ["exponential", "logarithm"])
def test_base_e_is_spelled_minus_one(name: str, c: float) -> None:
    kernel = forward_kernel(epsilon=0)
    kernel.setNeuronType(MPSCNNNeuronType[name], 1, 3, c)
    x = f32((-1, 0, 2))
    y = forward(kernel, x, f32(0, 0, 0), f32(1, 1, 1), None, None)
    base = math.e if c == -1 else c
    u = x.astype(np.float64) + 3
    np.testing.assert_allclose(y, base**u if name == "exponential" else np.log(u) / math.log(base), rtol=1e-6)


@pytest.mark.parametrize("make", [forward_kernel, gradient_kernel])
@pytest.mark.parametrize("kind", [10, 16, 17, -1])
def test_prelu_and_unknown_neurons_are_refused(make: Callable[[], Any], kind: int) -> None:
    kernel = make()
    with pytest.raises(ValueError, match="neuronType is"):
        kernel.setNeuronType(kind, 0.1, 0, 0)
    assert kernel.neuronType() == MPSCNNNeuronType.none


@pytest.mark.parametrize("name", ["reLU", "power"])
def test_a_parameter_that_is_nan_is_refused_at_encode(name: str) -> None:
    kernel = forward_kernel()
    kernel.setNeuronType(MPSCNNNeuronType[name], math.nan, 0, 0)
    with pytest.raises(ValueError, match="NaN"):
        forward(kernel, X, MEAN, VAR, None, None)


def test_parameters_of_0_and_minus_0_are_different() -> None:
    x, zero, one = f32((1,), (2,)), f32(0), f32(1)
    for sign in (1, -1, 1):
        kernel = forward_kernel(epsilon=0)
        kernel.setNeuronType(MPSCNNNeuronType.power, sign * 0.0, sign * 0.0, -1)
        assert forward(kernel, x, zero, one, None, None).ravel().tolist() == [sign * np.inf] * 2


def test_neuron_getters() -> None:
    for kernel in (forward_kernel(), gradient_kernel()):
        assert kernel.neuronType() is MPSCNNNeuronType.none
        assert (kernel.neuronParameterA(), kernel.neuronParameterB(), kernel.neuronParameterC()) == (0, 0, 0)
        kernel.setNeuronType(MPSCNNNeuronType.power, parameterA=0.5, parameterB=0.1, parameterC=3)
        assert kernel.neuronType() is MPSCNNNeuronType.power
        assert kernel.neuronParameterA() == 0.5
        assert kernel.neuronParameterB() == np.float32(0.1)
        assert kernel.neuronParameterC() == 3


# ---- agreement with the array functions ------------------------------------------------------------------------------

ENGINE = {
    "none": lambda a, b: None,
    "reLU": lambda a, b: Activation("leaky_relu", a),
    "linear": lambda a, b: Activation("linear_with_bias", a, b),
    "sigmoid": lambda a, b: Activation("sigmoid"),
    "hardSigmoid": lambda a, b: Activation("closed_hard_sigmoid", a, b),
    "tanH": lambda a, b: Activation("scaled_tanh", a, b),
    "absolute": lambda a, b: Activation("abs"),
    "softPlus": lambda a, b: Activation("softplus", a, b),
    "softSign": lambda a, b: Activation("softsign"),
    "elu": lambda a, b: Activation("elu", a),
    "reLUN": lambda a, b: Activation("clamped_leaky_relu", a, b),
    "geLU": lambda a, b: Activation("gelu"),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", ENGINE)
def test_same_bits_as_the_array_functions(name: str, dtype: Any) -> None:
    operands = {key: a.astype(dtype if key in ("x", "dy") else np.float32) for key, a in data(5, 65, 33).items()}
    x, mean, var, gamma, beta, dy = operands.values()
    kernel = gradient_kernel(epsilon=0.01, neuron=MPSCNNNeuronType[name])
    a, b = kernel.neuronParameterA(), kernel.neuronParameterB()
    options: dict[str, Any] = {"eps": kernel.epsilon, "activation": ENGINE[name](a, b), "slope_from": "input"}

    y, cache = batch_norm_forward(x, gamma, beta, **options)
    statistics = np.empty_like(mean), np.empty_like(var)
    computing = forward_kernel(epsilon=0.01, neuron=MPSCNNNeuronType[name], computeStatistics=True)
    assert_same_bits([forward(computing, x, *statistics, gamma, beta)], [y])
    assert_same_bits(statistics, [cache.mean.astype(np.float32), cache.var.astype(np.float32)])

    y, _ = batch_norm_forward(x, gamma, beta, mean=mean, var=var, **options)
    given_statistics = forward_kernel(epsilon=0.01, neuron=MPSCNNNeuronType[name])
    assert_same_bits([forward(given_statistics, x, mean, var, gamma, beta)], [y])

    expected = batch_norm_backward(dy, batch_norm_cache(x, gamma, beta, mean=mean, var=var, **options))
    assert_same_bits(gradient(kernel, dy, x, mean, var, gamma, beta), expected)


def test_agrees_with_the_oracle_of_the_package() -> None:
    operands = data(6, 40, 9)
    x, mean, var, gamma, beta, dy = operands.values()
    kernel = gradient_kernel(epsilon=0.001)
    got = gradient(kernel, dy, x, mean, var, gamma, beta)
    expected = reference.norm_backward(dy, x, None, gamma, kind="batch", eps=kernel.epsilon, mean=mean, var=var)
    for mine, theirs in zip(got, (expected.dx, expected.dgamma, expected.dbeta), strict=True):
        assert_close(mine, np.asarray(theirs, np.float64))


# ---- members ---------------------------------------------------------------------------------------------------------


def test_forward_defaults() -> None:
    kernel = MPSMatrixBatchNormalization(device=DEVICE)
    assert isinstance(kernel, MPSMatrixUnaryKernel)
    assert kernel.epsilon == FLT_MIN == np.float32(1.17549435e-38)
    assert kernel.sourceNumberOfFeatureVectors == kernel.sourceInputFeatureChannels == NSUIntegerMax == 2**64 - 1
    assert kernel.computeStatistics is False
    assert kernel.sourceMatrixOrigin == kernel.resultMatrixOrigin == MTLOrigin(0, 0, 0)
    assert (kernel.batchStart, kernel.batchSize) == (0, NSUIntegerMax)
    assert (kernel.options, kernel.label, kernel.device) == (MPSKernelOptions.none, None, DEVICE)


def test_gradient_defaults() -> None:
    kernel = MPSMatrixBatchNormalizationGradient(device=DEVICE)
    assert isinstance(kernel, MPSMatrixBinaryKernel)
    assert kernel.epsilon == FLT_MIN
    assert kernel.sourceNumberOfFeatureVectors == kernel.sourceInputFeatureChannels == NSUIntegerMax
    assert not hasattr(kernel, "computeStatistics")
    assert kernel.primarySourceMatrixOrigin == kernel.secondarySourceMatrixOrigin == MTLOrigin(0, 0, 0)
    assert kernel.resultMatrixOrigin == MTLOrigin(0, 0, 0)
    assert (kernel.batchStart, kernel.batchSize) == (0, NSUIntegerMax)
    assert kernel.gradientThroughStatistics is True


def test_members_are_kept_and_plain() -> None:
    kernel = forward_kernel(
        label="norm",
        options=MPSKernelOptions.verbose | MPSKernelOptions.allowReducedPrecision,
        batchStart=np.int64(3),
        batchSize=7,
        sourceNumberOfFeatureVectors=True,
        epsilon=0.1,
        sourceMatrixOrigin=(1, 2, 0),
    )
    assert (kernel.label, kernel.options) == ("norm", 18)
    assert (kernel.batchStart, kernel.batchSize, kernel.sourceNumberOfFeatureVectors) == (3, 7, 1)
    assert type(kernel.batchStart) is int
    assert type(kernel.sourceNumberOfFeatureVectors) is int
    assert kernel.epsilon == np.float32(0.1)  # a C float
    assert type(kernel.epsilon) is float
    assert kernel.sourceMatrixOrigin == MTLOrigin(x=1, y=2, z=0)


@pytest.mark.parametrize(
    ("member", "value", "error"),
    [
        ("epsilon", "0.1", TypeError),
        ("epsilon", None, TypeError),
        ("epsilon", np.array([1.0, 2.0]), TypeError),
        ("epsilon", 10**400, ValueError),
        ("batchStart", -1, ValueError),
        ("batchStart", 2**64, ValueError),
        ("batchSize", 1.0, TypeError),
        ("sourceNumberOfFeatureVectors", "3", TypeError),
        ("sourceInputFeatureChannels", -5, ValueError),
        ("computeStatistics", "yes", TypeError),
        ("label", 3, TypeError),
        ("options", -1, ValueError),
        ("sourceMatrixOrigin", (1, 2), TypeError),
        ("resultMatrixOrigin", (1, -2, 0), ValueError),
        ("resultMatrixOrigin", 5, TypeError),
    ],
)
def test_members_of_a_wrong_kind_are_refused(member: str, value: object, error: type[Exception]) -> None:
    kernel = forward_kernel()
    before = getattr(kernel, member)
    with pytest.raises(error, match=member):
        setattr(kernel, member, value)
    assert getattr(kernel, member) == before


def test_a_parameter_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(ValueError, match="setNeuronType: parameterB is an int too large for a float"):
        forward_kernel().setNeuronType(MPSCNNNeuronType.tanH, 1, 10**400)


def test_options_are_written_as_in_swift() -> None:
    kernel = forward_kernel()
    kernel.options = [MPSKernelOptions.verbose, MPSKernelOptions.skipAPIValidation]  # type: ignore[assignment]
    assert kernel.options == MPSKernelOptions.verbose | MPSKernelOptions.skipAPIValidation
    kernel.options = []  # type: ignore[assignment]
    assert kernel.options == MPSKernelOptions.none
    assert (MTLOriginMake(1, 2, 0), MTLSizeMake(1, 2, 3)) == (MTLOrigin(1, 2, 0), MTLSize(1, 2, 3))


def test_encode_with_anything_but_an_archiver_is_refused() -> None:
    for kernel in (forward_kernel(), gradient_kernel()):
        with pytest.raises(TypeError, match="encode: with_ must be an NSKeyedArchiver, not int"):
            kernel.encode(with_=5)


def test_only_members_can_be_set() -> None:
    """What is misspelt, or belongs to the other kernel, is not silently kept."""
    with pytest.raises(AttributeError, match="has no member computeStatistics"):
        gradient_kernel().computeStatistics = True
    with pytest.raises(AttributeError, match="has no member epsilom"):
        forward_kernel().epsilom = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="neuronType is a method"):
        forward_kernel().neuronType = 1  # type: ignore[assignment, method-assign]
    with pytest.raises(AttributeError):
        matrix(X).rows = 3  # type: ignore[misc]


def test_device_is_required_and_read_only() -> None:
    with pytest.raises(TypeError, match="device must be an MTLDevice"):
        MPSMatrixBatchNormalization(device=None)
    with pytest.raises(AttributeError):
        forward_kernel().device = DEVICE  # type: ignore[misc]


def same_members(a: Any, b: Any) -> bool:
    names = [setting.name for setting in a._settings]
    neuron = ("neuronType", "neuronParameterA", "neuronParameterB", "neuronParameterC")
    return all(getattr(a, n) == getattr(b, n) for n in names) and all(
        getattr(a, n)() == getattr(b, n)() for n in neuron
    )


@pytest.mark.parametrize("make", [forward_kernel, gradient_kernel])
def test_copying(make: Callable[..., Any]) -> None:
    kernel = make(label="a", epsilon=0.5, batchSize=3, resultMatrixOrigin=(1, 2, 0), neuron=MPSCNNNeuronType.tanH)
    other = MTLDevice()
    copies = [kernel.copy(), kernel.copy(None, device=other), kernel.copy(with_=None), copy.copy(kernel)]
    copies.append(copy.deepcopy(kernel))
    for made in copies:
        assert type(made) is type(kernel)
        assert made is not kernel
        assert same_members(made, kernel)
    assert [made.device for made in copies] == [DEVICE, other, DEVICE, DEVICE, DEVICE]
    copies[0].epsilon = 0.25
    copies[0].setNeuronType(MPSCNNNeuronType.sigmoid)
    assert (kernel.epsilon, kernel.neuronType()) == (0.5, MPSCNNNeuronType.tanH)
    with pytest.raises(TypeError, match="MTLDevice"):
        kernel.copy(device="gpu")


def test_a_kernel_is_captured_when_it_is_encoded() -> None:
    """Changed and encoded again before anything runs."""
    kernel, results = forward_kernel(), [np.empty_like(X) for _ in range(3)]
    buffer = QUEUE.makeCommandBuffer()
    operands = [matrix(X), vector(MEAN), vector(VAR), None, None]
    for k, y in enumerate(results):
        kernel.epsilon = 0.5 * k
        kernel.setNeuronType(MPSCNNNeuronType.linear, 1, k)
        kernel.encode(buffer, *operands, matrix(y))
    buffer.commit()
    kernel.epsilon = 99
    buffer.waitUntilCompleted()
    for k, y in enumerate(results):
        np.testing.assert_allclose(y, (X - MEAN) / np.sqrt(VAR + 0.5 * k) + k, rtol=1e-5, atol=1e-6)


def test_a_change_of_any_member_is_seen_with_the_same_operands() -> None:
    """A kernel remembers its last operands; the results must not show it."""
    x, y = np.arange(24, dtype=np.float32).reshape(6, 4), np.zeros((6, 4), np.float32)
    mean, var = np.zeros(4, np.float32), np.ones(4, np.float32)
    operands = (matrix(x), vector(mean), vector(var), None, None, matrix(y))
    kernel = forward_kernel(epsilon=0)
    changes: list[tuple[str, Any, Any]] = [
        ("epsilon", 3, x / 2),
        ("sourceNumberOfFeatureVectors", 2, np.vstack([x[:2] / 2, 0 * x[2:]])),
        ("sourceInputFeatureChannels", 1, np.pad(x[:2, :1] / 2, ((0, 4), (0, 3)))),
        ("sourceMatrixOrigin", (1, 2, 0), np.pad(x[1:3, 2:3] / 2, ((0, 4), (0, 3)))),
        ("resultMatrixOrigin", (3, 1, 0), np.pad(x[1:3, 2:3] / 2, ((3, 1), (1, 2)))),
        ("computeStatistics", True, np.pad(f32((-1,), (1,)) * 2 / np.sqrt(4 + 3), ((3, 1), (1, 2)))),
        ("batchSize", 0, np.zeros((6, 4))),
    ]
    commit(kernel, *operands)
    np.testing.assert_array_equal(y, x)
    for name, value, expected in changes:
        setattr(kernel, name, value)
        y.fill(0)
        commit(kernel, *operands)
        np.testing.assert_allclose(y, expected, rtol=1e-6, err_msg=name)


def test_options_change_nothing_and_bounds_are_always_checked() -> None:
    kernel = forward_kernel(options=MPSKernelOptions.skipAPIValidation | MPSKernelOptions.allowReducedPrecision)
    plain = forward(forward_kernel(), X, MEAN, VAR, GAMMA, BETA)
    assert_same_bits([forward(kernel, X, MEAN, VAR, GAMMA, BETA)], [plain])
    kernel.resultMatrixOrigin = MTLOrigin(1, 0, 0)
    with pytest.raises(ValueError, match="reach beyond resultMatrix"):
        forward(kernel, X, MEAN, VAR, GAMMA, BETA)


# ---- forward and gradient, the rules ---------------------------------------------------------------------------------


def test_missing_gamma_and_beta_are_one_and_zero() -> None:
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    kernel = forward_kernel(epsilon=0.01, neuron=MPSCNNNeuronType.tanH)
    assert_same_bits([forward(kernel, X, MEAN, VAR, None, None)], [forward(kernel, X, MEAN, VAR, ones, zeros)])
    kernel = gradient_kernel(epsilon=0.01, neuron=MPSCNNNeuronType.tanH)
    assert_same_bits(
        gradient(kernel, EXAMPLE_C_DY, X, MEAN, VAR, None, None),
        gradient(kernel, EXAMPLE_C_DY, X, MEAN, VAR, ones, zeros),
    )


def test_given_statistics_are_used_although_they_are_not_the_data_s() -> None:
    mean, var = MEAN.copy(), VAR.copy()
    y = forward(forward_kernel(epsilon=0.5), X, mean, var, None, None)
    np.testing.assert_allclose(y, (X - MEAN) / np.sqrt(VAR + 0.5), rtol=1e-6)
    assert_same_bits([mean, var], [MEAN, VAR])


def test_gradient_vectors_not_given_are_not_produced() -> None:
    operands = data(7, 9, 4)
    x, mean, var, gamma, beta, dy = operands.values()
    kernel = gradient_kernel(epsilon=0.01)
    both = gradient(kernel, dy, x, mean, var, gamma, beta)
    for want_gamma in (False, True):
        for want_beta in (False, True):
            dx, dgamma, dbeta = np.empty_like(x), np.empty_like(mean), np.empty_like(mean)
            sources = (matrix(dy), matrix(x), *map(vector, (mean, var, gamma, beta)), matrix(dx))
            commit(kernel, *sources, vector(dgamma) if want_gamma else None, vector(dbeta) if want_beta else None)
            assert_same_bits([dx], [both.dx])
            if want_gamma:
                assert_same_bits([dgamma], [both.dgamma])
            if want_beta:
                assert_same_bits([dbeta], [both.dbeta])


def test_beta_matters_to_the_gradient_of_a_neuron() -> None:
    kernel = gradient_kernel(epsilon=0.01, neuron=MPSCNNNeuronType.reLU)
    without, with_beta = (gradient(kernel, X, X, MEAN, VAR, GAMMA, beta).dx for beta in (None, 5 * BETA))
    assert without is not None
    assert not np.array_equal(without, with_beta)


def test_results_overwrite() -> None:
    kernel = gradient_kernel(epsilon=0.01)
    results = [np.full_like(X, 7), np.full(3, 7, np.float32), np.full(3, 7, np.float32)]
    sources = (matrix(X), matrix(X), *map(vector, (MEAN, VAR, GAMMA, BETA)))
    for _ in range(2):
        commit(kernel, *sources, matrix(results[0]), vector(results[1]), vector(results[2]))
    assert_same_bits(results, gradient(kernel, X, X, MEAN, VAR, GAMMA, BETA))


def test_gradient_of_constant_statistics_is_an_option() -> None:
    operands = data(8, 12, 5)
    dy = operands.pop("dy")
    kernel = gradient_kernel(epsilon=0.01, neuron=MPSCNNNeuronType.tanH, gradientThroughStatistics=False)
    got = gradient(kernel, dy, **operands)
    expected = oracle(kernel, **operands, dy=dy, frozen=True)
    assert_close(got.dx, expected.dx)
    assert_close(got.dgamma, expected.dgamma)
    for name in ("power", "exponential"):
        kernel.setNeuronType(MPSCNNNeuronType[name], *PARAMETERS[name])
        assert_close(gradient(kernel, dy, **operands).dx, oracle(kernel, **operands, dy=dy, frozen=True).dx)


@pytest.mark.parametrize("constant", [0.0, 0.1, -3.7, 1e6, 1e-6, 33333.332])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 1000])
def test_a_constant_column_gives_zero_with_the_default_epsilon(constant: float, rows: int) -> None:
    x = np.full((rows, 5), constant, np.float32)
    x[:, 1] = np.arange(rows)
    mean, var = np.empty(5, np.float32), np.empty(5, np.float32)
    y = forward(forward_kernel(computeStatistics=True), x, mean, var, None, None)
    np.testing.assert_array_equal(y[:, [0, 2, 3, 4]], 0)
    np.testing.assert_array_equal(mean[[0, 2, 3, 4]], np.float32(constant))
    np.testing.assert_array_equal(var[[0, 2, 3, 4]], 0)


def test_statistics_keep_their_digits_beside_a_large_mean() -> None:
    """Two passes: E[x^2] - E[x]^2 would have none left."""
    x = (1e5 + np.random.default_rng(0).standard_normal((500, 4))).astype(np.float32)
    mean, var = np.empty(4, np.float32), np.empty(4, np.float32)
    forward(forward_kernel(computeStatistics=True), x, mean, var, None, None)
    np.testing.assert_allclose(var, x.astype(np.float64).var(axis=0), rtol=1e-6)


def test_statistics_too_large_for_their_vector_become_infinite_quietly() -> None:
    x = (300 * np.arange(12).reshape(4, 3)).astype(np.float16)
    mean, var = np.empty(3, np.float16), np.empty(3, np.float16)
    y = forward(forward_kernel(computeStatistics=True), x, mean, var, None, None)
    assert np.isinf(var).all()
    np.testing.assert_allclose(y.astype(np.float64).std(axis=0), 1, rtol=1e-3)


def test_nan_and_infinity_come_out_as_arithmetic_says() -> None:
    x = X.copy()
    x[1, 0], x[2, 1] = math.nan, math.inf
    for name in ("none", "tanH", "power", "logarithm"):
        y = forward(forward_kernel(neuron=MPSCNNNeuronType[name]), x, MEAN, VAR, GAMMA, BETA)
        assert np.isnan(y[1, 0])
        assert np.isfinite(y[[0, 2, 3], 0]).all()


# ---- windows, batches, places ----------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_windows_anywhere(draw: st.DataObject) -> None:
    """Origins, padded rows, several matrices and vectors, both types: the window is right, the rest is as it was."""
    number = draw.draw
    seed = number(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    n, channels = number(st.integers(1, 9)), number(st.integers(1, 9))
    matrices = number(st.integers(1, 4))
    start = number(st.integers(0, matrices - 1))
    size = number(st.sampled_from([0, 1, 2, NSUIntegerMax]))
    dtype = number(st.sampled_from([np.float32, np.float16]))
    parameter_dtype = number(st.sampled_from([np.float32, np.float16])) if dtype is np.float16 else np.float32
    neuron = MPSCNNNeuronType[number(st.sampled_from(["none", "tanH", "reLU", "exponential"]))]

    def placed() -> tuple[Array, MTLOrigin, Array, MPSMatrix]:
        """Memory, where the window begins, a view of it, and the matrix."""
        row, column, below, beside, pad = (number(st.integers(0, 3)) for _ in range(5))
        extra = number(st.integers(0, 1))
        shape = (matrices + extra, row + n + below, column + channels + beside + pad)
        memory = rng.uniform(-2, 2, shape).astype(dtype)
        view = memory[:, row : row + n, column : column + channels]
        return memory, MTLOrigin(row, column, 0), view, matrix(memory, pad=pad)

    def parameters(low: float, high: float, several: bool) -> tuple[Array, MPSVector]:
        count = matrices + 1 + number(st.integers(0, 1)) if several else 1
        memory = rng.uniform(low, high, (count, channels + number(st.integers(0, 2)))).astype(parameter_dtype)
        made = vector(memory)
        assert made is not None
        return memory, made

    def of(memory: Array, k: int) -> Array:
        return memory[k if len(memory) > 1 else 0, :channels]

    _, x_origin, x, x_matrix = placed()
    _, dy_origin, dy, dy_matrix = placed()
    y_memory, y_origin, y, y_matrix = placed()
    dx_memory, dx_origin, dx, dx_matrix = placed()
    # Rows and columns end where x does or where they are told to: tell, as x may reach further.
    limits = {"sourceNumberOfFeatureVectors": n, "sourceInputFeatureChannels": channels}
    several = matrices > 1 and number(st.booleans())
    mean, mean_vector = parameters(-1, 1, several)
    var, var_vector = parameters(0.5, 2, several)
    gamma, gamma_vector = parameters(0.5, 1.5, number(st.booleans()))
    beta, beta_vector = parameters(-0.5, 0.5, number(st.booleans()))
    dgamma, dgamma_vector = parameters(0, 1, number(st.booleans()))
    dbeta, dbeta_vector = parameters(0, 1, number(st.booleans()))
    before = {name: memory.copy() for name, memory in (("y", y_memory), ("dx", dx_memory), ("dgamma", dgamma))}
    batch = range(start, start + min(size, min(map(len, (x, dy, y, dx))) - start))
    common: dict[str, Any] = {"epsilon": 0.01, "neuron": neuron, "batchStart": start, "batchSize": len(batch), **limits}

    kernel = forward_kernel(**common, sourceMatrixOrigin=x_origin, resultMatrixOrigin=y_origin)
    commit(kernel, x_matrix, mean_vector, var_vector, gamma_vector, beta_vector, y_matrix)
    kernel = gradient_kernel(
        **common,
        primarySourceMatrixOrigin=dy_origin,
        secondarySourceMatrixOrigin=x_origin,
        resultMatrixOrigin=dx_origin,
    )
    vectors = (mean_vector, var_vector, gamma_vector, beta_vector)
    commit(kernel, dy_matrix, x_matrix, *vectors, dx_matrix, dgamma_vector, dbeta_vector)

    sums = {"dgamma": np.zeros(channels), "dbeta": np.zeros(channels)}
    for k in batch:
        expected = oracle(kernel, x[k], of(mean, k), of(var, k), of(gamma, k), of(beta, k), dy[k])
        assert_close(y[k], expected.y, dtype, scale=1.0)
        assert_close(dx[k], expected.dx, dtype, scale=expected.dx_scale)
        for name, result, exact in (("dgamma", dgamma, expected.dgamma), ("dbeta", dbeta, expected.dbeta)):
            sums[name] += exact
            if len(result) > 1:
                scale = np.abs(exact).max() + np.abs(dy[k].astype(np.float64)).sum(axis=0).max()
                atol = 60 * float(np.finfo(parameter_dtype).eps) * scale
                np.testing.assert_allclose(of(result, k).astype(np.float64), exact, rtol=0, atol=atol)
    for name, result in (("dgamma", dgamma), ("dbeta", dbeta)):
        if len(result) == 1 and len(batch):
            scale = np.abs(dy.astype(np.float64)).sum() + np.abs(sums[name]).max()
            atol = 60 * float(np.finfo(parameter_dtype).eps) * scale
            np.testing.assert_allclose(result[0, :channels].astype(np.float64), sums[name], rtol=0, atol=atol)
    # Outside of the window nothing has changed.
    for name, view, memory in (("y", y, y_memory), ("dx", dx, dx_memory)):
        for k in batch:
            view[k] = 0
        untouched = before[name]
        row, column = (y_origin if name == "y" else dx_origin)[:2]
        for k in batch:
            untouched[k, row : row + n, column : column + channels] = 0
        assert_same_bits([memory], [untouched])
    assert_same_bits([dgamma[:, channels:]], [before["dgamma"][:, channels:]])


def test_origin_x_counts_rows_and_y_columns() -> None:
    x, y = np.arange(20, dtype=np.float32).reshape(5, 4), np.zeros((6, 7), np.float32)
    kernel = forward_kernel(epsilon=0, sourceMatrixOrigin=MTLOrigin(3, 1, 0), resultMatrixOrigin=MTLOrigin(4, 2, 0))
    # The vectors begin with the first processed column.
    commit(kernel, matrix(x), vector(f32(100, 200, 300)), vector(f32(1, 1, 1)), None, None, matrix(y))
    expected = np.zeros_like(y)
    expected[4:6, 2:5] = x[3:5, 1:4] - f32(100, 200, 300)
    np.testing.assert_array_equal(y, expected)


def test_the_smaller_of_what_is_asked_and_what_is_there() -> None:
    x, y = np.ones((5, 4), np.float32), np.zeros((5, 4), np.float32)
    operands = (matrix(x), vector(f32(0, 0, 0, 0)), vector(f32(1, 1, 1, 1)), None, None, matrix(y))
    kernel = forward_kernel(sourceNumberOfFeatureVectors=3, sourceInputFeatureChannels=2)
    commit(kernel, *operands)
    assert (y.sum(), y[:3, :2].sum()) == (6, 6)
    kernel.sourceNumberOfFeatureVectors, kernel.sourceInputFeatureChannels = 1000, NSUIntegerMax
    commit(kernel, *operands)
    assert y.sum() == 20


def test_each_matrix_of_a_batch_is_normalized_on_its_own() -> None:
    rng = np.random.default_rng(11)
    x, y = rng.standard_normal((3, 6, 4), dtype=np.float32), np.zeros((3, 6, 4), np.float32)
    mean, var = np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32)
    kernel = forward_kernel(epsilon=0.01, computeStatistics=True, batchStart=1)
    commit(kernel, matrix(x), vector(mean), vector(var), vector(BETA4), None, matrix(y))
    assert not y[0].any()
    assert not mean[0].any()
    for k in (1, 2):
        one_mean, one_var = np.empty(4, np.float32), np.empty(4, np.float32)
        alone = forward_kernel(epsilon=0.01, computeStatistics=True)
        assert_same_bits(
            [y[k], mean[k], var[k]], [forward(alone, x[k].copy(), one_mean, one_var, BETA4, None), one_mean, one_var]
        )


BETA4 = f32(0.5, -0.5, 1, 2)


def test_statistics_of_several_matrices_need_several_vectors() -> None:
    x = np.ones((3, 6, 4), np.float32)
    one, three = np.empty(4, np.float32), np.empty((3, 4), np.float32)
    kernel = forward_kernel(computeStatistics=True)
    for mean, var, name in ((one, three, "meanVector"), (three, one, "varianceVector")):
        with pytest.raises(ValueError, match=f"{name} has 1 vector for the statistics of 3 matrices"):
            forward(kernel, x, mean, var, None, None)
    kernel.batchStart, kernel.batchSize = 2, 1
    assert forward(kernel, x, one, one.copy(), None, None).shape == x.shape


def test_shared_gradient_vectors_receive_the_sum() -> None:
    rng = np.random.default_rng(12)
    x, dy = rng.standard_normal((2, 3, 6, 4), dtype=np.float32)
    mean, var = np.zeros(4, np.float32), np.ones(4, np.float32)
    kernel = gradient_kernel()
    got = gradient(kernel, dy, x, mean, var, None, None)
    parts = [gradient(kernel, dy[k].copy(), x[k].copy(), mean, var, None, None) for k in range(3)]
    assert_same_bits([got.dx], [np.stack([part.dx for part in parts])])
    for name in ("dgamma", "dbeta"):
        total = sum(getattr(part, name).astype(np.float64) for part in parts)
        assert_same_bits([getattr(got, name)], [total.astype(np.float32)])


def test_a_batch_of_none_does_nothing() -> None:
    x = np.ones((2, 3, 4), np.float32)
    y = np.full_like(x, 7)
    kernel = forward_kernel(batchSize=0)
    commit(kernel, matrix(x), vector(f32(0, 0, 0, 0)), vector(f32(1, 1, 1, 1)), None, None, matrix(y))
    assert (y == 7).all()
    gradients = gradient_kernel(batchSize=0)
    commit(gradients, matrix(x), matrix(x), vector(x[0, 0].copy()), vector(x[0, 0].copy()), None, None, matrix(y))
    assert (y == 7).all()


@pytest.mark.parametrize("name", ["none", "tanH", "power"])
def test_forward_in_place(name: str) -> None:
    kernel = forward_kernel(epsilon=0.01, neuron=MPSCNNNeuronType[name])
    expected = forward(kernel, X, MEAN, VAR, GAMMA, BETA)
    x = X.copy()
    both = matrix(x)
    commit(kernel, both, vector(MEAN), vector(VAR), vector(GAMMA), vector(BETA), both)
    assert_same_bits([x], [expected])


@pytest.mark.parametrize("name", ["none", "tanH", "power"])
@pytest.mark.parametrize("place", ["gradient", "input", "both"])
def test_gradient_in_place(name: str, place: str) -> None:
    kernel = gradient_kernel(epsilon=0.01, neuron=MPSCNNNeuronType[name])
    dy = X.copy() if place == "both" else EXAMPLE_C_DY.copy()
    expected = gradient(kernel, dy, X, MEAN, VAR, GAMMA, BETA)
    x = dy if place == "both" else X.copy()
    result = dy if place == "gradient" else x
    dgamma, dbeta = np.empty(3, np.float32), np.empty(3, np.float32)
    vectors = map(vector, (MEAN, VAR, GAMMA, BETA))
    # Different matrix objects over the same memory are in place, too.
    commit(kernel, matrix(dy), matrix(x), *vectors, matrix(result), vector(dgamma), vector(dbeta))
    assert_same_bits([result, dgamma, dbeta], expected)


def test_windows_beside_each_other_in_one_matrix() -> None:
    memory = np.random.default_rng(3).standard_normal((6, 8), dtype=np.float32)
    x = memory[:, :4].copy()
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    kernel = forward_kernel(epsilon=0, sourceInputFeatureChannels=4, resultMatrixOrigin=(0, 4, 0))
    one = matrix(memory)
    commit(kernel, one, vector(zeros), vector(ones), None, None, one)
    np.testing.assert_array_equal(memory, np.hstack([x, x]))


# ---- data types ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameter_dtype", [np.float16, np.float32])
def test_float16_is_rounded_once(parameter_dtype: Any) -> None:
    operands = data(9, 30, 7)
    half = {name: a.astype(np.float16 if name in ("x", "dy") else parameter_dtype) for name, a in operands.items()}
    dy = half.pop("dy")
    for name in ("none", "geLU", "exponential"):
        kernel = gradient_kernel(epsilon=0.01, neuron=MPSCNNNeuronType[name])
        y = forward(forward_kernel(epsilon=0.01, neuron=MPSCNNNeuronType[name]), **half)
        exact = oracle(kernel, **half, dy=dy)
        wide = {key: a.astype(np.float32) for key, a in half.items()}
        single = forward(forward_kernel(epsilon=0.01, neuron=MPSCNNNeuronType[name]), **wide)
        assert y.dtype == np.float16
        # Half a unit in the last place, and what float32 arithmetic adds before.
        bound = 0.5 * np.spacing(np.abs(y)).astype(np.float64) + 4e-6
        assert (np.abs(y.astype(np.float64) - exact.y) <= bound).all()
        assert np.abs(y.astype(np.float64) - single).max() < 0.01
        gradients = gradient(kernel, dy, **half)
        assert [g.dtype for g in gradients if g is not None] == [np.float16, parameter_dtype, parameter_dtype]
        assert_close(gradients.dx, exact.dx, np.float16, 2)
        assert_close(gradients.dgamma, exact.dgamma, parameter_dtype, 30 if parameter_dtype == np.float32 else 1)


def test_mixed_types_are_refused() -> None:
    x32, x16, v32, v16 = X, X.astype(np.float16), MEAN, MEAN.astype(np.float16)
    kernel = forward_kernel()
    for x, y, mean, var in (
        (x32, x16, v32, v32),
        (x16, x32, v32, v32),
        (x32, x32, v16, v16),
        (x16, x16, v32, v16),
        (x16, x16, v16, v32),
    ):
        with pytest.raises(TypeError, match=r"is of float(16|32)"):
            kernel.encode(
                QUEUE.makeCommandBuffer(), matrix(x.copy()), vector(mean), vector(var), None, None, matrix(y.copy())
            )


def test_other_types_are_refused() -> None:
    buffer = DEVICE.makeBuffer(length=48)
    integers = MPSMatrix(
        buffer=buffer, descriptor=MPSMatrixDescriptor(rows=4, columns=3, rowBytes=12, dataType=MPSDataType.int32)
    )
    with pytest.raises(TypeError, match="inputMatrix is of int32, must be of float32 or float16"):
        forward_kernel().encode(QUEUE.makeCommandBuffer(), integers, vector(MEAN), vector(VAR), None, None, integers)


# ---- what is refused -------------------------------------------------------------------------------------------------


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


def gradient_operands(**changed: Any) -> dict[str, Any]:
    operands: dict[str, Any] = {
        "to": QUEUE.makeCommandBuffer(),
        "gradientMatrix": matrix(X.copy()),
        "inputMatrix": matrix(X.copy()),
        "mean": vector(MEAN),
        "varianceVector": vector(VAR),
        "gammaVector": vector(GAMMA),
        "betaVector": vector(BETA),
        "resultGradientForDataMatrix": matrix(np.full_like(X, 7)),
        "resultGradientForGammaVector": vector(np.full(3, 7, np.float32)),
        "resultGradientForBetaVector": vector(np.full(3, 7, np.float32)),
    }
    return operands | changed


def short() -> Any:
    return vector(f32(1, 2))


FORWARD_REFUSALS: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    # members, operands, error, message
    *(
        ({}, {name: None}, TypeError, f"{name} is missing")
        for name in forward_operands()
        if name[:4] not in ("gamm", "beta")
    ),
    ({}, {"inputMatrix": X}, TypeError, "inputMatrix must be an MPSMatrix, not ndarray"),
    ({}, {"gammaVector": GAMMA}, TypeError, "gammaVector must be an MPSVector, not ndarray"),
    ({"sourceMatrixOrigin": (0, 0, 1)}, {}, ValueError, "sourceMatrixOrigin.z is 1, must be 0"),
    ({"resultMatrixOrigin": (0, 0, 2)}, {}, ValueError, "resultMatrixOrigin.z is 2, must be 0"),
    ({"sourceMatrixOrigin": (5, 0, 0)}, {}, ValueError, "nothing of inputMatrix, 4 x 3"),
    ({"sourceMatrixOrigin": (4, 0, 0)}, {}, ValueError, "0 x 3 from sourceMatrixOrigin"),
    ({"sourceMatrixOrigin": (0, 3, 0)}, {}, ValueError, "4 x 0 from sourceMatrixOrigin"),
    ({"sourceMatrixOrigin": (0, NSUIntegerMax, 0)}, {}, ValueError, "nothing of inputMatrix"),
    ({"sourceNumberOfFeatureVectors": 0}, {}, ValueError, "0 x 3"),
    ({"sourceInputFeatureChannels": 0}, {}, ValueError, "4 x 0"),
    ({"resultMatrixOrigin": (1, 0, 0)}, {}, ValueError, "reach beyond resultMatrix, 4 x 3"),
    ({"resultMatrixOrigin": (0, 1, 0)}, {}, ValueError, "reach beyond resultMatrix, 4 x 3"),
    ({"resultMatrixOrigin": (NSUIntegerMax, 0, 0)}, {}, ValueError, "reach beyond resultMatrix"),
    *(
        ({}, {name: short()}, ValueError, f"{name} has length 2, but 3 columns")
        for name in ("meanVector", "varianceVector", "gammaVector", "betaVector")
    ),
    ({"epsilon": math.nan}, {}, ValueError, "epsilon is nan"),
    ({"epsilon": -1}, {}, ValueError, "epsilon is -1"),
    ({"epsilon": math.inf}, {}, ValueError, "epsilon is inf"),
    ({"batchStart": 1}, {}, ValueError, "batchStart is 1, but there are 1 matrices"),
]


@pytest.mark.parametrize(("members", "changed", "error", "message"), FORWARD_REFUSALS)
@pytest.mark.parametrize("compute", [False, True])
def test_forward_refusals(
    members: dict[str, Any], changed: dict[str, Any], error: type[Exception], message: str, compute: bool
) -> None:
    """At encode time, and nothing is written, nor recorded."""
    mean, var = MEAN.copy(), VAR.copy()
    operands = forward_operands(meanVector=vector(mean), varianceVector=vector(var)) | changed
    with pytest.raises(error, match=r"^MPSMatrixBatchNormalization\.encode: .*" + message):
        forward_kernel(computeStatistics=compute, **members).encode(**operands)
    if operands["commandBuffer"] is not None:
        operands["commandBuffer"].commit()
        operands["commandBuffer"].waitUntilCompleted()
    if operands["resultMatrix"] is not None:
        assert (np.frombuffer(operands["resultMatrix"].data.contents(), np.float32) == 7).all()
    assert_same_bits([mean, var], [MEAN, VAR])


GRADIENT_OPTIONAL = ("gammaVector", "betaVector", "resultGradientForGammaVector", "resultGradientForBetaVector")
GRADIENT_REFUSALS: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    *(
        ({}, {name: None}, TypeError, f"{name} is missing")
        for name in gradient_operands()
        if name not in GRADIENT_OPTIONAL
    ),
    ({}, {"gradientMatrix": X}, TypeError, "gradientMatrix must be an MPSMatrix, not ndarray"),
    ({}, {"resultGradientForBetaVector": BETA}, TypeError, "must be an MPSVector, not ndarray"),
    ({"primarySourceMatrixOrigin": (0, 0, 1)}, {}, ValueError, "primarySourceMatrixOrigin.z is 1"),
    ({"secondarySourceMatrixOrigin": (0, 0, 1)}, {}, ValueError, "secondarySourceMatrixOrigin.z is 1"),
    ({"resultMatrixOrigin": (0, 0, 1)}, {}, ValueError, "resultMatrixOrigin.z is 1"),
    ({"secondarySourceMatrixOrigin": (4, 0, 0)}, {}, ValueError, "nothing of inputMatrix"),
    ({"primarySourceMatrixOrigin": (1, 0, 0)}, {}, ValueError, "reach beyond gradientMatrix, 4 x 3"),
    ({"primarySourceMatrixOrigin": (0, 1, 0)}, {}, ValueError, "reach beyond gradientMatrix, 4 x 3"),
    ({"resultMatrixOrigin": (0, 3, 0)}, {}, ValueError, "reach beyond resultGradientForDataMatrix, 4 x 3"),
    ({"sourceNumberOfFeatureVectors": 0}, {}, ValueError, "0 x 3"),
    *(
        ({}, {name: short()}, ValueError, f"{name} has length 2, but 3 columns")
        for name in ("mean", "varianceVector", *GRADIENT_OPTIONAL)
    ),
    ({"epsilon": math.nan}, {}, ValueError, "epsilon is nan"),
    ({"batchStart": 9}, {}, ValueError, "batchStart is 9"),
]


@pytest.mark.parametrize(("members", "changed", "error", "message"), GRADIENT_REFUSALS)
def test_gradient_refusals(
    members: dict[str, Any], changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    operands = gradient_operands(**changed)
    with pytest.raises(error, match=r"^MPSMatrixBatchNormalizationGradient\.encode: .*" + message):
        gradient_kernel(**members).encode(**operands)
    if operands["to"] is not None:
        operands["to"].commit()
        operands["to"].waitUntilCompleted()
    for name, storage in operands.items():
        if name.startswith("result") and isinstance(storage, (MPSMatrix, MPSVector)) and storage.data.length > 8:
            assert (np.frombuffer(storage.data.contents(), np.float32) == 7).all()


def test_vectors_for_some_of_the_matrices_are_refused() -> None:
    x, mean = np.ones((3, 4, 3), np.float32), np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="meanVector has 2 vectors, must have 1, or one for each of 3 matrices"):
        forward(forward_kernel(), x, mean, np.ones(3, np.float32), None, None)


def test_results_that_overlap_are_refused() -> None:
    memory = np.arange(60, dtype=np.float32).reshape(5, 12)
    saved = memory.copy()
    shifted = matrix(memory)
    kernel = forward_kernel(sourceNumberOfFeatureVectors=4, sourceInputFeatureChannels=3, resultMatrixOrigin=(1, 0, 0))
    with pytest.raises(ValueError, match="resultMatrix overlaps inputMatrix without being exactly in its place"):
        kernel.encode(**forward_operands(inputMatrix=shifted, resultMatrix=shifted))
    row = memory.ravel()[:3]
    kernel = forward_kernel(sourceInputFeatureChannels=3, sourceNumberOfFeatureVectors=4)
    with pytest.raises(ValueError, match="resultMatrix overlaps gammaVector"):
        kernel.encode(**forward_operands(resultMatrix=shifted, gammaVector=vector(row)))
    kernel = forward_kernel(computeStatistics=True)
    with pytest.raises(ValueError, match="meanVector overlaps varianceVector"):
        kernel.encode(**forward_operands(meanVector=vector(row), varianceVector=vector(row)))
    with pytest.raises(ValueError, match="resultGradientForGammaVector overlaps mean"):
        gradient_kernel().encode(**gradient_operands(mean=vector(row), resultGradientForGammaVector=vector(row)))
    same = vector(row)
    with pytest.raises(ValueError, match="GammaVector overlaps resultGradientForBetaVector"):
        gradient_kernel().encode(
            **gradient_operands(resultGradientForGammaVector=same, resultGradientForBetaVector=same)
        )
    assert_same_bits([memory], [saved])


def test_an_overlap_too_hard_to_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find one is NP-hard; the search has a bound, and what it does not find within counts as one."""

    def give_up(a: Array, b: Array, max_work: int = -1) -> bool:
        assert 0 < max_work < 10**7
        raise np.exceptions.TooHardError

    both = matrix(np.zeros((8, 12), np.float32))
    operands = forward_operands(inputMatrix=both, resultMatrix=both)
    kernel = forward_kernel(
        sourceNumberOfFeatureVectors=4, sourceInputFeatureChannels=3, resultMatrixOrigin=MTLOrigin(1, 6, 0)
    )
    kernel.encode(**operands)
    kernel.epsilon = 1  # so that the operands are looked at again
    monkeypatch.setattr(np, "shares_memory", give_up)
    with pytest.raises(ValueError, match="resultMatrix overlaps inputMatrix"):
        kernel.encode(**operands)


def test_results_in_read_only_memory_are_refused() -> None:
    frozen = X.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="resultMatrix lies in read-only memory"):
        forward_kernel().encode(**forward_operands(resultMatrix=matrix(frozen)))
    forward_kernel().encode(**forward_operands(inputMatrix=matrix(frozen)))  # reading it is fine


# ---- descriptors, matrices, vectors ----------------------------------------------------------------------------------


def test_data_types_have_apples_values() -> None:
    assert MPSDataType.float32 == 0x10000020
    assert MPSDataType.float16 == 0x10000010
    assert [MPSDataType.int8, MPSDataType.uInt64, MPSDataType.unorm8] == [0x20000008, 64, 0x40000008]
    assert [kind.value for kind in MPSCNNNeuronType] == list(range(17))


@pytest.mark.parametrize(
    ("columns", "data_type", "expected"),
    [
        (0, MPSDataType.float32, 0),
        (1, MPSDataType.float32, 4),
        (1, MPSDataType.float16, 2),
        (2, MPSDataType.float32, 16),
        (5, MPSDataType.float32, 32),
        (8, MPSDataType.float16, 16),
        (9, MPSDataType.float16, 32),
        (3, MPSDataType.int8, 4),
        (5, MPSDataType.uInt64, 64),
    ],
)
def test_recommended_strides(columns: int, data_type: MPSDataType, expected: int) -> None:
    assert MPSMatrixDescriptor.rowBytes(forColumns=columns, dataType=data_type) == expected
    assert MPSVectorDescriptor.vectorBytes(forLength=columns, dataType=data_type) == expected


def test_matrix_descriptor() -> None:
    descriptor = MPSMatrixDescriptor(rows=4, columns=3, rowBytes=16, dataType=MPSDataType.float32)
    assert (descriptor.rows, descriptor.columns, descriptor.rowBytes, descriptor.matrices) == (4, 3, 16, 1)
    assert descriptor.matrixBytes == 64
    descriptor.rows, descriptor.rowBytes = 5, 32
    assert descriptor.matrixBytes == 64  # as it was made
    assert MPSMatrix(device=DEVICE, descriptor=descriptor).rows == 5
    descriptor.dataType = MPSDataType.float16
    assert descriptor.dataType is MPSDataType.float16
    old = MPSMatrixDescriptor(dimensions=4, columns=3, rowBytes=12, dataType=MPSDataType.float32)
    assert (old.rows, old.matrixBytes) == (4, 48)
    several = MPSMatrixDescriptor(
        rows=4, columns=3, matrices=2, rowBytes=16, matrixBytes=80, dataType=MPSDataType.float32
    )
    assert (several.matrices, several.matrixBytes) == (2, 80)
    for name in ("matrices", "matrixBytes"):
        with pytest.raises(AttributeError):
            setattr(several, name, 1)


def test_vector_descriptor() -> None:
    descriptor = MPSVectorDescriptor(length=3, dataType=MPSDataType.float32)
    assert (descriptor.length, descriptor.vectors, descriptor.vectorBytes) == (3, 1, 16)
    several = MPSVectorDescriptor(length=3, vectors=2, vectorBytes=12, dataType=MPSDataType.float32)
    assert (several.vectors, several.vectorBytes) == (2, 12)
    several.length = 2
    assert several.length == 2
    for name in ("vectors", "vectorBytes"):
        with pytest.raises(AttributeError):
            setattr(several, name, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rowBytes": 8}, "rowBytes is 8, but 3 columns need 12"),
        ({"rowBytes": 14}, "rowBytes is 14, not a multiple of the element's 4 bytes"),
        ({"matrices": 2, "matrixBytes": 50}, "matrixBytes is 50, not a multiple of rowBytes, 12"),
        ({"matrices": 2, "matrixBytes": 36}, "matrixBytes is 36, but 4 rows need 48"),
        ({"matrixBytes": 50}, "not a multiple"),
        ({"matrices": 0}, "matrices is 0"),
        ({"dataType": 0}, "dataType is 0x0"),
        ({"dataType": MPSDataType.unorm1}, "no type of elements"),
        ({"dataType": 0x90000010}, "no type of elements"),
        ({"rows": -1}, "rows is -1"),
    ],
)
def test_matrix_descriptor_refusals(changed: dict[str, int], message: str) -> None:
    arguments: dict[str, Any] = {"rows": 4, "columns": 3, "rowBytes": 12, "dataType": MPSDataType.float32} | changed
    with pytest.raises(ValueError, match=message):
        MPSMatrixDescriptor(**arguments)


@pytest.mark.parametrize("place", ["buffer", "device"])
@pytest.mark.parametrize(
    "descriptor",
    [
        MPSMatrixDescriptor(rows=4, columns=3, rowBytes=16, matrixBytes=2**64 - 16, dataType=MPSDataType.float32),
        MPSMatrixDescriptor(rows=2**64 - 1, columns=0, rowBytes=0, dataType=MPSDataType.float32),
        MPSMatrixDescriptor(rows=2**40, columns=0, matrices=2**40, rowBytes=0, dataType=MPSDataType.float32),
        MPSVectorDescriptor(length=3, vectorBytes=2**64 - 4, dataType=MPSDataType.float32),
    ],
)
def test_what_cannot_be_addressed_is_refused(descriptor: Any, place: str) -> None:
    memory = {"buffer": DEVICE.makeBuffer(length=64)} if place == "buffer" else {"device": DEVICE}
    make: Any = MPSMatrix if isinstance(descriptor, MPSMatrixDescriptor) else MPSVector
    with pytest.raises(ValueError, match=r"descriptor has extents .* and strides .*, more than the"):
        make(descriptor=descriptor, **memory)


def test_row_bytes_has_an_older_spelling() -> None:
    row_bytes: Any = MPSMatrixDescriptor.rowBytes
    assert row_bytes(fromColumns=5, dataType=MPSDataType.float32) == 32
    for columns in ({}, {"forColumns": 5, "fromColumns": 5}):
        with pytest.raises(TypeError, match="olumns"):
            row_bytes(dataType=MPSDataType.float32, **columns)


def test_vector_descriptor_refusals() -> None:
    for changed in ({"vectorBytes": 8}, {"vectorBytes": 14}, {"vectors": 0}):
        arguments: dict[str, Any] = {"length": 3, "vectors": 2, "vectorBytes": 12} | changed
        with pytest.raises(ValueError, match="MPSVectorDescriptor: vector"):
            MPSVectorDescriptor(**arguments, dataType=MPSDataType.float32)


def test_elements_lie_where_the_descriptor_says() -> None:
    memory = np.arange(60, dtype=np.float32)
    buffer = DEVICE.makeBuffer(bytesNoCopy=memory)
    descriptor = MPSMatrixDescriptor(
        rows=3, columns=2, matrices=2, rowBytes=20, matrixBytes=80, dataType=MPSDataType.float32
    )
    made = MPSMatrix(buffer=buffer, offset=8, descriptor=descriptor)
    assert (made.rows, made.columns, made.matrices, made.offset) == (3, 2, 2, 8)
    assert (made.rowBytes, made.matrixBytes, made.dataType, made.data) == (20, 80, MPSDataType.float32, buffer)
    assert made.device is DEVICE
    assert made.resourceSize() == 80 + 2 * 20 + 2 * 4
    element = made._elements()
    for k, i, j in np.ndindex(2, 3, 2):
        assert element[k, i, j] == memory[(8 + k * 80 + i * 20 + j * 4) // 4]
    several = MPSVectorDescriptor(length=3, vectors=4, vectorBytes=20, dataType=MPSDataType.float32)
    vectors = MPSVector(buffer=buffer, offset=4, descriptor=several)
    assert (vectors.length, vectors.vectors, vectors.vectorBytes, vectors.offset) == (3, 4, 20, 4)
    assert vectors._elements()[2, 1] == memory[(4 + 2 * 20 + 4) // 4]


def test_the_buffer_must_hold_the_last_element_and_no_more() -> None:
    """offset + (matrices - 1) * matrixBytes + (rows - 1) * rowBytes + columns * size: not the last row's padding."""
    descriptor = MPSMatrixDescriptor(
        rows=3, columns=2, matrices=2, rowBytes=20, matrixBytes=80, dataType=MPSDataType.float32
    )
    needed = 8 + 80 + 40 + 8
    MPSMatrix(buffer=DEVICE.makeBuffer(length=needed), offset=8, descriptor=descriptor)
    with pytest.raises(ValueError, match="buffer has 135 bytes, but the descriptor needs 136"):
        MPSMatrix(buffer=DEVICE.makeBuffer(length=needed - 1), offset=8, descriptor=descriptor)
    vectors = MPSVectorDescriptor(length=3, vectors=4, vectorBytes=20, dataType=MPSDataType.float32)
    MPSVector(buffer=DEVICE.makeBuffer(length=72), descriptor=vectors)
    with pytest.raises(ValueError, match="buffer has 71 bytes, but the descriptor needs 72"):
        MPSVector(buffer=DEVICE.makeBuffer(length=71), descriptor=vectors)
    huge = MPSMatrixDescriptor(rows=2**62, columns=2, rowBytes=2**40, dataType=MPSDataType.float32)
    with pytest.raises(ValueError, match="but the descriptor needs"):
        MPSMatrix(buffer=DEVICE.makeBuffer(length=64), descriptor=huge)


def test_elements_must_be_aligned() -> None:
    descriptor = MPSMatrixDescriptor(rows=2, columns=2, rowBytes=8, dataType=MPSDataType.float32)
    with pytest.raises(ValueError, match="offset is 2"):
        MPSMatrix(buffer=DEVICE.makeBuffer(length=64), offset=2, descriptor=descriptor)


def test_a_matrix_without_a_buffer_gets_one_when_it_is_used() -> None:
    descriptor = MPSMatrixDescriptor(rows=4, columns=3, rowBytes=12, dataType=MPSDataType.float32)
    result = MPSMatrix(device=DEVICE, descriptor=descriptor)
    assert result._buffer is None
    forward_kernel().encode(**(operands := forward_operands(resultMatrix=result)))
    operands["commandBuffer"].commit()
    operands["commandBuffer"].waitUntilCompleted()
    got = np.frombuffer(result.data.contents(), np.float32).reshape(4, 3)
    assert_same_bits([got], [forward(forward_kernel(), X, MEAN, VAR, GAMMA, BETA)])
    result.synchronize(on=operands["commandBuffer"])


def test_a_matrix_needs_a_buffer_or_a_device() -> None:
    descriptor = MPSMatrixDescriptor(rows=4, columns=3, rowBytes=12, dataType=MPSDataType.float32)
    with pytest.raises(TypeError):
        MPSMatrix()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="give a buffer or a device"):
        MPSMatrix(descriptor=descriptor)
    with pytest.raises(TypeError, match="buffer must be an MTLBuffer, not bytearray"):
        MPSMatrix(buffer=bytearray(48), descriptor=descriptor)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="MPSVectorDescriptor"):
        MPSVector(device=DEVICE, descriptor=descriptor)  # type: ignore[arg-type]


def test_temporary_objects_count_their_readings() -> None:
    buffer = QUEUE.makeCommandBuffer()
    descriptor = MPSMatrixDescriptor(rows=4, columns=3, rowBytes=12, dataType=MPSDataType.float32)
    between = MPSTemporaryMatrix(commandBuffer=buffer, matrixDescriptor=descriptor)
    statistics = MPSVectorDescriptor(length=3, dataType=MPSDataType.float32)
    mean, var = (MPSTemporaryVector(commandBuffer=buffer, descriptor=statistics) for _ in range(2))
    assert (between.readCount, mean.readCount) == (1, 1)
    mean.readCount = var.readCount = 2
    operands = forward_operands(
        commandBuffer=buffer, meanVector=mean, varianceVector=var, gammaVector=None, betaVector=None
    )
    kernel = forward_kernel(epsilon=0.01, computeStatistics=True)
    kernel.encode(**operands | {"resultMatrix": between})
    assert (between.readCount, mean.readCount) == (1, 2)  # written, not read
    dx, dgamma, y = np.empty_like(X), np.empty(3, np.float32), np.empty_like(X)
    gradient_kernel(epsilon=0.01).encode(
        buffer, matrix(EXAMPLE_C_DY), matrix(X), mean, var, None, None, matrix(dx), vector(dgamma)
    )
    assert (mean.readCount, var.readCount) == (1, 1)
    plain = forward_kernel(epsilon=0)
    plain.encode(buffer, between, mean, var, None, None, matrix(y))
    assert (between.readCount, mean.readCount, var.readCount) == (0, 0, 0)
    with pytest.raises(ValueError, match="readCount is 0, so the contents are gone"):
        plain.encode(buffer, between, vector(MEAN), vector(VAR), None, None, matrix(y))
    with pytest.raises(ValueError, match="readCount is 0"):
        _ = between.data
    buffer.commit()
    buffer.waitUntilCompleted()
    assert buffer.error is None
    one, two = np.empty(3, np.float32), np.empty(3, np.float32)
    first = forward(kernel, X, one, two, None, None)
    assert_same_bits([dx], [gradient(gradient_kernel(epsilon=0.01), EXAMPLE_C_DY, X, one, two, None, None).dx])
    assert_same_bits([y], [forward(plain, first, one, two, None, None)])
    MPSTemporaryMatrix.prefetchStorage(buffer, [descriptor])
    MPSTemporaryVector.prefetchStorage(buffer, [statistics])


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[1] / "examples" / "mps_matrix_batch_normalization.py"
    assert runpy.run_path(str(example))["main"]() == 0
    losses = [float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
