"""The oracle: LSTM, GRU and simple RNN. One time loop applies a cell to the samples that are active at each step.

A network is a list of L*D cells, layer by layer, the directions of a layer next to each other. Direction 1 runs from
the last step to the first; its output is placed at the step whose input it read. Layer 0 reads x [T, N, I], the others
read the outputs of both directions of the layer below, times `masks[l-1]`.

In the formulas u is a cell's input and h-, c- the state before a step. P is the width of h: H, unless an LSTM has a
projection. Options inside the recurrence, from the state before the step to the one after it:

    reset     h-, c- = 0 where reset                                              in the products and in the carry
    mask      wh_k (h- m_k) instead of wh_k h- in the pre-activation of gate k    in the products only
    norm      LN(wx u; gamma_x) + LN(wh h-; gamma_h) instead of wx u + wh h-      over all gates together
    clip      act(clamp(z, -clip, clip)) instead of act(z)                        for every gate
    zoneout   h = k h~ + (1 - k) h-, where h~ is the cell's output                and in the same way c

LN(a; gamma) = gamma (a - mean) / sqrt(var + eps). A clamp has gradient 1 at its limits and 0 outside.

These combinations raise ValueError: norm with a peephole, clip, cell_clip or projection; norm with the GRU of kind
"before"; reset with two directions (where a reversed scan would be cut is not defined).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .precision import Array, working_type
from .recurrent_cells import AnyCell, Gru, Lstm, Rnn, Step
from .recurrent_types import (
    GruBackward,
    GruCell,
    GruForward,
    GruOptions,
    LstmBackward,
    LstmCell,
    LstmForward,
    LstmOptions,
    RnnBackward,
    RnnCell,
    RnnForward,
    RnnOptions,
)

__all__ = [
    "gru_backward",
    "gru_forward",
    "lstm_backward",
    "lstm_forward",
    "rnn_backward",
    "rnn_forward",
]


# --- the time loop ----------------------------------------------------------------------------------------------------


class _Network:
    """Checked arguments in the working dtype, and the time loop over them."""

    def __init__(
        self,
        x: npt.ArrayLike,
        cells: Sequence[AnyCell],
        h0: npt.ArrayLike | None,
        c0: npt.ArrayLike | None,
        kind: Any,  # Lstm, Gru or Rnn
    ) -> None:
        x, self.work = working_type(x)
        options: Any = kind.o
        directions = options.directions
        if x.ndim != 3:
            raise ValueError(f"x has shape {x.shape}, expected [T, N, I]")
        if directions not in (1, 2) or not cells or len(cells) % directions != 0:
            raise ValueError(f"{len(cells)} cells do not make layers of {directions} directions")
        expected = len(type(options)().activations)
        if len(options.activations) != expected:
            raise ValueError(f"{len(options.activations)} activations, expected {expected}: {kind.named}")
        self.kind, self.directions = kind, directions
        self.T, self.N, self.I = x.shape
        projection = getattr(cells[0], "projection", None)
        self.P = np.shape(cells[0].wh)[-1] if projection is None else np.shape(projection)[0]
        self.H = self.P if projection is None else np.shape(projection)[-1]
        self.layers = len(cells) // directions
        self.x = x.astype(self.work)
        self.cells = [self._cell(number, cell) for number, cell in enumerate(cells)]
        _refuse_combinations(options, self.cells)
        count, steps = len(cells), (self.T, self.N)
        self.h0 = self.state("h0", h0, self.P)
        self.c0 = self.state("c0", c0, self.H if isinstance(kind, Lstm) else 0)
        self.active = np.ones(steps, dtype=np.bool_)
        if options.active is not None:
            self.active = self.checked("active", options.active, steps).astype(np.bool_)
        self.reset = np.zeros(steps, dtype=np.bool_)
        if options.reset is not None:
            self.reset = self.checked("reset", options.reset, steps).astype(np.bool_)
        if options.masks is not None and len(options.masks) != self.layers - 1:
            raise ValueError(f"{len(options.masks)} masks, expected {self.layers - 1}: one between each two layers")
        self.masks = [self.checked("mask", mask, (*steps, directions * self.P)) for mask in options.masks or ()]
        self.mask = self._spread("mask", options.mask, (count, kind.gates, *steps, self.P))
        self.zoneout_h = self._spread("zoneout_h", options.zoneout_h, (count, *steps, self.P))
        self.zoneout_c = self._spread("zoneout_c", getattr(options, "zoneout_c", None), (count, *steps, self.H))

    def checked(self, name: str, a: npt.ArrayLike, *shapes: tuple[int, ...]) -> Array:
        a = np.asarray(a)
        if a.shape not in shapes:
            raise ValueError(f"{name} has shape {a.shape}, expected {' or '.join(map(str, shapes))}")
        return a.astype(self.work)

    def state(self, name: str, a: npt.ArrayLike | None, width: int) -> Array:
        shape = (len(self.cells), self.N, width)
        return np.zeros(shape, dtype=self.work) if a is None else self.checked(name, a, shape)

    def _spread(self, name: str, a: npt.ArrayLike | None, shape: tuple[int, ...]) -> Array | None:
        if a is None:
            return None
        a = np.asarray(a)
        if len(a.shape) > len(shape) or any(n not in (1, m) for n, m in zip(a.shape[::-1], shape[::-1], strict=False)):
            raise ValueError(f"{name} has shape {a.shape}, which does not broadcast to {shape}")
        return np.broadcast_to(a.astype(self.work), shape)

    def _cell(self, number: int, cell: AnyCell) -> AnyCell:
        G, H, P = self.kind.gates, self.H, self.P
        width = self.I if number < self.directions else self.directions * P
        shapes: dict[str, tuple[tuple[int, ...], ...]] = {
            "wx": ((G, H, width),),
            "wh": ((G, H, P),),
            "peephole": ((G, H), (G, H, H)),
            "projection": ((P, H),),
            "gamma_c": ((H,),),
            "beta_c": ((H,),),
        }
        given = {
            name: None if a is None else self.checked(f"{name} of cell {number}", a, *shapes.get(name, ((G, H),)))
            for name, a in cell._asdict().items()
        }
        needed = {"gamma_x", "gamma_h", "gamma_c"} & given.keys() if self.kind.o.norm is not None else set()
        for name in ("gamma_x", "gamma_h", "gamma_c"):
            if name in given and (given[name] is not None) != (name in needed):
                have = "is missing" if name in needed else "is given"
                raise ValueError(f"{name} of cell {number} {have}, norm is {self.kind.o.norm!r}")
        if self.kind.o.norm is None and given.get("beta_c") is not None:
            raise ValueError(f"beta_c of cell {number} is given, norm is None")
        if P != H and given["projection"] is None:
            raise ValueError(f"projection of cell {number} is missing, that of cell 0 has shape {(P, H)}")
        return type(cell)(**given)

    def order(self, direction: int) -> range:
        """The order in which a direction visits the steps."""
        return range(self.T) if direction == 0 else range(self.T - 1, -1, -1)

    def columns(self, direction: int) -> slice:
        return slice(direction * self.P, (direction + 1) * self.P)

    def masked(self, a: Array, layer: int) -> Array:
        """The input of a layer, or its gradient, times the dropout mask below it."""
        return a * self.masks[layer - 1] if self.masks and layer > 0 else a

    def forward(self) -> _Run:
        steps: list[dict[int, Step]] = [{} for _ in self.cells]
        h_prev = np.zeros((len(self.cells), self.T, self.N, self.P), dtype=self.work)
        c_prev, states = np.zeros((2, len(self.cells), self.T, *self.c0.shape[1:]), dtype=self.work)
        hn, cn = self.h0.copy(), self.c0.copy()  # updated at every step
        inputs: list[Array] = []
        y = self.x  # of the layer below
        for layer in range(self.layers):
            u = self.masked(y, layer)
            inputs.append(u)
            y = np.zeros((self.T, self.N, self.directions * self.P), dtype=self.work)
            for direction in range(self.directions):
                number = layer * self.directions + direction
                h, c = hn[number], cn[number]  # views
                for t in self.order(direction):
                    on = self.active[t]
                    h[on & self.reset[t]] = 0
                    c[on & self.reset[t]] = 0
                    h_prev[number, t], c_prev[number, t] = h, c
                    mask = None if self.mask is None else self.mask[number, :, t, on].swapaxes(0, 1)
                    step = self.kind.step(self.cells[number], u[t, on], h[on], c[on], mask)
                    steps[number][t] = step
                    h[on], c[on] = step.new_h, step.new_c
                    if self.zoneout_h is not None:
                        k = self.zoneout_h[number, t, on]
                        h[on] = k * step.new_h + (1 - k) * step.h
                    if self.zoneout_c is not None:
                        k = self.zoneout_c[number, t, on]
                        c[on] = k * step.new_c + (1 - k) * step.c
                    states[number, t, on] = c[on]
                    y[t, on, self.columns(direction)] = h[on]
        return _Run(y, hn, cn, steps, list(states), list(h_prev), list(c_prev), inputs)

    def values(self, steps: list[dict[int, Step]], name: str) -> list[Array]:
        """Collect a field of the steps: [T, N, ...] per cell, 0 where a sample is inactive."""
        results = []
        for of_cell in steps:
            shape = (self.kind.gates, self.H) if name in ("z", "gates") else (self.H,)
            result = np.zeros((self.T, self.N, *shape), dtype=self.work)
            for t, step in of_cell.items():
                result[t, self.active[t]] = getattr(step, name)
            results.append(result)
        return results

    def backward(
        self, dy: npt.ArrayLike | None, dhn: npt.ArrayLike | None, dcn: npt.ArrayLike | None
    ) -> tuple[Array, list[AnyCell], Array, Array]:
        """Return dx, the gradients of the cells, dh0 and dc0. Where a sample is inactive, the gradients of its state
        are passed on unchanged, dx is 0, and dy is not read.
        """
        run = self.forward()
        dlayer = np.zeros_like(run.y) if dy is None else self.checked("dy", dy, run.y.shape)  # of this layer's output
        dh0, dc0 = self.state("dhn", dhn, self.P).copy(), self.state("dcn", dcn, self.c0.shape[-1]).copy()
        gradients = [type(cell)(*(None if p is None else np.zeros_like(p) for p in cell)) for cell in self.cells]
        for layer in range(self.layers - 1, -1, -1):
            du = np.zeros_like(run.inputs[layer])
            for direction in range(self.directions):
                number = layer * self.directions + direction
                dh, dc = dh0[number], dc0[number]  # views
                for t in reversed(self.order(direction)):
                    on = self.active[t]
                    dnew_h, dnew_c = dh[on] + dlayer[t, on, self.columns(direction)], dc[on]
                    dkept_h, dkept_c = np.zeros_like(dnew_h), np.zeros_like(dnew_c)
                    if self.zoneout_h is not None:
                        k = self.zoneout_h[number, t, on]
                        dkept_h, dnew_h = (1 - k) * dnew_h, k * dnew_h
                    if self.zoneout_c is not None:
                        k = self.zoneout_c[number, t, on]
                        dkept_c, dnew_c = (1 - k) * dnew_c, k * dnew_c
                    step = run.steps[number][t]
                    dut, dold_h, dold_c = self.kind.back(self.cells[number], gradients[number], step, dnew_h, dnew_c)
                    du[t, on] += dut
                    dh[on], dc[on] = dold_h + dkept_h, dold_c + dkept_c
                    dh[on & self.reset[t]] = 0
                    dc[on & self.reset[t]] = 0
            dlayer = self.masked(du, layer)
        return dlayer, gradients, dh0, dc0


class _Run(NamedTuple):
    """What the time loop computes forward; lists have an element per cell, `inputs` one per layer."""

    y: Array
    hn: Array
    cn: Array
    steps: list[dict[int, Step]]  # by t
    cells: list[Array]
    h_prev: list[Array]
    c_prev: list[Array]
    inputs: list[Array]


def _refuse_combinations(options: Any, cells: Sequence[AnyCell]) -> None:
    if options.norm not in (None, "haste", "cell"):
        raise ValueError(f"norm is {options.norm!r}, expected None, 'haste' or 'cell'")
    if getattr(options, "output_reads", "new") not in ("new", "old"):
        raise ValueError(f"output_reads is {options.output_reads!r}, expected 'new' or 'old'")
    if getattr(options, "kind", "after") not in ("after", "before"):
        raise ValueError(f"kind is {options.kind!r}, expected 'after' or 'before'")
    for name in ("clip", "cell_clip"):
        limit = getattr(options, name, None)
        if limit is not None and not limit > 0:
            raise ValueError(f"{name} is {limit}, expected a positive number")
    if options.reset is not None and options.directions == 2:
        raise ValueError("reset is given and directions is 2: where a reversed scan is cut is not defined")
    if options.norm is None:
        return
    with_norm = {
        "peephole": any(getattr(cell, "peephole", None) is not None for cell in cells),
        "projection": any(getattr(cell, "projection", None) is not None for cell in cells),
        "clip": options.clip is not None,
        "cell_clip": getattr(options, "cell_clip", None) is not None,
        "kind 'before'": getattr(options, "kind", "after") == "before",
    }
    for name, given in with_norm.items():
        if given:
            raise ValueError(f"norm is {options.norm!r} and {name} is given: they do not combine")


# --- the functions ----------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def lstm_forward(
    x: npt.ArrayLike,
    cells: Sequence[LstmCell],
    h0: npt.ArrayLike | None = None,
    c0: npt.ArrayLike | None = None,
    **options: Any,
) -> LstmForward:
    """Stacked LSTM over x [T, N, I], as `Lstm` says. The options are the fields of `LstmOptions`."""
    network = _Network(x, cells, h0, c0, Lstm(LstmOptions(**options)))
    run = network.forward()
    gates, z = (network.values(run.steps, name) for name in ("gates", "z"))
    return LstmForward(*run[:3], gates, z, *run[4:])


@np.errstate(all="ignore")
def lstm_backward(
    dy: npt.ArrayLike | None,
    dhn: npt.ArrayLike | None,
    dcn: npt.ArrayLike | None,
    x: npt.ArrayLike,
    cells: Sequence[LstmCell],
    h0: npt.ArrayLike | None = None,
    c0: npt.ArrayLike | None = None,
    **options: Any,
) -> LstmBackward:
    """Gradients of `lstm_forward`, from the gradients of y, hn and cn; None means zero."""
    return LstmBackward(*_Network(x, cells, h0, c0, Lstm(LstmOptions(**options))).backward(dy, dhn, dcn))


@np.errstate(all="ignore")
def gru_forward(
    x: npt.ArrayLike, cells: Sequence[GruCell], h0: npt.ArrayLike | None = None, **options: Any
) -> GruForward:
    """Stacked GRU over x [T, N, I], as `Gru` says. The options are the fields of `GruOptions`."""
    network = _Network(x, cells, h0, None, Gru(GruOptions(**options)))
    run = network.forward()
    gates, z, m = (network.values(run.steps, name) for name in ("gates", "z", "m"))
    return GruForward(run.y, run.hn, gates, z, m, run.h_prev, run.inputs)


@np.errstate(all="ignore")
def gru_backward(
    dy: npt.ArrayLike | None,
    dhn: npt.ArrayLike | None,
    x: npt.ArrayLike,
    cells: Sequence[GruCell],
    h0: npt.ArrayLike | None = None,
    **options: Any,
) -> GruBackward:
    """Gradients of `gru_forward`, from the gradients of y and hn; None means zero."""
    network = _Network(x, cells, h0, None, Gru(GruOptions(**options)))
    return GruBackward(*network.backward(dy, dhn, None)[:3])


@np.errstate(all="ignore")
def rnn_forward(
    x: npt.ArrayLike, cells: Sequence[RnnCell], h0: npt.ArrayLike | None = None, **options: Any
) -> RnnForward:
    """Stacked simple RNN over x [T, N, I], as `Rnn` says. The options are the fields of `RnnOptions`."""
    network = _Network(x, cells, h0, None, Rnn(RnnOptions(**options)))
    run = network.forward()
    gates, z = (network.values(run.steps, name) for name in ("gates", "z"))
    return RnnForward(run.y, run.hn, gates, z, run.h_prev, run.inputs)


@np.errstate(all="ignore")
def rnn_backward(
    dy: npt.ArrayLike | None,
    dhn: npt.ArrayLike | None,
    x: npt.ArrayLike,
    cells: Sequence[RnnCell],
    h0: npt.ArrayLike | None = None,
    **options: Any,
) -> RnnBackward:
    """Gradients of `rnn_forward`, from the gradients of y and hn; None means zero."""
    network = _Network(x, cells, h0, None, Rnn(RnnOptions(**options)))
    return RnnBackward(*network.backward(dy, dhn, None)[:3])
