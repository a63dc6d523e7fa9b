"""What all filters share: parameters, memory, argument checks and destruction."""

from __future__ import annotations

from collections.abc import Container
from typing import Final, TypeVar

import numpy as np

from ..ops._planned import Version, Versioned
from . import _constants as c
from ._failure import Invalid, Unsupported, advise_once, note_extension, status
from ._memory import Arena, Array, Geometry, as_size, batch_view, check_writable, size_of, size_text, threads_of
from ._names import layout_name, type_name
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor

_F = TypeVar("_F", bound="BNNSFilter")
FLOAT32: Final = np.dtype(np.float32)
FLOATS: Final = (c.BNNSDataTypeFloat32, c.BNNSDataTypeFloat16, c.BNNSDataTypeBFloat16)  # for samples and parameters
FLOATING: Final = "Float32, Float16 or BFloat16"
DELTAS: Final = (c.BNNSDataTypeFloat32, c.BNNSDataTypeBFloat16)  # for gradients


class BNNSFilter(Versioned):
    """A layer and its state. Opaque: use it only through the BNNS functions."""

    def __init__(self, parameters: object) -> None:
        parameters = checked_parameters(parameters)
        self._version = Version()  # never replaced: a filter does not change
        self.uses_client_memory = bool(as_size("flags", parameters.flags) & c.BNNSFlagsUseClientPtr)
        self.threads = threads_of(parameters.n_threads)
        self.arena = Arena(parameters.alloc_memory, parameters.free_memory)
        self.owns_memory = parameters.alloc_memory is None  # of the arena: the client does not know it
        self.destroyed = False
        self._noted: set[str] = set()

    def note_extension(self, function: str, what: str) -> None:
        """Log, once per filter, something that Apple's headers do not accept."""
        if what not in self._noted:
            self._noted.add(what)
            note_extension(function, what)

    def destroy(self) -> None:
        """Free all memory. Later calls fail."""
        if not self.destroyed:
            self.arena.free_all()
            vars(self).clear()
            self.destroyed = True


def checked_parameters(parameters: object) -> BNNSFilterParameters:
    """The filter_params argument, or defaults for NULL."""
    if parameters is None:
        return BNNSFilterParameters()
    if not isinstance(parameters, BNNSFilterParameters):
        raise Invalid(f"filter_params is of type {type(parameters).__name__}, not BNNSFilterParameters")
    return parameters


def viewed(name: str, descriptor: BNNSNDArrayDescriptor) -> Array:
    """The descriptor's array; errors are prefixed with its name."""
    try:
        return descriptor.view()
    except (Invalid, Unsupported) as error:
        raise type(error)(f"{name}.{error}") from None


def checked_filter(kind: type[_F], filter: object, otherwise: str) -> _F:
    """The filter argument; `otherwise` is the error message for a filter of another kind."""
    if isinstance(filter, kind) and not filter.destroyed:
        return filter
    if filter is None:
        raise Invalid("filter is NULL")
    if not isinstance(filter, BNNSFilter):
        raise Invalid(f"filter is of type {type(filter).__name__}, not a filter")
    raise Invalid("filter has been destroyed" if filter.destroyed else otherwise)


def checked_batch(batch_size: object) -> int:
    if type(batch_size) is int and 0 < batch_size <= c.SIZE_MAX:
        return batch_size
    batch = as_size("batch_size", batch_size)
    if batch == 0:
        raise Invalid("batch_size is 0")
    return batch


def source_samples(
    name: str, geometry: Geometry, data: object, batch: int, stride: object, field: str = "", step_name: str = ""
) -> Array:
    """Samples that a call reads, ``[batch, ...]``, packed if the stride is 0. Few programs mean them to share memory.

    `field` (".data" or nothing) completes the name in messages; `step_name` is that of the stride, if it is not the
    name and "_stride".
    """
    if type(stride) is not int or not 0 <= stride <= c.SIZE_MAX:
        stride = as_size(step_name or f"{name}_stride", stride)
    step = stride or geometry.packed_stride
    view = batch_view(name, geometry, data, batch, step, field)
    if geometry.may_overlap:
        advise_once(str(overlapping(name, geometry)))
    elif batch > 1 and step < geometry.span and _share_memory(geometry, batch, step):
        advise_once(f"{_short_step(name, step_name, step, geometry)}: samples overlap")
    return view


def _short_step(name: str, step_name: str, step: int, geometry: Geometry) -> str:
    return f"{step_name or f'{name}_stride'} is {step}, but a sample of {name} spans {geometry.span} values"


def _share_memory(geometry: Geometry, batch: int, step: int) -> bool:
    """Whether samples have elements in common; interleaved samples have none."""
    reach = 0
    for stride, extent in sorted([(step, batch), *zip(geometry.strides, geometry.extents, strict=True)]):
        if extent > 1 and stride <= reach:
            return True
        reach += (extent - 1) * stride
    return False


def target_samples(
    name: str, geometry: Geometry, data: object, batch: int, stride: object, field: str = "", step_name: str = ""
) -> Array:
    """Samples that a call writes: no two elements may share memory."""
    if type(stride) is not int or not 0 <= stride <= c.SIZE_MAX:
        stride = as_size(step_name or f"{name}_stride", stride)
    step = stride or geometry.packed_stride
    if batch > 1 and step < geometry.span:
        raise Invalid(_short_step(name, step_name, step, geometry))
    if geometry.may_overlap:
        raise overlapping(name, geometry)
    view = batch_view(name, geometry, data, batch, step, field)
    if not view.flags.writeable:
        check_writable(f"{name}{field}", view)
    return view


