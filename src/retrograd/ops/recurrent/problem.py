"""A recurrent layer of one shape, the inputs of a forward pass, and the call into the engine."""

from __future__ import annotations

import math
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
from .._records import RecurrentForward
from .._types import FLOATS, Array, check_native
from .factors import Factors, as_mask, as_reset, as_zoneouts, checked_factors
from .types import CELL_TYPES, UNGATED, Cell, CellOptions, CellType, Weights
from .weights import as_cells, hidden_size, named_arrays, peephole_kind

_MOST_ELEMENTS: Final = 1 << 58
_READS: Final = {"new": False, "old": True}
# The engine's codes of cells.
_LSTM, _GRU_AFTER, _GRU_BEFORE, _RNN = range(4)
_GRU_KINDS: Final = {"after": _GRU_AFTER, "before": _GRU_BEFORE}


class Problem(NamedTuple):
    """A recurrent layer of one shape with one set of options, checked."""

    engine: _core.RecurrentProblem
    cell: CellType
    code: int  # of the cell
    steps: int
    samples: int
    inputs: int
    units: int
    projection: int  # the size of the projected state; 0: none
    layers: int
    directions: int
    dtype: np.dtype[Any]
    activations: tuple[tuple[int, float, float], ...]  # code, alpha and beta of every gate and an LSTM's cell state
    peephole: int  # 0: none, 1: diagonals, 2: full matrices
    output_reads_old: bool
    coupled: bool
    flip: bool
    clip: float  # 0: none
    cell_clip: float
    norm: int  # 0: none, 1: haste's, 2: of the cell state
    norm_eps: float
    mask: int  # 0: none, 1: one for all gates, 2: one for each
    zoneout: bool
    dropout: float
    single: bool  # the weights were not a sequence: states have no cell axis
    batch_first: bool
    x_shape: tuple[int, ...]  # in the caller's axis order
    y_shape: tuple[int, ...]
    h_shape: tuple[int, ...]
    c_shape: tuple[int, ...]  # of an LSTM
    whole_cache: int  # bytes of the cache if all samples are active in every step

    @property
    def cells(self) -> int:
        return self.layers * self.directions

    @property
    def outputs(self) -> int:
        """The size of the hidden state."""
        return self.projection or self.units

    def cell_inputs(self, cell: int) -> int:
        return self.inputs if cell < self.directions else self.directions * self.outputs

    def columns(self, cell: int) -> tuple[tuple[int, ...], ...]:
        """What follows the rows of a gate in the shapes of the parameters; for those without gates, the whole shape."""
        tails = {
            "wx": (self.cell_inputs(cell),),
            "wh": (self.outputs,),
            "peephole": (self.units,) if self.peephole == 2 else (),
            "projection": (self.projection, self.units),
            "gamma_c": (self.units,),
            "beta_c": (self.units,),
        }
        return tuple(tails.get(field, ()) for field in self.cell.fields)

    def shapes(self, field: str, tail: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes that a parameter may have as one array."""
        if field in UNGATED:
            return (tail,)
        gates = len(self.cell.gates)
        return (gates * self.units, *tail), (gates, self.units, *tail)

    def cache_bytes(self, active: Array | None) -> int:
        return self.whole_cache if active is None else self.engine.cache_bytes(int(active.sum()))

    def sequence(self, array: Array) -> Array:
        """View x, y or one of their gradients with time first."""
        return array.transpose(1, 0, 2) if self.batch_first else array

    def states(self, array: Array) -> Array:
        """View a state or its gradient as [cells, N, H]."""
        return array[None] if self.single else array

    def __repr__(self) -> str:
        projection = f" P={self.projection}" if self.projection else ""
        return (
            f"<{self.cell.name} of {self.dtype}: T={self.steps} N={self.samples} I={self.inputs} H={self.units}"
            f"{projection}, layers={self.layers} directions={self.directions}>"
        )


class Inputs(NamedTuple):
    """The inputs of a forward pass, in the engine's form. bind/recurrent.cpp reads these fields by position."""

    problem: Problem
    x: Array  # time first, or the table
    indices: Array | None  # into the table's rows, time first
    cells: list[Cell]
    h0: Array | None  # [cells, N, H]
    c0: Array | None
    active: Array | None  # the number of active slots in each step; None: all samples in every step
    order: Array | None  # the sample in each slot
    seed: int
    reset: Array | None  # [T, N], bytes
    mask: Array | None  # broadcasts to [cells, gates or 1, T, N, H]; with any strides but the last
    zoneout: Array | None  # broadcasts to [cells, T, N, H]
    cell_zoneout: Array | None


new_inputs: Final[Callable[[tuple[Any, ...]], Inputs]] = partial(tuple.__new__, Inputs)


def dtype_code(name: str, dtype: np.dtype[Any], cell: CellType) -> int:
    if dtype not in FLOATS:
        check_native(name, dtype)
        raise ArgumentTypeError(
            name, "{argument} has dtype {}; {} is computed in float32 or float64", dtype, cell.title
        )
    return FLOATS.index(dtype)


@lru_cache(maxsize=512)
def _problem(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    cells: int,
    single: bool,
    units: int,
    projection: int,
    bidirectional: bool,
    batch_first: bool,
    peephole: int,
    mask: int,
    zoneout: bool,
    dropout: float,
    training: bool,
    options: CellOptions,
) -> Problem:
    cell = CELL_TYPES[options.cell]
    code = dtype_code("x", dtype, cell)
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
    reads = options.output_gate_reads
    if not isinstance(reads, str) or reads not in _READS:
        raise ArgumentValueError("output_gate_reads", "{output_gate_reads} is {!r}, must be 'new' or 'old'", reads)
    codes = _activation_codes(options.activations, cell)
    kind = _kind(options, cell)
    clip, cell_clip = _bound("clip", options.clip), _bound("cell_clip", options.cell_clip)
    norm, eps = _norm(options, cell)
    _check_combination(cell, kind, peephole, projection, norm, clip, cell_clip, mask)
    layers = cells // directions
    check_fits(steps, samples, inputs, units, cells, 16 if norm or mask == 2 else 8)
    used_rate = rate if training else 0.0
    engine = _core.RecurrentProblem(
        kind, steps, samples, inputs, units, projection, layers, directions, code, codes, peephole, _READS[reads],
        options.coupled, options.flip, clip, cell_clip, norm, eps, mask, zoneout, used_rate,
    )  # fmt: skip
    outputs = projection or units
    lead = (samples,) if single else (cells, samples)
    return Problem(
        engine=engine,
        cell=cell,
        code=kind,
        steps=steps,
        samples=samples,
        inputs=inputs,
        units=units,
        projection=projection,
        layers=layers,
        directions=directions,
        dtype=FLOATS[code],  # the canonical object: dtypes are compared by identity
        activations=codes,
        peephole=peephole,
        output_reads_old=_READS[reads],
        coupled=options.coupled,
        flip=options.flip,
        clip=clip,
        cell_clip=cell_clip,
        norm=norm,
        norm_eps=eps,
        mask=mask,
        zoneout=zoneout,
        dropout=used_rate,
        single=single,
        batch_first=bool(batch_first),
        x_shape=shape,
        y_shape=(*shape[:2], directions * outputs),
        h_shape=(*lead, outputs),
        c_shape=(*lead, units),
        whole_cache=engine.cache_bytes(steps * samples),
    )


def _activation_codes(activations: Any, cell: CellType) -> tuple[tuple[int, float, float], ...]:
    names = cell.activations._fields
    if isinstance(activations, str) or not isinstance(activations, Sequence):
        raise ArgumentTypeError("activations", "{activations} must be {}, not {}", cell.activations, type(activations))
    if len(activations) != len(names):
        raise ArgumentValueError(
            "activations",
            "{activations} has {} functions, must have {}, for {}",
            len(activations),
            len(names),
            ", ".join(names[:-1]) + f" and {names[-1]}",
        )
    codes = []
    for role, activation in zip(names, activations, strict=True):
        name = "activation" if cell.name == "rnn" else f"activations.{role}"
        try:
            f = _args.as_activation(activation)
        except ArgumentError as error:
            raise type(error)(name, "{argument}: {}", str(error)) from None
        codes.append((f.code, f.alpha, f.beta))
    return tuple(codes)


def _kind(options: CellOptions, cell: CellType) -> int:
    if cell.name != "gru":
        return _LSTM if cell.has_cells else _RNN
    if not isinstance(options.kind, str) or options.kind not in _GRU_KINDS:
        raise ArgumentValueError("kind", "{kind} is {!r}, must be 'after' or 'before'", options.kind)
    return _GRU_KINDS[options.kind]


def _bound(name: str, value: float | None) -> float:
    if value is None:
        return 0.0
    number = _args.as_number(name, value)
    if not 0 < number < math.inf:
        raise ArgumentValueError(name, "{argument} is {}, must be above 0 and finite", number)
    return number


def _norm(options: CellOptions, cell: CellType) -> tuple[int, float]:
    eps = _args.as_number("norm_eps", options.norm_eps)
    if not 0 < eps < math.inf:
        raise ArgumentValueError("norm_eps", "{norm_eps} is {}, must be above 0 and finite", eps)
    if options.norm is None:
        return 0, eps
    if options.norm not in cell.norms:
        listed = " or ".join(map(repr, cell.norms))
        raise ArgumentValueError("norm", "{norm} is {!r}, must be {} or None", options.norm, listed)
    return cell.norms.index(options.norm) + 1, eps


def _check_combination(
    cell: CellType, kind: int, peephole: int, projection: int, norm: int, clip: float, cell_clip: float, mask: int
) -> None:
    """Raise for options that exclude each other."""
    excluded = {
        "a peephole": peephole,
        "a projection": projection,
        "clip": clip,
        "cell_clip": cell_clip,
        "kind='before'": kind == _GRU_BEFORE,
        "a mask for each gate": mask == 2,
    }
    for other, present in excluded.items():
        if norm and present:
            raise ArgumentValueError("norm", "{norm} is given, and so is {}; they cannot be combined", other)
    for other, present in {"a projection": projection, "cell_clip": cell_clip}.items():
        if peephole == 2 and present:
            raise ArgumentValueError(
                "weights", "{weights} have full peepholes, and there is {}; they cannot be combined", other
            )


def problem_of(*key: Any) -> Problem:
    """The checked problem, for the arguments of `_problem`."""
    try:
        return _problem(*key)
    except TypeError:  # an unhashable argument, or a type error from the checks: run them again without the memo
        return _problem.__wrapped__(*key)


def check_fits(steps: int, samples: int, inputs: int, units: int, cells: int, arrays: int = 8) -> None:
    """Raise for sizes that no machine could hold, so that the engine's 64-bit sizes cannot overflow.

    `arrays` is the largest number of arrays of a cell's units, counting each gate.
    """
    rows, width = (steps + 1) * (samples + 1), max(arrays * (units + 32), inputs + 32, 2 * units + 96)
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
        _core.recurrent_slots(ends, active, order)
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


class Sequences(NamedTuple):
    """How the sequences of a call are given, and what happens between layers: arguments that all cells have."""

    table: Array | None = None
    bidirectional: bool = False
    batch_first: bool = False
    lengths: npt.ArrayLike | None = None
    batch_sizes: npt.ArrayLike | None = None
    dropout: float = 0.0
    seed: int = 0


def bind(
    x: Array,
    weights: Weights,
    h0: Array | None,
    c0: Array | None,
    options: CellOptions,
    sequences: Sequences,
    training: bool,
    factors: Factors | None = None,
) -> Inputs:
    """The inputs of a forward pass. Checks what the engine does not."""
    table, bidirectional, batch_first, lengths, batch_sizes, dropout, seed = sequences
    cell = CELL_TYPES[options.cell]
    indices = None
    if table is not None:
        x, indices = _looked_up(x, table, batch_first)
    elif type(x) is not np.ndarray:
        x = _args.as_array("x", x)
    cells, single = as_cells("weights", weights, cell)
    units, projection, peephole = hidden_size(cells[0][1], cell), 0, 0
    if cell.has_cells:
        if cells[0][4] is not None:
            units, projection = projected(cells[0][4], units)
        peephole = peephole_kind(cells, units)
    shape = x.shape if indices is None else (*(indices.shape[::-1] if batch_first else indices.shape), x.shape[1])
    if seed.__class__ is not int or not 0 <= seed < 1 << 64:
        seed = _args.as_seed(seed)
    mask_kind, has_zoneout = (0, False) if factors is None else factors.kinds()
    problem = problem_of(
        shape,
        x.dtype,
        len(cells),
        single,
        units,
        projection,
        bidirectional,
        batch_first,
        peephole,
        mask_kind,
        has_zoneout,
        dropout,
        training,
        options,
    )
    if not problem.norm:
        for parts in cells:
            for part in parts[cell.first_norm :]:
                if part is not None:
                    _refuse_norm(cells, problem)
    active = order = reset = mask = zoneout = cell_zoneout = None
    if lengths is not None or batch_sizes is not None:
        active, order = _ragged(problem.steps, problem.samples, lengths, batch_sizes)
    if factors is not None:
        reset = as_reset(factors, problem)
        mask = as_mask(factors, problem)
        zoneout, cell_zoneout = as_zoneouts(factors, problem, seed, training)
    if problem.norm and indices is not None:
        raise ArgumentValueError(
            "table", "{table} is given, and so is {norm}; they cannot be combined: pass the rows, table[x], as {x}"
        )
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
            seed,
            reset,
            mask,
            zoneout,
            cell_zoneout,
        )
    )


