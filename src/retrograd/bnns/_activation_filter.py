"""Activation filters."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..ops._arrays import same_elements
from ..ops.elementwise import activation_backward, activation_forward
from . import _constants as c
from ._activation import Fused, elementwise, fused
from ._apply import OneInputFilter
from ._conversion import INTEGERS, converted, scale_of
from ._declare import creates
from ._failure import Invalid, Unsupported, status
from ._filter import (
    FLOAT32,
    BNNSFilter,
    accumulates,
    checked_batch,
    checked_descriptor,
    checked_filter,
    delta_geometry,
    delta_samples,
    geometry_of,
    in_shape,
    overlapping,
    put,
    sample_geometry,
    source_samples,
    target_samples,
    viewed,
)
from ._memory import (
    Array,
    Geometry,
    as_float,
    as_size,
    axes_of_size,
    check_disjoint,
    check_writable,
    data_type_of,
    listed,
    size_of,
)
from ._names import constant_name
from ._structures import BNNSActivation, BNNSFilterParameters, BNNSLayerParametersActivation, BNNSNDArrayDescriptor

_ARGUMENT: Final = re.compile(r"^(in|out)\b(?!_)")  # how messages about the samples begin
_SOFTMAXES: Final = (c.BNNSActivationFunctionSoftmax, c.BNNSActivationFunctionLogSoftmax)
_PER_CHANNEL: Final = c.BNNSActivationFunctionPReLUPerChannel
# Activations whose alpha can be trained; weights_delta receives its gradient.
_TRAINABLE: Final = (c.BNNSActivationFunctionLeakyRectifiedLinear, _PER_CHANNEL)


class ActivationFilter(OneInputFilter):
    """See :func:`BNNSFilterCreateLayerActivation`."""

    def __init__(self, layer: Any, parameters: Any) -> None:
        if not isinstance(layer, BNNSLayerParametersActivation):
            shown = "NULL" if layer is None else f"of type {type(layer).__name__}"
            raise Invalid(f"layer_params is {shown}, must be BNNSLayerParametersActivation")
        super().__init__(parameters)
        self.function = layer.activation.function
        self.input, self.output = self._geometry("i_desc", layer.i_desc), self._geometry("o_desc", layer.o_desc)
        self.converts = any(geometry.dtype.kind in "iu" for geometry in (self.input, self.output))
        self.scales = scale_of("i_desc", layer.i_desc), scale_of("o_desc", layer.o_desc)
        if self.input.elements != self.output.elements:
            raise Invalid(
                f"o_desc has {self.output.elements} elements, expected {self.input.elements} as in i_desc with its "
                f"{size_of(self.input)}"
            )
        if self.output.may_overlap:
            raise overlapping("o_desc", self.output)
        if self.function == _PER_CHANNEL and layer.i_desc.layout != c.BNNSDataLayoutImageCHW:
            raise Invalid("PReLUPerChannel needs i_desc.layout ImageCHW")
        self.axes = self._softmax_axes(layer)
        alpha, beta = as_float("alpha", layer.activation.alpha), as_float("beta", layer.activation.beta)
        if self.function not in (*_SOFTMAXES, _PER_CHANNEL):
            elementwise(BNNSActivation(self.function, alpha, beta))  # raises if there is no such function
        # BNNSGetPointer returns these; the next call uses what the client has written to them.
        channels = self.input.shape[0] if self.function == _PER_CHANNEL else 1
        self.alpha, self.beta = self.arena.allocate((channels,), FLOAT32), self.arena.allocate((1,), FLOAT32)
        self.alpha[...], self.beta[...] = alpha, beta
        # (alpha, beta) and the activation made from them.
        self._current: tuple[tuple[float, float], Fused] | None = None

    def _geometry(self, name: str, descriptor: BNNSNDArrayDescriptor) -> Geometry:
        """The geometry of the input or output. The identity also converts integers."""
        if self.function == c.BNNSActivationFunctionIdentity and descriptor.data_type in INTEGERS:
            return geometry_of(name, descriptor)
        return sample_geometry(name, descriptor)

    def _softmax_axes(self, layer: BNNSLayerParametersActivation) -> tuple[int, ...]:
        """Indices of the axes that a softmax runs over, in an array [batch, ...]."""
        flags, rank = as_size("axis_flags", layer.axis_flags), len(self.input.extents)
        if self.function not in _SOFTMAXES:
            return ()
        if flags >> rank + 1:
            raise Invalid(f"axis_flags is {flags:#x}, but i_desc has {rank} axes, and bit {rank} is the batch")
        listed = [k for k in range(rank) if flags >> k & 1] or ([] if flags else [0])
        axes = [1 + axes_of_size(layer.i_desc.layout)[k] for k in listed]
        return (0, *axes) if flags >> rank else tuple(axes)

    def current(self) -> Fused:
        """The activation with the current parameters."""
        parameters = self.alpha.item(0), self.beta.item(0)
        current = self._current
        if current is None or current[0] != parameters:
            activation = fused(BNNSActivation(self.function, *parameters), self.output.dtype, True)
            self._current = current = parameters, activation
        return current[1]

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, batch_size: Any, source: Any, in_stride: Any, target: Any, out_stride: Any) -> None:
        batch = checked_batch(batch_size)
        y = target_samples("out", self.output, target, batch, out_stride)
        x = source_samples("in", self.input, source, batch, in_stride)
        if not x.flags.aligned or not _in_place_or_apart(x, y):
            x = x.copy()
        if self.converts:
            scale, target_scale = self.scales
            put(y, converted(x, scale, y.dtype, target_scale).reshape(y.shape), False)
        elif self.function in _SOFTMAXES:
            put(y, self._softmax(x).reshape(y.shape), False)
        elif self.function == _PER_CHANNEL:
            x32 = x.astype(np.float32, copy=False)
            with np.errstate(all="ignore"):
                values = np.where(x32 < 0, self.alpha[:, None, None] * x32, x32)
            put(y, values.reshape(y.shape), False)
        else:
            function = self.current().function
            if x.dtype is y.dtype and x.shape == y.shape and y.flags.aligned:
                activation_forward(x, function, out=y, num_threads=self.threads)
            else:
                z = activation_forward(x.astype(np.float32, copy=False), function, num_threads=self.threads)
                put(y, z.reshape(y.shape), False)

    def _softmax(self, x: Array) -> npt.NDArray[np.float64]:
        z = x.astype(np.float64)
        with np.errstate(all="ignore"):
            z -= z.max(axis=self.axes, keepdims=True)
            total = np.exp(z).sum(axis=self.axes, keepdims=True)
            result: npt.NDArray[np.float64]
            result = np.exp(z) / total if self.function == c.BNNSActivationFunctionSoftmax else z - np.log(total)
        return result

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
        if out_delta is None:
            raise Invalid("out_delta is NULL")
        if self.converts:
            types = " to ".join(constant_name("BNNSDataType", data_type_of(g.dtype)) for g in (self.input, self.output))
            raise Unsupported(f"the filter converts {types}, and integers have no gradient")
        if bias_delta is not None:
            raise Unsupported("bias_delta is given, but an activation has no bias")
        dy = delta_samples("out_delta", out_delta, "o_desc", self.output, batch, out_delta_stride, source_samples)
        x = None if source is None else source_samples("in", self.input, source, batch, in_stride)
        y = None if out is None else source_samples("out", self.output, out, batch, out_stride)
        dalpha = None if weights_delta is None else self._alpha_delta(weights_delta, x)
        dx = None
        if in_delta is not None:
            dx = delta_samples("in_delta", in_delta, "i_desc", self.input, batch, in_delta_stride, target_samples)
            accumulate = accumulates("in_delta", in_delta)
            if dalpha is not None:
                check_disjoint({"in_delta": dx, "weights_delta": dalpha}, {})
        for name, array in (("out_delta", dy), ("in_delta", dx), ("weights_delta", dalpha)):
            if array is not None and array.dtype is not FLOAT32:
                self.note_extension("BNNSFilterApplyBackwardBatch", f"{name}.data_type is BNNSDataTypeBFloat16")
        # Before dx is written, which may overlap x or dy.
        sums = None if dalpha is None else self._alpha_gradient(x, dy)
        if dx is not None:
            self._input_gradient(x, y, dy, dx, accumulate)
        if dalpha is not None and sums is not None:
            put(dalpha, sums.astype(np.float32).reshape(dalpha.shape), accumulates("weights_delta", weights_delta))

    def _alpha_delta(self, descriptor: Any, x: Array | None) -> Array:
        name = "weights_delta"
        if self.function not in _TRAINABLE:
            raise Unsupported(f"{name} is given, but this activation has no parameter to train")
        if x is None:
            raise Invalid("in is NULL, and the gradient of alpha is computed from it")
        geometry = delta_geometry(name, checked_descriptor(name, descriptor))
        if geometry.elements != self.alpha.size:
            size = listed(geometry.layout, geometry.extents)
            raise Invalid(f"{name}.size is {size}, expected size={(self.alpha.size,)}")
        if geometry.may_overlap:
            raise overlapping(name, geometry)
        accumulates(name, descriptor)
        view = viewed(name, descriptor)
        check_writable(f"{name}.data", view)
        return view

    def _alpha_gradient(self, x: Array | None, dy: Array) -> Array:
        assert x is not None  # checked by _alpha_delta
        with np.errstate(all="ignore"):
            terms = np.where(x < 0, x.astype(np.float64), 0.0) * dy.astype(np.float64).reshape(x.shape)
        if self.function == _PER_CHANNEL:
            return np.asarray(terms.sum(axis=(0, 2, 3)))
        return np.asarray(terms.sum())

    def _input_gradient(self, x: Array | None, y: Array | None, dy: Array, dx: Array, accumulate: bool) -> None:
        shape = dx.shape
        dy = in_shape(dy, shape)
        if self.function in _SOFTMAXES:
            if y is None:
                if x is None:
                    raise Invalid("in and out are NULL; one of them is needed")
                y = self._softmax(x)
            put(dx, self._softmax_gradient(y.astype(np.float64).reshape(shape), dy), accumulate)
            return
        if self.function == _PER_CHANNEL:
            if x is None:
                raise Invalid("in is NULL, and the activation's slope is computed from it")
            with np.errstate(all="ignore"):
                values = np.where(x < 0, self.alpha[:, None, None] * dy, dy)
            put(dx, values, accumulate)
            return
        chosen = self.current()
        if chosen.function.name in ("identity", "linear", "linear_with_bias"):
            known, by_output = dy, False  # the slope is constant, so any input will do
        elif chosen.slope_from == "output" and y is not None:
            known, by_output = in_shape(y, shape), True
        elif x is not None:
            known, by_output = in_shape(x, shape), False
        elif chosen.slope_from == "output":
            raise Invalid("in and out are NULL; one of them is needed")
        else:
            raise Invalid("in is NULL, and the activation's slope is computed from it")
        direct = dx.dtype is FLOAT32 and dx.flags.aligned and _in_place_or_apart(dx, dy)
        direct = direct and (known is dy or _in_place_or_apart(dx, known))
        result = activation_backward(
            dy,
            chosen.function,
            x=None if by_output else known,
            y=known if by_output else None,
            out=dx if direct else None,
            accumulate=accumulate and direct,
            num_threads=self.threads,
        )
        if not direct:
            put(dx, result, accumulate)

    def _softmax_gradient(self, y: npt.NDArray[np.float64], dy: Array) -> Array:
        with np.errstate(all="ignore"):
            if self.function == c.BNNSActivationFunctionSoftmax:
                dx = y * (dy - (dy * y).sum(axis=self.axes, keepdims=True))
            else:
                dx = dy - np.exp(y) * dy.sum(axis=self.axes, keepdims=True, dtype=np.float64)
            rounded: Array = dx.astype(np.float32)
        return rounded


def _in_place_or_apart(result: Array, array: Array) -> bool:
    """Whether a result is computed exactly in place, or certainly does not overlap its input."""
    return not np.may_share_memory(result, array) or same_elements(result, array)


# ---- Apple's functions ----------------------------------------------------------------------------------------------


@creates(ActivationFilter, BNNSLayerParametersActivation)
def BNNSFilterCreateLayerActivation() -> None:
    """Create an activation filter: elementwise, softmax, log-softmax or PReLU per channel. None on failure.

    The identity converts between data types. Integers, which no other function accepts, are rounded half to even and
    saturate; ``data_scale`` and ``data_bias`` of their descriptors apply.
    """


@status(-1)
def BNNSDirectApplyActivationBatch(
    layer_params: BNNSLayerParametersActivation,
    filter_params: BNNSFilterParameters | None,
    batch_size: int,
    in_stride: int,
    out_stride: int,
) -> int:
    """Apply an activation without keeping a filter. The data is that of ``i_desc`` and ``o_desc``. 0, or -1."""
    filter = ActivationFilter(layer_params, filter_params)
    try:
        filter.apply(batch_size, layer_params.i_desc.data, in_stride, layer_params.o_desc.data, out_stride)
    except (Invalid, Unsupported) as error:
        raise type(error)(_ARGUMENT.sub(lambda match: f"{match[1][0]}_desc.data", str(error))) from None
    finally:
        filter.destroy()
    return 0


@status(None, name="BNNSGetPointer")
def _pointer(filter: BNNSFilter | None, target: int) -> BNNSNDArrayDescriptor:
    checked = checked_filter(ActivationFilter, filter, "filter is not an activation filter: it has no alpha or beta")
    if target not in (c.BNNSPointerSpecifierAlpha, c.BNNSPointerSpecifierBeta):
        raise Invalid(f"target is {target!r}, must be BNNSPointerSpecifierAlpha or BNNSPointerSpecifierBeta")
    return BNNSNDArrayDescriptor.from_array(checked.alpha if target == c.BNNSPointerSpecifierAlpha else checked.beta)


def BNNSGetPointer(filter: BNNSFilter | None, target: int) -> BNNSNDArrayDescriptor:
    """Describe alpha or beta inside an activation filter, to read or change it. Without data on failure."""
    return _pointer(filter, target) or BNNSNDArrayDescriptor()
