"""Files that are given: data, and models that anyone may have written. What cannot be used is refused with a reason."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from .. import nn
from ..nn.checkpoint import PART, not_a_file
from .settings import InputError

__all__ = ["MODEL", "UNUSABLE", "check_data", "check_room", "load_weights", "opened_model", "remove_parts"]

MODEL: Final = "model.safetensors"

# What a file can cause whose metadata are not those that a run writes.
UNUSABLE: Final = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError),
    InputError,
)


def check_data(path: str | os.PathLike[str]) -> None:
    """Refuse what is no file of data: folders, devices (which may never end), pipes (which can be read once only)."""
    name = os.fspath(path)
    try:
        what = not_a_file(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    if what:
        raise InputError(f"{name} is {what}, not a file" + ("; save it to a file first" if what == "a pipe" else ""))


def remove_parts(folder: Path, names: Sequence[str]) -> None:
    """Remove what a run that was killed left half-written. No other run may be going on in the folder."""
    wanted = re.compile(f"({'|'.join(map(re.escape, names))})(\\.\\d+\\.part|{re.escape(PART)})")
    for path in folder.iterdir():
        if wanted.fullmatch(path.name) and path.is_file():
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def opened_model(path: str | os.PathLike[str], kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The model of a run, by its folder or by the file, and its metadata. What the block finds wrong is refused too."""
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
        raise InputError(f"{path} is no {kind} model: {error}") from None


def check_room(path: Path, weights: int) -> None:
    """Refuse a file that cannot hold so many weights, before memory is taken for a model that has them."""
    size = path.stat().st_size
    if size < 4 * weights:
        raise InputError(f"it has {size:,} bytes, but settings of a model of {weights:,} weights or more")


def load_weights(path: Path, model: nn.Module) -> None:
    """Copy the weights of a file into a model, if they are numbers."""
    nn.load(path, model)
    for name, array in (*model.parameters().items(), *model.buffers().items()):
        if not np.isfinite(array).all():
            raise ValueError(f"{name} has values that are no numbers")
