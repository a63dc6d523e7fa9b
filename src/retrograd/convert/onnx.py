"""ONNX: weights of the nodes of a graph; layers written as nodes with an input each."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from .._files import not_a_file
from .guard import check_size, inside
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
    NormKind,
    Recurrent,
    Rnn,
    arrays_of,
    describe,
    reordered,
    stacked,
)

__all__ = ["read_onnx", "write_onnx"]

_NORMS: Final[dict[str, NormKind]] = {
    "BatchNormalization": "batch_norm",
    "LayerNormalization": "layer_norm",
    "GroupNormalization": "group_norm",
    "InstanceNormalization": "instance_norm",
}
# ONNX's gates are in the order i o f c of an LSTM, z r h of a GRU.
_FROM_ONNX: Final = {Lstm: (0, 2, 3, 1), Gru: (1, 0, 2), Rnn: (0,)}
_TO_ONNX: Final = {Lstm: (0, 3, 1, 2), Gru: (1, 0, 2), Rnn: (0,)}
_RECURRENT: Final[dict[str, type[Recurrent]]] = {"LSTM": Lstm, "GRU": Gru, "RNN": Rnn}
_ACTIVATIONS: Final = {Lstm: ("Sigmoid", "Tanh", "Tanh"), Gru: ("Sigmoid", "Tanh"), Rnn: ("Tanh",)}
_RNN_ACTIVATIONS: Final = {"Tanh": "tanh", "Relu": "relu", "Sigmoid": "sigmoid"}
_EPS: Final = 1e-5  # ONNX's default
_OPSET, _IR_VERSION = 21, 10


def read_onnx(path: Path, skipped: Callable[[str], bool]) -> Layers:
    import onnx

    model = onnx.load(path, load_external_data=False)
    _load_external(onnx, model.graph, path)
    graph = _Graph(onnx, model)
    layers: Layers = {}
    for node in graph.nodes:
        name = _name(node)
        layer = None if skipped(name) else graph.layer(name, node)
        if layer is None or (name in layers and _same(layer, layers[name])):  # a module that is called twice
            continue
        before = layers.get(name)
        if isinstance(before, Recurrent) and isinstance(layer, Recurrent) and before.options() == layer.options():
            before.cells += layer.cells  # a module of several layers
        elif before is None:
            layers[name] = layer
        else:
            raise ConvertError(f"two nodes are named {name}, a {describe(before)} and a {describe(layer)}")
    graph.check_all_used(lambda node: skipped(_name(node)))
    return stacked(layers)


def _load_external(onnx: Any, graph: Any, path: Path) -> None:
    """Load weights from files next to the model, as large models have them."""
    values = (attribute.t for node in graph.node for attribute in node.attribute if attribute.HasField("t"))
    total = 0
    for tensor in (*graph.initializer, *values):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        try:
            data = inside(path.parent, entries.get("location", ""))
            if what := not_a_file(data):  # opening a pipe would block
                raise ConvertError(f"its file {data} is {what}, not a file")
            size, offset = data.stat().st_size, int(entries.get("offset", 0))
            length = int(entries.get("length", size - offset))
            if offset < 0 or length < 0 or offset + length > size:
                raise ConvertError(f"bytes {offset} to {offset + length} are outside of {data}, which has {size}")
            total += length
            check_size(total, path.stat().st_size + size)  # many arrays may be the same part of a file
            with data.open("rb") as file:
                file.seek(offset)
                tensor.raw_data = file.read(length)
        except (ConvertError, OSError) as error:
            raise ConvertError(f"the array {tensor.name}: {error}") from None
        tensor.data_location = onnx.TensorProto.DEFAULT


def _name(node: Any) -> str:
    """The name of the module that a node computes, where an exporter of PyTorch noted it; else the node's name."""
    scopes = next((p.value for p in node.metadata_props if p.key == "pkg.torch.onnx.name_scopes"), None)
    path = str(node.name or node.output[0])
    if scopes is not None:
        listed = ast.literal_eval(scopes)
        return str(listed[-2]) if len(listed) > 1 else path
    if not path.startswith("/"):
        return path
    parts: list[str] = []  # /encoder/encoder.0/Gemm is encoder.0
    for part in path.split("/")[1:-1]:
        if parts and part.startswith(f"{parts[-1]}."):
            parts.pop()
        parts.append(part)
    return ".".join(parts)


