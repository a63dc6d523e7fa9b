"""Packages of Core ML (``.mlpackage``), through coremltools: their parts, and the values of constants in a program.

Nothing in a package is executed, and nothing outside its folder is read.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .guard import check_folder, check_size, inside
from .layers import ConvertError

__all__ = ["Package", "loader", "quiet", "read_package", "replaced_folder"]


class Package(NamedTuple):
    """A package that holds a program. The folder of its weights need not exist."""

    path: Path
    model: Path  # the file of the specification
    weights: Path
    spec: Any  # coremltools' Model_pb2.Model
    size: int  # bytes of all files


@contextlib.contextmanager
def quiet() -> Iterator[Any]:
    """coremltools, without what it says about parts that only a Mac has, and without its progress bars."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            import coremltools

            yield coremltools
    finally:
        logging.disable(level)


def read_package(path: Path) -> Package:
    size = check_folder(path)
    with quiet() as coremltools:
        model, weights = _items(path)
        spec = coremltools.proto.Model_pb2.Model()
        spec.ParseFromString(model.read_bytes())
    if spec.WhichOneof("Type") != "mlProgram":
        raise ConvertError(f"it is a Core ML {spec.WhichOneof('Type')}; only programs (.mlpackage) are read")
    return Package(path, model, weights, spec, size)


def _items(path: Path) -> tuple[Path, Path]:
    """The model of a package, and the folder of its weights, both named in its manifest."""
    if not path.is_dir():
        raise ConvertError("it is a file; a package of Core ML is a folder")
    manifest = json.loads(inside(path, "Manifest.json").read_bytes())
    entries = manifest["itemInfoEntries"]
    places = {key: inside(path / "Data", str(entry["path"])) for key, entry in entries.items()}
    weights = next((places[key] for key, entry in entries.items() if entry.get("name") == "weights"), path / "Data")
    return places[manifest["rootModelIdentifier"]], weights


def loader(package: Package) -> Callable[[Any], Any]:
    """A function that gives the value of a MIL_pb2.Value: an array, a NumPy scalar or a string. Use it in `quiet`."""
    from coremltools.converters.mil.frontend.milproto.load import TranscriptionContext, _load_value

    context, total = TranscriptionContext(str(package.weights)), 0

    def load(value: Any) -> Any:
        nonlocal total
        found = _load_value(context, value)
        total += getattr(found, "nbytes", 0)
        check_size(total, package.size)  # many constants may be the same part of a file
        return found

    return load


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A name for a new folder, which takes the place of the one at `path` when it is complete."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, old = Path(folder) / path.name, Path(folder) / "replaced"
        yield made
        if not path.exists():
            made.rename(path)
            return
        path.rename(old)
        try:
            made.rename(path)
        except BaseException:
            old.rename(path)
            raise
