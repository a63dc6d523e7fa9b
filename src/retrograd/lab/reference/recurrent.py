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
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .activation import activation_input_slope, value_at
from .precision import Array, working_type

__all__ = [
    "GRU_ACTIVATIONS",
    "LSTM_ACTIVATIONS",
    "RNN_ACTIVATIONS",
    "GruBackward",
    "GruCell",
    "GruForward",
    "GruOptions",
    "LstmBackward",
    "LstmCell",
    "LstmForward",
    "LstmOptions",
    "RnnBackward",
    "RnnCell",
    "RnnForward",
    "RnnOptions",
    "active_from_batch_sizes",
    "active_from_lengths",
    "gru_backward",
    "gru_forward",
    "lstm_backward",
    "lstm_forward",
    "rnn_backward",
    "rnn_forward",
]

Activation = tuple[str, float, float]  # name, alpha, beta
_SIGMOID: Activation = ("sigmoid", 0.0, 0.0)
_TANH: Activation = ("tanh", 0.0, 0.0)
LSTM_ACTIVATIONS: tuple[Activation, ...] = (_SIGMOID, _SIGMOID, _TANH, _SIGMOID, _TANH)  # i f g o, hidden output
GRU_ACTIVATIONS: tuple[Activation, ...] = (_SIGMOID, _SIGMOID, _TANH)  # r z n
RNN_ACTIVATIONS: tuple[Activation, ...] = (_TANH,)


# --- parameters, options and results ----------------------------------------------------------------------------------


class LstmCell(NamedTuple):
    """The parameters of one direction of one layer, or their gradients. Gates are in the order i f g o."""

    wx: Array  # [4, H, I]
    wh: Array  # [4, H, P]
    b: Array | None = None  # [4, H]
    peephole: Array | None = None  # [4, H]: diagonals; [4, H, H]: full matrices
    projection: Array | None = None  # [P, H]; without it P = H
    gamma_x: Array | None = None  # [4, H]
    gamma_h: Array | None = None  # [4, H]
    gamma_c: Array | None = None  # [H]
    beta_c: Array | None = None  # [H]


class GruCell(NamedTuple):
    """The parameters of one direction of one layer, or their gradients. Gates are in the order r z n."""

    wx: Array  # [3, H, I]
    wh: Array  # [3, H, H]
    b: Array | None = None  # [3, H]
    bh: Array | None = None  # [3, H]
    gamma_x: Array | None = None  # [3, H]
    gamma_h: Array | None = None  # [3, H]


