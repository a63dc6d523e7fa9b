"""Mutated files for every reader of ``retrograd.convert``.

Each case writes a file that was made from a small real one, and reads it under a limit of memory and, in a process of
its own, of time. It must be read or be refused with a ConvertError, nothing else. No other file is opened from Python
meanwhile, and what C libraries read shows in the result: other files that a mutated one may refer to hold a text that
must not get into weights or messages. What the command prints has no control characters.

    python tests/fuzz_convert.py --count 20000 --jobs 2
    python tests/fuzz_convert.py --seed 1234 --count 1
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from retrograd.cli import main as command
from retrograd.convert import ConvertError, convert, read
from retrograd.convert.layers import arrays_of
from support import fuzz_driver
from support.fuzz_driver import Broken
from support.fuzz_files import CANARY, FORMATS, Folder

MEMORY = 2 << 30  # bytes that a case may allocate
fuzz_driver.BUSY = 10.0  # seconds that a file of a few kilobytes may take
# The interpreter and its packages, which import modules when they are first needed.
KNOWN = tuple({os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if path})
KNOWN += ("/proc/", "/sys/", "/dev/")


class Watch:
    """What is opened from Python while a case runs."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.outside: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not f"{path}{os.sep}".startswith((self.folder, *KNOWN)):
                self.outside.append(path)
        elif event in ("subprocess.Popen", "os.system", "os.exec", "socket.connect"):
            self.outside.append(f"{event} {arguments}")

    @contextlib.contextmanager
    def on(self, folder: Path) -> Any:
        self.folder, self.outside = f"{os.path.realpath(folder)}{os.sep}", []
        try:
            yield
        finally:
            self.folder = None
        if self.outside:
            raise Broken(f"opened {self.outside[0]}")


class Cases:
    """The files of all processes, and the limits of each."""

    def __init__(self, folder: Path) -> None:
        self._limited = -1
        self.files = Folder(folder)
        self.watch = Watch()
        for name in FORMATS:  # imports what the readers need
            read(self.files.base(name))

    def limit(self) -> None:
        """Limit the memory of this process, unless that was done."""
        if self._limited != os.getpid():
            self._limited = os.getpid()
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))


def runner(cases: Cases, *names: str) -> fuzz_driver.Run:
    """The cases of some formats in turn."""

    def run(seed: int, tally: Counter[str]) -> None:
        cases.limit()
        run_format(cases, names[seed % len(names)], seed, tally)

    return run


def run_format(cases: Cases, name: str, seed: int, tally: Counter[str]) -> None:
    random = np.random.default_rng(seed)
    path = cases.files.mutated(name, random)
    with cases.watch.on(path.parent), warnings.catch_warnings(record=True):
        try:
            layers = read(path)
            outcome = "read"
            for layer in layers.values():
                if any(CANARY in np.ascontiguousarray(array).tobytes() for array in arrays_of(layer)):
                    raise Broken("weights hold the content of another file")
        except ConvertError as error:
            outcome = "refused"
            check_text(str(error), "the message")
            if not str(error).strip():
                raise Broken("an empty message") from None
        if random.random() < 0.5:
            check_command(path, outcome)
        if outcome == "read" and random.random() < 0.1:
            with contextlib.suppress(ConvertError):
                convert(path, path.parent / "out.npz")
    tally[f"{name} {outcome}"] += 1


def check_command(path: Path, outcome: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command(["convert", str(path)])
    if code != (0 if outcome == "read" else 2):
        raise Broken(f"the exit code is {code}, but the file was {outcome}")
    for text in (out.getvalue(), err.getvalue()):
        check_text(text, "the output")
        if any((ord(c) < 0x20 and c != "\n") or 0x7F <= ord(c) < 0xA0 for c in text):
            raise Broken(f"control characters are printed: {text!r}")
    if code and err.getvalue().count("\n") != 1:
        raise Broken(f"an error is not one line: {err.getvalue()!r}")


def check_text(text: str, what: str) -> None:
    if CANARY.decode() in text:
        raise Broken(f"{what} holds the content of another file: {text!r}")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        return fuzz_driver.main("retrograd.convert", runner(Cases(Path(folder)), *FORMATS))


if __name__ == "__main__":
    sys.exit(main())
