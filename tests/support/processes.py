"""Scripts in processes of their own, and what the system says about a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.waiting import PATIENCE

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def python(script: str, *, expect: int = 0, **environment: str) -> str:
    """Run a script in a fresh interpreter; what it prints, or its traceback if it is to fail."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("RETROGRAD_")} | environment
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    return (done.stdout if expect == 0 else done.stderr).strip()


def sleeps(task: Path) -> int:
    """How often a thread has gone to sleep."""
    lines = (task / "status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])
