"""The oracle: LSTM. One cell is applied step by step to the samples that are active at the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .activation import activation_input_slope, value_at
from .precision import Array, working_type

__all__ = [
    "LSTM_ACTIVATIONS",
    "LstmBackward",
    "LstmCell",
    "LstmForward",
    "active_from_batch_sizes",
    "active_from_lengths",
    "lstm_backward",
    "lstm_forward",
]

LSTM_ACTIVATIONS: tuple[tuple[str, float, float], ...] = (
    ("sigmoid", 0.0, 0.0),
    ("sigmoid", 0.0, 0.0),
    ("tanh", 0.0, 0.0),
    ("sigmoid", 0.0, 0.0),
    ("tanh", 0.0, 0.0),
)


class LstmCell(NamedTuple):
    """The parameters of one direction of one layer, or their gradients. Gates are in the order i f g o."""

    wx: Array  # [4, H, I]
    wh: Array  # [4, H, H]
    b: Array | None = None  # [4, H]
    peephole: Array | None = None  # [4, H]: diagonals; [4, H, H]: full matrices


class LstmForward(NamedTuple):
    """The results, then the intermediate values: lists of one array per cell, `inputs` one per layer.

    `gates`, `z` and `cells` are 0 where a sample is inactive; `h_prev` and `c_prev` hold its state before every step,
    also where it is inactive.
    """

    y: Array  # [T, N, D*H]
    hn: Array  # [L*D, N, H]
    cn: Array  # [L*D, N, H]
    gates: list[Array]  # [T, N, 4, H], the values of i f g o
    z: list[Array]  # [T, N, 4, H], their pre-activations
    cells: list[Array]  # [T, N, H], the cell state after the step
    h_prev: list[Array]  # [T, N, H]
    c_prev: list[Array]  # [T, N, H]
    inputs: list[Array]  # [T, N, I] of layer 0, [T, N, D*H] of those above, dropout applied


class LstmBackward(NamedTuple):
    """The gradients in the order of forward's arguments."""

    dx: Array  # [T, N, I]
    cells: list[LstmCell]  # None where the parameter is
    dh0: Array  # [L*D, N, H]
    dc0: Array  # [L*D, N, H]


class _Lstm(NamedTuple):
    """Checked arguments, in the working dtype."""

    x: Array
    cells: list[LstmCell]
    h0: Array
    c0: Array
    active: npt.NDArray[np.bool_]
    masks: list[Array]


def active_from_lengths(lengths: npt.ArrayLike, T: int) -> npt.NDArray[np.bool_]:
    """Return [T, N]: sample n is active at the steps t < lengths[n]."""
    return np.arange(T)[:, None] < np.asarray(lengths)[None, :]


def active_from_batch_sizes(batch_sizes: npt.ArrayLike, N: int) -> npt.NDArray[np.bool_]:
    """Return [T, N]: the samples n < batch_sizes[t] are active at step t."""
    return np.arange(N)[None, :] < np.asarray(batch_sizes)[:, None]


def _lstm(
    x: npt.ArrayLike,
    cells: Sequence[LstmCell],
    h0: npt.ArrayLike | None,
    c0: npt.ArrayLike | None,
    directions: int,
    active: npt.ArrayLike | None,
    activations: Sequence[tuple[str, float, float]],
    output_reads: str,
    masks: Sequence[npt.ArrayLike] | None,
) -> _Lstm:
    x, work = working_type(x)

    def checked(name: str, a: npt.ArrayLike, *shapes: tuple[int, ...]) -> Array:
        a = np.asarray(a)
        if a.shape not in shapes:
            raise ValueError(f"{name} has shape {a.shape}, expected {' or '.join(map(str, shapes))}")
        return a.astype(work)

    if x.ndim != 3:
        raise ValueError(f"x has shape {x.shape}, expected [T, N, I]")
    if directions not in (1, 2) or not cells or len(cells) % directions != 0:
        raise ValueError(f"{len(cells)} cells do not make layers of {directions} directions")
    if len(activations) != 5:
        raise ValueError(f"{len(activations)} activations, expected 5: i, f, g, o and the hidden output")
    if output_reads not in ("new", "old"):
        raise ValueError(f"output_reads is {output_reads!r}, expected 'new' or 'old'")
    T, N, I = x.shape  # noqa: E741
    H = np.shape(cells[0].wh)[-1]
    layers = len(cells) // directions
    parameters = []
    for number, cell in enumerate(cells):
        width = I if number < directions else directions * H
        parameters.append(
            LstmCell(
                checked(f"wx of cell {number}", cell.wx, (4, H, width)),
                checked(f"wh of cell {number}", cell.wh, (4, H, H)),
                None if cell.b is None else checked(f"b of cell {number}", cell.b, (4, H)),
                None
                if cell.peephole is None
                else checked(f"peephole of cell {number}", cell.peephole, (4, H), (4, H, H)),
            )
        )
    state = (len(cells), N, H)
    if masks is not None and len(masks) != layers - 1:
        raise ValueError(f"{len(masks)} masks, expected {layers - 1}: one between each two layers")
    return _Lstm(
        x.astype(work),
        parameters,
        np.zeros(state, dtype=work) if h0 is None else checked("h0", h0, state),
        np.zeros(state, dtype=work) if c0 is None else checked("c0", c0, state),
        np.ones((T, N), dtype=np.bool_) if active is None else checked("active", active, (T, N)).astype(np.bool_),
        [checked("mask", mask, (T, N, directions * H)) for mask in masks or ()],
    )


