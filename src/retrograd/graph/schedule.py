"""Learning-rate schedules: functions of the step, which counts from 0: a number, or a float64 tensor in a program.

They are made of products and sums, because the last bit of the C library's functions depends on the machine. Only the
power of :class:`StepDecay` may differ in its last bits between a number and a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .elementwise import floor, minimum, power, where
from .shaping import full
from .tensor import Tensor

__all__ = ["Constant", "Cosine", "StepDecay"]

# What a schedule is called with, and what it returns.
Step = TypeVar("Step", float, Tensor)


@dataclass(frozen=True)
class Constant:
    """A constant `rate`, after a linear warm-up over the first `warm_up` steps."""

    rate: float
    warm_up: int = 0

    def __call__(self, step: Step) -> Step:
        return _warm(self.rate, step, self.warm_up, _like(step, self.rate))


@dataclass(frozen=True)
class StepDecay:
    """`rate`, multiplied by `factor` after every `every` steps."""

    rate: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"StepDecay: every is {self.every}, must be at least 1")

    def __call__(self, step: Step) -> Step:
        if isinstance(step, Tensor):
            return power(self.factor, floor(step / float(self.every))) * self.rate
        return self.rate * _power(self.factor, int(step) // self.every)


@dataclass(frozen=True)
class Cosine:
    """A linear warm-up to `rate` over `warm_up` steps, then half a cosine down to `final` at step `steps`."""

    rate: float
    steps: int
    warm_up: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warm_up < self.steps:
            raise ValueError(
                f"Cosine: warm_up is {self.warm_up} and steps is {self.steps}; must be 0 <= warm_up < steps"
            )

    def __call__(self, step: Step) -> Step:
        progress = _smaller((step - float(self.warm_up)) / float(self.steps - self.warm_up), _like(step, 1.0))
        fallen = _falling_cosine(progress) * (self.rate - self.final) + self.final
        return _warm(self.rate, step, self.warm_up, fallen)


def _like(step: Step, value: float) -> Step:
    return full((), value, np.float64) if isinstance(step, Tensor) else value


def _smaller(a: Step, b: Step) -> Step:
    if isinstance(a, Tensor):
        return minimum(a, b)
    return b if b < a else a


def _chosen(condition: Any, a: Step, b: Step) -> Step:
    if isinstance(a, Tensor):
        return where(condition, a, b)
    return a if condition else b


def _warm(rate: float, step: Step, warm_up: int, later: Step) -> Step:
    if not warm_up:
        return later
    return _chosen(step < float(warm_up), (step + 1.0) / float(warm_up) * rate, later)


def _falling_cosine(progress: Step) -> Step:
    """(1 + cos(pi progress)) / 2, for progress from 0 to 1: from 1 to 0."""
    # sin(pi x / 2)**2 for x <= 1/2, where the Taylor series of the sine needs nine terms.
    angle = _smaller(progress, 1.0 - progress) * (math.pi / 2)
    square = angle * angle
    sine = _like(angle, 1.0)
    for k in range(16, 0, -2):
        sine = 1.0 - sine * square / float(k * (k + 1))
    sine = sine * angle
    half = sine * sine
    return _chosen(progress <= 0.5, 1.0 - half, half)


def _power(base: float, exponent: int) -> float:
    result = 1.0
    for digit in f"{exponent:b}":
        result *= result
        if digit == "1":
            result *= base
    return result
