"""vmap, scan, checkpoint, donated buffers, and which gradients are computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import retrograd
from support.jax_calls import Case, assert_same_bits, dense_cases, label, norm_cases, outputs

CASES = [*norm_cases(np.float32), *dense_cases(np.float32)]


def stacked(rng: np.random.Generator, jax: Any, tree: Any, axis: int, count: int = 3) -> Any:
    """Several random pytrees like `tree`, with their arrays stacked along an axis."""

    def stack(array: Any) -> Any:
        return np.stack([rng.normal(size=array.shape).astype(array.dtype) for _ in range(count)], axis)

    return jax.tree.map(stack, tree)


def pull_back(jax: Any, run: Any, arguments: Any, cotangents: Any) -> Any:
    return jax.vjp(run, *arguments)[1](cotangents)


# ---- vmap -----------------------------------------------------------------------------------------------------------


OTHERS = [None] * 4
# Each takes a second to compile, so each case gets one or two of three ways.
MAPPED = [
    pytest.param(case, mapped, id=f"{mapped}-{label(case)}")
    for i, case in enumerate(CASES)
    for mapped in dict.fromkeys(("first", ("first", "all", "others")[i % 3]))
    if mapped != "others" or len(case.arguments) > 1
]


@pytest.mark.parametrize(("case", "mapped"), MAPPED)
def test_vmap_has_the_bits_of_separate_calls(jax: Any, rj: Any, case: Case, mapped: str) -> None:
    """Outputs and gradients, with the first argument mapped (calls may be merged), all of them, or all others."""
    count = 3
    rng = np.random.default_rng(0)
    first = min(1, case.arguments[0].ndim)
    axes = {"first": [first, *OTHERS], "all": [0] * 5, "others": [None, 0, 0, 0]}[mapped][: len(case.arguments)]
    arguments = [
        argument if axis is None else stacked(rng, jax, argument, axis, count)
        for argument, axis in zip(case.arguments, axes, strict=True)
    ]
    function = getattr(rj, case.name)

    def run(*arguments: Any) -> tuple[Any, ...]:
        return outputs(function(*arguments, **case.options))

    def one(i: int) -> list[Any]:
        return [
            argument if axis is None else jax.tree.map(lambda array, axis=axis: np.take(array, i, axis), argument)
            for argument, axis in zip(arguments, axes, strict=True)
        ]

    found = jax.jit(jax.vmap(run, in_axes=axes))(*arguments)
    each = [run(*one(i)) for i in range(count)]
    assert_same_bits(jax, found, [np.stack(arrays) for arrays in zip(*each, strict=True)])

    cotangents = tuple(rng.normal(size=array.shape).astype(array.dtype) for array in found)
    gradients = jax.vmap(lambda arguments, dy: pull_back(jax, run, arguments, dy), in_axes=(axes, 0))(
        arguments, cotangents
    )
    expected = [pull_back(jax, run, one(i), tuple(dy[i] for dy in cotangents)) for i in range(count)]
    assert_same_bits(jax, gradients, jax.tree.map(lambda *arrays: np.stack(arrays), *expected))

    # Differentiating the mapped function adds up the gradients of what is not mapped.
    mapped_run = jax.vmap(run, in_axes=axes)
    totals = pull_back(jax, mapped_run, arguments, cotangents)
    for total, gradient, axis in zip(totals, gradients, axes, strict=True):
        for whole, parts in zip(jax.tree.leaves(total), jax.tree.leaves(gradient), strict=True):
            wanted = np.sum(parts, axis=0) if axis is None else np.moveaxis(parts, 0, axis)
            np.testing.assert_allclose(whole, wanted, rtol=1e-5, atol=1e-5)


def test_nested_vmap(jax: Any, rj: Any) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
    gamma = rng.normal(size=(3, 5)).astype(np.float32)
    w = rng.normal(size=(2, 6, 5)).astype(np.float32)
    norm = jax.vmap(jax.vmap(rj.layer_norm), in_axes=(0, None))(x, gamma)
    dense = jax.vmap(jax.vmap(rj.linear, in_axes=(0, None)))(x, w)
    for i in range(2):
        for j in range(3):
            assert_same_bits(jax, norm[i, j], retrograd.layer_norm_forward(x[i, j], gamma[j])[0])
            assert_same_bits(jax, dense[i, j], retrograd.linear_forward(x[i, j], w[i]))


def test_vmap_over_nothing(jax: Any, rj: Any) -> None:
    x, gamma, w = np.ones((0, 4, 5), np.float32), np.ones(5, np.float32), np.ones((0, 2, 5), np.float32)
    assert jax.vmap(lambda x: rj.layer_norm(x, gamma))(x).shape == (0, 4, 5)
    assert jax.vmap(rj.linear)(x, w).shape == (0, 4, 2)
    gradient = jax.grad(lambda gamma: jax.vmap(lambda x: rj.layer_norm(x, gamma))(x).sum())(gamma)
    assert_same_bits(jax, gradient, np.zeros(5, np.float32))


def test_vmap_over_lengths_and_seeds(jax: Any, rj: Any) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, 3, 2)).astype(np.float32)
    cells = [
        retrograd.LstmWeights(*(rng.normal(size=shape).astype(np.float32) for shape in ((12, inputs), (12, 3), (12,))))
        for inputs in (2, 3)
    ]
    lengths, seeds = np.array([[4, 0, 2], [4, 4, 4]]), np.array([3, 4])

    def run(lengths: Any, seed: Any) -> Any:
        return rj.lstm(x, cells, lengths=lengths, dropout=0.5, seed=seed).y

    found = jax.vmap(run)(lengths, seeds)
    for i in range(2):
        expected = retrograd.lstm_forward(x, cells, lengths=lengths[i], dropout=0.5, seed=int(seeds[i])).y
        assert_same_bits(jax, found[i], expected)


# ---- what is computed -----------------------------------------------------------------------------------------------


def results_of(jax: Any, function: Any, *arguments: Any) -> list[str]:
    """The names of the results of every call into the engine that a function makes."""
    text = jax.jit(function).lower(*arguments).as_text()
    return [line.split('results = "')[1].split('"')[0] for line in text.splitlines() if "@retrograd_" in line]


def test_only_gradients_that_are_needed_are_computed(jax: Any, rj: Any) -> None:
    x, gamma, w = np.ones((4, 5), np.float32), np.ones(5, np.float32), np.ones((3, 5), np.float32)

    def norm(x: Any, gamma: Any, beta: Any) -> Any:
        return rj.layer_norm(x, gamma, beta).sum()

    def dense(x: Any, w: Any, b: Any) -> Any:
        return rj.linear(x, w, b).sum()

    saved = "y saved_mean saved_var"
    assert results_of(jax, norm, x, gamma, gamma) == ["y"]
    assert results_of(jax, jax.grad(norm), x, gamma, gamma) == [saved, "dx"]
    assert results_of(jax, jax.grad(norm, argnums=(1, 2)), x, gamma, gamma) == [saved, "dgamma dbeta"]
    assert results_of(jax, jax.grad(dense), x, w, w[:, 0]) == ["dx"]
    assert results_of(jax, jax.grad(dense, argnums=(0, 2)), x, w, w[:, 0]) == ["dx db"]
    assert results_of(jax, lambda x: rj.batch_norm(x), x) == ["y mean var"]

    weights = retrograd.LstmWeights(np.ones((8, 5), np.float32), np.ones((8, 2), np.float32))

    def last(x: Any, weights: Any, h0: Any) -> Any:
        return rj.lstm(x, weights, h0).hn.sum()

    arguments = x[None], weights, np.ones((4, 2), np.float32)
    assert results_of(jax, last, *arguments) == ["y hn cn"]
    assert results_of(jax, jax.grad(last), *arguments) == ["y hn cn cache", "dx"]
    assert results_of(jax, jax.grad(last, argnums=(1, 2)), *arguments) == ["y hn cn cache", "dwx0 dwh0 dh0"]


def test_parts_of_a_cell_are_differentiated_alone(jax: Any, rj: Any) -> None:
    """The gradient of one array of one cell has the same bits as among all gradients."""
    case = next(case for case in CASES if case.options.get("bidirectional"))
    x, stack, h0, c0 = case.arguments

    def loss(stack: Any) -> Any:
        output = rj.lstm(x, stack, h0, c0, **case.options)
        return (output.y**2).sum() + output.cn.sum()

    everything = jax.grad(loss)(stack)
    for index, cell in enumerate(stack):
        for field in ("wx", "wh", "b"):

            def partial(array: Any, index: int = index, cell: Any = cell, field: str = field) -> Any:
                return loss([*stack[:index], cell._replace(**{field: array}), *stack[index + 1 :]])

            found = jax.grad(partial)(getattr(cell, field))
            assert_same_bits(jax, found, getattr(everything[index], field))


def test_a_zero_gradient(jax: Any, rj: Any) -> None:
    """Where JAX knows that the gradient of an output is 0, nothing is computed."""
    x = np.ones((4, 5), np.float32)
    gradient = jax.grad(lambda x: jax.lax.stop_gradient(rj.layer_norm(x)).sum() + x.sum())(x)
    assert_same_bits(jax, gradient, np.ones_like(x))
    gradient = jax.grad(lambda x: rj.batch_norm(x).mean.sum())(x)
    np.testing.assert_allclose(gradient, np.full_like(x, 0.25), rtol=1e-6)


# ---- other transformations ------------------------------------------------------------------------------------------


def test_scan_is_differentiated(jax: Any, rj: Any) -> None:
    """A loop over layers, in which x changes and weights are stacked, against the same loop unrolled."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(6, 8)).astype(np.float32)
    w = (rng.normal(size=(5, 8, 8)) / 3).astype(np.float32)
    gamma = rng.normal(size=(5, 8)).astype(np.float32)

    def layer(x: Any, w: Any, gamma: Any) -> Any:
        return rj.layer_norm(rj.linear(x, w), gamma, activation="tanh")

    def rolled(x: Any, w: Any, gamma: Any) -> Any:
        return (jax.lax.scan(lambda x, layers: (layer(x, *layers), None), x, (w, gamma))[0] ** 2).sum()

    def unrolled(x: Any, w: Any, gamma: Any) -> Any:
        for i in range(len(w)):
            x = layer(x, w[i], gamma[i])
        return (x**2).sum()

    expected = jax.jit(jax.value_and_grad(unrolled, argnums=(0, 1, 2)))(x, w, gamma)
    for loop in (rolled, jax.checkpoint(rolled)):
        found = jax.jit(jax.value_and_grad(loop, argnums=(0, 1, 2)))(x, w, gamma)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


