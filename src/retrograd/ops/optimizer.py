"""Optimizer steps. One call updates a whole list of parameters and their states in place.

Each array is read and written once. In the docstrings, g is the loss gradient after `gradient_scale` and clipping, plus
`weight_decay * p + l1 * sign(p)`. docs/optimizer.md has the formulas with the names used by PyTorch, Keras and BNNS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from .. import _core
from ._args import (
    as_array,
    as_number,
    as_plain,
    check_aligned,
    check_disjoint,
    check_no_self_overlap,
    check_not_masked,
    thread_count,
)
from ._call import Refusal, enter, public
from ._errors import ArgumentName, ArgumentTypeError, ArgumentValueError
from ._records import GlobalNorm, OptimizerStep
from ._types import FLOATS, Array

__all__ = ["adam_step", "global_norm", "rmsprop_step", "sgd_step"]

Arrays: TypeAlias = Array | Sequence[Array]
VelocityOf: TypeAlias = Literal["gradient", "step", "descent"]

SGD_KIND: Final = 0
ADAM: Final = 1
RMSPROP: Final = 2


@public
def sgd_step(
    parameters: Arrays,
    gradients: Arrays,
    velocities: Arrays | None = None,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    velocity_of: VelocityOf = "gradient",
    weight_decay: float = 0.0,
    l1: float = 0.0,
    gradient_scale: float = 1.0,
    clip: tuple[float, float] | None = None,
    maximum_norm: float | None = None,
    maximum_norm_each: float | None = None,
    known_norm: float | None = None,
    clip_before_scale: bool = False,
    num_threads: int | None = None,
) -> None:
    """One step of gradient descent, with momentum if velocities are given (zeros before the first step).

    `velocity_of` selects how the velocity u is defined::

        "gradient"  u = momentum * u + g                     p -= learning_rate * u    (PyTorch)
        "step"      u = momentum * u - learning_rate * g     p += u                    (Keras)
        "descent"   u = momentum * u + learning_rate * g     p -= u

    They differ only when the learning rate changes. With `nesterov` the parameter moves by `momentum * u + g` instead
    of u, with the same learning rate and sign.
    """
    rate = non_negative("learning_rate", learning_rate)
    momentum = non_negative("momentum", momentum)
    if velocities is None and (momentum or nesterov):
        if momentum:
            raise ArgumentValueError("momentum", "{momentum} is {}, but there are no {velocities}", momentum)
        raise ArgumentValueError("nesterov", "{nesterov} is set, but there are no {velocities}")
    if nesterov and not momentum:
        raise ArgumentValueError("nesterov", "{nesterov} is set, but {momentum} is 0")
    gain, step = _velocity_form(velocity_of, rate)
    if velocities is None:
        gain, step = 1.0, -rate
    rule = _rule(
        SGD_KIND,
        gradient_terms(gradient_scale, clip, weight_decay, l1),
        norm_terms(clip, maximum_norm, maximum_norm_each, known_norm, clip_before_scale),
        nesterov=bool(nesterov),
        momentum=momentum,
        gain=gain,
        rate=step,
    )
    _step(rule, parameters, gradients, {"velocities": velocities}, num_threads)


@public
def adam_step(
    parameters: Arrays,
    gradients: Arrays,
    first_moments: Arrays,
    second_moments: Arrays,
    largest_second_moments: Arrays | None = None,
    *,
    step: float,
    learning_rate: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    epsilon_hat: bool = False,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    l1: float = 0.0,
    gradient_scale: float = 1.0,
    clip: tuple[float, float] | None = None,
    maximum_norm: float | None = None,
    maximum_norm_each: float | None = None,
    known_norm: float | None = None,
    clip_before_scale: bool = False,
    num_threads: int | None = None,
) -> None:
    """One step of Adam, of AdamW with `decoupled`, or of AMSGrad with `largest_second_moments`. `step` counts from 1::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        p -= learning_rate * mhat / (sqrt(vhat) + eps)    mhat = m / (1 - beta1**step), vhat = v / (1 - beta2**step)

    `epsilon_hat`: eps is added to sqrt(v) and not to sqrt(vhat), as in Keras and BNNS. `decoupled`: weight decay is not
    part of g, but adds `-learning_rate * weight_decay * p` to the parameter. AMSGrad uses the largest v so far in place
    of v. States are zeros before the first step.
    """
    count = as_number("step", step)
    if not 1 <= count < math.inf:
        raise ArgumentValueError("step", "{step} is {:g}, must be at least 1: the first {step} is number 1", count)
    rate = non_negative("learning_rate", learning_rate)
    keep_first = fraction("beta1", beta1)
    keep_second = fraction("beta2", beta2)
    first_correction = _one_minus_power(keep_first, count)
    second_correction = math.sqrt(_one_minus_power(keep_second, count))
    epsilon = non_negative("eps", eps)
    scale, low, high, l2, l1 = gradient_terms(gradient_scale, clip, weight_decay, l1)
    rule = _rule(
        ADAM,
        (scale, low, high, 0.0 if decoupled else l2, l1),
        norm_terms(clip, maximum_norm, maximum_norm_each, known_norm, clip_before_scale),
        keep_first=keep_first,
        keep_second=keep_second,
        # Both corrections are folded into the rate, so that one division is enough. eps is scaled to match.
        eps=epsilon if epsilon_hat else epsilon * second_correction,
        rate=-rate * second_correction / first_correction,
        decay=rate * l2 if decoupled else 0.0,
    )
    states = {
        "first_moments": first_moments,
        "second_moments": second_moments,
        "largest_second_moments": largest_second_moments,
    }
    _step(rule, parameters, gradients, states, num_threads)


@public
def rmsprop_step(
    parameters: Arrays,
    gradients: Arrays,
    squares: Arrays,
    means: Arrays | None = None,
    velocities: Arrays | None = None,
    *,
    learning_rate: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    eps_inside_root: bool = False,
    momentum: float = 0.0,
    velocity_of: VelocityOf = "gradient",
    weight_decay: float = 0.0,
    l1: float = 0.0,
    gradient_scale: float = 1.0,
    clip: tuple[float, float] | None = None,
    maximum_norm: float | None = None,
    maximum_norm_each: float | None = None,
    known_norm: float | None = None,
    clip_before_scale: bool = False,
    num_threads: int | None = None,
) -> None:
    """One step of RMSProp, centered if `means` are given, with momentum if velocities are given::

        s = alpha * s + (1 - alpha) * g**2
        a = alpha * a + (1 - alpha) * g             with `means`, else 0
        d = g / (sqrt(s - a**2) + eps)              eps_inside_root: g / sqrt(s - a**2 + eps)
        p -= learning_rate * d                      with velocities as in `sgd_step`, d in the place of g

    States are zeros before the first step. `s - a**2` is 0 where rounding would make it negative.
    """
    rate = non_negative("learning_rate", learning_rate)
    momentum = non_negative("momentum", momentum)
    if velocities is None and momentum:
        raise ArgumentValueError("momentum", "{momentum} is {}, but there are no {velocities}", momentum)
    gain, step = _velocity_form(velocity_of, rate)
    if velocities is None:
        gain, step = 1.0, -rate
    epsilon = non_negative("eps", eps)
    rule = _rule(
        RMSPROP,
        gradient_terms(gradient_scale, clip, weight_decay, l1),
        norm_terms(clip, maximum_norm, maximum_norm_each, known_norm, clip_before_scale),
        keep_second=fraction("alpha", alpha),
        eps=0.0 if eps_inside_root else epsilon,
        eps_inside=epsilon if eps_inside_root else 0.0,
        momentum=momentum,
        gain=gain,
        rate=step,
    )
    states = {"squares": squares, "means": means, "velocities": velocities}
    _step(rule, parameters, gradients, states, num_threads)


@public
def global_norm(arrays: Arrays, *, num_threads: int | None = None) -> float:
    """The L2 norm of all elements of all arrays, accumulated in float64 and in a fixed order."""
    threads = thread_count(num_threads)
    given = _as_list("arrays", arrays)

    arguments = (given, False, threads)

    def fix(_: Refusal, refused: GlobalNorm) -> GlobalNorm:
        plain = []
        for i, value in enumerate(given):
            array = as_array(f"arrays[{i}]", value)
            _check_dtype(f"arrays[{i}]", array)
            check_aligned(f"arrays[{i}]", array)
            plain.append(array)
        return refused._replace(arrays=plain)

    norm, _ = enter(GlobalNorm, _core.global_norm, arguments, fix)
    return float(norm)


# ---- scalars ---------------------------------------------------------------------------------------------------------


def _finite(name: str, value: float) -> float:
    number = as_number(name, value)
    if not math.isfinite(number):
        raise ArgumentValueError(name, "{argument} is {}, must be finite", number)
    return number


def _one_minus_power(base: float, exponent: float) -> float:
    """1 - base**exponent, without cancellation for a base near 1.

    From products and sums alone, because the last bit of the C library's functions depends on the machine.
    """
    if not base:
        return 1.0
    if exponent != int(exponent):
        return -math.expm1(exponent * math.log(base))
    once = 1.0 - base
    result = 0.0
    for digit in f"{int(exponent):b}":
        result *= 2.0 - result  # 1 - (1 - result)**2
        if digit == "1":
            result += (1.0 - result) * once
    return result


def non_negative(name: str, value: float) -> float:
    number = as_number(name, value)
    if not 0 <= number < math.inf:
        raise ArgumentValueError(name, "{argument} is {}, must be a finite number of at least 0", number)
    return number


def fraction(name: str, value: float) -> float:
    number = as_number(name, value)
    if not 0 <= number < 1:
        raise ArgumentValueError(name, "{argument} is {}, must be at least 0 and below 1", number)
    return number


def _velocity_form(velocity_of: str, rate: float) -> tuple[float, float]:
    """(gain, rate): gain * g is added to the velocity, and rate * velocity to the parameter."""
    forms = {"gradient": (1.0, -rate), "step": (-rate, 1.0), "descent": (rate, -1.0)}
    if velocity_of not in forms:
        raise ArgumentValueError(
            "velocity_of", "{velocity_of} is {!r}; there are {}", velocity_of, ", ".join(map(repr, forms))
        )
    return forms[velocity_of]


def velocity_factors(velocity_of: str) -> tuple[float, float, float, float]:
    """The same for a learning rate that is known later: gain, its factor of the rate, rate, its factor."""
    forms = {"gradient": (1.0, 0.0, 0.0, -1.0), "step": (0.0, -1.0, 1.0, 0.0), "descent": (0.0, 1.0, -1.0, 0.0)}
    _velocity_form(velocity_of, 0.0)  # checks it
    return forms[velocity_of]


def gradient_terms(
    gradient_scale: float, clip: tuple[float, float] | None, weight_decay: float, l1: float
) -> tuple[float, float, float, float, float]:
    """scale, low, high, l2, l1"""
    low, high = -math.inf, math.inf
    if clip is not None:
        try:
            low, high = clip
        except (TypeError, ValueError):
            raise ArgumentTypeError("clip", "{clip} must be (low, high), not {!r}", clip) from None
        low, high = as_number("clip", low, "the lower bound of {clip}"), as_number("clip", high, "its upper bound")
        if not low <= high:
            raise ArgumentValueError(
                "clip", "{clip} is ({}, {}), and the first must not be above the second", low, high
            )
    return (
        _finite("gradient_scale", gradient_scale),
        low,
        high,
        non_negative("weight_decay", weight_decay),
        non_negative("l1", l1),
    )


def norm_terms(
    clip: tuple[float, float] | None,
    maximum_norm: float | None,
    maximum_norm_each: float | None,
    known_norm: float | None,
    clip_before_scale: bool,
) -> tuple[float, bool, float, bool]:
    """(maximum norm or 0, whether it applies to each array, known norm or 0, whether clipping precedes the scale)"""
    if maximum_norm is None and maximum_norm_each is None and known_norm is None:
        return 0.0, False, 0.0, bool(clip_before_scale)
    ways = {"clip": clip, "maximum_norm": maximum_norm, "maximum_norm_each": maximum_norm_each}
    chosen = [name for name, value in ways.items() if value is not None]
    if len(chosen) > 1:
        raise ArgumentValueError(
            chosen[0], "{argument} and {} are both given; clip in one way", ArgumentName(chosen[1])
        )
    if known_norm is not None and maximum_norm is None:
        raise ArgumentValueError("known_norm", "{known_norm} is given, but {maximum_norm} is not")
    maximum = known = 0.0
    for name in ("maximum_norm", "maximum_norm_each"):
        if ways[name] is not None:
            maximum = as_number(name, ways[name])  # type: ignore[arg-type]
            if not 0 < maximum < math.inf:
                raise ArgumentValueError(name, "{argument} is {}, must be a finite number above 0", maximum)
    if known_norm is not None:
        known = as_number("known_norm", known_norm)
        if not 0 < known < math.inf:
            raise ArgumentValueError("known_norm", "{known_norm} is {}, must be a finite number above 0", known)
    return maximum, maximum_norm_each is not None, known, bool(clip_before_scale)


def _rule(
    kind: int,
    gradient: tuple[float, float, float, float, float],
    norm: tuple[float, bool, float, bool],
    *,
    nesterov: bool = False,
    keep_first: float = 0.0,
    keep_second: float = 0.0,
    eps: float = 0.0,
    eps_inside: float = 0.0,
    momentum: float = 0.0,
    gain: float = 0.0,
    rate: float,
    decay: float = 0.0,
) -> _core.OptimizerRule:
    return _core.OptimizerRule(
        kind, nesterov, *gradient, keep_first, keep_second, eps, eps_inside, momentum, gain, rate, decay, *norm
    )


def optimizer_rule(
    kind: int,
    gradient: tuple[float, float, float, float, float],
    norm: tuple[float, bool, float, bool],
    nesterov: bool,
    keep_first: float,
    keep_second: float,
    eps: float,
    eps_inside: float,
    momentum: float,
) -> _core.OptimizerRule:
    """A rule without what depends on the learning rate, for steps whose rate is in memory."""
    return _rule(
        kind,
        gradient,
        norm,
        nesterov=nesterov,
        keep_first=keep_first,
        keep_second=keep_second,
        eps=eps,
        eps_inside=eps_inside,
        momentum=momentum,
        rate=0.0,
    )


_NEEDED_STATES: Final = frozenset(("first_moments", "second_moments", "squares"))


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _as_list(name: str, arrays: object) -> list[Any]:
    if type(arrays) is list:
        return arrays
    if isinstance(arrays, (np.ndarray, memoryview)) or not isinstance(arrays, Iterable):
        return [as_array(name, arrays)]
    return list(arrays)


def _step(
    rule: _core.OptimizerRule,
    parameters: Arrays,
    gradients: Arrays,
    states: dict[str, Arrays | None],
    num_threads: int | None,
) -> None:
    threads = thread_count(num_threads)
    single = isinstance(parameters, np.ndarray)
    updated: list[Any] = [parameters] if single else _as_list("parameters", parameters)
    gradient_list = _one_each("gradients", gradients, updated, single)
    state_lists = [
        [] if arrays is None else _one_each(name, arrays, updated, single) for name, arrays in states.items()
    ]
    for name, arrays in states.items():
        if arrays is None and name in _NEEDED_STATES:
            raise ArgumentTypeError(name, "{argument} is None; it is needed, zeros before the first step")
    arguments = (updated, gradient_list, *state_lists, *([[]] * (3 - len(state_lists))), False, threads)

    def fix(_: Refusal, refused: OptimizerStep) -> OptimizerStep:
        given = {name: arrays for name, arrays in zip(states, state_lists, strict=True) if states[name] is not None}
        written, read = _checked({"parameters": updated, "gradients": gradient_list, **given})
        check_disjoint(written, read)
        plain = [
            [as_plain(a) for a in arrays] for arrays in (updated, refused.states0, refused.states1, refused.states2)
        ]
        return refused._replace(
            parameters=plain[0],
            gradients=list(read.values()),
            states0=plain[1],
            states1=plain[2],
            states2=plain[3],
            overlap_checked=True,
        )

    enter(OptimizerStep, rule.step, arguments, fix)


def _one_each(name: str, arrays: object, parameters: list[Any], single: bool) -> list[Any]:
    """The arrays as a list, one for each parameter."""
    found = [arrays] if single else _as_list(name, arrays)
    if len(found) != len(parameters):
        raise ArgumentValueError(name, "there are {} {argument}, but {} {parameters}", len(found), len(parameters))
    return found


def _checked(lists: dict[str, list[Any]]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Check the arrays; return those that are written and those that are read, by name."""
    written: dict[str, Array] = {}
    read: dict[str, Array] = {}
    for i, parameter in enumerate(lists["parameters"]):
        for name, arrays in lists.items():
            label = f"{name}[{i}]"
            array = arrays[i]
            if name == "gradients":
                read[label] = array = as_array(label, array)
            elif not isinstance(array, np.ndarray):
                raise ArgumentTypeError(label, "{argument} must be an ndarray, not {}: it is updated", type(array))
            else:
                written[label] = array
                if not array.flags.writeable:
                    raise ArgumentValueError(label, "{argument} is read-only")
                check_not_masked(label, array)
                check_no_self_overlap(label, array)
            _check_dtype(label, array)
            check_aligned(label, array)
            if array.shape != parameter.shape:
                raise ArgumentValueError(
                    label,
                    "{argument} has shape {}, but {} has shape {}",
                    array.shape,
                    ArgumentName(f"parameters[{i}]"),
                    parameter.shape,
                )
            if array.dtype != parameter.dtype:
                raise ArgumentTypeError(
                    label,
                    "{argument} has dtype {}, but {} has dtype {}",
                    array.dtype,
                    ArgumentName(f"parameters[{i}]"),
                    parameter.dtype,
                )
    return written, read


def _check_dtype(name: str, array: Array) -> None:
    if array.dtype not in FLOATS:
        raise ArgumentTypeError(name, "{argument} has dtype {}; it must be native float32 or float64", array.dtype)
