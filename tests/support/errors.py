"""The classes of errors about arguments."""

from __future__ import annotations

from typing import Final

from retrograd.ops._errors import ArgumentError, ArgumentTypeError, ArgumentValueError

KINDS: Final[dict[type[Exception], type[ArgumentError]]] = {
    TypeError: ArgumentTypeError,
    ValueError: ArgumentValueError,
}
