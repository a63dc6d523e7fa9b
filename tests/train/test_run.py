"""The loop of retrograd train, with a task small enough to know everything about it."""

from __future__ import annotations

import contextlib
import copy
import csv
import itertools
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrograd import nn
from retrograd.distributed import DataParallel
from retrograd.train import run as runs
from retrograd.train.progress import Progress, clock, count
from retrograd.train.report import Prose, Sample, Section
from retrograd.train.run import CHECKPOINT, MODEL, Run, RunError, read_checkpoint
from retrograd.train.settings import InputError, Settings
from retrograd.train.task import Outcome, Task, new_optimizer, steps_between_validations, warm_up_steps
from retrograd.train.words import fell


class LineTask(Task):
    """Fit a line through noise, with a state that every step changes and passes on."""

    kind = "line"
    items = "points"
    measure = "squared error"
    validate_every = 5

    def __init__(self, settings: Settings, steps: int = 23) -> None:
        self.settings, self.steps = settings, steps
        self.model = nn.Sequential(nn.Linear(3, 1, rng=settings.seed), nn.Dropout(0.1, rng=settings.seed))
        self.optimizer = new_optimizer(self.model, settings, steps)
        self._state = np.zeros(3, np.float32)
        self.before_step: Any = lambda step: None
        self.number_of_rows = 1000

    def _batch(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.random.default_rng(seed).standard_normal((8, 3), dtype=np.float32)
        return x, x.sum(axis=1, keepdims=True)

    def step(self) -> tuple[float, int]:
        self.before_step(self.optimizer.steps)
        x, target = self._batch(self.optimizer.steps)
        self._state += x[0]
        return self.parallel.step(x + 0.01 * self._state, target), 8

    def _new_parallel(self) -> DataParallel[nn.Sequential]:
        return DataParallel(self.model, self.group, nn.MeanSquaredError(), self.optimizer)

    def validate(self) -> float:
        x, target = self._batch(10**6)
        return float(np.mean((self.model.predict(x) - target) ** 2))

    def source(self) -> dict[str, Any]:
        return {"rows": self.number_of_rows, "crc32": "abc"}

    def description(self) -> dict[str, Any]:
        return {"columns": 3}

    def arrays(self) -> dict[str, np.ndarray]:
        return {"state": self._state}

    def overview(self) -> list[tuple[str, str]]:
        return [("data", "made up")]

    def outcome(self) -> Outcome:
        weights = Section("Weights", [Sample(str(self.model.parameters()["0.w"].value))])
        return Outcome([Prose("It fits.")], [weights])


def train(folder: Path, settings: Settings | None = None, **attributes: Any) -> Run:
    folder.mkdir(exist_ok=True)
    task = LineTask(settings or Settings())
    for name, value in attributes.items():
        setattr(task, name, value)
    run = Run(task, folder, ["data"], Progress())
    run.train()
    return run


def resume(folder: Path, settings: Settings | None = None, **attributes: Any) -> Run:
    task = LineTask(settings or Settings())
    for name, value in attributes.items():
        setattr(task, name, value)
    run = Run(task, folder, ["data"], Progress())
    run.resume(read_checkpoint(folder, "line"))
    run.train()
    return run


def outcome(folder: Path) -> tuple[bytes, dict[str, bytes], Any]:
    """What must not depend on whether the run was stopped: the model, the state of training, the history."""
    from safetensors.numpy import load_file

    arrays = {name: array.tobytes() for name, array in load_file(folder / CHECKPOINT).items()}
    metadata = nn.read_metadata(folder / CHECKPOINT)
    records = [{k: v for k, v in record.items() if k != "seconds"} for record in metadata["records"]]
    about = {name: metadata[name] for name in ("pending", "items", "source", "kind")}
    return (folder / MODEL).read_bytes(), arrays, (records, about)


# ---- a run, stopped and not ------------------------------------------------------------------------------------------


def test_a_run_leaves_a_model_a_history_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "run")
    assert run.why == "finished"
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names - {"curves.png"} == {"model.safetensors", "checkpoint.safetensors", "history.csv", "report.html"}
    rows = list(csv.DictReader((tmp_path / "run" / "history.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [0, 5, 10, 15, 20, 23]
    assert [int(row["points"]) for row in rows] == [0, 40, 80, 120, 160, 184]
    assert all(float(a["seconds"]) <= float(b["seconds"]) for a, b in itertools.pairwise(rows))
    report = (tmp_path / "run" / "report.html").read_text()
    assert "It fits." in report
    assert all(title in report for title in ("Learning curves", "Learning rate", "Speed"))
    assert "<svg" in report
    assert report.index("It fits.") < report.index("Weights") < report.index("Learning curves")  # the verdict first
    output = capsys.readouterr().out
    line = r"^step 23  loss [\d.]+  validation [\d.]+  [\d,]+ points/s  \d+:\d\d left$"
    assert len(re.findall(line, output, re.M)) == 1
    assert "It fits." in output
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.1))
    about = nn.load(tmp_path / "run" / MODEL, model)
    assert about == {"kind": "line", "settings": Settings().record(), "description": {"columns": 3}}


def test_the_model_is_the_best_of_all_validations(tmp_path: Path) -> None:
    scores = iter([4.0, 3.0, 1.0, 2.0, 1.0, 5.0])
    weights: list[bytes] = []

    class Scored(LineTask):
        def validate(self) -> float:
            weights.append(self.model.parameters()["0.w"].value.tobytes())
            return next(scores)

    task = Scored(Settings())
    Run(task, tmp_path, [], Progress()).train()
    assert task.model.parameters()["0.w"].value.tobytes() == weights[2]  # the first of equals
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.1))
    nn.load(tmp_path / MODEL, model)
    assert model.parameters()["0.w"].value.tobytes() == weights[2]


