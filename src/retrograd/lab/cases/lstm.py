"""LSTM problems."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .norm import ACTIVATION_PARAMETERS
from .types import Array, NamedActivation, Peephole, WeightsForm

__all__ = [
    "LSTM_BENCH_CASES",
    "LSTM_STANDARD",
    "LSTM_VERIFY_CASES",
    "LstmCase",
    "LstmData",
    "LstmParameters",
    "make_lstm_data",
]

LSTM_STANDARD: Final[tuple[NamedActivation, ...]] = (
    ("sigmoid", 0.0, 0.0),
    ("sigmoid", 0.0, 0.0),
    ("tanh", 0.0, 0.0),
    ("sigmoid", 0.0, 0.0),
    ("tanh", 0.0, 0.0),
)


@dataclass(frozen=True)
class LstmCase:
    """An LSTM to verify or to time, forward and backward. `activations` are for i, f, g, o and the hidden output.

    `weights` is the form in which they are passed: all gates in one array [4H, ...] ("concatenated"), in one array
    [4, H, ...] ("stacked"), or one array [H, ...] per gate ("gates").
    """

    steps: int
    samples: int
    inputs: int
    units: int
    layers: int = 1
    directions: int = 1
    dtype: str = "float32"
    bias: bool = True
    states: bool = False  # initial states are given
    peephole: Peephole = "none"
    output_gate_reads: str = "new"
    activations: tuple[NamedActivation, ...] = LSTM_STANDARD
    dropout: float = 0.0
    seed: int = 11  # of dropout
    lengths: tuple[int, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    batch_first: bool = False
    weights: WeightsForm = "concatenated"
    workload: str = ""

    @property
    def name(self) -> str:
        """``lstm_t64n32i128h256_l2_bi_diagonal``: the sizes, then the options that are not the default."""
        words = [f"lstm_t{self.steps}n{self.samples}i{self.inputs}h{self.units}"]
        if self.layers > 1:
            words.append(f"l{self.layers}")
        if self.directions > 1:
            words.append("bi")
        if self.peephole != "none":
            words.append(self.peephole)
        if self.output_gate_reads != "new":
            words.append(f"reads_{self.output_gate_reads}")
        roles: dict[str, str] = {}
        for role, (name, _, _), (usual, _, _) in zip("ifgoh", self.activations, LSTM_STANDARD, strict=True):
            if name != usual:
                roles[name] = roles.get(name, "") + role
        words += [f"{where}.{name}" for name, where in roles.items()]
        if self.dropout:
            words.append(f"dropout{self.dropout:g}")
        words += ["no_bias"] * (not self.bias) + ["states"] * self.states
        words += ["lengths"] * (self.lengths is not None) + ["batch_sizes"] * (self.batch_sizes is not None)
        words += ["batch_first"] * self.batch_first
        if self.weights != "concatenated":
            words.append(self.weights)
        if self.dtype != "float32":
            words.append(self.dtype)
        return "_".join(words)

    @property
    def cells(self) -> int:
        return self.layers * self.directions

    @property
    def active(self) -> npt.NDArray[np.bool_] | None:
        """Which samples are active at which step, [T, N]; None: all."""
        if self.lengths is not None:
            return np.arange(self.steps)[:, None] < np.array(self.lengths, dtype=int)[None, :]
        if self.batch_sizes is not None:
            return np.arange(self.samples)[None, :] < np.array(self.batch_sizes, dtype=int)[:, None]
        return None

    def cell_inputs(self, cell: int) -> int:
        return self.inputs if cell < self.directions else self.directions * self.units


class LstmParameters(NamedTuple):
    """The parameters of one cell, or their gradients, or the tolerances of those."""

    wx: Any
    wh: Any
    b: Any = None
    peephole: Any = None

    def stacked(self) -> LstmParameters:
        """Convert any form to [4, H, ...], with zeros for gates that are None; a parameter that is None stays None."""
        units = (self.wh[0] if isinstance(self.wh, (tuple, list)) else self.wh).shape[-1]
        return LstmParameters(
            *(None if part is None else _stacked(part, units, at < 2) for at, part in enumerate(self))
        )


class LstmData(NamedTuple):
    """The arrays of a case: time first, or batch first if the case says so; one `LstmParameters` per cell."""

    x: Array  # [T, N, I]
    weights: tuple[LstmParameters, ...]
    h0: Array | None  # [cells, N, H]
    c0: Array | None
    dy: Array  # [T, N, directions * H]
    dhn: Array  # [cells, N, H]
    dcn: Array


def _stacked(part: Any, units: int, is_matrix: bool) -> Array:
    if isinstance(part, (tuple, list)):
        like = next(a for a in part if a is not None)
        return np.stack([np.zeros_like(like) if a is None else a for a in part])
    vector = not is_matrix and (part.ndim == 1 or part.shape == (4, units))
    return np.asarray(part).reshape(4, units, *(() if vector else part.shape[-1:]))


def make_lstm_data(case: LstmCase, seed: int = 0) -> LstmData:
    """Draw normal x and gradients, and weights that give pre-activations of size 1. Depends on case and seed only."""
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    drawn: Any = np.float64 if case.dtype == "float64" else np.float32

    def normal(*shape: int, scale: float = 1.0) -> Array:
        values = rng.standard_normal(shape, dtype=drawn)
        values *= drawn(scale)
        return values

    def formed(array: Array) -> Any:
        match case.weights:
            case "concatenated":
                return array.reshape(4 * case.units, *array.shape[2:])
            case "stacked":
                return array
            case _:
                return tuple(gate.copy() for gate in array)

    H = case.units
    cells = []
    for cell in range(case.cells):
        width = case.cell_inputs(cell)
        peephole = {
            "none": None,
            "diagonal": normal(4, H, scale=0.3),
            "full": normal(4, H, H, scale=0.3 / math.sqrt(H)) if case.peephole == "full" else None,
        }[case.peephole]
        parts = (
            normal(4, H, width, scale=1 / math.sqrt(max(width, 1))),
            normal(4, H, H, scale=0.8 / math.sqrt(H)),
            normal(4, H, scale=0.5) if case.bias else None,
            peephole,
        )
        cells.append(LstmParameters(*(None if part is None else formed(part) for part in parts)))
    state = (case.cells, case.samples, H)
    x, dy = (
        normal(*((case.samples, case.steps) if case.batch_first else (case.steps, case.samples)), width)
        for width in (case.inputs, case.directions * H)
    )
    return LstmData(
        x,
        tuple(cells),
        normal(*state) if case.states else None,
        normal(*state) if case.states else None,
        dy,
        normal(*state),
        normal(*state),
    )


def _with_activations(**names: str) -> tuple[NamedActivation, ...]:
    """Return the standard activations with the named roles (i f g o h) replaced."""
    return tuple(
        (names[role], *ACTIVATION_PARAMETERS[names[role]]) if role in names else usual
        for role, usual in zip("ifgoh", LSTM_STANDARD, strict=True)
    )


def _lstm_bench_cases() -> Iterator[LstmCase]:
    for sizes, workload in (
        ((20, 1, 4, 16, 1, 1), "sensor"),
        ((32, 1, 32, 64, 1, 1), "streaming"),
        ((32, 8, 64, 64, 1, 1), "small batch"),
        ((64, 32, 128, 128, 1, 1), "classifier"),
        ((128, 16, 256, 256, 2, 1), "forecaster"),
        ((50, 64, 512, 512, 1, 1), "encoder"),
        ((35, 20, 650, 650, 2, 1), "language model"),
        ((100, 32, 40, 256, 2, 2), "speech"),
        ((20, 8, 1024, 1024, 1, 1), "wide"),
    ):
        yield LstmCase(*sizes, workload=workload)
    lengths = np.linspace(10, 100, 32).round().astype(int)
    np.random.default_rng(0).shuffle(lengths)
    yield LstmCase(100, 32, 128, 128, lengths=tuple(lengths.tolist()), workload="ragged")
    yield LstmCase(10_000, 1, 64, 64, workload="long")
    yield LstmCase(64, 32, 128, 128, peephole="diagonal", workload="peepholes")
    hard = _with_activations(i="hard_sigmoid", f="hard_sigmoid", o="hard_sigmoid")
    yield LstmCase(64, 32, 128, 128, activations=hard, workload="own activations")
    yield LstmCase(64, 32, 128, 128, 2, workload="two layers")
    yield LstmCase(64, 32, 128, 128, 2, dropout=0.3, workload="dropout")


def _lstm_verify_cases() -> Iterator[LstmCase]:
    """Yield cases for every option, and for sizes around the limits of vectors, panels and thread splits."""
    for dtype in ("float32", "float64"):
        yield LstmCase(7, 5, 6, 11, dtype=dtype)
        yield LstmCase(7, 5, 6, 11, 3, 2, dtype=dtype, states=True)
        for peephole in ("diagonal", "full"):
            for reads in ("new", "old"):
                options: dict[str, Any] = {"peephole": peephole, "output_gate_reads": reads, "dtype": dtype}
                yield LstmCase(6, 4, 5, 17, 1, 2, states=True, **options)
        yield LstmCase(9, 6, 5, 13, 2, 2, dtype=dtype, lengths=(4, 9, 0, 1, 9, 6), states=True)
        yield LstmCase(6, 5, 5, 13, 2, 2, dtype=dtype, batch_sizes=(2, 5, 0, 5, 1, 3), states=True)
        yield LstmCase(6, 4, 5, 24, 3, 2, dtype=dtype, dropout=0.4)
        yield LstmCase(6, 4, 5, 10, bias=False, dtype=dtype, batch_first=True, weights="gates")
    yield LstmCase(6, 4, 5, 10, peephole="full", weights="stacked", batch_first=True)
    yield LstmCase(6, 4, 5, 10, 2, peephole="diagonal", weights="gates", lengths=(6, 2, 5, 3), dropout=0.5)
    # Sizes around the vector width, and 1.
    for units in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65):
        yield LstmCase(5, 3, 4, units)
        yield LstmCase(3, 2, units, 3, dtype="float64")
    yield LstmCase(1, 1, 1, 1)
    yield LstmCase(1, 13, 3, 5, states=True)
    yield LstmCase(40, 1, 3, 5, states=True)
    yield LstmCase(4, 3, 0, 6, 2, states=True)
    # Large enough for several threads, split by batch and by units; more rows than one run of a sum; a long sequence.
    yield LstmCase(12, 24, 40, 48, 2, 2, lengths=tuple(1 + n * 5 % 12 for n in range(24)))
    yield LstmCase(6, 2, 96, 250, peephole="diagonal")
    yield LstmCase(40, 33, 20, 24)
    yield LstmCase(300, 2, 8, 16, states=True)
    # Every activation, each in one role.
    for number, name in enumerate(ACTIVATION_PARAMETERS):
        activations = _with_activations(**{"ifgoh"[number % 5]: name})
        yield LstmCase(5, 4, 3, 19, activations=activations, dtype=("float32", "float64")[number // 5 % 2])
    yield LstmCase(5, 4, 3, 19, activations=_with_activations(i="relu", f="hard_sigmoid", o="softplus", h="softsign"))


def _distinct_lstm(every: Iterator[LstmCase]) -> tuple[LstmCase, ...]:
    return tuple({case.name: case for case in every}.values())


# The rows of the tables in docs/performance.md, float32.
LSTM_BENCH_CASES: Final[tuple[LstmCase, ...]] = _distinct_lstm(_lstm_bench_cases())
# Small enough to run completely at every instruction-set level.
LSTM_VERIFY_CASES: Final[tuple[LstmCase, ...]] = _distinct_lstm(_lstm_verify_cases())
