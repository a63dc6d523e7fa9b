"""Tolerances of the linear recurrence, absolute, one per element.

Every step is one rounding of its result, at most u of it. The later factors carry that error on as they do the state
itself, so the sum of the errors is the same recurrence over |a|, of the magnitudes of the results. Products of these
errors with roundings are the 1 % on top. The oracle rounds its product too; where product and sum cancel, that shows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..cases.types import Array
from .precision import PRECISIONS

__all__ = ["ScanBound", "scan_backward_bound", "scan_forward_bound"]

_MORE = 1.01
_ORACLE = float(np.finfo(np.longdouble).eps)


class ScanBound(NamedTuple):
    da: Array
    db: Array
    dh0: Array


def scan_forward_bound(factors: Array, y: Array, axis: int, dtype: Any, h0: Array | None = None) -> tuple[Array, Array]:
    """Tolerances of y and of the last state. `factors`: a, 0 where reset; y: the oracle's."""
    unit, least = _unit(dtype)
    first = 0.0 if h0 is None else np.abs(h0).astype(float)
    size, a = (np.moveaxis(np.abs(v).astype(float), axis, 0) for v in (y, np.broadcast_to(factors, y.shape)))
    error = np.zeros(size.shape[1:])
    errors = np.zeros_like(size)
    for t in range(len(size)):
        terms = size[t] + a[t] * (size[t - 1] if t else first)
        error = a[t] * error + unit * size[t] + _ORACLE * terms + least
        errors[t] = error
    return np.moveaxis(_MORE * errors, 0, axis), _MORE * error


def scan_backward_bound(
    factors: Array,
    y: Array,
    h0: Array | None,
    db: Array,
    dh0: Array,
    a_shape: tuple[int, ...],
    axis: int,
    dtype: Any,
) -> ScanBound:
    """Tolerances of the gradients; db and dh0 are the oracle's, y the engine's, and `a_shape` is that of da.

    da is rounded once, and where it is summed, the sum is rounded once more, in float64 except for the last rounding.
    """
    unit, least = _unit(dtype)
    a, states, adjoint = (
        np.moveaxis(np.abs(v).astype(float), axis, 0) for v in (np.broadcast_to(factors, y.shape), y, db)
    )
    first = np.zeros(states.shape[1:]) if h0 is None else np.abs(h0).astype(float)
    error = np.zeros(states.shape[1:])
    of_da, of_db, sizes = np.zeros_like(states), np.zeros_like(states), np.zeros_like(states)
    carried = np.zeros(states.shape[1:])
    for t in reversed(range(len(states))):
        later = a[t + 1] * adjoint[t + 1] if t + 1 < len(states) else 0.0
        error = carried + unit * adjoint[t] + _ORACLE * (adjoint[t] + later) + least
        before = states[t - 1] if t else first
        sizes[t] = adjoint[t] * before
        of_db[t], of_da[t] = error, error * before + unit * sizes[t] + least
        carried = a[t] * error
    of_da, of_db, sizes = (np.moveaxis(v, 0, axis) for v in (of_da, of_db, sizes))
    padded = (1,) * (sizes.ndim - len(a_shape)) + a_shape
    axes = tuple(i for i, extent in enumerate(padded) if extent != sizes.shape[i])
    da = of_da
    if axes:
        terms = max(1, sizes.size // max(1, int(np.prod(a_shape))))
        da = (of_da + (unit + terms * 2.0**-53) * sizes).sum(axes, keepdims=True)
    start = carried + unit * np.abs(dh0).astype(float) + least
    return ScanBound(_MORE * da.reshape(a_shape), _MORE * of_db, _MORE * start)


def _unit(dtype: Any) -> tuple[float, float]:
    precision = PRECISIONS[str(np.dtype(dtype))]
    return precision.unit, 4 * precision.smallest