@pytest.mark.parametrize("stop", [0, 1, 4, 5, 6, 20, 22])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path, stop: int) -> None:
    train(tmp_path / "whole")

    def interrupt(step: int) -> None:
        if step == stop:
            os.kill(os.getpid(), signal.SIGINT)

    run = train(tmp_path / "parts", before_step=interrupt)
    assert run.why == "interrupted"
    assert run.signal == signal.SIGINT
    assert not (tmp_path / "parts" / "report.html").exists()
    assert read_checkpoint(tmp_path / "parts", "line")["items"] == 8 * (stop + 1)
    run = resume(tmp_path / "parts")
    assert run.why == "finished"
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_a_time_limit_ends_in_a_report_and_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "whole")
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])

    def tick(step: int) -> None:
        now[0] += 1

    capsys.readouterr()
    limited = Settings(time_limit=8.0, steps=23)  # so that they are not planned
    run = train(tmp_path / "parts", limited, before_step=tick)
    assert run.why == "time limit"
    output = capsys.readouterr().out
    assert "Time limit reached at step 8 of 23." in output
    assert f"retrograd train line --resume {tmp_path / 'parts'}" in output
    assert re.search(r"^step +8  loss [\d.]+  validation [\d.]+ squared error$", output, re.M)
    assert len(re.findall(r"^step", output, re.M)) == 3  # 0 and 5, because a second has passed since the last line
    assert (tmp_path / "parts" / "report.html").exists()
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.1))
    nn.load(tmp_path / "parts" / MODEL, model)  # that of step 8, the best by then
    task = LineTask(Settings())
    nn.load(tmp_path / "parts" / CHECKPOINT, task.model)
    assert model.parameters()["0.w"].value.tobytes() == task.model.parameters()["0.w"].value.tobytes()
    run = resume(tmp_path / "parts", limited, before_step=tick)  # 8 more
    assert run.why == "time limit"
    resume(tmp_path / "parts")
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
    metadata = nn.read_metadata(tmp_path / "parts" / CHECKPOINT)
    assert [record["step"] for record in metadata["records"]] == [0, 5, 10, 15, 20, 23]
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


