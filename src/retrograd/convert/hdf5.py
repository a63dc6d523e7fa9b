"""HDF5 files, opened only if everything in them is in the file itself."""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from .guard import check_size
from .layers import ConvertError

__all__ = ["opened_hdf5"]

_DEEP: Final = 64  # groups in groups; Keras nests as deep as the model
_FILTERS: Final = {1: "deflate", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}
_ONLY: Final = "only what is in the file itself is read"
_SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"
_HEAP: Final = b"GCOL\x01"  # a collection of strings and the like, of version 1


@contextlib.contextmanager
def opened_hdf5(source: Path | bytes) -> Iterator[Any]:
    """The root group of an HDF5 file. External storage, links and virtual datasets are refused before it is read."""
    import h5py

    with contextlib.ExitStack() as held:
        if isinstance(source, bytes):
            file: BinaryIO = io.BytesIO(source)
            virtual = _virtual_layouts(source)
        else:
            file = held.enter_context(source.open("rb"))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                virtual = _virtual_layouts(content)
        root = held.enter_context(h5py.File(file, "r"))
        _check(h5py, root, file.seek(0, io.SEEK_END), virtual)
        yield root


def _check(h5py: Any, root: Any, size: int, virtual: list[int]) -> None:
    """Walk over all objects. None is opened before its link, and no dataset before all of them are known."""
    if root.id.get_create_plist().get_sizes() != (8, 8):
        raise ConvertError(f"its addresses and sizes have {root.id.get_create_plist().get_sizes()} bytes, expected 8")
    datasets: list[tuple[int, str, Any, str]] = []
    groups, seen = [("", root, 0)], {h5py.h5o.get_info(root.id).addr}
    while groups:
        prefix, group, depth = groups.pop()
        for name in group:
            path = f"{prefix}{name}"
            if "/" in name or name in ("", ".", ".."):
                raise ConvertError(f"{path!r} is not the name of an object of HDF5")
            kind, address = _checked_link(h5py, path, group, name)
            if kind == h5py.h5o.TYPE_DATASET:
                datasets.append((address, path, group, name))
            elif kind != h5py.h5o.TYPE_GROUP:
                raise ConvertError(f"{path} is neither a group nor a dataset")
            # A group with two links could contain itself, or be read more often than it is stored.
            elif address in seen:
                raise ConvertError(f"{path} is a second link to a group; groups must form a tree")
            elif depth == _DEEP:
                raise ConvertError(f"{path}: groups are nested more than {_DEEP} deep")
            else:
                seen.add(address)
                groups.append((f"{path}/", group[name], depth + 1))
    if virtual:  # before libhdf5 decodes them: damaged ones crash it
        path = max((dataset[:2] for dataset in datasets if dataset[0] < virtual[0]), default=(0, "an object"))[1]
        raise ConvertError(f"{path} is a virtual dataset, of data in other datasets or files; {_ONLY}")
    declared = 0
    for _, path, group, name in datasets:
        declared += _checked_bytes(path, group[name])
        check_size(declared, size)


def _checked_link(h5py: Any, path: str, group: Any, name: str) -> tuple[int, int]:
    """The type and the address of an object in a group, if nothing but a hard link leads to it."""
    encoded = name.encode("utf-8", "surrogateescape")
    kind = group.id.links.get_info(encoded).type
    if kind == h5py.h5l.TYPE_EXTERNAL:
        where = group.get(name, getlink=True).filename
        raise ConvertError(f"{path} is an external link, to the file {where!r}; {_ONLY}")
    if kind == h5py.h5l.TYPE_SOFT:
        raise ConvertError(f"{path} is a soft link, to {group.get(name, getlink=True).path!r}; links are not followed")
    if kind != h5py.h5l.TYPE_HARD:
        raise ConvertError(f"{path} is a link of type {kind}; {_ONLY}")
    found = h5py.h5o.get_info(group.id, encoded)
    return found.type, found.addr


def _checked_bytes(path: str, dataset: Any) -> int:
    """The size of a dataset in memory, if all of it is in the file."""
    options = dataset.id.get_create_plist()
    if options.get_external_count():
        where = options.get_external(0)[0].decode("utf-8", "replace")
        raise ConvertError(f"{path} has external storage, in the file {where!r}; {_ONLY}")
    if dataset.is_virtual:
        raise ConvertError(f"{path} is a virtual dataset, of data in other datasets or files; {_ONLY}")
    for index in range(options.get_nfilters()):
        if options.get_filter(index)[0] not in _FILTERS:
            raise ConvertError(f"{path} has filter {options.get_filter(index)[0]}, of {', '.join(_FILTERS.values())}")
    if dataset.dtype.hasobject:
        raise ConvertError(f"{path} has values of variable length or references, not numbers")
    return math.prod(dataset.shape or ()) * int(dataset.dtype.itemsize)


def _virtual_layouts(content: bytes | mmap.mmap) -> list[int]:
    """Where a file describes virtual datasets: by a version, the class 3, and the address of a heap.

    Refused is a heap with free space of size 0: libhdf5 would read it for ever.
    """
    if content[:8] != _SIGNATURE:
        raise ConvertError("it does not begin as an HDF5 file")
    heaps, steps = set(), 0
    start = content.find(_HEAP)
    while start >= 0:
        heaps.add(start.to_bytes(8, "little"))
        at, end = start + 16, min(start + int.from_bytes(content[start + 8 : start + 16], "little"), len(content))
        while at + 16 <= end:
            index, length = (int.from_bytes(content[at + k : at + k + n], "little") for k, n in ((0, 2), (8, 8)))
            steps += 16
            if (not index and not length) or steps > len(content):
                raise ConvertError("it is damaged: a collection of strings has free space without end")
            at += 16 + (length + 7) // 8 * 8 if index else length
        start = content.find(_HEAP, start + 1)
    layouts = re.finditer(rb"(?s)[\x04\x05]\x03(?=(.{8}))", content) if heaps else ()
    return [layout.start() for layout in layouts if layout[1] in heaps]
