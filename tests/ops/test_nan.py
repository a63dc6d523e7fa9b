"""NaN at any number of threads: the same elements are NaN, and all others have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core

Array = np.ndarray[Any, Any]


def normal(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def poisoned(array: Array, share: float = 0.002) -> Array:
    """With NaNs of random signs and payloads in some places."""
    rng = np.random.default_rng(1)
    bits = array.view(np.uint32).copy()
    places = rng.random(array.shape) < share
    bits[places] = rng.integers(1, 1 << 22, places.sum()) | 0x7FC00000 | (rng.integers(0, 2, places.sum()) << 31)
    return bits.view(np.float32)


X = poisoned(normal(33, 17, 29))
A, W = poisoned(normal(300, 200)), poisoned(normal(150, 200))
SEQUENCE = poisoned(normal(20, 24, 40), 0.0005)
WEIGHTS = rg.LstmWeights(normal(256, 40), poisoned(normal(256, 64), 0.00005))


def batch_norm(threads: int, axis: int) -> list[Array]:
    y, cache = rg.batch_norm_forward(X, channel_axis=axis, activation="tanh", num_threads=threads)
    gradients = rg.batch_norm_backward(X, cache, need=("dx", "dgamma", "dbeta"), num_threads=threads)
    return [y, cache.mean, cache.var, *gradients]


def layer_norm(threads: int) -> list[Array]:
    y, cache = rg.layer_norm_forward(X, num_threads=threads)
    return [y, *rg.layer_norm_backward(X, cache, need=("dx", "dgamma", "dbeta"), num_threads=threads)]


def linear(threads: int) -> list[Array]:
    y = rg.linear_forward(A, W, num_threads=threads)
    return [y, *rg.linear_backward(y, A, W, need=("dx", "dw", "db"), num_threads=threads)]


def lstm(threads: int) -> list[Array]:
    result = rg.lstm_forward(SEQUENCE, WEIGHTS, num_threads=threads)
    assert result.cache is not None
    gradients = rg.lstm_backward(result.y, result.cache, num_threads=threads)
    return [*result[:3], gradients.dx, *gradients.dweights[:2]]


CALLS: dict[str, Callable[[int], list[Array]]] = {
    "batch norm, channels first": lambda threads: batch_norm(threads, 1),
    "batch norm, channels last": lambda threads: batch_norm(threads, 2),
    "layer norm": layer_norm,
    "linear": linear,
    "lstm": lstm,
}


@pytest.mark.parametrize("level", _core.isa_levels())
@pytest.mark.parametrize("name", CALLS)
def test_nan_does_not_change_other_bits_at_any_thread_count(name: str, level: str) -> None:
    assert _core.select_isa(level)
    expected = CALLS[name](1)
    assert any(np.isnan(array).any() for array in expected)
    assert any(np.isfinite(array).any() for array in expected)
    for threads in (2, 3, 4):
        for got, right in zip(CALLS[name](threads), expected, strict=True):
            missing = np.isnan(right)
            np.testing.assert_array_equal(np.isnan(got), missing)
            assert got[~missing].tobytes() == right[~missing].tobytes()
