"""The report: all text is text, nothing is fetched or run, and a browser shows it, wide and narrow, light and dark."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.cli import main
from retrograd.train import chart as charts
from retrograd.train.chart import Band, Chart, Line, one_line, png, stacked_svg, visible
from retrograd.train.report import Block, Prose, Sample, Section, Table, page, plain
from support.waiting import PATIENCE

any_text = st.text(st.characters(exclude_categories=()), max_size=40)
HOSTILE = "</style></title><script src=http://x.test/a.js>1</script><img src=x onerror=alert(1)>\"'&amp; \x00\ud800"
STEPS = np.arange(1, 401)
LOSS = Chart(
    "Loss",
    "step",
    "bits per character",
    [
        Line("training", STEPS, 2 + 3 * np.exp(-STEPS / 90)),
        Line("validation", [100, 200, 300, 400], [3.1, 2.5, 2.3, 2.2]),
    ],
    [Band("range", STEPS, 1.5 + 2 * np.exp(-STEPS / 90), 2.5 + 4 * np.exp(-STEPS / 90))],
)


class Reader(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.style = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "style":
            self.style += data
        else:
            self.text += data


def rows_of(text: str) -> list[list[tuple[str, str]]]:
    """Class and text of every cell of a page's tables."""
    return [
        re.findall(r'<t[hd](?: class="(\w+)")?><bdi>(.*?)</bdi>', row)
        for row in re.findall(r"<tr[^>]*>(.*?)</tr>", text)
    ]


LIGHT, DARK = ([colours[f"line{i}"] for i in range(4)] for colours in (charts._LIGHT, charts._DARK))


def all_blocks(text: str) -> list[Block]:
    lines = [Line(text, [0, 1], [1, 2]), Line(text, [0, 1], [2, 1])]
    return [
        Prose(text),
        Sample(text),
        Table([text, text], [[text, "1"], [text, "2"]], highlight=1),
        Chart(text, text, text, lines, [Band(text, [0, 1], [1, 1], [2, 2])]),
    ]


# ---- The page --------------------------------------------------------------------------------------------------------

TAGS = {"html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "p", "main", "section", "pre", "div"}
TAGS |= {"table", "thead", "tbody", "tr", "th", "td", "bdi", "figure", "svg", "text", "path", "g", "defs", "use"}
TAGS |= {"clippath", "rect"}
NAMES = {"lang", "charset", "http-equiv", "content", "name", "class", "dir", "tabindex", "style", "role", "aria-label"}
NAMES |= {"viewbox", "width", "height", "x", "y", "d", "id", "href", "clip-path", "transform", "version"}


def assert_harmless(text: str) -> Reader:
    text.encode()
    read = Reader(text)
    assert set(read.tags) <= TAGS
    assert {name for name, _ in read.attributes} <= NAMES
    for name, value in read.attributes:
        assert not re.search(r"url\s*\((?!#)|https?:|expression|[<>]", value) or name not in ("style", "clip-path")
        assert name != "href" or value.startswith("#")
    assert not re.search(r"url\s*\(|@import|https?:", read.style)
    return read


@pytest.mark.parametrize(
    "text", [HOSTILE, "--><!--", "]]>", "&lt;script&gt;", "<", '"', "{}", "%s", "\\", "\n\n\n", ""]
)
def test_markup_in_text_is_text(text: str) -> None:
    read = assert_harmless(page(text, text, [Section(text, all_blocks(text))]))
    assert one_line(text) in read.text
    assert visible(text) in read.text
    assert ("aria-label", one_line(text)) in read.attributes


@given(any_text, any_text, any_text)
@settings(deadline=None, max_examples=40)  # each makes a page with every kind of block
def test_any_text_is_text(title: str, subtitle: str, text: str) -> None:
    read = assert_harmless(page(title, subtitle, [Section(title, all_blocks(text))]))
    for said in (one_line(title), one_line(subtitle), one_line(text), visible(text)):
        assert said in read.text


def test_page_is_one_document_that_needs_nothing_else() -> None:
    text = page("Title", "subtitle", [Section("Learning", [LOSS])])
    assert text.startswith("<!DOCTYPE html>\n")
    assert text.endswith("</html>\n")
    assert "http:" not in text
    assert "https:" not in text
    read = assert_harmless(text)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in read.attributes
    assert ("charset", "utf-8") in read.attributes
    assert "prefers-color-scheme" in read.style
    assert "@media print" in read.style
    assert text.count(charts.STYLE) == 1
    # Once for wide screens and once for narrow ones.
    assert [value for name, value in read.attributes if name == "viewbox"] == ["0 0 540 270", "0 0 255 232.5"]


def test_sample_keeps_every_space_and_line() -> None:
    sample = "\n\n  if a:\n\t\tb  \n"
    # HTML drops one line end after the tag.
    assert f'dir="auto">\n{sample}</pre>' in page("t", "", [Section("s", [Sample(sample)])])


def test_prose_has_paragraphs() -> None:
    text = page("t", "", [Section("s", [Prose("One\nline.\n\n \nAnother.\n"), Prose("")])])
    assert re.findall(r"<p[^>]*>(.*?)</p>", text) == ["One line.", "Another."]


def test_columns_of_numbers_are_aligned_right() -> None:
    columns = {
        "name": ["1", "a"],
        "count": ["1,234", "−5"],
        "rate": ["3.0e-04", "1e+3"],
        "share": ["12 %", "3.5%"],
        "time": ["0.2 s", "1.5 ms"],
        "speed": ["15 MB/s", "7 GB/s"],
        "missing": ["-", "2"],
        "nothing": ["", "-"],
        "date": ["2024-01-02", "2024-01-03"],
        "words": ["3 layers of 5", "1"],
        "bad": ["nan", "0.5"],
    }
    table = Table(list(columns), list(zip(*columns.values(), strict=True)))
    head, *_ = rows_of(page("t", "", [Section("s", [table])]))
    right = [name for kind, name in head if kind == "number"]
    assert right == ["count", "rate", "share", "time", "speed", "missing", "bad"]


def test_highlight_and_head() -> None:
    named = page("t", "", [Section("s", [Table(["a", "b"], [["x", "1"], ["y", "2"]], highlight=1)])])
    assert re.findall(r'<tr class="best">(.*?)</tr>', named) == [
        '<td><bdi>y</bdi></td><td class="number"><bdi>2</bdi></td>'
    ]
    assert "<thead>" in named
    assert "<thead>" not in page("t", "", [Section("s", [Table(["", ""], [["x", "1"]])])])


def test_empty_things_make_a_page() -> None:
    blocks: list[Block] = [Prose(""), Sample(""), Table([], []), Table(["a"], []), Chart("", "", "", [])]
    assert_harmless(page("", "", [Section("", []), Section("", blocks)]))
    assert plain(Section("", [])) == "\n"
    assert "a" in plain(Section("", blocks))


def test_tables_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="Table: row 1 has 1 cells, but there are 2 columns"):
        Table(["a", "b"], [["1", "2"], ["3"]])
    with pytest.raises(ValueError, match="Table: highlight is row 2, but there are 2 rows"):
        Table(["a"], [["1"], ["2"]], highlight=2)


