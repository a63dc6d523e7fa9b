"""Random tensors: their distributions, their seeds, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from retrograd import _core, graph
from retrograd.lab import reference

COUNT = 1 << 16
DRAWS: dict[str, Callable[..., Any]] = {
    "uniform": lambda seed: graph.random_uniform((COUNT,), -2.0, 3.0, seed),
    "uniform64": lambda seed: graph.random_uniform((COUNT,), -2.0, 3.0, seed, np.float64),
    "normal": lambda seed: graph.random_normal((COUNT,), 1.0, 2.0, seed),
    "truncated": lambda seed: graph.truncated_normal((COUNT,), 0.0, 1.0, -1.0, 2.0, seed),
    "tail": lambda seed: graph.truncated_normal((COUNT,), 0.0, 1.0, 5.0, 6.0, seed),
    "integers": lambda seed: graph.random_integers((COUNT,), -3, 5, seed),
}


def cumulative(name: str) -> Callable[[float], float]:
    """The distribution function; of integers, just below the next one."""
    normal = NormalDist()
    if name == "integers":
        return lambda v: (math.floor(v) + 4) / 8
    if name.startswith("uniform"):
        return lambda v: (v + 2) / 5
    if name == "normal":
        return NormalDist(1.0, 2.0).cdf
    low, high = (-1.0, 2.0) if name == "truncated" else (5.0, 6.0)

    def below(v: float) -> float:  # of the mirrored interval, where it is exact
        return (normal.cdf(-low) - normal.cdf(-v)) / (normal.cdf(-low) - normal.cdf(-high))

    return below


@pytest.mark.parametrize("name", DRAWS)
def test_distribution(name: str) -> None:
    """Kolmogorov and Smirnov: for this many numbers, a distance of 0.008 has a probability below 1e-3."""
    drawn = np.sort(np.asarray(DRAWS[name](7)).astype(float))
    below = np.vectorize(cumulative(name))(drawn)
    counts = np.searchsorted(drawn, drawn, side="right") / COUNT
    assert np.abs(below - counts).max() < 0.008


@pytest.mark.parametrize("name", DRAWS)
def test_a_counter_draws_anew_and_levels_agree(name: str) -> None:
    counter = graph.counter()
    program = graph.compile(lambda: DRAWS[name](graph.next_count(counter)))
    for seed in (1, 2, 3):
        np.testing.assert_array_equal(program(), DRAWS[name](seed))
    expected = DRAWS[name](-5)
    for level in _core.isa_levels():
        _core.select_isa(level)
        np.testing.assert_array_equal(DRAWS[name](-5), expected)


def test_a_state_continues() -> None:
    state = np.array([1, 0, 0, -1, -2, 11, 0], np.int32)  # the next block but one carries
    whole = graph.philox((24,), state)
    first = graph.philox((8,), state)
    second = graph.philox((4, 4), first.state)
    np.testing.assert_array_equal(np.concatenate([first.values, np.ravel(second.values)]), whole.values)
    np.testing.assert_array_equal(second.state, whole.state)
    words = reference.philox4x32([[0, 0, 0xFFFFFFFF, 0xFFFFFFFE]], (11, 0))[0]
    np.testing.assert_array_equal(np.asarray(whole.values)[:4], (words >> np.uint64(9)).astype(np.float32) * 2.0**-23)


def test_rounding_stays_in_the_interval() -> None:
    high = np.nextafter(np.float32(1), np.float32(2))
    drawn = np.asarray(graph.random_uniform((1000,), 1.0, float(high), 1))
    assert (drawn == 1).all()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: graph.random_uniform((2,), 1.0, 1.0), "low is 1.0, must be below high, which is 1.0"),
        (lambda: graph.random_uniform((2,), 0.0, math.inf), "high is inf"),
        (lambda: graph.random_uniform((2,), dtype=np.int32), "dtype is int32"),
        (lambda: graph.random_uniform((2,), seed=np.zeros(2, np.int64)), "seed is int64"),
        (lambda: graph.random_normal((2,), std=-1.0), "std is -1.0"),
        (lambda: graph.truncated_normal((2,), low=2.0, high=1.0), "low is 2.0, high 1.0"),
        (lambda: graph.truncated_normal((2,), low=90.0, high=91.0), "too far from the mean"),
        (lambda: graph.random_integers((2,), 3, 3), "low is 3 and high 3"),
        (lambda: graph.random_integers((2,), 0, 2**40, dtype=np.int64), "at most"),
        (lambda: graph.philox((2,), np.zeros(7)), "state is float64"),
    ],
)
def test_refusals(draw: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        draw()


def test_random_numbers_are_constants_to_gradients() -> None:
    def step(x: graph.Tensor) -> Any:
        return graph.gradients((x * graph.random_normal((3,), seed=1)).sum(), [x])

    np.testing.assert_array_equal(
        graph.compile(step, graph.spec(3))(np.ones(3, np.float32))[0], graph.random_normal((3,), seed=1)
    )
