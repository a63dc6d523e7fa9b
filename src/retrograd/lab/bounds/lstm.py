"""Tolerances of an LSTM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ..cases.lstm import LSTM_STANDARD, LstmParameters
from ..cases.types import Array, Float64s, NamedActivation
from .precision import PRECISIONS, SLOPE_IS_A_DIFFERENCE, as_float64

__all__ = ["LstmBound", "lstm_bound"]

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
        here, left, right = (as_float64(f(self.name, at, self.alpha, self.beta)) for at in (z, z - reach, z + reach))
        return _Number(here, np.maximum(np.abs(left - here), np.abs(right - here)) / _WORST)


def _tolerance(error: Float64s) -> Float64s:
    """Return the tolerance for an error; infinite where the analysis itself overflowed, as in an unstable network."""
    return np.where(np.isnan(error), np.inf, _WORST * error)


class _Step(NamedTuple):
    """What backward needs from one step of one cell, for the active samples."""

    on: npt.NDArray[np.bool_]
    u: _Number
    h_prev: _Number
    c_prev: _Number
    gates: list[_Number]
    slopes: list[_Number]
    c: _Number
    hidden: _Number
    hidden_slope: _Number
    output_sees: _Number  # the cell state that the output gate's peephole reads


class _LstmAnalysis:
    """The steps of one cell, forward and backward, with the errors of all intermediate results."""

    def __init__(self, cell: LstmParameters, functions: Sequence[_Function], reads_new: bool) -> None:
        self.cell, self.functions, self.reads_new = cell, functions, reads_new
        self.u, self.smallest = functions[0].u, functions[0].smallest
        self.units = cell.wh.shape[-1]
        self.inputs = cell.wx.shape[-1]
        both = np.concatenate([as_float64(cell.wx), as_float64(cell.wh)], axis=2).reshape(4 * self.units, -1)
        self.weights, self.weights_back = _Matrix(both.T), _Matrix(both)
        self.b = _Number.exact(None if cell.b is None else cell.b.reshape(-1), (4 * self.units,))
        self.peephole = None if cell.peephole is None else as_float64(cell.peephole)
        self.rows: list[tuple[_Number, ...]] = []  # dz of the four gates, and the inputs of their weights

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

    def dot(self, a: _Number, b: _Matrix) -> _Number:
        value = a.value @ b.value
        rounded = 0.5 * len(b.value) * ((a.value * a.value) @ b.squares + value * value)
        return _Number(value, self._root((a.error * a.error) @ b.squares, rounded, len(b.value)))

    def _root(self, carried: Float64s, rounded: Float64s, count: int) -> Float64s:
        return cast(Float64s, np.sqrt(carried + self.u**2 * rounded + count * self.smallest**2))

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
        if self.peephole is None or self.peephole.ndim == 3:
            return to
        paths = [f.value] + [self.peephole[k] * factors[k].value * slopes[k].value for k in range(3)]
        excess = sum(np.abs(path) for path in paths) - np.abs(sum(paths))
        return _Number(to.value, np.maximum(to.error - excess * source.error, self.u * np.abs(to.value)))

    def forward(self, on: npt.NDArray[np.bool_], u: _Number, h_prev: _Number, c_prev: _Number) -> tuple[_Step, _Number]:
        z = self.plus(self.dot(_Number.joined([u, h_prev], axis=1), self.weights), self.b)
        zs = [z.at(slice(None), slice(k * self.units, (k + 1) * self.units)) for k in range(4)]
        if self.peephole is not None:
            zs[:3] = [self.plus(zs[k], self.seen(k, c_prev)) for k in range(3)]
        activated = [self.functions[k](zs[k]) for k in range(3)]
        (i, _), (f, _), (g, _) = activated
        c = self.plus(self.times(f, c_prev), self.times(i, g))
        c = self.without_excess(c, c_prev, f, (g, c_prev, i), [slope for _, slope in activated])
        output_sees = c if self.reads_new else c_prev
        if self.peephole is not None:
            zs[3] = self.plus(zs[3], self.seen(3, output_sees))
        activated.append(self.functions[3](zs[3]))
        hidden, hidden_slope = self.functions[4](c)
        gates, slopes = [value for value, _ in activated], [slope for _, slope in activated]
        step = _Step(on, u, h_prev, c_prev, gates, slopes, c, hidden, hidden_slope, output_sees)
        return step, self.times(gates[3], hidden)

    def backward(self, step: _Step, dh: _Number, dc: _Number) -> tuple[_Number, _Number, _Number]:
        """Return du, dh and dc before the step, from dh and dc after it."""
        i, f, g, o = step.gates
        factors = (g, step.c_prev, i)
        dzo = self.times(dh, step.hidden, step.slopes[3])
        dc = self.plus(dc, self.times(dh, o, step.hidden_slope))
        if self.peephole is not None and self.reads_new:
            dc = self.plus(dc, self.seen(3, dzo, back=True))
        dz = [self.times(dc, factors[k], step.slopes[k]) for k in range(3)] + [dzo]
        dc_prev = self.times(dc, f)
        if self.peephole is not None:
            for k in range(3 if self.reads_new else 4):
                dc_prev = self.plus(dc_prev, self.seen(k, dz[k], back=True))
        dc_prev = self.without_excess(dc_prev, dc, f, factors, step.slopes)
        self.rows.append((*dz, step.u, step.h_prev, step.c_prev, step.output_sees))
        sent = self.dot(_Number.joined(dz, axis=1), self.weights_back)
        return sent.at(slice(None), slice(self.inputs)), sent.at(slice(None), slice(self.inputs, None)), dc_prev

    def tolerances(self) -> LstmParameters:
        """Return the tolerances of the parameters' gradients, after all steps of backward."""
        if not self.rows:
            return LstmParameters(*(None if part is None else np.zeros(part.shape) for part in self.cell))
        *dz, u, h_prev, c_prev, output_sees = (_Number.joined(column) for column in zip(*self.rows, strict=True))
        seen = [[u] * 4, [h_prev] * 4, [_Number.exact(np.ones((1, 1)), (1, 1))] * 4, [c_prev] * 3 + [output_sees]]
        return LstmParameters(
            *(
                None if part is None else np.stack([self._row_sum(dz[k], by[k], part.ndim) for k in range(4)])
                for part, by in zip(self.cell, seen, strict=True)
            )
        )

    def _row_sum(self, dz: _Number, seen: _Number, ndim: int) -> Float64s:
        """Return the tolerance of dzᵀ seen for a matrix, of the sum of dz * seen for a vector."""

        def product(p: Float64s, q: Float64s) -> Any:
            return p.T @ q if ndim == 3 else np.sum(p * q, axis=0)

        squares, errors = (dz.value**2, seen.value**2), (dz.error**2, seen.error**2)
        value = product(dz.value, seen.value)
        rounded = (0.5 * len(dz.value) + 1) * (product(*squares) + value * value)
        carried = product(errors[0], squares[1] + errors[1]) + product(squares[0], errors[1])
        return _tolerance(self._root(carried, rounded, len(dz.value)))


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
    *,
    directions: int = 1,
    active: npt.NDArray[np.bool_] | None = None,
    activations: Sequence[NamedActivation] = LSTM_STANDARD,
    output_reads: str = "new",
    masks: Sequence[Array] | None = None,
) -> LstmBound:
    """Return the tolerances of an LSTM's outputs and gradients. Arguments are as for the oracle, parameters stacked.

    `activate` and `input_slope` are f(name, z, alpha, beta) and f'(name, z, alpha, beta) as the oracle computes them.
    """
    dtype = PRECISIONS[x.dtype.name]
    u, (T, N, _), H = dtype.unit, x.shape, cells[0].wh.shape[-1]
    smallest = max(dtype.smallest, 1e-150)  # the square of a smaller number underflows
    on_at = np.ones((T, N), np.bool_) if active is None else active
    functions = [_Function(*named, activate, input_slope, u, smallest) for named in activations]
    analyses = [_LstmAnalysis(cell, functions, output_reads == "new") for cell in cells]

    def masked(number: _Number, layer: int) -> _Number:
        if not masks:
            return number
        mask = as_float64(masks[layer])
        return _Number(number.value * mask, number.error * mask + 2 * u * np.abs(number.value * mask))

    def order(direction: int) -> range:
        return range(T - 1, -1, -1) if direction else range(T)

    def columns(direction: int) -> slice:
        return slice(direction * H, (direction + 1) * H)

    state = (len(cells), N, H)
    h, c = _Number.exact(h0, state), _Number.exact(c0, state)  # updated at every step
    steps: list[dict[int, _Step]] = [{} for _ in cells]
    y = _Number.exact(x, x.shape)  # of the layer below
    for layer in range(len(cells) // directions):
        inputs = masked(y, layer - 1) if layer else y
        y = _Number.exact(None, (T, N, directions * H))
        for direction in range(directions):
            number = layer * directions + direction
            for t in order(direction):
                on = on_at[t]
                step, out = analyses[number].forward(on, inputs.at(t, on), h.at(number, on), c.at(number, on))
                steps[number][t] = step
                h.put(out, number, on)
                c.put(step.c, number, on)
                y.put(out, t, on, columns(direction))

    dlayer = _Number.exact(dy, y.value.shape)
    dh, dc = _Number.exact(dhn, state), _Number.exact(dcn, state)
    for layer in range(len(cells) // directions - 1, -1, -1):
        du = _Number.exact(None, (T, N, analyses[layer * directions].inputs))
        for direction in range(directions):
            number = layer * directions + direction
            analysis = analyses[number]
            for t in reversed(order(direction)):
                on = on_at[t]
                dht = analysis.plus(dh.at(number, on), dlayer.at(t, on, columns(direction)))
                sent, dh_prev, dc_prev = analysis.backward(steps[number][t], dht, dc.at(number, on))
                du.put(analysis.plus(du.at(t, on), sent), t, on)
                dh.put(dh_prev, number, on)
                dc.put(dc_prev, number, on)
        dlayer = masked(du, layer - 1) if layer else du
    y_bound, hn, cn, dx, dh0, dc0 = (_tolerance(n.error + smallest) for n in (y, h, c, dlayer, dh, dc))
    return LstmBound(y_bound, hn, cn, dx, [analysis.tolerances() for analysis in analyses], dh0, dc0)
