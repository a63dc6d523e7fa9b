"""What tests of retrograd.mpsgraph share: graphs of one operation, and cases for every row of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from retrograd.mpsgraph import MPSDataType, MPSGraph, MPSGraphTensorData

TYPES = {
    np.dtype(np.float32): MPSDataType.float32,
    np.dtype(np.float64): MPSDataType.float64,
    np.dtype(np.int32): MPSDataType.int32,
    np.dtype(np.int64): MPSDataType.int64,
    np.dtype(np.bool_): MPSDataType.bool,
}


def placeholder(graph: Any, array: np.ndarray[Any, Any], name: str, unknown: bool = False) -> Any:
    shape = [-1] * array.ndim if unknown else list(array.shape)
    return graph.placeholder(shape=shape, dataType=TYPES[array.dtype], name=name)


def constant(graph: Any, value: Any, dtype: Any = np.int32) -> Any:
    array = np.asarray(value, dtype)
    shape = list(array.shape) or [1]
    return graph.constant(array.tobytes(), shape=shape, dataType=TYPES[array.dtype])


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


class Evaluated(NamedTuple):
    values: list[np.ndarray[Any, Any]]
    gradients: list[np.ndarray[Any, Any]]  # of the floating-point inputs
    seeds: list[np.ndarray[Any, Any]]


def evaluate(
    build: Callable[..., Any],
    arrays: Sequence[np.ndarray[Any, Any]],
    wrt: Sequence[int] = (),
    unknown: bool = False,
    graph: Any = None,
) -> Evaluated:
    """The results of an operation, and the gradients of sum(seed * result) over the results of floating point."""
    g = graph or MPSGraph()
    inputs = [placeholder(g, a, f"input {i}", unknown) for i, a in enumerate(arrays)]
    results = as_list(build(g, *inputs))
    feeds = {t: MPSGraphTensorData(a) for t, a in zip(inputs, arrays, strict=True)}
    found = g.run(feeds=feeds, targetTensors=results, targetOperations=None)
    values = [found[t].numpy() for t in results]
    rng = np.random.default_rng(7)
    seeds = [rng.normal(size=v.shape).astype(v.dtype) for v in values if v.dtype.kind == "f"]
    if not wrt:
        return Evaluated(values, [], seeds)
    loss = None
    chosen = (t for t, v in zip(results, values, strict=True) if v.dtype.kind == "f")
    for tensor, seed in zip(chosen, seeds, strict=True):
        weighted = g.multiplication(tensor, constant(g, seed, seed.dtype), name=None)
        total = g.reductionSum(with_=weighted, axes=None, name=None)
        one = g.reshape(total, shape=[1], name=None)
        loss = one if loss is None else g.addition(loss, one, name=None)
    targets = [inputs[i] for i in wrt]
    gradients = g.gradients(of=loss, with_=targets, name=None)
    found = g.run(feeds=feeds, targetTensors=[gradients[t] for t in targets], targetOperations=None)
    return Evaluated(values, [found[gradients[t]].numpy() for t in targets], seeds)
