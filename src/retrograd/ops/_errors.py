"""Errors about arguments. They carry the argument and the reason as data; the message is made when it is shown.

So a front end that calls arguments by other names looks these up (:meth:`ArgumentError.renamed`), and no code reads a
message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from string import Formatter
from typing import Final, TypeAlias

# Other names of arguments; of an argument that is a list also a function of the index.
Names: TypeAlias = Mapping[str, str | Callable[[int], str]]

_parse: Final = Formatter().parse
_NO_NAMES: Final[Names] = {}


class ArgumentName(str):
    """A value in a message that is the name of an argument."""

    __slots__ = ()


class ArgumentError(Exception):
    """An argument that a function refuses; always one of the two kinds below.

    In `template`, ``{argument}`` is the name of the refused argument, ``{x}`` that of another one, and ``{}`` one of
    `values`, formatted as by `str.format`. A type among the values is shown by its name. `argument` is empty if the
    message of another error is all that is known.
    """

    def __init__(self, argument: str, template: str, *values: object) -> None:
        super().__init__(argument, template, *values)
        self.argument: Final = argument
        self.template: Final = template
        self.values: tuple[object, ...] = values
        self.function: str | None = None  # the public function, once it is known
        self.reason = ""  # what is wrong with an activation, without its name

    def renamed(self, names: Names) -> str:
        """The message, without the function, with the arguments called by these names."""
        values = iter(self.values)
        parts = []
        for text, field, spec, conversion in _parse(self.template):
            parts.append(text)
            if field == "":
                parts.append(_shown(next(values), spec or "", conversion, names))
            elif field is not None:
                parts.append(_name(self.argument if field == "argument" else field, names))
        return "".join(parts)

    def __str__(self) -> str:
        message = self.renamed(_NO_NAMES)
        return message if self.function is None else f"{self.function}: {message}"


class ArgumentValueError(ArgumentError, ValueError):
    """An argument has a wrong value."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has a wrong type."""


def of_function(function: str, error: Exception) -> ArgumentError:
    """The error, with the function's name in front of its message unless that is there already."""
    if not isinstance(error, ArgumentError) or error.function not in (None, function):
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
        error = kind("", "{}", str(error))  # that of NumPy, or of another function
    error.function = function
    return error


def _shown(value: object, spec: str, conversion: str | None, names: Names) -> str:
    if type(value) is ArgumentName:
        return _name(value, names)
    shown = value.__name__ if isinstance(value, type) else value
    return format(repr(shown) if conversion == "r" else shown, spec)


def _name(name: str, names: Names) -> str:
    """What an argument, a buffer of `out`, or an element of a list is called."""
    head, bracket, rest = name.removeprefix("out.").partition("[")
    index, _, tail = rest.partition("]")
    other = names.get(head + tail)
    if other is None:
        return name
    return f"{other}{bracket and f'[{index}]'}" if isinstance(other, str) else other(int(index or 0))
