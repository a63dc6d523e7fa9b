"""Forecasts of a panel, many series with one horizon: a network of all of them and methods for each, combined.

The last values of the series, one or two horizons, decide how long the network trains and what each method weighs in
the combination; the errors of the combination there make the bands. Then everything is fitted again to all values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import nn
from .files import check_room, load_weights, opened_model
from .panel_jobs import METHODS, Job, run, split
from .panel_model import Array, Network, Shape

__all__ = ["PanelForecast", "PanelModel", "fit_panel"]

KIND: Final = "panel"
_LEAST: Final = 3  # values of a series
_LARGEST: Final = 1e100
_NETWORK: Final = "network"
# How long a network trains, in updates: validation chooses. Long seasons, which it sees in large steps, have more.
_UPDATES: Final = (60, 200, 600)
_UPDATES_OF_LONG: Final = (200, 600, 1800)
_SEEDS: Final = 2  # networks in validation
_MEMBERS: Final = 4  # networks in the result
_POWER: Final = 4  # of the errors: a method with half the error of another weighs 16 times as much
_THETAS: Final = ("theta", "optimized_theta")
_LEAST_WEIGHT: Final = 0.01
_VALIDATING: Final = 0.6  # of a time limit; the rest is for the fit to all values
NAMES: Final = {
    "ets": "AutoETS", "ces": "AutoCES", "theta": "dynamic theta", "optimized_theta": "optimized theta",
    "arima": "AutoARIMA", "naive": "naive", "seasonal": "seasonal naive", _NETWORK: "network",
}  # fmt: skip


class PanelForecast(NamedTuple):
    """The forecast of a series, ``[horizon]`` each: the values, and the ends of the band."""

    point: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class PanelModel:
    """A fitted panel: its forecasts, the networks, and how well each method did in validation."""

    ids: tuple[str, ...]
    horizon: int
    season: int
    levels: tuple[float, float]
    weights: dict[str, float]  # of the combination
    errors: dict[str, tuple[float, float]]  # sMAPE and MASE in validation, by method; "combined"
    # The share of values in validation within the band made without their series; None if only one was validated.
    coverage: float | None
    point: Array  # [series, horizon]
    low: Array
    high: Array
    verdict: str
    notes: tuple[str, ...]
    digest: str  # of the series
    shape: Shape | None
    networks: tuple[Network, ...] = field(default=(), repr=False)
    reading: dict[str, Any] = field(default_factory=dict)  # how the command read the table
    # Not saved: the combination's forecasts [series, horizon] of the last values, NaN for series that are too short.
    validation: Array | None = field(default=None, repr=False)

    def forecast(self, horizon: int | None = None) -> dict[str, PanelForecast]:
        """Return the forecasts after the ends of the series, by their names."""
        steps = self.horizon if horizon is None else horizon
        if not 1 <= steps <= self.horizon:
            raise ValueError(f"forecast: horizon is {steps}, must be from 1 to {self.horizon}, that of the training")
        return {
            key: PanelForecast(self.point[i, :steps], self.low[i, :steps], self.high[i, :steps])
            for i, key in enumerate(self.ids)
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all."""
        record = {name: getattr(self, name) for name in _RECORDED}
        record["shape"] = None if self.shape is None else dataclasses.asdict(self.shape)
        saved = _Saved(len(self.ids), self.horizon, self.networks)
        for name in _ARRAYS:
            getattr(saved, name)[...] = getattr(self, name)
        nn.save(path, saved, metadata={"kind": KIND, "networks": len(self.networks), **record})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PanelModel:
        """Read a file that :meth:`save` wrote, or the one in a run directory."""
        with opened_model(path, KIND) as (file, record):
            shape, ids, horizon = _as_shape(record["shape"]), tuple(map(str, record["ids"])), int(record["horizon"])
            count = int(record["networks"])
            check_room(file, 6 * len(ids) * horizon)  # 3 arrays of float64
            networks = () if shape is None else tuple(Network.like(shape, len(ids)) for _ in range(count))
            saved = _Saved(len(ids), horizon, networks)
            load_weights(file, saved)
            given = {name: record[name] for name in _RECORDED}
            given |= {"ids": ids, "horizon": horizon, "shape": shape}
            given |= {"levels": tuple(given["levels"]), "notes": tuple(given["notes"])}
            given["errors"] = {key: tuple(pair) for key, pair in given["errors"].items()}
            return cls(**given, **{name: getattr(saved, name).value for name in _ARRAYS}, networks=networks)


