"""A trained forecasting model: its file, and forecasts with it."""

from __future__ import annotations

import csv
import functools
import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

import retrograd as rg

from .. import nn
from ..nn.program import Programs
from .baselines import FORECASTS, LinearFit, naive, seasonal_naive
from .chart import Band, Chart, Line
from .contest import CHOSEN, LEARNED, METHODS, by_library
from .files import check_room, load_weights, opened_model
from .scores import NAMES, Choice, Verdict
from .settings import InputError, Settings, option
from .table import Table
from .task import Array
from .windows import Windows, chunks
from .words import listed, named

__all__ = ["USES", "Forecast", "Forecaster", "Plan", "SeriesModel", "SeriesSettings", "forecast", "load_series_model"]

KIND: Final = "series"

#: The values of --use: the methods that were compared.
USES: Final = (*LEARNED, *METHODS)


@dataclass(frozen=True)
class SeriesSettings(Settings):
    """Settings of a forecasting model."""

    target: str | None = option(
        None,
        "column to forecast, or several separated by commas (default: the last numeric column)",
        metavar="NAMES",
    )
    window: int | None = option(None, "input rows of a forecast (default: two seasons, at least 24)", minimum=1)
    horizon: int | None = option(None, "rows to forecast (default: one season, or 12; at most 48)", minimum=1)
    season: int | None = option(None, "rows per season, 1 for none (default: detected in the training part)", minimum=1)
    reference: str = option(
        "auto",
        "the baseline that the model corrects: the last value, the value one season earlier, ridge regression from "
        "the window, or (auto) the best of these on the validation part",
        choices=("auto", "last", "season", "linear"),
    )
    inputs: str = option(
        "auto",
        "what the network reads: scaled columns, their differences from the last row of the window, or (auto) what is "
        "better for ridge regression on the validation part",
        choices=("auto", "scaled", "differenced"),
    )
    gaps: str = option("refuse", "how to handle missing values", choices=("refuse", "interpolate"))
    decimal: str = option(
        "auto", "decimal mark of the numbers, where it is not clear", choices=("auto", "point", "comma")
    )
    time: str | None = option(None, "column of dates (default: detected)", metavar="NAME")
    hidden: int = option(64, "hidden size of the LSTM", minimum=1, maximum=65536)
    layers: int = option(1, "LSTM layers", minimum=1, maximum=64)
    dropout: float = option(0.0, "dropout rate between layers and after the LSTM", minimum=0, maximum=0.99)
    batch: int = option(32, "batch size: windows per step", minimum=1)
    steps: int | None = option(None, "training steps (default: 200 to 1500, by rows and window)", minimum=1)
    loss: str = option("huber", "training loss", choices=("huber", "mse"))
    validation: float = option(0.15, "share of the rows used for validation", minimum=0.01, maximum=0.45)
    test: float = option(0.15, "share of the rows, the last ones, used as the test set", minimum=0.01, maximum=0.45)

    EARLIER: ClassVar[dict[str, Any]] = {**Settings.EARLIER, "inputs": "scaled", "decimal": "auto", "time": None}

    def least_weights(self) -> int:
        return 4 * self.hidden * (1 + (2 * self.layers - 1) * self.hidden)


@dataclass(frozen=True)
class Plan:
    """The columns, targets and sizes of a forecast. Saved with the model."""

    columns: tuple[str, ...]
    targets: tuple[str, ...]  # some of the columns
    window: int
    horizon: int
    season: int  # rows; 1: none
    reference: str  # "last", "season" or "linear"
    lags: int  # input rows of the linear baseline; 0 if it was not saved
    step: str  # time from row to row, as text
    baselines: bool = False  # whether all baselines were saved; earlier releases did not save them
    inputs: str = "scaled"  # or "differenced"

    @property
    def history(self) -> int:
        """The number of rows that a forecast needs: the window, or a season if that is longer."""
        return max(self.window, self.season)

    def baseline_keys(self) -> list[str]:
        """Return the available baselines, by their keys in `FORECASTS`."""
        return [key for key in FORECASTS if key != "season" or self.season > 1]

    def baseline_names(self) -> list[str]:
        return [FORECASTS[key] for key in self.baseline_keys()]

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
            and plan.reference in FORECASTS
            and plan.inputs in ("scaled", "differenced")
        ):
            raise ValueError(f"its plan is {plan}")
        return plan


