"""The weights of layers in one common form, between the forms of all frameworks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Array",
    "Cell",
    "Conv",
    "ConvertError",
    "Embedding",
    "Layer",
    "Layers",
    "Linear",
    "Lstm",
    "Norm",
    "NormKind",
    "arrays_of",
    "checked",
    "describe",
    "gates",
    "mapped",
    "reordered",
    "stacked",
]

Array: TypeAlias = npt.NDArray[Any]
NormKind: TypeAlias = Literal["batch_norm", "layer_norm", "group_norm", "instance_norm"]
_DTYPES: Final = ("float16", "float32", "float64")


class ConvertError(ValueError):
    """Weights that cannot be converted without a guess or a loss. The message says why, and what to do."""


@dataclasses.dataclass
class Cell:
    """One direction of one LSTM layer: wx ``[4H, I]``, wh ``[4H, H]``, biases ``[4H]``.

    Gates are in the order i f g o. Frameworks with two biases add them: `b` goes with wx, `bh` with wh. The peephole is
    ``[4H]``, or ``[4H, H]`` if it is a full matrix for each gate, which only retrograd and BNNS have. That of the
    output gate reads the new cell state. That of gate g, too, only retrograd and BNNS have.
    """

    wx: Array
    wh: Array
    b: Array | None = None
    bh: Array | None = None
    peephole: Array | None = None

    @property
    def hidden(self) -> int:
        return int(self.wh.shape[1])

    @property
    def bias(self) -> Array | None:
        """The sum of both biases; if one of them is 0, exactly the other."""
        if self.b is None or self.bh is None:
            return self.bh if self.b is None else self.b
        return self.b + self.bh if self.b.any() and self.bh.any() else self.b if self.b.any() else self.bh

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

    def check(self, name: str) -> None:
        if self.wh.ndim != 2 or self.wh.shape[0] != 4 * self.hidden:
            shape = self.wh.shape
            what = {3: "a GRU", 1: "a plain RNN"}.get(shape[0] // max(shape[-1], 1), "not an LSTM")
            raise ConvertError(f"{name}: recurrent weights of shape {shape} are those of {what}; expected [4H, H]")
        rows = 4 * self.hidden
        if self.wx.ndim != 2 or self.wx.shape[0] != rows:
            raise ConvertError(f"{name}: input weights have shape {self.wx.shape}, expected ({rows}, inputs)")
        for what, array in (("bias", self.b), ("recurrent bias", self.bh), ("peephole", self.peephole)):
            full = what == "peephole" and array is not None and array.shape == self.wh.shape
            if array is not None and array.shape != (rows,) and not full:
                raise ConvertError(f"{name}: {what} has shape {array.shape}, expected {(rows,)}")


@dataclasses.dataclass
class Lstm:
    """Cells by layer, then by direction (one, or forward and backward)."""

    cells: list[list[Cell]]

    @property
    def directions(self) -> int:
        return len(self.cells[0])

    def check(self, name: str) -> None:
        for layer, cells in enumerate(self.cells):
            if len(cells) != self.directions:
                raise ConvertError(f"{name}: layer {layer} has {len(cells)} directions, layer 0 has {self.directions}")
            for cell in cells:
                cell.check(f"{name}, layer {layer}")
                for part in ("bias", "peephole"):
                    if (getattr(cell, part) is None) != (getattr(self.cells[0][0], part) is None):
                        raise ConvertError(f"{name}: some of its layers and directions have a {part}, others have none")
                width = self.directions * cell.hidden
                if cell.hidden != self.cells[0][0].hidden or (layer and cell.wx.shape[1] != width):
                    raise ConvertError(
                        f"{name}: layer {layer} has input weights of shape {cell.wx.shape} and hidden size "
                        f"{cell.hidden}, which does not follow {self.directions} x {self.cells[0][0].hidden} units"
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


Layer: TypeAlias = Lstm | Norm | Linear | Conv | Embedding
Layers: TypeAlias = dict[str, Layer]


def _check_bias(name: str, b: Array | None, outputs: int) -> None:
    if b is not None and b.shape != (outputs,):
        raise ConvertError(f"{name}: the bias has shape {b.shape}, but the weights need {(outputs,)}")


def checked(layers: Layers) -> Layers:
    """The layers, if their shapes fit together; arrays of bfloat16 as float32, which has the same values."""
    if not layers:
        raise ConvertError("there are no layers in it that retrograd has: LSTM, norms, linear, convolution, embedding")
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
    return [cell for cells in layer.cells for cell in cells] if isinstance(layer, Lstm) else [layer]


def arrays_of(layer: Layer) -> list[Array]:
    every = [getattr(holder, field.name) for holder in _holders(layer) for field in dataclasses.fields(holder)]
    return [array for array in every if isinstance(array, np.ndarray)]


def mapped(layer: Layer, function: Callable[[Array], Array]) -> Layer:
    """The layer with a function of each of its arrays."""

    def of(holder: Any) -> Any:
        values = {field.name: getattr(holder, field.name) for field in dataclasses.fields(holder)}
        arrays = {name: function(array) for name, array in values.items() if isinstance(array, np.ndarray)}
        return dataclasses.replace(holder, **arrays)

    if isinstance(layer, Lstm):
        return Lstm([[of(cell) for cell in cells] for cells in layer.cells])
    result: Layer = of(layer)
    return result


_LAYER_OF_STACK: Final = re.compile(r"(?:(.*)[._])?layer(\d+)$")


def stacked(layers: Layers) -> Layers:
    """LSTMs named NAME.layer0, NAME.layer1 and so on, as formats without stacks have them, as one of several layers."""
    stacks: dict[str, list[tuple[int, str, Lstm]]] = {}
    for name, layer in layers.items():
        if isinstance(layer, Lstm) and (match := _LAYER_OF_STACK.match(name)):
            stacks.setdefault(match[1] or "", []).append((int(match[2]), name, layer))
    whole: dict[str, str] = {}  # names of stacks by the names of their layers
    for stack, parts in stacks.items():
        parts.sort(key=lambda part: part[0])
        if len(parts) > 1 and [k for k, _, _ in parts] == list(range(len(parts))) and stack not in layers:
            whole.update((name, stack) for _, name, _ in parts)
    found: Layers = {}
    for name, layer in layers.items():
        if name not in whole:
            found[name] = layer
        elif whole[name] not in found:
            found[whole[name]] = Lstm([cells for _, _, part in stacks[whole[name]] for cells in part.cells])
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
    if isinstance(layer, Lstm):
        first = layer.cells[0][0]
        parts = [f"LSTM, {first.wx.shape[1]} inputs, {first.hidden} units"]
        parts += [f"{len(layer.cells)} layers"] * (len(layer.cells) > 1)
        parts += ["bidirectional"] * (layer.directions > 1) + ["no bias"] * (first.bias is None)
        parts += ["peepholes"] * (first.peephole is not None)
        return ", ".join(parts)
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
