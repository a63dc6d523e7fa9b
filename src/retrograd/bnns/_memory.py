"""Descriptors and buffers as arrays, with every bound known; and where a filter's own memory comes from.

Sizes, strides and counts come from outside and may be any number at all. They are compared with the length of the
buffer as Python's unlimited integers before NumPy sees them.
"""

from __future__ import annotations

import ctypes
import math
import operator
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _constants as c
from ._failure import Invalid, Unsupported, note
from ._names import constant_name

Array: TypeAlias = npt.NDArray[Any]

_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    c.BNNSDataTypeFloat32: np.dtype(np.float32),
    c.BNNSDataTypeFloat16: np.dtype(np.float16),
    c.BNNSDataTypeInt8: np.dtype(np.int8),
    c.BNNSDataTypeInt16: np.dtype(np.int16),
    c.BNNSDataTypeInt32: np.dtype(np.int32),
    c.BNNSDataTypeInt64: np.dtype(np.int64),
    c.BNNSDataTypeUInt8: np.dtype(np.uint8),
    c.BNNSDataTypeUInt16: np.dtype(np.uint16),
    c.BNNSDataTypeUInt32: np.dtype(np.uint32),
    c.BNNSDataTypeUInt64: np.dtype(np.uint64),
    c.BNNSDataTypeBoolean: np.dtype(np.bool_),
}
_OPAQUE_LAYOUTS: Final = (
    c.BNNSDataLayoutFullyConnectedSparse,
    c.BNNSDataLayoutMHA_DHK,
    c.BNNSDataLayoutConvolutionWeightsOIHW_Pack32,
)
# Every layout whose extents and strides say all.
_LAYOUTS: Final = frozenset(
    value for name, value in vars(c).items() if name.startswith("BNNSDataLayout") and value not in _OPAQUE_LAYOUTS
)
_FIELD_NAME: Final = re.compile(":[^:]*:")  # in the format of a structure
_C_FLOAT: Final = struct.Struct("<f")
_BYTE: Final = np.dtype(np.uint8)
C_FUNCTION: Final[type[Any]] = ctypes.CFUNCTYPE(None).__mro__[1]  # every ctypes function is one


class Geometry(NamedTuple):
    """An array without its memory. Extents and strides are fastest first, `shape` and `steps` slowest first."""

    dtype: np.dtype[Any]
    extents: tuple[int, ...]
    strides: tuple[int, ...]  # in values
    shape: tuple[int, ...]
    steps: tuple[int, ...]  # in bytes
    elements: int
    span: int  # values from the first to the last, both included
    may_overlap: bool  # two elements could share memory
    dense: bool  # nothing lies between two elements
    proper_extents: tuple[int, ...]  # those that are not 1


def dtype_of(data_type: Any) -> np.dtype[Any]:
    """NumPy's type for a BNNSDataType."""
    dtype = _DTYPES.get(data_type) if isinstance(data_type, int) else None
    if dtype is None:
        if data_type == c.BNNSDataTypeBFloat16:
            import ml_dtypes

            bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
            _DTYPES[c.BNNSDataTypeBFloat16] = bfloat16
            return bfloat16
        raise Invalid(f"data_type is {constant_name('BNNSDataType', data_type)}, which is not a type of whole bytes")
    return dtype


def data_type_of(dtype: np.dtype[Any]) -> int:
    """The BNNSDataType of a NumPy array's elements."""
    for number, known in _DTYPES.items():
        if known == dtype:
            return number
    if dtype.name == "bfloat16":
        return c.BNNSDataTypeBFloat16
    raise ValueError(f"there is no BNNSDataType for elements of type {dtype}")


def as_size(name: str, value: Any) -> int:
    """A size_t."""
    if type(value) is not int:
        try:
            value = value.__index__()
        except Exception:
            raise Invalid(f"{name} is {value!r}, must be an integer") from None
    if not 0 <= value <= c.SIZE_MAX:
        raise Invalid(f"{name} is {value}, which a size_t cannot hold")
    return int(value)


def as_float(name: str, value: Any) -> float:
    """A C float: rounded to single precision."""
    try:
        rounded: float = _C_FLOAT.unpack(_C_FLOAT.pack(value))[0]
    except OverflowError:  # beyond the largest there is
        return math.copysign(math.inf, value)
    except Exception:
        raise Invalid(f"{name} is {value!r}, must be a number") from None
    return rounded


