"""Recurrent layers in a graph: LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .. import _core
from ..ops._types import Array
from ..ops.activation import Activation
from ..ops.recurrent.problem import Problem, problem_of
from ..ops.recurrent.types import CELL_TYPES, CellOptions, GruActivations, LstmActivations, RnnActivations
from .elementwise import cast, identity
from .indexing import as_seed, refuse_index
from .operation import SLOTS, Operation, Spec
from .operators import Operators
from .reduction import INT64, refuse
from .shaping import broadcast_to, transpose
from .tensor import BOOL, BYTE, Node, Operand, Tensor, apply, fail

_ONCE: Final = "it is a single call of the engine; second derivatives need a loop over steps made of operations"
# The inputs that precede the parameters of the cells.
_X, _TABLE, _H0, _C0, _ACTIVE, _ORDER, _SEED, _RESET, _MASK, _ZONEOUT, _CELL_ZONEOUT, _CELLS = range(12)


class Lstm(NamedTuple):
    """The output of an LSTM, [T, N, D * H], and the last states, [cells, N, H], or [N, H] of a single cell."""

    y: Tensor
    hn: Tensor
    cn: Tensor


class Recurrent(NamedTuple):
    """The output of a GRU or RNN, [T, N, D * H], and the last states, [cells, N, H], or [N, H] of a single cell."""

    y: Tensor
    hn: Tensor


# ---- ragged batches --------------------------------------------------------------------------------------------------


def _slots(inputs: Sequence[Array], results: Sequence[Array], *, steps: int) -> None:
    (lengths,), (active, order) = inputs, results
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= steps and not _recording(lengths):
        worst = lengths.max() if lengths.max() > steps else lengths.min()
        raise IndexError(f"lengths has {worst}, must be from 0 to {steps}, the steps of x")
    _core.recurrent_slots(lengths, active, order)


def _recording(array: Array) -> bool:
    """Whether an array is a program's, whose elements are only known when it runs."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return isinstance(base, _core.Arena)


_SLOTS: Final = Operation(
    SLOTS,
    lambda lengths, *, steps: (Spec((steps,), INT64), Spec(lengths.shape, INT64)),
    compute=_slots,
    why_not="lengths are integers",
)


# ---- the layer -------------------------------------------------------------------------------------------------------


def _problem(inputs: Sequence[Any], options: dict[str, Any]) -> Problem:
    """The engine's problem, for the specs or arrays of the inputs."""
    x, table, mask = inputs[_X], inputs[_TABLE], inputs[_MASK]
    cell_options: CellOptions = options["options"]
    cell = CELL_TYPES[cell_options.cell]
    cells = (len(inputs) - _CELLS) // len(cell.fields)
    first = dict(zip(cell.fields, inputs[_CELLS:], strict=False))
    shape = x.shape
    if table is not None:  # indices have time first
        shape = (*(x.shape[::-1] if options["batch_first"] else x.shape), table.shape[1])
    units, projection, peephole = first["wh"].shape[-1], 0, first.get("peephole")
    if first.get("projection") is not None:
        projection, units = first["projection"].shape
    peephole_kind = 0 if peephole is None else 2 if len(peephole.shape) == 2 else 1
    mask_kind = 0 if mask is None else 2 if len(mask.shape) > 3 and mask.shape[-4] > 1 else 1
    return problem_of(
        shape, (x if table is None else table).dtype, cells, options["single"], units, projection,
        options["bidirectional"], options["batch_first"], peephole_kind, mask_kind, inputs[_ZONEOUT] is not None,
        options["dropout"], True, cell_options,
    )  # fmt: skip


def _factor_shapes(problem: Problem) -> dict[int, tuple[int, ...]]:
    """What the arrays that act inside the recurrence broadcast to, in the engine's order of axes."""
    gates = len(problem.cell.gates) if problem.mask == 2 else 1
    sequence = (problem.steps, problem.samples)
    return {
        _MASK: (problem.cells, gates, *sequence, problem.outputs),
        _ZONEOUT: (problem.cells, *sequence, problem.outputs),
        _CELL_ZONEOUT: (problem.cells, *sequence, problem.units),
    }


