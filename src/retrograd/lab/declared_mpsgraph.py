"""What is written from the table of retrograd.mpsgraph: its type stub, and the reference in the docs.

    python -m retrograd.lab.declared_mpsgraph src/retrograd/mpsgraph/__init__.pyi docs/mpsgraph.md

``make lint`` runs it with ``--check``, which fails if a file is not as this module writes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .. import mpsgraph
from ..mpsgraph._declare import REQUIRED, ROWS, Row
from ..mpsgraph._left_out import LEFT_OUT
from ..mpsgraph._table import METHODS
from .pages import replaced, table


def stub() -> str:
    """The names of the package; MPSGraph with the methods that are made from rows."""
    lines = [
        "# Written by retrograd.lab.declared_mpsgraph.", "from collections.abc import Sequence",
        "from typing import overload", "",
    ]  # fmt: skip
    modules: dict[str, list[str]] = {}
    for name in vars(mpsgraph)["__all__"]:
        module = getattr(mpsgraph, name).__module__
        home = "..mps" if module.startswith("retrograd.mps.") else "." + module.rpartition(".")[2]
        modules.setdefault(home, []).append(f"{name} as {'_' * (name == 'MPSGraph')}{name}")
    lines += [f"from {home} import {', '.join(sorted(names))}" for home, names in sorted(modules.items())]
    lines += ["", "class MPSGraph(_MPSGraph):"]
    named: dict[str, list[Row]] = {}
    for row in ROWS:
        if not row.selector_only:
            named.setdefault(row.method, []).append(row)
    for _, rows in sorted(named.items()):
        for row in rows:
            lines += ["    @overload"] * (len(rows) > 1)
            lines.append(f"    def {row.method}({_parameters(row)}) -> {row.returns}: ...")
    return "\n".join([*lines, ""])


def _parameters(row: Row) -> str:
    positional = [f"{p.name}: {p.type}" for p in row.parameters if p.label == "_"]
    rest = [
        f"{p.keyword}: {p.type}{'' if p.default is REQUIRED else ' = ...'}" for p in row.parameters if p.label != "_"
    ]
    return ", ".join(["self", *positional, "/", "*", *rest] if rest else ["self", *positional, "/"])


def reference() -> str:
    """A table for each group of rows: Swift's signatures, the selectors, and what the operation does."""
    parts = ["### building and running", ""]
    rows = [[f"`{swift}`", _code(selectors.split())] for swift, selectors in METHODS["MPSGraph"].items()]
    rows += [[f"executable: `{s}`", _code(selectors.split())] for s, selectors in METHODS["MPSGraphExecutable"].items()]
    parts += [table(["Swift", "selector"], rows, "---"), ""]
    groups: dict[str, dict[tuple[str, str], list[Row]]] = {}
    for row in ROWS:
        groups.setdefault(row.group, {}).setdefault((row.swift, row.doc), []).append(row)
    for title, named in groups.items():
        cells = []
        for (_, doc), same in named.items():
            swift = list(dict.fromkeys(row.spelled for row in same))
            cells.append(
                [_code(swift), _code([row.selector for row in same]), doc.replace("|", "\\|").replace("``", "`")]
            )
        parts += [f"### {title}", "", table(["Swift", "selector", "result"], cells, "---"), ""]
    reasons: dict[str, list[str]] = {}
    for name, reason in LEFT_OUT.items():
        reasons.setdefault(reason, []).append(name)
    cells = [[_code(names), reason] for reason, names in reasons.items()]
    parts += ["### not supported", "", table(["method", "reason"], cells, "---")]
    return "\n".join(parts)


def _code(names: list[str]) -> str:
    return "<br>".join(f"`{name}`" for name in names)


def written(path: Path) -> str:
    """The text of a file as it should be."""
    if path.suffix == ".pyi":
        return stub()
    return replaced(path.read_text(encoding="utf-8"), "reference", reference())


def main(arguments: list[str]) -> int:
    """Write the files, or with ``--check`` say which of them differ."""
    check = "--check" in arguments
    differing = []
    for path in (Path(argument) for argument in arguments if argument != "--check"):
        text = written(path)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        differing.append(str(path))
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and differing:
        names = " ".join(differing)
        print(f"{names}: not what the table says; run python -m retrograd.lab.declared_mpsgraph {names}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
