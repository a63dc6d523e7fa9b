"""What a public program and its jobs declare, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

__all__ = ["TORCH", "Job", "Outcome", "Program", "Seconds", "Step"]

TORCH: Final = "2.13.0"  # of every program

Step: TypeAlias = Callable[[], Any]  # takes one training step and returns its loss, a number or a tensor


class Job(NamedTuple):
    """A small training job. `make` builds the model as a user of the program does, which may include its first steps.

    What is random comes from generators that are seeded before `make` and before each step. A job without recurrent
    layers has `recurrent` False.
    """

    name: str
    make: Callable[[], Step]
    replaced: Mapping[str, int]  # how many layers of each class
    left: Mapping[str, int] = MappingProxyType({})  # the same, of those that are left, with the reason
    recurrent: bool = True
    # Relative, of a loss: sums have another order, and Adam divides small gradients by their own size.
    tolerance: float = 1e-4
    ours: Callable[[], Step] | None = None  # if the program is to be told of retrograd by other means than a patch


class Program(NamedTuple):
    """A public package with its jobs, in a virtual environment of its own."""

    name: str
    packages: tuple[str, ...]  # with exact versions, the program's first
    jobs: tuple[Job, ...]
    # For a package that requires another build of PyTorch, or of torchvision or torchaudio: it is installed alone, and
    # these with what they depend on.
    dependencies: tuple[str, ...] | None = None


class Seconds(NamedTuple):
    """Of a training step, with so many threads. `ratio` is PyTorch's time over retrograd's."""

    threads: int
    torch: float
    retrograd: float
    ratio: float


class Outcome(NamedTuple):
    """What a job gave: the failures, if there are any, otherwise the times."""

    job: str
    layers: str  # that were replaced
    failures: list[str]
    times: list[Seconds]
