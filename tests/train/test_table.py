"""CSV files as tables: what is understood, and what is refused, by line and column."""

from __future__ import annotations

import csv
import io
import itertools
import os
from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.train.settings import InputError
from retrograd.train.table import Step, Table, _names, read_table

DAY = date(2021, 1, 1)  # a Friday


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data.csv"


def read(file: Path, text: str | bytes, gaps: str = "refuse") -> Table:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_table(file, gaps=gaps)


def refusal(file: Path, text: str | bytes) -> str:
    with pytest.raises(InputError) as error:
        read(file, text)
    message = str(error.value)
    assert message.startswith(str(file))
    return message.removeprefix(str(file)).lstrip(": ")


# ---- numbers ---------------------------------------------------------------------------------------------------------

numbers = st.floats(-1e100, 1e100, allow_nan=False, allow_infinity=False)
names = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0\ufeff"), min_size=1, max_size=8).map(str.strip)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, list[float]]:
    titles = draw(st.lists(names.filter(lambda name: name != ""), min_size=1, max_size=4, unique=True))
    rows = draw(st.integers(2, 5))
    column = st.lists(numbers, min_size=rows, max_size=rows)
    return {f"x {title}": draw(column) for title in titles}  # no name is a number, or says when


@settings(deadline=None)
@given(tables(), st.sampled_from(",;\t|"), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", "\ufeff"]))
def test_what_csv_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, list[float]], delimiter: str, end: str, mark: str
) -> None:
    if any(other in name for name in columns for other in ",;\t|"):
        columns = {f"x{i}": values for i, values in enumerate(columns.values())}
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    table = read(tmp_path_factory.getbasetemp() / "round.csv", (mark + text.getvalue()).encode())
    assert {name: values.tolist() for name, values in table.columns.items()} == columns
    assert table.notes == ()
    assert table.rows == len(next(iter(columns.values())))


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("a,b\n1,2\n3,4\n", {"a": [1, 3], "b": [2, 4]}),
        ("a;b\n1,5;-2\n,25;1e-3\n", {"a": [1.5, 0.25], "b": [-2, 0.001]}),
        ("a\n 1 \n\n2", {"a": [1, 2]}),
        ('"a, b"|c\n"1"|2\n"3"|4\n', {"a, b": [1, 3], "c": [2, 4]}),
        ("a, b\n1, 2\n3, 4\n", {"a": [1, 3], "b": [2, 4]}),
        ("1,2\n3,4\n", {"column1": [1, 3], "column2": [2, 4]}),
        ("a,\n1,2\n3,4\n", {"a": [1, 3], "column2": [2, 4]}),
        ("a\tb\n1,5\t2\n3\t4,25\n", {"a": [1.5, 3], "b": [2, 4.25]}),
        ("a,b\n1,2\n3,4\n,\n,\n", {"a": [1, 3], "b": [2, 4]}),
    ],
)
def test_forms(file: Path, text: str, columns: dict[str, list[float]]) -> None:
    table = read(file, text)
    assert {name: values.tolist() for name, values in table.columns.items()} == columns
    assert all(values.dtype == np.float64 for values in table.columns.values())


def test_what_is_no_number_is_told_by_line_and_column(file: Path) -> None:
    message = refusal(file, 'a,"b\nb"\n1,2\n\n3,x\n-inf,1_0\n1e999,\n')
    assert "4 cells are not numbers" in message
    for place in ("line 5, column 'b\\nb': 'x'", "line 6, column 'a': '-inf'", "column 'b\\nb': '1_0'", "'1e999'"):
        assert place in message
    many = "a,b\n1,2\n" + "".join(f"{i},x{i}\n" for i in range(47))
    assert refusal(file, many).endswith("line 12, column 'b': 'x9'; and 37 more")
    assert "line 3, column 'b': '1,5'" in refusal(file, "a;b\n1;1.5\n2;1,5\n")  # one decimal mark, not two


