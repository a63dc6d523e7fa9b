"""The linear recurrence h[t] = a[t] * h[t-1] + b[t] in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from .. import _core
from ..ops._types import Array
from .elementwise import identity, where
from .operation import Operation, Spec
from .reduction import as_axes, refuse
from .shaping import broadcast_to, concatenate, expand_dims, reshape, take_slice, zeros
from .tensor import Node, Operand, Tensor, apply, fail


class Scan(NamedTuple):
    """The states of a recurrence, and the last of them, without the axis of time."""

    y: Tensor
    hn: Tensor


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _shapes(a: Spec, b: Spec, h0: Spec | None, *, axis: int) -> Sequence[Spec]:
    if b.dtype.kind != "f":
        raise TypeError(f"b has dtype {b.dtype}, must be float32 or float64")
    if a != b:
        raise ValueError(f"a is {a!r}, expected {b!r} as b is")
    state = Spec(_without(b.shape, axis), b.dtype)
    if h0 is not None and h0 != state:
        raise ValueError(f"h0 is {h0!r}, expected {state!r}: b without axis {axis}")
    return b, state


def _forward(inputs: Sequence[Array | None], results: Sequence[Array | None], *, axis: int) -> None:
    (a, b, h0), (y, hn) = inputs, results
    assert b is not None
    refuse(_core.scan_forward(b.dtype.itemsize == 8, axis, a, b, h0, None, y, hn, False, 0))


def _gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    a, _, h0 = node.inputs
    return apply(_BACKWARD, (*given, a, node.results[0], h0), node.attributes)


_SCAN: Final = Operation(
    "scan", _shapes, compute=_forward, gradient=_gradient, contiguous=(), optional=(0, 1), in_place=[(0, 1)],
    flops=lambda inputs, results, **_: 2.0 * inputs[1].elements,
)  # fmt: skip


def _backward_shapes(
    dy: Spec | None, dhn: Spec | None, a: Spec, y: Spec, h0: Spec | None, *, axis: int
) -> Sequence[Spec]:
    return y, y, Spec(_without(y.shape, axis), y.dtype)


def _backward(inputs: Sequence[Array | None], results: Sequence[Array | None], *, axis: int) -> None:
    dy, dhn, a, y, h0 = inputs
    da, db, dh0 = results
    assert y is not None
    f64 = y.dtype.itemsize == 8
    refuse(_core.scan_backward(f64, axis, dy, dhn, a, None, y, h0, da, None, db, dh0, False, False, 0))


def _second(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    """With l = db, da = l * h[t-1] and dh0 = a[0] * l[0], the gradient that reaches l is itself a recurrence:

    m[t] = gdb[t] + gda[t] * h[t-1] + a[t] * m[t-1], from m[-1] = gdh0, because l[t-1] has the term a[t] * l[t].
    Then ddy = m, ddhn = m[T-1], the gradient of a is l[t] * m[t-1], and that of h[t-1] is gda[t] * l[t].
    """
    (_, _, a, y, h0), (gda, gdb, gdh0) = node.inputs, given
    axis = int(node.attributes["axis"])
    assert a is not None
    assert y is not None
    steps, before = y.shape[axis], (slice(None),) * axis
    state = _without(y.shape, axis)

    def shifted(first: Tensor | None, states: Tensor) -> Tensor:
        """The states before every step."""
        start = zeros(state, y.dtype) if first is None else first
        earlier = take_slice(states, (*before, slice(0, max(steps - 1, 0))))
        return concatenate([expand_dims(start, axis), earlier], axis) if steps else states

    l = node.results[1]  # noqa: E741 (the adjoint, as in the docs)
    terms = [t for t in (gdb, None if gda is None else gda * shifted(h0, y)) if t is not None]
    source = zeros(y.shape, y.dtype) if not terms else terms[0] if len(terms) == 1 else terms[0] + terms[1]
    m, mn = apply(_SCAN, (a, source, gdh0), node.attributes)
    dy_states = dh0 = None
    if gda is not None and not steps:
        dy_states, dh0 = zeros(y.shape, y.dtype), zeros(state, y.dtype)
    elif gda is not None:
        first, later = (take_slice(gda * l, (*before, part)) for part in (slice(0, 1), slice(1, steps)))
        dh0 = reshape(first, state)
        dy_states = concatenate([later, zeros(first.shape, y.dtype)], axis)
    found = [m, mn, l * shifted(gdh0, m), dy_states, dh0]
    return [t if want else None for t, want in zip(found, needed, strict=True)]


_BACKWARD: Final = Operation(
    "scan_backward", _backward_shapes, compute=_backward, gradient=_second, contiguous=(), optional=(0, 1, 2),
    in_place=[(1, 0)], flops=lambda inputs, results, **_: 3.0 * inputs[3].elements,
)  # fmt: skip


def scan(a: Operand, b: Operand, h0: Operand | None = None, *, axis: int = 0, reset: Operand | None = None) -> Scan:
    """``y[t] = a[t] * y[t-1] + b[t]`` along an axis, elementwise over the others, as :func:`retrograd.scan_forward`.

    `a` and `reset` are broadcast to the shape of b. Where `reset` is true, a[t] counts as 0.
    """
    source, factors = identity(b), identity(a)
    try:
        (number,) = as_axes(axis, source.ndim)
    except ValueError as error:
        raise fail("scan", str(error)) from None
    if reset is not None:
        stops = identity(reset)
        if stops.dtype.kind != "b":
            raise fail("scan", f"reset has dtype {stops.dtype}, must be bool", TypeError)
        factors = where(stops, 0.0, factors)
    if factors.shape != source.shape:
        try:
            factors = broadcast_to(factors, source.shape)
        except ValueError:
            raise fail(
                "scan", f"a has shape {identity(a).shape}, which does not broadcast to {source.shape} of b"
            ) from None
    return Scan(*apply(_SCAN, (factors, source, h0), {"axis": number}))
