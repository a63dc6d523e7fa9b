"""Layers for tests of conversions, and their comparison bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from retrograd import GruWeights, LstmWeights, RnnWeights, gru_forward, lstm_forward, rnn_forward
from retrograd.convert import Cell, Conv, Embedding, Gru, Layer, Layers, Linear, Lstm, Norm, Recurrent, Rnn
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
    projection: int = 0,
    dtype: Any = np.float32,
) -> Lstm:
    """An LSTM with no bias, one, or two; and peepholes of the gates that are named, or full matrices."""
    outputs = projection or hidden

    def cell(draw: Callable[..., Array], columns: int) -> Cell:
        b, bh = (draw(4 * hidden) if halves > k else None for k in range(2))
        gates: Array | None = None
        if peephole == "full":
            gates = draw(4 * hidden, hidden)
        elif peephole:
            gates = np.where([[gate in peephole] for gate in "ifgo"], draw(4, hidden), dtype(0)).reshape(-1)
        bh = bh if bh is None else bh[::-1]
        projected = draw(projection, hidden) if projection else None
        return Cell(draw(4 * hidden, columns), draw(4 * hidden, outputs), b, bh, gates, projected)

    return Lstm(_cells(cell, inputs, outputs, layers, directions, dtype))


def gru(
    inputs: int = 3,
    hidden: int = 4,
    layers: int = 1,
    directions: int = 1,
    *,
    kind: Any = "after",
    bias: bool = True,
    dtype: Any = np.float32,
) -> Gru:
    """A GRU; one that resets after the product has both biases."""

    def cell(draw: Callable[..., Array], columns: int) -> Cell:
        b, bh = (draw(3 * hidden) if bias else None, draw(3 * hidden)[::-1] if bias and kind != "before" else None)
        return Cell(draw(3 * hidden, columns), draw(3 * hidden, hidden), b, bh)

    return Gru(_cells(cell, inputs, hidden, layers, directions, dtype), kind)


def rnn(
    inputs: int = 3,
    hidden: int = 4,
    layers: int = 1,
    directions: int = 1,
    *,
    activation: str | None = None,
    bias: bool = True,
    dtype: Any = np.float32,
) -> Rnn:
    def cell(draw: Callable[..., Array], columns: int) -> Cell:
        return Cell(draw(hidden, columns), draw(hidden, hidden), draw(hidden) if bias else None)

    return Rnn(_cells(cell, inputs, hidden, layers, directions, dtype), activation)


def _cells(
    cell: Callable[[Callable[..., Array], int], Cell],
    inputs: int,
    outputs: int,
    layers: int,
    directions: int,
    dtype: Any,
) -> list[list[Cell]]:
    """The cells of a stack, each with arrays of its own."""
    return [
        [
            cell(partial(normal, seed=10 * layer + direction, dtype=dtype), directions * outputs if layer else inputs)
            for direction in range(directions)
        ]
        for layer in range(layers)
    ]


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
        elif isinstance(layer, Gru) and layer.cells[0][0].bias is None:
            kinds[name] = f"gru_{layer.kind}"
        elif isinstance(layer, Rnn) and layer.activation is not None:
            kinds[name] = f"rnn_{layer.activation}"
        elif isinstance(layer, Embedding) or (isinstance(layer, Linear) and layer.b is None):
            kinds[name] = "embedding" if isinstance(layer, Embedding) else "linear"
    return kinds


def arrays(layer: Layer) -> dict[str, Array]:
    """The arrays of a layer by name; biases as one, as formats with one bias have it, unless both are needed."""
    found: dict[str, Array | None] = {}
    if isinstance(layer, Recurrent):
        biases = ("b", "bh") if isinstance(layer, Gru) and layer.kind == "after" else ("bias",)
        for number, cells in enumerate(layer.cells):
            for direction, cell in enumerate(cells):
                for part in ("wx", "wh", *biases, "peephole", "projection"):
                    found[f"{number}.{direction}.{part}"] = getattr(cell, part)
    else:
        found = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    return {name: array for name, array in found.items() if isinstance(array, np.ndarray)}


def assert_same_bits(a: Layers, b: Layers) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert type(a[name]) is type(b[name]), name
        if isinstance(a[name], Gru):
            assert a[name].kind == b[name].kind, name  # type: ignore[union-attr]
        first, second = arrays(a[name]), arrays(b[name])
        assert first.keys() == second.keys(), name
        for part, array in first.items():
            assert array.dtype == second[part].dtype, (name, part)
            assert array.shape == second[part].shape, (name, part)
            assert array.tobytes() == second[part].tobytes(), (name, part)


def computed(layer: Layer, x: Array, **options: Any) -> Array:
    """What a recurrent layer computes with the array functions, from zero states."""
    if isinstance(layer, Lstm):
        cells: Any = [LstmWeights(c.wx, c.wh, c.bias, c.peephole, c.projection) for row in layer.cells for c in row]
        return lstm_forward(x, cells, bidirectional=layer.directions == 2, **options).y
    if isinstance(layer, Gru):
        assert layer.kind is not None
        cells = [GruWeights(c.wx, c.wh, c.b, c.bh) for row in layer.cells for c in row]
        return gru_forward(x, cells, bidirectional=layer.directions == 2, kind=layer.kind, **options).y
    assert isinstance(layer, Rnn)
    cells = [RnnWeights(c.wx, c.wh, c.bias) for row in layer.cells for c in row]
    activation = layer.activation or "tanh"
    return rnn_forward(x, cells, bidirectional=layer.directions == 2, activation=activation, **options).y
