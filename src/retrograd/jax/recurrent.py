"""Recurrent layers: LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import _args
from ..ops._call import named
from ..ops._errors import ArgumentTypeError, ArgumentValueError
from ..ops.activation import Activation
from ..ops.recurrent.problem import Problem, as_counts, check_parameter, problem_of, projected
from ..ops.recurrent.types import (
    CELL_TYPES,
    CellOptions,
    CellType,
    GruActivations,
    LstmActivations,
    RnnActivations,
)
from ..ops.recurrent.weights import hidden_size, peephole_kind
from ._ffi import BYTE, Static, as_operand, call, is_perturbed, nonzero, values


class LstmOutput(NamedTuple):
    """The output of the last layer, and the final states of every cell."""

    y: jax.Array
    hn: jax.Array
    cn: jax.Array


class GruOutput(NamedTuple):
    """The output of the last layer, and the final state of every cell."""

    y: jax.Array
    hn: jax.Array


class RnnOutput(NamedTuple):
    """The output of the last layer, and the final state of every cell."""

    y: jax.Array
    hn: jax.Array


_Function = TypeVar("_Function", bound=Callable[..., Any])
# Arguments of the array functions that these do not have.
_ABSENT: Final = {
    "table": "x holds the inputs themselves; pass table[x], which has a gradient",
    "batch_sizes": "pass lengths, one per sample",
    "training": "jax.grad saves what backward needs, and nothing else does; dropout and zoneout are arguments",
    "recompute": "jax.checkpoint recomputes what backward needs",
    "cache": "XLA keeps the memory of caches",
    "out": "results are new arrays; jax.jit with donate_argnums reuses memory",
}


def _with_reasons(function: _Function) -> _Function:
    """Say of arguments that only the array function has what there is instead."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        for name in options.keys() & _ABSENT.keys():
            raise ArgumentTypeError(name, f"{{argument}} is not an argument under JAX: {_ABSENT[name]}")
        return function(*arguments, **options)

    return cast(_Function, call)


@named
@_with_reasons
def lstm(
    x: Any,
    weights: Any,
    h0: Any = None,
    c0: Any = None,
    *,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: Any = None,
    activations: LstmActivations = LstmActivations(),  # noqa: B008 (immutable)
    output_gate_reads: Literal["new", "old"] = "new",
    coupled: bool = False,
    clip: float | None = None,
    cell_clip: float | None = None,
    norm: Literal["haste", "cell"] | None = None,
    norm_eps: float = 1e-5,
    reset: Any = None,
    mask: Any = None,
    zoneout: Any = None,
    dropout: float = 0.0,
    seed: Any = 0,
    num_threads: int | None = None,
) -> LstmOutput:
    """Run an LSTM over ``x [T, N, I]`` (``[N, T, I]`` if `batch_first`).

    `weights` is the :class:`~retrograd.LstmWeights` of a single cell, with states ``[N, H]``; or a sequence of them,
    one per layer and direction (layer-major), with states ``[cells, N, H]``. States default to 0. Each parameter is one
    array with all gates, ``[4H, ...]`` or ``[4, H, ...]``. With a `projection` ``[P, H]`` the hidden state has P
    elements.

    `lengths` (``[N]``, any order, 0 allowed) gives the length of each sample's sequence. Inactive samples have output 0
    and keep their states. `reset` (``[T, N]``, ``[N, T]`` if `batch_first`) sets the states to 0 before the steps where
    it is not 0. `mask` multiplies the hidden state in the recurrent products; it broadcasts to
    ``[cells, gates, T, N, H]``. `zoneout` is the rate of units of the hidden state that keep their old value, or a pair
    of rates, also of the cell state. An array instead of a rate, which broadcasts to ``[cells, T, N, H]``, holds the
    weights of the new state: in evaluation ``jnp.array([1 - rate])``. `dropout` is the fraction of outputs dropped
    between layers. The same `seed` drops and keeps the same elements. Lengths, resets, masks, weights and the seed may
    be traced; none of them has a gradient. All options mean what they mean in :func:`retrograd.lstm_forward`.
    """
    options = CellOptions(
        "lstm", activations, "after", False, output_gate_reads, bool(coupled), clip, cell_clip, norm, norm_eps
    )
    sequences = _Sequences(bidirectional, batch_first, lengths, reset, mask, zoneout, dropout, seed)
    return LstmOutput(*_run(options, x, weights, h0, c0, sequences, num_threads))


