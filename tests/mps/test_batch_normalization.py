"""retrograd.mps: the two kernels against Apple's numbers, the formulas in float64 and the array functions."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd import Activation
from retrograd.lab import reference
from retrograd.mps import (
    MPSCNNNeuronType,
    MPSDataType,
    MPSMatrix,
    MPSMatrixDescriptor,
    MPSVector,
    MTLOrigin,
    NSUIntegerMax,
)
from retrograd.ops.normalization import batch_norm_backward, batch_norm_cache, batch_norm_forward
from support.arrays import Array, assert_same_bits
from support.mps import (
    BETA,
    DEVICE,
    EXAMPLE_C_DY,
    GAMMA,
    MEAN,
    PARAMETERS,
    QUEUE,
    VAR,
    X,
    assert_close,
    commit,
    data,
    f32,
    forward,
    forward_kernel,
    gradient,
    gradient_kernel,
    matrix,
    oracle,
    vector,
)

# ---- what Apple's library printed ------------------------------------------------------------------------------------


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


# ---- the example -----------------------------------------------------------------------------------------------------


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "mps_matrix_batch_normalization.py"
    assert runpy.run_path(str(example))["main"]() == 0
    losses = [float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
