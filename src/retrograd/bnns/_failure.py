"""Failures of Apple's functions: a status, never an exception. The reason is logged and kept for `last_error`.

Internally, functions raise :class:`Invalid` for a wrong parameter and :class:`Unsupported` for one that is valid but
not supported; the array functions raise their own errors. :func:`status` turns all of these into Apple's return value.
Because a status is easily overlooked, the first failure in a process also warns.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, ParamSpec, TypeAlias, TypeVar, cast

from ..ops._errors import ArgumentError, Names

_logger: Final = logging.getLogger("retrograd.bnns")
# Silent unless the application configures logging.
_logger.addHandler(logging.NullHandler())

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F")
# From the array functions' argument names to Apple's.
Rename: TypeAlias = Names


class Invalid(ValueError):
    """A parameter is wrong: Apple logs an error."""

    code: ClassVar[int | None] = None  # the status, where it is not the function's usual one


class ShapeMismatch(Invalid):
    """Arrays that are gathered or scattered do not fit each other."""

    code = -1003  # as measured


class IndexOutOfRange(Invalid):
    """An index is negative or too large."""

    code = -1005  # as measured


class Unsupported(Exception):
    """The parameters are valid but not supported: Apple logs an info message."""


class BNNSWarning(RuntimeWarning):
    """A BNNS function has failed. Only the first failure in a process warns; all go to `last_error` and the log."""


class _Last(threading.local):
    message: str | None = None
    raises: bool = False  # the caller raises on failure, so there is no need to warn


_last: Final = _Last()
# What the array functions and NumPy raise if they refuse an argument or run out of memory.
_REFUSALS: Final = (ValueError, TypeError, OverflowError, MemoryError, BufferError)
UNEXPECTED: Final = "unexpected"  # how the message of any other exception begins


class _FirstFailure:
    """Warns once per process, on the first failure in any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seen = False

    def warn(self, message: str) -> None:
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
    """Return why the last call in this thread failed, or None if it succeeded. BNNSFilterDestroy does not reset it."""
    return _last.message


def _check_arguments(
    function: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise TypeError, as Python would, for arguments that are missing, unknown or too many: a bug of the program."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        said, parameters = str(error), signature.parameters
        with contextlib.suppress(TypeError):  # of those that are unknown or too many
            bound = signature.bind_partial(*args, **kwargs).arguments
            absent = [name for name, one in parameters.items() if name not in bound and one.default is one.empty]
            said = f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing"
        raise TypeError(f"{function}: {said}; it takes {', '.join(parameters)}") from None


def status(
    failure: _F, *, name: str | None = None, rename: Rename | None = None, clears: bool = True
) -> Callable[[Callable[_P, _R]], Callable[_P, _R | _F]]:
    """Make a function return `failure`, or the code of the exception if it has one, where it would raise.

    `name` is Apple's name for the function, by default the function's own. `rename` has Apple's names for the
    arguments of the array functions. `clears`: success resets :func:`last_error`.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R | _F]:
        apples = name or function.__name__
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R | _F:
            answer = failure
            try:
                result = function(*args, **kwargs)
            except Unsupported as error:
                log, message = _logger.info, f"{apples}: {error}"
            except _REFUSALS as error:
                if isinstance(error, TypeError):
                    _check_arguments(apples, signature, args, kwargs)
                refusal = with_apples_names(error, rename)
                log, message = _logger.error, f"{apples}: {refusal}"
                if refusal.code is not None:
                    answer = cast(_F, refusal.code)
            except Exception as error:
                # An argument's code has failed, or we have a bug. Return a status anyway, and log the traceback.
                _logger.debug("%s", apples, exc_info=True)
                log, message = _logger.error, f"{apples}: {UNEXPECTED} {type(error).__name__}: {error}"
            else:
                if clears:
                    _last.message = None
                return result
            _last.message = message
            log("%s", message)
            if not _last.raises:
                first_failure.warn(message)
            return answer

        return call

    return decorate


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Suppress the warning, for a caller that raises an exception on failure."""
    _last.raises = True
    try:
        yield
    finally:
        _last.raises = False


def with_apples_names(error: Exception, rename: Rename | None) -> Invalid:
    """The error of an array function, with Apple's argument names in its message."""
    if isinstance(error, Invalid):
        return error
    if isinstance(error, ArgumentError):
        return Invalid(error.renamed(rename or {}))
    return Invalid(str(error) or type(error).__name__)


@contextlib.contextmanager
def prefixing(prefix: str) -> Iterator[None]:
    """Put a prefix before the messages of refusals."""
    try:
        yield
    except (Invalid, Unsupported) as error:
        raise type(error)(f"{prefix}{error}") from None


def renaming(names: Names) -> Rename:
    """Apple's names of the array functions' arguments; for a list argument, a function of the index."""
    return MappingProxyType(dict(names))


def note(message: str) -> None:
    """Log information that is not a failure."""
    _logger.info("%s", message)


def advise(message: str) -> None:
    """Log something that works as documented, but that the program may not mean."""
    _logger.warning("%s", message)


@functools.lru_cache(maxsize=1024)
def advise_once(message: str) -> None:
    """The same for what every call would repeat: a message is logged once."""
    advise(message)


def note_extension(function: str, what: str) -> None:
    """Log that retrograd accepts something that Apple's headers do not: it may fail on a device."""
    note(f"{function}: {what}; this is accepted here, but not by Apple's headers")
