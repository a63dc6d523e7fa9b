"""Batch, instance, layer and group normalization: forward and backward, with fused activations.

Forward returns ``(y, cache)``, backward takes ``(dy, cache)`` and returns :class:`NormGradients`. The cache refers to
``x`` and ``gamma`` rather than copying them: do not modify them until backward has run. If ``x`` will be overwritten,
pass an array as ``keep_x``: forward copies ``x`` into it, and the cache refers to the copy. An in-place forward
(``out=x``) always keeps a copy, because backward needs it, and allocates one if ``keep_x`` is not given.

With an activation, backward needs its slope. ``slope_from="output"`` computes it from ``y``, which the cache then also
refers to; it supports the activations whose output determines the slope. ``"input"`` computes it from the activation's
input, which backward recomputes from ``x``, ``gamma`` and ``beta``; it supports all activations. Where ``tanh`` or
``sigmoid`` saturate, slopes from ``y`` lose relative accuracy and those from the input do not: see "Slopes of saturated
activations" in ``docs/numerics.md``.

Statistics are float64 for every dtype of data: ``mean``, and ``var``, the biased variance. Nothing is written if an
argument is invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

import numpy as np

from .. import _core
from . import _args, _memory
from ._arrays import same_elements
from ._buffers import opaque
from ._call import Refusal, enter, public, raise_unexplained
from ._errors import ArgumentName, ArgumentTypeError, ArgumentValueError
from ._memory import LARGE
from ._norm_problem import NormKind, NormProblem, as_parameter, as_set_values, as_statistics, check_data, norm_problem
from ._records import NormBackward, NormForward, NormGradientSums
from ._types import Array, MaybeArray, Statistics
from .activation import Activation

__all__ = [
    "GradientSums",
    "NormCache",
    "NormGradients",
    "NormStatistics",
    "RunningUpdate",
    "batch_norm_backward",
    "batch_norm_cache",
    "batch_norm_forward",
    "batch_norm_gradient_sums",
    "batch_norm_statistics",
    "combine_statistics",
    "group_norm_backward",
    "group_norm_forward",
    "instance_norm_backward",
    "instance_norm_forward",
    "layer_norm_backward",
    "layer_norm_forward",
]


@opaque
class NormCache(NamedTuple):
    """What backward needs from a forward call. Treat it as opaque except for its properties."""

    problem: NormProblem
    x: Array
    y: Array | None  # None: the slope does not come from it
    gamma: Array | None
    beta: Array | None
    statistics: Statistics  # [2, sets]: mean and variance
    given: bool  # the caller passed the statistics
    frozen: bool  # gradients do not flow through the statistics

    @property
    def mean(self) -> Statistics:
        mean: Statistics = self.statistics[0]
        return mean

    @property
    def var(self) -> Statistics:
        """The biased variance."""
        var: Statistics = self.statistics[1]
        return var

    @property
    def rstd(self) -> Statistics:
        """``1 / sqrt(var + eps)``"""
        return 1.0 / np.sqrt(self.var + self.problem.eps)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.problem.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.problem.dtype

    def with_arrays(self, y: Array | None, gamma: Array | None, beta: Array | None) -> NormCache:
        """A copy of this cache with other arrays of the same shapes and dtypes."""
        problem, x, _, _, _, statistics, given, frozen = self
        return new_cache((problem, x, y, gamma, beta, statistics, given, frozen))

    def without_arrays(self) -> BareNormCache:
        """What this cache holds besides x, y, gamma and beta, for callers who keep those themselves."""
        problem, _, _, _, _, statistics, given, frozen = self
        return _new_bare_cache((problem, statistics, given, frozen))

    def __repr__(self) -> str:
        return f"NormCache({self.problem!r})"


@opaque
class BareNormCache(NamedTuple):
    """A :class:`NormCache` without the arrays that forward was given and returned."""

    problem: NormProblem
    statistics: Statistics
    given: bool
    frozen: bool

    def with_arrays(self, x: Array, y: Array | None, gamma: Array | None, beta: Array | None) -> NormCache:
        """The whole cache. Arrays with the values of forward's: y and beta only where the slope comes from them."""
        problem, statistics, given, frozen = self
        if x.shape != problem.shape or x.dtype is not problem.dtype:
            check_data("x", x, problem)
        if not x.flags.aligned:
            _args.check_aligned("x", x)
        # The engine checks shape and dtype; it needs contiguous parameters.
        if gamma is not None and not gamma.flags.carray:
            gamma = as_parameter(problem, "gamma", gamma)
        if beta is not None and not beta.flags.carray:
            beta = as_parameter(problem, "beta", beta)
        return new_cache((problem, x, y, gamma, beta, statistics, given, frozen))


