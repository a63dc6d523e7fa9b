"""What a file may refer to, and how much memory it may ask for: nothing outside the given file or folder is read."""

from __future__ import annotations

import os
import stat
import zipfile
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Final

from .layers import ConvertError

__all__ = ["check_archive", "check_folder", "check_size", "inside"]

# Compressed weights are rarely a tenth of their size. A file that declares much more makes readers run out of memory.
_RATIO: Final = 100
_SMALL: Final = 64 << 20  # bytes that any file may declare


def check_size(declared: int, stored: int) -> None:
    """Refuse a file of `stored` bytes whose arrays or members would need `declared` bytes of memory."""
    if declared > max(_SMALL, _RATIO * stored):
        raise ConvertError(
            f"it declares {declared:,} bytes in a file of {stored:,}; up to {_RATIO} times the file's size are read"
        )


def check_archive(archive: zipfile.ZipFile, stored: int) -> None:
    """Refuse an archive that grows beyond bounds, or whose members are neither stored nor deflated."""
    members = archive.infolist()
    for member in members:
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ConvertError(f"{member.filename} is compressed by method {member.compress_type}, expected 0 or 8")
    check_size(sum(member.file_size for member in members), stored)


def check_folder(folder: Path) -> int:
    """The size of all files in a folder. A link in it could lead outside, and a pipe would block: both are refused."""
    size = 0
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(where) / name
            found = path.lstat()
            if stat.S_ISLNK(found.st_mode):
                raise ConvertError(f"{path.relative_to(folder)} in it is a symbolic link; links are not followed")
            if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
                raise ConvertError(f"{path.relative_to(folder)} in it is neither a file nor a folder")
            size += found.st_size
    return size


def inside(folder: Path, name: str) -> Path:
    """The path of something that a file names relative to `folder`, if it is in there and no link leads to it."""
    plain, windows = PurePosixPath(name), PureWindowsPath(name)
    if not plain.parts or "\0" in name or "\\" in name or windows.drive or plain.is_absolute() or ".." in plain.parts:
        raise ConvertError(f"it refers to the file {name!r}; only names of files below its own folder are followed")
    path = folder / plain
    if path.resolve() != folder.resolve() / plain:
        raise ConvertError(f"it refers to the file {name!r}, a symbolic link; links are not followed")
    return path
