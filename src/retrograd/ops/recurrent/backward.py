"""Backward passes of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

import numpy as np

from .. import _args, _memory
from .._call import Refusal, enter, public
from .._errors import ArgumentName, ArgumentTypeError, ArgumentValueError
from .._records import RecurrentBackward
from .._types import Array, MaybeArray
from .cache import CACHES, RecurrentCache, raise_for_cache, recomputed
from .problem import Inputs, checked_inputs, named_inputs, unit_stride
from .types import GRU, LSTM, RNN, Cell, CellType
from .weights import as_cells, named_arrays, shape_of


class LstmGradients(NamedTuple):
    """Gradients by name; None for those not requested. Also passed as ``out=``, holding buffers to write to.

    ``dweights`` has the same structure as the weights passed to forward.
    """

    dx: MaybeArray = None
    dweights: Any = None
    dh0: MaybeArray = None
    dc0: MaybeArray = None


class RecurrentGradients(NamedTuple):
    """Gradients by name; None for those not requested. Also passed as ``out=``, holding buffers to write to.

    ``dweights`` has the same structure as the weights passed to forward.
    """

    dx: MaybeArray = None
    dweights: Any = None
    dh0: MaybeArray = None


class _Needs(NamedTuple):
    """The names of a cell's gradients."""

    weights: tuple[str, ...]
    all: tuple[str, ...]
    # Without `need`: everything, and the gradients of the initial states if these were given.
    default: dict[tuple[bool, bool], frozenset[str]]


def _needs(cell: CellType) -> _Needs:
    weights = tuple("d" + field for field in cell.fields)
    states = ("dh0", "dc0") if cell.has_cells else ("dh0",)
    default = {
        (h0, c0): frozenset(("dx", *weights)) | ({"dh0"} if h0 else set()) | ({"dc0"} if c0 else set())
        for h0 in (False, True)
        for c0 in (False, True)
    }
    return _Needs(weights, ("dx", *weights, *states), default)


_NEEDS: Final = {cell.name: _needs(cell) for cell in (LSTM, GRU, RNN)}
_NONE4: Final = (None, None, None, None)
_new_gradients: Final[Callable[[tuple[Any, ...]], LstmGradients]] = partial(tuple.__new__, LstmGradients)
_new_recurrent: Final[Callable[[tuple[Any, ...]], RecurrentGradients]] = partial(tuple.__new__, RecurrentGradients)


