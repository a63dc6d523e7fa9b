"""A forecasting model for a table of numbers: batch norm, LSTM, linear layer; compared with baselines."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

import retrograd as rg

from .. import graph, nn
from ..distributed import DataParallel, Group, Shard, synchronize
from ..nn.program import Programs
from .baselines import FORECASTS, LinearFit, fit_linear, naive, nonzero, relative_error, seasonal_naive
from .chart import Band, Chart, Line
from .contest import CHOSEN, LEARNED, METHODS, Rolling, by_library, jobs, rolling_origins
from .files import check_room, load_weights, opened_model
from .progress import Progress
from .report import Block, Prose, Section
from .scores import NAMES, Choice, Scores, Verdict, scale
from .season import find_season
from .settings import InputError, Settings, option
from .table import Table, read_table
from .task import Array, Outcome, Task, check_shards, new_optimizer, steps_between_validations
from .windows import Windows, chunks, spread
from .words import counted, listed, named

__all__ = [
    "USES",
    "Forecast",
    "Forecaster",
    "Plan",
    "SeriesModel",
    "SeriesSettings",
    "SeriesTask",
    "forecast",
    "load_series_model",
]

_MOST_VALIDATED: Final = 1_000  # windows
_MOST_TESTED: Final = 20_000
_MOST_CHARTS: Final = 4  # targets that get charts
_FEWEST_WINDOWS: Final = 4  # to train on
_BAND: Final = (0.1, 0.9)  # quantiles of the errors
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

    EARLIER: ClassVar = {**Settings.EARLIER, "inputs": "scaled", "decimal": "auto", "time": None}

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
                raise InputError(f"--use {use}: the model was saved by an earlier release; train it again with this one")
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
    with opened_model(path, SeriesTask.kind) as (file, metadata):
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


# ---- the task --------------------------------------------------------------------------------------------------------


class SeriesTask(Task):
    """Train a forecasting model on a CSV file. The rows are split by time: training, validation, test."""

    kind: ClassVar[str] = "series"
    items = "windows"
    settings: SeriesSettings
    model: SeriesModel

    def __init__(self, settings: SeriesSettings, file: str | os.PathLike[str], group: Group | None = None) -> None:
        self.settings, self.group = settings, group or self.group
        self.measure = "relative error"
        self._table = table = read_table(file, gaps=settings.gaps, decimal=settings.decimal, time=settings.time)
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
        self._validated = spread(self._origins[1], _MOST_VALIDATED)
        tried = []
        for inputs in ("scaled", "differenced") if settings.inputs == "auto" else (settings.inputs,):
            windows = Windows(
                table.columns,
                names,
                targets,
                window=window,
                horizon=horizon,
                season=season,
                center=center,
                factor=factor,
                differenced=inputs == "differenced",
            )
            fit = fit_linear(windows, self._origins[0], self._validated)
            error = relative_error(fit.forecast(windows, self._validated), windows, self._validated)
            tried.append((error, len(tried), inputs, windows, fit))
        _, _, inputs, windows, self._linear = min(tried, key=lambda one: one[:2])
        self._windows = windows
        reference = self._choose_reference()
        step, lags = str(table.times.step), self._linear.lags
        self._plan = Plan(names, targets, window, horizon, season, reference, lags, step, True, inputs)
        self.model = model = SeriesModel.of(self._plan, settings)
        self._forecaster = Forecaster(model, self._plan, settings)
        model.center[...], model.factor[...] = center, factor
        model.slope[...], model.start[...] = self._linear.slope, self._linear.start
        for at, key in enumerate(self._plan.baseline_keys()):
            predicted = self._forecaster.baseline(key, windows, self._validated)
            model.baseline_low[at], model.baseline_high[at] = _band(windows.truth(self._validated) - predicted)
        # The unit of outputs is the reference's error, but not so small that float32 would lose the outputs.
        origins = spread(self._origins[0], _MOST_TESTED)
        truth = windows.truth(origins)
        reference_error, naive_error = (
            np.abs(truth - predicted).mean(axis=(0, 1))
            for predicted in (self._forecaster.reference(windows, origins), naive(windows, origins))
        )
        model.unit[...] = nonzero(np.maximum(reference_error, 1e-6 * naive_error))
        self._weights = np.tile(model.unit.value / nonzero(naive_error), horizon).astype(np.float32)

        count = len(self._origins[0])
        self._batch = min(settings.batch, count)
        self._batches = count // self._batch  # per epoch; the remaining windows are skipped until the next shuffle
        self._order: tuple[int, Array] | None = None
        self.steps = settings.steps or max(200, min(1500, 100 * self._batches, 100_000 // window))
        self.validate_every = steps_between_validations(settings, self.steps)
        check_shards(self.group, self._batch, "a batch of")
        if self.group.shards > 1:
            synchronize(model, self.group)
        self.optimizer = new_optimizer(model, settings, self.steps)

    # ---- the data ----------------------------------------------------------------------------------------------------

    def _part(self) -> tuple[int, int, int]:
        """Return the rows of the training, validation and test parts; the last two have room for a forecast."""
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
        """Return season, window and horizon; those that are not given are derived from the training part."""
        settings, (first, middle, last) = self.settings, self._parts
        season = settings.season or 1
        if settings.season is None:
            likely = self._table.times.step.seasons()
            found = (find_season(self._table.columns[name][:first], likely) for name in targets)
            season = next((rows for rows in found if rows > 1), 1)
        horizon = settings.horizon or min(season if season > 1 else 12, 48, middle, last)
        # Two seasons show how they repeat. Of a long season the LSTM reads only one, to save time.
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
                self._notes.append(f"Column {name!r} is constant in the training part and has no effect.")
        return center, np.where(constant, 0.0, 1.0 / np.where(constant, 1.0, deviation))

    def _choose_reference(self) -> str:
        """Return the baseline with the smallest error on the validation part, unless the settings name one."""
        wanted, windows = self.settings.reference, self._windows
        if wanted == "season" and windows.season < 2:
            raise InputError("--reference season needs a season: none was detected, and --season is not above 1")
        if wanted != "auto":
            return wanted
        origins = self._validated
        predicted = {"last": naive(windows, origins)}
        if windows.season > 1:
            predicted["season"] = seasonal_naive(windows, origins)
        predicted["linear"] = self._linear.forecast(windows, origins)
        return min(predicted, key=lambda key: relative_error(predicted[key], windows, origins))

    # ---- training ----------------------------------------------------------------------------------------------------

    def step(self) -> tuple[float, int]:
        epoch, batch = divmod(self.optimizer.steps, self._batches)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.settings.seed, epoch]).permutation(self._origins[0])
        origins = self._order[1][batch * self._batch : (batch + 1) * self._batch]
        return self._learn(self.parallel, self.group, origins), len(origins)

    def _learn(self, parallel: DataParallel[SeriesModel], group: Group, origins: Array) -> float:
        """Take a step on the windows of these origins. Return the error relative to the naive forecast's."""
        own = origins[group.rank_part(len(origins))]
        x, outputs = self._windows.inputs(own), self._forecaster.outputs(self._windows, own)

        def work(shard: Shard[SeriesModel]) -> float:
            here, share = shard.part_of_rank(len(origins)), shard.share(len(origins))
            _, metrics = shard.step(np.ascontiguousarray(x[:, here]), outputs[here], share=share)
            error: float = metrics["error"]
            return share * error

        return sum(parallel.run(work))

    def _new_parallel(self) -> DataParallel[SeriesModel]:
        return self._parallel_of(self.model, self.group, self.optimizer)

    def _parallel_of(self, model: SeriesModel, group: Group, optimizer: nn.Optimizer) -> DataParallel[SeriesModel]:
        loss = nn.MeanSquaredError() if self.settings.loss == "mse" else nn.Huber()
        metrics = {"error": self._error}
        return DataParallel(model, group, loss, optimizer, metrics=metrics, num_threads=self.settings.threads)

    def _error(self, y: nn.Tensor, wanted: nn.Tensor) -> nn.Tensor:
        """The error of a batch relative to the naive forecast's."""
        return graph.mean(graph.abs(y - wanted) * self._weights)

    def validate(self) -> float:
        predicted = self._forecaster.forecast(self._windows, self._validated)
        self.model.low[...], self.model.high[...] = _band(self._windows.truth(self._validated) - predicted)
        return relative_error(predicted, self._windows, self._validated)

    def source(self) -> dict[str, Any]:
        return {"rows": self._table.rows, "columns": list(self._table.columns), "sha256": self._table.digest}

    def description(self) -> dict[str, Any]:
        return {"plan": dataclasses.asdict(self._plan)}

    # ---- results -----------------------------------------------------------------------------------------------------

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
            ("corrects", f"the {FORECASTS[plan.reference]} forecast{cut}{by_validation}"),
            (
                "model",
                f"batch norm, LSTM of {self.settings.layers} x {self.settings.hidden}, linear: "
                f"{self.model.num_parameters:,} parameters",
            ),
            ("steps", f"{self.steps:,}, each of {self._batch} windows out of {len(self._origins[0]):,}"),
            *(("note", note) for note in self._notes),
        ]

    def outcome(self) -> Outcome:
        rollings = self._compare()
        first, middle, _ = self._parts
        start, plan = first + middle, self._plan
        choices, scores = {}, {}
        for name, rolling in rollings.items():
            values, tested = self._table.columns[name], rolling.origins >= start
            chosen = rolling.chosen()
            bands = {CHOSEN: rolling.band(chosen, self._table.rows)}
            predicted = {CHOSEN: chosen[tested]}
            for key in USES:
                if key in rolling.predicted and np.isfinite(rolling.predicted[key][tested]).all():
                    predicted[key] = rolling.predicted[key][tested]
                    bands[key] = rolling.band(rolling.predicted[key], self._table.rows)
            scores[name] = Scores(rolling.truth[tested], predicted, scale(values[:start], plan.season))
            inside = [
                np.abs(chosen[at] - rolling.truth[at]) <= rolling.band(chosen, int(rolling.origins[at]))
                for at in np.flatnonzero(tested)
            ]
            choices[name] = Choice(
                rolling.weights(self._table.rows),
                {key: scores[name].mase(key) for key in predicted},
                {key: [float(width) for width in widths] for key, widths in bands.items()},
                float(np.mean(inside)),
            )
        verdict = Verdict(choices, len(next(iter(scores.values())).truth))
        self._refit({key for choice in choices.values() for key in choice.weights})
        following = forecast(dataclasses.replace(self._forecaster, verdict=verdict), self._table)
        charts = [following.chart(name) for name in plan.targets[:_MOST_CHARTS]]
        headline: list[Block] = [Prose(str(verdict)), *charts]
        return Outcome(headline, self._sections(rollings, scores, verdict), verdict.record())

    def _compare(self) -> dict[str, Rolling]:
        """Return the forecasts of all methods from rolling origins, by target."""
        plan, table = self._plan, self._table
        first, middle, last = self._parts
        origins = np.array(rolling_origins(table.rows, plan.horizon, plan.season, middle, last))
        if not len(origins):
            origins = np.array([table.rows - plan.horizon])
        # The network has seen the rows of the training part.
        heard = (origins >= first) & (origins >= plan.history)
        learned = {}
        if heard.any():
            at = origins[heard] - 1
            learned["linear"] = self._forecaster.baseline("linear", self._windows, at)
            learned["network"] = self._forecaster.forecast(self._windows, at)
            # A network that has learned nothing is what it corrects, which is compared anyway.
            if np.array_equal(learned["network"], self._forecaster.reference(self._windows, at)):
                del learned["network"]
        work = list(jobs(origins.tolist(), plan.season))
        found, done = {}, 0
        with Progress() as progress:
            progress.begin(0, len(work) * len(plan.targets))
            for index, name in enumerate(plan.targets):
                values = table.columns[name]
                truth = values[origins[:, None] + np.arange(plan.horizon)]
                found[name] = rolling = Rolling(origins, truth)
                for key, predicted in learned.items():
                    rolling.predicted[key] = np.full(truth.shape, np.nan)
                    rolling.predicted[key][heard] = predicted[:, :, index]
                for key, origin in work:
                    rows = rolling.predicted.setdefault(key, np.full(truth.shape, np.nan))
                    rows[origins == origin] = by_library(key, values[:origin], plan.season, plan.horizon)
                    done += 1
                    progress.step(done, [NAMES[key], name])
        return found

    def _refit(self, used: set[str]) -> None:
        """Fit to all rows what is learned and in use: the linear baseline, the network for as many steps as were best.

        With a time limit there is no second training.
        """
        settings, plan = self.settings, self._plan
        if not used & set(LEARNED):
            return
        if settings.time_limit is not None:
            self._notes.append("With --time-limit the network is not trained again on all rows.")
            return
        origins = np.arange(plan.history - 1, self._table.rows - plan.horizon)
        if "linear" in used or plan.reference == "linear":
            fit = fit_linear(self._windows, origins, self._validated)
            self.model.slope[...], self.model.start[...] = fit.slope, fit.start
        if self.best_step == 0 or not ("network" in used or plan.reference == "linear"):
            return
        model = SeriesModel.of(plan, settings)
        for name, value in self.model.buffers().items():
            if not name.startswith(("norm.", "lstm.", "dropout.")):
                model.buffers()[name].value[...] = value.value
        optimizer = new_optimizer(model, settings, self.steps)
        group = Group(self.group.shards)  # of this process alone, with the same bits
        parallel = self._parallel_of(model, group, optimizer)
        windows = max(1, len(origins) // self._batch)
        with Progress() as progress:
            progress.begin(0, self.best_step)
            for step in range(self.best_step):
                epoch, batch = divmod(step, windows)
                if batch == 0:
                    order = np.random.default_rng([settings.seed, epoch]).permutation(origins)
                own = order[batch * self._batch : (batch + 1) * self._batch]
                self._learn(parallel, group, own)
                progress.step(step + 1, ["the network again, on all rows"])
        self.model.load_state_dict(model.state_dict())

    def _sections(self, rollings: dict[str, Rolling], scores: dict[str, Scores], verdict: Verdict) -> list[Section]:
        plan, times = self._plan, self._table.times
        rolling = next(iter(rollings.values()))
        tested = rolling.origins[rolling.origins >= sum(self._parts[:2])]
        first, last = times.label(int(tested[0])), times.label(int(tested[-1]) + plan.horizon - 1)
        what = (
            f"{counted(len(tested), 'forecast')} of {counted(plan.horizon, 'row')} each, from {first} to {last}: rows "
            "that were not used for training. The methods of statsforecast are fitted to all rows before each forecast; "
            "the network and the linear baseline (ridge regression from the window) only to the training part. What is "
            "chosen weighs them by their errors in the forecasts before it. MAE is the mean absolute error, RMSE the "
            "root mean squared error, in the units of the target; MASE is MAE relative to the mean difference "
            f"{'from row to row' if plan.season == 1 else f'to the value {plan.season} rows earlier'} before the test."
        )
        blocks: list[Block] = [Prose(what)]
        for name in plan.targets:
            blocks.append(scores[name].table(f"forecast of {name}" if len(plan.targets) > 1 else "forecast"))
        inside = np.nanmean([choice.inside for choice in verdict.targets.values()])
        blocks.append(
            Prose(
                "The 80 % band has for each step its own width, from the errors of earlier forecasts. In the test set "
                f"the bands held {100 * inside:.0f} % of the values."
            )
        )
        if len(plan.targets) > 1:
            blocks.append(Prose("\n\n".join(f"{name}: {choice}." for name, choice in verdict.targets.items())))
        if len(plan.targets) > _MOST_CHARTS:
            blocks.append(Prose(f"Charts show the first {_MOST_CHARTS} targets only."))
        shown = plan.targets[:_MOST_CHARTS]
        sections = [Section("Test set", [*blocks, *(self._held_out_chart(name, rollings[name]) for name in shown)])]
        if plan.horizon > 1:
            sections.append(Section("Error by horizon", [scores[name].horizon_chart(name) for name in shown]))
        return sections

    def _held_out_chart(self, name: str, rolling: Rolling) -> Chart:
        """Return a chart of the last forecasts in the test set that do not overlap, and the true values."""
        plan, times = self._plan, self._table.times
        chosen, start = rolling.chosen(), sum(self._parts[:2])
        picked: list[int] = []
        for at in range(len(rolling.origins) - 1, -1, -1):
            origin = int(rolling.origins[at])
            if origin >= start and (not picked or origin + plan.horizon <= rolling.origins[picked[-1]]):
                picked.append(at)
        picked.reverse()
        rows = np.concatenate([rolling.origins[at] + np.arange(plan.horizon) for at in picked])
        widths = np.concatenate([rolling.band(chosen, int(rolling.origins[at])) for at in picked])
        predicted = np.concatenate([chosen[at] for at in picked])
        every = np.arange(rows[0], rows[-1] + 1)
        gaps = np.full(len(every), np.nan)  # between forecasts that do not touch
        shown, low, high = gaps.copy(), gaps.copy(), gaps.copy()
        at = rows - rows[0]
        shown[at], low[at], high[at] = predicted, predicted - widths, predicted + widths
        return Chart(
            f"{name}: forecasts of the test set, {counted(plan.horizon, 'row')} each",
            times.column,
            name,
            [Line("true values", times.values[every], self._table.columns[name][every]),
             Line("forecast", times.values[every], shown)],
            [Band("80 % band", times.values[every], low, high, line=1)],
        )


def _band(errors: Array) -> tuple[Array, Array]:
    """Return the offsets of an 80 % prediction interval, from errors ``[N, horizon, targets]``."""
    # With few errors there are no reliable quantiles per horizon, so all horizons share them.
    low, high = np.quantile(errors, _BAND, axis=(0, 1) if len(errors) < 20 else 0)
    return np.minimum(low, 0), np.maximum(high, 0)


def _targets(text: str | None, table: Table) -> tuple[str, ...]:
    names = table.columns
    if text is None:
        return (next(reversed(names)),)
    wanted = [text] if text in names else [name.strip() for name in text.split(",")]
    seen = set[str]()
    for name in wanted:
        if name == table.times.column and name not in names:
            raise InputError(f"--target: column {name!r} of {table.name} is the time column, and cannot be forecast")
        if name not in names:
            raise InputError(f"--target: {table.name} has no column of numbers {name!r}; it has {listed(names)}")
        if name in seen:
            raise InputError(f"--target: {name!r} is given twice")
        seen.add(name)
    return tuple(wanted)
