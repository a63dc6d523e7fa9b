"""Reductions over any axes. Sums of float32 are accumulated in float64, in an order that depends on the shape alone."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

import retrograd.graph as G

from .. import _core
from ..ops._types import Array
from .operation import Gradient, Operation, Spec
from .operators import Axes, Operators
from .tensor import BOOL, Node, Operand, Tensor, apply_one, fail

KINDS: Final = dict(_core.reductions())
INT64: Final = np.dtype(np.int64)


def as_axes(axis: Axes | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Axes as sorted numbers from 0; None: all."""
    if axis is None:
        return tuple(range(ndim))
    given = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(sorted(a + ndim if a < 0 else a for a in given))
    if builtins.any(not 0 <= a < ndim for a in axes):
        raise ValueError(f"axis is {axis}, but there are {ndim} axes")
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis is {axis}, which names an axis twice")
    return axes


def kept_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with extent 1 in these axes."""
    return tuple(1 if i in axes else extent for i, extent in enumerate(shape))


def _reduced(spec: Spec, axes: tuple[int, ...], keepdims: bool, dtype: np.dtype[Any] | None = None) -> Sequence[Spec]:
    kept = kept_shape(spec.shape, axes)
    shape = kept if keepdims else tuple(e for i, e in enumerate(spec.shape) if i not in axes)
    return (Spec(shape, dtype or spec.dtype),)


def _expanded(g: Tensor, node: Node) -> Tensor:
    """The gradient of a reduced result with its axes kept."""
    (x,) = node.inputs
    assert x is not None
    return G.reshape(g, kept_shape(x.shape, node.attributes["axes"]))


def refuse(answer: _core.Refusal | None) -> None:
    """Raise if the engine refused a call that the shape rules should have caught."""
    if answer is not None:
        raise RuntimeError(f"the engine refused {answer.argument}: {answer.reason.name}")


def _declare(name: str, gradient: Gradient, needs_elements: bool = False, engine: str = "") -> Operation:
    kind = KINDS[engine or name]

    def shapes(x: Spec, *, axes: tuple[int, ...], keepdims: bool) -> Sequence[Spec]:
        if x.dtype.kind != "f":
            raise TypeError(f"x has dtype {x.dtype}, must be float32 or float64; convert it with .astype")
        if needs_elements and 0 in (x.shape[a] for a in axes):
            raise ValueError(f"x has shape {x.shape}: there is no {name} of no elements")
        return _reduced(x, axes, keepdims)

    def compute(inputs: Sequence[Array], results: Sequence[Array], *, axes: tuple[int, ...], keepdims: bool) -> None:
        x, y = inputs[0], results[0]
        f64 = x.dtype.itemsize == 8
        refuse(_core.reduce(kind, f64, x, y.reshape(kept_shape(x.shape, axes)), False, 0))

    return Operation(
        name, shapes, compute=compute, gradient=gradient, contiguous=(),
        flops=lambda inputs, results, **_: inputs[0].elements,
    )  # fmt: skip


def _spread(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (x,), (g,) = node.inputs, given
    assert x is not None
    assert g is not None
    return [G.broadcast_to(_expanded(g, node), x.shape)]


def _mean_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (x,), (g,) = node.inputs, given
    assert x is not None
    assert g is not None
    count = 1
    for axis in node.attributes["axes"]:
        count *= x.shape[axis]
    return [G.broadcast_to(_expanded(g, node) * (1.0 / count if count else 0.0), x.shape)]


def _squares_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (x,), (g,) = node.inputs, given
    assert x is not None
    assert g is not None
    return [_expanded(g, node) * 2.0 * x]


def _extreme_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    """Elements that share the largest value share the gradient evenly, as in JAX and torch.amax."""
    (x,), (g,) = node.inputs, given
    assert x is not None
    assert g is not None
    winners = G.cast(G.equal(x, _expanded(node.result, node)), x.dtype)
    count = sum(winners, node.attributes["axes"], keepdims=True)
    return [winners * (_expanded(g, node) / count)]


def _product_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    """The product of the other elements, also where one of them is 0."""
    (x,), (g,) = node.inputs, given
    assert x is not None
    assert g is not None
    axes = node.attributes["axes"]
    zeros = G.cast(G.equal(x, 0.0), x.dtype)
    count = sum(zeros, axes, keepdims=True)
    rest = prod(G.where(G.equal(x, 0.0), 1.0, x), axes, keepdims=True)  # of the elements that are not 0
    others = G.where(
        G.equal(count, 0.0), rest / G.where(G.equal(x, 0.0), 1.0, x), G.where(G.equal(count, 1.0), zeros * rest, 0.0)
    )
    return [_expanded(g, node) * others]


_SUM: Final = _declare("sum", _spread)
_MEAN: Final = _declare("mean", _mean_gradient)
_SQUARES: Final = _declare("sum_of_squares", _squares_gradient)
_MAX: Final = _declare("max", _extreme_gradient, needs_elements=True)
_MIN: Final = _declare("min", _extreme_gradient, needs_elements=True)
_PRODUCT: Final = _declare("prod", _product_gradient, engine="product")


def _reduce(operation: Operation, x: Operand, axis: Axes | Sequence[int], keepdims: bool) -> Tensor:
    ndim = x.ndim if isinstance(x, (Operators, np.ndarray)) else np.ndim(x)
    try:
        axes = as_axes(axis, ndim)
    except ValueError as error:
        raise fail(operation.name, str(error)) from None
    if not axes and isinstance(x, Tensor) and operation is not _SQUARES:
        return x
    return apply_one(operation, (x,), {"axes": axes, "keepdims": bool(keepdims)})


def sum(x: Operand, axis: Axes | Sequence[int] = None, *, keepdims: bool = False) -> Tensor:
    """The sum over axes; None: over all."""
    return _reduce(_SUM, x, axis, keepdims)


def mean(x: Operand, axis: Axes | Sequence[int] = None, *, keepdims: bool = False) -> Tensor:
    """The mean over axes; None: over all."""
    return _reduce(_MEAN, x, axis, keepdims)


def sum_of_squares(x: Operand, axis: Axes | Sequence[int] = None, *, keepdims: bool = False) -> Tensor:
    """``sum(x * x)``"""
    return _reduce(_SQUARES, x, axis, keepdims)


def max(x: Operand, axis: Axes | Sequence[int] = None, *, keepdims: bool = False) -> Tensor:
    """The largest element; NaN if there is one. Elements that share it share its gradient evenly."""
    return _reduce(_MAX, x, axis, keepdims)


def min(x: Operand, axis: Axes | Sequence[int] = None, *, keepdims: bool = False) -> Tensor:
    """The smallest element; NaN if there is one. Elements that share it share its gradient evenly."""
    return _reduce(_MIN, x, axis, keepdims)


def prod(x: Operand, axis: Axes | Sequence[int] = None, *, keepdims: bool = False) -> Tensor:
    """The product over axes. Its gradient is right where elements are 0 too."""
    return _reduce(_PRODUCT, x, axis, keepdims)


def var(x: Operand, axis: Axes | Sequence[int] = None, *, keepdims: bool = False) -> Tensor:
    """The biased variance, as ``mean((x - mean(x))**2)``."""
    tensor = G.identity(x)
    return mean(G.square(tensor - mean(tensor, axis, keepdims=True)), axis, keepdims=keepdims)


def logsumexp(x: Operand, axis: Axes | Sequence[int] = None, *, keepdims: bool = False) -> Tensor:
    """``log(sum(exp(x)))``, without overflow."""
    tensor = G.identity(x)
    largest = G.stop_gradient(max(tensor, axis, keepdims=True))
    shift = G.where(G.isfinite(largest), largest, 0.0)
    total = G.log(sum(G.exp(tensor - shift), axis, keepdims=True)) + shift
    if keepdims:
        return total
    axes = as_axes(axis, tensor.ndim)
    return G.reshape(total, tuple(e for i, e in enumerate(tensor.shape) if i not in axes))


def l1_norm(x: Operand, axis: Axes | Sequence[int] = None, keepdims: bool = False) -> Tensor:
    """``sum(abs(x))``"""
    return sum(G.absolute(x), axis, keepdims=keepdims)


def l2_norm(x: Operand, axis: Axes | Sequence[int] = None, keepdims: bool = False) -> Tensor:
    """``sqrt(sum(x**2))``; its gradient is 0 where it is 0.

    The squares are not scaled: of float32, elements above 1.8e19 give infinity, and some below 1e-19 lose digits.
    """
    total = sum_of_squares(x, axis, keepdims=keepdims)
    zero = G.equal(total, 0.0)
    return G.where(zero, 0.0, G.sqrt(G.where(zero, 1.0, total)))


def log_sum(x: Operand, axis: Axes | Sequence[int] = None, keepdims: bool = False) -> Tensor:
    """``log(sum(x))``"""
    return G.log(sum(x, axis, keepdims=keepdims))


def fmax_reduce(x: Operand, axis: Axes | Sequence[int] = None, keepdims: bool = False) -> Tensor:
    """The largest element that is not NaN; NaN if all are. Elements that share it share its gradient evenly."""
    return _ignoring_nan(max, x, -math.inf, axis, keepdims)


def fmin_reduce(x: Operand, axis: Axes | Sequence[int] = None, keepdims: bool = False) -> Tensor:
    """The smallest element that is not NaN; NaN if all are. Elements that share it share its gradient evenly."""
    return _ignoring_nan(min, x, math.inf, axis, keepdims)


def _ignoring_nan(
    function: Callable[..., Tensor], x: Operand, neutral: float, axis: Axes | Sequence[int], keepdims: bool
) -> Tensor:
    missing = G.isnan(x)
    found = function(G.where(missing, neutral, x), axis, keepdims=keepdims)
    return G.where(all(missing, axis, keepdims=keepdims), math.nan, found)


def sum_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The sum over the axes that broadcasting from `shape` has stretched."""
    if x.shape == shape:
        return x
    lead = x.ndim - len(shape)
    axes = tuple(i for i in range(x.ndim) if i < lead or (shape[i - lead] == 1 and x.shape[i] != 1))
    return G.reshape(sum(x, axes, keepdims=True), shape) if axes else G.reshape(x, shape)


