"""Charts of lines and bands, written as SVG or, with matplotlib, as PNG."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .._printing import one_line, visible
from .drawing import LIGHT, Corners, Drawing, Group, Mark, Shape, Text, to_png, to_svg

__all__ = ["Band", "Chart", "Line", "Numbers", "one_line", "png", "stacked_svg", "svg", "visible"]

Numbers = Sequence[float] | npt.NDArray[Any]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """A curve. It has gaps where x or y is not finite and, on a logarithmic axis, where y is not positive."""

    label: str
    x: Numbers
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
    x_ticks: Sequence[tuple[float, str]] | None = None  # positions and labels, such as dates; None: numbers


# ---- Text ------------------------------------------------------------------------------------------------------------


def _em(character: str) -> float:
    """Return the approximate width of a character in a sans-serif font, in em."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF":
        return 1.05
    if character in " .,:;'|!ijlIft()[]":
        return 0.36
    if character in "mwMW%@×…<>=+~#&":
        return 0.84
    return 0.7 if character.isupper() else 0.6


_SIZE = 12.0  # font size in the style sheet
_TITLE_SIZE = 15 * 1.12  # bold letters are 12 % wider


def _text_width(text: str, size: float = _SIZE) -> float:
    return size * sum(map(_em, text))


def _shorten(text: str, room: float, size: float = _SIZE) -> str:
    """Shorten the text to fit, with an ellipsis."""
    if _text_width(text, size) <= room:
        return text
    used, kept = _em("…"), 0
    while kept < len(text) and (used + _em(text[kept])) * size <= room:
        used += _em(text[kept])
        kept += 1
    return text[:kept].rstrip() + "…"


def _wrap(text: str, room: float, size: float, most: int) -> list[str]:
    """Wrap the text into at most `most` lines that fit; the last one is shortened."""
    lines: list[str] = []
    words = text.split(" ")
    while words and len(lines) < most - 1:
        count = 1
        while count < len(words) and _text_width(" ".join(words[: count + 1]), size) <= room:
            count += 1
        lines.append(_shorten(" ".join(words[:count]), room, size))
        words = words[count:]
    return [*lines, _shorten(" ".join(words), room, size)] if words else lines


# ---- Axes ------------------------------------------------------------------------------------------------------------

# Larger values count as infinite: their differences would overflow. Values below its inverse count as equal.
_LARGEST = 1e300


class _Tick(NamedTuple):
    value: float
    label: str


class _Axis(NamedTuple):
    low: float  # in powers of ten if log
    high: float
    log: bool

    def place(self, values: _Floats) -> _Floats:
        """Return positions from 0 at the low end to 1 at the high end."""
        position: _Floats = ((np.log10(values) if self.log else values) - self.low) / (self.high - self.low)
        return position


def _axis(values: _Floats, pad: float, log: bool) -> _Axis | None:
    """Return an axis for all values, padded by a share `pad` at ends that are not 0; None if there are no values."""
    if not values.size:
        return None
    if log:
        values = np.log10(values)
    low, high = float(values.min()), float(values.max())
    size = max(abs(low), abs(high), 1.0 if log else 1 / _LARGEST)
    if high - low <= 1e-9 * size:  # only rounding error, too fine for ticks
        around = 0.5 if log else 0.1 * size if size > 1 / _LARGEST else 1.0
        return _Axis(low - around, high + around, log)
    margin = pad * (high - low)
    bottom, top = low - margin, high + margin
    if log:  # the ends must be finite as powers of ten
        bottom, top = max(bottom, -305.0), min(top, 305.0)
    else:
        bottom = 0.0 if low >= 0 > bottom else bottom
        top = 0.0 if high <= 0 < top else top
    return _Axis(bottom, top, log)


