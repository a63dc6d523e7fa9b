"""Public programs: what they declare, their environments, and that a job that goes wrong is seen."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrograd.cli import main
from retrograd.lab import programs
from retrograd.lab.programs import PROGRAMS, Job, Program, Step, Timing, environments, running, training

torch = pytest.importorskip("torch")

CHECK = Timing((), 3, 0.01)


def a_step(scale: Callable[[Any], float] = lambda layer: 1.0, nan: bool = False) -> Step:
    """Of an LSTM and a layer norm. `scale` takes the LSTM, whose class tells whether it was replaced."""
    model = torch.nn.ModuleList((torch.nn.LSTM(3, 4), torch.nn.LayerNorm(4)))
    x = torch.randn(5, 2, 3)

    def loss() -> Any:
        return (model[1](model[0](x)[0]) * torch.rand(4)).square().sum() * scale(model[0]) / (not nan)

    return training.optimized(torch.optim.Adam(model.parameters()), loss)


def outcome(make: Callable[[], Step], timing: Timing = CHECK, **options: Any) -> Any:
    return running._run(Job("job", make, **{"replaced": {"LSTM": 1, "LayerNorm": 1}, **options}), timing)


def test_a_job_that_agrees_is_timed() -> None:
    found = outcome(a_step, Timing((1,), 3, 0.01))
    assert found.failures == []
    assert found.layers == "1 LSTM, 1 LayerNorm"
    (times,) = found.times
    assert times.threads == 1
    assert min(times.torch, times.retrograd, times.ratio) > 0
    assert outcome(a_step).times == []
    assert type(torch.nn.LSTM(2, 2)) is torch.nn.LSTM


def test_different_losses_are_seen() -> None:
    found = outcome(lambda: a_step(lambda layer: 1.0 if type(layer) is torch.nn.LSTM else 1.001), Timing((1,), 3, 0.01))
    assert len(found.failures) == 3
    assert found.failures[0].startswith("the loss of step 0 is ")
    assert found.times == []
    assert (
        outcome(lambda: a_step(lambda layer: 1.0 if type(layer) is torch.nn.LSTM else 1.001), tolerance=0.01).failures
        == []
    )


def test_layers_that_were_not_expected_are_seen() -> None:
    assert outcome(a_step, replaced={"LSTM": 1}).failures == ["replaced: 1 LSTM, 1 LayerNorm, expected 1 LSTM"]
    (failure,) = outcome(a_step, left={"RMSNorm: retrograd.torch has no RMSNorm": 1}).failures
    assert failure == "left: nothing, expected 1 RMSNorm: retrograd.torch has no RMSNorm"


def test_a_model_that_does_not_train_is_seen() -> None:
    assert any("it does not train" in one for one in outcome(lambda: lambda: 1.0, replaced={}).failures)
    assert outcome(lambda: a_step(nan=True)).failures


def test_an_error_of_a_program_is_a_failure() -> None:
    def breaks() -> Step:
        raise RuntimeError("no such model")

    found = running._attempt(lambda: running._run(Job("job", breaks, {}), CHECK), Job("job", breaks, {}))
    assert "RuntimeError: no such model" in found.failures[0]
    gone = running.run_program(Path(sys.executable), Program("none", (), ()), [Job("job", breaks, {})], CHECK)
    assert gone[0].failures[0].startswith("ended with exit code 1:")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_declarations(program: Program) -> None:
    assert re.fullmatch(r"[a-z0-9-]+(\[\w+\])?==[\w.]+", program.packages[0])
    assert program.jobs
    assert all("==" in package for package in program.packages)
    assert all(job.make.__doc__ for job in program.jobs)


def test_names_are_unique() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS) == 11
    names = [job.name for program in PROGRAMS for job in program.jobs]
    assert len(set(names)) == len(names)


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "TORCH", "1.0")
    with pytest.raises(
        programs.InstallationError,
        match=r"has torch \S+, and the programs need torch 1.0: pip install torch==1.0, or make programs",
    ):
        programs.environment(PROGRAMS[0])


@pytest.mark.long
def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(environments, "TORCH", torch.__version__.partition("+")[0])
    program = Program("empty", (), (), dependencies=())
    monkeypatch.setattr(environments.subprocess, "run", lambda *_, **__: calls.append(_) or Ran())

    class Ran:
        returncode, stderr = 0, ""

    calls: list[Any] = []
    python = programs.environment(program)
    assert python.exists()
    assert programs.environment(program) == python
    assert len(calls) == 2  # of pip: the package, and what it depends on
    assert programs.environment(program._replace(packages=("other==1",))) == python
    assert len(calls) == 4


def test_a_stub_takes_the_place_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    training.stub("no_such_package.inner.module")
    from no_such_package.inner import module  # type: ignore[import-not-found]

    assert module.Anything()
    with pytest.raises(AttributeError):
        module.__wrapped__  # noqa: B018


def test_without_the_programs_pytorch_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> str:
        raise environments.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environments.importlib.metadata, "version", absent)
    assert main(["bench", "programs"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""  # not even the head of a table
    assert printed.err.splitlines()[-1] == (
        "retrograd: error: the environment does not have torch, and the programs need torch "
        f"{programs.TORCH}: pip install torch=={programs.TORCH}, or make programs"
    )


def test_what_pip_says_last_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = environments.subprocess.CompletedProcess([], 1, "", "WARNING: slow\nERROR: No matching distribution\n")
    monkeypatch.setattr(environments, "check_torch", lambda: None)
    monkeypatch.setattr(environments.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(environments.subprocess, "run", lambda *arguments, **options: failed)
    monkeypatch.setattr(environments.venv, "create", lambda folder, **options: folder.mkdir(parents=True))
    monkeypatch.setattr(environments.sysconfig, "get_path", lambda *arguments, **options: str(tmp_path))
    package = PROGRAMS[0].packages[0]
    with pytest.raises(programs.InstallationError, match=f"pip cannot install {package}.*: ERROR: No matching distri"):
        programs.environment(PROGRAMS[0])
