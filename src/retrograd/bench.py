"""``retrograd bench``: verify, then time, then say how far from the machine's own limit.

Every row is a training step: forward into given buffers, then all gradients into given buffers, each timed alone.
Rivals take turns in the same process, in rounds whose order rotates, so that the machine's moods hit all alike. Ratios
are medians over the rounds of the ratio of that round's medians. The bound is measured in the same rounds:

- of a norm, a streaming pass over the fewest possible bytes (forward: x read, y written; backward: x, dy, and y under
  an activation, read, dx written) of arrays of the same size, with ordinary and with non-temporal stores, whichever is
  faster;
- of an LSTM, its matrix products at the speed of NumPy's own (BLAS) of two 1024 x 1024 matrices, by as many threads.

The rival of a front end's row (``bnns_*``, ``mps_*``) are the array functions, which do the same work, to the bit.
``added`` is what a call of the front end takes longer: the median over the rounds of the difference of that round's
medians.

A row of the suite ``train`` is a whole training step of a model, optimizer included (see :mod:`.bench_train`).
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import fnmatch
import gc
import importlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TextIO

import numpy as np

import retrograd

from . import _core
from ._args import Array
from .bench_apple import APPLE_CASES, AppleCase, Pair
from .bench_train import (
    TRAIN_CASES,
    OurTraining,
    TorchTraining,
    TrainCase,
    TrainData,
    make_train_data,
    peak_bytes,
    train_failures,
)
from .cases import (
    LSTM_BENCH_CASES,
    LSTM_STANDARD,
    NORM_BENCH_CASES,
    LstmCase,
    LstmData,
    NormCase,
    NormData,
    make_lstm_data,
    make_norm_data,
)
from .normalization import NormGradients, NormStatistics
from .recurrent import LstmGradients, LstmResult, LstmWeights
from .verify import fused_activation, lstm_options, lstm_weights, verify_lstm, verify_norm

__all__ = [
    "CSV_COLUMNS",
    "SUITES",
    "BenchOptions",
    "BenchResult",
    "BenchRow",
    "CsvFile",
    "bench_names",
    "bench_rows",
    "cpu_model",
    "measures_bandwidth",
    "overhead_calls",
    "torch_takes_part",
    "torch_version",
]

_EPS: Final = 1e-5
# A rival's threads go on spinning after its turn; libgomp's for about 300,000 pauses.
_SETTLE_SECONDS: Final = 0.02
_LEAST_STEPS: Final = 3
_ORACLE_STEPS: Final = 8
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
    ratio_vs_plain: float | None  # the time without this row's options over this one's
    share_of_bound: float | None  # the bound's time over this one's
    gflops: float | None  # of matrix products
    added: float | None  # this one's time less that of the array functions
    tokens_per_second: float | None
    peak_bytes: int | None  # of training, above the library's own
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


# ---- timing ----------------------------------------------------------------------------------------------------------


class _Stepper(Protocol):
    """Does one training step and returns the seconds of each of the contest's passes."""

    name: str

    def wake(self) -> None: ...
    def step(self) -> tuple[float, ...]: ...


class _Times:
    """Of one stepper: every sample of each pass, and each round's medians."""

    def __init__(self) -> None:
        self.samples: list[list[float]] = []
        self.medians: list[list[float]] = []

    def add_round(self, steps: list[tuple[float, ...]]) -> None:
        if not self.samples:
            self.samples, self.medians = [[] for _ in steps[0]], [[] for _ in steps[0]]
        for index, values in enumerate(zip(*steps, strict=True)):
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


def _turn(stepper: _Stepper, seconds: float) -> list[tuple[float, ...]]:
    stepper.wake()
    stepper.step()
    steps: list[tuple[float, ...]] = []
    deadline = clock() + seconds
    while len(steps) < _LEAST_STEPS or clock() < deadline:
        steps.append(stepper.step())
    return steps


