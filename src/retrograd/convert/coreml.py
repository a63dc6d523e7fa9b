"""Core ML: weights of the operations of an ``.mlpackage``, read and written by coremltools."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

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
    reordered,
    stacked,
)
from .mlpackage import loader, quiet, read_package, replaced_folder

__all__ = ["read_coreml", "write_coreml"]

# Core ML's gates are in the order i f o z of an LSTM, r n z of a GRU. The same permutation leads back.
_ORDERS: Final = {Lstm: (0, 1, 3, 2), Gru: (0, 2, 1), Rnn: (0,)}
_RECURRENT: Final[dict[str, type[Recurrent]]] = {"lstm": Lstm, "gru": Gru, "rnn": Rnn}
_RNN_ACTIVATIONS: Final = {"tanh": "tanh", "relu": "relu", "sigmoid": "sigmoid", "linear": "identity"}
_NAMES: Final = "retrograd.names"  # names of layers by operations' names, which are identifiers: a key of the metadata
_EPS: Final = 1e-5  # Core ML's default
_NORMS: Final[tuple[NormKind, ...]] = ("batch_norm", "layer_norm", "instance_norm")
_STANDARD: Final = {"recurrent_activation": "sigmoid", "cell_activation": "tanh", "activation": "tanh"}


class _Operation(NamedTuple):
    """An operation of a program, with the inputs that are constants."""

    kind: str
    name: str
    constants: dict[str, Any]


def read_coreml(path: Path, skipped: Callable[[str], bool]) -> Layers:
    package = read_package(path)
    spec = package.spec
    with quiet():
        operations = list(_operations(spec.mlProgram, loader(package)))
    names = json.loads(spec.description.metadata.userDefined.get(_NAMES, "{}"))
    layers: Layers = {}
    for operation in operations:
        name = str(names.get(operation.name, operation.name))
        if skipped(name):
            continue
        if (layer := _layer(name, operation)) is not None:
            layers[name] = layer
        elif lost := _weights_in(operation):
            raise ConvertError(
                f"{name}: the array {lost} belongs to the operation {operation.kind}, which is not a layer that "
                f"retrograd has; --skip {name} leaves it out"
            )
    return stacked(layers)


def _operations(program: Any, loaded: Callable[[Any], Any]) -> Iterator[_Operation]:
    """All operations. Only constants have values: nothing in the program is computed."""

    def below(block: Any) -> Iterator[Any]:
        for operation in block.operations:
            yield operation
            for inner in operation.blocks:
                yield from below(inner)

    for function in program.functions.values():
        operations = list(below(function.block_specializations[function.opset]))
        constants: dict[str, Any] = {}
        for operation in operations:
            if operation.type == "const":
                constants[operation.outputs[0].name] = loaded(operation.attributes["val"])
                continue
            inputs = {}
            for part, argument in operation.inputs.items():
                if len(argument.arguments) != 1:
                    continue
                (given,) = argument.arguments
                if given.WhichOneof("binding") == "value":
                    if given.value.type.WhichOneof("type") == "tensorType":  # not a list of class labels
                        inputs[part] = loaded(given.value)
                elif given.name in constants:
                    inputs[part] = constants[given.name]
            name = str(loaded(operation.attributes["name"])) if "name" in operation.attributes else ""
            yield _Operation(operation.type, name or operation.outputs[0].name, inputs)


def _weights_in(operation: _Operation) -> str | None:
    """An input that is a constant array of floating-point values, not all 0."""
    for part, value in operation.constants.items():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size > 1 and value.any():
            return part
    return None


def _layer(name: str, operation: _Operation) -> Layer | None:
    kind, values = operation.kind, operation.constants

    def array(part: str) -> Array | None:
        value = values.get(part)
        return None if value is None else np.asarray(value)

    def needed(part: str) -> Array:
        value = array(part)
        if value is None:
            raise ConvertError(f"{name}: {part} is not a constant of the program")
        return value

    if kind in _RECURRENT:
        return _recurrent(name, _RECURRENT[kind], values, array, needed)
    if kind == "linear":
        return Linear(needed("weight"), array("bias"))
    if kind == "matmul" and (w := array("y")) is not None and w.ndim == 2 and not values.get("transpose_x"):
        return Linear(w if values.get("transpose_y") else w.T)
    if kind in ("conv", "conv_transpose"):
        groups = int(values.get("groups", 1))
        return Conv(needed("weight"), array("bias"), kind == "conv_transpose", groups)
    if norm := next((norm for norm in _NORMS if norm == kind), None):
        eps = float(values.get("epsilon", _EPS))
        mean, var = (needed("mean"), needed("variance")) if norm == "batch_norm" else (None, None)
        return Norm(norm, array("gamma"), array("beta"), mean, var, eps)
    if kind == "gather" and (table := array("x")) is not None and table.ndim == 2 and not values.get("axis"):
        return Embedding(table)
    return None


def _recurrent(
    name: str,
    kind: type[Recurrent],
    values: dict[str, Any],
    array: Callable[[str], Array | None],
    needed: Callable[[str], Array],
) -> Recurrent:
    activation = values.get("activation")
    for option, standard in _STANDARD.items():
        if kind is Rnn and option == "activation":
            if activation is not None and activation not in _RNN_ACTIVATIONS:
                listed = ", ".join(_RNN_ACTIVATIONS)
                raise ConvertError(f"{name} has activation {activation!r}; only {listed} are converted")
        elif values.get(option) not in (None, standard):
            raise ConvertError(f"{name} has {option} {values.get(option)!r}; only {standard!r} is converted")
    if values.get("clip") is not None or values.get("direction") == "reverse":
        raise ConvertError(f"{name} has clip, or reads time backwards, which a conversion of weights would lose")
    backs = ("", "_back") if values.get("direction") == "bidirectional" else ("",)
    order = _ORDERS[kind]

    def cell(back: str) -> Cell:
        peephole = array(f"peephole{back}")
        if peephole is not None:
            i, f, o = np.split(peephole, 3)
            peephole = np.concatenate([i, f, np.zeros_like(i), o])
        b, bh = array(f"bias{back}"), None
        if kind is Gru:  # `bias` is that of the recurrent product; the other one is there from iOS 18 on
            b, bh = array("input_bias"), b
        wx, wh = reordered(needed(f"weight_ih{back}"), order), reordered(needed(f"weight_hh{back}"), order)
        b, bh = (None if half is None else reordered(half, order) for half in (b, bh))
        return Cell(wx, wh, b, bh, peephole)

    cells = [[cell(back) for back in backs]]
    if kind is Gru:
        return Gru(cells, "after" if values.get("reset_after") else "before")
    return Rnn(cells, _RNN_ACTIVATIONS[activation or "tanh"]) if kind is Rnn else Lstm(cells)


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_coreml(path: Path, layers: Layers) -> None:
    """A program in which each layer reads an input ``NAME_x`` with one sample, and for a recurrent layer one step."""
    for name, layer in layers.items():
        if any(array.dtype.itemsize > 4 for array in arrays_of(layer)):
            raise ConvertError(f"{name} has arrays of float64, which Core ML does not have")
    with quiet() as coremltools:
        from coremltools.converters.mil import Builder
        from coremltools.converters.mil.mil import Function, Program, types

        names = _identifiers(layers)
        inputs = {}
        for name, layer in layers.items():
            shape, integers = _example(name, layer)
            dtype = types.int32 if integers else types.fp32
            inputs[f"{names[name]}_x"] = Builder.placeholder(shape=shape, dtype=dtype)
        # From iOS 18 on, a gru can reset after the recurrent product.
        newest = any(isinstance(layer, Gru) and layer.known_kind(name) == "after" for name, layer in layers.items())
        target = coremltools.target.iOS18 if newest else coremltools.target.iOS16
        program = Program()
        with Function(inputs, opset_version=target if newest else None) as function:
            outputs = [
                _output(Builder, names[name], name, layer, function.inputs[f"{names[name]}_x"])
                for name, layer in layers.items()
            ]
            function.set_outputs(outputs)
            program.add_function("main", function)
        with tempfile.TemporaryDirectory() as folder:  # coremltools keeps its own until the interpreter ends
            model = coremltools.convert(
                program,
                convert_to="mlprogram",
                compute_precision=coremltools.precision.FLOAT32,
                minimum_deployment_target=target,
                pass_pipeline=coremltools.PassPipeline.EMPTY,
                skip_model_load=True,
                package_dir=str(Path(folder) / "made.mlpackage"),
            )
            parts = {
                f"{names[name]}_layer{k}": f"{name}.layer{k}" if name else f"layer{k}" for name, k in _stacks(layers)
            }
            known = {**{identifier: name for name, identifier in names.items()}, **parts}
            model.user_defined_metadata[_NAMES] = json.dumps(known)
            with replaced_folder(path) as made:
                model.save(str(made))


def _stacks(layers: Layers) -> Iterator[tuple[str, int]]:
    for name, layer in layers.items():
        if isinstance(layer, Recurrent) and len(layer.cells) > 1:
            yield from ((name, number) for number in range(len(layer.cells)))


def _identifiers(layers: Layers) -> dict[str, str]:
    """A name for each layer's operation, of letters, digits and underscores."""
    found: dict[str, str] = {}
    for name in layers:
        plain = re.sub(r"\W", "_", name, flags=re.ASCII) or "model"
        plain = f"layer_{plain}" if plain[0].isdigit() else plain
        numbered = (plain + (f"_{k}" if k else "") for k in itertools.count())
        found[name] = next(identifier for identifier in numbered if identifier not in found.values())
    return found