def _time_first(shape: tuple[int, ...], batch_first: bool) -> tuple[int, ...]:
    """The shape of a mask with the axes of steps and samples in the engine's order."""
    return (*shape[:-3], shape[-2], shape[-3], shape[-1]) if batch_first and len(shape) >= 3 else shape


def _shapes(*inputs: Spec | None, **options: Any) -> Sequence[Spec]:
    problem = _problem(inputs, options)
    dtype = problem.dtype
    for name, spec, shape in (("h0", inputs[_H0], problem.h_shape), ("c0", inputs[_C0], problem.c_shape)):
        if spec is not None and spec != Spec(shape, dtype):
            raise ValueError(f"{name} is {spec!r}, expected {Spec(shape, dtype)!r}")
    names = {_MASK: "mask", _ZONEOUT: "zoneout", _CELL_ZONEOUT: "zoneout"}
    for place, shape in _factor_shapes(problem).items():
        spec = inputs[place]
        if spec is None:
            continue
        if spec.dtype != dtype:
            raise TypeError(f"{names[place]} has dtype {spec.dtype}, expected {dtype}, as x has")
        try:
            fits = np.broadcast_shapes(_time_first(spec.shape, problem.batch_first), shape) == shape
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"{names[place]} has shape {spec.shape}, which does not broadcast to {shape}")
    if inputs[_CELL_ZONEOUT] is not None and problem.peephole == 2:
        raise ValueError("zoneout has a part for the cell state, and there are full peepholes; they cannot be combined")
    fields = problem.cell.fields
    for cell in range(problem.cells):
        for position, (name, tail) in enumerate(zip(fields, problem.columns(cell), strict=True)):
            spec = inputs[_CELLS + len(fields) * cell + position]
            expected = Spec(problem.shapes(name, tail)[0], dtype)
            if spec is None and (position < 2 or (name == "projection" and problem.projection)):
                raise ValueError(f"{name} of cell {cell} is missing")
            if spec is None and problem.norm and name.startswith("gamma"):
                raise ValueError(f"{name} of cell {cell} is missing; norm needs it")
            if spec is not None and spec != expected:
                raise ValueError(f"{name} of cell {cell} is {spec!r}, expected {expected!r}")
    cache = problem.engine.cache_bytes(problem.steps * problem.samples)
    cn = problem.c_shape if problem.cell.has_cells else (0,)
    return Spec(problem.y_shape, dtype), Spec(problem.h_shape, dtype), Spec(cn, dtype), Spec((cache,), BYTE)


def _engine_inputs(problem: Problem, inputs: Sequence[Any]) -> tuple[Any, ...]:
    x, table, h0, c0, active, order, seed, reset, *factors = inputs[:_CELLS]
    count = len(problem.cell.fields)
    cells = [tuple(inputs[i : i + count]) for i in range(_CELLS, len(inputs), count)]
    sequence = problem.sequence(x) if table is None else table
    indices = None if table is None else x
    turned = [a.swapaxes(-3, -2) if problem.batch_first and a is not None and a.ndim > 2 else a for a in factors]
    bytes_of_reset = None if reset is None else reset.view(np.uint8)
    return (
        problem, sequence, indices, cells, *_states(problem, h0, c0), active, order, 0 if seed is None else seed,
        bytes_of_reset, *turned,
    )  # fmt: skip


def _states(problem: Problem, hidden: Array | None, cell: Array | None) -> tuple[Array | None, Array | None]:
    return None if hidden is None else problem.states(hidden), None if cell is None else problem.states(cell)


