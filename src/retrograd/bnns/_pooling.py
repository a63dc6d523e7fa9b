"""Pooling filters."""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import numpy as np

from ..ops.elementwise import activation_forward
from ..ops.pooling import (
    MaxPoolResult,
    average_pool_backward,
    average_pool_forward,
    l2_pool_backward,
    l2_pool_forward,
    max_pool_backward,
    max_pool_forward,
    max_unpool_backward,
    max_unpool_forward,
)
from . import _constants as c
from ._apply import OneInputFilter
from ._conversion import INTEGERS
from ._declare import applies, creates
from ._failure import Invalid, Unsupported, renaming
from ._filter import (
    DELTAS,
    FLOAT32,
    FLOATS,
    checked_batch,
    checked_descriptor,
    delta_geometry,
    in_shape,
    overlapping,
    put,
    sample_geometry,
    source_samples,
    target_samples,
)
from ._layer import (
    Parameter,
    Result,
    any_overlap,
    before_activation,
    check_apart,
    check_trainable,
    checked_layer,
    layer_activation,
    needs_output,
    parameter_delta,
    sample_delta,
)
from ._memory import Array, Geometry, as_size, check_disjoint, dtype_of, geometry, size_of
from ._names import constant_name
from ._structures import BNNSActivation, BNNSNDArrayDescriptor, FourSizes, Size, Structure, UInt32

_MAX, _UNMAX, _L2 = c.BNNSPoolingFunctionMax, c.BNNSPoolingFunctionUnMax, c.BNNSPoolingFunctionL2Norm
_INCLUDE, _EXCLUDE = c.BNNSPoolingFunctionAverageCountIncludePadding, c.BNNSPoolingFunctionAverageCountExcludePadding
_FUNCTIONS: Final = (_MAX, _INCLUDE, _EXCLUDE, _UNMAX, _L2)
_LAYOUTS: Final = (c.BNNSDataLayoutImageCHW, c.BNNSDataLayout3DLastMajor, c.BNNSDataLayout3DFirstMajor)
_INDEX_TYPES: Final = (c.BNNSDataTypeUInt64, c.BNNSDataTypeUInt32)


class BNNSLayerParametersPooling(Structure):
    """A pooling layer. ``pad`` (left, right, up, down) is used if ``x_padding`` and ``y_padding`` are 0."""

    i_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor
    bias: BNNSNDArrayDescriptor
    activation: BNNSActivation
    pooling_function: UInt32
    k_width: Size
    k_height: Size
    x_stride: Size
    y_stride: Size
    x_dilation_stride: Size
    y_dilation_stride: Size
    x_padding: Size
    y_padding: Size
    pad: FourSizes


class _Axis(NamedTuple):
    """Windows along one axis of the larger image, in the words of the array functions."""

    kernel: int
    stride: int
    dilation: int
    padding: tuple[int, int]
    used: int  # elements of the larger image that windows can reach; those behind them are ignored


