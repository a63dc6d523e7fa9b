"""One network for all series of a panel: exponential smoothing for each series, a dilated LSTM that all share.

As in the winner of the M4 competition (Smyl, 2020), level and seasonality of each series are smoothed with factors of
its own and removed, and an LSTM forecasts what remains. Here values are taken as logarithms, so that removing is a
subtraction and smoothing a linear recurrence, which is one call of the engine (:func:`retrograd.graph.scan`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import graph, nn

__all__ = ["Array", "Network", "Prepared", "Scaled", "Shape", "forecasts", "prepare", "train"]

Array = npt.NDArray[Any]

_LEVEL: Final = 0.5  # the factors before training
_SEASONAL: Final = 0.2


@dataclass(frozen=True)
class Shape:
    """The sizes of a network, and how long it trains."""

    horizon: int
    seasons: tuple[int, ...]  # ascending; empty without
    window: int  # values that the network sees at a step
    stride: int  # values from one step of the LSTM to the next
    steps: int  # of the LSTM
    dilations: tuple[tuple[int, ...], ...]  # of the layers in each residual block
    hidden: int = 40
    batch: int = 64
    updates: int = 1000
    rate: float = 3e-3

    @property
    def season(self) -> int:
        return self.seasons[-1] if self.seasons else 1

    @property
    def length(self) -> int:
        """The values of a series that are used: those before the first step fill the states of the smoothing."""
        least = self.stride * self.steps + self.window + self.horizon + 2 * self.season
        return -(-least // self.season) * self.season


# ---- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled:
    """How the values of a series become numbers around 0 with steps around 1: ``(log(y) - centre) / scale``.

    A series with a value of 0 or below is not taken as logarithms.
    """

    logs: bool
    centre: float
    scale: float

    @classmethod
    def of(cls, y: Array, season: int) -> Scaled:
        logs = bool(y.min() > 0)
        values = np.log(y) if logs else np.asarray(y, np.float64)
        lag = season if len(y) > 2 * season else 1
        step = float(np.abs(values[lag:] - values[:-lag]).mean()) if len(y) > lag else 0.0
        if not step > 1e-9 * max(float(np.abs(values).max()), 1e-12):
            step = 0.01 if logs else max(float(np.abs(values).mean()) * 0.01, 1e-6)  # a constant series
        return cls(logs, float(values[-1]), step)

    def apply(self, y: Array) -> Array:
        return ((np.log(y) if self.logs else np.asarray(y, np.float64)) - self.centre) / self.scale

    def invert(self, z: Array) -> Array:
        values = np.asarray(z, np.float64) * self.scale + self.centre
        return np.exp(np.clip(values, -700.0, 700.0)) if self.logs else values


@dataclass(frozen=True)
class Prepared:
    """The scaled series, aligned at their ends: `z`, `known` and `detrended` are ``[length, series]``."""

    z: Array
    known: Array  # 1 where there is a value; values before the first repeat it
    detrended: Array  # z less the mean of the season that ends there
    steps: Array  # the mean size of the changes up to there: what the network divides by may not know what follows
    start: Array  # [series]: the level before the first step
    profiles: tuple[Array, ...]  # for each season [season, series]: the seasonal indices before the first step
    weights: Array  # [series]: of the losses
    scaled: tuple[Scaled, ...]


def prepare(series: Sequence[Array], shape: Shape) -> Prepared:
    length, season = shape.length, shape.season
    scaled = tuple(Scaled.of(y, season) for y in series)
    z = np.zeros((length, len(series)))
    known, detrended, steps = np.zeros_like(z), np.zeros_like(z), np.ones_like(z)
    profiles = tuple(np.zeros((m, len(series))) for m in shape.seasons)
    for i, (y, scale) in enumerate(zip(series, scaled, strict=True)):
        values = scale.apply(y)
        trailing = _trailing_mean(values, season)
        used = min(len(values), length)
        z[:, i] = values[-used]
        z[-used:, i], known[-used:, i] = values[-used:], 1.0
        # The mean of less than a season is no trend: what a series begins with is compared with its first season.
        trailing[: season - 1] = trailing[min(season, len(values)) - 1]
        detrended[-used:, i] = (values - trailing)[-used:]
        steps[-used:, i] = _mean_steps(values, season)[-used:]
        rest = detrended[:, i].copy()
        for profile in profiles:  # the mean of the first cycles, phase by phase
            m = len(profile)
            first = length - used
            cycles = rest[first : first + 3 * m] if used >= 3 * m else rest[first:]
            phases = (first + np.arange(len(cycles))) % m
            count = np.bincount(phases, minlength=m)
            profile[:, i] = np.bincount(phases, cycles, minlength=m) / np.maximum(count, 1)
            rest -= np.resize(profile[:, i], length)
    start = np.array([z[:, i][length - int(known[:, i].sum()) :][:season].mean() for i in range(len(series))])
    # The mean of what sMAPE and MASE weigh: errors of logarithms, and errors in steps of the series.
    scales = np.array([s.scale if s.logs else np.nan for s in scaled])
    usual = np.nanmean(scales) if np.isfinite(scales).any() else 1.0
    weights = 0.5 + 0.5 * np.nan_to_num(scales / usual, nan=1.0)
    single = np.float32
    return Prepared(
        z.astype(single), known.astype(single), detrended.astype(single), steps.astype(single), start.astype(single),
        tuple(p.astype(single) for p in profiles), weights.astype(single), scaled,
    )  # fmt: skip


def _trailing_mean(values: Array, season: int) -> Array:
    """The mean of the last `season` values at each time; of fewer at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    firsts = np.maximum(ends - season, 0)
    return np.asarray((sums[ends] - sums[firsts]) / (ends - firsts))


