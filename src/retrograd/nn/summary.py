"""A table of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..graph.tensor import leaves
from .module import _CALLS, Module, Parameter
from .program import Programs

__all__ = ["summary_of"]


def summary_of(model: Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """The layers of a model, with the shapes of their results for these arguments; without any, only the layers."""
    shapes = _shapes(model, arguments, keywords) if arguments or keywords else {}
    rows = [("layer", "kind", "result", "parameters")]
    for name, module in model.modules():
        described = "" if module._children else module.describe()
        kind = type(module).__name__ + (f"({described})" if described else "")
        count = sum(p.size for p in module._variables.values() if isinstance(p, Parameter))
        rows.append((name or "the model", kind, "; ".join(shapes.get(id(module), ())), f"{count:,}" if count else ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3].rjust(widths[3])]) for row in rows]
    rule = "-" * len(lines[0])
    parameters = model.parameters().values()
    frozen = sum(p.size for p in parameters if not p.trainable)
    total = f"{sum(p.size for p in parameters):,} parameters, {_bytes(sum(p.value.nbytes for p in parameters))}"
    return "\n".join([lines[0], rule, *lines[1:], rule, total + (f"; {frozen:,} are frozen" if frozen else "")])


def _shapes(model: Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[int, list[str]]:
    """The shapes and dtypes of the results of each module, in the order of its calls, without repetitions."""
    calls: list[tuple[Module, Any]] = []
    _CALLS.results = calls
    try:
        Programs(model, [model], training=False).program_for(arguments, keywords)
    finally:
        _CALLS.results = None
    found: dict[int, list[str]] = {}
    for module, result in calls:
        shown = ", ".join(repr(leaf.spec) for leaf in leaves(result) if hasattr(leaf, "spec"))
        if shown not in (known := found.setdefault(id(module), [])):
            known.append(shown)
    return found


def _bytes(count: float) -> str:
    if count < 1024:
        return f"{count:,} bytes"
    return f"{count / 1024:,.1f} KiB" if count < 1 << 20 else f"{count / (1 << 20):,.1f} MiB"
