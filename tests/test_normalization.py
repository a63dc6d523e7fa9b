"""The engine against the oracle, other people's libraries, and itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx_cases import OnnxCase, collect_onnx_cases

import retrograd as rg
from retrograd import _core, cases, reference
from retrograd.cases import ACTIVATION_PARAMETERS, NormCase, backward_bound, error_in_tolerances, forward_bound
from retrograd.verify import fused_activation, verify_norm

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
        if self.kind == "layer":
            return words | {"axis": self.axis}
        if self.kind == "group":
            words["num_groups"] = self.num_groups
        if self.frozen:
            words["training"] = False
        return words | {"channel_axis": self.channel_axis}

    def forward(self, threads: int | None = None, out: Array | None = None) -> tuple[Array, rg.NormCache]:
        result: tuple[Array, rg.NormCache] = FORWARD[self.kind](
            self.x, self.gamma, self.beta, out=out, num_threads=threads, **self.call
        )
        return result

    def backward(self, cache: rg.NormCache, threads: int | None = None, **options: Any) -> rg.NormGradients:
        return BACKWARD[self.kind](self.dy, cache, num_threads=threads, **options)

    def run(self, threads: int | None = None, out: Array | None = None, dx: Array | None = None) -> Results:
        y, cache = self.forward(threads, out)
        gradients = self.backward(cache, threads, need=rg.NormGradients._fields, out=rg.NormGradients(dx))
        return Results(y, cache.mean, cache.var, *gradients)  # type: ignore[arg-type]

    def errors(self, got: Results) -> dict[str, float]:
        """In units of the tolerances."""
        forward = reference.norm_forward(self.x, self.gamma, self.beta, **self.options)
        bounds = forward_bound(
            self.x,
            self.gamma,
            self.beta,
            forward,
            lambda z: reference.activation_value(self.activation, z, self.alpha, self.act_beta),
            **self.options,
        )
        options = self.options | {"frozen": self.frozen}
        backward = reference.norm_backward(self.dy, self.x, got.y, self.gamma, **options)
        back_bounds = backward_bound(self.dy, self.x, self.gamma, backward, **options)
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

    def check(self, isa_levels: Iterable[str] = ISA_LEVELS, threads: Sequence[int] = (1,)) -> Results:
        """Within tolerance at each level, and the same bits at all numbers of threads. Returns the last results."""
        for level in isa_levels:
            assert _core.select_isa(level)
            got = self.run(threads[0])
            errors = self.errors(got)
            assert max(errors.values()) <= 1, (level, errors)
            for count in threads[1:]:
                assert_same_bits(self.run(count), got)
        return got


def assert_same_bits(got: Iterable[Array | None], expected: Iterable[Array | None]) -> None:
    for a, b in zip(got, expected, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


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
        **case.geometry,
    )


# ---- everything with everything --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("activation", ACTIVATION_PARAMETERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_norm_activation_layout_and_type(
    kind: Kind, activation: str, layout: cases.Layout, dtype: str
) -> None:
    """At every instruction-set level, within tolerance, and the same bits at 1, 2, 3 and 7 threads."""
    make_problem(kind, (3, 6, 23, 29), layout, activation, reach=3, dtype=dtype).check(threads=THREADS)


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

    monkeypatch.setattr("retrograd.normalization.batch_norm_forward", wrong)
    (row,) = verify_norm([NormCase("batch", (5, 7, 11))], ["scalar"], [1])
    assert not row.ok
    assert row.what == "y"
    assert row.error == row.errors.y > 1


@pytest.mark.parametrize("parameters", ["none", "gamma", "beta"])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_gamma_and_beta_are_optional(kind: Kind, layout: cases.Layout, parameters: str) -> None:
    problem = make_problem(kind, (3, 6, 5, 7), layout, "tanh")
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


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "frozen"), [*((kind, False) for kind in KINDS), ("batch", True), ("instance", True)]
)
def test_given_statistics(kind: Kind, dtype: str, layout: cases.Layout, frozen: bool) -> None:
    """Statistics that are not the data's own, with gradients through them, or as constants."""
    problem = make_problem(kind, (3, 6, 23, 29), layout, "leaky_relu", dtype=dtype)
    sets = reference.norm_forward(problem.x, **{k: v for k, v in problem.options.items() if k != "activation"}).mean
    rng = np.random.default_rng(1)
    problem = problem._replace(
        mean=rng.normal(0.2, 1, sets.shape), var=rng.uniform(0.2, 2, sets.shape), frozen=frozen
    )
    got = problem.check(threads=(1, 3))
    np.testing.assert_array_equal(got.mean, problem.mean)
    np.testing.assert_array_equal(got.var, problem.var)


