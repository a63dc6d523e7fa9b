"""Who may import whom, in Python, in tests and in C++; and that a kernel object exports its table and nothing else.

The kernels are one source compiled for several instruction sets. A function of theirs that other objects could see
would be merged by the linker with its namesakes, and a machine without AVX-512 might be given the AVX-512 one.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from support.tools import tool
from support.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "retrograd"
CORE = ROOT / "src" / "core"
BIND = ROOT / "src" / "bind"

# ---- Python ----------------------------------------------------------------------------------------------------------

SERIES = ("matplotlib", "pandas", "statsforecast")  # the extra `series`
# What each room may import besides the standard library and itself: other rooms, by their path, and packages.
# "retrograd" is the public face of the package.
ROOMS: dict[str, set[str]] = {
    "__init__": {"_starting", "_core", "ops"},
    "__main__": {"cli"},
    "_files": set(),
    "_parser": {"_printing"},
    "_printing": set(),
    "_starting": set(),
    "ops": {"_core", "numpy", "ml_dtypes"},
    "bnns": {"ops", "graph", "convert", "numpy", "ml_dtypes", "safetensors", "coremltools"},
    "mps": {"ops", "numpy", "ml_dtypes"},
    "graph": {"_core", "ops", "retrograd", "numpy"},
    "mpsgraph": {"ops", "graph", "mps", "numpy"},
    # typing_extensions is for type checkers alone
    "nn": {
        "_files",
        "ops",
        "graph",
        "retrograd",
        "convert",
        "numpy",
        "safetensors",
        "torch",
        "rich",
        "typing_extensions",
    },
    "convert": {"_files", "_printing", "nn", "numpy", "safetensors", "torch", "h5py", "onnx", "coremltools"},
    "jax": {"_core", "ops", "numpy"},  # and the package of this name
    "torch": {"ops", "numpy", "lightning", "pytorch_lightning", "sb3_contrib"},  # and the package of this name
    "distributed": {"retrograd", "graph", "nn", "numpy", "mpi4py"},
    "train": {"_files", "_printing", "retrograd", "graph", "nn", "distributed", "numpy", "rich", *SERIES},
    "lab": set(),
    "lab/reference": {"numpy"},
    "lab/cases": {"numpy", "ml_dtypes"},
    "lab/bounds": {"lab/cases", "numpy"},
    "lab/verify": {"_core", "ops", "lab", "lab/reference", "lab/cases", "lab/bounds", "numpy"},
    "lab/declared": {"bnns"},
    "lab/declared_mpsgraph": {"mpsgraph", "lab"},
    "lab/graphs": {"ops", "graph", "lab/cases", "lab/verify", "numpy"},
    "lab/bits": {"_core", "ops", "graph", "retrograd", "lab/cases", "lab/graphs", "lab/verify", "numpy"},
    "lab/bench": {
        *(
            "_core",
            "ops",
            "bnns",
            "mps",
            "mpsgraph",
            "graph",
            "nn",
            "retrograd",
            "_printing",
            "lab/cases",
            "lab/verify",
            "numpy",
            "torch",
            "jax",
        ),
    },
    "lab/programs": {
        *("lab/bench", "numpy", "torch", "retrograd", "pandas", "lightning", "pytorch_lightning"),
        *("darts", "flair", "gluonts", "gymnasium", "kraken", "nam", "neuralforecast", "openunmix"),
        *("pytorch_forecasting", "sb3_contrib", "stable_baselines3", "tianshou", "transformers"),
    },
    "lab/commands": {
        *(
            "_core",
            "_printing",
            "ops",
            "retrograd",
            "lab",
            "lab/bench",
            "lab/bits",
            "lab/cases",
            "lab/programs",
            "lab/verify",
            "numpy",
            "rich",
            "shtab",
        ),
    },
    "cli": {"_parser", "_printing", "_starting", "convert", "train", "retrograd", "lab/commands"},
}
# Only inside functions: importing a module must not import these. A bridge to a framework has the framework's name, and
# imports it.
LAZY = {
    *("matplotlib", "pandas", "statsforecast", "torch", "jax", "rich", "shtab", "ml_dtypes", "safetensors"),
    *("h5py", "onnx", "coremltools", "mpi4py", "lightning", "pytorch_lightning"),
    *("pandas", "darts", "flair", "gluonts", "gymnasium", "kraken", "nam", "neuralforecast", "openunmix"),
    *("pytorch_forecasting", "stable_baselines3", "tianshou", "transformers"),
}


class Import(NamedTuple):
    name: str  # a room, "retrograd", or a package
    line: int
    lazy: bool  # inside a function


def room_of(module: str) -> str:
    """The room of a module given by its path below the package: the longest that holds it."""
    holding = [room for room in ROOMS if module == room or module.startswith(room + "/")]
    return max(holding, key=len) if holding else module.partition("/")[0]


def imports(source: str, path: str) -> Iterator[Import]:
    """Every import of the module at `path` below the package: statements, and import_module with a name."""
    here = path.removesuffix(".py").split("/")[:-1]

    def ours(parts: list[str], names: list[str], line: int, lazy: bool) -> Iterator[Import]:
        """``from parts import names``, where a name may be a module."""
        for name in names:
            inside = "/".join([*parts, name])
            is_module = (PACKAGE / f"{inside}.py").exists() or (PACKAGE / inside).is_dir() or inside == "_core"
            where = inside if is_module else "/".join(parts)
            yield Import(room_of(where) if where else "retrograd", line, lazy)

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name, *parts = alias.name.split(".")
                yield Import(room_of("/".join(parts)) if name == "retrograd" and parts else name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".") if node.module else []
            names = [alias.name for alias in node.names]
            if node.level:
                yield from ours([*here[: len(here) - node.level + 1], *parts], names, node.lineno, lazy)
            elif parts[0] == "retrograd":
                yield from ours(parts[1:], names, node.lineno, lazy)
            else:
                yield Import(parts[0], node.lineno, lazy)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            (name,) = (argument for argument in node.args[:1])
            known = isinstance(name, ast.Constant)
            yield Import(name.value.partition(".")[0] if known else ast.unparse(name), node.lineno, lazy)
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def misplaced(path: str, source: str) -> list[str]:
    room = room_of(path.removesuffix(".py"))
    allowed = ROOMS[room] | {room} | set(sys.stdlib_module_names)
    found = []
    for name, line, lazy in imports(source, path):
        if name not in allowed:
            found.append(f"{path}:{line} imports {name}")
        elif name in LAZY - {room} and not lazy:
            found.append(f"{path}:{line} imports {name} before it is needed")
    return found


MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES)
def test_python_rooms(path: str) -> None:
    assert room_of(path.removesuffix(".py")) in ROOMS
    assert misplaced(path, (PACKAGE / path).read_text()) == []


def test_every_room_is_there() -> None:
    rooms = {room_of(path.removesuffix(".py")) for path in MODULES}
    assert rooms == set(ROOMS)


def test_the_check_sees_what_it_should() -> None:
    source = """
