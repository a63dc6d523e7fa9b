"""Detect arrays that share memory: one rule for every function, in bounded time.

Whether two strided arrays have an element in common is a hard problem in general. Pairs that cannot be decided quickly
count as overlapping: an error is better than waiting for hours or a wrong result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from ._types import Array

# Steps of NumPy's search, a few milliseconds. Views made by slicing and transposing need a handful.
_MOST_WORK: Final = 20_000
# From this many arrays on, marking their memory is faster than comparing every pair.
_MANY: Final = 16


class _Span(NamedTuple):
    low: int  # first byte, and one past the last
    high: int
    order: int  # position in the caller's list, results first
    name: str
    array: Array
    is_result: bool


def same_elements(a: Array, b: Array) -> bool:
    """Whether two arrays are the same memory, element by element."""
    if a.shape != b.shape or a.dtype != b.dtype or a.ctypes.data != b.ctypes.data:
        return False
    return all(extent == 1 or p == q for extent, p, q in zip(a.shape, a.strides, b.strides, strict=True))


def overlaps(a: Array, b: Array) -> bool:
    """Whether two arrays share memory, or cannot quickly be shown not to."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=_MOST_WORK))  # type: ignore[arg-type]  # any int will do
    except (np.exceptions.TooHardError, OverflowError):
        return True


def find_overlap(
    results: Mapping[str, Array | None],
    inputs: Mapping[str, Array | None],
    in_place: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[str, str] | None:
    """The names of a result and of an input or another result that it overlaps; None if there is no overlap.

    `in_place` maps a result to the inputs that it may overwrite in place, element for element.
    """
    allowed = in_place or {}
    listed = [(name, array, arrays is results) for arrays in (results, inputs) for name, array in arrays.items()]
    spans = [
        _Span(*_bounds(array), order, name, array, is_result)
        for order, (name, array, is_result) in enumerate(listed)
        if array is not None and array.size
    ]
    for cluster in _clusters(spans):
        if len(cluster) >= _MANY and not allowed and not _marks_collide(cluster):
            continue
        cluster.sort(key=lambda span: span.order)
        for one, other in itertools.combinations(cluster, 2):
            if not one.is_result or not overlaps(one.array, other.array):
                continue
            if other.name in allowed.get(one.name, ()) and same_elements(one.array, other.array):
                continue
            return one.name, other.name
    return None


def _bounds(array: Array) -> tuple[int, int]:
    low = high = array.ctypes.data
    for extent, stride in zip(array.shape, array.strides, strict=True):
        reach = (extent - 1) * stride
        low, high = (low + reach, high) if reach < 0 else (low, high + reach)
    return low, high + array.itemsize


def _clusters(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Groups of arrays whose spans overlap one another, directly or through others; only groups with a result."""
    spans.sort(key=lambda span: span.low)
    cluster: list[_Span] = []
    end = 0
    for span in [*spans, None]:
        if span is not None and span.low < end:
            cluster.append(span)
            end = max(end, span.high)
            continue
        if len(cluster) > 1 and any(one.is_result for one in cluster):
            yield cluster
        if span is not None:
            cluster, end = [span], span.high


def _marks_collide(cluster: list[_Span]) -> bool:
    """Mark the memory of each array, inputs first; True if a result covers a mark. Linear in elements, not in pairs."""
    low, high = cluster[0].low, max(span.high for span in cluster)
    unit = 0
    for array in (span.array for span in cluster):
        steps = (stride for extent, stride in zip(array.shape, array.strides, strict=True) if extent > 1)
        unit = math.gcd(unit, array.itemsize, array.ctypes.data - low, *steps)
    try:
        marks = np.zeros((high - low) // unit, np.bool_)
    except MemoryError:
        return True
    for span in sorted(cluster, key=lambda span: span.is_result):
        array = span.array
        shape = (*array.shape, array.itemsize // unit)
        strides = (*(stride // unit for stride in array.strides), 1)
        covered: Array = np.ndarray(shape, np.bool_, marks, (array.ctypes.data - low) // unit, strides)
        if span.is_result and covered.any():
            return True
        covered[...] = True
    return False
