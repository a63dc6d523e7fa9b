"""Subclasses of PyTorch's layers, with retrograd's class before PyTorch's in the method resolution order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias, cast

import torch
from torch.nn.utils import parametrize

Kind: TypeAlias = type[torch.nn.Module]


def calls_torchs_forward(kind: Kind, base: Kind) -> bool:
    """Whether the subclass has PyTorch's `forward`, or each of its own calls ``super().forward``."""
    own = [one.__dict__["forward"] for one in kind.__mro__[: kind.__mro__.index(base)] if "forward" in one.__dict__]
    return all(_calls_super(function) for function in own)


def _calls_super(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    # A function with ``super()`` has the cell __class__.
    return code is not None and "__class__" in code.co_freevars and {"super", "forward"} <= set(code.co_names)


def class_with(kind: Kind, base: Kind, ours: Kind) -> Kind:
    """The class of a replaced layer: `ours` for PyTorch's own, otherwise `kind` with `ours` before `base`."""
    return ours if kind is base else _made(cast(Any, kind), cast(Any, base), cast(Any, ours))


@lru_cache(maxsize=512)
def _made(kind: Kind, base: Kind, ours: Kind) -> Kind:
    made: Kind
    if kind.__module__ == parametrize.__name__:
        # Made for one object with parametrizations. PyTorch takes its first base for the class without them.
        before = class_with(kind.__bases__[0], base, ours)
        members = {name: value for name, value in kind.__dict__.items() if name not in ("__dict__", "__weakref__")}
        made = type(kind.__name__, (before,), {**members, "_original": kind})
        return made

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        """For pickle: no module has this class by a name, so it is made again from those that have one."""
        found: Any = super(made, self).__reduce_ex__(protocol)
        return (_instance, (kind, base, ours), *found[2:]) if type(self) is made else found

    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made = type(kind.__name__, (kind, ours), {**members, "__reduce_ex__": reduce, "_original": kind})
    return made


def _instance(kind: Kind, base: Kind, ours: Kind) -> torch.nn.Module:
    made = class_with(kind, base, ours)
    return made.__new__(made)


def original_class(kind: Kind, originals: Mapping[Kind, Kind]) -> Kind | None:
    """PyTorch's class, or the subclass of it, that a replaced layer had; None for other layers."""
    return originals.get(kind) or kind.__dict__.get("_original")
