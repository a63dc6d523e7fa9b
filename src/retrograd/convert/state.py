"""Layers in named arrays: the state of PyTorch modules and of retrograd.nn, and arrays per gate as in BNNS."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from .kinds import Kind, Kinds, chosen
from .layers import (
    Array,
    Cell,
    Conv,
    ConvertError,
    Embedding,
    Gru,
    Layer,
    Layers,
    Linear,
    Lstm,
    Norm,
    Recurrent,
    Rnn,
    gates,
    recurrent_of,
)

__all__ = ["from_bnns", "from_native", "from_torch_state", "to_bnns", "to_native", "to_torch_state"]


def _norm(name: str, parts: Mapping[str, Array], names: tuple[str, str, str, str]) -> Norm:
    """A norm; `names` are the names of gamma, beta, running mean and variance."""
    others = [part for part in parts if part not in names]
    if others:
        raise ConvertError(f"{name} has {', '.join(parts)}: {', '.join(others)} do not belong to a norm")
    gamma, beta, mean, var = (parts.get(part) for part in names)
    return Norm(None, gamma, beta, mean, var)


def _weights(w: Array, b: Array | None) -> Linear | Conv:
    return Linear(w, b) if w.ndim == 2 else Conv(w, b)


def _joined(layers: Layers, arrays: Callable[[str, Layer], Mapping[str, Array | None]]) -> dict[str, Array]:
    """The arrays of all layers, each with its layer's name before its own."""
    return {
        f"{name}.{part}" if name else part: array
        for name, layer in layers.items()
        for part, array in arrays(name or "the model", layer).items()
        if array is not None
    }


def _by_layer(state: Mapping[str, Array], suffix: re.Pattern[str]) -> dict[str, dict[str, Array]]:
    """The arrays by layer, and by what comes after the layer's name."""
    found: dict[str, dict[str, Array]] = {}
    for name, array in state.items():
        match = suffix.search(name)
        if match is None:
            raise ConvertError(
                f"{name}: no layer that retrograd has keeps an array of this name; --skip {name} leaves it out"
            )
        found.setdefault(name[: match.start()].rstrip("."), {})[match[0].lstrip(".")] = array
    return found


# ---- PyTorch ---------------------------------------------------------------------------------------------------------

_TORCH: Final = re.compile(
    r"(^|\.)((weight|bias)_(ih|hh|hr)_l\d+(_reverse)?|weight|bias|running_mean|running_var|num_batches_tracked)$"
)


def from_torch_state(state: Mapping[str, Array], kinds: Kinds) -> Layers:
    """Layers of a ``state_dict``. What its names and shapes do not determine, `kinds` decides."""
    return {name: _torch_layer(name, parts, kinds) for name, parts in _by_layer(state, _TORCH).items()}


def _torch_layer(name: str, parts: dict[str, Array], kinds: Kinds) -> Layer:
    shown = name or "the model"
    if "weight_ih_l0" in parts:
        return _torch_recurrent(shown, parts)
    weight, bias, kind = parts.get("weight"), parts.get("bias"), chosen(kinds, name)
    same_shape = weight is not None and bias is not None and weight.shape == bias.shape
    if weight is None or weight.ndim == 1 or same_shape or "running_mean" in parts:
        batches = parts.pop("num_batches_tracked", None)
        norm = _norm(shown, parts, ("weight", "bias", "running_mean", "running_var"))
        norm.batches = None if batches is None else int(batches)
        return norm
    if others := parts.keys() - {"weight", "bias"}:
        raise ConvertError(f"{shown} has a weight of shape {weight.shape} and {', '.join(sorted(others))}")
    if weight.ndim == 2 and bias is None:
        if kind not in (Kind("linear"), Kind("embedding")):
            raise ConvertError(
                f"{shown} has a weight of shape {weight.shape} and no bias: a linear layer or an embedding; "
                f"say --kind {name}=linear or --kind {name}=embedding"
            )
        return Linear(weight) if kind.name == "linear" else Embedding(weight)
    return _weights(weight, bias)


