"""Forecasts of columns of numbers: batch norm, LSTM, linear, and what they are worth beside simple forecasts."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

import retrograd as rg

from .. import nn
from . import report
from .chart import Band, Chart, Line
from .files import check_room, load_weights, opened_model
from .report import Block, Prose, Section
from .settings import InputError, Settings, option
from .table import Table, counted, read_table
from .task import Array, Task, new_optimizer, steps_between_validations

__all__ = [
    "USES",
    "Forecast",
    "Forecaster",
    "LinearFit",
    "Plan",
    "SeriesModel",
    "SeriesSettings",
    "SeriesTask",
    "Verdict",
    "Windows",
    "find_season",
    "fit_linear",
    "forecast",
    "load_series_model",
]

_CHUNK: Final = 256  # windows that are evaluated at once
_MOST_VALIDATED: Final = 1_000  # windows
_MOST_TESTED: Final = 20_000
_MOST_FITTED: Final = 10_000  # by the linear baseline
_MOST_FEATURES: Final = 1_000
_MOST_CHARTS: Final = 4  # targets that are drawn
_FEWEST_WINDOWS: Final = 4  # to train on
_LIMIT: Final = 1e6  # of a scaled input: float32 must hold what the LSTM makes of it
_BAND: Final = (0.1, 0.9)  # quantiles of the errors
_NAMES: Final = {"last": "naive", "season": "seasonal naive", "linear": "linear"}
# What --use calls them.
USES: Final = {"model": "model", "linear": "linear", "seasonal": "seasonal naive", "naive": "naive"}


@dataclass(frozen=True)
class SeriesSettings(Settings):
    """Settings of a forecast."""

    target: str | None = option(
        None,
        "column to forecast, or several with commas between (default: the last column of numbers)",
        metavar="NAMES",
    )
    window: int | None = option(
        None, "rows that a forecast is made from (default: two seasons, at least 24)", minimum=1
    )
    horizon: int | None = option(None, "rows that are forecast (default: a season, or 12; at most 48)", minimum=1)
    season: int | None = option(None, "rows in a season, 1 for none (default: found in the training part)", minimum=1)
    reference: str = option(
        "auto",
        "the simple forecast that the model corrects: the last value, that of a season before, ridge regression from "
        "the window, or whichever of them does best on the validation part",
        choices=("auto", "last", "season", "linear"),
    )
    gaps: str = option("refuse", "what to do where numbers are missing", choices=("refuse", "interpolate"))
    hidden: int = option(64, "cells in a layer of the LSTM", minimum=1, maximum=65536)
    layers: int = option(1, "layers of the LSTM", minimum=1, maximum=64)
    dropout: float = option(0.0, "share of what the LSTM says that is dropped in training", minimum=0, maximum=0.99)
    batch: int = option(32, "windows in a step", minimum=1)
    steps: int | None = option(None, "steps of training (default: by rows and window, 200 to 1500)", minimum=1)
    loss: str = option("huber", "what is made small", choices=("huber", "mse"))
    validation: float = option(0.15, "share of the rows that choose the best weights", minimum=0.01, maximum=0.45)
    test: float = option(0.15, "share of the rows, the last, that judge the result", minimum=0.01, maximum=0.45)

    def least_weights(self) -> int:
        return 4 * self.hidden * (1 + (2 * self.layers - 1) * self.hidden)


@dataclass(frozen=True)
class Plan:
    """What is forecast from what. It is saved with a model."""

    columns: tuple[str, ...]
    targets: tuple[str, ...]  # some of the columns
    window: int
    horizon: int
    season: int  # 1: none
    reference: str  # "last", "season" or "linear"
    lags: int  # rows that the linear baseline reads; 0 if it was not saved
    step: str  # from row to row, in words
    baselines: bool = False  # whether all of them were saved, which earlier releases did not

    @property
    def history(self) -> int:
        """Rows that must be there for a forecast: those of the window, and a season."""
        return max(self.window, self.season)

    def simple(self) -> list[str]:
        """The baselines that there are, by their keys in `_NAMES`."""
        return [key for key in _NAMES if key != "season" or self.season > 1]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Plan:
        plan = cls(**{**record, "columns": tuple(record["columns"]), "targets": tuple(record["targets"])})
        sizes = (plan.window, plan.horizon, plan.season, plan.lags)
        if not (
            plan.targets
            and set(plan.targets) <= set(plan.columns)
            and all(isinstance(name, str) for name in (*plan.columns, plan.step))
            and all(type(size) is int and size >= 0 for size in sizes)
            and type(plan.baselines) is bool
            and (plan.lags > 0 or not plan.baselines)
            and plan.lags <= plan.window
            and min(sizes[:3]) >= 1
            and plan.reference in _NAMES
        ):
            raise ValueError(f"its plan is {plan}")
        return plan


class SeriesModel(nn.Module):
    """From windows ``[T, N, columns]`` to ``[N, horizon * targets]``: batch norm, LSTM, linear from its last state.

    The linear layer begins as 0, so that an untrained model forecasts what its outputs are differences from. Buffers
    remember what was found in the training part: `center` and `factor` of each column, `unit` of each target, `slope`
    and `start` of the linear baseline; and from the validation part the band around a forecast, `low` and `high`, and
    with `baselines` that around each of theirs.
    """

    center: Array
    factor: Array
    unit: Array
    slope: Array
    start: Array
    low: Array
    high: Array
    baseline_low: Array
    baseline_high: Array

    def __init__(
        self,
        columns: int,
        horizon: int,
        targets: int,
        *,
        lags: int = 0,
        baselines: int = 0,
        hidden: int = 64,
        layers: int = 1,
        dropout: float = 0.0,
        dtype: npt.DTypeLike = np.float32,
        rng: np.random.Generator | int | None = None,
    ) -> None:
        rng = np.random.default_rng(rng)
        # Columns come scaled, so the running statistics begin where they belong, and can follow slowly.
        self.norm = nn.BatchNorm(columns, channel_axis=-1, update=rg.RunningUpdate.keras(0.99), dtype=dtype)
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(columns, hidden, layers=layers, dropout=between, dtype=dtype, rng=rng)
        self.dropout = nn.Dropout(dropout, rng=rng)
        self.head = nn.Linear(hidden, horizon * targets, dtype=dtype, rng=rng)
        self.head.w[...] = 0
        self.head.b[...] = 0
        self.add_buffer("center", np.zeros(columns))
        self.add_buffer("factor", np.ones(columns))
        self.add_buffer("unit", np.ones(targets))
        self.add_buffer("slope", np.zeros((horizon * targets, lags * columns)))
        self.add_buffer("start", np.zeros(horizon * targets))
        self.add_buffer("low", np.zeros((horizon, targets)))
        self.add_buffer("high", np.zeros((horizon, targets)))
        if baselines:
            self.add_buffer("baseline_low", np.zeros((baselines, horizon, targets)))
            self.add_buffer("baseline_high", np.zeros((baselines, horizon, targets)))

    @classmethod
    def of(cls, plan: Plan, settings: SeriesSettings) -> SeriesModel:
        return cls(
            len(plan.columns),
            plan.horizon,
            len(plan.targets),
            lags=plan.lags,
            baselines=len(plan.simple()) if plan.baselines else 0,
            hidden=settings.hidden,
            layers=settings.layers,
            dropout=settings.dropout,
            rng=settings.seed,
        )

    def forward(self, x: Array) -> Array:
        y = self.lstm.forward(self.norm.forward(x))
        return self.head.forward(self.dropout.forward(y[-1]))

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = False) -> Array | None:
        dlast = self.head.backward(dy, accumulate=accumulate)
        assert dlast is not None
        dlast = self.dropout.backward(dlast)
        assert dlast is not None
        dh = self.reuse("dh", (self.lstm.layers, *dlast.shape), dlast.dtype)
        dh[:-1] = 0
        dh[-1] = dlast  # the last output is the last layer's final state
        dx = self.lstm.backward(None, (dh, None), accumulate=accumulate)
        assert dx is not None
        return self.norm.backward(dx, accumulate=accumulate, need_dx=need_dx)


# ---- windows ---------------------------------------------------------------------------------------------------------


class Windows:
    """Windows of a table by their origin, the last row that is known; gathered into memory that is used again."""

    def __init__(
        self,
        columns: Mapping[str, Array],
        names: Sequence[str],
        targets: Sequence[str],
        *,
        window: int,
        horizon: int,
        season: int,
        center: Array,
        factor: Array,
    ) -> None:
        values = np.stack([columns[name] for name in names], axis=1)
        self.window, self.horizon, self.season = window, horizon, season
        self.scaled = np.clip((values - center) * factor, -_LIMIT, _LIMIT)
        places = {name: place for place, name in enumerate(names)}
        self.targets = values[:, [places[name] for name in targets]]
        self._single = self.scaled.astype(np.float32)
        self._ahead = np.arange(1, horizon + 1)
        self._back = np.arange(1 - window, 1)[:, None]
        self._rows = np.empty((window, 0), np.intp)
        self._x = np.empty((window, 0, len(names)), np.float32)

    def inputs(self, origins: Array) -> Array:
        """What the network sees, ``[T, N, columns]``. It holds until the next call."""
        if len(origins) != self._rows.shape[1]:
            self._rows = np.empty((self.window, len(origins)), np.intp)
            self._x = np.empty((self.window, len(origins), self._single.shape[1]), np.float32)
        np.add(self._back, origins, out=self._rows)
        # All rows are there; "clip" spares the copy that np.take makes to be able to raise.
        return np.take(self._single, self._rows, axis=0, out=self._x, mode="clip")

    def lagged(self, origins: Array, lags: int) -> Array:
        """What linear regression sees, ``[N, lags * columns]``."""
        rows: Array = self.scaled[origins[:, None] + np.arange(1 - lags, 1)]
        return rows.reshape(len(origins), -1)

    def at(self, rows: Array) -> Array:
        """The targets of rows."""
        values: Array = self.targets[rows]
        return values

    def truth(self, origins: Array) -> Array:
        """What came, ``[N, horizon, targets]``."""
        return self.at(origins[:, None] + self._ahead)

    def last(self, origins: Array) -> Array:
        """The naive forecast: the last value, again and again."""
        return np.repeat(self.at(origins[:, None]), self.horizon, axis=1)

    def seasonal(self, origins: Array) -> Array:
        """The seasonal naive forecast: the values of a season before."""
        before: Array = self._ahead - self.season * -(-self._ahead // self.season)
        return self.at(origins[:, None] + before)


def _chunks(origins: Array) -> list[Array]:
    return [origins[first : first + _CHUNK] for first in range(0, len(origins), _CHUNK)]


def _band(errors: Array) -> tuple[Array, Array]:
    """What to add to forecasts so that 80 % of what comes is between, by their errors ``[N, horizon, targets]``."""
    # A few errors determine no quantiles: then all horizons share them.
    low, high = np.quantile(errors, _BAND, axis=(0, 1) if len(errors) < 20 else 0)
    return np.minimum(low, 0), np.maximum(high, 0)


def _spread(origins: Array, most: int) -> Array:
    """At most so many of them, evenly spaced."""
    if len(origins) <= most:
        return origins
    some: Array = origins[np.linspace(0, len(origins) - 1, most).round().astype(np.intp)]
    return some


# ---- linear regression -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearFit:
    """Ridge regression from the last `lags` rows of all columns to how far the next targets are from the last ones."""

    slope: Array  # [horizon * targets, lags * columns], as rg.linear_forward has it
    start: Array
    shrink: float  # what was added to the diagonal
    lags: int

    def forecast(self, windows: Windows, origins: Array) -> Array:
        last = windows.last(origins)
        # By the engine, whose bits do not depend on the number of threads.
        parts = [
            rg.linear_forward(windows.lagged(part, self.lags), self.slope, self.start) for part in _chunks(origins)
        ]
        differences: Array = np.concatenate(parts).reshape(last.shape)
        return last + differences


def fit_linear(windows: Windows, training: Array, validation: Array) -> LinearFit:
    """Fit on the training part; how much it shrinks is chosen on the validation part.

    If the window is too large for a solution in seconds, only its last rows count.
    """
    columns, targets = windows.scaled.shape[1], windows.targets.shape[1]
    lags = min(windows.window, max(1, _MOST_FEATURES // columns))
    features = lags * columns
    training, validation = _spread(training, _MOST_FITTED), _spread(validation, _MOST_VALIDATED)
    count = len(training)
    sums = np.zeros(features + windows.horizon * targets)
    products = np.zeros((features, len(sums)))
    for part in _chunks(training):
        differences = (windows.truth(part) - windows.last(part)).reshape(len(part), -1)
        both = np.concatenate([windows.lagged(part, lags), differences], axis=1)
        sums += both.sum(axis=0)
        products += both[:, :features].T @ both
    mean = sums / count
    products -= count * np.outer(mean[:features], mean)
    sizes, vectors = np.linalg.eigh(products[:, :features])
    turned = vectors.T @ products[:, features:]
    best, least = None, math.inf
    for share in (1e-6, 1e-4, 1e-2, 1.0):  # of the sum of squares that a scaled column has
        shrink = share * count
        slope = vectors @ (turned / (np.maximum(sizes, 0) + shrink)[:, None])
        fit = LinearFit(np.ascontiguousarray(slope.T), mean[features:] - mean[:features] @ slope, shrink, lags)
        error = _relative_error(fit.forecast(windows, validation), windows, validation)
        if error < least:
            best, least = fit, error
    assert best is not None
    return best


def _relative_error(said: Array, windows: Windows, origins: Array) -> float:
    """The mean absolute error over that of the naive forecast, averaged over targets."""
    truth = windows.truth(origins)
    naive = _not_zero(np.abs(windows.last(origins) - truth).mean(axis=(0, 1)))
    return float((np.abs(said - truth).mean(axis=(0, 1)) / naive).mean())


def _not_zero(sizes: Array) -> Array:
    return np.where(sizes > 0, sizes, 1.0)


# ---- the season ------------------------------------------------------------------------------------------------------


def find_season(values: Array, likely: Sequence[int] = ()) -> int:
    """Rows after which a series is most like itself, 1 if there is no such number. `likely`: those of the calendar.

    A random walk wanders off and back, and so looks periodic. Its differences over d rows do not, beyond d rows. So
    each lag is judged by the autocorrelation of differences over a fourth to an eighth of it.
    """
    rows = len(values)
    longest = min(rows // 3, 1000)
    season, best, gap = 1, 0.0, 1
    while 4 * gap <= longest or gap == 1:
        correlation = _autocorrelation(values[gap:] - values[:-gap], min(8 * gap + 2, longest + 2, rows - gap))
        # Bartlett: the deviation of the autocorrelation of differences of noise, or of a random walk.
        lags = np.arange(1, len(correlation) - 1)
        noise = np.sqrt(max(1.5, 2 * gap / 3) / (rows - gap - lags))
        expected = np.array([any(abs(calendar - lag) <= 0.05 * lag for calendar in likely) for lag in lags], bool)
        least = np.maximum(0.3, np.where(expected, 2, 3) * noise)
        here, before, after = correlation[1:-1], correlation[:-2], correlation[2:]
        peaks = lags[(here >= before) & (here >= after) & (here > least) & (lags > gap)]
        own = peaks[peaks >= (2 if gap == 1 else 4 * gap)]
        if own.size and correlation[own].max() > best + 0.1:  # less may be a multiple
            best = float(correlation[own].max())
            # Multiples fit as well; the shortest is meant.
            season = _top(correlation, int(peaks[correlation[peaks] >= 0.9 * best][0]))
        gap *= 2
    for calendar in likely:
        if abs(calendar - season) <= 0.05 * season:
            return calendar
    return season


def _top(correlation: Array, peak: int) -> int:
    """Where a broad peak is highest, by a parabola: noise moves its highest point about."""
    reach = min(peak // 8, len(correlation) - 1 - peak)
    if reach < 2:
        return peak
    lags = np.arange(-reach, reach + 1)
    bend, slope, _ = np.polyfit(lags, correlation[peak - reach : peak + reach + 1], 2)
    return peak + round(float(np.clip(-slope / (2 * bend), -reach, reach))) if bend < 0 else peak


def _autocorrelation(values: Array, lags: int) -> Array:
    """At lags from 0 on, each over the rows that have a partner."""
    values = values - values.mean()
    size = 2 ** math.ceil(math.log2(max(2 * len(values), 2)))
    spectrum = np.fft.rfft(values, size)
    sums = np.fft.irfft(spectrum * spectrum.conj(), size)[:lags]
    each = sums / (len(values) - np.arange(lags))
    return each / each[0] if each[0] > 0 else np.zeros(lags)


# ---- the trained model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """How the model and the baselines did on held-out time."""

    errors: dict[str, float]  # by name, as in `USES`: MAE, or the mean error in units of the naive forecast's
    forecasts: int
    clear: bool  # whether the model's lead, if there is one, is more than chance would make of it
    targets: int

    @property
    def winner(self) -> str:
        """The forecast with the smallest error; the model only if it is better than each baseline."""
        return min(sorted(self.errors, key=lambda name: name == "model"), key=lambda name: self.errors[name])

    def __str__(self) -> str:
        """One sentence on the model and the best baseline."""
        best = min((name for name in self.errors if name != "model"), key=lambda name: self.errors[name])
        model, other = self.errors["model"], self.errors[best]
        unit = "MAE" if self.targets == 1 else "mean error in units of the naive forecast's"
        numbers = f"{unit} {model:.4g} against {other:.4g} in {counted(self.forecasts, 'forecast')} of held-out time"
        the_other = "the linear baseline" if best == "linear" else f"the {best} forecast"
        if abs(model - other) <= max(0.01 * other, 0.001 * self.errors["naive"]):
            return f"The model does not beat {the_other}: they hardly differ ({numbers})."
        if model > other:
            by = f" by {100 * (model / other - 1):.0f} %" if other else ""
            return f"The model LOSES to {the_other}{by}: use that instead ({numbers})."
        by = f"{100 * (1 - model / other):.0f} %"
        if self.clear:
            return f"The model beats {the_other}, the best of the baselines, by {by} ({numbers})."
        return f"The model does not clearly beat {the_other}: it is {by} better, which may be chance ({numbers})."

    @classmethod
    def from_record(cls, record: Mapping[str, Any], plan: Plan) -> Verdict:
        verdict = cls(**record)
        names = ["model", *(_NAMES[key] for key in plan.simple())]
        if not (
            list(verdict.errors) == names
            and all(type(error) is float and 0 <= error < math.inf for error in verdict.errors.values())
            and type(verdict.forecasts) is int
            and verdict.forecasts > 0
            and type(verdict.clear) is bool
            and verdict.targets == len(plan.targets)
        ):
            raise ValueError(f"its verdict is {verdict.errors}")
        return verdict


@dataclass(frozen=True)
class Forecaster:
    """A model with what it needs to forecast."""

    model: SeriesModel
    plan: Plan
    settings: SeriesSettings
    verdict: Verdict | None = None  # none before a run has ended, and of earlier releases

    def windows(self, columns: Mapping[str, Array]) -> Windows:
        plan, model = self.plan, self.model
        return Windows(
            columns,
            plan.columns,
            plan.targets,
            window=plan.window,
            horizon=plan.horizon,
            season=plan.season,
            center=model.center,
            factor=model.factor,
        )

    def simple(self, which: str, windows: Windows, origins: Array) -> Array:
        """The forecast of a baseline, by its key in `_NAMES`, ``[N, horizon, targets]``."""
        if which == "linear":
            return LinearFit(self.model.slope, self.model.start, 0.0, self.plan.lags).forecast(windows, origins)
        return windows.seasonal(origins) if which == "season" else windows.last(origins)

    def reference(self, windows: Windows, origins: Array) -> Array:
        """What the model's outputs are differences from, ``[N, horizon, targets]``."""
        return self.simple(self.plan.reference, windows, origins)

    def by(self, name: str, windows: Windows, origins: Array) -> tuple[Array, Array, Array]:
        """The forecast of the model or of a baseline, by its name in `USES`, and its band: low and high."""
        if name == "model":
            said = self.forecast(windows, origins)
            return said, said + self.model.low, said + self.model.high
        at = [_NAMES[key] for key in self.plan.simple()].index(name)
        said = self.simple(self.plan.simple()[at], windows, origins)
        return said, said + self.model.baseline_low[at], said + self.model.baseline_high[at]

    def choose(self, use: str | None) -> tuple[str, str]:
        """Which forecast is used, by its name in `USES`, and why: what --use says, or the winner on held-out time."""
        if use is None:
            if self.verdict is None:
                return "model", "no comparison with the baselines was saved with it"
            return self.verdict.winner, "the smallest error on held-out time; --use chooses another"
        name = USES[use]
        if name != "model" and not self.plan.baselines:
            raise InputError(
                f"--use {use}: the model was saved without its baselines; train it again with this release"
            )
        if name == "seasonal naive" and self.plan.season < 2:
            raise InputError("--use seasonal: the model was trained without a season (--season)")
        return name, f"--use {use}"

    def outputs(self, windows: Windows, origins: Array) -> Array:
        """What the model should say, ``[N, horizon * targets]``."""
        differences = (windows.truth(origins) - self.reference(windows, origins)) / self.model.unit
        return differences.reshape(len(origins), -1).astype(np.float32)

    def forecast(self, windows: Windows, origins: Array) -> Array:
        """What the model forecasts, ``[N, horizon, targets]`` in the units of the targets."""
        was_training = self.model.training
        self.model.eval()
        said = np.concatenate([self.model.forward(windows.inputs(part)) for part in _chunks(origins)])
        if was_training:
            self.model.train()
        reference = self.reference(windows, origins)
        return reference + said.astype(np.float64).reshape(reference.shape) * self.model.unit