def _refuse_norm(cells: list[Cell], problem: Problem) -> None:
    """Raise for parameters of a norm that is not asked for, and would be ignored."""
    for index, cell in enumerate(cells):
        for name, part in zip(problem.cell.fields, cell, strict=False):
            if name.startswith(("gamma", "beta_c")) and part is not None:
                label = name if problem.single else f"weights[{index}].{name}"
                raise ArgumentValueError(label, "{argument} is given, but {norm} is None")


def projected(projection: Any, outputs: int) -> tuple[int, int]:
    """The number of units, and the size that they are projected to."""
    if projection.ndim != 2:
        raise ArgumentValueError("projection", "{projection} has shape {}, must have 2 axes, (P, H)", projection.shape)
    rows, units = projection.shape
    if not 0 < rows <= units:
        raise ArgumentValueError(
            "projection", "{projection} has shape {}: P must be from 1 to H = {}", projection.shape, units
        )
    if rows != outputs:
        raise ArgumentValueError(
            "projection", "{projection} has {} rows, but {wh} has {} columns; both are P", rows, outputs
        )
    return units, rows


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
    expected = problem.h_shape if name == "h0" else problem.c_shape
    if array.shape != expected:
        size = "P" if name == "h0" and problem.projection else "H"
        axes = f"(N, {size})" if problem.single else f"(cells, N, {size})"
        raise ArgumentValueError(name, "{argument} has shape {}, must be {} = {}", array.shape, axes, expected)
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
    arguments = (inputs, buffer, stamp, y, hn, cn, False, threads)
    _, fixed = enter(RecurrentForward, inputs.problem.engine.forward, arguments, _fixed_forward)
    if fixed is None:
        return inputs
    for array, computed in ((y, fixed.y), (hn, fixed.hn), (cn, fixed.cn)):
        if array is not None and array is not computed:
            array[...] = computed
    return cast(Inputs, fixed.inputs)


