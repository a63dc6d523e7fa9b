"""Optimizers in a graph: their states are variables, and one record updates all parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from ..ops._errors import ArgumentValueError, of_function
from ..ops._types import Array
from ..ops.optimizer import (
    ADAM,
    RMSPROP,
    SGD_KIND,
    fraction,
    gradient_terms,
    non_negative,
    norm_terms,
    optimizer_rule,
    velocity_factors,
)
from .elementwise import CODES, cast, identity, maximum, run_map
from .gradient import gradients as gradients_of
from .indexing import counter, next_count
from .operation import Operation, Spec
from .reduction import INT64, refuse
from .shaping import zeros
from .tensor import Graph, Operand, Tensor, Variable, apply, as_tensor, current_graph, fail

# A number, a variable that the caller sets, or a function of the step, a float64 tensor that counts from 0.
Rate: TypeAlias = float | Variable | Callable[[Tensor], Tensor]
_F64: Final = np.dtype(np.float64)


def _update_shapes(rate: Spec, step: Spec, *arrays: Spec, lists: int, **_: Any) -> Sequence[Spec]:
    count = len(arrays) // lists
    for i in range(count):
        if arrays[count + i] != arrays[i]:
            raise ValueError(f"gradient {i} is {arrays[count + i]!r}, but its parameter is {arrays[i]!r}")
    if rate != Spec((), _F64) or step != Spec((), INT64):
        raise TypeError(f"the learning rate is {rate!r} and the step {step!r}, expected float64[] and int64[]")
    return [*arrays[:count], *arrays[2 * count :]]


def _update(
    inputs: Sequence[Array],
    results: Sequence[Array],
    *,
    lists: int,
    in_place: object,
    settings: tuple[Any, ...],
    places: tuple[int, ...],
) -> None:
    rate, step, *arrays = inputs
    count = len(arrays) // lists
    parts = [arrays[i * count : (i + 1) * count] for i in range(lists)]
    states: list[list[Array]] = [[], [], []]
    for place, part in zip(places, parts[2:], strict=True):
        states[place] = part
    rule, decay, epsilon_hat, factors = settings
    first, second, third = states
    refuse(
        optimizer_rule(*rule).scheduled_step(
            parts[0], parts[1], first, second, third, rate, step, decay, epsilon_hat, factors, False, 0
        )
    )


_UPDATE: Final = Operation(
    "update", _update_shapes, compute=_update, updates=True, why_not="a parameter's update has no derivative",
    flops=lambda inputs, results, **_: 8.0 * sum(spec.elements for spec in results if spec is not None),
)  # fmt: skip


def _sum_shapes(*arrays: Spec, in_place: object) -> Sequence[Spec]:
    return arrays[: len(arrays) // 2]


def _add_to_sums(inputs: Sequence[Array], results: Sequence[Array], *, in_place: object) -> None:
    count = len(inputs) // 2
    for total, gradient in zip(inputs[:count], inputs[count:], strict=True):
        run_map([(CODES["add"][0], 0, 1, 0)], [total, gradient], [], [total], [2])


# Sums of gradients, then the gradients that are added to them.
_ACCUMULATE: Final = Operation(
    "accumulate", _sum_shapes, compute=_add_to_sums, contiguous=(), updates=True, why_not="sums of gradients have none",
    flops=lambda inputs, results, **_: float(sum(spec.elements for spec in results)),
)  # fmt: skip


class Optimizer:
    """Updates parameters from gradients. Its states and its step count are variables, made when they are needed.

    `learning_rate` is a number, a variable that the caller sets between runs, or a schedule: a function of the step,
    which counts from 0. `maximum_norm` scales all gradients together so that their norm is at most that.
    """

    def __init__(
        self,
        learning_rate: Rate,
        settings: Callable[[], tuple[Any, ...]],
        states: Sequence[tuple[str, int]],
    ) -> None:
        if isinstance(learning_rate, (int, float)) and not 0 <= learning_rate < math.inf:
            raise ValueError(f"learning_rate is {learning_rate}, must be a finite number of at least 0")
        self.learning_rate = learning_rate
        self.count = counter(name="step")
        self.states: dict[Variable, list[Variable]] = {}
        self.sums: dict[Variable, Variable] = {}  # of the gradients of each parameter, from `accumulate` to `apply`
        self.parts = counter(name="parts")  # of those sums
        self._settings = settings()
        self._states = tuple(states)

    def minimize(self, loss: Operand, parameters: Sequence[Variable]) -> list[Tensor]:
        """Update the parameters by the gradients of a loss, which are returned."""
        found = gradients_of(loss, parameters)
        self.update(parameters, found)
        return found

    def accumulate(self, loss: Operand, parameters: Sequence[Variable]) -> list[Tensor]:
        """Add the gradients of a loss, which are returned, to sums that :meth:`apply` uses: for batches in parts.

        It belongs to one program, which runs once for each part, and `apply` to another, ``graph.compile(adam.apply)``.
        """
        found = gradients_of(loss, parameters)
        self.collect(parameters, found)
        return found

    def collect(self, parameters: Sequence[Variable], gradients: Sequence[Operand]) -> None:
        """Add gradients to the sums that :meth:`apply` uses."""
        graph = _traced("collect")
        self.prepare(parameters)
        for parameter in parameters:
            if parameter not in self.sums:
                self.sums[parameter] = Variable(
                    np.zeros(parameter.shape, parameter.dtype), name=f"{parameter.name}.sum"
                )
        sums = [self.sums[parameter] for parameter in parameters]
        if any(total in graph.assigned for total in sums):
            raise fail("accumulate", "a parameter has gradients accumulated twice in one run; add the losses")
        pairs = tuple((i, i) for i in range(len(sums)))
        graph.assigned.update(zip(sums, apply(_ACCUMULATE, (*sums, *gradients), {"in_place": pairs}), strict=True))
        if self.parts not in graph.assigned:
            next_count(self.parts)

    def prepare(self, parameters: Sequence[Variable]) -> None:
        """Make the states of parameters that have none yet."""
        for parameter in parameters:
            if not isinstance(parameter, Variable):
                kind = type(parameter).__name__
                raise fail("update", f"a parameter is a {kind}, must be a Variable", TypeError)
            if parameter not in self.states:
                self.states[parameter] = [
                    Variable(np.zeros(parameter.shape, parameter.dtype), name=f"{parameter.name}.{name}")
                    for name in self.state_names
                ]

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the states that each parameter has, such as "velocities"."""
        return tuple(name for name, _ in self._states)

    @property
    def decays(self) -> bool:
        """Whether elements can change whose gradient is 0 and always was."""
        (_, (_, low, high, l2, l1), *_), decay, *_ = self._settings
        return bool(l2 or l1 or decay) or not low <= 0 <= high

    def apply(self, *, average: bool = True) -> None:
        """Update the parameters by the mean of the gradients since the last time, or by their sum, and start again."""
        if not self.sums:
            raise RuntimeError("apply: there are no gradients; first compile the function that calls accumulate")
        found = self.take_sums(average=average)
        self.update(list(found), list(found.values()))

    def take_sums(self, *, average: bool = True) -> dict[Variable, Tensor]:
        """The means of the accumulated gradients, or their sums, by parameter; they start again from 0."""
        parts = maximum(identity(self.parts), 1)
        found = {
            parameter: total / cast(parts, total.dtype) if average else identity(total)
            for parameter, total in self.sums.items()
        }
        for variable in (self.parts, *self.sums.values()):
            variable.assign(zeros(variable.shape, variable.dtype))
        return found

    def update(self, parameters: Sequence[Variable], gradients: Sequence[Operand]) -> None:
        """Update the parameters by these gradients, once in every run."""
        graph = _traced("update")
        if len(parameters) != len(gradients) or not parameters:
            raise fail("update", f"there are {len(parameters)} parameters and {len(gradients)} gradients")
        self.prepare(parameters)
        if len(set(map(id, parameters))) != len(parameters):
            raise fail("update", "a parameter is in the list twice; add its gradients")
        step = graph.assigned.get(self.count)  # once in a run, also for several lists of parameters
        if step is None:
            step = next_count(self.count)
        columns = list(zip(*(self.states[p] for p in parameters), strict=True))
        lists: list[Sequence[Operand]] = [parameters, gradients, *columns]
        count = len(parameters)
        updated = [*range(count), *range(2 * count, len(lists) * count)]
        pairs = tuple((result, 2 + position) for result, position in enumerate(updated))
        attributes = {
            "lists": len(lists), "in_place": pairs, "settings": self._settings,
            "places": tuple(place for _, place in self._states),
        }  # fmt: skip
        rate = self._rate(step)
        results = apply(_UPDATE, (rate, step, *(one for part in lists for one in part)), attributes)
        variables = [*parameters, *(v for column in columns for v in column)]
        for variable, value in zip(variables, results, strict=True):
            if variable in graph.assigned:
                raise fail("update", f"{variable!r} is updated twice in one run")
            graph.assigned[variable] = value

    def _rate(self, step: Tensor) -> Tensor:
        given = self.learning_rate
        if isinstance(given, Variable):
            return cast(given, _F64)
        if callable(given):
            return cast(as_tensor(given(cast(step, _F64) - 1.0), _F64), _F64)
        graph = current_graph()
        assert graph is not None
        return graph.constant(np.asarray(given, _F64))


