"""Arguments of C functions: of those that have many, which are declared, and objects that are no filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from ._declare import written
from ._failure import Invalid, status

_T = TypeVar("_T")
Given: TypeAlias = Mapping[str, Any]


def takes(parameters: str, types: Mapping[str, object]) -> Callable[[Callable[[Given], None]], Callable[..., int]]:
    """Declare the parameters of a function, which gets them as one mapping. It returns 0, or -1 on failure.

    ``in_+`` stands for in_ and in_stride, and ``size=None`` has a default. What is not among the `types` is memory, or
    the stride of a batch.
    """
    words = [one for word in parameters.split() for one in _pair(word)]
    names = [word.partition("=")[0] for word in words]
    annotations = {name: types.get(name, int if name.endswith("_stride") else object) for name in names}

    def decorate(function: Callable[[Given], None]) -> Callable[..., int]:
        body = f"_function({{{', '.join(f'{name!r}: {name}' for name in names)}}})\n    return 0"
        return status(-1)(written(function, words, body, {"_function": function}, {**annotations, "return": int}))

    return decorate


def _pair(word: str) -> tuple[str, ...]:
    name = word.removesuffix("+")
    return (name,) if name == word else (name, f"{name.rstrip('_')}_stride")


def checked_object(name: str, kind: type[_T], value: object) -> _T:
    """An opaque object among the arguments."""
    if value is None:
        raise Invalid(f"{name} is NULL")
    if not isinstance(value, kind):
        raise Invalid(f"{name} is of type {type(value).__name__}, not a {kind.__name__}")
    return value
