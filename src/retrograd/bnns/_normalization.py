"""Batch, instance, layer and group normalization filters.

A training pass keeps a float32 copy of the input: Apple's backward call has no pointer to it, and the client may
overwrite it or compute the output in place. The engine makes the copy while it computes the output, from what each
thread reads anyway. This module handles shapes and Apple's rules; the arithmetic is the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from ..ops._arrays import find_overlap, overlaps, same_elements
from ..ops._buffers import keeps_still
from ..ops._planned import Planned
from ..ops.normalization import (
    NormCache,
    NormGradients,
    RunningUpdate,
    batch_norm_backward,
    batch_norm_forward,
    group_norm_backward,
    group_norm_forward,
    instance_norm_backward,
    instance_norm_forward,
    layer_norm_backward,
    layer_norm_forward,
)
from . import _constants as c
from ._activation import Fused, fused
from ._declare import applies
from ._failure import Invalid, Unsupported, advise, advise_once, renaming, status
from ._filter import (
    FLOAT32,
    FLOATS,
    BNNSFilter,
    accumulates,
    checked_batch,
    checked_descriptor,
    delta_geometry,
    delta_samples,
    geometry_of,
    in_shape,
    overlapping,
    put,
    sample_geometry,
    source_samples,
    target_samples,
    unlike,
    viewed,
)
from ._memory import (
    Array,
    Geometry,
    as_float,
    as_size,
    check_disjoint,
    check_writable,
    listed,
    size_text,
)
from ._names import constant_name
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
_PARAMETERS: Final = {"gamma_delta": "dgamma", "beta_delta": "dbeta"}


class _Form(NamedTuple):
    """How to call the engine for a normalization."""

    forward: Callable[..., tuple[Array, NormCache]]
    backward: Callable[..., NormGradients]
    shape: tuple[int, ...]  # of a sample
    parameter_shape: tuple[int, ...]
    options: dict[str, Any]


class _Parameter:
    """gamma or beta: the client's memory, or a copy of it made with the filter."""

    def __init__(self, name: str, descriptor: BNNSNDArrayDescriptor, owner: NormalizationFilter) -> None:
        if descriptor.data_type not in FLOATS:
            shown = constant_name("BNNSDataType", descriptor.data_type)
            raise Invalid(f"{name}.data_type is {shown}, which is not a floating-point type")
        self.geometry = descriptor.geometry()
        self.client = descriptor.copy()
        values = viewed(name, self.client)
        self._copy = None
        if not owner.uses_client_memory:
            self._copy = owner.arena.allocate(values.shape, values.dtype)
            self._copy[...] = values
            values = self._copy
        # The array itself, if the engine can read it without conversion and its memory does not move.
        stays = self._copy is not None or keeps_still(descriptor.data)
        self._plain = values if stays and _is_plain(values) else None

    def as_array(self, shape: tuple[int, ...]) -> Array:
        """The current values in float32, broadcast along the leading axes of `shape`."""
        values = self._plain
        if values is not None and values.shape == shape:
            return values
        values = self.client.view() if self._copy is None else self._copy
        if values.shape == shape and _is_plain(values):
            return values
        own = _trailing_axes(shape, self.geometry.elements)
        return np.require(np.broadcast_to(values.reshape(own), shape), np.float32, ["C", "A"])


def _is_plain(array: Array) -> bool:
    return array.dtype is FLOAT32 and array.flags.c_contiguous and array.flags.aligned


