"""Read tables of numbers over time: CSV files, Excel sheets and Parquet files. Errors name the line and the column."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import io
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .dates import TIME_NAMES, Column, Step, Times, find_times, has_dates
from .files import check_data
from .settings import InputError
from .words import counted, listed, named, some

__all__ = ["Panel", "Step", "Table", "Times", "check_libraries", "read_data", "read_table"]

Array = npt.NDArray[Any]
Gaps = Literal["refuse", "interpolate"]

_DELIMITERS: Final = (",", ";", "\t", "|")
_GAPS: Final = frozenset(
    {"", "na", "n/a", "#n/a", "nan", "null", "none", "?", "-", "--", "–", "—", "..", "...", ".", "n.a.", "n.d."}
    | {"nd", "n.v.", "missing", "(na)", "nat", "<na>", "#div/0!", "#value!", "#ref!"}
)
_DATED: Final = frozenset({"date", "datetime", "timestamp", "ds", "time", "yyyymm", "yearmonth", "yyyymmdd"})
_TOTALS: Final = re.compile(
    r"(grand |sub)?totals?|sum|summe|gesamt|average|avg|mean|max(imum)?|min(imum)?|std|count", re.IGNORECASE
)
_COMMENT: Final = re.compile(r"\s*(#(?!n/a|div/|value!|ref!)|//|%)", re.IGNORECASE)
_PLAIN: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_GROUPED: Final = re.compile(r"[+-]?[1-9]\d{0,2}([., ' ])\d{3}(\1\d{3})*", re.ASCII)
_CURRENCY: Final = r"(?:[$€£¥₹]|US\$|USD|EUR|GBP|CHF|JPY)"
_DECORATED: Final = re.compile(
    rf"(?P<open>\()?(?P<sign>[+\-−–]?)\s*{_CURRENCY}?\s*(?P<inner>[+\-−]?)"
    r"(?P<digits>\d[\d.,' \u00a0\u2009\u202f]*|[.,]\d+)(?P<power>[eE][+-]?\d+)?\s*"
    rf"(?P<unit>{_CURRENCY}|%|‰|°?[A-Za-zµ°²³/]{{1,12}})?(?P<close>\))?"
)
_LARGEST: Final = 1e100  # so that sums of squares are finite
_HINT: Final = "pip install 'retrograd[series]'"


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


@dataclass(frozen=True)
class Panel:
    """Many series of one long table, in the order of the file: a row for each series and time."""

    name: str
    id_column: str
    target: str
    series: dict[str, Array]  # float64 values by the series' name, oldest first, without gaps
    times: dict[str, Times]
    notes: tuple[str, ...]
    digest: str

    @property
    def rows(self) -> int:
        return sum(map(len, self.series.values()))


def check_libraries() -> None:
    """Refuse to go on without the libraries of the extra `series`."""
    missing = [name for name in ("pandas", "matplotlib", "statsforecast") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"series need {' and '.join(missing)}: {_HINT}")


def read_table(
    path: str | os.PathLike[str],
    *,
    gaps: str = "refuse",
    decimal: str = "auto",
    time: str | None = None,
    identity: str | None = None,
    name: str | None = None,
) -> Table:
    """Read a table with a row for each time. With `gaps` "interpolate", missing values are interpolated linearly."""
    found = read_data(path, gaps=gaps, decimal=decimal, time=time, identity=identity, name=name)
    if isinstance(found, Panel):
        raise InputError(f"{found.name} has {len(found.series):,} series (column {found.id_column!r}), not one")
    return found


def read_data(
    path: str | os.PathLike[str],
    *,
    gaps: str = "refuse",
    decimal: str = "auto",
    time: str | None = None,
    identity: str | None = None,
    target: str | None = None,
    name: str | None = None,
) -> Table | Panel:
    """Read a table with a row for each time, or a long table with a row for each series and time (a panel).

    `time`, `identity` and `target` are the names of columns. A table with a column `unique_id` is a panel, as is one
    for which `identity` is given; its values are in the column `target`, by default `y`. `name` stands for the path in
    messages.
    """
    name = name or os.fspath(path)
    check_data(path)
    check_libraries()
    notes: list[str] = []
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}") from None
    sheet = _read_sheet(name, content, notes)
    digest = hashlib.sha256(content).hexdigest()
    for what, wanted in (("--time", time), ("--id", identity)):
        if wanted is not None and wanted not in sheet.names:
            raise InputError(f"{what}: {name} has no column {wanted!r}; it has {listed(sheet.names)}")
    if identity is None and "unique_id" in sheet.names:
        identity = "unique_id"
    if identity is None:
        columns, times, _ = _read_rows(name, sheet, gaps, decimal, time, notes)
        return Table(name, columns, times, tuple(notes), digest)
    target = target or ("y" if "y" in sheet.names else None)
    if target is None or target not in sheet.names:
        raise InputError(
            f"{name} has {'no column y' if target is None else f'no column {target!r}'} with the values of the series; "
            f"--target names it: {listed(sheet.names)}"
        )
    series, times_of = _read_series(name, sheet, gaps, decimal, time, identity, target, notes)
    if len(notes) > 12:
        notes[10:] = [f"... and {len(notes) - 10} more notes like these."]
    return Panel(name, identity, target, series, times_of, tuple(notes), digest)


def _read_series(
    name: str,
    sheet: Sheet,
    gaps: str,
    decimal: str,
    time: str | None,
    identity: str,
    target: str,
    notes: list[str],
) -> tuple[dict[str, Array], dict[str, Times]]:
    """Return the values and the times of the series of a panel."""
    for what, other in (("--target", target), ("--time", time)):
        if other == identity:
            raise InputError(f"{what}: column {identity!r} of {name} names the series")
    at = sheet.names.index(identity)
    rows: dict[str, list[int]] = {}
    for row, cells in enumerate(sheet.cells):
        if not cells[at]:
            raise InputError(f"{name}: line {sheet.lines[row]}, column {identity!r}: the name of the series is missing")
        rows.setdefault(cells[at], []).append(row)
    known = time or ("ds" if "ds" in sheet.names else None)
    others = [i for i, column in enumerate(sheet.names) if column not in (identity, target, known)]
    if known is not None:
        _leave_out(name, sheet, others, target, notes)
        cells = [row[sheet.names.index(known)] for row in sheet.cells]
        if time is not None or not all(map(str.isdecimal, cells)) or min(map(len, cells)) > 3:
            time = known  # of dates; short numbers count the rows

    def read(key: str, keep: Sequence[int], own: list[str]) -> tuple[dict[str, Array], Times, tuple[str, ...]]:
        part = Sheet(
            [sheet.names[i] for i in keep],
            [[sheet.cells[row][i] for i in keep] for row in rows[key]],
            [sheet.lines[row] for row in rows[key]],
            sheet.delimiter,
        )
        try:
            return _read_rows(name, part, gaps, decimal, time, own)
        except InputError as error:
            raise InputError(f"{error} (series {key!r})") from None

    keep = [i for i in range(len(sheet.names)) if i != at and (known is None or i not in others)]
    if known is None:  # the first series shows which columns are the time
        used = read(next(iter(rows)), keep, [])[2]
        _leave_out(name, sheet, [i for i in others if sheet.names[i] not in used], target, notes)
        keep = [i for i in keep if sheet.names[i] in (target, *used)]
    values: dict[str, Array] = {}
    all_times: dict[str, Times] = {}
    for key in rows:
        own: list[str] = []
        found, all_times[key], _ = read(key, keep, own)
        if target not in found:
            raise InputError(f"{name}: column {target!r} of the series {key!r} has no numbers")
        values[key] = found[target]
        notes += (f"{key}: {note}" for note in own)
    return values, all_times


def _leave_out(name: str, sheet: Sheet, columns: Sequence[int], target: str, notes: list[str]) -> None:
    """Note the columns of text, which a panel does not use. Refuse those of numbers, which may be meant to be used."""
    texts: list[str] = []
    numbers: list[str] = []
    for i in columns:
        cells = [row[i] for row in sheet.cells if row[i].lower() not in _GAPS]
        numeric = bool(cells) and all(map(_DECORATED.fullmatch, cells))
        (numbers if numeric else texts).append(sheet.names[i])
    if numbers:
        raise InputError(
            f"{name}: a panel forecasts one column, {target!r}, from its own values, and does not use "
            f"{named('column', numbers)} of numbers: take {'it' if len(numbers) == 1 else 'them'} out of the table, or "
            "name the column to forecast with --target"
        )
    if texts:
        notes.append(f"{named('Column', texts)} {'is' if len(texts) == 1 else 'are'} not of numbers and left out.")


def _read_rows(
    name: str, sheet: Sheet, gaps: str, decimal: str, time: str | None, notes: list[str]
) -> tuple[dict[str, Array], Times, tuple[str, ...]]:
    """Return the columns of numbers, the times of rows, and the columns that these were read from."""
    if len(sheet.cells) < 2:
        what = "a header and no rows" if not sheet.cells else "1 row of data"
        raise InputError(f"{name} has {what}; a series needs at least 2")
    texts = dict(zip(sheet.names, map(list, zip(*sheet.cells, strict=True)), strict=True))
    pairs = [Column(column, cells) for column, cells in texts.items()]
    times, used, newest_first = find_times(name, pairs, sheet.lines, notes, time)
    if set(used) < set(texts):
        for column in used:
            del texts[column]
    elif time is None:
        times, newest_first = None, False  # the only column is what to forecast
    columns = _numbers(name, texts, sheet, gaps, decimal, notes, undated=times is None)
    if newest_first:
        columns = {column: values[::-1].copy() for column, values in columns.items()}
    if not columns:
        why = "".join(f" {note}" for note in notes)
        raise InputError(f"{name} has no column of numbers; its columns are {listed(sheet.names)}.{why}")
    if times is None:
        times = _index(columns, notes)
        used = (times.column,)
    return columns, times, used


# ---- files -----------------------------------------------------------------------------------------------------------


class Sheet(NamedTuple):
    """The cells of a file as text, without what is not data."""

    names: list[str]
    cells: list[list[str]]
    lines: list[int]  # of the rows, as an editor or a spreadsheet counts them
    delimiter: str  # "" if cells were not separated by text


def _read_sheet(name: str, content: bytes, notes: list[str]) -> Sheet:
    import pandas as pd

    kind = Path(name).suffix.lower()
    if content[:4] == b"PK\x03\x04" or kind in (".xlsx", ".xls"):
        kind = ".xlsx"
    elif content[:4] == b"PAR1" or kind == ".parquet":
        kind = ".parquet"
    else:
        return _read_csv(name, _decode(name, content, notes), notes)
    try:
        if kind == ".parquet":
            frame = pd.read_parquet(io.BytesIO(content))
            if not isinstance(frame.index, pd.RangeIndex):
                frame = frame.reset_index()
            cells = [[_cell(value) for value in row] for row in frame.itertuples(index=False, name=None)]
            return Sheet(_names(name, [str(c) for c in frame.columns]), cells, list(range(1, len(cells) + 1)), "")
        with pd.ExcelFile(io.BytesIO(content)) as book:
            if len(book.sheet_names) > 1:
                notes.append(
                    f"The file has {len(book.sheet_names)} sheets; the first, {book.sheet_names[0]!r}, is read."
                )
            frame = book.parse(0, header=None, dtype=object, keep_default_na=False, na_values=[])
    except ImportError:
        package = "pyarrow" if kind == ".parquet" else "openpyxl"
        raise InputError(f"{name}: {kind} files need {package}: {_HINT}") from None
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise InputError(f"{name} is not a {kind} file that pandas reads: {error}") from None
    except Exception as error:  # libraries of file formats raise their own
        raise InputError(f"{name} is damaged, or not a {kind} file: {type(error).__name__}: {error}") from None
    rows = [[_cell(value) for value in row] for row in frame.itertuples(index=False, name=None)]
    return _tidy(name, [(line, row) for line, row in enumerate(rows, 1) if any(row)], "", notes)


def _cell(value: Any) -> str:
    """Format a cell of a spreadsheet or a Parquet file as it would be in a CSV file."""
    import pandas as pd

    if value is None or value is pd.NaT or (isinstance(value, float) and np.isnan(value)) or value is pd.NA:
        return ""
    if hasattr(value, "isoformat"):
        return str(value.isoformat(sep=" ") if hasattr(value, "hour") else value.isoformat()).removesuffix(" 00:00:00")
    return repr(float(value)) if isinstance(value, (float, np.floating)) else str(value).strip()


def _decode(name: str, content: bytes, notes: list[str]) -> str:
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        try:
            return content.decode("utf-16")
        except UnicodeDecodeError:
            raise InputError(f"{name} begins like UTF-16 text, but is not; save it as UTF-8") from None
    if 0 in content:
        raise InputError(f"{name} is not a text file: byte {content.index(0)} is 0")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        notes.append(f"The file is not UTF-8 (line {line}): it is read as Windows-1252.")
        text = content.decode("cp1252", "replace")
    if not text.strip():
        raise InputError(f"{name} is empty")
    return text


def _parse(text: Iterable[str], delimiter: str) -> Iterable[tuple[int, list[str]]]:
    """Yield the rows that are not blank, each with its first line number."""
    # pandas' parser fills short rows and does not tell lines.
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
    before = 0
    for row in reader:
        if row and (len(row) > 1 or row[0].strip()):
            yield before + 1, [cell.strip() for cell in row]
        before = reader.line_num


def _read_csv(name: str, text: str, notes: list[str]) -> Sheet:
    lines = text.splitlines(keepends=True)
    comments = [i for i, line in enumerate(lines) if _COMMENT.match(line)]
    for i in comments:
        lines[i] = "\n"
    if comments:
        notes.append(f"{counted(len(comments), 'comment line')} skipped.")
    if lines and lines[0].lower().startswith("sep=") and len(lines[0].strip()) == 5:  # Excel's own mark
        lines[0] = "\n"
    delimiter = _sniff([line for line in lines if line.strip()][:60])
    rows: list[tuple[int, list[str]]] = []
    try:
        rows.extend(_parse(lines, delimiter))
    except csv.Error as error:
        last = rows[-1][0] if rows else 0
        raise InputError(f"{name}: after line {last}: {error}") from None
    return _tidy(name, rows, delimiter, notes)


def _sniff(sample: Sequence[str]) -> str:
    """Return the delimiter that splits most rows alike and makes most cells numbers or dates."""
    best, best_score = ",", (-1.0, 0)
    for delimiter in _DELIMITERS:
        try:
            rows = [row for _, row in _parse(sample, delimiter)]
        except csv.Error:
            continue
        width = max((len(row) for row in rows), key=[len(row) for row in rows].count, default=1)
        if width < 2:
            continue
        alike = [row for row in rows if len(row) == width]
        known = [_is_known(cell) for row in alike[1:] or alike for cell in row]
        # A comma that is a decimal mark also splits rows, but leaves the other delimiter within cells.
        left = any(other in cell for row in alike for cell in row for other in ";\t|" if other != delimiter)
        score = (sum(known) / len(known) - left) * len(alike) / len(rows), width
        if score > best_score:
            best, best_score = delimiter, score
    return best


def _is_known(cell: str) -> bool:
    """Return whether a cell is data: a gap, a number or a date."""
    return cell.lower() in _GAPS or _DECORATED.fullmatch(cell) is not None or has_dates(cell)


def _tidy(name: str, rows: list[tuple[int, list[str]]], delimiter: str, notes: list[str]) -> Sheet:
    """Take away what is around the table: titles above it, totals and sources below it, empty rows and columns."""
    while rows and not any(rows[-1][1]):  # spreadsheets append empty rows
        rows.pop()
    if not rows:
        raise InputError(f"{name} is empty")
    widths = [len(row) for _, row in rows]
    width = max(widths, key=widths.count)
    first = 0
    while width > 1 and first < len(rows) - 2 and sum(map(bool, rows[first][1])) < 2 and _is_text(rows[first][1]):
        if len(rows[first][1]) == width and all(map(_is_known, rows[first + 1][1])):
            break  # a header with one name
        first += 1
    if first:
        notes.append(f"{counted(first, 'line')} above the header skipped: {rows[0][1][0][:40]!r}.")
    last = len(rows)
    while width > 1 and last - first > 3 and sum(map(bool, rows[last - 1][1])) < 2 and _is_text(rows[last - 1][1]):
        last -= 1
    if last < len(rows):
        notes.append(f"{counted(len(rows) - last, 'line')} below the table skipped: {rows[last][1][0][:40]!r}.")
    while last - first > 3 and any(_TOTALS.fullmatch(cell.rstrip(":")) for cell in rows[last - 1][1][:2]):
        last -= 1
        notes.append(f"Line {rows[last][0]} is a total ({rows[last][1][0]!r}) and is left out.")
    rows = rows[first:last]
    # A delimiter at the end of each row but the header makes no column.
    head = rows[0][1]
    for line, row in rows[1:]:
        if len(row) == len(head) + 1 and not row[-1]:
            row.pop()
        if len(row) != len(head):
            raise InputError(f"{name}: line {line} has {counted(len(row), 'cell')}, but the first row has {len(head)}")
    cells, lines = [row for _, row in rows], [line for line, _ in rows]
    if all(_is_known(cell) for cell in head):
        names = [f"column{i}" for i in range(1, len(head) + 1)]
        notes.append("The file has no header: columns are called column1, ...")
        return Sheet(names, cells, lines, delimiter)
    below = 1
    if len(cells) > 3 and _is_second_header(cells):
        head = [" ".join(filter(None, pair)) for pair in zip(head, cells[1], strict=True)]
        notes.append(f"The header has two lines; names are of both, such as {head[-1]!r}.")
        below = 2
    return Sheet(_names(name, head), cells[below:], lines[below:], delimiter)


def _is_text(row: Sequence[str]) -> bool:
    cell = next(filter(None, row), "")
    return not _is_known(cell)


def _is_second_header(cells: Sequence[Sequence[str]]) -> bool:
    """Return whether the second row has names or units: text over columns of numbers."""
    numeric = [i for i in range(len(cells[0])) if all(_is_known(row[i]) for row in cells[2:6])]
    return bool(numeric) and all(cells[1][i] and not _is_known(cells[1][i]) for i in numeric if cells[0][i] or True)


def _names(name: str, first: Sequence[str]) -> list[str]:
    names = [cell or f"column{i}" for i, cell in enumerate(first, 1)]
    if not first[0] and "index" not in names:
        names[0] = "index"  # the unnamed index column of pandas
    positions: dict[str, int] = {}
    for i, title in enumerate(names, 1):
        if (earlier := positions.setdefault(title, i)) != i:
            raise InputError(f"{name}: columns {earlier} and {i} are both called {title!r}")
    return names


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _numbers(
    name: str, texts: dict[str, list[str]], sheet: Sheet, gaps: str, decimal: str, notes: list[str], undated: bool
) -> dict[str, Array]:
    lines = sheet.lines
    columns: dict[str, Array] = {}
    faults: list[tuple[int, str]] = []  # row, what
    missing: list[tuple[int, str]] = []
    mark = _Mark(decimal, sheet.delimiter, texts)
    for column, cells in texts.items():
        values, wrong, absent, why = _column(name, column, cells, lines, mark, notes)
        if undated and len(wrong) == len(cells) and Column(column, ()).key in _DATED:
            raise InputError(
                f"{name}: column {column!r} has the name of a time, but line {lines[0]} has {cells[0]!r}, which is not "
                "a date of a known kind; write dates as 2024-12-31 or 2024-12-31 23:59"
            )
        there = ~np.isnan(values)
        if len(absent) == len(cells):
            notes.append(f"Column {column!r} is empty and is left out.")
            continue
        if len(wrong) + len(absent) == len(cells) and not any(
            re.match(r"[+-]?(\d|inf)", cells[i], re.I) for i in wrong
        ):
            notes.append(f"Column {column!r} is text ({_short(cells[wrong[0]])}) and is left out.")
            continue
        faults += ((row, f"line {lines[row]}, column {column!r}: {cells[row]!r}{why}") for row in wrong)
        missing += ((row, f"line {lines[row]}, column {column!r}") for row in absent)
        if absent and there.any():
            rows = np.arange(len(cells))
            values[~there] = np.interp(rows[~there], rows[there], values[there])
        columns[column] = values
    if faults:
        what = "1 cell is not a number" if len(faults) == 1 else f"{len(faults)} cells are not numbers"
        raise InputError(f"{name}: {what} from -{_LARGEST:g} to {_LARGEST:g}: {some(faults)}")
    if missing and gaps == "refuse":
        raise InputError(f"{name}: {counted(len(missing), 'gap')}: {some(missing)} (--gaps interpolate fills them in)")
    if missing:
        notes.append(f"{counted(len(missing), 'gap')} interpolated: {some(missing)}.")
    return columns


class _Mark:
    """The decimal mark of a file, and why."""

    def __init__(self, decimal: str, delimiter: str, texts: dict[str, list[str]]) -> None:
        self.given = {"point": ".", "comma": ","}.get(decimal)
        self.found: str | None = self.given
        if self.found is None:
            cells = {cell for column in texts.values() for cell in column if "," in cell or "." in cell}
            digits = [found["digits"].strip() for cell in cells if (found := _DECORATED.fullmatch(cell))]
            comma = sum(_decimal(text) == "," for text in digits)
            point = sum(_decimal(text) == "." for text in digits)
            if comma or point:
                self.found = "," if comma > point else "."
            elif delimiter in (",", ""):
                self.found = "."  # a comma within quotation marks separates thousands, as does one in a spreadsheet


def _decimal(digits: str) -> str | None:
    """Return the decimal mark that the digits show: "1,5" a comma, "1,234.5" a point, "1,234" none for certain."""
    marks = [character for character in digits if character in ",."]
    if not marks:
        return None
    if len(set(marks)) == 2:
        return marks[-1] if digits.count(marks[-1]) == 1 else None
    if len(marks) > 1:
        return "." if marks[0] == "," else ","  # grouped thousands
    return None if _GROUPED.fullmatch(digits) else marks[0]


def _column(
    name: str, column: str, cells: Sequence[str], lines: Sequence[int], mark: _Mark, notes: list[str]
) -> tuple[Array, list[int], list[int], str]:
    """Return the values, NaN for gaps and faults; the rows of faults and of gaps; and a hint on the faults."""
    import pandas as pd

    texts = pd.Series(cells, dtype=str)
    gap = texts.str.lower().isin(_GAPS)
    absent = [int(row) for row in np.flatnonzero(gap)]
    plain = texts.str.fullmatch(_PLAIN) | gap
    values = _floats(texts, plain & ~gap)
    if mark.found != "," and plain.all():
        wrong = np.flatnonzero(~gap & ~(np.abs(values) <= _LARGEST))
        values[wrong] = np.nan
        return values, [int(row) for row in wrong], absent, ""
    parts = texts.where(~gap).str.extract(f"^{_DECORATED.pattern}$")
    known = parts["digits"].notna() & (parts["open"].notna() == parts["close"].notna()) & ~gap
    known &= ~((parts["sign"] != "") & (parts["inner"] != ""))
    units = parts.loc[known, "unit"].fillna("")
    hint = ""
    if units.nunique() > 1:
        usual = str(units.mode().iloc[0])
        hint = f" (other cells have {usual!r})" if usual else " (other cells have no unit)"
        known &= parts["unit"].fillna("") == usual
    elif len(units) and units.iloc[0] and units.iloc[0] != "%":
        notes.append(f"The numbers of column {column!r} have the unit {units.iloc[0]!r}.")
    digits = parts["digits"].fillna("").str.replace(r"['\s\u00a0\u2009\u202f]", "", regex=True)
    digits = digits.where(~parts["digits"].fillna("").str.strip().str.contains(r"\s\S{1,2}(?:\s|$)", regex=True), "?")
    unsure = known & digits.map(lambda text: ("," in text) and _decimal(text) is None)
    decimal = mark.found
    if decimal is None and unsure.any():
        row = int(np.flatnonzero(unsure)[0])
        raise InputError(
            f"{name}: line {lines[row]}, column {column!r}: {cells[row]!r} may be a number of thousands or have a "
            "decimal comma: --decimal point or --decimal comma says which"
        )
    decimal = decimal or "."
    group = "." if decimal == "," else ","
    right = digits.map(lambda text: bool(re.fullmatch(_number_form(group, decimal), text)))
    known &= right
    bare = digits.str.replace(group, "", regex=False).str.replace(decimal, ".", regex=False)
    bare += parts["power"].fillna("")
    values = _floats(bare, known)
    negative = parts["open"].notna() | parts["sign"].isin(list("-−–")) | parts["inner"].isin(list("-−"))
    values = np.where(negative.to_numpy(), -values, values)
    wrong = np.flatnonzero(~gap & ~(np.abs(values) <= _LARGEST))
    values[wrong] = np.nan
    return values, [int(row) for row in wrong], absent, hint


def _floats(texts: Any, valid: Any) -> Array:
    """Return the numbers of the valid cells, NaN elsewhere. pandas.to_numeric is not exact in the last bit."""
    values = np.full(len(texts), np.nan)
    values[valid.to_numpy()] = texts[valid].to_numpy(object).astype(np.float64)
    return values


def _number_form(group: str, decimal: str) -> str:
    group, decimal = re.escape(group), re.escape(decimal)
    return rf"(\d{{1,3}}({group}\d{{3}})+|\d+)({decimal}\d*)?|{decimal}\d+"


def _index(columns: dict[str, Array], notes: list[str]) -> Times:
    """Remove and return the numeric time column, or number the rows."""
    rows = len(next(iter(columns.values()), ()))
    unsteady = None
    for column, values in columns.items():
        if Column(column, ()).key not in TIME_NAMES or len(columns) == 1:
            continue
        steps = np.diff(values)
        if steps[0] > 0 and np.allclose(steps, steps[0], rtol=1e-6, atol=1e-9 * abs(values).max()):
            step = (values[-1] - values[0]) / (rows - 1)
            return Times(column, columns.pop(column), Step("index", float(step)))
        unsteady = unsteady or column
    if unsteady is not None:
        notes.append(
            f"Column {unsteady!r} has the name of a time, but its steps differ: it is read as numbers, and the rows "
            "are counted. --time names the column of dates."
        )
    return Times("row", np.arange(1.0, rows + 1), Step("row", 1))


def _short(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else cell[:40] + "...")
