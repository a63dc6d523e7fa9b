"""The oracle: the operations of graphs. `GRAPH` has a rule for each, by its name; `graph_layers` adds those of layers.

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

from .activation import value_at
from .dense import dropout_mask, embedding_backward, linear_backward, linear_forward, philox4x32
from .precision import Array, widened

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
    "optimizer_steps": "several of optimizer_step, joined by the plan of a program",
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


def sigmoid(x: Array) -> Array:
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
_elementwise(
    "fma", lambda a, b, c: a * b + c, lambda y, a, b, c: b + 0 * c, lambda y, a, b, c: a + 0 * c,
    lambda y, a, b, c: np.ones_like(y),
)  # fmt: skip
_elementwise("where", np.where, None, lambda y, p, a, b: p, lambda y, p, a, b: ~p)
for _name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):
    _elementwise(_name, getattr(np, _name))
for _name in ("logical_and", "logical_or", "logical_xor", "logical_not", "signbit"):
    _elementwise(_name, getattr(np, _name))
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    _elementwise(_name, getattr(np, _name))
_elementwise("bitwise_not", np.invert)


def _with_integers(name: str, f: Callable[..., int]) -> None:
    """A function of Python's integers, which have no limit; the result wraps around."""

    def wrapped(*arrays: Array) -> Array:
        bits = 8 * arrays[0].dtype.itemsize
        found = [f(*map(int, v)) for v in zip(*(a.reshape(-1) for a in np.broadcast_arrays(*arrays)), strict=True)]
        low = [(v + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1)) for v in found]
        return np.array(low, arrays[0].dtype).reshape(np.broadcast_shapes(*(a.shape for a in arrays)))

    _elementwise(name, wrapped)


_with_integers("left_shift", lambda a, b: a << b if 0 <= b < 64 else 0)
_with_integers("right_shift", lambda a, b: a >> b if b >= 0 else a >> 63)
# Of 64 bits: an int32 is extended.
_with_integers("bitwise_count", lambda a: (a % 2**64).bit_count())
for _name, _function in (
    ("sign", np.sign), ("floor", np.floor), ("ceil", np.ceil), ("round", np.rint), ("trunc", np.trunc),
):  # fmt: skip
    _elementwise(_name, _function, lambda y, x: np.zeros(x.shape, bool))
for _name in ("isnan", "isinf", "isfinite"):
    _elementwise(_name, getattr(np, _name))
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
_elementwise("sigmoid", sigmoid, lambda y, x: sigmoid(x) * sigmoid(-x))
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


def _replaced(x: Array, update: Array, *, slices: Any) -> Array:
    result: Array = x.copy()
    result[_slices(slices)] = update
    return result


_linear_rule(
    "slice_update", _replaced,
    lambda dy, x, update, *, slices: _replaced(dy, np.zeros_like(update), slices=slices),
    lambda dy, x, update, *, slices: dy[_slices(slices)],
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


def sum_of(parts: Sequence[Array | None], like: Array) -> Array:
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
        sum_of([
            None if gdx is None else np.einsum("...i,oi->...o", gdx, wide(w)),
            None if by_dw is None else by_dw[0],
            None if gdb is None else np.broadcast_to(gdb, dy.shape),
        ], dy),
        sum_of([None if by_dw is None else by_dw[1]], x),
        sum_of([None if gdx is None else np.einsum("ro,ri->oi", flat, gdx.reshape(rows, w.shape[1]))], w),
    ]  # fmt: skip


def _either(rule: Rule, like_w: int | None) -> Rule:
    """A rule for w [O, I] as one for w [I, O] too, if `transposed`. `like_w`: the result that has w's shape."""

    def turned(arrays: Sequence[Any], position: int | None) -> list[Any]:
        return [a.T if i == position and a is not None else a for i, a in enumerate(arrays)]

    position = 1 if like_w is None else 2  # of w

    def forward(*arrays: Any, transposed: bool = False) -> Any:
        if not transposed:
            return rule.forward(*arrays)
        return turned(rule.forward(*turned(arrays, position)), like_w)

    def vjp(dys: Gradients, results: Sequence[Array], *arrays: Any, transposed: bool = False) -> Gradients:
        assert rule.vjp is not None
        if not transposed:
            return rule.vjp(dys, results, *arrays)
        return turned(rule.vjp(turned(dys, like_w), turned(results, like_w), *turned(arrays, position)), position)

    return Rule(forward, vjp)


GRAPH["linear"] = _either(Rule(lambda x, w, b: (linear_forward(x, w, b),), _linear_vjp), None)
GRAPH["linear_backward"] = _either(Rule(linear_backward, _linear_second), 1)
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


