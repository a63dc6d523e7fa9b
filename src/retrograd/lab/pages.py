"""Generated parts of Markdown pages, each between the marks ``<!-- NAME -->`` and ``<!-- /NAME -->``."""

from __future__ import annotations

__all__ = ["replaced", "table"]

from collections.abc import Iterable, Sequence


def replaced(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of this name."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if page.count(start) != 1 or page.count(end) != 1:
        raise ValueError(f"the page needs {start} and {end}, once each")
    before, _, rest = page.partition(start)
    return f"{before}{start}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---:") -> str:
    """A Markdown table; `align` is the alignment of all columns but the first."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + f"{align}|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
