"""Optimizers. One call to the engine updates all parameters of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import numpy as np

import retrograd as rg

from .module import Array, Module, check_arrays, copy_arrays

__all__ = ["SGD", "Adam", "AdamW", "LearningRate", "Optimizer", "RMSProp"]

# A number, or a function of the number of steps taken so far.
LearningRate: TypeAlias = float | Callable[[int], float]
VelocityOf: TypeAlias = Literal["gradient", "step", "descent"]
Clip: TypeAlias = tuple[float, float] | None


class Optimizer:
    """Updates the parameters of a module, or of a submodule such as ``model["head"]``, from their gradients.

    `learning_rate` can be set at any time. `steps` counts the steps taken. The common options are those of
    :func:`retrograd.sgd_step`; they are checked when the optimizer is created.
    """

    def __init__(
        self,
        function: Callable[..., None],
        module: Module,
        learning_rate: LearningRate,
        states: tuple[str, ...],
        options: dict[str, Any],
        num_threads: int | None,
    ) -> None:
        parameters = module.parameters()
        if not parameters:
            raise ValueError(f"{type(self).__name__}: the {type(module).__name__} has no parameters")
        names: dict[int, str] = {}
        for name, array in parameters.items():
            other = names.setdefault(array.ctypes.data, name)
            if other != name and array.size:
                raise ValueError(
                    f"{type(self).__name__}: parameters {other} and {name} share memory, but have separate gradients; "
                    "weights cannot be shared by two layers"
                )
        self.learning_rate = learning_rate
        self._steps = np.zeros((), np.int64)
        self._names: Final = list(parameters)
        self._parameters: Final = list(parameters.values())
        self._gradients: Final = list(module.gradients().values())
        self._state: Final = {state: [np.zeros_like(array) for array in self._parameters] for state in states}
        options = {**options, "num_threads": num_threads}
        self._step: Final = partial(function, self._parameters, self._gradients, **self._state, **options)
        nothing = partial(function, [], [], **{state: [] for state in states}, **options)
        self._run(nothing, 1.0)  # checks the options

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return int(self._steps)

    def current_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.learning_rate(self.steps) if callable(self.learning_rate) else self.learning_rate)

    def step(self, *, gradient_scale: float = 1.0) -> None:
        """Update all parameters. `gradient_scale` multiplies the gradients, for example 1 / micro-batches."""
        self._run(self._step, gradient_scale)
        self._steps += 1

    def _run(self, function: Callable[..., None], gradient_scale: float) -> None:
        function(learning_rate=self.current_rate(), gradient_scale=gradient_scale, **self._step_options())

    def _step_options(self) -> dict[str, Any]:
        """Options that change from step to step."""
        return {}

    def arrays(self) -> dict[str, Array]:
        """Return the state by name, "steps" and "<kind>.<parameter>": the arrays themselves, not copies."""
        return {
            "steps": self._steps,
            **{
                f"{state}.{name}": array
                for state, arrays in self._state.items()
                for name, array in zip(self._names, arrays, strict=True)
            },
        }

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._names)} parameters, {self.steps} steps)"


class SGD(Optimizer):
    """Stochastic gradient descent, with velocities if `momentum` is not 0. `velocity_of` selects their definition."""

    def __init__(
        self,
        module: Module,
        learning_rate: LearningRate,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        velocity_of: VelocityOf = "gradient",
        weight_decay: float = 0.0,
        l1: float = 0.0,
        clip: Clip = None,
        maximum_norm: float | None = None,
        maximum_norm_each: float | None = None,
        num_threads: int | None = None,
    ) -> None:
        options = {
            "momentum": momentum,
            "nesterov": nesterov,
            "velocity_of": velocity_of,
            "weight_decay": weight_decay,
            "l1": l1,
            "clip": clip,
            "maximum_norm": maximum_norm,
            "maximum_norm_each": maximum_norm_each,
        }
        states = ("velocities",) if momentum else ()
        super().__init__(rg.sgd_step, module, learning_rate, states, options, num_threads)


class Adam(Optimizer):
    """Adam, optionally with `decoupled` weight decay (:class:`AdamW`) or `amsgrad`."""

    def __init__(
        self,
        module: Module,
        learning_rate: LearningRate = 1e-3,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        epsilon_hat: bool = False,
        amsgrad: bool = False,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        l1: float = 0.0,
        clip: Clip = None,
        maximum_norm: float | None = None,
        maximum_norm_each: float | None = None,
        num_threads: int | None = None,
    ) -> None:
        options = {
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "epsilon_hat": epsilon_hat,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
            "l1": l1,
            "clip": clip,
            "maximum_norm": maximum_norm,
            "maximum_norm_each": maximum_norm_each,
        }
        states: tuple[str, ...] = ("first_moments", "second_moments")
        if amsgrad:
            states += ("largest_second_moments",)
        super().__init__(rg.adam_step, module, learning_rate, states, options, num_threads)

    def _step_options(self) -> dict[str, Any]:
        return {"step": self.steps + 1}


class AdamW(Adam):
    """Adam with decoupled weight decay, 0.01 by default."""

    def __init__(
        self, module: Module, learning_rate: LearningRate = 1e-3, *, weight_decay: float = 0.01, **options: Any
    ) -> None:
        """Options are those of :class:`Adam`."""
        super().__init__(module, learning_rate, weight_decay=weight_decay, decoupled=True, **options)


class RMSProp(Optimizer):
    """RMSProp, optionally `centered`, with velocities if `momentum` is not 0."""

    def __init__(
        self,
        module: Module,
        learning_rate: LearningRate = 1e-2,
        *,
        alpha: float = 0.99,
        eps: float = 1e-8,
        eps_inside_root: bool = False,
        centered: bool = False,
        momentum: float = 0.0,
        velocity_of: VelocityOf = "gradient",
        weight_decay: float = 0.0,
        l1: float = 0.0,
        clip: Clip = None,
        maximum_norm: float | None = None,
        maximum_norm_each: float | None = None,
        num_threads: int | None = None,
    ) -> None:
        options = {
            "alpha": alpha,
            "eps": eps,
            "eps_inside_root": eps_inside_root,
            "momentum": momentum,
            "velocity_of": velocity_of,
            "weight_decay": weight_decay,
            "l1": l1,
            "clip": clip,
            "maximum_norm": maximum_norm,
            "maximum_norm_each": maximum_norm_each,
        }
        states = ("squares",) + ("means",) * centered + ("velocities",) * (momentum != 0)
        super().__init__(rg.rmsprop_step, module, learning_rate, states, options, num_threads)
