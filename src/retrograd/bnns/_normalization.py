"""Batch, instance, layer and group normalization filters.

A training pass keeps a float32 copy of the input: Apple's backward call has no pointer to it, and the client may
overwrite it or compute the output in place. The engine makes the copy while it computes the output, from what each
thread reads anyway. This module handles shapes and Apple's rules; the arithmetic is the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from ..ops import normalization as ops
from ..ops._planned import Planned
from ..ops.normalization import NormCache, NormGradients
from . import _constants as c
from ._activation import Fused, fused
from ._declare import applies
from ._failure import Invalid, Unsupported, advise, advise_once, renaming, status
from ._filter import DELTAS, FLOAT32, FLOATING, FLOATS, check_layout, geometry_of, in_shape, put, unlike, viewed
from ._layer import EMPTY, Arguments, Delta, Gradients, Layer, Parameter, Result, checked_layer
from ._memory import Array, Geometry, as_float, as_size, check_disjoint, check_writable, size_text
from ._names import constant_name, layout_name, type_name
from ._structures import BNNSFilterParameters, BNNSLayerParametersNormalization, BNNSNDArrayDescriptor

_LAYOUTS: Final = (
    c.BNNSDataLayoutVector,
    c.BNNSDataLayoutImageCHW,
    c.BNNSDataLayout3DLastMajor,  # ImageCHW by another name
    c.BNNSDataLayout3DFirstMajor,  # likewise, with size listed as C, H, W
)
# Extensions: Apple's headers list only the first two layouts, and do not say that these functions can be trained.
_EXTENDED_LAYOUTS: Final = _LAYOUTS[2:]
_EXTENDED_TRAINABLE: Final = (c.BNNSActivationFunctionScaledTanh, c.BNNSActivationFunctionReLU6)
_LEAKY: Final = (c.BNNSActivationFunctionLeakyRectifiedLinear, c.BNNSActivationFunctionClampedLeakyRectifiedLinear)
# From the array functions' argument names to Apple's.
_RENAME: Final = renaming(
    {
        "x": "in",
        "y": "out",
        "dy": "out_delta.data",
        "dx": "in_delta.data",
        "dgamma": "gamma_delta.data",
        "dbeta": "beta_delta.data",
        "gamma": "gamma_desc.data",
        "beta": "beta_desc.data",
        "running_mean": "moving_mean_desc.data",
        "running_var": "moving_variance_desc.data",
        "eps": "epsilon",
    }
)
_NO_EPSILON: Final = "epsilon is 0: where all values that are normalized together are equal, the output is NaN"
_EVALUATED: Final = (
    "the last forward call had training false: backward computes the gradients of the training pass before it"
)
_STILL: Final = "moving statistics never change; if momentum is meant to weigh the other, set momentum_weighs"


class _Form(NamedTuple):
    """How to call the engine for a normalization."""

    forward: Callable[..., tuple[Array, NormCache]]
    backward: Callable[..., NormGradients]
    shape: tuple[int, ...]  # of a sample
    parameter_shape: tuple[int, ...]
    options: dict[str, Any]
    gradient_shape: tuple[int, ...]  # of a parameter's gradient
    wide: bool = False  # as a group norm: each element is a channel, and those normalized together are a group


class NormalizationFilter(Layer):
    """See :func:`BNNSFilterCreateLayerNormalization`."""

    backward_arguments = Arguments("batch_size in_delta+ out+ out_delta+ beta_delta gamma_delta")
    computed = NormGradients
    may_overlap = frozenset({"in"})
    in_place = MappingProxyType({"dx": ("dy",)})

    def __init__(
        self, norm_type: object, layer: object, parameters: object, any_trainable: bool, momentum_weighs: str
    ) -> None:
        layer = checked_layer(BNNSLayerParametersNormalization, layer)
        if norm_type not in (c.BNNSBatchNorm, c.BNNSInstanceNorm, c.BNNSLayerNorm, c.BNNSGroupNorm):
            raise Invalid(f"normType is {norm_type!r}, must be from {c.BNNSBatchNorm} to {c.BNNSGroupNorm}")
        super().__init__(parameters)
        self.norm_type = norm_type
        for name, descriptor in (("i_desc", layer.i_desc), ("o_desc", layer.o_desc)):
            check_layout(name, descriptor.layout, _LAYOUTS, "Vector, ImageCHW or 3D")
        self.describe(layer, FLOATS, FLOATS, FLOATING)
        if self.input.extents != self.output.extents:
            raise unlike("o_desc", self.output, "i_desc", self.input)
        self.momentum, self.epsilon = as_float("momentum", layer.momentum), as_float("epsilon", layer.epsilon)
        if not 0 <= self.momentum <= 1:
            raise Invalid(f"momentum is {self.momentum}, must be from 0 to 1")
        if not 0 <= self.epsilon < math.inf:
            raise Invalid(f"epsilon is {self.epsilon}, must be finite and at least 0")
        if self.epsilon == 0:
            advise_once(_NO_EPSILON)
        self.activation = self._activation(layer, any_trainable)
        shape = self.input.shape
        self.channels = shape[0]
        groups, axis = as_size("num_groups", layer.num_groups), as_size("normalization_axis", layer.normalization_axis)
        if norm_type == c.BNNSGroupNorm and (groups == 0 or self.channels % groups):
            raise Invalid(f"num_groups is {groups}, which does not divide the {self.channels} channels")
        if norm_type == c.BNNSLayerNorm and axis >= len(shape):
            raise Invalid(f"normalization_axis is {axis}, must be below {len(shape)}, the axes of i_desc")
        self._groups, self._axis = groups, axis
        # Numbers of elements that gamma and beta may have. Layer norm: the whole sample, or the normalized axes.
        self.parameter_sizes = (
            {math.prod(shape), math.prod(shape[axis:])} if norm_type == c.BNNSLayerNorm else {self.channels}
        )
        self._moving = {
            name: descriptor.copy()
            for name, descriptor in (
                ("moving_mean_desc", layer.moving_mean_desc),
                ("moving_variance_desc", layer.moving_variance_desc),
            )
            if descriptor.data is not None and norm_type in (c.BNNSBatchNorm, c.BNNSInstanceNorm)
        }
        for name, descriptor in self._moving.items():
            self._check_moving(name, descriptor)
        check_disjoint({name: descriptor.view() for name, descriptor in self._moving.items()}, {})
        self.gamma = self._parameter("gamma_desc", layer.gamma_desc)
        self.beta = self._parameter("beta_desc", layer.beta_desc)
        self._forms = {wide: self._form(wide) for wide in (False, True)}
        self._is_wide = any(self._needs_wide(parameter.geometry.elements) for parameter in self.parameters())
        # What the filter uses in the client's memory: gamma, beta, and in forward the moving statistics.
        self._client = dict(self._moving)
        if self.uses_client_memory:
            self._client |= {parameter.name: parameter.client for parameter in self.parameters()}
        self._alone = _ForwardPlan({}, self._forms[self._is_wide].options)  # without any
        if momentum_weighs not in ("old", "new"):
            raise Invalid(f"momentum_weighs is {momentum_weighs!r}, must be 'old' or 'new'")
        keep = self.momentum if momentum_weighs == "old" else 1.0 - self.momentum
        self._update = ops.RunningUpdate.bnns(keep)
        if self._moving and keep == 1:
            advise(f"momentum is {self.momentum:g} and weighs the {momentum_weighs} value: {_STILL}")
        self._kept: Array | None = None  # x of the last training pass; may have room for more samples
        self._cache: NormCache | None = None
        self._evaluated = False  # since the last training pass
        for what in self._extensions(layer):
            self.note_extension("BNNSFilterCreateLayerNormalization", what)
        self.out_delta = Delta("out_delta", "o_desc", self.output, shape, Delta.reshaped, DELTAS)
        self.deltas = {"dx": Delta("in_delta", "i_desc", self.input, shape, Delta.reshaped, DELTAS)}
        for name, given in (("gamma", self.gamma), ("beta", self.beta)):
            like = self.input if given is None else given.geometry
            fits = self._fits_sample if given is None else Delta.alike
            self.deltas[f"d{name}"] = Delta(f"{name}_delta", f"{name}_desc", like, shape, fits, DELTAS, False)

    def _extensions(self, layer: BNNSLayerParametersNormalization) -> Iterator[str]:
        """Properties of the layer that retrograd accepts and Apple's headers do not."""
        for name in ("i_desc", "o_desc"):
            layout = getattr(layer, name).layout
            if layout in _EXTENDED_LAYOUTS:
                yield f"{name}.layout is {layout_name(layout)}"
        parameters = {parameter.name: parameter.geometry for parameter in self.parameters()}
        if len({geometry.dtype for geometry in parameters.values()}) > 1:
            types = (type_name(getattr(layer, name).data_type) for name in parameters)
            yield f"gamma_desc.data_type and beta_desc.data_type differ ({' and '.join(types)})"
        for name, geometry in parameters.items():
            if self.norm_type != c.BNNSLayerNorm and len(geometry.extents) > 1:
                yield f"{name}.layout is {layout_name(geometry.layout)}, not a vector"
        function = layer.activation.function
        if function in _EXTENDED_TRAINABLE or (function in _LEAKY and as_float("alpha", layer.activation.alpha) == 0):
            alpha = " with alpha 0" if function in _LEAKY else ""
            shown = constant_name("BNNSActivationFunction", function)
            yield f"activation.function is {shown}{alpha}, and backward trains it"

    def _activation(self, layer: BNNSLayerParametersNormalization, any_trainable: bool) -> Fused:
        per_channel = layer.activation.function == c.BNNSActivationFunctionPReLUPerChannel
        if per_channel and layer.i_desc.layout == c.BNNSDataLayoutVector:
            raise Invalid("PReLUPerChannel needs an image")
        return fused(layer.activation, self.output.dtype, any_trainable)

    def _check_moving(self, name: str, descriptor: BNNSNDArrayDescriptor) -> None:
        if descriptor.data_type != c.BNNSDataTypeFloat32:
            raise Invalid(f"{name}.data_type is {type_name(descriptor.data_type)}, must be BNNSDataTypeFloat32")
        geometry, wanted = geometry_of(name, descriptor), (self.channels,)
        if geometry.extents != wanted:
            raise Invalid(f"{name}.size is {geometry.size}, expected size={wanted}, one value for each channel")
        viewed(name, descriptor)

    def _parameter(self, name: str, descriptor: BNNSNDArrayDescriptor) -> Parameter | None:
        if descriptor.data is None:
            return None
        self._check_parameter_size(name, geometry_of(name, descriptor))
        if descriptor.data_type not in FLOATS:
            raise Invalid(f"{name}.data_type is {type_name(descriptor.data_type)}, which is not a floating-point type")
        return Parameter(name, descriptor, self, FLOATS)

    def parameters(self) -> Sequence[Parameter]:
        return [parameter for parameter in (self.gamma, self.beta) if parameter is not None]

    def _check_parameter_size(self, name: str, geometry: Geometry) -> None:
        if geometry.elements in self.parameter_sizes:
            return
        size = geometry.size
        expected = f"size={(self.channels,)}, one value for each channel"
        if self.norm_type == c.BNNSLayerNorm:
            shapes = {self.input.extents, self.input.extents[: len(self.input.extents) - self._axis]}
            sizes = sorted(shapes, key=len, reverse=True)
            expected = " or ".join(size_text(geometry.layout if len(e) == len(size) else 0, e) for e in sizes)
        raise Invalid(f"{name}.size is {size}, expected {expected}")

    def _needs_wide(self, elements: int) -> bool:
        """Whether a layer norm parameter also varies along axes that are not normalized."""
        shape = self.input.shape
        return self.norm_type == c.BNNSLayerNorm and elements != math.prod(shape[self._axis :])

    def _form(self, wide: bool) -> _Form:
        options: dict[str, Any] = {
            "eps": self.epsilon,
            "activation": self.activation.function,
            "slope_from": self.activation.slope_from,
            "num_threads": self.threads,
        }
        shape, channels = self.input.shape, (self.channels,)
        if self.norm_type == c.BNNSBatchNorm:
            return _Form(ops.batch_norm_forward, ops.batch_norm_backward, shape, channels, options, channels)
        if self.norm_type == c.BNNSInstanceNorm:
            return _Form(ops.instance_norm_forward, ops.instance_norm_backward, shape, channels, options, channels)
        if self.norm_type == c.BNNSGroupNorm:
            options["num_groups"] = self._groups
            return _Form(ops.group_norm_forward, ops.group_norm_backward, shape, channels, options, channels)
        if wide:
            flat = (math.prod(shape),)
            options["num_groups"] = math.prod(shape[: self._axis])
            return _Form(ops.group_norm_forward, ops.group_norm_backward, flat, shape, options, flat, True)
        options["axis"], tail = 1 + self._axis, shape[self._axis :]
        return _Form(ops.layer_norm_forward, ops.layer_norm_backward, shape, tail, options, tail)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, *arguments: object) -> None:
        training = bool(arguments[5])
        client, options = _forward_plan(self, int(training), *self._client.values()) if self._client else self._alone
        self.run(arguments, client, forward=partial(self._train if training else self._evaluate, options))

    def writable_output(self, y: Array) -> Array | None:
        """The output if it has the type of the input, which evaluation does not convert, or float32."""
        return y if y.flags.aligned and y.dtype in (FLOAT32, self.input.dtype) else None

    def _evaluate(self, options: dict[str, Any], arrays: Mapping[str, Array], out: Array | None) -> Array:
        x = arrays["in"]
        if x.dtype is not self.output.dtype:
            x = x.astype(np.float32)
        elif not x.flags.aligned:
            x = x.copy()
        result = np.empty(x.shape, x.dtype) if out is None else out
        self._run(self._is_wide, x, result, None, options)
        self._evaluated = True
        return result

    def _train(self, options: dict[str, Any], arrays: Mapping[str, Array], out: Array | None) -> Array:
        """Run a training pass and keep a copy of x."""
        x = arrays["in"]
        result = np.empty(x.shape, np.float32) if out is None or out.dtype is not FLOAT32 else out
        kept = self._buffer_for(x.shape)
        # The client's allocator may return memory that the client also uses for x or y.
        apart = self.owns_memory or not (np.may_share_memory(kept, x) or np.may_share_memory(kept, result))
        if x.dtype is FLOAT32 and x.flags.aligned and apart:
            cache = self._run(self._is_wide, x, result, kept, options)
        else:
            kept[...] = x
            cache = self._run(self._is_wide, kept, result, None, options)
        # These arrays might not outlive the call. Backward is passed y and reads the parameters again.
        self._cache = cache.with_arrays(None, None, None)
        self._evaluated = False
        return result

    def _run(self, wide: bool, x: Array, result: Array, kept: Array | None, options: dict[str, Any]) -> NormCache:
        form = self._forms[wide]
        gamma = None if self.gamma is None else self.gamma.repeated(form.parameter_shape)
        beta = None if self.beta is None else self.beta.repeated(form.parameter_shape)
        if not wide:
            return form.forward(x, gamma, beta, out=result, keep_x=kept, **options)[1]
        shape = (x.shape[0], *form.shape)
        flat = _flattened(result)
        gamma, beta = (None if p is None else p.reshape(-1) for p in (gamma, beta))
        kept = None if kept is None else kept.reshape(shape)
        y, cache = form.forward(x.reshape(shape), gamma, beta, out=flat, keep_x=kept, **options)
        if flat is None:
            put(result, y.reshape(result.shape), False)
        return cache

    def _running(self, moving: dict[str, Array], training: bool) -> dict[str, Any]:
        """The engine's arguments for moving statistics."""
        mean, variance = moving.get("moving_mean_desc"), moving.get("moving_variance_desc")
        if not training:
            if mean is None or variance is None:
                return {}  # both or neither: do not mix moving and batch statistics
            return {"training": False, "running_mean": mean, "running_var": variance}
        for name, array in moving.items():
            check_writable(f"{name}.data", array)
        if mean is None:
            mean = np.zeros(self.channels, np.float32)
        if variance is None:
            variance = np.zeros(self.channels, np.float32)
        return {"running_mean": mean, "running_var": variance, "update": self._update}

    def _buffer_for(self, shape: tuple[int, ...]) -> Array:
        """The array that holds a copy of x until the next training pass."""
        kept = self._kept
        if kept is None or kept.shape[0] < shape[0]:
            kept = self.arena.allocate(shape, FLOAT32)  # if this fails, the previous pass remains valid
        self._cache = None  # its arrays are now freed or overwritten
        if kept is not self._kept:
            self.arena.free(self._kept)
            self._kept = kept
        return kept if kept.shape[0] == shape[0] else kept[: shape[0]]

    # ---- backward ---------------------------------------------------------------------------------------------------

    def apply_backward(self, *arguments: object) -> None:
        cache = self._cache
        self.run_backward(arguments, EMPTY if cache is None or self.owns_memory else {"x": cache.x})

    def check_state(self, batch: int) -> None:
        cache = self._cache
        if cache is None:
            raise Invalid("there has been no training pass")
        if cache.x.shape[0] != batch:
            raise Invalid(f"batch_size is {batch}, but the last training pass had {cache.x.shape[0]} samples")
        if self._evaluated:
            advise_once(_EVALUATED)

    def check_backward(self) -> None:
        """An activation that cannot be trained matters only if there is a gradient to compute."""

    def reads(self, need: tuple[str, ...]) -> Mapping[str, str]:
        if not need or self.activation.function.name == "identity":
            return {}
        if self.activation.untrainable:
            raise Unsupported(self.activation.untrainable)
        needed = self.norm_type == c.BNNSInstanceNorm
        return {"out": "out is NULL; an instance norm with an activation needs it" if needed else ""}

    def _fits_sample(self, delta: Delta, given: Geometry) -> Geometry:
        """The gradient of a parameter that the layer does not have."""
        self._check_parameter_size(delta.name, given)
        return given

    def form_of(self, results: Sequence[Result]) -> _Form:
        wide = any(result.key != "dx" and self._needs_wide(result.array.size) for result in results)
        return self._forms[wide or self._is_wide]

    def dy_shape(self, batch: int, form: _Form) -> tuple[int, ...]:
        return (batch, *form.shape)

    def writable(self, result: Result, batch: int, form: _Form) -> Array | None:
        if result.key == "dx":
            return result.rows((batch, *form.shape))
        array, shape = result.array, form.gradient_shape
        return result.rows(shape) if array.shape == shape or array.flags.c_contiguous else None

    def activation_gradient(self, dy: Array, arrays: Mapping[str, Array | None]) -> Array:
        return dy  # the engine's backward includes the activation

    def backward(self, wanted: Gradients) -> NormGradients:
        dy, out, form = wanted.dy, wanted.out, wanted.form
        cache, y = self._cache, wanted.arrays.get("out")
        assert cache is not None  # check_state
        by_output = self.activation.slope_from == "output"
        needs_y = y is None and by_output and self.activation.function.name != "identity"
        if needs_y or form.wide != self._is_wide:
            # `out` was not given; or the gradient of an absent parameter is wanted for every element, which takes the
            # other form and its cache. The kept input gives both.
            again = np.empty((cache.x.shape[0], *self.input.shape), np.float32)
            cache = self._run(form.wide, cache.x, again, None, form.options)
            if needs_y:
                y = again.astype(self.output.dtype, copy=False)
        # The current gamma, and beta if z is recomputed.
        gamma, beta = self.gamma, None if by_output else self.beta
        cache = cache.with_arrays(
            in_shape(y, dy.shape) if by_output and y is not None else None,
            None if gamma is None else gamma.repeated(form.parameter_shape).reshape(form.gradient_shape),
            None if beta is None else beta.repeated(form.parameter_shape).reshape(form.gradient_shape),
        )
        # With memory for all of them, there is no need to name them.
        all_out = out is not None and out[0] is not None and out[1] is not None and out[2] is not None
        need = None if all_out else wanted.need
        gradients: NormGradients = form.backward(
            dy, cache, need=need, out=out, accumulate=wanted.accumulate, num_threads=self.threads
        )
        return gradients

    def put(self, results: Sequence[Result], gradients: object) -> None:
        for result in results:
            values: Array = getattr(gradients, result.key)
            size = result.array.size
            if values.size != size:  # the parameter was broadcast along the leading axes
                values = values.reshape(-1, size).sum(axis=0, dtype=np.float64).astype(np.float32)
            result.put(values)