class NormGradients(NamedTuple):
    """Gradients by name; None for those not requested. Also passed as ``out=``, holding buffers to write to."""

    dx: MaybeArray = None
    dgamma: MaybeArray = None
    dbeta: MaybeArray = None


class NormStatistics(NamedTuple):
    """Means and biased variances, each of `count` elements."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which is of no use for arrays
    mean: Statistics
    var: Statistics


class GradientSums(NamedTuple):
    """Sums over each channel's `count` elements: of dz (which is dbeta) and of dz * xhat (which is dgamma)."""

    count: int  # type: ignore[assignment]  # hides tuple.count
    sum_dz: Statistics
    sum_dz_xhat: Statistics


class RunningUpdate(NamedTuple):
    """How a batch updates the running statistics: ``new = keep * old + (1 - keep) * batch``.

    `unbiased`: whether the batch variance is divided by ``count - 1``. Frameworks differ in both; the presets follow
    their conventions, including the meaning of `momentum`.
    """

    keep: float
    unbiased: bool

    @classmethod
    def pytorch(cls, momentum: float = 0.1) -> RunningUpdate:
        """PyTorch: momentum is the weight of the new batch; unbiased variance."""
        return cls(1.0 - momentum, True)

    @classmethod
    def keras(cls, momentum: float = 0.99) -> RunningUpdate:
        """Keras: momentum is the weight of the old value; biased variance."""
        return cls(momentum, False)

    @classmethod
    def bnns(cls, momentum: float = 0.9) -> RunningUpdate:
        """Apple's BNNS: momentum is the weight of the old value; biased variance."""
        return cls(momentum, False)


_PYTORCH: Final = RunningUpdate.pytorch()
_GRADIENTS: Final = NormGradients._fields
_NO_BUFFERS: Final = NormGradients()
# tuple.__new__ skips the NamedTuple constructor, which takes twice as long as all checks of a small call.
new_cache: Final[Callable[[tuple[Any, ...]], NormCache]] = partial(tuple.__new__, NormCache)
_new_bare_cache: Final[Callable[[tuple[Any, ...]], BareNormCache]] = partial(tuple.__new__, BareNormCache)
_new_gradients: Final[Callable[[tuple[Any, ...]], NormGradients]] = partial(tuple.__new__, NormGradients)


# ---- forward --------------------------------------------------------------------------------------------------------


