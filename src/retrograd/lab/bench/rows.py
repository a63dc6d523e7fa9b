"""Suites, their rows, and the CSV file."""

from __future__ import annotations

import contextlib
import csv
import fnmatch
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TextIO

import numpy as np

import retrograd

from ... import _core
from ..cases import (
    GRU_BENCH_CASES,
    LSTM_BENCH_CASES,
    LSTM_OPTION_BENCH_CASES,
    NORM_BENCH_CASES,
    RNN_BENCH_CASES,
    make_norm_data,
)
from .apple import APPLE_CASES, apple_contest, apple_failures
from .conv import CONV_CASES
from .drop_in import DROP_IN_CASES, drop_in_contest, drop_in_failures, make_drop_in
from .images import image_contest, image_failures
from .jax_layers import JAX_CASES, jax_contest, jax_failures, make_jax_layer
from .levels import restrictions
from .norm import norm_contest, norm_failures
from .overhead import overhead_calls
from .pool import POOL_CASES
from .products import PRODUCT_CASES, make_product_data, product_contest, product_failures
from .recurrent import make_bench_data, recurrent_contest, recurrent_failures
from .scan import SCAN_CASES, make_scan, scan_contest, scan_failures
from .sgemm import blas_core
from .steps import STEP_CASES, make_step, step_contest, step_failures
from .timing import (
    LEAST_STEPS,
    Contest,
    ForeignLoad,
    Machine,
    Times,
    cache_sizes,
    clock,
    cpu_model,
    import_torch,
    median_difference,
    median_ratio,
    quantiles,
    seconds_per_call,
    take_turns,
)
from .train import (
    TRAIN_CASES,
    make_train_data,
    train_contest,
    train_failures,
)

__all__ = [
    "CSV_COLUMNS",
    "SUITES",
    "BenchOptions",
    "BenchResult",
    "BenchRow",
    "CsvFile",
    "bench_names",
    "bench_rows",
    "is_installed",
    "torch_takes_part",
]

_QUIET_CPUS: Final = 0.15
_OF_TORCH: Final = ("torch", "kernels", "compile", "logarithms", "autograd")
_OF_JAX: Final = ("jax", "associative")


class BenchOptions(NamedTuple):
    patterns: Sequence[str] = ()  # of row names; empty: every row
    threads: Sequence[int] = (1, 2)
    rounds: int = 9
    budget: float = 2.0  # seconds of timing per row and thread count


class BenchRow(NamedTuple):
    """One line of the CSV file. Times are in seconds; None where a value does not apply."""

    case: str
    provider: str
    pass_: str
    threads: int
    isa: str
    p20: float
    p50: float
    p80: float
    spread: float  # of the median from round to round: half of p80 - p20 of the rounds' medians, as a share of p50
    ratio_vs_torch: float | None  # PyTorch's time / this time
    ratio_vs_plain: float | None  # time without this row's options / this time
    over_retrograd: float | None  # of the others: this time / retrograd's
    share_of_bound: float | None  # the bound's time / this time
    share_of_peak: float | None  # the time at the peak of multiply-adds / this time
    gflops: float | None  # of matrix products
    added: float | None  # this time minus the array functions'
    tokens_per_second: float | None
    peak_bytes: int | None  # peak memory above the level before the step; of training, above the loaded library
    device: str
    caches: str  # L1, L2, last level, and how many CPUs share that
    environment: str  # variables that keep a library at a lower level
    version: str


CSV_COLUMNS: Final = tuple(field.rstrip("_") for field in BenchRow._fields)


class BenchResult(NamedTuple):
    """A row's measurements at one thread count, or the reasons why there are none."""

    name: str
    threads: int
    rows: tuple[BenchRow, ...]
    failed: bool = False
    notes: tuple[str, ...] = ()


