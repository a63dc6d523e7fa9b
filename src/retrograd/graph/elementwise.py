"""Elementwise operations with broadcasting. All are steps of the engine's maps, so that a chain of them is one pass.

An entry of the tables is a name, NumPy's where there is one, and the derivative with respect to each operand, as a
function of the gradient g, the result y and the operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

import retrograd.graph as G

from .. import _core
from ..ops._types import Array
from .operation import Operation, Spec
from .reduction import refuse, sum_to
from .tensor import (
    BOOL,
    DTYPES,
    FLOATS,
    INTEGERS,
    Node,
    Operand,
    Tensor,
    apply_one,
    as_array,
    as_tensor,
    common_dtype,
    fail,
    in_trace,
)

CODES: Final = {name: (code, arity) for name, code, arity in _core.map_operations()}
Derivative: TypeAlias = Callable[..., Tensor]
_Unary: TypeAlias = Callable[[Operand], Tensor]
_Binary: TypeAlias = Callable[[Operand, Operand], Tensor]


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of arrays of these shapes, broadcast as NumPy does."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    axes = max(len(shape) for shape in shapes)
    result = []
    for axis in range(axes):
        extents = {s[axis - axes + len(s)] for s in shapes if axis - axes + len(s) >= 0} - {1}
        if len(extents) > 1:
            text = " and ".join(str(shape) for shape in shapes)
            raise ValueError(f"shapes {text} do not broadcast")
        result.append(extents.pop() if extents else 1)
    return tuple(result)


def run_map(
    steps: list[tuple[int, int, int, int]],
    operands: Sequence[Array],
    constants: list[float],
    results: Sequence[Array],
    registers: list[int],
) -> None:
    """Compute steps in the engine; operands broadcast to the results' shape."""
    shape = results[0].shape
    dtypes = {a.dtype for a in (*operands, *results)}
    views: list[object] = [a if a.shape == shape else np.broadcast_to(a, shape) for a in operands]
    if dtypes & _FLOAT_SET:
        f64 = FLOATS[1] in dtypes
        answer = _core.map(f64, steps, views, constants, [*results], registers, False, 0)
    else:
        answer = _core.map_integers(steps, views, [int(c) for c in constants], [*results], registers, False, 0)
    refuse(answer)


_FLOAT_SET: Final = set(FLOATS)


def _declare(
    name: str,
    derivatives: Sequence[Derivative | None] | None,
    *,
    result: np.dtype[Any] | None = None,
    kinds: str = "f",
    engine: str | None = None,
    why_not: str = "",
) -> Operation:
    """`kinds`: of the operands' dtypes: floats, integers, bools. `result`: the dtype of the result, if another."""
    code, arity = CODES[engine or name]
    select = engine == "select"

    def shapes(*specs: Spec) -> Sequence[Spec]:
        if len(specs) != arity:
            raise TypeError(f"needs {arity} operands, got {len(specs)}")
        dtype = specs[-1].dtype
        for i, spec in enumerate(specs):
            wanted = BOOL if select and i == 0 else dtype
            if spec.dtype != wanted:
                raise TypeError(f"operands have dtypes {spec.dtype} and {wanted}; convert one with .astype")
        if dtype.kind not in kinds:
            raise TypeError(f"operands have dtype {dtype}, must be of {_KINDS[kinds]}")
        return (Spec(broadcast([spec.shape for spec in specs]), result or dtype),)

    def compute(inputs: Sequence[Array], results: Sequence[Array]) -> None:
        numbers = [*range(arity), 0, 0][:3]
        run_map([(code, *numbers)], inputs, [], results, [arity])

    def gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
        (g,) = given
        assert g is not None
        assert derivatives is not None
        found: list[Tensor | None] = []
        for operand, derivative, wanted in zip(node.inputs, derivatives, needed, strict=True):
            assert operand is not None
            use = wanted and derivative is not None
            found.append(
                sum_to(derivative(g, node.result, *node.inputs), operand.shape) if use and derivative else None
            )
        return found

    return Operation(
        name,
        shapes,
        compute=compute,
        gradient=None if derivatives is None else gradient,
        why_not=why_not,
        contiguous=(),
        in_place=[(0, i) for i in range(arity)],
        flops=lambda inputs, results: results[0].elements,
        map_code=code,
    )


_KINDS: Final = {"f": "floats", "i": "integers", "fi": "numbers", "fib": "numbers or bools", "b": "bools"}
_BOOLS: Final = "bools have no derivative"