@named
@_with_reasons
def gru(
    x: Any,
    weights: Any,
    h0: Any = None,
    *,
    kind: Literal["after", "before"] = "after",
    flip: bool = False,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: Any = None,
    activations: GruActivations = GruActivations(),  # noqa: B008 (immutable)
    clip: float | None = None,
    norm: Literal["haste"] | None = None,
    norm_eps: float = 1e-5,
    reset: Any = None,
    mask: Any = None,
    zoneout: Any = None,
    dropout: float = 0.0,
    seed: Any = 0,
    num_threads: int | None = None,
) -> GruOutput:
    """Run a GRU over ``x [T, N, I]`` (``[N, T, I]`` if `batch_first`).

    `weights` is the :class:`~retrograd.GruWeights` of a single cell or a sequence of them, gates in the order r z n.
    The reset gate acts "after" the product with the state, as in PyTorch, or "before" it (`kind`). With `flip` the gate
    z weighs the new state, not the old one. All other arguments are those of :func:`lstm`.
    """
    options = CellOptions("gru", activations, kind, bool(flip), "new", False, clip, None, norm, norm_eps)
    sequences = _Sequences(bidirectional, batch_first, lengths, reset, mask, zoneout, dropout, seed)
    return GruOutput(*_run(options, x, weights, h0, None, sequences, num_threads))


@named
@_with_reasons
def rnn(
    x: Any,
    weights: Any,
    h0: Any = None,
    *,
    activation: str | Activation = "tanh",
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: Any = None,
    clip: float | None = None,
    norm: Literal["haste"] | None = None,
    norm_eps: float = 1e-5,
    reset: Any = None,
    mask: Any = None,
    zoneout: Any = None,
    dropout: float = 0.0,
    seed: Any = 0,
    num_threads: int | None = None,
) -> RnnOutput:
    """Run an RNN, ``h = f(x wx' + h wh' + b)``, over ``x [T, N, I]`` (``[N, T, I]`` if `batch_first`).

    `weights` is the :class:`~retrograd.RnnWeights` of a single cell or a sequence of them, `activation` is f. All other
    arguments are those of :func:`lstm`.
    """
    options = CellOptions("rnn", RnnActivations(activation), "after", False, "new", False, clip, None, norm, norm_eps)
    sequences = _Sequences(bidirectional, batch_first, lengths, reset, mask, zoneout, dropout, seed)
    return RnnOutput(*_run(options, x, weights, h0, None, sequences, num_threads))


class _Sequences(NamedTuple):
    """The arguments that all cells have, unchecked."""

    bidirectional: bool
    batch_first: bool
    lengths: Any
    reset: Any
    mask: Any
    zoneout: Any
    dropout: float
    seed: Any


