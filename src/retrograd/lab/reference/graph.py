"""The oracle: the operations of graphs. `GRAPH` has a rule for each, by its name.

A rule's `forward` takes the arrays and attributes of the operation and returns its results, and `vjp` takes the
gradients of the results (None: 0), the results, the arrays and the attributes, and returns the gradients of the arrays
(None: an array without one). An operation without a `vjp` has no derivative. Where another module of the oracle has
the function, the rule only calls it.

`GRAPH_ITSELF` are the operations that compute nothing or are made of others, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .activation import apply_input_slope, apply_slope, value_at
from .convolution import conv_backward, conv_forward, conv_transpose_backward, conv_transpose_forward
from .dense import dropout_mask, embedding_backward, linear_backward, linear_forward, philox_mask
from .loss import cosine_distance, reduced_loss, soft_cross_entropy, softmax_cross_entropy
from .norm import norm_backward, norm_forward
from .pooling import (
    average_pool_backward,
    average_pool_forward,
    l2_pool_backward,
    l2_pool_forward,
    max_pool_backward,
    max_pool_forward,
)
from .precision import Array, widened
from .recurrent import (
    GruCell,
    LstmCell,
    RnnCell,
    gru_backward,
    gru_forward,
    lstm_backward,
    lstm_forward,
    rnn_backward,
    rnn_forward,
)
from .scan import scan_backward, scan_forward

__all__ = ["GRAPH", "GRAPH_ITSELF", "Rule"]

Shape = tuple[int, ...]
Gradients = Sequence[Array | None]
Forward = Callable[..., tuple[Any, ...]]
Vjp = Callable[..., Gradients]


class Rule(NamedTuple):
    forward: Forward
    vjp: Vjp | None = None


GRAPH: Final[dict[str, Rule]] = {}
GRAPH_ITSELF: Final = {
    "input": "an argument",
    "constant": "a constant",
    "variable": "a variable",
    "mark": "the tensor itself, as a node of its own that a recording takes gradients of",
    "map": "elementwise operations, joined by the plan of a program",
    "update": "a step of an optimizer: reference.sgd_step, adam_step and rmsprop_step",
    "accumulate": "the sum of a variable and a gradient",
    "lstm_backward": "the vjp of lstm, which also reads lstm's cache",
    "gru_backward": "the vjp of gru, which also reads gru's cache",
    "rnn_backward": "the vjp of rnn, which also reads rnn's cache",
}


def wide(a: Array) -> Array:
    """Floats in the oracle's precision; integers and bools as they are."""
    return widened(a) if a.dtype.kind == "f" else np.asarray(a)


def sum_to(g: Array, shape: Shape) -> Array:
    """The sum over the axes that broadcasting from `shape` has stretched."""
    lead = g.ndim - len(shape)
    g = g.sum(tuple(range(lead)))
    axes = tuple(i for i, extent in enumerate(shape) if extent == 1 and g.shape[i] != 1)
    return np.asarray(g.sum(axes, keepdims=True)).reshape(shape)


# ---- elementwise -----------------------------------------------------------------------------------------------------


def _elementwise(name: str, f: Callable[..., Any], *slopes: Callable[..., Any] | None) -> None:
    """`slopes`: for each operand, the factor of the gradient: a function of the result and the operands."""

    @np.errstate(all="ignore")
    def forward(*arrays: Array) -> tuple[Array, ...]:
        return (np.asarray(f(*map(wide, arrays))),)

    @np.errstate(all="ignore")
    def vjp(dys: Gradients, results: Sequence[Array], *arrays: Array) -> Gradients:
        (dy,) = dys
        assert dy is not None
        operands = [wide(a) for a in arrays]
        return [
            None if slope is None else sum_to(_times(wide(dy), slope(results[0], *operands)), a.shape)
            for slope, a in zip(slopes, arrays, strict=True)
        ]

    GRAPH[name] = Rule(forward, vjp if slopes else None)


def _times(dy: Array, slope: Any) -> Array:
    """A slope of bools selects: nothing passes where it is False, not even NaN."""
    s = np.asarray(slope)
    return np.where(s, dy, 0) if s.dtype == np.bool_ else dy * s


def _tied(wins: Array, a: Array, b: Array) -> Array:
    return np.where(wins, 1.0, np.where(a == b, 0.5, 0.0))


def _erf(x: Array) -> Array:
    return value_at("erf", x, 0.0, 0.0)


def _sigmoid(x: Array) -> Array:
    return value_at("sigmoid", x, 0.0, 0.0)


_LN2, _LN10 = np.log(np.longdouble(2)), np.log(np.longdouble(10))
_ROOT_PI = np.sqrt(np.longdouble("3.14159265358979323846264338327950288"))

_elementwise("add", np.add, lambda y, a, b: np.ones_like(y), lambda y, a, b: np.ones_like(y))
_elementwise("subtract", np.subtract, lambda y, a, b: np.ones_like(y), lambda y, a, b: -np.ones_like(y))
_elementwise("multiply", np.multiply, lambda y, a, b: b, lambda y, a, b: a)
_elementwise("divide", np.divide, lambda y, a, b: 1 / b, lambda y, a, b: -a / (b * b))
_elementwise(
    "power",
    np.power,
    lambda y, a, b: np.where(b == 0, 0, b * np.power(a, b - 1)),
    lambda y, a, b: np.where(a > 0, np.power(a, b) * np.log(np.where(a > 0, a, 1)), 0),
)
_elementwise("maximum", np.maximum, lambda y, a, b: _tied(a > b, a, b), lambda y, a, b: _tied(b > a, a, b))
_elementwise("minimum", np.minimum, lambda y, a, b: _tied(a < b, a, b), lambda y, a, b: _tied(b < a, a, b))
_elementwise("mod", np.mod, lambda y, a, b: np.ones_like(y), lambda y, a, b: -np.floor(a / b))
_elementwise("fmod", np.fmod, lambda y, a, b: np.ones_like(y), lambda y, a, b: -np.trunc(a / b))
_elementwise(
    "arctan2", np.arctan2, lambda y, a, b: b / (a * a + b * b), lambda y, a, b: -a / (a * a + b * b)
)  # fmt: skip
_elementwise("where", np.where, None, lambda y, p, a, b: p, lambda y, p, a, b: ~p)
for _name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):
    _elementwise(_name, getattr(np, _name))
