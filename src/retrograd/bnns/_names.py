"""Names of constants, for messages."""

from __future__ import annotations

from functools import cache

from . import _constants


@cache
def _names(prefix: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for name, value in vars(_constants).items():
        if name.startswith(prefix):
            found.setdefault(value, name)
    return found


def constant_name(prefix: str, value: object) -> str:
    """``BNNSDataTypeFloat32`` for ("BNNSDataType", 0x10020); the value itself if it has no name."""
    if not isinstance(value, int):
        return repr(value)
    return _names(prefix).get(value) or hex(value)


def type_name(value: object) -> str:
    return constant_name("BNNSDataType", value)


def layout_name(value: object) -> str:
    return constant_name("BNNSDataLayout", value)
