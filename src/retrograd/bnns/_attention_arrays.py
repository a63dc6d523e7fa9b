"""A multihead attention's structures, and their descriptors as arrays: parameters, masks and the backprop cache.

Axes are in the order of Apple's text, which is that of ``size``: weights are [d, k, heads], biases [k, heads]. A linear
layer computes all heads at once. It has one output for each head and k, and they follow one another head by head.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from . import _constants as c
from ._arguments import Given
from ._failure import Invalid, Unsupported
from ._filter import FLOAT32, FLOATS, BNNSFilter, checked_descriptor, in_shape, overlapping, source_samples, viewed
from ._layer import Parameter, Result, float32_delta, rows_first, typed_geometry
from ._memory import Array, Geometry, check_writable
from ._names import constant_name
from ._products import shape_rows_first
from ._structures import BNNSNDArrayDescriptor, Bool, Float, Structure, UInt32

VECTORS: Final = (c.BNNSDataLayoutVector, c.BNNSDataLayout1DFirstMajor, c.BNNSDataLayout1DLastMajor)
MATRICES: Final = (
    c.BNNSDataLayoutRowMajorMatrix,
    c.BNNSDataLayoutColumnMajorMatrix,
    c.BNNSDataLayout2DFirstMajor,
    c.BNNSDataLayout2DLastMajor,
)
TENSORS: Final = (c.BNNSDataLayout3DFirstMajor, c.BNNSDataLayout3DLastMajor)
WEIGHTS: Final = (c.BNNSDataLayoutMHA_DHK, *TENSORS)
_PARAMETERS: Final = (VECTORS, MATRICES, WEIGHTS)  # by the number of axes, from 1 on
_ADDED: Final = (*MATRICES, *TENSORS, c.BNNSDataLayout4DFirstMajor, c.BNNSDataLayout4DLastMajor)
_BOOLEAN: Final = (c.BNNSDataTypeBoolean,)


class BNNSMHAProjectionParameters(Structure):
    """A projection: the matrix that is projected (or, of the output, the result), the weights and the bias."""

    target_desc: BNNSNDArrayDescriptor
    weights: BNNSNDArrayDescriptor
    bias: BNNSNDArrayDescriptor


class BNNSLayerParametersMultiheadAttention(Structure):
    """A multihead attention. All of its sizes are those of the descriptors.

    ``dropout`` is the probability of dropping an attention weight; outside of (0, 1) there is no dropout.
    """

    query: BNNSMHAProjectionParameters
    key: BNNSMHAProjectionParameters
    value: BNNSMHAProjectionParameters
    add_zero_attn: Bool
    key_attn_bias: BNNSNDArrayDescriptor
    value_attn_bias: BNNSNDArrayDescriptor
    output: BNNSMHAProjectionParameters
    dropout: Float
    seed: UInt32


class Sizes(NamedTuple):
    targets: int  # the length of the query
    sources: int  # that of key and value
    d_model: int
    k_dim: int
    v_dim: int
    heads: int
    d_key: int
    d_value: int
    biased: bool  # there is a further key for the attention biases
    zero: bool  # and one of zeros

    def named(self, *axes: str) -> dict[str, int]:
        """The extents of axes, each one of these sizes or a product of two."""
        return {axis: math.prod(getattr(self, size) for size in axis.split(" * ")) for axis in axes}

    @property
    def attended(self) -> int:
        """The number of keys, with those that are not in the input."""
        return self.sources + self.biased + self.zero


# ---- descriptors ----------------------------------------------------------------------------------------------------


def layout_checked(name: str, descriptor: object, layouts: tuple[int, ...]) -> BNNSNDArrayDescriptor:
    """The descriptor, if it has one of these layouts."""
    checked = checked_descriptor(name, descriptor)
    if checked.layout not in layouts:
        shown = constant_name("BNNSDataLayout", checked.layout)
        allowed = ", ".join(constant_name("BNNSDataLayout", one).removeprefix("BNNSDataLayout") for one in layouts)
        raise Unsupported(f"{name}.layout is {shown}; it must be {allowed}")
    return checked


def arranged(name: str, descriptor: object, layouts: tuple[int, ...], types: tuple[int, ...] = FLOATS) -> Geometry:
    """The geometry of an array with one of these layouts."""
    return typed_geometry(name, layout_checked(name, descriptor, layouts), types)


def check_axes(name: str, geometry: Geometry, axes: dict[str, int]) -> None:
    """Raise unless an array has these extents, as rows and columns or in the order of ``size``."""
    shape = shape_rows_first(geometry)
    if shape != tuple(axes.values()):
        raise Invalid(f"{name} is {_by(shape)}, expected {_by(axes)} = {_by(axes.values())}")


def _by(sizes: Iterable[object]) -> str:
    return " x ".join(map(str, sizes))


class Slot:
    """Weights, a bias or an attention bias: its axes, and its values if it has any."""

    def __init__(self, name: str, given: BNNSNDArrayDescriptor, owner: BNNSFilter, axes: dict[str, int]) -> None:
        self.axes, self.layouts = axes, _PARAMETERS[len(axes) - 1]
        self.parameter: Parameter | None = None
        if given.data is not None or not name.endswith("bias"):
            self.parameter = Parameter(name, layout_checked(name, given, self.layouts), owner, FLOATS)
            check_axes(name, self.parameter.geometry, axes)

    def weights(self) -> Array:
        """The current values as weights of a linear layer, [outputs, inputs]."""
        assert self.parameter is not None  # weights are required
        values: Array = rows_first(self.parameter.values(), self.parameter.geometry.layout, batched=False).T
        return values.reshape(-1, values.shape[-1])

    def bias(self) -> Array | None:
        """The current values as the bias of a linear layer, [outputs], if there is one."""
        return None if self.parameter is None else self.weights().reshape(-1)

    def delta(self, name: str, descriptor: BNNSNDArrayDescriptor) -> Result:
        """The gradient, with the axes of a linear layer's."""
        geometry = float32_delta(name, layout_checked(name, descriptor, self.layouts))
        check_axes(name, geometry, self.axes)
        if geometry.may_overlap:
            raise overlapping(name, geometry)
        view = viewed(name, descriptor)
        check_writable(f"{name}.data", view)
        return Result(name, descriptor, rows_first(view, geometry.layout, batched=False).T)


