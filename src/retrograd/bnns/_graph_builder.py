"""``BNNSGraph.Builder`` and its tensors. What Apple's cannot do, gradients, updates and optimizers, is retrograd's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import graph
from ..graph import Recording, Symbol, Variable
from ..graph.recording import UNKNOWN
from ..graph.tensor import current_graph
from . import _graph_values as values
from ._graph_lowering import Index
from ._graph_methods import RESULTS, Methods
from ._graph_model import Function, Model, spliced
from ._graph_operations import INTERNAL, Operation
from ._graph_values import Intent, SliceRange, as_dtype
from ._memory import DType

_INT32: Final[DType] = np.dtype(np.int32)
_INT64: Final[DType] = np.dtype(np.int64)
_BOOL: Final[DType] = np.dtype(np.bool_)
_FLOAT: Final[DType] = np.dtype(np.float32)
# What numbers and lists among the operands are, where they do not have the type of the tensor.
_TYPES_OF: Final[dict[str, DType]] = {"indices": _INT32, "seed": _INT64}


class Tensor(Methods):
    """A tensor of a graph that is being built. Its elements are known when a context executes the graph.

    Unknown sizes of `shape` are -1. The methods are those of the table in docs/bnns.md; arithmetic and comparisons are
    Python's operators, where Swift has a point before them: ``x < y`` for ``x .< y``, ``~z`` for ``.!z``.
    """

    __slots__ = ("_builder", "_symbol")
    __array_ufunc__ = None  # ``array * tensor`` is the tensor's
    __hash__ = object.__hash__  # == compares elements

    def __init__(self, builder: Builder, symbol: Symbol) -> None:
        self._builder = builder
        self._symbol = symbol

    @property
    def name(self) -> str:
        return self._symbol.name

    @property
    def dataType(self) -> DType | None:
        return self._symbol.dtype

    @property
    def shape(self) -> list[int]:
        """The sizes; -1 where one is not known, and empty if nothing is."""
        return list(self._symbol.shape or ())

    @property
    def rank(self) -> int:
        return len(self._symbol.shape or ())

    @property
    def stride(self) -> list[int] | None:
        """Elements from one index of an axis to the next; None if a size is not known."""
        shape = self._symbol.shape
        if shape is None or UNKNOWN in shape:
            return None
        return contiguous_strides(shape)

    @property
    def description(self) -> str:
        return repr(self._symbol)

    def _record(self, operation: Operation, given: Sequence[Any]) -> Any:
        """Record an operation with arguments in the order of its labels."""
        builder, dtype = self._builder, self._symbol.dtype
        if operation.name == "reshape" and isinstance(given[0], Tensor):
            sizes = builder._symbol_of("reshape", "to", given[0], None)
            return builder._recorded(INTERNAL["reshapeTo"], [self._symbol, sizes], {})
        operands: list[Symbol | None] = [self._symbol]
        options = {}
        if operation.name == "select":  # the condition does not say what the values are
            types = [one._symbol.dtype for one in given if isinstance(one, Tensor)]
            types += [one.dtype for one in given if isinstance(one, np.ndarray)]
            dtype = types[0] if types else _FLOAT
        for label, value in zip(operation.labels, given, strict=True):
            if label.kind != "tensor":
                options[label.name] = operation.kept(label, value)
            elif value is None and label.optional:
                operands.append(None)
            else:
                like = _TYPES_OF.get(label.name) or dtype or _FLOAT
                operands.append(builder._symbol_of(operation.name, label.name, value, like))
        return builder._recorded(operation, operands, options)

    def _reflected(self, operation: Operation, other: Any) -> Any:
        """Record an operator with a number or an array on its left."""
        left = self._builder._symbol_of(operation.name, "x", other, self._symbol.dtype or _FLOAT)
        return self._builder._recorded(operation, [left, self._symbol], {})

    def copy(self) -> Tensor:
        """Another variable for the same tensor: what is assigned to its elements does not change this one."""
        return Tensor(self._builder, self._symbol)

    def __getitem__(self, index: Any) -> Tensor:
        """Part of it: integers, slices, ranges and SliceRange, for the first axes. An integer drops its axis."""
        found: Tensor = self._builder._recorded(INTERNAL["slice"], [self._symbol], {"index": _as_index(index)})
        return found

    def __setitem__(self, index: Any, update: Operand) -> None:
        """The tensor with elements replaced, from here on; Swift's variables are copies, see :meth:`copy`."""
        builder = self._builder
        operands = [self._symbol, builder._symbol_of("subscript", "value", update, self._symbol.dtype)]
        self._symbol = builder._recorded(INTERNAL["sliceUpdate"], operands, {"index": _as_index(index)})._symbol

    def __iter__(self) -> Iterator[Tensor]:
        raise TypeError(f"{self!r} cannot be iterated over; take parts of it by index")

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} has no truth value while the graph is built; use select")

    def __repr__(self) -> str:
        return f"Tensor({self.description})"


