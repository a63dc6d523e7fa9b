"""Panels: a network of all series, combined with methods for each."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from retrograd.cli import main
from retrograd.train import panel
from retrograd.train.panel import PanelModel, fit_panel, network_shape
from retrograd.train.panel_model import Network, Scaled, Shape, forecasts, prepare, train
from retrograd.train.settings import InputError

Panel = dict[str, np.ndarray]


def seasonal_panel(count: int = 12, length: int = 96, season: int = 12) -> Panel:
    """Series with a season of their own, and a shared pattern: what rises over two values falls over the next two."""
    rng = np.random.default_rng(5)
    found = {}
    for i in range(count):
        n = length + i
        times = np.arange(n)
        shocks = 0.08 * rng.standard_normal(n)
        for t in range(2, n):
            shocks[t] += 0.9 * shocks[t - 1] - 0.6 * shocks[t - 2]
        profile = 0.4 * rng.standard_normal(season)
        found[f"s{i}"] = rng.uniform(5, 500) * np.exp(profile[times % season] + shocks)
    return found


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that train for a short time."""
    monkeypatch.setattr(panel, "_UPDATES", (40,))
    monkeypatch.setattr(panel, "_UPDATES_OF_LONG", (40,))
    monkeypatch.setattr(panel, "_SEEDS", 1)
    monkeypatch.setattr(panel, "_MEMBERS", 2)


def held_out(series: Panel, horizon: int) -> tuple[Panel, Panel]:
    return {k: y[:-horizon] for k, y in series.items()}, {k: y[-horizon:] for k, y in series.items()}


def test_a_network_beats_the_seasonal_naive_forecast() -> None:
    seen, truth = held_out(seasonal_panel(24), 6)
    shape = dataclasses.replace(network_shape([len(y) for y in seen.values()], 6, 12), updates=50)
    network = train(list(seen.values()), shape, 0)
    lengths = [len(y) for y in seen.values()]
    found = forecasts(network, lengths, list(seen.values()))
    error = np.mean([np.abs(f / y - 1).mean() for f, y in zip(found, truth.values(), strict=True)])
    naive = np.mean([np.abs(y[-12:-6] / truth[key] - 1).mean() for key, y in seen.items()])
    assert error < 0.9 * naive


@pytest.mark.usefixtures("short")
def test_the_result_does_not_depend_on_the_processes_and_is_saved(tmp_path: Path) -> None:
    series = seasonal_panel(5)
    one = fit_panel(series, 6, 12, seed=3, methods=["theta"])
    two = fit_panel(series, 6, 12, seed=3, methods=["theta"], processes=2)
    other = fit_panel(series, 6, 12, seed=4, methods=["theta"])
    assert one.weights == two.weights
    assert "network" in one.weights
    np.testing.assert_array_equal(one.point, two.point)
    np.testing.assert_array_equal(one.high, two.high)
    assert (one.point != other.point).any()

    one.save(tmp_path / "model.safetensors")
    loaded = PanelModel.load(tmp_path)
    for field in dataclasses.fields(PanelModel):
        if field.name in ("point", "low", "high"):
            np.testing.assert_array_equal(getattr(loaded, field.name), getattr(one, field.name))
        elif field.name not in ("networks", "validation"):
            assert getattr(loaded, field.name) == getattr(one, field.name), field.name
    values = list(series.values())
    lengths = [len(y) for y in values]
    for a, b in zip(one.networks, loaded.networks, strict=True):
        np.testing.assert_array_equal(forecasts(a, lengths, values), forecasts(b, lengths, values))


@pytest.mark.usefixtures("short")
def test_forecast_has_bands_and_a_shorter_horizon() -> None:
    series = seasonal_panel(8)
    model = fit_panel(series, 6, 12, methods=[])
    found = model.forecast(4)
    assert list(found) == list(series)
    for point, low, high in found.values():
        assert point.shape == low.shape == high.shape == (4,)
        assert (low < high).all()
    assert 0.6 < model.coverage <= 1.0
    with pytest.raises(ValueError, match="horizon is 7, must be from 1 to 6"):
        model.forecast(7)


@pytest.mark.usefixtures("short")
def test_short_constant_zero_and_negative_series() -> None:
    rng = np.random.default_rng(2)
    series = {
        **seasonal_panel(4, 60),
        "short": np.array([3.0, 4.0, 5.0]),
        "constant": np.full(70, 7.0),
        "zeros": np.zeros(50),
        "some zeros": np.maximum(rng.standard_normal(80), 0.0),
        "negative": rng.standard_normal(66).cumsum() - 5,
    }
    model = fit_panel(series, 5, 12, methods=["theta", "ets"])
    found = model.forecast()
    assert all(np.isfinite(part).all() for parts in found.values() for part in parts)
    np.testing.assert_allclose(found["constant"].point, 7.0, rtol=0.02)
    assert (np.abs(found["zeros"].point) < 1e-3).all()
    assert (found["some zeros"].low >= 0).all()
    assert (found["negative"].low < 0).any()


