"""Text from files, names and models, made safe to print; and an output that accepts any character."""

from __future__ import annotations

import atexit
import io
import os
import re
import sys
from typing import Final

__all__ = ["in_a_line", "one_line", "print_anything", "visible"]

_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


def visible(text: str) -> str:
    """Replace characters that a page, a terminal or UTF-8 cannot show, except newlines and tabs.

    Control characters become their symbols (from U+2400). Lone surrogates, non-characters and the controls that
    override the direction of text become U+FFFD.
    """

    def picture(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"

    return _HIDDEN.sub(picture, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return `visible` text with each run of white space replaced by one space."""
    return visible(" ".join(text.split()))


def in_a_line(text: str) -> str:
    """Return `visible` text with symbols for newlines and tabs too, so that a name cannot look like several lines."""
    return visible(text).translate({0x09: "\u2409", 0x0A: "\u240a", 0x2028: "\ufffd", 0x2029: "\ufffd"})


def print_anything() -> None:
    """Print characters that the output's encoding lacks as escapes, and nothing if the output is closed."""
    if sys.stdout is None:  # closed, as by >&-
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process exits)
        atexit.register(sys.stdout.close)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
