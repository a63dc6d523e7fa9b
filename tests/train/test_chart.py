"""Charts: what stands where in the SVG, what its axes say, and that the PNG is a picture."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.train import drawing
from retrograd.train.chart import Band, Chart, Line, one_line, png, stacked_svg, svg, visible

NUMBER = r"(-?\d+(?:\.\d+)?)"
any_text = st.text(st.characters(exclude_categories=()), max_size=30)


def drawn(chart: Chart, width: int = 720, height: int = 360) -> ET.Element:
    """The parsed drawing, its tags without the namespace."""
    root = ET.fromstring(svg(chart, width, height))
    for element in root.iter():
        element.tag = element.tag.removeprefix("{http://www.w3.org/2000/svg}")
    return root


def paths(root: ET.Element, label: str) -> list[ET.Element]:
    return [path for path in root.iter("path") if path.findtext("title") == label]


def corners(path: ET.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(rf"[ML]{NUMBER} {NUMBER}", path.attrib["d"])]


def curve(root: ET.Element, label: str) -> list[tuple[float, float]]:
    (path,) = paths(root, label)
    return corners(path)


def ticks(root: ET.Element, axis: str) -> dict[str, float]:
    """Labels and pixels of the ticks of an axis. A label's base line is 4 below the middle of its letters."""
    anchor, at, down = ("end", "y", 4) if axis == "y" else ("middle", "x", 0)
    found = [text for text in root.iter("text") if text.get("class") == "rg-tick" and text.get("text-anchor") == anchor]
    return {text.text or "": float(text.attrib[at]) - down for text in found}


def value(label: str) -> float:
    """The number that a label says."""
    label = label.replace(",", "").replace("−", "-")
    factor, _, power = label.rpartition("×10") if "×" in label else ("1", "", label.removeprefix("10"))
    if not re.search("[⁰¹²³⁴⁵⁶⁷⁸⁹]", label):
        return float(label)
    exponent = power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    return float(f"{factor}e{exponent}")


def y_labels(*y: float, log_y: bool = False) -> list[str]:
    return list(ticks(drawn(Chart("t", "x", "y", [Line("l", range(len(y)), y)], log_y=log_y)), "y"))


# ---- The drawing -----------------------------------------------------------------------------------------------------


def test_drawing_says_what_it_is() -> None:
    root = drawn(Chart("Loss", "step", "bits", [Line("training", [1, 2, 3], [5, math.nan, 2.5])]))
    assert (root.tag, root.get("role"), root.get("aria-label"), root.findtext("title")) == (
        "svg",
        "img",
        "Loss",
        "Loss",
    )
    assert root.findtext("desc") == (
        "bits against step. training: 2 points, first 5, last 2.5, minimum 2.5, maximum 5."
    )
    assert root.get("viewBox") == "0 0 720 360"
    assert {"Loss", "step", "bits", "training"} <= {text.text for text in root.iter("text")}


def test_inline_drawing_leaves_namespace_and_style_to_the_page() -> None:
    inline = svg(Chart("t", "x", "y", [Line("l", [1], [1])]), standalone=False)
    assert "xmlns" not in inline
    assert "<style" not in inline
    ET.fromstring(inline)


@pytest.mark.parametrize("log_y", [False, True])
def test_points_stand_where_the_ticks_say(log_y: bool) -> None:
    x = [0.0, 250.0, 300.0, 875.0, 1000.0]
    y = [0.02, 7.0, 3.0, 90.0, 41.0]
    root = drawn(Chart("t", "x", "y", [Line("l", x, y)], log_y=log_y))
    scale = math.log10 if log_y else float
    # Labels at the ends of x may be moved inwards; those between are where their ticks are.
    for axis, values, pixels, of in (
        ("x", x, [p[0] for p in curve(root, "l")], float),
        ("y", y, [p[1] for p in curve(root, "l")], scale),
    ):
        places = list(ticks(root, axis).items())[1:-1]
        assert len(places) >= 2
        slope, start = np.polyfit([of(value(label)) for label, _ in places], [pixel for _, pixel in places], 1)
        np.testing.assert_allclose(pixels, [slope * of(v) + start for v in values], atol=0.25)
    assert [p[0] for p in curve(root, "l")] == sorted(p[0] for p in curve(root, "l"))
    assert list(np.argsort([-p[1] for p in curve(root, "l")])) == list(np.argsort(y))


