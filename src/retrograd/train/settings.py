"""Settings of a training run: one dataclass for command-line options, checkpoint metadata and the report."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

__all__ = ["InputError", "Settings", "option", "shown"]

_S = TypeVar("_S", bound="Settings")


class InputError(Exception):
    """A file or an option from the user is invalid. The message says why."""


class _Limits(NamedTuple):
    help: str
    minimum: float
    maximum: float
    choices: Sequence[str] | None
    metavar: str | None


def option(
    default: Any,
    help: str,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
) -> Any:
    """Define a setting. Its type is the annotation: int, float or str, or one of these or None."""
    return dataclasses.field(default=default, metadata={"limits": _Limits(help, minimum, maximum, choices, metavar)})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings common to all kinds of training. A subclass adds more, and may override defaults."""

    # Settings that do not affect the results; they may change when a run is resumed.
    RESUMABLE: ClassVar = frozenset({"threads", "time_limit", "checkpoint_every"})
    # These may change too: patience only decides when the run ends, and a run may get more steps than were planned.
    CHANGEABLE: ClassVar = RESUMABLE | {"patience", "steps"}
    # Values of settings that checkpoints of earlier releases lack.
    EARLIER: ClassVar = {"validate_every": None, "patience": None, "shards": 1}

    steps: int | None = option(None, "training steps", minimum=1, maximum=2**53)
    optimizer: str = option("adamw", "optimizer", choices=("sgd", "adam", "adamw", "rmsprop"))
    learning_rate: float = option(3e-3, "peak learning rate", minimum=0)
    schedule: str = option(
        "cosine",
        "learning rate after the warm-up: cosine decay to a tenth, or constant",
        choices=("cosine", "constant"),
    )
    warm_up: int | None = option(
        None, "warm-up steps of the learning rate (default: a tenth of all steps, at most 100)", minimum=0
    )
    weight_decay: float = option(0.01, "decoupled weight decay (adamw), or L2 regularization (others)", minimum=0)
    momentum: float = option(0.9, "momentum of sgd", minimum=0, maximum=1)
    maximum_norm: float | None = option(1.0, "clip the global gradient norm to this, or none", minimum=1e-9)
    validate_every: int | None = option(
        None, "steps between validations (default: a twentieth of all steps)", minimum=1
    )
    patience: int | None = option(
        5, "early stopping: validations in a row without improvement, after the warm-up, or none", minimum=1
    )
    seed: int = option(0, "seed of initial weights, dropout and shuffling", minimum=0, maximum=2**63 - 1)
    shards: int | None = option(
        None,
        "parts of each batch, computed by one rank each; results depend on it, not on the number of ranks "
        "(default: 8 under mpirun, else 1)",
        minimum=1,
        maximum=65536,
    )
    threads: int | None = option(None, "threads (default: as printed by retrograd info)", minimum=1, maximum=4096)
    time_limit: float | None = option(
        None,
        "train for at most this time: 90s, 10m or 2h. Without --steps, the run is planned to end within it; with "
        "--steps, it stops there, and --resume continues",
        minimum=0,
        metavar="TIME",
    )
    checkpoint_every: float = option(60.0, "time between checkpoints: 90s, 10m or 2h", minimum=0, metavar="TIME")

    @classmethod
    def options(cls) -> Iterator[tuple[str, Any, bool, Any, _Limits]]:
        """Yield name, type, whether None is allowed, default and limits of every setting."""
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            kind, optional = hints[field.name], False
            if isinstance(kind, types.UnionType):
                (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
                optional = True
            yield field.name, kind, optional, field.default, field.metadata["limits"]

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add an option for every setting. Options that the user omits are absent from the namespace."""
        common = {field.name for field in dataclasses.fields(Settings)}
        specific, general = parser.add_argument_group("data and model"), parser.add_argument_group("training")
        for name, kind, optional, default, limits in cls.options():
            group = general if name in common else specific
            unless = "" if default is None else f" (default: {shown(default)}{'s' * (limits.metavar == 'TIME')})"
            metavar = limits.metavar or (None if limits.choices else {int: "N", float: "X", str: "TEXT"}[kind])
            group.add_argument(
                "--" + name.replace("_", "-"),
                type=_reader(kind, optional, limits),
                choices=limits.choices,
                metavar=metavar,
                default=argparse.SUPPRESS,
                help=(limits.help + unless).replace("%", "%%"),
            )

    @classmethod
    def from_record(cls: type[_S], record: Mapping[str, Any]) -> _S:
        """Create settings from checkpoint metadata; missing or invalid values are an error."""
        values, record = {}, {**cls.EARLIER, **record}
        for name, kind, optional, _, limits in cls.options():
            if name not in record:
                raise InputError(f"it has no setting {name!r}")
            value = record[name]
            fits = (value is None and optional) or (
                isinstance(value, (int, float) if kind is float else kind)
                and not isinstance(value, bool)
                and (kind not in (int, float) or _within(value, limits))
                and (limits.choices is None or value in limits.choices)
            )
            if not fits:
                raise InputError(f"its setting {name} is {value!r}")
            values[name] = value
        return cls(**values)

    @classmethod
    def named(cls, record: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return settings as the user would write them: the options and their values, as text."""
        units = {name: "s" if limits.metavar == "TIME" else "" for name, *_, limits in cls.options()}
        return [
            ("--" + name.replace("_", "-"), shown(value) + ("" if value is None else units[name]))
            for name, value in record.items()
        ]

    def without_resumable(self: _S) -> _S:
        """Return a copy in which settings that do not affect the results have their defaults."""
        defaults = {name: default for name, _, _, default, _ in self.options() if name in self.RESUMABLE}
        return dataclasses.replace(self, **defaults)

    def least_weights(self) -> int:
        """Return a lower bound of the number of weights of a model with these settings."""
        return 0

    def record(self) -> dict[str, Any]:
        """Return all settings by name, as a JSON-serialisable dict."""
        return dataclasses.asdict(self)


def shown(value: object) -> str:
    """Format a setting's value for display."""
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _within(value: float, limits: _Limits) -> bool:
    return limits.minimum <= value <= limits.maximum and abs(value) < sys.float_info.max


def _reader(kind: type, optional: bool, limits: _Limits) -> Any:
    """Return the function that argparse calls with the text of an option."""

    def read(text: str) -> Any:
        if optional and text.lower() == "none":
            return None
        try:
            value = _seconds(text) if limits.metavar == "TIME" else kind(text)
        except ValueError:
            what = {int: "a whole number", float: "a number"}[kind]
            if limits.metavar == "TIME":
                what = "a time, such as 90s, 10m or 2h"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if kind is not str and not _within(value, limits):
            bounds = f"from {limits.minimum:g} to {limits.maximum:g}"
            if limits.maximum == math.inf:
                bounds = f"at least {limits.minimum:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {bounds}")
        return value

    return read


def _seconds(text: str) -> float:
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    return float(text[:-1]) * unit if unit else float(text)
