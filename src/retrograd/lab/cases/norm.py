"""Normalization problems."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from .types import Array, Kind, Layout

__all__ = [
    "ACTIVATION_PARAMETERS",
    "FUSED_ACTIVATIONS",
    "NORM_BENCH_CASES",
    "NORM_VERIFY_CASES",
    "NormCase",
    "NormData",
    "make_norm_data",
    "storage_dtype",
]

# (alpha, beta) such that normalized data reach every piece of the activation; 0 for a parameter it does not have.
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
# Activations whose output determines the slope.
FUSED_ACTIVATIONS: Final = tuple(name for name in ACTIVATION_PARAMETERS if name not in _SLOPE_NEEDS_INPUT)


@dataclass(frozen=True)
class NormCase:
    """A normalization to verify or to time.

    `shape` is logical, channels first: (N, C, *S). With the layout "last" the array passed is (N, *S, C), with
    `channel_axis` set accordingly. `axis` is a layer norm's first normalized axis, as an axis of that array.
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
        """``batch_norm_n32c64s56x56_relu``: the sizes in memory order, then the options that are not the default."""
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
        """The options of the oracle and the bounds that define the statistics sets."""
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
        importlib.import_module("ml_dtypes")  # registers the dtype with NumPy
    return np.dtype(name)


def make_norm_data(case: NormCase, seed: int = 0) -> NormData:
    """Draw normal x and dy, gamma of both signs, and beta. Depends on case and seed only."""
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    dtype = storage_dtype(case.dtype)
    parameters = np.float64 if case.dtype == "float64" else np.float32
    drawn: Any = parameters  # not always float64, which would take longer for a benchmark's data
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
    # In cache: the sizes that models have between their large layers.
    for rows in ((512, 16), (512, 64), (512, 256), (2048, 256), (512, 768)):
        yield NormCase("layer", rows, axis=1, workload="in cache")
    for shape, groups in (((4, 128, 20, 30), 4), ((8, 64, 32, 32), 8)):
        yield NormCase("group", shape, num_groups=groups, workload="in cache")
    for shape in ((8, 128, 8, 8), (16, 512, 1, 1), (8, 64, 16, 16)):
        yield NormCase("batch", shape, workload="in cache")
    yield NormCase("instance", (8, 64, 16, 16), workload="in cache")


def _activated(name: str, kind: Kind, shape: tuple[int, ...], layout: Layout = "first", **options: Any) -> NormCase:
    alpha, beta = ACTIVATION_PARAMETERS[name]
    return NormCase(kind, shape, layout, name, alpha, beta, **options)


def _verify_cases() -> Iterator[NormCase]:
    """Yield cases for every norm, layout, dtype, activation and kind of shape that the engine treats differently."""
    layouts: tuple[Layout, Layout] = ("first", "last")
    kinds: tuple[Kind, ...] = ("batch", "instance", "group", "layer")
    halves = ("float16", "bfloat16")

    # All norms, layouts and dtypes, and large means: at 1e6 standard deviations float32 has four bits of data left.
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
    # The slope from the input: activations that need it, and some with kinks.
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
    # Sizes around the vector width, primes, and 1, for rows, columns and planes.
    for size in (1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 65, 127):
        yield NormCase("layer", (7, size), axis=1)
        yield NormCase("batch", (size, 5), "last")
        yield NormCase("batch", (5, size), "last")
        yield NormCase("instance", (2, 3, size))
        yield NormCase("group", (2, 6, size), "last", num_groups=2)
    # Longer than a block in each direction, and a little longer than a power of two.
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
    # Sets of one element, and a single set.
    yield NormCase("batch", (1, 37), "last")
    yield NormCase("instance", (3, 5))
    yield NormCase("layer", (11, 1), axis=1)
    yield NormCase("group", (3, 6), num_groups=6)
    yield NormCase("group", (3, 6, 7), num_groups=1)


def _distinct(every: Iterator[NormCase]) -> tuple[NormCase, ...]:
    return tuple({case.name: case for case in every}.values())


# The rows of the tables in docs/performance.md, float32.
NORM_BENCH_CASES: Final[tuple[NormCase, ...]] = _distinct(_bench_cases())
# Small enough to run completely at every instruction-set level.
NORM_VERIFY_CASES: Final[tuple[NormCase, ...]] = _distinct(_verify_cases())
