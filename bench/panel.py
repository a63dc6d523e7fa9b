"""Forecast the series of the M competitions, beside an ensemble of statsforecast's methods.

    python bench/panel.py --data FOLDER [--panels hourly weekly] [--processes 2] [--rivals ets ces theta arima]

The folder has M4-hourly.csv.gz, M4-weekly.csv.gz and M3.csv.gz: a row for each series, with the columns id, period,
horizon, train and test, values separated by spaces. The test part is only used to compute the errors.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import os
import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from retrograd.train.panel import fit_panel
from retrograd.train.panel_jobs import METHODS, Job, run, split

Array = npt.NDArray[np.float64]


class Source(NamedTuple):
    """A panel: its file, season, and the published sMAPE and MASE of Naive2, for OWA."""

    file: str
    season: int
    naive2: tuple[float, float] | None = None


PANELS: Final = {
    "hourly": Source("M4-hourly", 24, (18.383, 2.395)),
    "weekly": Source("M4-weekly", 1, (9.161, 2.777)),
    "yearly": Source("M3", 1),
    "quarterly": Source("M3", 4),
    "monthly": Source("M3", 12),
    "other": Source("M3", 1),
}


class Errors(NamedTuple):
    """The mean errors of a panel; `points` and `series` are what they weigh over several panels."""

    smape: float
    mase: float
    series: int
    points: int

    def text(self, source: Source) -> str:
        found = f"sMAPE {self.smape:7.3f}  MASE {self.mase:6.3f}"
        if source.naive2 is not None:
            found += f"  OWA {(self.smape / source.naive2[0] + self.mase / source.naive2[1]) / 2:.3f}"
        return found


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


def errors(train: dict[str, Array], test: dict[str, Array], predicted: dict[str, Array], season: int) -> Errors:
    smape, mase = [], []
    for key, truth in test.items():
        size = np.abs(truth - predicted[key])
        smape.append(200 * np.mean(size / (np.abs(truth) + np.abs(predicted[key]))))
        mase.append(size.mean() / np.abs(train[key][season:] - train[key][:-season]).mean())
    return Errors(float(np.mean(smape)), float(np.mean(mase)), len(test), sum(map(len, test.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=list(PANELS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rivals", nargs="*", choices=METHODS, default=["ets", "ces", "theta"])
    parser.add_argument("--time-limit", type=float, metavar="SECONDS")
    options = parser.parse_args()
    of_m3: dict[str, list[Errors]] = {}
    for name in options.panels:
        source = PANELS[name]
        train, test = read(options.data, name)
        horizon = len(next(iter(test.values())))
        print(f"{name}: {len(train)} series, horizon {horizon}", flush=True)
        begun, used = time.monotonic(), sum(os.times()[:4])
        model = fit_panel(train, horizon, source.season, processes=options.processes, time_limit=options.time_limit)
        taken, used = time.monotonic() - begun, sum(os.times()[:4]) - used
        forecasts = model.forecast()
        rows = {
            "retrograd": (errors(train, test, {k: f.point for k, f in forecasts.items()}, source.season), taken, used)
        }
        inside = np.mean([(f.low <= test[key]) & (test[key] <= f.high) for key, f in forecasts.items()])
        ids, values = list(train), list(train.values())
        combined = []
        for rival in options.rivals:
            begun, used = time.monotonic(), sum(os.times()[:4])
            jobs = [Job(rival, (0,), part, horizon, source.season) for part in split(range(len(ids)))]
            parts = run(jobs, values, options.processes, math.inf)
            found = np.concatenate([part[0][0] for part in parts if part is not None])
            combined.append(found)
            taken, used = time.monotonic() - begun, sum(os.times()[:4]) - used
            rows[METHODS[rival].name] = (
                errors(train, test, dict(zip(ids, found, strict=True)), source.season),
                taken,
                used,
            )
        if len(combined) > 1:
            mean = dict(zip(ids, np.mean(combined, axis=0), strict=True))
            others = [row for key, row in rows.items() if key != "retrograd"]
            taken, used = sum(row[1] for row in others), sum(row[2] for row in others)
            rows["mean of these"] = errors(train, test, mean, source.season), taken, used
        for method, (found_errors, wall, cpu) in rows.items():
            print(f"  {method:<24} {found_errors.text(source)}  {wall:6.0f} s, {cpu:6.0f} s of CPU", flush=True)
            if source.file == "M3":
                of_m3.setdefault(method, []).append(found_errors)
        print(f"  {model.verdict}", *model.notes, f"The bands hold {100 * inside:.0f} %.", sep="\n  ", flush=True)
    for method, parts_of in of_m3.items():
        if len(parts_of) == 4:
            by_point = np.average([e.smape for e in parts_of], weights=[e.points for e in parts_of])
            by_series = np.average([e.smape for e in parts_of], weights=[e.series for e in parts_of])
            print(f"M3 {method:<24} sMAPE {by_point:.3f} per point, {by_series:.3f} per series")


if __name__ == "__main__":
    main()
