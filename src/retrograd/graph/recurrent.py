"""LSTMs in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .. import _core
from ..ops._types import Array
from ..ops.lstm.problem import problem_of
from ..ops.lstm.types import LstmActivations, LstmWeights
from .elementwise import cast, identity
from .indexing import as_seed, refuse_index
from .operation import Operation, Spec
from .operators import Operators
from .reduction import INT64, refuse
from .shaping import transpose
from .tensor import BYTE, Node, Operand, Tensor, apply, fail

_ONCE: Final = "it is a single call of the engine; second derivatives need a loop over steps made of operations"
# The inputs that precede the cells' wx, wh, b and peephole.
_X, _TABLE, _H0, _C0, _ACTIVE, _ORDER, _SEED, _CELLS = range(8)


class Lstm(NamedTuple):
    """The output of an LSTM, [T, N, D * H], and the last states, [cells, N, H], or [N, H] of a single cell."""

    y: Tensor
    hn: Tensor
    cn: Tensor


# ---- ragged batches --------------------------------------------------------------------------------------------------


def _slots(inputs: Sequence[Array], results: Sequence[Array], *, steps: int) -> None:
    (lengths,), (active, order) = inputs, results
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= steps and not _recording(lengths):
        raise IndexError(f"lengths has {lengths.min()} to {lengths.max()}, must be from 0 to {steps}")
    _core.lstm_slots(lengths, active, order)


def _recording(array: Array) -> bool:
    """Whether an array is a program's, whose elements are only known when it runs."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return isinstance(base, _core.Arena)


_SLOTS: Final = Operation(
    "lstm_slots",
    lambda lengths, *, steps: (Spec((steps,), INT64), Spec(lengths.shape, INT64)),
    compute=_slots,
    why_not="lengths are integers",
)


# ---- the layer -------------------------------------------------------------------------------------------------------


