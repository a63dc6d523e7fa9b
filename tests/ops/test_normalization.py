"""Normalization: the engine against the oracle over options, shapes and strides; the same bits at any thread count."""

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
from retrograd.lab.cases import ACTIVATION_PARAMETERS, FUSED_ACTIVATIONS, NormCase
from retrograd.lab.verify import verify_norm
from support.arrays import Array, assert_same_bits, assert_untouched_around, placed
from support.norm import DTYPES, ISA_LEVELS, KINDS, THREADS, Kind, Problem, make_problem, problems

# ---- everything with everything --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", *(pytest.param(dtype, marks=pytest.mark.long) for dtype in ("float64", "float16"))]
)
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("activation", FUSED_ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_norm_activation_layout_and_type(kind: Kind, activation: str, layout: cases.Layout, dtype: str) -> None:
    """At every instruction-set level, within tolerance, and the same bits at 1, 2, 3 and 7 threads."""
    # 8,550 elements: just enough (8,192) for the team to be asked.
    make_problem(kind, (3, 6, 19, 25), layout, activation, reach=3, dtype=dtype).check(threads=THREADS)


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("activation", ACTIVATION_PARAMETERS)
@pytest.mark.parametrize("kind", KINDS)
def test_slope_from_input_of_every_norm_activation_and_layout(
    kind: Kind, activation: str, layout: cases.Layout
) -> None:
    """Any activation; the types go round. Levels and threads as above."""
    number = KINDS.index(kind) + list(ACTIVATION_PARAMETERS).index(activation) + (layout == "last")
    dtype = DTYPES[number % 4]
    problem = make_problem(kind, (3, 6, 19, 25), layout, activation, reach=3, dtype=dtype, slope_from="input")
    problem.check(threads=THREADS)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(2, 4099), (129, 2111), (3, 2, 4099), (5, 1), (1, 5)])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_slope_from_input_of_more_and_of_less_than_a_block(
    kind: Kind, layout: cases.Layout, shape: tuple[int, ...]
) -> None:
    num_groups = 2 if shape[1] % 2 == 0 else 1
    for activation in ("silu", "relu"):  # the oracle of gelu takes ten times as long
        problem = make_problem(kind, shape, layout, activation, num_groups=num_groups, slope_from="input")
        problem.check(threads=(1, 3))


@pytest.mark.parametrize("slope_from", ["output", "input"])
def test_published_cases_are_of_both_kinds(slope_from: str) -> None:
    found = {case.activation for case in cases.NORM_VERIFY_CASES if case.slope_from == slope_from}
    assert found >= (set(FUSED_ACTIVATIONS) if slope_from == "output" else {"gelu", "silu", "closed_hard_sigmoid"})


@pytest.mark.long
def test_published_cases() -> None:
    rows = verify_norm(thread_counts=(1, 2))
    assert len(rows) == len(cases.NORM_VERIFY_CASES) * len(ISA_LEVELS) * 2
    assert [(row.case.name, row.isa, row.threads, row.errors) for row in rows if not row.ok] == []
    # A tolerance that nothing comes near would not be one.
    for name in ("float32", "float64"):
        for result in range(6):
            assert max(row.errors[result] for row in rows if row.case.dtype == name) > 0.25


