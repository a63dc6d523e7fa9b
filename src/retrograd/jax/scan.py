"""The linear recurrence h[t] = a[t] * h[t-1] + b[t]."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..ops import _args
from ..ops._call import named
from ..ops._errors import ArgumentTypeError
from ..ops._types import is_float64
from ..ops.scan import check_broadcast, check_operands
from ._ffi import Static, as_operand, call, is_perturbed, nonzero, values


class ScanOutput(NamedTuple):
    """The states of a recurrence, and the last of them."""

    y: jax.Array
    hn: jax.Array


@named
def scan(
    a: Any, b: Any, h0: Any = None, *, axis: int = 0, reset: Any = None, num_threads: int | None = None
) -> ScanOutput:
    """``y[t] = a[t] * y[t-1] + b[t]`` along an axis, elementwise over the others.

    `a` and `reset` are broadcast to the shape of b. Where `reset` is true, a[t] counts as 0.
    """
    a, b = as_operand("a", a), as_operand("b", b)
    is_float64("b", b)
    if h0 is not None:
        h0 = as_operand("h0", h0)
    axis = check_operands(a, b, h0, axis)
    if reset is not None:
        reset = as_operand("reset", reset)
        if reset.dtype != bool:
            raise ArgumentTypeError("reset", "{reset} has dtype {}; it must be bool", reset.dtype)
        check_broadcast("reset", reset.shape, b.shape)
        a = jnp.where(reset, 0, a)
    return ScanOutput(*_compiled(axis, _args.thread_count(num_threads), jnp.broadcast_to(a, b.shape), b, h0))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan(axis: int, threads: int, a: jax.Array, b: jax.Array, h0: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    results = {"y": (b.shape, b.dtype), "hn": (_without(b.shape, axis), b.dtype)}
    found = call("retrograd_scan_forward", {"b": b, "a": a, "h0": h0}, results, threads, axis=axis)
    return found["y"], found["hn"]


def _forward(axis: int, threads: int, a: Any, b: Any, h0: Any) -> tuple[Any, Any]:
    need = is_perturbed(a), is_perturbed(b), is_perturbed(h0)
    y, hn = _scan(axis, threads, *values((a, b, h0)))
    return (y, hn), (Static(need), a.value, y, None if h0 is None else h0.value)


def _backward(axis: int, threads: int, saved: Any, cotangents: Any) -> tuple[Any, Any, Any]:
    static, a, y, h0 = saved
    dy, dhn = map(nonzero, cotangents)
    if dy is None and dhn is None:
        return None, None, None
    shapes = {"da": y.shape, "db": y.shape, "dh0": _without(y.shape, axis)}
    wanted = {name: (shape, y.dtype) for (name, shape), want in zip(shapes.items(), static.value, strict=True) if want}
    arguments = {"y": y, "a": a, "h0": h0, "dy": dy, "dhn": dhn}
    found = call("retrograd_scan_backward", arguments, wanted, threads, axis=axis)
    return found.get("da"), found.get("db"), found.get("dh0")


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


_scan.defvjp(_forward, _backward, symbolic_zeros=True)
_compiled = jax.jit(_scan, static_argnums=(0, 1))
