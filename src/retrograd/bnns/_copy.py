"""Copies of arrays: to another type, and with two axes exchanged."""

from __future__ import annotations

from typing import Final

import numpy as np

from ._conversion import converted, scale_of
from ._direct import Descriptor, Operand, Operands, Parameters
from ._failure import Invalid, status
from ._filter import checked_parameters
from ._memory import as_size

_COPY: Final = Operands(Operand("src", rotated=True), Operand("dest", written=True, rotated=True), disjoint=True)
_TRANSPOSE: Final = Operands(
    Operand("src", rotated=True), Operand("dest", like="src", written=True, rotated=True), disjoint=True
)


@status(-1)
def BNNSCopy(dest: Descriptor, src: Descriptor, filter_params: Parameters = None) -> int:
    """Copy an array to one of the same size, converting its type. 0, or -1 on failure.

    Integers are rounded half to even and saturate; ``data_scale`` and ``data_bias`` of their descriptors apply.
    """
    checked_parameters(filter_params)
    source, target = _COPY(src, dest)
    target.check_size(source)
    scales = scale_of("src", src), scale_of("dest", dest)
    values = source.array
    if values.dtype != target.array.dtype or scales[0] != scales[1]:
        values = converted(values, scales[0], target.array.dtype, scales[1])
    target.array[...] = values
    return 0


@status(-1)
def BNNSTranspose(dest: Descriptor, src: Descriptor, axis0: int, axis1: int, filter_params: Parameters = None) -> int:
    """Copy an array with two axes exchanged, which are numbered as ``size`` lists them. 0, or -1 on failure."""
    checked_parameters(filter_params)
    source, target = _TRANSPOSE(src, dest)
    for name, axis in (("axis0", axis0), ("axis1", axis1)):
        if as_size(name, axis) >= source.array.ndim:
            raise Invalid(f"{name} is {axis}, but src has {source.array.ndim} axes")
    exchanged = np.swapaxes(source.array, axis0, axis1)
    if exchanged.shape != target.size:
        raise Invalid(
            f"dest.size is {target.size}, expected {exchanged.shape} for src.size {source.size} "
            f"with axes {axis0} and {axis1} exchanged"
        )
    target.array[...] = exchanged
    return 0
