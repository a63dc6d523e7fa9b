"""Calls into the engine, and the wrappers that put the public function's name into errors."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar, cast

import numpy as np

from .._core import Reason, Refusal
from ._buffers import call_with_views, has_foreign
from ._errors import ArgumentError, of_function

__all__ = ["Reason", "Refusal", "enter", "named", "public", "raise_unexplained", "warn"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Record = TypeVar("_Record", bound=tuple[Any, ...])  # the arguments of an engine function, by name
_ARGUMENT_ERRORS: Final = (TypeError, ValueError)


def public(function: _Function) -> _Function:
    """Put the function's name into its errors, and take arrays of other libraries.

    Callers with NumPy arrays pay nothing for the latter: a function that meets another array raises an error before it
    has written anything, and is called again with views of all such arrays.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except _ARGUMENT_ERRORS as error:
            refusal = _of(function, error)
            if not has_foreign(arguments) and not has_foreign(options):
                if refusal is error:
                    raise
                raise refusal from error
        try:
            return call_with_views(call, function, arguments, options)
        except ArgumentError as error:
            _show_given_type(error, refusal)
            of_function(function.__qualname__, error)  # which an argument without a view has not got
            raise

    return cast(_Function, call)


def named(function: _Function) -> _Function:
    """Only put the name into its errors."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except _ARGUMENT_ERRORS as error:
            refusal = _of(function, error)
            if refusal is error:
                raise
            raise refusal from error

    return cast(_Function, call)


def _of(function: Callable[..., Any], error: Exception) -> Exception:
    """The error of a function, with its name."""
    called = error.__traceback__ is not None and error.__traceback__.tb_next is not None
    # An error from the call itself, such as a missing argument, already has the name.
    if not called or not (isinstance(error, ArgumentError) or type(error) in _ARGUMENT_ERRORS):
        return error
    return of_function(function.__qualname__, error)


def _show_given_type(error: ArgumentError, first: Exception) -> None:
    """If the type of an argument is wrong, name the type of the caller's array rather than that of the view of it."""
    if isinstance(first, ArgumentError) and first.argument == error.argument:
        given = next((value for value in first.values if isinstance(value, type)), np.ndarray)
        error.values = tuple(given if value is np.ndarray else value for value in error.values)


def warn(message: str) -> None:
    """Issue a RuntimeWarning that names the public function and points to the line that called it."""
    frame, level = sys._getframe(1), 2
    while frame.f_code.co_name != "call" or frame.f_code.co_filename != __file__:
        assert frame.f_back is not None, "not inside a public function"
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{frame.f_locals['function'].__qualname__}: {message}", RuntimeWarning, stacklevel=level + 1)


def enter(
    record: Callable[..., _Record],
    engine: Callable[..., Any],
    arguments: tuple[Any, ...],
    fix: Callable[..., Any],
    *context: Any,
) -> tuple[Any, _Record | None]:
    """Call the engine. Returns its result, and the arguments it has accepted if those are not the ones given.

    The engine only makes cheap checks, of memory spans, exact types and strides, and refuses anything that fails one.
    ``fix(refusal, arguments, *context)``, which gets the arguments as a `record`, then finds the cause: it raises an
    error, or returns arguments that the engine accepts. Only then are they a record: to make one, and to unpack it,
    takes as long as the engine's checks.
    """
    answer = engine(*arguments)
    if type(answer) is not Refusal:
        return answer, None
    fixed: _Record = fix(answer, record(*arguments), *context)
    answer = engine(*fixed)
    if type(answer) is Refusal:
        raise_unexplained(answer)
    return answer, fixed


def raise_unexplained(refusal: Refusal, *_: object) -> NoReturn:
    """Raise for a refusal that the Python checks should have caught."""
    raise RuntimeError(f"the engine refused {refusal.argument}: {refusal.reason.name}")
