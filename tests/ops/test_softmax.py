"""Softmax over rows, cumulative sums and the largest elements, at every level and number of threads."""

from __future__ import annotations

import math

import numpy as np
import pytest

from retrograd import _core
from support.arrays import Array, assert_same_bits, fenced
from support.engine import at_every_level

DTYPES = (np.float32, np.float64)
ROWS = [(0, 5), (5, 0), (1, 1), (300, 10), (7, 15), (7, 16), (7, 17), (5, 31), (3, 33), (2, 5003)]


def softmax(log: bool, x: Array, in_place: bool = False) -> Array:
    def call(threads: int) -> tuple[Array, ...]:
        source = x.copy() if in_place else x
        y = source if in_place else np.full(x.shape, 7, x.dtype)
        assert _core.softmax(log, x.dtype == np.float64, source, y, False, threads) is None
        return (y,)

    return at_every_level(call)[0]


def backward(log: bool, dy: Array, y: Array, in_place: bool = False) -> Array:
    def call(threads: int) -> tuple[Array, ...]:
        source = dy.copy() if in_place else dy
        dx = source if in_place else np.full(dy.shape, 7, dy.dtype)
        assert _core.softmax_backward(log, dy.dtype == np.float64, source, y, dx, False, threads) is None
        return (dx,)

    return at_every_level(call)[0]