def test_a_model_from_when_the_time_was_over_is_no_part_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scored(LineTask):
        """Validations get worse from step 5 on, but for one at a step where none is planned."""

        def validate(self) -> float:
            return -1.0 if self.optimizer.steps == 8 else 1.0 + abs(self.optimizer.steps - 5)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    Run(Scored(Settings(steps=23)), whole, [], Progress()).train()
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    task = Scored(Settings(time_limit=8.0, steps=23))
    task.before_step = lambda step: now.__setitem__(0, step + 1.0)
    Run(task, parts, [], Progress()).train()
    assert (parts / MODEL).read_bytes() != (whole / MODEL).read_bytes()
    run = Run(Scored(Settings(steps=23)), parts, [], Progress())
    run.resume(read_checkpoint(parts, "line"))
    run.train()
    assert outcome(parts) == outcome(whole)


def test_a_time_limit_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, Settings(time_limit=0.0))
    assert run.why == "time limit"
    assert "Validation did not fall: before the first step it was" in capsys.readouterr().out
    assert (tmp_path / MODEL).exists()


def test_a_finished_run_resumed_does_nothing_but_report(tmp_path: Path) -> None:
    train(tmp_path)
    before = outcome(tmp_path)
    (tmp_path / "report.html").unlink()
    assert resume(tmp_path).why == "finished"
    assert outcome(tmp_path) == before
    assert (tmp_path / "report.html").exists()


def test_a_second_interrupt_does_not_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def twice(step: int) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, before_step=twice)
    assert signal.getsignal(signal.SIGINT) is handler
    said = capsys.readouterr().out
    assert f"The last checkpoint is that of step 0:\n  retrograd train line --resume {tmp_path}\n" in said


def test_checkpoints_come_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    save = nn.save

    def noting(path: Any, model: nn.Module, optimizer: Any = None, **options: Any) -> None:
        if optimizer is not None:
            steps.append(optimizer.steps)
        save(path, model, optimizer, **options)

    monkeypatch.setattr(runs.nn, "save", noting)
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])

    def tick(step: int) -> None:
        now[0] += 10

    train(tmp_path, Settings(checkpoint_every=60.0), before_step=tick)
    assert steps == [0, 6, 12, 18, 23]


# ---- what can go wrong -----------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    class Diverging(LineTask):
        def step(self) -> tuple[float, int]:
            loss, items = super().step()
            return (math.nan if self.optimizer.steps == 8 else loss), items

    task = Diverging(Settings())
    with pytest.raises(RunError, match=r"the loss is nan at step 8: a smaller --learning-rate \(it is 0.003\)"):
        Run(task, tmp_path, [], Progress()).train()
    assert read_checkpoint(tmp_path, "line")["items"] == 0  # from before the first step


def test_a_disk_that_fills_up_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(step: int) -> None:
        if step == 12:
            monkeypatch.setattr(os, "fsync", full)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError) as error:
        train(tmp_path, Settings(checkpoint_every=0.0), before_step=fill)
    assert re.fullmatch(
        rf".*(model|checkpoint)\.safetensors could not be written: No space left on device; the last checkpoint is "
        rf"complete: retrograd train line --resume {tmp_path}",
        str(error.value),
    )
    monkeypatch.undo()
    assert read_checkpoint(tmp_path, "line")["items"] == 12 * 8
    assert not list(tmp_path.glob("*.part"))
    resume(tmp_path)
    train(tmp_path / "whole")
    assert outcome(tmp_path) == outcome(tmp_path / "whole")


def test_a_model_is_there_even_if_the_last_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Improving(LineTask):
        def validate(self) -> float:
            if self.optimizer.steps == 8:  # the validation when the time is over
                monkeypatch.setattr(Run, "_save_model", interrupted)
            return 10.0 - self.optimizer.steps

    def interrupted(run: Run) -> None:
        raise KeyboardInterrupt

    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    task = Improving(Settings(time_limit=8.0, steps=23))
    task.before_step = lambda step: now.__setitem__(0, step + 1.0)
    with pytest.raises(KeyboardInterrupt):
        Run(task, tmp_path, [], Progress()).train()
    assert nn.read_metadata(tmp_path / MODEL)["kind"] == "line"


