"""Converts the kernels' neurons to the engine's activations."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops.activation import Activation
from ._types import MPSCNNNeuronType

Array = npt.NDArray[np.float64]


class Curve(NamedTuple):
    """A neuron that the engine does not have, computed by NumPy. Outside its domain the result is NaN or infinite."""

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]


def _activation(name: str, parameters: str = "") -> Callable[[float, float, float], Activation]:
    """An activation whose alpha and beta are the named parameters."""

    def make(a: float, b: float, c: float) -> Activation:
        given = {"a": a, "b": b, "c": c}
        return Activation(name, *(given[parameter] for parameter in parameters))

    return make


def _power(a: float, b: float, c: float) -> Curve:
    return Curve(lambda z: (a * z + b) ** c, lambda z: a * c * (a * z + b) ** (c - 1))


def _exponential(a: float, b: float, c: float) -> Curve:
    if c == -1:
        return Curve(lambda z: np.exp(a * z + b), lambda z: a * np.exp(a * z + b))
    base = np.float64(c)  # NumPy's powers and logarithms do not raise
    return Curve(lambda z: base ** (a * z + b), lambda z: a * np.log(base) * base ** (a * z + b))


def _logarithm(a: float, b: float, c: float) -> Curve:
    if c == -1:
        return Curve(lambda z: np.log(a * z + b), lambda z: a / (a * z + b))
    base = np.float64(c)
    return Curve(lambda z: np.log(a * z + b) / np.log(base), lambda z: a / ((a * z + b) * np.log(base)))


_PARAMETERS: Final = struct.Struct("3d")
_TYPES: Final = MPSCNNNeuronType
_MAKERS: Final[dict[MPSCNNNeuronType, tuple[str, Callable[[float, float, float], Any]]]] = {
    # the parameters it uses, and a function of a, b, c that makes it
    _TYPES.none: ("", lambda a, b, c: None),
    _TYPES.reLU: ("a", _activation("leaky_relu", "a")),
    _TYPES.linear: ("ab", _activation("linear_with_bias", "ab")),
    _TYPES.sigmoid: ("", _activation("sigmoid")),
    _TYPES.hardSigmoid: ("ab", _activation("closed_hard_sigmoid", "ab")),
    _TYPES.tanH: ("ab", _activation("scaled_tanh", "ab")),
    _TYPES.absolute: ("", _activation("abs")),
    _TYPES.softPlus: ("ab", _activation("softplus", "ab")),
    _TYPES.softSign: ("", _activation("softsign")),
    _TYPES.elu: ("a", _activation("elu", "a")),
    _TYPES.reLUN: ("ab", _activation("clamped_leaky_relu", "ab")),
    _TYPES.power: ("abc", _power),
    _TYPES.exponential: ("abc", _exponential),
    _TYPES.logarithm: ("abc", _logarithm),
    _TYPES.geLU: ("", _activation("gelu")),
}


def as_neuron_type(name: str, value: object) -> MPSCNNNeuronType:
    """Check a neuron type of a matrix kernel."""
    try:
        kind = MPSCNNNeuronType(value)  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(f"{name} is {value!r}, which is not an MPSCNNNeuronType (0 to 15)") from None
    if kind not in _MAKERS:
        reason = "it has one parameter per channel" if kind is _TYPES.pReLU else "it is not a function"
        raise ValueError(f"{name} is {kind.name} ({kind.value}), which these kernels do not support: {reason}")
    return kind


def neuron(kind: MPSCNNNeuronType, a: float, b: float, c: float) -> Activation | Curve | None:
    """The function to apply, or None. Raises ValueError for invalid parameters."""
    return _made(kind, _PARAMETERS.pack(a, b, c))


@lru_cache(maxsize=256)
def _made(kind: MPSCNNNeuronType, parameters: bytes) -> Activation | Curve | None:
    """Cached by the bits of the parameters: 0 and -0 compare equal but give different functions."""
    used, make = _MAKERS[kind]
    a, b, c = _PARAMETERS.unpack(parameters)
    for name, value in zip("abc", (a, b, c), strict=True):
        if name in used and math.isnan(value):
            raise ValueError(f"neuron {kind.name}: parameter{name.upper()} is NaN")
    made: Activation | Curve | None = make(a, b, c)
    return made


def used_parameters(kind: MPSCNNNeuronType) -> str:
    """Those of a, b and c that the neuron depends on."""
    return _MAKERS[kind][0]
