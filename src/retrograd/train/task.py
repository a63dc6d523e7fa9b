"""The interface between a kind of training and the loop that runs it."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import numpy.typing as npt

from .. import nn
from .report import Block, Section
from .settings import Settings

__all__ = ["Array", "Task", "new_optimizer", "steps_between_validations"]

Array = npt.NDArray[Any]


class Task(abc.ABC):
    """Data, a model and its optimizer, and how to take one step.

    What a step does follows from the settings, the data, the number of steps done (``optimizer.steps``) and `arrays`
    alone, so that a run that was stopped goes on to the same bits.
    """

    kind: ClassVar[str]  # "text"
    items: str  # what is counted per second: "characters"
    measure: str  # what `step` and `validate` return, lower is better: "bits per character"
    settings: Settings
    model: nn.Module
    optimizer: nn.Optimizer
    steps: int  # of the whole run
    validate_every: int  # steps

    @abc.abstractmethod
    def step(self) -> tuple[float, int]:
        """Forward, backward, ``optimizer.step()``: the loss in units of `measure`, and the number of items."""

    @abc.abstractmethod
    def validate(self) -> float:
        """The measure on data that is not trained on. It changes nothing that a step depends on."""

    @abc.abstractmethod
    def source(self) -> dict[str, Any]:
        """A fingerprint of the data as a JSON-serialisable dict, which must be equal when a run is resumed."""

    @abc.abstractmethod
    def description(self) -> dict[str, Any]:
        """What is needed to use the trained model besides its weights, as a JSON-serialisable dict."""

    def arrays(self) -> dict[str, Array]:
        """State of the steps besides the model and the optimizer: the arrays themselves, which a checkpoint fills."""
        return {}

    @abc.abstractmethod
    def overview(self) -> list[tuple[str, str]]:
        """Names and values that describe the data and the model, for the head of the output and the report."""

    @abc.abstractmethod
    def results(self) -> list[Section]:
        """What the trained model can do. `model` has the best weights by now."""

    def verdict(self) -> dict[str, Any] | None:
        """What users of the trained model should know of its results, as a JSON-serialisable dict."""
        return None

    def close(self) -> None:  # noqa: B027 (most tasks hold memory only)
        """Release what the task holds besides memory."""

    def headline(self) -> list[Block]:
        """The most important result."""
        return []


def steps_between_validations(settings: Settings, steps: int) -> int:
    """What the settings say, or else what makes about 20 validations, however long the run is."""
    return settings.validate_every or max(1, round(steps / 20))


def new_optimizer(model: nn.Module, settings: Settings, steps: int) -> nn.Optimizer:
    """The optimizer that the settings name, with their schedule over so many steps."""
    rate: nn.Constant | nn.Cosine
    warm_up = min(settings.warm_up, max(steps - 1, 0))
    if settings.schedule == "cosine":
        rate = nn.Cosine(settings.learning_rate, max(steps, 1), warm_up, final=settings.learning_rate / 10)
    else:
        rate = nn.Constant(settings.learning_rate, warm_up)
    norm, threads = settings.maximum_norm, settings.threads
    if settings.optimizer == "sgd":
        return nn.SGD(
            model,
            rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            maximum_norm=norm,
            num_threads=threads,
        )
    kinds: dict[str, Any] = {"adam": nn.Adam, "adamw": nn.AdamW, "rmsprop": nn.RMSProp}
    optimizer: nn.Optimizer = kinds[settings.optimizer](
        model, rate, weight_decay=settings.weight_decay, maximum_norm=norm, num_threads=threads
    )
    return optimizer
