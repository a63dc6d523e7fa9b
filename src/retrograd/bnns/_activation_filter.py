"""Activation filters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from ..ops.elementwise import activation_backward, activation_forward
from ..ops.linear import LinearGradients
from . import _constants as c
from . import _filter
from ._activation import Fused, elementwise, fused
from ._conversion import INTEGERS, converted, scale_of
from ._declare import creates
from ._failure import Invalid, Unsupported, status
from ._filter import DELTAS, FLOAT32, BNNSFilter
from ._layer import Delta, Gradients, OneInputFilter, checked_layer
from ._memory import Array, Geometry, as_float, as_size, axes_of_size, data_type_of, listed, size_of
from ._names import constant_name
from ._structures import BNNSActivation, BNNSFilterParameters, BNNSLayerParametersActivation, BNNSNDArrayDescriptor

_SOFTMAXES: Final = (c.BNNSActivationFunctionSoftmax, c.BNNSActivationFunctionLogSoftmax)
_PER_CHANNEL: Final = c.BNNSActivationFunctionPReLUPerChannel
# Activations whose alpha can be trained; weights_delta receives its gradient.
_TRAINABLE: Final = (c.BNNSActivationFunctionLeakyRectifiedLinear, _PER_CHANNEL)
_NEITHER: Final = "in and out are NULL; one of them is needed"
_NO_INPUT: Final = "in is NULL, and the activation's slope is computed from it"


class ActivationFilter(OneInputFilter):
    """See :func:`BNNSFilterCreateLayerActivation`."""

    may_overlap = frozenset({"in"})
    in_place = MappingProxyType({"dx": ("dy", "in", "out")})
    absent: Mapping[str, str] = MappingProxyType({"bias_delta": "an activation has no bias"})
    notes = "BNNSFilterApplyBackwardBatch"

    def __init__(self, layer: object, parameters: object) -> None:
        layer = checked_layer(BNNSLayerParametersActivation, layer)
        super().__init__(parameters)
        self.function = layer.activation.function
        self.declare(self._geometry("i_desc", layer.i_desc), self._geometry("o_desc", layer.o_desc))
        self.converts = any(geometry.dtype.kind in "iu" for geometry in (self.input, self.output))
        self.scales = scale_of("i_desc", layer.i_desc), scale_of("o_desc", layer.o_desc)
        if self.input.elements != self.output.elements:
            expected = f"{self.input.elements} as in i_desc with its {size_of(self.input)}"
            raise Invalid(f"o_desc has {self.output.elements} elements, expected {expected}")
        if self.output.may_overlap:
            raise _filter.overlapping("o_desc", self.output)
        if self.function == _PER_CHANNEL and layer.i_desc.layout != c.BNNSDataLayoutImageCHW:
            raise Invalid("PReLUPerChannel needs i_desc.layout ImageCHW")
        self.axes = self._softmax_axes(layer)
        alpha, beta = as_float("alpha", layer.activation.alpha), as_float("beta", layer.activation.beta)
        elements = self.function not in (*_SOFTMAXES, _PER_CHANNEL)
        if elements:
            elementwise(BNNSActivation(self.function, alpha, beta))  # raises if there is no such function
        # BNNSGetPointer returns these; the next call uses what the client has written to them.
        channels = self.input.shape[0] if self.function == _PER_CHANNEL else 1
        self.alpha, self.beta = self.arena.allocate((channels,), FLOAT32), self.arena.allocate((1,), FLOAT32)
        self.alpha[...], self.beta[...] = alpha, beta
        # The engine writes the output itself.
        same = self.input.dtype is self.output.dtype and self.input.shape == self.output.shape
        self._direct = elements and same and not self.converts
        shape, types = self.input.shape, DELTAS
        self.out_delta = Delta("out_delta", "o_desc", self.output, shape, Delta.reshaped, types)
        self.deltas = {
            "dx": Delta("in_delta", "i_desc", self.input, shape if elements else None, Delta.reshaped, types),
            "dw": Delta("weights_delta", "alpha", self.input, None, self._like_alpha, types, batched=False),
        }
        if self.function not in _TRAINABLE:
            self.absent = {**self.absent, "weights_delta": "this activation has no parameter to train"}
        # (alpha, beta) and the activation made from them.
        self._current: tuple[tuple[float, float], Fused] | None = None

    def _geometry(self, name: str, descriptor: BNNSNDArrayDescriptor) -> Geometry:
        """The geometry of the input or output. The identity also converts integers."""
        if self.function == c.BNNSActivationFunctionIdentity and descriptor.data_type in INTEGERS:
            return _filter.geometry_of(name, descriptor)
        return _filter.sample_geometry(name, descriptor)

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

    def writable_output(self, y: Array) -> Array | None:
        return y if self._direct and y.flags.aligned else None

    def forward(self, arrays: Mapping[str, Array], out: Array | None) -> Array:
        x = arrays["in"]
        if not x.flags.aligned:
            x = x.copy()
        if out is not None:
            return activation_forward(x, self.current().function, out=out, num_threads=self.threads)
        if self.converts:
            scale, target_scale = self.scales
            return converted(x, scale, self.output.dtype, target_scale)
        if self.function in _SOFTMAXES:
            return self._softmax(x)
        x = x.astype(np.float32, copy=False)
        if self.function == _PER_CHANNEL:
            with np.errstate(all="ignore"):
                return np.where(x < 0, self.alpha[:, None, None] * x, x)
        return activation_forward(x, self.current().function, num_threads=self.threads)

    def _softmax(self, x: Array) -> npt.NDArray[np.float64]:
        z = x.astype(np.float64)
        with np.errstate(all="ignore"):
            z -= z.max(axis=self.axes, keepdims=True)
            total = np.exp(z).sum(axis=self.axes, keepdims=True)
            return np.asarray(
                np.exp(z) / total if self.function == c.BNNSActivationFunctionSoftmax else z - np.log(total)
            )

    # ---- backward ---------------------------------------------------------------------------------------------------

    def check_backward(self) -> None:
        if self.converts:
            types = " to ".join(constant_name("BNNSDataType", data_type_of(g.dtype)) for g in (self.input, self.output))
            raise Unsupported(f"the filter converts {types}, and integers have no gradient")

    def reads(self, need: tuple[str, ...]) -> Mapping[str, str]:
        return {"in": "in is NULL, and the gradient of alpha is computed from it" if "dw" in need else "", "out": ""}

    def _like_alpha(self, delta: Delta, given: Geometry) -> Geometry:
        if given.elements != self.alpha.size:
            size = listed(given.layout, given.extents)
            raise Invalid(f"{delta.name}.size is {size}, expected size={(self.alpha.size,)}")
        return given

    def backward(self, wanted: Gradients) -> LinearGradients:
        x, y, need = wanted.arrays["in"], wanted.arrays["out"], wanted.need
        # Before dx is written, which may overlap x or dy.
        dalpha = self._alpha_gradient(x, wanted.dy) if "dw" in need and x is not None else None
        return LinearGradients(dx=self._input_gradient(x, y, wanted) if "dx" in need else None, dw=dalpha)

    def _alpha_gradient(self, x: Array, dy: Array) -> Array:
        with np.errstate(all="ignore"):
            terms = np.where(x < 0, x.astype(np.float64), 0.0) * dy.astype(np.float64)
            sums = np.asarray(terms.sum(axis=(0, 2, 3) if self.function == _PER_CHANNEL else None))
            return sums.astype(np.float32)

    def _input_gradient(self, x: Array | None, y: Array | None, wanted: Gradients) -> Array:
        dy = wanted.dy
        if self.function in _SOFTMAXES:
            if y is None:
                if x is None:
                    raise Invalid(_NEITHER)
                y = self._softmax(x)
            return self._softmax_gradient(y.astype(np.float64).reshape(dy.shape), dy)
        if self.function == _PER_CHANNEL:
            if x is None:
                raise Invalid(_NO_INPUT)
            with np.errstate(all="ignore"):
                return np.where(x < 0, self.alpha[:, None, None] * dy, dy)
        chosen = self.current()
        known: dict[str, Array]
        if chosen.function.name in ("identity", "linear", "linear_with_bias"):
            known = {"x": dy}  # the slope is constant, so any input will do
        elif chosen.slope_from == "output" and y is not None:
            known = {"y": _filter.in_shape(y, dy.shape)}
        elif x is not None:
            known = {"x": _filter.in_shape(x, dy.shape)}
        else:
            raise Invalid(_NEITHER if chosen.slope_from == "output" else _NO_INPUT)
        out = None if wanted.out is None else wanted.out.dx
        return activation_backward(
            dy, chosen.function, **known, out=out, accumulate=wanted.accumulate, num_threads=self.threads
        )

    def _softmax_gradient(self, y: npt.NDArray[np.float64], dy: Array) -> Array:
        with np.errstate(all="ignore"):
            if self.function == c.BNNSActivationFunctionSoftmax:
                dx = y * (dy - (dy * y).sum(axis=self.axes, keepdims=True))
            else:
                dx = dy - np.exp(y) * dy.sum(axis=self.axes, keepdims=True, dtype=np.float64)
            rounded: Array = dx.astype(np.float32)
        return rounded


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
    filter.shown = {"in": "i_desc.data", "out": "o_desc.data"}
    try:
        filter.apply(batch_size, layer_params.i_desc.data, in_stride, layer_params.o_desc.data, out_stride)
    finally:
        filter.destroy()
    return 0


@status(None, name="BNNSGetPointer")
def _pointer(filter: BNNSFilter | None, target: int) -> BNNSNDArrayDescriptor:
    checked = _filter.checked_filter(
        ActivationFilter, filter, "filter is not an activation filter: it has no alpha or beta"
    )
    if target not in (c.BNNSPointerSpecifierAlpha, c.BNNSPointerSpecifierBeta):
        raise Invalid(f"target is {target!r}, must be BNNSPointerSpecifierAlpha or BNNSPointerSpecifierBeta")
    return BNNSNDArrayDescriptor.from_array(checked.alpha if target == c.BNNSPointerSpecifierAlpha else checked.beta)


def BNNSGetPointer(filter: BNNSFilter | None, target: int) -> BNNSNDArrayDescriptor:
    """Describe alpha or beta inside an activation filter, to read or change it. Without data on failure."""
    return _pointer(filter, target) or BNNSNDArrayDescriptor()
