"""The page of ``retrograd bench --html``: one file, without scripts and without network access."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ..._printing import in_a_line
from .rows import BenchRow

__all__ = ["bench_page"]

# Implementations that a reader could use instead, with the name to show. The others are bounds and retrograd's own.
_RIVALS: Final = {
    "torch": "PyTorch",
    "kernels": "PyTorch's kernels",
    "compile": "torch.compile",
    "logarithms": "PyTorch, in logarithms",
    "jax": "JAX",
    "associative": "JAX, associative_scan",
}
_OTHERS: Final = {
    "retrograd": "retrograd",
    "nn": "retrograd.nn",
    "mpsgraph": "retrograd.mpsgraph",
    "arrays": "array functions",
    "plain": "retrograd, without the options",
    "autograd": "PyTorch, layers that compute nothing",
    "stream": "bound: a pass over memory",
    "copy": "bound: a copy",
    "sgemm": "bound: NumPy's matrix product",
    "peak": "bound: peak of multiply-adds",
}
_NAMES: Final = _RIVALS | _OTHERS
_TIE: Final = 1.1
_OCTAVES: Final = 5  # the scale goes to 32x at most; longer bars are cut off, their numbers are not
# No network access and no scripts, whatever a name contains.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE: Final = """
:root {
  color-scheme: light dark;
  --page: #f3f5f7; --card: #fff; --ink: #1b2129; --muted: #55606c; --rule: #d9dee4; --well: #edf0f3;
  --faster: #0072b2; --slower: #c2410c; --tie: #76818d; --bound: #4d7c5f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1215; --card: #171b20; --ink: #e8ebef; --muted: #a3adb8; --rule: #2d343c; --well: #22282f;
    --faster: #56b4e9; --slower: #f2894b; --tie: #8a95a1; --bound: #7fbf95;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
header, main { max-width: 68rem; margin: 0 auto; padding: 0 1.25rem; overflow-wrap: anywhere; }
header { padding-top: 2.5rem; padding-bottom: 1.25rem; }
h1 { margin: 0; font-size: 1.8rem; line-height: 1.2; }
h2 { margin: 0 0 0.5rem; font-size: 1.2rem; }
h3 { margin: 0; font-size: 0.95rem; }
p { margin: 0.25rem 0; }
header p, .note, .pass { color: var(--muted); }
.note { font-size: 0.9rem; max-width: 46rem; }
section {
  background: var(--card); border: 1px solid var(--rule); border-radius: 12px; margin: 0 0 1.25rem; padding: 1.25rem;
}
article { border-top: 1px solid var(--rule); padding: 0.7rem 0; display: grid; gap: 0.15rem 1.25rem; }
article:last-child { padding-bottom: 0; }
.pass { font-size: 0.9rem; font-variant-numeric: tabular-nums; }
.bars { display: grid; gap: 0.2rem 0.6rem; grid-template-columns: 9.5rem 1fr 4rem; align-items: center; margin: 0; }
.bars dt { font-size: 0.85rem; color: var(--muted); overflow-wrap: break-word; }
.bars dd { margin: 0; font-size: 0.9rem; text-align: right; font-variant-numeric: tabular-nums; }
.track { position: relative; height: 0.85rem; background: var(--well); border-radius: 3px; overflow: hidden; }
.track i { position: absolute; top: 0; bottom: 0; min-width: 2px; }
.track b { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--ink); opacity: 0.55; }
.faster { background: var(--faster); } .slower { background: var(--slower); }
.tie { background: var(--tie); } .bound { background: var(--bound); }
.axis { padding: 0.3rem 0 0; border: 0; }
.scale { color: var(--muted); font-size: 0.8rem; }
.scale span { display: block; position: relative; height: 1.2rem; }
.scale i { position: absolute; white-space: nowrap; transform: translateX(-50%); font-style: normal; }
.scale i:first-child { transform: none; } .scale i:last-child { transform: translateX(-100%); }
.key { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; font-size: 0.85rem; color: var(--muted); }
.key i { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 2px; margin-right: 0.35rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td {
  padding: 0.3rem 0.9rem 0.3rem 0; border-bottom: 1px solid var(--rule); text-align: left; white-space: nowrap;
}
th { color: var(--muted); font-weight: 600; } .number { text-align: right; }
tbody tr:last-child > * { border-bottom: 0; }
.facts th { vertical-align: top; } .facts td { white-space: normal; }
@media (min-width: 50rem) { article { grid-template-columns: 18rem 1fr; } }
@media (max-width: 36rem) {
  header, main { padding-left: 0.5rem; padding-right: 0.5rem; }
  header { padding: 1.5rem 0.75rem 1rem; }
  section { padding: 1rem 0.75rem; }
  .bars { grid-template-columns: 6.5rem 1fr 3.6rem; }
  table { font-size: 0.8rem; }
  th, td { padding-right: 0.5rem; }
  tbody th, th:first-child, td:first-child { white-space: normal; overflow-wrap: normal; }
}
@media print {
  body { background: none; }
  section { border-width: 1px 0 0; border-radius: 0; }
  article { break-inside: avoid; }
  .track, .track i, .key i { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def bench_page(title: str, rows: Sequence[BenchRow], conditions: Sequence[str], notes: Sequence[str] = ()) -> str:
    """Return an HTML document that shows every row: ratios to the other libraries, shares of the bound, and times."""
    ours = [row for row in rows if row.provider == "retrograd"]
    rivals = [row for row in rows if row.provider in _RIVALS and row.over_retrograd is not None]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_escaped(title)}</title><style>{_STYLE}</style></head><body>",
        f"<header><h1>{_escaped(title)}</h1>",
        *(f"<p>{_escaped(line)}</p>" for line in conditions),
        "</header><main>",
        *_summary(rivals),
        *_comparisons(ours, rivals),
        *_machine(rows),
        *_times(rows),
    ]
    if notes:
        parts += ["<section><h2>Notes</h2>", *(f"<p>{_escaped(note)}</p>" for note in notes), "</section>"]
    return "\n".join([*parts, "</main></body></html>", ""])


def _escaped(text: str) -> str:
    return html.escape(in_a_line(text), quote=True)


def _section(title: str, note: str = "") -> str:
    return f"<section><h2>{title}</h2>" + (f'<p class="note">{note}</p>' if note else "")


def _verdict(ratio: float) -> str:
    return "faster" if ratio > _TIE else "slower" if ratio < 1 / _TIE else "tie"


def _summary(rivals: Sequence[BenchRow]) -> Iterator[str]:
    if not rivals:
        return
    groups: dict[tuple[str, str, int], list[float]] = {}
    for row in rivals:
        assert row.over_retrograd is not None
        groups.setdefault((_RIVALS[row.provider], row.pass_, row.threads), []).append(row.over_retrograd)
    yield _section(
        "Against each library",
        "How often retrograd is faster or slower. The ratio is the other library’s time divided by retrograd’s; within "
        "10 % it is a tie.",
    )
    cells = []
    order = list(_RIVALS.values())
    for (rival, pass_, threads), ratios in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        verdicts = [_verdict(ratio) for ratio in ratios]
        counts = [str(verdicts.count(word)) for word in ("faster", "tie", "slower")]
        cells.append([rival, pass_, str(threads), *counts, f"{statistics.median(ratios):.2f}x"])
    yield from _table(["library", "pass", "threads", "faster", "tie", "slower", "median ratio"], cells, 2)
    yield "</section>"


def _comparisons(ours: Sequence[BenchRow], rivals: Sequence[BenchRow]) -> Iterator[str]:
    """Yield a section per thread count, with bars for each row and pass that has anything to be compared with."""
    against: dict[tuple[str, str, int], list[BenchRow]] = {}
    for row in rivals:
        against.setdefault((row.case, row.pass_, row.threads), []).append(row)
    largest = max((abs(math.log2(row.over_retrograd)) for row in rivals if row.over_retrograd), default=1.0)
    octaves = min(_OCTAVES, max(1, math.ceil(largest)))
    full = max((row.share_of_bound or 0.0 for row in ours), default=1.0)
    for threads in dict.fromkeys(row.threads for row in ours):
        shown = [
            row
            for row in ours
            if row.threads == threads
            and ((row.case, row.pass_, row.threads) in against or row.share_of_bound is not None)
        ]
        if not shown:
            continue
        yield _section(
            f"{threads} thread{'s' * (threads != 1)}",
            "Bars to the right of 1x: retrograd is faster. The scale is logarithmic. ‘Of bound’ is the share of what "
            "the machine allows: memory bandwidth for normalization, the speed of large matrix products otherwise.",
        )
        yield (
            '<p class="key">'
            + "".join(
                f'<span><i class="{kind}"></i>{name}</span>'
                for kind, name in (
                    ("faster", "retrograd faster"),
                    ("tie", "tie"),
                    ("slower", "retrograd slower"),
                    ("bound", "share of the bound"),
                )
            )
            + "</p>"
        )
        if against:
            yield _scale(octaves)
        for row in shown:
            yield f"<article><div><h3>{_escaped(row.case)}</h3>"
            yield f'<div class="pass">{_escaped(row.pass_)}: {_time(row.p50)}</div></div><dl class="bars">'
            others = against.get((row.case, row.pass_, row.threads), [])
            for other in others:
                assert other.over_retrograd is not None
                yield _ratio_bar(_RIVALS[other.provider], other.over_retrograd, octaves)
            if row.share_of_bound is not None:
                yield _bound_bar(row.share_of_bound, max(1.0, full))
            yield "</dl></article>"
        yield "</section>"


def _ratio_bar(name: str, ratio: float, octaves: int) -> str:
    place = 50 + 50 * max(-1.0, min(math.log2(ratio) / octaves, 1.0))
    left, width = min(place, 50.0), abs(place - 50)
    bar = f'<i class="{_verdict(ratio)}" style="left:{left:.2f}%;width:{width:.2f}%"></i><b style="left:50%"></b>'
    return f'<dt>{name}</dt><dd class="track">{bar}</dd><dd>{ratio:.2f}x</dd>'


def _scale(octaves: int) -> str:
    ends = ((0, f"1/{2**octaves}"), (50, "1"), (100, f"{2**octaves}"))
    marks = "".join(f'<i style="left:{place}%">{value}x</i>' for place, value in ends)
    bars = f'<dl class="bars"><dt></dt><dd class="scale"><span>{marks}</span></dd><dd></dd></dl>'
    return f'<article class="axis" aria-hidden="true"><div></div>{bars}</article>'


def _bound_bar(share: float, full: float) -> str:
    bar = f'<i class="bound" style="left:0;width:{100 * share / full:.2f}%"></i><b style="left:{100 / full:.2f}%"></b>'
    return f'<dt>of bound</dt><dd class="track">{bar}</dd><dd>{share:.0%}</dd>'


def _machine(rows: Sequence[BenchRow]) -> Iterator[str]:
    facts = {
        "processor": dict.fromkeys(row.device for row in rows),
        "caches": dict.fromkeys(row.caches for row in rows),
        "instruction set": dict.fromkeys(row.isa for row in rows if row.provider == "retrograd"),
        "lowered by": dict.fromkeys(row.environment for row in rows),
    }
    versions: dict[str, str] = {}
    for row in rows:
        library = {"sgemm": "NumPy"}.get(row.provider, _RIVALS.get(row.provider, ""))
        if row.provider == "retrograd" or library:
            versions.setdefault((library or "retrograd").split("'")[0].split(",")[0], row.version)
    if "PyTorch" in versions:
        versions.pop("torch.compile", None)
    found = {name: ", ".join(filter(None, values)) for name, values in facts.items()} | versions
    yield _section("Machine and versions")
    yield '<div class="scroll"><table class="facts"><tbody>'
    for name, value in found.items():
        if value:
            yield f"<tr><th>{_escaped(name)}</th><td>{_escaped(value)}</td></tr>"
    yield "</tbody></table></div></section>"


def _times(rows: Sequence[BenchRow]) -> Iterator[str]:
    columns: Mapping[str, list[str]] = {
        "row": [row.case for row in rows],
        "pass": [row.pass_ for row in rows],
        "implementation": [_NAMES.get(row.provider, row.provider) for row in rows],
        "threads": [str(row.threads) for row in rows],
        "median": [_time(row.p50) for row in rows],
        "p20 to p80": [f"{_time(row.p20)} to {_time(row.p80)}" for row in rows],
        "over retrograd": [_shown("{:.2f}x", row.over_retrograd) for row in rows],
        "of bound": [_shown("{:.0%}", row.share_of_bound) for row in rows],
        "of peak": [_shown("{:.0%}", row.share_of_peak) for row in rows],
        "GFLOPS": [_shown("{:.1f}", row.gflops) for row in rows],
        "added": ["" if row.added is None else f"{row.added * 1e6:+.1f} µs" for row in rows],
        "tokens/s": [_shown("{:.0f}", row.tokens_per_second) for row in rows],
        "MiB": ["" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f}" for row in rows],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    yield _section("All times")
    yield from _table(list(kept), list(zip(*kept.values(), strict=True)), 3)
    yield "</section>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], first_number: int) -> Iterator[str]:
    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = ("" if index < first_number else ' class="number"' for index in range(len(cells)))
        return "".join(f"<{tag}{kind}>{_escaped(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    yield f'<div class="scroll" tabindex="0"><table><thead><tr>{line("th", columns)}</tr></thead><tbody>'
    for row in rows:
        yield f"<tr>{line('td', row)}</tr>"
    yield "</tbody></table></div>"


def _shown(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


def _time(seconds: float) -> str:
    value, unit = next(
        ((seconds * factor, unit) for factor, unit in ((1, "s"), (1e3, "ms")) if seconds * factor >= 1),
        (seconds * 1e6, "µs"),
    )
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}" if value >= 10 else f"{value:.2f} {unit}"
