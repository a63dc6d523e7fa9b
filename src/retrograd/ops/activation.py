"""The elementwise activations, and for which of them the output determines the slope."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from .. import _core
from ._errors import ArgumentTypeError, ArgumentValueError

__all__ = ["ACTIVATIONS", "Activation"]


class _Kind(NamedTuple):
    code: int  # the engine's code: Apple's where there is one, retrograd's from 64 on
    alpha: float | None  # the default; 0: no such parameter; None: no default, the caller must give it
    beta: float | None
    needs_input: str  # why the output does not determine the slope; empty: it does


ACTIVATIONS: Final[dict[str, _Kind]] = {entry[0]: _Kind(*entry[1:]) for entry in _core.activations()}

_NOT_ELEMENTWISE: Final = ("softmax", "log_softmax")

# The output determines the slope only for positive alpha: otherwise two inputs share an output.
_POSITIVE_ALPHA: Final = ("leaky_relu", "clamped_leaky_relu", "elu", "celu")
# A zero parameter makes the function constant, so it has no inverse.
_NON_ZERO: Final = {"softplus": ("alpha", "beta"), "scaled_tanh": ("alpha",)}


class Activation:
    """An activation with its parameters: ``Activation("leaky_relu", alpha=0.1)``.

    Wherever an activation is expected, its name alone means its default parameters. Instances are immutable and
    hashable. ``docs/activations.md`` has the formulas, and says for which of them the output determines the slope.
    """

    __slots__ = ("_hash", "alpha", "beta", "code", "name")

    name: str
    code: int
    alpha: float
    beta: float
    _hash: int

    def __init__(self, name: str, alpha: float | None = None, beta: float | None = None) -> None:
        kind = ACTIVATIONS.get(name) if isinstance(name, str) else None
        if kind is None:
            raise _unknown(name)
        values = {}
        for parameter, given, default in (("alpha", alpha, kind.alpha), ("beta", beta, kind.beta)):
            if given is not None and default == 0.0:
                raise _refused(name, " ", f"takes no {parameter}")
            value = default if given is None else given
            if value is None:
                raise _refused(name, " ", f"needs {parameter}: it has no default")
            if isinstance(value, str) or not hasattr(value, "__float__"):
                raise ArgumentTypeError(
                    "activation", "{activation} {!r}: {} must be a number, not {}", name, parameter, type(value)
                )
            value = float(value)
            if math.isnan(value):
                raise _refused(name, ": ", f"{parameter} is NaN")
            values[parameter] = value
        _check(name, values["alpha"], values["beta"])
        fields = {"name": name, "code": kind.code, **values, "_hash": hash((name, *values.values()))}
        for field, content in fields.items():
            object.__setattr__(self, field, content)

    def __setattr__(self, field: str, value: object) -> None:
        raise AttributeError(f"Activation is immutable; make a new one instead of setting {field}")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Activation):
            return NotImplemented
        return (self.name, self.alpha, self.beta) == (other.name, other.alpha, other.beta)

    def __reduce__(self) -> tuple[object, ...]:
        kind = ACTIVATIONS[self.name]
        return Activation, (
            self.name,
            None if kind.alpha == 0.0 else self.alpha,
            None if kind.beta == 0.0 else self.beta,
        )

    def __repr__(self) -> str:
        kind = ACTIVATIONS[self.name]
        text = repr(self.name)
        if kind.alpha != 0.0:
            text += f", alpha={self.alpha!r}"
        if kind.beta != 0.0:
            text += f", beta={self.beta!r}"
        return f"Activation({text})"


def _check(name: str, alpha: float, beta: float) -> None:
    """Raise for parameters with which the function is undefined."""
    if name == "clamp" and alpha > beta:
        reason = f"the lower bound alpha = {alpha:g} is above the upper, beta = {beta:g}"
        raise _refused("clamp", ": ", reason)
    if name == "celu" and alpha == 0:
        raise _refused("celu", " ", "with alpha = 0 divides by 0; use 'relu'")


def check_output_tells_slope(activation: Activation, instead: str) -> None:
    """Raise unless the output alone determines the slope. `instead` tells the caller what to do."""
    name = activation.name
    joint, why = " ", ""
    if ACTIVATIONS[name].needs_input:
        joint, why = ": ", f"the output does not tell the slope: {ACTIVATIONS[name].needs_input}"
    elif name in _POSITIVE_ALPHA and not activation.alpha > 0:
        hint = " (or use 'relu')" if name == "leaky_relu" and activation.alpha == 0 else ""
        why = f"with alpha = {activation.alpha:g}: the output tells the slope only for alpha > 0{hint}"
    else:
        for parameter in _NON_ZERO.get(name, ()):
            if getattr(activation, parameter) == 0:
                why = f"with {parameter} = 0 is constant: the output does not tell the slope"
    if why:
        raise _refused(name, joint, why.replace("{", "{{").replace("}", "}}") + "; " + instead)


def _refused(name: str, joint: str, reason: str) -> ArgumentValueError:
    """The error for an activation; `reason`, a template, is also apart, for front ends with other names for it."""
    error = ArgumentValueError("activation", "{activation} {!r}" + joint + reason, name)
    error.reason = reason
    return error


def _unknown(name: object) -> Exception:
    if not isinstance(name, str):
        return ArgumentTypeError("activation", "{activation} must be a name or an Activation, not {}", type(name))
    if name in _NOT_ELEMENTWISE:
        return ArgumentValueError(
            "activation",
            "{activation} {!r} cannot be fused: it is not elementwise. Apply it to the result instead",
            name,
        )
    if name == "swish":
        return ArgumentValueError("activation", "{activation} 'swish' is unknown; here it is called 'silu'")
    return ArgumentValueError("activation", "{activation} {!r} is unknown; there are {}", name, ", ".join(ACTIVATIONS))