for _name in ("logical_and", "logical_or", "logical_xor", "logical_not"):
    _elementwise(_name, getattr(np, _name))
for _name, _function in (
    ("sign", np.sign), ("floor", np.floor), ("ceil", np.ceil), ("round", np.rint), ("trunc", np.trunc),
    ("isnan", np.isnan), ("isinf", np.isinf), ("isfinite", np.isfinite),
):  # fmt: skip
    _elementwise(_name, _function)
_elementwise("negative", np.negative, lambda y, x: -np.ones_like(x))
_elementwise("absolute", np.absolute, lambda y, x: np.sign(x))
_elementwise("square", np.square, lambda y, x: 2 * x)
_elementwise("sqrt", np.sqrt, lambda y, x: 0.5 / np.sqrt(x))
_elementwise("rsqrt", lambda x: 1 / np.sqrt(x), lambda y, x: -0.5 / (x * np.sqrt(x)))
_elementwise("reciprocal", lambda x: 1 / x, lambda y, x: -1 / (x * x))
_elementwise("exp", np.exp, lambda y, x: np.exp(x))
_elementwise("exp2", np.exp2, lambda y, x: np.exp2(x) * _LN2)
_elementwise("expm1", np.expm1, lambda y, x: np.exp(x))
_elementwise("log", np.log, lambda y, x: 1 / x)
_elementwise("log2", np.log2, lambda y, x: 1 / (x * _LN2))
_elementwise("log10", np.log10, lambda y, x: 1 / (x * _LN10))
_elementwise("log1p", np.log1p, lambda y, x: 1 / (1 + x))
_elementwise("sin", np.sin, lambda y, x: np.cos(x))
_elementwise("cos", np.cos, lambda y, x: -np.sin(x))
_elementwise("tan", np.tan, lambda y, x: 1 / np.cos(x) ** 2)
_elementwise("arcsin", np.arcsin, lambda y, x: 1 / np.sqrt((1 - x) * (1 + x)))
_elementwise("arccos", np.arccos, lambda y, x: -1 / np.sqrt((1 - x) * (1 + x)))
_elementwise("arctan", np.arctan, lambda y, x: 1 / (1 + x * x))
_elementwise("sinh", np.sinh, lambda y, x: np.cosh(x))
_elementwise("cosh", np.cosh, lambda y, x: np.sinh(x))
_elementwise("tanh", np.tanh, lambda y, x: 1 / np.cosh(x) ** 2)
_elementwise("arcsinh", np.arcsinh, lambda y, x: 1 / np.sqrt(1 + x * x))
_elementwise("arccosh", np.arccosh, lambda y, x: 1 / np.sqrt((x - 1) * (x + 1)))
_elementwise("arctanh", np.arctanh, lambda y, x: 1 / ((1 - x) * (1 + x)))
_elementwise("erf", _erf, lambda y, x: 2 / _ROOT_PI * np.exp(-x * x))
_elementwise("sigmoid", _sigmoid, lambda y, x: _sigmoid(x) * _sigmoid(-x))
_elementwise("relu", lambda x: np.maximum(x, 0), lambda y, x: x > 0)
_elementwise("copy", np.copy, lambda y, x: np.ones_like(x))


@np.errstate(all="ignore")
def _cast(x: Array, *, dtype: np.dtype[Any]) -> tuple[Array]:
    """Truncation, limited to the range of the integers; NaN is 0."""
    if x.dtype.kind == "f" and dtype.kind == "i":
        info = np.iinfo(dtype)
        whole = np.trunc(np.where(np.isnan(x), 0, x)).astype(np.longdouble)
        limited = [min(max(int(v), info.min), info.max) if math.isfinite(v) else 0 for v in whole.reshape(-1)]
        signs = np.where(np.isposinf(x), info.max, np.where(np.isneginf(x), info.min, 0)).reshape(-1)
        found = [int(s) or v for v, s in zip(limited, signs, strict=True)]
        return (np.array(found, dtype).reshape(x.shape),)
    return (wide(x.astype(dtype)),)


def _cast_vjp(dys: Gradients, results: Sequence[Array], x: Array, *, dtype: np.dtype[Any]) -> Gradients:
    (dy,) = dys
    assert dy is not None
    return [dy.astype(x.dtype) if x.dtype.kind == "f" else None]


GRAPH["cast"] = Rule(_cast, _cast_vjp)
GRAPH["stop_gradient"] = Rule(lambda x: (wide(x),))


def _call(*arrays: Array, function: Callable[..., Any], specs: Any, several: bool) -> tuple[Array, ...]:
    found = function(*arrays)
    return tuple(found) if several else (found,)


GRAPH["call"] = Rule(_call)


# ---- linear in every float array: results are sums of products, and so are the gradients -----------------------------


def _linear_rule(name: str, forward: Callable[..., Array], *adjoints: Callable[..., Array] | None) -> None:
    """`adjoints`: for each array, its gradient, a function of dy, the arrays and the attributes."""

    def results(*arrays: Array, **attributes: Any) -> tuple[Array, ...]:
        return (np.asarray(forward(*map(wide, arrays), **attributes)),)

    def vjp(dys: Gradients, results: Sequence[Array], *arrays: Array, **attributes: Any) -> Gradients:
        (dy,) = dys
        assert dy is not None
        operands = [wide(a) for a in arrays]
        return [None if f is None else np.asarray(f(wide(dy), *operands, **attributes)) for f in adjoints]

    GRAPH[name] = Rule(results, vjp)