def test_other_data_are_not_resumed_on(tmp_path: Path) -> None:
    train(tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(InputError, match="the data have changed since the run began: rows was 1000, is 999"):
        resume(tmp_path, number_of_rows=999)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no checkpoint\.safetensors: there is no run to resume"):
        read_checkpoint(tmp_path, "line")
    train(tmp_path)
    path = tmp_path / CHECKPOINT
    with pytest.raises(InputError, match="was written by retrograd train line, not by retrograd train text"):
        read_checkpoint(tmp_path, "text")
    content = path.read_bytes()
    for wrong, why in (
        (content[:-1], "is not a whole safetensors file"),
        (content[:-1] + bytes([content[-1] ^ 1]), "is damaged: its checksum"),
        (b"\x80\x04\x95import os", "is not a whole safetensors file"),
        (b"", "is not a whole safetensors file"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(InputError, match=why):
            read_checkpoint(tmp_path, "line")
    nn.save(path, LineTask(Settings()).model, metadata={"kind": "line"})
    with pytest.raises(InputError, match="was not written by retrograd train: it lacks files, items"):
        read_checkpoint(tmp_path, "line")
    path.write_bytes(content)
    metadata = read_checkpoint(tmp_path, "line")
    task = LineTask(Settings())
    task.model = nn.Sequential(nn.Linear(4, 1))
    task.optimizer = new_optimizer(task.model, task.settings, 5)
    with pytest.raises(InputError, match=r"cannot be resumed: load: .*the state has unexpected"):
        Run(task, tmp_path, [], Progress()).resume(metadata)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(st.text(max_size=3), inside, max_size=2),
    max_leaves=3,
)
NUMBERS = st.sampled_from([-1, 0, 1, 2**31, 2**63, 10**30, 10**400, -0.5, 1e-300, 1e30, 1e300])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(folder, Settings(time_limit=60.0, steps=10), steps=10)
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something is in nested dictionaries and lists."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inside in items for place in places(inside, (*path, key)))]


@pytest.mark.long
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_metadata_is_resumed_or_refused(checkpoint: Path, data: st.DataObject) -> None:
    """A forged checkpoint is refused by an InputError, or the run goes on and ends; nothing else."""
    path = checkpoint / CHECKPOINT
    content = path.read_bytes()
    try:
        metadata = copy.deepcopy(nn.read_metadata(path))
        for _ in range(data.draw(st.integers(1, 2))):
            *above, key = data.draw(st.sampled_from([place for place in places(metadata) if place]))
            target: Any = metadata
            for step in above:
                target = target[step]
            if data.draw(st.booleans()):
                target[key] = data.draw(NUMBERS | JSON)
            else:
                del target[key]
        task = LineTask(Settings(), steps=10)
        nn.load(path, task.model, task.optimizer, arrays=task.arrays())
        nn.save(path, task.model, task.optimizer, arrays=task.arrays(), metadata=metadata)
        with contextlib.suppress(InputError):
            resumed = read_checkpoint(checkpoint, "line")
            Settings.from_record(resumed["settings"])
            run = Run(LineTask(Settings(), steps=20), checkpoint, ["data"], Progress())
            run.resume(resumed)
            run.train()
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("optimizer.steps", -5, r"AdamW: steps is -5, must be from 0 to 2\*\*53"),
        ("optimizer.steps", 2**62, "AdamW: steps is 4611686018427387904, must be from 0"),
        ("optimizer.steps", 21, "it has 21 steps, but the run has 20"),
        ("optimizer.steps", 4, "'5' is not a whole number from 1 to 4"),
        ("optimizer.first_moments.0.w", math.nan, r"first_moments\.0\.w has NaN or infinite values"),
        ("model.0.w", math.inf, r"0\.w has NaN or infinite values"),
        ("array.state", math.nan, "state has NaN or infinite values"),
    ],
)
def test_forged_arrays_of_a_checkpoint(checkpoint: Path, name: str, value: float, why: str) -> None:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    from retrograd.nn.checkpoint import _HEADER, _checksum

    path = checkpoint / CHECKPOINT
    content = path.read_bytes()
    with safe_open(path, framework="numpy") as file:
        text = file.metadata()[_HEADER].partition(" ")[2]
        arrays = {key: file.get_tensor(key).copy() for key in file.keys()}  # noqa: SIM118 (it is no mapping)
    arrays[name][...] = value
    try:
        save_file(arrays, path, {_HEADER: f"{_checksum(text, arrays)} {text}"})
        run = Run(LineTask(Settings(), steps=20), checkpoint, ["data"], Progress())
        with pytest.raises(InputError, match=rf"checkpoint\.safetensors cannot be resumed: .*{why}"):
            run.resume(read_checkpoint(checkpoint, "line"))
    finally:
        path.write_bytes(content)


