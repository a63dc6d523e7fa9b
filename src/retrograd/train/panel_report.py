"""The report of a panel: the verdict, the methods and their weights, charts of some series, and the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .chart import Band, Chart, Line
from .forecaster import SeriesSettings
from .panel import NAMES, PanelModel, changes
from .panel_model import Array
from .report import Block, Grid, Prose, Section, Table
from .table import Panel
from .words import counted

__all__ = ["charts", "methods", "sections"]

_MOST_CHARTS: Final = 12


def methods(model: PanelModel) -> Section:
    """The errors of the methods in validation, and their weights in the forecast."""
    order = sorted(model.errors, key=lambda key: model.errors[key][1])
    rows = []
    for key in order:
        smape, mase = model.errors[key]
        weight = f"{100 * model.weights[key]:.0f} %" if key in model.weights else ""
        rows.append([NAMES.get(key, key), weight, f"{smape:.2f} %", f"{mase:.3f}"])
    what = (
        "The errors on the last rows of the series, which the methods had not seen: sMAPE is the mean of 200 |y - f| / "
        "(|y| + |f|), MASE the mean absolute error relative to the mean change "
        f"{'from row to row' if model.season == 1 else f'to the value {model.season} rows earlier'}. The weights of "
        "the forecast are chosen by these errors, so the error of the combination is a little too low here. "
    )
    if model.coverage is not None:
        low, high = model.levels
        what += (
            f"The {100 * (high - low):.0f} % bands, made from the errors of half of the series, held "
            f"{100 * model.coverage:.0f} % of the values of the other half."
        )
    best = order.index("combined")
    return Section("Methods", [Prose(what), Table(["method", "weight", "sMAPE", "MASE"], rows, highlight=best)])


def sections(panel: Panel, model: PanelModel, settings: SeriesSettings, processes: int, summary: str) -> list[Section]:
    """The report, which begins with the verdict."""
    lengths = [len(values) for values in panel.series.values()]
    headline: list[Block] = [Prose(model.verdict), Prose(summary)]
    if model.notes:
        headline.append(Prose("\n\n".join(model.notes)))
    step = str(next(iter(panel.times.values())).step)
    table = [
        ["file", panel.name],
        ["series", f"{len(lengths):,} (column {panel.id_column})"],
        ["values", f"{sum(lengths):,} (column {panel.target})"],
        ["rows of a series", f"{min(lengths):,} to {max(lengths):,}"],
        ["step", step],
        ["network", _network(model)],
        *(["note", note] for note in panel.notes),
    ]
    used = {name: settings.record()[name] for name in ("gaps", "decimal", "seed", "time_limit")}
    times = next(iter(panel.times.values())).column
    in_force: dict[str, Any] = {
        **{"id": panel.id_column, "time": times, "target": panel.target},
        **{"horizon": model.horizon, "season": model.season, **used, "threads": processes},
    }
    options = [list(row) for row in settings.named(in_force)]
    return [
        Section("Result", headline),
        methods(model),
        Section("Forecasts", _forecasts(panel, model)),
        Section("Data and model", [Table(["", ""], table)]),
        Section("Settings", [Table(["option", "value"], options)]),
    ]


def _network(model: PanelModel) -> str:
    if model.shape is None:
        return "none in the forecast"
    layers = " and ".join(", ".join(map(str, block)) for block in model.shape.dilations)
    return (
        f"mean of {counted(len(model.networks), 'network')}, {model.shape.updates:,} updates; LSTM layers of "
        f"{model.shape.hidden} with the dilations {layers}"
    )


def _forecasts(panel: Panel, model: PanelModel) -> list[Block]:
    groups = _chosen(panel, model)
    every = len(panel.series) <= _MOST_CHARTS
    text = "All series" if every else "Series by their errors in validation"
    text += ": their last values, the forecast of the last horizon that was made without it, and the forecast."
    return [Prose(text), *(Grid(title, _charts(panel, model, chosen)) for title, chosen in groups)]


def charts(panel: Panel, model: PanelModel) -> list[Chart]:
    """The first forecasts."""
    return _charts(panel, model, range(min(_MOST_CHARTS, len(panel.series))))


def _chosen(panel: Panel, model: PanelModel) -> list[tuple[str, Sequence[int]]]:
    """Groups of series for charts, by index: all, or those with the largest, middle and smallest errors."""
    count = len(panel.series)
    if count <= _MOST_CHARTS:
        return [("Forecasts", range(count))]
    errors = {
        at: error for at, values in enumerate(panel.series.values()) if (error := _error(values, model, at)) is not None
    }
    order = sorted(errors, key=lambda at: -errors[at])
    each = _MOST_CHARTS // 3
    if len(order) < _MOST_CHARTS:
        return [(f"The first {_MOST_CHARTS} series", range(_MOST_CHARTS))]
    middle = (len(order) - each) // 2
    return [
        ("The largest errors", order[:each]),
        ("Errors in the middle", order[middle : middle + each]),
        ("The smallest errors", order[-each:]),
    ]


def _validated(model: PanelModel, at: int) -> Array | None:
    """The forecast of a series' last values, made without them."""
    if model.validation is None:
        return None
    found: Array = model.validation[at]
    return found if np.isfinite(found).all() else None


def _error(values: Array, model: PanelModel, at: int) -> float | None:
    """The mean absolute error in validation, relative to the mean change from one season to the next."""
    found = _validated(model, at)
    if found is None:
        return None
    error, change = np.abs(values[-model.horizon :] - found).mean(), changes(values, model.season).mean()
    return float(error / change) if change > 0 else None


def _charts(panel: Panel, model: PanelModel, chosen: Sequence[int]) -> list[Chart]:
    keys = list(panel.series)  # in the order of the model's rows
    return [_chart(panel, model, at, keys[at]) for at in chosen]


def _chart(panel: Panel, model: PanelModel, at: int, key: str) -> Chart:
    values, times, steps = panel.series[key], panel.times[key], model.horizon
    shown = slice(-max(3 * steps, 2 * model.season, 12), None)
    past, before = values[shown], times.values[shown]
    ahead = np.concatenate([before[-1:], times.next(steps)])
    point, low, high = (np.append(past[-1], rows[at]) for rows in (model.point, model.low, model.high))
    lines = [Line("values", before, past), Line("forecast", ahead, point)]
    title = key
    if (found := _validated(model, at)) is not None:
        lines.append(Line("forecast of the last values", times.values[-steps:], found, "dashed"))
    if (error := _error(values, model, at)) is not None:
        title += f" · MASE {error:.2f}"
    percent = 100 * (model.levels[1] - model.levels[0])
    return Chart(title, "", "", lines, [Band(f"{percent:.0f} % band", ahead, low, high, line=1)])
