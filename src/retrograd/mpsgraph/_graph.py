"""MPSGraph: tensors, operations, and building. How graphs run is in _running.py, loops and branches in _control.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from .. import graph as G
from ..graph.recording import Call, Recording, Symbol
from ..mps import MPSDataType
from ..mps._types import Setting, as_flags
from ..ops._types import Array
from . import _functions as F
from . import _table  # noqa: F401 (declares the rows)
from ._data import _of_bytes
from ._declare import swift_methods
from ._left_out import left_out
from ._types import DATA_TYPES, MPSGraphObject, MPSGraphOptions, as_dtype, as_number, as_shape


class MPSGraphTensor(MPSGraphObject):
    """A tensor of a graph: a result of an operation. Tensors are equal only to themselves."""

    __slots__ = ("_graph", "_symbol")

    def __init__(self, graph: GraphBase, symbol: Symbol) -> None:
        self._graph = graph
        self._symbol = symbol

    @property
    def shape(self) -> list[int] | None:
        """The sizes of the axes; -1 for one that is not known, None if nothing is."""
        return None if self._symbol.shape is None else list(self._symbol.shape)

    @property
    def dataType(self) -> MPSDataType:
        dtype = self._symbol.dtype
        return MPSDataType.invalid if dtype is None else DATA_TYPES[dtype]

    @property
    def operation(self) -> MPSGraphOperation:
        return self._graph._operation(self._symbol.call)

    def __repr__(self) -> str:
        return f"<MPSGraphTensor: {self._symbol!r}>"


class MPSGraphOperation(MPSGraphObject):
    """A node of a graph."""

    __slots__ = ("_call", "_graph")

    def __init__(self, graph: GraphBase, call: Call) -> None:
        self._graph = graph
        self._call = call

    @property
    def inputTensors(self) -> list[MPSGraphTensor]:
        return [self._graph._tensor(s) for s in self._call.operands if s is not None]

    @property
    def outputTensors(self) -> list[MPSGraphTensor]:
        return [self._graph._tensor(s) for s in self._call.results]

    @property
    def controlDependencies(self) -> list[MPSGraphOperation]:
        return [self._graph._operation(call) for call in self._call.after]

    @property
    def graph(self) -> GraphBase:
        return self._graph

    @property
    def name(self) -> str:
        return self._call.name or self._call.described

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._call.described}>"


class MPSGraphVariableOp(MPSGraphOperation):
    """The operation of a variable."""

    __slots__ = ()

    @property
    def shape(self) -> list[int]:
        return list(self._call.value.shape)

    @property
    def dataType(self) -> MPSDataType:
        return DATA_TYPES[self._call.value.dtype]


class Scope:
    """What is being built: the graph itself, or the body of a loop, whose tensors of the graph outside are captured."""

    def __init__(self, recording: Recording, what: str = "") -> None:
        self.recording = recording
        self.what = what
        self.captured: dict[Symbol, Symbol] = {}  # of the scope outside -> placeholders of this one

    def capture(self, outer: Symbol) -> Symbol:
        found = self.captured.get(outer)
        if found is None:
            if outer.dtype is None:
                raise ValueError(f"{self.what}: the data type of {outer!r} is not known")
            found = self.recording.placeholder(outer.shape, outer.dtype, outer.name or outer.call.described)
            self.captured[outer] = found
        return found


class GraphBase(MPSGraphObject):
    """What methods need: the recording, and the objects that stand for its parts."""

    options = Setting[MPSGraphOptions](
        lambda name, value: MPSGraphOptions(as_flags(name, value)), MPSGraphOptions.default, "Without effect."
    )

    _tensor_type: ClassVar[type[MPSGraphTensor]] = MPSGraphTensor
    _operation_type: ClassVar[type[MPSGraphOperation]] = MPSGraphOperation
    _variable_type: ClassVar[type[MPSGraphVariableOp]] = MPSGraphVariableOp

    def __init__(self) -> None:
        self._options = MPSGraphOptions.default
        self._scopes = [Scope(Recording())]
        self._branch = ""  # the operation whose branch is being built
        self._tensors: dict[int, MPSGraphTensor] = {}  # by the ids of symbols, which their recordings keep
        self._operations: dict[int, MPSGraphOperation] = {}
        self._counters = 0
        self._plans: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.RLock()  # held while a program reads and writes the variables

    @property
    def _recording(self) -> Recording:
        return self._scopes[-1].recording

    def _tensor(self, symbol: Symbol) -> MPSGraphTensor:
        found = self._tensors.get(id(symbol))
        if found is None:
            found = self._tensors[id(symbol)] = self._tensor_type(self, symbol)
        return found

    def _operation(self, call: Call) -> MPSGraphOperation:
        found = self._operations.get(id(call))
        if found is None:
            kind = self._variable_type if call.kind == "variable" else self._operation_type
            found = self._operations[id(call)] = kind(self, call)
        return found

    @staticmethod
    def _is_tensor(value: object) -> bool:
        return isinstance(value, MPSGraphTensor)

    def _symbol(self, where: str, name: str, value: Any) -> Symbol:
        """The symbol of an argument, in what is being built."""
        if not isinstance(value, MPSGraphTensor):
            raise TypeError(f"{where}: {name} must be an MPSGraphTensor, not {type(value).__name__}")
        if value._graph is not self:
            raise ValueError(f"{where}: {name} is {value._symbol!r}, which belongs to another graph")
        symbol = value._symbol
        for level, scope in enumerate(self._scopes):
            if scope.recording is symbol.recording:
                for inner in self._scopes[level + 1 :]:
                    constant = symbol.call.kind == "constant"
                    symbol = inner.recording.constant(symbol.call.value) if constant else inner.capture(symbol)
                return symbol
        raise ValueError(f"{where}: {name} is {symbol!r}, which is only known inside the body of a loop")

    def _call(
        self,
        function: Callable[..., Any],
        operands: Sequence[Symbol | None],
        options: dict[str, Any],
        kind: str,
        count: int = 1,
        name: str | None = None,
    ) -> list[MPSGraphTensor]:
        """Record a call of a function of tensors."""
        if function is F.shape_of and operands[0] is not None:
            shape = operands[0].shape
            if shape is not None and -1 not in shape:  # so that other operations can use it as a shape
                return [self._tensor(self._recording.constant(np.asarray(shape, np.int32), name))]
        symbols = self._recording.call(function, operands, options, kind=kind, count=count, name=name)
        return [self._tensor(symbol) for symbol in symbols]

    def _counter(self) -> G.Variable:
        """The state of an operation that draws random numbers: it has other ones than those of other operations."""
        self._counters += 1
        return G.counter(self._counters << 40)

    def _outermost(self, where: str) -> None:
        if len(self._scopes) > 1:
            raise ValueError(f"{where}: not possible inside the body of {self._scopes[-1].what}")


for _name, _made in swift_methods().items():
    setattr(GraphBase, _name, _made)
for _name, _made in left_out().items():
    setattr(GraphBase, _name, _made)


def _elements(where: str, data: Any, shape: Any, dtype: np.dtype[Any]) -> Array:
    """Data in the form of bytes or an array."""
    if isinstance(data, np.ndarray):
        if data.dtype != dtype:
            raise TypeError(f"{where}: the data have dtype {data.dtype}, dataType is {DATA_TYPES[dtype].name}")
        data = np.ascontiguousarray(data)
        if not data.size:
            data = b""
    return _of_bytes(where, data, shape, DATA_TYPES[dtype])


class Building(GraphBase):
    """The methods that are not operations on tensors."""

    @property
    def placeholderTensors(self) -> list[MPSGraphTensor]:
        calls = self._scopes[0].recording.calls
        return [self._tensor(call.results[0]) for call in calls if call.kind == "placeholder"]

    def placeholder(
        self, *, shape: Sequence[int] | None, dataType: int = MPSDataType.float32, name: str | None = None
    ) -> MPSGraphTensor:
        """A tensor that every run is fed with. A size of -1 may differ from run to run; None: the whole shape."""
        where = "MPSGraph.placeholder"
        self._outermost(where)
        sizes = None if shape is None else as_shape(f"{where}: shape", shape)
        dtype = as_dtype(f"{where}: dataType", dataType)
        return self._tensor(self._recording.placeholder(sizes, dtype, name))

    def constant(self, value: Any, /, *, dataType: int, shape: Sequence[int] | None = None) -> MPSGraphTensor:
        """A tensor that is always the same: a number, in the given shape or in [1]; or data (bytes, or an array)."""
        where = "MPSGraph.constant"
        dtype = as_dtype(f"{where}: dataType", dataType)
        if isinstance(value, (int, float, np.number, np.bool_)):
            number = value if isinstance(value, int) and dtype.kind == "i" else as_number(f"{where}: scalar", value)
            sizes = (1,) if shape is None else as_shape(f"{where}: shape", shape)
            if -1 in sizes:
                raise ValueError(f"{where}: shape is {list(sizes)}; all sizes of a constant are known")
            array: Array = np.full(sizes, np.asarray(number).astype(dtype))
        elif shape is None:
            raise TypeError(f"{where}: needs a number, or data and their shape; got {type(value).__name__}")
        else:
            array = _elements(where, value, shape, dtype)
        return self._tensor(self._recording.constant(array))

    def variable(self, *, with_: Any, shape: Sequence[int], dataType: int, name: str | None = None) -> MPSGraphTensor:
        """A tensor that keeps its value from run to run, and can be assigned another one."""
        where = "MPSGraph.variable"
        self._outermost(where)
        array = _elements(where, with_, shape, as_dtype(f"{where}: dataType", dataType))
        return self._tensor(self._recording.variable(G.Variable(array, name=name or ""), name))

    def variableFromTensor(self, tensor: MPSGraphTensor, /, *, name: str | None = None) -> MPSGraphTensor:
        """A variable that begins with the present value of a tensor, which depends on no placeholder."""
        where = "MPSGraph.variableFromTensor"
        self._outermost(where)
        symbol = self._symbol(where, "tensor", tensor)
        needed = self._recording.placeholders([symbol])
        if needed:
            raise ValueError(f"{where}: tensor is {symbol!r}, which depends on {needed[0]!r}")
        arrays = self._recording.program({}, [symbol]).arrays(())
        assert arrays is not None
        return self._tensor(self._recording.variable(G.Variable(arrays[0], name=name or ""), name))

    def read(self, variable: MPSGraphTensor, /, *, name: str | None = None) -> MPSGraphTensor:
        """The value of a variable: at the start of the run, or in a controlDependency on an assign the new one."""
        where = "MPSGraph.read"
        symbol = self._symbol(where, "variable", variable)
        if variable._symbol.call.kind != "variable":
            raise TypeError(f"{where}: {variable._symbol!r} is not a variable")
        return self._call(G.identity, [symbol], {}, "read", name=name)[0]

    def assign(
        self, variable: MPSGraphTensor, /, *, tensor: MPSGraphTensor, name: str | None = None
    ) -> MPSGraphOperation:
        """Give a variable another value, at the end of every run in which this is a target operation."""
        where = "MPSGraph.assign"
        self._outermost(where)
        if self._branch:
            raise ValueError(
                f"{where}: not possible inside a branch of {self._branch}; choose the value there, and assign it after"
            )
        target = self._symbol(where, "variable", variable)
        return self._operation(self._recording.assign(target, self._symbol(where, "tensor", tensor), name=name))

    def applyStochasticGradientDescent(
        self,
        *,
        learningRate: MPSGraphTensor,
        variable: MPSGraphVariableOp,
        gradient: MPSGraphTensor,
        name: str | None = None,
    ) -> MPSGraphOperation:
        """Assign ``variable - learningRate * gradient`` to a variable."""
        where = "MPSGraph.applyStochasticGradientDescent"
        if not isinstance(variable, MPSGraphVariableOp):
            raise TypeError(f"{where}: variable must be an MPSGraphVariableOp, not {type(variable).__name__}")
        values = self._tensor(variable._call.results[0])
        operands = [self._symbol(where, n, t) for n, t in (
            ("learningRate", learningRate), ("variable", values), ("gradient", gradient),
        )]  # fmt: skip
        new = self._call(F.gradient_descent, operands, {}, "applyStochasticGradientDescent")[0]
        return Building.assign(self, values, tensor=new, name=name)

    def gradients(
        self, *, of: MPSGraphTensor, with_: Sequence[MPSGraphTensor], name: str | None = None
    ) -> dict[MPSGraphTensor, MPSGraphTensor]:
        """The gradients of the sum of a tensor with respect to tensors on which it depends."""
        where = "MPSGraph.gradients"
        if not isinstance(with_, (list, tuple)) or not with_:
            raise TypeError(f"{where}: with_ must be a list of tensors, not {with_!r}")
        primary = self._symbol(where, "of", of)
        symbols = [self._symbol(where, f"with_[{i}]", t) for i, t in enumerate(with_)]
        found = self._recording.gradients(primary, symbols, name=name)
        return {tensor: self._tensor(symbol) for tensor, symbol in zip(with_, found, strict=True)}
