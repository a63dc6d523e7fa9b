"""``retrograd train series`` and ``forecast`` for a panel: a long table with a row for each series and time."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from .._files import write_whole
from .chart import png, stacked_svg
from .files import MODEL, check_data
from .forecaster import SeriesSettings
from .panel import KIND, PanelForecast, PanelModel, digest_of, fit_panel
from .panel_model import Array
from .panel_report import charts, methods, sections
from .progress import Progress, clock, count
from .report import page, plain
from .run import REPORT, RunError
from .season import find_season
from .settings import InputError
from .table import Panel, read_data
from .words import counted

__all__ = ["FORECAST", "forecast_panel", "is_panel_model", "read_panel", "train_panel"]

FORECAST: Final = "forecast.csv"
# The settings that a panel has; the others are those of the network of a single table.
_SETTINGS: Final = frozenset(
    {"target", "horizon", "season", "gaps", "decimal", "time", "id", "seed", "threads", "time_limit"}
)
_COLUMN: Final = "unique_id"
_LOOKED_AT: Final = 40  # series, of which the season is the most common one


def train_panel(
    panel: Panel,
    settings: SeriesSettings,
    given: Collection[str],
    folder: Path,
    progress: Progress,
    before_writing: Callable[[], None] = lambda: None,
) -> None:
    """Fit the series of a panel, and write the model, its forecasts and the report into a directory."""
    for name in given:
        if name not in _SETTINGS:
            raise InputError(
                f"--{name.replace('_', '-')} is for a table with one row for each time, but {panel.name} is a panel"
            )
    begun = time.monotonic()
    season = settings.season or find_panel_season(panel)
    horizon = settings.horizon or min(48, season if season > 1 else 12)
    processes = settings.threads or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0])
    lengths = [len(values) for values in panel.series.values()]
    for note in panel.notes:
        progress.prose(note)
    progress.field("data", f"{panel.name}: {len(lengths):,} series of {min(lengths):,} to {max(lengths):,} rows")
    progress.field("season", counted(season, "row") if season > 1 else "none")
    progress.field("horizon", counted(horizon, "row"))
    shown = [""]

    def said(what: str, done: int, of: int) -> None:
        if shown[0] != what:
            progress.end()
            progress.field(what, f"{count(of)} parts on {processes} at a time")
            progress.begin(done, of)
            shown[0] = what
        progress.step(done, [clock(time.monotonic() - begun)])

    limit = None if settings.time_limit is None else float(settings.time_limit)
    try:
        model = fit_panel(
            panel.series, horizon, season, seed=settings.seed, processes=processes, time_limit=limit, progress=said
        )
    except ValueError as error:
        raise InputError(f"{panel.name}: {str(error).removeprefix('fit_panel: ')}") from None
    finally:
        progress.end()
    reading = {
        "target": panel.target,
        "gaps": settings.gaps,
        "decimal": settings.decimal,
        "time": settings.time,
        "identity": settings.id,
    }
    model = dataclasses.replace(model, reading=reading)
    before_writing()
    _write(folder / FORECAST, csv_text(panel, model.forecast()).encode())
    try:
        model.save(folder / MODEL)
    except OSError as error:
        raise RunError(f"{folder / MODEL} could not be written: {error.strerror or error}") from None
    took = clock(time.monotonic() - begun)
    summary = (
        f"{len(lengths):,} series of {min(lengths):,} to {max(lengths):,} rows, {counted(horizon, 'row')} ahead; "
        f"fitted in {took}."
    )
    title = "Forecasts of a panel, made with retrograd"
    parts = sections(panel, model, settings, processes, summary)
    _write(folder / REPORT, page(title, str(folder), parts).encode("utf-8", "replace"))
    progress.say()
    progress.prose(model.verdict)
    for note in model.notes:
        progress.prose(note)
    progress.say()
    progress.say(plain(methods(model)).rstrip("\n"))
    progress.say()
    progress.field("time", took)
    progress.field("model", str(folder / MODEL))
    progress.field("forecast", str(folder / FORECAST))
    progress.field("report", str(folder / REPORT))


def read_panel(path: str, settings: SeriesSettings) -> Panel | None:
    """Read a file if it is a panel; of other files, only look for its column."""
    check_data(path)
    if settings.id is None:
        try:
            if not _may_be_long(Path(path)):
                return None
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from None
    found = read_data(
        path,
        gaps=settings.gaps,
        decimal=settings.decimal,
        time=settings.time,
        identity=settings.id,
        target=settings.target,
    )
    return found if isinstance(found, Panel) else None


def _may_be_long(path: Path) -> bool:
    """Whether a file may have the column of a panel: its name is there, or the file is compressed, as Excel's are."""
    content = path.read_bytes()
    compressed = content[:4] == b"PK\x03\x04" or path.suffix.lower() in (".xlsx", ".xls")
    return compressed or any(_COLUMN.encode(kind) in content for kind in ("utf-8", "utf-16-le", "utf-16-be"))


def find_panel_season(panel: Panel) -> int:
    """Return the season that most of the series have."""
    keys = list(panel.series)
    chosen = [keys[i] for i in np.linspace(0, len(keys) - 1, min(_LOOKED_AT, len(keys))).astype(int)]
    found = Counter(_season_of(panel.series[key][-1000:], panel.times[key].step.seasons()) for key in chosen)
    season, times = found.most_common(1)[0]
    return season if 2 * times > len(chosen) else 1


def _season_of(values: Array, likely: Sequence[int]) -> int:
    return find_season(values, likely) if len(values) > 5 and np.ptp(values) else 1


def is_panel_model(path: str) -> bool:
    """Whether a model, or the one in a directory, is that of a panel."""
    from .. import nn

    file = Path(path) / MODEL if Path(path).is_dir() else Path(path)
    try:
        return bool(nn.read_metadata(file).get("kind") == KIND)
    except (OSError, ValueError):
        return False  # reading it as another kind says what is wrong


def forecast_panel(
    path: str, data: str, name: str, changed: dict[str, Any], output: Path, picture: Path | None, progress: Progress
) -> None:
    """Write the forecasts of a panel's model for the table that it was trained on; `name` is that of the data."""
    model = PanelModel.load(path)
    panel = read_data(data, **{**model.reading, **changed}, name=name)
    if not isinstance(panel, Panel):
        raise InputError(f"{name} has one row per time, but {path} is a model of a panel, a column 'unique_id'")
    if digest_of(panel.series) != model.digest:
        raise InputError(
            f"{name} is not the panel that {path} was trained on: its parameters belong to those series and rows. "
            f"Train again with retrograd train series"
        )
    _write(output, csv_text(panel, model.forecast()).encode())
    if picture is not None:
        drawn = charts(panel, model)
        _write(picture, png(drawn) if picture.suffix == ".png" else stacked_svg(drawn).encode())
    progress.prose(model.verdict)
    progress.field("forecast", str(output))
    if picture is not None:
        shown = "" if len(drawn) == len(panel.series) else f" (the first {len(drawn)} series)"
        progress.field("plot", f"{picture}{shown}")


def csv_text(panel: Panel, forecasts: dict[str, PanelForecast]) -> str:
    """The forecasts as a long table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    time_column = next(iter(panel.times.values())).column or "ds"
    writer.writerow([panel.id_column, time_column, panel.target, f"{panel.target}_low", f"{panel.target}_high"])
    for key, (point, low, high) in forecasts.items():
        for label, *values in zip(panel.times[key].after(len(point)), point, low, high, strict=True):
            writer.writerow([key, label, *(f"{value:.7g}" for value in values)])
    return text.getvalue()


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror or error}") from None