def _slices(slices: Sequence[tuple[int, int | None, int]]) -> tuple[slice, ...]:
    return tuple(slice(*part) for part in slices)


def _placed(x: Array, *, shape: Shape, slices: Any) -> Array:
    result = np.zeros(shape, x.dtype)
    result[_slices(slices)] = x
    return result


def _kept(y: Array, x: Array, axes: Shape) -> Array:
    """The result of a reduction with its axes kept."""
    return y.reshape(tuple(1 if i in axes else e for i, e in enumerate(x.shape)))


def _spread(dy: Array, x: Array, *, axes: Shape, keepdims: bool) -> Array:
    return np.broadcast_to(_kept(dy, x, axes), x.shape)


def _count(x: Array, axes: Shape) -> int:
    return math.prod(x.shape[a] for a in axes)


def _mean(x: Array, *, axes: Shape, keepdims: bool) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(x.sum(axes, keepdims=keepdims) / np.float64(_count(x, axes)))


def _put(dy: Array, indices: Array, *, shape: Shape, axis: int) -> Array:
    """Rows of dy added at indices along an axis, one by one."""
    dx = np.zeros(shape, dy.dtype)
    rows = np.moveaxis(dx, axis, 0)
    lead = tuple(range(axis, axis + indices.ndim))
    given = np.moveaxis(dy, lead, tuple(range(indices.ndim)))
    for position in np.ndindex(indices.shape):
        rows[indices[position]] += given[position]
    return dx


def _put_along(dy: Array, indices: Array, *, shape: Shape, axis: int) -> Array:
    dx = np.zeros(shape, dy.dtype)
    for position in np.ndindex(indices.shape):
        place = (*position[:axis], indices[position], *position[axis + 1 :])
        dx[place] += dy[position]
    return dx


def _cumulative(x: Array, *, axis: int, exclusive: bool, reverse: bool) -> Array:
    v = np.flip(x, axis) if reverse else x
    sums: Array = np.cumsum(v, axis)
    if exclusive:
        sums = np.concatenate([np.zeros_like(np.take(sums, [0] if sums.shape[axis] else [], axis)), sums], axis)
        sums = np.take(sums, range(v.shape[axis]), axis)
    return np.flip(sums, axis) if reverse else sums


def _concatenated_vjp(dys: Gradients, results: Sequence[Array], *arrays: Array, axis: int) -> Gradients:
    (dy,) = dys
    assert dy is not None
    ends = np.cumsum([a.shape[axis] for a in arrays])[:-1]
    return list(np.split(wide(dy), ends, axis))


_linear_rule("reshape", lambda x, *, shape: x.reshape(shape), lambda dy, x, *, shape: dy.reshape(x.shape))
_linear_rule(
    "transpose", lambda x, *, axes: x.transpose(axes), lambda dy, x, *, axes: dy.transpose(np.argsort(axes))
)  # fmt: skip
_linear_rule(
    "broadcast_to", lambda x, *, shape: np.broadcast_to(x, shape), lambda dy, x, *, shape: sum_to(dy, x.shape)
)  # fmt: skip
_linear_rule(
    "slice", lambda x, *, slices: x[_slices(slices)],
    lambda dy, x, *, slices: _placed(dy, shape=x.shape, slices=slices),
)  # fmt: skip
_linear_rule("place", _placed, lambda dy, x, *, shape, slices: dy[_slices(slices)])
GRAPH["concatenate"] = Rule(
    lambda *arrays, axis: (np.concatenate([wide(a) for a in arrays], axis),), _concatenated_vjp
)  # fmt: skip
_linear_rule("sum", lambda x, *, axes, keepdims: x.sum(axes, keepdims=keepdims), _spread)
_linear_rule(
    "mean", _mean,
    lambda dy, x, *, axes, keepdims: np.broadcast_to(_kept(dy, x, axes), x.shape) / max(_count(x, axes), 1),
)  # fmt: skip
_linear_rule(
    "take", lambda x, indices, *, axis: np.take(x, indices, axis),
    lambda dy, x, indices, *, axis: _put(dy, indices, shape=x.shape, axis=axis), None,
)  # fmt: skip
_linear_rule("put_add", _put, lambda g, dy, indices, *, shape, axis: np.take(g, indices, axis), None)
_linear_rule(
    "take_along_axis", lambda x, indices, *, axis: np.take_along_axis(x, indices, axis),
    lambda dy, x, indices, *, axis: _put_along(dy, indices, shape=x.shape, axis=axis), None,
)  # fmt: skip
_linear_rule(
    "put_along_axis_add", _put_along, lambda g, dy, indices, *, shape, axis: np.take_along_axis(g, indices, axis), None
)  # fmt: skip
_linear_rule(
    "cumsum", _cumulative,
    lambda dy, x, *, axis, exclusive, reverse: _cumulative(dy, axis=axis, exclusive=exclusive, reverse=not reverse),
)  # fmt: skip
_linear_rule(
    "matmul", lambda a, b: np.einsum("bmk,bkn->bmn", a, b),
    lambda dy, a, b: np.einsum("bmn,bkn->bmk", dy, b), lambda dy, a, b: np.einsum("bmk,bmn->bkn", a, dy),
)  # fmt: skip


def _linear_vjp(dys: Gradients, results: Sequence[Array], x: Array, w: Array, b: Array | None) -> Gradients:
    (dy,) = dys
    assert dy is not None
    dx, dw, db = linear_backward(dy, x, w)
    return [dx, dw, None if b is None else db]


def _sum_of(parts: Sequence[Array | None], like: Array) -> Array:
    total = np.zeros(like.shape, wide(like).dtype)
    for part in parts:
        if part is not None:
            total = total + part
    return total


