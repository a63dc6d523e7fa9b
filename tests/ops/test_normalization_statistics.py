"""Normalization: running statistics, and statistics and sums of several workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd.lab import cases, reference
from retrograd.lab.cases import ACTIVATION_PARAMETERS
from retrograd.lab.verify import fused_activation
from support.arrays import assert_same_bits
from support.norm import FORWARD, Kind, Results, make_problem

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


def test_sums_of_any_alignment_and_stride() -> None:
    x = np.random.default_rng(5).standard_normal((7, 3)).astype(np.float32)
    _, cache = rg.batch_norm_forward(x, np.ones(3, np.float32), np.zeros(3, np.float32))
    sums = rg.batch_norm_gradient_sums(x, cache)
    expected = rg.batch_norm_backward(x, cache, sums=sums).dx
    unaligned = np.frombuffer(bytearray(33), np.float64, 3, offset=1)
    strided = np.zeros((3, 2))[:, 0]
    for values in (unaligned, strided):
        values[...] = sums.sum_dz_xhat
        given = rg.GradientSums(sums.count, sums.sum_dz, values)
        assert_same_bits([rg.batch_norm_backward(x, cache, sums=given).dx], [expected])


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