# ---- without a derivative --------------------------------------------------------------------------------------------


def _bool_shapes(x: Spec, *, axes: tuple[int, ...], keepdims: bool, every: bool) -> Sequence[Spec]:
    if x.dtype != BOOL:
        raise TypeError(f"x has dtype {x.dtype}, must be bool; compare it with something")
    return _reduced(x, axes, keepdims)


def _bool_compute(
    inputs: Sequence[Array], results: Sequence[Array], *, axes: tuple[int, ...], keepdims: bool, every: bool
) -> None:
    x, y = inputs[0], results[0]
    refuse(_core.reduce_bool(every, x, y.reshape(kept_shape(x.shape, axes)), False, 0))


_BOOL: Final = Operation(
    "reduce_bool", _bool_shapes, compute=_bool_compute, contiguous=(), why_not="bools have no derivative"
)


def all(x: Operand, axis: Axes | Sequence[int] = None, *, keepdims: bool = False) -> Tensor:
    """Whether every element is true."""
    return _of_bools(x, axis, keepdims, True)


def any(x: Operand, axis: Axes | Sequence[int] = None, *, keepdims: bool = False) -> Tensor:
    """Whether an element is true."""
    return _of_bools(x, axis, keepdims, False)


def _of_bools(x: Operand, axis: Axes | Sequence[int], keepdims: bool, every: bool) -> Tensor:
    tensor = G.identity(x)
    attributes = {"axes": as_axes(axis, tensor.ndim), "keepdims": bool(keepdims), "every": every}
    return apply_one(_BOOL, (tensor,), attributes)


