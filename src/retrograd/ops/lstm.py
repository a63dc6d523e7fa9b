"""LSTM: forward with a training cache, and backward.

``lstm_forward`` returns :class:`LstmResult`, whose ``cache`` goes to ``lstm_backward`` together with ``dy``. The cache
refers to ``x``, the states and the weights rather than copying them: leave them as they are until backward has run.
Nothing is written when an argument is refused. ``docs/lstm.md`` has the formulas.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _core
from . import _args, _memory
from ._args import Array
from ._arrays import same_elements
from .activation import Activation

__all__ = [
    "LstmActivations",
    "LstmCache",
    "LstmGates",
    "LstmGradients",
    "LstmResult",
    "LstmWeights",
    "lstm_backward",
    "lstm_cache",
    "lstm_cache_size",
    "lstm_forward",
]

# One array of all gates, [4H, ...] or [4, H, ...], or four arrays [H, ...]; gates in the order i f g o.
GateArrays: TypeAlias = Array | Sequence[Array | None]
Buffer: TypeAlias = Array | bytearray | memoryview


class LstmWeights(NamedTuple):
    """The parameters of one cell (one layer, one direction), or their gradients. Gates in the order i f g o.

    Each is one array for all gates, ``[4H, I]`` or ``[4, H, I]``, or four arrays ``[H, I]``, in any strides: ``wx``
    ``[4H, I]``, ``wh`` ``[4H, H]``, ``b`` ``[4H]``, and `peephole`, which is ``[4H]`` for diagonals and ``[4H, H]``
    for full matrices. Of the four arrays of ``b`` and of `peephole` any may be None.
    """

    wx: GateArrays | None
    wh: GateArrays | None
    b: GateArrays | None = None
    peephole: GateArrays | None = None


class LstmActivations(NamedTuple):
    """The functions of the gates i f g o, and `h`, which makes the hidden output of the cell state."""

    i: str | Activation = "sigmoid"
    f: str | Activation = "sigmoid"
    g: str | Activation = "tanh"
    o: str | Activation = "sigmoid"
    h: str | Activation = "tanh"


Weights: TypeAlias = LstmWeights | Sequence[Any]
# wx, wh, b, peephole as the engine takes them: each an array, a tuple of four (or None), or None.
_Cell: TypeAlias = tuple[Any, ...]


class LstmGates(NamedTuple):
    """Values of the gates and the new cell states, ``[T, N, H]`` each; 0 where a sample does not take part."""

    i: Array
    f: Array
    g: Array
    o: Array
    c: Array


class _Problem(NamedTuple):
    """An LSTM of one shape with one set of options, checked."""

    engine: _core.LstmProblem
    steps: int
    samples: int
    inputs: int
    units: int
    layers: int
    directions: int
    dtype: np.dtype[Any]
    peephole: int  # 0: none, 1: diagonals, 2: full matrices
    single: bool  # one cell, given as such: states have no axis of cells
    batch_first: bool
    x_shape: tuple[int, ...]  # shapes as the caller sees them
    y_shape: tuple[int, ...]
    state_shape: tuple[int, ...]

    @property
    def cells(self) -> int:
        return self.layers * self.directions

    def cell_inputs(self, cell: int) -> int:
        return self.inputs if cell < self.directions else self.directions * self.units

    def cache_bytes(self, active: Array | None) -> int:
        return self.engine.cache_bytes(self.steps * self.samples if active is None else int(active.sum()))

    def sequence(self, array: Array) -> Array:
        """x, y or a gradient of theirs, time first."""
        return array.transpose(1, 0, 2) if self.batch_first else array

    def states(self, array: Array) -> Array:
        """A state or a gradient of one, as [cells, N, H]."""
        return array[None] if self.single else array

    def __repr__(self) -> str:
        return (
            f"<lstm of {self.dtype}: T={self.steps} N={self.samples} I={self.inputs} H={self.units}, "
            f"layers={self.layers} directions={self.directions}>"
        )


class LstmCache:
    """What backward needs of a forward pass: its inputs, and a buffer of what it computed.

    Without a buffer backward computes it again. Opaque but for :meth:`gates` and `buffer`.
    """

    __slots__ = ("active", "buffer", "c0", "cells", "h0", "numbers", "order", "problem", "seed", "stamp", "x")

    problem: _Problem
    x: Array  # time first, or the table
    numbers: Array | None  # of its rows, time first
    cells: list[_Cell]
    h0: Array | None  # [cells, N, H]
    c0: Array | None
    active: Array | None
    order: Array | None
    seed: int
    buffer: Array | None
    stamp: int | None  # of the forward pass that filled the buffer; None: whichever it was

    def gates(self, cell: int = 0) -> LstmGates:
        """Gate values and cell states of one cell (layer-major, directions next to each other), time first."""
        problem = self.problem
        index = _args.as_count("LstmCache.gates", "cell", cell, least=0)
        if index >= problem.cells:
            raise ValueError(f"LstmCache.gates: cell is {index}, must be below {problem.cells}, the number of cells")
        buffer = _filled_buffer("LstmCache.gates", self, 0)
        values = _memory.empty((problem.steps, problem.samples, 4, problem.units), problem.dtype)
        states = _memory.empty((problem.steps, problem.samples, problem.units), problem.dtype)
        problem.engine.show(self.active, self.order, self.seed, buffer, index, values, states)
        i, f, g, o = np.moveaxis(values, 2, 0)
        return LstmGates(i, f, g, o, states)

    def with_buffer(self, buffer: Buffer | bytes) -> LstmCache:
        """The same pass, with the buffer that it has filled elsewhere."""
        return _with_buffer(self, _as_buffer("LstmCache.with_buffer", "buffer", self, buffer), None)

    def __repr__(self) -> str:
        kept = "recomputes" if self.buffer is None else f"{self.buffer.nbytes} bytes"
        return f"LstmCache({self.problem!r}, {kept})"


class LstmResult(NamedTuple):
    """Outputs of forward: ``y`` of the last layer, final states of every cell, and the cache (None in inference)."""

    y: Array
    hn: Array
    cn: Array
    cache: LstmCache | None


class LstmGradients(NamedTuple):
    """Gradients by name; None for those not asked for. Also the form of ``out=``: buffers to be written.

    ``dweights`` is of the form of the weights that forward was given.
    """

    dx: Array | None = None
    dweights: Any = None
    dh0: Array | None = None
    dc0: Array | None = None


_STANDARD: Final = LstmActivations()
_MOST_ELEMENTS: Final = 1 << 58
_NEEDS: Final = ("dx", "dwx", "dwh", "db", "dpeephole", "dh0", "dc0")
_WEIGHT_NEEDS: Final = frozenset(_NEEDS[1:5])
# Without `need`: everything, and the states' gradients if the states are there.
_DEFAULT_NEEDS: Final = {
    (h0, c0): frozenset(_NEEDS[:5]) | ({"dh0"} if h0 else set()) | ({"dc0"} if c0 else set())
    for h0 in (False, True)
    for c0 in (False, True)
}
_READS: Final = {"new": False, "old": True}
_DTYPES: Final = (np.dtype(np.float32), np.dtype(np.float64))  # in the engine's order
_DTYPE_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
_DONE: Final = _core.Outcome.done
_BYTE: Final = np.dtype(np.uint8)
_STAMPS: Final = itertools.count(secrets.randbits(62))  # no two forward passes of a process share one
_NONE4: Final = (None, None, None, None)
_new_cache: Final[Callable[[], LstmCache]] = partial(LstmCache.__new__, LstmCache)
_new_result: Final[Callable[[tuple[Any, ...]], LstmResult]] = partial(tuple.__new__, LstmResult)
_new_weights: Final[Callable[[tuple[Any, ...]], LstmWeights]] = partial(tuple.__new__, LstmWeights)
_new_gradients: Final[Callable[[tuple[Any, ...]], LstmGradients]] = partial(tuple.__new__, LstmGradients)


# ---- forward --------------------------------------------------------------------------------------------------------


def lstm_forward(
    x: Array,
    weights: Weights,
    h0: Array | None = None,
    c0: Array | None = None,
    *,
    table: Array | None = None,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: npt.ArrayLike | None = None,
    batch_sizes: npt.ArrayLike | None = None,
    activations: LstmActivations = _STANDARD,
    output_gate_reads: str = "new",
    dropout: float = 0.0,
    seed: int = 0,
    training: bool = True,
    recompute: bool = False,
    cache: Buffer | None = None,
    out: Array | Mapping[str, Array | None] | None = None,
    num_threads: int | None = None,
) -> LstmResult:
    """Run an LSTM over ``x [T, N, I]`` (``[N, T, I]`` if `batch_first`).

    `weights` is the :class:`LstmWeights` of the one cell, with states ``[N, H]``; or a sequence of them, one per layer
    and direction (directions of a layer next to each other), with states ``[cells, N, H]``. States not given are 0.

    With a `table` ``[rows, I]`` x are integers ``[T, N]`` (``[N, T]``), and the input is ``table[x]``: an embedding. It
    is faster than looking them up first if x is larger than the table, because rows are multiplied once, however often
    they occur. The gradient ``dx`` is then that of the table.

    `lengths` (``[N]``, any order, 0 allowed) ends each sample's sequence; `batch_sizes` (``[T]``) says how many of the
    first samples take part in each step. Outputs of samples that do not take part are 0, their states are carried.

    `dropout` is the share of outputs dropped between layers while `training`; equal seeds drop equal elements.
    ``output_gate_reads="old"`` lets the output gate's peephole see the previous cell state.

    In training the result has a cache for :func:`lstm_backward`, in the buffer `cache` if one is given
    (:func:`lstm_cache_size` bytes); with `recompute` it stays empty, and backward runs forward again. `out` is a buffer
    for ``y``, or a mapping with buffers for any of ``y``, ``hn`` and ``cn``; ``hn`` may be ``h0``, and ``cn`` ``c0``.
    """
    function = "lstm_forward"
    bound = _bind(
        function,
        x,
        weights,
        h0,
        c0,
        table,
        bidirectional,
        batch_first,
        lengths,
        batch_sizes,
        activations,
        output_gate_reads,
        dropout,
        seed,
        training,
    )
    problem = bound.problem
    threads = 0 if num_threads is None else _args.thread_count(function, num_threads)
    if cache is not None:
        if recompute or not training:
            why = "recompute=True" if recompute else "training=False"
            raise ValueError(f"{function}: cache is given, but {why} keeps none")
        bound.buffer = _as_buffer(function, "cache", bound, cache)
        if not bound.buffer.flags.writeable:
            raise ValueError(f"{function}: cache is read-only")
    elif training and not recompute:
        bound.buffer = _memory.empty((problem.cache_bytes(bound.active),), _BYTE)
    bound.stamp = next(_STAMPS)
    if out is None:
        y = _memory.empty(problem.y_shape, problem.dtype)
        hn, cn = np.empty(problem.state_shape, problem.dtype), np.empty(problem.state_shape, problem.dtype)
    else:
        y, hn, cn = _outputs(function, bound, out, recompute and training)
    _run_forward(function, bound, problem.sequence(y), problem.states(hn), problem.states(cn), threads)
    return _new_result((y, hn, cn, bound if training else None))


def lstm_cache(
    x: Array,
    weights: Weights,
    h0: Array | None = None,
    c0: Array | None = None,
    *,
    table: Array | None = None,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: npt.ArrayLike | None = None,
    batch_sizes: npt.ArrayLike | None = None,
    activations: LstmActivations = _STANDARD,
    output_gate_reads: str = "new",
    dropout: float = 0.0,
    seed: int = 0,
    buffer: Buffer | bytes | None = None,
) -> LstmCache:
    """The cache of a forward pass with these arguments, without running it.

    With the `buffer` that such a pass filled, here or elsewhere; without one, backward runs forward again.
    """
    function = "lstm_cache"
    bound = _bind(
        function,
        x,
        weights,
        h0,
        c0,
        table,
        bidirectional,
        batch_first,
        lengths,
        batch_sizes,
        activations,
        output_gate_reads,
        dropout,
        seed,
        True,
    )
    _check_inputs(function, bound)
    if buffer is not None:
        bound.buffer = _as_buffer(function, "buffer", bound, buffer)
        _filled_buffer(function, bound, 0)
    return bound


def lstm_cache_size(
    seq_len: int,
    batch_size: int,
    input_size: int,
    hidden_size: int,
    *,
    num_layers: int = 1,
    bidirectional: bool = False,
    dtype: npt.DTypeLike = np.float32,
    lengths: npt.ArrayLike | None = None,
    batch_sizes: npt.ArrayLike | None = None,
) -> int:
    """Bytes of the cache of a forward pass. A ragged batch needs less: say its `lengths` or `batch_sizes`."""
    function = "lstm_cache_size"
    sizes = {"seq_len": seq_len, "batch_size": batch_size, "input_size": input_size}
    steps, samples, inputs = (_args.as_count(function, name, value, least=0) for name, value in sizes.items())
    units = _args.as_count(function, "hidden_size", hidden_size)
    layers = _args.as_count(function, "num_layers", num_layers)
    directions = 2 if bidirectional else 1
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{function}: dtype is {dtype!r}: {error}") from None
    code = _dtype_code(function, "the array", kind)
    _check_fits(function, steps, samples, inputs, units, layers * directions)
    rows = steps * samples
    if lengths is not None and batch_sizes is not None:
        raise ValueError(f"{function}: lengths and batch_sizes are both given; one of them is enough")
    if lengths is not None:
        rows = int(_counts(function, "lengths", lengths, samples, "samples", steps, "steps").sum())
    if batch_sizes is not None:
        rows = int(_counts(function, "batch_sizes", batch_sizes, steps, "steps", samples, "samples").sum())
    nothing = [(0, 0.0, 0.0)] * 5
    engine = _core.LstmProblem(steps, samples, inputs, units, layers, directions, code, nothing, 0, False, 0.0)
    return engine.cache_bytes(rows)


# ---- backward -------------------------------------------------------------------------------------------------------


def lstm_backward(
    dy: Array | None,
    cache: LstmCache,
    *,
    dhn: Array | None = None,
    dcn: Array | None = None,
    need: Sequence[str] | None = None,
    out: LstmGradients | Mapping[str, Any] | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> LstmGradients:
    """Gradients of :func:`lstm_forward` from those of ``y``, ``hn`` and ``cn``; each may be None, which is 0.

    Computed are ``dx``, the gradients of all weights, and ``dh0`` and ``dc0`` if forward was given those states; or
    what `need` names, of dx, dwx, dwh, db, dpeephole, dh0, dc0. Results are written to the buffers of `out`, added to
    them with `accumulate`. The cache is only read: backward may run again.
    """
    function = "lstm_backward"
    if type(cache) is not LstmCache:
        raise TypeError(f"{function}: cache must be what lstm_forward returned, not {type(cache).__name__}")
    problem = cache.problem
    threads = 0 if num_threads is None else _args.thread_count(function, num_threads)
    if type(accumulate) is not bool:
        accumulate = _args.as_flag(function, "accumulate", accumulate)
    given = _NONE4 if out is None else _gradient_buffers(function, out)
    wanted = _wanted(function, cache, need, given)
    if dy is not None:
        dy = problem.sequence(_incoming(function, "dy", dy, problem.y_shape, "y", problem.dtype))
    if dhn is not None:
        dhn = problem.states(_incoming(function, "dhn", dhn, problem.state_shape, "hn", problem.dtype))
    if dcn is not None:
        dcn = problem.states(_incoming(function, "dcn", dcn, problem.state_shape, "cn", problem.dtype))

    dx, dweights, dh0, dc0 = given
    if "dx" in wanted:
        x_shape = problem.x_shape if cache.numbers is None else cache.x.shape
        dx = _result(function, "dx", dx, x_shape, problem.dtype, accumulate)
    if "dh0" in wanted:
        dh0 = _result(function, "dh0", dh0, problem.state_shape, problem.dtype, accumulate)
    if "dc0" in wanted:
        dc0 = _result(function, "dc0", dc0, problem.state_shape, problem.dtype, accumulate)
    dcells = None
    if not wanted.isdisjoint(_WEIGHT_NEEDS):
        dcells = _weight_results(function, cache, wanted, dweights, accumulate)
    elif dweights is not None:
        raise ValueError(f"{function}: out has buffers for dweights, of which need names none")

    buffer = _filled_buffer(function, cache, threads)
    results = _Results(
        dx if dx is None or cache.numbers is not None else problem.sequence(dx),
        dcells,
        None if dh0 is None else problem.states(dh0),
        None if dc0 is None else problem.states(dc0),
    )
    _run_backward(function, cache, buffer, dy, dhn, dcn, results, accumulate, threads)
    if dcells is None:
        dweights = None
    else:
        dweights = _new_weights(dcells[0]) if problem.single else [_new_weights(cell) for cell in dcells]
    return _new_gradients((dx, dweights, dh0, dc0))


# ---- arguments of forward -------------------------------------------------------------------------------------------


def _dtype_code(function: str, name: str, dtype: np.dtype[Any]) -> int:
    code = _DTYPE_CODES.get(dtype)
    if code is None:
        if not dtype.isnative:
            _args.dtype_code(function, name, dtype)  # raises: byte order
        raise TypeError(f"{function}: {name} has dtype {dtype}; an LSTM is computed in float32 or float64")
    return code


def _cells(function: str, name: str, weights: Weights, result: bool = False) -> tuple[list[_Cell], bool]:
    """The parameters of every cell, and whether a single cell was given as such."""
    if isinstance(weights, LstmWeights):
        return [_cell(function, name, weights, result)], True
    if isinstance(weights, (str, bytes)) or not isinstance(weights, Sequence):
        raise TypeError(f"{function}: {name} must be LstmWeights or a sequence of them, not {type(weights).__name__}")
    if not weights:
        raise ValueError(f"{function}: {name} is empty, needs at least 1 cell")
    if isinstance(weights[0], np.ndarray):
        return [_cell(function, name, weights, result)], True
    return [_cell(function, f"{name}[{index}]", cell, result) for index, cell in enumerate(weights)], False


def _cell(function: str, name: str, cell: Any, result: bool) -> _Cell:
    if type(cell) is LstmWeights:
        for part in cell:
            if part is not None and type(part) is not np.ndarray and not _is_gate_tuple(part):
                break
        else:
            return cell
    elif isinstance(cell, str) or not isinstance(cell, Sequence):
        raise TypeError(f"{function}: {name} must be LstmWeights, not {type(cell).__name__}")
    elif not 2 <= len(cell) <= 4:
        raise ValueError(f"{function}: {name} has {len(cell)} arrays; a cell has 2 to 4: wx, wh, b and peephole")
    fields = itertools.zip_longest(LstmWeights._fields, cell)
    return tuple(
        None if part is None else _gate_arrays(function, f"{name}.{field}", part, result) for field, part in fields
    )


def _is_gate_tuple(part: Any) -> bool:
    """Whether these are four arrays as they should be: what else there is takes longer to look at."""
    return type(part) is tuple and len(part) == 4 and all(a is None or type(a) is np.ndarray for a in part)


def _gate_arrays(function: str, name: str, part: Any, result: bool) -> Any:
    if not isinstance(part, (list, tuple)):
        return _array(function, name, part, result)
    if len(part) != 4:
        raise ValueError(f"{function}: {name} is a sequence of {len(part)} arrays, must be of 4, for i, f, g and o")
    return tuple(None if a is None else _array(function, name, a, result) for a in part)


def _array(function: str, name: str, value: object, result: bool) -> Array:
    if result and not isinstance(value, np.ndarray):
        raise TypeError(f"{function}: {name} must be an ndarray, not {type(value).__name__}")
    return _args.as_array(function, name, value)


def _units(function: str, wh: Any) -> int:
    """The hidden size, which all the rest has to agree with."""
    first = wh[0] if type(wh) is tuple else wh
    if first is None:
        raise ValueError(f"{function}: wh is None; a cell needs wx and wh of every gate")
    shape: tuple[int, ...] = first.shape
    if len(shape) < 2:
        raise ValueError(f"{function}: wh must be (4H, H), (4, H, H) or four times (H, H), not {_shape(wh)}")
    if shape[-1] < 1:
        raise ValueError(f"{function}: wh has shape {_shape(wh)}: the hidden size is 0, must be at least 1")
    return shape[-1]


def _shape(part: Any) -> str:
    if isinstance(part, tuple):
        return "(" + ", ".join("None" if a is None else str(a.shape) for a in part) + ")"
    return str(part.shape)


def _peephole_kind(function: str, cells: list[_Cell], units: int) -> int:
    kinds = {_peephole_of(cell[3], units) for cell in cells if cell[3] is not None}
    if len(kinds) > 1:
        raise ValueError(f"{function}: some cells have diagonal and others full peepholes; they must be of one kind")
    return kinds.pop() if kinds else 0


def _peephole_of(part: Any, units: int) -> int:
    if isinstance(part, tuple):
        return max(0 if a is None else min(a.ndim, 2) for a in part)
    return 1 if part.ndim == 1 or part.shape == (4, units) else 2


@lru_cache(maxsize=512, typed=True)
def _problem(
    function: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    cells: int,
    single: bool,
    units: int,
    bidirectional: bool,
    batch_first: bool,
    activations: LstmActivations,
    peephole: int,
    reads: str,
    dropout: float,
    training: bool,
) -> _Problem:
    code = _dtype_code(function, "x", dtype)
    if len(shape) != 3:
        axes = "(N, T, I)" if batch_first else "(T, N, I)"
        raise ValueError(f"{function}: x has shape {shape}, must have the 3 axes {axes}")
    steps, samples, inputs = (shape[1], shape[0], shape[2]) if batch_first else shape
    directions = 2 if bidirectional else 1
    if cells % directions:
        raise ValueError(f"{function}: weights has {cells} cells, but bidirectional layers have 2 each")
    rate = _args.as_number(function, "dropout", dropout)
    if not 0 <= rate < 1:
        raise ValueError(f"{function}: dropout is {rate}, must be at least 0 and below 1")
    if not isinstance(reads, str) or reads not in _READS:
        raise ValueError(f"{function}: output_gate_reads is {reads!r}, must be 'new' or 'old'")
    if isinstance(activations, str) or not isinstance(activations, Sequence):
        raise TypeError(f"{function}: activations must be LstmActivations, not {type(activations).__name__}")
    if len(activations) != 5:
        raise ValueError(f"{function}: activations has {len(activations)} functions, must have 5, for i, f, g, o and h")
    functions = [
        _args.as_activation(f"{function}: activations.{role}", activation)
        for role, activation in zip(LstmActivations._fields, activations, strict=True)
    ]
    numbers = [(f.code, f.alpha, f.beta) for f in functions]
    layers = cells // directions
    _check_fits(function, steps, samples, inputs, units, cells)
    engine = _core.LstmProblem(
        steps,
        samples,
        inputs,
        units,
        layers,
        directions,
        code,
        numbers,
        peephole,
        _READS[reads],
        rate if training else 0.0,
    )
    return _Problem(
        engine,
        steps,
        samples,
        inputs,
        units,
        layers,
        directions,
        _DTYPES[code],  # the one that arrays' are compared with by identity
        peephole,
        single,
        batch_first,
        shape,
        (*shape[:2], directions * units),
        (samples, units) if single else (cells, samples, units),
    )


def _check_fits(function: str, steps: int, samples: int, inputs: int, units: int, cells: int) -> None:
    """Refuse sizes whose arrays no machine could hold: the engine counts in 64 bits."""
    rows, width = (steps + 1) * (samples + 1), max(8 * (units + 32), inputs + 32, 2 * units + 96)
    elements = max(rows + 64, 8 * (units + 32)) * width * (cells + 1)
    if elements >= _MOST_ELEMENTS:
        raise ValueError(
            f"{function}: T={steps}, N={samples}, I={inputs}, H={units} with {cells} cells takes about 2**"
            f"{elements.bit_length()} elements, more than a process can address"
        )


def _ragged(
    function: str, steps: int, samples: int, lengths: npt.ArrayLike | None, batch_sizes: npt.ArrayLike | None
) -> tuple[Array | None, Array | None]:
    """How many slots take part in each step, and which sample is in which slot."""
    if lengths is not None:
        if batch_sizes is not None:
            raise ValueError(f"{function}: lengths and batch_sizes are both given; one of them is enough")
        ends = _counts(function, "lengths", lengths, samples, "samples", steps, "steps")
        if not samples or ends.min() == steps:
            return None, None
        order = np.argsort(-ends, kind="stable")
        # Slot s takes part in the steps before its end; ends are in falling order.
        active = samples - np.searchsorted(ends[order][::-1], np.arange(steps), side="right")
        return active.astype(np.int64), order.astype(np.int64)
    if batch_sizes is not None:
        sizes = _counts(function, "batch_sizes", batch_sizes, steps, "steps", samples, "samples")
        return (None, None) if not steps or sizes.min() == samples else (sizes, None)
    return None, None


def _counts(
    function: str, name: str, values: npt.ArrayLike, count: int, per: str, most: int, of: str
) -> npt.NDArray[np.int64]:
    array = _args.as_array(function, name, values)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{function}: {name} has dtype {array.dtype}; it must be of integers")
    if array.shape != (count,):
        raise ValueError(f"{function}: {name} has shape {array.shape}, must be {(count,)}: x has {count} {per}")
    if array.size and not 0 <= array.min() <= array.max() <= most:
        worst = int(array.max() if array.max() > most else array.min())
        raise ValueError(f"{function}: {name} has {worst}, must be from 0 to {most}, the {of} of x")
    return array.astype(np.int64)  # a copy: the caller's may change before backward


def _bind(
    function: str,
    x: Array,
    weights: Weights,
    h0: Array | None,
    c0: Array | None,
    table: Array | None,
    bidirectional: bool,
    batch_first: bool,
    lengths: npt.ArrayLike | None,
    batch_sizes: npt.ArrayLike | None,
    activations: LstmActivations,
    reads: str,
    dropout: float,
    seed: int,
    training: bool,
) -> LstmCache:
    """Everything that forward reads, in the engine's form."""
    numbers = None
    if table is not None:
        x, numbers = _looked_up(function, x, table, batch_first)
    elif type(x) is not np.ndarray:
        x = _args.as_array(function, "x", x)
    cells, single = _cells(function, "weights", weights)
    units = _units(function, cells[0][1])
    peephole = 0 if single and cells[0][3] is None else _peephole_kind(function, cells, units)
    shape = x.shape if numbers is None else (*(numbers.shape[::-1] if batch_first else numbers.shape), x.shape[1])
    key: Any = (
        function,
        shape,
        x.dtype,
        len(cells),
        single,
        units,
        bool(bidirectional),
        bool(batch_first),
        activations,
        peephole,
        reads,
        dropout,
        bool(training),
    )
    try:
        problem = _problem(*key)
    except TypeError:  # an unhashable argument, or a wrong type found inside: say which
        problem = _problem.__wrapped__(*key)
    bound = _new_cache()
    bound.problem = problem
    bound.x = problem.sequence(x) if numbers is None else x
    bound.numbers = numbers
    bound.cells = cells
    bound.active = bound.order = None
    if lengths is not None or batch_sizes is not None:
        bound.active, bound.order = _ragged(function, problem.steps, problem.samples, lengths, batch_sizes)
    bound.seed = seed if type(seed) is int and 0 <= seed < 1 << 64 else _args.as_seed(function, seed)
    bound.h0 = None if h0 is None else problem.states(_state(function, "h0", h0, problem))
    bound.c0 = None if c0 is None else problem.states(_state(function, "c0", c0, problem))
    bound.buffer = bound.stamp = None
    return bound


