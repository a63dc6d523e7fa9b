"""``retrograd bench norm``: verify, then time, then say how far from the machine's own limit.

Every row is a training step: forward into a given buffer, then all gradients into given buffers, each timed alone.
Rivals take turns in the same process, in rounds whose order rotates, so that the machine's moods hit all alike. Ratios
are medians over the rounds of the ratio of that round's medians. The bound is a streaming pass over the fewest possible
bytes (forward: x read, y written; backward: x, dy, and y under an activation, read, dx written) of arrays of the same
size, measured in the same rounds, with ordinary and with non-temporal stores, whichever is faster.
"""

from __future__ import annotations

import csv
import fnmatch
import gc
import importlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TextIO

import numpy as np

import retrograd

from . import _core
from ._args import Array
from .cases import NORM_BENCH_CASES, NormCase, NormData, make_norm_data
from .normalization import NormGradients, NormStatistics
from .verify import fused_activation, verify_norm

__all__ = [
    "CSV_COLUMNS",
    "BenchOptions",
    "BenchResult",
    "BenchRow",
    "CsvFile",
    "bench_names",
    "bench_norm",
    "cpu_model",
    "measures_bandwidth",
    "overhead_calls",
    "torch_version",
]

_PASSES: Final = ("forward", "backward")
_EPS: Final = 1e-5
# A rival's threads go on spinning after its turn; libgomp's for about 300,000 pauses.
_SETTLE_SECONDS: Final = 0.02
_LEAST_STEPS: Final = 3
_QUIET_CPUS: Final = 0.15
_PAGE_BYTES: Final = 4096
_OVERHEAD_CALLS: Final = 20  # calls per sample: the clock itself takes a twentieth of a microsecond

_LARGE: Final = np.zeros((256, 1024), np.float32)

clock = time.perf_counter


class BenchOptions(NamedTuple):
    patterns: Sequence[str] = ()  # of names; none: every row
    threads: Sequence[int] = (1, 2)
    rounds: int = 9
    budget: float = 2.0  # seconds of timing per row and number of threads


class BenchRow(NamedTuple):
    """One line of the CSV file; times in seconds, None where there is nothing to say."""

    case: str
    provider: str
    pass_: str
    threads: int
    isa: str
    p20: float
    p50: float
    p80: float
    ratio_vs_torch: float | None  # torch's time over this one's
    share_of_bound: float | None  # the bound's time over this one's
    device: str
    version: str


CSV_COLUMNS: Final = tuple(field.rstrip("_") for field in BenchRow._fields)


class BenchResult(NamedTuple):
    """A row's measurements at one number of threads, or why there are none."""

    name: str
    threads: int
    rows: tuple[BenchRow, ...]
    failed: bool = False
    notes: tuple[str, ...] = ()


# ---- who is timed ----------------------------------------------------------------------------------------------------


class _Stepper(Protocol):
    """Does one training step and returns the seconds of its forward and of its backward."""

    name: str

    def wake(self) -> None: ...
    def step(self) -> tuple[float, float]: ...


def _wake_team(threads: int) -> None:
    """Small work leaves sleeping threads asleep, but in the middle of a training step they are awake."""
    retrograd.batch_norm_statistics(_LARGE, num_threads=threads)


class _Ours:
    name = "retrograd"

    def __init__(self, case: NormCase, data: NormData, threads: int) -> None:
        self.data = data
        self.out = np.zeros_like(data.x)
        self.gradients = NormGradients(*(np.zeros_like(a) for a in (data.x, data.gamma, data.beta)))
        self._forward = getattr(retrograd, f"{case.kind}_norm_forward")
        self._backward = getattr(retrograd, f"{case.kind}_norm_backward")
        self._forward_options: dict[str, Any] = {
            "eps": _EPS,
            "activation": fused_activation(case.activation, case.alpha, case.beta),
            "out": self.out,
            "num_threads": threads,
        }
        if case.kind == "layer":
            self._forward_options["axis"] = case.axis
        else:
            self._forward_options["channel_axis"] = case.channel_axis
        if case.kind == "group":
            self._forward_options["num_groups"] = case.num_groups
        self._backward_options: dict[str, Any] = {"out": self.gradients, "num_threads": threads}
        self._threads = threads

    def wake(self) -> None:
        _wake_team(self._threads)

    def step(self) -> tuple[float, float]:
        start = clock()
        _, cache = self._forward(self.data.x, self.data.gamma, self.data.beta, **self._forward_options)
        middle = clock()
        self._backward(self.data.dy, cache, **self._backward_options)
        end = clock()
        return middle - start, end - middle


