"""The weights of layers in one common form, between the forms of all frameworks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Array",
    "Cell",
    "Conv",
    "ConvertError",
    "Embedding",
    "Gru",
    "GruKind",
    "Layer",
    "Layers",
    "Linear",
    "Lstm",
    "Norm",
    "NormKind",
    "Recurrent",
    "Rnn",
    "arrays_of",
    "checked",
    "describe",
    "gates",
    "mapped",
    "recurrent_of",
    "reordered",
    "stacked",
]

Array: TypeAlias = npt.NDArray[Any]
NormKind: TypeAlias = Literal["batch_norm", "layer_norm", "group_norm", "instance_norm"]
GruKind: TypeAlias = Literal["after", "before"]
_DTYPES: Final = ("float16", "float32", "float64")


class ConvertError(ValueError):
    """Weights that cannot be converted without a guess or a loss. The message says why, and what to do."""


@dataclasses.dataclass
class Cell:
    """One direction of one recurrent layer: wx ``[GH, I]``, wh ``[GH, H]``, biases ``[GH]`` for G gates.

    Gates are in the order i f g o of an LSTM, r z n of a GRU. `b` goes with wx, `bh` with wh; only a GRU that resets
    after the product needs both, for all others frameworks add them. Only LSTMs have what follows. The peephole is
    ``[4H]``, or ``[4H, H]`` if it is a full matrix for each gate, which only retrograd and BNNS have. That of the
    output gate reads the new cell state. That of gate g, too, only retrograd and BNNS have. With a projection
    ``[P, H]``, which only retrograd and PyTorch have, wh is ``[4H, P]``.
    """

    wx: Array
    wh: Array
    b: Array | None = None
    bh: Array | None = None
    peephole: Array | None = None
    projection: Array | None = None

    @property
    def hidden(self) -> int:
        """The number of units."""
        return int((self.wh if self.projection is None else self.projection).shape[-1])

    @property
    def outputs(self) -> int:
        """The size of the hidden state."""
        return int(self.wh.shape[-1])

    @property
    def bias(self) -> Array | None:
        """The sum of both biases; if one of them is 0, exactly the other."""
        if self.b is None or self.bh is None:
            return self.bh if self.b is None else self.b
        return self.b + self.bh if self.b.any() and self.bh.any() else self.b if self.b.any() else self.bh

    @property
    def biases(self) -> tuple[Array, Array] | None:
        """Both biases, zeros for one that is not there; None without any."""
        if self.b is None and self.bh is None:
            return None
        zeros = np.zeros(len(self.wx), self.wx.dtype)
        return (zeros if self.b is None else self.b), (zeros if self.bh is None else self.bh)

    def ifo_peephole(self, name: str, framework: str) -> tuple[Array, Array, Array] | None:
        """The peepholes of gates i, f and o, for a framework that has no others."""
        if self.peephole is None:
            return None
        if self.peephole.ndim != 1:
            raise ConvertError(f"{name} has peepholes with full matrices; those of {framework} are vectors")
        i, f, g, o = gates(self.peephole)
        if g.any():
            raise ConvertError(f"{name} has a peephole of gate g, which {framework} does not have")
        return i, f, o

    def refuse_projection(self, name: str, framework: str) -> None:
        if self.projection is not None:
            raise ConvertError(f"{name} has a projection, which {framework} does not have")

    def check(self, name: str, gates: int, title: str) -> None:
        p = self.projection
        if p is not None and (p.ndim != 2 or not 0 < p.shape[0] <= p.shape[1] or p.shape[0] != self.outputs):
            raise ConvertError(f"{name}: a projection has shape {p.shape}, expected ({self.outputs}, hidden)")
        rows = gates * self.hidden
        if self.wh.ndim != 2 or not rows or self.wh.shape[0] != rows:
            form = f"[{gates}H, H]".replace("[1H", "[H")
            raise ConvertError(f"{name}: recurrent weights of {title} have shape {self.wh.shape}, expected {form}")
        if self.wx.ndim != 2 or self.wx.shape[0] != rows:
            raise ConvertError(f"{name}: input weights have shape {self.wx.shape}, expected ({rows}, inputs)")
        full = None if self.peephole is None else (rows, self.hidden)
        for what, array in (("bias", self.b), ("recurrent bias", self.bh), ("peephole", self.peephole)):
            if array is not None and array.shape != (rows,) and not (what == "peephole" and array.shape == full):
                raise ConvertError(f"{name}: {what} has shape {array.shape}, expected {(rows,)}")


@dataclasses.dataclass
class Recurrent:
    """Cells by layer, then by direction (one, or forward and backward)."""

    cells: list[list[Cell]]

    gates: ClassVar[int]
    title: ClassVar[str]
    everywhere: ClassVar[tuple[str, ...]] = ("bias", "peephole", "projection")  # in all cells or in none

    @property
    def directions(self) -> int:
        return len(self.cells[0])

    def options(self) -> tuple[Any, ...]:
        """What all layers of a stack have in common."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "cells")
        return type(self), self.directions, *values

    def check(self, name: str) -> None:
        first = self.cells[0][0]
        for layer, cells in enumerate(self.cells):
            if len(cells) != self.directions:
                raise ConvertError(f"{name}: layer {layer} has {len(cells)} directions, layer 0 has {self.directions}")
            for cell in cells:
                for part in self.everywhere:
                    if (getattr(cell, part) is None) != (getattr(first, part) is None):
                        raise ConvertError(f"{name}: some of its layers and directions have a {part}, others have none")
                cell.check(f"{name}, layer {layer}", self.gates, self.title)
                width = self.directions * cell.outputs
                sizes = (cell.hidden, cell.outputs)
                if sizes != (first.hidden, first.outputs) or (layer and cell.wx.shape[1] != width):
                    raise ConvertError(
                        f"{name}: layer {layer} has input weights of shape {cell.wx.shape} and hidden size "
                        f"{cell.hidden}, which does not follow {self.directions} x {first.outputs} units"
                    )


