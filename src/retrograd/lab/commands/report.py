"""What the commands have in common: tables, patterns of names, and options."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from ..._printing import in_a_line, visible

__all__ = ["Column", "Report", "UsageError", "matches", "positive"]


class UsageError(Exception):
    """An invalid command line that argparse cannot detect."""


def positive(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 4096:
        raise argparse.ArgumentTypeError(f"{value} is not from 1 to 4096")
    return value


class Column(NamedTuple):
    title: str
    width: int  # of a plain line
    right: bool = True


class Report:
    """A table. On a terminal: a progress bar, then the complete table. Otherwise: one line per row, immediately."""

    def __init__(self, columns: Sequence[Column], total: int) -> None:
        self._columns = columns
        self._total = total
        self._rows: list[tuple[list[str], bool]] = []
        self._notes: list[str] = []
        self._progress: Any = None
        self._task: Any = None
        self._terminal = sys.stdout.isatty()

    def __enter__(self) -> Report:
        if self._terminal:
            from rich import progress

            self._progress = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                transient=True,
            )
            self._task = self._progress.add_task("", total=self._total)
            self._progress.start()
        else:
            print(self._line([column.title for column in self._columns]), flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is None:
            return
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        self._progress.stop()
        table = Table(box=SIMPLE, pad_edge=False)
        for column in self._columns:
            table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
        for cells, good in self._rows:
            table.add_row(*map(Text, cells), style=None if good else "bold red")
        console = Console()
        if self._rows:
            console.print(table)
        for note in self._notes:
            console.print(note, markup=False, highlight=False)

    def _line(self, cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(column.width) if column.right else cell.ljust(column.width)
            for cell, column in zip(cells, self._columns, strict=True)
        ]
        return "  ".join(padded).rstrip()

    def row(self, cells: list[str], good: bool = True) -> None:
        cells = [in_a_line(cell) for cell in cells]  # the cells of bench compare come from files
        if self._terminal:
            self._rows.append((cells, good))
        else:
            print(self._line(cells), flush=True)

    def note(self, text: str) -> None:
        text = visible(text)
        if self._terminal:
            self._notes.append(text)
        else:
            print(text, flush=True)

    def start(self, what: str) -> None:
        """Show what is being worked on."""
        if self._progress is not None:
            self._progress.update(self._task, description=what)

    def advance(self) -> None:
        """Advance the progress bar by one."""
        if self._progress is not None:
            self._progress.advance(self._task)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
