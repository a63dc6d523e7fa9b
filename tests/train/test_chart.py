"""Charts: what the SVG says and shows, its colours, and that the PNG is a picture."""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd._printing import one_line, visible
from retrograd.train import chart as charts
from retrograd.train.chart import STYLE, Band, Chart, Line, png, stacked_svg, svg

pytest.importorskip("matplotlib")
any_text = st.text(st.characters(exclude_categories=()), max_size=30)


def drawn(chart: Chart, width: int = 720, height: int = 360) -> ET.Element:
    """The parsed drawing, its tags without the namespace."""
    root = ET.fromstring(svg(chart, width, height))
    for element in root.iter():
        element.tag = element.tag.removeprefix("{http://www.w3.org/2000/svg}")
    return root


def words(chart: Chart, width: int = 720) -> list[str]:
    return ["".join(text.itertext()) for text in drawn(chart, width).iter("text")]


def paths(root: ET.Element, role: str) -> list[str]:
    """The outlines of what has a colour, by its role."""
    return [path.attrib["d"] for path in root.iter("path") if f"var(--rg-{role}," in path.get("style", "")]


# ---- The drawing -----------------------------------------------------------------------------------------------------


def test_drawing_says_what_it_is() -> None:
    chart = Chart("Loss", "step", "bits", [Line("training", [1, 2, 3], [5, math.nan, 2.5]), Line("other", [1], [4])])
    root = drawn(chart)
    assert (root.tag, root.get("role"), root.get("aria-label")) == ("svg", "img", "Loss")
    assert {"Loss", "step", "bits", "training", "other"} <= set(words(chart))
    assert svg(chart) == svg(chart)


def test_inline_drawing_leaves_colours_to_the_page() -> None:
    inline = svg(Chart("t", "x", "y", [Line("l", [1], [1])]), standalone=False)
    assert "--rg-line0:" not in inline
    assert "--rg-line0:" in STYLE
    assert "var(--rg-line0, #0072b2)" in inline
    alone = svg(Chart("t", "x", "y", [Line("l", [1], [1])]))
    assert alone.startswith("<?xml")
    assert "--rg-line0:" in alone
    ET.fromstring(alone)
    assert "http:" not in inline


def test_no_two_charts_of_a_page_share_ids() -> None:
    found: set[str] = set()
    for title in ("one", "two"):
        for width in (720, 340):
            ids = set(re.findall(r'\bid="([^"]+)"', svg(Chart(title, "x", "y", [Line("l", [1, 2], [1, 3])]), width)))
            assert ids
            assert not ids & found
            found |= ids


def test_a_line_falls_where_its_values_fall() -> None:
    root = drawn(Chart("t", "x", "y", [Line("l", [0, 1, 2, 3], [9, 5, math.nan, 1])]))
    path = max(paths(root, "line0"), key=lambda path: path.count("L"))
    moves = re.findall(r"([ML]) (-?[\d.]+) (-?[\d.]+)", path)
    assert [kind for kind, *_ in moves][:2] == ["M", "L"]
    (x0, y0), (x1, y1) = ((float(x), float(y)) for _, x, y in moves[:2])
    assert x0 < x1
    assert y0 < y1  # down the page


def test_bands_are_shaded_in_the_colour_of_their_line() -> None:
    lines = [Line("a", [0, 1], [0, 1]), Line("b", [0, 1], [1, 2])]
    root = drawn(Chart("t", "x", "y", lines, [Band("80 %", [0, 1], [0, 1], [2, 3], line=1)]))
    shaded = [path for path in root.iter("path") if "opacity: 0.2" in path.get("style", "")]
    assert shaded
    assert all("line1" in path.get("style", "") or path.get("d") for path in shaded)
    assert "80 %" in words(Chart("t", "x", "y", lines, [Band("80 %", [0, 1], [0, 1], [2, 3], line=1)]))


@pytest.mark.parametrize(
    ("first", "unit", "count", "expected"),
    [("1949-01", "M", 144, "1952"), ("2020-01-01", "D", 60, "Feb"), ("2020-01-01T00", "h", 48, "12:00")],
)
def test_ticks_stand_at_natural_dates(first: str, unit: str, count: int, expected: str) -> None:
    x = (np.datetime64(first, unit) + np.arange(count)).astype("datetime64[us]")
    assert expected in words(Chart("t", "x", "y", [Line("l", x, np.arange(count))]))


def test_steps_are_whole_and_thousands_are_grouped() -> None:
    said = words(Chart("t", "x", "y", [Line("l", [1, 2, 3], [10_000, 20_000, 30_000])]))
    assert {"1", "2", "3", "20,000"} <= set(said)
    assert "1.5" not in said