# ---- masks ----------------------------------------------------------------------------------------------------------


class Masks(NamedTuple):
    """The masks of a call: as they are in memory, or what they mean."""

    keys: Array | None  # [N, S], true for keys that are ignored
    added: Array | None  # [N or 1, heads or 1, T, S]; booleans are true where there is no attention

    def values(self) -> Masks:
        """Booleans, of which memory may hold any byte, and float32."""
        return Masks(*(None if array is None else _values(array) for array in self))

    def named(self) -> dict[str, Array]:
        given = {"key_mask.data": self.keys, "add_to_attention.data": self.added}
        return {name: array for name, array in given.items() if array is not None}


def _values(array: Array) -> Array:
    if array.dtype == np.bool_:
        return np.asarray(array.view(np.uint8) != 0)
    return in_shape(array, array.shape)


def masks_of(sizes: Sizes, batch: int, given: Given) -> Masks:
    """The masks of a call, as views of their memory."""
    keys = rows = None
    key_mask, added = given["key_mask"], given["add_to_attention"]
    if key_mask is not None:
        geometry = arranged("key_mask", key_mask, VECTORS, _BOOLEAN)
        check_axes("key_mask", geometry, {"source_length": sizes.sources})
        keys = source_samples("key_mask", geometry, key_mask.data, batch, given["key_mask_stride"], ".data")
    if added is not None:
        geometry = arranged("add_to_attention", added, _ADDED, (*FLOATS, *_BOOLEAN))
        axes = {"batch_size": batch, "heads": sizes.heads}
        axes |= {"target_length": sizes.targets, "source_length": sizes.sources}
        missing = 4 - len(geometry.extents)
        check_axes("add_to_attention", geometry, dict([*axes.items()][missing:]))
        rows = rows_first(viewed("add_to_attention", added), geometry.layout, batched=False)[(None,) * missing]
    return Masks(keys, rows)


