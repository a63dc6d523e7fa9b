"""How a row is timed: implementations alternate in rounds. Also the machine's description."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

import retrograd

from ... import _core

__all__ = ["cache_sizes", "cpu_model", "torch_version"]

# Other libraries' threads keep spinning after their turn; libgomp's for about 300,000 pauses.
_SETTLE_SECONDS: Final = 0.02
LEAST_STEPS: Final = 3
_OVERHEAD_CALLS: Final = 20  # calls per sample: reading the clock takes 0.05 µs

_LARGE: Final = np.zeros((256, 1024), np.float32)

clock = time.perf_counter


class Stepper(Protocol):
    """Runs one training step and returns the time in seconds of each pass."""

    name: str

    def wake(self) -> None: ...
    def step(self) -> tuple[float, ...]: ...


class Times:
    """The times of one stepper: every sample of each pass, and the median of each round."""

    def __init__(self) -> None:
        self.samples: list[list[float]] = []
        self.medians: list[list[float]] = []

    def add_round(self, steps: list[tuple[float, ...]]) -> None:
        if not self.samples:
            self.samples, self.medians = [[] for _ in steps[0]], [[] for _ in steps[0]]
        for index, values in enumerate(zip(*steps, strict=True)):
            self.samples[index].extend(values)
            self.medians[index].append(statistics.median(values))


def take_turns(slots: Sequence[Sequence[Stepper]], rounds: int, budget: float) -> list[list[Times]]:
    """Time every stepper. The steppers of a slot share its turn and its time. `budget` is in seconds."""
    times = [[Times() for _ in slot] for slot in slots]
    for slot in slots:
        for stepper in slot:
            stepper.step()
    collects = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            for place in range(len(slots)):
                index = (number + place) % len(slots)
                slot = slots[index]
                time.sleep(_SETTLE_SECONDS)
                for stepper, record in zip(slot, times[index], strict=True):
                    record.add_round(_turn(stepper, budget / (rounds * len(slots) * len(slot))))
            gc.collect()
    finally:
        if collects:
            gc.enable()
    return times


def _turn(stepper: Stepper, seconds: float) -> list[tuple[float, ...]]:
    stepper.wake()
    stepper.step()
    steps: list[tuple[float, ...]] = []
    deadline = clock() + seconds
    while len(steps) < LEAST_STEPS or clock() < deadline:
        steps.append(stepper.step())
    return steps


class ForeignLoad:
    """The number of CPUs that other processes use, from now on. Linux only: elsewhere it is always 0."""

    def __init__(self, child_seconds: Callable[[], float]) -> None:
        self._child_seconds = child_seconds
        self._start = clock(), self._busy_seconds(), self._own_seconds()

    def _own_seconds(self) -> float:
        return time.process_time() + self._child_seconds()

    @staticmethod
    def _busy_seconds() -> float | None:
        """The busy time of all CPUs since boot."""
        try:
            user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
            return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return None

    def cpus(self) -> float:
        start, busy_before, own_before = self._start
        busy = self._busy_seconds()
        if busy is None or busy_before is None:
            return 0.0
        foreign = busy - busy_before - (self._own_seconds() - own_before)
        return max(0.0, foreign / max(clock() - start, 1e-9))


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    p20, p50, p80 = np.quantile(samples, (0.2, 0.5, 0.8))
    return float(p20), float(p50), float(p80)


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def median_difference(of: Sequence[float], less: Sequence[float]) -> float:
    return statistics.median(a - b for a, b in zip(of, less, strict=True))


def seconds_per_call(call: Callable[[], object]) -> float:
    start = clock()
    for _ in range(_OVERHEAD_CALLS):
        call()
    return (clock() - start) / _OVERHEAD_CALLS


class Machine(NamedTuple):
    device: str
    isa: str
    torch: Any | None
    caches: str = ""
    environment: str = ""


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_sizes() -> str:
    """The sizes of the caches that retrograd uses, as a phrase."""
    l1, l2, last_level, cpus = _core.caches()
    return f"L1 {_size(l1)}, L2 {_size(l2)}, last level {_size(last_level)} shared by {cpus} CPU{'s' * (cpus != 1)}"


def _size(number: int) -> str:
    return f"{number >> 20} MiB" if number % (1 << 20) == 0 and number else f"{number / 1024:g} KiB"


def import_torch() -> Any | None:
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def torch_version() -> str | None:
    torch = import_torch()
    return None if torch is None else str(torch.__version__)


@contextlib.contextmanager
def library_threads(threads: int) -> Iterator[None]:
    """Set retrograd's default thread count, for callers that have no argument for it."""
    before = retrograd.get_num_threads()
    retrograd.set_num_threads(threads)
    try:
        yield
    finally:
        retrograd.set_num_threads(before)


def wake_workers(threads: int) -> None:
    """Wake the worker threads, which small work does not wake, because during a training step they are awake."""
    retrograd.batch_norm_statistics(_LARGE, num_threads=threads)


class WholeSteps:
    """Times a function that is run once per step, of `parts` equal parts."""

    def __init__(self, name: str, run: Callable[[], object], threads: int, parts: int = 1) -> None:
        self.name, self._run, self._threads, self._parts = name, run, threads, parts

    def wake(self) -> None:
        wake_workers(self._threads)

    def step(self) -> tuple[float]:
        start = clock()
        self._run()
        return ((clock() - start) / self._parts,)


class Contest(NamedTuple):
    """The implementations that are timed for a row, retrograd's first. Those in one slot share its turn."""

    slots: list[list[Stepper]]
    bound: str | None  # the name of the one that is the bound
    notes: list[str]
    passes: tuple[str, ...] = ("forward", "backward")
    flops: tuple[float, ...] | None = None  # of each pass
    child_seconds: Callable[[], float] = float  # CPU time of child processes so far
    tokens: int | None = None  # per training step
    peaks: Mapping[tuple[str, str], int | None] = MappingProxyType({})  # peak memory in bytes, by name and pass


def agree(ours: Sequence[Any], theirs: Sequence[Any], share: float = 0.01) -> bool:
    """Whether two results agree, by norm: at a kink, single elements may legitimately differ."""
    pairs = zip(ours, theirs, strict=True)
    return all(bool(np.linalg.norm(a - b) <= share * np.linalg.norm(b)) for a, b in pairs)


def admit(contest: Contest, peer: Stepper, agrees: bool) -> None:
    if agrees:
        contest.slots.append([peer])
    else:
        contest.notes.append(f"{peer.name} gives a different result: not timed")
