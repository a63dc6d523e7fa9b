"""Fully connected filters: a matrix product, a bias and an activation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..ops.elementwise import activation_forward
from ..ops.linear import LinearGradients, linear_backward, linear_forward
from . import _constants as c
from ._conversion import scale_of
from ._declare import creates
from ._failure import Invalid, Unsupported
from ._filter import FLOAT32, FLOATS
from ._layer import (
    Delta,
    Gradients,
    Parameter,
    WeightedLayer,
    bias_of,
    checked_layer,
    layer_activation,
    output_geometry,
    parameter_of,
    real_values,
    typed_geometry,
)
from ._memory import Array, listed
from ._names import constant_name
from ._structures import BNNSActivation, BNNSNDArrayDescriptor, Structure

_INPUTS: Final = (c.BNNSDataTypeFloat32, c.BNNSDataTypeFloat16, c.BNNSDataTypeInt8, c.BNNSDataTypeInt16)
_BIASES: Final = (*FLOATS, c.BNNSDataTypeInt8, c.BNNSDataTypeInt16, c.BNNSDataTypeInt32)
# All of them hold W[o, i] at i + o * inputs.
_WEIGHTS: Final = (
    c.BNNSDataLayoutRowMajorMatrix,
    c.BNNSDataLayoutColumnMajorMatrix,
    c.BNNSDataLayout2DLastMajor,
    c.BNNSDataLayout2DFirstMajor,
)


class BNNSLayerParametersFullyConnected(Structure):
    """A fully connected layer. ``w_desc`` has the ``size`` (inputs, outputs); 2DFirstMajor lists outputs first."""

    i_desc: BNNSNDArrayDescriptor
    w_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor
    bias: BNNSNDArrayDescriptor
    activation: BNNSActivation


class FullyConnectedFilter(WeightedLayer):
    """See :func:`BNNSFilterCreateLayerFullyConnected`."""

    def __init__(self, layer: object, parameters: object) -> None:
        layer = checked_layer(BNNSLayerParametersFullyConnected, layer)
        super().__init__(parameters)
        self.declare(typed_geometry("i_desc", layer.i_desc, _INPUTS), output_geometry("o_desc", layer.o_desc, FLOATS))
        self._scale = scale_of("i_desc", layer.i_desc)
        if layer.w_desc.layout not in _WEIGHTS:
            shown = constant_name("BNNSDataLayout", layer.w_desc.layout)
            raise Unsupported(f"w_desc.layout is {shown}; it must be RowMajorMatrix, ColumnMajorMatrix or a 2D layout")
        self.weights = Parameter("w_desc", layer.w_desc, self, _INPUTS)
        given, wanted = self.weights.geometry, (self.input.elements, self.output.elements)
        if given.extents != wanted:
            raise Invalid(
                f"w_desc.size is {listed(given.layout, given.extents)}, expected {listed(given.layout, wanted)} for "
                f"{wanted[0]} elements of i_desc and {wanted[1]} of o_desc"
            )
        if layer.w_desc.data_type != layer.i_desc.data_type:
            types = (constant_name("BNNSDataType", d.data_type) for d in (layer.w_desc, layer.i_desc))
            raise Invalid("w_desc.data_type is {}, but i_desc.data_type is {}".format(*types))
        self.bias: Parameter | None = None
        if layer.bias.data is not None:
            self.bias = Parameter("bias", layer.bias, self, _BIASES)
            if self.bias.geometry.elements != wanted[1]:
                raise Invalid(f"bias has {self.bias.geometry.elements} elements, expected {wanted[1]} as in o_desc")
        self.activation = layer_activation(layer.activation, self.output)
        if layer.o_desc.data_type != c.BNNSDataTypeFloat32:
            shown = constant_name("BNNSDataType", layer.o_desc.data_type)
            self.note_extension("BNNSFilterCreateLayerFullyConnected", f"o_desc.data_type is {shown}")

        self.in_shape, self.out_shape = wanted[:1], wanted[1:]
        self.out_delta = Delta("out_delta", "o_desc", self.output, self.out_shape)
        self.deltas = {
            "dx": Delta("in_delta", "i_desc", self.input, self.in_shape),
            "dw": parameter_of("weights_delta", "w_desc", given, given.shape),
            "db": bias_of(self.bias, wanted[1]),
        }

    def _linear(self, x: Array, out: Array | None = None) -> Array:
        """The output before the activation."""
        bias = None if self.bias is None else self.bias.values().reshape(-1)
        return linear_forward(x, self.weights.values(), bias, out=out, num_threads=self.threads)

    def forward(self, arrays: Mapping[str, Array], out: Array | None) -> Array:
        x = real_values(arrays["in"], self._scale)
        z = self._linear(x.reshape(len(x), self.input.elements), out)
        if self.activation.function.name == "identity":
            return z
        return activation_forward(z, self.activation.function, out=z, num_threads=self.threads)

    def check_backward(self) -> None:
        for name, geometry in (("i_desc and w_desc", self.input), ("o_desc", self.output)):
            if geometry.dtype != FLOAT32:
                raise Unsupported(f"{name} of this filter have type {geometry.dtype}; backward needs Float32")
        super().check_backward()

    def before_activation(self, arrays: Mapping[str, Array | None], batch: int) -> Array:
        return self._linear(self.x(arrays, batch))

    def backward(self, wanted: Gradients) -> LinearGradients:
        dy, arrays, need, out, accumulate, _ = wanted
        x, w = self.x(arrays, len(dy)), self.weights.values()
        return linear_backward(dy, x, w, need=need, out=out, accumulate=accumulate, num_threads=self.threads)


@creates(FullyConnectedFilter, BNNSLayerParametersFullyConnected)
def BNNSFilterCreateLayerFullyConnected() -> None:
    """Create a filter that computes ``f(W x + b)``. None on failure.

    Input and weights have the same type, Float32, Float16, Int8 or Int16; the output is Float32. Backward, by
    :func:`BNNSFilterApplyBackwardBatch`, needs Float32 throughout.
    """
