"""A short run of fuzz_convert.py, and that it finds what it looks for; ``make fuzz-convert`` has the long one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import fuzz_convert
import numpy as np
import pytest

from retrograd.convert import ConvertError, Linear
from support.fuzz_driver import Broken
from support.fuzz_files import CANARY, FORMATS
from support.processes import linux
from support.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _packages() -> None:
    for package in ("torch", "h5py", "onnx"):
        pytest.importorskip(package)
    if importlib.util.find_spec("coremltools") is None:
        pytest.skip("coremltools is not installed")


@pytest.mark.long
@linux
def test_mutated_files() -> None:
    program = Path(__file__).parents[1] / "fuzz_convert.py"
    done = subprocess.run(
        [sys.executable, str(program), "--count", str(100 * len(FORMATS)), "--jobs", "2"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tally = {name: int(count) for count, name in re.findall(r"^ *(\d+)  (.*)$", done.stdout, re.M)}
    for name in FORMATS:  # mutation does something, and not too much
        assert tally[f"{name} read"] > 0, name
        assert tally[f"{name} refused"] > 0, name


class Files:
    """A file of npz's name that is not read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mutated(self, name: str, random: np.random.Generator) -> Path:
        path = self.folder / "inside" / "a.npz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        return path


@pytest.fixture
def cases(tmp_path: Path) -> Any:
    made = object.__new__(fuzz_convert.Cases)
    made.files, made.watch = Files(tmp_path), fuzz_convert.Watch()
    return made


def leaks(path: Path) -> Any:
    return {"a": Linear(np.frombuffer(CANARY * 8, np.float32).reshape(4, 4))}


def tells(path: Path) -> Any:
    raise ConvertError(f"a: {CANARY.decode()}")


def opens(path: Path) -> Any:
    (path.parents[1] / "outside").write_bytes(b"")
    raise ConvertError("a")


def fails(path: Path) -> Any:
    raise KeyError("a")


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (leaks, "weights hold the content of another file"),
        (tells, "the message holds the content of another file"),
        (opens, "opened .*outside"),
        (fails, "KeyError"),
    ],
)
def test_what_it_looks_for_is_found(monkeypatch: pytest.MonkeyPatch, cases: Any, reader: Any, words: str) -> None:
    monkeypatch.setattr(fuzz_convert, "read", reader)
    with pytest.raises((Broken, KeyError)) as error:
        fuzz_convert.run_format(cases, "npz", 0, Counter())
    assert re.search(words, repr(error.value))
