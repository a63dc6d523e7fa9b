"""A griffe extension: docstrings as Markdown, and the functions that the source does not spell out.

Functions that are made from tables and declarations have no `def` with their arguments, which is what griffe reads;
theirs come from the imported package.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROLE = re.compile(r":(?:func|class|meth|mod|data):`(~?)([\w.]+)`")
CODE_FOLLOWS = re.compile(r"^\s*::\n|(?<=\S):(:)$", re.MULTILINE)  # before an indented block


class Docstrings(griffe.Extension):  # type: ignore[misc]
    """References such as :func:`lstm_backward` become links, if the reference has an entry."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        obj.docstring.value = markdown(obj.docstring.value, obj.path)
        if isinstance(obj, griffe.Class) and any("NamedTuple" in str(base) for base in obj.bases):
            fields = ", ".join(f"`{name}`" for name, member in obj.members.items() if is_field(member))
            obj.docstring.value += f"\n\nFields: {fields}."

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for room in reference.ROOMS:
            module = importlib.import_module(room.module)
            target = pkg if room.module == pkg.name else pkg[room.module.removeprefix(pkg.name + ".")]
            for name in module.__all__:
                value = getattr(module, name)
                if inspect.isroutine(value) and (room.module == "retrograd.bnns" or not is_spelled_out(target, name)):
                    hidden = target.members.get(name)
                    if isinstance(hidden, griffe.Module):  # its functions are shown under this module's name
                        for member in hidden.members.values():
                            if isinstance(member, griffe.Object):
                                self.on_object(obj=member)
                    target.set_member(name, function_of(name, value, target))


def is_field(member: griffe.Object | griffe.Alias) -> bool:
    return member.is_attribute and member.annotation is not None and "property" not in member.labels


def is_spelled_out(module: griffe.Module, name: str) -> bool:
    """Whether the source has a definition of this name. A submodule of the same name hides one."""
    found = module.members.get(name)
    while isinstance(found, griffe.Alias):
        found = found.target
    return found is not None and found.kind is griffe.Kind.FUNCTION


def function_of(name: str, value: Any, parent: griffe.Module) -> griffe.Function:
    """What griffe would have read, from the function itself."""
    empty = inspect.Signature.empty
    signature = inspect.signature(value)
    kinds = dict(zip(inspect._ParameterKind, griffe.ParameterKind, strict=True))
    parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                found.name,
                kind=kinds[found.kind],
                annotation=None if found.annotation is empty else shown(found.annotation),
                default=None if found.default is empty else repr(found.default),
            )
            for found in signature.parameters.values()
        )
    )
    result = None if signature.return_annotation is empty else shown(signature.return_annotation)
    function = griffe.Function(name, parameters=parameters, returns=result, parent=parent, lineno=1, endlineno=1)
    text = inspect.getdoc(value)
    if text:
        function.docstring = griffe.Docstring(markdown(text, f"{parent.path}.{name}"), parent=function)
    return function


def shown(annotation: Any) -> str:
    """An annotation with the last part of each name."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def markdown(text: str, place: str) -> str:
    """A docstring of reStructuredText as Markdown."""

    def link(match: re.Match[str]) -> str:
        words = match[2].rsplit(".", 1)[-1] if match[1] else match[2]
        entry = reference.entry_of(match[2], place)
        return f"[`{words}`][{entry}]" if entry else f"`{words}`"

    return CODE_FOLLOWS.sub(lambda match: match[1] or "", ROLE.sub(link, text))
