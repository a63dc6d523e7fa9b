"""The engine against the oracle, other people's libraries, and itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from arrays import MEMORY, assert_same_bits, assert_untouched_around, placed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx_cases import OnnxCase, collect_onnx_cases

import retrograd as rg
from retrograd import _core
from retrograd.lab import bounds, cases, reference
from retrograd.lab.bounds import backward_bound, error_in_tolerances, forward_bound
from retrograd.lab.cases import ACTIVATION_PARAMETERS, FUSED_ACTIVATIONS, NormCase
from retrograd.lab.verify import fused_activation, verify_norm

Array = np.ndarray[Any, Any]
Kind = Literal["batch", "instance", "layer", "group"]

KINDS: tuple[Kind, ...] = ("batch", "instance", "layer", "group")
DTYPES = ("float32", "float64", "float16", "bfloat16")
ISA_LEVELS = tuple(_core.isa_levels())
THREADS = (1, 2, 3, 7)

FORWARD: dict[str, Callable[..., Any]] = {
    "batch": rg.batch_norm_forward,
    "instance": rg.instance_norm_forward,
    "layer": rg.layer_norm_forward,
    "group": rg.group_norm_forward,
}
BACKWARD: dict[str, Callable[..., rg.NormGradients]] = {
    "batch": rg.batch_norm_backward,
    "instance": rg.instance_norm_backward,
    "layer": rg.layer_norm_backward,
    "group": rg.group_norm_backward,
}


class Results(NamedTuple):
    y: Array
    mean: Array
    var: Array
    dx: Array
    dgamma: Array
    dbeta: Array


class Oracle(NamedTuple):
    forward: reference.NormForward
    bounds: bounds.ForwardBound


class Problem(NamedTuple):
    """A call, forward and backward, in the words that the engine and the oracle share."""

    kind: Kind
    x: Array
    dy: Array
    gamma: Array | None = None
    beta: Array | None = None
    channel_axis: int = 1
    axis: int = -1
    num_groups: int = 1
    eps: float = 1e-5
    mean: Array | None = None
    var: Array | None = None
    frozen: bool = False
    activation: str = "identity"
    alpha: float = 0.0
    act_beta: float = 0.0
    slope_from: Literal["output", "input"] = "output"

    @property
    def options(self) -> dict[str, Any]:
        """For the oracle and the bounds."""
        names = ("kind", "channel_axis", "axis", "num_groups", "eps", "mean", "var", "activation", "alpha", "act_beta")
        return {name: getattr(self, name) for name in names}

    @property
    def call(self) -> dict[str, Any]:
        """For the engine."""
        words: dict[str, Any] = {"eps": self.eps, "mean": self.mean, "var": self.var}
        words["activation"] = fused_activation(self.activation, self.alpha, self.act_beta)
        words["slope_from"] = self.slope_from
        if self.kind == "layer":
            return words | {"axis": self.axis}
        if self.kind == "group":
            words["num_groups"] = self.num_groups
        if self.frozen:
            words["training"] = False
        return words | {"channel_axis": self.channel_axis}

    def forward(
        self, threads: int | None = None, out: Array | None = None, keep_x: Array | None = None
    ) -> tuple[Array, rg.NormCache]:
        result: tuple[Array, rg.NormCache] = FORWARD[self.kind](
            self.x, self.gamma, self.beta, out=out, keep_x=keep_x, num_threads=threads, **self.call
        )
        return result

    def backward(self, cache: rg.NormCache, threads: int | None = None, **options: Any) -> rg.NormGradients:
        return BACKWARD[self.kind](self.dy, cache, num_threads=threads, **options)

    def run(self, threads: int | None = None, out: Array | None = None, dx: Array | None = None) -> Results:
        y, cache = self.forward(threads, out)
        gradients = self.backward(cache, threads, need=rg.NormGradients._fields, out=rg.NormGradients(dx))
        return Results(y, cache.mean, cache.var, *gradients)

    def oracle(self) -> Oracle:
        forward = reference.norm_forward(self.x, self.gamma, self.beta, **self.options)
        bounds = forward_bound(
            self.x,
            self.gamma,
            self.beta,
            forward,
            lambda z: reference.activation_value(self.activation, z, self.alpha, self.act_beta),
            **self.options,
        )
        return Oracle(forward, bounds)

    def errors(self, got: Results, oracle: Oracle | None = None) -> dict[str, float]:
        """In units of the tolerances."""
        forward, bounds = self.oracle() if oracle is None else oracle
        options = self.options | {"frozen": self.frozen}
        backward = reference.norm_backward(
            self.dy, self.x, got.y, self.gamma, self.beta, slope_from=self.slope_from, **options
        )
        slope_error = self.slope_error(forward) if self.slope_from == "input" else None
        back_bounds = backward_bound(self.dy, self.x, self.gamma, backward, slope_error=slope_error, **options)
        errors = {
            "y": error_in_tolerances(got.y, forward.y, bounds.y),
            "dx": error_in_tolerances(got.dx, backward.dx, back_bounds.dx),
            "dgamma": error_in_tolerances(got.dgamma, backward.dgamma, back_bounds.dgamma),
            "dbeta": error_in_tolerances(got.dbeta, backward.dbeta, back_bounds.dbeta),
        }
        if self.mean is None:
            errors["mean"] = error_in_tolerances(got.mean, forward.mean, bounds.mean)
            errors["var"] = error_in_tolerances(got.var, forward.var, bounds.var)
        return errors

    def slope_error(self, forward: reference.NormForward) -> Array:
        def slope(z: Array) -> Array:
            return reference.activation_input_slope(self.activation, z, self.alpha, self.act_beta)

        return bounds.input_slope_error(self.x, self.gamma, self.beta, forward, slope, **self.options)

    def check(self, isa_levels: Iterable[str] = ISA_LEVELS, threads: Sequence[int] = (1,)) -> Results:
        """Within tolerance at each level, and the same bits at all numbers of threads. Returns the last results."""
        oracle = self.oracle()
        for level in isa_levels:
            assert _core.select_isa(level)
            got = self.run(threads[0])
            errors = self.errors(got, oracle)
            assert max(errors.values()) <= 1, (level, errors)
            for count in threads[1:]:
                assert_same_bits(self.run(count), got)
        return got


def make_problem(
    kind: Kind,
    shape: tuple[int, ...] = (3, 6, 23, 29),
    layout: cases.Layout = "first",
    activation: str = "identity",
    *,
    seed: int = 0,
    reach: float = 1.0,
    **options: Any,
) -> Problem:
    """Random data of a NormCase; gamma and beta times `reach`, to get to the far pieces of an activation."""
    alpha, beta = ACTIVATION_PARAMETERS[activation]
    options.setdefault("num_groups", 3 if kind == "group" else 1)
    case = NormCase(kind, shape, layout, activation, alpha, beta, **options)
    data = cases.make_norm_data(case, seed)
    r = data.gamma.dtype.type(reach)
    return Problem(
        x=data.x,
        dy=data.dy,
        gamma=data.gamma * r,
        beta=data.beta * r,
        activation=activation,
        alpha=alpha,
        act_beta=beta,
        slope_from=case.slope_from,
        **case.geometry,
    )


# ---- everything with everything --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
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
    for activation in ("gelu", "relu"):
        problem = make_problem(kind, shape, layout, activation, num_groups=num_groups, slope_from="input")
        problem.check(threads=(1, 3))


@pytest.mark.parametrize("slope_from", ["output", "input"])
def test_published_cases_are_of_both_kinds(slope_from: str) -> None:
    found = {case.activation for case in cases.NORM_VERIFY_CASES if case.slope_from == slope_from}
    assert found >= (set(FUSED_ACTIVATIONS) if slope_from == "output" else {"gelu", "silu", "closed_hard_sigmoid"})


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

# 1, primes, lanes of float and double at every level and one off, and more than a block.
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 63, 65, 127, 257, 1031, 4095, 4099)
LARGEST = 20_000


def shapes(rank: int) -> st.SearchStrategy[tuple[int, ...]]:
    """One extent at a time, none larger than what the others leave."""

    @st.composite
    def build(draw: st.DrawFn) -> tuple[int, ...]:
        left, extents = LARGEST, []
        for _ in range(rank):
            extent = draw(st.sampled_from([0, *(e for e in EXTENTS if e <= left)]))
            extents.append(extent)
            left //= max(extent, 1)
        return tuple(draw(st.permutations(extents)))

    return build()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, str, str]:
    """A problem, and the memory of y and of dx."""
    kind = draw(st.sampled_from(KINDS))
    rank = draw(st.integers(1 if kind == "layer" else 2, 5))
    shape = draw(shapes(rank))
    axis = draw(st.integers(0, rank - 1)) if kind == "layer" else -1
    channel_axis = draw(st.integers(0 if kind == "batch" else 1, rank - 1)) if kind != "layer" else 1
    channels = shape[channel_axis] if kind != "layer" else 1
    divisors = [g for g in range(1, max(channels, 1) + 1) if channels % g == 0]
    num_groups = draw(st.sampled_from(divisors)) if kind == "group" else 1
    dtype = cases.storage_dtype(draw(st.sampled_from(DTYPES)))
    arithmetic = np.float64 if dtype == np.float64 else np.float32
    activation = draw(st.sampled_from(["identity", "identity", "relu", "tanh", "leaky_relu", "silu", "abs"]))
    slope_from = draw(st.sampled_from(["output", "input"])) if activation in FUSED_ACTIVATIONS else "input"
    alpha, act_beta = ACTIVATION_PARAMETERS[activation]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    permutation = draw(st.permutations(range(rank)))

    arrays = []
    for _ in ("x", "dy"):
        drawn = shape
        if rank > 1 and draw(st.integers(0, 5)) == 0:  # stride 0 along one axis
            repeated = draw(st.integers(0, rank - 1))
            drawn = tuple(1 if k == repeated else extent for k, extent in enumerate(shape))
        ratio = draw(st.sampled_from([0.0, 0.5, 30.0]))
        array = placed((rng.normal(size=drawn) + ratio).astype(dtype), draw(st.sampled_from(MEMORY)), permutation)
        arrays.append(np.broadcast_to(array, shape))
    parameter_shape = shape[axis:] if kind == "layer" else (channels,)
    gamma, beta = (
        rng.normal(1, 0.5, size=(*parameter_shape, 2)).astype(arithmetic)[..., 0] if draw(st.booleans()) else None
        for _ in range(2)
    )
    problem = Problem(
        kind,
        *arrays,
        gamma=gamma,
        beta=beta,
        channel_axis=draw(st.sampled_from([channel_axis, channel_axis - rank])),
        axis=axis,
        num_groups=num_groups,
        eps=draw(st.sampled_from([1e-5, 1e-3])),
        activation=activation,
        alpha=alpha,
        act_beta=act_beta,
        slope_from=slope_from,
    )
    return problem, draw(st.sampled_from(MEMORY)), draw(st.sampled_from(MEMORY))


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
        problem = problem._replace(x=x)
        for level in ISA_LEVELS:
            _core.select_isa(level)
            errors = problem.errors(problem.run())
            assert max(errors.values()) <= 5, (level, distance, errors)


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
        errors = problem.errors(got)
        assert max(errors.values()) <= 1, (level, errors)


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


# ---- running statistics ----------------------------------------------------------------------------------------------

UPDATES = {
    "pytorch": (rg.RunningUpdate.pytorch(), 0.9, True),
    "pytorch 0.3": (rg.RunningUpdate.pytorch(0.3), 0.7, True),
    "keras": (rg.RunningUpdate.keras(), 0.99, False),
    "bnns": (rg.RunningUpdate.bnns(), 0.9, False),
    "bnns 0.6": (rg.RunningUpdate.bnns(momentum=0.6), 0.6, False),
    "own": (rg.RunningUpdate(keep=0.25, unbiased=True), 0.25, True),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_running_statistics(kind: Kind, name: str, dtype: Any) -> None:
    update, keep, unbiased = UPDATES[name]
    assert update.keep == pytest.approx(keep, abs=1e-15)
    assert update.unbiased is unbiased
    problem = make_problem(kind, (4, 3, 5, 2))
    rng = np.random.default_rng(12)
    # Strided, as fields of a larger state may be.
    state = np.stack([rng.normal(size=3), rng.uniform(0.5, 2, size=3)], axis=1).astype(dtype)
    running_mean, running_var = state[:, 0], state[:, 1]
    old = state.copy()
    y, cache = FORWARD[kind](problem.x, running_mean=running_mean, running_var=running_var, update=update)
    expected = reference.norm_forward(problem.x, kind=kind)
    count = 40 if kind == "batch" else 10
    new = reference.running_update(old[:, 0], old[:, 1], expected.mean, expected.var, count, keep, unbiased)
    # One rounding of the result; the batch's own statistics are off by a few u times their weight.
    tolerance = 2.0**-24 if dtype == np.float32 else 1e-7
    np.testing.assert_allclose(running_mean, new[0].astype(float), rtol=tolerance, atol=1e-6 * (1 - keep))
    np.testing.assert_allclose(running_var, new[1].astype(float), rtol=tolerance, atol=1e-6 * (1 - keep))
    # The running statistics had no part in y.
    assert_same_bits([y], [FORWARD[kind](problem.x)[0]])
    assert not cache.frozen


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_evaluation_uses_running_statistics_and_leaves_them(kind: Kind, layout: cases.Layout) -> None:
    problem = make_problem(kind, (4, 3, 5, 7), layout, "elu")
    rng = np.random.default_rng(13)
    running_mean, running_var = rng.normal(size=3).astype(np.float32), rng.uniform(0.5, 2, size=3).astype(np.float32)
    saved = running_mean.copy(), running_var.copy()
    y, cache = FORWARD[kind](
        problem.x,
        problem.gamma,
        problem.beta,
        training=False,
        running_mean=running_mean,
        running_var=running_var,
        channel_axis=problem.channel_axis,
        activation=fused_activation("elu", *ACTIVATION_PARAMETERS["elu"]),
    )
    assert_same_bits((running_mean, running_var), saved)
    sets = (3,) if kind == "batch" else (4, 3)
    given_problem = problem._replace(
        mean=np.broadcast_to(running_mean, sets), var=np.broadcast_to(running_var, sets), frozen=True
    )
    expected = given_problem.check()
    assert_same_bits((y, *problem.backward(cache)), (expected.y, expected.dx, expected.dgamma, expected.dbeta))


def test_given_statistics_enter_the_running_ones_with_their_count() -> None:
    x = np.random.default_rng(14).normal(size=(4, 3, 5)).astype(np.float32)
    running_mean, running_var = np.zeros(3), np.ones(3)
    options: dict[str, Any] = {"mean": np.full(3, 2.0), "var": np.full(3, 6.0)}
    rg.batch_norm_forward(x, running_mean=running_mean, running_var=running_var, count=4, **options)
    np.testing.assert_allclose(running_mean, 0.2)
    np.testing.assert_allclose(running_var, 0.9 + 0.1 * 6 * 4 / 3)
    running_mean, running_var = np.zeros(3), np.ones(3)
    rg.batch_norm_forward(x, running_mean=running_mean, running_var=running_var, **options)
    np.testing.assert_allclose(running_var, 0.9 + 0.1 * 6 * 20 / 19)


def test_of_one_element_only_the_biased_variance_exists() -> None:
    running_mean, running_var = np.zeros(3), np.ones(3)
    x = np.ones((1, 3), np.float32)
    rg.batch_norm_forward(x, running_mean=running_mean, running_var=running_var)
    np.testing.assert_allclose(running_var, 0.9)


# ---- statistics and sums of several workers --------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["identity", "tanh"])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("cuts", [(5,), (1, 4), (0, 3), (2, 2, 7)])
def test_synchronised_parts_equal_the_whole(cuts: tuple[int, ...], layout: cases.Layout, activation: str) -> None:
    whole = make_problem("batch", (8, 3, 5, 7), layout, activation, mean_over_std=10.0)
    expected = whole.check()
    options: dict[str, Any] = {"channel_axis": whole.channel_axis, "activation": activation}
    parts = [(x, dy) for x, dy in zip(np.split(whole.x, cuts), np.split(whole.dy, cuts), strict=True)]
    statistics = rg.combine_statistics(rg.batch_norm_statistics(x, channel_axis=whole.channel_axis) for x, _ in parts)
    assert statistics.count == 8 * 5 * 7
    np.testing.assert_allclose(statistics.mean, expected.mean, rtol=1e-7)
    np.testing.assert_allclose(statistics.var, expected.var, rtol=1e-6)
    done = [
        rg.batch_norm_forward(
            x, whole.gamma, whole.beta, mean=statistics.mean, var=statistics.var, count=statistics.count, **options
        )
        for x, _ in parts
    ]
    each = [rg.batch_norm_gradient_sums(dy, cache) for (_, dy), (_, cache) in zip(parts, done, strict=True)]
    sums = rg.GradientSums(
        sum(s.count for s in each),
        sum(s.sum_dz for s in each),
        sum(s.sum_dz_xhat for s in each),
    )
    assert sums.count == statistics.count
    gradients = [rg.batch_norm_backward(dy, cache, sums=sums) for (_, dy), (_, cache) in zip(parts, done, strict=True)]
    assert all(g.dgamma is None and g.dbeta is None for g in gradients)
    together = Results(
        np.concatenate([y for y, _ in done]),
        statistics.mean,
        statistics.var,
        np.concatenate([g.dx for g in gradients]),
        sums.sum_dz_xhat.astype(np.float32),
        sums.sum_dz.astype(np.float32),
    )
    errors = whole.errors(together)
    assert max(errors.values()) <= 1, errors


def test_combine_statistics_of_parts_of_all_sizes() -> None:
    rng = np.random.default_rng(15)
    x = rng.normal(1e5, 1, size=(100, 4))
    cuts = [0, 1, 1, 7, 50, 99]
    parts = [rg.NormStatistics(len(p), p.mean(axis=0), p.var(axis=0)) for p in np.split(x, cuts) if len(p)]
    nothing = rg.NormStatistics(0, np.zeros(4), np.zeros(4))
    for order in (parts, [nothing, *parts], [*parts, nothing], parts[::-1]):
        count, mean, var = rg.combine_statistics(order)
        assert count == 100
        np.testing.assert_allclose(mean, x.mean(axis=0), rtol=1e-15)
        np.testing.assert_allclose(var, x.var(axis=0), rtol=1e-9)
    assert rg.combine_statistics([parts[0]]) is not None
    assert rg.combine_statistics([nothing]).count == 0


# ---- in place, buffers, and what is left alone -----------------------------------------------------------------------


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


# ---- other people's libraries ----------------------------------------------------------------------------------------

ONNX_KINDS: dict[str, Kind] = {
    "BatchNormalization": "batch",
    "InstanceNormalization": "instance",
    "LayerNormalization": "layer",
    "GroupNormalization": "group",
}


@pytest.mark.parametrize("case", collect_onnx_cases(), ids=lambda case: case.name)
def test_onnx_node_cases(case: OnnxCase) -> None:
    x, gamma, beta, *running = case.inputs
    assert x is not None
    kind = ONNX_KINDS[case.op_type]
    options: dict[str, Any] = {"eps": case.attributes["epsilon"]}
    options |= {key: case.attributes[key] for key in ("axis", "num_groups") if key in case.attributes}
    if running:
        training = bool(case.attributes["training_mode"])
        running_mean, running_var = (np.array(r) for r in running)
        options |= {"running_mean": running_mean, "running_var": running_var, "training": training}
        options["update"] = rg.RunningUpdate(case.attributes["momentum"], unbiased=False)
    y, cache = FORWARD[kind](x, gamma, beta, **options)
    got = [y]
    if kind == "layer":
        ones = (1,) * (x.ndim - cache.mean.ndim)
        got += [cache.mean.reshape(cache.mean.shape + ones), cache.rstd.reshape(cache.rstd.shape + ones)]
    elif running and case.attributes["training_mode"]:
        got += [running_mean, running_var]
    assert len(got) == len(case.outputs)
    for mine, published in zip(got, case.outputs, strict=True):
        # The published numbers were computed in float32: a few of its units, 1.2e-7.
        np.testing.assert_allclose(mine, published, atol=5e-7, rtol=5e-7)


def torch_norm(torch: Any, problem: Problem, x: Any, gamma: Any, beta: Any) -> Any:
    f = torch.nn.functional
    if problem.kind == "batch":
        return f.batch_norm(x, None, None, gamma, beta, training=True, eps=problem.eps)
    if problem.kind == "instance":
        return f.instance_norm(x, None, None, gamma, beta, eps=problem.eps)
    if problem.kind == "group":
        return f.group_norm(x, problem.num_groups, gamma, beta, eps=problem.eps)
    return f.layer_norm(x, gamma.shape, gamma, beta, eps=problem.eps)


def torch_results(torch: Any, problem: Problem) -> dict[str, Array]:
    def tensor(a: Array | None) -> Any:
        t = torch.from_numpy(a)
        if problem.kind != "layer" and problem.channel_axis > 1 and a is not None and a.ndim > 1:
            t = t.movedim(-1, 1)  # channels last, as PyTorch knows it
        return t

    x, gamma, beta = (tensor(a).requires_grad_() for a in (problem.x, problem.gamma, problem.beta))
    y = torch_norm(torch, problem, x, gamma, beta)
    if problem.activation != "identity":
        owner = torch.nn.functional if problem.activation in ("gelu", "silu", "elu") else torch
        y = getattr(owner, problem.activation)(y)
    y.backward(tensor(problem.dy))

    def array(t: Any) -> Array:
        if problem.kind != "layer" and problem.channel_axis > 1 and t.ndim > 1:
            t = t.movedim(1, -1)
        result: Array = t.detach().numpy()
        return result

    return {"y": array(y), "dx": array(x.grad), "dgamma": array(gamma.grad), "dbeta": array(beta.grad)}


REALISTIC: dict[str, Problem] = {
    "batch": make_problem("batch", (16, 32, 28, 28)),
    "batch relu": make_problem("batch", (16, 32, 14, 14), activation="relu"),
    "batch tanh": make_problem("batch", (16, 32, 14, 14), activation="tanh"),
    "batch last": make_problem("batch", (16, 32, 28, 28), "last"),
    "batch matrix": make_problem("batch", (512, 256)),
    "batch matrix sigmoid": make_problem("batch", (512, 256), activation="sigmoid"),
    "instance": make_problem("instance", (8, 32, 28, 28)),
    "instance last": make_problem("instance", (8, 32, 28, 28), "last"),
    "layer": make_problem("layer", (512, 768), axis=1),
    "layer short": make_problem("layer", (2048, 64), axis=1),
    "group": make_problem("group", (8, 32, 28, 28), num_groups=8),
    "group last": make_problem("group", (8, 32, 28, 28), "last", num_groups=8),
}
BY_INPUT: dict[str, Problem] = {
    "batch gelu": make_problem("batch", (16, 32, 14, 14), activation="gelu", slope_from="input"),
    "batch last gelu": make_problem("batch", (16, 32, 14, 14), "last", "gelu", slope_from="input"),
    "group silu": make_problem("group", (8, 32, 14, 14), "first", "silu", num_groups=8, slope_from="input"),
    "layer silu": make_problem("layer", (512, 96), "first", "silu", axis=1, slope_from="input"),
    "instance tanh": make_problem("instance", (8, 32, 14, 14), activation="tanh", slope_from="input"),
}
HUGE_MEANS: dict[str, Problem] = {
    f"{name} mean/std {ratio:g}": make_problem(kind, shape, layout, mean_over_std=ratio, **options)
    for ratio in (1e2, 1e4, 1e6)
    for name, kind, shape, layout, options in [
        ("batch", "batch", (8, 16, 14, 14), "first", {}),
        ("batch last", "batch", (8, 16, 14, 14), "last", {}),
        ("instance", "instance", (8, 16, 14, 14), "first", {}),
        ("layer", "layer", (64, 768), "first", {"axis": 1}),
        ("group", "group", (8, 16, 14, 14), "first", {"num_groups": 4}),
        ("group last", "group", (8, 16, 14, 14), "last", {"num_groups": 4}),
    ]
}


@pytest.mark.parametrize("name", [*REALISTIC, *HUGE_MEANS])
def test_never_worse_than_pytorch(torch: Any, name: str, isa: str) -> None:
    """The largest error of each float32 result, against float64, is at most PyTorch's."""
    problem = (REALISTIC | HUGE_MEANS)[name]
    theirs = torch_results(torch, problem)
    ours = problem.run(1)._asdict()
    forward = reference.norm_forward(problem.x, problem.gamma, problem.beta, **problem.options)
    for result in ("y", "dx", "dgamma", "dbeta"):
        errors = []
        for got in (ours, theirs):
            if result == "y":
                exact = forward.y
            else:
                # The exact gradient of the function whose output is the float32 y that each of the two has.
                back = reference.norm_backward(problem.dy, problem.x, got["y"], problem.gamma, **problem.options)
                exact = getattr(back, result)
            errors.append(float(np.max(np.abs(got[result] - exact))))
        # Of two that are within a few roundings of the exact numbers it is chance which is nearer where they are
        # largest: 1 unit in the last place of the largest number.
        noise = float(np.spacing(np.float32(np.max(np.abs(exact)))))
        if isa == "scalar":  # has no fused multiply-add: one more rounding of the largest number
            noise *= 2
        assert errors[0] <= errors[1] + noise, (result, errors[0] / noise, errors[1] / noise)


