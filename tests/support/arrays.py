"""Arrays in awkward places, and comparing them bit by bit."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MEMORY = ("contiguous", "fortran", "permuted", "reversed", "every other", "padded", "in a field")


def placed(array: Array, memory: str, permutation: Sequence[int] = ()) -> Array:
    """A copy, laid out in memory otherwise. Anything outside of it is NaN."""

    def blank(shape: Sequence[int]) -> Array:
        return np.full(shape, math.nan, array.dtype)

    match memory:
        case "fortran":
            return array.copy(order="F")
        case "permuted":
            view = blank([array.shape[k] for k in permutation]).transpose(np.argsort(permutation))
        case "reversed":
            view = blank(array.shape)[(slice(None, None, -1),) * array.ndim]
        case "every other":
            view = blank([2 * extent for extent in array.shape])[(slice(None, None, 2),) * array.ndim]
        case "padded":
            view = blank([extent + 3 for extent in array.shape])[tuple(slice(1, 1 + e) for e in array.shape)]
        case "in a field":
            view = blank([*array.shape, 3])[..., 1]
        case _:
            return array.copy(order="C")
    view[...] = array
    return view


def fenced(array: Array, at_end: bool) -> Array:
    """A copy that begins where, or ends where, memory that must not even be read begins or ends."""
    if not array.size:
        return array.copy()
    page = mmap.PAGESIZE
    pages = -(-array.nbytes // page) + 2
    memory = mmap.mmap(-1, pages * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for fence in (start, start + (pages - 1) * page):
        if protect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = (pages - 1) * page - array.nbytes if at_end else page
    view = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
    view[...] = array
    return view


def same_bits(a: Array, b: Array) -> bool:
    return a.tobytes() == b.tobytes()  # in C order, whatever their memory is


def assert_same_bits(got: Iterable[Array | None], expected: Iterable[Array | None]) -> None:
    for a, b in zip(got, expected, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not same_bits(a, b):  # NumPy's report of what differs takes long
            a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def assert_untouched_around(view: Array) -> None:
    """Whatever the view's memory holds beside the view is as `placed` left it: NaN."""
    base = view
    while isinstance(base.base, np.ndarray):
        base = base.base
    if base.size > view.size:
        saved = view.copy()
        view[...] = 0
        assert np.count_nonzero(~np.isnan(base)) == view.size
        view[...] = saved