def _looked_up(function: str, x: object, table: object, batch_first: bool) -> tuple[Array, Array]:
    """The table, and the numbers of its rows, time first."""
    rows = _args.as_array(function, "table", table)
    if rows.ndim != 2:
        raise ValueError(f"{function}: table has shape {rows.shape}, must have 2 axes, [rows, I]")
    numbers, flat = _args.as_indices(function, "x", x)
    if numbers.ndim != 2:
        axes = "(N, T)" if batch_first else "(T, N)"
        raise ValueError(f"{function}: x has shape {numbers.shape}, must have the 2 axes {axes}: there is a table")
    flat = flat.reshape(numbers.shape)
    return rows, np.ascontiguousarray(flat.T) if batch_first else flat


def _state(function: str, name: str, value: object, problem: _Problem) -> Array:
    array = value if type(value) is np.ndarray else _args.as_array(function, name, value)
    if array.shape != problem.state_shape:
        axes = "(N, H)" if problem.single else "(cells, N, H)"
        raise ValueError(f"{function}: {name} has shape {array.shape}, must be {axes} = {problem.state_shape}")
    return array


def _with_buffer(cache: LstmCache, buffer: Array, stamp: int | None) -> LstmCache:
    made = _new_cache()
    made.problem, made.x, made.numbers, made.cells = cache.problem, cache.x, cache.numbers, cache.cells
    made.h0, made.c0 = cache.h0, cache.c0
    made.active, made.order, made.seed = cache.active, cache.order, cache.seed
    made.buffer, made.stamp = buffer, stamp
    return made