class _Torch:
    """PyTorch as its users call it: eager, autograd, the activation in place, channels last as its memory format."""

    name = "torch"

    def __init__(self, torch: Any, case: NormCase, data: NormData) -> None:
        functional = torch.nn.functional
        to_torch = torch.from_numpy
        x, dy = to_torch(data.x), to_torch(data.dy)
        if case.kind != "layer" and case.layout == "last" and len(case.shape) > 2:
            x, dy = torch.movedim(x, -1, 1), torch.movedim(dy, -1, 1)
        x, gamma, beta = (tensor.detach().requires_grad_() for tensor in (x, to_torch(data.gamma), to_torch(data.beta)))
        activate = {
            "identity": lambda y: y,
            "relu": functional.relu_,
            "tanh": torch.tanh_,
            "sigmoid": torch.sigmoid_,
        }[case.activation]
        normalize: dict[str, Callable[[], Any]] = {
            "batch": lambda: functional.batch_norm(x, None, None, gamma, beta, True, 0.1, _EPS),
            "instance": lambda: functional.instance_norm(x, weight=gamma, bias=beta, eps=_EPS),
            "layer": lambda: functional.layer_norm(x, case.parameter_shape, gamma, beta, _EPS),
            "group": lambda: functional.group_norm(x, case.num_groups, gamma, beta, _EPS),
        }
        self._call: Callable[[], Any] = lambda: activate(normalize[case.kind]())
        self._leaves, self._dy, self._grad = (x, gamma, beta), dy, torch.autograd.grad
        self._case = case

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float, float]:
        start = clock()
        y = self._call()
        middle = clock()
        gradients = self._grad(y, self._leaves, self._dy)
        end = clock()
        del y, gradients  # given back after the clock has stopped
        return middle - start, end - middle

    def results(self) -> tuple[Any, Any]:
        """y and dx in our layout."""
        y = self._call()
        dx = self._grad(y, self._leaves, self._dy)[0]
        arrays = (y.detach().numpy(), dx.numpy())
        if self._case.kind != "layer" and self._case.layout == "last" and len(self._case.shape) > 2:
            return np.moveaxis(arrays[0], 1, -1), np.moveaxis(arrays[1], 1, -1)
        return arrays


class _Stream:
    """One pass over the fewest bytes: a copy for forward, a sum of two or three arrays for backward."""

    name = "stream"

    def __init__(self, arrays: Sequence[Array], fused: bool, non_temporal: bool, threads: int) -> None:
        x, dy, self._y, self._dx = arrays
        self._forward_sources = [x]
        self._backward_sources = [x, dy, self._y] if fused else [x, dy]
        self._options = non_temporal, threads

    def wake(self) -> None:
        _wake_team(self._options[1])

    def step(self) -> tuple[float, float]:
        seconds = _stream_seconds()
        assert seconds is not None
        forward = seconds(self._y, self._forward_sources, *self._options)
        return forward, seconds(self._dx, self._backward_sources, *self._options)


def _streams(elements: int, fused: bool, threads: int) -> list[_Stepper]:
    """Ordinary and non-temporal stores, by the team and by one thread: a team may cost a small row more than it brings.

    The arrays are as large as the row's own, and aligned: nothing holds the machine back but itself.
    """
    arrays = [_aligned_zeros(elements) for _ in range(4)]
    return [_Stream(arrays, fused, kind, team) for team in sorted({1, threads}) for kind in (False, True)]


def _aligned_zeros(elements: int) -> Array:
    """Zeros that begin on a page, already touched."""
    words = _PAGE_BYTES // 4
    array = np.zeros(elements + words, np.float32)
    array.fill(0)
    first = -array.ctypes.data % _PAGE_BYTES // 4
    return array[first : first + elements]


def measures_bandwidth() -> bool:
    return _stream_seconds() is not None


def _stream_seconds() -> Callable[..., float] | None:
    return getattr(_core, "stream_seconds", None)


def _import_torch() -> Any | None:
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def torch_version() -> str | None:
    torch = _import_torch()
    return None if torch is None else str(torch.__version__)


def _agree(ours: _Ours, rival: _Torch) -> bool:
    """Whether the rival computes the same. A sum of squares, because at a kink single elements may fall either way."""
    pairs = zip((ours.out, ours.gradients.dx), rival.results(), strict=True)
    return all(bool(np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(b)) for a, b in pairs)