def _power(exponent: int) -> str:
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _labels(values: Sequence[float], exponent: int) -> list[_Tick]:
    """Label values with digits down to 10**exponent: 20,000 or 0.05, or 1.5×10⁹ if that is shorter."""
    plain = [f"{value:,.{max(0, -exponent)}f}" for value in values] if exponent > -20 else None
    if plain is None or max(map(len, plain), default=0) > 10:
        largest = max(map(abs, values), default=0.0)
        top = math.floor(math.log10(largest)) if largest else 0
        digits = max(0, top - exponent)
        scaled = [f"{value / 10.0**top:.{digits}f}×{_power(top)}" if value else "0" for value in values]
        if plain is None or max(map(len, scaled)) < max(map(len, plain)):
            plain = scaled
    return [_Tick(value, label.replace("-", "−")) for value, label in zip(values, plain, strict=True)]


def _linear_ticks(low: float, high: float, most: int, whole: bool = False) -> list[_Tick]:
    """Return about `most` ticks at multiples of 1, 2 or 5 times a power of ten; integers only if `whole`."""
    step = (high - low) / most
    exponent = math.floor(math.log10(step))
    factor = next((factor for factor in (1, 2, 5) if factor * 10.0**exponent >= step * (1 - 1e-9)), 10)
    if factor == 10:
        exponent, factor = exponent + 1, 1
    if whole and exponent < 0:
        exponent, factor = 0, 1
    size = factor * 10.0**exponent
    counts = range(math.ceil(low / size - 1e-6), math.floor(high / size + 1e-6) + 1)
    # A division of integers rounds only once: 3 / 10, not 3 * 0.1.
    scale = 10**-exponent if exponent < 0 else 1
    return _labels([count * factor * (10 ** max(exponent, 0)) / scale for count in counts], exponent)


def _log_ticks(low: float, high: float, most: int) -> list[_Tick]:
    """Return ticks at powers of ten, also at 2 and 5 times them if those are few, or linear ticks within a decade."""
    decades = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
    if len(decades) > most:
        stride = math.ceil(len(decades) / most)
        decades = range(math.ceil(decades[0] / stride) * stride, decades[-1] + 1, stride)
    plain = low > -5 and high < 6

    def tick(factor: int, exponent: int) -> _Tick:
        value = factor * 10.0**exponent
        power = _power(exponent) if factor == 1 else f"{factor}×{_power(exponent)}"
        return _Tick(value, f"{value:,.{max(0, -exponent)}f}" if plain else power)

    ticks = [tick(1, exponent) for exponent in decades]
    if len(ticks) < 3:
        parts = [(f, e) for e in range(math.floor(low), math.ceil(high) + 1) for f in (1, 2, 5)]
        finer = [tick(f, e) for f, e in parts if low <= math.log10(f) + e <= high]
        even = [tick for tick in _linear_ticks(10.0**low, 10.0**high, most) if tick.value > 0]
        ticks = finer if 3 <= len(finer) <= most else max(ticks, even, key=len)
    return ticks


# ---- Data ------------------------------------------------------------------------------------------------------------


class _Series(NamedTuple):
    """A line or a band as it is drawn: y is NaN where a point cannot be shown."""

    label: str
    classes: str  # CSS classes of its shapes, the colour last
    opacity: float
    x: _Floats  # [n]
    y: _Floats  # [1, n], or [2, n] of a band

    @property
    def shown(self) -> npt.NDArray[np.bool_]:
        finite: npt.NDArray[np.bool_] = ~np.isnan(self.y[0])
        return finite


def _series(label: str, classes: str, log: bool, x: Numbers, *rows: Numbers) -> _Series:
    places = np.array(x, np.float64).reshape(-1)
    values = np.array(rows, np.float64).reshape(len(rows), -1)
    with np.errstate(invalid="ignore"):
        fit = (np.abs(places) <= _LARGEST) & (np.abs(values) <= _LARGEST).all(0)
        if log:
            fit &= (values >= 1 / _LARGEST).all(0)
    values[:, ~fit] = np.nan
    return _Series(one_line(label), classes, 1.0, places, values)


def _lines(chart: Chart) -> list[_Series]:
    kinds = {"solid": "rg-line", "dashed": "rg-line rg-dashed", "points": "rg-dots"}
    return [
        _series(line.label, f"{kinds[line.style]} rg-s{number % len(LIGHT)}", chart.log_y, line.x, line.y)
        for number, line in enumerate(chart.lines)
    ]


