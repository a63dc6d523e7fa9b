"""Apple's BNNS structures: Apple's field names and order, C's value semantics, C's memory image.

A new structure is zero-initialized, and assigning a structure to a field copies it, as in C. Fields accept any value;
the functions check them and return a status.

Pointers are Python objects: ``data`` holds None, an array, or any other object with a buffer, so its bounds are known.
An object that knows the type and layout of its elements must match its descriptor.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..ops._planned import Planned, Version, Versioned
from . import _constants as c
from ._allocation import Allocating
from ._memory import (
    C_FUNCTION,
    Geometry,
    address_of,
    data_type_of,
    geometry_of,
    listed,
    view_of,
)
from ._names import constant_name

__all__ = [
    "Address",
    "BNNSActivation",
    "BNNSFilterParameters",
    "BNNSLSTMDataDescriptor",
    "BNNSLSTMGateDescriptor",
    "BNNSLayerParametersActivation",
    "BNNSLayerParametersLSTM",
    "BNNSLayerParametersNormalization",
    "BNNSNDArrayDescriptor",
]

_S = TypeVar("_S", bound="Structure")
_DIMENSIONS: Final = c.BNNS_MAX_TENSOR_DIMENSION
_ZEROS: Final = (0,) * _DIMENSIONS


class Address(int):
    """A pointer from a memory image. It comes from another process and cannot be dereferenced."""

    def __repr__(self) -> str:
        return f"Address({int(self):#x})"


class _Primitive(NamedTuple):
    """A field that is not a structure: its representation in memory."""

    code: str  # the format of the struct module
    zero: Any


UINT8: Final = _Primitive("B", 0)
UINT32: Final = _Primitive("I", 0)
INT32: Final = _Primitive("i", 0)
SIZE: Final = _Primitive("Q", 0)
FLOAT: Final = _Primitive("f", 0.0)
FOUR_SIZES: Final = _Primitive("4Q", (0, 0, 0, 0))
BOOL: Final = _Primitive("?", False)
POINTER: Final = _Primitive("Q", None)
FUNCTION: Final = _Primitive("Q", None)
DIMENSIONS: Final = _Primitive(f"{_DIMENSIONS}Q", _ZEROS)  # size and stride
SIGNED_DIMENSIONS: Final = _Primitive(f"{_DIMENSIONS}q", _ZEROS)
PAIRS: Final = _Primitive(f"{2 * _DIMENSIONS}Q", ((0, 0),) * _DIMENSIONS)  # two sizes for each axis


def _is_dimensions(kind: object) -> bool:
    return kind is DIMENSIONS or kind is SIGNED_DIMENSIONS


class _Field(NamedTuple):
    name: str
    offset: int
    kind: _Primitive | type[Structure]
    length: int  # 0: a single structure or value; otherwise an array of this many structures


class Structure(Versioned):
    """Base class of all structures."""

    __slots__ = ("__weakref__", "_outer", "_version")
    _version: Version  # replaced when a field changes, here or in a nested structure
    _outer: weakref.ReferenceType[Structure] | None  # the structure that contains this one
    _declared: ClassVar[tuple[tuple[str, Any], ...]] = ()
    _layout: ClassVar[tuple[_Field, ...]] = ()
    _fields: ClassVar[Mapping[str, _Field]] = {}
    _prefixes: ClassVar[Mapping[str, str]] = {}  # how the names of a field's constants begin, where not as usual
    sizeof: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        # C's rule: each field starts at a multiple of its alignment, and the size is a multiple of the largest one.
        fields, offset, largest = [], 0, 1
        for name, declared in cls._declared:
            kind, count = (
                declared if isinstance(declared, tuple) and not isinstance(declared, _Primitive) else (declared, 0)
            )
            if isinstance(kind, _Primitive):
                size, alignment = struct.calcsize(f"<{kind.code}"), struct.calcsize(f"<{kind.code[-1]}")
            else:
                size, alignment = kind.sizeof, 8
            offset = -(-offset // alignment) * alignment
            fields.append(_Field(name, offset, kind, count))
            offset += size * max(count, 1)
            largest = max(largest, alignment)
        cls._layout = tuple(fields)
        cls._fields = {field.name: field for field in fields}
        cls.sizeof = -(-offset // largest) * largest

    def __init__(self, *values: Any, **named: Any) -> None:
        object.__setattr__(self, "_outer", None)
        object.__setattr__(self, "_version", Version())
        if len(values) > len(self._layout):
            raise TypeError(f"{type(self).__name__} has {len(self._layout)} fields, not {len(values)}")
        given = dict(zip(self._fields, values, strict=False))
        for name in named:
            if name not in self._fields:
                raise TypeError(f"{type(self).__name__} has no field {name!r}; it has {', '.join(self._fields)}")
            if name in given:
                raise TypeError(f"{type(self).__name__}: {name} is given twice")
        given.update(named)
        for field in self._layout:
            name, _, kind, count = field
            if name in given:
                setattr(self, name, given[name])
            elif isinstance(kind, _Primitive):
                object.__setattr__(self, f"_{name}" if _is_dimensions(kind) else name, kind.zero)
            else:
                self._put(name, _Copies([kind() for _ in range(count)]) if count else kind())

    def __setattr__(self, name: str, value: Any) -> None:
        field = self._fields.get(name)
        if field is not None and _is_dimensions(field.kind):
            values = (value,) if isinstance(value, int) else tuple(value)
            if len(values) > _DIMENSIONS:
                raise ValueError(f"{name} has {_DIMENSIONS} entries, not {len(values)}")
            object.__setattr__(self, f"_{name}", _eight(values))
        elif field is not None and field.kind is PAIRS:
            object.__setattr__(self, name, _pairs(name, value))
        elif field is None or isinstance(field.kind, _Primitive):
            object.__setattr__(self, name, value)
        else:
            self._put(name, _copies(field, value) if field.length else _copied(field.kind, name, value))
        self._changed()

    def _put(self, name: str, value: Structure | _Copies) -> None:
        """Store structures that belong to no other structure."""
        for part in value if isinstance(value, _Copies) else (value,):
            object.__setattr__(part, "_outer", weakref.ref(self))
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise TypeError(f"{type(self).__name__}.{name}: fields of a C structure cannot be deleted")

    def _changed(self) -> None:
        """Give a new version to this structure and to those that contain it."""
        structure: Structure | None = self
        while structure is not None:
            object.__setattr__(structure, "_version", Version())
            outer = structure._outer
            structure = None if outer is None else outer()

    def _memory(self) -> Iterator[object]:
        for name, _, kind, count in self._layout:
            if kind is POINTER:
                value = getattr(self, name)
                yield from value._memory() if isinstance(value, Structure) else (value,)
            elif not isinstance(kind, _Primitive):
                value = getattr(self, name)
                for part in value if count else (value,):
                    yield from part._memory()

    def __reduce__(self) -> tuple[Any, ...]:
        """Deep copies and pickles consist of the fields."""
        values: list[Any] = [getattr(self, name) for name in self._fields]
        for index, value in enumerate(values):
            if isinstance(value, Dimensions):
                values[index] = tuple(value)
            elif isinstance(value, _Copies):
                values[index] = list(value)
        return type(self), tuple(values)

    def __copy__(self: _S) -> _S:
        return type(self)(*(getattr(self, field.name) for field in self._layout))

    copy = __copy__

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in self._fields)

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def __repr__(self) -> str:
        """Shows the fields that are not zero."""
        shown = []
        for name, _, kind, _ in self._layout:
            value = getattr(self, name)
            if isinstance(kind, _Primitive):
                zero = value is kind.zero or (isinstance(value, (int, float, tuple, Dimensions)) and value == kind.zero)
                if not zero:
                    shown.append(f"{name}={_text({**_PREFIXES, **self._prefixes}.get(name), value)}")
            elif any(one != kind() for one in (value if isinstance(value, _Copies) else (value,))):
                shown.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def to_bytes(self) -> bytes:
        """Return the structure's C memory image (64-bit, little-endian).

        Buffers are written as their addresses. Python functions and structures have none, and are written as NULL.
        """
        image = bytearray(self.sizeof)
        self._write(image, 0)
        return bytes(image)

    def _write(self, image: bytearray, start: int) -> None:
        for name, offset, kind, count in self._layout:
            value = getattr(self, name)
            if isinstance(kind, _Primitive):
                try:
                    elements = _elements(kind, value)
                    struct.pack_into(f"<{kind.code}", image, start + offset, *elements)
                except (struct.error, TypeError, ValueError, OverflowError) as error:
                    raise ValueError(
                        f"{type(self).__name__}.{name} is {value!r}, which C cannot hold: {error}"
                    ) from None
            else:
                for index, one in enumerate(value if count else (value,)):
                    one._write(image, start + offset + index * kind.sizeof)

    @classmethod
    def from_bytes(cls: type[_S], image: Any, memory: Mapping[int, Any] | Callable[[int], Any] | None = None) -> _S:
        """Read a memory image from this machine or another.

        `memory` resolves pointers that are not NULL: a mapping from addresses to buffers, or a function of the address.
        Unknown pointers become an :class:`Address`, which no function dereferences.
        """
        view = memoryview(image).cast("B")
        if len(view) != cls.sizeof:
            raise ValueError(f"{cls.__name__}.from_bytes: the image has {len(view)} bytes, the structure {cls.sizeof}")
        return cls._read(view, 0, memory.get if isinstance(memory, Mapping) else memory or (lambda address: None))

    @classmethod
    def _read(cls: type[_S], view: memoryview, start: int, memory: Callable[[int], Any]) -> _S:
        values: dict[str, Any] = {}
        for name, offset, kind, count in cls._layout:
            at = start + offset
            if not isinstance(kind, _Primitive):
                parts = [kind._read(view, at + index * kind.sizeof, memory) for index in range(max(count, 1))]
                values[name] = parts if count else parts[0]
                continue
            elements = struct.unpack_from(f"<{kind.code}", view, at)
            if _is_dimensions(kind):
                values[name] = elements
            elif kind is PAIRS:
                values[name] = tuple(zip(elements[::2], elements[1::2], strict=True))
            elif kind is POINTER or kind is FUNCTION:
                (address,) = elements
                found = memory(address) if address else None
                values[name] = Address(address) if address and found is None else found
            elif kind is FOUR_SIZES:
                values[name] = elements
            else:
                (values[name],) = elements
        return cls(**values)


class _Copies(list[Any]):
    """A C array of structures: of fixed length; assigning to an entry copies."""

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            self._fixed()
        old = self[index]
        new = _copied(type(old), "an entry", value)
        object.__setattr__(new, "_outer", old._outer)
        super().__setitem__(index, new)
        new._changed()

    def _fixed(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a C array has a fixed length, and its entries stay where they are")

    append = extend = insert = pop = remove = clear = sort = reverse = _fixed
    __delitem__ = __iadd__ = __imul__ = _fixed


def _copies(field: _Field, values: Any) -> _Copies:
    entries = [_copied(field.kind, field.name, value) for value in values]
    if len(entries) != field.length:
        raise ValueError(f"{field.name} has {field.length} entries, not {len(entries)}")
    return _Copies(entries)


def _copied(kind: Any, name: str, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
    return value.copy()


def _same(a: Any, b: Any) -> bool:
    """Compare pointers by identity, everything else by value."""
    if a is b:
        return True
    return bool(isinstance(a, (int, float, tuple, Structure, _Copies, Dimensions)) and type(a) is type(b) and a == b)


def _elements(kind: _Primitive, value: Any) -> tuple[Any, ...]:
    if _is_dimensions(kind):
        return tuple(value)
    if kind is PAIRS:
        return tuple(one for pair in value for one in pair)
    if kind is POINTER:
        return (0,) if isinstance(value, Structure) else (address_of(value),)  # a structure has no address
    if kind is FUNCTION:
        return (_function_address(value),)
    if kind is FOUR_SIZES:
        return tuple(value)
    return (value,)


def _function_address(function: Any) -> int:
    """The address of a ctypes function. A Python function has none, and is written as NULL."""
    if isinstance(function, Address):
        return int(function)
    if isinstance(function, C_FUNCTION):
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


_PREFIXES: Final = {
    "layout": "BNNSDataLayout",
    "data_type": "BNNSDataType",
    "table_data_type": "BNNSDataType",
    "pooling_function": "BNNSPoolingFunction",
    "function": "BNNSActivationFunction",
}


def _text(prefix: str | None, value: Any) -> str:
    if prefix is not None:
        return constant_name(prefix, value)
    if isinstance(value, np.ndarray):
        return f"<{value.dtype} array {value.shape}>"
    return repr(value)


# ---- arrays ---------------------------------------------------------------------------------------------------------


class Dimensions(Sequence[int]):
    """``size``, ``shape`` or ``stride`` of an array: eight integers, which can be read and set by index."""

    __slots__ = ("_field", "_owner")

    def __init__(self, owner: Structure, field: str) -> None:
        self._owner, self._field = owner, field

    def _values(self) -> tuple[int, ...]:
        values: tuple[int, ...] = getattr(self._owner, self._field)
        return values

    def __len__(self) -> int:
        return _DIMENSIONS

    def __getitem__(self, index: Any) -> Any:
        return self._values()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        values = list(self._values())
        values[index] = value
        setattr(self._owner, self._field.removeprefix("_"), values)

    def __iter__(self) -> Iterator[int]:
        return iter(self._values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Sequence, np.ndarray)) and self._values() == _eight(tuple(other))

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def __repr__(self) -> str:
        values = self._values()
        used = max((k + 1 for k, value in enumerate(values) if value != 0), default=0)
        return repr(values[:used])


def _pairs(name: str, values: Any) -> tuple[tuple[Any, Any], ...]:
    pairs = tuple(map(tuple, values))
    if len(pairs) > _DIMENSIONS or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{name} has {_DIMENSIONS} entries of 2 numbers each, not {values!r}")
    return (*pairs, *PAIRS.zero[len(pairs) :])


def _eight(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values + _ZEROS[len(values) :]


class BNNSNDArrayDescriptor(Allocating, Structure):
    """An array: its layout, extents, strides in elements, data type and memory.

    ``stride[0]`` belongs to the fastest axis in every layout; 0 means contiguous. :meth:`from_array` describes a NumPy
    array.
    """

    __slots__ = (
        "_size",
        "_stride",
        "data",
        "data_bias",
        "data_scale",
        "data_type",
        "flags",
        "layout",
        "table_data",
        "table_data_type",
    )
    _declared = (
        ("flags", UINT32),
        ("layout", UINT32),
        ("size", DIMENSIONS),
        ("stride", DIMENSIONS),
        ("data", POINTER),
        ("data_type", UINT32),
        ("table_data", POINTER),
        ("table_data_type", UINT32),
        ("data_scale", FLOAT),
        ("data_bias", FLOAT),
    )

    flags: int
    layout: int
    data: Any
    data_type: int
    table_data: Any
    table_data_type: int
    data_scale: float
    data_bias: float
    _size: tuple[int, ...]
    _stride: tuple[int, ...]

    @property
    def size(self) -> Dimensions:
        """Extents; only the first *rank* are used."""
        return Dimensions(self, "_size")

    @size.setter
    def size(self, values: Sequence[int]) -> None: ...  # done by __setattr__

    @property
    def stride(self) -> Dimensions:
        """Strides in elements; only the first *rank* are used, and 0 means contiguous."""
        return Dimensions(self, "_stride")

    @stride.setter
    def stride(self, values: Sequence[int]) -> None: ...

    def geometry(self) -> Geometry:
        """Return extents and strides, fastest first, and the element type; raises if they are invalid."""
        return _planned_geometry(self)

    def view(self) -> npt.NDArray[Any]:
        """Return the array over ``data``, slowest axis first; raises if it would exceed the buffer."""
        return view_of(self.geometry(), self.data)

    @classmethod
    def from_array(
        cls, array: npt.NDArray[Any], layout: int | None = None, *, flags: int = c.BNNSNDArrayFlagBackpropSet
    ) -> BNNSNDArrayDescriptor:
        """Describe a NumPy array, whose last axis is the fastest, without copying it.

        The default layout is Vector, RowMajorMatrix or ImageCHW (shape ``(C, H, W)``), from rank 4 on ``nDFirstMajor``,
        which lists extents in NumPy's order. Other array types are converted by ``np.asarray``.
        """
        array = np.asarray(array)
        rank = max(array.ndim, 1)
        if layout is None:
            if rank > _DIMENSIONS:
                raise ValueError(f"from_array: the array has {rank} axes, a descriptor at most {_DIMENSIONS}")
            layout = _DEFAULT_LAYOUTS[rank]
        if layout >> 16 != rank:
            name = constant_name("BNNSDataLayout", layout)
            raise ValueError(f"from_array: the array has {rank} axes, {name} has {layout >> 16}")
        extents, steps = array.shape[::-1] or (1,), array.strides[::-1] or (array.itemsize,)
        if any(step % array.itemsize for step in steps):
            raise ValueError(f"from_array: strides of {array.strides} bytes are not multiples of {array.itemsize}")
        strides = [step // array.itemsize for step in steps]
        taken = [stride for stride, extent in zip(strides, extents, strict=True) if extent > 1]
        if not array.flags.c_contiguous and any(b < a for a, b in zip([1, *taken], taken, strict=False)):
            raise ValueError(f"from_array: strides {array.strides} must not decrease from the last axis to the first")
        return cls(
            flags=flags,
            layout=layout,
            size=listed(layout, extents),
            stride=_ZEROS
            if array.flags.c_contiguous
            else [s if n > 1 else 0 for s, n in zip(strides, extents, strict=True)],
            data=array,
            data_type=data_type_of(array.dtype),
        )


@Planned
def _planned_geometry(descriptor: BNNSNDArrayDescriptor) -> Geometry:
    return geometry_of(descriptor.layout, descriptor._size, descriptor._stride, descriptor.data_type)


_DEFAULT_LAYOUTS: Final = {
    1: c.BNNSDataLayoutVector,
    2: c.BNNSDataLayoutRowMajorMatrix,
    3: c.BNNSDataLayoutImageCHW,
    **{rank: rank << 16 | 0x8001 for rank in range(4, _DIMENSIONS + 1)},
}


class BNNSActivation(Structure):
    """An activation function with its parameters; the identity if zero-initialized."""

    __slots__ = (
        "alpha",
        "beta",
        "function",
        "ioffset",
        "ioffset_per_channel",
        "iscale",
        "iscale_per_channel",
        "ishift",
        "ishift_per_channel",
    )
    _declared = (
        ("function", UINT32),
        ("alpha", FLOAT),
        ("beta", FLOAT),
        ("iscale", INT32),
        ("ioffset", INT32),
        ("ishift", INT32),
        ("iscale_per_channel", POINTER),
        ("ioffset_per_channel", POINTER),
        ("ishift_per_channel", POINTER),
    )

    function: int
    alpha: float
    beta: float
    iscale: int
    ioffset: int
    ishift: int
    iscale_per_channel: Any
    ioffset_per_channel: Any
    ishift_per_channel: Any


class BNNSFilterParameters(Structure):
    """Options of a filter: flags, number of threads (0: default), and its memory allocator.

    ``alloc_memory(memptr, alignment, size)`` stores a writable buffer in ``memptr[0]`` and returns 0;
    ``free_memory(buffer)`` frees it. Both may also be ctypes functions with the C signatures.
    """

    __slots__ = ("alloc_memory", "flags", "free_memory", "n_threads")
    _declared = (("flags", UINT32), ("n_threads", SIZE), ("alloc_memory", FUNCTION), ("free_memory", FUNCTION))

    flags: int
    n_threads: int
    alloc_memory: Any
    free_memory: Any


# ---- layers ---------------------------------------------------------------------------------------------------------


class BNNSLayerParametersNormalization(Structure):
    """A normalization layer."""

    __slots__ = (
        "activation",
        "beta_desc",
        "epsilon",
        "gamma_desc",
        "i_desc",
        "momentum",
        "moving_mean_desc",
        "moving_variance_desc",
        "normalization_axis",
        "num_groups",
        "o_desc",
    )
    _declared = (
        ("i_desc", BNNSNDArrayDescriptor),
        ("o_desc", BNNSNDArrayDescriptor),
        ("beta_desc", BNNSNDArrayDescriptor),
        ("gamma_desc", BNNSNDArrayDescriptor),
        ("moving_mean_desc", BNNSNDArrayDescriptor),
        ("moving_variance_desc", BNNSNDArrayDescriptor),
        ("momentum", FLOAT),
        ("epsilon", FLOAT),
        ("activation", BNNSActivation),
        ("num_groups", SIZE),
        ("normalization_axis", SIZE),
    )

    i_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor
    beta_desc: BNNSNDArrayDescriptor
    gamma_desc: BNNSNDArrayDescriptor
    moving_mean_desc: BNNSNDArrayDescriptor
    moving_variance_desc: BNNSNDArrayDescriptor
    momentum: float
    epsilon: float
    activation: BNNSActivation
    num_groups: int
    normalization_axis: int


class BNNSLayerParametersActivation(Structure):
    """An activation layer.

    The bits of ``axis_flags`` select the axes of a softmax: bit k that of ``size[k]``, the bit above the last one the
    batch. 0 means that of ``size[0]``.
    """

    __slots__ = ("activation", "axis_flags", "i_desc", "o_desc")
    _declared = (
        ("i_desc", BNNSNDArrayDescriptor),
        ("o_desc", BNNSNDArrayDescriptor),
        ("activation", BNNSActivation),
        ("axis_flags", UINT32),
    )

    i_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor
    activation: BNNSActivation
    axis_flags: int


class BNNSLSTMGateDescriptor(Structure):
    """Weights of one gate. Peepholes (``cw_desc``) are full matrices."""

    __slots__ = ("activation", "b_desc", "cw_desc", "hw_desc", "iw_desc")
    _declared = (
        ("iw_desc", (BNNSNDArrayDescriptor, 2)),
        ("hw_desc", BNNSNDArrayDescriptor),
        ("cw_desc", BNNSNDArrayDescriptor),
        ("b_desc", BNNSNDArrayDescriptor),
        ("activation", BNNSActivation),
    )

    iw_desc: list[BNNSNDArrayDescriptor]
    hw_desc: BNNSNDArrayDescriptor
    cw_desc: BNNSNDArrayDescriptor
    b_desc: BNNSNDArrayDescriptor
    activation: BNNSActivation


class BNNSLSTMDataDescriptor(Structure):
    """A sequence, and its hidden and cell states."""

    __slots__ = ("cell_state_desc", "data_desc", "hidden_desc")
    _declared = (
        ("data_desc", BNNSNDArrayDescriptor),
        ("hidden_desc", BNNSNDArrayDescriptor),
        ("cell_state_desc", BNNSNDArrayDescriptor),
    )

    data_desc: BNNSNDArrayDescriptor
    hidden_desc: BNNSNDArrayDescriptor
    cell_state_desc: BNNSNDArrayDescriptor


class BNNSLayerParametersLSTM(Structure):
    """An LSTM: sizes, options, data and gates."""

    __slots__ = (
        "batch_size",
        "candidate_gate",
        "dropout",
        "forget_gate",
        "hidden_activation",
        "hidden_size",
        "input_descriptor",
        "input_gate",
        "input_size",
        "lstm_flags",
        "num_layers",
        "output_descriptor",
        "output_gate",
        "seq_len",
        "sequence_descriptor",
    )
    _declared = (
        ("input_size", SIZE),
        ("hidden_size", SIZE),
        ("batch_size", SIZE),
        ("num_layers", SIZE),
        ("seq_len", SIZE),
        ("dropout", FLOAT),
        ("lstm_flags", UINT32),
        ("sequence_descriptor", BNNSNDArrayDescriptor),
        ("input_descriptor", BNNSLSTMDataDescriptor),
        ("output_descriptor", BNNSLSTMDataDescriptor),
        ("input_gate", BNNSLSTMGateDescriptor),
        ("forget_gate", BNNSLSTMGateDescriptor),
        ("candidate_gate", BNNSLSTMGateDescriptor),
        ("output_gate", BNNSLSTMGateDescriptor),
        ("hidden_activation", BNNSActivation),
    )

    input_size: int
    hidden_size: int
    batch_size: int
    num_layers: int
    seq_len: int
    dropout: float
    lstm_flags: int
    sequence_descriptor: BNNSNDArrayDescriptor
    input_descriptor: BNNSLSTMDataDescriptor
    output_descriptor: BNNSLSTMDataDescriptor
    input_gate: BNNSLSTMGateDescriptor
    forget_gate: BNNSLSTMGateDescriptor
    candidate_gate: BNNSLSTMGateDescriptor
    output_gate: BNNSLSTMGateDescriptor
    hidden_activation: BNNSActivation