def _problem(inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """The engine's problem, for the specs or arrays of the inputs."""
    x, table = inputs[_X], inputs[_TABLE]
    cells = (len(inputs) - _CELLS) // 4
    shape = x.shape
    if table is not None:  # indices have time first
        shape = (*(x.shape[::-1] if options["batch_first"] else x.shape), table.shape[1])
    wh = inputs[_CELLS + 1]
    units = wh.shape[-1]
    peephole = inputs[_CELLS + 3]
    kind = 0 if peephole is None else 2 if len(peephole.shape) == 2 else 1
    return problem_of(
        shape, (x if table is None else table).dtype, cells, options["single"], units, options["bidirectional"],
        options["batch_first"], options["activations"], kind, options["reads"], options["dropout"], True,
    )  # fmt: skip


def _shapes(*inputs: Spec | None, **options: Any) -> Sequence[Spec]:
    problem = _problem(inputs, options)
    dtype = problem.dtype
    for name, spec in (("h0", inputs[_H0]), ("c0", inputs[_C0])):
        if spec is not None and spec != Spec(problem.state_shape, dtype):
            raise ValueError(f"{name} is {spec!r}, expected {Spec(problem.state_shape, dtype)!r}")
    for cell in range(problem.cells):
        columns = problem.columns(cell)
        for name, position, tail in zip(LstmWeights._fields, range(4), columns, strict=True):
            spec = inputs[_CELLS + 4 * cell + position]
            expected = Spec((4 * problem.units, *tail), dtype)
            if spec is None and position < 2:
                raise ValueError(f"{name} of cell {cell} is missing")
            if spec is not None and spec != expected:
                raise ValueError(f"{name} of cell {cell} is {spec!r}, expected {expected!r}")
    state = Spec(problem.state_shape, dtype)
    cache = problem.engine.cache_bytes(problem.steps * problem.samples)
    return Spec(problem.y_shape, dtype), state, state, Spec((cache,), BYTE)


def _engine_inputs(problem: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
    x, table, h0, c0, active, order, seed = inputs[:_CELLS]
    cells = [tuple(inputs[i : i + 4]) for i in range(_CELLS, len(inputs), 4)]
    sequence = problem.sequence(x) if table is None else table
    indices = None if table is None else x
    states = [None if a is None else problem.states(a) for a in (h0, c0)]
    return (problem, sequence, indices, cells, *states, active, order, 0 if seed is None else seed)


def _states(problem: Any, arrays: Sequence[Array | None]) -> list[Any]:
    return [None if a is None else problem.states(a) for a in arrays]


def _forward(inputs: Sequence[Array | None], results: Sequence[Array | None], **options: Any) -> None:
    problem = _problem(inputs, options)
    y, hn, cn, cache = results
    sequence = None if y is None else problem.sequence(y)
    states = _states(problem, (hn, cn))
    refuse_index(
        problem.engine.forward(_engine_inputs(problem, inputs), cache, 0, sequence, *states, False, 0)
    )  # fmt: skip


def _gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    saved = node.results[3]
    found = apply(_BACKWARD, (*given[:3], saved, *node.inputs), node.attributes)
    dx, dh0, dc0, *dcells = found
    table = node.inputs[_TABLE] is not None
    first = [None, dx] if table else [dx, None]
    everything = [*first, dh0, dc0, None, None, None, *dcells]
    return [t if wanted else None for t, wanted in zip(everything, needed, strict=True)]


def _flops(inputs: Sequence[Spec], results: Sequence[Spec | None], **options: Any) -> float:
    problem = _problem(inputs, options)
    rows = problem.steps * problem.samples
    return float(
        sum(8 * rows * problem.units * (problem.cell_inputs(c) + problem.units) for c in range(problem.cells))
    )  # fmt: skip


_LSTM: Final = Operation(
    "lstm", _shapes, compute=_forward, gradient=_gradient, optional=(0, 1, 2, 3), flops=_flops
)  # fmt: skip


def _backward_shapes(dy: Any, dhn: Any, dcn: Any, cache: Any, *inputs: Spec | None, **options: Any) -> Sequence[Spec]:
    problem = _problem(inputs, options)
    state = Spec(problem.state_shape, problem.dtype)
    first = inputs[_X] if inputs[_TABLE] is None else inputs[_TABLE]
    assert first is not None
    nothing = Spec((0,), problem.dtype)
    return first, state, state, *(nothing if spec is None else spec for spec in inputs[_CELLS:])


def _backward(inputs: Sequence[Array | None], results: Sequence[Array | None], **options: Any) -> None:
    dy, dhn, dcn, cache, *forward = inputs
    problem = _problem(forward, options)
    dx, dh0, dc0, *results_of_cells = results
    gradients = [None if w is None else g for w, g in zip(forward[_CELLS:], results_of_cells, strict=True)]
    dcells = [tuple(gradients[i : i + 4]) for i in range(0, len(gradients), 4)]
    table = forward[_TABLE] is not None
    refuse(
        problem.engine.backward(
            None if dy is None else problem.sequence(dy),
            *_states(problem, (dhn, dcn)),
            _engine_inputs(problem, forward),
            cache,
            None,
            dx if dx is None or table else problem.sequence(dx),
            dcells if any(a is not None for a in gradients) else None,
            *_states(problem, (dh0, dc0)),
            False,
            False,
            0,
        )
    )


_BACKWARD: Final = Operation(
    "lstm_backward", _backward_shapes, compute=_backward, optional=range(4096), why_not=_ONCE,
    flops=lambda inputs, results, **options: 2 * _flops(inputs[4:], results, **options),
)  # fmt: skip


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
    dropout: float = 0.0,
    seed: Operand = 0,
) -> Lstm:
    """An LSTM over x [T, N, I], or integers [T, N] that select rows of `table`, as :func:`retrograd.lstm_forward`.

    `weights` is an LstmWeights of tensors wx [4H, I], wh [4H, H], b [4H] and a peephole, or a list of them, one for
    each layer and direction. `lengths` [N], int64, are the steps of each sample.
    """
    single = isinstance(weights, LstmWeights) or (
        isinstance(weights, tuple) and len(weights) > 0 and isinstance(weights[0], (Operators, np.ndarray))
    )
    cells = [LstmWeights(*cell) for cell in ([weights] if single else weights)]
    if not cells:
        raise fail("lstm", "weights is empty, needs at least one cell")
    for cell in cells:
        if any(isinstance(part, (tuple, list)) for part in cell):
            raise fail("lstm", "weights of a graph are one tensor for all gates; join them with concatenate", TypeError)
    sequence = identity(x)
    if sequence.ndim != (3 if table is None else 2):
        axes = ("(N, T, I)" if batch_first else "(T, N, I)") if table is None else "(T, N), as there is a table"
        raise fail("lstm", f"x has shape {sequence.shape}, must have the axes {axes}")
    active: Any = None
    order: Any = None
    if lengths is not None:
        steps, samples = sequence.shape[1 if batch_first else 0], sequence.shape[0 if batch_first else 1]
        ends = cast(identity(lengths), INT64)
        if ends.shape != (samples,):
            raise fail("lstm", f"lengths has shape {ends.shape}, expected {(samples,)}: x has {samples} samples")
        active, order = apply(_SLOTS, (ends,), {"steps": steps})
    if table is not None:
        sequence = cast(sequence, INT64)
        if batch_first:
            sequence = transpose(sequence)
    rate = float(dropout) if len(cells) > (2 if bidirectional else 1) else 0.0
    options = {
        "single": single, "bidirectional": bool(bidirectional), "batch_first": bool(batch_first),
        "activations": activations, "reads": output_gate_reads, "dropout": rate,
    }  # fmt: skip
    parts: list[Any] = [part for cell in cells for part in cell]
    number = as_seed(seed) if rate else None
    found = apply(_LSTM, (sequence, table, h0, c0, active, order, number, *parts), options)
    return Lstm(*found[:3])