def _run(
    options: CellOptions, x: Any, weights: Any, h0: Any, c0: Any, sequences: _Sequences, num_threads: int | None
) -> list[jax.Array]:
    """y and the final states."""
    cell = CELL_TYPES[options.cell]
    x = as_operand("x", x)
    cells, single = _as_cells(weights, cell)
    units, projection, peephole = hidden_size(cells[0][1], cell), 0, 0
    if cell.has_cells:
        own = cells[0][cell.fields.index("projection")]
        units, projection = (units, 0) if own is None else projected(own, units)
        peephole = peephole_kind(cells, units)
    mask = None if sequences.mask is None else as_operand("mask", sequences.mask)
    zoneout = _zoneout_parts(sequences.zoneout, cell, peephole)
    problem = problem_of(
        x.shape,
        x.dtype,
        len(cells),
        single,
        units,
        projection,
        bool(sequences.bidirectional),
        bool(sequences.batch_first),
        peephole,
        0 if mask is None else 2 if mask.ndim > 3 and mask.shape[-4] > 1 else 1,
        zoneout[0] is not None,
        sequences.dropout,
        True,
        options,
    )
    compared = problem._replace(engine=cast(Any, None))  # by value: the engine of an equal problem is another object
    states = {"h0": h0, "c0": c0} if cell.has_cells else {"h0": h0}
    steps = (problem.steps, problem.samples)
    gates = len(cell.gates) if problem.mask == 2 else 1
    rates = tuple(part if isinstance(part, float) else -1.0 for part in zoneout)
    y, *final = _compiled(
        _Options(compared, problem.cache_bytes(None), _args.thread_count(num_threads), rates),
        x,
        tuple(_checked_cell(problem, index, parts) for index, parts in enumerate(cells)),
        tuple(_state(name, state, problem) for name, state in states.items()),
        _as_lengths(sequences.lengths, problem),
        _as_reset(sequences.reset, problem),
        _as_seed(sequences.seed) if problem.dropout or max(rates) >= 0 else None,
        _as_factor("mask", mask, (problem.cells, gates, *steps, problem.outputs), problem),
        tuple(
            None if isinstance(part, float) else _as_factor("zoneout", part, (problem.cells, *steps, width), problem)
            for part, width in zip(zoneout, (problem.outputs, problem.units), strict=True)
        ),
    )
    return [y, *(a.reshape(shape) for a, shape in zip(final, (problem.h_shape, problem.c_shape), strict=False))]


# ---- arguments ------------------------------------------------------------------------------------------------------


def _as_cells(weights: Any, cell: CellType) -> tuple[list[tuple[Any, ...]], bool]:
    """The parameters of every cell, and whether a single cell was given rather than a sequence."""
    if isinstance(weights, cell.weights):
        return [_as_cell("weights", weights, cell)], True
    if not isinstance(weights, (list, tuple)) or hasattr(weights, "_fields"):
        raise ArgumentTypeError(
            "weights", "{weights} must be {} or a sequence of them, not {}", cell.weights, type(weights)
        )
    if not weights:
        raise ArgumentValueError("weights", "{weights} is empty, needs at least 1 cell")
    return [_as_cell(f"weights[{index}]", parts, cell) for index, parts in enumerate(weights)], False


def _as_cell(name: str, parts: Any, cell: CellType) -> tuple[Any, ...]:
    if not isinstance(parts, cell.weights):
        raise ArgumentTypeError(name, "{argument} must be {}, not {}", cell.weights, type(parts))
    for field, part in zip(cell.fields, parts, strict=True):
        if isinstance(part, (list, tuple)):
            raise ArgumentTypeError(
                f"{name}.{field}",
                "{argument} is a sequence of {} arrays, must be one array with all gates: jax.numpy.concatenate "
                "makes one",
                len(part),
            )
    return tuple(
        None if part is None else as_operand(f"{name}.{field}", part)
        for field, part in zip(cell.fields, parts, strict=True)
    )


def _checked_cell(problem: Problem, index: int, cell: tuple[Any, ...]) -> tuple[Any, ...]:
    """Every parameter with the rows of all gates in one axis."""
    checked: list[jax.Array | None] = []
    for field, part, columns in zip(problem.cell.fields, cell, problem.columns(index), strict=True):
        name = field if problem.single else f"weights[{index}].{field}"
        if part is None:
            if field in ("wx", "wh"):
                raise ArgumentValueError(name, "{argument} is None; a cell needs {wx} and {wh}")
            if field == "projection" and problem.projection:
                raise ArgumentValueError(name, "{argument} is None, but the first cell has one")
            if field.startswith("gamma") and problem.norm:
                raise ArgumentValueError(name, "{argument} is None; {norm} needs it")
            checked.append(None)
            continue
        if field == "projection" and not problem.projection:
            raise ArgumentValueError(name, "{argument} is given, but the first cell has none")
        if field.startswith(("gamma", "beta")) and not problem.norm:
            raise ArgumentValueError(name, "{argument} is given, but {norm} is None")
        shapes = problem.shapes(field, columns)
        check_parameter(name, part, shapes, problem.dtype)
        checked.append(part.reshape(shapes[0]))
    return tuple(checked)


