"""Which test file covers which of Apple's names: the last section of docs/apple.md, written from the tests.

    python tests/support/apple_map.py            write the section
    python tests/support/apple_map.py --check    exit with 1 if it is not up to date; so does tests/test_docs.py

A row is a subject, the test files whose names begin with the same word: their numbers of tests, and the public
functions and classes that make up a larger part of the names one of them mentions than in any other file. What the
support modules that it imports mention counts too. A name that no test mentions is an error.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

from retrograd import bnns, mps
from retrograd.lab.pages import replaced, table

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "apple.md"
MARK = "tests"
STRUCTURES = re.compile(r"BNNS(LayerParameters|Optimizer\w+Fields|Warning$|Filter$|RandomGenerator$)")
RETURNED = {
    "BNNS.FusedLayer",
    "MTLBlitCommandEncoder",
}  # a base class, and what a method returns: no program names them


def public_names() -> list[str]:
    """Apple's functions in C, Swift's classes and functions, and the classes and functions of MPS."""

    def callables(module: ModuleType | type, prefix: str) -> list[str]:
        return [name for name in dir(module) if name.startswith(prefix) and callable(getattr(module, name))]

    c = [name for name in callables(bnns, "BNNS") if not STRUCTURES.match(name) and name != "BNNS"]
    swift = [f"BNNS.{name}" for name in callables(bnns.BNNS, "") if not name.startswith("_")]
    metal = [name for prefix in ("MPS", "MTL", "NSKeyed") for name in callables(mps, prefix)]
    return [name for name in (*c, *swift, *metal) if name not in RETURNED]


def text_of(path: Path) -> str:
    """The file and the support modules that it imports."""
    text = path.read_text(encoding="utf-8")
    modules = re.findall(r"^from support\.(\w+) import", text, re.MULTILINE)
    return "\n".join([text, *((TESTS / "support" / f"{name}.py").read_text(encoding="utf-8") for name in modules)])


def link(path: Path) -> str:
    """The file and its number of tests."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    count = sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in tree.body)
    where = path.relative_to(TESTS.parent).as_posix()
    return f"[{path.stem.removeprefix('test_')}](../{where}) {count}"


def homes(texts: dict[Path, str]) -> dict[str, Path]:
    """The file of each name: the one of whose mentions it is the largest share."""
    names = public_names()
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted(names, key=len, reverse=True)))
    counts = {path: Counter(pattern.findall(text)) for path, text in texts.items() if path.stem != "test_fuzz"}
    found = {}
    for name in names:
        shares = {path: count[name] / count.total() for path, count in counts.items() if count[name]}
        if not shares:
            raise SystemExit(f"no test mentions {name}")
        found[name] = max(shares, key=lambda path: shares[path])
    return found


def section() -> str:
    paths = sorted([*(TESTS / "bnns").glob("test_*.py"), *(TESTS / "mps").glob("test_*.py")])
    texts = {path: text_of(path) for path in [*paths, TESTS / "test_examples.py"]}
    home = homes(texts)
    subjects: dict[tuple[str, str], list[Path]] = {}
    for path in texts:
        subjects.setdefault((path.parent.name, path.stem.split("_")[1]), []).append(path)
    rows, others = [], []
    for files in subjects.values():
        names = [f"`{name}`" for name in home if home[name] in files]
        if names:
            rows.append([", ".join(map(link, files)), ", ".join(names)])
        else:
            others += files
    rows.append([", ".join(map(link, others)), "no other names"])
    return table(["test files, tests", "Apple's names"], rows, "---")


def main(arguments: list[str]) -> int:
    old = PAGE.read_text(encoding="utf-8")
    new = replaced(old, MARK, section())
    if arguments == ["--check"]:
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
