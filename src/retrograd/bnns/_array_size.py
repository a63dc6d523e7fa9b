"""Queries of the size of arrays, and ``BNNSTensor``, the array of Apple's newer interface."""

from __future__ import annotations

from typing import Final

from . import _constants as c
from ._allocation import TensorMemory
from ._failure import Invalid, status
from ._filter import checked_descriptor
from ._memory import as_integer
from ._names import layout_name, type_name
from ._structures import BNNSNDArrayDescriptor, Pointer, SignedExtents, Size, Structure, UInt8, UInt32

_TYPES: Final = frozenset(
    value for name, value in vars(c).items() if name.startswith("BNNSDataType") and not name.endswith("Bit")
)
_LAYOUTS: Final = frozenset(value for name, value in vars(c).items() if name.startswith("BNNSDataLayout"))


class BNNSTensor(TensorMemory, Structure):
    """An array with its slowest axis first. Strides are literal: 0 repeats an element. -1 in ``shape`` is dynamic.

    ``name`` is a debug label, as bytes. The methods are Swift's.
    """

    data_type: UInt32
    rank: UInt8
    shape: SignedExtents
    stride: SignedExtents
    data: Pointer
    data_size_in_bytes: Size
    name: Pointer


@status(0)
def BNNSNDArrayGetDataSize(array: BNNSNDArrayDescriptor) -> int:
    """Return the bytes from the first element of an array to the last. 0 on failure.

    As Apple's function, it fails if ``data`` is NULL, and for types of less than a byte.
    """
    geometry = checked_descriptor("array", array).geometry()
    if array.data is None:
        raise Invalid("array.data is NULL")
    return geometry.span * geometry.dtype.itemsize


@status(c.SIZE_MAX)
def BNNSDataLayoutGetRank(layout: int) -> int:
    """Return the number of axes of a layout; SIZE_MAX if there is no such layout."""
    if not isinstance(layout, int) or layout not in _LAYOUTS:
        raise Invalid(f"layout is {layout_name(layout)}, which is not a BNNSDataLayout")
    return layout >> 16


@status(c.SIZE_MAX)
def BNNSTensorGetAllocationSize(tensor: BNNSTensor) -> int:
    """Return the bytes that a tensor's memory needs; SIZE_MAX if an extent is dynamic, or on failure."""
    if not isinstance(tensor, BNNSTensor):
        raise Invalid(f"tensor is of type {type(tensor).__name__}, not BNNSTensor")
    if not isinstance(tensor.data_type, int) or tensor.data_type not in _TYPES:
        raise Invalid(f"data_type is {type_name(tensor.data_type)}, which is not a type")
    rank = as_integer("rank", tensor.rank)
    if not 0 <= rank <= c.BNNS_MAX_TENSOR_DIMENSION:
        raise Invalid(f"rank is {rank}, must be from 0 to {c.BNNS_MAX_TENSOR_DIMENSION}")
    reach, empty = 0, False
    for k in range(rank):
        extent, stride = as_integer(f"shape[{k}]", tensor.shape[k]), as_integer(f"stride[{k}]", tensor.stride[k])
        if extent < 0:
            raise Invalid(f"shape[{k}] is {extent}: the extent is dynamic, so the size is not known")
        if stride < 0:
            raise Invalid(f"stride[{k}] is {stride}, must be at least 0")
        empty = empty or extent == 0
        reach += (extent - 1) * stride
    bits = 0 if empty else (reach + 1) * (tensor.data_type & 0xFF)
    size = -(-bits // 8)
    if size >= c.SIZE_MAX:
        raise Invalid(f"the tensor spans {size} bytes, more than a size_t can hold")
    return size
