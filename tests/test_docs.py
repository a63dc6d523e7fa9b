"""Every Python block of the documents runs, a document's blocks together and in order; links lead somewhere."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import apple_map
from support.waiting import PATIENCE

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Pages that need an optional package: a module of it, because a folder of tests may have the package's name.
NEEDS = {"jax.md": "jax.numpy", "torch.md": "torch.nn", "quickstart-pytorch.md": "torch.nn"}
SLOW = ("torch.md", "quickstart-pytorch.md", "quickstart-series.md")
# In pages with PyTorch, whose methods have no types.
UNTYPED = re.compile(r'^page_\w*torch\.py.*(untyped function "backward"|Returning Any .* declared to return "Tensor")')
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks_of(document: Path, commands: bool = False) -> list[tuple[int, str]]:
    """(line where it starts, code) of each block of Python, and with `commands` of the shell, as a call of it."""
    text = document.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        language, code = match.groups()
        if language == "sh":
            lines = [line for line in code.splitlines() if not line.startswith("pip install")]
            if not commands or not lines:
                continue
            code = f"__import__('subprocess').run(['bash', '-ec', {chr(10).join(lines)!r}], check=True)\n"
        found.append((text.count("\n", 0, match.start(2)), code))
    return found


def script_of(document: Path, commands: bool = False) -> str:
    """All blocks as one program, in which lines keep their numbers, for tracebacks."""
    script = ""
    for line, code in blocks_of(document, commands):
        script += "\n" * (line - script.count("\n")) + code
    return script


@pytest.mark.parametrize(
    "document",
    [pytest.param(path, marks=pytest.mark.long if path.name in SLOW else ()) for path in DOCUMENTS],
    ids=lambda path: path.name,
)
def test_python_blocks_run(document: Path, tmp_path: Path) -> None:
    """In a process of their own, as a reader would run them, with warnings as errors; of a quickstart, commands too."""
    if document.name in NEEDS:
        pytest.importorskip(NEEDS[document.name])
    path = tmp_path / f"page_{document.stem}.py"  # jax.py would be imported as jax
    path.write_text(script_of(document, commands=document.stem.startswith("quickstart")), encoding="utf-8")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "retrograd"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -W error -m retrograd "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    run = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"},
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.long
def test_python_blocks_have_types(tmp_path: Path) -> None:
    """Someone who checks types strictly, with no configuration, finds no error in what these documents show."""
    pytest.importorskip("mypy")
    pytest.importorskip("torch.nn")
    pytest.importorskip("jax.numpy")
    paths = []
    for document in (*DOCUMENTS, *sorted((ROOT / "examples").glob("nn_*.py"))):
        paths.append(tmp_path / f"page_{document.stem.replace('-', '_')}.py")
        code = script_of(document) if document.suffix == ".md" else document.read_text(encoding="utf-8")
        paths[-1].write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path), "--no-pretty"]
    command += [path.name for path in paths]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=tmp_path)
    assert run.returncode in (0, 1), run.stderr
    errors = [line for line in run.stdout.splitlines() if " error: " in line]
    assert [line for line in errors if not UNTYPED.search(line)] == []


def test_readme_example_lowers_its_loss(capsys: pytest.CaptureFixture[str]) -> None:
    (_, code), *_ = blocks_of(ROOT / "README.md")
    exec(compile(code, "README.md", "exec"), {})
    losses = [float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.01 * losses[0]


WORDS_ALONE = ("glossary.md",)


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.name not in WORDS_ALONE], ids=lambda path: path.name
)
def test_every_document_has_code(document: Path) -> None:
    assert "```python" in document.read_text(encoding="utf-8")


SKELETON = ["Formula", "Arguments", "Gradients", "Limits", "Speed", "Example"]
LAYERS = ["activations", "convolution", "linear", "loss", "normalization", "pooling", "recurrent"]


@pytest.mark.parametrize("name", LAYERS)
def test_layer_pages_have_one_skeleton(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SKELETON
    assert "```python" in text.partition("\n## Example\n")[2]


MENTIONING = [*DOCUMENTS, *(ROOT / name for name in ("CONTRIBUTING.md", "RELEASING.md", "CHANGELOG.md"))]


@pytest.mark.parametrize("document", MENTIONING, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        page = document.parent / name if name else document
        assert page.exists(), f"{target} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target}: no such heading"


def test_apples_names_have_tests_and_the_list_of_files_is_up_to_date() -> None:
    """docs/apple.md lists the test files, and each of Apple's names is in one of them."""
    assert apple_map.main(["--check"]) == 0, "run python tests/support/apple_map.py"


def test_activation_table_is_complete() -> None:
    """Names, numbers and customary parameters in docs/activations.md are those in force."""
    from retrograd.ops.activation import ACTIVATIONS

    text = (ROOT / "docs" / "activations.md").read_text(encoding="utf-8")
    listed = {name: int(code) for code, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)}
    assert listed == {name: kind.code for name, kind in ACTIVATIONS.items()}
    for name, kind in ACTIVATIONS.items():
        (row,) = re.findall(rf"^\| \d+ \| `{name}` \|.*$", text, re.MULTILINE)
        cells = [cell.strip() for cell in row.replace(r"\|", "/").strip("|").split("|")]
        for cell, default in zip(cells[4:6], (kind.alpha, kind.beta), strict=True):
            said = cell.split(",")[0]
            if default is None:
                assert said == "needed", name
            elif default == 0.0:
                assert said == "", name
            else:
                value = {"1/6": 1 / 6, "1/2": 0.5, "√(2/π)": math.sqrt(2 / math.pi)}.get(said)
                assert (float(said) if value is None else value) == default, name


def test_the_table_of_bounds_is_the_one_that_tests_use() -> None:
    from retrograd.lab.bounds import NORM_ROUNDINGS

    lines = (ROOT / "docs" / "numerics.md").read_text().splitlines()
    rows = [[cell.strip() for cell in split_row(line)] for line in lines]
    table = {cells[1]: cells[2:4] for cells in rows if len(cells) > 4}
    for column, double in enumerate((False, True)):
        count = NORM_ROUNDINGS[double]
        z = f"u ({count.product:g} |gamma xhat| + |beta| + |z|)"
        z += f" + {count.mean:g} u |gamma| + {count.var / 2:g} u |gamma xhat|"
        assert table["mean"][column] == f"{count.mean:g} u std"
        assert table["var"][column] == f"{count.var:g} u var"
        assert table["z, before an activation"][column] == z
        assert table["dbeta, dgamma"][column] == f"{count.sum:g} u |sum| + {count.terms:g} u sqrt(sum(term²))"


def split_row(line: str) -> list[str]:
    """The cells of a row of a table, whose escaped bars are text."""
    return [cell.replace("\0", "|") for cell in line.replace("\\|", "\0").split("|")]


def test_apple_md_cites_nothing_that_is_not_here() -> None:
    text = (ROOT / "docs" / "apple.md").read_text()
    assert not re.search(r"(?i)\bsections? \d|§|\bspec(ification)?\b", text)
