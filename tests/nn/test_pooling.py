"""retrograd.nn: MaxPool, AveragePool and Flatten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import nn
from support.arrays import assert_same_bits
from support.nn import Passes, assert_differences, passes, random

OPTIONS: list[dict[str, Any]] = [
    {"kernel": 2},
    {"kernel": (3, 2), "stride": (2, 1), "padding": ((1, 0), (0, 1))},
    {"kernel": 3, "stride": 2, "padding": 1, "channels_last": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_pools_are_the_functions(options: dict[str, Any]) -> None:
    x = random(3, 4, 7, 8, dtype=np.float32)
    kernel, last = options["kernel"], options.get("channels_last", False)
    windows = {name: value for name, value in options.items() if name != "kernel"}
    pool = nn.MaxPool(**options)
    y, indices = rg.max_pool_forward(x, kernel, **windows)
    assert y is not None
    assert indices is not None
    dy = random(*y.shape, seed=1, dtype=np.float32)
    expected = rg.max_pool_backward(dy, indices, x.shape, channels_last=last)
    for training in (True, False):
        pool.train() if training else pool.eval()
        found, gradients = passes(pool, x, dy)
        assert_same_bits([found, pool(x), pool.predict(x), gradients["x"]], [y, y, y, expected])
    for counts in (True, False):
        average = nn.AveragePool(**options, count_includes_padding=counts)
        counted = {**windows, "count_includes_padding": counts}
        found, gradients = passes(average, x, dy)
        assert_same_bits([found], [rg.average_pool_forward(x, kernel, **counted)])
        assert_same_bits([gradients["x"]], [rg.average_pool_backward(dy, x.shape, kernel, **counted)])


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
    step = nn.compile(net, nn.SoftmaxCrossEntropy(), nn.Adam(net, learning_rate=0.01))
    losses = [step(x, labels) for _ in range(200)]
    assert losses[-1] < 0.6 * losses[0]


def test_gradients_through_all_three_by_differences() -> None:
    net = nn.Sequential(nn.MaxPool(2), nn.AveragePool((1, 2), stride=1), nn.Flatten())
    x = np.random.default_rng(3).permutation(2 * 3 * 6 * 6).reshape(2, 3, 6, 6).astype(np.float64)
    both = Passes(net, x)
    assert_differences(nn.compile(both, None, nn.SGD(both, 0.0)), random(*net(x).shape))


def test_flatten() -> None:
    flatten, x = nn.Flatten(), random(2, 3, 4)
    y, gradients = passes(flatten, x, random(2, 12, seed=1))
    assert np.array_equal(y, x.reshape(2, 12))
    assert np.array_equal(gradients["x"], random(2, 12, seed=1).reshape(2, 3, 4))
    assert flatten(random(5, 0, 3)).shape == (5, 0)
    assert flatten(random(4)).shape == (4, 1)
    with pytest.raises(ValueError, match="x has no axes"):
        flatten(np.zeros(()))


def test_descriptions() -> None:
    assert repr(nn.MaxPool(2)) == "MaxPool(2)"
    assert repr(nn.MaxPool((2, 3), stride=1, dilation=2)) == "MaxPool((2, 3), stride=1, dilation=2)"
    average = nn.AveragePool(3, padding=1, count_includes_padding=False, channels_last=True)
    assert repr(average) == "AveragePool(3, padding=1, count_includes_padding=False, channels_last=True)"
    assert repr(nn.Flatten()) == "Flatten()"


def test_wrong_arguments_are_named_at_the_first_pass() -> None:
    with pytest.raises(ValueError, match="kernel is 0, must be at least 1"):
        nn.MaxPool(0)(random(1, 1, 2, 2))
    with pytest.raises(ValueError, match="x has 2 axes"):
        nn.AveragePool(2)(random(2, 2))