class _ForeignLoad:
    """How many CPUs other processes use, from now on. Linux only: elsewhere it is always 0."""

    def __init__(self, child_seconds: Callable[[], float]) -> None:
        self._child_seconds = child_seconds
        self._start = clock(), self._busy_seconds(), self._own_seconds()

    def _own_seconds(self) -> float:
        return time.process_time() + self._child_seconds()

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
        foreign = busy - busy_before - (self._own_seconds() - own_before)
        return max(0.0, foreign / max(clock() - start, 1e-9))


def _quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    p20, p50, p80 = np.quantile(samples, (0.2, 0.5, 0.8))
    return float(p20), float(p50), float(p80)


def _median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _median_difference(of: Sequence[float], less: Sequence[float]) -> float:
    return statistics.median(a - b for a, b in zip(of, less, strict=True))


def _seconds_per_call(call: Callable[[], object]) -> float:
    start = clock()
    for _ in range(_OVERHEAD_CALLS):
        call()
    return (clock() - start) / _OVERHEAD_CALLS


# ---- the machine -----------------------------------------------------------------------------------------------------


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


def _import_torch() -> Any | None:
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def torch_version() -> str | None:
    torch = _import_torch()
    return None if torch is None else str(torch.__version__)


def _wake_team(threads: int) -> None:
    """Small work leaves sleeping threads asleep, but in the middle of a training step they are awake."""
    retrograd.batch_norm_statistics(_LARGE, num_threads=threads)


class _Contest(NamedTuple):
    """Who takes turns at a row, the row's own implementation first. Those of a slot share its turn."""

    slots: list[list[_Stepper]]
    bound: str | None  # which of them is the bound
    notes: list[str]
    passes: tuple[str, ...] = ("forward", "backward")
    flops: tuple[float, ...] | None = None  # of each pass
    child_seconds: Callable[[], float] = float  # CPU time of processes of ours so far
    tokens: int | None = None  # of a training step
    peaks: Mapping[str, int | None] = MappingProxyType({})  # of memory, by name


# ---- norms -----------------------------------------------------------------------------------------------------------


class _OurNorm:
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


class _TorchNorm:
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