# ---- Plain text ------------------------------------------------------------------------------------------------------


def test_plain_text() -> None:
    table = Table(["model", "bits"], [["uniform", "6.60"], ["你好", "12.10"]], highlight=1)
    section = Section("Results", [Prose("A  b\nc.\n\nD."), table, LOSS, Sample("  x\n\ty\x1b[0m\n")])
    assert plain(section) == (
        "Results\n\nA b c.\n\nD.\n\n"
        "  model     bits\n"
        "  -------  -----\n"
        "  uniform   6.60\n"
        "* 你好     12.10\n\n"
        "  x\n\ty␛[0m\n\n"
    )


def test_plain_prose_is_wrapped() -> None:
    lines = plain(Section("", [Prose("word " * 200)])).splitlines()
    assert len(lines) == 13
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("columns", "expected"), [
    ("40", "  first\n    error       1.5\n    quarter of  2\n* a name of several words that is long\n"
           "    error       12\n    quarter of  30\n"),
    ("60", "  name                                  error  quarter of\n"
           "  ------------------------------------  -----  ----------\n"
           "  first                                   1.5           2\n"
           "* a name of several words that is long     12          30\n"),
])  # fmt: skip
def test_a_table_that_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: str, expected: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    rows = [["first", "1.5", "2"], ["a name of several words that is long", "12", "30"]]
    assert plain(Section("", [Table(["name", "error", "quarter of"], rows, highlight=1)])) == expected


@given(any_text)
@settings(deadline=None)
def test_plain_text_cannot_command_a_terminal(text: str) -> None:
    said = plain(Section(text, all_blocks(text)))
    said.encode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", said)


# ---- In a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    return pytest.skip("Chromium is not installed")


@pytest.fixture
def screenshot(browser: str, tmp_path: Path) -> Any:
    """A function: a page's text to its pixels from 0 to 255, and what its console said."""
    image = pytest.importorskip("matplotlib.image")
    numbers = itertools.count()

    def take(text: str, width: int, height: int, *options: str, frame: int | None = None) -> tuple[Any, list[str]]:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        (folder / "page.html").write_text(text, encoding="utf-8")
        shown = folder / "page.html"
        if frame:  # a window cannot be as narrow as a telephone's screen
            shown = folder / "frame.html"
            style = f"border:0;width:{frame}px;height:{height}px"
            shown.write_text(f'<body style="margin:0"><iframe src="page.html" style="{style}"></iframe></body>')
        done = subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--no-first-run",
                "--enable-logging=stderr",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={folder / 'profile'}",
                f"--screenshot={folder / 'page.png'}",
                f"--window-size={width},{height}",
                *options,
                shown.as_uri(),
            ],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        pixels = np.rint(image.imread(folder / "page.png")[..., :3] * 255).astype(int)
        assert pixels.shape == (height, width, 3)
        return pixels, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return take