def _as_buffer(function: str, name: str, cache: LstmCache, buffer: object) -> Array:
    if type(buffer) is np.ndarray and buffer.dtype is _BYTE and buffer.ndim == 1 and buffer.flags.c_contiguous:
        array = buffer[:]
    else:
        try:
            view = memoryview(buffer)  # type: ignore[arg-type]
            contiguous = view.c_contiguous
        except (TypeError, ValueError, BufferError) as error:
            raise TypeError(f"{function}: {name} must be a buffer of bytes: {error}") from None
        if not contiguous:
            raise ValueError(f"{function}: {name} is not contiguous")
        array = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    least = cache.problem.cache_bytes(cache.active)
    if array.size < least:
        raise ValueError(f"{function}: {name} has {array.size} bytes, this problem needs {least} (lstm_cache_size)")
    return array


def _outputs(
    function: str, cache: LstmCache, out: Array | Mapping[str, Array | None], recomputes: bool
) -> tuple[Array, Array, Array]:
    """Where y, hn and cn go."""
    problem = cache.problem
    found = {"y": problem.y_shape, "hn": problem.state_shape, "cn": problem.state_shape}
    given = out if isinstance(out, Mapping) else {"y": out}
    for name in given.keys() - found.keys():
        raise ValueError(f"{function}: out has {name!r}; the outputs are y, hn and cn")
    results = []
    for name, shape in found.items():
        buffer = given.get(name)
        if buffer is None:
            buffer = _memory.empty(shape, problem.dtype)
        else:
            _args.check_result(function, f"out.{name}", buffer, shape, problem.dtype)
        results.append(buffer)
    if recomputes:
        for name, before, after in (("h", cache.h0, results[1]), ("c", cache.c0, results[2])):
            if before is not None and same_elements(before, problem.states(after)):
                raise ValueError(
                    f"{function}: out.{name}n is in the place of {name}0, which backward needs with recompute=True"
                )
    return results[0], results[1], results[2]


