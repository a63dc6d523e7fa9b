"""Rows named adamw_*: a step of AdamW over a model's parameters, by `adam_step` and by PyTorch's fused AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import retrograd

from ...ops._types import Array
from .timing import WholeSteps, agree, import_torch

__all__ = ["OPTIMIZER_CASES", "OptimizerCase", "Update", "make_update", "update_failures", "update_slots"]

_RATE: Final = 1e-3
_DECAY: Final = 0.01


class OptimizerCase(NamedTuple):
    name: str
    shapes: tuple[tuple[int, ...], ...]  # of the parameters


class Update(NamedTuple):
    """Parameters and their gradients, as tensors."""

    parameters: list[Any]
    gradients: list[Any]

    def arrays(self) -> list[tuple[Array, ...]]:
        """Copies of the parameters, the gradients, and both moments, which are 0."""
        parameters, gradients = ([t.numpy() for t in tensors] for tensors in self)
        return [
            tuple(p.copy() for p in parameters),
            tuple(gradients),
            tuple(0.0 * p for p in parameters),
            tuple(0.0 * p for p in parameters),
        ]


def _resnet18() -> Iterator[tuple[int, ...]]:
    """The shapes of the 62 parameters, 11.7 million elements."""
    yield from ((64, 3, 7, 7), (64,), (64,))
    before = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            for inputs in (before if block == 0 else width, width):
                yield from ((width, inputs, 3, 3), (width,), (width,))
            if block == 0 and width != before:
                yield from ((width, before, 1, 1), (width,), (width,))
        before = width
    yield from ((1000, 512), (1000,))


def _lstm(units: int, layers: int = 2) -> Iterator[tuple[int, ...]]:
    """An embedding of 96 characters, an LSTM and a linear head."""
    yield (96, units)
    for _ in range(layers):
        yield from ((4 * units, units), (4 * units, units), (4 * units,), (4 * units,))
    yield from ((96, units), (96,))


OPTIMIZER_CASES: Final = (
    OptimizerCase("adamw_resnet18", tuple(_resnet18())),
    OptimizerCase("adamw_lstm_h128", tuple(_lstm(128))),
    OptimizerCase("adamw_lstm_h512", tuple(_lstm(512))),
)


def make_update(torch: Any, case: OptimizerCase) -> Update:
    tensors = ([torch.randn(shape) for shape in case.shapes] for _ in range(2))
    return Update(*tensors)


class _Ours:
    def __init__(self, update: Update, threads: int) -> None:
        self.arrays, self._threads, self._step = update.arrays(), threads, 0

    def __call__(self) -> None:
        self._step += 1
        retrograd.adam_step(
            *self.arrays,
            step=self._step,
            learning_rate=_RATE,
            weight_decay=_DECAY,
            decoupled=True,
            num_threads=self._threads,
        )


class _Torch:
    def __init__(self, torch: Any, update: Update) -> None:
        self.parameters = [torch.nn.Parameter(p.clone()) for p in update.parameters]
        for parameter, gradient in zip(self.parameters, update.gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer = torch.optim.AdamW(self.parameters, _RATE, weight_decay=_DECAY, fused=True)
        self._step = optimizer.step

    def __call__(self) -> None:
        self._step()


def update_failures(update: Update) -> Iterator[str]:
    """Yield a message if the parameters after three steps differ."""
    ours, theirs = _Ours(update, 1), _Torch(import_torch(), update)
    for _ in range(3):
        ours()
        theirs()
    if not agree(ours.arrays[0], [p.detach().numpy() for p in theirs.parameters], 1e-5):
        yield "the parameters differ from PyTorch's"


def update_slots(torch: Any, update: Update, threads: int) -> list[list[Any]]:
    runs: dict[str, Callable[[], None]] = {"retrograd": _Ours(update, threads), "torch": _Torch(torch, update)}
    return [[WholeSteps(name, run, threads)] for name, run in runs.items()]
