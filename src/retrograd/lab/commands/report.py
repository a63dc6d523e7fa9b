"""What the commands have in common: tables, patterns of names, and options."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import textwrap
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from ..._printing import cells, in_a_line, visible

__all__ = ["Column", "Report", "UsageError", "laid_out", "matches", "positive"]


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
        from rich.console import Console
        from rich.text import Text

        self._progress.stop()
        console = Console()
        if self._rows:
            for line, row in laid_out(self._columns, [texts for texts, _ in self._rows], console.width):
                style = "bold" if row is None else "" if self._rows[row][1] else "bold red"
                console.print(Text(line, style), soft_wrap=True)
            console.print()
        for note in self._notes:
            console.print(note, markup=False, highlight=False)

    def _line(self, texts: Sequence[str]) -> str:
        padded = [
            text.rjust(column.width) if column.right else text.ljust(column.width)
            for text, column in zip(texts, self._columns, strict=True)
        ]
        return "  ".join(padded).rstrip()

    def row(self, texts: list[str], good: bool = True) -> None:
        texts = [in_a_line(text) for text in texts]  # those of bench compare come from files
        if self._terminal:
            self._rows.append((texts, good))
        else:
            print(self._line(texts), flush=True)

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


def laid_out(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[tuple[str, int | None]]:
    """Return the lines of a table, each with the index of its row, or None above the rows. It has no empty columns.

    It is the first that fits: a table; one with wrapped titles; one with the first cell of each row on a line of its
    own; a line for each cell.
    """
    kept = [index for index in range(len(columns)) if index == 0 or any(row[index] for row in rows)]
    columns, rows = [columns[index] for index in kept], [[row[index] for index in kept] for row in rows]
    body = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    whole = [max(size, cells(column.title)) for size, column in zip(body, columns, strict=True)]
    least = [max([size, *map(cells, column.title.split())]) for size, column in zip(body, columns, strict=True)]
    for sizes, first in ((whole, 0), (least, 0), (least, 1)):
        if len(columns) > first and 2 * first + sum(sizes[first:]) + 2 * (len(columns) - first - 1) <= width:
            return list(_grid(columns, rows, sizes, first))
    return list(_stacked(columns, rows))


def _grid(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], sizes: Sequence[int], first: int
) -> Iterator[tuple[str, int | None]]:
    """Yield a table of the columns from `first`; the cell before them is above each group of rows that have it."""

    def line(texts: Sequence[str]) -> str:
        padded = []
        for text, size, column in zip(texts, sizes, columns, strict=True):
            space = " " * (size - cells(text))
            padded.append(space + text if column.right else text + space)
        return "  " * first + "  ".join(padded[first:])

    titles = [textwrap.wrap(column.title, size) for size, column in zip(sizes, columns, strict=True)]
    height = max(map(len, titles))
    for row in zip(*([""] * (height - len(lines)) + lines for lines in titles), strict=True):
        yield line(row).rstrip(), None
    yield "\u2500" * len(line([""] * len(columns))), None
    above = None
    for index, texts in enumerate(rows):
        if first and texts[0] != above:
            above = texts[0]
            yield above, index
        yield line(texts).rstrip(), index


def _stacked(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, int | None]]:
    """Yield each row's first cell, and under it the others after their titles."""
    indent = max((cells(column.title) for column in columns[1:]), default=0)
    for index, (name, *texts) in enumerate(rows):
        yield name, index
        for text, column in zip(texts, columns[1:], strict=True):
            if text:
                yield f"  {column.title}{' ' * (indent - cells(column.title))}  {text}", index


def matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
