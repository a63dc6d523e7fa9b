"""What a run has to show: blocks of prose, samples, tables and charts, as a page for browsers and as plain text."""

from __future__ import annotations

import html
import re
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .chart import Chart, one_line, svg, visible
from .drawing import STYLE

__all__ = ["Block", "Prose", "Sample", "Section", "Table", "page", "plain"]


@dataclass(frozen=True)
class Prose:
    """Paragraphs, with empty lines between them."""

    text: str


@dataclass(frozen=True)
class Sample:
    """Text as it is, with its line ends and spaces: what a model wrote, or a file has."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells. Columns of numbers are aligned right; without any column name there is no head."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    highlight: int | None = None  # the row that matters most

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"Table: row {number} has {len(row)} cells, but there are {len(self.columns)} columns")
        if self.highlight is not None and not 0 <= self.highlight < len(self.rows):
            raise ValueError(f"Table: highlight is row {self.highlight}, but there are {len(self.rows)} rows")


Block = Prose | Sample | Table | Chart


@dataclass(frozen=True)
class Section:
    """Blocks under a title."""

    title: str
    blocks: Sequence[Block]


# A number with its sign, separators, exponent and unit of up to four letters: 1,234  −0.5  3.1e-3  12 %  4.2 ms
_NUMBER = re.compile(r"[+\-−±]?[\d,]*\.?\d+(e[+\-−]?\d+)?( ?(%|[^\W\d]{1,4}(/[^\W\d]{1,4})?))?", re.IGNORECASE)
_NOTHING = ("", "-", "–", "—", "nan", "inf", "-inf")


def _numeric(table: Table) -> list[bool]:
    """Which columns are of numbers, where some may be missing."""
    found = []
    for cells in zip(*table.rows, strict=True) if table.rows else ((),) * len(table.columns):
        there = [cell.strip() for cell in cells if cell.strip().lower() not in _NOTHING]
        found.append(bool(there) and all(_NUMBER.fullmatch(cell) for cell in there))
    return found


# ---- The page --------------------------------------------------------------------------------------------------------

# Nothing is fetched and nothing is run, whatever a text may hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_PAGE_STYLE = """
:root {
  color-scheme: light dark;
  --page: #f3f5f7; --card: #ffffff; --ink: #1b2129; --muted: #55606c; --rule: #e0e4e9; --well: #f6f8fa;
  --accent: #0072b2; --mark: #e5f1f9;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #0f1215; --card: #171b20; --ink: #e8ebef; --muted: #a3adb8; --rule: #2d343c; --well: #101418;
    --accent: #56b4e9; --mark: #16303f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; -webkit-text-size-adjust: 100%;
}
header, main { max-width: 50rem; margin: 0 auto; padding: 0 1.25rem; overflow-wrap: anywhere; }
header { padding-top: 2.75rem; padding-bottom: 1.25rem; }
h1 { margin: 0; font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.015em; }
header p { margin: 0.4rem 0 0; color: var(--muted); }
section {
  background: var(--card); border: 1px solid var(--rule); border-radius: 12px; margin: 0 0 1.25rem;
  padding: 1.25rem 1.5rem 1.5rem;
}
h2 { font-size: 1.2rem; line-height: 1.3; }
section > * { margin: 0; }
section > * + * { margin-top: 1rem; }
section > h2 + * { margin-top: 0.75rem; }
section > figure { margin-left: -8px; margin-right: -8px; }
section > figure + figure { margin-top: 1.75rem; }
.sample {
  padding: 0.85rem 1rem; background: var(--well); border: 1px solid var(--rule);
  border-left: 3px solid var(--accent); border-radius: 6px; overflow-x: auto; tab-size: 4; text-align: start;
  font: 0.85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext;
}
.scroll { overflow-x: auto; }
table { min-width: 50%; border-collapse: collapse; font-size: 0.925rem; font-variant-numeric: tabular-nums; }
th, td {
  padding: 0.4rem 1.1rem 0.4rem 0.6rem; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top;
}
td { max-width: 32rem; min-width: 5rem; }
th { overflow-wrap: normal; }
th { color: var(--muted); font-weight: 600; font-size: 0.85rem; vertical-align: bottom; }
tbody tr:last-child > * { border-bottom: 0; }
.number { padding: 0.4rem 0.6rem 0.4rem 1.1rem; min-width: 0; text-align: right; }
td.number { white-space: nowrap; }
.best > * { background: var(--mark); font-weight: 600; }
.best > :first-child { box-shadow: inset 3px 0 var(--accent); }
figure .narrow { display: none; }
.rg-chart { width: 100%; }
@media screen and (max-width: 36rem) {
  header, main { padding-left: 0.5rem; padding-right: 0.5rem; }
  header { padding: 1.5rem 1rem 1rem; }
  h1 { font-size: 1.5rem; }
  section { padding: 1rem 0.75rem; border-radius: 10px; }
  figure .wide { display: none; }
  figure .narrow { display: block; }
  th, td { padding: 0.35rem 0.6rem 0.35rem 0.4rem; }
  .number { padding: 0.35rem 0.4rem 0.35rem 0.6rem; }
}
@media print {
  @page { margin: 16mm; }
  body { background: none; font-size: 10.5pt; }
  header { padding-top: 0; }
  header, main { max-width: none; padding-left: 0; padding-right: 0; }
  section { border: 0; border-top: 1px solid var(--rule); border-radius: 0; padding: 1rem 0 0; }
  h2 { break-after: avoid; }
  section > figure { margin-left: 0; margin-right: 0; }
  figure, tr { break-inside: avoid; }
  .best > *, .sample { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .scroll { overflow: visible; }
}
"""


def page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """A whole HTML document that needs nothing else: no network, no script. All text in it is text, never markup."""
    said = _escape(one_line(subtitle))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="generator" content="retrograd">',
            f"<title>{_escape(one_line(title))}</title>",
            f"<style>{_PAGE_STYLE}{STYLE}</style>",
            "</head>",
            "<body>",
            "<header>",
            f'<h1 dir="auto">{_escape(one_line(title))}</h1>',
            *([f'<p dir="auto">{said}</p>'] if said else []),
            "</header>",
            "<main>",
            *(part for section in sections for part in _section(section)),
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


def _section(section: Section) -> Iterator[str]:
    yield "<section>"
    if section.title:
        yield f'<h2 dir="auto">{_escape(one_line(section.title))}</h2>'
    for block in section.blocks:
        if isinstance(block, Prose):
            for paragraph in _paragraphs(block):
                yield f'<p dir="auto">{_escape(paragraph)}</p>'
        elif isinstance(block, Sample):
            # The first line end after <pre> is no part of the text.
            yield f'<pre class="sample" dir="auto">\n{_escape(visible(block.text))}</pre>'
        elif isinstance(block, Table):
            yield from _table(block)
        else:
            # Letters keep their size on a narrow screen only if the drawing is narrow itself.
            yield '<figure><div class="wide">'
            yield svg(block, 720, 360, standalone=False)
            yield '</div><div class="narrow">'
            yield svg(block, 340, 310, standalone=False)
            yield "</div></figure>"
    yield "</section>"


def _paragraphs(prose: Prose) -> list[str]:
    return [one_line(part) for part in re.split(r"\n\s*\n", prose.text.replace("\r\n", "\n")) if part.strip()]


def _table(table: Table) -> Iterator[str]:
    kinds = [' class="number"' if number else "" for number in _numeric(table)]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{kind}><bdi>{_escape(one_line(cell))}</bdi></{tag}>" for kind, cell in zip(kinds, row, strict=True)
        )

    yield '<div class="scroll" tabindex="0"><table>'
    if any(name.strip() for name in table.columns):
        yield f"<thead><tr>{cells('th', table.columns)}</tr></thead>"
    yield "<tbody>"
    for number, row in enumerate(table.rows):
        start = '<tr class="best">' if number == table.highlight else "<tr>"
        yield start + cells("td", row) + "</tr>"
    yield "</tbody></table></div>"


# ---- Plain text ------------------------------------------------------------------------------------------------------

_COLUMNS = 100


def plain(section: Section) -> str:
    """The section for a terminal or a pipe, without its charts. Samples keep their lines; prose is wrapped."""
    parts = [one_line(section.title)] if section.title else []
    for block in section.blocks:
        if isinstance(block, Prose):
            parts += [textwrap.fill(paragraph, _COLUMNS, break_on_hyphens=False) for paragraph in _paragraphs(block)]
        elif isinstance(block, Sample):
            parts.append(visible(block.text))
        elif isinstance(block, Table):
            parts.append(_plain_table(block))
    return "\n\n".join(parts) + "\n"


def _cells(text: str) -> int:
    """How many cells of a terminal the text takes."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.category(character) in ("Mn", "Me", "Cf") for character in text)


def _plain_table(table: Table) -> str:
    head = [table.columns] if any(name.strip() for name in table.columns) else []
    rows = [[one_line(cell) for cell in row] for row in (*head, *table.rows)]
    widths = [max(map(_cells, column), default=0) for column in zip(*rows, strict=True)]
    numeric = _numeric(table)
    lines = []
    for number, row in enumerate(rows, -len(head)):
        padded = [
            " " * (width - _cells(cell)) + cell if right else cell + " " * (width - _cells(cell))
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        mark = "" if table.highlight is None else "* " if number == table.highlight else "  "
        lines.append((mark + "  ".join(padded)).rstrip())
        if number == -1:
            lines.append(("" if table.highlight is None else "  ") + "  ".join("-" * width for width in widths))
    return "\n".join(lines)
