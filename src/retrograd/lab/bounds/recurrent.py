"""Tolerances of LSTMs, GRUs and simple RNNs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np

from ..cases.recurrent import (
    GRU_STANDARD,
    LSTM_STANDARD,
    RNN_STANDARD,
    GruParameters,
    LstmParameters,
    RnnParameters,
)
from ..cases.types import Array, Float64s, NamedActivation
from .precision import PRECISIONS, SLOPE_IS_A_DIFFERENCE, as_float64

__all__ = ["GruBound", "LstmBound", "RnnBound", "gru_bound", "lstm_bound", "rnn_bound"]

# A running error analysis: the network is evaluated again in float64, and every value carries the scale of its error in
# the engine. The error added at a step is propagated through all later steps (in backward, all earlier ones) by the
# same derivatives that propagate the values:
#
# - Through products and sums of two or three numbers, errors add up in full.
# - In a matrix product the errors of the terms are independent, so their squares add up; so do the roundings of the
#   sum. A sequential sum of n terms t rounds n partial sums, which grow to the size of the sum s if the terms have the
#   same sign, and to the root of the sum of t^2 if they do not: u * sqrt(n * (sum t^2 + s^2) / 2).
# - Through an activation, f is evaluated at both ends of the error interval, so a kink or a jump inside it counts.
# - The engine's functions are accurate to 6 ulp (12 u), tanh and sigmoid to 3; parameters are rounded.
# - A clamp is evaluated at both ends of the error interval, like a kink. So the gradient of a number whose interval
#   contains a limit may be 0 or not.
# - Normalization rounds in its mean, difference, mean of squares, 1 / sqrt and products, one after the other. The
#   errors that it propagates are independent, so their squares add up, times those of the derivatives.
#
# A tolerance is this scale times _WORST. One rounding has a root mean square of 0.42 u of its result (uniform within
# half an ulp, which is between u/2 and u of the number). So the scale is 1 / 0.42 = 2.4 standard deviations of a sum
# that cancels, and 3.4 of one as large as its terms; independent roundings exceed twice that with a probability below
# 1e-6. With few units, propagated errors are less independent: a network of two or three units that amplifies them over
# a hundred steps can exceed these bounds.

_WORST: Final = 2.0
# Functions whose slope is computed from the value y: the derivative of the slope with respect to y.
_SLOPE_OF_VALUE: Final[dict[str, Callable[[Float64s], Float64s]]] = {
    "sigmoid": lambda y: np.abs(1 - 2 * y),
    "tanh": lambda y: 2 * np.abs(y),
}


class LstmBound(NamedTuple):
    """Tolerances in the shapes of the oracle's results: time first, parameters stacked."""

    y: Float64s
    hn: Float64s
    cn: Float64s
    dx: Float64s
    cells: list[LstmParameters]
    dh0: Float64s
    dc0: Float64s


class GruBound(NamedTuple):
    """As `LstmBound`."""

    y: Float64s
    hn: Float64s
    dx: Float64s
    cells: list[GruParameters]
    dh0: Float64s


class RnnBound(NamedTuple):
    """As `LstmBound`."""

    y: Float64s
    hn: Float64s
    dx: Float64s
    cells: list[RnnParameters]
    dh0: Float64s


class _Number(NamedTuple):
    """Values and the scale of their errors."""

    value: Float64s
    error: Float64s

    def at(self, *index: Any) -> _Number:
        return _Number(self.value[index], self.error[index])

    def put(self, other: _Number, *index: Any) -> None:
        self.value[index], self.error[index] = other

    @staticmethod
    def exact(values: Array | None, shape: tuple[int, ...]) -> _Number:
        return _Number(np.zeros(shape) if values is None else np.array(values, np.float64), np.zeros(shape))

    @staticmethod
    def joined(numbers: Sequence[_Number], axis: int = 0) -> _Number:
        return _Number(*(np.concatenate(parts, axis=axis) for parts in zip(*numbers, strict=True)))


class _Matrix:
    """Weights, which are exact."""

    def __init__(self, value: Float64s) -> None:
        self.value, self.squares = value, value * value


