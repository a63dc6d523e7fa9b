"""Standard input in the place of a file, and the widths that commands print in."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import PATIENCE

TEXT = "the cat sees the dog and the dog runs to the house. " * 60
SMALL = ("--hidden", "8", "--embedding", "4", "--batch", "4", "--unroll", "16", "--steps", "40")


def run(
    *arguments: object, cwd: Path, given: bytes = b"", code: int = 0, columns: int = 80, terminal: bool = False
) -> tuple[str, str]:
    """The output and the errors of a command; `given` is its standard input, `terminal` whether errors go to one."""
    environment = {**os.environ, "COLUMNS": str(columns), "PYTHONPATH": str(cwd / "hidden")}
    (cwd / "hidden").mkdir(exist_ok=True)  # matplotlib, whose import takes longer than these runs
    (cwd / "hidden" / "matplotlib.py").write_text("raise ImportError(__name__)")
    master, slave = pty.openpty()
    process = subprocess.run(
        [sys.executable, "-m", "retrograd", *map(str, arguments)],
        cwd=cwd,
        input=given,
        stdout=subprocess.PIPE,
        stderr=slave if terminal else subprocess.PIPE,
        timeout=PATIENCE,
        check=False,
        env=environment,
    )
    errors = os.read(master, 65536) if terminal and process.returncode else process.stderr or b""
    os.close(master)
    os.close(slave)
    assert process.returncode == code, errors
    return process.stdout.decode(), errors.decode().replace("\r\n", "\n")


def test_a_text_on_standard_input_is_saved_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    run("train", "text", "a.txt", *SMALL, "--output", "file", cwd=tmp_path)
    said, _ = run("train", "text", "-", *SMALL, cwd=tmp_path, given=TEXT.encode())
    folder = tmp_path / "runs" / "text-stdin"
    assert "runs/text-stdin/standard-input: 3,120 characters" in said
    assert (folder / "standard-input").read_text() == TEXT
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "file" / "model.safetensors").read_bytes()
    moved = folder.rename(tmp_path / "moved")
    run("train", "text", "--resume", moved, "--steps", "50", cwd=tmp_path)
    assert (moved / "history.csv").read_text().splitlines()[-1].startswith("50,")
    # Another run in its place has no use for it.
    run("train", "text", "a.txt", *SMALL, "--output", moved, "--overwrite", cwd=tmp_path)
    assert not (moved / "standard-input").exists()


def test_standard_input_that_cannot_be_used_leaves_what_was_there(tmp_path: Path) -> None:
    _, errors = run("train", "text", "-", cwd=tmp_path, code=2)
    assert errors == "retrograd: error: -: standard input is empty\n"
    assert not (tmp_path / "runs").exists()
    run("train", "text", "-", *SMALL, "--output", "run", cwd=tmp_path, given=TEXT.encode())
    for given, why in ((b"", "is empty"), (b"abc", "has 3 characters"), (b"a" * 3000, "only one character")):
        _, errors = run(
            "train", "text", "-", *SMALL, "--output", "run", "--overwrite", cwd=tmp_path, given=given, code=2
        )
        assert why in errors
        assert (tmp_path / "run" / "standard-input").read_text() == TEXT
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("model.safetensors", "checkpoint.safetensors", "history.csv", "report.html", "standard-input")
    }
    _, errors = run("train", "text", "-", "-", cwd=tmp_path, given=TEXT.encode(), code=2)
    assert errors == "retrograd: error: -: standard input can be read once, not 2 times\n"


def test_a_prompt_on_standard_input_and_characters_that_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    run("train", "text", "a.txt", *SMALL, "--output", "run", cwd=tmp_path)
    options = ("sample", "run", "--length", "20")
    argument, errors = run(*options, "--prompt", "the dog ", cwd=tmp_path)
    assert errors == ""
    assert run(*options, "--prompt", "-", cwd=tmp_path, given=b"the dog ") == (argument, "")
    said, errors = run(*options, "--prompt", "Größe der dogs", cwd=tmp_path)
    assert said.startswith("Größe der dogs")
    assert errors == (
        "retrograd: warning: the prompt has 3 characters that the model does not know, and reads as unknown: "
        "'G', 'ö', 'ß'\n"
    )


@pytest.mark.parametrize("columns", [80, 40])
def test_lines_fit_the_terminal(tmp_path: Path, columns: int) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    said, _ = run("train", "text", "a.txt", *SMALL, "--output", "run", cwd=tmp_path, columns=columns)
    lines = said.splitlines()
    assert max(map(len, lines)) <= columns
    assert columns < 80 or len([line for line in lines if line]) <= 12
    assert len(re.findall(r"^step 40  loss [\d.]+  validation [\d.]+", said, re.M)) == 1
    (tmp_path / "b.txt").write_text(TEXT[:100])
    _, errors = run("train", "text", "b.txt", cwd=tmp_path, columns=columns, code=2, terminal=True)
    assert max(map(len, errors.splitlines())) <= columns
    assert " ".join(errors.split()).endswith("--batch 4 --unroll 16 would do")


@pytest.mark.parametrize("command", ["train", "train text", "train series", "sample", "forecast"])
def test_help_fits_the_terminal(tmp_path: Path, command: str) -> None:
    said, _ = run(*command.split(), "--help", cwd=tmp_path)
    assert max(map(len, said.splitlines())) <= 80
