"""What acts inside the recurrence: resets, masks of the state, and zoneout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _args
from .._errors import ArgumentTypeError, ArgumentValueError
from .._types import Array
from ..elementwise import dropout

if TYPE_CHECKING:
    from .problem import Problem

# A rate, or weights of the new state.
Zoneout: TypeAlias = float | Array
# What is added to the seed for the hidden and the cell state, also by `nn` and by the handlers of `jax`.
ZONEOUT_STREAMS: Final = (0x1E3779B97F4A7C15, 0x51B54A32D192ED03)
_MOST_SEED: Final = (1 << 64) - 1


class Factors(NamedTuple):
    """The arguments of a call that act inside the recurrence, unchecked."""

    reset: npt.ArrayLike | None
    mask: Array | None
    zoneout: Zoneout | tuple[Zoneout | None, Zoneout | None] | None

    def kinds(self) -> tuple[int, bool]:
        """The kind of mask, and whether the hidden state has zoneout, which the problem depends on."""
        kind = 0
        if self.mask is not None:
            mask = self.mask if type(self.mask) is np.ndarray else _args.as_array("mask", self.mask)
            kind = 2 if mask.ndim > 3 and mask.shape[-4] > 1 else 1
        first = self.zoneout[0] if isinstance(self.zoneout, tuple) else self.zoneout
        return kind, first is not None


def as_reset(factors: Factors, problem: Problem) -> Array | None:
    """[T, N], bytes."""
    if factors.reset is None:
        return None
    given = factors.reset if type(factors.reset) is np.ndarray else _args.as_array("reset", factors.reset)
    expected = problem.x_shape[:2]
    if given.shape != expected:
        axes = "(N, T)" if problem.batch_first else "(T, N)"
        raise ArgumentValueError("reset", "{reset} has shape {}, must be {} = {}", given.shape, axes, expected)
    if given.dtype.kind not in "biuf":
        raise ArgumentTypeError("reset", "{reset} has dtype {}; it must be of booleans or numbers", given.dtype)
    if problem.directions == 2:
        raise ArgumentValueError(
            "reset", "{reset} is given, but layers are bidirectional; it has one direction of time"
        )
    set_to_zero: Array = given if given.dtype.kind == "b" else given != 0
    # A copy: the caller's may change before backward.
    return np.array(set_to_zero.T if problem.batch_first else set_to_zero, np.uint8, order="C")


def as_mask(factors: Factors, problem: Problem) -> Array | None:
    """What the engine broadcasts to [cells, gates or 1, T, N, H]."""
    if factors.mask is None:
        return None
    mask = factors.mask if type(factors.mask) is np.ndarray else _args.as_array("mask", factors.mask)
    if mask.ndim and mask.shape[-1] == 1 < problem.outputs:
        mask = np.repeat(mask, problem.outputs, -1)  # the engine does not broadcast units
    return np.swapaxes(mask, -3, -2) if problem.batch_first and mask.ndim >= 3 else mask


def checked_factors(problem: Problem, mask: Any, zoneout: Any, cell_zoneout: Any) -> list[Array | None]:
    """Raise for arrays that do not broadcast to the shape of their problem; convert what the engine cannot read."""
    gates = len(problem.cell.gates) if problem.mask == 2 else 1
    steps = (problem.steps, problem.samples)
    given = (
        ("mask", mask, (problem.cells, gates, *steps, problem.outputs)),
        ("zoneout", zoneout, (problem.cells, *steps, problem.outputs)),
        ("zoneout", cell_zoneout, (problem.cells, *steps, problem.units)),
    )
    return [None if array is None else _broadcast(name, array, shape, problem) for name, array, shape in given]


def _broadcast(name: str, array: Array, shape: tuple[int, ...], problem: Problem) -> Array:
    _args.check_dtype(name, array, problem.dtype, "as {x} is")
    _args.check_aligned(name, array)
    try:
        wide = np.broadcast_to(array, shape)
    except ValueError:
        axes = ("cells", "gates")[: len(shape) - 3]
        own, given = shape, array.shape
        if problem.batch_first:
            own = (*shape[:-3], shape[-2], shape[-3], shape[-1])
            if len(given) >= 3:
                given = (*given[:-3], given[-2], given[-3], given[-1])
        order = ("N", "T") if problem.batch_first else ("T", "N")
        wanted = f"({', '.join((*axes, *order, 'H'))})"
        raise ArgumentValueError(
            name, "{argument} has shape {}, which does not broadcast to {} = {}", given, wanted, own
        ) from None
    columns = np.broadcast_to(array, (*array.shape[:-1], shape[-1]))
    if shape[-1] > 1 and columns.strides[-1] != columns.itemsize:
        wide = np.broadcast_to(np.ascontiguousarray(columns), shape)
    return wide


def as_zoneouts(factors: Factors, problem: Problem, seed: int, training: bool) -> tuple[Array | None, Array | None]:
    """The weights of the new hidden state and of the new cell state, [cells, T, N, H] each."""
    given = factors.zoneout
    if not isinstance(given, tuple):
        given = (given, None)
    if len(given) != 2:
        raise ArgumentValueError(
            "zoneout", "{zoneout} has {} parts, must have 2, for the hidden and the cell state", len(given)
        )
    if given[1] is not None and not problem.cell.has_cells:
        raise ArgumentValueError(
            "zoneout", "{zoneout} has a part for the cell state, which {} has not", problem.cell.title
        )
    if given[1] is not None and problem.peephole == 2:
        raise ArgumentValueError(
            "zoneout",
            "{zoneout} has a part for the cell state, and {weights} have full peepholes; they cannot be combined",
        )
    widths = problem.outputs, problem.units
    hidden, cell = (
        None if part is None else _zoneout(part, width, problem, (seed + stream) & _MOST_SEED, training)
        for part, width, stream in zip(given, widths, ZONEOUT_STREAMS, strict=True)
    )
    return hidden, cell


def _zoneout(value: Any, width: int, problem: Problem, seed: int, training: bool) -> Array:
    """What the engine broadcasts to [cells, T, N, width]."""
    array = value if type(value) is np.ndarray else None
    if array is None and not isinstance(value, (int, float)):
        array = _args.as_array("zoneout", value)
    if array is not None and array.ndim:
        if array.shape[-1] == 1 < width:
            array = np.repeat(array, width, -1)  # the engine does not broadcast units
        return np.swapaxes(array, -3, -2) if problem.batch_first and array.ndim >= 3 else array
    rate = _args.as_number("zoneout", value)
    if not 0 <= rate < 1:
        raise ArgumentValueError("zoneout", "{zoneout} is {}, must be at least 0 and below 1", rate)
    if not training:
        return np.full(width, 1 - rate, problem.dtype)
    shape = (problem.cells, problem.steps, problem.samples, width)
    kept = dropout(np.ones(shape, problem.dtype), rate, seed=seed)
    np.minimum(kept, 1, out=kept)
    return kept
