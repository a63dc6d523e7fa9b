"""The errors of a forecasting model and its baselines on the test set: tables, charts and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .baselines import nonzero
from .chart import Chart, Line
from .report import Table
from .table import counted
from .task import Array

__all__ = ["Scores", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """The errors of the model and the baselines on the test set. Saved with the model."""

    errors: dict[str, float]  # by name: MAE, or with several targets the mean of MAE / naive MAE
    forecasts: int
    clear: bool  # whether the model's lead, if there is one, is statistically significant
    targets: int

    @property
    def best_baseline(self) -> str:
        return min((name for name in self.errors if name != "model"), key=lambda name: self.errors[name])

    @property
    def winner(self) -> str:
        """The method with the smallest error; the model only if it is better than each baseline."""
        best = self.best_baseline
        return "model" if self.errors["model"] < self.errors[best] else best

    def __str__(self) -> str:
        """One sentence on the model and the best baseline."""
        best = self.best_baseline
        model, other = self.errors["model"], self.errors[best]
        unit = "MAE" if self.targets == 1 else "mean error relative to the naive forecast's"
        numbers = f"{unit} {model:.4g} against {other:.4g} in {counted(self.forecasts, 'forecast')} of the test set"
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
    def from_record(cls, record: Mapping[str, Any], baselines: Sequence[str], targets: int) -> Verdict:
        """Create a verdict from saved metadata, for these baselines and this number of targets."""
        verdict = cls(**record)
        if not (
            list(verdict.errors) == ["model", *baselines]
            and all(type(error) is float and 0 <= error < math.inf for error in verdict.errors.values())
            and type(verdict.forecasts) is int
            and verdict.forecasts > 0
            and type(verdict.clear) is bool
            and verdict.targets == targets
        ):
            raise ValueError(f"its verdict is {verdict.errors}")
        return verdict


@dataclass(frozen=True)
class Scores:
    """Forecasts of the test set, ``[N, horizon, targets]`` each, and the true values."""

    origins: Array
    truth: Array
    predicted: dict[str, Array]  # by name, the model's first

    def errors(self, name: str) -> Array:
        sizes: Array = np.abs(self.predicted[name] - self.truth)
        return sizes

    def overall(self, name: str) -> float:
        """Return the mean absolute error; with several targets, the mean of MAE / naive MAE."""
        each = self.errors(name).mean(axis=(0, 1))
        return float(each[0] if len(each) == 1 else (each / self._naive()).mean())

    def _naive(self) -> Array:
        """Return the naive forecast's MAE of each target, as a divisor."""
        return nonzero(self.errors("naive").mean(axis=(0, 1)))

    def verdict(self) -> Verdict:
        errors = {name: self.overall(name) for name in self.predicted}
        verdict = Verdict(errors, len(self.origins), False, self.truth.shape[2])
        return replace(verdict, clear=self._is_clear(verdict.best_baseline))

    def _is_clear(self, baseline: str) -> bool:
        """Return whether the model's lead exceeds 1.64 standard errors (a one-sided test at the 5 % level).

        Overlapping forecasts are not independent, so the differences are averaged over blocks of one horizon.
        """
        lead = ((self.errors(baseline) - self.errors("model")) / self._naive()).mean(axis=(1, 2))
        horizon = self.truth.shape[1]
        blocks = len(lead) // horizon
        if blocks < 4:
            return False
        means = lead[: blocks * horizon].reshape(blocks, horizon).mean(axis=1)
        return bool(means.mean() > 1.64 * means.std(ddof=1) / math.sqrt(blocks))

    def table(self, target: int, title: str) -> Table:
        """Return a table of the errors for one target, by index."""
        naive = float(self.errors("naive")[:, :, target].mean())
        rows, sizes = [], []
        for name in self.predicted:
            errors = self.errors(name)[:, :, target]
            size = float(errors.mean())
            sizes.append(size)
            compared = f"{size / naive:.3f}" if naive else "-"
            rows.append([name, f"{size:.4g}", f"{math.sqrt(float((errors**2).mean())):.4g}", compared])
        return Table([title, "MAE", "RMSE", "MAE / naive"], rows, highlight=sizes.index(min(sizes)))

    def horizon_chart(self, target: int, name: str) -> Chart:
        """Return a chart of the MAE for one target, by number of rows ahead."""
        horizon = range(1, self.truth.shape[1] + 1)
        lines = [
            Line(who, horizon, self.errors(who)[:, :, target].mean(axis=0), "solid" if who == "model" else "dashed")
            for who in self.predicted
        ]
        return Chart(f"{name}: mean absolute error by horizon", "rows ahead", "MAE", lines)
