"""Keras 3: weights in HDF5 files, alone (``.weights.h5``) or with a model's configuration (``.keras``)."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from .guard import check_archive
from .hdf5 import opened_hdf5
from .kinds import Kinds, chosen
from .layers import (
    Array,
    Cell,
    Conv,
    ConvertError,
    Embedding,
    Gru,
    GruKind,
    Layer,
    Layers,
    Linear,
    Lstm,
    Norm,
    NormKind,
    Recurrent,
    Rnn,
    recurrent_of,
    reordered,
)

__all__ = ["read_keras", "write_keras"]

# Keras names the groups of a file after the classes of layers: dense, dense_1, ...
_KINDS: Final[dict[str, str]] = {
    "batch_norm": "batch_normalization",
    "layer_norm": "layer_normalization",
    "group_norm": "group_normalization",
    "instance_norm": "group_normalization",  # with as many groups as channels
    "linear": "dense",
    "embedding": "embedding",
    "lstm": "lstm",
    "gru": "gru",
    "gru_after": "gru",
    "gru_before": "gru",
    "rnn": "simple_rnn",
    "rnn_tanh": "simple_rnn",
    "rnn_relu": "simple_rnn",
    "bidirectional": "bidirectional",
}
_RECURRENT: Final[dict[str, type[Recurrent]]] = {"lstm": Lstm, "gru": Gru, "simple_rnn": Rnn}
_ZRN: Final = (1, 0, 2)  # Keras's gates of a GRU are in the order z r n
_RNN_ACTIVATIONS: Final = {"tanh": "tanh", "relu": "relu", "sigmoid": "sigmoid", "linear": "identity"}
_NORMS: Final[dict[str, NormKind]] = {
    "batch_normalization": "batch_norm",
    "layer_normalization": "layer_norm",
    "group_normalization": "group_norm",
}
_CONV: Final = re.compile(r"conv[123]d(_transpose)?$")
_EPS: Final = 1e-3  # Keras's default
_STANDARD: Final = {"activation": "tanh", "recurrent_activation": "sigmoid", "merge_mode": "concat"}


def read_keras(path: Path, skipped: Callable[[str], bool], kinds: Kinds) -> Layers:
    if path.suffix != ".keras":
        with opened_hdf5(path) as file:
            return _Reader({}, skipped, kinds).model(file)
    with zipfile.ZipFile(path) as archive:
        check_archive(archive, path.stat().st_size)
        configs = dict(_configs(json.loads(archive.read("config.json")), ""))
        with opened_hdf5(archive.read("model.weights.h5")) as file:
            return _Reader(configs, skipped, kinds).model(file)


def _configs(model: Any, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The options of layers, by the names of their groups."""
    used: dict[str, int] = {}
    for layer in model["config"].get("layers", []):
        kind = _snake(layer["class_name"])
        number = used[kind] = used.get(kind, -1) + 1
        name = prefix + kind + (f"_{number}" if number else "")
        if "layers" in layer["config"]:
            yield from _configs(layer, f"{name}.")
        else:
            yield name, layer["config"]


