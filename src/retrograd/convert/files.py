"""Files of weights: which format a file has, and how it is read and written."""

from __future__ import annotations

import fnmatch
import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from .._files import not_a_file, write_whole
from ..nn.checkpoint import read_state, state_content
from .coreml import read_coreml, write_coreml
from .guard import check_archive, check_size
from .keras import read_keras, write_keras
from .kinds import Kinds, decided, listed, parsed
from .layers import Array, ConvertError, Layers, checked, mapped
from .onnx import read_onnx, write_onnx
from .state import from_bnns, from_native, from_torch_state, to_bnns, to_native, to_torch_state

__all__ = ["FORMATS", "Converted", "convert", "format_of", "read", "write"]

FORMATS: Final = {
    "nn": "retrograd.nn, .safetensors",
    "torch": "PyTorch, .safetensors or a state_dict in .pt, .pth or .bin",
    "keras": "Keras 3, .weights.h5 or .keras (only read)",
    "onnx": "ONNX, .onnx",
    "coreml": "Core ML, .mlpackage",
    "bnns": "arrays named as BNNS's fields, with one for each gate, .npz",
}
_SUFFIXES: Final = {
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".h5": "keras",
    ".keras": "keras",
    ".onnx": "onnx",
    ".mlpackage": "coreml",
    ".npz": "bnns",
}
_LONG: Final = 1000  # characters of a name, each of whose prefixes may be a layer
_PACKAGES: Final = {"torch": "torch", "keras": "h5py", "onnx": "onnx", "coreml": "coremltools"}


class Converted(NamedTuple):
    """What :func:`convert` has written: the layers, and their names in the new file where that has other ones."""

    layers: Layers
    names: dict[str, str]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    source_format: str | None = None,
    target_format: str | None = None,
    kinds: Mapping[str, str] | None = None,
    skip: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
) -> Converted:
    """Read the weights of one file and write them to another, in the format of its name.

    `kinds` gives the kinds of layers (names or patterns) that the source does not determine; `skip` leaves layers out;
    `rename` gives layers other names. The target is replaced only when the new file is complete.
    """
    source, target = Path(source), Path(target)
    origin = _checked_format(source_format or format_of(source))
    # A .safetensors file has either names: convert to the other ones.
    format = _checked_format(target_format or format_of(target, "torch" if origin == "nn" else "nn"))
    layers = _renamed(read(source, origin, kinds=kinds, skip=skip), rename or {})
    return Converted(layers, _write(target, layers, format, ordered=source.suffix != ".safetensors"))


def _renamed(layers: Layers, names: Mapping[str, str]) -> Layers:
    for name in names:
        if name not in layers:
            raise ConvertError(f"--rename {name}={names[name]}: no layer has this name; there are {listed(layers)}")
    found = {names.get(name, name): layer for name, layer in layers.items()}
    if len(found) < len(layers):
        given = [names.get(name, name) for name in layers]
        raise ConvertError(f"--rename: two layers would be named {next(n for n in given if given.count(n) > 1)}")
    return found


def format_of(path: Path, of_safetensors: str | None = None) -> str:
    """The format of a file, by its name; of an existing .safetensors file, by its content."""
    if path.suffix == ".safetensors":
        return of_safetensors or ("nn" if "retrograd.nn" in _safetensors_header(path) else "torch")
    if path.suffix not in _SUFFIXES:
        known = ", ".join(sorted([*_SUFFIXES, ".safetensors"]))
        raise ConvertError(f"{path}: its format is not known; files end in {known}")
    return _SUFFIXES[path.suffix]


def read(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    kinds: Mapping[str, str] | None = None,
    skip: Sequence[str] = (),
) -> Layers:
    """The layers in a file, by name."""
    path, known = Path(path), parsed(kinds or {})
    format = _checked_format(format or format_of(path))
    used: set[str] = set()

    def skipped(name: str) -> bool:
        found = [pattern for pattern in skip if fnmatch.fnmatchcase(name, pattern)]
        used.update(found)
        return bool(found)

    _check_input(path, folder=format == "coreml")
    try:
        layers = checked(decided(_read(path, format, known, skipped), known))
    except ConvertError as error:
        raise ConvertError(f"{path}: {error}") from None
    except ImportError as error:
        raise ConvertError(_needed(format, error)) from None
    except Exception as error:  # each library has exceptions of its own for files that it cannot read
        raise ConvertError(f"{path} cannot be read as {FORMATS[format]}: {_first_line(error)}") from None
    for pattern in skip:
        if pattern not in used:
            raise ConvertError(f"{path}: --skip {pattern}: no layer has this name; there are {listed(layers)}")
    return layers


