"""The command ``retrograd completion``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Final

from .report import UsageError

__all__ = ["add_command"]

_SHELLS: Final = ("bash", "zsh", "fish")
# What an argument's name in the help says that it is.
_FILES: Final = ("FILE", "MODEL", "SOURCE", "TARGET")


def add_command(commands: Any, parser: argparse.ArgumentParser) -> None:
    """Add the command to the subparsers of ``retrograd``, whose parser it reads when it runs."""
    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands and options in a shell",
        description="Print a script that completes commands, options and file names.\n\n"
        "For bash:\n"
        "  retrograd completion bash > ~/.local/share/bash-completion/completions/retrograd\n"
        "For fish:\n"
        "  retrograd completion fish > ~/.config/fish/completions/retrograd.fish\n"
        "For zsh, in a directory of $fpath:\n"
        "  retrograd completion zsh > _retrograd",
    )
    completion.add_argument("shell", choices=_SHELLS, help="the shell")
    completion.set_defaults(run=lambda options: _completion(parser, options.shell))


def _completion(parser: argparse.ArgumentParser, shell: str) -> int:
    try:
        import shtab
    except ImportError:
        raise UsageError("completion needs shtab: pip install 'retrograd[completion]'") from None
    for action in _arguments(parser):
        name = action.metavar or ""
        if name == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif name in _FILES or str(name).endswith(".csv"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell))
    return 0


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of the parser and of all its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _arguments(command)
        else:
            yield action
