"""Shell completion: the scripts know every command and option, and the shells accept and use them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrograd import cli
from support.waiting import PATIENCE

pytest.importorskip("shtab")


def options_of(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each command's path with each of its commands and options."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield path, name
                yield from options_of(command, (*path, name))
        elif action.help != argparse.SUPPRESS:
            yield from ((path, name) for name in action.option_strings)


EVERYTHING = sorted(options_of(cli._parser()))


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script of each shell, as the command prints it."""
    found = {}
    for shell in ("bash", "zsh", "fish"):
        command = [sys.executable, "-W", "error", "-m", "retrograd", "completion", shell]
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        found[shell] = tmp_path_factory.mktemp("completion") / f"retrograd.{shell}"
        found[shell].write_text(run.stdout, encoding="utf-8")
    return found


def of_shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_read_its_script(shell: str, scripts: dict[str, Path]) -> None:
    run(of_shell(shell), "-n", str(scripts[shell]))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_in_the_script(shell: str, scripts: dict[str, Path]) -> None:
    text = scripts[shell].read_text(encoding="utf-8")
    assert len(EVERYTHING) > 200
    for path, name in EVERYTHING:
        spelled = f"-l {name[2:]} " if shell == "fish" and name.startswith("--") else name
        assert spelled in text, (path, name)


def completed_by_bash(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    typed = " ".join(f"'{word}'" for word in ("retrograd", *words))
    lines = f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _shtab_retrograd; echo ${{COMPREPLY[@]}}"
    return run(of_shell("bash"), "--norc", "-c", lines).split()


def test_bash_completes_every_command_and_option(scripts: dict[str, Path]) -> None:
    offered: dict[tuple[str, ...], set[str]] = {}
    for path in {path for path, _ in EVERYTHING}:
        offered[path] = {word for start in ("", "-") for word in completed_by_bash(scripts["bash"], *path, start)}
    assert [(path, name) for path, name in EVERYTHING if name not in offered[path]] == []


def test_fish_completes_every_command_and_option(scripts: dict[str, Path]) -> None:
    paths = sorted({path for path, _ in EVERYTHING})
    lines = [f"source {scripts['fish']}"]
    for number, path in enumerate(paths):
        for start in ("", "-"):  # the description is after a tab
            lines.append(f"complete -C 'retrograd {' '.join((*path, start))}' | string replace -r '^' '{number} '")
    shown = run(of_shell("fish"), "--no-config", "-c", "\n".join(lines))
    offered = {
        (paths[int(number)], word.split("\t")[0])
        for number, _, word in (line.partition(" ") for line in shown.splitlines())
    }
    assert [(path, name) for path, name in EVERYTHING if (path, name) not in offered] == []


def test_arguments_that_are_files_complete_as_files(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "sales.csv").touch()
    found = completed_by_bash(scripts["bash"], "bench", "norm", "--csv", f"{tmp_path}/sa")
    assert found == [f"{tmp_path}/sales.csv"]
    assert completed_by_bash(scripts["bash"], "bench", "compare", f"{tmp_path}/sa") == found


def test_without_shtab_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert "pip install 'retrograd[completion]'" in capsys.readouterr().err
