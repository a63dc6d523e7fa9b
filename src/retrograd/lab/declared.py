"""What is written from the declarations of retrograd.bnns: its type stubs, and the table of functions in the docs.

    python -m retrograd.lab.declared src/retrograd/bnns/{__init__,_constants,_graph_methods}.pyi docs/bnns.md

``make lint`` runs it with ``--check``, which fails if a file is not as this module writes it. The stub imports what
type checkers see in the modules of the package, and spells out what is made when they are imported. The stub of the
constants has all of them.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .. import bnns
from ..bnns import _constants, _declare
from ..bnns._filter import BNNSFilter
from ..bnns._graph_methods import REFLECTED
from ..bnns._graph_operations import KINDS, OPERATIONS, OPERATORS
from ..bnns._graph_values import ENUMERATIONS
from ..bnns._swift import NAMESPACE
from ..bnns._swift_values import ArithmeticBinaryFunction, ArithmeticUnaryFunction, RelationalOperator

_MARKS: Final = "<!-- functions: written by retrograd.lab.declared -->", "<!-- end of functions -->"
_GRAPH_MARKS: Final = "<!-- operations: written by retrograd.lab.declared -->", "<!-- end of operations -->"
_SUBJECTS: Final = {  # modules whose names say too little
    "apply": "all filters",
    "filter": "all filters",
    "rearrange": "bands, comparisons, shuffles, tiles",
    "sample map": "dropout, padding, permutation",
    "topk": "largest values",
}
_PUBLIC: Final[list[str]] = sorted(vars(bnns)["__all__"])
# Enumerations that are made from a list of cases, which type checkers do not see.
_LISTED: Final = (ArithmeticBinaryFunction, ArithmeticUnaryFunction, RelationalOperator)


def is_made(member: Any) -> bool:
    """Whether a function was made from a declaration, so that type checkers do not see its arguments."""
    function = inspect.unwrap(getattr(member, "__func__", member))
    return inspect.isfunction(function) and function.__code__.co_filename in (_declare.DECLARED, _declare.__file__)


# ---- the stubs ------------------------------------------------------------------------------------------------------


def constants() -> str:
    public = {name: value for name, value in vars(_constants).items() if not name.startswith("_")}
    shown = [f"{name} = {value if value < 0x10000 else hex(value)}" for name, value in public.items()]
    return "\n".join(["# Written by retrograd.lab.declared.", *shown, ""])


def stub() -> str:
    imports: dict[str, set[str]] = {}
    functions: list[str] = []
    members: list[str] = []
    for name in _PUBLIC:
        value = getattr(bnns, name)
        if is_made(value):
            functions.append(_function(name, value, ""))
        elif callable(value) and name != "BNNS":
            imports.setdefault(value.__module__, set()).add(f"{name} as {name}")
    for key in sorted(NAMESPACE):
        value = getattr(bnns.BNNS, key)
        if is_made(value):
            members += ["    @staticmethod", _function(key, value, "    ")]
            continue
        imports.setdefault(value.__module__, set()).add(f"{value.__name__} as _{value.__name__}")
        members += _swift_class(key, value) if isinstance(value, type) else [f"    {key} = staticmethod(_{key})"]
    lines = ["# Written by retrograd.lab.declared.", "import enum", "from collections.abc import Sequence"]
    lines += ["from typing import Any, ClassVar, TypeAlias", "", "from ._constants import *"]
    for module, names in sorted(imports.items()):
        lines.append(f"from .{module.rpartition('.')[2]} import {', '.join(sorted(names))}")
    return "\n".join([*lines, "", *functions, "", "class BNNS:", *members, ""])


def _swift_class(key: str, kind: type) -> Iterator[str]:
    """A member of Swift's namespace: the class of another module, with what is made for it."""
    if issubclass(kind, enum.IntEnum) and kind in _LISTED:
        yield f"    class {key}(enum.IntEnum):"
        yield from (f"        {case.name} = {case.value}" for case in kind)
        return
    cases, methods, own, seen = [], [], [], True
    for name in dir(kind) if not issubclass(kind, enum.Enum) else ():
        value = inspect.getattr_static(kind, name)
        if isinstance(value, kind):
            cases.append(f"        {name}: ClassVar[BNNS.{key}]")
            seen = seen and name in kind.__annotations__
        elif isinstance(value, classmethod) and value.__func__.__name__ != name:  # set in a loop
            methods += ["        @classmethod", _function(name, value.__func__, "        ")]
        elif isinstance(value, classmethod) and name[0] != "_" and _returns(value.__func__, kind):
            own += ["        @classmethod", _function(name, value.__func__, "        ")]
        elif is_made(value):
            methods += ["        @classmethod"] * isinstance(value, classmethod)
            methods.append(_function(name, getattr(value, "__func__", value), "        "))
    if seen and not methods:
        yield f"    {key}: TypeAlias = _{kind.__name__}"
    else:
        yield f"    class {key}(_{kind.__name__}):"
        yield from cases
        for line in methods + own:  # they return the class of this name
            yield line.replace(f" -> _{kind.__name__}:", f" -> BNNS.{key}:")


