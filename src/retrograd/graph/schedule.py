"""Learning-rate schedules: functions of the step, a float64 tensor that counts from 0.

They give the bits of `nn.schedules`, but for the last ones of a power in `StepDecay`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .elementwise import floor, minimum, power, where
from .shaping import full
from .tensor import Tensor

__all__ = ["Constant", "Cosine", "StepDecay"]


@dataclass(frozen=True)
class Constant:
    """A constant `rate`, after a linear warm-up over the first `warm_up` steps."""

    rate: float
    warm_up: int = 0

    def __call__(self, step: Tensor) -> Tensor:
        return _warm(self.rate, step, self.warm_up, full((), self.rate, np.float64))


@dataclass(frozen=True)
class StepDecay:
    """`rate`, multiplied by `factor` after every `every` steps."""

    rate: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"StepDecay: every is {self.every}, must be at least 1")

    def __call__(self, step: Tensor) -> Tensor:
        return power(self.factor, floor(step / float(self.every))) * self.rate


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

    def __call__(self, step: Tensor) -> Tensor:
        progress = minimum((step - float(self.warm_up)) / float(self.steps - self.warm_up), 1.0)
        fallen = _falling_cosine(progress) * (self.rate - self.final) + self.final
        return _warm(self.rate, step, self.warm_up, fallen)


def _warm(rate: float, step: Tensor, warm_up: int, later: Tensor) -> Tensor:
    if not warm_up:
        return later
    return where(step < float(warm_up), (step + 1.0) / float(warm_up) * rate, later)


def _falling_cosine(progress: Tensor) -> Tensor:
    """(1 + cos(pi progress)) / 2, from the series of the sine, as `nn.schedules` has it."""
    angle = minimum(progress, 1.0 - progress) * (math.pi / 2)
    square = angle * angle
    sine: Tensor = full((), 1.0, np.float64)
    for k in range(16, 0, -2):
        sine = 1.0 - sine * square / float(k * (k + 1))
    sine = sine * angle
    half = sine * sine
    return where(progress <= 0.5, 1.0 - half, half)
