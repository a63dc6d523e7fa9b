"""Reductions of the engine over any axes, against NumPy in float64, at every level and number of threads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from retrograd import _core
from support.arrays import MEMORY, Array, assert_same_bits, assert_untouched_around, fenced, placed
from support.engine import at_every_level

KINDS = dict(_core.reductions())
DTYPES = (np.float32, np.float64)


def shape_of(x: Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if i in axes else extent for i, extent in enumerate(x.shape))


def reduced(kind: str, x: Array, axes: tuple[int, ...], y: Array | None = None) -> Array:
    def call(threads: int) -> tuple[Array, ...]:
        into = np.full(shape_of(x, axes), 7, x.dtype) if y is None else y
        assert _core.reduce(KINDS[kind], x.dtype == np.float64, x, into, False, threads) is None
        return (into,)

    return at_every_level(call)[0]


def expected(kind: str, x: Array, axes: tuple[int, ...]) -> Array:
    wide = x.astype(np.longdouble)
    options: dict[str, Any] = {"axis": axes, "keepdims": True}
    match kind:
        case "sum":
            return np.sum(wide, **options)
        case "mean":
            return np.mean(wide, **options)
        case "sum_of_squares":
            return np.sum(wide * wide, **options)
        case "max":
            return np.max(x, **options)
        case "min":
            return np.min(x, **options)
        case _:
            return np.prod(wide, **options)


def assert_close(kind: str, got: Array, x: Array, axes: tuple[int, ...]) -> None:
    want = expected(kind, x, axes)
    if kind in ("max", "min"):
        np.testing.assert_array_equal(got, want)
        return
    terms = max(1, x.size // max(1, got.size))
    # One rounding to the result's type, and those of a sum in double precision.
    scale = np.abs(want) if kind == "product" else expected("sum", np.abs(x), axes)
    if kind == "sum_of_squares":
        scale = want
    if kind == "mean":
        scale = scale / terms
    sums = (4 + terms / 16 + math.log2(terms)) * 2.0**-53 * scale
    if kind == "product":
        sums = terms * 2.0**-53 * scale
    bound = np.abs(want) * float(np.finfo(x.dtype).eps) / 2 * 1.0001 + sums
    error = np.abs(got.astype(np.longdouble) - want)
    assert np.all(error <= bound), float(np.max(error - bound))


# Rows, columns, both, everything; tiny rows, long ones, lane widths and more than one block.
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((1,), (0,)),
    ((7,), ()),
    ((31,), (0,)),
    ((2047,), (0,)),
    ((2049,), (0,)),
    ((70001,), (0,)),
    ((300007,), (0,)),
    ((5, 10), (1,)),
    ((1031, 10), (1,)),
    ((37, 8), (1,)),
    ((37, 9), (1,)),
    ((37, 16), (1,)),
    ((37, 17), (1,)),
    ((37, 32), (1,)),
    ((37, 33), (1,)),
    ((3, 5000), (1,)),
    ((40, 2049), (1,)),
    ((1031, 3), (0,)),
    ((70001, 3), (0,)),
    ((17, 33), (0,)),
    ((259, 513), (0,)),
    ((5, 4099), (0,)),
    ((700, 129), (0,)),
    ((13, 7, 49), (0, 2)),
    ((300, 3, 300), (0, 2)),
    ((1500, 5, 50), (0, 2)),
    ((6, 2, 2300), (0, 2)),
    ((5, 11, 13), (1,)),
    ((5, 300, 13), (1,)),
    ((4, 3, 5, 7), (0, 2)),
    ((4, 3, 5, 7), (1, 3)),
    ((4, 3, 5, 7), (0, 1, 2, 3)),
    ((3, 1, 5, 1), (1, 2)),
    ((9, 300, 2, 5, 3), (0, 3)),
    ((2, 3, 4), ()),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axes"), SHAPES)
def test_values(shape: tuple[int, ...], axes: tuple[int, ...], dtype: type) -> None:
    generator = np.random.default_rng(len(shape))
    x = np.asarray(generator.normal(size=shape) + 0.5).astype(dtype)
    for kind in KINDS:
        if kind == "product":
            x = np.asarray(1 + generator.normal(size=shape) / 100).astype(dtype)
        assert_close(kind, reduced(kind, x, axes), x, axes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((19, 45), (1,)),
        ((45, 19), (0,)),
        ((3, 5000), (1,)),
        ((5000, 3), (0,)),
        ((7, 5, 33), (0, 2)),
        ((7, 33, 5), (1,)),
        ((4, 3, 5, 7), (0, 2)),
        ((4, 3, 5, 7), (1, 3)),
        ((4, 3, 5, 7), (0, 1, 2, 3)),
    ],
)
def test_the_bits_do_not_depend_on_strides(
    kind: str, memory: str, shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    want = reduced(kind, x, axes)
    order = tuple(np.random.default_rng(4).permutation(len(shape)))
    y = placed(np.zeros(shape_of(x, axes), np.float32), memory, order)
    assert_same_bits([reduced(kind, placed(x, memory, order), axes, y)], [want])
    assert_untouched_around(y)


@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_inputs(kind: str) -> None:
    row = np.random.default_rng(1).normal(size=(1, 37)).astype(np.float32)
    for x in (np.broadcast_to(row, (21, 37)), np.broadcast_to(row.T, (37, 21))):
        for axes in ((0,), (1,), (0, 1)):
            assert_same_bits([reduced(kind, x, axes)], [reduced(kind, x.copy(), axes)])


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 10), (5, 17), (33, 3), (9, 31), (1, 2049)])
def test_nothing_outside_is_read(shape: tuple[int, int], dtype: type, at_end: bool) -> None:
    x = fenced(np.random.default_rng(0).normal(size=shape).astype(dtype), at_end)
    for kind in KINDS:
        for axes in ((0,), (1,), (0, 1)):
            y = fenced(np.zeros(shape_of(x, axes), dtype), at_end)
            assert_same_bits([reduced(kind, x, axes, y)], [reduced(kind, x.copy(), axes)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_elements(dtype: type) -> None:
    for shape, axes in (((0, 3), (0,)), ((3, 0), (1,)), ((2, 0, 3), (1,)), ((0,), (0,)), ((2, 0, 3), (0, 1))):
        x = np.zeros(shape, dtype)
        assert np.all(reduced("sum", x, axes) == 0)
        assert np.all(reduced("sum_of_squares", x, axes) == 0)
        assert np.all(reduced("product", x, axes) == 1)
        assert np.all(np.isnan(reduced("mean", x, axes)))
        for kind in ("max", "min"):
            with pytest.raises(ValueError, match="no elements"):
                reduced(kind, x, axes)
    for kind in KINDS:
        assert reduced(kind, np.zeros((0, 3), dtype), (1,)).shape == (0, 1)
        assert reduced(kind, np.zeros((0, 0), dtype), (1,)).shape == (0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_special_values(axes: tuple[int, ...], dtype: type) -> None:
    tiny = np.finfo(dtype).smallest_subnormal
    for special in (math.nan, math.inf, -math.inf, -0.0, tiny):
        for place in ((0, 0), (3, 17), (40, 40)):
            x = np.random.default_rng(5).normal(size=(41, 41)).astype(dtype)
            if special == tiny:
                x[...] = 0
            x[place] = special
            for kind in ("max", "min"):
                np.testing.assert_array_equal(reduced(kind, x, axes), expected(kind, x, axes))
            np.testing.assert_allclose(reduced("sum", x, axes), expected("sum", x, axes), rtol=1e-4, atol=1e-4)
    x = np.full((41, 41), -math.inf, dtype)
    np.testing.assert_array_equal(reduced("max", x, axes), expected("max", x, axes))
    np.testing.assert_array_equal(reduced("min", -x, axes), expected("min", -x, axes))
    x[3, 4] = math.inf
    assert np.isnan(reduced("sum", x, axes)).any()
    x = np.full((41, 41), tiny, dtype)
    assert_close("sum", reduced("sum", x, axes), x, axes)


def test_float_sums_are_rounded_once() -> None:
    x = np.full(100_000, 0.1, np.float32)
    assert reduced("sum", x, (0,))[0] == np.float32(math.fsum(x.tolist()))
    x = np.array([1e8, 1, -1e8, 1], np.float32)
    assert reduced("sum", x, (0,))[0] == 2


def test_refusals() -> None:
    x, y = np.zeros((3, 4), np.float32), np.zeros((3, 1), np.float32)

    def reason(*arguments: Any) -> tuple[str, str]:
        refusal = _core.reduce(0, False, *arguments, False, 1)
        assert refusal is not None
        return refusal.reason.name, refusal.argument

    assert reason(x, y.astype(np.float64)) == ("dtype", "out")
    assert reason(x.astype(np.float64), y) == ("dtype", "x")
    assert reason(x, np.zeros((2, 1), np.float32)) == ("shape", "out")
    assert reason(x, np.zeros(3, np.float32)) == ("shape", "out")
    assert reason(x, x[:, :1]) == ("overlap", "out")
    assert reason(x, np.broadcast_to(y, (3, 4))) == ("type", "out")
    with pytest.raises(ValueError, match="no such reduction"):
        _core.reduce(6, False, x, y, False, 1)


# ---- truth values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["contiguous", "fortran", "permuted", "reversed", "every other"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((), ()),
        ((5,), (0,)),
        ((0, 3), (0,)),
        ((3, 0), (0,)),
        ((37, 19), (0,)),
        ((37, 19), (1,)),
        ((3, 9000), (0,)),
        ((3, 9000), (1,)),
        ((4, 5, 6), (0, 2)),
        ((4, 5, 6), (1,)),
        ((40, 50, 60), (0, 1, 2)),
    ],
)
def test_any_and_all(shape: tuple[int, ...], axes: tuple[int, ...], memory: str) -> None:
    generator = np.random.default_rng(0)
    for share in (0.0, 0.001, 0.5, 0.999, 1.0):
        x = np.asarray(generator.random(shape) < share)
        if shape:
            x = placed(x, memory, tuple(range(len(shape)))[::-1])
        for every, function in ((False, np.any), (True, np.all)):

            def call(threads: int, x: Array = x, every: bool = every) -> tuple[Array, ...]:
                y = np.zeros(shape_of(x, axes), bool)
                assert _core.reduce_bool(every, x, y, False, threads) is None
                return (y,)

            np.testing.assert_array_equal(at_every_level(call)[0], function(x, axis=axes, keepdims=True))


# ---- indices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory", ["contiguous", "fortran", "permuted", "reversed", "every other"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1,), 0),
        ((37,), 0),
        ((5003,), 0),
        ((31, 10), 1),
        ((31, 10), 0),
        ((7, 5003), 1),
        ((5003, 7), 0),
        ((70000, 3), 0),
        ((300, 700), 0),
        ((5, 17, 33), 1),
        ((5, 17, 33), 0),
        ((5, 17, 33), 2),
    ],
)
def test_indices(shape: tuple[int, ...], axis: int, memory: str, dtype: type) -> None:
    generator = np.random.default_rng(2)
    plain = generator.integers(-50, 50, shape).astype(dtype)
    special = plain.copy()
    special.reshape(-1)[generator.integers(0, plain.size, max(1, plain.size // 10))] = math.nan
    zeros = np.where(generator.random(shape) < 0.5, 0.0, -0.0).astype(dtype)
    for values in (plain, special, zeros, np.full(shape, -math.inf, dtype)):
        x = placed(values, memory, tuple(range(len(shape)))[::-1])
        for largest, function in ((True, np.argmax), (False, np.argmin)):

            def call(threads: int, x: Array = x, largest: bool = largest) -> tuple[Array, ...]:
                y = np.full(shape_of(x, (axis,)), -1, np.int64)
                assert _core.arg_reduce(largest, x.dtype == np.float64, x, y, False, threads) is None
                return (y,)

            np.testing.assert_array_equal(at_every_level(call)[0], function(values, axis=axis, keepdims=True))


def test_indices_of_no_elements() -> None:
    with pytest.raises(ValueError, match="no elements"):
        _core.arg_reduce(True, False, np.zeros((2, 0), np.float32), np.zeros((2, 1), np.int64), False, 1)
    assert _core.arg_reduce(True, False, np.zeros((0, 3), np.float32), np.zeros((0, 1), np.int64), False, 1) is None
    refusal = _core.arg_reduce(True, False, np.zeros((2, 3), np.float32), np.zeros((1, 1), np.int64), False, 1)
    assert refusal is not None
    assert refusal.reason.name == "shape"