class _Suite(NamedTuple):
    cases: Sequence[Any]
    make_data: Callable[[Any], Any]
    failures: Callable[[Any, str, Sequence[int]], Iterator[str]]
    contest: Callable[[Any, Any, int, Machine, contextlib.ExitStack], Contest]
    overhead: Callable[[str], bool]  # whether a function belongs to this suite
    against_torch: bool = True
    needs: str | None = None  # a package without which there is nothing to time


SUITES: Final[Mapping[str, _Suite]] = {
    "norm": _Suite(
        NORM_BENCH_CASES,
        make_norm_data,
        norm_failures,
        norm_contest,
        lambda name: not name.startswith(("lstm_", "gru_", "rnn_", "scan_")),
    ),
    "lstm": _Suite(
        (*LSTM_BENCH_CASES, *LSTM_OPTION_BENCH_CASES),
        make_bench_data,
        recurrent_failures,
        recurrent_contest,
        lambda name: name.startswith("lstm_"),
    ),
    "gru": _Suite(
        (*GRU_BENCH_CASES, *RNN_BENCH_CASES),
        make_bench_data,
        recurrent_failures,
        recurrent_contest,
        lambda name: name.startswith(("gru_", "rnn_")),
    ),
    "conv": _Suite(
        (*CONV_CASES, *POOL_CASES),
        lambda case: case.make(),
        image_failures,
        image_contest,
        lambda name: False,
    ),
    "scan": _Suite(SCAN_CASES, make_scan, scan_failures, scan_contest, lambda name: name.startswith("scan_")),
    "products": _Suite(
        PRODUCT_CASES,
        make_product_data,
        product_failures,
        product_contest,
        lambda name: False,
        against_torch=False,
    ),
    "apple": _Suite(
        APPLE_CASES,
        lambda case: case.make(),
        apple_failures,
        apple_contest,
        lambda name: False,
        against_torch=False,
    ),
    "train": _Suite(
        TRAIN_CASES,
        make_train_data,
        lambda case, isa, threads: train_failures(case, import_torch(), threads),
        train_contest,
        lambda name: False,
    ),
    "steps": _Suite(STEP_CASES, make_step, step_failures, step_contest, lambda name: False),
    "torch": _Suite(
        DROP_IN_CASES,
        make_drop_in,
        drop_in_failures,
        drop_in_contest,
        lambda name: False,
        needs="torch",
    ),
    "jax": _Suite(
        JAX_CASES,
        make_jax_layer,
        jax_failures,
        jax_contest,
        lambda name: False,
        against_torch=False,
        needs="jax",
    ),
}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _overheads(suite: _Suite, patterns: Sequence[str]) -> list[str]:
    names = (name for name in overhead_calls() if suite.overhead(name.removeprefix("overhead_")))
    return [name for name in names if _matches(name, patterns)]


def bench_names(suites: Sequence[str] = tuple(SUITES), patterns: Sequence[str] = ()) -> list[str]:
    """Return the names of the suites' rows that match the patterns."""
    names = []
    for suite in (SUITES[name] for name in suites):
        names += [case.name for case in suite.cases if _matches(case.name, patterns)] + _overheads(suite, patterns)
    return names


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def torch_takes_part(suites: Sequence[str], patterns: Sequence[str] = ()) -> bool:
    """Return whether any selected row is compared with PyTorch."""
    rows = (case.name for name in suites if SUITES[name].against_torch for case in SUITES[name].cases)
    return any(_matches(row, patterns) for row in rows)


