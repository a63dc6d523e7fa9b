"""Tables of the commands, as a terminal of any width shows them."""

from __future__ import annotations

import pytest

from retrograd.lab.commands.report import Column, laid_out

COLUMNS = (Column("row", 9, right=False), Column("time µs", 9), Column("of bound", 9), Column("", 7, right=False))
ROWS = [["layer_norm", "12.5", "80%", ""], ["layer_norm", "104", "", ""], ["batch_norm_relu", "3", "7%", "slower"]]
WHOLE = """\
row              time µs  of bound
──────────────────────────────────────────
layer_norm          12.5       80%
layer_norm           104
batch_norm_relu        3        7%  slower"""
WRAPPED = """\
                 time     of
row                µs  bound
────────────────────────────────────
layer_norm       12.5    80%
layer_norm        104
batch_norm_relu     3     7%  slower"""
NAMES_ABOVE = """\
  time     of
    µs  bound
─────────────────────
layer_norm
  12.5    80%
   104
batch_norm_relu
     3     7%  slower"""
STACKED = """\
layer_norm
  time µs   12.5
  of bound  80%
layer_norm
  time µs   104
batch_norm_relu
  time µs   3
  of bound  7%
            slower"""


@pytest.mark.parametrize(
    ("width", "expected"),
    [(42, WHOLE), (41, WRAPPED), (36, WRAPPED), (35, NAMES_ABOVE), (21, NAMES_ABOVE), (20, STACKED), (1, STACKED)],
    ids=str,
)
def test_a_table_fits_the_terminal(width: int, expected: str) -> None:
    lines = laid_out(COLUMNS, ROWS, width)
    assert "\n".join(line for line, _ in lines) == expected
    assert expected == STACKED or max(map(len, expected.splitlines())) <= width


def test_every_line_is_of_the_row_that_it_shows() -> None:
    """So that a wrong row is coloured in any layout."""
    for width in (42, 36, 21, 1):
        for line, row in laid_out(COLUMNS, ROWS, width):
            if row is None:
                assert "slower" not in line
            elif "_" in line:
                assert ROWS[row][0] in line
            if "slower" in line:
                assert row == 2


def test_empty_columns_are_left_out_and_wide_characters_count_twice() -> None:
    columns = (Column("name", 4, right=False), Column("torch µs", 9), Column("n", 1))
    lines = [line for line, _ in laid_out(columns, [["温度", "", "1"], ["ab", "", "20"]], 80)]
    assert lines == ["name   n", "\u2500" * 8, "温度   1", "ab    20"]


def test_one_column_alone() -> None:
    lines = laid_out((Column("name", 4, right=False),), [["a_long_name"]], 5)
    assert [line for line, _ in lines] == ["a_long_name"]
