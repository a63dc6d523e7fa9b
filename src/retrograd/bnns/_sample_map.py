"""Filters that are a linear map of each sample, without parameters: permutation, padding, dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

import numpy as np

from ..ops.elementwise import dropout
from ..ops.linear import LinearGradients
from . import _constants as c
from ._conversion import INTEGERS
from ._declare import applies, creates
from ._failure import Invalid, Unsupported
from ._filter import FLOAT32, FLOATS, check_same_type
from ._layer import Gradients, OneInputFilter, logical, real_values, stored
from ._memory import Array, Geometry, as_float, as_size, axes_of_size
from ._structures import Extents, Float, InputOutput, Pairs, UInt8, UInt32

ANY_TYPE: Final = (*FLOATS, *INTEGERS, c.BNNSDataTypeBoolean)


class BNNSLayerParametersDropout(InputOutput):
    """A dropout layer. The bits of ``control`` select axes along which elements are kept or dropped together."""

    rate: Float
    seed: UInt32
    control: UInt8


class BNNSLayerParametersPermute(InputOutput):
    """A permutation of axes: axis k of the output is axis ``permutation[k]`` of the input, as ``size`` lists them."""

    permutation: Extents


class BNNSLayerParametersPadding(InputOutput):
    """A padding layer. ``padding_size[k]`` is the padding before and after the axis of ``size[k]``.

    ``padding_value`` holds the bits of the constant; those of shorter elements come first.
    """

    padding_size: Pairs
    padding_mode: UInt32
    padding_value: UInt32


class SampleMap(OneInputFilter):
    """A filter whose output is a linear function of its input, and which has no parameters to train."""

    title: ClassVar[str]
    may_overlap = frozenset({"in"})

    def declare(self, input: Geometry, output: Geometry) -> None:
        super().declare(input, output)
        self.absent = dict.fromkeys(("weights_delta", "bias_delta"), f"{self.title} has nothing to train")

    def check_backward(self) -> None:
        if self.input.dtype != FLOAT32 or self.output.dtype != FLOAT32:
            raise Unsupported(f"this filter maps {self.input.dtype} to {self.output.dtype}; backward needs Float32")


# ---- dropout --------------------------------------------------------------------------------------------------------


class DropoutFilter(SampleMap):
    """See :func:`BNNSFilterCreateLayerDropout`."""

    title = "dropout"

    def __init__(self, layer: BNNSLayerParametersDropout, parameters: object) -> None:
        super().__init__(parameters)
        self.describe(layer, FLOATS, FLOATS)
        if self.input.extents != self.output.extents:
            raise Invalid(f"o_desc.size is {self.output.size}, expected {self.input.size} as in i_desc")
        self.rate = as_float("rate", layer.rate)
        if not 0 <= self.rate < 1:
            raise Invalid(f"rate is {self.rate:g}, must be at least 0 and below 1")
        control, rank = as_size("control", layer.control), len(self.input.extents)
        if control >> rank + 1:
            raise Invalid(f"control is {control:#x}, but i_desc has {rank} axes, and bit {rank} is the batch")
        self.shared = [1 + axis for k, axis in enumerate(axes_of_size(layer.i_desc.layout)) if control >> k & 1]
        if control >> rank:
            self.shared.append(0)
        self._seeds = np.random.default_rng(as_size("seed", layer.seed) or None)
        self._last: tuple[int, int] | None = None  # the seed and the batch of the last forward pass

    def forward(self, arrays: Mapping[str, Array], out: Array | None) -> Array:
        seed = int(self._seeds.integers(2**63))
        y = self._dropped(real_values(arrays["in"]), seed)
        self._last = seed, len(y)
        return y

    def backward(self, wanted: Gradients) -> LinearGradients:
        assert self._last is not None  # check_state
        return LinearGradients(dx=self._dropped(wanted.dy, self._last[0]))

    def check_state(self, batch: int) -> None:
        last = self._last
        if last is None:
            raise Invalid("there was no forward pass, whose mask backward uses")
        if last[1] != batch:
            raise Invalid(f"batch_size is {batch}, but the last forward pass had {last[1]}")

    def _dropped(self, x: Array, seed: int) -> Array:
        if not self.shared:
            return dropout(x, self.rate, seed=seed, num_threads=self.threads)
        shape = [1 if axis in self.shared else extent for axis, extent in enumerate(x.shape)]
        mask = dropout(np.ones(shape, np.float32), self.rate, seed=seed, num_threads=self.threads)
        with np.errstate(all="ignore"):
            return np.where(mask == 0, np.float32(0), x * mask)


# ---- permutation ----------------------------------------------------------------------------------------------------


class PermuteFilter(SampleMap):
    """See :func:`BNNSFilterCreateLayerPermute`."""

    title = "a permutation"

    def __init__(self, layer: BNNSLayerParametersPermute, parameters: object) -> None:
        super().__init__(parameters)
        self.describe(layer, ANY_TYPE, ANY_TYPE)
        check_same_type("o_desc", layer.o_desc, "i_desc", layer.i_desc)
        rank = len(self.input.extents)
        if len(self.output.extents) != rank:
            raise Invalid(f"o_desc has {len(self.output.extents)} axes, expected {rank} as in i_desc")
        axes = [as_size(f"permutation[{k}]", layer.permutation[k]) for k in range(rank)]
        if sorted(axes) != list(range(rank)):
            raise Invalid(f"permutation is {tuple(axes)}, which is not a permutation of {rank} axes")
        size = self.input.size
        wanted = tuple(size[axis] for axis in axes)
        if self.output.size != wanted:
            raise Invalid(f"o_desc.size is {self.output.size}, expected {wanted} for i_desc.size {size}, permuted")
        self._axes = (0, *(1 + axis for axis in axes))

    def forward(self, arrays: Mapping[str, Array], out: Array | None) -> Array:
        return stored(logical(arrays["in"], self.input.layout).transpose(self._axes), self.output.layout)

    def backward(self, wanted: Gradients) -> LinearGradients:
        inverse = np.argsort(self._axes)
        return LinearGradients(dx=stored(logical(wanted.dy, self.output.layout).transpose(inverse), self.input.layout))


# ---- padding --------------------------------------------------------------------------------------------------------


class PaddingFilter(SampleMap):
    """See :func:`BNNSFilterCreateLayerPadding`."""

    title = "padding"

    def __init__(self, layer: BNNSLayerParametersPadding, parameters: object) -> None:
        super().__init__(parameters)
        self.describe(layer, ANY_TYPE, ANY_TYPE)
        check_same_type("o_desc", layer.o_desc, "i_desc", layer.i_desc)
        rank = len(self.input.extents)
        if rank > 4 or len(self.output.extents) != rank:
            raise Invalid(f"i_desc has {rank} axes and o_desc {len(self.output.extents)}; at most 4, and as many")
        mode = layer.padding_mode
        if mode not in (c.BNNSPaddingModeConstant, c.BNNSPaddingModeReflect, c.BNNSPaddingModeSymmetric):
            raise Invalid(f"padding_mode is {mode!r}, which is not a BNNSPaddingMode")
        self._mode = mode
        size = self.input.size
        pads = [
            (as_size(f"padding_size[{k}][0]", before), as_size(f"padding_size[{k}][1]", after))
            for k, (before, after) in enumerate(layer.padding_size[:rank])
        ]
        wanted = tuple(extent + sum(pad) for extent, pad in zip(size, pads, strict=True))
        if self.output.size != wanted:
            raise Invalid(f"o_desc.size is {self.output.size}, expected {wanted} for i_desc.size {size}, padded")
        bits = as_size("padding_value", layer.padding_value) & 0xFFFFFFFF
        self._value = _from_bits(bits, self.input.dtype)
        self._axes = list(zip(size, pads, strict=True))
        for k, (extent, pad) in enumerate(self._axes):
            most = extent - 1 if mode == c.BNNSPaddingModeReflect else extent
            if mode != c.BNNSPaddingModeConstant and max(pad) > most:
                raise Invalid(f"padding_size[{k}] is {pad}, but an axis of {extent} elements mirrors at most {most}")

    def _indices(self) -> list[Array]:
        """For each axis, in the order of ``size``, the index of the input's element; -1 is the constant."""
        if self._mode == c.BNNSPaddingModeConstant:
            return [np.pad(np.arange(extent), pad, constant_values=-1) for extent, pad in self._axes]
        mode: Literal["reflect", "symmetric"] = "reflect" if self._mode == c.BNNSPaddingModeReflect else "symmetric"
        return [np.pad(np.arange(extent), pad, mode=mode) for extent, pad in self._axes]

    def forward(self, arrays: Mapping[str, Array], out: Array | None) -> Array:
        values = logical(arrays["in"], self.input.layout)
        for axis, index in enumerate(self._indices(), 1):
            inside = index >= 0
            values = np.take(values, np.where(inside, index, 0), axis)
            if not inside.all():
                values[(slice(None),) * axis + (~inside,)] = self._value
        return stored(values, self.output.layout)

    def backward(self, wanted: Gradients) -> LinearGradients:
        values = logical(wanted.dy, self.output.layout).astype(np.float64)
        for axis, index in enumerate(self._indices(), 1):
            inside = index >= 0
            moved = np.moveaxis(values, axis, 0)
            total = np.zeros((self._axes[axis - 1][0], *moved.shape[1:]))
            with np.errstate(all="ignore"):
                np.add.at(total, index[inside], moved[inside])
            values = np.moveaxis(total, 0, axis)
        return LinearGradients(dx=stored(values, self.input.layout))


