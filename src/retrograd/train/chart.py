"""Charts of lines and bands, drawn by matplotlib as SVG or PNG."""

from __future__ import annotations

import functools
import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from .._printing import one_line, visible

__all__ = ["STYLE", "Band", "Chart", "Line", "Numbers", "drawable", "png", "stacked_svg", "svg"]

Numbers = Sequence[float] | npt.NDArray[Any]


@dataclass(frozen=True)
class Line:
    """A curve. It has gaps where x or y is not finite and, on a logarithmic axis, where y is not positive."""

    label: str
    x: Numbers  # numbers or datetime64
    y: Numbers
    style: Literal["solid", "dashed", "points"] = "solid"

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"Line: {self.label!r} has {len(self.x)} x, but {len(self.y)} y")
        if self.style not in ("solid", "dashed", "points"):
            raise ValueError(f"Line: {self.label!r} has the style {self.style!r}, but it is solid, dashed or points")


@dataclass(frozen=True)
class Band:
    """A shaded range, such as a prediction interval, in the colour of one of the chart's lines."""

    label: str
    x: Numbers
    low: Numbers
    high: Numbers
    line: int = -1  # index of the chart's line that has the same colour

    def __post_init__(self) -> None:
        if not len(self.x) == len(self.low) == len(self.high):
            raise ValueError(
                f"Band: {self.label!r} has {len(self.x)} x, but {len(self.low)} low and {len(self.high)} high"
            )