@given(
    st.lists(st.tuples(st.floats(), st.floats()), max_size=40),
    st.lists(st.tuples(st.floats(), st.floats(), st.floats()), max_size=10),
    st.booleans(),
    st.sampled_from(["solid", "dashed", "points"]),
    st.sampled_from([(720, 360), (340, 310), (200, 160)]),
)
@settings(deadline=None)
def test_everything_stays_inside(
    points: list[tuple[float, float]],
    ranges: list[tuple[float, float, float]],
    log_y: bool,
    style: Any,
    size: tuple[int, int],
) -> None:
    line = Line("l", [x for x, _ in points], [y for _, y in points], style)
    band = Band("b", *([part[i] for part in ranges] for i in range(3)))
    root = drawn(Chart("t", "x", "y", [line], [band], log_y=log_y), *size)
    shown = any(abs(x) <= 1e300 and abs(y) <= 1e300 and (not log_y or y >= 1e-300) for x, y in points)
    assert bool(paths(root, "l")) == shown
    for path in root.iter("path"):
        for x, y in corners(path):
            assert 0 <= x <= size[0]
            assert 0 <= y <= size[1]
    for text in root.iter("text"):
        assert 0 <= float(text.attrib["x"]) <= size[0]
        assert 0 <= float(text.attrib["y"]) <= size[1]
    if shown:
        for axis in "xy":
            places = list(ticks(root, axis).items())
            assert 1 <= len(places) <= 16
            numbers = [value(label) for label, _ in places]
            assert numbers == sorted(set(numbers))


@given(any_text, any_text, any_text, any_text)
@settings(deadline=None)
def test_any_text_is_text(title: str, axis: str, label: str, tick: str) -> None:
    chart = Chart(title, axis, axis, [Line(label, [0, 1], [0, 1])], [Band(label, [0], [0], [1])], x_ticks=[(0, tick)])
    root = drawn(chart, 340, 310)
    assert root.get("aria-label") == one_line(title)
    assert {element.tag for element in root.iter()} <= {"svg", "title", "desc", "style", "rect", "text", "path", "g"}


def test_line_breaks_at_what_is_no_number() -> None:
    y = [1.0, 2.0, math.nan, 3.0, 2.0, math.inf, 5.0, -math.inf, 1.0, 1.5]
    root = drawn(Chart("t", "x", "y", [Line("l", range(10), y)]))
    line, dots = paths(root, "l")
    assert line.attrib["d"].count("M") == 3
    assert len(corners(line)) == 6
    assert len(corners(dots)) == 1  # the 5 has no neighbour
    assert "rg-dots" in dots.attrib["class"]


def test_logarithm_breaks_at_zero() -> None:
    (path,) = paths(drawn(Chart("t", "x", "y", [Line("l", range(5), [10, 1, 0, 1, 10])], log_y=True)), "l")
    assert path.attrib["d"].count("M") == 2


@pytest.mark.parametrize(
    "lines", [[], [Line("l", [], [])], [Line("l", [1, 2], [math.nan, math.inf])], [Line("l", [math.nan], [1])]]
)
def test_nothing_to_show(lines: list[Line]) -> None:
    root = drawn(Chart("t", "x", "y", lines))
    assert "No data" in [text.text for text in root.iter("text")]
    assert not paths(root, "l")


def test_one_point_is_in_the_middle() -> None:
    ((x, y),) = curve(drawn(Chart("t", "step", "y", [Line("l", [10], [2.5])])), "l")
    root = drawn(Chart("t", "step", "y", [Line("l", [10], [2.5])]))
    assert ticks(root, "x")["10"] == pytest.approx(x)
    assert ticks(root, "y")["2.5"] == pytest.approx(y, abs=0.1)