def _fixed_forward(_: Refusal, refused: RecurrentForward) -> RecurrentForward:
    inputs, y, hn, cn = cast(Inputs, refused.inputs), refused.y, refused.hn, refused.cn
    checked = checked_inputs(inputs)
    read = {**named_inputs(checked), "h0": inputs.h0, "c0": inputs.c0}
    for state, before, after in (("h0", inputs.h0, hn), ("c0", inputs.c0, cn)):
        if before is not None and after is not None and same_elements(before, after):
            del read[state]
    _args.check_disjoint({"out.y": y, "out.hn": hn, "out.cn": cn, "cache": refused.cache}, read)
    to_y, to_hn, to_cn = (None if a is None else unit_stride(_args.as_plain(a), copy=False) for a in (y, hn, cn))
    return refused._replace(inputs=checked, y=to_y, hn=to_hn, cn=to_cn, overlap_checked=True)


def named_inputs(inputs: Inputs) -> dict[str, Array | None]:
    own = {"x": inputs.x} if inputs.indices is None else {"table": inputs.x, "x": inputs.indices}
    weights = dict(named_arrays("weights", inputs.cells, inputs.problem.cell))
    factors = {"reset": inputs.reset, "mask": inputs.mask, "zoneout": inputs.zoneout}
    return {**own, **weights, **factors, "zoneout of the cell state": inputs.cell_zoneout}


