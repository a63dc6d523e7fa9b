"""Random generators, and arrays filled with what they draw.

Apple's bit stream is not published, so this one is retrograd's: Philox, whose n-th number depends only on the seed and
on n. The state of a generator is its seed and how many numbers it has drawn.
"""

from __future__ import annotations

import math
import secrets
import struct
import threading
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _constants as c
from ._arguments import checked_object
from ._conversion import INTEGERS
from ._direct import Descriptor, Given, Operand, Operands, Parameters, as_stored, floating
from ._failure import Invalid, Unsupported, status
from ._filter import check_same_type, checked_descriptor, checked_parameters, unlike
from ._memory import Array, as_float, as_signed, as_size, bytes_of, check_writable, data_type_of, is_first_major
from ._names import constant_name

_Doubles: TypeAlias = npt.NDArray[np.float64]
_STATE: Final = struct.Struct("<8sQQ")  # a magic number, the seed, the position
_MAGIC: Final = b"RGBNNSR1"


class BNNSRandomGenerator:
    """A generator of random numbers. Opaque: use it only through the BNNS functions.

    Threads may share one: a call that fills an array has it to itself.
    """

    def __init__(self, method: object, seed: int, parameters: object) -> None:
        if method != c.BNNSRandomGeneratorMethodAES_CTR:
            raise Invalid(f"method is {method!r}, must be BNNSRandomGeneratorMethodAES_CTR")
        checked_parameters(parameters)
        self.seed, self.position = seed, 0
        self.lock = threading.Lock()
        self.destroyed = False

    def bits(self, count: int) -> npt.NDArray[np.uint64]:
        """The next `count` numbers of 64 bits. The caller holds the lock."""
        stream = np.random.Philox(key=self.seed)
        block, first = divmod(self.position, 4)  # Philox makes four at a time
        stream.advance(block)
        drawn: npt.NDArray[np.uint64] = stream.random_raw(first + count)[first:]
        self.position = (self.position + count) % 2**64
        return drawn

    def uniform(self, count: int) -> _Doubles:
        """Numbers in [0, 1), multiples of 2**-53."""
        return np.asarray((self.bits(count) >> np.uint64(11)) * 2.0**-53)

    def integers(self, low: int, high: int, count: int) -> npt.NDArray[np.int64]:
        """Integers from `low` to `high`, both included, and equally likely."""
        width = high - low
        found = np.zeros(count, np.uint64)
        left = np.arange(count) if width else np.arange(0)
        while left.size:  # draw again where the number is too large: on average less than once
            numbers = self.bits(left.size) >> np.uint64(64 - width.bit_length())
            fits = numbers <= np.uint64(width)
            found[left[fits]] = numbers[fits]
            left = left[~fits]
        return np.asarray((found + np.uint64(low % 2**64)).view(np.int64))

    def normal(self, count: int) -> _Doubles:
        """Numbers of the standard normal distribution, by Box and Muller, each from two uniform ones."""
        pairs = self.uniform(2 * count).reshape(count, 2)
        return np.asarray(np.sqrt(-2.0 * np.log1p(-pairs[:, 0])) * np.cos(2.0 * math.pi * pairs[:, 1]))


Generator: TypeAlias = BNNSRandomGenerator | None


def _checked(generator: object) -> BNNSRandomGenerator:
    checked = checked_object("generator", BNNSRandomGenerator, generator)
    if checked.destroyed:
        raise Invalid("generator has been destroyed")
    return checked


_PRECISION: Final = {"float32": 24, "float16": 11, "bfloat16": 8}  # bits
_NUMBERS: Final = Operands(floating("desc", written=True))
_INTEGERS: Final = Operands(
    Operand("desc", INTEGERS, written=True, rotated=True, order=as_stored, kind="an integer type")
)
_PROBABILITIES: Final = Operands(floating("probabilities"))


def _finite(name: str, value: object) -> float:
    number = as_float(name, value)
    if not math.isfinite(number):
        raise Invalid(f"{name} is {number}, must be finite")
    return number


# ---- generators -----------------------------------------------------------------------------------------------------


@status(None)
def BNNSCreateRandomGenerator(method: int, filter_params: Parameters = None) -> Generator:
    """Create a generator with a random seed. None on failure."""
    return BNNSRandomGenerator(method, secrets.randbits(64), filter_params)


