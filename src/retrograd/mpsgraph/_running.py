"""How graphs run: at once, on a command queue, in a command buffer, or compiled to an executable.

A run is a dictionary look-up by feeds and targets, and one call of a compiled program. Other shapes of the feeds have
programs of their own, which are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, NoReturn

import numpy as np

from ..graph import Program, Spec
from ..graph.recording import Call, Symbol
from ..mps import MTLCommandBuffer, MTLCommandQueue, MTLCreateSystemDefaultDevice, NSError
from ..ops._types import Array
from ._data import MPSCommandBuffer, MPSGraphTensorData, buffer_of, wrapped
from ._graph import Building, MPSGraphOperation, MPSGraphTensor
from ._types import (
    DATA_TYPES,
    Descriptor,
    MPSGraphCompilationDescriptor,
    MPSGraphDevice,
    MPSGraphExecutableExecutionDescriptor,
    MPSGraphExecutableSerializationDescriptor,
    MPSGraphExecutionDescriptor,
    MPSGraphObject,
    MPSGraphOptions,
    MPSGraphShapedType,
)

_MOST_PROGRAMS: Final = 32  # of other shapes, that a plan keeps
Feeds = Mapping[MPSGraphTensor, MPSGraphTensorData]
Results = dict[MPSGraphTensor, MPSGraphTensorData]


class Plan:
    """What a run with given feeds and targets does: its programs, by the shapes of the feeds."""

    def __init__(
        self,
        graph: Running,
        where: str,
        feeds: Sequence[MPSGraphTensor],
        targets: Sequence[MPSGraphTensor],
        operations: Sequence[MPSGraphOperation],
    ) -> None:
        self.graph = graph
        self.where = where
        self.targets = tuple(targets)
        self.symbols = [_of_graph(graph, where, "targetTensors", t, MPSGraphTensor)._symbol for t in targets]
        self.calls = [_of_graph(graph, where, "targetOperations", o, MPSGraphOperation)._call for o in operations]
        given = {_placeholder(graph, where, t): t for t in feeds}
        recording = graph._recording
        needed = recording.placeholders(self.symbols, self.calls)
        for symbol in needed:
            if symbol not in given:
                raise ValueError(f"{where}: no feed for {symbol!r}, on which {self._dependent(symbol)} depends")
        self.needed = [given[symbol] for symbol in needed]
        self.program: Program | None = None  # of the last run
        self.programs: dict[tuple[Spec, ...], Program] = {}

    def _dependent(self, placeholder: Symbol) -> str:
        """A target that depends on a placeholder."""
        recording = self.graph._recording
        for symbol in self.symbols:
            if placeholder in recording.placeholders([symbol]):
                return repr(symbol)
        found: str = next(c.described for c in self.calls if placeholder in recording.placeholders([], [c]))
        return found

    def of(self, specs: tuple[Spec, ...]) -> Program:
        """The program for feeds of these specs."""
        found = self.programs.get(specs)
        if found is None:
            if len(self.programs) >= _MOST_PROGRAMS:
                self.programs.pop(next(iter(self.programs)))
            feeds = {t._symbol: spec for t, spec in zip(self.needed, specs, strict=True)}
            found = self.programs[specs] = self.graph._recording.program(feeds, self.symbols, self.calls)
        self.program = found
        return found

    def run(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """The results, in the order of the targets."""
        with self.graph._lock:
            if self.program is not None:
                found = self.program.arrays(arrays)
                if found is not None:
                    return found
            program = self.of(tuple([Spec(a.shape, a.dtype) for a in arrays]))
            found = program.arrays(tuple([np.asarray(a, order="C") for a in arrays]))
            assert found is not None
            return found


def _of_graph(graph: Running, where: str, name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or not isinstance(value, (MPSGraphTensor, MPSGraphOperation)):
        raise TypeError(f"{where}: {name} has {type(value).__name__}, must be {kind.__name__}")
    if value._graph is not graph:
        raise ValueError(f"{where}: {name} has {value!r}, which belongs to another graph")
    source: Call = value._symbol.call if isinstance(value, MPSGraphTensor) else value._call
    if source.recording is not graph._recording:
        raise ValueError(f"{where}: {name} has {value!r}, which is only known inside the body of a loop")
    return value


def _placeholder(graph: Running, where: str, tensor: Any) -> Symbol:
    symbol: Symbol = _of_graph(graph, where, "feeds", tensor, MPSGraphTensor)._symbol
    if symbol.call.kind != "placeholder":
        raise TypeError(f"{where}: feeds has {symbol!r}, which is not a placeholder")
    return symbol


def _array(where: str, tensor: object, data: Any) -> Array:
    if not isinstance(data, MPSGraphTensorData):
        raise TypeError(f"{where}: the feed of {tensor!r} must be an MPSGraphTensorData, not {type(data).__name__}")
    return data._array


def _check_queue(where: str, queue: Any) -> None:
    if queue is not None and not isinstance(queue, MTLCommandQueue):
        raise TypeError(f"{where}: with_ must be an MTLCommandQueue, not {type(queue).__name__}")


def _check_descriptor(where: str, descriptor: Any, kind: type[Descriptor]) -> Any:
    if descriptor is not None and not isinstance(descriptor, kind):
        raise TypeError(f"{where}: executionDescriptor must be an {kind.__name__}, not {type(descriptor).__name__}")
    return None if descriptor is None else descriptor.copy()


def _check_target(where: str, name: object, data: Any, spec: Spec) -> None:
    """Check data that a result is written to."""
    if not isinstance(data, MPSGraphTensorData):
        raise TypeError(f"{where}: the result of {name!r} must be an MPSGraphTensorData, not {type(data).__name__}")
    array = data._array
    if (array.shape, array.dtype) != tuple(spec):
        raise ValueError(f"{where}: {data!r} is given for {name!r}, which is {spec!r}")
    if not array.flags.writeable:
        raise ValueError(f"{where}: {data!r} is given for the result of {name!r}, but its memory is read-only")


def submit(buffer: MTLCommandBuffer, work: Callable[[], None], results: Any, descriptor: Any) -> None:
    """Add work to a command buffer, and after it the descriptor's handlers."""
    MTLCommandBuffer._check_open(buffer, "encode")
    buffer._work.append(work)
    if descriptor is None:
        return
    handlers = [h for h in (descriptor._scheduledHandler, descriptor._completionHandler) if h is not None]
    if not handlers:
        return

    def call(ended: MTLCommandBuffer) -> None:
        failure = ended._failure
        error = None if failure is None else NSError(f"{type(failure).__name__}: {failure}", "MPSGraphErrorDomain")
        for handler in handlers:
            handler(results, error)

    buffer._completed_handlers.append(call)


