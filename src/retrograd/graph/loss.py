"""Losses. Each computes its gradient in the same pass, for a backward pass that only scales it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .. import _core
from ..ops._errors import ArgumentError
from ..ops._types import Array
from ..ops.loss import ABSOLUTE, DIFFERENCE, HINGE, LOG, REDUCTIONS, SIGMOID, Reduction
from .elementwise import cast, identity, maximum, negative, not_equal
from .gradient import stop_gradient
from .indexing import refuse_index
from .operation import Operation, Spec
from .reduction import INT64, refuse, sum
from .shaping import broadcast_to, expand_dims
from .tensor import Node, Operand, Tensor, apply, fail

_F64: Final = np.dtype(np.float64)
_ONCE: Final = "a loss is a single call of the engine; second derivatives need one made of operations"


def _checked(name: str, reduction: str, scale: float) -> None:
    if reduction not in REDUCTIONS:
        raise fail(name, f"reduction is {reduction!r}; there are {', '.join(map(repr, REDUCTIONS))}")
    if not isinstance(scale, (int, float)):
        raise fail(name, f"scale must be a number, not {type(scale).__name__}", TypeError)


def _scaled(node: Node, given: Sequence[Tensor | None], rows: bool) -> Tensor:
    """The gradient of the first input: the engine's, times the gradient of the loss."""
    g, second = given
    if second is not None:
        file, line = node.line
        raise TypeError(f"gradients: {node.operation.name} ({file}:{line}) has no second derivative: {_ONCE}")
    assert g is not None
    unit = node.results[1]
    g = cast(g, unit.dtype)
    if g.shape and rows:
        g = expand_dims(g, -1)
    return unit * g


# ---- rows ------------------------------------------------------------------------------------------------------------


def _entropy_shapes(logits: Spec, labels: Spec, weights: Spec | None, *, reduction: str, **_: object) -> Sequence[Spec]:
    if logits.dtype.kind != "f" or not logits.shape:
        raise TypeError(f"logits is {logits!r}, must be floats with at least one axis")
    rows = logits.shape[:-1]
    expected = Spec(rows, INT64) if labels.dtype.kind == "i" else logits
    if labels != expected:
        raise ValueError(
            f"labels is {labels!r}, but logits of shape {logits.shape} need int64{list(rows)}, or {logits!r}"
        )
    if weights is not None and weights != Spec(rows, logits.dtype):
        raise ValueError(f"weights is {weights!r}, expected {Spec(rows, logits.dtype)!r}")
    return (Spec(rows, _F64) if reduction == "none" else Spec((), logits.dtype)), logits


def _entropy(
    inputs: Sequence[Array | None],
    results: Sequence[Array | None],
    *,
    reduction: str,
    scale: float,
    ignore_index: int,
    smoothing: float,
) -> None:
    (logits, labels, weights), (loss, gradient) = inputs, results
    assert logits is not None
    assert labels is not None
    assert loss is not None
    rows, classes = math.prod(logits.shape[:-1]), logits.shape[-1]
    soft = labels.dtype != INT64
    answer = _core.softmax_cross_entropy(
        logits.dtype.itemsize == 8,
        logits.reshape(rows, classes),
        None if soft else labels.reshape(-1),
        ignore_index,
        labels.reshape(rows, classes) if soft else None,
        None if weights is None else weights.reshape(-1),
        1.0,
        smoothing,
        REDUCTIONS[reduction],
        scale,
        loss.reshape(-1) if reduction == "none" else None,
        None if gradient is None else gradient.reshape(rows, classes),
        None if reduction == "none" else loss,
        False,
        0,
    )
    if isinstance(answer, _core.Refusal):
        refuse_index(answer, None if soft else labels[labels != ignore_index], classes)


def _rows_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    if any(needed[1:]):
        raise fail("gradients", f"{node.operation.name} has a gradient for its first argument only", TypeError)
    return [_scaled(node, given, True), *[None] * (len(node.inputs) - 1)]


_ENTROPY: Final = Operation(
    "softmax_cross_entropy", _entropy_shapes, compute=_entropy, gradient=_rows_gradient, optional=(1,),
    in_place=[(1, 0)], why_not=_ONCE, flops=lambda inputs, results, **_: 6.0 * inputs[0].elements,
)  # fmt: skip


