"""An LSTM problem of one shape, the inputs of a forward pass, and the call into the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ... import _core
from .. import _args, _memory
from .._arrays import same_elements
from .._call import Refusal, enter
from .._errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from .._records import LstmForward
from .._types import FLOATS, Array, check_native
from .types import Cell, LstmActivations, LstmWeights, Weights
from .weights import as_cells, hidden_size, named_arrays, peephole_kind

_MOST_ELEMENTS: Final = 1 << 58
_READS: Final = {"new": False, "old": True}


class Problem(NamedTuple):
    """An LSTM of one shape with one set of options, checked."""

    engine: _core.LstmProblem
    steps: int
    samples: int
    inputs: int
    units: int
    layers: int
    directions: int
    dtype: np.dtype[Any]
    activations: tuple[tuple[int, float, float], ...]  # code, alpha and beta for i, f, g, o and h
    peephole: int  # 0: none, 1: diagonals, 2: full matrices
    output_reads_old: bool
    dropout: float
    single: bool  # the weights were not a sequence: states have no cell axis
    batch_first: bool
    x_shape: tuple[int, ...]  # in the caller's axis order
    y_shape: tuple[int, ...]
    state_shape: tuple[int, ...]

    @property
    def cells(self) -> int:
        return self.layers * self.directions

    def cell_inputs(self, cell: int) -> int:
        return self.inputs if cell < self.directions else self.directions * self.units

    def columns(self, cell: int) -> tuple[tuple[int, ...], ...]:
        """What follows the rows in the shapes of wx, wh, b and peephole."""
        return (self.cell_inputs(cell),), (self.units,), (), (self.units,) if self.peephole == 2 else ()

    def cache_bytes(self, active: Array | None) -> int:
        return self.engine.cache_bytes(self.steps * self.samples if active is None else int(active.sum()))

    def sequence(self, array: Array) -> Array:
        """View x, y or one of their gradients with time first."""
        return array.transpose(1, 0, 2) if self.batch_first else array

    def states(self, array: Array) -> Array:
        """View a state or its gradient as [cells, N, H]."""
        return array[None] if self.single else array

    def __repr__(self) -> str:
        return (
            f"<lstm of {self.dtype}: T={self.steps} N={self.samples} I={self.inputs} H={self.units}, "
            f"layers={self.layers} directions={self.directions}>"
        )


class Inputs(NamedTuple):
    """The inputs of a forward pass, in the engine's form. bind/lstm.cpp reads these fields by position."""

    problem: Problem
    x: Array  # time first, or the table
    indices: Array | None  # into the table's rows, time first
    cells: list[Cell]
    h0: Array | None  # [cells, N, H]
    c0: Array | None
    active: Array | None  # the number of active slots in each step; None: all samples in every step
    order: Array | None  # the sample in each slot
    seed: int


new_inputs: Final[Callable[[tuple[Any, ...]], Inputs]] = partial(tuple.__new__, Inputs)


def dtype_code(name: str, dtype: np.dtype[Any]) -> int:
    if dtype not in FLOATS:
        check_native(name, dtype)
        raise ArgumentTypeError(name, "{argument} has dtype {}; an LSTM is computed in float32 or float64", dtype)
    return FLOATS.index(dtype)