@dataclass(frozen=True)
class Chart:
    """Lines and bands on common axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    bands: Sequence[Band] = ()
    log_y: bool = False


def drawable() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    return bool(matplotlib.__version__)


# ---- drawing ---------------------------------------------------------------------------------------------------------

# By their role; lines are distinguishable with colour blindness (Okabe and Ito).
_LIGHT: Final = {
    **{"paper": "#ffffff", "ink": "#1b2129", "muted": "#55606c", "grid": "#e6e9ed", "axis": "#9aa4af"},
    **{"line0": "#0072b2", "line1": "#d55e00", "line2": "#009e73", "line3": "#cc79a7"},
    **{"line4": "#b8860b", "line5": "#56b4e8", "line6": "#1b2128", "line7": "#7f5fa8"},
}
_DARK: Final = {
    **{"paper": "#171b20", "ink": "#e8ebef", "muted": "#a3adb8", "grid": "#2d343c", "axis": "#66717d"},
    **{"line0": "#56b4e9", "line1": "#ff9e5e", "line2": "#2fd0a0", "line3": "#eaa6cb"},
    **{"line4": "#e2c044", "line5": "#9fd3f5", "line6": "#e8ebee", "line7": "#b9a3d9"},
}
_LINES: Final = sum(name.startswith("line") for name in _LIGHT)
_FONTS: Final = ["DejaVu Sans", "sans-serif"]


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--rg-{name}: {colour};" for name, colour in colours.items())


#: The style sheet of a page with charts: their colours, which follow the reader's.
STYLE: Final = (
    f":root {{ {_variables(_LIGHT)} }}\n"
    f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}\n"
    ".rg-chart { width: 100%; height: auto; }\n"
    ".rg-chart * { stroke-linejoin: round; stroke-linecap: butt; }\n"
    '.rg-chart text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }\n'
)
_NAMES: Final = {colour: name for name, colour in _LIGHT.items()}


def _plotted(values: Numbers) -> Any:
    """Return values that matplotlib draws: times, or numbers with gaps instead of what is too large."""
    array = np.asarray(values)
    if array.dtype.kind == "M":
        return array
    array = array.astype(np.float64)
    return np.where(np.abs(array) < 1e300, array, np.nan)


def _is_empty(chart: Chart) -> bool:
    return not any(np.isfinite(_plotted(line.y)).any() for line in chart.lines)


@functools.cache
def _settings() -> dict[str, Any]:
    return {
        "svg.fonttype": "none",
        "font.family": _FONTS,
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _LIGHT["axis"],
        "axes.labelcolor": _LIGHT["muted"],
        "axes.titlecolor": _LIGHT["ink"],
        "axes.facecolor": _LIGHT["paper"],
        "figure.facecolor": _LIGHT["paper"],
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-5, 6),
        "grid.color": _LIGHT["grid"],
        "xtick.color": _LIGHT["muted"],
        "ytick.color": _LIGHT["muted"],
        "legend.labelcolor": _LIGHT["ink"],
        "text.parse_math": False,  # names may have dollar signs
        "lines.solid_joinstyle": "round",
    }


def _figure(charts: Sequence[Chart], width: int, height: int, *, legend: bool) -> Any:
    """Draw charts below each other; `width` and `height` of each in CSS pixels."""
    from matplotlib.figure import Figure

    figure = Figure((width / 96, height * len(charts) / 96), dpi=96, layout="constrained")
    axes = figure.subplots(len(charts), squeeze=False)[:, 0]
    for axis, chart in zip(axes, charts, strict=True):
        _draw(axis, chart, narrow=width < 500, legend=legend)
    return figure


def _draw(axis: Any, chart: Chart, *, narrow: bool, legend: bool) -> None:
    from matplotlib import dates, ticker

    letters = 34 if narrow else 90
    title = textwrap.wrap(one_line(chart.title), letters, max_lines=2, placeholder=" …")
    axis.set_title("\n".join(title), loc="left", fontsize=11, weight="bold")
    axis.grid(True, axis="y", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(length=3)
    if _is_empty(chart):
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", color=_LIGHT["muted"])
        axis.set_xticks([])
        axis.set_yticks([])
        return
    if chart.log_y:
        axis.set_yscale("log", nonpositive="mask")
    for number, line in enumerate(chart.lines):
        colour, x, y = _LIGHT[f"line{number % _LINES}"], _plotted(line.x), _plotted(line.y)
        if chart.log_y:
            y = np.where(y > 0, y, np.nan)
        alone = len(y) == 1
        look = {"solid": ("-", 1.8), "dashed": ((0, (4, 2.5)), 1.5), "points": ("", 0.0)}[line.style]
        marker = "o" if alone or line.style == "points" else ""
        lone: Any = np.flatnonzero(_lone(y)) if line.style != "points" else []
        if len(lone) and not alone:
            axis.plot(x[lone], y[lone], color=colour, linestyle="", marker="o", markersize=3)
        axis.plot(
            *(x, y), label=_label(line.label), color=colour, linestyle=look[0], linewidth=look[1], marker=marker,
            markersize=4,
        )  # fmt: skip
    for band in chart.bands:
        colour = _LIGHT[f"line{band.line % max(len(chart.lines), 1) % _LINES}"]
        low, high = _plotted(band.low), _plotted(band.high)
        axis.fill_between(_plotted(band.x), low, high, color=colour, alpha=0.2, linewidth=0, label=_label(band.label))
    axis.set_xlabel(one_line(chart.x_label)[:letters])
    axis.set_ylabel(one_line(chart.y_label)[: 30 if narrow else 40])
    axis.margins(x=0.01)
    if any(np.asarray(line.x).dtype.kind == "M" for line in chart.lines):
        # So many that some interval fits any range: 47 hours need four of 12 hours.
        locator = dates.AutoDateLocator(minticks=2 if narrow else 3, maxticks=5 if narrow else 8)
        axis.xaxis.set_major_locator(locator)
        axis.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    else:
        whole = all((_plotted(line.x) == np.round(_plotted(line.x))).all() for line in chart.lines)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(4 if narrow else 8, integer=whole, steps=[1, 2, 5, 10]))
        axis.xaxis.set_major_formatter(ticker.FuncFormatter(_thousands))
    if not chart.log_y:
        axis.yaxis.set_major_formatter(ticker.FuncFormatter(_thousands))
    if legend and len(chart.lines) + len(chart.bands) > 1:
        axis.legend(frameon=False, fontsize=8, ncols=2 if narrow else 4, loc="upper left", bbox_to_anchor=(0, 1.02))
        low, high = axis.get_ylim()
        if not chart.log_y:  # room for the legend
            axis.set_ylim(low, high + (0.22 if narrow else 0.14) * (high - low))


def _lone(y: Any) -> Any:
    """Return which values have a gap on both sides, so that no line shows them."""
    there = np.concatenate([[False], np.isfinite(y), [False]])
    return there[1:-1] & ~there[:-2] & ~there[2:]


def _label(text: str) -> str:
    """Return a label for the legend, which leaves out those that are empty or begin with an underscore."""
    return f"\u200b{one_line(text)}" if text.startswith("_") or not text.strip() else one_line(text)


def _thousands(value: float, _: Any = None) -> str:
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        return f"{value:,.10g}"
    return f"{value:.3g}"


def _save(charts: Sequence[Chart], width: int, height: int, kind: str, *, legend: bool = True, **options: Any) -> bytes:
    import warnings

    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context(_settings()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")  # fonts need not have every letter of a name
        warnings.filterwarnings("ignore", message=".*constrained_layout not applied")
        _figure(charts, width, height, legend=legend).savefig(file, format=kind, **options)
    return file.getvalue()


def svg(chart: Chart, width: int = 720, height: int = 360, *, standalone: bool = True, legend: bool = True) -> str:
    """Return a chart as SVG: a document, or an element whose colours are those of `STYLE` on the page."""
    return _svg([chart], width, height, standalone=standalone, legend=legend)


def stacked_svg(charts: Sequence[Chart], width: int = 720, height: int = 360) -> str:
    """Return charts below each other as one SVG document."""
    return _svg(charts, width, height, standalone=True)


def _svg(charts: Sequence[Chart], width: int, height: int, *, standalone: bool, legend: bool = True) -> str:
    import hashlib

    import matplotlib

    salt = hashlib.sha256(repr((width, height, [_key(chart) for chart in charts])).encode()).hexdigest()
    with matplotlib.rc_context({"svg.hashsalt": salt}):  # the same bytes each time; no two charts of a page share ids
        metadata = {"Date": None, "Creator": None}
        text = _save(charts, width, height, "svg", legend=legend, metadata=metadata).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, count=1, flags=re.DOTALL)
    label = "; ".join(visible(one_line(chart.title)) for chart in charts)
    marks = f'<svg class="rg-chart" role="img" aria-label="{_escape(label)}"'
    text = text.replace("<svg", marks, 1)
    prefix = f"c{salt[:10]}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", text)
    text = re.sub("|".join(map(re.escape, _NAMES)), lambda found: f"var(--rg-{_NAMES[found[0]]}, {found[0]})", text)
    text = text.replace("xlink:href", "href").replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    if not standalone:
        return text.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    style = f"<style>{_variables_in_svg()}</style>"
    start = text.index(">", text.index("<svg")) + 1
    return '<?xml version="1.0" encoding="utf-8"?>\n' + text[:start] + style + text[start:]


def _variables_in_svg() -> str:
    lines = "svg * { stroke-linejoin: round; stroke-linecap: butt; }"
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {_variables(_DARK)} }} }}"
    return f"{lines} svg {{ {_variables(_LIGHT)} }} {dark}"


def _key(chart: Chart) -> tuple[Any, ...]:
    lines = [(line.label, np.asarray(line.x).tobytes(), np.asarray(line.y).tobytes()) for line in chart.lines]
    return chart.title, chart.x_label, chart.y_label, chart.log_y, lines


def _escape(text: str) -> str:
    import html

    return html.escape(text, quote=True)


def png(charts: Sequence[Chart]) -> bytes:
    """Return charts below each other as a PNG."""
    return _save(charts, 720, 360, "png", dpi=160)