def _call(operation: Operation, operands: Sequence[Operand]) -> Tensor:
    return apply_one(operation, operands, dtype=common_dtype(operation.name, operands))


# ---- arithmetic ------------------------------------------------------------------------------------------------------

_ADD: Final = _declare("add", (lambda g, y, a, b: g, lambda g, y, a, b: g), kinds="fi")
_SUBTRACT: Final = _declare("subtract", (lambda g, y, a, b: g, lambda g, y, a, b: -g), kinds="fi", engine="sub")
_MULTIPLY: Final = _declare("multiply", (lambda g, y, a, b: g * b, lambda g, y, a, b: g * a), kinds="fi", engine="mul")
_DIVIDE: Final = _declare("divide", (lambda g, y, a, b: g / b, lambda g, y, a, b: -(g * y / b)), engine="div")
_POWER: Final = _declare(
    "power",
    (
        # 0 for an exponent of 0, also where the base is 0.
        lambda g, y, a, b: g * where(equal(b, 0.0), 0.0, b * power(a, b - 1)),
        # As torch and JAX: 0 where the base is not positive.
        lambda g, y, a, b: g * where(a > 0, y * log(where(a > 0, a, 1.0)), 0.0),
    ),
    engine="pow",
)
# Where both are equal, each gets half of the gradient.
_MAXIMUM: Final = _declare(
    "maximum", (lambda g, y, a, b: _share(g, a, b, a > b), lambda g, y, a, b: _share(g, a, b, b > a)), kinds="fi"
)
_MINIMUM: Final = _declare(
    "minimum", (lambda g, y, a, b: _share(g, a, b, a < b), lambda g, y, a, b: _share(g, a, b, b < a)), kinds="fi"
)
_MOD: Final = _declare("mod", (lambda g, y, a, b: g, lambda g, y, a, b: -(g * floor(a / b))), kinds="fi")
_FMOD: Final = _declare("fmod", (lambda g, y, a, b: g, lambda g, y, a, b: -(g * trunc(a / b))))
_ARCTAN2: Final = _declare(
    "arctan2",
    (lambda g, y, a, b: g * b / (a * a + b * b), lambda g, y, a, b: -(g * a / (a * a + b * b))),
    engine="atan2",
)
# Rounded once.
_FMA: Final = _declare("fma", (lambda g, y, a, b, c: g * b, lambda g, y, a, b, c: g * a, lambda g, y, a, b, c: g))
_WHERE: Final = _declare(
    "where", (None, lambda g, y, p, a, b: where(p, g, 0.0), lambda g, y, p, a, b: where(p, 0.0, g)),
    kinds="fib", engine="select",
)  # fmt: skip


def _share(g: Tensor, a: Tensor, b: Tensor, wins: Tensor) -> Tensor:
    return where(wins, g, where(equal(a, b), g * 0.5, 0.0))


def add(a: Operand, b: Operand) -> Tensor:
    """``a + b``"""
    return _call(_ADD, (a, b))


def subtract(a: Operand, b: Operand) -> Tensor:
    """``a - b``"""
    return _call(_SUBTRACT, (a, b))


def multiply(a: Operand, b: Operand) -> Tensor:
    """``a * b``"""
    for one, other in ((a, b), (b, a)):
        if isinstance(other, Tensor) and is_one(one):
            return other
    return _call(_MULTIPLY, (a, b))


def is_one(value: Operand) -> bool:
    """Whether it is the number 1, or a constant tensor without axes that is."""
    if isinstance(value, Tensor):
        constant = value.node.attributes.get("value")
        return constant is not None and value.shape == () and bool(constant == 1)
    return isinstance(value, (int, float)) and value == 1


def divide(a: Operand, b: Operand) -> Tensor:
    """``a / b``, of floats."""
    return _call(_DIVIDE, (a, b))


def power(a: Operand, b: Operand) -> Tensor:
    """``a ** b``, of floats. Exponents 1, 2, 1/2 and -1 that are Python numbers are their own operations."""
    if isinstance(b, (int, float)) and not isinstance(b, bool):
        special: dict[float, Callable[[Operand], Tensor]] = {
            1.0: identity, 2.0: square, 0.5: sqrt, -1.0: reciprocal, -0.5: rsqrt,
        }  # fmt: skip
        if float(b) in special:
            return special[float(b)](a)
    return _call(_POWER, (a, b))


