"""Graphs in tests: evaluated one node at a time, and compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrograd import graph
from retrograd.graph.tensor import CONSTANT, INPUT, VARIABLE, compute
from support.arrays import Array


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
