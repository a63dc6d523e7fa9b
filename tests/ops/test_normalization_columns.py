"""Normalization by columns (channels last, matrices): cache sizes change the order of work, never the results."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core
from support.arrays import Array, assert_same_bits, assert_untouched_around, placed
from support.norm import DTYPES, ISA_LEVELS, Kind, Problem, Results, make_problem

# l1, l2, last level, CPUs that share it: all data fit the second level; ranges of columns do; hardly a row does, and
# results are streamed; the second level is as small, but nothing is streamed.
CACHES = {
    "all near": (1 << 15, 1 << 26, 1 << 28, 1),
    "ranges of columns": (1 << 15, 1 << 18, 1 << 19, 2),
    "nothing fits": (1 << 10, 1 << 11, 1 << 12, 1),
    "far but shared": (1 << 10, 1 << 11, 1 << 28, 64),
}
# Rows a power of two apart and not; fewer columns than a vector, than a range, and more than one block; rows that end
# inside a group of 16, one chunk and many; a set that spans columns.
SHAPES: dict[str, tuple[Kind, tuple[int, ...], int]] = {
    "matrix": ("batch", (403, 200), 1),
    "power of two": ("batch", (257, 256), 1),
    "wide": ("batch", (19, 2500), 1),
    "narrow": ("batch", (3001, 3), 1),
    "image": ("batch", (5, 70, 9, 13), 1),
    "one channel more than a strip": ("batch", (2, 65, 17, 31), 1),
    "groups": ("group", (3, 132, 11, 10), 4),
    "instances": ("instance", (2, 67, 21, 19), 1),
}


@pytest.fixture(autouse=True)
def _own_caches() -> Iterator[None]:
    yield
    _core.restore_caches()


def _problem(name: str, dtype: str, activation: str = "identity") -> Problem:
    kind, shape, groups = SHAPES[name]
    return make_problem(kind, shape, "last", activation, dtype=dtype, num_groups=groups)


def _aligned(like: Array) -> Array:
    """Zeros that begin on a cache line, so that they can be streamed in place."""
    room = np.zeros(like.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + like.nbytes].view(like.dtype).reshape(like.shape)


def _for_all_caches(problem: Problem, expected: Results) -> None:
    for caches in CACHES.values():
        _core.override_caches(*caches)
        for threads in (1, 3) if _core.isa() == "scalar" else (1, 2, 3):  # scalar is slow
            assert_same_bits(problem.run(threads), expected)
            assert_same_bits(problem.run(threads, _aligned(problem.x), _aligned(problem.x)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_bits_with_any_caches(name: str, dtype: str) -> None:
    for activation in ("identity", "tanh"):
        problem = _problem(name, dtype, activation)
        problem.check()
        for level in ISA_LEVELS:
            assert _core.select_isa(level)
            _for_all_caches(problem, problem.run(1))


@pytest.mark.parametrize("name", ["matrix", "power of two", "groups"])
def test_columns_that_are_summed_again(name: str) -> None:
    """Squares that leave float's range are summed in double, and only in the sets that have them."""
    problem = _problem(name, "float32")
    problem.x[..., 5] *= np.float32(1e25)
    problem.x[..., 131] = np.nan
    expected = problem.run(1)
    tame = _problem(name, "float32").run(1)
    np.testing.assert_array_equal(expected.mean[..., -1], tame.mean[..., -1] if name != "groups" else np.nan)
    _for_all_caches(problem, expected)


@pytest.mark.parametrize("memory", ["padded", "every other", "reversed"])
@pytest.mark.parametrize("name", ["matrix", "power of two", "groups"])
def test_strides_with_any_caches(name: str, memory: str) -> None:
    """Blocks that are staged are summed in the same groups of rows as blocks that are read in place."""
    plain = _problem(name, "float32", "relu")
    expected = plain.run(1)
    problem = plain._replace(x=placed(plain.x, memory), dy=placed(plain.dy, memory))
    for caches in CACHES.values():
        _core.override_caches(*caches)
        for threads in (1, 2):
            y, dx = placed(plain.x, memory), placed(plain.x, memory)
            got = problem.run(threads, y, dx)
            for view in (y, dx):
                assert_untouched_around(view)
            # Rows are summed in the order of memory, and in pieces where two axes do not form one.
            if memory == "reversed" or plain.x.ndim > 2:
                assert max(plain.errors(got).values()) <= 1
            else:
                assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["matrix", "wide", "image", "groups"])
def test_in_place_and_accumulated_with_any_caches(name: str, dtype: str) -> None:
    problem = _problem(name, dtype, "sigmoid")
    expected = problem.run(1)
    once: list[Array] | None = None
    for caches in CACHES.values():
        _core.override_caches(*caches)
        for threads in (1, 2):
            y, cache = problem.forward(threads, keep_x=(kept := np.empty_like(problem.x)))
            assert_same_bits([y, kept], [expected.y, problem.x])
            over = problem._replace(dy=problem.dy.copy())
            got = over.backward(cache, threads, out={"dx": over.dy})
            assert got.dx is over.dy
            assert_same_bits(got, expected[3:])
            total = rg.NormGradients(*(np.ones_like(a) for a in expected[3:]))
            problem.backward(cache, threads, out=total, accumulate=True)
            once = once or [a.copy() for a in total if a is not None]
            assert_same_bits(total, once)
            x = problem.x.copy()
            assert_same_bits([problem._replace(x=x).forward(threads, out=x, keep_x=kept)[0]], [expected.y])
