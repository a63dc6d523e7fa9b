"""Graphs and programs as tables and pictures."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .operation import Spec
from .tensor import CONSTANT, INPUT, VARIABLE, Graph, Node

if TYPE_CHECKING:
    from .program import Program

_SHOWN: Final = 200  # rows of a table


def _size(count: float, unit: str = "B") -> str:
    for prefix in ("", "k", "M", "G"):
        if abs(count) < 9999.5 or prefix == "G":
            return f"{count:.0f} {prefix}{unit}" if not prefix else f"{count:.4g} {prefix}{unit}"
        count /= 1000
    raise AssertionError


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int]) -> str:
    everything = [list(headings), *map(list, rows)]
    left_out = len(everything) - 1 - _SHOWN
    everything = everything[: _SHOWN + 1]
    widths = [max(len(row[i]) for row in everything) for i in range(len(headings))]
    lines = []
    for row in everything:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    if left_out > 0:
        lines.append(f"... {left_out} more")
    return "\n".join(lines)


def _specs(specs: Iterable[Spec | None]) -> str:
    return " ".join("-" if spec is None else repr(spec) for spec in specs)


def _short(text: str, most: int = 48) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _line(line: tuple[str, int]) -> str:
    return f"{os.path.basename(line[0])}:{line[1]}"


def _name(node: Node) -> str:
    if node.operation is INPUT:
        return f"input {node.attributes['name']}"
    if node.operation is VARIABLE:
        return f"variable {node.attributes['variable'].name}".rstrip()
    if node.operation is CONSTANT and not node.results[0].shape:
        return f"constant {node.attributes['value'].item():g}"
    return node.operation.name


def graph_table(graph: Graph) -> str:
    """The nodes of a graph, one a row."""
    rows = []
    for node in graph.nodes:
        inputs = " ".join("-" if t is None else str(t.node.number) for t in node.inputs)
        results = [t.spec for t in node.results]
        flops = 0.0
        if node.operation.flops is not None:
            given = [None if t is None else t.spec for t in node.inputs]
            flops = node.operation.flops(given, results, **node.attributes)
        size = sum(spec.nbytes for spec in results)
        rows.append(
            [
                str(node.number),
                _name(node),
                _short(inputs),
                _short(_specs(results)),
                _size(size),
                _size(flops, ""),
                _line(node.line),
            ]
        )
    return _table(("", "operation", "of", "results", "bytes", "flops", "line"), rows, (0, 4, 5))


def program_table(program: Program) -> str:
    """The steps of a program in the order in which they run."""
    rows = []
    plan = program.plan
    for number, step in enumerate(plan.steps):
        results = [t.spec for t in step.results if t is not None]
        offsets = []
        for tensor in step.results:
            place = None if tensor is None else plan.places[id(tensor)]
            if place is not None:
                offsets.append(
                    f"{place.variable.name or 'variable'}" if place.variable is not None else str(place.offset)
                )
        size = sum(spec.nbytes for spec in results)
        mark = "*" if number >= plan.commits else ""
        rows.append(
            [
                f"{number}{mark}", _short(step.name), _short(_specs(results)), _size(size), _size(step.flops(), ""),
                _short(" ".join(offsets), 20), _line(step.lines[0]),
            ]
        )  # fmt: skip
    for variable, tensor in plan.writes:
        rows.append(
            ["*", f"assign {variable.name}".rstrip(), repr(tensor.spec), _size(tensor.spec.nbytes), "0 ", "", ""]
        )
    table = _table(("", "step", "results", "bytes", "flops", "at", "line"), rows, (0, 3, 4))
    shared = f"{_size(plan.memory)} without sharing"
    return (
        f"{table}\n{program._core.size} records, arena of {_size(plan.arena)} ({shared}), "
        f"{len(program.variables)} variables; * writes to variables"
    )


class Profile:
    """The time of each step of a program, in seconds; `print` shows a table."""

    def __init__(self, program: Program, times: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        self.steps: list[str] = []
        self.seconds: list[float] = []
        self.flops: list[float] = []
        plan = program.plan
        for number, step in enumerate(plan.steps):
            self.steps.append(step.name)
            self.seconds.append(float(sum(t for t, s in zip(times, program.records, strict=True) if s == number)))
            self.flops.append(step.flops())
        rest = float(sum(t for t, s in zip(times, program.records, strict=True) if s < 0))
        if plan.writes:
            self.steps.append("assign")
            self.seconds.append(rest)
            self.flops.append(0.0)

    @property
    def total(self) -> float:
        return float(sum(self.seconds))

    def __repr__(self) -> str:
        whole = self.total or 1.0
        rows = [
            [_short(name), f"{1e6 * t:.2f}", f"{100 * t / whole:.1f} %", f"{f / t / 1e9:.2f}" if t > 0 and f else "-"]
            for name, t, f in zip(self.steps, self.seconds, self.flops, strict=True)
        ]
        rows.append(["total", f"{1e6 * self.total:.2f}", "100.0 %", "-"])
        return _table(("step", "µs", "share", "GFLOPS"), rows, (1, 2, 3))


# ---- pictures --------------------------------------------------------------------------------------------------------

_COLORS: Final = {INPUT: "#cfe8ff", VARIABLE: "#ffe3b3", CONSTANT: "#eeeeee"}
_BOX: Final = (150, 34)
_GAP: Final = (18, 30)


def draw(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write the graph as SVG: nodes in rows by their distance from the inputs.

    Constants are left out, and variables that only updates read: the states of optimizers.
    """
    read = {t.node.number for node in graph.nodes if not node.operation.updates for t in node.inputs if t is not None}
    read |= {t.node.number for t in graph.outputs}
    nodes = [
        node
        for node in graph.nodes
        if node.operation is not CONSTANT and (node.operation is not VARIABLE or node.number in read)
    ]
    depth: dict[int, int] = {}
    for node in nodes:
        before = [depth[t.node.number] for t in node.inputs if t is not None and t.node.number in depth]
        depth[node.number] = 1 + max(before) if before else 0
    # Inputs and variables stand just above their first use.
    for node in reversed(nodes):
        if node.operation in (INPUT, VARIABLE):
            uses = [depth[n.number] for n in nodes if any(t is not None and t.node is node for t in n.inputs)]
            depth[node.number] = max(0, min(uses) - 1) if uses else 0
    rows: dict[int, list[Node]] = {}
    for node in nodes:
        rows.setdefault(depth[node.number], []).append(node)
    (width, height), (gap_x, gap_y) = _BOX, _GAP
    widest = max((len(row) for row in rows.values()), default=1)
    total = widest * (width + gap_x) + gap_x
    at: dict[int, tuple[float, float]] = {}
    for level, row in sorted(rows.items()):
        left = (total - len(row) * (width + gap_x) + gap_x) / 2
        for i, node in enumerate(row):
            at[node.number] = (left + i * (width + gap_x), gap_y + level * (height + gap_y))
    bottom = max((y for _, y in at.values()), default=0) + height + gap_y
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="{bottom:.0f}" '
        f'viewBox="0 0 {total:.0f} {bottom:.0f}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for node in nodes:
        x, y = at[node.number]
        for tensor in node.inputs:
            if tensor is None or tensor.node.number not in at:
                continue
            fx, fy = at[tensor.node.number]
            x1, y1, x2, y2 = fx + width / 2, fy + height, x + width / 2, y
            parts.append(
                f'<path d="M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + gap_y:.0f} {x2:.0f},{y2 - gap_y:.0f} {x2:.0f},{y2:.0f}" '
                'fill="none" stroke="#888"/>'
            )
    outputs = {t.node.number for t in graph.outputs}
    for node in nodes:
        x, y = at[node.number]
        fill = "#cdeccd" if node.number in outputs else _COLORS.get(node.operation, "#ffffff")
        name, spec = html.escape(_short(_name(node), 24)), html.escape(_short(_specs(t.spec for t in node.results), 26))
        parts.append(
            f"<g><title>{html.escape(_line(node.line))}</title>"
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="#444"/>'
            f'<text x="{x + width / 2:.0f}" y="{y + 14:.0f}" text-anchor="middle">{name}</text>'
            f'<text x="{x + width / 2:.0f}" y="{y + 28:.0f}" text-anchor="middle" fill="#666" font-size="9">'
            f"{spec}</text></g>"
        )
    parts.append("</svg>")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(parts) + "\n")
