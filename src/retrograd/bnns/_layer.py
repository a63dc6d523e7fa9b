"""What layers with parameters share: checks of their descriptors, weights, and gradients by number of elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from ..ops._arrays import overlaps, same_elements
from ..ops.elementwise import activation_backward
from . import _constants as c
from ._activation import Fused, fused
from ._conversion import PLAIN, Scale, converted, scale_of
from ._failure import Invalid, Unsupported
from ._filter import (
    FLOAT32,
    BNNSFilter,
    accumulates,
    checked_descriptor,
    delta_geometry,
    geometry_of,
    in_shape,
    overlapping,
    put,
    unlike,
    viewed,
)
from ._memory import Array, Geometry, axes_of_size, check_disjoint, check_writable, geometry, size_of
from ._names import constant_name
from ._structures import BNNSActivation, BNNSNDArrayDescriptor, Structure

_S = TypeVar("_S", bound=Structure)
_CONSTANT_SLOPES: Final = ("linear", "linear_with_bias")
_FLOAT32_ONLY: Final = (c.BNNSDataTypeFloat32,)


def checked_layer(kind: type[_S], layer: Any, name: str = "layer_params") -> _S:
    """The structure that a filter is made from."""
    if not isinstance(layer, kind):
        shown = "NULL" if layer is None else f"of type {type(layer).__name__}"
        raise Invalid(f"{name} is {shown}, must be {kind.__name__}")
    return layer


def typed_geometry(name: str, descriptor: BNNSNDArrayDescriptor, types: tuple[int, ...]) -> Geometry:
    """The geometry of an array of one of these types."""
    if descriptor.data_type not in types:
        shown = constant_name("BNNSDataType", descriptor.data_type)
        allowed = ", ".join(constant_name("BNNSDataType", one).removeprefix("BNNSDataType") for one in types)
        raise Unsupported(f"{name}.data_type is {shown}; it must be {allowed}")
    return geometry_of(name, descriptor)


def output_geometry(name: str, descriptor: BNNSNDArrayDescriptor, types: tuple[int, ...]) -> Geometry:
    """The same for an array that is written: no two elements may share memory."""
    geometry = typed_geometry(name, descriptor, types)
    if geometry.may_overlap:
        raise overlapping(name, geometry)
    return geometry


def logical(array: Array, layout: int, batched: bool = True) -> Array:
    """The array with its axes in the order of the layout's ``size``, behind that of the batch if there is one."""
    return np.transpose(array, _axes(layout, batched))


def stored(array: Array, layout: int, batched: bool = True) -> Array:
    """The opposite of :func:`logical`: the array with its slowest axis first."""
    return np.transpose(array, np.argsort(_axes(layout, batched)))


def _axes(layout: int, batched: bool) -> tuple[int, ...]:
    axes = axes_of_size(layout)
    return (0, *(1 + axis for axis in axes)) if batched else axes


def rows_first(array: Array, layout: int, batched: bool = True) -> Array:
    """As `logical`, but a RowMajorMatrix, whose ``size`` lists columns first, has its rows before its columns."""
    return array if layout == c.BNNSDataLayoutRowMajorMatrix else logical(array, layout, batched)


def stored_rows_first(array: Array, layout: int, batched: bool = True) -> Array:
    """The opposite of `rows_first`."""
    return array if layout == c.BNNSDataLayoutRowMajorMatrix else stored(array, layout, batched)


# ---- parameters -----------------------------------------------------------------------------------------------------


def real_values(array: Array, scale: Scale, dtype: np.dtype[Any] = FLOAT32) -> Array:
    """The values in float32 or another floating-point type, aligned."""
    if array.dtype is dtype and array.flags.aligned:
        return array
    return converted(array, scale, dtype, PLAIN)


class Parameter:
    """Weights or a bias: the client's memory, read at every call, or a copy of its values made with the filter.

    `dtype` is that of the values; `scale` replaces that of the descriptor.
    """

    def __init__(
        self,
        name: str,
        descriptor: BNNSNDArrayDescriptor,
        owner: BNNSFilter,
        types: tuple[int, ...],
        dtype: np.dtype[Any] = FLOAT32,
        scale: Scale | None = None,
    ) -> None:
        self.name = name
        self.geometry = typed_geometry(name, descriptor, types)
        self._dtype = dtype
        self._scale = scale_of(name, descriptor) if scale is None else scale
        self._client = descriptor.copy()
        values = viewed(name, self._client)
        self._copy = None
        if not owner.uses_client_memory:
            self._copy = owner.arena.allocate(values.shape, dtype)
            self._copy[...] = real_values(values, self._scale, dtype)

    def memory(self) -> Array:
        """The array that is read: the client's or the copy."""
        return viewed(self.name, self._client) if self._copy is None else self._copy

    def values(self) -> Array:
        """The current values."""
        return real_values(self.memory(), self._scale, self._dtype)


# ---- gradients ------------------------------------------------------------------------------------------------------


