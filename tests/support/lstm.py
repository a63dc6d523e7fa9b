"""LSTM problems for the engine: named options, cells and short ways to call it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import LstmGradients, LstmWeights, _core
from retrograd.lab import cases
from retrograd.lab.cases import ACTIVATION_PARAMETERS, LSTM_STANDARD, LstmCase, LstmData
from retrograd.lab.verify import lstm_options, lstm_weights, verify_lstm
from support.arrays import Array, placed

ISA_LEVELS = tuple(_core.isa_levels())
THREADS = (1, 2, 3, 7)
NEEDS = ("dx", "dwx", "dwh", "db", "dpeephole", "dh0", "dc0")


def flat(value: Any) -> list[Array | None]:
    """All arrays of nested results, in order, without the parameters of options that no problem here has."""
    if value is None or isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, rg.LstmWeights):
        value = value[:4]
    return [array for part in value for array in flat(part)]


def forward(case: LstmCase, data: LstmData, **options: Any) -> rg.LstmResult:
    return rg.lstm_forward(data.x, lstm_weights(data), data.h0, data.c0, **lstm_options(case) | options)


def backward(data: LstmData, cache: rg.LstmCache | None, **options: Any) -> LstmGradients:
    assert cache is not None
    return rg.lstm_backward(data.dy, cache, **{"dhn": data.dhn, "dcn": data.dcn} | options)


def check(case: LstmCase, levels: Sequence[str] = ISA_LEVELS, threads: Sequence[int] = THREADS) -> None:
    """Within tolerance at each level, and the same bits at all numbers of threads."""
    rows = verify_lstm([case], levels, threads)
    assert [(row.isa, row.threads, row.same_bits, row.errors) for row in rows if not row.ok] == []


def random(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def custom(**names: str) -> tuple[cases.NamedActivation, ...]:
    """Activations of the roles i f g o h; the others are standard."""
    return tuple(
        (names[role], *ACTIVATION_PARAMETERS[names[role]]) if role in names else usual
        for role, usual in zip("ifgoh", LSTM_STANDARD, strict=True)
    )


# Just large enough for a team to be asked.
BASE = LstmCase(6, 7, 5, 35)
OPTIONS: dict[str, dict[str, Any]] = {
    "layers": {"layers": 2},
    "directions": {"directions": 2},
    "no_bias": {"bias": False},
    "states": {"states": True},
    "diagonal": {"peephole": "diagonal"},
    "full": {"peephole": "full"},
    "reads_old": {"output_gate_reads": "old"},
    "activations": {"activations": custom(i="hard_sigmoid", f="softsign", g="elu", o="softplus", h="scaled_tanh")},
    "dropout": {"dropout": 0.4, "layers": 2},
    "lengths": {"lengths": (6, 2, 0, 5, 6, 1, 4)},
    "batch_sizes": {"batch_sizes": (3, 7, 0, 6, 1, 7)},
    "batch_first": {"batch_first": True},
    "stacked": {"weights": "stacked"},
    "gates": {"weights": "gates"},
    "float64": {"dtype": "float64"},
}


def moved(value: Any, memory: Iterator[str], blank: bool = False) -> Any:
    """The same arrays elsewhere in memory, or results' buffers full of NaN there."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return placed(np.full_like(value, math.nan) if blank else value, next(memory), tuple(range(value.ndim))[::-1])
    parts = (moved(part, memory, blank) for part in value)
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


VARIANTS: dict[str, LstmCase] = {
    "plain": replace(BASE, states=True),
    "stacked": replace(BASE, layers=3, directions=2, states=True),
    "diagonal": replace(BASE, peephole="diagonal", states=True, directions=2),
    "full": replace(BASE, peephole="full", states=True, layers=2),
    "full_old": replace(BASE, peephole="full", output_gate_reads="old", states=True),
    "activations": replace(BASE, states=True, **OPTIONS["activations"]),
    "lengths": replace(BASE, layers=2, directions=2, states=True, **OPTIONS["lengths"]),
    "batch_sizes": replace(BASE, layers=2, directions=2, states=True, **OPTIONS["batch_sizes"]),
    "wide": LstmCase(3, 5, 40, 150, states=True, dtype="float64"),
}
variants = pytest.mark.parametrize("name", VARIANTS)


CACHED = replace(BASE, layers=2, directions=2, states=True, **OPTIONS["lengths"])


H = 6


def f32(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def cell(**parts: Any) -> LstmWeights:
    return LstmWeights(f32(4 * H, 5), f32(4 * H, H), f32(4 * H), f32(4 * H))._replace(**parts)