def _bands(chart: Chart) -> list[_Series]:
    """Return the bands; narrower ones are darker, so that nested intervals can be distinguished."""
    bands, widths, lines = [], [], len(chart.lines)
    for band in chart.bands:
        colour = band.line % lines % len(LIGHT) if -lines <= band.line < lines else 0
        bands.append(_series(band.label, f"rg-f{colour} rg-s{colour}", chart.log_y, band.x, band.low, band.high))
        y = bands[-1].y[:, bands[-1].shown]
        widths.append(float(np.ptp(y, axis=0).mean()) if y.size else math.nan)
    shades = [0.2 + 0.12 * min(3, sum(other > width for other in widths)) for width in widths]
    return [band._replace(opacity=shade) for band, shade in zip(bands, shades, strict=True)]


def _number(value: float) -> str:
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:.3e}"


def _description(chart: Chart, lines: Sequence[_Series]) -> str:
    """Describe the chart for screen readers."""
    parts = [f"{one_line(chart.y_label)} against {one_line(chart.x_label)}."]
    for line in lines:
        y = line.y[0][line.shown]
        parts.append(f"{line.label}: {y.size:,} {'point' if y.size == 1 else 'points'}")
        if y.size:
            first, last, least, most = map(_number, (y[0], y[-1], y.min(), y.max()))
            parts[-1] += f", first {first}, last {last}, minimum {least}, maximum {most}"
        parts[-1] += "."
    return " ".join(parts)


# ---- The drawing -----------------------------------------------------------------------------------------------------


class _Plot(NamedTuple):
    """The plot area in units of the drawing, and the mapping of values into it."""

    left: float
    top: float
    right: float
    bottom: float
    x: _Axis
    y: _Axis

    def across(self, x: _Floats) -> _Floats:
        return self.left + (self.right - self.left) * self.x.place(x)

    def down(self, y: _Floats) -> _Floats:
        return self.bottom - (self.bottom - self.top) * self.y.place(y)


def _draw(chart: Chart, width: int, height: int) -> Drawing:
    """Lay out the chart from top to bottom: title, legend, y label, plot, x label."""
    if width < 200 or height < 160:
        raise ValueError(f"svg: a chart is at least 200 by 160, but width is {width} and height is {height}")
    lines, bands = _lines(chart), _bands(chart)
    x = np.concatenate([np.empty(0), *(part.x[part.shown] for part in lines + bands)])
    y = np.concatenate([np.empty(0), *(part.y[:, part.shown].reshape(-1) for part in lines + bands)])
    x_axis, y_axis = _axis(x, 0.0, False), _axis(y, 0.05, chart.log_y)

    title, y_label, x_label = map(one_line, (chart.title, chart.y_label, chart.x_label))
    marks: list[Mark] = []
    top = 8.0
    for text in _wrap(title, width - 16, _TITLE_SIZE, 2) if title else ():
        top += 19
        marks.append(Text(8, top - 4, text, "rg-ink rg-title"))
    # A single line that is called like the axis or the title needs no legend.
    if len(lines + bands) > 1 or any(part.label not in ("", y_label, title) for part in lines + bands):
        entries, top = _legend(lines + bands, width, top)
        marks += entries
    if y_label:
        top += 22
        marks.append(Text(8, top - 6, _shorten(y_label, width - 16)))
    bottom = height - (44 if x_label else 26)
    top = min(top + 8, bottom - 40)
    left, right = 8.0, width - 8.0
    if x_axis is None or y_axis is None:
        marks.append(Shape("rg-axis", [_segment(left, bottom, right, bottom)]))
        marks.append(Text(width / 2, (top + bottom) / 2, "No data", anchor="middle"))
    else:
        most = max(3, int((bottom - top) / 28))
        y_ticks = (_log_ticks if chart.log_y else _linear_ticks)(y_axis.low, y_axis.high, most)
        left, right = 16 + max((_text_width(tick.label) for tick in y_ticks), default=0), width - 16.0
        plot = _Plot(left, top, right, bottom, x_axis, y_axis)
        x_labels = _x_labels(chart, plot, width, whole=bool((x == np.rint(x)).all()))
        marks += [*_axes(plot, x_labels, y_ticks), *_curves(plot, lines, bands)]
    if x_label:
        marks.append(Text((left + right) / 2, height - 8, _shorten(x_label, width - 16), anchor="middle"))
    return Drawing(title, _description(chart, lines), width, height, marks)


