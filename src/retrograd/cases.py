"""Named problems and their tolerances with reasons: what tests, ``verify`` and ``bench`` have in common.

NumPy only, and nothing of ours: a tolerance that shares code with the engine or the oracle shares its bugs. (Asking for
bfloat16 data imports ml_dtypes, which gives NumPy that type.)
"""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

__all__ = [
    "ACTIVATION_PARAMETERS",
    "FUSED_ACTIVATIONS",
    "LSTM_BENCH_CASES",
    "LSTM_STANDARD",
    "LSTM_VERIFY_CASES",
    "NORM_BENCH_CASES",
    "NORM_VERIFY_CASES",
    "BackwardBound",
    "ForwardBound",
    "LstmBound",
    "LstmCase",
    "LstmData",
    "LstmParameters",
    "NormCase",
    "NormData",
    "backward_bound",
    "error_in_tolerances",
    "forward_bound",
    "input_slope_error",
    "lstm_bound",
    "make_lstm_data",
    "make_norm_data",
    "storage_dtype",
]

Array: TypeAlias = npt.NDArray[Any]
Float64s: TypeAlias = npt.NDArray[np.float64]
Kind: TypeAlias = Literal["batch", "instance", "layer", "group"]
Layout: TypeAlias = Literal["first", "last"]
Peephole: TypeAlias = Literal["none", "diagonal", "full"]
WeightsForm: TypeAlias = Literal["concatenated", "stacked", "gates"]
NamedActivation: TypeAlias = tuple[str, float, float]  # name, alpha, beta

# ---- problems --------------------------------------------------------------------------------------------------------

# (alpha, beta) that put every piece of an activation within reach of normalized data; 0 where it takes none.
ACTIVATION_PARAMETERS: Final[dict[str, tuple[float, float]]] = {
    "identity": (0.0, 0.0),
    "relu": (0.0, 0.0),
    "leaky_relu": (0.2, 0.0),
    "sigmoid": (0.0, 0.0),
    "tanh": (0.0, 0.0),
    "scaled_tanh": (1.7, 0.6),
    "abs": (0.0, 0.0),
    "linear": (-1.3, 0.0),
    "clamp": (-0.7, 0.9),
    "gelu_tanh": (0.7978845608028654, 0.044715),
    "hard_sigmoid": (0.4, 0.45),
    "softplus": (0.8, 1.4),
    "softsign": (0.0, 0.0),
    "elu": (0.7, 0.0),
    "clamped_leaky_relu": (0.3, 0.8),
    "linear_with_bias": (0.6, -0.4),
    "log_sigmoid": (0.0, 0.0),
    "selu": (0.0, 0.0),
    "celu": (1.3, 0.0),
    "hard_shrink": (0.5, 0.0),
    "soft_shrink": (0.5, 0.0),
    "tanh_shrink": (0.0, 0.0),
    "threshold": (0.3, -0.2),
    "hard_swish": (0.0, 0.0),
    "silu": (0.0, 0.0),
    "relu6": (0.0, 0.0),
    "erf": (0.0, 0.0),
    "gelu": (0.0, 0.0),
    "gelu_sigmoid": (0.0, 0.0),
    "closed_hard_sigmoid": (0.4, 0.45),
}
_SLOPE_NEEDS_INPUT: Final = {
    "abs",
    "gelu_tanh",
    "hard_swish",
    "silu",
    "erf",
    "gelu",
    "gelu_sigmoid",
    "closed_hard_sigmoid",
}
# Those whose output tells the slope.
FUSED_ACTIVATIONS: Final = tuple(name for name in ACTIVATION_PARAMETERS if name not in _SLOPE_NEEDS_INPUT)


@dataclass(frozen=True)
class NormCase:
    """A normalization to verify or to time.

    `shape` is logical, channels first: (N, C, *S). With the layout "last" the array is (N, *S, C) in memory; so it is
    handed over, with `channel_axis` saying so. `axis` is a layer norm's first normalized axis, counted in the array.
    """

    kind: Kind
    shape: tuple[int, ...]
    layout: Layout = "first"
    activation: str = "identity"
    alpha: float = 0.0
    beta: float = 0.0
    num_groups: int = 1
    axis: int = -1
    dtype: str = "float32"
    mean_over_std: float = 0.0
    workload: str = ""
    slope_from: Literal["output", "input"] = "output"

    @property
    def name(self) -> str:
        """``batch_norm_n32c64s56x56_relu``: letters in memory's order, then what is out of the ordinary."""
        samples, channels, *space = self.shape
        spatial = "s" + "x".join(map(str, space)) if space else ""
        axes = f"c{channels}{spatial}" if self.layout == "first" else f"{spatial}c{channels}"
        words = [f"{self.kind}_norm_n{samples}{axes}"]
        if self.kind == "group":
            words[0] += f"g{self.num_groups}"
        if self.kind == "layer" and self.axis not in (-1, len(self.shape) - 1):
            words.append(f"axis{self.axis}")
        if self.activation != "identity":
            words.append(self.activation)
        if self.slope_from != "output":
            words.append(f"by_{self.slope_from}")
        if self.dtype != "float32":
            words.append(self.dtype)
        if self.mean_over_std:
            words.append(f"mean{self.mean_over_std:.0e}".replace("e+0", "e"))
        return "_".join(words)

    @property
    def array_shape(self) -> tuple[int, ...]:
        samples, channels, *space = self.shape
        return self.shape if self.layout == "first" else (samples, *space, channels)

    @property
    def channel_axis(self) -> int:
        return 1 if self.layout == "first" else len(self.shape) - 1

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        if self.kind == "layer":
            return self.array_shape[range(len(self.shape))[self.axis] :]
        return (self.shape[1],)

    @property
    def geometry(self) -> dict[str, Any]:
        """The options of the oracle and of the bounds below that say which elements go together."""
        return {
            "kind": self.kind,
            "channel_axis": self.channel_axis,
            "axis": self.axis,
            "num_groups": self.num_groups,
        }


class NormData(NamedTuple):
    x: Array
    gamma: Array
    beta: Array
    dy: Array


def storage_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        importlib.import_module("ml_dtypes")  # from now on NumPy knows the name
    return np.dtype(name)


def make_norm_data(case: NormCase, seed: int = 0) -> NormData:
    """Normal x and dy, gamma of both signs and beta; the same for the same case and seed, anywhere."""
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    dtype = storage_dtype(case.dtype)
    parameters = np.float64 if case.dtype == "float64" else np.float32
    drawn: Any = parameters  # drawn in the arithmetic's type: a benchmark should not wait for its data
    x = rng.standard_normal(case.array_shape, dtype=drawn)
    x += drawn(case.mean_over_std)
    dy = rng.standard_normal(case.array_shape, dtype=drawn)
    sign = rng.choice([-1.0, 1.0, 1.0, 1.0], case.parameter_shape)
    gamma = sign * rng.uniform(0.5, 1.5, case.parameter_shape)
    beta = rng.normal(0.0, 0.5, case.parameter_shape)
    return NormData(
        x.astype(dtype, copy=False), gamma.astype(parameters), beta.astype(parameters), dy.astype(dtype, copy=False)
    )