class Floats:
    """Several fields of a structure as C floats."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._fields: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*names)
        self._image = struct.Struct(f"<{len(names)}f")

    def __call__(self, structure: Any) -> tuple[float, ...]:
        values = self._fields(structure)
        try:
            return self._image.unpack(self._image.pack(*values))
        except Exception:  # one is no number, or too large
            return tuple(map(as_float, self._names, values))


def extents_of(layout: Any, size: Sequence[Any]) -> tuple[int, ...]:
    """Extents fastest first; zeros are left in."""
    if not isinstance(layout, int) or layout not in _LAYOUTS:
        name = constant_name("BNNSDataLayout", layout)
        if layout in _OPAQUE_LAYOUTS:
            raise Unsupported(f"layout {name} is opaque")
        raise Invalid(f"layout is {name}, which is none")
    rank = layout >> 16
    extents = tuple(as_size(f"size[{k}]", size[k]) for k in range(rank))
    return extents[::-1] if is_first_major(layout) else extents


def geometry(dtype: np.dtype[Any], extents: tuple[int, ...], given: Sequence[Any]) -> Geometry:
    """`given`: strides in values, fastest first; 0, or none at all for the slow axes, means contiguous."""
    strides: list[int] = []
    contiguous, fastest, reach, may_overlap = 1, 0, 0, False
    for k, extent in enumerate(extents):
        if extent == 0:
            raise Invalid(f"an extent is 0: sizes, fastest first, are {extents}")
        stride = (as_size(f"stride[{k}]", given[k]) if k < len(given) else 0) or contiguous
        if extent > 1:
            if stride < fastest:
                raise Invalid(f"stride[{k}] is {stride}, below that of a faster axis, which is {fastest}")
            fastest = stride
        strides.append(stride)
        contiguous = stride * extent
        # Unless each axis steps over all that the faster ones span.
        may_overlap = may_overlap or (extent > 1 and stride <= reach)
        reach += (extent - 1) * stride
    elements = math.prod(extents)
    return Geometry(
        dtype,
        extents,
        tuple(strides),
        extents[::-1],
        tuple(stride * dtype.itemsize for stride in reversed(strides)),
        elements,
        reach + 1,
        may_overlap,
        not may_overlap and reach + 1 == elements,
        tuple(extent for extent in extents if extent != 1),
    )


def geometry_of(layout: Any, size: Sequence[Any], stride: Sequence[Any], data_type: Any) -> Geometry:
    return geometry(dtype_of(data_type), extents_of(layout, size), stride)


def bytes_of(data: Any) -> npt.NDArray[np.uint8]:
    """The memory behind any object that has some, as one run of bytes. Nothing is copied."""
    if isinstance(data, np.ndarray):
        return _array_bytes(data)
    if data is None:
        raise Invalid("data is NULL")
    if isinstance(data, int):
        raise Invalid(f"data is the address {int(data):#x}; here it must be a buffer, whose bounds are known")
    try:
        view = memoryview(data)
    except TypeError:
        view = None
    except Exception as error:
        raise Invalid(f"data of type {type(data).__name__} gives no buffer: {error}") from None
    if view is not None:
        if not view.contiguous or "O" in _FIELD_NAME.sub("", view.format):
            raise Invalid("data is not one run of numbers in memory")
        return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    if not hasattr(data, "__dlpack__"):
        raise Invalid(f"data is of type {type(data).__name__}, which has no buffer")
    try:
        return _array_bytes(np.from_dlpack(data))
    except Invalid:
        raise
    except Exception as error:
        raise Invalid(f"data of type {type(data).__name__} gives no buffer: {error}") from None


def _array_bytes(array: Array) -> npt.NDArray[np.uint8]:
    if type(array) is np.ndarray and array.dtype is _BYTE and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.dtype.hasobject:
        raise Invalid(f"data is an array of {array.dtype}, not of numbers")
    if array.size == 0:
        return np.empty(0, np.uint8)
    flat = type(array) is np.ndarray and array.flags.c_contiguous
    if flat:
        return array.reshape(-1).view(np.uint8)
    array = np.asarray(array)
    if any(step < 0 for step in array.strides):
        raise Invalid(f"data is an array with negative strides, {array.strides}")
    # From the first element to the last: what lies between belongs to the same allocation.
    reach = sum((extent - 1) * step for extent, step in zip(array.shape, array.strides, strict=True)) + array.itemsize
    first = array.reshape(1) if array.ndim == 0 else array[(slice(0, 1),) * array.ndim].reshape(1)
    return np.lib.stride_tricks.as_strided(first.view(np.uint8), (reach,), (1,))


def view_of(geometry: Geometry, data: Any) -> Array:
    """The array over `data`, slowest axis first."""
    memory = bytes_of(data)
    needed = geometry.span * geometry.dtype.itemsize
    if needed > memory.size:
        raise Invalid(
            f"the array of sizes {geometry.extents} and strides {geometry.strides} (fastest first) spans {needed} "
            f"bytes, but data has {memory.size}"
        )
    view: Array = np.ndarray(geometry.shape, geometry.dtype, memory, 0, geometry.steps)
    return view


def batch_view(name: str, geometry: Geometry, data: Any, batch: int, stride: int) -> Array:
    """`batch` samples of a geometry, `stride` values apart, as ``[batch, ...]``: `data` itself if it is just that."""
    memory = data
    if type(data) is np.ndarray and data.flags.c_contiguous and not data.dtype.hasobject:
        if (
            geometry.dense
            and data.dtype is geometry.dtype
            and (stride == geometry.elements or batch == 1)
            and data.shape == (batch, *geometry.shape)
        ):
            return data
    else:
        try:
            memory = bytes_of(data)
        except Invalid as error:
            raise Invalid(f"{name}: {error}") from None
    size = geometry.dtype.itemsize
    needed = ((batch - 1) * stride + geometry.span) * size
    if needed > memory.nbytes:
        raise Invalid(
            f"{name} has {memory.nbytes} bytes, but {batch} samples of {geometry.span} values, {stride} apart, "
            f"span {needed}"
        )
    step = stride * size if batch > 1 else 0  # a step that no one takes may be any number
    view: Array = np.ndarray((batch, *geometry.shape), geometry.dtype, memory, 0, (step, *geometry.steps))
    return view


def keeps_still(data: Any) -> bool:
    """Whether an object's memory stays where it is while a view of it exists. What only speaks DLPack may move it."""
    return data is None or isinstance(data, np.ndarray) or not hasattr(type(data), "__dlpack__")


