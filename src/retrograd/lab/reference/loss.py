"""The oracle: losses. Each returns the loss of every element or row, and the gradient of their sum."""

from __future__ import annotations

import math

import numpy as np

from .precision import Array, widened

__all__ = [
    "categorical_cross_entropy",
    "cosine_distance",
    "hinge",
    "huber",
    "log_loss",
    "mean_absolute_error",
    "mean_squared_error",
    "reduced_loss",
    "sigmoid_cross_entropy",
    "soft_cross_entropy",
    "softmax_cross_entropy",
]


def reduced_loss(
    losses: Array, gradient: Array, weights: Array | float | None = None, reduction: str = "mean"
) -> tuple[Array, Array]:
    """The reduced loss and its gradient. `weights` have the shape of the losses' first axes, or of none."""
    given = np.asarray(1.0 if weights is None else weights)
    w = np.broadcast_to(widened(given.reshape(given.shape + (1,) * (losses.ndim - given.ndim))), losses.shape)
    values = w * losses
    slopes = w.reshape(w.shape + (1,) * (gradient.ndim - w.ndim)) * gradient
    if reduction == "none":
        return values, slopes
    divisors = {
        "sum": 1.0,
        "mean": float(losses.size),
        "weighted_mean": float(w.sum()),
        "nonzero_mean": float(np.count_nonzero(w)),
    }
    divisor = divisors[reduction]
    if divisor == 0:
        return np.asarray(math.nan if reduction == "mean" else 0.0), np.zeros_like(slopes)
    return values.sum() / divisor, slopes / divisor


# --- rows -------------------------------------------------------------------------------------------------------------


def soft_cross_entropy(logits: Array, targets: Array, *, label_smoothing: float = 0.0) -> tuple[Array, Array]:
    """The cross entropy of softmax(logits) and the smoothed targets."""
    x = widened(logits)
    t = (1 - label_smoothing) * widened(targets) + label_smoothing / max(x.shape[-1], 1)
    d = x - x.max(-1, keepdims=True, initial=-math.inf)
    with np.errstate(divide="ignore"):  # there may be no classes
        log_sum = np.log(np.exp(d).sum(-1, keepdims=True))
    # A target of 0 contributes 0, even if log_sum - d is infinite.
    terms = np.where(t == 0, 0.0, t * (log_sum - d))
    return terms.sum(-1), np.exp(d - log_sum) * t.sum(-1, keepdims=True) - t


def softmax_cross_entropy(
    logits: Array, labels: Array, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[Array, Array]:
    """The same with integer labels; 0 for rows with `ignore_index`."""
    kept = labels != ignore_index
    targets = np.zeros(logits.shape)
    for position in map(tuple, np.argwhere(kept)):
        row = targets[position]
        row[labels[position]] = 1
    losses, gradient = soft_cross_entropy(logits, targets, label_smoothing=label_smoothing)
    return np.where(kept, losses, 0.0), np.where(kept[..., None], gradient, 0.0)


def categorical_cross_entropy(logits: Array, target: Array) -> tuple[Array, Array]:
    """Divided by the number of targets of the row that are not 0."""
    losses, gradient = soft_cross_entropy(logits, target)
    counts = np.maximum((target != 0).sum(-1), 1)
    return losses / counts, gradient / counts[..., None]


def cosine_distance(y: Array, target: Array) -> tuple[Array, Array]:
    """Of rows of length 1. The gradient is the part that is orthogonal to y."""
    y, target = widened(y), widened(target)
    product = (y * target).sum(-1)
    return 1 - product, product[..., None] * y - target


# --- elements ---------------------------------------------------------------------------------------------------------


def mean_squared_error(y: Array, target: Array) -> tuple[Array, Array]:
    d = widened(y) - widened(target)
    return d**2, 2 * d


def huber(y: Array, target: Array, *, delta: float = 1.0) -> tuple[Array, Array]:
    d = widened(y) - widened(target)
    inside = np.abs(d) <= delta
    return np.where(inside, d**2 / 2, delta * (np.abs(d) - delta / 2)), np.where(inside, d, delta * np.sign(d))


def mean_absolute_error(y: Array, target: Array, *, slope_at_zero: float = 0.0) -> tuple[Array, Array]:
    d = widened(y) - widened(target)
    return np.abs(d), np.where(d == 0, slope_at_zero, np.sign(d))


def hinge(y: Array, target: Array) -> tuple[Array, Array]:
    side, y = 2 * widened(target) - 1, widened(y)
    return np.maximum(0, 1 - side * y), np.where(side * y <= 1, -side, 0.0)


def log_loss(y: Array, target: Array, *, eps: float = 1e-7) -> tuple[Array, Array]:
    y, t = widened(y), widened(target)
    p, q = y + eps, 1 - y + eps
    return -t * np.log(p) - (1 - t) * np.log(q), (1 - t) / q - t / p


def sigmoid_cross_entropy(logits: Array, target: Array, *, label_smoothing: float = 0.0) -> tuple[Array, Array]:
    x, t = widened(logits), (1 - label_smoothing) * widened(target) + label_smoothing / 2
    # -log sigmoid(x) = log(1 + e^-x)
    losses = t * np.logaddexp(0, -x) + (1 - t) * np.logaddexp(0, x)
    return losses, (1 - t) * np.exp(-np.logaddexp(0, -x)) - t * np.exp(-np.logaddexp(0, x))