def _state(name: str, value: Any, problem: Problem) -> jax.Array | None:
    if value is None:
        return None
    array = as_operand(name, value)
    expected, size = (problem.c_shape, "H") if name == "c0" else (problem.h_shape, "P" if problem.projection else "H")
    if array.shape != expected:
        axes = f"(N, {size})" if problem.single else f"(cells, N, {size})"
        raise ArgumentValueError(name, "{argument} has shape {}, must be {} = {}", array.shape, axes, expected)
    _args.check_dtype(name, array, problem.dtype, "as {x} is")
    return array.reshape(problem.cells, problem.samples, expected[-1])


def _as_lengths(lengths: Any, problem: Problem) -> jax.Array | None:
    """Traced lengths are checked by the handler when their values are known."""
    if lengths is None:
        return None
    if not isinstance(lengths, jax.Array):
        lengths = as_counts("lengths", lengths, problem.samples, "samples", problem.steps, "steps")
    if lengths.dtype.kind not in "iu":
        raise ArgumentTypeError("lengths", "{lengths} has dtype {}; it must be of integers", lengths.dtype)
    if lengths.shape != (problem.samples,):
        raise ArgumentValueError(
            "lengths",
            "{lengths} has shape {}, must be {}: {x} has {} samples",
            lengths.shape,
            (problem.samples,),
            problem.samples,
        )
    return jnp.asarray(lengths, jnp.int64 if jax.config.jax_enable_x64 else jnp.int32)


def _as_reset(reset: Any, problem: Problem) -> jax.Array | None:
    """[T, N], bytes."""
    if reset is None:
        return None
    given = as_operand("reset", reset)
    expected = problem.x_shape[:2]
    if given.shape != expected:
        axes = "(N, T)" if problem.batch_first else "(T, N)"
        raise ArgumentValueError("reset", "{reset} has shape {}, must be {} = {}", given.shape, axes, expected)
    if given.dtype.kind not in "biuf":
        raise ArgumentTypeError("reset", "{reset} has dtype {}; it must be of booleans or numbers", given.dtype)
    if problem.directions == 2:
        raise ArgumentValueError(
            "reset", "{reset} is given, but layers are bidirectional; it has one direction of time"
        )
    bytes_ = (given != 0).astype(BYTE)
    return bytes_.T if problem.batch_first else bytes_


def _zoneout_parts(zoneout: Any, cell: CellType, peephole: int) -> tuple[Any, Any]:
    """Rates or arrays, of the hidden and the cell state; each may be None."""
    given = zoneout if isinstance(zoneout, tuple) else (zoneout, None)
    if len(given) != 2:
        raise ArgumentValueError(
            "zoneout", "{zoneout} has {} parts, must have 2, for the hidden and the cell state", len(given)
        )
    if given[1] is not None and not cell.has_cells:
        raise ArgumentValueError("zoneout", "{zoneout} has a part for the cell state, which {} has not", cell.title)
    if given[1] is not None and peephole == 2:
        raise ArgumentValueError(
            "zoneout",
            "{zoneout} has a part for the cell state, and {weights} have full peepholes; they cannot be combined",
        )
    hidden, own = (None if part is None else _rate_or_array(part) for part in given)
    return hidden, own