@pytest.mark.parametrize("gap", ["", "NA", "n/a", "NaN", "null", "None", "?"])
def test_gaps_are_refused_or_filled_in(file: Path, gap: str) -> None:
    text = f"a,b\n{gap},0\n2,10\n{gap},{gap}\n{gap},30\n8,{gap}\n"
    message = refusal(file, text)
    assert message.startswith("5 gaps: line 2, column 'a'; line 4, column 'a'; line 4, column 'b'; line 5, column 'a'")
    assert "--gaps interpolate" in message
    table = read(file, text, gaps="interpolate")
    assert table.columns["a"].tolist() == [2, 2, 4, 6, 8]
    assert table.columns["b"].tolist() == [0, 10, 20, 30, 30]
    assert table.notes[0].startswith("5 gaps interpolated: line 2, column 'a'")


def test_interpolation_fills_gaps_only(file: Path) -> None:
    file.write_text("a\n1\nx\n3\n")
    with pytest.raises(InputError, match="line 3, column 'a': 'x'"):
        read_table(file, gaps="interpolate")


def test_columns_of_text_are_left_out(file: Path) -> None:
    table = read(file, "city,a,empty\nRome,1,\nOslo,2,\n")
    assert list(table.columns) == ["a"]
    assert table.notes == (
        "Column 'city' is text ('Rome') and is left out.",
        "Column 'empty' is empty and is left out.",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("\ufeff \n\n", "is empty"),
        (",,\n,,\n", "is empty"),
        ("a,b\n", "has a header and no rows; a series needs at least 2"),
        ("a,b\n1,2\n", "has 1 row of data; a series needs at least 2"),
        ("a,b\n1,2\n3\n", "line 3 has 1 cell, but the first row has 2"),
        ("a,b\n1,2\n3,4,5\n", "line 3 has 3 cells, but the first row has 2"),
        ("a,b,a\n1,2,3\n4,5,6\n", "columns 1 and 3 are both called 'a'"),
        ("a,b\nx,low\nz,high\n", "has no column of numbers; its columns are 'a', 'b'. Column 'a' is text ('x')"),
        ("a,b\n1,1e200\n2,2e200\n", "2 cells are not numbers from -1e+100 to 1e+100: line 2, column 'b': '1e200'"),
        ('a,b\n1,2\n"3,4\n', "after line 2"),
        (b"a,b\n1,2\n3,4\xe4\n", "1 cell is not a number from -1e+100 to 1e+100: line 3, column 'b': '4ä'"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "is not a text file: byte 8 is 0"),
        (b"\xff\xfea\0,", "begins like UTF-16 text, but is not"),
    ],
)
def test_files_that_are_no_tables(file: Path, text: str | bytes, words: str) -> None:
    assert refusal(file, text).startswith(words)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path, Path(os.devnull)):  # a device may have no end
        with pytest.raises(InputError, match=path.name):
            read_table(path)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"pipe is a pipe, not a file; save it to a file first"):
        read_table(tmp_path / "pipe")


def test_the_names_of_many_columns_are_compared_once(file: Path) -> None:
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    names = [Name(f"x{i}") for i in range(16_000)]
    assert _names("wide.csv", list(names)) == names
    compared = 0
    _names("wide.csv", list(names))
    assert compared <= 4 * len(names)  # some, where hashes collide

    text = ",".join(names) + "\n" + 3 * (",".join("7" for _ in names) + "\n")
    assert list(read(file, text).columns) == names
    assert refusal(file, text.replace("x15999", "x123", 1)) == "columns 124 and 16000 are both called 'x123'"


def test_commas_that_may_be_thousands_are_refused(file: Path) -> None:
    message = refusal(file, "a;b\n1,234;5\n22,500;6\n")
    assert message.startswith("line 2, column 'a': '1,234' may be a number of thousands or have a decimal comma")
    assert "--decimal point or --decimal comma" in message
    assert read_table(file, decimal="comma").columns["a"].tolist() == [1.234, 22.5]
    assert read_table(file, decimal="point").columns["a"].tolist() == [1234, 22500]
    assert read(file, "a;b\n1,234;5\n0,500;6\n").columns["a"].tolist() == [1.234, 0.5]
    assert read(file, "a;b\n1,234;5\n22,500;6.5\n").columns["a"].tolist() == [1234, 22500]
    assert read(file, 'a,b\n"1,234",5\n"22,500",6\n').columns["a"].tolist() == [1234, 22500]


