"""Gradients: nodes that compute them are added to the graph, from the result back to what it depends on.

Several contributions to one gradient are added in the order in which the walk reaches them, from the last node that
uses the tensor to the first, so the bits are always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ..ops._types import Array
from .elementwise import COPY, add
from .operation import Operation, Spec
from .shaping import broadcast_to
from .tensor import (
    _TRACE,
    Graph,
    Node,
    Operand,
    Tensor,
    Variable,
    apply_one,
    as_tensor,
    current_graph,
    fail,
    in_trace,
)

_STOP: Final = Operation(
    "stop_gradient", lambda x: (x,), view=lambda array: array, contiguous=(), why_not="the gradient is stopped here"
)


def stop_gradient(x: Operand) -> Tensor:
    """x itself, as a constant to `gradients`."""
    return apply_one(_STOP, (x,))


def gradients(
    of: Operand | Sequence[Operand], wrt: Sequence[Operand], *, seed: Operand | Sequence[Operand | None] | None = None
) -> list[Tensor]:
    """The gradients of a tensor without axes with respect to tensors or variables.

    With `seed`, of the shape of `of`, which may then have axes, the gradients of ``sum(seed * of)``. `of` may be a
    sequence of tensors, and `seed` one of as many seeds, for the gradients of the sum of all; a seed of None stands for
    1 if its tensor has no axes. A tensor on which none of `of` depends is refused, as are integers: a gradient of zeros
    would hide a mistake.
    """
    graph = current_graph()
    if graph is None:
        raise RuntimeError("gradients: there is no trace; call it inside a function that graph.compile traces")
    results, seeds = _pairs(of, seed)
    targets = [as_tensor(t) if isinstance(t, Tensor) else _start_value(graph, t) for t in wrt]
    for tensor, what in [*((t, "of") for t in results), *((t, "wrt") for t in targets)]:
        if tensor.dtype.kind != "f":
            raise fail("gradients", f"{what} has a tensor of dtype {tensor.dtype}, which has no derivative", TypeError)
    starts: dict[int, Tensor] = {}
    for result, given in zip(results, seeds, strict=True):
        start = _start(graph, result, given)
        before = starts.get(id(result))
        starts[id(result)] = start if before is None else add(before, start)
    last = max(result.node.number for result in results)
    found = _walk(graph, last, starts, targets)
    missing = [i for i, t in enumerate(targets) if found.get(id(t)) is None]
    if missing:
        names = ", ".join(f"wrt[{i}] ({_described(wrt[i])})" for i in missing)
        raise fail("gradients", f"the tensor does not depend on {names}, or only through what has no derivative")
    return [broadcast_to(found[id(t)], t.shape) for t in targets]


def _pairs(of: Any, seed: Any) -> tuple[list[Tensor], Sequence[Operand | None]]:
    """The results and a seed for each."""
    if not isinstance(of, (list, tuple)):
        return [as_tensor(of)], [seed]
    if seed is not None and not isinstance(seed, (list, tuple)):
        raise fail("gradients", f"of has {len(of)} tensors, so seed must be a sequence of as many", TypeError)
    seeds = [None] * len(of) if seed is None else seed
    if not of or len(seeds) != len(of):
        raise fail("gradients", f"of has {len(of)} tensors, and seed {len(seeds)}; both need the same number, above 0")
    return [as_tensor(t) for t in of], seeds


def _start(graph: Graph, result: Tensor, seed: Operand | None) -> Tensor:
    """The gradient of a result, which the walk starts from."""
    if seed is not None:
        start = as_tensor(seed, result.dtype)
        if start.spec != result.spec:
            raise fail("gradients", f"seed is {start.spec!r}, but the tensor is {result.spec!r}")
        return start
    if result.shape:
        raise fail("gradients", f"of has shape {result.shape}; take its sum or mean first, or give a seed")
    return graph.constant(np.ones((), result.dtype))


def _start_value(graph: Graph, value: Operand) -> Tensor:
    if not isinstance(value, Variable):
        raise fail("gradients", f"wrt has {type(value).__name__}, must be tensors and variables", TypeError)
    graph.variable(value)
    return graph.read[value]


def _described(value: Operand) -> str:
    return repr(value) if isinstance(value, (Tensor, Variable)) else type(value).__name__


def _walk(graph: Graph, last: int, starts: dict[int, Tensor], targets: Sequence[Tensor]) -> dict[int, Tensor]:
    """The gradients of all tensors between the targets and the results, of which `last` is the last node; by id."""
    nodes = graph.nodes[: last + 1]
    depends = {id(t) for t in targets}  # on the targets
    for node in nodes:
        if node.operation is not _STOP and any(t is not None and id(t) in depends for t in node.inputs):
            depends.update(id(r) for r in node.results if r.dtype.kind == "f")
    found = dict(starts)
    again = _Recomputed(graph)
    for node in reversed(nodes):
        given = [found.get(id(r)) for r in node.results]
        if all(g is None for g in given):
            continue
        needed = [t is not None and id(t) in depends for t in node.inputs]
        if not any(needed):
            continue
        rule = node.operation.gradient
        if rule is None:
            reason = node.operation.why_not or "it has no gradient of its own here"
            file, line = node.line
            raise TypeError(f"gradients: {node.operation.name} ({file}:{line}) has no derivative: {reason}")
        for tensor, gradient in zip(node.inputs, rule(again.of(node), given, needed), strict=True):
            if tensor is None or gradient is None or id(tensor) not in depends:
                continue
            before = found.get(id(tensor))
            found[id(tensor)] = gradient if before is None else add(before, gradient)
    return found


# ---- recomputation ---------------------------------------------------------------------------------------------------


class _Region:
    """A part of the model whose intermediate tensors are computed again in the backward pass."""


class _Recomputed:
    """Copies of the nodes of regions, made when the walk first needs them."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._copies: dict[int, Node] = {}

    def of(self, node: Node) -> Node:
        if node.region is None:
            return node
        if node.number not in self._copies:
            inputs = tuple(self._input(t, node.region) for t in node.inputs)
            region, _TRACE.region = _TRACE.region, None
            try:
                # Not Graph.node, which would find the first one.
                specs = [r.spec for r in node.results]
                self._copies[node.number] = Node(self._graph, node.operation, inputs, node.attributes, specs)
            finally:
                _TRACE.region = region
        return self._copies[node.number]

    def _input(self, tensor: Tensor | None, region: object) -> Tensor | None:
        if tensor is None or tensor.node.region is not region:
            return tensor
        return self.of(tensor.node).results[tensor.index]


def recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose intermediate tensors are not kept for the backward pass, but computed again: same bits.

    ``y = graph.recompute(block)(x)`` takes the time of a second forward pass of the block and saves its memory.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        if current_graph() is None:
            return function(*arguments, **options)
        before, _TRACE.region = _TRACE.region, _Region()
        try:
            return function(*arguments, **options)
        finally:
            _TRACE.region = before

    return call


# ---- custom gradients ------------------------------------------------------------------------------------------------


def _copy_first(inputs: Sequence[Array], results: Sequence[Array]) -> None:
    assert COPY.compute is not None
    COPY.compute(inputs[:1], results)


def custom_gradient(
    function: Callable[..., Tensor], gradient: Callable[..., Sequence[Operand | None]]
) -> Callable[..., Tensor]:
    """`function`, a function of tensors that returns one, with another gradient.

    ``gradient(g, y, *inputs)`` returns the gradients of the inputs for the gradient g of the result y; None is zero.
    """

    def rule(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
        (g,), (y, *inputs) = given, node.inputs
        assert g is not None
        returned = list(gradient(g, y, *inputs))
        if len(returned) != len(inputs):
            raise fail("custom_gradient", f"gradient returned {len(returned)} gradients for {len(inputs)} inputs")
        found = [None if one is None else as_tensor(one, g.dtype) for one in returned]
        for i, (one, tensor) in enumerate(zip(found, inputs, strict=True)):
            assert tensor is not None
            if one is not None and one.spec != tensor.spec:
                raise fail("custom_gradient", f"gradient {i} is {one.spec!r}, but that input is {tensor.spec!r}")
        return [None, *found]

    def shapes(y: Spec, *inputs: Spec) -> Sequence[Spec]:
        return (y,)

    operation = Operation.__new__(Operation)  # not in the list of operations: it belongs to this function
    for field, value in {
        "name": getattr(function, "__name__", "custom"), "shapes": shapes, "compute": _copy_first, "view": None,
        "gradient": rule, "why_not": "", "contiguous": (), "optional": (), "in_place": ((0, 0),), "updates": False,
        "flops": None,
        "map_code": None,
    }.items():  # fmt: skip
        setattr(operation, field, value)

    def call(*inputs: Operand) -> Tensor:
        if not in_trace(inputs):
            return function(*inputs)
        tensors = [as_tensor(t) for t in inputs]
        y = function(*(stop_gradient(t) for t in tensors))
        graph = current_graph()
        assert graph is not None
        return Node(graph, operation, (y, *tensors), {}, (y.spec,)).results[0]

    return call