def _snake(name: str) -> str:
    """batch_normalization for BatchNormalization, conv1d_transpose for Conv1DTranspose, lstm for LSTM."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts dense_2 before dense_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


class _Reader:
    def __init__(self, configs: dict[str, dict[str, Any]], skipped: Callable[[str], bool], kinds: Kinds) -> None:
        self._configs, self._skipped, self._kinds = configs, skipped, kinds

    def model(self, file: Any) -> Layers:
        if "vars" not in file and "layers" not in file:
            raise ConvertError("it is an HDF5 file, but not one of weights that Keras 3 saved")
        if _arrays(file):
            raise ConvertError("the model has weights of its own, outside its layers")
        groups = {name: group for name, group in file.items() if not name.startswith("optimizer")}
        return dict(self._layers(groups, ""))

    def _layers(self, groups: Any, prefix: str) -> Iterator[tuple[str, Layer]]:
        for name, group in sorted(groups.items(), key=lambda item: _natural(item[0])):
            # The state of a random generator is not a weight.
            if name in ("vars", "seed_generator"):
                continue
            if name == "layers":
                yield from self._layers(group, prefix)
                continue
            full = prefix + name
            if self._skipped(full):
                continue
            kind = self._kind(full, group)
            if kind is not None:
                layer = _layer(full, kind, group, self._configs.get(full))
                if isinstance(layer, Norm) and kind == "group_normalization" and self._given(full) == "instance_norm":
                    layer.kind, layer.groups = "instance_norm", None
                yield full, layer
            elif _arrays(group) or "cell" in group:
                raise _unknown(full, re.sub(r"_\d+$", "", name))
            else:
                yield from self._layers(group, f"{full}.")

    def _given(self, name: str) -> str | None:
        kind = chosen(self._kinds, name)
        return None if kind is None else kind.name

    def _kind(self, name: str, group: Any) -> str | None:
        """Keras's name for the kind of a layer. Groups have it, or the layer's name, in their name."""
        given = self._given(name)
        if given is not None:
            axes = len(_arrays(group)[0].shape) - 2 if _arrays(group) else 0
            convolutions = {"conv": f"conv{axes}d", "conv_transpose": f"conv{axes}d_transpose"}
            kind = {**_KINDS, **convolutions}[given]
            return "bidirectional" if kind in _RECURRENT and "forward_layer" in group else kind
        names = (name.rpartition(".")[2], str(group.get("vars", group).attrs.get("name", "")))
        kinds = (re.sub(r"_\d+$", "", text) for text in names)
        return next((kind for kind in kinds if kind in _KINDS.values() or _CONV.match(kind)), None)


def _layer(name: str, kind: str, group: Any, config: dict[str, Any] | None) -> Layer:
    if kind == "bidirectional" or kind in _RECURRENT:
        return _recurrent(name, kind, group, config or {})
    arrays = _arrays(group)
    if kind in _NORMS:
        return _norm(name, _NORMS[kind], arrays, config)
    if kind == "embedding" and len(arrays) == 1:
        return Embedding(arrays[0])
    if kind != "embedding" and len(arrays) in (1, 2):
        w, b = arrays[0], arrays[1] if len(arrays) == 2 else None
        if kind == "dense":
            return Linear(w.T, b)
        return Conv(_turned(w), b, kind.endswith("_transpose"), (config or {}).get("groups"))
    raise ConvertError(f"{name} is a Keras {kind}, but has {len(arrays)} arrays; --skip {name} leaves it out")


def _unknown(name: str, kind: str) -> ConvertError:
    return ConvertError(
        f"{name}: retrograd has no layer for weights of Keras's {kind}; --skip {name} leaves it out, or, if {kind} is "
        f"only a name, --kind {name}=linear says what it is, for example"
    )


def _arrays(group: Any) -> list[Array]:
    variables = group.get("vars", {})
    return [np.asarray(variables[str(k)]) for k in range(len(variables))]


def _turned(w: Array) -> Array:
    """Kernels ``[kernel, inputs, outputs]`` with channels first, outputs before inputs; or back."""
    return np.transpose(w, (w.ndim - 1, w.ndim - 2, *range(w.ndim - 2)))


def _recurrent(name: str, kind: str, group: Any, config: dict[str, Any]) -> Recurrent:
    options = {**config, **config.get("layer", {}).get("config", {})}
    both = kind == "bidirectional"
    groups = [group.get(part, {}) for part in ("forward_layer", "backward_layer")] if both else [group]
    if any("cell" not in cell or len(_arrays(cell["cell"])) not in (2, 3) for cell in groups):
        raise ConvertError(f"{name} is not a recurrent layer: it has no cell with two or three arrays")
    arrays = [_arrays(cell["cell"]) for cell in groups]
    cells = [[Cell(kernel.T, recurrent.T, *bias) for kernel, recurrent, *bias in arrays]]
    layer = recurrent_of(name, cells) if both else _RECURRENT[kind](cells)
    _check_standard(name, layer, options)
    if isinstance(layer, Rnn) and "activation" in options:
        layer.activation = _RNN_ACTIVATIONS[options["activation"]]
    if isinstance(layer, Gru):
        layer.kind = _gru_kind(name, layer, options.get("reset_after"))
        layer.cells = [[_gru_cell(_split_biases(cell)) for cell in cells] for cells in layer.cells]
    return layer


def _gru_kind(name: str, layer: Gru, reset_after: bool | None) -> GruKind | None:
    """Where the reset gate acts. The configuration says it, and a bias: it has two rows if the gate acts after."""
    bias = layer.cells[0][0].b
    if reset_after is None:
        return None if bias is None else "before" if bias.ndim == 1 else "after"
    if bias is not None and (bias.ndim == 2) != bool(reset_after):
        raise ConvertError(f"{name} has reset_after={reset_after!r}, but a bias of shape {bias.shape}")
    return "after" if reset_after else "before"


def _gru_cell(cell: Cell) -> Cell:
    """A cell with gates in the order r z n instead of Keras's, or the other way round."""
    b, bh = (None if half is None else reordered(half, _ZRN) for half in (cell.b, cell.bh))
    return Cell(reordered(cell.wx, _ZRN), reordered(cell.wh, _ZRN), b, bh)