def _example(name: str, layer: Layer) -> tuple[tuple[int, ...], bool]:
    """The shape of an input for the layer, and whether it holds integers."""
    if isinstance(layer, Recurrent):
        return (1, 1, layer.cells[0][0].wx.shape[1]), False
    if isinstance(layer, Linear):
        return (1, layer.w.shape[1]), False
    if isinstance(layer, Embedding):
        return (1,), True
    if isinstance(layer, Conv):
        channels = layer.w.shape[0] if layer.is_transposed(name) else layer.w.shape[1] * layer.group_count
        return (1, channels, *layer.w.shape[2:]), False
    shape = next(array.shape for array in layer.arrays().values() if array is not None)
    return ((1, *shape) if layer.kind == "layer_norm" else (1, *shape, 2)), False


def _output(builder: Any, identifier: str, name: str, layer: Layer, x: Any) -> Any:
    if isinstance(layer, Recurrent):
        for number, cells in enumerate(layer.cells):
            full = identifier if len(layer.cells) == 1 else f"{identifier}_layer{number}"
            x = _written_recurrent(builder, full, name, layer, cells, x)
        return x
    if isinstance(layer, Linear):
        if layer.b is None:  # linear would have a bias of zeros
            return builder.matmul(x=x, y=_given(weight=layer.w)["weight"], transpose_y=True, name=identifier)
        return builder.linear(x=x, name=identifier, **_given(weight=layer.w, bias=layer.b))
    if isinstance(layer, Embedding):
        return builder.gather(x=layer.table.astype(np.float32), indices=x, axis=0, name=identifier)
    if isinstance(layer, Conv):
        make = builder.conv_transpose if layer.is_transposed(name) else builder.conv
        arrays = _given(weight=layer.w, bias=layer.b)
        return make(x=x, pad_type="valid", groups=layer.group_count, name=identifier, **arrays)
    options = {"epsilon": np.float32(_EPS if layer.eps is None else layer.eps), "name": identifier}
    arrays = _given(gamma=layer.gamma, beta=layer.beta)
    if (layer.kind == "batch_norm") != (layer.mean is not None):
        raise ConvertError(f"{name}: in Core ML batch norms have running statistics, and other norms have none")
    if layer.kind == "batch_norm":
        return builder.batch_norm(x=x, **_given(mean=layer.mean, variance=layer.var), **arrays, **options)
    if layer.kind == "layer_norm":
        axes = list(range(-layer.gamma.ndim, 0)) if layer.gamma is not None else [-1]
        return builder.layer_norm(x=x, axes=axes, **arrays, **options)
    if layer.kind == "instance_norm":
        return builder.instance_norm(x=x, **arrays, **options)
    if layer.kind is None:
        raise ConvertError(f"{name} is a norm of an unknown kind; say --kind {name}=layer_norm, for example")
    raise ConvertError(f"{name} is a group norm, for which Core ML has no operation; --skip {name} leaves it out")