def _torch_recurrent(name: str, parts: dict[str, Array]) -> Recurrent:
    directions = ("", "_reverse") if "weight_ih_l0_reverse" in parts else ("",)
    cells: list[list[Cell]] = []
    left = dict(parts)
    while f"weight_ih_l{len(cells)}" in parts:
        suffixes = [f"_l{len(cells)}{direction}" for direction in directions]
        try:
            cells.append(
                [
                    Cell(
                        left.pop(f"weight_ih{suffix}"),
                        left.pop(f"weight_hh{suffix}"),
                        left.pop(f"bias_ih{suffix}", None),
                        left.pop(f"bias_hh{suffix}", None),
                        None,
                        left.pop(f"weight_hr{suffix}", None),
                    )
                    for suffix in suffixes
                ]
            )
        except KeyError as missing:
            raise ConvertError(f"{name} has no {missing.args[0]}") from None
    if left:
        raise ConvertError(f"{name} has {', '.join(left)}, which do not belong to its {len(cells)} layers")
    layer = recurrent_of(name, cells)
    if isinstance(layer, Gru):
        layer.kind = "after"  # PyTorch has no other
    return layer


def to_torch_state(layers: Layers) -> dict[str, Array]:
    return _joined(layers, _torch_arrays)


def _torch_arrays(name: str, layer: Layer) -> Mapping[str, Array | None]:
    if isinstance(layer, Recurrent):
        if isinstance(layer, Gru) and layer.known_kind(name) != "after":
            raise ConvertError(
                f"{name} is a GRU that resets before the recurrent product; PyTorch's resets after it, and no weights "
                "make the two the same"
            )
        if isinstance(layer, Rnn) and layer.activation not in (None, "tanh", "relu"):
            raise ConvertError(f"{name} has the activation {layer.activation}; PyTorch's RNN has tanh or relu")
        state: dict[str, Array | None] = {}
        for number, cells in enumerate(layer.cells):
            for cell, direction in zip(cells, ("", "_reverse"), strict=False):
                if cell.peephole is not None:
                    raise ConvertError(f"{name} has peepholes, which PyTorch's LSTM does not have")
                suffix = f"_l{number}{direction}"
                state[f"weight_ih{suffix}"], state[f"weight_hh{suffix}"] = cell.wx, cell.wh
                state[f"bias_ih{suffix}"], state[f"bias_hh{suffix}"] = cell.biases or (None, None)
                state[f"weight_hr{suffix}"] = cell.projection
        return state
    if isinstance(layer, Norm):
        batches = None if layer.mean is None else np.array(layer.batches or 0, np.int64)
        statistics = {"running_mean": layer.mean, "running_var": layer.var, "num_batches_tracked": batches}
        return {"weight": layer.gamma, "bias": layer.beta, **statistics}
    if isinstance(layer, Embedding):
        return {"weight": layer.table}
    return {"weight": layer.w, "bias": layer.b}


# ---- retrograd.nn ----------------------------------------------------------------------------------------------------

_NATIVE: Final = re.compile(
    r"(^|\.)(layer\d+(_reverse)?:(wx|wh|b|bh|peephole|projection|gamma_[xhc]|beta_c)"
    r"|w|b|gamma|beta|running_mean|running_var|table|stream)$"
)
_CELL: Final = re.compile(r"layer(\d+)(_reverse)?:(\w+)$")


def from_native(state: Mapping[str, Array]) -> Layers:
    """Layers of the state of a ``retrograd.nn`` module."""
    layers: Layers = {}
    for name, parts in _by_layer(_with_cells(state), _NATIVE).items():
        parts.pop("stream", None)  # of dropout: not a weight
        if parts:
            layers[name] = _native_layer(name or "the model", parts)
    return layers


def _with_cells(state: Mapping[str, Array]) -> dict[str, Array]:
    """The state with a mark in the names of recurrent cells: another layer may be named layer0, too."""
    cells = {name.removesuffix(".wx") for name in state if name.endswith(".wx")}
    return {
        f"{name.rpartition('.')[0]}:{name.rpartition('.')[2]}" if name.rpartition(".")[0] in cells else name: array
        for name, array in state.items()
    }


def _native_layer(name: str, parts: dict[str, Array]) -> Layer:
    if any(_CELL.match(part) for part in parts):
        return _native_recurrent(name, parts)
    if "table" in parts:
        return Embedding(parts["table"])
    if "w" in parts:
        return _weights(parts["w"], parts.get("b"))
    return _norm(name, parts, ("gamma", "beta", "running_mean", "running_var"))