@public
def batch_norm_forward(
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    training: bool = True,
    mean: Array | None = None,
    var: Array | None = None,
    count: int | None = None,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    update: RunningUpdate = _PYTORCH,
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
    out: Array | None = None,
    keep_x: Array | None = None,
    num_threads: int | None = None,
) -> tuple[Array, NormCache]:
    """Normalize each channel over samples and space: ``y = f(gamma * (x - mean) * rstd + beta)``.

    In training the statistics are those of the batch, or `mean` and `var` if given (`count`: the number of elements
    they were computed from, if not that of x). Gradients flow through them, and `running_mean` and `running_var`, if
    given, are updated in place. In evaluation (``training=False``) the statistics are `mean` and `var` if given, else
    the running ones, and are constants. For `slope_from`, see "Slopes of saturated activations" in
    ``docs/numerics.md``.
    """
    if type(x) is not np.ndarray:
        x = _args.as_array("x", x)
    problem = norm_problem("batch_norm", x, channel_axis, 1, eps, activation, slope_from)
    others = {"x": x, "gamma": gamma, "beta": beta, "out": out, "keep_x": keep_x}
    running = _running(problem, running_mean, running_var, update, training, others)
    elements = problem.set_size if count is None else _args.as_count("count", count)
    if not training and mean is None and var is None:
        mean, var = _evaluation_statistics(running)
    y, cache = run_forward(problem, x, gamma, beta, mean, var, not training, out, keep_x, num_threads)
    if training and running is not None:
        update_running(running, cache.mean, cache.var, elements, update)
    return y, cache


@public
def instance_norm_forward(
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    training: bool = True,
    mean: Array | None = None,
    var: Array | None = None,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    update: RunningUpdate = _PYTORCH,
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
    out: Array | None = None,
    keep_x: Array | None = None,
    num_threads: int | None = None,
) -> tuple[Array, NormCache]:
    """Normalize each channel of each sample over space.

    Statistics have shape ``(N, C)``. Running statistics have shape ``(C,)`` and are updated with the mean over the
    samples; evaluation uses them for every sample. For `slope_from`, see "Slopes of saturated activations" in
    ``docs/numerics.md``.
    """
    if type(x) is not np.ndarray:
        x = _args.as_array("x", x)
    problem = norm_problem("instance_norm", x, channel_axis, 1, eps, activation, slope_from)
    others = {"x": x, "gamma": gamma, "beta": beta, "out": out, "keep_x": keep_x}
    running = _running(problem, running_mean, running_var, update, training, others)
    if not training and mean is None and var is None:
        one_mean, one_var = _evaluation_statistics(running)
        mean = np.broadcast_to(one_mean, problem.statistics_shape)
        var = np.broadcast_to(one_var, problem.statistics_shape)
    y, cache = run_forward(problem, x, gamma, beta, mean, var, not training, out, keep_x, num_threads)
    if training and running is not None and problem.statistics_shape[0]:
        update_running(running, cache.mean.mean(axis=0), cache.var.mean(axis=0), problem.set_size, update)
    return y, cache


@public
def layer_norm_forward(
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    axis: int = -1,
    mean: Array | None = None,
    var: Array | None = None,
    eps: float = 1e-5,
    activation: str | Activation | None = None,
    slope_from: str = "output",
    out: Array | None = None,
    keep_x: Array | None = None,
    num_threads: int | None = None,
) -> tuple[Array, NormCache]:
    """Normalize over the axes from `axis` to the last. gamma and beta have the shape ``x.shape[axis:]``.

    For `slope_from`, see "Slopes of saturated activations" in ``docs/numerics.md``.
    """
    if type(x) is not np.ndarray:
        x = _args.as_array("x", x)
    problem = norm_problem("layer_norm", x, axis, 1, eps, activation, slope_from)
    return run_forward(problem, x, gamma, beta, mean, var, False, out, keep_x, num_threads)


@public
def group_norm_forward(
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    num_groups: int,
    mean: Array | None = None,
    var: Array | None = None,
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
    out: Array | None = None,
    keep_x: Array | None = None,
    num_threads: int | None = None,
) -> tuple[Array, NormCache]:
    """Normalize each sample over space and over groups of consecutive channels. Statistics: ``(N, num_groups)``.

    For `slope_from`, see "Slopes of saturated activations" in ``docs/numerics.md``.
    """
    if type(x) is not np.ndarray:
        x = _args.as_array("x", x)
    problem = norm_problem("group_norm", x, channel_axis, num_groups, eps, activation, slope_from)
    return run_forward(problem, x, gamma, beta, mean, var, False, out, keep_x, num_threads)