def _traced(method: str) -> Graph:
    graph = current_graph()
    if graph is None:
        raise RuntimeError(f"{method}: there is no trace; call it inside a function that graph.compile traces")
    return graph


def _terms(
    scale: float, clip: tuple[float, float] | None, weight_decay: float, l1: float, maximum_norm: float | None,
    maximum_norm_each: float | None,
) -> tuple[Any, Any]:  # fmt: skip
    return (
        gradient_terms(scale, clip, weight_decay, l1),
        norm_terms(clip, maximum_norm, maximum_norm_each, None, False),
    )


class SGD(Optimizer):
    """Gradient descent, with momentum if that is not 0; :func:`retrograd.sgd_step` has the formulas."""

    def __init__(
        self,
        learning_rate: Rate,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        velocity_of: str = "gradient",
        weight_decay: float = 0.0,
        l1: float = 0.0,
        gradient_scale: float = 1.0,
        clip: tuple[float, float] | None = None,
        maximum_norm: float | None = None,
        maximum_norm_each: float | None = None,
    ) -> None:
        if nesterov and not momentum:
            raise of_function("SGD", ArgumentValueError("nesterov", "{nesterov} is set, but {momentum} is 0"))

        def settings() -> tuple[Any, ...]:
            gradient, norm = _terms(gradient_scale, clip, weight_decay, l1, maximum_norm, maximum_norm_each)
            speed = non_negative("momentum", momentum)
            rule = (SGD_KIND, gradient, norm, bool(nesterov), 0.0, 0.0, 0.0, 0.0, speed)
            factors = velocity_factors(velocity_of) if momentum else (1.0, 0.0, 0.0, -1.0)
            return rule, 0.0, False, factors

        super().__init__(learning_rate, settings, [("velocities", 0)] if momentum else [])


