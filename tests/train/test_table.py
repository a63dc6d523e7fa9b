"""CSV files as tables: what is understood, and what is refused, by line and column."""

from __future__ import annotations

import csv
import io
import itertools
import os
import sys
import zipfile
from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.train.settings import InputError
from retrograd.train.table import Panel, Step, Table, _names, read_data, read_table

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


# ---- kinds of files --------------------------------------------------------------------------------------------------


def lines(*rows: str) -> str:
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("text", "first", "step", "after"),
    [
        (lines("yyyymm,x", "199911,1", "199912,5", "200001,3"), "199911", "1 month", "200002"),
        (lines("date,x", "20191231,1", "20200101,5", "20200102,3"), "20191231", "1 day", "20200103"),
        (lines("timestamp,x", "1577836800,1", "1577840400,5", "1577844000,3"), "1577836800", "1 hour", "1577847600"),
        (lines("time,x", "1577836800000,1", "1577836801000,5"), "1577836800000", "1 second", "1577836802000"),
        (lines("year,month,x", "1999,11,1", "1999,12,5", "2000,1,3"), "1999-11", "1 month", "2000-02"),
        (lines("Year,Month,x", "1999,Nov,1", "1999,Dec,5", "2000,Jan,3"), "1999-11", "1 month", "2000-02"),
        (lines("year,mon,day,x", "2020,2,28,1", "2020,2,29,5"), "2020-02-28", "1 day", "2020-03-01"),
        (lines("year,quarter,x", "1999,3,1", "1999,4,5", "2000,1,3"), "1999Q3", "3 months", "2000Q2"),
        (lines("year,qtr,x", "1999,Q3,1", "1999,Q4,5"), "1999Q3", "3 months", "2000Q1"),
        (lines("ds,x", "1999-11-01,1", "1999-12-01,5"), "1999-11-01", "1 month", "2000-01-01"),
        (lines("year,x", "1999,1", "2000,5", "2001,4"), "1999", "1 year", "2002"),
        (lines("when,x", "1999 Q3,1", "1999 Q4,5"), "1999 Q3", "3 months", "2000 Q1"),
        (lines("when,x", "Q3 1999,1", "Q4 1999,5"), "Q3 1999", "3 months", "Q1 2000"),
        (lines("when,x", "1999M11,1", "1999M12,5"), "1999M11", "1 month", "2000M01"),
        (lines("when,x", "November 1999,1", "December 1999,5"), "November 1999", "1 month", "January 2000"),
        (lines("date,time,x", "2020-01-01,22:30,1", "2020-01-01,23:00,5"), "2020-01-01 22:30", "30 minutes", None),
        (lines("when,x", "01/31/2020 11:30 PM,1", "02/01/2020 12:00 AM,5"), "01/31/2020 11:30 PM", "30 minutes", None),
        (lines("when,x", "2020-01-01T22,1", "2020-01-01T23,5"), "2020-01-01T22", "1 hour", "2020-01-02T00"),
        (lines("date,x", "2020-01-03,1", "2020-01-02,5", "2020-01-01,4"), "2020-01-01", "1 day", "2020-01-04"),
        (lines("when,x", "2020-01-05,1", "Jan 6 2020,5", "2020/01/07,4"), "2020-01-05", "1 day", "2020-01-08"),
    ],
)
def test_times_become_dates(file: Path, text: str, first: str, step: str, after: str | None) -> None:
    table = read(file, text)
    assert list(table.columns) == ["x"]
    assert table.times.values.dtype.kind == "M"
    assert (table.times.label(0), str(table.times.step)) == (first, step)
    assert after is None or table.times.after(1) == [after]


def test_what_is_not_a_date_is_not_counted_in_silence(file: Path) -> None:
    assert "column 'date' has the name of a time, but line 2 has 'first'" in refusal(
        file, "date,x\nfirst,1\nsecond,2\n"
    )
    (note,) = read(file, "period,x\n1,1\n2,5\n5,3\n").notes
    assert "has the name of a time, but its steps differ" in note
    message = refusal(file, dated(["2020-01-05", "03/04/2020", "2020-06-05"]))
    assert "'03/04/2020' may have the day or the month first" in message
    with pytest.raises(InputError, match="column 'x' has no dates: line 2 has '0'"):
        read_table(file, time="x")
    with pytest.raises(InputError, match=r"--time: .* has no column 'z'; it has 'when', 'x'"):
        read_table(file, time="z")


