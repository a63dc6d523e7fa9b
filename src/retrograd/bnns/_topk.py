"""The largest values along an axis, and whether given ones are among them."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..ops._planned import Planned
from . import _constants as c
from ._arguments import Given as Arguments
from ._arguments import takes
from ._conversion import INTEGERS
from ._direct import Descriptor, Given, Operand, Parameters, as_stored
from ._failure import Invalid
from ._filter import FLOATS, check_extents, check_same_type, checked_batch, checked_descriptor, checked_parameters
from ._memory import Array, as_size, check_disjoint, check_indices, numbered_axes

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


_INDICES: Final = (c.BNNSDataTypeInt32,)
_NUMBERS: Final = Operand("input", (*FLOATS, *INTEGERS), order=as_stored)
_FLOATS: Final = Operand("input", (c.BNNSDataTypeFloat32,), order=as_stored)
_BEST_VALUES: Final = Operand("best_values", _NUMBERS.types, written=True, order=as_stored)
_BEST_INDICES: Final = Operand("best_indices", _INDICES, written=True, order=as_stored)
_TEST_INDICES: Final = Operand("test_indices", _INDICES, rotated=True, order=as_stored)
_OUTPUT: Final = Operand("output", (c.BNNSDataTypeBoolean,), written=True, order=as_stored)


class _Input:
    """The input of a call, and the axis along which values are compared."""

    def __init__(self, operand: Operand, arguments: Arguments) -> None:
        self.batch = checked_batch(arguments["batch_size"])
        self.geometry = geometry = operand.geometry(checked_descriptor("input", arguments["input"]))
        self.axis, rank = as_size("axis", arguments["axis"]), len(geometry.extents)
        if self.axis >= rank:
            raise Invalid(f"axis is {self.axis}, but input has {rank} axes")
        # In an array with its slowest axis first.
        self.position = numbered_axes(geometry.layout)[self.axis]
        self.extent, self.count = geometry.shape[self.position], as_size("K", arguments["K"])
        if not 1 <= self.count <= self.extent:
            extent = f"{self.extent}, the extent of axis {self.axis} of input"
            raise Invalid(f"K is {self.count}, must be from 1 to {extent}")
        self.values = self._samples(operand, arguments).array

    def _samples(self, operand: Operand, arguments: Arguments) -> Given:
        stride = f"{operand.name}_batch_stride"
        return operand.samples(arguments[operand.name], self.batch, arguments[stride], stride)

    def rows(self) -> Array:
        """The values with the axis last, ``[..., extent]``."""
        return np.moveaxis(self.values, 1 + self.position, -1)

    def keys(self) -> Array:
        """One row of keys for each row of values, ``[rows, extent]``, in descending order of the values."""
        return np.ascontiguousarray(_descending(self.rows())).reshape(-1, self.extent)

    def other(self, operand: Operand, arguments: Arguments, count: int | None) -> Given:
        """Another operand, with the extents of the input and `count` along the axis; None leaves it out."""
        geometry = operand.geometry(checked_descriptor(operand.name, arguments[operand.name]))
        shape = list(self.geometry.shape)
        shape[self.position : self.position + 1] = [] if count is None else [count]
        which = f"of input without axis {self.axis}" if count is None else f"of input, with K along axis {self.axis}"
        check_extents(operand.name, geometry, tuple(reversed(shape)), which)
        return self._samples(operand, arguments)


# What a plan depends on.
_PLANNED: Final = (
    *("input", "best_values", "best_indices", "K", "axis", "batch_size"),
    *("input_batch_stride", "best_values_batch_stride", "best_indices_batch_stride"),
)


@Planned
def _top(*planned: object) -> tuple[_Input, list[Given]]:
    """The input of a call, and its results."""
    arguments: Arguments = dict(zip(_PLANNED, planned, strict=True))
    given = _Input(_NUMBERS, arguments)
    results = [given.other(_BEST_VALUES, arguments, given.count)]
    check_same_type("best_values", arguments["best_values"], "input", arguments["input"])
    if arguments["best_indices"] is not None:
        if given.extent - 1 > _INT32.max:
            raise Invalid(f"axis {given.axis} of input has {given.extent} elements, more than Int32 can index")
        results.append(given.other(_BEST_INDICES, arguments, given.count))
    check_disjoint({result.name: result.array for result in results}, {})
    return given, results


_TYPES: Final = {
    **dict.fromkeys(("K", "axis", "batch_size"), int),
    **dict.fromkeys(("input", "best_values", "test_indices", "output"), Descriptor),
    "best_indices": Descriptor | None,
    "filter_params": Parameters,
}


@takes(
    "K axis batch_size input input_batch_stride best_values best_values_batch_stride best_indices "
    "best_indices_batch_stride filter_params=None",
    _TYPES,
)
def BNNSDirectApplyTopK(arguments: Arguments) -> None:
    """Find the `K` largest values along an axis, in descending order, and their indices. 0, or -1 on failure.

    Of equal values the one with the lowest index comes first. NaN is larger than all numbers. `best_indices`, of type
    Int32, may be None. Axis k is that of ``size[k]``; in a row-major matrix axis 0 is that of the rows.
    """
    checked_parameters(arguments["filter_params"])
    given, results = _top(*(arguments[name] for name in _PLANNED))
    rows = given.rows()
    at = smallest(given.keys(), given.count).reshape(*rows.shape[:-1], given.count)
    for result, found in zip(results, (np.take_along_axis(rows, at, -1), at), strict=False):
        result.fill(np.moveaxis(found, -1, 1 + given.position))


@takes(
    "K axis batch_size input input_batch_stride test_indices test_indices_batch_stride output output_batch_stride "
    "filter_params=None",
    _TYPES,
)
def BNNSDirectApplyInTopK(arguments: Arguments) -> None:
    """Whether the values at `test_indices` are among the `K` largest along an axis. 0, or -1 on failure.

    A value is among them if fewer than `K` are larger, so with ties more than `K` may be. `test_indices`, of type
    Int32, and `output`, of type Boolean, have the extents of `input` without the axis. NaN is larger than all numbers.
    """
    checked_parameters(arguments["filter_params"])
    given = _Input(_FLOATS, arguments)
    indices = given.other(_TEST_INDICES, arguments, None).array
    target = given.other(_OUTPUT, arguments, None)
    check_indices("test_indices", indices, given.extent, f"axis {given.axis} of input has {given.extent} elements")
    keys = given.keys()
    tested = np.take_along_axis(keys, indices.reshape(-1, 1), -1)
    target.fill(np.count_nonzero(keys < tested, axis=-1) < given.count)
