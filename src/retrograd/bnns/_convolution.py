"""Convolution filters and transposed ones."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from ..ops.convolution import (
    ConvGradients,
    conv_backward,
    conv_forward,
    conv_transpose_backward,
    conv_transpose_forward,
)
from . import _constants as c
from ._apply import OneInputFilter
from ._conversion import PLAIN, converted, scale_of
from ._declare import creates
from ._failure import Invalid, Unsupported
from ._filter import (
    FLOAT32,
    FLOATS,
    checked_batch,
    checked_descriptor,
    delta_samples,
    in_shape,
    put,
    source_samples,
    target_samples,
)
from ._layer import (
    Parameter,
    Result,
    any_overlap,
    before_activation,
    bias_delta_of,
    check_apart,
    check_trainable,
    checked_layer,
    float32_delta,
    layer_activation,
    output_geometry,
    parameter_delta,
    real_values,
    typed_geometry,
)
from ._memory import Array, as_size, check_disjoint, data_type_of
from ._names import constant_name
from ._structures import BNNSActivation, BNNSNDArrayDescriptor, FourSizes, Size, Structure

_TYPES: Final = (c.BNNSDataTypeFloat32, c.BNNSDataTypeFloat16, c.BNNSDataTypeInt8, c.BNNSDataTypeUInt8)
_OUTPUTS: Final = (*_TYPES, c.BNNSDataTypeBFloat16)
_BIASES: Final = (*FLOATS, c.BNNSDataTypeInt8, c.BNNSDataTypeInt16, c.BNNSDataTypeInt32)
_IMAGES: Final = (c.BNNSDataLayoutImageCHW, c.BNNSDataLayout3DLastMajor, c.BNNSDataLayout3DFirstMajor)
_OIHW: Final = c.BNNSDataLayoutConvolutionWeightsOIHW
_ROTATED: Final = c.BNNSDataLayoutConvolutionWeightsOIHrWr
_IO_ROTATED: Final = c.BNNSDataLayoutConvolutionWeightsIOHrWr
_PACKED: Final = c.BNNSDataLayoutConvolutionWeightsOIHW_Pack32
_WEIGHTS: Final = (_OIHW, _ROTATED, _IO_ROTATED, _PACKED)
_PACK: Final = 32  # outputs of a block of the packed layout
_MOST: Final = 2**31 - 1  # of strides, dilations and paddings


class BNNSLayerParametersConvolution(Structure):
    """A convolution. ``pad`` (left, right, up, down) is used if ``x_padding`` and ``y_padding`` are 0."""

    i_desc: BNNSNDArrayDescriptor
    w_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor
    bias: BNNSNDArrayDescriptor
    activation: BNNSActivation
    x_stride: Size
    y_stride: Size
    x_dilation_stride: Size
    y_dilation_stride: Size
    x_padding: Size
    y_padding: Size
    groups: Size
    pad: FourSizes


class _Axis(NamedTuple):
    """One axis, in the words of the array functions."""

    stride: int
    dilation: int
    padding: tuple[int, int]
    used: int  # pixels of the larger image that kernels reach, of those that there are


class _Kernels:
    """Weights in one of Apple's layouts, seen as OIHW.

    Blocks of the packed layout are [blocks][I][H][W][32], whatever is behind the last output.
    """

    def __init__(self, descriptor: BNNSNDArrayDescriptor) -> None:
        self.layout = descriptor.layout
        if self.layout not in _WEIGHTS:
            shown = constant_name("BNNSDataLayout", self.layout)
            raise Unsupported(f"w_desc.layout is {shown}; it must be ConvolutionWeightsOIHW or another of its kind")
        size = [as_size(f"w_desc.size[{k}]", descriptor.size[k]) for k in range(4)]
        width, height, third, fourth = size
        if 0 in size:
            raise Invalid(f"w_desc.size is {tuple(size)}, and an extent must be at least 1")
        self.shape = (third, fourth, height, width) if self.layout == _IO_ROTATED else (fourth, third, height, width)

    def plain(self, descriptor: BNNSNDArrayDescriptor) -> BNNSNDArrayDescriptor:
        """The descriptor with a layout that extents and strides describe."""
        if descriptor.layout != _PACKED:
            return descriptor
        outputs, inputs, height, width = self.shape
        plain = descriptor.copy()
        plain.layout = c.BNNSDataLayout5DLastMajor
        plain.size = (_PACK, width, height, inputs, -(-outputs // _PACK))
        plain.stride = (0,) * 8
        return plain

    def oihw(self, array: Array) -> Array:
        """The array as [O, I, H, W]: a view, except of packed weights."""
        if self.layout == _PACKED:
            blocks, inputs, height, width, lanes = array.shape
            packed: Array = array.transpose(0, 4, 1, 2, 3).reshape(blocks * lanes, inputs, height, width)
            return packed[: self.shape[0]]
        if self.layout == _IO_ROTATED:
            array = array.transpose(1, 0, 2, 3)
        rotated: Array = array[:, :, ::-1, ::-1]
        return array if self.layout == _OIHW else rotated

    def stored(self, oihw: Array) -> Array:
        """The opposite, for values: lanes behind the last output are 0."""
        if self.layout == _PACKED:
            outputs, inputs, height, width = self.shape
            blocks = -(-outputs // _PACK)
            whole = np.zeros((blocks * _PACK, inputs, height, width), oihw.dtype)
            whole[:outputs] = oihw
            packed: Array = whole.reshape(blocks, _PACK, inputs, height, width).transpose(0, 2, 3, 4, 1)
            return packed
        array = oihw if self.layout == _OIHW else oihw[:, :, ::-1, ::-1]
        return array.transpose(1, 0, 2, 3) if self.layout == _IO_ROTATED else array


class ConvolutionFilter(OneInputFilter):
    """See :func:`BNNSFilterCreateLayerConvolution`."""

    def __init__(self, layer: Any, parameters: Any, transposed: bool) -> None:
        layer = checked_layer(BNNSLayerParametersConvolution, layer)
        super().__init__(parameters)
        self._transposed = transposed
        self._function = (
            "BNNSFilterCreateLayerTransposedConvolution" if transposed else "BNNSFilterCreateLayerConvolution"
        )
        types = (c.BNNSDataTypeFloat32,) if transposed else _TYPES
        self._check_image("i_desc", layer.i_desc)
        self._check_image("o_desc", layer.o_desc)
        self.input = typed_geometry("i_desc", layer.i_desc, types)
        self.output = output_geometry("o_desc", layer.o_desc, types if transposed else _OUTPUTS)
        self._scale, self._out_scale = scale_of("i_desc", layer.i_desc), scale_of("o_desc", layer.o_desc)
        if layer.o_desc.data_type == c.BNNSDataTypeBFloat16:
            self.note_extension(self._function, "o_desc.data_type is BNNSDataTypeBFloat16")
        self.groups = max(1, as_size("groups", layer.groups))
        self._kernels = _Kernels(layer.w_desc)
        self._check_channels()
        self._axes = self._both_axes(layer)
        self._options: dict[str, Any] = {
            "stride": tuple(axis.stride for axis in self._axes),
            "dilation": tuple(axis.dilation for axis in self._axes),
            "padding": tuple(axis.padding for axis in self._axes),
            "groups": self.groups,
            "num_threads": self.threads,
        }
        self.weights = Parameter("w_desc", self._kernels.plain(layer.w_desc), self, types)
        self.bias: Parameter | None = None
        if layer.bias.data is not None:
            self.bias = Parameter("bias", layer.bias, self, _BIASES)
            if self.bias.geometry.elements != self.output.shape[0]:
                raise Invalid(
                    f"bias has {self.bias.geometry.elements} elements, expected {self.output.shape[0]}, one for each "
                    "channel of o_desc"
                )
        self.activation = layer_activation(layer.activation, self.output)

    def _check_image(self, name: str, descriptor: BNNSNDArrayDescriptor) -> None:
        if descriptor.layout not in _IMAGES:
            shown = constant_name("BNNSDataLayout", descriptor.layout)
            raise Unsupported(f"{name}.layout is {shown}; it must be ImageCHW, 3DLastMajor or 3DFirstMajor")
        if descriptor.layout != c.BNNSDataLayoutImageCHW:
            shown = constant_name("BNNSDataLayout", descriptor.layout)
            self.note_extension(self._function, f"{name}.layout is {shown}")

    def _check_channels(self) -> None:
        inputs, outputs = self.input.shape[0], self.output.shape[0]
        if self.groups > 1:
            if self._kernels.layout not in (_OIHW, _ROTATED):
                shown = constant_name("BNNSDataLayout", self._kernels.layout)
                raise Invalid(f"groups is {self.groups}, which w_desc.layout {shown} does not have")
            for name, channels in (("i_desc", inputs), ("o_desc", outputs)):
                if channels % self.groups:
                    raise Invalid(f"groups is {self.groups}, which does not divide the {channels} channels of {name}")
        given, wanted = self._kernels.shape[:2], (outputs, inputs // self.groups)
        if given != wanted:
            raise Invalid(
                f"w_desc has {given[0]} outputs and {given[1]} inputs, expected {wanted[0]} and {wanted[1]} for "
                f"{outputs} channels of o_desc and {inputs} of i_desc in {self.groups} groups"
            )

    def _both_axes(self, layer: BNNSLayerParametersConvolution) -> tuple[_Axis, _Axis]:
        names = ("x_stride", "y_stride", "x_dilation_stride", "y_dilation_stride", "x_padding", "y_padding")
        sizes = {name: as_size(name, getattr(layer, name)) for name in names}
        try:
            given = tuple(layer.pad)
        except TypeError:
            given = ()
        if len(given) != 4:
            raise Invalid(f"pad is {layer.pad!r}, must have 4 entries: left, right, up, down")
        pad = {f"pad[{k}]": as_size(f"pad[{k}]", value) for k, value in enumerate(given)}
        for name, value in (*sizes.items(), *pad.items()):
            if value > _MOST:
                raise Unsupported(f"{name} is {value}, must be at most {_MOST}")
        left, right, up, down = pad.values()
        if any(given) and not (sizes["x_padding"] or sizes["y_padding"]):
            pads = {"x": (left, right), "y": (up, down)}
        else:
            pads = {"x": (sizes["x_padding"],) * 2, "y": (sizes["y_padding"],) * 2}
        y, x = (
            self._axis(
                name,
                self.input.shape[k],
                self.output.shape[k],
                self._kernels.shape[k + 1],
                sizes[f"{name}_stride"] or 1,
                sizes[f"{name}_dilation_stride"] or 1,
                pads[name],
            )
            for k, name in ((1, "y"), (2, "x"))
        )
        return y, x

    def _axis(
        self, name: str, inputs: int, outputs: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int]
    ) -> _Axis:
        """Pixels of the larger image that no kernel reaches are ignored, or get the bias alone."""
        large, small = (outputs, inputs) if self._transposed else (inputs, outputs)
        names = ("o_desc", "i_desc") if self._transposed else ("i_desc", "o_desc")
        reach = stride * (small - 1) + (kernel - 1) * dilation + 1
        if large + sum(pads) < reach:
            raise Invalid(
                f"{names[1]} has {small} pixels along {name}, whose kernels of {kernel} with stride {stride} and "
                f"dilation {dilation} span {reach}, but {names[0]} has {large}, with padding {pads[0]} and {pads[1]}"
            )
        before = min(pads[0], reach)
        used = min(large, reach - before)
        if self._transposed and used == 0:
            raise Unsupported(
                f"the padding along {name} is {pads[0]} and {pads[1]}, which leaves none of the {reach} pixels that "
                "kernels reach"
            )
        return _Axis(stride, dilation, (before, reach - before - used), used)

    # ---- the engine -------------------------------------------------------------------------------------------------

    def _engine_weights(self) -> Array:
        """The current weights as the array functions take them."""
        w = self._kernels.oihw(self.weights.values())
        if not self._transposed:
            return w
        outputs, inputs, height, width = w.shape
        parts = w.reshape(self.groups, outputs // self.groups, inputs, height, width).swapaxes(1, 2)
        engine: Array = parts.reshape(self.groups * inputs, outputs // self.groups, height, width)
        return engine

    def _used(self, images: Array) -> Array:
        """The part of the larger images that kernels reach."""
        y, x = (axis.used for axis in self._axes)
        return images[:, :, :y, :x]

    def _bias_values(self) -> Array | None:
        return None if self.bias is None else self.bias.values().reshape(-1)

    def _convolve(self, x: Array, out: Array | None, activation: Any = None) -> Array:
        """f(w * x + b) of images in float32."""
        w, b = self._engine_weights(), self._bias_values()
        options = {**self._options, "activation": activation}
        if not self._transposed:
            return conv_forward(self._used(x), w, b, out=out, **options)
        y = np.empty((len(x), *self.output.shape), np.float32) if out is None else out
        conv_transpose_forward(x, w, b, out=self._used(y), **options)
        if self._used(y).shape != y.shape:
            # Where no kernel reaches, there is the bias alone: a convolution of nothing.
            channels = self.output.shape[0]
            rest = conv_forward(
                np.empty((1, 0, 1), np.float32), np.empty((channels, 0, 1), np.float32), b, activation=activation
            ).reshape(channels, 1, 1)
            rows, columns = (axis.used for axis in self._axes)
            y[:, :, rows:] = rest
            y[:, :, :rows, columns:] = rest
        return y

    def _parameters(self) -> dict[str, Array]:
        present = (self.weights,) if self.bias is None else (self.weights, self.bias)
        return {f"{parameter.name}.data": parameter.memory() for parameter in present}

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, batch_size: Any, source: Any, in_stride: Any, target: Any, out_stride: Any) -> None:
        batch = checked_batch(batch_size)
        y = target_samples("out", self.output, target, batch, out_stride)
        x = source_samples("in", self.input, source, batch, in_stride)
        check_disjoint({"out": y}, {"in": x, **self._parameters()})
        direct = y.dtype is FLOAT32 and y.flags.aligned
        z = self._convolve(real_values(x, self._scale), y if direct else None, self.activation.function)
        if z is y:
            return
        if y.dtype.kind in "iu":
            z = converted(z, PLAIN, y.dtype, self._out_scale)
        put(y, z, False)

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
        self._check_backward(out_delta, out)
        dy = self._delta("out_delta", out_delta, "o_desc", self.output, batch, out_delta_stride, source_samples)
        x = None if source is None else source_samples("in", self.input, source, batch, in_stride)
        y = None if out is None else source_samples("out", self.output, out, batch, out_stride)
        from_input = self.activation.slope_from == "input"
        if x is None and (weights_delta is not None or from_input):
            wanted = "the activation's slope" if from_input else "weights_delta"
            raise Invalid(f"in is NULL, and {wanted} is computed from it")
        results: dict[str, Result] = {}
        if in_delta is not None:
            dx = self._delta("in_delta", in_delta, "i_desc", self.input, batch, in_delta_stride, target_samples)
            results["dx"] = Result("in_delta", in_delta, dx)
        if weights_delta is not None:
            results["dw"] = self._weights_delta(weights_delta)
        if bias_delta is not None:
            results["db"] = bias_delta_of(bias_delta, self.bias, self.output.shape[0])
        if not results:
            return
        check_apart(list(results.values()))
        inputs = {"in": x, "out": y, "out_delta": dy, **self._parameters()}
        # dx and db do not depend on the input, but the engine needs an array of its shape.
        shape = (batch, *self.input.shape)
        x32 = np.broadcast_to(np.float32(0), shape) if x is None else in_shape(x, shape)
        dy32 = in_shape(dy, (batch, *self.output.shape))
        dz = before_activation(self.activation, dy32, y, lambda: self._convolve(x32, None), self.threads)
        buffers = self._buffers(results, inputs, batch)
        accumulate = buffers is not None and next(iter(results.values())).accumulates
        computed = self._gradients(dz, x32, tuple(results), buffers, accumulate)
        if buffers is not None:
            if "dx" in results and not accumulate:
                self._clear_unused(results["dx"].rows(shape))
            return
        for name, result in results.items():
            values: Any = getattr(computed, name)
            if name == "dx" and values.shape != shape:
                whole = np.zeros(shape, np.float32)
                self._used(whole)[...] = values
                values = whole
            result.put(self._kernels.stored(self._oihw_gradient(values)) if name == "dw" else values)

    def _check_backward(self, out_delta: Any, out: Any) -> None:
        for name, geometry in (("i_desc", self.input), ("w_desc", self.weights.geometry), ("o_desc", self.output)):
            if geometry.dtype != FLOAT32:
                shown = constant_name("BNNSDataType", data_type_of(geometry.dtype))
                raise Unsupported(f"{name} has type {shown}; backward needs Float32")
        if self._transposed and self.groups > 1:
            raise Unsupported(f"groups is {self.groups}; a transposed convolution with groups has no gradient")
        if out_delta is None:
            raise Invalid("out_delta is NULL")
        check_trainable(self.activation, out)

    @staticmethod
    def _delta(name: str, descriptor: Any, *geometry: Any) -> Array:
        float32_delta(name, descriptor)
        return delta_samples(name, descriptor, *geometry)

    def _weights_delta(self, descriptor: Any) -> Result:
        """The gradient of the weights, in their layout."""
        name = "weights_delta"
        layout = checked_descriptor(name, descriptor).layout
        if layout in _WEIGHTS and layout != self._kernels.layout:
            shown = (constant_name("BNNSDataLayout", one) for one in (layout, self._kernels.layout))
            raise Invalid("weights_delta.layout is {}, expected {} as in w_desc".format(*shown))
        if layout == _PACKED and _Kernels(descriptor).shape != self._kernels.shape:
            sizes = (tuple(reversed(shape)) for shape in (_Kernels(descriptor).shape, self._kernels.shape))
            raise Invalid("weights_delta.size is {}, expected {} as in w_desc".format(*sizes))
        return parameter_delta(name, self._kernels.plain(descriptor), "w_desc", self.weights.geometry)

    def _gradients(
        self, dz: Array, x: Array, need: tuple[str, ...], buffers: ConvGradients | None, accumulate: bool
    ) -> ConvGradients:
        """Of the input that kernels reach, of the weights in the engine's order, and of the bias."""
        w, options = self._engine_weights(), {**self._options, "accumulate": accumulate}
        if not self._transposed:
            return conv_backward(dz, self._used(x), w, need=need, out=buffers, **options)
        if "db" not in need or self._used(dz).shape == dz.shape:
            return conv_transpose_backward(self._used(dz), x, w, need=need, out=buffers, **options)
        # Pixels that no kernel reaches have a bias too: its gradient is that of a convolution of nothing.
        nothing = np.empty((len(dz), 0, *dz.shape[2:]), np.float32), np.empty((dz.shape[1], 0, 1, 1), np.float32)
        out = None if buffers is None else {"db": buffers.db}
        db = conv_backward(dz, *nothing, need=["db"], out=out, accumulate=accumulate, num_threads=self.threads).db
        rest = [name for name in need if name != "db"]
        if not rest:
            return ConvGradients(db=db)
        out = None if buffers is None else {name: getattr(buffers, name) for name in rest}
        return conv_transpose_backward(self._used(dz), x, w, need=rest, out=out, **options)._replace(db=db)

    def _oihw_gradient(self, dw: Array) -> Array:
        """From the engine's order; without groups if transposed."""
        return dw.swapaxes(0, 1) if self._transposed else dw

    def _clear_unused(self, dx: Array | None) -> None:
        """The gradient of input pixels that no kernel reads is 0."""
        assert dx is not None  # _buffers
        if not self._transposed:
            rows, columns = (axis.used for axis in self._axes)
            dx[:, :, rows:] = 0
            dx[:, :, :rows, columns:] = 0

    def _buffers(self, results: dict[str, Result], inputs: dict[str, Array | None], batch: int) -> ConvGradients | None:
        """The results' memory, if the engine can write all of it in one call; None otherwise."""
        if len({result.accumulates for result in results.values()}) > 1 or any_overlap(list(results.values()), inputs):
            return None
        found: dict[str, Array] = {}
        for name, result in results.items():
            shape: tuple[int, ...] = (self.output.shape[0],)
            if name == "dx":
                shape = (batch, *self.input.shape)
            elif name == "dw":
                if self._kernels.layout == _PACKED:
                    return None
                shape = self.weights.geometry.shape
            array = result.rows(shape)
            if array is None:
                return None
            found[name] = array
        if "dx" in found and not self._transposed:
            found["dx"] = self._used(found["dx"])
        if "dw" in found:
            found["dw"] = self._oihw_gradient(self._kernels.oihw(found["dw"]))
        return ConvGradients(**found)


# ---- Apple's functions ----------------------------------------------------------------------------------------------


@creates(ConvolutionFilter, BNNSLayerParametersConvolution, False)
def BNNSFilterCreateLayerConvolution() -> None:
    """Create a filter that computes ``f(W * x + b)``, a cross-correlation of images. None on failure.

    Images and weights are Float32, Float16, Int8 or UInt8. Backward, by :func:`BNNSFilterApplyBackwardBatch`, needs
    Float32 throughout.
    """


@creates(ConvolutionFilter, BNNSLayerParametersConvolution, True)
def BNNSFilterCreateLayerTransposedConvolution() -> None:
    """Create a filter that scatters each pixel of its input through the kernels, without a flip. None on failure.

    All arrays are Float32. There is no gradient if ``groups`` is above 1.
    """