def _linear_second(dys: Gradients, results: Sequence[Array], dy: Array, x: Array, w: Array) -> Gradients:
    gdx, gdw, gdb = dys
    rows = math.prod(x.shape[:-1])
    flat = wide(dy).reshape(rows, w.shape[0])
    by_dw = (
        None if gdw is None else (np.einsum("...i,oi->...o", wide(x), gdw), np.einsum("...o,oi->...i", wide(dy), gdw))
    )
    return [
        _sum_of([
            None if gdx is None else np.einsum("...i,oi->...o", gdx, wide(w)),
            None if by_dw is None else by_dw[0],
            None if gdb is None else np.broadcast_to(gdb, dy.shape),
        ], dy),
        _sum_of([None if by_dw is None else by_dw[1]], x),
        _sum_of([None if gdx is None else np.einsum("ro,ri->oi", flat, gdx.reshape(rows, w.shape[1]))], w),
    ]  # fmt: skip


GRAPH["linear"] = Rule(lambda x, w, b: (linear_forward(x, w, b),), _linear_vjp)
GRAPH["linear_backward"] = Rule(linear_backward, _linear_second)
GRAPH["embedding"] = Rule(
    lambda indices, table: (wide(table)[indices],),
    lambda dys, results, indices, table: [None, embedding_backward(dys[0], indices, table.shape[0])],
)
GRAPH["embedding_backward"] = Rule(
    lambda dy, indices, *, rows: (embedding_backward(dy, indices, rows),),
    lambda dys, results, dy, indices, *, rows: [wide(dys[0])[indices], None],
)
GRAPH["dropout"] = Rule(
    lambda x, seed, *, rate: (wide(x) * dropout_mask(int(seed) % 2**64, x.shape, rate),),
    lambda dys, results, x, seed, *, rate: [wide(dys[0]) * dropout_mask(int(seed) % 2**64, x.shape, rate), None],
)


# ---- other reductions, softmax and selections ------------------------------------------------------------------------


def _squares_vjp(dys: Gradients, results: Sequence[Array], x: Array, *, axes: Shape, keepdims: bool) -> Gradients:
    (dy,) = dys
    assert dy is not None
    return [2 * wide(x) * _kept(wide(dy), x, axes)]


def _extreme_vjp(dys: Gradients, results: Sequence[Array], x: Array, *, axes: Shape, keepdims: bool) -> Gradients:
    """Elements that share the largest value share the gradient."""
    (dy,), a = dys, wide(x)
    assert dy is not None
    winners = a == _kept(results[0], x, axes)
    with np.errstate(all="ignore"):
        return [winners * (_kept(wide(dy), x, axes) / winners.sum(axes, keepdims=True))]


def _product_vjp(dys: Gradients, results: Sequence[Array], x: Array, *, axes: Shape, keepdims: bool) -> Gradients:
    """For each element the product of the others, multiplied one by one."""
    (dy,), a = dys, wide(x)
    assert dy is not None
    others = np.ones_like(a)
    ranges = [range(e) if i in axes else range(1) for i, e in enumerate(x.shape)]
    for place in np.ndindex(*map(len, ranges)):
        here = tuple(slice(p, p + 1) if i in axes else slice(None) for i, p in enumerate(place))
        rest = a.copy()
        rest[here] = 1
        others[here] = rest.prod(axes, keepdims=True)
    return [others * _kept(wide(dy), x, axes)]


GRAPH["sum_of_squares"] = Rule(
    lambda x, *, axes, keepdims: (np.asarray((wide(x) ** 2).sum(axes, keepdims=keepdims)),), _squares_vjp
)
GRAPH["max"] = Rule(lambda x, *, axes, keepdims: (np.asarray(wide(x).max(axes, keepdims=keepdims)),), _extreme_vjp)
GRAPH["min"] = Rule(lambda x, *, axes, keepdims: (np.asarray(wide(x).min(axes, keepdims=keepdims)),), _extreme_vjp)
GRAPH["prod"] = Rule(
    np.errstate(all="ignore")(lambda x, *, axes, keepdims: (np.asarray(wide(x).prod(axes, keepdims=keepdims)),)),
    _product_vjp,
)
GRAPH["reduce_bool"] = Rule(
    lambda x, *, axes, keepdims, every: (np.asarray((np.all if every else np.any)(x, axes, keepdims=keepdims)),)
)
GRAPH["arg_reduce"] = Rule(lambda x, *, axis, largest: (np.asarray((np.argmax if largest else np.argmin)(x, axis)),))


@np.errstate(all="ignore")
def _softmax(x: Array, *, log: bool) -> tuple[Array]:
    if not x.size:
        return (wide(x),)
    d = wide(x) - wide(x).max(-1, keepdims=True)
    total = np.exp(d).sum(-1, keepdims=True)
    return (d - np.log(total) if log else np.exp(d) / total,)


def _softmax_backward(dy: Array, y: Array, *, log: bool) -> tuple[Array]:
    dy, y = wide(dy), wide(y)
    if log:
        return (dy - np.exp(y) * dy.sum(-1, keepdims=True),)
    return (y * (dy - (dy * y).sum(-1, keepdims=True)),)


def _softmax_vjp(dys: Gradients, results: Sequence[Array], x: Array, *, log: bool) -> Gradients:
    (dy,) = dys
    assert dy is not None
    return _softmax_backward(dy, results[0], log=log)


def _softmax_second(dys: Gradients, results: Sequence[Array], dy: Array, y: Array, *, log: bool) -> Gradients:
    """dx = y (dy - sum(dy y)), or dy - exp(y) sum(dy): bilinear in dy and, but for exp, in y."""
    (given,), dy, y = dys, wide(dy), wide(y)
    assert given is not None
    g = wide(given)
    if log:
        p = np.exp(y)
        return [g - (g * p).sum(-1, keepdims=True), -(g * p) * dy.sum(-1, keepdims=True)]
    by_sums = (g * y).sum(-1, keepdims=True)
    return [y * (g - by_sums), g * (dy - (dy * y).sum(-1, keepdims=True)) - dy * by_sums]


