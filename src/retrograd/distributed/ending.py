"""How ranks end: an uncaught exception on one rank ends all, and a rank that ends early notifies the waiting ones."""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import sys
import threading
from array import array
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn

__all__ = ["ENDED", "Message", "RankError", "abort", "announce_end", "end_together"]

ENDED: Final = "the end of the program"  # the call of a rank that makes no other
_FAILED: Final = 1
_INTERRUPTED: Final = 130
_KILLED_WITHIN: Final = 10.0  # seconds; it takes milliseconds
_READ_WITHIN: Final = 5.0  # likewise
_GLANCE: Final = 0.05


class RankError(RuntimeError):
    """Another rank failed, ended early, or does not do the same as this one. The message says which, and what."""


class Message(NamedTuple):
    """What every rank sends to all others in an exchange, a broadcast, at the end of a run, and when it ends."""

    call: str
    shards: int
    failure: str | None  # the error that this rank raises
    values: Any


class _Ending:
    process = 0  # the process whose end is watched; forked processes are not ranks
    comm: Any = None  # where this rank announces its end
    report: Callable[[], None] | None = None  # of an uncaught RankError, which the rank that failed has to print


_ending: Final = _Ending()


def end_together() -> None:
    """From now on an uncaught exception in any thread of this process is printed with its rank, and ends all ranks."""
    if _ending.process == os.getpid():
        return
    process = _ending.process = os.getpid()
    hook, thread_hook = sys.excepthook, threading.excepthook

    def end(kind: type[BaseException], report: Callable[[], None]) -> None:
        _notice()
        report()
        abort(_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else _FAILED)

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        def report() -> None:
            hook(kind, error, trace)

        if os.getpid() != process:
            report()
        elif issubclass(kind, RankError) and _ending.comm is not None:
            # The rank that failed prints its error and ends all, unless it has caught it: see _end.
            _ending.report = report
        else:
            end(kind, report)

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        def report() -> None:
            thread_hook(args)

        if os.getpid() != process or issubclass(args.exc_type, SystemExit):
            report()
        else:
            end(args.exc_type, report)

    sys.excepthook, threading.excepthook = uncaught, uncaught_in_thread


def abort(code: int) -> NoReturn:
    """End the processes of all ranks at once. mpirun's exit code is `code`."""
    from mpi4py import MPI

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe
            stream.flush()
            _wait_until_read(stream.fileno())
    if not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)
        # It may return before mpirun ends this process. Until then nothing else may run, such as a regular exit.
        threading.Event().wait(_KILLED_WITHIN)
    os._exit(code)


def _wait_until_read(file: int) -> None:
    """Wait until mpirun has read what was printed: it drops what is still in the pipe when the ranks are aborted."""
    if not stat.S_ISFIFO(os.fstat(file).st_mode):
        return
    import fcntl
    import termios

    waiting = threading.Event()
    for _ in range(round(_READ_WITHIN / _GLANCE)):
        unread = array("i", [0])
        fcntl.ioctl(file, termios.FIONREAD, unread)
        waiting.wait(_GLANCE)  # also once after the last byte, which mpirun still has to pass on
        if unread[0] == 0:
            break


def announce_end(comm: Any) -> None:
    """When this process ends, notify the other ranks of `comm`, which all do so: waiting ranks raise an error."""
    if _ending.comm is None:
        _ending.comm = comm
        atexit.register(_end)


def _end() -> None:
    """Wait until all ranks end. The first rank whose RankError has not been printed prints it."""
    from mpi4py import MPI

    comm = _ending.comm
    if os.getpid() != _ending.process or MPI.Is_finalized():
        return
    mine = Message(ENDED, 0, None, _ending.report is not None)
    while True:
        messages: list[Message] = comm.allgather(mine)
        if all(message.call == ENDED for message in messages):
            break
    unprinted = [message.values for message in messages]
    if _ending.report is not None and unprinted.index(True) == comm.Get_rank():
        _notice()
        _ending.report()


def _notice() -> None:
    from mpi4py import MPI

    print(f"retrograd: rank {MPI.COMM_WORLD.Get_rank()} failed and ends all ranks", file=sys.stderr, flush=True)
