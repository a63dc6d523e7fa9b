"""Access the memory of any Python object: for the Apple front ends, where the C API takes a pointer.

An object that knows the type and the layout of its elements is typed: arrays, tensors, ``array.array``, ctypes arrays.
Bytes, bytearrays, memory-mapped files and memoryviews of bytes are raw: a descriptor gives their type and layout.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_BYTE: Final = np.dtype(np.uint8)
_RAW: Final = ("B", "b", "c")  # buffer formats of single bytes
_FUNCTION: Final[type[Any]] = ctypes.CFUNCTYPE(None).__mro__[1]  # the base class of ctypes functions
_POINTERS: Final = (
    int,
    np.integer,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_wchar_p,
    ctypes._Pointer,
    _FUNCTION,
    type(ctypes.byref(ctypes.c_int())),
)


def elements_of(data: Any) -> tuple[Array, bool]:
    """Return an array over an object's memory, and whether it is typed. Raw memory becomes an array of bytes.

    Nothing is copied. An object without shareable memory raises a TypeError. The caller puts the argument's name before
    its message.
    """
    if isinstance(data, np.ndarray):
        return _checked(data), True
    if type(data) in (bytearray, bytes) and data:
        return np.frombuffer(data, _BYTE), False
    if isinstance(data, _POINTERS) or hasattr(data, "_as_parameter_"):
        shown = f"the address {int(data):#x}" if isinstance(data, (int, np.integer)) else f"a {type(data).__name__}"
        raise TypeError(f"is {shown}: pass the array, not its address")
    try:
        view = memoryview(data)
    except TypeError:
        return _without_buffer(data), True
    except Exception as error:
        raise TypeError(f"is of type {type(data).__name__}, which gives no buffer: {error}") from None
    code = view.format.lstrip("@=<>!")
    if code in _RAW:
        if not view.contiguous:
            raise TypeError(f"is raw memory with strides {view.strides}, must be contiguous")
        return np.frombuffer(view, _BYTE) if view.nbytes else np.empty(0, _BYTE), False
    if len(code) != 1 or code in "PO":  # structures, pointers
        raise TypeError(f"has elements of format {view.format!r}, which are not numbers")
    return _checked(np.asarray(view)), True


def contiguous_bytes(data: Any) -> npt.NDArray[np.uint8]:
    """An object's memory as one array of bytes, for workspaces. Errors as in :func:`elements_of`."""
    if type(data) is np.ndarray and data.dtype is _BYTE and data.ndim == 1 and data.flags.c_contiguous:
        return data
    array, typed = elements_of(data)
    if not typed:
        return array
    if array.flags.f_contiguous:
        array = array.T
    if not array.flags.c_contiguous:
        raise TypeError(f"is an array of shape {array.shape} with strides {array.strides}, must be contiguous")
    return array.reshape(-1).view(_BYTE)


def _checked(array: Array) -> Array:
    if array.dtype.hasobject:
        raise TypeError(f"is an array of {array.dtype}, not of numbers")
    if type(array) is np.ndarray:
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("is a masked array, whose mask would be lost: pass its filled() array")
    return array.view(np.ndarray)


def _without_buffer(data: Any) -> Array:
    """Return an array through DLPack or ``__array_interface__``."""
    kind = type(data).__name__
    dlpack = hasattr(data, "__dlpack__")
    if not dlpack and (isinstance(data, np.generic) or not hasattr(data, "__array_interface__")):
        raise TypeError(f"is of type {kind}, which has no buffer")
    try:
        if not dlpack:
            return _checked(np.asarray(data))
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(data, torch.Tensor) and data.dtype is torch.bfloat16:
            import ml_dtypes

            # DLPack supports bfloat16, but NumPy's import does not.
            return np.from_dlpack(data.view(torch.int16)).view(ml_dtypes.bfloat16)
        return _checked(np.from_dlpack(data))
    except Exception as error:
        raise TypeError(f"is of type {kind}, which gives no buffer: {error}") from None


def keeps_still(data: Any) -> bool:
    """Whether an object's memory keeps its address while a view of it exists. Only the buffer protocol ensures that."""
    if data is None or isinstance(data, np.ndarray):
        return True
    try:
        memoryview(data)
    except Exception:
        return False
    return True
