"""Activations of arrays and their gradients, and dropout."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

from .. import _core
from . import _args, _memory
from ._args import Array
from .activation import Activation

__all__ = ["activation_backward", "activation_forward", "dropout"]

_DONE: Final = _core.Outcome.done


def activation_forward(
    x: Array, activation: str | Activation, *, out: Array | None = None, num_threads: int | None = None
) -> Array:
    """``f(x)``, element by element. `out` may be `x` itself."""
    function = "activation_forward"
    x = _args.as_array(function, "x", x)
    settings = _settings(function, "x", activation, x.dtype, False)
    threads = _args.thread_count(function, num_threads)
    _args.check_aligned(function, "x", x)
    if out is None:
        out = _memory.empty_like(x)
    else:
        _args.check_result(function, "out", out, x.shape, x.dtype)
    arguments = (*settings, x, out)
    if _core.activation_forward(*arguments, False, threads) is not _DONE:
        _args.check_disjoint(function, {"out": out}, {"x": x}, in_place={"out": ("x",)})
        _core.activation_forward(*arguments, True, threads)
    return out


def activation_backward(
    dy: Array,
    activation: str | Activation,
    *,
    x: Array | None = None,
    y: Array | None = None,
    out: Array | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> Array:
    """``dx = dy * f'``, with the slope found from the input `x` or from the output `y`, whichever is given.

    The input serves every activation, the output those where it tells the slope. `out` may be `dy`, `x` or `y` itself;
    with ``accumulate=True`` dx is added to it.
    """
    function = "activation_backward"
    if (x is None) == (y is None):
        given = "neither" if x is None else "both"
        raise ValueError(f"{function}: the slope is found from x or from y: give one of them, not {given}")
    dy = _args.as_array(function, "dy", dy)
    settings = _settings(function, "dy", activation, dy.dtype, y is not None)
    name = "x" if y is None else "y"
    known = _args.as_array(function, name, x if y is None else y)
    if known.shape != dy.shape:
        raise ValueError(f"{function}: {name} has shape {known.shape}, but dy has shape {dy.shape}")
    _args.check_dtype(function, name, known, dy.dtype, "as dy is")
    threads = _args.thread_count(function, num_threads)
    _args.check_aligned(function, "dy", dy)
    _args.check_aligned(function, name, known)
    if out is not None:
        _args.check_result(function, "out", out, dy.shape, dy.dtype)
    elif accumulate:
        raise ValueError(f"{function}: accumulate=True adds to out, which is missing")
    else:
        out = _memory.empty_like(dy)
    arguments = (*settings, dy, known, y is None, out, bool(accumulate))
    if _core.activation_backward(*arguments, False, threads) is not _DONE:
        _args.check_disjoint(function, {"out": out}, {"dy": dy, name: known}, in_place={"out": ("dy", name)})
        _core.activation_backward(*arguments, True, threads)
    return out


def dropout(x: Array, rate: float, *, seed: int, out: Array | None = None, num_threads: int | None = None) -> Array:
    """``x`` with a share `rate` of its elements set to 0 and the others multiplied by ``1 / (1 - rate)``.

    Which elements are dropped is a matter of `seed` and of an element's number in C order, so the same call on dy is
    backward: ``dx = dropout(dy, rate, seed=seed)``. A dropped element is 0 whatever it was, NaN included. `out` may be
    `x` itself.
    """
    function = "dropout"
    x = _args.as_array(function, "x", x)
    f64 = _args.is_float64(function, "x", x)
    share = _args.as_number(function, "rate", rate)
    if not 0 <= share < 1:
        raise ValueError(f"{function}: rate is {share}, must be at least 0 and below 1")
    number = _args.as_seed(function, seed)
    threads = _args.thread_count(function, num_threads)
    _args.check_aligned(function, "x", x)
    if out is None:
        out = _memory.empty(x.shape, x.dtype)
    else:
        _args.check_result(function, "out", out, x.shape, x.dtype)
    written = _args.contiguous_result(out)
    if not _args.all_contiguous(x, out):
        _args.check_disjoint(function, {"out": out}, {"x": x}, in_place={"out": ("x",)})
    arguments = (f64, np.ascontiguousarray(x).reshape(-1), share, number, written.reshape(-1))
    if _core.dropout(*arguments, False, threads) is not _DONE:
        _args.check_disjoint(function, {"out": out}, {"x": x}, in_place={"out": ("x",)})
        _core.dropout(*arguments, True, threads)
    if written is not out:
        out[...] = written
    return out


def _settings(
    function: str, name: str, activation: str | Activation, dtype: np.dtype[Any], by_output: bool
) -> tuple[int, float, float, int]:
    """The activation, its parameters and the data type, as the engine wants them. Checked once per combination."""
    try:
        return _checked_settings(function, name, activation, dtype, by_output)
    except TypeError:  # an unhashable activation, or a wrong type found inside: say which
        return _checked_settings.__wrapped__(function, name, activation, dtype, by_output)


@lru_cache(maxsize=256)
def _checked_settings(
    function: str, name: str, activation: str | Activation, dtype: np.dtype[Any], by_output: bool
) -> tuple[int, float, float, int]:
    code = _args.dtype_code(function, name, dtype)
    if by_output:
        f = _args.as_output_activation(function, activation, "give x instead of y")
    else:
        f = _args.as_activation(function, activation)
    return (f.code, *_args.rounded_parameters(f, dtype), code)