def _forward(inputs: Sequence[Array | None], results: Sequence[Array | None], **options: Any) -> None:
    problem = _problem(inputs, options)
    y, hn, cn, cache = results
    sequence = None if y is None else problem.sequence(y)
    states = _states(problem, hn, cn if problem.cell.has_cells else None)
    table = inputs[_TABLE]
    answer = problem.engine.forward(_engine_inputs(problem, inputs), cache, 0, sequence, *states, False, 0)
    refuse_index(answer, None if table is None else inputs[_X], 0 if table is None else table.shape[0])


def _gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    if any(needed[_MASK:_CELLS]):
        raise fail(node.operation.name, "a gradient of mask or zoneout is wanted, which have none; use stop_gradient")
    saved = node.results[3]
    backward = _BACKWARD[node.attributes["options"].cell]
    found = apply(backward, (*given[:3], saved, *node.inputs), node.attributes)
    dx, dh0, dc0, *dcells = found
    table = node.inputs[_TABLE] is not None
    first = [None, dx] if table else [dx, None]
    everything = [*first, dh0, dc0, *[None] * (_CELLS - _ACTIVE), *dcells]
    return [t if wanted else None for t, wanted in zip(everything, needed, strict=True)]


def _flops(inputs: Sequence[Spec], results: Sequence[Spec | None], **options: Any) -> float:
    problem = _problem(inputs, options)
    rows, gates = problem.steps * problem.samples, len(problem.cell.gates)
    widths = (problem.cell_inputs(cell) + problem.outputs for cell in range(problem.cells))
    return float(sum(2 * gates * rows * problem.units * width for width in widths))


def _backward_shapes(dy: Any, dhn: Any, dcn: Any, cache: Any, *inputs: Spec | None, **options: Any) -> Sequence[Spec]:
    problem = _problem(inputs, options)
    hidden, nothing = Spec(problem.h_shape, problem.dtype), Spec((0,), problem.dtype)
    cells = Spec(problem.c_shape, problem.dtype) if problem.cell.has_cells else nothing
    first = inputs[_X] if inputs[_TABLE] is None else inputs[_TABLE]
    assert first is not None
    return first, hidden, cells, *(nothing if spec is None else spec for spec in inputs[_CELLS:])


def _backward(inputs: Sequence[Array | None], results: Sequence[Array | None], **options: Any) -> None:
    dy, dhn, dcn, cache, *forward = inputs
    problem = _problem(forward, options)
    dx, dh0, dc0, *results_of_cells = results
    if not problem.cell.has_cells:
        dcn = dc0 = None
    gradients = [None if w is None else g for w, g in zip(forward[_CELLS:], results_of_cells, strict=True)]
    count = len(problem.cell.fields)
    dcells = [tuple(gradients[i : i + count]) for i in range(0, len(gradients), count)]
    table = forward[_TABLE] is not None
    refuse(
        problem.engine.backward(
            None if dy is None else problem.sequence(dy),
            *_states(problem, dhn, dcn),
            _engine_inputs(problem, forward),
            cache,
            None,
            dx if dx is None or table else problem.sequence(dx),
            dcells if any(a is not None for a in gradients) else None,
            *_states(problem, dh0, dc0),
            False,
            False,
            0,
        )
    )


_FORWARD: Final = {
    name: Operation(name, _shapes, compute=_forward, gradient=_gradient, optional=(0, 1, 2, 3), flops=_flops)
    for name in CELL_TYPES
}
_BACKWARD: Final = {
    name: Operation(
        f"{name}_backward", _backward_shapes, compute=_backward, optional=range(4096), why_not=_ONCE,
        flops=lambda inputs, results, **options: 2 * _flops(inputs[4:], results, **options),
    )
    for name in CELL_TYPES
}  # fmt: skip


class _Sequences(NamedTuple):
    """The arguments that all cells have."""

    table: Operand | None
    bidirectional: bool
    batch_first: bool
    lengths: Operand | None
    reset: Operand | None
    mask: Operand | None
    dropout: float
    seed: Operand