def _split_biases(cell: Cell) -> Cell:
    if cell.b is None or cell.b.ndim == 1:
        return cell
    b, bh = cell.b
    return dataclasses.replace(cell, b=b, bh=bh)


def _check_standard(name: str, layer: Recurrent, options: dict[str, Any]) -> None:
    for option, standard in _STANDARD.items():
        found = options.get(option, standard)
        if isinstance(layer, Rnn) and option == "activation":
            if found not in _RNN_ACTIVATIONS:
                listed = ", ".join(_RNN_ACTIVATIONS)
                raise ConvertError(f"{name} has {option} {found!r}; those of a SimpleRNN here are {listed}")
        elif found != standard:
            raise ConvertError(f"{name} has {option} {found!r}; weights alone are those of {standard!r}")
    if options.get("go_backwards"):
        raise ConvertError(f"{name} reads time backwards, which only one direction of two can do here")


def _norm(name: str, kind: NormKind, arrays: list[Array], config: dict[str, Any] | None) -> Norm:
    statistics = 2 if kind == "batch_norm" else 0
    scale, center = True, True
    if config is not None:
        scale, center = config.get("scale", True), config.get("center", True)
    elif len(arrays) == statistics + 1:
        raise ConvertError(f"{name} has one of gamma and beta, and a .weights.h5 file does not say which; use .keras")
    elif len(arrays) == statistics:
        scale = center = False
    if len(arrays) != scale + center + statistics:
        raise ConvertError(f"{name} has {len(arrays)} arrays, expected {scale + center + statistics}")
    rest = iter(arrays)
    gamma, beta = next(rest) if scale else None, next(rest) if center else None
    mean, var = (next(rest), next(rest)) if statistics else (None, None)
    config = config or {}
    if config.get("rms_scaling"):
        raise ConvertError(f"{name} is an RMS norm (rms_scaling), which retrograd does not have")
    groups = config.get("groups") if kind == "group_norm" else None
    return Norm(kind, gamma, beta, mean, var, config.get("epsilon", _EPS), groups)


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_keras(path: Path, layers: Layers, ordered: bool) -> tuple[bytes, dict[str, str]]:
    """The content of a file for ``load_weights``, and the group of each layer.

    Keras finds weights by the kind and the order of layers. A layer that has such a name (``dense_1``) keeps it; the
    others are numbered, if their order is known.
    """
    import h5py

    if path.suffix == ".keras":
        raise ConvertError("a .keras file needs a model's configuration; write .weights.h5, for model.load_weights")
    parts = {name: _keras_groups(name or "the model", layer) for name, layer in layers.items()}
    places = _places({name: [kind for kind, _ in groups] for name, groups in parts.items()}, ordered)
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file.create_group("vars")
        for name, groups in parts.items():
            for place, (_, arrays_of) in zip(places[name], groups, strict=True):
                group = file.create_group("layers/" + place.replace(".", "/layers/"))
                for inner, arrays in arrays_of.items():
                    variables = group.create_group(f"{inner}vars")
                    for k, array in enumerate(arrays):
                        variables[str(k)] = array
    return content.getvalue(), {name: ", ".join(place) for name, place in places.items()}


