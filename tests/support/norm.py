"""Normalization problems: their arrays, their results from the engine and from the oracle, and the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from hypothesis import strategies as st

import retrograd as rg
from retrograd import _core
from retrograd.lab import bounds, cases, reference
from retrograd.lab.bounds import backward_bound, error_in_tolerances, forward_bound
from retrograd.lab.cases import ACTIVATION_PARAMETERS, FUSED_ACTIVATIONS, NormCase
from retrograd.lab.verify import fused_activation
from support.arrays import MEMORY, Array, assert_same_bits, placed, same_bits

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

    def errors(self, got: Results) -> dict[str, float]:
        """In units of the tolerances."""
        forward, bounds = self.oracle()
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

    def check(
        self, isa_levels: Iterable[str] = ISA_LEVELS, threads: Sequence[int] = (1,), at_most: float = 1
    ) -> Results:
        """Within so many tolerances at each level, and the same bits at all numbers of threads.

        Returns the last results.
        """
        measured: Results | None = None
        for level in isa_levels:
            assert _core.select_isa(level)
            got = self.run(threads[0])
            if measured is None or not all(map(same_bits, got, measured)):  # equal bits have equal errors
                measured, errors = got, self.errors(got)
            assert max(errors.values()) <= at_most, (level, errors)
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