def is_first_major(layout: int) -> bool:
    """Whether extents are listed slowest first."""
    return layout & 0x8001 == 0x8001


def shares_memory(a: Array, b: Array) -> bool:
    """Whether two arrays have an element in common, as far as can be said in a short time."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=100_000))  # type: ignore[arg-type]  # any int will do
    except np.exceptions.TooHardError:
        return True


def owner_of(array: Array) -> Array | None:
    """The array whose own memory this one lies in, if there is such an array. Of two of them none lies in both."""
    owner = array if array.base is None else array.base
    return owner if type(owner) is np.ndarray and owner.flags.owndata else None


def are_apart(a: Array, b: Array) -> bool:
    """Whether two arrays have nothing in common, not even what lies between their elements."""
    one, other = owner_of(a), owner_of(b)
    if one is not None and other is not None and one is not other:
        return True  # sooner than NumPy could say
    return not np.may_share_memory(a, b)


def same_elements(a: Array, b: Array) -> bool:
    """Whether two arrays are the same memory, element by element."""
    if a.shape != b.shape or a.dtype != b.dtype or a.ctypes.data != b.ctypes.data:
        return False
    return all(n == 1 or p == q for n, p, q in zip(a.shape, a.strides, b.strides, strict=True))


def check_disjoint(
    results: Mapping[str, Array], inputs: Mapping[str, Array], in_place: Mapping[str, str] = MappingProxyType({})
) -> None:
    """No result shares memory with an input or another result, but for those exactly in the place of their input."""
    others: dict[str, Array] = dict(inputs)
    for name, result in results.items():
        for other, array in others.items():
            if shares_memory(result, array) and not (in_place.get(name) == other and same_elements(result, array)):
                raise Invalid(f"{name} overlaps {other} in memory")
        others[name] = result


def check_writable(name: str, array: Array) -> None:
    if not array.flags.writeable:
        raise Invalid(f"{name} is read-only")


is_writable: Final[Callable[[Array], bool]] = operator.attrgetter("flags.writeable")


def is_still_writable(data: Any) -> bool:
    """Whether memory that was writable still is: of an array that can change, and views made before do not tell."""
    return type(data) is not np.ndarray or data.flags.writeable


def address_of(data: Any) -> int:
    """Where an object's memory begins; 0 for None."""
    if data is None:
        return 0
    if isinstance(data, int):
        return int(data)
    return int(data.ctypes.data) if isinstance(data, np.ndarray) else int(bytes_of(data).ctypes.data)


