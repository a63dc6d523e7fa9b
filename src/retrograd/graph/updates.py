"""Steps of optimizers as functions of tensors: the hyperparameters are tensors too, and nothing is assigned.

Steps whose results are assigned to the variables that they were computed from become one call of the engine that
updates all of those in place; see `stored` and `merged`. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..ops._types import Array
from ..ops.optimizer import ADAM, SGD_KIND, gradient_terms, norm_terms, optimizer_rule
from .elementwise import add, divide, identity, maximum, multiply, run_map, sqrt, square, subtract
from .fold import copied_node
from .gradient import gradients, stop_gradient
from .operation import Operation, Spec
from .reduction import refuse
from .shaping import reshape, zeros
from .tensor import Graph, Node, Operand, Tensor, Variable, apply

# The inputs of a step: four hyperparameters, of which SGD has the first, then what `_LISTS` names, largest last.
_HYPERPARAMETERS: Final = 4
_LISTS: Final = ("values", "gradient", "momentum", "velocity", "maximum")
_GRADIENT: Final = 1  # the list that is only read
_KINDS: Final = {"sgd": SGD_KIND, "adam": ADAM}


def _shapes(*specs: Spec | None, kind: str) -> Sequence[Spec]:
    settings, lists = specs[:_HYPERPARAMETERS], specs[_HYPERPARAMETERS:]
    values = lists[0]
    assert values is not None
    if values.dtype.kind != "f":
        raise TypeError(f"values have dtype {values.dtype}, must be float32 or float64")
    for name, spec in zip(_LISTS, lists, strict=True):
        if spec is not None and spec != values:
            raise (ValueError if spec.dtype == values.dtype else TypeError)(
                f"{name} is {spec!r}, but the values are {values!r}"
            )
    for name, spec in zip(("learning rate", "beta1", "beta2", "epsilon"), settings, strict=True):
        if spec is not None and spec.elements != 1:
            raise ValueError(f"the {name} has shape {spec.shape}, must have one element")
        if spec is not None and spec.dtype != values.dtype:
            raise TypeError(f"the {name} has dtype {spec.dtype}, but the values have {values.dtype}")
    return [values for name, spec in zip(_LISTS, lists, strict=True) if spec is not None and name != "gradient"]


def _step(settings: Sequence[Array | None], lists: Sequence[Sequence[Array]], kind: str) -> None:
    """Update arrays in place."""
    neutral = gradient_terms(1.0, None, 0.0, 0.0), norm_terms(None, None, None, None, False)
    rule = optimizer_rule(_KINDS[kind], *neutral, False, 0.0, 0.0, 0.0, 0.0, 0.0)
    values, gradients, momentum, velocity, largest = (list(one) for one in lists)
    rate, beta1, beta2, eps = settings
    refuse(rule.given_step(values, gradients, momentum, velocity, largest, rate, beta1, beta2, eps, False, 0))


def _compute(inputs: Sequence[Array | None], results: Sequence[Array], *, kind: str) -> None:
    settings, lists = inputs[:_HYPERPARAMETERS], inputs[_HYPERPARAMETERS:]
    written = [a for i, a in enumerate(lists) if a is not None and i != _GRADIENT]
    for old, new in zip(written, results, strict=True):
        if old.__array_interface__["data"] != new.__array_interface__["data"]:
            run_map([], [old], [], [new], [0])
    rest = iter(results)
    parts = [[] if a is None else [a if i == _GRADIENT else next(rest)] for i, a in enumerate(lists)]
    _step(settings, parts, kind)


def _gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    """Through the same step made of elementwise operations."""
    apart = [None if t is None else stop_gradient(t) for t in node.inputs]
    found = _composed(node.attributes["kind"], *apart)
    seeds = [zeros(r.shape, r.dtype) if g is None else g for r, g in zip(found, given, strict=True)]
    places = [i for i, wanted in enumerate(needed) if wanted]
    wrt = [t for i, t in enumerate(apart) if t is not None and i in places]
    answer: list[Tensor | None] = [None] * len(apart)
    for i, gradient in zip(places, gradients(found, wrt, seed=seeds), strict=True):
        answer[i] = gradient
    return answer


def _composed(
    kind: str, rate: Any, beta1: Any, beta2: Any, eps: Any, values: Any, gradient: Any, m: Any, v: Any, largest: Any
) -> list[Tensor]:
    rate, beta1, beta2, eps = (None if t is None else reshape(t, ()) for t in (rate, beta1, beta2, eps))
    if kind == "sgd":
        return [subtract(values, multiply(rate, gradient))]
    m = add(multiply(beta1, m), multiply(subtract(1.0, beta1), gradient))
    v = add(multiply(beta2, v), multiply(subtract(1.0, beta2), square(gradient)))
    top = v if largest is None else maximum(largest, v)
    found = [subtract(values, multiply(rate, divide(m, add(sqrt(top), eps)))), m, v]
    return found if largest is None else [*found, top]


_PAIRS: Final = ((0, 4), (1, 6), (2, 7), (3, 8))  # results and the inputs that they replace
_STEP: Final = Operation(
    "optimizer_step", _shapes, compute=_compute, gradient=_gradient, in_place=_PAIRS,
    flops=lambda inputs, results, **_: 4.0 * sum(spec.elements for spec in results),
)  # fmt: skip


def sgd_update(values: Operand, gradient: Operand, learning_rate: Operand) -> Tensor:
    """``values - learning_rate * gradient``, for a learning rate of one element."""
    old = identity(values)
    inputs = (learning_rate, None, None, None, old, gradient, None, None, None)
    found: Tensor = apply(_STEP, inputs, {"kind": "sgd"}, dtype=old.dtype)[0]
    return found


def adam_update(
    values: Operand,
    gradient: Operand,
    momentum: Operand,
    velocity: Operand,
    maximum: Operand | None = None,
    *,
    learning_rate: Operand,
    beta1: Operand,
    beta2: Operand,
    eps: Operand,
) -> tuple[Tensor, ...]:
    """New values, momentum and velocity, and the new maximum of the velocity if one is given (AMSGrad).

    ``m = beta1 * m + (1 - beta1) * g``, ``v = beta2 * v + (1 - beta2) * g**2``, ``values -= learning_rate * m /
    (sqrt(v) + eps)``, without bias corrections: those are the caller's, in the learning rate. The hyperparameters have
    one element each.
    """
    old = identity(values)
    inputs = (learning_rate, beta1, beta2, eps, old, gradient, momentum, velocity, maximum)
    return apply(_STEP, inputs, {"kind": "adam"}, dtype=old.dtype)


# ---- in place --------------------------------------------------------------------------------------------------------


def _stored_shapes(*specs: Spec, **_: object) -> Sequence[Spec]:
    raise AssertionError("made by plans alone")


def _update(
    inputs: Sequence[Array | None], results: Sequence[Array], *, kind: str, lists: tuple[int, ...], in_place: object
) -> None:
    rest = iter(inputs[_HYPERPARAMETERS:])
    _step(
        inputs[:_HYPERPARAMETERS], [[a for a in (next(rest) for _ in range(n)) if a is not None] for n in lists], kind
    )


_STORED: Final = Operation(
    "optimizer_steps", _stored_shapes, compute=_update, updates=True, why_not="it is made when a program is planned",
    flops=lambda inputs, results, **_: 4.0 * sum(spec.elements for spec in results),
)  # fmt: skip


def stored(nodes: Sequence[Node], graph: Graph) -> list[Node]:
    """The nodes, with steps that only give variables their next values as updates of those variables."""
    used = {id(t) for node in nodes for t in node.inputs}
    targets: dict[int, list[Variable]] = {}
    for variable, tensor in graph.assigned.items():
        targets.setdefault(id(tensor), []).append(variable)
    read = {id(tensor): variable for variable, tensor in graph.read.items()}
    taken: set[Variable] = set()

    def next_values(node: Node) -> bool:
        if node.operation is not _STEP:
            return False
        places = [i for _, i in _PAIRS if node.inputs[i] is not None]
        variables = [read.get(id(node.inputs[i])) for i in places]
        if len(set(variables)) != len(places) or any(variable is None or variable in taken for variable in variables):
            return False
        if any(id(r) in used or targets.get(id(r)) != [v] for r, v in zip(node.results, variables, strict=True)):
            return False
        taken.update(v for v in variables if v is not None)
        return True

    return [_in_place(node) if next_values(node) else node for node in nodes]


def _in_place(node: Node) -> Node:
    lists = tuple(int(t is not None) for t in node.inputs[_HYPERPARAMETERS:])
    inputs = [*node.inputs[:_HYPERPARAMETERS], *(t for t in node.inputs[_HYPERPARAMETERS:] if t is not None)]
    attributes = {"kind": node.attributes["kind"], "lists": lists, "in_place": _pairs(lists)}
    return copied_node(node, inputs, attributes, node.results, _STORED)


def _pairs(lists: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The results of lists of these lengths, and the inputs that they replace."""
    ends = np.cumsum([_HYPERPARAMETERS, *lists]).tolist()
    replaced = [i for k, n in enumerate(lists) if k != _GRADIENT for i in range(ends[k], ends[k] + n)]
    return tuple(enumerate(replaced))


