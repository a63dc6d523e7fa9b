"""Runs a program's jobs, in its environment: ``python -m retrograd.lab.programs.running``, with a request in JSON.

The plain model and the one that was built under :func:`retrograd.torch.patch` train in one process, alternating.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ..bench.timing import median_ratio, take_turns
from .declared import Job, Outcome, Program, Seconds, Step
from .table import PROGRAMS

__all__ = ["Timing", "run_program"]

_CHECKED_STEPS: Final = 3


class Timing(NamedTuple):
    """How to time a job. Without threads it is only checked."""

    threads: Sequence[int]
    rounds: int
    budget: float  # in seconds, for each number of threads


# ---- in the command's process ----------------------------------------------------------------------------------------


def run_program(python: Path, program: Program, jobs: Sequence[Job], timing: Timing) -> list[Outcome]:
    """The outcome of each job, which a process of the program's environment finds."""
    with tempfile.TemporaryDirectory() as folder:  # also for what the program writes where it runs
        answer = Path(folder) / "outcomes.json"
        request = {"program": program.name, "jobs": [job.name for job in jobs], "answer": str(answer)}
        command = [str(python), "-m", __name__, json.dumps({**request, "timing": timing._asdict()})]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=_offline(folder))
        if run.returncode:
            last = "\n".join((run.stdout + run.stderr).strip().splitlines()[-12:])
            return [Outcome(job.name, "", [f"ended with exit code {run.returncode}:\n{last}"], []) for job in jobs]
        found = json.loads(answer.read_text(encoding="utf-8"))
    return [
        Outcome(one["job"], one["layers"], one["failures"], [Seconds(*times) for times in one["times"]])
        for one in found
    ]


def _offline(folder: str) -> dict[str, str]:
    """The environment of the process: nothing is downloaded, and files are written where they are removed again."""
    # Packages of the shared environment look for their libraries beside the interpreter, such as mpi4py for MPI.
    libraries = [str(Path(sys.prefix) / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "HOME": folder,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }


# ---- in the program's environment ------------------------------------------------------------------------------------


def _seed(number: int) -> None:
    torch = importlib.import_module("torch")
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002  the generator that the programs use
    torch.manual_seed(number)


def _counted(found: Mapping[str, str]) -> dict[str, int]:
    return dict(sorted(Counter(found.values()).items()))


def _described(layers: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in layers.items())


def _failures(job: Job, plain: Step, ours: Step, replaced: Mapping[str, int], left: Mapping[str, int]) -> list[str]:
    """What is not as declared: the layers that were replaced and left, and the losses of the first steps."""
    failures = []
    for what, found, expected in (("replaced", replaced, job.replaced), ("left", left, job.left)):
        if found != dict(sorted(expected.items())):
            failures.append(f"{what}: {_described(found) or 'nothing'}, expected {_described(expected) or 'nothing'}")
    losses = []
    for number in range(_CHECKED_STEPS):
        pair = []
        for step in (plain, ours):
            _seed(number)
            pair.append(float(step()))
        losses.append(pair[0])
        if not abs(pair[1] - pair[0]) <= job.tolerance * abs(pair[0]):
            failures.append(f"the loss of step {number} is {pair[1]:.8g}, but {pair[0]:.8g} without retrograd")
    if len(set(losses)) == 1 or not all(map(math.isfinite, losses)):
        failures.append(f"it does not train: the losses are {losses}")
    return failures


class _Alternating:
    """A job's step, plain or with retrograd."""

    def __init__(self, name: str, step: Step, clock: Callable[[], float]) -> None:
        self.name, self._step, self._clock = name, step, clock

    def wake(self) -> None:
        """Nothing: a program wakes no threads."""

    def step(self) -> tuple[float]:
        start = self._clock()
        self._step()
        return (self._clock() - start,)


def _timed(plain: Step, ours: Step, threads: int, timing: Timing) -> Seconds:
    importlib.import_module("torch").set_num_threads(threads)
    # With one thread CPU time, on which other load has less influence.
    clock = time.process_time if threads == 1 else time.perf_counter
    slots = [[_Alternating("torch", plain, clock)], [_Alternating("retrograd", ours, clock)]]
    (theirs,), (own,) = take_turns(slots, timing.rounds, timing.budget)
    medians = theirs.medians[0], own.medians[0]
    return Seconds(threads, statistics.median(medians[0]), statistics.median(medians[1]), median_ratio(*medians))


def _run(job: Job, timing: Timing) -> Outcome:
    bridge = importlib.import_module("retrograd.torch")
    importlib.import_module("torch").set_num_threads(1)
    _seed(0)
    plain = job.make()
    _seed(0)
    with bridge.patch() as patched:
        ours = (job.ours or job.make)()
    replaced, left = _counted(patched.replaced), _counted(patched.left)
    failures = _failures(job, plain, ours, replaced, left)
    times = [] if failures else [_timed(plain, ours, threads, timing) for threads in timing.threads]
    return Outcome(job.name, _described(replaced), failures, times)


def _attempt(run: Callable[[], Outcome], job: Job) -> Outcome:
    try:
        return run()
    except Exception:
        return Outcome(job.name, "", [traceback.format_exc(limit=-8)], [])


def _main(request: Mapping[str, Any]) -> None:
    program = next(one for one in PROGRAMS if one.name == request["program"])
    timing = Timing(**request["timing"])
    jobs = [job for job in program.jobs if job.name in request["jobs"]]
    outcomes = [_attempt(lambda job=job: _run(job, timing), job) for job in jobs]  # type: ignore[misc]
    answer = [{**one._asdict(), "times": list(one.times)} for one in outcomes]
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