@lru_cache(maxsize=512, typed=True)
def _problem(
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
) -> Problem:
    code = dtype_code("x", dtype)
    if len(shape) != 3:
        axes = "(N, T, I)" if batch_first else "(T, N, I)"
        raise ArgumentValueError("x", "{x} has shape {}, must have the 3 axes {}", shape, axes)
    steps, samples, inputs = (shape[1], shape[0], shape[2]) if batch_first else shape
    directions = 2 if bidirectional else 1
    if cells % directions:
        raise ArgumentValueError("weights", "{weights} has {} cells, but bidirectional layers have 2 each", cells)
    rate = _args.as_number("dropout", dropout)
    if not 0 <= rate < 1:
        raise ArgumentValueError("dropout", "{dropout} is {}, must be at least 0 and below 1", rate)
    if not isinstance(reads, str) or reads not in _READS:
        raise ArgumentValueError("output_gate_reads", "{output_gate_reads} is {!r}, must be 'new' or 'old'", reads)
    if isinstance(activations, str) or not isinstance(activations, Sequence):
        raise ArgumentTypeError("activations", "{activations} must be LstmActivations, not {}", type(activations))
    if len(activations) != 5:
        raise ArgumentValueError(
            "activations", "{activations} has {} functions, must have 5, for i, f, g, o and h", len(activations)
        )
    codes = []
    for role, activation in zip(LstmActivations._fields, activations, strict=True):
        try:
            f = _args.as_activation(activation)
        except ArgumentError as error:
            raise type(error)(f"activations.{role}", "{argument}: {}", str(error)) from None
        codes.append((f.code, f.alpha, f.beta))
    layers = cells // directions
    check_fits(steps, samples, inputs, units, cells)
    engine = _core.LstmProblem(
        steps,
        samples,
        inputs,
        units,
        layers,
        directions,
        code,
        codes,
        peephole,
        _READS[reads],
        rate if training else 0.0,
    )
    return Problem(
        engine,
        steps,
        samples,
        inputs,
        units,
        layers,
        directions,
        FLOATS[code],  # the canonical object: dtypes are compared by identity
        tuple(codes),
        peephole,
        _READS[reads],
        rate if training else 0.0,
        single,
        batch_first,
        shape,
        (*shape[:2], directions * units),
        (samples, units) if single else (cells, samples, units),
    )


def problem_of(*key: Any) -> Problem:
    """The checked problem, for the arguments of `_problem`."""
    try:
        return _problem(*key)
    except TypeError:  # an unhashable argument, or a type error from the checks: run them again without the memo
        return _problem.__wrapped__(*key)


def check_fits(steps: int, samples: int, inputs: int, units: int, cells: int) -> None:
    """Raise for sizes that no machine could hold, so that the engine's 64-bit sizes cannot overflow."""
    rows, width = (steps + 1) * (samples + 1), max(8 * (units + 32), inputs + 32, 2 * units + 96)
    elements = max(rows + 64, 8 * (units + 32)) * width * (cells + 1)
    if elements >= _MOST_ELEMENTS:
        raise ArgumentValueError(
            "x",
            "T={}, N={}, I={}, H={} with {} cells takes about 2**{} elements, more than a process can address",
            steps,
            samples,
            inputs,
            units,
            cells,
            elements.bit_length(),
        )


def _ragged(
    steps: int, samples: int, lengths: npt.ArrayLike | None, batch_sizes: npt.ArrayLike | None
) -> tuple[Array | None, Array | None]:
    """The number of active slots in each step, and the sample in each slot."""
    if lengths is not None:
        if batch_sizes is not None:
            raise ArgumentValueError("lengths", "{lengths} and {batch_sizes} are both given; one of them is enough")
        ends = as_counts("lengths", lengths, samples, "samples", steps, "steps")
        if not samples or ends.min() == steps:
            return None, None
        active, order = np.empty(steps, np.int64), np.empty(samples, np.int64)
        _core.lstm_slots(ends, active, order)
        return active, order
    if batch_sizes is not None:
        sizes = as_counts("batch_sizes", batch_sizes, steps, "steps", samples, "samples")
        return (None, None) if not steps or sizes.min() == samples else (sizes, None)
    return None, None


def as_counts(name: str, values: npt.ArrayLike, count: int, per: str, most: int, of: str) -> npt.NDArray[np.int64]:
    array = _args.as_array(name, values)
    if array.dtype.kind not in "iu" and array.size:
        raise ArgumentTypeError(name, "{argument} has dtype {}; it must be of integers", array.dtype)
    if array.shape != (count,):
        raise ArgumentValueError(
            name, "{argument} has shape {}, must be {}: {x} has {} {}", array.shape, (count,), count, per
        )
    if array.size and not 0 <= array.min() <= array.max() <= most:
        worst = int(array.max() if array.max() > most else array.min())
        raise ArgumentValueError(name, "{argument} has {}, must be from 0 to {}, the {} of {x}", worst, most, of)
    return array.astype(np.int64)  # a copy: the caller's may change before backward


