"""Random calls of retrograd.bnns on whole arrays: the largest values, for fuzz_bnns.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from retrograd import bnns
from support.fuzz_bnns_filters import Buffers, Case, array, filter_parameters, status

VECTOR, INT32 = bnns.BNNSDataLayoutVector, bnns.BNNSDataTypeInt32


def typed(memory: Buffers, layout: int, size: list[int], batch: int, data_type: int, dtype: Any) -> Any:
    """A descriptor of one sample, over the memory of a batch."""
    described = array(memory, layout, *size, data=memory.take(batch * int(np.prod(size)), dtype))
    described.data_type = data_type
    return described


def largest(random: np.random.Generator, memory: Buffers) -> Case:
    layout = int(random.choice([bnns.BNNSDataLayoutImageCHW, bnns.BNNSDataLayout3DFirstMajor]))
    size, axis, batch = [int(n) for n in random.integers(1, 5, 3)], int(random.integers(3)), int(random.integers(1, 4))
    count = int(random.integers(1, size[axis] + 1))
    best, rest = [*size[:axis], count, *size[axis + 1 :]], [*size[:axis], *size[axis + 1 :]]
    matrix = bnns.BNNSDataLayout2DFirstMajor if layout & 1 else bnns.BNNSDataLayout2DLastMajor
    float32, boolean = bnns.BNNSDataTypeFloat32, bnns.BNNSDataTypeBoolean
    test = typed(memory, matrix, rest, batch, INT32, np.int32)
    test.data %= size[axis]
    a = {"K": count, "axis": axis, "batch": batch, "in_stride": 0, "out_stride": 0}
    roots = [
        typed(memory, layout, size, batch, float32, np.float32),
        typed(memory, layout, best, batch, float32, np.float32),
        typed(memory, layout, best, batch, INT32, np.int32),
        test,
        typed(memory, matrix, rest, batch, boolean, np.bool_),
        a,
        filter_parameters(random),
    ]
    wanted = random.random() < 0.8

    def calls() -> Iterator[Any]:
        source, values, indices, test, output, a, parameters = roots
        first = (a["K"], a["axis"], a["batch"], source, a["in_stride"])
        yield (
            "BNNSDirectApplyTopK",
            lambda: bnns.BNNSDirectApplyTopK(
                *first, values, a["out_stride"], indices if wanted else None, a["out_stride"], parameters
            ),
            status,
        )
        yield (
            "BNNSDirectApplyInTopK",
            lambda: bnns.BNNSDirectApplyInTopK(*first, test, a["in_stride"], output, a["out_stride"], parameters),
            status,
        )

    return Case(roots, calls)


ARRAYS: list[Callable[[np.random.Generator, Any], Case]] = [largest]