def _is_plain(cells: list[_Cell], dtype: np.dtype[Any]) -> bool:
    """Whether all are arrays of the right type: the engine sees sizes, not types."""
    for cell in cells:
        for part in cell:
            if part is None:
                continue
            if type(part) is tuple:
                if any(a is not None and a.dtype is not dtype for a in part):
                    return False
            elif part.dtype is not dtype:
                return False
    return True


def _run_forward(
    function: str, cache: LstmCache, y: Array | None, hn: Array | None, cn: Array | None, threads: int
) -> None:
    """Outputs are of the right shape and type. The engine is asked first; what it refuses is looked at closely."""
    problem, h0, c0 = cache.problem, cache.h0, cache.c0
    dtype, stamp = problem.dtype, cache.stamp or 0
    if _is_plain(cache.cells, dtype) and (h0 is None or h0.dtype is dtype) and (c0 is None or c0.dtype is dtype):
        try:
            outcome = problem.engine.forward(
                cache.x, cache.numbers, cache.cells, h0, c0, cache.active, cache.order, cache.seed, cache.buffer, stamp,
                y, hn, cn, False, threads,
            )  # fmt: skip
        except (ValueError, BufferError):
            pass
        else:
            if outcome is _DONE:
                return
    _check_inputs(function, cache)
    inputs = {**_named_inputs(cache), "h0": h0, "c0": c0}
    for state, before, after in (("h0", h0, hn), ("c0", c0, cn)):
        if before is not None and after is not None and same_elements(before, after):
            del inputs[state]
    results = {"out.y": y, "out.hn": hn, "out.cn": cn, "cache": cache.buffer}
    _args.check_disjoint(function, results, inputs)
    to_y, to_hn, to_cn = (None if a is None else _unit_stride(a, copy=False) for a in (y, hn, cn))
    problem.engine.forward(
        cache.x, cache.numbers, cache.cells, cache.h0, cache.c0, cache.active, cache.order, cache.seed, cache.buffer,
        stamp, to_y, to_hn, to_cn, True, threads,
    )  # fmt: skip
    for array, target in ((y, to_y), (hn, to_hn), (cn, to_cn)):
        if array is not None and target is not None and array is not target:
            array[...] = target