def _rate_or_array(part: Any) -> Any:
    if not isinstance(part, (int, float, np.generic)):
        array = as_operand("zoneout", part)
        if array.ndim:
            return array
        if isinstance(array, jax.core.Tracer):
            raise ArgumentTypeError(
                "zoneout", "{zoneout} is a traced rate; pass a number, or weights of the new state with an axis"
            )
        part = array
    rate = _args.as_number("zoneout", part)
    if not 0 <= rate < 1:
        raise ArgumentValueError("zoneout", "{zoneout} is {}, must be at least 0 and below 1", rate)
    return float(rate)


def _as_factor(name: str, array: Any, shape: tuple[int, ...], problem: Problem) -> jax.Array | None:
    """What the engine broadcasts to `shape`, which has time before samples."""
    if array is None:
        return None
    _args.check_dtype(name, array, problem.dtype, "as {x} is")
    own = (*shape[:-3], shape[-2], shape[-3], shape[-1]) if problem.batch_first else shape
    pairs = zip(array.shape[::-1], own[::-1], strict=False)
    if array.ndim > len(own) or any(extent not in (1, wanted) for extent, wanted in pairs):
        axes = (*("cells", "gates")[: len(shape) - 3], *(("N", "T") if problem.batch_first else ("T", "N")), "H")
        raise ArgumentValueError(
            name,
            "{argument} has shape {}, which does not broadcast to {} = {}",
            array.shape,
            f"({', '.join(axes)})",
            own,
        )
    if problem.batch_first and array.ndim >= 3:
        array = jnp.swapaxes(array, -3, -2)
    # The engine does not broadcast units.
    return jnp.broadcast_to(array, (*array.shape[:-1], shape[-1]))


def _as_seed(seed: Any) -> jax.Array:
    bits = 64 if jax.config.jax_enable_x64 else 32
    if not isinstance(seed, jax.Array):
        seed = _args.as_seed(seed)
        if seed >> bits:
            raise ArgumentValueError("seed", "{seed} is {}, must be below 2**32: jax_enable_x64 is not set", seed)
        return jnp.asarray(np.array(seed, f"uint{bits}"))
    if seed.shape or seed.dtype.kind not in "iu":
        raise ArgumentTypeError(
            "seed", "{seed} has dtype {} and shape {}; it must be one integer", seed.dtype, seed.shape
        )
    return seed.astype(f"uint{bits}")


# ---- calls ----------------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """What is known while tracing."""

    problem: Problem  # without its engine
    cache_bytes: int
    threads: int
    zoneout: tuple[float, ...]  # rates, of the hidden and the cell state; -1: none, or weights are given

    @property
    def attributes(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "kind": problem.code,
            "units": problem.units,
            "projection": problem.projection,
            "layers": problem.layers,
            "directions": problem.directions,
            "activations": np.array(problem.activations, np.float64).reshape(-1),
            "peephole": problem.peephole,
            "output_reads_old": problem.output_reads_old,
            "coupled": problem.coupled,
            "flip": problem.flip,
            "clip": problem.clip,
            "cell_clip": problem.cell_clip,
            "norm": problem.norm,
            "eps": problem.norm_eps,
            "mask_kind": problem.mask,
            "has_zoneout": problem.zoneout,
            "zoneout_rate": self.zoneout[0],
            "cell_zoneout_rate": self.zoneout[1],
            "dropout": problem.dropout,
            "batch_first": problem.batch_first,
        }


def _named(problem: Problem, cells: Any, prefix: str = "") -> dict[str, Any]:
    return {
        f"{prefix}{field}{index}": part
        for index, cell in enumerate(cells)
        for field, part in zip(problem.cell.fields, cell, strict=True)
    }


def _state_shapes(problem: Problem, names: tuple[str, str]) -> dict[str, tuple[int, ...]]:
    """The shapes of the states, or of their gradients, under the names of the hidden and the cell state."""
    lead = (problem.cells, problem.samples)
    shapes = ((*lead, problem.outputs), (*lead, problem.units))
    return dict(zip(names, shapes[: 1 + problem.cell.has_cells], strict=False))