def _same(a: Layer, b: Layer) -> bool:
    first, second = arrays_of(a), arrays_of(b)
    return len(first) == len(second) and all(map(np.array_equal, first, second))


class _Graph:
    """Nodes, and what is constant among their inputs."""

    def __init__(self, onnx: Any, model: Any) -> None:
        self._helper = onnx.helper
        to_array = onnx.numpy_helper.to_array
        self._opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1)
        self.nodes = list(model.graph.node)
        names = [tensor.name for tensor in model.graph.initializer]
        names += [name for node in self.nodes for name in node.output if name]
        if len(set(names)) < len(names):  # the graph could have a cycle
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise ConvertError(f"the graph is not valid: {twice} is the output of two nodes, or of a node and a weight")
        self._constants: dict[str, Array] = {tensor.name: to_array(tensor) for tensor in model.graph.initializer}
        self._used: set[str] = set()
        self._sources: dict[str, str] = {}  # constants that are others, transposed
        self._consumers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in node.input:
                self._consumers.setdefault(name, []).append(node)
            attributes = self._attributes(node)
            if node.op_type == "Constant" and "value" in attributes:
                self._constants[node.output[0]] = to_array(attributes["value"])
            elif node.op_type in ("Transpose", "Identity") and node.input[0] in self._constants:
                array = self._constants[node.input[0]]
                turned = np.transpose(array, attributes.get("perm")) if node.op_type == "Transpose" else array
                self._constants[node.output[0]] = turned
                self._sources[node.output[0]] = node.input[0]

    def _attributes(self, node: Any) -> dict[str, Any]:
        return {a.name: self._helper.get_attribute_value(a) for a in node.attribute}

    def _is_constant(self, node: Any, index: int) -> bool:
        return index < len(node.input) and node.input[index] in self._constants

    def _constant(self, name: str, node: Any, index: int) -> Array | None:
        """An input that is constant; None if it is absent."""
        source = node.input[index] if index < len(node.input) else ""
        if not source:
            return None
        if source not in self._constants:
            raise ConvertError(f"{name}: its weights ({source}) are not constants of the graph")
        return self._taken(source)

    def _taken(self, source: str) -> Array:
        chain: str | None = source
        while chain is not None and chain not in self._used:
            self._used.add(chain)
            chain = self._sources.get(chain)
        return self._constants[source]

    def _needed(self, name: str, node: Any, index: int) -> Array:
        array = self._constant(name, node, index)
        if array is None:
            raise ConvertError(f"{name}: input {index} is missing")
        return array

    def check_all_used(self, skipped: Callable[[Any], bool]) -> None:
        """Refuse a graph with weights that no layer has: they would be lost in silence."""
        for node in self.nodes:
            for source in node.input:
                array = self._constants.get(source)
                if array is None or source in self._used or node.op_type in ("Transpose", "Identity"):
                    continue
                # Integers are shapes, axes and indices; zeros are initial states.
                if array.dtype.kind in "iub" or array.size < 2 or not array.any() or skipped(node):
                    continue
                name = _name(node) or str(node.name)
                raise ConvertError(
                    f"{name}: the array {source} {array.shape} belongs to a {node.op_type}, which is not a layer that "
                    f"retrograd has; --skip {name} leaves it out"
                )

    def layer(self, name: str, node: Any) -> Layer | None:
        kind, attributes = node.op_type, self._attributes(node)
        if kind in _RECURRENT:
            return self._recurrent(name, node, _RECURRENT[kind], attributes)
        if kind in _NORMS:
            return self._norm(name, node, _NORMS[kind], attributes)
        if kind in ("Conv", "ConvTranspose"):
            groups = int(attributes.get("group", 1))
            w, b = self._needed(name, node, 1), self._constant(name, node, 2)
            return Conv(w, b, kind == "ConvTranspose", groups)
        if kind == "Gather" and self._is_constant(node, 0) and not attributes.get("axis", 0):
            table = self._constants[node.input[0]]
            return Embedding(self._needed(name, node, 0)) if table.ndim == 2 and table.dtype.kind not in "iu" else None
        if kind == "Gemm" and self._is_constant(node, 1):
            if attributes.get("alpha", 1.0) != 1 or attributes.get("beta", 1.0) != 1 or attributes.get("transA", 0):
                raise ConvertError(f"{name}: a Gemm with alpha, beta or transA is not a linear layer")
            w, b = self._needed(name, node, 1), self._constant(name, node, 2)
            return Linear(w if attributes.get("transB", 0) else w.T, None if b is None else b.reshape(-1))
        if kind == "MatMul" and self._is_constant(node, 1) and self._constants[node.input[1]].ndim == 2:
            w = self._needed(name, node, 1)
            return Linear(w.T, self._operand(node, "Add", (w.shape[1],)))
        return None

    def _next(self, node: Any) -> Any:
        """The only node that reads a node's first output; None if there are others."""
        readers = self._consumers.get(node.output[0], [])
        return readers[0] if len(readers) == 1 else None

    def _operand(self, node: Any, kind: str, shape: tuple[int, ...] | None) -> Array | None:
        """The constant that the next node adds to the output of a node, or multiplies it by."""
        after = self._next(node) if node is not None else None
        if after is None or after.op_type != kind:
            return None
        constants = [source for source in after.input if source in self._constants]
        if len(constants) != 1 or (shape is not None and self._constants[constants[0]].shape != shape):
            return None
        return self._taken(constants[0])

    def _norm(self, name: str, node: Any, kind: NormKind, attributes: dict[str, Any]) -> Norm:
        gamma, beta = self._needed(name, node, 1), self._constant(name, node, 2)
        eps = attributes.get("epsilon", _EPS)
        if kind == "batch_norm":
            return Norm(kind, gamma, beta, self._needed(name, node, 3), self._needed(name, node, 4), eps)
        if kind == "group_norm" and self._opset < 21:
            raise ConvertError(
                f"{name} has a gamma for each group, as GroupNormalization of opset {self._opset}; from opset 21 on, "
                "and in retrograd, it has one for each channel"
            )
        if kind == "instance_norm" and (gamma == 1).all() and beta is not None and not beta.any():
            # A group norm, as PyTorch exports it: Reshape, InstanceNormalization, Reshape, Mul, Add.
            reshape = self._next(node)
            scale = (
                self._operand(reshape, "Mul", None) if reshape is not None and reshape.op_type == "Reshape" else None
            )
            if scale is not None:
                shift = self._operand(self._next(reshape), "Add", None)
                flat = None if shift is None else shift.reshape(-1)
                return Norm("group_norm", scale.reshape(-1), flat, eps=eps, groups=gamma.size)
        return Norm(kind, gamma, beta, eps=eps, groups=attributes.get("num_groups"))

    def _recurrent(self, name: str, node: Any, kind: type[Recurrent], attributes: dict[str, Any]) -> Recurrent:
        direction = attributes.get("direction", b"forward")
        if direction == b"reverse":
            raise ConvertError(f"{name} reads time backwards, which only one direction of two can do here")
        directions = 2 if direction == b"bidirectional" else 1
        if attributes.get("clip", 0.0) or attributes.get("input_forget", 0):
            raise ConvertError(f"{name} has clip or input_forget, which a conversion of weights would lose")
        activation = self._activation(name, kind, directions, attributes)
        w, r = self._needed(name, node, 1), self._needed(name, node, 2)
        b, p = self._constant(name, node, 3), self._constant(name, node, 7)
        order = _FROM_ONNX[kind]

        def cell(k: int) -> Cell:
            bx, bh = (None, None) if b is None else (reordered(half, order) for half in np.split(b[k], 2))
            peephole = None
            if p is not None:
                i, o, f = np.split(p[k], 3)
                peephole = np.concatenate([i, f, np.zeros_like(i), o])
            if r.shape[1] != kind.gates * r.shape[2]:
                form = f"[directions, {kind.gates}H, H]".replace(" 1H", " H")
                raise ConvertError(f"{name}: recurrent weights have shape {r.shape}, expected {form}")
            return Cell(reordered(w[k], order), reordered(r[k], order), bx, bh, peephole)

        cells = [[cell(k) for k in range(directions)]]
        if kind is Gru:
            return Gru(cells, "after" if attributes.get("linear_before_reset", 0) else "before")
        return Rnn(cells, activation) if kind is Rnn else Lstm(cells)

    def _activation(self, name: str, kind: type[Recurrent], directions: int, attributes: dict[str, Any]) -> str:
        """The activation of an RNN; those of other cells must be the standard ones."""
        found = tuple(a.decode() for a in attributes.get("activations", [])) or _ACTIVATIONS[kind] * directions
        known = [_ACTIVATIONS[kind]] if kind is not Rnn else [(activation,) for activation in _RNN_ACTIVATIONS]
        if found not in [each * directions for each in known]:
            listed = " or ".join(map(str, known))
            raise ConvertError(f"{name} has activations {found}; only {listed} are converted")
        return _RNN_ACTIVATIONS.get(found[0], "")


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_onnx(layers: Layers) -> bytes:
    """A model in which each layer has an input ``NAME.x`` and an output ``NAME.y``.

    Their shapes are [N, features] for a linear layer, [T, N, features] for a recurrent one, [N, channels, width] for a
    norm with channels, [N, *shape] for a layer norm, [N, channels, *space] for a convolution; indices are [T, N].
    """
    import onnx

    writer = _Writer(onnx)
    for name, layer in layers.items():
        writer.add(name or "model", layer)
    helper = onnx.helper
    graph = helper.make_graph(writer.nodes, "layers", writer.inputs, writer.outputs, writer.tensors)
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR_VERSION,
        producer_name="retrograd",
    )
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