class _Function(NamedTuple):
    """An activation and its slope, with their errors."""

    name: str
    alpha: float
    beta: float
    activate: Callable[..., Array]
    input_slope: Callable[..., Array]
    u: float
    smallest: float
    clip: float | None = None

    def __call__(self, z: _Number) -> tuple[_Number, _Number]:
        usual = _SLOPE_OF_VALUE.get(self.name)
        # A parameter times z: two roundings of the argument.
        reach = _WORST * z.error + (0.0 if usual else 2 * self.u * np.abs(z.value))
        (y, y_error), (s, s_error) = (self._moved(f, z.value, reach) for f in (self.activate, self.input_slope))
        lost = (2 + np.abs(z.value)) * self.smallest  # below the normal range
        y_error, s_error = y_error + lost, s_error + lost
        if usual is not None:
            y_error = y_error + 6 * self.u * np.abs(y)
            return _Number(y, y_error), _Number(s, np.maximum(s_error, usual(y) * y_error) + 10 * self.u * s)
        offset = abs(self.alpha) + abs(self.beta)
        if self.name == "tanh_shrink":  # z - tanh z keeps the error of tanh
            y_error = y_error + 3 * self.u * np.minimum(np.abs(z.value), 1)
        y_error = y_error + self.u * (12 * np.abs(y) + offset)
        s_error = s_error + self.u * (12 * np.abs(s) + 4 * (self.name in SLOPE_IS_A_DIFFERENCE))
        return _Number(y, y_error), _Number(s, s_error)

    def _moved(self, f: Callable[..., Array], z: Float64s, reach: Float64s) -> _Number:
        def at(z: Float64s) -> Float64s:
            if self.clip is None:
                return as_float64(f(self.name, z, self.alpha, self.beta))
            value = as_float64(f(self.name, np.clip(z, -self.clip, self.clip), self.alpha, self.beta))
            return value if f is self.activate else np.where(np.abs(z) > self.clip, 0.0, value)

        here, left, right = at(z), at(z - reach), at(z + reach)
        return _Number(here, np.maximum(np.abs(left - here), np.abs(right - here)) / _WORST)


def _tolerance(error: Float64s) -> Float64s:
    """Return the tolerance for an error; infinite where the analysis itself overflowed, as in an unstable network."""
    return np.where(np.isnan(error), np.inf, _WORST * error)


_ONE: Final = _Number(np.ones((1, 1)), np.zeros((1, 1)))
# For one step, what the gradient of each parameter sums: pairs of rows of dz and of what they multiply. A stacked
# parameter has a pair per gate, others have one.
_Terms = dict[str, list[tuple[_Number, _Number]]]


class _Normalized(NamedTuple):
    """Rows normalized over their columns, then scaled."""

    value: _Number
    hat: _Number  # before gamma
    rstd: _Number  # a column


class _Step(NamedTuple):
    """What backward needs from one step of one cell, for the active samples."""

    u: _Number
    h_prev: _Number
    c_prev: _Number
    mask: Float64s | None  # [G, n, P]
    gates: list[_Number]
    slopes: list[_Number]
    new_c: _Number
    x_side: _Normalized | None
    h_side: _Normalized | None
    c_side: _Normalized | None
    kept: _Number  # LSTM: 1 where the cell state was not clamped
    hidden: _Number  # LSTM: act_h(c)
    hidden_slope: _Number
    m: _Number  # LSTM: the output before the projection; GRU: what r is multiplied by


