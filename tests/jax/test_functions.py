"""The functions against the array functions, bit for bit, and their gradients against finite differences."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from support.jax_calls import Case, assert_same_bits, dense_cases, draw_like, label, norm_cases, outputs


def check_bits(jax: Any, rj: Any, case: Case) -> None:
    """Outputs and gradients, eagerly and compiled, have the bits of the array functions."""
    function = getattr(rj, case.name)
    arrays, saved = case.forward(*case.arguments, **case.options)
    differentiated = slice(0, 1 if case.name == "batch_norm" else None)  # of the outputs
    cotangents = draw_like(np.random.default_rng(5), arrays[differentiated])
    gradients = case.backward(saved, *cotangents)

    def run(*arguments: Any) -> tuple[Any, ...]:
        return outputs(function(*arguments, **case.options))

    def pull_back(arguments: Any, cotangents: Any) -> Any:
        return jax.vjp(lambda *arguments: run(*arguments)[differentiated], *arguments)[1](cotangents)

    for transform in (lambda f: f, jax.jit):
        assert_same_bits(jax, transform(run)(*case.arguments), arrays)
        assert_same_bits(jax, transform(pull_back)(case.arguments, cotangents), gradients)


FLOAT32 = [*norm_cases(np.float32), *dense_cases(np.float32)]
FLOAT64 = [*norm_cases(np.float64), *dense_cases(np.float64)]


@pytest.mark.parametrize("case", FLOAT32, ids=label)
def test_float32_has_the_bits_of_the_array_functions(jax: Any, rj: Any, case: Case) -> None:
    check_bits(jax, rj, case)


@pytest.mark.parametrize("case", FLOAT64, ids=label)
def test_float64_has_the_bits_of_the_array_functions(jax: Any, rj: Any, x64: None, case: Case) -> None:
    check_bits(jax, rj, case)


HALVES = [case for dtype in (np.float16, ml_dtypes.bfloat16) for case in norm_cases(dtype)]


@pytest.mark.parametrize("case", HALVES, ids=lambda case: f"{case.arguments[0].dtype}-{label(case)}")
def test_half_precision_has_the_bits_of_the_array_functions(jax: Any, rj: Any, case: Case) -> None:
    check_bits(jax, rj, case)


@pytest.mark.parametrize("case", FLOAT64, ids=label)
def test_gradients_agree_with_finite_differences(rj: Any, x64: None, check_grads: Any, case: Case) -> None:
    options = {**case.options, "activation": "tanh"} if case.options.get("activation") == "relu" else case.options
    function = getattr(rj, case.name)
    # All outputs: a batch norm is also differentiated through its statistics.
    check_grads(lambda *arguments: function(*arguments, **options), case.arguments, order=1, modes=["rev"])


def test_gradients_of_given_statistics(rj: Any, x64: None, check_grads: Any) -> None:
    rng = np.random.default_rng(2)
    x, gamma, beta, mean = rng.normal(size=(4, 5, 3)), *rng.normal(size=(3, 5))
    var = rng.uniform(0.5, 2, size=5)

    def evaluate(x: Any, gamma: Any, beta: Any, mean: Any, var: Any) -> Any:
        return rj.batch_norm(x, gamma, beta, mean=mean, var=var, activation="tanh").y

    check_grads(evaluate, (x, gamma, beta, mean, var), order=1, modes=["rev"])
    check_grads(lambda x, mean, var: evaluate(x, None, None, mean, var), (x, mean, var), order=1, modes=["rev"])


def test_evaluation_has_the_bits_of_the_array_function(jax: Any, rj: Any) -> None:
    import retrograd

    rng = np.random.default_rng(3)
    x, dy = rng.normal(size=(2, 6, 5, 3)).astype(np.float32)
    gamma, beta, mean = rng.normal(size=(3, 5)).astype(np.float32)
    var = rng.uniform(0.5, 2, size=5).astype(np.float32)
    y, cache = retrograd.batch_norm_forward(x, gamma, beta, training=False, mean=mean, var=var)
    expected = retrograd.batch_norm_backward(dy, cache)
    found, pull_back = jax.vjp(lambda *arguments: rj.batch_norm(*arguments, mean=mean, var=var).y, x, gamma, beta)
    assert_same_bits(jax, found, y)
    assert_same_bits(jax, pull_back(dy), tuple(expected))


def test_the_variance_of_data_with_a_huge_mean(jax: Any, rj: Any) -> None:
    """The gradient through the returned variance is that of centred data, though the mean has been rounded."""
    rng = np.random.default_rng(4)
    x = (rng.normal(size=(64, 3)) + 1e6).astype(np.float32)
    gradient = jax.grad(lambda x: rj.batch_norm(x).var.sum())(x)
    expected = 2 * (x - x.mean(0, dtype=np.float64)) / len(x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_running_averages(jax: Any, rj: Any) -> None:
    """The update of docs/jax.md gives what the array function does to its running statistics."""
    import retrograd

    x = np.random.default_rng(6).normal(2, 3, size=(8, 4, 5)).astype(np.float32)
    mean, var = np.zeros(4, np.float32), np.ones(4, np.float32)

    @jax.jit
    def step(x: Any, mean: Any, var: Any) -> Any:
        output = rj.batch_norm(x)
        count = x.size // x.shape[1]
        unbiased = output.var * (count / (count - 1))
        return 0.9 * mean + 0.1 * output.mean, 0.9 * var + 0.1 * unbiased

    new_mean, new_var = step(x, mean, var)
    retrograd.batch_norm_forward(x, running_mean=mean, running_var=var)
    np.testing.assert_allclose(new_mean, mean, rtol=1e-6)
    np.testing.assert_allclose(new_var, var, rtol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(jax: Any, rj: Any, threads: int) -> None:
    import retrograd

    rng = np.random.default_rng(7)
    x, dy = rng.normal(size=(2, 300, 700)).astype(np.float32)
    gamma = rng.normal(size=700).astype(np.float32)

    def run(count: int | None) -> Any:
        y, pull_back = jax.vjp(lambda x, gamma: rj.layer_norm(x, gamma, num_threads=count), x, gamma)
        return y, pull_back(dy)

    expected = run(1)
    assert_same_bits(jax, run(threads), expected)
    retrograd.set_num_threads(threads)
    assert_same_bits(jax, run(None), expected)