GRAPH["softmax"] = Rule(_softmax, _softmax_vjp)
GRAPH["softmax_backward"] = Rule(_softmax_backward, _softmax_second)


def _top(x: Array, *, k: int, largest: bool) -> tuple[Array, Array]:
    """In order, of equal elements the one with the lower index first; NaN is larger than any number."""
    values, indices = np.zeros((*x.shape[:-1], k), wide(x).dtype), np.zeros((*x.shape[:-1], k), np.int64)
    for row in np.ndindex(x.shape[:-1]):
        elements = [float(v) for v in x[row]]
        keys = [(math.isnan(v), 0.0 if math.isnan(v) else v) for v in elements]
        sign = -1 if largest else 1
        order = sorted(range(len(keys)), key=lambda i: (sign * keys[i][0], sign * keys[i][1], i))[:k]
        values[row], indices[row] = wide(x)[row][order], order
    return values, indices


def _top_vjp(dys: Gradients, results: Sequence[Array], x: Array, *, k: int, largest: bool) -> Gradients:
    dy = dys[0]
    if dy is None:
        return [None]
    return [_put_along(wide(dy), results[1], shape=x.shape, axis=x.ndim - 1)]


GRAPH["top_k"] = Rule(_top, _top_vjp)


# ---- layers ----------------------------------------------------------------------------------------------------------


def _parameters(activation: Any) -> tuple[str, float, float]:
    return ("identity", 0.0, 0.0) if activation is None else (activation.name, activation.alpha, activation.beta)


@np.errstate(all="ignore")
def _activation(x: Array, *, activation: Any) -> tuple[Array]:
    return (value_at(activation.name, wide(x), activation.alpha, activation.beta),)


def _activation_backward(dy: Array, x: Array, *, activation: Any) -> tuple[Array]:
    return (apply_input_slope(activation.name, x, dy, activation.alpha, activation.beta),)


GRAPH["activation"] = Rule(
    _activation, lambda dys, results, x, *, activation: _activation_backward(dys[0], x, activation=activation)
)
GRAPH["activation_backward"] = Rule(_activation_backward)
GRAPH["activation_output_slope"] = Rule(
    lambda dy, y, *, activation: (apply_slope(activation.name, y, dy, activation.alpha, activation.beta),)
)


def _norm_options(statistics: Array | None, options: dict[str, Any]) -> dict[str, Any]:
    name, alpha, beta = _parameters(options["activation"])
    kind = options["kind"].removesuffix("_norm")
    found = {
        "kind": kind, "num_groups": options["groups"], "eps": options["eps"], "activation": name, "alpha": alpha,
        "act_beta": beta, "axis" if kind == "layer" else "channel_axis": options["axis"],
    }  # fmt: skip
    return found if statistics is None else found | {"mean": statistics[0], "var": statistics[1]}


def _norm(x: Array, gamma: Any, beta: Any, statistics: Any, *, frozen: bool, **options: Any) -> tuple[Array, ...]:
    found = norm_forward(x, gamma, beta, **_norm_options(statistics, options))
    return (found.y, np.stack([found.mean, found.var])) if statistics is None else (found.y,)


def _norm_backward(
    dy: Array, x: Array, y: Any, gamma: Any, beta: Any, statistics: Any, *, frozen: bool, given: bool, **options: Any
) -> tuple[Array, ...]:
    named = _norm_options(statistics, options)
    return norm_backward(dy, x, y, gamma, beta, frozen=frozen, slope_from=options["slope_from"], **named)[:3]


def _norm_vjp(
    dys: Gradients, results: Sequence[Array], x: Array, gamma: Any, beta: Any, statistics: Any, *, frozen: bool,
    **options: Any,
) -> Gradients:  # fmt: skip
    dy = dys[0]
    assert dy is not None
    named = _norm_options(statistics, options)
    found = norm_backward(dy, x, results[0], gamma, beta, frozen=frozen, slope_from=options["slope_from"], **named)
    return [found.dx, None if gamma is None else found.dgamma, None if beta is None else found.dbeta, None]


GRAPH["norm"] = Rule(_norm, _norm_vjp)
GRAPH["norm_backward"] = Rule(_norm_backward)


# Batch norm over shards. Statistics and sums are [2, C].


def _shard_options(statistics: Array, options: dict[str, Any]) -> dict[str, Any]:
    return _norm_options(statistics, {**options, "kind": "batch_norm", "groups": 1})


def _norm_statistics(x: Array, *, axis: int) -> tuple[Array, ...]:
    found = norm_forward(x, kind="batch", channel_axis=axis)
    return (np.stack([found.mean, found.var]),)


def _shard_backward(dy: Array, x: Array, y: Any, gamma: Any, beta: Any, statistics: Array, options: Any) -> Any:
    named = _shard_options(statistics, options)
    return norm_backward(dy, x, y, gamma, beta, slope_from=options["slope_from"], **named)


def _norm_sums(dy: Array, x: Array, y: Any, gamma: Any, beta: Any, statistics: Array, **options: Any) -> Any:
    found = _shard_backward(dy, x, y, gamma, beta, statistics, options)
    return (np.stack([found.dbeta, found.dgamma]),)


def _norm_dx(
    dy: Array, x: Array, y: Any, gamma: Any, beta: Any, statistics: Array, sums: Array, count: Array, **options: Any
) -> tuple[Array, ...]:
    """rstd * gamma * (dz - sum(dz) / count - xhat * sum(dz * xhat) / count), with sums over all shards"""
    found = _shard_backward(dy, x, y, gamma, beta, statistics, options)
    axis = options["axis"] % x.ndim
    shape = [-1 if k == axis else 1 for k in range(x.ndim)]
    factor = found.rstd if gamma is None else found.rstd * wide(gamma)
    mean_dz, mean_dz_xhat = ((wide(s) / wide(count)).reshape(shape) for s in sums)
    return (factor.reshape(shape) * (found.dz - mean_dz - found.xhat * mean_dz_xhat),)