_ARRAYS: Final = ("point", "low", "high")
_APART: Final = (*_ARRAYS, "networks", "validation")
_RECORDED: Final = tuple(f.name for f in dataclasses.fields(PanelModel) if f.name not in _APART)


class _Saved(nn.Module):
    """The arrays of a model, as :func:`retrograd.nn.save` takes them."""

    def __init__(self, count: int, horizon: int, networks: Sequence[Network]) -> None:
        for name in _ARRAYS:
            setattr(self, name, nn.Buffer(np.zeros((count, horizon))))
        self.networks = nn.Sequential(*networks)


def _as_shape(record: dict[str, Any] | None) -> Shape | None:
    if record is None:
        return None
    lists = {"seasons": tuple(record["seasons"]), "dilations": tuple(map(tuple, record["dilations"]))}
    return Shape(**{**record, **lists})


def digest_of(series: Mapping[str, Array]) -> str:
    """A checksum of the names and values of series."""
    found = hashlib.sha256()
    for key, values in series.items():
        found.update(json.dumps([key, len(values)]).encode())
        found.update(np.ascontiguousarray(values, "<f8").tobytes())
    return found.hexdigest()


def fit_panel(
    series: Mapping[str, npt.ArrayLike],
    horizon: int,
    season: int = 1,
    *,
    seed: int = 0,
    processes: int = 1,
    time_limit: float | None = None,
    levels: tuple[float, float] = (0.1, 0.9),
    methods: Sequence[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> PanelModel:
    """Fit a panel: series by name, oldest values first, of which the next `horizon` are forecast.

    `season` is the period of the series in values, 1 for none. For 24, hours of days, the days of weeks are a second
    season if the series have four weeks. The bits of the result depend on `seed`, not on `processes`; more than one
    need the main guard of :mod:`multiprocessing`. With a `time_limit`, in seconds, what has not begun by then is left
    out, and the notes say so. `levels` are the quantiles of the band. `methods` are those of statsforecast to use:
    "ets", "ces", "theta", "optimized_theta", "arima"; by default all that take little time, or none if it is not
    installed. `progress` is called with what is being done, and how many of how many parts are done.
    """
    begun = time.monotonic()
    deadlines = (math.inf, math.inf) if time_limit is None else (begun + _VALIDATING * time_limit, begun + time_limit)
    names, values = _checked(series, horizon, season, processes, levels)
    fit = _Fit(names, values, horizon, season, seed, processes, deadlines, progress or (lambda *_: None))
    fit.methods = _chosen_methods(methods, season)
    if not fit.validated:
        longest, needed = max(fit.lengths), fit.cuts[0] + fit.least
        raise ValueError(
            f"fit_panel: the longest series has {longest} values; a forecast of {horizon} needs at least {needed}"
        )
    return fit.model(levels)


def _checked(
    series: Mapping[str, npt.ArrayLike], horizon: int, season: int, processes: int, levels: tuple[float, float]
) -> tuple[tuple[str, ...], list[Array]]:
    for name, value, least in (("horizon", horizon, 1), ("season", season, 1), ("processes", processes, 1)):
        if value < least:
            raise ValueError(f"fit_panel: {name} is {value}, must be at least {least}")
    if not 0 < levels[0] < levels[1] < 1:
        raise ValueError(f"fit_panel: levels are {levels}, must be two ascending numbers between 0 and 1")
    if not series:
        raise ValueError("fit_panel: there are no series")
    found = []
    for key, given in series.items():
        try:
            y = np.array(given, np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"fit_panel: the series {key!r} has values that are no numbers") from None
        if y.ndim != 1:
            raise ValueError(f"fit_panel: the series {key!r} has shape {y.shape}, must have one axis")
        if len(y) < _LEAST:
            raise ValueError(f"fit_panel: the series {key!r} has {len(y)} values, must have at least {_LEAST}")
        bad = ~np.isfinite(y)
        if bad.any():
            at = int(np.argmax(bad))
            raise ValueError(f"fit_panel: the series {key!r} has {y[at]} at index {at}, must have finite values")
        if np.abs(y).max() > _LARGEST:
            raise ValueError(f"fit_panel: the series {key!r} has {y[np.abs(y).argmax()]:g}, must be within ±1e100")
        found.append(y)
    return tuple(series), found


def _chosen_methods(methods: Sequence[str] | None, season: int) -> tuple[str, ...]:
    if methods is not None:
        for name in methods:
            if name not in METHODS:
                raise ValueError(f"fit_panel: methods has {name!r}; there are {', '.join(METHODS)}")
        chosen = tuple(methods)
    else:
        chosen = tuple(name for name, method in METHODS.items() if season <= method.seasons)
    try:
        import statsforecast
    except ImportError:
        if methods:
            raise ImportError("fit_panel: methods need statsforecast: pip install 'retrograd[series]'") from None
        return ()
    del statsforecast
    return chosen


def network_shape(lengths: Sequence[int], horizon: int, season: int) -> Shape:
    """Choose the sizes of the network by the season and the usual length of the series."""
    usual = int(np.median(lengths))
    seasons: tuple[int, ...] = (season,) if season > 1 and usual >= 2 * season + 3 else ()
    if seasons == (24,) and usual >= 4 * 168:
        seasons = (24, 168)
    longest = seasons[-1] if seasons else 1
    # A long season is taken in steps of a part of it, at most 24 values: hours in days, weeks of a year in quarters.
    stride = max(d for d in range(1, 25) if season % d == 0) if seasons and season >= 24 else 1
    if stride > 1:
        window = max(longest, horizon)
        dilations: tuple[tuple[int, ...], ...] = ((1, 7), (1, 7)) if longest == 7 * season else ((1, 2), (1, 4))
        most = 28
    elif seasons:
        divisors = [d for d in range(1, season + 1) if season % d == 0]
        third = len(divisors) // 3
        window = max(season + season // 2, horizon)
        dilations = ((1, divisors[third]), (divisors[-1 - third], season)) if len(divisors) > 3 else ((1, 2), (4, 8))
        if len(divisors) <= 2:
            dilations = ((1, season), (1, season))
        most = 6 * season if season > 4 else 8 * season
    else:
        window = min(52, max(6, usual // 6))
        dilations = ((1, 2), (4, 8)) if usual >= 40 else ((1, 2), (1, 2))
        most = 48
    unit = math.lcm(*(d for block in dilations for d in block))
    steps = max(unit, min(most, usual // stride) // unit * unit)
    wide = 128 if steps <= 32 and stride == 1 else 64
    return Shape(horizon, seasons, window, stride, steps, dilations, batch=wide)


class _Fit:
    """The work on one panel."""

    def __init__(
        self,
        names: tuple[str, ...],
        series: list[Array],
        horizon: int,
        season: int,
        seed: int,
        processes: int,
        deadlines: tuple[float, float],  # of validation, and of the fit to all values
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.names, self.series, self.horizon, self.season = names, series, horizon, season
        self.seed, self.processes, self.deadlines, self.progress = seed, processes, deadlines, progress
        self.methods: tuple[str, ...] = ()
        self.notes: list[str] = []
        self.lengths = [len(y) for y in series]
        origins = 2 if np.median(self.lengths) >= 12 * horizon + 2 * season else 1
        self.cuts = tuple(horizon * n for n in range(origins, 0, -1))
        self.least = max(2 * season, 5)  # what remains of a series without its last values
        self.validated = [i for i, n in enumerate(self.lengths) if n - self.cuts[0] >= self.least]
        # The errors of a series are compared with the changes that it has had: the scale of MASE.
        self.scale = np.array([_scale(y, season) for y in series])

    def jobs(self, keys: Sequence[str], cuts: tuple[int, ...], ids: Sequence[int]) -> list[Job]:
        parts = list(split(ids))
        return [Job(key, cuts, part, self.horizon, self.season) for key in keys for part in parts]

    def networks(self, shapes: Sequence[Shape], cuts: tuple[int, ...], ids: Sequence[int], count: int) -> list[Job]:
        return [
            Job(_NETWORK, cuts, tuple(ids), self.horizon, self.season, shape, (self.seed << 16) + 100 * at + number)
            for at, shape in enumerate(shapes)
            for number in range(count)
        ]

    def run(self, what: str, jobs: Sequence[Job]) -> list[Any]:
        deadline = self.deadlines[what != "validation"]
        return run(jobs, self.series, self.processes, deadline, lambda done: self.progress(what, done, len(jobs)))

    def joined(self, jobs: Sequence[Job], results: Sequence[Any], cuts: Sequence[int]) -> dict[str, Array]:
        """The forecasts of the methods [cuts, series, horizon]; a method that has not finished is left out."""
        found: dict[str, Array] = {}
        missing = {job.key for job, result in zip(jobs, results, strict=True) if result is None}
        for job, result in zip(jobs, results, strict=True):
            if job.key in missing:
                continue
            rows = found.setdefault(job.key, np.full((len(cuts), len(self.series), self.horizon), np.nan))
            rows[:, list(job.ids)] = result[0]
        if missing:
            self.notes.append(f"The time limit left out {', '.join(NAMES[key] for key in sorted(missing))}.")
        plain = found["naive"]
        return {key: np.where(np.isfinite(rows), rows, plain) for key, rows in found.items()}

    # ---- validation --------------------------------------------------------------------------------------------------

    def losses(self, predicted: Array) -> tuple[Array, Array]:
        """sMAPE and the errors in the series' scale, of each validated forecast: [cuts, series]."""
        truth, ids = self.truth(), self.validated
        error = np.abs(predicted[:, ids] - truth)
        total = np.abs(predicted[:, ids]) + np.abs(truth)
        smape = 200 * np.where(total > 0, error / np.where(total > 0, total, 1), 0).mean(axis=2)
        return smape, error.mean(axis=2) / self.scale[ids]

    def truth(self) -> Array:
        return np.stack(
            [
                [self.series[i][self.lengths[i] - cut : self.lengths[i] - cut + self.horizon] for i in self.validated]
                for cut in self.cuts
            ]
        )

    def score(self, predicted: Array) -> float:
        """The mean of the two errors, each relative to that of the seasonal naive forecast: OWA with it as Naive2."""
        return float(
            np.mean([loss.mean() / basis for loss, basis in zip(self.losses(predicted), self.basis, strict=True)])
        )

    def validate(self) -> tuple[dict[str, Array], Shape | None]:
        plain = ("naive", "seasonal") if self.season > 1 else ("naive",)
        jobs = self.jobs((*plain, *self.methods), self.cuts, self.validated)
        cut = self.cuts[0]
        base = network_shape([self.lengths[i] - cut for i in self.validated], self.horizon, self.season)
        updates = _UPDATES if base.stride == 1 else _UPDATES_OF_LONG
        shapes = [dataclasses.replace(base, updates=number) for number in updates]
        nets = self.networks(shapes, self.cuts, self.validated, _SEEDS)
        first = len(plain) * -(-len(self.validated) // 60)
        # The naive forecasts first, then the longest trainings.
        order = [*jobs[:first], *nets[::-1], *jobs[first:]]
        results = self.run("validation", order)
        statistics = [(j, r) for j, r in zip(order, results, strict=True) if j.shape is None]
        predicted = self.joined([j for j, _ in statistics], [r for _, r in statistics], self.cuts)
        last = "seasonal" if "seasonal" in predicted else "naive"
        self.basis = [max(float(loss.mean()), 1e-12) for loss in self.losses(predicted[last])]
        best: tuple[float, Shape, Array] | None = None
        for shape in shapes:
            found = [r[0] for j, r in zip(order, results, strict=True) if j.shape == shape and r is not None]
            if found:
                rows = np.full((len(self.cuts), len(self.series), self.horizon), np.nan)
                rows[:, self.validated] = np.mean(found, axis=0)
                score = self.score(rows)
                if best is None or score < best[0]:
                    best = score, shape, rows
        if best is None:
            self.notes.append("The time limit left out the network.")
            return predicted, None
        return {**predicted, _NETWORK: best[2]}, best[1]

    def weigh(self, predicted: Mapping[str, Array]) -> dict[str, float]:
        """Weigh all methods by their errors, the mean of all series: which one is best may be chance."""
        scores = {key: max(self.score(rows), 1e-6) for key, rows in predicted.items()}
        if len(kin := [key for key in _THETAS if key in scores]) > 1:  # much alike, they would weigh double
            del scores[max(kin, key=lambda key: scores[key])]
        raw = {key: score**-_POWER for key, score in scores.items()}
        total = sum(raw.values())
        kept = {key: weight for key, weight in raw.items() if weight >= _LEAST_WEIGHT * total}
        total = sum(kept.values())
        return {key: weight / total for key, weight in sorted(kept.items(), key=lambda item: -item[1])}

    # ---- the result --------------------------------------------------------------------------------------------------

    def model(self, levels: tuple[float, float]) -> PanelModel:
        predicted, shape = self.validate()
        weights = self.weigh(predicted)
        predicted["combined"] = sum_of(weights, predicted)
        errors = {key: (float(s.mean()), self.mase(a)) for key, (s, a) in self.all_losses(predicted).items()}
        low, high, coverage = self.bands(predicted["combined"], levels)
        verdict = self.verdict(weights, predicted)
        weights, point, networks, shape = self.refit(weights, shape)
        scale = self.scale[:, None]
        ends = (point + low * scale, point + high * scale)
        for i, y in enumerate(self.series):
            if y.min() >= 0:  # of a quantity that has no negative values
                for rows in (point, *ends):
                    np.maximum(rows[i], 0.0, out=rows[i])
        return PanelModel(
            self.names, self.horizon, self.season, levels, weights, errors, coverage, point, *ends, verdict,
            tuple(self.notes), digest_of(dict(zip(self.names, self.series, strict=True))), shape, networks,
            validation=predicted["combined"][-1],
        )  # fmt: skip

    def all_losses(self, predicted: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
        return {key: self.losses(rows) for key, rows in predicted.items()}

    @staticmethod
    def mase(scaled: Array) -> float:
        return float(scaled.mean())

    def bands(self, combined: Array, levels: tuple[float, float]) -> tuple[Array, Array, float | None]:
        """The ends of the band in the scales of the series, [horizon] each, and the share of values within it.

        For the share, every second series is compared with the band that the others give.
        """
        errors = (self.truth() - combined[:, self.validated]) / self.scale[self.validated][:, None]
        low, high = _within(errors.reshape(-1, self.horizon), levels)
        if len(self.validated) < 2:
            return low, high, None
        inside = []
        for part in (0, 1):
            other = _within(errors[:, part::2].reshape(-1, self.horizon), levels)
            own = errors[:, 1 - part :: 2]
            inside.append((own >= other[0]) & (own <= other[1]))
        return low, high, float(np.concatenate([rows.ravel() for rows in inside]).mean())

    def verdict(self, weights: Mapping[str, float], predicted: Mapping[str, Array]) -> str:
        plain = min((key for key in ("naive", "seasonal") if key in predicted), key=lambda k: self.score(predicted[k]))
        gain = 1 - self.score(predicted["combined"]) / self.score(predicted[plain])
        parts = ", ".join(f"{100 * weight:.0f} % {NAMES[key]}" for key, weight in weights.items())
        count, last = len(self.validated), len(self.cuts) * self.horizon
        where = f"on the last {last} values of {count:,} series"
        if list(weights) == [plain] or gain < 0.005:
            return f"Nothing beats the {NAMES[plain]} forecast {where}: the forecast is {parts}."
        return (
            f"In validation {where}, the error is {100 * gain:.0f} % below that of the {NAMES[plain]} forecast. "
            f"The forecast is {parts}."
        )

    def refit(
        self, weights: dict[str, float], shape: Shape | None
    ) -> tuple[dict[str, float], Array, tuple[Network, ...], Shape | None]:
        """Fit what has a weight to all values. Return the weights of what was fitted in time, and the forecasts."""
        every = range(len(self.series))
        nets: list[Job] = []
        if _NETWORK in weights and shape is not None:
            full = network_shape(self.lengths, self.horizon, self.season)
            shape = dataclasses.replace(full, updates=shape.updates)
            nets = self.networks([shape], (0,), every, _MEMBERS)
        else:
            shape = None
        keys = [key for key in weights if key in METHODS]
        plain = self.jobs(("naive", *(["seasonal"] if "seasonal" in weights else [])), (0,), every)
        slow = self.jobs(keys, (0,), every)
        by_hand = [job(self.series) for job in plain]
        results = self.run("forecast", [*nets, *slow])
        trained, others = results[: len(nets)], results[len(nets) :]
        fitted = self.joined([*plain, *slow], [*by_hand, *others], (0,))
        made = [result for result in trained if result is not None]
        if nets and len(made) < len(nets):
            self.notes.append(f"The time limit left {len(made)} of {len(nets)} networks.")
        if made:
            mean = np.mean([rows for rows, _ in made], axis=0)
            fitted[_NETWORK] = np.where(np.isfinite(mean), mean, fitted["naive"])
        kept = {key: weight for key, weight in weights.items() if key in fitted} or {"naive": 1.0}
        kept = {key: weight / sum(kept.values()) for key, weight in kept.items()}
        point = sum_of(kept, fitted)[0]
        if shape is None or not made:
            return kept, point, (), None
        return kept, point, tuple(Network.like(shape, len(self.series), state) for _, state in made), shape


def sum_of(weights: Mapping[str, float], predicted: Mapping[str, Array]) -> Array:
    """The weighted sum of forecasts."""
    return np.asarray(sum(weight * predicted[key] for key, weight in weights.items()))


def changes(y: Array, season: int) -> Array:
    """The absolute changes over a season, of a shorter series those from value to value. MASE divides by their mean."""
    lag = season if len(y) > season else 1
    found: Array = np.abs(y[lag:] - y[:-lag])
    return found


def _scale(y: Array, season: int) -> float:
    """The mean change over a season. Of a constant series, a hundredth of its size, or 1."""
    found = changes(y, season)
    return float(found.mean()) or float(found.max()) or float(np.abs(y).max()) / 100 or 1.0


def _within(errors: Array, levels: tuple[float, float]) -> tuple[Array, Array]:
    """The conformal quantiles of scaled errors [n, horizon], for each step: of n errors those of rank p (n + 1)."""
    count = len(errors)
    ordered = np.sort(errors, axis=0)
    low = max(math.floor(levels[0] * (count + 1)), 1) - 1
    high = min(math.ceil(levels[1] * (count + 1)), count) - 1
    return ordered[low], ordered[high]
