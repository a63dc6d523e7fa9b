"""Memory for results: a large one is made where earlier ones have lain.

Fresh memory comes from the system page by page, each cleared first, and for many megabytes that takes longer than a
normalization of them. So when the last array in such memory is gone, it waits for the next result of about its size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _core

Array: TypeAlias = npt.NDArray[Any]

_LARGE: Final = 1 << 20  # bytes; what is smaller the C library keeps by itself
_MOST: Final = 1 << 29  # bytes that may wait
_LINE: Final = 64  # results begin with a line of the cache

_waiting: Final[dict[int, Array]] = {}  # longest first. Each use is one step of a dict: no thread sees half of it
_numbers: Final = itertools.count()


class _Owner:
    """Memory of a result. It lives as long as an array that lies in it."""

    __slots__ = ("__array_interface__", "_memory")

    def __init__(self, memory: Array) -> None:
        self._memory = memory
        address = memory.__array_interface__["data"][0]
        data = address + -address % _LINE, False
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (memory.size - _LINE,), "data": data}

    def __del__(self) -> None:
        _waiting[next(_numbers)] = self._memory
        _release(sum(memory.nbytes for memory in list(_waiting.values())) - _MOST)


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """As np.empty."""
    size = math.prod(shape) * dtype.itemsize
    if not _LARGE <= size <= _MOST:
        return np.empty(shape, dtype)
    array: Array = np.ndarray(shape, dtype, np.asarray(_take(size)))
    return array


def empty_like(array: Array) -> Array:
    """As np.empty_like: axes lie in memory in the same order."""
    if not _LARGE <= array.nbytes <= _MOST:
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
    return _release(math.inf) + _core.release_scratch()


def _take(size: int) -> _Owner:
    step = 1 << (size.bit_length() - 4)  # sizes that differ by less than an eighth share their memory
    size = -(-size // step) * step + _LINE
    for number, memory in reversed(list(_waiting.items())):
        if memory.nbytes == size and _waiting.pop(number, None) is not None:
            return _Owner(memory)
    _release(size)  # as much as is added, so that all together does not grow
    return _Owner(np.empty(size, np.uint8))


def _release(size: float) -> int:
    """Let go of at least so many bytes, if there are as many, of those that have waited longest."""
    released = 0
    for number in list(_waiting):
        if released >= size:
            break
        memory = _waiting.pop(number, None)
        released += 0 if memory is None else memory.nbytes
    return released
