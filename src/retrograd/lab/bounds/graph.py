"""Tolerances of the operations of graphs.

Tolerances are absolute, one per element. They count roundings in units of u, of magnitudes that the oracle computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ..cases.types import Array
from .precision import PRECISIONS

__all__ = ["graph_gradient_tolerances", "graph_tolerances"]

Rule = Any  # of the oracle: forward and vjp

# Correctly rounded, or a choice among the operands, or no arithmetic at all.
EXACT: Final = (
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "fmod", "where", "negative", "absolute", "sign",
    "square", "sqrt", "relu", "floor", "ceil", "round", "trunc", "copy", "cast", "stop_gradient", "max", "min",
    "reshape", "transpose", "broadcast_to", "slice", "place", "concatenate", "take", "take_along_axis", "top_k",
    "embedding", "reduce_bool", "arg_reduce", "lstm_slots", "call", "fma", "slice_update", "cumulative_extreme",
)  # fmt: skip
# Half a unit in the last place; a little more, because the oracle of float64 is rounded itself.
ROUNDED: Final = 1 + 2.0**-9
# Functions are within 4 ulp (tests/ops/test_map_functions.py), an ulp is up to 2 u, and the oracle's own are within 1
# for float64 where long double is no wider.
FUNCTION: Final = 10.0
# Of a gradient that is a product of up to three functions and as many constants.
SLOPE: Final = 40.0
# Gradients that are differences of numbers of size 1: 1 - y * y of tanh, 1 - y of sigmoid, and softmax's.
OFFSETS: Final = {"tanh": 8.0, "sigmoid": 8.0}
# 1 - x * x and x * x - 1 lose up to 1 / (1 - x * x), which is at most 6 for the cases, where |x| < 0.9 or x > 1.25.
CANCELLED: Final = ("arcsin", "arccos", "arctanh", "arccosh")
# Results that are sums of products, each term linear in every array.
SUMS: Final = (
    "sum", "mean", "sum_of_squares", "put_add", "put_along_axis_add", "cumsum", "matmul", "linear", "linear_backward",
    "conv_backward", "embedding_backward", "dropout", "scan", "scan_backward",
)  # fmt: skip
# Results that are copies of elements, whose gradients are sums.
COPIES: Final = (
    "take", "take_along_axis", "concatenate", "embedding", "top_k", "reshape", "transpose", "broadcast_to", "slice",
    "place", "slice_update",
)  # fmt: skip
# Layers that are one call of a driver, whose own bounds are tested in tests/ops: here an error means another call, not
# a few more roundings. Of the largest element.
LAYER: Final = 2000.0


def _unit(dtype: Any) -> tuple[float, float]:
    precision = PRECISIONS[str(np.dtype(dtype))]
    return precision.unit, 4 * precision.smallest


def _magnitudes(f: Callable[..., Sequence[Any]], arrays: Sequence[Any], change: Callable[[Array], Array]) -> list[Any]:
    """What f computes of changed floats."""
    return list(f(*(a if a is None or a.dtype.kind != "f" else change(a) for a in arrays)))


def _largest(array: Array) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max(initial=0.0))


def _sums(f: Callable[..., Sequence[Any]], arrays: Sequence[Any], u: float, least: float, extra: int) -> list[Any]:
    """n + 2 roundings of the sum of the magnitudes of n terms, in any order."""
    terms = _magnitudes(f, arrays, np.ones_like)
    sizes = _magnitudes(f, arrays, np.abs)
    return [
        None if s is None else (np.abs(t).astype(float) + extra + 2) * u * np.abs(s).astype(float) + least
        for t, s in zip(terms, sizes, strict=True)
    ]


@np.errstate(all="ignore")
def graph_tolerances(operation: str, rule: Rule, arrays: Sequence[Any], attributes: Any, dtype: Any) -> list[Any]:
    """The tolerance of each result; None: of an absent one."""
    u, least = _unit(dtype)
    results = rule.forward(*arrays, **attributes)
    floats: list[Any] = [None if r is None else np.abs(np.asarray(r, float)) for r in results]
    if operation in EXACT:
        return [None if r is None else ROUNDED * u * r + least for r in floats]
    if operation in SUMS:
        # The mean of n ones is 1, not n.
        extra = max((a.size for a in arrays if a is not None), default=0) if operation == "mean" else 0
        return _sums(lambda *a: rule.forward(*a, **attributes), arrays, u, least, extra)
    if operation == "scatter":
        # A rounding for each update, of terms that have one sign.
        if attributes["mode"] in ("minimum", "maximum", "set"):
            return [ROUNDED * u * r + least for r in floats if r is not None]
        positive = {**attributes, "mode": "add" if attributes["mode"] == "subtract" else attributes["mode"]}
        (size,) = rule.forward(*(np.abs(a) for a in arrays), **positive)
        return [(arrays[1].size + 2) * u * size.astype(float) + least]
    if operation == "prod":
        count = arrays[0].size // max(1, results[0].size)
        return [(count + 2) * u * r + least for r in floats if r is not None]
    if operation == "softmax":
        # exp(d), d = x - max with a rounding of its own size, over a sum of n terms.
        x = np.asarray(arrays[0], float)
        n = x.shape[-1]
        distance = np.abs(x - x.max(-1, keepdims=True)) if x.size else x
        relative = (FUNCTION + 2 * np.where(np.isfinite(distance), distance, 0) + n) * u
        (y,) = floats
        # The logarithm has these as absolute errors.
        return [relative * (1 + y if attributes["log"] else y) + least]
    if operation == "softmax_backward":
        dy, y = (np.abs(np.asarray(a, float)) for a in arrays)
        p = np.exp(np.asarray(arrays[1], float)) if attributes["log"] else y
        total = (dy if attributes["log"] else dy * y).sum(-1, keepdims=True)
        return [(FUNCTION + y.shape[-1]) * u * (p * (dy + total) + dy) + least]
    if operation == "mod":
        # a - floor(a / b) b, where the quotient may round to the next integer.
        return [2 * u * (np.abs(arrays[0]) + np.abs(arrays[1])).astype(float) + least]
    if _is_layer(operation):
        return [None if r is None else LAYER * u * (_largest(r) + 1) + np.zeros(r.shape) for r in floats]
    return [None if r is None else FUNCTION * u * r + least for r in floats]


def _is_layer(operation: str) -> bool:
    parts = ("norm", "conv", "pool", "lstm", "gru", "rnn", "loss", "entropy", "distance", "activation", "optimizer")
    return any(part in operation for part in parts)


@np.errstate(all="ignore")
def graph_gradient_tolerances(
    operation: str, rule: Rule, dys: Sequence[Any], arrays: Sequence[Any], attributes: Any, dtype: Any
) -> list[Any]:
    """The tolerance of the gradient of each array; None: of one that has none."""
    u, least = _unit(dtype)
    if _is_layer(operation):
        results = rule.forward(*arrays, **attributes)
        found = rule.vjp(dys, results, *arrays, **attributes)
        return [
            None if g is None else LAYER * u * (_largest(np.asarray(g, float)) + 1) + np.zeros(g.shape) for g in found
        ]
    if operation in SUMS or operation in COPIES:
        given = [dy for dy in dys if dy is not None]

        def gradients(*changed: Any) -> Sequence[Any]:
            moved = iter(changed[: len(given)])
            new = [None if dy is None else next(moved) for dy in dys]
            inputs = changed[len(given) :]
            found: Sequence[Any] = rule.vjp(new, rule.forward(*inputs, **attributes), *inputs, **attributes)
            return found

        if operation == "top_k":  # magnitudes have another order
            return [None if g is None else np.zeros(g.shape) for g in gradients(*given, *arrays)]
        return _sums(gradients, [*given, *arrays], u, least, 4)
    results = rule.forward(*arrays, **attributes)
    if operation == "cumulative_extreme":
        (size,) = rule.vjp([np.abs(dys[0])], results, *arrays, **attributes)
        return [(arrays[0].size + 2) * u * size.astype(float) + least]
    if operation == "scatter":
        # Factors and terms of one sign, one or two for each update; extremes keep their winners.
        chosen = attributes["mode"] in ("minimum", "maximum")
        inputs = arrays if chosen else [np.abs(a) for a in arrays]
        sizes = rule.vjp([np.abs(dys[0])], rule.forward(*inputs, **attributes), *inputs, **attributes)
        factor = SLOPE + 4 * arrays[1].size
        return [None if g is None else factor * u * np.abs(g).astype(float) + least for g in sizes]
    dy = np.abs(np.asarray(dys[0], float))
    if operation in ("softmax", "softmax_backward"):
        found = rule.vjp(dys, results, *arrays, **attributes)
        wide = max(1.0, *(_largest(np.asarray(a, float)) for a in (*arrays, *results)))
        size = (dy.sum(-1, keepdims=True) + dy) * wide
        return [None if g is None else (SLOPE + dy.shape[-1]) * u * size * wide + np.zeros(g.shape) for g in found]
    if operation in ("max", "min", "sum_of_squares", "prod"):
        (g,) = rule.vjp(dys, results, *arrays, **attributes)
        count = arrays[0].size // max(1, dy.size)
        return [(SLOPE + (count if operation == "prod" else 0)) * u * np.abs(np.asarray(g, float)) + least]
    # Elementwise: the terms of every element, before the terms of a broadcast operand are added.
    full = [np.ascontiguousarray(a) for a in np.broadcast_arrays(*arrays)]
    terms = rule.vjp(dys, rule.forward(*full, **attributes), *full, **attributes)
    factor = SLOPE * (6 if operation in CANCELLED else 1)
    tolerances: list[Any] = []
    for array, term in zip(arrays, terms, strict=True):
        if term is None:
            tolerances.append(None)
            continue
        sizes = factor * np.abs(np.asarray(term, float)) + OFFSETS.get(operation, 0.0) * dy
        lead = sizes.ndim - array.ndim
        axes = tuple(i for i in range(sizes.ndim) if i < lead or array.shape[i - lead] == 1)
        count = sizes.size // max(1, array.size)
        total = np.asarray(sizes.sum(axes)).reshape(array.shape)
        tolerances.append((1 + count / factor) * u * total + least)
    return tolerances