def test_series_without_logarithms_are_scaled_by_their_changes() -> None:
    y = np.array([1.0, -1.0, 3.0, 0.0])
    scaled = Scaled.of(y, 1)
    assert not scaled.logs
    np.testing.assert_allclose(scaled.invert(scaled.apply(y)), y, atol=1e-12)
    np.testing.assert_allclose(np.abs(np.diff(scaled.apply(y))).mean(), 1.0)
    positive = np.array([1.0, 10.0, 100.0])
    assert Scaled.of(positive, 1).logs
    np.testing.assert_allclose(Scaled.of(positive, 1).invert(Scaled.of(positive, 1).apply(positive)), positive)


def test_what_the_network_sees_does_not_depend_on_later_values() -> None:
    shape = network_shape([96], 6, 12)
    y = next(iter(seasonal_panel(1).values()))
    later = y.copy()
    later[-6:] *= 5
    first, second = prepare([y], shape), prepare([later], shape)
    for name in ("detrended", "steps"):
        scale = first.scaled[0].scale, second.scaled[0].scale
        seen = first.known[:-6, 0] == 1
        a, b = (getattr(found, name)[:-6, 0][seen] * s for found, s in zip((first, second), scale, strict=True))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_seasons_keep_their_phase_when_a_series_grows() -> None:
    """A series that repeats exactly is forecast exactly from any of its phases, by a network that adds nothing."""
    shape = Shape(5, (4,), 6, 1, 8, ((1, 2), (4, 8)))
    y = 10 * np.exp(np.resize([0.3, -0.2, 0.5, -0.6], 60))
    data = prepare([y[:40]], shape)
    network = Network(shape, data.profiles, 1, np.random.default_rng(0))
    for length in (40, 41, 43, 50):
        np.testing.assert_allclose(forecasts(network, [40], [y[:length]])[0], y[length : length + 5], rtol=1e-3)


@pytest.mark.parametrize(("lengths", "horizon", "season"), [
    ([15], 6, 1), ([60], 8, 4), ([100], 18, 12), ([900], 13, 1), ([900], 48, 24), ([300], 48, 24), ([90], 7, 7),
    ([400], 26, 52), ([1500], 30, 365), ([20], 3, 12),
])  # fmt: skip
def test_shapes_fit_together(lengths: list[int], horizon: int, season: int) -> None:
    shape = network_shape(lengths, horizon, season)
    assert all(shape.steps % d == 0 for block in shape.dilations for d in block)
    assert all(shape.season % m == 0 and shape.length % m == 0 for m in shape.seasons)
    first = shape.length - 1 - shape.stride * shape.steps - horizon - shape.window
    assert first >= 0


@pytest.mark.parametrize(("change", "message"), [
    ({"series": {"a": [1.0, 2, 3], "b": [1.0, float("nan"), 2]}}, "series 'b' has nan at index 1"),
    ({"series": {"a": [1.0, float("inf"), 2]}}, "series 'a' has inf at index 1"),
    ({"series": {"a": [1.0, 2.0]}}, "series 'a' has 2 values, must have at least 3"),
    ({"series": {"a": [[1.0, 2.0, 3.0]]}}, r"series 'a' has shape \(1, 3\)"),
    ({"series": {"a": ["x", "y", "z"]}}, "series 'a' has values that are no numbers"),
    ({"series": {"a": [1.0, 1e200, 2]}}, "series 'a' has 1e[+]200"),
    ({"series": {}}, "there are no series"),
    ({"horizon": 0}, "horizon is 0"),
    ({"season": 0}, "season is 0"),
    ({"processes": 0}, "processes is 0"),
    ({"levels": (0.9, 0.1)}, "levels are"),
    ({"methods": ["prophet"]}, "methods has 'prophet'; there are ets"),
    ({"horizon": 40}, "the longest series has 30 values; a forecast of 40 needs at least 45"),
])  # fmt: skip
def test_refusals(change: dict[str, object], message: str) -> None:
    given = {"series": {"a": np.arange(1.0, 31.0)}, "horizon": 2, "season": 1, **change}
    with pytest.raises(ValueError, match=message):
        fit_panel(**given)  # type: ignore[arg-type]


