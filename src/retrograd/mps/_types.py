"""Constants, enumerations and small structures of Metal and Metal Performance Shaders, under Swift's names."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Any, Final, Generic, NamedTuple, TypeVar, overload

import numpy as np

NSUIntegerMax: Final = 2**64 - 1
LARGEST_SIZE: Final = int(np.iinfo(np.intp).max)  # of an object in memory, in bytes
FLT_MIN: Final = float(np.finfo(np.float32).tiny)


class MPSDataType(IntEnum):
    invalid = 0
    floatBit = 0x10000000
    float16 = 0x10000010
    float32 = 0x10000020
    signedBit = 0x20000000
    int8 = 0x20000008
    int16 = 0x20000010
    int32 = 0x20000020
    int64 = 0x20000040
    uInt8 = 8
    uInt16 = 16
    uInt32 = 32
    uInt64 = 64
    normalizedBit = 0x40000000
    unorm1 = 0x40000001
    unorm8 = 0x40000008
    alternateEncodingBit = 0x80000000
    bool = 0x80000008
    bFloat16 = 0x90000010
    float64 = 0x10000040  # retrograd's; Apple has none


# Element types of matrices and vectors.
NUMPY_TYPES: Final[dict[int, np.dtype[Any]]] = {
    MPSDataType.float16: np.dtype(np.float16),
    MPSDataType.float32: np.dtype(np.float32),
    MPSDataType.int8: np.dtype(np.int8),
    MPSDataType.int16: np.dtype(np.int16),
    MPSDataType.int32: np.dtype(np.int32),
    MPSDataType.int64: np.dtype(np.int64),
    MPSDataType.uInt8: np.dtype(np.uint8),
    MPSDataType.uInt16: np.dtype(np.uint16),
    MPSDataType.uInt32: np.dtype(np.uint32),
    MPSDataType.uInt64: np.dtype(np.uint64),
    MPSDataType.unorm8: np.dtype(np.uint8),
}


class MPSCNNNeuronType(IntEnum):
    none = 0
    reLU = 1
    linear = 2
    sigmoid = 3
    hardSigmoid = 4
    tanH = 5
    absolute = 6
    softPlus = 7
    softSign = 8
    elu = 9
    pReLU = 10
    reLUN = 11
    power = 12
    exponential = 13
    logarithm = 14
    geLU = 15
    count = 16  # not a function


class MPSRNNSequenceDirection(IntEnum):
    forward = 0
    backward = 1


class MPSRNNMatrixId(IntEnum):
    """The weights of a recurrent layer."""

    singleGateInputWeights = 0
    singleGateRecurrentWeights = 1
    singleGateBiasTerms = 2
    lstmInputGateInputWeights = 3
    lstmInputGateRecurrentWeights = 4
    lstmInputGateMemoryWeights = 5
    lstmInputGateBiasTerms = 6
    lstmForgetGateInputWeights = 7
    lstmForgetGateRecurrentWeights = 8
    lstmForgetGateMemoryWeights = 9
    lstmForgetGateBiasTerms = 10
    lstmMemoryGateInputWeights = 11
    lstmMemoryGateRecurrentWeights = 12
    lstmMemoryGateMemoryWeights = 13
    lstmMemoryGateBiasTerms = 14
    lstmOutputGateInputWeights = 15
    lstmOutputGateRecurrentWeights = 16
    lstmOutputGateMemoryWeights = 17
    lstmOutputGateBiasTerms = 18
    gruInputGateInputWeights = 19
    gruInputGateRecurrentWeights = 20
    gruInputGateBiasTerms = 21
    gruRecurrentGateInputWeights = 22
    gruRecurrentGateRecurrentWeights = 23
    gruRecurrentGateBiasTerms = 24
    gruOutputGateInputWeights = 25
    gruOutputGateRecurrentWeights = 26
    gruOutputGateInputGateWeights = 27
    gruOutputGateBiasTerms = 28
    MPSRNNMatrixId_count = 29  # not a matrix; Swift keeps this name


class MPSKernelOptions(IntFlag):
    none = 0
    skipAPIValidation = 1
    allowReducedPrecision = 2
    disableInternalTiling = 4
    insertDebugGroups = 8
    verbose = 16


class MTLResourceOptions(IntFlag):
    cpuCacheModeDefaultCache = 0
    storageModeShared = 0
    cpuCacheModeWriteCombined = 1
    storageModeManaged = 16
    storageModePrivate = 32
    storageModeMemoryless = 48
    hazardTrackingModeUntracked = 0x100
    hazardTrackingModeTracked = 0x200


class MTLStorageMode(IntEnum):
    shared = 0
    managed = 1
    private = 2
    memoryless = 3


class MTLCommandBufferStatus(IntEnum):
    notEnqueued = 0
    enqueued = 1
    committed = 2
    scheduled = 3
    completed = 4
    error = 5


class MTLOrigin(NamedTuple):
    """The origin of a window. In matrix kernels x counts rows, y counts columns, and z is 0."""

    x: int = 0
    y: int = 0
    z: int = 0


class MTLSize(NamedTuple):
    """A size in three dimensions."""

    width: int = 0
    height: int = 0
    depth: int = 0


class NSRange(NamedTuple):
    """The range of `length` elements that begins at `location`."""

    location: int = 0
    length: int = 0


def MTLOriginMake(x: int, y: int, z: int) -> MTLOrigin:
    """Return the origin of a window of a matrix: x is the row, y the column."""
    return MTLOrigin(x, y, z)


def MTLSizeMake(width: int, height: int, depth: int) -> MTLSize:
    """Return a size in three dimensions."""
    return MTLSize(width, height, depth)


def NSMakeRange(location: int, length: int) -> NSRange:
    """Return the range of `length` elements that begins at `location`."""
    return NSRange(location, length)


class NSError(RuntimeError):
    """A command buffer's `error`. Its `__cause__` is the original exception."""

    def __init__(self, description: str, domain: str = "MTLCommandBufferErrorDomain", code: int = 1) -> None:
        super().__init__(description)
        self._domain = domain
        self._code = code

    @property
    def localizedDescription(self) -> str:
        return str(self)

    @property
    def domain(self) -> str:
        return self._domain

    @property
    def code(self) -> int:
        return self._code

    @property
    def userInfo(self) -> dict[str, str]:
        return {"NSLocalizedDescription": str(self)}


