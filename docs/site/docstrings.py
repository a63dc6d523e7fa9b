"""A griffe extension: docstrings as Markdown, and the functions that the source does not spell out.

Functions that are made from tables and declarations have no `def` with their arguments, which is what griffe reads;
theirs come from the imported package.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import griffe

from retrograd.bnns._structures import Structure
from retrograd.mpsgraph._declare import Row
from retrograd.mpsgraph._types import Descriptor, Setting

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROLE = re.compile(r":(?:func|class|meth|mod|data):`(~?)([\w.]+)`")
CODE_FOLLOWS = re.compile(r"^\s*::\n|(?<=\S):(:)$", re.MULTILINE)  # before an indented block


class Docstrings(griffe.Extension):  # type: ignore[misc]
    """References such as :func:`lstm_backward` become links, if the reference has an entry."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if isinstance(obj, griffe.Function):
            obj.parameters = griffe.Parameters(*(one for one in obj.parameters if not is_private(one.name)))
        if isinstance(obj, griffe.Attribute) and (declared := setting_of(obj.value)):
            obj.annotation, obj.value = declared[:2]
            obj.docstring = griffe.Docstring(declared[2], parent=obj)
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
                elif inspect.isclass(value):
                    self.complete(target[name], f"{room.module}.{name}", value)

    def complete(self, found: griffe.Object | griffe.Alias, path: str, value: type) -> None:
        """Add to a class what its source does not spell out, and take away a constructor that is not for users."""
        shown = found.final_target if isinstance(found, griffe.Alias) else found
        if not isinstance(shown, griffe.Class):  # a second name
            return
        if path in reference.RESULTS:
            shown.members.pop("__init__", None)
        elif fields := fields_of(value):
            shown.set_member("__init__", griffe.Function("__init__", parameters=fields, parent=shown, lineno=1))
        if shown.docstring is None and value.__doc__:  # a stub has none
            shown.docstring = griffe.Docstring(markdown(inspect.getdoc(value) or "", path), parent=shown)
        if value is reference.MPSGraph:
            for named in reference.operations().values():
                for name, rows in named.items():
                    shown.set_member(name, method_of(name, rows, shown))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def fields_of(value: type) -> griffe.Parameters | None:
    """The constructor's parameters, of classes that take their fields by name."""
    kinds = griffe.ParameterKind
    if issubclass(value, Structure):
        named, kind = dict.fromkeys(value._fields, "..."), kinds.positional_or_keyword
    elif issubclass(value, Descriptor):
        settings = {name: one for base in value.__mro__ for name, one in vars(base).items() if isinstance(one, Setting)}
        named, kind = {name: default_of(one) for name, one in settings.items()}, kinds.keyword_only
    else:
        return None
    return griffe.Parameters(*(griffe.Parameter(name, kind=kind, default=text) for name, text in named.items()))


def default_of(setting: Setting[Any]) -> str:
    value = setting.default
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def method_of(name: str, rows: Sequence[Row], parent: griffe.Class) -> griffe.Function:
    """A method of MPSGraph, with its signatures from the type stub and its names and description from the table."""
    forms = parent.overloads.get(name) or [parent.members[name]]
    method = forms[0]
    assert isinstance(method, griffe.Function)
    if len(forms) > 1:
        method = griffe.Function(name, parameters=method.parameters, parent=parent, lineno=1)
        method.overloads = forms
    about = dict.fromkeys(row.doc for row in rows)
    spelled = "\n".join(f"- `{row.spelled}`, `{row.selector}`" for row in rows)
    text = markdown("\n\n".join([*about, spelled]), f"{parent.path}.{name}")
    method.docstring = griffe.Docstring(text, parent=method)
    return method


def setting_of(value: griffe.Expr | str | None) -> tuple[str, str, str] | None:
    """The type, default and description of a class attribute that is declared as ``Setting[type](check, ...)``."""
    match ast.parse(str(value), mode="eval").body if "Setting[" in str(value) else None:
        case ast.Call(func=ast.Subscript(slice=kind), args=[_, default, ast.Constant(value=str(text))]):
            return ast.unparse(kind), ast.unparse(default), text
    return None


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
