"""retrograd.nn: Conv and ConvTranspose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import nn
from support.arrays import Array, assert_same_bits
from support.nn import passes, random


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
        x, w = random(2, 4, 7, 8), layer.w.value
        expected = forward(x, w, layer.b.value if bias else None, activation=activation, **given)
        dy = random(*expected.shape, seed=1)
        y, gradients = passes(layer, x, dy)
        assert_same_bits([y, layer(x), layer.predict(x)], [expected] * 3)
        wanted = backward(dy, x, w, activation=activation, y=y, **given)
        assert_same_bits([gradients["x"], gradients["w"]], wanted[:2])
        if bias:
            assert_same_bits([gradients["b"]], [wanted.db])


def test_weights_and_first_values() -> None:
    layer = nn.Conv(16, 40, (3, 5), groups=4, rng=0)
    assert layer.w.shape == (40, 4, 3, 5)
    assert layer.b.shape == (40,)
    bound = 1 / math.sqrt(4 * 15)
    assert 0.9 * bound < np.abs(layer.w.value).max() <= bound
    assert 0 < np.abs(layer.b.value).max() <= bound
    keras = nn.Conv(16, 40, 3, init="keras", rng=0)
    assert 0.9 < np.abs(keras.w.value).max() / math.sqrt(6 / (9 * 56)) <= 1
    assert not keras.b.value.any()
    he = nn.Conv(16, 40, 3, init="he", rng=0)
    assert abs(he.w.value.std() / math.sqrt(2 / (16 * 9)) - 1) < 0.05
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
            largest = np.abs(getattr(ours, name).value).max() / parameter.detach().abs().max().item()
            assert 0.8 < largest < 1.25


def test_a_model_of_convolutions_learns() -> None:
    """Which quarter of an image is bright: stripes of convolutions, down and up again."""
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Conv(1, 6, 3, padding=1, activation="relu", init="he", rng=rng),
        nn.BatchNorm(6),
        nn.Conv(6, 8, 3, stride=2, padding=1, activation="tanh", rng=rng),
        nn.ConvTranspose(8, 1, 2, stride=2, rng=rng),
    )
    step = nn.compile(model, nn.MeanSquaredError(), nn.Adam(model, 3e-2))
    losses = []
    for _ in range(150):
        x = rng.standard_normal((8, 1, 8, 8), dtype=np.float32)
        target: Array = np.maximum(x, np.roll(x, 1, axis=-1))
        losses.append(step(x, target))
    assert np.mean(losses[-10:]) < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Conv(3, 2, 3, init="glorot"), "Conv: init is 'glorot'"),
        (lambda: nn.Conv(3, 2, 0), "Conv: kernel is 0, must be one or two sizes of at least 1"),
        (lambda: nn.Conv(3, 2, (1, 1, 1)), r"Conv: kernel is \(1, 1, 1\), must be one or two sizes"),
        (lambda: nn.Conv(3, 2, 3, groups=2), "Conv: groups is 2, which does not divide the 3 channels of x and the 2"),
        (lambda: nn.ConvTranspose(4, 3, 3, groups=2), "ConvTranspose: groups is 2, which does not divide the 4"),
        (
            lambda: nn.Conv(3, 2, 3)(np.zeros((1, 4, 5, 5))),
            r"Conv: x has .*, with 4 channels on axis 1, must have 3",
        ),
    ],
)
def test_layers_refuse(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
