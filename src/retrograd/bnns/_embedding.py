"""Embedding filters: items of a dictionary, looked up by index."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..ops._arrays import overlaps
from ..ops.linear import embedding_backward, embedding_forward
from . import _constants as c
from ._apply import OneInputFilter
from ._conversion import INTEGERS
from ._declare import creates
from ._failure import Invalid, Unsupported
from ._filter import FLOAT32, FLOATS, check_same_type, checked_batch, in_shape, put, source_samples, target_samples
from ._layer import (
    Parameter,
    checked_layer,
    logical,
    output_geometry,
    parameter_delta,
    sample_delta,
    stored,
    typed_geometry,
)
from ._memory import Array, as_float, as_size, check_disjoint, check_indices, listed
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

    def __init__(self, layer: Any, parameters: Any) -> None:
        layer = checked_layer(BNNSLayerParametersEmbedding, layer)
        super().__init__(parameters)
        flags = as_size("flags", layer.flags)
        if flags & ~_BY_FREQUENCY:
            raise Invalid(f"flags is {flags:#x}; the only flag is {_BY_FREQUENCY} (scale gradients by frequency)")
        self.by_frequency = bool(flags)
        self.input = typed_geometry("i_desc", layer.i_desc, INTEGERS)
        self.output = output_geometry("o_desc", layer.o_desc, FLOATS)
        self.dictionary = Parameter("dictionary", layer.dictionary, self, FLOATS)
        check_same_type("o_desc", layer.o_desc, "dictionary", layer.dictionary)
        geometry = self.dictionary.geometry
        *item, self.items = listed(geometry.layout, geometry.extents)
        self.item = tuple(item)
        wanted = (*item, *listed(self.input.layout, self.input.extents))
        given = listed(self.output.layout, self.output.extents)
        if _proper(given) != _proper(wanted):
            raise Invalid(f"o_desc.size is {given}, expected {wanted}: the size of an item, then that of i_desc")
        self._whole = wanted
        self.padding = as_size("padding_idx", layer.padding_idx)
        self.max_norm = as_float("max_norm", layer.max_norm)
        self.norm_type = as_float("norm_type", layer.norm_type) or 2.0
        if not self.max_norm >= 0 or not self.norm_type > 0:
            raise Invalid(
                f"max_norm is {self.max_norm:g} and norm_type {self.norm_type:g}; the first must not be negative, the "
                "second must be positive or 0, which means 2"
            )

    def _rows(self, dictionary: Array) -> Array:
        """The dictionary with one row of contiguous elements per item."""
        array = logical(dictionary, self.dictionary.geometry.layout, batched=False)
        return np.ascontiguousarray(np.moveaxis(array, -1, 0).reshape(self.items, -1))

    def _indices(self, source: Any, batch: int, stride: Any) -> Array:
        """The indices ``[batch, ...]``, with the axes in the order of ``size``."""
        indices = logical(source_samples("in", self.input, source, batch, stride), self.input.layout)
        if not indices.flags.aligned:
            indices = indices.copy()
        check_indices("in", indices, self.items, f"dictionary has {self.items} items")
        return indices

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, batch_size: Any, source: Any, in_stride: Any, target: Any, out_stride: Any) -> None:
        batch = checked_batch(batch_size)
        y = target_samples("out", self.output, target, batch, out_stride)
        check_disjoint({"out": y}, {"dictionary.data": self.dictionary.memory()})
        indices = self._indices(source, batch, in_stride)
        rows = embedding_forward(indices.reshape(-1), self._rows(self.dictionary.values()), num_threads=self.threads)
        if self.max_norm:
            rows = self._limited(rows)
        if self.padding < self.items:
            rows[indices.reshape(-1) == self.padding] = 0
        # [batch, input axes, item axes] to [batch, item axes, input axes]
        values = rows.reshape((*indices.shape, *self.item))
        count = indices.ndim - 1
        values = values.transpose(0, *range(1 + count, values.ndim), *range(1, 1 + count))
        put(y, self._in_memory_order(values, batch), False)

    def _in_memory_order(self, values: Array, batch: int) -> Array:
        """The output's elements, with axes in the order of ``size``, as the output is laid out."""
        size = listed(self.output.layout, self.output.extents)
        return stored(values.reshape(batch, *size), self.output.layout)

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

    def apply_backward(
        self,
        batch_size: Any,
        source: Any,
        in_stride: Any,
        in_delta: Any,
        in_delta_stride: Any,
        out: Any,
        out_stride: Any,
        out_delta: Any,
        out_delta_stride: Any,
        weights_delta: Any,
        bias_delta: Any,
    ) -> None:
        batch = checked_batch(batch_size)
        if in_delta is not None:
            raise Unsupported("in_delta is given, but indices have no gradient")
        if bias_delta is not None:
            raise Unsupported("bias_delta is given, but an embedding has no bias")
        if self.output.dtype != FLOAT32:
            raise Unsupported(f"o_desc and dictionary have type {self.output.dtype}; backward needs Float32")
        if out_delta is None:
            raise Invalid("out_delta is NULL")
        dy = sample_delta("out_delta", out_delta, "o_desc", self.output, batch, out_delta_stride, source_samples)
        if weights_delta is None:
            return
        result = parameter_delta("weights_delta", weights_delta, "dictionary", self.dictionary.geometry)
        indices = self._indices(source, batch, in_stride)
        if overlaps(result.array, indices):
            indices = indices.copy()
        # [batch, item axes, input axes] to one row per index
        values = logical(in_shape(dy, (batch, *self.output.shape)), self.output.layout).reshape(batch, *self._whole)
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
        result.put(stored(whole, self.dictionary.geometry.layout, batched=False))


def _proper(size: tuple[int, ...]) -> tuple[int, ...]:
    """Extents without those that are 1."""
    return tuple(extent for extent in size if extent != 1)


@creates(EmbeddingFilter, BNNSLayerParametersEmbedding)
def BNNSFilterCreateLayerEmbedding() -> None:
    """Create a filter that looks up items of a dictionary by index. None on failure.

    An index outside the dictionary makes a call fail. Backward computes the gradient of the dictionary.
    """
