"""Swift's objects that are not layers: nearest neighbours and random generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import bnns as c
from ._memory import data_type_of
from ._names import constant_name
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import BNNSError, check_data, checked_call, checked_geometry, made, public
from ._swift_values import RandomGeneratorMethod


@public
class NearestNeighbors:
    """Samples of `dimensionCount` numbers each, of which the `neighborCount` nearest are found."""

    def __init__(self, *, capacity: int, dimensionCount: int, neighborCount: int, dataType: int) -> None:
        self._knn = made(c.BNNSCreateNearestNeighbors, capacity, dimensionCount, neighborCount, dataType)

    def append(self, *, samples: BNNSNDArrayDescriptor) -> None:
        """Add samples, which are contiguous: the fastest axis, or several, are those of a sample."""
        check_data(samples=samples)
        elements = self._elements("samples", samples, self._knn.data_type)
        count, rest = divmod(elements, self._knn.features)
        if rest:
            reason = f"which is not a multiple of dimensionCount, {self._knn.features}"
            raise BNNSError("layerApplyFail", f"samples has {elements} elements, {reason}")
        checked_call(c.BNNSNearestNeighborsLoad, self._knn, count, samples.data)

    def apply(
        self, *, index: int | None, outputIndices: BNNSNDArrayDescriptor, outputDistances: BNNSNDArrayDescriptor
    ) -> None:
        """Find the neighbours of a sample, or of all if `index` is None: a row of `neighborCount` for each."""
        check_data(outputIndices=outputIndices, outputDistances=outputDistances)
        if index is not None and index < 0:
            raise BNNSError("layerApplyFail", f"index is {index}, must be at least 0")
        expected = self._knn.neighbors * (self._knn.count if index is None else 1)
        indices = ("outputIndices", outputIndices, c.BNNSDataTypeInt32)
        for name, array, data_type in (indices, ("outputDistances", outputDistances, self._knn.data_type)):
            elements = self._elements(name, array, data_type)
            if elements != expected:
                raise BNNSError("layerApplyFail", f"{name} has {elements} elements, expected {expected}")
        number = -1 if index is None else index
        checked_call(c.BNNSNearestNeighborsGetInfo, self._knn, number, outputIndices.data, outputDistances.data)

    @staticmethod
    def _elements(name: str, descriptor: BNNSNDArrayDescriptor, data_type: int) -> int:
        """The number of elements of an array, which must be contiguous and of this type."""
        geometry = checked_geometry(name, descriptor)
        if data_type_of(geometry.dtype) != data_type:
            shown = [constant_name("BNNSDataType", one) for one in (data_type_of(geometry.dtype), data_type)]
            raise BNNSError("layerApplyFail", f"{name} has elements of {shown[0]}, must have {shown[1]}")
        if not geometry.dense:
            raise BNNSError("layerApplyFail", f"{name} has stride {geometry.strides}, must be contiguous")
        return geometry.elements


@public
class RandomGenerator:
    """A random generator, with a random seed if none is given."""

    def __init__(
        self,
        *,
        method: RandomGeneratorMethod,
        seed: int | None = None,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        if seed is None:
            self.bnnsRandomGenerator = made(c.BNNSCreateRandomGenerator, method.value, filterParameters)
        else:
            self.bnnsRandomGenerator = made(c.BNNSCreateRandomGeneratorWithSeed, method.value, seed, filterParameters)

    @property
    def state(self) -> bytes:
        """What the generator continues from. Setting it makes this one continue as another did."""
        state = bytearray(c.BNNSRandomGeneratorStateSize(self.bnnsRandomGenerator))
        checked_call(c.BNNSRandomGeneratorGetState, self.bnnsRandomGenerator, len(state), state)
        return bytes(state)

    @state.setter
    def state(self, state: bytes) -> None:
        checked_call(c.BNNSRandomGeneratorSetState, self.bnnsRandomGenerator, len(state), state)

    def fill(self, function: Callable[..., int], *arguments: Any) -> None:
        """Call a C function that fills an array; raise if it fails."""
        checked_call(function, self.bnnsRandomGenerator, *arguments)
