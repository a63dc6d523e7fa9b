"""The oracle: multihead attention, one sample and one head at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .precision import Array, widened

__all__ = ["AttentionWeights", "attention_backward", "attention_forward"]


class AttentionWeights(NamedTuple):
    """Weights [d, k, heads] of the query, key and value, and [heads * v, d] of the output.

    Biases are [k, heads], and [d] of the output. `row_k` and `row_v`, [k, heads], are a further key and its value.
    """

    wq: Array
    wk: Array
    wv: Array
    wo: Array
    bq: Array | None = None
    bk: Array | None = None
    bv: Array | None = None
    bo: Array | None = None
    row_k: Array | None = None
    row_v: Array | None = None


class _Head(NamedTuple):
    q: Array  # [T, k]
    k: Array  # [S + further, k]
    v: Array
    a: Array  # [T, S + further], before dropout
    kept: Array  # factors of dropout


def _head(
    x: tuple[Array, Array, Array],
    weights: AttentionWeights,
    head: int,
    zero: bool,
    ignored: Array | None,
    added: Array | None,
    kept: Array | None,
) -> _Head:
    q, k, v = (rows @ w[:, :, head] for rows, w in zip(x, weights[:3], strict=True))
    for rows, bias in zip((q, k, v), weights[4:7], strict=True):
        if bias is not None:
            rows += bias[:, head]
    sources = len(k)
    if weights.row_k is not None and weights.row_v is not None:
        k, v = np.vstack([k, weights.row_k[:, head]]), np.vstack([v, weights.row_v[:, head]])
    if zero:
        k, v = (np.vstack([rows, np.zeros_like(rows[:1])]) for rows in (k, v))
    scores = q @ k.T / np.sqrt(q.dtype.type(q.shape[1]))
    if added is not None:
        scores[:, :sources] += np.where(added, -np.inf, 0.0) if added.dtype == np.bool_ else added
    if ignored is not None:
        scores[:, :sources][:, ignored] = -np.inf
    a = np.zeros_like(scores)
    for row, values in zip(a, scores, strict=True):
        if values.max() != -math.inf:  # else there is nothing to attend to
            e = np.exp(values - values.max())
            row[:] = e / e.sum()
    return _Head(q, k, v, a, np.ones_like(a) if kept is None else kept)


def _at(mask: Array | None, sample: int, head: int) -> Array | None:
    """The part [T, S] of what has the axes [..., T, S], up to [N, heads, T, S]."""
    if mask is None:
        return None
    whole: Array = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    part: Array = whole[sample % whole.shape[0], head % whole.shape[1]]  # an axis of one is for all
    return part


def _wide(weights: AttentionWeights) -> AttentionWeights:
    return AttentionWeights(*(None if one is None else widened(one) for one in weights))  # type: ignore[arg-type]


def attention_forward(
    query: Array,
    key: Array,
    value: Array,
    weights: AttentionWeights,
    zero: bool = False,
    ignored: Array | None = None,
    added: Array | None = None,
    kept: Array | None = None,
) -> Array:
    """The output [N, T, d] for a query [N, T, d], keys [N, S, dk] and values [N, S, dv].

    `zero` adds a key and a value of zeros. `ignored` [N, S] is true for keys that are ignored. `added`, of the axes
    [T, S], [heads, T, S] or [N, heads, T, S], is added to the scores; of booleans, true is -inf. `kept` [N, heads, T, S
    and further keys] has the factors of dropout. A row without a finite score attends to nothing.
    """
    query, key, value, weights = widened(query), widened(key), widened(value), _wide(weights)
    samples = []
    for n in range(len(query)):
        heads = []
        for h in range(weights.wq.shape[2]):
            mask = None if ignored is None else ignored[n]
            inputs = query[n], key[n], value[n]
            head = _head(inputs, weights, h, zero, mask, _at(added, n, h), _at(kept, n, h))
            heads.append((head.kept * head.a) @ head.v)
        y = np.hstack(heads) @ weights.wo
        samples.append(y if weights.bo is None else y + weights.bo)
    return np.stack(samples)


def attention_backward(
    dy: Array,
    query: Array,
    key: Array,
    value: Array,
    weights: AttentionWeights,
    zero: bool = False,
    ignored: Array | None = None,
    added: Array | None = None,
    kept: Array | None = None,
) -> dict[str, Array]:
    """The gradients of `query`, `key`, `value` and of all weights, by name, also of absent biases."""
    dy, query, key, value, weights = widened(dy), widened(query), widened(key), widened(value), _wide(weights)
    names = ("query", "key", "value")
    inputs = dict(zip(names, (query, key, value), strict=True))
    found = {name: np.zeros_like(array) for name, array in inputs.items()}
    found |= {name: np.zeros_like(getattr(weights, name)) for name in ("wq", "wk", "wv", "wo")}
    found |= {f"b{letter}": np.zeros_like(found[f"w{letter}"][0]) for letter in "qkvo"}
    found |= {f"row_{letter}": np.zeros_like(found[f"b{letter}"]) for letter in "kv"}
    width, sources = weights.wv.shape[1], key.shape[1]
    for n in range(len(query)):
        for h in range(weights.wq.shape[2]):
            mask = None if ignored is None else ignored[n]
            x = query[n], key[n], value[n]
            q, k, v, a, factors = _head(x, weights, h, zero, mask, _at(added, n, h), _at(kept, n, h))
            part = slice(h * width, (h + 1) * width)
            found["wo"][part] += (factors * a @ v).T @ dy[n]
            dhead = dy[n] @ weights.wo[part].T
            da = (dhead @ v.T) * factors
            # The matrix of a softmax's derivatives is diag(a) - a a'.
            ds = np.stack([(np.diag(row) - np.outer(row, row)) @ d for row, d in zip(a, da, strict=True)])
            ds /= np.sqrt(q.dtype.type(q.shape[1]))
            gradients = {"query": ds @ k, "key": ds.T @ q, "value": (factors * a).T @ dhead}
            if weights.row_k is not None:
                found["row_k"][:, h] += gradients["key"][sources]
                found["row_v"][:, h] += gradients["value"][sources]
            for name, letter in zip(names, "qkv", strict=True):
                g = gradients[name][: inputs[name].shape[1]]
                found[name][n] += g @ getattr(weights, f"w{letter}")[:, :, h].T
                found[f"w{letter}"][:, :, h] += inputs[name][n].T @ g
                found[f"b{letter}"][:, h] += g.sum(axis=0)
        found["bo"] += dy[n].sum(axis=0)
    return found