def _trailing_axes(shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """The shortest tail of `shape` with this number of elements."""
    for first in range(len(shape), -1, -1):
        if math.prod(shape[first:]) == elements:
            return shape[first:]
    raise AssertionError("the number of elements was checked")


class NormalizationFilter(BNNSFilter):
    """See :func:`BNNSFilterCreateLayerNormalization`."""

    def __init__(self, norm_type: Any, layer: Any, parameters: Any, any_trainable: bool, momentum_weighs: str) -> None:
        if not isinstance(layer, BNNSLayerParametersNormalization):
            shown = "NULL" if layer is None else f"of type {type(layer).__name__}"
            raise Invalid(f"layer_params is {shown}, must be BNNSLayerParametersNormalization")
        if norm_type not in (c.BNNSBatchNorm, c.BNNSInstanceNorm, c.BNNSLayerNorm, c.BNNSGroupNorm):
            raise Invalid(f"normType is {norm_type!r}, must be from {c.BNNSBatchNorm} to {c.BNNSGroupNorm}")
        super().__init__(parameters)
        self.norm_type = norm_type
        for name in ("i_desc", "o_desc"):
            layout = getattr(layer, name).layout
            if layout not in _LAYOUTS:
                shown = constant_name("BNNSDataLayout", layout)
                raise Unsupported(f"{name}.layout is {shown}; it must be Vector, ImageCHW or 3D")
        self.input, self.output = sample_geometry("i_desc", layer.i_desc), sample_geometry("o_desc", layer.o_desc)
        if self.input.extents != self.output.extents:
            raise unlike("o_desc", self.output, "i_desc", self.input)
        if self.output.may_overlap:
            raise overlapping("o_desc", self.output)
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
        self._is_wide = any(p is not None and self._needs_wide(p.geometry.elements) for p in (self.gamma, self.beta))
        # What the filter uses in the client's memory: gamma, beta, and in forward the moving statistics.
        given = {"gamma_desc": self.gamma, "beta_desc": self.beta} if self.uses_client_memory else {}
        self._client_parameters = {name: p.client for name, p in given.items() if p is not None}
        self._client = {**self._moving, **self._client_parameters}
        if momentum_weighs not in ("old", "new"):
            raise Invalid(f"momentum_weighs is {momentum_weighs!r}, must be 'old' or 'new'")
        keep = self.momentum if momentum_weighs == "old" else 1.0 - self.momentum
        self._update = RunningUpdate.bnns(keep)
        if self._moving and keep == 1:
            advise(f"momentum is {self.momentum:g} and weighs the {momentum_weighs} value: {_STILL}")
        self._kept: Array | None = None  # x of the last training pass; may have room for more samples
        self._cache: NormCache | None = None
        self._evaluated = False  # since the last training pass
        for what in self._extensions(layer):
            self.note_extension("BNNSFilterCreateLayerNormalization", what)

    def _extensions(self, layer: BNNSLayerParametersNormalization) -> Iterator[str]:
        """Properties of the layer that retrograd accepts and Apple's headers do not."""
        for name in ("i_desc", "o_desc"):
            layout = getattr(layer, name).layout
            if layout in _EXTENDED_LAYOUTS:
                yield f"{name}.layout is {constant_name('BNNSDataLayout', layout)}"
        given = {"gamma_desc": self.gamma, "beta_desc": self.beta}
        parameters = {name: parameter.geometry for name, parameter in given.items() if parameter is not None}
        if len({geometry.dtype for geometry in parameters.values()}) > 1:
            types = (constant_name("BNNSDataType", getattr(layer, name).data_type) for name in parameters)
            yield f"gamma_desc.data_type and beta_desc.data_type differ ({' and '.join(types)})"
        for name, geometry in parameters.items():
            if self.norm_type != c.BNNSLayerNorm and len(geometry.extents) > 1:
                yield f"{name}.layout is {constant_name('BNNSDataLayout', geometry.layout)}, not a vector"
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
            shown = constant_name("BNNSDataType", descriptor.data_type)
            raise Invalid(f"{name}.data_type is {shown}, must be BNNSDataTypeFloat32")
        geometry = geometry_of(name, descriptor)
        if geometry.extents != (self.channels,):
            size = listed(geometry.layout, geometry.extents)
            raise Invalid(f"{name}.size is {size}, expected size={(self.channels,)}, one value for each channel")
        viewed(name, descriptor)

    def _parameter(self, name: str, descriptor: BNNSNDArrayDescriptor) -> _Parameter | None:
        if descriptor.data is None:
            return None
        self._check_parameter_size(name, geometry_of(name, descriptor))
        return _Parameter(name, descriptor, self)

    def _check_parameter_size(self, name: str, geometry: Geometry) -> None:
        if geometry.elements in self.parameter_sizes:
            return
        size = listed(geometry.layout, geometry.extents)
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
        shape = self.input.shape
        if self.norm_type == c.BNNSBatchNorm:
            return _Form(batch_norm_forward, batch_norm_backward, shape, (self.channels,), options)
        if self.norm_type == c.BNNSInstanceNorm:
            return _Form(instance_norm_forward, instance_norm_backward, shape, (self.channels,), options)
        if self.norm_type == c.BNNSGroupNorm:
            options["num_groups"] = self._groups
            return _Form(group_norm_forward, group_norm_backward, shape, (self.channels,), options)
        if wide:
            # As a group norm: each element is a channel, and those normalized together are a group.
            elements = math.prod(shape)
            options["num_groups"] = math.prod(shape[: self._axis])
            return _Form(group_norm_forward, group_norm_backward, (elements,), shape, options)
        options["axis"] = 1 + self._axis
        return _Form(layer_norm_forward, layer_norm_backward, shape, shape[self._axis :], options)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, batch_size: Any, source: Any, in_stride: Any, target: Any, out_stride: Any, training: bool) -> None:
        batch = checked_batch(batch_size)
        y = target_samples("out", self.output, target, batch, out_stride)
        x = source_samples("in", self.input, source, batch, in_stride)
        client, options = _forward_plan(self, int(training), *self._client.values())
        for name, array in client.items():
            if overlaps(y, array):
                raise Invalid(f"out overlaps {name} in memory")
        if training:
            result = y if y.dtype is FLOAT32 and y.flags.aligned else np.empty(y.shape, np.float32)
            # These arrays might not outlive the call. Backward is passed y and reads the parameters again.
            self._cache = self._train(x, result, options).with_arrays(None, None, None)
        else:
            if x.dtype is not y.dtype:
                x, result = x.astype(np.float32), np.empty(y.shape, np.float32)
            else:
                if not x.flags.aligned or (np.may_share_memory(x, y) and not same_elements(x, y)):
                    x = x.copy()
                result = y if y.flags.aligned else np.empty(y.shape, y.dtype)
            self._run(self._is_wide, x, result, None, options)
        self._evaluated = not training
        if result is not y:
            put(y, result, False)

    def _train(self, x: Array, result: Array, options: dict[str, Any]) -> NormCache:
        """Run a training pass and keep a copy of x."""
        kept = self._buffer_for(x.shape)
        in_place = not np.may_share_memory(x, result) or same_elements(x, result)
        # The client's allocator may return memory that the client also uses for x or y.
        apart = not np.may_share_memory(kept, x) and not np.may_share_memory(kept, result)
        if x.dtype is FLOAT32 and x.flags.aligned and in_place and apart:
            return self._run(self._is_wide, x, result, kept, options)
        kept[...] = x
        return self._run(self._is_wide, kept, result, None, options)

    def _run(self, wide: bool, x: Array, result: Array, kept: Array | None, options: dict[str, Any]) -> NormCache:
        form = self._forms[wide]
        gamma = None if self.gamma is None else self.gamma.as_array(form.parameter_shape)
        beta = None if self.beta is None else self.beta.as_array(form.parameter_shape)
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

    def apply_backward(
        self,
        batch_size: Any,
        in_delta: Any,
        in_delta_stride: Any,
        out: Any,
        out_stride: Any,
        out_delta: Any,
        out_delta_stride: Any,
        beta_delta: Any,
        gamma_delta: Any,
    ) -> None:
        plan = _backward_plan(
            out_delta, self, in_delta, gamma_delta, beta_delta, batch_size, in_delta_stride, out_delta_stride
        )
        cache = self._cache
        if cache is None:
            raise Invalid("there has been no training pass")
        if cache.x.shape[0] != plan.batch:
            raise Invalid(f"batch_size is {plan.batch}, but the last training pass had {cache.x.shape[0]} samples")
        if self._evaluated:
            advise_once(_EVALUATED)
        if plan.results:
            y = self._activation_output(out, out_stride, plan.batch)
            self._run_backward(cache, plan, y)

    def _run_backward(self, cache: NormCache, plan: _BackwardPlan, y: Array | None) -> None:
        needs_y = y is None and self.activation.slope_from == "output" and self.activation.function.name != "identity"
        if needs_y or plan.wide != self._is_wide:
            # `out` was not given; or the gradient of an absent parameter is wanted for every element, which takes the
            # other form and its cache. The kept input gives both.
            again = np.empty((cache.x.shape[0], *self.input.shape), np.float32)
            cache = self._run(plan.wide, cache.x, again, None, self._forms[plan.wide].options)
            if needs_y:
                y = again.astype(self.output.dtype, copy=False)
        form = self._forms[plan.wide]
        # The current gamma, and beta if z is recomputed.
        gamma = beta = None
        if self.gamma is not None:
            gamma = self.gamma.as_array(form.parameter_shape).reshape(plan.parameter_shape)
        if self.activation.slope_from == "output":
            y = None if y is None else in_shape(y, plan.shape)
        else:
            y = None
            if self.beta is not None:
                beta = self.beta.as_array(form.parameter_shape).reshape(plan.parameter_shape)
        cache = cache.with_arrays(y, gamma, beta)
        dy = in_shape(plan.dy, plan.shape)
        if self._may_write(plan, (y, cache.x)):
            rest = plan.rest
            gradients = form.backward(
                dy, cache, need=plan.need, out=plan.out, accumulate=plan.accumulate, num_threads=self.threads
            )
        else:
            rest = plan.results
            gradients = form.backward(dy, cache, need=[result.name for result in rest], num_threads=self.threads)
        for name, view, accumulate in rest:
            values: Any = getattr(gradients, name)
            if name != "dx" and view.size != values.size:  # the parameter was broadcast along the leading axes
                values = values.reshape(-1, view.size).sum(axis=0, dtype=np.float64).astype(np.float32)
            put(view, values.reshape(view.shape), accumulate)

    @staticmethod
    def _may_write(plan: _BackwardPlan, inputs: tuple[Array | None, ...]) -> bool:
        """Whether the engine can write directly to the client's memory: not if its inputs overlap that."""
        results = [array for array in plan.out if array is not None]
        return not any(overlaps(a, b) for a in results for b in inputs if b is not None)

    def _activation_output(self, out: Any, out_stride: Any, batch: int) -> Array | None:
        if self.activation.function.name == "identity":
            return None
        if self.activation.untrainable:
            raise Unsupported(self.activation.untrainable)
        if out is None:
            if self.norm_type == c.BNNSInstanceNorm:
                raise Invalid("out is NULL; an instance norm with an activation needs it")
            return None
        return source_samples("out", self.output, out, batch, out_stride)

    def _parameter_delta(self, name: str, descriptor: Any, parameter: _Parameter | None) -> Array:
        geometry = delta_geometry(name, checked_descriptor(name, descriptor))
        if parameter is None:
            self._check_parameter_size(name, geometry)
        elif geometry.proper_extents != parameter.geometry.proper_extents:
            raise unlike(name, geometry, f"{name.removesuffix('_delta')}_desc", parameter.geometry)
        if geometry.may_overlap:
            raise overlapping(name, geometry)
        view = viewed(name, descriptor)
        check_writable(f"{name}.data", view)
        return view