class SeriesModel(nn.Module):
    """From windows ``[T, N, columns]`` to ``[N, horizon * targets]``: batch norm, LSTM, linear from the final state.

    The outputs are differences from a reference forecast. The linear layer starts as 0, so that an untrained model
    forecasts exactly the reference. Buffers hold values from the training part: `center` and `factor` of each column,
    `unit` of each target, `slope` and `start` of the linear baseline. From the validation part they hold the prediction
    interval of the model, `low` and `high`, and with `baselines` the forecasts of the baselines.
    """

    center: nn.Buffer
    factor: nn.Buffer
    unit: nn.Buffer
    slope: nn.Buffer
    start: nn.Buffer
    low: nn.Buffer
    high: nn.Buffer
    baseline_low: nn.Buffer
    baseline_high: nn.Buffer

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
        # Columns are already scaled, so the running statistics start close to the true ones and can change slowly.
        self.norm = nn.BatchNorm(columns, channel_axis=-1, update=rg.RunningUpdate.keras(0.99), dtype=dtype)
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(columns, hidden, layers=layers, dropout=between, dtype=dtype, rng=rng)
        self.dropout = nn.Dropout(dropout, rng=rng)
        self.head = nn.Linear(hidden, horizon * targets, dtype=dtype, rng=rng)
        self.head.w[...] = 0
        self.head.b[...] = 0
        self.center = nn.Buffer(np.zeros(columns))
        self.factor = nn.Buffer(np.ones(columns))
        self.unit = nn.Buffer(np.ones(targets))
        self.slope = nn.Buffer(np.zeros((horizon * targets, lags * columns)))
        self.start = nn.Buffer(np.zeros(horizon * targets))
        self.low = nn.Buffer(np.zeros((horizon, targets)))
        self.high = nn.Buffer(np.zeros((horizon, targets)))
        if baselines:
            self.baseline_low = nn.Buffer(np.zeros((baselines, horizon, targets)))
            self.baseline_high = nn.Buffer(np.zeros((baselines, horizon, targets)))

    @classmethod
    def of(cls, plan: Plan, settings: SeriesSettings) -> SeriesModel:
        return cls(
            len(plan.columns),
            plan.horizon,
            len(plan.targets),
            lags=plan.lags,
            baselines=len(plan.baseline_keys()) if plan.baselines else 0,
            hidden=settings.hidden,
            layers=settings.layers,
            dropout=settings.dropout,
            rng=settings.seed,
        )

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        _, state = self.lstm.run(self.norm(x))
        y: nn.Tensor = self.head(self.dropout(state.h[-1]))
        return y


# ---- the trained model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecaster:
    """A model with everything needed to forecast."""

    model: SeriesModel
    plan: Plan
    settings: SeriesSettings
    verdict: Verdict | None = None  # None before the run has ended, and for models of earlier releases

    @functools.cached_property
    def _predict(self) -> Programs:
        return Programs(self.model, [self.model], training=False, num_threads=self.settings.threads)

    def windows(self, columns: Mapping[str, Array]) -> Windows:
        plan, model = self.plan, self.model
        return Windows(
            columns,
            plan.columns,
            plan.targets,
            window=plan.window,
            horizon=plan.horizon,
            season=plan.season,
            center=model.center.value,
            factor=model.factor.value,
            differenced=plan.inputs == "differenced",
        )

    def baseline(self, key: str, windows: Windows, origins: Array) -> Array:
        """Return the forecast of a baseline, by its key in `FORECASTS`, ``[N, horizon, targets]``."""
        if key == "linear":
            slope, start = self.model.slope.value, self.model.start.value
            return LinearFit(slope, start, 0.0, self.plan.lags).forecast(windows, origins)
        return (seasonal_naive if key == "season" else naive)(windows, origins)

    def reference(self, windows: Windows, origins: Array) -> Array:
        """Return the reference forecast, to which the model's outputs are added, ``[N, horizon, targets]``."""
        return self.baseline(self.plan.reference, windows, origins)

    def by(self, key: str, name: str, table: Table, windows: Windows) -> Array:
        """Return the forecast of a target after the end of a table by a method, by its key in `USES`, ``[horizon]``."""
        plan, origin = self.plan, np.array([len(windows.targets) - 1])
        if key in LEARNED:
            predicted = self.forecast(windows, origin) if key == "network" else self.baseline("linear", windows, origin)
            found: Array = predicted[0, :, plan.targets.index(name)]
            return found
        return by_library(key, table.columns[name], plan.season, plan.horizon)

    def choose(self, name: str, use: str | None) -> tuple[dict[str, float], Array, Array]:
        """Return the weights of the methods for a target, and the band around the forecast: low and high."""
        at = self.plan.targets.index(name)
        if self.verdict is None:
            if use not in (None, "network"):
                raise InputError(
                    f"--use {use}: the model was saved by an earlier release; train it again with this one"
                )
            return {"network": 1.0}, self.model.low.value[:, at], self.model.high.value[:, at]
        choice = self.verdict.targets[name]
        if use is not None and use not in choice.bands:
            why = "has no season (--season)" if self.plan.season < METHODS[use].seasons[0] else "was not compared"
            raise InputError(f"--use {use}: {NAMES[use]} cannot be used: the model {why}")
        width = np.array(choice.bands[use or CHOSEN])
        return choice.weights if use is None else {use: 1.0}, -width, width

    def outputs(self, windows: Windows, origins: Array) -> Array:
        """Return the targets of the training loss, ``[N, horizon * targets]``."""
        differences = (windows.truth(origins) - self.reference(windows, origins)) / self.model.unit.value
        return differences.reshape(len(origins), -1).astype(np.float32)

    def forecast(self, windows: Windows, origins: Array) -> Array:
        """Return the model's forecast, ``[N, horizon, targets]``, in the units of the targets."""
        outputs = np.concatenate([self._predict(windows.inputs(part)) for part in chunks(origins)])
        reference = self.reference(windows, origins)
        return reference + outputs.astype(np.float64).reshape(reference.shape) * self.model.unit.value