class _ForwardPlan(NamedTuple):
    client: dict[str, Array]  # arrays in the client's memory, which the output must not overlap
    options: dict[str, Any]  # for the engine


@Planned
def _forward_plan(filter: NormalizationFilter, training: int, *client: BNNSNDArrayDescriptor) -> _ForwardPlan:
    arrays = {name: descriptor.view() for name, descriptor in filter._client.items()}
    moving = {name: array for name, array in arrays.items() if name in filter._moving}
    options = filter._forms[filter._is_wide].options
    return _ForwardPlan(arrays, {**options, **filter._running(moving, bool(training))} if moving else options)


def _flattened(array: Array) -> Array | None:
    """``[N, ...]`` as ``[N, elements]`` without a copy; None if samples have gaps."""
    return array.reshape(array.shape[0], -1) if array[0].flags.c_contiguous else None


# ---- Apple's functions ----------------------------------------------------------------------------------------------


@status(None, rename=_RENAME)
def BNNSFilterCreateLayerNormalization(
    normType: int,
    layer_params: BNNSLayerParametersNormalization,
    filter_params: BNNSFilterParameters | None = None,
    *,
    slopes_from_input: bool = False,
    momentum_weighs: str = "old",
) -> NormalizationFilter | None:
    """Create a normalization filter of type BNNSBatchNorm, BNNSInstanceNorm, BNNSLayerNorm or BNNSGroupNorm, or None.

    Apple's backward computes an activation's slope from the output, so it fails for those whose output does not
    determine it (abs, the GELUs, SiLU...). With `slopes_from_input`, a retrograd extension, these can be trained too.

    Apple does not say whether ``momentum`` is the weight of the old moving statistics or of the new batch:
    `momentum_weighs` is "old" or "new".
    """
    return NormalizationFilter(normType, layer_params, filter_params, slopes_from_input, momentum_weighs)


_OTHERWISE: Final = "filter is not a normalization filter"
_COPIES: Final = "without BNNSFlagsUseClientPtr, backward uses the copies of gamma and beta made with the filter"


@applies(NormalizationFilter, _OTHERWISE, "apply", "filter batch_size in_+ out+ training", rename=_RENAME)
def BNNSNormalizationFilterApplyBatch() -> None:
    """Normalize `batch_size` samples, which start `in_stride` and `out_stride` elements apart. 0, or -1 on failure."""


def _note_copies(filter: NormalizationFilter) -> None:
    if not filter.uses_client_memory and (filter.gamma is not None or filter.beta is not None):
        filter.note_extension("BNNSNormalizationFilterApplyBackwardBatch", _COPIES)


@applies(
    NormalizationFilter,
    _OTHERWISE,
    "apply_backward",
    "filter batch_size in_delta+ out+ out_delta+ beta_delta gamma_delta",
    rename=_RENAME,
    before=_note_copies,
)
def BNNSNormalizationFilterApplyBackwardBatch() -> None:
    """Compute the gradients of the last training pass, except those whose descriptor is None. 0, or -1 on failure.

    `out` may be None if there is no activation, and except for instance norms also if there is one: the output is then
    recomputed, with the current gamma and beta.
    """
