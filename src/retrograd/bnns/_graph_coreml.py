"""A Core ML package as a model: its program recorded, its constants as parameters, written back when they have changed.

The program is read from its specification, without coremltools' own builder: nothing is computed but constants and
sizes, of which a value has up to `_LONG` elements. What is not supported is listed in one message.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ..graph import Recording, Symbol, Tensor, Variable
from ..graph.tensor import current_graph, trace
from ..ops._types import Array
from ._failure import Invalid, Unsupported, advise
from ._graph_mil import Mil
from ._graph_mil_shape import OPERATIONS  # all of them
from ._graph_model import Function, Model

__all__ = ["CoreMLModel", "read_model", "write_parameters"]

_MISSING: Final = "a Core ML package is read by coremltools: pip install 'retrograd[coreml]'"
_LONG: Final = 1 << 14  # elements of a value that is computed while reading
# The types of tensors, by their names in the specification.
_TYPES: Final = {
    "FLOAT32": np.dtype(np.float32), "FLOAT16": np.dtype(np.float32), "INT32": np.dtype(np.int32),
    "INT16": np.dtype(np.int32), "UINT16": np.dtype(np.int32), "BOOL": np.dtype(np.bool_),
}  # fmt: skip


class _Place(NamedTuple):
    """Where a constant is in a program: the attribute or input of an operation."""

    function: str
    operation: int
    argument: str  # empty: the value of a `const`

    def value(self, spec: Any) -> Any:
        operation = _block(spec.mlProgram.functions[self.function]).operations[self.operation]
        if self.argument:
            return operation.inputs[self.argument].arguments[0].value
        return operation.attributes["val"]


class CoreMLModel(Model):
    """A model that can be written back: it knows where its parameters are in the package."""

    def __init__(self, recording: Recording, package: Any) -> None:
        super().__init__(recording, {})
        self.package = package
        self.places: dict[str, _Place] = {}
        self.halves: set[str] = set()  # parameters that the file has as float16


# ---- values ----------------------------------------------------------------------------------------------------------


class _Known:
    """A value that is known when the file is read."""

    __slots__ = ("half", "name", "place", "symbol", "value")

    def __init__(self, value: Any, name: str = "", place: _Place | None = None) -> None:
        self.value = value
        self.name = name
        self.place = place  # of a constant that is a parameter, if it is used as a tensor
        self.symbol: Symbol | None = None  # the parameter
        self.half = isinstance(value, np.ndarray) and value.dtype == np.float16
        if isinstance(value, np.generic):
            value = np.asarray(value)
        if isinstance(value, np.ndarray):
            self.value = _computed(value, name)


def _computed(value: Array, name: str) -> Array:
    """An array in a type that graphs have."""
    if value.dtype.kind == "f":
        return value.astype(np.float32)
    if value.dtype.kind in "iu":
        wide = value.astype(np.int64)
        if wide.size and (wide.min() < -(1 << 31) or wide.max() >= 1 << 31):
            raise ValueError(f"the constant {name!r} has values from {wide.min()} to {wide.max()}, which int32 has not")
        return wide.astype(np.int32)
    return value


class _Deferred:
    """A value that depends on the sizes of tensors: known when they are."""

    __slots__ = ("arguments", "operation", "options", "result")

    def __init__(
        self, operation: Mil | None, arguments: Sequence[Any], options: Mapping[str, Any], result: int = 0
    ) -> None:
        self.operation = operation  # None: the shape of the only argument
        self.arguments = arguments
        self.options = options
        self.result = result

    @property
    def sources(self) -> Iterator[Any]:
        yield from self.arguments
        for value in self.options.values():
            yield from value if isinstance(value, list) else [value]


_Value: TypeAlias = _Known | _Deferred | Symbol
# Operations that do not make values longer, so that sizes may be computed by them.
_OF_SIZES: Final = frozenset(
    (
        *("add", "sub", "mul", "floor_div", "real_div", "mod", "maximum", "minimum", "pow", "abs", "floor", "ceil"),
        *("cast", "concat", "stack", "gather", "slice_by_index", "slice_by_size", "squeeze", "expand_dims", "reshape"),
        *("reduce_prod", "reduce_sum", "reduce_max", "reduce_min", "select", "equal", "not_equal", "less", "greater"),
        *("less_equal", "greater_equal", "logical_and", "logical_or", "logical_not", "identity", "sqrt", "rsqrt"),
        *("inverse", "round", "split"),
    )
)


def _symbols(values: Sequence[Any]) -> list[Symbol]:
    """The symbols that values are, or whose sizes they depend on."""
    found: dict[int, Symbol] = {}
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, Symbol):
            found[id(value)] = value
        elif isinstance(value, _Deferred) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.sources)
    return sorted(found.values(), key=lambda symbol: symbol.call.number)


class _Sizes:
    """Values while a graph is traced, when sizes are known."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self.tensors = tensors
        self.known: dict[int, Any] = {}

    def static(self, value: Any) -> Any:
        """What an option is."""
        if isinstance(value, list):
            return [self.static(part) for part in value]
        if not isinstance(value, _Deferred):
            return value.value
        return self.known[id(value)] if id(value) in self.known else self._array(value)

    def tensor(self, value: _Value | None) -> Tensor | None:
        if value is None:
            return None
        if isinstance(value, Symbol):
            return self.tensors[id(value)]
        graph = current_graph()
        assert graph is not None
        return graph.constant(np.asarray(self.static(value)))

    def _array(self, wanted: _Deferred) -> Array:
        waiting = [wanted]
        while waiting:
            value = waiting[-1]
            missing = [s for s in value.sources if isinstance(s, _Deferred) and id(s) not in self.known]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if id(value) not in self.known:
                self.known[id(value)] = self._evaluated(value)
        found: Array = self.known[id(wanted)]
        return found

    def _evaluated(self, value: _Deferred) -> Array:
        if value.operation is None:
            (symbol,) = value.arguments
            return np.asarray(self.tensors[id(symbol)].shape, np.int32)
        arrays = [self.static(argument) for argument in value.arguments]
        if sum(array.size for array in arrays) > _LONG:
            raise ValueError(f"a size is computed from more than {_LONG} numbers")
        options = {name: self.static(option) for name, option in value.options.items()}
        return np.asarray(_results(value.operation.function(*arrays, **options))[value.result])


