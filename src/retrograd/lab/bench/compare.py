"""Compares two CSV files of the benchmark: which rows became faster or slower, and by how much more than noise."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .rows import BenchRow

__all__ = ["Change", "Comparison", "CsvError", "Measurement", "compare_measurements", "read_measurements"]


class CsvError(Exception):
    """A file that is not the benchmark's."""


class Measurement(NamedTuple):
    """What a comparison needs of a row of the CSV file."""

    case: str
    provider: str
    pass_: str
    threads: int
    seconds: float  # the median
    spread: float  # of the median from round to round, as a share of it
    conditions: tuple[str | None, ...]  # in the order of _CONDITIONS; None: not recorded

    @property
    def key(self) -> tuple[str, str, int]:
        return self.case, self.pass_, self.threads

    @classmethod
    def of(cls, row: BenchRow) -> Measurement:
        """What would be read from the file."""
        return cls(row.case, row.provider, row.pass_, row.threads, row.p50, row.spread, _conditions(row._asdict()))


_NEEDED: Final = ("case", "provider", "pass", "threads", "isa", "p20", "p50", "p80", "device", "version")
_CONDITIONS: Final = {
    "isa": "ISA level",
    "version": "version",
    "device": "processor",
    "caches": "caches",
    "environment": "restrictions",
}
_OF_EACH: Final = ("isa", "version")  # the others are the same for all implementations
_OURS: Final = ("retrograd", "plain", "arrays")  # implementations that a change of retrograd may change


def read_measurements(path: str) -> list[Measurement]:
    """Read a file that the benchmark wrote, of this or an earlier version."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise CsvError(f"{path} is not a file of retrograd bench: no column {missing[0]}")
            return [_measurement(row, f"{path}, line {reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise CsvError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _measurement(row: dict[str, str], where: str) -> Measurement:
    try:
        p20, p50, p80 = (float(row[name]) for name in ("p20", "p50", "p80"))
        # Files of earlier versions have no spread of rounds; the spread of all samples is larger.
        spread = float(row.get("spread") or (p80 - p20) / 2 / p50)
        threads = int(row["threads"])
    except (TypeError, ValueError, ZeroDivisionError):
        raise CsvError(f"{where} has no times") from None
    if not (0 < p50 < math.inf and 0 <= spread < math.inf):
        raise CsvError(f"{where}: a time of {row['p50']} with a spread of {spread:.3g}")
    return Measurement(row["case"], row["provider"], row["pass"], threads, p50, spread, _conditions(row))


def _conditions(row: Mapping[str, Any]) -> tuple[str | None, ...]:
    """BLAS may not say at which level it runs."""
    return tuple(None if name == "isa" and not row[name] else row.get(name) for name in _CONDITIONS)


class Change(NamedTuple):
    case: str
    pass_: str
    threads: int
    old: float  # seconds
    new: float
    noise: float  # as a share
    others: float | None  # old / new of the other implementations of the row, which did not change
    verdict: str  # slower, faster, slower? and faster? within noise, or nothing

    @property
    def ratio(self) -> float:
        """Above 1: faster than before."""
        return self.old / self.new


class Comparison(NamedTuple):
    changes: list[Change]
    only_old: list[tuple[str, str, int]]
    only_new: list[tuple[str, str, int]]
    differences: list[str]  # between the conditions of the two runs

    @property
    def slower(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "slower"]


def compare_measurements(
    old: Sequence[Measurement],
    new: Sequence[Measurement],
    threshold: float,
    expected: Callable[[str, int], bool] = lambda case, threads: True,
) -> Comparison:
    """Compare retrograd's rows. A row is slower if new / old exceeds the threshold by more than the noise.

    The noise of a ratio is the spread of both medians from round to round, plus how far the other implementations of
    the row, which did not change, have moved from their old times. `expected` says which old rows the new run has.
    """
    before, after = ({row.key: row for row in rows if row.provider == "retrograd"} for rows in (old, new))
    others_before, others_after = (
        {(row.key, row.provider): row.seconds for row in rows if row.provider not in _OURS} for rows in (old, new)
    )
    providers = list(dict.fromkeys(provider for _, provider in others_after))
    changes = []
    for key, row in after.items():
        if key not in before:
            continue
        earlier = before[key]
        moved = [
            others_before[key, provider] / others_after[key, provider]
            for provider in providers
            if (key, provider) in others_before and (key, provider) in others_after
        ]
        others_ratio = statistics.median(moved) if moved else None
        noise = earlier.spread + row.spread + (0.0 if others_ratio is None else abs(others_ratio - 1))
        verdict = _verdict(earlier.seconds / row.seconds, noise, threshold)
        changes.append(Change(*key, earlier.seconds, row.seconds, noise, others_ratio, verdict))
    return Comparison(
        changes,
        [key for key in before if key not in after and expected(key[0], key[2])],
        [key for key in after if key not in before],
        _differences(old, new),
    )


def _verdict(ratio: float, noise: float, threshold: float) -> str:
    for word, change in (("slower", 1 / ratio), ("faster", ratio)):
        if change > threshold + noise:
            return word
        if change > threshold:
            return word + "?"
    return ""


def _differences(old: Sequence[Measurement], new: Sequence[Measurement]) -> list[str]:
    """Describe every condition that was not the same in both runs."""
    found = []
    for provider in dict.fromkeys(row.provider for row in new):
        for index, (name, title) in enumerate(_CONDITIONS.items()):
            if provider != "retrograd" and (provider in _OURS or name not in _OF_EACH):
                continue
            before, now = (
                sorted(
                    {value for row in rows if row.provider == provider and (value := row.conditions[index]) is not None}
                )
                for rows in (old, new)
            )
            if before and now and before != now:
                found.append(f"{title} of {provider}: {_listed(before)} before, {_listed(now)} now")
    return found


def _listed(values: Sequence[str]) -> str:
    return ", ".join(value or "none" for value in values)
