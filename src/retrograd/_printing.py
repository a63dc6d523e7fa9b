"""Text from files, names and models, made safe to print; and an output that accepts any character."""

from __future__ import annotations

import atexit
import io
import os
import re
import shutil
import sys
import unicodedata
from typing import Final

__all__ = ["cells", "in_a_line", "one_line", "print_anything", "report", "terminal_width", "visible", "wrapped"]

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


def terminal_width() -> int:
    """Return the columns to print in: those of the terminal, at most 100; 80 without one. COLUMNS overrides it."""
    return max(20, min(shutil.get_terminal_size((80, 24)).columns, 100))


def cells(text: str) -> int:
    """Return the width of the text in terminal cells."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.category(character) in ("Mn", "Me", "Cf") for character in text)


def wrapped(text: str, first: str = "", width: int | None = None) -> str:
    """Return the text after `first`, in lines of the terminal's width; later lines are indented as far as the first.

    Words are never broken, so that a path or a command can be copied.
    """
    width = terminal_width() if width is None else width
    lines, line, indent = [], first, " " * cells(first)
    empty = True  # nothing of the text is in the line yet
    for word in text.split():
        if not empty and cells(line) + 1 + cells(word) > width:
            lines.append(line)
            line, empty = indent, True
        line += word if empty else f" {word}"
        empty = False
    return "\n".join([*lines, line])


def report(message: str) -> None:
    """Print an error or a warning as one line, which a terminal shows wrapped at words.

    The names from files in it may contain terminal control characters.
    """
    text = f"retrograd: {in_a_line(message)}"
    print(wrapped(text) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def print_anything() -> None:
    """Print characters that the output's encoding lacks as escapes, and nothing if the output is closed."""
    if sys.stdout is None:  # closed, as by >&-
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process exits)
        atexit.register(sys.stdout.close)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
