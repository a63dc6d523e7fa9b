"""Arrays of other libraries, and the memory of any Python object: the only module that knows about them.

The functions take every array in the CPU's memory that is shared through DLPack or the buffer protocol, without a copy,
and give tensors back to callers with tensors. A library is recognised only if it has been imported.

For the Apple front ends, where the C API takes a pointer, an object that knows the type and the layout of its elements
is typed: arrays, tensors, ``array.array``, ctypes arrays. Bytes, bytearrays, memory-mapped files and memoryviews of
bytes are raw: a descriptor gives their type and layout.
"""

from __future__ import annotations

import array
import ctypes
import inspect
import mmap
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from ._errors import ArgumentTypeError
from ._types import BYTE, INT16, Array

_BUFFERS: Final = (memoryview, array.array, bytearray, ctypes.Array, mmap.mmap)
_ON_THE_CPU: Final = (1, 3, 11, 13)  # DLPack's types of devices: the CPU, and memory that it shares with a GPU
_RAW: Final = ("B", "b", "c")  # buffer formats of single bytes
# Arguments of the functions that are written to.
_WRITTEN: Final = {"out", "keep_x", "running_mean", "running_var", "cache", "parameters", "velocities"} | {
    *("first_moments", "second_moments", "largest_second_moments", "squares", "means")
}
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
        return np.frombuffer(data, BYTE), False
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
        return np.frombuffer(view, BYTE) if view.nbytes else np.empty(0, BYTE), False
    if len(code) != 1 or code in "PO":  # structures, pointers
        raise TypeError(f"has elements of format {view.format!r}, which are not numbers")
    return _checked(np.asarray(view)), True


def contiguous_bytes(data: Any) -> npt.NDArray[np.uint8]:
    """An object's memory as one array of bytes, for workspaces. Errors as in :func:`elements_of`."""
    if type(data) is np.ndarray and data.dtype is BYTE and data.ndim == 1 and data.flags.c_contiguous:
        return data
    array, typed = elements_of(data)
    if not typed:
        return array
    if array.flags.f_contiguous:
        array = array.T
    if not array.flags.c_contiguous:
        raise TypeError(f"is an array of shape {array.shape} with strides {array.strides}, must be contiguous")
    return array.reshape(-1).view(BYTE)


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
    if is_foreign(data):
        return _checked(foreign_array(data))
    kind = type(data).__name__
    if isinstance(data, np.generic) or not hasattr(data, "__array_interface__"):
        raise TypeError(f"is of type {kind}, which has no buffer")
    try:
        return _checked(np.asarray(data))
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


# ---- arrays of other libraries --------------------------------------------------------------------------------------


def is_foreign(value: Any) -> bool:
    """Whether an object that is not a NumPy array shares its memory as an array."""
    if isinstance(value, (np.ndarray, np.generic)):
        return False
    return isinstance(value, _BUFFERS) or hasattr(type(value), "__dlpack__")


def is_tensor(value: Any) -> bool:
    """Whether an object is a tensor of PyTorch."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def _is_jax_array(value: Any) -> bool:
    return isinstance(value, getattr(sys.modules.get("jax"), "Array", ()))


def foreign_array(value: Any) -> Array:
    """A view of a foreign array's memory. The caller puts the argument's name before the message of a TypeError."""
    reason = _why_not(value)
    if reason:
        raise TypeError(reason)
    try:
        if is_tensor(value):
            return array_of_tensor(value)
        # NumPy imports no bfloat16 from DLPack, but JAX's arrays are buffers too.
        by_buffer = isinstance(value, _BUFFERS) or _is_jax_array(value)
        return np.asarray(value) if by_buffer else np.from_dlpack(value)
    except Exception as error:
        raise TypeError(f"is of type {type(value).__name__}, which gives no buffer: {error}") from None


def _why_not(value: Any) -> str:
    """Why the functions do not take a foreign array; empty if they do."""
    if isinstance(value, _BUFFERS):
        return ""
    if is_tensor(value):
        if value.requires_grad:
            return "requires grad, which these functions do not record: pass its detach(), or use retrograd.torch"
        return storage_fault(value) if value.is_cpu else f"is on {value.device}, must be on the CPU: pass its cpu()"
    if _is_jax_array(value) and isinstance(value, sys.modules["jax"].core.Tracer):
        return "is traced by JAX: inside jit, grad and vmap use retrograd.jax"
    try:
        device = int(value.__dlpack_device__()[0])
    except Exception as error:
        return f"is of type {type(value).__name__}, whose device is unknown: {error}"
    return "" if device in _ON_THE_CPU else f"is on a device of DLPack's type {device}, must be on the CPU"


def storage_fault(tensor: Any) -> str:
    """Why the storage of a CPU tensor does not contain its elements, if it was freed, for example; otherwise empty."""
    if tensor.layout is not sys.modules["torch"].strided or not tensor.numel():
        return ""
    size = len(tensor.untyped_storage())
    last = tensor.storage_offset()
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (extent - 1) * stride
    needed = (last + 1) * tensor.itemsize
    return "" if size >= needed else f"has a storage of {size} bytes, expected at least {needed} for its elements"


def array_of_tensor(tensor: Any) -> Array:
    """A view of a tensor's memory. PyTorch raises an error where that is not possible."""
    torch = sys.modules["torch"]
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return tensor.numpy()  # type: ignore[no-any-return]


