"""The oracle: one step of an LSTM, a GRU and a simple RNN, and its gradient. The symbols are those of `recurrent`."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from .activation import activation_input_slope, value_at
from .precision import Array
from .recurrent_types import Activation, GruCell, GruOptions, LstmCell, LstmOptions, RnnCell, RnnOptions

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


class Step(NamedTuple):
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


class Lstm:
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

    def step(self, cell: LstmCell, u: Array, h: Array, c: Array, mask: Array | None) -> Step:
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
        return Step(u, h, c, mask, z, gates, new_h, new, x_side, h_side, c_side, m)

    def back(self, cell: LstmCell, gradient: LstmCell, step: Step, dh: Array, dc: Array) -> tuple[Array, Array, Array]:
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


class Gru:
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

    def step(self, cell: GruCell, u: Array, h: Array, c: Array, mask: Array | None) -> Step:
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
        return Step(u, h, c, mask, z, gates, new_h, c, x_side, h_side, m=m)

    def back(self, cell: GruCell, gradient: GruCell, step: Step, dh: Array, dc: Array) -> tuple[Array, Array, Array]:
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


class Rnn:
    """One step is h = act(wx u + wh h- + b)."""

    gates: ClassVar = 1
    named: ClassVar = "the one gate"

    def __init__(self, options: RnnOptions) -> None:
        self.o = options

    def step(self, cell: RnnCell, u: Array, h: Array, c: Array, mask: Array | None) -> Step:
        x_side = _normalize(_product(u, cell.wx), cell.gamma_x, self.o.eps)
        h_side = _normalize(_product(h, cell.wh, mask), cell.gamma_h, self.o.eps)
        z = x_side.value + h_side.value
        if cell.b is not None:
            z = z + cell.b
        gate = _activate(self.o.activations[0], z, self.o.clip)
        return Step(u, h, c, mask, z, gate, gate[:, 0], c, x_side, h_side)

    def back(self, cell: RnnCell, gradient: RnnCell, step: Step, dh: Array, dc: Array) -> tuple[Array, Array, Array]:
        """dz = dh act'(z); dh- = wh^T dz, du = wx^T dz; those of wx, wh and b are sums of dz times u, h- and 1."""
        dz = _activate_back(dh[:, None], self.o.activations[0], step.z, self.o.clip)
        _add(gradient.b, dz)
        return *_sides_back(dz, dz, cell, gradient, step), dc


def _sides_back(dv: Array, dw: Array, cell: AnyCell, gradient: AnyCell, step: Step) -> tuple[Array, Array]:
    """Return the gradients of u and h- from those of the two sides wx u and wh h- of the pre-activations."""
    dv = _normalize_back(dv, step.x_side, cell.gamma_x, gradient.gamma_x)
    dw = _normalize_back(dw, step.h_side, cell.gamma_h, gradient.gamma_h)
    du = _product_back(dv, step.u, cell.wx, gradient.wx)
    return du, _product_back(dw, step.h, cell.wh, gradient.wh, step.mask)
