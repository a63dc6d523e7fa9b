"""Charts of curves and bands: SVG of our own for pages, and the same as PNG where matplotlib is installed."""

from __future__ import annotations

import html
import importlib
import io
import math
import re
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["STYLE", "Band", "Chart", "Line", "Numbers", "one_line", "png", "stacked_svg", "svg", "visible"]

Numbers = Sequence[float] | npt.NDArray[Any]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """A curve. It is broken where x or y is not finite, and, on a logarithmic axis, where y is not positive."""

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
    line: int = -1  # whose colour it has: an index into the chart's lines

    def __post_init__(self) -> None:
        if not len(self.x) == len(self.low) == len(self.high):
            raise ValueError(
                f"Band: {self.label!r} has {len(self.x)} x, but {len(self.low)} low and {len(self.high)} high"
            )


@dataclass(frozen=True)
class Chart:
    """Lines and bands over common axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    bands: Sequence[Band] = ()
    log_y: bool = False
    x_ticks: Sequence[tuple[float, str]] | None = None  # None: numbers; else places and their labels, such as dates


# ---- Text ------------------------------------------------------------------------------------------------------------

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def visible(text: str) -> str:
    """The text without what a page, a terminal or UTF-8 would trip over: line ends and tabs are all that controls it.

    Control characters become their pictures (U+2400 and on). Lone surrogates, non-characters and the controls that
    reverse the direction of what follows become U+FFFD.
    """

    def picture(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"

    return _HIDDEN.sub(picture, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """`visible` text with every run of white space made one space."""
    return visible(" ".join(text.split()))


def _em(character: str) -> float:
    """Roughly how wide a character of a sans-serif font is, and rather too wide than too narrow."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF":
        return 1.05
    if character in " .,:;'|!ijlIft()[]":
        return 0.36
    if character in "mwMW%@×…<>=+~#&":
        return 0.84
    return 0.7 if character.isupper() else 0.6


_BOLD = 1.12  # how much wider bold letters are


def _text_width(text: str, size: float) -> float:
    return size * sum(map(_em, text))


def _shorten(text: str, room: float, size: float) -> str:
    """As much of the text as has room, and an ellipsis in place of the rest."""
    if _text_width(text, size) <= room:
        return text
    used, kept = _em("…"), 0
    while kept < len(text) and (used + _em(text[kept])) * size <= room:
        used += _em(text[kept])
        kept += 1
    return text[:kept].rstrip() + "…"


def _wrap(text: str, room: float, size: float, most: int) -> list[str]:
    """The text in lines that have room, at most so many, the last one shortened."""
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

# Beyond this, differences of two values overflow: such values count as infinite. Below its inverse, values are all one.
_LARGEST = 1e300


class _Tick(NamedTuple):
    value: float
    label: str


class _Axis(NamedTuple):
    low: float  # in powers of ten if log
    high: float
    log: bool

    def place(self, values: _Floats) -> _Floats:
        """From 0 at the low end to 1 at the high end."""
        position: _Floats = ((np.log10(values) if self.log else values) - self.low) / (self.high - self.low)
        return position


def _axis(values: _Floats, pad: float, log: bool) -> _Axis | None:
    """An axis with room for all values, and a share of it at each end if it does not end at zero. None: no values."""
    if not values.size:
        return None
    if log:
        values = np.log10(values)
    low, high = float(values.min()), float(values.max())
    size = max(abs(low), abs(high), 1.0 if log else 1 / _LARGEST)
    if high - low <= 1e-9 * size:  # nothing but rounding, too fine for ticks
        around = 0.5 if log else 0.1 * size if size > 1 / _LARGEST else 1.0
        return _Axis(low - around, high + around, log)
    margin = pad * (high - low)
    bottom, top = low - margin, high + margin
    if log:  # its ends are numbers, too
        bottom, top = max(bottom, -305.0), min(top, 305.0)
    else:
        bottom = 0.0 if low >= 0 > bottom else bottom
        top = 0.0 if high <= 0 < top else top
    return _Axis(bottom, top, log)