def _sync_norm(
    x: Array, gamma: Any, beta: Any, statistics: Array, count: Array, *, exchange: Any, **options: Any
) -> tuple[Array, ...]:
    return (norm_forward(x, gamma, beta, **_shard_options(statistics, options)).y,)


def _sync_norm_vjp(
    dys: Gradients, results: Sequence[Array], x: Array, gamma: Any, beta: Any, statistics: Array, count: Array, *,
    exchange: Any, **options: Any,
) -> Gradients:  # fmt: skip
    """dx includes the gradient of the statistics; dgamma and dbeta are this shard's part."""
    dy = dys[0]
    assert dy is not None
    saved = (dy, x, results[0], gamma, beta, statistics)
    (sums,) = _norm_sums(*saved, **options)
    (dx,) = _norm_dx(*saved, np.sum(exchange(sums), axis=0), count, **options)
    return [dx, None if gamma is None else sums[1], None if beta is None else sums[0], None, None]


GRAPH["norm_statistics"] = Rule(_norm_statistics)
GRAPH["norm_sums"] = Rule(_norm_sums)
GRAPH["norm_dx"] = Rule(_norm_dx)
GRAPH["sync_norm"] = Rule(_sync_norm, _sync_norm_vjp)


def _images(a: Array, channels_last: bool) -> Array:
    return np.moveaxis(a, -1, 1) if channels_last else a


def _laid_out(a: Array, channels_last: bool) -> Array:
    return np.moveaxis(a, 1, -1) if channels_last else a


def _conv_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("stride", "padding", "dilation", "groups")}


def _convolved(x: Array, w: Array, b: Array | None, options: dict[str, Any]) -> Array:
    """Before the activation, channels first."""
    images, named = _images(x, options["channels_last"]), _conv_options(options)
    if options["output_padding"] is None:
        return conv_forward(images, w, b, **named)
    return conv_transpose_forward(images, w, b, output_padding=options["output_padding"], **named)


@np.errstate(all="ignore")
def _conv(x: Array, w: Array, b: Array | None, **options: Any) -> tuple[Array]:
    z = _convolved(x, w, b, options)
    return (_laid_out(value_at(*_shuffled(_parameters(options["activation"]), z)), options["channels_last"]),)


def _shuffled(parameters: tuple[str, float, float], z: Array) -> tuple[str, Array, float, float]:
    name, alpha, beta = parameters
    return name, z, alpha, beta


def _conv_backward(dy: Array, x: Array, w: Array, **options: Any) -> tuple[Array, ...]:
    last = options["channels_last"]
    backward = conv_backward if options["output_padding"] is None else conv_transpose_backward
    dx, dw, db = backward(_images(dy, last), _images(x, last), w, **_conv_options(options))
    return _laid_out(dx, last), dw, db


def _conv_vjp(dys: Gradients, results: Sequence[Array], x: Array, w: Array, b: Any, **options: Any) -> Gradients:
    dy = dys[0]
    assert dy is not None
    name, alpha, beta = _parameters(options["activation"])
    dz = wide(dy) if name == "identity" else apply_slope(name, results[0], dy, alpha, beta)
    dx, dw, db = _conv_backward(dz, x, w, **options)
    return [dx, dw, None if b is None else db]


def _conv_second(dys: Gradients, results: Sequence[Array], dy: Array, x: Array, w: Array, **options: Any) -> Gradients:
    gdx, gdw, gdb = dys
    options = {**options, "activation": None}
    last = options["channels_last"]
    by_dy, by_x, by_w = [], [], []
    if gdx is not None:
        by_dy.append(_conv(gdx, w, None, **options)[0])
        by_w.append(_conv_backward(dy, gdx, w, **options)[1])
    if gdw is not None:
        by_dy.append(_conv(x, gdw, None, **options)[0])
        by_x.append(_conv_backward(dy, x, gdw, **options)[0])
    if gdb is not None:
        channels = gdb.reshape(1, -1, *(1,) * (dy.ndim - 2))
        by_dy.append(np.broadcast_to(_laid_out(channels, last), dy.shape))
    return [_sum_of(by_dy, dy), _sum_of(by_x, x), _sum_of(by_w, w)]


GRAPH["conv"] = Rule(_conv, _conv_vjp)
GRAPH["conv_backward"] = Rule(_conv_backward, _conv_second)


def _pool(x: Array, *, kind: str, **options: Any) -> tuple[Array, ...]:
    o, last = options, options["channels_last"]
    images = _images(x, last)
    window = (o["kernel"], o["stride"], o["padding"])
    if kind == "max":
        y, indices = max_pool_forward(images, *window, o["dilation"])
        return wide(_laid_out(y, last)), _laid_out(indices, last)
    if kind == "average":
        return (_laid_out(average_pool_forward(images, *window, o["count_includes_padding"]), last),)
    return (_laid_out(l2_pool_forward(images, *window), last),)


def _pool_backward(dy: Array, *saved: Array, kind: str, shape: Shape, **options: Any) -> tuple[Array]:
    o, last = options, options["channels_last"]
    planes = (shape[0], shape[-1], *shape[1:-1]) if last else shape
    window = (o["kernel"], o["stride"], o["padding"])
    given = [_images(a, last) for a in (dy, *saved)]
    if kind == "max":
        dx = max_pool_backward(given[0], given[1], planes)
    elif kind == "average":
        dx = average_pool_backward(given[0], planes, *window, o["count_includes_padding"])
    else:
        dx = l2_pool_backward(given[0], given[1], given[2], *window)
    return (_laid_out(dx, last),)