# ---- what forward leaves for backward -------------------------------------------------------------------------------


class Pass(NamedTuple):
    """What backward needs of a forward pass."""

    seed: int  # of dropout
    q: Array  # [N, T, heads d_key], divided by the root of d_key
    k: Array  # [N, attended, heads d_key]
    v: Array  # [N, attended, heads d_value]
    attention: Array  # [N, heads, T, attended], before dropout
    joined: Array  # [N, T, heads d_value], the heads' results
    ignored: Array  # [N, S], true for keys that are ignored


# A magic number; the seed, the batch and the sizes; the dropout rate; a checksum of all this and of what follows, which
# are the arrays of a pass.
_HEADER: Final = struct.Struct("<8s9QfI")
_CHECKED: Final = _HEADER.size - 4
_MAGIC: Final = b"RGBNNSA1"
_MOST_BYTES: Final = 2**62  # larger byte counts would overflow 64 bits


class Cache:
    """The format of the backprop cache of a batch."""

    def __init__(self, sizes: Sizes, batch: int, rate: float) -> None:
        self._sizes, self._batch, self._rate = sizes, batch, rate
        keys, values = sizes.heads * sizes.d_key, sizes.heads * sizes.d_value
        self._shapes = (
            (batch, sizes.targets, keys),
            (batch, sizes.attended, keys),
            (batch, sizes.attended, values),
            (batch, sizes.heads, sizes.targets, sizes.attended),
            (batch, sizes.targets, values),
            (batch, sizes.sources),  # bytes
        )
        self._dtypes = (*(FLOAT32,) * 5, np.dtype(np.bool_))
        lengths = (math.prod(shape) * dtype.itemsize for shape, dtype in zip(self._shapes, self._dtypes, strict=True))
        self._starts = list(accumulate(lengths, initial=_HEADER.size))
        self.size = self._starts.pop()
        if self.size >= _MOST_BYTES:
            raise Invalid(f"batch_size is {batch}: the arrays of such a batch would not fit in a 64-bit address space")

    def _header(self, seed: int, checksum: int) -> bytes:
        s = self._sizes
        numbers = (seed, self._batch, s.targets, s.sources, s.heads, s.d_key, s.d_value, s.biased, s.zero)
        return _HEADER.pack(_MAGIC, *numbers, self._rate, checksum)

    def _arrays(self, memory: Array) -> list[Array]:
        """Views of the arrays, which need not be aligned."""
        return [
            np.ndarray(shape, dtype, memory, start)
            for shape, dtype, start in zip(self._shapes, self._dtypes, self._starts, strict=True)
        ]

    def write(self, memory: Array, done: Pass) -> None:
        for array, values in zip(self._arrays(memory), done[1:], strict=True):
            array[...] = values
        content = memory.data
        checksum = zlib.crc32(content[_HEADER.size :], zlib.crc32(self._header(done.seed, 0)[:_CHECKED]))
        content[: _HEADER.size] = self._header(done.seed, checksum)

    def read(self, memory: Array) -> Pass:
        """The pass that was written with the same sizes, batch and dropout."""
        content = memory.data
        magic, seed, *_, checksum = _HEADER.unpack_from(content)
        if magic != _MAGIC or zlib.crc32(content[_HEADER.size :], zlib.crc32(content[:_CHECKED])) != checksum:
            raise Invalid("backprop_cache does not hold what a forward call has written for a batch of this size")
        if self._header(seed, checksum) != bytes(content[: _HEADER.size]):
            raise Invalid("backprop_cache was filled by a filter with other sizes or dropout, or another batch_size")
        return Pass(seed, *(array if array.flags.aligned else array.copy() for array in self._arrays(memory)))