def test_scan_over_an_lstm(jax: Any, rj: Any) -> None:
    """Chunks of time with the states carried give the gradients of the whole sequence."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(12, 2, 3)).astype(np.float32)
    weights = retrograd.LstmWeights(
        *((rng.normal(size=shape) / 2).astype(np.float32) for shape in ((16, 3), (16, 4), (16,)))
    )

    def whole(x: Any, weights: Any) -> Any:
        return (rj.lstm(x, weights).y ** 2).sum()

    def chunks(x: Any, weights: Any) -> Any:
        def step(states: Any, chunk: Any) -> Any:
            output = rj.lstm(chunk, weights, *states)
            return (output.hn, output.cn), output.y

        zeros = jax.numpy.zeros((2, 4))
        return (jax.lax.scan(step, (zeros, zeros), x.reshape(3, 4, 2, 3))[1] ** 2).sum()

    expected = jax.grad(whole, argnums=(0, 1))(x, weights)
    found = jax.jit(jax.grad(chunks, argnums=(0, 1)))(x, weights)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_one_trace_serves_all_calls_of_a_shape(jax: Any, rj: Any) -> None:
    traced = []

    @jax.jit
    def run(x: Any) -> Any:
        traced.append(x.shape)
        return rj.layer_norm(x)

    for shape in ((3, 4), (3, 4), (5, 4), (3, 4)):
        run(np.ones(shape, np.float32))
    assert traced == [(3, 4), (5, 4)]


def test_donated_and_shared_buffers(jax: Any, rj: Any) -> None:
    """A donated argument may be overwritten by XLA, and one array may be several arguments."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(64, 256)).astype(np.float32)
    y, cache = retrograd.layer_norm_forward(x)
    expected = retrograd.layer_norm_backward(x, cache).dx

    def step(x: Any) -> Any:
        y, pull_back = jax.vjp(rj.layer_norm, x)
        return y, pull_back(x)[0]

    assert_same_bits(jax, jax.jit(step)(x), (y, expected))
    given = jax.device_put(x)
    found = jax.jit(step, donate_argnums=0)(given)
    assert_same_bits(jax, found, (y, expected))
    chain = jax.jit(lambda x: rj.layer_norm(rj.layer_norm(x)), donate_argnums=0)(jax.device_put(x))
    assert_same_bits(jax, chain, retrograd.layer_norm_forward(y)[0])
    square = rng.normal(size=(16, 16)).astype(np.float32)
    assert_same_bits(
        jax, jax.jit(lambda x: rj.linear(x, x, x[0]))(square), retrograd.linear_forward(square, square, square[0])
    )