@public
def lstm_backward(
    dy: Array | None,
    cache: RecurrentCache,
    *,
    dhn: Array | None = None,
    dcn: Array | None = None,
    need: Sequence[str] | None = None,
    out: LstmGradients | Mapping[str, Any] | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> LstmGradients:
    """Gradients of :func:`lstm_forward` from those of ``y``, ``hn`` and ``cn``, each of which may be None for zeros.

    `need` names the gradients to compute: any of dx, dwx, dwh, db, dpeephole, dprojection, dgamma_x, dgamma_h,
    dgamma_c, dbeta_c, dh0 and dc0. The default is ``dx``, the gradients of all weights, and ``dh0`` and ``dc0`` if
    forward was given those states. Results overwrite the buffers of `out`, or are added to them with
    ``accumulate=True``. The cache is only read, so backward may run again.
    """
    given = _NONE4 if out is None else _gradient_buffers(out, LstmGradients)
    return _new_gradients(_backward(LSTM, dy, cache, dhn, dcn, need, given, accumulate, num_threads))


@public
def gru_backward(
    dy: Array | None,
    cache: RecurrentCache,
    *,
    dhn: Array | None = None,
    need: Sequence[str] | None = None,
    out: RecurrentGradients | Mapping[str, Any] | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> RecurrentGradients:
    """Gradients of :func:`gru_forward` from those of ``y`` and ``hn``, each of which may be None for zeros.

    `need` names the gradients to compute: any of dx, dwx, dwh, db, dbh, dgamma_x, dgamma_h and dh0. The default is
    ``dx``, the gradients of all weights, and ``dh0`` if forward was given h0. Results overwrite the buffers of `out`,
    or are added to them with ``accumulate=True``. The cache is only read, so backward may run again.
    """
    given = _NONE4 if out is None else (*_gradient_buffers(out, RecurrentGradients), None)
    return _new_recurrent(_backward(GRU, dy, cache, dhn, None, need, given, accumulate, num_threads)[:3])


@public
def rnn_backward(
    dy: Array | None,
    cache: RecurrentCache,
    *,
    dhn: Array | None = None,
    need: Sequence[str] | None = None,
    out: RecurrentGradients | Mapping[str, Any] | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> RecurrentGradients:
    """Gradients of :func:`rnn_forward` from those of ``y`` and ``hn``, each of which may be None for zeros.

    `need` names the gradients to compute: any of dx, dwx, dwh, db, dgamma_x, dgamma_h and dh0. The default is ``dx``,
    the gradients of all weights, and ``dh0`` if forward was given h0. Results overwrite the buffers of `out`, or are
    added to them with ``accumulate=True``. The cache is only read, so backward may run again.
    """
    given = _NONE4 if out is None else (*_gradient_buffers(out, RecurrentGradients), None)
    return _new_recurrent(_backward(RNN, dy, cache, dhn, None, need, given, accumulate, num_threads)[:3])


def _backward(
    cell: CellType,
    dy: Array | None,
    cache: RecurrentCache,
    dhn: Array | None,
    dcn: Array | None,
    need: Sequence[str] | None,
    given: tuple[Any, ...],
    accumulate: bool,
    num_threads: int | None,
) -> tuple[Any, Any, Any, Any]:
    if type(cache) is not CACHES[cell.name]:
        raise ArgumentTypeError("cache", f"{{cache}} must be what {cell.name}_forward returned, not {{}}", type(cache))
    problem = cache.inputs.problem
    threads = 0 if num_threads is None else _args.thread_count(num_threads)
    if type(accumulate) is not bool:
        accumulate = _args.as_flag("accumulate", accumulate)
    wanted = _wanted(cache, need, given)
    if dy is not None:
        dy = problem.sequence(_incoming("dy", dy, problem.y_shape, "y", problem.dtype))
    if dhn is not None:
        dhn = problem.states(_incoming("dhn", dhn, problem.h_shape, "hn", problem.dtype))
    if dcn is not None:
        dcn = problem.states(_incoming("dcn", dcn, problem.c_shape, "cn", problem.dtype))

    dx, dweights, dh0, dc0 = given
    if "dx" in wanted:
        dx = _result("dx", dx, cache.inputs.x.shape if cache.has_table else problem.x_shape, problem.dtype, accumulate)
    if "dh0" in wanted:
        dh0 = _result("dh0", dh0, problem.h_shape, problem.dtype, accumulate)
    if "dc0" in wanted:
        dc0 = _result("dc0", dc0, problem.c_shape, problem.dtype, accumulate)
    dcells = None
    if not wanted.isdisjoint(_NEEDS[cell.name].weights):
        dcells = _weight_results(cache, wanted, dweights, accumulate)
    elif dweights is not None:
        raise ArgumentValueError("out", "{out} has buffers for {dweights}, of which {need} names none")

    results = (
        dx if dx is None or cache.has_table else problem.sequence(dx),
        dcells,
        None if dh0 is None else problem.states(dh0),
        None if dc0 is None else problem.states(dc0),
    )
    _run(cache, (dy, dhn, dcn), results, accumulate, threads)
    dweights = None
    if dcells is not None:
        found = [tuple.__new__(cell.weights, dcell) for dcell in dcells]
        dweights = found[0] if problem.single else found
    return dx, dweights, dh0, dc0


def _run(
    cache: RecurrentCache,
    incoming: tuple[Array | None, Array | None, Array | None],
    results: tuple[Array | None, list[Cell] | None, Array | None, Array | None],
    accumulate: bool,
    threads: int,
) -> None:
    """Run the engine. All arrays have the right shape and dtype. results: dx, dcells, dh0 and dc0."""
    inputs, buffer, stamp = cache
    if buffer is None:
        buffer, stamp = recomputed(cache, threads), None
    copies: list[tuple[Array, Array]] = []
    arguments = (*incoming, inputs, buffer, stamp, *results, accumulate, False, threads)
    enter(RecurrentBackward, inputs.problem.engine.backward, arguments, _fixed_backward, copies)
    for array, computed in copies:
        array[...] = computed


def _fixed_backward(
    refusal: Refusal, refused: RecurrentBackward, copies: list[tuple[Array, Array]]
) -> RecurrentBackward:
    raise_for_cache(refusal)
    given = cast(Inputs, refused.inputs)
    inputs = checked_inputs(given)
    incoming = {"dy": refused.dy, "dhn": refused.dhn, "dcn": refused.dcn}
    for name, array in incoming.items():
        if array is not None:
            _args.check_aligned(name, array)
    dy, dhn, dcn = (None if array is None else unit_stride(array) for array in incoming.values())
    named = {"out.dx": refused.dx, "out.dh0": refused.dh0, "out.dc0": refused.dc0}
    named.update(named_arrays("out.dweights", refused.dcells or (), given.problem.cell))
    read = {**named_inputs(inputs), "dy": dy, "dhn": dhn, "dcn": dcn, "cache": refused.cache}
    _args.check_disjoint(named, read)
    dx, dh0, dc0 = (_target(array, copies) for array in (refused.dx, refused.dh0, refused.dc0))
    dcells = refused.dcells
    if dcells is not None:
        dcells = [tuple(_target(part, copies) for part in cell) for cell in dcells]
    return refused._replace(
        dy=dy, dhn=dhn, dcn=dcn, inputs=inputs, dx=dx, dcells=dcells, dh0=dh0, dc0=dc0, overlap_checked=True
    )


def _target(part: Any, copies: list[tuple[Array, Array]], must_copy: bool = False) -> Any:
    """The caller's array if the engine can write to it, else a new one. `copies` lists what to copy back."""
    if part is None:
        return None
    if type(part) is tuple:
        different = len({a.strides for a in part if a is not None}) > 1
        return tuple(_target(a, copies, different) for a in part)
    plain = _args.as_plain(part)
    if not must_copy and (part.ndim == 1 or part.shape[-1] <= 1 or part.strides[-1] == part.itemsize):
        return plain
    fresh = plain.copy(order="C")
    copies.append((part, fresh))
    return fresh


def _gradient_buffers(out: Any, record: Any) -> Any:
    if isinstance(out, record):
        return out
    if not isinstance(out, Mapping):
        raise ArgumentTypeError("out", "{out} must be {} or a mapping, not {}", record, type(out))
    for name in set(out) - set(record._fields):
        raise ArgumentValueError("out", "{out} has {!r}; the buffers are {}", name, ", ".join(record._fields))
    return tuple(out.get(name) for name in record._fields)


def _wanted(cache: RecurrentCache, need: Sequence[str] | None, given: tuple[Any, ...]) -> frozenset[str]:
    cell = cache.inputs.problem.cell
    if need is None:
        return _NEEDS[cell.name].default[
            cache.inputs.h0 is not None or given[2] is not None, cache.inputs.c0 is not None or given[3] is not None
        ]
    names = _args.needed_names(need, _NEEDS[cell.name].all)
    for field, name in enumerate(cell.fields):
        if "d" + name in names and field > 1 and all(parts[field] is None for parts in _full_cells(cache)):
            raise ArgumentValueError("need", "{need} has {!r}, but forward was given no {}", "d" + name, name)
    for name, buffer in zip(("dx", "dh0", "dc0"), (given[0], given[2], given[3]), strict=True):
        if buffer is not None and name not in names:
            raise ArgumentValueError("out", "{out} has a buffer for {}, which {need} does not name", ArgumentName(name))
    return names


def _full_cells(cache: RecurrentCache) -> list[Cell]:
    """Every cell with all of its fields; a front end may leave out those at the end."""
    count = len(cache.inputs.problem.cell.fields)
    return [cell if len(cell) == count else (*cell, *[None] * (count - len(cell))) for cell in cache.inputs.cells]


def _incoming(name: str, value: object, shape: tuple[int, ...], of: str, dtype: np.dtype[Any]) -> Array:
    array = value if type(value) is np.ndarray else _args.as_array(name, value)
    if array.shape != shape:
        raise ArgumentValueError(
            name, "{argument} has shape {}, but {} has shape {}", array.shape, ArgumentName(of), shape
        )
    if array.dtype is not dtype:
        _args.check_dtype(name, array, dtype, "as {x} is")
    return array


def _result(name: str, buffer: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], accumulate: bool) -> Array:
    if buffer is None:
        if accumulate:
            raise ArgumentValueError(
                f"out.{name}", "{accumulate}=True adds to buffers, and {out} has none for {}", ArgumentName(name)
            )
        return _memory.empty(shape, dtype)
    _args.check_result(f"out.{name}", buffer, shape, dtype)
    return buffer


def _weight_results(cache: RecurrentCache, wanted: frozenset[str], dweights: Any, accumulate: bool) -> list[Cell]:
    cell = cache.inputs.problem.cell
    if dweights is None and not accumulate:
        names = _NEEDS[cell.name].weights
        return [_new_gradient(parts, names, wanted) for parts in cache.inputs.cells]
    cells = _full_cells(cache)
    buffers: list[Cell] = [(None,) * len(cell.fields)] * len(cells)
    if dweights is not None:
        buffers, single = as_cells("out.dweights", dweights, cell, result=True)
        if single != cache.inputs.problem.single or len(buffers) != len(cells):
            raise ArgumentValueError(
                "out.dweights", "{argument} has {} cells, the {weights} have {}", len(buffers), len(cells)
            )
    results = []
    for index, (parts, given) in enumerate(zip(cells, buffers, strict=True)):
        name = "dweights" if cache.inputs.problem.single else f"dweights[{index}]"
        dcell: list[Any] = []
        for field, part, buffer in zip(cell.fields, parts, given, strict=True):
            if part is None or "d" + field not in wanted:
                if buffer is not None:
                    why = "which forward was not given" if part is None else "which need does not name"
                    raise ArgumentValueError(
                        f"out.{name}.{field}",
                        "{argument} is a buffer for the gradient of {}, {}",
                        ArgumentName(field),
                        why,
                    )
                dcell.append(None)
            elif type(part) is not tuple and type(buffer) is not tuple:
                dcell.append(_result(f"{name}.{field}", buffer, part.shape, part.dtype, accumulate))
            else:
                dcell.append(_gate_results(f"{name}.{field}", cell.gates, part, buffer, accumulate))
        results.append(tuple(dcell))
    return results


def _new_gradient(cell: Cell, names: tuple[str, ...], wanted: frozenset[str]) -> Cell:
    results: list[Any] = [None] * len(names)
    for index, part in enumerate(cell):
        if part is None or names[index] not in wanted:
            continue
        if type(part) is tuple:
            results[index] = tuple(None if a is None else _memory.empty(a.shape, a.dtype) for a in part)
        else:
            results[index] = _memory.empty(part.shape, part.dtype)
    return tuple(results)


def _gate_results(name: str, gates: str, part: Any, buffer: Any, accumulate: bool) -> tuple[Array | None, ...]:
    if buffer is not None and (type(part) is tuple) != (type(buffer) is tuple):
        raise ArgumentValueError(
            f"out.{name}",
            "{argument} has the form {}, the {weights} have {}",
            shape_of(buffer),
            shape_of(part),
        )
    results: list[Array | None] = []
    for gate, array, result in zip(gates, part, buffer or [None] * len(gates), strict=True):
        if array is None:
            if result is not None:
                raise ArgumentValueError(
                    f"out.{name} of gate {gate}", "{argument} is a buffer, but that gate was given none"
                )
            results.append(None)
        else:
            results.append(_result(f"{name} of gate {gate}", result, array.shape, array.dtype, accumulate))
    return tuple(results)
