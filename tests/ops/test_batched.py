"""Products of many pairs of matrices: the bits of linear_forward, whatever the strides."""

from __future__ import annotations

import numpy as np
import pytest

from retrograd import _core
from support.arrays import MEMORY, Array, assert_same_bits, assert_untouched_around, placed
from support.engine import at_every_level

DTYPES = (np.float32, np.float64)
SHAPES = [
    (1, 1, 1, 1),
    (3, 5, 7, 2),
    (2, 17, 33, 19),
    (64, 32, 16, 32),
    (5, 1, 40, 33),
    (5, 33, 40, 1),
    (3, 31, 300, 15),
    (1, 130, 70, 90),
    (2, 300, 40, 200),
    (4, 3, 0, 5),
    (0, 3, 4, 5),
    (2, 0, 4, 5),
    (2, 3, 4, 0),
]


def product(a: Array, b: Array, into: Array, accumulate: bool = False) -> Array:
    def call(threads: int) -> tuple[Array, ...]:
        y = into.copy() if into.flags.c_contiguous else into
        assert _core.batched_product(a.dtype == np.float64, a, b, y, accumulate, False, threads) is None
        return (y,)

    return at_every_level(call)[0]


def one_by_one(a: Array, b: Array) -> Array:
    y = np.zeros((a.shape[0], a.shape[1], b.shape[2]), a.dtype)
    for i in range(len(y)):
        if y[i].size:
            w = np.ascontiguousarray(b[i].T)
            assert (
                _core.linear_forward(a.dtype == np.float64, np.ascontiguousarray(a[i]), w, None, y[i], False, 1) is None
            )
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_are_those_of_a_linear_layer(shape: tuple[int, int, int, int], dtype: type) -> None:
    count, m, k, n = shape
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(count, m, k)).astype(dtype), generator.normal(size=(count, k, n)).astype(dtype)
    y = product(a, b, np.full((count, m, n), np.nan, dtype))
    assert_same_bits([y], [one_by_one(a, b)])
    wide = a.astype(np.float64) @ b.astype(np.float64)
    size = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    assert np.all(np.abs(y - wide) <= (k + 2) * float(np.finfo(dtype).eps) * size)


@pytest.mark.parametrize("memory", MEMORY)
def test_any_strides(memory: str) -> None:
    generator = np.random.default_rng(1)
    a, b = (generator.normal(size=shape).astype(np.float32) for shape in ((6, 9, 20), (6, 20, 35)))
    want = one_by_one(a, b)
    into = np.zeros(want.shape, np.float32)
    for order in ((0, 2, 1), (2, 1, 0), (1, 0, 2)):
        assert_same_bits([product(placed(a, memory, order), placed(b, memory, order), into)], [want])
    rows = placed(into, "padded")
    assert_same_bits([product(a, b, rows)], [want])
    assert_untouched_around(rows)


def test_one_operand_for_all() -> None:
    generator = np.random.default_rng(2)
    a, b = generator.normal(size=(6, 9, 20)).astype(np.float32), generator.normal(size=(6, 20, 35)).astype(np.float32)
    into = np.zeros((6, 9, 35), np.float32)
    one_a, one_b = np.broadcast_to(a[:1], a.shape), np.broadcast_to(b[:1], b.shape)
    assert_same_bits([product(one_a, b, into)], [one_by_one(one_a, b)])
    assert_same_bits([product(a, one_b, into)], [one_by_one(a, one_b)])
    assert_same_bits([product(one_a, one_b, into)], [one_by_one(one_a, one_b)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate(dtype: type) -> None:
    generator = np.random.default_rng(3)
    a, b = generator.normal(size=(4, 9, 20)).astype(dtype), generator.normal(size=(4, 20, 17)).astype(dtype)
    base = generator.normal(size=(4, 9, 17)).astype(dtype)
    np.testing.assert_allclose(product(a, b, base, True), base + a @ b, rtol=1e-4, atol=1e-4)
    empty = product(a[:, :, :0], b[:, :0], base, True)
    np.testing.assert_array_equal(empty, base)


def test_special_values_propagate() -> None:
    a, b = np.ones((3, 4, 5), np.float32), np.ones((3, 5, 6), np.float32)
    a[1, 2, 3], b[2, 0, 5] = np.nan, np.inf
    np.testing.assert_array_equal(product(a, b, np.zeros((3, 4, 6), np.float32)), a @ b)


def test_refusals() -> None:
    a, b, y = np.zeros((2, 3, 4), np.float32), np.zeros((2, 4, 5), np.float32), np.zeros((2, 3, 5), np.float32)
    for args, reason in (
        ((a, b[:1], y), "shape"),
        ((a, b[:, :3], y), "shape"),
        ((a[0], b, y), "shape"),
        ((a, b, np.zeros((2, 5, 3), np.float32).transpose(0, 2, 1)), "layout"),
        ((a.astype(np.float64), b, y), "dtype"),
        ((y, b[:, :, :4].transpose(0, 2, 1)[:, :5, :4].copy()[:, :, :4], y[:, :, :4]), "overlap"),
    ):
        refusal = _core.batched_product(False, *args, False, False, 1)
        assert refusal is not None
        assert refusal.reason.name in (reason, "shape")
