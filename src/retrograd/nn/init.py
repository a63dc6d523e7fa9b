"""Initial values of parameters."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..ops._types import Array

__all__ = ["Rng", "generator", "normal", "orthogonal", "uniform"]

# A NumPy generator, a seed, or None for a random seed.
Rng: TypeAlias = np.random.Generator | int | None


def generator(rng: Rng) -> np.random.Generator:
    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError):
        raise TypeError(f"rng is {rng!r}, must be a numpy.random.Generator, a seed from 0 or None") from None


def uniform(rng: np.random.Generator, shape: tuple[int, ...], bound: float, dtype: npt.DTypeLike) -> Array:
    """Draw from [-bound, bound), in float64, so that a seed gives the same values in every dtype."""
    return rng.uniform(-bound, bound, shape).astype(dtype, copy=False)


def normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float, dtype: npt.DTypeLike) -> Array:
    return rng.normal(0.0, deviation, shape).astype(dtype, copy=False)


def glorot_bound(inputs: int, outputs: int) -> float:
    return math.sqrt(6.0 / max(inputs + outputs, 1))


def orthogonal(rng: np.random.Generator, shape: tuple[int, int], dtype: npt.DTypeLike) -> Array:
    """Draw a matrix with orthonormal columns, or orthonormal rows if it has fewer rows than columns."""
    rows, columns = shape
    q, r = np.linalg.qr(rng.standard_normal((max(shape), min(shape))))
    q *= np.sign(np.diag(r))  # makes the distribution uniform (Haar)
    return np.ascontiguousarray(q if rows >= columns else q.T).astype(dtype, copy=False)
