"""First values of parameters, drawn from a generator."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .module import Array

__all__ = ["Rng", "generator", "normal", "orthogonal", "uniform"]

# A generator, or what numpy.random.default_rng makes one of; None: fresh entropy.
Rng: TypeAlias = np.random.Generator | int | None


def generator(rng: Rng) -> np.random.Generator:
    return np.random.default_rng(rng)


def uniform(rng: np.random.Generator, shape: tuple[int, ...], bound: float, dtype: npt.DTypeLike) -> Array:
    """Uniform between -bound and bound. Drawn in float64, so that a seed means the same in every type."""
    return rng.uniform(-bound, bound, shape).astype(dtype, copy=False)


def normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float, dtype: npt.DTypeLike) -> Array:
    return rng.normal(0.0, deviation, shape).astype(dtype, copy=False)


def glorot_bound(inputs: int, outputs: int) -> float:
    return math.sqrt(6.0 / max(inputs + outputs, 1))


def orthogonal(rng: np.random.Generator, shape: tuple[int, int], dtype: npt.DTypeLike) -> Array:
    """A matrix whose columns (its rows, if there are fewer of them) are orthonormal."""
    rows, columns = shape
    q, r = np.linalg.qr(rng.standard_normal((max(shape), min(shape))))
    q *= np.sign(np.diag(r))  # makes it uniform among such matrices
    return np.ascontiguousarray(q if rows >= columns else q.T).astype(dtype, copy=False)
