"""Convert the caller's weights: one array per parameter or one per gate; a single cell or a list of cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

from numpy import ndarray

from .. import _args
from .._errors import ArgumentTypeError, ArgumentValueError
from .._types import Array
from .types import CELL_TYPES, UNGATED, Cell, CellType, Weights


def as_cells(name: str, weights: Weights, cell: CellType, result: bool = False) -> tuple[list[Cell], bool]:
    """The parameters of every cell, and whether a single cell was given rather than a sequence."""
    if type(weights) is cell.weights:
        return [_cell(name, weights, cell, result)], True
    if type(weights) is list and weights:
        for given in weights:
            if not _is_plain(given, cell):
                break
        else:
            return weights.copy(), False  # a copy: the caller's list may change before backward
    if isinstance(weights, (str, bytes)) or not isinstance(weights, Sequence) or _is_another(weights, cell):
        raise ArgumentTypeError(
            name, "{argument} must be {} or a sequence of them, not {}", cell.weights, type(weights)
        )
    if not weights:
        raise ArgumentValueError(name, "{argument} is empty, needs at least 1 cell")
    if isinstance(weights[0], ndarray):
        return [_cell(name, weights, cell, result)], True
    return [_cell(f"{name}[{index}]", given, cell, result) for index, given in enumerate(weights)], False


def _is_another(weights: Any, cell: CellType) -> bool:
    return any(isinstance(weights, other.weights) for other in CELL_TYPES.values() if other is not cell)


def _cell(name: str, given: Any, cell: CellType, result: bool) -> Cell:
    if _is_plain(given, cell):
        return cast(Cell, given)
    if isinstance(given, str) or not isinstance(given, Sequence) or _is_another(given, cell):
        raise ArgumentTypeError(name, "{argument} must be {}, not {}", cell.weights, type(given))
    if not 2 <= len(given) <= len(cell.fields):
        listed = ", ".join(f"{{{field}}}" for field in cell.fields[:-1]) + f" and {{{cell.fields[-1]}}}"
        raise ArgumentValueError(
            name, f"{{argument}} has {{}} arrays; a cell has 2 to {len(cell.fields)}: {listed}", len(given)
        )
    return tuple(
        None if part is None else _gate_arrays(f"{name}.{field}", field, part, cell, result)
        for field, part in itertools.zip_longest(cell.fields, given)
    )


def _is_plain(given: Any, cell: CellType) -> bool:
    """Whether this is what the engine takes, as is usual: a fast path around the full checks."""
    if type(given) is not cell.weights:
        return False
    for part in given:
        if part is not None and type(part) is not ndarray and not _is_gate_tuple(part, len(cell.gates)):
            return False
    return True


def _is_gate_tuple(part: Any, gates: int) -> bool:
    return type(part) is tuple and len(part) == gates and all(a is None or type(a) is ndarray for a in part)


def _gate_arrays(name: str, field: str, part: Any, cell: CellType, result: bool) -> Any:
    if not isinstance(part, (list, tuple)) or field in UNGATED:
        return _array(name, part, result)
    if len(part) != len(cell.gates):
        gates = ", ".join(cell.gates[:-1]) + f" and {cell.gates[-1]}" if len(cell.gates) > 1 else cell.gates
        raise ArgumentValueError(
            name, "{argument} is a sequence of {} arrays, must be of {}, for {}", len(part), len(cell.gates), gates
        )
    return tuple(None if a is None else _array(name, a, result) for a in part)


def _array(name: str, value: object, result: bool) -> Array:
    if result and not isinstance(value, ndarray):
        raise ArgumentTypeError(name, "{argument} must be an ndarray, not {}", type(value))
    return _args.as_array(name, value)


def hidden_size(wh: Any, cell: CellType) -> int:
    """The size of the hidden state, which all other shapes must match."""
    gates = len(cell.gates)
    first = wh[0] if type(wh) is tuple else wh
    if first is None:
        raise ArgumentValueError("wh", "{wh} is None; a cell needs {wx} and {wh} of every gate")
    shape: tuple[int, ...] = first.shape
    if len(shape) < 2:
        forms = (
            f"({gates}H, H), ({gates}, H, H) or {'three' if gates == 3 else 'four'} times (H, H)"
            if gates > 1
            else "(H, H)"
        )
        raise ArgumentValueError("wh", f"{{wh}} must be {forms}, not {{}}", shape_of(wh))
    if shape[-1] < 1:
        raise ArgumentValueError("wh", "{wh} has shape {}: the hidden size is 0, must be at least 1", shape_of(wh))
    return shape[-1]


def shape_of(part: Any) -> str:
    if isinstance(part, tuple):
        return "(" + ", ".join("None" if a is None else str(a.shape) for a in part) + ")"
    return str(part.shape)


def peephole_kind(cells: list[Cell], units: int) -> int:
    for cell in cells:
        if cell[3] is not None:
            break
    else:
        return 0
    kinds = {_peephole_of(cell[3], units) for cell in cells if cell[3] is not None}
    if len(kinds) > 1:
        raise ArgumentValueError(
            "weights", "some cells have diagonal and others full peepholes; they must be of one kind"
        )
    return kinds.pop()


def _peephole_of(part: Any, units: int) -> int:
    if isinstance(part, tuple):
        return max(0 if a is None else min(a.ndim, 2) for a in part)
    return 1 if part.ndim == 1 or part.shape == (4, units) else 2


def named_arrays(name: str, cells: Sequence[Cell], cell: CellType) -> Iterator[tuple[str, Any]]:
    """Every array of the cells, with its name for error messages."""
    for index, parts in enumerate(cells):
        for field, part in zip(cell.fields, parts, strict=False):
            label = f"{name}.{field}" if len(cells) == 1 else f"{name}[{index}].{field}"
            if type(part) is tuple:
                yield from ((f"{label} of gate {gate}", array) for gate, array in zip(cell.gates, part, strict=True))
            else:
                yield label, part