def test_verify_sees_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four units in the last place of y are enough."""
    right = rg.batch_norm_forward

    def wrong(x: Array, *arguments: Any, **options: Any) -> tuple[Array, rg.NormCache]:
        y, cache = right(x, *arguments, **options)
        return y * np.float32(1 + 2.0**-21), cache

    monkeypatch.setattr("retrograd.ops.normalization.batch_norm_forward", wrong)
    (row,) = verify_norm([NormCase("batch", (5, 7, 11))], ["scalar"], [1])
    assert not row.ok
    assert row.what == "y"
    assert row.error == row.errors.y > 1


@pytest.mark.parametrize("slope_from", ["output", "input"])
@pytest.mark.parametrize("parameters", ["none", "gamma", "beta"])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_gamma_and_beta_are_optional(kind: Kind, layout: cases.Layout, parameters: str, slope_from: str) -> None:
    problem = make_problem(kind, (3, 6, 5, 7), layout, "tanh", slope_from=slope_from)
    if parameters != "gamma":
        problem = problem._replace(gamma=None)
    if parameters != "beta":
        problem = problem._replace(beta=None)
    problem.check()
    _, cache = problem.forward()
    gradients = problem.backward(cache)
    assert gradients.dx is not None
    assert (gradients.dgamma is not None) == (parameters == "gamma")
    assert (gradients.dbeta is not None) == (parameters == "beta")


@pytest.mark.parametrize("slope_from", ["output", "input"])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "frozen"), [*((kind, False) for kind in KINDS), ("batch", True), ("instance", True)])
def test_given_statistics(kind: Kind, dtype: str, layout: cases.Layout, frozen: bool, slope_from: str) -> None:
    """Statistics that are not the data's own, with gradients through them, or as constants."""
    problem = make_problem(kind, (3, 6, 23, 29), layout, "leaky_relu", dtype=dtype, slope_from=slope_from)
    sets = reference.norm_forward(problem.x, **{k: v for k, v in problem.options.items() if k != "activation"}).mean
    rng = np.random.default_rng(1)
    problem = problem._replace(mean=rng.normal(0.2, 1, sets.shape), var=rng.uniform(0.2, 2, sets.shape), frozen=frozen)
    got = problem.check(threads=(1, 3))
    np.testing.assert_array_equal(got.mean, problem.mean)
    np.testing.assert_array_equal(got.var, problem.var)


