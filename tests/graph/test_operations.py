"""Every operation of graphs: arrays and programs with gradients against the oracle, at every level and thread count.

The cases are in `retrograd.lab.cases.graph`, the oracle in `retrograd.lab.reference.graph`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core, graph
from retrograd.graph import OPERATIONS
from retrograd.lab import reference
from retrograd.lab.bounds import error_in_tolerances, graph_gradient_tolerances, graph_tolerances
from retrograd.lab.cases import GraphCase, graph_cases, graph_values
from retrograd.lab.graphs import case_program, computed, outcome, seeds_of, viewed
from support.arrays import Array
from support.graphs import evaluated, same_numbers

CASES: dict[str, list[GraphCase]] = {}
for _case in graph_cases():
    CASES.setdefault(_case.operation, []).append(_case)
THREADS = (1, 2, 7)
# The sign of a zero is that of IEEE arithmetic.
SIGNED = ("add", "subtract", "multiply", "divide", "negative", "absolute", "sqrt", "floor", "ceil", "round", "trunc")
SIGNED += ("sin", "tan", "arcsin", "arctan", "sinh", "tanh", "arcsinh", "arctanh", "expm1", "log1p", "erf", "arctan2")


def test_every_operation_has_an_oracle_and_cases() -> None:
    known = set(OPERATIONS)
    assert known - set(reference.GRAPH) - set(reference.GRAPH_ITSELF) == set()
    assert set(reference.GRAPH) - known == set()
    assert set(CASES) == set(reference.GRAPH)


def test_every_gradient_has_an_oracle() -> None:
    for name, rule in reference.GRAPH.items():
        assert (rule.vjp is not None) == (OPERATIONS[name].gradient is not None), name


def check(what: str, got: Array, expected: Any, tolerance: Any) -> None:
    exact = np.asarray(expected)
    assert got.shape == exact.shape, what
    assert (got.dtype.kind == "f") == (exact.dtype.kind == "f"), what
    if got.dtype.kind != "f":
        np.testing.assert_array_equal(got, exact, what)
        return
    with np.errstate(over="ignore"):  # beyond the largest number of the dtype
        exact = np.where(np.isinf(exact.astype(got.dtype)), exact.astype(got.dtype), exact)
    error = error_in_tolerances(got, exact, tolerance)
    assert error <= 1, f"{what}: {error:.3g} tolerances, got {got!r}, expected {exact!r}"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("operation", sorted(CASES))
def test_operation(operation: str, dtype: Any) -> None:
    for case in CASES[operation]:
        check_case(case, dtype)


def check_case(case: GraphCase, dtype: Any) -> None:
    rule = reference.GRAPH[case.operation]
    stored = case.arrays(dtype)
    inputs = viewed(case, stored)
    expected = rule.forward(*inputs, **case.attributes)
    tolerances = graph_tolerances(case.operation, rule, inputs, case.attributes, dtype)
    kept = [(e, t) for e, t in zip(expected, tolerances, strict=True) if e is not None]

    first = computed(case, stored)
    for k, (got, (exact, tolerance)) in enumerate(zip(first, kept, strict=True)):
        check(f"{case.name}, result {k}", got, exact, tolerance)
        if case.operation in SIGNED and got.dtype.kind == "f":
            zeros = np.asarray(exact) == 0
            assert (np.signbit(got) == np.signbit(exact))[zeros].all(), case.name

    seeds = [*seeds_of(case, first), *[None] * (len(expected) - len(first))]
    wanted = [False] * len(inputs)
    gradients: Any = []
    if case.gradients and rule.vjp is not None and any(s is not None for s in seeds):
        found = rule.vjp(seeds, expected, *inputs, **case.attributes)
        wanted = [g is not None and a.dtype.kind == "f" for g, a in zip(found, inputs, strict=True)]
        limits = graph_gradient_tolerances(case.operation, rule, seeds, inputs, case.attributes, dtype)
        gradients = [(g, t) for g, t, want in zip(found, limits, wanted, strict=True) if want]

    program, arguments = case_program(case, stored, seeds, wanted)
    before = outcome(program, arguments, 1)
    for got, one in zip(before, first, strict=False):
        assert same_numbers(got, one), f"{case.name}: the program's bits are not the function's"
    for k, (got, (exact, tolerance)) in enumerate(zip(before[len(first) :], gradients, strict=True)):
        check(f"{case.name}, gradient {k}", got, exact, tolerance)
    for got, one in zip(evaluated(program, arguments), before, strict=True):
        assert same_numbers(got, one), f"{case.name}: one node at a time there are other bits"

    for level in _core.isa_levels():
        _core.select_isa(level)
        for threads in THREADS:
            again = outcome(program, arguments, threads)
            assert all(map(same_numbers, again, before)), f"{case.name}: other bits at {level} with {threads} threads"
            rg.set_num_threads(threads)
            once = computed(case, stored)
            assert all(map(same_numbers, once, first)), f"{case.name}: other bits at {level} with {threads} threads"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "amsgrad", "rmsprop", "centered"])
def test_update(name: str, dtype: Any) -> None:
    """Three steps of each optimizer, of gradients that the program is given."""
    shapes = [(5, 7), (17,), ()]
    settings: dict[str, tuple[Any, Any, int, dict[str, Any]]] = {
        "sgd": (graph.SGD, reference.sgd_step, 0, {"weight_decay": 0.1}),
        "momentum": (graph.SGD, reference.sgd_step, 1, {"momentum": 0.9, "nesterov": True}),
        "adam": (graph.Adam, reference.adam_step, 2, {"beta1": 0.8}),
        "adamw": (graph.Adam, reference.adam_step, 2, {"weight_decay": 0.1, "decoupled": True}),
        "amsgrad": (graph.Adam, reference.adam_step, 3, {"eps": 1e-6}),
        "rmsprop": (graph.RMSProp, reference.rmsprop_step, 1, {"alpha": 0.9}),
        "centered": (graph.RMSProp, reference.rmsprop_step, 2, {"alpha": 0.9}),
    }
    make, step_of, states, options = settings[name]
    more = {"amsgrad": {"amsgrad": True}, "centered": {"centered": True}}.get(name, {})
    given = [[graph_values(s, "any", dtype, 10 * t + k) for k, s in enumerate(shapes)] for t in range(3)]
    before: list[Array] = []
    for level in _core.isa_levels():
        _core.select_isa(level)
        for threads in THREADS:
            parameters = [graph.Variable(graph_values(s, "any", dtype, 50 + k)) for k, s in enumerate(shapes)]
            optimizer = make(0.1, **options, **more)

            def step(*gradients: Any, optimizer: Any = optimizer, parameters: Any = parameters) -> None:
                optimizer.update(parameters, gradients)

            program = graph.compile(step, *given[0])
            for gradients in given:
                program(*gradients, num_threads=threads)
            found = [p.value.copy() for p in parameters]
            if not before:
                before = found
            assert all(map(same_numbers, found, before)), (level, threads)
    for k, got in enumerate(before):
        state: list[Any] = [graph_values(shapes[k], "any", dtype, 50 + k), *(np.zeros(shapes[k], dtype),) * states]
        for t, gradients in enumerate(given):
            counted = {"step": t + 1} if step_of is reference.adam_step else {}
            state = list(step_of(state[0], gradients[k], *state[1:], learning_rate=0.1, **counted, **options))
        # Three steps of a dozen operations each, on numbers of size 1.
        np.testing.assert_allclose(got, np.asarray(state[0], float), rtol=0, atol=100 * float(np.finfo(dtype).eps))