def _norm_failures(case: NormCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """What is wrong with the results, in words; nothing is timed that is not right."""
    for row in verify_norm([case], [isa], threads):
        if not row.ok:
            yield f"{row.what} is off by {row.error:.3g} tolerances, threads {row.threads}"


def _norm_contest(
    case: NormCase, data: NormData, threads: int, machine: _Machine, stack: contextlib.ExitStack
) -> _Contest:
    ours = _OurNorm(case, data, threads)
    ours.step()
    contest = _Contest([[ours]], "stream", [])
    if machine.torch is not None:
        machine.torch.set_num_threads(threads)
        rival = _TorchNorm(machine.torch, case, data)
        _admit(contest, rival, _agree((ours.out, ours.gradients.dx), rival.results()))
    if measures_bandwidth():
        contest.slots.append(_streams(data.x.size, case.activation != "identity", threads))
    return contest


def _agree(ours: Sequence[Any], theirs: Sequence[Any], share: float = 0.01) -> bool:
    """Whether the rival computes the same. A sum of squares, because at a kink single elements may fall either way."""
    pairs = zip(ours, theirs, strict=True)
    return all(bool(np.linalg.norm(a - b) <= share * np.linalg.norm(b)) for a, b in pairs)


def _admit(contest: _Contest, rival: _Stepper, agrees: bool) -> None:
    if agrees:
        contest.slots.append([rival])
    else:
        contest.notes.append(f"{rival.name} computes something else: not timed")


# ---- LSTM ------------------------------------------------------------------------------------------------------------


def _lstm_flops(case: LstmCase) -> tuple[float, float, float]:
    """Of the products of forward, of backward (twice as many) and of both; steps in which a sample takes part count."""
    rows = case.steps * case.samples if case.active is None else int(case.active.sum())
    widths = sum(case.cell_inputs(cell) + case.units * (1 + (case.peephole == "full")) for cell in range(case.cells))
    forward = 8.0 * rows * widths * case.units
    return forward, 2 * forward, 3 * forward


class _OurLstm:
    """Ours as its users call it: no buffers given."""

    def __init__(self, case: LstmCase, data: LstmData, threads: int, name: str = "retrograd") -> None:
        self.name = name
        self._threads = threads
        self._x, self._dy, self._states = data.x, data.dy, (data.h0, data.c0)
        self._weights = lstm_weights(data)
        self._options = {**lstm_options(case), "num_threads": threads}
        for option in ("lengths", "batch_sizes"):
            if self._options[option] is not None:
                self._options[option] = np.array(self._options[option])

    def wake(self) -> None:
        _wake_team(self._threads)

    def _run(self) -> tuple[LstmResult, LstmGradients, tuple[float, float, float]]:
        start = clock()
        result = retrograd.lstm_forward(self._x, self._weights, *self._states, **self._options)
        middle = clock()
        assert result.cache is not None
        gradients = retrograd.lstm_backward(self._dy, result.cache, num_threads=self._threads)
        end = clock()
        return result, gradients, (middle - start, end - middle, end - start)

    def step(self) -> tuple[float, float, float]:
        return self._run()[2]

    def results(self) -> list[Any]:
        """y, dx, and the gradients of wx, wh and b of every cell."""
        result, gradients, _ = self._run()
        cells = [part for cell in gradients.dweights for part in cell[:3] if part is not None]
        return [result.y, gradients.dx, *cells]


class _TorchLstm:
    """PyTorch as its users call it: torch.nn.LSTM, eager, autograd; a packed sequence where lengths differ."""

    name = "torch"

    def __init__(self, torch: Any, case: LstmCase, data: LstmData) -> None:
        module = torch.nn.LSTM(
            case.inputs,
            case.units,
            case.layers,
            bias=case.bias,
            batch_first=case.batch_first,
            dropout=case.dropout,
            bidirectional=case.directions == 2,
        )
        x, self._dy = torch.from_numpy(data.x).requires_grad_(), torch.from_numpy(data.dy)
        self._leaves, self._names = [x], ["x"]
        with torch.no_grad():
            for cell, parts in enumerate(data.weights):
                layer, direction = divmod(cell, case.directions)
                suffix = f"l{layer}" + "_reverse" * direction
                given = {"weight_ih_": parts.wx, "weight_hh_": parts.wh, "bias_ih_": parts.b, "bias_hh_": None}
                for prefix, array in given.items():
                    if prefix.startswith("bias") and not case.bias:
                        continue
                    parameter = getattr(module, prefix + suffix)
                    if array is None:
                        parameter.zero_()
                    else:
                        parameter.copy_(torch.from_numpy(array))
                    self._leaves.append(parameter)
                    self._names.append(prefix)
        rnn, lengths = torch.nn.utils.rnn, torch.tensor(case.lengths or ())

        def packed() -> Any:
            sequence = rnn.pack_padded_sequence(x, lengths, case.batch_first, enforce_sorted=False)
            return rnn.pad_packed_sequence(module(sequence)[0], case.batch_first, total_length=case.steps)[0]

        self._call: Callable[[], Any] = (lambda: module(x)[0]) if case.lengths is None else packed
        self._module, self._grad = module, torch.autograd.grad

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float, float, float]:
        start = clock()
        y = self._call()
        middle = clock()
        gradients = self._grad(y, self._leaves, self._dy)
        end = clock()
        del y, gradients  # given back after the clock has stopped
        return middle - start, end - middle, end - start

    def results(self) -> list[Any]:
        """As ours, without dropout: it draws other numbers."""
        self._module.eval()
        y = self._call()
        gradients = zip(self._names, self._grad(y, self._leaves, self._dy), strict=True)
        self._module.train()
        return [y.detach().numpy(), *(gradient.numpy() for name, gradient in gradients if name != "bias_hh_")]


_SGEMM_SIZE: Final = 1024
_SGEMM_PROGRAM: Final = f"""
import sys, time
import numpy as np
a, b, c = (np.full(({_SGEMM_SIZE}, {_SGEMM_SIZE}), 0.5, np.float32) for _ in range(3))
for line in sys.stdin:
    start = time.perf_counter()
    np.matmul(a, b, out=c)
    print(time.perf_counter() - start, time.process_time(), flush=True)
"""
_BLAS_THREADS: Final = ("OPENBLAS", "MKL", "BLIS", "OMP")