class RnnCell(NamedTuple):
    """The parameters of one direction of one layer, or their gradients."""

    wx: Array  # [1, H, I]
    wh: Array  # [1, H, H]
    b: Array | None = None  # [1, H]
    gamma_x: Array | None = None  # [1, H]
    gamma_h: Array | None = None  # [1, H]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options of all cells.

    `active` [T, N] says which samples are active at which step; None means all. An inactive sample keeps its state and
    has y = 0; x, dy, `reset`, `mask` and zoneout are not read there. `activations` are (name, alpha, beta) per gate.
    """

    directions: int = 1
    active: npt.ArrayLike | None = None  # [T, N]
    activations: Sequence[Activation] = ()
    masks: Sequence[npt.ArrayLike] | None = None  # of dropout between layers: L-1 arrays [T, N, D*P]
    reset: npt.ArrayLike | None = None  # [T, N], bool
    mask: npt.ArrayLike | None = None  # broadcastable to [cells, gates, T, N, P]
    zoneout_h: npt.ArrayLike | None = None  # k, broadcastable to [cells, T, N, P]: 1 takes the new value, 0 keeps h-
    clip: float | None = None
    norm: str | None = None  # "haste" or "cell", which differ only for the LSTM
    eps: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class LstmOptions(_Options):
    """The keyword arguments of `lstm_forward`. `activations` has a fifth element, of the hidden output."""

    activations: Sequence[Activation] = LSTM_ACTIVATIONS
    output_reads: str = "new"  # the cell state that the output gate's peephole reads, or "old"
    zoneout_c: npt.ArrayLike | None = None  # broadcastable to [cells, T, N, H]
    cell_clip: float | None = None
    coupled: bool = False


@dataclass(frozen=True, kw_only=True)
class GruOptions(_Options):
    """The keyword arguments of `gru_forward`."""

    activations: Sequence[Activation] = GRU_ACTIVATIONS
    kind: str = "after"  # the reset gate is applied after the recurrent product, or "before"
    flip: bool = False


@dataclass(frozen=True, kw_only=True)
class RnnOptions(_Options):
    """The keyword arguments of `rnn_forward`."""

    activations: Sequence[Activation] = RNN_ACTIVATIONS


class LstmForward(NamedTuple):
    """The results, then the intermediate values: lists of one array per cell, `inputs` one per layer.

    `gates`, `z` and `cells` are 0 where a sample is inactive; `h_prev` and `c_prev` hold its state before every step,
    also where it is inactive, and after the reset where it is active.
    """

    y: Array  # [T, N, D*P]
    hn: Array  # [L*D, N, P]
    cn: Array  # [L*D, N, H]
    gates: list[Array]  # [T, N, 4, H], the values of i f g o
    z: list[Array]  # [T, N, 4, H], their pre-activations, not clamped
    cells: list[Array]  # [T, N, H], the cell state after the step
    h_prev: list[Array]  # [T, N, P]
    c_prev: list[Array]  # [T, N, H]
    inputs: list[Array]  # [T, N, I] of layer 0, [T, N, D*P] of those above, dropout applied


class LstmBackward(NamedTuple):
    """The gradients in the order of forward's arguments."""

    dx: Array  # [T, N, I]
    cells: list[LstmCell]  # None where the parameter is
    dh0: Array  # [L*D, N, P]
    dc0: Array  # [L*D, N, H]


class GruForward(NamedTuple):
    """As `LstmForward`."""

    y: Array  # [T, N, D*H]
    hn: Array  # [L*D, N, H]
    gates: list[Array]  # [T, N, 3, H], the values of r z n
    z: list[Array]  # [T, N, 3, H], their pre-activations, not clamped
    m: list[Array]  # [T, N, H], what r is multiplied by: wh_n h- + bh_n, or h- if the kind is "before"
    h_prev: list[Array]  # [T, N, H]
    inputs: list[Array]  # [T, N, I] of layer 0, [T, N, D*H] of those above, dropout applied


class GruBackward(NamedTuple):
    """The gradients in the order of forward's arguments."""

    dx: Array  # [T, N, I]
    cells: list[GruCell]  # None where the parameter is
    dh0: Array  # [L*D, N, H]


class RnnForward(NamedTuple):
    """As `LstmForward`."""

    y: Array  # [T, N, D*H]
    hn: Array  # [L*D, N, H]
    gates: list[Array]  # [T, N, 1, H], the value of the one gate, which is h before zoneout
    z: list[Array]  # [T, N, 1, H], its pre-activation, not clamped
    h_prev: list[Array]  # [T, N, H]
    inputs: list[Array]  # [T, N, I] of layer 0, [T, N, D*H] of those above, dropout applied


class RnnBackward(NamedTuple):
    """The gradients in the order of forward's arguments."""

    dx: Array  # [T, N, I]
    cells: list[RnnCell]  # None where the parameter is
    dh0: Array  # [L*D, N, H]


def active_from_lengths(lengths: npt.ArrayLike, T: int) -> npt.NDArray[np.bool_]:
    """Return [T, N]: sample n is active at the steps t < lengths[n]."""
    return np.arange(T)[:, None] < np.asarray(lengths)[None, :]