def _returns(function: Any, kind: type) -> bool:
    return bool(inspect.signature(function).return_annotation == kind.__name__)


def _function(name: str, function: Any, indent: str) -> str:
    parts: list[str] = []
    signature = inspect.signature(function)
    for one in signature.parameters.values():
        is_rest = one.kind is inspect.Parameter.VAR_POSITIONAL
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        annotation = "" if one.name in ("self", "cls") else f": {_type(one.annotation)}"
        default = "" if one.default is inspect.Parameter.empty else " = ..."
        parts.append(f"{'*' * is_rest}{one.name}{annotation}{default}")
    return f"{indent}def {name}({', '.join(parts)}) -> {_type(signature.return_annotation)}: ..."


def _type(annotation: Any) -> str:
    """An annotation as the stub writes it."""
    if annotation is None:
        return "None"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    swift = {value.__name__ for value in NAMESPACE.values() if isinstance(value, type)}
    listed = {kind.__name__ for kind in _LISTED}
    filters = {kind.__name__ for kind in _subclasses(BNNSFilter)}

    def named(match: re.Match[str]) -> str:
        outer, _, name = match[0].rpartition(".")
        owner = outer.rpartition(".")[2]
        if owner in swift:
            return f"_{owner}.{name}"
        if name in swift:
            return f"BNNS.{name}" if name in listed else f"_{name}"
        return "BNNSFilter" if name in filters else name

    return re.sub(r"[A-Za-z_][\w.]*", named, text).replace("NoneType", "None")


def _subclasses(kind: type) -> Iterator[type]:
    one: type
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


# ---- the table of the docs ------------------------------------------------------------------------------------------


def table() -> str:
    """A row for each subject: its C functions with their arguments and the first sentence of their docstrings."""
    subjects: dict[str, list[str]] = {}
    for name in _PUBLIC:
        function = getattr(bnns, name)
        if not inspect.isfunction(function) or not name.startswith("BNNS"):
            continue
        first = " ".join((function.__doc__ or "").split("\n\n")[0].split())
        sentence = re.split(r"(?<=\.) (?=[A-Z0-9`])", first)[0]
        shown = sentence.replace("|", "\\|").replace("``", "`").replace(":func:", "")
        arguments = ", ".join(inspect.signature(function).parameters)
        call = f"`{name}`" + f" ({arguments})" * (arguments != "layer_params, filter_params")
        subject = function.__module__.rpartition("._")[2].removesuffix("_filter").replace("_", " ")
        subjects.setdefault(_SUBJECTS.get(subject, subject), []).append(f"{call}: {shown}")
    rows = [f"| {subject} | {'<br>'.join(calls)} |" for subject, calls in sorted(subjects.items())]
    return "\n".join(["| subject | functions |", "|---|---|", *rows])