# ---- early stopping --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 7, 19, 20, 500, 1999, 20_000])
def test_about_20_validations_however_long_the_run(steps: int) -> None:
    every = steps_between_validations(Settings(), steps)
    assert every >= 1
    assert math.ceil(steps / every) == min(steps, 20)
    assert steps_between_validations(Settings(validate_every=33), steps) == 33


class Overfitting(LineTask):
    """Validation falls to step 10 and then rises; the steps are those of a line."""

    def validate(self) -> float:
        return 1 + abs(self.optimizer.steps - 10) / 10


def overfit(folder: Path, patience: int | None = 3, steps: int = 50) -> Run:
    folder.mkdir(exist_ok=True)
    run = Run(Overfitting(Settings(patience=patience), steps), folder, ["data"], Progress())
    if (folder / CHECKPOINT).exists():
        run.resume(read_checkpoint(folder, "line"))
    run.train()
    return run


def test_a_run_stops_when_validation_gets_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = overfit(tmp_path)
    assert run.why == "no improvement"
    said = "none of the last 3 validations was better than that of step 10"
    output = capsys.readouterr().out
    assert f"Stopped early at step 25 of 50: {said}. To continue anyway:" in " ".join(output.split())
    assert "\n  retrograd train line --resume" in output
    assert "--patience none\n" in output
    assert said in (tmp_path / "report.html").read_text()
    metadata = nn.read_metadata(tmp_path / CHECKPOINT)
    assert [record["step"] for record in metadata["records"]] == [0, 5, 10, 15, 20, 25]
    # The model is that of step 10, not of the last.
    other = LineTask(Settings(patience=3), 50)
    for _ in range(10):
        other.step()
    nn.load(tmp_path / MODEL, run._task.model)
    for name, array in other.model.state_arrays().items():
        assert np.array_equal(array, run._task.model.state_arrays()[name])


def test_a_run_that_stopped_early_can_go_on(tmp_path: Path) -> None:
    overfit(tmp_path / "parts")
    stopped = outcome(tmp_path / "parts")
    assert overfit(tmp_path / "parts").why == "no improvement"  # and does nothing
    assert outcome(tmp_path / "parts") == stopped
    assert overfit(tmp_path / "parts", None).why == "finished"
    assert overfit(tmp_path / "whole", None).why == "finished"
    (_, *parts), (_, *whole) = outcome(tmp_path / "parts"), outcome(tmp_path / "whole")
    assert parts == whole


def test_patience_does_not_count_validations_of_the_warm_up(tmp_path: Path) -> None:
    """They get worse from step 10 on, but the learning rate rises up to step 30."""
    run = Run(Overfitting(Settings(patience=3, warm_up=30), 50), tmp_path, ["data"], Progress())
    run.train()
    assert run.why == "no improvement"
    assert run._task.optimizer.steps == 45  # after validations at 35, 40 and 45


@pytest.mark.parametrize(("steps", "warm_up"), [(1, 0), (9, 0), (30, 3), (500, 50), (20_000, 100)])
def test_the_warm_up_is_a_tenth_of_a_short_run(steps: int, warm_up: int) -> None:
    assert warm_up_steps(Settings(), steps) == warm_up
    assert warm_up_steps(Settings(warm_up=7), steps) == min(7, steps - 1)


# ---- a run with a time limit, and a longer one -----------------------------------------------------------------------


