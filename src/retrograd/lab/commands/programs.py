"""The command ``retrograd bench programs``."""

from __future__ import annotations

import argparse
from typing import Any

import retrograd

from ... import _core
from .report import Column, Report, UsageError, matches, positive

__all__ = ["add_suite"]


def add_suite(suites: Any) -> None:
    """Add the command to the subparsers of ``retrograd bench``."""
    suite = suites.add_parser(
        "programs",
        help="public programs that train with PyTorch, each in an environment of its own",
        description="Small training jobs of public packages, plain and with retrograd.torch. Each package is installed "
        "into a virtual environment of its own over this one, which must have the PyTorch that the programs need: "
        "'make programs' makes such an environment and checks all of them. A job is timed only if the losses of the "
        "first steps agree and the expected layers are replaced. 'ratio' is the time of a training step with "
        "PyTorch's layers over that with retrograd's ('ours'), alternating in one process: the median over rounds of "
        "the ratio of medians. After the comma is the number of threads. With one thread times are CPU time.",
    )
    suite.add_argument(
        "--rows", nargs="+", default=[], metavar="PATTERN", help="only these programs, or jobs such as '*_lstm'"
    )
    suite.add_argument(
        "--threads", nargs="+", type=positive, default=[1, 2], metavar="N", help="thread counts (default: 1 2)"
    )
    suite.add_argument("--rounds", type=positive, default=9, metavar="N", help="rounds per job (default: 9)")
    suite.add_argument(
        "--budget",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="measuring time per job and thread count (default: 2)",
    )
    suite.add_argument("--check", action="store_true", help="check only, without timing")
    suite.add_argument("--list", action="store_true", help="print the names of the jobs and exit")
    suite.set_defaults(run=_programs)


def _programs(options: argparse.Namespace) -> int:
    from ..bench import cpu_model
    from ..programs import PROGRAMS, TORCH, InstallationError, Timing, check_torch, environment, run_program

    patterns = options.rows
    chosen = [
        (program, [job for job in program.jobs if matches(program.name, patterns) or matches(job.name, patterns)])
        for program in PROGRAMS
    ]
    names = [job.name for _, jobs in chosen for job in jobs]
    if not names:
        raise UsageError(f"no job matches {' '.join(options.rows)}; --list prints their names")
    if options.list:
        print("\n".join(names))
        return 0
    try:
        check_torch()
    except InstallationError as error:
        raise UsageError(str(error)) from None
    timing = Timing([] if options.check else list(dict.fromkeys(options.threads)), options.rounds, options.budget)
    columns = [
        Column("job", max(map(len, names)), right=False),
        Column("package", max(len(program.packages[0]) for program, jobs in chosen if jobs), right=False),
        Column("replaced", 26, right=False),
        Column("losses", 6, right=False),
    ]
    for number in timing.threads:
        columns += [Column(title, 13) for title in (f"torch ms, {number}", f"ours ms, {number}", f"ratio, {number}")]
    wrong = False
    with Report(columns, len(names)) as report:
        for program, jobs in chosen:
            if not jobs:
                continue
            report.start(program.name)
            try:
                python = environment(program)
            except InstallationError as error:
                raise UsageError(str(error)) from None
            for outcome in run_program(python, program, jobs, timing):
                report.advance()
                failed = bool(outcome.failures)
                wrong |= failed
                cells = [outcome.job, program.packages[0], outcome.layers, "WRONG" if failed else "agree"]
                for times in outcome.times:
                    cells += [f"{times.torch * 1e3:.2f}", f"{times.retrograd * 1e3:.2f}", f"{times.ratio:.2f}x"]
                report.row(cells + [""] * (len(columns) - len(cells)), not failed)
                for failure in outcome.failures:
                    report.note(f"{outcome.job}: {failure}")
        conditions = [cpu_model(), _core.isa(), f"torch {TORCH}", f"retrograd {retrograd.__version__}"]
        report.note("; ".join(conditions))
    return 1 if wrong else 0