def tensor_of_array(array: Array) -> Any:
    """A tensor with an array's memory; the array itself if PyTorch has no such dtype or strides."""
    torch = sys.modules["torch"]
    dtype = array.dtype
    try:
        if dtype.kind == "V" and dtype.name == "bfloat16":  # finding the name takes long
            return torch.from_numpy(array.view(INT16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        return array


_Class = TypeVar("_Class", bound=type[Any])
_OPAQUE: Final[set[type[Any]]] = set()


def opaque(kind: _Class) -> _Class:
    """Mark a class of tuples that keep NumPy arrays whatever the caller's are: what forward saves for backward."""
    _OPAQUE.add(kind)
    return kind


class _Views:
    """Views of the foreign arrays of one call."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[Array, Any]] = {}  # by the id of the array: the array, and what it is a view of
        self._tensors: list[tuple[str, Any]] = []  # with their names

    def take(self, name: str, value: Any) -> Any:
        """An argument with views in the place of foreign arrays."""
        if isinstance(value, np.ndarray):
            self._given[id(value)] = value, value
            return value
        if is_foreign(value):
            try:
                view = foreign_array(value)
            except TypeError as error:
                raise ArgumentTypeError(name, "{argument} {}", str(error)) from None
            if is_tensor(value):
                self._tensors.append((name, value))
            self._given[id(view)] = view, value
            return view
        if isinstance(value, Iterator):
            raise ArgumentTypeError(
                name, "{argument} is an iterator: pass a list along with arrays that are not NumPy's"
            )
        if type(value) in _OPAQUE:
            return value
        return _mapped(self.take, name, value)

    def record_writes(self) -> None:
        """Tell autograd which tensors have changed: it may have saved them for a backward pass."""
        written = [tensor for name, tensor in self._tensors if re.split(r"[.[]", name, maxsplit=1)[0] in _WRITTEN]
        if written:
            sys.modules["torch"].autograd.graph.increment_version(written)

    def give_back(self, result: Any) -> Any:
        """A result with the caller's arrays in the place of their views, and tensors if the caller passed any."""
        if isinstance(result, np.ndarray):
            given = self._given.get(id(result))
            if given is not None:
                return given[1]
            return tensor_of_array(result) if self._tensors else result
        return result if type(result) in _OPAQUE else _mapped(lambda _, part: self.give_back(part), "", result)


def _mapped(function: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    """A tuple, list or dict with a function of the names and values of its parts; anything else as it is."""
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        parts = [
            function(f"{name}.{part}" if isinstance(part, str) else f"{name}[{part}]", item)
            for part, item in zip(names, value, strict=True)
        ]
        return tuple.__new__(type(value), parts)
    if type(value) is list:
        return [function(f"{name}[{i}]", item) for i, item in enumerate(value)]
    if type(value) is dict:
        return {key: function(f"{name}.{key}", item) for key, item in value.items()}
    return value


def has_foreign(value: Any) -> bool:
    """Whether there is a foreign array in an argument."""
    if isinstance(value, (tuple, list)):
        return type(value) not in _OPAQUE and any(map(has_foreign, value))
    if isinstance(value, dict):
        return any(map(has_foreign, value.values()))
    return is_foreign(value)


def call_with_views(
    call: Callable[..., Any], function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Call with views of the foreign arrays. `function` has the names of the arguments."""
    views = _Views()
    names = [*inspect.signature(function).parameters, *(f"argument {i}" for i in range(len(arguments)))]
    taken = [views.take(name, value) for name, value in zip(names, arguments, strict=False)]
    named = {name: views.take(name, value) for name, value in options.items()}
    result = call(*taken, **named)
    views.record_writes()
    return views.give_back(result)
