"""Small modules and models."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd import nn

Array = npt.NDArray[Any]


def random(*shape: int, seed: int = 0, dtype: npt.DTypeLike = np.float64) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Scale(nn.Module):
    """A layer of one's own, as short as it can be."""

    def __init__(self, features: int) -> None:
        self.add_parameter("w", np.full(features, 2.0))

    w: Array

    def forward(self, x: Array) -> Array:
        self.keep(x=x)
        return self.w * x

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array:
        self.set_gradient("w", (dy * self.kept("x")).sum(axis=0), accumulate)
        return dy * self.w


class Halve(nn.Module):
    def forward(self, x: Array) -> Array:
        return x / 2

    def backward(self, dy: Array) -> Array:
        return dy / 2


def model(dtype: npt.DTypeLike = np.float32, seed: int = 0) -> nn.Sequential:
    rng = np.random.default_rng(seed)
    return nn.Sequential(
        embedding=nn.Embedding(7, 4, dtype=dtype, rng=rng),
        lstm=nn.LSTM(4, 3, layers=2, bidirectional=True, dropout=0.2, dtype=dtype, rng=rng),
        norm=nn.LayerNorm(6, dtype=dtype),
        head=nn.Linear(6, 5, dtype=dtype, rng=rng),
    )
