"""Python memory that a repeated call keeps."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

__all__ = ["growth"]


def growth(runs: Callable[[int], None]) -> int:
    """The bytes that remain of 300 runs; ``runs(count)`` makes some."""
    tracemalloc.start()
    try:
        runs(20)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        runs(300)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
