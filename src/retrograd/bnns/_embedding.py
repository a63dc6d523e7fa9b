"""Embedding filters: items of a dictionary, looked up by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from ..ops.linear import LinearGradients, embedding_backward, embedding_forward
from . import _constants as c
from ._conversion import INTEGERS
from ._declare import creates
from ._failure import Invalid, Unsupported
from ._filter import FLOAT32, FLOATS, check_same_type
from ._layer import Gradients, OneInputFilter, Parameter, logical, parameter_of, stored
from ._memory import Array, as_float, as_size, check_indices
from ._structures import BNNSNDArrayDescriptor, Float, Size, Structure, UInt32

_BY_FREQUENCY: Final = c.BNNSEmbeddingFlagScaleGradientByFrequency


class BNNSLayerParametersEmbedding(Structure):
    """An embedding layer. The last axis of ``dictionary``, as ``size`` lists them, counts its items.

    The output has the axes of an item, then those of the input.
    """

    flags: UInt32
    i_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor
    dictionary: BNNSNDArrayDescriptor
    padding_idx: Size
    max_norm: Float
    norm_type: Float


class EmbeddingFilter(OneInputFilter):
    """See :func:`BNNSFilterCreateLayerEmbedding`."""

    may_overlap = frozenset({"in"})
    absent = MappingProxyType({"in_delta": "indices have no gradient", "bias_delta": "an embedding has no bias"})

    def __init__(self, layer: BNNSLayerParametersEmbedding, parameters: object) -> None:
        super().__init__(parameters)
        flags = as_size("flags", layer.flags)
        if flags & ~_BY_FREQUENCY:
            raise Invalid(f"flags is {flags:#x}; the only flag is {_BY_FREQUENCY} (scale gradients by frequency)")
        self.by_frequency = bool(flags)
        self.describe(layer, INTEGERS, FLOATS)
        self.dictionary = Parameter("dictionary", layer.dictionary, self, FLOATS)
        check_same_type("o_desc", layer.o_desc, "dictionary", layer.dictionary)
        geometry = self.dictionary.geometry
        *item, self.items = geometry.size
        self.item = tuple(item)
        self._whole = (*item, *self.input.size)
        if _proper(self.output.size) != _proper(self._whole):
            given, wanted = self.output.size, self._whole
            raise Invalid(f"o_desc.size is {given}, expected {wanted}: the size of an item, then that of i_desc")
        self.deltas = {"dw": parameter_of("weights_delta", "dictionary", geometry)}
        self.padding = as_size("padding_idx", layer.padding_idx)
        self.max_norm = as_float("max_norm", layer.max_norm)
        self.norm_type = as_float("norm_type", layer.norm_type) or 2.0
        if not self.max_norm >= 0 or not self.norm_type > 0:
            raise Invalid(
                f"max_norm is {self.max_norm:g} and norm_type {self.norm_type:g}; the first must not be negative, the "
                "second must be positive or 0, which means 2"
            )

    def parameters(self) -> Sequence[Parameter]:
        return (self.dictionary,)

    def _rows(self, dictionary: Array) -> Array:
        """The dictionary with one row of contiguous elements per item."""
        array = logical(dictionary, self.dictionary.geometry.layout, batched=False)
        return np.ascontiguousarray(np.moveaxis(array, -1, 0).reshape(self.items, -1))

    def _indices(self, arrays: Mapping[str, Array | None]) -> Array:
        """The indices ``[batch, ...]``, with the axes in the order of ``size``."""
        given = arrays["in"]
        assert given is not None  # reads
        indices = logical(given, self.input.layout)
        if not indices.flags.aligned:
            indices = indices.copy()
        check_indices("in", indices, self.items, f"dictionary has {self.items} items")
        return indices

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(self, arrays: Mapping[str, Array], out: Array | None) -> Array:
        indices = self._indices(arrays)
        flat = indices.reshape(-1)
        rows = embedding_forward(flat, self._rows(self.dictionary.values()), num_threads=self.threads)
        if self.max_norm:
            rows = self._limited(rows)
        if self.padding < self.items:
            rows[flat == self.padding] = 0
        # [batch, input axes, item axes] to [batch, item axes, input axes]
        values = rows.reshape((*indices.shape, *self.item))
        count = indices.ndim - 1
        values = values.transpose(0, *range(1 + count, values.ndim), *range(1, 1 + count))
        return stored(values.reshape(len(indices), *self.output.size), self.output.layout)

    def _limited(self, rows: Array) -> Array:
        """Items, scaled down where their norm exceeds the limit."""
        with np.errstate(all="ignore"):
            wide = np.abs(rows.astype(np.float64))
            p = self.norm_type
            largest = wide.max(axis=1, keepdims=True)
            # Relative to the largest element, so that powers do not overflow.
            sums = ((wide / np.where(largest > 0, largest, 1)) ** p).sum(axis=1, keepdims=True)
            norms = largest if np.isinf(p) else largest * sums ** (1 / p)
            factors = np.where(norms > self.max_norm, self.max_norm / norms, 1.0)
            return np.asarray((rows * factors).astype(np.float32))

    # ---- backward ---------------------------------------------------------------------------------------------------

    def check_backward(self) -> None:
        if self.output.dtype != FLOAT32:
            raise Unsupported(f"o_desc and dictionary have type {self.output.dtype}; backward needs Float32")

    def reads(self, need: tuple[str, ...]) -> Mapping[str, str]:
        return {"in": "in is NULL"} if need else {}

    def backward(self, wanted: Gradients) -> LinearGradients:
        indices = self._indices(wanted.arrays)
        # [batch, item axes, input axes] to one row per index
        values = logical(wanted.dy, self.output.layout).reshape(len(indices), *self._whole)
        axes = len(self.item)
        values = values.transpose(0, *range(1 + axes, values.ndim), *range(1, 1 + axes))
        flat = indices.reshape(-1)
        rows = np.ascontiguousarray(values.reshape(flat.size, -1))
        gradient = embedding_backward(rows, flat, self.items, num_threads=self.threads)
        if self.by_frequency:
            gradient /= np.maximum(np.bincount(flat.astype(np.int64), minlength=self.items), 1)[:, None]
        if self.padding < self.items:
            gradient[self.padding] = 0
        whole = np.moveaxis(gradient.reshape(self.items, *self.item), 0, -1)
        return LinearGradients(dw=stored(whole, self.dictionary.geometry.layout, batched=False))


def _proper(size: tuple[int, ...]) -> tuple[int, ...]:
    """Extents without those that are 1."""
    return tuple(extent for extent in size if extent != 1)


@creates(EmbeddingFilter, BNNSLayerParametersEmbedding)
def BNNSFilterCreateLayerEmbedding() -> None:
    """Create a filter that looks up items of a dictionary by index. None on failure.

    An index outside the dictionary makes a call fail. Backward computes the gradient of the dictionary.
    """
