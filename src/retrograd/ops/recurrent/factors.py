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
_STREAMS: Final = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)  # of the hidden and the cell state
_MOST_SEED: Final = (1 << 64) - 1


class Factors(NamedTuple):
    """The arguments of a call that act inside the recurrence, unchecked."""

    reset: npt.ArrayLike | None
    mask: Array | None
    zoneout: Zoneout | tuple[Zoneout | None, Zoneout | None] | None

    def kinds(self) -> tuple[int, bool]:
        """The kind of mask, and whether the hidden state has zoneout, which the problem depends on."""
        mask = 0 if self.mask is None else 1
        if mask and _args.as_array("mask", self.mask).ndim > 3:
            mask = 2 if _args.as_array("mask", self.mask).shape[-4] > 1 else 1
        first = self.zoneout[0] if isinstance(self.zoneout, tuple) else self.zoneout
        return mask, first is not None


def as_reset(factors: Factors, problem: Problem) -> Array | None:
    """[T, N], bytes."""
    if factors.reset is None:
        return None
    given = _args.as_array("reset", factors.reset)
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
    set_to_zero = given != 0
    return np.ascontiguousarray(set_to_zero.T if problem.batch_first else set_to_zero).view(np.uint8)


def as_mask(factors: Factors, problem: Problem) -> Array | None:
    """[cells, gates or 1, T, N, H]."""
    if factors.mask is None:
        return None
    gates = len(problem.cell.gates) if problem.mask == 2 else 1
    shape = (problem.cells, gates, problem.steps, problem.samples, problem.outputs)
    axes = "(cells, gates, N, T, H)" if problem.batch_first else "(cells, gates, T, N, H)"
    return _broadcast("mask", factors.mask, shape, axes, problem)


def _broadcast(name: str, value: Any, shape: tuple[int, ...], axes: str, problem: Problem) -> Array:
    """Weights of every unit and step, in the engine's order of axes."""
    array = _args.as_array(name, value)
    _args.check_dtype(name, array, problem.dtype, "as {x} is")
    if problem.batch_first and array.ndim >= 3:
        array = np.swapaxes(array, -3, -2)
    try:
        wide = np.broadcast_to(array, shape)
    except ValueError:
        own = (*shape[:-3], shape[-2], shape[-3], shape[-1]) if problem.batch_first else shape
        given = np.shape(value)
        raise ArgumentValueError(
            name, "{argument} has shape {}, which does not broadcast to {} = {}", given, axes, own
        ) from None
    if wide.shape[-1] > 1 and wide.strides[-1] != wide.itemsize:
        columns = np.broadcast_to(array, (*array.shape[:-1], shape[-1]))
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
        None if part is None else _zoneout(part, width, problem, (seed ^ stream) & _MOST_SEED, training)
        for part, width, stream in zip(given, widths, _STREAMS, strict=True)
    )
    return hidden, cell


def _zoneout(value: Any, width: int, problem: Problem, seed: int, training: bool) -> Array:
    shape = (problem.cells, problem.steps, problem.samples, width)
    axes = "(cells, N, T, H)" if problem.batch_first else "(cells, T, N, H)"
    if np.ndim(value):
        return _broadcast("zoneout", value, shape, axes, problem)
    rate = _args.as_number("zoneout", value)
    if not 0 <= rate < 1:
        raise ArgumentValueError("zoneout", "{zoneout} is {}, must be at least 0 and below 1", rate)
    if not training:
        return np.broadcast_to(np.full(width, 1 - rate, problem.dtype), shape)
    kept = dropout(np.ones(shape, problem.dtype), rate, seed=seed)
    np.minimum(kept, 1, out=kept)
    return kept