def unit_stride(array: Array, copy: bool = True) -> Array:
    """The array if its last axis is contiguous, else a contiguous copy, or with ``copy=False`` an empty array."""
    if array.shape[-1] <= 1 or array.strides[-1] == array.itemsize:
        return array
    return np.ascontiguousarray(array) if copy else _memory.empty(array.shape, array.dtype)


def checked_inputs(inputs: Inputs) -> Inputs:
    """Raise for an invalid x, state or weight; convert what can be converted."""
    problem, x, indices, cells, h0, c0, active, order, seed, reset, *factors = inputs
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
    others = (active, order, seed, reset, *checked_factors(problem, *factors))
    return new_inputs((problem, unit_stride(x), indices, checked, *states.values(), *others))


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
    gates = problem.cell.gates
    for field, part, tail in zip(problem.cell.fields, cell, problem.columns(index), strict=False):
        name = field if problem.single else f"weights[{index}].{field}"
        needed = field in ("wx", "wh")
        if part is None:
            if needed:
                raise ArgumentValueError(name, "{argument} is None; a cell needs {wx} and {wh} of every gate")
            if field == "projection" and problem.projection:
                raise ArgumentValueError(name, "{argument} is None, but the first cell has one")
            if field.startswith("gamma") and problem.norm:
                raise ArgumentValueError(name, "{argument} is None; {norm} needs it")
        elif type(part) is tuple:
            for gate, array in zip(gates, part, strict=True):
                label = f"{name} of gate {gate}"
                if array is not None:
                    check_parameter(label, array, ((problem.units, *tail),), problem.dtype)
                    _args.check_aligned(label, array)
                elif needed:
                    raise ArgumentValueError(label, "{argument} is None; a cell needs {wx} and {wh} of every gate")
                elif field.startswith("gamma") and problem.norm:
                    raise ArgumentValueError(label, "{argument} is None; {norm} needs it")
            if len({a.strides for a in part if a is not None}) > 1:
                part = tuple(None if a is None else np.ascontiguousarray(a) for a in part)
        else:
            check_parameter(name, part, problem.shapes(field, tail), problem.dtype)
            _args.check_aligned(name, part)
        checked.append(part)
    return tuple(checked)


def check_parameter(name: str, array: Array, shapes: tuple[tuple[int, ...], ...], dtype: np.dtype[Any]) -> None:
    if array.shape not in shapes:
        raise ArgumentValueError(
            name, "{argument} has shape {}, must be {}", array.shape, " or ".join(map(str, dict.fromkeys(shapes)))
        )
    _args.check_dtype(name, array, dtype, "as {x} is")