class Timed(LineTask):
    """A step takes `step_time` seconds of a clock, the first one five times that, a validation `validation_time`."""

    def __init__(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch, step_time: float, validation_time: float = 0.0
    ) -> None:
        super().__init__(settings, steps=400)
        self.now, self.calls, self.step_time, self.validation_time = 0.0, 0, step_time, validation_time
        self.validations: list[int] = []
        monkeypatch.setattr(runs.time, "monotonic", lambda: self.now)

    def step(self) -> tuple[float, int]:
        self.calls += 1
        self.now += self.step_time * (5 if self.calls == 1 else 1)
        return super().step()

    def validate(self) -> float:
        self.now += self.validation_time
        self.validations.append(self.optimizer.steps)
        return super().validate()


@pytest.mark.parametrize("limit", [10.0, 20.0])
def test_a_run_is_planned_to_end_within_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limit: float
) -> None:
    task = Timed(Settings(time_limit=limit, patience=None), monkeypatch, 0.05, 0.01)
    run = Run(task, tmp_path / "planned", ["data"], Progress())
    (tmp_path / "planned").mkdir()
    run.train()
    assert run.why == "finished"
    assert 0.7 * limit < task.now <= limit
    assert task.optimizer.current_rate() == pytest.approx(3e-4)  # the schedule has ended
    assert 18 <= len(nn.read_metadata(tmp_path / "planned" / CHECKPOINT)["records"]) <= 21
    steps = task.optimizer.steps
    assert f"{steps} steps of 50 ms, to end within {clock(limit)}" in capsys.readouterr().out
    assert f"<bdi>--steps</bdi></td><td><bdi>{steps}<" in (tmp_path / "planned" / "report.html").read_text()
    # The steps that were timed have left no trace: the bits are those of a run that was given the number of steps.
    given = LineTask(Settings(steps=steps, patience=None), steps)
    given.validate_every = task.validate_every
    (tmp_path / "given").mkdir()
    Run(given, tmp_path / "given", ["data"], Progress()).train()
    assert outcome(tmp_path / "planned") == outcome(tmp_path / "given")


def test_a_planned_run_is_not_longer_than_makes_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Timed(Settings(time_limit=3600.0), monkeypatch, 0.05), tmp_path, ["data"], Progress())
    run.train()
    assert run._task.optimizer.steps == 400


def test_validations_do_not_take_the_time_of_a_planned_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Timed(Settings(time_limit=60.0), monkeypatch, 0.2, 4.0)
    run = Run(task, tmp_path, ["data"], Progress())
    run.train()
    assert run.why == "finished"
    assert 42 < task.now <= 60
    assert len(nn.read_metadata(tmp_path / CHECKPOINT)["records"]) == 3


def test_a_planned_run_that_was_stopped_keeps_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(step: int) -> None:
        if step == 100 and len(task.validations) > 5:  # not while steps are timed
            os.kill(os.getpid(), signal.SIGINT)

    for folder in (tmp_path / "whole", tmp_path / "parts"):
        folder.mkdir()
        task = Timed(Settings(time_limit=10.0), monkeypatch, 0.05)
        task.before_step = interrupt if folder.name == "parts" else task.before_step
        Run(task, folder, ["data"], Progress()).train()
    metadata = read_checkpoint(tmp_path / "parts", "line")
    assert metadata["records"][-1]["step"] < metadata["settings"]["steps"] < 200
    rest = LineTask(Settings.from_record(metadata["settings"]), metadata["settings"]["steps"])
    rest.validate_every = task.validate_every
    run = Run(rest, tmp_path / "parts", ["data"], Progress())
    run.resume(metadata)
    run.train()
    assert run.why == "finished"
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def extended(folder: Path, settings: Settings, steps: int, more: int) -> Run:
    folder.mkdir(exist_ok=True)
    Run(LineTask(settings, steps), folder, ["data"], Progress()).train()
    run = Run(LineTask(settings, steps), folder, ["data"], Progress())
    run.resume(read_checkpoint(folder, "line"), more)
    run.train()
    return run


def test_a_longer_run_is_one_run_if_the_learning_rates_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(schedule="constant", warm_up=4, validate_every=5)
    run = extended(tmp_path / "parts", settings, 20, 40)
    assert run.why == "finished"
    said = " ".join(capsys.readouterr().out.split())
    assert "The run had 20 steps and now has 40; 20 are done. Its learning rates so far are those of a run of" in said
    (tmp_path / "whole").mkdir()
    Run(LineTask(settings, 40), tmp_path / "whole", ["data"], Progress()).train()
    (_, *parts), (_, *whole) = outcome(tmp_path / "parts"), outcome(tmp_path / "whole")
    assert parts == whole
    assert nn.read_metadata(tmp_path / "parts" / CHECKPOINT)["settings"]["steps"] == 40


