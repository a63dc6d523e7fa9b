"""The core without Python: the same bits at every instruction-set level here, and on 64-bit ARM under an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from support.waiting import PATIENCE

ROOT = Path(__file__).parents[1]


def make(target: str) -> None:
    done = subprocess.run(
        ["make", target], cwd=ROOT, capture_output=True, text=True, timeout=20 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_levels_of_this_machine() -> None:
    make("levels")


@pytest.mark.long
def test_neon() -> None:
    for program in ("aarch64-linux-gnu-g++", "qemu-aarch64-static"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    make("aarch64")