def test_equal_values_are_a_level_line() -> None:
    root = drawn(Chart("t", "x", "y", [Line("l", [1, 2, 3], [7, 7, 7])]))
    assert len({y for _, y in curve(root, "l")}) == 1
    assert len(ticks(root, "y")) >= 3


def test_many_points_are_thinned_and_extremes_stay() -> None:
    count = 100_000
    y = np.sin(np.arange(count) / 3000)
    y[70_001], y[20_002] = 9, -4
    chart = Chart("t", "x", "y", [Line("l", np.arange(count), y)], [Band("b", np.arange(count), y - 1, y + 1)])
    root = drawn(chart)
    assert len(svg(chart)) < 80_000
    place = ticks(root, "y")
    pixels = [y for _, y in curve(root, "l")]
    unit = (place["0"] - place["10"]) / 10
    assert min(pixels) == pytest.approx(place["0"] - 9 * unit, abs=0.3)
    assert max(pixels) == pytest.approx(place["0"] + 4 * unit, abs=0.3)
    assert min(y for _, y in curve(root, "b")) == pytest.approx(place["0"] - 10 * unit, abs=0.3)
    assert max(y for _, y in curve(root, "b")) == pytest.approx(place["0"] + 5 * unit, abs=0.3)


def test_many_gaps_and_many_points_do_not_fill_the_file() -> None:
    y = np.random.default_rng(0).standard_normal(100_000)
    dots = Chart("t", "x", "y", [Line("l", range(y.size), np.where(np.arange(y.size) % 3 == 0, np.nan, y))])
    assert len(svg(dots)) < 80_000
    assert len(svg(Chart("t", "x", "y", [Line("l", range(y.size), y, "points")]))) < 250_000


def test_noise_is_thin() -> None:
    noise = np.random.default_rng(0).standard_normal(500)
    root = drawn(Chart("t", "x", "y", [Line("noise", range(500), noise), Line("calm", range(500), np.sort(noise))]))
    assert "rg-noisy" in paths(root, "noise")[0].attrib["class"]
    assert "rg-noisy" not in paths(root, "calm")[0].attrib["class"]


def test_bands_lie_under_the_lines_and_narrow_ones_are_darker() -> None:
    x = [0, 1, 2]
    wide, narrow = Band("90 %", x, [-3, -3, -3], [3, 3, 3], line=0), Band("50 %", x, [-1, -1, -1], [1, 1, 1])
    root = drawn(Chart("t", "x", "y", [Line("a", x, x), Line("b", x, x)], [wide, narrow]))
    shown = [path for path in root.iter("path") if path.find("title") is not None]
    assert [path.findtext("title") for path in shown] == ["90 %", "50 %", "a", "b"]
    opacity = [float(path.attrib["fill-opacity"]) for path in shown[:2]]
    assert opacity[0] < opacity[1]
    assert [path.attrib["class"] for path in shown[:2]] == ["rg-f0 rg-s0", "rg-f1 rg-s1"]
    assert shown[0].attrib["d"].endswith("Z")


def test_band_of_one_point_is_a_stroke() -> None:
    root = drawn(Chart("t", "x", "y", [], [Band("b", [1], [2], [3])]))
    ((x0, y0), (x1, y1)) = curve(root, "b")
    assert x0 == x1 == pytest.approx(ticks(root, "x")["1"])
    assert {y0, y1} == {ticks(root, "y")["2.0"], ticks(root, "y")["3.0"]}


