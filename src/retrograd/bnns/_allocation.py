"""Swift's functions that allocate the memory of a descriptor, and read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import numpy.typing as npt

from ..ops._buffers import elements_of
from ._failure import Invalid, Unsupported
from ._memory import Array, DType, data_type_of, dtype_of, elements_as

if TYPE_CHECKING:
    from ._array_size import BNNSTensor
    from ._structures import BNNSNDArrayDescriptor
    from ._swift_objects import RandomGenerator
    from ._swift_values import Shape

# Swift's Float, Int and Bool.
_SCALARS: Final[dict[object, npt.DTypeLike]] = {float: np.float32, int: np.int64, bool: np.bool_}


# What goes with each kind of contents.
_OPTIONS: Final = {
    "randomIn": ("using",),
    "randomUniformUsing": ("range",),
    "randomNormalUsing": ("mean", "standardDeviation"),
}


def scalar_dtype(scalarType: npt.DTypeLike) -> DType:
    dtype: DType = np.dtype(_SCALARS.get(scalarType, scalarType))
    return dtype


class Allocating:
    """What a descriptor has in Swift. A scalar type is a NumPy type, or float, which is Swift's 32-bit Float."""

    __slots__ = ()

    @classmethod
    def allocateUninitialized(
        cls, *, scalarType: npt.DTypeLike, shape: Shape, batchSize: int = 1
    ) -> BNNSNDArrayDescriptor:
        """A descriptor of a new array of unspecified contents, with room for `batchSize` samples."""
        if batchSize < 1:
            raise ValueError(f"batchSize is {batchSize}, must be at least 1")
        dtype = scalar_dtype(scalarType)
        described = shape.descriptor(None, data_type_of(dtype))
        described.geometry()  # raises if there is no such array
        described.data = np.empty(shape.batchStride * batchSize, dtype)
        return described

    @classmethod
    def allocate(
        cls,
        *,
        repeating: object = None,
        initializingFrom: npt.ArrayLike | None = None,
        randomIn: Sequence[float | np.floating[Any]] | None = None,
        randomUniformUsing: RandomGenerator | None = None,
        randomNormalUsing: RandomGenerator | None = None,
        using: np.random.Generator | None = None,
        range: Sequence[float] | None = None,
        mean: float | None = None,
        standardDeviation: float | None = None,
        scalarType: npt.DTypeLike | None = None,
        shape: Shape,
        batchSize: int = 1,
    ) -> BNNSNDArrayDescriptor:
        """A descriptor of a new array, with room for `batchSize` samples. Its contents are one of:

        `repeating`, a number; `initializingFrom`, values in the order of memory; random numbers in the closed range
        `randomIn`, drawn by the NumPy generator `using`; or drawn by a BNNS generator, `randomUniformUsing` in `range`
        or `randomNormalUsing` with `mean` and `standardDeviation`. The type is that of NumPy values, else Float.
        """
        from . import _random

        sources = {
            "repeating": repeating,
            "initializingFrom": initializingFrom,
            "randomIn": randomIn,
            "randomUniformUsing": randomUniformUsing,
            "randomNormalUsing": randomNormalUsing,
        }
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            raise TypeError(f"allocate takes one of {', '.join(sources)}, not {len(given)} of them")
        options = {"using": using, "range": range, "mean": mean, "standardDeviation": standardDeviation}
        for name, value in options.items():
            if value is not None and name not in _OPTIONS.get(given[0], ()):
                raise TypeError(f"allocate: {given[0]} does not take {name}")
            if value is None and name != "using" and name in _OPTIONS.get(given[0], ()):
                raise TypeError(f"allocate: {given[0]} needs {name}")
        if initializingFrom is not None:
            return cls._from(initializingFrom, scalarType, shape, batchSize)
        if scalarType is None:
            typed = isinstance(repeating, np.generic) and not isinstance(repeating, float)
            scalarType = np.asarray(repeating).dtype if typed else np.float32
        made = cls.allocateUninitialized(scalarType=scalarType, shape=shape, batchSize=batchSize)
        everything: Array = made.data
        flat = type(made).from_array(everything)
        if repeating is not None:
            everything.fill(repeating)
        elif randomIn is not None:
            _draw(everything, randomIn, np.random.default_rng() if using is None else using)
        elif randomNormalUsing is not None:
            randomNormalUsing.fill(_random.BNNSRandomFillNormalFloat, flat, mean, standardDeviation)
        elif randomUniformUsing is not None and range is not None:
            integers = everything.dtype.kind in "iu"
            uniform = _random.fill_closed if integers else _random.BNNSRandomFillUniformFloat
            randomUniformUsing.fill(uniform, flat, *range)
        return made

    @classmethod
    def _from(
        cls, values: npt.ArrayLike, scalarType: npt.DTypeLike | None, shape: Shape, batchSize: int
    ) -> BNNSNDArrayDescriptor:
        if not isinstance(values, np.ndarray):
            values = np.asarray(values, np.float32 if scalarType is None else scalar_dtype(scalarType))
        elif scalarType is not None and values.dtype != scalar_dtype(scalarType):
            raise ValueError(
                f"initializingFrom has elements of type {values.dtype}, scalarType is {scalar_dtype(scalarType)}"
            )
        made = cls.allocateUninitialized(scalarType=values.dtype, shape=shape, batchSize=batchSize)
        if values.size != made.data.size:
            raise ValueError(
                f"initializingFrom has {values.size} values, but {batchSize} samples of {shape!r} have {made.data.size}"
            )
        made.data[...] = values.reshape(-1)
        return made

    def makeArray(self: Any, of: npt.DTypeLike, batchSize: int = 1) -> Array:
        """A copy of the memory as an array of one axis, with the values of `batchSize` samples."""
        from ._swift import BNNSError

        try:
            geometry, dtype = self.geometry(), scalar_dtype(of)
            if geometry.dtype != dtype:
                raise Invalid(f"the elements are of type {geometry.dtype}, not {dtype}")
            copied: Array = elements_as(geometry, self.data, geometry.packed_stride * batchSize).copy()
        except (Invalid, Unsupported) as error:
            raise BNNSError("arrayDescriptorInvalidData", str(error)) from None
        return copied

    def deallocate(self: Any) -> None:
        """Let go of the memory. Python frees it when no other object uses it."""
        self.data = None

    @property
    def shape(self: Any) -> Shape:
        """Layout, extents and strides."""
        from ._swift_values import Shape

        rank = self.layout >> 16
        return Shape(self.size[:rank], self.layout, self.stride[:rank])

    @property
    def dataSize(self: Any) -> int:
        """Bytes from the first element to the last; 0 if there is no data."""
        from ._array_size import BNNSNDArrayGetDataSize

        return BNNSNDArrayGetDataSize(self)