def _power(exponent: int) -> str:
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _labels(values: Sequence[float], exponent: int) -> list[_Tick]:
    """Labels with digits down to ten to the power of the exponent: 20,000 or 0.05, or 1.5×10⁹ where that is shorter."""
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
    """Multiples of 1, 2 or 5 times a power of ten, some so many (one at least, if that is 3); whole ones if asked."""
    step = (high - low) / most
    exponent = math.floor(math.log10(step))
    factor = next((factor for factor in (1, 2, 5) if factor * 10.0**exponent >= step * (1 - 1e-9)), 10)
    if factor == 10:
        exponent, factor = exponent + 1, 1
    if whole and exponent < 0:
        exponent, factor = 0, 1
    size = factor * 10.0**exponent
    counts = range(math.ceil(low / size - 1e-6), math.floor(high / size + 1e-6) + 1)
    # Whole numbers divided once are as exact as can be: 3 / 10, not 3 * 0.1.
    scale = 10**-exponent if exponent < 0 else 1
    return _labels([count * factor * (10 ** max(exponent, 0)) / scale for count in counts], exponent)


def _log_ticks(low: float, high: float, most: int) -> list[_Tick]:
    """Powers of ten, with 2 and 5 times them if those are few, or linear ticks if all lie close together."""
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


class _Data(NamedTuple):
    """The values of a line (one row of y) or a band (two rows), with NaN in all rows where one cannot be shown."""

    x: _Floats
    y: _Floats


def _data(x: Numbers, *rows: Numbers, log: bool) -> _Data:
    places = np.array(x, np.float64).reshape(-1)
    values = np.array(rows, np.float64).reshape(len(rows), -1)
    with np.errstate(invalid="ignore"):
        fit = (np.abs(places) <= _LARGEST) & (np.abs(values) <= _LARGEST).all(0)
        if log:
            fit &= (values >= 1 / _LARGEST).all(0)
    values[:, ~fit] = np.nan
    return _Data(places, values)


class _Layout(NamedTuple):
    """What SVG and PNG have in common: the data as it can be shown, and the axes, unless there is no data."""

    lines: list[_Data]
    bands: list[_Data]
    x: _Axis | None
    y: _Axis | None
    whole: bool  # all x are whole numbers

    def x_ticks(self, chart: Chart, most: int) -> list[_Tick]:
        assert self.x is not None
        if chart.x_ticks is None:
            return _linear_ticks(self.x.low, self.x.high, most, self.whole)
        inside = sorted(_Tick(x, one_line(label)) for x, label in chart.x_ticks if self.x.low <= x <= self.x.high)
        return inside[:: max(1, math.ceil(len(inside) / most))]

    def y_ticks(self, most: int) -> list[_Tick]:
        assert self.y is not None
        return (_log_ticks if self.y.log else _linear_ticks)(self.y.low, self.y.high, most)


def _layout(chart: Chart) -> _Layout:
    lines = [_data(line.x, line.y, log=chart.log_y) for line in chart.lines]
    bands = [_data(band.x, band.low, band.high, log=chart.log_y) for band in chart.bands]
    shown = [(x[fit], y[:, fit]) for x, y in lines + bands for fit in [~np.isnan(y[0])]]
    x = np.concatenate([x for x, _ in shown] or [np.empty(0)])
    y = np.concatenate([y.reshape(-1) for _, y in shown] or [np.empty(0)])
    return _Layout(lines, bands, _axis(x, 0.0, False), _axis(y, 0.05, chart.log_y), bool((x == np.rint(x)).all()))


def _noisy(axis: _Axis, data: _Data) -> bool:
    """Whether a line goes up and down so often that only a thin one shows more than a block of colour."""
    y = axis.place(data.y[0][~np.isnan(data.y[0])])
    return bool(np.abs(np.diff(y)).sum() > 25)