def _named(name: str, cells: Sequence[_Cell]) -> Iterator[tuple[str, Any]]:
    """Every array of some cells, with a name for it."""
    for index, cell in enumerate(cells):
        for field, part in zip(LstmWeights._fields, cell, strict=True):
            label = f"{name}.{field}" if len(cells) == 1 else f"{name}[{index}].{field}"
            if type(part) is tuple:
                yield from ((f"{label} of gate {gate}", array) for gate, array in zip("ifgo", part, strict=True))
            else:
                yield label, part


def _named_inputs(cache: LstmCache) -> dict[str, Array | None]:
    own = {"x": cache.x} if cache.numbers is None else {"table": cache.x, "x": cache.numbers}
    return {**own, **dict(_named("weights", cache.cells))}


def _unit_stride(array: Array, copy: bool = True) -> Array:
    """The array, or one of the same contents (or only shape) whose last axis is contiguous."""
    if array.shape[-1] <= 1 or array.strides[-1] == array.itemsize:
        return array
    return np.ascontiguousarray(array) if copy else _memory.empty(array.shape, array.dtype)


def _check_inputs(function: str, cache: LstmCache) -> None:
    """Say what is wrong with x, the states or the weights; convert what can be converted."""
    problem = cache.problem
    _args.check_aligned(function, "x" if cache.numbers is None else "table", cache.x)
    cache.x = _unit_stride(cache.x)
    if cache.numbers is not None:
        numbers = np.where(_taking_part(cache), cache.numbers, 0)
        if numbers.any() and not 0 <= numbers.min() <= numbers.max() < len(cache.x):
            given = numbers.T if problem.batch_first else numbers
            _args.raise_out_of_range(function, "x", given, len(cache.x), "the rows of table are")
    for name in ("h0", "c0"):
        state = getattr(cache, name)
        if state is not None:
            _args.check_dtype(function, name, state, problem.dtype, "as x is")
            _args.check_aligned(function, name, state)
            setattr(cache, name, _unit_stride(state))
    cache.cells = [_checked_cell(function, problem, index, cell) for index, cell in enumerate(cache.cells)]


