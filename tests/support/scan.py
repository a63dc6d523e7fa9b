"""What tests of the linear recurrence share: comparisons with the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import retrograd as rg
from retrograd.lab import bounds, reference

Array = npt.NDArray[Any]


def check(
    got: rg.ScanResult,
    a: Array,
    b: Array,
    h0: Array | None = None,
    *,
    axis: int = 0,
    reset: Array | None = None,
) -> None:
    """A forward pass against the oracle."""
    axis %= b.ndim
    y, hn = reference.scan_forward(a, b, h0, axis=axis, reset=reset)
    tolerances = bounds.scan_forward_bound(_factors(a, b, reset), y, axis, b.dtype, h0)
    for name, found, exact, tolerance in zip(("y", "hn"), got, (y, hn), tolerances, strict=False):
        error = bounds.error_in_tolerances(found, exact, tolerance)
        assert error <= 1, f"{name}: {error} of the tolerance"


def check_gradients(
    got: rg.ScanGradients,
    dy: Array | None,
    dhn: Array | None,
    a: Array,
    y: Array,
    h0: Array | None = None,
    *,
    axis: int = 0,
    reset: Array | None = None,
) -> None:
    """Gradients against the oracle, which starts from the engine's own states y."""
    axis %= y.ndim
    exact = reference.scan_backward(dy, dhn, a, y, h0, axis=axis, reset=reset)
    factors = _factors(a, y, reset)
    tolerances = bounds.scan_backward_bound(factors, y, h0, exact.db, exact.dh0, a.shape, axis, y.dtype)
    for name, found, right, tolerance in zip(got._fields, got, exact, tolerances, strict=True):
        if found is not None:
            error = bounds.error_in_tolerances(found, right, tolerance)
            assert error <= 1, f"{name}: {error} of the tolerance"


def _factors(a: Array, whole: Array, reset: Array | None) -> Array:
    wide = np.broadcast_to(a, whole.shape)
    return wide if reset is None else np.where(reset, 0, wide)