class _Sgemm:
    """NumPy's own matrix product by a number of threads; its times are those that the row's products would take.

    BLAS reads its number of threads when it is loaded, so it has a process of its own, which sleeps between its turns;
    so do its threads, which are told not to spin.
    """

    name = "sgemm"

    def __init__(self, flops: tuple[float, ...], threads: int, stack: contextlib.ExitStack) -> None:
        self._flops = flops
        self.cpu_seconds = 0.0
        numbers = {f"{library}_NUM_THREADS": str(threads) for library in _BLAS_THREADS}
        numbers |= {"VECLIB_MAXIMUM_THREADS": str(threads), "OPENBLAS_THREAD_TIMEOUT": "4"}
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", _SGEMM_PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, **numbers},
            )
        )

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float, ...]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        seconds, self.cpu_seconds = map(float, self._process.stdout.readline().split())
        speed = 2 * _SGEMM_SIZE**3 / seconds
        return tuple(flops / speed for flops in self._flops)


def _plain(case: LstmCase, data: LstmData) -> tuple[LstmCase, LstmData]:
    """The same without peepholes, activations of its own and dropout."""
    plain = dataclasses.replace(case, peephole="none", output_gate_reads="new", activations=LSTM_STANDARD, dropout=0.0)
    return plain, data._replace(weights=tuple(cell._replace(peephole=None) for cell in data.weights))


