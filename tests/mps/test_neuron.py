"""retrograd.mps: neurons, their values and slopes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd.mps import MPSCNNNeuronType
from support.arrays import Array
from support.mps import (
    MEAN,
    PARAMETERS,
    VAR,
    X,
    assert_close,
    data,
    f32,
    forward,
    forward_kernel,
    gradient,
    gradient_kernel,
    oracle,
    value_and_slope,
)

NEURONS = [kind for kind in MPSCNNNeuronType if kind.name not in ("pReLU", "count")]


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