# ---- Axes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0, 10_000), ["0", "2,000", "4,000", "6,000", "8,000", "10,000"]),
        ((-5, 5), ["−4", "−2", "0", "2", "4"]),
        ((0.1, 0.35), ["0.10", "0.15", "0.20", "0.25", "0.30", "0.35"]),
        ((0, 3e-9), ["0", "0.5×10⁻⁹", "1.0×10⁻⁹", "1.5×10⁻⁹", "2.0×10⁻⁹", "2.5×10⁻⁹", "3.0×10⁻⁹"]),
        ((0, 4e200), ["0", "1×10²⁰⁰", "2×10²⁰⁰", "3×10²⁰⁰", "4×10²⁰⁰"]),
    ],
)
def test_labels_are_round(values: tuple[float, ...], labels: list[str]) -> None:
    assert y_labels(*values) == labels


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0.001, 1000), ["0.001", "0.01", "0.1", "1", "10", "100", "1,000"]),
        ((1, 20), ["1", "2", "5", "10", "20"]),
        ((3, 4), ["3.0", "3.2", "3.4", "3.6", "3.8", "4.0"]),
        ((1e-9, 1), ["10⁻⁸", "10⁻⁶", "10⁻⁴", "10⁻²", "10⁰"]),
    ],
)
def test_logarithmic_labels(values: tuple[float, ...], labels: list[str]) -> None:
    assert y_labels(*values, log_y=True) == labels


def test_axis_ends_at_zero_where_nothing_is_below() -> None:
    root = drawn(Chart("t", "x", "y", [Line("l", [0, 1], [0.01, 5])]))
    (axis,) = (path for path in root.iter("path") if path.get("class") == "rg-axis")
    assert ticks(root, "y")["0"] == pytest.approx(corners(axis)[0][1], abs=0.1)


def test_steps_are_whole() -> None:
    assert list(ticks(drawn(Chart("t", "step", "y", [Line("l", [1, 2, 3], [1, 2, 3])])), "x")) == ["1", "2", "3"]


@pytest.mark.parametrize("width", [340, 720, 1600])
def test_given_labels_do_not_touch(width: int) -> None:
    days = [(float(day), f"2024-01-{day:02d}") for day in range(31, 0, -1)]
    chart = Chart("t", "", "y", [Line("l", range(5, 25), range(20))], x_ticks=[(99, "outside"), *days])
    placed = ticks(drawn(chart, width), "x")
    assert 2 <= len(placed) <= 20
    assert set(placed) <= {f"2024-01-{day:02d}" for day in range(5, 25)}
    gaps = np.diff(list(placed.values()))
    assert (gaps > 6.5 * 10).all()  # ten characters of some 6.5 pixels
    assert min(placed.values()) > 30
    assert max(placed.values()) < width - 30


def test_long_given_labels_are_cut() -> None:
    chart = Chart("t", "", "y", [Line("l", [0, 1], [0, 1])], x_ticks=[(0, "a" * 500), (1, "b" * 500)])
    assert all(label.endswith("…") and len(label) < 60 for label in ticks(drawn(chart), "x"))


# ---- Legend ----------------------------------------------------------------------------------------------------------


def legend(root: ET.Element) -> list[ET.Element]:
    return [text for group in root.iter("g") for text in group.iter("text")]


def test_legend_is_above_the_data() -> None:
    root = drawn(
        Chart("t", "x", "y", [Line(f"line {i}", [0, 1], [i, i]) for i in range(5)], [Band("b", [0], [9], [10])])
    )
    assert [text.text for text in legend(root)] == [*(f"line {i}" for i in range(5)), "b"]
    top = min(y for path in root.iter("path") if path.find("title") is not None for _, y in corners(path))
    assert max(float(text.attrib["y"]) for text in legend(root)) < top


def test_lone_line_named_as_its_axis_needs_no_legend() -> None:
    assert not legend(drawn(Chart("t", "x", "loss", [Line("loss", [0, 1], [0, 1])])))
    assert legend(drawn(Chart("t", "x", "loss", [Line("training", [0, 1], [0, 1])])))


@pytest.mark.parametrize("width", [340, 720])
def test_long_legend_says_how_much_is_missing(width: int) -> None:
    names = [f"a rather long name of line {i}" for i in range(40)]
    root = drawn(Chart("t", "x", "y", [Line(name, [0, 1], [i, i]) for i, name in enumerate(names)]), width)
    (rest,) = (text.text for text in root.iter("text") if re.fullmatch(r"and \d+ more", text.text or ""))
    assert len(legend(root)) + int((rest or "").split()[1]) == 40
    assert len(legend(root)) >= 3