def _draw(array: Array, bounds: Sequence[float | np.floating[Any]], generator: np.random.Generator) -> None:
    """Fill an array with uniform random numbers in a closed range."""
    low, high = bounds
    if not low <= high:
        raise ValueError(f"randomIn is from {low} to {high}, must not be empty")
    if array.dtype.kind in "iu":
        array[...] = generator.integers(cast(int, low), cast(int, high), array.size, array.dtype, endpoint=True)
    else:
        array[...] = generator.uniform(low, high, array.size)


class TensorMemory:
    """What a ``BNNSTensor`` has in Swift. Strides count elements; without them it is contiguous."""

    __slots__ = ()

    @staticmethod
    def allocate(
        *, initializingFrom: npt.ArrayLike, shape: Sequence[int] | None = None, stride: Sequence[int] | None = None
    ) -> BNNSTensor:
        """A tensor of new memory with these values, in their own shape or in another one."""
        values = (
            initializingFrom if isinstance(initializingFrom, np.ndarray) else np.asarray(initializingFrom, np.float32)
        )
        extents = values.shape if shape is None else tuple(shape)
        made = TensorMemory.allocateUninitialized(scalarType=values.dtype, shape=extents, stride=stride)
        if values.size != math.prod(extents):
            raise ValueError(f"initializingFrom has {values.size} elements, but shape is {list(extents)}")
        _tensor_view(made)[...] = values.reshape(extents)
        return made

    @staticmethod
    def allocateUninitialized(
        *, scalarType: npt.DTypeLike, shape: Sequence[int], stride: Sequence[int] | None = None
    ) -> BNNSTensor:
        """A tensor of new memory with unspecified contents."""
        from ._array_size import BNNSTensor

        dtype = scalar_dtype(scalarType)
        steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))] if stride is None else list(stride)
        if len(steps) != len(shape) or min(steps, default=0) < 0 or min(shape, default=0) < 0:
            raise ValueError(f"shape is {list(shape)} and stride {steps}, which describe no array")
        made = BNNSTensor(data_type=data_type_of(dtype), rank=len(shape), shape=shape, stride=steps)
        span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
        made.data = np.empty(span, dtype)
        made.data_size_in_bytes = made.data.nbytes
        return made

    def deallocate(self) -> None:
        """Forget the memory."""
        tensor = cast("BNNSTensor", self)
        tensor.data, tensor.data_size_in_bytes = None, 0

    def makeArray(self, *, of: npt.DTypeLike) -> Array:
        """The elements as a new array, in the tensor's shape."""
        tensor = cast("BNNSTensor", self)
        view = _tensor_view(tensor)
        if view.dtype != scalar_dtype(of):
            raise ValueError(f"the tensor has elements of type {view.dtype}, of is {scalar_dtype(of)}")
        copy: Array = view.copy()
        return copy


def _tensor_view(tensor: BNNSTensor) -> Array:
    """The memory of a tensor, in its shape."""
    dtype, rank = dtype_of(tensor.data_type), tensor.rank
    steps = [stride * dtype.itemsize for stride in tensor.stride[:rank]]
    if tensor.data is None:
        raise Invalid("the tensor has no data")
    memory = elements_of(tensor.data)[0]
    if not memory.flags.c_contiguous:
        memory = np.ascontiguousarray(memory)
    view: Array = np.ndarray(tuple(tensor.shape[:rank]), dtype, memory, 0, steps)
    return view