class Running(Building):
    """Runs."""

    def _plan(
        self, where: str, feeds: Feeds, targets: Sequence[MPSGraphTensor], operations: Sequence[MPSGraphOperation]
    ) -> Plan:
        key = (*feeds, None, *targets, None, *operations)
        try:
            plan: Plan | None = self._plans.get(key)
        except TypeError:
            plan = None
        if plan is None:
            if len(self._scopes) > 1:
                raise RuntimeError(f"{where}: the body of {self._scopes[-1].what} is being built")
            for name, value in (("targetTensors", targets), ("targetOperations", operations)):
                if not isinstance(value, (list, tuple)):
                    raise TypeError(f"{where}: {name} must be a list, not {type(value).__name__}")
            if not isinstance(feeds, Mapping):
                raise TypeError(f"{where}: feeds must be a dict, not {type(feeds).__name__}")
            plan = self._plans[key] = Plan(self, where, list(feeds), targets, operations)
        return plan

    def run(
        self,
        *,
        feeds: Feeds,
        targetTensors: Sequence[MPSGraphTensor] | None = None,
        targetOperations: Sequence[MPSGraphOperation] | None = None,
        with_: MTLCommandQueue | None = None,
        resultsDictionary: Results | None = None,
    ) -> Results:
        """Run what the targets need, and return the values of the target tensors.

        With `with_`, a command queue, after the buffers that were committed to it. With `resultsDictionary` instead of
        `targetTensors` results are written to its data.
        """
        if with_ is not None or resultsDictionary is not None:
            return self._run_on(with_, feeds, targetTensors, targetOperations, resultsDictionary)
        if targetTensors is None:
            raise TypeError("MPSGraph.run: needs targetTensors")
        plan = self._plan("MPSGraph.run", feeds, targetTensors, targetOperations or ())
        try:
            arrays = tuple([feeds[tensor]._array for tensor in plan.needed])
        except AttributeError:
            arrays = tuple(_array("MPSGraph.run", tensor, feeds[tensor]) for tensor in plan.needed)
        kind = self._data_type
        return {tensor: wrapped(array, kind) for tensor, array in zip(plan.targets, plan.run(arrays), strict=True)}

    def _run_on(
        self,
        queue: MTLCommandQueue | None,
        feeds: Feeds,
        targets: Sequence[MPSGraphTensor] | None,
        operations: Sequence[MPSGraphOperation] | None,
        results: Results | None,
    ) -> Results:
        _check_queue("MPSGraph.run", queue)
        if results is None and (queue is None or not queue._executor.pending):  # nothing to wait for
            return Running.run(self, feeds=feeds, targetTensors=targets, targetOperations=operations)
        buffer = _buffer(queue)
        found = self._encode("MPSGraph.run", buffer, feeds, targets, operations, results, None)
        _finish(buffer)
        return found

    def runAsync(
        self,
        *,
        feeds: Feeds,
        targetTensors: Sequence[MPSGraphTensor] | None = None,
        targetOperations: Sequence[MPSGraphOperation] | None = None,
        with_: MTLCommandQueue | None = None,
        resultsDictionary: Results | None = None,
        executionDescriptor: MPSGraphExecutionDescriptor | None = None,
    ) -> Results:
        """As `run`, but return at once: the results have their values when the descriptor's handlers are called."""
        where = "MPSGraph.runAsync"
        _check_queue(where, with_)
        descriptor = _check_descriptor(where, executionDescriptor, MPSGraphExecutionDescriptor)
        buffer = _buffer(with_)
        args = (buffer, feeds, targetTensors, targetOperations, resultsDictionary, descriptor)
        found = self._encode(where, *args)
        buffer._queue._executor.commit(buffer)
        if descriptor is not None and descriptor._waitUntilCompleted:
            MTLCommandBuffer.waitUntilCompleted(buffer)
        return found

    def encode(
        self,
        *,
        to: MPSCommandBuffer | MTLCommandBuffer,
        feeds: Feeds,
        targetTensors: Sequence[MPSGraphTensor] | None = None,
        targetOperations: Sequence[MPSGraphOperation] | None = None,
        resultsDictionary: Results | None = None,
        executionDescriptor: MPSGraphExecutionDescriptor | None = None,
    ) -> Results:
        """Add a run to a command buffer. Feeds are checked now, and read when the buffer runs."""
        where = "MPSGraph.encode"
        descriptor = _check_descriptor(where, executionDescriptor, MPSGraphExecutionDescriptor)
        args = (buffer_of(where, to), feeds, targetTensors, targetOperations, resultsDictionary, descriptor)
        return self._encode(where, *args)

    def _encode(
        self,
        where: str,
        buffer: MTLCommandBuffer,
        feeds: Feeds,
        targets: Sequence[MPSGraphTensor] | None,
        operations: Sequence[MPSGraphOperation] | None,
        results: Results | None,
        descriptor: Any,
    ) -> Results:
        if (targets is None) == (results is None):
            raise TypeError(f"{where}: needs targetTensors or resultsDictionary, and not both")
        if results is not None and not isinstance(results, dict):
            raise TypeError(f"{where}: resultsDictionary must be a dict, not {type(results).__name__}")
        chosen = targets if results is None else list(results)
        plan = self._plan(where, feeds, chosen or (), operations or ())
        arrays = tuple(_array(where, tensor, feeds[tensor]) for tensor in plan.needed)
        program = plan.of(tuple(Spec(a.shape, a.dtype) for a in arrays))
        if results is None:
            made = [wrapped(np.empty(s.shape, s.dtype), self._data_type) for s in program.specs]
            found = dict(zip(plan.targets, made, strict=True))
        else:
            found = results
            for tensor, spec in zip(plan.targets, program.specs, strict=True):
                _check_target(where, tensor, results[tensor], spec)
        targets_data = [found[t]._array for t in plan.targets]

        def work() -> None:
            for target, array in zip(targets_data, plan.run(arrays), strict=True):
                target[...] = array

        submit(buffer, work, found, descriptor)
        return found

    def compile(
        self,
        *,
        feeds: Mapping[MPSGraphTensor, MPSGraphShapedType],
        targetTensors: Sequence[MPSGraphTensor],
        targetOperations: Sequence[MPSGraphOperation] | None = None,
        with_: MPSGraphDevice | None = None,
        compilationDescriptor: MPSGraphCompilationDescriptor | None = None,
    ) -> MPSGraphExecutable:
        """An executable with these inputs and targets. It shares the variables of the graph."""
        where = "MPSGraph.compile"
        if with_ is not None and not isinstance(with_, MPSGraphDevice):
            raise TypeError(f"{where}: with_ must be an MPSGraphDevice or None, not {type(with_).__name__}")
        plan = self._plan(where, feeds, targetTensors, targetOperations or ())  # type: ignore[arg-type]
        for tensor, given in feeds.items():
            if not isinstance(given, MPSGraphShapedType):
                raise TypeError(f"{where}: the feed of {tensor!r} must be an MPSGraphShapedType, not {given!r}")
            _check_type(where, tensor._symbol, given)
        made = self._executable_type(self, plan, feeds)
        handler = getattr(compilationDescriptor, "_compilationCompletionHandler", None)
        if handler is not None:
            handler(made, None)
        return made

    _executable_type: ClassVar[type[MPSGraphExecutable]]
    _data_type: ClassVar[type[MPSGraphTensorData]] = MPSGraphTensorData


