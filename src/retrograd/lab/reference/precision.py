"""The precision of the oracle, higher than the engine's."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def working_type(a: npt.ArrayLike) -> tuple[Array, type[np.floating[Any]]]:
    """Return `a` as an array, and the dtype to compute in, one step wider than `a`'s."""
    a = np.asarray(a)
    if a.dtype.kind in "biu":
        a = a.astype(np.float64)
    wide = a.dtype == np.float64 or a.dtype == np.longdouble
    return a, np.longdouble if wide else np.float64


def widened(a: Array) -> Array:
    a, dtype = working_type(a)
    return a.astype(dtype)
