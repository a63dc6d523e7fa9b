"""The errors of all methods on the test set: tables, charts and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .baselines import nonzero
from .chart import Chart, Line
from .contest import CHOSEN, LEARNED, METHODS
from .report import Table
from .task import Array
from .words import counted

__all__ = ["NAMES", "Choice", "Scores", "Verdict", "scale"]

#: What a method is called, by its key: that of --use and of saved verdicts.
NAMES: Final = {CHOSEN: "chosen", **{key: key for key in LEARNED}, **{k: method.name for k, method in METHODS.items()}}

_LEVEL: Final = 0.01  # a difference below it is none


@dataclass(frozen=True)
class Choice:
    """What forecasts a target, and what was measured."""

    weights: dict[str, float]  # by method; the sum is 1
    errors: dict[str, float]  # MASE on the test set, by method, CHOSEN first
    bands: dict[str, list[float]]  # half width of the 80 % band of each step, by method
    inside: float  # share of the test set's values within their bands; NaN if there were none

    def __str__(self) -> str:
        """The methods in use: AutoETS, or 60 % AutoARIMA and 40 % AutoETS."""
        if len(self.weights) == 1:
            return NAMES[next(iter(self.weights))]
        parts = [f"{100 * weight:.0f} % {NAMES[key]}" for key, weight in self.weights.items()]
        return f"{', '.join(parts[:-1])} and {parts[-1]}"


@dataclass(frozen=True)
class Verdict:
    """The choice for each target, and how it compares. Saved with the model."""

    targets: dict[str, Choice]
    forecasts: int  # of the test set, for each target

    def error(self, key: str) -> float | None:
        """Return the mean MASE of a method over the targets; None if it has none for one of them."""
        errors = [choice.errors.get(key) for choice in self.targets.values()]
        known = [error for error in errors if error is not None]
        return sum(known) / len(known) if len(known) == len(errors) else None

    def __str__(self) -> str:
        """One sentence: what is used, its error, and that of AutoETS and of the better naive forecast."""
        own = self.error(CHOSEN)
        assert own is not None
        one = len(self.targets) == 1
        what = str(next(iter(self.targets.values()))) if one else f"the methods chosen for {len(self.targets)} targets"
        naive = min(("naive", "seasonal"), key=lambda key: math.inf if (e := self.error(key)) is None else e)
        others = []
        for key, name in (
            ("ets", "AutoETS alone"),
            (naive, f"the {NAMES[naive]} forecast"),
            ("network", "the network"),
        ):
            other = self.error(key)
            if other is None or (one and list(next(iter(self.targets.values())).weights) == [key]):
                continue
            others.append(f"{_compared(own, other)} {name} ({other:.3g})")
        against = f": {', '.join(others)}" if others else ""
        mean = "MASE" if one else "mean MASE"
        # Each of these forecasts was weighted by what was known before it, so the weights may have been others.
        tested = counted(self.forecasts, "test forecast")
        return f"The forecast is by {what}, with a {mean} of {own:.3g} in {tested}{against}."

    def record(self) -> dict[str, Any]:
        targets = {
            name: {
                "weights": choice.weights,
                "errors": choice.errors,
                "bands": choice.bands,
                "inside": None if math.isnan(choice.inside) else choice.inside,
            }
            for name, choice in self.targets.items()
        }
        return {"targets": targets, "forecasts": self.forecasts}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], targets: tuple[str, ...], horizon: int) -> Verdict:
        """Create a verdict from saved metadata, for these targets and this horizon."""
        if tuple(record["targets"]) != targets or type(record["forecasts"]) is not int or record["forecasts"] < 1:
            raise ValueError(f"its verdict is on {list(record['targets'])}")
        found = {}
        for name in targets:
            part = record["targets"][name]
            inside = math.nan if part["inside"] is None else part["inside"]
            choice = Choice(dict(part["weights"]), dict(part["errors"]), dict(part["bands"]), inside)
            bands = [*choice.bands.values(), [0.0] * horizon]
            numbers = [*choice.weights.values(), *choice.errors.values(), *(width for each in bands for width in each)]
            if not (
                all(type(number) is float and 0 <= number < math.inf for number in numbers)
                and all(len(each) == horizon for each in bands)
                and abs(sum(choice.weights.values()) - 1) < 1e-6
                and {*choice.weights, *choice.errors, *choice.bands} <= NAMES.keys()
                and CHOSEN not in choice.weights
                and CHOSEN in choice.errors
                and CHOSEN in choice.bands
                and type(inside) is float
            ):
                raise ValueError(f"its verdict on {name!r} is {choice.weights}, {choice.errors}")
            found[name] = choice
        return cls(found, record["forecasts"])


def _compared(own: float, other: float) -> str:
    if abs(own - other) <= _LEVEL * other:
        return "level with"
    return f"{100 * abs(own / other - 1):.0f} % {'below' if own < other else 'ABOVE'}" if other else "above"


@dataclass(frozen=True)
class Scores:
    """Forecasts of one target from the origins of the test set, ``[N, horizon]`` each, and the true values."""

    truth: Array
    predicted: dict[str, Array]  # by key, CHOSEN first
    unit: float  # the mean absolute difference of the rows before the test, from a season to the next

    def errors(self, key: str) -> Array:
        sizes: Array = np.abs(self.predicted[key] - self.truth)
        return sizes

    def mase(self, key: str) -> float:
        return float(self.errors(key).mean()) / self.unit

    def table(self, title: str) -> Table:
        rows, sizes = [], []
        for key in self.predicted:
            errors = self.errors(key)
            sizes.append(float(errors.mean()))
            rms = math.sqrt(float((errors**2).mean()))
            rows.append([NAMES[key], f"{sizes[-1]:.4g}", f"{rms:.4g}", f"{self.mase(key):.3f}"])
        return Table([title, "MAE", "RMSE", "MASE"], rows, highlight=sizes.index(min(sizes)))

    def horizon_chart(self, name: str) -> Chart:
        """Return a chart of the MAE by number of rows ahead."""
        horizon = range(1, self.truth.shape[1] + 1)
        shown = [key for key in (CHOSEN, "ets", "network", "seasonal", "naive") if key in self.predicted][:4]
        lines = [
            Line(NAMES[key], horizon, self.errors(key).mean(axis=0), "solid" if key == CHOSEN else "dashed")
            for key in shown
        ]
        return Chart(f"{name}: mean absolute error by horizon", "rows ahead", "MAE", lines)


def scale(values: Array, season: int) -> float:
    """Return the divisor of MASE: the mean absolute difference from a season to the next."""
    lag = season if len(values) > season else 1
    return float(nonzero(np.abs(values[lag:] - values[:-lag]).mean()))