def _pool_vjp(dys: Gradients, results: Sequence[Array], x: Array, *, kind: str, **options: Any) -> Gradients:
    dy = dys[0]
    assert dy is not None
    saved = {"max": (results[-1],), "average": (), "l2": (x, results[0])}[kind]
    return _pool_backward(dy, *saved, kind=kind, shape=x.shape, **options)


GRAPH["pool"] = Rule(_pool, _pool_vjp)
GRAPH["pool_backward"] = Rule(_pool_backward)


# ---- losses: (loss, its gradient) ------------------------------------------------------------------------------------


def _reduced(losses: Array, slopes: Array, weights: Array | None, reduction: str, scale: float) -> tuple[Array, Array]:
    loss, gradient = reduced_loss(losses, slopes, weights, reduction)
    return np.asarray(loss * scale), gradient * scale


def _entropy(
    logits: Array, labels: Array, weights: Array | None, *, reduction: str, scale: float, ignore_index: int,
    smoothing: float,
) -> tuple[Array, Array]:  # fmt: skip
    if labels.dtype.kind == "f":
        return _reduced(*soft_cross_entropy(logits, labels, label_smoothing=smoothing), weights, reduction, scale)
    kept = labels != ignore_index
    losses, slopes = softmax_cross_entropy(logits, labels, ignore_index=ignore_index, label_smoothing=smoothing)
    if kept.all() or reduction in ("none", "sum"):
        return _reduced(losses, slopes, weights, reduction, scale)
    # Ignored rows do not count.
    loss, some = _reduced(losses[kept], slopes[kept], None if weights is None else weights[kept], reduction, scale)
    gradient = np.zeros_like(slopes)
    gradient[kept] = some
    return loss, gradient


def _cosine(
    y: Array, target: Array, weights: Array | None, *, reduction: str, scale: float
) -> tuple[Array, Array]:  # fmt: skip
    return _reduced(*cosine_distance(y, target), weights, reduction, scale)


def _elements(
    y: Array, target: Array, weights: Array | None, *, kind: int, a: float, b: float, reduction: str, scale: float
) -> tuple[Array, Array]:
    """0: a d^2 up to |d| = b, then linear; 1: |d|, slope a at 0; 2: hinge; 3: log, eps a; 4: sigmoid, t -> a t + b."""
    x, t = wide(y), wide(target)
    d = x - t
    if kind == 0:
        inside = np.abs(d) <= b
        beyond = 0.0 if math.isinf(b) else 2 * a * b * np.abs(d) - a * b * b
        losses, slopes = np.where(inside, a * d * d, beyond), 2 * a * np.clip(d, -b, b)
    elif kind == 1:
        losses, slopes = np.abs(d), np.where(d == 0, a, np.sign(d))
    elif kind == 2:
        side = 2 * t - 1
        losses, slopes = np.maximum(0, 1 - side * x), np.where(side * x <= 1, -side, 0)
    elif kind == 3:
        losses = -t * np.log(x + a) - (1 - t) * np.log(1 - x + a)
        slopes = (1 - t) / (1 - x + a) - t / (x + a)
    else:
        t = a * t + b
        losses = t * np.logaddexp(0, -x) + (1 - t) * np.logaddexp(0, x)
        slopes = (1 - t) * _sigmoid(x) - t * _sigmoid(-x)
    return _reduced(losses, slopes, weights, reduction, scale)


def _loss_vjp(two_sided: bool, rows: bool) -> Vjp:
    def vjp(
        dys: Gradients, results: Sequence[Array], y: Array, target: Array, weights: Any, **options: Any
    ) -> Gradients:
        dy = dys[0]
        assert dy is not None
        g = wide(np.asarray(dy))
        dx = results[1] * (g[..., None] if rows and g.ndim else g)
        return [dx, -dx if two_sided and options["kind"] < 2 else None, None]

    return vjp


GRAPH["softmax_cross_entropy"] = Rule(_entropy, _loss_vjp(two_sided=False, rows=True))
GRAPH["cosine_distance"] = Rule(_cosine, _loss_vjp(two_sided=False, rows=True))
GRAPH["element_losses"] = Rule(_elements, _loss_vjp(two_sided=True, rows=False))


# ---- recurrent layers ------------------------------------------------------------------------------------------------


def _lstm_slots(lengths: Array, *, steps: int) -> tuple[Array, Array]:
    """The samples that are active in each step, and the samples by falling length."""
    active = np.array([(lengths > t).sum() for t in range(steps)], np.int64)
    return active, np.array(sorted(range(lengths.size), key=lambda n: (-lengths[n], n)), np.int64)


class _Cell(NamedTuple):
    """The oracle of a cell."""

    parameters: Any  # LstmCell, GruCell or RnnCell
    gates: int
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    options: dict[str, str]  # its own, and what the oracle calls them


_RECURRENT: Final = {
    "lstm": _Cell(
        LstmCell, 4, lstm_forward, lstm_backward,
        {"output_gate_reads": "output_reads", "coupled": "coupled", "cell_clip": "cell_clip"},
    ),
    "gru": _Cell(GruCell, 3, gru_forward, gru_backward, {"kind": "kind", "flip": "flip"}),
    "rnn": _Cell(RnnCell, 1, rnn_forward, rnn_backward, {}),
}  # fmt: skip
# The inputs that precede the parameters of the cells.
_FIRST: Final = 11
_UNGATED: Final = ("projection", "gamma_c", "beta_c")


