"""A training loop: batches, shuffling, validation, early stopping. Copy it and change it where you need another."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..ops._types import Array
from .init import Rng, generator
from .sizes import size
from .step import Step

__all__ = ["Epoch", "fit"]


class Epoch(NamedTuple):
    """The mean loss of an epoch, the loss on the validation data after it, if there are any, and its seconds."""

    loss: float
    validation: float | None
    seconds: float


def fit(
    step: Step,
    data: Sequence[Any],
    *,
    validation: Sequence[Any] | None = None,
    epochs: int = 10,
    batch: int = 32,
    batch_axis: int = 0,
    shuffle: bool = True,
    patience: int | None = None,
    rng: Rng = 0,
    progress: bool = True,
) -> list[Epoch]:
    """Train on ``(x, target)`` for some epochs, and return what each gave.

    `data` are the arguments of the step, arrays whose samples are on `batch_axis`, or on axis 0 if they have no such
    axis; the last batch may be smaller. With `validation` data the parameters of the best epoch are restored at the
    end, and training stops after `patience` epochs in a row that were not better. A :class:`Plateau` learning rate
    gets the loss after each epoch. `rng` shuffles the samples.
    """
    if not isinstance(step, Step):
        raise TypeError(f"fit: step is a {type(step).__name__}; write step = nn.compile(model, loss, optimizer)")
    for name, given in (("data", data), ("validation", validation)):
        if given is not None and not isinstance(given, (tuple, list)):
            raise TypeError(f"fit: {name} is a {type(given).__name__}, must be a tuple: (x, target)")
    batch_axis = size("fit", "batch_axis", batch_axis, None)
    arrays = _arrays("data", data)
    tested = None if validation is None else _arrays("validation", validation)
    count = _samples("data", arrays, batch_axis)
    if tested is not None:
        _samples("validation", tested, batch_axis)
    batch, epochs = (size("fit", name, value, None) for name, value in (("batch", batch), ("epochs", epochs)))
    if batch < 1 or epochs < 0:
        raise ValueError(f"fit: batch is {batch} and epochs is {epochs}; the minima are 1 and 0")
    if patience is not None:
        patience = size("fit", "patience", patience)
    if patience is not None and tested is None:
        raise ValueError(f"fit: patience is {patience}, which needs validation data")
    if tested is not None and len(tested) != len(arrays):
        raise ValueError(f"fit: validation has {len(tested)} arrays, but data has {len(arrays)}")
    if tested is not None and epochs:  # not after the first epoch
        _compiled(step, tested, batch, batch_axis)
    draw, model = generator(rng), step.model
    history: list[Epoch] = []
    best, best_state, since = np.inf, None, 0
    try:
        for epoch in range(epochs):
            began, total = time.perf_counter(), 0.0
            order = draw.permutation(count) if shuffle else np.arange(count)
            if not model.training:  # layers that are in evaluation mode on purpose stay in it
                model.train()
            with _bar(f"epoch {epoch + 1} of {epochs}", count, progress) as advance:
                for first in range(0, count, batch):
                    chosen = order[first : first + batch]
                    loss = _loss(step(*(_taken(array, chosen, batch_axis) for array in arrays)))
                    total += loss * len(chosen)
                    advance(len(chosen), loss)
            found = None if tested is None else _evaluated(step, tested, batch, batch_axis)
            history.append(Epoch(total / count, found, time.perf_counter() - began))
            if progress:
                print(_line(len(history), epochs, history[-1]), file=sys.stderr)
            told = {id(plateau): plateau for optimizer in step.optimizers for plateau in optimizer.plateaus().values()}
            for plateau in told.values():
                plateau.report(history[-1].loss if found is None else found)
            if found is not None and found < best:
                best, best_state, since = found, model.state_dict(), 0
            elif found is not None:
                since += 1
                if patience is not None and since >= patience:
                    break
    finally:  # also after Ctrl-C
        if best_state is not None:
            model.load_state_dict(best_state)
    return history


def sample_axis(array: Array, batch_axis: int) -> int:
    """The axis of the samples: `batch_axis`, or 0 in an array that has no such axis."""
    return batch_axis if -array.ndim <= batch_axis < array.ndim else 0


def _arrays(name: str, given: Sequence[Any]) -> list[Array]:
    """The arrays of the data. They are arguments of the step by position, so none may be left out."""
    found: list[Array] = []
    for position, one in enumerate(given):
        if one is None:
            raise TypeError(f"fit: {name}[{position}] is None, must be an array")
        try:
            found.append(np.asarray(one))
        except ValueError:
            said = f"fit: {name}[{position}] has rows of several lengths; pad them, and give the lengths"
            raise ValueError(said) from None
    return found


def _samples(name: str, arrays: Sequence[Array], axis: int) -> int:
    counts = [array.shape[sample_axis(array, axis)] if array.ndim else 0 for array in arrays]
    if not counts or len(set(counts)) > 1 or not counts[0]:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"fit: {name} has shapes {shapes or 'none'}; all need the same number of samples, at least 1")
    return counts[0]


def _taken(array: Array, chosen: Array, axis: int) -> Array:
    found: Array = np.take(array, chosen, sample_axis(array, axis))
    return found


def _loss(answer: Any) -> float:
    """The loss alone of what a step returns."""
    return float(answer[0] if isinstance(answer, tuple) else answer)


def _compiled(step: Step, arrays: Sequence[Array], batch: int, axis: int) -> None:
    """Compile the evaluation of a batch, which raises what is wrong with the validation data."""
    chosen = np.arange(min(batch, _samples("validation", arrays, axis)))
    try:
        step.evaluation(*(_taken(array, chosen, axis) for array in arrays))
    except (TypeError, ValueError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"fit: validation: {error}") from error


def _evaluated(step: Step, arrays: Sequence[Array], batch: int, axis: int) -> float:
    """The mean loss of all samples, without training."""
    count, total = _samples("validation", arrays, axis), 0.0
    for first in range(0, count, batch):
        chosen = np.arange(first, min(first + batch, count))
        total += _loss(step.evaluate(*(_taken(array, chosen, axis) for array in arrays))) * len(chosen)
    return total / count


def _line(number: int, epochs: int, epoch: Epoch) -> str:
    tested = "" if epoch.validation is None else f"  validation {epoch.validation:.4g}"
    return f"epoch {number} of {epochs}  loss {epoch.loss:.4g}{tested}  {epoch.seconds:.1f} s"


@contextlib.contextmanager
def _bar(title: str, count: int, progress: bool) -> Iterator[Any]:
    """A progress bar on a terminal; elsewhere nothing."""
    if not progress or not sys.stderr.isatty():
        yield lambda samples, loss: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=count)
        yield lambda samples, loss: bar.update(task, advance=samples, description=f"{title}  loss {loss:.4g}")
