"""How Apple's functions fail: with a status, never with an exception. The reason goes to the log and is kept.

Inside, a function raises: :class:`Invalid` for a parameter that is wrong, :class:`Unsupported` for a combination that
is not offered, or whatever the array functions raise. :func:`status` turns that into Apple's answer. Because a status
is easily overlooked, the first failure of a process also warns.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Final, ParamSpec, TypeAlias, TypeVar

__all__ = [
    "BNNSWarning",
    "last_error",
]

_logger: Final = logging.getLogger("retrograd.bnns")
# A library that no one has set up for logging stays silent.
_logger.addHandler(logging.NullHandler())

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F")
# Puts Apple's names into a message of an array function.
Words: TypeAlias = Callable[[str], str]


class Invalid(ValueError):
    """A parameter is wrong: Apple logs an error."""


class Unsupported(Exception):
    """The parameters make sense, but not here: Apple logs an information."""


class BNNSWarning(RuntimeWarning):
    """A BNNS function has failed. The first failure of a process warns; `last_error` and the log have all of them."""


class _Last(threading.local):
    message: str | None = None
    raises: bool = False  # the caller makes an exception of a failure: no need to warn


_last: Final = _Last()
# What the array functions and NumPy raise when an argument is refused or memory is short.
_REFUSALS: Final = (ValueError, TypeError, OverflowError, MemoryError, BufferError)
UNEXPECTED: Final = "unexpected"  # what messages of anything else begin with
_FUNCTION: Final = re.compile(r"^[a-z_]+: ")  # what the array functions' messages begin with
_NAME: Final = re.compile(r"(?<![\w.])((?:out\.)?[a-z_]\w*)(\[\d+\])?")


class _FirstFailure:
    """Warns once in a process, whichever thread fails first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seen = False

    def warn(self, message: str) -> None:
        if self.seen:
            return
        with self.lock:
            if self.seen:
                return
            self.seen = True
        warnings.warn(
            f"{message} (later failures do not warn: check the status, bnns.last_error() or the log retrograd.bnns)",
            BNNSWarning,
            stacklevel=3,
        )


first_failure: Final = _FirstFailure()


def last_error() -> str | None:
    """Why the last call in this thread failed; None if it succeeded. BNNSFilterDestroy leaves it as it was."""
    return _last.message


def status(
    failure: _F, *, name: str | None = None, words: Words | None = None, clears: bool = True
) -> Callable[[Callable[_P, _R]], Callable[_P, _R | _F]]:
    """Make a function that raises into one that answers `failure`.

    `name` is Apple's name for the function where that is not its own; `words` put what the array functions refuse into
    Apple's names; `clears`: success clears :func:`last_error`.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R | _F]:
        apples = name or function.__name__
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R | _F:
            try:
                answer = function(*args, **kwargs)
            except Unsupported as error:
                log, message = _logger.info, f"{apples}: {error}"
            except _REFUSALS as error:
                if isinstance(error, TypeError):
                    signature.bind(*args, **kwargs)  # too few arguments or too many are Python's own affair
                log, message = _logger.error, f"{apples}: {in_apples_words(error, words)}"
            except Exception as error:
                # Of an argument's own code, or a mistake of ours: the trace tells, but a status is what was promised.
                _logger.debug("%s", apples, exc_info=True)
                log, message = _logger.error, f"{apples}: {UNEXPECTED} {type(error).__name__}: {error}"
            else:
                if clears:
                    _last.message = None
                return answer
            _last.message = message
            log("%s", message)
            if not _last.raises:
                first_failure.warn(message)
            return failure

        return call

    return decorate


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """For callers who make an exception of every failure: no warning."""
    _last.raises = True
    try:
        yield
    finally:
        _last.raises = False


def in_apples_words(error: Exception, words: Words | None) -> Invalid:
    """What an array function has refused, as a message of ours."""
    if isinstance(error, Invalid):
        return error
    message = _FUNCTION.sub("", str(error)) or type(error).__name__
    return Invalid(words(message) if words is not None and isinstance(error, (ValueError, TypeError)) else message)


def renaming(names: Mapping[str, str | Callable[[int], str]]) -> Words:
    """Apple's names by those of the array functions: of an argument, or of item i of an argument that is a list."""

    def rename(match: re.Match[str]) -> str:
        word, index = match.groups()
        renamed = names.get(word.removeprefix("out."))
        if renamed is None:
            return match[0]
        return f"{renamed}{index or ''}" if isinstance(renamed, str) else renamed(int((index or "[0]")[1:-1]))

    return lambda message: _NAME.sub(rename, message)


def note(message: str) -> None:
    """Something worth knowing that is not a failure."""
    _logger.info("%s", message)


def note_extension(function: str, what: str) -> None:
    """Something that is done here, and that Apple's headers do not accept: it may fail on a device."""
    note(f"{function}: {what}; this is accepted here, but not by Apple's headers")
