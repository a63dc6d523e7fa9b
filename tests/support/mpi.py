"""Processes that mpirun starts together."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import PATIENCE

two_or_three_ranks = pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])


def mpiexec() -> str:
    """The program that comes with the MPI library beside this Python; without it the test is skipped."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    return found or pytest.skip("there is no mpiexec")


def on_ranks(ranks: int, *arguments: object) -> list[str]:
    return [mpiexec(), "-n", str(ranks), sys.executable, "-W", "error", *map(str, arguments)]


def run_on_ranks(ranks: int, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on so many ranks."""
    result = subprocess.run(on_ranks(ranks, *arguments), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    return result
