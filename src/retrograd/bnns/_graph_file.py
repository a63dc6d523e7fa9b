"""Graphs in files: retrograd's form, safetensors whose metadata has the recorded calls as JSON; Core ML packages."""

from __future__ import annotations

import contextlib
import enum
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..graph import Recording, Symbol, Variable
from ..graph.recording import Call
from ..graph.tensor import DTYPES
from ..ops._types import Array
from ._failure import Invalid, Unsupported
from ._graph_model import Function, Model
from ._graph_operations import INTERNAL, OPERATIONS, Operation
from ._graph_values import ENUMERATIONS, Case

_KEY: Final = "retrograd.bnnsgraph"
_VERSION: Final = 1
_INDEX: Final = "index"  # the option of subscripts: integers and lists of start, end and step


def read_model(path: Any, function: str | None = None) -> Model:
    """The graph of a file or of a Core ML package, or one of its functions."""
    file = Path(os.fsdecode(path))
    if file.suffix == ".mlmodelc":
        raise Unsupported(f"{file} is a compiled Core ML model, a private format; read the .mlpackage that it is from")
    if file.is_dir():
        if file.suffix != ".mlpackage":
            raise Invalid(f"{file} is a directory, but not a .mlpackage")
        from . import _graph_coreml

        return _graph_coreml.read_model(file, function)
    if not file.exists():
        raise Invalid(f"{file} does not exist")
    model = _read(file)
    if function:
        return Model(model.recording, {function: model.function(function)}, model.parameters)
    return model


def write_model(model: Model, target: Any) -> None:
    """Write a graph to a path or a file descriptor, readable by its owner alone; nothing is left of one that fails."""
    from ._graph_coreml import CoreMLModel, write_parameters

    if isinstance(model, CoreMLModel):
        if isinstance(target, int):
            raise Invalid("a Core ML package is a folder, and cannot be written to a file descriptor")
        write_parameters(model, os.fsdecode(target))
        return
    from safetensors.numpy import save

    arrays, described = _described(model)
    data = save(arrays, {_KEY: json.dumps(described)})
    if isinstance(target, int):
        with os.fdopen(os.dup(target), "wb") as file:
            file.write(data)
        return
    path = os.fsdecode(target)
    temporary = f"{path}.{os.getpid()}"
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


# ---- writing --------------------------------------------------------------------------------------------------------


def _described(model: Model) -> tuple[dict[str, Array], dict[str, Any]]:
    roots: list[Symbol] = []
    for function in model.functions.values():
        roots += [*function.inputs, *function.outputs]
        roots += [symbol for pair in (*function.states, *function.updates) for symbol in pair]
    calls = model.recording.calls_for(roots)
    unknown = sorted({call.kind for call in calls if call.kind not in _OWN and call.kind not in _TABLE})
    if unknown:
        raise Unsupported(f"a graph with {', '.join(unknown)} cannot be saved; save one without")
    arrays: dict[str, Array] = {}
    numbers = {call: place for place, call in enumerate(calls)}
    names = {id(variable): name for name, variable in model.parameters.items()}

    def place(symbol: Symbol | None) -> list[int] | None:
        return None if symbol is None else [numbers[symbol.call], symbol.index]

    rows = []
    for number, call in enumerate(calls):
        row: dict[str, Any] = {"kind": call.kind}
        if call.name:
            row["name"] = call.name
        if call.operands:
            row["operands"] = [place(symbol) for symbol in call.operands]
        if call.options:
            row["options"] = {label: _plain(value) for label, value in call.options.items()}
        if call.kind == "placeholder":
            (symbol,) = call.results
            assert symbol.dtype is not None
            row |= {"shape": symbol.shape, "dtype": symbol.dtype.name}
        elif call.kind in ("constant", "variable"):
            arrays[f"{call.kind}.{number}"] = np.ascontiguousarray(
                call.value if call.kind == "constant" else call.value.value
            )
            row["shape"] = list(call.results[0].shape or ())
            if call.kind == "variable" and id(call.value) in names:
                row["parameter"] = names[id(call.value)]
        else:
            row["results"] = len(call.results)
        rows.append(row)
    functions = [
        {
            "name": function.name,
            "inputs": [place(s) for s in function.inputs],
            "outputs": [place(s) for s in function.outputs],
            "states": [[place(a), place(b)] for a, b in function.states],
            "names": list(function.names),
            "updates": [[place(a), place(b)] for a, b in function.updates],
        }
        for function in model.functions.values()
    ]
    return arrays, {"version": _VERSION, "calls": rows, "functions": functions}


def _plain(value: Any) -> Any:
    """An option as JSON has it."""
    if isinstance(value, enum.Enum):
        return {"enum": type(value).__name__, "case": value.name}
    if isinstance(value, Case):
        return {"enum": type(value).__name__, "case": value.case, "parameter": _plain(value.parameter)}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    return [_plain(one) for one in value] if isinstance(value, (tuple, list)) else value


# ---- reading --------------------------------------------------------------------------------------------------------

_OWN: Final = ("placeholder", "constant", "variable", "gradients", "assign")
_TABLE: Final[Mapping[str, Operation]] = {**OPERATIONS, **INTERNAL}


