"""That ``make stress`` says what it saw; what it sees is its own affair."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import stress


@pytest.mark.parametrize("name", stress.WORK)
def test_work_has_the_same_bits_in_any_number_of_threads(name: str) -> None:
    expected = stress.WORK[name](1)
    assert len(expected) > 1
    for threads in (1, 2, 4):
        assert stress.same(stress.WORK[name](threads), expected)
    assert not stress.same([*expected[:-1], 7], expected)


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def holds(seconds: float) -> Iterator[str]:
        yield f"{seconds:.0f} seconds"

    def fails(seconds: float) -> Iterator[str]:
        yield "so far"
        raise stress.Failed("as intended")

    def code(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["stress.py", *arguments])
        return stress.main()

    monkeypatch.setattr(stress, "PARTS", {"holds": (holds, 0.5), "fails": (fails, 0.5)})
    assert code("--part", "holds", "--seconds", "3") == 0
    assert code("--part", "fails", "--seconds", "3") == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("3 seconds\nso far\n", "as intended\n")

    rows = {"holds": stress.Row("holds", True, 1.0, ""), "fails": stress.Row("fails", False, 1.0, "as intended")}
    monkeypatch.setattr(stress, "one_part", lambda name, seconds: rows[name])
    assert code("--only", "holds") == 0
    assert code() == 1
    assert capsys.readouterr().out == "1 parts in 1 s: all held\n2 parts in 2 s: fails failed\n"


def test_a_part_that_crashes_has_failed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress.sys, "executable", "false")
    assert not stress.one_part("threads", 1.0).held
    assert "FAILED" in capsys.readouterr().out
