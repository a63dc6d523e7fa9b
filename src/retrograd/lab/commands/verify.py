"""The command ``retrograd verify``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ... import _core
from .report import Column, Report, UsageError, matches, positive

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of ``retrograd``."""
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
        "--threads", nargs="+", type=positive, default=[], metavar="N", help="thread counts (default: 1 2 7)"
    )
    verify.add_argument(
        "--all",
        action="store_true",
        help="run the benchmark's cases too, and with 1 2 3 7 threads, which takes minutes",
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


def _levels(options: argparse.Namespace) -> list[str]:
    levels = list(dict.fromkeys(options.isa)) or list(_core.isa_levels())
    for level in levels:
        if level not in _core.isa_levels():
            raise UsageError(f"--isa {level}: this machine can run {', '.join(_core.isa_levels())}")
    return levels


def _in_words(threads: list[int]) -> str:
    return f"{', '.join(map(str, threads))} thread{'s' * (threads != [1])}"


def _verify_bits(options: argparse.Namespace) -> int:
    from .. import bits

    levels = _levels(options)
    if options.write:
        if options.rows or options.isa or options.threads:
            raise UsageError("--write saves all digests: it takes no --rows, --isa or --threads")
        bits.write_digests(bits.digests())
        print(f"wrote {bits.SAVED}; the other levels must agree:")
    if not any(matches(name, options.rows) for name in bits.saved_digests()):
        raise UsageError(f"no problem matches {' '.join(options.rows)}")
    threads = list(dict.fromkeys(options.threads)) or [1, 2, 7]
    rows = [row for row in bits.compare_bits(levels, threads) if matches(row.name, options.rows)]
    different = [row for row in rows if not row.ok]
    for row in different:
        print(f"{row.name}: DIFFERENT BITS at {row.isa} with {row.threads} threads")
    problems = len({row.name for row in rows})
    what = f"{problems} problems, {len(rows)} runs ({', '.join(levels)}; {_in_words(threads)})"
    print(f"{what}: {f'{len(different)} with different bits' if different else 'all bits as in the package'}.")
    return 1 if different else 0


def _verify(options: argparse.Namespace) -> int:
    if options.bits:
        if options.all:
            raise UsageError("--all is not for --bits, which has one set of problems")
        return _verify_bits(options)
    if options.write:
        raise UsageError("--write is only for --bits")
    from .. import cases as problems
    from .. import verify

    norms: tuple[Any, ...] = problems.NORM_VERIFY_CASES + (problems.NORM_BENCH_CASES if options.all else ())
    lstms: tuple[Any, ...] = (
        problems.LSTM_VERIFY_CASES + problems.LSTM_OPTION_CASES + (problems.LSTM_BENCH_CASES if options.all else ())
    )
    verifiers: dict[Any, Callable[..., list[Any]]] = {
        **dict.fromkeys(norms, verify.verify_norm),
        **dict.fromkeys(lstms, verify.verify_lstm),
        **dict.fromkeys(problems.GRU_VERIFY_CASES, verify.verify_gru),
        **dict.fromkeys(problems.RNN_VERIFY_CASES, verify.verify_rnn),
    }
    cases = [case for case in verifiers if matches(case.name, options.rows)]
    if not cases:
        raise UsageError(f"no case matches {' '.join(options.rows)}")
    levels = _levels(options)
    threads = list(dict.fromkeys(options.threads)) or ([1, 2, 3, 7] if options.all else [1, 2, 7])

    columns = (
        Column("case", max(len(case.name) for case in cases), right=False),
        Column("error", 8),
        Column("result", 9, right=False),
        Column("ISA", 6, right=False),
        Column("", 5, right=False),
    )
    runs = wrong = 0
    worst = 0.0
    with Report(columns, len(cases) * len(levels) * len(threads)) as report:
        for case in cases:
            report.start(case.name)
            rows = verifiers[case]([case], levels, threads, progress=lambda row: report.advance())
            row = max(rows, key=lambda row: row.error)
            good = all(row.ok for row in rows)
            report.row([case.name, f"{row.error:.3f}", row.what, row.isa, "" if good else "WRONG"], good)
            runs += len(rows)
            wrong += not good
            worst = max(worst, row.error)
        what = f"{len(cases)} cases, {runs} runs ({', '.join(levels)}; {_in_words(threads)})"
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
    return 1 if wrong else 0
