"""Graphs that are built call by call and traced later, when the sizes of their placeholders are known.

Apple's graphs are objects on which a program calls one operation after the other; a placeholder may leave sizes open,
and any tensors may be asked for in a run. A :class:`Recording` keeps the calls. For given feeds and targets,
:meth:`Recording.program` makes them again inside a trace, only those that the targets depend on::

    recording = Recording()
    x = recording.placeholder((-1, 3), np.float32, "x")
    w = recording.variable(Variable(np.ones((3, 2), np.float32)), "w")
    (y,) = recording.call(graph.matmul, (x, w), name="y")
    (dw,) = recording.gradients(y, [w])
    program = recording.program({x: graph.spec((4, 3))}, [y, dw])
    y4, dw4 = program(x4)

A front end supplies names and argument rules; the functions that it passes to `call` are this package's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import cycle
from typing import Any, Final, TypeAlias

import numpy as np

from ..ops._errors import ArgumentError
from ..ops._types import Array
from .gradient import gradients
from .operation import Operation, Spec
from .program import Program
from .shaping import full
from .tensor import Graph, Joins, Node, Tensor, Variable, current_graph, trace

# A size that is not known is -1; a shape of which nothing is known is None.
Shape: TypeAlias = tuple[int, ...] | None
UNKNOWN: Final = -1
# Sizes for the unknown ones: what differs between their results is unknown too. Small ones show what a slice cuts off,
# those with many divisors suit reshapes and splits; the last ones differ from axis to axis, as the sizes of a
# convolution's input and weight may. Sizes with which a call fails are left out.
_STAND_INS: Final = ((2,), (3,), (5,), (12,), (24,), (24, 19, 13, 9, 7, 5, 4, 3))
_MOST_PROGRAMS: Final = 32  # that a recording keeps

_MARK: Final = Operation(
    "mark", lambda x: (x,), view=lambda array: array, contiguous=(), gradient=lambda node, given, needed: list(given)
)


class UnknownValue(ValueError):
    """A function of a recording needs the value of an operand, which a trace of the call alone does not have."""


class Symbol:
    """A tensor of a recording. Its shape may have unknown sizes (-1) or be unknown (None), as may its dtype."""

    __slots__ = ("__weakref__", "call", "dtype", "index", "shape")

    def __init__(self, call: Call, index: int, shape: Shape, dtype: np.dtype[Any] | None) -> None:
        self.call = call
        self.index = index
        self.shape = shape
        self.dtype = dtype

    @property
    def recording(self) -> Recording:
        return self.call.recording

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def spec(self) -> Spec | None:
        """The shape and dtype, if all of it is known."""
        if self.shape is None or self.dtype is None or UNKNOWN in self.shape:
            return None
        return Spec(self.shape, self.dtype)

    def __repr__(self) -> str:
        shape = "unknown shape" if self.shape is None else str(list(self.shape))
        dtype = "unknown type" if self.dtype is None else self.dtype.name
        return f"{self.call.described} ({dtype}, {shape})"


class Call:
    """A recorded call: the function, its operands and options, and the symbols that stand for its results."""

    __slots__ = ("after", "function", "kind", "name", "number", "operands", "options", "recording", "results", "value")

    def __init__(
        self,
        recording: Recording,
        kind: str,
        operands: Sequence[Symbol | None] = (),
        *,
        function: Callable[..., Any] | None = None,
        options: Mapping[str, Any] | None = None,
        value: Any = None,
        name: str | None = None,
    ) -> None:
        self.recording = recording
        self.kind = kind  # "placeholder", "constant", "variable", "assign", "gradients", else an operation's name
        self.operands = tuple(operands)
        self.function = function
        self.options = dict(options or {})
        self.value = value  # of a constant or a variable
        self.name = name or ""
        self.number = len(recording.calls)
        self.after: tuple[Call, ...] = recording.dependencies
        self.results: tuple[Symbol, ...] = ()
        for operand in self.operands:
            if operand is not None and operand.recording is not recording:
                raise ValueError(f"{kind}: {operand!r} belongs to another graph")

    @property
    def described(self) -> str:
        """What error messages call it."""
        return f"{self.kind} {self.name!r}" if self.name else f"{self.kind} {self.number}"

    def __repr__(self) -> str:
        return f"<{self.described}>"


class Recording:
    """The calls that build a graph, in order. Not for several threads at once; programs of it may run in any."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.dependencies: tuple[Call, ...] = ()  # the assigns whose values the calls being recorded see
        self._marked: set[int] = set()  # ids of the symbols that gradients are taken of
        self._programs: dict[tuple[Any, ...], Program] = {}  # the one used last is the last
        self._lock = threading.Lock()

    # ---- building ----

    def placeholder(self, shape: Sequence[int] | None, dtype: np.dtype[Any], name: str | None = None) -> Symbol:
        call = Call(self, "placeholder", name=name)
        return self._added(call, [(None if shape is None else tuple(shape), dtype)])[0]

    def constant(self, value: Array, name: str | None = None) -> Symbol:
        copy = np.array(value, order="C")
        copy.flags.writeable = False
        return self._added(Call(self, "constant", value=copy, name=name), [(copy.shape, copy.dtype)])[0]

    def variable(self, variable: Variable, name: str | None = None) -> Symbol:
        call = Call(self, "variable", value=variable, name=name)
        return self._added(call, [variable.spec])[0]

    def call(
        self,
        function: Callable[..., Any],
        operands: Sequence[Symbol | None],
        options: Mapping[str, Any] | None = None,
        *,
        kind: str = "",
        count: int = 1,
        name: str | None = None,
    ) -> tuple[Symbol, ...]:
        """The results of ``function(*operands, **options)``, a function of tensors that returns one or several.

        Wrong shapes and dtypes are refused now, as far as they are known. `count` is the number of results, needed
        only where unknown sizes keep the function from being traced.
        """
        call = Call(self, kind or function.__name__, operands, function=function, options=options, name=name)
        return self._added(call, self._inferred(call, count))

    def gradients(self, of: Symbol, wrt: Sequence[Symbol], *, name: str | None = None) -> tuple[Symbol, ...]:
        """The gradients of the sum of `of` with respect to any tensors on which it depends."""
        call = Call(self, "gradients", (of, *wrt), name=name)
        before = self._ancestors([of])
        for symbol in wrt:
            if symbol.call not in before:
                raise ValueError(f"gradients: {of!r} does not depend on {symbol!r}")
        for what, symbol in (("of", of), *(("with", s) for s in wrt)):
            if symbol.dtype is not None and symbol.dtype.kind != "f":
                raise TypeError(f"gradients: {what} has {symbol!r}, which has no derivative")
        marked, self._marked = self._marked, self._marked | {id(s) for s in wrt}
        specs = {c.results[0]: c.results[0].spec for c in before if c.kind == "placeholder"}
        try:
            if all(spec is not None for spec in specs.values()):
                self._trace({s: spec for s, spec in specs.items() if spec}, (), (), extra=call)
        except BaseException:
            self._marked = marked
            raise
        return self._added(call, [(s.shape, s.dtype) for s in wrt])

    def assign(self, variable: Symbol, value: Symbol, *, name: str | None = None) -> Call:
        """Give a variable another value at the end of every run that this call is a target of."""
        call = Call(self, "assign", (variable, value), name=name)
        if variable.call.kind != "variable":
            raise TypeError(f"assign: {variable!r} is not a variable")
        if value.dtype is not None and value.dtype != variable.dtype:
            raise TypeError(f"assign: {value!r} has another data type than {variable!r}")
        if not _compatible(value.shape, variable.shape):
            raise ValueError(f"assign: {value!r} has another shape than {variable!r}")
        self._added(call, [])
        return call

    def _added(self, call: Call, specs: Sequence[tuple[Shape, np.dtype[Any] | None]]) -> tuple[Symbol, ...]:
        call.results = tuple(Symbol(call, i, shape, dtype) for i, (shape, dtype) in enumerate(specs))
        self.calls.append(call)
        return call.results

    # ---- shapes ----

    def _inferred(self, call: Call, count: int) -> Sequence[tuple[Shape, np.dtype[Any] | None]]:
        """The shapes and dtypes of the results, by tracing the call alone."""
        operands = [s for s in call.operands if s is not None]
        try:
            if all(s.spec is not None for s in operands):
                return self._traced_alone(call, ())
        except UnknownValue:
            return [(None, None)] * count
        if any(s.shape is None or s.dtype is None for s in operands):
            return [(None, None)] * count
        found: list[Sequence[Spec]] = []
        for sizes in _STAND_INS:
            try:
                found.append(self._traced_alone(call, sizes))
            except (IndexError, TypeError, ValueError):  # what is wrong with the real sizes is said when they are known
                continue
        if len(found) < 2:
            return [(None, None)] * count
        return [(_agreed([spec.shape for spec in specs]), specs[0].dtype) for specs in zip(*found, strict=True)]

    def _traced_alone(self, call: Call, sizes: Sequence[int]) -> Sequence[Spec]:
        """The specs of the results, with these sizes for the unknown ones in turn."""
        given = [s for s in call.operands if s is not None and s.call.kind != "constant"]
        specs, stand_ins = [], cycle(sizes)
        for symbol in given:
            assert symbol.shape is not None
            assert symbol.dtype is not None
            specs.append(Spec(tuple(next(stand_ins) if n == UNKNOWN else n for n in symbol.shape), symbol.dtype))

        def alone(*tensors: Tensor) -> list[Tensor]:
            found = dict(zip(map(id, given), tensors, strict=True))
            operands = (None if s is None else found[id(s)] if id(s) in found else _constant(s) for s in call.operands)
            return _results(call, list(operands))

        try:
            graph, _ = trace(alone, specs)
        except UnknownValue:
            raise
        except (TypeError, ValueError) as error:
            raise _named(call, error) from None
        return [tensor.spec for tensor in graph.outputs]

    # ---- running ----

    def _ancestors(self, symbols: Sequence[Symbol], assigns: Sequence[Call] = ()) -> set[Call]:
        """The calls that these need."""
        found: set[Call] = set()
        waiting = [*(s.call for s in symbols), *assigns]
        while waiting:
            call = waiting.pop()
            if call not in found:
                found.add(call)
                waiting.extend(s.call for s in call.operands if s is not None)
                waiting.extend(call.after)
        return found

    def _of_gradients(self, call: Call) -> bool:
        """Whether a call takes the gradient of something that is made of gradients."""
        of = call.operands[0] if call.kind == "gradients" else None
        return of is not None and any(before.kind == "gradients" for before in self._ancestors([of]))

    def calls_for(self, targets: Sequence[Symbol]) -> list[Call]:
        """The calls that targets depend on, in the order in which they were made."""
        needed = self._ancestors(targets)
        return [call for call in self.calls if call in needed]

    def placeholders(self, targets: Sequence[Symbol], assigns: Sequence[Call] = ()) -> list[Symbol]:
        """The placeholders that targets depend on, in the order in which they were made."""
        needed = self._ancestors(targets, assigns)
        return [call.results[0] for call in self.calls if call.kind == "placeholder" and call in needed]

    def program(self, feeds: Mapping[Symbol, Spec], targets: Sequence[Symbol], assigns: Sequence[Call] = ()) -> Program:
        """The program that computes the targets, in this order, from feeds of these specs, in the order of `feeds`.

        Variables have the value at the start of the run, except in calls recorded after :meth:`assign` under
        `dependencies`. The last 32 programs are kept: the same feeds and targets give the same one.
        """
        key = (*((id(s), spec) for s, spec in feeds.items()), None, *map(id, targets), None, *map(id, assigns))
        with self._lock:
            found = self._programs.pop(key, None)
            if found is None:
                found = self._compiled(feeds, targets, assigns)
            self._programs[key] = found
            while len(self._programs) > _MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        return found

    def _compiled(self, feeds: Mapping[Symbol, Spec], targets: Sequence[Symbol], assigns: Sequence[Call]) -> Program:
        for what, symbol in (*(("feed", s) for s in feeds), *(("target", s) for s in targets)):
            if symbol.recording is not self:
                raise ValueError(f"run: the {what} {symbol!r} belongs to another graph")
        for call in assigns:
            if call.recording is not self:
                raise ValueError(f"run: the operation {call!r} belongs to another graph")
        for symbol in self.placeholders(targets, assigns):
            if symbol not in feeds:
                raise ValueError(f"run: no feed for {symbol!r}, which the targets depend on")
        for symbol, spec in feeds.items():
            _check_feed(symbol, spec)
        graph, answer = self._trace(feeds, targets, assigns)
        return Program(graph, answer, [s.name for s in feeds])

    def _trace(
        self,
        feeds: Mapping[Symbol, Spec],
        targets: Sequence[Symbol],
        assigns: Sequence[Call],
        *,
        extra: Call | None = None,
    ) -> tuple[Graph, Any]:
        more = [s for s in extra.operands if s is not None] if extra else []
        needed = self._ancestors([*targets, *more], assigns)
        order = [call for call in self.calls if call in needed]
        every = [*order, *([extra] if extra else [])]
        first = not any(self._of_gradients(call) for call in every)
        uses = Counter([*targets, *(s for call in every for s in call.operands)])
        alone = frozenset(symbol for symbol, count in uses.items() if count == 1 and symbol is not None)

        def again(*tensors: Tensor) -> list[Tensor]:
            graph = current_graph()
            assert graph is not None
            graph.joins = Joins(first, {})
            found: dict[int, Tensor] = dict(zip(map(id, feeds), tensors, strict=True))
            assigned: dict[Variable, Tensor] = {}
            for call in every:
                self._replay(call, found, assigned, alone)
            for variable, value in assigned.items():
                variable.assign(value)
            return [found[id(symbol)] for symbol in targets]

        return trace(again, list(feeds.values()), [s.name or s.call.described for s in feeds])

    def _replay(
        self, call: Call, found: dict[int, Tensor], assigned: dict[Variable, Tensor], alone: Set[Symbol]
    ) -> None:
        """Make a call inside the trace, and note its results. `alone`: the symbols that one call reads."""
        # Any: what is not a function's has no operands that are None.
        operands: list[Any] = [None if s is None else self._value(s, call, found) for s in call.operands]
        try:
            if call.kind == "placeholder":
                results = [found[id(call.results[0])]]
            elif call.kind == "assign":
                target = call.operands[0]
                assert target is not None
                variable, value = target.call.value, operands[1]
                if variable in assigned:
                    raise ValueError(f"{target!r} is assigned twice in one run")
                if value.spec != variable.spec:
                    raise ValueError(f"the value is {value.spec!r}, but {target!r} is {variable.spec!r}")
                assigned[variable] = value
                results = []
            elif call.kind == "gradients":
                of, *wrt = operands
                results = list(gradients(of, wrt, seed=full(of.shape, 1.0, of.dtype)))
            elif call.kind == "constant":
                results = [_constant(call.results[0])]
            elif call.kind == "variable":
                graph = current_graph()
                assert graph is not None
                results = [graph.variable(call.value)]
            else:
                results = _results(call, operands)
        except (TypeError, ValueError) as error:
            raise _named(call, error) from None
        for symbol, tensor in zip(call.results, results, strict=False):
            # The same call made twice is one node of the graph; a gradient is of one of them.
            fresh = id(symbol) in self._marked and call.kind not in ("placeholder", "variable")
            found[id(symbol)] = _marked(tensor) if fresh else tensor
            if call.function is not None and symbol in alone and not fresh:
                joins = tensor.node.graph.joins
                assert joins is not None
                joins.made[id(tensor)] = call.function, operands

    def _value(self, symbol: Symbol, call: Call, found: dict[int, Tensor]) -> Tensor:
        if symbol.call.kind == "variable" and call.kind not in ("assign", "gradients"):
            for assign in reversed(call.after):
                if assign.kind == "assign" and assign.operands[0] is symbol:
                    value = assign.operands[1]
                    assert value is not None
                    return found[id(value)]
        return found[id(symbol)]


