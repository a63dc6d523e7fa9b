"""The interface between a kind of training task and the training loop."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import numpy.typing as npt

import retrograd as rg

from .. import nn
from ..distributed import DataParallel, Group
from .report import Block, Section
from .settings import InputError, Settings

__all__ = [
    "Array",
    "Outcome",
    "Task",
    "check_shards",
    "learning_rate",
    "new_optimizer",
    "steps_between_validations",
    "warm_up_steps",
]

Array = npt.NDArray[Any]


class Outcome(NamedTuple):
    """The results of a trained model."""

    headline: list[Block]  # the most important one
    sections: list[Section]
    verdict: dict[str, Any] | None = None  # what to save with the model, as a JSON-serialisable dict


class Task(abc.ABC):
    """Data, a model and its optimizer, and how to take one training step.

    A step depends only on the settings, the data, the model, the number of steps taken (``optimizer.steps``) and
    `arrays`, so that a resumed run gives bitwise the same result. With several ranks, each has a task, and takes its
    part in every step.
    """

    kind: ClassVar[str]  # "text"
    use: ClassVar[str] = ""  # the command that uses the trained model, such as "retrograd sample"
    items: str  # the unit of throughput: "characters"
    measure: str  # the metric of `step` and `validate`, lower is better: "bits per character"
    settings: Settings
    group: Group = Group(1)  # the ranks that take part
    model: nn.Module
    optimizer: nn.Optimizer
    steps: int  # of the complete run
    validate_every: int  # steps
    best_step: int = 0  # after which the best weights were saved; known when `outcome` is called
    improving: bool = False  # whether the last validation was the best, when the outcome is asked for

    def longest(self) -> int:
        """Return the most steps that make sense for the data, however much time there is."""
        return self.steps

    def plan(self, steps: int, validate_every: int | None = None) -> None:
        """Make the complete run this long: with it change the learning-rate schedule and the interval of validations.

        The settings get the new number of steps, so that a resumed run has it too; `validate_every` is for both.
        """
        every = self.settings.validate_every if validate_every is None else validate_every
        self.settings = dataclasses.replace(self.settings, steps=steps, validate_every=every)
        self.steps, self.validate_every = steps, steps_between_validations(self.settings, steps)
        self.optimizer.learning_rate = learning_rate(self.settings, steps)

    def in_force(self) -> dict[str, Any]:
        """Return the settings by name, with the values that those left to the program have got."""
        settings = {
            **self.settings.record(),
            "steps": self.steps,
            "validate_every": self.validate_every,
            "warm_up": warm_up_steps(self.settings, self.steps),
            "threads": self.settings.threads or rg.get_num_threads(),
            "shards": self.group.shards,
        }
        if self.settings.optimizer != "sgd":
            del settings["momentum"]
        return settings

    @functools.cached_property
    def parallel(self) -> DataParallel[Any]:
        """The model, its loss and its optimizer on all shards. All ranks create it together, when they first use it."""
        return self._new_parallel()

    @abc.abstractmethod
    def _new_parallel(self) -> DataParallel[Any]:
        """Create what trains the model, by ``parallel.run`` or ``parallel.step``."""

    @abc.abstractmethod
    def step(self) -> tuple[float, int]:
        """Take a training step. Return the loss in units of `measure`, and the item count."""

    @abc.abstractmethod
    def validate(self) -> float:
        """Return the metric on the validation data. Does not affect later steps."""

    @abc.abstractmethod
    def source(self) -> dict[str, Any]:
        """Return a fingerprint of the data as a JSON-serialisable dict; it must be equal when a run is resumed."""

    @abc.abstractmethod
    def description(self) -> dict[str, Any]:
        """Return what is needed to use the trained model besides its weights, as a JSON-serialisable dict."""

    def arrays(self) -> dict[str, Array]:
        """Return the training state besides model and optimizer: the arrays themselves, which a checkpoint fills."""
        return {}

    def gather(self) -> None:  # noqa: B027 (most tasks have no arrays)
        """Complete the `arrays` of every rank with what other ranks have computed. Every rank calls it."""

    @abc.abstractmethod
    def overview(self) -> list[tuple[str, str]]:
        """Return names and values that describe data and model, for the start of the output and the report."""

    @abc.abstractmethod
    def outcome(self) -> Outcome:
        """Return the results of the trained model, evaluated once. `model` has the best weights."""

    def close(self) -> None:  # noqa: B027 (most tasks hold only memory)
        """Release what the task holds besides memory."""


def check_shards(group: Group, batch: int, what: str) -> None:
    """Refuse a batch with fewer samples than shards."""
    if batch < group.shards:
        raise InputError(f"{what} {batch} cannot be split into {group.shards} shards; reduce --shards")


def steps_between_validations(settings: Settings, steps: int) -> int:
    """Return the setting, or by default the interval that gives about 20 validations."""
    return settings.validate_every or -(-steps // 20)


def warm_up_steps(settings: Settings, steps: int) -> int:
    """Return the steps of the learning rate's warm-up: the setting, or by default a tenth of the run, at most 100."""
    wanted = min(100, steps // 10) if settings.warm_up is None else settings.warm_up
    return min(wanted, max(steps - 1, 0))


def learning_rate(settings: Settings, steps: int) -> nn.Constant | nn.Cosine:
    """Return the learning-rate schedule of the settings over `steps` steps."""
    warm_up = warm_up_steps(settings, steps)
    if settings.schedule == "cosine":
        return nn.Cosine(settings.learning_rate, max(steps, 1), warm_up, final=settings.learning_rate / 10)
    return nn.Constant(settings.learning_rate, warm_up)


def new_optimizer(model: nn.Module, settings: Settings, steps: int) -> nn.Optimizer:
    """Create the optimizer of the settings, with the learning-rate schedule over `steps` steps."""
    kinds: dict[str, Any] = {"sgd": nn.SGD, "adam": nn.Adam, "adamw": nn.AdamW, "rmsprop": nn.RMSProp}
    own = {"momentum": settings.momentum} if settings.optimizer == "sgd" else {}
    optimizer: nn.Optimizer = kinds[settings.optimizer](
        model,
        learning_rate(settings, steps),
        weight_decay=settings.weight_decay,
        maximum_norm=settings.maximum_norm,
        **own,
    )
    return optimizer
