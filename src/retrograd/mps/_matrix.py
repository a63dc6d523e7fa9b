"""Matrices and vectors: views of buffers, described by descriptors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import ClassVar, overload

import numpy as np

from ..ops._planned import Version, Versioned
from ..ops._types import Array
from ._metal import MTLBuffer, MTLCommandBuffer, MTLDevice
from ._types import LARGEST_SIZE, NUMPY_TYPES, Members, MPSDataType, Setting, as_data_type, as_unsigned


class _Stride(Setting[int]):
    """In Swift one name is both a member of a descriptor and a class function that recommends its value."""

    def __init__(self, recommend: Callable[..., int], writable: bool, doc: str) -> None:
        super().__init__(as_unsigned, 0, doc)
        self.recommend = recommend
        self.writable = writable

    @overload  # type: ignore[override]
    def __get__(self, instance: None, owner: type) -> Callable[..., int]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> int: ...
    def __get__(self, instance: object, owner: type) -> Callable[..., int] | int:
        return self.recommend if instance is None else super().__get__(instance, owner)


def _recommended(name: str, elements: object, dataType: object) -> int:
    """Round floating-point rows up to 16 bytes, integer rows to 4 elements; leave a single element alone."""
    count = as_unsigned(name, elements)
    data_type = as_data_type("dataType", dataType)
    size = NUMPY_TYPES[data_type].itemsize
    if count <= 1:
        return count * size
    step = 16 if data_type & MPSDataType.floatBit else 4 * size
    return -(-count * size // step) * step


def _row_bytes(forColumns: int | None = None, dataType: int | None = None, *, fromColumns: int | None = None) -> int:
    """Recommend a row stride in bytes. `fromColumns` is the deprecated name of `forColumns`."""
    function = "MPSMatrixDescriptor.rowBytes"
    if forColumns is not None and fromColumns is not None:
        raise TypeError(f"{function}: fromColumns means forColumns; give one")
    return _recommended(f"{function}: forColumns", forColumns if fromColumns is None else fromColumns, dataType)


def _vector_bytes(forLength: int, dataType: int) -> int:
    """Recommend a vector stride in bytes."""
    return _recommended("MPSVectorDescriptor.vectorBytes: forLength", forLength, dataType)


class MPSMatrixDescriptor(Members):
    """Layout of matrices in a buffer: element [i, j] of matrix k is at k * matrixBytes + i * rowBytes + j * size."""

    rows = Setting[int](as_unsigned, 0, "Rows of each matrix.")
    columns = Setting[int](as_unsigned, 0, "Columns of each matrix.")
    dataType = Setting[MPSDataType](as_data_type, MPSDataType.float32, "The type of an element.")
    rowBytes = _Stride(_row_bytes, True, "Bytes from one row to the next. On the class: a function that recommends it.")
    _rows: int
    _columns: int
    _dataType: MPSDataType
    _rowBytes: int

    def __init__(
        self,
        *,
        rows: int | None = None,
        columns: int,
        rowBytes: int,
        dataType: int,
        matrices: int = 1,
        matrixBytes: int | None = None,
        dimensions: int | None = None,
    ) -> None:
        """`matrixBytes` is rows * rowBytes if not given. `dimensions` is the deprecated name of `rows`."""
        function = "MPSMatrixDescriptor"
        if (rows is None) == (dimensions is None):
            raise TypeError(
                f"{function}: needs rows" if rows is None else f"{function}: dimensions means rows; give one"
            )
        self._rows = as_unsigned(f"{function}: rows", dimensions if rows is None else rows)
        self._columns = as_unsigned(f"{function}: columns", columns)
        self._dataType = as_data_type(f"{function}: dataType", dataType)
        self._rowBytes = as_unsigned(f"{function}: rowBytes", rowBytes)
        self._matrices = as_unsigned(f"{function}: matrices", matrices)
        smallest = self._rows * self._rowBytes
        self._matrixBytes = smallest if matrixBytes is None else as_unsigned(f"{function}: matrixBytes", matrixBytes)
        self._check(function)
        if matrixBytes is not None:
            self._check_matrix_bytes(function)

    @property
    def matrices(self) -> int:
        return self._matrices

    @property
    def matrixBytes(self) -> int:
        """Bytes from one matrix to the next. Does not change with rows or rowBytes."""
        return self._matrixBytes

    def _check(self, function: str) -> None:
        size = NUMPY_TYPES[self._dataType].itemsize
        if self._matrices == 0:
            raise ValueError(f"{function}: matrices is 0, must be at least 1")
        if self._rowBytes % size:
            raise ValueError(f"{function}: rowBytes is {self._rowBytes}, not a multiple of the element's {size} bytes")
        if self._rowBytes < self._columns * size:
            raise ValueError(
                f"{function}: rowBytes is {self._rowBytes}, but {self._columns} columns need {self._columns * size}"
            )
        if self._matrices > 1:
            self._check_matrix_bytes(function)

    def _check_matrix_bytes(self, function: str) -> None:
        if self._rowBytes and self._matrixBytes % self._rowBytes:
            raise ValueError(
                f"{function}: matrixBytes is {self._matrixBytes}, not a multiple of rowBytes, {self._rowBytes}"
            )
        if self._matrixBytes < self._rows * self._rowBytes:
            raise ValueError(
                f"{function}: matrixBytes is {self._matrixBytes}, but {self._rows} rows need "
                f"{self._rows * self._rowBytes}"
            )

    def _layout(self, function: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The current shape and strides."""
        self._check(function)
        size = NUMPY_TYPES[self._dataType].itemsize
        return (self._matrices, self._rows, self._columns), (self._matrixBytes, self._rowBytes, size)