def _results(answer: Any) -> list[Any]:
    return list(answer) if isinstance(answer, (tuple, list)) else [answer]


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_model(path: str | os.PathLike[str], function: str | None = None) -> CoreMLModel:
    """The model of a Core ML package, with one of its functions or, by default, all of them.

    Raise :class:`Unsupported` for what retrograd does not have, all of it in one message, or if there is no
    coremltools; :class:`Invalid` for a file that is damaged, or that refers to files outside its folder.
    """
    from ..convert.mlpackage import loader, quiet, read_package

    place = Path(path)
    if not place.exists():
        raise Invalid(f"{path}: there is no such file")
    if place.suffix == ".mlmodelc":
        raise Unsupported(f"{path} is compiled, in a form that only Apple's tools read; give the .mlpackage")
    try:
        package = read_package(place)
        with quiet():
            reader = _Reader(package, loader(package))
            model = reader.model(function)
    except (Invalid, Unsupported) as error:
        raise type(error)(f"{path}: {error}") from None
    except ImportError as error:
        raise Unsupported(f"{path}: {_MISSING} ({error})") from None
    except Exception as error:  # coremltools and protobuf have exceptions of their own for damaged files
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Invalid(f"{path} cannot be read as a Core ML package: {reason}") from None
    if reader.half:
        advise(
            f"{path}: it has float16 tensors, which are computed in float32 here; parameters are rounded to float16 "
            "when they are written back"
        )
    return model


def _block(function: Any) -> Any:
    if function.opset not in function.block_specializations:
        raise Invalid(f"a function is for the operations {function.opset!r}, of which it has no block")
    return function.block_specializations[function.opset]


def _type_of(tensor: Any) -> tuple[tuple[int, ...] | None, np.dtype[Any], bool]:
    """The shape and type of a tensor, and whether it is float16 in the file."""
    from coremltools.proto import MIL_pb2

    name = MIL_pb2.DataType.Name(tensor.dataType)
    if name not in _TYPES:
        raise Unsupported(f"data type {name.lower()}")
    if any(d.WhichOneof("dimension") == "unknown" and d.unknown.variadic for d in tensor.dimensions):
        return None, _TYPES[name], name == "FLOAT16"
    sizes = (d.constant.size if d.WhichOneof("dimension") == "constant" else -1 for d in tensor.dimensions)
    return tuple(sizes), _TYPES[name], name == "FLOAT16"


