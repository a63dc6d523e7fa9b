"""Keyed archives: binary property lists as Foundation's NSKeyedArchiver lays them out.

Archives are untrusted data. Reading one creates only scalars, strings and the requested kernel, follows only that
kernel's references, and raises ValueError for anything else.
"""

from __future__ import annotations

import plistlib
from typing import Any, Final, Protocol, TypeVar, cast

from ._types import NSUIntegerMax, as_bool

_ROOT: Final = "root"
_ARCHIVER: Final = "NSKeyedArchiver"
_VERSION: Final = 100000
_NULL: Final = "$null"

T = TypeVar("T")


class Archivable(Protocol):
    """A class whose objects can be archived."""

    def _archive(self, archiver: NSKeyedArchiver) -> None: ...

    @classmethod
    def _unarchived(cls, unarchiver: NSKeyedUnarchiver) -> Any: ...


class NSKeyedArchiver:
    """Writes values under keys, and objects as dictionaries of such values."""

    def __init__(self, requiringSecureCoding: bool = True) -> None:
        as_bool("NSKeyedArchiver: requiringSecureCoding", requiringSecureCoding)
        self._objects: list[Any] = [_NULL]
        self._classes: dict[str, plistlib.UID] = {}
        self._top: dict[str, Any] = {}
        self._current = self._top
        self._data: bytes | None = None

    @staticmethod
    def archivedData(withRootObject: Any, requiringSecureCoding: bool = True) -> bytes:
        archiver = NSKeyedArchiver(requiringSecureCoding)
        archiver.encode(withRootObject, _ROOT)
        return archiver.encodedData

    def encode(self, value: Any, forKey: str) -> None:
        """Store a bool, a 64-bit int, a float, a str, None, or an archivable object under a key."""
        if self._data is not None:
            raise RuntimeError("NSKeyedArchiver.encode: the archive has been finished")
        if not isinstance(forKey, str) or forKey.startswith("$"):
            raise ValueError(f"NSKeyedArchiver.encode: forKey is {forKey!r}, must be a str that does not start with $")
        if isinstance(value, (bool, float)):
            self._current[forKey] = value
        elif isinstance(value, int):
            if not -(2**63) <= value <= NSUIntegerMax:
                raise ValueError(f"NSKeyedArchiver.encode: {forKey} is {value}, which has more than 64 bits")
            # Archived integers are signed: NSUIntegerMax is stored as -1.
            self._current[forKey] = int(value) - 2**64 if value >= 2**63 else int(value)
        else:
            self._current[forKey] = self._reference(value)

    def finishEncoding(self) -> None:
        self._data = self._written()

    @property
    def encodedData(self) -> bytes:
        """The finished archive."""
        if self._data is None:
            self._data = self._written()
        return self._data

    def _written(self) -> bytes:
        contents = {"$version": _VERSION, "$archiver": _ARCHIVER, "$top": self._top, "$objects": self._objects}
        return plistlib.dumps(contents, fmt=plistlib.FMT_BINARY)

    def _reference(self, value: Any) -> plistlib.UID:
        if value is None:
            return plistlib.UID(0)
        if isinstance(value, str):
            return self._append(value)
        if not hasattr(value, "_archive"):
            raise TypeError(f"NSKeyedArchiver.encode: {type(value).__name__} cannot be archived")
        contents: dict[str, Any] = {}
        reference = self._append(contents)
        outside, self._current = self._current, contents
        try:
            cast(Archivable, value)._archive(self)
        finally:
            self._current = outside
        contents["$class"] = self._class(type(value))
        return reference

    def _class(self, cls: type) -> plistlib.UID:
        reference = self._classes.get(cls.__name__)
        if reference is None:
            # Only Apple's classes. A PyObjC class has the same name as its Swift base: list it once.
            names = list(dict.fromkeys(base.__name__ for base in cls.__mro__ if base.__name__.startswith("MPS")))
            reference = self._append({"$classname": cls.__name__, "$classes": [*names, "NSObject"]})
            self._classes[cls.__name__] = reference
        return reference

    def _append(self, value: Any) -> plistlib.UID:
        self._objects.append(value)
        return plistlib.UID(len(self._objects) - 1)


