"""Layers for tests of conversions, and their comparison bit by bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from retrograd.convert import Cell, Conv, Embedding, Layer, Layers, Linear, Lstm, Norm
from support.arrays import Array


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def lstm(
    inputs: int = 3,
    hidden: int = 4,
    layers: int = 1,
    directions: int = 1,
    *,
    halves: int = 1,
    peephole: str = "",
    dtype: Any = np.float32,
) -> Lstm:
    """An LSTM with no bias, one, or two; and peepholes of the gates that are named, or full matrices."""

    def cell(layer: int, direction: int) -> Cell:
        def draw(*shape: int) -> Array:
            return normal(*shape, seed=10 * layer + direction, dtype=dtype)

        columns = directions * hidden if layer else inputs
        b, bh = (draw(4 * hidden) if halves > k else None for k in range(2))
        gates: Array | None = None
        if peephole == "full":
            gates = draw(4 * hidden, hidden)
        elif peephole:
            gates = np.where([[gate in peephole] for gate in "ifgo"], draw(4, hidden), dtype(0)).reshape(-1)
        return Cell(draw(4 * hidden, columns), draw(4 * hidden, hidden), b, bh if bh is None else bh[::-1], gates)

    return Lstm([[cell(layer, direction) for direction in range(directions)] for layer in range(layers)])


def every_kind() -> Layers:
    """Layers of all kinds that every format but Core ML (which has no group norm) can hold."""
    return {
        "lstm": lstm(),
        "both": lstm(3, 2, directions=2),
        "batch": Norm("batch_norm", normal(3), normal(3, seed=1), normal(3, seed=2), abs(normal(3, seed=3))),
        "layer": Norm("layer_norm", normal(5), normal(5, seed=1)),
        "instance": Norm("instance_norm", normal(6), normal(6, seed=1)),
        "group": Norm("group_norm", normal(8), normal(8, seed=1), groups=4),
        "linear": Linear(normal(3, 2), normal(3)),
        "product": Linear(normal(4, 3)),
        "conv1": Conv(normal(4, 2, 3), normal(4), False, 1),
        "conv2": Conv(normal(5, 2, 3, 2), normal(5), False, 1),
        "up": Conv(normal(3, 4, 2), normal(4), True, 1),
        "up2": Conv(normal(3, 5, 2, 2), normal(5), True, 1),
        "table": Embedding(normal(7, 3)),
    }


def kinds_of(layers: Layers) -> dict[str, str]:
    """What ``--kind`` has to say of layers that a file of bare arrays does not tell apart."""
    kinds = {}
    for name, layer in layers.items():
        if isinstance(layer, Norm):
            kinds[name] = f"{layer.kind}" + (f":{layer.groups}" if layer.groups else "")
        elif isinstance(layer, Conv):
            kinds[name] = "conv_transpose" if layer.transposed else "conv"
        elif isinstance(layer, Embedding) or (isinstance(layer, Linear) and layer.b is None):
            kinds[name] = "embedding" if isinstance(layer, Embedding) else "linear"
    return kinds


def arrays(layer: Layer) -> dict[str, Array]:
    """The arrays of a layer by name; an LSTM's biases as one, as the formats with one bias have it."""
    found: dict[str, Array | None] = {}
    if isinstance(layer, Lstm):
        for number, cells in enumerate(layer.cells):
            for direction, cell in enumerate(cells):
                for part in ("wx", "wh", "bias", "peephole"):
                    found[f"{number}.{direction}.{part}"] = getattr(cell, part)
    else:
        found = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    return {name: array for name, array in found.items() if isinstance(array, np.ndarray)}


def assert_same_bits(a: Layers, b: Layers) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert type(a[name]) is type(b[name]), name
        first, second = arrays(a[name]), arrays(b[name])
        assert first.keys() == second.keys(), name
        for part, array in first.items():
            assert array.dtype == second[part].dtype, (name, part)
            assert array.shape == second[part].shape, (name, part)
            assert array.tobytes() == second[part].tobytes(), (name, part)