def _native_recurrent(name: str, parts: dict[str, Array]) -> Recurrent:
    found: dict[tuple[int, int], dict[str, Array]] = {}
    for part, array in parts.items():
        match = _CELL.match(part)
        if match is None:
            raise ConvertError(f"{name} has {part}, which does not belong to a recurrent layer")
        if match[3].startswith(("gamma_", "beta_")):
            raise ConvertError(f"{name} has layer normalization inside the recurrence, which no other format has")
        found.setdefault((int(match[1]), int(match[2] is not None)), {})[match[3]] = array

    layers, directions = (range(1 + max(key[axis] for key in found)) for axis in (0, 1))

    def cell(layer: int, direction: int) -> Cell:
        arrays = found.get((layer, direction), {})
        if not {"wx", "wh"} <= arrays.keys():
            raise ConvertError(f"{name}, layer {layer}, direction {direction}: wx or wh is missing")
        return Cell(**arrays)

    layer = recurrent_of(name, [[cell(layer, direction) for direction in directions] for layer in layers])
    first = layer.cells[0][0]
    if isinstance(layer, Gru) and first.bias is not None:  # only one that resets after the product has two
        layer.kind = "before" if first.bh is None else "after"
    return layer


def to_native(layers: Layers) -> dict[str, Array]:
    return _joined(layers, _native_arrays)


def _native_arrays(name: str, layer: Layer) -> Mapping[str, Array | None]:
    if isinstance(layer, Recurrent):
        state: dict[str, Array | None] = {}
        for number, cells in enumerate(layer.cells):
            for cell, direction in zip(cells, ("", "_reverse"), strict=False):
                b, bh = cell.bias, None
                if isinstance(layer, Gru) and cell.biases is not None and layer.known_kind(name) == "after":
                    b, bh = cell.biases
                named = {"wx": cell.wx, "wh": cell.wh, "b": b, "bh": bh}
                named |= {"peephole": cell.peephole, "projection": cell.projection}
                state.update((f"layer{number}{direction}.{part}", array) for part, array in named.items())
        return state
    if isinstance(layer, Norm):
        return {"gamma": layer.gamma, "beta": layer.beta, "running_mean": layer.mean, "running_var": layer.var}
    if isinstance(layer, Embedding):
        return {"table": layer.table}
    return {"w": layer.w, "b": layer.b}


# ---- BNNS ------------------------------------------------------------------------------------------------------------

# The data of the descriptors in BNNS's structures, named after their fields. Those of an LSTM hold one gate of all
# layers and directions: iw_desc0 [layers, directions, H, inputs], hw_desc and cw_desc [layers, directions, H, H],
# b_desc [layers, directions, H]. Layers whose input is not as wide as the first layer's are in iw_desc1.
_GATES: Final = ("input_gate", "forget_gate", "candidate_gate", "output_gate")
_BNNS: Final = re.compile(
    r"(^|\.)((input|forget|candidate|output)_gate\.(iw_desc[01]|hw_desc|cw_desc|b_desc)"
    r"|weights|bias|gamma|beta|moving_mean|moving_variance|dictionary)$"
)


def from_bnns(state: Mapping[str, Array]) -> Layers:
    """Layers whose arrays are named after the fields of BNNS's structures; an LSTM has arrays for each gate."""
    layers: Layers = {}
    for name, parts in _by_layer(state, _BNNS).items():
        shown = name or "the model"
        if any("_gate." in part for part in parts):
            layers[name] = _bnns_lstm(shown, parts)
        elif "dictionary" in parts:
            layers[name] = Embedding(parts["dictionary"])
        elif "weights" in parts:
            layers[name] = _weights(parts["weights"], parts.get("bias"))
        else:
            layers[name] = _norm(shown, parts, ("gamma", "beta", "moving_mean", "moving_variance"))
    return layers


def _bnns_lstm(name: str, parts: Mapping[str, Array]) -> Lstm:
    if others := [part for part in parts if "_gate." not in part]:
        raise ConvertError(f"{name} has {', '.join(others)}, which do not belong to an LSTM")
    iw, upper, hw, b, cw = (
        _all_gates(name, parts, field) for field in ("iw_desc0", "iw_desc1", "hw_desc", "b_desc", "cw_desc")
    )
    if iw is None or hw is None:
        raise ConvertError(f"{name}: iw_desc0 or hw_desc is missing")
    layers, directions = hw.shape[:2]
    if len(iw) + (0 if upper is None else len(upper)) != layers:
        raise ConvertError(f"{name}: hw_desc has {layers} layers, but iw_desc0 and iw_desc1 have others")
    cw = None if cw is None else _vectors(cw)

    def cell(layer: int, direction: int) -> Cell:
        wx = iw[layer, direction] if layer < len(iw) else upper[layer - len(iw), direction]  # type: ignore[index]
        more = (None if array is None else array[layer, direction] for array in (b, cw))
        bias, peephole = more
        return Cell(wx, hw[layer, direction], bias, None, peephole)

    return Lstm([[cell(layer, direction) for direction in range(directions)] for layer in range(layers)])