def active_from_batch_sizes(batch_sizes: npt.ArrayLike, N: int) -> npt.NDArray[np.bool_]:
    """Return [T, N]: the samples n < batch_sizes[t] are active at step t."""
    return np.arange(N)[None, :] < np.asarray(batch_sizes)[:, None]


# --- parts of a step, for n samples; each function is followed by its gradient ----------------------------------------


def _product(a: Array, w: Array, mask: Array | None = None) -> Array:
    """Multiply rows a [n, P] by the matrices w [G, H, P] of the gates, each after its mask [G, n, P]: [n, G, H]."""
    gates, units, _ = w.shape
    if mask is None:
        product: Array = a @ w.reshape(gates * units, -1).T
        return product.reshape(len(a), gates, units)
    return np.stack([(a * mask[k]) @ w[k].T for k in range(gates)], axis=1)


def _product_back(d: Array, a: Array, w: Array, dw: Array, mask: Array | None = None) -> Array:
    """Return the gradient of a, from that of the product; add that of w to dw."""
    gates, units, _ = w.shape
    if mask is None:
        rows = d.reshape(len(d), gates * units)
        dw += (rows.T @ a).reshape(w.shape)
        return rows @ w.reshape(gates * units, -1)
    da = np.zeros_like(a)
    for k in range(gates):
        dw[k] += d[:, k].T @ (a * mask[k])
        da += mask[k] * (d[:, k] @ w[k])
    return da


class _Normalized(NamedTuple):
    """An array normalized over all axes but the first, then scaled; or the array itself, if `gamma` is None."""

    value: Array
    hat: Array  # before gamma
    rstd: Array


def _normalize(a: Array, gamma: Array | None, eps: float) -> _Normalized:
    if gamma is None:
        return _Normalized(a, a, a)
    axes = tuple(range(1, a.ndim))
    away = a - a.mean(axis=axes, keepdims=True)
    rstd = 1 / np.sqrt((away * away).mean(axis=axes, keepdims=True) + eps)
    return _Normalized(gamma * away * rstd, away * rstd, rstd)


def _normalize_back(d: Array, a: _Normalized, gamma: Array | None, dgamma: Array | None) -> Array:
    """Return the gradient of the array, from that of its normalized value; add that of gamma to dgamma."""
    if gamma is None or dgamma is None:
        return d
    dgamma += (d * a.hat).sum(axis=0)
    axes = tuple(range(1, d.ndim))
    dhat = d * gamma
    away: Array = dhat - dhat.mean(axis=axes, keepdims=True) - a.hat * (dhat * a.hat).mean(axis=axes, keepdims=True)
    return a.rstd * away


def _through(p: Array, c: Array) -> Array:
    """Multiply rows of c by one gate's peephole, a diagonal or a matrix."""
    return c * p if p.ndim == 1 else c @ p.T


def _through_back(p: Array, dz: Array) -> Array:
    """The gradient of the c of `_through`, for rows of dz."""
    return dz * p if p.ndim == 1 else dz @ p


def _clamp(z: Array, limit: float | None) -> Array:
    return z if limit is None else np.clip(z, -limit, limit)


def _clamp_back(d: Array, z: Array, limit: float | None) -> Array:
    return d if limit is None else np.where(np.abs(z) > limit, 0.0, d)


def _activate(activation: Activation, z: Array, limit: float | None = None) -> Array:
    name, alpha, beta = activation
    return value_at(name, _clamp(z, limit), alpha, beta)


def _activate_back(d: Array, activation: Activation, z: Array, limit: float | None = None) -> Array:
    name, alpha, beta = activation
    slope = activation_input_slope(name, _clamp(z, limit), alpha, beta).astype(z.dtype)
    return _clamp_back(d * slope, z, limit)


def _add(gradient: Array | None, d: Array) -> None:
    """Add the sum over samples of d to the gradient of a vector, if the cell has it."""
    if gradient is not None:
        gradient += d.sum(axis=0)