def _taking_part(cache: LstmCache) -> npt.NDArray[np.bool_]:
    """Which samples take part in which steps, [T, N]."""
    problem = cache.problem
    active = np.full(problem.steps, problem.samples) if cache.active is None else cache.active
    slots = np.arange(problem.samples) < active[:, None]
    if cache.order is None:
        return slots
    samples = np.empty_like(slots)
    samples[:, cache.order] = slots
    return samples


def _checked_cell(function: str, problem: _Problem, index: int, cell: _Cell) -> _Cell:
    columns: tuple[tuple[int, ...], ...] = (
        (problem.cell_inputs(index),),
        (problem.units,),
        (),
        (problem.units,) if problem.peephole == 2 else (),
    )
    checked: list[Any] = []
    for field, part, tail in zip(LstmWeights._fields, cell, columns, strict=True):
        name = field if problem.single else f"weights[{index}].{field}"
        needed = field in ("wx", "wh")
        if part is None:
            if needed:
                raise ValueError(f"{function}: {name} is None; a cell needs wx and wh of every gate")
        elif type(part) is tuple:
            for gate, array in zip("ifgo", part, strict=True):
                label = f"{name} of gate {gate}"
                if array is not None:
                    _check_parameter(function, label, array, ((problem.units, *tail),), problem.dtype)
                elif needed:
                    raise ValueError(f"{function}: {label} is None; a cell needs wx and wh of every gate")
            if len({a.strides for a in part if a is not None}) > 1:
                part = tuple(None if a is None else np.ascontiguousarray(a) for a in part)
        else:
            shapes = ((4 * problem.units, *tail), (4, problem.units, *tail))
            _check_parameter(function, name, part, shapes, problem.dtype)
        checked.append(part)
    return tuple(checked)


