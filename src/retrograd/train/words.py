"""Words for counts and lists in messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["counted", "fell", "listed", "measured", "named", "some"]

_SHOWN: Final = 10  # entries of a list of faults
_HARDLY: Final = 0.01  # the share of a loss below which a change is hardly one


def measured(loss: float) -> str:
    """Format a loss with three decimals, or a small one with three digits, so that it is not 0.000."""
    return f"{loss:.3g}" if 0 < abs(loss) < 0.01 else f"{loss:.3f}"


def fell(first: float, best: float, measure: str) -> str:
    """Say how far a loss fell, and if it hardly did."""
    verb = "hardly fell, from" if first - best < _HARDLY * abs(first) else "fell from"
    return f"{verb} {measured(first)} to {measured(best)} {measure}"


def some(faults: Sequence[tuple[int, str]]) -> str:
    """Format the first faults in order of row, and the number of further ones."""
    shown = [what for _, what in sorted(faults, key=lambda fault: fault[0])[:_SHOWN]]
    return "; ".join(shown) + (f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else "")


def counted(count: int, what: str) -> str:
    """Format a count with its noun: 1 row, 1,200 rows."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def listed(names: Mapping[str, Any] | Sequence[str]) -> str:
    """Format names as a list, at most 20 of them."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")


def named(what: str, names: Sequence[str]) -> str:
    """Format names after their noun: column 'a', columns 'a', 'b'."""
    return f"{what} {listed(names)}" if len(names) == 1 else f"{what}s {listed(names)}"