@status(None)
def BNNSCreateRandomGeneratorWithSeed(method: int, seed: int, filter_params: Parameters = None) -> Generator:
    """Create a generator with a seed of 64 bits: equal seeds draw equal numbers. None on failure."""
    return BNNSRandomGenerator(method, as_size("seed", seed), filter_params)


@status(None, clears=False)
def BNNSDestroyRandomGenerator(generator: Generator) -> None:
    """Release a generator. None and generators that have already been destroyed are accepted."""
    if generator is not None:
        checked_object("generator", BNNSRandomGenerator, generator).destroyed = True


@status(0)
def BNNSRandomGeneratorStateSize(generator: Generator) -> int:
    """Return the bytes of a generator's state. 0 on failure."""
    _checked(generator)
    return _STATE.size


@status(-1)
def BNNSRandomGeneratorGetState(generator: Generator, state_size: int, state: object) -> int:
    """Write the state to a buffer, from which :func:`BNNSRandomGeneratorSetState` continues. 0, or -1 on failure."""
    checked = _checked(generator)
    memory = _state(state_size, state)
    check_writable("state", memory)
    with checked.lock:
        _STATE.pack_into(memory.data, 0, _MAGIC, checked.seed, checked.position)
    return 0


@status(-1)
def BNNSRandomGeneratorSetState(generator: Generator, state_size: int, state: object) -> int:
    """Continue from a state that :func:`BNNSRandomGeneratorGetState` has written. 0, or -1 on failure."""
    checked = _checked(generator)
    magic, seed, position = _STATE.unpack_from(_state(state_size, state).data)
    if magic != _MAGIC:
        raise Invalid("state is not one that BNNSRandomGeneratorGetState has written")
    with checked.lock:
        checked.seed, checked.position = seed, position
    return 0


def _state(state_size: object, state: object) -> Array:
    size = as_size("state_size", state_size)
    if size < _STATE.size:
        raise Invalid(f"state_size is {size}, but the state has {_STATE.size} bytes")
    if state is None:
        raise Invalid("state is NULL")
    memory = bytes_of("state", state)
    if memory.size < size:
        raise Invalid(f"state_size is {size}, but the buffer has {memory.size} bytes")
    return memory


# ---- arrays ---------------------------------------------------------------------------------------------------------


@status(-1)
def BNNSRandomFillUniformFloat(generator: Generator, desc: Descriptor, a: float, b: float) -> int:
    """Fill an array with numbers that are uniform in [a, b). 0, or -1 on failure."""
    checked, (target,) = _checked(generator), _NUMBERS(desc)
    low, high = _finite("a", a), _finite("b", b)
    if low > high:
        raise Invalid(f"a is {low}, must be at most b, which is {high}")
    # Rounding must not leave the interval: the first and the last number of this type in it.
    dtype = target.array.dtype
    first, last = _in_interval(low, high, dtype)
    if first > last:
        shown = constant_name("BNNSDataType", desc.data_type)
        raise Invalid(f"there is no {shown} in [a, b), which is [{low}, {high})")
    with checked.lock:
        numbers = low + (high - low) * checked.uniform(target.array.size)
    target.fill(np.clip(numbers.astype(dtype).astype(np.float64), first, last))
    return 0


def _in_interval(low: float, high: float, dtype: npt.DTypeLike) -> tuple[float, float]:
    """The smallest number of a type that is at least `low`, and the largest below `high` (or `low`, if they agree)."""
    with np.errstate(all="ignore"):
        first, last = (np.asarray(value).astype(dtype) for value in (low, high))
        if float(first) < low:  # as Python numbers: NumPy would round `low` to this type first
            first = np.nextafter(first, np.asarray(np.inf, dtype))
        if float(last) >= high > low:
            last = np.nextafter(last, np.asarray(-np.inf, dtype))
    return float(first), float(last)


@status(-1)
def BNNSRandomFillUniformInt(generator: Generator, desc: Descriptor, a: int, b: int) -> int:
    """Fill an array with integers that are uniform in [a, b). 0, or -1 on failure."""
    low, high = as_signed("a", a, 64), as_signed("b", b, 64)
    if low >= high:
        raise Invalid(f"a is {low}, must be below b, which is {high}")
    return _fill_integers(generator, desc, low, high - 1)


@status(-1, name="BNNSRandomFillUniformInt")
def fill_closed(generator: Generator, desc: Descriptor, a: int, b: int) -> int:
    """The same for a range that includes b, as in Swift. Not one of Apple's functions."""
    low, high = as_signed("a", a, 64), as_signed("b", b, 64)
    if low > high:
        raise Invalid(f"a is {low}, must be at most b, which is {high}")
    return _fill_integers(generator, desc, low, high)


