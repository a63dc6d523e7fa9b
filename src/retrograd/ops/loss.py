"""Losses, each computed with its gradient in one pass.

A loss of rows (softmax and categorical cross entropy, cosine distance) has one value for each row, along the last axis;
the others have one for each element. `weights` are factors of these values: a number, or an array with the shape of
their first axes, such as one weight for each sample.

With ``reduction="none"`` the loss is the array of weighted values, and the gradient is that of its sum. Otherwise it is
a Python float, accumulated in float64: ``"sum"``, ``"mean"`` (divided by the number of values), ``"weighted_mean"`` (by
the sum of their weights) or ``"nonzero_mean"`` (by the number of weights that are not 0). The mean of no values is NaN,
as in PyTorch; a mean over weights that sum to 0, or are all 0, is 0. The gradient is 0 in both cases. `scale` is a
factor of the loss and its gradient. Arrays that are not contiguous are copied first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from .. import _core
from . import _args, _memory
from ._call import Reason, Refusal, enter, public
from ._errors import ArgumentName, ArgumentTypeError, ArgumentValueError
from ._records import CosineDistance, ElementLosses, SoftmaxCrossEntropy
from ._types import Array, MaybeArray, is_float64

__all__ = [
    "categorical_cross_entropy",
    "cosine_distance",
    "hinge",
    "huber",
    "log_loss",
    "mean_absolute_error",
    "mean_squared_error",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
]

Reduction: TypeAlias = Literal["mean", "sum", "none", "weighted_mean", "nonzero_mean"]
# The loss, and the gradient if it is wanted.
Result: TypeAlias = tuple[float | Array, MaybeArray]

# The engine's codes: Reduction in src/core/dense/loss.h, ElementLoss in src/core/kernels.h.
REDUCTIONS: Final = {"mean": 1, "sum": 0, "none": 0, "weighted_mean": 2, "nonzero_mean": 3}
DIFFERENCE, ABSOLUTE, HINGE, LOG, SIGMOID = range(5)


# ---- rows -----------------------------------------------------------------------------------------------------------


@public
def softmax_cross_entropy(
    logits: Array,
    labels: Array,
    *,
    weights: float | Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    want_gradient: bool = True,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Result:
    """``-sum(t * log softmax(logits))`` of logits [..., V], and dlogits.

    Labels are integers [...], whose target t is 1 at the label and 0 elsewhere, or the targets themselves, of the shape
    and dtype of the logits. With `label_smoothing` s, t is ``(1 - s) t + s / V``. Rows whose integer label is
    `ignore_index` have loss and gradient 0 and do not count in a mean; if all rows are ignored, the mean is NaN.
    `out` receives dlogits and may be `logits` itself.
    """
    logits = _as_rows("logits", logits)
    given = _args.as_array("labels", labels)
    targets: Array | None = None
    if given.dtype.kind == "f":
        if given.shape != logits.shape:
            raise ArgumentTypeError(
                "labels",
                "{labels} has dtype {}; it must be of integers, or have the shape {} of {logits}",
                given.dtype,
                logits.shape,
            )
        _args.check_dtype("labels", given, logits.dtype, "as {logits} is")
        _args.check_aligned("labels", given)
        targets = given
    return _cross_entropy(
        logits,
        given,
        targets,
        _as_weights(weights, logits.shape[:-1], logits.dtype),
        ignore_index,
        _smoothing(label_smoothing),
        _Options(reduction, scale, want_gradient, out, num_threads),
    )


@public
def categorical_cross_entropy(
    logits: Array,
    target: Array,
    *,
    weights: float | Array | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    want_gradient: bool = True,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Result:
    """``-sum(target * log softmax(logits)) / m`` of logits [..., V], m the number of targets of the row that are not 0.

    Also returns dlogits. The loss and the gradient of a row without targets are 0. `weights` may also have the shape of
    the logits: then they are factors of the targets, and the reduction is "mean", "sum" or "none". `out` receives
    dlogits and may be `logits` itself.
    """
    logits = _as_rows("logits", logits)
    target = _args.as_array("target", target)
    _check_like("logits", logits, target)
    target = np.ascontiguousarray(target)
    counts = np.count_nonzero(target, axis=-1, keepdims=True)
    shares = target / np.maximum(counts, 1).astype(target.dtype)
    each = None if weights is None else _args.as_array("weights", weights)
    if each is not None and each.ndim and each.shape == logits.shape:
        if reduction in ("weighted_mean", "nonzero_mean"):
            raise ArgumentValueError(
                "reduction",
                "{reduction} is {!r}, but {weights} of the shape of {logits} are not those of rows",
                reduction,
            )
        _args.check_dtype("weights", each, logits.dtype, "as {logits} is")
        shares *= each
        weights = None
    return _cross_entropy(
        logits,
        shares,
        shares,
        _as_weights(weights, logits.shape[:-1], logits.dtype),
        0,
        0.0,
        _Options(reduction, scale, want_gradient, out, num_threads),
    )


@public
def cosine_distance(
    y: Array,
    target: Array,
    *,
    weights: float | Array | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    want_gradient: bool = True,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Result:
    """``1 - sum(y * target)`` over the last axis, and dy, for rows that all have length 1, which is not checked.

    dy is ``sum(y * target) * y - target``: the gradient of the angle's cosine, which has no part along y. `out`
    receives dy and may be `y` or `target` itself.
    """
    y = _as_rows("y", y)
    target = _args.as_array("target", target)
    _check_like("y", y, target)
    weighed = _as_weights(weights, y.shape[:-1], y.dtype)
    options = _Options(reduction, scale, want_gradient, out, num_threads)
    width, count = y.shape[-1], math.prod(y.shape[:-1])
    losses = np.empty(count) if reduction == "none" else None

    def arguments(dy: Array | None, overlap_checked: bool, threads: int) -> tuple[Any, ...]:
        rows, targets = (np.ascontiguousarray(a).reshape(count, width) for a in (y, target))
        gradient = None if dy is None else dy.reshape(count, width)
        f64, codes = is_float64("y", y), options.codes()
        return (f64, rows, targets, *weighed.flat, *codes, losses, gradient, None, overlap_checked, threads)

    loss, dy = _run(
        CosineDistance, _core.cosine_distance, "y", y, {"target": target}, ("y", "target"), weighed, options, arguments
    )
    return (loss if losses is None else losses.astype(y.dtype).reshape(y.shape[:-1])), dy


# ---- elements -------------------------------------------------------------------------------------------------------


@public
def mean_squared_error(
    y: Array,
    target: Array,
    *,
    weights: float | Array | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    want_gradient: bool = True,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Result:
    """``(y - target)**2`` and dy. `out` receives dy and may be `y` or `target` itself."""
    options = _Options(reduction, scale, want_gradient, out, num_threads)
    return _elements(DIFFERENCE, (1.0, math.inf), "y", y, target, weights, options)


@public
def huber(
    y: Array,
    target: Array,
    *,
    delta: float = 1.0,
    weights: float | Array | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    want_gradient: bool = True,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Result:
    """With d = y - target, ``d**2 / 2`` for ``|d| <= delta``, else ``delta * (|d| - delta / 2)``, and dy.

    `out` receives dy and may be `y` or `target` itself.
    """
    bound = _args.as_number("delta", delta)
    if not 0 < bound < math.inf:
        raise ArgumentValueError("delta", "{delta} is {}, must be a finite number above 0", bound)
    options = _Options(reduction, scale, want_gradient, out, num_threads)
    return _elements(DIFFERENCE, (0.5, bound), "y", y, target, weights, options)


@public
def mean_absolute_error(
    y: Array,
    target: Array,
    *,
    slope_at_zero: float = 0.0,
    weights: float | Array | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    want_gradient: bool = True,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Result:
    """``|y - target|`` and dy. `slope_at_zero`, from -1 to 1, is its derivative where y is the target.

    `out` receives dy and may be `y` or `target` itself.
    """
    slope = _args.as_number("slope_at_zero", slope_at_zero)
    if not -1 <= slope <= 1:
        raise ArgumentValueError("slope_at_zero", "{slope_at_zero} is {}, must be from -1 to 1", slope)
    options = _Options(reduction, scale, want_gradient, out, num_threads)
    return _elements(ABSOLUTE, (slope, 0.0), "y", y, target, weights, options)


@public
def hinge(
    y: Array,
    target: Array,
    *,
    weights: float | Array | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    want_gradient: bool = True,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Result:
    """``max(0, 1 - s * y)`` with s = 2 target - 1, for targets 0 and 1, and dy, which is ``-s`` where ``s * y <= 1``.

    `out` receives dy and may be `y` or `target` itself.
    """
    options = _Options(reduction, scale, want_gradient, out, num_threads)
    return _elements(HINGE, (0.0, 0.0), "y", y, target, weights, options)


@public
def log_loss(
    y: Array,
    target: Array,
    *,
    eps: float = 1e-7,
    weights: float | Array | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    want_gradient: bool = True,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Result:
    """``-target * log(y + eps) - (1 - target) * log(1 - y + eps)`` for probabilities y, and dy.

    For logits, use :func:`sigmoid_cross_entropy`, which is exact for small probabilities. `out` receives dy and may be
    `y` or `target` itself.
    """
    added = _args.as_number("eps", eps)
    if not 0 <= added < math.inf:
        raise ArgumentValueError("eps", "{eps} is {}, must be a finite number of at least 0", added)
    options = _Options(reduction, scale, want_gradient, out, num_threads)
    return _elements(LOG, (added, 0.0), "y", y, target, weights, options)


@public
def sigmoid_cross_entropy(
    logits: Array,
    target: Array,
    *,
    label_smoothing: float = 0.0,
    weights: float | Array | None = None,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    want_gradient: bool = True,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Result:
    """``-t * log sigmoid(logits) - (1 - t) * log sigmoid(-logits)`` and dlogits.

    t is the target, or with `label_smoothing` s ``(1 - s) target + s / 2``. `out` receives dlogits and may be `logits`
    or `target` itself.
    """
    smoothing = _smoothing(label_smoothing)
    options = _Options(reduction, scale, want_gradient, out, num_threads)
    return _elements(SIGMOID, (1 - smoothing, smoothing / 2), "logits", logits, target, weights, options)


# ---- shared ---------------------------------------------------------------------------------------------------------


_Record = TypeVar("_Record", bound=tuple[Any, ...])


class _Options(NamedTuple):
    """The options that all losses have."""

    reduction: str
    scale: float
    want_gradient: bool
    out: Array | None
    num_threads: int | None

    def codes(self) -> tuple[int, float]:
        """The reduction and the scale, as the engine takes them."""
        if self.reduction not in REDUCTIONS:
            raise ArgumentValueError(
                "reduction", "{reduction} is {!r}; there are {}", self.reduction, ", ".join(map(repr, REDUCTIONS))
            )
        return REDUCTIONS[self.reduction], _args.as_number("scale", self.scale)


class _Weights(NamedTuple):
    given: Array | None  # the caller's array
    flat: tuple[Array | None, float]  # one for each loss, or None; the weight of all losses


def _as_weights(weights: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Weights:
    """Weights of losses of this shape."""
    if weights is None:
        return _Weights(None, (None, 1.0))
    array = _args.as_array("weights", weights)
    if array.ndim == 0:
        return _Weights(None, (None, _args.as_number("weights", array.item())))
    if array.shape != shape[: array.ndim]:
        fitting = ", ".join(str(shape[:axes]) for axes in range(len(shape) + 1))
        raise ArgumentValueError(
            "weights",
            "{weights} has shape {}, but there are losses of shape {}: expected {}",
            array.shape,
            shape,
            fitting,
        )
    _args.check_dtype("weights", array, dtype, "as the other arrays are")
    _args.check_aligned("weights", array)
    spread = array.reshape(array.shape + (1,) * (len(shape) - array.ndim))
    return _Weights(array, (np.ascontiguousarray(np.broadcast_to(spread, shape)).reshape(-1), 1.0))


def _as_rows(name: str, value: object) -> Array:
    array = _args.as_array(name, value)
    is_float64(name, array)
    _args.check_aligned(name, array)
    if array.ndim == 0:
        raise ArgumentValueError(name, "{argument} has no axes, but rows are along the last one")
    return array


def _check_like(name: str, y: Array, target: Array) -> None:
    if target.shape != y.shape:
        raise ArgumentValueError(
            "target", "{target} has shape {}, but {} has shape {}", target.shape, ArgumentName(name), y.shape
        )
    _args.check_dtype("target", target, y.dtype, "as {" + name + "} is")
    _args.check_aligned("target", target)


def _smoothing(label_smoothing: float) -> float:
    smoothing = _args.as_number("label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ArgumentValueError("label_smoothing", "{label_smoothing} is {}, must be from 0 to 1", smoothing)
    return smoothing


def _elements(
    kind: int,
    parameters: tuple[float, float],
    name: str,
    y: Array,
    target: Array,
    weights: object,
    options: _Options,
) -> Result:
    y, target = _args.as_array(name, y), _args.as_array("target", target)
    is_float64(name, y)
    _check_like(name, y, target)
    _args.check_aligned(name, y)
    weighed = _as_weights(weights, y.shape, y.dtype)
    values = _memory.empty(y.shape, y.dtype) if options.reduction == "none" else None

    def arguments(dy: Array | None, overlap_checked: bool, threads: int) -> tuple[Any, ...]:
        flat, targets = (np.ascontiguousarray(a).reshape(-1) for a in (y, target))
        losses, gradient = (None if a is None else a.reshape(-1) for a in (values, dy))
        f64, codes = is_float64(name, y), options.codes()
        return (
            f64, kind, *parameters, flat, targets, *weighed.flat, *codes, losses, gradient, None, overlap_checked,
            threads,
        )  # fmt: skip

    loss, dy = _run(
        ElementLosses, _core.element_losses, name, y, {"target": target}, (name, "target"), weighed, options, arguments
    )
    return (loss if values is None else values), dy


def _cross_entropy(
    logits: Array,
    labels: Array,
    targets: Array | None,
    weights: _Weights,
    ignore_index: int,
    smoothing: float,
    options: _Options,
) -> Result:
    """Of integer labels, or of targets, which are then the labels too."""
    shape, classes = logits.shape[:-1], logits.shape[-1]
    flat: Array | None = None
    if targets is None:
        labels, flat = _args.as_indices("labels", labels)
        if labels.shape != shape:
            raise ArgumentValueError(
                "labels", "{labels} has shape {}, but {logits} of shape {} need {}", labels.shape, logits.shape, shape
            )
    ignored = _args.as_count("ignore_index", ignore_index, least=-(1 << 63))
    if ignored >= 1 << 63:
        raise ArgumentValueError("ignore_index", "{ignore_index} is {}, must be below 2**63", ignored)
    count = math.prod(shape)
    losses = np.empty(count) if options.reduction == "none" else None

    def arguments(dlogits: Array | None, overlap_checked: bool, threads: int) -> tuple[Any, ...]:
        rows = np.ascontiguousarray(logits).reshape(count, classes)
        soft, gradient = (
            None if a is None else np.ascontiguousarray(a).reshape(count, classes) for a in (targets, dlogits)
        )
        f64, codes = is_float64("logits", logits), options.codes()
        return (
            f64, rows, flat, ignored, soft, *weights.flat, smoothing, *codes, losses, gradient, None, overlap_checked,
            threads,
        )  # fmt: skip

    def explain(refusal: Refusal) -> None:
        if refusal.reason is Reason.out_of_range:
            _args.raise_out_of_range("labels", labels, classes, "the classes of {logits} are", ignored)

    loss, dlogits = _run(
        SoftmaxCrossEntropy,
        _core.softmax_cross_entropy,
        "logits",
        logits,
        {"labels": labels},
        ("logits",),
        weights,
        options,
        arguments,
        explain,
    )
    return (loss if losses is None else losses.astype(logits.dtype).reshape(shape)), dlogits


def _run(
    record: Callable[..., _Record],
    engine: Callable[..., Any],
    name: str,
    y: Array,
    others: dict[str, Array],
    in_place: tuple[str, ...],
    weights: _Weights,
    options: _Options,
    arguments: Callable[[Array | None, bool, int], tuple[Any, ...]],
    explain: Callable[[Refusal], None] | None = None,
) -> tuple[float, Array | None]:
    """Call the engine with ``arguments(gradient, overlap_checked, threads)``.

    Returns the loss and the gradient of y, the array called `name`.
    """
    threads = _args.thread_count(options.num_threads)
    options.codes()  # checks them
    dy, written = _gradient(y, _args.as_flag("want_gradient", options.want_gradient), options.out)
    inputs = {name: y, **others, "weights": weights.given}
    may_replace = {"out": in_place}
    copied = options.out is not None and not _args.all_contiguous(*inputs.values(), options.out)
    if copied:
        _args.check_disjoint({"out": dy}, inputs, may_replace)
    call = arguments(written, copied, threads)

    def fix(refusal: Refusal, refused: _Record) -> _Record:
        if explain is not None:
            explain(refusal)
        return _args.disjoint_arguments(refusal, refused, {"out": dy}, inputs, may_replace)

    loss, _ = enter(record, engine, call, fix)
    if dy is not None and written is not None and written is not dy:
        dy[...] = written
    return loss, dy


def _gradient(like: Array, wanted: bool, out: Array | None) -> tuple[Array | None, Array | None]:
    """The gradient that is returned, and the contiguous array that the engine writes."""
    if not wanted:
        if out is not None:
            raise ArgumentValueError("out", "{out} is given, but {want_gradient} is not set")
        return None, None
    if out is None:
        out = _memory.empty(like.shape, like.dtype)
    else:
        _args.check_result("out", out, like.shape, like.dtype)
    return out, _args.contiguous_result(out)