def _weights(weights: Operand | None, like: Tensor, rows: bool) -> Any:
    """Weights of the losses' shape, whose first axes the given ones may be."""
    if weights is None:
        return None
    given = identity(weights) if not isinstance(weights, (int, float)) else identity(np.asarray(weights, like.dtype))
    shape = like.shape[:-1] if rows else like.shape
    if given.shape != shape[: given.ndim]:
        raise fail("loss", f"weights has shape {given.shape}, but there are losses of shape {shape}")
    spread = expand_dims(given, tuple(range(given.ndim, len(shape)))) if given.ndim < len(shape) else given
    return broadcast_to(spread, shape)


def softmax_cross_entropy(
    logits: Operand,
    labels: Operand,
    *,
    weights: Operand | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    scale: float = 1.0,
) -> Tensor:
    """The cross entropy of logits [..., V] with integer labels [...] or targets [..., V].

    As :func:`retrograd.softmax_cross_entropy`; the loss is rounded to the dtype of the logits.
    """
    _checked("softmax_cross_entropy", reduction, scale)
    if not 0 <= label_smoothing <= 1:
        raise fail("softmax_cross_entropy", f"label_smoothing is {label_smoothing}, must be from 0 to 1")
    x = identity(logits)
    options = {
        "reduction": reduction, "scale": float(scale), "ignore_index": int(ignore_index),
        "smoothing": float(label_smoothing),
    }  # fmt: skip
    loss: Tensor = apply(_ENTROPY, (x, _as_labels(labels), _weights(weights, x, True)), options, dtype=INT64)[0]
    return cast(loss, x.dtype) if reduction == "none" else loss


def categorical_cross_entropy(
    logits: Operand,
    target: Operand,
    *,
    weights: Operand | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
) -> Tensor:
    """``-sum(target * log softmax(logits)) / m``, m the number of targets of the row that are not 0.

    As :func:`retrograd.categorical_cross_entropy`, with one weight for each row.
    """
    given = identity(target)
    nonzero = cast(not_equal(given, 0.0), given.dtype)
    shares = given / maximum(sum(nonzero, -1, keepdims=True), 1.0)
    return softmax_cross_entropy(logits, stop_gradient(shares), weights=weights, reduction=reduction, scale=scale)


def _as_labels(labels: Operand) -> Operand:
    tensor = identity(labels)
    return cast(tensor, INT64) if tensor.dtype.kind == "i" else tensor


def _cosine_shapes(y: Spec, target: Spec, weights: Spec | None, *, reduction: str, **_: object) -> Sequence[Spec]:
    if y.dtype.kind != "f" or not y.shape:
        raise TypeError(f"y is {y!r}, must be floats with at least one axis")
    if target != y:
        raise ValueError(f"target is {target!r}, but y is {y!r}")
    return (Spec(y.shape[:-1], _F64) if reduction == "none" else Spec((), y.dtype)), y


def _cosine(inputs: Sequence[Array | None], results: Sequence[Array | None], *, reduction: str, scale: float) -> None:
    (y, target, weights), (loss, gradient) = inputs, results
    assert y is not None
    assert target is not None
    assert loss is not None
    rows, width = math.prod(y.shape[:-1]), y.shape[-1]
    answer = _core.cosine_distance(
        y.dtype.itemsize == 8,
        y.reshape(rows, width),
        target.reshape(rows, width),
        None if weights is None else weights.reshape(-1),
        1.0,
        REDUCTIONS[reduction],
        scale,
        loss.reshape(-1) if reduction == "none" else None,
        None if gradient is None else gradient.reshape(rows, width),
        None if reduction == "none" else loss,
        False,
        0,
    )
    refuse(answer if isinstance(answer, _core.Refusal) else None)


_COSINE: Final = Operation(
    "cosine_distance", _cosine_shapes, compute=_cosine, gradient=_rows_gradient, optional=(1,), why_not=_ONCE
)


def cosine_distance(
    y: Operand,
    target: Operand,
    *,
    weights: Operand | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
) -> Tensor:
    """``1 - sum(y * target)`` of rows of length 1, as :func:`retrograd.cosine_distance`."""
    _checked("cosine_distance", reduction, scale)
    x = identity(y)
    options = {"reduction": reduction, "scale": float(scale)}
    loss: Tensor = apply(_COSINE, (x, target, _weights(weights, x, True)), options)[0]
    return cast(loss, x.dtype) if reduction == "none" else loss


# ---- elements --------------------------------------------------------------------------------------------------------


def _element_shapes(y: Spec, target: Spec, weights: Spec | None, *, reduction: str, **_: object) -> Sequence[Spec]:
    if y.dtype.kind != "f":
        raise TypeError(f"y has dtype {y.dtype}, must be float32 or float64")
    if target != y:
        raise ValueError(f"target is {target!r}, but y is {y!r}")
    return (y if reduction == "none" else Spec((), y.dtype)), y


