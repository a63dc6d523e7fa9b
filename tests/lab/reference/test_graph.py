"""The oracle of the operations of graphs, against finite differences along random directions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd.lab import reference
from retrograd.lab.cases import GraphCase, graph_cases, graph_view
from support.reference import slope_along

Array = npt.NDArray[Any]
CASES = graph_cases()
OPERATIONS = sorted({case.operation for case in CASES})
# Results that have no gradient of their own: statistics, indices, gradients and caches.
ONE_RESULT = ("norm", "softmax_cross_entropy", "cosine_distance", "element_losses", "pool", "top_k")
# Small, because many functions have kinks. Differences in long double, or in float64 where that is no wider, leave
# 1e-16 / STEP of the sum.
STEP = 1e-5
TOLERANCE = 1e-8


def inputs_of(case: GraphCase) -> list[Any]:
    stored = case.arrays(np.float64)
    return [
        None if a is None or given is None else graph_view(a, given.memory, given.shape)
        for a, given in zip(stored, case.inputs, strict=True)
    ]


def directions(case: GraphCase, results: Any, rng: np.random.Generator) -> list[Any]:
    """Gradients of the results, None where they have none."""
    count = 1 if case.operation in ONE_RESULT else len(results)
    return [
        rng.standard_normal(r.shape) if k < count and r is not None and r.dtype.kind == "f" else None
        for k, r in enumerate(results)
    ]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients_by_differences(operation: str) -> None:
    rule = reference.GRAPH[operation]
    compared = 0
    for case in CASES:
        if case.operation != operation or not case.smooth or not case.gradients or rule.vjp is None:
            continue
        inputs = inputs_of(case)
        rng = np.random.default_rng(len(case.name))
        results = rule.forward(*inputs, **case.attributes)
        dys = directions(case, results, rng)
        if all(dy is None for dy in dys):
            continue
        gradients = rule.vjp(dys, results, *inputs, **case.attributes)
        for k, (x, gradient) in enumerate(zip(inputs, gradients, strict=True)):
            if gradient is None:
                continue
            assert gradient.shape == x.shape, case.name
            direction = rng.standard_normal(x.shape)

            def loss(moved: Array, k: int = k, inputs: Any = inputs, case: Any = case, dys: Any = dys) -> Any:
                found = rule.forward(*inputs[:k], moved, *inputs[k + 1 :], **case.attributes)
                return sum((dy * y).sum() for dy, y in zip(dys, found, strict=True) if dy is not None)

            expected = slope_along(loss, x, direction, STEP)
            size = max(1.0, abs(expected), float(np.abs(gradient).sum()))
            assert abs(float((gradient * direction).sum()) - expected) <= TOLERANCE * size, (case.name, k)
            compared += 1
    # An operation with a derivative has a case that shows it.
    smooth = any(c.smooth and c.gradients for c in CASES if c.operation == operation)
    assert compared or rule.vjp is None or not smooth or operation == "cast"


def test_every_rule_has_a_case() -> None:
    assert {case.operation for case in CASES} == set(reference.GRAPH)
    assert not set(reference.GRAPH) & set(reference.GRAPH_ITSELF)
    assert len({case.name for case in CASES}) == len(CASES)


def test_gradients_at_kinks_and_ties() -> None:
    """Where there is no derivative, what is documented."""
    x, y = np.array([1.0, 2.0, 2.0, -1.0]), np.array([1.0, 1.0, 3.0, -1.0])
    ones = np.ones(4)

    def gradients(name: str, *inputs: Array, **attributes: Any) -> Any:
        rule = reference.GRAPH[name]
        assert rule.vjp is not None
        results = rule.forward(*inputs, **attributes)
        return rule.vjp([np.ones(results[0].shape), *[None] * (len(results) - 1)], results, *inputs, **attributes)

    da, db = gradients("maximum", x, y)
    np.testing.assert_array_equal(da, [0.5, 1, 0, 0.5])
    np.testing.assert_array_equal(db, [0.5, 0, 1, 0.5])
    (dx,) = gradients("max", x, axes=(0,), keepdims=False)
    np.testing.assert_array_equal(dx, [0, 0.5, 0.5, 0])
    (dx,) = gradients("relu", np.array([-1.0, 0.0, 1.0]))
    np.testing.assert_array_equal(dx, [0, 0, 1])
    (dx,) = gradients("prod", np.array([2.0, 0.0, 3.0]), axes=(0,), keepdims=False)
    np.testing.assert_array_equal(dx, [0, 6, 0])
    (dx,) = gradients("prod", np.array([0.0, 0.0, 3.0]), axes=(0,), keepdims=False)
    np.testing.assert_array_equal(dx, [0, 0, 0])
    da, db = gradients("power", np.array([0.0, 0.0, -2.0]), np.array([0.0, 1.0, 3.0]))
    np.testing.assert_array_equal(da, [0, 1, 12])
    np.testing.assert_array_equal(db, [0, 0, 0])
    _, da, db = gradients("where", np.array([True, False, True, False]), x * np.nan, ones)
    np.testing.assert_array_equal(da, [1, 0, 1, 0])
    np.testing.assert_array_equal(db, [0, 1, 0, 1])