def _apply(
    x: Operand, weights: Any, h0: Any, c0: Any, zoneouts: tuple[Any, Any], given: _Sequences, options: CellOptions
) -> Sequence[Tensor]:
    table, bidirectional, batch_first, lengths, reset, mask, dropout, seed = given
    name, kind = options.cell, CELL_TYPES[options.cell]
    single = isinstance(weights, kind.weights) or (
        isinstance(weights, tuple) and len(weights) > 0 and isinstance(weights[0], (Operators, np.ndarray))
    )
    if weights is None or isinstance(weights, (Operators, np.ndarray)):
        what = "None" if weights is None else f"one array of shape {weights.shape}"
        raise fail(name, f"weights is {what}, must be a tuple such as {kind.weights.__name__}(wx, wh, b)", TypeError)
    cells = [kind.weights(*cell) for cell in ([weights] if single else weights)]
    if not cells:
        raise fail(name, "weights is empty, needs at least one cell")
    for cell in cells:
        if any(isinstance(part, (tuple, list)) for part in cell):
            raise fail(name, "weights of a graph are one tensor for all gates; join them with concatenate", TypeError)
    sequence = identity(x)
    if sequence.ndim != (3 if table is None else 2):
        axes = ("(N, T, I)" if batch_first else "(T, N, I)") if table is None else "(T, N), as there is a table"
        raise fail(name, f"x has shape {sequence.shape}, must have the axes {axes}")
    active: Any = None
    order: Any = None
    if lengths is not None:
        steps, samples = sequence.shape[1 if batch_first else 0], sequence.shape[0 if batch_first else 1]
        ends = identity(lengths)
        if ends.dtype.kind != "i":
            raise fail(name, f"lengths has dtype {ends.dtype}, must be integers", TypeError)
        ends = cast(ends, INT64)
        if ends.shape != (samples,):
            raise fail(name, f"lengths has shape {ends.shape}, expected {(samples,)}: x has {samples} samples")
        active, order = apply(_SLOTS, (ends,), {"steps": steps})
    cuts: Any = None
    if reset is not None:
        cuts = cast(identity(reset), BOOL)
        if cuts.shape != sequence.shape[:2]:
            raise fail(name, f"reset has shape {cuts.shape}, expected {sequence.shape[:2]}, as x has")
        if bidirectional:
            raise fail(name, "reset is given, but layers are bidirectional; it has one direction of time")
        if batch_first:
            cuts = transpose(cuts)
    if table is not None:
        if options.norm is not None:
            raise fail(name, "table is given, and so is norm; they cannot be combined: pass the rows as x")
        sequence = cast(sequence, INT64)
        if batch_first:
            sequence = transpose(sequence)
    rate = float(dropout) if len(cells) > (2 if bidirectional else 1) else 0.0
    attributes = {
        "single": single, "bidirectional": bool(bidirectional), "batch_first": bool(batch_first), "dropout": rate,
        "options": options,
    }  # fmt: skip
    parts: list[Any] = [part for cell in cells for part in cell]
    number = as_seed(seed) if rate else None
    first_cell: Any = cells[0]
    outputs, projection = first_cell.wh.shape[-1], getattr(first_cell, "projection", None)
    units = outputs if projection is None else projection.shape[-1]
    factors = [_wide(a, width) for a, width in zip((mask, *zoneouts), (outputs, outputs, units), strict=True)]
    first = (sequence, table, h0, c0, active, order, number, cuts, *factors)
    return apply(_FORWARD[name], (*first, *parts), attributes)


def _wide(factor: Operand | None, width: int) -> Tensor | None:
    """A mask or weights with one element for each unit, which the engine reads in order."""
    if factor is None:
        return None
    tensor = identity(factor)
    return broadcast_to(tensor, (*tensor.shape[:-1], width)) if tensor.shape[-1:] in ((), (1,)) else tensor