@public
def batch_norm_cache(
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    mean: Array,
    var: Array,
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    y: Array | None = None,
    slope_from: str = "output",
    frozen: bool = False,
) -> NormCache:
    """The cache of a forward pass that used `mean` and `var`, without running it.

    `y`, the output of that pass, is used only if the slope of an activation is computed from it. Gradients flow
    through the statistics, unless they are `frozen`: constants, as in evaluation.
    """
    if type(x) is not np.ndarray:
        x = _args.as_array("x", x)
    problem = norm_problem("batch_norm", x, channel_axis, 1, eps, activation, slope_from)
    if gamma is not None:
        gamma = as_parameter(problem, "gamma", gamma)
    if beta is not None:
        beta = as_parameter(problem, "beta", beta)
    statistics = as_statistics(problem, mean, var)
    _args.check_aligned("x", x)
    if not problem.needs_y:
        y = None
    elif y is None:
        raise ArgumentValueError(
            "y",
            "{y} is missing: the slope of {!r} is found from it; {slope_from}='input' needs no {y}",
            problem.activation.name,
        )
    else:
        y = _args.as_array("y", y)
        check_data("y", y, problem)
        _args.check_aligned("y", y)
    return NormCache(problem, x, y, gamma, beta, statistics, True, bool(frozen))


@public
def batch_norm_statistics(x: Array, *, channel_axis: int = 1, num_threads: int | None = None) -> NormStatistics:
    """Count, mean and biased variance of each channel, for :func:`combine_statistics` across workers."""
    if type(x) is not np.ndarray:
        x = _args.as_array("x", x)
    problem = norm_problem("batch_norm", x, channel_axis, 1, 0.0, None, "output")
    statistics = np.zeros((2, *problem.statistics_shape))
    if problem.engine is not None:
        threads = _args.thread_count(num_threads)
        _args.check_aligned("x", x)
        arguments = (x, None, None, None, None, statistics, False, True, threads)
        enter(NormForward, problem.engine.forward, arguments, raise_unexplained)
    return NormStatistics(problem.set_size, statistics[0], statistics[1])


@public
def combine_statistics(parts: Iterable[NormStatistics]) -> NormStatistics:
    """The statistics of all `parts` together, combined in the given order. Parts without elements are ignored."""
    everything = [_checked_part(f"parts[{i}]", part) for i, part in enumerate(parts)]
    if not everything:
        raise ArgumentValueError("parts", "{parts} is empty, needs at least 1")
    total, mean, var = everything[0]
    for count, part_mean, part_var in everything[1:]:
        if part_mean.shape != mean.shape:
            raise ArgumentValueError("parts", "{parts} disagree in shape: {} and {}", mean.shape, part_mean.shape)
        if count:
            weight = count / (total + count)
            difference = part_mean - mean
            # The variance within the parts plus the variance between their means.
            var = var + weight * (part_var - var) + weight * (1.0 - weight) * difference * difference
            mean = mean + weight * difference
            total = total + count
    return NormStatistics(total, mean, var)


def _checked_part(name: str, part: object) -> NormStatistics:
    if not isinstance(part, tuple | list) or len(part) != 3:
        raise ArgumentTypeError(name, "{argument} must be NormStatistics, not {}", type(part))
    count = _args.as_count(f"{name}.count", part[0], least=0)
    mean, var = (_args.as_array(f"{name}.{field}", a) for field, a in (("mean", part[1]), ("var", part[2])))
    for field, array in (("mean", mean), ("var", var)):
        if array.dtype.kind not in "fiu":
            raise ArgumentTypeError(
                f"{name}.{field}", "{argument} has dtype {}; it must be of real numbers", array.dtype
            )
    if mean.shape != var.shape:
        raise ArgumentValueError(
            f"{name}.mean", "{argument} has shape {}, but {} has {}", mean.shape, ArgumentName(f"{name}.var"), var.shape
        )
    return NormStatistics(count, mean, var)