def _check_type(where: str, symbol: Symbol, given: MPSGraphShapedType) -> None:
    if symbol.dtype != given._dtype:
        raise TypeError(f"{where}: the feed of {symbol!r} has data type {given._dtype.name}")
    if symbol.shape is None or given._shape is None:
        return
    if len(symbol.shape) != len(given._shape) or any(
        a != b and -1 not in (a, b) for a, b in zip(symbol.shape, given._shape, strict=True)
    ):
        raise ValueError(f"{where}: the feed of {symbol!r} has shape {list(given._shape)}")


def _buffer(queue: MTLCommandQueue | None) -> MTLCommandBuffer:
    return MTLCommandQueue.makeCommandBuffer(queue or _own_queue())


_OWN: list[MTLCommandQueue] = []


def _own_queue() -> MTLCommandQueue:
    """The queue of runs for which none is given."""
    if not _OWN:
        _OWN.append(MTLCreateSystemDefaultDevice().makeCommandQueue())
    return _OWN[0]


def _finish(buffer: MTLCommandBuffer) -> None:
    """Run a command buffer, and raise what its work raised."""
    buffer._queue._executor.commit(buffer)
    MTLCommandBuffer.waitUntilCompleted(buffer)
    if buffer._failure is not None:
        raise buffer._failure