# ---- filter parameters ----------------------------------------------------------------------------------------------


def threads_of(n_threads: Any) -> int | None:
    """A hint: more than the machine has mean as many as it has."""
    return min(as_size("n_threads", n_threads), os.cpu_count() or 1) or None


def _c_memory(address: int, size: int, owner: Arena) -> Any:
    """Memory of a C allocator. Arrays over it hold the arena, which holds the memory."""
    memory = (ctypes.c_ubyte * size).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return memory


class Arena:
    """Memory that a filter keeps, from the client's allocator where there is one.

    The allocator is a Python function ``(memptr, alignment, size)``, which puts a writable buffer into ``memptr[0]``
    and returns 0, or a ctypes function of C's signature ``int (void **, size_t, size_t)``.
    """

    _ALIGNMENT: Final = 64  # a cache line

    def __init__(self, alloc_memory: Any, free_memory: Any) -> None:
        for name, function in (("alloc_memory", alloc_memory), ("free_memory", free_memory)):
            if function is not None and not callable(function):
                raise Invalid(f"{name} is of type {type(function).__name__}, which cannot be called")
        self._alloc, self._free = alloc_memory, free_memory
        self._taken: dict[int, Any] = {}  # what the allocator gave, by its address

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of unspecified contents."""
        if self._alloc is None:
            return np.empty(shape, dtype)
        size = max(math.prod(shape) * dtype.itemsize, 1)
        if isinstance(self._alloc, C_FUNCTION):
            pointer = ctypes.c_void_p()
            try:
                # As size_t: without a prototype ctypes would pass ints of 32 bits.
                code = self._alloc(ctypes.byref(pointer), ctypes.c_size_t(self._ALIGNMENT), ctypes.c_size_t(size))
            except ctypes.ArgumentError as error:
                raise Invalid(f"alloc_memory is not int (void **, size_t, size_t): {error}") from None
            block: Any = pointer.value
            if code == 0 and block:
                memory = np.frombuffer(memoryview(_c_memory(block, size, self)), np.uint8)
        else:
            memptr: list[Any] = [None]
            try:
                code = self._alloc(memptr, self._ALIGNMENT, size)
            except Exception as error:
                raise Invalid(f"alloc_memory raised {type(error).__name__}: {error}") from None
            block = memptr[0]
            if code == 0 and block is not None:
                memory = bytes_of(block)
        if code != 0 or block is None:
            raise Invalid(f"alloc_memory returned {code!r} for {size} bytes and put {block!r} into *memptr")
        address = memory.ctypes.data
        if address in self._taken:
            raise Invalid(f"alloc_memory gave the block at {address:#x} twice")
        if memory.size < size or not memory.flags.writeable or address % dtype.itemsize:
            self._release(block)
            raise Invalid(
                f"alloc_memory gave {memory.size} bytes at {address:#x}, "
                f"{'' if memory.flags.writeable else 'not '}writable; asked for were {size}"
            )
        self._taken[address] = block
        array: Array = np.ndarray(shape, dtype, memory)
        return array

    def give_back(self, array: Array | None) -> None:
        """An array of :meth:`take`, which no one uses any more."""
        if array is not None and self._alloc is not None:
            self._release(self._taken.pop(array.ctypes.data))

    def __del__(self) -> None:
        if hasattr(self, "_taken"):  # it was made
            self.give_back_all()

    def give_back_all(self) -> None:
        while self._taken:
            self._release(self._taken.popitem()[1])

    def _release(self, block: Any) -> None:
        if self._free is None:
            return
        try:
            self._free(ctypes.c_void_p(block) if isinstance(self._free, C_FUNCTION) else block)
        except Exception as error:
            note(f"free_memory raised {type(error).__name__}: {error}")
