"""Calls of the engine's maps, by the names of operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrograd import _core
from support.arrays import Array

CODES = {name: code for name, code, _ in _core.map_operations()}
ARITIES = {name: arity for name, _, arity in _core.map_operations()}


def step(name: str, a: int, b: int = 0, c: int = 0) -> tuple[int, int, int, int]:
    return CODES[name], a, b, c


def run_map(
    steps: Sequence[tuple[int, int, int, int]],
    operands: Sequence[Array],
    results: Sequence[Array],
    *,
    constants: Sequence[float] = (),
    registers: Sequence[int] | None = None,
    f64: bool = False,
    threads: int = 1,
) -> Any:
    """By default the last registers are the results."""
    count = len(operands) + len(constants) + len(steps)
    if registers is None:
        registers = range(count - len(results), count)
    return _core.map(f64, list(steps), list(operands), list(constants), list(results), list(registers), False, threads)


def apply(name: str, *operands: Array, threads: int = 1, dtype: Any = None) -> Array:
    """One operation over arrays that are broadcast to one shape."""
    arrays = np.broadcast_arrays(*operands)
    result = np.empty(arrays[0].shape, operands[0].dtype if dtype is None else dtype)
    f64 = any(array.dtype == np.float64 for array in arrays)
    views = [np.asarray(array) for array in arrays]
    refusal = run_map([step(name, *range(len(views)))], views, [result], f64=f64, threads=threads)
    assert refusal is None, (refusal.reason, refusal.argument)
    return result


def without_nan_payload(array: Array) -> Array:
    """The same with one NaN for all: IEEE does not say which one an operation gives."""
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