# ---- timing ----------------------------------------------------------------------------------------------------------


class _Times:
    """Of one stepper: every sample of each pass, and each round's medians."""

    def __init__(self) -> None:
        self.samples: tuple[list[float], list[float]] = ([], [])
        self.medians: tuple[list[float], list[float]] = ([], [])

    def add_round(self, steps: list[tuple[float, float]]) -> None:
        for index in range(2):
            values = [step[index] for step in steps]
            self.samples[index].extend(values)
            self.medians[index].append(statistics.median(values))


def _take_turns(slots: Sequence[Sequence[_Stepper]], rounds: int, budget: float) -> list[list[_Times]]:
    """Times of every stepper. Those of a slot share its turn, and its time."""
    times = [[_Times() for _ in slot] for slot in slots]
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


def _turn(stepper: _Stepper, seconds: float) -> list[tuple[float, float]]:
    stepper.wake()
    stepper.step()
    steps: list[tuple[float, float]] = []
    deadline = clock() + seconds
    while len(steps) < _LEAST_STEPS or clock() < deadline:
        steps.append(stepper.step())
    return steps


class _ForeignLoad:
    """How many CPUs other processes use, from now on. Linux only: elsewhere it is always 0."""

    def __init__(self) -> None:
        self._start = clock(), self._busy_seconds(), time.process_time()

    @staticmethod
    def _busy_seconds() -> float | None:
        """Of all CPUs since the machine was started."""
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
        foreign = busy - busy_before - (time.process_time() - own_before)
        return max(0.0, foreign / max(clock() - start, 1e-9))


def _quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    p20, p50, p80 = np.quantile(samples, (0.2, 0.5, 0.8))
    return float(p20), float(p50), float(p80)


def _median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


# ---- rows ------------------------------------------------------------------------------------------------------------


class _Machine(NamedTuple):
    device: str
    isa: str
    torch: Any | None


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cases(patterns: Sequence[str]) -> list[NormCase]:
    return [case for case in NORM_BENCH_CASES if _matches(case.name, patterns)]