def _bench_cases() -> Iterator[NormCase]:
    layouts: tuple[Layout, Layout] = ("first", "last")
    for shape, workload in (
        ((32, 64, 56, 56), "resnet stage 1"),
        ((16, 256, 28, 28), "resnet stage 2"),
        ((8, 512, 7, 7), "resnet stage 4"),
    ):
        for activation in ("identity", "relu", "tanh"):
            for layout in layouts:
                yield NormCase("batch", shape, layout, activation, workload=workload)
    for rows, workload in (
        ((4096, 1024), "wide perceptron"),
        ((65536, 64), "point features"),
        ((128, 256), "small perceptron"),
    ):
        for activation in ("identity", "sigmoid"):
            yield NormCase("batch", rows, "last", activation, workload=workload)
    for rows, workload in (
        ((8192, 768), "transformer"),
        ((512, 1024), "short sequence"),
        ((64, 256), "small transformer"),
    ):
        yield NormCase("layer", rows, axis=1, workload=workload)
    yield NormCase("layer", (8, 64, 32, 32), "last", axis=3, workload="convnext")
    for layout in layouts:
        yield NormCase("group", (32, 64, 56, 56), layout, num_groups=8, workload="detection backbone")
    for layout in layouts:
        yield NormCase("instance", (32, 64, 56, 56), layout, workload="style transfer")


def _activated(name: str, kind: Kind, shape: tuple[int, ...], layout: Layout = "first", **options: Any) -> NormCase:
    alpha, beta = ACTIVATION_PARAMETERS[name]
    return NormCase(kind, shape, layout, name, alpha, beta, **options)


