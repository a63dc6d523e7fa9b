"""The states of recurrent layers, and the work that a command buffer runs for them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from ..ops._types import Array
from ._matrix import MPSMatrix, TemporaryStorage
from ._rnn_descriptor import KINDS, Cell
from ._types import Members, Setting, as_label, as_unsigned

_FLOAT32: Final = np.dtype(np.float32)

# ---- states ----------------------------------------------------------------------------------------------------------


class MPSState(Members):
    """What an encode leaves for a later one."""

    readCount = Setting[int](as_unsigned, 1, "Number of encodes that will still read a temporary state.")
    label = Setting[str | None](as_label, None, "Debug label.")
    _readCount: int

    def __init__(self, temporary: bool) -> None:
        self._temporary = temporary
        self._readCount = 1
        self._released = False
        self._label: str | None = None

    @property
    def isTemporary(self) -> bool:
        return self._temporary

    def _check_readable(self, name: str) -> None:
        if self._temporary and (self._released or self._readCount == 0):
            raise ValueError(f"{name}: its readCount reached 0, so the contents are gone")

    def _count_read(self) -> None:
        if self._temporary:
            self._readCount -= 1
            if self._readCount == 0:
                self._released = True
                self._release()

    def _release(self) -> None:
        """Free what the state holds; recorded work keeps what it needs."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")


class MPSRNNRecurrentMatrixState(MPSState):
    """The recurrent states after a step, or the gradients of those before it. Made by a layer."""

    def __init__(self, matrices: list[MPSMatrix], temporary: bool) -> None:
        super().__init__(temporary)
        self._matrices = matrices  # h, and c of an LSTM

    def getRecurrentOutputMatrix(self, forLayerIndex: int) -> MPSMatrix | None:
        """h, [rows, outputFeatureChannels]. None for any layer but 0."""
        return self._matrix(forLayerIndex, 0)

    def getMemoryCellMatrix(self, forLayerIndex: int) -> MPSMatrix | None:
        """c. None if the layer is not an LSTM."""
        return self._matrix(forLayerIndex, 1)

    def _views(self) -> list[Array]:
        return [matrix._elements()[0] for matrix in self._matrices]

    def _matrix(self, layer: int, index: int) -> MPSMatrix | None:
        if as_unsigned(f"{type(self).__name__}: forLayerIndex", layer) or index >= len(self._matrices):
            return None
        return self._matrices[index]

    def _release(self) -> None:
        for matrix in self._matrices:
            if isinstance(matrix, TemporaryStorage):
                matrix._release()


class Pass:
    """A forward pass over a sequence. The command buffer fills it."""

    def __init__(self, cell: Cell, rows: list[int]) -> None:
        self.cell = cell
        self.rows = rows  # of every step
        self.y: Array | None = None  # [T, N, H]; None: the pass has not run
        self.initial: list[Array | None] = []
        self.cache: Any = None

    def states_before(self, step: int, rows: int) -> list[Array | None]:
        """The states that a step starts from, of the first rows."""
        if step == 0:
            return self.initial
        assert self.y is not None
        states: list[Array | None] = [self.y[step - 1, :rows]]
        if len(KINDS[self.cell.kind].states) > 1:
            states.append(self.cache.gates().c[step - 1, :rows])
        return states


class MPSRNNMatrixTrainingState(MPSState):
    """What the gradient needs from one step of a forward pass. Opaque; made by a layer."""

    def __init__(self, pass_: Pass, step: int, temporary: bool) -> None:
        super().__init__(temporary)
        self._pass: Pass | None = pass_
        self._step = step

    def _release(self) -> None:
        self._pass = None


# ---- work ------------------------------------------------------------------------------------------------------------


def run_copy(source: Array, target: Array, retained: object) -> None:
    with np.errstate(all="ignore"):
        target[...] = source


def _gathered(views: list[Array]) -> Array:
    """The matrices of all steps as one array of float32, [T, N, columns]. Rows of ended sequences are not used."""
    together: Array = np.zeros((len(views), *views[0].shape), _FLOAT32)
    for step, view in zip(together, views, strict=True):
        step[: len(view)] = view
    return together


def _scatter(together: Array, views: list[Array]) -> None:
    with np.errstate(all="ignore"):
        for step, view in zip(together, views, strict=True):
            view[...] = step[: len(view)]


def _as_float32(array: Array) -> Array:
    converted: Array = array if array.dtype == _FLOAT32 else array.astype(_FLOAT32)
    return converted


