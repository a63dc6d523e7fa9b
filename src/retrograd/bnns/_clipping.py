"""Clipping of arrays by value and by norm, and norms with their gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from . import _constants as c
from ._direct import Descriptor, Given, Operands, floating
from ._failure import Invalid, Unsupported, status
from ._filter import accumulates, check_extents, checked_descriptor, delta_geometry, put, unlike
from ._memory import Array, Geometry, as_float, as_size, check_disjoint, numbered_axes, view_of

_NORM: Final = Operands(floating("src"), floating("dest", written=True))
_NORM_BACKWARD: Final = Operands(floating("in_delta", written=True), floating("out_delta"))


def axes_of(axis_flags: object, geometry: Geometry, name: str) -> tuple[int, ...]:
    """The axes that `axis_flags` selects, in an array with its slowest axis first; all of them for 0."""
    flags, rank = as_size("axis_flags", axis_flags), len(geometry.extents)
    if flags >> rank:
        raise Invalid(f"axis_flags is {flags:#x}, but {name} has {rank} axes")
    axes = numbered_axes(geometry.layout)
    return tuple(axes[k] for k in range(rank) if flags >> k & 1) or axes


@lru_cache(maxsize=1024)
def _clipping(index: str) -> Operands:
    """The operands of a clipping; `index` is their place in a list."""
    return Operands(floating(f"src{index}"), floating(f"dest{index}", written=True, like=f"src{index}"))


def _clipped(src: object, dest: object, index: str = "") -> tuple[Given, Given]:
    source, result = _clipping(index)(src, dest)
    if result.geometry.extents != source.geometry.extents:
        raise unlike(result.name, result.geometry, source.name, source.geometry)
    return source, result


def _norms(array: Array, axes: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """The L2 norms over some axes, which keep extent 1. Squares of float32 do not overflow float64."""
    values = array.astype(np.float64)
    with np.errstate(all="ignore"):
        return np.asarray(np.sqrt(np.sum(values * values, axis=axes, keepdims=True)))


def _limited(array: Array, norm: npt.NDArray[np.float64] | float, most: float) -> Array:
    """``array * min(1, most / norm)``, rounded once. NaN propagates."""
    with np.errstate(all="ignore"):
        factor = np.where(norm <= most, 1.0, np.divide(most, norm))
        return (array.astype(np.float64) * factor).astype(array.dtype)


def _norm_limit(name: str, value: object) -> float:
    limit = as_float(name, value)
    if not limit >= 0:
        raise Invalid(f"{name} is {limit}, must be at least 0")
    return limit


# ---- clipping -------------------------------------------------------------------------------------------------------


@status(-1)
def BNNSClipByValue(dest: Descriptor, src: Descriptor, min_val: float, max_val: float) -> int:
    """Limit every value to a range. `dest` may be `src`. NaN stays NaN. 0, or -1 on failure."""
    source, result = _clipped(src, dest)
    low, high = as_float("min_val", min_val), as_float("max_val", max_val)
    if not low <= high:
        raise Invalid(f"min_val is {low}, must be at most max_val, which is {high}")
    result.fill(np.clip(source.array.astype(np.float32), np.float32(low), np.float32(high)))
    return 0


@status(-1)
def BNNSClipByNorm(dest: Descriptor, src: Descriptor, max_norm: float, axis_flags: int) -> int:
    """Scale an array, or each of its slices along the flagged axes, to an L2 norm of at most `max_norm`. 0, or -1."""
    source, result = _clipped(src, dest)
    limit = _norm_limit("max_norm", max_norm)
    axes = axes_of(axis_flags, source.geometry, "src")
    result.fill(_limited(source.array, _norms(source.array, axes), limit))
    return 0


@status(-1)
def BNNSClipByGlobalNorm(
    dest: Sequence[Descriptor], src: Sequence[Descriptor], count: int, max_norm: float, use_norm: float
) -> int:
    """Scale `count` arrays by one factor, so that the L2 norm of all together is at most `max_norm`. 0, or -1.

    `use_norm` is that norm, if it is known; 0 computes it.
    """
    number = as_size("count", count)
    for name, given in (("dest", dest), ("src", src)):
        if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
            raise Invalid(f"{name} is of type {type(given).__name__}, must be a list of descriptors")
        if len(given) < number:
            raise Invalid(f"{name} has {len(given)} descriptors, must have {number}")
    limit, norm = _norm_limit("max_norm", max_norm), _norm_limit("use_norm", use_norm)
    pairs = [_clipped(src[k], dest[k], f"[{k}]") for k in range(number)]
    check_disjoint({result.name: result.array for _, result in pairs}, {})
    if norm == 0:
        arrays = [source.array for source, _ in pairs]
        norm = math.sqrt(sum(_norms(array, tuple(range(array.ndim))).item() ** 2 for array in arrays))
    scaled = [_limited(source.array, norm, limit) for source, _ in pairs]  # all, before any is overwritten
    for (_, result), values in zip(pairs, scaled, strict=True):
        result.fill(values)
    return 0


# ---- norms ----------------------------------------------------------------------------------------------------------


def _check_norm(norm_type: object) -> None:
    if norm_type != c.BNNSL2Norm:
        raise Unsupported(f"norm_type is {norm_type!r}; it must be BNNSL2Norm")


def _check_reduced(name: str, given: Geometry, of: str, whole: Geometry, axes: tuple[int, ...]) -> None:
    """Raise unless an array has the extents that are left of `whole`, apart from those that are 1."""
    left = [extent for axis, extent in enumerate(whole.shape) if axis not in axes]
    check_extents(name, given, tuple(reversed(left)), f"that are left of {of}")


@status(-1)
def BNNSComputeNorm(dest: Descriptor, src: Descriptor, norm_type: int, axis_flags: int) -> int:
    """Compute L2 norms over the flagged axes (0: all), which `dest` does not have. 0, or -1 on failure."""
    _check_norm(norm_type)
    source, result = _NORM(src, dest)
    axes = axes_of(axis_flags, source.geometry, "src")
    _check_reduced("dest", result.geometry, "src", source.geometry, axes)
    result.fill(_norms(source.array, axes))
    return 0


@status(-1)
def BNNSComputeNormBackward(
    in_: object, in_delta: Descriptor, out: object, out_delta: Descriptor, norm_type: int, axis_flags: int
) -> int:
    """Compute the gradient of a norm: ``dx = dy * x / y``, and 0 where y is 0. 0, or -1 on failure.

    `in_` and `out` are memory of the shape and type of `in_delta` and `out_delta`.
    """
    _check_norm(norm_type)
    whole = delta_geometry("in_delta", checked_descriptor("in_delta", in_delta))
    reduced = delta_geometry("out_delta", checked_descriptor("out_delta", out_delta))
    axes = axes_of(axis_flags, whole, "in_delta")
    _check_reduced("out_delta", reduced, "in_delta", whole, axes)
    dx, dy = _NORM_BACKWARD(in_delta, out_delta)
    accumulate = accumulates("in_delta", in_delta)
    x, y = view_of(whole, in_, "in"), view_of(reduced, out, "out")
    kept = tuple(1 if axis in axes else extent for axis, extent in enumerate(whole.shape))
    y64, dy64 = (array.astype(np.float64).reshape(kept) for array in (y, dy.array))
    with np.errstate(all="ignore"):
        gradient = np.where(y64 == 0, 0.0, dy64 / y64) * x.astype(np.float64)
        put(dx.array, gradient.astype(np.float32), accumulate)
    return 0
