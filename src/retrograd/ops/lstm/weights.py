"""Convert the caller's weights: one array per parameter or one per gate; a single cell or a list of cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .. import _args
from .._errors import ArgumentTypeError, ArgumentValueError
from .._types import Array
from .types import Cell, LstmWeights, Weights


def as_cells(name: str, weights: Weights, result: bool = False) -> tuple[list[Cell], bool]:
    """The parameters of every cell, and whether a single cell was given rather than a sequence."""
    if isinstance(weights, LstmWeights):
        return [_cell(name, weights, result)], True
    if isinstance(weights, (str, bytes)) or not isinstance(weights, Sequence):
        raise ArgumentTypeError(name, "{argument} must be LstmWeights or a sequence of them, not {}", type(weights))
    if not weights:
        raise ArgumentValueError(name, "{argument} is empty, needs at least 1 cell")
    if isinstance(weights[0], np.ndarray):
        return [_cell(name, weights, result)], True
    return [_cell(f"{name}[{index}]", cell, result) for index, cell in enumerate(weights)], False


def _cell(name: str, cell: Any, result: bool) -> Cell:
    if type(cell) is LstmWeights:
        for part in cell:
            if part is not None and type(part) is not np.ndarray and not _is_gate_tuple(part):
                break
        else:
            return cell
    elif isinstance(cell, str) or not isinstance(cell, Sequence):
        raise ArgumentTypeError(name, "{argument} must be LstmWeights, not {}", type(cell))
    elif not 2 <= len(cell) <= 4:
        raise ArgumentValueError(
            name, "{argument} has {} arrays; a cell has 2 to 4: {wx}, {wh}, {b} and {peephole}", len(cell)
        )
    fields = itertools.zip_longest(LstmWeights._fields, cell)
    return tuple(None if part is None else _gate_arrays(f"{name}.{field}", part, result) for field, part in fields)


def _is_gate_tuple(part: Any) -> bool:
    """Whether this is a tuple of four arrays, as is usual: a fast path around the full checks."""
    return type(part) is tuple and len(part) == 4 and all(a is None or type(a) is np.ndarray for a in part)


def _gate_arrays(name: str, part: Any, result: bool) -> Any:
    if not isinstance(part, (list, tuple)):
        return _array(name, part, result)
    if len(part) != 4:
        raise ArgumentValueError(
            name, "{argument} is a sequence of {} arrays, must be of 4, for i, f, g and o", len(part)
        )
    return tuple(None if a is None else _array(name, a, result) for a in part)


def _array(name: str, value: object, result: bool) -> Array:
    if result and not isinstance(value, np.ndarray):
        raise ArgumentTypeError(name, "{argument} must be an ndarray, not {}", type(value))
    return _args.as_array(name, value)


def hidden_size(wh: Any) -> int:
    """The hidden size, which all other shapes must match."""
    first = wh[0] if type(wh) is tuple else wh
    if first is None:
        raise ArgumentValueError("wh", "{wh} is None; a cell needs {wx} and {wh} of every gate")
    shape: tuple[int, ...] = first.shape
    if len(shape) < 2:
        raise ArgumentValueError("wh", "{wh} must be (4H, H), (4, H, H) or four times (H, H), not {}", shape_of(wh))
    if shape[-1] < 1:
        raise ArgumentValueError("wh", "{wh} has shape {}: the hidden size is 0, must be at least 1", shape_of(wh))
    return shape[-1]


def shape_of(part: Any) -> str:
    if isinstance(part, tuple):
        return "(" + ", ".join("None" if a is None else str(a.shape) for a in part) + ")"
    return str(part.shape)


def peephole_kind(cells: list[Cell], units: int) -> int:
    kinds = {_peephole_of(cell[3], units) for cell in cells if cell[3] is not None}
    if len(kinds) > 1:
        raise ArgumentValueError(
            "weights", "some cells have diagonal and others full peepholes; they must be of one kind"
        )
    return kinds.pop() if kinds else 0


def _peephole_of(part: Any, units: int) -> int:
    if isinstance(part, tuple):
        return max(0 if a is None else min(a.ndim, 2) for a in part)
    return 1 if part.ndim == 1 or part.shape == (4, units) else 2


def named_arrays(name: str, cells: Sequence[Cell]) -> Iterator[tuple[str, Any]]:
    """Every array of the cells, with its name for error messages."""
    for index, cell in enumerate(cells):
        for field, part in zip(LstmWeights._fields, cell, strict=True):
            label = f"{name}.{field}" if len(cells) == 1 else f"{name}[{index}].{field}"
            if type(part) is tuple:
                yield from ((f"{label} of gate {gate}", array) for gate, array in zip("ifgo", part, strict=True))
            else:
                yield label, part