def run_forward(
    problem: NormProblem,
    x: Array,
    gamma: Array | None,
    beta: Array | None,
    mean: Array | None,
    var: Array | None,
    frozen: bool,
    out: Array | None,
    keep_x: Array | None,
    num_threads: int | None,
) -> tuple[Array, NormCache]:
    """Run a forward pass of any kind. x is an array; the other arguments have not been checked."""
    given = mean is not None or var is not None
    statistics = as_statistics(problem, mean, var) if given else np.empty(problem.cache_shape)
    threads = 0 if num_threads is None else _args.thread_count(num_threads)
    y = out if out is not None else np.empty_like(x) if x.nbytes < LARGE else _memory.empty_like(x)
    arguments = (x, gamma, beta, y, keep_x, statistics, given, False, threads)
    engine = problem.engine
    if engine is not None:
        _, fixed = enter(NormForward, engine.forward, arguments, _fixed_forward, problem)
    else:
        fixed = _checked_forward(NormForward(*arguments), problem)
        if not given:
            statistics.fill(0.0)
    saved_y: Array | None = y
    if fixed is not None:
        gamma, beta, saved_y, keep_x = fixed.gamma, fixed.beta, fixed.y, fixed.keep
    saved_x = x if keep_x is None else keep_x
    if not problem.needs_y:
        saved_y = None
    return y, new_cache((problem, saved_x, saved_y, gamma, beta, statistics, given, frozen))


def _fixed_forward(_: Refusal, arguments: NormForward, problem: NormProblem) -> NormForward:
    """Raise for invalid arguments, or convert them to what the engine accepts."""
    fixed = _checked_forward(arguments, problem)
    x, gamma, beta, y, keep_x, statistics = fixed[:6]
    assert y is not None
    inputs = {"x": x, "gamma": gamma, "beta": beta, "mean": statistics[0, ...], "var": statistics[1, ...]}
    _args.check_disjoint({"out": y, "keep_x": keep_x}, inputs, in_place={"out": ("x",)})
    if keep_x is None and same_elements(x, y):  # backward needs x, which y overwrites
        keep_x = _memory.empty_like(x)
    return fixed._replace(keep=keep_x, overlap_checked=True)


def _checked_forward(arguments: NormForward, problem: NormProblem) -> NormForward:
    """Raise for invalid arguments, convert those that can be converted."""
    x, gamma, beta, y, keep_x = arguments[:5]
    assert y is not None
    if gamma is not None:
        gamma = as_parameter(problem, "gamma", gamma)
    if beta is not None:
        beta = as_parameter(problem, "beta", beta)
    _args.check_result("out", y, problem.shape, problem.dtype)
    if keep_x is not None:
        _args.check_result("keep_x", keep_x, problem.shape, problem.dtype)
        keep_x = _args.as_plain(keep_x)
    _args.check_aligned("x", x)
    return arguments._replace(gamma=gamma, beta=beta, y=_args.as_plain(y), keep=keep_x)


# ---- running statistics ---------------------------------------------------------------------------------------------


