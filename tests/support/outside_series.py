"""Series that other packages carry, 18 kinds of them, and `retrograd train series` on each beside AutoETS.

``python tests/support/outside_series.py`` prints the table of ``docs/train.md``. It needs statsmodels, pmdarima and
vega_datasets, which have the data.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt

from retrograd.cli import main
from retrograd.train.contest import CHOSEN, by_library, rolling_origins
from retrograd.train.scores import scale
from retrograd.train.series import load_series_model
from retrograd.train.table import read_table

Array = npt.NDArray[Any]
TESTED = 8  # origins in the test part, half a horizon apart


class Outside(NamedTuple):
    name: str
    first: str  # the date of the first row
    unit: str  # of NumPy: the time from row to row
    count: int
    season: int  # of AutoETS: what its user would say
    horizon: int
    values: Callable[[], Any]


def _pmdarima(name: str) -> Callable[[], Any]:
    def load() -> Any:
        import pmdarima.datasets

        return getattr(pmdarima.datasets, f"load_{name}")()

    return load


def _statsmodels(name: str, column: str) -> Callable[[], Any]:
    def load() -> Any:
        import statsmodels.api

        return getattr(statsmodels.api.datasets, name).load_pandas().data[column]

    return load


def _elnino() -> Any:
    import statsmodels.api

    return statsmodels.api.datasets.elnino.load_pandas().data.iloc[:, 1:]


def _co2() -> Any:
    return _statsmodels("co2", "co2")().resample("MS").mean().interpolate()


def _vega(name: str, column: str, **where: str) -> Callable[[], Any]:
    def load() -> Any:
        from vega_datasets import local_data

        frame = getattr(local_data, name)()
        for key, value in where.items():
            frame = frame[frame[key] == value]
        return frame[column]

    return load


SERIES = (
    Outside("airline passengers", "1949-01", "M", 1, 12, 12, _pmdarima("airpassengers")),
    Outside("beer, Australia", "1956-01", "M", 3, 4, 8, _pmdarima("ausbeer")),
    Outside("residents, Australia", "1971-04", "M", 3, 4, 8, _pmdarima("austres")),
    Outside("heart rate", "2000-01-01T00:00:00.000", "ms", 500, 1, 12, _pmdarima("heartrate")),
    Outside("lynx", "1821", "Y", 1, 1, 8, _pmdarima("lynx")),
    Outside("wine, Australia", "1980-01", "M", 1, 12, 12, _pmdarima("wineind")),
    Outside("wool, Australia", "1965-01", "M", 3, 4, 8, _pmdarima("woolyrnq")),
    Outside("sunspots, yearly", "1700", "Y", 1, 1, 8, _statsmodels("sunspots", "SUNACTIVITY")),
    Outside("Nile", "1871", "Y", 1, 1, 8, _statsmodels("nile", "volume")),
    Outside("CO2, monthly", "1958-03", "M", 1, 12, 12, _co2),
    Outside("El Niño", "1950-01", "M", 1, 12, 12, _elnino),
    Outside("GDP, US", "1959-01", "M", 3, 4, 8, _statsmodels("macrodata", "realgdp")),
    Outside("unemployment, US", "1959-01", "M", 3, 4, 8, _statsmodels("macrodata", "unemp")),
    Outside("inflation, US", "1959-01", "M", 3, 4, 8, _statsmodels("macrodata", "infl")),
    Outside("temperature, Seattle, daily", "2012-01-01", "D", 1, 7, 14, _vega("seattle_weather", "temp_max")),
    Outside("temperature, San Francisco, hourly", "2010-01-01T00", "h", 1, 24, 24, _vega("sf_temps", "temp")),
    Outside("employment, US", "2006-01", "M", 1, 12, 12, _vega("us_employment", "nonfarm")),
    Outside("share price, Amazon", "2000-01", "M", 1, 12, 12, _vega("stocks", "price", symbol="AMZN")),
)


class Measured(NamedTuple):
    name: str
    rows: int
    chosen: str
    error: float  # MASE
    rival: float  # of AutoETS
    network: float
    inside: float  # share of the test's values in the 80 % band

    @property
    def ratio(self) -> float:
        return self.error / self.rival


def written(series: Outside, folder: Path) -> tuple[Path, Array]:
    """Write the series, at most its last 1,000 hours, as a CSV file with dates."""
    values = np.asarray(series.values(), np.float64).ravel()
    values = values[~np.isnan(values)][-1000 if series.unit == "h" else 0 :]
    dates = np.datetime64(series.first, series.unit) + series.count * np.arange(len(values))
    path = folder / "series.csv"
    path.write_text("\n".join(["date,y", *(f"{d},{float(v)!r}" for d, v in zip(dates, values, strict=True))]) + "\n")
    return path, values


def by_library_once() -> Callable[[str, Array, int, int], Array]:
    """`by_library`, with each fit computed once: AutoETS of the contest is often that of the rival."""
    found: dict[tuple[str, bytes, int, int], Array] = {}

    def fitted(key: str, values: Array, season: int, horizon: int) -> Array:
        fit = key, values.tobytes(), season, horizon
        if fit not in found:
            found[fit] = by_library(key, values, season, horizon)
        return found[fit].copy()

    return fitted


def measure(series: Outside) -> Measured:
    """Train on a series and compare in its test part, which has 8 origins."""
    with tempfile.TemporaryDirectory() as folder:
        path, values = written(series, Path(folder))
        last = series.horizon + (TESTED - 1) * max(1, series.horizon // 2)
        options = ["--horizon", str(series.horizon), "--test", repr(min(0.45, last / len(values))), "--overwrite"]
        fitted = by_library_once()
        with contextlib.redirect_stdout(io.StringIO()) as said, mock.patch("retrograd.train.series.by_library", fitted):
            code = main(["train", "series", str(path), "--output", str(Path(folder) / "run"), *options])
        if code:
            raise RuntimeError(f"{series.name}: {said.getvalue()}")
        forecaster = load_series_model(Path(folder) / "run")
        plan, verdict = forecaster.plan, forecaster.verdict
        assert verdict is not None
        choice, rows = verdict.targets["y"], read_table(path).rows
        assert rows == len(values)
        # AutoETS gets the same rows, and the season that its user would say.
        settings = forecaster.settings
        middle, last = (max(1, plan.horizon, round(share * rows)) for share in (settings.validation, settings.test))
        origins = [
            origin for origin in rolling_origins(rows, plan.horizon, plan.season, middle, last) if origin >= rows - last
        ]
        assert len(origins) == verdict.forecasts
        unit = scale(values[: rows - last], series.season)
        errors = [
            np.abs(fitted("ets", values[:at], series.season, plan.horizon) - values[at : at + plan.horizon]).mean()
            for at in origins
        ]
        to_unit = scale(values[: rows - last], plan.season) / unit
        return Measured(
            series.name,
            rows,
            str(choice),
            choice.errors[CHOSEN] * to_unit,
            float(np.mean(errors)) / unit,
            choice.errors.get("network", math.nan) * to_unit,
            choice.inside,
        )


def table(found: list[Measured]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| series | rows | MASE | AutoETS | ratio | network alone | in the band | what is used |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|"
    for one in found:
        network = "-" if math.isnan(one.network) else f"{one.network:.3f}"
        ratio = f"**{one.ratio:.2f}**" if one.ratio > 1.03 else f"{one.ratio:.2f}"
        yield (
            f"| {one.name} | {one.rows:,} | {one.error:.3f} | {one.rival:.3f} | {ratio} | {network} "
            f"| {100 * one.inside:.0f} % | {one.chosen} |"
        )
    mean = [float(np.mean([getattr(one, name) for one in found])) for name in ("error", "rival", "inside")]
    ratio = math.exp(np.mean([math.log(one.ratio) for one in found]))
    yield f"| mean | | {mean[0]:.3f} | {mean[1]:.3f} | {ratio:.2f} | | {100 * mean[2]:.0f} % | |"


if __name__ == "__main__":
    wanted = sys.argv[1:]
    every = []
    for series in SERIES:
        if not wanted or any(word.lower() in series.name.lower() for word in wanted):
            every.append(measure(series))
            print(f"{every[-1]} ratio {every[-1].ratio:.3f}", file=sys.stderr, flush=True)
    print("\n".join(table(every)))
