"""The functions of arithmetic filters and their gradients, in NumPy.

Functions that are a single operation are computed in float32, where they are correctly rounded. All others, and all
gradients, are computed in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ..ops.elementwise import activation_forward
from . import _constants as c
from ._memory import Array

_Formula: TypeAlias = Callable[..., Any]


class Gradient(NamedTuple):
    """The gradient of one operand: ``formula(g, *values)`` with the values of these operands, then of the output."""

    formula: _Formula
    operands: tuple[int, ...] = ()
    output: bool = False


class Arithmetic(NamedTuple):
    """A function of one to three operands."""

    value: _Formula
    gradients: tuple[Gradient, ...]
    exact: bool = False  # one correctly rounded operation: float32 is enough

    @property
    def arity(self) -> int:
        return len(self.gradients)


def _erf(x: Array) -> Array:
    return activation_forward(np.ascontiguousarray(x, np.float64), "erf", num_threads=1)


_ZERO: Final = Gradient(np.zeros_like)
_SAME: Final = Gradient(lambda g: g)
_NEGATIVE: Final = Gradient(lambda g: -g)


def _by_input(slope: _Formula) -> tuple[Gradient]:
    return (Gradient(lambda g, x: g * slope(x), (0,)),)


def _by_output(slope: _Formula) -> tuple[Gradient]:
    return (Gradient(lambda g, y: g * slope(y), (), True),)


def _chosen(first: _Formula) -> tuple[Gradient, Gradient]:
    """Of a function whose value is that of one operand: of the first one where `first` says so."""
    return (
        Gradient(lambda g, a, b: np.where(first(a, b), g, 0.0), (0, 1)),
        Gradient(lambda g, a, b: np.where(first(a, b), 0.0, g), (0, 1)),
    )


def _no_nan(value: _Formula, *gradients: _Formula) -> Arithmetic:
    """A function of a and b that is 0 where b is 0, from its value and its gradients elsewhere."""

    def guarded(formula: _Formula) -> Gradient:
        return Gradient(lambda g, a, b: np.where(b == 0, 0.0, formula(g, a, b)), (0, 1))

    return Arithmetic(
        lambda a, b: np.where(b == 0, np.float32(0), value(a, b)), tuple(map(guarded, gradients)), exact=True
    )


_OF_PRODUCT: Final = (Gradient(lambda g, b: g * b, (1,)), Gradient(lambda g, a: g * a, (0,)))
FUNCTIONS: Final[dict[int, Arithmetic]] = {
    c.BNNSArithmeticAdd: Arithmetic(np.add, (_SAME, _SAME), True),
    c.BNNSArithmeticSubtract: Arithmetic(np.subtract, (_SAME, _NEGATIVE), True),
    c.BNNSArithmeticMultiply: Arithmetic(np.multiply, _OF_PRODUCT, True),
    c.BNNSArithmeticDivide: Arithmetic(
        np.divide, (Gradient(lambda g, b: g / b, (1,)), Gradient(lambda g, a, b: -g * a / (b * b), (0, 1))), True
    ),
    c.BNNSArithmeticSquareRoot: Arithmetic(np.sqrt, _by_output(lambda y: 0.5 / y), True),
    c.BNNSArithmeticReciprocalSquareRoot: Arithmetic(lambda x: 1 / np.sqrt(x), _by_output(lambda y: -0.5 * y**3)),
    c.BNNSArithmeticCeil: Arithmetic(np.ceil, (_ZERO,), True),
    c.BNNSArithmeticFloor: Arithmetic(np.floor, (_ZERO,), True),
    c.BNNSArithmeticRound: Arithmetic(np.rint, (_ZERO,), True),
    c.BNNSArithmeticSin: Arithmetic(np.sin, _by_input(np.cos)),
    c.BNNSArithmeticCos: Arithmetic(np.cos, _by_input(lambda x: -np.sin(x))),
    c.BNNSArithmeticTan: Arithmetic(np.tan, _by_output(lambda y: 1 + y * y)),
    c.BNNSArithmeticAsin: Arithmetic(np.arcsin, _by_input(lambda x: 1 / np.sqrt((1 - x) * (1 + x)))),
    c.BNNSArithmeticAcos: Arithmetic(np.arccos, _by_input(lambda x: -1 / np.sqrt((1 - x) * (1 + x)))),
    c.BNNSArithmeticAtan: Arithmetic(np.arctan, _by_input(lambda x: 1 / (1 + x * x))),
    c.BNNSArithmeticSinh: Arithmetic(np.sinh, _by_input(np.cosh)),
    c.BNNSArithmeticCosh: Arithmetic(np.cosh, _by_input(np.sinh)),
    c.BNNSArithmeticTanh: Arithmetic(np.tanh, _by_output(lambda y: (1 - y) * (1 + y))),
    c.BNNSArithmeticAsinh: Arithmetic(np.arcsinh, _by_input(lambda x: 1 / np.sqrt(x * x + 1))),
    c.BNNSArithmeticAcosh: Arithmetic(np.arccosh, _by_input(lambda x: 1 / np.sqrt((x - 1) * (x + 1)))),
    c.BNNSArithmeticAtanh: Arithmetic(np.arctanh, _by_input(lambda x: 1 / ((1 - x) * (1 + x)))),
    c.BNNSArithmeticPow: Arithmetic(
        np.power,
        (
            # The derivative of a constant is 0, also where a ** (b - 1) is infinite.
            Gradient(lambda g, a, b: np.where(b == 0, 0.0, g * b * np.power(a, b - 1)), (0, 1)),
            # The limit where a is 0 and b is positive.
            Gradient(lambda g, a, y: np.where((a == 0) & (y == 0), 0.0, g * y * np.log(a)), (0,), True),
        ),
    ),
    c.BNNSArithmeticExp: Arithmetic(np.exp, _by_output(lambda y: y)),
    c.BNNSArithmeticExp2: Arithmetic(np.exp2, _by_output(lambda y: y * math.log(2))),
    c.BNNSArithmeticLog: Arithmetic(np.log, _by_input(lambda x: 1 / x)),
    c.BNNSArithmeticLog2: Arithmetic(np.log2, _by_input(lambda x: 1 / (x * math.log(2)))),
    c.BNNSArithmeticMultiplyNoNaN: _no_nan(np.multiply, lambda g, a, b: g * b, lambda g, a, b: g * a),
    c.BNNSArithmeticDivideNoNaN: _no_nan(np.divide, lambda g, a, b: g / b, lambda g, a, b: -g * a / (b * b)),
    c.BNNSArithmeticMultiplyAdd: Arithmetic(lambda a, b, d: a * b + d, (*_OF_PRODUCT, _SAME)),
    c.BNNSArithmeticMinimum: Arithmetic(np.minimum, _chosen(np.less_equal), True),
    c.BNNSArithmeticMaximum: Arithmetic(np.maximum, _chosen(np.greater_equal), True),
    c.BNNSArithmeticSelect: Arithmetic(
        lambda a, b, d: np.where(a != 0, b, d),
        (
            _ZERO,
            Gradient(lambda g, a: np.where(a != 0, g, 0.0), (0,)),
            Gradient(lambda g, a: np.where(a != 0, 0.0, g), (0,)),
        ),
        True,
    ),
    c.BNNSArithmeticAbs: Arithmetic(np.abs, _by_input(np.sign), True),
    c.BNNSArithmeticSign: Arithmetic(np.sign, (_ZERO,), True),
    c.BNNSArithmeticNegate: Arithmetic(np.negative, (_NEGATIVE,), True),
    c.BNNSArithmeticReciprocal: Arithmetic(lambda x: 1 / x, _by_output(lambda y: -y * y), True),
    c.BNNSArithmeticSquare: Arithmetic(np.square, _by_input(lambda x: 2 * x), True),
    c.BNNSArithmeticFloorDivide: Arithmetic(lambda a, b: np.floor(a / b), (_ZERO, _ZERO)),
    c.BNNSArithmeticTruncDivide: Arithmetic(lambda a, b: np.trunc(a / b), (_ZERO, _ZERO)),
    c.BNNSArithmeticTruncRemainder: Arithmetic(
        np.fmod, (_SAME, Gradient(lambda g, a, b: -g * np.trunc(a / b), (0, 1))), True
    ),
    c.BNNSArithmeticErf: Arithmetic(_erf, _by_input(lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x))),
}


def value_of(function: Arithmetic, operands: list[Array]) -> Array:
    """The function's value: in float32 if that is exact, else in float64."""
    dtype = np.float32 if function.exact else np.float64
    with np.errstate(all="ignore"):
        return np.asarray(function.value(*(operand.astype(dtype, copy=False) for operand in operands)))


def gradient_of(gradient: Gradient, g: Array, operands: list[Array | None], output: Array | None) -> Array:
    """The gradient of one operand in float64, before it is summed over the axes along which that was broadcast."""
    values = [operands[index] for index in gradient.operands]
    if gradient.output:
        values.append(output)
    wide = [value.astype(np.float64) for value in values if value is not None]
    with np.errstate(all="ignore"):
        return np.asarray(gradient.formula(g, *wide))