class MPSGraphExecutable(MPSGraphObject):
    """A compiled graph: a list of inputs, in the order of `feedTensors`, and of results, of `targetTensors`."""

    def __init__(self, graph: Running, plan: Plan, feeds: Mapping[MPSGraphTensor, MPSGraphShapedType]) -> None:
        if not isinstance(graph, Running):
            raise NotImplementedError(
                "MPSGraphExecutable: packages cannot be read, their format is private; use MPSGraph.compile"
            )
        self._graph, self._plan = graph, plan
        self._types = dict(sorted(feeds.items(), key=lambda item: item[0]._symbol.call.number))
        self._feeds = list(self._types)
        self._positions = [self._feeds.index(tensor) for tensor in plan.needed]
        self._options = MPSGraphOptions.default
        static = [self._types[t] for t in plan.needed]
        if all(one._shape is not None and -1 not in one._shape for one in static):
            plan.of(tuple(Spec(one._shape, one._dtype) for one in static))  # type: ignore[arg-type]

    @property
    def feedTensors(self) -> list[MPSGraphTensor]:
        return list(self._feeds)

    @property
    def targetTensors(self) -> list[MPSGraphTensor]:
        return list(self._plan.targets)

    @property
    def options(self) -> MPSGraphOptions:
        return self._options

    def specialize(
        self,
        *,
        inputTypes: Sequence[MPSGraphShapedType],
        with_: MPSGraphDevice | None = None,
        compilationDescriptor: MPSGraphCompilationDescriptor | None = None,
    ) -> None:
        """Compile for inputs of these types now, not when the first ones are given."""
        self._program("MPSGraphExecutable.specialize", inputTypes)

    def getOutputTypes(
        self,
        *,
        inputTypes: Sequence[MPSGraphShapedType],
        with_: MPSGraphDevice | None = None,
        compilationDescriptor: MPSGraphCompilationDescriptor | None = None,
    ) -> list[MPSGraphShapedType]:
        """The types of the results for inputs of these types."""
        program = self._program("MPSGraphExecutable.getOutputTypes", inputTypes)
        return [MPSGraphShapedType(shape=s.shape, dataType=DATA_TYPES[s.dtype]) for s in program.specs]

    def _program(self, where: str, types: Sequence[MPSGraphShapedType]) -> Program:
        self._check_count(where, "inputTypes", types)
        for tensor, one in zip(self._feeds, types, strict=True):
            if not isinstance(one, MPSGraphShapedType) or one._shape is None or -1 in one._shape:
                raise TypeError(f"{where}: the type of {tensor!r} must be an MPSGraphShapedType of known sizes")
            _check_type(where, tensor._symbol, one)
        specs = [Spec(one._shape, one._dtype) for one in types]  # type: ignore[arg-type]
        return self._plan.of(tuple(specs[i] for i in self._positions))

    def _check_count(self, where: str, name: str, given: Any) -> None:
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"{where}: {name} must be a list, not {type(given).__name__}")
        if len(given) != len(self._feeds):
            raise ValueError(f"{where}: {name} has {len(given)} entries, but there are {len(self._feeds)} feedTensors")

    def run(
        self,
        *,
        inputs: Sequence[MPSGraphTensorData],
        with_: MTLCommandQueue | None = None,
        results: Sequence[MPSGraphTensorData] | None = None,
        executionDescriptor: MPSGraphExecutableExecutionDescriptor | None = None,
    ) -> list[MPSGraphTensorData]:
        """Run, after what was committed to the queue, and return the results, or write them to `results`."""
        where = "MPSGraphExecutable.run"
        direct = with_ is None or (isinstance(with_, MTLCommandQueue) and not with_._executor.pending)
        if direct and results is None and executionDescriptor is None and len(inputs) == len(self._feeds):
            try:
                arrays = tuple([inputs[i]._array for i in self._positions])
            except AttributeError:
                arrays = self._arrays(where, inputs)
            kind = self._graph._data_type
            return [wrapped(array, kind) for array in self._plan.run(arrays)]
        _check_queue(where, with_)
        descriptor = _check_descriptor(where, executionDescriptor, MPSGraphExecutableExecutionDescriptor)
        buffer = _buffer(with_)
        found = self._encode(where, buffer, inputs, results, descriptor)
        _finish(buffer)
        return found

    def runAsync(
        self,
        *,
        inputs: Sequence[MPSGraphTensorData],
        with_: MTLCommandQueue | None = None,
        results: Sequence[MPSGraphTensorData] | None = None,
        executionDescriptor: MPSGraphExecutableExecutionDescriptor | None = None,
    ) -> list[MPSGraphTensorData]:
        """As `run`, but return at once: the results have their values when the descriptor's handlers are called."""
        where = "MPSGraphExecutable.runAsync"
        _check_queue(where, with_)
        descriptor = _check_descriptor(where, executionDescriptor, MPSGraphExecutableExecutionDescriptor)
        buffer = _buffer(with_)
        found = self._encode(where, buffer, inputs, results, descriptor)
        buffer._queue._executor.commit(buffer)
        if descriptor is not None and descriptor._waitUntilCompleted:
            MTLCommandBuffer.waitUntilCompleted(buffer)
        return found

    def encode(
        self,
        *,
        to: MPSCommandBuffer | MTLCommandBuffer,
        inputs: Sequence[MPSGraphTensorData],
        results: Sequence[MPSGraphTensorData] | None = None,
        executionDescriptor: MPSGraphExecutableExecutionDescriptor | None = None,
    ) -> list[MPSGraphTensorData]:
        """Add a run to a command buffer."""
        where = "MPSGraphExecutable.encode"
        descriptor = _check_descriptor(where, executionDescriptor, MPSGraphExecutableExecutionDescriptor)
        return self._encode(where, buffer_of(where, to), inputs, results, descriptor)

    def _arrays(self, where: str, inputs: Sequence[MPSGraphTensorData]) -> tuple[Array, ...]:
        self._check_count(where, "inputs", inputs)
        return tuple(_array(where, self._feeds[i], inputs[i]) for i in self._positions)

    def _encode(
        self,
        where: str,
        buffer: MTLCommandBuffer,
        inputs: Sequence[MPSGraphTensorData],
        results: Sequence[MPSGraphTensorData] | None,
        descriptor: Any,
    ) -> list[MPSGraphTensorData]:
        arrays = self._arrays(where, inputs)
        plan = self._plan
        specs = plan.of(tuple(Spec(a.shape, a.dtype) for a in arrays)).specs
        if results is None:
            found = [wrapped(np.empty(spec.shape, spec.dtype), self._graph._data_type) for spec in specs]
        else:
            if not isinstance(results, (list, tuple)) or len(results) != len(specs):
                raise ValueError(f"{where}: results must be a list of {len(specs)}, like targetTensors")
            found = list(results)
            for tensor, data, spec in zip(plan.targets, found, specs, strict=True):
                _check_target(where, tensor, data, spec)
        targets = [data._array for data in found]

        def work() -> None:
            for target, array in zip(targets, plan.run(arrays), strict=True):
                target[...] = array

        submit(buffer, work, found, descriptor)
        return found

    def serialize(
        self, *, package: Any, descriptor: MPSGraphExecutableSerializationDescriptor | None = None
    ) -> NoReturn:
        raise NotImplementedError("MPSGraphExecutable.serialize: packages cannot be written, their format is private")


Running._executable_type = MPSGraphExecutable
