"""A forecasting model for a table of numbers: batch norm, LSTM, linear layer; it competes with other methods."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np

from .. import graph, nn
from ..distributed import DataParallel, Group, Shard, synchronize
from .baselines import FORECASTS, LinearFit, fit_linear, naive, nonzero, relative_error, seasonal_naive
from .chart import Band, Chart, Line
from .contest import CHOSEN, LEARNED, Rolling, by_library, jobs, rolling_origins
from .forecaster import KIND, USES, Forecast, Forecaster, Plan, SeriesModel, SeriesSettings, forecast, load_series_model
from .progress import Progress
from .report import Block, Prose, Section
from .scores import NAMES, Choice, Scores, Verdict, scale
from .season import find_season
from .settings import InputError
from .table import Table, read_table
from .task import Array, Outcome, Task, check_shards, new_optimizer, steps_between_validations
from .windows import Windows, spread
from .words import counted, listed

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

# ---- the task --------------------------------------------------------------------------------------------------------


class SeriesTask(Task):
    """Train a forecasting model on a CSV file. The rows are split by time: training, validation, test."""

    kind: ClassVar[str] = KIND
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
        tried: list[tuple[float, int, str, Windows, LinearFit]] = []
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
            "that were not used for training. The methods of statsforecast are fitted to all rows before a forecast, "
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
            [
                Line("true values", times.values[every], self._table.columns[name][every]),
                Line("forecast", times.values[every], shown),
            ],
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