# What operations take: tensors, numbers and arrays.
Operand: TypeAlias = Tensor | npt.ArrayLike
_Tensor: TypeAlias = Tensor  # inside the builder, whose member has the same name


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Those of an array whose last axis is the fastest."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def _as_index(index: Any) -> tuple[Index, ...]:
    parts: list[Index] = []
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, SliceRange):
            parts.append((part.startIndex, part.endIndex, None))
        elif isinstance(part, (slice, range)):
            parts.append((part.start, part.stop, part.step))
        elif isinstance(part, (int, np.integer)) and not isinstance(part, bool):
            parts.append(int(part))
        else:
            raise TypeError(f"subscript: {part!r} is no integer, slice, range or SliceRange")
    return tuple(parts)


# ---- optimizers -----------------------------------------------------------------------------------------------------


class Optimizer:
    """A rule that updates parameters by gradients (retrograd's). Its states belong to the graph that it is used in."""

    def __init__(self, rule: graph.Optimizer) -> None:
        self.rule = rule


class SGD(Optimizer):
    """Gradient descent: ``w - learningRate * dw``, or with a velocity if there is momentum."""

    def __init__(self, *, learningRate: float, momentum: float = 0.0, weightDecay: float = 0.0) -> None:
        super().__init__(graph.SGD(learningRate, momentum=momentum, weight_decay=weightDecay))


class Adam(Optimizer):
    """Adam; with `decoupledWeightDecay` AdamW."""

    def __init__(
        self,
        *,
        learningRate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weightDecay: float = 0.0,
        decoupledWeightDecay: bool = False,
    ) -> None:
        rule = graph.Adam(
            learningRate, beta1=beta1, beta2=beta2, eps=epsilon, weight_decay=weightDecay,
            decoupled=decoupledWeightDecay,
        )  # fmt: skip
        super().__init__(rule)