def run_forward(
    pass_: Pass,
    x: list[Array],
    weights: list[Array],
    before: list[Array],
    y: list[Array],
    states: list[list[Array]],
    retained: object,
) -> None:
    cell = pass_.cell
    kind = KINDS[cell.kind]
    record = cell.weights([_as_float32(array) for array in weights])
    initial: list[Array | None] = [array.astype(_FLOAT32) for array in before] or [None] * len(kind.states)
    found, *last, cache = kind.forward(_gathered(x), record, *initial, batch_sizes=pass_.rows, **cell.options())
    pass_.y, pass_.initial, pass_.cache = found, initial, cache
    _scatter(found, y)
    if len(states) == 1:
        _copy_all(last, states[0])
    elif states:
        every = [found, *([cache.gates().c] if len(last) > 1 else [])]
        now = [np.zeros_like(one) if start is None else start.copy() for one, start in zip(last, initial, strict=True)]
        for step, (rows, targets) in enumerate(zip(pass_.rows, states, strict=True)):
            for state, steps in zip(now, every, strict=True):
                state[:rows] = steps[step, :rows]
            _copy_all(now, targets)


def _copy_all(sources: list[Array], targets: list[Array]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[...] = source


class Gradient(NamedTuple):
    pass_: Pass
    first: int  # step of the pass
    rows: list[int]
    x: list[Array]
    dy: list[Array]
    weights: list[Array]
    after: list[Array]  # gradients of the states after the last step; empty: 0
    dx: list[Array] | None
    dweights: list[Array] | None
    accumulate: bool
    states: list[list[Array]]


def run_gradient(plan: Gradient, retained: object) -> None:
    pass_, rows = plan.pass_, plan.rows
    cell = pass_.cell
    kind = KINDS[cell.kind]
    if pass_.y is None:
        raise RuntimeError("the forward pass of these training states has not run, or has failed")
    weights = cell.weights([_as_float32(array) for array in plan.weights])
    x, dy = _gathered(plan.x), _gathered(plan.dy)
    after = [np.zeros((rows[0], cell.units), _FLOAT32) for _ in kind.states]
    for whole, given in zip(after, plan.after, strict=False):
        whole[: len(given)] = given
    names = [f"d{state}0" for state in kind.states]
    targets = None
    if plan.dweights is not None:
        targets = [_as_float32(array) for array in plan.dweights]
    last_only = len(plan.states) == 1
    out: dict[str, Any] = {}
    if plan.dx is not None:
        out["dx"] = np.zeros_like(x)
    if targets is not None:
        out["dweights"] = cell.weights(targets)
        if cell.unit_transform:
            out["dweights"] = out["dweights"]._replace(wx=None)
    if last_only:
        out.update((name, np.zeros_like(array)) for name, array in zip(names, after, strict=True))
    need = [name for name in out if name != "dweights"]
    if targets is not None:
        need += [f"d{field}" for field in cell.fields()]
    if out:
        cache = _piece(plan, weights, x, 0, len(rows))
        # Only the gradients of the weights have former values to add to: the others are 0.
        incoming = dict(zip((f"d{state}n" for state in kind.states), after, strict=True))
        kind.backward(dy, cache, need=need, out=out, accumulate=plan.accumulate, **incoming)
    if plan.dx is not None:
        _scatter(out["dx"], plan.dx)
    if targets is not None and plan.dweights is not None:
        for computed, array in zip(targets, plan.dweights, strict=True):
            if computed is not array:
                run_copy(computed, array, None)
    if last_only:
        _copy_all([out[name] for name in names], plan.states[0])
    else:
        _step_back(plan, weights, x, dy, after)


def _step_back(plan: Gradient, weights: Any, x: Array, dy: Array, states: list[Array]) -> None:
    """The gradients of the states before every step, one step after another from the last to the first."""
    kind = KINDS[plan.pass_.cell.kind]
    names = [f"d{state}0" for state in kind.states]
    for step in reversed(range(len(plan.states))):
        rows = plan.rows[step]
        cache = _piece(plan, weights, x, step, step + 1)
        incoming = {f"d{name}n": state[:rows] for name, state in zip(kind.states, states, strict=True)}
        found = kind.backward(dy[step : step + 1, :rows], cache, need=names, **incoming)
        for name, state, target in zip(names, states, plan.states[step], strict=True):
            state[:rows] = getattr(found, name)  # the rows of ended sequences pass their gradients on
            target[...] = state


def _piece(plan: Gradient, weights: Any, x: Array, start: int, stop: int) -> Any:
    """The cache of consecutive steps. Of a whole pass it has the buffer; for a part, backward recomputes it."""
    pass_ = plan.pass_
    rows = plan.rows[start:stop]
    first = plan.first + start
    before = pass_.states_before(first, rows[0])
    buffer = pass_.cache.buffer if first == 0 and len(rows) == len(pass_.rows) else None
    return KINDS[pass_.cell.kind].cache(
        x[start:stop, : rows[0]], weights, *before, buffer=buffer, batch_sizes=rows, **pass_.cell.options()
    )