def maximum(a: Operand, b: Operand) -> Tensor:
    """The larger one; NaN if either is. Equal operands get half of the gradient each."""
    return _call(_MAXIMUM, (a, b))


def minimum(a: Operand, b: Operand) -> Tensor:
    """The smaller one; NaN if either is. Equal operands get half of the gradient each."""
    return _call(_MINIMUM, (a, b))


def mod(a: Operand, b: Operand) -> Tensor:
    """``a - floor(a / b) * b``, with the sign of b, as Python's ``%``."""
    return _call(_MOD, (a, b))


def fmod(a: Operand, b: Operand) -> Tensor:
    """``a - trunc(a / b) * b``, with the sign of a, as C's."""
    return _call(_FMOD, (a, b))


def arctan2(a: Operand, b: Operand) -> Tensor:
    """The angle of the point (b, a)."""
    return _call(_ARCTAN2, (a, b))


def where(condition: Operand, a: Operand, b: Operand) -> Tensor:
    """`a` where the condition is true, else `b`. No gradient passes to the one that is not chosen, not even NaN."""
    return apply_one(_WHERE, (condition, a, b), dtype=common_dtype("where", (a, b)) or FLOATS[0])


def divide_no_nan(a: Operand, b: Operand) -> Tensor:
    """``a / b``, of floats; 0 where b is 0, as are the gradients there."""
    zero = equal(b, 0.0)
    return where(zero, 0.0, divide(a, where(zero, 1.0, b)))


def fmax(a: Operand, b: Operand) -> Tensor:
    """The larger one; NaN only if both are. Equal operands get half of the gradient each."""
    return _ignoring_nan(maximum, a, b)


def fmin(a: Operand, b: Operand) -> Tensor:
    """The smaller one; NaN only if both are. Equal operands get half of the gradient each."""
    return _ignoring_nan(minimum, a, b)


def _ignoring_nan(function: _Binary, a: Operand, b: Operand) -> Tensor:
    dtype = common_dtype(function.__name__, (a, b))
    if dtype is not None and dtype.kind != "f":
        return function(a, b)
    return where(isnan(a), b, where(isnan(b), a, function(a, b)))


def fma(x: Operand, y: Operand, z: Operand) -> Tensor:
    """``x * y + z``; of floats it is rounded once."""
    dtype = common_dtype("fma", (x, y, z))
    return add(multiply(x, y), z) if dtype is not None and dtype.kind == "i" else _call(_FMA, (x, y, z))


def clip(x: Operand, low: Operand | None = None, high: Operand | None = None) -> Tensor:
    """x limited to the range from `low` to `high`, numbers or tensors, either of which may be absent.

    Outside the range the gradient goes to the bound; where x equals it, half of it.
    """
    if low is None and high is None:
        raise fail("clip", "low and high are both missing")
    result = x if low is None else maximum(x, low)
    return minimum(result, high) if high is not None else result  # type: ignore[return-value]


# ---- comparisons and logic: no derivative ----------------------------------------------------------------------------

_COMPARED: Final = "a comparison has no derivative; use where(comparison, a, b) to choose between tensors"


def _comparison(name: str) -> _Binary:
    operation = _declare(name, None, result=BOOL, kinds="fib", why_not=_COMPARED)

    def function(a: Operand, b: Operand) -> Tensor:
        return _call(operation, (a, b))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Whether each element of a is {name.replace('_', ' ')} to that of b, as bools."
    return function


equal: _Binary = _comparison("equal")
not_equal = _comparison("not_equal")
less = _comparison("less")
less_equal = _comparison("less_equal")
greater = _comparison("greater")
greater_equal = _comparison("greater_equal")


def _logical(name: str, arity: int) -> Callable[..., Tensor]:
    operation = _declare(name, None, result=BOOL, kinds="b", why_not=_BOOLS)

    def function(*operands: Operand) -> Tensor:
        if len(operands) != arity:
            raise TypeError(f"{name}: needs {arity} operands, got {len(operands)}")
        return apply_one(operation, operands, dtype=BOOL)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{name.removeprefix('logical_').capitalize()}, of bools."
    return function


logical_and = _logical("logical_and", 2)
logical_or = _logical("logical_or", 2)
logical_xor = _logical("logical_xor", 2)
logical_not = _logical("logical_not", 1)


# ---- bits of integers ------------------------------------------------------------------------------------------------