class _Analysis:
    """The steps of one cell, forward and backward, with the errors of all intermediate results."""

    def __init__(self, cell: Any, functions: Sequence[_Function], options: dict[str, Any]) -> None:
        self.cell, self.functions, self.options = cell, functions, options
        self.u, self.smallest = functions[0].u, functions[0].smallest
        self.gates, self.units, self.inputs = cell.wx.shape
        self.wx = as_float64(cell.wx).reshape(self.gates * self.units, -1)
        self.wh = as_float64(cell.wh).reshape(self.gates * self.units, -1)
        both = np.concatenate([self.wx, self.wh], axis=1)
        self.weights, self.weights_back = _Matrix(both.T), _Matrix(both)
        self.normalizes, self.eps = options.get("norm") is not None, options.get("eps", 1e-5)
        self.terms: list[_Terms] = []

    # ---- arithmetic ----

    def times(self, *factors: _Number) -> _Number:
        value, error = factors[0]
        for factor in factors[1:]:
            error = np.abs(factor.value) * error + (np.abs(value) + error) * factor.error
            value = value * factor.value
            error = error + self.u * np.abs(value) + self.smallest
        return _Number(value, error)

    def plus(self, *terms: _Number) -> _Number:
        value, error = terms[0]
        for term in terms[1:]:
            value = value + term.value
            error = error + term.error + self.u * np.abs(value)
        return _Number(value, error)

    def minus(self, a: _Number, b: _Number) -> _Number:
        return self.plus(a, _Number(-b.value, b.error))

    def dot(self, a: _Number, b: _Matrix) -> _Number:
        value = a.value @ b.value
        rounded = 0.5 * len(b.value) * ((a.value * a.value) @ b.squares + value * value)
        return _Number(value, self._root((a.error * a.error) @ b.squares, rounded, len(b.value)))

    def mean(self, a: _Number) -> _Number:
        """The mean of each row, as a column."""
        count = a.value.shape[1]
        total = a.value.sum(axis=1, keepdims=True)
        rounded = 0.5 * count * ((a.value * a.value).sum(axis=1, keepdims=True) + total * total)
        error = self._root((a.error * a.error).sum(axis=1, keepdims=True), rounded, count)
        return _Number(total / count, (error + 2 * self.u * np.abs(total)) / count)

    def _root(self, carried: Float64s, rounded: Float64s, count: int) -> Float64s:
        return cast(Float64s, np.sqrt(carried + self.u**2 * rounded + count * self.smallest**2))

    def normalize(self, a: _Number, gamma: Array) -> _Normalized:
        exact = _exact(a.value)
        away = self.minus(exact, self.mean(exact))
        var = self.mean(self.times(away, away))
        rstd = 1 / np.sqrt(var.value + self.eps)
        # eps is rounded and added; 1 / sqrt has two roundings.
        rounded = 0.5 * rstd**3 * (var.error + self.u * (var.value + 2 * self.eps)) + 2 * self.u * rstd
        hat = self.times(away, _Number(rstd, rounded))
        # The derivative of rstd is -rstd^2 mean(da hat).
        carried = rstd**2 * _root_mean(hat.value**2, a.error**2)
        hat = _Number(hat.value, hat.error + rstd * _projected(a.error, hat.value))
        return _Normalized(self.times(hat, _exact(gamma)), hat, _Number(rstd, rounded + carried))

    def normalize_back(self, d: _Number, a: _Normalized, gamma: Array) -> _Number:
        dhat = self.times(d, _exact(gamma))
        exact, hat, rstd = _exact(dhat.value), _exact(a.hat.value), _exact(a.rstd.value)
        inner = self.mean(self.times(exact, hat))
        sent = self.times(rstd, self.minus(exact, self.plus(self.mean(exact), self.times(hat, inner))))
        of_hat = np.abs(inner.value) * a.hat.error + np.abs(hat.value) * _root_mean(exact.value**2, a.hat.error**2)
        error = rstd.value * (_projected(dhat.error, hat.value) + of_hat)
        return _Number(sent.value, sent.error + error + np.abs(sent.value) * a.rstd.error / rstd.value)

    def mixed(self, of_new: _Number, new: _Number, of_old: _Number, old: _Number) -> _Number:
        """The sum of of_new * new and of_old * old, whose weights add up to 1 and have the same error.

        It may be computed as old + of_new (new - old), whose difference and sum round in proportion to both.
        """
        value = of_new.value * new.value + of_old.value * old.value
        error = np.abs(new.value - old.value) * of_new.error
        error = error + np.abs(of_new.value) * new.error + np.abs(of_old.value) * old.error
        error = error + 2 * self.u * (np.abs(new.value) + np.abs(old.value)) + self.smallest
        return _Number(value, error)

    # ---- parts of a step ----

    def split(self, z: _Number) -> list[_Number]:
        """The gates of rows [n, G*H]."""
        return [z.at(slice(None), slice(k * self.units, (k + 1) * self.units)) for k in range(self.gates)]

    def gate_rows(self, w: Float64s, k: int) -> Float64s:
        return w[k * self.units : (k + 1) * self.units]

    def masked(self, h: _Number, mask: Float64s | None, k: int) -> _Number:
        return h if mask is None else self.times(h, _exact(mask[k]))

    def recurrent(self, h: _Number, mask: Float64s | None) -> _Number:
        """wh h, [n, G*H]."""
        if mask is None:
            return self.dot(h, _Matrix(self.wh.T))
        each = [self.dot(self.masked(h, mask, k), _Matrix(self.gate_rows(self.wh, k).T)) for k in range(self.gates)]
        return _Number.joined(each, axis=1)

    def recurrent_back(self, dw: Sequence[_Number], mask: Float64s | None) -> _Number:
        if mask is None:
            return self.dot(_Number.joined(dw, axis=1), _Matrix(self.wh))
        sent = [self.dot(d, _Matrix(self.gate_rows(self.wh, k))) for k, d in enumerate(dw)]
        return self.plus(*(self.times(d, _exact(mask[k])) for k, d in enumerate(sent)))

    def products(
        self, u: _Number, h: _Number, mask: Float64s | None
    ) -> tuple[_Number, _Normalized | None, _Normalized | None]:
        """wx u + wh h, [n, G*H], or the sum of both normalized."""
        if self.normalizes:
            x_side = self.normalize(self.dot(u, _Matrix(self.wx.T)), self.cell.gamma_x.reshape(-1))
            h_side = self.normalize(self.recurrent(h, mask), self.cell.gamma_h.reshape(-1))
            return self.plus(x_side.value, h_side.value), x_side, h_side
        if mask is None:
            return self.dot(_Number.joined([u, h], axis=1), self.weights), None, None
        each = []
        for k in range(self.gates):
            both = np.concatenate([self.gate_rows(self.wx, k), self.gate_rows(self.wh, k)], axis=1)
            each.append(self.dot(_Number.joined([u, self.masked(h, mask, k)], axis=1), _Matrix(both.T)))
        return _Number.joined(each, axis=1), None, None

    def biased(self, z: _Number, b: Array | None) -> _Number:
        return self.plus(z, _Number.exact(None if b is None else b.reshape(-1), z.value.shape[1:]))

    def sides_back(self, dv: list[_Number], dw: list[_Number], step: _Step, terms: _Terms) -> tuple[_Number, _Number]:
        """Return du and dh- from the gradients of wx u and wh h-, gate by gate; add the terms of their parameters."""
        if step.x_side is not None and step.h_side is not None:
            terms["gamma_x"] = list(zip(dv, self.split(step.x_side.hat), strict=True))
            terms["gamma_h"] = list(zip(dw, self.split(step.h_side.hat), strict=True))
            gammas = self.cell.gamma_x.reshape(-1), self.cell.gamma_h.reshape(-1)
            dv = self.split(self.normalize_back(_Number.joined(dv, axis=1), step.x_side, gammas[0]))
            dw = self.split(self.normalize_back(_Number.joined(dw, axis=1), step.h_side, gammas[1]))
        terms["wx"] = [(d, step.u) for d in dv]
        terms["wh"] = [(d, self.masked(step.h_prev, step.mask, k)) for k, d in enumerate(dw)]
        du = self.dot(_Number.joined(dv, axis=1), _Matrix(self.wx))
        return du, self.recurrent_back(dw, step.mask)

    def tolerances(self) -> Any:
        """Return the tolerances of the parameters' gradients, after all steps of backward."""
        found = {}
        for name, part in self.cell._asdict().items():
            if part is None or not self.terms:
                found[name] = None if part is None else np.zeros(part.shape)
                continue
            gates = []
            for k in range(len(self.terms[0][name])):
                dz, seen = (
                    _Number.joined([rows for step in self.terms for rows in [step[name][k][side]]]) for side in (0, 1)
                )
                gates.append(self._row_sum(dz, seen, matrix=name in _MATRICES or part.ndim == 3))
            found[name] = np.stack(gates) if name not in _NOT_STACKED else gates[0]
        return type(self.cell)(**found)

    def _row_sum(self, dz: _Number, seen: _Number, *, matrix: bool) -> Float64s:
        """Return the tolerance of dzᵀ seen for a matrix, of the sum of dz * seen for a vector."""

        def product(p: Float64s, q: Float64s) -> Any:
            return p.T @ q if matrix else np.sum(p * q, axis=0)

        squares, errors = (dz.value**2, seen.value**2), (dz.error**2, seen.error**2)
        value = product(dz.value, seen.value)
        rounded = (0.5 * len(dz.value) + 1) * (product(*squares) + value * value)
        carried = product(errors[0], squares[1] + errors[1]) + product(squares[0], errors[1])
        return _tolerance(self._root(carried, rounded, len(dz.value)))