def _elements(
    inputs: Sequence[Array | None],
    results: Sequence[Array | None],
    *,
    kind: int,
    a: float,
    b: float,
    reduction: str,
    scale: float,
) -> None:
    (y, target, weights), (loss, gradient) = inputs, results
    assert y is not None
    assert target is not None
    assert loss is not None
    answer = _core.element_losses(
        y.dtype.itemsize == 8,
        kind,
        a,
        b,
        y.reshape(-1),
        target.reshape(-1),
        None if weights is None else weights.reshape(-1),
        1.0,
        REDUCTIONS[reduction],
        scale,
        loss.reshape(-1) if reduction == "none" else None,
        None if gradient is None else gradient.reshape(-1),
        None if reduction == "none" else loss,
        False,
        0,
    )
    refuse(answer if isinstance(answer, _core.Refusal) else None)


def _elements_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    of_difference = node.attributes["kind"] in (DIFFERENCE, ABSOLUTE)
    if needed[2] or (needed[1] and not of_difference):
        raise fail("gradients", "this loss has a gradient for its first argument only", TypeError)
    dy = _scaled(node, given, False)
    return [dy if needed[0] else None, negative(dy) if needed[1] else None, None]


_ELEMENTS: Final = Operation(
    "element_losses", _element_shapes, compute=_elements, gradient=_elements_gradient, optional=(1,),
    in_place=[(1, 0)], why_not=_ONCE, flops=lambda inputs, results, **_: 4.0 * inputs[0].elements,
)  # fmt: skip


def _element_loss(
    name: str, kind: int, a: float, b: float, y: Operand, target: Operand, weights: Any, reduction: str, scale: float
) -> Tensor:
    _checked(name, reduction, scale)
    x = identity(y)
    options = {"kind": kind, "a": float(a), "b": float(b), "reduction": reduction, "scale": float(scale)}
    try:
        loss: Tensor = apply(_ELEMENTS, (x, target, _weights(weights, x, False)), options)[0]
    except ArgumentError as error:
        if error.function == _ELEMENTS.name:
            error.function = name
        raise
    return loss


def mean_squared_error(
    y: Operand,
    target: Operand,
    *,
    weights: Operand | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
) -> Tensor:
    """``(y - target)**2``"""
    return _element_loss("mean_squared_error", DIFFERENCE, 1.0, math.inf, y, target, weights, reduction, scale)


def huber(
    y: Operand,
    target: Operand,
    *,
    delta: float = 1.0,
    weights: Operand | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
) -> Tensor:
    """``d**2 / 2`` for a difference d up to `delta`, linear beyond."""
    if not 0 < delta < math.inf:
        raise fail("huber", f"delta is {delta}, must be a finite number above 0")
    return _element_loss("huber", DIFFERENCE, 0.5, delta, y, target, weights, reduction, scale)


def mean_absolute_error(
    y: Operand,
    target: Operand,
    *,
    slope_at_zero: float = 0.0,
    weights: Operand | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
) -> Tensor:
    """``|y - target|``"""
    return _element_loss("mean_absolute_error", ABSOLUTE, slope_at_zero, 0.0, y, target, weights, reduction, scale)


def hinge(
    y: Operand,
    target: Operand,
    *,
    weights: Operand | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
) -> Tensor:
    """``max(0, 1 - s * y)`` with s = 2 target - 1, for targets 0 and 1."""
    return _element_loss("hinge", HINGE, 0.0, 0.0, y, target, weights, reduction, scale)


def log_loss(
    y: Operand,
    target: Operand,
    *,
    eps: float = 1e-7,
    weights: Operand | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
) -> Tensor:
    """The cross entropy of probabilities y; for logits, use :func:`sigmoid_cross_entropy`."""
    if not 0 <= eps < math.inf:
        raise fail("log_loss", f"eps is {eps}, must be a finite number of at least 0")
    return _element_loss("log_loss", LOG, eps, 0.0, y, target, weights, reduction, scale)


def sigmoid_cross_entropy(
    logits: Operand,
    target: Operand,
    *,
    label_smoothing: float = 0.0,
    weights: Operand | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
) -> Tensor:
    """``-t * log sigmoid(logits) - (1 - t) * log sigmoid(-logits)``, exact for small probabilities."""
    if not 0 <= label_smoothing <= 1:
        raise fail("sigmoid_cross_entropy", f"label_smoothing is {label_smoothing}, must be from 0 to 1")
    keep = 1 - label_smoothing
    return _element_loss(
        "sigmoid_cross_entropy", SIGMOID, keep, label_smoothing / 2, logits, target, weights, reduction, scale
    )
