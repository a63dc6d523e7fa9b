"""Converts BNNSActivation to the engine's activations, and decides how backward computes a fused activation's slope."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from ..ops._errors import ArgumentValueError
from ..ops.activation import ACTIVATIONS, Activation, check_output_tells_slope
from . import _constants as c
from ._failure import Invalid, Unsupported, advise_once
from ._memory import as_float
from ._names import constant_name
from ._structures import BNNSActivation

_NAMES: Final = {kind.code: name for name, kind in ACTIVATIONS.items() if kind.code <= 35}  # the codes are Apple's
_NOT_ELEMENTWISE: Final = (
    c.BNNSActivationFunctionSoftmax,
    c.BNNSActivationFunctionLogSoftmax,
    c.BNNSActivationFunctionGumbel,
    c.BNNSActivationFunctionGumbelMax,
    c.BNNSActivationFunctionIntegerLinearSaturate,
    c.BNNSActivationFunctionIntegerLinearSaturatePerChannel,
)
# Parameters that make the function constant if they are 0, as in a new structure.
_FLATTENING: Final = {
    "linear": ("alpha",),
    "linear_with_bias": ("alpha",),
    "scaled_tanh": ("alpha", "beta"),
    "hard_sigmoid": ("alpha",),
    "softplus": ("alpha", "beta"),
}
# Backward compares the output with these parameters, so they must be rounded as the output was.
_BOUNDS: Final = {"clamp": ("alpha", "beta"), "clamped_leaky_relu": ("beta",), "threshold": ("beta",)}


class Fused(NamedTuple):
    """An activation fused into a layer."""

    function: Activation
    slope_from: str  # "output" or "input": what the engine computes the slope from
    untrainable: str  # why Apple's backward does not support it; empty if it does


IDENTITY: Final = Fused(Activation("identity"), "output", "")


def elementwise(activation: BNNSActivation) -> Activation:
    """The engine's activation for an elementwise floating-point function."""
    alpha, beta = as_float("alpha", activation.alpha), as_float("beta", activation.beta)
    found = _elementwise(activation.function, alpha, beta)
    flat = any(getattr(found, name) == 0 for name in _FLATTENING.get(found.name, ()))
    if flat or (found.name == "clamp" and alpha == beta):
        shown = constant_name("BNNSActivationFunction", activation.function)
        advise_once(f"{shown} with alpha {alpha:g} and beta {beta:g} is constant: no gradient passes through it")
    return found


@lru_cache(maxsize=256, typed=True)  # so that 4.0 does not pass for the code 4
def _elementwise(function: Any, alpha: float, beta: float) -> Activation:
    name = _NAMES.get(function) if isinstance(function, int) else None
    if name is None:
        shown = constant_name("BNNSActivationFunction", function)
        if function in _NOT_ELEMENTWISE:
            raise Unsupported(f"{shown} is not an elementwise floating-point function")
        if function == c.BNNSActivationFunctionPReLUPerChannel:
            raise Unsupported(f"{shown} has one parameter per channel")
        raise Invalid(f"activation.function is {shown}, which is not a BNNSActivationFunction")
    kind = ACTIVATIONS[name]
    try:
        return Activation(name, None if kind.alpha == 0.0 else alpha, None if kind.beta == 0.0 else beta)
    except ArgumentValueError as error:
        raise Invalid(_with_apples_name(error, function)) from None


def _with_apples_name(error: ArgumentValueError, function: int) -> str:
    """The error message, with Apple's name for the activation."""
    return f"activation.function is {constant_name('BNNSActivationFunction', function)}: {error.reason}"


def fused(
    activation: BNNSActivation,
    output: np.dtype[Any],
    any_trainable: bool,
    instead: str = "a filter made with slopes_from_input=True trains it",
) -> Fused:
    """The activation of a layer whose output has dtype `output`.

    `any_trainable`: if the output does not determine the slope, compute it from the input. `instead` is what the
    message of an activation that cannot be trained advises.
    """
    if activation.function == c.BNNSActivationFunctionPReLUPerChannel:
        # Every channel starts with alpha, and a fused layer has no way to change it.
        function = Activation("leaky_relu", as_float("alpha", activation.alpha))
        return Fused(function, "input", "the gradient of its parameters is not available when it is fused")
    function = elementwise(activation)
    if function.name == "leaky_relu" and function.alpha == 0:
        function = Activation("relu")  # the same function, and its output determines the slope
    elif function.name == "clamped_leaky_relu" and function.alpha == 0 and function.beta > 0:
        function = Activation("clamp", 0.0, function.beta)
    elif function.name == "gelu_sigmoid":
        # Apple lists it as trainable from the output, but two inputs can share one output: use the input.
        return Fused(function, "input", "")
    function = _rounded(function, output)
    try:
        check_output_tells_slope(function, instead)
    except ArgumentValueError as error:
        return Fused(function, "input", "" if any_trainable else _with_apples_name(error, activation.function))
    return Fused(function, "output", "")


def _rounded(function: Activation, output: np.dtype[Any]) -> Activation:
    names = _BOUNDS.get(function.name, ())
    if not names or output == np.float32:
        return function
    kind = ACTIVATIONS[function.name]
    values = {name: getattr(function, name) for name in ("alpha", "beta") if getattr(kind, name) != 0.0}
    with np.errstate(over="ignore"):
        for name in names:
            values[name] = float(np.asarray(values[name]).astype(output))
    return Activation(function.name, **values)