_MATRICES: Final = ("wx", "wh", "projection")
_NOT_STACKED: Final = ("projection", "gamma_c", "beta_c")


def _exact(values: Any) -> _Number:
    values = as_float64(values)
    return _Number(values, np.zeros(values.shape))


def _root_mean(squares: Float64s, errors: Float64s) -> Float64s:
    """The error of the mean of each row of products, whose errors are independent, as a column."""
    return cast(Float64s, np.sqrt((squares * errors).sum(axis=1, keepdims=True)) / squares.shape[1])


def _projected(error: Float64s, hat: Float64s) -> Float64s:
    """The error of a - mean(a) - hat mean(a hat), from independent errors of a.

    Both normalization and its gradient have this derivative, which removes most of the errors that the elements share.
    """
    count = hat.shape[1]
    squares = error * error
    total, first, second = ((squares * hat**k).sum(axis=1, keepdims=True) for k in range(3))
    share = (1 + hat * hat) / count  # what an element adds to itself
    others = (total + 2 * hat * first + hat * hat * second) / count**2 - share * share * squares
    return cast(Float64s, np.sqrt((1 - share) ** 2 * squares + np.maximum(others, 0.0)))


class _LstmAnalysis(_Analysis):
    def __init__(self, cell: Any, functions: Sequence[_Function], options: dict[str, Any]) -> None:
        super().__init__(cell, functions, options)
        self.reads_new = options.get("output_reads", "new") == "new"
        self.coupled, self.cell_clip = options.get("coupled", False), options.get("cell_clip")
        self.norm = options.get("norm")
        self.peephole = None if cell.peephole is None else as_float64(cell.peephole)

    def seen(self, gate: int, c: _Number, back: bool = False) -> _Number:
        """Multiply by a gate's peephole, or by its transpose for backward."""
        assert self.peephole is not None
        p = self.peephole[gate]
        if p.ndim == 1:
            return self.times(_Number.exact(p, p.shape), c)
        return self.dot(c, _Matrix(p if back else p.T))

    def without_excess(
        self, to: _Number, source: _Number, f: _Number, factors: Sequence[_Number], slopes: Sequence[_Number]
    ) -> _Number:
        """Subtract what `to` counts too often.

        An error of one cell state reaches the next by four paths, f and three diagonal peepholes. It is the same error,
        so the derivatives of the paths add up with their signs, not in absolute value as in `to`.
        """
        if self.peephole is None or self.peephole.ndim == 3 or self.coupled:
            return to
        paths = [f.value] + [self.peephole[k] * factors[k].value * slopes[k].value for k in range(3)]
        excess = sum(np.abs(path) for path in paths) - np.abs(sum(paths))
        return _Number(to.value, np.maximum(to.error - excess * source.error, self.u * np.abs(to.value)))

    def clamped(self, c: _Number) -> tuple[_Number, _Number]:
        """The clamped cell state, and 1 where it was inside the limits."""
        one = _Number(np.ones_like(c.value), np.zeros_like(c.value))
        if self.cell_clip is None:
            return c, one
        limit = self.cell_clip
        here, left, right = (np.clip(c.value + by, -limit, limit) for by in (0, -_WORST * c.error, _WORST * c.error))
        inside = (np.abs(c.value) <= limit).astype(np.float64)
        doubtful = np.abs(np.abs(c.value) - limit) <= _WORST * (c.error + self.u * limit)
        error = np.maximum(right - here, here - left) / _WORST + self.u * limit
        return _Number(here, error), _Number(inside, doubtful / _WORST)

    def forward(self, u: _Number, h_prev: _Number, c_prev: _Number, mask: Float64s | None) -> tuple[_Step, _Number]:
        z, x_side, h_side = self.products(u, h_prev, mask)
        zs = self.split(self.biased(z, self.cell.b))
        if self.peephole is not None:
            zs[:3] = [self.plus(zs[k], self.seen(k, c_prev)) for k in range(3)]
        activated = [self.functions[k](zs[k]) for k in range(3)]
        (i, _), (f, _), (g, _) = activated
        if self.coupled:
            f = self.minus(_exact(np.ones_like(i.value)), i)
            activated[1] = f, activated[1][1]
            c = self.mixed(i, g, f, c_prev)
        else:
            c = self.plus(self.times(f, c_prev), self.times(i, g))
        c = self.without_excess(c, c_prev, f, (g, c_prev, i), [slope for _, slope in activated])
        c, kept = self.clamped(c)
        read, c_side = c, None
        if self.normalizes:
            c_side = self.normalize(c, self.cell.gamma_c)
            read = self.biased(c_side.value, self.cell.beta_c)
            c = read if self.norm == "cell" else c
        if self.peephole is not None:
            zs[3] = self.plus(zs[3], self.seen(3, c if self.reads_new else c_prev))
        activated.append(self.functions[3](zs[3]))
        hidden, hidden_slope = self.functions[4](read)
        gates, slopes = [value for value, _ in activated], [slope for _, slope in activated]
        m = self.times(gates[3], hidden)
        out = m if self.cell.projection is None else self.dot(m, _Matrix(as_float64(self.cell.projection).T))
        sides = x_side, h_side, c_side
        return _Step(u, h_prev, c_prev, mask, gates, slopes, c, *sides, kept, hidden, hidden_slope, m), out

    def backward(self, step: _Step, dh: _Number, dc: _Number) -> tuple[_Number, _Number, _Number]:
        """Return du, dh and dc before the step, from dh and dc after it."""
        i, f, g, o = step.gates
        factors = (g, step.c_prev, i)
        terms: _Terms = {}
        if self.cell.projection is not None:
            terms["projection"] = [(dh, step.m)]
            dh = self.dot(dh, _Matrix(as_float64(self.cell.projection)))
        dzo = self.times(dh, step.hidden, step.slopes[3])
        dread = self.times(dh, o, step.hidden_slope)
        if self.norm == "haste":
            assert step.c_side is not None
            terms["beta_c"], terms["gamma_c"] = [(dread, _ones(dread))], [(dread, step.c_side.hat)]
            dc = self.plus(dc, self.normalize_back(dread, step.c_side, self.cell.gamma_c))
        else:
            dc = self.plus(dc, dread)
            if self.peephole is not None and self.reads_new:
                dc = self.plus(dc, self.seen(3, dzo, back=True))
            if step.c_side is not None:
                terms["beta_c"], terms["gamma_c"] = [(dc, _ones(dc))], [(dc, step.c_side.hat)]
                dc = self.normalize_back(dc, step.c_side, self.cell.gamma_c)
            if self.cell_clip is not None:
                dc = self.times(dc, step.kept)
        if self.coupled:
            nothing = _Number(np.zeros_like(dc.value), np.zeros_like(dc.value))
            di = self.times(dc, self.minus(g, step.c_prev), step.slopes[0])
            dz = [di, nothing, self.times(dc, i, step.slopes[2]), dzo]
        else:
            dz = [self.times(dc, factors[k], step.slopes[k]) for k in range(3)] + [dzo]
        dc_prev = self.times(dc, f)
        if self.peephole is not None:
            for k in range(3 if self.reads_new else 4):
                dc_prev = self.plus(dc_prev, self.seen(k, dz[k], back=True))
            output_sees = step.new_c if self.reads_new else step.c_prev
            terms["peephole"] = [(dz[k], output_sees if k == 3 else step.c_prev) for k in range(4)]
        dc_prev = self.without_excess(dc_prev, dc, f, factors, step.slopes)
        terms["b"] = [(d, _ones(d)) for d in dz]
        if self.normalizes or step.mask is not None:
            du, dh = self.sides_back(dz, dz, step, terms)
        else:
            terms["wx"], terms["wh"] = [(d, step.u) for d in dz], [(d, step.h_prev) for d in dz]
            sent = self.dot(_Number.joined(dz, axis=1), self.weights_back)
            du, dh = sent.at(slice(None), slice(self.inputs)), sent.at(slice(None), slice(self.inputs, None))
        self.terms.append(terms)
        return du, dh, dc_prev


