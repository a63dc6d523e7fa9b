"""Save models and optimizers to safetensors files, and load them. Files are replaced atomically."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from .._files import not_a_file, write_whole
from ..ops._types import Array
from .module import Module, check_arrays, copy_arrays
from .optim import Optimizer

__all__ = ["load", "read_metadata", "read_state", "save", "state_content"]

# The only key of the file's metadata (the order of several would change from save to save). Its value is the checksum
# of the JSON header and all arrays, a space, and the JSON header.
_HEADER: Final = "retrograd.nn"
_VERSION: Final = 1


def save(
    path: str | os.PathLike[str],
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    arrays: Mapping[str, Array] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Save the state of a model, and of its optimizer, to a safetensors file. `metadata` must be JSON-serialisable.

    `arrays` are further arrays needed to resume training, such as LSTM states between two chunks of a stream. An
    existing file is replaced only when the new one is complete on disk.
    """
    everything = {f"model.{name}": array for name, array in model.state_dict().items()}
    if optimizer is not None:
        if parts := optimizer.collected:
            raise ValueError(
                f"save: the gradients of {parts} parts of a batch are collected but not yet applied, and the file "
                "would not have them; save after a step that updates the parameters"
            )
        everything.update((f"optimizer.{name}", array) for name, array in optimizer.state_dict().items())
    everything.update((f"array.{name}", np.array(array, order="C")) for name, array in (arrays or {}).items())
    write_whole(path, _content(everything, None if optimizer is None else type(optimizer).__name__, metadata))


def state_content(state: Mapping[str, Array]) -> bytes:
    """Return the content of a file that :func:`load` reads into a module with this state."""
    return _content({f"model.{name}": np.array(array, order="C") for name, array in state.items()}, None, None)


def read_state(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Return the state of the model in a file written by :func:`save`."""
    return _below("model.", _read(path)[1])


def _content(everything: dict[str, Array], optimizer: str | None, metadata: Mapping[str, Any] | None) -> bytes:
    from safetensors.numpy import save as to_bytes

    header = {"version": _VERSION, "optimizer": optimizer, "metadata": dict(metadata or {})}
    text = json.dumps(header, allow_nan=False)
    return to_bytes(everything, {_HEADER: f"{_checksum(text, everything)} {text}"})


def load(
    path: str | os.PathLike[str],
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    arrays: Mapping[str, Array] | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Load a file written by :func:`save` into a model, its optimizer and `arrays`, and return the metadata.

    A file that is damaged, was written by another program, or has other names, shapes or dtypes than the model is
    refused, and nothing is changed. With ``strict=False`` names may differ.
    """
    header, everything = _read(path)
    state = _below("model.", everything)
    target = model.state_arrays()
    check_arrays(f"load: {os.fspath(path)}: {type(model).__name__}", target, state, strict)
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
    copy_arrays(target, state)
    copy_arrays(arrays or {}, others)
    metadata: dict[str, Any] = header["metadata"]
    return metadata


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata of a file written by :func:`save`. Damaged and foreign files are refused, as by `load`."""
    metadata: dict[str, Any] = _read(path)[0]["metadata"]
    return metadata


def _below(prefix: str, everything: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in everything.items() if name.startswith(prefix)}


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Array]]:
    from safetensors import SafetensorError, safe_open

    name = os.fspath(path)
    if what := not_a_file(path):  # opening a pipe would block
        raise ValueError(f"load: {name} is {what}, not a file")
    try:
        with safe_open(path, framework="numpy") as file:
            found = file.metadata() or {}
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"load: {name} is not a whole safetensors file: {error}") from None
    if _HEADER not in found:
        raise ValueError(f"load: {name} is a safetensors file, but retrograd.nn.save did not write it")
    expected, _, text = found[_HEADER].partition(" ")
    checksum = _checksum(text, arrays)
    if checksum != expected:
        raise ValueError(f"load: {name} is damaged: its checksum is {checksum}, must be {expected}")
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
    """CRC-32 of a text and of the names and bytes of all arrays, in order of name."""
    total = zlib.crc32(text.encode())
    for name in sorted(arrays):
        total = zlib.crc32(arrays[name].tobytes(), zlib.crc32(name.encode(), total))
    return f"{total:08x}"