@settings(deadline=None)
@given(st.binary(max_size=60) | st.text(st.sampled_from('a1.,;|\t\n\r"-/ Q?:'), max_size=60).map(str.encode))
def test_any_bytes_are_a_table_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    try:
        table = read(tmp_path_factory.getbasetemp() / "any.csv", content, gaps="interpolate")
    except InputError:
        return
    assert table.columns
    assert all(len(values) == table.rows and np.isfinite(values).all() for values in table.columns.values())
    assert len(table.times.after(3)) == 3


# ---- times -----------------------------------------------------------------------------------------------------------


def dated(stamps: list[str], delimiter: str = ",") -> str:
    return "\n".join([f"when{delimiter}x", *(f'"{stamp}"{delimiter}{i * i}' for i, stamp in enumerate(stamps))])


def business_days(count: int) -> list[date]:
    return list(itertools.islice((d for i in itertools.count() if (d := DAY + timedelta(i)).weekday() < 5), count))


@pytest.mark.parametrize(
    ("stamps", "step", "following"),
    [
        (["2020-02-27", "2020-02-28"], "1 day", ["2020-02-29", "2020-03-01"]),
        (["2020/12/24", "2020/12/31"], "7 days", ["2021/01/07"]),
        (["2020-11", "2020-12", "2021-01"], "1 month", ["2021-02", "2021-03"]),
        (["2020-10-31", "2020-11-30", "2020-12-31"], "1 month", ["2021-01-31", "2021-02-28", "2021-03-31"]),
        (["2020-11-30", "2020-12-30"], "1 month", ["2021-01-30", "2021-02-28", "2021-03-30"]),
        (["15.06.2019", "15.12.2019", "15.06.2020"], "6 months", ["15.12.2020", "15.06.2021"]),
        (["2018-01-01", "2019-01-01", "2020-01-01"], "1 year", ["2021-01-01", "2022-01-01"]),
        (["2020Q3", "2020Q4", "2021Q1"], "3 months", ["2021Q2", "2021Q3"]),
        (["Jan 2020", "Feb 2020"], "1 month", ["Mar 2020"]),
        (["31 Dec 2019", "01 Jan 2020"], "1 day", ["02 Jan 2020"]),
        (["12/30/2020", "12/31/2020"], "1 day", ["01/01/2021"]),
        (["30/12/2020", "31/12/2020"], "1 day", ["01/01/2021"]),
        (["2020-01-01 23:45", "2020-01-02 00:00"], "15 minutes", ["2020-01-02 00:15"]),
        (["2020-01-01T22:00:00Z", "2020-01-01T23:00:00Z"], "1 hour", ["2020-01-02T00:00:00Z"]),
        (["2020-01-01 22:00:00+01:00", "2020-01-01 22:00:30+01:00"], "30 seconds", ["2020-01-01 22:01:00+01:00"]),
        ([str(day) for day in business_days(10)], "1 business day", ["2021-01-15", "2021-01-18", "2021-01-19"]),
    ],
)
def test_dates_go_on_at_their_own_step(file: Path, stamps: list[str], step: str, following: list[str]) -> None:
    table = read(file, dated(stamps))
    assert table.times.column == "when"
    assert str(table.times.step) == step
    assert [table.times.label(row) for row in range(len(stamps))] == stamps
    assert table.times.after(len(following)) == following
    assert list(table.columns) == ["x"]
    assert table.notes == ()


@settings(deadline=None)
@given(
    st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)).map(lambda moment: moment.replace(microsecond=0)),
    st.integers(1, 10**6),
    st.integers(2, 6),
)
def test_times_go_on_as_they_began(
    tmp_path_factory: pytest.TempPathFactory, first: datetime, seconds: int, rows: int
) -> None:
    stamps = [f"{first + i * timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S}" for i in range(rows + 3)]
    table = read(tmp_path_factory.getbasetemp() / "times.csv", dated(stamps[:rows]))
    if table.times.step.unit == "microseconds":  # else the 5th to the 5th happened to be a month
        assert table.times.after(3) == stamps[rows:]


