"""Calls of the engine at every level and number of threads, which must all give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from retrograd import _core

Array = np.ndarray[Any, Any]
THREADS = (1, 2, 7)


def at_every_level(call: Callable[[int], tuple[Array, ...]]) -> tuple[Array, ...]:
    """What call(threads) returns; asserts that its bits do not depend on the level or the threads."""
    before = _core.isa()
    found: tuple[Array, ...] | None = None
    try:
        for level in _core.isa_levels():
            assert _core.select_isa(level)
            for threads in THREADS:
                results = tuple(np.array(a, order="C") for a in call(threads))
                if found is None:
                    found = results
                for a, b in zip(found, results, strict=True):
                    assert (a.shape, a.dtype) == (b.shape, b.dtype)
                    assert a.tobytes() == b.tobytes(), (level, threads)
    finally:
        _core.select_isa(before)
    assert found is not None
    return found
