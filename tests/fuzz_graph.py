"""Random graphs of operations, compiled with their gradients and compared with jax.numpy in float64.

The program's values and gradients must be those of JAX, the same bits with two threads and in a second run, and the
same bits as those of the functions, one node at a time.

    python tests/fuzz_graph.py --count 20000
    python tests/fuzz_graph.py --seed 1234 --count 1
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np

from retrograd import graph
from retrograd.lab.graphs import outcome
from support.fuzz_driver import Broken, main
from support.graphs import evaluated, same_numbers
from support.jaxpr import traced
from support.random_graphs import OfGraph, Plain, RandomGraph

# Of the largest element of a result. A graph has up to 15 nodes, and each may enlarge the roundings of those before it,
# by its derivative: the values are at most 50.
TOLERANCE = 1e-9


def jax_library() -> tuple[Any, Plain]:
    """JAX is only imported in the process that uses it: a fork of it would hang."""
    import jax

    jax.config.update("jax_enable_x64", True)
    return jax, Plain(jax.numpy, jax.scipy.special.erf, jax.lax.stop_gradient)


def compare(what: str, drawn: RandomGraph, got: Any, expected: Any) -> None:
    a, b = np.asarray(got), np.asarray(expected)
    if a.shape != b.shape:
        raise Broken(f"{what} has shape {a.shape}, JAX's {b.shape}\n{drawn!r}")
    size = max(1.0, float(np.abs(b).max(initial=0.0)))
    error = float(np.abs(a - b).max(initial=0.0)) / size
    if not error <= TOLERANCE:
        raise Broken(f"{what} differs by {error:.3g}\n{drawn!r}\ngot {a}\nexpected {b}")


def run(seed: int, tally: Counter[str]) -> None:
    jax, library = jax_library()
    drawn = RandomGraph(seed)
    ours = OfGraph(graph)

    def step(*tensors: Any) -> Any:
        total, shown = drawn.run(ours, tensors)
        found = graph.gradients(total, [tensors[i] for i in drawn.wrt]) if drawn.wrt else []
        return [total, *shown, *found]

    def loss(wanted: list[Any]) -> Any:
        inputs: list[Any] = list(drawn.inputs)
        for i, value in zip(drawn.wrt, wanted, strict=True):
            inputs[i] = value
        return drawn.run(library, inputs)

    program = graph.compile(step, *drawn.inputs)
    results = outcome(program, drawn.inputs, 1)
    (total, shown), gradients = traced(
        jax, jax.value_and_grad(loss, has_aux=True), [drawn.inputs[i] for i in drawn.wrt]
    )
    for what, got, expected in zip(
        ["the loss", *(f"node {i}" for i in drawn.shown), *(f"the gradient of input {i}" for i in drawn.wrt)],
        results, [total, *shown, *gradients], strict=True,
    ):  # fmt: skip
        compare(what, drawn, got, expected)
    for why, again in (
        ("with two threads", outcome(program, drawn.inputs, 2)),
        ("one node at a time", evaluated(program, drawn.inputs)),
    ):
        if not all(map(same_numbers, results, again)):
            raise Broken(f"other bits {why}\n{drawn!r}")
    tally["graphs"] += 1
    tally["nodes"] += len(drawn.nodes)
    tally["gradients"] += len(gradients)
    for node in drawn.nodes:
        if node is not None:
            tally[node.label.split()[0]] += 1


if __name__ == "__main__":
    sys.exit(main("retrograd.graph", run))