def test_statistics_may_have_any_real_type() -> None:
    x = np.random.default_rng(2).normal(size=(4, 3, 5)).astype(np.float32)
    expected, _ = rg.batch_norm_forward(x, mean=np.array([1.0, 2, 3]), var=np.array([1.0, 4, 9]))
    for dtype in (np.float32, np.float16, np.int32, np.uint8, cases.storage_dtype("bfloat16"), ">f8"):
        y, _ = rg.batch_norm_forward(x, mean=np.array([1, 2, 3], dtype), var=np.array([1, 4, 9], dtype))
        np.testing.assert_array_equal(y, expected)
    y, _ = rg.batch_norm_forward(x, mean=[1, 2, 3], var=(1, 4, 9))  # type: ignore[arg-type]
    np.testing.assert_array_equal(y, expected)


# ---- shapes and strides that hurt ------------------------------------------------------------------------------------

# 1, primes, lanes of float and double at every level and one off, and more than a block.
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 63, 65, 127, 257, 1031, 4095, 4099)
LARGEST = 20_000
MEMORY = ("contiguous", "fortran", "permuted", "reversed", "every other", "padded", "in a field")


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


def placed(array: Array, memory: str, permutation: Sequence[int]) -> Array:
    """The same numbers, laid out in memory otherwise. Anything outside them is NaN."""

    def blank(shape: Sequence[int]) -> Array:
        return np.full(shape, math.nan, array.dtype)

    match memory:
        case "fortran":
            return np.asfortranarray(array)
        case "permuted":
            view = blank([array.shape[k] for k in permutation]).transpose(np.argsort(permutation))
        case "reversed":
            view = blank(array.shape)[(slice(None, None, -1),) * array.ndim]
        case "every other":
            view = blank([2 * extent for extent in array.shape])[(slice(None, None, 2),) * array.ndim]
        case "padded":
            view = blank([extent + 3 for extent in array.shape])[tuple(slice(1, 1 + e) for e in array.shape)]
        case "in a field":
            view = blank([*array.shape, 3])[..., 1]
        case _:
            return np.ascontiguousarray(array)
    view[...] = array
    return view


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
    activation = draw(st.sampled_from(["identity", "identity", "relu", "tanh", "leaky_relu"]))
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
    )
    return problem, draw(st.sampled_from(MEMORY)), draw(st.sampled_from(MEMORY))


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
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
    # Equal numbers round alike, so where they are repeated (stride 0) the roundings of a sum of 16 do not cancel.
    repeated = any(0 in a.strides and a.size for a in (problem.x, problem.dy))
    assert max(errors.values()) <= (4 if repeated else 1), errors
    for buffer in (out, dx):
        assert_untouched_around(buffer)
    assert_same_bits([a for a in (problem.x, problem.dy, problem.gamma, problem.beta) if a is not None], inputs)
    assert_same_bits(problem.run(1, *buffers()), got)


def assert_untouched_around(view: Array) -> None:
    """Whatever the view's memory holds beside the view is as `placed` left it: NaN."""
    base = view
    while isinstance(base.base, np.ndarray):
        base = base.base
    if base.size > view.size:
        saved = view.copy()
        view[...] = 0
        assert np.count_nonzero(~np.isnan(base)) == view.size
        view[...] = saved
