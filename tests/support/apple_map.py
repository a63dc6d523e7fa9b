"""Which test file covers which of Apple's names: from the tests, for the last section of docs/apple.md.

    python tests/support/apple_map.py                 write the section: the subjects of the test files
    python tests/support/apple_map.py --check         exit with 1 if it is not up to date; so does tests/test_docs.py
    python tests/support/apple_map.py BNNSGather ...  print the file of these names; exit with 1 if one has none

The file of a name is the one of whose mentions of public functions and classes it is the largest share. What the
support modules that a file imports mention counts too. A name that no test mentions is an error.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from types import ModuleType

from retrograd import bnns, mps
from retrograd.lab.pages import replaced

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


def homes(texts: dict[Path, str]) -> dict[str, Path]:
    """The file of each name: the one of whose mentions it is the largest share."""
    names = public_names()
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted(names, key=len, reverse=True)))
    mentions = {path: Counter(pattern.findall(text)) for path, text in texts.items() if path.stem != "test_fuzz"}
    chosen = {}
    for name in names:
        shares = {path: found[name] / found.total() for path, found in mentions.items() if found[name]}
        if not shares:
            raise SystemExit(f"no test mentions {name}")
        chosen[name] = max(shares, key=lambda path: shares[path])
    return chosen


def files() -> dict[str, list[Path]]:
    return {folder: sorted((TESTS / folder).glob("test_*.py")) for folder in ("bnns", "mps")}


def all_homes() -> dict[str, Path]:
    paths = [path for found in files().values() for path in found]
    return homes({path: text_of(path) for path in [*paths, TESTS / "test_examples.py"]})


def section() -> str:
    all_homes()  # raises if a name has none
    lines = []
    for folder, paths in files().items():
        subjects = " ".join(path.stem.removeprefix("test_") for path in paths)
        lines += textwrap.wrap(f"- `tests/{folder}/test_*.py`: {subjects}", 120, subsequent_indent="  ")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if arguments and arguments != ["--check"]:
        found = {name: path for name, path in all_homes().items() if name in arguments}
        for name, path in found.items():
            print(name, path.relative_to(TESTS.parent).as_posix())
        return int(len(found) < len(arguments))
    old = PAGE.read_text(encoding="utf-8")
    new = replaced(old, MARK, section())
    if arguments == ["--check"]:
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
