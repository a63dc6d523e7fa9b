"""The arguments of the engine's functions, by the names that the binding gives them (`_core.pyi`).

The functions pass tuples in this order to `enter` in `_call.py`, which makes a record of one that the engine refuses.
`overlap_checked` is set where Python has made sure that results do not overlap inputs, so that the engine need not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ._types import Array


class NormForward(NamedTuple):
    """Of NormProblem.forward."""

    x: Array
    gamma: Array | None
    beta: Array | None
    y: Array | None
    keep: Array | None
    statistics: Array
    statistics_given: bool
    overlap_checked: bool
    threads: int


class NormBackward(NamedTuple):
    """Of NormProblem.backward."""

    dy: Array
    cache: tuple[Any, ...]
    sum_dz: Array | None
    sum_dz_xhat: Array | None
    count: Array | None  # type: ignore[assignment]  # hides tuple.count
    dx: Array | None
    dgamma: Array | None
    dbeta: Array | None
    accumulate: bool
    overlap_checked: bool
    threads: int


class NormGradientSums(NamedTuple):
    """Of NormProblem.gradient_sums."""

    dy: Array
    cache: tuple[Any, ...]
    sum_dz: Array
    sum_dz_xhat: Array
    overlap_checked: bool
    threads: int


class LinearForward(NamedTuple):
    """Of linear_forward."""

    f64: bool
    x: Array
    w: Array
    b: Array | None
    y: Array
    overlap_checked: bool
    threads: int


class LinearBackward(NamedTuple):
    """Of linear_backward."""

    f64: bool
    dy: Array
    x: Array
    w: Array
    dx: Array | None
    dw: Array | None
    db: Array | None
    accumulate: bool
    overlap_checked: bool
    threads: int


class EmbeddingForward(NamedTuple):
    """Of embedding_forward."""

    f64: bool
    indices: Array
    table: Array
    y: Array
    overlap_checked: bool
    threads: int


class EmbeddingBackward(NamedTuple):
    """Of embedding_backward."""

    f64: bool
    dy: Array
    indices: Array
    dtable: Array
    accumulate: bool
    overlap_checked: bool
    threads: int


class RecurrentForward(NamedTuple):
    """Of RecurrentProblem.forward."""

    inputs: tuple[Any, ...]
    cache: Array | None
    stamp: int
    y: Array | None
    hn: Array | None
    cn: Array | None
    overlap_checked: bool
    threads: int


class RecurrentBackward(NamedTuple):
    """Of RecurrentProblem.backward."""

    dy: Array | None
    dhn: Array | None
    dcn: Array | None
    inputs: tuple[Any, ...]
    cache: Array
    stamp: int | None
    dx: Array | None
    dcells: Sequence[Any] | None
    dh0: Array | None
    dc0: Array | None
    accumulate: bool
    overlap_checked: bool
    threads: int


class Convolve(NamedTuple):
    """Of convolve."""

    f64: bool
    transposed: bool
    kind: int
    alpha: float
    beta: float
    source: Array
    w: Array
    b: Array | None
    out: Array
    geometry: Sequence[int]
    accumulate: bool
    overlap_checked: bool
    threads: int


class ConvWeights(NamedTuple):
    """Of conv_weights."""

    f64: bool
    x: Array
    dy: Array
    dw: Array
    geometry: Sequence[int]
    accumulate: bool
    overlap_checked: bool
    threads: int


class ChannelSums(NamedTuple):
    """Of channel_sums."""

    f64: bool
    images: Array
    sums: Array
    accumulate: bool
    overlap_checked: bool
    threads: int


class PoolForward(NamedTuple):
    """Of pool_forward."""

    kind: int
    f64: bool
    x: Array
    windows: Sequence[int]
    count_padding: bool
    y: Array
    indices: Array | None
    overlap_checked: bool
    threads: int


class PoolBackward(NamedTuple):
    """Of pool_backward."""

    kind: int
    f64: bool
    dy: Array
    x: Array | None
    y: Array | None
    windows: Sequence[int]
    count_padding: bool
    dx: Array
    accumulate: bool
    overlap_checked: bool
    threads: int


class IndexedPlanes(NamedTuple):
    """Of indexed_planes."""

    kind: int
    f64: bool
    part: Array
    indices: Array
    whole: Array
    accumulate: bool
    overlap_checked: bool
    threads: int


class ScanForward(NamedTuple):
    """Of scan_forward."""

    f64: bool
    axis: int
    a: Array
    b: Array
    h0: Array | None
    reset: Array | None
    y: Array
    hn: Array
    overlap_checked: bool
    threads: int


class ScanBackward(NamedTuple):
    """Of scan_backward."""

    f64: bool
    axis: int
    dy: Array | None
    dhn: Array | None
    a: Array
    reset: Array | None
    y: Array
    h0: Array | None
    da: Array | None
    da_sums: Array | None
    db: Array | None
    dh0: Array | None
    accumulate: bool
    overlap_checked: bool
    threads: int


class SoftmaxCrossEntropy(NamedTuple):
    """Of softmax_cross_entropy."""

    f64: bool
    logits: Array
    labels: Array | None
    ignored: int
    targets: Array | None
    weights: Array | None
    weight: float
    smoothing: float
    reduction: int
    scale: float
    losses: Array | None
    gradient: Array | None
    loss: Array | None
    overlap_checked: bool
    threads: int


class CosineDistance(NamedTuple):
    """Of cosine_distance."""

    f64: bool
    y: Array
    target: Array
    weights: Array | None
    weight: float
    reduction: int
    scale: float
    losses: Array | None
    gradient: Array | None
    loss: Array | None
    overlap_checked: bool
    threads: int


class ElementLosses(NamedTuple):
    """Of element_losses."""

    f64: bool
    kind: int
    a: float
    b: float
    y: Array
    target: Array
    weights: Array | None
    weight: float
    reduction: int
    scale: float
    values: Array | None
    gradient: Array | None
    loss: Array | None
    overlap_checked: bool
    threads: int


class ActivationForward(NamedTuple):
    """Of activation_forward."""

    kind: int
    alpha: float
    beta: float
    dtype: int
    x: Array
    y: Array
    overlap_checked: bool
    threads: int


class ActivationBackward(NamedTuple):
    """Of activation_backward."""

    kind: int
    alpha: float
    beta: float
    dtype: int
    dy: Array
    slope_from: Array
    slope_from_input: bool
    dx: Array
    accumulate: bool
    overlap_checked: bool
    threads: int


class Dropout(NamedTuple):
    """Of dropout."""

    f64: bool
    x: Array
    rate: float
    seed: int
    y: Array
    overlap_checked: bool
    threads: int


class OptimizerStep(NamedTuple):
    """Of OptimizerRule.step."""

    parameters: list[Any]
    gradients: list[Any]
    states0: list[Any]
    states1: list[Any]
    states2: list[Any]
    overlap_checked: bool
    threads: int


class GlobalNorm(NamedTuple):
    """Of global_norm."""

    arrays: list[Any]
    overlap_checked: bool
    threads: int
