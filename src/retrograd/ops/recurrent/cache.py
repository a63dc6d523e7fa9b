"""The cache: what backward needs from a forward pass."""

from __future__ import annotations

import itertools
import secrets
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .. import _args, _memory
from .._buffers import opaque
from .._call import Reason, Refusal, public, raise_unexplained
from .._errors import ArgumentTypeError, ArgumentValueError
from .._types import BYTE, Array
from .problem import Inputs, Problem, as_state, new_inputs, run_forward
from .types import Buffer, Cell, Weights
from .weights import as_cells

_STAMP: Final = struct.Struct("<16xQ")  # in the engine's header, past a magic number and a fingerprint of the problem
STAMPS: Final = itertools.count(secrets.randbits(62))  # unique for every forward pass of a process


class LstmGates(NamedTuple):
    """Values of the gates and the new cell states, ``[T, N, H]`` each; 0 in the steps where a sample is inactive.

    The cell states are those before zoneout and layer normalization.
    """

    i: Array
    f: Array
    g: Array
    o: Array
    c: Array


class GruGates(NamedTuple):
    """Values of the gates, ``[T, N, H]`` each; 0 in the steps where a sample is inactive."""

    r: Array
    z: Array
    n: Array


class RnnGates(NamedTuple):
    """The new states before zoneout, ``[T, N, H]``; 0 in the steps where a sample is inactive."""

    h: Array


class _Cache(NamedTuple):
    inputs: Inputs
    buffer: Array | None
    stamp: int | None  # of the forward pass that filled the buffer; None: any


class RecurrentCache(_Cache):
    """What backward needs from a forward pass: its inputs, and a buffer with intermediate values. Immutable.

    Without a buffer, backward recomputes it. Treat it as opaque except for `buffer` and the methods.
    """

    __slots__ = ()

    def _gates(self, cell: int) -> list[Array]:
        """Gate values of one cell and, of an LSTM, the new cell states."""
        problem = self.inputs.problem
        index = _args.as_count("cell", cell, least=0)
        if index >= problem.cells:
            raise ArgumentValueError(
                "cell", "{cell} is {}, must be below {}, the number of cells", index, problem.cells
            )
        buffer = self.buffer if self.buffer is not None else recomputed(self, 0)
        gates = len(problem.cell.gates)
        values = _memory.empty((problem.steps, problem.samples, gates, problem.units), problem.dtype)
        states = None
        if problem.cell.has_cells:
            states = _memory.empty((problem.steps, problem.samples, problem.units), problem.dtype)
        check_filled(problem.engine.show(self.inputs, buffer, self.stamp, index, values, states))
        return [*np.moveaxis(values, 2, 0), *([] if states is None else [states])]

    @public
    def with_buffer(self, buffer: Buffer | bytes) -> RecurrentCache:
        """A copy of this cache with another buffer, filled by the same pass elsewhere."""
        return new_cache((self.inputs, as_buffer("buffer", self.inputs, buffer), None))

    def without_arrays(self) -> BareCache:
        """What this cache holds besides the inputs of forward and the buffer, for callers who keep those themselves."""
        problem, _, indices, _, _, _, *others = self.inputs
        return BareCache(problem, indices, tuple(others))

    def gradient_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of ``dx``, ``dh0`` or ``dc0``; None for a state that forward was not given."""
        problem = self.inputs.problem
        if name == "dx":
            return self.inputs.x.shape if self.has_table else problem.x_shape
        if name == "dh0":
            return None if self.inputs.h0 is None else problem.h_shape
        return None if self.inputs.c0 is None else problem.c_shape

    @property
    def size(self) -> int:
        """The size of the buffer in bytes, also if there is none."""
        return self.inputs.problem.cache_bytes(self.inputs.active)

    @property
    def has_table(self) -> bool:
        """Whether forward looked up its inputs in a table. ``dx`` is then the gradient of the table."""
        return self.inputs.indices is not None

    @property
    def cells(self) -> list[Cell]:
        """The parameters of every cell, as forward read them."""
        return self.inputs.cells

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.inputs.problem.dtype

    def refers_to(self, x: Array, weights: Weights) -> bool:
        """Whether the cache refers to these very arrays, rather than to copies of them."""

        def arrays(cells: Any) -> list[Any]:
            parts = [part for cell in cells for part in cell]
            return [array for part in parts for array in (part if isinstance(part, tuple) else (part,))]

        cells, _ = as_cells("weights", weights, self.inputs.problem.cell)
        pairs = zip(arrays(self.inputs.cells), arrays(cells), strict=True)
        return self.inputs.x is x and all(a is b for a, b in pairs)

    def __repr__(self) -> str:
        kept = "recomputes" if self.buffer is None else f"{self.buffer.nbytes} bytes"
        return f"{type(self).__name__}({self.inputs.problem!r}, {kept})"


@opaque
class LstmCache(RecurrentCache):
    """The cache of :func:`lstm_forward`."""

    __slots__ = ()

    @public
    def gates(self, cell: int = 0) -> LstmGates:
        """Gate values and cell states of one cell (layer-major, then direction), time first."""
        return LstmGates(*self._gates(cell))


@opaque
class GruCache(RecurrentCache):
    """The cache of :func:`gru_forward`."""

    __slots__ = ()

    @public
    def gates(self, cell: int = 0) -> GruGates:
        """Gate values of one cell (layer-major, then direction), time first."""
        return GruGates(*self._gates(cell))


@opaque
class RnnCache(RecurrentCache):
    """The cache of :func:`rnn_forward`."""

    __slots__ = ()

    @public
    def gates(self, cell: int = 0) -> RnnGates:
        """The states of one cell (layer-major, then direction), time first."""
        return RnnGates(*self._gates(cell))


CACHES: Final[dict[str, type[RecurrentCache]]] = {"lstm": LstmCache, "gru": GruCache, "rnn": RnnCache}


@opaque
class BareCache(NamedTuple):
    """A cache without the inputs of the forward pass and its buffer."""

    problem: Problem
    indices: Array | None  # into the rows of the table, if forward had one
    others: tuple[Any, ...]  # the last fields of Inputs

    def with_arrays(
        self, x: Array, weights: Sequence[Any], h0: Array | None, c0: Array | None, buffer: Array | None
    ) -> RecurrentCache:
        """The whole cache, from arrays with the values of forward's; `x` is the table if there was one.

        Another pass of the same inputs may have filled the buffer; backward checks that one has. Without a buffer,
        backward recomputes it.
        """
        problem, indices, others = self
        cells: list[Cell] = [weights] if isinstance(weights, problem.cell.weights) else list(weights)
        if len(cells) != problem.cells:
            raise ArgumentValueError("weights", "{weights} has {} cells, but forward had {}", len(cells), problem.cells)
        if indices is None:
            if x.shape != problem.x_shape:
                raise ArgumentValueError("x", "{x} has shape {}, but forward had {}", x.shape, problem.x_shape)
            x = problem.sequence(x)
        if h0 is not None:
            h0 = problem.states(as_state("h0", h0, problem))
        if c0 is not None:
            c0 = problem.states(as_state("c0", c0, problem))
        return new_cache((new_inputs((problem, x, indices, cells, h0, c0, *others)), buffer, None))


def new_cache(fields: tuple[Inputs, Array | None, int | None]) -> RecurrentCache:
    """A cache of the class of its cell. tuple.__new__ takes half the time of the NamedTuple's constructor."""
    return tuple.__new__(CACHES[fields[0].problem.cell.name], fields)