def _ones(like: _Number) -> _Number:
    """A column of ones: what a bias multiplies."""
    return _Number(np.ones((len(like.value), 1)), np.zeros((len(like.value), 1)))


class _GruAnalysis(_Analysis):
    def __init__(self, cell: Any, functions: Sequence[_Function], options: dict[str, Any]) -> None:
        super().__init__(cell, functions, options)
        self.after, self.flip = options.get("kind", "after") == "after", options.get("flip", False)

    def weights_of_mix(self, z: _Number) -> tuple[_Number, _Number]:
        """Those of the candidate and of the old state."""
        rest = self.minus(_exact(np.ones_like(z.value)), z)
        return (z, rest) if self.flip else (rest, z)

    def forward(self, u: _Number, h_prev: _Number, c_prev: _Number, mask: Float64s | None) -> tuple[_Step, _Number]:
        cell = self.cell
        joint, x_side, h_side = self.products(u, h_prev, mask)
        zs = self.split(self.biased(self.biased(joint, cell.b), cell.bh))
        activated = [self.functions[k](zs[k]) for k in range(2)]
        (r, _), (z, _) = activated
        v = x_side.value if x_side is not None else self.dot(u, _Matrix(self.wx.T))
        w = h_side.value if h_side is not None else self.recurrent(h_prev, mask)
        if self.after:
            m = self.split(self.biased(w, cell.bh))[2]
            zn = self.plus(self.split(self.biased(v, cell.b))[2], self.times(r, m))
        else:
            m = h_prev
            read = self.masked(self.times(r, m), mask, 2)
            both = np.concatenate([self.gate_rows(self.wx, 2), self.gate_rows(self.wh, 2)], axis=1)
            zn = self.dot(_Number.joined([u, read], axis=1), _Matrix(both.T))
            for b in (cell.b, cell.bh):
                zn = self.biased(zn, None if b is None else b[2])
        activated.append(self.functions[2](zn))
        gates, slopes = [value for value, _ in activated], [slope for _, slope in activated]
        of_new, of_old = self.weights_of_mix(z)
        out = self.mixed(of_new, gates[2], of_old, h_prev)
        one = _ONE
        return _Step(u, h_prev, c_prev, mask, gates, slopes, c_prev, x_side, h_side, None, one, one, one, m), out

    def backward(self, step: _Step, dh: _Number, dc: _Number) -> tuple[_Number, _Number, _Number]:
        """Return du and dh before the step, from dh after it."""
        r, z, n = step.gates
        of_new, of_old = self.weights_of_mix(z)
        terms: _Terms = {}
        away = self.minus(n, step.h_prev) if self.flip else self.minus(step.h_prev, n)
        dzz = self.times(dh, away, step.slopes[1])
        dzn = self.times(dh, of_new, step.slopes[2])
        kept = self.times(dh, of_old)
        if self.after:
            dzr = self.times(dzn, step.m, step.slopes[0])
            dv, dw = [dzr, dzz, dzn], [dzr, dzz, self.times(dzn, r)]
            terms["b"], terms["bh"] = [(d, _ones(d)) for d in dv], [(d, _ones(d)) for d in dw]
            du, sent = self.sides_back(dv, dw, step, terms)
            dh = self.plus(kept, sent)
        else:
            dq = self.masked(self.dot(dzn, _Matrix(self.gate_rows(self.wh, 2))), step.mask, 2)
            dzr = self.times(dq, step.h_prev, step.slopes[0])
            dv = [dzr, dzz, dzn]
            terms["b"] = terms["bh"] = [(d, _ones(d)) for d in dv]
            terms["wx"] = [(d, step.u) for d in dv]
            read = [self.masked(step.h_prev, step.mask, k) for k in range(2)]
            read.append(self.masked(self.times(r, step.h_prev), step.mask, 2))
            terms["wh"] = list(zip(dv, read, strict=True))
            du = self.dot(_Number.joined(dv, axis=1), _Matrix(self.wx))
            if step.mask is None:
                sent = self.dot(_Number.joined(dv[:2], axis=1), _Matrix(self.wh[: 2 * self.units]))
            else:
                each = [self.dot(dv[k], _Matrix(self.gate_rows(self.wh, k))) for k in range(2)]
                sent = self.plus(*(self.masked(d, step.mask, k) for k, d in enumerate(each)))
            dh = self.plus(kept, sent, self.times(dq, r))
        self.terms.append(terms)
        return du, dh, dc