def _verify_cases() -> Iterator[NormCase]:
    """Every norm, layout, type, activation and kind of shape that the engine treats in its own way."""
    layouts: tuple[Layout, Layout] = ("first", "last")
    kinds: tuple[Kind, ...] = ("batch", "instance", "group", "layer")
    halves = ("float16", "bfloat16")

    # All norms x layouts x types, and means far from zero: 1e6 standard deviations leave float32 four bits of data.
    for kind in kinds:
        for layout in layouts:
            for dtype in ("float32", "float64", *halves):
                for ratio in (0.0, 100.0) if dtype in halves else (0.0, 1e4, 1e6):
                    yield NormCase(kind, (5, 12, 17, 13), layout, num_groups=3, dtype=dtype, mean_over_std=ratio)
    # All activations that can be fused.
    for number, name in enumerate(FUSED_ACTIVATIONS):
        dtype = ("float32", "float64", "float16", "bfloat16")[number % 4]
        yield _activated(name, "batch", (6, 8, 11, 23), layouts[number % 2], dtype=dtype)
        yield _activated(name, kinds[number % 4], (6, 8, 11, 23), layouts[number // 4 % 2], num_groups=4)
    # The slope from the input: of those that need it, and of some with kinks.
    for number, name in enumerate((*sorted(_SLOPE_NEEDS_INPUT), "sigmoid", "relu", "threshold", "clamped_leaky_relu")):
        dtype = ("float32", "float64", "float16", "bfloat16")[number // 2 % 4]
        yield _activated(
            name,
            kinds[number % 4],
            (6, 8, 11, 23),
            layouts[number // 4 % 2],
            num_groups=4,
            dtype=dtype,
            slope_from="input",
        )
    # Sizes around a vector's lanes, primes, and 1: of rows, of columns, of planes.
    for size in (1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 65, 127):
        yield NormCase("layer", (7, size), axis=1)
        yield NormCase("batch", (size, 5), "last")
        yield NormCase("batch", (5, size), "last")
        yield NormCase("instance", (2, 3, size))
        yield NormCase("group", (2, 6, size), "last", num_groups=2)
    # Longer than a block in each direction, and by one element more than a power of two.
    yield NormCase("layer", (3, 4099), axis=1)
    yield _activated("tanh", "layer", (5, 4099), axis=1, dtype="bfloat16")
    yield NormCase("layer", (4, 9, 31, 37), axis=1, mean_over_std=1e4)
    yield NormCase("layer", (4099, 3), axis=1)
    yield NormCase("batch", (4099, 3), "last", mean_over_std=1e6)
    yield NormCase("batch", (3, 4099), "last")
    yield _activated("sigmoid", "batch", (129, 2111), "last")
    yield NormCase("batch", (2, 2, 4099))
    yield NormCase("instance", (1, 2, 67, 131), mean_over_std=1e6)
    yield NormCase("instance", (65, 3, 29))
    yield NormCase("group", (1, 6, 4099), num_groups=2)
    yield NormCase("group", (1, 6, 4099), "last", num_groups=2, mean_over_std=1e4)
    yield NormCase("group", (131, 4, 5), num_groups=4)
    # Of one element each, and one set in all.
    yield NormCase("batch", (1, 37), "last")
    yield NormCase("instance", (3, 5))
    yield NormCase("layer", (11, 1), axis=1)
    yield NormCase("group", (3, 6), num_groups=6)
    yield NormCase("group", (3, 6, 7), num_groups=1)


def _distinct(every: Iterator[NormCase]) -> tuple[NormCase, ...]:
    return tuple({case.name: case for case in every}.values())


# The rows of the published tables, float32.
NORM_BENCH_CASES: Final[tuple[NormCase, ...]] = _distinct(_bench_cases())
# Small enough to be run whole at every instruction-set level.
NORM_VERIFY_CASES: Final[tuple[NormCase, ...]] = _distinct(_verify_cases())


# ---- LSTM problems ---------------------------------------------------------------------------------------------------

LSTM_STANDARD: Final[tuple[NamedActivation, ...]] = (
    ("sigmoid", 0.0, 0.0),
    ("sigmoid", 0.0, 0.0),
    ("tanh", 0.0, 0.0),
    ("sigmoid", 0.0, 0.0),
    ("tanh", 0.0, 0.0),
)


@dataclass(frozen=True)
class LstmCase:
    """An LSTM to verify or to time, forward and backward. `activations` are those of i, f, g, o and the hidden output.

    `weights` is the form in which they are handed over: all gates in one array [4H, ...], in one array [4, H, ...], or
    an array [H, ...] for each.
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
        """``lstm_t64n32i128h256_l2_bi_diagonal``: the sizes, then what is out of the ordinary."""
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
        """[T, N]: which samples take part in which step; None: all."""
        if self.lengths is not None:
            return np.arange(self.steps)[:, None] < np.array(self.lengths, dtype=int)[None, :]
        if self.batch_sizes is not None:
            return np.arange(self.samples)[None, :] < np.array(self.batch_sizes, dtype=int)[:, None]
        return None

    def cell_inputs(self, cell: int) -> int:
        return self.inputs if cell < self.directions else self.directions * self.units


class LstmParameters(NamedTuple):
    """Of one cell, or their gradients, or their tolerances."""

    wx: Any
    wh: Any
    b: Any = None
    peephole: Any = None

    def stacked(self) -> LstmParameters:
        """From any form: [4, H, ...], 0 for gates that are None; None stays None."""
        units = (self.wh[0] if isinstance(self.wh, (tuple, list)) else self.wh).shape[-1]
        return LstmParameters(
            *(None if part is None else _stacked(part, units, at < 2) for at, part in enumerate(self))
        )


class LstmData(NamedTuple):
    """Time first, or samples first where the case says so; parameters in the case's form, one per cell."""

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
    """Normal x and gradients, weights that keep pre-activations of size 1; the same for the same case and seed."""
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
    """The standard ones, but for the roles (i f g o h) that are named."""
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
    """Every option, and the sizes at which vectors, panels and teams begin and end."""
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
    # Sizes around a vector's lanes, and 1.
    for units in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65):
        yield LstmCase(5, 3, 4, units)
        yield LstmCase(3, 2, units, 3, dtype="float64")
    yield LstmCase(1, 1, 1, 1)
    yield LstmCase(1, 13, 3, 5, states=True)
    yield LstmCase(40, 1, 3, 5, states=True)
    yield LstmCase(4, 3, 0, 6, 2, states=True)
    # Enough for a team, with slots apart and with units apart; more rows than one sum runs over; a long sequence.
    yield LstmCase(12, 24, 40, 48, 2, 2, lengths=tuple(1 + n * 5 % 12 for n in range(24)))
    yield LstmCase(6, 2, 96, 250, peephole="diagonal")
    yield LstmCase(40, 33, 20, 24)
    yield LstmCase(300, 2, 8, 16, states=True)
    # Every activation, in one role or another.
    for number, name in enumerate(ACTIVATION_PARAMETERS):
        activations = _with_activations(**{"ifgoh"[number % 5]: name})
        yield LstmCase(5, 4, 3, 19, activations=activations, dtype=("float32", "float64")[number // 5 % 2])
    yield LstmCase(5, 4, 3, 19, activations=_with_activations(i="relu", f="hard_sigmoid", o="softplus", h="softsign"))


def _distinct_lstm(every: Iterator[LstmCase]) -> tuple[LstmCase, ...]:
    return tuple({case.name: case for case in every}.values())


# The rows of the published tables, float32.
LSTM_BENCH_CASES: Final[tuple[LstmCase, ...]] = _distinct_lstm(_lstm_bench_cases())
# Small enough to be run whole at every instruction-set level.
LSTM_VERIFY_CASES: Final[tuple[LstmCase, ...]] = _distinct_lstm(_lstm_verify_cases())

# ---- tolerances ------------------------------------------------------------------------------------------------------
#
# Tolerances are absolute, one per element, made of what the oracle computed on the way. They count roundings: u is the
# most that one operation can be off by, relative to its result, so a chain of k operations is off by k units of the
# largest intermediate result at the most, and by a good half of that in the worst of many elements.


class _Roundings(NamedTuple):
    """What an activation adds, in units of u."""

    argument: float = 0.0  # of |z|, before f
    value: float = 0.0  # of |y|
    value_offset: float = 0.0  # absolute: of parameters that are added
    slope: float = 0.0  # of |dz|
    slope_offset: float = 0.0  # of |dy|


def _activation_roundings(name: str, alpha: float, beta: float, double: bool) -> _Roundings:
    """Parameters are themselves rounded to the arithmetic's type. The transcendental ones keep their bounds in ulp of
    the engine (an ulp is up to 2 u): exp 1.1, expm1 and log1p 2, tanh and sigmoid 3 (tests/test_activation.py).
    """
    a, b = abs(alpha), abs(beta)
    match name:
        case "leaky_relu" | "clamped_leaky_relu" | "linear":
            return _Roundings(value=2, value_offset=b, slope=2)  # alpha, product; the bound beta
        case "sigmoid":
            return _Roundings(value=6, slope=3)  # 1 - y, two products
        case "tanh":
            return _Roundings(value=6, slope=4)  # 1 - y, 1 + y, two products
        case "scaled_tanh":
            # a - y keeps the rounding of a, however small the difference: b/a * u|a| * (a + y) is 2 u|ab|.
            return _Roundings(argument=2, value=8, slope=6, slope_offset=2 * a * b)
        case "clamp":
            return _Roundings(value_offset=max(a, b))
        case "hard_sigmoid" | "closed_hard_sigmoid" | "linear_with_bias":
            return _Roundings(argument=2, value=1, value_offset=b, slope=2)
        case "softplus":
            # The sum of max(t, 0) and log1p(exp(-|t|)) has one sign: 1 + 4 roundings, a, two products.
            return _Roundings(argument=2, value=8, slope=9)  # expm1 4, y/a 2, a*b 1, products 2
        case "softsign":
            return _Roundings(value=2, slope=3)
        case "elu":
            return _Roundings(value=6, slope=2, slope_offset=a)  # y + a keeps the rounding of a
        case "log_sigmoid":
            return _Roundings(value=7, slope=5)
        case "selu":
            # lambda * alpha = 1.76 is a product of two rounded numbers, rounded: 3.
            return _Roundings(value=8, slope=2, slope_offset=3 * 1.76)
        case "celu":
            return _Roundings(argument=2, value=6, slope=2, slope_offset=2)  # 1 + y/a keeps the roundings of y/a
        case "soft_shrink":
            return _Roundings(value=1, value_offset=a)
        case "tanh_shrink":
            # float is computed in double and rounded once. In double z - tanh z keeps the error of tanh, 3 units of a
            # number below 1. The slope is the square of t = x - y, where x, up to 20, is rounded to 16 u: 32 u.
            if double:
                return _Roundings(value=2, value_offset=3, slope=4, slope_offset=40)
            return _Roundings(value=1, slope=2)
        case "threshold":
            return _Roundings(value_offset=b)
        case "gelu" | "gelu_sigmoid" | "silu" | "hard_swish" | "erf":
            return _Roundings(argument=2, value=12)  # 6 ulp
        case "gelu_tanh":
            return _Roundings(argument=7, value=12)  # alpha, beta and five operations
        case _:
            return _Roundings()


class _Type(NamedTuple):
    unit: float  # u of the arithmetic
    storage: float  # most that storing a result adds, relative to it; 0: it is stored as computed
    smallest: float  # and absolute: half of the smallest subnormal
    double: bool = False


_DOUBLE_UNIT: Final = 2.0**-53
# Where long double is no wider than a float64, the oracle's own roundings are as large as the engine's.
_DOUBLE_ORACLE: Final = 1.0 if float(np.finfo(np.longdouble).eps) < 2.0**-60 else 2.0
_TYPES: Final[dict[str, _Type]] = {
    "float32": _Type(2.0**-24, 0.0, 2.0**-150),
    "float64": _Type(_DOUBLE_UNIT * _DOUBLE_ORACLE, 0.0, 2.0**-1074, double=True),
    "float16": _Type(2.0**-24, 2.0**-11, 2.0**-25),
    "bfloat16": _Type(2.0**-24, 2.0**-8, 2.0**-134),
}


class Statistics(Protocol):
    """What the bounds need of the oracle's forward results."""

    @property
    def y(self) -> Array: ...
    @property
    def z(self) -> Array: ...
    @property
    def xhat(self) -> Array: ...
    @property
    def mean(self) -> Array: ...
    @property
    def var(self) -> Array: ...
    @property
    def rstd(self) -> Array: ...


class Gradients(Protocol):
    """What the bounds need of the oracle's backward results."""

    @property
    def dx(self) -> Array: ...
    @property
    def dgamma(self) -> Array: ...
    @property
    def dbeta(self) -> Array: ...
    @property
    def dz(self) -> Array: ...
    @property
    def xhat(self) -> Array: ...
    @property
    def rstd(self) -> Array: ...


class ForwardBound(NamedTuple):
    y: Float64s
    mean: Float64s
    var: Float64s


class BackwardBound(NamedTuple):
    dx: Float64s
    dgamma: Float64s
    dbeta: Float64s


class _Indices:
    """Which statistics set, and which gamma, each element belongs to, as numbers in the shape of x.

    A pair is the elements that have both in common. Pairs are numbered so that the parameter counts fastest.
    """

    def __init__(self, shape: tuple[int, ...], kind: Kind, channel_axis: int, axis: int, num_groups: int) -> None:
        rank = len(shape)
        self.channels_per_group = 1
        if kind == "layer":
            first = range(rank)[axis]
            sets = math.prod(shape[:first])
            per_set = math.prod(shape[first:])
            set_of = np.arange(sets).reshape(*shape[:first], *(1,) * (rank - first))
            parameter_of = np.arange(per_set).reshape(shape[first:])
            self.sets, self.parameters = sets, per_set
            self.pairs, self.pair_of = sets * per_set, np.arange(sets * per_set).reshape(shape)
        else:
            channel = range(rank)[channel_axis]
            channels = shape[channel]
            parameter_of = np.arange(channels).reshape(-1, *(1,) * (rank - 1 - channel))
            sample_of = np.arange(shape[0]).reshape(-1, *(1,) * (rank - 1))
            if kind == "batch":
                set_of, self.sets = parameter_of, channels
                pair_of, pairs = parameter_of, channels
            else:
                groups = channels if kind == "instance" else num_groups
                self.channels_per_group = max(channels // max(groups, 1), 1)
                set_of = sample_of * groups + parameter_of // self.channels_per_group
                self.sets = shape[0] * groups
                pair_of, pairs = sample_of * channels + parameter_of, shape[0] * channels
            self.parameters = channels
            self.pairs, self.pair_of = pairs, np.broadcast_to(pair_of, shape)
        self.set_of = np.broadcast_to(set_of, shape)
        self.parameter_of = np.broadcast_to(parameter_of, shape)
        self.count = math.prod(shape) // max(self.sets, 1)

    def per_set(self, values: Array | None) -> Float64s:
        """Statistics [sets], as float64."""
        assert values is not None
        return np.asarray(values, dtype=np.float64).reshape(-1)

    def spread_sets(self, values: Float64s) -> Float64s:
        return values[self.set_of]

    def spread_parameters(self, values: Array | None, absent: float) -> Float64s:
        if values is None:
            return np.full((1,) * self.set_of.ndim, absent)
        return np.asarray(values, dtype=np.float64).reshape(-1)[self.parameter_of]

    def sum_sets(self, values: Float64s) -> Float64s:
        return self._sum(values, self.set_of, self.sets)

    def sum_parameters(self, values: Float64s) -> Float64s:
        return self._sum(values, self.parameter_of, self.parameters)

    def square_pairs(self, values: Float64s) -> Float64s:
        """Sums over each pair, squared and added up for each parameter."""
        sums = self._sum(values, self.pair_of, self.pairs)
        return cast(Float64s, np.sum((sums * sums).reshape(-1, max(self.parameters, 1)), axis=0))[: self.parameters]

    def _sum(self, values: Float64s, index: Array, length: int) -> Float64s:
        weights = np.broadcast_to(values, index.shape)
        return cast(Float64s, np.bincount(index.ravel(), weights=weights.ravel(), minlength=length))


def _float64(values: Array) -> Float64s:
    return np.asarray(values, dtype=np.float64)


def _statistics_error(
    dtype: _Type, index: _Indices, mean: Float64s, std: Float64s, given: bool
) -> tuple[Float64s, Float64s]:
    """How far mean and var may be off, per set: absolute.

    The mean is a center plus the mean of x - center. That difference rounds by up to u, and for all x of one binade
    alike, so the mean over many does not hide it; sums of float run in float over at most 16 vectors a lane, where
    roundings come to about 1 u of each number, and then in double. A square doubles the error of the difference and is
    rounded and summed itself. So 2 u for the mean and 5 u for the variance. The center is the mean rounded, so that
    constant data have differences of u|mean|.
    In double the sums stay in double, and all their roundings count: 4 u and 10 u, and more the longer they are.
    """
    if given:
        nothing = np.zeros_like(mean)
        return nothing, nothing
    u = dtype.unit
    spread = std + u * np.abs(mean)
    mean_error = 2 * u * spread + 2 * _DOUBLE_UNIT * np.abs(mean)
    var_error = 5 * u * spread * spread
    if dtype.double:
        longer = _longer(index.count)
        mean_error, var_error = 2 * longer * mean_error, 2 * longer * var_error
        if index.channels_per_group > 1:
            # Where channels are last, each has a mean of its own, and the group's variance is in part that of those
            # means. Where channels are first, the center is that of the first, and squares about a center that is off
            # cancel.
            mean_error = mean_error + u * math.sqrt(index.channels_per_group) * std
            var_error = 2 * var_error
    return mean_error, var_error


def _longer(count: int) -> float:
    """How the roundings of a sum in double grow: partial sums grow with the root of their length, at least.

    This is for arrays whose memory is in one order. Where they differ in it, a set may fall into many short pieces,
    whose sums are added one after the other.
    """
    return math.sqrt(1 + count / 2**16)


class _SumRoundings(NamedTuple):
    """Of a sum, in u: of its value, and of the root of the sum of its terms' squares.

    Roundings are independent of each other, so they add up as squares do. In sums of 16 float numbers of either sign
    they come to 1.6 u of each on average, and 8 u allows five times that for the worst of many sums. Where the terms
    agree in sign so may their roundings: 4 u of the result, of which one is its own.
    """

    result: float = 4
    terms: float = 8


def _sum_roundings(dtype: _Type, count: int) -> _SumRoundings:
    return _SumRoundings(8 * _longer(count), 12 * _longer(count)) if dtype.double else _SumRoundings()


@np.errstate(all="ignore")
def forward_bound(
    x: Array,
    gamma: Array | None,
    beta: Array | None,
    expected: Statistics,
    activate: Callable[[Array], Array],
    *,
    kind: Kind,
    channel_axis: int = 1,
    axis: int = -1,
    num_groups: int = 1,
    eps: float = 1e-5,
    mean: Array | None = None,
    var: Array | None = None,
    activation: str = "identity",
    alpha: float = 0.0,
    act_beta: float = 0.0,
) -> ForwardBound:
    """Tolerances of y, mean and var. `activate` is f as the oracle computes it."""
    dtype = _TYPES[x.dtype.name]
    u = dtype.unit
    index = _Indices(x.shape, kind, channel_axis, axis, num_groups)
    mu, v = (index.per_set(s) for s in (expected.mean, expected.var))
    mean_error, var_error = _statistics_error(dtype, index, mu, np.sqrt(v), mean is not None)
    z = np.asarray(expected.z)
    z_error = _input_error(dtype, index, gamma, beta, expected, mean is not None)

    r = _activation_roundings(activation, alpha, act_beta, dtype.double)
    z_error = z_error + u * r.argument * np.abs(_float64(z))
    y = _float64(expected.y)
    magnitude = np.abs(y)
    moved = np.zeros_like(y)
    if activation == "identity":
        moved = z_error
    else:
        # f is monotone but for a jump or two: the ends of the interval say how far y can be.
        for sign in (-1, 1):
            moved = np.maximum(moved, np.abs(_float64(activate(z + sign * z_error) - np.asarray(expected.y))))
    y_error = moved + u * (r.value * magnitude + r.value_offset)
    # Below the normal range a weight that is off by one of the smallest numbers is multiplied by z.
    y_error = y_error + (2 + np.abs(_float64(z))) * _least(dtype)
    y_error = y_error + dtype.storage * (magnitude + y_error) + dtype.smallest
    return ForwardBound(y_error, mean_error.reshape(expected.mean.shape), var_error.reshape(expected.var.shape))


def _least(dtype: _Type) -> float:
    """The smallest number of the arithmetic, or a larger one whose square is not 0 here."""
    return max(2 * _TYPES["float64" if dtype.double else "float32"].smallest, 1e-150)


def _input_error(
    dtype: _Type, index: _Indices, gamma: Array | None, beta: Array | None, expected: Statistics, given: bool
) -> Float64s:
    """How far z, the input of the activation, may be off."""
    u = dtype.unit
    mu, v, rstd = (index.per_set(s) for s in (expected.mean, expected.var, expected.rstd))
    mean_error, var_error = _statistics_error(dtype, index, mu, np.sqrt(v), given)
    g = np.abs(index.spread_parameters(gamma, 1.0))
    b = np.abs(index.spread_parameters(beta, 0.0))
    scaled = g * np.abs(_float64(expected.xhat))
    # The center is the mean rounded to the arithmetic's type; what that leaves, times rstd, is at most this.
    offset = g * index.spread_sets(np.abs(mu) * rstd) * u
    # z = (x - center) * scale + shift. Of the product: the difference, rstd, gamma * rstd, and the product itself where
    # there is no fused multiply-add: 4. (Rows: the same 4, and xhat, which is rounded before it meets gamma: 5.) Of
    # shift: itself, and offset twice. Then the sum. What mean and rstd are off by comes on top.
    z_error = u * (5 * scaled + b + 3 * offset + np.abs(_float64(expected.z)))
    z_error = z_error + g * index.spread_sets(rstd * mean_error)
    return z_error + scaled * index.spread_sets(0.5 * var_error * rstd * rstd)


@np.errstate(all="ignore")
def input_slope_error(
    x: Array,
    gamma: Array | None,
    beta: Array | None,
    expected: Statistics,
    input_slope: Callable[[Array], Array],
    *,
    kind: Kind,
    channel_axis: int = 1,
    axis: int = -1,
    num_groups: int = 1,
    eps: float = 1e-5,
    mean: Array | None = None,
    var: Array | None = None,
    activation: str = "identity",
    alpha: float = 0.0,
    act_beta: float = 0.0,
) -> Float64s:
    """How far f'(z) may be off where backward makes z again. `input_slope` is f' as the oracle computes it.

    As far as f' moves with the error of z: a kink within reach counts. Parameters that z is compared with are rounded,
    and so is the ramp a z + b. Then 6 ulp of the slope itself, or of the parts of one that is a difference.
    """
    dtype = _TYPES[x.dtype.name]
    u = dtype.unit
    index = _Indices(x.shape, kind, channel_axis, axis, num_groups)
    z = np.asarray(expected.z)
    r = _activation_roundings(activation, alpha, act_beta, dtype.double)
    reach = _input_error(dtype, index, gamma, beta, expected, mean is not None)
    reach = reach + u * ((2 + r.argument) * np.abs(_float64(z)) + abs(alpha) + abs(act_beta))
    if activation in ("hard_sigmoid", "closed_hard_sigmoid"):
        reach = reach + 2 * u * abs(act_beta / alpha)
    slope = input_slope(z)
    moved = np.zeros(z.shape)
    for sign in (-1, 1):
        moved = np.maximum(moved, np.abs(_float64(input_slope(z + sign * reach) - slope)))
    return moved + u * (12 * np.abs(_float64(slope)) + 4 * (activation in _SLOPE_IS_A_DIFFERENCE))


@np.errstate(all="ignore")
def backward_bound(
    dy: Array,
    x: Array,
    gamma: Array | None,
    expected: Gradients,
    *,
    kind: Kind,
    channel_axis: int = 1,
    axis: int = -1,
    num_groups: int = 1,
    eps: float = 1e-5,
    mean: Array | None = None,
    var: Array | None = None,
    frozen: bool = False,
    activation: str = "identity",
    alpha: float = 0.0,
    act_beta: float = 0.0,
    slope_error: Float64s | None = None,
) -> BackwardBound:
    """Tolerances of the gradients, where the oracle's backward was given the engine's y.

    Or where the slope is found from the input: then `slope_error` says how far it may be off.
    """
    dtype = _TYPES[x.dtype.name]
    u = dtype.unit
    index = _Indices(x.shape, kind, channel_axis, axis, num_groups)
    count = max(index.count, 1)
    x64, xhat, dz = _float64(x), _float64(expected.xhat), _float64(expected.dz)
    rstd = index.per_set(expected.rstd)
    if mean is None:
        mu = index.sum_sets(x64) / count
        std = np.sqrt(np.maximum(1 / (rstd * rstd) - eps, 0))
    else:
        mu = _float64(np.broadcast_to(_float64(mean), expected.rstd.shape)).reshape(-1)
        std = np.zeros_like(mu)
    mean_error, var_error = _statistics_error(dtype, index, mu, std, mean is not None)

    # dz: the slope's own roundings.
    r = _activation_roundings(activation, alpha, act_beta, dtype.double)
    dz_error = u * r.slope * np.abs(dz)
    if slope_error is not None:
        dz_error = u * np.abs(dz) + slope_error * np.abs(_float64(dy))
    elif r.slope_offset:  # 0 times an infinite dy is not 0
        dz_error = dz_error + u * r.slope_offset * np.abs(_float64(dy))
    lost = _least(dtype)  # a slope may underflow where the oracle's does not
    if activation != "identity":
        dz_error = dz_error + lost * (1 + np.abs(_float64(dy)))

    # xhat = (x - center) * rstd + offset. What is the same for all elements of a set adds up in a sum: the rounding of
    # rstd and the error of var stretch xhat, the error of the mean shifts it, and so does the rounding of x - center
    # (by u of 1, the size of xhat: see _statistics_error). Per element: that, the product if it is not fused, the sum.
    shift = index.spread_sets(rstd * mean_error + u * u * np.abs(mu) * rstd) + u
    stretch = index.spread_sets(u + 0.5 * var_error * rstd * rstd)
    xhat_error = 3 * u * np.abs(xhat)
    products = dz * xhat
    products_error = np.abs(xhat) * dz_error + np.abs(dz) * xhat_error

    c = _sum_roundings(dtype, x.size // max(index.parameters, 1))
    dbeta_error = c.result * u * np.abs(_float64(expected.dbeta)).reshape(-1)
    dbeta_error = dbeta_error + np.sqrt(index.sum_parameters((c.terms * u * dz) ** 2 + dz_error**2))
    dgamma_error = c.result * u * np.abs(_float64(expected.dgamma)).reshape(-1)
    dgamma_error = dgamma_error + np.sqrt(
        index.sum_parameters((c.terms * u * products) ** 2 + products_error**2)
        + index.square_pairs(dz * shift)
        + index.square_pairs(products * stretch)
    )

    # dx = a * dz + (b * (x - center) + k). a = gamma * rstd: 2, and the product; b = rstd^2 * mean(g xhat): 3, the
    # difference, the product; k: 2; and the sums, 1 of each term. The means carry their sums' errors over the count.
    gamma64 = index.spread_parameters(gamma, 1.0)
    g = gamma64 * dz
    g_error = np.abs(gamma64) * dz_error
    scale = index.spread_sets(rstd)
    dx_error = scale * (np.abs(g) * (3 * u + stretch) + g_error)
    if not frozen:
        c = _sum_roundings(dtype, count)
        sum_g, sum_g_xhat = index.sum_sets(g), index.sum_sets(g * xhat)
        off_g = c.result * u * np.abs(sum_g) + np.sqrt(index.sum_sets((c.terms * u * g) ** 2 + g_error**2))
        off_g_xhat = c.result * u * np.abs(sum_g_xhat) + np.sqrt(
            index.sum_sets((c.terms * u * g * xhat) ** 2 + (np.abs(g) * xhat_error + np.abs(xhat) * g_error) ** 2)
        )
        mean_g, mean_g_xhat, off_g, off_g_xhat = (
            index.spread_sets(s / count) for s in (sum_g, sum_g_xhat, off_g, off_g_xhat)
        )
        off_g_xhat = off_g_xhat + np.abs(mean_g) * shift + np.abs(mean_g_xhat) * stretch
        dx_error = dx_error + scale * (
            np.abs(mean_g) * (2 * u + stretch)
            + off_g
            + np.abs(xhat * mean_g_xhat) * (3 * u + 2 * stretch)
            + np.abs(mean_g_xhat) * shift
            + np.abs(xhat) * off_g_xhat
        )
    # Below the normal range a and b are off by one of the smallest numbers, and are multiplied.
    dx_error = dx_error + (2 + np.abs(dz)) * lost
    if not frozen:
        dx_error = dx_error + np.abs(xhat / scale) * lost
    dx_error = dx_error + dtype.storage * (np.abs(_float64(expected.dx)) + dx_error) + dtype.smallest
    return BackwardBound(
        dx_error,
        dgamma_error.reshape(expected.dgamma.shape),
        dbeta_error.reshape(expected.dbeta.shape),
    )


@np.errstate(all="ignore")
def error_in_tolerances(got: Array, expected: Array, tolerance: Array) -> float:
    """The worst |got - expected| / tolerance; infinite where one is NaN or infinite and the other is not the same."""
    wide = np.longdouble if expected.dtype == np.longdouble else np.float64
    mine, oracle = np.asarray(got).astype(wide), np.asarray(expected).astype(wide)
    if mine.shape != oracle.shape:
        return math.inf
    same = (mine == oracle) | (np.isnan(mine) & np.isnan(oracle))
    error = np.abs(mine - oracle)
    ratio = np.where(same, 0.0, error / np.broadcast_to(tolerance, oracle.shape))
    ratio = np.where(np.isnan(ratio), math.inf, ratio)
    return float(ratio.max(initial=0.0))


# ---- tolerances of an LSTM -------------------------------------------------------------------------------------------
#
# A running error analysis: the network is computed once more in float64, and beside every number goes how far the
# engine may be off at that place. What enters at a step is carried through all later steps (and, in backward, all
# earlier ones) by the same derivatives that carry the numbers themselves:
#
# - Through products and sums of two or three numbers errors add up in full.
# - In a matrix product the terms' errors are independent, so their squares add up; so do the roundings of the sum. A
#   sum of n terms t, added up one after the other, rounds n partial results, which grow to the size of the sum s if
#   terms agree in sign and of the root of the sum of t^2 if they do not: u * sqrt(n * (sum t^2 + s^2) / 2).
# - Through an activation an error moves as far as f itself says at both ends, so a kink or a jump within reach counts.
# - Functions of the engine are good to 6 units in the last place (12 u), tanh and sigmoid to 3; parameters are rounded.
#
# That is the scale of the errors; a tolerance is _WORST of it. One rounding is, in the root of the mean square, 0.42 u
# of its result (uniform within half a unit in the last place, which is between u and u/2 of the number). So the scale
# is 1 / 0.42 = 2.4 standard deviations of a sum that cancels, 3.4 of one as large as its terms, and twice that leaves
# independent roundings no chance in 10^6 to come near. Errors that were carried along are less independent the fewer
# units there are: a network of two or three that amplifies them over a hundred steps can leave these bounds.

_WORST: Final = 2.0
# Their slopes are differences of numbers of size 1.
_SLOPE_IS_A_DIFFERENCE: Final = ("gelu", "gelu_tanh", "gelu_sigmoid", "silu", "hard_swish")
# Their slopes follow from the value, and so does the slope's error: the slope of the slope, seen as a function of y.
_SLOPE_OF_VALUE: Final[dict[str, Callable[[Float64s], Float64s]]] = {
    "sigmoid": lambda y: np.abs(1 - 2 * y),
    "tanh": lambda y: 2 * np.abs(y),
}


class LstmBound(NamedTuple):
    """Tolerances, in the shapes of the oracle's results: time first, parameters stacked."""

    y: Float64s
    hn: Float64s
    cn: Float64s
    dx: Float64s
    cells: list[LstmParameters]
    dh0: Float64s
    dc0: Float64s


class _Number(NamedTuple):
    """Values and the scale of their errors."""

    value: Float64s
    error: Float64s

    def at(self, *index: Any) -> _Number:
        return _Number(self.value[index], self.error[index])

    def put(self, other: _Number, *index: Any) -> None:
        self.value[index], self.error[index] = other

    @staticmethod
    def exact(values: Array | None, shape: tuple[int, ...]) -> _Number:
        return _Number(np.zeros(shape) if values is None else np.array(values, np.float64), np.zeros(shape))

    @staticmethod
    def joined(numbers: Sequence[_Number], axis: int = 0) -> _Number:
        return _Number(*(np.concatenate(parts, axis=axis) for parts in zip(*numbers, strict=True)))


class _Matrix:
    """Weights, which are exact."""

    def __init__(self, value: Float64s) -> None:
        self.value, self.squares = value, value * value


class _Function(NamedTuple):
    """An activation and its slope, with their errors."""

    name: str
    alpha: float
    beta: float
    activate: Callable[..., Array]
    input_slope: Callable[..., Array]
    u: float
    smallest: float

    def __call__(self, z: _Number) -> tuple[_Number, _Number]:
        usual = _SLOPE_OF_VALUE.get(self.name)
        # A parameter times z: two roundings of the argument.
        reach = _WORST * z.error + (0.0 if usual else 2 * self.u * np.abs(z.value))
        (y, y_error), (s, s_error) = (self._moved(f, z.value, reach) for f in (self.activate, self.input_slope))
        lost = (2 + np.abs(z.value)) * self.smallest  # below the normal range
        y_error, s_error = y_error + lost, s_error + lost
        if usual is not None:
            y_error = y_error + 6 * self.u * np.abs(y)
            return _Number(y, y_error), _Number(s, np.maximum(s_error, usual(y) * y_error) + 10 * self.u * s)
        offset = abs(self.alpha) + abs(self.beta)
        if self.name == "tanh_shrink":  # z - tanh z keeps the error of tanh
            y_error = y_error + 3 * self.u * np.minimum(np.abs(z.value), 1)
        y_error = y_error + self.u * (12 * np.abs(y) + offset)
        s_error = s_error + self.u * (12 * np.abs(s) + 4 * (self.name in _SLOPE_IS_A_DIFFERENCE))
        return _Number(y, y_error), _Number(s, s_error)

    def _moved(self, f: Callable[..., Array], z: Float64s, reach: Float64s) -> _Number:
        here, left, right = (_float64(f(self.name, at, self.alpha, self.beta)) for at in (z, z - reach, z + reach))
        return _Number(here, np.maximum(np.abs(left - here), np.abs(right - here)) / _WORST)


def _tolerance(error: Float64s) -> Float64s:
    """Infinite where the analysis itself has overflowed: of a network that explodes."""
    return np.where(np.isnan(error), np.inf, _WORST * error)


class _Step(NamedTuple):
    """What backward needs of a step of one cell, of the samples that took part."""

    on: npt.NDArray[np.bool_]
    u: _Number
    h_prev: _Number
    c_prev: _Number
    gates: list[_Number]
    slopes: list[_Number]
    c: _Number
    hidden: _Number
    hidden_slope: _Number
    output_sees: _Number  # the cell state that the output gate's peephole saw


class _LstmAnalysis:
    """One cell's steps, forward and backward, with the errors of all that is computed on the way."""

    def __init__(self, cell: LstmParameters, functions: Sequence[_Function], reads_new: bool) -> None:
        self.cell, self.functions, self.reads_new = cell, functions, reads_new
        self.u, self.smallest = functions[0].u, functions[0].smallest
        self.units = cell.wh.shape[-1]
        self.inputs = cell.wx.shape[-1]
        both = np.concatenate([_float64(cell.wx), _float64(cell.wh)], axis=2).reshape(4 * self.units, -1)
        self.weights, self.weights_back = _Matrix(both.T), _Matrix(both)
        self.b = _Number.exact(None if cell.b is None else cell.b.reshape(-1), (4 * self.units,))
        self.peephole = None if cell.peephole is None else _float64(cell.peephole)
        self.rows: list[tuple[_Number, ...]] = []  # dz of the four gates, and what their weights have seen

    def times(self, *factors: _Number) -> _Number:
        value, error = factors[0]
        for factor in factors[1:]:
            error = np.abs(factor.value) * error + (np.abs(value) + error) * factor.error
            value = value * factor.value
            error = error + self.u * np.abs(value) + self.smallest
        return _Number(value, error)

    def plus(self, *terms: _Number) -> _Number:
        value, error = terms[0]
        for term in terms[1:]:
            value = value + term.value
            error = error + term.error + self.u * np.abs(value)
        return _Number(value, error)

    def dot(self, a: _Number, b: _Matrix) -> _Number:
        value = a.value @ b.value
        rounded = 0.5 * len(b.value) * ((a.value * a.value) @ b.squares + value * value)
        return _Number(value, self._root((a.error * a.error) @ b.squares, rounded, len(b.value)))

    def _root(self, carried: Float64s, rounded: Float64s, count: int) -> Float64s:
        return cast(Float64s, np.sqrt(carried + self.u**2 * rounded + count * self.smallest**2))

    def seen(self, gate: int, c: _Number, back: bool = False) -> _Number:
        """Through a gate's peephole, or the way back."""
        assert self.peephole is not None
        p = self.peephole[gate]
        if p.ndim == 1:
            return self.times(_Number.exact(p, p.shape), c)
        return self.dot(c, _Matrix(p if back else p.T))

    def spared(
        self, to: _Number, source: _Number, f: _Number, factors: Sequence[_Number], slopes: Sequence[_Number]
    ) -> _Number:
        """From one cell state to the next an error goes by four ways, f and three diagonal peepholes. It is the same
        error: the ways' derivatives add up with their signs, not in full as `to` has them."""
        if self.peephole is None or self.peephole.ndim == 3:
            return to
        ways = [f.value] + [self.peephole[k] * factors[k].value * slopes[k].value for k in range(3)]
        spared = sum(np.abs(way) for way in ways) - np.abs(sum(ways))
        return _Number(to.value, np.maximum(to.error - spared * source.error, self.u * np.abs(to.value)))

    def forward(self, on: npt.NDArray[np.bool_], u: _Number, h_prev: _Number, c_prev: _Number) -> tuple[_Step, _Number]:
        z = self.plus(self.dot(_Number.joined([u, h_prev], axis=1), self.weights), self.b)
        zs = [z.at(slice(None), slice(k * self.units, (k + 1) * self.units)) for k in range(4)]
        if self.peephole is not None:
            zs[:3] = [self.plus(zs[k], self.seen(k, c_prev)) for k in range(3)]
        made = [self.functions[k](zs[k]) for k in range(3)]
        (i, _), (f, _), (g, _) = made
        c = self.plus(self.times(f, c_prev), self.times(i, g))
        c = self.spared(c, c_prev, f, (g, c_prev, i), [slope for _, slope in made])
        output_sees = c if self.reads_new else c_prev
        if self.peephole is not None:
            zs[3] = self.plus(zs[3], self.seen(3, output_sees))
        made.append(self.functions[3](zs[3]))
        hidden, hidden_slope = self.functions[4](c)
        gates, slopes = [value for value, _ in made], [slope for _, slope in made]
        step = _Step(on, u, h_prev, c_prev, gates, slopes, c, hidden, hidden_slope, output_sees)
        return step, self.times(gates[3], hidden)

    def backward(self, step: _Step, dh: _Number, dc: _Number) -> tuple[_Number, _Number, _Number]:
        """From the gradients of the state after the step: du, and those of the state before it."""
        i, f, g, o = step.gates
        factors = (g, step.c_prev, i)
        dzo = self.times(dh, step.hidden, step.slopes[3])
        dc = self.plus(dc, self.times(dh, o, step.hidden_slope))
        if self.peephole is not None and self.reads_new:
            dc = self.plus(dc, self.seen(3, dzo, back=True))
        dz = [self.times(dc, factors[k], step.slopes[k]) for k in range(3)] + [dzo]
        dc_prev = self.times(dc, f)
        if self.peephole is not None:
            for k in range(3 if self.reads_new else 4):
                dc_prev = self.plus(dc_prev, self.seen(k, dz[k], back=True))
        dc_prev = self.spared(dc_prev, dc, f, factors, step.slopes)
        self.rows.append((*dz, step.u, step.h_prev, step.c_prev, step.output_sees))
        sent = self.dot(_Number.joined(dz, axis=1), self.weights_back)
        return sent.at(slice(None), slice(self.inputs)), sent.at(slice(None), slice(self.inputs, None)), dc_prev

    def tolerances(self) -> LstmParameters:
        """Of the parameters' gradients, from all steps of backward."""
        if not self.rows:
            return LstmParameters(*(None if part is None else np.zeros(part.shape) for part in self.cell))
        *dz, u, h_prev, c_prev, output_sees = (_Number.joined(column) for column in zip(*self.rows, strict=True))
        seen = [[u] * 4, [h_prev] * 4, [_Number.exact(np.ones((1, 1)), (1, 1))] * 4, [c_prev] * 3 + [output_sees]]
        return LstmParameters(
            *(
                None if part is None else np.stack([self._row_sum(dz[k], by[k], part.ndim) for k in range(4)])
                for part, by in zip(self.cell, seen, strict=True)
            )
        )

    def _row_sum(self, dz: _Number, seen: _Number, ndim: int) -> Float64s:
        """dz' seen for a matrix, the sum of dz * seen for a vector."""

        def product(p: Float64s, q: Float64s) -> Any:
            return p.T @ q if ndim == 3 else np.sum(p * q, axis=0)

        squares, errors = (dz.value**2, seen.value**2), (dz.error**2, seen.error**2)
        value = product(dz.value, seen.value)
        rounded = (0.5 * len(dz.value) + 1) * (product(*squares) + value * value)
        carried = product(errors[0], squares[1] + errors[1]) + product(squares[0], errors[1])
        return _tolerance(self._root(carried, rounded, len(dz.value)))


@np.errstate(all="ignore")
def lstm_bound(
    x: Array,
    cells: Sequence[LstmParameters],
    h0: Array | None,
    c0: Array | None,
    dy: Array | None,
    dhn: Array | None,
    dcn: Array | None,
    activate: Callable[..., Array],
    input_slope: Callable[..., Array],
    *,
    directions: int = 1,
    active: npt.NDArray[np.bool_] | None = None,
    activations: Sequence[NamedActivation] = LSTM_STANDARD,
    output_reads: str = "new",
    masks: Sequence[Array] | None = None,
) -> LstmBound:
    """Tolerances of an LSTM's outputs and gradients; arguments are the oracle's, the parameters stacked.

    `activate` and `input_slope` are f(name, z, alpha, beta) and f'(name, z, alpha, beta) as the oracle computes them.
    """
    dtype = _TYPES[x.dtype.name]
    u, (T, N, _), H = dtype.unit, x.shape, cells[0].wh.shape[-1]
    smallest = max(dtype.smallest, 1e-150)  # of what is smaller, the square is 0 here
    on_at = np.ones((T, N), np.bool_) if active is None else active
    functions = [_Function(*named, activate, input_slope, u, smallest) for named in activations]
    analyses = [_LstmAnalysis(cell, functions, output_reads == "new") for cell in cells]

    def masked(number: _Number, layer: int) -> _Number:
        if not masks:
            return number
        mask = _float64(masks[layer])
        return _Number(number.value * mask, number.error * mask + 2 * u * np.abs(number.value * mask))

    def order(direction: int) -> range:
        return range(T - 1, -1, -1) if direction else range(T)

    def columns(direction: int) -> slice:
        return slice(direction * H, (direction + 1) * H)

    state = (len(cells), N, H)
    h, c = _Number.exact(h0, state), _Number.exact(c0, state)  # brought forward step by step
    steps: list[dict[int, _Step]] = [{} for _ in cells]
    y = _Number.exact(x, x.shape)  # of the layer below
    for layer in range(len(cells) // directions):
        inputs = masked(y, layer - 1) if layer else y
        y = _Number.exact(None, (T, N, directions * H))
        for direction in range(directions):
            number = layer * directions + direction
            for t in order(direction):
                on = on_at[t]
                step, out = analyses[number].forward(on, inputs.at(t, on), h.at(number, on), c.at(number, on))
                steps[number][t] = step
                h.put(out, number, on)
                c.put(step.c, number, on)
                y.put(out, t, on, columns(direction))

    dlayer = _Number.exact(dy, y.value.shape)
    dh, dc = _Number.exact(dhn, state), _Number.exact(dcn, state)
    for layer in range(len(cells) // directions - 1, -1, -1):
        du = _Number.exact(None, (T, N, analyses[layer * directions].inputs))
        for direction in range(directions):
            number = layer * directions + direction
            analysis = analyses[number]
            for t in reversed(order(direction)):
                on = on_at[t]
                dht = analysis.plus(dh.at(number, on), dlayer.at(t, on, columns(direction)))
                sent, dh_prev, dc_prev = analysis.backward(steps[number][t], dht, dc.at(number, on))
                du.put(analysis.plus(du.at(t, on), sent), t, on)
                dh.put(dh_prev, number, on)
                dc.put(dc_prev, number, on)
        dlayer = masked(du, layer - 1) if layer else du
    y_bound, hn, cn, dx, dh0, dc0 = (_tolerance(n.error + smallest) for n in (y, h, c, dlayer, dh, dc))
    return LstmBound(y_bound, hn, cn, dx, [analysis.tolerances() for analysis in analyses], dh0, dc0)
