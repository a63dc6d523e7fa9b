"""Settings of a training run: one dataclass for the command's options, the checkpoint's record, the report's table."""

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
    """What the user gave cannot be used: a file, or an option. The message says why, and names both numbers."""


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
    """A setting. Its type is that of the annotation: int, float, str, or one of them or None."""
    return dataclasses.field(default=default, metadata={"limits": _Limits(help, minimum, maximum, choices, metavar)})


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of every kind of training. A subclass adds its own, and may override a default."""

    # What does not change the results may change when a run is resumed.
    RESUMABLE: ClassVar = frozenset({"threads", "time_limit", "checkpoint_every"})
    # So may what only says when the run ends.
    CHANGEABLE: ClassVar = RESUMABLE | {"patience"}
    # What settings that earlier releases did not have were for them.
    EARLIER: ClassVar = {"validate_every": None, "patience": None}

    optimizer: str = option("adamw", "how the weights move", choices=("sgd", "adam", "adamw", "rmsprop"))
    learning_rate: float = option(3e-3, "the largest learning rate", minimum=0)
    schedule: str = option(
        "cosine", "what follows the warm-up: fall to a tenth, or stay", choices=("cosine", "constant")
    )
    warm_up: int = option(100, "steps in which the learning rate rises", minimum=0)
    weight_decay: float = option(0.01, "how much weights shrink (adamw), or their L2 term (others)", minimum=0)
    momentum: float = option(0.9, "of sgd", minimum=0, maximum=1)
    maximum_norm: float | None = option(1.0, "clip the norm of all gradients to this, or none", minimum=1e-9)
    validate_every: int | None = option(
        None, "steps between validations (default: a twentieth of all steps)", minimum=1
    )
    patience: int | None = option(
        5, "stop after so many validations in a row that are no better than the best, or none", minimum=1
    )
    seed: int = option(0, "seed of initial weights, dropout and order", minimum=0, maximum=2**63 - 1)
    threads: int | None = option(None, "threads (default: what retrograd info says)", minimum=1, maximum=4096)
    time_limit: float | None = option(
        None, "stop after so long: 90, 90s, 10m or 2h; --resume goes on", minimum=0, metavar="TIME"
    )
    checkpoint_every: float = option(60.0, "time between checkpoints: 90, 90s, 10m or 2h", minimum=0, metavar="TIME")

    @classmethod
    def options(cls) -> Iterator[tuple[str, Any, bool, Any, _Limits]]:
        """Name, type, whether None will do, default and limits of every setting."""
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            kind, optional = hints[field.name], False
            if isinstance(kind, types.UnionType):
                (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
                optional = True
            yield field.name, kind, optional, field.default, field.metadata["limits"]

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """An option for every setting, its own kind's first. What the user leaves out is absent from the namespace."""
        common = {field.name for field in dataclasses.fields(Settings)}
        own, others = parser.add_argument_group("data and model"), parser.add_argument_group("training")
        for name, kind, optional, default, limits in cls.options():
            group = others if name in common else own
            unless = "" if default is None else f" (default: {shown(default)})"
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
        """Settings from a checkpoint, which has all of them, each within its limits."""
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

    def without_resumable(self: _S) -> _S:
        """The same, but what does not change the results is as the defaults have it."""
        defaults = {name: default for name, _, _, default, _ in self.options() if name in self.RESUMABLE}
        return dataclasses.replace(self, **defaults)

    def least_weights(self) -> int:
        """No model of these settings has fewer weights."""
        return 0

    def record(self) -> dict[str, Any]:
        """All settings by name, as a JSON-serialisable dict."""
        return dataclasses.asdict(self)


def shown(value: object) -> str:
    """A setting's value as people read it."""
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _within(value: float, limits: _Limits) -> bool:
    return limits.minimum <= value <= limits.maximum and abs(value) < sys.float_info.max


def _reader(kind: type, optional: bool, limits: _Limits) -> Any:
    """What argparse calls with the text of an option."""

    def read(text: str) -> Any:
        if optional and text.lower() == "none":
            return None
        try:
            value = _seconds(text) if limits.metavar == "TIME" else kind(text)
        except ValueError:
            what = {int: "a whole number", float: "a number"}[kind]
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