class PoolingFilter(OneInputFilter):
    """See :func:`BNNSFilterCreateLayerPooling`."""

    def __init__(self, layer: Any, parameters: Any) -> None:
        layer = checked_layer(BNNSLayerParametersPooling, layer)
        super().__init__(parameters)
        self.function = layer.pooling_function
        if self.function not in _FUNCTIONS or isinstance(self.function, bool):
            raise Invalid(f"pooling_function is {self.function!r}, which is not a BNNSPoolingFunction")
        self.input, self.output = (self._image(name, getattr(layer, name)) for name in ("i_desc", "o_desc"))
        if self.input.dtype != self.output.dtype:
            types = (constant_name("BNNSDataType", d.data_type) for d in (layer.i_desc, layer.o_desc))
            raise Invalid("i_desc.data_type is {}, but o_desc.data_type is {}".format(*types))
        if self.input.shape[0] != self.output.shape[0]:
            raise Invalid(
                f"o_desc has {self.output.shape[0]} channels, expected {self.input.shape[0]} as in i_desc with its "
                f"{size_of(self.input)}"
            )
        if self.output.may_overlap:
            raise overlapping("o_desc", self.output)
        self._windows(layer)
        self.activation = layer_activation(layer.activation, self.output)
        self.bias: Parameter | None = None
        if layer.bias.data is not None:
            self.bias = Parameter("bias", layer.bias, self, (*FLOATS, *INTEGERS))
            if self.bias.geometry.elements != self.input.shape[0]:
                size = size_of(self.bias.geometry)
                raise Invalid(f"bias has {size}, expected {self.input.shape[0]} elements, one for each channel")

    def _image(self, name: str, descriptor: BNNSNDArrayDescriptor) -> Geometry:
        if descriptor.layout not in _LAYOUTS:
            shown = constant_name("BNNSDataLayout", descriptor.layout)
            raise Unsupported(f"{name}.layout is {shown}; it must be ImageCHW, 3DLastMajor or 3DFirstMajor")
        if descriptor.layout != c.BNNSDataLayoutImageCHW:
            shown = constant_name("BNNSDataLayout", descriptor.layout)
            self.note_extension("BNNSFilterCreateLayerPooling", f"{name}.layout is {shown}")
        if descriptor.data_type == c.BNNSDataTypeBFloat16:
            self.note_extension("BNNSFilterCreateLayerPooling", f"{name}.data_type is BNNSDataTypeBFloat16")
        return sample_geometry(name, descriptor)

    def _windows(self, layer: BNNSLayerParametersPooling) -> None:
        sizes = {
            name: as_size(name, getattr(layer, name))
            for name in ("k_width", "k_height", "x_stride", "y_stride", "x_padding", "y_padding")
        }
        dilations = {name: as_size(name, getattr(layer, name)) for name in ("x_dilation_stride", "y_dilation_stride")}
        for name, dilation in dilations.items():
            if dilation > 1 and (self.function not in (_MAX, _UNMAX) or self.input.dtype != FLOAT32):
                shown = constant_name("BNNSPoolingFunction", self.function)
                raise Invalid(f"{name} is {dilation}, but only Max and UnMax of Float32 have dilation, not {shown}")
        try:
            given = tuple(layer.pad)
        except TypeError:
            given = ()
        if len(given) != 4:
            raise Invalid(f"pad is {layer.pad!r}, must have 4 entries: left, right, up, down")
        pad = [as_size(f"pad[{k}]", value) for k, value in enumerate(given)]
        left, right, up, down = pad
        if any(pad) and not (sizes["x_padding"] or sizes["y_padding"]):
            pads = {"x": (left, right), "y": (up, down)}
        else:
            pads = {"x": (sizes["x_padding"],) * 2, "y": (sizes["y_padding"],) * 2}
        larger, smaller = (self.output, self.input) if self.function == _UNMAX else (self.input, self.output)
        axes = [
            self._axis(name, larger.shape[k], smaller.shape[k], sizes[f"k_{side}"], sizes[f"{name}_stride"] or 1,
                       dilations[f"{name}_dilation_stride"] or 1, pads[name])
            for k, name, side in ((1, "y", "height"), (2, "x", "width"))
        ]  # fmt: skip
        self.used = tuple(axis.used for axis in axes)
        self.kernel = tuple(axis.kernel for axis in axes)
        self.options: dict[str, Any] = {
            "stride": tuple(axis.stride for axis in axes),
            "padding": tuple(axis.padding for axis in axes),
        }
        if self.function == _MAX:
            self.options["dilation"] = tuple(axis.dilation for axis in axes)
        elif self.function in (_INCLUDE, _EXCLUDE):
            self.options["count_includes_padding"] = self.function == _INCLUDE
        # Raises if a window has no element, where it needs one.
        if self.function != _UNMAX:
            self._pooled(np.zeros((0, *self.input.shape), np.float32))

    def _axis(
        self, name: str, inputs: int, outputs: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int]
    ) -> _Axis:
        """Windows may reach beyond the padding, and inputs beyond the last window are ignored."""
        side = "k_width" if name == "x" else "k_height"
        if kernel == 0:
            raise Invalid(f"{side} is 0, must be at least 1")
        names = ("o_desc", "i_desc") if self.function == _UNMAX else ("i_desc", "o_desc")
        if inputs + sum(pads) < stride * (outputs - 1) + 1:
            raise Invalid(
                f"{names[1]} has {outputs} elements along {name}, whose windows with stride {stride} start up to "
                f"{stride * (outputs - 1)}, but {names[0]} has {inputs}, with padding {pads[0]} and {pads[1]}"
            )
        reach = stride * (outputs - 1) + (kernel - 1) * dilation + 1
        before = min(pads[0], reach)
        used = min(inputs, reach - before)
        return _Axis(kernel, stride, dilation, (before, reach - before - used), used)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, batch_size: Any, source: Any, in_stride: Any, target: Any, out_stride: Any) -> None:
        self.apply_pooling(batch_size, source, in_stride, target, out_stride, c.BNNSDataTypeUInt64, None, 0)

    def apply_pooling(
        self,
        batch_size: Any,
        source: Any,
        in_stride: Any,
        target: Any,
        out_stride: Any,
        index_type: Any,
        indices: Any,
        index_stride: Any,
    ) -> None:
        batch = checked_batch(batch_size)
        y = target_samples("out", self.output, target, batch, out_stride)
        x = source_samples("in", self.input, source, batch, in_stride)
        at = self._indices(index_type, indices, batch, index_stride)
        if at is not None and self.function == _MAX:
            check_disjoint({"out": y, "indices": at}, {"in": x})
        elif at is not None:
            check_disjoint({"out": y}, {"in": x, "indices": at})
        else:
            check_disjoint({"out": y}, {"in": x})
        # A copy: it may be the client's memory, and overlap the output.
        bias = None if self.bias is None else self.bias.values().reshape(-1, 1, 1).copy()
        direct = y.dtype is FLOAT32 and y.flags.aligned
        buffer = y if direct else None
        if self.function == _UNMAX:
            assert at is not None  # checked by _indices
            shape = (batch, *self.output.shape)
            z = max_unpool_forward(in_shape(x, x.shape), at, shape, out=buffer, num_threads=self.threads)
        else:
            z, found = self._pooled(in_shape(x, x.shape), buffer, at is not None)
            if at is not None and found is not None:
                at[...] = self._whole_positions(found)
        if bias is not None:
            with np.errstate(all="ignore"):
                z += bias
        if self.activation.function.name != "identity":
            z = activation_forward(z, self.activation.function, out=z, num_threads=self.threads)
        if z is not y:
            put(y, z, False)

    def _pooled(self, x: Array, out: Array | None = None, want_indices: bool = False) -> tuple[Array, Array | None]:
        """The pooling alone, and the positions of the largest elements in the part of x that is used."""
        x = x[:, :, : self.used[0], : self.used[1]]
        options = {**self.options, "num_threads": self.threads}
        if self.function == _MAX:
            y, indices = max_pool_forward(
                x, self.kernel, return_indices=want_indices, out=MaxPoolResult(out), **options
            )
            assert y is not None
            return y, indices
        forward = l2_pool_forward if self.function == _L2 else average_pool_forward
        return forward(x, self.kernel, out=out, **options), None

    def _whole_positions(self, indices: Array) -> Array:
        """Positions in the whole plane, from those in the part that is used."""
        width, used = self.input.shape[2], self.used[1]
        return indices if width == used else indices // used * width + indices % used

    def _indices(self, index_type: Any, indices: Any, batch: int, stride: Any) -> Array | None:
        """The indices of this call: written by Max, read by UnMax, ignored otherwise."""
        if self.function not in (_MAX, _UNMAX):
            return None
        if indices is None:
            if self.function == _UNMAX:
                raise Invalid("indices is NULL, and UnMax needs them: call BNNSPoolingFilterApplyBatch")
            return None
        like = self.output if self.function == _MAX else self.input
        samples = target_samples if self.function == _MAX else source_samples
        return samples("indices", _index_geometry(index_type, like), indices, batch, stride)

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
        if weights_delta is not None:
            raise Unsupported("weights_delta is given, but a pooling has no weights")
        self.apply_pooling_backward(
            batch_size, source, in_stride, in_delta, in_delta_stride, out, out_stride, out_delta, out_delta_stride,
            bias_delta, c.BNNSDataTypeUInt64, None, 0,
        )  # fmt: skip

    def apply_pooling_backward(
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
        bias_delta: Any,
        index_type: Any,
        indices: Any,
        index_stride: Any,
    ) -> None:
        batch = checked_batch(batch_size)
        if self.input.dtype != FLOAT32:
            raise Unsupported(f"i_desc and o_desc of this filter have type {self.input.dtype}; backward needs Float32")
        if out_delta is None:
            raise Invalid("out_delta is NULL")
        dy = self._delta("out_delta", out_delta, "o_desc", self.output, batch, out_delta_stride, source_samples)
        check_trainable(self.activation, out)
        y = None
        if needs_output(self.activation):
            if self.activation.slope_from == "input":
                name = self.activation.function.name
                raise Unsupported(f"the output of {name} does not determine its slope; an activation filter trains it")
            y = source_samples("out", self.output, out, batch, out_stride)
        db = None if bias_delta is None else self._bias_delta(bias_delta)
        dx = x = at = None
        if in_delta is not None:
            array = self._delta("in_delta", in_delta, "i_desc", self.input, batch, in_delta_stride, target_samples)
            dx = Result("in_delta", in_delta, array)
            at = self._given_indices(index_type, indices, batch, index_stride)
            if self.function == _L2 or (self.function == _MAX and at is None):
                if source is None:
                    needed = "the positions of the largest elements are" if self.function == _MAX else "the gradient is"
                    raise Invalid(f"in is NULL, and {needed} found from it")
                x = source_samples("in", self.input, source, batch, in_stride)
        check_apart([result for result in (dx, db) if result is not None])
        dy32 = in_shape(dy, (batch, *self.output.shape))
        # Activations whose slope needs the input were refused above.
        dz = before_activation(self.activation, dy32, y, lambda: dy32, self.threads)
        # Before dx is written, which may overlap dy.
        sums = dz.sum((0, 2, 3), dtype=np.float64) if db is not None else None
        if dx is not None:
            self._input_gradient(dz, x, at, dx, {"out_delta": dy, "out": y, "in": x, "indices": at})
        if db is not None and sums is not None:
            with np.errstate(all="ignore"):
                db.put(sums.astype(np.float32))

    def _delta(
        self, name: str, descriptor: Any, like: str, layer: Geometry, batch: int, stride: Any, samples: Any
    ) -> Array:
        """A gradient, which may have another shape with as many elements, and may be of type BFloat16."""
        array = sample_delta(name, descriptor, like, layer, batch, stride, samples, DELTAS)
        if array.dtype != FLOAT32:
            self.note_extension("BNNSPoolingFilterApplyBackwardBatch", f"{name}.data_type is BNNSDataTypeBFloat16")
        return array

    def _bias_delta(self, descriptor: Any) -> Result:
        """The gradient of the bias, in any shape with an element for each channel, whether or not there is a bias."""
        name = "bias_delta"
        given = delta_geometry(name, checked_descriptor(name, descriptor))
        if given.elements != self.input.shape[0]:
            raise Invalid(f"{name} has {given.elements} elements, expected {self.input.shape[0]}, one per channel")
        return parameter_delta(name, descriptor, "bias", given, DELTAS)

    def _given_indices(self, index_type: Any, indices: Any, batch: int, stride: Any) -> Array | None:
        if self.function not in (_MAX, _UNMAX):
            return None
        if indices is None:
            if self.function == _UNMAX:
                raise Invalid("indices is NULL, and the gradient of UnMax needs them")
            return None
        like = self.output if self.function == _MAX else self.input
        return source_samples("indices", _index_geometry(index_type, like), indices, batch, stride)

    def _input_gradient(
        self, dz: Array, x: Array | None, at: Array | None, dx: Result, read: dict[str, Array | None]
    ) -> None:
        shape = (len(dz), *self.input.shape)
        whole = self.used == self.input.shape[1:]
        images = dx.rows(shape) if dx.array.dtype is FLOAT32 and not any_overlap([dx], read) else None
        direct = images is not None and (whole or self.function in (_MAX, _UNMAX))
        out: dict[str, Any] = {"num_threads": self.threads}
        if direct:
            out |= {"out": images, "accumulate": dx.accumulates}
        if self.function == _MAX:
            if at is None:
                assert x is not None
                _, found = self._pooled(in_shape(x, shape), want_indices=True)
                assert found is not None
                at = self._whole_positions(found)
            result = max_pool_backward(dz, at, shape, **out)
        elif self.function == _UNMAX:
            assert at is not None
            result = max_unpool_backward(dz, at, **out)
        else:
            used = (*shape[:2], *self.used)
            if self.function == _L2:
                assert x is not None
                part = in_shape(x, shape)[:, :, : self.used[0], : self.used[1]]
                norm, _ = self._pooled(part)
                result = l2_pool_backward(dz, part, norm, self.kernel, **self.options, **out)
            else:
                result = average_pool_backward(dz, used, self.kernel, **self.options, **out)
            if not whole:  # what no window reaches has no gradient
                padded = np.zeros(shape, np.float32)
                padded[:, :, : self.used[0], : self.used[1]] = result
                result = padded
        if not direct:
            dx.put(result)


