"""The parser of the command line: misspelt words, and help that fits the terminal."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ._printing import in_a_line, wrapped

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """The parser of the program, and of each of its commands: a misspelt word is answered with the nearest one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **settings})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        self._check_options(words)
        namespace, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(in_a_line(f"unexpected argument {' '.join(word for word in rest if word != '--')}"))
        return namespace, rest

    def _check_options(self, words: list[str]) -> None:
        """Refuse the first unknown option, before argparse takes its value for an argument or misses another one."""
        options, below = self._option_string_actions, list(self._below())
        for before, word in zip(["", *words], words, strict=False):
            if word == "--" or (below and not word.startswith("-")):
                return  # the rest has no options, or is the command's
            name = word.partition("=")[0]
            if not _is_option(word) or any(known.startswith(name) for known in options):
                continue
            if takers := [parser.prog for parser in below if name in parser._option_string_actions]:
                taker = max(takers, key=lambda prog: prog.rpartition(" ")[2] in words)
                self.error(f"{name} is an option of '{taker}', and comes after it")
            meant = _nearest(name, options)
            if before in options and options[before].nargs is None:
                meant.append(f"{before}={word}")
            advice = f"did you mean {', or '.join(meant)}?" if meant else f"'{self.prog} --help' lists the options"
            self.error(in_a_line(f"unknown option {name}; {advice}"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        near = _nearest(str(value), action.choices)
        advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(map(str, action.choices))}"
        is_command = isinstance(action, argparse._SubParsersAction)
        what = f"unknown {str(action.metavar).lower()}" if is_command else "invalid choice"
        raise argparse.ArgumentError(None if is_command else action, in_a_line(f"{what} {value!r}; {advice}"))

    def _below(self) -> Iterator[argparse.ArgumentParser]:
        """Yield the parsers of the commands below this one."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield parser
                    yield from parser._below()


def _is_option(word: str) -> bool:
    """Whether argparse takes the word for an option, not for a value: "-" is a file, and -5 a number."""
    return re.fullmatch(r"-[^\s\d.]\S*", word) is not None


def _nearest(word: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(word, list(known), n=1)


class _Formatter(argparse.HelpFormatter):
    """Help in lines of the terminal's width. Words are never broken, so that a path or a command can be copied.

    The usage does not repeat the options, which are listed below it. A description has paragraphs; a line in it that is
    indented stays one, and what follows its first word and two spaces is a column.
    """

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None = None
    ) -> None:
        if prefix is None:  # otherwise it is the beginning of a command's
            words = [self._prog, "[OPTIONS]", *(_in_usage(action) for action in actions if not action.option_strings)]
            usage = wrapped(" ".join(words), "usage: ", self._width).removeprefix("usage: ")
        super().add_usage(usage, actions, groups, prefix)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = (re.match(r"( *)((?<=  )\S+  +)?(.*)", line) for line in text.split("\n"))
        return "\n".join(wrapped(part[3], indent + part[1] + (part[2] or ""), width) for part in parts if part)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width=width).split("\n")


def _in_usage(action: argparse.Action) -> str:
    name = str(action.metavar or f"{{{','.join(map(str, action.choices or ()))}}}")
    return {"?": f"[{name}]", "*": f"[{name}...]", argparse.PARSER: f"{name} ..."}.get(str(action.nargs), name)