def bind(
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
) -> Inputs:
    """The inputs of a forward pass. Checks what the engine does not."""
    indices = None
    if table is not None:
        x, indices = _looked_up(x, table, batch_first)
    elif type(x) is not np.ndarray:
        x = _args.as_array("x", x)
    cells, single = as_cells("weights", weights)
    units = hidden_size(cells[0][1])
    peephole = 0 if single and cells[0][3] is None else peephole_kind(cells, units)
    shape = x.shape if indices is None else (*(indices.shape[::-1] if batch_first else indices.shape), x.shape[1])
    problem = problem_of(
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
    active = order = None
    if lengths is not None or batch_sizes is not None:
        active, order = _ragged(problem.steps, problem.samples, lengths, batch_sizes)
    return new_inputs(
        (
            problem,
            problem.sequence(x) if indices is None else x,
            indices,
            cells,
            None if h0 is None else problem.states(as_state("h0", h0, problem)),
            None if c0 is None else problem.states(as_state("c0", c0, problem)),
            active,
            order,
            seed if type(seed) is int and 0 <= seed < 1 << 64 else _args.as_seed(seed),
        )
    )


def _looked_up(x: object, table: object, batch_first: bool) -> tuple[Array, Array]:
    """The table, and the row indices, time first."""
    rows = _args.as_array("table", table)
    if rows.ndim != 2:
        raise ArgumentValueError("table", "{table} has shape {}, must have 2 axes, [rows, I]", rows.shape)
    indices, flat = _args.as_indices("x", x)
    if indices.ndim != 2:
        axes = "(N, T)" if batch_first else "(T, N)"
        raise ArgumentValueError(
            "x", "{x} has shape {}, must have the 2 axes {}: there is a {table}", indices.shape, axes
        )
    flat = flat.reshape(indices.shape)
    return rows, np.ascontiguousarray(flat.T) if batch_first else flat


def as_state(name: str, value: object, problem: Problem) -> Array:
    array = value if type(value) is np.ndarray else _args.as_array(name, value)
    if array.shape != problem.state_shape:
        axes = "(N, H)" if problem.single else "(cells, N, H)"
        raise ArgumentValueError(
            name, "{argument} has shape {}, must be {} = {}", array.shape, axes, problem.state_shape
        )
    return array


def run_forward(
    inputs: Inputs,
    buffer: Array | None,
    stamp: int,
    y: Array | None,
    hn: Array | None,
    cn: Array | None,
    threads: int,
) -> Inputs:
    """Run the engine. Outputs have the right shape and dtype. Returns the inputs in the form the engine accepted."""

    def fix(_: Refusal, refused: LstmForward) -> LstmForward:
        checked = checked_inputs(inputs)
        read = {**named_inputs(checked), "h0": inputs.h0, "c0": inputs.c0}
        for state, before, after in (("h0", inputs.h0, hn), ("c0", inputs.c0, cn)):
            if before is not None and after is not None and same_elements(before, after):
                del read[state]
        _args.check_disjoint({"out.y": y, "out.hn": hn, "out.cn": cn, "cache": buffer}, read)
        to_y, to_hn, to_cn = (None if a is None else unit_stride(_args.as_plain(a), copy=False) for a in (y, hn, cn))
        return refused._replace(inputs=checked, y=to_y, hn=to_hn, cn=to_cn, overlap_checked=True)

    arguments = (inputs, buffer, stamp, y, hn, cn, False, threads)
    _, fixed = enter(LstmForward, inputs.problem.engine.forward, arguments, fix)
    if fixed is None:
        return inputs
    for array, computed in ((y, fixed.y), (hn, fixed.hn), (cn, fixed.cn)):
        if array is not None and array is not computed:
            array[...] = computed
    return cast(Inputs, fixed.inputs)


def named_inputs(inputs: Inputs) -> dict[str, Array | None]:
    own = {"x": inputs.x} if inputs.indices is None else {"table": inputs.x, "x": inputs.indices}
    return {**own, **dict(named_arrays("weights", inputs.cells))}


def unit_stride(array: Array, copy: bool = True) -> Array:
    """The array if its last axis is contiguous, else a contiguous copy, or with ``copy=False`` an empty array."""
    if array.shape[-1] <= 1 or array.strides[-1] == array.itemsize:
        return array
    return np.ascontiguousarray(array) if copy else _memory.empty(array.shape, array.dtype)


def checked_inputs(inputs: Inputs) -> Inputs:
    """Raise for an invalid x, state or weight; convert what can be converted."""
    problem, x, indices, cells, h0, c0, active, order, seed = inputs
    _args.check_aligned("x" if indices is None else "table", x)
    if indices is not None:
        used = np.where(_active_mask(inputs), indices, 0)
        if used.any() and not 0 <= used.min() <= used.max() < len(x):
            given = used.T if problem.batch_first else used
            _args.raise_out_of_range("x", given, len(x), "the rows of {table} are")
    states = {"h0": h0, "c0": c0}
    for name, state in states.items():
        if state is not None:
            _args.check_dtype(name, state, problem.dtype, "as {x} is")
            _args.check_aligned(name, state)
            states[name] = unit_stride(state)
    checked = [_checked_cell(problem, index, cell) for index, cell in enumerate(cells)]
    return new_inputs((problem, unit_stride(x), indices, checked, *states.values(), active, order, seed))


def _active_mask(inputs: Inputs) -> npt.NDArray[np.bool_]:
    """Which samples are active in which steps, [T, N]."""
    problem = inputs.problem
    active = np.full(problem.steps, problem.samples) if inputs.active is None else inputs.active
    slots = np.arange(problem.samples) < active[:, None]
    if inputs.order is None:
        return slots
    samples = np.empty_like(slots)
    samples[:, inputs.order] = slots
    return samples


def _checked_cell(problem: Problem, index: int, cell: Cell) -> Cell:
    checked: list[Any] = []
    for field, part, tail in zip(LstmWeights._fields, cell, problem.columns(index), strict=True):
        name = field if problem.single else f"weights[{index}].{field}"
        needed = field in ("wx", "wh")
        if part is None:
            if needed:
                raise ArgumentValueError(name, "{argument} is None; a cell needs {wx} and {wh} of every gate")
        elif type(part) is tuple:
            for gate, array in zip("ifgo", part, strict=True):
                label = f"{name} of gate {gate}"
                if array is not None:
                    check_parameter(label, array, ((problem.units, *tail),), problem.dtype)
                    _args.check_aligned(label, array)
                elif needed:
                    raise ArgumentValueError(label, "{argument} is None; a cell needs {wx} and {wh} of every gate")
            if len({a.strides for a in part if a is not None}) > 1:
                part = tuple(None if a is None else np.ascontiguousarray(a) for a in part)
        else:
            check_parameter(name, part, whole_shapes(problem, tail), problem.dtype)
            _args.check_aligned(name, part)
        checked.append(part)
    return tuple(checked)


def whole_shapes(problem: Problem, columns: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The shapes that a parameter of all gates may have."""
    return (4 * problem.units, *columns), (4, problem.units, *columns)


def check_parameter(name: str, array: Array, shapes: tuple[tuple[int, ...], ...], dtype: np.dtype[Any]) -> None:
    if array.shape not in shapes:
        raise ArgumentValueError(
            name, "{argument} has shape {}, must be {}", array.shape, " or ".join(map(str, shapes))
        )
    _args.check_dtype(name, array, dtype, "as {x} is")