EMPTY = {
    "batch_norm": ((0, 3), (3,)),
    "layer_norm": ((4, 0), (0,)),
    "instance_norm": ((2, 3, 0), (3,)),
    "group_norm": ((0, 4, 2), (4,)),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_norms_without_elements(jax: Any, rj: Any, kind: str) -> None:
    shape, parameter = EMPTY[kind]
    x, gamma = np.ones(shape, np.float32), np.ones(parameter, np.float32)
    options = {"num_groups": 2} if kind == "group_norm" else {}

    def run(x: Any, gamma: Any, beta: Any) -> Any:
        return outputs(getattr(rj, kind)(x, gamma, beta, **options))

    found, pull_back = jax.vjp(run, x, gamma, gamma)
    y, cache = getattr(retrograd, f"{kind}_forward")(x, gamma, gamma, **options)
    assert_same_bits(jax, found[0], y)
    gradients = getattr(retrograd, f"{kind}_backward")(y, cache)
    assert_same_bits(jax, pull_back(found), tuple(gradients))
    if kind == "batch_norm":
        assert_same_bits(jax, found[1:], (np.zeros(3, np.float32), np.zeros(3, np.float32)))


@pytest.mark.parametrize("shape", [(0, 2, 3), (4, 0, 3), (4, 2, 0)])
def test_an_lstm_without_elements(jax: Any, rj: Any, shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    weights = retrograd.LstmWeights(np.ones((8, shape[2]), np.float32), np.ones((8, 2), np.float32))
    found, pull_back = jax.vjp(lambda x, weights: tuple(rj.lstm(x, weights)), x, weights)
    result = retrograd.lstm_forward(x, weights)
    assert_same_bits(jax, found, result[:3])
    expected = retrograd.lstm_backward(result.y, result.cache, dhn=result.hn, dcn=result.cn)
    assert_same_bits(jax, pull_back(found), (expected.dx, expected.dweights))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 3, 2), (4, 0, 2), (4, 3, 0)])
def test_linear_without_elements(jax: Any, rj: Any, rows: int, inputs: int, outputs: int) -> None:
    x, w, b = (np.ones(shape, np.float32) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
    y, pull_back = jax.vjp(rj.linear, x, w, b)
    expected = retrograd.linear_forward(x, w, b)
    assert_same_bits(jax, y, expected)
    assert_same_bits(jax, pull_back(y), tuple(retrograd.linear_backward(expected, x, w)))


def test_many_threads_call_at_once(jax: Any, rj: Any) -> None:
    rng = np.random.default_rng(6)
    x, dy = rng.normal(size=(2, 40, 600)).astype(np.float32)
    w = rng.normal(size=(50, 600)).astype(np.float32)

    @jax.jit
    def step(x: Any, dy: Any, w: Any) -> Any:
        y, pull_back = jax.vjp(rj.layer_norm, x)
        z, pull_linear = jax.vjp(rj.linear, y, w)
        return y, pull_back(dy), pull_linear(z)

    expected = step(x, dy, w)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: step(x, dy, w), range(64)):
            assert_same_bits(jax, found, expected)
