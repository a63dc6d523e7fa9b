"""Pooling filters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ..ops import pooling
from ..ops.elementwise import activation_forward
from ..ops.linear import LinearGradients
from . import _constants as c
from . import _layer
from ._apply import BACKWARD_NAMES, FORWARD_NAMES
from ._conversion import INTEGERS
from ._convolution import Axis, Windows, check_image, windows_of
from ._declare import applies, creates
from ._failure import Invalid, Unsupported, renaming
from ._filter import DELTAS, FLOAT32, FLOATING, FLOATS, checked_batch, in_shape, source_samples, target_samples
from ._layer import Delta, Gradients
from ._memory import Array, Geometry, as_size, dtype_of, geometry, size_of
from ._names import constant_name, type_name
from ._structures import BNNSActivation, BNNSNDArrayDescriptor, FourSizes, InputOutput, Size, UInt32

_MAX, _UNMAX, _L2 = c.BNNSPoolingFunctionMax, c.BNNSPoolingFunctionUnMax, c.BNNSPoolingFunctionL2Norm
_INCLUDE, _EXCLUDE = c.BNNSPoolingFunctionAverageCountIncludePadding, c.BNNSPoolingFunctionAverageCountExcludePadding
_FUNCTIONS: Final = (_MAX, _INCLUDE, _EXCLUDE, _UNMAX, _L2)
_INDEX_TYPES: Final = (c.BNNSDataTypeUInt64, c.BNNSDataTypeUInt32)


class BNNSLayerParametersPooling(InputOutput):
    """A pooling layer. ``pad`` (left, right, up, down) is used if ``x_padding`` and ``y_padding`` are 0."""

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


class PoolingFilter(_layer.OneInputFilter):
    """See :func:`BNNSFilterCreateLayerPooling`."""

    backward_arguments = _layer.Arguments("batch_size in+ in_delta+ out+ out_delta+ bias_delta")
    notes = "BNNSPoolingFilterApplyBackwardBatch"

    def __init__(self, layer: BNNSLayerParametersPooling, parameters: object) -> None:
        super().__init__(parameters)
        self.function = layer.pooling_function
        if self.function not in _FUNCTIONS or isinstance(self.function, bool):
            raise Invalid(f"pooling_function is {self.function!r}, which is not a BNNSPoolingFunction")
        function = "BNNSFilterCreateLayerPooling"
        for name, descriptor in (("i_desc", layer.i_desc), ("o_desc", layer.o_desc)):
            check_image(self, function, name, descriptor)
            if descriptor.data_type == c.BNNSDataTypeBFloat16:
                self.note_extension(function, f"{name}.data_type is BNNSDataTypeBFloat16")
        self.describe(layer, FLOATS, FLOATS, FLOATING)
        if self.input.dtype != self.output.dtype:
            types = type_name(layer.i_desc.data_type), type_name(layer.o_desc.data_type)
            raise Invalid("i_desc.data_type is {}, but o_desc.data_type is {}".format(*types))
        channels, found = self.input.shape[0], self.output.shape[0]
        if found != channels:
            like = size_of(self.input)
            raise Invalid(f"o_desc has {found} channels, expected {channels} as in i_desc with its {like}")
        self._windows(layer)
        self.activation = _layer.layer_activation(layer.activation, self.output)
        self.bias = self.parameter("bias", layer.bias, (*FLOATS, *INTEGERS))
        if self.bias is not None and self.bias.geometry.elements != channels:
            size = size_of(self.bias.geometry)
            raise Invalid(f"bias has {size}, expected {channels} elements, one for each channel")
        self.out_shape = self.output.shape
        self.out_delta = Delta("out_delta", "o_desc", self.output, types=DELTAS)
        # The other functions compute a gradient of the part that is used.
        direct = self.function in (_MAX, _UNMAX) or self.used == self.input.shape[1:]
        self.deltas = {
            "dx": Delta("in_delta", "i_desc", self.input, self.input.shape if direct else None, types=DELTAS),
            "db": Delta("bias_delta", "bias", self.output, fits=self._one_per_channel, types=DELTAS, batched=False),
        }

    def _windows(self, layer: BNNSLayerParametersPooling) -> None:
        sides = {name: as_size(name, getattr(layer, name)) for name in ("k_height", "k_width")}
        windows = windows_of(layer, self.input, self.output, self.function == _UNMAX)
        for one in windows:
            if one.dilation > 1 and (self.function not in (_MAX, _UNMAX) or self.input.dtype != FLOAT32):
                shown = constant_name("BNNSPoolingFunction", self.function)
                given = f"{one.name}_dilation_stride is {one.dilation}"
                raise Invalid(f"{given}, but only Max and UnMax of Float32 have dilation, not {shown}")
        axes = [_axis(one, side, kernel) for one, (side, kernel) in zip(windows, sides.items(), strict=True)]
        self.used = tuple(axis.used for axis in axes)
        self.kernel = tuple(axis.kernel for axis in axes)
        names = ("stride", "padding", "dilation") if self.function == _MAX else ("stride", "padding")
        self.options: dict[str, Any] = {name: tuple(getattr(axis, name) for axis in axes) for name in names}
        if self.function in (_INCLUDE, _EXCLUDE):
            self.options["count_includes_padding"] = self.function == _INCLUDE
        # Raises if a window has no element, where it needs one.
        if self.function != _UNMAX:
            self._pooled(np.zeros((0, *self.input.shape), np.float32))

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, *arguments: object) -> None:
        self.apply_pooling(*arguments, c.BNNSDataTypeUInt64, None, 0)

    def apply_pooling(self, *arguments: object) -> None:
        """The same, with the type of indices, the indices and their stride."""
        samples = target_samples if self.function == _MAX else source_samples
        at = self._indices(arguments[0], arguments[5:], samples, "UnMax needs them: call BNNSPoolingFilterApplyBatch")
        if self.function == _MAX:
            self.run(arguments, written=at)
        else:
            self.run(arguments, at)

    def _indices(
        self, batch_size: object, given: Sequence[object], samples: Callable[..., Array], needed: str
    ) -> dict[str, Array]:
        """The indices of a call: forward, Max writes and UnMax reads them; other functions ignore them."""
        index_type, indices, stride = given
        if indices is None and self.function == _UNMAX:
            raise Invalid(f"indices is NULL, and {needed}")
        if indices is None or self.function not in (_MAX, _UNMAX):
            return {}
        like = _index_geometry(index_type, self.output if self.function == _MAX else self.input)
        return {"indices": samples("indices", like, indices, checked_batch(batch_size), stride)}

    def forward(self, arrays: Mapping[str, Array], out: Array | None) -> Array:
        x, at = _layer.real_values(arrays["in"]), arrays.get("indices")
        # A copy: it may be the client's memory, and overlap the output.
        bias = None if self.bias is None else self.bias.values().reshape(-1, 1, 1).copy()
        if self.function == _UNMAX:
            assert at is not None  # checked by _indices
            z = pooling.max_unpool_forward(x, at, (len(x), *self.output.shape), out=out, num_threads=self.threads)
        else:
            z, found = self._pooled(x, out, at is not None)
            if at is not None and found is not None:
                at[...] = self._whole_positions(found)
        if bias is not None:
            with np.errstate(all="ignore"):
                z += bias
        if self.activation.function.name != "identity":
            z = activation_forward(z, self.activation.function, out=z, num_threads=self.threads)
        return z

    def _pooled(self, x: Array, out: Array | None = None, want_indices: bool = False) -> tuple[Array, Array | None]:
        """The pooling alone, and the positions of the largest elements in the part of x that is used."""
        x = x[:, :, : self.used[0], : self.used[1]]
        options = {**self.options, "num_threads": self.threads}
        if self.function == _MAX:
            result = pooling.MaxPoolResult(out)
            y, indices = pooling.max_pool_forward(x, self.kernel, return_indices=want_indices, out=result, **options)
            assert y is not None
            return y, indices
        forward = pooling.l2_pool_forward if self.function == _L2 else pooling.average_pool_forward
        return forward(x, self.kernel, out=out, **options), None

    def _whole_positions(self, indices: Array) -> Array:
        """Positions in the whole plane, from those in the part that is used."""
        width, used = self.input.shape[2], self.used[1]
        return indices if width == used else indices // used * width + indices % used

    # ---- backward ---------------------------------------------------------------------------------------------------

    def apply_backward(self, *arguments: object) -> None:
        if arguments[9] is not None:
            raise Unsupported("weights_delta is given, but a pooling has no weights")
        self.apply_pooling_backward(*arguments[:9], arguments[10], c.BNNSDataTypeUInt64, None, 0)

    def apply_pooling_backward(self, *arguments: object) -> None:
        """The same without weights, but with the type of indices, the indices and their stride."""
        batch_size, x, in_stride, in_delta = arguments[:4]
        read: dict[str, Array] = {}
        if in_delta is not None:
            read = self._indices(batch_size, arguments[10:], source_samples, "the gradient of UnMax needs them")
            if not read and self.function in (_MAX, _L2):
                if x is None:
                    needed = "the positions of the largest elements are" if self.function == _MAX else "the gradient is"
                    raise Invalid(f"in is NULL, and {needed} found from it")
                read["in"] = source_samples("in", self.input, x, checked_batch(batch_size), in_stride)
        self.run_backward(arguments, read)

    def check_backward(self) -> None:
        if self.input.dtype != FLOAT32:
            raise Unsupported(f"i_desc and o_desc of this filter have type {self.input.dtype}; backward needs Float32")
        super().check_backward()
        if _layer.needs_output(self.activation) and self.activation.slope_from == "input":
            name = self.activation.function.name
            raise Unsupported(f"the output of {name} does not determine its slope; an activation filter trains it")

    def reads(self, need: tuple[str, ...]) -> Mapping[str, str]:
        return {"out": _layer.NO_OUTPUT} if _layer.needs_output(self.activation) else {}

    def _one_per_channel(self, delta: Delta, given: Geometry) -> Geometry:
        """The gradient of the bias, in any shape with an element for each channel, whether or not there is a bias."""
        if given.elements != self.input.shape[0]:
            raise Invalid(
                f"{delta.name} has {given.elements} elements, expected {self.input.shape[0]}, one per channel"
            )
        return given

    def backward(self, wanted: Gradients) -> LinearGradients:
        dz, need = wanted.dy, wanted.need
        # Before dx is written, which may overlap dy.
        with np.errstate(all="ignore"):
            db = dz.sum((0, 2, 3), dtype=np.float64).astype(np.float32) if "db" in need else None
        return LinearGradients(dx=self._input_gradient(wanted) if "dx" in need else None, db=db)

    def _input_gradient(self, wanted: Gradients) -> Array:
        dz, x, at = wanted.dy, wanted.arrays.get("in"), wanted.arrays.get("indices")
        shape = (len(dz), *self.input.shape)
        out: dict[str, Any] = {"num_threads": self.threads}
        if wanted.out is not None:
            out |= {"out": wanted.out.dx, "accumulate": wanted.accumulate}
        if self.function == _MAX:
            if at is None:
                assert x is not None
                _, found = self._pooled(in_shape(x, shape), want_indices=True)
                assert found is not None
                at = self._whole_positions(found)
            return pooling.max_pool_backward(dz, at, shape, **out)
        if self.function == _UNMAX:
            assert at is not None
            return pooling.max_unpool_backward(dz, at, **out)
        used = (*shape[:2], *self.used)
        if self.function == _L2:
            assert x is not None
            part = in_shape(x, shape)[:, :, : self.used[0], : self.used[1]]
            norm, _ = self._pooled(part)
            result = pooling.l2_pool_backward(dz, part, norm, self.kernel, **self.options, **out)
        else:
            result = pooling.average_pool_backward(dz, used, self.kernel, **self.options, **out)
        if used == shape:
            return result
        padded = np.zeros(shape, np.float32)  # what no window reaches has no gradient
        padded[:, :, : self.used[0], : self.used[1]] = result
        return padded


def _axis(windows: Windows, side: str, kernel: int) -> Axis:
    if kernel == 0:
        raise Invalid(f"{side} is 0, must be at least 1")
    name, stride, _, pads, large, small, names = windows
    if large + sum(pads) < stride * (small - 1) + 1:
        raise Invalid(
            f"{names[1]} has {small} elements along {name}, whose windows with stride {stride} start up to "
            f"{stride * (small - 1)}, but {names[0]} has {large}, with padding {pads[0]} and {pads[1]}"
        )
    return windows.axis(kernel)


def _index_geometry(index_type: object, like: Geometry) -> Geometry:
    """The indices of an image: its extents and strides, and another type."""
    if index_type not in _INDEX_TYPES or isinstance(index_type, bool):
        shown = type_name(index_type)
        raise Invalid(f"indices_data_type is {shown}, must be BNNSDataTypeUInt64 or BNNSDataTypeUInt32")
    return geometry(like.layout, dtype_of(index_type), like.extents, like.strides)


# ---- Apple's functions ----------------------------------------------------------------------------------------------

_INDICES: Final = f"({c.BNNSDataTypeUInt64}) indices idx_stride"  # of type size_t


@creates(PoolingFilter, BNNSLayerParametersPooling, rename=renaming({"x": "i_desc", "kernel": "the kernel"}))
def BNNSFilterCreateLayerPooling() -> None:
    """Create a pooling filter: Max, an average, UnMax or L2Norm, with a bias and an activation. None on failure."""


_applies = functools.partial(applies, PoolingFilter, "filter is not a pooling filter")
_BACKWARD: Final = "filter batch_size in_+ in_delta+ out+ out_delta+ bias_delta"


@_applies("apply_pooling", f"filter batch_size in_+ out+ {_INDICES}", rename=FORWARD_NAMES)
def BNNSPoolingFilterApplyBatch() -> None:
    """Apply a pooling filter to a batch. Max writes its `indices`, of type size_t, if they are not None; UnMax needs
    them; other functions ignore them. Returns 0, or -1 on failure.
    """


@_applies("apply_pooling", "filter batch_size in_+ out+ indices_data_type indices idx_stride", rename=FORWARD_NAMES)
def BNNSPoolingFilterApplyBatchEx() -> None:
    """Apply a pooling filter to a batch, with indices of type UInt64 or UInt32."""


@_applies("apply_pooling_backward", f"{_BACKWARD} {_INDICES}", rename=BACKWARD_NAMES)
def BNNSPoolingFilterApplyBackwardBatch() -> None:
    """Compute the gradients of a pooling: of its input and of its bias.

    Max uses `indices`, or finds them again from `in_` if they are None. L2Norm needs `in_`, UnMax needs `indices`. The
    slope of an activation is computed from `out`. Returns 0, or -1 on failure.
    """


@_applies("apply_pooling_backward", f"{_BACKWARD} indices_data_type indices idx_stride", rename=BACKWARD_NAMES)
def BNNSPoolingFilterApplyBackwardBatchEx() -> None:
    """Compute the gradients of a pooling, with indices of type UInt64 or UInt32."""