# --- the cells --------------------------------------------------------------------------------------------------------

AnyCell: TypeAlias = Any  # LstmCell, GruCell or RnnCell


class _Step(NamedTuple):
    """One step of one cell, for its n active samples: what it read, and what it computed."""

    u: Array  # [n, I]
    h: Array  # [n, P], the state before it, after the reset
    c: Array  # [n, H]; [n, 0] of cells that have no c
    mask: Array | None  # [G, n, P]
    z: Array  # [n, G, H]
    gates: Array  # [n, G, H]
    new_h: Array  # [n, P], before zoneout
    new_c: Array  # [n, H]
    x_side: _Normalized  # [n, G, H]: wx u
    h_side: _Normalized  # [n, G, H]: wh h-
    c_side: _Normalized | None = None  # LSTM: the cell state f c- + i g, normalized or not, before it is clamped
    m: Array | None = None  # LSTM: the hidden output before the projection; GRU: what r is multiplied by


class _Lstm:
    """One step is

        zi = wx_i u + wh_i h- + p_i c- + b_i        i = act_i(zi)        and in the same way f and g
        c  = f c- + i g                                                  f = 1 - i if coupled
        zo = wx_o u + wh_o h- + p_o c + b_o         o = act_o(zo)        (p_o c- if output_reads is "old")
        h  = wp (o act_h(c))

    c is clamped to [-cell_clip, cell_clip] before it is carried and read. norm "cell" replaces it by LN(c; gamma_c) +
    beta_c; with "haste" only act_h reads that. Zoneout of c changes what is carried, not what the step itself reads.
    """

    gates: ClassVar = 4
    named: ClassVar = "i, f, g, o and the hidden output"

    def __init__(self, options: LstmOptions) -> None:
        self.o = options

    def read(self, cell: LstmCell, c_side: _Normalized) -> Array:
        """The cell state that act_h reads."""
        value = c_side.value if cell.beta_c is None else c_side.value + cell.beta_c
        return _clamp(value, self.o.cell_clip)

    def step(self, cell: LstmCell, u: Array, h: Array, c: Array, mask: Array | None) -> _Step:
        o = self.o
        x_side = _normalize(_product(u, cell.wx), cell.gamma_x, o.eps)
        h_side = _normalize(_product(h, cell.wh, mask), cell.gamma_h, o.eps)
        z = x_side.value + h_side.value
        if cell.b is not None:
            z = z + cell.b
        if cell.peephole is not None:
            for k in range(3):
                z[:, k] += _through(cell.peephole[k], c)
        gate_i, gate_f, gate_g = (_activate(o.activations[k], z[:, k], o.clip) for k in range(3))
        if o.coupled:
            gate_f = 1 - gate_i
        raw = gate_f * c + gate_i * gate_g
        c_side = _normalize(raw, cell.gamma_c, o.eps)
        read = self.read(cell, c_side)
        new = raw if o.norm == "haste" else read
        if cell.peephole is not None:
            z[:, 3] += _through(cell.peephole[3], new if o.output_reads == "new" else c)
        gate_o = _activate(o.activations[3], z[:, 3], o.clip)
        m = gate_o * _activate(o.activations[4], read)
        gates = np.stack([gate_i, gate_f, gate_g, gate_o], axis=1)
        new_h = m if cell.projection is None else m @ cell.projection.T
        return _Step(u, h, c, mask, z, gates, new_h, new, x_side, h_side, c_side, m)

    def back(self, cell: LstmCell, gradient: LstmCell, step: _Step, dh: Array, dc: Array) -> tuple[Array, Array, Array]:
        """With dh and dc the gradients of the state after the step:

            dzo = dh act_h(c) act_o'(zo)
            dc += dh o act_h'(c) + p_o^T dzo               (the last term only if output_reads is "new")
            dzi = dc g act_i'(zi)    dzf = dc c- act_f'(zf)    dzg = dc i act_g'(zg)
            dh- = sum_k wh_k^T dzk                         du  = sum_k wx_k^T dzk
            dc- = dc f + p_i^T dzi + p_f^T dzf + p_g^T dzg (and p_o^T dzo if it is "old")

        The gradients of wx, wh, b and the peephole are sums of dzk times u, h-, 1 and the c that the peephole read. A
        projection turns dh into wp^T dh first. If coupled, dzi = dc (g - c-) act_i'(zi), dzf = 0.
        """
        o, z, old, c_side = self.o, step.z, step.c, step.c_side
        gate_i, gate_f, gate_g, gate_o = step.gates.transpose(1, 0, 2)
        assert c_side is not None
        read = self.read(cell, c_side)
        if cell.projection is not None:
            assert gradient.projection is not None
            gradient.projection[...] += dh.T @ step.m
            dh = dh @ cell.projection
        dzo = _activate_back(dh * _activate(o.activations[4], read), o.activations[3], z[:, 3], o.clip)
        dread = _activate_back(dh * gate_o, o.activations[4], read)
        if o.norm == "haste":
            _add(gradient.beta_c, dread)
            draw = dc + _normalize_back(dread, c_side, cell.gamma_c, gradient.gamma_c)
        else:
            dread = dc + dread
            if cell.peephole is not None and o.output_reads == "new":
                dread = dread + _through_back(cell.peephole[3], dzo)
            _add(gradient.beta_c, dread)
            draw = _normalize_back(dread, c_side, cell.gamma_c, gradient.gamma_c)
            draw = _clamp_back(draw, c_side.value, o.cell_clip)  # not with norm
        di, df, dg = draw * gate_g, draw * old, draw * gate_i
        if o.coupled:
            di, df = draw * (gate_g - old), np.zeros_like(df)
        dzs = [_activate_back(d, o.activations[k], z[:, k], o.clip) for k, d in enumerate((di, df, dg))]
        dz = np.stack([*dzs, dzo], axis=1)
        dold = draw * gate_f
        if cell.peephole is not None:
            assert gradient.peephole is not None
            for k in range(4):
                sees_new = k == 3 and o.output_reads == "new"
                if not sees_new:
                    dold = dold + _through_back(cell.peephole[k], dz[:, k])
                seen = step.new_c if sees_new else old
                diagonal = cell.peephole[k].ndim == 1
                gradient.peephole[k] += (dz[:, k] * seen).sum(axis=0) if diagonal else dz[:, k].T @ seen
        _add(gradient.b, dz)
        du, dold_h = _sides_back(dz, dz, cell, gradient, step)
        return du, dold_h, dold


