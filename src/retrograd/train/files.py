"""Checks of input files: data, and models, which may come from anywhere."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from .. import nn
from .._files import PART, not_a_file
from .settings import InputError

__all__ = [
    "MODEL",
    "SAVED_INPUT",
    "STANDARD_INPUT",
    "UNUSABLE",
    "check_data",
    "check_room",
    "load_weights",
    "opened_model",
    "remove_parts",
    "saved_standard_input",
    "standard_input",
    "with_standard_input",
]

MODEL: Final = "model.safetensors"
STANDARD_INPUT: Final = "-"  # in the place of a file
SAVED_INPUT: Final = "standard-input"  # a copy in the run directory, because a run reads its data more than once

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
        raise InputError(
            f"{name} is {what}, not a file"
            + ("; save it to a file first, or give - and pipe it in" if what == "a pipe" else "")
        )


def standard_input() -> BinaryIO:
    """Return standard input, to read bytes. If it is a terminal, tell the user that it is read, and how to end it."""
    if sys.stdin is None:
        raise InputError("-: standard input is closed")
    if sys.stdin.isatty():
        print("reading standard input; Ctrl-D ends it", file=sys.stderr)
    return sys.stdin.buffer


@contextlib.contextmanager
def with_standard_input(files: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """Save standard input in the run directory if it is one of the files, and yield the files with the copy.

    If the block fails, the directory has what it had before.
    """
    if STANDARD_INPUT not in files:
        yield list(files)
        return
    if files.count(STANDARD_INPUT) > 1:
        raise InputError(f"-: standard input can be read once, not {files.count(STANDARD_INPUT)} times")
    path, before = folder / SAVED_INPUT, folder / f"{SAVED_INPUT}.before"
    source = standard_input()
    had = path.exists()
    if had:
        os.replace(path, before)
    try:
        try:
            with open(path, "wb") as copy:
                shutil.copyfileobj(source, copy)
        except OSError as error:
            raise InputError(f"{path}: standard input could not be saved there: {error.strerror or error}") from None
        if not path.stat().st_size:
            raise InputError("-: standard input is empty")
        yield [str(path) if file == STANDARD_INPUT else file for file in files]
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        if had:
            os.replace(before, path)
        raise
    before.unlink(missing_ok=True)


def saved_standard_input(file: str, folder: Path) -> str:
    """Return the file, or the copy of standard input in the run directory if that was it and the directory moved."""
    copy = folder / SAVED_INPUT
    return str(copy) if os.path.basename(file) == SAVED_INPUT and not os.path.exists(file) and copy.exists() else file


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
