"""The training loop: steps, validation, checkpoints, and the files of the run directory."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
import os
import shlex
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Literal

import numpy as np

from .. import nn
from .._files import write_whole
from .chart import Chart, Line, png
from .files import MODEL, UNUSABLE, load_weights
from .progress import Progress, clock, count
from .report import Block, Prose, Section, Table, page, plain
from .settings import InputError, shown
from .task import Task

__all__ = ["CHECKPOINT", "FILES", "MODEL", "Run", "RunError", "quoted", "read_checkpoint"]

CHECKPOINT: Final = "checkpoint.safetensors"
# The best model of the scheduled validations, while MODEL is a better one from when the time limit was reached.
_PLANNED: Final = "model-as-planned.safetensors"
HISTORY: Final = "history.csv"
REPORT: Final = "report.html"
CURVES: Final = "curves.png"
FILES: Final = (MODEL, CHECKPOINT, _PLANNED, HISTORY, REPORT, CURVES)
_LARGEST: Final = 1e100  # of numbers in a checkpoint, so that sums and products are finite


class RunError(Exception):
    """Training failed after it started. The message says what was saved, and how to resume."""


@dataclasses.dataclass(frozen=True)
class Record:
    """The values at one validation: the mean training loss since the previous one, and totals since the start."""

    step: int
    loss: float | None  # None before the first step
    validation: float
    learning_rate: float
    items: int
    seconds: float


class Run:
    """A training run in its directory. `train` runs it; `why` is the reason it ended.

    With several ranks, rank 0 validates, decides, prints and writes; the others only take their part in the steps.
    """

    def __init__(self, task: Task, folder: Path, files: list[str], progress: Progress) -> None:
        self._task, self._folder, self._files, self._progress = task, folder, files, progress
        self._group, self._leads = task.group, task.group.rank == 0
        self._records: list[Record] = []
        self._best: float | None = None
        self._pending: list[float] = []  # losses since the last record
        self._items = 0
        self._seconds_before = 0.0
        self._began = time.monotonic()
        self._saved = -math.inf
        self.why: Literal["finished", "no improvement", "time limit", "interrupted"] = "finished"
        self.signal: int | None = None

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def resume(self, metadata: Mapping[str, Any]) -> None:
        """Load the checkpoint in the directory, which has this metadata. Only rank 0 reads it."""
        if not self._leads:
            return
        task, path = self._task, self._folder / CHECKPOINT
        source = task.source()
        if metadata["source"] != source:
            changed = [name for name, value in source.items() if metadata["source"].get(name) != value]
            raise InputError(
                f"{path}: the data have changed since the run began: "
                + "; ".join(f"{name} was {metadata['source'].get(name)}, is {source[name]}" for name in changed)
            )
        try:
            if (self._folder / _PLANNED).exists():
                os.replace(self._folder / _PLANNED, self._folder / MODEL)
            load_weights(self._folder / MODEL, task.model)  # only to check that the end of the run can load it
            nn.load(path, task.model, task.optimizer, arrays=task.arrays())
            _check_finite(task)
            if task.optimizer.steps > task.steps:
                raise ValueError(f"it has {task.optimizer.steps} steps, but the run has {task.steps}")
            self._records = _read_records(metadata["records"], task.optimizer.steps)
            self._best = min(record.validation for record in self._records)
            self._pending = [_number(loss) for loss in metadata["pending"]]
            self._items = _number(metadata["items"], whole=True, minimum=self._records[-1].items, maximum=2**63)
            self._seconds_before = _number(metadata["seconds"], minimum=self._records[-1].seconds)
        except UNUSABLE as error:
            raise InputError(f"{path} cannot be resumed: {error}") from None

    def _synchronize(self) -> None:
        """Give every rank the state of rank 0, after a check that all have the same data."""
        task, source = self._task, self._task.source()
        if (first := self._group.broadcast(source)) != source:
            raise InputError(f"the data of rank {self._group.rank} differ from those of rank 0: {source}, not {first}")
        if self._group.size == 1:
            return
        parts = (task.model.state_arrays(), task.optimizer.arrays(), task.arrays())
        state = [array for part in parts for array in part.values()]
        for array, value in zip(state, self._group.broadcast(state), strict=True):
            array[...] = value
        progress = (self._records, self._best, self._pending, self._items, self._seconds_before)
        self._records, self._best, self._pending, self._items, self._seconds_before = self._group.broadcast(progress)
        assert task.parallel.group is self._group  # created here, before rank 0 validates, which may change buffers

    def _save(self) -> None:
        task = self._task
        task.gather()
        if not self._leads:
            return
        metadata = {
            **self._about(),
            "files": self._files,
            "source": task.source(),
            "records": [dataclasses.asdict(record) for record in self._records],
            "pending": self._pending,
            "items": self._items,
            "seconds": self._seconds(),
        }
        self._write(
            CHECKPOINT,
            lambda path: nn.save(path, task.model, task.optimizer, arrays=task.arrays(), metadata=metadata),
        )
        self._write(HISTORY, lambda path: write_whole(path, self._history().encode()))
        self._saved = time.monotonic()

    def _save_model(self, **metadata: Any) -> None:
        self._write(MODEL, lambda path: nn.save(path, self._task.model, metadata={**self._about(), **metadata}))

    def _about(self) -> dict[str, Any]:
        task = self._task
        settings = task.settings.without_resumable().record()
        return {"kind": task.kind, "settings": settings, "description": task.description()}

    def _write(self, name: str, write: Any) -> None:
        path = self._folder / name
        try:
            write(path)
        except OSError as error:
            left = ""
            if (self._folder / CHECKPOINT).exists():
                left = f"; the last checkpoint is complete: {self._how_to_resume()}"
            raise RunError(f"{path} could not be written: {error.strerror or error}{left}") from None

    def _history(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["step", "loss", "validation", "learning_rate", self._task.items, "seconds"])
        writer.writerows(dataclasses.astuple(record) for record in self._records)
        return text.getvalue()

    def _how_to_resume(self) -> str:
        return f"retrograd train {self._task.kind} --resume {quoted(self._folder)}"

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train until the last step, early stopping, the time limit or a signal. Then save, and write the report."""
        task, progress = self._task, self._progress
        for name, value in task.overview():
            progress.say(f"{name:<12} {value}")
        progress.say(f"{'run':<12} {self._folder}")
        if self._group.shards > 1:
            progress.say(f"{'ranks':<12} {self._group.size}, {self._group.shards} shards of each batch")
        progress.say()
        self._synchronize()
        self._began = time.monotonic()
        first = task.optimizer.steps
        if first:
            progress.say(f"resumed at step {count(first)} of {count(task.steps)}")
        task.model.train()
        progress.begin(first, task.steps)
        try:
            with _Stop() as stop:
                self._loop(first, stop)
                self._save()
            self.signal = self._group.broadcast(stop.signal)
            if self.signal is not None:
                self.why = "interrupted"
        finally:
            progress.end()
        if not self._leads:
            return
        done = task.optimizer.steps
        if self.why == "interrupted":
            progress.say(f"Stopped at step {count(done)} of {count(task.steps)}. Everything is saved. To continue:")
            progress.say(f"  {self._how_to_resume()}")
            return
        if self.why == "time limit":
            progress.say(f"Time limit reached at step {count(done)} of {count(task.steps)}. To continue:")
            progress.say(f"  {self._how_to_resume()}")
        if self.why == "no improvement":
            progress.say(
                f"Stopped early at step {count(done)} of {count(task.steps)}: {self._stalled()}. To continue anyway:"
            )
            progress.say(f"  {self._how_to_resume()} --patience none")
        self._report()

    def _stalled(self) -> str:
        """Return the reason for early stopping, or "" if the run continues."""
        patience, best = self._task.settings.patience, self._best_record(self._records)
        since = len(self._records) - 1 - self._records.index(best)
        if patience is None or since < patience:
            return ""
        return f"none of the last {since} validations was better than that of step {count(best.step)}"

    def _best_record(self, records: list[Record]) -> Record:
        return min(records, key=lambda record: record.validation)

    def _loop(self, first: int, stop: _Stop) -> None:
        task, settings, progress = self._task, self._task.settings, self._progress
        items_before, shown = self._items, -math.inf
        if not self._records:
            self._validate()
            progress.say(self._line(self._records[-1]))
        stalled = bool(self._stalled())
        while task.optimizer.steps < task.steps:
            now = time.monotonic()
            late = settings.time_limit is not None and now - self._began >= settings.time_limit
            due = now - self._saved >= settings.checkpoint_every
            interrupted, late, due = self._group.broadcast((stop.signal is not None, late, due))
            if interrupted:
                return
            if stalled:
                self.why = "no improvement"
                return
            if late:
                self.why = "time limit"
                return
            if due:
                self._save()
            loss, items = task.step()
            done = task.optimizer.steps
            if not math.isfinite(loss):
                raise self._diverged("loss", loss)
            self._pending.append(loss)
            self._items += items
            if done % task.validate_every == 0 or done == task.steps:
                self._validate()
                speed = f"  {count(self._speed(items_before))} {task.items}/s  {self._left(first)}"
                progress.say(self._line(self._records[-1]) + speed)
                stalled = bool(self._stalled())
            elif now - shown >= 0.1:  # faster updates cannot be read
                shown = now
                progress.step(done, self._numbers(loss, self._speed(items_before), first))

    def _diverged(self, what: str, value: float) -> RunError:
        # Resuming is not suggested: it would diverge again.
        kept = f"; the best model so far is {self._folder / MODEL}" if self._best is not None else ""
        return RunError(
            f"the {what} is {value} at step {count(self._task.optimizer.steps)}: a smaller --learning-rate (it is "
            f"{self._task.settings.learning_rate:g}) or --maximum-norm may help{kept}"
        )

    def _validate(self) -> None:
        validation = self._group.broadcast(self._task.validate() if self._leads else 0.0)
        if not math.isfinite(validation):
            raise self._diverged("validation", validation)
        self._records.append(self._record(validation))
        self._pending.clear()
        if self._best is None or validation < self._best:
            self._best = validation
            if self._leads:
                self._save_model()

    def _record(self, validation: float) -> Record:
        done = self._task.optimizer.steps
        loss = math.fsum(self._pending) / len(self._pending) if self._pending else None
        rate = self._task.optimizer.current_rate()
        return Record(done, loss, validation, rate, self._items, self._seconds())

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._began

    def _speed(self, items_before: int) -> float:
        return (self._items - items_before) / max(time.monotonic() - self._began, 1e-9)

    def _left(self, first: int) -> str:
        """Return the estimated time left, from the steps taken since `first`."""
        task = self._task
        here, elapsed = task.optimizer.steps - first, time.monotonic() - self._began
        left = elapsed / here * (task.steps - task.optimizer.steps)
        if task.settings.time_limit is not None:
            left = min(left, max(task.settings.time_limit - elapsed, 0))
        return f"{clock(left)} left"

    def _numbers(self, loss: float, speed: float, first: int) -> str:
        parts = [f"loss {loss:.3f}"]
        if self._records:
            parts.append(f"validation {self._records[-1].validation:.3f}")
        return "  ".join([*parts, f"{count(speed)} {self._task.items}/s", self._left(first)])

    def _line(self, record: Record) -> str:
        width = len(count(self._task.steps))
        loss = "" if record.loss is None else f"  loss {record.loss:.3f}"
        return f"step {count(record.step):>{width}}{loss}  validation {record.validation:.3f} {self._task.measure}"

    # ---- the report --------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        task, progress = self._task, self._progress
        records = list(self._records)
        if self._pending:
            # The time limit was reached between two validations. This extra validation is not part of the checkpoint,
            # so that a resumed run gives the same result as one that never stopped.
            records.append(self._record(task.validate()))
            progress.say(self._line(records[-1]))
            if self._best is not None and records[-1].validation < self._best:
                self._write(_PLANNED, lambda path: write_whole(path, (self._folder / MODEL).read_bytes()))
                self._save_model()
        try:
            nn.load(self._folder / MODEL, task.model)
        except (OSError, ValueError) as error:
            raise RunError(f"the best model could not be loaded: {error}") from None
        task.model.eval()
        outcome = task.outcome()
        if outcome.verdict is not None:
            self._save_model(verdict=outcome.verdict)
        headline: list[Block] = [*outcome.headline, Prose(self._summary(records))]
        progress.say()
        for section in (Section("", headline), *outcome.sections):
            if not all(isinstance(block, Chart) for block in section.blocks):
                progress.say(plain(section).rstrip("\n"))
                progress.say()
        charts = self._charts(records)
        settings = Table(["setting", "value"], [[name, shown(value)] for name, value in task.settings.record().items()])
        sections = [
            Section("Result", headline),
            Section("Training", charts),
            *outcome.sections,
            Section("Data and model", [Table(["", ""], [list(row) for row in task.overview()])]),
            Section("Settings", [settings]),
        ]
        title = f"A {task.kind} model, trained with retrograd"
        document = page(title, str(self._folder), sections)
        self._write(REPORT, lambda path: write_whole(path, document.encode("utf-8", "replace")))
        written = [REPORT]
        try:
            picture = png(charts)
            self._write(CURVES, lambda path: write_whole(path, picture))
            written.append(CURVES)
        except ImportError:
            progress.say(
                "curves.png was not written: it needs matplotlib (pip install matplotlib). The report has the curves."
            )
        progress.say(f"{'model':<12} {self._folder / MODEL}")
        for name in written:
            progress.say(f"{Path(name).stem:<12} {self._folder / name}")

    def _summary(self, records: list[Record]) -> str:
        task = self._task
        first, best, last = records[0], self._best_record(records), records[-1]
        text = f"{count(last.step)} of {count(task.steps)} steps in {clock(last.seconds)}, "
        text += f"at {count(last.items / max(last.seconds, 1e-9))} {task.items}/s. "
        if self.why == "no improvement":
            text += f"Stopped early: {self._stalled()}. "
        text += "Validation "
        if best.step == 0:
            return text + f"did not fall: before the first step it was {first.validation:.3f} {task.measure}."
        return text + (
            f"fell from {first.validation:.3f} before the first step to {best.validation:.3f} {task.measure} "
            f"at step {count(best.step)}, whose weights were saved as the model."
        )

    def _charts(self, records: list[Record]) -> list[Chart]:
        task = self._task
        steps = [record.step for record in records]
        speeds = [
            (after.items - before.items) / max(after.seconds - before.seconds, 1e-9)
            for before, after in itertools.pairwise(records)
        ]
        return [
            Chart(
                "Learning curves",
                "step",
                task.measure,
                [
                    Line("training", *_known(steps, [record.loss for record in records])),
                    Line("validation", steps, [record.validation for record in records]),
                ],
            ),
            Chart(
                "Learning rate",
                "step",
                "learning rate",
                [Line("learning rate", steps, [record.learning_rate for record in records])],
            ),
            Chart("Speed, including validation", "step", f"{task.items}/s", [Line("speed", steps[1:], speeds)]),
        ]