@pytest.mark.parametrize("name", REALISTIC | BY_INPUT)
def test_gradients_agree_with_pytorch(torch: Any, name: str) -> None:
    problem = (REALISTIC | BY_INPUT)[name]
    theirs = torch_results(torch, problem)
    ours = problem.run(2)._asdict()
    for result, other in theirs.items():
        scale = float(np.max(np.abs(other)))
        np.testing.assert_allclose(ours[result], other, rtol=1e-4, atol=4e-6 * scale)


@pytest.mark.parametrize("kind", ["batch", "instance"])
@pytest.mark.parametrize("momentum", [0.1, 0.01])
def test_running_statistics_follow_pytorchs_module(torch: Any, kind: Kind, momentum: float) -> None:
    """Ten batches of training, then evaluation, forward and backward."""
    options: dict[str, Any] = {"momentum": momentum, "affine": True, "track_running_stats": True}
    make = torch.nn.BatchNorm2d if kind == "batch" else torch.nn.InstanceNorm2d
    module = make(5, **options)
    rng = np.random.default_rng(16)
    gamma, beta = rng.normal(size=(2, 5)).astype(np.float32)
    module.weight.data, module.bias.data = torch.from_numpy(gamma), torch.from_numpy(beta)
    running_mean, running_var = np.zeros(5, np.float32), np.ones(5, np.float32)
    words: dict[str, Any] = {"running_mean": running_mean, "running_var": running_var}
    for _ in range(10):
        x = rng.normal(3, 2, size=(4, 5, 6, 7)).astype(np.float32)
        module(torch.from_numpy(x))
        FORWARD[kind](x, gamma, beta, update=rg.RunningUpdate.pytorch(momentum), **words)
    np.testing.assert_allclose(running_mean, module.running_mean.numpy(), rtol=1e-6)
    np.testing.assert_allclose(running_var, module.running_var.numpy(), rtol=1e-6)
    module.eval()
    t = torch.from_numpy(x).requires_grad_()
    ty = module(t)
    dy = rng.normal(size=x.shape).astype(np.float32)
    ty.backward(torch.from_numpy(dy))
    y, cache = FORWARD[kind](x, gamma, beta, training=False, **words)
    gradients = BACKWARD[kind](dy, cache)
    np.testing.assert_allclose(y, ty.detach().numpy(), rtol=1e-5, atol=1e-5)
    for mine, other in zip(gradients, (t.grad, module.weight.grad, module.bias.grad), strict=True):
        np.testing.assert_allclose(mine, other.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["identity", "relu", "tanh", "sigmoid", "elu", "softplus"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_jax(jax: Any, kind: Kind, activation: str) -> None:
    jnp = jax.numpy
    problem = make_problem(kind, (4, 6, 5, 7), num_groups=3 if kind == "group" else 1, seed=17)
    if kind == "layer":
        problem = problem._replace(axis=3)
    functions = {
        "identity": lambda z: z,
        "relu": jax.nn.relu,
        "tanh": jnp.tanh,
        "sigmoid": jax.nn.sigmoid,
        "elu": jax.nn.elu,
        "softplus": jax.nn.softplus,
    }
    axes: Any = {"batch": (0, 2, 3), "instance": (2, 3), "layer": (3,), "group": (2, 3, 4)}[kind]
    spread = (7,) if kind == "layer" else (6, 1, 1)

    def forward(x: Any, gamma: Any, beta: Any) -> Any:
        blocks = x.reshape(4, 3, 2, 5, 7) if kind == "group" else x
        mean = blocks.mean(axis=axes, keepdims=True)
        var = ((blocks - mean) ** 2).mean(axis=axes, keepdims=True)
        xhat = ((blocks - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape)
        return functions[activation](gamma.reshape(spread) * xhat + beta.reshape(spread))

    y, pull = jax.vjp(forward, *(jnp.asarray(a) for a in (problem.x, problem.gamma, problem.beta)))
    assert y.dtype == np.float32
    theirs = pull(jnp.asarray(problem.dy))
    default = {"elu": (1.0, 0.0), "softplus": (1.0, 1.0)}.get(activation, (0.0, 0.0))
    ours = problem._replace(activation=activation, alpha=default[0], act_beta=default[1]).run()
    np.testing.assert_allclose(ours.y, y, rtol=1e-5, atol=1e-5)
    for mine, other in zip((ours.dx, ours.dgamma, ours.dbeta), theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=3e-5)


def test_the_kind_of_a_problem_is_no_matter_of_the_function_that_made_it() -> None:
    x, statistics = np.ones((3, 4, 5), np.float32), {"mean": np.zeros(4), "var": np.ones(4)}
    _, cache = rg.batch_norm_forward(x)
    assert cache.problem.kind == "batch_norm"
    assert rg.batch_norm_cache(x, **statistics).problem is cache.problem
    assert cache.shape == x.shape
    assert cache.dtype == x.dtype