class MPSVectorDescriptor(Members):
    """Layout of vectors in a buffer: element j of vector k is at k * vectorBytes + j * size."""

    length = Setting[int](as_unsigned, 0, "Elements of each vector.")
    dataType = Setting[MPSDataType](as_data_type, MPSDataType.float32, "The type of an element.")
    vectorBytes = _Stride(
        _vector_bytes, False, "Bytes from one vector to the next. On the class: a function that recommends it."
    )
    _length: int
    _dataType: MPSDataType
    _vectorBytes: int

    def __init__(self, *, length: int, dataType: int, vectors: int = 1, vectorBytes: int | None = None) -> None:
        """`vectorBytes` is what :meth:`vectorBytes` recommends if not given."""
        function = "MPSVectorDescriptor"
        self._length = as_unsigned(f"{function}: length", length)
        self._dataType = as_data_type(f"{function}: dataType", dataType)
        self._vectors = as_unsigned(f"{function}: vectors", vectors)
        recommended = _vector_bytes(self._length, self._dataType)
        self._vectorBytes = recommended if vectorBytes is None else as_unsigned(f"{function}: vectorBytes", vectorBytes)
        self._check(function)

    @property
    def vectors(self) -> int:
        return self._vectors

    def _check(self, function: str) -> None:
        size = NUMPY_TYPES[self._dataType].itemsize
        if self._vectors == 0:
            raise ValueError(f"{function}: vectors is 0, must be at least 1")
        if self._vectors > 1 and (self._vectorBytes % size or self._vectorBytes < self._length * size):
            raise ValueError(
                f"{function}: vectorBytes is {self._vectorBytes}, must be a multiple of the element's {size} bytes and "
                f"hold {self._length} of them, {self._length * size} bytes"
            )

    def _layout(self, function: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        self._check(function)
        return (self._vectors, self._length), (self._vectorBytes, NUMPY_TYPES[self._dataType].itemsize)


class _Storage(Members, Versioned):
    """Elements in a buffer. Without a buffer given, one is allocated on first use."""

    _plannable: ClassVar[bool] = True
    _array: Array | None

    def __init__(
        self,
        descriptor: MPSMatrixDescriptor | MPSVectorDescriptor,
        buffer: MTLBuffer | None,
        offset: int,
        device: MTLDevice | None,
    ) -> None:
        function = type(self).__name__
        self._shape, self._strides = descriptor._layout(function)
        self._dataType = descriptor._dataType
        self._dtype = NUMPY_TYPES[self._dataType]
        self._array = None
        self._buffer: MTLBuffer | None = None
        self._low = self._high = 0  # address range of the elements
        # Bytes from the first element to the end of the last.
        steps = (max(extent - 1, 0) * stride for extent, stride in zip(self._shape, self._strides, strict=True))
        self._extent = sum(steps) + self._dtype.itemsize if all(self._shape) else 0
        if (buffer is None) == (device is None):
            raise TypeError(f"{function}: give a buffer or a device, and not both")
        self._offset = as_unsigned(f"{function}: offset", offset)
        if buffer is None:
            if not isinstance(device, MTLDevice):
                raise TypeError(f"{function}: device must be an MTLDevice, not {type(device).__name__}")
            if self._offset:
                raise ValueError(f"{function}: offset is {self._offset}, but without a buffer it must be 0")
            self._check_size(function)
            self._device = device
        elif not isinstance(buffer, MTLBuffer):
            raise TypeError(f"{function}: buffer must be an MTLBuffer, not {type(buffer).__name__}")
        else:
            self._device = buffer._device
            self._place(function, buffer)
        # A kernel's plan keeps its operands alive, which would delay a deallocator: such buffers are not planned with.
        has_deallocator = buffer is not None and buffer._has_deallocator
        plannable = self._plannable and not has_deallocator
        self._version = Version() if plannable else None  # never replaced: it does not change

    def _check_size(self, function: str) -> None:
        """Check NumPy's limits: each stride, even an unused one, and the total size with extents of 0 counted as 1."""
        elements = math.prod(extent or 1 for extent in self._shape)
        if max(*self._strides, self._extent, elements * self._dtype.itemsize) > LARGEST_SIZE:
            raise ValueError(
                f"{function}: descriptor has extents {self._shape} and strides {self._strides}, more than the "
                f"{LARGEST_SIZE} bytes that can be addressed"
            )

    def _place(self, function: str, buffer: MTLBuffer) -> None:
        end, size = self._offset + self._extent, self._dtype.itemsize
        if buffer._dtype is not None and buffer._dtype != self._dtype:
            raise TypeError(
                f"{function}: descriptor.dataType is {self._dataType.name}, but the buffer has elements of type "
                f"{buffer._dtype}: make it from an array of {self._dtype} (astype converts the values, view keeps "
                "the bits), or from raw memory"
            )
        if end > buffer._bytes.size:
            raise ValueError(f"{function}: buffer has {buffer._bytes.size} bytes, but the descriptor needs {end}")
        self._check_size(function)
        if (buffer._address + self._offset) % size:
            raise ValueError(
                f"{function}: offset is {self._offset} in a buffer at address {buffer._address:#x}, which is not a "
                f"multiple of the element's {size} bytes"
            )
        self._buffer = buffer
        self._low = buffer._address + self._offset
        self._high = self._low + self._extent
        self._array = np.ndarray(self._shape, self._dtype, buffer._bytes, self._offset, self._strides)

    def _elements(self) -> Array:
        array = self._array
        if array is None:
            self._place(type(self).__name__, self._device.makeBuffer(length=max(self._extent, 1)))
            array = self._array
            assert array is not None
        return array

    @property
    def device(self) -> MTLDevice:
        return self._device

    @property
    def dataType(self) -> MPSDataType:
        return self._dataType

    @property
    def offset(self) -> int:
        """Bytes in the buffer before the first element."""
        return self._offset

    @property
    def data(self) -> MTLBuffer:
        self._elements()
        assert self._buffer is not None
        return self._buffer

    def synchronize(self, on: MTLCommandBuffer) -> None:
        """No effect: CPU and device share memory."""
        if not isinstance(on, MTLCommandBuffer):
            raise TypeError(
                f"{type(self).__name__}.synchronize: on must be an MTLCommandBuffer, not {type(on).__name__}"
            )

    def resourceSize(self) -> int:
        """Bytes that the elements take, including padding."""
        return self._extent


class MPSMatrix(_Storage):
    """Matrices in a buffer: `MPSMatrix(buffer=, descriptor=)`, with `offset=`, or `MPSMatrix(device=, descriptor=)`."""

    def __init__(
        self,
        *,
        descriptor: MPSMatrixDescriptor,
        buffer: MTLBuffer | None = None,
        offset: int = 0,
        device: MTLDevice | None = None,
    ) -> None:
        if not isinstance(descriptor, MPSMatrixDescriptor):
            raise TypeError(f"MPSMatrix: descriptor must be an MPSMatrixDescriptor, not {type(descriptor).__name__}")
        super().__init__(descriptor, buffer, offset, device)

    @property
    def rows(self) -> int:
        return self._shape[1]

    @property
    def columns(self) -> int:
        return self._shape[2]

    @property
    def matrices(self) -> int:
        return self._shape[0]

    @property
    def rowBytes(self) -> int:
        return self._strides[1]

    @property
    def matrixBytes(self) -> int:
        return self._strides[0]

    def __repr__(self) -> str:
        matrices, rows, columns = self._shape
        return f"<{type(self).__name__}: {matrices} of {rows} x {columns}, {self._dataType.name}>"


class MPSVector(_Storage):
    """Vectors in a buffer: `MPSVector(buffer=, descriptor=)`, with `offset=`, or `MPSVector(device=, descriptor=)`."""

    def __init__(
        self,
        *,
        descriptor: MPSVectorDescriptor,
        buffer: MTLBuffer | None = None,
        offset: int = 0,
        device: MTLDevice | None = None,
    ) -> None:
        if not isinstance(descriptor, MPSVectorDescriptor):
            raise TypeError(f"MPSVector: descriptor must be an MPSVectorDescriptor, not {type(descriptor).__name__}")
        super().__init__(descriptor, buffer, offset, device)

    @property
    def length(self) -> int:
        return self._shape[1]

    @property
    def vectors(self) -> int:
        return self._shape[0]

    @property
    def vectorBytes(self) -> int:
        return self._strides[0]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._shape[0]} of {self._shape[1]}, {self._dataType.name}>"


