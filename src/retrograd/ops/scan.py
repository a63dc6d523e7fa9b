"""The linear recurrence h[t] = a[t] * h[t-1] + b[t] along an axis, forward and backward.

Arrays may have any strides; none is copied. `a` and `reset` are broadcast to the shape of `b` without memory.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .. import _core
from . import _args, _memory
from ._buffers import opaque
from ._call import enter, public, raise_unexplained
from ._errors import ArgumentName, ArgumentTypeError, ArgumentValueError
from ._records import ScanBackward, ScanForward
from ._types import FLOAT64, Array, MaybeArray, is_float64

__all__ = ["ScanCache", "ScanGradients", "ScanResult", "scan_backward", "scan_forward"]

_BOOL: Final = np.dtype(np.bool_)
_SUM: Final = dict(_core.reductions())["sum"]


@opaque
class ScanCache(NamedTuple):
    """What :func:`scan_backward` needs from a forward call, without a copy: do not change these arrays before it."""

    axis: int
    a: Array
    h0: Array | None
    reset: Array | None
    y: Array

    def __repr__(self) -> str:
        return f"ScanCache({self.y.dtype} {self.y.shape}, axis {self.axis})"


class ScanResult(NamedTuple):
    """The states h[t], the last of them, and what backward needs."""

    y: Array
    hn: Array
    cache: ScanCache


class ScanGradients(NamedTuple):
    """Gradients by name; None for those not requested. Also passed as ``out=``, holding buffers to write to."""

    da: MaybeArray = None
    db: MaybeArray = None
    dh0: MaybeArray = None


_GRADIENTS: Final = ScanGradients._fields
_IN_PLACE: Final = {"out.db": ("dy",)}


@public
def scan_forward(
    a: Array,
    b: Array,
    h0: Array | None = None,
    *,
    axis: int = 0,
    reset: Array | None = None,
    out: Array | Mapping[str, Array | None] | None = None,
    num_threads: int | None = None,
) -> ScanResult:
    """``y[t] = a[t] * y[t-1] + b[t]`` along an axis, elementwise over the others; ``y[-1]`` is h0, or zeros.

    y has the shape of b, to which `a` is broadcast; h0 and the last state ``hn`` have the other axes. Where `reset`, an
    array of bool that is broadcast too, is true, a[t] counts as 0: a sequence starts there. `out` is a buffer for
    ``y``, or a mapping with buffers for any of ``y`` and ``hn``; ``y`` may be b.
    """
    a, b = _args.as_array("a", a), _args.as_array("b", b)
    f64 = is_float64("b", b)
    if h0 is not None:
        h0 = _args.as_array("h0", h0)
        _args.check_aligned("h0", h0)
    axis = check_operands(a, b, h0, axis)
    _args.check_aligned("b", b)
    wide = _widened("a", a, b)
    state_shape = (*b.shape[:axis], *b.shape[axis + 1 :])
    wide_reset = None
    if reset is not None:
        reset = _args.as_array("reset", reset)
        if reset.dtype != _BOOL:
            raise ArgumentTypeError("reset", "{reset} has dtype {}; it must be bool", reset.dtype)
        wide_reset = _widened("reset", reset, b)
    threads = _args.thread_count(num_threads)
    y, hn = (None, None) if out is None else _output_buffers(out)
    if y is None:
        y = _memory.empty(b.shape, b.dtype)
    else:
        _args.check_result("out.y", y, b.shape, b.dtype)
    if hn is None:
        hn = np.empty(state_shape, b.dtype)
    else:
        _args.check_result("out.hn", hn, state_shape, b.dtype)
    plain_y = _args.as_plain(y)
    arguments = (f64, axis, wide, b, h0, wide_reset, plain_y, _args.as_plain(hn), False, threads)
    enter(
        ScanForward,
        _core.scan_forward,
        arguments,
        _args.disjoint_arguments,
        {"out.y": y, "out.hn": hn},
        {"a": a, "b": b, "h0": h0, "reset": reset},
        {"out.y": ("b",)},
    )
    return ScanResult(y, hn, ScanCache(axis, a, h0, reset, plain_y))


@public
def scan_backward(
    dy: Array | None,
    cache: ScanCache,
    *,
    dhn: Array | None = None,
    need: Sequence[str] | None = None,
    out: ScanGradients | Mapping[str, Array | None] | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> ScanGradients:
    """Gradients of :func:`scan_forward` from those of ``y`` and ``hn``, each of which may be None for zeros.

    With ``l[t] = dy[t] + a[t+1] * l[t+1]``: ``db = l``, ``da[t] = l[t] * y[t-1]`` and ``dh0 = a[0] * l[0]``. `need`
    names those to compute; the default is da, db, and dh0 if forward was given h0. Where `a` was broadcast, da is
    summed, in float64. Results overwrite the buffers of `out`, or are added to them with ``accumulate=True``; ``db``
    may be dy. The cache is only read, so backward may run again.
    """
    if type(cache) is not ScanCache:
        raise ArgumentTypeError("cache", "{cache} must be what scan_forward returned, not {}", type(cache))
    axis, a, h0, reset, y = cache
    dtype = y.dtype
    state_shape = (*y.shape[:axis], *y.shape[axis + 1 :])
    if dy is not None:
        dy = _incoming("dy", dy, y.shape, "y", dtype)
    if dhn is not None:
        dhn = _incoming("dhn", dhn, state_shape, "hn", dtype)
    accumulate = _args.as_flag("accumulate", accumulate)
    da, db, dh0 = buffers = _args.gradient_buffers(out, ScanGradients)
    if need is None:
        want_da, want_db, want_dh0 = True, True, h0 is not None or dh0 is not None
    else:
        want_da, want_db, want_dh0 = _args.needed_gradients(need, _GRADIENTS, buffers)
    if accumulate:
        _args.check_accumulated(_GRADIENTS, (want_da, want_db, want_dh0), buffers)
    threads = _args.thread_count(num_threads)
    da = _result("out.da", da, a.shape, dtype) if want_da else None
    db = _result("out.db", db, y.shape, dtype) if want_db else None
    dh0 = _result("out.dh0", dh0, state_shape, dtype) if want_dh0 else None
    wide = _widened("a", a, y)
    wide_reset = None if reset is None else _widened("reset", reset, y)
    results = {"out.da": da, "out.db": db, "out.dh0": dh0}
    inputs = {"dy": dy, "dhn": dhn, "a": a, "h0": h0, "reset": reset, "y": y}
    to_da, sums = da, None
    if da is not None and da.ndim < y.ndim:
        to_da = da[(None,) * (y.ndim - da.ndim)]
    broadcast = da is not None and wide.shape != y.shape
    if broadcast:
        if out is not None:
            _args.check_disjoint(results, inputs, _IN_PLACE)
        if wide.shape[axis] == 1:
            to_da, sums = None, np.empty(state_shape, FLOAT64)
        else:
            to_da = _memory.empty(y.shape, dtype)
            if accumulate:
                to_da[...] = 0
    arguments = (
        dtype == FLOAT64, axis, dy, dhn, wide, wide_reset, y, h0, _plain(to_da), sums, _plain(db), _plain(dh0),
        accumulate, broadcast, threads,
    )  # fmt: skip
    enter(ScanBackward, _core.scan_backward, arguments, _args.disjoint_arguments, results, inputs, _IN_PLACE)
    if broadcast:
        assert da is not None
        full = np.expand_dims(sums, axis) if sums is not None else to_da
        assert full is not None
        _add_up(full, wide.shape, da, accumulate, threads)
    return ScanGradients(da, db, dh0)


def check_operands(a: Any, b: Any, h0: Any, axis: int) -> int:
    """Check the shapes and dtypes of arrays, tensors or traced arrays. Returns the axis, counted from 0."""
    axis = _time_axis(axis, b)
    shape = tuple(b.shape)
    _check_dtype("a", a, b)
    check_broadcast("a", tuple(a.shape), shape)
    if h0 is not None:
        state = (*shape[:axis], *shape[axis + 1 :])
        if tuple(h0.shape) != state:
            raise ArgumentValueError(
                "h0", "{h0} has shape {}, but {b} of shape {} has {} without axis {}",
                tuple(h0.shape), shape, state, axis,
            )  # fmt: skip
        _check_dtype("h0", h0, b)
    return axis


def _check_dtype(name: str, array: Any, b: Any) -> None:
    if array.dtype != b.dtype:
        raise ArgumentTypeError(name, "{argument} has dtype {}, must be {} as {b} is", array.dtype, b.dtype)


def check_broadcast(name: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> None:
    """Raise unless an array of this shape can be broadcast to the shape of b."""
    offset = len(whole) - len(shape)
    if offset < 0 or any(extent not in (1, whole[offset + i]) for i, extent in enumerate(shape)):
        raise ArgumentValueError(
            name, "{argument} has shape {}, which cannot be broadcast to the shape {} of {b}", shape, whole
        )


def _time_axis(axis: int, b: Any) -> int:
    try:
        index = operator.index(axis)
    except TypeError:
        raise ArgumentTypeError("axis", "{axis} must be an int, not {}", type(axis)) from None
    rank = len(b.shape)
    if not -rank <= index < rank:
        raise ArgumentValueError("axis", "{axis} is {}, but {b} has {} axes", index, rank)
    return index % rank


def _widened(name: str, array: Array, whole: Array) -> Array:
    """The array with as many axes as another, to whose shape it can be broadcast."""
    if array.shape != whole.shape:
        check_broadcast(name, array.shape, whole.shape)
        missing = whole.ndim - array.ndim
        if missing:
            array = array[(None,) * missing]
    _args.check_aligned(name, array)
    return array


def _output_buffers(out: object) -> tuple[Any, Any]:
    """The caller's buffers for y and hn."""
    if not isinstance(out, Mapping):
        return out, None
    for name in set(out).difference(("y", "hn")):
        raise ArgumentValueError("out", "{out} has {!r}; the results are y, hn", name)
    return out.get("y"), out.get("hn")


