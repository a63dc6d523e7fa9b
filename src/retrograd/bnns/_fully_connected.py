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
from ._filter import FLOAT32, FLOATS, check_layout
from ._layer import Delta, Gradients, Parameter, WeightedLayer, real_values
from ._memory import Array, listed
from ._names import type_name
from ._structures import Weighted

_INPUTS: Final = (c.BNNSDataTypeFloat32, c.BNNSDataTypeFloat16, c.BNNSDataTypeInt8, c.BNNSDataTypeInt16)
# All of them hold W[o, i] at i + o * inputs.
_WEIGHTS: Final = (
    c.BNNSDataLayoutRowMajorMatrix,
    c.BNNSDataLayoutColumnMajorMatrix,
    c.BNNSDataLayout2DLastMajor,
    c.BNNSDataLayout2DFirstMajor,
)


class BNNSLayerParametersFullyConnected(Weighted):
    """A fully connected layer. ``w_desc`` has the ``size`` (inputs, outputs); 2DFirstMajor lists outputs first."""


class FullyConnectedFilter(WeightedLayer):
    """See :func:`BNNSFilterCreateLayerFullyConnected`."""

    def __init__(self, layer: BNNSLayerParametersFullyConnected, parameters: object) -> None:
        super().__init__(parameters)
        self.describe(layer, _INPUTS, FLOATS)
        self._scale = scale_of("i_desc", layer.i_desc)
        kinds = "RowMajorMatrix, ColumnMajorMatrix or a 2D layout"
        check_layout("w_desc", layer.w_desc.layout, _WEIGHTS, kinds)
        self.weights = Parameter("w_desc", layer.w_desc, self, _INPUTS)
        given, wanted = self.weights.geometry, (self.input.elements, self.output.elements)
        if given.extents != wanted:
            raise Invalid(
                f"w_desc.size is {given.size}, expected {listed(given.layout, wanted)} for "
                f"{wanted[0]} elements of i_desc and {wanted[1]} of o_desc"
            )
        if layer.w_desc.data_type != layer.i_desc.data_type:
            types = type_name(layer.w_desc.data_type), type_name(layer.i_desc.data_type)
            raise Invalid("w_desc.data_type is {}, but i_desc.data_type is {}".format(*types))
        self.in_shape, self.out_shape = wanted[:1], wanted[1:]
        self.complete(layer, " as in o_desc", Delta.as_many)
        if layer.o_desc.data_type != c.BNNSDataTypeFloat32:
            shown = type_name(layer.o_desc.data_type)
            self.note_extension("BNNSFilterCreateLayerFullyConnected", f"o_desc.data_type is {shown}")

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
