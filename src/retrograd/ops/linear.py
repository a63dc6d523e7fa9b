"""Linear layers and embeddings, forward and backward.

All axes of x and dy but the last are flattened into rows. A copy is made where that needs one, and where the last axis
of a result is not contiguous. Weights and tables may have any strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .. import _core
from . import _args, _memory
from ._call import Reason, Refusal, enter, public
from ._errors import ArgumentValueError
from ._records import EmbeddingBackward, EmbeddingForward, LinearBackward, LinearForward
from ._types import Array, MaybeArray, is_float64

__all__ = [
    "LinearGradients",
    "embedding_backward",
    "embedding_forward",
    "linear_backward",
    "linear_forward",
]


class LinearGradients(NamedTuple):
    """Gradients by name; None for those not requested. Also passed as ``out=``, holding buffers to write to."""

    dx: MaybeArray = None
    dw: MaybeArray = None
    db: MaybeArray = None


_GRADIENTS: Final = LinearGradients._fields


@public
def linear_forward(
    x: Array, w: Array, b: Array | None = None, *, out: Array | None = None, num_threads: int | None = None
) -> Array:
    """``y[..., o] = sum_i x[..., i] * w[o, i] + b[o]`` for x [..., I], w [O, I] and b [O]."""
    x = _args.as_array("x", x)
    w = _args.as_array("w", w)
    f64 = is_float64("x", x)
    check_operands(x, w)
    _args.check_aligned("x", x)
    _args.check_aligned("w", w)
    outputs = w.shape[0]
    bias = None
    if b is not None:
        b = _args.as_array("b", b)
        bias = _as_bias(b, w)
    threads = _args.thread_count(num_threads)
    shape = (*x.shape[:-1], outputs)
    copied = False  # the engine gets a copy, and does not see what overlaps the caller's array
    if out is None:
        out = y = _memory.empty(shape, x.dtype)
    else:
        _args.check_result("out", out, shape, x.dtype)
        y = _writable_form(out)
        copied = not _args.all_contiguous(x, b, out)
        if copied:
            _args.check_disjoint({"out": out}, {"x": x, "w": w, "b": b})
    arguments = (f64, _as_rows(x), w, bias, _as_rows(y), copied, threads)
    enter(
        LinearForward, _core.linear_forward, arguments, _args.disjoint_arguments, {"out": out}, {"x": x, "w": w, "b": b}
    )
    if y is not out:
        out[...] = y
    return out


@public
def linear_backward(
    dy: Array,
    x: Array,
    w: Array,
    *,
    need: Sequence[str] = _GRADIENTS,
    out: LinearGradients | Mapping[str, Array | None] | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> LinearGradients:
    """Compute ``dx = dy w``, ``dw = dy' x`` and ``db``, the sum of dy over its rows; those that `need` names.

    Gradients overwrite the buffers of `out`, or are added to them with ``accumulate=True``. db is accumulated in
    float64.
    """
    dy = _args.as_array("dy", dy)
    x = _args.as_array("x", x)
    w = _args.as_array("w", w)
    f64 = is_float64("x", x)
    check_operands(x, w)
    _args.check_aligned("x", x)
    _args.check_aligned("w", w)
    shape = (*x.shape[:-1], w.shape[0])
    if dy.shape != shape:
        raise ArgumentValueError(
            "dy",
            "{dy} has shape {}, but {x} of shape {} and {w} of shape {} need {}",
            dy.shape,
            x.shape,
            w.shape,
            shape,
        )
    _args.check_dtype("dy", dy, x.dtype, "as {x} is")
    _args.check_aligned("dy", dy)
    dx, dw, db = buffers = _args.gradient_buffers(out, LinearGradients)
    want_dx = want_dw = want_db = True
    if need is not _GRADIENTS:
        want_dx, want_dw, want_db = _args.needed_gradients(need, _GRADIENTS, buffers)
    if accumulate:
        _args.check_accumulated(_GRADIENTS, (want_dx, want_dw, want_db), buffers)
    threads = _args.thread_count(num_threads)
    to_dx, dx = _result("out.dx", want_dx, dx, x.shape, x.dtype, accumulate)
    to_dw, dw = _result("out.dw", want_dw, dw, w.shape, x.dtype, accumulate)
    to_db, db = _result("out.db", want_db, db, w.shape[:1], x.dtype, accumulate)
    gradients = LinearGradients(dx, dw, db)
    copied = out is not None and not _args.all_contiguous(dy, x, dx, dw, db)
    if copied:
        _args.check_disjoint(_args.named_results(gradients), {"dy": dy, "x": x, "w": w})
    rows = None if to_dx is None else _as_rows(to_dx)
    arguments = (f64, _as_rows(dy), _as_rows(x), w, rows, to_dw, to_db, bool(accumulate), copied, threads)
    enter(
        LinearBackward,
        _core.linear_backward,
        arguments,
        _args.disjoint_arguments,
        {"out.dx": dx, "out.dw": dw, "out.db": db},
        {"dy": dy, "x": x, "w": w},
    )
    for array, computed in zip(gradients, (to_dx, to_dw, to_db), strict=True):
        if array is not computed and array is not None:
            array[...] = computed
    return gradients


@public
def embedding_forward(
    indices: Array, table: Array, *, out: Array | None = None, num_threads: int | None = None
) -> Array:
    """``y[..., :] = table[indices[...]]`` for integer `indices` of any dtype and shape, and table [rows, E]."""
    table = _args.as_array("table", table)
    f64 = is_float64("table", table)
    if table.ndim != 2:
        raise ArgumentValueError("table", "{table} has shape {}, must have 2 axes, [rows, E]", table.shape)
    _args.check_aligned("table", table)
    indices, positions = _args.as_indices("indices", indices)
    threads = _args.thread_count(num_threads)
    shape = (*indices.shape, table.shape[1])
    if out is None:
        out = _memory.empty(shape, table.dtype)
    else:
        _args.check_result("out", out, shape, table.dtype)
    y = _args.contiguous_result(out)
    copied = not _args.all_contiguous(indices, out)
    if copied:
        _args.check_disjoint({"out": out}, {"indices": indices, "table": table})
    arguments = (f64, positions, table, _as_rows(y), copied, threads)

    def fix(refusal: Refusal, arguments: EmbeddingForward) -> EmbeddingForward:
        if refusal.reason is Reason.out_of_range:
            _args.raise_out_of_range("indices", indices, len(table), "the rows of {table} are")
        return _args.disjoint_arguments(refusal, arguments, {"out": out}, {"indices": indices, "table": table})

    enter(EmbeddingForward, _core.embedding_forward, arguments, fix)
    if y is not out:
        out[...] = y
    return out


@public
def embedding_backward(
    dy: Array,
    indices: Array,
    rows: int,
    *,
    out: Array | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> Array:
    """``dtable[indices[...]] += dy[..., :]``, starting from zeros [rows, E], or from `out` with ``accumulate=True``.

    The gradients of one row of the table are added in the order of `indices`.
    """
    dy = _args.as_array("dy", dy)
    f64 = is_float64("dy", dy)
    indices, positions = _args.as_indices("indices", indices)
    if dy.shape[:-1] != indices.shape or dy.ndim == 0:
        raise ArgumentValueError(
            "dy", "{dy} has shape {}, but {indices} of shape {} need one row each", dy.shape, indices.shape
        )
    _args.check_aligned("dy", dy)
    count = _args.as_count("rows", rows, least=0)
    threads = _args.thread_count(num_threads)
    shape = (count, dy.shape[-1])
    if out is not None:
        _args.check_result("out", out, shape, dy.dtype)
    elif accumulate:
        raise ArgumentValueError("out", "{accumulate}=True adds to {out}, which is missing")
    else:
        out = _memory.empty(shape, dy.dtype)
    copied = not _args.all_contiguous(dy, indices)
    if copied:
        _args.check_disjoint({"out": out}, {"dy": dy, "indices": indices})
    given = np.ascontiguousarray(_as_rows(dy))
    arguments = (f64, given, positions, _args.as_plain(out), bool(accumulate), copied, threads)

    def fix(refusal: Refusal, arguments: EmbeddingBackward) -> EmbeddingBackward:
        if refusal.reason is Reason.out_of_range:
            _args.raise_out_of_range("indices", indices, count, "{rows} is")
        return _args.disjoint_arguments(refusal, arguments, {"out": out}, {"dy": dy, "indices": indices})

    enter(EmbeddingBackward, _core.embedding_backward, arguments, fix)
    return out


def check_operands(x: Array, w: Array) -> None:
    if w.ndim != 2:
        raise ArgumentValueError("w", "{w} has shape {}, must have 2 axes, [outputs, inputs]", w.shape)
    if x.ndim == 0 or x.shape[-1] != w.shape[1]:
        template = "{w} has shape {}, whose inputs are {}, but "
        if not x.ndim:
            raise ArgumentValueError("w", template + "{x} has no axes", w.shape, w.shape[1])
        raise ArgumentValueError("w", template + "the last axis of {x} is {}", w.shape, w.shape[1], x.shape[-1])
    if w.dtype is not x.dtype:
        _args.check_dtype("w", w, x.dtype, "as {x} is")


def check_bias(b: Array, w: Array) -> None:
    if b.shape != w.shape[:1]:
        raise ArgumentValueError("b", "{b} has shape {}, but {w} of shape {} needs {}", b.shape, w.shape, w.shape[:1])
    _args.check_dtype("b", b, w.dtype, "as {x} is")


def _as_bias(b: Array, w: Array) -> Array:
    check_bias(b, w)
    return b if b.flags.c_contiguous and b.flags.aligned else np.array(b, order="C")


def _as_rows(array: Array) -> Array:
    """Flatten all axes but the last into one; a copy if the strides require it."""
    shape = array.shape
    if len(shape) == 2:
        return array
    if len(shape) == 3:
        return array.reshape(shape[0] * shape[1], shape[2])
    return array.reshape(math.prod(shape[:-1]), shape[-1])


def _writable_form(array: Array, keep: bool = False, or_columns: bool = False) -> Array:
    """The array itself if its rows, or with `or_columns` its columns, are contiguous; else a contiguous buffer.

    The engine can write only to these. The buffer has the array's values if `keep`.
    """
    usable = array.flags.c_contiguous
    if not usable and array.ndim == 2:
        rows = array.strides[1] == array.itemsize or array.shape[1] == 1
        usable = rows or (or_columns and (array.strides[0] == array.itemsize or array.shape[0] == 1))
    return _args.as_plain(array) if usable else _args.contiguous_result(array, keep)


def _result(
    name: str,
    wanted: bool,
    buffer: Array | None,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    accumulate: bool,
) -> tuple[Array | None, Array | None]:
    """The array that the engine writes to, and the one that is returned."""
    if not wanted:
        return None, None
    if buffer is None:
        fresh = _memory.empty(shape, dtype)
        return fresh, fresh
    _args.check_result(name, buffer, shape, dtype)
    return _writable_form(buffer, accumulate, or_columns=name == "out.dw"), buffer