def load_series_model(path: str | os.PathLike[str]) -> Forecaster:
    """Load a model from a run directory or a model file."""
    with opened_model(path, KIND) as (file, metadata):
        plan = Plan.from_record(metadata["description"]["plan"])
        settings = SeriesSettings.from_record(metadata["settings"])
        inputs, outputs = len(plan.columns), plan.horizon * len(plan.targets)
        ends = 4 * settings.hidden * inputs + outputs * (settings.hidden + plan.lags * inputs)
        check_room(file, settings.least_weights() + ends)
        record = metadata.get("verdict")
        verdict = None
        # Verdicts of earlier releases have no weights.
        if record is not None and not (isinstance(record, dict) and "clear" in record):
            verdict = Verdict.from_record(record, plan.targets, plan.horizon)
        model = SeriesModel.of(plan, settings)
        load_weights(file, model)
    return Forecaster(model.eval(), plan, settings, verdict)


@dataclass(frozen=True)
class Forecast:
    """The rows that follow a table, with 80 % prediction bands."""

    by: dict[str, str]  # what forecasts each target: the methods and their weights
    verdict: Verdict | None
    time_column: str
    times: list[str]
    columns: dict[str, Array]  # by target, [horizon] each
    low: dict[str, Array]
    high: dict[str, Array]
    notes: tuple[str, ...]
    past_times: Array  # the last rows of the table, for the chart: datetime64, or numbers
    next_times: Array
    past: dict[str, Array]

    def csv_text(self) -> str:
        """Return a header, and a row for each time: the forecast and its band for each target."""
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
        """Return a chart of a target's last values and its forecast; by default of the first target."""
        name = next(iter(self.columns)) if target is None else target
        ahead = np.concatenate([self.past_times[-1:], self.next_times])
        values, low, high = (np.append(self.past[name][-1], part[name]) for part in (self.columns, self.low, self.high))
        return Chart(
            f"Forecast of {name}",
            self.time_column,
            name,
            [Line("past", self.past_times, self.past[name]), Line("forecast", ahead, values)],
            [Band("80 % band", ahead, low, high, line=1)],
        )


def forecast(forecaster: Forecaster, table: Table, use: str | None = None) -> Forecast:
    """Forecast the rows after the end of a table that has the columns of the training data.

    `use` is one of `USES`. None is what was chosen in training.
    """
    plan = forecaster.plan
    missing = [name for name in plan.columns if name not in table.columns]
    if missing:
        raise InputError(
            f"{table.name} has no {named('column', missing)} of numbers, but the model was trained with "
            f"{'it' if len(missing) == 1 else 'them'}; it has {listed(table.columns)}"
        )
    if table.rows < plan.history:
        raise InputError(f"{table.name} has {table.rows} rows, but the model needs the last {plan.history}")
    notes, used = list(table.notes), set(plan.columns)
    unused = [name for name in table.columns if name not in used]
    if unused:
        notes.append(f"The model does not use {named('column', unused)}.")
    if str(table.times.step) != plan.step:
        notes.append(f"The time step is {table.times.step}, but it was {plan.step} in training.")
    # The network reads only the last rows, so the others need not be scaled.
    shown = max(plan.history, 3 * plan.horizon)
    windows = forecaster.windows({name: table.columns[name][-shown:] for name in plan.columns})
    columns, lows, highs, by = {}, {}, {}, {}
    for name in plan.targets:
        weights, low, high = forecaster.choose(name, use)
        parts = {key: forecaster.by(key, name, table, windows) for key in weights}
        failed = [NAMES[key] for key, part in parts.items() if not np.isfinite(part).all()]
        if failed and len(failed) == len(parts):
            raise InputError(f"{table.name}: {', '.join(failed)} cannot forecast {name!r} from these {table.rows} rows")
        if failed:
            notes.append(f"{', '.join(failed)} cannot forecast {name!r} from these rows; the others are used.")
        good = {key: weights[key] for key, part in parts.items() if np.isfinite(part).all()}
        total = sum(good.values())
        columns[name] = np.asarray(sum(weight / total * parts[key] for key, weight in good.items()))
        lows[name], highs[name] = columns[name] + low, columns[name] + high
        by[name] = str(Choice({key: weight / total for key, weight in good.items()}, {}, {}, math.nan))
    rows = range(max(-table.rows, -3 * plan.horizon), 0)
    following = table.times.next(plan.horizon)
    return Forecast(
        by,
        forecaster.verdict,
        table.times.column,
        table.times.after(plan.horizon),
        columns,
        lows,
        highs,
        tuple(notes),
        table.times.values[rows.start :],
        np.asarray(following),
        {name: table.columns[name][rows.start :] for name in plan.targets},
    )
