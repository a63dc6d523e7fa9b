"""The command ``retrograd bench``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import retrograd

from ... import _core
from . import programs
from .report import Column, Report, UsageError, positive

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of ``retrograd``."""
    bench = commands.add_parser(
        "bench",
        help="time functions, layers and training steps",
        description="Time functions, layers and training steps on this machine, next to PyTorch and JAX if they are "
        "installed.",
    )
    suites = bench.add_subparsers(title="suites", metavar="SUITE", required=True)
    method = (
        "Verify, then time each training forward and each backward (all gradients, given buffers), alternating with "
        "PyTorch, if it is installed, and with the row's bound. Times are medians in microseconds; 'vs torch' above 1 "
        "means faster than PyTorch. Rows named overhead_* time the smallest useful call of each function.\n\n"
    )
    norm = (
        "The bound of a norm is a streaming pass over arrays of the same size: 'of bound' is the share of the memory "
        "bandwidth available at that size."
    )
    lstm = (
        "The bound of an LSTM is its matrix products at the speed of NumPy's on 1024 x 1024 matrices, with as many "
        "threads. GFLOPS count the matrix products only, and only the real steps of a ragged batch, for which PyTorch "
        "gets a packed sequence. 'step' is forward plus backward. 'over plain' is the extra time compared with the "
        "same LSTM without the row's options. PyTorch has no 'reset', and gets a loop over steps.\n\n"
    )
    gru = (
        "Rows named gru_* and rnn_* are those of the LSTM for a GRU and a tanh RNN, with the same bound, and alternate "
        "with JAX too, if it is installed: a lax.scan under jit, which uses all threads in every row."
    )
    conv = (
        "The bound of a convolution is a matrix product of as many operations at the speed of NumPy's on 1024 x 1024 "
        "matrices, with as many threads. Rows named *_pool_* are pooling. 'step' is forward plus backward. 'MiB' is "
        "the peak memory of a first forward, of the backward after it, and of several steps, with results allocated by "
        "the library."
    )
    scan = (
        "The bound of a linear recurrence (scan_*) is a copy of as many bytes as its arrays have. PyTorch runs a loop "
        "over time; 'jax' is jax.lax.scan, 'assoc.' jax.lax.associative_scan, which use all threads in every row. Rows "
        "named min_gru_* are forward and backward of a minGRU as a program of retrograd.graph, alternating with a loop "
        "over time in PyTorch and with the usual form in logarithms ('log')."
    )
    products = (
        "Rows named lstm_products_* and linear_products_* are the large matrix products of an LSTM over all steps, and "
        "those of a linear layer, verified and then timed one by one, alternating with NumPy's product of the same "
        "shape, which is their bound, with as many threads. 'of peak' is the share of the peak of multiply-adds on "
        "registers."
    )
    apple = (
        "Rows named bnns_* and mps_* are calls of the front ends, alternating with the array functions doing the same "
        "work. Rows are timed only if the results are bitwise identical. 'added µs' is the overhead of a front-end "
        "call."
    )
    train = (
        "Rows named train_* are training steps of a character model (embedding, LSTM, layer norm, linear head, softmax "
        "cross entropy, Adam), alternating with PyTorch's, with its default or fused Adam, whichever is faster. Rows "
        "are timed only if the first losses agree. 'MiB' is the peak memory above that of the loaded library."
    )
    steps = (
        "Rows named step_* are whole training steps of small models (forward, loss, backward, Adam): a program of "
        "retrograd.graph, alternating with retrograd.nn, PyTorch eager and compiled, and JAX under jit, which uses all "
        "threads in every row. Rows are timed only if the first losses agree."
    )
    torch = (
        "Rows named torch_* are training steps of PyTorch models after retrograd.torch.replace, alternating with the "
        "same models without it. Rows are timed only if the first losses agree.\n\n"
        "Rows named bridge_* are forward and backward of a small layer in a chain; 'added µs' is how much longer it "
        "takes than the array functions, and 'autograd µs' is the time of layers with the same parameters that compute "
        "nothing.\n\n"
        "Rows named module_* are forward and backward of one layer before and after replace, those that end in _eval "
        "forward alone. Rows named adamw_* are steps of adam_step and of PyTorch's fused AdamW over the parameters of "
        "a model."
    )
    jax = (
        "Rows named jax_* are forward and backward of a layer of retrograd.jax under jit, alternating with the array "
        "functions; 'added µs' is what JAX adds."
    )
    for suite, names, help_, description in (
        ("norm", ["norm"], "normalization", method + norm),
        ("lstm", ["lstm"], "LSTM", method + lstm),
        ("gru", ["gru"], "GRU and RNN", method + lstm + gru),
        ("conv", ["conv"], "convolutions and pooling", method + conv),
        ("scan", ["scan"], "linear recurrences", method + scan),
        ("products", ["products"], "matrix products", products),
        ("apple", ["apple"], "overhead of the BNNS and MPS front ends", apple),
        ("train", ["train"], "training steps of a complete model", train),
        ("steps", ["steps"], "whole training steps of small models", steps),
        ("torch", ["torch"], "PyTorch models with retrograd's layers", torch),
        ("jax", ["jax"], "layers under JAX's jit", jax),
        (
            "all",
            ["norm", "lstm", "gru", "conv", "scan", "products", "apple", "train", "steps", "torch", "jax"],
            "every suite",
            "Run every suite. 'retrograd bench SUITE --help' says what each one measures.",
        ),
    ):
        _add_suite(suites.add_parser(suite, help=help_, description=description), names)
    programs.add_suite(suites)
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
    comparison.add_argument("old", metavar="OLD.csv", help="the earlier run")
    comparison.add_argument("new", metavar="NEW.csv", help="the later run")
    _add_threshold(comparison)
    comparison.set_defaults(run=_compare)


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
        "--threads", nargs="+", type=positive, default=[1, 2], metavar="N", help="thread counts (default: 1 2)"
    )
    suite.add_argument("--rounds", type=positive, metavar="N", help="rounds per row (default: 9, with --quick: 3)")
    suite.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        help="measuring time per row and thread count (default: 2, with --quick: 0.2)",
    )
    suite.add_argument(
        "--isa",
        metavar="LEVEL",
        help="run at this instruction-set level, and keep PyTorch, JAX, oneDNN, MKL and OpenBLAS at it (default: as "
        "the environment says)",
    )
    suite.add_argument(
        "--compare",
        metavar="OLD.csv",
        help="then compare with a file written by --csv, as 'bench compare' does; exit code 1 if a row became slower",
    )
    _add_threshold(suite)
    suite.add_argument("--csv", metavar="FILE", help="also write every measurement to this file, times in seconds")
    suite.add_argument(
        "--html", metavar="FILE", help="also write a page with charts to this file, without scripts or network access"
    )
    suite.add_argument("--quick", action="store_true", help="few rounds and little time, for a rough idea")
    suite.add_argument("--list", action="store_true", help="print the names of the rows and exit")
    suite.set_defaults(run=_bench, suites=names)


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


