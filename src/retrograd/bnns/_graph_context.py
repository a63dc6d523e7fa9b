"""Contexts of graphs: shapes, arguments and execution. The Swift class, over which the C functions are.

A function is compiled to a program for the shapes of its inputs, once; its memory is allocated then. Execution copies
the inputs into it, runs it in one call of the engine, and copies the outputs out.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ..graph import Program, Spec, Symbol
from ..graph.recording import UNKNOWN, Shape
from ..ops._buffers import elements_of
from ..ops._types import Array
from ._array_size import BNNSTensor
from ._failure import Invalid, Unsupported
from ._graph_builder import Builder, contiguous_strides
from ._graph_model import Function, Model
from ._graph_values import CompileOptions, GraphError, Intent
from ._graph_values import Shape as ShapeValue
from ._memory import as_integer, check_disjoint, check_writable, data_type_of, dtype_of

_REFUSALS: Final = (Invalid, Unsupported, TypeError, ValueError, IndexError, MemoryError, OSError)
_MOST_PLANS: Final = 32  # of a function; the oldest goes


class Plan(NamedTuple):
    """A function compiled for the shapes of its inputs."""

    program: Program
    inputs: tuple[Spec, ...]  # of all inputs, those that are variables included
    outputs: tuple[Spec, ...]


class Entry:
    """A function of a model as a context executes it: its arguments are the outputs, then the inputs."""

    def __init__(self, model: Model, function: Function) -> None:
        self.model, self.function = model, function
        self.outputs, self.inputs = function.outputs, function.inputs
        given = function.names or tuple(symbol.name for symbol in self.outputs)
        self.names = [name or f"output_{i}" for i, name in enumerate(given)]
        self.names += [symbol.name or f"input_{i}" for i, symbol in enumerate(self.inputs)]
        states = dict(function.states)
        self.intents = [Intent.output] * len(self.outputs)
        self.intents += [Intent.inOut if symbol in states else Intent.input for symbol in self.inputs]
        self.fed = [symbol for symbol in self.inputs if symbol.call.kind == "placeholder"]
        # A state is a variable, to which the argument is copied before a run, or a placeholder with another output.
        self.kept = [(symbol, states[symbol]) for symbol in self.inputs if symbol in states]
        self.left = [new for symbol, new in self.kept if symbol.call.kind == "placeholder"]
        pairs = {(s, new) for s, new in (*self.kept, *function.updates) if s.call.kind == "variable" and new is not s}
        self.assigns = [
            call for call in model.recording.calls if call.kind == "assign" and tuple(call.operands) in pairs
        ]
        self.shapes: list[Shape] = [symbol.shape for symbol in self.inputs]  # as set by the caller
        self.plans: dict[tuple[tuple[int, ...], ...], Plan] = {}

    def plan(self, shapes: Sequence[tuple[int, ...]]) -> Plan:
        key = tuple(shapes)
        found = self.plans.get(key)
        if found is None:
            specs = dict(zip(self.inputs, key, strict=True))
            feeds = {s: Spec(specs[s], _dtype(s)) for s in self.fed}
            program = self.model.recording.program(feeds, [*self.outputs, *self.left], self.assigns)
            inputs = tuple(Spec(shape, _dtype(s)) for s, shape in specs.items())
            while len(self.plans) >= _MOST_PLANS:
                del self.plans[next(iter(self.plans))]
            found = self.plans[key] = Plan(program, inputs, tuple(program.specs[: len(self.outputs)]))
        return found

    def known(self) -> Plan | None:
        """The plan for the shapes that are set; None if some size is not."""
        if any(shape is None or UNKNOWN in shape for shape in self.shapes):
            return None
        return self.plan([shape for shape in self.shapes if shape is not None])

    def position(self, argument: str | int) -> int:
        if isinstance(argument, int):
            if not 0 <= argument < len(self.names):
                raise Invalid(f"argument is {argument}, but {self.function.name!r} has {len(self.names)} arguments")
            return argument
        if argument not in self.names:
            raise Invalid(f"there is no argument {argument!r}; there are {', '.join(self.names)}")
        return self.names.index(argument)


def _dtype(symbol: Symbol) -> np.dtype[Any]:
    assert symbol.dtype is not None
    return symbol.dtype


def _fits(shape: Sequence[int], model: Shape) -> bool:
    return model is None or (
        len(shape) == len(model) and all(b in (a, UNKNOWN) for a, b in zip(shape, model, strict=True))
    )


class Context:
    """What executes the functions of a graph. One thread uses it at a time; the graph may have several contexts.

    ``Context(compileFromPath=path)`` reads a graph that :meth:`write` has saved, or a Core ML package;
    ``BNNSGraph.makeContext`` builds one.
    """

    def __init__(
        self, *, compileFromPath: Any, functionName: str | None = None, options: CompileOptions | None = None
    ) -> None:
        from ._graph_file import read_model

        with raising("unableToMakeGraph"):
            model = read_model(compileFromPath, functionName)
        self._start(model, options)

    @classmethod
    def of(cls, model: Model, options: CompileOptions | None = None) -> Context:
        """A context of a model."""
        made = cls.__new__(cls)
        made._start(model, options)
        return made

    def _start(self, model: Model, options: CompileOptions | None) -> None:
        self.model = model
        self.options = options or CompileOptions()
        self.checkForNaNsAndInfinities = False
        self._entries: dict[str, Entry] = {}

    def entry(self, function: str | None) -> Entry:
        found = self._entries.get(function or "")
        if found is None:
            chosen = self.model.function(function)
            found = self._entries.get(chosen.name) or Entry(self.model, chosen)
            self._entries[function or ""] = self._entries[chosen.name] = found
        return found

    # ---- queries ----

    @property
    def functionNames(self) -> list[str]:
        return list(self.model.functions)

    @property
    def functionCount(self) -> int:
        return len(self.model.functions)

    @property
    def parameters(self) -> dict[str, Array]:
        """What the context keeps from run to run, by name, as arrays that may be written to (retrograd's).

        The parameters of a builder, an optimizer's states, and the constants of a model that was read from a file.
        """
        return {name: variable.value for name, variable in self.model.parameters.items()}

    def argumentNames(self, *, forFunction: str | None = None) -> list[str]:
        """The names of the outputs, then those of the inputs: the order of the arguments."""
        with raising("unableToQuery"):
            return list(self.entry(forFunction).names)

    def argumentCount(self, *, forFunction: str | None = None) -> int:
        with raising("unableToQuery"):
            return len(self.entry(forFunction).names)

    def argumentPosition(self, *, forFunction: str | None = None, argument: str) -> int:
        with raising("unableToQuery"):
            return self.entry(forFunction).position(argument)

    @property
    def streamingAdvanceCount(self) -> int:
        raise GraphError("unableToQuery", "streaming is not supported: keep the state in an inOut argument")

    @streamingAdvanceCount.setter
    def streamingAdvanceCount(self, count: int) -> None:
        raise GraphError("unableToQuery", "streaming is not supported: keep the state in an inOut argument")

    def tensor(
        self, *, forFunction: str | None = None, argument: str | int, fillKnownDynamicShapes: bool = True
    ) -> BNNSTensor:
        """A tensor of an argument's type and shape, without memory. Sizes that are not known are -1."""
        with raising("unableToQuery"):
            return self.described(forFunction, argument, fillKnownDynamicShapes)

    def described(self, function: str | None, argument: str | int, fill: bool) -> BNNSTensor:
        entry = self.entry(function)
        place = entry.position(argument)
        symbol = (*entry.outputs, *entry.inputs)[place]
        shape, dtype = symbol.shape, symbol.dtype
        if fill:
            plan = entry.known()
            if plan is not None:
                shape, dtype = (*plan.outputs, *plan.inputs)[place][:2]
            elif place >= len(entry.outputs):
                shape = entry.shapes[place - len(entry.outputs)]
        if shape is None or dtype is None:
            raise Invalid(f"nothing is known of {symbol!r} before the shapes of the inputs are set")
        strides = [UNKNOWN] * len(shape) if UNKNOWN in shape else contiguous_strides(shape)
        return BNNSTensor(
            data_type=data_type_of(dtype), rank=len(shape), shape=shape, stride=strides,
            name=entry.names[place].encode(),
        )  # fmt: skip

    def allocateTensor(
        self, *, forFunction: str | None = None, argument: str | int, fillKnownDynamicShapes: bool = True
    ) -> BNNSTensor:
        """A tensor of an argument's type and shape, with memory."""
        made = self.tensor(
            forFunction=forFunction, argument=argument, fillKnownDynamicShapes=fillKnownDynamicShapes
        )  # fmt: skip
        with raising("unableToQuery"):
            shape = tuple(made.shape[: made.rank])
            if UNKNOWN in shape:
                raise Invalid(f"argument {argument!r} has shape {list(shape)}: set the shapes first")
            made.data = np.zeros(shape, dtype_of(made.data_type))
            made.data_size_in_bytes = made.data.nbytes
        return made

    def workspaceSize(self, *, forFunction: str | None = None) -> int:
        """The bytes of a program for the shapes that are set, in whole pages (retrograd's in Swift).

        The context has this memory itself, from now on: a workspace for C's function is checked, not used.
        """
        with raising("unableToQuery"):
            return self.workspace(forFunction)

    def workspace(self, function: str | None) -> int:
        entry = self.entry(function)
        plan = entry.known()
        if plan is None:
            names = [s.name for s, shape in zip(entry.inputs, entry.shapes, strict=True) if UNKNOWN in (shape or (-1,))]
            raise Invalid(f"the shapes of {', '.join(names)} are not set")
        return -(-plan.program.memory // mmap.PAGESIZE) * mmap.PAGESIZE

    # ---- shapes ----

    def setDynamicShapes(self, shapes: Sequence[Any], *, forFunction: str | None = None) -> int:
        """Set the shapes of the arguments, the outputs' first; return 0 if all are exact now, or 2 if some are not.

        A shape without sizes, or a size of 0, is as in the model. Those of outputs that have sizes are filled in.
        """
        with raising("unableToSetDynamicShapes"):
            return self.set_shapes(forFunction, [s if isinstance(s, ShapeValue) else ShapeValue(s) for s in shapes])

    def set_shapes(self, function: str | None, shapes: Sequence[ShapeValue]) -> int:
        entry = self.entry(function)
        if len(shapes) != len(entry.names):
            raise Invalid(
                f"{len(shapes)} shapes are given, but {entry.function.name!r} has {len(entry.names)} arguments"
            )
        outputs, inputs = shapes[: len(entry.outputs)], shapes[len(entry.outputs) :]
        new = [self._merged(entry, symbol, one) for symbol, one in zip(entry.inputs, inputs, strict=True)]
        if any(shape is None or UNKNOWN in shape for shape in new):
            self._check_outputs(entry, outputs, [symbol.shape for symbol in entry.outputs])
            entry.shapes = new
            return 2
        plan = entry.plan([shape for shape in new if shape is not None])
        self._check_outputs(entry, outputs, [spec.shape for spec in plan.outputs])
        entry.shapes = new
        for one, spec in zip(outputs, plan.outputs, strict=True):
            if one.rank:
                one.shape = list(spec.shape)
        return 0

    @staticmethod
    def _merged(entry: Entry, symbol: Symbol, given: ShapeValue) -> Shape:
        if not given.rank:
            return symbol.shape
        model = symbol.shape or (UNKNOWN,) * given.rank
        sizes = [as_integer("size", size) for size in given]
        merged = tuple(b if a == 0 else a for a, b in zip(sizes, model, strict=False))
        if len(sizes) != len(model) or min(sizes) < 0 or not _fits(merged, model):
            raise Invalid(f"the shape of {symbol.name!r} is {sizes}, but the graph has {list(model)}")
        return merged

    @staticmethod
    def _check_outputs(entry: Entry, given: Sequence[ShapeValue], shapes: Sequence[Shape]) -> None:
        for name, one, shape in zip(entry.names, given, shapes, strict=False):
            fits = shape is None or not one.rank or (
                one.rank == len(shape) and all(a in (0, b) or b < 0 for a, b in zip(one, shape, strict=True))
            )  # fmt: skip
            if not fits:
                raise Invalid(f"the shape of {name!r} is {list(one)}, but the graph has {list(shape or ())}")

    def setBatchSize(self, batchSize: int, *, forFunction: str | None = None) -> None:
        """Set the first size of all arguments, where it is flexible. No other size may be."""
        with raising("unableToSetBatchSize"):
            self.set_batch(forFunction, batchSize)

    def set_batch(self, function: str | None, size: int) -> None:
        entry = self.entry(function)
        count = as_integer("batch_size", size)
        if count < 1:
            raise Invalid(f"batch_size is {count}, must be at least 1")
        new = []
        for symbol in entry.inputs:
            if symbol.shape is None or UNKNOWN in symbol.shape[1:]:
                raise Invalid(f"{symbol!r} has a flexible size that is not the first")
            flexible = symbol.shape[:1] == (UNKNOWN,)
            new.append((count, *symbol.shape[1:]) if flexible else symbol.shape)
        if new == [symbol.shape for symbol in entry.inputs]:
            raise Invalid(f"no argument of {entry.function.name!r} has a flexible size")
        entry.plan(new)
        entry.shapes = list(new)

    # ---- execution ----

    def executeFunction(self, functionName: str | None = None, *, arguments: Sequence[Any]) -> None:
        """Execute a function. `arguments` are the outputs, which are written to, then the inputs.

        Each is a BNNSTensor, an array, or other memory. An output tensor without data gets some.
        """
        with raising("unableToExecute"):
            self.execute(functionName, arguments)

    def execute(self, function: str | None, arguments: Sequence[Any], sizes: Sequence[int] | None = None) -> None:
        """`sizes`: the bytes that C's caller claims of pointers."""
        entry = self.entry(function)
        if len(arguments) != len(entry.names):
            raise Invalid(
                f"{len(arguments)} arguments are given, but {entry.function.name!r} has {len(entry.names)}: "
                + ", ".join(entry.names)
            )
        first = len(entry.outputs)
        claimed = [None] * len(arguments) if sizes is None else sizes
        inputs = [
            _given(name, one, _dtype(symbol), symbol.shape, shape, size)
            for name, one, symbol, shape, size in zip(
                entry.names[first:], arguments[first:], entry.inputs, entry.shapes, claimed[first:], strict=True
            )
        ]
        plan = entry.plan([array.shape for array in inputs])
        outputs = [
            _destination(name, one, spec, size)
            for name, one, spec, size in zip(entry.names, arguments, plan.outputs, claimed, strict=False)
        ]
        states = {
            symbol: array for symbol, array in zip(entry.inputs, inputs, strict=True) if symbol in dict(entry.kept)
        }
        for symbol, array in states.items():
            check_writable(symbol.name, array)
        if first + len(states) > 1:
            written = dict(zip(entry.names, outputs, strict=False)) | {s.name: a for s, a in states.items()}
            check_disjoint(written, {})
        if self.checkForNaNsAndInfinities:
            self._check_finite(entry.names[first:], inputs)
        with self.model.lock:
            self._run(entry, plan, inputs, outputs, states)
        for one, array, spec in zip(arguments, outputs, plan.outputs, strict=False):
            if isinstance(one, BNNSTensor):
                _describe(one, array, spec)

    def _run(
        self,
        entry: Entry,
        plan: Plan,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        states: Mapping[Symbol, Array],
    ) -> None:
        fed = [
            np.asarray(array, order="C")
            for symbol, array in zip(entry.inputs, inputs, strict=True)
            if symbol.call.kind == "placeholder"
        ]
        wanted = [*outputs, *(array for symbol, array in states.items() if symbol.call.kind == "placeholder")]
        # Outputs that are to be checked are not written before that.
        direct = [
            np.empty(array.shape, array.dtype)
            if self.checkForNaNsAndInfinities or not array.flags.c_contiguous
            else array
            for array in wanted
        ]
        for symbol, array in states.items():
            if symbol.call.kind == "variable":
                symbol.call.value.value[...] = array
        plan.program.run_into(fed, direct, num_threads=1 if self.options.useSingleThread else None)
        if self.checkForNaNsAndInfinities:
            self._check_finite(entry.names, direct[: len(outputs)])
        for array, result in zip(wanted, direct, strict=True):
            if array is not result:
                array[...] = result
        for symbol, array in states.items():
            if symbol.call.kind == "variable":
                array[...] = symbol.call.value.value

    def _check_finite(self, names: Sequence[str], arrays: Sequence[Array]) -> None:
        for name, array in zip(names, arrays, strict=False):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise Invalid(f"{name!r} has NaNs or infinities")

    # ---- files ----

    def write(self, *, to: Any) -> None:
        """Save the graph with its constants and parameters, for ``Context(compileFromPath=)`` (retrograd's).

        A graph that was read from a Core ML package writes the values of its parameters to a copy of that.
        """
        from ._graph_file import write_model

        with raising("unableToMakeGraph"):
            write_model(self.model, to)


def make_context(block: Callable[[Builder], Any], options: CompileOptions | None = None) -> Context:
    builder = Builder()
    return Context.of(builder._finished(block(builder)), options)


class raising:
    """Turn refusals into Swift's error of this case."""

    def __init__(self, case: str) -> None:
        self.case = case

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _REFUSALS):
            raise GraphError(self.case, str(error)) from error


# ---- arguments ------------------------------------------------------------------------------------------------------


def _given(name: str, argument: Any, dtype: np.dtype[Any], model: Shape, known: Shape, size: int | None) -> Array:
    """The array of an input."""
    if isinstance(argument, BNNSTensor):
        return _tensor_array(name, argument, dtype, model, known)
    array, typed = _memory(name, argument)
    exact = None if known is None or UNKNOWN in known else known
    if typed:
        if array.dtype != dtype:
            raise Invalid(f"{name!r} has elements of type {array.dtype}, must have {dtype}")
        if _fits(array.shape, model) and (exact is None or array.shape != (0,)):
            return _claimed(name, array, size)
        if exact is not None and array.flags.c_contiguous and array.size == _count(exact):
            return _claimed(name, array.reshape(exact), size)
        raise Invalid(f"{name!r} has shape {list(array.shape)}, but the graph has {list(exact or model or ())}")
    if exact is None:
        raise Invalid(f"{name!r} is memory without a shape: set the shape {list(known or ())} first")
    return _claimed(name, _view(name, array, Spec(exact, dtype)), size)


def _destination(name: str, argument: Any, spec: Spec, size: int | None) -> Array:
    """The array of an output."""
    if isinstance(argument, BNNSTensor):
        if argument.data is None:
            _check_type(name, argument, spec.dtype)
            return np.empty(spec.shape, spec.dtype)
        array = _tensor_array(name, argument, spec.dtype, spec.shape, spec.shape)
    else:
        array, typed = _memory(name, argument)
        if not typed:
            array = _view(name, array, spec)
        elif array.dtype != spec.dtype:
            raise Invalid(f"{name!r} has elements of type {array.dtype}, must have {spec.dtype}")
        elif array.shape != spec.shape:
            if not array.flags.c_contiguous or array.size != spec.elements:
                raise Invalid(f"{name!r} has shape {list(array.shape)}, but the graph computes {list(spec.shape)}")
            array = array.reshape(spec.shape)
    check_writable(repr(name), array)
    return _claimed(name, array, size)


def _count(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _memory(name: str, data: Any) -> tuple[Array, bool]:
    if data is None:
        raise Invalid(f"{name!r} is NULL")
    try:
        return elements_of(data)
    except TypeError as error:
        raise Invalid(f"{name!r} {error}") from None


def _view(name: str, memory: Array, spec: Spec) -> Array:
    if memory.nbytes < spec.nbytes:
        raise Invalid(f"{name!r} has {memory.nbytes} bytes, but {spec!r} has {spec.nbytes}")
    view: Array = np.ndarray(spec.shape, spec.dtype, memory)
    return view


def _claimed(name: str, array: Array, size: int | None) -> Array:
    if size is not None and size < array.nbytes:
        raise Invalid(f"data_ptr_size of {name!r} is {size}, but it needs {array.nbytes} bytes")
    return array


def _check_type(name: str, tensor: BNNSTensor, dtype: np.dtype[Any]) -> None:
    if tensor.data_type and dtype_of(tensor.data_type) != dtype:
        raise Invalid(f"data_type of {name!r} is {dtype_of(tensor.data_type)}, must be {dtype}")


def _tensor_array(name: str, tensor: BNNSTensor, dtype: np.dtype[Any], model: Shape, known: Shape) -> Array:
    """The memory of a tensor in its shape. A rank of 0, or a size of 0 or -1, is as in the graph."""
    _check_type(name, tensor, dtype)
    memory, typed = _memory(f"{name}.data", tensor.data)
    if typed and memory.dtype != dtype:
        raise Invalid(f"data of {name!r} has elements of type {memory.dtype}, must have {dtype}")
    rank = as_integer("rank", tensor.rank)
    base = known or ()
    sizes = [as_integer("shape", size) for size in tensor.shape[:rank]] if rank else list(base)
    if rank == len(base):
        sizes = [b if a in (0, UNKNOWN) and b >= 0 else a for a, b in zip(sizes, base, strict=True)]
    if min(sizes, default=0) < 0 or not _fits(sizes, model):
        raise Invalid(f"{name!r} has shape {sizes}, but the graph has {list(model or ())}")
    shape = tuple(sizes)
    strides = [as_integer("stride", step) for step in tensor.stride[:rank]] if rank else []
    if not any(strides):
        strides = contiguous_strides(shape)
    if min(strides, default=0) < 0:
        raise Invalid(f"{name!r} has strides {strides}, must be at least 0")
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if not memory.flags.c_contiguous:
        if memory.shape == shape and list(memory.strides) == [s * dtype.itemsize for s in strides]:
            return memory
        raise Invalid(f"data of {name!r} is not contiguous, and not of shape {list(shape)} with strides {strides}")
    held = min(tensor.data_size_in_bytes or memory.nbytes, memory.nbytes)
    if held < span * dtype.itemsize:
        raise Invalid(f"data of {name!r} has {held} bytes, but the tensor spans {span * dtype.itemsize}")
    view: Array = np.ndarray(shape, dtype, memory, 0, [s * dtype.itemsize for s in strides])
    if not memory.flags.writeable:
        view.flags.writeable = False
    return view


def _describe(tensor: BNNSTensor, array: Array, spec: Spec) -> None:
    """Fill in what an output tensor has: its layout, and its memory if it had none."""
    tensor.data_type, tensor.rank = data_type_of(spec.dtype), len(spec.shape)
    tensor.shape = spec.shape
    if not any(tensor.stride[: tensor.rank]) or tensor.data is None:
        tensor.stride = contiguous_strides(spec.shape)
    if tensor.data is None:
        tensor.data, tensor.data_size_in_bytes = array, array.nbytes
