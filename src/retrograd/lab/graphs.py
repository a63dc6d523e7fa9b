"""The cases of the operations of graphs, as functions of arrays and as programs with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .. import graph
from ..graph.operation import OPERATIONS
from ..graph.tensor import apply, compute
from ..ops.recurrent.types import CELL_TYPES, CellOptions
from .cases import GraphActivation, GraphCase, GraphCell, graph_values, graph_view
from .cases.types import Array
from .verify import fused_activation

__all__ = ["ONE_RESULT", "case_program", "computed", "engine_attributes", "outcome", "seeds_of", "viewed"]

# Operations whose other results have no gradient: statistics, indices, gradients and caches.
ONE_RESULT: Final = ("norm", "softmax_cross_entropy", "cosine_distance", "element_losses", "pool", "top_k")


def engine_attributes(case: GraphCase) -> dict[str, Any]:
    """The attributes of a case with retrograd's activations."""

    def changed(value: Any) -> Any:
        if isinstance(value, GraphActivation):
            return fused_activation(*value)
        if isinstance(value, GraphCell):
            activations = CELL_TYPES[value.cell].activations(*map(changed, value.activations))
            return CellOptions(value.cell, activations, *value[2:])
        return value

    return {name: changed(value) for name, value in case.attributes.items()}


def viewed(case: GraphCase, stored: Sequence[Any], library: Any = np) -> list[Any]:
    """The inputs of a case, of its stored arrays or tensors."""
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
    arguments = [a for a in (*stored, *seeds) if a is not None]

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

    # Specs, because example arrays of integers are taken as int64.
    return graph.compile(function, *(graph.spec(a.shape, a.dtype) for a in arguments)), arguments


def outcome(program: graph.Program, arguments: Sequence[Array], threads: int | None = None) -> list[Array]:
    """All results of a run as arrays, those without axes too."""
    values: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for inner in value:
                collect(inner)
        else:
            values.append(value)

    collect(program(*arguments, num_threads=threads))
    return [np.asarray(v, t.dtype) for v, t in zip(values, program.graph.outputs, strict=True)]