class _Reader:
    """Reads functions of one package into one recording."""

    def __init__(self, package: Any, load: Callable[[Any], Any]) -> None:
        self.package = package
        self.load = load
        self.recording = Recording()
        self.made = CoreMLModel(self.recording, package)
        self.unknown: Counter[str] = Counter()
        self.refused: list[str] = []
        self.half = False
        self.function = ""
        self.several = False
        self.values: dict[str, _Value | None] = {}  # None: it depends on what is refused
        self.states: dict[str, tuple[Symbol, Symbol]] = {}

    def model(self, wanted: str | None) -> CoreMLModel:
        functions = self.package.spec.mlProgram.functions
        names = sorted(functions)
        if wanted and wanted not in functions:
            raise Invalid(f"it has no function {wanted!r}; there are {', '.join(names)}")
        chosen = [wanted] if wanted else names
        self.several = len(chosen) > 1
        for name in chosen:
            self.made.functions[name] = self._function(name, functions[name])
        if self.unknown or self.refused:
            kinds = (f"{kind} ({count} times)" if count > 1 else kind for kind, count in sorted(self.unknown.items()))
            parts = [f"operations that are not supported: {', '.join(kinds)}"] if self.unknown else []
            raise Unsupported("; ".join([*parts, *self.refused]))
        return self.made

    def _function(self, name: str, function: Any) -> Function:
        self.function, self.values, self.states = name, {}, {}
        block = _block(function)
        inputs = [self._input(entry) for entry in function.inputs]
        for number, operation in enumerate(block.operations):
            self._operation(number, operation)
        outputs = [self._output(output) for output in block.outputs]
        if None in outputs or None in inputs:  # the reasons are in the message
            return Function(name, (), ())
        known = tuple(symbol for symbol in outputs if symbol is not None)
        states = tuple(pair for pair in self.states.values())
        return Function(name, tuple(s for s in inputs if s is not None), known, states, tuple(block.outputs))

    # ---- inputs and outputs ----

    def _input(self, entry: Any) -> Symbol | None:
        kind = entry.type.WhichOneof("type")
        state = kind == "stateType"
        wrapped = entry.type.stateType.wrappedType if state else entry.type
        if wrapped.WhichOneof("type") != "tensorType":
            self.refused.append(f"input {entry.name!r} is a {wrapped.WhichOneof('type')}")
            self.values[entry.name] = None
            return None
        try:
            shape, dtype, half = _type_of(wrapped.tensorType)
        except Unsupported as error:
            self.refused.append(f"input {entry.name!r} has {error}")
            self.values[entry.name] = None
            return None
        self.half |= half
        symbol = self.recording.placeholder(shape, dtype, entry.name)
        limited = self._limited(symbol)
        if state:
            self.states[entry.name] = (symbol, limited)
        self.values[entry.name] = limited
        return symbol

    def _limited(self, symbol: Symbol) -> Symbol:
        """The input, refused when the graph is traced if its size is not one that the file allows."""
        if symbol.shape is None or -1 not in symbol.shape:
            return symbol
        description = self.package.spec.description
        features = [f for one in description.functions if one.name == self.function for f in one.input]
        found = [f.type.multiArrayType for f in (features or description.input) if f.name == symbol.name]
        kind = found[0].WhichOneof("ShapeFlexibility") if found else None
        if kind == "enumeratedShapes":
            shapes = [tuple(s.shape) for s in found[0].enumeratedShapes.shapes]

            def check(shape: tuple[int, ...]) -> None:
                if shape not in shapes:
                    raise ValueError(f"the shape is {list(shape)}, must be one of {', '.join(map(str, shapes))}")

        elif kind == "shapeRange":
            bounds = [(r.lowerBound, r.upperBound) for r in found[0].shapeRange.sizeRanges]

            def check(shape: tuple[int, ...]) -> None:
                for axis, (size, (low, high)) in enumerate(zip(shape, bounds, strict=True)):
                    if size < low or 0 <= high < size:
                        most = "" if high < 0 else f" to {high}"
                        raise ValueError(f"axis {axis} has size {size}, must be from {low}{most}")

        else:
            return symbol

        def limited(x: Tensor) -> Tensor:
            check(x.shape)
            return x

        (result,) = self.recording.call(limited, (symbol,), kind="input", name=symbol.name)
        # The sizes that stand for unknown ones may be out of bounds.
        result.shape, result.dtype = symbol.shape, symbol.dtype
        return result

    def _output(self, name: str) -> Symbol | None:
        if name not in self.values:
            raise Invalid(f"function {self.function!r} returns {name!r}, which no operation makes")
        value = self.values[name]
        if value is None:
            return None
        if isinstance(value, Symbol):
            return value
        if isinstance(value, _Known):
            if not isinstance(value.value, np.ndarray):
                self.refused.append(f"output {name!r} is not a tensor")
                return None
            return self._trained(value) or self.recording.constant(value.value, name)
        roots = _symbols([value])

        def materialised(*tensors: Tensor) -> Tensor:
            found = _Sizes(dict(zip(map(id, roots), tensors, strict=True))).tensor(value)
            assert found is not None
            return found

        return self.recording.call(materialised, roots, kind="size", name=name)[0]

    # ---- constants ----

    def _constant(self, value: Any, name: str, place: _Place) -> _Known:
        found = self.load(value) if value.type.WhichOneof("type") == "tensorType" else None
        return _Known(found, name, place)

    def _trained(self, value: _Known) -> Symbol | None:
        """The variable that a constant is: floats with one axis or more."""
        if value.symbol is not None:
            return value.symbol
        array, place = value.value, value.place
        if place is None or not isinstance(array, np.ndarray) or array.dtype.kind != "f" or not array.ndim:
            return None
        name = f"{self.function}.{value.name}" if self.several and value.name in self.made.parameters else value.name
        variable = Variable(array, name=name)
        self.made.parameters[name], self.made.places[name] = variable, place
        self.half |= value.half
        if value.half:
            self.made.halves.add(name)
        value.symbol = self.recording.variable(variable, name)
        return value.symbol

    # ---- operations ----

    def _operation(self, number: int, operation: Any) -> None:
        kind, outputs = operation.type, [output.name for output in operation.outputs]
        name = outputs[0] if outputs else kind
        results: Sequence[_Value | None] = [None] * len(outputs)
        try:
            if kind == "const":
                results = [self._constant(operation.attributes["val"], name, _Place(self.function, number, ""))]
            elif kind.startswith("constexpr_"):
                results = [self._decompressed(number, operation)]
            elif kind == "read_state":
                results = [self.states[self._state(operation)][1]]
            elif kind == "write_state":
                self._write_state(number, operation)
            elif kind not in OPERATIONS:
                self.unknown[kind] += 1
            else:
                given = self._given(number, operation)
                if given is not None:
                    results = self._applied(kind, name, given, len(outputs))
                    self._check_types(operation, results)
        except MemoryError:
            raise
        except Exception as error:
            reason = str(error) or type(error).__name__
            self.refused.append(reason if reason.startswith(kind) else f"{kind} {name!r}: {reason}")
        if len(results) != len(outputs):
            self.refused.append(f"{kind} {name!r} has {len(outputs)} results, expected {len(results)}")
            results = [None] * len(outputs)
        self.values.update(zip(outputs, results, strict=True))

    def _given(self, number: int, operation: Any) -> dict[str, Any] | None:
        """The inputs by name, each a value or a list of them; None if one depends on what is refused."""
        given: dict[str, Any] = {}
        for name, argument in operation.inputs.items():
            values = []
            for binding in argument.arguments:
                if binding.WhichOneof("binding") == "value":
                    made = operation.outputs[0].name if operation.outputs else operation.type
                    place = _Place(self.function, number, name)
                    value: _Value | None = self._constant(binding.value, f"{made}_{name}", place)
                elif binding.name in self.values:
                    value = self.values[binding.name]
                else:
                    raise Invalid(f"{name} is {binding.name!r}, which no operation before it makes")
                if value is None:
                    return None
                values.append(value)
            given[name] = values
        entry = OPERATIONS.get(operation.type)
        return {
            name: values if (entry and name == entry.values) or len(values) != 1 else values[0]
            for name, values in given.items()
        }

    def _applied(self, kind: str, name: str, given: dict[str, Any], count: int) -> Sequence[_Value]:
        entry = OPERATIONS[kind]
        known = {*entry.tensors, *entry.options, entry.values}
        for argument in given:
            if argument not in known:
                raise Unsupported(f"{argument} is given, which is not supported")
        for argument in (*entry.tensors, *entry.options):
            if argument not in given and argument not in entry.optional:
                raise Invalid(f"{argument} is missing")
        arguments: list[Any] = [given.get(tensor) for tensor in entry.tensors]
        if entry.values is not None:
            arguments += given.get(entry.values, [])
            if not given.get(entry.values):
                raise Invalid(f"{entry.values} is empty")
        options = {option: given[option] for option in entry.options if option in given}
        for option, value in options.items():
            if any(isinstance(part, Symbol) for part in (value if isinstance(value, list) else [value])):
                raise Unsupported(f"{option} depends on data; only constants and what follows from sizes are supported")
        # Of a symbol whose size is known nothing else is needed.
        if kind == "shape":
            (x,) = arguments
            if isinstance(x, _Known):
                return [_Known(np.asarray(x.value.shape, np.int32))]
            if isinstance(x, Symbol) and (x.shape is None or -1 in x.shape):
                return [_Deferred(None, [x], {})]
            if isinstance(x, Symbol):
                return [_Known(np.asarray(x.shape, np.int32))]
        arguments = [(self._trained(a) or a) if isinstance(a, _Known) else a for a in arguments]
        values = [a for a in arguments if a is not None]
        if any(isinstance(a, _Known) and not isinstance(a.value, np.ndarray) for a in values):
            raise Invalid("an input is text, must be a tensor")
        sources = _symbols([*values, *(p for o in options.values() for p in (o if isinstance(o, list) else [o]))])
        if not any(isinstance(a, Symbol) for a in values):
            if not sources and (folded := self._folded(entry, arguments, options)) is not None:
                return folded
            if sources and kind in _OF_SIZES and all(a is not None for a in arguments):
                return [_Deferred(entry, arguments, options, i) for i in range(count)]

        def function(*tensors: Tensor) -> Any:
            sizes = _Sizes(dict(zip(map(id, sources), tensors, strict=True)))
            return entry.function(
                *map(sizes.tensor, arguments), **{n: sizes.static(value) for n, value in options.items()}
            )  # fmt: skip

        return self.recording.call(function, sources, kind=kind, count=count, name=name)

    def _folded(self, entry: Mil, arguments: Sequence[Any], options: Mapping[str, Any]) -> list[_Value] | None:
        """The results of an operation on known values, if they are short."""
        sizes = _Sizes({})
        statics = {name: sizes.static(value) for name, value in options.items()}
        # Traced first: that finds out how long they are.
        graph, _ = trace(lambda: _results(entry.function(*map(sizes.tensor, arguments), **statics)), [])
        if any(tensor.size > _LONG for tensor in graph.outputs):
            return None
        arrays = [None if a is None else a.value for a in arguments]
        return [_Known(np.asarray(found)) for found in _results(entry.function(*arrays, **statics))]

    def _check_types(self, operation: Any, results: Sequence[_Value]) -> None:
        """Refuse a result of another shape or type than the file says."""
        for output, result in zip(operation.outputs, results, strict=False):
            if not isinstance(result, Symbol) or result.shape is None or result.dtype is None:
                continue
            if output.type.WhichOneof("type") != "tensorType":
                raise Unsupported(f"the result {output.name!r} is not a tensor")
            shape, dtype, half = _type_of(output.type.tensorType)
            self.half |= half
            same = shape is None or (
                len(shape) == len(result.shape)
                and all(a == b or -1 in (a, b) for a, b in zip(shape, result.shape, strict=True))
            )
            if not same or dtype != result.dtype:
                stated = "unknown shape" if shape is None else list(shape)
                raise Invalid(f"the result is {result.dtype} {list(result.shape)}, but the file says {dtype} {stated}")

    # ---- states and compressed constants ----

    def _state(self, operation: Any) -> str:
        (argument,) = operation.inputs["input"].arguments
        if argument.name not in self.states:
            raise Invalid(f"input is {argument.name!r}, which is not a state")
        return str(argument.name)

    def _write_state(self, number: int, operation: Any) -> None:
        name, given = self._state(operation), self._given(number, operation)
        if given is None:
            return
        data = given["data"]
        symbol = data if isinstance(data, Symbol) else None
        if isinstance(data, _Known):
            symbol = self._trained(data) or self.recording.constant(data.value)
        placeholder, _ = self.states[name]
        if symbol is None or symbol.dtype != placeholder.dtype or symbol.shape != placeholder.shape:
            raise Invalid(f"data is {symbol!r}, but the state is {placeholder!r}")
        self.states[name] = (placeholder, symbol)

    def _decompressed(self, number: int, operation: Any) -> _Known | None:
        """The value of a compressed constant, which is not a parameter: it could not be written back."""
        from ..convert.guard import check_size

        function = _CONSTEXPR.get(operation.type)
        if function is None:
            self.unknown[operation.type] += 1
            return None
        given = {name: self.load(value) for name, value in operation.attributes.items() if name != "name"}
        inputs = self._given(number, operation)
        if inputs is None:
            return None
        given.update((name, value.value) for name, value in inputs.items())
        shape, _, half = _type_of(operation.outputs[0].type.tensorType)
        if shape is None or min(shape, default=0) < 0:
            raise Invalid("its size is not known")
        self.half |= half
        check_size(4 * int(np.prod(shape, dtype=object)), self.package.size)
        found = np.asarray(function(shape, **given))
        if found.shape != shape:
            raise Invalid(f"its shape is {list(found.shape)}, but the file says {list(shape)}")
        return _Known(found)


