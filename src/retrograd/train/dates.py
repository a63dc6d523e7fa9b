"""The times of a table's rows: dates in many forms, read by pandas, and the step from row to row."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .settings import InputError
from .words import counted, some

__all__ = ["TIME_NAMES", "Column", "Step", "Times", "find_times", "has_dates"]

Array = npt.NDArray[Any]

#: Names of columns that say when: a numeric column is a time only with one of these names.
TIME_NAMES: Final = frozenset(
    {"time", "date", "datetime", "timestamp", "ds", "t", "index", "idx", "unnamed:0", "row", "number", "no", "id", "n"}
    | {"step", "period", "epoch", "unix", "unixtime", "year", "yr", "month", "week", "day", "hour", "minute", "second"}
    | {"quarter", "yyyymm", "yearmonth", "yyyymmdd"}
)
_DATES: Final = (
    *("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%m-%d-%Y"),
    *("%d %b %Y", "%d-%b-%Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y", "%b %d %Y"),
    *("%d.%m.%y", "%m/%d/%y", "%d/%m/%y", "%d-%b-%y"),
)
_CLOCKS: Final = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M:%S %p")
_MONTHS: Final = ("%Y-%m", "%Y/%m", "%m/%Y", "%b %Y", "%b-%Y", "%B %Y", "%Y %b", "%Y-%b", "%YM%m", "%b-%y")
_QUARTER: Final = re.compile(r"(?:(?P<y>\d{4})[- ]?Q(?P<q>[1-4])|Q(?P<p>[1-4])[- /]?(?P<x>\d{4}))", re.IGNORECASE)
_QUARTERS: Final = ("%YQ%q", "%Y-Q%q", "%Y Q%q", "Q%q %Y", "Q%q-%Y", "Q%q/%Y")
_PATTERNS: Final = (
    *(*_DATES, *_MONTHS, "%Y-%m-%d %H", "%Y-%m-%dT%H"),
    *(date + join + clock for date in _DATES for join in " T" for clock in _CLOCKS if join == " " or "%I" not in clock),
)
_DIGITS: Final = {
    **{"%Y": r"\d{4}", "%y": r"\d{2}", "%b": "[A-Za-z]{3}", "%B": "[A-Za-z]{3,9}", "%f": r"\d{1,9}"},
    **{"%p": "[AaPp][Mm]"},
}
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
        return [self._render(value) for value in self.next(count)]

    def next(self, count: int) -> Any:
        """Return the `count` times after the last row, as `values` has them."""
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
        if self.pattern in ("%s", "%ms"):
            number = int(value.astype("datetime64[ms]").astype(np.int64))
            return str(number if self.pattern == "%ms" else number // 1000)
        # Not every C library pads years to four digits.
        pattern = self.pattern.replace("%q", str((moment.month + 2) // 3)).replace("%Y", f"{moment.year:04d}")
        return str(moment.strftime(pattern)) + self.zone


# ---- which column says when ------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the file, as text."""

    name: str
    cells: Sequence[str]

    @property
    def key(self) -> str:
        return re.sub(r"[\s_-]", "", self.name.lower())


class _Reading(NamedTuple):
    """One way to read the times of a column."""

    values: Array  # datetime64[us]; NaT where a cell is no date
    pattern: str
    zone: str = ""

    def steadiness(self) -> tuple[int, int]:
        """Return a sort key: fewer faults and backward steps first, then more steps of the most common size."""
        there = self.values[~np.isnat(self.values)]
        wrong = len(self.values) - len(there)
        if len(there) < 2:
            return -wrong, 0
        if there[0] > there[-1]:
            there = there[::-1]
        steps, usual = _steps(there)
        return -wrong - int((np.diff(there).astype(np.int64) <= 0).sum()), int((steps == usual).sum())


def has_dates(cell: str) -> bool:
    """Return whether a cell looks like a date."""
    return bool(_QUARTER.fullmatch(cell) or any(_shape(pattern).fullmatch(cell) for pattern in _PATTERNS))


