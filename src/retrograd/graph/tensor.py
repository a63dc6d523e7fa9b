"""Tensors, the graph that a trace builds of them, and variables.

A tensor is a result of a node; a node is an operation with its inputs. Inside a trace the functions of this package add
nodes. Called with arrays they compute at once, by the same declarations.
"""

from __future__ import annotations

import copy as copy_module
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from ..ops import _memory
from ..ops._args import check_not_masked
from ..ops._buffers import foreign_array, is_foreign
from ..ops._errors import ArgumentError, ArgumentTypeError, ArgumentValueError, of_function
from ..ops._types import Array
from .operation import OPERATIONS, Operation, Spec
from .operators import Operators

_HERE: Final = os.path.dirname(os.path.abspath(__file__))
# A line of these packages is not the user's.
_PACKAGES: Final = (
    _HERE + os.sep,
    *(os.path.join(os.path.dirname(_HERE), name) + os.sep for name in ("nn", "bnns", "mpsgraph")),
    "<declared>",  # the generated methods of bnns
)
FLOATS: Final = (np.dtype(np.float32), np.dtype(np.float64))
INTEGERS: Final = (np.dtype(np.int32), np.dtype(np.int64))
BOOL: Final = np.dtype(np.bool_)
DTYPES: Final = (*FLOATS, *INTEGERS, BOOL)
_COMPARED: Final = 1 << 16  # bytes of a constant that is looked for among earlier ones
BYTE: Final = np.dtype(np.uint8)  # of caches, which only their operations read


class Joins(NamedTuple):
    """What a recording knows before it is traced, so that `joins` may make one operation of several."""

    first: bool  # no gradient is taken of a gradient
    # The function and the operands that a tensor is made of, by its id, if only one call reads it.
    made: dict[int, tuple[Callable[..., Any], Sequence[Any]]]


class Graph:
    """The nodes of a trace, in the order in which they were made. `print` shows them as a table."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.assigned: dict[Variable, Tensor] = {}  # the last value of each variable
        self.read: dict[Variable, Tensor] = {}  # the value of each variable at the start
        self.open = True
        self.joins: Joins | None = None
        self._known: dict[tuple[Any, ...], Node] = {}

    def node(self, operation: Operation, inputs: Sequence[Tensor | None], attributes: dict[str, Any]) -> Node:
        """The node of an operation: an earlier one, if it is the same."""
        key = (operation.name, *map(id, inputs), *sorted(attributes.items()))
        try:
            found = self._known.get(key)
        except TypeError:  # an attribute that cannot be hashed
            key, found = (), None
        if found is not None:
            return found
        specs = operation.shapes(*(None if t is None else t.spec for t in inputs), **attributes)
        node = Node(self, operation, tuple(inputs), attributes, specs)
        if key:
            self._known[key] = node
        return node

    def variable(self, variable: Variable) -> Tensor:
        """The value that a variable has at this point of the trace."""
        found = self.assigned.get(variable)
        if found is None:
            found = self.read.get(variable)
        if found is None:
            found = Node(self, VARIABLE, (), {"variable": variable}, (variable.spec,)).results[0]
            self.read[variable] = found
        return found

    def constant(self, value: Array) -> Tensor:
        """A tensor that always has this value."""
        small = value.nbytes <= _COMPARED
        key = ("constant", value.dtype, value.shape, value.tobytes()) if small else ()
        found = self._known.get(key) if small else None
        if found is None:
            copy = np.array(value, order="C")
            copy.flags.writeable = False
            found = Node(self, CONSTANT, (), {"value": copy}, (Spec(copy.shape, copy.dtype),))
            if small:
                self._known[key] = found
        return found.results[0]

    def __repr__(self) -> str:
        from .show import graph_table

        return graph_table(self)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of the graph, as SVG."""
        from .show import draw

        draw(self, path)


class Node:
    """An operation with its inputs and attributes."""

    __slots__ = ("attributes", "graph", "inputs", "line", "number", "operation", "region", "results")

    def __init__(
        self,
        graph: Graph,
        operation: Operation,
        inputs: tuple[Tensor | None, ...],
        attributes: dict[str, Any],
        specs: Sequence[Spec],
    ) -> None:
        if not graph.open:
            raise RuntimeError(
                f"{operation.name}: this tensor belongs to a function that has been traced already; return it from "
                "that function, and use the array that the program returns"
            )
        self.graph = graph
        self.operation = operation
        self.inputs = inputs
        self.attributes = attributes
        self.line = users_line()
        self.number = len(graph.nodes)
        self.region = _TRACE.region if inputs else None  # variables and constants are never computed again
        self.results = tuple(Tensor(self, index, spec) for index, spec in enumerate(specs))
        graph.nodes.append(self)

    @property
    def result(self) -> Tensor:
        return self.results[0]

    def __repr__(self) -> str:
        return f"<{self.operation.name} {self.number}>"


