"""BNNSActivation as the engine's activations, and how its slope can be found when it is fused into a layer."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from ..ops.activation import ACTIVATIONS, Activation, check_output_tells_slope
from . import _constants as c
from ._failure import Invalid, Unsupported
from ._memory import as_float
from ._names import constant_name
from ._structures import BNNSActivation

_NAMES: Final = {kind.code: name for name, kind in ACTIVATIONS.items() if kind.code <= 35}  # Apple's own numbers
_NOT_ELEMENTWISE: Final = (
    c.BNNSActivationFunctionSoftmax,
    c.BNNSActivationFunctionLogSoftmax,
    c.BNNSActivationFunctionGumbel,
    c.BNNSActivationFunctionGumbelMax,
    c.BNNSActivationFunctionIntegerLinearSaturate,
    c.BNNSActivationFunctionIntegerLinearSaturatePerChannel,
)
# Where an output is compared with a parameter, the parameter must be rounded as the output was.
_BOUNDS: Final = {"clamp": ("alpha", "beta"), "clamped_leaky_relu": ("beta",), "threshold": ("beta",)}


class Fused(NamedTuple):
    """An activation inside a layer."""

    function: Activation
    slope_from: str  # "output" or "input": what the engine is to find the slope from
    untrainable: str  # why Apple's backward cannot have it; empty: it can


def elementwise(activation: BNNSActivation) -> Activation:
    """The engine's form of an elementwise function of floating-point numbers."""
    return _elementwise(activation.function, as_float("alpha", activation.alpha), as_float("beta", activation.beta))


@lru_cache(maxsize=256, typed=True)  # 4.0 is not the function 4
def _elementwise(function: Any, alpha: float, beta: float) -> Activation:
    name = _NAMES.get(function) if isinstance(function, int) else None
    if name is None:
        shown = constant_name("BNNSActivationFunction", function)
        if function in _NOT_ELEMENTWISE:
            raise Unsupported(f"{shown} is not an elementwise function of floating-point numbers")
        if function == c.BNNSActivationFunctionPReLUPerChannel:
            raise Unsupported(f"{shown} has a parameter for each channel")
        raise Invalid(f"activation.function is {shown}, which is not a BNNSActivationFunction")
    kind = ACTIVATIONS[name]
    try:
        return Activation(name, None if kind.alpha == 0.0 else alpha, None if kind.beta == 0.0 else beta)
    except ValueError as error:
        raise Invalid(_in_apples_words(error, function)) from None


def _in_apples_words(error: Exception, function: int) -> str:
    """A message about an activation, with Apple's name for it."""
    shown = constant_name("BNNSActivationFunction", function)
    return re.sub(r"^activation '\w+'(:? )", rf"activation.function is {shown}: ", str(error))


def fused(activation: BNNSActivation, output: np.dtype[Any], any_trainable: bool) -> Fused:
    """For a layer whose output has type `output`; `any_trainable`: find slopes from inputs wherever outputs fail."""
    if activation.function == c.BNNSActivationFunctionPReLUPerChannel:
        # alpha seeds the parameter of every channel, and nothing can change it in a fused layer.
        function = Activation("leaky_relu", as_float("alpha", activation.alpha))
        return Fused(function, "input", "the gradient of its parameters is not available when it is fused")
    function = elementwise(activation)
    if function.name == "leaky_relu" and function.alpha == 0:
        function = Activation("relu")  # the same function, whose output tells the slope
    elif function.name == "clamped_leaky_relu" and function.alpha == 0 and function.beta > 0:
        function = Activation("clamp", 0.0, function.beta)
    elif function.name == "gelu_sigmoid":
        # Apple lists it as trainable from the output, which two inputs can share: the input decides.
        return Fused(function, "input", "")
    function = _rounded(function, output)
    try:
        check_output_tells_slope(function, "a filter made with slopes_from_input=True trains it")
    except ValueError as error:
        return Fused(function, "input", "" if any_trainable else _in_apples_words(error, activation.function))
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
