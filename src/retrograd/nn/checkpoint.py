"""Models and optimizers in files: safetensors, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from .module import Array, Module, check_arrays, copy_arrays
from .optim import Optimizer

__all__ = ["PART", "load", "not_a_file", "read_metadata", "save", "write_whole"]

# The one key of the file's metadata (with more, their order would change from save to save). Its text is the checksum
# of all that follows it and of all arrays, and then, as JSON, what is in the file.
_HEADER: Final = "retrograd.nn"
_VERSION: Final = 1

# What follows the name of a file while its replacement is being written. A process that is killed leaves one behind,
# which the next save of the file uses again.
PART: Final = ".retrograd.part"


def save(
    path: str | os.PathLike[str],
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    arrays: Mapping[str, Array] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write the state of a model, and of its optimizer, to a safetensors file; `metadata` is anything that JSON takes.

    `arrays` are any others that training needs to go on, such as the states of an LSTM between two pieces of a stream.
    The file is replaced once the new one is complete on the disk: whatever happens, one of them is there.
    """
    from safetensors.numpy import save as to_bytes

    everything = {f"model.{name}": array for name, array in model.state_dict().items()}
    if optimizer is not None:
        everything.update((f"optimizer.{name}", array) for name, array in optimizer.state_dict().items())
    everything.update((f"array.{name}", np.array(array, order="C")) for name, array in (arrays or {}).items())
    header = {
        "version": _VERSION,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "metadata": dict(metadata or {}),
    }
    text = json.dumps(header, allow_nan=False)
    write_whole(path, to_bytes(everything, {_HEADER: f"{_checksum(text, everything)} {text}"}))


def load(
    path: str | os.PathLike[str],
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    arrays: Mapping[str, Array] | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Copy what :func:`save` wrote into a model, its optimizer and the `arrays`, and return the metadata.

    A file that is damaged, or that something else wrote, is refused, and so is one whose names, shapes or types are not
    those of the model (with ``strict=False`` names may differ). Nothing is changed then.
    """
    header, everything = _read(path)
    state = _below("model.", everything)
    own = {**model.parameters(), **model.buffers()}
    check_arrays(f"load: {os.fspath(path)}: {type(model).__name__}", own, state, strict)
    others = _below("array.", everything)
    if arrays is not None:
        check_arrays(f"load: {os.fspath(path)}: arrays", arrays, others, strict=True)
    if optimizer is not None:
        kind = type(optimizer).__name__
        if header["optimizer"] != kind:
            there = f"the state of {header['optimizer']}" if header["optimizer"] else "no optimizer's state"
            raise ValueError(f"load: {os.fspath(path)} has {there}, not that of {kind}")
        moments = _below("optimizer.", everything)
        optimizer.check_state(f"load: {os.fspath(path)}: {kind}", moments)
        copy_arrays(optimizer.arrays(), moments)
    copy_arrays(own, state)
    copy_arrays(arrays or {}, others)
    metadata: dict[str, Any] = header["metadata"]
    return metadata


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata of a file of :func:`save`, which may tell how to make the model. Refuses what `load` refuses."""
    metadata: dict[str, Any] = _read(path)[0]["metadata"]
    return metadata


def _below(prefix: str, everything: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in everything.items() if name.startswith(prefix)}


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Array]]:
    from safetensors import SafetensorError, safe_open

    name = os.fspath(path)
    if what := not_a_file(path):  # opening a pipe would wait for ever
        raise ValueError(f"load: {name} is {what}, not a file")
    try:
        with safe_open(path, framework="numpy") as file:
            said = file.metadata() or {}
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
    except SafetensorError as error:
        raise ValueError(f"load: {name} is not a whole safetensors file: {error}") from None
    if _HEADER not in said:
        raise ValueError(f"load: {name} is a safetensors file, but retrograd.nn.save did not write it")
    should, _, text = said[_HEADER].partition(" ")
    checksum = _checksum(text, arrays)
    if checksum != should:
        raise ValueError(f"load: {name} is damaged: its checksum is {checksum}, must be {should}")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("version") != _VERSION:
        version = header.get("version") if isinstance(header, dict) else None
        raise ValueError(f"load: {name} has version {version}, this release reads version {_VERSION}")
    if not isinstance(header.get("metadata"), dict) or "optimizer" not in header:
        raise ValueError(f"load: {name} has a header that retrograd.nn.save does not write")
    return header, arrays


def _checksum(text: str, arrays: Mapping[str, Array]) -> str:
    """CRC-32 of a text, and of the names and bytes of all arrays, in the order of names."""
    total = zlib.crc32(text.encode())
    for name in sorted(arrays):
        total = zlib.crc32(arrays[name].tobytes(), zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def not_a_file(path: str | os.PathLike[str]) -> str | None:
    """What is there instead of a regular file: "a folder", "a pipe"; None if it is a file. OSError if nothing is."""
    mode = os.stat(path).st_mode
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return None if stat.S_ISREG(mode) else kinds.get(stat.S_IFMT(mode), "no regular file")


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace a file, or the one that a link leads to, once the new one is complete on the disk."""
    place = os.path.realpath(path)
    if os.path.exists(place) and (what := not_a_file(place)):  # a device, say, would be gone
        raise OSError(errno.EINVAL, f"it is {what}, not a file", os.fspath(path))
    temporary, posix = place + PART, os.name == "posix"
    with _alone_at(temporary) as descriptor, _removed_on_failure(temporary):
        os.ftruncate(descriptor, 0)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.fsync(descriptor)
        if posix:
            os.replace(temporary, place)
    if not posix:  # there an open file cannot be renamed
        with _removed_on_failure(temporary):
            os.replace(temporary, place)
    if posix:  # the new name is to last, too
        folder = os.open(os.path.dirname(place), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _removed_on_failure(path: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


@contextlib.contextmanager
def _alone_at(path: str) -> Iterator[int]:
    """Open a file, new or left by a process that was killed. Whoever else is writing to it is waited for."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    while True:
        descriptor = os.open(path, flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is not a file", path)
            _lock(descriptor)
            if _is_at(descriptor, path):
                yield descriptor
                return
            # The one before has finished in the meantime: what is open has its last name by now.
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _lock(descriptor: int) -> None:
    if os.name == "posix":
        import fcntl

        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
