"""A virtual environment for each program, over the one that runs the command: that has PyTorch and retrograd."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from .declared import TORCH, Program

__all__ = ["InstallationError", "check_torch", "environment"]


class InstallationError(Exception):
    """pip cannot install a program."""


def check_torch() -> None:
    """Raise unless the environment that runs the command has the programs' PyTorch."""
    try:
        found = importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        found = ""
    if found != TORCH:
        has = f"has torch {found}" if found else "does not have torch"
        raise InstallationError(
            f"the environment {has}, and the programs need torch {TORCH}: pip install torch=={TORCH}, or make programs"
        )


def environment(program: Program) -> Path:
    """The interpreter of the program's environment, which is made if it is missing or has other packages."""
    check_torch()
    folder = Path(sys.prefix) / "programs" / program.name
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    shared = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    wanted = "\n".join((*program.packages, *(program.dependencies or ()), *shared))
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    venv.create(folder, clear=True, with_pip=False)
    # A .pth file may have statements: this one also reads the .pth files of the shared folders.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in shared]
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "shared.pth").write_text("".join(lines), encoding="utf-8")
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as constraints:
        constraints.write(f"torch=={TORCH}\n")
        constraints.flush()
        options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--constraint", constraints.name]
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *options]
        if program.dependencies is None:
            commands = [[*pip, *program.packages]]
        else:
            commands = [[*pip, "--no-deps", *program.packages], [*pip, *program.dependencies]]
        for command in commands:
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                said = (run.stderr.strip() or run.stdout.strip() or "it said nothing").splitlines()[-1]
                raise InstallationError(f"pip cannot install {' '.join(program.packages)}: {said}")
    stamp.write_text(wanted, encoding="utf-8")
    return python
