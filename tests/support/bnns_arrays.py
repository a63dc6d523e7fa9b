"""NumPy arrays as BNNS descriptors: in every layout, of every type, with gaps between the elements."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from retrograd import bnns

Array = np.ndarray[Any, Any]

LAYOUTS = {
    1: ["Vector", "1DFirstMajor", "1DLastMajor"],
    2: ["RowMajorMatrix", "ColumnMajorMatrix", "2DFirstMajor", "2DLastMajor"],
    3: ["ImageCHW", "SNE", "NSE", "3DFirstMajor", "3DLastMajor"],
    4: ["ConvolutionWeightsOIHW", "4DFirstMajor", "4DLastMajor"],
    **{rank: [f"{rank}DFirstMajor", f"{rank}DLastMajor"] for rank in range(5, 9)},
}
INTEGERS = [np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
FLOATS = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FILL = 97  # every byte between the elements
TYPES = [*FLOATS, *INTEGERS, np.dtype(np.bool_)]


class Described(NamedTuple):
    """An array in the memory of a descriptor."""

    descriptor: bnns.BNNSNDArrayDescriptor
    array: Array  # a view of that memory, with the axes of the array it was made from
    memory: Array  # all of it, gaps included

    def check_gaps(self) -> None:
        """That nothing was written between the elements."""
        saved = self.array.copy()
        self.array[...] = np.full(self.array.itemsize, FILL, np.uint8).view(self.array.dtype)
        assert (self.memory.view(np.uint8) == FILL).all()
        self.array[...] = saved


def described(array: Array, layout: str | None = None, *, gap: int = 0, by_size: bool = False) -> Described:
    """A copy of an array, whose axes are those of the layout's ``size``; with a `gap`, elements are not contiguous.

    In a RowMajorMatrix rows come before columns, although its ``size`` lists columns first, unless `by_size`.
    """
    layout = layout or LAYOUTS[array.ndim][-2]
    turned = not (layout.endswith("FirstMajor") or (layout == "RowMajorMatrix" and not by_size))
    values = array.T if turned else array
    step = 2 if gap else 1
    extents = [n + gap for n in values.shape[:-1]] + [step * values.shape[-1] + gap]
    memory = np.full(math.prod(extents) * array.itemsize, FILL, np.uint8).view(array.dtype).reshape(extents)
    view = memory[(*(slice(n) for n in values.shape[:-1]), slice(0, step * values.shape[-1], step))]
    view[...] = values
    descriptor = bnns.BNNSNDArrayDescriptor.from_array(view, getattr(bnns, f"BNNSDataLayout{layout}"))
    return Described(descriptor, view.T if turned else view, memory)


def any_bits(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    """Elements of any bits, NaN included; Boolean ones are 0 or 1."""
    dtype, random = np.dtype(dtype), np.random.default_rng(seed)
    if dtype == np.bool_:
        return random.integers(0, 2, shape).astype(np.bool_)
    raw = random.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype).reshape(shape)
