"""Drawings: marks and one style sheet, written as SVG or, with matplotlib, as PNG."""

from __future__ import annotations

import html
import importlib
import io
import re
import warnings
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["DARK", "LIGHT", "STYLE", "Corners", "Drawing", "Group", "Mark", "Shape", "Text", "to_png", "to_svg"]

Corners = npt.NDArray[np.float64]  # [n, 2]: x to the right, y down


class Text(NamedTuple):
    """A line of text."""

    x: float
    y: float  # of the baseline
    text: str
    classes: str = ""
    anchor: Literal["start", "middle", "end"] = "start"  # the part of the text that is at x


class Shape(NamedTuple):
    """Polylines of one style, or polygons if they are closed. A polyline with a single corner is a dot."""

    classes: str
    pieces: Sequence[Corners]
    closed: bool = False
    opacity: float = 1.0
    width: float | None = None  # of the stroke; None: from the style sheet
    title: str = ""  # a tooltip


class Group(NamedTuple):
    """Marks that share a tooltip."""

    marks: Sequence[Text | Shape]
    title: str


Mark = Text | Shape | Group


class Drawing(NamedTuple):
    """Marks, the later ones on top. Units are pixels in SVG, points in matplotlib."""

    title: str
    description: str  # for screen readers
    width: int
    height: int
    marks: Sequence[Mark]


# ---- Style -----------------------------------------------------------------------------------------------------------

# Blue, vermilion and green of Okabe and Ito, then purple, brown (or straw) and grey. They also differ in lightness, so
# that colour-blind readers can distinguish them.
LIGHT: Final = ("#0072b2", "#d55e00", "#12a06e", "#6b1a66", "#55400a", "#8a8f98")
DARK: Final = ("#56b4e9", "#f58b45", "#7ff0c0", "#b4619b", "#e8dc8a", "#d5dfee")


def _colours(series: Sequence[str], paper: str, ink: str, muted: str, grid: str, axis: str) -> str:
    return (
        f".rg-paper{{fill:{paper}}}.rg-chart text{{fill:{muted}}}.rg-chart .rg-ink{{fill:{ink}}}"
        f".rg-grid{{stroke:{grid}}}.rg-axis{{stroke:{axis}}}"
    ) + "".join(f".rg-s{i}{{stroke:{colour}}}.rg-f{i}{{fill:{colour}}}" for i, colour in enumerate(series))


# `_resolve` reads these rules too, so each ends in one class or element, and properties have their long names.
_LIGHT_STYLE: Final = (
    ".rg-chart text{font-family:system-ui,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}"
    ".rg-chart text{font-size:12px;font-weight:400;stroke:none}"
    ".rg-chart .rg-title{font-size:15px;font-weight:600}"
    ".rg-chart .rg-tick{font-variant-numeric:tabular-nums}"
    ".rg-line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}"
    ".rg-dots{fill:none;stroke-linecap:round}"
    ".rg-dashed{stroke-dasharray:7 5;stroke-linecap:butt}"
    ".rg-noisy{stroke-width:1.2}"
    ".rg-grid{fill:none;stroke-width:1;shape-rendering:crispEdges}"
    ".rg-axis{fill:none;stroke-width:1;shape-rendering:crispEdges}"
) + _colours(LIGHT, "#ffffff", "#1b2129", "#55606c", "#e6e9ed", "#9aa3ad")

#: The style sheet of all drawings: once per page, and in every SVG file. Print is always light.
STYLE: Final = (
    ".rg-chart{display:block;max-width:100%;height:auto}"
    + _LIGHT_STYLE
    + "@media screen and (prefers-color-scheme:dark){"
    + _colours(DARK, "#171b20", "#e8ebef", "#a3adb8", "#2a3038", "#5d6772")
    + "}"
)


def _resolve(mark: Text | Shape) -> dict[str, str]:
    """Return the light-mode properties of a mark. Later rules override earlier ones, as in CSS."""
    selectors = {f".{name}" for name in mark.classes.split()} | ({"text"} if isinstance(mark, Text) else set())
    found: dict[str, str] = {}
    for selector, properties in re.findall(r"([^\s{}]+){([^{}]*)}", _LIGHT_STYLE):
        if selector in selectors:
            found.update(re.findall(r"([\w-]+):([^;]+)", properties))
    return found


# ---- SVG -------------------------------------------------------------------------------------------------------------