def _fill_integers(generator: object, desc: Descriptor, low: int, high: int) -> int:
    """Fill an array with integers from `low` to `high`, both included."""
    checked, (target,) = _checked(generator), _INTEGERS(desc)
    limits = np.iinfo(target.array.dtype)
    if low < limits.min or high > limits.max:
        shown = constant_name("BNNSDataType", desc.data_type)
        raise Invalid(f"the integers from {low} to {high} do not fit into desc.data_type, which is {shown}")
    with checked.lock:
        target.fill(checked.integers(low, high, target.array.size))
    return 0


@status(-1)
def BNNSRandomFillNormalFloat(generator: Generator, desc: Descriptor, mean: float, stddev: float) -> int:
    """Fill an array with numbers of a normal distribution. 0, or -1 on failure."""
    checked, (target,) = _checked(generator), _NUMBERS(desc)
    centre, spread = _finite("mean", mean), _finite("stddev", stddev)
    if spread < 0:
        raise Invalid(f"stddev is {spread}, must be at least 0")
    with checked.lock:
        target.fill(centre + spread * checked.normal(target.array.size))
    return 0


@status(-1)
def BNNSRandomFillCategoricalFloat(
    generator: Generator, desc: Descriptor, probabilities: Descriptor, log_probabilities: bool
) -> int:
    """Fill an array with the indices of randomly chosen categories, as floating-point numbers. 0, or -1 on failure.

    The fastest axis of `probabilities` is that of the categories; other axes are those of `desc`. A single axis applies
    to all of `desc`. Probabilities need not add up to 1. `log_probabilities`: they are logarithms.
    """
    checked, (target,) = _checked(generator), _NUMBERS(desc)
    check_same_type("probabilities", checked_descriptor("probabilities", probabilities), "desc", desc)
    (given,) = _PROBABILITIES(probabilities)
    weights = _weights(target, given, bool(log_probabilities))
    sums = np.cumsum(weights, axis=-1)
    with checked.lock:
        uniform = checked.uniform(target.array.size).reshape(target.array.shape)
    if weights.ndim == 1:
        chosen = np.searchsorted(sums, _below(uniform * sums[-1], sums[-1]), side="right")
    else:
        points = _below(uniform * sums[..., -1], sums[..., -1])
        chosen = (sums <= points[..., None]).sum(axis=-1)
    target.fill(chosen)
    return 0


def _below(points: _Doubles, totals: _Doubles) -> _Doubles:
    """Points that rounding has not brought to the total, so that a category of probability 0 is never chosen."""
    return np.asarray(np.minimum(points, np.nextafter(totals, 0.0)))


def _weights(desc: Given, probabilities: Given, logarithms: bool) -> _Doubles:
    """Probabilities up to a factor, ``[..., categories]``."""
    name, layout, wanted = probabilities.name, probabilities.geometry.layout, desc.geometry
    values = probabilities.array.astype(np.float64)
    known = layout in (c.BNNSDataLayoutVector, c.BNNSDataLayoutRowMajorMatrix) or is_first_major(layout)
    if not known and values.ndim > 1:
        shown = constant_name("BNNSDataLayout", layout)
        raise Unsupported(f"{name}.layout is {shown}; it must be Vector, RowMajorMatrix or first-major")
    most = 2 ** _PRECISION[wanted.dtype.name] + 1
    if values.shape[-1] > most:
        shown = constant_name("BNNSDataType", data_type_of(wanted.dtype))
        raise Invalid(f"{name} has {values.shape[-1]} categories, but {shown} holds the indices of {most} at most")
    if values.ndim > 1 and values.shape[:-1] != wanted.shape:
        leading = probabilities.geometry._replace(extents=values.shape[:-1][::-1])
        raise unlike("desc", wanted, f"{name}, without its categories", leading)
    if logarithms and not (values < np.inf).all():
        raise Invalid(f"{name} holds NaN or positive infinity")
    if not logarithms and not (np.isfinite(values) & (values >= 0)).all():
        raise Invalid(f"{name} holds values that are negative, infinite or NaN")
    largest = values.max(axis=-1, keepdims=True)
    if (largest == (-np.inf if logarithms else 0)).any():
        raise Invalid(f"{name} holds a distribution with no possible category")
    return np.asarray(np.exp(values - largest)) if logarithms else values