class Tensor(Operators):
    """A value in a graph: its shape and dtype are known, its elements are computed when a program runs."""

    __slots__ = ("index", "node", "spec")

    def __init__(self, node: Node, index: int, spec: Spec) -> None:
        self.node = node
        self.index = index
        self.spec = spec

    def __repr__(self) -> str:
        return f"Tensor({self.spec!r}, from {self.node.operation.name})"

    # What Python or NumPy would need the elements for.
    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"a tensor of shape {self.shape} is used as a truth value, but its elements are only known when the "
            "program runs; use graph.where(condition, a, b), or decide before tracing"
        )

    def __float__(self) -> NoReturn:
        raise TypeError(
            "a tensor has no value while a function is traced; return it, and convert what the program returns"
        )

    __int__ = __index__ = __float__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, arguments: object = (), options: object = None
    ) -> NoReturn:
        name = getattr(function, "__name__", "a function of PyTorch")
        raise TypeError(f"PyTorch's {name} is called with a tensor of a graph; use a function of retrograd.graph")

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        raise TypeError(
            "a tensor is used in NumPy code, which needs its elements; use the function of retrograd.graph with the "
            "same name, or return the tensor and call NumPy on what the program returns"
        )


class Variable(Operators):
    """An array that a program keeps from run to run: a parameter, an optimizer's state, a counter.

    `value` is the array itself; ``variable.value = new`` copies into it. Inside a trace a variable is a tensor with the
    value it has at that point, and :meth:`assign` gives it another one.
    """

    __slots__ = ("__weakref__", "_value", "name", "spec")

    def __init__(self, value: npt.ArrayLike, *, dtype: npt.DTypeLike | None = None, name: str = "") -> None:
        if value is None:
            raise TypeError(f"{type(self).__name__}: value is None, must be an array")
        given = np.asarray(value, dtype)
        if given.dtype not in DTYPES:
            raise TypeError(f"Variable: value has dtype {given.dtype}, must be one of {_names(DTYPES)}")
        self.spec = Spec(given.shape, np.dtype(given.dtype.type))  # the one that native arrays have
        self._value = aligned(self.spec)
        self._value[...] = given
        self.name = name

    @property
    def value(self) -> Array:
        """The array, in the memory that programs use."""
        return self._value

    @value.setter
    def value(self, new: npt.ArrayLike) -> None:
        # Programs are bound to its memory, so the elements change, not the array.
        array = np.asarray(new)
        if array.shape != self.shape:
            raise ValueError(f"value has shape {array.shape}, but {self!r} keeps its shape")
        self._value[...] = array

    def __setitem__(self, index: Any, new: npt.ArrayLike) -> None:
        """Write to elements, at once: ``variable[...] = 0``."""
        if current_graph() is not None:
            raise TypeError(
                f"elements of variable {self.name!r} are set while a function is traced, which would be no part of the "
                "program; use assign with the whole new value"
            )
        self._value[index] = new

    def __copy__(self) -> Variable:
        return copy_module.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        # A new variable, because that aligns its memory.
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(self.__getstate__())
        return made

    def __getstate__(self) -> tuple[Any, ...]:
        return self._value, self.name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        Variable.__init__(self, state[0], name=state[1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if current_graph() is not None:
            raise TypeError(
                f"variable {self.name!r} is used in NumPy code while a function is traced, which would fix its present "
                "value; use the function of retrograd.graph with the same name, or variable.value to mean just that"
            )
        return np.array(self.value, dtype, copy=copy)

    def __bool__(self) -> bool:
        return bool(np.asarray(self))  # which raises inside a trace

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    __index__ = __int__

    def assign(self, value: Operand) -> None:
        """Give the variable another value: at the end of the run, or at once outside a trace."""
        graph = current_graph()
        if graph is None:
            self.value = np.asarray(value)
            return
        tensor = as_tensor(value, self.dtype)
        if tensor.spec != self.spec:
            raise fail("assign", f"value is {tensor.spec!r}, but the variable {self.name or ''} is {self.spec!r}")
        graph.variable(self)  # so that the program knows it
        graph.assigned[self] = tensor

    def __repr__(self) -> str:
        return f"Variable({self.spec!r}{', ' + repr(self.name) if self.name else ''})"


# What the functions take.
Operand: TypeAlias = Operators | npt.ArrayLike  # tensors, variables, arrays, numbers


class _Trace(threading.local):
    graph: Graph | None = None
    region: object = None  # of a part of the model that is recomputed


_TRACE: Final = _Trace()


def current_graph() -> Graph | None:
    """The graph that this thread traces."""
    return _TRACE.graph


def trace(function: Callable[..., Any], specs: Sequence[Spec], names: Sequence[str] = ()) -> tuple[Graph, Any]:
    """The graph of a function of tensors with these specs, and what the function returned."""
    if _TRACE.graph is not None:
        raise RuntimeError("a function is traced already; call the function itself, a trace has one graph")
    graph = Graph()
    _TRACE.graph, _TRACE.region = graph, None
    try:
        for i, spec in enumerate(specs):
            name = names[i] if i < len(names) else f"input {i}"
            graph.inputs.append(Node(graph, INPUT, (), {"name": name}, (spec,)).results[0])
        answer = function(*graph.inputs)
        graph.outputs = [as_tensor(leaf) for leaf in leaves(answer)]
    finally:
        graph.open = False
        _TRACE.graph, _TRACE.region = None, None
    return graph, answer


@contextmanager
def no_trace() -> Iterator[None]:
    """Leave the trace of this thread for a while, to trace something else."""
    before = _TRACE.graph, _TRACE.region
    _TRACE.graph, _TRACE.region = None, None
    try:
        yield
    finally:
        _TRACE.graph, _TRACE.region = before


def leaves(answer: Any) -> list[Any]:
    """The tensors of nested tuples, lists and dicts, in order."""
    if answer is None:
        return []
    if isinstance(answer, dict):
        return [leaf for value in answer.values() for leaf in leaves(value)]
    if isinstance(answer, (tuple, list)):
        return [leaf for value in answer for leaf in leaves(value)]
    return [answer]


def rebuilt(answer: Any, values: list[Any]) -> Any:
    """`answer` with its leaves replaced by `values`, which is consumed."""
    if answer is None:
        return None
    if isinstance(answer, dict):
        return {key: rebuilt(value, values) for key, value in answer.items()}
    if isinstance(answer, tuple):
        parts = [rebuilt(value, values) for value in answer]
        return type(answer)(*parts) if hasattr(answer, "_fields") else tuple(parts)
    if isinstance(answer, list):
        return [rebuilt(value, values) for value in answer]
    return values.pop(0)


def as_tensor(value: Operand, dtype: np.dtype[Any] | None = None) -> Tensor:
    """A tensor of the current trace. Python numbers get `dtype`, as NumPy's own would."""
    graph = current_graph()
    if isinstance(value, Tensor):
        if graph is None:
            raise RuntimeError(
                f"a tensor of shape {value.shape} is used after the function that made it was traced; return it from "
                "that function, and use the array that the program returns"
            )
        if value.node.graph is not graph:
            raise RuntimeError(
                f"a tensor of shape {value.shape} belongs to another trace; a trace uses its own tensors, arrays and "
                "variables"
            )
        return value
    assert graph is not None
    if isinstance(value, Variable):
        return graph.variable(value)
    return graph.constant(as_array(value, dtype))


def as_array(value: Operand, dtype: np.dtype[Any] | None = None) -> Array:
    """A NumPy array of a supported dtype. Python numbers get `dtype` if it can hold them."""
    if isinstance(value, Variable):
        return value.value
    if isinstance(value, (bool, int, float)):
        fits = dtype is not None and (
            dtype.kind == "f" or (type(value) is not float and (type(value) is bool) == (dtype.kind == "b"))
        )
        if fits:
            return np.asarray(value, dtype)
        return np.asarray(value, np.bool_ if type(value) is bool else np.int64 if type(value) is int else np.float64)
    if value is None:
        raise TypeError("an operand is None, must be a tensor or an array; a function without a return gives None")
    check_not_masked("x", value)
    array = value if isinstance(value, np.ndarray) else foreign_array(value) if is_foreign(value) else np.asarray(value)
    if array.dtype not in DTYPES and array.dtype != BYTE:
        if array.dtype.kind in "iu" and np.can_cast(array.dtype, np.int64):
            return array.astype(np.int64)
        raise TypeError(f"dtype {array.dtype} is not one of {_names(DTYPES)}")
    return array


def in_trace(operands: Sequence[Operand | None]) -> bool:
    """Whether these operands make a node: there is a tensor, or a variable inside a trace."""
    graph = current_graph()
    for operand in operands:
        if isinstance(operand, Tensor):
            if graph is None:
                as_tensor(operand)  # raises
            return True
        if isinstance(operand, Variable) and graph is not None:
            return True
    return False


def common_dtype(name: str, operands: Sequence[Operand | None]) -> np.dtype[Any] | None:
    """The dtype of the operands that have one. Python numbers take on the dtype of the others."""
    found: np.dtype[Any] | None = None
    for operand in operands:
        if operand is None or isinstance(operand, (bool, int, float)):
            continue
        dtype = operand.dtype if isinstance(operand, (Tensor, Variable, np.ndarray)) else as_array(operand).dtype
        if found is None:
            found = dtype
        elif dtype != found:
            raise fail(
                name, f"operands have dtypes {found} and {dtype}; convert one with .astype or graph.cast", TypeError
            )
    return found


def apply(
    operation: Operation,
    operands: Sequence[Operand | None],
    attributes: dict[str, Any] | None = None,
    *,
    dtype: np.dtype[Any] | None = None,
) -> tuple[Any, ...]:
    """The results of an operation: tensors inside a trace, else arrays."""
    settings = attributes or {}
    try:
        if in_trace(operands):
            graph = current_graph()
            assert graph is not None
            tensors = [None if o is None else as_tensor(o, dtype) for o in operands]
            return _folded(graph, operation, tensors, settings) or graph.node(operation, tensors, settings).results
        return compute(operation, [None if o is None else as_array(o, dtype) for o in operands], settings)
    except (TypeError, ValueError) as error:
        if isinstance(error, ArgumentError) and error.function == operation.name:
            raise
        raise fail(operation.name, str(error), type(error)) from None
    except AttributeError:
        place = next((i for i, o in enumerate(operands) if o is None), None)
        if place is None:
            raise
        raise _missing(operation, place) from None


def _missing(operation: Operation, place: int) -> Exception:
    """The error about an operand of None that the operation needs."""
    names = [p.name for p in inspect.signature(operation.shapes).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    name = names[place] if place < len(names) else f"operand {place}"
    return fail(operation.name, f"{name} is None, must be a tensor or an array", TypeError)


_MOST_FOLDED: Final = 1 << 16  # bytes of a result that is computed while tracing


def _folded(
    graph: Graph, operation: Operation, tensors: Sequence[Tensor | None], attributes: dict[str, Any]
) -> tuple[Tensor, ...]:
    """The results of an operation on constants, as constants; empty if an input is not one."""
    if operation.compute is None or operation.updates:
        return ()
    if not all(t is not None and t.node.operation is CONSTANT for t in tensors):
        return ()
    arrays = [t.node.attributes["value"] for t in tensors if t is not None]
    specs = operation.shapes(*(Spec(a.shape, a.dtype) for a in arrays), **attributes)
    if sum(spec.nbytes for spec in specs) > _MOST_FOLDED:
        return ()
    return tuple(graph.constant(array) for array in compute(operation, arrays, attributes))


def apply_one(
    operation: Operation,
    operands: Sequence[Operand | None],
    attributes: dict[str, Any] | None = None,
    *,
    dtype: np.dtype[Any] | None = None,
) -> Tensor:
    """The first result of an operation; to a type checker it is a tensor."""
    found: Tensor = apply(operation, operands, attributes, dtype=dtype)[0]
    return found


def compute(operation: Operation, arrays: Sequence[Array | None], attributes: dict[str, Any]) -> tuple[Array, ...]:
    """The results of an operation on arrays, computed at once."""
    if operation.view is not None:
        (array,) = arrays
        assert array is not None
        operation.shapes(Spec(array.shape, array.dtype), **attributes)
        return (operation.view(array, **attributes),)
    specs = operation.shapes(*(None if a is None else Spec(a.shape, a.dtype) for a in arrays), **attributes)
    # Not np.ascontiguousarray, which gives an array without axes one.
    inputs = [
        a if a is None or not needs_contiguous(operation, i) else np.asarray(a, order="C") for i, a in enumerate(arrays)
    ]
    results = [_memory.empty(spec.shape, spec.dtype) for spec in specs]
    assert operation.compute is not None
    operation.compute(inputs, results, **attributes)
    return tuple(results)


def needs_contiguous(operation: Operation, position: int) -> bool:
    return operation.contiguous is None or position in operation.contiguous


def aligned(spec: Spec) -> Array:
    """Zeros, aligned to a cache line."""
    memory = np.zeros(spec.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array: Array = memory[start : start + spec.nbytes].view(spec.dtype).reshape(spec.shape)
    return array


def users_line() -> tuple[str, int]:
    """The file and the line that called these packages."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def fail(name: str, message: str, kind: type[Exception] = ValueError) -> Exception:
    """An error that names the operation and the user's line."""
    file, line = users_line()
    place = f"{os.path.basename(file)}:{line}"
    if not issubclass(kind, (TypeError, ValueError)):
        return kind(f"{name}: {message} ({place})")
    argument = ArgumentTypeError if issubclass(kind, TypeError) else ArgumentValueError
    return of_function(name, argument("", "{} ({})", message, place))


def _names(dtypes: Sequence[np.dtype[Any]]) -> str:
    return ", ".join(dtype.name for dtype in dtypes)


def _no_shapes(*_: object, **__: object) -> Sequence[Spec]:
    raise AssertionError("made by the graph itself")


# The nodes without inputs.
INPUT: Final = Operation("input", _no_shapes)
CONSTANT: Final = Operation("constant", _no_shapes)
VARIABLE: Final = Operation("variable", _no_shapes)
assert len(OPERATIONS) == 3