import math, numpy as np
from . import reference
from .. import _core
from ..ops._args import Array
from retrograd.lab.bench import cpu_model
from retrograd import Activation
import torch
def f():
    import jax.numpy
    importlib.import_module("rich.table")
"""
    assert [(i.name, i.lazy) for i in imports(source, "lab/verify.py")] == [
        ("math", False),
        ("numpy", False),
        ("lab/reference", False),
        ("_core", False),
        ("ops", False),
        ("lab/bench", False),
        ("retrograd", False),
        ("torch", False),
        ("jax", True),
        ("rich", True),
    ]
    assert misplaced("lab/reference/norm.py", "import numpy\nfrom ..cases import NormCase") == [
        "lab/reference/norm.py:2 imports lab/cases"
    ]
    early = "lab/cases/norm.py:1 imports ml_dtypes before it is needed"
    assert misplaced("lab/cases/norm.py", "import ml_dtypes") == [early]
    inside = "from . import filter\nfrom ._memory import Array\nfrom .. import _core\nfrom ..mps import MPSMatrix"
    assert misplaced("bnns/_lstm.py", inside) == ["bnns/_lstm.py:3 imports _core", "bnns/_lstm.py:4 imports mps"]
    assert misplaced("ops/linear.py", "from ..lab import cases") == ["ops/linear.py:1 imports lab/cases"]


def test_users_import_no_laboratory() -> None:
    """Nor what is only there for tools: the import of the package and its front ends stays small."""
    code = "import sys, retrograd, retrograd.bnns, retrograd.mps, retrograd.nn\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert not {name for name in run.stdout.split() if name.startswith("retrograd.lab")}


# ---- tests -----------------------------------------------------------------------------------------------------------

TESTS = ROOT / "tests"
TEST_FILES = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py"))
NOT_MIRRORED = {"core", "data", "support"}  # C++ programs, what tests share
MOST_LINES = 800
# Statements, and lines of scripts in strings.
IMPORT_OF_A_TEST = re.compile(
    r"^\s*(from\s+[\w.]*\btest_\w+\s+import|(from\s+[\w.]+\s+)?import\b.*\btest_\w+).*", re.MULTILINE
)


@pytest.mark.parametrize("path", [*TEST_FILES, *(f"core/{path.name}" for path in sorted((TESTS / "core").iterdir()))])
def test_a_test_file_is_short_and_imports_no_other(path: str) -> None:
    source = (TESTS / path).read_text(encoding="utf-8")
    assert [match[0] for match in IMPORT_OF_A_TEST.finditer(source)] == []
    assert len(source.splitlines()) <= MOST_LINES


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from test_nn import random", True),
        ("    from ops.test_nn import random", True),
        ("import test_nn", True),
        ("from ops import test_nn", True),
        ("from support.nn import random", False),
        ("import latest_nn", False),
    ],
)
def test_an_import_of_a_test_is_seen(line: str, found: bool) -> None:
    assert bool(IMPORT_OF_A_TEST.search(f"import numpy\n{line}\n")) is found


def test_folders_of_tests_mirror_the_package() -> None:
    folders = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*") if path.is_dir()}
    extra = {folder for folder in folders if "__pycache__" not in folder and not (PACKAGE / folder).is_dir()}
    assert extra == NOT_MIRRORED


def with_helpers(path: str) -> Iterator[str]:
    """The source of a test, and of what it imports from support, and so on."""
    source = (TESTS / path).read_text(encoding="utf-8")
    yield source
    for name in re.findall(r"^from support\.(\w+) import", source, re.MULTILINE):
        yield from with_helpers(f"support/{name}.py")


@pytest.mark.parametrize("path", [path for path in TEST_FILES if path.startswith("lab/reference/")])
def test_the_oracles_tests_leave_the_engine_alone(path: str) -> None:
    names = {i.name for source in with_helpers(path) for i in imports(source, "tests.py")}
    assert not names & {"_core", "ops", "graph", "lab/verify", "lab/graphs", "lab/bounds"}


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


# What the drivers of each folder of the core may include besides kernels.h and their own.
CORE_ROOMS = {
    "base": set[str](),
    "product": {"base"},
    "norm": {"base"},
    "recurrent": {"base", "product"},
    "conv": {"base", "product"},
    "pooling": {"base"},
    "program": {"base"},
    "dense": {"base", "product", "norm"},  # elementwise cuts arrays into blocks as normalization does
}
DRIVERS = [path for folder in CORE_ROOMS for path in cpp_files(CORE / folder)]


def test_every_folder_of_the_core_is_a_room() -> None:
    folders = {path.name for path in CORE.iterdir() if path.is_dir()}
    assert folders == {*CORE_ROOMS, "kernels"}
    assert {path.name for path in CORE.iterdir() if path.is_file()} == {"kernels.h"}


@pytest.mark.parametrize("path", cpp_files(CORE / "kernels"), ids=lambda path: path.name)
def test_kernels_include_next_to_nothing(path: Path) -> None:
    """Their own headers, the door (kernels.h) and the words (shape.h), intrinsics, and three headers of C."""
    own = {f'"{other.name}"' for other in cpp_files(CORE / "kernels")}
    allowed = own | INTRINSICS | {'"../base/shape.h"', '"../kernels.h"', "<math.h>", "<stddef.h>", "<stdint.h>"}
    assert set(includes(path)) <= allowed


def test_what_kernels_include_includes_nothing_more() -> None:
    assert set(includes(CORE / "kernels.h")) <= {'"base/shape.h"', "<stddef.h>", "<stdint.h>"}
    assert set(includes(CORE / "base" / "shape.h")) <= {"<stddef.h>", "<stdint.h>"}


@pytest.mark.parametrize("path", DRIVERS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_drivers_know_neither_python_nor_the_kernels_inside(path: Path) -> None:
    for name in includes(path):
        assert not PYTHON.search(name)
        if name.startswith('"'):
            inside = (path.parent / name.strip('"')).resolve().relative_to(CORE)
            room = inside.parts[0]
            assert room in {"kernels.h", path.parent.name} | CORE_ROOMS[path.parent.name], name
        in_base = path.parent.name == "base"
        locks = in_base and path.stem == "memory" and name in ("<mutex>", "<pthread.h>")  # callers' threads share it
        locks = locks or (in_base and path.stem == "scratch" and name == "<pthread.h>")  # what each thread keeps
        locks = locks or (path.parent.name == "program" and name == "<atomic>")  # one run at a time
        threads = in_base and path.stem == "parallel"
        assert name not in THREADS or threads or locks, f"{path.name}: only parallel.cpp sees threads"
        assert name not in INTRINSICS or threads  # for its pause instruction


@pytest.mark.parametrize("path", cpp_files(BIND), ids=lambda path: path.name)
def test_bindings_know_the_drivers_only(path: Path) -> None:
    for name in includes(path):
        assert "kernels" not in name
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


def exported(nm: str, compiled: Path) -> set[str]:
    """Global and weak symbols that an object defines."""
    lines = subprocess.run([nm, "-g", compiled], capture_output=True, text=True, check=True).stdout.splitlines()
    symbols = [line.split() for line in lines]
    # The compiler's pointer to the C++ runtime's exception handler: data, and the same in every object.
    return {words[-1] for words in symbols if words[-2] not in "Uw" and not words[-1].startswith("DW.ref.")}


@pytest.mark.long
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