def _names(chart: Chart) -> list[str]:
    """What the legend says, of lines and then of bands."""
    return [one_line(line.label) for line in chart.lines] + [one_line(band.label) for band in chart.bands]


def _shade(layout: _Layout) -> list[float]:
    """How opaque each band is: the narrower, the darker, so that intervals inside one another can be told apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a band of NaN has no mean
        widths = [float(np.nanmean(np.abs(y[1] - y[0]))) for _, y in layout.bands]
    return [0.2 + 0.12 * min(3, sum(other > width for other in widths)) for width in widths]


def _colour(chart: Chart, band: Band) -> int:
    return range(len(chart.lines))[band.line] if -len(chart.lines) <= band.line < len(chart.lines) else 0


# ---- SVG -------------------------------------------------------------------------------------------------------------

# Blue, vermilion and green after Okabe and Ito, then purple, brown (or straw) and grey. They differ in lightness too,
# so that colour-blind eyes tell them apart.
_LIGHT = ("#0072b2", "#d55e00", "#12a06e", "#6b1a66", "#55400a", "#8a8f98")
_DARK = ("#56b4e9", "#f58b45", "#7ff0c0", "#b4619b", "#e8dc8a", "#d5dfee")


def _rules(colours: Sequence[str], paper: str, ink: str, muted: str, grid: str, axis: str) -> str:
    rules = [
        f".rg-paper{{fill:{paper}}}",
        f".rg-chart text{{fill:{muted}}}",
        f".rg-chart .rg-ink{{fill:{ink}}}",
        f".rg-grid{{stroke:{grid}}}",
        f".rg-axis{{stroke:{axis}}}",
        *(f".rg-s{i}{{stroke:{colour}}}.rg-f{i}{{fill:{colour}}}" for i, colour in enumerate(colours)),
    ]
    return "".join(rules)


#: The style sheet of all charts: once in a page, and in every SVG that stands alone. Paper that is printed is light.
STYLE = (
    ".rg-chart{display:block;max-width:100%;height:auto}"
    ".rg-chart text{font:12px system-ui,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;stroke:none}"
    ".rg-chart .rg-title{font-size:15px;font-weight:600}"
    ".rg-chart .rg-tick{font-variant-numeric:tabular-nums}"
    ".rg-line,.rg-dots{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}"
    ".rg-dashed{stroke-dasharray:7 5;stroke-linecap:butt}"
    ".rg-noisy{stroke-width:1.2}"
    ".rg-grid,.rg-axis{fill:none;stroke-width:1;shape-rendering:crispEdges}"
    + _rules(_LIGHT, "#ffffff", "#1b2129", "#55606c", "#e6e9ed", "#9aa3ad")
    + "@media screen and (prefers-color-scheme:dark){"
    + _rules(_DARK, "#171b20", "#e8ebef", "#a3adb8", "#2a3038", "#5d6772")
    + "}"
)


class _Box(NamedTuple):
    """The plot area in the units of the drawing."""

    left: float
    top: float
    width: float
    height: float


def svg(chart: Chart, width: int = 720, height: int = 360, *, standalone: bool = True) -> str:
    """The chart as an ``<svg>`` element that fills the width it is given.

    One that stands alone has a namespace and its style, and is a file; else `STYLE` must be in the page.
    """
    if width < 200 or height < 160:
        raise ValueError(f"svg: a chart is at least 200 by 160, but width is {width} and height is {height}")
    title, layout = one_line(chart.title), _layout(chart)
    parts = [
        f'<svg class="rg-chart" role="img" aria-label="{_escape(title)}" viewBox="0 0 {width} {height}"'
        + (f' xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">' if standalone else ">"),
        f"<title>{_escape(title)}</title><desc>{_escape(_description(chart, layout))}</desc>",
        f"<style>{STYLE}</style>" if standalone else "",
        f'<rect class="rg-paper" width="{width}" height="{height}"/>',
    ]
    y = 8.0
    for text in _wrap(title, width - 16, _BOLD * 15, 2) if title else ():
        y += 19
        parts.append(_text(8, y - 4, text, "rg-ink rg-title"))
    entries, y = _legend(chart, layout, width, y)
    parts += entries
    y_label, x_label = (_shorten(one_line(label), width - 16, 12) for label in (chart.y_label, chart.x_label))
    if y_label:
        y += 22
        parts.append(_text(8, y - 6, y_label))
    bottom = height - (44 if x_label else 26)
    top = min(y + 8, bottom - 40)
    if layout.x is None or layout.y is None:
        box = _Box(8, top, width - 16, bottom - top)
        parts.append(f'<path class="rg-axis" d="M{box.left} {_n(bottom)}h{box.width}"/>')
        parts.append(_text(width / 2, top + box.height / 2, "No data", anchor="middle"))
    else:
        y_ticks = layout.y_ticks(max(3, int((bottom - top) / 28)))
        left = 16 + max((_text_width(tick.label, 12) for tick in y_ticks), default=0)
        box = _Box(left, top, width - left - 16, bottom - top)
        parts += _axes(chart, layout, box, y_ticks, width)
        parts += _curves(chart, layout, box)
    if x_label:
        parts.append(_text(box.left + box.width / 2, height - 8, x_label, anchor="middle"))
    return "\n".join(filter(None, [*parts, "</svg>"]))


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


def _n(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> str:
    attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{_n(x)}" y="{_n(y)}"{attributes}>{_escape(text)}</text>'


def _number(value: float) -> str:
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:.3e}"


def _description(chart: Chart, layout: _Layout) -> str:
    """What the picture shows, for those who cannot see it."""
    said = [f"{one_line(chart.y_label)} against {one_line(chart.x_label)}."]
    for line, (_, rows) in zip(chart.lines, layout.lines, strict=True):
        y = rows[0][~np.isnan(rows[0])]
        said.append(f"{one_line(line.label)}: {y.size:,} {'point' if y.size == 1 else 'points'}")
        if y.size:
            first, last, least, most = map(_number, (y[0], y[-1], y.min(), y.max()))
            said[-1] += f", the first {first}, the last {last}, the least {least}, the greatest {most}"
        said[-1] += "."
    return " ".join(said)


def _legend(chart: Chart, layout: _Layout, width: int, y: float) -> tuple[list[str], float]:
    """Rows of swatches and labels above the plot, where no data is; and where they end. A lone line that is named as
    the axis needs none."""
    names = _names(chart)
    if not names or (len(names) == 1 and names[0] in ("", one_line(chart.y_label), one_line(chart.title))):
        return [], y
    parts: list[str] = []
    x, row, rows = 8.0, 0, 3
    shades = _shade(layout)
    room = width - 48 if len(names) <= rows else width / 2 - 48
    for number, name in enumerate(names):
        text = _shorten(name, room, 12)
        wide = 30 + _text_width(text, 12)
        if x > 8 and x + wide > width - 8:
            x, row = 8.0, row + 1
        # The last row keeps room to say how many are left out.
        if row == rows - 1 and number < len(names) - 1 and x + wide > width - 90:
            row += x == 8
            parts.append(_text(x, y + 20 * (rows - 1) + 16, f"and {len(names) - number} more"))
            break
        middle = y + 20 * row + 12
        parts.append("<g>" + (f"<title>{_escape(name)}</title>" if text != name else ""))
        if number < len(chart.lines):
            style, colour = chart.lines[number].style, number % len(_LIGHT)
            if style == "points":
                parts.append(
                    f'<path class="rg-dots rg-s{colour}" style="stroke-width:6" d="M{_n(x + 11)} {_n(middle)}h0"/>'
                )
            else:
                kind = "rg-line rg-dashed" if style == "dashed" else "rg-line"
                parts.append(f'<path class="{kind} rg-s{colour}" d="M{_n(x)} {_n(middle)}h22"/>')
        else:
            band = number - len(chart.lines)
            colour = _colour(chart, chart.bands[band]) % len(_LIGHT)
            parts.append(
                f'<rect class="rg-f{colour}" fill-opacity="{shades[band]:.2f}" x="{_n(x)}" y="{_n(middle - 6)}" '
                'width="22" height="12" rx="2"/>'
            )
        parts.append(_text(x + 28, middle + 4, text, "rg-ink") + "</g>")
        x += wide + 16
    return parts, y + 20 * min(row + 1, rows) + 2


def _axes(chart: Chart, layout: _Layout, box: _Box, y_ticks: Sequence[_Tick], width: int) -> Iterator[str]:
    assert layout.x is not None
    assert layout.y is not None
    bottom = box.top + box.height
    grid, marks = [], []
    for value, label in y_ticks:
        y = bottom - box.height * float(layout.y.place(np.float64(value)))
        grid.append(f"M{_n(box.left)} {_n(y)}h{_n(box.width)}")
        yield _text(box.left - 8, y + 4, label, "rg-tick", anchor="end")
    for middle, x, label in _x_labels(chart, layout, box, width):
        marks.append(f"M{_n(x)} {_n(bottom)}v5")
        yield _text(middle, bottom + 18, label, "rg-tick", anchor="middle")
    yield f'<path class="rg-grid" d="{"".join(grid)}"/>'
    yield f'<path class="rg-axis" d="M{_n(box.left)} {_n(bottom)}h{_n(box.width)}{"".join(marks)}"/>'


def _x_labels(chart: Chart, layout: _Layout, box: _Box, width: int) -> list[tuple[float, float, str]]:
    """Middle of the label, place of its tick, and label: as many as do not touch, each inside the drawing."""
    assert layout.x is not None
    for most in range(max(3, int(box.width / 60)), 2, -1):
        placed, end, touched = [], -math.inf, False
        for value, label in layout.x_ticks(chart, most):
            x = box.left + box.width * float(layout.x.place(np.float64(value)))
            if chart.x_ticks is not None:  # a number would be another one
                label = _shorten(label, width / 3, 12)
            half = _text_width(label, 12) / 2
            middle = min(max(x, half + 4), width - half - 4)
            if middle - half < end:
                touched = True
                continue
            end = middle + half + 14
            placed.append((middle, x, label))
        if not touched:
            break
    return placed


def _curves(chart: Chart, layout: _Layout, box: _Box) -> Iterator[str]:
    assert layout.x is not None
    assert layout.y is not None

    def pixels(data: _Data) -> tuple[_Floats, _Floats]:
        fit = ~np.isnan(data.y[0])
        x = np.full(data.x.shape, np.nan)
        y = np.full(data.y.shape, np.nan)
        x[fit] = box.left + box.width * layout.x.place(data.x[fit])  # type: ignore[union-attr]
        y[:, fit] = box.top + box.height * (1 - layout.y.place(data.y[:, fit]))  # type: ignore[union-attr]
        return x, y

    for band, data, shade in zip(chart.bands, layout.bands, _shade(layout), strict=True):
        colour = _colour(chart, band) % len(_LIGHT)
        path = "".join(_outline(x, low, high) for x, low, high in _band_runs(*pixels(data)))
        if path:
            yield (
                f'<path class="rg-f{colour} rg-s{colour}" fill-opacity="{shade:.2f}" stroke-opacity="{shade:.2f}" '
                f'd="{path}"><title>{_escape(one_line(band.label))}</title></path>'
            )
    for number, (line, data) in enumerate(zip(chart.lines, layout.lines, strict=True)):
        colour = number % len(_LIGHT)
        x, (y,) = pixels(data)
        named = f"<title>{_escape(one_line(line.label))}</title>"
        if line.style == "points":
            fit = ~np.isnan(y)
            spots = np.stack([x[fit], y[fit]], 1)
            if len(spots) > 2000:  # most would cover one another
                spots = np.unique(np.rint(spots / 2), axis=0) * 2
            size = 6 if len(spots) <= 150 else 4
        else:
            runs = list(_runs(x, y))
            path = "".join(_polyline(x, y) for x, y in runs if len(x) > 1)
            if path:
                kind = "rg-line rg-dashed" if line.style == "dashed" else "rg-line"
                kind += " rg-noisy" if _noisy(layout.y, data) else ""
                yield f'<path class="{kind} rg-s{colour}" d="{path}">{named}</path>'
            spots = np.array([(x[0], y[0]) for x, y in runs if len(x) == 1])
            size = 6 if len(spots) <= 10 else 4
        if len(spots):
            path = "".join(f"M{_n(x)} {_n(y)}h0" for x, y in spots)
            yield f'<path class="rg-dots rg-s{colour}" style="stroke-width:{size}" d="{path}">{named}</path>'


def _groups(x: _Floats, fit: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For the points that fit, the number of their group (neighbours in one pixel column) and of their run.

    A run ends at a point that does not fit, unless the next one that does is in the same column: nobody could see it.
    """
    index = np.flatnonzero(fit)
    column = np.floor(x[index]).astype(np.int64)
    moved = np.diff(column, prepend=-1) != 0
    broken = moved & (np.diff(index, prepend=-1) != 1)
    return np.cumsum(moved), np.cumsum(broken)


