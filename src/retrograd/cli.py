"""The command line: ``retrograd train | sample | forecast | convert | info | verify | bench``.

Exit codes: 0 success; 1 a wrong result, or a failed run; 2 invalid options or data; 128 plus the signal number if a
signal ended it, so 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

import retrograd

from . import _core
from ._printing import in_a_line, print_anything, visible
from .convert.command import add_command as add_convert
from .convert.layers import ConvertError
from .ops import _threads
from .train.command import add_commands
from .train.run import RunError
from .train.settings import InputError

__all__ = ["main"]

_WRONG, _USAGE, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    print_anything()
    try:
        return _run(argv)
    except (_UsageError, InputError, ConvertError) as error:
        _report(error)
        return _USAGE
    except RunError as error:
        _report(error)
        return _WRONG
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as head does
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None:  # not of a write
            raise
        _drop_output()
        _report(f"the output could not be written: {error.strerror or error}")
        return _WRONG


def _run(argv: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(argv)
        code: int = options.run(options)
    finally:
        sys.stdout.flush()
    return code


def _report(error: object) -> None:
    """Print an error as one line; the names from files in it may contain terminal control characters."""
    print(f"retrograd: error: {in_a_line(str(error))}", file=sys.stderr)


def _drop_output() -> None:
    """Discard what could not be written, which Python would try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _UsageError(Exception):
    """An invalid command line that argparse cannot detect."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="retrograd",
        description=retrograd.__doc__,
        epilog="Exit codes: 0 success; 1 a wrong result, or a failed run; 2 invalid options or data; 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"retrograd {retrograd.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    add_commands(commands)
    add_convert(commands)

    info = commands.add_parser(
        "info",
        help="print version, instruction set, caches, threads and where they come from",
        description="Print the settings in effect and where they come from.",
    )
    info.set_defaults(run=_info)

    verify = commands.add_parser(
        "verify",
        help="check results against a float64 reference",
        description="Run test cases on this machine and compare the results with a float64 reference. Errors are in "
        "units of the tolerance: up to 1 is correct.",
    )
    verify.add_argument(
        "--rows", nargs="+", default=[], metavar="PATTERN", help="only cases that match, such as 'batch_norm_*_relu'"
    )
    verify.add_argument(
        "--isa",
        nargs="+",
        default=[],
        metavar="LEVEL",
        help="instruction-set levels (default: all that this machine can run)",
    )
    verify.add_argument(
        "--threads", nargs="+", type=_positive, default=[], metavar="N", help="thread counts (default: 1 2 7)"
    )
    verify.add_argument(
        "--all", action="store_true", help="also the benchmark's cases, which takes minutes, with 1 2 3 7 threads"
    )
    verify.add_argument(
        "--bits",
        action="store_true",
        help="compare digests of the results of every function with those in the package, which are the same on every "
        "machine, at every level and thread count",
    )
    verify.add_argument(
        "--write",
        action="store_true",
        help="with --bits: save the digests, after a change meant to change them",
    )
    verify.set_defaults(run=_verify)

    bench = commands.add_parser("bench", help="time the functions", description="Time the functions on this machine.")
    suites = bench.add_subparsers(title="suites", metavar="SUITE", required=True)
    method = (
        "Verify, then time each training forward and each backward (all gradients, given buffers), alternating with "
        "PyTorch, if it is installed, and with the row's bound. Times are medians in microseconds; 'vs torch' above 1 "
        "means faster than PyTorch. Rows named overhead_* time the smallest useful call of each function. "
    )
    norm = (
        "The bound of a norm is a streaming pass over arrays of the same size: 'of bound' is the share of the memory "
        "bandwidth available at that size. "
    )
    lstm = (
        "The bound of an LSTM is its matrix products at the speed of NumPy's on 1024 x 1024 matrices, with as many "
        "threads. GFLOPS count the matrix products only, and only the real steps of a ragged batch, for which PyTorch "
        "gets a packed sequence. 'step' is forward plus backward. 'over plain' is the extra time compared with the "
        "same LSTM without the row's options. "
    )
    conv = (
        "The bound of a convolution is a matrix product of as many operations at the speed of NumPy's on 1024 x 1024 "
        "matrices, with as many threads. Rows named *_pool_* are pooling. 'step' is forward plus backward. 'MiB' is "
        "the peak memory of a first forward, of the backward after it, and of several steps, with results allocated by "
        "the library. "
    )
    products = (
        "Rows named lstm_products_* and linear_products_* are the large matrix products of an LSTM over all steps, and "
        "those of a linear layer, verified and then timed one by one, alternating with NumPy's product of the same "
        "shape, which is their bound, with as many threads. 'of peak' is the share of the peak of multiply-adds on "
        "registers. "
    )
    apple = (
        "Rows named bnns_* and mps_* are calls of the front ends, alternating with the array functions doing the same "
        "work. Rows are timed only if the results are bitwise identical. 'added µs' is the overhead of a front-end "
        "call. "
    )
    train = (
        "Rows named train_* are training steps of a character model (embedding, LSTM, layer norm, linear head, softmax "
        "cross entropy, Adam), alternating with PyTorch's, with its default or fused Adam, whichever is faster. Rows "
        "are timed only if the first losses agree. 'MiB' is the peak memory above that of the loaded library. "
    )
    steps = (
        "Rows named step_* are whole training steps of small models (forward, loss, backward, Adam): a program of "
        "retrograd.graph, alternating with retrograd.nn, PyTorch eager and compiled, and JAX under jit, which uses all "
        "threads in every row. Rows are timed only if the first losses agree. "
    )
    torch = (
        "Rows named torch_* are training steps of PyTorch models after retrograd.torch.replace, alternating with the "
        "same models without it. Rows are timed only if the first losses agree. Rows named bridge_* are forward and "
        "backward of a small layer in a chain; 'added µs' is what it takes longer than the array functions, and "
        "'autograd µs' is the time of layers with the same parameters that compute nothing. "
    )
    jax = (
        "Rows named jax_* are forward and backward of a layer of retrograd.jax under jit, alternating with the array "
        "functions; 'added µs' is what JAX adds. "
    )
    for suite, names, help_, description in (
        ("norm", ["norm"], "normalization", method + norm),
        ("lstm", ["lstm"], "LSTM", method + lstm),
        ("conv", ["conv"], "convolutions and pooling", method + conv),
        ("products", ["products"], "matrix products", products),
        ("apple", ["apple"], "overhead of the BNNS and MPS front ends", apple),
        ("train", ["train"], "training steps of a complete model", train),
        ("steps", ["steps"], "whole training steps of small models", steps),
        ("torch", ["torch"], "PyTorch models with retrograd's layers", torch),
        ("jax", ["jax"], "layers under JAX's jit", jax),
        (
            "all",
            ["norm", "lstm", "conv", "products", "apple", "train", "steps", "torch", "jax"],
            "every suite",
            method + norm + lstm + conv + products + apple + train + steps + torch + jax,
        ),
    ):
        _add_suite(suites.add_parser(suite, help=help_, description=description), names)
    judged = (
        "A row is slower, and the exit code is 1, if its new time over the old exceeds the threshold by more than the "
        "noise: the spread of both medians from round to round, plus how far the other implementations of the row, "
        "which did not change, have moved ('others'). Within the noise it is marked 'slower?'."
    )
    comparison = suites.add_parser(
        "compare",
        help="compare two CSV files of earlier runs",
        description="Compare retrograd's times in two files written with --csv. 'old/new' above 1 means faster than "
        "before. " + judged,
    )
    comparison.add_argument("old", metavar="OLD.csv")
    comparison.add_argument("new", metavar="NEW.csv")
    _add_threshold(comparison)
    comparison.set_defaults(run=_compare)
    return parser


def _add_threshold(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threshold",
        type=_ratio,
        default=1.1,
        metavar="RATIO",
        help="the ratio of new to old time from which a row is slower (default: 1.1)",
    )


def _add_suite(suite: argparse.ArgumentParser, names: list[str]) -> None:
    suite.add_argument(
        "--rows", nargs="+", default=[], metavar="PATTERN", help="only rows that match, such as 'layer_norm_*'"
    )
    suite.add_argument(
        "--threads", nargs="+", type=_positive, default=[1, 2], metavar="N", help="thread counts (default: 1 2)"
    )
    suite.add_argument("--rounds", type=_positive, metavar="N", help="rounds per row (default: 9, with --quick: 3)")
    suite.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        help="measuring time per row and thread count (default: 2, with --quick: 0.2)",
    )
    suite.add_argument(
        "--isa",
        metavar="LEVEL",
        help="run at this instruction-set level, and keep PyTorch, oneDNN, MKL and OpenBLAS at it (default: as the "
        "environment says)",
    )
    suite.add_argument(
        "--compare",
        metavar="OLD.csv",
        help="then compare with a file written by --csv, as 'bench compare' does; exit code 1 if a row became slower",
    )
    _add_threshold(suite)
    suite.add_argument("--csv", metavar="FILE", help="also write every measurement to this file, times in seconds")
    suite.add_argument("--quick", action="store_true", help="few rounds and little time, for a rough idea")
    suite.add_argument("--list", action="store_true", help="print the names of the rows and exit")
    suite.set_defaults(run=_bench, suites=names)


def _positive(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 4096:
        raise argparse.ArgumentTypeError(f"{value} is not from 1 to 4096")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def _ratio(text: str) -> float:
    value = float(text)
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a ratio of at least 1")
    return value


# ---- output ----------------------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    title: str
    width: int  # of a plain line
    right: bool = True


class _Report:
    """A table. On a terminal: a progress bar, then the complete table. Otherwise: one line per row, immediately."""

    def __init__(self, columns: Sequence[_Column], total: int) -> None:
        self._columns = columns
        self._total = total
        self._rows: list[tuple[list[str], bool]] = []
        self._notes: list[str] = []
        self._progress: Any = None
        self._task: Any = None
        self._terminal = sys.stdout.isatty()

    def __enter__(self) -> _Report:
        if self._terminal:
            from rich import progress

            self._progress = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                transient=True,
            )
            self._task = self._progress.add_task("", total=self._total)
            self._progress.start()
        else:
            print(self._line([column.title for column in self._columns]), flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is None:
            return
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        self._progress.stop()
        table = Table(box=SIMPLE, pad_edge=False)
        for column in self._columns:
            table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
        for cells, good in self._rows:
            table.add_row(*map(Text, cells), style=None if good else "bold red")
        console = Console()
        if self._rows:
            console.print(table)
        for note in self._notes:
            console.print(note, markup=False, highlight=False)

    def _line(self, cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(column.width) if column.right else cell.ljust(column.width)
            for cell, column in zip(cells, self._columns, strict=True)
        ]
        return "  ".join(padded).rstrip()

    def row(self, cells: list[str], good: bool = True) -> None:
        cells = [in_a_line(cell) for cell in cells]  # the cells of bench compare come from files
        if self._terminal:
            self._rows.append((cells, good))
        else:
            print(self._line(cells), flush=True)

    def note(self, text: str) -> None:
        text = visible(text)
        if self._terminal:
            self._notes.append(text)
        else:
            print(text, flush=True)

    def start(self, what: str) -> None:
        """Show what is being worked on."""
        if self._progress is not None:
            self._progress.update(self._task, description=what)

    def advance(self) -> None:
        """Advance the progress bar by one."""
        if self._progress is not None:
            self._progress.advance(self._task)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# ---- info ------------------------------------------------------------------------------------------------------------


def _info(options: argparse.Namespace) -> int:
    from .lab.bench import cache_sizes, cpu_model

    levels = ", ".join(_core.isa_levels())
    lowered = os.environ.get("RETROGRAD_ISA", "").strip()
    lock = "with" if getattr(sys, "_is_gil_enabled", lambda: True)() else "without"
    lines = {
        "retrograd": retrograd.__version__,
        "processor": cpu_model(),
        "caches": cache_sizes(),
        "ISA level": f"{_core.isa()} ({f'RETROGRAD_ISA={lowered}; ' if lowered else ''}this machine can run {levels}"
        f"{'; scalar is the reference level, many times slower' if _core.isa() == 'scalar' else ''})",
        "threads": f"{retrograd.get_num_threads()} ({_why_threads()})",
        "BLAS": "none: matrix products are retrograd's own kernels",
        "data types": "float32, float64; normalization also float16, bfloat16",
        "Python": f"{platform.python_version()}, {lock} the GIL",
        "NumPy": np.__version__,
    }
    for name, value in lines.items():
        print(f"{name:<12}{value}")
    return 0


def _why_threads() -> str:
    given = os.environ.get("RETROGRAD_NUM_THREADS", "").strip()
    if given:
        return f"RETROGRAD_NUM_THREADS={given}"
    cpus, quota = _threads._affinity(), _threads._cgroup_quota()
    reason = f"CPUs this process may run on: {cpus}"
    return reason + ("; no quota" if quota is None else f"; cgroup quota: {quota:g}")


# ---- verify ----------------------------------------------------------------------------------------------------------


def _levels(options: argparse.Namespace) -> list[str]:
    levels = list(dict.fromkeys(options.isa)) or list(_core.isa_levels())
    for level in levels:
        if level not in _core.isa_levels():
            raise _UsageError(f"--isa {level}: this machine can run {', '.join(_core.isa_levels())}")
    return levels


def _verify_bits(options: argparse.Namespace) -> int:
    from .lab import bits

    levels = _levels(options)
    if options.write:
        if options.rows or options.isa or options.threads:
            raise _UsageError("--write saves all digests: it takes no --rows, --isa or --threads")
        bits.write_digests(bits.digests())
        print(f"wrote {bits.SAVED}; the other levels must agree:")
    if not any(_matches(name, options.rows) for name in bits.saved_digests()):
        raise _UsageError(f"no problem matches {' '.join(options.rows)}")
    threads = list(dict.fromkeys(options.threads)) or [1, 2, 7]
    rows = [row for row in bits.compare_bits(levels, threads) if _matches(row.name, options.rows)]
    different = [row for row in rows if not row.ok]
    for row in different:
        print(f"{row.name}: DIFFERENT BITS at {row.isa} with {row.threads} threads")
    problems = len({row.name for row in rows})
    what = f"{problems} problems, {len(rows)} runs ({', '.join(levels)}; {', '.join(map(str, threads))} threads)"
    print(f"{what}: {f'{len(different)} with different bits' if different else 'all bits as in the package'}.")
    return _WRONG if different else 0


def _verify(options: argparse.Namespace) -> int:
    if options.bits:
        if options.all:
            raise _UsageError("--all is not for --bits, which has one set of problems")
        return _verify_bits(options)
    if options.write:
        raise _UsageError("--write is only for --bits")
    from .lab import cases as problems
    from .lab import verify

    norms: tuple[Any, ...] = problems.NORM_VERIFY_CASES + (problems.NORM_BENCH_CASES if options.all else ())
    lstms: tuple[Any, ...] = problems.LSTM_VERIFY_CASES + (problems.LSTM_BENCH_CASES if options.all else ())
    verifiers: dict[Any, Callable[..., list[Any]]] = {
        **dict.fromkeys(norms, verify.verify_norm),
        **dict.fromkeys(lstms, verify.verify_lstm),
    }
    cases = [case for case in verifiers if _matches(case.name, options.rows)]
    if not cases:
        raise _UsageError(f"no case matches {' '.join(options.rows)}")
    levels = _levels(options)
    threads = list(dict.fromkeys(options.threads)) or ([1, 2, 3, 7] if options.all else [1, 2, 7])

    columns = (
        _Column("case", max(len(case.name) for case in cases), right=False),
        _Column("error", 8),
        _Column("result", 9, right=False),
        _Column("ISA", 6, right=False),
        _Column("", 5, right=False),
    )
    runs = wrong = 0
    worst = 0.0
    with _Report(columns, len(cases) * len(levels) * len(threads)) as report:
        for case in cases:
            report.start(case.name)
            rows = verifiers[case]([case], levels, threads, progress=lambda row: report.advance())
            row = max(rows, key=lambda row: row.error)
            good = all(row.ok for row in rows)
            report.row([case.name, f"{row.error:.3f}", row.what, row.isa, "" if good else "WRONG"], good)
            runs += len(rows)
            wrong += not good
            worst = max(worst, row.error)
        what = f"{len(cases)} cases, {runs} runs ({', '.join(levels)}; {', '.join(map(str, threads))} threads)"
        if wrong:
            report.note(f"{what}: {wrong} cases WRONG.")
            report.note(
                "Errors are in units of the tolerance. An error of inf in 'bits' means that results depend on the "
                "thread count."
            )
        else:
            report.note(
                f"{what}: all within tolerance, bitwise identical at any thread count; largest error {worst:.3f} "
                "tolerances."
            )
    return _WRONG if wrong else 0


# ---- bench -----------------------------------------------------------------------------------------------------------


def _bench(options: argparse.Namespace) -> int:
    from .lab import bench

    names = bench.bench_names(options.suites, options.rows)
    if not names:
        raise _UsageError(f"no row matches {' '.join(options.rows)}; --list prints their names")
    if options.list:
        print("\n".join(names))
        return 0
    old = None if options.compare is None else _read(options.compare)
    settings = bench.BenchOptions(
        options.rows,
        list(dict.fromkeys(options.threads)),
        options.rounds or (3 if options.quick else 9),
        options.budget or (0.2 if options.quick else 2.0),
    )
    columns = [
        _Column("row", max(map(len, names)), right=False),
        _Column("pass", 10 if "products" in options.suites else 8, right=False),
        _Column("threads", 7),
        _Column("retrograd µs", 12),
        _Column("p20 to p80", 15),
    ]
    if any(bench.SUITES[suite].against_torch for suite in options.suites):
        columns += [_Column("torch µs", 9), _Column("vs torch", 8)]
    if {"norm", "lstm", "conv", "products"} & set(options.suites):
        columns += [_Column("of bound", 8)]
    if {"lstm", "conv", "products"} & set(options.suites):
        columns += [_Column("GFLOPS", 6)]
    if "products" in options.suites:
        columns += [_Column("of peak", 7)]
    if "lstm" in options.suites:
        columns += [_Column("over plain", 10)]
    if {"apple", "torch", "jax"} & set(options.suites):
        columns += [_Column("arrays µs", 9), _Column("added µs", 8)]
    if "torch" in options.suites:
        columns += [_Column("autograd µs", 11)]
    if "steps" in options.suites:
        columns += [_Column("nn µs", 8), _Column("compile µs", 10), _Column("jax µs", 8)]
    if "train" in options.suites:
        columns += [_Column("tokens/s", 8)]
    if {"conv", "train"} & set(options.suites):
        columns += [_Column("MiB", 6), _Column("torch MiB", 9)]
    overheads = sum(name.startswith("overhead_") for name in names)
    total = (len(names) - overheads) * len(settings.threads) + overheads
    wrong = False
    rows: list[Any] = []
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(bench.at_level(options.isa))
        except bench.LevelError as error:
            raise _UsageError(f"--isa {options.isa}: {error}") from None
        csv_file = None
        if options.csv:
            try:
                csv_file = bench.CsvFile(stack.enter_context(open(options.csv, "w", encoding="utf-8", newline="")))
            except OSError as error:
                raise _UsageError(f"--csv {options.csv}: {error.strerror}") from None
        report = stack.enter_context(_Report(columns, total))
        for result in bench.bench_rows(options.suites, settings, report.start):
            report.advance()
            rows += result.rows
            if csv_file is not None:
                csv_file.write(result.rows)
            for cells in _bench_lines(result):
                report.row([cells[column.title] for column in columns])
            if result.failed:
                wrong = True
                words = [result.name, "WRONG", str(result.threads)]
                report.row(words + [""] * (len(columns) - len(words)), good=False)
            for note in result.notes:
                threads = f", threads {result.threads}" if result.threads else ""
                report.note(f"{result.name}{threads}: {note}")
        conditions = [bench.cpu_model(), bench.cache_sizes(), f"{_core.isa()}, retrograd {retrograd.__version__}"]
        if bench.torch_takes_part(options.suites, options.rows):
            torch = bench.torch_version()
            conditions.append(
                "PyTorch is not installed: only retrograd is timed" if torch is None else f"torch {torch}"
            )
        if overheads < len(names):
            conditions.append(f"float32, medians of {settings.rounds} rounds")
        if bench.restrictions():
            conditions.append(f"restricted by {bench.restrictions()}")
        report.note("; ".join(conditions))
    if old is not None:
        print()
        selected = set(names)
        new = [bench.Measurement.of(row) for row in rows]
        wrong |= _show_comparison(
            old,
            new,
            options.threshold,
            lambda case, threads: case in selected and (threads in settings.threads or case.startswith("overhead_")),
        )
    return _WRONG if wrong else 0


def _compare(options: argparse.Namespace) -> int:
    return _WRONG if _show_comparison(_read(options.old), _read(options.new), options.threshold) else 0


def _read(path: str) -> list[Any]:
    from .lab import bench

    try:
        return bench.read_measurements(path)
    except bench.CsvError as error:
        raise _UsageError(str(error)) from None


def _show_comparison(
    old: Sequence[Any],
    new: Sequence[Any],
    threshold: float,
    expected: Callable[[str, int], bool] = lambda case, threads: True,
) -> bool:
    """Print how the rows have changed; returns whether any became slower."""
    from .lab import bench

    comparison = bench.compare_measurements(old, new, threshold, expected)
    columns = (
        _Column("row", max((len(change.case) for change in comparison.changes), default=3), right=False),
        _Column("pass", 10, right=False),
        _Column("threads", 7),
        _Column("old µs", 9),
        _Column("new µs", 9),
        _Column("old/new", 7),
        _Column("noise", 6),
        _Column("others", 6),
        _Column("", 7, right=False),
    )
    with _Report(columns, 0) as report:
        for change in comparison.changes:
            cells = [change.case, change.pass_, str(change.threads)]
            cells += [_microseconds(change.old), _microseconds(change.new), f"{change.ratio:.2f}x"]
            cells += [f"±{change.noise:.0%}", _shown("{:.2f}x", change.others), change.verdict]
            report.row(cells, good=change.verdict != "slower")
        for title, keys in (("only in the old run", comparison.only_old), ("only in the new run", comparison.only_new)):
            for case, pass_, threads in keys:
                report.note(f"{title}: {case} {pass_}, threads {threads}")
        for difference in comparison.differences:
            report.note(f"not the same in both runs: {difference}")
        counts = {word: sum(change.verdict == word for change in comparison.changes) for word in ("faster", "slower")}
        report.note(
            f"rows compared: {len(comparison.changes)}; {counts['faster']} faster, {counts['slower']} slower by more "
            f"than {threshold:g}x and the noise"
        )
    return bool(comparison.slower)


def _bench_lines(result: Any) -> Iterator[dict[str, str]]:
    """Yield retrograd's rows as cells by column title, with the times of the others."""
    others = {(row.provider, row.pass_): row for row in result.rows if row.provider != "retrograd"}

    def time_of(provider: str, pass_: str) -> str:
        return _microseconds(others[provider, pass_].p50) if (provider, pass_) in others else ""

    for row in result.rows:
        if row.provider == "retrograd":
            yield {
                "row": row.case,
                "pass": row.pass_,
                "threads": str(row.threads),
                "retrograd µs": _microseconds(row.p50),
                "p20 to p80": f"{_microseconds(row.p20)} to {_microseconds(row.p80)}",
                "torch µs": time_of("torch", row.pass_),
                "vs torch": _shown("{:.2f}x", row.ratio_vs_torch),
                "of bound": _shown("{:.0%}", row.share_of_bound),
                "GFLOPS": _shown("{:.0f}" if (row.gflops or 0) >= 10 else "{:.1f}", row.gflops),
                "of peak": _shown("{:.0%}", row.share_of_peak),
                "over plain": "" if row.ratio_vs_plain is None else f"{1 / row.ratio_vs_plain - 1:+.0%}",
                "arrays µs": time_of("arrays", row.pass_),
                "added µs": "" if row.added is None else f"{row.added * 1e6:+.1f}",
                "autograd µs": time_of("autograd", row.pass_),
                "nn µs": time_of("nn", row.pass_),
                "compile µs": time_of("compile", row.pass_),
                "jax µs": time_of("jax", row.pass_),
                "tokens/s": _shown("{:.0f}", row.tokens_per_second),
                "MiB": _mebibytes(row),
                "torch MiB": _mebibytes(others.get(("torch", row.pass_))),
            }


def _shown(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


def _mebibytes(row: Any) -> str:
    return "" if row is None or row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f}"


def _microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
