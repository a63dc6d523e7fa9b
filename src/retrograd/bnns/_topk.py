"""The largest values along an axis, and whether given ones are among them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from . import _constants as c
from ._conversion import INTEGERS
from ._copy import check_unrotated
from ._failure import Invalid, status
from ._filter import (
    FLOATS,
    check_extents,
    check_same_type,
    checked_batch,
    checked_descriptor,
    checked_parameters,
    put,
    source_samples,
    target_samples,
)
from ._layer import output_geometry, typed_geometry
from ._memory import Array, Geometry, as_size, check_disjoint, check_indices, numbered_axes
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor

_INT32: Final = np.iinfo(np.int32)
_BLOCK: Final = 1 << 18  # keys that are compared at a time, so that what is computed from them stays in cache


def smallest(keys: Array, count: int) -> Array:
    """Positions of the `count` smallest keys of each row, in ascending order; of equal keys those at the front."""
    rows, width = keys.shape
    found = np.empty((rows, count), np.int64)
    step = max(1, _BLOCK // width)
    for first in range(0, rows, step):
        part = keys[first : first + step]
        border = np.partition(part, count - 1, axis=-1)[:, count - 1 : count]
        taken = part <= border
        (tied,) = np.nonzero(np.count_nonzero(taken, axis=-1) > count)  # rows with too many keys like the last one
        if tied.size:
            equal = part[tied] == border[tied]
            left = count - np.count_nonzero(part[tied] < border[tied], axis=-1, keepdims=True)
            taken[tied] &= ~equal | (equal.cumsum(axis=-1) <= left)
        at = np.flatnonzero(taken).reshape(-1, count) % width
        order = np.argsort(np.take_along_axis(part, at, -1), axis=-1, kind="stable")
        found[first : first + step] = np.take_along_axis(at, order, -1)
    return found


def _descending(values: Array) -> Array:
    """Integers in the opposite order of the values. NaN is larger than all numbers; 0 and -0 are equal."""
    if values.dtype.kind in "iu":
        return np.asarray(~values)
    with np.errstate(all="ignore"):
        wide = values.astype(np.float32) + np.float32(0)  # -0 becomes 0
    bits = wide.view(np.int32)
    # The bits of negative numbers are in the opposite order.
    ascending = np.where(bits < 0, bits ^ np.int32(_INT32.max), bits)
    ascending[np.isnan(wide)] = _INT32.max
    return np.asarray(~ascending)


class _Input:
    """The input of a call, and the axis along which values are compared."""

    def __init__(
        self, K: Any, axis: Any, batch: int, descriptor: Any, stride: Any, types: tuple[int, ...], parameters: Any
    ) -> None:
        checked_parameters(parameters)
        self.geometry = typed_geometry("input", checked_descriptor("input", descriptor), types)
        check_unrotated("input", self.geometry)
        rank = len(self.geometry.extents)
        self.axis = as_size("axis", axis)
        if self.axis >= rank:
            raise Invalid(f"axis is {self.axis}, but input has {rank} axes")
        # In an array with its slowest axis first.
        self.position = numbered_axes(self.geometry.layout)[self.axis]
        self.extent = self.geometry.shape[self.position]
        self.count = as_size("K", K)
        if not 1 <= self.count <= self.extent:
            raise Invalid(
                f"K is {self.count}, must be from 1 to {self.extent}, the extent of axis {self.axis} of input"
            )
        self.values = source_samples(
            "input", self.geometry, descriptor.data, batch, stride, ".data", "input_batch_stride"
        )

    def rows(self) -> Array:
        """The values with the axis last, ``[..., extent]``."""
        return np.moveaxis(self.values, 1 + self.position, -1)

    def keys(self) -> Array:
        """One row of keys for each row of values, ``[rows, extent]``, in descending order of the values."""
        return np.ascontiguousarray(_descending(self.rows())).reshape(-1, self.extent)

    def extents(self, count: int | None) -> tuple[int, ...]:
        """Those of the input, fastest first, with `count` along the axis; None leaves it out."""
        shape = list(self.geometry.shape)
        shape[self.position : self.position + 1] = [] if count is None else [count]
        return tuple(reversed(shape))


def _checked(name: str, descriptor: Any, types: tuple[int, ...], expected: tuple[int, ...], which: str) -> Geometry:
    """The geometry of an array of these extents that a call writes."""
    geometry = output_geometry(name, checked_descriptor(name, descriptor), types)
    check_extents(name, geometry, expected, which)
    check_unrotated(name, geometry)
    return geometry


@status(-1)
def BNNSDirectApplyTopK(
    K: int,
    axis: int,
    batch_size: int,
    input: BNNSNDArrayDescriptor,
    input_batch_stride: int,
    best_values: BNNSNDArrayDescriptor,
    best_values_batch_stride: int,
    best_indices: BNNSNDArrayDescriptor | None,
    best_indices_batch_stride: int,
    filter_params: BNNSFilterParameters | None = None,
) -> int:
    """Find the `K` largest values along an axis, in descending order, and their indices. 0, or -1 on failure.

    Of equal values the one with the lowest index comes first. NaN is larger than all numbers. `best_indices`, of type
    Int32, may be None. Axis k is that of ``size[k]``; in a row-major matrix axis 0 is that of the rows.
    """
    batch = checked_batch(batch_size)
    given = _Input(K, axis, batch, input, input_batch_stride, (*FLOATS, *INTEGERS), filter_params)
    extents, which = given.extents(given.count), f"of input, with K along axis {given.axis}"
    geometry = _checked("best_values", best_values, (*FLOATS, *INTEGERS), extents, which)
    check_same_type("best_values", best_values, "input", input)
    results = {
        "best_values": target_samples(
            "best_values", geometry, best_values.data, batch, best_values_batch_stride, ".data",
            "best_values_batch_stride",
        )
    }  # fmt: skip
    if best_indices is not None:
        if given.extent - 1 > _INT32.max:
            raise Invalid(f"axis {given.axis} of input has {given.extent} elements, more than Int32 can index")
        geometry = _checked("best_indices", best_indices, (c.BNNSDataTypeInt32,), extents, which)
        results["best_indices"] = target_samples(
            "best_indices", geometry, best_indices.data, batch, best_indices_batch_stride, ".data",
            "best_indices_batch_stride",
        )  # fmt: skip
    check_disjoint(results, {})
    rows = given.rows()
    at = smallest(given.keys(), given.count).reshape(*rows.shape[:-1], given.count)
    found = {"best_values": np.take_along_axis(rows, at, -1), "best_indices": at}
    for name, target in results.items():
        put(target, np.moveaxis(found[name], -1, 1 + given.position).reshape(target.shape), False)
    return 0


@status(-1)
def BNNSDirectApplyInTopK(
    K: int,
    axis: int,
    batch_size: int,
    input: BNNSNDArrayDescriptor,
    input_batch_stride: int,
    test_indices: BNNSNDArrayDescriptor,
    test_indices_batch_stride: int,
    output: BNNSNDArrayDescriptor,
    output_batch_stride: int,
    filter_params: BNNSFilterParameters | None = None,
) -> int:
    """Whether the values at `test_indices` are among the `K` largest along an axis. 0, or -1 on failure.

    A value is among them if fewer than `K` are larger, so with ties more than `K` may be. `test_indices`, of type
    Int32, and `output`, of type Boolean, have the extents of `input` without the axis. NaN is larger than all numbers.
    """
    batch = checked_batch(batch_size)
    given = _Input(K, axis, batch, input, input_batch_stride, (c.BNNSDataTypeFloat32,), filter_params)
    extents, which = given.extents(None), f"of input without axis {given.axis}"
    test = typed_geometry("test_indices", checked_descriptor("test_indices", test_indices), (c.BNNSDataTypeInt32,))
    check_extents("test_indices", test, extents, which)
    indices = source_samples(
        "test_indices", test, test_indices.data, batch, test_indices_batch_stride, ".data", "test_indices_batch_stride"
    )
    geometry = _checked("output", output, (c.BNNSDataTypeBoolean,), extents, which)
    target = target_samples("output", geometry, output.data, batch, output_batch_stride, ".data", "output_batch_stride")
    check_indices("test_indices", indices, given.extent, f"axis {given.axis} of input has {given.extent} elements")
    keys = given.keys()
    tested = np.take_along_axis(keys, indices.reshape(-1, 1), -1)
    inside = np.count_nonzero(keys < tested, axis=-1) < given.count
    put(target, inside.reshape(target.shape), False)
    return 0
