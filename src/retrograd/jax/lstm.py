"""LSTM."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import _args
from ..ops._call import named
from ..ops._errors import ArgumentTypeError, ArgumentValueError
from ..ops.recurrent.problem import Problem, as_counts, check_parameter, problem_of
from ..ops.recurrent.types import LSTM, CellOptions, LstmActivations, LstmWeights
from ..ops.recurrent.weights import hidden_size, peephole_kind
from ._ffi import BYTE, Static, as_operand, call, is_perturbed, nonzero, values


class LstmOutput(NamedTuple):
    """The output of the last layer, and the final states of every cell."""

    y: jax.Array
    hn: jax.Array
    cn: jax.Array


@named
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
    output_gate_reads: str = "new",
    dropout: float = 0.0,
    seed: Any = 0,
    num_threads: int | None = None,
) -> LstmOutput:
    """Run an LSTM over ``x [T, N, I]`` (``[N, T, I]`` if `batch_first`).

    `weights` is the :class:`~retrograd.LstmWeights` of a single cell, with states ``[N, H]``; or a sequence of them,
    one per layer and direction (layer-major), with states ``[cells, N, H]``. States default to 0. Each parameter is one
    array with all gates, ``[4H, ...]`` or ``[4, H, ...]``.

    `lengths` (``[N]``, any order, 0 allowed) gives the length of each sample's sequence. Inactive samples have output 0
    and keep their states. `dropout` is the fraction of outputs dropped between layers; the same `seed` drops the same
    elements. Lengths and the seed may be traced.
    """
    x = as_operand("x", x)
    cells, single = _as_cells(weights)
    units = hidden_size(cells[0][1], LSTM)
    problem = problem_of(
        x.shape,
        x.dtype,
        len(cells),
        single,
        units,
        0,
        bool(bidirectional),
        bool(batch_first),
        peephole_kind(cells, units),
        0,
        False,
        dropout,
        True,
        CellOptions("lstm", activations, output_gate_reads=output_gate_reads),
    )
    compared = problem._replace(engine=cast(Any, None))  # by value: the engine of an equal problem is another object
    options = _Options(compared, problem.cache_bytes(None), _args.thread_count(num_threads))
    y, hn, cn = _compiled(
        options,
        x,
        tuple(_checked_cell(problem, index, cell) for index, cell in enumerate(cells)),
        _state("h0", h0, problem),
        _state("c0", c0, problem),
        None if lengths is None else _as_lengths(lengths, problem),
        _as_seed(seed) if problem.dropout else None,
    )
    return LstmOutput(y, hn.reshape(problem.h_shape), cn.reshape(problem.c_shape))


# ---- arguments ------------------------------------------------------------------------------------------------------


def _as_cells(weights: Any) -> tuple[list[tuple[Any, ...]], bool]:
    """The parameters of every cell, and whether a single cell was given rather than a sequence."""
    if isinstance(weights, LstmWeights):
        return [_as_cell("weights", weights)], True
    if not isinstance(weights, (list, tuple)):
        raise ArgumentTypeError("weights", "{weights} must be LstmWeights or a sequence of them, not {}", type(weights))
    if not weights:
        raise ArgumentValueError("weights", "{weights} is empty, needs at least 1 cell")
    return [_as_cell(f"weights[{index}]", cell) for index, cell in enumerate(weights)], False


def _as_cell(name: str, cell: Any) -> tuple[Any, ...]:
    if not isinstance(cell, LstmWeights):
        raise ArgumentTypeError(name, "{argument} must be LstmWeights, not {}", type(cell))
    for field, part in zip(LstmWeights._fields, cell, strict=True):
        if isinstance(part, (list, tuple)):
            raise ArgumentTypeError(
                f"{name}.{field}",
                "{argument} is a sequence of {} arrays, must be one array with all gates: jax.numpy.concatenate "
                "makes one",
                len(part),
            )
    return tuple(
        None if part is None else as_operand(f"{name}.{field}", part)
        for field, part in zip(LstmWeights._fields, cell, strict=True)
    )


def _checked_cell(problem: Problem, index: int, cell: tuple[Any, ...]) -> tuple[Any, ...]:
    """Every parameter with the rows of all gates in one axis."""
    checked = []
    for field, part, columns in zip(LstmWeights._fields, cell, problem.columns(index), strict=True):
        name = field if problem.single else f"weights[{index}].{field}"
        if part is not None:
            shapes = problem.shapes(field, columns)
            check_parameter(name, part, shapes, problem.dtype)
            part = part.reshape(shapes[0])
        elif field in ("wx", "wh"):
            raise ArgumentValueError(name, "{argument} is None; a cell needs {wx} and {wh}")
        checked.append(part)
    return tuple(checked)


def _state(name: str, value: Any, problem: Problem) -> jax.Array | None:
    if value is None:
        return None
    array = as_operand(name, value)
    if array.shape != problem.h_shape:
        axes = "(N, H)" if problem.single else "(cells, N, H)"
        raise ArgumentValueError(name, "{argument} has shape {}, must be {} = {}", array.shape, axes, problem.h_shape)
    _args.check_dtype(name, array, problem.dtype, "as {x} is")
    return array.reshape(problem.cells, problem.samples, problem.units)


def _as_lengths(lengths: Any, problem: Problem) -> jax.Array:
    """Traced lengths are checked by the handler when their values are known."""
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
            "dropout": problem.dropout,
            "batch_first": problem.batch_first,
        }


def _named(cells: Any, prefix: str = "") -> dict[str, Any]:
    return {
        f"{prefix}{field}{index}": part
        for index, cell in enumerate(cells)
        for field, part in zip(LstmWeights._fields, cell, strict=True)
    }


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lstm(options: _Options, x: Any, cells: Any, h0: Any, c0: Any, lengths: Any, seed: Any) -> tuple[jax.Array, ...]:
    return tuple(_call_forward(options, x, cells, h0, c0, lengths, seed, save=False).values())


def _call_forward(
    options: _Options, x: Any, cells: Any, h0: Any, c0: Any, lengths: Any, seed: Any, save: bool
) -> dict[str, jax.Array]:
    problem = options.problem
    states = (problem.cells, problem.samples, problem.units)
    results: dict[str, tuple[tuple[int, ...], Any]] = {"y": (problem.y_shape, x.dtype)}
    results.update(dict.fromkeys(("hn", "cn"), (states, x.dtype)))
    if save:
        results["cache"] = ((options.cache_bytes,), BYTE)
    arguments = {"x": x, **_named(cells), "h0": h0, "c0": c0, "lengths": lengths, "seed": seed}
    return call("retrograd_recurrent_forward", arguments, results, options.threads, **options.attributes)


class _Saved(NamedTuple):
    """What forward saves for backward."""

    need: Static  # which gradients: of x, the cells, h0 and c0
    x: jax.Array
    cells: Any
    lengths: jax.Array | None
    seed: jax.Array | None
    cache: jax.Array


def _forward(options: _Options, *primals: Any) -> tuple[tuple[jax.Array, ...], _Saved]:
    x, cells, h0, c0, lengths, seed = values(primals)
    found = _call_forward(options, x, cells, h0, c0, lengths, seed, save=True)
    need_cells = tuple(tuple(map(is_perturbed, cell)) for cell in primals[1])
    need = (is_perturbed(primals[0]), need_cells, is_perturbed(primals[2]), is_perturbed(primals[3]))
    saved = _Saved(Static(need), x, cells, lengths, seed, found["cache"])
    return (found["y"], found["hn"], found["cn"]), saved


def _backward(options: _Options, saved: _Saved, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    need_dx, need_cells, need_dh0, need_dc0 = saved.need.value
    dy, dhn, dcn = map(nonzero, cotangents)
    if dy is None and dhn is None and dcn is None:
        return (None,) * 6
    problem = options.problem
    states = (problem.cells, problem.samples, problem.units)
    wanted: dict[str, tuple[int, ...]] = {}
    if need_dx:
        wanted["dx"] = saved.x.shape
    needed = _named(need_cells, "d")
    wanted.update((name, part.shape) for name, part in _named(saved.cells, "d").items() if needed[name])
    if need_dh0:
        wanted["dh0"] = states
    if need_dc0:
        wanted["dc0"] = states
    arguments = {
        "x": saved.x,
        **_named(saved.cells),
        "lengths": saved.lengths,
        "seed": saved.seed,
        "cache": saved.cache,
        "dy": dy,
        "dhn": dhn,
        "dcn": dcn,
    }
    results = {name: (shape, saved.x.dtype) for name, shape in wanted.items()}
    found = call("retrograd_recurrent_backward", arguments, results, options.threads, **options.attributes)
    dcells = tuple(
        tuple(found.get(f"d{field}{index}") for field in LstmWeights._fields) for index in range(len(saved.cells))
    )
    return found.get("dx"), dcells, found.get("dh0"), found.get("dc0"), None, None


_lstm.defvjp(_forward, _backward, symbolic_zeros=True)
_compiled = jax.jit(_lstm, static_argnums=0)
