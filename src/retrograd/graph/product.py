"""Products of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from .. import _core
from ..ops._types import Array
from .elementwise import broadcast, identity
from .operation import Operation, Spec
from .reduction import refuse, sum
from .shaping import broadcast_to, reshape, swapaxes
from .tensor import Node, Operand, Tensor, apply, apply_one, fail


def _floats(**specs: Spec | None) -> None:
    present = [(name, spec.dtype) for name, spec in specs.items() if spec is not None]
    first, wanted = present[0]
    for name, dtype in present:
        if dtype.kind != "f":
            raise TypeError(f"{name} has dtype {dtype}, must be float32 or float64; convert it with .astype")
        if dtype != wanted:
            raise TypeError(f"{first} has dtype {wanted} and {name} has {dtype}; convert one with .astype")


# ---- batched products ------------------------------------------------------------------------------------------------


def _product_shapes(a: Spec, b: Spec) -> Sequence[Spec]:
    _floats(a=a, b=b)
    return (Spec((*a.shape[:-1], b.shape[-1]), a.dtype),)


def _product(inputs: Sequence[Array], results: Sequence[Array]) -> None:
    (a, b), (y,) = inputs, results
    refuse(_core.batched_product(a.dtype.itemsize == 8, a, b, y, False, False, 0))


def _product_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (a, b), (g,) = node.inputs, given
    assert a is not None
    assert b is not None
    assert g is not None
    return [
        apply(_PRODUCT, (g, swapaxes(b, 1, 2)))[0] if needed[0] else None,
        apply(_PRODUCT, (swapaxes(a, 1, 2), g))[0] if needed[1] else None,
    ]


# [B, M, K] by [B, K, N].
_PRODUCT: Final = Operation(
    "matmul",
    _product_shapes,
    compute=_product,
    gradient=_product_gradient,
    contiguous=(),
    flops=lambda inputs, results: 2.0 * inputs[0].elements * inputs[1].shape[-1],
)


def matmul(a: Operand, b: Operand) -> Tensor:
    """``a @ b``: matrices in the last two axes, the others broadcast; a vector is a row or a column, as in NumPy."""
    left, right = identity(a), identity(b)
    rows, columns = left.ndim > 1, right.ndim > 1
    if left.ndim == 0 or right.ndim == 0 or left.shape[-1] != right.shape[-2 if columns else -1]:
        raise fail("matmul", f"shapes {left.shape} and {right.shape} do not fit: the inner axes must be equal")
    x = left if rows else reshape(left, (1, *left.shape))
    w = right if columns else reshape(right, (*right.shape, 1))
    lead, outer, inner, last = broadcast([x.shape[:-2], w.shape[:-2]]), x.shape[-2], x.shape[-1], w.shape[-1]
    if x.ndim > 2 and w.ndim == 2:
        # One matrix for all rows: one large product.
        rows_of_all = math.prod(x.shape[:-1])
        flat: Tensor = apply(_PRODUCT, (reshape(x, (1, rows_of_all, inner)), reshape(w, (1, inner, last))))[0]
    else:
        count = math.prod(lead)

        def stacked(t: Tensor) -> Tensor:
            matrix = t.shape[-2:]
            return reshape(broadcast_to(t, (*lead, *matrix)), (count, *matrix))

        flat = apply(_PRODUCT, (stacked(x), stacked(w)))[0]
    return reshape(flat, (*lead, *((outer,) if rows else ()), *((last,) if columns else ())))


# ---- linear layers ---------------------------------------------------------------------------------------------------


# `transposed`: w is [I, O].


def _oriented(w: Any, transposed: bool) -> Any:
    """w, or its gradient, as [O, I]."""
    return w.T if transposed and w is not None else w


def _linear_shapes(x: Spec, w: Spec, b: Spec | None, *, transposed: bool = False) -> Sequence[Spec]:
    _floats(x=x, w=w, b=b)
    outputs, inputs = w.shape[:: -1 if transposed else 1] if len(w.shape) == 2 else (0, 0)
    if len(w.shape) != 2 or not x.shape or x.shape[-1] != inputs:
        wanted = f"(..., {inputs})" if len(w.shape) == 2 else "a w with two axes"
        raise ValueError(f"x has shape {x.shape}, expected {wanted} to match w of shape {w.shape}")
    if b is not None and b.shape != (outputs,):
        raise ValueError(f"b has shape {b.shape}, but w of shape {w.shape} needs {(outputs,)}")
    return (Spec((*x.shape[:-1], outputs), x.dtype),)


def _rows(array: Array) -> Array:
    return array if array.ndim == 2 else array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _linear(inputs: Sequence[Array], results: Sequence[Array], *, transposed: bool = False) -> None:
    x, w, b = inputs
    y = _rows(results[0])
    refuse(_core.linear_forward(x.dtype.itemsize == 8, _rows(x), _oriented(w, transposed), b, y, False, 0))


def _linear_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (x, w, _), (g,) = node.inputs, given
    found: tuple[Tensor, ...] = apply(_LINEAR_BACKWARD, (g, x, w), node.attributes)
    return [t if wanted else None for t, wanted in zip(found, needed, strict=True)]


_LINEAR: Final = Operation(
    "linear",
    _linear_shapes,
    compute=_linear,
    gradient=_linear_gradient,
    contiguous=(0, 2),
    flops=lambda inputs, results, **_: 2.0 * inputs[0].elements * results[0].shape[-1],
)


def _linear_backward(inputs: Sequence[Array], results: Sequence[Array | None], *, transposed: bool = False) -> None:
    (dy, x, w), (dx, dw, db) = inputs, results
    w, dw = _oriented(w, transposed), _oriented(dw, transposed)
    refuse(
        _core.linear_backward(
            x.dtype.itemsize == 8, _rows(dy), _rows(x), w, None if dx is None else _rows(dx), dw, db, False, False, 0
        )
    )


def _linear_second(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    transposed = node.attributes.get("transposed", False)
    (dy, x, w), (gdx, gdw, gdb) = node.inputs, given
    assert dy is not None
    assert x is not None
    w, gdw = _oriented(w, transposed), _oriented(gdw, transposed)
    assert w is not None
    rows = math.prod(x.shape[:-1])
    flat_dy, flat_x = reshape(dy, (rows, w.shape[0])), reshape(x, (rows, w.shape[1]))
    parts: list[list[Tensor]] = [[], [], []]
    if gdx is not None:
        flat = reshape(gdx, (rows, w.shape[1]))
        parts[0].append(matmul(flat, w.T))
        parts[2].append(_oriented(matmul(flat_dy.T, flat), transposed))
    if gdw is not None:
        parts[0].append(matmul(flat_x, gdw.T))
        parts[1].append(matmul(flat_dy, gdw))
    if gdb is not None:
        parts[0].append(broadcast_to(gdb, flat_dy.shape))
    totals = totals_of(parts, needed)
    return [None if t is None else reshape(t, like.shape) for t, like in zip(totals, node.inputs, strict=True)]  # type: ignore[union-attr]


def totals_of(parts: Sequence[Sequence[Tensor]], needed: Sequence[bool]) -> list[Tensor | None]:
    """The sum of the contributions to each gradient, in order; None where there are none, or none is needed."""
    found: list[Tensor | None] = []
    for contributions, wanted in zip(parts, needed, strict=True):
        total: Tensor | None = None
        for one in contributions if wanted else []:
            total = one if total is None else total + one
        found.append(total)
    return found


_LINEAR_BACKWARD: Final = Operation(
    "linear_backward",
    lambda dy, x, w, **_: (x, w, Spec(dy.shape[-1:], w.dtype)),
    compute=_linear_backward,
    gradient=_linear_second,
    contiguous=(0, 1),
    optional=(0, 1, 2),
    flops=lambda inputs, results, **_: 4.0 * inputs[1].elements * inputs[0].shape[-1],
)


def linear(x: Operand, w: Operand, b: Operand | None = None) -> Tensor:
    """``x @ w.T + b`` for x [..., I], w [O, I] and b [O]; the sum over rows for b is in float64."""
    return apply_one(_LINEAR, (x, w, b))


def affine(x: Operand, w: Operand, b: Operand) -> Tensor:
    """``x @ w + b`` for x [..., I], w [I, O] and b [O], in one call."""
    return apply_one(_LINEAR, (x, w, b), {"transposed": True})


def outer(a: Operand, b: Operand) -> Tensor:
    """The products of every element of a with every element of b, which have one axis each."""
    return matmul(reshape(a, (-1, 1)), reshape(b, (1, -1)))


def vdot(a: Operand, b: Operand) -> Tensor:
    """The sum of the products of all elements."""
    return sum(identity(a) * identity(b))
