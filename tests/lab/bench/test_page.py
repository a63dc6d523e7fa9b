"""The page of retrograd bench --html: it has every row, loads nothing, and its bars are as long as ratios say."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from retrograd import cli
from retrograd.lab import bench
from support.bench import SMALL_ROW

VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """The tags, which must be closed in order; the text of cells; and the bars."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.bars: list[tuple[str, dict[str, float]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        found = dict(attrs)
        if tag == "i" and "width" in (found.get("style") or ""):
            places = dict(part.split(":") for part in (found["style"] or "").split(";"))
            self.bars.append((found["class"] or "", {name: float(value.rstrip("%")) for name, value in places.items()}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] != "style":
            self.texts.append(data.strip())


def measured(case: str, provider: str, over: float | None = None, **values: Any) -> bench.BenchRow:
    row: dict[str, Any] = dict.fromkeys(bench.BenchRow._fields)
    row |= {"case": case, "provider": provider, "pass_": "forward", "threads": 1, "isa": "avx2", "over_retrograd": over}
    row |= {"p20": 0.9e-3, "p50": 1e-3, "p80": 1.2e-3, "spread": 0.01}
    row |= {"device": "A CPU", "caches": "L1 32 KiB", "environment": "", "version": "1.0"}
    return bench.BenchRow(**{**row, **values})


def test_every_row_and_condition_is_shown_and_nothing_is_loaded() -> None:
    providers = ("torch", "kernels", "compile", "jax", "associative", "logarithms", "stream", "nn", "something_new")
    rows = [measured("first", "retrograd", share_of_bound=0.5)]
    rows += [measured("first", name, 1.5 + place, version=f"9.{place}") for place, name in enumerate(providers)]
    rows += [measured("<script>alert(1)</script>", "retrograd", threads=7, peak_bytes=3 << 20)]
    text = bench.bench_page("bench & norm", rows, ["A CPU; avx2"], ["busy <b>"])
    page = Page(text)
    for word in ("bench & norm", "A CPU; avx2", "busy <b>", "<script>alert(1)</script>", "something_new", "3.0"):
        assert word in page.texts, word
    for name in ("PyTorch", "PyTorch's kernels", "torch.compile", "JAX", "JAX, associative_scan", "retrograd.nn"):
        assert name in page.texts, name
    assert page.texts.count("first") == 2 + len(providers)  # beside the bars, and a line each in the table
    assert {"9.0", "9.3", "1.0"} <= set(page.texts)  # versions of PyTorch, JAX, retrograd
    assert not page.tags & {"script", "link", "img", "iframe", "object", "a"}
    assert not page.attributes & {"src", "href", "srcset", "onload", "onclick"}
    assert not re.search(r"https?:|url\(|@import|//", text)
    assert "default-src 'none'" in text


def test_bars_are_as_long_as_ratios_say() -> None:
    rows = [measured("a", "retrograd", share_of_bound=0.25)]
    rows += [measured("a", "torch", 4.0), measured("a", "jax", 0.5), measured("a", "compile", 1.05)]
    bars = Page(bench.bench_page("t", rows, [])).bars
    assert bars == [
        ("faster", {"left": 50, "width": 50}),
        ("slower", {"left": 25, "width": 25}),
        ("tie", {"left": 50, "width": pytest.approx(1.76, abs=0.01)}),
        ("bound", {"left": 0, "width": 25}),
    ]
    rows[1] = measured("a", "torch", 4000.0)  # cut off, but its number is shown
    page = Page(bench.bench_page("t", rows, []))
    assert page.bars[0] == ("faster", {"left": 50, "width": 50})
    assert "4000.00x" in page.texts
    rows[0] = measured("a", "retrograd", share_of_bound=1.25)  # the mark of 100 % moves to the left
    assert Page(bench.bench_page("t", rows, [])).bars[-1] == ("bound", {"left": 0, "width": 100})


def test_rows_without_a_rival_are_in_the_table_of_times() -> None:
    page = Page(bench.bench_page("t", [measured("overhead_x", "retrograd", pass_="call")], []))
    assert page.texts.count("overhead_x") == 1
    assert page.bars == []


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, table = tmp_path / "page.html", tmp_path / "table.csv"
    rows = ["--rows", SMALL_ROW, "overhead_layer_norm_forward"]
    options = [*rows, "--threads", "1", "--rounds", "1", "--budget", "0.01"]
    assert cli.main(["bench", "norm", *options, "--html", str(page), "--csv", str(table)]) == 0
    shown = Page(page.read_text(encoding="utf-8"))
    lines = table.read_text().splitlines()[1:]
    assert len(lines) >= 5
    assert shown.texts.count(SMALL_ROW) == 2 + sum(line.startswith(SMALL_ROW) for line in lines)
    assert "overhead_layer_norm_forward" in shown.texts
    assert "retrograd bench norm" in shown.texts
    capsys.readouterr()


def test_a_path_that_cannot_be_written_is_refused_before_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "norm", "--rows", SMALL_ROW, "--html", "/no/such/folder/page.html"]) == 2
    captured = capsys.readouterr()
    assert "--html /no/such/folder/page.html: No such file" in captured.err
    assert captured.out == ""
