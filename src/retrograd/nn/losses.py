"""Losses: modules of a result and a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import graph
from ..ops.loss import REDUCTIONS, Reduction
from . import hints
from .module import Module
from .sizes import operand

__all__ = [
    "Hinge", "Huber", "Loss", "MeanAbsoluteError", "MeanSquaredError", "SigmoidCrossEntropy", "SoftmaxCrossEntropy",
    "accuracy",
]  # fmt: skip


class Loss(Module):
    """A function ``loss(y, target, weights=None)`` of :mod:`retrograd.graph`, with its options.

    `reduction` is "mean", "sum", or "none" for one loss for each element, or row. `weights`, for samples or for
    elements, multiply the losses; with "weighted_mean" their sum is divided by the sum of the weights. The target is
    converted to the dtype of y.
    """

    _function: Any
    _takes_labels = False

    def __init__(self, *, reduction: Reduction = "mean") -> None:
        if reduction not in REDUCTIONS:
            known = ", ".join(map(repr, REDUCTIONS))
            raise ValueError(f"{type(self).__name__}: reduction is {reduction!r}; there are {known}")
        self.reduction: Reduction = reduction
        self.options: dict[str, Any] = {}

    def forward(self, y: Any, target: Any, weights: Any = None) -> Any:
        name = type(self).__name__
        result, wanted = operand(name, "y", y), operand(name, "target", target)
        if wanted.dtype != result.dtype and not (self._takes_labels and wanted.dtype.kind in "iu"):
            wanted = graph.cast(wanted, result.dtype)
        if not self._takes_labels and wanted.shape != result.shape:
            raise ValueError(f"{name}: {_other_shape(result.shape, wanted.shape)}")
        if weights is not None:
            weights = graph.cast(graph.identity(weights), result.dtype)
        return self._function(result, wanted, weights=weights, reduction=self.reduction, **self.options)

    def describe(self) -> str:
        shown = {**self.options, "reduction": self.reduction}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())

    if not TYPE_CHECKING:
        __getattr__ = hints.missing("Loss")


def _other_shape(y: tuple[int, ...], target: tuple[int, ...]) -> str:
    said = f"target has shape {target}, but y has shape {y}"
    if y == (*target, 1):
        return f"{said}; write target[..., None]"
    return f"{said}; write target[..., 0]" if target == (*y, 1) else said


class SoftmaxCrossEntropy(Loss):
    """The cross entropy of labels and the softmax of the logits `y`, classes on the last axis.

    Integer labels have the shape of y without its last axis; those equal to `ignore_index` are ignored. Labels of the
    shape of y are probabilities. `label_smoothing` is the share of the target probability that is spread evenly over
    all classes.
    """

    _function = staticmethod(graph.softmax_cross_entropy)
    _takes_labels = True

    def __init__(
        self, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(reduction=reduction)
        self.options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}


class MeanSquaredError(Loss):
    """``(y - target)**2``"""

    _function = staticmethod(graph.mean_squared_error)


class MeanAbsoluteError(Loss):
    """``|y - target|``, with gradient 0 where y is the target."""

    _function = staticmethod(graph.mean_absolute_error)


class Huber(Loss):
    """``e**2 / 2`` for errors e = y - target up to `delta`, and ``delta * (|e| - delta / 2)`` beyond."""

    _function = staticmethod(graph.huber)

    def __init__(self, *, delta: float = 1.0, reduction: Reduction = "mean") -> None:
        super().__init__(reduction=reduction)
        self.options = {"delta": delta}


class SigmoidCrossEntropy(Loss):
    """The cross entropy of targets from 0 to 1 and the sigmoid of the logits `y`, for each element.

    `label_smoothing` moves the targets towards 1/2 by this share.
    """

    _function = staticmethod(graph.sigmoid_cross_entropy)

    def __init__(self, *, label_smoothing: float = 0.0, reduction: Reduction = "mean") -> None:
        super().__init__(reduction=reduction)
        self.options = {"label_smoothing": label_smoothing}


class Hinge(Loss):
    """``max(0, 1 - y)`` for targets 1, and ``max(0, 1 + y)`` for targets 0."""

    _function = staticmethod(graph.hinge)


def accuracy(y: Any, target: Any, *, ignore_index: int = -100) -> Any:
    """The share of rows whose largest element is at the label, for the `metrics` of :func:`compile`.

    Targets are as for :class:`SoftmaxCrossEntropy`; with y of the target's shape they are 0 or 1, and y is a logit.
    """
    result, wanted = graph.identity(y), graph.identity(target)
    if wanted.dtype.kind != "i" and wanted.shape == result.shape and result.shape[-1:] not in ((), (1,)):
        wanted = graph.argmax(wanted, -1)
    if wanted.shape == result.shape:
        return graph.mean(graph.cast((result > 0.0) == (graph.cast(wanted, result.dtype) > 0.5), result.dtype))
    if wanted.shape != result.shape[:-1]:
        raise ValueError(
            f"accuracy: target has shape {wanted.shape}, but y has shape {result.shape}; labels have the shape of y "
            "without its last axis"
        )
    if result.shape[-1] == 1:
        raise ValueError(f"accuracy: {_other_shape(result.shape, wanted.shape)}")
    labels = graph.cast(wanted, "int64")
    counted = graph.cast(labels != ignore_index, result.dtype)
    right = graph.cast(graph.argmax(result, -1) == labels, result.dtype)
    return graph.sum(right * counted) / graph.maximum(graph.sum(counted), 1.0)