def _segment(x0: float, y0: float, x1: float, y1: float) -> Corners:
    return np.array([[x0, y0], [x1, y1]])


def _legend(parts: Sequence[_Series], width: int, top: float) -> tuple[list[Mark], float]:
    """Return the legend, in at most three rows above the plot, and its bottom edge."""
    marks: list[Mark] = []
    x, row = 8.0, 0
    room = width - 48 if len(parts) <= 3 else width / 2 - 48
    for number, part in enumerate(parts):
        text = _shorten(part.label, room)
        needed = 30 + _text_width(text)
        if x > 8 and x + needed > width - 8 and row < 2:
            x, row = 8.0, row + 1
        middle = top + 20 * row + 12
        # The last row keeps room for "and N more".
        if row == 2 and x + needed > width - (90 if number < len(parts) - 1 else 8):
            marks.append(Text(x, middle + 4, f"and {len(parts) - number} more"))
            break
        sample = Shape(part.classes, [_segment(x, middle, x + 22, middle)])
        if "rg-dots" in part.classes:
            sample = Shape(part.classes, [np.array([[x + 11, middle]])], width=6)
        elif len(part.y) == 2:
            corners = np.array([[x, middle - 6], [x + 22, middle - 6], [x + 22, middle + 6], [x, middle + 6]])
            sample = Shape(part.classes.split()[0], [corners], closed=True, opacity=part.opacity)
        title = part.label if text != part.label else ""
        marks.append(Group([sample, Text(x + 28, middle + 4, text, "rg-ink")], title))
        x += needed + 16
    return marks, top + 20 * (row + 1) + 2


def _x_labels(chart: Chart, plot: _Plot, width: int, *, whole: bool) -> list[tuple[float, float, str]]:
    """Return (center of the label, position of the tick, label): as many as fit without touching."""
    for most in range(max(3, int((plot.right - plot.left) / 60)), 2, -1):
        placed, end, touched = [], -math.inf, False
        for value, label in _x_ticks(chart, plot.x, most, whole):
            x = float(plot.across(np.float64(value)))
            if chart.x_ticks is not None:  # numbers must not be shortened
                label = _shorten(label, width / 3)
            half = _text_width(label) / 2
            middle = min(max(x, half + 4), width - half - 4)
            if middle - half < end:
                touched = True
                continue
            end = middle + half + 14
            placed.append((middle, x, label))
        if not touched:
            break
    return placed


def _x_ticks(chart: Chart, axis: _Axis, most: int, whole: bool) -> list[_Tick]:
    if chart.x_ticks is None:
        return _linear_ticks(axis.low, axis.high, most, whole)
    inside = sorted(_Tick(x, one_line(label)) for x, label in chart.x_ticks if axis.low <= x <= axis.high)
    return inside[:: max(1, math.ceil(len(inside) / most))]


def _axes(plot: _Plot, x_labels: Sequence[tuple[float, float, str]], y_ticks: Sequence[_Tick]) -> Iterator[Mark]:
    grid, axis = [], [_segment(plot.left, plot.bottom, plot.right, plot.bottom)]
    for value, label in y_ticks:
        y = float(plot.down(np.float64(value)))
        grid.append(_segment(plot.left, y, plot.right, y))
        yield Text(plot.left - 8, y + 4, label, "rg-tick", "end")
    for middle, x, label in x_labels:
        axis.append(_segment(x, plot.bottom, x, plot.bottom + 5))
        yield Text(middle, plot.bottom + 18, label, "rg-tick", "middle")
    yield Shape("rg-grid", grid)
    yield Shape("rg-axis", axis)


