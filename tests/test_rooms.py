"""Who may import whom, in Python and in C++, and that a kernel object exports its table and nothing else.

The kernels are one source compiled for several instruction sets. A function of theirs that other objects could see
would be merged by the linker with its namesakes, and a machine without AVX-512 might be given the AVX-512 one.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from waiting import PATIENCE

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "retrograd"
CORE = ROOT / "src" / "core"
BIND = ROOT / "src" / "bind"

# ---- Python ----------------------------------------------------------------------------------------------------------

# What each module may import besides the standard library. Ours are named with a dot; "retrograd" is the whole package.
FUNCTIONS = {
    ".normalization",
    ".recurrent",
    ".activation",
    ".elementwise",
    ".linear",
    ".loss",
    ".optimizer",
    "retrograd",
}
ROOMS: dict[str, set[str]] = {
    "__init__": {"._core", "._memory", "._threads"} | (FUNCTIONS - {"retrograd"}),
    "__main__": {".cli"},
    "_threads": {"._core"},
    "_memory": {"._core", "numpy"},
    "_buffers": {"numpy", "ml_dtypes"},
    "_overlap": {"numpy"},
    "activation": set(),
    "_args": {"._core", "._memory", "._overlap", "._threads", ".activation", "numpy"},
    "elementwise": {"._core", "._args", "._memory", ".activation", "numpy"},
    "linear": {"._core", "._args", "._memory", "numpy"},
    "loss": {"._core", "._args", "._memory", "numpy"},
    "normalization": {"._core", "._args", "._memory", "._overlap", ".activation", "numpy"},
    "recurrent": {"._core", "._args", "._memory", "._overlap", ".activation", "numpy"},
    "optimizer": {"._core", "._args", "numpy"},
    "bnns": {
        "._buffers",
        "._overlap",
        ".activation",
        ".elementwise",
        ".normalization",
        ".optimizer",
        ".recurrent",
        "numpy",
        "ml_dtypes",
    },
    "mps": {"._buffers", "._overlap", ".activation", ".elementwise", ".normalization", "numpy", "ml_dtypes"},
    "nn": {"numpy", "safetensors", "retrograd"},
    "train": {".nn", "numpy", "rich", "matplotlib", "retrograd"},
    "reference": {"numpy"},
    "cases": {"numpy", "ml_dtypes"},
    "verify": {"._core", ".reference", ".cases", "numpy"} | FUNCTIONS,
    "bench_apple": {".bnns", ".mps", "._args", ".cases", "numpy"} | FUNCTIONS,
    "bench_train": {".nn", "._args", "numpy", "torch"},
    "bench": {".bench_apple", ".bench_train", "._core", "._args", ".cases", ".verify", "numpy", "torch"} | FUNCTIONS,
    "cli": {".train", "._core", "._threads", ".reference", ".cases", ".verify", ".bench", "numpy", "rich", "torch"}
    | FUNCTIONS,
}
# Only inside functions: importing a module must not import these.
LAZY = {"matplotlib", "torch", "jax", "rich", "ml_dtypes", "mpi4py", "safetensors", "scipy"}


class Import(NamedTuple):
    name: str
    line: int
    lazy: bool  # inside a function


def imports(source: str, depth: int = 1) -> Iterator[Import]:
    """Every import of a module of the package: statements, and import_module with a name.

    `depth` is how many dots lead to the package; fewer lead to neighbours in a package inside it, which are free.
    """

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name.partition(".")[0], node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 0 and module.startswith("retrograd."):
                yield Import("." + module.split(".")[1], node.lineno, lazy)
            elif node.level == 0:
                yield Import(module.partition(".")[0], node.lineno, lazy)
            elif node.level < depth:
                pass
            elif module:
                yield Import("." + module.partition(".")[0], node.lineno, lazy)
            else:  # from . import a, b
                for alias in node.names:
                    yield Import("." + alias.name, node.lineno, lazy)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            (name,) = (argument for argument in node.args[:1])
            assert isinstance(name, ast.Constant), f"line {node.lineno}: imports what only running it would tell"
            yield Import(str(name.value).partition(".")[0], node.lineno, lazy)
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def misplaced(module: str, source: str, depth: int = 1) -> list[str]:
    allowed = ROOMS[module] | set(sys.stdlib_module_names)
    found = []
    for name, line, lazy in imports(source, depth):
        if name not in allowed:
            found.append(f"{module}.py:{line} imports {name}")
        elif name in LAZY and not lazy:
            found.append(f"{module}.py:{line} imports {name} before it is needed")
    return found


def test_every_module_has_a_row() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {path.stem for path in PACKAGE.glob("*.py")} | packages == set(ROOMS)


@pytest.mark.parametrize("module", ROOMS)
def test_python_rooms(module: str) -> None:
    if (PACKAGE / module).is_dir():
        for path in (PACKAGE / module).rglob("*.py"):
            assert misplaced(module, path.read_text(), depth=2) == [], path
    else:
        assert misplaced(module, (PACKAGE / f"{module}.py").read_text()) == []


def test_the_check_sees_what_it_should() -> None:
    source = """