def _check_parameter(
    function: str, name: str, array: Array, shapes: tuple[tuple[int, ...], ...], dtype: np.dtype[Any]
) -> None:
    if array.shape not in shapes:
        raise ValueError(f"{function}: {name} has shape {array.shape}, must be {' or '.join(map(str, shapes))}")
    _args.check_dtype(function, name, array, dtype, "as x is")
    _args.check_aligned(function, name, array)


# ---- arguments of backward ------------------------------------------------------------------------------------------


class _Results(NamedTuple):
    """Where the gradients go, in the engine's form."""

    dx: Array | None
    dcells: list[_Cell] | None
    dh0: Array | None
    dc0: Array | None


def _filled_buffer(function: str, cache: LstmCache, threads: int) -> Array:
    """The buffer of a forward pass: the one there is, checked, or a new one."""
    engine = cache.problem.engine
    if cache.buffer is None:
        buffer = _memory.empty((cache.problem.cache_bytes(cache.active),), _BYTE)
        _run_forward(function, _with_buffer(cache, buffer, cache.stamp), None, None, None, threads)
        return buffer
    state, stamp = engine.check_cache(cache.active, cache.order, cache.seed, cache.buffer)
    if state == "foreign":
        raise ValueError(f"{function}: cache holds nothing that a finished lstm_forward has written")
    if state != "good":
        raise ValueError(
            f"{function}: cache is of another problem: sizes, lengths, activations, peepholes, dropout or seed differ"
        )
    if cache.stamp is not None and stamp != cache.stamp:
        raise ValueError(f"{function}: cache is stale: a later forward pass has used the same buffer")
    return cache.buffer


def _gradient_buffers(function: str, out: LstmGradients | Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    if isinstance(out, LstmGradients):
        return out
    if not isinstance(out, Mapping):
        raise TypeError(f"{function}: out must be LstmGradients or a mapping, not {type(out).__name__}")
    for name in set(out) - set(LstmGradients._fields):
        raise ValueError(f"{function}: out has {name!r}; the buffers are {', '.join(LstmGradients._fields)}")
    return out.get("dx"), out.get("dweights"), out.get("dh0"), out.get("dc0")


def _wanted(
    function: str, cache: LstmCache, need: Sequence[str] | None, given: tuple[Any, Any, Any, Any]
) -> frozenset[str]:
    if need is None:
        return _DEFAULT_NEEDS[
            cache.h0 is not None or given[2] is not None, cache.c0 is not None or given[3] is not None
        ]
    names = _args.needed_names(function, need, _NEEDS)
    for name, field in (("db", 2), ("dpeephole", 3)):
        if name in names and all(cell[field] is None for cell in cache.cells):
            raise ValueError(f"{function}: need has {name!r}, but forward was given no {name[1:]}")
    for name, buffer in zip(("dx", "dh0", "dc0"), (given[0], given[2], given[3]), strict=True):
        if buffer is not None and name not in names:
            raise ValueError(f"{function}: out has a buffer for {name}, which need does not name")
    return names


def _incoming(function: str, name: str, value: object, shape: tuple[int, ...], of: str, dtype: np.dtype[Any]) -> Array:
    array = value if type(value) is np.ndarray else _args.as_array(function, name, value)
    if array.shape != shape:
        raise ValueError(f"{function}: {name} has shape {array.shape}, but {of} has shape {shape}")
    if array.dtype is not dtype:
        _args.check_dtype(function, name, array, dtype, "as x is")
    return array


def _result(
    function: str, name: str, buffer: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], accumulate: bool
) -> Array:
    if buffer is None:
        if accumulate:
            raise ValueError(f"{function}: accumulate=True adds to buffers, and out has none for {name}")
        return _memory.empty(shape, dtype)
    _args.check_result(function, f"out.{name}", buffer, shape, dtype)
    return buffer


