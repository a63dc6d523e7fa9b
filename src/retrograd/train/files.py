"""Checks of input files: data, and models, which may come from anywhere."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from .. import nn
from .._files import PART, not_a_file
from .settings import InputError

__all__ = ["MODEL", "UNUSABLE", "check_data", "check_room", "load_weights", "opened_model", "remove_parts"]

MODEL: Final = "model.safetensors"

# Exceptions that a model file with unexpected metadata can cause.
UNUSABLE: Final = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError),
    InputError,
)


def check_data(path: str | os.PathLike[str]) -> None:
    """Refuse anything but a regular file: directories, devices (may never end), pipes (can be read only once)."""
    name = os.fspath(path)
    try:
        what = not_a_file(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    if what:
        raise InputError(f"{name} is {what}, not a file" + ("; save it to a file first" if what == "a pipe" else ""))


def remove_parts(folder: Path, names: Sequence[str]) -> None:
    """Remove partial files that a killed run left. The directory must be locked."""
    wanted = re.compile(f"({'|'.join(map(re.escape, names))})(\\.\\d+\\.part|{re.escape(PART)})")
    for path in folder.iterdir():
        if wanted.fullmatch(path.name) and path.is_file():
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def opened_model(path: str | os.PathLike[str], kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a model file and its metadata. `path` is the file or a run directory.

    Exceptions of the block become an InputError that names the file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / MODEL
    try:
        metadata = nn.read_metadata(path)
        if metadata.get("kind") != kind:
            raise ValueError(f"it is of the kind {metadata.get('kind')!r}, not {kind!r}")
        yield path, metadata
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except UNUSABLE as error:
        raise InputError(f"{path} is not a {kind} model: {error}") from None


def check_room(path: Path, weights: int) -> None:
    """Refuse a file too small for this many weights, before memory is allocated for the model."""
    size = path.stat().st_size
    if size < 4 * weights:
        raise InputError(f"it has {size:,} bytes, but its settings describe a model of {weights:,} weights or more")


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the weights of a file into a model. NaN and infinite weights are refused."""
    nn.load(path, model)
    for name, array in model.state_arrays().items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name} has NaN or infinite values")