def test_of_two_readings_of_dates_the_steadier_is_meant(file: Path) -> None:
    months = read(file, dated([f"01/{month:02}/{year}" for year in (2020, 2021) for month in range(1, 13)]))
    assert months.times.after(1) == ["01/01/2022"]
    assert str(months.times.step) == "1 month"
    days = read(file, dated([f"01/{day:02}/2020" for day in range(1, 13)]))
    assert str(days.times.step) in ("1 day", "1 month")
    assert "read in two ways" in days.notes[0]


def test_clocks_that_change_zone_are_read_as_utc(file: Path) -> None:
    stamps = ["2020-03-29T00:00:00+01:00", "2020-03-29T01:00:00+01:00", "2020-03-29T03:00:00+02:00"]
    times = read(file, dated(stamps)).times
    assert str(times.step) == "1 hour"
    assert times.after(1) == ["2020-03-29T02:00:00Z"]


def test_times_beyond_the_calendar_of_python(file: Path) -> None:
    times = read(file, "date,a\n9998-12-31,1\n9999-12-31,2\n").times
    assert times.after(1) == ["10000-12-31T00:00:00"]
    times = read(file, "date,a\n0001-01-01T00:00+23:00,1\n0001-01-01T00:00+22:00,2\n").times
    assert times.label(0) == "0000-12-31T01:00:00Z"


def test_times_that_go_back_are_refused(file: Path) -> None:
    for second in ("2020-01-04", "2020-01-05"):
        message = refusal(file, dated(["2020-01-05", second]))
        assert message.startswith(f"line 3, column 'when': {second} does not come after 2020-01-05 of line 2")


def test_dates_that_are_none_are_told(file: Path) -> None:
    message = refusal(file, dated(["2020-01-05", "soon", "2020-02-31"]))
    assert message.startswith("2 cells are not dates like '2020-01-05': line 3, column 'when': 'soon'; line 4")
    assert (
        refusal(file, dated(["", "2020-01-05"])) == "1 cell is not a date like '2020-01-05': line 2, column 'when': ''"
    )


def test_irregular_steps_are_told(file: Path) -> None:
    stamps = [str(DAY + timedelta(i)) for i in range(40) if i not in (5, 20, 21)]
    table = read(file, dated(stamps))
    (note,) = table.notes
    assert "2 steps in time other than 1 day" in note
    assert "line 7 (2021-01-05 to 2021-01-07)" in note
    assert table.times.after(1) == [str(DAY + timedelta(40))]


def test_an_index_is_a_steady_column_of_a_telling_name(file: Path) -> None:
    steady = read(file, "Time,x\n10,1\n20,5\n30,3\n")
    assert (steady.times.column, list(steady.columns)) == ("Time", ["x"])
    assert steady.times.after(2) == ["40", "50"]
    assert read(file, ",x\n0,1\n1,5\n2,3\n").times.column == "index"  # as pandas writes it
    for text in ("time,x\n10,1\n20,5\n40,3\n", "load,x\n10,1\n20,5\n30,3\n"):
        table = read(file, text)
        assert len(table.columns) == 2
        assert (table.times.column, table.times.after(1)) == ("row", ["4"])
    assert list(read(file, "t\n1\n2\n3\n").columns) == ["t"]  # what else could be forecast?
    assert read(file, "year,x\n1990,1\n1991,5\n1992,2\n").times.after(2) == ["1993", "1994"]


@pytest.mark.parametrize(
    ("step", "seasons"),
    [
        (Step("microseconds", 3600e6), (24, 168, 8766)),
        (Step("microseconds", 86400e6), (7, 365)),
        (Step("months", 1), (12,)),
        (Step("months", 3), (4,)),
        (Step("months", 12), ()),
        (Step("business days", 1), (5, 261)),
        (Step("row", 1), ()),
    ],
)
def test_seasons_of_the_calendar(step: Step, seasons: tuple[int, ...]) -> None:
    assert step.seasons() == seasons
