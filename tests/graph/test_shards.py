"""Batch norm over shards in programs: the bits of the functions, and the numbers of the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import distributed, graph
from support.arrays import Array

NAMES = ("y", "dx", "dgamma", "dbeta", "running_mean", "running_var")


def data(shape: tuple[int, ...], axis: int, dtype: Any) -> list[Array]:
    """x, dy, gamma, beta."""
    rng = np.random.default_rng(sum(shape))
    channels = (shape[axis],)
    arrays = [rng.standard_normal(s) for s in (shape, shape, channels, channels)]
    return [a.astype(dtype) for a in (3 * arrays[0] + 1, *arrays[1:])]


def by_functions(
    group: distributed.Group, edges: list[int], arrays: list[Array], options: dict[str, Any], update: rg.RunningUpdate
) -> list[list[Array]]:
    """Two steps of each shard, with the functions."""
    x, dy, gamma, beta = arrays
    axis = options["channel_axis"]

    def work(shard: int) -> list[Array]:
        part = slice(edges[shard], edges[shard + 1])
        running = [np.zeros_like(gamma), np.ones_like(gamma)]
        for _ in range(2):
            own = rg.batch_norm_statistics(x[part], channel_axis=axis)
            count, mean, var = rg.combine_statistics(group.exchange(own))
            y, cache = rg.batch_norm_forward(
                x[part], gamma, beta, mean=mean, var=var, count=count, running_mean=running[0], running_var=running[1],
                update=update, **options,
            )  # fmt: skip
            sums = rg.batch_norm_gradient_sums(dy[part], cache)
            parts = group.exchange(sums)
            total = rg.GradientSums(*(sum(fields[1:], fields[0]) for fields in zip(*parts, strict=True)))
            dx = rg.batch_norm_backward(dy[part], cache, need=("dx",), sums=total).dx
            assert dx is not None
        return [y, dx, sums.sum_dz_xhat.astype(gamma.dtype), sums.sum_dz.astype(beta.dtype), *running]

    return group.run(work)


def by_programs(
    group: distributed.Group, edges: list[int], arrays: list[Array], options: dict[str, Any], update: rg.RunningUpdate
) -> list[list[Array]]:
    x, dy, *parameters = arrays

    def work(shard: int) -> list[Array]:
        part = slice(edges[shard], edges[shard + 1])
        gamma, beta = (graph.Variable(p) for p in parameters)
        mean, var = graph.Variable(np.zeros_like(parameters[0])), graph.Variable(np.ones_like(parameters[0]))

        def step(x: graph.Tensor, dy: graph.Tensor) -> Any:
            y = graph.sync_batch_norm(
                x, gamma, beta, exchange=group.exchange, running_mean=mean, running_var=var, update=update, **options
            )
            return [y, *graph.gradients(y, [x, gamma, beta], seed=dy)]

        program = graph.compile(step, x[part], dy[part])
        for _ in range(2):
            found = program(x[part], dy[part])
        return [*found, mean.value, var.value]

    return group.run(work)


def check_bits(found: list[list[Array]], expected: list[list[Array]]) -> None:
    for shard, (got, exact) in enumerate(zip(found, expected, strict=True)):
        for name, a, b in zip(NAMES, got, exact, strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert a.tobytes() == b.tobytes(), f"{name} of shard {shard}"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("activation", "slope_from"), [(None, "output"), ("relu", "output"), ("gelu", "input")])
@pytest.mark.parametrize(
    ("shape", "axis", "edges"),
    [
        ((11, 5), 1, [0, 4, 8, 11]),
        ((13, 6, 7), 1, [0, 13]),
        ((9, 4, 3, 5), -1, [0, 1, 9]),
        ((2, 3), 1, [0, 0, 1, 2]),  # a shard without samples
        ((1, 3), 1, [0, 1, 1]),  # the unbiased variance of one element is undefined
        ((0, 3), 1, [0, 0, 0]),
    ],
)
def test_the_bits_of_the_functions(
    shape: tuple[int, ...], axis: int, edges: list[int], activation: Any, slope_from: str, dtype: Any
) -> None:
    arrays = data(shape, axis, dtype)
    options = {"channel_axis": axis, "activation": activation, "slope_from": slope_from, "eps": 1e-4}
    for update in (rg.RunningUpdate.pytorch(), rg.RunningUpdate.keras(0.8)):
        if shape[0] == 0:  # which the functions refuse
            for found in by_programs(distributed.Group(2), edges, arrays, options, update):
                assert found[2].tolist() == found[3].tolist() == found[4].tolist() == [0] * 3
                assert found[5].tolist() == [1] * 3
            continue
        group = distributed.Group(len(edges) - 1)
        check_bits(
            by_programs(group, edges, arrays, options, update), by_functions(group, edges, arrays, options, update)
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_against_the_whole_batch(dtype: Any) -> None:
    arrays = data((23, 4, 5), 1, dtype)
    options = {"channel_axis": 1, "activation": "tanh", "slope_from": "input", "eps": 1e-5}
    update = rg.RunningUpdate.pytorch()
    edges = [0, 9, 12, 23]
    shards = by_programs(distributed.Group(3), edges, arrays, options, update)
    (whole,) = by_programs(distributed.Group(1), [0, 23], arrays, options, update)
    x, dy, gamma, beta = (graph.Variable(a) for a in arrays)
    mean, var = graph.Variable(np.zeros(4, dtype)), graph.Variable(np.ones(4, dtype))

    def step() -> Any:
        y = graph.batch_norm(x, gamma, beta, running_mean=mean, running_var=var, update=update, **options)
        return [y, *graph.gradients(y, [x, gamma, beta], seed=dy)]

    program = graph.compile(step)
    for _ in range(2):
        found = program()
    expected = [*found, mean.value, var.value]
    joined = [np.concatenate([s[k] for s in shards]) for k in (0, 1)]
    joined += [np.sum([s[k] for s in shards], axis=0) for k in (2, 3)]
    tolerance = 200 * float(np.finfo(dtype).eps)
    for name, a, b, c in zip(NAMES, [*joined, *shards[0][4:]], whole, expected, strict=True):
        np.testing.assert_allclose(a, c, rtol=tolerance, atol=tolerance, err_msg=name)
        np.testing.assert_allclose(b, c, rtol=tolerance, atol=tolerance, err_msg=name)
    for shard in shards:
        for k in (4, 5):
            assert shard[k].tobytes() == shards[0][k].tobytes()


def test_arrays_and_what_is_left_out() -> None:
    x, dy, gamma, _ = data((7, 3), 1, np.float32)
    at_once: Any = graph.sync_batch_norm(x, gamma, exchange=lambda value: [value])
    program = graph.compile(lambda x: graph.sync_batch_norm(x, gamma, exchange=lambda value: [value]), x)
    assert at_once.tobytes() == program(x).tobytes()
    np.testing.assert_allclose(at_once, rg.batch_norm_forward(x, gamma)[0], atol=1e-6)

    exchanged: list[Any] = []

    def exchange(value: Any) -> list[Any]:
        exchanged.append(value)
        return [value]

    def step(x: graph.Tensor) -> Any:
        scale = graph.Variable(gamma)
        return graph.gradients(graph.sync_batch_norm(x, scale, exchange=exchange), [scale], seed=dy)

    graph.compile(step, x)(x)
    assert len(exchanged) == 1  # dx, which nothing needs, takes another exchange


def test_what_is_refused() -> None:
    x = np.ones((4, 3), np.float32)
    running = graph.Variable(np.zeros(3))
    for kind, message, options in (
        (ValueError, "one of them is missing", {"running_mean": running}),
        (ValueError, "gamma has shape", {"gamma": np.ones(4, np.float32)}),
        (TypeError, "gamma has dtype", {"gamma": np.ones(3)}),
    ):
        with pytest.raises(kind, match=f"sync_(batch_)?norm: .*{message}"):
            graph.sync_batch_norm(x, exchange=lambda value: [value], **options)  # type: ignore[arg-type]

    def failing(value: Any) -> Any:
        raise LookupError("mine")

    mean, var = graph.Variable(np.zeros(3)), graph.Variable(np.ones(3))
    program = graph.compile(lambda x: graph.sync_batch_norm(x, exchange=failing, running_mean=mean, running_var=var), x)
    with pytest.raises(LookupError, match=r"^mine$"):
        program(x)
    assert mean.value.tolist() == [0] * 3
    assert var.value.tolist() == [1] * 3


def test_no_second_derivative() -> None:
    x = np.ones((4, 3), np.float32)

    def step(x: graph.Tensor) -> Any:
        (dx,) = graph.gradients(graph.sum(graph.sync_batch_norm(x, exchange=lambda v: [v]) ** 3), [x])
        return graph.gradients(graph.sum(dx**2), [x])

    with pytest.raises(TypeError, match=r"norm_dx .* has no derivative: it is a single call of the engine"):
        graph.compile(step, x)