class _ForwardPlan(NamedTuple):
    client: dict[str, Array]  # arrays in the client's memory, which the output must not overlap
    options: dict[str, Any]  # for the engine


@Planned
def _forward_plan(filter: NormalizationFilter, training: int, *client: BNNSNDArrayDescriptor) -> _ForwardPlan:
    arrays = {name: descriptor.view() for name, descriptor in filter._client.items()}
    moving = {name: array for name, array in arrays.items() if name in filter._moving}
    options = filter._forms[filter._is_wide].options
    return _ForwardPlan(arrays, {**options, **filter._running(moving, bool(training))} if moving else options)


class _BackwardPlan(NamedTuple):
    """The arrays of a backward call, and how to compute them."""

    batch: int
    dy: Array
    results: list[_Result]
    wide: bool
    shape: tuple[int, ...]  # of dy, for the engine
    parameter_shape: tuple[int, ...]
    need: tuple[str, ...] | None  # None: all gradients; `out` has an array for each
    out: NormGradients  # arrays that the engine writes directly
    rest: list[_Result]  # results that are written afterwards
    accumulate: bool  # the engine accumulates


class _Result(NamedTuple):
    """A gradient that backward produces."""

    name: str  # in NormGradients
    view: Array  # the client's memory
    accumulate: bool

    def direct(self, shape: tuple[int, ...]) -> Array | None:
        """A view of the client's memory in the engine's shape, or None if there is none."""
        view = self.view
        if view.dtype is not FLOAT32 or view.size != math.prod(shape) or not view.flags.aligned:
            return None
        if view.shape == shape:
            return view
        if view.flags.c_contiguous:
            return view.reshape(shape)
        return _flattened(view) if self.name == "dx" else None


