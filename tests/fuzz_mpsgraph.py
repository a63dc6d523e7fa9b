"""Random graphs of single operations of MPSGraph, with operands made from the rows of its table.

A call is refused with an exception that names the operation, or it works; then a graph whose sizes are not known when
it is built gives the same bits, and gradients run or are refused. Nothing else may happen.

    python tests/fuzz_mpsgraph.py --count 100000 --jobs 2
    python tests/fuzz_mpsgraph.py --seed 1234 --count 1
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrograd import mpsgraph
from retrograd.mps._types import Setting
from retrograd.mpsgraph import MPSGraph, MPSGraphTensorData, _declare
from support.fuzz_driver import Broken, main
from support.mpsgraph import as_list, constant, placeholder

REFUSALS = (TypeError, ValueError, NotImplementedError, IndexError)
ROWS = [row for row in _declare.ROWS if not row.selector_only]
TYPES = (np.float32, np.float32, np.float32, np.float64, np.int32, np.int64, np.bool_)


def shape_of(random: np.random.Generator, rank: int | None = None) -> list[int]:
    rank = int(random.integers(0, 5)) if rank is None else rank
    return random.choice([0, 1, 2, 3, 4], rank, p=[0.05, 0.2, 0.35, 0.3, 0.1]).tolist()


def tensor(random: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    if dtype is np.bool_:
        return random.integers(0, 2, shape).astype(dtype)
    if np.dtype(dtype).kind == "i":
        return random.integers(-1, 4, shape).astype(dtype)
    return (random.normal(size=shape) * random.choice([1, 1, 1e3, 0])).astype(dtype)


def descriptor(random: np.random.Generator, kind: str) -> Any:
    cls = _declare._DESCRIPTORS[kind]
    made = cls()
    for name in dir(cls):
        if isinstance(getattr(cls, name), Setting) and random.random() < 0.3:
            try:
                setattr(made, name, option(random, "any"))
            except REFUSALS:
                continue
    return made


def option(random: np.random.Generator, kind: str) -> Any:
    """A value of a parameter that is not a tensor."""
    if random.random() < 0.03:
        return random.choice(np.array([None, "x", 1.5, [1], 2**70], object))
    if kind in _declare._DESCRIPTORS:
        return descriptor(random, kind)
    if kind in ("ints", "axes", "shape"):
        return random.integers(-1, 4, int(random.integers(0, 5))).tolist()
    if kind in ("float", "rate"):
        return float(random.choice([0.0, 0.25, 1.0, -2.0, np.inf]))
    if kind == "bool":
        return bool(random.integers(2))
    if kind == "dtype":
        return int(random.choice([int(t) for t in mpsgraph.MPSDataType]))
    if kind == "any" and random.random() < 0.3:
        return random.integers(0, 4, int(random.choice([4, 8]))).tolist()
    return int(random.integers(-2, 4))


class Call:
    """A row with arrays and options."""

    def __init__(self, random: np.random.Generator) -> None:
        self.row = ROWS[int(random.integers(len(ROWS)))]
        shape = shape_of(random, 4 if "conv" in self.row.selector.lower() or "ooling" in self.row.swift else None)
        dtype = TYPES[int(random.integers(len(TYPES)))]
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.values: list[Any] = []  # a tuple: arrays, by their indices
        for p in self.row.parameters:
            if p.kind == "name":
                self.values.append("op")
            elif p.kind in ("tensor", "tensors"):
                places = []
                for _ in range(1 if p.kind == "tensor" else int(random.integers(1, 4))):
                    other = shape if random.random() < 0.8 else shape_of(random)
                    index = np.int32 if p.name == "indices" else dtype
                    self.arrays.append(tensor(random, other, index))
                    places.append(len(self.arrays) - 1)
                self.values.append(None if p.optional and random.random() < 0.3 else (p.kind, places))
            elif p.kind.endswith("~"):
                self.values.append(("constant", option(random, p.kind.rstrip("~"))))
            else:
                self.values.append(None if p.optional and random.random() < 0.3 else option(random, p.kind))

    def build(self, unknown: bool) -> tuple[Any, list[Any], list[Any]]:
        graph = MPSGraph()
        inputs = [placeholder(graph, a, f"input {i}", unknown) for i, a in enumerate(self.arrays)]
        arguments = []
        for value in self.values:
            if not isinstance(value, tuple):
                arguments.append(value)
            elif value[0] == "constant":
                arguments.append(constant(graph, value[1]))
            else:
                chosen = [inputs[i] for i in value[1]]
                arguments.append(chosen if value[0] == "tensors" else chosen[0])
        return graph, inputs, as_list(_declare.call_row(graph, self.row, arguments))

    def run(self, graph: Any, inputs: list[Any], targets: list[Any]) -> list[np.ndarray[Any, Any]]:
        feeds = {t: MPSGraphTensorData(a) for t, a in zip(inputs, self.arrays, strict=True)}
        found = graph.run(feeds=feeds, targetTensors=targets, targetOperations=None)
        return [found[t].numpy() for t in targets]


def run(seed: int, tally: Counter[str]) -> None:
    random = np.random.default_rng(seed)
    call = Call(random)
    name = call.row.swift
    with np.errstate(all="ignore"):
        try:
            graph, inputs, results = call.build(False)
            values = call.run(graph, inputs, results)
        except (*REFUSALS, OverflowError) as error:
            tally[f"{name} refused"] += 1
            if not str(error):
                raise Broken(f"{name}: a refusal without words") from error
            return
        tally[f"{name} done"] += 1
        for tensor_, value in zip(results, values, strict=True):
            if tensor_.shape != list(value.shape):
                raise Broken(f"{name}: the shape is {tensor_.shape}, the result has {value.shape}")
        other = call.run(*call.build(True))
        for one, two in zip(values, other, strict=True):
            if one.tobytes() != two.tobytes() or one.shape != two.shape:
                raise Broken(f"{name}: other bits with unknown sizes")
        wrt = [t for t, a in zip(inputs, call.arrays, strict=True) if a.dtype.kind == "f"]
        floats = [t for t, v in zip(results, values, strict=True) if v.dtype.kind == "f"]
        if wrt and floats:
            try:
                gradients = graph.gradients(of=floats[0], with_=wrt[:1], name=None)
            except REFUSALS:
                tally["gradients refused"] += 1
                return
            (gradient,) = call.run(graph, inputs, list(gradients.values()))
            if list(gradient.shape) != wrt[0].shape:
                raise Broken(f"{name}: a gradient of shape {gradient.shape} for {wrt[0].shape}")
            tally["gradients done"] += 1


if __name__ == "__main__":
    sys.exit(main("retrograd.mpsgraph", run))
