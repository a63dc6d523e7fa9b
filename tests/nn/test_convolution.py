"""retrograd.nn: Conv and ConvTranspose."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import nn
from support.arrays import Array, assert_same_bits
from support.nn import random


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, "tanh"])
def test_convolutions_compute_what_the_functions_do(bias: bool, activation: str | None) -> None:
    options: dict[str, Any] = {"stride": 2, "padding": 1, "groups": 2}
    layers: list[tuple[Any, Any, Any, dict[str, Any]]] = [
        (nn.Conv, rg.conv_forward, rg.conv_backward, options),
        (nn.ConvTranspose, rg.conv_transpose_forward, rg.conv_transpose_backward, {**options, "output_padding": 1}),
    ]
    for kind, forward, backward, given in layers:
        layer = kind(4, 6, 3, bias=bias, activation=activation, dtype=np.float64, rng=0, **given)
        x = random(2, 4, 7, 8)
        y = layer.forward(x)
        assert_same_bits([y], [forward(x, layer.w, layer.b if bias else None, activation=activation, **given)])
        dy = np.ones_like(y)
        expected = backward(dy, x, layer.w, activation=activation, y=y.copy(), **given)
        assert_same_bits([layer.backward(dy), layer.dw], expected[:2])
        if bias:
            assert_same_bits([layer.db], [expected.db])
        once = layer.dw.copy()
        layer.forward(x)
        assert layer.backward(dy, accumulate=True, need_dx=False) is None
        np.testing.assert_allclose(layer.dw, 2 * once, rtol=1e-12)


def test_weights_and_first_values() -> None:
    layer = nn.Conv(16, 40, (3, 5), groups=4, rng=0)
    assert layer.w.shape == (40, 4, 3, 5)
    assert layer.b.shape == (40,)
    bound = 1 / math.sqrt(4 * 15)
    assert 0.9 * bound < np.abs(layer.w).max() <= bound
    assert 0 < np.abs(layer.b).max() <= bound
    keras = nn.Conv(16, 40, 3, init="keras", rng=0)
    assert 0.9 < np.abs(keras.w).max() / math.sqrt(6 / (9 * 56)) <= 1
    assert not keras.b.any()
    he = nn.Conv(16, 40, 3, init="he", rng=0)
    assert abs(he.w.std() / math.sqrt(2 / (16 * 9)) - 1) < 0.05
    assert nn.ConvTranspose(16, 40, 3, groups=4).w.shape == (16, 10, 3, 3)
    assert nn.Conv(3, 2, (7,)).w.shape == (2, 3, 7)
    assert nn.Conv(2, 3, 3, rng=1).w.dtype == np.float32
    assert repr(nn.Conv(2, 4, 3, padding=1, groups=2, activation="relu", bias=False)) == (
        "Conv(2, 4, (3, 3), padding=1, groups=2, activation=Activation('relu'), bias=False)"
    )


def test_first_values_are_those_of_torch(torch: Any) -> None:
    """Their ranges: the draws differ."""
    for ours, theirs in (
        (nn.Conv(8, 30, 3, groups=2, rng=0), torch.nn.Conv2d(8, 30, 3, groups=2)),
        (nn.ConvTranspose(8, 30, 3, groups=2, rng=0), torch.nn.ConvTranspose2d(8, 30, 3, groups=2)),
    ):
        assert ours.w.shape == tuple(theirs.weight.shape)
        for name, parameter in (("w", theirs.weight), ("b", theirs.bias)):
            largest = np.abs(getattr(ours, name)).max() / parameter.detach().abs().max().item()
            assert 0.8 < largest < 1.25


def test_evaluation_gives_new_arrays_and_copies_start_fresh() -> None:
    layer, x = nn.Conv(2, 3, 3, dtype=np.float64, rng=0), random(2, 2, 5, 5)
    trained = layer.forward(x)
    layer.eval()
    first = layer.forward(x)
    layer.train()
    kept = first.copy()
    layer.forward(2 * x)
    assert np.array_equal(first, kept)
    assert not np.shares_memory(first, trained)
    twin = copy.deepcopy(layer)
    assert np.array_equal(twin.forward(x), kept)
    with pytest.raises(RuntimeError, match=r"Conv\.backward: there was no forward pass"):
        nn.Conv(2, 3, 3).backward(first)


def test_a_model_of_convolutions_learns() -> None:
    """Which quarter of an image is bright: stripes of convolutions, down and up again."""
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Conv(1, 6, 3, padding=1, activation="relu", init="he", rng=rng),
        nn.BatchNorm(6),
        nn.Conv(6, 8, 3, stride=2, padding=1, activation="tanh", rng=rng),
        nn.ConvTranspose(8, 1, 2, stride=2, rng=rng),
    )
    loss, optimizer = nn.MeanSquaredError(), nn.Adam(model, 3e-2)
    losses = []
    for _ in range(150):
        x = rng.standard_normal((8, 1, 8, 8), dtype=np.float32)
        target: Array = np.maximum(x, np.roll(x, 1, axis=-1))
        losses.append(loss.forward(model.forward(x), target))
        model.backward(loss.backward(), need_dx=False)
        optimizer.step()
    assert np.mean(losses[-10:]) < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Conv(3, 2, 3, init="glorot"), "Conv: init is 'glorot'"),
        (lambda: nn.Conv(3, 2, 0), "Conv: kernel is 0, must be one or two sizes of at least 1"),
        (lambda: nn.Conv(3, 2, (1, 1, 1)), r"Conv: kernel is \(1, 1, 1\), must be one or two sizes"),
        (lambda: nn.Conv(3, 2, 3, groups=2), "Conv: groups is 2, which does not divide the 3 channels of x and the 2"),
        (lambda: nn.ConvTranspose(4, 3, 3, groups=2), "ConvTranspose: groups is 2, which does not divide the 4"),
        (lambda: nn.Conv(3, 2, 3).forward(np.zeros((1, 4, 5, 5), np.float32)), "conv_forward: w has shape"),
    ],
)
def test_layers_refuse(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
