"""The choice among methods: what statsforecast forecasts, weights that only the past decides, bands that hold."""

from __future__ import annotations

import builtins
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd.cli import main
from retrograd.train.contest import METHODS, Rolling, band, by_library, rolling_origins, weigh
from retrograd.train.scores import Choice, Verdict, scale

models = pytest.importorskip("statsforecast.models")
Array = npt.NDArray[Any]


def seasonal(rows: int, season: int = 12, seed: int = 0) -> Array:
    t = np.arange(rows)
    values: Array = (
        50 + 0.2 * t + 5 * np.sin(2 * np.pi * t / season) + np.random.default_rng(seed).standard_normal(rows)
    )
    return values


# ---- methods ---------------------------------------------------------------------------------------------------------


def test_the_methods_are_those_of_statsforecast() -> None:
    y = seasonal(96)
    found = {key: by_library(key, y, 12, 5) for key in METHODS}
    for key, direct in (
        ("ets", models.AutoETS(season_length=12)),
        ("theta", models.AutoTheta(season_length=12)),
        ("arima", models.AutoARIMA(season_length=12, approximation=True)),
        ("seasonal", models.SeasonalNaive(season_length=12)),
        ("drift", models.RandomWalkWithDrift()),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ARIMA warns of models that it tries
            np.testing.assert_array_equal(found[key], direct.forecast(y=y, h=5)["mean"])
    np.testing.assert_array_equal(found["naive"], np.full(5, y[-1]))
    assert all(np.isfinite(values).all() for values in found.values())


@pytest.mark.parametrize("key", METHODS)
@pytest.mark.parametrize(
    "values",
    [
        *(np.zeros(60), np.full(60, 3.0), np.arange(60.0), np.r_[np.zeros(59), 1e30]),
        *(1e100 * seasonal(60), seasonal(10), np.ones(1)),
    ],
)
def test_hard_series_give_a_forecast_or_none(key: str, values: Array) -> None:
    for season in (1, 4, 12, 52):
        found = by_library(key, np.asarray(values), season, 6)
        assert found.shape == (6,)
        assert np.isfinite(found).all() or np.isnan(found).all()
    if key == "naive" and len(values) > 1:
        assert np.isfinite(by_library(key, np.asarray(values), 1, 6)).all()


def test_seasons_that_a_method_cannot_fit() -> None:
    y = seasonal(400, 48)
    assert np.isnan(by_library("ets", y, 48, 4)).all()
    assert np.isnan(by_library("arima", y, 48, 4)).all()
    assert np.isnan(by_library("seasonal", y, 1, 4)).all()
    assert np.isfinite(by_library("mstl", y, 48, 4)).all()


# ---- origins ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "horizon", "season", "middle", "last"),
    [(144, 12, 12, 22, 22), (2000, 12, 12, 300, 300), (300, 1, 1, 45, 45), (40, 6, 1, 6, 6), (12, 2, 1, 2, 2)],
)
def test_origins(rows: int, horizon: int, season: int, middle: int, last: int) -> None:
    found = rolling_origins(rows, horizon, season, middle, last)
    assert found == sorted(set(found))
    assert found[-1] == rows - horizon  # the last rows are forecast
    tested = [origin for origin in found if origin >= rows - last]
    before = [origin for origin in found if origin < rows - last]
    assert 1 <= len(tested) <= 8
    assert len(before) <= 12
    assert all(origin + horizon <= rows - last for origin in before)
    assert all(origin >= 2 * season + 5 for origin in before)
    if last > 8 * horizon:
        assert tested[0] < rows - 0.8 * last  # they cover the part


# ---- weights ---------------------------------------------------------------------------------------------------------


def made(errors: dict[str, float], origins: int = 8, horizon: int = 4, seed: int = 0) -> tuple[dict[str, Array], Array]:
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal((origins, horizon))
    return {key: truth + size * rng.standard_normal((origins, horizon)) for key, size in errors.items()}, truth


def test_a_method_that_is_much_better_gets_most_of_the_weight() -> None:
    predicted, truth = made({"ets": 5.0, "arima": 0.5, "naive": 9.0})
    weights = weigh(predicted, truth)
    assert sum(weights.values()) == pytest.approx(1)
    assert next(iter(weights)) == "arima"
    assert weights["arima"] > 0.9
    assert "naive" not in weights


def test_what_may_be_chance_leaves_the_weight_to_ets() -> None:
    shares = []
    for seed in range(40):
        predicted, truth = made({"ets": 1.0, "arima": 1.0, "theta": 1.0}, seed=seed)
        predicted["theta"] = predicted["ets"] + 0.01 * predicted["theta"]  # combining does not average errors out
        predicted["arima"] = predicted["ets"] + 0.01 * predicted["arima"]
        shares.append(weigh(predicted, truth).get("ets", 0.0))
    assert np.mean(shares) > 0.7
    few, truth = made({"ets": 5.0, "arima": 0.1}, origins=3)
    assert weigh(few, truth) == {"ets": 1.0}


