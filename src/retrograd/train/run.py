"""The training loop: steps, validation, checkpoints, and the files of the run directory."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
import math
import os
import shlex
import signal
import statistics
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
from .files import MODEL, SAVED_INPUT, UNUSABLE, load_weights
from .progress import Progress, clock, count
from .report import Block, Prose, Section, Table, page, plain
from .settings import InputError
from .task import Task, learning_rate, warm_up_steps
from .words import fell, measured

__all__ = ["CHECKPOINT", "FILES", "MODEL", "Run", "RunError", "quoted", "read_checkpoint"]

CHECKPOINT: Final = "checkpoint.safetensors"
# The best model of the scheduled validations, while MODEL is a better one from when the time limit was reached.
_PLANNED: Final = "model-as-planned.safetensors"
HISTORY: Final = "history.csv"
REPORT: Final = "report.html"
CURVES: Final = "curves.png"
FILES: Final = (MODEL, CHECKPOINT, _PLANNED, HISTORY, REPORT, CURVES, SAVED_INPUT)
_BETWEEN_LINES: Final = 1.0  # seconds, so that a short run does not print a line for each validation
# Planning for a time limit: the most steps that are timed, for at most this share of the limit; and the share that the
# run should take, because the next steps may be slower.
_MOST_PROBES: Final = 20
_PROBING: Final = 0.03
_MARGIN: Final = 0.9
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
        self._extended = 0  # the step at which the run got more steps than it had
        self._planned = ""  # on how the run was planned
        self._note = ""  # on how the run was extended
        self._began = self._said = time.monotonic()
        self._unsaid: tuple[str, ...] = ()  # the last validation, as forms of a line, if it has not been printed
        self._saved, self._saved_step = -math.inf, 0
        self.why: Literal["finished", "no improvement", "time limit", "interrupted"] = "finished"
        self.signal: int | None = None

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def resume(self, metadata: Mapping[str, Any], steps: int | None = None) -> None:
        """Load the checkpoint in the directory, which has this metadata. Only rank 0 reads it.

        With `steps` the run gets another number of steps than it had.
        """
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
            self._extended = _number(metadata.get("extended", 0), whole=True, minimum=0, maximum=task.steps)
        except UNUSABLE as error:
            raise InputError(f"{path} cannot be resumed: {error}") from None
        if steps is not None and steps != task.steps:
            self._extend(steps)

    def _extend(self, steps: int) -> None:
        task, done, planned = self._task, self._task.optimizer.steps, self._task.steps
        if steps < done:
            raise InputError(f"--steps {steps} is less than the {count(done)} steps that the run has taken")
        before = learning_rate(task.settings, planned)
        task.plan(steps)
        after = learning_rate(task.settings, steps)
        self._extended = done
        self._note = f"The run had {count(planned)} steps and now has {count(steps)}; {count(done)} are done. "
        if all(before(step) == after(step) for step in range(min(done, 100_000))):
            self._note += "Its learning rates so far are those of a run of that length, so it ends in the same weights."
        else:
            self._note += (
                f"From here on the learning rate is that of a run of {count(steps)} steps: {after(done):.2g} next, "
                f"{before(max(done - 1, 0)):.2g} before. A single run of that length would end in other weights."
            )

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
        progress = (self._records, self._best, self._pending, self._items, self._seconds_before, self._extended)
        (self._records, self._best, self._pending, self._items, self._seconds_before, self._extended) = (
            self._group.broadcast(progress)
        )
        if (steps := self._group.broadcast(task.steps)) != task.steps:
            task.plan(steps)
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
            "extended": self._extended,
        }
        self._write(
            CHECKPOINT,
            lambda path: nn.save(path, task.model, task.optimizer, arrays=task.arrays(), metadata=metadata),
        )
        self._write(HISTORY, lambda path: write_whole(path, self._history().encode()))
        self._saved, self._saved_step = time.monotonic(), task.optimizer.steps

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
        self._began = self._said = time.monotonic()
        self._synchronize()
        first = task.optimizer.steps
        if not self._records and task.settings.steps is None and task.settings.time_limit:
            self._plan(task.settings.time_limit)
        for name, value in task.overview():
            progress.field(name, value)
        if self._planned:
            progress.field("plan", self._planned)
        progress.field("run", str(self._folder))
        if self._group.shards > 1:
            progress.field("ranks", f"{self._group.size}, {self._group.shards} shards of each batch")
        progress.say()
        if self._note:
            progress.prose(self._note)
        elif first == task.steps:
            progress.prose(f"All {count(first)} steps are done. To train for longer, give it more:")
            progress.say(f"  {self._how_to_resume()} --steps {2 * first}")
        elif first:
            progress.say(f"resumed at step {count(first)} of {count(task.steps)}")
        task.model.train()
        progress.begin(first, task.steps)
        try:
            with _Stop() as stop:
                self._loop(first, stop)
                self._say()
                self._save()
            self.signal = self._group.broadcast(stop.signal)
            if self.signal is not None:
                self.why = "interrupted"
        except KeyboardInterrupt:
            progress.end()
            if self._leads and self._saved > -math.inf:
                progress.prose(f"Stopped at once. The last checkpoint is that of step {count(self._saved_step)}:")
                progress.say(f"  {self._how_to_resume()}")
            raise
        finally:
            progress.end()
        if not self._leads:
            return
        where = f"at step {count(task.optimizer.steps)} of {count(task.steps)}"
        if self.why == "interrupted":
            progress.prose(f"Stopped {where}. Everything is saved. To continue:")
            progress.say(f"  {self._how_to_resume()}")
            return
        if self.why == "time limit":
            progress.prose(f"Time limit reached {where}. To continue:")
            progress.say(f"  {self._how_to_resume()}")
        if self.why == "no improvement":
            progress.prose(f"Stopped early {where}: {self._stalled()}. To continue anyway:")
            progress.say(f"  {self._how_to_resume()} --patience none")
        self._report()

    def _plan(self, limit: float) -> None:
        """Make the run as long as the time limit allows. The steps that are taken to measure their time are undone."""
        task, began = self._task, time.monotonic()
        parts = (task.model.state_arrays(), task.optimizer.arrays(), task.arrays())
        state = [(array, array.copy()) for part in parts for array in part.values()]
        task.model.train()
        times = list[float]()
        more = True
        while more:
            start = time.monotonic()
            task.step()
            times.append(time.monotonic() - start)
            spent = times[-1] + start - began
            more = len(times) < _MOST_PROBES and (len(times) < 3 or spent < _PROBING * limit) and spent < limit / 4
            more = self._group.broadcast(more)
        for array, value in state:
            array[...] = value
        # The first step also compiles the program.
        step = statistics.median(times[1:] or times)
        estimate = max(1, int(_MARGIN * limit / max(step, 1e-9)))
        task.plan(self._group.broadcast(min(task.longest(), estimate)))  # how much is validated depends on it
        validation = 0.0
        for _ in range(2 if self._leads else 0):  # the first one compiles, too
            start = time.monotonic()
            task.validate()
            validation = time.monotonic() - start
            if validation > limit / 20:
                break
        for array, value in state:
            array[...] = value
        # Validations get at most a quarter of the time.
        left = _MARGIN * limit - (time.monotonic() - began)
        validations = max(1, min(20, int(left / 4 / max(validation, 1e-9)) - 1))
        fitting = max(1, int((left - (validations + 1) * validation) / max(step, 1e-9)))
        steps = min(task.longest(), fitting)
        every = None if validations == 20 or task.settings.validate_every else -(-steps // validations)
        task.plan(*self._group.broadcast((steps, every)))
        self._planned = f"{count(task.steps)} steps of {1000 * step:.3g} ms, to end within {clock(limit)}"

    def _stalled(self) -> str:
        """Return the reason for early stopping, or "" if the run continues."""
        task, best = self._task, self._best_record(self._records)
        patience = task.settings.patience
        # The learning rate is still rising in the warm-up; and who adds steps wants more validations than there were.
        counted = max(best.step, warm_up_steps(task.settings, task.steps), self._extended)
        since = sum(record.step > counted for record in self._records)
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
            self._unsaid = self._lines(self._records[-1])
        stalled = bool(self._stalled())
        while task.optimizer.steps < task.steps:
            now = time.monotonic()
            if now - self._said >= _BETWEEN_LINES:
                self._say()
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
                speed = f"{count(self._speed(items_before))} {task.items}/s"
                self._unsaid = self._lines(self._records[-1], speed, self._left(first))
                stalled = bool(self._stalled())
            elif now - shown >= 0.1:  # faster updates cannot be read
                shown = now
                progress.step(done, self._numbers(loss, self._speed(items_before), first))

    def _say(self) -> None:
        """Print the last validation, unless it has been: in a short run only some are."""
        if self._unsaid:
            self._progress.row(*self._unsaid)
            self._unsaid, self._said = (), time.monotonic()

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

    def _numbers(self, loss: float, speed: float, first: int) -> list[str]:
        """Return the current values, the most important ones first."""
        last = [f"validation {measured(record.validation)}" for record in self._records[-1:]]
        return [f"loss {measured(loss)}", self._left(first), *last, f"{count(speed)} {self._task.items}/s"]

    def _lines(self, record: Record, *more: str) -> tuple[str, ...]:
        """Return forms of the line of a validation, the longest first."""
        step = f"{count(record.step):>{len(count(self._task.steps))}}"
        loss = "" if record.loss is None else f"  loss {measured(record.loss)}"
        short = f"{step}{loss}  validation {measured(record.validation)}"
        return (
            "  ".join([f"step {short}", *more]) if more else f"step {short} {self._task.measure}",
            f"step {short}",
            short,
        )

    # ---- the report --------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        task, progress = self._task, self._progress
        records = list(self._records)
        if self._pending:
            # The time limit was reached between two validations. This extra validation is not part of the checkpoint,
            # so that a resumed run gives the same result as one that never stopped.
            records.append(self._record(task.validate()))
            progress.row(*self._lines(records[-1]))
            if self._best is not None and records[-1].validation < self._best:
                self._write(_PLANNED, lambda path: write_whole(path, (self._folder / MODEL).read_bytes()))
                self._save_model()
        try:
            nn.load(self._folder / MODEL, task.model)
        except (OSError, ValueError) as error:
            raise RunError(f"the best model could not be loaded: {error}") from None
        task.model.eval()
        task.improving = self._best_record(records) is records[-1]
        task.best_step = self._best_record(records).step
        outcome = task.outcome()
        if outcome.verdict is not None:
            self._save_model(verdict=outcome.verdict)
        headline: list[Block] = [*outcome.headline, Prose(self._summary(records))]
        progress.say()
        for section in (Section("", headline), *outcome.sections):
            if section.in_terminal and not all(isinstance(block, Chart) for block in section.blocks):
                progress.say(plain(section).rstrip("\n"))
                progress.say()
        charts = self._charts(records)
        settings = Table(["option", "value"], [list(row) for row in task.settings.named(task.in_force())])
        sections = [
            Section("Result", headline),
            *outcome.sections,
            Section("Training", charts),
            Section("Data and model", [Table(["", ""], [list(row) for row in task.overview()])]),
            Section("Settings", [settings]),
        ]
        title = f"A {task.kind} model, trained with retrograd"
        document = page(title, str(self._folder), sections)
        self._write(REPORT, lambda path: write_whole(path, document.encode("utf-8", "replace")))
        with contextlib.suppress(ImportError):  # matplotlib is optional
            picture = png(charts)
            self._write(CURVES, lambda path: write_whole(path, picture))
        progress.field("report", str(self._folder / REPORT))
        if task.use:
            progress.say(f"{'use':<9} {task.use} {quoted(self._folder)}")  # unbroken, to be copied

    def _summary(self, records: list[Record]) -> str:
        task = self._task
        first, best, last = records[0], self._best_record(records), records[-1]
        of = "" if last.step == task.steps else f" of {count(task.steps)}"
        took = f"{last.seconds:.1f} s" if last.seconds < 10 else clock(last.seconds)
        text = f"{count(last.step)}{of} steps in {took}. "
        if self.why == "no improvement":
            text += f"Stopped early: {self._stalled()}. "
        text += "Validation "
        if best.step == 0:
            return text + f"did not fall: before the first step it was {measured(first.validation)} {task.measure}."
        at = "" if best.step == last.step else f" at step {count(best.step)}, whose weights are the model"
        return text + f"{fell(first.validation, best.validation, task.measure)}{at}."

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
