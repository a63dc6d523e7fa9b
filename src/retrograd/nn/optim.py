"""The graph's optimizers for the parameters of a module, with a state that can be saved."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from .. import graph
from ..graph.tensor import Tensor, Variable
from ..ops._errors import of_function
from ..ops._types import Array
from ..ops.optimizer import norm_terms
from . import hints
from .module import Module, Parameter, check_arrays, copy_arrays

__all__ = ["SGD", "Adam", "AdamW", "LearningRate", "Optimizer", "Parameters", "Plateau", "RMSProp"]

# A number, or a function of the number of steps taken so far.
LearningRate: TypeAlias = float | Callable[[int], float]
# A module, its parameters, or groups: dicts with "params" and the options that differ, such as "lr".
Parameters: TypeAlias = (
    Module | Mapping[str, Parameter] | Iterable[Parameter] | Sequence[Module] | Sequence[Mapping[str, Any]]
)


def _option_names(kind: type[graph.Optimizer]) -> frozenset[str]:
    """The options of an optimizer of the graph, and the learning rate of a group."""
    classes = kind.__mro__[: kind.__mro__.index(graph.Optimizer)]
    parameters = (p for one in classes for p in inspect.signature(one).parameters.values())
    return frozenset({"lr", "learning_rate", *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)})


class _Group:
    """Parameters with common options: the rule of the graph that updates them, and its learning rate."""

    def __init__(self, names: Mapping[str, Parameter], kind: type[graph.Optimizer], options: dict[str, Any]) -> None:
        self.parameters = dict(names)
        self.learning_rate: LearningRate | None = options.pop("lr", options.pop("learning_rate", None))
        self.rate = Variable(np.zeros((), np.float64), name="learning rate")
        self.scale = float(options.get("gradient_scale", 1.0))
        self.rule = kind(self.rate, **options)
        self.rule.prepare(list(self.parameters.values()))


class Optimizer:
    """Updates the parameters of a module in the step that :func:`retrograd.nn.compile` makes.

    `parameters` is a module, ``model.parameters()``, a list of parameters, or groups with options of their own:
    ``[{"params": model.body, "lr": 1e-4}, {"params": model.head}]``. `learning_rate` is a number or a function of the
    steps taken, can be set at any time, and may be given as ``lr``. The other options are as in the graph's
    optimizer of the same name.
    """

    _kind: type[graph.Optimizer]
    _usual_rate: float | None = None

    def __init__(
        self,
        parameters: Parameters,
        learning_rate: LearningRate | None = None,
        *,
        lr: LearningRate | None = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        if learning_rate is not None and lr is not None:
            raise TypeError(f"{name}: learning_rate is {learning_rate}, and lr, which is the same, is {lr}; give one")
        rate = next((r for r in (learning_rate, lr, self._usual_rate) if r is not None), None)
        if rate is None:
            raise TypeError(f"{name}: learning_rate is missing; write nn.{name}(model, 0.01)")
        self.learning_rate: LearningRate = rate
        groups = _groups(name, parameters)
        # The norm is taken over all groups together.
        self.maximum_norm: float | None = options.pop("maximum_norm", None) if len(groups) > 1 else None
        for option in (option for own in (options, *(own for _, own in groups)) for option in own):
            if option not in _option_names(self._kind):
                hint = hints.hints()["options"].get(option)
                said = f"got an unexpected keyword argument {option!r}"
                raise TypeError(f"{name}: {said}{'' if hint is None else f'; write {hint}'}")
        try:
            norm_terms(options.get("clip"), self.maximum_norm, None, None, False)
            self._groups: Final = [_Group(names, self._kind, {**options, **own}) for names, own in groups]
        except (TypeError, ValueError) as error:
            raise of_function(name, error) from None
        self._parameters: Final = {name: p for group in self._groups for name, p in group.parameters.items()}
        self._count: Final = self._groups[0].rule.count
        for group in self._groups[1:]:
            group.rule.count = self._count
        self.set_rates()

    def __setattr__(self, name: str, value: object) -> None:
        if "_count" in self.__dict__ and name != "learning_rate":  # programs would not notice
            raise AttributeError(f"{type(self).__name__}.{name} is fixed; only learning_rate can be set")
        super().__setattr__(name, value)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """All parameters by name, also those that are frozen."""
        return dict(self._parameters)

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return int(self._count.value)

    def current_rate(self) -> float:
        """The learning rate of the next step; of the first group, if they differ."""
        self.set_rates()
        return float(self._groups[0].rate.value)

    def set_rates(self) -> None:
        """Give the program the learning rates of its next step."""
        for group in self._groups:
            given = self.learning_rate if group.learning_rate is None else group.learning_rate
            rate = given(self._count.value.item()) if callable(given) else given
            try:
                fits = 0 <= rate < math.inf
            except (TypeError, ValueError):
                raise TypeError(f"{type(self).__name__}: learning_rate is {rate!r}, must be a number") from None
            if not fits:
                raise ValueError(f"{type(self).__name__}: learning_rate is {rate}, must be a finite number, at least 0")
            group.rate.value[()] = rate

    # ---- in a trace --------------------------------------------------------------------------------------------------

    def update(self, gradients: Mapping[Any, Tensor]) -> None:
        """Update the parameters by their gradients; those without one stay as they are."""
        own = [(group, [p for p in group.parameters.values() if p in gradients]) for group in self._groups]
        factor = _factor([(gradients[p], group.scale) for group, found in own for p in found], self.maximum_norm)
        for group, found in own:
            if not found:
                continue
            given = [gradients[p] for p in found]
            masked = [(p, p.mask, graph.identity(p)) for p in found if p.mask is not None and group.rule.decays]
            group.rule.update(found, given if factor is None else [g * graph.cast(factor, g.dtype) for g in given])
            for parameter, mask, before in masked:
                parameter.assign(graph.where(mask, graph.identity(parameter), before))

    def collect(self, gradients: Mapping[Any, Tensor]) -> None:
        """Add gradients to sums, which :meth:`apply` uses."""
        for group in self._groups:
            if found := [p for p in group.parameters.values() if p in gradients]:
                group.rule.collect(found, [gradients[p] for p in found])

    def apply(self) -> None:
        """Update the parameters by the means of the collected gradients."""
        sums: dict[Any, Tensor] = {
            p: g for group in self._groups if group.rule.sums for p, g in group.rule.take_sums().items()
        }
        self.update({p: g for p, g in sums.items() if p.trainable})

    # ---- state -------------------------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, Array]:
        """Return the state by name, "steps" and "<kind>.<parameter>": the arrays themselves, not copies."""
        found = {"steps": self._count.value}
        for state in dict.fromkeys(name for group in self._groups for name in group.rule.state_names):
            for group in self._groups:
                if state in group.rule.state_names:  # groups may differ in momentum
                    position = group.rule.state_names.index(state)
                    for name, parameter in group.parameters.items():
                        found[f"{state}.{name}"] = group.rule.states[parameter][position].value
        return {**found, **{name: plateau.state for name, plateau in self.plateaus().items()}}

    def plateaus(self) -> dict[str, Plateau]:
        """The learning rates, of all or of a group, that follow reports; by their names in the state."""
        rates = {"plateau": self.learning_rate}
        rates |= {f"plateau.{i}": group.learning_rate or 0.0 for i, group in enumerate(self._groups)}
        return {name: rate for name, rate in rates.items() if isinstance(rate, Plateau)}

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the state by name."""
        return {name: array.copy() for name, array in self.arrays().items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Load a state from an optimizer of the same kind. If anything does not match, nothing is written."""
        self.check_state(f"{type(self).__name__}.load_state_dict", state)
        copy_arrays(self.arrays(), state)

    def check_state(self, function: str, state: Mapping[str, Array]) -> None:
        """Raise an error if a state does not match; `function` is the name that the error starts with."""
        check_arrays(function, self.arrays(), state, strict=True)
        if not 0 <= (steps := int(state["steps"])) < 2**53:
            raise ValueError(f"{function}: steps is {steps}, must be from 0 to 2**53")

    @property
    def collected(self) -> int:
        """The parts of a batch whose gradients are collected and not yet applied."""
        return max(int(group.rule.parts.value) for group in self._groups)  # none of a group that is frozen

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._parameters)} parameters, {self.steps} steps)"

    if not TYPE_CHECKING:
        __getattr__ = hints.missing("Optimizer")


class SGD(Optimizer):
    """Stochastic gradient descent; the options are described in :class:`retrograd.graph.SGD`."""

    _kind = graph.SGD


class Adam(Optimizer):
    """Adam, learning rate 1e-3 by default; the options are described in :class:`retrograd.graph.Adam`."""

    _kind = graph.Adam
    _usual_rate = 1e-3


class AdamW(Adam):
    """Adam with decoupled weight decay, 0.01 by default."""

    _kind = graph.AdamW


class RMSProp(Optimizer):
    """RMSProp, learning rate 1e-2 by default; the options are described in :class:`retrograd.graph.RMSProp`."""

    _kind = graph.RMSProp
    _usual_rate = 1e-2


@dataclass(eq=False)
class Plateau:
    """A learning rate that is multiplied by `factor` when `patience` reports in a row were no better than the best.

    ``Adam(model, plateau)`` uses it, and ``plateau.report(loss)`` after each validation may lower it, down to `final`.
    The optimizer's state has its state. A report is better if it is below the best by more than `threshold` of it.
    """

    rate: float
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    final: float = 0.0
    state: Array = field(init=False, repr=False)  # the rate, the best report, the reports since

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1 or self.patience < 1:
            raise ValueError(
                f"Plateau: factor is {self.factor} and patience is {self.patience}; factor must be between 0 and 1, "
                "and patience at least 1"
            )
        self.state = np.array([self.rate, math.inf, 0.0])

    def __call__(self, step: int) -> float:
        return float(self.state[0])

    def report(self, value: float) -> bool:
        """Take note of a validation loss; return whether the rate was lowered."""
        rate, best, since = (float(number) for number in self.state)
        if value < (best - self.threshold * abs(best) if best < math.inf else best):
            self.state[1:] = value, 0.0
            return False
        lowered: bool = since + 1 >= self.patience
        self.state[:] = max(rate * self.factor, self.final) if lowered else rate, best, 0.0 if lowered else since + 1
        return lowered


def _factor(gradients: Sequence[tuple[Tensor, float]], maximum_norm: float | None) -> Any:
    """What makes the norm of all gradients, each with its scale, at most `maximum_norm`."""
    if maximum_norm is None or not gradients:
        return None
    squares = [graph.cast(graph.sum_of_squares(g), np.float64) * scale**2 for g, scale in gradients]
    norm = graph.sqrt(graph.sum(graph.stack(squares)))
    return graph.where(norm > maximum_norm, maximum_norm / norm, 1.0)


def _groups(optimizer: str, given: Any) -> list[tuple[dict[str, Parameter], dict[str, Any]]]:
    """The parameters by name and the options of each group."""
    if not isinstance(given, Iterable) and not isinstance(given, Module):
        raise TypeError(
            f"{optimizer}: parameters is a {type(given).__name__}, must be a module, or its parameters; write "
            f"nn.{optimizer}(model, 1e-3)"
        )
    parts: list[Any] = [given] if isinstance(given, (Module, Mapping, Parameter)) else list(given)
    if all(isinstance(part, Mapping) and "params" in part for part in parts):
        named = [
            (_named(optimizer, [part["params"]], f"{i}."), {k: v for k, v in part.items() if k != "params"})
            for i, part in enumerate(parts)
        ]
    else:
        named = [(_named(optimizer, parts, ""), {})]
    parameters = [parameter for names, _ in named for parameter in names.values()]
    if not parameters:
        raise ValueError(f"{optimizer}: there are no parameters")
    if len(set(map(id, parameters))) < len(parameters):
        raise ValueError(f"{optimizer}: a parameter is given twice")
    return named


def _named(optimizer: str, parts: Sequence[Any], prefix: str) -> dict[str, Parameter]:
    """The parameters of modules, dicts and lists, by name; several parts are numbered."""
    found: dict[str, Parameter] = {}
    for number, part in enumerate(parts):
        begin = prefix + (f"{number}." if len(parts) > 1 else "")
        if isinstance(part, Parameter):
            found[begin.rstrip(".") or "0"] = part
        elif isinstance(part, (Module, Mapping)):
            inside = part.parameters() if isinstance(part, Module) else part
            found.update({begin + name: parameter for name, parameter in inside.items()})
        elif isinstance(part, Iterable) and not isinstance(part, str):
            found.update(_named(optimizer, list(part), begin))
        else:
            raise TypeError(f"{optimizer}: parameters has a {type(part).__name__}, must be modules or parameters")
    for name, parameter in found.items():
        if not isinstance(parameter, Parameter):
            raise TypeError(f"{optimizer}: parameter {name} is a {type(parameter).__name__}, must be an nn.Parameter")
    return found