class NSKeyedUnarchiver:
    """Reads values by key, from the archive's top level or from the object being decoded."""

    def __init__(self, forReadingFrom: bytes) -> None:
        data = bytes(memoryview(forReadingFrom))
        try:
            archive = plistlib.loads(data, fmt=plistlib.FMT_BINARY)
        except Exception as error:  # damaged data makes the parser raise many types
            raise ValueError(f"archive: not a binary property list: {type(error).__name__}: {error}") from None
        if not isinstance(archive, dict) or archive.get("$archiver") != _ARCHIVER:
            raise ValueError(f"archive: this property list was not written by {_ARCHIVER}")
        if archive.get("$version") != _VERSION:
            raise ValueError(f"archive: version is {_brief(archive.get('$version'))}, must be {_VERSION}")
        top, objects = archive.get("$top"), archive.get("$objects")
        if not isinstance(top, dict) or not isinstance(objects, list):
            raise ValueError("archive: $top must be a dictionary and $objects an array")
        self._objects: list[Any] = objects
        self._current: dict[Any, Any] = top

    @staticmethod
    def unarchivedObject(ofClass: type[T], from_: bytes) -> T:
        """Decode the root object, which must be of this class. It gets the default device."""
        return NSKeyedUnarchiver(from_).decodeObject(ofClass, _ROOT)

    def containsValue(self, forKey: str) -> bool:
        return forKey in self._current

    def decodeBool(self, forKey: str) -> bool:
        value = self._value(forKey)
        if not isinstance(value, bool):
            raise ValueError(f"archive: {forKey} is {_brief(value)}, must be a bool")
        return value

    def decodeInteger(self, forKey: str) -> int:
        """Decode a signed 64-bit integer."""
        value = self._value(forKey)
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
            raise ValueError(f"archive: {forKey} is {_brief(value)}, must be an integer of 64 bits")
        return value

    def decodeDouble(self, forKey: str) -> float:
        value = self._value(forKey)
        if not isinstance(value, float):
            raise ValueError(f"archive: {forKey} is {_brief(value)}, must be a real number")
        return value

    decodeFloat = decodeDouble

    def decodeObject(self, of: type[T], forKey: str) -> T:
        """Decode an object of class `of`: an archivable class, or str."""
        value = self._object(forKey)
        if of is str:
            if not isinstance(value, str):
                raise ValueError(f"archive: {forKey} is {_brief(value)}, must be a string")
            return cast(T, value)
        if not hasattr(of, "_unarchived"):
            raise TypeError(f"NSKeyedUnarchiver: {of!r} is not an archivable class")
        if not isinstance(value, dict):
            raise ValueError(f"archive: {forKey} is {_brief(value)}, must be an object of {of.__name__}")
        described = self._resolved("$class", value.get("$class"))
        found = described.get("$classname") if isinstance(described, dict) else None
        if found != of.__name__:
            raise ValueError(f"archive: {forKey} is an object of {_brief(found)}, must be of {of.__name__}")
        outside, self._current = self._current, value
        try:
            return cast(T, cast(type[Archivable], of)._unarchived(self))
        finally:
            self._current = outside

    def decodeString(self, forKey: str) -> str | None:
        """Decode a string, or None for nil."""
        return None if self._value(forKey) == plistlib.UID(0) else self.decodeObject(str, forKey)

    def finishDecoding(self) -> None:
        """Nothing to do."""

    def _value(self, key: str) -> Any:
        if key not in self._current:
            raise ValueError(f"archive: {key} is missing")
        return self._current[key]

    def _object(self, key: str) -> Any:
        return self._resolved(key, self._value(key))

    def _resolved(self, key: str, reference: Any) -> Any:
        if not isinstance(reference, plistlib.UID):
            raise ValueError(f"archive: {key} is {_brief(reference)}, must be a reference to an object")
        if reference.data >= len(self._objects):
            raise ValueError(f"archive: {key} refers to object {reference.data}, but there are {len(self._objects)}")
        return self._objects[reference.data]


def _brief(value: Any) -> str:
    """A value for a message: values in an archive may be long or recursive."""
    if isinstance(value, (str, bytes)):
        return repr(value[:40])
    return repr(value) if isinstance(value, (bool, float)) or value is None else f"of type {type(value).__name__}"