@dataclasses.dataclass
class Lstm(Recurrent):
    gates: ClassVar[int] = 4
    title: ClassVar[str] = "an LSTM"


@dataclasses.dataclass
class Gru(Recurrent):
    """`kind` says where the reset gate acts: after the recurrent product or before it; None where a file does not."""

    kind: GruKind | None = None
    everywhere: ClassVar[tuple[str, ...]] = ("b", "bh")
    gates: ClassVar[int] = 3
    title: ClassVar[str] = "a GRU"

    def known_kind(self, name: str) -> GruKind:
        """The kind, for formats that keep the two apart."""
        if self.kind is None:
            raise ConvertError(
                f"{name} is a GRU that resets after the recurrent product or before it, and its file does not say "
                f"which; say --kind {name}=gru_after or --kind {name}=gru_before"
            )
        return self.kind


@dataclasses.dataclass
class Rnn(Recurrent):
    """`activation` is None where a file does not say it: then it is tanh, every framework's default."""

    activation: str | None = None
    gates: ClassVar[int] = 1
    title: ClassVar[str] = "a plain RNN"


def recurrent_of(name: str, cells: list[list[Cell]]) -> Recurrent:
    """The layer that the shapes of cells are those of: files of arrays do not name it."""
    first = cells[0][0]
    if first.projection is not None or first.peephole is not None:
        return Lstm(cells)
    rows = first.wh.shape[0] if first.wh.ndim == 2 else 0
    for kind in (Lstm, Gru, Rnn):
        if rows and rows == kind.gates * first.hidden:
            return kind(cells)
    raise ConvertError(
        f"{name}: recurrent weights have shape {first.wh.shape}, expected [4H, H] for an LSTM, [3H, H] for a GRU or "
        "[H, H] for a plain RNN"
    )


@dataclasses.dataclass
class Norm:
    """gamma, beta and running statistics, each optional. `kind` is None where a file does not say it."""

    kind: NormKind | None
    gamma: Array | None = None
    beta: Array | None = None
    mean: Array | None = None
    var: Array | None = None
    eps: float | None = None
    groups: int | None = None
    batches: int | None = None  # how many updated the running statistics; only PyTorch keeps it

    def check(self, name: str) -> None:
        present = {part: array for part, array in self.arrays().items() if array is not None}
        shapes = {array.shape for array in present.values()}
        if len(shapes) > 1:
            listed = ", ".join(f"{part} {array.shape}" for part, array in present.items())
            raise ConvertError(f"{name}: the shapes of a norm's arrays differ: {listed}")
        if (self.mean is None) != (self.var is None):
            raise ConvertError(f"{name}: a running mean and a running variance belong together; only one is there")
        if not present:
            raise ConvertError(f"{name} is a norm without arrays")
        size = next(iter(present.values())).size
        if self.groups is not None and (self.groups < 1 or size % self.groups):
            raise ConvertError(f"{name}: {size} channels cannot be cut into {self.groups} groups")

    def arrays(self) -> dict[str, Array | None]:
        return {"gamma": self.gamma, "beta": self.beta, "mean": self.mean, "var": self.var}