def _steps(T: int, direction: int) -> range:
    """The order in which a direction visits the steps."""
    return range(T) if direction == 0 else range(T - 1, -1, -1)


def _through(p: Array, c: Array) -> Array:
    """Multiply rows of c by one gate's peephole, a diagonal or a matrix."""
    return c * p if p.ndim == 1 else c @ p.T


def _through_back(p: Array, dz: Array) -> Array:
    """The gradient of the c of `_through`, for rows of dz."""
    return dz * p if p.ndim == 1 else dz @ p


def _gate_slope(activation: tuple[str, float, float], z: Array) -> Array:
    name, alpha, beta = activation
    return activation_input_slope(name, z, alpha, beta).astype(z.dtype)


@np.errstate(all="ignore")
def lstm_forward(
    x: npt.ArrayLike,
    cells: Sequence[LstmCell],
    h0: npt.ArrayLike | None = None,
    c0: npt.ArrayLike | None = None,
    *,
    directions: int = 1,
    active: npt.ArrayLike | None = None,
    activations: Sequence[tuple[str, float, float]] = LSTM_ACTIVATIONS,
    output_reads: str = "new",
    masks: Sequence[npt.ArrayLike] | None = None,
) -> LstmForward:
    """Stacked LSTM over x [T, N, I]. One step of one cell, with the state h-, c- before it, is

        zi = wx_i u + wh_i h- + p_i c- + b_i        i = act_i(zi)        and in the same way f and g
        c  = f c- + i g
        zo = wx_o u + wh_o h- + p_o c + b_o         o = act_o(zo)        (p_o c- if output_reads is "old")
        h  = o act_h(c)

    `cells` has L*D elements, layer by layer, the directions of a layer next to each other. Direction 1 runs from the
    last step to the first; its output is placed at the step whose input it read. Layer 0 reads x, the others read the
    outputs of both directions of the layer below, times `masks[l-1]` [T, N, D*H] if given.

    `active` [T, N] says which samples are active at which step; None means all. An inactive sample keeps its state and
    has y = 0; x is not read there. `activations` are (name, alpha, beta) for i, f, g, o and h.
    """
    lstm = _lstm(x, cells, h0, c0, directions, active, activations, output_reads, masks)
    T, N, _ = lstm.x.shape
    H = lstm.h0.shape[-1]
    work = lstm.x.dtype
    z, gates = np.zeros((2, len(cells), T, N, 4, H), dtype=work)
    states, h_prev, c_prev = np.zeros((3, len(cells), T, N, H), dtype=work)
    hn, cn = lstm.h0.copy(), lstm.c0.copy()  # updated at every step
    inputs: list[Array] = []
    y = lstm.x  # of the layer below
    for layer in range(len(cells) // directions):
        u = y * lstm.masks[layer - 1] if lstm.masks and layer > 0 else y
        inputs.append(u)
        y = np.zeros((T, N, directions * H), dtype=work)
        for direction in range(directions):
            number = layer * directions + direction
            cell = lstm.cells[number]
            h, c = hn[number], cn[number]  # views
            for t in _steps(T, direction):
                h_prev[number, t], c_prev[number, t] = h, c
                on = lstm.active[t]
                old = c[on]
                zt = u[t, on] @ cell.wx.reshape(4 * H, -1).T + h[on] @ cell.wh.reshape(4 * H, H).T
                zt = zt.reshape(len(old), 4, H)
                if cell.b is not None:
                    zt = zt + cell.b
                if cell.peephole is not None:
                    for k in range(3):
                        zt[:, k] += _through(cell.peephole[k], old)
                i, f, g = (value_at(name, zt[:, k], a, b) for k, (name, a, b) in enumerate(activations[:3]))
                new = f * old + i * g
                if cell.peephole is not None:
                    zt[:, 3] += _through(cell.peephole[3], new if output_reads == "new" else old)
                o = value_at(activations[3][0], zt[:, 3], *activations[3][1:])
                h[on] = o * value_at(activations[4][0], new, *activations[4][1:])
                c[on] = new
                z[number, t, on], gates[number, t, on] = zt, np.stack([i, f, g, o], axis=1)
                states[number, t, on] = new
                y[t, on, direction * H : (direction + 1) * H] = h[on]
    return LstmForward(y, hn, cn, list(gates), list(z), list(states), list(h_prev), list(c_prev), inputs)


@np.errstate(all="ignore")
def lstm_backward(
    dy: npt.ArrayLike | None,
    dhn: npt.ArrayLike | None,
    dcn: npt.ArrayLike | None,
    x: npt.ArrayLike,
    cells: Sequence[LstmCell],
    h0: npt.ArrayLike | None = None,
    c0: npt.ArrayLike | None = None,
    *,
    directions: int = 1,
    active: npt.ArrayLike | None = None,
    activations: Sequence[tuple[str, float, float]] = LSTM_ACTIVATIONS,
    output_reads: str = "new",
    masks: Sequence[npt.ArrayLike] | None = None,
) -> LstmBackward:
    """Gradients of `lstm_forward`, from the gradients of y, hn and cn; None means zero.

    With dh (including dy) and dc the gradients of the state after a step:
        dzo = dh act_h(c) act_o'(zo)
        dc += dh o act_h'(c) + p_o^T dzo               (the last term only if output_reads is "new")
        dzi = dc g act_i'(zi)    dzf = dc c- act_f'(zf)    dzg = dc i act_g'(zg)
        dh- = sum_k wh_k^T dzk                         du  = sum_k wx_k^T dzk
        dc- = dc f + p_i^T dzi + p_f^T dzf + p_g^T dzg (and p_o^T dzo if it is "old")
    The gradients of wx, wh, b and the peephole are sums of dzk times u, h-, 1 and the c that the peephole read.
    Where a sample is inactive, dh and dc are passed on unchanged, dx is 0, and dy is not read.
    """
    lstm = _lstm(x, cells, h0, c0, directions, active, activations, output_reads, masks)
    options: dict[str, Any] = {"activations": activations, "output_reads": output_reads, "masks": masks}
    out = lstm_forward(x, cells, h0, c0, directions=directions, active=active, **options)
    work = lstm.x.dtype
    T = len(lstm.x)
    H = lstm.h0.shape[-1]

    def incoming(name: str, d: npt.ArrayLike | None, like: Array) -> Array:
        if d is None:
            return np.zeros_like(like)
        d = np.asarray(d)
        if d.shape != like.shape:
            raise ValueError(f"{name} has shape {d.shape}, expected {like.shape}")
        return d.astype(work)

    dlayer = incoming("dy", dy, out.y)  # of the current layer's output
    dh0, dc0 = incoming("dhn", dhn, out.hn), incoming("dcn", dcn, out.cn)  # start as dhn, dcn; updated at every step
    gradients = [LstmCell(*(None if p is None else np.zeros_like(p) for p in cell)) for cell in lstm.cells]  # type: ignore[arg-type]
    for layer in range(len(cells) // directions - 1, -1, -1):
        u = out.inputs[layer]
        du = np.zeros_like(u)
        for direction in range(directions):
            number = layer * directions + direction
            cell, gradient = lstm.cells[number], gradients[number]
            dh, dc = dh0[number], dc0[number]  # views
            for t in reversed(_steps(T, direction)):
                on = lstm.active[t]
                i, f, g, o = out.gates[number][t, on].transpose(1, 0, 2)
                z = out.z[number][t, on]
                new, old = out.cells[number][t, on], out.c_prev[number][t, on]
                slopes = [_gate_slope(activation, z[:, k]) for k, activation in enumerate(activations[:4])]
                hidden = value_at(activations[4][0], new, *activations[4][1:])

                dht = dh[on] + dlayer[t, on, direction * H : (direction + 1) * H]
                dzo = dht * hidden * slopes[3]
                dct = dc[on] + dht * o * _gate_slope(activations[4], new)
                if cell.peephole is not None and output_reads == "new":
                    dct = dct + _through_back(cell.peephole[3], dzo)
                dz = np.stack([dct * g * slopes[0], dct * old * slopes[1], dct * i * slopes[2], dzo], axis=1)
                dold = dct * f
                if cell.peephole is not None:
                    assert gradient.peephole is not None
                    for k in range(4):
                        sees_new = k == 3 and output_reads == "new"
                        if not sees_new:
                            dold = dold + _through_back(cell.peephole[k], dz[:, k])
                        seen = new if sees_new else old
                        diagonal = cell.peephole[k].ndim == 1
                        gradient.peephole[k] += (dz[:, k] * seen).sum(axis=0) if diagonal else dz[:, k].T @ seen
                rows = dz.reshape(len(dz), 4 * H)
                gradient.wx[...] += (rows.T @ u[t, on]).reshape(cell.wx.shape)
                gradient.wh[...] += (rows.T @ out.h_prev[number][t, on]).reshape(cell.wh.shape)
                if gradient.b is not None:
                    gradient.b[...] += dz.sum(axis=0)
                du[t, on] += rows @ cell.wx.reshape(4 * H, -1)
                dh[on] = rows @ cell.wh.reshape(4 * H, H)
                dc[on] = dold
        dlayer = du * lstm.masks[layer - 1] if lstm.masks and layer > 0 else du
    return LstmBackward(dlayer, gradients, dh0, dc0)