def _running(
    problem: NormProblem,
    running_mean: Array | None,
    running_var: Array | None,
    update: RunningUpdate,
    training: bool,
    others: dict[str, Array | None],
) -> tuple[Array, Array] | None:
    """Check the running statistics. Training writes to them after the pass, so they must not overlap its `others`."""
    if running_mean is None and running_var is None:
        return None
    if running_mean is None or running_var is None:
        missing = "running_mean" if running_mean is None else "running_var"
        raise ArgumentValueError(
            missing, "{argument} is missing: give both {running_mean} and {running_var}, or neither"
        )
    for name, array in (("running_mean", running_mean), ("running_var", running_var)):
        if not isinstance(array, np.ndarray) or array.dtype not in (np.float32, np.float64):
            kind = array.dtype if isinstance(array, np.ndarray) else type(array)
            raise ArgumentTypeError(name, "{argument} must be an ndarray of float32 or float64, not {}", kind)
        if array.shape != problem.parameter_shape:
            raise ArgumentValueError(
                name,
                "{argument} has shape {}, but {x} of shape {} needs {}",
                array.shape,
                problem.shape,
                problem.parameter_shape,
            )
        _args.check_not_masked(name, array)
        if training:
            if not array.flags.writeable:
                raise ArgumentValueError(name, "{argument} is read-only, and training updates it")
            if not array.flags.c_contiguous:
                _args.check_no_self_overlap(name, array)
    if training:
        arrays = {name: array for name, array in others.items() if isinstance(array, np.ndarray)}
        if _core.may_overlap((running_mean, running_var), arrays.values()):
            _args.check_disjoint({"running_mean": running_mean, "running_var": running_var}, arrays)
    if not isinstance(update, RunningUpdate):
        raise ArgumentTypeError("update", "{update} must be a RunningUpdate, not {}", type(update))
    if not 0 <= update.keep <= 1:
        raise ArgumentValueError("update.keep", "{update.keep} is {}, must be from 0 to 1", update.keep)
    return running_mean, running_var


def _evaluation_statistics(running: tuple[Array, Array] | None) -> tuple[Array, Array]:
    if running is None:
        raise ArgumentValueError(
            "training", "{training}=False needs statistics: give {mean} and {var}, or {running_mean} and {running_var}"
        )
    return running


def update_running(
    running: tuple[Array, Array], mean: Statistics, var: Statistics, count: int, update: RunningUpdate
) -> None:
    """Update running means and variances, which have been checked, by those of a batch of `count` elements."""
    if count == 0:
        return
    if update.unbiased and count > 1:  # the unbiased variance of one element is undefined
        var = var * (count / (count - 1))
    with np.errstate(all="ignore"):  # infinities and NaN propagate without warnings
        for array, batch in zip(running, (mean, var), strict=True):
            # Computed in float64, so that it is rounded only once.
            array[...] = update.keep * array.astype(np.float64, copy=False) + (1.0 - update.keep) * batch


# ---- backward -------------------------------------------------------------------------------------------------------


