"""Nearest neighbours of samples, by Euclidean distance.

Distances are computed from differences in float64, not from products, so samples far from the origin lose no digits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _constants as c
from ._arguments import checked_object
from ._direct import Parameters
from ._failure import Invalid, Unsupported, status
from ._filter import checked_parameters
from ._memory import Arena, Array, as_signed, as_size, check_disjoint, check_writable, dtype_of, geometry_of, view_of
from ._names import constant_name
from ._topk import smallest

_Indices: TypeAlias = npt.NDArray[np.int64]
_TYPES: Final = (c.BNNSDataTypeFloat32, c.BNNSDataTypeFloat16)
_UINT32_MAX: Final = 2**32 - 1
_INT32: Final = np.iinfo(np.int32)
_DIFFERENCES: Final = 1 << 16  # that are computed at a time, so that they stay in cache: half a megabyte
_DISTANCES: Final = 1 << 20  # that are compared at a time: eight megabytes
# Squares of distances are compared as the integers with their bits, which are in the same order. Special ones:
_ITSELF: Final = -1
_MISSING: Final = np.iinfo(np.int64).max
_NAN: Final = _MISSING - 1


class BNNSNearestNeighbors:
    """Samples, and how many of their neighbours are wanted. Opaque: use it only through the BNNS functions.

    Threads may share one: a call has it to itself.
    """

    def __init__(
        self, max_n_samples: object, n_features: object, n_neighbors: object, data_type: object, filter_params: object
    ) -> None:
        given = {"max_n_samples": max_n_samples, "n_features": n_features, "n_neighbors": n_neighbors}
        sizes = {name: _unsigned(name, value) for name, value in given.items()}
        for name, value in sizes.items():
            if value == 0:
                raise Invalid(f"{name} is 0, must be at least 1")
        self.capacity, self.features, self.neighbors = sizes.values()
        if self.capacity > _INT32.max:
            most = f"{_INT32.max}: indices are of type int"
            raise Unsupported(f"max_n_samples is {self.capacity}, must be at most {most}")
        if not isinstance(data_type, int) or data_type not in _TYPES:
            shown = constant_name("BNNSDataType", data_type)
            raise Unsupported(f"data_type is {shown}; it must be Float32 or Float16")
        parameters = checked_parameters(filter_params)
        self.data_type, self.dtype = data_type, dtype_of(data_type)
        self.arena = Arena(parameters.alloc_memory, parameters.free_memory)
        self.lock = threading.Lock()
        self.destroyed = False
        self.count = 0  # samples that are loaded
        self._memory: Array | None = None  # grows with them

    def _check_alive(self) -> None:
        if self.destroyed:
            raise Invalid("knn has been destroyed")

    def rows(self, name: str, count: int, width: int, data: object, data_type: int) -> Array:
        """A contiguous array [count, width] over the client's memory."""
        layout = c.BNNSDataLayoutRowMajorMatrix
        return view_of(geometry_of(layout, (width, count), (0, 0), data_type), data, name)

    def load(self, number: object, data: object) -> None:
        """Append samples."""
        self._check_alive()
        new = _unsigned("n_new_samples", number)
        if self.count + new > self.capacity:
            raise Invalid(
                f"n_new_samples is {new}, but with {self.count} samples loaded there is room for "
                f"{self.capacity - self.count} of max_n_samples, which is {self.capacity}"
            )
        if new == 0:
            return
        samples = self.rows("data_ptr", new, self.features, data, self.data_type)
        needed = self.count + new
        if self._memory is None or len(self._memory) < needed:
            room = min(self.capacity, max(needed, 2 * self.count))
            memory = self.arena.allocate((room, self.features), self.dtype)
            if self._memory is not None:
                memory[: self.count] = self._memory[: self.count]
            self.arena.free(self._memory)
            self._memory = memory
        self._memory[self.count : needed] = samples
        self.count = needed

    def find(self, number: object, indices: object, distances: object) -> None:
        """Write the neighbours of one sample, or of all."""
        self._check_alive()
        sample = as_signed("sample_number", number, 32)
        if sample >= self.count:
            raise Invalid(f"sample_number is {sample}, but {self.count} samples are loaded")
        queries = np.arange(self.count) if sample < 0 else np.array([sample])
        if not queries.size:
            return
        results: dict[str, Array] = {}
        given = {"indices": (indices, c.BNNSDataTypeInt32), "distances": (distances, self.data_type)}
        for name, (data, data_type) in given.items():
            if data is not None:
                results[name] = self.rows(name, len(queries), self.neighbors, data, data_type)
                check_writable(name, results[name])
        check_disjoint(results, {})
        if not results:
            return
        wanted = min(self.neighbors, self.count)
        width = min(self.count, _DISTANCES)
        for part in _ranges(len(queries), _DISTANCES // width):
            keys, at = self._nearest(queries[part], wanted, width)
            if "indices" in results:
                results["indices"][part, :wanted] = at
                results["indices"][part, wanted:] = -1
            if "distances" in results:
                with np.errstate(all="ignore"):
                    results["distances"][part, :wanted] = np.sqrt(_squares(keys))
                results["distances"][part, wanted:] = np.inf

    def _nearest(self, queries: _Indices, wanted: int, width: int) -> tuple[Array, Array]:
        """Keys and indices of the nearest samples of each query, in ascending order.

        `width` samples are compared at a time.
        """
        keys = np.full((len(queries), wanted), _MISSING)
        at = np.full((len(queries), wanted), -1)
        for block in _ranges(self.count, width):
            found = self._keys(queries, block)
            (here,) = np.nonzero((queries >= block.start) & (queries < block.stop))
            found[here, queries[here] - block.start] = _ITSELF
            # What was found before comes first, so of equal distances the lowest index stays.
            both = np.concatenate([keys, found], axis=1)
            chosen = smallest(both, wanted)
            keys = np.take_along_axis(both, chosen, 1)
            before = np.take_along_axis(at, np.minimum(chosen, wanted - 1), 1)
            at = np.where(chosen < wanted, before, block.start + chosen - wanted)
        return keys, at

    def _keys(self, queries: _Indices, block: slice) -> Array:
        """Squares of the distances [queries, samples of the block], as integers in the same order; NaN is the last."""
        assert self._memory is not None  # there is a sample
        squares = np.empty((len(queries), block.stop - block.start))
        samples = self._memory[block]
        rows = max(1, _DIFFERENCES // self.features)
        for part in _ranges(len(samples), rows):
            wide = samples[part].astype(np.float64)
            for some in _ranges(len(queries), max(1, _DIFFERENCES // wide.size)):
                with np.errstate(all="ignore"):
                    differences = wide - self._memory[queries[some], None].astype(np.float64)
                    squares[some, part] = np.einsum("qsf,qsf->qs", differences, differences)
        keys: Array = squares.view(np.int64)
        keys[np.isnan(squares)] = _NAN
        return keys

    def destroy(self) -> None:
        """Free all memory. Later calls fail."""
        self.arena.free_all()
        self._memory, self.count, self.destroyed = None, 0, True


def _ranges(length: int, step: int) -> Iterator[slice]:
    return (slice(first, min(first + step, length)) for first in range(0, length, step))


def _squares(keys: Array) -> Array:
    """The squares of the distances of these keys."""
    squares: Array = keys.copy().view(np.float64)
    for key, square in ((_ITSELF, 0.0), (_NAN, np.nan), (_MISSING, np.inf)):
        squares[keys == key] = square
    return squares


def _unsigned(name: str, value: object) -> int:
    number = as_size(name, value)
    if number > _UINT32_MAX:
        raise Invalid(f"{name} is {number}, which an unsigned int cannot hold")
    return number


@contextmanager
def _held(knn: object) -> Iterator[BNNSNearestNeighbors]:
    """The object, which no other call uses meanwhile."""
    checked = checked_object("knn", BNNSNearestNeighbors, knn)
    with checked.lock:
        yield checked


# ---- Apple's functions ----------------------------------------------------------------------------------------------


@status(None)
def BNNSCreateNearestNeighbors(
    max_n_samples: int, n_features: int, n_neighbors: int, data_type: int, filter_params: Parameters = None
) -> BNNSNearestNeighbors | None:
    """Create an object that finds the `n_neighbors` nearest of at most `max_n_samples` samples. None on failure."""
    return BNNSNearestNeighbors(max_n_samples, n_features, n_neighbors, data_type, filter_params)


@status(None, clears=False)
def BNNSDestroyNearestNeighbors(knn: BNNSNearestNeighbors | None) -> None:
    """Release an object and its samples. None and objects that have already been destroyed are accepted."""
    if knn is not None:
        with _held(knn) as held:
            held.destroy()


@status(-1)
def BNNSNearestNeighborsLoad(knn: BNNSNearestNeighbors | None, n_new_samples: int, data_ptr: object) -> int:
    """Append samples, which are contiguous and of the object's type. More than fit are refused. 0, or -1 on failure."""
    with _held(knn) as held:
        held.load(n_new_samples, data_ptr)
    return 0


@status(-1)
def BNNSNearestNeighborsGetInfo(
    knn: BNNSNearestNeighbors | None, sample_number: int, indices: object, distances: object
) -> int:
    """Write the indices (int) and distances of the nearest neighbours of a sample, ascending. 0, or -1 on failure.

    The sample itself comes first, with distance 0; of equal distances the lowest index. A negative `sample_number`
    means all samples, one row for each. If there are too few samples, the rest are -1 and infinity. `indices` and
    `distances` may be None.
    """
    with _held(knn) as held:
        held.find(sample_number, indices, distances)
    return 0