def _runs(x: _Floats, y: _Floats) -> Iterator[tuple[_Floats, _Floats]]:
    """Unbroken pieces of a line in pixels: of many points in a column, the first, least, greatest and last."""
    fit = ~np.isnan(y)
    if not fit.any():
        return
    group, run = _groups(x, fit)
    x, y = x[fit], y[fit]
    order = np.lexsort((y, group))
    ends = np.flatnonzero(np.diff(group, prepend=-1, append=-1))  # each group's start, and the end of all
    keep = np.unique(np.concatenate([ends[:-1], ends[1:] - 1, order[ends[:-1]], order[ends[1:] - 1]]))
    x, y, run = x[keep], y[keep], run[keep]
    pieces = np.flatnonzero(np.diff(run)) + 1
    yield from zip(np.split(x, pieces), np.split(y, pieces), strict=True)


def _band_runs(x: _Floats, y: _Floats) -> Iterator[tuple[_Floats, _Floats, _Floats]]:
    """Unbroken pieces of a band in pixels: of many points in a pixel column, the widest range."""
    fit = ~np.isnan(y[0])
    if not fit.any():
        return
    group, run = _groups(x, fit)
    x, y = x[fit], y[:, fit]
    start = np.flatnonzero(np.diff(group, prepend=-1))
    low, high = np.minimum.reduceat(y.min(0), start), np.maximum.reduceat(y.max(0), start)
    pieces = np.flatnonzero(np.diff(run[start])) + 1
    yield from zip(*(np.split(part, pieces) for part in (x[start], low, high)), strict=True)


