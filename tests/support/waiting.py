"""How tests wait: for an event, never for a time.

No test may depend on how fast the machine is or on which thread it runs next. So a test waits until something has
happened, and gives up after PATIENCE, when it never will. Where a moment has to be hit that only the scheduler decides,
it is tried until it was hit (`runs_meanwhile`). test_waiting.py keeps clocks and other timeouts out of the tests.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 600.0  # seconds: what has not happened by then is taken to hang, however busy the machine is
ATTEMPTS = 2000  # to hit a moment that comes once in every attempt


def wait_until(condition: Callable[[], object], what: str = "it never happened") -> None:
    end = time.monotonic() + PATIENCE
    pause = 0.0
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(pause)
        pause = min(pause + 1e-5, 0.01)


def ends(action: Callable[[], object]) -> None:
    """Fail, rather than hang, if the action does not return."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"


@contextmanager
def nobody_interrupted() -> Iterator[None]:
    """No thread is made to give up the interpreter's lock; it does so by itself, or not at all."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def runs_meanwhile(call: Callable[[], object], attempts: int = ATTEMPTS) -> bool:
    """Whether another Python thread can run while `call` does: whether it releases the interpreter's lock.

    The other thread is let go just before the call, and needs the lock. If the call releases it, the other thread runs
    as soon as the scheduler likes, which may be after this call but not after all of many.
    """
    go, ran, over = threading.Semaphore(0), [], []

    def run() -> None:
        while go.acquire() and not over:
            ran.append(1)

    other = threading.Thread(target=run)
    other.start()
    try:
        for attempt in range(attempts):
            with nobody_interrupted():
                go.release()
                call()
                found = len(ran) > attempt
            if found:
                return True
            wait_until(lambda least=attempt: len(ran) > least)  # type: ignore[misc]
        return False
    finally:
        over.append(1)
        go.release()
        other.join()