class ModelTensors:
    """A graph that was read from a file, inside a builder. Call it with tensors, one for each of its inputs."""

    def __init__(self, builder: Builder, model: Model) -> None:
        self._builder, self._model = builder, model

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Its constants, as tensors that can be trained."""
        return {name: self._builder._parameter(variable) for name, variable in self._model.parameters.items()}

    def write(self, *, to: Any) -> None:
        """Save it with the values that its parameters have now; one from a Core ML package as a copy of that."""
        from ._graph_file import write_model

        write_model(self._model, to)

    def __call__(self, *inputs: Tensor, function: str | None = None) -> list[Tensor]:
        """The outputs of its function for these inputs."""
        return self._builder.call(self, inputs=inputs, function=function)


# ---- the builder ----------------------------------------------------------------------------------------------------


class Builder:
    """What the block of ``BNNSGraph.makeContext`` gets: it declares arguments and constants.

    :meth:`parameter`, :meth:`gradient`, :meth:`update`, :meth:`minimize`, :meth:`model` and :meth:`call` are
    retrograd's.
    """

    Tensor: TypeAlias = _Tensor
    Activation: TypeAlias = values.Activation
    Direction: TypeAlias = values.Direction
    Intent: TypeAlias = values.Intent
    CeilingMode: TypeAlias = values.CeilingMode
    ConvolutionPadding: TypeAlias = values.ConvolutionPadding
    Padding: TypeAlias = values.Padding
    PoolingFunction: TypeAlias = values.PoolingFunction
    Reduction: TypeAlias = values.Reduction
    ScatterMode: TypeAlias = values.ScatterMode
    SliceRange: TypeAlias = values.SliceRange
    SortOrder: TypeAlias = values.SortOrder
    PoolingPadding: TypeAlias = values.ConvolutionPadding

    def __init__(self) -> None:
        self._recording = Recording()
        self._arguments: list[Symbol] = []
        self._parameters: dict[str, Variable] = {}
        self._variables: dict[Variable, Symbol] = {}
        self._updates: dict[Symbol, Symbol] = {}
        self._open = True

    # ---- Apple's ----

    def argument(
        self,
        *,
        name: str | None = None,
        dataType: Any,
        shape: Sequence[int],
        intent: Intent = Intent.input,
    ) -> Tensor:
        """An argument of the graph. A negative size is flexible; one that is `inOut` has none."""
        self._check_open("argument")
        dtype = as_dtype(dataType)
        sizes = tuple(UNKNOWN if size < 0 else int(size) for size in shape)
        label = f"input_{len(self._arguments)}" if name is None else str(name)
        if any(symbol.name == label for symbol in self._arguments):
            raise ValueError(f"argument: there is an argument {label!r} already")
        if intent == Intent.output:
            raise ValueError(f"argument: {label!r} has the intent output; outputs are what the block returns")
        if intent == Intent.inOut:
            if UNKNOWN in sizes:
                raise ValueError(f"argument: {label!r} is inOut and has shape {list(sizes)}; its sizes must be known")
            symbol = self._variable(Variable(np.zeros(sizes, dtype), name=label))
        else:
            symbol = self._recording.placeholder(sizes, dtype, label)
        self._arguments.append(symbol)
        return Tensor(self, symbol)

    def constant(
        self,
        *,
        name: str | None = None,
        value: Any = None,
        values: Any = None,
        shape: Sequence[int] | None = None,
        dataType: Any = None,
        rowMajor: bool = False,
    ) -> Tensor:
        """A scalar `value`, or `values` in a shape. The inner lists of a list of lists are columns, unless `rowMajor`.

        Elements are Float, unless `values` is an array or there is a `dataType`.
        """
        self._check_open("constant")
        if (value is None) == (values is None):
            raise TypeError("constant takes one of value and values")
        given = value if values is None else values
        dtype = None if dataType is None else as_dtype(dataType)
        nested = not isinstance(given, np.ndarray) and isinstance(given, Sequence) and any(
            isinstance(row, Sequence) for row in given
        )  # fmt: skip
        if dtype is None:
            dtype = _untyped(given)
        array = np.asarray(given, dtype)
        if nested and array.ndim == 2 and not rowMajor:
            array = array.T
        if shape is not None:
            if array.size != int(np.prod(shape)):
                raise ValueError(f"constant: values has {array.size} elements, but shape is {list(shape)}")
            array = array.reshape(tuple(shape))
        as_dtype(array.dtype)
        return Tensor(self, self._recording.constant(array, name))

    def concatenate(self, tensors: Sequence[Tensor], *, axis: int) -> Tensor:
        """Tensors joined along an axis."""
        self._check_open("concatenate")
        symbols = [self._symbol_of("concatenate", f"tensors[{i}]", one, None) for i, one in enumerate(tensors)]
        if not symbols:
            raise ValueError("concatenate: there are no tensors")
        found: Tensor = self._recorded(INTERNAL["concatenate"], symbols, {"axis": int(axis)})
        return found

    # ---- for training ----

    def parameter(self, *, name: str, values: npt.ArrayLike) -> Tensor:
        """A tensor that the context keeps from run to run, as ``context.parameters[name]``; no argument."""
        self._check_open("parameter")
        if name in self._parameters:
            raise ValueError(f"parameter: there is a parameter {name!r} already")
        array = values if isinstance(values, np.ndarray) else np.asarray(values, _untyped(values))
        as_dtype(array.dtype)
        return self._parameter(Variable(array, name=name))

    def gradient(self, *, of: Tensor, withRespectTo: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the sum of a tensor with respect to tensors on which it depends."""
        self._check_open("gradient")
        target = self._symbol_of("gradient", "of", of, None)
        others = [self._symbol_of("gradient", f"withRespectTo[{i}]", one, None) for i, one in enumerate(withRespectTo)]
        return [Tensor(self, symbol) for symbol in self._recording.gradients(target, others)]

    def update(self, tensor: Tensor, value: Operand) -> None:
        """Leave a value in an argument that is `inOut`, or in a parameter, at the end of each run."""
        self._check_open("update")
        target = self._updated(tensor)
        new = self._symbol_of("update", "value", value, target.dtype)
        self._recording.assign(target, new)
        self._updates[target] = new

    def minimize(self, loss: Tensor, *, parameters: Iterable[Tensor], using: Optimizer) -> list[Tensor]:
        """Update parameters, or arguments that are `inOut`, by the gradients of a loss, which are returned."""
        tensors = list(parameters)
        gradients = self.gradient(of=loss, withRespectTo=tensors)
        self.apply(gradients, to=tensors, using=using)
        return gradients

    def apply(self, gradients: Sequence[Tensor], *, to: Sequence[Tensor], using: Optimizer) -> None:
        """Update parameters, or arguments that are `inOut`, by these gradients. The optimizer's states are parameters
        of the context.
        """  # fmt: skip
        self._check_open("apply")
        targets = [self._updated(tensor) for tensor in to]
        given = [self._symbol_of("apply", f"gradients[{i}]", one, None) for i, one in enumerate(gradients)]
        rule, variables = using.rule, [symbol.call.value for symbol in targets]
        rule.prepare(variables)

        def step(*found: graph.Tensor) -> list[graph.Tensor]:
            rule.update(variables, found)
            traced = current_graph()
            assert traced is not None
            return [traced.assigned[variable] for variable in variables]

        kind = type(using).__name__
        news = self._recording.call(step, given, kind=kind, count=len(targets))
        for target, new in zip(targets, news, strict=True):
            self._recording.assign(target, new)
            self._updates[target] = new
        for variable in (rule.count, *(state for one in variables for state in rule.states[one])):
            self._parameters.setdefault(variable.name, variable)

    def model(self, path: Any, *, function: str | None = None) -> ModelTensors:
        """A graph from a file, to be called with tensors; its constants are parameters that can be trained."""
        from ._graph_file import read_model

        self._check_open("model")
        return ModelTensors(self, read_model(path, function))

    def call(self, model: ModelTensors, *, inputs: Sequence[Tensor], function: str | None = None) -> list[Tensor]:
        """The outputs of a function of a model, for tensors in place of its inputs."""
        self._check_open("call")
        found = model._model.function(function)
        given = [self._symbol_of("call", s.name, one, None) for s, one in zip(found.inputs, inputs, strict=False)]
        if len(inputs) != len(found.inputs):
            raise ValueError(f"call: {found.name!r} has {len(found.inputs)} inputs, but {len(inputs)} were given")
        for variable in model._model.parameters.values():
            self._parameter(variable)
        return [Tensor(self, s) for s in spliced(self._recording, found, given, self._variable)]

    # ---- recording ----

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise RuntimeError(f"{what}: the graph of this builder is made already")

    def _variable(self, variable: Variable) -> Symbol:
        """The one symbol of a variable."""
        found = self._variables.get(variable)
        if found is None:
            found = self._variables[variable] = self._recording.variable(variable, variable.name)
        return found

    def _parameter(self, variable: Variable) -> Tensor:
        known = self._parameters.setdefault(variable.name, variable)
        if known is not variable:
            raise ValueError(f"there are two parameters {variable.name!r}")
        return Tensor(self, self._variable(variable))

    def _updated(self, tensor: Tensor) -> Symbol:
        symbol = self._symbol_of("update", "tensor", tensor, None)
        if symbol.call.kind != "variable":
            raise TypeError(f"update: {symbol!r} is neither a parameter nor an argument with the intent inOut")
        if symbol in self._updates:
            raise ValueError(f"update: {symbol!r} is updated twice")
        return symbol

    def _symbol_of(self, operation: str, label: str, value: Any, dtype: DType | None) -> Symbol:
        """The symbol of an operand. Numbers and lists get the type."""
        if isinstance(value, Tensor):
            if value._builder is not self:
                raise ValueError(f"{operation}: {label}, {value._symbol!r}, belongs to another builder")
            return value._symbol
        if dtype is None:
            raise TypeError(f"{operation}: {label} is {type(value).__name__}, must be a tensor of this builder")
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
        else:
            untyped = np.asarray(value)
            if untyped.dtype.kind not in "fiub" or (untyped.dtype.kind, dtype.kind) in _LOSSY:
                shown = value if untyped.ndim == 0 else untyped.dtype
                raise TypeError(f"{operation}: {label} is {shown!r}, which a tensor of {dtype} cannot hold")
            array = untyped.astype(dtype)
        if array.dtype not in graph.tensor.DTYPES:
            raise TypeError(f"{operation}: {label} has type {array.dtype}, which no tensor has")
        return self._recording.constant(array)

    def _recorded(self, operation: Operation, operands: Sequence[Symbol | None], options: Mapping[str, Any]) -> Any:
        self._check_open(operation.name)
        count = max(1, len(operation.results))
        found = self._recording.call(operation.function, operands, options, kind=operation.name, count=count)
        if not operation.results:
            return Tensor(self, found[0])
        return RESULTS[operation.results](*(Tensor(self, symbol) for symbol in found))

    def _finished(self, answer: Any) -> Model:
        """The model of what was recorded, with these outputs."""
        outputs = [answer] if isinstance(answer, Tensor) else list(answer) if isinstance(answer, (list, tuple)) else []
        if not outputs:
            raise TypeError(f"the block returned {answer!r}, must return the output tensors")
        symbols = [self._symbol_of("makeContext", f"output {i}", one, None) for i, one in enumerate(outputs)]
        taken = {symbol.name for symbol in self._arguments}
        names: list[str] = []
        for place, symbol in enumerate(symbols):
            name = symbol.name if symbol.name and symbol.name not in taken else f"output_{place}"
            while name in taken:
                name += "_"
            names.append(name)
            taken.add(name)
        arguments = set(self._arguments)
        states = tuple((s, self._updates.get(s, s)) for s in self._arguments if s.call.kind == "variable")
        others = tuple((s, new) for s, new in self._updates.items() if s not in arguments)
        function = Function("main", tuple(self._arguments), tuple(symbols), states, tuple(names), others)
        self._open = False
        return Model(self._recording, {"main": function}, self._parameters)


# Python lists of the one kind that a tensor of the other cannot hold.
_LOSSY: Final = {("f", "i"), ("f", "b"), ("i", "b"), ("u", "b"), ("b", "i"), ("b", "f")}


def _untyped(values: Any) -> DType:
    """The type of numbers and lists: Float, Int or Bool; arrays have their own."""
    if isinstance(values, (np.ndarray, np.generic)):
        return np.asarray(values).dtype
    kind = np.asarray(values).dtype.kind
    return _BOOL if kind == "b" else _INT64 if kind in "iu" and isinstance(values, int) else _FLOAT