def _given(**arrays: Array | None) -> dict[str, Array]:
    return {part: np.ascontiguousarray(array, np.float32) for part, array in arrays.items() if array is not None}


def _written_recurrent(builder: Any, identifier: str, name: str, layer: Recurrent, cells: list[Cell], x: Any) -> Any:
    if len(cells) == 2 and not isinstance(layer, Lstm):
        raise ConvertError(f"{name} is bidirectional; of Core ML's recurrent operations only lstm can be")
    order = _ORDERS[type(layer)]
    after = isinstance(layer, Gru) and layer.known_kind(name) == "after"
    arrays: dict[str, Array | None] = {}
    for cell, back in zip(cells, ("", "_back"), strict=False):
        cell.refuse_projection(name, "Core ML's lstm")
        peephole = cell.ifo_peephole(name, "Core ML's lstm")
        arrays[f"weight_ih{back}"], arrays[f"weight_hh{back}"] = reordered(cell.wx, order), reordered(cell.wh, order)
        arrays[f"peephole{back}"] = None if peephole is None else np.concatenate(peephole)
        named = {"bias": cell.bias}
        if after and cell.biases is not None:
            named = {"input_bias": cell.biases[0], "bias": cell.biases[1]}
        arrays.update((f"{part}{back}", None if b is None else reordered(b, order)) for part, b in named.items())
    state = np.zeros((1, len(cells) * cells[0].hidden), np.float32)
    options: dict[str, Any] = {"direction": "bidirectional" if len(cells) == 2 else "forward"}
    if isinstance(layer, Lstm):
        options["initial_c"] = state
    if after:
        options["reset_after"] = True
    if isinstance(layer, Rnn):
        options["activation"] = _theirs(name, layer.activation or "tanh")
    operation = getattr(builder, next(kind for kind, type_ in _RECURRENT.items() if type_ is type(layer)))
    y, *_ = operation(x=x, initial_h=state, output_sequence=True, name=identifier, **options, **_given(**arrays))
    return y


def _theirs(name: str, activation: str) -> str:
    for theirs, ours in _RNN_ACTIVATIONS.items():
        if ours == activation:
            return theirs
    raise ConvertError(f"{name} has the activation {activation}, which Core ML's rnn does not have")