@pytest.mark.parametrize("length", range(1, 16))
def test_legend_ends_above_the_axis_label(length: int) -> None:
    lines = [Line(name, [0, 1], [0, 1]) for name in ["n" * length] * 8 + ["m" * 40]]  # the last may not fit in a row
    root = drawn(Chart("t", "x", "y", lines), 340)
    (label,) = (float(text.attrib["y"]) for text in root.iter("text") if text.text == "y")
    assert max(float(text.attrib["y"]) for text in legend(root)) < label - 12


def test_long_names_are_cut_and_told_in_full() -> None:
    root = drawn(Chart("word " * 200, "x" * 500, "y" * 500, [Line("name " * 100, [0, 1], [0, 1])]))
    (entry,) = (group for group in root.iter("g"))
    assert entry.findtext("title") == " ".join(["name"] * 100)
    for text in root.iter("text"):
        assert len(text.text or "") < 150
    assert sum((text.text or "").endswith("…") for text in root.iter("text")) == 4


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


@pytest.mark.parametrize(("colours", "paper"), [(drawing.LIGHT, "#ffffff"), (drawing.DARK, "#171b20")])
def test_colours_stand_out_for_all_eyes(colours: tuple[str, ...], paper: str) -> None:
    assert paper in drawing.STYLE
    bright = [float(linear(colour) @ [0.2126, 0.7152, 0.0722]) + 0.05 for colour in (paper, *colours)]
    assert min(max(b, bright[0]) / min(b, bright[0]) for b in bright[1:]) >= 3  # WCAG's contrast of graphics
    for matrix in EYES.values():
        seen = [lab(np.asarray(matrix) @ linear(colour)) for colour in colours]
        assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) > 15


# ---- Refusals --------------------------------------------------------------------------------------------------------