def _check_input(path: Path, folder: bool) -> None:
    try:
        what = not_a_file(path)  # opening a pipe would block
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror}") from None
    if what is not None and not (folder and what == "a folder"):
        raise ConvertError(f"{path} is {what}, not a file")


def _read(path: Path, format: str, kinds: Kinds, skipped: Callable[[str], bool]) -> Layers:
    if format == "keras":
        return read_keras(path, skipped, kinds)
    if format == "onnx":
        return read_onnx(path, skipped)
    if format == "coreml":
        return read_coreml(path, skipped)
    state = {"nn": read_state, "torch": _torch_state, "bnns": _npz}[format](path)
    check_size(sum(array.nbytes for array in state.values()), path.stat().st_size)  # one may be repeated by stride 0
    if longest := max((name for name in state if len(name) > _LONG), key=len, default=None):
        raise ConvertError(
            f"{longest[:20]}...: the name of an array has {len(longest)} characters, expected up to {_LONG}"
        )
    # A layer's name is a prefix of the names of its arrays.
    kept = {
        name: array
        for name, array in state.items()
        if not any(skipped(name[:end]) for end, c in enumerate(f"{name}.") if c == ".")
    }
    if format == "torch":
        return from_torch_state(kept, kinds)
    return from_native(kept) if format == "nn" else from_bnns(kept)


def write(path: str | os.PathLike[str], layers: Layers, format: str | None = None) -> None:
    """Write layers to a file. Nothing is written if the format cannot hold them exactly."""
    path = Path(path)
    _write(path, layers, _checked_format(format or format_of(path, "nn")), ordered=True)


def _write(path: Path, layers: Layers, format: str, ordered: bool) -> dict[str, str]:
    """Write layers. Returns their names in the file where it has other ones."""
    names: dict[str, str] = {}
    try:
        layers = checked(layers)
        if format == "coreml":
            write_coreml(path, layers)
            return names
        if format == "keras":
            content, names = write_keras(path, layers, ordered)
        else:
            content = _content(path, layers, format)
        write_whole(path, content)
    except ConvertError as error:
        raise ConvertError(f"{path}: {error}") from None
    except ImportError as error:
        raise ConvertError(_needed(format, error)) from None
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror or error}") from None
    return names


def _content(path: Path, layers: Layers, format: str) -> bytes:
    if format == "nn":
        return state_content(to_native({name: mapped(layer, _widened) for name, layer in layers.items()}))
    if format == "onnx":
        return write_onnx(layers)
    content = io.BytesIO()
    if format == "bnns":
        np.savez(content, allow_pickle=False, **to_bnns(layers))
        return content.getvalue()
    state = {name: np.array(array, order="C") for name, array in to_torch_state(layers).items()}
    if path.suffix == ".safetensors":
        from safetensors.numpy import save

        return save(state)
    import torch

    torch.save({name: torch.from_numpy(array) for name, array in state.items()}, content)
    return content.getvalue()


def _widened(array: Array) -> Array:
    """float16, which nn does not train with, as float32: exactly the same values."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


# ---- details of formats ----------------------------------------------------------------------------------------------


def _torch_state(path: Path) -> dict[str, Array]:
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    import torch

    with path.open("rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                check_archive(archive, path.stat().st_size)
    # weights_only: a pickle in the file cannot run code.
    loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
        raise ConvertError("it is not a state_dict: save module.state_dict(), not the module")
    tensors = {str(name): tensor.detach() for name, tensor in loaded.items()}
    return {n: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for n, t in tensors.items()}


def _npz(path: Path) -> dict[str, Array]:
    with path.open("rb") as opened:
        with zipfile.ZipFile(opened) as archive:
            check_archive(archive, path.stat().st_size)
        opened.seek(0)
        with np.load(opened, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    if others := [name for name, array in found.items() if not isinstance(array, np.ndarray)]:
        raise ConvertError(f"{others[0]} is not an array")
    return found


def _safetensors_header(path: Path) -> dict[str, Any]:
    """The metadata of a safetensors file."""
    _check_input(path, folder=False)
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, 100_000_000)))
        except (ValueError, RecursionError):
            raise ConvertError(f"{path} is not a whole safetensors file") from None
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return metadata if isinstance(metadata, dict) else {}


def _checked_format(format: str) -> str:
    if format not in FORMATS:
        raise ConvertError(f"the format is {format!r}; there are {', '.join(FORMATS)}")
    return format


def _needed(format: str, error: ImportError) -> str:
    package = _PACKAGES.get(format, error.name)
    return f"{FORMATS[format].partition(',')[0]} needs the package {package}: pip install {package} ({error})"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