def operations() -> str:
    """A row for each group of the operations of BNNSGraph's tensors."""
    groups: dict[str, list[str]] = {}
    for one in OPERATIONS.values():
        labels = ", ".join(f"{label.name}{'?' * label.optional}" for label in one.labels)
        doc = one.doc.replace("``", "`").replace("|", "\\|")
        call = f"`{one.name}`" if one.group == "operators" and one.name in OPERATORS else f"`{one.name}` ({labels})"
        groups.setdefault(one.group, []).append(f"{call.replace('|', chr(92) + '|')}: {doc}")
    rows = [f"| {group} | {'<br>'.join(calls)} |" for group, calls in groups.items()]
    return "\n".join(["| group | operations |", "|---|---|", *rows])


def methods() -> str:
    """The stub of the methods of BNNSGraph's tensors."""
    lines = [
        "# Written by retrograd.lab.declared.",
        "from collections.abc import Sequence",
        "from typing import Any, NamedTuple",
    ]
    lines += ["", "import numpy.typing as npt", "", "from ._graph_builder import Tensor"]
    kinds = sorted({label.kind for one in OPERATIONS.values() for label in one.labels if label.kind in ENUMERATIONS})
    lines += [f"from ._graph_values import {', '.join(f'{kind} as {kind}' for kind in kinds)}", ""]
    results = dict.fromkeys(one.results for one in OPERATIONS.values() if one.results)
    for names in results:
        lines += [f"class {_results_name(names)}(NamedTuple):", *(f"    {name}: Tensor" for name in names), ""]
    lines += ["REFLECTED: tuple[str, ...]", "RESULTS: dict[tuple[str, ...], Any]", "", "class Methods:"]
    for one in OPERATIONS.values():
        answer = _results_name(one.results) if one.results else "Tensor"
        if one.name in OPERATORS:
            name, other = OPERATORS[one.name], ", other: Tensor | npt.ArrayLike" * bool(one.labels)
            ignored = "  # type: ignore[override]" if name in ("eq", "ne") else ""
            lines.append(f"    def __{name}__(self{other}) -> Tensor: ...{ignored}")
            if name in REFLECTED:
                lines.append(f"    def __r{name}__(self{other}) -> Tensor: ...")
            continue
        parts = ["self"]
        for label in one.labels:
            if not label.positional and "*" not in parts:
                parts.append("*")
            kind = "Tensor | npt.ArrayLike" if label.kind == "tensor" else _type(KINDS[label.kind].annotation)
            kind = label.kind if label.kind in ENUMERATIONS else "npt.DTypeLike" if label.kind == "dtype" else kind
            default = "" if label.default is inspect.Parameter.empty else " = ..."
            parts.append(f"{label.name}: {kind}{' | None' * label.optional}{default}")
        lines.append(f"    def {one.name}({', '.join(parts)}) -> {answer}: ...")
    return "\n".join([*lines, ""])


def _results_name(names: tuple[str, ...]) -> str:
    return "".join(name[0].upper() + name[1:] for name in names)


def written(path: Path) -> str:
    """The text of a file as it should be."""
    if path.suffix == ".pyi":
        makers = {"_constants": constants, "_graph_methods": methods}
        return makers.get(path.stem, stub)()
    text = path.read_text(encoding="utf-8")
    for (start, end), made in ((_MARKS, table()), (_GRAPH_MARKS, operations())):
        before, mark, rest = text.partition(start)
        if not mark:
            raise SystemExit(f"{path} has no line {start!r}")
        text = f"{before}{mark}\n\n{made}\n\n{end}{rest.partition(end)[2]}"
    return text


def main(arguments: list[str]) -> int:
    """Write the files, or with ``--check`` say which of them differ."""
    differing = []
    for path in (Path(argument) for argument in arguments if argument != "--check"):
        text = written(path)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        differing.append(path)
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    if "--check" in arguments and differing:
        command = f"python -m retrograd.lab.declared {' '.join(map(str, differing))}"
        print(f"{', '.join(map(str, differing))}: not what the declarations say; run {command}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