def test_statistics_may_have_any_real_type() -> None:
    x = np.random.default_rng(2).normal(size=(4, 3, 5)).astype(np.float32)
    expected, _ = rg.batch_norm_forward(x, mean=np.array([1.0, 2, 3]), var=np.array([1.0, 4, 9]))
    for dtype in (np.float32, np.float16, np.int32, np.uint8, cases.storage_dtype("bfloat16"), ">f8"):
        y, _ = rg.batch_norm_forward(x, mean=np.array([1, 2, 3], dtype), var=np.array([1, 4, 9], dtype))
        np.testing.assert_array_equal(y, expected)
    y, _ = rg.batch_norm_forward(x, mean=[1, 2, 3], var=(1, 4, 9))
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("slope_from", ["output", "input"])
@pytest.mark.parametrize("activation", ["identity", "tanh"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_cache_without_a_forward_pass(frozen: bool, activation: str, slope_from: str) -> None:
    problem = make_problem("batch", (3, 6, 23, 29), "last", activation, slope_from=slope_from)
    rng = np.random.default_rng(3)
    mean, var = rng.normal(0.2, 1, 6), rng.uniform(0.2, 2, 6)
    problem = problem._replace(mean=mean, var=var, frozen=frozen)
    y, cache = problem.forward()
    y_if_needed = y if activation == "tanh" and slope_from == "output" else None
    options = {"channel_axis": 3, "activation": activation, "slope_from": slope_from, "frozen": frozen}
    made = rg.batch_norm_cache(problem.x, problem.gamma, problem.beta, mean=mean, var=var, y=y_if_needed, **options)
    assert_same_bits(problem.backward(made), problem.backward(cache))
    for mine, theirs in zip(
        rg.batch_norm_gradient_sums(problem.dy, made), rg.batch_norm_gradient_sums(problem.dy, cache), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    # By default gradients flow through the statistics.
    default = rg.batch_norm_cache(problem.x, mean=mean, var=var, channel_axis=3)
    assert not default.frozen
    empty = rg.batch_norm_cache(np.zeros((0, 3), np.float32), mean=np.zeros(3), var=np.ones(3))
    assert rg.batch_norm_backward(np.zeros((0, 3), np.float32), empty).dx is not None


def test_what_a_cache_keeps() -> None:
    problem = make_problem("batch", (3, 6, 5), activation="relu")
    y, cache = problem.forward()
    assert cache.y is y
    _, cache = problem._replace(slope_from="input").forward()
    assert cache.y is None
    assert cache.beta is problem.beta
    assert cache.x is problem.x


def test_the_same_pass_with_other_arrays() -> None:
    problem = make_problem("batch", (3, 6, 5), activation="tanh")
    y, cache = problem.forward()
    expected = problem.backward(cache)
    assert problem.gamma is not None
    copies = y.copy(), problem.gamma.copy(), None
    bare = cache.with_arrays(None, None, None)
    assert (bare.y, bare.gamma, bare.beta) == (None, None, None)
    same = bare.with_arrays(*copies)
    y[...], problem.gamma[...] = np.nan, np.nan  # which are not looked at any more
    got = rg.batch_norm_backward(problem.dy, same, need=("dx", "dgamma", "dbeta"))
    for name in rg.NormGradients._fields:
        assert_same_bits(getattr(got, name), getattr(expected, name))
    for wrong in (copies[0][:2], copies[0].astype(np.float16), copies[0].astype(np.float64), None):
        with pytest.raises(ValueError, match=r"y has|missing"):
            rg.batch_norm_backward(problem.dy, bare.with_arrays(wrong, copies[1], None), need="dx")


def test_a_cache_taken_apart() -> None:
    """A bare cache refers to none of the caller's arrays, and gives the same gradients with copies of them."""
    problem = make_problem("batch", (3, 6, 5), activation="tanh")
    y, cache = problem.forward()
    expected = problem.backward(cache)
    bare = cache.without_arrays()
    assert not any(part is array for part in bare for array in (problem.x, y, problem.gamma, problem.beta))
    assert problem.gamma is not None
    x, gamma = problem.x.copy(), np.repeat(problem.gamma, 2)[::2]  # a strided gamma is copied
    same = bare.with_arrays(x, y.copy(), gamma, problem.beta)
    y[...], problem.x[...] = np.nan, np.nan
    got = rg.batch_norm_backward(problem.dy, same, need=("dx", "dgamma", "dbeta"))
    for name in rg.NormGradients._fields:
        assert_same_bits(getattr(got, name), getattr(expected, name))
    with pytest.raises(ValueError, match=r"x has shape \(2, 6, 5\), but x has shape \(3, 6, 5\)"):
        bare.with_arrays(x[:2], y, gamma, None)
    with pytest.raises(TypeError, match="x has dtype float64"):
        bare.with_arrays(x.astype(np.float64), y, gamma, None)
    with pytest.raises(ValueError, match=r"gamma has shape \(5,\)"):
        bare.with_arrays(x, y, gamma[1:], None)


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_gradient_sums_with_the_slope_from_the_input(activation: str, layout: cases.Layout) -> None:
    """They are dbeta and dgamma, and give dx back."""
    problem = make_problem("batch", (3, 6, 23, 29), layout, activation, slope_from="input", reach=2)
    _, cache = problem.forward()
    gradients = problem.backward(cache)
    sums = rg.batch_norm_gradient_sums(problem.dy, cache)
    np.testing.assert_array_equal(sums.sum_dz.astype(np.float32), gradients.dbeta)
    np.testing.assert_array_equal(sums.sum_dz_xhat.astype(np.float32), gradients.dgamma)
    np.testing.assert_array_equal(rg.batch_norm_backward(problem.dy, cache, sums=sums).dx, gradients.dx)


def test_slope_from_input_at_the_kink_that_forward_saw() -> None:
    """z is made again to the bit, so backward is on the side of a kink that forward was on."""
    for kind, layout in itertools.product(KINDS, ("first", "last")):
        problem = make_problem(kind, (3, 6, 23, 29), layout, "relu", slope_from="input")
        for level in ISA_LEVELS:
            assert _core.select_isa(level)
            y, cache = problem.forward()
            _, by_output = problem._replace(slope_from="output").forward()
            assert np.count_nonzero(y == 0) > 100
            ours, theirs = problem.backward(cache), problem.backward(by_output)
            np.testing.assert_allclose(ours.dx, theirs.dx, rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(ours.dbeta, theirs.dbeta)


def test_slope_from_input_in_place_and_accumulated() -> None:
    problem = make_problem("layer", (64, 257), "first", "silu", slope_from="input")
    y, cache = problem.forward()
    expected = problem.backward(cache)
    x, dy = problem.x.copy(), problem.dy.copy()
    in_place = problem._replace(x=x, dy=dy)
    y_in_place, cache = in_place.forward(out=x)
    assert y_in_place is x
    got = in_place.backward(cache, out=rg.NormGradients(dx=dy))
    assert got.dx is dy
    assert_same_bits((x, *got), (y, *expected))
    total = [np.ones_like(a) for a in expected]
    problem.backward(problem.forward()[1], out=rg.NormGradients(*total), accumulate=True)
    for sums, gradient in zip(total, expected, strict=True):
        np.testing.assert_allclose(sums, gradient + 1, rtol=1e-6, atol=1e-6)


# ---- shapes and strides that hurt ------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=1000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=problems(), level=st.sampled_from(ISA_LEVELS), threads=st.sampled_from(THREADS))
def test_shapes_and_strides_that_hurt(drawn: tuple[Problem, str, str], level: str, threads: int) -> None:
    problem, y_memory, dx_memory = drawn
    assert _core.select_isa(level)
    inputs = [a.copy() for a in (problem.x, problem.dy, problem.gamma, problem.beta) if a is not None]
    order = tuple(reversed(range(problem.x.ndim)))

    def buffers() -> list[Array]:
        return [placed(np.full_like(inputs[0], math.nan), memory, order) for memory in (y_memory, dx_memory)]

    out, dx = buffers()
    got = problem.run(threads, out, dx)
    assert got.y is out
    assert got.dx is dx
    errors = problem.errors(got)
    # Equal numbers round alike, so where they are repeated (stride 0) the roundings of a sum of 16 do not cancel. And a
    # sum in double is longer where the arrays' axes do not join.
    arrays = (problem.x, problem.dy, out, dx)
    repeated = any(0 in a.strides and a.size for a in arrays)
    scattered = problem.x.dtype == np.float64 and not all(a.flags.c_contiguous for a in arrays)
    assert max(errors.values()) <= (4 if repeated else 1) * (4 if scattered else 1), errors
    for buffer in (out, dx):
        assert_untouched_around(buffer)
    assert_same_bits([a for a in (problem.x, problem.dy, problem.gamma, problem.beta) if a is not None], inputs)
    assert_same_bits(problem.run(1, *buffers()), got)


@pytest.mark.parametrize("kind", KINDS)
def test_transposed_views_are_what_their_shape_says(kind: Kind) -> None:
    """Channels last as a contiguous array or as a permuted view of one: the same memory, so the same bits."""
    problem = make_problem(kind, (3, 6, 23, 29), "last", "relu")
    if kind == "layer":
        problem = problem._replace(gamma=None, beta=None, axis=1)
        contiguous = problem._replace(x=problem.x.copy(), dy=problem.dy.copy())
        assert_same_bits(problem.run(), contiguous.run())
        return
    got = problem.run()

    def first(a: Array) -> Array:
        return np.moveaxis(a, -1, 1)

    permuted = problem._replace(x=first(problem.x), dy=first(problem.dy), channel_axis=1).run()
    assert_same_bits(permuted, got._replace(y=first(got.y), dx=first(got.dx)))
    # Results nobody gave memory for lie in memory as x does.
    assert permuted.y.strides == permuted.dx.strides == first(problem.x).strides


def test_rank_is_free() -> None:
    """Nine axes; the same numbers as with the axes of each kind joined."""
    rng = np.random.default_rng(3)
    x, dy = rng.normal(size=(2, 2, 3, 2, 1, 2, 3, 1, 2, 2)).astype(np.float32)
    deep = Problem("batch", x, dy, channel_axis=1).run()
    flat = Problem("batch", x.reshape(2, 3, -1), dy.reshape(2, 3, -1)).run()
    assert_same_bits(deep, flat._replace(y=flat.y.reshape(x.shape), dx=flat.dx.reshape(x.shape)))


# ---- the same bits ---------------------------------------------------------------------------------------------------

# Each takes another way through the engine: one set or many, sets larger and smaller than a block, more samples than
# partial sums, rows short and long, enough elements (131,072) to wake the team.
LARGE: dict[str, Problem] = {
    "planes": make_problem("batch", (16, 5, 40, 50), activation="tanh"),
    "one plane": make_problem("batch", (3, 1, 250, 250)),
    "columns": make_problem("batch", (2000, 81), "last", "sigmoid"),
    "many columns": make_problem("batch", (33, 4099), "last"),
    "columns of images": make_problem("batch", (7, 40, 23, 25), "last", dtype="float16"),
    "instances": make_problem("instance", (70, 3, 31, 27)),
    "one instance": make_problem("instance", (1, 2, 300, 300), activation="relu"),
    "instances last": make_problem("instance", (70, 32, 9, 9), "last"),
    "groups": make_problem("group", (9, 12, 40, 40), activation="softplus"),
    "groups last": make_problem("group", (5, 24, 40, 40), "last", num_groups=4),
    "one group": make_problem("group", (1, 8, 150, 150), num_groups=1),
    "short rows": make_problem("layer", (1500, 97), activation="elu", axis=1),
    "long rows": make_problem("layer", (19, 9001), axis=1),
    "one row": make_problem("layer", (1, 200_003), axis=1, dtype="float64"),
    "rows of images": make_problem("layer", (9, 8, 45, 50), axis=1, dtype="bfloat16"),
}


@pytest.mark.parametrize("name", LARGE)
def test_same_bits_at_any_number_of_threads_and_run_to_run(name: str, isa: str) -> None:
    problem = LARGE[name]
    assert problem.x.size >= 131_072
    expected = problem.run(1)
    for threads in (2, 3, 7, 2, 1):
        assert_same_bits(problem.run(threads), expected)
    rg.set_num_threads(5)
    assert_same_bits(problem.run(), expected)


@pytest.mark.parametrize("name", LARGE)
def test_large_problems(name: str) -> None:
    LARGE[name].check(threads=(2,))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("layout", ["first", "last"])
def test_same_bits_of_separate_calls(layout: cases.Layout, frozen: bool) -> None:
    """Statistics, and gradient sums, as calls of their own, at any number of threads."""
    problem = make_problem("batch", (12, 24, 25, 25), layout, "tanh", seed=3)
    y, cache = problem.forward(1)
    statistics = rg.batch_norm_statistics(problem.x, channel_axis=problem.channel_axis, num_threads=1)
    assert statistics.count == 12 * 25 * 25
    assert_same_bits(statistics[1:], (cache.mean, cache.var))
    gradients = problem.backward(cache, 1)
    sums = rg.batch_norm_gradient_sums(problem.dy, cache, num_threads=1)
    assert sums.count == statistics.count
    np.testing.assert_array_equal(sums.sum_dz.astype(np.float32), gradients.dbeta)
    np.testing.assert_array_equal(sums.sum_dz_xhat.astype(np.float32), gradients.dgamma)
    for threads in (2, 3, 7):
        again = rg.batch_norm_statistics(problem.x, channel_axis=problem.channel_axis, num_threads=threads)
        assert_same_bits(again[1:], statistics[1:])
        assert_same_bits(rg.batch_norm_gradient_sums(problem.dy, cache, num_threads=threads)[1:], sums[1:])
    assert cache.frozen is False
    given_options = {"training": not frozen, "channel_axis": problem.channel_axis, "activation": "tanh"}
    given_y, given_cache = rg.batch_norm_forward(
        problem.x, problem.gamma, problem.beta, mean=statistics.mean, var=statistics.var, **given_options
    )
    assert_same_bits([given_y], [y])
    if not frozen:
        assert_same_bits(rg.batch_norm_backward(problem.dy, given_cache), gradients)
        assert_same_bits([rg.batch_norm_backward(problem.dy, given_cache, sums=sums).dx], [gradients.dx])


def test_the_kind_of_a_problem_is_no_matter_of_the_function_that_made_it() -> None:
    x, statistics = np.ones((3, 4, 5), np.float32), {"mean": np.zeros(4), "var": np.ones(4)}
    _, cache = rg.batch_norm_forward(x)
    assert cache.problem.kind == "batch_norm"
    assert rg.batch_norm_cache(x, **statistics).problem is cache.problem
    assert cache.shape == x.shape
    assert cache.dtype == x.dtype