def _results(call: Call, operands: Sequence[Tensor | None]) -> list[Tensor]:
    assert call.function is not None
    answer = call.function(*operands, **call.options)
    return [answer] if isinstance(answer, Tensor) else list(answer)


def _constant(symbol: Symbol) -> Tensor:
    graph = current_graph()
    assert graph is not None
    return graph.constant(symbol.call.value)


def _marked(tensor: Tensor) -> Tensor:
    return Node(tensor.node.graph, _MARK, (tensor,), {}, (tensor.spec,)).results[0]


def _compatible(shape: Shape, other: Shape) -> bool:
    if shape is None or other is None:
        return True
    return len(shape) == len(other) and all(a == b or UNKNOWN in (a, b) for a, b in zip(shape, other, strict=True))


def _agreed(shapes: Sequence[tuple[int, ...]]) -> Shape:
    """What shapes have in common."""
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        return None
    return tuple(extents[0] if len(set(extents)) == 1 else UNKNOWN for extents in zip(*shapes, strict=True))


def _check_feed(symbol: Symbol, spec: Spec) -> None:
    if symbol.call.kind != "placeholder":
        raise TypeError(f"run: {symbol!r} is fed, but is not a placeholder")
    if symbol.dtype is not None and spec.dtype != symbol.dtype:
        raise TypeError(f"run: the feed of {symbol!r} has data type {spec.dtype.name}")
    if not _compatible(spec.shape, symbol.shape):
        raise ValueError(f"run: the feed of {symbol!r} has shape {list(spec.shape)}")


def _named(call: Call, error: Exception) -> Exception:
    """The error of a function, with the call's name in front."""
    message = str(error)
    if isinstance(error, ArgumentError):  # names the function already, by its name in this package
        message = message.split(": ", 1)[-1]
    if message.startswith(call.described):
        return error
    kind = TypeError if isinstance(error, TypeError) else ValueError
    operands = ", ".join(repr(s) for s in call.operands if s is not None)
    return kind(f"{call.described}: {message}" + (f"; operands: {operands}" if operands else ""))