def find_times(
    name: str, columns: Sequence[Column], lines: Sequence[int], notes: list[str], wanted: str | None = None
) -> tuple[Times | None, tuple[str, ...], bool]:
    """Return the times of a table, the columns that they were read from, and whether the newest row comes first.

    The times are None if no column says when. `wanted` is the name of the time column, if the user gave it.
    """
    if wanted is not None:
        columns = [column for column in columns if column.name == wanted]
    elif clocked := _clocked(columns):
        column, used = clocked
        reading = _written(name, column, lines, notes, always=True)
        assert reading is not None
        return _timeline(name, column, reading, lines, notes, used)
    elif parts := _calendar(columns):
        used = tuple(column.name for column in columns if column.name in parts[1])
        label = "date" if "date" not in {column.name for column in columns} - set(used) else "ds"
        cells = [" ".join(row) for row in zip(*(c.cells for c in columns if c.name in used), strict=True)]
        return _timeline(name, Column(label, cells), parts[0], lines, notes, used)
    for column in columns:
        if (reading := _numeric(column)) is None:
            reading = _written(name, column, lines, notes, always=wanted is not None)
        if reading is not None:
            return _timeline(name, column, reading, lines, notes, (column.name,))
    return None, (), False


def _clocked(columns: Sequence[Column]) -> tuple[Column, tuple[str, ...]] | None:
    """Join a column of dates and one of the time of day."""
    clock = re.compile(r"\d{1,2}:\d\d(:\d\d(\.\d+)?)?( ?[AaPp][Mm])?")
    clocks = [c for c in columns if c.key in ("time", "clock", "hour") and all(map(clock.fullmatch, c.cells))]
    days = [c for c in columns if c.cells[0] and any(_shape(pattern).fullmatch(c.cells[0]) for pattern in _DATES)]
    if not clocks or not days:
        return None
    cells = [f"{day} {time}" for day, time in zip(days[0].cells, clocks[0].cells, strict=True)]
    return Column(days[0].name, cells), (days[0].name, clocks[0].name)


def _numeric(column: Column) -> _Reading | None:
    """Read a column of whole numbers with a telling name: yyyymm, yyyymmdd, years, unix seconds or milliseconds."""
    import pandas as pd

    if column.key not in TIME_NAMES or not all(re.fullmatch(r"\d{4,13}(\.0+)?", cell) for cell in column.cells):
        return None
    texts = pd.Series([cell.partition(".")[0] for cell in column.cells])
    numbers, widths = texts.astype("int64"), texts.str.len()
    steps = numbers.diff().iloc[1:]
    if not ((steps > 0).all() or (steps < 0).all()) or (widths.min() != widths.max() and widths.min() < 9):
        return None
    width = int(widths.max())
    if width in (4, 6, 8) and (texts.str[:4].astype(int).between(1000, 2999)).all():
        pattern = {4: "%Y", 6: "%Y%m", 8: "%Y%m%d"}[width]
        if width == 4 and column.key not in ("year", "yr", "date", "ds", "time", "period"):
            return None
        values = pd.to_datetime(texts, format=pattern, errors="coerce")
        return _Reading(_micro(values), pattern) if values.notna().all() else None
    if width in (9, 10) or width in (12, 13):
        unit = "s" if width < 11 else "ms"
        return _Reading(_micro(pd.to_datetime(numbers, unit=unit)), "%s" if unit == "s" else "%ms")
    return None


def _calendar(columns: Sequence[Column]) -> tuple[_Reading, set[str]] | None:
    """Read a year column with a month or a quarter (and a day, an hour) beside it."""
    import pandas as pd

    parts: dict[str, Column] = {}
    for column in columns:
        for part, names in (("year", ("year", "yr")), ("quarter", ("quarter", "qtr", "q"))):
            if column.key in names:
                parts.setdefault(part, column)
        for part in ("month", "day", "hour"):
            if column.key in {"month": ("month", "mon", "mo"), "day": ("day", "dom"), "hour": ("hour", "hr")}[part]:
                parts.setdefault(part, column)
    if "year" not in parts or not parts.keys() & {"month", "quarter"}:
        return None
    if "month" in parts:
        parts.pop("quarter", None)
    numbers: dict[str, Any] = {}
    for part, column in parts.items():
        cells = pd.Series(column.cells)
        if part == "month" and not cells.str.fullmatch(r"\d+(\.0+)?").all():
            for pattern in ("%b", "%B"):
                months = pd.to_datetime(cells, format=pattern, errors="coerce").dt.month
                if months.notna().all():
                    numbers[part] = months
        elif part == "quarter":
            numbers["month"] = 3 * pd.to_numeric(cells.str.replace(r"^[Qq]", "", regex=True), errors="coerce") - 2
        else:
            numbers[part] = pd.to_numeric(cells, errors="coerce")
    if "month" not in numbers:
        return None
    if "day" not in numbers:
        numbers["day"] = 1
        numbers.pop("hour", None)
        parts.pop("hour", None)
    values = pd.to_datetime(pd.DataFrame(numbers), errors="coerce")
    if values.isna().any():
        return None
    pattern = "%YQ%q" if "quarter" in parts else "%Y-%m-%d" if "day" in parts else "%Y-%m"
    return _Reading(_micro(values), pattern + " %H:%M" * ("hour" in parts)), {column.name for column in parts.values()}