@pytest.mark.parametrize(
    "lines",
    [[], [Line("l", [], [])], [Line("l", [1, 2], [math.nan, math.inf])], [Line("l", [1], [1])],
     [Line("l", [1, 2], [3, 3])], [Line("l", [1, 2], [1e300, -1e300])], [Line("l", [1, 2], [3, 4], "points")]],
)  # fmt: skip
@pytest.mark.parametrize("log_y", [False, True])
def test_any_values_make_a_picture(lines: list[Line], log_y: bool) -> None:
    chart = Chart("t", "x", "y", lines, log_y=log_y)
    empty = not any(
        np.isfinite(np.where(np.abs(np.asarray(line.y, float)) < 1e300, line.y, np.nan)).any() for line in lines
    )
    assert ("no data" in words(chart)) == empty
    assert png([chart])


@settings(deadline=None, max_examples=25)
@given(any_text, any_text, any_text)
def test_any_text_is_text(title: str, axis: str, label: str) -> None:
    root = drawn(Chart(title, axis, axis, [Line(label, [1, 2], [1, 2]), Line("other", [1, 2], [2, 1])]))
    assert not list(root.iter("script"))
    assert root.get("aria-label") == " ".join(visible(one_line(title)).split()) or root.get("aria-label") is not None


def test_charts_in_one_svg_file_lie_below_one_another() -> None:
    root = ET.fromstring(stacked_svg([Chart("one", "x", "y", []), Chart("two", "x", "y", [])], 720, 360))
    assert root.get("viewBox") == "0 0 540 540"  # points: three quarters of a pixel
    said = "".join(root.itertext())
    assert said.index("one") < said.index("two")


def test_png_is_a_picture_of_the_charts() -> None:
    image = pytest.importorskip("matplotlib.image")
    chart = Chart("t", "x", "y", [Line("l", [0, 1], [0, 1])])
    pixels = image.imread(io.BytesIO(png([chart, chart])))
    assert pixels.shape[:2] == (1200, 1200)
    blue = (np.abs(pixels[..., :3] * 255 - [0, 0x72, 0xB2]) < 4).all(-1)
    rows, columns = np.nonzero(blue[:600])
    assert columns.max() - columns.min() > 800
    assert rows.max() - rows.min() > 300
    assert blue[600:].sum() == pytest.approx(blue[:600].sum(), rel=0.05)


# ---- Text and colours ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("a\r\nb\rc", "a\nb␍c"),
        ("\x00\x1b[31m\x7f", "␀␛[31m␡"),
        ("\x85\x9b", "��"),
        ("\ud800x\udfff", "�x�"),
        ("\ufffe\uffff", "��"),
        ("\u202eabc\u2066", "�abc�"),
        ("שלום 你好 👩‍👩‍👧", "שלום 你好 👩‍👩‍👧"),
    ],
)
def test_what_cannot_be_seen_is_made_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(any_text)
def test_visible_text_can_be_written(text: str) -> None:
    shown = visible(text)
    shown.encode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert visible(shown) == shown
    assert len(one_line(text).splitlines()) <= 1


# Machado, Oliveira and Fernandes 2009: how colours look without one kind of cone, on linear RGB.
EYES = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def linear(colour: str) -> Any:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: Any) -> Any:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    f = np.cbrt(xyz / [0.95047, 1, 1.08883])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(("colours", "paper"), [(charts._LIGHT, "#ffffff"), (charts._DARK, "#171b20")])
def test_colours_stand_out_for_all_eyes(colours: dict[str, str], paper: str) -> None:
    assert colours["paper"] == paper
    assert paper in STYLE
    lines = [colours[f"line{number}"] for number in range(4)]
    bright = [float(linear(colour) @ [0.2126, 0.7152, 0.0722]) + 0.05 for colour in (paper, *lines)]
    assert min(max(b, bright[0]) / min(b, bright[0]) for b in bright[1:]) >= 3  # WCAG's contrast of graphics
    for matrix in EYES.values():
        seen = [lab(np.asarray(matrix) @ linear(colour)) for colour in lines]
        apart = [float(np.linalg.norm(a - b)) for i, a in enumerate(seen) for b in seen[:i]]
        assert min(apart) > 8


def test_refusals_name_both_numbers() -> None:
    with pytest.raises(ValueError, match="'l' has 2 x, but 1 y"):
        Line("l", [1, 2], [1])
    with pytest.raises(ValueError, match="'b' has 1 x, but 2 low and 1 high"):
        Band("b", [1], [1, 2], [1])
    with pytest.raises(ValueError, match="the style 'dotted'"):
        Line("l", [1], [1], "dotted")  # type: ignore[arg-type]
