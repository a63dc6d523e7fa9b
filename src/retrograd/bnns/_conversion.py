"""Conversion between data types. An integer stands for ``data_scale * stored + data_bias``."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from . import _constants as c
from ._failure import Invalid
from ._memory import Array, as_float
from ._structures import BNNSNDArrayDescriptor

INTEGERS: Final[tuple[int, ...]] = tuple(
    getattr(c, f"BNNSDataType{kind}{bits}") for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)
)


class Scale(NamedTuple):
    """What stored numbers mean: ``factor * stored + bias``."""

    factor: float
    bias: float


PLAIN: Final = Scale(1.0, 0.0)


def scale_of(name: str, descriptor: BNNSNDArrayDescriptor) -> Scale:
    """The scale of a descriptor's integers. Floating-point numbers have none; a factor of 0 counts as 1."""
    if descriptor.data_type not in INTEGERS:
        return PLAIN
    factor = as_float(f"{name}.data_scale", descriptor.data_scale)
    bias = as_float(f"{name}.data_bias", descriptor.data_bias)
    for field, value in (("data_scale", factor), ("data_bias", bias)):
        if not math.isfinite(value):
            raise Invalid(f"{name}.{field} is {value}, must be finite")
    return Scale(factor or 1.0, bias)


def converted(stored: Array, scale: Scale, dtype: np.dtype[Any], target: Scale) -> Array:
    """The same values as numbers of another type, in a new array.

    Integers are rounded half to even and saturate; NaN becomes 0. The arithmetic is float64.
    """
    with np.errstate(all="ignore"):
        if dtype.kind in "iu" and stored.dtype.kind in "iu" and scale == target:
            from_, to = np.iinfo(stored.dtype), np.iinfo(dtype)
            return np.clip(stored, max(from_.min, to.min), min(from_.max, to.max)).astype(dtype)
        if dtype.kind not in "iu" and scale == PLAIN:
            return stored.astype(dtype)  # rounds once, 64-bit integers too
        values = stored.astype(np.float64)
        if scale != PLAIN:
            values = scale.factor * values + scale.bias
        if dtype.kind not in "iu":
            return values.astype(dtype)
        if target != PLAIN:
            values = (values - target.bias) / target.factor
        return _saturated(np.rint(values), dtype)


def _saturated(values: Array, dtype: np.dtype[Any]) -> Array:
    limits = np.iinfo(dtype)
    low, beyond = float(limits.min), float(limits.max) + 1.0  # both exact: the latter is a power of two
    result = np.zeros(values.shape, dtype)
    inside = (values >= low) & (values < beyond)
    result[inside] = values[inside].astype(dtype)
    result[values < low] = limits.min
    result[values >= beyond] = limits.max
    return result