class _Stop:
    """While active, records the first Ctrl-C or SIGTERM. A second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


def read_checkpoint(folder: Path, kind: str) -> dict[str, Any]:
    """Return the metadata of the checkpoint in a directory. Another kind of checkpoint is refused."""
    path = folder / CHECKPOINT
    if not path.exists():
        raise InputError(f"{folder} has no {CHECKPOINT}: there is no run to resume")
    try:
        metadata = dict(nn.read_metadata(path))
    except UNUSABLE as error:
        raise InputError(f"{path} cannot be resumed: {error}") from None
    kinds = {"settings": dict, "files": list, "source": dict, "records": list, "pending": list}
    names = {"kind", "items", "seconds", *kinds}
    if not names <= metadata.keys():
        raise InputError(
            f"{path} was not written by retrograd train: it lacks {', '.join(sorted(names - set(metadata)))}"
        )
    if metadata["kind"] != kind:
        raise InputError(f"{path} was written by retrograd train {metadata['kind']}, not by retrograd train {kind}")
    wrong = [name for name, wanted in kinds.items() if not isinstance(metadata[name], wanted)]
    if wrong or not all(isinstance(file, str) for file in metadata["files"]):
        raise InputError(f"{path} was not written by retrograd train: invalid {', '.join(wrong) or 'files'}")
    return metadata


def _check_finite(task: Task) -> None:
    """Refuse NaN and infinite values, with which training would fail after its first step."""
    for arrays in (task.model.state_arrays(), task.optimizer.arrays(), task.arrays()):
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise ValueError(f"{name} has NaN or infinite values")


def _number(value: Any, *, whole: bool = False, minimum: float = -_LARGEST, maximum: float = _LARGEST) -> Any:
    """Return a number from a checkpoint. Anything else is refused."""
    if type(value) not in ((int,) if whole else (int, float)) or not minimum <= value <= maximum:
        raise ValueError(f"{str(value)[:40]!r} is not a {'whole ' * whole}number from {minimum:g} to {maximum:g}")
    return value


def _read_records(values: list[dict[str, Any]], steps: int) -> list[Record]:
    """Return the records of a checkpoint at step `steps`: at least one, in increasing order."""
    records = list[Record]()
    for value in values:
        record, last = Record(**value), records[-1] if records else None
        _number(record.step, whole=True, minimum=last.step + 1 if last else 0, maximum=steps)
        _number(record.items, whole=True, minimum=last.items if last else 0, maximum=2**63)
        _number(record.seconds, minimum=last.seconds if last else 0)
        for number in (record.validation, record.learning_rate, 0 if record.loss is None else record.loss):
            _number(number)
        records.append(record)
    if not records:
        raise ValueError("it has no records")
    return records


def _known(steps: list[int], losses: list[float | None]) -> tuple[list[int], list[float]]:
    known = [(step, loss) for step, loss in zip(steps, losses, strict=True) if loss is not None]
    return [step for step, _ in known], [loss for _, loss in known]


def quoted(path: Path) -> str:
    """Quote a path for a shell, so that it cannot be taken for an option."""
    name = os.fspath(path)
    return shlex.quote(os.path.join(".", name) if name.startswith("-") else name)
