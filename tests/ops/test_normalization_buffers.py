"""Normalization: in place, the caller's buffers, accumulation, and what is left alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import retrograd as rg
from retrograd import _core
from retrograd.lab import cases, reference
from support.arrays import MEMORY, Array, assert_same_bits, assert_untouched_around, placed
from support.norm import BACKWARD, DTYPES, ISA_LEVELS, KINDS, THREADS, Kind, Problem, Results, make_problem, problems


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("activation", ["identity", "leaky_relu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_in_place_then_backward(kind: Kind, dtype: str, activation: str, memory: str) -> None:
    """Also where x and out are two views of the same elements rather than one object."""
    problem = make_problem(kind, (3, 6, 23, 29), "first", activation, dtype=dtype)
    x = placed(problem.x, memory, (2, 0, 3, 1))
    for out in (x, x[:]):
        x[...] = problem.x
        mine = problem._replace(x=x)
        y, cache = mine.forward(2, out=out)
        assert y is out
        got = Results(y, cache.mean, cache.var, *mine.backward(cache, 2))
        errors = problem.errors(got)
        assert max(errors.values()) <= 1, errors
        assert_untouched_around(x)
        if memory == "contiguous":
            assert_same_bits(got, problem.run())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("activation", ["identity", "leaky_relu", "softplus"])
@pytest.mark.parametrize(
    ("kind", "shape", "layout"),
    [
        ("batch", (128, 256), "first"),  # columns; the last of each family is large enough to stream and to pipeline
        ("batch", (3, 6, 23, 29), "last"),
        ("batch", (1100, 513), "first"),
        ("batch", (3, 6, 23, 29), "first"),  # planes
        ("instance", (4, 3, 250, 251), "first"),
        ("group", (3, 6, 23, 29), "last"),
        ("layer", (61, 37), "first"),  # rows
        ("layer", (3, 9001), "first"),
        ("layer", (1900, 301), "first"),
    ],
)
def test_the_copy_of_x_is_x_and_changes_no_bits(
    kind: Kind, shape: tuple[int, ...], layout: cases.Layout, activation: str, in_place: bool, isa: str
) -> None:
    problem = make_problem(kind, shape, layout, activation)
    expected = problem.run(1)
    for threads in (1, 2, 3):
        x, keep = problem.x.copy(), np.full_like(problem.x, math.nan)
        mine = problem._replace(x=x)
        y, cache = mine.forward(threads, x if in_place else None, keep)
        assert cache.x is keep
        assert_same_bits([keep], [problem.x])
        if not in_place:
            assert_same_bits([x], [problem.x])
            x.fill(math.nan)  # backward does not look at it
        gradients = mine.backward(cache, threads, need=rg.NormGradients._fields)
        assert_same_bits(Results(y, cache.mean, cache.var, *gradients), expected)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=problems(), level=st.sampled_from(ISA_LEVELS), threads=st.sampled_from(THREADS))
def test_a_copy_of_x_in_any_memory(drawn: tuple[Problem, str, str], level: str, threads: int) -> None:
    problem, y_memory, keep_memory = drawn
    assert _core.select_isa(level)
    order = tuple(reversed(range(problem.x.ndim)))
    x = problem.x.copy()
    out, keep = (placed(np.full_like(x, math.nan), memory, order) for memory in (y_memory, keep_memory))
    y, cache = problem.forward(threads, out, keep)
    assert cache.x is keep
    assert_same_bits([keep, problem.x], [x, x])
    for buffer in (out, keep):
        assert_untouched_around(buffer)
    # The axes of the copy may not join where the others' do, and a sum is then cut otherwise.
    plain, _ = problem.forward(threads)
    tolerance = {2: 2e-2, 4: 2e-5, 8: 1e-12}[x.itemsize]
    np.testing.assert_allclose(y.astype(float), plain.astype(float), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_copy_of_x_has_every_number_of_a_half_type(dtype: str, isa: str) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(cases.storage_dtype(dtype)).reshape(256, 256)
    keep = np.zeros_like(x)
    rg.batch_norm_forward(x, keep_x=keep)
    with np.errstate(invalid="ignore"):  # of NaNs that signal
        there = ~np.isnan(x)
        assert np.isnan(keep[~there]).all()
    assert_same_bits([keep[there]], [x[there]])


def test_a_copy_of_x_that_is_refused() -> None:
    x, around_gamma = np.ones((4, 6), np.float32), np.ones((4, 6), np.float32)
    gamma = around_gamma[2]
    out, block = np.full_like(x, 7), np.full((2, 4, 6), 7, np.float32)
    read_only = np.full_like(x, 7)
    read_only.flags.writeable = False
    refused: list[tuple[Any, type[Exception], str]] = [
        (block[0, :3], ValueError, r"keep_x has shape \(3, 6\), the result has \(4, 6\)"),
        (block[0].astype(np.float64), TypeError, "keep_x"),
        (block[0].tolist(), TypeError, "keep_x must be an ndarray, not list"),
        (read_only, ValueError, "keep_x is read-only"),
        (x, ValueError, "keep_x .* overlaps x"),
        (out, ValueError, "out .* overlaps keep_x"),
        (around_gamma, ValueError, "keep_x .* overlaps gamma"),
        (np.lib.stride_tricks.as_strided(block, (4, 6), (4, 4)), ValueError, "keep_x overlaps itself"),
        (np.broadcast_to(block[0, 0], (4, 6)), ValueError, "keep_x"),
    ]
    for keep, error, message in refused:
        with pytest.raises(error, match=message):
            rg.batch_norm_forward(x, gamma, out=out, keep_x=keep)
        assert (out == 7).all()
        assert (block == 7).all()
        assert (x == 1).all()
    # Between the elements of x there is room.
    pair = np.zeros((4, 6, 2), np.float32)
    pair[..., 0] = rng_values = np.random.default_rng(0).standard_normal((4, 6), np.float32)
    y, cache = rg.batch_norm_forward(pair[..., 0], keep_x=pair[..., 1])
    assert_same_bits([cache.x, pair[..., 0]], [rng_values, rng_values])
    np.testing.assert_allclose(y, rg.batch_norm_forward(rng_values)[0], rtol=1e-5, atol=1e-6)


def test_nothing_is_kept_of_nothing() -> None:
    x = np.empty((0, 6), np.float32)
    keep = np.empty_like(x)
    assert rg.batch_norm_forward(x, keep_x=keep)[1].x is keep


@pytest.mark.parametrize("activation", ["identity", "tanh"])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_dx_in_the_place_of_dy(kind: Kind, layout: cases.Layout, activation: str) -> None:
    problem = make_problem(kind, (3, 6, 23, 29), layout, activation)
    expected = problem.run()
    _, cache = problem.forward()
    dy = problem.dy.copy()
    got = BACKWARD[kind](dy, cache, out={"dx": dy}, num_threads=2)
    assert got.dx is dy
    assert_same_bits(got, expected[3:])


def test_views_that_interleave_do_not_overlap() -> None:
    """x, dy, and both results in one block of memory, element by element."""
    problem = make_problem("batch", (3, 6, 23, 29), activation="relu")
    expected = problem.run()
    block = np.zeros((*problem.x.shape, 4), np.float32)
    x, dy, out, dx = (block[..., k] for k in range(4))
    x[...], dy[...] = problem.x, problem.dy
    mine = problem._replace(x=x, dy=dy)
    y, cache = mine.forward(out=out)
    gradients = mine.backward(cache, out=rg.NormGradients(dx))
    for got, right in ((y, expected.y), (gradients.dx, expected.dx)):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(x, problem.x)
    np.testing.assert_array_equal(dy, problem.dy)
    # And dx exactly in dy's place, between the elements of x.
    again = mine.backward(cache, out=rg.NormGradients(dy))
    assert_same_bits(again, gradients)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_need_computes_what_is_asked_for(kind: Kind, layout: cases.Layout, frozen: bool) -> None:
    problem = make_problem(kind, (3, 6, 23, 29), layout, "tanh")
    if frozen:
        if kind in ("layer", "group"):
            return
        sets = (6,) if kind == "batch" else (3, 6)
        problem = problem._replace(mean=np.zeros(sets), var=np.ones(sets), frozen=True)
    _, cache = problem.forward()
    everything = problem.backward(cache)
    names = rg.NormGradients._fields
    for count in range(4):
        for need in itertools.combinations(names, count):
            got = problem.backward(cache, need=need)
            assert_same_bits(got, [g if n in need else None for n, g in zip(names, everything, strict=True)])
    assert_same_bits([problem.backward(cache, need="dx").dx], [everything.dx])


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_out_and_accumulate(kind: Kind, dtype: str, layout: cases.Layout) -> None:
    """Buffers are overwritten, whatever they held, or added to; strided ones too."""
    problem = make_problem(kind, (3, 6, 23, 29), layout, "relu", dtype=dtype)
    _, cache = problem.forward()
    expected = problem.backward(cache)
    assert expected.dx is not None
    assert expected.dgamma is not None
    assert expected.dbeta is not None
    for memory in ("contiguous", "in a field", "reversed"):
        buffers = rg.NormGradients(
            placed(np.full_like(expected.dx, math.nan), memory),
            placed(np.full_like(expected.dgamma, math.nan), memory),
            placed(np.full_like(expected.dbeta, math.nan), memory),
        )
        got = problem.backward(cache, out=buffers)
        for mine, buffer in zip(got, buffers, strict=True):
            assert mine is buffer
        # Rows of other strides are summed in other blocks.
        for mine, right in zip(got, expected, strict=True):
            assert_close_in_type(mine, right, problem.x.dtype)
        first = [np.array(g, copy=True) for g in got]
        problem.backward(cache, 2, out=buffers, accumulate=True)
        for mine, once in zip(got, first, strict=True):
            # x + x is exact.
            np.testing.assert_array_equal(mine, once + once)
        for buffer in got:
            assert_untouched_around(buffer)


def assert_close_in_type(got: Array | None, expected: Array | None, dtype: Any) -> None:
    assert got is not None
    assert expected is not None
    eps = float(np.finfo(dtype).eps) if dtype != cases.storage_dtype("bfloat16") else 2.0**-8
    scale = float(np.max(np.abs(expected), initial=0))
    np.testing.assert_allclose(got.astype(float), expected.astype(float), rtol=8 * eps, atol=8 * eps * scale)


def test_accumulate_rounds_once() -> None:
    """A float16 sum is made in float32: 1 + 2^-11 + 2^-11 would otherwise stay 1."""
    problem = make_problem("batch", (4, 3, 5), dtype="float16")
    _, cache = problem.forward()
    expected = problem.backward(cache).dx
    assert expected is not None
    start = np.full_like(problem.x, 3.0)
    got = problem.backward(cache, out={"dx": start.copy()}, need="dx", accumulate=True).dx
    assert got is not None
    exact = reference.norm_backward(problem.dy, problem.x, None, problem.gamma, **problem.options).dx
    # Half a unit in the last place of numbers below 8, and what dx itself is off by in float32.
    np.testing.assert_allclose(got.astype(float), 3 + exact, rtol=0, atol=2.0**-9 * 1.001)


@pytest.mark.parametrize("which", range(3))
def test_accumulate_into_some(which: int) -> None:
    problem = make_problem("group", (3, 6, 5, 7))
    _, cache = problem.forward()
    expected = problem.backward(cache)
    name = rg.NormGradients._fields[which]
    one = np.ones_like(expected[which])
    got = problem.backward(cache, need=[name], out={name: one}, accumulate=True)
    assert getattr(got, name) is one
    assert sum(g is not None for g in got) == 1
    np.testing.assert_allclose(one, 1 + expected[which], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_never_modified(kind: Kind) -> None:
    """Read-only inputs are accepted, and nothing of the caller's is written."""
    problem = make_problem(kind, (3, 6, 23, 29), "last", "tanh")
    expected = problem.run()
    arrays = [problem.x, problem.dy, problem.gamma, problem.beta]
    saved = [a.copy() for a in arrays if a is not None]
    for a in arrays:
        assert a is not None
        a.flags.writeable = False
    assert_same_bits(problem.run(2), expected)
    assert_same_bits(arrays, saved)
    y, cache = problem.forward()
    kept = y.copy()
    problem.backward(cache)
    assert_same_bits([y], [kept])


def test_cache_has_the_statistics() -> None:
    problem = make_problem("instance", (3, 6, 5, 7))
    _, cache = problem.forward()
    expected = reference.norm_forward(problem.x, kind="instance")
    for got, right in ((cache.mean, expected.mean), (cache.var, expected.var), (cache.rstd, expected.rstd)):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-7)
    assert "instance_norm" in repr(cache)


def test_array_likes_are_taken_as_they_are() -> None:
    x = [[1.0, 2.0], [3.0, 5.0]]
    y, _ = rg.batch_norm_forward(x)
    assert y.dtype == np.float64
    memory = memoryview(np.array(x, np.float32))
    z, _ = rg.batch_norm_forward(memory)
    assert z.dtype == np.float32
    np.testing.assert_allclose(y, z, rtol=1e-6)