def _extremes(x: Array, *, axis: int, largest: bool, reverse: bool) -> tuple[Array, Array]:
    """The best so far, one by one; NaN exceeds all numbers, and of equal elements the last counts."""
    values, indices = np.moveaxis(wide(x).copy(), axis, 0), np.zeros(np.moveaxis(x, axis, 0).shape, np.int64)
    order = range(len(values))[:: -1 if reverse else 1]
    for rest in np.ndindex(values.shape[1:]):
        best = None
        for j in order:
            here = values[j, ...][rest]
            if best is None:
                best = j
            elif not np.isnan(values[best, ...][rest]):
                old = values[best, ...][rest]
                if np.isnan(here) or (here >= old if largest else here <= old):
                    best = j
            indices[j, ...][rest] = best
    values = np.take_along_axis(values, indices, 0)
    return np.moveaxis(values, 0, axis), np.moveaxis(indices, 0, axis)


def _extremes_vjp(
    dys: Gradients, results: Sequence[Array], x: Array, *, axis: int, largest: bool, reverse: bool
) -> Gradients:
    dy = dys[0]
    assert dy is not None
    return [_put_along(wide(dy), results[1], shape=x.shape, axis=axis)]


GRAPH["cumulative_extreme"] = Rule(_extremes, _extremes_vjp)


# ---- scatter ---------------------------------------------------------------------------------------------------------

_COMBINE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "minimum": np.minimum,
    "maximum": np.maximum, "set": lambda old, new: new,
}  # fmt: skip


def _scatter_places(data: Array, indices: Array, axis: int, along: bool) -> list[tuple[Any, Any]]:
    """Pairs of a place in data and one in updates, in order."""
    places = []
    for position in np.ndindex(indices.shape):
        if along:
            places.append(((*position[:axis], indices[position], *position[axis + 1 :]), position))
        else:
            lead = (slice(None),) * axis
            places.append(((*lead, indices[position]), (*lead, *position)))
    return places


@np.errstate(all="ignore")
def _scattered(data: Array, indices: Array, updates: Array, *, axis: int, mode: str, along: bool) -> tuple[Array]:
    y, given = wide(data).copy(), wide(updates)
    for to, source in _scatter_places(data, indices, axis, along):
        y[to] = _COMBINE[mode](y[to], given[source])
    return (y,)


@np.errstate(all="ignore")
def _scattered_vjp(
    dys: Gradients, results: Sequence[Array], data: Array, indices: Array, updates: Array, *, axis: int, mode: str,
    along: bool,
) -> Gradients:  # fmt: skip
    """Backwards, one update at a time; but an extreme's gradient is shared by all that have its value."""
    (dy,), u = dys, wide(updates)
    assert dy is not None
    places = _scatter_places(data, indices, axis, along)
    g, gu = wide(dy).copy(), np.zeros_like(u)
    if mode in ("minimum", "maximum"):
        y = results[0]
        count = (wide(data) == y).astype(g.dtype)
        for to, source in places:
            count[to] += u[source] == y[to]
        share = np.where(count == 0, 0, g / count)
        for to, source in places:
            gu[source] = np.where(u[source] == y[to], share[to], 0)
        return [np.where(wide(data) == y, share, 0), None, gu]
    states = [wide(data).copy()]
    for to, source in places:
        after = states[-1].copy()
        after[to] = _COMBINE[mode](after[to], u[source])
        states.append(after)
    for number in range(len(places))[::-1]:
        to, source = places[number]
        before, above = states[number][to], g[to].copy()
        by_old, by_new = {
            "add": (1, 1), "subtract": (1, -1), "set": (0, 1), "multiply": (u[source], before),
            "divide": (1 / u[source], -before / u[source] ** 2),
        }[mode]  # fmt: skip
        gu[source], g[to] = above * by_new, above * by_old
    return [g, None, gu]


GRAPH["scatter"] = Rule(_scattered, _scattered_vjp)


# ---- random bits -----------------------------------------------------------------------------------------------------


def _philox(state: Array, *, count: int) -> tuple[Array, Array]:
    words = [int(v) % 2**32 for v in state]
    start = sum(word << (32 * (3 - i)) for i, word in enumerate(words[1:5]))
    blocks = -(-count // 4)

    def counter(block: int) -> list[int]:
        return [(start + block) % 2**128 >> (32 * (3 - i)) & 0xFFFFFFFF for i in range(4)]

    counters = np.array([counter(block) for block in range(blocks)], np.uint64).reshape(blocks, 4)
    found = philox4x32(counters, (words[5], words[6])).reshape(-1)[:count]
    following = np.array([words[0], *counter(blocks), *words[5:]], np.uint32).view(np.int32)
    return found.astype(np.int64), following


GRAPH["philox"] = Rule(_philox)
