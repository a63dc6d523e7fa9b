"""Ctrl-C while the command ``retrograd`` still imports: it ends with exit code 130, as it does later, and no traceback.

Imports take half a second. A KeyboardInterrupt would pass through modules that expect none, before `cli.main` could
catch it. This module is the first that the package imports; in other programs it does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["INTERRUPTED", "started"]

INTERRUPTED = 130  # 128 plus the signal number, as in shells


def started() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, which `cli.main` catches."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _is_command() -> bool:
    """Whether this process is the installed command, or python -m retrograd, which sets argv[0] to "-m" at first."""
    program = os.path.basename(next(iter(getattr(sys, "argv", [])), ""))
    return program == "retrograd" or (program == "-m" and "retrograd" in sys.orig_argv)


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