def _recurrent_call(inputs: Sequence[Any], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the oracle, which has time first and states of several cells."""
    x, table, h0, c0, active, order, seed, reset, *factors = inputs[:_FIRST]
    of, batch_first = options["options"], options["batch_first"]
    kind = _RECURRENT[of.cell]
    # Indices have time first.
    sequence = table[x] if table is not None else np.moveaxis(x, 0, 1) if batch_first else x
    steps, samples, _ = sequence.shape
    fields = kind.parameters._fields
    cells = []
    for i in range(_FIRST, len(inputs), len(fields)):
        given = dict(zip(fields, inputs[i : i + len(fields)], strict=True))
        projection = given.get("projection")
        units = given["wh"].shape[-1] if projection is None else projection.shape[-1]
        shaped = {
            name: a if a is None or name in _UNGATED else a.reshape(kind.gates, units, *a.shape[1:])
            for name, a in given.items()
        }
        cells.append(kind.parameters(**shaped))
    states = [None if s is None else s.reshape(len(cells), samples, -1) for s in (h0, c0)]
    directions = 2 if options["bidirectional"] else 1
    mask, zoneout, cell_zoneout = (
        a.swapaxes(-3, -2) if a is not None and batch_first and a.ndim > 2 else a for a in factors
    )
    named: dict[str, Any] = {"directions": directions, "reset": reset, "mask": mask, "zoneout_h": zoneout}
    named |= {"clip": of.clip, "norm": of.norm, "eps": of.norm_eps}
    named |= {theirs: getattr(of, ours) for ours, theirs in kind.options.items()}
    named["activations"] = [_parameters(a) for a in of.activations]
    if of.cell == "lstm":
        named["zoneout_c"] = cell_zoneout
    if active is not None:
        on = np.zeros((steps, samples), bool)
        for t in range(steps):
            on[t, order[: active[t]]] = True
        named["active"] = on
    if options["dropout"]:
        shape = (steps, samples, directions * cells[0].wh.shape[-1])
        layers = len(cells) // directions
        number = int(seed) % 2**64
        named["masks"] = [philox_mask(number, layer, shape, options["dropout"]) for layer in range(layers - 1)]
    return (sequence, cells, *states[: 2 if of.cell == "lstm" else 1]), named


def _recurrent(*inputs: Any, **options: Any) -> tuple[Any, ...]:
    arguments, named = _recurrent_call(inputs, options)
    found = _RECURRENT[options["options"].cell].forward(*arguments, **named)
    y = np.moveaxis(found.y, 0, 1) if options["batch_first"] else found.y
    cn = getattr(found, "cn", None)
    hn, cn = (None if s is None else s[0] if options["single"] else s for s in (found.hn, cn))
    return y, hn, np.zeros(0) if cn is None else cn, None


def _recurrent_vjp(dys: Gradients, results: Sequence[Any], *inputs: Any, **options: Any) -> Gradients:
    arguments, named = _recurrent_call(inputs, options)
    dy, *states = dys[: 3 if options["options"].cell == "lstm" else 2]
    if dy is not None and options["batch_first"]:
        dy = np.moveaxis(dy, 0, 1)
    if options["single"]:
        states = [None if s is None else s[None] for s in states]
    found = _RECURRENT[options["options"].cell].backward(dy, *states, *arguments, **named)
    x, table, *initial = inputs[:4]
    dx = np.moveaxis(found.dx, 0, 1) if options["batch_first"] and table is None else found.dx
    first: list[Any] = [dx, None] if table is None else [None, embedding_backward(dx, x, table.shape[0])]
    first += [
        None if s is None else getattr(found, name).reshape(s.shape)
        for name, s in zip(("dh0", "dc0"), initial, strict=True)
    ]
    gradients = (gradient for cell in found.cells for gradient in cell)
    parts = [
        None if given is None else gradient.reshape(given.shape)
        for given, gradient in zip(inputs[_FIRST:], gradients, strict=True)
    ]
    return [*first, *[None] * (_FIRST - len(first)), *parts]


GRAPH["lstm_slots"] = Rule(_lstm_slots)
GRAPH.update(dict.fromkeys(_RECURRENT, Rule(_recurrent, _recurrent_vjp)))


# ---- linear recurrences ----------------------------------------------------------------------------------------------


def _scan_vjp(dys: Gradients, results: Sequence[Array], a: Array, b: Array, h0: Any, *, axis: int) -> Gradients:
    da, db, dh0 = scan_backward(dys[0], dys[1], a, results[0], h0, axis=axis)
    return [da, db, None if h0 is None else dh0]


def _scan_backward_vjp(
    dys: Gradients, results: Sequence[Array], dy: Any, dhn: Any, a: Array, y: Array, h0: Any, *, axis: int
) -> Gradients:
    """Step by step: the reverse of the loop over steps in the oracle of the gradients."""
    gda, gdb = (np.zeros(y.shape, wide(y).dtype) if g is None else wide(g) for g in dys[:2])
    gda, gdb, a, y, adjoint = (np.moveaxis(wide(v), axis, 0) for v in (gda, gdb, a, y, results[1]))
    state = y.shape[1:]
    first = np.zeros(state, y.dtype) if h0 is None else wide(h0)
    carried = np.zeros(state, y.dtype) if dys[2] is None else wide(dys[2])  # the gradient of a[t] * l[t]
    ga, gy, gl = np.zeros_like(y), np.zeros_like(y), np.zeros_like(y)
    gh0 = np.zeros(state, y.dtype)
    for t in range(len(y)):
        ga[t] = carried * adjoint[t]
        gl[t] = gdb[t] + gda[t] * (y[t - 1] if t else first) + carried * a[t]
        if t:
            gy[t - 1] = gda[t] * adjoint[t]
        else:
            gh0 = gda[t] * adjoint[t]
        carried = gl[t]
    ga, gy, gl = (np.moveaxis(v, 0, axis) for v in (ga, gy, gl))
    return [None if dy is None else gl, None if dhn is None else carried, ga, gy, None if h0 is None else gh0]


GRAPH["scan"] = Rule(lambda a, b, h0, *, axis: scan_forward(a, b, h0, axis=axis), _scan_vjp)
GRAPH["scan_backward"] = Rule(
    lambda dy, dhn, a, y, h0, *, axis: scan_backward(dy, dhn, a, y, h0, axis=axis), _scan_backward_vjp
)