class _Inputs(NamedTuple):
    """The arguments of forward. States: h0 and, of an LSTM, c0. All that is None is absent."""

    x: Any
    cells: Any
    states: Any
    lengths: Any
    reset: Any
    seed: Any
    mask: Any
    zoneout: Any  # of the hidden and the cell state

    def factors(self) -> dict[str, Any]:
        """What acts on the sequences and inside the recurrence: both passes read it."""
        hidden, cell = self.zoneout
        return {
            "lengths": self.lengths, "reset": self.reset, "seed": self.seed, "mask": self.mask, "zoneout": hidden,
            "cell_zoneout": cell,
        }  # fmt: skip


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrent(options: _Options, *inputs: Any) -> tuple[jax.Array, ...]:
    return tuple(_call_forward(options, _Inputs(*inputs), save=False).values())


def _call_forward(options: _Options, inputs: _Inputs, save: bool) -> dict[str, jax.Array]:
    problem = options.problem
    shapes = {"y": problem.y_shape, **_state_shapes(problem, ("hn", "cn"))}
    results: dict[str, tuple[tuple[int, ...], Any]] = {name: (shape, inputs.x.dtype) for name, shape in shapes.items()}
    if save:
        results["cache"] = ((options.cache_bytes,), BYTE)
    arguments = {
        "x": inputs.x,
        **_named(problem, inputs.cells),
        **dict(zip(("h0", "c0"), inputs.states, strict=False)),
        **inputs.factors(),
    }
    return call("retrograd_recurrent_forward", arguments, results, options.threads, **options.attributes)


class _Saved(NamedTuple):
    """What forward saves for backward."""

    need: Static  # which gradients: of x, the cells and the states
    inputs: _Inputs  # without the states
    cache: jax.Array


def _forward(options: _Options, *primals: Any) -> tuple[tuple[jax.Array, ...], _Saved]:
    given = _Inputs(*primals)
    if any(map(is_perturbed, (given.mask, *given.zoneout))):
        raise ValueError(
            f"{options.problem.cell.name}: a gradient of mask or zoneout is wanted, which have none; "
            "jax.lax.stop_gradient makes them constants"
        )
    inputs = values(given)
    found = _call_forward(options, inputs, save=True)
    need_cells = tuple(tuple(map(is_perturbed, cell)) for cell in given.cells)
    need = (is_perturbed(given.x), need_cells, tuple(map(is_perturbed, given.states)))
    saved = _Saved(Static(need), inputs._replace(states=()), found.pop("cache"))
    return tuple(found.values()), saved


def _backward(options: _Options, saved: _Saved, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    need_dx, need_cells, need_states = saved.need.value
    gradients = dict(zip(("dy", "dhn", "dcn"), map(nonzero, cotangents), strict=False))
    if all(gradient is None for gradient in gradients.values()):
        return (None,) * len(_Inputs._fields)
    problem, inputs = options.problem, saved.inputs
    wanted: dict[str, tuple[int, ...]] = {}
    if need_dx:
        wanted["dx"] = inputs.x.shape
    needed = _named(problem, need_cells, "d")
    wanted.update((name, part.shape) for name, part in _named(problem, inputs.cells, "d").items() if needed[name])
    states = _state_shapes(problem, ("dh0", "dc0"))
    wanted.update((name, states[name]) for name, need in zip(states, need_states, strict=True) if need)
    arguments = {
        "x": inputs.x,
        **_named(problem, inputs.cells),
        **inputs.factors(),
        "cache": saved.cache,
        **gradients,
    }
    results = {name: (shape, inputs.x.dtype) for name, shape in wanted.items()}
    found = call("retrograd_recurrent_backward", arguments, results, options.threads, **options.attributes)
    dcells = tuple(
        tuple(found.get(f"d{field}{index}") for field in problem.cell.fields) for index in range(len(inputs.cells))
    )
    return found.get("dx"), dcells, tuple(map(found.get, states)), *(None,) * 4, (None, None)


_recurrent.defvjp(_forward, _backward, symbolic_zeros=True)
_compiled = jax.jit(_recurrent, static_argnums=0)