def _incoming(name: str, value: object, shape: tuple[int, ...], of: str, dtype: np.dtype[Any]) -> Array:
    array = _args.as_array(name, value)
    if array.shape != shape:
        raise ArgumentValueError(
            name, "{argument} has shape {}, but {} has shape {}", array.shape, ArgumentName(of), shape
        )
    _args.check_dtype(name, array, dtype, "as {b} is")
    _args.check_aligned(name, array)
    return array


def _result(name: str, buffer: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if buffer is None:
        return _memory.empty(shape, dtype)
    _args.check_result(name, buffer, shape, dtype)
    return buffer


def _plain(array: Array | None) -> Array | None:
    return None if array is None else _args.as_plain(array)


def _add_up(full: Array, kept: tuple[int, ...], da: Array, accumulate: bool, threads: int) -> None:
    """Sum over the axes along which `kept` has extent 1, in float64 and in a fixed order."""
    total = full
    if full.shape != kept:
        total = np.empty(kept, full.dtype)
        answer = _core.reduce(_SUM, full.dtype == FLOAT64, full, total, True, threads)
        if answer is not None:
            raise_unexplained(answer)
    total = total.reshape(da.shape).astype(da.dtype, copy=False)
    if accumulate:
        np.add(da, total, out=da)
    else:
        da[...] = total