class _RnnAnalysis(_Analysis):
    def forward(self, u: _Number, h_prev: _Number, c_prev: _Number, mask: Float64s | None) -> tuple[_Step, _Number]:
        z, x_side, h_side = self.products(u, h_prev, mask)
        out, slope = self.functions[0](self.biased(z, self.cell.b))
        one = _ONE
        return _Step(u, h_prev, c_prev, mask, [out], [slope], c_prev, x_side, h_side, None, one, one, one, one), out

    def backward(self, step: _Step, dh: _Number, dc: _Number) -> tuple[_Number, _Number, _Number]:
        """Return du and dh before the step, from dh after it."""
        dz = self.times(dh, step.slopes[0])
        terms: _Terms = {"b": [(dz, _ones(dz))]}
        du, dh = self.sides_back([dz], [dz], step, terms)
        self.terms.append(terms)
        return du, dh, dc


class _Bounds(NamedTuple):
    y: Float64s
    hn: Float64s
    cn: Float64s
    dx: Float64s
    cells: list[Any]
    dh0: Float64s
    dc0: Float64s


def _bound(
    analysis_of: type[_Analysis],
    x: Array,
    cells: Sequence[Any],
    states: Sequence[Array | None],
    incoming: Sequence[Array | None],
    functions: tuple[Callable[..., Array], Callable[..., Array]],
    standard: Sequence[NamedActivation],
    options: dict[str, Any],
) -> _Bounds:
    """The time loop, forward and backward. `states` are h0 and c0, `incoming` dy, dhn and dcn."""
    dtype = PRECISIONS[x.dtype.name]
    directions = options.get("directions", 1)
    active, masks, reset = (options.get(name) for name in ("active", "masks", "reset"))
    u, (T, N, _), (gates, H, P) = dtype.unit, x.shape, cells[0].wh.shape
    if getattr(cells[0], "projection", None) is not None:
        P = cells[0].projection.shape[0]
    smallest = max(dtype.smallest, 1e-150)  # the square of a smaller number underflows
    on_at = np.ones((T, N), np.bool_) if active is None else np.asarray(active)
    reset_at = np.zeros((T, N), np.bool_) if reset is None else np.asarray(reset)
    clip = options.get("clip")
    used = [
        _Function(name, alpha, beta, *functions, u, smallest, clip if k < gates else None)
        for k, (name, alpha, beta) in enumerate(options.get("activations", standard))
    ]
    analyses: list[Any] = [analysis_of(cell, used, options) for cell in cells]

    def spread(name: str, *shape: int) -> Float64s | None:
        given = options.get(name)
        return None if given is None else np.broadcast_to(as_float64(given), (len(cells), *shape))

    mask = spread("mask", gates, T, N, P)
    zoneouts = spread("zoneout_h", T, N, P), spread("zoneout_c", T, N, H)

    def dropped(number: _Number, layer: int) -> _Number:
        if not masks:
            return number
        factor = as_float64(masks[layer])
        return _Number(number.value * factor, number.error * factor + 2 * u * np.abs(number.value * factor))

    def zoned(new: _Number, old: _Number, which: int, number: int, t: int) -> _Number:
        k = zoneouts[which]
        if k is None:
            return new
        weight = _exact(k[number, t, on_at[t]])
        rest = _Number(1 - weight.value, u * np.abs(1 - weight.value))
        return cast(_Number, analyses[number].mixed(weight, new, rest, old))

    def zoned_back(d: _Number, which: int, number: int, t: int) -> tuple[_Number, _Number | None]:
        """The gradient of the new state, and the part that the old one gets directly."""
        k = zoneouts[which]
        if k is None:
            return d, None
        weight = k[number, t, on_at[t]]
        rest = _Number(1 - weight, u * np.abs(1 - weight))
        return analyses[number].times(d, _exact(weight)), analyses[number].times(d, rest)

    def order(direction: int) -> range:
        return range(T - 1, -1, -1) if direction else range(T)

    def columns(direction: int) -> slice:
        return slice(direction * P, (direction + 1) * P)

    h, c = (_Number.exact(s, (len(cells), N, width)) for s, width in zip(states, (P, H), strict=True))
    steps: list[dict[int, _Step]] = [{} for _ in cells]
    y = _Number.exact(x, x.shape)  # of the layer below
    for layer in range(len(cells) // directions):
        inputs = dropped(y, layer - 1) if layer else y
        y = _Number.exact(None, (T, N, directions * P))
        for direction in range(directions):
            number = layer * directions + direction
            for t in order(direction):
                on = on_at[t]
                for state in (h, c):
                    state.put(_Number.exact(None, ()), number, on & reset_at[t])
                of_gates = None if mask is None else mask[number, :, t][:, on]
                step, out = analyses[number].forward(inputs.at(t, on), h.at(number, on), c.at(number, on), of_gates)
                steps[number][t] = step
                out = zoned(out, step.h_prev, 0, number, t)
                h.put(out, number, on)
                c.put(zoned(step.new_c, step.c_prev, 1, number, t), number, on)
                y.put(out, t, on, columns(direction))

    dlayer = _Number.exact(incoming[0], y.value.shape)
    dh, dc = (_Number.exact(d, (len(cells), N, width)) for d, width in zip(incoming[1:], (P, H), strict=True))
    for layer in range(len(cells) // directions - 1, -1, -1):
        du = _Number.exact(None, (T, N, analyses[layer * directions].inputs))
        for direction in range(directions):
            number = layer * directions + direction
            analysis = analyses[number]
            for t in reversed(order(direction)):
                on = on_at[t]
                dht = analysis.plus(dh.at(number, on), dlayer.at(t, on, columns(direction)))
                dht, kept_h = zoned_back(dht, 0, number, t)
                dct, kept_c = zoned_back(dc.at(number, on), 1, number, t)
                sent, dh_prev, dc_prev = analysis.backward(steps[number][t], dht, dct)
                dh_prev = dh_prev if kept_h is None else analysis.plus(dh_prev, kept_h)
                dc_prev = dc_prev if kept_c is None else analysis.plus(dc_prev, kept_c)
                du.put(analysis.plus(du.at(t, on), sent), t, on)
                dh.put(dh_prev, number, on)
                dc.put(dc_prev, number, on)
                for state in (dh, dc):
                    state.put(_Number.exact(None, ()), number, on & reset_at[t])
        dlayer = dropped(du, layer - 1) if layer else du
    y_bound, hn, cn, dx, dh0, dc0 = (_tolerance(n.error + smallest) for n in (y, h, c, dlayer, dh, dc))
    return _Bounds(y_bound, hn, cn, dx, [analysis.tolerances() for analysis in analyses], dh0, dc0)


@np.errstate(all="ignore")
def lstm_bound(
    x: Array,
    cells: Sequence[LstmParameters],
    h0: Array | None,
    c0: Array | None,
    dy: Array | None,
    dhn: Array | None,
    dcn: Array | None,
    activate: Callable[..., Array],
    input_slope: Callable[..., Array],
    **options: Any,
) -> LstmBound:
    """Return the tolerances of an LSTM's outputs and gradients. Arguments are as for the oracle, parameters stacked.

    `activate` and `input_slope` are f(name, z, alpha, beta) and f'(name, z, alpha, beta) as the oracle computes them.
    """
    functions = activate, input_slope
    return LstmBound(*_bound(_LstmAnalysis, x, cells, (h0, c0), (dy, dhn, dcn), functions, LSTM_STANDARD, options))


@np.errstate(all="ignore")
def gru_bound(
    x: Array,
    cells: Sequence[GruParameters],
    h0: Array | None,
    dy: Array | None,
    dhn: Array | None,
    activate: Callable[..., Array],
    input_slope: Callable[..., Array],
    **options: Any,
) -> GruBound:
    """`lstm_bound` for a GRU."""
    functions = activate, input_slope
    found = _bound(_GruAnalysis, x, cells, (h0, None), (dy, dhn, None), functions, GRU_STANDARD, options)
    return GruBound(found.y, found.hn, found.dx, found.cells, found.dh0)


@np.errstate(all="ignore")
def rnn_bound(
    x: Array,
    cells: Sequence[RnnParameters],
    h0: Array | None,
    dy: Array | None,
    dhn: Array | None,
    activate: Callable[..., Array],
    input_slope: Callable[..., Array],
    **options: Any,
) -> RnnBound:
    """`lstm_bound` for a simple RNN."""
    functions = activate, input_slope
    found = _bound(_RnnAnalysis, x, cells, (h0, None), (dy, dhn, None), functions, RNN_STANDARD, options)
    return RnnBound(found.y, found.hn, found.dx, found.cells, found.dh0)
