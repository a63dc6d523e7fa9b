"""Quantizers: numbers scaled, shifted and rounded to integers, and back."""

from __future__ import annotations

from typing import Final

import numpy as np

from . import _constants as c
from ._conversion import INTEGERS, PLAIN, converted
from ._direct import Operand, as_stored, check_unrotated
from ._failure import Invalid, status
from ._filter import FLOATS, BNNSFilter, checked_batch, put
from ._layer import Parameter, checked_layer, logical
from ._memory import Array, as_size, check_disjoint, listed
from ._names import constant_name
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor, Size, Structure, UInt32

_FUNCTIONS: Final = (c.BNNSQuantizerFunctionQuantize, c.BNNSQuantizerFunctionDequantize)
_HIGHER: Final = (c.BNNSDataTypeInt32, c.BNNSDataTypeFloat16, c.BNNSDataTypeFloat32)
_LOWER: Final = (
    c.BNNSDataTypeInt8,
    c.BNNSDataTypeUInt8,
    c.BNNSDataTypeInt16,
    c.BNNSDataTypeUInt16,
    c.BNNSDataTypeInt32,
    c.BNNSDataTypeUInt32,
)
_OPERANDS: Final = (*FLOATS, *INTEGERS)  # types of scale and bias
_FLOAT64: Final = np.dtype(np.float64)
_PREFIXES: Final = {"function": "BNNSQuantizerFunction"}


class BNNSLayerParametersQuantization(Structure):
    """A quantization ``scale x + bias``, or a dequantization ``(x - bias) / scale``.

    ``axis_mask`` has the bit of the axis that ``scale`` and ``bias`` belong to: bit k for that of ``size[k]``, the bit
    above the last one for the batch; 0 if they have one element for all. Without data they are 1 and 0.
    """

    axis_mask: Size
    function: UInt32
    i_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor
    scale: BNNSNDArrayDescriptor
    bias: BNNSNDArrayDescriptor

    _prefixes = _PREFIXES


class QuantizationFilter(BNNSFilter):
    """See :func:`BNNSDirectApplyQuantizer`. Also the second stage of fused filters."""

    def __init__(self, layer_params: object, parameters: object) -> None:
        layer = checked_layer(BNNSLayerParametersQuantization, layer_params)
        super().__init__(parameters)
        if layer.function not in _FUNCTIONS or isinstance(layer.function, bool):
            raise Invalid(f"function is {layer.function!r}, which is not a BNNSQuantizerFunction")
        self._quantizes = layer.function == c.BNNSQuantizerFunctionQuantize
        sources, targets = (_HIGHER, _LOWER) if self._quantizes else (_LOWER, _HIGHER)
        self.source = Operand("i_desc", sources, rotated=True, order=as_stored)
        self.target = Operand("o_desc", targets, written=True, rotated=True, order=as_stored)
        self.input, self.output = self.source.geometry(layer.i_desc), self.target.geometry(layer.o_desc)
        size, given = (listed(geometry.layout, geometry.extents) for geometry in (self.input, self.output))
        if given != size:
            raise Invalid(f"o_desc.size is {given}, expected {size} as in i_desc")
        # The axis of scale and bias in an array [batch, size[0], size[1], ...]; None: they have one element.
        self._axis = self._checked_axis(layer.axis_mask, len(size))
        # Elements correspond if both sides are rotated, but not to a scale along a kernel.
        if self.input.layout != self.output.layout or self._axis in (1, 2):
            check_unrotated("i_desc", self.input)
            check_unrotated("o_desc", self.output)
        self._batch: int | None = None  # the number of samples, if that is the axis
        self.scale = self._operand("scale", layer.scale, size)
        self.bias = self._operand("bias", layer.bias, size)

    @staticmethod
    def _checked_axis(axis_mask: object, rank: int) -> int | None:
        mask = as_size("axis_mask", axis_mask)
        if mask >> rank + 1:
            raise Invalid(f"axis_mask is {mask:#x}, but i_desc has {rank} axes, and bit {rank} is the batch")
        if mask & (mask - 1):
            raise Invalid(f"axis_mask is {mask:#x}, must have one bit at most")
        if mask == 0:
            return None
        return 0 if mask >> rank else mask.bit_length()

    def _operand(self, name: str, descriptor: BNNSNDArrayDescriptor, size: tuple[int, ...]) -> Parameter | None:
        """The scale or the bias. Its descriptor's own scale and bias are ignored, as those of input and output."""
        if descriptor.data is None:
            return None
        operand = Parameter(name, descriptor, self, _OPERANDS, _FLOAT64, PLAIN)
        if len(operand.geometry.extents) > 1:
            shown = constant_name("BNNSDataLayout", descriptor.layout)
            raise Invalid(f"{name}.layout is {shown}, must be BNNSDataLayoutVector")
        elements = operand.geometry.elements
        if self._axis == 0:
            if self._batch not in (None, elements):
                raise Invalid(f"{name} has {elements} elements, but scale has {self._batch}, one for each sample")
            self._batch = elements
            return operand
        expected = 1 if self._axis is None else size[self._axis - 1]
        if elements != expected:
            where = "for an axis_mask of 0" if self._axis is None else f"as axis {self._axis - 1} of i_desc"
            raise Invalid(f"{name} has {elements} elements, expected {expected} {where}")
        return operand

    def write(self, x: Array, y: Array, name: str) -> None:
        """Convert samples [batch, ...] with their slowest axis first. All are computed before any is written.

        `name` is that of the output in messages.
        """
        operands = {operand.name: operand for operand in (self.scale, self.bias) if operand is not None}
        if self._batch not in (None, len(x)):
            shown = next(iter(operands))
            raise Invalid(f"batch_size is {len(x)}, but {shown} has {self._batch} elements, one for each sample")
        check_disjoint({name: y}, {f"{key}.data": operand.memory() for key, operand in operands.items()})
        values = logical(x, self.input.layout).astype(np.float64)
        shape = [1] * values.ndim
        if self._axis is not None:
            shape[self._axis] = -1
        given = ((self.scale, 1.0), (self.bias, 0.0))
        scale, bias = (default if one is None else one.values().reshape(shape) for one, default in given)
        with np.errstate(all="ignore"):
            values = values * scale + bias if self._quantizes else (values - bias) / scale
        put(logical(y, self.output.layout), converted(values, PLAIN, y.dtype, PLAIN), False)


@status(-1)
def BNNSDirectApplyQuantizer(
    layer_params: BNNSLayerParametersQuantization,
    filter_params: BNNSFilterParameters | None,
    batch_size: int,
    input_stride: int,
    output_stride: int,
) -> int:
    """Quantize or dequantize the samples of ``i_desc`` into ``o_desc``. 0, or -1 on failure.

    Quantize maps Int32, Float16 or Float32 to integers of 8, 16 or 32 bits, Dequantize the other way. Integers are
    rounded half to even and saturate; NaN becomes 0. ``data_scale`` and ``data_bias`` of the descriptors are ignored.
    """
    filter = QuantizationFilter(layer_params, filter_params)
    try:
        batch = checked_batch(batch_size)
        y = filter.target.samples(layer_params.o_desc, batch, output_stride, "output_stride")
        x = filter.source.samples(layer_params.i_desc, batch, input_stride, "input_stride")
        filter.write(x.array, y.array, "o_desc.data")
    finally:
        filter.destroy()
    return 0
