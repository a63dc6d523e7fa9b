"""Learning-rate schedules: functions of the step, which counts from 0."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Constant", "Cosine", "StepDecay"]


@dataclass(frozen=True)
class Constant:
    """A constant `rate`, after a linear warm-up over the first `warm_up` steps."""

    rate: float
    warm_up: int = 0

    def __call__(self, step: int) -> float:
        return _warm(self.rate, step, self.warm_up)


@dataclass(frozen=True)
class StepDecay:
    """`rate`, multiplied by `factor` after every `every` steps."""

    rate: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"StepDecay: every is {self.every}, must be at least 1")

    def __call__(self, step: int) -> float:
        return self.rate * _power(self.factor, step // self.every)


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

    def __call__(self, step: int) -> float:
        if step < self.warm_up:
            return _warm(self.rate, step, self.warm_up)
        progress = min((step - self.warm_up) / (self.steps - self.warm_up), 1.0)
        return self.final + (self.rate - self.final) * _falling_cosine(progress)


# From products and sums alone, because the last bit of the C library's functions depends on the machine.


def _power(base: float, exponent: int) -> float:
    result = 1.0
    for digit in f"{exponent:b}":
        result *= result
        if digit == "1":
            result *= base
    return result


def _falling_cosine(progress: float) -> float:
    """(1 + cos(pi progress)) / 2, for progress from 0 to 1: from 1 to 0."""
    # sin(pi x / 2)**2 for x <= 1/2, where the Taylor series of the sine needs nine terms.
    angle = math.pi / 2 * min(progress, 1.0 - progress)
    square = angle * angle
    sine = 1.0
    for k in range(16, 0, -2):
        sine = 1.0 - sine * square / (k * (k + 1))
    sine *= angle
    return sine * sine if progress > 0.5 else 1.0 - sine * sine


def _warm(rate: float, step: int, warm_up: int) -> float:
    return rate * min((step + 1) / warm_up, 1.0) if warm_up else rate
