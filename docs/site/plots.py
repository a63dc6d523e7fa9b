"""Plots of the tables in docs/performance.md, as SVG that is readable on light and on dark pages."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

# Contrast of at least 3 to 1 with white and with the dark page.
INK, FASTER, TIE, SLOWER = "#7b858f", "#2f8bd0", "#8a949e", "#d9702a"
TIED = 1.1
RATIO = re.compile(r"\**([\d.]+)x")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "retrograd", "font.family": "sans-serif", "font.size": 9}


class Plot(NamedTuple):
    """Bars of a table's ratios. The table is the first one after `after`."""

    name: str
    after: str
    columns: tuple[str, ...]  # of ratios, by the beginning of their titles
    title: str


STEP = ("AVX-512, step",)
PLOTS = (
    Plot("layers", "<!-- zen4 -->", STEP, "A layer's training step: the fastest other library's time over retrograd's"),
    Plot("gru", "### GRU and RNN", ("PyTorch", "JAX", "oneDNN"), "GRU, 1 thread: the others' time over retrograd's"),
    Plot(
        "steps",
        "### Whole training steps",
        ("PyTorch", "torch.compile", "JAX"),
        "Whole training steps, 1 thread: other libraries' time over retrograd's",
    ),
    Plot("conv", "<!-- xeon-conv -->", STEP, "Convolutions, pooling, training step: PyTorch's time over retrograd's"),
)


class Bar(NamedTuple):
    label: str
    ratio: float
    text: str


def table_after(page: str, mark: str) -> tuple[int, list[list[str]]]:
    """Where the first table after a mark begins, and its rows of cells, the titles first."""
    start = page.find(mark)
    if page.count(mark) != 1:
        raise SystemExit(f"docs/performance.md has {page.count(mark)} of {mark!r}, which the plots need once")
    found = re.compile(r"(?:^\|.*\|\n)+", re.MULTILINE).search(page, start)
    if found is None:
        raise SystemExit(f"docs/performance.md has no table after {mark!r}")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()]
    return found.start(), [rows[0], *rows[2:]]


def bars_of(table: Sequence[Sequence[str]], columns: Sequence[str], mark: str) -> list[list[Bar]]:
    """For each row, a bar for each of the columns; the first ratio of a cell counts, empty cells have none."""
    head, *rows = table
    places = []
    for column in columns:
        fitting = [index for index, title in enumerate(head) if title.startswith(column)]
        if not fitting:
            raise SystemExit(f"docs/performance.md: the table after {mark!r} has no column {column!r}")
        places.append(fitting[0])
    found = []
    for row in rows:
        bars = []
        for column, place in zip(columns, places, strict=True):
            ratio = RATIO.match(row[place])
            if ratio:
                word = "" if len(columns) == 1 else f" {column}"
                bars.append(Bar(row[0], float(ratio[1]), (row[place].strip("*") if not word else f"{ratio[1]}x{word}")))
        if bars:
            found.append(bars)
    if not found:
        raise SystemExit(f"docs/performance.md: no ratios in the table after {mark!r}")
    return found


def draw(rows: Sequence[Sequence[Bar]], path: Path) -> None:
    """Each row's label above its bars, so that the plot can be as narrow as a phone."""
    heights = [0.22 + 0.17 * len(row) for row in rows]
    total = sum(heights) + 0.4
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2, total))
        axes = figure.add_axes((0.01, 0.0, 0.98, 1 - 0.3 / total))
        ratios = [bar.ratio for row in rows for bar in row]
        low, high = min(0.8, *ratios), max(1.25, *ratios)
        span = math.log(high / low)
        axes.set_xscale("log")
        axes.set_xlim(low * math.exp(-0.03 * span), high * math.exp(0.42 * span))
        axes.set_ylim(total - 0.3, 0)
        place = 0.0
        for row, height in zip(rows, heights, strict=True):
            axes.text(low * math.exp(-0.03 * span), place + 0.13, row[0].label, color=INK, va="center", size=8.5)
            beside = place + 0.22, place + height + 0.02  # the bars, not the label
            axes.fill_betweenx(beside, 1 / TIED, TIED, color=TIE, alpha=0.18, linewidth=0)
            axes.plot((1, 1), beside, color=INK, linewidth=1)
            for number, bar in enumerate(row):
                y = place + 0.3 + 0.17 * number
                colour = FASTER if bar.ratio > TIED else SLOWER if bar.ratio < 1 / TIED else TIE
                axes.barh(y, bar.ratio - 1, left=1, height=0.13, color=colour)
                axes.text(max(bar.ratio, 1) * math.exp(0.012 * span), y, bar.text, color=INK, va="center", size=8)
            place += height
        ticks = [tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50) if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], color=INK, size=8)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.tick_top()
        axes.tick_params(color=INK, left=False, labelleft=False)
        for side in axes.spines.values():
            side.set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def with_plots(page: str, folder: Path) -> str:
    """Draw the plots and insert each above its table."""
    for plot in PLOTS:
        start, table = table_after(page, plot.after)
        draw(bars_of(table, plot.columns, plot.after), folder / f"{plot.name}.svg")
        picture = f"![{plot.title}](plots/{plot.name}.svg){{ .plot }}"
        about = f"{plot.title}; above 1x retrograd is faster, and the grey band is a tie."
        page = f"{page[:start]}{about}\n\n{picture}\n\n{page[start:]}"
    return page