class TemporaryStorage(_Storage):
    """Storage that is released after `readCount` encodes have read it."""

    _plannable = False  # every encode must count its read
    readCount = Setting[int](as_unsigned, 1, "Number of encodes that will still read the contents.")
    _readCount = 1

    def _elements(self) -> Array:
        if self._readCount == 0:
            raise ValueError(f"{type(self).__name__}: readCount is 0, so the contents are gone")
        return super()._elements()

    def _count_read(self) -> None:
        self._readCount -= 1
        if self._readCount == 0:
            self._release()

    def _release(self) -> None:
        """Free the memory; recorded work keeps it alive."""
        self._readCount = 0
        self._array = self._buffer = None


class MPSTemporaryMatrix(TemporaryStorage, MPSMatrix):
    """A matrix whose contents are released after `readCount` encodes have read it."""

    def __init__(self, *, commandBuffer: MTLCommandBuffer, matrixDescriptor: MPSMatrixDescriptor) -> None:
        device = _device_of("MPSTemporaryMatrix", commandBuffer)
        MPSMatrix.__init__(self, device=device, descriptor=matrixDescriptor)

    @classmethod
    def prefetchStorage(cls, with_: MTLCommandBuffer, matrixDescriptorList: Iterable[MPSMatrixDescriptor]) -> None:
        """No effect: storage is allocated on first use."""
        _device_of("MPSTemporaryMatrix.prefetchStorage", with_)


class MPSTemporaryVector(TemporaryStorage, MPSVector):
    """A vector whose contents are released after `readCount` encodes have read it."""

    def __init__(self, *, commandBuffer: MTLCommandBuffer, descriptor: MPSVectorDescriptor) -> None:
        device = _device_of("MPSTemporaryVector", commandBuffer)
        MPSVector.__init__(self, device=device, descriptor=descriptor)

    @classmethod
    def prefetchStorage(cls, with_: MTLCommandBuffer, descriptorList: Iterable[MPSVectorDescriptor]) -> None:
        """No effect: storage is allocated on first use."""
        _device_of("MPSTemporaryVector.prefetchStorage", with_)


def _device_of(function: str, commandBuffer: MTLCommandBuffer) -> MTLDevice:
    if not isinstance(commandBuffer, MTLCommandBuffer):
        raise TypeError(f"{function}: commandBuffer must be an MTLCommandBuffer, not {type(commandBuffer).__name__}")
    return commandBuffer._queue._device
