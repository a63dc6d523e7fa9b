"""The number of threads: set by the caller, by the environment, or by the CPUs available to this process."""

from __future__ import annotations

import operator
import os
import warnings
from pathlib import Path

from .. import _core
from ._call import public, warn
from ._errors import ArgumentTypeError, ArgumentValueError

__all__ = ["default_num_threads", "get_num_threads", "set_num_threads", "start_num_threads"]

_VARIABLE = "RETROGRAD_NUM_THREADS"
_MOST = max(8, 4 * (os.cpu_count() or 1))

chosen = False  # whether the user chose the number, by set_num_threads or the variable. If not, a bridge may choose it.


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """The smallest CPU quota of this process's control groups; None without a limit."""
    quotas = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one hierarchy
            folder = root / path.lstrip("/")
            while True:
                quotas.append(_read_quota(folder / "cpu.max"))
                if folder in (root, folder.parent):
                    break
                folder = folder.parent
        elif "cpu" in controllers.split(","):
            for folder in (root / "cpu" / path.lstrip("/"), root / "cpu"):
                quotas.append(_read_quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"))
    limits = [quota for quota in quotas if quota is not None]
    return min(limits, default=None)


def _read_quota(*files: Path) -> float | None:
    try:
        words = " ".join(file.read_text() for file in files).split()
        quota, period = float(words[0]), float(words[1])
    except (OSError, ValueError, IndexError):  # absent, or "max"
        return None
    return quota / period if quota > 0 and period > 0 else None


def default_num_threads() -> int:
    """RETROGRAD_NUM_THREADS if set, else the number of CPUs this process may run on, capped by its quota."""
    text = os.environ.get(_VARIABLE, "").strip()
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{_VARIABLE}={text!r}: must be a whole number of at least 1")
        if int(text) > _MOST:
            warnings.warn(f"{_VARIABLE}={text}: {_capped(int(text))}", RuntimeWarning, stacklevel=4)
        return min(int(text), _MOST)
    cpus = _affinity()
    quota = _cgroup_quota()
    return max(1, cpus if quota is None else min(cpus, round(quota)))


def start_num_threads() -> None:
    """Set the number of threads that a process starts with."""
    global chosen
    _core.set_num_threads(default_num_threads())
    chosen = bool(os.environ.get(_VARIABLE, "").strip())


@public
def set_num_threads(threads: int) -> None:
    """Set the default number of threads, for calls without ``num_threads=``. Results are the same, bit for bit."""
    global chosen
    _core.set_num_threads(checked_num_threads(threads))
    chosen = True


def get_num_threads() -> int:
    """The default number of threads, for calls without ``num_threads=``."""
    return _core.num_threads()


def borrow_team(parallel: int, thread_index: int) -> None:
    """Run the engine on the threads of another library, entered by these addresses; 0, 0: on its own."""
    _core.borrow_team(parallel, thread_index)


def has_borrowed_team() -> bool:
    return _core.has_borrowed_team()


def checked_num_threads(threads: int) -> int:
    if type(threads) is int and 1 <= threads <= _MOST:
        return threads
    try:
        count = operator.index(threads)
    except TypeError:
        raise ArgumentTypeError("num_threads", "the number of threads must be an int, not {}", type(threads)) from None
    if count < 1:
        raise ArgumentValueError("num_threads", "the number of threads is {}, must be at least 1", count)
    if count > _MOST:
        warn(_capped(count))
    return min(count, _MOST)


def _capped(count: int) -> str:
    """The warning for a count above the cap of a few threads per CPU: more would only wait for each other."""
    return f"{count} threads are asked for; {_MOST} are used, for {os.cpu_count()} CPUs"