def _mean_steps(values: Array, season: int) -> Array:
    """The mean of ``|values[t] - values[t - season]|`` up to each time; of single steps while there is no season."""
    found = np.ones(len(values))
    for lag in sorted({1, season}):
        if len(values) > lag + (season > 1) * 2:
            sizes = np.abs(values[lag:] - values[:-lag])
            means = np.cumsum(sizes) / np.arange(1, len(sizes) + 1)
            found[lag:] = means
            if lag == 1:
                found[0] = means[0]
    return np.asarray(np.maximum(found, 0.05))


# ---- the network -----------------------------------------------------------------------------------------------------


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


class Network(nn.Module):
    """Smoothing factors and first seasonal indices of each series, and the LSTM of all series."""

    def __init__(self, shape: Shape, profiles: Sequence[Array], count: int, rng: np.random.Generator) -> None:
        features = shape.window + (shape.horizon if shape.seasons else 0)
        self.shape = shape
        self.level = nn.Parameter(np.full(count, _logit(_LEVEL), np.float32))
        self.seasonal = nn.Parameter(np.full((len(shape.seasons), count), _logit(_SEASONAL), np.float32))
        for m, profile in zip(shape.seasons, profiles, strict=True):
            setattr(self, f"profile{m}", nn.Parameter(np.ascontiguousarray(profile.T)))
        widths = [features, *(shape.hidden for _ in shape.dilations)]
        self.blocks: Any = nn.Sequential(
            *(
                nn.Sequential(
                    *(nn.LSTM(shape.hidden if j else width, shape.hidden, rng=rng) for j in range(len(dilations)))
                )
                for width, dilations in zip(widths, shape.dilations, strict=False)
            )
        )
        self.hidden = nn.Linear(shape.hidden, shape.hidden, rng=rng)
        self.out = nn.Linear(shape.hidden, shape.horizon, rng=rng)
        self.direct = nn.Linear(features, shape.horizon, bias=False, rng=rng)
        self.out.w[...] = 0
        self.out.b[...] = 0
        self.direct.w[...] = 0

    @classmethod
    def like(cls, shape: Shape, count: int, state: Mapping[str, Array] | None = None) -> Network:
        """A network for as many series, with the parameters of `state`, if it is given."""
        found = cls(shape, [np.zeros((m, count), np.float32) for m in shape.seasons], count, np.random.default_rng(0))
        if state is not None:
            found.load_state_dict(state)
        return found

    @property
    def profiles(self) -> list[nn.Parameter]:
        return [getattr(self, f"profile{m}") for m in self.shape.seasons]

    def per_series(self) -> list[nn.Parameter]:
        return [self.level, *([self.seasonal] if self.profiles else []), *self.profiles]

    def shared(self) -> dict[str, nn.Parameter]:
        own = {id(p) for p in self.per_series()}
        unused = set() if self.profiles else {id(self.seasonal)}
        return {name: p for name, p in self.parameters().items() if id(p) not in own | unused}

    def smooth(self, ids: Any, z: Any, known: Any, detrended: Any, start: Any) -> tuple[Any, Any, list[Any]]:
        """``u``: z without its seasons [T, B]; its level [T, B]; for each season its indices [T + season, B]."""
        length, count = z.shape
        indices: list[Any] = []
        rest, u = detrended, z
        for j, profile in enumerate(self.profiles):
            m = self.shape.seasons[j]
            first = graph.transpose(graph.take(profile, ids))  # [m, B]
            factor = graph.sigmoid(graph.take(self.seasonal[j], ids)) * known
            cycles = (length // m, m, count)
            states = graph.scan(graph.reshape(1.0 - factor, cycles), graph.reshape(factor * rest, cycles), first).y
            every = graph.concatenate([first, graph.reshape(states, (length, count))])
            rest, u = rest - every[:length], u - every[:length]
            indices.append(every)
        factor = graph.sigmoid(graph.take(self.level, ids)) * known
        level = graph.scan(1.0 - factor, factor * u, start).y
        return u, level, indices

    def forward(self, ids: Any, z: Any, known: Any, detrended: Any, steps: Any, start: Any, at: Any) -> Any:
        """The forecasts [K, B, horizon] after the times `at` [K]."""
        shape = self.shape
        u, level, indices = self.smooth(ids, z, known, detrended, start)
        now = graph.take(level, at)  # [K, B]
        size = graph.expand_dims(graph.take(steps, at), 1)
        back = graph.expand_dims(at, 1) + np.arange(1 - shape.window, 1)
        seen = graph.take(u * known, back) - graph.expand_dims(now, 1) * graph.take(known, back)  # [K, W, B]
        base = graph.expand_dims(now, 1)
        inputs = [seen]
        ahead = np.arange(1, shape.horizon + 1)
        if indices:
            # At `at` the indices of the next season are known; later ones repeat them.
            profile: Any = 0.0
            for every, m in zip(indices, shape.seasons, strict=True):
                profile = profile + graph.take(every, graph.expand_dims(at, 1) + ((ahead - 1) % m + 1))
            base = base + profile
            inputs.append(profile)
        # The loss reaches the smoothing through the forecast itself; what the network sees is taken as given.
        x = graph.stop_gradient(graph.transpose(graph.concatenate(inputs, axis=1) / size, (0, 2, 1)))  # [K, B, F]
        h = x = graph.clip(x, -30.0, 30.0)
        for block, dilations in zip(self.blocks, shape.dilations, strict=True):
            y = h
            for layer, dilation in zip(block, dilations, strict=True):
                y = self.dilated(layer, y, dilation)
            h = y + h if h.shape == y.shape else y
        out = self.out(graph.tanh(self.hidden(h))) + self.direct(x)
        base = graph.broadcast_to(base, (at.shape[0], shape.horizon, ids.shape[0]))
        return graph.transpose(base, (0, 2, 1)) + out * graph.transpose(size, (0, 2, 1))

    def dilated(self, layer: nn.LSTM, x: Any, dilation: int) -> Any:
        """An LSTM whose state comes from `dilation` steps before: as many sequences, each of every such step."""
        if dilation == 1:
            return layer(x)
        steps, count, features = x.shape
        y = layer(graph.reshape(x, (steps // dilation, dilation * count, features)))
        return graph.reshape(y, (steps, count, -1))


class _Trained(nn.Module):
    """The network and its loss."""

    def __init__(self, network: Network, quantile: float) -> None:
        self.network, self.quantile = network, quantile

    def forward(
        self,
        ids: Any,
        z: Any,
        known: Any,
        detrended: Any,
        steps: Any,
        start: Any,
        at: Any,
        target: Any,
        weight: Any,
    ) -> Any:
        error = target - self.network(ids, z, known, detrended, steps, start, at)
        pinball = graph.maximum(self.quantile * error, (self.quantile - 1.0) * error)
        return graph.sum(pinball * weight)


def _origins(shape: Shape, offset: int = 0) -> Array:
    """The times after which the steps of the LSTM forecast; the last is `offset` values before the end."""
    last = shape.length - 1 - offset
    return last - shape.stride * np.arange(shape.steps - 1, -1, -1)


def train(series: Sequence[Array], shape: Shape, seed: int, *, quantile: float = 0.5) -> Network:
    """Train a network on all values of the series."""
    rng = np.random.default_rng(seed)
    data = prepare(series, shape)
    network = Network(shape, data.profiles, len(data.scaled), rng)
    warm_up = min(20, shape.updates // 10)
    groups = [
        {"params": params, "lr": nn.Cosine(rate, shape.updates, warm_up=warm_up, final=rate / 30)}
        for params, rate in ((network.shared(), shape.rate), (network.per_series(), shape.rate))
    ]
    optimizer = nn.Adam(groups, maximum_norm=1.0)
    step = nn.compile(_Trained(network, quantile), None, optimizer, num_threads=1)
    for batch in _batches(data, shape, rng):
        step(*batch)
    return network


def _batches(data: Prepared, shape: Shape, rng: np.random.Generator) -> Iterator[tuple[Array, ...]]:
    """`updates` random batches: series, each without a random number of its last seasons."""
    length, count = data.z.shape
    lengths = data.known.sum(axis=0).astype(np.int64)
    batch = min(shape.batch, count)
    order: list[int] = []
    ahead = np.arange(1, shape.horizon + 1)
    season = shape.season
    least = max(2 * season, 3)  # values before the first origin
    for _ in range(shape.updates):
        while len(order) < batch:
            order.extend(rng.permutation(count).tolist())
        ids, order = np.array(order[:batch]), order[batch:]
        at = _origins(shape, shape.horizon + int(rng.integers(shape.stride)))
        # Cut whole seasons, so that phases stay, and at least half of what a series can be trained on remains.
        room = np.maximum(lengths[ids] - shape.stride * shape.steps - least - shape.horizon, 0) // season
        cut = rng.integers(0, room + 1) * season
        rows = np.arange(length)[:, None] - cut
        inside = rows >= 0
        rows = np.maximum(rows, 0)
        columns = ids[None, :]
        z, known = data.z[rows, columns], data.known[rows, columns] * inside
        detrended, steps = data.detrended[rows, columns] * inside, data.steps[rows, columns]
        seen = np.cumsum(known, axis=0)[at]  # values up to each origin [K, B]
        target = z[at[:, None] + ahead].transpose(0, 2, 1)
        weight = (seen >= least)[:, :, None] * data.weights[ids][None, :, None]
        weight = np.broadcast_to(weight / steps[at][:, :, None], target.shape)
        weight = weight / max(float(weight.sum()), 1.0)
        yield ids, z, known, detrended, steps, data.start[ids], at, target, weight.astype(np.float32)


def forecasts(network: Network, lengths: Sequence[int], series: Sequence[Array]) -> Array:
    """Forecasts after the ends of series, [series, horizon], in the series' units.

    They are the series of the training, with more values or fewer; `lengths` are those of the training.
    """
    shape = network.shape
    profiles = [parameter.value.copy() for parameter in network.profiles]
    for parameter in network.profiles:
        for i, (before, y) in enumerate(zip(lengths, series, strict=True)):  # a phase is a row, counted from the end
            parameter.value[i] = np.roll(parameter.value[i], before - len(y))
    try:
        return _predict(network, prepare(series, shape))
    finally:
        for parameter, old in zip(network.profiles, profiles, strict=True):
            parameter.value = old


def _predict(network: Network, data: Prepared) -> Array:
    shape = network.shape
    count, at = len(data.scaled), _origins(shape)
    batch = min(shape.batch, count)
    found = np.empty((count, shape.horizon))
    for first in range(0, count, batch):
        ids = np.minimum(np.arange(first, first + batch), count - 1)
        inputs = (data.z[:, ids], data.known[:, ids], data.detrended[:, ids], data.steps[:, ids], data.start[ids])
        z = network.predict(ids, *inputs, at)[-1]
        for i, row in zip(ids, z, strict=True):
            found[i] = data.scaled[i].invert(row)
    return found
