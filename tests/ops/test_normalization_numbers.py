"""Normalization: data that are hard on the arithmetic, empty and single-element sets, NaN and infinity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core
from retrograd.lab import cases, reference
from support.arrays import assert_same_bits
from support.norm import DTYPES, ISA_LEVELS, KINDS, Kind, Problem, make_problem

# ---- data that hurt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ratio", [1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_huge_mean_tiny_variance(kind: Kind, ratio: float, dtype: str, layout: cases.Layout) -> None:
    make_problem(kind, (4, 6, 19, 23), layout, dtype=dtype, mean_over_std=ratio).check()


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_channel_has_its_own_mean(kind: Kind, layout: cases.Layout) -> None:
    """A group or a row spans channels whose means are 1e4 apart, a batch samples whose means are."""
    for dtype in ("float32", "float64"):
        problem = make_problem(kind, (6, 6, 9, 11), layout, dtype=dtype)
        steps = np.arange(6, dtype=dtype) * 1e4
        where = problem.channel_axis if kind != "batch" else 0
        x = problem.x + steps.reshape(-1, *(1,) * (3 - where))
        problem._replace(x=x).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_beginning_is_not_like_the_rest(kind: Kind, layout: cases.Layout, dtype: str) -> None:
    """Moments are first taken about a center from a set's first block. The rest of it is 2 or 1000 away."""
    # Squares about a center d away from the mean cancel: by at most 1 + d^2 / var = 5, or they are summed again.
    for distance in (2.0, 1000.0):
        problem = make_problem(kind, (10, 6, 37, 41), layout, dtype=dtype)
        if kind == "layer":
            problem = problem._replace(
                x=problem.x.reshape(10, -1), dy=problem.dy.reshape(10, -1), gamma=None, beta=None
            )
        x = problem.x.copy()
        beginning = (slice(None), *(slice(extent // 3) for extent in x.shape[1:]))
        x[beginning] += np.array(distance, x.dtype)
        x[: len(x) // 3] += np.array(distance, x.dtype)
        problem._replace(x=x).check(at_most=5)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e-3, 12345.678, 3e4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_constant_input(kind: Kind, layout: cases.Layout, dtype: str, value: float) -> None:
    """No spread: y is beta to the bit, and nothing flows into dgamma."""
    problem = make_problem(kind, (5, 6, 37, 41), layout, dtype=dtype)
    problem = problem._replace(x=np.full_like(problem.x, value))
    for level in ISA_LEVELS:
        _core.select_isa(level)
        got = problem.run()
        assert problem.beta is not None
        if kind == "layer":
            beta = np.broadcast_to(problem.beta, problem.x.shape)
        else:
            beta = np.broadcast_to(problem.beta.reshape(-1, *(1,) * (3 - problem.channel_axis)), problem.x.shape)
        np.testing.assert_array_equal(got.y, beta.astype(problem.x.dtype))
        np.testing.assert_array_equal(got.mean, np.full_like(got.mean, float(problem.x.flat[0])))
        np.testing.assert_array_equal(got.var, np.zeros_like(got.var))
        np.testing.assert_array_equal(got.dgamma, np.zeros_like(got.dgamma))
    problem.check()


def test_dead_channels_beside_live_ones(isa: str) -> None:
    for layout in ("first", "last"):
        problem = make_problem("batch", (6, 8, 21, 20), layout, "relu", seed=5)
        x = np.moveaxis(problem.x, problem.channel_axis, 1)
        x[:, ::3] = np.array([0.0, 0.1, -7.3], np.float32).reshape(1, 3, 1, 1)
        problem.check([isa])


@pytest.mark.parametrize("scale", [1e25, 1e-25, 1e18, 1e-18])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_squares_beyond_the_range_of_float(kind: Kind, layout: cases.Layout, scale: float, isa: str) -> None:
    problem = make_problem(kind, (4, 6, 13, 17), layout)._replace(eps=0.0)
    unscaled = problem.run()
    # dy as large as x: dx is of the size of 1.
    scaled = problem._replace(x=problem.x * np.float32(scale), dy=problem.dy * np.float32(scale))
    got = scaled.check([isa])
    np.testing.assert_allclose(got.y, unscaled.y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.dx, unscaled.dx, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1e25, 1e-25])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_squared_rstd_beyond_the_range_of_float(kind: Kind, layout: cases.Layout, scale: float, isa: str) -> None:
    """dx is about 1 / scale, well within it; rstd^2, which dx is made of, is not."""
    problem = make_problem(kind, (4, 6, 13, 17), layout)._replace(eps=0.0)
    problem._replace(x=problem.x * np.float32(scale)).check([isa])


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_huge_element(kind: Kind, layout: cases.Layout, isa: str) -> None:
    """Its set is dominated by it; the others do not notice."""
    problem = make_problem(kind, (4, 6, 13, 17), layout, seed=7)
    clean = problem.run()
    problem.x[1, 2, 3, 4] = 1e30
    got = problem.check([isa])
    others = got.mean < 1e3
    assert np.count_nonzero(~others) == 1
    np.testing.assert_allclose(got.var[others], clean.var[others], rtol=1e-6)


# ---- nothing, one, NaN -----------------------------------------------------------------------------------------------

EMPTY = [
    ("batch", (0, 3, 4), {}),
    ("batch", (2, 0, 4), {}),
    ("batch", (2, 3, 0), {}),
    ("batch", (0, 3), {}),
    ("instance", (0, 3, 4), {}),
    ("instance", (2, 0, 4), {}),
    ("instance", (2, 3, 0), {}),
    ("layer", (0,), {}),
    ("layer", (0, 3), {}),
    ("layer", (3, 0), {}),
    ("layer", (2, 0, 3), {"axis": 1}),
    ("layer", (2, 0, 3), {"axis": 2}),
    ("group", (0, 4, 3), {"num_groups": 2}),
    ("group", (2, 0, 3), {"num_groups": 2}),
    ("group", (2, 4, 0), {"num_groups": 2}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "shape", "options"), EMPTY)
def test_no_elements(kind: Kind, shape: tuple[int, ...], options: dict[str, Any], dtype: str) -> None:
    x = np.zeros(shape, cases.storage_dtype(dtype))
    parameter_shape = shape[options.get("axis", -1) :] if kind == "layer" else (shape[1],)
    arithmetic = np.float64 if dtype == "float64" else np.float32
    gamma, beta = np.ones((2, *parameter_shape), arithmetic)
    problem = Problem(kind, x, x.copy(), gamma, beta, activation="relu", **options)
    got = problem.check(threads=(1, 2))
    assert not got.mean.any()
    assert not got.var.any()
    np.testing.assert_array_equal(got.dgamma, np.zeros(parameter_shape))
    np.testing.assert_array_equal(got.dbeta, np.zeros(parameter_shape))
    # What was there stays when added to, and is overwritten when not.
    _, cache = problem.forward()
    seven = np.full(parameter_shape, 7, arithmetic)
    out = rg.NormGradients(x.copy(), seven.copy(), seven.copy())
    added = problem.backward(cache, out=out, accumulate=True)
    np.testing.assert_array_equal(added.dgamma, seven)
    written = problem.backward(cache, out=out)
    np.testing.assert_array_equal(written.dbeta, np.zeros(parameter_shape))


def test_running_statistics_of_no_elements_stay() -> None:
    for forward in (rg.batch_norm_forward, rg.instance_norm_forward):
        for shape in ((0, 3, 2), (2, 3, 0)):
            mean, var = np.full(3, 5.0), np.full(3, 7.0)
            forward(np.zeros(shape, np.float32), running_mean=mean, running_var=var)
            assert (mean == 5).all()
            assert (var == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("batch", (1, 37), {}),
        ("batch", (1, 5, 1), {}),
        ("batch", (1, 1), {}),
        ("batch", (1, 4099), {"channel_axis": -1}),
        ("instance", (4, 5), {}),
        ("instance", (70, 33, 1, 1), {}),
        ("layer", (9, 1), {}),
        ("layer", (1,), {}),
        ("layer", (5, 1, 1), {"axis": 1}),
        ("group", (3, 6), {"num_groups": 6}),
        ("group", (3, 6, 1), {"num_groups": 6}),
    ],
)
def test_sets_of_one_element(kind: Kind, shape: tuple[int, ...], options: dict[str, Any], dtype: str, isa: str) -> None:
    """xhat is 0 and does not depend on x: y = beta, dx and dgamma are 0 to the bit, however large dy and rstd are."""
    rng = np.random.default_rng(8)
    x, dy = rng.normal(0, 100, size=(2, *shape)).astype(cases.storage_dtype(dtype))
    parameter_shape = shape[options.get("axis", -1) :] if kind == "layer" else (shape[options.get("channel_axis", 1)],)
    gamma, beta = rng.normal(size=(2, *parameter_shape)).astype(np.float64 if dtype == "float64" else np.float32)
    problem = Problem(kind, x, dy, gamma, beta, **options)
    got = problem.check([isa], threads=(1, 2))
    np.testing.assert_array_equal(got.dx, np.zeros_like(x))
    np.testing.assert_array_equal(got.dgamma, np.zeros_like(gamma))
    np.testing.assert_array_equal(got.mean.ravel(), x.ravel().astype(np.float64))
    np.testing.assert_array_equal(got.var, np.zeros_like(got.var))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["batch", "instance", "layer"])
def test_one_element_with_statistics_from_elsewhere(kind: Kind, channels: int, isa: str) -> None:
    """xhat is not 0 then, and belongs in dgamma. (A worker of a synchronised batch norm may have one sample.)"""
    x, dy = np.random.default_rng(9).normal(size=(2, 1, channels)).astype(np.float32)
    if kind == "layer":
        x, dy = x.reshape(channels, 1), dy.reshape(channels, 1)
    gamma = np.ones(x.shape[1], np.float32)
    shape = reference.norm_forward(x, kind=kind).mean.shape
    problem = Problem(kind, x, dy, gamma, gamma, mean=np.full(shape, 0.25), var=np.full(shape, 2.0))
    got = problem.run()
    expected = reference.norm_forward(x, gamma, gamma, **problem.options)
    np.testing.assert_allclose(got.y, expected.y, rtol=1e-6)
    back = reference.norm_backward(dy, x, got.y, gamma, **problem.options)
    np.testing.assert_allclose(got.dgamma, back.dgamma, rtol=1e-6)
    if kind == "batch":
        _, cache = problem.forward()
        sums = rg.batch_norm_gradient_sums(dy, cache)
        np.testing.assert_allclose(sums.sum_dz_xhat, back.dgamma, rtol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("activation", ["identity", "relu"])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf_stay_in_their_set(
    kind: Kind, layout: cases.Layout, activation: str, poison: float, isa: str
) -> None:
    problem = make_problem(kind, (3, 6, 21, 23), layout, activation, seed=9)
    clean = problem.run()
    problem.x[1, 2, 3, 4] = poison
    expected = reference.norm_forward(problem.x, problem.gamma, problem.beta, **problem.options)
    hit = np.isnan(expected.y)
    assert 0 < np.count_nonzero(hit) < hit.size
    got = problem.check([isa], threads=(1, 3))
    np.testing.assert_array_equal(np.isnan(got.y), hit)
    np.testing.assert_array_equal(np.isnan(got.dx), hit)
    np.testing.assert_allclose(got.y[~hit], clean.y[~hit], rtol=1e-5, atol=1e-6)
    sets = np.isnan(got.var)
    assert np.count_nonzero(sets) == 1
    np.testing.assert_array_equal(got.mean[sets], [poison])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf_in_dy_stay_in_their_set(kind: Kind, layout: cases.Layout, poison: float, isa: str) -> None:
    problem = make_problem(kind, (3, 6, 21, 23), layout, "relu", seed=10)
    y, _ = problem.forward()
    alive, dead = np.argwhere(y > 0)[100], np.argwhere(y == 0)[100]
    # Where relu is flat dz is 0 whatever dy is: nothing happens.
    clean = problem.run()
    problem.dy[tuple(dead)] = poison
    assert_same_bits(problem.run(), clean)
    problem.dy[tuple(alive)] = poison
    got = problem.run()
    expected = reference.norm_backward(problem.dy, problem.x, got.y, problem.gamma, **problem.options)
    for name in ("dx", "dgamma", "dbeta"):
        mine, oracle = getattr(got, name), getattr(expected, name)
        # inf - inf is NaN and inf - 1 is inf: which of the two depends on the order of operations.
        finite = np.isfinite(oracle)
        assert 0 < np.count_nonzero(~finite) < finite.size
        np.testing.assert_array_equal(np.isfinite(mine), finite)
        np.testing.assert_allclose(mine[finite], oracle[finite], rtol=1e-4, atol=1e-5)


def test_frozen_statistics_keep_nan_to_itself() -> None:
    """With constants for statistics, elements have nothing to do with each other."""
    problem = make_problem("batch", (4, 3, 8), seed=11)._replace(mean=np.zeros(3), var=np.ones(3), frozen=True)
    problem.x[1, 2, 3] = problem.dy[2, 1, 5] = math.nan
    got = problem.check()
    assert np.argwhere(np.isnan(got.y)).tolist() == [[1, 2, 3]]
    assert np.argwhere(np.isnan(got.dx)).tolist() == [[2, 1, 5]]