class Adam(Optimizer):
    """Adam; with ``decoupled=True`` AdamW, with ``amsgrad=True`` AMSGrad.

    :func:`retrograd.adam_step` has the formulas.
    """

    def __init__(
        self,
        learning_rate: Rate = 1e-3,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        epsilon_hat: bool = False,
        amsgrad: bool = False,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        l1: float = 0.0,
        gradient_scale: float = 1.0,
        clip: tuple[float, float] | None = None,
        maximum_norm: float | None = None,
        maximum_norm_each: float | None = None,
    ) -> None:
        def settings() -> tuple[Any, ...]:
            decay = non_negative("weight_decay", weight_decay)
            l2, decay = (0.0, decay) if decoupled else (decay, 0.0)
            gradient, norm = _terms(gradient_scale, clip, l2, l1, maximum_norm, maximum_norm_each)
            betas = fraction("beta1", beta1), fraction("beta2", beta2)
            rule = (ADAM, gradient, norm, False, *betas, non_negative("eps", eps), 0.0, 0.0)
            return rule, decay, bool(epsilon_hat), (0.0, 0.0, 0.0, 0.0)

        states = [("first_moments", 0), ("second_moments", 1), *([("largest_second_moments", 2)] if amsgrad else [])]
        super().__init__(learning_rate, settings, states)


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    def __init__(self, learning_rate: Rate = 1e-3, *, weight_decay: float = 0.01, **options: Any) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, decoupled=True, **options)


class RMSProp(Optimizer):
    """RMSProp, centered or not, with momentum or not; :func:`retrograd.rmsprop_step` has the formulas."""

    def __init__(
        self,
        learning_rate: Rate = 1e-2,
        *,
        alpha: float = 0.99,
        eps: float = 1e-8,
        eps_inside_root: bool = False,
        centered: bool = False,
        momentum: float = 0.0,
        velocity_of: str = "gradient",
        weight_decay: float = 0.0,
        l1: float = 0.0,
        gradient_scale: float = 1.0,
        clip: tuple[float, float] | None = None,
        maximum_norm: float | None = None,
        maximum_norm_each: float | None = None,
    ) -> None:
        def settings() -> tuple[Any, ...]:
            gradient, norm = _terms(gradient_scale, clip, weight_decay, l1, maximum_norm, maximum_norm_each)
            small, speed = non_negative("eps", eps), non_negative("momentum", momentum)
            outside, inside = (0.0, small) if eps_inside_root else (small, 0.0)
            rule = (RMSPROP, gradient, norm, False, 0.0, fraction("alpha", alpha), outside, inside, speed)
            factors = velocity_factors(velocity_of) if momentum else (1.0, 0.0, 0.0, -1.0)
            return rule, 0.0, False, factors

        states = [("squares", 0), *([("means", 1)] if centered else []), *([("velocities", 2)] if momentum else [])]
        super().__init__(learning_rate, settings, states)
