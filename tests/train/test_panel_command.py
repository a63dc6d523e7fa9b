"""The commands for panels: the report, plots, standard input, and the tables that are panels."""

from __future__ import annotations

import csv
import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from retrograd.cli import main
from retrograd.train import panel, panel_jobs, report
from retrograd.train.panel import PanelModel, fit_panel
from retrograd.train.settings import InputError
from retrograd.train.table import Panel, read_data

Series = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Networks that train for a short time, one method, and a folder to work in."""
    monkeypatch.setattr(panel, "_UPDATES", (10,))
    monkeypatch.setattr(panel, "_SEEDS", 1)
    monkeypatch.setattr(panel, "_MEMBERS", 1)
    monkeypatch.setattr(panel, "METHODS", {"theta": panel_jobs.METHODS["theta"]})
    monkeypatch.chdir(tmp_path)


def waves(count: int, length: int = 40) -> Series:
    rng = np.random.default_rng(3)
    return {
        f"s{i}": np.round(20 + 3 * i + np.resize([4.0, 0, -4, 0], length + i) + rng.normal(0, 0.3, length + i), 3)
        for i in range(count)
    }


def table(series: Series, names: str = "unique_id,ds,y", more: str = "") -> str:
    rows = [
        f"{key},{np.datetime64('2015-01') + 3 * i}-01,{value}{more}"
        for key, values in series.items()
        for i, value in enumerate(values)
    ]
    return "\n".join([names, *rows, ""])


def train(*options: str, code: int = 0) -> None:
    assert main(["train", "series", *options, "--horizon", "4", "--season", "4", "--threads", "1"]) == code


def given(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Bytes on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def cells(page: str) -> list[list[str]]:
    """The rows of the tables of a page."""
    rows = re.findall(r"<tr.*?>(.*?)</tr>", page)
    return [[re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row)] for row in rows]


# ---- the report ------------------------------------------------------------------------------------------------------


def test_the_report_has_verdict_methods_and_charts(capsys: pytest.CaptureFixture[str]) -> None:
    Path("waves.csv").write_text(table(waves(14)))
    train("waves.csv", "--output", "run", "--time-limit", "1h")
    page, model = Path("run/report.html").read_text(), PanelModel.load("run")
    assert re.findall(r"<p.*?>(.*?)</p>", page)[1] == model.verdict
    assert model.verdict in " ".join(capsys.readouterr().out.split())
    rows = {row[0]: row[1:] for row in cells(page)}
    smape, mase = model.errors["theta"]
    assert rows["dynamic theta"] == [f"{100 * model.weights['theta']:.0f} %", f"{smape:.2f} %", f"{mase:.3f}"]
    assert rows["combined"][0] == ""
    assert rows["series"] == ["14 (column unique_id)"]
    assert rows["--season"] == ["4"]
    assert rows["--time-limit"] == ["3600s"]
    assert rows["--time"] == ["ds"]
    titles = re.findall(r"<figcaption><div dir=\"auto\">(.*?)</div>", page)
    assert titles == ["The largest errors", "Errors in the middle", "The smallest errors"]
    shown = re.findall(r'aria-label="(s\d+) · MASE ([\d.]+)"', page)
    assert len({name for name, _ in shown}) == 12
    errors = [float(error) for _, error in shown]
    assert errors == sorted(errors, reverse=True)


def test_the_chart_of_a_series_shows_its_error_in_validation() -> None:
    series = waves(3)
    Path("waves.csv").write_text(table(series))
    train("waves.csv", "--output", "run")
    model = fit_panel(series, 4, 4)
    assert model.validation is not None
    page = Path("run/report.html").read_text()
    for values, predicted, (key, shown) in zip(
        series.values(), model.validation, re.findall(r'aria-label="(s\d) · MASE ([\d.]+)"', page), strict=True
    ):
        error = np.abs(values[-4:] - predicted).mean() / np.abs(values[4:] - values[:-4]).mean()
        assert shown == f"{error:.2f}", key


def test_a_panel_may_have_one_series() -> None:
    Path("wave.csv").write_text(table(waves(1)))
    train("wave.csv", "--output", "run")
    assert ">1 series of 40 to 40 rows, 4 rows ahead; fitted in " in Path("run/report.html").read_text()
    model = PanelModel.load("run")
    assert model.coverage is None  # of two halves of the series
    assert np.isfinite(model.forecast()["s0"]).all()


def test_names_of_series_are_text() -> None:
    series = {f"<script>{key}&": values for key, values in waves(3).items()}
    Path("waves.csv").write_text(table(series))
    train("waves.csv", "--output", "run")
    page = Path("run/report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;s0&amp;amp;" not in page
    assert "&lt;script&gt;s0&amp;" in page


def test_without_matplotlib_a_note_stands_for_the_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "drawable", lambda: False)
    Path("waves.csv").write_text(table(waves(3)))
    train("waves.csv", "--output", "run")
    page = Path("run/report.html").read_text()
    assert "Forecasts: charts need matplotlib (pip install 'retrograd[plot]')." in page
    assert "<svg" not in page


def test_series_too_short_to_validate_and_constant_ones_have_charts() -> None:
    series = {**waves(2), "short": np.array([3.0, 4.0, 5.0]), "constant": np.full(30, 7.0)}
    Path("waves.csv").write_text(table(series))
    train("waves.csv", "--output", "run")
    page = Path("run/report.html").read_text()
    assert 'aria-label="short"' in page
    assert 'aria-label="constant"' in page


# ---- plots -----------------------------------------------------------------------------------------------------------


def test_forecast_plots_the_first_series(capsys: pytest.CaptureFixture[str]) -> None:
    Path("waves.csv").write_text(table(waves(13)))
    train("waves.csv", "--output", "run")
    assert main(["forecast", "run", "waves.csv", "--plot", "next.svg"]) == 0
    assert "next.svg (the first 12 series)" in capsys.readouterr().out
    drawn = Path("next.svg").read_text()
    assert [f">s{i}</text>" in drawn for i in (0, 11, 12)] == [True, True, False]
    assert main(["forecast", "run", "waves.csv", "--output", "a.csv"]) == 0
    assert not Path("a.svg").exists()
    assert Path("a.csv").read_bytes() == Path("run/forecast.csv").read_bytes()
    assert main(["forecast", "run", "waves.csv", "--plot", "next.gif"]) == 2
    assert "a picture ends in .svg or .png" in capsys.readouterr().err
    assert main(["forecast", "run", "waves.csv", "--use", "ets"]) == 2
    assert "--use is for the model of a single table" in capsys.readouterr().err


# ---- standard input --------------------------------------------------------------------------------------------------


def test_a_panel_on_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    content = table(waves(3)).encode()
    Path("waves.csv").write_bytes(content)
    train("waves.csv", "--output", "file")
    given(monkeypatch, content)
    train("-")
    folder = Path("runs/series-stdin")
    assert (folder / "standard-input").read_bytes() == content
    assert (folder / "forecast.csv").read_bytes() == Path("file/forecast.csv").read_bytes()
    given(monkeypatch, content)
    assert main(["forecast", "file", "-"]) == 0
    assert Path("stdin-forecast.csv").read_bytes() == Path("file/forecast.csv").read_bytes()
    given(monkeypatch, content.replace(b"s2", b"s3"))
    assert main(["forecast", "file", "-"]) == 2
    assert "standard input is not the panel that file was trained on" in capsys.readouterr().err
    given(monkeypatch, b"unique_id,ds,y\na,2020-01,1\n")
    assert main(["train", "series", "-", "--output", "none"]) == 2
    assert not Path("none").exists()


def test_a_folder_has_the_files_of_the_last_run_only(capsys: pytest.CaptureFixture[str]) -> None:
    Path("waves.csv").write_text(table(waves(3)))
    train("waves.csv", "--output", "run")
    Path("run/history.csv").write_text("of a single table")
    train("waves.csv", "--output", "run", code=2)
    assert "--overwrite replaces it" in capsys.readouterr().err
    train("waves.csv", "--output", "run", "--overwrite")
    assert {path.name for path in Path("run").iterdir()} == {"forecast.csv", "model.safetensors", "report.html"}


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_columns_of_numbers_that_nothing_uses_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    series = waves(2)
    Path("prices.csv").write_text(table(series, "unique_id,ds,y,price,town,stock", ",3.5,Bern,7"))
    train("prices.csv", code=2)
    refused = " ".join(capsys.readouterr().err.split())
    assert "does not use columns 'price', 'stock' of numbers" in refused
    assert not Path("runs").exists()
    Path("towns.csv").write_text(table(series, "unique_id,ds,y,town,open", ",Bern,yes"))
    train("towns.csv", "--output", "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "Columns 'town', 'open' are not of numbers and left out." in said
    assert "Columns &#x27;town&#x27;, &#x27;open&#x27; are not" in Path("run/report.html").read_text()


def test_without_ds_the_times_are_found(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(
        "unique_id,town,day,y\na,Bern,2020-01-01,1\na,Bern,2020-01-02,2\nb,Rome,2020-01-05,3\nb,Rome,2020-01-06,4\n"
    )
    found = read_data(file)
    assert isinstance(found, Panel)
    assert found.times["b"].after(1) == ["2020-01-07"]
    assert found.notes == ("Column 'town' is not of numbers and left out.",)
    file.write_text("unique_id,day,y,price\na,2020-01-01,1,5\na,2020-01-02,2,6\n")
    with pytest.raises(InputError, match="does not use column 'price' of numbers: take it out"):
        read_data(file)


def test_ds_may_count_the_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("unique_id,ds,y\na,1,5\na,2,6\na,3,7\nb,4,1\nb,5,2\n")
    found = read_data(file)
    assert isinstance(found, Panel)
    assert {key: values.tolist() for key, values in found.series.items()} == {"a": [5, 6, 7], "b": [1, 2]}
    assert {key: times.after(2) for key, times in found.times.items()} == {"a": ["4", "5"], "b": ["6", "7"]}


@pytest.mark.parametrize(("text", "message"), [
    ("unique_id,ds,y\na,2020-01,1\n,2020-02,2\n", "line 3, column 'unique_id': the name of the series is missing"),
    ("unique_id,ds,y\na,2020-01,1\nb,2020-02,2\nb,2020-03,2\n", r"has 1 row of data.* \(series 'a'\)"),
    ("unique_id,ds,y\na,2020-01,1\na,2020-02,x\n", r"line 3, column 'y': 'x' \(series 'a'\)"),
])  # fmt: skip
def test_faults_name_the_series(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        read_data(tmp_path / "a.csv")


@pytest.mark.parametrize("kind", ["utf-16", "utf-16, big end first", "xlsx", "parquet", "semicolons"])
def test_panels_in_other_files(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas as pd

    text = table(waves(2))
    Path("plain.csv").write_text(text)
    train("plain.csv", "--output", "plain")
    frame = pd.read_csv(io.StringIO(text), parse_dates=["ds"])
    file = Path("data.csv")
    if kind == "xlsx":
        file = Path("data.xlsx")
        pytest.importorskip("openpyxl")
        frame.to_excel(file, index=False)
    elif kind == "parquet":
        file = Path("data.parquet")
        pytest.importorskip("pyarrow")
        frame.to_parquet(file)
    elif kind == "semicolons":
        file.write_text(text.replace(",", ";").replace(".", ","))
    else:
        file.write_bytes(text.encode("utf-16") if kind == "utf-16" else b"\xfe\xff" + text.encode("utf-16-be"))
    train(str(file), "--output", "run")
    plain, found = (list(csv.reader(Path(name, "forecast.csv").read_text().splitlines())) for name in ("plain", "run"))
    assert found == plain
    given(monkeypatch, file.read_bytes())
    train("-", "--output", "piped")
    assert Path("piped/forecast.csv").read_bytes() == Path("run/forecast.csv").read_bytes()
