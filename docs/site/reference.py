"""What the reference lists: the public names of each room, by the module that defines them."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import NamedTuple


class Room(NamedTuple):
    module: str
    guide: str  # the page to read first
    about: str


ROOMS = (
    Room("retrograd", "arrays.md", "Functions of arrays: forward and backward."),
    Room("retrograd.nn", "nn.md", "Layers, losses and optimizers."),
    Room("retrograd.graph", "graph.md", "Functions of tensors, with gradients and programs."),
    Room("retrograd.torch", "torch.md", "Layers for PyTorch models."),
    Room("retrograd.jax", "jax.md", "Layers under JAX's transformations."),
    Room("retrograd.distributed", "distributed.md", "Training on several ranks."),
    Room("retrograd.bnns", "bnns.md", "BNNS, with the names of its C interface. The guide lists the constants."),
    Room("retrograd.mps", "mps.md", "MPS matrices, batch normalization and recurrent layers, with Swift's names."),
    Room("retrograd.mpsgraph", "mpsgraph.md", "MPSGraph, with Swift's names. The guide lists the operations."),
)


def is_shown(value: object) -> bool:
    """Whether a public value has an entry: constants, type aliases and modules have none."""
    return inspect.isclass(value) or inspect.isroutine(value)


def alias_of(name: str, value: object, module: ModuleType) -> str | None:
    """The public name of which this is a second one."""
    first = getattr(value, "__name__", name)
    return first if first != name and getattr(module, first, None) is value and first in module.__all__ else None


def names_of(room: Room) -> dict[str, list[str]]:
    """The public names by the title of the module that defines them."""
    module = importlib.import_module(room.module)
    groups: dict[str, list[str]] = {}
    for name in module.__all__:
        value = getattr(module, name)
        if is_shown(value):
            groups.setdefault(_title(value, module), []).append(name)
    return dict(sorted(groups.items()))


def _title(value: object, module: ModuleType) -> str:
    home = getattr(value, "__module__", None) or module.__name__
    path = home.removeprefix(module.__name__ + ".").removeprefix("retrograd.").split(".")
    word = path[1] if path[0] == "ops" and len(path) > 1 else path[0]
    return word.strip("_").replace("_", " ").capitalize()


def page_of(room: Room) -> str:
    """The page of a room, for mkdocstrings."""
    module = importlib.import_module(room.module)
    guide = room.guide.removesuffix(".md")
    lines = [f"# {room.module}", "", f"{room.about} Read [{guide}](../{room.guide}) first.", ""]
    for title, names in names_of(room).items():
        lines += [f"## {title}", ""]
        for name in names:
            first = alias_of(name, getattr(module, name), module)
            if first is None:
                lines += [f"::: {room.module}.{name}", ""]
            else:
                lines += [f"`{name}` is [`{first}`][{room.module}.{first}].", ""]
    return "\n".join(lines)


def entry_of(name: str, place: str) -> str | None:
    """The full name of the entry that a docstring's reference means, if there is one. `place` is where it stands."""
    inner = [room.module for room in ROOMS[1:] if place.startswith(room.module + ".")]
    parts = name.removeprefix("retrograd.").split(".")
    wanted = [(module, parts) for module in [*inner, "retrograd"]]
    if f"retrograd.{parts[0]}" in (room.module for room in ROOMS):
        wanted.append((f"retrograd.{parts[0]}", parts[1:]))
    for module_name, path in wanted:
        module = importlib.import_module(module_name)
        if path and path[0] in module.__all__ and is_shown(value := getattr(module, path[0])):
            return ".".join([module_name, alias_of(path[0], value, module) or path[0], *path[1:]])
    return None
