"""Convolution filters and transposed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from ..ops import convolution
from ..ops.activation import Activation
from ..ops.convolution import ConvGradients
from . import _constants as c
from ._conversion import PLAIN, converted, scale_of
from ._declare import creates
from ._failure import Invalid, Unsupported
from ._filter import FLOAT32, BNNSFilter, check_layout
from ._layer import Delta, Described, Gradients, Parameter, Result, WeightedLayer, real_values
from ._memory import Array, Geometry, as_size, data_type_of
from ._names import layout_name, type_name
from ._structures import BNNSNDArrayDescriptor, FourSizes, Size, Weighted

_TYPES: Final = (c.BNNSDataTypeFloat32, c.BNNSDataTypeFloat16, c.BNNSDataTypeInt8, c.BNNSDataTypeUInt8)
_OUTPUTS: Final = (*_TYPES, c.BNNSDataTypeBFloat16)
_IMAGES: Final = (c.BNNSDataLayoutImageCHW, c.BNNSDataLayout3DLastMajor, c.BNNSDataLayout3DFirstMajor)
_OIHW: Final = c.BNNSDataLayoutConvolutionWeightsOIHW
_ROTATED: Final = c.BNNSDataLayoutConvolutionWeightsOIHrWr
_IO_ROTATED: Final = c.BNNSDataLayoutConvolutionWeightsIOHrWr
_PACKED: Final = c.BNNSDataLayoutConvolutionWeightsOIHW_Pack32
_WEIGHTS: Final = (_OIHW, _ROTATED, _IO_ROTATED, _PACKED)
_PACK: Final = 32  # outputs of a block of the packed layout
_MOST: Final = 2**31 - 1  # of strides, dilations and paddings


class BNNSLayerParametersConvolution(Weighted):
    """A convolution. ``pad`` (left, right, up, down) is used if ``x_padding`` and ``y_padding`` are 0."""

    x_stride: Size
    y_stride: Size
    x_dilation_stride: Size
    y_dilation_stride: Size
    x_padding: Size
    y_padding: Size
    groups: Size
    pad: FourSizes


class Axis(NamedTuple):
    """One axis of the larger image, in the words of the array functions."""

    kernel: int
    stride: int
    dilation: int
    padding: tuple[int, int]
    used: int  # pixels that kernels reach, out of all; the pixels past them are ignored


class ImageLayer(Described, Protocol):
    """The fields that convolutions and poolings share; there are others for strides and paddings."""

    pad: tuple[int, int, int, int]


class Windows(NamedTuple):
    """How windows, or kernels, lie along one axis: one for each of `small` pixels, over `large` ones."""

    name: str
    stride: int
    dilation: int
    pads: tuple[int, int]  # before and after
    large: int
    small: int
    names: tuple[str, str]  # of the descriptors of the larger and the smaller image

    def axis(self, kernel: int) -> Axis:
        """Windows may reach beyond the padding."""
        reach = self.stride * (self.small - 1) + (kernel - 1) * self.dilation + 1
        before = min(self.pads[0], reach)
        used = min(self.large, reach - before)
        return Axis(kernel, self.stride, self.dilation, (before, reach - before - used), used)


def windows_of(
    layer: ImageLayer, input: Geometry, output: Geometry, swapped: bool, most: int = c.SIZE_MAX
) -> tuple[Windows, Windows]:
    """The windows along y and x. `swapped`: the output is the larger image. `most` limits all sizes."""
    names = (f"{axis}_{what}" for what in ("stride", "dilation_stride", "padding") for axis in "xy")
    sizes = {name: as_size(name, getattr(layer, name)) for name in names}
    try:
        left, right, up, down = layer.pad
    except (TypeError, ValueError):
        raise Invalid(f"pad is {layer.pad!r}, must have 4 entries: left, right, up, down") from None
    pad = [as_size(f"pad[{k}]", value) for k, value in enumerate((left, right, up, down))]
    sizes |= {f"pad[{k}]": value for k, value in enumerate(pad)}
    for name, value in sizes.items():
        if value > most:
            raise Unsupported(f"{name} is {value}, must be at most {most}")
    same = any((sizes["x_padding"], sizes["y_padding"])) or not any(pad)  # otherwise pad counts

    def along(axis: int, name: str, sides: tuple[int, int]) -> Windows:
        images = [("i_desc", input.shape[axis]), ("o_desc", output.shape[axis])]
        (larger, large), (smaller, small) = images[::-1] if swapped else images
        stride, dilation = sizes[f"{name}_stride"] or 1, sizes[f"{name}_dilation_stride"] or 1
        pads = (sizes[f"{name}_padding"],) * 2 if same else sides
        return Windows(name, stride, dilation, pads, large, small, (larger, smaller))

    return along(1, "y", (pad[2], pad[3])), along(2, "x", (pad[0], pad[1]))


def check_image(filter: BNNSFilter, function: str, name: str, descriptor: BNNSNDArrayDescriptor) -> None:
    """Raise unless a sample is an image; any layout but ImageCHW is an extension."""
    check_layout(name, descriptor.layout, _IMAGES, "ImageCHW, 3DLastMajor or 3DFirstMajor")
    if descriptor.layout != c.BNNSDataLayoutImageCHW:
        filter.note_extension(function, f"{name}.layout is {layout_name(descriptor.layout)}")


class _Kernels:
    """Weights in one of Apple's layouts, seen as OIHW.

    Blocks of the packed layout are [blocks][I][H][W][32], whatever is past the last output.
    """

    def __init__(self, descriptor: BNNSNDArrayDescriptor) -> None:
        self.layout = descriptor.layout
        check_layout("w_desc", self.layout, _WEIGHTS, "ConvolutionWeightsOIHW or another of its kind")
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
        """The opposite, for values: lanes past the last output are 0."""
        if self.layout == _PACKED:
            outputs, inputs, height, width = self.shape
            blocks = -(-outputs // _PACK)
            whole = np.zeros((blocks * _PACK, inputs, height, width), oihw.dtype)
            whole[:outputs] = oihw
            packed: Array = whole.reshape(blocks, _PACK, inputs, height, width).transpose(0, 2, 3, 4, 1)
            return packed
        array = oihw if self.layout == _OIHW else oihw[:, :, ::-1, ::-1]
        return array.transpose(1, 0, 2, 3) if self.layout == _IO_ROTATED else array


class ConvolutionFilter(WeightedLayer):
    """See :func:`BNNSFilterCreateLayerConvolution`."""

    computed = ConvGradients

    def __init__(self, layer: BNNSLayerParametersConvolution, parameters: object, transposed: bool) -> None:
        super().__init__(parameters)
        self._transposed = transposed
        function = f"BNNSFilterCreateLayer{'Transposed' if transposed else ''}Convolution"
        types = (c.BNNSDataTypeFloat32,) if transposed else _TYPES
        check_image(self, function, "i_desc", layer.i_desc)
        check_image(self, function, "o_desc", layer.o_desc)
        self.describe(layer, types, types if transposed else _OUTPUTS)
        self._scale, self._out_scale = scale_of("i_desc", layer.i_desc), scale_of("o_desc", layer.o_desc)
        if layer.o_desc.data_type == c.BNNSDataTypeBFloat16:
            self.note_extension(function, "o_desc.data_type is BNNSDataTypeBFloat16")
        self.groups = max(1, as_size("groups", layer.groups))
        self._kernels = _Kernels(layer.w_desc)
        self._check_channels()
        windows = windows_of(layer, self.input, self.output, transposed, _MOST)
        self._axes = [self._axis(*both) for both in zip(windows, self._kernels.shape[2:], strict=True)]
        self.rows, self.columns = (axis.used for axis in self._axes)
        self._options: dict[str, Any] = {
            **{name: tuple(getattr(axis, name) for axis in self._axes) for name in ("stride", "dilation", "padding")},
            "groups": self.groups,
            "num_threads": self.threads,
        }
        self.weights = Parameter("w_desc", self._kernels.plain(layer.w_desc), self, types)
        self.in_shape, self.out_shape = self.input.shape, self.output.shape
        self.complete(layer, ", one for each channel of o_desc", Delta.reshaped)
        self.deltas["dw"] = self.deltas["dw"]._replace(described=self._described)
        # Kernels reach every pixel of the input.
        self._reaches_all = transposed or (self.rows, self.columns) == self.input.shape[1:]

    def _check_channels(self) -> None:
        inputs, outputs = self.input.shape[0], self.output.shape[0]
        if self.groups > 1:
            if self._kernels.layout not in (_OIHW, _ROTATED):
                shown = layout_name(self._kernels.layout)
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

    def _axis(self, windows: Windows, kernel: int) -> Axis:
        """Pixels of the larger image that no kernel reaches are ignored, or get the bias alone."""
        name, stride, dilation, pads, large, small, names = windows
        reach = stride * (small - 1) + (kernel - 1) * dilation + 1
        if large + sum(pads) < reach:
            raise Invalid(
                f"{names[1]} has {small} pixels along {name}, whose kernels of {kernel} with stride {stride} and "
                f"dilation {dilation} span {reach}, but {names[0]} has {large}, with padding {pads[0]} and {pads[1]}"
            )
        axis = windows.axis(kernel)
        if self._transposed and axis.used == 0:
            raise Unsupported(
                f"the padding along {name} is {pads[0]} and {pads[1]}, which leaves none of the {reach} pixels that "
                "kernels reach"
            )
        return axis

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
        return images[:, :, : self.rows, : self.columns]

    def _fill_rest(self, images: Array, values: Array | float) -> None:
        """Write the part that no kernel reaches."""
        images[:, :, self.rows :] = values
        images[:, :, : self.rows, self.columns :] = values

    def _convolve(self, x: Array, out: Array | None, activation: Activation | None = None) -> Array:
        """f(w * x + b) of images in float32."""
        w, b = self._engine_weights(), None if self.bias is None else self.bias.values().reshape(-1)
        options = {**self._options, "activation": activation}
        if not self._transposed:
            return convolution.conv_forward(self._used(x), w, b, out=out, **options)
        y = np.empty((len(x), *self.output.shape), np.float32) if out is None else out
        convolution.conv_transpose_forward(x, w, b, out=self._used(y), **options)
        if self._used(y).shape != y.shape:
            # Where no kernel reaches, there is the bias alone: a convolution of nothing.
            nothing = np.empty((1, 0, 1), np.float32), np.empty((self.output.shape[0], 0, 1), np.float32)
            self._fill_rest(y, convolution.conv_forward(*nothing, b, activation=activation).reshape(-1, 1, 1))
        return y

    # ---- calls ------------------------------------------------------------------------------------------------------

    def forward(self, arrays: Mapping[str, Array], out: Array | None) -> Array:
        z = self._convolve(real_values(arrays["in"], self._scale), out, self.activation.function)
        return converted(z, PLAIN, self.output.dtype, self._out_scale) if self.output.dtype.kind in "iu" else z

    def check_backward(self) -> None:
        for name, geometry in (("i_desc", self.input), ("w_desc", self.weights.geometry), ("o_desc", self.output)):
            if geometry.dtype != FLOAT32:
                raise Unsupported(f"{name} has type {type_name(data_type_of(geometry.dtype))}; backward needs Float32")
        if self._transposed and self.groups > 1:
            raise Unsupported(f"groups is {self.groups}; a transposed convolution with groups has no gradient")
        super().check_backward()

    def before_activation(self, arrays: Mapping[str, Array | None], batch: int) -> Array:
        return self._convolve(self.x(arrays, batch), None)

    def backward(self, wanted: Gradients) -> ConvGradients:
        dy, arrays, need, out, accumulate, form = wanted
        dx, dw, db = self._gradients(dy, self.x(arrays, len(dy)), need, out, accumulate)
        if dx is not None and not self._reaches_all:  # the gradient of input pixels that no kernel reads is 0
            if out is None or out.dx is None:
                whole = np.zeros((len(dy), *self.in_shape), np.float32)
                self._used(whole)[...] = dx
                dx = whole
            elif not accumulate:
                self._fill_rest(form, 0)
        if dw is not None and (out is None or out.dw is None):
            dw = self._kernels.stored(self._oihw_gradient(dw))
        return ConvGradients(dx, dw, db)

    def form_of(self, results: Sequence[Result]) -> Array | None:
        """The whole gradient of the input, of which the engine writes the part that kernels reach."""
        dx = [result for result in results if result.key == "dx" and not self._reaches_all]
        return dx[0].rows((len(dx[0].array), *self.in_shape)) if dx else None

    def writable(self, result: Result, batch: int, form: Any) -> Array | None:
        array = super().writable(result, batch, form)
        if array is None or result.key == "db":
            return array
        if result.key == "dx":
            return array if self._transposed else self._used(array)
        return None if self._kernels.layout == _PACKED else self._oihw_gradient(self._kernels.oihw(array))

    def _described(self, descriptor: BNNSNDArrayDescriptor) -> BNNSNDArrayDescriptor:
        """The gradient of the weights, in their layout."""
        layout = descriptor.layout
        if layout in _WEIGHTS and layout != self._kernels.layout:
            shown, wanted = layout_name(layout), layout_name(self._kernels.layout)
            raise Invalid(f"weights_delta.layout is {shown}, expected {wanted} as in w_desc")
        if layout == _PACKED and _Kernels(descriptor).shape != self._kernels.shape:
            sizes = (tuple(reversed(shape)) for shape in (_Kernels(descriptor).shape, self._kernels.shape))
            raise Invalid("weights_delta.size is {}, expected {} as in w_desc".format(*sizes))
        return self._kernels.plain(descriptor)

    def _gradients(
        self, dz: Array, x: Array, need: tuple[str, ...], buffers: ConvGradients | None, accumulate: bool
    ) -> ConvGradients:
        """Of the input that kernels reach, of the weights in the engine's order, and of the bias."""
        w, options = self._engine_weights(), {**self._options, "accumulate": accumulate}
        if not self._transposed:
            return convolution.conv_backward(dz, self._used(x), w, need=need, out=buffers, **options)
        if "db" not in need or self._used(dz).shape == dz.shape:
            return convolution.conv_transpose_backward(self._used(dz), x, w, need=need, out=buffers, **options)
        # Pixels that no kernel reaches have a bias too: its gradient is that of a convolution of nothing.
        nothing = np.empty((len(dz), 0, *dz.shape[2:]), np.float32), np.empty((dz.shape[1], 0, 1, 1), np.float32)
        out = None if buffers is None else {"db": buffers.db}
        found = convolution.conv_backward(
            dz, *nothing, need=["db"], out=out, accumulate=accumulate, num_threads=self.threads
        )
        rest = [name for name in need if name != "db"]
        if not rest:
            return found
        out = None if buffers is None else {name: getattr(buffers, name) for name in rest}
        others = convolution.conv_transpose_backward(self._used(dz), x, w, need=rest, out=out, **options)
        return others._replace(db=found.db)

    def _oihw_gradient(self, dw: Array) -> Array:
        """From the engine's order; without groups if transposed."""
        return dw.swapaxes(0, 1) if self._transposed else dw


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