def to_svg(drawing: Drawing, *, standalone: bool) -> str:
    """Return an ``<svg>`` element. A standalone one includes namespace and style; others need `STYLE` in the page."""
    title, size = _escape(drawing.title), f'width="{drawing.width}" height="{drawing.height}"'
    head = f'<svg class="rg-chart" role="img" aria-label="{title}" viewBox="0 0 {drawing.width} {drawing.height}"'
    return "\n".join(
        [
            f'{head} xmlns="http://www.w3.org/2000/svg" {size}>' if standalone else f"{head}>",
            f"<title>{title}</title><desc>{_escape(drawing.description)}</desc>",
            *([f"<style>{STYLE}</style>"] if standalone else []),
            f'<rect class="rg-paper" {size}/>',
            *map(_element, drawing.marks),
            "</svg>",
        ]
    )


def _element(mark: Mark) -> str:
    if isinstance(mark, Text):
        attributes = (f' class="{mark.classes}"' if mark.classes else "") + (
            f' text-anchor="{mark.anchor}"' if mark.anchor != "start" else ""
        )
        return f'<text x="{_number(mark.x)}" y="{_number(mark.y)}"{attributes}>{_escape(mark.text)}</text>'
    title = f"<title>{_escape(mark.title)}</title>" if mark.title else ""
    if isinstance(mark, Group):
        return f"<g>{title}{''.join(map(_element, mark.marks))}</g>"
    opacity = f' fill-opacity="{mark.opacity:.2f}" stroke-opacity="{mark.opacity:.2f}"' if mark.opacity < 1 else ""
    width = f' style="stroke-width:{mark.width:g}"' if mark.width else ""
    path = "".join(
        "M"
        + "L".join(f"{_number(x)} {_number(y)}" for x, y in piece.tolist())
        + ("Z" if mark.closed else "h0" if len(piece) == 1 else "")
        for piece in mark.pieces
    )
    return f'<path class="{mark.classes}"{opacity}{width} d="{path}">{title}</path>'


def _number(value: float) -> str:
    """Format a coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


# ---- PNG -------------------------------------------------------------------------------------------------------------

_SCALE: Final = 5 / 3  # pixels per unit


def to_png(drawings: Sequence[Drawing]) -> bytes:
    """Return a PNG file of the drawings, stacked vertically, in the light style."""
    matplotlib = importlib.import_module("matplotlib")
    figures = importlib.import_module("matplotlib.figure")
    transforms = importlib.import_module("matplotlib.transforms")
    width, height = max(drawing.width for drawing in drawings), sum(drawing.height for drawing in drawings)
    # The user's defaults, such as LaTeX text, must not apply here. Characters missing in the font are drawn as boxes,
    # without a warning.
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()
        # A dollar sign is plain text, and dashes are absolute lengths, not multiples of the line width.
        matplotlib.rcParams.update({"text.parse_math": False, "lines.scale_dashes": False})
        figure = figures.Figure((width / 72, height / 72), dpi=72 * _SCALE)  # a point is a 72nd of an inch
        top = 0
        for drawing in drawings:
            to_pixels = transforms.Affine2D().scale(_SCALE, -_SCALE).translate(0, _SCALE * (height - top))
            for mark in drawing.marks:
                _paint(mark, figure, to_pixels)
            top += drawing.height
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()


def _paint(mark: Mark, figure: Any, to_pixels: Any) -> None:
    if isinstance(mark, Group):
        for part in mark.marks:
            _paint(part, figure, to_pixels)
        return
    style = _resolve(mark)
    if isinstance(mark, Text):
        figure.text(
            mark.x,
            mark.y,
            mark.text,
            transform=to_pixels,
            color=style["fill"],
            size=float(style["font-size"].removesuffix("px")),
            weight="bold" if style["font-weight"] == "600" else "normal",  # matplotlib's font has no others
            ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor],
        )
        return
    path = importlib.import_module("matplotlib.path").Path
    outlines = []
    for piece in mark.pieces:
        # A polygon returns to its first corner. A dot gets a small length, or its round caps would not be drawn.
        end = piece[:1] if mark.closed else piece[:1] + np.array([0.01, 0]) if len(piece) == 1 else piece[:0]
        outlines.append(path(np.concatenate([piece, end]), closed=mark.closed))
    dashes = [float(length) for length in style.get("stroke-dasharray", "").split()]
    crisp = style.get("shape-rendering") == "crispEdges"
    figure.add_artist(
        importlib.import_module("matplotlib.patches").PathPatch(
            path.make_compound_path(*outlines),
            transform=to_pixels,
            facecolor=style["fill"],
            edgecolor=style.get("stroke", "none"),
            alpha=mark.opacity,
            linewidth=mark.width or float(style.get("stroke-width", 1)),
            linestyle=(0, dashes) if dashes else "solid",
            capstyle=style.get("stroke-linecap", "butt"),
            joinstyle=style.get("stroke-linejoin", "miter"),
            antialiased=not crisp,
            snap=crisp,
        )
    )
