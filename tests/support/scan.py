"""What tests of the linear recurrence share: the data and the values of the specification, and tolerances."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import retrograd as rg
from retrograd.lab import bounds, reference

Array = npt.NDArray[Any]


def fill(shape: tuple[int, ...], start: int) -> Array:
    """The numbers of the specification: multiples of 1/20 from -9/20 to 9/20."""
    k = np.arange(math.prod(shape))
    return (((7 * k + start) % 19 - 9) / 20).reshape(shape)


CHECK: Final = {
    "y": [-0.18, 0.275, -0.7825, -0.075, 0.192, -0.03875, -0.223875, 0.3475, -0.1808, 0.1325625, -0.6291, -0.0305],
    "da": [
        0.0592, -0.05514375, -0.45855, -0.0078, -0.0612, -0.1643125, -0.26605, -0.0405, -0.1152, -0.0174375,
        -0.12313125, -0.10425,
    ],
    "db": [-0.296, -0.367625, 1.019, 0.078, 0.34, -0.5975, 0.34, 0.54, -0.6, 0.45, 0.55, -0.3],
    "dh0": [-0.0444, -0.1838125, 0.86615, 0.0195],
}  # fmt: skip


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
    tolerances = bounds.scan_forward_bound(_factors(a, b, reset), y, axis, b.dtype)
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
