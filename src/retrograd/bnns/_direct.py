"""Functions without a filter: each declares its operands, and gets its descriptors as arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ..ops._planned import Planned
from . import _constants as c
from . import _filter
from ._failure import Invalid, Unsupported
from ._filter import check_same_type, checked_descriptor, source_samples, target_samples, viewed
from ._layer import logical
from ._memory import Array, Geometry, check_disjoint, check_writable
from ._names import layout_name
from ._sample_map import ANY_TYPE
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor

Descriptor: TypeAlias = BNNSNDArrayDescriptor
Parameters: TypeAlias = BNNSFilterParameters | None
_Order: TypeAlias = Callable[[Array, int, bool], Array]
_ROTATED: Final = (c.BNNSDataLayoutConvolutionWeightsOIHrWr, c.BNNSDataLayoutConvolutionWeightsIOHrWr)


def check_unrotated(name: str, geometry: Geometry) -> None:
    """Raise for weights whose kernels are stored backwards: an index does not say which element is meant."""
    if geometry.layout in _ROTATED:
        raise Unsupported(f"{name}.layout is {layout_name(geometry.layout)}; kernels must not be rotated")


def as_stored(array: Array, layout: int, batched: bool) -> Array:
    """The order of axes in memory: the slowest first."""
    return array


class Given(NamedTuple):
    """An operand of a call. A plan keeps it in its descriptor, to which it therefore has no reference."""

    name: str
    geometry: Geometry
    array: Array  # with its axes in the declared order

    @property
    def size(self) -> tuple[int, ...]:
        """The descriptor's ``size``."""
        return self.geometry.size

    def check_size(self, like: Given) -> None:
        """Raise unless both have the same ``size``."""
        if self.size != like.size:
            raise Invalid(f"{self.name}.size is {self.size}, expected {like.size} as in {like.name}")

    def fill(self, values: Array) -> None:
        """Write new values, in the order of the array, rounded to its type."""
        with np.errstate(all="ignore"):
            self.array[...] = values.astype(self.array.dtype).reshape(self.array.shape)


class Operand(NamedTuple):
    """The declaration of an argument that is a descriptor."""

    name: str
    types: tuple[int, ...] = ANY_TYPE
    like: str = ""  # the operand whose type it has
    written: bool = False  # no two elements may share memory
    rotated: bool = False  # kernels may be stored backwards
    order: _Order = logical  # of the array's axes
    kind: str = ""  # what messages call the types; "": their names

    def geometry(self, descriptor: BNNSNDArrayDescriptor) -> Geometry:
        check = _filter.output_geometry if self.written else _filter.typed_geometry
        geometry = check(self.name, descriptor, self.types, self.kind)
        if not self.rotated:
            check_unrotated(self.name, geometry)
        return geometry

    def read(self, descriptor: BNNSNDArrayDescriptor) -> Given:
        """The operand of a call without a batch."""
        geometry = self.geometry(descriptor)
        view = viewed(self.name, descriptor)
        if self.written:
            check_writable(f"{self.name}.data", view)
        return Given(self.name, geometry, self.order(view, geometry.layout, False))

    def samples(self, given: object, batch: int, stride: object, stride_name: str) -> Given:
        """The operand of a call with a batch, as ``[batch, ...]``."""
        descriptor = checked_descriptor(self.name, given)
        geometry = self.geometry(descriptor)
        samples = target_samples if self.written else source_samples
        array = samples(self.name, geometry, descriptor.data, batch, stride, ".data", stride_name)
        return Given(self.name, geometry, self.order(array, geometry.layout, True))


class Operands:
    """The operands of a function: its descriptors as arrays, cached until one of them changes."""

    def __init__(self, *declared: Operand, disjoint: bool = False) -> None:
        """`disjoint`: results must not overlap what is read. Otherwise they are computed before they are written."""
        self._declared, self._disjoint = declared, disjoint
        self._planned = Planned(self._read)

    def __call__(self, *descriptors: object) -> tuple[Given, ...]:
        return self._planned(*descriptors)

    def _read(self, *descriptors: object) -> tuple[Given, ...]:
        given = {one.name: checked_descriptor(one.name, d) for one, d in zip(self._declared, descriptors, strict=True)}
        found = {one.name: one.read(given[one.name]) for one in self._declared}
        for one in self._declared:
            if one.like:
                check_same_type(one.name, given[one.name], one.like, given[one.like])
        if self._disjoint:
            written = {one.name for one in self._declared if one.written}
            arrays = {name: one.array for name, one in found.items()}
            check_disjoint(
                {name: array for name, array in arrays.items() if name in written},
                {name: array for name, array in arrays.items() if name not in written},
            )
        return tuple(found.values())


def floating(name: str, written: bool = False, like: str = "") -> Operand:
    """A floating-point operand with its slowest axis first."""
    return Operand(name, _filter.FLOATS, like, written, True, as_stored, _filter.FLOATING)
