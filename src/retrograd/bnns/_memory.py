"""Bounds-checked arrays over descriptors and buffers, and the allocator of a filter's memory.

Sizes, strides and counts come from the caller and may have any value. They are compared with the buffer's length as
Python integers, which cannot overflow, before NumPy sees them.
"""

from __future__ import annotations

import _ctypes
import ctypes
import math
import operator
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, SupportsIndex, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..ops._arrays import find_overlap
from ..ops._buffers import contiguous_bytes, elements_of
from ..ops._types import Array as Array
from . import _constants as c
from ._failure import Invalid, Unsupported, note
from ._names import layout_name, type_name

DType: TypeAlias = np.dtype[np.generic]
_Bytes: TypeAlias = npt.NDArray[np.uint8]

_DTYPES: Final[dict[int, DType]] = {
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
_OPAQUE_LAYOUTS: Final = (c.BNNSDataLayoutFullyConnectedSparse, c.BNNSDataLayoutConvolutionWeightsOIHW_Pack32)
# Layouts that extents and strides describe completely.
_LAYOUTS: Final = frozenset(
    value for name, value in vars(c).items() if name.startswith("BNNSDataLayout") and value not in _OPAQUE_LAYOUTS
)
# Names of size[0], size[1]... in messages.
_AXES: Final = {
    c.BNNSDataLayoutRowMajorMatrix: "(columns, rows)",
    c.BNNSDataLayoutColumnMajorMatrix: "(rows, columns)",
    c.BNNSDataLayoutImageCHW: "(W, H, C)",
    c.BNNSDataLayoutSNE: "(E, N, S)",
    c.BNNSDataLayoutNSE: "(E, S, N)",
    c.BNNSDataLayoutMHA_DHK: "(d, k, heads)",
}
_C_FLOAT: Final = struct.Struct("<f")
C_FUNCTION: Final = _ctypes.CFuncPtr  # the base class of every ctypes function


class Geometry(NamedTuple):
    """An array without its memory. Extents and strides are fastest first, `shape` and `steps` slowest first."""

    layout: int
    dtype: DType
    extents: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    shape: tuple[int, ...]
    steps: tuple[int, ...]  # in bytes
    elements: int
    span: int  # elements from the first to the last, both included
    may_overlap: bool  # two elements could share memory
    dense: bool  # there are no gaps between elements
    proper_extents: tuple[int, ...]  # without those that are 1

    @property
    def size(self) -> tuple[int, ...]:
        """The extents in the order of the layout's ``size``."""
        return listed(self.layout, self.extents)

    @property
    def packed_stride(self) -> int:
        """Elements from one sample to the next in a packed batch: the span of the slowest axis."""
        return self.strides[-1] * self.extents[-1]


def dtype_of(data_type: object) -> DType:
    """The NumPy dtype of a BNNSDataType."""
    dtype = _DTYPES.get(data_type) if isinstance(data_type, int) else None
    if dtype is None and data_type == c.BNNSDataTypeBFloat16:
        import ml_dtypes

        dtype = _DTYPES[c.BNNSDataTypeBFloat16] = np.dtype(ml_dtypes.bfloat16)
    if dtype is None:
        raise Invalid(f"data_type is {type_name(data_type)}, which is not a supported type")
    return dtype


def data_type_of(dtype: DType) -> int:
    """The BNNSDataType of a NumPy array's elements."""
    for code, known in _DTYPES.items():
        if known == dtype:
            return code
    if dtype.name == "bfloat16":
        return c.BNNSDataTypeBFloat16
    hint = "; BNNS computes in float32: pass array.astype(np.float32)" if dtype == np.float64 else ""
    raise ValueError(f"there is no BNNSDataType for elements of type {dtype}{hint}")


def as_integer(name: str, value: object) -> int:
    """Check an integer of any size."""
    try:
        return int(operator.index(cast(SupportsIndex, value)))
    except Exception:
        raise Invalid(f"{name} is {value!r}, must be an integer") from None


def as_size(name: str, value: object) -> int:
    """Check a size_t."""
    if type(value) is not int:
        value = as_integer(name, value)
    if not 0 <= value <= c.SIZE_MAX:
        raise Invalid(f"{name} is {value}, which a size_t cannot hold")
    return int(value)


def as_signed(name: str, value: object, bits: int) -> int:
    """Check a signed C integer of `bits` bits."""
    number = as_integer(name, value)
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise Invalid(f"{name} is {number}, which an int{bits}_t cannot hold")
    return number


def as_float(name: str, value: object) -> float:
    """Round to a C float."""
    try:
        rounded: float = _C_FLOAT.unpack(_C_FLOAT.pack(value))[0]
    except OverflowError:
        return math.copysign(math.inf, cast(float, value))
    except Exception:
        raise Invalid(f"{name} is {value!r}, must be a number") from None
    return rounded


class Floats:
    """Reads several fields of a structure as C floats."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._fields: Callable[[object], tuple[object, ...]] = operator.attrgetter(*names)
        self._image = struct.Struct(f"<{len(names)}f")

    def __call__(self, structure: object) -> tuple[float, ...]:
        values = self._fields(structure)
        try:
            return self._image.unpack(self._image.pack(*values))
        except Exception:  # one is not a number, or too large
            return tuple(map(as_float, self._names, values))


def extents_of(layout: object, size: Sequence[object]) -> tuple[int, ...]:
    """Extents, fastest first; may contain zeros."""
    if not isinstance(layout, int) or layout not in _LAYOUTS:
        if layout in _OPAQUE_LAYOUTS:
            raise Unsupported(f"layout {layout_name(layout)} is opaque")
        raise Invalid(f"layout is {layout_name(layout)}, which is not a BNNSDataLayout")
    return listed(layout, tuple(as_size(f"size[{k}]", size[k]) for k in range(layout >> 16)))


def listed(layout: int, extents: tuple[int, ...]) -> tuple[int, ...]:
    """Convert extents between fastest-first order and the order of the layout's ``size``, in either direction."""
    if layout == c.BNNSDataLayoutMHA_DHK:  # size is (d, k, heads), and memory has the heads before k
        return extents[0], extents[2], extents[1]
    return extents[::-1] if is_first_major(layout) else extents


def axes_of_size(layout: int) -> tuple[int, ...]:
    """The axis of each entry of ``size``, in an array with its slowest axis first."""
    return listed(layout, tuple(range((layout >> 16) - 1, -1, -1)))


def size_text(layout: int, extents: tuple[int, ...]) -> str:
    """The ``size`` of an array with these extents in this layout, for messages."""
    size = listed(layout, extents)
    if len(size) == 1:
        return f"size={size}"
    if layout in _AXES:
        return f"size={_AXES[layout]}={size}"
    return f"size={size} ({'slowest' if is_first_major(layout) else 'fastest'} first)"


def size_of(geometry: Geometry) -> str:
    return size_text(geometry.layout, geometry.extents)


def geometry(layout: int, dtype: DType, extents: tuple[int, ...], given: Sequence[object]) -> Geometry:
    """`given`: strides in elements, fastest first; 0 means contiguous, and so do strides left out for the slow axes."""
    strides: list[int] = []
    contiguous, fastest, reach, may_overlap = 1, 0, 0, False
    for k, extent in enumerate(extents):
        if extent == 0:
            raise Invalid(f"size is {listed(layout, extents)}, and an extent must be at least 1")
        stride = (as_size(f"stride[{k}]", given[k]) if k < len(given) else 0) or contiguous
        if extent > 1:
            if stride < fastest:
                raise Invalid(f"stride[{k}] is {stride}, below that of a faster axis, which is {fastest}")
            fastest = stride
        strides.append(stride)
        contiguous = stride * extent
        # Elements are disjoint if each axis steps over the whole span of the faster ones.
        may_overlap = may_overlap or (extent > 1 and stride <= reach)
        reach += (extent - 1) * stride
    elements = math.prod(extents)
    return Geometry(
        layout,
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


def contiguous(like: Geometry, dtype: DType) -> Geometry:
    """A contiguous array of the same extents, with elements of this type."""
    return geometry(like.layout, dtype, like.extents, ())


def geometry_of(layout: object, size: Sequence[object], stride: Sequence[object], data_type: object) -> Geometry:
    extents = extents_of(layout, size)
    return geometry(cast(int, layout), dtype_of(data_type), extents, stride)


def bytes_of(name: str, data: object) -> _Bytes:
    """The memory of an untyped workspace as contiguous bytes, without a copy."""
    try:
        return contiguous_bytes(data)
    except TypeError as error:
        raise Invalid(f"{name} {error}") from None


def sized_bytes(name: str, data: object, size_name: str, size: object, least: int) -> _Bytes:
    """The first `least` bytes of a workspace; `size` is the length that the caller claims."""
    claimed = as_size(size_name, size)
    if claimed < least:
        raise Invalid(f"{size_name} is {claimed}, but this layer needs {least}")
    memory = bytes_of(name, data)
    if memory.size < claimed:
        raise Invalid(f"{size_name} is {claimed}, but the buffer has {memory.size} bytes")
    return memory if memory.size == least else memory[:least]


def view_of(geometry: Geometry, data: object, name: str = "data") -> Array:
    """The array over `data`, slowest axis first."""
    memory = _memory(name, data, geometry.dtype, geometry.shape, geometry.steps)
    needed = geometry.span * geometry.dtype.itemsize
    if needed > memory.nbytes:
        gaps = "" if geometry.dense else f" and stride={geometry.strides}"
        raise Invalid(f"{name} has {memory.nbytes} bytes, but {size_of(geometry)}{gaps} spans {needed}")
    view: Array = np.ndarray(geometry.shape, geometry.dtype, memory, 0, geometry.steps)
    return view


def elements_as(geometry: Geometry, data: object, count: int) -> Array:
    """The first `count` elements in memory as an array of one axis, gaps included."""
    return view_of(geometry_of(c.BNNSDataLayoutVector, (count,), (0,), data_type_of(geometry.dtype)), data)


def batch_view(name: str, geometry: Geometry, data: object, batch: int, stride: int, field: str = "") -> Array:
    """`batch` samples of a geometry, `stride` elements apart, as ``[batch, ...]``. Returns `data` itself if it matches.

    `field` (".data" or nothing) completes the name in messages.
    """
    dtype = geometry.dtype
    shape = (batch, *geometry.shape)
    plain: Array | None = None
    if type(data) is np.ndarray and data.dtype is dtype and data.flags.c_contiguous:
        if data.shape == shape and geometry.dense and (stride == geometry.elements or batch == 1):
            return data
        plain = data
    # The stride of a single sample is not used, and may be out of range.
    steps = (stride * dtype.itemsize if batch > 1 else 0, *geometry.steps)
    memory = _memory(name + field, data, dtype, shape, steps) if plain is None else plain
    needed = ((batch - 1) * stride + geometry.span) * dtype.itemsize
    if needed > memory.nbytes:
        raise Invalid(
            f"{name}{field} has {memory.nbytes} bytes, but {batch} samples of {size_of(geometry)}, with {stride} "
            f"values from one to the next, span {needed}"
        )
    view: Array = np.ndarray(shape, dtype, memory, 0, steps)
    return view


def _memory(name: str, data: object, dtype: DType, shape: tuple[int, ...], steps: tuple[int, ...]) -> Array:
    """The memory of `data`, for an array of this dtype, shape and steps.

    Raw memory can hold any array. Typed elements must have this dtype. If they are contiguous, any shape fits; if not,
    the array must be a leading part of them, with the same order and strides.
    """
    if data is None:
        raise Invalid(f"{name} is NULL")
    try:
        array, typed = elements_of(data)
    except TypeError as error:
        raise Invalid(f"{name} {error}") from None
    if not typed:
        return array
    if array.dtype != dtype and not (array.dtype.name == dtype.name == "bfloat16"):
        raise Invalid(f"{name} has elements of type {_type_name(array.dtype)}, but {_disagreement(dtype)}")
    if array.flags.c_contiguous:
        return array
    given, wanted = _axes(array.shape, array.strides), _axes(shape, steps)
    first = len(given) - len(wanted)
    if first < 0 or given[first + 1 :] != wanted[1:] or (wanted and not _begins(given[first], wanted[0])):
        raise Invalid(
            f"{name} is not contiguous: it has shape {array.shape} and strides of {array.strides} bytes, where the "
            f"descriptor says shape {shape} and {steps}. Describe it with BNNSNDArrayDescriptor.from_array, or pass a "
            "contiguous array"
        )
    # All bytes from the first element to the last: they are within one allocation.
    reach = sum((extent - 1) * step for extent, step in wanted) + array.itemsize
    corner = array[(slice(0, 1),) * array.ndim].reshape(1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(corner, (reach,), (1,))


def _axes(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(extent, stride) of each axis, with axes of extent 1 dropped and contiguous axes joined."""
    axes: list[tuple[int, int]] = []
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        if axes and axes[-1][1] == extent * stride:
            axes[-1] = (axes[-1][0] * extent, stride)
        else:
            axes.append((extent, stride))
    return axes


def _begins(given: tuple[int, int], wanted: tuple[int, int]) -> bool:
    """Whether axis `wanted` is a leading part of axis `given`."""
    return given[1] == wanted[1] and wanted[0] <= given[0]


def _type_name(dtype: DType) -> str:
    return str(dtype) if dtype.isnative else f"{dtype.str} (non-native byte order)"


def _disagreement(dtype: DType) -> str:
    shown = type_name(data_type_of(dtype))
    return f"its descriptor says {shown}: pass an array of {dtype} (astype converts the values, view keeps the bits)"


def is_first_major(layout: int) -> bool:
    """Whether extents are listed slowest first."""
    return layout & 0x8001 == 0x8001


def numbered_axes(layout: int) -> tuple[int, ...]:
    """The axes of norms and of the top-k functions by their numbers, in an array with its slowest axis first.

    Axis k is that of ``size[k]``, except in a row-major matrix: there, as measured, axis 0 is that of the rows and axis
    1 that of the columns, although ``size`` lists columns first. Other functions number axes by ``size`` throughout.
    """
    return (0, 1) if layout == c.BNNSDataLayoutRowMajorMatrix else axes_of_size(layout)


def check_disjoint(
    results: Mapping[str, Array], inputs: Mapping[str, Array], in_place: Mapping[str, tuple[str, ...]] | None = None
) -> None:
    """Raise if a result overlaps an input or another result, unless it is one that may be computed in place."""
    found = find_overlap(results, inputs, in_place)
    if found is not None:
        raise Invalid(f"{found[0]} overlaps {found[1]} in memory")


def check_writable(name: str, array: Array) -> None:
    if not array.flags.writeable:
        raise Invalid(f"{name} is read-only")


def check_indices(name: str, indices: Array, bound: int, what: str, refusal: type[Invalid] = Invalid) -> None:
    """Raise unless every index is at least 0 and below `bound`. `what` completes the message."""
    wrong = indices[(indices < 0) | (indices >= bound)]
    if wrong.size:
        raise refusal(f"{name} has the index {wrong.flat[0]}, but {what}")


def address_of(data: object) -> int:
    """The address of an object's memory; 0 for None."""
    if data is None:
        return 0
    if isinstance(data, int):
        return int(data)
    return int(data.ctypes.data) if isinstance(data, np.ndarray) else int(bytes_of("it", data).ctypes.data)


# ---- filter parameters ----------------------------------------------------------------------------------------------


def threads_of(n_threads: object) -> int | None:
    """The number of threads to use, at most one per CPU; None for the default."""
    return min(as_size("n_threads", n_threads), os.cpu_count() or 1) or None


def _c_memory(address: int, size: int, owner: Arena) -> memoryview:
    """Memory from a C allocator. Arrays over it keep the arena alive, which frees the memory at its end."""
    memory = (ctypes.c_ubyte * size).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return memoryview(memory)


def _function(name: str, function: object) -> Callable[..., object] | None:
    if function is None or callable(function):
        return function
    raise Invalid(f"{name} is of type {type(function).__name__}, which is not callable")


class Arena:
    """Memory that a filter owns, from the client's allocator if there is one.

    The allocator is a Python function ``(memptr, alignment, size)`` that stores a writable buffer in ``memptr[0]`` and
    returns 0, or a ctypes function with the C signature ``int (void **, size_t, size_t)``.
    """

    _ALIGNMENT: Final = 64  # a cache line

    def __init__(self, alloc_memory: object, free_memory: object) -> None:
        self._alloc, self._free = _function("alloc_memory", alloc_memory), _function("free_memory", free_memory)
        self._blocks: dict[int, object] = {}  # allocated blocks by address

    def allocate(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An array of unspecified contents."""
        if self._alloc is None:
            return np.empty(shape, dtype)
        size = max(math.prod(shape) * dtype.itemsize, 1)
        if isinstance(self._alloc, C_FUNCTION):
            pointer = ctypes.c_void_p()
            try:
                # Explicitly as size_t: without a prototype ctypes passes 32-bit ints.
                code = self._alloc(ctypes.byref(pointer), ctypes.c_size_t(self._ALIGNMENT), ctypes.c_size_t(size))
            except ctypes.ArgumentError as error:
                raise Invalid(f"alloc_memory is not int (void **, size_t, size_t): {error}") from None
            block: object = pointer.value
            if code == 0 and pointer.value:
                memory = np.frombuffer(_c_memory(pointer.value, size, self), np.uint8)
        else:
            memptr: list[object] = [None]
            try:
                code = self._alloc(memptr, self._ALIGNMENT, size)
            except Exception as error:
                raise Invalid(f"alloc_memory raised {type(error).__name__}: {error}") from None
            block = memptr[0]
            if code == 0 and block is not None:
                memory = bytes_of("alloc_memory's block", block)
        if code != 0 or block is None:
            raise Invalid(f"alloc_memory returned {code!r} for {size} bytes and put {block!r} into *memptr")
        address = memory.ctypes.data
        if address in self._blocks:
            raise Invalid(f"alloc_memory returned the block at {address:#x} twice")
        if memory.size < size or not memory.flags.writeable or address % dtype.itemsize:
            self._release(block)
            raise Invalid(
                f"alloc_memory returned {memory.size} bytes at {address:#x}, "
                f"{'' if memory.flags.writeable else 'not '}writable; {size} were requested"
            )
        self._blocks[address] = block
        array: Array = np.ndarray(shape, dtype, memory)
        return array

    def free(self, array: Array | None) -> None:
        """Free an array from :meth:`allocate`."""
        if array is not None and self._alloc is not None:
            self._release(self._blocks.pop(array.ctypes.data))

    def __del__(self) -> None:
        if hasattr(self, "_blocks"):  # __init__ did not fail
            self.free_all()

    def free_all(self) -> None:
        while self._blocks:
            self._release(self._blocks.popitem()[1])

    def _release(self, block: object) -> None:
        if self._free is None:
            return
        try:
            self._free(ctypes.c_void_p(cast(int, block)) if isinstance(self._free, C_FUNCTION) else block)
        except Exception as error:
            note(f"free_memory raised {type(error).__name__}: {error}")