def _bits(name: str, arity: int, engine: str, doc: str) -> Callable[..., Tensor]:
    operation = _declare(name, None, kinds="i", engine=engine, why_not="integers have no derivative")

    def function(*operands: Operand) -> Tensor:
        if len(operands) != arity:
            raise TypeError(f"{name}: needs {arity} operands, got {len(operands)}")
        return _call(operation, operands)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


bitwise_and = _bits("bitwise_and", 2, "bit_and", "``a & b``, of integers.")
bitwise_or = _bits("bitwise_or", 2, "bit_or", "``a | b``, of integers.")
bitwise_xor = _bits("bitwise_xor", 2, "bit_xor", "``a ^ b``, of integers.")
bitwise_not = _bits("bitwise_not", 1, "bit_not", "``~x``, of integers.")
left_shift = _bits("left_shift", 2, "shift_left", "``a << b``, of integers; 0 for a count of 64 or more, or below 0.")
right_shift = _bits(
    "right_shift", 2, "shift_right", "``a >> b``, of integers, with the sign kept; a count below 0 counts as 63."
)
_count_bits = _bits("bitwise_count", 1, "bit_count", "")


def bitwise_count(x: Operand) -> Tensor:
    """How many bits of an integer are set."""
    dtype = common_dtype("bitwise_count", (x,))
    if dtype != INTEGERS[0]:
        return _count_bits(x)
    return cast(_count_bits(bitwise_and(cast(x, INTEGERS[1]), 0xFFFFFFFF)), dtype)  # without the bits of its sign


# ---- functions of one operand ----------------------------------------------------------------------------------------

_LN2: Final = math.log(2.0)
_LN10: Final = math.log(10.0)
_ERF_SLOPE: Final = 2.0 / math.sqrt(math.pi)


