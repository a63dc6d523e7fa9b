"""Models and optimizers in files: safetensors, written whole or not at all."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from typing import Any, Final

from .module import Array, Module, check_arrays, copy_arrays
from .optim import Optimizer

__all__ = ["load", "save"]

# Keys of the file's metadata: what is in it, as JSON, and a checksum of that and of all arrays.
_HEADER: Final = "retrograd.nn"
_CRC: Final = "retrograd.nn.crc32"
_VERSION: Final = 1


def save(
    path: str | os.PathLike[str],
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write the state of a model, and of its optimizer, to a safetensors file; `metadata` is anything that JSON takes.

    The file is replaced once the new one is complete on the disk: whatever happens, one of them is there.
    """
    from safetensors.numpy import save as to_bytes

    arrays = {f"model.{name}": array for name, array in model.state_dict().items()}
    if optimizer is not None:
        arrays.update((f"optimizer.{name}", array) for name, array in optimizer.state_dict().items())
    header = {
        "version": _VERSION,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "metadata": dict(metadata or {}),
    }
    text = json.dumps(header, allow_nan=False)
    _write(os.path.realpath(path), to_bytes(arrays, {_HEADER: text, _CRC: _checksum(text, arrays)}))


def load(
    path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None, *, strict: bool = True
) -> dict[str, Any]:
    """Copy what :func:`save` wrote into a model, and into its optimizer, and return the metadata.

    A file that is damaged, or that something else wrote, is refused, and so is one whose names, shapes or types are not
    those of the model (with ``strict=False`` names may differ). Nothing is changed then.
    """
    header, arrays = _read(path)
    state = {name.removeprefix("model."): a for name, a in arrays.items() if name.startswith("model.")}
    own = {**model.parameters(), **model.buffers()}
    check_arrays(f"load: {os.fspath(path)}: {type(model).__name__}", own, state, strict)
    if optimizer is not None:
        kind = type(optimizer).__name__
        if header["optimizer"] != kind:
            there = f"the state of {header['optimizer']}" if header["optimizer"] else "no optimizer's state"
            raise ValueError(f"load: {os.fspath(path)} has {there}, not that of {kind}")
        moments = {name.removeprefix("optimizer."): a for name, a in arrays.items() if name.startswith("optimizer.")}
        check_arrays(f"load: {os.fspath(path)}: {kind}", optimizer.arrays(), moments, strict=True)
        copy_arrays(optimizer.arrays(), moments)
    copy_arrays(own, state)
    metadata: dict[str, Any] = header["metadata"]
    return metadata


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Array]]:
    from safetensors import SafetensorError, safe_open

    name = os.fspath(path)
    try:
        with safe_open(path, framework="numpy") as file:
            said = file.metadata() or {}
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
    except SafetensorError as error:
        raise ValueError(f"load: {name} is not a whole safetensors file: {error}") from None
    if _HEADER not in said or _CRC not in said:
        raise ValueError(f"load: {name} is a safetensors file, but retrograd.nn.save did not write it")
    checksum = _checksum(said[_HEADER], arrays)
    if checksum != said[_CRC]:
        raise ValueError(f"load: {name} is damaged: its checksum is {checksum}, must be {said[_CRC]}")
    header: dict[str, Any] = json.loads(said[_HEADER])
    if header["version"] != _VERSION:
        raise ValueError(f"load: {name} has version {header['version']}, this release reads version {_VERSION}")
    return header, arrays


def _checksum(text: str, arrays: Mapping[str, Array]) -> str:
    """CRC-32 of a text, and of the names and bytes of all arrays, in the order of names."""
    total = zlib.crc32(text.encode())
    for name in sorted(arrays):
        total = zlib.crc32(arrays[name].tobytes(), zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def _write(path: str, content: bytes) -> None:
    temporary = f"{path}.{os.getpid()}.part"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    if os.name == "posix":  # the new name is to last, too
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