class _Gru:
    """One step is

        r = act_r(wx_r u + b_r + wh_r h- + bh_r)        and in the same way z
        n = act_n(wx_n u + b_n + r (wh_n h- + bh_n))    kind "after"
        n = act_n(wx_n u + b_n + wh_n (r h-) + bh_n)    kind "before"
        h = (1 - z) n + z h-                            h = z n + (1 - z) h- if flip

    norm normalizes wx u and wh h-, before the biases.
    """

    gates: ClassVar = 3
    named: ClassVar = "r, z and n"

    def __init__(self, options: GruOptions) -> None:
        self.o = options

    def step(self, cell: GruCell, u: Array, h: Array, c: Array, mask: Array | None) -> _Step:
        o = self.o
        x_side = _normalize(_product(u, cell.wx), cell.gamma_x, o.eps)
        v = x_side.value if cell.b is None else x_side.value + cell.b
        bh = np.zeros_like(v[:1]) if cell.bh is None else cell.bh[None]
        if o.kind == "after":
            h_side = _normalize(_product(h, cell.wh, mask), cell.gamma_h, o.eps)
            w = h_side.value + bh
            m = w[:, 2]
        else:
            product = _product(h, cell.wh[:2], None if mask is None else mask[:2])
            h_side = _normalize(product, None, o.eps)
            w = product + bh[:, :2]
            m = h
        zs = [v[:, 0] + w[:, 0], v[:, 1] + w[:, 1]]
        gate_r, gate_z = (_activate(o.activations[k], zs[k], o.clip) for k in range(2))
        if o.kind == "after":
            zs.append(v[:, 2] + gate_r * m)
        else:
            reset_product = _product(gate_r * m, cell.wh[2:], None if mask is None else mask[2:])
            zs.append(v[:, 2] + reset_product[:, 0] + bh[:, 2])
        gate_n = _activate(o.activations[2], zs[2], o.clip)
        of_new, of_old = (gate_z, 1 - gate_z) if o.flip else (1 - gate_z, gate_z)
        z, gates = np.stack(zs, axis=1), np.stack([gate_r, gate_z, gate_n], axis=1)
        new_h = of_new * gate_n + of_old * h
        return _Step(u, h, c, mask, z, gates, new_h, c, x_side, h_side, m=m)

    def back(self, cell: GruCell, gradient: GruCell, step: _Step, dh: Array, dc: Array) -> tuple[Array, Array, Array]:
        """With dh the gradient of the state after the step:

            dzz = dh (h- - n) act_z'(zz)     (the opposite sign if flip)      dzn = dh (1 - z) act_n'(zn)
            after    dm = dzn r    dzr = dzn (wh_n h- + bh_n) act_r'(zr)      dh- = ... + wh_n^T dm
            before   dq = wh_n^T dzn      dzr = dq h- act_r'(zr)              dh- = ... + dq r
            dh- = dh z + wh_r^T dzr + wh_z^T dzz + ...                        du  = sum_k wx_k^T dzk

        The gradients of wx, wh and the biases are sums of dzk times u, h- and 1; those of wh_n and bh_n are sums of dm
        times h- and 1 (after), of dzn times r h- and 1 (before).
        """
        o, h = self.o, step.h
        gate_r, gate_z, gate_n = step.gates.transpose(1, 0, 2)
        of_new, of_old = (gate_z, 1 - gate_z) if o.flip else (1 - gate_z, gate_z)
        mixed = dh * (gate_n - h) if o.flip else dh * (h - gate_n)
        dzz = _activate_back(mixed, o.activations[1], step.z[:, 1], o.clip)
        dzn = _activate_back(dh * of_new, o.activations[2], step.z[:, 2], o.clip)
        if o.kind == "after":
            dzr = _activate_back(dzn * step.m, o.activations[0], step.z[:, 0], o.clip)
            dv = np.stack([dzr, dzz, dzn], axis=1)
            dw = np.stack([dzr, dzz, dzn * gate_r], axis=1)
            _add(gradient.b, dv)
            _add(gradient.bh, dw)
            du, dproduct = _sides_back(dv, dw, cell, gradient, step)
            return du, dh * of_old + dproduct, dc
        of_gates, of_candidate = (None, None) if step.mask is None else (step.mask[:2], step.mask[2:])
        dq = _product_back(dzn[:, None], gate_r * h, cell.wh[2:], gradient.wh[2:], of_candidate)
        dzr = _activate_back(dq * h, o.activations[0], step.z[:, 0], o.clip)
        dv = np.stack([dzr, dzz, dzn], axis=1)
        _add(gradient.b, dv)
        _add(gradient.bh, dv)
        du = _product_back(dv, step.u, cell.wx, gradient.wx)
        dproduct = _product_back(dv[:, :2], h, cell.wh[:2], gradient.wh[:2], of_gates)
        return du, dh * of_old + dproduct + dq * gate_r, dc