def _unary(
    name: str,
    derivative: Derivative | None,
    doc: str,
    *,
    engine: str | None = None,
    kinds: str = "f",
    result: np.dtype[Any] | None = None,
) -> _Unary:
    """Without a derivative, the result is bools."""
    derivatives = None if derivative is None else (derivative,)
    operation = _declare(name, derivatives, engine=engine, kinds=kinds, result=result, why_not=_BOOLS)

    def function(x: Operand) -> Tensor:
        return _call(operation, (x,))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _zero(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """The derivative of a function of steps: zeros even where g is NaN."""
    return G.zeros(x.shape, x.dtype)


negative = _unary("negative", lambda g, y, x: -g, "``-x``", engine="neg", kinds="fi")
absolute = _unary("absolute", lambda g, y, x: g * sign(x), "``|x|``", engine="abs", kinds="fi")
sign: _Unary = _unary("sign", _zero, "-1, 0 or 1", kinds="fi")
square = _unary("square", lambda g, y, x: g * (x * 2.0), "``x * x``")
sqrt = _unary("sqrt", lambda g, y, x: g * 0.5 / y, "The square root.")
rsqrt = _unary("rsqrt", lambda g, y, x: g * (y * y * y * -0.5), "``1 / sqrt(x)``")
reciprocal = _unary("reciprocal", lambda g, y, x: -(g * (y * y)), "``1 / x``")
exp = _unary("exp", lambda g, y, x: g * y, "e to the power of x.")
exp2 = _unary("exp2", lambda g, y, x: g * (y * _LN2), "2 to the power of x.")
expm1 = _unary("expm1", lambda g, y, x: g * (y + 1.0), "``exp(x) - 1``, exact for small x.")
log: _Unary = _unary("log", lambda g, y, x: g / x, "The natural logarithm.")
log2 = _unary("log2", lambda g, y, x: g / (x * _LN2), "The logarithm to base 2.")
log10 = _unary("log10", lambda g, y, x: g / (x * _LN10), "The logarithm to base 10.")
log1p = _unary("log1p", lambda g, y, x: g / (x + 1.0), "``log(1 + x)``, exact for small x.")
sin = _unary("sin", lambda g, y, x: g * cos(x), "The sine.")
cos: _Unary = _unary("cos", lambda g, y, x: -(g * sin(x)), "The cosine.")
tan = _unary("tan", lambda g, y, x: g * (y * y + 1.0), "The tangent.")
arcsin = _unary("arcsin", lambda g, y, x: g * rsqrt(1.0 - x * x), "The inverse sine.", engine="asin")
arccos = _unary("arccos", lambda g, y, x: -(g * rsqrt(1.0 - x * x)), "The inverse cosine.", engine="acos")
arctan = _unary("arctan", lambda g, y, x: g / (x * x + 1.0), "The inverse tangent.", engine="atan")
sinh = _unary("sinh", lambda g, y, x: g * cosh(x), "The hyperbolic sine.")
cosh: _Unary = _unary("cosh", lambda g, y, x: g * sinh(x), "The hyperbolic cosine.")
tanh = _unary("tanh", lambda g, y, x: g * (1.0 - y * y), "The hyperbolic tangent.")
arcsinh = _unary("arcsinh", lambda g, y, x: g * rsqrt(x * x + 1.0), "The inverse of sinh.", engine="asinh")
arccosh = _unary("arccosh", lambda g, y, x: g * rsqrt(x * x - 1.0), "The inverse of cosh.", engine="acosh")
arctanh = _unary("arctanh", lambda g, y, x: g / (1.0 - x * x), "The inverse of tanh.", engine="atanh")
erf = _unary("erf", lambda g, y, x: g * (exp(-(x * x)) * _ERF_SLOPE), "The error function.")
sigmoid = _unary("sigmoid", lambda g, y, x: g * (y * (1.0 - y)), "``1 / (1 + exp(-x))``")
relu = _unary("relu", lambda g, y, x: where(x > 0.0, g, 0.0), "``max(x, 0)``; its derivative at 0 is 0.")
floor: _Unary = _unary("floor", _zero, "The largest integer that is not above x.")
ceil = _unary("ceil", _zero, "The smallest integer that is not below x.")
round = _unary("round", _zero, "The nearest integer; halves to the even one.")
trunc: _Unary = _unary("trunc", _zero, "x without its fraction.")
_sign_bit: _Unary = _unary("signbit", None, "", engine="sign_bit", result=BOOL)
isnan: _Unary = _unary("isnan", None, "Whether x is NaN, as bools.", engine="is_nan", result=BOOL)
isinf = _unary("isinf", None, "Whether x is infinite, as bools.", engine="is_inf", result=BOOL)
isfinite = _unary("isfinite", None, "Whether x is finite, as bools.", engine="is_finite", result=BOOL)


def signbit(x: Operand) -> Tensor:
    """Whether the sign of x is negative, as bools; that of -0 and of some NaN is."""
    dtype = common_dtype("signbit", (x,))
    return less(x, 0) if dtype is not None and dtype.kind == "i" else _sign_bit(x)


def exp10(x: Operand) -> Tensor:
    """``10 ** x``"""
    return power(10.0, x)


def round_away(x: Operand) -> Tensor:
    """The nearest integer; halves away from 0."""
    whole = trunc(x)
    return where(greater_equal(absolute(subtract(x, whole)), 0.5), add(whole, sign(x)), whole)


# ---- copies ----------------------------------------------------------------------------------------------------------


def _copy(inputs: Sequence[Array], results: Sequence[Array], **_: object) -> None:
    run_map([], inputs, [], results, [0])


COPY: Final = Operation(
    "copy", lambda x: (x,), compute=_copy, contiguous=(), in_place=[(0, 0)],
    gradient=lambda node, given, needed: given,
)  # fmt: skip


def _cast_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (x,), (g,) = node.inputs, given
    assert x is not None
    return [None if g is None or x.dtype.kind != "f" else cast(g, x.dtype)]


_CAST: Final = Operation(
    "cast", lambda x, *, dtype: (Spec(x.shape, dtype),), compute=_copy, contiguous=(), gradient=_cast_gradient
)


def cast(x: Operand, dtype: npt.DTypeLike) -> Tensor:
    """x with another dtype. Floats become integers by truncation, within their range; NaN becomes 0."""
    wanted = np.dtype(dtype)
    if wanted not in DTYPES:
        raise fail("cast", f"dtype is {wanted}, must be one of {', '.join(d.name for d in DTYPES)}", TypeError)
    if in_trace((x,)) and (tensor := as_tensor(x)).dtype == wanted:
        return tensor
    return apply_one(_CAST, (x,), {"dtype": wanted})


def identity(x: Operand) -> Tensor:
    """x itself.

    Inside a trace tensors and variables give a tensor; everything else gives an array.
    """
    return as_tensor(x) if in_trace((x,)) else as_array(x)  # type: ignore[return-value]
