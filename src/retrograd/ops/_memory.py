"""Memory for results: a large one is made where earlier ones have lain.

Fresh memory comes from the system page by page, each cleared first, and for many megabytes that takes longer than a
normalization of them. So when the last array in such memory is gone, it waits for the next result of about its size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _core

Array: TypeAlias = npt.NDArray[Any]

_LARGE: Final = 1 << 20  # bytes; what is smaller the C library keeps by itself


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """As np.empty."""
    size = math.prod(shape) * dtype.itemsize
    if not _LARGE <= size <= sys.maxsize:  # NumPy has words for what is too large
        return np.empty(shape, dtype)
    memory: Any = _core.ResultMemory(size)
    array: Array = np.ndarray(shape, dtype, memory)
    return array


def empty_like(array: Array) -> Array:
    """As np.empty_like: axes lie in memory in the same order."""
    if array.nbytes < _LARGE:
        return np.empty_like(array)
    if array.flags.c_contiguous:
        return empty(array.shape, array.dtype)
    strides = array.strides
    order = sorted(range(array.ndim), key=lambda axis: -abs(strides[axis]))
    like: Array = empty([array.shape[axis] for axis in order], array.dtype).transpose(np.argsort(order))
    return like


def release_memory() -> int:
    """Give memory that waits for later calls back to the system, and say how many bytes it was.

    That is the memory of large results that are gone, and the scratch memory of the calling thread.
    """
    return _core.release_memory() + _core.release_scratch()