def _written(name: str, column: Column, lines: Sequence[int], notes: list[str], *, always: bool) -> _Reading | None:
    """Read a column of dates in words or digits. None if its first cell is not a date."""
    sample = next((cell for cell in column.cells if cell), "")
    patterns = [pattern for pattern in _PATTERNS if _shape(pattern).fullmatch(sample)]
    readings = [reading for pattern in patterns if (reading := _read(column.cells, pattern)) is not None]
    if _QUARTER.fullmatch(sample):
        readings.append(_quarters(column.cells))
    readings = [reading for reading in readings if not np.isnat(reading.values[column.cells.index(sample)])]
    if not readings:
        if always:
            raise InputError(f"{name}: column {column.name!r} has no dates: line {lines[0]} has {sample!r}")
        return None
    best = max(readings, key=_Reading.steadiness)
    wrong = [int(row) for row in np.flatnonzero(np.isnat(best.values))]
    if wrong and len(wrong) < len(column.cells) and (mixed := _mixed(name, column, lines)) is not None:
        notes.append(f"Column {column.name!r} has dates in several formats; the forecast has them as year-month-day.")
        return mixed
    if wrong:
        what = "1 cell is not a date" if len(wrong) == 1 else f"{len(wrong)} cells are not dates"
        found = some([(row, f"line {lines[row]}, column {column.name!r}: {column.cells[row]!r}") for row in wrong])
        raise InputError(f"{name}: {what} like {sample!r}: {found}")
    if sum(reading.steadiness() == best.steadiness() for reading in readings) > 1:
        first = {"%m": "month", "%d": "day"}.get(best.pattern[:2], "year")
        if not all((reading.values == best.values).all() for reading in readings):
            notes.append(f"The dates can be read in two ways; {sample!r} is read with the {first} first.")
    return best


def _shape(pattern: str) -> re.Pattern[str]:
    if (found := _SHAPES.get(pattern)) is None:
        zone = "( ?(Z|UTC|[+-].*))?" if "%H" in pattern else ""
        literal = re.escape(pattern).replace(re.escape("%"), "%")
        found = re.compile(re.sub("%.", lambda part: _DIGITS.get(part[0], r"\d{1,2}"), literal) + zone, re.ASCII)
        _SHAPES[pattern] = found
    return found


_SHAPES: Final[dict[str, re.Pattern[str]]] = {}


def _read(cells: Sequence[str], pattern: str) -> _Reading | None:
    """Read all cells by a pattern. Times in different zones become UTC."""
    import pandas as pd

    texts, zones = pd.Series(cells, dtype=str), pd.Series("", index=range(len(cells)))
    if "%H" in pattern and texts.str.fullmatch(_ZONE).any():
        parts = texts.str.extract(f"^{_ZONE.pattern}$")
        zoned = parts[0].notna()
        texts, zones = texts.where(~zoned, parts[0]), parts[1].where(zoned, "")
    values = _micro(pd.to_datetime(texts, format=pattern, errors="coerce"))
    for row in np.flatnonzero(np.isnat(values)):  # pandas' own times are from 1677 to 2262
        with contextlib.suppress(ValueError):
            values[row] = np.datetime64(datetime.strptime(texts[row], pattern), "us")
    if zones.nunique() == 1:
        return _Reading(values, pattern, str(zones.iloc[0]))
    signs = zones.str.contains("-", regex=False).map({True: -1, False: 1})
    digits = zones.str.replace(r"\D", "", regex=True).str.zfill(4)
    minutes = signs * (60 * digits.str[:2].astype(int) + digits.str[2:].astype(int))
    return _Reading(values - minutes.to_numpy().astype("timedelta64[m]"), pattern, "Z")