@Planned
def _backward_plan(
    out_delta: Any,
    filter: NormalizationFilter,
    in_delta: Any,
    gamma_delta: Any,
    beta_delta: Any,
    batch_size: Any,
    in_delta_stride: Any,
    out_delta_stride: Any,
) -> _BackwardPlan:
    """Every check that depends only on the descriptors."""
    batch = checked_batch(batch_size)
    if out_delta is None:
        raise Invalid("out_delta is NULL")
    # New views: the client may change the shape of its arrays while the plan is kept.
    dy = delta_samples("out_delta", out_delta, "o_desc", filter.output, batch, out_delta_stride, source_samples).view()
    results = {}
    if in_delta is not None:
        dx = delta_samples("in_delta", in_delta, "i_desc", filter.input, batch, in_delta_stride, target_samples).view()
        results["in_delta"] = _Result("dx", dx, accumulates("in_delta", in_delta))
    parameters = (gamma_delta, filter.gamma), (beta_delta, filter.beta)
    for name, (delta, parameter) in zip(_PARAMETERS, parameters, strict=True):
        if delta is not None:
            view = filter._parameter_delta(name, delta, parameter)
            results[name] = _Result(_PARAMETERS[name], view, accumulates(name, delta))
    check_disjoint({name: result.view for name, result in results.items()}, {})
    wide = filter._is_wide or any(r.name != "dx" and filter._needs_wide(r.view.size) for r in results.values())
    form = filter._forms[wide]
    shape = (batch, *form.shape)
    parameter_shape = (math.prod(form.parameter_shape),) if wide else form.parameter_shape
    wanted = list(results.values())
    direct = {r.name: r.direct(shape if r.name == "dx" else parameter_shape) for r in wanted}
    read = {"dy": dy, **{name: client.view() for name, client in filter._client_parameters.items()}}
    if find_overlap(direct, read, {"dx": ("dy",)}) is not None:  # the engine must not write to memory that it reads
        direct = dict.fromkeys(direct)
    accumulate = bool(wanted) and wanted[0].accumulate
    if any(r.accumulate is not accumulate or direct[r.name] is None for r in wanted):
        accumulate = False
        direct = {r.name: None if r.accumulate else direct[r.name] for r in wanted}
    out = NormGradients(**direct)
    return _BackwardPlan(
        batch,
        dy,
        wanted,
        wide,
        shape,
        parameter_shape,
        None if all(array is not None for array in out) else tuple(direct),
        out,
        [r for r in wanted if direct[r.name] is None],
        accumulate,
    )


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
