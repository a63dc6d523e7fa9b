"""The command ``retrograd info``."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from typing import Any

import numpy as np

import retrograd

from ... import _core
from ...ops import _threads

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of ``retrograd``."""
    info = commands.add_parser(
        "info",
        help="print version, instruction set, caches, threads and where they come from",
        description="Print the settings in effect and where they come from.",
    )
    info.set_defaults(run=_info)


def _info(options: argparse.Namespace) -> int:
    from ..bench import cache_sizes, cpu_model

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
        "pool": "retrograd's own; PyTorch's workers in programs that import retrograd.torch",
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
