"""The output of a training run: lines of text and, on a terminal, a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from .._printing import cells, terminal_width, visible, wrapped

__all__ = ["Progress", "SilentProgress", "clock", "count", "fitting"]


_NAMES: Final = 10  # columns of the names of fields


class Progress:
    """Prints lines of text and, on a terminal during training, a progress bar with current values."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def say(self, text: str = "") -> None:
        text = visible(text)  # file and column names may contain terminal control characters
        if self._bar is None:
            try:
                print(text, flush=True)
            except BrokenPipeError:  # a closed pipe does not stop the run
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def prose(self, text: str) -> None:
        """Print a paragraph, wrapped to the terminal's width."""
        self.say(wrapped(text))

    def field(self, name: str, value: str) -> None:
        """Print a name and its value, wrapped to the terminal's width."""
        self.say(wrapped(value, f"{name:<{_NAMES - 1}} "))

    def row(self, *forms: str) -> None:
        """Print the first of several forms of a line that fits the terminal; if none does, the last, which is short."""
        self.say(fitting(forms, terminal_width()))

    def begin(self, done: int, steps: int) -> None:
        """Show the progress bar, with `done` of `steps` steps completed."""
        if not sys.stdout.isatty():
            return
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=6 if terminal_width() < 60 else 12),
            progress.TextColumn("{task.description}"),
            transient=True,
        )
        self._task = self._bar.add_task("", total=steps, completed=done)
        self._bar.start()

    def step(self, done: int, numbers: Sequence[str]) -> None:
        """Update the bar to `done` steps, with as many of the current values as fit. Without a bar, do nothing."""
        if self._bar is not None:
            taken = self._bar.tasks[0]
            beside = len(f"step {taken.total}/{taken.total}  ") + self._bar.columns[2].bar_width
            forms = ["  ".join(numbers[:many]) for many in range(len(numbers), -1, -1)]
            shown = fitting(forms, self._bar.console.width - beside - 2)  # room for ^C, which would move the cursor
            self._bar.update(self._task, completed=done, description=shown)

    def end(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class SilentProgress(Progress):
    """Prints nothing."""

    def say(self, text: str = "") -> None:
        pass

    def begin(self, done: int, steps: int) -> None:
        pass


def fitting(forms: Sequence[str], width: int) -> str:
    """Return the first form that is at most this many columns wide, or else the last."""
    return next((form for form in forms if cells(form) <= width), forms[-1])


def clock(seconds: float) -> str:
    """Format a time in seconds as 0:07, 12:34 or 1:02:03."""
    whole = round(seconds)
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def count(number: float) -> str:
    """Format a count: 41,210."""
    return f"{round(number):,}"
