"""Graphs in tests: cases of operations as functions, and graphs evaluated one node at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import retrograd as rg
from retrograd import graph
from retrograd.graph.operation import OPERATIONS
from retrograd.graph.tensor import CONSTANT, INPUT, VARIABLE, apply, compute
from retrograd.lab.cases import GraphActivation, GraphCase, graph_values, graph_view
from retrograd.lab.verify import fused_activation
from support.arrays import Array

# Results that have no gradient of their own: statistics, indices, gradients and caches.
ONE_RESULT = ("norm", "softmax_cross_entropy", "cosine_distance", "element_losses", "pool", "top_k")


def engine_attributes(case: GraphCase) -> dict[str, Any]:
    """The attributes of a case with retrograd's activations."""

    def changed(value: Any) -> Any:
        if isinstance(value, GraphActivation):
            return fused_activation(*value)
        if isinstance(value, tuple) and value and isinstance(value[0], GraphActivation):
            return rg.LstmActivations(*map(changed, value))
        return value

    return {name: changed(value) for name, value in case.attributes.items()}


def viewed(case: GraphCase, stored: Sequence[Any], library: Any = np) -> list[Any]:
    return [
        None if a is None or given is None else graph_view(a, given.memory, given.shape, library)
        for a, given in zip(stored, case.inputs, strict=True)
    ]


def computed(case: GraphCase, stored: Sequence[Array | None]) -> list[Array]:
    """The results of an operation on arrays, without a cache."""
    found = compute(OPERATIONS[case.operation], viewed(case, stored), engine_attributes(case))
    return [a for a in found if a.dtype != np.uint8]


def seeds_of(case: GraphCase, results: Sequence[Array]) -> list[Any]:
    """Gradients of the results, None for those that have none."""
    count = 1 if case.operation in ONE_RESULT else len(results)
    return [
        graph_values(r.shape, "any", r.dtype, 99 + k) if k < count and r.dtype.kind == "f" else None
        for k, r in enumerate(results)
    ]


def case_program(
    case: GraphCase, stored: Sequence[Array | None], seeds: Sequence[Array | None], wanted: Sequence[bool]
) -> tuple[graph.Program, list[Array]]:
    """A program that returns the results of an operation and the gradients of the wanted inputs; and its arguments."""
    present = [i for i, a in enumerate(stored) if a is not None]
    given = [i for i, seed in enumerate(seeds) if seed is not None]
    arguments = [stored[i] for i in present] + [seeds[i] for i in given]

    def function(*tensors: Any) -> Any:
        inputs: list[Any] = [None] * len(stored)
        for i, tensor in zip(present, tensors, strict=False):
            inputs[i] = tensor
        views = viewed(case, inputs, graph)
        results = apply(OPERATIONS[case.operation], views, engine_attributes(case))
        gradients: list[Any] = []
        wrt = [v for v, want in zip(views, wanted, strict=True) if want]
        if wrt and len(given) == 1:
            gradients = graph.gradients(results[given[0]], wrt, seed=tensors[len(present)])
        elif wrt:
            parts = [graph.sum(results[i] * s) for i, s in zip(given, tensors[len(present) :], strict=True)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            gradients = graph.gradients(total, wrt)
        return [[r for r in results if r.dtype != np.uint8], gradients]

    # Specs, because example arrays of integers stand for int64.
    specs = [graph.spec(a.shape, a.dtype) for a in arguments]  # type: ignore[union-attr]
    return graph.compile(function, *specs), arguments  # type: ignore[return-value]


def outcome(program: graph.Program, arguments: Sequence[Array], threads: int | None = None) -> list[Array]:
    """All results of a run as arrays, those without axes too."""
    found = program(*arguments, num_threads=threads)
    values: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for inner in value:
                collect(inner)
        else:
            values.append(value)

    collect(found)
    return [np.asarray(v, t.dtype) for v, t in zip(values, program.graph.outputs, strict=True)]


def evaluated(program: graph.Program, arguments: Sequence[Array]) -> list[Array]:
    """What the program returns, computed one node at a time by the functions of arrays."""
    values: dict[int, Array] = {}
    for tensor, array in zip(program.graph.inputs, arguments, strict=True):
        values[id(tensor)] = np.asarray(array)
    for node in program.graph.nodes:
        if node.operation is INPUT:
            continue
        if node.operation is CONSTANT:
            values[id(node.results[0])] = node.attributes["value"]
        elif node.operation is VARIABLE:
            values[id(node.results[0])] = node.attributes["variable"].value
        else:
            inputs = [None if t is None else values[id(t)] for t in node.inputs]
            for tensor, array in zip(node.results, compute(node.operation, inputs, node.attributes), strict=True):
                values[id(tensor)] = array
    return [values[id(tensor)] for tensor in program.graph.outputs]


def same_numbers(a: Array, b: Array) -> bool:
    """To the bit, but for which NaN it is."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    if a.dtype.kind != "f":
        return a.tobytes() == b.tobytes()
    bits = f"u{a.itemsize}"
    return bool(((a.view(bits) == b.view(bits)) | (np.isnan(a) & np.isnan(b))).all())
