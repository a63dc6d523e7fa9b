"""How Apple's functions fail: with a status, never with an exception. The reason goes to the log and is kept.

Inside, a function raises: :class:`Invalid` for a parameter that is wrong, :class:`Unsupported` for a combination that
is not offered, or whatever the array functions raise. :func:`status` turns that into Apple's answer.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

__all__ = [
    "last_error",
]

_logger: Final = logging.getLogger("retrograd.bnns")
# A library that no one has set up for logging stays silent.
_logger.addHandler(logging.NullHandler())

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F")


class Invalid(ValueError):
    """A parameter is wrong: Apple logs an error."""


class Unsupported(Exception):
    """The parameters make sense, but not here: Apple logs an information."""


class _Last(threading.local):
    message: str | None = None


_last: Final = _Last()
# What the array functions and NumPy raise when an argument is refused or memory is short.
_REFUSALS: Final = (ValueError, TypeError, OverflowError, MemoryError, BufferError)
UNEXPECTED: Final = "unexpected"  # what messages of anything else begin with


def last_error() -> str | None:
    """Why the last function of this module that failed in this thread did so; None if none has."""
    return _last.message


def status(failure: _F) -> Callable[[Callable[_P, _R]], Callable[_P, _R | _F]]:
    """Make a function that raises into one that answers `failure`."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R | _F]:
        name = function.__name__
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R | _F:
            try:
                return function(*args, **kwargs)
            except Unsupported as error:
                log, message = _logger.info, f"{name}: {error}"
            except _REFUSALS as error:
                if isinstance(error, TypeError):
                    signature.bind(*args, **kwargs)  # too few arguments or too many are Python's own affair
                log, message = _logger.error, f"{name}: {error if str(error) else type(error).__name__}"
            except Exception as error:
                # Of an argument's own code, or a mistake of ours: the trace tells, but a status is what was promised.
                _logger.debug("%s", name, exc_info=True)
                log, message = _logger.error, f"{name}: {UNEXPECTED} {type(error).__name__}: {error}"
            _last.message = message
            log("%s", message)
            return failure

        return call

    return decorate


def note(message: str) -> None:
    """Something worth knowing that is not a failure."""
    _logger.info("%s", message)