class _Rnn:
    """One step is h = act(wx u + wh h- + b)."""

    gates: ClassVar = 1
    named: ClassVar = "the one gate"

    def __init__(self, options: RnnOptions) -> None:
        self.o = options

    def step(self, cell: RnnCell, u: Array, h: Array, c: Array, mask: Array | None) -> _Step:
        x_side = _normalize(_product(u, cell.wx), cell.gamma_x, self.o.eps)
        h_side = _normalize(_product(h, cell.wh, mask), cell.gamma_h, self.o.eps)
        z = x_side.value + h_side.value
        if cell.b is not None:
            z = z + cell.b
        gate = _activate(self.o.activations[0], z, self.o.clip)
        return _Step(u, h, c, mask, z, gate, gate[:, 0], c, x_side, h_side)

    def back(self, cell: RnnCell, gradient: RnnCell, step: _Step, dh: Array, dc: Array) -> tuple[Array, Array, Array]:
        """dz = dh act'(z); dh- = wh^T dz, du = wx^T dz; those of wx, wh and b are sums of dz times u, h- and 1."""
        dz = _activate_back(dh[:, None], self.o.activations[0], step.z, self.o.clip)
        _add(gradient.b, dz)
        return *_sides_back(dz, dz, cell, gradient, step), dc


