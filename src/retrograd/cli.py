"""The command line: ``retrograd train | sample | forecast | convert | info | verify | bench | completion``.

Exit codes: 0 success; 1 a wrong result, or a failed run; 2 invalid options or data; 128 plus the signal number if a
signal ended it, so 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import retrograd

from . import _starting
from ._parser import Parser
from ._printing import print_anything, report
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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
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