def _lstm_failures(case: LstmCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """Against the oracle, which is slow, over the first steps; over all of them against the engine in float64."""
    steps = min(case.steps, _ORACLE_STEPS)
    short = dataclasses.replace(
        case,
        steps=steps,
        lengths=None if case.lengths is None else tuple(min(length, steps) for length in case.lengths),
        batch_sizes=None if case.batch_sizes is None else case.batch_sizes[:steps],
    )
    for row in verify_lstm([short], [isa], threads):
        if not row.ok:
            yield f"{row.what} is off by {row.error:.3g} tolerances, threads {row.threads}"
    data = make_lstm_data(case)
    wide = _OurLstm(case, _in_float64(data), max(threads)).results()
    for number in threads:
        if not _agree(_OurLstm(case, data, number).results(), wide, 1e-4):
            yield f"float32 and float64 differ, threads {number}"


def _in_float64(data: LstmData) -> LstmData:
    def wide(array: Array | None) -> Array | None:
        return None if array is None else array.astype(np.float64)

    cells = tuple(type(cell)(*map(wide, cell)) for cell in data.weights)
    x, _, *others = data
    return LstmData(wide(x), cells, *map(wide, others))  # type: ignore[arg-type]


def _lstm_contest(
    case: LstmCase, data: LstmData, threads: int, machine: _Machine, stack: contextlib.ExitStack
) -> _Contest:
    flops = _lstm_flops(case)
    sgemm = _Sgemm(flops, threads, stack)
    passes = ("forward", "backward", "step")
    contest = _Contest([[_OurLstm(case, data, threads)]], "sgemm", [], passes, flops, lambda: sgemm.cpu_seconds)
    plain, plain_data = _plain(case, data)
    if plain != case:
        contest.slots.append([_OurLstm(plain, plain_data, threads, "plain")])
    can = dataclasses.replace(plain, dropout=case.dropout, batch_sizes=None) == case
    if machine.torch is not None and can:
        machine.torch.set_num_threads(threads)
        rival = _TorchLstm(machine.torch, case, data)
        _admit(contest, rival, _agree(_OurLstm(plain, plain_data, threads).results(), rival.results()))
    contest.slots.append([sgemm])
    return contest


# ---- Apple's front ends ----------------------------------------------------------------------------------------------


class _Calls:
    """Each pass many times over: a single small call would drown in the noise of the clock."""

    def __init__(self, name: str, passes: Mapping[str, Callable[[], object]], threads: int) -> None:
        self.name = name
        self._passes = tuple(passes.values())
        self._threads = threads

    def wake(self) -> None:
        _wake_team(self._threads)

    def step(self) -> tuple[float, ...]:
        return tuple(map(_seconds_per_call, self._passes))


@contextlib.contextmanager
def _library_threads(threads: int) -> Iterator[None]:
    """Metal has no word for a number of threads, so both sides use the library's."""
    before = retrograd.get_num_threads()
    retrograd.set_num_threads(threads)
    try:
        yield
    finally:
        retrograd.set_num_threads(before)


def _apple_failures(case: AppleCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """The front end and the array functions agree to the bit."""
    for number in threads:
        with _library_threads(number):
            pair = case.make()
            for side in pair:
                for call in side.passes.values():
                    call()
        for name, array in pair.arrays.results.items():
            if pair.apple.results[name].tobytes() != array.tobytes():
                yield f"{name} is not what the array functions compute, threads {number}"


def _apple_contest(
    case: AppleCase, pair: Pair, threads: int, machine: _Machine, stack: contextlib.ExitStack
) -> _Contest:
    stack.enter_context(_library_threads(threads))
    apple = _Calls("retrograd", pair.apple.passes, threads)
    arrays = _Calls("arrays", pair.arrays.passes, threads)
    return _Contest([[apple], [arrays]], None, [], tuple(pair.apple.passes))


# ---- training --------------------------------------------------------------------------------------------------------


def _train_failures(case: TrainCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    return train_failures(case, _import_torch(), threads)


def _train_contest(
    case: TrainCase, data: TrainData, threads: int, machine: _Machine, stack: contextlib.ExitStack
) -> _Contest:
    slots: list[list[_Stepper]] = [[OurTraining(case, data, threads)]]
    if machine.torch is not None:
        machine.torch.set_num_threads(threads)
        slots.append([TorchTraining(machine.torch, case, data, fused) for fused in (False, True)])
    peaks = {slot[0].name: peak_bytes(case, slot[0].name, threads) for slot in slots}
    return _Contest(slots, None, [], ("step",), tokens=case.tokens, peaks=peaks)


# ---- rows ------------------------------------------------------------------------------------------------------------


class _Suite(NamedTuple):
    cases: Sequence[Any]
    make_data: Callable[[Any], Any]
    failures: Callable[[Any, str, Sequence[int]], Iterator[str]]
    contest: Callable[[Any, Any, int, _Machine, contextlib.ExitStack], _Contest]
    overhead: Callable[[str], bool]  # whether a function is of this suite
    against_torch: bool = True


SUITES: Final[Mapping[str, _Suite]] = {
    "norm": _Suite(
        NORM_BENCH_CASES,
        make_norm_data,
        _norm_failures,
        _norm_contest,
        lambda name: not name.startswith("lstm_"),
    ),
    "lstm": _Suite(
        LSTM_BENCH_CASES,
        make_lstm_data,
        _lstm_failures,
        _lstm_contest,
        lambda name: name.startswith("lstm_"),
    ),
    "apple": _Suite(
        APPLE_CASES,
        lambda case: case.make(),
        _apple_failures,
        _apple_contest,
        lambda name: False,
        against_torch=False,
    ),
    "train": _Suite(
        TRAIN_CASES,
        make_train_data,
        _train_failures,
        _train_contest,
        lambda name: False,
    ),
}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _overheads(suite: _Suite, patterns: Sequence[str]) -> list[str]:
    names = (name for name in overhead_calls() if suite.overhead(name.removeprefix("overhead_")))
    return [name for name in names if _matches(name, patterns)]


def bench_names(suites: Sequence[str] = tuple(SUITES), patterns: Sequence[str] = ()) -> list[str]:
    """The rows of those suites that the patterns choose."""
    names = []
    for suite in (SUITES[name] for name in suites):
        names += [case.name for case in suite.cases if _matches(case.name, patterns)] + _overheads(suite, patterns)
    return names


def torch_takes_part(suites: Sequence[str], patterns: Sequence[str] = ()) -> bool:
    """Whether any of the chosen rows is timed against PyTorch."""
    rows = (case.name for name in suites if SUITES[name].against_torch for case in SUITES[name].cases)
    return any(_matches(row, patterns) for row in rows)


def bench_rows(
    suites: Sequence[str], options: BenchOptions, started: Callable[[str], None] | None = None
) -> Iterator[BenchResult]:
    """Measures row by row: every case at every number of threads, then the overheads. `started` hears their names."""
    machine = _Machine(cpu_model(), _core.isa(), None)
    calls = overhead_calls()
    for suite in (SUITES[name] for name in suites):
        for case in suite.cases:
            if not _matches(case.name, options.patterns):
                continue
            if started is not None:
                started(case.name)
            if suite.against_torch:
                machine = machine._replace(torch=_import_torch())
            failures = tuple(suite.failures(case, machine.isa, options.threads))
            data = suite.make_data(case)
            for threads in options.threads:
                if failures:
                    yield BenchResult(case.name, threads, (), failed=True, notes=failures)
                else:
                    yield _bench_case(suite, case, data, threads, options, machine)
        for name in _overheads(suite, options.patterns):
            if started is not None:
                started(name)
            yield _bench_overhead(name, calls[name], options, machine)


def _bench_case(
    suite: _Suite, case: Any, data: Any, threads: int, options: BenchOptions, machine: _Machine
) -> BenchResult:
    with contextlib.ExitStack() as stack:
        contest = suite.contest(case, data, threads, machine, stack)
        load = _ForeignLoad(contest.child_seconds)
        times = _take_turns(contest.slots, options.rounds, options.budget)
        notes = contest.notes
        if load.cpus() > _QUIET_CPUS:
            notes.append(f"other processes used {load.cpus():.1f} CPUs meanwhile: measure again")
    rows = [
        row
        for index, pass_ in enumerate(contest.passes)
        for row in _rows_of_pass(case.name, pass_, index, threads, contest, times, machine)
    ]
    return BenchResult(case.name, threads, tuple(rows), notes=tuple(notes))


def _rows_of_pass(
    name: str,
    pass_: str,
    index: int,
    threads: int,
    contest: _Contest,
    times: Sequence[Sequence[_Times]],
    machine: _Machine,
) -> Iterator[BenchRow]:
    medians: dict[str, list[float]] = {}
    samples: dict[str, list[float]] = {}
    for slot, records in zip(contest.slots, times, strict=True):
        # The best of a slot in each round counts: one of several streaming passes bounds that round.
        provider = slot[0].name
        medians[provider] = [min(values) for values in zip(*(r.medians[index] for r in records), strict=True)]
        samples[provider] = min((r.samples[index] for r in records), key=statistics.median)

    def ratio(rival: str | None, provider: str) -> float | None:
        if rival not in medians or rival == provider:
            return None
        return _median_ratio(medians[rival], medians[provider])

    ours = contest.slots[0][0].name
    added = _median_difference(medians[ours], medians["arrays"]) if "arrays" in medians else None
    for provider, values in samples.items():
        quantiles = _quantiles(values)
        yield BenchRow(
            name,
            provider,
            pass_,
            threads,
            _isa_of(provider, machine),
            *quantiles,
            ratio("torch", provider) if provider == ours else None,
            ratio("plain", provider) if provider == ours else None,
            ratio(contest.bound, provider),
            None if contest.flops is None else contest.flops[index] / quantiles[1] / 1e9,
            added if provider == ours else None,
            None if contest.tokens is None else contest.tokens / quantiles[1],
            contest.peaks.get(provider),
            machine.device,
            _version_of(provider, machine),
        )


def _isa_of(provider: str, machine: _Machine) -> str:
    if provider == "torch":
        assert machine.torch is not None
        return str(machine.torch.backends.cpu.get_cpu_capability()).lower()
    return "" if provider == "sgemm" else machine.isa  # BLAS chooses for itself


def _version_of(provider: str, machine: _Machine) -> str:
    if provider == "torch":
        assert machine.torch is not None
        return str(machine.torch.__version__)
    return np.__version__ if provider == "sgemm" else retrograd.__version__


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
        forward, backward = (getattr(retrograd, f"{kind}_norm_{name}") for name in ("forward", "backward"))
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
    calls["batch_norm_cache"] = lambda: retrograd.batch_norm_cache(x, gamma, beta, mean=part.mean, var=part.var)
    calls["activation_forward"] = lambda: retrograd.activation_forward(x, "relu", out=out)
    calls["activation_backward"] = lambda: retrograd.activation_backward(x, "relu", x=x, out=out)
    calls["dropout"] = lambda: retrograd.dropout(x, 0.5, seed=0, out=out)
    w, labels = np.ones((4, 4), np.float32), np.zeros(2, np.int64)
    linear_gradients = retrograd.LinearGradients(np.empty_like(x), np.empty_like(w), np.empty_like(gamma))
    calls["linear_forward"] = lambda: retrograd.linear_forward(x, w, beta, out=out)
    calls["linear_backward"] = lambda: retrograd.linear_backward(x, x, w, out=linear_gradients)
    calls["embedding_forward"] = lambda: retrograd.embedding_forward(labels, w, out=out)
    calls["embedding_backward"] = lambda: retrograd.embedding_backward(x, labels, 4, out=linear_gradients.dw)
    calls["softmax_cross_entropy"] = lambda: retrograd.softmax_cross_entropy(x, labels, out=out)
    calls["mean_squared_error"] = lambda: retrograd.mean_squared_error(x, x, out=out)
    calls["huber"] = lambda: retrograd.huber(x, x, out=out)
    states = [np.zeros_like(gamma), np.zeros_like(gamma)]
    calls["sgd_step"] = lambda: retrograd.sgd_step(gamma, beta, learning_rate=0.1)
    calls["adam_step"] = lambda: retrograd.adam_step(gamma, beta, *states, step=1)
    calls["rmsprop_step"] = lambda: retrograd.rmsprop_step(gamma, beta, states[0])
    calls["global_norm"] = lambda: retrograd.global_norm(gamma)
    sequence = x[:, None]
    cell = LstmWeights(np.ones((4, 4), np.float32), np.ones((4, 1), np.float32))
    y, hn, cn, lstm_cache = retrograd.lstm_forward(sequence, cell)
    assert lstm_cache is not None
    outputs, buffer = {"y": y, "hn": hn, "cn": cn}, np.empty(retrograd.lstm_cache_size(2, 1, 4, 1), np.uint8)
    lstm_gradients = LstmGradients(np.empty_like(sequence), LstmWeights(*map(np.empty_like, cell[:2])))
    calls["lstm_forward"] = lambda: retrograd.lstm_forward(sequence, cell, cache=buffer, out=outputs)
    calls["lstm_backward"] = lambda: retrograd.lstm_backward(y, lstm_cache, out=lstm_gradients)
    calls["lstm_cache"] = lambda: retrograd.lstm_cache(sequence, cell)
    calls["lstm_cache_size"] = lambda: retrograd.lstm_cache_size(2, 1, 4, 1)
    calls["release_memory"] = retrograd.release_memory
    calls["get_num_threads"] = retrograd.get_num_threads
    calls["set_num_threads"] = lambda: retrograd.set_num_threads(retrograd.get_num_threads())
    return {f"overhead_{name}": call for name, call in calls.items()}


def _bench_overhead(name: str, call: Callable[[], object], options: BenchOptions, machine: _Machine) -> BenchResult:
    _seconds_per_call(call)
    samples: list[float] = []
    deadline = clock() + min(options.budget, 0.2)
    while len(samples) < _LEAST_STEPS or clock() < deadline:
        samples.append(_seconds_per_call(call))
    quantiles = _quantiles(samples)
    row = BenchRow(
        name,
        "retrograd",
        "call",
        1,
        machine.isa,
        *quantiles,
        ratio_vs_torch=None,
        ratio_vs_plain=None,
        share_of_bound=None,
        gflops=None,
        added=None,
        tokens_per_second=None,
        peak_bytes=None,
        device=machine.device,
        version=retrograd.__version__,
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