def _read(file: Path) -> Model:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as opened:
            metadata = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    except (SafetensorError, OSError) as error:
        raise Invalid(f"{file} cannot be read: {error}") from None
    if _KEY not in metadata:
        raise Invalid(
            f"{file} has no graph: it was not written by Context.write or BNNSGraphCompileOptionsSetOutputPath"
        )
    try:
        described = json.loads(metadata[_KEY])
        if described["version"] != _VERSION:
            raise Invalid(f"it has version {described['version']}, expected {_VERSION}")
        return _rebuilt(described, arrays)
    except (KeyError, IndexError, AttributeError, AssertionError, RecursionError) as error:
        raise Invalid(f"{file}: the graph is not as it was written: {type(error).__name__} {error}") from None
    except (TypeError, ValueError) as error:
        raise Invalid(f"{file}: {error}") from None


def _rebuilt(described: Mapping[str, Any], arrays: Mapping[str, Array]) -> Model:
    recording, parameters = Recording(), dict[str, Variable]()
    made: list[Sequence[Symbol]] = []

    def symbol(place: Sequence[int]) -> Symbol:
        call, result = place
        if not (isinstance(call, int) and isinstance(result, int) and call >= 0 and result >= 0):
            raise ValueError(f"an operand is {place!r}")
        return made[call][result]

    for number, row in enumerate(described["calls"]):
        operands = [None if one is None else symbol(one) for one in row.get("operands", ())]
        found = _call(recording, number, row, operands, arrays, parameters)
        made.append(found.results if isinstance(found, Call) else found)
    functions = {}
    for one in described["functions"]:
        pairs = {key: tuple((symbol(a), symbol(b)) for a, b in one[key]) for key in ("states", "updates")}
        inputs, outputs = (tuple(symbol(place) for place in one[key]) for key in ("inputs", "outputs"))
        functions[str(one["name"])] = Function(
            str(one["name"]), inputs, outputs, pairs["states"], tuple(map(str, one["names"])), pairs["updates"]
        )
    for function in functions.values():
        for target, new in (*function.states, *function.updates):
            if target.call.kind == "variable" and new is not target:
                recording.assign(target, new)
    return Model(recording, functions, parameters)


def _call(
    recording: Recording,
    number: int,
    row: Mapping[str, Any],
    operands: Sequence[Symbol | None],
    arrays: Mapping[str, Array],
    parameters: dict[str, Variable],
) -> Sequence[Symbol]:
    kind, name = row["kind"], str(row.get("name", ""))
    if kind == "placeholder":
        dtype = np.dtype(row["dtype"])
        shape = tuple(int(size) for size in row["shape"])
        if dtype not in DTYPES or min(shape, default=0) < -1 or len(shape) > 8:
            raise ValueError(f"placeholder {name!r} has type {dtype} and shape {shape}")
        return [recording.placeholder(shape, dtype, name)]
    if kind in ("constant", "variable"):
        array = arrays[f"{kind}.{number}"]
        if array.dtype not in DTYPES:
            raise ValueError(f"{kind} {number} has type {array.dtype}")
        array = array.reshape(tuple(row["shape"]))
        if kind == "constant":
            return [recording.constant(array, name)]
        variable = Variable(array, name=name)
        if "parameter" in row:
            parameters[str(row["parameter"])] = variable
        return [recording.variable(variable, name)]
    if kind == "gradients":
        of, *others = operands
        return recording.gradients(of, others, name=name)  # type: ignore[arg-type]
    if kind == "assign":  # of the functions, which say which
        return []
    operation = _TABLE.get(kind)
    if operation is None:
        raise ValueError(f"there is no operation {kind!r}")
    options = _options(operation, row.get("options", {}))
    return recording.call(
        operation.function, operands, options, kind=kind, count=max(1, len(operation.results)), name=name
    )


def _options(operation: Operation, given: Mapping[str, Any]) -> dict[str, Any]:
    values = {label: _value(one) for label, one in given.items()}
    if operation.group == "internal":
        if _INDEX in values:
            values[_INDEX] = tuple(part if isinstance(part, int) else _triple(part) for part in values[_INDEX])
        return values
    labels = {label.name: label for label in operation.options}
    if set(values) != set(labels):
        raise ValueError(f"{operation.name} has the options {sorted(values)}, expected {sorted(labels)}")
    return {name: operation.kept(labels[name], value) for name, value in values.items()}


def _triple(part: Any) -> tuple[int | None, ...]:
    found = tuple(part)
    if len(found) != 3 or any(one is not None and not isinstance(one, int) for one in found):
        raise ValueError(f"an index is {part!r}")
    return found


def _value(given: Any) -> Any:
    """An option that JSON has."""
    if isinstance(given, dict):
        if "dtype" in given:
            return np.dtype(given["dtype"])
        kind: Any = ENUMERATIONS[given["enum"]]
        case = given["case"]
        if issubclass(kind, enum.Enum):
            return kind[case]
        found = getattr(kind, str(case)) if not str(case).startswith("_") else None
        if isinstance(found, Case):
            return found
        return found(_value(given["parameter"]))  # type: ignore[misc]
    return tuple(_value(one) for one in given) if isinstance(given, list) else given
