"""The oracle: the linear recurrence h[t] = a[t] * h[t-1] + b[t]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .precision import Array, widened

__all__ = ["ScanGradientsOracle", "scan_backward", "scan_forward"]


class ScanGradientsOracle(NamedTuple):
    da: Array
    db: Array
    dh0: Array


@np.errstate(all="ignore")
def scan_forward(
    a: Array, b: Array, h0: Array | None = None, *, axis: int = 0, reset: Array | None = None
) -> tuple[Array, Array]:
    """Return the states and the last one. a[t] counts as 0 where `reset`."""
    b = np.moveaxis(widened(b), axis, 0)
    a = _factors(a, b, axis, reset)
    h = np.zeros(b.shape[1:], b.dtype) if h0 is None else widened(h0)
    y = np.empty_like(b)
    for t in range(len(b)):
        h = a[t] * h + b[t]
        y[t] = h
    return np.moveaxis(y, 0, axis), h


@np.errstate(all="ignore")
def scan_backward(
    dy: Array | None,
    dhn: Array | None,
    a: Array,
    y: Array,
    h0: Array | None = None,
    *,
    axis: int = 0,
    reset: Array | None = None,
) -> ScanGradientsOracle:
    """The gradients, from the states y of the forward pass. da has the shape of a."""
    shape = a.shape
    y = np.moveaxis(widened(y), axis, 0)
    given = a
    a = _factors(a, y, axis, reset)
    dy = np.zeros_like(y) if dy is None else np.moveaxis(widened(dy), axis, 0)
    first = np.zeros(y.shape[1:], y.dtype) if h0 is None else widened(h0)
    carried = np.zeros(y.shape[1:], y.dtype) if dhn is None else widened(dhn)
    da, db = np.zeros_like(y), np.zeros_like(y)
    for t in reversed(range(len(y))):
        db[t] = dy[t] + carried
        da[t] = db[t] * (y[t - 1] if t else first)
        carried = a[t] * db[t]
    da = np.moveaxis(da, 0, axis)
    if reset is not None:
        da = np.where(reset, 0, da)
    padded = (1,) * (da.ndim - given.ndim) + shape
    axes = tuple(i for i, extent in enumerate(padded) if extent != da.shape[i])
    return ScanGradientsOracle(da.sum(axes, keepdims=True).reshape(shape), np.moveaxis(db, 0, axis), carried)


def _factors(a: Array, whole: Array, axis: int, reset: Array | None) -> Array:
    """a with the axes of `whole`, whose first is time."""
    shape = np.moveaxis(np.empty(whole.shape, np.bool_), 0, axis).shape
    wide = np.broadcast_to(widened(a), shape)
    if reset is not None:
        wide = np.where(reset, 0, wide)
    return np.moveaxis(wide, axis, 0)
