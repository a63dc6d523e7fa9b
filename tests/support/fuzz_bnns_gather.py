"""Random calls of the functions that gather, scatter, rearrange and compare elements, for fuzz_bnns.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from retrograd import bnns
from support.fuzz_bnns_filters import Buffers, Case, filter_parameters, status
from support.fuzz_driver import Broken

TYPES = [np.float32, np.float32, np.float16, np.int8, np.int32, np.uint64, np.bool_]
# The arguments of each function that it must not take for another type: their places among a case's roots.
TAKES = {
    "BNNSGather": (0, 1, 2),
    "BNNSScatter": (0, 1, 2),
    "BNNSGatherND": (0, 3, 4),
    "BNNSScatterND": (0, 3, 4),
    "BNNSTile": (0, 1),
    "BNNSTileBackward": (2, 3),
    "BNNSShuffle": (4, 5),
    "BNNSBandPart": (1, 6),
    "BNNSCompareTensor": (0, 8),
}


def coded(answer: Any) -> bool:
    """A status of the functions that have codes of their own: each goes with its reason."""
    words = {-1003: ("axes", ".size is", "vectors of"), -1005: ("has the index",)}.get(answer)
    if words is None:
        return status(answer)
    if not any(word in (bnns.last_error() or "") for word in words):
        raise Broken(f"the answer is {answer}, and the reason {bnns.last_error()!r}")
    return True


def chosen(random: np.random.Generator, rank: int) -> int:
    """A layout with so many axes."""
    more = {1: [0x10000], 2: [0x20000, 0x20001], 3: [0x30000, 0x30001, 0x30002], 4: [0x40000]}[rank]
    return int(random.choice([rank << 16 | 0x8000, rank << 16 | 0x8001, *more]))


def typed(memory: Buffers, layout: int, shape: tuple[int, ...], dtype: Any, bound: int = 0) -> Any:
    """An array with these axes, rows first; of integers below `bound` if there is one."""
    data = memory.take(int(np.prod(shape)), dtype)
    if bound:
        data[...] = memory.random.integers(0, bound, data.size)
    described = bnns.BNNSNDArrayDescriptor.from_array(data)
    size = shape[::-1] if layout == bnns.BNNSDataLayoutRowMajorMatrix else shape
    return bnns.BNNSNDArrayDescriptor(layout=layout, size=size, data=data, data_type=described.data_type)


def gathering(random: np.random.Generator, memory: Buffers) -> Case:
    dtype, integers = TYPES[random.integers(len(TYPES))], [np.int32, np.int64, np.uint8][random.integers(3)]
    rank = int(random.integers(1, 4))
    shape, axis = tuple(int(n) for n in random.integers(1, 5, rank)), int(random.integers(rank))
    part = (*shape[:axis], int(random.integers(1, 5)), *shape[axis + 1 :])
    layout = chosen(random, rank)
    line = bool(random.random() < 0.5)
    indices = typed(memory, *((0x10000, (part[axis],)) if line else (layout, part)), integers, shape[axis])
    length, grid = int(random.integers(1, rank + 1)), (int(random.integers(1, 4)),)
    slices = (*grid, *shape[length:])
    roots = [
        typed(memory, layout, shape, dtype),
        indices,
        typed(memory, layout, part, dtype),
        typed(memory, chosen(random, 2), (*grid, length), integers, min(shape[:length])),
        typed(memory, chosen(random, len(slices)), slices, dtype),
        {"axis": axis, "op": int(random.choice([bnns.BNNSReduceFunctionNone, bnns.BNNSReduceFunctionSum]))},
        filter_parameters(random),
    ]

    def calls() -> Iterator[Any]:
        whole, at, part, vectors, slices, a, parameters = roots
        yield "BNNSGather", lambda: bnns.BNNSGather(a["axis"], whole, at, part, parameters), coded
        yield "BNNSScatter", lambda: bnns.BNNSScatter(a["axis"], a["op"], part, at, whole, parameters), coded
        yield "BNNSGatherND", lambda: bnns.BNNSGatherND(whole, vectors, slices, parameters), coded
        yield "BNNSScatterND", lambda: bnns.BNNSScatterND(a["op"], slices, vectors, whole, parameters), coded

    return Case(roots, calls)


def rearranging(random: np.random.Generator, memory: Buffers) -> Case:
    dtype = TYPES[random.integers(len(TYPES))]
    small = tuple(int(n) for n in random.integers(1, 4, 2))
    large = tuple(int(n * random.integers(1, 4)) for n in small)
    layout, opposite = chosen(random, 2), bool(random.random() < 0.3)
    sizes = [tuple(int(n) for n in (size[::-1] if layout == 0x20000 else size)) for size in (small, large)]
    n, c, h, w, r = (int(k) for k in random.integers(1, 4, 5))
    deep, wide = (n, c * r * r, h, w), (n, c, h * r, w * r)
    kind = int(random.integers(0, 4))
    images = [typed(memory, bnns.BNNSDataLayout4DFirstMajor, shape, dtype) for shape in (deep, wide)]
    if kind in (bnns.BNNSShuffleTypePixelUnshuffleNCHW, bnns.BNNSShuffleTypeSpaceToDepthNCHW):
        images.reverse()
    op = int(random.integers(0, 12))
    compared = np.bool_ if op >= bnns.BNNSRelationalOperatorLogicalAND else dtype
    roots = [
        typed(memory, layout, sizes[0], dtype),
        typed(memory, layout, sizes[1], dtype),
        typed(memory, layout, sizes[0], np.float32),
        typed(memory, layout, sizes[1], np.float32),
        *images,
        typed(memory, layout, sizes[1], dtype),
        typed(memory, layout, sizes[0], compared),
        typed(memory, layout, sizes[0], np.bool_),
        {"type": kind, "op": op, "lower": int(random.integers(-1, 3)), "upper": int(random.integers(-1, 3))},
        filter_parameters(random),
    ]
    if compared is np.bool_ and dtype is not np.bool_:
        roots[0] = roots[7].copy()  # the tiles are then refused

    def calls() -> Iterator[Any]:
        tile, tiles, dx, dy, source, target, bands, other, flags, a, parameters = roots
        yield "BNNSTile", lambda: bnns.BNNSTile(tile, tiles, parameters, opposite_axes=opposite), status
        yield (
            "BNNSTileBackward",
            lambda: bnns.BNNSTileBackward(dx, dy, parameters, opposite_axes=opposite),
            status,
        )
        yield "BNNSShuffle", lambda: bnns.BNNSShuffle(a["type"], source, target, parameters), status
        yield "BNNSBandPart", lambda: bnns.BNNSBandPart(a["lower"], a["upper"], tiles, bands, parameters), status
        yield "BNNSCompareTensor", lambda: bnns.BNNSCompareTensor(tile, other, a["op"], flags), status

    return Case(roots, calls)


GATHERS: list[Callable[[np.random.Generator, Any], Case]] = [gathering, gathering, rearranging]
