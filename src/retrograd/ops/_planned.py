"""Plans: what a call derives from its arguments before it computes, cached until one of them changes.

A mutable object has a version, and every change gives it a new one. A plan is stored in the version of the first object
that it was made from, so it is dropped as soon as that object changes or is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar
from weakref import ref

import numpy as np

from ._buffers import keeps_still
from ._types import Array

_P = ParamSpec("_P")
_R = TypeVar("_R")
_is_writable: Final[Callable[[Array], bool]] = attrgetter("flags.writeable")


class Version:
    """One state of an object, and the plans that were made from it."""

    __slots__ = ("__weakref__", "plans")

    def __init__(self) -> None:
        self.plans: dict[Planned[Any, Any], _Kept] = {}


class Versioned:
    """Base class of objects that plans can be made from."""

    __slots__ = ()
    _version: Version | None  # None: plans made from this object are not cached

    def _memory(self) -> Iterable[object]:
        """The objects whose memory it points to: arrays, or anything else that a descriptor accepts as data."""
        return ()


class _Kept(NamedTuple):
    key: list[Any]  # the other arguments: ints, None, and weak references to versions
    arrays: list[Array]  # whose memory the plan refers to
    writable: list[bool]  # whether each of them was writable
    plan: Any


class Planned(Generic[_P, _R]):
    """A cached function: it runs again only if an argument, or the writability of an array it points to, has changed.

    Objects are compared by version, ints by value. With any other argument except None the result is not cached, nor
    if memory may move between calls. The first argument, which must be an object, holds one plan per such function.

    This is thread-safe. Versions are read before the function runs, so the plan of an object that changes meanwhile is
    never found again. A plan is immutable and stored by one assignment.
    """

    __slots__ = ("_build",)

    def __init__(self, build: Callable[_P, _R]) -> None:
        self._build = build

    def __call__(self, *arguments: _P.args, **named: _P.kwargs) -> _R:
        every: tuple[Any, ...] = arguments + tuple(named.values()) if named else arguments
        home = every[0]._version if isinstance(every[0], Versioned) else None
        key: list[Any] = []
        for argument in every[1:]:
            if argument is None or type(argument) is int:
                key.append(argument)
            elif isinstance(argument, Versioned) and argument._version is not None:
                key.append(ref(argument._version))
            else:
                home = None
        if home is None:
            return self._build(*arguments, **named)
        kept = home.plans.get(self)
        if kept is not None and kept.key == key and kept.writable == list(map(_is_writable, kept.arrays)):
            plan: _R = kept.plan
            return plan
        memory = [data for one in every if isinstance(one, Versioned) for data in one._memory()]
        arrays = [data for data in memory if isinstance(data, np.ndarray)]
        writable = list(map(_is_writable, arrays))
        plan = self._build(*arguments, **named)
        if all(map(keeps_still, memory)):
            home.plans[self] = _Kept(key, arrays, writable, plan)
        return plan
