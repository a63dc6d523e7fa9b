"""Forecasts: gradients, bits, what must not leak, baselines by plain NumPy, and honest words."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrograd import graph, nn
from retrograd.train import contest
from retrograd.train.baselines import fit_linear, naive, seasonal_naive
from retrograd.train.chart import Chart
from retrograd.train.contest import LEARNED, METHODS, by_library
from retrograd.train.report import Prose, Section, Table, page, plain
from retrograd.train.scores import NAMES
from retrograd.train.season import find_season
from retrograd.train.series import (
    USES,
    Plan,
    SeriesModel,
    SeriesSettings,
    SeriesTask,
    forecast,
    load_series_model,
)
from retrograd.train.settings import InputError
from retrograd.train.table import read_table
from retrograd.train.windows import Windows

Array = npt.NDArray[Any]
SMALL = {"hidden": 8, "steps": 30, "batch": 16}
BASELINES = {"slope", "start", "baseline_low", "baseline_high"}
pytest.importorskip("statsforecast")


def noise(rows: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(rows)


def write(path: Path, columns: Mapping[str, Array], first: str | None = None) -> Path:
    """A CSV file; if `first` is given with a column of days, or of months, that begin there."""
    lines = [",".join([*(["date"] if first else []), *columns])]
    days = np.datetime64(first or "2020-01-01") + np.arange(len(next(iter(columns.values()))))
    for day, *values in zip(days, *columns.values(), strict=True):
        lines.append(",".join([*([str(day)] if first else []), *(repr(float(value)) for value in values)]))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def weekly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 days with a week in them, and a column of noise before the target."""
    days = np.arange(300)
    return write(
        tmp_path_factory.mktemp("weekly") / "weekly.csv",
        {"noise": noise(300, 1), "y": 10 + np.sin(2 * np.pi * days / 7) + 0.1 * noise(300)},
        "2020-01-01",
    )


def train(task: SeriesTask, steps: int | None = None) -> list[float]:
    """Steps, and at the end the best weights by validation, as the loop has it."""
    losses, best, state = [], np.inf, task.model.state_dict()
    for step in range(1, (steps or task.steps) + 1):
        losses.append(task.step()[0])
        if step % task.validate_every == 0 or step == task.steps:
            validation = task.validate()
            if validation < best:
                best, state = validation, task.model.state_dict()
    task.model.load_state_dict(state)
    task.model.eval()
    return losses


def save(task: SeriesTask, folder: Path) -> Path:
    path = folder / "model.safetensors"
    metadata = {"kind": task.kind, "settings": task.settings.record(), "description": task.description()}
    metadata["verdict"] = task.outcome().verdict
    nn.save(path, task.model, metadata=metadata)
    return path


def bits(task: SeriesTask) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in task.model.state_dict().items()}


def said(task: SeriesTask) -> str:
    block = task.outcome().headline[0]
    assert isinstance(block, Prose)
    return block.text


# ---- the model -------------------------------------------------------------------------------------------------------


def test_gradients_by_finite_differences() -> None:
    rng = np.random.default_rng(0)
    model = SeriesModel(3, 4, 2, lags=2, hidden=5, layers=2, dropout=0.3, dtype=np.float64, rng=rng)
    model.head.w[...] = rng.standard_normal(model.head.w.shape)
    x, weights = rng.standard_normal((6, 7, 3)), rng.standard_normal((7, 8))

    # It changes nothing, so that the same is dropped each time.
    step = nn.compile(model, lambda y, weights: graph.sum(y * weights), nn.SGD(model, 0.1))
    _, gradients = step.gradients(x, weights)
    dx = graph.compile(lambda x: graph.gradients(graph.sum(model(x) * weights), [x])[0], x)(x)
    model.dropout.stream[1] = model.lstm.stream[1] = 0
    places = {**{name: parameter.value for name, parameter in model.parameters().items()}, "x": x}
    assert gradients.keys() == model.parameters().keys()
    for name, gradient in {**gradients, "x": dx}.items():
        direction = rng.standard_normal(gradient.shape)
        before = places[name].copy()
        values = []
        for size in (1e-6, -1e-6):
            places[name][...] = before + size * direction
            values.append(step.gradients(x, weights)[0])
        places[name][...] = before
        slope = (values[0] - values[1]) / 2e-6
        assert slope == pytest.approx((gradient * direction).sum(), rel=1e-6, abs=1e-7), name
        assert np.abs(gradient).max() > 1e-4, name