@dataclasses.dataclass
class Linear:
    """w ``[outputs, inputs]``, b ``[outputs]``."""

    w: Array
    b: Array | None = None

    def check(self, name: str) -> None:
        if self.w.ndim != 2:
            raise ConvertError(f"{name}: the weights of a linear layer have shape {self.w.shape}, expected two axes")
        _check_bias(name, self.b, self.w.shape[0])


@dataclasses.dataclass
class Conv:
    """w ``[outputs, inputs / groups, kernel]``, transposed ``[inputs, outputs / groups, kernel]``; b ``[outputs]``.

    `transposed` and `groups` are None where a file does not determine them.
    """

    w: Array
    b: Array | None = None
    transposed: bool | None = None
    groups: int | None = None

    @property
    def group_count(self) -> int:
        """The number of groups; 1 where nothing determines it."""
        if self.groups is None and self.transposed and self.b is not None:
            return max(int(self.b.size // self.w.shape[1]), 1)
        return self.groups or 1

    def is_transposed(self, name: str) -> bool:
        """Whether it is transposed, for formats that keep the two apart."""
        if self.transposed is None:
            raise ConvertError(
                f"{name} has a weight of shape {self.w.shape}, of a convolution or of a transposed one; "
                f"say --kind {name}=conv or --kind {name}=conv_transpose"
            )
        return self.transposed

    def check(self, name: str) -> None:
        if self.w.ndim not in (3, 4, 5):
            raise ConvertError(f"{name}: the weights of a convolution have shape {self.w.shape}, expected 3 to 5 axes")
        groups = self.group_count
        if self.w.shape[0] % groups:
            raise ConvertError(f"{name}: {self.w.shape[0]} channels cannot be cut into {groups} groups")
        if self.transposed is not None:
            _check_bias(name, self.b, self.w.shape[1] * groups if self.transposed else self.w.shape[0])


@dataclasses.dataclass
class Embedding:
    """table ``[items, features]``."""

    table: Array

    def check(self, name: str) -> None:
        if self.table.ndim != 2:
            raise ConvertError(f"{name}: the table of an embedding has shape {self.table.shape}, expected two axes")


Layer: TypeAlias = Recurrent | Norm | Linear | Conv | Embedding
Layers: TypeAlias = dict[str, Layer]


def _check_bias(name: str, b: Array | None, outputs: int) -> None:
    if b is not None and b.shape != (outputs,):
        raise ConvertError(f"{name}: the bias has shape {b.shape}, but the weights need {(outputs,)}")


def checked(layers: Layers) -> Layers:
    """The layers, if their shapes fit together; arrays of bfloat16 as float32, which has the same values."""
    if not layers:
        raise ConvertError(
            "there are no layers in it that retrograd has: LSTM, GRU, RNN, norms, linear, convolution, embedding"
        )
    found: Layers = {}
    for name, layer in layers.items():
        found[name] = layer = mapped(layer, _widened_bfloat16)
        shown = name or "the model"
        layer.check(shown)
        dtypes = sorted({array.dtype.name for array in arrays_of(layer)})
        if len(dtypes) > 1:
            raise ConvertError(f"{shown} has arrays of {' and '.join(dtypes)}; those of one layer must have one dtype")
        if dtypes[0] not in _DTYPES:
            raise ConvertError(f"{shown} has arrays of {dtypes[0]}, must be one of {', '.join(_DTYPES)}")
    return found


def _widened_bfloat16(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _holders(layer: Layer) -> Iterable[Any]:
    """The objects whose fields are the arrays of a layer."""
    return [cell for cells in layer.cells for cell in cells] if isinstance(layer, Recurrent) else [layer]


def arrays_of(layer: Layer) -> list[Array]:
    every = [getattr(holder, field.name) for holder in _holders(layer) for field in dataclasses.fields(holder)]
    return [array for array in every if isinstance(array, np.ndarray)]


def mapped(layer: Layer, function: Callable[[Array], Array]) -> Layer:
    """The layer with a function of each of its arrays."""

    def of(holder: Any) -> Any:
        values = {field.name: getattr(holder, field.name) for field in dataclasses.fields(holder)}
        arrays = {name: function(array) for name, array in values.items() if isinstance(array, np.ndarray)}
        return dataclasses.replace(holder, **arrays)

    if isinstance(layer, Recurrent):
        return dataclasses.replace(layer, cells=[[of(cell) for cell in cells] for cells in layer.cells])
    result: Layer = of(layer)
    return result


_LAYER_OF_STACK: Final = re.compile(r"(?:(.*)[._])?layer(\d+)$")


def stacked(layers: Layers) -> Layers:
    """Layers named NAME.layer0, NAME.layer1 and so on, as formats without stacks have them, joined to one."""
    stacks: dict[str, list[tuple[int, str, Recurrent]]] = {}
    for name, layer in layers.items():
        if isinstance(layer, Recurrent) and (match := _LAYER_OF_STACK.match(name)):
            stacks.setdefault(match[1] or "", []).append((int(match[2]), name, layer))
    whole: dict[str, str] = {}  # names of stacks by the names of their layers
    for stack, parts in stacks.items():
        parts.sort(key=lambda part: part[0])
        numbered = len(parts) > 1 and [k for k, _, _ in parts] == list(range(len(parts)))
        if numbered and len({layer.options() for _, _, layer in parts}) == 1 and stack not in layers:
            whole.update((name, stack) for _, name, _ in parts)
    found: Layers = {}
    for name, layer in layers.items():
        if name not in whole:
            found[name] = layer
        elif whole[name] not in found:
            parts = stacks[whole[name]]
            found[whole[name]] = dataclasses.replace(parts[0][2], cells=[c for _, _, part in parts for c in part.cells])
    return found


# ---- gates -----------------------------------------------------------------------------------------------------------


def gates(array: Array, count: int = 4) -> list[Array]:
    """The arrays of each gate, along the first axis."""
    return list(array.reshape(count, -1, *array.shape[1:]))


def reordered(array: Array, order: Sequence[int]) -> Array:
    """The array with its gates, along the first axis, in another order: gate k of the result is ``order[k]``."""
    parts = gates(array, len(order))
    return np.concatenate([parts[k] for k in order])


# ---- words -----------------------------------------------------------------------------------------------------------


def describe(layer: Layer) -> str:
    if isinstance(layer, Recurrent):
        return _describe_recurrent(layer)
    if isinstance(layer, Norm):
        kind = (layer.kind or "norm").replace("_", " ")
        shape = next((a.shape for a in arrays_of(layer)), ())
        groups = f", {layer.groups} groups" if layer.groups else ""
        return f"{kind} {'x'.join(map(str, shape))}{groups}" + ", running statistics" * (layer.mean is not None)
    if isinstance(layer, Linear):
        return f"linear, {layer.w.shape[1]} inputs, {layer.w.shape[0]} outputs" + ", no bias" * (layer.b is None)
    if isinstance(layer, Embedding):
        return f"embedding, {layer.table.shape[0]} items, {layer.table.shape[1]} features"
    kinds = {True: "transposed convolution", False: "convolution", None: "convolution, transposed or not,"}
    groups = f", {layer.group_count} groups" if layer.group_count > 1 else ""
    return f"{kinds[layer.transposed]} {'x'.join(map(str, layer.w.shape))}{groups}" + ", no bias" * (layer.b is None)


def _describe_recurrent(layer: Recurrent) -> str:
    first = layer.cells[0][0]
    parts = [f"{type(layer).__name__.upper()}, {first.wx.shape[1]} inputs, {first.hidden} units"]
    if isinstance(layer, Gru) and layer.kind is not None:
        parts.append(f"reset {layer.kind} the product")
    if isinstance(layer, Rnn) and layer.activation is not None:
        parts.append(layer.activation)
    parts += [f"{first.outputs} projected"] * (first.projection is not None)
    parts += [f"{len(layer.cells)} layers"] * (len(layer.cells) > 1)
    parts += ["bidirectional"] * (layer.directions > 1) + ["no bias"] * (first.bias is None)
    parts += ["peepholes"] * (first.peephole is not None)
    return ", ".join(parts)
