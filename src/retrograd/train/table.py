"""Read tables of numbers over time from CSV files. Errors name the line and the column."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .files import check_data
from .settings import InputError

__all__ = ["Step", "Table", "Times", "counted", "read_table"]

Array = npt.NDArray[Any]

_DELIMITERS: Final = (",", ";", "\t", "|")
_GAPS: Final = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "?"})
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_INFINITE: Final = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
_THOUSANDS: Final = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}", re.ASCII)
_SHOWN: Final = 10  # entries of a list of faults
_LARGEST: Final = 1e100  # so that sums of squares are finite

# A numeric column with one of these names that grows by a constant is the time column.
_INDEX_NAMES: Final = {
    *(
        "time",
        "date",
        "datetime",
        "timestamp",
        "ds",
        "t",
        "index",
        "idx",
        "unnamed: 0",
        "row",
        "number",
        "no",
        "id",
        "n",
    ),
    *("step", "year", "month", "week", "day", "hour", "minute", "second"),
}
_DATES: Final = (
    *("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%d %b %Y", "%d-%b-%Y"),
    *("%b %d, %Y", "%d.%m.%y", "%m/%d/%y", "%d/%m/%y", "%d-%b-%y"),
)
_CLOCKS: Final = (" %H:%M", " %H:%M:%S", " %H:%M:%S.%f", "T%H:%M", "T%H:%M:%S", "T%H:%M:%S.%f")
_MONTHS: Final = ("%Y-%m", "%Y/%m", "%m/%Y", "%b %Y", "%b-%Y")
_QUARTERS: Final = {"%YQ%q": re.compile(r"(\d{4})Q([1-4])"), "%Y-Q%q": re.compile(r"(\d{4})-Q([1-4])")}
_PATTERNS: Final = (*_DATES, *_MONTHS, *_QUARTERS, *(date + clock for date in _DATES for clock in _CLOCKS))
_COMPACT: Final = "%Y%m%d"  # a date only in a column with one of the names above
_ZONE: Final = re.compile(r"(.*\d:\d\d.*?)( ?(?:Z|UTC|[+-]\d\d:?\d\d))")

_SECOND: Final = 1_000_000  # microseconds
_DAY: Final = 86_400 * _SECOND
_UNITS: Final = (("day", _DAY), ("hour", 3600 * _SECOND), ("minute", 60 * _SECOND), ("second", _SECOND))


@dataclass(frozen=True)
class Step:
    """The time from one row to the next."""

    unit: str  # "microseconds", "months", "business days", "index", "row"
    count: float

    def __str__(self) -> str:
        if self.unit == "microseconds":
            for name, size in _UNITS:
                if self.count % size == 0:
                    return counted(int(self.count // size), name)
            return f"{self.count / _SECOND:g} seconds"
        if self.unit == "months":
            months = int(self.count)
            return counted(months, "month") if months % 12 else counted(months // 12, "year")
        return {"business days": "1 business day", "row": "1 row"}.get(self.unit, f"{self.count:g}")

    def seasons(self) -> tuple[int, ...]:
        """Return the likely seasons in rows: a minute, an hour, a day, a week, a year, shortest first."""
        if self.unit == "months":
            return (int(12 // self.count),) if 12 % self.count == 0 and self.count < 12 else ()
        if self.unit == "business days":
            return 5, 261
        if self.unit != "microseconds":
            return ()
        spans = (60 * _SECOND, 3600 * _SECOND, _DAY, 7 * _DAY, 365.25 * _DAY)
        return tuple(dict.fromkeys(rows for span in spans if (rows := round(span / self.count)) > 1))


@dataclass(frozen=True)
class Times:
    """The times of the rows. Without a time column, rows are numbered from 1."""

    column: str
    values: Array  # datetime64[us], or numbers
    step: Step
    pattern: str = ""  # for strftime, with %q for the quarter; empty for numbers
    zone: str = ""  # the time zone suffix of every time

    def label(self, row: int) -> str:
        """Return the time of a row in the format of the file; negative rows count from the end."""
        return self._render(self.values[row])

    def after(self, count: int) -> list[str]:
        """Return the `count` times after the last row."""
        return [self._render(value) for value in self._next(count)]

    def _next(self, count: int) -> Any:
        ahead, last = np.arange(1, count + 1), self.values[-1]
        if self.step.unit == "months":
            month, day = last.astype("datetime64[M]"), last.astype("datetime64[D]")
            clock, months = last - day, month + ahead * int(self.step.count)
            longest = (months + 1).astype("datetime64[D]") - months.astype("datetime64[D]")
            # If all rows are at the end of a month, so are the next ones.
            ends = (day + 1).astype("datetime64[M]") != month and _all_ends(self.values)
            days = longest if ends else np.minimum(longest, max(_days_of_month(self.values)) * np.timedelta64(1, "D"))
            return months.astype("datetime64[D]") + days - np.timedelta64(1, "D") + clock
        if self.step.unit == "business days":
            day = last.astype("datetime64[D]")
            return np.busday_offset(day, ahead) + (last - day)
        if self.step.unit == "microseconds":
            return last + ahead * np.timedelta64(int(self.step.count), "us")
        return last + ahead * self.step.count

    def _render(self, value: Any) -> str:
        if not self.pattern:
            return f"{value:.12g}"
        moment: Any = value.astype("datetime64[us]").item()
        if not isinstance(moment, datetime):  # outside of the years 1 to 9999 that datetime supports
            return str(value.astype("datetime64[s]")) + self.zone
        pattern = self.pattern.replace("%q", str((moment.month + 2) // 3))
        # Not every C library pads years to four digits.
        return moment.strftime(pattern.replace("%Y", f"{moment.year:04d}")) + self.zone


@dataclass(frozen=True)
class Table:
    """float64 columns by name, all of one length, without gaps."""

    name: str  # of the file, as the user wrote it
    columns: dict[str, Array]
    times: Times
    notes: tuple[str, ...]  # columns left out, gaps filled, irregularities
    digest: str  # SHA-256 of the file

    @property
    def rows(self) -> int:
        return len(self.times.values)


def read_table(path: str | os.PathLike[str], *, gaps: str = "refuse") -> Table:
    """Read a CSV file. With `gaps` "interpolate", missing values are interpolated linearly."""
    name = os.fspath(path)
    check_data(path)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}") from None
    text = _decode(name, content)
    delimiter = _sniff(text)
    cells, lines = _cells(name, text, delimiter)
    mark = "." if delimiter == "," else _decimal_mark(cells)
    names, cells, lines, notes = _take_header(name, cells, lines, mark)
    if mark == "," and (example := _thousands(cells)):
        notes.append(f"Commas are decimal marks, not thousands: {example!r} is read as {example.replace(',', '.')}.")
    for row, line in zip(cells, lines, strict=True):
        if len(row) != len(names):
            raise InputError(f"{name}: line {line} has {counted(len(row), 'cell')}, but the first row has {len(names)}")
    if len(cells) < 2:
        what = "a header and no rows" if not cells else "1 row of data"
        raise InputError(f"{name} has {what}; a series needs at least 2")
    texts = dict(zip(names, map(list, zip(*cells, strict=True)), strict=True))
    times = _dates(name, texts, lines, notes)
    if times is not None:
        del texts[times.column]
    columns = _numbers(name, texts, lines, mark, gaps, notes)
    if times is None:
        times = _index(columns)
    if not columns:
        why = "".join(f" {note}" for note in notes)
        raise InputError(f"{name} has no column of numbers; its columns are {_quoted(names)}.{why}")
    return Table(name, columns, times, tuple(notes), hashlib.sha256(content).hexdigest())


# ---- text and cells --------------------------------------------------------------------------------------------------


def _decode(name: str, content: bytes) -> str:
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(f"{name} is UTF-16 text; save it as UTF-8")
    if 0 in content:
        raise InputError(f"{name} is not a text file: byte {content.index(0)} is 0")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{name} is not UTF-8: line {line} has byte 0x{content[error.start]:02x}") from None
    if not text.strip():
        raise InputError(f"{name} is empty")
    return text


def _parse(text: Iterable[str], delimiter: str) -> Iterable[tuple[int, list[str]]]:
    """Yield the rows that are not blank, each with its first line number."""
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
    before = 0
    for row in reader:
        if row and (len(row) > 1 or row[0].strip()):
            yield before + 1, [cell.strip() for cell in row]
        before = reader.line_num


def _cells(name: str, text: str, delimiter: str) -> tuple[list[list[str]], list[int]]:
    cells, lines = [], []
    try:
        for line, row in _parse(io.StringIO(text, newline=""), delimiter):
            cells.append(row)
            lines.append(line)
    except csv.Error as error:
        last = lines[-1] if lines else 0
        raise InputError(f"{name}: after line {last}: {error}") from None
    while cells and not any(cells[-1]):  # spreadsheets append empty rows
        cells.pop()
        lines.pop()
    if not cells:
        raise InputError(f"{name} is empty")
    return cells, lines


def _sniff(text: str) -> str:
    """Return the delimiter that splits the first row and makes most cells numbers or dates."""
    sample = [line for line in text[:100_000].splitlines() if line.strip()][:21]
    best, best_score = ",", (-1.0, 0)
    for delimiter in _DELIMITERS:
        try:
            rows = [row for _, row in _parse(sample, delimiter)]
        except csv.Error:
            continue
        if not rows or len(rows[0]) < 2:
            continue
        marks = "." if delimiter == "," else ",."
        known = [any(_is_known(cell, mark) for mark in marks) for row in rows[1:] or rows for cell in row]
        score = sum(known) / len(known), len(rows[0])
        if score > best_score:
            best, best_score = delimiter, score
    return best


def _decimal_mark(cells: Sequence[Sequence[str]]) -> str:
    """Return the decimal mark, if commas do not separate cells: a comma if any number has one."""
    found = any("," in cell and _NUMBER.fullmatch(cell.replace(",", ".")) for row in cells for cell in row)
    return "," if found else "."


def _thousands(cells: Sequence[Sequence[str]]) -> str | None:
    """Return a number with a comma, if all of them could be thousands separators."""
    numbers = [cell for row in cells for cell in row if "," in cell and _as_number(cell, ",") is not None]
    return numbers[0] if numbers and all(_THOUSANDS.fullmatch(cell) for cell in numbers) else None


def _is_known(cell: str, mark: str) -> bool:
    return cell.lower() in _GAPS or _as_number(cell, mark) is not None or bool(_fitting(cell, _PATTERNS))


def _as_number(cell: str, mark: str) -> float | None:
    if mark == ",":
        cell = "" if "." in cell else cell.replace(",", ".")
    return float(cell) if _NUMBER.fullmatch(cell) else None


def _take_header(
    name: str, cells: list[list[str]], lines: list[int], mark: str
) -> tuple[list[str], list[list[str]], list[int], list[str]]:
    """Return names, rows, their lines and notes. A first row of only numbers, dates and gaps is not a header."""
    first = cells[0]
    width = range(1, len(first) + 1)
    if all(_is_known(cell, mark) for cell in first):
        return [f"column{i}" for i in width], cells, lines, ["The file has no header: columns are called column1, ..."]
    names = [cell or f"column{i}" for i, cell in zip(width, first, strict=True)]
    if not first[0] and "index" not in names:
        names[0] = "index"  # the unnamed index column of pandas
    positions: dict[str, int] = {}
    for i, title in zip(width, names, strict=True):
        if (earlier := positions.setdefault(title, i)) != i:
            raise InputError(f"{name}: columns {earlier} and {i} are both called {title!r}")
    return names, cells[1:], lines[1:], []


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _numbers(
    name: str, texts: dict[str, list[str]], lines: Sequence[int], mark: str, gaps: str, notes: list[str]
) -> dict[str, Array]:
    columns: dict[str, Array] = {}
    faults: list[tuple[int, str]] = []  # row, what
    missing: list[tuple[int, str]] = []
    for column, cells in texts.items():
        values, wrong = _column(cells, mark)
        there = ~np.isnan(values)
        absent = {row for row in range(len(cells)) if cells[row].lower() in _GAPS}
        if len(absent) == len(cells):
            notes.append(f"Column {column!r} is empty and is left out.")
            continue
        too_large = any(_as_number(cells[row], mark) or _INFINITE.fullmatch(cells[row]) for row in wrong)
        if not there.any() and not too_large:
            notes.append(f"Column {column!r} is text ({_short(cells[wrong[0]])}) and is left out.")
            continue
        faults += ((row, f"line {lines[row]}, column {column!r}: {cells[row]!r}") for row in wrong)
        missing += ((row, f"line {lines[row]}, column {column!r}") for row in sorted(absent))
        if absent and there.any():
            rows = np.arange(len(cells))
            values[~there] = np.interp(rows[~there], rows[there], values[there])
        columns[column] = values
    if faults:
        what = "1 cell is not a number" if len(faults) == 1 else f"{len(faults)} cells are not numbers"
        raise InputError(f"{name}: {what} from -{_LARGEST:g} to {_LARGEST:g}: {_some(faults)}")
    if missing and gaps == "refuse":
        raise InputError(f"{name}: {counted(len(missing), 'gap')}: {_some(missing)} (--gaps interpolate fills them in)")
    if missing:
        notes.append(f"{counted(len(missing), 'gap')} interpolated: {_some(missing)}.")
    return columns


def _column(cells: Sequence[str], mark: str) -> tuple[Array, list[int]]:
    """Return the values, NaN for gaps and faults, and the rows of faults."""
    if mark == "." and not any("_" in cell for cell in cells):
        try:  # the common case
            values = np.array([float(cell) for cell in cells])
            if (np.abs(values) <= _LARGEST).all():
                return values, []
        except ValueError:
            pass
    values, wrong = np.full(len(cells), np.nan), []
    for row, cell in enumerate(cells):
        number = _as_number(cell, mark)
        if number is not None and abs(number) <= _LARGEST:
            values[row] = number
        elif cell.lower() not in _GAPS:
            wrong.append(row)
    return values, wrong


def _index(columns: dict[str, Array]) -> Times:
    """Remove and return the numeric time column, or number the rows."""
    rows = len(next(iter(columns.values()), ()))
    for column, values in columns.items():
        if column.lower() not in _INDEX_NAMES or len(columns) == 1:
            continue
        steps = np.diff(values)
        if steps[0] > 0 and np.allclose(steps, steps[0], rtol=1e-6, atol=1e-9 * abs(values).max()):
            step = (values[-1] - values[0]) / (rows - 1)
            return Times(column, columns.pop(column), Step("index", float(step)))
    return Times("row", np.arange(1.0, rows + 1), Step("row", 1))


# ---- dates -----------------------------------------------------------------------------------------------------------


def _dates(name: str, texts: dict[str, list[str]], lines: Sequence[int], notes: list[str]) -> Times | None:
    """Return the times of the first column that starts with a date, or None."""
    for column, cells in texts.items():
        patterns = (*_PATTERNS, _COMPACT) if column.lower() in _INDEX_NAMES else _PATTERNS
        sample = next((cell for cell in cells if cell.lower() not in _GAPS), "")
        fitting = _fitting(sample, patterns)
        if not fitting:
            continue
        readings = [_read_dates(cells, pattern) for pattern in fitting]
        # If a date can be read in two ways (2 March or 3 February?), take the more regular one.
        at = max(range(len(readings)), key=lambda i: _steadiness(*readings[i]))
        (values, wrong, zone), pattern = readings[at], fitting[at]
        if wrong:
            what = "1 cell is not a date" if len(wrong) == 1 else f"{len(wrong)} cells are not dates"
            found = _some([(row, f"line {lines[row]}, column {column!r}: {cells[row]!r}") for row in wrong])
            raise InputError(f"{name}: {what} like {sample!r}: {found}")
        if sum(_steadiness(*reading) == _steadiness(*readings[at]) for reading in readings) > 1:
            first = {"%m": "month", "%d": "day"}.get(pattern[:2], "year")
            notes.append(f"The dates can be read in two ways; {sample!r} is read with the {first} first.")
        return _timeline(name, Times(column, values, Step("row", 1), pattern, zone), cells, lines, notes)
    return None


def _fitting(cell: str, patterns: Sequence[str]) -> list[str]:
    if not (any(c.isdigit() for c in cell) and len(cell) > 5):
        return []
    # strptime caches only a few patterns, so it is called only if a regular expression matches.
    return [pattern for pattern in patterns if _shape(pattern).fullmatch(cell) and _moment(cell, pattern) is not None]


@functools.cache
def _shape(pattern: str) -> re.Pattern[str]:
    parts = {"%Y": r"\d{4}", "%y": r"\d{2}", "%b": "[A-Za-z]{3}", "%f": r"\d{1,6}", "%q": "[1-4]"}
    zone = "( ?(Z|UTC|[+-].*))?" if "%H" in pattern else ""
    literal = re.escape(pattern).replace(re.escape("%"), "%")
    return re.compile(re.sub("%.", lambda part: parts.get(part[0], r"\d{1,2}"), literal) + zone, re.ASCII)


def _moment(cell: str, pattern: str) -> tuple[datetime, str] | None:
    zone = ""
    if "%H" in pattern and (parts := _ZONE.fullmatch(cell)):
        cell, zone = parts.groups()
    if pattern in _QUARTERS:
        found = _QUARTERS[pattern].fullmatch(cell)
        return (datetime(int(found[1]), 3 * int(found[2]) - 2, 1), "") if found and int(found[1]) else None
    try:
        return datetime.strptime(cell, pattern), zone
    except ValueError:
        return None


def _read_dates(cells: Sequence[str], pattern: str) -> tuple[Array, list[int], str]:
    """Return times, the rows that are not dates, and the common time zone (UTC if they differ)."""
    iso: Callable[[str], datetime] = datetime.fromisoformat
    moments, zones, wrong = [], [], []
    for row, cell in enumerate(cells):
        try:  # much faster than strptime
            read: tuple[datetime, str] | None = (iso(cell), "") if pattern.startswith("%Y-%m-%d") else None
            if read is not None and read[0].tzinfo is not None:
                read = None
        except ValueError:
            read = None
        read = read or _moment(cell, pattern)
        if read is None:
            wrong.append(row)
            continue
        moments.append(read[0])
        zones.append(read[1])
    if len(set(zones)) > 1:
        offsets = np.array([_minutes(zone) for zone in zones], "timedelta64[m]")
        return np.array(moments, "datetime64[us]") - offsets, wrong, "Z"
    return np.array(moments, "datetime64[us]"), wrong, zones[0] if zones else ""


def _minutes(zone: str) -> int:
    sign, digits = (-1 if "-" in zone else 1), re.sub(r"\D", "", zone) or "0000"
    return sign * (60 * int(digits[:2]) + int(digits[2:]))


def _steadiness(values: Array, wrong: Sequence[int], zone: str) -> tuple[int, int]:
    """Return a sort key: fewer faults and backward steps first, then more steps of the most common size."""
    if len(values) < 2:
        return -len(wrong), 0
    steps, usual = _steps(values)
    return -len(wrong) - int((np.diff(values).astype(np.int64) <= 0).sum()), int((steps == usual).sum())


def _steps(values: Array) -> tuple[Array, float]:
    """Return all steps in the unit of `_unit`, and the most common one."""
    unit = _unit(values)
    if unit == "months":
        steps = np.diff(values.astype("datetime64[M]").astype(np.int64))
    elif unit == "business days":
        days = values.astype("datetime64[D]")
        steps = np.busday_count(days[:-1], days[1:]).astype(np.int64)
    else:
        steps = np.diff(values).astype(np.int64)
    sizes, counts = np.unique(steps, return_counts=True)
    return steps, float(sizes[counts.argmax()])


def _unit(values: Array) -> str:
    days = values.astype("datetime64[D]")
    clocks = values - days
    months = np.diff(values.astype("datetime64[M]").astype(np.int64))
    if (clocks == clocks[0]).all():
        # Monthly data on the 30th has the 28th in February.
        numbers = _days_of_month(values)
        late = (numbers == np.minimum(_month_lengths(values), max(numbers))).all()
        if (months > 0).all() and (late or _all_ends(values)):
            return "months"
        steps = np.diff(days).astype(np.int64)
        if (np.is_busday(days)).all() and (steps == 3).any() and (steps == 1).sum() > len(steps) / 2:
            return "business days"
    return "microseconds"


def _days_of_month(values: Array) -> Array:
    days: Array = values.astype("datetime64[D]") - values.astype("datetime64[M]").astype("datetime64[D]")
    return days.astype(np.int64) + 1


def _month_lengths(values: Array) -> Array:
    months = values.astype("datetime64[M]")
    days: Array = (months + 1).astype("datetime64[D]") - months.astype("datetime64[D]")
    return days.astype(np.int64)


def _all_ends(values: Array) -> bool:
    return bool((_days_of_month(values) == _month_lengths(values)).all())


def _timeline(name: str, times: Times, cells: Sequence[str], lines: Sequence[int], notes: list[str]) -> Times:
    """Return the times with their step. Decreasing times are refused, irregular ones noted."""
    backwards = np.flatnonzero(np.diff(times.values).astype(np.int64) <= 0)
    if backwards.size:
        row = int(backwards[0]) + 1
        raise InputError(
            f"{name}: line {lines[row]}, column {times.column!r}: {cells[row]} does not come after "
            f"{cells[row - 1]} of line {lines[row - 1]}; rows must be in order of time"
        )
    steps, usual = _steps(times.values)
    step = Step(_unit(times.values), usual)
    odd = [int(row) for row in np.flatnonzero(steps != usual)]
    if odd:
        places = _some([(i, f"line {lines[i + 1]} ({cells[i]} to {cells[i + 1]})") for i in odd])
        notes.append(
            f"Irregular: {counted(len(odd), 'step')} in time other than {step}, treated as if equal: {places}."
        )
    return Times(times.column, times.values, step, times.pattern, times.zone)


# ---- text ------------------------------------------------------------------------------------------------------------


def _some(faults: Sequence[tuple[int, str]]) -> str:
    """Format the first faults in order of row, and the number of further ones."""
    shown = [what for _, what in sorted(faults, key=lambda fault: fault[0])[:_SHOWN]]
    return "; ".join(shown) + (f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else "")


def counted(count: int, what: str) -> str:
    """Format a count with its noun: 1 row, 1,200 rows."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _short(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else cell[:40] + "...")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
