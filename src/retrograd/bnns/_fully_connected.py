"""Fully connected filters: a matrix product, a bias and an activation."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..ops.elementwise import activation_forward
from ..ops.linear import LinearGradients, linear_backward, linear_forward
from . import _constants as c
from ._apply import OneInputFilter
from ._conversion import scale_of
from ._declare import creates
from ._failure import Invalid, Unsupported
from ._filter import FLOAT32, FLOATS, checked_batch, in_shape, put, source_samples, target_samples
from ._layer import (
    Parameter,
    Result,
    any_overlap,
    before_activation,
    bias_delta_of,
    check_apart,
    check_trainable,
    checked_layer,
    layer_activation,
    output_geometry,
    parameter_delta,
    real_values,
    sample_delta,
    typed_geometry,
)
from ._memory import Array, check_disjoint, listed
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


class FullyConnectedFilter(OneInputFilter):
    """See :func:`BNNSFilterCreateLayerFullyConnected`."""

    def __init__(self, layer: Any, parameters: Any) -> None:
        layer = checked_layer(BNNSLayerParametersFullyConnected, layer)
        super().__init__(parameters)
        self.input = typed_geometry("i_desc", layer.i_desc, _INPUTS)
        self.output = output_geometry("o_desc", layer.o_desc, FLOATS)
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

    def _linear(self, x: Array, out: Array | None = None) -> Array:
        """The output before the activation."""
        bias = None if self.bias is None else self.bias.values().reshape(-1)
        return linear_forward(x, self.weights.values(), bias, out=out, num_threads=self.threads)

    def _parameters(self) -> dict[str, Array]:
        present = (self.weights,) if self.bias is None else (self.weights, self.bias)
        return {f"{parameter.name}.data": parameter.memory() for parameter in present}

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, batch_size: Any, source: Any, in_stride: Any, target: Any, out_stride: Any) -> None:
        batch = checked_batch(batch_size)
        y = target_samples("out", self.output, target, batch, out_stride)
        x = source_samples("in", self.input, source, batch, in_stride)
        check_disjoint({"out": y}, {"in": x, **self._parameters()})
        x = real_values(x, self._scale).reshape(batch, self.input.elements)
        direct = y.dtype is FLOAT32 and y.ndim == 2 and y.flags.aligned
        z = self._linear(x, y if direct else None)
        if self.activation.function.name != "identity":
            z = activation_forward(z, self.activation.function, out=z, num_threads=self.threads)
        if z is not y:
            put(y, z.reshape(y.shape), False)

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
        for name, geometry in (("i_desc and w_desc", self.input), ("o_desc", self.output)):
            if geometry.dtype != FLOAT32:
                raise Unsupported(f"{name} of this filter have type {geometry.dtype}; backward needs Float32")
        if out_delta is None:
            raise Invalid("out_delta is NULL")
        check_trainable(self.activation, out)
        dy = sample_delta("out_delta", out_delta, "o_desc", self.output, batch, out_delta_stride, source_samples)
        x = None if source is None else source_samples("in", self.input, source, batch, in_stride)
        y = None if out is None else source_samples("out", self.output, out, batch, out_stride)
        from_input = self.activation.slope_from == "input"
        if x is None and (weights_delta is not None or from_input):
            wanted = "the activation's slope" if from_input else "weights_delta"
            raise Invalid(f"in is NULL, and {wanted} is computed from it")
        results: dict[str, Result] = {}
        if in_delta is not None:
            dx = sample_delta("in_delta", in_delta, "i_desc", self.input, batch, in_delta_stride, target_samples)
            results["dx"] = Result("in_delta", in_delta, dx)
        if weights_delta is not None:
            results["dw"] = parameter_delta("weights_delta", weights_delta, "w_desc", self.weights.geometry)
        if bias_delta is not None:
            results["db"] = bias_delta_of(bias_delta, self.bias, self.output.elements)
        if not results:
            return
        check_apart(list(results.values()))
        rows = in_shape(dy, (batch, self.output.elements))
        inputs = {"in": x, "out": y, "out_delta": dy, **self._parameters()}
        # dx and db do not depend on the input, but the engine needs an array of its shape.
        x32 = np.broadcast_to(np.float32(0), (batch, self.input.elements)) if x is None else x
        x32 = in_shape(x32, (batch, self.input.elements))
        dz = before_activation(self.activation, rows, y, lambda: self._linear(x32), self.threads)
        w = self.weights.values()
        buffers = self._buffers(results, inputs, batch)
        computed = linear_backward(
            dz,
            x32,
            w,
            need=tuple(results),
            out=buffers,
            accumulate=buffers is not None and next(iter(results.values())).accumulates,
            num_threads=self.threads,
        )
        if buffers is None:
            for name, result in results.items():
                result.put(getattr(computed, name))

    def _buffers(self, results: dict[str, Result], inputs: dict[str, Array | None], batch: int) -> Any:
        """The results' memory, if the engine can write all of it in one call; None otherwise."""
        if len({result.accumulates for result in results.values()}) > 1 or any_overlap(list(results.values()), inputs):
            return None
        shapes = {
            "dx": (batch, self.input.elements),
            "dw": self.weights.geometry.shape,
            "db": (self.output.elements,),
        }
        buffers = {name: result.rows(shapes[name]) for name, result in results.items()}
        return None if any(array is None for array in buffers.values()) else LinearGradients(**buffers)


@creates(FullyConnectedFilter, BNNSLayerParametersFullyConnected)
def BNNSFilterCreateLayerFullyConnected() -> None:
    """Create a filter that computes ``f(W x + b)``. None on failure.

    Input and weights have the same type, Float32, Float16, Int8 or Int16; the output is Float32. Backward, by
    :func:`BNNSFilterApplyBackwardBatch`, needs Float32 throughout.
    """