def merged(steps: Sequence[Any]) -> list[Any]:
    """The steps of a plan, with updates that have the same hyperparameters joined into one, at the place of the last.

    Nothing else reads what they write, so they may be moved there.
    """
    groups: dict[tuple[object, ...], list[Any]] = {}
    for step in steps:
        if step.operation is _STORED:
            attributes, first = step.attributes, step.inputs[_HYPERPARAMETERS]
            key = (attributes["kind"], attributes["lists"], first.dtype, *map(id, step.inputs[:_HYPERPARAMETERS]))
            groups.setdefault(key, []).append(step)
    joined = {id(group[-1]): group for group in groups.values() if len(group) > 1}
    dropped = {id(step) for group in joined.values() for step in group[:-1]}
    for step in steps:
        if id(step) in joined:
            _join(step, joined[id(step)])
    return [step for step in steps if id(step) not in dropped]


def _join(last: Any, group: Sequence[Any]) -> None:
    """Make the last of several updates do all of them."""
    lists = tuple(n * len(group) for n in last.attributes["lists"])
    columns = zip(*(step.inputs[_HYPERPARAMETERS:] for step in group), strict=True)
    results = zip(*(step.results for step in group), strict=True)
    last.inputs = [*last.inputs[:_HYPERPARAMETERS], *(t for column in columns for t in column)]
    last.results = [t for column in results for t in column]
    last.attributes = {**last.attributes, "lists": lists, "in_place": _pairs(lists)}
    last.lines = [line for step in group for line in step.lines]
