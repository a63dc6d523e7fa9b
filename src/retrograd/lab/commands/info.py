"""The command ``retrograd info``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from typing import Any

import numpy as np

import retrograd

from ... import _core
from ..._printing import wrapped
from ...ops import _threads

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of ``retrograd``."""
    info = commands.add_parser(
        "info",
        help="print version, instruction set, caches, threads and where they come from",
        description="Print the settings in effect and where they come from.",
    )
    info.add_argument("--json", action="store_true", help="print them as one JSON object, for programs")
    info.set_defaults(run=_info)


def _info(options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(_facts(), indent=2))
        return 0
    from ..bench import cache_sizes

    facts = _facts()
    level, lowered = facts["isa"]["level"], facts["isa"]["requested"]
    lines = {
        "retrograd": facts["retrograd"],
        "processor": facts["processor"],
        "caches": cache_sizes(),
        "ISA level": f"{level} ({f'RETROGRAD_ISA={lowered}; ' if lowered else ''}this machine can run "
        f"{', '.join(facts['isa']['available'])}"
        f"{'; scalar is the reference level, many times slower' if level == 'scalar' else ''})",
        "threads": f"{facts['threads']['default']} ({_why_threads()})",
        "pool": "retrograd's own; PyTorch's workers in programs that import retrograd.torch",
        "BLAS": "none: matrix products are retrograd's own kernels",
        "data types": "float32, float64; normalization also float16, bfloat16",
        "Python": f"{facts['python']}, {'with' if facts['gil'] else 'without'} the GIL",
        "NumPy": facts["numpy"],
    }
    for name, value in lines.items():
        # One line each, as programs expect it; wrapped for a terminal.
        print(wrapped(value, f"{name:<12}") if sys.stdout.isatty() else f"{name:<12}{value}")
    return 0


def _facts() -> dict[str, Any]:
    """The settings in effect, as a JSON-serialisable dict. Sizes are in bytes."""
    from ..bench import cpu_model

    l1, l2, last_level, sharing = _core.caches()
    return {
        "retrograd": retrograd.__version__,
        "processor": cpu_model(),
        "caches": {"l1": l1, "l2": l2, "last_level": last_level, "last_level_shared_by_cpus": sharing},
        "isa": {
            "level": _core.isa(),
            "available": list(_core.isa_levels()),
            "requested": os.environ.get("RETROGRAD_ISA", "").strip() or None,
        },
        "threads": {
            "default": retrograd.get_num_threads(),
            "requested": os.environ.get("RETROGRAD_NUM_THREADS", "").strip() or None,
            "cpus": _threads._affinity(),
            "cgroup_quota": _threads._cgroup_quota(),
        },
        "python": platform.python_version(),
        "gil": bool(getattr(sys, "_is_gil_enabled", lambda: True)()),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }


def _why_threads() -> str:
    given = os.environ.get("RETROGRAD_NUM_THREADS", "").strip()
    if given:
        return f"RETROGRAD_NUM_THREADS={given}"
    cpus, quota = _threads._affinity(), _threads._cgroup_quota()
    reason = f"CPUs this process may run on: {cpus}"
    return reason + ("; no quota" if quota is None else f"; cgroup quota: {quota:g}")