def _sides_back(dv: Array, dw: Array, cell: AnyCell, gradient: AnyCell, step: _Step) -> tuple[Array, Array]:
    """Return the gradients of u and h- from those of the two sides wx u and wh h- of the pre-activations."""
    dv = _normalize_back(dv, step.x_side, cell.gamma_x, gradient.gamma_x)
    dw = _normalize_back(dw, step.h_side, cell.gamma_h, gradient.gamma_h)
    du = _product_back(dv, step.u, cell.wx, gradient.wx)
    return du, _product_back(dw, step.h, cell.wh, gradient.wh, step.mask)


# --- the time loop ----------------------------------------------------------------------------------------------------


class _Network:
    """Checked arguments in the working dtype, and the time loop over them."""

    def __init__(
        self,
        x: npt.ArrayLike,
        cells: Sequence[AnyCell],
        h0: npt.ArrayLike | None,
        c0: npt.ArrayLike | None,
        kind: Any,  # _Lstm, _Gru or _Rnn
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
        self.c0 = self.state("c0", c0, self.H if isinstance(kind, _Lstm) else 0)
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
        steps: list[dict[int, _Step]] = [{} for _ in self.cells]
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

    def values(self, steps: list[dict[int, _Step]], name: str) -> list[Array]:
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
    steps: list[dict[int, _Step]]  # by t
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
    """Stacked LSTM over x [T, N, I], as `_Lstm` says. The options are the fields of `LstmOptions`."""
    network = _Network(x, cells, h0, c0, _Lstm(LstmOptions(**options)))
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
    return LstmBackward(*_Network(x, cells, h0, c0, _Lstm(LstmOptions(**options))).backward(dy, dhn, dcn))


@np.errstate(all="ignore")
def gru_forward(
    x: npt.ArrayLike, cells: Sequence[GruCell], h0: npt.ArrayLike | None = None, **options: Any
) -> GruForward:
    """Stacked GRU over x [T, N, I], as `_Gru` says. The options are the fields of `GruOptions`."""
    network = _Network(x, cells, h0, None, _Gru(GruOptions(**options)))
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
    network = _Network(x, cells, h0, None, _Gru(GruOptions(**options)))
    return GruBackward(*network.backward(dy, dhn, None)[:3])


@np.errstate(all="ignore")
def rnn_forward(
    x: npt.ArrayLike, cells: Sequence[RnnCell], h0: npt.ArrayLike | None = None, **options: Any
) -> RnnForward:
    """Stacked simple RNN over x [T, N, I], as `_Rnn` says. The options are the fields of `RnnOptions`."""
    network = _Network(x, cells, h0, None, _Rnn(RnnOptions(**options)))
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
    network = _Network(x, cells, h0, None, _Rnn(RnnOptions(**options)))
    return RnnBackward(*network.backward(dy, dhn, None)[:3])
