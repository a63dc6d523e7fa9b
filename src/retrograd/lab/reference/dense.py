"""The oracle: linear layers, embeddings and dropout."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .precision import Array, widened

__all__ = [
    "dropout_mask",
    "embedding_backward",
    "linear_backward",
    "linear_forward",
    "philox4x32",
    "philox_mask",
]

# --- dropout ----------------------------------------------------------------------------------------------------------


def philox4x32(counter: npt.ArrayLike, key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 of Salmon et al. (2011): four 32-bit words for each counter [..., 4] of four 32-bit words."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, dtype=np.uint64), -1, 0)
    for number in range(10):
        k0, k1 = (
            np.uint64((k + number * weyl) & 0xFFFFFFFF) for k, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
        )
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (second >> half) ^ c1 ^ k0, second & low, (first >> half) ^ c3 ^ k1, first & low
    return np.stack([c0, c1, c2, c3], axis=-1)


def philox_mask(seed: int, layer: int, shape: tuple[int, int, int], p: float) -> Array:
    """The dropout mask [T, N, W] between `layer` and the next one: 0 with probability p, else 1 / (1 - p).

    Element (t, n, j) uses one word of the counter made from row = t*N + n and j, so it does not depend on other
    elements. One counter serves four columns, 16 apart.
    """
    T, N, W = shape
    row, j = np.arange(T * N, dtype=np.uint64)[:, None], np.arange(W, dtype=np.uint64)[None, :]
    row, j = np.broadcast_arrays(row, j)
    words = [row & 0xFFFFFFFF, row >> 32, 16 * (j // 64) + j % 16, np.full_like(j, layer)]
    drawn = philox4x32(np.stack(words, axis=-1), (seed & 0xFFFFFFFF, seed >> 32))
    word = np.take_along_axis(drawn, ((j % 64) // 16).astype(np.intp)[..., None], axis=-1)
    dropped = word.reshape(shape) < math.floor(p * 2**32)
    return np.where(dropped, 0.0, 1 / (1 - p))


def dropout_mask(seed: int, shape: tuple[int, ...], rate: float) -> Array:
    """The mask of a single array: its elements in C order form rows of 4096, with a layer index that no LSTM uses."""
    count = math.prod(shape)
    mask = philox_mask(seed, 0xFFFFFFFF, (-(-count // 4096), 1, 4096), rate)
    return mask.reshape(-1)[:count].reshape(shape)


# --- linear layers and embeddings -------------------------------------------------------------------------------------


def linear_forward(x: Array, w: Array, b: Array | None = None) -> Array:
    y: Array = np.einsum("...i,oi->...o", widened(x), widened(w))
    return y if b is None else y + widened(b)


def linear_backward(dy: Array, x: Array, w: Array) -> tuple[Array, Array, Array]:
    """Return dx, dw and db."""
    dy, x, w = widened(dy), widened(x), widened(w)
    rows = math.prod(x.shape[:-1])
    flat = dy.reshape(rows, w.shape[0])
    return np.einsum("...o,oi->...i", dy, w), np.einsum("ro,ri->oi", flat, x.reshape(rows, w.shape[1])), flat.sum(0)


def embedding_backward(dy: Array, indices: Array, rows: int) -> Array:
    dy = widened(dy)
    dtable = np.zeros((rows, dy.shape[-1]), dy.dtype)
    for position in np.ndindex(indices.shape):
        dtable[indices[position]] += dy[position]
    return dtable
