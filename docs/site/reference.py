"""What the reference lists: the public names of each room, by the module that defines them."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import NamedTuple

from retrograd.mpsgraph import MPSGraph
from retrograd.mpsgraph._declare import ROWS, Row
from retrograd.mpsgraph._left_out import LEFT_OUT


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
    Room("retrograd.mpsgraph", "mpsgraph.md", "MPSGraph, with Swift's names."),
)
# How words of modules' names are written in titles.
WORDS = {"lstm": "LSTM", "mps": "MPS", "optim": "Optimizers", "pytorch": "PyTorch", "rnn": "RNN", "topk": "Top k"}
# Classes whose objects are results of calls, by their full names. Their constructors are not for users.
RESULTS = frozenset(
    {
        *(f"retrograd.graph.{name}" for name in ("Node", "Program", "ResultView", "Symbol", "Tensor")),
        *(f"retrograd.bnns.{name}" for name in ("BNNSFilter", "BNNSNearestNeighbors", "BNNSRandomGenerator")),
        *(f"retrograd.mps.MTL{name}" for name in ("BlitCommandEncoder", "Buffer", "CommandBuffer", "CommandQueue")),
        *(f"retrograd.mps.MPS{name}" for name in ("RNNMatrixTrainingState", "RNNRecurrentMatrixState", "State")),
        *(f"retrograd.mpsgraph.MPSGraph{name}" for name in ("Executable", "Operation", "Tensor", "VariableOp")),
        "retrograd.distributed.Shard",
        "retrograd.torch.Patch",
    }
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
    own = home.startswith(module.__name__ + ".") and module.__name__ != "retrograd"
    path = home.removeprefix(module.__name__ + ".").removeprefix("retrograd.").split(".")
    words = (path[0] if own or len(path) == 1 else path[1]).strip("_").split("_")
    text = " ".join(WORDS.get(word, word) for word in words)
    return text[:1].upper() + text[1:]


def operations() -> dict[str, dict[str, list[Row]]]:
    """The methods of MPSGraph that its table declares: their rows by the title of their group, and by name."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in ROWS:
        if not row.selector_only:
            groups.setdefault(row.group, {}).setdefault(row.method, []).append(row)
    return groups


def _methods_of_graphs() -> list[str]:
    """The other public methods of MPSGraph."""
    declared = {name for names in operations().values() for name in names}
    return [name for name in dir(MPSGraph) if not name.startswith("_") and name not in declared | set(LEFT_OUT)]


def page_of(room: Room) -> str:
    """The page of a room, for mkdocstrings."""
    module = importlib.import_module(room.module)
    guide = room.guide.removesuffix(".md")
    lines = [f"# {room.module}", "", f"{room.about} Read [{guide}](../{room.guide}) first.", ""]
    for title, names in names_of(room).items():
        lines += [f"## {title}", ""]
        for name in names:
            first = alias_of(name, getattr(module, name), module)
            if getattr(module, name) is MPSGraph:
                shown = f"{{inherited_members: true, members: [{', '.join(_methods_of_graphs())}]}}"
                lines += [f"::: {room.module}.{name}", f"    options: {shown}", ""]
            elif first is None:
                lines += [f"::: {room.module}.{name}", ""]
            else:
                lines += [f"`{name}` is [`{first}`][{room.module}.{first}].", ""]
    if hasattr(module, "MPSGraph"):
        lines += [
            "## Operations",
            "",
            "Methods of `MPSGraph` by group, each with its name in Swift and its selector.",
            "",
        ]
        for title, named in operations().items():
            lines += [f"### {title[:1].upper()}{title[1:]}", ""]
            for name in named:
                lines += [f"::: {room.module}.MPSGraph.{name}", "    options: {heading_level: 4}", ""]
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
