"""Elementwise activations, their gradients, and dropout."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .. import _core
from . import _args, _memory
from ._call import Refusal, enter, public
from ._errors import ArgumentValueError
from ._records import ActivationBackward, ActivationForward, Dropout
from ._types import Array, dtype_code, is_float64
from .activation import Activation, check_output_tells_slope

__all__ = ["activation_backward", "activation_forward", "dropout"]


@public
def activation_forward(
    x: Array, activation: str | Activation, *, out: Array | None = None, num_threads: int | None = None
) -> Array:
    """Apply ``f(x)`` to every element. `out` may be `x` itself."""
    x = _args.as_array("x", x)
    settings = _settings("x", activation, x.dtype, False)
    threads = _args.thread_count(num_threads)
    y = _memory.empty_like(x) if out is None else out

    arguments = (*settings, x, y, False, threads)

    def fix(refusal: Refusal, refused: ActivationForward) -> ActivationForward:
        _args.check_aligned("x", x)
        _args.check_result("out", y, x.shape, x.dtype)
        plain = refused._replace(y=_args.as_plain(y))
        return _args.disjoint_arguments(refusal, plain, {"out": y}, {"x": x}, in_place={"out": ("x",)})

    enter(ActivationForward, _core.activation_forward, arguments, fix)
    return y


@public
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
    """Compute ``dx = dy * f'``, with the slope from the input `x` or the output `y`, whichever is given.

    The input works for every activation, the output only where it determines the slope. `out` may be `dy`, `x` or `y`
    itself; with ``accumulate=True`` dx is added to it.
    """
    if (x is None) == (y is None):
        given = "neither" if x is None else "both"
        raise ArgumentValueError("x", "the slope is computed from {x} or from {y}: give one of them, not {}", given)
    dy = _args.as_array("dy", dy)
    settings = _settings("dy", activation, dy.dtype, y is not None)
    name = "x" if y is None else "y"
    known = _args.as_array(name, x if y is None else y)
    if known.shape != dy.shape:
        raise ArgumentValueError(name, "{argument} has shape {}, but {dy} has shape {}", known.shape, dy.shape)
    _args.check_dtype(name, known, dy.dtype, "as {dy} is")
    threads = _args.thread_count(num_threads)
    if accumulate and out is None:
        raise ArgumentValueError("out", "{accumulate}=True adds to {out}, which is missing")
    dx = _memory.empty_like(dy) if out is None else out
    arguments = (*settings, dy, known, y is None, dx, bool(accumulate), False, threads)

    def fix(refusal: Refusal, refused: ActivationBackward) -> ActivationBackward:
        _args.check_aligned("dy", dy)
        _args.check_aligned(name, known)
        _args.check_result("out", dx, dy.shape, dy.dtype)
        plain = refused._replace(dx=_args.as_plain(dx))
        return _args.disjoint_arguments(
            refusal, plain, {"out": dx}, {"dy": dy, name: known}, in_place={"out": ("dy", name)}
        )

    enter(ActivationBackward, _core.activation_backward, arguments, fix)
    return dx


@public
def dropout(x: Array, rate: float, *, seed: int, out: Array | None = None, num_threads: int | None = None) -> Array:
    """Set a fraction `rate` of the elements of `x` to 0 and multiply the others by ``1 / (1 - rate)``.

    The mask depends only on `seed` and on each element's index in C order, so the same call on dy is the backward pass:
    ``dx = dropout(dy, rate, seed=seed)``. A dropped element is 0 even if it was NaN. `out` may be `x` itself.
    """
    x = _args.as_array("x", x)
    f64 = is_float64("x", x)
    rate = _args.as_number("rate", rate)
    if not 0 <= rate < 1:
        raise ArgumentValueError("rate", "{rate} is {}, must be at least 0 and below 1", rate)
    seed = _args.as_seed(seed)
    threads = _args.thread_count(num_threads)
    _args.check_aligned("x", x)
    if out is None:
        out = _memory.empty(x.shape, x.dtype)
    else:
        _args.check_result("out", out, x.shape, x.dtype)
    written = _args.contiguous_result(out)
    copied = not _args.all_contiguous(x, out)
    if copied:
        _args.check_disjoint({"out": out}, {"x": x}, in_place={"out": ("x",)})
    flat = np.ascontiguousarray(x).reshape(-1)
    arguments = (f64, flat, rate, seed, written.reshape(-1), copied, threads)
    enter(Dropout, _core.dropout, arguments, _args.disjoint_arguments, {"out": out}, {"x": x}, {"out": ("x",)})
    if written is not out:
        out[...] = written
    return out


def _settings(
    name: str, activation: str | Activation, dtype: np.dtype[Any], by_output: bool
) -> tuple[int, float, float, int]:
    """The activation's code and parameters, and the dtype code, for the engine. Checked once per combination."""
    try:
        return _checked_settings(name, activation, dtype, by_output)
    except TypeError:  # an unhashable activation, or a type error from the checks: run them again without the memo
        return _checked_settings.__wrapped__(name, activation, dtype, by_output)


@lru_cache(maxsize=256)
def _checked_settings(
    name: str, activation: str | Activation, dtype: np.dtype[Any], by_output: bool
) -> tuple[int, float, float, int]:
    code = dtype_code(name, dtype)
    f = _args.as_activation(activation)
    if by_output:
        check_output_tells_slope(f, "give {x} instead of {y}")
    return (f.code, *_args.rounded_parameters(f, dtype), code)