def _polyline(x: _Floats, y: _Floats) -> str:
    return "M" + "L".join(f"{_n(a)} {_n(b)}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _outline(x: _Floats, low: _Floats, high: _Floats) -> str:
    return _polyline(np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])) + "Z"


def stacked_svg(charts: Sequence[Chart], width: int = 720, height: int = 360) -> str:
    """An SVG file of the charts below one another."""
    parts = [
        svg(chart, width, height).replace("<svg ", f'<svg y="{number * height}" ', 1)
        for number, chart in enumerate(charts)
    ]
    size = f'width="{width}" height="{height * len(parts)}" viewBox="0 0 {width} {height * len(parts)}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *parts, "</svg>"])


# ---- PNG -------------------------------------------------------------------------------------------------------------


def png(charts: Sequence[Chart]) -> bytes:
    """A PNG file of the charts below one another, drawn with matplotlib, 1200 by 600 pixels each, on white."""
    if not charts:
        raise ValueError("png: there is no chart to draw")
    matplotlib = importlib.import_module("matplotlib")
    figures = importlib.import_module("matplotlib.figure")
    # The user's own defaults, such as text by LaTeX, are for the user's own plots. Characters that the font lacks are
    # drawn as boxes, which needs no warning.
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()
        matplotlib.rcParams["text.parse_math"] = False  # a dollar sign is one
        figure = figures.Figure((8, 4 * len(charts)), dpi=150, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
        for chart, part in zip(charts, np.ravel(figure.subfigures(len(charts), 1)), strict=True):
            _draw(chart, part)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()


_PNG_LEGEND = 12  # entries: four rows of three


def _draw(chart: Chart, figure: Any) -> None:
    layout = _layout(chart)
    axes = figure.subplots()
    figure.suptitle(_shorten(one_line(chart.title), 550, _BOLD * 12), x=0.01, ha="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(_shorten(one_line(chart.x_label), 420, 10))
    axes.set_ylabel(_shorten(one_line(chart.y_label), 150, 10))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color="#e6e9ed")
    axes.set_axisbelow(True)
    if layout.x is None or layout.y is None:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "No data", ha="center", transform=axes.transAxes)
        return
    handles = []
    for line, data, number in zip(chart.lines, layout.lines, range(len(chart.lines)), strict=True):
        # A point between gaps is no line: it needs a marker to be seen.
        fit = np.pad(~np.isnan(data.y[0]), 1)
        lone = np.flatnonzero(fit[1:-1] & ~fit[:-2] & ~fit[2:])
        points = line.style == "points"
        (handle,) = axes.plot(
            data.x,
            data.y[0],
            color=_LIGHT[number % len(_LIGHT)],
            linestyle={"solid": "-", "dashed": "--", "points": "none"}[line.style],
            marker="o" if points or len(lone) else None,
            markevery=None if points else lone.tolist(),
            markersize=4,
            linewidth=0.9 if _noisy(layout.y, data) else 1.6,
        )
        handles.append(handle)
    for band, data, shade in zip(chart.bands, layout.bands, _shade(layout), strict=True):
        colour = _LIGHT[_colour(chart, band) % len(_LIGHT)]
        handles.append(axes.fill_between(data.x, *data.y, color=colour, alpha=shade, zorder=1))
    if layout.y.log:
        axes.set_yscale("log")
    axes.set_xlim(layout.x.low, layout.x.high)
    ends = (layout.y.low, layout.y.high)
    axes.set_ylim(*(10.0**end for end in ends) if layout.y.log else ends)
    axes.minorticks_off()
    for ticks, place in ((_x_ticks_png(chart, layout), axes.set_xticks), (layout.y_ticks(8), axes.set_yticks)):
        place([tick.value for tick in ticks], [tick.label for tick in ticks])
    names = _names(chart)
    if len(names) > _PNG_LEGEND:
        names = [*names[: _PNG_LEGEND - 1], f"{names[_PNG_LEGEND - 1]} … and {len(names) - _PNG_LEGEND} more"]
    names = [_shorten(name, 110, 9) for name in names]
    columns = len(names) if sum(_text_width(name, 9) + 40 for name in names) <= 500 else 3
    legend = axes.legend(
        handles[: len(names)],
        ["name"] * len(names),
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        frameon=False,
        fontsize=9,
    )
    # Names are set afterwards, since matplotlib leaves out those that begin with an underscore.
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)


def _x_ticks_png(chart: Chart, layout: _Layout) -> list[_Tick]:
    for most in range(10, 2, -1):
        ticks = [tick._replace(label=_shorten(tick.label, 150, 10)) for tick in layout.x_ticks(chart, most)]
        if sum(_text_width(tick.label, 10) + 12 for tick in ticks) <= 520:
            break
    return ticks
