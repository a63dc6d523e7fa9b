"""retrograd bench --compare and bench compare: which rows became slower, by more than noise, under what conditions."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from retrograd import cli
from retrograd.lab import bench

FIRST, SECOND = "layer_norm_n64c256", "lstm_t20n1i4h16"


def row(case: str = FIRST, provider: str = "retrograd", p50: float = 1e-3, **changes: Any) -> dict[str, Any]:
    """One row of a file, with a noise of 1 %."""
    values = dict.fromkeys(bench.CSV_COLUMNS, "")
    values |= {"case": case, "provider": provider, "pass": "forward", "threads": 1, "isa": "avx2", "p50": p50}
    values |= {"p20": 0.9 * p50, "p80": 1.2 * p50, "spread": 0.01}
    values |= {"device": "a processor", "caches": "small", "environment": "", "version": "1.0"}
    return values | changes


def written(path: Path, *rows: dict[str, Any], columns: tuple[str, ...] = bench.CSV_COLUMNS) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def compared(tmp_path: Path, old: list[dict[str, Any]], new: list[dict[str, Any]], threshold: float = 1.1) -> Any:
    measured = (bench.read_measurements(written(tmp_path / "some.csv", *rows)) for rows in (old, new))
    return bench.compare_measurements(*measured, threshold)


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        (1.0e-3, ""),
        (1.1e-3, ""),
        (1.11e-3, "slower?"),
        (1.13e-3, "slower"),  # above 1.1 plus the noise of 0.02
        (0.92e-3, ""),
        (0.905e-3, "faster?"),
        (0.88e-3, "faster"),
    ],
)
def test_slower_and_faster_by_more_than_noise(tmp_path: Path, seconds: float, verdict: str) -> None:
    comparison = compared(tmp_path, [row()], [row(p50=seconds)])
    (change,) = comparison.changes
    assert (change.verdict, change.others, change.noise) == (verdict, None, pytest.approx(0.02))
    assert change.ratio == pytest.approx(1e-3 / seconds)
    assert (comparison.slower == [change]) == (verdict == "slower")


def test_what_moved_the_others_is_noise(tmp_path: Path) -> None:
    """A machine that is 30 % slower now slows all; retrograd's own variants say nothing about the machine."""
    old = [row(), row(provider="torch", p50=4e-3), row(provider="plain", p50=1e-3)]
    slow = [row(p50=1.3e-3), row(provider="torch", p50=5.2e-3), row(provider="plain", p50=9e-3)]
    (change,) = compared(tmp_path, old, slow).changes
    assert (change.verdict, change.others) == ("slower?", pytest.approx(1 / 1.3))
    assert change.noise == pytest.approx(0.02 + 1 - 1 / 1.3)
    (change,) = compared(tmp_path, old, [row(p50=1.3e-3), *old[1:]]).changes
    assert (change.verdict, change.others) == ("slower", 1.0)


def test_rows_are_matched_by_pass_and_threads(tmp_path: Path) -> None:
    old = [row(), row(threads=2), row(**{"pass": "backward"}), row(SECOND)]
    new = [row(threads=2, p50=2e-3), row(), row(SECOND, threads=2)]
    comparison = compared(tmp_path, old, new)
    assert [(change[:3], change.verdict) for change in comparison.changes] == [
        ((FIRST, "forward", 2), "slower"),
        ((FIRST, "forward", 1), ""),
    ]
    assert comparison.only_old == [(FIRST, "backward", 1), (SECOND, "forward", 1)]
    assert comparison.only_new == [(SECOND, "forward", 2)]
    assert comparison.differences == []


def test_other_conditions_are_named(tmp_path: Path) -> None:
    old = [row(), row(provider="torch", version="2.0"), row(provider="sgemm", isa="")]
    new = [
        row(isa="avx512", version="1.1", environment="ATEN_CPU_CAPABILITY=avx2"),
        row(provider="torch", version="2.1", device="another"),
        row(provider="sgemm", isa="haswell"),
    ]
    assert compared(tmp_path, old, new).differences == [
        "ISA level of retrograd: avx2 before, avx512 now",
        "version of retrograd: 1.0 before, 1.1 now",
        "restrictions of retrograd: none before, ATEN_CPU_CAPABILITY=avx2 now",
        "version of torch: 2.0 before, 2.1 now",
    ]