def test_refusals_name_both_numbers() -> None:
    with pytest.raises(ValueError, match="Line: 'l' has 2 x, but 3 y"):
        Line("l", [1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="style 'dotted', but it is solid, dashed or points"):
        Line("l", [], [], "dotted")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Band: 'b' has 1 x, but 2 low and 1 high"):
        Band("b", [1], [1, 2], [1])
    with pytest.raises(ValueError, match="at least 200 by 160, but width is 100 and height is 360"):
        svg(Chart("t", "x", "y", []), 100)


# ---- PNG -------------------------------------------------------------------------------------------------------------

CURVES = Chart(
    "Loss",
    "step",
    "bits per character",
    [Line("training", range(200), np.linspace(5, 2, 200)), Line("validation", [50, 100, 150], [4, 3.4, 3], "points")],
    [Band("range", [20, 180], [1, 1], [2, 4])],
)


def picture(path: Path) -> Any:
    """The pixels of a PNG, from 0 to 255."""
    image = pytest.importorskip("matplotlib.image").imread(path, format="png")
    return np.rint(image[..., :3] * 255).astype(int)


def has(pixels: Any, colour: str) -> Any:
    """Where a picture has the colour."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return (np.abs(pixels - wanted) <= 3).all(-1)


def test_png_is_a_picture_of_the_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves"
    path.write_bytes(png([CURVES, Chart("Nothing", "x", "y", [])]))
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = picture(path)
    assert pixels.shape == (1200, 1200, 3)
    blue = has(pixels, drawing.LIGHT[0])
    columns = np.flatnonzero(blue.any(0))
    assert columns.min() < 200
    assert columns.max() > 1100
    assert not blue[600:].any()
    assert (pixels[600:] < 128).any()  # the title
    # The line falls from left to right.
    rows = [float(np.flatnonzero(blue[150:, x]).mean()) for x in (300, 600, 900)]
    assert rows == sorted(rows)
    assert has(pixels, drawing.LIGHT[1]).sum() > 100


def test_png_shows_what_the_svg_says(tmp_path: Path) -> None:
    """Each mark is painted where the SVG has it, at 5 / 3 of the size."""
    x = [0, 10, 20]
    chart = Chart(
        "Title",
        "step",
        "loss",
        [
            Line("solid", x, [0, 10, 0]),
            Line("points", x, [9, 3, 9], "points"),
            Line("dashed", x, [8, 8, 8], "dashed"),
            Line("one", [5], [1]),
        ],
        [Band("band", [16, 19], [4, 4], [6, 6])],
    )
    (tmp_path / "a.png").write_bytes(png([chart]))
    pixels, root = picture(tmp_path / "a.png"), drawn(chart)

    for number, label in enumerate(("solid", "points", "dashed", "one")):
        for place in curve(root, label):
            column, row = (round(part * 5 / 3) for part in place)
            assert has(pixels[row - 2 : row + 3, column - 2 : column + 3], drawing.LIGHT[number]).any(), label
    (left, level), *_, (right, _) = curve(root, "dashed")
    painted = has(pixels[round(level * 5 / 3), round(left * 5 / 3) : round(right * 5 / 3)], drawing.LIGHT[2])
    assert 0.5 < painted.mean() < 0.6  # 7 of 12
    (path,) = paths(root, "band")
    column, row = (round(float(part) * 5 / 3) for part in np.mean(corners(path), axis=0))
    colour = np.array([int(drawing.LIGHT[3][i : i + 2], 16) for i in (1, 3, 5)])
    mixed = 255 - float(path.attrib["fill-opacity"]) * (255 - colour)
    np.testing.assert_allclose(pixels[row - 9, column], mixed, atol=3)  # above the line of the grid
    for text in root.iter("text"):
        at, base = float(text.attrib["x"]) * 5 / 3, round(float(text.attrib["y"]) * 5 / 3)
        before, after = {"start": (0, 12), "middle": (12, 12), "end": (12, 0)}[text.get("text-anchor", "start")]
        assert (pixels[base - 12 : base, int(at - before) : int(at + after)].sum(-1) < 500).any(), text.text


def test_png_takes_any_chart(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    defaults = [name for name in matplotlib.rcParams if name != "backend"]  # which is found when it is first asked for
    before = [matplotlib.rcParams[name] for name in defaults]
    odd = "_$x^{$ \\frac \x00\ud800 你好 שלום " + "long " * 100
    nan = math.nan
    charts = [
        Chart(odd, odd, odd, [Line(odd, [0, 1], [0, 1]) for _ in range(20)], x_ticks=[(0, odd), (1, odd)]),
        Chart("t", "x", "y", [Line("l", [1, 2, 3, 4], [nan, 1, nan, math.inf])], [Band("b", [1], [nan], [1])]),
        Chart("t", "x", "y", [Line("l", [1, 2], [-1e308, 1e250]), Line("m", [1e-310], [5e-324])]),
        Chart("t", "x", "y", [Line("l", [1, 2], [0, 1e-200])], log_y=True),
    ]
    (tmp_path / "odd.png").write_bytes(png(charts))
    assert picture(tmp_path / "odd.png").shape == (2400, 1200, 3)
    assert [matplotlib.rcParams[name] for name in defaults] == before


def test_png_names_a_line_that_begins_with_an_underscore(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("_a", " "):
        (tmp_path / f"{name}.png").write_bytes(png([Chart("t", "x", "y", [Line(name, [0, 1], [0, 1])])]))
    assert (picture(tmp_path / "_a.png") != picture(tmp_path / " .png")).any()


def test_png_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no chart"):
        png([])


def test_charts_in_one_svg_file_lie_below_one_another() -> None:
    root = ET.fromstring(stacked_svg([CURVES, CURVES, Chart("Nothing", "x", "y", [])], 300, 200))
    assert (root.get("width"), root.get("height")) == ("300", "600")
    assert [part.get("y") for part in root] == ["0", "200", "400"]
    assert all(part.get("height") == "200" for part in root)
