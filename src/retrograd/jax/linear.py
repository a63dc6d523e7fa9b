"""Linear layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from ..ops import _args
from ..ops._call import named
from ..ops._types import is_float64
from ..ops.linear import check_bias, check_operands
from ._ffi import Static, as_operand, call, is_perturbed, nonzero, values


@named
def linear(x: Any, w: Any, b: Any = None, *, num_threads: int | None = None) -> jax.Array:
    """``y[..., o] = sum_i x[..., i] * w[o, i] + b[o]`` for x [..., I], w [O, I] and b [O]."""
    x, w = as_operand("x", x), as_operand("w", w)
    is_float64("x", x)
    check_operands(x, w)
    if b is not None:
        b = as_operand("b", b)
        check_bias(b, w)
    return _compiled(_args.thread_count(num_threads), x, w, b)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(threads: int, x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
    y = ((*x.shape[:-1], w.shape[0]), x.dtype)
    return call("retrograd_linear_forward", {"x": x, "w": w, "b": b}, {"y": y}, threads)["y"]


def _forward(threads: int, x: Any, w: Any, b: Any) -> tuple[jax.Array, Any]:
    need = is_perturbed(x), is_perturbed(w), is_perturbed(b)
    y = _linear(threads, *values((x, w, b)))
    # x is read for dw only, and w for dx only.
    saved_x, saved_w = x.value if need[1] else None, w.value if need[0] else None
    return y, (Static((need, x.value.shape, w.value.shape)), saved_x, saved_w)


def _backward(threads: int, saved: Any, cotangent: Any) -> tuple[Any, Any, Any]:
    static, x, w = saved
    need, x_shape, w_shape = static.value
    dy = nonzero(cotangent)
    if dy is None:
        return None, None, None
    shapes = {"dx": x_shape, "dw": w_shape, "db": w_shape[:1]}
    wanted = {name: (shape, dy.dtype) for (name, shape), want in zip(shapes.items(), need, strict=True) if want}
    found = call("retrograd_linear_backward", {"dy": dy, "x": x, "w": w}, wanted, threads)
    return found.get("dx"), found.get("dw"), found.get("db")


_linear.defvjp(_forward, _backward, symbolic_zeros=True)
_compiled = jax.jit(_linear, static_argnums=0)
