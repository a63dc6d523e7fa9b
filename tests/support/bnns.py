"""The words that tests of retrograd.bnns share: random numbers, descriptors, and what a call has answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import EllipsisType
from typing import Any

import ml_dtypes
import numpy as np

from retrograd import bnns

Array = np.ndarray[Any, Any]
Descriptor = bnns.BNNSNDArrayDescriptor
F32, F16, BF16 = bnns.BNNSDataTypeFloat32, bnns.BNNSDataTypeFloat16, bnns.BNNSDataTypeBFloat16
TYPES = {F32: np.dtype(np.float32), F16: np.dtype(np.float16), BF16: np.dtype(ml_dtypes.bfloat16)}
FIRST = {rank: rank << 16 | 0x8001 for rank in range(1, 9)}  # the layouts FirstMajor
CLIENT = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0.3, 1.2, shape).astype(np.float32)


def image(shape: tuple[int, ...], data: Any = None, **fields: Any) -> Descriptor:
    """ImageCHW of a shape (C, H, W), or Vector of (C,)."""
    layout = bnns.BNNSDataLayoutImageCHW if len(shape) == 3 else bnns.BNNSDataLayoutVector
    return Descriptor(**{"layout": layout, "size": shape[::-1], "data": data, "data_type": F32, **fields})


def vector(what: int | Array, data: Any = ..., **fields: Any) -> Descriptor:
    """A vector of so many elements, or as large as an array and, unless there is other data, in its memory."""
    size = what if isinstance(what, int) else what.size
    if isinstance(data, EllipsisType):
        data = None if isinstance(what, int) else what
    return Descriptor(
        **{"layout": bnns.BNNSDataLayoutVector, "size": (size,), "data": data, "data_type": F32, **fields}
    )


def first(shape: tuple[int, ...], data: Any = None, **fields: Any) -> Descriptor:
    """FirstMajor, whose size is in NumPy's order; a number is a vector of one element."""
    shape = shape or (1,)
    return Descriptor(**{"layout": FIRST[len(shape)], "size": shape, "data": data, "data_type": F32, **fields})


def sized(layout: int, *size: int, data: Any = None, data_type: int = F32, **fields: Any) -> Descriptor:
    return Descriptor(layout=layout, size=size, data=data, data_type=data_type, **fields)


def describe(array: Array | None, layout: int | None = None, **fields: Any) -> Descriptor:
    """Without an array, the empty descriptor of a parameter that is not given."""
    return Descriptor() if array is None else Descriptor.from_array(array, layout, **fields)


def sample(array: Array, layout: int | None = None) -> Descriptor:
    """A descriptor of one sample of a batch, over the memory of all."""
    one = describe(array[0], layout)
    one.data = array
    return one


def inner(a: Array, b: Array) -> float:
    return float((a.astype(np.float64) * b).sum())


def reason() -> str:
    return bnns.last_error() or ""


def fails(status: int, *messages: str) -> None:
    assert status == -1, messages
    for message in messages:
        assert message in reason()


def all_fail(calls: Iterable[tuple[Callable[[], int], str]], *kept: Array) -> None:
    """Each call fails for its reason and writes nothing: what is kept holds 7 everywhere."""
    for call, message in calls:
        fails(call(), message)
        assert all((array == 7).all() for array in kept), message


def succeeds(status: int) -> None:
    assert status == 0, reason()


def created(filter: Any) -> Any:
    assert filter is not None, reason()
    return filter


def not_created(filter: Any, *messages: str) -> None:
    assert filter is None, messages
    for message in messages:
        assert message in reason()


class Allocator:
    """The client's own memory, with a limit to the number of blocks. It holds no zeros, and is freed once."""

    def __init__(self, limit: int = 10**6) -> None:
        self.given: list[Array] = []
        self.freed: list[Array] = []
        self.limit = limit

    @property
    def live(self) -> int:
        return len(self.given) - len(self.freed)

    def alloc(self, memptr: Any, alignment: int, size: int) -> int:
        assert alignment >= 8
        assert alignment & (alignment - 1) == 0
        if len(self.given) >= self.limit:
            return 12  # ENOMEM
        memory = np.full(size + alignment, 0xCD, np.uint8)
        self.given.append(memory[-memory.ctypes.data % alignment :][:size])
        memptr[0] = self.given[-1]
        return 0

    def free(self, block: Any) -> None:
        self.freed.append(block)  # counted even if what follows is caught and logged
        assert any(block is one for one in self.given)
        assert not any(block is one for one in self.freed[:-1])

    def parameters(self) -> Any:
        return bnns.BNNSFilterParameters(alloc_memory=self.alloc, free_memory=self.free)