def _curves(plot: _Plot, lines: Sequence[_Series], bands: Sequence[_Series]) -> Iterator[Mark]:
    for band in (band for band in bands if band.shown.any()):
        yield Shape(band.classes, _outlines(plot, band), closed=True, opacity=band.opacity, title=band.label)
    for line in (line for line in lines if line.shown.any()):
        if "rg-dots" in line.classes:
            spots = np.stack([plot.across(line.x[line.shown]), plot.down(line.y[0, line.shown])], 1)
            if len(spots) > 2000:  # most would overlap
                spots = np.unique(np.rint(spots / 2), axis=0) * 2
            dots, few = list(spots[:, None]), 150
        else:
            pieces = _polylines(plot, line)
            dots, few = [piece for piece in pieces if len(piece) == 1], 10
            if len(dots) < len(pieces):
                # A thick line that oscillates a lot would be a solid block of colour.
                noisy = np.abs(np.diff(plot.y.place(line.y[0, line.shown]))).sum() > 25
                classes = line.classes.replace("rg-line", "rg-line rg-noisy") if noisy else line.classes
                yield Shape(classes, [piece for piece in pieces if len(piece) > 1], title=line.label)
        if dots:
            classes = f"rg-dots {line.classes.split()[-1]}"
            yield Shape(classes, dots, width=6 if len(dots) <= few else 4, title=line.label)


def _columns(plot: _Plot, series: _Series) -> tuple[_Floats, _Floats, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the positions of the visible points, and the indices of each one's pixel column and run.

    A run ends at a point that is not shown, unless the next visible point is in the same column: then the gap would be
    invisible.
    """
    index = np.flatnonzero(series.shown)
    x, y = plot.across(series.x[index]), plot.down(series.y[:, index])
    moved = np.diff(np.floor(x), prepend=-1) != 0
    broken = moved & (np.diff(index, prepend=-1) != 1)
    return x, y, np.cumsum(moved), np.cumsum(broken)


def _polylines(plot: _Plot, line: _Series) -> list[Corners]:
    """Return the unbroken pieces of a line. A pixel column keeps only its first, minimum, maximum and last point."""
    x, (y,), column, run = _columns(plot, line)
    order = np.lexsort((y, column))
    start = np.flatnonzero(np.diff(column, prepend=-1))
    last = np.append(start[1:], len(x)) - 1
    keep = np.unique(np.concatenate([start, last, order[start], order[last]]))
    return np.split(np.stack([x, y], 1)[keep], np.flatnonzero(np.diff(run[keep])) + 1)


def _outlines(plot: _Plot, band: _Series) -> list[Corners]:
    """Return the unbroken pieces of a band, as polygons. Per pixel column only the widest range is kept."""
    x, y, column, run = _columns(plot, band)
    start = np.flatnonzero(np.diff(column, prepend=-1))
    low, high = np.minimum.reduceat(y.min(0), start), np.maximum.reduceat(y.max(0), start)
    pieces = np.split(np.stack([x[start], low, high], 1), np.flatnonzero(np.diff(run[start])) + 1)
    return [np.concatenate([piece[:, [0, 1]], piece[::-1, [0, 2]]]) for piece in pieces]


# ---- Files -----------------------------------------------------------------------------------------------------------


def svg(chart: Chart, width: int = 720, height: int = 360, *, standalone: bool = True) -> str:
    """Return the chart as an ``<svg>`` element that scales to the available width.

    A standalone one includes namespace and style; otherwise `drawing.STYLE` must be in the page.
    """
    return to_svg(_draw(chart, width, height), standalone=standalone)


def stacked_svg(charts: Sequence[Chart], width: int = 720, height: int = 360) -> str:
    """Return an SVG file of the charts, stacked vertically."""
    parts = [
        svg(chart, width, height).replace("<svg ", f'<svg y="{number * height}" ', 1)
        for number, chart in enumerate(charts)
    ]
    size = f'width="{width}" height="{height * len(parts)}" viewBox="0 0 {width} {height * len(parts)}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *parts, "</svg>"])


def png(charts: Sequence[Chart]) -> bytes:
    """Return a PNG file of the charts, stacked vertically, 1200 by 600 pixels each, on white. Needs matplotlib."""
    if not charts:
        raise ValueError("png: there is no chart to draw")
    return to_png([_draw(chart, 720, 360) for chart in charts])