def _bench(options: argparse.Namespace) -> int:
    from .. import bench

    names = bench.bench_names(options.suites, options.rows)
    if not names:
        raise UsageError(f"no row matches {' '.join(options.rows)}; --list prints their names")
    if options.list:
        print("\n".join(names))
        return 0
    needed = {bench.SUITES[suite].needs for suite in options.suites}
    if len(needed) == 1 and (package := needed.pop()) is not None and not bench.is_installed(package):
        title = {"torch": "PyTorch", "jax": "JAX"}[package]
        raise UsageError(f"bench {options.suites[0]} needs {title}: pip install 'retrograd[{package}]'")
    old = None if options.compare is None else _read(options.compare)
    settings = bench.BenchOptions(
        options.rows,
        list(dict.fromkeys(options.threads)),
        options.rounds or (3 if options.quick else 9),
        options.budget or (0.2 if options.quick else 2.0),
    )
    columns = [
        Column("row", max(map(len, names)), right=False),
        Column("pass", 10 if "products" in options.suites else 8, right=False),
        Column("threads", 7),
        Column("retrograd µs", 12),
        Column("p20 to p80", 15),
    ]
    if any(bench.SUITES[suite].against_torch for suite in options.suites):
        columns += [Column("torch µs", 9), Column("vs torch", 8)]
    if "norm" in options.suites:
        columns.append(Column("kernels µs", 10))
    if {"norm", "lstm", "gru", "conv", "scan", "products"} & set(options.suites):
        columns += [Column("of bound", 8)]
    if {"lstm", "gru", "conv", "products"} & set(options.suites):
        columns += [Column("GFLOPS", 6)]
    if "products" in options.suites:
        columns += [Column("of peak", 7)]
    if {"lstm", "gru"} & set(options.suites):
        columns += [Column("over plain", 10)]
    if {"apple", "torch", "jax"} & set(options.suites):
        columns += [Column("arrays µs", 9), Column("added µs", 8)]
    if "torch" in options.suites:
        columns += [Column("autograd µs", 11)]
    if "scan" in options.suites:
        columns += [Column("log µs", 8), Column("assoc. µs", 9)]
    if "steps" in options.suites:
        columns += [Column("nn µs", 8), Column("compile µs", 10)]
    if {"gru", "scan", "steps"} & set(options.suites):
        columns += [Column("jax µs", 8)]
    if "train" in options.suites:
        columns += [Column("tokens/s", 8)]
    if {"conv", "train"} & set(options.suites):
        columns += [Column("MiB", 6), Column("torch MiB", 9)]
    overheads = sum(name.startswith("overhead_") for name in names)
    total = (len(names) - overheads) * len(settings.threads) + overheads
    wrong = False
    rows: list[Any] = []
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(bench.at_level(options.isa))
        except bench.LevelError as error:
            raise UsageError(f"--isa {options.isa}: {error}") from None
        csv_file = bench.CsvFile(_create(stack, "--csv", options.csv)) if options.csv else None
        page = _create(stack, "--html", options.html) if options.html else None
        notes = []
        report = stack.enter_context(Report(columns, total))
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
                notes.append(f"{result.name}{threads}: {note}")
                report.note(notes[-1])
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
        if page is not None:
            day = f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
            title = f"retrograd bench {' '.join(options.suites) if len(options.suites) == 1 else 'all'}"
            about = [f"{conditions[0]}; {conditions[2]}", "; ".join([*conditions[3:], day])]
            page.write(bench.bench_page(title, rows, about, notes))
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
    return 1 if wrong else 0