import math, numpy as np
from . import _core, reference
from ._args import Array
from retrograd.bench import cpu_model
import torch
def f():
    import jax.numpy
    importlib.import_module("rich.table")
"""
    assert [(i.name, i.lazy) for i in imports(source)] == [
        ("math", False),
        ("numpy", False),
        ("._core", False),
        (".reference", False),
        ("._args", False),
        (".bench", False),
        ("torch", False),
        ("jax", True),
        ("rich", True),
    ]
    assert misplaced("reference", "import numpy\nfrom .cases import NormCase") == ["reference.py:2 imports .cases"]
    assert misplaced("cases", "import ml_dtypes") == ["cases.py:1 imports ml_dtypes before it is needed"]
    inside = "from . import filter\nfrom ._memory import Array\nfrom .. import _core\nfrom ..mps import MPSMatrix"
    assert misplaced("bnns", inside, depth=2) == ["bnns.py:3 imports ._core", "bnns.py:4 imports .mps"]


@pytest.mark.parametrize("path", sorted((ROOT / "tests").glob("test_reference*.py")), ids=lambda path: path.stem)
def test_the_oracles_tests_leave_the_engine_alone(path: Path) -> None:
    names = {i.name for i in imports(path.read_text())}
    assert not names & ({"._core", "._args", ".verify", ".cases"} | FUNCTIONS - {"retrograd"})


# ---- C++ -------------------------------------------------------------------------------------------------------------

INTRINSICS = {"<immintrin.h>", "<arm_neon.h>"}
THREADS = {
    "<pthread.h>",
    "<sched.h>",
    "<thread>",
    "<mutex>",
    "<shared_mutex>",
    "<condition_variable>",
    "<future>",
    "<omp.h>",
}
PYTHON = re.compile(r"nanobind|Python\.h|pybind|numpy")


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+(<[^>]+>|"[^"]+")', path.read_text(), re.MULTILINE)


def cpp_files(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".h", ".cpp"))
    assert files
    return files


@pytest.mark.parametrize("path", cpp_files(CORE / "kernels"), ids=lambda path: path.name)
def test_kernels_include_next_to_nothing(path: Path) -> None:
    """Their own headers, the door (kernels.h) and the words (shape.h), intrinsics, and three headers of C."""
    own = {f'"{other.name}"' for other in cpp_files(CORE / "kernels")}
    allowed = own | INTRINSICS | {'"../shape.h"', '"../kernels.h"', "<math.h>", "<stddef.h>", "<stdint.h>"}
    assert set(includes(path)) <= allowed


@pytest.mark.parametrize("path", cpp_files(CORE), ids=lambda path: path.name)
def test_drivers_know_neither_python_nor_the_kernels_inside(path: Path) -> None:
    for name in includes(path):
        assert not PYTHON.search(name)
        assert "kernels/" not in name
        assert "cblas" not in name or path.stem == "gemm"
        locks = path.stem == "memory" and name in ("<mutex>", "<pthread.h>")  # callers' threads share it
        locks = locks or (path.stem == "scratch" and name == "<pthread.h>")  # what each thread keeps
        assert name not in THREADS or path.stem == "parallel" or locks, f"{path.name}: only parallel.cpp sees threads"
        assert name not in INTRINSICS or path.stem == "parallel"  # for its pause instruction
    if path.name in ("shape.h", "kernels.h"):  # these the kernels include
        assert set(includes(path)) <= {'"shape.h"', "<stddef.h>", "<stdint.h>"}


@pytest.mark.parametrize("path", cpp_files(BIND), ids=lambda path: path.name)
def test_bindings_know_the_drivers_only(path: Path) -> None:
    for name in includes(path):
        assert "kernels" not in name
        assert "cblas" not in name
        assert name not in THREADS
        assert name not in INTRINSICS
        if name.startswith('"'):
            assert name.startswith('"../core/') or (BIND / name.strip('"')).exists()


# ---- exported symbols ------------------------------------------------------------------------------------------------


class Level(NamedTuple):
    table: str
    name: str
    options: tuple[str, ...]


def levels_of_this_machine() -> list[Level]:
    """What CMakeLists.txt compiles table.cpp with."""
    text = re.sub(r"#[^\n]*", "", (ROOT / "CMakeLists.txt").read_text())
    variables = dict(re.findall(r"\bset\((\w+)\s+([^()]*)\)", text))
    found = {}
    for table, name, options in re.findall(r"^\s*add_kernel_level\((\w+) (\w+)([^)]*)\)", text, re.MULTILINE):
        expanded = re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], options)
        found[name] = Level(table, name, tuple(shlex.split(expanded)))
    assert {"scalar", "avx2", "avx512", "neon"} <= set(found)
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return [found[name] for name in (("scalar", "avx2", "avx512") if x86 else ("scalar", "neon"))]


def tool(*names: str) -> str:
    for name in names:
        if name and shutil.which(name):
            return name
    reason = f"none of {', '.join(filter(None, names))} is installed"
    if os.environ.get("CI"):
        pytest.fail(f"CI is set, and {reason}")
    return pytest.skip(reason)


def exported(nm: str, compiled: Path) -> set[str]:
    """Global and weak symbols that an object defines."""
    lines = subprocess.run([nm, "-g", compiled], capture_output=True, text=True, check=True).stdout.splitlines()
    symbols = [line.split() for line in lines]
    # The compiler's pointer to the C++ runtime's exception handler: data, and the same in every object.
    return {words[-1] for words in symbols if words[-2] not in "Uw" and not words[-1].startswith("DW.ref.")}


def test_a_kernel_object_exports_its_table_alone(tmp_path: Path) -> None:
    """Unoptimised: optimisation inlines, and so hides, what should not be there."""
    compiler, nm = tool(os.environ.get("CXX", ""), "c++", "g++", "clang++"), tool("nm", "llvm-nm")
    running = {}
    for level in levels_of_this_machine():
        target = tmp_path / f"{level.name}.o"
        command = [compiler, "-std=c++17", "-O0", "-fPIC", "-ffp-contract=off", f"-DRG_TABLE={level.table}"]
        command += [f'-DRG_ISA_NAME="{level.name}"', *level.options, "-c", str(CORE / "kernels" / "table.cpp")]
        running[level] = target, subprocess.Popen([*command, "-o", str(target)], stderr=subprocess.PIPE, text=True)
    for level, (target, process) in running.items():
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
        symbols = exported(nm, target)
        assert len(symbols) == 1, symbols
        assert level.table in symbols.pop()


def test_the_check_sees_an_inline_function(tmp_path: Path) -> None:
    compiler, nm = tool(os.environ.get("CXX", ""), "c++", "g++", "clang++"), tool("nm", "llvm-nm")
    source, target = tmp_path / "leak.cpp", tmp_path / "leak.o"
    source.write_text(
        "inline int leak(int x) { return x + 1; }\nextern int (*const table)(int);\nint (*const table)(int) = leak;\n"
    )
    subprocess.run([compiler, "-O0", "-c", source, "-o", target], check=True)
    assert len(exported(nm, target)) == 2