def test_gradients_of_two_parts_can_be_accumulated() -> None:
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((5, 6, 2), np.float32), rng.standard_normal((6, 3), np.float32)
    trained = []
    for parts in (1, 2):
        model = SeriesModel(2, 3, 1, hidden=4, layers=2, rng=0)
        model.head.w[...] = 1
        before = model.state_dict()
        step = nn.compile(model, nn.MeanSquaredError(), nn.SGD(model, 0.1), accumulate=parts)
        for _ in range(parts):  # the same part twice: the mean of the gradients is that of each
            step(x, target)
        trained.append(model)
    for name, parameter in trained[0].parameters().items():
        assert np.abs(parameter.value - before[name]).max() > 1e-6, name
        np.testing.assert_allclose(trained[1].parameters()[name].value, parameter.value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reference", ["last", "season", "linear"])
def test_an_untrained_model_is_its_reference(weekly: Path, reference: str) -> None:
    task = SeriesTask(SeriesSettings(reference=reference, **SMALL), weekly)
    origins = task._origins[2]
    simple = {
        "last": naive(task._windows, origins),
        "season": seasonal_naive(task._windows, origins),
        "linear": task._linear.forecast(task._windows, origins),
    }[reference]
    np.testing.assert_array_equal(task._forecaster.forecast(task._windows, origins), simple)
    # It competes as what it is, not twice.
    rolling = task._compare()["y"]
    assert "network" not in rolling.predicted
    assert "linear" in rolling.predicted


# ---- baselines -------------------------------------------------------------------------------------------------------


def test_simple_forecasts_by_plain_loops() -> None:
    columns = {"a": noise(60, 1), "b": noise(60, 2)}
    shape = {"window": 5, "horizon": 7, "season": 3, "center": np.zeros(2), "factor": np.ones(2)}
    windows = Windows(columns, ["a", "b"], ["b"], **shape)
    origins = np.array([10, 30, 52])
    for n, t in enumerate(origins):
        for h in range(7):
            assert windows.truth(origins)[n, h, 0] == columns["b"][t + 1 + h]
            assert naive(windows, origins)[n, h, 0] == columns["b"][t]
            known = t + 1 + h
            while known > t:
                known -= 3
            assert seasonal_naive(windows, origins)[n, h, 0] == columns["b"][known]
        for c, name in enumerate(("a", "b")):
            np.testing.assert_array_equal(
                windows.inputs(origins)[:, n, c], columns[name][t - 4 : t + 1].astype(np.float32)
            )


def test_the_linear_baseline_is_ridge_regression() -> None:
    columns = {"a": noise(400, 1), "b": np.cumsum(noise(400, 2))}
    center, factor = np.array([0.1, 3.0]), np.array([0.9, 0.2])
    windows = Windows(columns, ["a", "b"], ["b", "a"], window=6, horizon=3, season=1, center=center, factor=factor)
    training, validation = np.arange(5, 250), np.arange(260, 350)
    fit = fit_linear(windows, training, validation)

    def features(t: int) -> list[float]:
        rows = range(t - 5, t + 1)
        return [(columns[name][row] - center[c]) * factor[c] for row in rows for c, name in enumerate("ab")]

    x = np.array([features(t) for t in training])
    y = np.array([[columns[name][t + h] - columns[name][t] for h in (1, 2, 3) for name in "ba"] for t in training])
    x0, y0 = x.mean(axis=0), y.mean(axis=0)
    below = np.sqrt(fit.shrink) * np.eye(x.shape[1])  # rows that say that the slopes are 0
    slope, *_ = np.linalg.lstsq(np.vstack([x - x0, below]), np.vstack([y - y0, np.zeros((x.shape[1], 6))]), rcond=None)
    expected = [
        [columns["ba"[k]][t] + ((np.array(features(t)) - x0) @ slope + y0)[2 * h + k] for h in range(3) for k in (0, 1)]
        for t in validation
    ]
    np.testing.assert_allclose(fit.forecast(windows, validation).reshape(90, 6), expected, rtol=1e-9)


def test_wide_windows_are_cut_for_the_linear_baseline() -> None:
    columns = {f"c{i}": noise(120, i) for i in range(300)}
    windows = Windows(
        columns, list(columns), ["c0"], window=20, horizon=2, season=1, center=np.zeros(300), factor=np.ones(300)
    )
    assert fit_linear(windows, np.arange(19, 80), np.arange(90, 110)).lags == 3


@pytest.mark.parametrize(("season", "rows"), [(2, 60), (7, 200), (12, 120), (24, 1000), (96, 800)])
def test_seasons_are_found(season: int, rows: int) -> None:
    t = np.arange(rows)
    for seed in range(3):
        series = np.cos(2 * np.pi * t / season) + 0.3 * noise(rows, seed) + 0.01 * t
        assert abs(find_season(series) - season) <= season // 50
        assert find_season(series, [3 * season, season]) == season  # the calendar's own number


def test_no_season_is_found_where_there_is_none() -> None:
    found = [find_season(values) for seed in range(40) for values in (noise(300, seed), np.cumsum(noise(300, seed)))]
    assert sum(season > 1 for season in found) <= 1
    assert find_season(np.ones(50)) == find_season(np.arange(50.0)) == find_season(np.array([1.0, 2.0])) == 1


# ---- bits ------------------------------------------------------------------------------------------------------------


def test_what_comes_later_is_not_seen(tmp_path: Path) -> None:
    """Rows of the test part change nothing in training; nor do those of validation, if the reference is given."""
    columns = {"a": noise(200, 1), "y": np.cumsum(noise(200, 2))}
    tasks = []
    for name, changed, reference in (
        ("as it is", 200, "auto"),
        ("test", 170, "auto"),
        ("simple", 200, "last"),
        ("validation and test", 140, "last"),
    ):
        other = {key: values.copy() for key, values in columns.items()}
        for values in other.values():
            values[changed:] = 1000 * noise(200 - changed, 9)
        settings = SeriesSettings(reference=reference, inputs="auto" if reference == "auto" else "scaled", **SMALL)
        task = SeriesTask(settings, write(tmp_path / f"{name}.csv", other, "2020-01-01"))
        assert task._parts == (140, 30, 30)
        for _ in range(20):
            task.step()
        tasks.append(task)
    assert tasks[0].description() == tasks[1].description()
    assert bits(tasks[0]) == bits(tasks[1])
    assert tasks[0].validate() == tasks[1].validate()
    assert tasks[2].description() == tasks[3].description()
    # The baselines beside the model have seen the validation part, as the model's band has.
    two, three = ({n: b for n, b in bits(t).items() if n not in BASELINES} for t in tasks[2:])
    assert two == three
    assert tasks[0].source() != tasks[1].source()


def test_training_windows_end_before_validation(weekly: Path) -> None:
    task = SeriesTask(SeriesSettings(**SMALL), weekly)
    (first, middle, last), horizon = task._parts, task._plan.horizon
    assert first + middle + last == 300
    training, validation, test = task._origins
    assert training[0] == task._plan.history - 1
    assert training[-1] + horizon == first - 1
    assert (validation[0] + 1, validation[-1] + horizon) == (first, first + middle - 1)
    assert (test[0] + 1, test[-1] + horizon) == (first + middle, 299)


def test_resume_to_the_same_bits(weekly: Path, tmp_path: Path) -> None:
    settings = SeriesSettings(layers=2, dropout=0.2, hidden=8, steps=60, batch=16)
    whole = SeriesTask(settings, weekly)
    for _ in range(40):
        whole.step()  # without a validation
    assert 40 % whole._batches  # stops within an epoch, and not within the first

    begun, resumed = SeriesTask(settings, weekly), SeriesTask(settings, weekly)
    for step in range(25):
        begun.step()
        if step % 7 == 0:
            begun.validate()
    path = tmp_path / "checkpoint.safetensors"
    nn.save(path, begun.model, begun.optimizer, arrays=begun.arrays())
    nn.load(path, resumed.model, resumed.optimizer, arrays=resumed.arrays())
    for _ in range(15):
        resumed.step()
    for task in (whole, resumed):
        task.validate()  # the bands
    assert bits(whole) == bits(resumed)
    assert whole.optimizer.state_dict().keys() == resumed.optimizer.state_dict().keys()
    for name, array in whole.optimizer.state_dict().items():
        np.testing.assert_array_equal(array, resumed.optimizer.state_dict()[name])


def test_the_same_bits_on_any_number_of_threads(weekly: Path) -> None:
    results = []
    for threads in (1, 2):
        task = SeriesTask(SeriesSettings(threads=threads, hidden=24, steps=10), weekly)
        losses = [task.step()[0] for _ in range(10)]
        results.append((losses, task.validate(), bits(task)))
    assert results[0] == results[1]


def test_seeds_differ(weekly: Path) -> None:
    one, other = (SeriesTask(SeriesSettings(seed=seed, **SMALL), weekly) for seed in (0, 1))
    assert one.step()[0] != other.step()[0]
    assert bits(one)["lstm.layer0.wx"] != bits(other)["lstm.layer0.wx"]


def test_batches_share_memory(weekly: Path) -> None:
    task = SeriesTask(SeriesSettings(inputs="scaled", **SMALL), weekly)
    windows = task._windows
    first = windows.inputs(np.arange(50, 66))
    assert windows.inputs(np.arange(60, 76)) is first
    assert np.array_equal(first[-1], windows.scaled[60:76].astype(np.float32))


# ---- what is learned -------------------------------------------------------------------------------------------------


def mackey_glass(rows: int) -> Array:
    x = np.full(4 * rows + 200, 1.2)
    for t in range(17, len(x) - 1):
        x[t + 1] = 0.9 * x[t] + 0.2 * x[t - 17] / (1 + x[t - 17] ** 10)
    return x[200::4]


def test_a_chaotic_series_is_learned(tmp_path: Path) -> None:
    task = SeriesTask(
        SeriesSettings(window=32, horizon=8, hidden=32, steps=300), write(tmp_path / "x.csv", {"x": mackey_glass(1200)})
    )
    losses = train(task)
    assert np.mean(losses[-20:]) < 0.7 * np.mean(losses[:20])  # which is what the linear forecast does
    outcome = task.outcome()
    assert outcome.verdict is not None
    choice = outcome.verdict["targets"]["x"]
    assert choice["errors"]["network"] < 0.75 * choice["errors"]["linear"]
    assert max(choice["weights"], key=choice["weights"].__getitem__) == "network"
    assert choice["errors"]["chosen"] < 0.5 * choice["errors"]["theta"]


@pytest.mark.parametrize("seed", [0, 1])
def test_nobody_is_worse_off_on_a_random_walk(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_TESTED", 8)  # as users have them: a few origins leave too much to chance
    monkeypatch.setattr(contest, "_EARLIER", 12)
    path = write(tmp_path / "walk.csv", {"x": np.cumsum(noise(300, seed))})
    task = SeriesTask(SeriesSettings(hidden=16, steps=60), path)
    train(task)
    assert task._plan.season == 1
    verdict = task.outcome().verdict
    assert verdict is not None
    errors = verdict["targets"]["x"]["errors"]
    assert errors["chosen"] <= 1.03 * min(errors["ets"], errors["naive"])


def test_a_column_that_leads_is_used(tmp_path: Path) -> None:
    leads = noise(800, 1)
    columns = {"leads": leads, "y": np.concatenate([np.zeros(3), leads[:-3]]) + 0.1 * noise(800, 2)}
    errors = {}
    for names in (("leads", "y"), ("y",)):
        path = write(tmp_path / "lead.csv", {name: columns[name] for name in names})
        task = SeriesTask(SeriesSettings(horizon=3, hidden=16, steps=60), path)
        train(task)
        origins = task._origins[2]
        sizes = np.abs(task._forecaster.forecast(task._windows, origins) - task._windows.truth(origins))
        errors[names] = sizes.mean()
    assert errors["leads", "y"] < 0.25 * errors[("y",)]


def test_the_band_holds_what_it_says(tmp_path: Path) -> None:
    inside = []
    for seed in range(4):
        task = SeriesTask(SeriesSettings(horizon=4, **SMALL), write(tmp_path / "n.csv", {"x": noise(120, seed)}))
        verdict = task.outcome().verdict
        assert verdict is not None
        choice = verdict["targets"]["x"]
        inside.append(choice["inside"])
        for widths in choice["bands"].values():
            assert len(widths) == 4
            assert 0.5 < np.mean(widths) < 3  # 1.28 for normal noise
    assert 0.7 < np.mean(inside) < 0.9


def test_the_measure_is_relative_to_the_naive_forecast(weekly: Path) -> None:
    task = SeriesTask(SeriesSettings(reference="last", **SMALL), weekly)
    assert task.validate() == pytest.approx(1.0)
    task = SeriesTask(SeriesSettings(reference="season", **SMALL), weekly)
    origins, windows = task._origins[1], task._windows
    truth = windows.truth(origins)
    errors = [np.abs(simple(windows, origins) - truth).mean() for simple in (seasonal_naive, naive)]
    assert task.validate() == pytest.approx(errors[0] / errors[1])


# ---- words -----------------------------------------------------------------------------------------------------------


def test_results_tell_the_errors_of_all(weekly: Path) -> None:
    task = SeriesTask(SeriesSettings(target="y, noise", **SMALL), weekly)
    train(task)
    outcome = task.outcome()
    assert isinstance(outcome.headline[0], Prose)
    assert [chart.title for chart in outcome.headline[1:]] == ["Forecast of y", "Forecast of noise"]  # type: ignore[union-attr]
    assert outcome.headline[0].text.startswith("The forecast is by the methods chosen for 2 targets, with a mean MASE")
    blocks = [block for section in outcome.sections for block in section.blocks]
    tables = [block for block in blocks if isinstance(block, Table)]
    assert outcome.verdict is not None
    for table, name in zip(tables, ("y", "noise"), strict=True):
        assert [row[0] for row in table.rows[:2]] == ["chosen", "linear"]
        assert {"AutoETS", "AutoTheta", "AutoCES", "seasonal naive", "drift"} <= {row[0] for row in table.rows}
        errors = outcome.verdict["targets"][name]["errors"]
        assert [float(row[3]) for row in table.rows] == pytest.approx(list(errors.values()), abs=6e-4)
        assert table.highlight == int(np.argmin([float(row[1]) for row in table.rows]))
    charts = [block for block in blocks if isinstance(block, Chart)]
    assert [chart.title.split(":")[0] for chart in charts] == ["y", "noise"] * 2
    held_out = charts[0]
    times = read_table(weekly).times.values
    rows = np.searchsorted(times, np.asarray(held_out.lines[0].x))
    np.testing.assert_array_equal(held_out.lines[0].y, read_table(weekly).columns["y"][rows])
    assert rows[-1] == 299
    assert rows[0] >= 300 - task._parts[2]
    assert "<svg" in page("t", "s", outcome.sections)
    assert "seasonal naive" in plain(Section("", blocks))


def test_the_overview_tells_what_was_decided(tmp_path: Path) -> None:
    t = np.arange(200)
    columns = {"c": np.full(200, 5.0), "y": np.sin(2 * np.pi * t / 12) + 0.1 * noise(200)}
    path = write(tmp_path / "m.csv", columns, "2001-01")
    text = path.read_text().splitlines()
    text[40] = "2004-04,,0.5"
    path.write_text("\n".join(text))
    task = SeriesTask(SeriesSettings(gaps="interpolate", **SMALL), path)
    told = dict(task.overview()[:-2])
    assert "200 rows, from 2001-01 to 2017-08, step 1 month" in told["data"]
    assert told["target"] == "y (the last column)"
    assert told["season"] == "12 rows (found in the training part)"
    assert told["forecast"] == "12 rows from a window of 24"
    assert told["parts"] == "training 140 rows, validation 30 from 2012-09, test 30 from 2015-03"
    notes = [value for name, value in task.overview() if name == "note"]
    assert notes == [
        "1 gap interpolated: line 41, column 'c'.",
        "Column 'c' is constant in the training part and has no effect.",
    ]
    assert told["corrects"].endswith("the best on the validation part")


def test_a_constant_target_is_said_and_does_no_harm(tmp_path: Path) -> None:
    task = SeriesTask(SeriesSettings(**SMALL), write(tmp_path / "c.csv", {"a": noise(80), "y": np.full(80, 2.0)}))
    train(task)
    assert ("note", "The target 'y' is constant in the training part: there is nothing to learn.") in task.overview()
    assert said(task).startswith("The forecast is by")


@pytest.mark.parametrize(("rows", "horizon"), [(30, None), (12, None), (60, 1)])
def test_small_tables(tmp_path: Path, rows: int, horizon: int | None) -> None:
    task = SeriesTask(SeriesSettings(horizon=horizon, **SMALL), write(tmp_path / "small.csv", {"x": noise(rows)}))
    losses = train(task)
    assert np.isfinite(losses).all()
    assert page("t", "s", task.outcome().sections)
    assert said(task)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"target": "z"}, "has no column of numbers 'z'; it has 'noise', 'y'"),
        ({"target": "date"}, "column 'date' of .* is the time column"),
        ({"target": "y,y"}, "'y' is given twice"),
        ({"window": 210}, "the training part has 210 of 300 rows, but window 210, season 7 and horizon 7 need 220"),
        ({"horizon": 148}, "has 300 rows: 148 for validation and 148 for the test leave 4, training needs at least 5"),
        ({"season": 250}, "season 250 and horizon 45 need 298"),
        ({"season": 1, "reference": "season"}, "--reference season needs a season"),
    ],
)
def test_settings_that_do_not_fit_the_table(weekly: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        SeriesTask(SeriesSettings(**given), weekly)


def test_too_few_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 5 rows: 1 for validation and 1 for the test leave 3"):
        SeriesTask(SeriesSettings(), write(tmp_path / "x.csv", {"x": noise(5)}))


# ---- forecasts -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def trained(weekly: Path, folder: Path) -> SeriesTask:
    task = SeriesTask(SeriesSettings(target="y", **SMALL), weekly)
    train(task)
    save(task, folder)
    return task


def test_a_model_comes_back_from_its_file(trained: SeriesTask, weekly: Path, folder: Path) -> None:
    table = read_table(weekly)
    texts = set()
    for place in (folder, folder / "model.safetensors", str(folder)):
        forecaster = load_series_model(place)
        assert {k: v.tobytes() for k, v in forecaster.model.state_dict().items()} == bits(trained)
        assert forecaster.settings == trained.settings
        texts.add(forecast(forecaster, table).csv_text())
    assert len(texts) == 1


def test_a_forecast_goes_on_where_the_table_ends(
    trained: SeriesTask, weekly: Path, folder: Path, tmp_path: Path
) -> None:
    result = forecast(load_series_model(folder), read_table(weekly))
    assert result.times == [str(np.datetime64("2020-10-27") + i) for i in range(7)]
    t = np.arange(300, 307)
    assert np.abs(result.columns["y"] - 10 - np.sin(2 * np.pi * t / 7)).max() < 0.3
    assert (result.low["y"] <= result.columns["y"]).all()
    assert (result.columns["y"] <= result.high["y"]).all()

    written = tmp_path / "forecast.csv"
    written.write_text(result.csv_text())
    again = read_table(written)
    assert (again.times.column, again.rows, list(again.columns)) == ("date", 7, ["y", "y_low", "y_high"])
    np.testing.assert_allclose(again.columns["y_low"], result.low["y"], rtol=1e-8)

    assert str(result.verdict) == said(trained)
    chart = result.chart()
    assert chart.y_label == "y"
    assert chart.lines[0].y[-1] == chart.lines[1].y[0]  # it begins at the last value
    np.testing.assert_array_equal(chart.lines[1].y[1:], result.columns["y"])


@pytest.mark.parametrize("use", [key for key in USES if key != "arima"])
def test_a_forecast_by_any_of_the_methods(trained: SeriesTask, weekly: Path, folder: Path, use: str) -> None:
    forecaster, table = load_series_model(folder), read_table(weekly)
    result = forecast(forecaster, table, use)
    assert result.by == {"y": NAMES[use]}
    y, windows = table.columns["y"], trained._windows
    expected: dict[str, Array] = {
        "network": trained._forecaster.forecast(windows, np.array([299]))[0, :, 0],
        "linear": trained._forecaster.baseline("linear", windows, np.array([299]))[0, :, 0],
        "seasonal": y[-7:],
        "naive": np.full(7, y[-1]),
        "drift": y[-1] + np.arange(1, 8) * (y[-1] - y[0]) / 299,
    }
    expected.update({key: by_library(key, y, 7, 7) for key in METHODS if key not in expected})
    np.testing.assert_allclose(result.columns["y"], expected[use], rtol=1e-9)
    assert forecaster.verdict is not None
    widths = forecaster.verdict.targets["y"].bands[use]
    np.testing.assert_allclose(result.high["y"] - result.columns["y"], widths, rtol=1e-9)
    np.testing.assert_allclose(result.columns["y"] - result.low["y"], widths, rtol=1e-9)
    assert [line.label for line in result.chart().lines] == ["past", "forecast"]


def test_the_forecast_is_what_was_chosen(trained: SeriesTask, weekly: Path, folder: Path) -> None:
    forecaster, table = load_series_model(folder), read_table(weekly)
    assert forecaster.verdict is not None
    weights = forecaster.verdict.targets["y"].weights
    parts = sum(weight * forecast(forecaster, table, key).columns["y"] for key, weight in weights.items())
    np.testing.assert_allclose(forecast(forecaster, table).columns["y"], parts, rtol=1e-9)
    assert str(forecaster.verdict).startswith(f"The forecast is by {forecaster.verdict.targets['y']}, with a MASE of ")


def test_a_model_of_an_earlier_release(trained: SeriesTask, weekly: Path, folder: Path, tmp_path: Path) -> None:
    """With another verdict, or none, and without the settings that came later."""
    record = {k: v for k, v in dataclasses.asdict(trained._plan).items() if k != "inputs"}
    settings = {k: v for k, v in trained.settings.record().items() if k not in SeriesSettings.EARLIER}
    path = tmp_path / "old.safetensors"
    about = {"kind": "series", "settings": settings, "description": {"plan": record}}
    table = read_table(weekly)
    for verdict in ({}, {"verdict": {"errors": {"model": 1.0}, "forecasts": 1, "clear": True, "targets": 1}}):
        nn.save(path, trained.model, metadata={**about, **verdict})
        old = load_series_model(path)
        assert old.verdict is None
        if trained._plan.inputs == "scaled":
            assert forecast(old, table).columns["y"].tolist() == (
                forecast(load_series_model(folder), table, "network").columns["y"].tolist()
            )
        with pytest.raises(InputError, match="--use ets: the model was saved by an earlier release; train it again"):
            forecast(old, table, "ets")


def test_a_seasonal_forecast_needs_a_season(tmp_path: Path) -> None:
    path = write(tmp_path / "walk.csv", {"x": np.cumsum(noise(80))})
    task = SeriesTask(SeriesSettings(season=1, **SMALL), path)
    save(task, tmp_path)
    with pytest.raises(InputError, match="--use seasonal: seasonal naive cannot be used: the model has no season"):
        forecast(load_series_model(tmp_path), read_table(path), "seasonal")


def test_only_the_last_rows_count(trained: SeriesTask, weekly: Path, folder: Path, tmp_path: Path) -> None:
    forecaster, table = load_series_model(folder), read_table(weekly)
    lines = weekly.read_text().splitlines()
    short = tmp_path / "short.csv"
    short.write_text("\n".join([lines[0], *lines[-forecaster.plan.history :]]))
    for use in LEARNED:  # other methods are fitted to all rows
        assert forecast(forecaster, read_table(short), use).csv_text() == forecast(forecaster, table, use).csv_text()
    short.write_text("\n".join([lines[0], *lines[-forecaster.plan.history + 1 :]]))
    with pytest.raises(InputError, match=r"short\.csv has 23 rows, but the model needs the last 24"):
        forecast(forecaster, read_table(short))


def test_columns_by_name(trained: SeriesTask, weekly: Path, folder: Path, tmp_path: Path) -> None:
    forecaster, text = load_series_model(folder), weekly.read_text()
    expected = forecast(forecaster, read_table(weekly)).csv_text()
    turned = tmp_path / "turned.csv"
    rows = [line.split(",") for line in text.splitlines()]
    turned.write_text("\n".join(f"{y},{day},{'more' if y == 'y' else 3},{other}" for day, other, y in rows))
    result = forecast(forecaster, read_table(turned))
    assert result.csv_text() == expected
    assert result.notes == ("The model does not use column 'more'.",)
    renamed = tmp_path / "renamed.csv"
    renamed.write_text(text.replace("noise,y", "Noise,z"))
    with pytest.raises(InputError, match=r"has no columns 'noise', 'y' of numbers.*it has 'Noise', 'z'"):
        forecast(forecaster, read_table(renamed))


def test_another_step_is_said(trained: SeriesTask, weekly: Path, folder: Path, tmp_path: Path) -> None:
    table = read_table(weekly)
    monthly = write(tmp_path / "monthly.csv", table.columns, "2001-01")
    result = forecast(load_series_model(folder), read_table(monthly))
    assert result.notes == ("The time step is 1 month, but it was 1 day in training.",)
    assert result.times[:2] == ["2026-01", "2026-02"]


def test_files_that_are_no_series_models(trained: SeriesTask, folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    with pytest.raises(InputError, match="there is no such file"):
        load_series_model(tmp_path / "none")
    other = tmp_path / "other.safetensors"
    nn.save(other, trained.model, metadata={"kind": "text"})
    with pytest.raises(InputError, match="of the kind 'text', not 'series'"):
        load_series_model(other)
    metadata = nn.read_metadata(path)
    for damage in (
        {"description": {}},
        {"description": {"plan": {**metadata["description"]["plan"], "window": 0}}},
        {"description": {"plan": {**metadata["description"]["plan"], "targets": ["z"]}}},
        {"description": {"plan": {**metadata["description"]["plan"], "horizon": 3}}},
        {"description": {"plan": {**metadata["description"]["plan"], "horizon": 2**40}}},  # more than any memory
        {"description": []},
        {"settings": {**metadata["settings"], "hidden": 7}},
        {"settings": {**metadata["settings"], "hidden": 65536, "layers": 64}},
        {"settings": {}},
        {"verdict": 5},
        {"verdict": {}},
        {"verdict": {**metadata["verdict"], "targets": {}}},
        {"verdict": {**metadata["verdict"], "forecasts": 0}},
        *(
            {"verdict": {**metadata["verdict"], "targets": {"y": {**metadata["verdict"]["targets"]["y"], **part}}}}
            for part in (
                {"weights": {}},
                {"weights": {"ets": 0.5}},
                {"weights": {"other": 1.0}},
                {"weights": {"chosen": 1.0}},
                {"errors": {}},
                {"errors": {"chosen": "\x1b[31m"}},
                {"errors": {"chosen": -1.0}},
                {"bands": {}},
                {"bands": {"chosen": [1.0]}},
                {"inside": "x"},
            )
        ),
        {"description": {"plan": {**metadata["description"]["plan"], "baselines": False}}},
        {"description": {"plan": {**metadata["description"]["plan"], "baselines": 1}}},
    ):
        nn.save(other, trained.model, metadata={**metadata, **damage})
        with pytest.raises(InputError, match="is not a series model"):
            load_series_model(other)
    (tmp_path / "model.safetensors").write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InputError, match="is not a series model"):
        load_series_model(tmp_path)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 3, 2**31, 2**63, 10**400, -0.5, 1e-300, 1e300, "", "y", "linear", "\x1b[31m"]),
    st.lists(st.sampled_from(["y", "noise", 1]), max_size=3),
    st.just({}),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_metadata_of_a_model_forecast_or_are_refused(
    trained: SeriesTask, weekly: Path, folder: Path, tmp_path: Path, data: st.DataObject
) -> None:
    metadata, forged = nn.read_metadata(folder / "model.safetensors"), tmp_path / "forged.safetensors"
    parts = [metadata, metadata["description"]["plan"], metadata["settings"], metadata["verdict"]]
    parts += [metadata["verdict"]["targets"], *(metadata["verdict"]["targets"]["y"].values())]
    parts = [part for part in parts if isinstance(part, dict)]
    for _ in range(data.draw(st.integers(1, 2))):
        part = data.draw(st.sampled_from(parts))
        part[data.draw(st.sampled_from([*part, "another"]))] = data.draw(VALUES)
    nn.save(forged, trained.model, metadata=metadata)
    with contextlib.suppress(InputError):
        forecaster = load_series_model(forged)
        result = forecast(forecaster, read_table(weekly), data.draw(st.sampled_from([None, *LEARNED, *METHODS])))
        assert str(forecaster.verdict).isprintable()
        assert np.isfinite(result.columns[result.chart().y_label]).all()


def test_a_plan_survives_its_record() -> None:
    plan = Plan(("a", "b"), ("b",), 24, 12, 7, "linear", 24, "1 day")
    assert Plan.from_record(dataclasses.asdict(plan)) == plan