def _quarters(cells: Sequence[str]) -> _Reading:
    found = [_QUARTER.fullmatch(cell) for cell in cells]
    values = np.array(
        [
            np.datetime64(f"{int(part['y'] or part['x']):04d}-{3 * int(part['q'] or part['p']) - 2:02d}-01", "us")
            if part
            else np.datetime64("NaT", "us")
            for part in found
        ]
    )
    sample = next(cell for cell, part in zip(cells, found, strict=True) if part)
    pattern = re.sub(r"[Qq][1-4]", "Q%q", re.sub(r"\d{4}", "%Y", sample, count=1) if sample[0].isdigit() else sample)
    return _Reading(values, re.sub(r"\d{4}$", "%Y", pattern))


def _mixed(name: str, column: Column, lines: Sequence[int]) -> _Reading | None:
    """Read dates in several formats, if one order of day and month puts all rows in order of time."""
    import pandas as pd

    found: list[Array] = []
    for day_first in (False, True):
        values = pd.to_datetime(pd.Series(column.cells), format="mixed", dayfirst=day_first, errors="coerce")
        if getattr(values.dt, "tz", None) is not None or values.isna().any():
            continue
        micro = _micro(values)
        if (np.diff(micro).astype(np.int64) > 0).all() and not any((micro == other).all() for other in found):
            found.append(micro)
    if len(found) > 1:
        row = int(np.flatnonzero(found[0] != found[1])[0])
        raise InputError(
            f"{name}: line {lines[row]}, column {column.name!r}: {column.cells[row]!r} may have the day or the month "
            "first, and the column has dates in several formats; write them as 2024-12-31"
        )
    if not found:
        return None
    clocks = (found[0] != found[0].astype("datetime64[D]")).any()
    return _Reading(found[0], "%Y-%m-%d %H:%M:%S" if clocks else "%Y-%m-%d")


def _micro(values: Any) -> Array:  # a pandas.Series
    found: Array = values.to_numpy().astype("datetime64[us]")
    return found


# ---- the step --------------------------------------------------------------------------------------------------------


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
    # pandas.infer_freq takes months on the 15th for 183 days, and knows no step if a single row is missing.
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


def _timeline(
    name: str, column: Column, reading: _Reading, lines: Sequence[int], notes: list[str], used: tuple[str, ...]
) -> tuple[Times, tuple[str, ...], bool]:
    """Return the times with their step. Times without an order are refused, irregular ones noted."""
    values, cells = reading.values, column.cells
    newest_first = len(values) > 2 and bool((np.diff(values).astype(np.int64) < 0).all())
    if newest_first:
        values, cells, lines = values[::-1], cells[::-1], lines[::-1]
        notes.append("The newest row comes first: rows are read from the last to the first.")
    backwards = np.flatnonzero(np.diff(values).astype(np.int64) <= 0)
    if backwards.size:
        row = int(backwards[0]) + 1
        hint = ""
        if values[row] == values[row - 1] or len(np.unique(values)) < len(values):
            hint = "; if the table has several series, --id names the column that tells them apart"
        raise InputError(
            f"{name}: line {lines[row]}, column {column.name!r}: {cells[row]} does not come after "
            f"{cells[row - 1]} of line {lines[row - 1]}; rows must be in order of time{hint}"
        )
    steps, usual = _steps(values)
    step = Step(_unit(values), usual)
    odd = [int(row) for row in np.flatnonzero(steps != usual)]
    if odd:
        places = some([(i, f"line {lines[i + 1]} ({cells[i]} to {cells[i + 1]})") for i in odd])
        longer = int((steps > usual).sum())
        absent = int(np.round(steps[steps > usual] / usual - 1).sum())
        missing = f", {counted(absent, 'row')} missing," if longer == len(odd) and absent else ""
        notes.append(
            f"Irregular: {counted(len(odd), 'step')} in time other than {step}{missing} treated as if equal: {places}."
        )
    return Times(column.name, values, step, reading.pattern, reading.zone), used, newest_first