def _affine(shape: tuple[int, ...], /, *, quantized_data: Any, zero_point: Any, scale: Any, axis: Any) -> Array:
    def along(value: Any) -> Array:
        array = np.asarray(value, np.float32)
        if not array.ndim:
            return array
        return array.reshape([-1 if i == int(axis) % len(shape) else 1 for i in range(len(shape))])

    found: Array = along(scale) * (np.asarray(quantized_data, np.float32).reshape(shape) - along(zero_point))
    return found


def _blockwise(shape: tuple[int, ...], /, *, data: Any, scale: Any, offset: Any = None) -> Array:
    """A scale, and an offset, for each block of equal size."""

    def spread(value: Any) -> Array:
        array = np.asarray(value, np.float32)
        for axis, size in enumerate(shape):
            if size % array.shape[axis]:
                raise ValueError(f"scale or offset has shape {array.shape}, for data of shape {shape}")
            array = np.repeat(array, size // array.shape[axis], axis)
        return array

    shifted = np.asarray(data, np.float32).reshape(shape) - (0 if offset is None else spread(offset))
    found: Array = spread(scale) * shifted
    return found


def _bits(packed: Any, width: int, count: int) -> Array:
    """Numbers of `width` bits, which follow one another from the lowest bit on."""
    bits = np.unpackbits(np.asarray(packed, np.uint8), bitorder="little")[: width * count]
    return bits.reshape(count, width).astype(np.int64) @ (1 << np.arange(width))


def _looked_up(shape: tuple[int, ...], /, *, indices: Any, lut: Any, **given: Any) -> Array:
    if "shape" not in given:
        raise Unsupported("lookup tables with blocks are not supported")
    table, count = np.asarray(lut), int(np.prod(shape))
    found: Array = table[_bits(indices, max(1, int(np.log2(table.size))), count)].reshape(shape)
    return found


def _sparse(shape: tuple[int, ...], /, *, nonzero_data: Any, mask: Any, **given: Any) -> Array:
    if "shape" not in given:
        raise Unsupported("masks of single bits are not supported")
    dense = np.zeros(int(np.prod(shape)), np.float32)
    dense[_bits(mask, 1, dense.size) != 0] = nonzero_data
    return dense.reshape(shape)


_CONSTEXPR: Final[dict[str, Callable[..., Array]]] = {
    "constexpr_affine_dequantize": _affine,
    "constexpr_blockwise_shift_scale": _blockwise,
    "constexpr_cast": lambda shape, /, *, source_val, output_dtype: np.asarray(source_val, np.float32).reshape(shape),
    "constexpr_lut_to_dense": _looked_up,
    "constexpr_sparse_to_dense": _sparse,
}

# ---- writing ---------------------------------------------------------------------------------------------------------

# The record before an array in a file of weights: a mark, the type, the bytes, and where they begin.
_RECORD: Final = struct.Struct("<IIQQ")
_MARK: Final = 0xDEADBEEF


def write_parameters(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a copy of the package with the present values of the parameters, all of it or nothing.

    `path` may be that of the package itself. Parameters that are float16 in the file are rounded.
    """
    from ..convert.layers import ConvertError
    from ..convert.mlpackage import quiet, replaced_folder

    if not isinstance(model, CoreMLModel):
        raise Invalid("the model was not read from a Core ML package: there is none to write its parameters into")
    target, package = Path(path), model.package
    arrays = {name: _rounded(name, v.value, name in model.halves) for name, v in model.parameters.items()}
    if target.exists() and not target.is_dir():
        raise Invalid(f"{path} is a file; a package of Core ML is a folder")
    spec = type(package.spec)()
    spec.CopyFrom(package.spec)
    uses = Counter((blob.fileName, blob.offset) for blob in _blobs(spec))
    try:
        with quiet(), replaced_folder(target) as made:
            shutil.copytree(package.path, made)
            weights = made / package.weights.relative_to(package.path)
            for name, array in arrays.items():
                _store(model.places[name].value(spec), array, weights, uses)
            (made / package.model.relative_to(package.path)).write_bytes(spec.SerializeToString(deterministic=True))
    except OSError as error:
        raise Invalid(f"{path}: {error.strerror or error}") from None
    except ConvertError as error:
        raise Invalid(f"{path}: {error}") from None
    if target.resolve() == package.path.resolve():
        package.spec.CopyFrom(spec)


def _rounded(name: str, value: Array, half: bool) -> Array:
    if not half:
        return value
    with np.errstate(over="ignore"):
        found = value.astype(np.float16)
    if (np.isinf(found) & np.isfinite(value)).any():
        raise Invalid(f"the parameter {name!r} is float16 in the file, but has {np.abs(value).max():g}, above 65504")
    return found


def _blobs(spec: Any) -> Iterator[Any]:
    """All references to arrays in files."""
    for function in spec.mlProgram.functions.values():
        for block in function.block_specializations.values():
            for operation in block.operations:
                bindings = (b for argument in operation.inputs.values() for b in argument.arguments)
                values = (b.value for b in bindings if b.WhichOneof("binding") == "value")
                for value in (*operation.attributes.values(), *values):
                    if value.WhichOneof("value") == "blobFileValue":
                        yield value.blobFileValue


def _store(value: Any, array: Array, weights: Path, uses: Counter[tuple[str, int]]) -> None:
    """Put an array in the place of a value of the specification."""
    if value.WhichOneof("value") != "blobFileValue":
        tensor = value.immediateValue.tensor
        if array.dtype == np.float16:
            tensor.bytes.values = array.tobytes()
        else:
            tensor.floats.values[:] = array.reshape(-1).tolist()
        return
    from ..convert.guard import inside

    blob = value.blobFileValue
    file = inside(weights, blob.fileName.rsplit("/", 1)[-1])
    content = array.tobytes()
    with open(file, "r+b") as stream:
        stream.seek(blob.offset)
        record = stream.read(_RECORD.size)
        mark, _, size, start = _RECORD.unpack(record.ljust(_RECORD.size, b"\0"))
        stream.seek(start)
        stored = stream.read(len(content))
        if mark != _MARK or size != len(content) or len(stored) != size:
            raise Invalid(f"{file.name} has changed since the package was read")
        if stored == content:
            return
        if uses[blob.fileName, blob.offset] == 1:
            stream.seek(start)
            stream.write(content)
            return
    # Another constant has the same record: this one gets a new one.
    from coremltools.libmilstoragepython import _BlobStorageWriter

    writer = _BlobStorageWriter(str(file), False)
    uses[blob.fileName, blob.offset] -= 1
    if array.dtype == np.float16:
        blob.offset = writer.write_fp16_data(array.reshape(-1).view(np.uint16))
    else:
        blob.offset = writer.write_float_data(array.reshape(-1))
    uses[blob.fileName, blob.offset] += 1
