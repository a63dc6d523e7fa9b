"""Gather and scatter-add along one axis, at every level and number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from retrograd import _core
from support.arrays import Array
from support.engine import at_every_level

SHAPES = [
    (1, 1, 1, 1),
    (3, 7, 5, 9),
    (1, 40, 100, 33),
    (5, 11, 300, 1),
    (1, 9, 20, 1000),
    (4, 3, 0, 5),
    (0, 3, 4, 5),
    (2, 3, 4, 0),
]
TYPES = (np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.bool_)


def layouts(x: Array) -> tuple[Array, ...]:
    return x, x.transpose(2, 0, 1).copy().transpose(1, 2, 0), x[:, ::-1].copy()[:, ::-1]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gather(shape: tuple[int, int, int, int], dtype: type) -> None:
    outer, n, k, inner = shape
    generator = np.random.default_rng(0)
    whole = generator.integers(0, 100, (outer, n, inner)).astype(dtype)
    each, every = generator.integers(0, n, k), generator.integers(0, n, (outer, k, inner))
    for x in layouts(whole):

        def call(threads: int, x: Array = x) -> tuple[Array, ...]:
            results = np.zeros((outer, k, inner), dtype), np.zeros((inner, k, outer), dtype).transpose(2, 1, 0)
            assert _core.gather(x.itemsize, x, each, results[0], False, threads) is None
            assert _core.gather_along(x.itemsize, x, every, results[1], False, threads) is None
            return results

        rows, along = at_every_level(call)
        np.testing.assert_array_equal(rows, whole[:, each])
        np.testing.assert_array_equal(along, np.take_along_axis(whole, every, 1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_scatter_add(shape: tuple[int, int, int, int], accumulate: bool, dtype: type) -> None:
    outer, n, k, inner = shape
    generator = np.random.default_rng(0)
    whole = generator.normal(size=(outer, k, inner)).astype(dtype)
    base = generator.normal(size=(outer, n, inner)).astype(dtype)
    each, every = generator.integers(0, n, k), generator.integers(0, n, (outer, k, inner))
    want_rows, want_along = (base.copy() if accumulate else np.zeros_like(base) for _ in range(2))
    o, i = np.arange(outer)[:, None], np.arange(inner)[None]
    for j in range(k):  # in this order
        want_rows[:, each[j]] += whole[:, j]
        want_along[o, every[:, j], i] += whole[:, j]
    for dy in layouts(whole):

        def call(threads: int, dy: Array = dy) -> tuple[Array, ...]:
            results = base.copy(), base.transpose(2, 1, 0).copy().transpose(2, 1, 0)
            f64 = dtype is np.float64
            assert _core.scatter_add(f64, dy, each, results[0], accumulate, False, threads) is None
            assert _core.scatter_along_add(f64, dy, every, results[1], accumulate, False, threads) is None
            return results

        rows, along = at_every_level(call)
        np.testing.assert_array_equal(rows, want_rows)
        np.testing.assert_array_equal(along, want_along)


def test_indices_out_of_range() -> None:
    x, y = np.zeros((2, 3, 4), np.float32), np.full((2, 2, 4), 7, np.float32)
    for wrong in (-1, 3, 2**40, -(2**40)):
        each, every = np.array([0, wrong]), np.zeros((2, 2, 4), np.int64)
        every[1, 1, 3] = wrong
        for refusal in (
            _core.gather(4, x, each, y, False, 1),
            _core.gather_along(4, x, every, y, False, 1),
            _core.scatter_add(False, x[:, :2].copy(), each, y, False, False, 1),
            _core.scatter_along_add(False, x[:, :2].copy(), every, y, False, False, 1),
        ):
            assert refusal is not None
            assert (refusal.reason.name, refusal.argument) == ("out_of_range", "indices")
    assert np.all(y == 7)


def test_refusals() -> None:
    x, y, at = np.zeros((2, 3, 4), np.float32), np.zeros((2, 5, 4), np.float32), np.zeros(5, np.int64)
    for arguments, reason in (
        ((4, x, at[:4], y), "shape"),
        ((8, x, at, y), "dtype"),
        ((4, x, at, y.astype(np.float64)), "dtype"),
        ((4, x, at.astype(np.int32), y), "dtype"),
        ((4, x, at, y[:, :, :3]), "shape"),
        ((4, x, at[:3], x), "overlap"),
        ((4, x, np.zeros(10, np.int64)[::2], y), "layout"),
    ):
        refusal = _core.gather(*arguments, False, 1)
        assert refusal is not None
        assert refusal.reason.name == reason