class _Writer:
    def __init__(self, onnx: Any) -> None:
        self._onnx = onnx
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.tensors: list[Any] = []

    def add(self, name: str, layer: Layer) -> None:
        if isinstance(layer, Recurrent):
            self._recurrent(name, layer)
        elif isinstance(layer, Norm):
            self._norm(name, layer)
        elif isinstance(layer, Embedding):
            x = self._input(name, 2, np.int64)
            self._last("Gather", name, [self._tensor(name, "table", layer.table), x], 3, layer.table.dtype)
        elif isinstance(layer, Linear):
            x, w = self._input(name, 2, layer.w.dtype), self._tensor(name, "w", layer.w.T)
            if layer.b is None:
                self._last("MatMul", name, [x, w], 2, layer.w.dtype)
            else:
                self._node("MatMul", name, [x, w], f"{name}.product")
                b = self._tensor(name, "b", layer.b)
                self._last("Add", f"{name}.bias", [f"{name}.product", b], 2, layer.w.dtype, name)
        else:
            x, w = self._input(name, layer.w.ndim, layer.w.dtype), self._tensor(name, "w", layer.w)
            kind = "ConvTranspose" if layer.is_transposed(name) else "Conv"
            b = self._tensor(name, "b", layer.b)
            self._last(kind, name, [x, w, b], layer.w.ndim, layer.w.dtype, group=layer.group_count)

    def _input(self, name: str, rank: int, dtype: Any) -> str:
        self.inputs.append(self._value(f"{name}.x", rank, dtype))
        return f"{name}.x"

    def _value(self, name: str, rank: int, dtype: Any) -> Any:
        helper = self._onnx.helper
        shape = [f"{name}{axis}" for axis in range(rank)]  # of any size
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)

    def _tensor(self, name: str, part: str, array: Array | None) -> str:
        if array is None:
            return ""
        self.tensors.append(self._onnx.numpy_helper.from_array(np.ascontiguousarray(array), f"{name}.{part}"))
        return f"{name}.{part}"

    def _node(self, kind: str, name: str, inputs: list[str], output: str, **attributes: Any) -> str:
        while inputs and not inputs[-1]:
            inputs.pop()
        self.nodes.append(self._onnx.helper.make_node(kind, inputs, [output], name=name, **attributes))
        return output

    def _last(
        self,
        kind: str,
        name: str,
        inputs: list[str],
        rank: int,
        dtype: Any,
        layer: str | None = None,
        **attributes: Any,
    ) -> None:
        """A node whose output is the layer's; it has the layer's name or its own."""
        output = self._node(kind, name, inputs, f"{layer or name}.y", **attributes)
        self.outputs.append(self._value(output, rank, dtype))

    def _norm(self, name: str, layer: Norm) -> None:
        kinds = {norm: kind for kind, norm in _NORMS.items()}
        if layer.kind is None:
            raise ConvertError(f"{name} is a norm of an unknown kind; say --kind {name}=layer_norm, for example")
        if layer.gamma is None or (layer.beta is None and layer.kind != "layer_norm"):
            raise ConvertError(f"{name} has no gamma or no beta, which ONNX's {kinds[layer.kind]} requires")
        attributes: dict[str, Any] = {"epsilon": _EPS if layer.eps is None else layer.eps}
        if layer.kind == "layer_norm":
            attributes["axis"] = -layer.gamma.ndim
        elif layer.kind == "group_norm":
            if layer.groups is None:
                raise ConvertError(
                    f"{name} has an unknown number of groups; say --kind {name}=group_norm:8, for example"
                )
            attributes["num_groups"] = layer.groups
        if (layer.kind == "batch_norm") != (layer.mean is not None):
            raise ConvertError(f"{name}: in ONNX batch norms have running statistics, and other norms have none")
        rank = layer.gamma.ndim + 1 if layer.kind == "layer_norm" else 3
        x = self._input(name, rank, layer.gamma.dtype)
        arrays = [self._tensor(name, part, array) for part, array in layer.arrays().items()]
        self._last(kinds[layer.kind], name, [x, *arrays], rank, layer.gamma.dtype, **attributes)

    def _recurrent(self, name: str, layer: Recurrent) -> None:
        """A node for each layer: x ``[T, N, I]``, y ``[T, N, directions * H]``."""
        kind = next(kind for kind, type_ in _RECURRENT.items() if type_ is type(layer))
        options: dict[str, Any] = {"hidden_size": layer.cells[0][0].hidden}
        if isinstance(layer, Gru):
            options["linear_before_reset"] = int(layer.known_kind(name) == "after")
        if isinstance(layer, Rnn):
            options["activations"] = [_rnn_activation(name, layer)] * layer.directions
        options["direction"] = "bidirectional" if layer.directions == 2 else "forward"
        dtype = layer.cells[0][0].wx.dtype
        x = self._input(name, 3, dtype)
        shape = self._tensor(name, "shape", np.array([0, 0, -1], np.int64))
        for number, cells in enumerate(layer.cells):
            full = name if len(layer.cells) == 1 else f"{name}.layer{number}"
            columns = zip(*(_onnx_cell(name, cell, _TO_ONNX[type(layer)]) for cell in cells), strict=True)
            arrays = [
                None if column[0] is None else np.stack([a for a in column if a is not None]) for column in columns
            ]
            w, r, b, p = (self._tensor(full, part, array) for part, array in zip("wrbp", arrays, strict=True))
            # The result is [T, directions, N, H].
            y = self._node(kind, full, [x, w, r, b, "", "", "", p], f"{full}.each", **options)
            y = self._node("Transpose", f"{full}.transpose", [y], f"{full}.turned", perm=[0, 2, 1, 3])
            if number == len(layer.cells) - 1:
                self._last("Reshape", f"{name}.reshape", [y, shape], 3, dtype, name)
            else:
                x = self._node("Reshape", f"{full}.reshape", [y, shape], f"{full}.y")


def _rnn_activation(name: str, layer: Rnn) -> str:
    for theirs, ours in _RNN_ACTIVATIONS.items():
        if ours == (layer.activation or "tanh"):
            return theirs
    raise ConvertError(f"{name} has the activation {layer.activation}, which ONNX's RNN does not have")


def _onnx_cell(name: str, cell: Cell, order: tuple[int, ...]) -> list[Array | None]:
    cell.refuse_projection(name, "ONNX's LSTM")
    biases = None
    if cell.biases is not None:
        biases = np.concatenate([reordered(half, order) for half in cell.biases])
    peephole = cell.ifo_peephole(name, "ONNX's LSTM")
    if peephole is not None:
        i, f, o = peephole
        return [reordered(cell.wx, order), reordered(cell.wh, order), biases, np.concatenate([i, o, f])]
    return [reordered(cell.wx, order), reordered(cell.wh, order), biases, None]
