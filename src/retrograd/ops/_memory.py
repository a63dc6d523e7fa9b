"""Memory for results. Large results reuse the memory of earlier ones.

The system hands out fresh memory page by page and clears each page first. For many megabytes that takes longer than
normalizing them. So when the last array in such memory is deleted, the memory is kept for the next result of about its
size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np

from .. import _core
from ._types import Array

LARGE: Final = 1 << 20  # bytes; malloc already reuses smaller blocks


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Like np.empty."""
    size = prod(shape) * dtype.itemsize
    if size < LARGE or size > sys.maxsize:  # for sizes that are too large, NumPy raises a clear error
        return np.empty(shape, dtype)
    memory: Any = _core.ResultMemory(size)
    array: Array = np.ndarray(shape, dtype, memory)
    return array


def empty_like(array: Array) -> Array:
    """Like np.empty_like: the order of the axes in memory is the same."""
    if array.nbytes < LARGE:
        return np.empty_like(array)
    if array.flags.c_contiguous:
        return empty(array.shape, array.dtype)
    strides = array.strides
    order = sorted(range(array.ndim), key=lambda axis: -abs(strides[axis]))
    like: Array = empty([array.shape[axis] for axis in order], array.dtype).transpose(np.argsort(order))
    return like


def release_memory() -> int:
    """Return memory kept for later calls to the system; returns the number of bytes.

    This is the memory of large results that have been deleted, and the scratch memory of the calling thread.
    """
    return _core.release_memory() + _core.release_scratch()
