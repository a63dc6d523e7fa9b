"""Control flow: dependencies, branches and loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from .. import graph as G
from ..graph import Recording, Spec
from ..graph.recording import Call, Symbol
from ..graph.tensor import no_trace
from ..ops._types import Array
from . import _functions as F
from ._graph import MPSGraphOperation, MPSGraphTensor, Scope
from ._running import Running

_MOST_UNROLLED: Final = 1024  # iterations of a loop that becomes a list of operations
Block = Callable[..., Any]


def _as_list(where: str, value: Any) -> list[Any]:
    """What a block returns: tensors, one or none."""
    if value is None:
        return []
    if isinstance(value, MPSGraphTensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return list(value)
    raise TypeError(f"{where}: a block returned {type(value).__name__}, must return a list of tensors")


class _Body:
    """The body of a loop: a recording of its own, whose captured tensors are more operands of the loop."""

    def __init__(self, scope: Scope, arguments: Sequence[Symbol], results: Sequence[Symbol]) -> None:
        self.recording: Recording = scope.recording
        self.arguments = list(arguments)
        self.captured = list(scope.captured.values())
        self.outside = list(scope.captured)
        self.results = list(results)

    def program(self, arguments: Sequence[Spec], captured: Sequence[Spec]) -> G.Program:
        feeds = dict(zip([*self.arguments, *self.captured], [*arguments, *captured], strict=True))
        with no_trace():
            return self.recording.program(feeds, self.results)


def _loop_specs(what: str, body: G.Program, expected: Sequence[Spec]) -> None:
    for i, (one, spec) in enumerate(zip(body.specs, expected, strict=True)):
        if one != spec:
            raise ValueError(f"{what}: argument {i} is {spec!r}, but the body returns {one!r} for the next iteration")


def _run(program: G.Program, arrays: Sequence[Array]) -> tuple[Array, ...]:
    found = program.arrays(tuple(np.asarray(a, order="C") for a in arrays))
    assert found is not None
    return found


def _counted(*operands: G.Tensor, body: _Body, count: int) -> Any:
    """A loop from operands[0] to below operands[1] by operands[2], over `count` arguments."""
    bounds, values, captured = operands[:3], operands[3 : 3 + count], operands[3 + count :]
    specs = [t.spec for t in values]
    index = Spec((), bounds[0].dtype)
    program = body.program([index, *specs], [t.spec for t in captured])
    _loop_specs("for", program, specs)

    def loop(*arrays: Array) -> tuple[Array, ...]:
        low, high, step = (int(a.reshape(())) for a in arrays[:3])
        if step == 0:
            raise ValueError("for: step is 0")
        now, others = arrays[3 : 3 + count], arrays[3 + count :]
        for i in range(low, high, step):
            now = _run(program, [np.asarray(i, index.dtype), *now, *others])
        return tuple(now)

    return G.call(loop, specs, *(F.scalar(t) for t in bounds), *values, *captured)


def _conditional(*operands: G.Tensor, before: _Body, after: _Body, count: int) -> Any:
    """A loop while the last result of `before` is true."""
    values, captured = operands[:count], [t.spec for t in operands[count:]]
    split = len(before.captured)
    specs = [t.spec for t in values]
    test = before.program(specs, captured[:split])
    step = after.program(test.specs[:-1], captured[split:])
    _loop_specs("while", step, specs)
    if test.specs[-1].elements != 1:
        raise ValueError(f"while: the predicate is {test.specs[-1]!r}, must have one element")

    def loop(*arrays: Array) -> tuple[Array, ...]:
        now, others = arrays[:count], arrays[count:]
        while True:
            *results, predicate = _run(test, [*now, *others[:split]])
            if not predicate.reshape(()):
                return tuple(results)
            now = _run(step, [*results, *others[split:]])

    return G.call(loop, list(test.specs[:-1]), *operands)


class MPSGraph(Running):
    """A graph of operations on tensors, with gradients.

    Operations are methods with Swift's labels: ``graph.addition(a, b, name=None)``,
    ``graph.softMax(with_=x, axis=-1, name=None)``. A label that is a Python keyword ends in an underscore.
    """

    def controlDependency(
        self, *, with_: Sequence[MPSGraphOperation], dependentBlock: Block, name: str | None = None
    ) -> list[MPSGraphTensor]:
        """What a block makes runs after these operations, and sees the variables that they assign."""
        where = "MPSGraph.controlDependency"
        self._outermost(where)
        calls: list[Call] = []
        for operation in with_:
            if not isinstance(operation, MPSGraphOperation) or operation._graph is not self:
                raise TypeError(f"{where}: with_ has {operation!r}, must be operations of this graph")
            calls += [*operation._call.after, operation._call]
        recording = self._recording
        outer = recording.dependencies
        recording.dependencies = tuple(dict.fromkeys([*outer, *calls]))
        try:
            found = _as_list(where, dependentBlock())
            symbols = [self._symbol(where, "dependentBlock's result", t) for t in found]
            return [self._call(G.identity, [s], {}, "controlDependency", name=name)[0] for s in symbols]
        finally:
            recording.dependencies = outer

    def if_(
        self, predicate: MPSGraphTensor, /, *, then: Block, else_: Block | None, name: str | None = None
    ) -> list[MPSGraphTensor]:
        """The tensors of one of two blocks. Both are computed; the gradient goes to the one that is chosen."""
        where = "MPSGraph.if_"
        chosen = self._symbol(where, "predicate", predicate)
        outer, self._branch = self._branch, "if"
        try:
            first = _as_list(where, then())
            second = [] if else_ is None else _as_list(where, else_())
        finally:
            self._branch = outer
        if len(first) != len(second):
            raise ValueError(f"{where}: then returns {len(first)} tensors, else {len(second)}")
        found = []
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            operands = [chosen, self._symbol(where, f"then's result {i}", a), self._symbol(where, f"else's {i}", b)]
            found += self._call(_choice, operands, {}, "if", name=name)
        return found

    def for_(
        self,
        *,
        initialBodyArguments: Sequence[MPSGraphTensor],
        body: Callable[[MPSGraphTensor, list[MPSGraphTensor]], Any],
        numberOfIterations: MPSGraphTensor | None = None,
        lowerBound: MPSGraphTensor | None = None,
        upperBound: MPSGraphTensor | None = None,
        step: MPSGraphTensor | None = None,
        name: str | None = None,
    ) -> list[MPSGraphTensor]:
        """``body(index, arguments)`` from iteration to iteration: `numberOfIterations` of them, or from `lowerBound`
        to below `upperBound` by `step`. With constant bounds it is unrolled, and has gradients."""
        where = "MPSGraph.for_"
        bounds = [lowerBound, upperBound, step]
        if numberOfIterations is not None:
            if any(b is not None for b in bounds):
                raise TypeError(f"{where}: needs numberOfIterations, or lowerBound, upperBound and step")
            kind = self._symbol(where, "numberOfIterations", numberOfIterations).dtype
            small = self._recording.constant(np.asarray(0, kind)), self._recording.constant(np.asarray(1, kind))
            bounds = [self._tensor(small[0]), numberOfIterations, self._tensor(small[1])]
        symbols = [self._symbol(where, n, b) for n, b in zip(("lowerBound", "upperBound", "step"), bounds, strict=True)]
        for symbol in symbols:
            if symbol.dtype is None or symbol.dtype.kind != "i" or symbol.dtype != symbols[0].dtype:
                raise TypeError(f"{where}: bounds are integers of one type, not {symbol!r}")
        now = [self._symbol(where, f"initialBodyArguments[{i}]", t) for i, t in enumerate(initialBodyArguments)]
        if all(s.call.kind == "constant" and s.call.value.size == 1 for s in symbols):
            low, high, by = (int(s.call.value.reshape(())) for s in symbols)
            if by == 0:
                raise ValueError(f"{where}: step is 0")
            if len(range(low, high, by)) <= _MOST_UNROLLED:
                return self._unrolled(range(low, high, by), symbols[0].dtype, now, body)
        if not now:
            return []
        made = self._body("for", [(), *(s.shape for s in now)], [symbols[0].dtype, *(s.dtype for s in now)],
                          lambda index, *arguments: body(index, list(arguments)), len(now))  # fmt: skip
        operands = [*symbols, *now, *made.outside]
        return self._call(_counted, operands, {"body": made, "count": len(now)}, "for", len(now), name)

    def _unrolled(self, indices: range, dtype: Any, now: list[Symbol], body: Block) -> list[MPSGraphTensor]:
        tensors = [self._tensor(s) for s in now]
        for i in indices:
            index = self._tensor(self._recording.constant(np.asarray(i, dtype)))
            found = _as_list("MPSGraph.for_", body(index, list(tensors)))
            if len(found) != len(tensors):
                raise ValueError(f"MPSGraph.for_: the body returned {len(found)} tensors, expected {len(tensors)}")
            tensors = found
        return tensors

    def while_(
        self,
        *,
        initialInputs: Sequence[MPSGraphTensor],
        before: Callable[[list[MPSGraphTensor], list[MPSGraphTensor]], MPSGraphTensor],
        after: Callable[[list[MPSGraphTensor]], Any],
        name: str | None = None,
    ) -> list[MPSGraphTensor]:
        """A loop: ``before(inputs, results)`` appends to `results` and returns a predicate; while that is true,
        ``after(results)`` returns the next inputs. The last `results` are the loop's. There is no gradient."""
        where = "MPSGraph.while_"
        now = [self._symbol(where, f"initialInputs[{i}]", t) for i, t in enumerate(initialInputs)]
        shapes, dtypes = [s.shape for s in now], [s.dtype for s in now]

        def test(*inputs: MPSGraphTensor) -> list[Any]:
            results: list[MPSGraphTensor] = []
            predicate = before(list(inputs), results)
            return [*results, predicate]

        first = self._body("while", shapes, dtypes, test, None)
        carried = first.results[:-1]
        if not carried:
            raise ValueError(f"{where}: before left resultTensors empty; the loop would have no results")
        second = self._body("while", [s.shape for s in carried], [s.dtype for s in carried],
                            lambda *inputs: after(list(inputs)), len(now))  # fmt: skip
        operands = [*now, *first.outside, *second.outside]
        options = {"before": first, "after": second, "count": len(now)}
        return self._call(_conditional, operands, options, "while", len(carried), name)

    def _body(self, what: str, shapes: Any, dtypes: Any, block: Block, count: int | None) -> _Body:
        """Build a block in a recording of its own."""
        scope = Scope(Recording(), what)
        for dtype in dtypes:
            if dtype is None:
                raise ValueError(f"{what}: the data type of an argument is not known")
        arguments = [
            scope.recording.placeholder(s, d, f"argument {i}")
            for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        self._scopes.append(scope)
        try:
            found = _as_list(what, block(*(self._tensor(a) for a in arguments)))
            if count is not None and len(found) != count:
                raise ValueError(f"{what}: the body returned {len(found)} tensors, expected {count}")
            results = [self._symbol(what, f"the body's result {i}", t) for i, t in enumerate(found)]
        finally:
            self._scopes.pop()
        return _Body(scope, arguments, results)


def _choice(predicate: G.Tensor, a: G.Tensor, b: G.Tensor) -> G.Tensor:
    if predicate.size != 1:
        raise ValueError(f"the predicate has shape {predicate.shape}, must have one element")
    if a.spec != b.spec:
        raise ValueError(f"the branches return {a.spec!r} and {b.spec!r}")
    return F.select(F.scalar(predicate), a, b)