def _overheads(patterns: Sequence[str]) -> list[str]:
    return [name for name in overhead_calls() if _matches(name, patterns)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def bench_names(patterns: Sequence[str] = ()) -> list[str]:
    """The rows that the patterns choose."""
    return [case.name for case in _cases(patterns)] + _overheads(patterns)


def bench_norm(options: BenchOptions, started: Callable[[str], None] | None = None) -> Iterator[BenchResult]:
    """Measures row by row: every case at every number of threads, then the overheads. `started` hears their names."""
    cases = _cases(options.patterns)
    machine = _Machine(cpu_model(), _core.isa(), _import_torch() if cases else None)
    for case in cases:
        if started is not None:
            started(case.name)
        failures = _verify(case, machine.isa, options.threads)
        data = make_norm_data(case)
        for threads in options.threads:
            if failures:
                yield BenchResult(case.name, threads, (), failed=True, notes=tuple(failures))
            else:
                yield _bench_case(case, data, threads, options, machine)
    calls = overhead_calls()
    for name in _overheads(options.patterns):
        if started is not None:
            started(name)
        yield _bench_overhead(name, calls[name], options, machine)


def _verify(case: NormCase, isa: str, threads: Sequence[int]) -> list[str]:
    """What is wrong with the results, in words; nothing is timed that is not right."""
    return [
        f"{row.what} is off by {row.error:.3g} tolerances, threads {row.threads}"
        for row in verify_norm([case], [isa], threads)
        if not row.ok
    ]


def _bench_case(case: NormCase, data: NormData, threads: int, options: BenchOptions, machine: _Machine) -> BenchResult:
    notes: list[str] = []
    ours = _Ours(case, data, threads)
    ours.step()
    slots: list[list[_Stepper]] = [[ours]]
    if machine.torch is not None:
        machine.torch.set_num_threads(threads)
        rival = _Torch(machine.torch, case, data)
        if _agree(ours, rival):
            slots.append([rival])
        else:
            notes.append("torch computes something else: not timed")
    if measures_bandwidth():
        slots.append(_streams(data.x.size, case.activation != "identity", threads))

    load = _ForeignLoad()
    times = _take_turns(slots, options.rounds, options.budget)
    if load.cpus() > _QUIET_CPUS:
        notes.append(f"other processes used {load.cpus():.1f} CPUs meanwhile: measure again")
    measured = {slot[0].name: record for slot, record in zip(slots, times, strict=True)}
    rows = [row for index in range(2) for row in _rows_of_pass(case.name, index, threads, measured, machine)]
    return BenchResult(case.name, threads, tuple(rows), notes=tuple(notes))


def _rows_of_pass(
    name: str, index: int, threads: int, measured: Mapping[str, list[_Times]], machine: _Machine
) -> Iterator[BenchRow]:
    medians = {provider: records[0].medians[index] for provider, records in measured.items()}
    samples = {provider: records[0].samples[index] for provider, records in measured.items()}
    if "stream" in measured:
        streams = measured["stream"]
        # The best of each round bounds that round.
        medians["stream"] = [min(values) for values in zip(*(s.medians[index] for s in streams), strict=True)]
        samples["stream"] = min((s.samples[index] for s in streams), key=statistics.median)
    for provider, mine in medians.items():
        torch_ratio = share = None
        if "torch" in medians and provider == "retrograd":
            torch_ratio = _median_ratio(medians["torch"], mine)
        if "stream" in medians and provider != "stream":
            share = _median_ratio(medians["stream"], mine)
        isa, version = machine.isa, retrograd.__version__
        if provider == "torch":
            assert machine.torch is not None
            isa, version = machine.torch.backends.cpu.get_cpu_capability().lower(), machine.torch.__version__
        yield BenchRow(
            name,
            provider,
            _PASSES[index],
            threads,
            isa,
            *_quantiles(samples[provider]),
            torch_ratio,
            share,
            machine.device,
            version,
        )


# ---- overhead --------------------------------------------------------------------------------------------------------


def overhead_calls() -> dict[str, Callable[[], object]]:
    """The smallest useful call of every public function, by the name of its row."""
    x = np.ones((2, 4), np.float32)
    x[0] = 0
    gamma, beta = np.ones(4, np.float32), np.zeros(4, np.float32)
    out, gradients = np.empty_like(x), NormGradients(np.empty_like(x), np.empty_like(gamma), np.empty_like(beta))
    part = NormStatistics(2, np.zeros(4), np.ones(4))
    calls: dict[str, Callable[[], object]] = {}

    def add_norm(kind: str, **options: Any) -> None:
        forward, backward = (getattr(retrograd, f"{kind}_norm_{name}") for name in _PASSES)
        _, cache = forward(x, gamma, beta, **options)
        calls[f"{kind}_norm_forward"] = lambda: forward(x, gamma, beta, out=out, **options)
        calls[f"{kind}_norm_backward"] = lambda: backward(x, cache, out=gradients)

    for kind in ("batch", "instance", "layer"):
        add_norm(kind)
    add_norm("group", num_groups=2)
    _, cache = retrograd.batch_norm_forward(x, gamma, beta)
    calls["batch_norm_statistics"] = lambda: retrograd.batch_norm_statistics(x)
    calls["combine_statistics"] = lambda: retrograd.combine_statistics((part, part))
    calls["batch_norm_gradient_sums"] = lambda: retrograd.batch_norm_gradient_sums(x, cache)
    calls["get_num_threads"] = retrograd.get_num_threads
    calls["set_num_threads"] = lambda: retrograd.set_num_threads(retrograd.get_num_threads())
    return {f"overhead_{name}": call for name, call in calls.items()}


def _bench_overhead(name: str, call: Callable[[], object], options: BenchOptions, machine: _Machine) -> BenchResult:
    def sample() -> float:
        start = clock()
        for _ in range(_OVERHEAD_CALLS):
            call()
        return (clock() - start) / _OVERHEAD_CALLS

    sample()
    samples: list[float] = []
    deadline = clock() + min(options.budget, 0.2)
    while len(samples) < _LEAST_STEPS or clock() < deadline:
        samples.append(sample())
    quantiles = _quantiles(samples)
    row = BenchRow(
        name, "retrograd", "call", 1, machine.isa, *quantiles, None, None, machine.device, retrograd.__version__
    )
    return BenchResult(name, 1, (row,))


# ---- CSV -------------------------------------------------------------------------------------------------------------


class CsvFile:
    """Rows as they come: what was measured before an interruption is in the file."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow(CSV_COLUMNS)
        file.flush()

    def write(self, rows: Sequence[BenchRow]) -> None:
        for row in rows:
            self._writer.writerow([_cell(value) for value in row])
        self._file.flush()


def _cell(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