def _weight_results(
    function: str, cache: LstmCache, wanted: frozenset[str], dweights: Any, accumulate: bool
) -> list[_Cell]:
    if dweights is None and not accumulate:
        return [_new_gradient(cell, wanted) for cell in cache.cells]
    buffers: list[_Cell] = [_NONE4] * len(cache.cells)
    if dweights is not None:
        buffers, single = _cells(function, "out.dweights", dweights, result=True)
        if single != cache.problem.single or len(buffers) != len(cache.cells):
            raise ValueError(f"{function}: out.dweights has {len(buffers)} cells, the weights have {len(cache.cells)}")
    results = []
    for index, (cell, given) in enumerate(zip(cache.cells, buffers, strict=True)):
        name = "dweights" if cache.problem.single else f"dweights[{index}]"
        dcell: list[Any] = []
        for field, part, buffer in zip(LstmWeights._fields, cell, given, strict=True):
            if part is None or "d" + field not in wanted:
                if buffer is not None:
                    why = "which forward was not given" if part is None else "which need does not name"
                    raise ValueError(f"{function}: out.{name}.{field} is a buffer for the gradient of {field}, {why}")
                dcell.append(None)
            elif type(part) is not tuple and type(buffer) is not tuple:
                dcell.append(_result(function, f"{name}.{field}", buffer, part.shape, part.dtype, accumulate))
            else:
                dcell.append(_gate_results(function, f"{name}.{field}", part, buffer, accumulate))
        results.append(tuple(dcell))
    return results


def _new_gradient(cell: _Cell, wanted: frozenset[str]) -> _Cell:
    results: list[Any] = []
    for name, part in zip(_NEEDS[1:5], cell, strict=True):
        if part is None or name not in wanted:
            results.append(None)
        elif type(part) is tuple:
            results.append(tuple(None if a is None else _memory.empty(a.shape, a.dtype) for a in part))
        else:
            results.append(_memory.empty(part.shape, part.dtype))
    return tuple(results)


def _gate_results(function: str, name: str, part: Any, buffer: Any, accumulate: bool) -> tuple[Array | None, ...]:
    if buffer is not None and (type(part) is tuple) != (type(buffer) is tuple):
        raise ValueError(f"{function}: out.{name} has the form {_shape(buffer)}, the weights have {_shape(part)}")
    results: list[Array | None] = []
    for gate, array, result in zip("ifgo", part, buffer or _NONE4, strict=True):
        if array is None:
            if result is not None:
                raise ValueError(f"{function}: out.{name} of gate {gate} is a buffer, but that gate was given none")
            results.append(None)
        else:
            results.append(_result(function, f"{name} of gate {gate}", result, array.shape, array.dtype, accumulate))
    return tuple(results)


def _run_backward(
    function: str,
    cache: LstmCache,
    buffer: Array,
    dy: Array | None,
    dhn: Array | None,
    dcn: Array | None,
    results: _Results,
    accumulate: bool,
    threads: int,
) -> None:
    """All is of the right shape and type. The engine is asked first; what it refuses is looked at closely."""
    problem = cache.problem
    if _is_plain(cache.cells, problem.dtype):
        try:
            outcome = problem.engine.backward(
                dy, dhn, dcn, cache.x, cache.numbers, cache.cells, cache.active, cache.order, cache.seed, buffer,
                *results, accumulate, False, threads,
            )  # fmt: skip
        except (ValueError, BufferError):
            pass
        else:
            if outcome is _DONE:
                return
    _check_inputs(function, cache)
    incoming = {"dy": dy, "dhn": dhn, "dcn": dcn}
    for name, array in incoming.items():
        if array is not None:
            _args.check_aligned(function, name, array)
            incoming[name] = _unit_stride(array)
    named = {"out.dx": results.dx, "out.dh0": results.dh0, "out.dc0": results.dc0}
    named.update(_named("out.dweights", results.dcells or ()))
    _args.check_disjoint(function, named, {**_named_inputs(cache), **incoming, "cache": buffer})

    copies: list[tuple[Array, Array]] = []

    def target(part: Any, must_copy: bool = False) -> Any:
        """Where the engine can write: the caller's own array, or one to be copied there."""
        if part is None:
            return None
        if type(part) is tuple:
            different = len({a.strides for a in part if a is not None}) > 1
            return tuple(target(a, different) for a in part)
        if not must_copy and (part.ndim == 1 or part.shape[-1] <= 1 or part.strides[-1] == part.itemsize):
            return part
        fresh = part.copy(order="C")
        copies.append((part, fresh))
        return fresh

    problem.engine.backward(
        incoming["dy"], incoming["dhn"], incoming["dcn"], cache.x, cache.numbers, cache.cells, cache.active,
        cache.order, cache.seed, buffer, target(results.dx),
        None if results.dcells is None else [tuple(map(target, cell)) for cell in results.dcells],
        target(results.dh0), target(results.dc0), accumulate, True, threads,
    )  # fmt: skip
    for array, computed in copies:
        array[...] = computed