# ---- checks ----------------------------------------------------------------------------------------------------------


def as_unsigned(name: str, value: object) -> int:
    """Check an NSUInteger."""
    try:
        number = int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None
    if not 0 <= number <= NSUIntegerMax:
        raise ValueError(f"{name} is {number}, must be from 0 to 2**64 - 1")
    return number


def as_float(name: str, value: Any) -> float:
    """Round to a C float."""
    if isinstance(value, str) or not hasattr(value, "__float__") or (isinstance(value, np.ndarray) and value.ndim):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    try:
        return ctypes.c_float(float(value)).value
    except OverflowError:
        raise ValueError(f"{name} is an {type(value).__name__} too large for a float") from None


def as_bool(name: str, value: object) -> bool:
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name} must be a bool, not {value!r}")


def as_label(name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{name} must be a str or None, not {type(value).__name__}")


def as_origin(name: str, value: Any) -> MTLOrigin:
    try:
        x, y, z = value
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be an MTLOrigin or a tuple of 3 ints, not {value!r}") from None
    return MTLOrigin(as_unsigned(f"{name}.x", x), as_unsigned(f"{name}.y", y), as_unsigned(f"{name}.z", z))


def as_flags(name: str, value: object) -> int:
    """A set of options: an int, or a list of them as in Swift's brackets."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        return as_unsigned(name, value)
    flags = 0
    for flag in value:
        flags |= as_unsigned(name, flag)
    return flags


def as_options(name: str, value: object) -> MPSKernelOptions:
    return MPSKernelOptions(as_flags(name, value))


def as_data_type(name: str, value: object) -> MPSDataType:
    code = as_unsigned(name, value)
    if code not in NUMPY_TYPES:
        known = ", ".join(MPSDataType(known_code).name for known_code in NUMPY_TYPES)
        raise ValueError(f"{name} is {code:#x}, which is not an element type; the element types are {known}")
    return MPSDataType(code)


# ---- members ---------------------------------------------------------------------------------------------------------

T = TypeVar("T")


class Setting(Generic[T]):
    """A member with a default, checked when set and stored in the attribute of the same name with an underscore.

    The classes read only that attribute, never the member: in PyObjC classes a method has the member's name.
    """

    writable = True

    def __init__(self, check: Callable[[str, object], T], default: T, doc: str) -> None:
        self.check = check
        self.default = default
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.attribute = "_" + name

    @overload
    def __get__(self, instance: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object, owner: type) -> Setting[T] | T:
        if instance is None:
            return self
        value: T = getattr(instance, self.attribute)
        return value

    def __set__(self, instance: object, value: Any) -> None:
        if not self.writable:
            raise AttributeError(f"{type(instance).__name__}.{self.name} is read-only")
        setattr(instance, self.attribute, self.check(f"{type(instance).__name__}.{self.name}", value))


class Members:
    """Only members can be set: misspelled names, and members that are methods in PyObjC, raise AttributeError."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            for base in type(self).__mro__:
                if name in base.__dict__:
                    if hasattr(base.__dict__[name], "__set__"):
                        break
                    raise AttributeError(f"{type(self).__name__}.{name} is a method; it cannot be set")
            else:
                raise AttributeError(f"{type(self).__name__} has no member {name}")
        object.__setattr__(self, name, value)
