"""The oracle: convolutions of images and transposed ones, tap by tap.

Arrays are [N, C, spatial] with any number of spatial axes. Options are tuples with an entry for each of these axes;
padding is (before, after).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .precision import Array, widened

__all__ = ["conv_backward", "conv_forward", "conv_transpose_backward", "conv_transpose_forward"]

Sizes = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


def _read(pixels: Sizes, tap: Sizes, stride: Sizes, dilation: Sizes) -> tuple[Any, ...]:
    """What a grid of `pixels` reads of a padded image through a tap."""
    first = [k * d for k, d in zip(tap, dilation, strict=True)]
    spans = ((p - 1) * s + 1 if p else 0 for p, s in zip(pixels, stride, strict=True))
    return (..., *(slice(f, f + span, s) for f, span, s in zip(first, spans, stride, strict=True)))


def _at(tap: Sizes) -> tuple[Any, ...]:
    return (..., *tap)


def _inner(padded: Sizes, padding: Pairs) -> tuple[Any, ...]:
    return (..., *(slice(before, size - after) for size, (before, after) in zip(padded, padding, strict=True)))


def _grouped(array: Array, axis: int, groups: int) -> Array:
    """With the axis of channels split into groups and channels of a group."""
    shape = array.shape
    return array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])


def _joined(array: Array, axis: int) -> Array:
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _correlate(padded: Array, w: Array, pixels: Sizes, stride: Sizes, dilation: Sizes) -> Array:
    """y[n, g, o, pixel] from padded [n, g, i, spatial] and w [g, o, i, kernel]."""
    y = np.zeros((*padded.shape[:2], w.shape[1], *pixels), padded.dtype)
    for tap in np.ndindex(w.shape[3:]):
        y += np.einsum("ngi...,goi->ngo...", padded[_read(pixels, tap, stride, dilation)], w[_at(tap)])
    return y


def _scatter(y: Array, w: Array, size: Sizes, stride: Sizes, dilation: Sizes) -> Array:
    """The opposite: padded [n, g, i, spatial] += w y."""
    padded = np.zeros((*y.shape[:2], w.shape[2], *size), y.dtype)
    for tap in np.ndindex(w.shape[3:]):
        at = _read(y.shape[3:], tap, stride, dilation)
        padded[at] += np.einsum("ngo...,goi->ngi...", y, w[_at(tap)])
    return padded


def _weights(padded: Array, y: Array, kernel: Sizes, stride: Sizes, dilation: Sizes) -> Array:
    """dw [g, o, i, kernel] from padded [n, g, i, spatial] and y [n, g, o, pixel]."""
    pixels = y.shape[3:]
    dw = np.zeros((*y.shape[1:3], padded.shape[2], *kernel), y.dtype)
    for tap in np.ndindex(kernel):
        seen = padded[_read(pixels, tap, stride, dilation)]
        rows = (a.reshape(*a.shape[:3], math.prod(pixels)) for a in (seen, y))
        dw[_at(tap)] = np.einsum("ngip,ngop->goi", *rows)
    return dw


def conv_forward(
    x: Array, w: Array, b: Array | None, *, stride: Sizes, padding: Pairs, dilation: Sizes, groups: int
) -> Array:
    """``y[n, o, p] = b[o] + sum of w[o, i, k] * x[n, i, p * stride + k * dilation - before]``."""
    x, w = widened(x), widened(w)
    padded = np.pad(x, ((0, 0), (0, 0), *padding))
    pixels = tuple(
        (size - (k - 1) * d - 1) // s + 1
        for size, k, s, d in zip(padded.shape[2:], w.shape[2:], stride, dilation, strict=True)
    )
    y = _joined(_correlate(_grouped(padded, 1, groups), _grouped(w, 0, groups), pixels, stride, dilation), 1)
    return y if b is None else y + widened(b).reshape(-1, *(1,) * len(pixels))


def conv_backward(
    dy: Array, x: Array, w: Array, *, stride: Sizes, padding: Pairs, dilation: Sizes, groups: int
) -> tuple[Array, Array, Array]:
    """Return dx, dw and db."""
    dy, x, w = widened(dy), widened(x), widened(w)
    padded = np.pad(x, ((0, 0), (0, 0), *padding))
    size, grouped = padded.shape[2:], _grouped(dy, 1, groups)
    dx = _joined(_scatter(grouped, _grouped(w, 0, groups), size, stride, dilation), 1)[_inner(size, padding)]
    dw = _joined(_weights(_grouped(padded, 1, groups), grouped, w.shape[2:], stride, dilation), 0)
    return dx, dw, dy.sum((0, *range(2, dy.ndim)))


def conv_transpose_forward(
    x: Array,
    w: Array,
    b: Array | None,
    *,
    stride: Sizes,
    padding: Pairs,
    output_padding: Sizes,
    dilation: Sizes,
    groups: int,
) -> Array:
    """``y[n, o, p * stride + k * dilation - before] += w[i, o, k] * x[n, i, p]``, and b[o]."""
    x, w = widened(x), widened(w)
    size = tuple(
        (p - 1) * s + (k - 1) * d + 1 + extra
        for p, k, s, d, extra in zip(x.shape[2:], w.shape[2:], stride, dilation, output_padding, strict=True)
    )
    full = _joined(_scatter(_grouped(x, 1, groups), _grouped(w, 0, groups), size, stride, dilation), 1)
    y: Array = full[_inner(size, padding)]
    return y if b is None else y + widened(b).reshape(-1, *(1,) * len(size))


def conv_transpose_backward(
    dy: Array, x: Array, w: Array, *, stride: Sizes, padding: Pairs, dilation: Sizes, groups: int
) -> tuple[Array, Array, Array]:
    """Return dx, dw and db. The shape of dy determines the output padding."""
    dy, x, w = widened(dy), widened(x), widened(w)
    padded = _grouped(np.pad(dy, ((0, 0), (0, 0), *padding)), 1, groups)
    dx = _joined(_correlate(padded, _grouped(w, 0, groups), x.shape[2:], stride, dilation), 1)
    dw = _joined(_weights(padded, _grouped(x, 1, groups), w.shape[2:], stride, dilation), 0)
    return dx, dw, dy.sum((0, *range(2, dy.ndim)))