@public
def batch_norm_backward(
    dy: Array,
    cache: NormCache,
    *,
    need: Sequence[str] | None = None,
    sums: GradientSums | None = None,
    out: NormGradients | Mapping[str, Array | None] | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> NormGradients:
    """Gradients of :func:`batch_norm_forward`.

    `need` names the gradients to compute; the default is ``dx`` and those of the parameters that forward was given.
    They overwrite the buffers of `out`, or are added to them with ``accumulate=True``. With `sums` (the
    :func:`batch_norm_gradient_sums` of all workers, added up) only ``dx`` is computed: the sums are the gradients of
    the parameters.
    """
    return _backward("batch_norm", dy, cache, need, sums, out, accumulate, num_threads)


@public
def instance_norm_backward(
    dy: Array,
    cache: NormCache,
    *,
    need: Sequence[str] | None = None,
    out: NormGradients | Mapping[str, Array | None] | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> NormGradients:
    """Gradients of :func:`instance_norm_forward`; arguments as for :func:`batch_norm_backward`."""
    return _backward("instance_norm", dy, cache, need, None, out, accumulate, num_threads)


@public
def layer_norm_backward(
    dy: Array,
    cache: NormCache,
    *,
    need: Sequence[str] | None = None,
    out: NormGradients | Mapping[str, Array | None] | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> NormGradients:
    """Gradients of :func:`layer_norm_forward`; arguments as for :func:`batch_norm_backward`."""
    return _backward("layer_norm", dy, cache, need, None, out, accumulate, num_threads)


@public
def group_norm_backward(
    dy: Array,
    cache: NormCache,
    *,
    need: Sequence[str] | None = None,
    out: NormGradients | Mapping[str, Array | None] | None = None,
    accumulate: bool = False,
    num_threads: int | None = None,
) -> NormGradients:
    """Gradients of :func:`group_norm_forward`; arguments as for :func:`batch_norm_backward`."""
    return _backward("group_norm", dy, cache, need, None, out, accumulate, num_threads)


@public
def batch_norm_gradient_sums(dy: Array, cache: NormCache, *, num_threads: int | None = None) -> GradientSums:
    """The sums over one worker's data that ``dx`` needs. Add them up over all workers; pass the total to backward."""
    problem = _checked_cache("batch_norm", cache)
    dy = _checked_dy(dy, problem)
    sum_dz, sum_dz_xhat = np.zeros(problem.statistics_shape), np.zeros(problem.statistics_shape)
    if problem.engine is not None:
        threads = _args.thread_count(num_threads)
        _args.check_aligned("dy", dy)
        arguments = (dy, cache, sum_dz, sum_dz_xhat, True, threads)
        enter(NormGradientSums, problem.engine.gradient_sums, arguments, raise_unexplained)
    return GradientSums(problem.set_size, sum_dz, sum_dz_xhat)


def _checked_cache(kind: NormKind, cache: object) -> NormProblem:
    if type(cache) is not NormCache:
        raise ArgumentTypeError("cache", "{cache} must be what {}_forward returned, not {}", kind, type(cache))
    problem = cache.problem
    if problem.kind != kind:
        raise ArgumentValueError("cache", "{cache} is of {}_forward, must be of {}_forward", problem.kind, kind)
    return problem


def _checked_dy(dy: Array, problem: NormProblem) -> Array:
    dy = _args.as_array("dy", dy)
    if dy.shape != problem.shape or dy.dtype is not problem.dtype:
        check_data("dy", dy, problem)
    return dy


def _backward(
    kind: NormKind,
    dy: Array,
    cache: NormCache,
    need: Sequence[str] | None,
    sums: GradientSums | None,
    out: NormGradients | Mapping[str, Array | None] | None,
    accumulate: bool,
    num_threads: int | None,
) -> NormGradients:
    if type(cache) is not NormCache or (problem := cache.problem).kind != kind:
        problem = _checked_cache(kind, cache)
    buffers = dx, dgamma, dbeta = _NO_BUFFERS if out is None else _args.gradient_buffers(out, NormGradients)
    if need is not None:
        want_dx, want_dgamma, want_dbeta = _args.needed_gradients(need, _GRADIENTS, buffers)
    else:
        want_dx = True
        want_dgamma = dgamma is not None or (cache.gamma is not None and sums is None)
        want_dbeta = dbeta is not None or (cache.beta is not None and sums is None)
    sum_dz = sum_dz_xhat = count = None
    if sums is not None:
        if want_dgamma or want_dbeta:
            name = "dgamma" if want_dgamma else "dbeta"
            raise ArgumentValueError(name, "{argument} is not computed with {sums}=: it is one of the sums")
        sum_dz, sum_dz_xhat, count = _checked_sums(problem, sums)
    if accumulate:
        _args.check_accumulated(_GRADIENTS, (want_dx, want_dgamma, want_dbeta), buffers)
    threads = 0 if num_threads is None else _args.thread_count(num_threads)
    if type(accumulate) is not bool:
        accumulate = _args.as_flag("accumulate", accumulate)

    if want_dx and dx is None:
        x = cache.x
        dx = np.empty_like(x) if x.nbytes < LARGE else _memory.empty_like(x)
    shape, dtype = problem.parameter_shape, problem.arithmetic
    if want_dgamma and dgamma is None:
        dgamma = np.empty(shape, dtype)
    if want_dbeta and dbeta is None:
        dbeta = np.empty(shape, dtype)
    _run_backward(problem, (dy, cache, sum_dz, sum_dz_xhat, count, dx, dgamma, dbeta, accumulate, False, threads))
    return _new_gradients((dx, dgamma, dbeta))


def run_backward(
    problem: NormProblem, dy: Array, cache: NormCache, results: NormGradients, accumulate: bool, threads: int
) -> None:
    """Compute the gradients that `results` has arrays for."""
    _run_backward(problem, (dy, cache, None, None, None, *results, accumulate, False, threads))


def _run_backward(problem: NormProblem, arguments: tuple[Any, ...]) -> None:
    """The same for a tuple of the fields of `NormBackward`."""
    engine = problem.engine
    if engine is None:
        given = NormBackward(*arguments)
        results = NormGradients(given.dx, given.dgamma, given.dbeta)
        _check_results(problem, _checked_dy(given.dy, problem), cast(NormCache, given.cache), results)
        for empty_sum in results[1:]:
            if empty_sum is not None and not given.accumulate:
                empty_sum.fill(0)
        return
    _, fixed = enter(NormBackward, engine.backward, arguments, _fixed_backward)
    if fixed is not None:
        given = NormBackward(*arguments)
        for array, computed in ((given.dgamma, fixed.dgamma), (given.dbeta, fixed.dbeta)):
            if array is not None and array is not computed:
                array[...] = computed


def _fixed_backward(_: Refusal, arguments: NormBackward) -> NormBackward:
    """Raise for invalid arguments, or convert them to what the engine accepts."""
    cache = cast(NormCache, arguments.cache)
    problem = cache.problem
    dx, dgamma, dbeta = arguments.dx, arguments.dgamma, arguments.dbeta
    dy = _checked_dy(arguments.dy, problem)
    _args.check_aligned("dy", dy)
    _check_output(problem, cache)
    _check_results(problem, dy, cache, NormGradients(dx, dgamma, dbeta))
    keep = arguments.accumulate
    return arguments._replace(
        dy=dy,
        dx=None if dx is None else _args.as_plain(dx),
        # The engine writes the gradients of gamma and beta only to contiguous arrays.
        dgamma=None if dgamma is None else _args.contiguous_result(dgamma, keep),
        dbeta=None if dbeta is None else _args.contiguous_result(dbeta, keep),
        overlap_checked=True,
    )


def _check_output(problem: NormProblem, cache: NormCache) -> None:
    """Check the cache's y, because `with_arrays` accepts any."""
    y = cache.y
    if problem.needs_y and (y is None or y.shape != problem.shape or y.dtype != problem.dtype):
        found = "is missing" if y is None else f"has shape {y.shape} and dtype {y.dtype}"
        raise ArgumentValueError("y", "{y} {}, but {x} has shape {} and dtype {}", found, problem.shape, problem.dtype)


def _check_results(problem: NormProblem, dy: Array, cache: NormCache, results: NormGradients) -> None:
    if results.dx is not None:
        _args.check_result("out.dx", results.dx, problem.shape, problem.dtype)
    for name, array in (("out.dgamma", results.dgamma), ("out.dbeta", results.dbeta)):
        if array is not None:
            _args.check_result(name, array, problem.parameter_shape, problem.arithmetic)
    inputs = {"dy": dy, "x": cache.x, "y": cache.y, "gamma": cache.gamma}
    if problem.needs_beta:
        inputs["beta"] = cache.beta
    _args.check_disjoint(_args.named_results(results), inputs, in_place={"out.dx": ("dy",)})


def _checked_sums(problem: NormProblem, sums: object) -> tuple[Statistics, Statistics, Statistics]:
    if not isinstance(sums, GradientSums):
        raise ArgumentTypeError("sums", "{sums} must be GradientSums, not {}", type(sums))
    count = np.array([_args.as_count("sums.count", sums.count)], np.float64)
    return (
        as_set_values(problem, "sums.sum_dz", sums.sum_dz),
        as_set_values(problem, "sums.sum_dz_xhat", sums.sum_dz_xhat),
        count,
    )
