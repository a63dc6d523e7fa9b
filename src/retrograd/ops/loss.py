"""Losses, each computed with its gradient in one pass.

With ``reduction="mean"`` or ``"sum"`` the loss is a Python float, accumulated in float64. With ``"none"`` it is an
array, and the gradient is that of its sum. The mean of no elements is NaN, as in PyTorch, and its gradient is 0. Arrays
that are not contiguous are copied first.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from .. import _core
from . import _args, _memory
from ._args import Array
from ._call import Reason, Refusal, enter, public

__all__ = ["huber", "mean_squared_error", "softmax_cross_entropy"]

Reduction: TypeAlias = Literal["mean", "sum", "none"]

_REDUCTIONS: Final = ("mean", "sum", "none")


@public
def softmax_cross_entropy(
    logits: Array,
    labels: Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    want_gradient: bool = True,
    out: Array | None = None,
    num_threads: int | None = None,
) -> tuple[float | Array, Array | None]:
    """``-log softmax(logits)[label]`` of logits [..., V] and integer labels [...], and dlogits.

    With `label_smoothing` s the target is ``s / V`` for every class, plus ``1 - s`` for the label. Rows whose label is
    `ignore_index` have loss and gradient 0 and do not count in the mean; if all rows are ignored, the mean is NaN.
    `out` receives dlogits and may be `logits` itself.
    """
    logits = _args.as_array("logits", logits)
    f64 = _args.is_float64("logits", logits)
    _args.check_aligned("logits", logits)
    labels, flat = _args.as_indices("labels", labels)
    if logits.ndim == 0 or labels.shape != logits.shape[:-1]:
        wanted = f" of shape {logits.shape} need {logits.shape[:-1]}" if logits.ndim else " have no axes"
        raise ValueError(f"labels has shape {labels.shape}, but logits{wanted}")
    ignored = _args.as_count("ignore_index", ignore_index, least=-(1 << 63))
    if ignored >= 1 << 63:
        raise ValueError(f"ignore_index is {ignored}, must be below 2**63")
    smoothing = _args.as_number("label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing is {smoothing}, must be from 0 to 1")
    _check_reduction(reduction)
    threads = _args.thread_count(num_threads)
    dlogits, written = _gradient(logits, want_gradient, out)
    if out is not None and not _args.all_contiguous(logits, labels, out):
        _args.check_disjoint({"out": dlogits}, {"logits": logits, "labels": labels}, {"out": ("logits",)})
    losses = np.empty(len(flat)) if reduction == "none" else None
    classes = logits.shape[-1]
    rows = np.ascontiguousarray(logits).reshape(len(flat), classes)
    gradient = None if written is None else written.reshape(len(flat), classes)
    arguments = (f64, rows, flat, ignored, smoothing, reduction == "mean", losses, gradient)

    def fix(refusal: Refusal) -> tuple[Any, ...]:
        if refusal.reason is Reason.out_of_range:
            _args.raise_out_of_range("labels", labels, classes, "the classes of logits are", ignored)
        _args.check_disjoint({"out": dlogits}, {"logits": logits, "labels": labels}, {"out": ("logits",)})
        return arguments

    loss, _ = enter(_core.softmax_cross_entropy, arguments, threads, fix)
    if dlogits is not None and written is not dlogits:
        dlogits[...] = written
    if losses is not None:
        return losses.astype(logits.dtype).reshape(labels.shape), dlogits
    return loss, dlogits


@public
def mean_squared_error(
    y: Array,
    target: Array,
    *,
    reduction: Reduction = "mean",
    want_gradient: bool = True,
    out: Array | None = None,
    num_threads: int | None = None,
) -> tuple[float | Array, Array | None]:
    """``(y - target)**2`` and dy. `out` receives dy and may be `y` or `target` itself."""
    return _difference(y, target, 1.0, math.inf, reduction, want_gradient, out, num_threads)


@public
def huber(
    y: Array,
    target: Array,
    *,
    delta: float = 1.0,
    reduction: Reduction = "mean",
    want_gradient: bool = True,
    out: Array | None = None,
    num_threads: int | None = None,
) -> tuple[float | Array, Array | None]:
    """With d = y - target, ``d**2 / 2`` for ``|d| <= delta``, else ``delta * (|d| - delta / 2)``, and dy.

    `out` receives dy and may be `y` or `target` itself.
    """
    bound = _args.as_number("delta", delta)
    if not 0 < bound < math.inf:
        raise ValueError(f"delta is {bound}, must be a finite number above 0")
    return _difference(y, target, 0.5, bound, reduction, want_gradient, out, num_threads)


def _difference(
    y: Array,
    target: Array,
    square: float,
    delta: float,
    reduction: str,
    want_gradient: bool,
    out: Array | None,
    num_threads: int | None,
) -> tuple[float | Array, Array | None]:
    y = _args.as_array("y", y)
    target = _args.as_array("target", target)
    f64 = _args.is_float64("y", y)
    if target.shape != y.shape:
        raise ValueError(f"target has shape {target.shape}, but y has shape {y.shape}")
    _args.check_dtype("target", target, y.dtype, "as y is")
    _args.check_aligned("y", y)
    _args.check_aligned("target", target)
    _check_reduction(reduction)
    threads = _args.thread_count(num_threads)
    dy, written = _gradient(y, want_gradient, out)
    inputs = {"y": y, "target": target}
    if out is not None and not _args.all_contiguous(y, target, out):
        _args.check_disjoint({"out": dy}, inputs, {"out": ("y", "target")})
    values = _memory.empty(y.shape, y.dtype) if reduction == "none" else None
    weight = 1.0 / y.size if reduction == "mean" and y.size else 1.0
    flat_values, flat_dy = (None if a is None else a.reshape(-1) for a in (values, written))
    flat_y, flat_target = (np.ascontiguousarray(a).reshape(-1) for a in (y, target))
    arguments = (f64, flat_y, flat_target, square, delta, 2 * square * weight, flat_values, flat_dy)
    loss, _ = enter(
        _core.difference_loss,
        arguments,
        threads,
        lambda _: _args.disjoint_arguments(arguments, {"out": dy}, inputs, {"out": ("y", "target")}),
    )
    if dy is not None and written is not dy:
        dy[...] = written
    if values is not None:
        return values, dy
    if reduction == "mean":
        loss = loss / y.size if y.size else math.nan
    return loss, dy


def _check_reduction(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; there are {', '.join(map(repr, _REDUCTIONS))}")


def _gradient(like: Array, wanted: bool, out: Array | None) -> tuple[Array | None, Array | None]:
    """The gradient that is returned, and the contiguous array that the engine writes."""
    if not wanted:
        if out is not None:
            raise ValueError("out is given, but want_gradient is not set")
        return None, None
    if out is None:
        out = _memory.empty(like.shape, like.dtype)
    else:
        _args.check_result("out", out, like.shape, like.dtype)
    return out, _args.contiguous_result(out)
