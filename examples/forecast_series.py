"""Forecast a chaotic series (Mackey-Glass) with retrograd.train; linear and statistical forecasts fail on it.

This does in Python what ``retrograd train series`` and ``retrograd forecast`` do on the command line. It needs the
extra ``series``: ``pip install 'retrograd[series]'``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from retrograd import nn
from retrograd.train.report import Section, plain
from retrograd.train.series import SeriesSettings, SeriesTask, forecast, load_series_model
from retrograd.train.table import read_table


def mackey_glass(rows: int) -> np.ndarray:
    """dx/dt = 0.2 x(t - 17) / (1 + x(t - 17)^10) - 0.1 x, in steps of 1; every fourth value is used."""
    x = np.full(4 * rows + 200, 1.2)
    for t in range(17, len(x) - 1):
        x[t + 1] = 0.9 * x[t] + 0.2 * x[t - 17] / (1 + x[t - 17] ** 10)
    return x[200::4]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data, path = Path(folder) / "mackey-glass.csv", Path(folder) / "model.safetensors"
        lines = [f"{day},{value:.6f}" for day, value in enumerate(mackey_glass(1500))]
        data.write_text("\n".join(["day,x", *lines]), encoding="utf-8")

        settings = SeriesSettings(horizon=12, window=32, hidden=48, steps=500, reference="last", season=1)
        task = SeriesTask(settings, data)
        losses = []
        for step in range(1, task.steps + 1):
            losses.append(task.step()[0])
            if step % 100 == 0 or step == 20:
                print(f"step {step:3d}  loss {np.mean(losses[-20:]):.3f} {task.measure}")
        task.model.eval()
        task.best_step = task.steps  # for how long the network trains again, on all rows
        outcome = task.outcome()  # compares it with other methods, and chooses
        about = {"kind": task.kind, "settings": settings.record(), "description": task.description()}
        nn.save(path, task.model, metadata={**about, "verdict": outcome.verdict})
        print(plain(Section("", outcome.headline)).strip())

        print(forecast(load_series_model(path), read_table(data)).csv_text().strip())


if __name__ == "__main__":
    main()
