"""Apple's BNNS structures: Apple's field names and order, C's value semantics, C's memory image.

A new structure is zero-initialized, and assigning a structure to a field copies it, as in C. Fields accept any value;
the functions check them and return a status.

Pointers are Python objects: ``data`` holds None, an array, or any other object with a buffer, so its bounds are known.
An object that knows the type and layout of its elements must match its descriptor.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ..ops._planned import Planned, Version, Versioned
from . import _constants as c
from ._allocation import Allocating
from ._memory import C_FUNCTION, Geometry, address_of, data_type_of, geometry_of, listed, view_of
from ._names import constant_name

_S = TypeVar("_S", bound="Structure")
_DIMENSIONS: Final = c.BNNS_MAX_TENSOR_DIMENSION
_ZEROS: Final = (0,) * _DIMENSIONS
_NO_PAIRS: Final = ((0, 0),) * _DIMENSIONS


class Address(int):
    """A pointer from a memory image. It comes from another process and cannot be dereferenced."""

    def __repr__(self) -> str:
        return f"Address({int(self):#x})"


class Kind:
    """How C stores a field that is not a structure, and which value it has in a new structure."""

    def __init__(self, code: str, zero: object) -> None:
        self.code, self.zero = code, zero  # the format of the struct module
        self.size, self.alignment = struct.calcsize(f"<{code}"), struct.calcsize(f"<{code[-1]}")

    def taken(self, name: str, value: Any) -> object:
        """What is stored for a value that is assigned."""
        return value

    def packed(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def unpacked(self, elements: tuple[Any, ...], memory: Callable[[int], object]) -> object:
        return elements[0]


class _Four(Kind):
    def packed(self, value: Any) -> tuple[Any, ...]:
        return tuple(value)

    def unpacked(self, elements: tuple[Any, ...], memory: Callable[[int], object]) -> object:
        return elements


class _Pairs(_Four):
    def taken(self, name: str, value: Any) -> object:
        pairs = tuple(map(tuple, value))
        if len(pairs) > _DIMENSIONS or any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"{name} has {_DIMENSIONS} entries of 2 numbers each, not {value!r}")
        return (*pairs, *_NO_PAIRS[len(pairs) :])

    def packed(self, value: Any) -> tuple[Any, ...]:
        return tuple(one for pair in value for one in pair)

    def unpacked(self, elements: tuple[Any, ...], memory: Callable[[int], object]) -> object:
        return tuple(zip(elements[::2], elements[1::2], strict=True))


class _Pointer(Kind):
    def packed(self, value: Any) -> tuple[Any, ...]:
        return (0,) if isinstance(value, Structure) else (address_of(value),)  # a structure has no address

    def unpacked(self, elements: tuple[Any, ...], memory: Callable[[int], object]) -> object:
        (address,) = elements
        found = memory(address) if address else None
        return Address(address) if address and found is None else found


class _FunctionPointer(_Pointer):
    def packed(self, value: Any) -> tuple[Any, ...]:
        """The address of a ctypes function. A Python function has none, and is written as NULL."""
        if isinstance(value, Address):
            return (int(value),)
        return (ctypes.cast(value, ctypes.c_void_p).value or 0 if isinstance(value, C_FUNCTION) else 0,)


class Extents(_Four):
    """Eight sizes, strides or axes: the kind of the field, and the attribute that reads and sets it."""

    code = f"{_DIMENSIONS}Q"

    def __init__(self, name: str) -> None:
        super().__init__(self.code, _ZEROS)
        self.slot = f"_{name}"

    def taken(self, name: str, value: Any) -> object:
        values = (value,) if isinstance(value, int) else tuple(value)
        if len(values) > _DIMENSIONS:
            raise ValueError(f"{name} has {_DIMENSIONS} entries, not {len(values)}")
        return _eight(values)

    @overload
    def __get__(self, owner: None, kind: type) -> Extents: ...
    @overload
    def __get__(self, owner: Structure, kind: type) -> Dimensions: ...
    def __get__(self, owner: Structure | None, kind: type) -> Extents | Dimensions:
        return self if owner is None else Dimensions(owner, self.slot)

    def __set__(self, owner: Structure, values: Sequence[int]) -> None:
        object.__setattr__(owner, self.slot, values)  # Structure.__setattr__ has checked them


class SignedExtents(Extents):
    """Eight sizes or strides that may be negative."""

    code = f"{_DIMENSIONS}q"


# The types of fields, as type checkers see them and as C stores them.
UInt8: TypeAlias = Annotated[int, Kind("B", 0)]
UInt32: TypeAlias = Annotated[int, Kind("I", 0)]
Int32: TypeAlias = Annotated[int, Kind("i", 0)]
Size: TypeAlias = Annotated[int, Kind("Q", 0)]
Float: TypeAlias = Annotated[float, Kind("f", 0.0)]
Bool: TypeAlias = Annotated[bool, Kind("?", False)]
FourSizes: TypeAlias = Annotated[tuple[int, int, int, int], _Four("4Q", (0, 0, 0, 0))]
Pairs: TypeAlias = Annotated[tuple[tuple[int, int], ...], _Pairs(f"{2 * _DIMENSIONS}Q", _NO_PAIRS)]
Pointer: TypeAlias = Annotated[Any, _Pointer("Q", None)]
Function: TypeAlias = Annotated[Any, _FunctionPointer("Q", None)]


class _Field(NamedTuple):
    name: str
    offset: int
    kind: Kind | type[Structure]
    length: int  # 0: a single structure or value; otherwise an array of this many structures


class _Declared(type):
    """Makes slots, fields and the C layout of a structure from its annotations, after the fields of its base.

    An annotation is the name of a structure or of one of the types above; those of private attributes and of class
    variables are no fields.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _Declared:
        known = vars(sys.modules[namespace["__module__"]])
        fields = [field for base in bases for field in getattr(base, "_layout", ())]
        slots: list[str] = []
        for field, annotation in namespace.get("__annotations__", {}).items():
            if field.startswith("_") or annotation.startswith("ClassVar"):
                continue
            declared = known[annotation]
            kind, count = getattr(declared, "__metadata__", (declared,))[0], 0
            if isinstance(kind, tuple):
                kind, count = kind
            elif isinstance(kind, type) and issubclass(kind, Extents):
                kind = namespace[field] = kind(field)
            slots.append(kind.slot if isinstance(kind, Extents) else field)
            fields.append(_Field(field, 0, kind, count))
        # C's rule: each field starts at a multiple of its alignment, and the size is a multiple of the largest one.
        offset, largest = 0, 1
        for index, (_, _, kind, count) in enumerate(fields):
            size, alignment = (kind.size, kind.alignment) if isinstance(kind, Kind) else (kind.sizeof, 8)
            offset = -(-offset // alignment) * alignment
            fields[index] = fields[index]._replace(offset=offset)
            offset += size * max(count, 1)
            largest = max(largest, alignment)
        return super().__new__(
            mcs,
            name,
            bases,
            {
                "__slots__": tuple(slots),
                **namespace,
                "_layout": tuple(fields),
                "_fields": {field.name: field for field in fields},
                "sizeof": -(-offset // largest) * largest,
            },
        )


class Structure(Versioned, metaclass=_Declared):
    """Base class of all structures."""

    __slots__ = ("__weakref__", "_outer", "_version")
    _version: Version  # replaced when a field changes, here or in a nested structure
    _outer: weakref.ReferenceType[Structure] | None  # the structure that contains this one
    _layout: ClassVar[tuple[_Field, ...]]
    _fields: ClassVar[Mapping[str, _Field]]
    _prefixes: ClassVar[Mapping[str, str]] = {}  # how the names of a field's constants begin, where not as usual
    sizeof: ClassVar[int]

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
        for name, _, kind, count in self._layout:
            if name in given:
                setattr(self, name, given[name])
            elif isinstance(kind, Kind):
                object.__setattr__(self, name, kind.zero)
            else:
                self._put(name, _Copies([kind() for _ in range(count)]) if count else kind())

    def __setattr__(self, name: str, value: Any) -> None:
        field = self._fields.get(name)
        if field is None:
            object.__setattr__(self, name, value)
        elif isinstance(field.kind, Kind):
            object.__setattr__(self, name, field.kind.taken(name, value))
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
            if type(kind) is _Pointer:
                value = getattr(self, name)
                yield from value._memory() if isinstance(value, Structure) else (value,)
            elif not isinstance(kind, Kind):
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
            if isinstance(kind, Kind):
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
            if isinstance(kind, Kind):
                try:
                    struct.pack_into(f"<{kind.code}", image, start + offset, *kind.packed(value))
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
            if not isinstance(kind, Kind):
                parts = [kind._read(view, at + index * kind.sizeof, memory) for index in range(max(count, 1))]
                values[name] = parts if count else parts[0]
                continue
            values[name] = kind.unpacked(struct.unpack_from(f"<{kind.code}", view, at), memory)
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


def _eight(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values + _ZEROS[len(values) :]


class BNNSNDArrayDescriptor(Allocating, Structure):
    """An array: its layout, extents, strides in elements, data type and memory.

    ``stride[0]`` belongs to the fastest axis in every layout; 0 means contiguous. :meth:`from_array` describes a NumPy
    array.
    """

    flags: UInt32
    layout: UInt32
    size: Extents
    stride: Extents
    data: Pointer
    data_type: UInt32
    table_data: Pointer
    table_data_type: UInt32
    data_scale: Float
    data_bias: Float
    _size: tuple[int, ...]  # where size and stride are stored
    _stride: tuple[int, ...]

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


# A C array of two.
TwoDescriptors: TypeAlias = Annotated[list[BNNSNDArrayDescriptor], (BNNSNDArrayDescriptor, 2)]


class BNNSActivation(Structure):
    """An activation function with its parameters; the identity if zero-initialized."""

    function: UInt32
    alpha: Float
    beta: Float
    iscale: Int32
    ioffset: Int32
    ishift: Int32
    iscale_per_channel: Pointer
    ioffset_per_channel: Pointer
    ishift_per_channel: Pointer


class BNNSFilterParameters(Structure):
    """Options of a filter: flags, number of threads (0: default), and its memory allocator.

    ``alloc_memory(memptr, alignment, size)`` stores a writable buffer in ``memptr[0]`` and returns 0;
    ``free_memory(buffer)`` frees it. Both may also be ctypes functions with the C signatures.
    """

    flags: UInt32
    n_threads: Size
    alloc_memory: Function
    free_memory: Function


# ---- layers ---------------------------------------------------------------------------------------------------------


class InputOutput(Structure):
    """What most layers begin with."""

    i_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor


class Weighted(Structure):
    """What layers with weights begin with."""

    i_desc: BNNSNDArrayDescriptor
    w_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor
    bias: BNNSNDArrayDescriptor
    activation: BNNSActivation


class BNNSLayerParametersNormalization(InputOutput):
    """A normalization layer."""

    beta_desc: BNNSNDArrayDescriptor
    gamma_desc: BNNSNDArrayDescriptor
    moving_mean_desc: BNNSNDArrayDescriptor
    moving_variance_desc: BNNSNDArrayDescriptor
    momentum: Float
    epsilon: Float
    activation: BNNSActivation
    num_groups: Size
    normalization_axis: Size


class BNNSLayerParametersActivation(InputOutput):
    """An activation layer.

    The bits of ``axis_flags`` select the axes of a softmax: bit k that of ``size[k]``, the bit above the last one the
    batch. 0 means that of ``size[0]``.
    """

    activation: BNNSActivation
    axis_flags: UInt32


class BNNSLSTMGateDescriptor(Structure):
    """Weights of one gate. Peepholes (``cw_desc``) are full matrices."""

    iw_desc: TwoDescriptors
    hw_desc: BNNSNDArrayDescriptor
    cw_desc: BNNSNDArrayDescriptor
    b_desc: BNNSNDArrayDescriptor
    activation: BNNSActivation


class BNNSLSTMDataDescriptor(Structure):
    """A sequence, and its hidden and cell states."""

    data_desc: BNNSNDArrayDescriptor
    hidden_desc: BNNSNDArrayDescriptor
    cell_state_desc: BNNSNDArrayDescriptor


class BNNSLayerParametersLSTM(Structure):
    """An LSTM: sizes, options, data and gates."""

    input_size: Size
    hidden_size: Size
    batch_size: Size
    num_layers: Size
    seq_len: Size
    dropout: Float
    lstm_flags: UInt32
    sequence_descriptor: BNNSNDArrayDescriptor
    input_descriptor: BNNSLSTMDataDescriptor
    output_descriptor: BNNSLSTMDataDescriptor
    input_gate: BNNSLSTMGateDescriptor
    forget_gate: BNNSLSTMGateDescriptor
    candidate_gate: BNNSLSTMGateDescriptor
    output_gate: BNNSLSTMGateDescriptor
    hidden_activation: BNNSActivation
