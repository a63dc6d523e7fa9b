"""Tensors as arrays, without copies; and the number of threads of a call."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..ops import _threads
from ..ops._buffers import array_of_tensor, storage_fault, tensor_of_array
from ..ops._memory import LARGE
from ..ops._memory import empty_like as empty_array_like
from ..ops._types import Array

_SMALL: Final = 1 << 13  # bytes
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


def empty_like(x: Tensor, data: Array) -> tuple[Tensor, Array]:
    """A new tensor in the memory format of x, whose array is `data`; and the new one's array.

    A large one reuses the memory of an earlier one: PyTorch would take fresh memory, which the system clears first. A
    small one comes from NumPy, which takes half the time. Between them the alignment of PyTorch's memory matters.
    """
    size = data.nbytes
    if size >= LARGE:
        memory = empty_array_like(data)
        if memory.strides == data.strides:  # otherwise x has gaps, and PyTorch chooses the new strides
            return tensor_of_array(memory), memory
    elif size <= _SMALL and x.dtype is torch.float32:
        memory = np.empty_like(data)
        if memory.strides == data.strides:
            return torch.from_numpy(memory), memory
    new = torch.empty_like(x)
    return new, array(new, "empty_like", "result")


def is_half(tensor: Tensor) -> bool:
    """Whether the data is in half precision. It is computed in float32."""
    return tensor.dtype in _HALF


def num_threads() -> int | None:
    """PyTorch's number of threads, unless the user has chosen retrograd's (None)."""
    return None if _threads.chosen else torch.get_num_threads()
