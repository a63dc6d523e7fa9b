"""The command line: ``retrograd train | sample | forecast | convert | info | verify | bench | completion``.

Exit codes: 0 success; 1 a wrong result, or a failed run; 2 invalid options or data; 128 plus the signal number if a
signal ended it, so 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import retrograd

from . import _starting
from ._printing import in_a_line, print_anything, report
from .convert.command import add_command as add_convert
from .convert.layers import ConvertError
from .lab.commands.bench import add_command as add_bench
from .lab.commands.completion import add_command as add_completion
from .lab.commands.info import add_command as add_info
from .lab.commands.report import UsageError
from .lab.commands.verify import add_command as add_verify
from .train.command import add_commands as add_train
from .train.run import RunError
from .train.settings import InputError

__all__ = ["main"]

_WRONG, _USAGE, _INTERRUPTED = 1, 2, _starting.INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    print_anything()
    try:
        _starting.started()
        return _run(argv)
    except (UsageError, InputError, ConvertError) as error:
        report(f"error: {error}")
        return _USAGE
    except RunError as error:
        report(f"error: {error}")
        return _WRONG
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as head does
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None:  # not of a write
            raise
        _drop_output()
        report(f"error: the output could not be written: {error.strerror or error}")
        return _WRONG


def _run(argv: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(argv)
        code: int = options.run(options)
    finally:
        sys.stdout.flush()
    return code


def _drop_output() -> None:
    """Discard what could not be written, which Python would try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """The parser of the program, and of each of its commands: a misspelt word is answered with the nearest one."""

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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="retrograd",
        description=retrograd.__doc__,
        epilog="Exit codes: 0 success; 1 a wrong result, or a failed run; 2 invalid options or data; 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"retrograd {retrograd.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_train(commands)
    add_convert(commands)
    add_info(commands)
    add_verify(commands)
    add_bench(commands)
    add_completion(commands, parser)
    return parser