def _arg_shapes(x: Spec, *, axis: int, largest: bool) -> Sequence[Spec]:
    if x.dtype.kind != "f":
        raise TypeError(f"x has dtype {x.dtype}, must be float32 or float64; convert it with .astype")
    if x.shape[axis] == 0:
        raise ValueError(f"x has shape {x.shape}: there is no largest of no elements")
    return _reduced(x, (axis,), False, INT64)


def _arg_compute(inputs: Sequence[Array], results: Sequence[Array], *, axis: int, largest: bool) -> None:
    x, y = inputs[0], results[0]
    refuse(_core.arg_reduce(largest, x.dtype.itemsize == 8, x, y.reshape(kept_shape(x.shape, (axis,))), False, 0))


_ARG: Final = Operation("arg_reduce", _arg_shapes, compute=_arg_compute, contiguous=(), why_not="indices are integers")


def argmax(x: Operand, axis: int | None = None) -> Tensor:
    """The index of the first largest element along an axis, or of all; int64."""
    return _arg(x, axis, True)


def argmin(x: Operand, axis: int | None = None) -> Tensor:
    """The index of the first smallest element along an axis, or of all; int64."""
    return _arg(x, axis, False)


def _arg(x: Operand, axis: int | None, largest: bool) -> Tensor:
    tensor = G.identity(x)
    if axis is None:
        tensor, axis = G.reshape(tensor, (-1,)), 0
    (number,) = as_axes(axis, tensor.ndim)
    return apply_one(_ARG, (tensor,), {"axis": number, "largest": largest})