class Result:
    """A gradient that a call produces, in the memory of its descriptor."""

    def __init__(self, name: str, descriptor: Any, array: Array) -> None:
        self.name, self.array = name, array
        self.accumulates = accumulates(name, descriptor)

    def rows(self, shape: tuple[int, ...]) -> Array | None:
        """The array in this shape, without a copy, if the engine can write to it."""
        array = self.array
        if not array.flags.aligned:
            return None
        rows = array if array.shape == shape else array.reshape(shape)
        return rows if np.may_share_memory(rows, array) else None  # a copy, if the strides require one

    def put(self, values: Array) -> None:
        with np.errstate(all="ignore"):
            put(self.array, values.reshape(self.array.shape), self.accumulates)


def float32_delta(name: str, descriptor: Any) -> Geometry:
    """The geometry of a gradient."""
    return delta_geometry(name, checked_descriptor(name, descriptor), _FLOAT32_ONLY)


def sample_delta(
    name: str,
    descriptor: Any,
    like: str,
    layer: Geometry,
    batch: int,
    stride: Any,
    samples: Callable[..., Array],
    types: tuple[int, ...] = _FLOAT32_ONLY,
) -> Array:
    """The gradient of a layer's input or output, which may have another shape with as many elements.

    `like` is the layer's descriptor for messages; `samples` is `source_samples` or `target_samples`.
    """
    geometry = delta_geometry(name, checked_descriptor(name, descriptor), types)
    if geometry.elements != layer.elements:
        raise Invalid(
            f"{name} has {geometry.elements} elements, expected {layer.elements} as in {like} with its {size_of(layer)}"
        )
    return samples(name, geometry, descriptor.data, batch, stride, ".data")


def parameter_delta(
    name: str, descriptor: Any, like: str, layer: Geometry, types: tuple[int, ...] = _FLOAT32_ONLY
) -> Result:
    """The gradient of a parameter: it has the parameter's extents, but for those that are 1, and no batch."""
    geometry = delta_geometry(name, checked_descriptor(name, descriptor), types)
    if geometry.proper_extents != layer.proper_extents:
        raise unlike(name, geometry, like, layer)
    if geometry.may_overlap:
        raise overlapping(name, geometry)
    view = viewed(name, descriptor)
    check_writable(f"{name}.data", view)
    return Result(name, descriptor, view)


def bias_delta_of(descriptor: Any, bias: Parameter | None, elements: int) -> Result:
    """The gradient of a layer's bias, whether or not the layer has one."""
    if bias is not None:
        return parameter_delta("bias_delta", descriptor, "bias", bias.geometry)
    vector = geometry(c.BNNSDataLayoutVector, FLOAT32, (elements,), ())
    return parameter_delta("bias_delta", descriptor, "o_desc", vector)


def check_apart(results: list[Result]) -> None:
    """Raise if gradients overlap each other."""
    check_disjoint({result.name: result.array for result in results}, {})


def are_one(result: Result, other: Result) -> bool:
    """Whether two gradients are one array, which receives their sum. Raise if they overlap in any other way."""
    if not overlaps(result.array, other.array):
        return False
    if not same_elements(result.array, other.array) or result.accumulates != other.accumulates:
        raise Invalid(f"{result.name} overlaps {other.name} in memory")
    return True


def put_sums(computed: Sequence[tuple[Result, Array]]) -> None:
    """Write gradients; those that are one array receive the sum."""
    written: list[Result] = []
    for k, (result, total) in enumerate(computed):
        if any(same_elements(result.array, other.array) for other in written):
            continue
        for other, values in computed[k + 1 :]:
            if same_elements(result.array, other.array):
                total = total + values
        result.put(total)
        written.append(result)


def any_overlap(results: list[Result], inputs: Mapping[str, Array | None]) -> bool:
    """Whether a gradient shares memory with an array that the call reads, so that it must not be written too early."""
    return any(array is not None and overlaps(result.array, array) for result in results for array in inputs.values())


def layer_activation(activation: BNNSActivation, output: Geometry) -> Fused:
    """The activation that is fused into a layer with this output."""
    return fused(activation, output.dtype, False, "an activation filter trains it")


def needs_output(activation: Fused) -> bool:
    """Whether backward reads the layer's output: not if the slope of its activation is the same everywhere."""
    return activation.function.name not in ("identity", *_CONSTANT_SLOPES)


def check_trainable(activation: Fused, out: Any) -> None:
    """Raise if backward cannot compute the slope of a fused activation."""
    if activation.function.name == "identity":
        return
    if activation.untrainable:
        raise Unsupported(activation.untrainable)
    if out is None and needs_output(activation):
        raise Invalid("out is NULL; a filter with an activation needs it")


def before_activation(
    activation: Fused, dy: Array, y: Array | None, recompute: Callable[[], Array], threads: int | None
) -> Array:
    """dz = dy f'(z) in float32. `recompute` computes z, for activations whose output does not determine the slope."""
    function = activation.function
    if function.name == "identity":
        return dy
    if function.name in _CONSTANT_SLOPES:
        return activation_backward(dy, function, x=dy, num_threads=threads)  # any input will do
    if activation.slope_from == "input":
        return activation_backward(dy, function, x=recompute(), num_threads=threads)
    assert y is not None  # check_trainable
    return activation_backward(dy, function, y=in_shape(y, dy.shape), num_threads=threads)