def bench_rows(
    suites: Sequence[str], options: BenchOptions, started: Callable[[str], None] | None = None
) -> Iterator[BenchResult]:
    """Measure every case at every thread count, then the overheads. `started` is called with the name of each."""
    machine = Machine(cpu_model(), _core.isa(), None, cache_sizes(), restrictions())
    calls = overhead_calls()
    for suite in (SUITES[name] for name in suites):
        for case in suite.cases:
            if not _matches(case.name, options.patterns):
                continue
            if started is not None:
                started(case.name)
            if suite.against_torch:
                machine = machine._replace(torch=import_torch())
            if suite.needs is not None and not is_installed(suite.needs):
                yield BenchResult(case.name, 0, (), notes=(f"not timed, because {suite.needs} is not installed",))
                continue
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
    suite: _Suite, case: Any, data: Any, threads: int, options: BenchOptions, machine: Machine
) -> BenchResult:
    with contextlib.ExitStack() as stack:
        contest = suite.contest(case, data, threads, machine, stack)
        load = ForeignLoad(contest.child_seconds)
        times = take_turns(contest.slots, options.rounds, options.budget)
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
    contest: Contest,
    times: Sequence[Sequence[Times]],
    machine: Machine,
) -> Iterator[BenchRow]:
    medians: dict[str, list[float]] = {}
    samples: dict[str, list[float]] = {}
    for slot, records in zip(contest.slots, times, strict=True):
        # The fastest of a slot counts in each round: the best of several streaming passes is the bound.
        provider = slot[0].name
        medians[provider] = [min(values) for values in zip(*(r.medians[index] for r in records), strict=True)]
        samples[provider] = min((r.samples[index] for r in records), key=statistics.median)

    def ratio(peer: str | None, provider: str) -> float | None:
        if peer not in medians or peer == provider:
            return None
        return median_ratio(medians[peer], medians[provider])

    ours = contest.slots[0][0].name
    added = median_difference(medians[ours], medians["arrays"]) if "arrays" in medians else None
    for provider, values in samples.items():
        spread = quantiles(values)
        yield BenchRow(
            name,
            provider,
            pass_,
            threads,
            _isa_of(provider, machine),
            *spread,
            _spread(medians[provider]),
            ratio("torch", provider) if provider == ours else None,
            ratio("plain", provider) if provider == ours else None,
            None if provider == ours else median_ratio(medians[provider], medians[ours]),
            ratio(contest.bound, provider),
            ratio("peak", provider),
            None if contest.flops is None else contest.flops[index] / spread[1] / 1e9,
            added if provider == ours else None,
            None if contest.tokens is None else contest.tokens / spread[1],
            contest.peaks.get((provider, pass_)),
            machine.device,
            machine.caches,
            machine.environment,
            _version_of(provider, machine),
        )


def _spread(values: Sequence[float]) -> float:
    p20, p50, p80 = quantiles(values)
    return (p80 - p20) / 2 / p50


def _isa_of(provider: str, machine: Machine) -> str:
    if provider in _OF_TORCH:
        assert machine.torch is not None
        return str(machine.torch.backends.cpu.get_cpu_capability()).lower()
    return blas_core() if provider == "sgemm" else machine.isa


def _version_of(provider: str, machine: Machine) -> str:
    if provider in _OF_TORCH:
        assert machine.torch is not None
        return str(machine.torch.__version__)
    if provider in _OF_JAX:
        return str(importlib.import_module("jax").__version__)
    return np.__version__ if provider == "sgemm" else retrograd.__version__


def _bench_overhead(name: str, call: Callable[[], object], options: BenchOptions, machine: Machine) -> BenchResult:
    seconds_per_call(call)
    samples: list[float] = []
    deadline = clock() + min(options.budget, 0.2)
    while len(samples) < LEAST_STEPS or clock() < deadline:
        samples.append(seconds_per_call(call))
    spread = quantiles(samples)
    row = BenchRow(
        name,
        "retrograd",
        "call",
        1,
        machine.isa,
        *spread,
        spread=_spread(samples),
        ratio_vs_torch=None,
        ratio_vs_plain=None,
        over_retrograd=None,
        share_of_bound=None,
        share_of_peak=None,
        gflops=None,
        added=None,
        tokens_per_second=None,
        peak_bytes=None,
        device=machine.device,
        caches=machine.caches,
        environment=machine.environment,
        version=retrograd.__version__,
    )
    return BenchResult(name, 1, (row,))


class CsvFile:
    """A CSV file, flushed after every row, so that an interruption loses nothing."""

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