def _places(kinds: dict[str, list[str]], ordered: bool) -> dict[str, list[str]]:
    """The groups of each layer, by the kinds of its parts."""
    named = {name for name, parts in kinds.items() if re.fullmatch(rf"([a-z]\w*\.)*{parts[0]}(_\d+)?", name)}
    named = {name for name in named if len(kinds[name]) == 1}
    taken = set(named)
    places = {name: [name] for name in named}
    for kind in dict.fromkeys(kind for name, parts in kinds.items() if name not in named for kind in parts):
        others = [name for name, parts in kinds.items() if name not in named and kind in parts]
        if len(others) > 1 and not ordered:
            raise ConvertError(
                f"Keras finds the weights of {', '.join(others)} by their order, which a .safetensors file does not "
                f"keep; say --rename {others[0]}={kind} --rename {others[1]}={kind}_1, in the order of the Keras model"
            )
    for name, parts in kinds.items():
        for kind in parts if name not in named else ():
            free = (kind + (f"_{k}" if k else "") for k in itertools.count())
            place = next(place for place in free if place not in taken)
            taken.add(place)
            places.setdefault(name, []).append(place)
    return places


def _keras_groups(name: str, layer: Layer) -> list[tuple[str, dict[str, list[Array]]]]:
    """The kind of a layer and the arrays of its group; a stack is several of Keras's."""
    if isinstance(layer, Recurrent):
        kind = next(kind for kind, type_ in _RECURRENT.items() if type_ is type(layer))
        inner = ["cell/"]
        if layer.directions == 2:
            kind, inner = "bidirectional", ["forward_layer/cell/", "backward_layer/cell/"]
        return [
            (kind, {part: _cell_arrays(name, layer, cell) for part, cell in zip(inner, cells, strict=True)})
            for cells in layer.cells
        ]
    if isinstance(layer, Norm):
        if layer.kind is None:
            raise ConvertError(f"{name} is a norm of an unknown kind; say --kind {name}=layer_norm, for example")
        if (layer.kind == "batch_norm") != (layer.mean is not None):
            raise ConvertError(f"{name}: in Keras batch norms have running statistics, and other norms have none")
        return [(_KINDS[layer.kind], {"": [array for array in layer.arrays().values() if array is not None]})]
    if isinstance(layer, Embedding):
        return [("embedding", {"": [layer.table]})]
    if isinstance(layer, Linear):
        return [("dense", {"": [layer.w.T, *([] if layer.b is None else [layer.b])]})]
    transposed = layer.is_transposed(name)
    if transposed and layer.group_count > 1:
        raise ConvertError(f"{name} has {layer.group_count} groups, which Keras's transposed convolution does not have")
    kind = f"conv{layer.w.ndim - 2}d" + "_transpose" * transposed
    back = np.transpose(layer.w, (*range(2, layer.w.ndim), 1, 0))
    return [(kind, {"": [back, *([] if layer.b is None else [layer.b])]})]


def _cell_arrays(name: str, layer: Recurrent, cell: Cell) -> list[Array]:
    if cell.peephole is not None:
        raise ConvertError(f"{name} has peepholes, which Keras's LSTM does not have")
    cell.refuse_projection(name, "Keras's LSTM")
    bias = cell.bias
    if isinstance(layer, Gru):
        cell = _gru_cell(cell)
        bias = cell.bias
        if cell.biases is not None and layer.known_kind(name) == "after":
            bias = np.stack(cell.biases)
    return [cell.wx.T, cell.wh.T, *([] if bias is None else [bias])]