def test_methods_without_a_forecast_have_no_weight() -> None:
    predicted, truth = made({"ets": 1.0, "arima": 0.1, "mstl": 0.5})
    predicted["arima"][2, 1] = np.nan
    assert "arima" not in weigh(predicted, truth)
    predicted["ets"][:] = np.nan
    assert "mstl" in weigh(predicted, truth)
    assert weigh({}, truth) == {"naive": 1.0}


def test_the_network_needs_errors_of_its_own() -> None:
    predicted, truth = made({"ets": 2.0, "network": 0.2, "linear": 3.0}, origins=10)
    for key in ("network", "linear"):
        predicted[key][:7] = np.nan
    assert weigh(predicted, truth) == {"ets": 1.0}
    predicted, truth = made({"ets": 2.0, "network": 0.2, "linear": 3.0}, origins=10)
    for key in ("network", "linear"):
        predicted[key][:4] = np.nan
    assert weigh(predicted, truth)["network"] > 0.9


def test_only_the_past_decides() -> None:
    rng = np.random.default_rng(3)
    origins = np.arange(40, 100, 4)
    truth = rng.standard_normal((len(origins), 4))
    predicted = {key: truth + size * rng.standard_normal(truth.shape) for key, size in (("ets", 1.0), ("arima", 0.3))}
    one = Rolling(origins, truth.copy(), {key: rows.copy() for key, rows in predicted.items()})
    other = Rolling(origins, truth.copy(), {key: rows.copy() for key, rows in predicted.items()})
    other.truth[10:] += 1000  # rows after origin 80
    assert one.weights(80) == other.weights(80)
    assert one.weights(100) != other.weights(100)
    np.testing.assert_array_equal(one.chosen()[:11], other.chosen()[:11])
    np.testing.assert_array_equal(one.band(one.chosen(), 80), other.band(other.chosen(), 80))
    assert one.weights(40) == {"ets": 1.0}
    # A row that was not over when the forecast was made is not known.
    assert one.before(80, 99).tolist() == list(range(10))


# ---- bands -----------------------------------------------------------------------------------------------------------


def test_a_band_has_the_rank_that_holds() -> None:
    errors = np.array([[3.0, -1], [1, 1], [-2, 1], [4, 1]])
    assert band(errors).tolist() == [4, 1]  # rank 4 of 4
    nine = np.arange(1.0, 10)[:, None] * [1, -10]
    assert band(nine).tolist() == [8, 80]  # rank 8 of 9
    assert band(errors[:2]).tolist() == [3, 3]
    rng = np.random.default_rng(0)
    for count in (4, 9, 14):
        inside = [abs(rng.standard_normal()) <= band(rng.standard_normal((count, 1)))[0] for _ in range(3000)]
        assert 0.77 < np.mean(inside) < 0.83


# ---- words -----------------------------------------------------------------------------------------------------------


def test_the_verdict_is_one_sentence() -> None:
    choice = Choice({"arima": 0.6, "ets": 0.4}, {"chosen": 0.5, "ets": 1.0, "naive": 2.0, "seasonal": 0.4}, {}, 0.8)
    assert str(Verdict({"y": choice}, 8)) == (
        "The forecast is by 60 % AutoARIMA and 40 % AutoETS, with a MASE of 0.5 in 8 test forecasts: 50 % below "
        "AutoETS alone (1), 25 % ABOVE the seasonal naive forecast (0.4)."
    )
    alone = Choice({"ets": 1.0}, {"chosen": 0.5, "ets": 0.5, "naive": 0.502}, {}, 0.8)
    assert str(Verdict({"y": alone}, 1)) == (
        "The forecast is by AutoETS, with a MASE of 0.5 in 1 test forecast: level with the naive forecast (0.502)."
    )


def test_mase_is_relative_to_the_season() -> None:
    assert scale(np.array([1.0, 2, 4, 7]), 1) == 2
    assert scale(np.array([1.0, 2, 4, 7]), 2) == 4
    assert scale(np.array([1.0, 2, 4, 7]), 9) == 2
    assert scale(np.ones(4), 1) == 1


# ---- the command -----------------------------------------------------------------------------------------------------


def test_without_the_libraries_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("x\n" + "\n".join(map(str, range(60))))
    true = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "statsforecast":
            raise ImportError("No module named 'statsforecast'")
        return true(name, *rest)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["train", "series", "a.csv"]) == 2
    assert "pip install 'retrograd[series]'" in capsys.readouterr().err
    assert main(["forecast", "model", "a.csv"]) == 2
    assert "pip install 'retrograd[series]'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_retrograd_imports_none_of_the_libraries() -> None:
    names = "{'pandas', 'statsforecast', 'matplotlib'}"
    code = f"import sys, retrograd.cli, retrograd.train.text; print({names} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