def _index_geometry(index_type: Any, like: Geometry) -> Geometry:
    """The indices of an image: its extents and strides, and another type."""
    if index_type not in _INDEX_TYPES or isinstance(index_type, bool):
        shown = constant_name("BNNSDataType", index_type)
        raise Invalid(f"indices_data_type is {shown}, must be BNNSDataTypeUInt64 or BNNSDataTypeUInt32")
    return geometry(like.layout, dtype_of(index_type), like.extents, like.strides)


# ---- Apple's functions ----------------------------------------------------------------------------------------------

_FORWARD_NAMES: Final = renaming({"x": "in", "out": "out"})
_BACKWARD_NAMES: Final = renaming({"x": "in", "y": "out", "dy": "out_delta.data", "out": "in_delta.data"})
_OTHER: Final = "filter is not a pooling filter"
_INDICES: Final = f"({c.BNNSDataTypeUInt64}) indices idx_stride"  # of type size_t


@creates(PoolingFilter, BNNSLayerParametersPooling, rename=renaming({"x": "i_desc", "kernel": "the kernel"}))
def BNNSFilterCreateLayerPooling() -> None:
    """Create a pooling filter: Max, an average, UnMax or L2Norm, with a bias and an activation. None on failure."""


_applies = functools.partial(applies, PoolingFilter, _OTHER)


