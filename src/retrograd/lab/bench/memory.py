"""Peak memory, measured in separate processes: this one's allocators keep memory of earlier rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["Peak", "run_apart"]

_STATUS: Final = Path("/proc/self/status")


def run_apart(program: str) -> list[int] | None:
    """Run a program in a separate process and return the integers it prints. Linux only, otherwise None."""
    if not _STATUS.exists():
        return None
    result = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ, check=True
    )
    return [int(word) for word in result.stdout.split()]


class Peak:
    """The peak of this process's memory above what it was at the beginning."""

    def __init__(self) -> None:
        self.restart()
        self._before = _kilobytes("VmRSS")

    def restart(self) -> None:
        """Forget earlier peaks."""
        Path("/proc/self/clear_refs").write_text("5")

    def bytes(self) -> int:
        return 1024 * (_kilobytes("VmHWM") - self._before)


def _kilobytes(field: str) -> int:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])