def load_series_model(path: str | os.PathLike[str]) -> Forecaster:
    """The model of a run, by its folder or by the file itself."""
    with opened_model(path, SeriesTask.kind) as (file, metadata):
        plan = Plan.from_record(metadata["description"]["plan"])
        settings = SeriesSettings.from_record(metadata["settings"])
        inputs, outputs = len(plan.columns), plan.horizon * len(plan.targets)
        ends = 4 * settings.hidden * inputs + outputs * (settings.hidden + plan.lags * inputs)
        check_room(file, settings.least_weights() + ends)
        record = metadata.get("verdict")
        verdict = None if record is None or not plan.baselines else Verdict.from_record(record, plan)
        model = SeriesModel.of(plan, settings)
        load_weights(file, model)
    return Forecaster(model.eval(), plan, settings, verdict)


@dataclass(frozen=True)
class Forecast:
    """The rows that follow a table, with a band that is to hold 80 % of what comes."""

    by: str  # who forecasts, by the name in `USES`
    why: str
    time_column: str
    times: list[str]
    columns: dict[str, Array]  # by target, [horizon] each
    low: dict[str, Array]
    high: dict[str, Array]
    notes: tuple[str, ...]
    past_times: list[str]  # the end of the table, for the chart
    past: dict[str, Array]

    def csv_text(self) -> str:
        """A header, and a row for each time: the forecast and its band for each target."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            [self.time_column, *(c for name in self.columns for c in (name, f"{name}_low", f"{name}_high"))]
        )
        parts = [part[name] for name in self.columns for part in (self.columns, self.low, self.high)]
        for time, *numbers in zip(self.times, *parts, strict=True):
            writer.writerow([time, *(f"{number:.9g}" for number in numbers)])
        return text.getvalue()

    def chart(self, target: str | None = None) -> Chart:
        """The end of a target's past and its forecast; of the first target if none is named."""
        name = next(iter(self.columns)) if target is None else target
        now = len(self.past_times) - 1
        ahead = range(now, now + len(self.times) + 1)
        values, low, high = (np.append(self.past[name][-1], part[name]) for part in (self.columns, self.low, self.high))
        return Chart(
            f"Forecast of {name}",
            self.time_column,
            name,
            [Line("past", range(now + 1), self.past[name]), Line(self.by, ahead, values)],
            [Band("80 % band", ahead, low, high, line=1)],
            x_ticks=_ticks(self.past_times + self.times),
        )