def oracle(log: bool, x: Array) -> Array:
    if not x.size:
        return x
    d = x.astype(np.longdouble) - np.max(x, axis=1, keepdims=True, initial=-math.inf)
    e = np.exp(d)
    total = e.sum(axis=1, keepdims=True)
    return d - np.log(total) if log else e / total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_softmax(shape: tuple[int, int], dtype: type) -> None:
    generator = np.random.default_rng(0)
    eps = float(np.finfo(dtype).eps)
    tiny = float(np.finfo(dtype).tiny)
    for scale in (1, 30, 1e4):
        x = (generator.normal(size=shape) * scale).astype(dtype)
        want = oracle(False, x)
        # e^d within 1.1 ulp, its argument, the sum's share, the reciprocal and the product
        assert np.all(
            np.abs(softmax(False, x) - want) <= (4 + np.abs(np.log(np.maximum(want, tiny))) / 2) * eps * want + tiny
        )
        want = oracle(True, x)
        assert np.all(np.abs(softmax(True, x) - want) <= eps * np.abs(want) + 4 * eps)
        for log in (False, True):
            assert_same_bits([softmax(log, x, in_place=True)], [softmax(log, x)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_softmax_backward(shape: tuple[int, int], dtype: type) -> None:
    generator = np.random.default_rng(1)
    x, dy = generator.normal(size=shape).astype(dtype), generator.normal(size=shape).astype(dtype)
    eps = float(np.finfo(dtype).eps)
    for log in (False, True):
        y = softmax(log, x)
        p, d = y.astype(np.longdouble), dy.astype(np.longdouble)
        if log:
            p = np.exp(p)
            want = d - p * d.sum(axis=1, keepdims=True)
            size = np.abs(d) + p * np.abs(d).sum(axis=1, keepdims=True)
        else:
            want = p * (d - (d * p).sum(axis=1, keepdims=True))
            size = p * (np.abs(d) + np.abs(d * p).sum(axis=1, keepdims=True))
        got = backward(log, dy, y)
        assert np.all(np.abs(got - want) <= 4 * eps * size)
        assert_same_bits([backward(log, dy, y, in_place=True)], [got])


def test_softmax_of_special_values() -> None:
    x = np.zeros((6, 20), np.float32)
    x[0, 3] = math.nan
    x[1, 3] = math.inf
    x[2] = -math.inf
    x[3, 3] = -math.inf
    x[4] = 3e38
    x[4, 0] = -3e38
    for log in (False, True):
        y = softmax(log, x)
        assert np.isnan(y[:3]).all()
        assert np.isfinite(y[4]).all() or log
        assert y[3, 3] == (-math.inf if log else 0)
        np.testing.assert_allclose(y[5], -math.log(20) if log else 0.05, rtol=1e-6)


@pytest.mark.parametrize("at_end", [False, True])
def test_nothing_outside_is_read(at_end: bool) -> None:
    x = np.random.default_rng(0).normal(size=(3, 21)).astype(np.float32)
    for log in (False, True):
        y = softmax(log, fenced(x, at_end))
        assert_same_bits([y], [softmax(log, x)])
        assert_same_bits([backward(log, fenced(x, at_end), fenced(y, at_end))], [backward(log, x, y)])


def test_rows_apart() -> None:
    x = np.random.default_rng(0).normal(size=(9, 40)).astype(np.float32)
    assert_same_bits([softmax(False, x[::-2, 3:20])], [softmax(False, x[::-2, 3:20].copy())])
    refusal = _core.softmax(False, False, x.T, np.zeros((40, 9), np.float32), False, 1)
    assert refusal is not None
    assert refusal.reason.name == "layout"


# ---- cumulative sums -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 50, 1), (2, 9, 17), (2, 5, 1031), (7, 3, 8), (0, 3, 2), (2, 0, 2), (2, 3, 0)]
)
def test_cumulative_sums(shape: tuple[int, int, int], dtype: type) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    for exclusive in (False, True):
        for reverse in (False, True):
            ordered = (x[:, ::-1] if reverse else x).astype(np.float64)
            want = np.cumsum(ordered, axis=1)
            if exclusive:
                want = np.concatenate([np.zeros_like(want[:, :1]), want[:, :-1]], axis=1)[:, : shape[1]]
            want = (want[:, ::-1] if reverse else want).astype(dtype)
            for source in (x, x.transpose(2, 1, 0).copy().transpose(2, 1, 0), x[:, ::-1].copy()[:, ::-1]):

                def call(
                    threads: int, source: Array = source, exclusive: bool = exclusive, reverse: bool = reverse
                ) -> tuple[Array, ...]:
                    y, same = np.full(shape, 7, dtype), source.copy()
                    for a, b in ((source, y), (same, same)):
                        assert (
                            _core.cumulative_sum(dtype is np.float64, a, b, exclusive, reverse, False, threads) is None
                        )
                    return (y, same)

                for got in at_every_level(call):
                    np.testing.assert_array_equal(got, want)


# ---- the largest elements --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 0), (7, 3), (7, 7), (100, 5), (100, 60), (1000, 1000), (0, 0)])
def test_top_k(n: int, k: int, dtype: type) -> None:
    generator = np.random.default_rng(0)
    x = generator.integers(-20, 20, (6, n)).astype(dtype)
    if n > 6:
        x[1, 3], x[1, 5], x[2, :] = math.nan, -math.nan, -math.inf
        x[3, ::2], x[3, 1::2] = 0.0, -0.0
        x[4, 2], x[5, 1] = math.inf, -math.inf
    for largest in (True, False):
        key = np.where(np.isnan(x), math.inf, x)
        more = np.isnan(x)
        want = np.stack(
            [
                np.lexsort((np.arange(n), -key[r] if largest else key[r], ~more[r] if largest else more[r]))
                if n
                else np.arange(0)
                for r in range(len(x))
            ]
        )[:, :k]
        for source in (x, np.asfortranarray(x)):

            def call(threads: int, source: Array = source, largest: bool = largest) -> tuple[Array, ...]:
                values, indices = np.zeros((6, k), dtype), np.zeros((6, k), np.int64)
                assert _core.top_k(dtype is np.float64, source, values, indices, largest, False, threads) is None
                return values, indices

            values, indices = at_every_level(call)
            np.testing.assert_array_equal(indices, want)
            assert_same_bits([values], [np.take_along_axis(x, indices, 1)])
    refusal = _core.top_k(
        dtype is np.float64, x, np.zeros((6, n + 1), dtype), np.zeros((6, n + 1), np.int64), True, False, 1
    )
    assert refusal is not None
    assert refusal.reason.name == "shape"
