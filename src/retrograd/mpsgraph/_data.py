"""The arrays that graphs read and write: MPSGraphTensorData, MPSNDArray; and MPSCommandBuffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..graph import Spec
from ..mps import MPSDataType, MPSMatrix, MPSVector, MTLBuffer, MTLCommandBuffer, MTLCommandQueue, MTLDevice
from ..mps import MTLCreateSystemDefaultDevice as _default_device
from ..mps._metal import memory_of
from ..ops._types import Array
from ._types import DATA_TYPES, MPSGraphDevice, MPSGraphObject, as_dtype, as_int, as_shape


class MPSNDArray(MPSGraphObject):
    """An array of a device: its elements are read and written as bytes in row-major order."""

    def __init__(self, *, device: MTLDevice | None = None, scalar: float = 0.0, _array: Array | None = None) -> None:
        self._array: Array = np.asarray(scalar, np.float32) if _array is None else _array
        self._device = device or _default_device()

    @property
    def dataType(self) -> MPSDataType:
        return DATA_TYPES[self._array.dtype]

    @property
    def numberOfDimensions(self) -> int:
        return self._array.ndim

    @property
    def device(self) -> MTLDevice:
        return self._device

    def length(self, ofDimension: int) -> int:
        """The extent of an axis, counted from the last, as Metal does."""
        number = as_int("MPSNDArray.length: ofDimension", ofDimension)
        return self._array.shape[-1 - number] if 0 <= number < self._array.ndim else 1

    def readBytes(self, buffer: Any, strideBytes: Sequence[int] | None = None) -> None:
        """Copy the elements into `buffer`, any writable object with contiguous memory."""
        target = self._memory("readBytes", buffer, strideBytes)
        if target.readonly:
            raise ValueError("MPSNDArray.readBytes: buffer is read-only")
        np.ndarray(self._array.shape, self._array.dtype, target)[...] = self._array

    def writeBytes(self, buffer: Any, strideBytes: Sequence[int] | None = None) -> None:
        """Copy the elements from `buffer`."""
        source = self._memory("writeBytes", buffer, strideBytes)
        if not self._array.flags.writeable:
            raise ValueError("MPSNDArray.writeBytes: the array is in read-only memory")
        self._array[...] = np.ndarray(self._array.shape, self._array.dtype, source)

    def _memory(self, function: str, buffer: Any, strideBytes: Sequence[int] | None) -> memoryview:
        if strideBytes is not None:
            raise NotImplementedError(f"MPSNDArray.{function}: strideBytes must be None; elements are contiguous")
        if not self._array.nbytes:
            return memoryview(b"")
        memory, dtype = memory_of(f"MPSNDArray.{function}", "buffer", buffer)
        if dtype is not None and dtype != self._array.dtype:
            raise TypeError(f"MPSNDArray.{function}: buffer has dtype {dtype}, the array {self._array.dtype}")
        if memory.nbytes < self._array.nbytes:
            raise ValueError(f"MPSNDArray.{function}: buffer has {memory.nbytes} bytes, the array {self._array.nbytes}")
        return memory

    def __repr__(self) -> str:
        return f"<MPSNDArray {Spec(self._array.shape, self._array.dtype)!r}>"


class MPSGraphTensorData(MPSGraphObject):
    """Elements for a graph: given to a run, or returned by one.

    ``MPSGraphTensorData(array)`` (retrograd's) is a view of an array. In Swift's spelling:
    ``(device=, data=, shape=, dataType=)`` copies bytes; ``(buffer, shape=, dataType=)`` with an MTLBuffer, optionally
    `rowBytes`, ``(matrix)``, ``(matrix, rank=)``, ``(vector)`` and ``(ndarray)`` share memory.
    """

    _ndarray_type: ClassVar[type[MPSNDArray]] = MPSNDArray

    def __init__(
        self,
        source: MTLBuffer | MPSMatrix | MPSVector | MPSNDArray | Array | None = None,
        /,
        *,
        device: MPSGraphDevice | None = None,
        data: Any = None,
        shape: Sequence[int] | None = None,
        dataType: int | None = None,
        rowBytes: int | None = None,
        rank: int | None = None,
    ) -> None:
        name = "MPSGraphTensorData"
        if (source is None) == (data is None):
            raise TypeError(
                f"{name}: needs an MTLBuffer, MPSMatrix, MPSVector, MPSNDArray or array; or device and data"
            )
        if device is not None and not isinstance(device, MPSGraphDevice):
            raise TypeError(f"{name}: device must be an MPSGraphDevice, not {type(device).__name__}")
        if (data is not None or isinstance(source, MTLBuffer)) and (shape is None or dataType is None):
            raise TypeError(f"{name}: needs shape and dataType")
        described = shape is not None or dataType is not None
        if data is not None:
            array = _of_bytes(name, data, shape, dataType).copy()
        elif isinstance(source, MTLBuffer):
            array = _of_bytes(name, source, shape, dataType, rowBytes)
        elif isinstance(source, (MPSMatrix, MPSVector)):
            array = _of_elements(name, source, rank)
        elif isinstance(source, MPSNDArray):
            array = source._array
        elif isinstance(source, np.ndarray):
            array = source
            as_dtype(f"{name}: the array's data type", _code(source.dtype))
        else:
            raise TypeError(f"{name}: {type(source).__name__} holds no elements; give an array, or device and data")
        if described and data is None and not isinstance(source, MTLBuffer):
            raise TypeError(f"{name}: shape and dataType are those of {type(source).__name__}")
        self._array: Array = array
        self._device = device

    @property
    def shape(self) -> list[int]:
        return list(self._array.shape)

    @property
    def dataType(self) -> MPSDataType:
        return DATA_TYPES[self._array.dtype]

    @property
    def device(self) -> MPSGraphDevice:
        if self._device is None:
            self._device = MPSGraphDevice(_default_device())
        return self._device

    def mpsndarray(self) -> MPSNDArray:
        """The elements, in the same memory."""
        return self._ndarray_type(_array=self._array)

    def numpy(self) -> Array:
        """The elements as an array, without a copy. (retrograd's)"""
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self._array, dtype, copy=copy)

    def __repr__(self) -> str:
        return f"<MPSGraphTensorData {Spec(self._array.shape, self._array.dtype)!r}>"


def wrapped(array: Array, kind: type[MPSGraphTensorData]) -> MPSGraphTensorData:
    """A result: an array that a run has written."""
    data = kind.__new__(kind)
    data.__dict__ = {"_array": array, "_device": None}  # faster than two members
    return data


def _code(dtype: np.dtype[Any]) -> int:
    """The MPSDataType of an array; of no tensor if there is none."""
    if dtype == np.float16:
        return MPSDataType.float16
    return DATA_TYPES.get(dtype, MPSDataType.invalid)


def _of_bytes(
    name: str, source: Any, shape: Sequence[int] | None, dataType: int | None, rowBytes: int | None = None
) -> Array:
    """A view of memory."""
    extents = as_shape(f"{name}: shape", shape)
    dtype = as_dtype(f"{name}: dataType", dataType)
    if -1 in extents:
        raise ValueError(f"{name}: shape is {list(extents)}; all sizes of data are known")
    count = math.prod(extents)
    if isinstance(source, MTLBuffer):
        memory: memoryview = source._memory
        typed = source._dtype
    elif isinstance(source, (bytes, bytearray)) and not source and not count:
        return np.empty(extents, dtype)
    else:
        memory, typed = memory_of(name, "data", source)
    if typed is not None and typed != dtype:
        raise TypeError(f"{name}: the memory has elements of {typed}, dataType is {DATA_TYPES[dtype].name}")
    strides = None
    needed = count * dtype.itemsize
    if rowBytes is not None:
        stride = as_int(f"{name}: rowBytes", rowBytes)
        row = (extents[-1] if extents else 1) * dtype.itemsize
        if stride < row or stride % dtype.itemsize:
            raise ValueError(
                f"{name}: rowBytes is {stride}, must be a multiple of {dtype.itemsize} and hold a row of {row} bytes"
            )
        strides = _strides(extents, dtype.itemsize, stride)
        rows = math.prod(extents[:-1])
        needed = (rows - 1) * stride + row if count else 0
    exact = not isinstance(source, MTLBuffer)
    if memory.nbytes < needed or (exact and memory.nbytes != needed):
        raise ValueError(f"{name}: {memory.nbytes} bytes are given, but shape {list(extents)} needs {needed}")
    array: Array = np.ndarray(extents, dtype, memory, 0, strides)
    return array


def _strides(shape: tuple[int, ...], size: int, row: int) -> tuple[int, ...]:
    """Strides of rows that are `row` bytes apart."""
    strides, step = [size], row
    for extent in shape[-2::-1]:
        strides.insert(0, step)
        step *= extent
    return tuple(strides[-len(shape) :]) if shape else ()


def _of_elements(name: str, source: MPSMatrix | MPSVector, rank: int | None) -> Array:
    array = source._elements()
    as_dtype(f"{name}: the data type of {type(source).__name__}", source._dataType)
    axes = array.ndim if array.shape[0] > 1 else array.ndim - 1  # one matrix has two axes
    wanted = axes if rank is None else as_int(f"{name}: rank", rank)
    lead = (1,) * (wanted - array.ndim)
    if array.ndim - wanted > 1 or (wanted < array.ndim and array.shape[0] > 1):
        raise ValueError(f"{name}: rank is {wanted}, but {source!r} has {axes} axes")
    return array.reshape(lead + array.shape) if wanted >= array.ndim else array[0]


class MPSCommandBuffer(MPSGraphObject):
    """A command buffer for graphs: ``MPSCommandBuffer(commandBuffer=buffer)`` or ``MPSCommandBuffer(from_=queue)``."""

    def __init__(self, *, commandBuffer: MTLCommandBuffer | None = None, from_: MTLCommandQueue | None = None) -> None:
        if (commandBuffer is None) == (from_ is None):
            raise TypeError("MPSCommandBuffer: needs commandBuffer or from_, and not both")
        if from_ is not None and not isinstance(from_, MTLCommandQueue):
            raise TypeError(f"MPSCommandBuffer: from_ must be an MTLCommandQueue, not {type(from_).__name__}")
        if commandBuffer is not None and not isinstance(commandBuffer, MTLCommandBuffer):
            raise TypeError(
                f"MPSCommandBuffer: commandBuffer must be an MTLCommandBuffer, not {type(commandBuffer).__name__}"
            )
        self._buffer: MTLCommandBuffer = commandBuffer or from_.makeCommandBuffer()  # type: ignore[union-attr]

    @property
    def commandBuffer(self) -> MTLCommandBuffer:
        return self._buffer

    @property
    def rootCommandBuffer(self) -> MTLCommandBuffer:
        return self._buffer

    @property
    def status(self) -> Any:
        return self._buffer._status

    @property
    def error(self) -> Any:
        return MTLCommandBuffer.error.fget(self._buffer)  # type: ignore[attr-defined]

    def addCompletedHandler(self, handler: Any) -> None:
        MTLCommandBuffer.addCompletedHandler(self._buffer, handler)

    def addScheduledHandler(self, handler: Any) -> None:
        MTLCommandBuffer.addScheduledHandler(self._buffer, handler)

    def enqueue(self) -> None:
        self._buffer.enqueue()

    def commit(self) -> None:
        self._buffer.commit()

    def commitAndContinue(self) -> None:
        """Submit the work, and go on with another buffer of the same queue."""
        self._buffer.commit()
        self._buffer = self._buffer._queue.makeCommandBuffer()

    def waitUntilCompleted(self) -> None:
        self._buffer.waitUntilCompleted()


def buffer_of(function: str, value: object) -> MTLCommandBuffer:
    """The Metal buffer of an argument `to`."""
    if isinstance(value, MPSCommandBuffer):
        return value._buffer
    if isinstance(value, MTLCommandBuffer):
        return value
    raise TypeError(f"{function}: to must be an MPSCommandBuffer or MTLCommandBuffer, not {type(value).__name__}")