def lstm(
    x: Operand,
    weights: Any,
    h0: Operand | None = None,
    c0: Operand | None = None,
    *,
    table: Operand | None = None,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: Operand | None = None,
    activations: LstmActivations = LstmActivations(),  # noqa: B008 (immutable)
    output_gate_reads: str = "new",
    coupled: bool = False,
    clip: float | None = None,
    cell_clip: float | None = None,
    norm: str | None = None,
    norm_eps: float = 1e-5,
    reset: Operand | None = None,
    mask: Operand | None = None,
    zoneout: Operand | tuple[Operand | None, Operand | None] | None = None,
    dropout: float = 0.0,
    seed: Operand = 0,
) -> Lstm:
    """An LSTM over x [T, N, I], or integers [T, N] that select rows of `table`, as :func:`retrograd.lstm_forward`.

    `weights` is an LstmWeights of tensors wx [4H, I], wh [4H, H], b [4H] and so on, or a list of them, one for each
    layer and direction. `lengths` [N], int64, are the steps of each sample. `zoneout` holds the weights of the new
    states, not rates.
    """
    options = CellOptions(
        "lstm", activations, "after", False, output_gate_reads, bool(coupled), clip, cell_clip, norm, norm_eps
    )
    zoneouts = zoneout if isinstance(zoneout, tuple) else (zoneout, None)
    given = _Sequences(table, bidirectional, batch_first, lengths, reset, mask, dropout, seed)
    return Lstm(*_apply(x, weights, h0, c0, zoneouts, given, options)[:3])


def gru(
    x: Operand,
    weights: Any,
    h0: Operand | None = None,
    *,
    kind: str = "after",
    flip: bool = False,
    table: Operand | None = None,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: Operand | None = None,
    activations: GruActivations = GruActivations(),  # noqa: B008 (immutable)
    clip: float | None = None,
    norm: str | None = None,
    norm_eps: float = 1e-5,
    reset: Operand | None = None,
    mask: Operand | None = None,
    zoneout: Operand | None = None,
    dropout: float = 0.0,
    seed: Operand = 0,
) -> Recurrent:
    """A GRU over x [T, N, I], or integers [T, N] that select rows of `table`, as :func:`retrograd.gru_forward`.

    `weights` is a GruWeights of tensors wx [3H, I], wh [3H, H], b and bh [3H], or a list of them, one for each layer
    and direction. `lengths` and `zoneout` are as in :func:`lstm`.
    """
    options = CellOptions("gru", activations, kind, bool(flip), "new", False, clip, None, norm, norm_eps)
    given = _Sequences(table, bidirectional, batch_first, lengths, reset, mask, dropout, seed)
    return Recurrent(*_apply(x, weights, h0, None, (zoneout, None), given, options)[:2])


def rnn(
    x: Operand,
    weights: Any,
    h0: Operand | None = None,
    *,
    activation: str | Activation = "tanh",
    table: Operand | None = None,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: Operand | None = None,
    clip: float | None = None,
    norm: str | None = None,
    norm_eps: float = 1e-5,
    reset: Operand | None = None,
    mask: Operand | None = None,
    zoneout: Operand | None = None,
    dropout: float = 0.0,
    seed: Operand = 0,
) -> Recurrent:
    """An RNN over x [T, N, I], or integers [T, N] that select rows of `table`, as :func:`retrograd.rnn_forward`.

    `weights` is a RnnWeights of tensors wx [H, I], wh [H, H] and b [H], or a list of them, one for each layer and
    direction. `lengths` and `zoneout` are as in :func:`lstm`.
    """
    options = CellOptions("rnn", RnnActivations(activation), "after", False, "new", False, clip, None, norm, norm_eps)
    given = _Sequences(table, bidirectional, batch_first, lengths, reset, mask, dropout, seed)
    return Recurrent(*_apply(x, weights, h0, None, (zoneout, None), given, options)[:2])