def test_a_longer_run_says_that_its_learning_rates_are_not_those_of_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = extended(tmp_path, Settings(), 20, 40)
    said = " ".join(capsys.readouterr().out.split())
    assert "From here on the learning rate is that of a run of 40 steps: 0.0019 next, 0.00032 before." in said
    assert "A single run of that length would end in other weights." in said
    rates = [record["learning_rate"] for record in nn.read_metadata(tmp_path / CHECKPOINT)["records"]]
    assert rates[-1] == pytest.approx(3e-4)
    assert max(rates[-10:]) > 1e-3
    assert run._task.optimizer.steps == 40


def test_a_run_that_stopped_early_and_gets_more_steps_has_its_patience_again(tmp_path: Path) -> None:
    overfit(tmp_path)
    run = Run(Overfitting(Settings(patience=3), 50), tmp_path, ["data"], Progress())
    run.resume(read_checkpoint(tmp_path, "line"), 60)
    run.train()
    assert run.why == "no improvement"
    assert run._task.optimizer.steps == 33  # after three validations, at 27, 30 and 33
    assert read_checkpoint(tmp_path, "line")["extended"] == 25  # so that a resumed run counts from there, too


def test_a_run_does_not_get_fewer_steps_than_it_has_taken(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--steps 10 is less than the 20 steps that the run has taken"):
        extended(tmp_path, Settings(), 20, 10)


def test_a_finished_run_says_how_to_train_it_for_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    capsys.readouterr()
    resume(tmp_path)
    said = capsys.readouterr().out
    assert "All 23 steps are done. To train for longer, give it more:" in said
    assert f"  retrograd train line --resume {tmp_path} --steps 46\n" in said


# ---- settings --------------------------------------------------------------------------------------------------------


def test_settings_come_back_from_a_record() -> None:
    settings = Settings(learning_rate=0.1, maximum_norm=None, seed=5)
    record = settings.record()
    assert Settings.from_record(record) == settings
    for name, value in (
        ("learning_rate", "0.1"),
        ("learning_rate", -1.0),
        ("learning_rate", math.nan),
        ("seed", 1.5),
        ("seed", True),
        ("optimizer", "lion"),
        ("optimizer", None),
    ):
        with pytest.raises(InputError, match=f"its setting {name} is "):
            Settings.from_record({**record, name: value})
    del record["seed"]
    with pytest.raises(InputError, match="it has no setting 'seed'"):
        Settings.from_record(record)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop"])
def test_each_optimizer_can_be_chosen(tmp_path: Path, name: str) -> None:
    train(tmp_path, Settings(optimizer=name, schedule="constant", maximum_norm=None))
    metadata = nn.read_metadata(tmp_path / CHECKPOINT)
    assert metadata["records"][-1]["validation"] < metadata["records"][0]["validation"]
    assert metadata["records"][-1]["learning_rate"] == pytest.approx(3e-3)


def test_numbers_for_people() -> None:
    assert [clock(s) for s in (0, 59.4, 59.6, 3599, 3661)] == ["0:00", "0:59", "1:00", "59:59", "1:01:01"]
    assert count(41209.7) == "41,210"


@pytest.mark.parametrize(
    ("first", "best", "said"),
    [
        (3.736, 3.341, "fell from 3.736 to 3.341 bits"),
        (3.3412, 3.3391, "hardly fell, from 3.341 to 3.339 bits"),
        (0.0002915, 0.0002914, "hardly fell, from 0.000291 to 0.000291 bits"),
        (0.00291, 0.000125, "fell from 0.00291 to 0.000125 bits"),
        (0.5, 0.0, "fell from 0.500 to 0.000 bits"),
    ],
)
def test_a_loss_that_hardly_fell_is_said_to(first: float, best: float, said: str) -> None:
    assert fell(first, best, "bits") == said