def _all_gates(name: str, parts: Mapping[str, Array], field: str) -> Array | None:
    """The arrays of all gates ``[layers, directions, 4H, ...]``. Gates without a bias or a peephole have 0."""
    present = [parts.get(f"{gate}.{field}") for gate in _GATES]
    given = [array for array in present if array is not None]
    if not given:
        return None
    if len(given) < 4 and field not in ("b_desc", "cw_desc"):
        missing = next(gate for gate, array in zip(_GATES, present, strict=True) if array is None)
        raise ConvertError(f"{name}: {missing}.{field} is missing")
    if len({array.shape for array in given}) > 1 or given[0].ndim != (3 if field == "b_desc" else 4):
        axes = "[layers, directions, H" + ("]" if field == "b_desc" else ", columns]")
        raise ConvertError(
            f"{name}: the gates' {field} have shapes {', '.join(str(a.shape) for a in given)}, expected {axes}"
        )
    return np.concatenate([np.zeros_like(given[0]) if array is None else array for array in present], axis=2)


def _vectors(cw: Array) -> Array:
    """Peepholes as vectors, ``[layers, directions, 4H]``, if the matrices of all gates are diagonal."""
    layers, directions, rows, hidden = cw.shape
    square = cw.reshape(layers, directions, -1, hidden, hidden) if rows == 4 * hidden else cw
    diagonal = np.diagonal(square, axis1=-2, axis2=-1)
    if np.count_nonzero(square) != np.count_nonzero(diagonal):
        return cw
    return diagonal.reshape(layers, directions, -1)


def to_bnns(layers: Layers) -> dict[str, Array]:
    return _joined(layers, _bnns_arrays)


def _bnns_arrays(name: str, layer: Layer) -> Mapping[str, Array | None]:
    if isinstance(layer, Lstm):
        layer.cells[0][0].refuse_projection(name, "BNNS's LSTM")
        return _bnns_gates(layer)
    if isinstance(layer, Recurrent):
        raise ConvertError(f"{name} is {layer.title}, for which BNNS has no structure; --skip {name} leaves it out")
    if isinstance(layer, Norm):
        return {"gamma": layer.gamma, "beta": layer.beta, "moving_mean": layer.mean, "moving_variance": layer.var}
    if isinstance(layer, Embedding):
        return {"dictionary": layer.table}
    return {"weights": layer.w, "bias": layer.b}


def _bnns_gates(lstm: Lstm) -> dict[str, Array]:
    first = lstm.cells[0][0]
    equal = len(lstm.cells) if first.wx.shape[1] == lstm.directions * first.hidden else 1
    fields: dict[str, list[list[Array | None]]] = {
        "iw_desc0": [[cell.wx for cell in cells] for cells in lstm.cells[:equal]],
        "iw_desc1": [[cell.wx for cell in cells] for cells in lstm.cells[equal:]],
        "hw_desc": [[cell.wh for cell in cells] for cells in lstm.cells],
        "b_desc": [[cell.bias for cell in cells] for cells in lstm.cells],
        "cw_desc": [[_matrices(cell.peephole) for cell in cells] for cells in lstm.cells],
    }
    state: dict[str, Array] = {}
    for field, arrays in fields.items():
        if not arrays or arrays[0][0] is None:
            continue
        for number, gate in enumerate(_GATES):
            values = [[gates(array)[number] for array in row if array is not None] for row in arrays]
            state[f"{gate}.{field}"] = np.array(values)
    return state


def _matrices(peephole: Array | None) -> Array | None:
    """Peepholes ``[4H, H]``, as BNNS has them."""
    if peephole is None or peephole.ndim == 2:
        return peephole
    return np.concatenate([np.diag(gate) for gate in gates(peephole)])
