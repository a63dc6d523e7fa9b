"""Copies of arrays: to another type, and with two axes exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import _constants as c
from ._conversion import converted, scale_of
from ._failure import Invalid, Unsupported, status
from ._filter import check_same_type, checked_descriptor, checked_parameters, viewed
from ._layer import logical, output_geometry, typed_geometry
from ._memory import Array, Geometry, as_size, check_disjoint, check_writable, listed
from ._names import constant_name
from ._sample_map import ANY_TYPE
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor


def source_of(
    name: str, descriptor: Any, types: tuple[int, ...] = ANY_TYPE, order: Callable[..., Array] = logical
) -> tuple[Array, Geometry]:
    """An array that a call reads, with its axes in the order of ``size``, or rows first."""
    geometry = typed_geometry(name, checked_descriptor(name, descriptor), types)
    return order(viewed(name, descriptor), geometry.layout, batched=False), geometry


def target_of(
    name: str, descriptor: Any, types: tuple[int, ...] = ANY_TYPE, order: Callable[..., Array] = logical
) -> tuple[Array, Geometry]:
    """An array that a call writes, with its axes in the order of ``size``, or rows first."""
    geometry = output_geometry(name, checked_descriptor(name, descriptor), types)
    view = viewed(name, descriptor)
    check_writable(f"{name}.data", view)
    return order(view, geometry.layout, batched=False), geometry


def check_unrotated(name: str, geometry: Geometry) -> None:
    """Raise for weights whose kernels are stored backwards: an index does not say which element is meant."""
    if geometry.layout in (c.BNNSDataLayoutConvolutionWeightsOIHrWr, c.BNNSDataLayoutConvolutionWeightsIOHrWr):
        shown = constant_name("BNNSDataLayout", geometry.layout)
        raise Unsupported(f"{name}.layout is {shown}; kernels must not be rotated")


def size_in_order(geometry: Geometry) -> tuple[int, ...]:
    """The descriptor's ``size``."""
    return listed(geometry.layout, geometry.extents)


@status(-1)
def BNNSCopy(
    dest: BNNSNDArrayDescriptor, src: BNNSNDArrayDescriptor, filter_params: BNNSFilterParameters | None = None
) -> int:
    """Copy an array to one of the same size, converting its type. 0, or -1 on failure.

    Integers are rounded half to even and saturate; ``data_scale`` and ``data_bias`` of their descriptors apply.
    """
    checked_parameters(filter_params)
    source, geometry = source_of("src", src)
    target, wanted = target_of("dest", dest)
    if size_in_order(geometry) != size_in_order(wanted):
        raise Invalid(f"dest.size is {size_in_order(wanted)}, expected {size_in_order(geometry)} as in src")
    check_disjoint({"dest": target}, {"src": source})
    scales = scale_of("src", src), scale_of("dest", dest)
    if source.dtype == target.dtype and scales[0] == scales[1]:
        target[...] = source
    else:
        target[...] = converted(source, scales[0], target.dtype, scales[1])
    return 0


@status(-1)
def BNNSTranspose(
    dest: BNNSNDArrayDescriptor,
    src: BNNSNDArrayDescriptor,
    axis0: int,
    axis1: int,
    filter_params: BNNSFilterParameters | None = None,
) -> int:
    """Copy an array with two axes exchanged, which are numbered as ``size`` lists them. 0, or -1 on failure."""
    checked_parameters(filter_params)
    source, geometry = source_of("src", src)
    target, wanted = target_of("dest", dest)
    check_same_type("dest", dest, "src", src)
    for name, axis in (("axis0", axis0), ("axis1", axis1)):
        if as_size(name, axis) >= source.ndim:
            raise Invalid(f"{name} is {axis}, but src has {source.ndim} axes")
    exchanged = np.swapaxes(source, axis0, axis1)
    if exchanged.shape != target.shape:
        raise Invalid(
            f"dest.size is {size_in_order(wanted)}, expected {exchanged.shape} for src.size {size_in_order(geometry)} "
            f"with axes {axis0} and {axis1} exchanged"
        )
    check_disjoint({"dest": target}, {"src": source})
    target[...] = exchanged
    return 0