def stamp_of(buffer: Array) -> int:
    """The stamp of the pass that filled a buffer of the right size; any number if none has."""
    stamp: int = _STAMP.unpack_from(buffer.data)[0]
    return stamp


def recomputed(cache: RecurrentCache, threads: int) -> Array:
    """The buffer that the forward pass would have filled."""
    problem = cache.inputs.problem
    buffer = _memory.empty((problem.cache_bytes(cache.inputs.active),), BYTE)
    run_forward(cache.inputs, buffer, cache.stamp or 0, None, None, None, threads)
    return buffer


def check_filled(refusal: Refusal | None) -> None:
    """Raise if the engine refused a call in which only the cache's buffer can be wrong."""
    if refusal is not None:
        raise_for_cache(refusal)
        raise_unexplained(refusal)


def raise_for_cache(refusal: Refusal) -> None:
    """Raise if the engine refused the cache's buffer."""
    if refusal.reason is Reason.foreign_cache:
        raise ArgumentValueError("cache", "{cache} holds nothing that a finished forward pass has written")
    if refusal.reason is Reason.cache_of_another_problem:
        raise ArgumentValueError(
            "cache",
            "{cache} is of another problem: sizes, lengths, activations, peepholes, dropout or seed differ",
        )
    if refusal.argument == "cache" and refusal.reason in (Reason.shape, Reason.dtype):
        raise ArgumentValueError(
            "cache", "{cache} has a buffer of another dtype or size than this problem needs (lstm_cache_size)"
        )
    if refusal.reason is Reason.stale_cache:
        raise ArgumentValueError("cache", "{cache} is stale: a later forward pass has used the same buffer")


def as_buffer(name: str, inputs: Inputs, buffer: object) -> Array:
    if type(buffer) is np.ndarray and buffer.dtype is BYTE and buffer.ndim == 1 and buffer.flags.c_contiguous:
        array = buffer[:]
    else:
        try:
            view = memoryview(buffer)  # type: ignore[arg-type]
            contiguous = view.c_contiguous
        except (TypeError, ValueError, BufferError) as error:
            raise ArgumentTypeError(name, "{argument} must be a buffer of bytes: {}", str(error)) from None
        if not contiguous:
            raise ArgumentValueError(name, "{argument} is not contiguous")
        array = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    least = inputs.problem.cache_bytes(inputs.active)
    if array.size < least:
        raise ArgumentValueError(
            name,
            "{argument} has {} bytes, this problem needs {} ({}_cache_size)",
            array.size,
            least,
            inputs.problem.cell.name,
        )
    return array