@pytest.mark.usefixtures("short")
def test_a_time_limit_leaves_out_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(panel.time, "monotonic", lambda: float(next(ticks)))
    model = fit_panel(seasonal_panel(4), 6, 12, methods=["theta"], time_limit=3)
    assert model.notes
    assert all("time limit" in note for note in model.notes)
    assert np.isfinite(model.point).all()


@pytest.mark.usefixtures("short")
def test_weights_are_those_of_the_errors_and_one_theta_method_counts() -> None:
    methods = ["theta", "optimized_theta", "ces"]
    model = fit_panel(seasonal_panel(4), 6, 12, methods=methods)
    basis = model.errors["seasonal"]
    scores = {key: (a / basis[0] + b / basis[1]) / 2 for key, (a, b) in model.errors.items() if key != "combined"}
    del scores[max(("theta", "optimized_theta"), key=lambda key: scores[key])]
    raw = {key: score**-4 for key, score in scores.items()}
    expected = {key: weight for key, weight in raw.items() if weight >= 0.01 * sum(raw.values())}
    assert {"seasonal", "network", "ces"} < set(model.weights)
    assert set(model.weights) == set(expected)
    for key, weight in expected.items():
        np.testing.assert_allclose(model.weights[key], weight / sum(expected.values()), rtol=1e-6)


@pytest.mark.usefixtures("short")
def test_validation_has_six_tenths_of_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = []

    def run(jobs: list[panel.Job], series: list[np.ndarray], processes: int, deadline: float, done: object) -> object:
        deadlines.append(deadline)
        return [job(series) for job in jobs]

    monkeypatch.setattr(panel.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(panel, "run", run)
    fit_panel(seasonal_panel(4), 6, 12, methods=["theta"], time_limit=50)
    assert deadlines == [130.0, 150.0]


# ---- the commands ----------------------------------------------------------------------------------------------------


def write_table(path: Path, series: Panel, names: tuple[str, str, str] = ("unique_id", "ds", "y")) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for key, values in series.items():
            for i, value in enumerate(values):
                writer.writerow([key, f"{np.datetime64('2001-01') + i}-01", f"{value:.6f}"])


@pytest.mark.usefixtures("short")
def test_the_commands_train_and_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    series = seasonal_panel(4)
    write_table(Path("sales.csv"), series)
    assert main(["train", "series", "sales.csv", "--horizon", "6", "--threads", "1", "--output", "run"]) == 0
    assert "season    12 rows" in capsys.readouterr().out
    assert sorted(path.name for path in Path("run").iterdir()) == [
        "forecast.csv",
        "model.safetensors",
        "report.html",
    ]
    assert main(["forecast", "run", "sales.csv", "--output", "next.csv"]) == 0
    rows = list(csv.DictReader(Path("next.csv").read_text().splitlines()))
    assert len(rows) == 4 * 6
    assert rows[0]["unique_id"] == "s0"
    assert rows[0]["ds"] == "2009-01-01"
    assert Path("next.csv").read_bytes() == Path("run/forecast.csv").read_bytes()
    model = PanelModel.load("run")
    np.testing.assert_allclose(float(rows[0]["y"]), model.point[0, 0], rtol=1e-6)

    series["s0"] = series["s0"][:-1]
    write_table(Path("changed.csv"), series)
    assert main(["forecast", "run", "changed.csv"]) == 2
    assert "not the panel that" in capsys.readouterr().err
    assert main(["train", "series", "sales.csv", "--hidden", "8"]) == 2
    assert "--hidden is for a table with one row for each time" in capsys.readouterr().err


@pytest.mark.usefixtures("short")
def test_columns_of_a_panel_are_named_by_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    series = seasonal_panel(3)
    write_table(Path("plain.csv"), series)
    write_table(Path("named.csv"), series, ("shop", "month", "sales"))
    options = ["--horizon", "6", "--threads", "1", "--output"]
    assert main(["train", "series", "plain.csv", *options, "plain"]) == 0
    assert main(["train", "series", "named.csv", "--id", "shop", "--target", "sales", *options, "named"]) == 0
    assert main(["forecast", "named", "named.csv", "--output", "next.csv"]) == 0
    plain, named = (Path(name).read_text().splitlines() for name in ("plain/forecast.csv", "next.csv"))
    assert named[0] == "shop,month,sales,sales_low,sales_high"
    assert named[1:] == plain[1:]


def test_interrupted_training_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(Path("sales.csv"), seasonal_panel(3))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("retrograd.train.panel_jobs.train", interrupted)
    try:
        code = main(["train", "series", "sales.csv", "--threads", "1", "--output", "run"])
    except KeyboardInterrupt:
        code = 130
    assert code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["sales.csv"]


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"nothing")
    with pytest.raises(InputError, match="is not a panel model"):
        PanelModel.load(file)