def test_files_of_earlier_versions_can_be_read(tmp_path: Path) -> None:
    """The spread of all samples stands for that of the rounds; what was not recorded is not compared."""
    columns = ("case", "provider", "pass", "threads", "isa", "p20", "p50", "p80", "device", "version")
    (old,) = bench.read_measurements(written(tmp_path / "old.csv", row(), columns=columns))
    assert old.spread == pytest.approx(0.15)
    (new,) = bench.read_measurements(written(tmp_path / "new.csv", row(environment="RETROGRAD_ISA=avx2")))
    assert bench.compare_measurements([old], [new], 1.1).differences == []
    for path in sorted((Path(__file__).parents[3] / "bench" / "results").glob("*.csv")):
        assert len(bench.read_measurements(str(path))) > 4


def test_what_was_measured_is_what_would_be_read(tmp_path: Path) -> None:
    values = {"pass_" if name == "pass" else name: value for name, value in row().items()}
    measured = bench.BenchRow(**values)
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        bench.CsvFile(file).write([measured])
    assert bench.read_measurements(str(tmp_path / "a.csv")) == [bench.Measurement.of(measured)]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_exit_code_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(tmp_path / "old.csv", row(), row(SECOND), row(SECOND, threads=2))
    new = written(tmp_path / "new.csv", row(p50=1.2e-3), row(SECOND, p50=0.5e-3))
    assert cli.main(["bench", "compare", old, new]) == 1
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["row", "pass", "threads", "old", "µs", "new", "µs", "old/new", "noise", "others"]
    assert [line.split() for line in lines[:2]] == [
        [FIRST, "forward", "1", "1000", "1200", "0.83x", "±2%", "slower"],
        [SECOND, "forward", "1", "1000", "500", "2.00x", "±2%", "faster"],
    ]
    assert lines[2:] == [
        f"only in the old run: {SECOND} forward, threads 2",
        "rows compared: 2; 1 faster, 1 slower by more than 1.1x and the noise",
    ]
    assert cli.main(["bench", "compare", old, new, "--threshold", "1.3"]) == 0


def test_a_run_is_compared_with_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the selected rows are missed, and the old file may be overwritten by the new."""
    path = written(tmp_path / "a.csv", row(), row(threads=2), row(threads=4), row(SECOND))
    values = {"pass_" if name == "pass" else name: value for name, value in row(p50=2e-3).items()}
    numbers = (
        "ratio_vs_torch",
        "ratio_vs_plain",
        "over_retrograd",
        "share_of_bound",
        "share_of_peak",
        "gflops",
        "added",
    )
    values |= dict.fromkeys((*numbers, "tokens_per_second", "peak_bytes"))
    result = bench.BenchResult(FIRST, 1, (bench.BenchRow(**values),))
    monkeypatch.setattr(bench, "bench_rows", lambda *arguments: iter([result]))
    monkeypatch.setattr(bench, "torch_version", lambda: None)
    arguments = ["bench", "norm", "--rows", FIRST, "--threads", "1", "2", "--csv", path, "--compare", path]
    assert cli.main(arguments) == 1
    out = capsys.readouterr().out
    assert f"only in the old run: {FIRST} forward, threads 2\nrows compared: 1;" in out
    assert [measured.seconds for measured in bench.read_measurements(path)] == [2e-3]
    written(tmp_path / "a.csv", row(p50=1.9e-3))
    assert cli.main(arguments) == 0


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file"),
        ("", "no column case"),
        ("a,b\n1,2\n", "is not a file of retrograd bench: no column case"),
        (",".join(bench.CSV_COLUMNS) + "\na,retrograd,forward,1,avx2,x,y,z\n", "line 2 has no times"),
        (",".join(bench.CSV_COLUMNS) + "\na,retrograd,forward,1,avx2,0,0,0\n", "line 2"),
        (",".join(bench.CSV_COLUMNS) + "\na,retrograd,forward,1,avx2,0,nan,1\n", "line 2"),
        ("\xff\xfe", "decode"),
    ],
)
def test_a_file_that_is_none_of_ours(
    content: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.csv"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    for arguments in (["compare", str(path), str(path)], ["norm", "--compare", str(path)]):
        assert cli.main(["bench", *arguments]) == 2
        captured = capsys.readouterr()
        assert complaint in captured.err
        assert str(path) in captured.err
        assert captured.out == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_names_in_files_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """Neither as markup nor as control characters."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cli.sys.stdout, "isatty", lambda: terminal)
    old = written(tmp_path / "old.csv", row("[/red]\x1b[31mx"))
    assert cli.main(["bench", "compare", old, old]) == 0
    out = capsys.readouterr().out
    assert "[/red]␛[31mx" in out
    assert "\x1b[31mx" not in out