@pytest.mark.parametrize(
    ("text", "values", "note"),
    [
        (lines("a,b", "1 kg,2", "3.5 kg,4"), [1, 3.5], "have the unit 'kg'"),
        (lines("a,b", "1%,2", "3.5 %,4"), [1, 3.5], None),
        (lines("a,b", "$1,2", "$3.50,4"), [1, 3.5], None),
        (lines("a;b", "1.234,50 €;2", "-3,25 €;4"), [1234.5, -3.25], None),
        (lines("a,b", '"1,234.5",2', '"1,234,567",4'), [1234.5, 1234567], None),
        (lines("a;b", "1.234.567;2", "3;4"), [1234567, 3], None),
        (lines("a;b", "1 234;2", "3;4"), [1234, 3], None),
        (lines("a;b", "1'234;2", "3;4"), [1234, 3], None),
        (lines("a,b", "(12),2", "3,4"), [-12, 3], None),
        (lines("a,b", "−12,2", "3,4"), [-12, 3], None),
        (lines('"a","b"', '"1","2"', '"3","4"'), [1, 3], None),
        (lines("# made by", "# a program", "a,b", "1,2", "3,4"), [1, 3], "2 comment lines skipped"),
        (lines("sep=;", "a;b", "1;2", "3;4"), [1, 3], None),
        (lines("Sales of the year", "", "a,b", "1,2", "3,4"), [1, 3], "1 line above the header"),
        (lines("Sales,,", "a,b,c", "1,2,3", "3,4,5"), [1, 3], "1 line above the header"),
        (lines("a,b", "1,2", "3,4", "5,6", "Total,12"), [1, 3, 5], "Line 5 is a total"),
        (lines("a,b", "1,2", "3,4", "5,6", "Source: the office"), [1, 3, 5], "1 line below the table"),
        (lines("a,b", "kg,m", "1,2", "3,4"), [1, 3], "The header has two lines"),
        (lines("a,b,", "1,2,", "3,4,"), [1, 3], None),
    ],
)
def test_numbers_as_people_write_them(file: Path, text: str, values: list[float], note: str | None) -> None:
    table = read(file, text)
    assert next(iter(table.columns.values())).tolist() == values
    if note is not None:
        assert any(note in one for one in table.notes), table.notes


@pytest.mark.parametrize("gap", ["-", "..", "n/a", "NA", "#N/A", "--", "…"[:0], "n.a.", "<NA>"])
def test_marks_of_what_is_missing(file: Path, gap: str) -> None:
    assert read(file, f"a,b\n1,2\n{gap},3\n5,4\n", gaps="interpolate").columns["a"].tolist() == [1, 3, 5]


def test_units_that_differ_are_refused(file: Path) -> None:
    message = refusal(file, "a,b\n1 kg,2\n3 kg,3\n950 g,4\n")
    assert "line 4, column 'a': '950 g' (other cells have 'kg')" in message
    assert "line 3, column 'a': '12 34'" in refusal(file, "a,b\n1,2\n12 34,3\n")


def test_text_of_windows(file: Path) -> None:
    table = read(file, "größe,b\n1,2\n3,4\n".encode("cp1252"))
    assert list(table.columns) == ["größe", "b"]
    assert table.notes == ("The file is not UTF-8 (line 1): it is read as Windows-1252.",)
    assert read(file, "a,b\n1,2\n3,4\n".encode("utf-16")).columns["b"].tolist() == [2, 4]


def test_excel_and_parquet(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("openpyxl")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(
        {"date": pandas.date_range("2020-01-30", periods=4), "x": [1.5, 2, 3, 4], "n": [1, 2, 3, 5]}
    )
    frame.to_excel(tmp_path / "a.xlsx", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    frame.set_index("date").to_parquet(tmp_path / "b.parquet")
    for name in ("a.xlsx", "a.parquet", "b.parquet"):
        table = read_table(tmp_path / name)
        assert table.times.column == "date"
        assert table.times.after(1) == ["2020-02-03"]
        assert {key: values.tolist() for key, values in table.columns.items()} == {
            "x": [1.5, 2, 3, 4],
            "n": [1, 2, 3, 5],
        }
    for name in ("c.xlsx", "c.parquet"):
        (tmp_path / name).write_bytes(b"PK\x03\x04" if "x" in name else b"PAR1")
        with pytest.raises(InputError, match=name):
            read_table(tmp_path / name)


def test_a_long_table_is_a_panel(file: Path) -> None:
    text = lines("unique_id,ds,y", "b,2020-01,1", "b,2020-02,2", "a,2020-01,5", "a,2020-02,6", "a,2020-03,7")
    file.write_text(text)
    panel = read_data(file)
    assert isinstance(panel, Panel)
    assert {name: values.tolist() for name, values in panel.series.items()} == {"b": [1, 2], "a": [5, 6, 7]}
    assert panel.times["a"].after(1) == ["2020-04"]
    assert (panel.target, panel.id_column, panel.rows) == ("y", "unique_id", 5)
    with pytest.raises(InputError, match=r"has 2 series \(column 'unique_id'\), not one"):
        read_table(file)
    file.write_text(text.replace("unique_id,ds,y", "shop,day,sales"))
    with pytest.raises(InputError, match="--id names the column that tells them apart"):
        read_data(file)
    named = read_data(file, identity="shop", target="sales")
    assert isinstance(named, Panel)
    assert list(named.series) == ["b", "a"]
    with pytest.raises(InputError, match="has no column y with the values of the series; --target names it"):
        read_data(file, identity="shop")


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.xlsx", "openpyxl")])
def test_a_format_whose_library_is_missing(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("pyarrow", "fastparquet", "openpyxl"):
        monkeypatch.setitem(sys.modules, library, None)
    path = tmp_path / name
    with zipfile.ZipFile(path, "w") as book:
        book.writestr("xl/workbook.xml", "")
    if package == "pyarrow":
        path.write_bytes(b"PAR1")
    with pytest.raises(InputError) as raised:
        read_table(path)
    suffix = path.suffix
    assert str(raised.value).endswith(f"{name}: {suffix} files need {package}: pip install 'retrograd[series]'")