@_applies("apply_pooling", f"filter batch_size in_+ out+ {_INDICES}", rename=_FORWARD_NAMES)
def BNNSPoolingFilterApplyBatch() -> None:
    """Apply a pooling filter to a batch. Max writes its `indices`, of type size_t, if they are not None; UnMax needs
    them; other functions ignore them. Returns 0, or -1 on failure.
    """


@_applies("apply_pooling", "filter batch_size in_+ out+ indices_data_type indices idx_stride", rename=_FORWARD_NAMES)
def BNNSPoolingFilterApplyBatchEx() -> None:
    """Apply a pooling filter to a batch, with indices of type UInt64 or UInt32."""


@_applies(
    "apply_pooling_backward",
    f"filter batch_size in_+ in_delta+ out+ out_delta+ bias_delta {_INDICES}",
    rename=_BACKWARD_NAMES,
)
def BNNSPoolingFilterApplyBackwardBatch() -> None:
    """Compute the gradients of a pooling: of its input and of its bias.

    Max uses `indices`, or finds them again from `in_` if they are None. L2Norm needs `in_`, UnMax needs `indices`. The
    slope of an activation is computed from `out`. Returns 0, or -1 on failure.
    """


@_applies(
    "apply_pooling_backward",
    "filter batch_size in_+ in_delta+ out+ out_delta+ bias_delta indices_data_type indices idx_stride",
    rename=_BACKWARD_NAMES,
)
def BNNSPoolingFilterApplyBackwardBatchEx() -> None:
    """Compute the gradients of a pooling, with indices of type UInt64 or UInt32."""
