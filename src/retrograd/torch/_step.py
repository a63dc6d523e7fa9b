"""The direct road of a single step: from a cell's tensors to the engine, without what only sequences need.

A step of a small cell takes less time than the checks of the array functions. What depends on the cell alone is kept
with it: the arrays of its parameters, and the problem of every batch size. A step that the engine refuses takes the
usual road, which finds out why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..ops import _threads
from ..ops._call import Refusal
from ..ops._types import Array
from ..ops.recurrent.cache import STAMPS
from ..ops.recurrent.problem import Inputs, Problem, new_inputs, problem_of
from ._arrays import array
from ._autograd import apply_of, differentiate_once
from ._norm import GRADIENT
from ._recurrent import ADDED, BIAS, dtype_of, plan_of

_MOST_PROBLEMS: Final = 64  # batch sizes; a problem is small, but a server may see many


class Refused(Exception):
    """The engine needs arguments in another form."""


class DirectCell:
    """The parameters of a cell as arrays, while they are the tensors that it was made of."""

    def __init__(
        self, title: str, names: str, options: str, sizes: tuple[int, int, int], parameters: Sequence[Tensor]
    ) -> None:
        self.plan = plan = plan_of(title, names, options)
        self.title, self.options, self.parameters = title, options, parameters
        self._inputs, self.units, self._projection = sizes
        self.outputs = self._projection or self.units
        self.dtype = parameters[0].dtype
        self._numpy_dtype = dtype_of(self.dtype)
        with torch.no_grad():
            self._arrays = [array(p, title, name) for p, name in zip(parameters, plan.parameters, strict=True)]
        self._memory = [(name, p, p.data_ptr(), p.shape) for name, p in zip(plan.parameters, parameters, strict=True)]
        self._parts: list[Any] = [None] * len(plan.cell.fields)
        for place, part in zip(plan.places, self._arrays, strict=True):
            if place != ADDED:
                self._parts[place] = part
        self._added = self._arrays[plan.places.index(ADDED)] if plan.adds_biases else None
        self._problems: dict[int, Problem] = {}

    def holds(self, named: Mapping[str, Tensor | None]) -> bool:
        """Whether these are the parameters, and their memory is the same."""
        for name, own, pointer, shape in self._memory:
            if named.get(name) is not own or own.data_ptr() != pointer:
                return False
            if own.shape != shape or not own.is_contiguous():
                return False
        return True

    def _new_problem(self, samples: int) -> Problem:
        fields = self.plan.cell.fields
        peephole = self._parts[fields.index("peephole")] if "peephole" in fields else None
        problem = problem_of(
            (1, samples, self._inputs), self._numpy_dtype, 1, True, self.units, self._projection, False, False,
            0 if peephole is None else peephole.ndim, 0, False, 0.0, True, self.plan.cell_options(),
        )  # fmt: skip
        if len(self._problems) >= _MOST_PROBLEMS:
            self._problems.clear()
        self._problems[samples] = problem
        return problem

    def forward(
        self, x: Tensor, h0: Tensor | None, c0: Tensor | None, keep: bool
    ) -> tuple[Array, Array | None, Inputs, Array | None, int]:
        """The new states, and what backward needs. The tensors have the right shapes and dtypes."""
        title, has_cells = self.title, self.plan.has_cells
        samples = len(x)
        problem = self._problems.get(samples) or self._new_problem(samples)
        parts = self._parts
        if self._added is not None:
            parts = parts.copy()
            parts[BIAS] = parts[BIAS] + self._added
        inputs = new_inputs(
            (
                problem,
                array(x, title, "input")[None],
                None,
                [tuple.__new__(self.plan.cell.weights, parts)],
                None if h0 is None else array(h0, title, "hx[0]" if has_cells else "hx")[None],
                None if c0 is None else array(c0, title, "hx[1]")[None],
                *_NOTHING,
            )
        )
        hn = np.empty((1, samples, self.outputs), self._numpy_dtype)
        cn = np.empty((1, samples, self.units), self._numpy_dtype) if has_cells else None
        buffer = np.empty(problem.cache_bytes(None), np.uint8) if keep else None
        stamp = next(STAMPS)
        if type(problem.engine.forward(inputs, buffer, stamp, None, hn, cn, False, _thread_count())) is Refusal:
            raise Refused
        return hn[0], None if cn is None else cn[0], inputs, buffer, stamp

    def backward(
        self, inputs: Inputs, buffer: Array, stamp: int, need: Sequence[bool], dhn: Tensor | None, dcn: Tensor | None
    ) -> list[Tensor | None]:
        """The gradients of x, h0, c0 and the parameters that are needed."""
        dx, dh0, dc0 = (
            np.empty(like.shape, like.dtype) if needed and like is not None else None
            for like, needed in zip((inputs.x, inputs.h0, inputs.c0), need, strict=False)
        )
        parts: list[Any] = [None] * len(self._parts)
        places = [BIAS if place == ADDED else place for place in self.plan.places]
        for place, like, needed in zip(places, self._arrays, need[3:], strict=True):
            if needed and parts[place] is None:
                parts[place] = np.empty(like.shape, like.dtype)
        dcells = [tuple.__new__(self.plan.cell.weights, parts)] if True in need[3:] else None
        answer = inputs.problem.engine.backward(
            None,
            _incoming(dhn, self.title),
            _incoming(dcn, self.title),
            inputs,
            buffer,
            stamp,
            dx,
            dcells,
            dh0,
            dc0,
            False,
            False,
            _thread_count(),
        )
        if type(answer) is Refusal:
            raise RuntimeError(f"{self.title}: the engine refuses {answer.argument} in backward")
        found: list[Array | None] = [None if part is None else part[0] for part in (dx, dh0, dc0)]
        for own, place, needed in zip(self.plan.places, places, need[3:], strict=True):
            part = parts[place] if needed else None
            # Added biases have the same gradient, each in its own memory, which an optimizer may modify.
            found.append(part.copy() if own == ADDED and part is not None else part)
        return [None if part is None else torch.from_numpy(part) for part in found]


_NOTHING: Final = (None, None, 0, None, None, None, None)  # no lengths, seed, resets, mask and zoneout


def _thread_count() -> int:
    return 0 if _threads.chosen else torch.get_num_threads()


def _incoming(gradient: Tensor | None, title: str) -> Array | None:
    if gradient is None:
        return None
    found = array(gradient, title, GRADIENT)
    return (found if found.flags.c_contiguous else np.ascontiguousarray(found))[None]


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cell: DirectCell, x: Tensor, h0: Tensor | None, c0: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        hn, cn, *kept = cell.forward(x, h0, c0, True)
        ctx.cell, ctx.kept = cell, kept
        ctx.save_for_backward(x, h0, c0, *parameters)  # so that changed ones are detected
        ctx.set_materialize_grads(False)
        return torch.from_numpy(hn), None if cn is None else torch.from_numpy(cn)

    @staticmethod
    def backward(ctx: Any, *outgoing: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, cell = ctx.saved_tensors, ctx.cell
        backward = partial(_backward, cell, ctx.kept, ctx.needs_input_grad[1:])
        return None, *differentiate_once(cell.title, backward, *outgoing, *saved)


def _backward(cell: DirectCell, kept: Any, need: Sequence[bool], dhn: Any, dcn: Any, *_: Any) -> tuple[Any, ...]:
    inputs, buffer, stamp = kept
    return tuple(cell.backward(inputs, buffer, stamp, need, dhn, dcn))


_apply: Final = apply_of(_Step)


def step(cell: DirectCell, x: Tensor, h0: Tensor | None, c0: Tensor | None, keep: bool) -> Any:
    """The new states, as PyTorch's cell returns them; raises Refused for tensors that need the usual road."""
    if keep:
        hn, cn = _apply(cell, x, h0, c0, *cell.parameters)
    else:
        found, own, *_ = cell.forward(x, h0, c0, False)
        hn, cn = torch.from_numpy(found), None if own is None else torch.from_numpy(own)
    return (hn, cn) if cell.plan.has_cells else hn
