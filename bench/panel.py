"""Forecast the series of the M competitions with `fit_panel`, end to end, beside statsforecast's methods.

    python bench/panel.py --data FOLDER [--keep FOLDER] [--panels hourly weekly] [--processes 2] [--rivals ets ces]

The folder has M4-hourly.csv.gz, M4-weekly.csv.gz and M3.csv.gz: a row for each series, with the columns id, period,
horizon, train and test, values separated by spaces. The test part is only used to compute the errors. With --keep, each
finished method of a panel is saved, and a later call continues with those that are missing.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from retrograd.train.panel import fit_panel
from retrograd.train.panel_jobs import METHODS, Job, run, split

Array = npt.NDArray[np.float64]
OURS: Final = "fit_panel"
MEAN: Final = "equal mean of these"


class Source(NamedTuple):
    """A panel: its file, season, and the published sMAPE and MASE of Naive2, for OWA."""

    file: str
    season: int
    naive2: tuple[float, float] | None = None


PANELS: Final = {
    "weekly": Source("M4-weekly", 1, (9.161, 2.777)),
    "hourly": Source("M4-hourly", 24, (18.383, 2.395)),
    "yearly": Source("M3", 1),
    "quarterly": Source("M3", 4),
    "other": Source("M3", 1),
    "monthly": Source("M3", 12),
}
OF_M3: Final = [name for name, source in PANELS.items() if source.file == "M3"]


class Made(NamedTuple):
    """The forecasts of a method [series, horizon], what they took, and what was said about them."""

    point: Array
    wall: float
    cpu: float
    text: str = ""
    low: Array | None = None
    high: Array | None = None


class Errors(NamedTuple):
    """The mean errors of a panel; `points` and `series` are what they weigh over several panels."""

    smape: float
    mase: float
    series: int
    points: int


def read(folder: Path, name: str) -> tuple[dict[str, Array], dict[str, Array]]:
    csv.field_size_limit(2**30)
    train, test = {}, {}
    with gzip.open(folder / f"{PANELS[name].file}.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            if row["period"] == name:
                train[row["id"]] = np.array(row["train"].split(), np.float64)
                test[row["id"]] = np.array(row["test"].split(), np.float64)
    if not train:
        raise SystemExit(f"{folder / PANELS[name].file}.csv.gz has no series of the period {name}")
    return train, test


def errors(train: dict[str, Array], test: dict[str, Array], point: Array, season: int) -> Errors:
    smape, mase = [], []
    for (key, truth), predicted in zip(test.items(), point, strict=True):
        size = np.abs(truth - predicted)
        smape.append(200 * np.mean(size / (np.abs(truth) + np.abs(predicted))))
        mase.append(size.mean() / np.abs(train[key][season:] - train[key][:-season]).mean())
    return Errors(float(np.mean(smape)), float(np.mean(mase)), len(test), sum(map(len, test.values())))


def kept(folder: Path | None, name: str, make: Callable[[], Made]) -> Made:
    """Return what a folder has under a name; if it has nothing, make it and keep it there."""
    path = None if folder is None else folder / f"{name}.npz"
    if path is not None and path.exists():
        with np.load(path) as file:
            record = json.loads(str(file["record"]))
            return Made(**record, **{key: file[key] for key in file.files if key != "record"})
    made = make()
    if path is not None:
        arrays: dict[str, Any] = {"point": made.point}
        if made.low is not None and made.high is not None:
            arrays |= {"low": made.low, "high": made.high}
        record = json.dumps({"wall": made.wall, "cpu": made.cpu, "text": made.text})
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npz")
        np.savez(part, record=np.array(record), **arrays)
        part.replace(path)
    return made


def clocks() -> tuple[float, float]:
    """Wall time, and CPU time of this process and of its children that have ended."""
    return time.monotonic(), sum(os.times()[:4])


def fitted(train: dict[str, Array], horizon: int, season: int, options: argparse.Namespace) -> Made:
    wall, cpu = clocks()
    model = fit_panel(train, horizon, season, processes=options.processes, time_limit=options.time_limit)
    after = clocks()
    text = "\n".join([model.verdict, *model.notes])
    return Made(model.point, after[0] - wall, after[1] - cpu, text, model.low, model.high)


def of_rival(rival: str, train: dict[str, Array], horizon: int, season: int, processes: int) -> Made:
    wall, cpu = clocks()
    jobs = [Job(rival, (0,), part, horizon, season) for part in split(range(len(train)))]
    parts = run(jobs, list(train.values()), processes, math.inf)
    after = clocks()
    naive = np.array([np.full(horizon, y[-1]) for y in train.values()])
    found = np.concatenate([part[0][0] for part in parts if part is not None])
    return Made(np.where(np.isfinite(found), found, naive), after[0] - wall, after[1] - cpu)


def row(panel: str, method: str, values: list[str], made: tuple[float, float]) -> str:
    return f"| {' | '.join([panel, method, *values])} | {made[0]:,.0f} s | {made[1]:,.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=list(PANELS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rivals", nargs="*", choices=METHODS, default=["ets", "ces", "theta"])
    parser.add_argument("--time-limit", type=float, metavar="SECONDS")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    lines = ["| panel | method | sMAPE | MASE | OWA | bands hold | wall | CPU |", "|---|---|" + "---:|" * 6]
    of_m3: dict[str, list[tuple[Errors, Made]]] = {}
    for name in options.panels:
        source = PANELS[name]
        train, test = read(options.data, name)
        horizon = len(next(iter(test.values())))
        print(f"{name}: {len(train)} series, horizon {horizon}", flush=True)
        problem = train, horizon, source.season
        found = {OURS: kept(options.keep, f"{name}-{OURS}", partial(fitted, *problem, options))}
        print(found[OURS].text, flush=True)
        for rival in options.rivals:
            if source.season <= METHODS[rival].seasons:  # the others take too long
                make = partial(of_rival, rival, *problem, options.processes)
                found[METHODS[rival].name] = kept(options.keep, f"{name}-{rival}", make)
        rivals = [made for method, made in found.items() if method != OURS]
        if len(rivals) > 1:
            point = np.mean([made.point for made in rivals], axis=0)
            found[MEAN] = Made(point, sum(made.wall for made in rivals), sum(made.cpu for made in rivals))
        truth = np.array(list(test.values()))
        for method, made in found.items():
            scored = errors(train, test, made.point, source.season)
            owa = inside = ""
            if source.naive2 is not None:
                owa = f"{(scored.smape / source.naive2[0] + scored.mase / source.naive2[1]) / 2:.3f}"
            if made.low is not None and made.high is not None:
                inside = f"{100 * np.mean((made.low <= truth) & (truth <= made.high)):.0f} %"
            texts = [f"{scored.smape:.2f}", f"{scored.mase:.3f}", owa, inside]
            lines.append(row(f"{source.file[:2]} {name}", method, texts, (made.wall, made.cpu)))
            print(lines[-1], flush=True)
            if source.file == "M3":
                of_m3.setdefault(method, []).append((scored, made))
    for method, parts in of_m3.items():
        if len(parts) == len(OF_M3):
            taken = sum(made.wall for _, made in parts), sum(made.cpu for _, made in parts)
            for what, weights in (
                ("series", [scored.series for scored, _ in parts]),
                ("point", [scored.points for scored, _ in parts]),
            ):
                smape = np.average([scored.smape for scored, _ in parts], weights=weights)
                lines.append(row(f"M3, mean per {what}", method, [f"{smape:.2f}", "", "", ""], taken))
    print("", *lines, sep="\n")


if __name__ == "__main__":
    main()
