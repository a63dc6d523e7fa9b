"""C functions from declarations: those that create a filter, and those that call one of its methods.

What is decorated has only the name of the function and its docstring; the arguments are those of the declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from ._failure import Rename, status
from ._filter import BNNSFilter, checked_filter
from ._layer import checked_layer
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor, Structure

_F = TypeVar("_F", bound=BNNSFilter)
_C = TypeVar("_C", bound=Callable[..., object])
DECLARED: Final = "<declared>"  # the file name of what is compiled here
_Named: TypeAlias = Callable[[], None]
_TYPES: Final[dict[str, object]] = {
    "filter": BNNSFilter | None,
    "batch_size": int,
    "number_of_inputs": int,
    "indices_data_type": int,
    "training": bool,
    "delta_parameters": BNNSNDArrayDescriptor | None,
}
# Of names that end so. All other arguments are memory: arrays, or other objects with a buffer.
_ENDINGS: Final[dict[str, object]] = {"_stride": int, "_size": int, "_delta": BNNSNDArrayDescriptor | None}


def creates(
    kind: type[_F], layer: type[Structure], *options: object, rename: Rename | None = None
) -> Callable[[_Named], Callable[..., _F | None]]:
    """Declare a function ``(layer_params, filter_params=None)`` that makes a filter of a layer; None on failure.

    `options` are further arguments of the filter.
    """

    def decorate(named: _Named) -> Callable[..., _F | None]:
        def call(layer_params: object, filter_params: object = None) -> _F:
            return kind(checked_layer(layer, layer_params), filter_params, *options)  # type: ignore[call-arg]

        types = {"layer_params": layer, "filter_params": BNNSFilterParameters | None, "return": kind | None}
        return status(None, rename=rename)(_like(named, call, types))

    return decorate


def applies(
    kind: type[_F],
    otherwise: str,
    method: str,
    parameters: str,
    *,
    rename: Rename | None = None,
    before: Callable[[_F], None] | None = None,
) -> Callable[[_Named], Callable[..., int]]:
    """Declare a function that calls a method of a filter with its other arguments; it returns 0, or -1 on failure.

    `parameters` are the names of the arguments, the filter first. ``in_+`` stands for in_ and in_stride, ``in_[]`` is
    an array of them, ``in_[]?`` may be None, and ``(0)`` is passed to the method without being an argument. `otherwise`
    is the message for a filter of another kind. `before` is called with the filter before the method.
    """
    words = [word for name in parameters.split() for word in _pair(name)]
    types = {word.rstrip("[]?"): _type_of(word) for word in words if word[0] != "("}
    passed = ["bool(training)" if word == "training" else word.rstrip("[]?") for word in words[1:]]

    def decorate(named: _Named) -> Callable[..., int]:
        note = "" if before is None else "before(checked)\n    "
        call = f"{note}checked.{method}({', '.join(passed)})"
        body = f"checked = checked_filter(kind, filter, otherwise)\n    {call}\n    return 0"
        names = {"checked_filter": checked_filter, "kind": kind, "otherwise": otherwise, "before": before}
        return status(-1, rename=rename)(written(named, types, body, names, {**types, "return": int}))

    return decorate


def written(
    named: Callable[..., object], parameters: Iterable[str], body: str, names: dict[str, Any], types: dict[str, Any]
) -> Any:
    """A function with the name and the docstring of another one, and with these parameters and annotations.

    It is compiled from text: so it binds its arguments at no further cost, and has Python's errors.
    """
    source = f"def {named.__name__}({', '.join(parameters)}):\n    {body}"
    exec(compile(source, DECLARED, "exec"), names)
    return _like(named, names[named.__name__], types)


def _like(named: Callable[..., object], function: _C, types: dict[str, Any]) -> _C:
    """Give a function the name and the docstring of another one, and these annotations."""
    function.__name__, function.__qualname__, function.__doc__ = named.__name__, named.__qualname__, named.__doc__
    function.__module__, function.__annotations__ = named.__module__, types
    return function


def _pair(name: str) -> tuple[str, ...]:
    if not name.endswith("+"):
        return (name,)
    array = name.rstrip("[]?+")
    return name[:-1], f"{array.rstrip('_')}_stride{name[len(array) : -1]}"


def _type_of(word: str) -> object:
    name = word.rstrip("[]?")
    one: Any = _TYPES.get(name) or next((kind for end, kind in _ENDINGS.items() if name.endswith(end)), Any)
    many = Sequence[one] if "[]" in word else one
    return many | None if word.endswith("?") else many
