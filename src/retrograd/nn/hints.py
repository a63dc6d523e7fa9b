"""What to write instead of names that PyTorch and Keras have, for the errors of their users' first lines."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["check_arguments", "hints", "instead_of", "instead_of_layer", "message", "missing"]


@functools.cache
def hints() -> dict[str, dict[str, str]]:
    """What to write, by the place where a name is looked up, and the name."""
    found: dict[str, dict[str, str]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            names = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            keys, _, text = line.partition(": ")
            names.update(dict.fromkeys(keys.split(), text))
    return found


def missing(place: str) -> Callable[[Any, str], NoReturn]:
    """The ``__getattr__`` of a class: the usual error, and what to write instead if that is known."""

    def look_up(self: Any, name: str) -> NoReturn:
        raise AttributeError(message(place, f"{type(self).__name__!r} object has no attribute {name!r}", name))

    return look_up


def message(place: str, text: str, name: str) -> str:
    hint = hints()[place].get(name)
    return f"{text}; write {hint}" if hint is not None and not hint.startswith("nothing") else text + _no_need(hint)


def check_arguments(layer: type, arguments: Sequence[object], options: Iterable[str]) -> None:
    """Raise if a layer's ``__init__`` has no such keyword argument, or there is none and so no arguments."""
    name = layer.__name__
    if layer.__init__ is object.__init__:  # type: ignore[misc]
        raise TypeError(f"{name} takes no arguments, got {len(arguments) + len(tuple(options))}")
    known = _options(layer)
    if known is None or not layer.__module__.startswith(__package__):
        return  # those of a user's class are Python's to check
    for option in options:
        if option not in known:
            said = f"{name}: got an unexpected keyword argument {option!r}"
            if _OF_RECURRENT in known:
                raise TypeError(message("options of recurrent layers", said, option))
            takes = re.findall(r"(\w+)=", hints()["options of layers"].get(option, ""))
            raise TypeError(message("options of layers", said, option) if known.issuperset(takes) else said)


_OF_RECURRENT = "recurrent_dropout"


@functools.cache
def _options(layer: type) -> frozenset[str] | None:
    """The keyword arguments of a layer, or None if it takes all."""
    names: set[str] = set()
    for kind in layer.__mro__[:-1]:
        if "__init__" in kind.__dict__:
            parameters = inspect.signature(kind.__dict__["__init__"]).parameters.values()
            names.update(p.name for p in parameters)
            if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                return frozenset(names)  # otherwise they go on to the next class
    return None


def _no_need(hint: str | None) -> str:
    return "" if hint is None else f"; there is no need for it: {hint.removeprefix('nothing').lstrip(': ')}"


def instead_of_layer(given: object) -> str:
    """What something is that was given for a layer, and what to write."""
    if isinstance(given, type):
        return f"the class {given.__name__}; write {given.__name__}()"
    if isinstance(given, (list, tuple)):
        return f"a {type(given).__name__}; write Sequential(*layers)"
    hint = "; for a function, write a module whose forward calls it" if callable(given) else ""
    return f"a {type(given).__name__}, must be a Module{hint}"


def instead_of_model(given: object) -> str:
    """What something is that was given for a model, and what to write."""
    kind = type(given)
    if kind.__module__.startswith("torch") or any(base.__module__.startswith("torch.nn") for base in kind.__mro__):
        return f"PyTorch's {kind.__name__}; write nn.from_torch(model)"
    return instead_of_layer(given).replace("must be a Module", "must be an nn.Module")


def instead_of(what: str, given: object) -> str:
    """What something is that was given for a "loss" or an "optimizer", and what to write."""
    usual = {"loss": "nn.MeanSquaredError()", "optimizer": "nn.Adam(model, 1e-3)"}[what]
    if isinstance(given, type):
        return f"the class {given.__name__}; write nn.{given.__name__}({'' if what == 'loss' else 'model, 1e-3'})"
    if isinstance(given, str):
        return f"{given!r}; write {hints()[what].get(given.lower(), usual + ', for example')}"
    wanted = "a loss, a function, or None" if what == "loss" else f"an optimizer such as {usual}"
    return f"a {type(given).__name__}, must be {wanted}"
