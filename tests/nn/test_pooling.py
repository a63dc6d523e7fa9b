"""retrograd.nn: MaxPool, AveragePool and Flatten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import nn
from support.arrays import Array

OPTIONS: list[dict[str, Any]] = [
    {"kernel": 2},
    {"kernel": (3, 2), "stride": (2, 1), "padding": ((1, 0), (0, 1))},
    {"kernel": 3, "stride": 2, "padding": 1, "channels_last": True},
]


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("options", OPTIONS)
def test_pools_are_the_functions(options: dict[str, Any]) -> None:
    x = random(3, 4, 7, 8)
    kernel, last = options["kernel"], options.get("channels_last", False)
    windows = {name: value for name, value in options.items() if name != "kernel"}
    pool = nn.MaxPool(**options)
    y, indices = rg.max_pool_forward(x, kernel, **windows)
    assert y is not None
    assert indices is not None
    dy = random(*y.shape, seed=1)
    for training in (True, True, False):
        pool.train() if training else pool.eval()
        np.testing.assert_array_equal(pool.forward(x), y)
        np.testing.assert_array_equal(pool.backward(dy), rg.max_pool_backward(dy, indices, x.shape, channels_last=last))
    for counts in (True, False):
        average = nn.AveragePool(**options, count_includes_padding=counts)
        counted = {**windows, "count_includes_padding": counts}
        np.testing.assert_array_equal(average.forward(x), rg.average_pool_forward(x, kernel, **counted))
        np.testing.assert_array_equal(average.backward(dy), rg.average_pool_backward(dy, x.shape, kernel, **counted))
        average.forward(x)
        assert average.backward(dy, need_dx=False) is None


def test_training_reuses_memory_and_evaluation_does_not() -> None:
    for pool in (nn.MaxPool(2), nn.AveragePool(2)):
        x = random(2, 3, 4, 4)
        first = pool.forward(x)
        pool.backward(first)
        assert pool.forward(x) is first
        pool.backward(first)
        assert pool.forward(random(3, 3, 4, 4)).shape == (3, 3, 2, 2)
        pool.eval()
        first = pool.forward(x)
        assert pool.forward(x) is not first


def test_a_small_network_learns() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 2, 8, 8)).astype(np.float32)
    labels = (x[:, 0].max((1, 2)) > x[:, 1].max((1, 2))).astype(np.int64)
    net = nn.Sequential(
        nn.MaxPool(2),
        nn.AveragePool(2),
        nn.Flatten(),
        nn.Linear(8, 16, rng=1),
        nn.Activation("relu"),
        nn.Linear(16, 2, rng=2),
    )
    loss = nn.SoftmaxCrossEntropy()
    optimizer = nn.Adam(net, learning_rate=0.01)
    losses = []
    for _ in range(200):
        losses.append(float(loss.forward(net.forward(x), labels)))
        net.backward(loss.backward())
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]


def test_gradients_through_all_three_by_differences() -> None:
    rng = np.random.default_rng(3)
    net = nn.Sequential(nn.MaxPool(2), nn.AveragePool((1, 2), stride=1), nn.Flatten())
    x = rng.permutation(2 * 3 * 6 * 6).reshape(2, 3, 6, 6).astype(np.float64)
    dy = rng.standard_normal(net.forward(x).shape)
    dx = net.backward(dy).copy()
    direction = rng.standard_normal(x.shape)
    up, down = (float((net.eval().forward(x + h * direction) * dy).sum()) for h in (1e-3, -1e-3))
    assert float((dx * direction).sum()) == pytest.approx((up - down) / 2e-3, rel=1e-8)


def test_flatten() -> None:
    flatten, x = nn.Flatten(), random(2, 3, 4)
    y = flatten.forward(x)
    assert y.shape == (2, 12)
    assert flatten.backward(y).shape == x.shape
    assert flatten.forward(random(5, 0, 3)).shape == (5, 0)
    assert flatten.forward(random(4)).shape == (4, 1)
    with pytest.raises(ValueError, match="x has no axes"):
        flatten.forward(np.zeros((), np.float32))


def test_descriptions() -> None:
    assert repr(nn.MaxPool(2)) == "MaxPool(2)"
    assert repr(nn.MaxPool((2, 3), stride=1, dilation=2)) == "MaxPool((2, 3), stride=1, dilation=2)"
    average = nn.AveragePool(3, padding=1, count_includes_padding=False, channels_last=True)
    assert repr(average) == "AveragePool(3, padding=1, count_includes_padding=False, channels_last=True)"
    assert repr(nn.Flatten()) == "Flatten()"


def test_wrong_arguments_are_named_at_the_first_pass() -> None:
    with pytest.raises(ValueError, match="kernel is 0, must be at least 1"):
        nn.MaxPool(0).forward(random(1, 1, 2, 2))
    with pytest.raises(ValueError, match="x has 2 axes"):
        nn.AveragePool(2).forward(random(2, 2))