def places(pixels: Any, colour: str) -> Any:
    """Rows and columns where a picture has the colour."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return np.nonzero((np.abs(pixels - wanted) <= 4).all(-1))


REPORT = page("Report", HOSTILE, [Section("Learning", [LOSS]), Section(HOSTILE, all_blocks(HOSTILE))])


@pytest.mark.parametrize("dark", [False, True])
def test_browser_shows_the_curves(screenshot: Any, dark: bool) -> None:
    pixels, console = screenshot(REPORT, 900, 700, f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    assert not console
    colours = DARK if dark else LIGHT
    assert (pixels[2, 2].max() < 64) == dark
    for colour in colours[:2]:
        rows, columns = places(pixels, colour)
        # From the left of the plot to its right, below the legend, and falling.
        assert columns.max() > 750
        assert columns.min() < 350
        curve = [rows[(columns == x) & (rows > rows.min() + 20)].mean() for x in (400, 550, 700)]
        assert curve == sorted(curve)
        assert curve[0] < curve[2]
    assert not len(places(pixels, (LIGHT if dark else DARK)[1])[0])


def test_browser_shows_a_narrow_page_whole(screenshot: Any) -> None:
    pixels, console = screenshot(REPORT, 600, 800, frame=360)
    assert not console
    page_colour = pixels[2, 2]
    assert (pixels[:, :360] != page_colour).any()
    assert (pixels[:, 360:] == 255).all()  # beside the frame
    assert (pixels[200:, 357:360] == page_colour).all()  # nothing reaches over the margin
    rows, columns = places(pixels, LIGHT[0])
    assert columns.max() > 310
    # The drawing for wide screens would be half as high.
    assert rows.max() - rows.min() > 110


def test_browser_runs_no_script_even_if_one_got_in(screenshot: Any) -> None:
    script = "<script>document.body.style.display = 'none'</script>"
    pixels, console = screenshot(REPORT.replace("</main>", f"</main>{script}"), 900, 700)
    assert len(console) == 1
    assert "Content Security Policy" in console[0]
    assert len(places(pixels, LIGHT[0])[0])


def test_browser_shows_odd_charts(screenshot: Any) -> None:
    nan = math.nan
    odd = [
        Chart("Nothing", "x", "y", []),
        Chart("One", "x", "y", [Line("l", [1], [1])]),
        Chart("Gaps", "x", "y", [Line("l", range(6), [1, nan, 2, nan, math.inf, 3])], log_y=True),
    ]
    pixels, console = screenshot(page("Odd", "", [Section("", odd)]), 900, 1400)
    assert not console
    rows, _ = places(pixels, LIGHT[0])
    assert len(rows) > 60  # four dots, and what the legends have


def test_browser_and_png_show_the_same(screenshot: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    shown = [LOSS, Chart("Nothing", "x", "y", []), Chart("Points", "x", "y", [Line("l", [1, 2], [3, 4], "points")])]
    (tmp_path / "a.png").write_bytes(png(shown))
    painted = np.rint(image.imread(tmp_path / "a.png")[..., :3] * 255).astype(int)
    text = f'<body style="margin:0"><div style="width:1200px">{stacked_svg(shown)}</div></body>'
    pixels, _ = screenshot(text.replace("<svg ", '<svg style="width:1200px;height:auto" ', 1), 1200, 1800)
    # Letters may be of another font, and edges may be smoothed in another way.
    assert (np.abs(pixels - painted).max(-1) > 100).mean() < 0.01
    for colour in LIGHT[:2]:
        for one, other in zip(places(pixels, colour), places(painted, colour), strict=True):
            assert (one.min(), one.max()) == pytest.approx((other.min(), other.max()), abs=2)
    for colour in LIGHT[:2]:
        assert len(places(pixels, colour)[0]) == pytest.approx(len(places(painted, colour)[0]), rel=0.2)
    # The grid is thin: Matplotlib puts it on whole pixels, the browser may spread a line over two.
    assert len(places(pixels, "#e6e9ed")[0]) > 0.3 * len(places(painted, "#e6e9ed")[0]) > 100


def test_browser_shows_the_report_of_a_run(screenshot: Any, tmp_path: Path) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("The cat sees the dog, and the dog runs to the house. " * 100)
    sizes = ["--hidden", "16", "--batch", "4", "--unroll", "16", "--steps", "60", "--validate-every", "10"]
    assert main(["train", "text", str(text), "--output", str(folder), *sizes]) == 0
    report = (folder / "report.html").read_text(encoding="utf-8")
    pixels, console = screenshot(report, 900, 2400, "--blink-settings=preferredColorScheme=1")
    assert not console
    for colour in LIGHT[:2]:  # training and validation
        rows, columns = places(pixels, colour)
        assert columns.max() - columns.min() > 400
        assert rows.max() - rows.min() > 50
