"""What a training run shows while it runs: lines as they come, and on a terminal a bar below them."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any

__all__ = ["Progress", "clock", "count"]


class Progress:
    """Lines of text; on a terminal, and while `steps` are being done, a bar with the numbers of the moment.

    The lines are the same wherever they go, so that a log tells what a terminal told.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def say(self, text: str = "") -> None:
        if self._bar is None:
            try:
                print(text, flush=True)
            except BrokenPipeError:  # a closed pipe does not stop the run
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, done: int, steps: int) -> None:
        """Training begins: the bar appears."""
        if not sys.stdout.isatty():
            return
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(),
            progress.TextColumn("{task.description}"),
            transient=True,
        )
        self._task = self._bar.add_task("", total=steps, completed=done)
        self._bar.start()

    def step(self, done: int, numbers: str) -> None:
        """So many steps are done. The bar shows the numbers; elsewhere nothing is said."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=numbers)

    def end(self) -> None:
        """Training is over: the bar goes away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def clock(seconds: float) -> str:
    """A time as 0:07, 12:34 or 1:02:03."""
    whole = round(seconds)
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def count(number: float) -> str:
    """A number of things: 41,210."""
    return f"{round(number):,}"
