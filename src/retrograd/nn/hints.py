"""What to write instead of names that PyTorch and Keras have, for the errors of their users' first lines."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

__all__ = ["LAYERS", "RECURRENT", "check_arguments", "hints", "instead_of", "instead_of_layer", "message", "missing"]

# Places of hints for keyword arguments.
LAYERS: Final = "options of layers"
RECURRENT: Final = "options of recurrent layers"


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


def check_arguments(layer: type, arguments: Sequence[object], options: Collection[str], place: str) -> None:
    """Raise if a layer's ``__init__`` has no such keyword argument, or there is none and so no arguments.

    The hints at `place` say what to write instead. Arguments of a user's class are Python's to check.
    """
    name, known = layer.__name__, _options(layer)
    if known is None:
        return
    if not known:
        raise TypeError(f"{name} takes no arguments, got {len(arguments) + len(options)}")
    if not layer.__module__.startswith(__package__):
        return
    for option in options:
        if option not in known:
            said = f"{name}: got an unexpected keyword argument {option!r}"
            wanted = re.findall(r"(\w+)=", hints()[place].get(option, ""))
            # A recurrent layer is also told what another kind of cell has.
            raise TypeError(message(place, said, option) if place == RECURRENT or known.issuperset(wanted) else said)


@functools.cache
def _options(layer: type) -> frozenset[str] | None:
    """The arguments of a layer's ``__init__``, self included; empty if it has none, and None if it takes all."""
    names: set[str] = set()
    for base in layer.__mro__[:-1]:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            names.update(p.name for p in parameters)
            if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                return frozenset(names)  # otherwise they go on to the next class
    return None if names else frozenset()


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