def _from_bits(bits: int, dtype: np.dtype[Any]) -> np.generic:
    """An element whose first bytes are those of a 32-bit number; the rest of a longer one is 0."""
    image = np.frombuffer(bits.to_bytes(8, "little")[: dtype.itemsize], np.uint8)
    element: np.generic = image.astype(np.bool_)[0] if dtype == np.bool_ else image.view(dtype)[0]
    return element


# ---- Apple's functions ----------------------------------------------------------------------------------------------


@creates(DropoutFilter, BNNSLayerParametersDropout)
def BNNSFilterCreateLayerDropout() -> None:
    """Create a filter that sets elements to 0 with probability `rate` and multiplies the others by 1 / (1 - rate).

    Every forward call draws a new mask; backward uses the last one. None on failure.
    """


@creates(PermuteFilter, BNNSLayerParametersPermute)
def BNNSFilterCreateLayerPermute() -> None:
    """Create a filter that permutes axes. None on failure."""


@creates(PaddingFilter, BNNSLayerParametersPadding)
def BNNSFilterCreateLayerPadding() -> None:
    """Create a filter that pads axes with a constant or by mirroring, without or with the border. None on failure."""


@applies(
    PermuteFilter,
    "filter is not a permute filter",
    "apply_backward",
    "filter batch_size (None) (0) in_delta+ (None) (0) out_delta+ (None) (None)",
)
def BNNSPermuteFilterApplyBackwardBatch() -> None:
    """Compute the gradient of a permutation's input: the inverse permutation. 0, or -1 on failure."""