def _ticks(labels: Sequence[str]) -> list[tuple[float, str]]:
    """Some five of the labels, evenly spaced, at their places."""
    return [(float(at), labels[at]) for at in range(0, len(labels), max(1, math.ceil(len(labels) / 5)))]


def forecast(forecaster: Forecaster, table: Table, use: str | None = None) -> Forecast:
    """Forecast the rows after the end of a table that has the columns of the training.

    `use` is one of `USES`: the model or a baseline. None is the one with the smallest error on held-out time.
    """
    plan, (by, why) = forecaster.plan, forecaster.choose(use)
    missing = [name for name in plan.columns if name not in table.columns]
    if missing:
        raise InputError(
            f"{table.name} has no {_named('column', missing)} of numbers, but the model was trained with "
            f"{'it' if len(missing) == 1 else 'them'}; it has {_listed(table.columns)}"
        )
    if table.rows < plan.history:
        raise InputError(f"{table.name} has {table.rows} rows, but the model needs the last {plan.history}")
    notes, known = list(table.notes), set(plan.columns)
    further = [name for name in table.columns if name not in known]
    if further:
        notes.append(f"The model does not know {_named('column', further)}.")
    if str(table.times.step) != plan.step:
        notes.append(f"From row to row it is {table.times.step}, but it was {plan.step} in training.")
    # A forecast looks at the last rows only; scaling the others would be in vain.
    shown = max(plan.history, 3 * plan.horizon)
    recent = {name: table.columns[name][-shown:] for name in plan.columns}
    windows = forecaster.windows(recent)
    values, low, high = (part[0] for part in forecaster.by(by, windows, np.array([len(windows.targets) - 1])))
    rows = range(max(-table.rows, -3 * plan.horizon), 0)

    def by_target(numbers: Array) -> dict[str, Array]:
        return dict(zip(plan.targets, numbers.T, strict=True))

    return Forecast(
        by,
        why,
        table.times.column,
        table.times.after(plan.horizon),
        by_target(values),
        by_target(low),
        by_target(high),
        tuple(notes),
        [table.times.label(row) for row in rows],
        {name: table.columns[name][rows.start :] for name in plan.targets},
    )


