"""Random tensors. A seed, or a state, determines them: they are the same at any number of threads and on every machine.

The bits are those of Philox4x32-10. A seed that is a counter (`next_count`) draws other numbers in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _core
from ..ops._types import Array
from .elementwise import (
    add,
    cast,
    clip,
    divide,
    fma,
    left_shift,
    less,
    log,
    minimum,
    multiply,
    negative,
    right_shift,
    sqrt,
    subtract,
    where,
)
from .indexing import as_seed
from .operation import Operation, Spec
from .reduction import INT64, refuse
from .shaping import concatenate, reshape, take_slice
from .tensor import FLOATS, INTEGERS, Operand, Tensor, apply, fail

_STATE: Final = Spec((7,), INTEGERS[0])


def _shapes(state: Spec, *, count: int) -> Sequence[Spec]:
    if state != _STATE:
        raise TypeError(f"state is {state!r}, must be {_STATE!r}")
    return Spec((count,), INT64), _STATE


def _philox(inputs: Sequence[Array], results: Sequence[Array], *, count: int) -> None:
    refuse(_core.philox(inputs[0], results[0], results[1], False, 0))


_PHILOX: Final = Operation(
    "philox", _shapes, compute=_philox, why_not="random bits have none", flops=lambda i, r, *, count: 10.0 * count
)


class Philox(NamedTuple):
    """Random numbers, and the state that continues after them."""

    values: Tensor
    state: Tensor


def philox(shape: Sequence[int], state: Operand) -> Philox:
    """Numbers in [0, 1), float32, that are multiples of 2**-23, of Philox4x32-10 in a state, and the state after them.

    The state is int32: 1, the four words of the counter, of which the last counts blocks, and the two of the key.
    Element i is word i % 4 of block i / 4.
    """
    words, after = apply(_PHILOX, (state,), {"count": math.prod(shape)}, dtype=INTEGERS[0])
    numbers = multiply(cast(right_shift(words, 9), FLOATS[0]), 2.0**-23)
    return Philox(reshape(numbers, tuple(shape)), after)


def _words(name: str, shape: Sequence[int], seed: Operand) -> Tensor:
    """Numbers from 0 to below 2**32, int64."""
    given: Any = as_seed(seed)
    if tuple(given.shape) != () or given.dtype != INT64:
        raise fail(name, f"seed is {Spec(tuple(given.shape), given.dtype)!r}, must be one int64", TypeError)
    key = [right_shift(left_shift(given, 32), 32), right_shift(given, 32)]  # the low and the high half, with signs
    halves = [reshape(cast(half, INTEGERS[0]), (1,)) for half in key]
    state = concatenate([np.array([1, 0, 0, 0, 0], INTEGERS[0]), *halves])
    words: Tensor = apply(_PHILOX, (state,), {"count": math.prod(shape)})[0]
    return reshape(words, tuple(shape))


def _check(name: str, dtype: npt.DTypeLike, allowed: Sequence[np.dtype[Any]], **numbers: float) -> np.dtype[Any]:
    for argument, value in numbers.items():
        if not math.isfinite(value):
            raise fail(name, f"{argument} is {value}, must be finite")
    found = np.dtype(dtype)
    if found not in allowed:
        raise fail(name, f"dtype is {found}, must be one of {', '.join(d.name for d in allowed)}", TypeError)
    return found


def random_uniform(
    shape: Sequence[int], low: float = 0.0, high: float = 1.0, seed: Operand = 0, dtype: npt.DTypeLike = FLOATS[0]
) -> Tensor:
    """Numbers that are uniform in [low, high)."""
    chosen = _check("random_uniform", dtype, FLOATS, low=low, high=high)
    if not low < high:
        raise fail("random_uniform", f"low is {low}, must be below high, which is {high}")
    if chosen == FLOATS[0]:
        unit = multiply(cast(right_shift(_words("random_uniform", shape, seed), 8), chosen), 2.0**-24)
    else:
        both = _words("random_uniform", (2, *shape), seed)  # 27 bits and 26
        first, second = right_shift(take_slice(both, 0), 5), right_shift(take_slice(both, 1), 6)
        unit = multiply(cast(add(left_shift(first, 26), second), chosen), 2.0**-53)
    if (low, high) == (0, 1):
        return unit
    below = np.nextafter(chosen.type(high), chosen.type(low))  # rounding must not reach the end
    return minimum(fma(unit, float(high) - float(low), float(low)), float(below))


def random_normal(
    shape: Sequence[int], mean: float = 0.0, std: float = 1.0, seed: Operand = 0, dtype: npt.DTypeLike = FLOATS[0]
) -> Tensor:
    """Numbers of a normal distribution, by the inverse of its cumulative distribution."""
    chosen = _check("random_normal", dtype, FLOATS, mean=mean, std=std)
    if std < 0:
        raise fail("random_normal", f"std is {std}, must be at least 0")
    return cast(fma(_quantile(_middles("random_normal", shape, seed)), float(std), float(mean)), chosen)


def truncated_normal(
    shape: Sequence[int],
    mean: float = 0.0,
    std: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
    seed: Operand = 0,
    dtype: npt.DTypeLike = FLOATS[0],
) -> Tensor:
    """Numbers of a normal distribution that are in [low, high]."""
    chosen = _check("truncated_normal", dtype, FLOATS, mean=mean, std=std, low=low, high=high)
    if not low < high or not std > 0:
        raise fail("truncated_normal", f"low is {low}, high {high} and std {std}; low must be below high, std above 0")
    first, last = (low - mean) / std, (high - mean) / std
    upper = first > 0  # there the probabilities of the mirrored interval are exact
    if upper:
        first, last = -last, -first
    start, end = (math.erfc(-x / math.sqrt(2.0)) / 2 for x in (first, last))
    if not start < end:
        raise fail("truncated_normal", f"[{low}, {high}] is too far from the mean {mean}, for std {std}")
    found = _quantile(fma(_middles("truncated_normal", shape, seed), end - start, start))
    scaled = fma(negative(found) if upper else found, float(std), float(mean))
    edges = [float(chosen.type(edge)) for edge in (low, high)]
    return clip(cast(scaled, chosen), *edges)


def random_integers(
    shape: Sequence[int], low: int = 0, high: int = 2**31 - 1, seed: Operand = 0, dtype: npt.DTypeLike = INTEGERS[0]
) -> Tensor:
    """Integers that are uniform in [low, high)."""
    chosen = _check("random_integers", dtype, INTEGERS)
    limits = np.iinfo(chosen)
    if not limits.min <= low < high <= limits.max + 1 or high - low > 2**31:
        raise fail(
            "random_integers", f"low is {low} and high {high}; low must be below high, by at most 2**31, and both in "
            f"the range of {chosen}",
        )  # fmt: skip
    words = _words("random_integers", shape, seed)
    return cast(add(right_shift(multiply(words, int(high) - int(low)), 32), int(low)), chosen)


def _middles(name: str, shape: Sequence[int], seed: Operand) -> Tensor:
    """Numbers between 0 and 1, float64, in the middles of 2**32 equal intervals."""
    return multiply(add(cast(_words(name, shape, seed), FLOATS[1]), 0.5), 2.0**-32)


# The inverse of the normal distribution, by P. J. Acklam's rational functions, within 1.2e-9 of its value.
_TAIL: Final = 0.02425
_CENTRE_NUMERATOR: Final = (
    -3.969683028665376e01, 2.209460984245205e02, -2.759285104469687e02, 1.383577518672690e02, -3.066479806614716e01,
    2.506628277459239e00,
)  # fmt: skip
_CENTRE_DENOMINATOR: Final = (
    -5.447609879822406e01, 1.615858368580409e02, -1.556989798598866e02, 6.680131188771972e01, -1.328068155288572e01,
    1.0,
)  # fmt: skip
_TAIL_NUMERATOR: Final = (
    -7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e00, -2.549732539343734e00, 4.374664141464968e00,
    2.938163982698783e00,
)  # fmt: skip
_TAIL_DENOMINATOR: Final = (
    7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e00, 3.754408661907416e00, 1.0,
)  # fmt: skip


def _quantile(p: Tensor) -> Tensor:
    """The numbers that normal ones are below with these probabilities, which are between 0 and 1; float64."""
    upper = less(0.5, p)
    lower = where(upper, subtract(1.0, p), p)
    q = sqrt(multiply(log(minimum(lower, _TAIL)), -2.0))
    tail = divide(_polynomial(q, _TAIL_NUMERATOR), _polynomial(q, _TAIL_DENOMINATOR))
    d = subtract(p, 0.5)
    r = multiply(d, d)
    centre = multiply(d, divide(_polynomial(r, _CENTRE_NUMERATOR), _polynomial(r, _CENTRE_DENOMINATOR)))
    return where(less(lower, _TAIL), where(upper, negative(tail), tail), centre)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    value: Any = coefficients[0]
    for coefficient in coefficients[1:]:
        value = fma(value, x, coefficient)
    return value  # type: ignore[no-any-return]
