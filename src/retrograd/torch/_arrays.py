"""Tensors as arrays, without copies; and the number of threads of a call."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..ops import _threads
from ..ops._buffers import array_of_tensor, storage_fault
from ..ops._memory import LARGE, empty
from ..ops._types import Array

_BYTES: Final = np.dtype(np.uint8)
_CHANNELS_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of axes
_HALF: Final = (torch.bfloat16, torch.float16)


def array(tensor: Tensor, function: str, name: str) -> Array:
    """The tensor's memory as an array. Call it while gradients are not recorded. The names are for errors."""
    try:
        # The usual tensor fills its storage. PyTorch does not check, and reads outside of a smaller one.
        if len(tensor.untyped_storage()) < tensor.nbytes or tensor.storage_offset() or not tensor.is_contiguous():
            check_storage(tensor, function, name)
        view: Array = tensor.numpy()
    except (RuntimeError, TypeError):  # bfloat16, or a view of values with the opposite sign
        return array_of_tensor(tensor.resolve_neg())
    return view


def check_tensor(function: str, name: str, given: object) -> None:
    """Raise unless an argument is a tensor: None, or an array of NumPy."""
    if not isinstance(given, Tensor):
        hint = "; write torch.from_numpy(x)" if isinstance(given, np.ndarray) else ""
        found = "None" if given is None else f"a {type(given).__name__}"
        raise TypeError(f"{function}: {name} is {found}, must be a tensor{hint}")


def check_storage(tensor: Tensor, function: str, name: str) -> None:
    """Raise for a CPU tensor whose storage was freed, or is too small for its elements."""
    fault = storage_fault(tensor)
    if fault:
        raise ValueError(f"{function}: {name} {fault}")


def in_float(tensor: Tensor, function: str, name: str) -> Tensor:
    """The tensor, converted to float32 if it is in half precision."""
    if tensor.dtype not in _HALF:
        return tensor
    check_storage(tensor, function, name)
    return tensor.float()


def dense(tensor: Tensor, function: str, name: str, channels_last: bool = False) -> Tensor:
    """The tensor, or a copy, in dense memory that its address describes: contiguous, or with the channels last."""
    if not channels_last and tensor.is_contiguous():
        # The usual tensor fills its storage. PyTorch does not check, and reads outside of a smaller one.
        if tensor.storage_offset() or len(tensor.untyped_storage()) < tensor.nbytes:
            check_storage(tensor, function, name)
        return tensor.resolve_neg() if tensor.is_neg() else tensor
    check_storage(tensor, function, name)
    form = _CHANNELS_LAST[tensor.dim()] if channels_last else torch.contiguous_format
    return tensor.contiguous(memory_format=form).resolve_neg()


def empty_like(x: Tensor) -> Tensor:
    """A new tensor with the strides of x, which is dense.

    A large one reuses the memory of an earlier one: PyTorch would take fresh memory, which the system clears first.
    """
    size = x.nbytes
    if size < LARGE:
        return torch.empty_like(x)
    memory = torch.from_numpy(empty((size,), _BYTES))
    return x.new_empty(0).set_(memory.untyped_storage(), 0, x.shape, x.stride())  # a view could not change in place


def is_half(tensor: Tensor) -> bool:
    """Whether the data is in half precision. It is computed in float32."""
    return tensor.dtype in _HALF


def num_threads() -> int | None:
    """PyTorch's number of threads, unless the user has chosen retrograd's (None)."""
    return None if _threads.chosen else torch.get_num_threads()
