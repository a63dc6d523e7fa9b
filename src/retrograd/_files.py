"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

__all__ = ["PART", "not_a_file", "write_whole"]

# The suffix of a file while it is being written. A killed process leaves such a file; the next save reuses it.
PART: Final = ".retrograd.part"


def not_a_file(path: str | os.PathLike[str]) -> str | None:
    """Return None for a regular file, else what it is, such as "a pipe". Raise OSError if it does not exist."""
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
    """Write a file and rename it to `path` when it is complete on disk. A symbolic link is followed."""
    target = os.path.realpath(path)
    if os.path.exists(target) and (what := not_a_file(target)):  # a device would be replaced by a file
        raise OSError(errno.EINVAL, f"it is {what}, not a file", os.fspath(path))
    temporary, posix = target + PART, os.name == "posix"
    with _alone_at(temporary) as descriptor, _removed_on_failure(temporary):
        os.ftruncate(descriptor, 0)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.fsync(descriptor)
        if posix:
            os.replace(temporary, target)
    if not posix:  # Windows cannot rename an open file
        with _removed_on_failure(temporary):
            os.replace(temporary, target)
    if posix:  # make the rename durable, too
        folder = os.open(os.path.dirname(target), os.O_RDONLY)
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
    """Open and lock a temporary file, new or left by a killed process. Wait while another writer has it."""
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
            # Another writer has renamed the file since it was opened: try again.
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _lock(descriptor: int) -> None:
    if os.name == "posix":
        import fcntl

        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
