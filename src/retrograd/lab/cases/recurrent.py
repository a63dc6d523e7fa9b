"""LSTM, GRU and simple RNN problems."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .norm import ACTIVATION_PARAMETERS
from .types import Array, NamedActivation, Peephole, RecurrentMask, WeightsForm

__all__ = [
    "GRU_BENCH_CASES",
    "GRU_STANDARD",
    "GRU_VERIFY_CASES",
    "LSTM_BENCH_CASES",
    "LSTM_OPTION_BENCH_CASES",
    "LSTM_OPTION_CASES",
    "LSTM_STANDARD",
    "LSTM_VERIFY_CASES",
    "RNN_BENCH_CASES",
    "RNN_STANDARD",
    "RNN_VERIFY_CASES",
    "GruCase",
    "GruParameters",
    "LstmCase",
    "LstmData",
    "LstmParameters",
    "RecurrentCase",
    "RecurrentData",
    "RnnCase",
    "RnnParameters",
    "make_lstm_data",
    "make_recurrent_data",
]

_SIGMOID: Final = ("sigmoid", 0.0, 0.0)
_TANH: Final = ("tanh", 0.0, 0.0)
LSTM_STANDARD: Final[tuple[NamedActivation, ...]] = (_SIGMOID, _SIGMOID, _TANH, _SIGMOID, _TANH)
GRU_STANDARD: Final[tuple[NamedActivation, ...]] = (_SIGMOID, _SIGMOID, _TANH)
RNN_STANDARD: Final[tuple[NamedActivation, ...]] = (_TANH,)


# ---- parameters ------------------------------------------------------------------------------------------------------


class LstmParameters(NamedTuple):
    """The parameters of one cell, or their gradients, or the tolerances of those."""

    wx: Any
    wh: Any
    b: Any = None
    peephole: Any = None
    projection: Any = None
    gamma_x: Any = None
    gamma_h: Any = None
    gamma_c: Any = None
    beta_c: Any = None

    def stacked(self) -> LstmParameters:
        """Convert any form to [4, H, ...], with zeros for gates that are None; a parameter that is None stays None."""
        return LstmParameters(**_all_stacked(self._asdict(), 4))


class GruParameters(NamedTuple):
    """As `LstmParameters`."""

    wx: Any
    wh: Any
    b: Any = None
    bh: Any = None
    gamma_x: Any = None
    gamma_h: Any = None

    def stacked(self) -> GruParameters:
        """Convert any form to [3, H, ...], as `LstmParameters.stacked`."""
        return GruParameters(**_all_stacked(self._asdict(), 3))


class RnnParameters(NamedTuple):
    """As `LstmParameters`."""

    wx: Any
    wh: Any
    b: Any = None
    gamma_x: Any = None
    gamma_h: Any = None

    def stacked(self) -> RnnParameters:
        """Convert any form to [1, H, ...], as `LstmParameters.stacked`."""
        return RnnParameters(**_all_stacked(self._asdict(), 1))


_MATRICES: Final = ("wx", "wh")
_NOT_OF_GATES: Final = ("projection", "gamma_c", "beta_c")


def _all_stacked(parts: dict[str, Any], gates: int) -> dict[str, Any]:
    wh, projection = parts["wh"], parts.get("projection")
    like = projection if projection is not None else wh[0] if isinstance(wh, (tuple, list)) else wh
    units = like.shape[-1]

    def stacked(name: str, part: Any) -> Any:
        if part is None or name in _NOT_OF_GATES:
            return part
        if isinstance(part, (tuple, list)) and all(gate is None for gate in part):
            return None
        return _stacked(part, units, gates, name in _MATRICES)

    return {name: stacked(name, part) for name, part in parts.items()}


def _stacked(part: Any, units: int, gates: int, is_matrix: bool) -> Array:
    if isinstance(part, (tuple, list)):
        like = next(a for a in part if a is not None)
        return np.stack([np.zeros_like(like) if a is None else a for a in part])
    vector = not is_matrix and (part.ndim == 1 or part.shape == (gates, units))
    return np.asarray(part).reshape(gates, units, *(() if vector else part.shape[-1:]))


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecurrentCase:
    """What the cases of all cells have. `activations` are for the gates (LSTM: and the hidden output).

    `weights` is the form in which they are passed: all gates in one array [G*H, ...] ("concatenated"), in one array
    [G, H, ...] ("stacked"), or one array [H, ...] per gate ("gates").
    """

    kind_name: ClassVar[str]
    roles: ClassVar[str]
    gates: ClassVar[int]
    standard: ClassVar[tuple[NamedActivation, ...]]

    steps: int
    samples: int
    inputs: int
    units: int
    layers: int = 1
    directions: int = 1
    dtype: str = "float32"
    bias: bool = True
    states: bool = False  # initial states are given
    activations: tuple[NamedActivation, ...] = ()
    dropout: float = 0.0
    seed: int = 11  # of dropout
    lengths: tuple[int, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    batch_first: bool = False
    weights: WeightsForm = "concatenated"
    workload: str = ""
    reset: bool = False  # states are reset at random steps
    mask: RecurrentMask = "none"  # of the recurrent product: one for all gates, per gate, per step, or per both
    zoneout: float = 0.0  # the probability that an element of h keeps its old value
    clip: float | None = None
    norm: str | None = None
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if not self.activations:
            object.__setattr__(self, "activations", self.standard)

    @property
    def name(self) -> str:
        """``lstm_t64n32i128h256_l2_bi_diagonal``: the sizes, then the options that are not the default."""
        words = [f"{self.kind_name}_t{self.steps}n{self.samples}i{self.inputs}h{self.units}"]
        if self.layers > 1:
            words.append(f"l{self.layers}")
        if self.directions > 1:
            words.append("bi")
        words += self._own_words()
        roles: dict[str, str] = {}
        for role, (name, _, _), (usual, _, _) in zip(self.roles, self.activations, self.standard, strict=True):
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
        words += ["reset"] * self.reset
        words += [f"mask_{self.mask}"] * (self.mask != "none")
        words += [f"zoneout{self.zoneout:g}"] * bool(self.zoneout)
        words += [] if self.clip is None else [f"clip{self.clip:g}"]
        words += [] if self.norm is None else [f"norm_{self.norm}"]
        words += [] if self.norm_eps == 1e-5 else [f"eps{self.norm_eps:g}"]
        if self.dtype != "float32":
            words.append(self.dtype)
        return "_".join(words)

    def _own_words(self) -> list[str]:
        return []

    @property
    def cells(self) -> int:
        return self.layers * self.directions

    @property
    def outputs(self) -> int:
        """The width of h."""
        return self.units

    @property
    def active(self) -> npt.NDArray[np.bool_] | None:
        """Which samples are active at which step, [T, N]; None: all."""
        if self.lengths is not None:
            return np.arange(self.steps)[:, None] < np.array(self.lengths, dtype=int)[None, :]
        if self.batch_sizes is not None:
            return np.arange(self.samples)[None, :] < np.array(self.batch_sizes, dtype=int)[:, None]
        return None

    def cell_inputs(self, cell: int) -> int:
        return self.inputs if cell < self.directions else self.directions * self.outputs


@dataclass(frozen=True)
class LstmCase(RecurrentCase):
    """An LSTM to verify or to time, forward and backward. `activations` are for i, f, g, o and the hidden output."""

    kind_name: ClassVar[str] = "lstm"
    roles: ClassVar[str] = "ifgoh"
    gates: ClassVar[int] = 4
    standard: ClassVar[tuple[NamedActivation, ...]] = LSTM_STANDARD

    peephole: Peephole = "none"
    output_gate_reads: str = "new"
    projection: int = 0  # the width of h; 0: no projection
    zoneout_c: float = 0.0
    cell_clip: float | None = None
    coupled: bool = False

    @property
    def outputs(self) -> int:
        return self.projection or self.units

    def _own_words(self) -> list[str]:
        words: list[str] = [] if self.peephole == "none" else [self.peephole]
        words += [f"reads_{self.output_gate_reads}"] * (self.output_gate_reads != "new")
        words += [f"p{self.projection}"] * bool(self.projection)
        words += [f"zoneout_c{self.zoneout_c:g}"] * bool(self.zoneout_c)
        words += [] if self.cell_clip is None else [f"cell_clip{self.cell_clip:g}"]
        return words + ["coupled"] * self.coupled


@dataclass(frozen=True)
class GruCase(RecurrentCase):
    """A GRU to verify, forward and backward. `activations` are for r, z and n."""

    kind_name: ClassVar[str] = "gru"
    roles: ClassVar[str] = "rzn"
    gates: ClassVar[int] = 3
    standard: ClassVar[tuple[NamedActivation, ...]] = GRU_STANDARD

    kind: str = "after"
    flip: bool = False
    recurrent_bias: bool = True

    def _own_words(self) -> list[str]:
        words = [self.kind] * (self.kind != "after") + ["flip"] * self.flip
        return words + ["no_bh"] * (not self.recurrent_bias)


@dataclass(frozen=True)
class RnnCase(RecurrentCase):
    """A simple RNN to verify, forward and backward."""

    kind_name: ClassVar[str] = "rnn"
    roles: ClassVar[str] = "h"
    gates: ClassVar[int] = 1
    standard: ClassVar[tuple[NamedActivation, ...]] = RNN_STANDARD


# ---- data ------------------------------------------------------------------------------------------------------------


class LstmData(NamedTuple):
    """The arrays of a case: time first, or batch first if the case says so; one `LstmParameters` per cell.

    P is the width of h. The arrays of options inside the recurrence are time first in any case.
    """

    x: Array  # [T, N, I]
    weights: tuple[LstmParameters, ...]
    h0: Array | None  # [cells, N, P]
    c0: Array | None
    dy: Array  # [T, N, directions * P]
    dhn: Array  # [cells, N, P]
    dcn: Array
    reset: npt.NDArray[np.bool_] | None = None  # [T, N]
    mask: Array | None = None  # [cells, G or 1, T or 1, N, P]
    zoneout_h: Array | None = None  # [cells, T, N, P], 1 where the new value is taken
    zoneout_c: Array | None = None  # [cells, T, N, H]


class RecurrentData(NamedTuple):
    """The same for a GRU or a simple RNN."""

    x: Array
    weights: tuple[Any, ...]  # GruParameters or RnnParameters
    h0: Array | None
    dy: Array
    dhn: Array
    reset: npt.NDArray[np.bool_] | None = None
    mask: Array | None = None
    zoneout_h: Array | None = None


class _Draws:
    """Draws the arrays of a case. Depends on case and seed only."""

    def __init__(self, case: RecurrentCase, seed: int) -> None:
        self.case = case
        self.rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
        self.drawn: Any = np.float64 if case.dtype == "float64" else np.float32

    def normal(self, *shape: int, scale: float = 1.0) -> Array:
        values = self.rng.standard_normal(shape, dtype=self.drawn)
        values *= self.drawn(scale)
        return values

    def formed(self, array: Array) -> Any:
        """A parameter [G, H, ...] in the form of the case."""
        match self.case.weights:
            case "concatenated":
                return array.reshape(self.case.gates * self.case.units, *array.shape[2:])
            case "stacked":
                return array
            case _:
                return tuple(gate.copy() for gate in array)

    def sequence(self, width: int) -> Array:
        case = self.case
        return self.normal(*((case.samples, case.steps) if case.batch_first else (case.steps, case.samples)), width)

    def matrices(self, cell: int) -> tuple[Array, Array]:
        """wx and wh, which give pre-activations of size 1."""
        case, width = self.case, self.case.cell_inputs(cell)
        shape = case.gates, case.units
        wx = self.normal(*shape, width, scale=1 / math.sqrt(max(width, 1)))
        return wx, self.normal(*shape, case.outputs, scale=0.8 / math.sqrt(case.outputs))

    def gamma(self, *shape: int) -> Array:
        values = self.normal(*shape, scale=0.2)
        values += self.drawn(1)
        return values

    def keep(self, rate: float, width: int) -> Array | None:
        case = self.case
        if not rate:
            return None
        kept = self.rng.random((case.cells, case.steps, case.samples, width)) >= rate
        return kept.astype(self.drawn)

    def reset(self) -> npt.NDArray[np.bool_] | None:
        case = self.case
        return self.rng.random((case.steps, case.samples)) < 0.2 if case.reset else None

    def mask(self) -> Array | None:
        case = self.case
        if case.mask == "none":
            return None
        gates = case.gates if case.mask in ("gates", "full") else 1
        steps = case.steps if case.mask in ("steps", "full") else 1
        kept = self.rng.random((case.cells, gates, steps, case.samples, case.outputs)) < 0.75
        values: Array = np.where(kept, self.drawn(4 / 3), self.drawn(0))
        return values


def make_lstm_data(case: LstmCase, seed: int = 0) -> LstmData:
    """Draw normal x and gradients, and weights that give pre-activations of size 1. Depends on case and seed only."""
    draw = _Draws(case, seed)
    H, P = case.units, case.outputs
    cells = []
    for cell in range(case.cells):
        diagonal = draw.normal(4, H, scale=0.3)
        full = draw.normal(4, H, H, scale=0.3 / math.sqrt(H)) if case.peephole == "full" else None
        peephole = {"none": None, "diagonal": diagonal, "full": full}[case.peephole]
        parts = (*draw.matrices(cell), draw.normal(4, H, scale=0.5) if case.bias else None, peephole)
        parameters = LstmParameters(*(None if part is None else draw.formed(part) for part in parts))
        if case.projection:
            parameters = parameters._replace(projection=draw.normal(P, H, scale=1 / math.sqrt(H)))
        if case.norm is not None:
            parameters = parameters._replace(
                gamma_x=draw.formed(draw.gamma(4, H)),
                gamma_h=draw.formed(draw.gamma(4, H)),
                gamma_c=draw.gamma(H),
                beta_c=draw.normal(H, scale=0.3),
            )
        cells.append(parameters)
    x, dy = draw.sequence(case.inputs), draw.sequence(case.directions * P)
    count, N = case.cells, case.samples
    return LstmData(
        x,
        tuple(cells),
        draw.normal(count, N, P) if case.states else None,
        draw.normal(count, N, H) if case.states else None,
        dy,
        draw.normal(count, N, P),
        draw.normal(count, N, H),
        draw.reset(),
        draw.mask(),
        draw.keep(case.zoneout, P),
        draw.keep(case.zoneout_c, H),
    )


def make_recurrent_data(case: GruCase | RnnCase, seed: int = 0) -> RecurrentData:
    """`make_lstm_data` for a GRU or a simple RNN."""
    draw = _Draws(case, seed)
    G, H = case.gates, case.units
    cells: list[Any] = []
    for cell in range(case.cells):
        parts: dict[str, Any] = dict(zip(("wx", "wh"), draw.matrices(cell), strict=True))
        if case.bias:
            parts["b"] = draw.normal(G, H, scale=0.5)
        if isinstance(case, GruCase) and case.bias and case.recurrent_bias:
            parts["bh"] = draw.normal(G, H, scale=0.5)
        if case.norm is not None:
            parts |= {name: draw.gamma(G, H) for name in ("gamma_x", "gamma_h")}
        formed = {name: draw.formed(part) for name, part in parts.items()}
        cells.append(GruParameters(**formed) if isinstance(case, GruCase) else RnnParameters(**formed))
    x, dy = draw.sequence(case.inputs), draw.sequence(case.directions * H)
    state = case.cells, case.samples, H
    return RecurrentData(
        x,
        tuple(cells),
        draw.normal(*state) if case.states else None,
        dy,
        draw.normal(*state),
        draw.reset(),
        draw.mask(),
        draw.keep(case.zoneout, H),
    )


# ---- lists of cases --------------------------------------------------------------------------------------------------

_Case = TypeVar("_Case", bound=RecurrentCase)


def _activations(of: type[RecurrentCase], **names: str) -> tuple[NamedActivation, ...]:
    """Return the standard activations with the named roles replaced."""
    return tuple(
        (names[role], *ACTIVATION_PARAMETERS[names[role]]) if role in names else usual
        for role, usual in zip(of.roles, of.standard, strict=True)
    )


def _with_activations(**names: str) -> tuple[NamedActivation, ...]:
    return _activations(LstmCase, **names)


def _sizes_to_time(of: type[_Case]) -> Iterator[_Case]:
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
        yield of(*sizes, workload=workload)
    lengths = np.linspace(10, 100, 32).round().astype(int)
    np.random.default_rng(0).shuffle(lengths)
    yield of(100, 32, 128, 128, lengths=tuple(lengths.tolist()), workload="ragged")
    yield of(10_000, 1, 64, 64, workload="long")


def _options_to_time(of: type[_Case], *own: tuple[str, Any]) -> Iterator[_Case]:
    """Yield cases with one option inside the recurrence each; `own` has those that only this cell has."""
    masks = ("mask", "tied"), *[("mask", "gates")] * (of.gates > 1)
    for sizes in ((32, 8, 64, 64), (64, 32, 128, 128)):
        for name, value in (("reset", True), *masks, ("zoneout", 0.1), ("clip", 3.0), ("norm", "haste"), *own):
            yield of(*sizes, **{name: value})


def _lstm_bench_cases() -> Iterator[LstmCase]:
    yield from _sizes_to_time(LstmCase)
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


def _inside_cases(of: type[_Case], dtype: str, **options: Any) -> Iterator[_Case]:
    """Yield cases for every option inside the recurrence, alone and together."""
    options = {"dtype": dtype, "states": True, **options}
    for mask in ("tied", "gates", "steps", "full"):
        yield of(5, 4, 3, 13, mask=mask, **options)
    yield of(9, 5, 3, 13, reset=True, **options)
    yield of(7, 4, 3, 17, zoneout=0.3, **options)
    yield of(6, 4, 3, 15, clip=0.75, **options)
    yield of(6, 4, 3, 9, 2, 2, mask="gates", zoneout=0.2, clip=1.5, lengths=(6, 2, 0, 5), **options)
    yield of(6, 4, 3, 9, 2, mask="tied", zoneout=0.2, reset=True, dropout=0.4, lengths=(6, 2, 4, 5), **options)


def _norm_cases(of: type[_Case], dtype: str, **options: Any) -> Iterator[_Case]:
    """Yield cases of layer normalization, alone and with what it combines with."""
    options = {"dtype": dtype, "states": True, **options}
    for units in (2, 7, 16, 33):
        yield of(5, 3, 4, units, norm="haste", **options)
    yield of(1, 6, 5, 24, norm="haste", **options)  # tolerances grow quickly with the steps
    yield of(8, 20, 24, 40, norm="haste", **options)
    yield of(5, 3, 4, 11, norm="haste", norm_eps=1e-3, bias=False, **options)
    yield of(6, 4, 3, 9, 2, 2, norm="haste", mask="steps", zoneout=0.2, lengths=(6, 2, 0, 5), **options)
    yield of(6, 4, 3, 9, norm="haste", reset=True, **options)


def _plain_cases(of: type[_Case]) -> Iterator[_Case]:
    """Yield the sizes and options that all cells have, as for the LSTM."""
    for dtype in ("float32", "float64"):
        yield of(7, 5, 6, 11, dtype=dtype)
        yield of(7, 5, 6, 11, 3, 2, dtype=dtype, states=True)
        yield of(9, 6, 5, 13, 2, 2, dtype=dtype, lengths=(4, 9, 0, 1, 9, 6), states=True)
        yield of(6, 5, 5, 13, 2, 2, dtype=dtype, batch_sizes=(2, 5, 0, 5, 1, 3), states=True)
        yield of(6, 4, 5, 24, 3, 2, dtype=dtype, dropout=0.4)
        yield of(6, 4, 5, 10, bias=False, dtype=dtype, batch_first=True, weights="gates")
    yield of(6, 4, 5, 10, 2, weights="stacked", lengths=(6, 2, 5, 3), dropout=0.5, batch_first=True)
    # Sizes around the vector width, 1, and none.
    for units in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65):
        yield of(5, 3, 4, units)
        yield of(3, 2, units, 3, dtype="float64")
    yield of(1, 1, 1, 1)
    yield of(1, 13, 3, 5, states=True)
    yield of(40, 1, 3, 5, states=True)
    yield of(4, 3, 0, 6, 2, states=True)
    yield of(0, 3, 4, 6, 2, states=True)
    # Large enough for several threads, split by batch and by units; more rows than one run of a sum; a long sequence.
    yield of(12, 24, 40, 48, 2, 2, lengths=tuple(1 + n * 5 % 12 for n in range(24)))
    yield of(6, 2, 96, 250)
    yield of(40, 33, 20, 24)
    yield of(300, 2, 8, 16, states=True)
    # Every activation, each in one role.
    for number, name in enumerate(ACTIVATION_PARAMETERS):
        role = of.roles[number % len(of.roles)]
        yield of(
            5, 4, 3, 19, activations=_activations(of, **{role: name}), dtype=("float32", "float64")[number // 5 % 2]
        )
    for dtype in ("float32", "float64"):
        yield from _inside_cases(of, dtype)
        yield from _norm_cases(of, dtype)


def _gru_verify_cases() -> Iterator[GruCase]:
    yield from _plain_cases(GruCase)
    yield GruCase(6, 4, 3, 13, recurrent_bias=False, states=True)
    yield GruCase(6, 4, 3, 13, recurrent_bias=False, kind="before", states=True)
    yield GruCase(6, 4, 3, 13, flip=True, states=True)
    yield GruCase(6, 4, 3, 13, 2, 2, flip=True, states=True, activations=_activations(GruCase, z="softsign"))
    for dtype in ("float32", "float64"):
        options: dict[str, Any] = {"kind": "before", "dtype": dtype, "states": True}
        for units in (1, 7, 8, 16, 17, 33):
            yield GruCase(5, 3, 4, units, **options)
        yield GruCase(6, 4, 3, 13, flip=True, **options)
        yield GruCase(9, 6, 5, 13, 2, 2, lengths=(4, 9, 0, 1, 9, 6), dropout=0.3, **options)
        yield from _inside_cases(GruCase, dtype, kind="before")
    yield GruCase(12, 24, 40, 48, 2, 2, kind="before")


def _lstm_option_cases() -> Iterator[LstmCase]:
    """Yield cases for the options inside the recurrence of an LSTM."""
    for dtype in ("float32", "float64"):
        options: dict[str, Any] = {"dtype": dtype, "states": True}
        yield from _inside_cases(LstmCase, dtype)
        yield from _norm_cases(LstmCase, dtype)
        for units in (2, 7, 16, 33):
            yield LstmCase(5, 3, 4, units, norm="cell", **options)
        yield LstmCase(1, 6, 5, 24, norm="cell", **options)
        yield LstmCase(6, 4, 3, 9, 2, norm="cell", mask="tied", zoneout=0.2, zoneout_c=0.5, reset=True, **options)
        yield LstmCase(6, 4, 3, 9, norm="haste", coupled=True, **options)
        yield LstmCase(6, 4, 3, 9, zoneout_c=0.5, **options)
        yield LstmCase(6, 4, 3, 9, zoneout=0.1, zoneout_c=0.5, peephole="diagonal", **options)
        yield LstmCase(6, 4, 3, 9, cell_clip=0.5, **options)
        yield LstmCase(6, 4, 3, 9, 2, cell_clip=0.5, clip=2.0, peephole="diagonal", **options)
        yield LstmCase(6, 4, 3, 9, 2, clip=2.0, mask="full", reset=True, zoneout=0.2, peephole="full", **options)
        yield LstmCase(6, 4, 3, 9, coupled=True, **options)
        yield LstmCase(6, 4, 3, 9, 2, 2, coupled=True, peephole="diagonal", lengths=(6, 2, 0, 5), **options)
        yield LstmCase(6, 4, 3, 9, clip=0.75, peephole="diagonal", output_gate_reads="old", **options)
        for projection in (1, 3, 8, 16):
            yield LstmCase(5, 4, 3, 17, projection=projection, **options)
        yield LstmCase(6, 4, 3, 16, 2, 2, projection=5, lengths=(6, 2, 0, 5), dropout=0.4, **options)
        yield LstmCase(6, 4, 3, 12, projection=9, mask="gates", zoneout=0.2, reset=True, peephole="diagonal", **options)
    yield LstmCase(12, 24, 40, 48, 2, 2, projection=24)
    yield LstmCase(6, 4, 3, 9, 2, projection=4, bias=False, weights="gates", batch_first=True)
    yield LstmCase(6, 4, 3, 9, norm="haste", weights="gates", batch_first=True)


def _distinct(every: Iterator[_Case]) -> tuple[_Case, ...]:
    return tuple({case.name: case for case in every}.values())


# The rows of the tables in docs/performance.md, float32.
LSTM_BENCH_CASES: Final[tuple[LstmCase, ...]] = _distinct(_lstm_bench_cases())
LSTM_OPTION_BENCH_CASES: Final[tuple[LstmCase, ...]] = (
    *_options_to_time(LstmCase, ("norm", "cell"), ("zoneout_c", 0.1), ("cell_clip", 3.0), ("coupled", True)),
    LstmCase(32, 8, 64, 64, projection=32),
    LstmCase(64, 32, 128, 128, projection=64),
)
GRU_BENCH_CASES: Final[tuple[GruCase, ...]] = (
    *_sizes_to_time(GruCase),
    *_options_to_time(GruCase, ("kind", "before")),
)
RNN_BENCH_CASES: Final[tuple[RnnCase, ...]] = (*_sizes_to_time(RnnCase), *_options_to_time(RnnCase))
# Small enough to run completely at every instruction-set level.
LSTM_VERIFY_CASES: Final[tuple[LstmCase, ...]] = _distinct(_lstm_verify_cases())
LSTM_OPTION_CASES: Final[tuple[LstmCase, ...]] = _distinct(_lstm_option_cases())
GRU_VERIFY_CASES: Final[tuple[GruCase, ...]] = _distinct(_gru_verify_cases())
RNN_VERIFY_CASES: Final[tuple[RnnCase, ...]] = _distinct(_plain_cases(RnnCase))