# ---- the task --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scores:
    """Forecasts of held-out time, ``[N, horizon, targets]`` each, and what came."""

    origins: Array
    truth: Array
    said: dict[str, Array]  # the model's first, by name

    def errors(self, name: str) -> Array:
        sizes: Array = np.abs(self.said[name] - self.truth)
        return sizes

    def overall(self, name: str) -> float:
        """The mean absolute error; of several targets the mean of the errors over those of the naive forecast."""
        each = self.errors(name).mean(axis=(0, 1))
        return float(each[0] if len(each) == 1 else (each / _not_zero(self.errors("naive").mean(axis=(0, 1)))).mean())


class SeriesTask(Task):
    """Train a forecast on a CSV file. The rows are parted by time: training, validation, test."""

    kind: ClassVar[str] = "series"
    items = "windows"
    settings: SeriesSettings
    model: SeriesModel

    def __init__(self, settings: SeriesSettings, file: str | os.PathLike[str]) -> None:
        self.settings = settings
        self.measure = "of the naive error"
        self._table = table = read_table(file, gaps=settings.gaps)
        self._notes = list(table.notes)
        targets = _targets(settings.target, table)
        self._parts = self._part()
        season, window, horizon = self._sizes(targets)
        history = max(window, season)
        first, middle, _ = self._parts
        needed = history + horizon + _FEWEST_WINDOWS - 1
        if first < needed:
            raise InputError(
                f"{table.name}: the training part has {first} of {table.rows} rows, but window {window}, "
                f"season {season} and horizon {horizon} need {needed}"
            )
        self._origins = (
            np.arange(history - 1, first - horizon),
            np.arange(first - 1, first + middle - horizon),
            np.arange(first + middle - 1, table.rows - horizon),
        )

        names = tuple(table.columns)
        values = np.stack([table.columns[name][:first] for name in names], axis=1)
        center, factor = self._scaling(names, targets, values)
        windows = Windows(
            table.columns,
            names,
            targets,
            window=window,
            horizon=horizon,
            season=season,
            center=center,
            factor=factor,
        )
        self._windows = windows
        self._linear = fit_linear(windows, *self._origins[:2])
        reference = self._choose_reference()
        step, lags = str(table.times.step), self._linear.lags
        self._plan = Plan(names, targets, window, horizon, season, reference, lags, step, baselines=True)
        self.model = model = SeriesModel.of(self._plan, settings).set_num_threads(settings.threads)
        self._forecaster = Forecaster(model, self._plan, settings)
        model.center[...], model.factor[...] = center, factor
        model.slope[...], model.start[...] = self._linear.slope, self._linear.start
        middle_origins = _spread(self._origins[1], _MOST_VALIDATED)
        for at, key in enumerate(self._plan.simple()):
            said = self._forecaster.simple(key, windows, middle_origins)
            model.baseline_low[at], model.baseline_high[at] = _band(windows.truth(middle_origins) - said)
        # The unit of outputs: how wrong the reference is, as far as float32 can tell.
        origins = _spread(self._origins[0], _MOST_TESTED)
        truth, simple = windows.truth(origins), self._forecaster.reference(windows, origins)
        naive = np.abs(truth - windows.last(origins)).mean(axis=(0, 1))
        model.unit[...] = _not_zero(np.maximum(np.abs(truth - simple).mean(axis=(0, 1)), 1e-6 * naive))
        self._weights = np.tile(model.unit / _not_zero(naive), horizon).astype(np.float32)

        count = len(self._origins[0])
        self._batch = min(settings.batch, count)
        self._batches = count // self._batch  # of an epoch; the few windows left over wait for the next order
        self._order: tuple[int, Array] | None = None
        self.steps = settings.steps or max(200, min(1500, 100 * self._batches, 100_000 // window))
        self.validate_every = steps_between_validations(settings, self.steps)
        self._loss: nn.Loss = nn.Huber(num_threads=settings.threads)
        if settings.loss == "mse":
            self._loss = nn.MeanSquaredError(num_threads=settings.threads)
        self.optimizer = new_optimizer(model, settings, self.steps)

    # ---- the data ----------------------------------------------------------------------------------------------------

    def _part(self) -> tuple[int, int, int]:
        """Rows of the training, validation and test parts; the last two hold at least one forecast."""
        rows, settings = self._table.rows, self.settings
        middle, last = (
            max(1, settings.horizon or 1, round(share * rows)) for share in (settings.validation, settings.test)
        )
        first = rows - middle - last
        if first < _FEWEST_WINDOWS + 1:
            raise InputError(
                f"{self._table.name} has {rows} rows: {middle} for validation and {last} for the test leave "
                f"{max(first, 0)}, training needs at least {_FEWEST_WINDOWS + 1}"
            )
        return first, middle, last

    def _sizes(self, targets: Sequence[str]) -> tuple[int, int, int]:
        """The season, the window and the horizon, from the training part where they are not given."""
        settings, (first, middle, last) = self.settings, self._parts
        season = settings.season or 1
        if settings.season is None:
            likely = self._table.times.step.seasons()
            found = (find_season(self._table.columns[name][:first], likely) for name in targets)
            season = next((rows for rows in found if rows > 1), 1)
        horizon = settings.horizon or min(season if season > 1 else 12, 48, middle, last)
        # Two seasons show what a season is; of long ones the LSTM sees one, for the sake of time.
        usual = max(2 * season, 24) if season <= 100 else max(season, 200)
        window = settings.window or max(1, min(usual, (first - horizon) // 2))
        if settings.season is None and first < season + horizon + _FEWEST_WINDOWS - 1:
            season = 1  # there would be nothing to train on
        return season, window, horizon

    def _scaling(self, names: Sequence[str], targets: Sequence[str], values: Array) -> tuple[Array, Array]:
        center, deviation = values.mean(axis=0), values.std(axis=0)
        constant = deviation <= np.maximum(1e-12 * np.abs(center), 1e-100)
        for name, is_constant in zip(names, constant, strict=True):
            if is_constant and name in targets:
                self._notes.append(f"The target {name!r} is constant in the training part: there is nothing to learn.")
            elif is_constant:
                self._notes.append(f"Column {name!r} is constant in the training part and does not count.")
        return center, np.where(constant, 0.0, 1.0 / np.where(constant, 1.0, deviation))

    def _choose_reference(self) -> str:
        """The simple forecast with the smallest error on the validation part, unless one is asked for."""
        wanted, windows = self.settings.reference, self._windows
        if wanted == "season" and windows.season < 2:
            raise InputError("--reference season needs a season: none was found, and --season was not given above 1")
        if wanted != "auto":
            return wanted
        origins = _spread(self._origins[1], _MOST_VALIDATED)
        said = {"last": windows.last(origins)}
        if windows.season > 1:
            said["season"] = windows.seasonal(origins)
        said["linear"] = self._linear.forecast(windows, origins)
        return min(said, key=lambda name: _relative_error(said[name], windows, origins))

    # ---- training ----------------------------------------------------------------------------------------------------

    def step(self) -> tuple[float, int]:
        epoch, place = divmod(self.optimizer.steps, self._batches)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.settings.seed, epoch]).permutation(self._origins[0])
        origins = self._order[1][place * self._batch : (place + 1) * self._batch]
        wanted = self._forecaster.outputs(self._windows, origins)
        y = self.model.forward(self._windows.inputs(origins))
        error = float((np.abs(y - wanted) * self._weights).mean())
        self._loss.forward(y, wanted)
        self.model.backward(self._loss.backward())
        self.optimizer.step()
        return error, len(origins)

    def validate(self) -> float:
        origins = _spread(self._origins[1], _MOST_VALIDATED)
        said = self._forecaster.forecast(self._windows, origins)
        self.model.low[...], self.model.high[...] = _band(self._windows.truth(origins) - said)
        return _relative_error(said, self._windows, origins)

    def source(self) -> dict[str, Any]:
        return {"rows": self._table.rows, "columns": list(self._table.columns), "sha256": self._table.digest}

    def description(self) -> dict[str, Any]:
        return {"plan": dataclasses.asdict(self._plan)}

    # ---- words -------------------------------------------------------------------------------------------------------

    def overview(self) -> list[tuple[str, str]]:
        table, plan, times = self._table, self._plan, self._table.times
        first, middle, last = self._parts
        targets = set(plan.targets)
        inputs = [name for name in plan.columns if name not in targets]
        season = "none" if plan.season == 1 else f"{plan.season} rows"
        if self.settings.season is None:
            season += " found" if plan.season == 1 else " (found in the training part)"
        by_validation = ", the best on the validation part" if self.settings.reference == "auto" else ""
        cut = ""
        if plan.reference == "linear" and plan.lags < plan.window:
            cut = f" (of the last {plan.lags} rows)"
        return [
            (
                "data",
                f"{table.name}: {table.rows:,} rows, from {times.label(0)} to {times.label(-1)}, step {times.step}",
            ),
            ("target", ", ".join(plan.targets) + ("" if self.settings.target else " (the last column)")),
            ("inputs", "the target" + ("s" if len(plan.targets) > 1 else "") + "".join(f", {name}" for name in inputs)),
            ("season", season),
            ("forecast", f"{counted(plan.horizon, 'row')} from a window of {plan.window}"),
            (
                "parts",
                f"training {first:,} rows, validation {middle:,} from {times.label(first)}, "
                f"test {last:,} from {times.label(first + middle)}",
            ),
            ("corrects", f"the {_NAMES[plan.reference]} forecast{cut}{by_validation}"),
            (
                "model",
                f"batch norm, LSTM of {self.settings.layers} x {self.settings.hidden}, linear: "
                f"{self.model.num_parameters:,} parameters",
            ),
            ("steps", f"{self.steps:,}, each of {self._batch} windows out of {len(self._origins[0]):,}"),
            *(("note", note) for note in self._notes),
        ]

    def _score(self) -> _Scores:
        windows, origins = self._windows, _spread(self._origins[2], _MOST_TESTED)
        said = {"model": self._forecaster.forecast(windows, origins)}
        for key in self._plan.simple():
            said[_NAMES[key]] = self._forecaster.simple(key, windows, origins)
        return _Scores(origins, windows.truth(origins), said)

    def _judge(self, scores: _Scores) -> Verdict:
        errors = {name: scores.overall(name) for name in scores.said}
        best = min((name for name in errors if name != "model"), key=lambda name: errors[name])
        return Verdict(errors, len(scores.origins), _is_clear(scores, best), len(self._plan.targets))

    def verdict(self) -> dict[str, Any]:
        return dataclasses.asdict(self._judge(self._score()))

    def headline(self) -> list[Block]:
        """By how much the model beats the best of the baselines, or loses to it."""
        return [Prose(str(self._judge(self._score())))]

    def results(self) -> list[Section]:
        scores, plan = self._score(), self._plan
        times, origins = self._table.times, scores.origins
        first, last = times.label(int(origins[0]) + 1), times.label(int(origins[-1]) + plan.horizon)
        seasonal = f", the seasonal one the values {plan.season} rows before" if plan.season > 1 else ""
        what = (
            f"{counted(len(origins), 'forecast')} of {counted(plan.horizon, 'row')} each, from {first} to {last}: rows "
            "that neither training nor validation saw. MAE is the mean absolute error over all horizons, RMSE the root "
            "of the mean squared one, in the units of the target. The naive forecast repeats the last value"
            f"{seasonal}; the linear one is ridge regression from the window. During training errors are told in units "
            "of the naive forecast's: below 1 is better than repeating the last value."
        )
        blocks: list[Block] = [Prose(what)]
        for at, name in enumerate(plan.targets):
            blocks.append(_score_table(scores, at, name if len(plan.targets) > 1 else ""))
        inside = (scores.said["model"] + self.model.low <= scores.truth) & (
            scores.truth <= scores.said["model"] + self.model.high
        )
        blocks.append(
            Prose(
                f"The band around the model's forecasts is made of its errors on the validation part, to hold 80 % of "
                f"what comes. On held-out time it held {100 * inside.mean():.0f} %."
            )
        )
        by_horizon, held_out, ahead = [], [], []
        following = forecast(dataclasses.replace(self._forecaster, verdict=self._judge(scores)), self._table)
        for at, name in enumerate(plan.targets[:_MOST_CHARTS]):
            by_horizon.append(_horizon_chart(scores, at, name))
            held_out.append(self._held_out_chart(scores, at, name))
            ahead.append(following.chart(name))
        sections = [Section("Held-out time", [*blocks, *held_out]), Section("Beyond the data", ahead)]
        if plan.horizon > 1:
            sections.insert(1, Section("Error by horizon", by_horizon))
        if len(plan.targets) > _MOST_CHARTS:
            sections[-1] = Section("Beyond the data", [*ahead, Prose(f"The first {_MOST_CHARTS} targets are drawn.")])
        return sections

    def _held_out_chart(self, scores: _Scores, at: int, name: str) -> Chart:
        """Forecasts that follow each other without a gap, to the end of the data, over what came."""
        plan, times = self._plan, self._table.times
        count = max(1, min(len(self._origins[2]) // plan.horizon + 1, 240 // plan.horizon))
        lowest = int(self._origins[2][0])
        origins = self._origins[2][-1] - plan.horizon * np.arange(count)[::-1]
        origins = origins[origins >= lowest]
        said = self._forecaster.forecast(self._windows, origins)[:, :, at]
        rows = np.arange(origins[0] + 1, origins[-1] + plan.horizon + 1)
        labels = [times.label(int(row)) for row in rows]
        ticks = [(place + float(rows[0]), label) for place, label in _ticks(labels)]
        low, high = (said + width[:, at] for width in (self.model.low, self.model.high))
        return Chart(
            f"{name}: forecasts of held-out time, each of {counted(plan.horizon, 'row')}",
            times.column,
            name,
            [Line("truth", rows, self._windows.targets[rows, at]), Line("model", rows, said.ravel())],
            [Band("80 % band", rows, low.ravel(), high.ravel(), line=1)],
            x_ticks=ticks,
        )


def _targets(text: str | None, table: Table) -> tuple[str, ...]:
    names = table.columns
    if text is None:
        return (next(reversed(names)),)
    wanted = [text] if text in names else [name.strip() for name in text.split(",")]
    seen = set[str]()
    for name in wanted:
        if name == table.times.column and name not in names:
            raise InputError(f"--target: column {name!r} of {table.name} says when, and cannot be forecast")
        if name not in names:
            raise InputError(f"--target: {table.name} has no column of numbers {name!r}; it has {_listed(names)}")
        if name in seen:
            raise InputError(f"--target: {name!r} is there twice")
        seen.add(name)
    return tuple(wanted)


def _is_clear(scores: _Scores, best: str) -> bool:
    """Whether the model's lead is more than 1.64 of its standard errors: one in twenty would be so by chance.

    Forecasts whose times overlap are not independent, so the differences are averaged over blocks of a horizon.
    """
    naive = _not_zero(scores.errors("naive").mean(axis=(0, 1)))
    lead = ((scores.errors(best) - scores.errors("model")) / naive).mean(axis=(1, 2))
    horizon = scores.truth.shape[1]
    blocks = len(lead) // horizon
    if blocks < 4:
        return False
    means = lead[: blocks * horizon].reshape(blocks, horizon).mean(axis=1)
    return bool(means.mean() > 1.64 * means.std(ddof=1) / math.sqrt(blocks))


def _score_table(scores: _Scores, at: int, title: str) -> report.Table:
    naive = float(scores.errors("naive")[:, :, at].mean())
    rows, sizes = [], []
    for name in scores.said:
        errors = scores.errors(name)[:, :, at]
        size = float(errors.mean())
        sizes.append(size)
        compared = f"{size / naive:.3f}" if naive else "-"
        rows.append([name, f"{size:.4g}", f"{math.sqrt(float((errors**2).mean())):.4g}", compared])
    heads = [f"forecast of {title}" if title else "forecast", "MAE", "RMSE", "MAE / naive"]
    return report.Table(heads, rows, highlight=sizes.index(min(sizes)))


def _horizon_chart(scores: _Scores, at: int, name: str) -> Chart:
    horizon = range(1, scores.truth.shape[1] + 1)
    lines = [
        Line(who, horizon, scores.errors(who)[:, :, at].mean(axis=0), "solid" if who == "model" else "dashed")
        for who in scores.said
    ]
    return Chart(f"{name}: mean absolute error by horizon", "rows ahead", "MAE", lines)


def _listed(names: Mapping[str, Any] | Sequence[str]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")


def _named(what: str, names: Sequence[str]) -> str:
    return f"{what} {_listed(names)}" if len(names) == 1 else f"{what}s {_listed(names)}"