def _create(stack: contextlib.ExitStack, option: str, path: str) -> TextIO:
    """Open a file for writing before anything is measured, so that a bad path costs no time."""
    try:
        return stack.enter_context(open(path, "w", encoding="utf-8", newline=""))
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None


def _compare(options: argparse.Namespace) -> int:
    return 1 if _show_comparison(_read(options.old), _read(options.new), options.threshold) else 0


def _read(path: str) -> list[Any]:
    from .. import bench

    try:
        return bench.read_measurements(path)
    except bench.CsvError as error:
        raise UsageError(str(error)) from None


def _show_comparison(
    old: Sequence[Any],
    new: Sequence[Any],
    threshold: float,
    expected: Callable[[str, int], bool] = lambda case, threads: True,
) -> bool:
    """Print how the rows have changed; returns whether any became slower."""
    from .. import bench

    comparison = bench.compare_measurements(old, new, threshold, expected)
    columns = (
        Column("row", max((len(change.case) for change in comparison.changes), default=3), right=False),
        Column("pass", 10, right=False),
        Column("threads", 7),
        Column("old µs", 9),
        Column("new µs", 9),
        Column("old/new", 7),
        Column("noise", 6),
        Column("others", 6),
        Column("", 7, right=False),
    )
    with Report(columns, 0) as report:
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
                "kernels µs": time_of("kernels", row.pass_),
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
                "log µs": time_of("logarithms", row.pass_),
                "assoc. µs": time_of("associative", row.pass_),
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
