"""The oracle: pooling, window by window."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .precision import Array, widened

__all__ = [
    "average_pool_backward",
    "average_pool_forward",
    "l2_pool_backward",
    "l2_pool_forward",
    "max_pool_backward",
    "max_pool_forward",
    "max_unpool_backward",
    "max_unpool_forward",
]

# All arrays are [N, C, ...], with any number of spatial axes. kernel, stride and dilation have one int for each axis,
# padding one pair (before, after).
Ints = Sequence[int]
Pairs = Sequence[tuple[int, int]]


class _Windows:
    """The inputs of every window, as positions in a flattened plane in C order, without the padding."""

    def __init__(self, shape: Ints, kernel: Ints, stride: Ints, padding: Pairs, dilation: Ints | None = None) -> None:
        axes = list(zip(shape[2:], kernel, stride, padding, dilation or (1,) * len(kernel), strict=True))
        counts = [(n + before + after - (k - 1) * d - 1) // s + 1 for n, k, s, (before, after), d in axes]
        self.shape = (*shape[:2], *counts)
        self.inputs: list[list[int]] = []
        for output in np.ndindex(*counts):
            inside = [
                [p for p in (o * s - before + i * d for i in range(k)) if 0 <= p < n]
                for o, (n, k, s, (before, _), d) in zip(output, axes, strict=True)
            ]
            self.inputs.append([int(np.ravel_multi_index(p, shape[2:])) for p in itertools.product(*inside)])

    def outputs(self, dtype: Any) -> Array:
        return np.zeros((*self.shape[:2], len(self.inputs)), dtype)


def _planes(array: Array) -> Array:
    return array.reshape(*array.shape[:2], math.prod(array.shape[2:]))


def max_pool_forward(x: Array, kernel: Ints, stride: Ints, padding: Pairs, dilation: Ints) -> tuple[Array, Array]:
    """The largest values, and their positions in the flattened planes: the first of equals, the last NaN."""
    windows = _Windows(x.shape, kernel, stride, padding, dilation)
    y, indices = windows.outputs(x.dtype), windows.outputs(np.int64)
    for sample, channel in np.ndindex(*x.shape[:2]):
        plane = x[sample, channel].reshape(-1)
        for output, inputs in enumerate(windows.inputs):
            best = inputs[0]
            for position in inputs[1:]:
                if plane[position] > plane[best] or math.isnan(plane[position]):
                    best = position
            y[sample, channel, output] = plane[best]
            indices[sample, channel, output] = best
    return y.reshape(windows.shape), indices.reshape(windows.shape)


def max_pool_backward(dy: Array, indices: Array, shape: Ints) -> Array:
    dy, indices = _planes(widened(dy)), _planes(indices)
    dx = np.zeros((*shape[:2], math.prod(shape[2:])), dy.dtype)
    for sample, channel, output in np.ndindex(*dy.shape):
        dx[sample, channel, indices[sample, channel, output]] += dy[sample, channel, output]
    return dx.reshape(shape)


def average_pool_forward(
    x: Array, kernel: Ints, stride: Ints, padding: Pairs, count_includes_padding: bool = True
) -> Array:
    windows, planes = _Windows(x.shape, kernel, stride, padding), _planes(widened(x))
    y = windows.outputs(planes.dtype)
    for output, inputs in enumerate(windows.inputs):
        count = math.prod(kernel) if count_includes_padding else len(inputs)
        for position in inputs:
            y[:, :, output] += planes[:, :, position] / count
    return y.reshape(windows.shape)


def average_pool_backward(
    dy: Array, shape: Ints, kernel: Ints, stride: Ints, padding: Pairs, count_includes_padding: bool = True
) -> Array:
    windows, planes = _Windows(shape, kernel, stride, padding), _planes(widened(dy))
    dx = np.zeros((*shape[:2], math.prod(shape[2:])), planes.dtype)
    for output, inputs in enumerate(windows.inputs):
        count = math.prod(kernel) if count_includes_padding else len(inputs)
        for position in inputs:
            dx[:, :, position] += planes[:, :, output] / count
    return dx.reshape(shape)


def l2_pool_forward(x: Array, kernel: Ints, stride: Ints, padding: Pairs) -> Array:
    windows, planes = _Windows(x.shape, kernel, stride, padding), _planes(widened(x))
    y = windows.outputs(planes.dtype)
    for output, inputs in enumerate(windows.inputs):
        for position in inputs:
            y[:, :, output] += planes[:, :, position] ** 2
    return np.asarray(np.sqrt(y)).reshape(windows.shape)


def l2_pool_backward(dy: Array, x: Array, y: Array, kernel: Ints, stride: Ints, padding: Pairs) -> Array:
    """dx, of y as it was computed: 0 for a window whose norm is 0."""
    windows = _Windows(x.shape, kernel, stride, padding)
    dy, planes, y = _planes(widened(dy)), _planes(widened(x)), _planes(widened(y))
    dx = np.zeros_like(planes)
    for output, inputs in enumerate(windows.inputs):
        norm = y[:, :, output]
        for position in inputs:
            share = np.divide(planes[:, :, position], norm, out=np.zeros_like(norm), where=norm != 0)
            dx[:, :, position] += np.where(norm == 0, 0, dy[:, :, output] * share)
    return dx.reshape(x.shape)


def max_unpool_forward(x: Array, indices: Array, shape: Ints) -> Array:
    x, indices = _planes(x), _planes(indices)
    y = np.zeros((*shape[:2], math.prod(shape[2:])), x.dtype)
    for sample, channel, position in np.ndindex(*x.shape):
        y[sample, channel, indices[sample, channel, position]] = x[sample, channel, position]
    return y.reshape(shape)


def max_unpool_backward(dy: Array, indices: Array) -> Array:
    shape = indices.shape
    dy, indices = _planes(dy), _planes(indices)
    dx = np.zeros(indices.shape, dy.dtype)
    for sample, channel, position in np.ndindex(*indices.shape):
        dx[sample, channel, position] = dy[sample, channel, indices[sample, channel, position]]
    return dx.reshape(shape)
