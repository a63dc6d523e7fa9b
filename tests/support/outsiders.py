"""Functions of graphs with what PyTorch and JAX compute instead, and arrays to compare them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from retrograd import graph
from support.arrays import Array

RANDOM = np.random.default_rng(7)


def normal(*shape: int) -> Array:
    return RANDOM.standard_normal(shape)


A, B, ROW, COLUMN = normal(4, 3), normal(4, 3), normal(3), normal(4, 1)
P, Q = np.abs(A) + 0.3, np.abs(B) + 0.3  # positive
U = np.tanh(A) * 0.9  # within 1
STACK, MORE = normal(2, 4, 3), normal(2, 3, 5)
W, V = normal(5, 3), normal(5)
IMAGES, KERNELS, BIAS = normal(2, 3, 6, 5), normal(4, 3, 3, 2), normal(4)
GAMMA, BETA = np.abs(normal(3)) + 0.5, normal(3)
LABELS = np.array([0, 2, 1, 1])
TARGETS = (normal(4, 3) > 0).astype(np.float64)
SHARES = P / P.sum(-1, keepdims=True)
PLACES = np.array([[2, 0], [1, 1]])
ALONG = np.array([[2, 0], [1, 1], [0, 0], [2, 2]])


class Row(NamedTuple):
    """A function with inputs; `torch` and `jax` get the library first."""

    name: str
    inputs: tuple[Array, ...]
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    jax: Callable[..., Any]


ROWS: list[Row] = []


def row(name: str, inputs: Any, ours: Any, torch: Any, jax: Any) -> None:
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    ROWS.append(Row(name, given, ours, torch, jax))


def named(name: str, *inputs: Array, torch: str | None = None) -> None:
    """A function that has one name in all three."""
    row(
        name, inputs, lambda *t: getattr(graph, name)(*t), lambda T, *t: getattr(T, torch or name)(*t),
        lambda J, *t: getattr(J.numpy, name)(*t),
    )  # fmt: skip