def overlapping(name: str, geometry: Geometry) -> Invalid:
    """The error for a result whose elements share memory."""
    return Invalid(f"{name}.stride is {geometry.strides}, with which elements of {size_of(geometry)} share memory")


def checked_descriptor(name: str, descriptor: object) -> BNNSNDArrayDescriptor:
    if not isinstance(descriptor, BNNSNDArrayDescriptor):
        raise Invalid(f"{name} is of type {type(descriptor).__name__}, not BNNSNDArrayDescriptor")
    return descriptor


def typed_geometry(name: str, descriptor: BNNSNDArrayDescriptor, types: tuple[int, ...], kind: str = "") -> Geometry:
    """The geometry of an array of one of these types. `kind` is what messages call them, if not by their names."""
    if descriptor.data_type not in types:
        allowed = kind or ", ".join(type_name(one).removeprefix("BNNSDataType") for one in types)
        raise Unsupported(f"{name}.data_type is {type_name(descriptor.data_type)}; it must be {allowed}")
    return geometry_of(name, descriptor)


def output_geometry(name: str, descriptor: BNNSNDArrayDescriptor, types: tuple[int, ...], kind: str = "") -> Geometry:
    """The same for an array that is written: no two elements may share memory."""
    geometry = typed_geometry(name, descriptor, types, kind)
    if geometry.may_overlap:
        raise overlapping(name, geometry)
    return geometry


def sample_geometry(name: str, descriptor: BNNSNDArrayDescriptor) -> Geometry:
    """The geometry of a floating-point input or output."""
    return typed_geometry(name, descriptor, FLOATS, FLOATING)


def check_layout(name: str, layout: int, allowed: Container[int], kind: str) -> None:
    """Raise unless an array has one of these layouts, which messages call `kind`."""
    if layout not in allowed:
        raise Unsupported(f"{name}.layout is {layout_name(layout)}; it must be {kind}")


def geometry_of(name: str, descriptor: BNNSNDArrayDescriptor) -> Geometry:
    """The descriptor's geometry; errors are prefixed with its name."""
    try:
        return descriptor.geometry()
    except (Invalid, Unsupported) as error:
        raise type(error)(f"{name}.{error}") from None


def unlike(name: str, given: Geometry, like: str, expected: Geometry) -> Invalid:
    """The error for two arrays of different extents, shown in the order of the first one's layout."""
    alike = len(expected.extents) == len(given.extents)
    shown = size_text(given.layout, expected.extents) if alike else size_of(expected)
    return Invalid(f"{name}.size is {given.size}, expected {shown} as in {like}")


def check_same_type(name: str, descriptor: BNNSNDArrayDescriptor, like: str, expected: BNNSNDArrayDescriptor) -> None:
    """Raise unless two arrays have elements of one type."""
    if descriptor.data_type != expected.data_type:
        shown, wanted = type_name(descriptor.data_type), type_name(expected.data_type)
        raise Invalid(f"{name}.data_type is {shown}, expected {wanted} as in {like}")


def check_extents(name: str, given: Geometry, expected: tuple[int, ...], which: str) -> None:
    """Raise unless an array has these extents, fastest first, apart from those that are 1.

    `which` completes the message: "expected the extents ... (fastest first) that are left of src".
    """
    proper = tuple(extent for extent in expected if extent != 1)
    if given.proper_extents != proper:
        raise Invalid(f"{name}.size is {given.size}, expected the extents {proper or (1,)} (fastest first) {which}")


def delta_geometry(name: str, descriptor: BNNSNDArrayDescriptor, types: tuple[int, ...] = DELTAS) -> Geometry:
    """The geometry of a gradient that a call reads or writes."""
    if descriptor.data is None:
        raise Invalid(f"{name}.data is NULL")
    if descriptor.data_type not in types:
        allowed = " or ".join(map(type_name, types))
        raise Invalid(f"{name}.data_type is {type_name(descriptor.data_type)}, must be {allowed}")
    return geometry_of(name, descriptor)


def accumulates(name: str, descriptor: BNNSNDArrayDescriptor) -> bool:
    flags = descriptor.flags
    if flags not in (c.BNNSNDArrayFlagBackpropSet, c.BNNSNDArrayFlagBackpropAccumulate):
        raise Invalid(f"{name}.flags is {flags!r}, must be 0 (set) or 1 (accumulate)")
    return bool(flags)


def in_shape(array: Array, shape: tuple[int, ...]) -> Array:
    """The array in float32 and in this shape, copied if the engine cannot read it as it is."""
    if array.dtype is not FLOAT32 or not array.flags.aligned:
        array = array.astype(np.float32)
    return array if array.shape == shape else array.reshape(shape)


def put(target: Array, values: Array, accumulate: bool) -> None:
    """Write or add to `target`, rounding once."""
    with np.errstate(all="ignore"):
        if not accumulate:
            target[...] = values
        elif target.dtype == FLOAT32:
            target += values
        else:
            target[...] = target.astype(np.float32) + values


@status(None, clears=False)  # it often runs between a failure and the call of last_error
def BNNSFilterDestroy(filter: BNNSFilter | None) -> None:
    """Release a filter. None and filters that have already been destroyed are accepted."""
    if filter is not None:
        if not isinstance(filter, BNNSFilter):
            raise Invalid(f"filter is of type {type(filter).__name__}, not a filter")
        filter.destroy()
