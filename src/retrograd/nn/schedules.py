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
        return self.rate * self.factor ** (step // self.every)


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
        return self.final + (self.rate - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _warm(rate: float, step: int, warm_up: int) -> float:
    return rate * min((step + 1) / warm_up, 1.0) if warm_up else rate
