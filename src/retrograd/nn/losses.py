"""Losses: forward returns the loss, backward its gradient."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

import retrograd as rg

from .module import Array, Memory

__all__ = [
    "Hinge",
    "Huber",
    "Loss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Reduction",
    "SigmoidCrossEntropy",
    "SoftmaxCrossEntropy",
]

Reduction: TypeAlias = Literal["mean", "sum", "none"]


class Loss:
    """The base class of losses. A loss is a float, or with reduction "none" an array.

    The gradient is in a buffer that is reused: it is valid until the next forward or backward.
    """

    def __init__(self, reduction: Reduction, num_threads: int | None) -> None:
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"{type(self).__name__}: reduction is {reduction!r}; there are 'mean', 'sum' and 'none'")
        self.reduction: Reduction = reduction
        self.num_threads = num_threads
        self._memory = Memory()
        self._dy: Array | None = None
        self._shape: tuple[int, ...] = ()
        self._passes = 0  # forward passes since the last backward
        self._used = False  # backward has returned the last gradient

    def forward(self, y: Array, target: Array, *, want_gradient: bool = True) -> Any:
        """Return the loss, and compute its gradient in the same pass if `want_gradient`."""
        self._dy = None
        out = self._memory.take("dy", y.shape, y.dtype) if want_gradient else None
        loss, self._dy = self._compute(y, target, want_gradient, out)
        self._shape = loss.shape if isinstance(loss, np.ndarray) else ()
        if want_gradient:
            self._passes = 1 if self._used else self._passes + 1
            self._used = False
        return loss

    def backward(self, dloss: Any = None) -> Array:
        """Return the gradient of y. `dloss`, the gradient of the loss, is a factor, 1 if None.

        With reduction "none" it may be an array of the shape of the loss.
        """
        if self._dy is None:
            raise RuntimeError(f"{type(self).__name__}.backward: there was no forward pass with want_gradient=True")
        if self._used and self._passes > 1:
            raise RuntimeError(
                f"{type(self).__name__}.backward: forward ran {self._passes} times, but only the last gradient is kept "
                "and backward has returned it. Use a loss object for each place, or call backward after each forward"
            )
        self._used = True
        if dloss is None or (isinstance(dloss, float) and dloss == 1):
            return self._dy
        factor = np.asarray(dloss, self._dy.dtype)
        if factor.ndim:
            if factor.shape != self._shape:
                raise ValueError(
                    f"{type(self).__name__}.backward: dloss has shape {factor.shape}, but the loss has {self._shape}"
                )
            factor = factor.reshape(factor.shape + (1,) * (self._dy.ndim - factor.ndim))
        scaled = self._memory.take("scaled", self._dy.shape, self._dy.dtype)
        np.multiply(self._dy, factor, out=scaled)
        return scaled

    def _compute(self, y: Array, target: Array, want_gradient: bool, out: Array | None) -> tuple[Any, Array | None]:
        raise NotImplementedError(f"{type(self).__name__} has no _compute")


class SoftmaxCrossEntropy(Loss):
    """The cross entropy of labels and the softmax of the logits `y`, classes on the last axis.

    Integer labels have the shape of y without its last axis; those equal to `ignore_index` are ignored. Labels of the
    shape and dtype of y are probabilities. `label_smoothing` is the share of the target probability that is spread
    evenly over all classes.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        num_threads: int | None = None,
    ) -> None:
        super().__init__(reduction, num_threads)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def _compute(self, y: Array, target: Array, want_gradient: bool, out: Array | None) -> tuple[Any, Array | None]:
        return rg.softmax_cross_entropy(
            y,
            target,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            want_gradient=want_gradient,
            out=out,
            num_threads=self.num_threads,
        )


class MeanSquaredError(Loss):
    """``(y - target)**2``"""

    def __init__(self, *, reduction: Reduction = "mean", num_threads: int | None = None) -> None:
        super().__init__(reduction, num_threads)

    def _compute(self, y: Array, target: Array, want_gradient: bool, out: Array | None) -> tuple[Any, Array | None]:
        return rg.mean_squared_error(
            y,
            target,
            reduction=self.reduction,
            want_gradient=want_gradient,
            out=out,
            num_threads=self.num_threads,
        )


class Huber(Loss):
    """``e**2 / 2`` for errors e = y - target up to `delta`, and ``delta * (|e| - delta / 2)`` beyond."""

    def __init__(self, *, delta: float = 1.0, reduction: Reduction = "mean", num_threads: int | None = None) -> None:
        super().__init__(reduction, num_threads)
        self.delta = delta

    def _compute(self, y: Array, target: Array, want_gradient: bool, out: Array | None) -> tuple[Any, Array | None]:
        return rg.huber(
            y,
            target,
            delta=self.delta,
            reduction=self.reduction,
            want_gradient=want_gradient,
            out=out,
            num_threads=self.num_threads,
        )


class SigmoidCrossEntropy(Loss):
    """The cross entropy of targets from 0 to 1 and the sigmoid of the logits `y`, for each element.

    `label_smoothing` moves the targets towards 1/2 by this share.
    """

    def __init__(
        self, *, label_smoothing: float = 0.0, reduction: Reduction = "mean", num_threads: int | None = None
    ) -> None:
        super().__init__(reduction, num_threads)
        self.label_smoothing = label_smoothing

    def _compute(self, y: Array, target: Array, want_gradient: bool, out: Array | None) -> tuple[Any, Array | None]:
        return rg.sigmoid_cross_entropy(
            y,
            target,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            want_gradient=want_gradient,
            out=out,
            num_threads=self.num_threads,
        )


class MeanAbsoluteError(Loss):
    """``|y - target|``, with gradient 0 where y is the target."""

    def __init__(self, *, reduction: Reduction = "mean", num_threads: int | None = None) -> None:
        super().__init__(reduction, num_threads)

    def _compute(self, y: Array, target: Array, want_gradient: bool, out: Array | None) -> tuple[Any, Array | None]:
        return rg.mean_absolute_error(
            y,
            target,
            reduction=self.reduction,
            want_gradient=want_gradient,
            out=out,
            num_threads=self.num_threads,
        )


class Hinge(Loss):
    """``max(0, 1 - y)`` for targets 1, and ``max(0, 1 + y)`` for targets 0."""

    def __init__(self, *, reduction: Reduction = "mean", num_threads: int | None = None) -> None:
        super().__init__(reduction, num_threads)

    def _compute(self, y: Array, target: Array, want_gradient: bool, out: Array | None) -> tuple[Any, Array | None]:
        return rg.hinge(
            y,
            target,
            reduction=self.reduction,
            want_gradient=want_gradient,
            out=out,
            num_threads=self.num_threads,
        )
