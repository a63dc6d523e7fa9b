"""Forecasts by statsforecast, and the choice among all methods by rolling origins.

An origin is the number of rows that a forecast may see. Each method forecasts from each origin; the errors decide how
the methods are weighted, and how wide the bands are. A forecast from an origin is weighted only by errors of rows
before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from .task import Array

__all__ = [
    "CHOSEN",
    "LEARNED",
    "METHODS",
    "Method",
    "Rolling",
    "band",
    "by_library",
    "jobs",
    "rolling_origins",
    "weigh",
]

CHOSEN: Final = "chosen"
LEARNED: Final = ("linear", "network")  # ours: fitted once, to the rows of the training part

_VALIDATED: Final = 8  # origins that decide the weights
_TESTED: Final = 8  # origins in the test part
_LEAST: Final = 4  # origins from which a gain can be told from chance
_EARLIER: Final = 12  # origins before the test part
_BANDED: Final = 16  # origins whose errors make a band
_COVERAGE: Final = 0.8
_POWER: Final = 4
_SMALLEST: Final = 0.02  # of a weight


class Method(NamedTuple):
    """A method of statsforecast."""

    name: str
    make: Callable[[Any, int], Any]  # from the module statsforecast.models and the season
    seasons: tuple[int, int] = (1, 10_000)  # for which it is used
    most: int = 1500  # rows that it is fitted to, the last ones, or ten seasons if that is more


METHODS: Final = {
    "ets": Method("AutoETS", lambda models, season: models.AutoETS(season_length=season), (1, 24)),
    "theta": Method("AutoTheta", lambda models, season: models.AutoTheta(season_length=season)),
    "ces": Method("AutoCES", lambda models, season: models.AutoCES(season_length=season)),
    "arima": Method(  # longer seasons take minutes
        "AutoARIMA", lambda models, season: models.AutoARIMA(season_length=season, approximation=True), (1, 12), 400
    ),
    "mstl": Method("MSTL", lambda models, season: models.MSTL(season_length=season), (2, 10_000)),
    "seasonal": Method(
        "seasonal naive", lambda models, season: models.SeasonalNaive(season_length=season), (2, 10_000)
    ),
    "naive": Method("naive", lambda models, season: models.Naive()),
    "drift": Method("drift", lambda models, season: models.RandomWalkWithDrift()),
}


def by_library(key: str, values: Array, season: int, horizon: int) -> Array:
    """Return the forecast by a method of statsforecast, ``[horizon]``; NaN if it cannot forecast these values."""
    from statsforecast import models

    method = METHODS[key]
    nothing = np.full(horizon, np.nan)
    if not method.seasons[0] <= season <= method.seasons[1] or len(values) < 2 * season + 3:
        return nothing
    recent = np.ascontiguousarray(values[-max(method.most, 10 * season) :], dtype=np.float64)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = np.asarray(method.make(models, season).forecast(y=recent, h=horizon)["mean"], np.float64)
    except Exception:  # each fails in its own way on series that are constant, short or extreme
        return nothing
    # An unstable fit can explode.
    far = 1e3 * (np.ptp(recent) + abs(recent[-1]))
    return found if found.shape == (horizon,) and (np.abs(found) <= far).all() else nothing


def rolling_origins(rows: int, horizon: int, season: int, middle: int, last: int) -> list[int]:
    """Return origins in ascending order: up to 8 in the last `last` rows, the test part, and 12 before it.

    Their spacing is half a horizon, or more if that spreads them over the part.
    """
    start = rows - last
    least = max(2 * season + 5, horizon, rows // 4)
    found: set[int] = set()
    for end, part, most in ((rows, last, _TESTED), (start, middle, _EARLIER)):
        stride = max(1, horizon // 2, (part - horizon) // (_TESTED - 1))
        first = start if end == rows else least
        found.update(origin for origin in range(end - horizon, first - 1, -stride)[:most])
    return sorted(found)


@dataclass
class Rolling:
    """The forecasts of one target from all origins."""

    origins: Array  # ascending
    truth: Array  # [origins, horizon]
    predicted: dict[str, Array] = field(default_factory=dict)  # by method, NaN where it has no forecast

    def before(self, origin: int, most: int) -> Array:
        """Return the indices of the last origins whose rows were all known at `origin`."""
        known: Array = np.flatnonzero(self.origins + self.truth.shape[1] <= origin)
        return known[-most:]

    def weights(self, origin: int) -> dict[str, float]:
        """Return the weights of the methods for a forecast from `origin`."""
        known = self.before(origin, _VALIDATED)
        return weigh({key: rows[known] for key, rows in self.predicted.items()}, self.truth[known])

    def combined(self, weights: Mapping[str, float]) -> Array:
        """Return the weighted forecast from each origin, ``[origins, horizon]``, NaN where a method has none."""
        return np.asarray(sum(weight * self.predicted[key] for key, weight in weights.items()))

    def chosen(self) -> Array:
        """Return the forecast from each origin with the weights that its own past gives, ``[origins, horizon]``."""
        found = np.full(self.truth.shape, np.nan)
        for at, origin in enumerate(self.origins):
            weights = self.weights(int(origin))
            part = sum(weight * self.predicted[key][at] for key, weight in weights.items())
            found[at] = part
        return found

    def band(self, predicted: Array, origin: int) -> Array:
        """Return the half width of the 80 % band of a forecast from `origin`, ``[horizon]``, from errors before it."""
        known = self.before(origin, _BANDED)
        errors = (predicted - self.truth)[known]
        return band(errors[np.isfinite(errors).all(axis=1)])


def weigh(predicted: Mapping[str, Array], truth: Array) -> dict[str, float]:
    """Return the weights of methods, from their forecasts and the truth, ``[origins, horizon]`` each.

    AutoETS has the weight 1 as far as the gain of the others may be chance. First the methods of statsforecast are
    weighted, then those that are learned, which have forecasts from fewer origins, against that combination.
    """
    usable = [key for key in METHODS if key in predicted and np.isfinite(predicted[key]).all()]
    if not usable:
        return {"naive": 1.0}
    first = next((key for key in ("ets", "mstl", "theta", "seasonal", "naive") if key in usable), usable[0])
    weights = _shrunk({key: predicted[key] for key in usable}, truth, first)
    learned = [key for key in LEARNED if key in predicted]
    rows = np.ones(len(truth), bool)
    for key in learned:
        rows &= np.isfinite(predicted[key]).all(axis=1)
    if learned and rows.sum() >= _LEAST:
        combined = sum(weight * predicted[key] for key, weight in weights.items())
        candidates = {CHOSEN: np.asarray(combined)[rows], **{key: predicted[key][rows] for key in learned}}
        outer = _shrunk(candidates, truth[rows], CHOSEN)
        share = outer.pop(CHOSEN, 0.0)
        weights = {key: share * weight for key, weight in weights.items()} | outer
    kept = {key: weight for key, weight in weights.items() if weight >= _SMALLEST}
    total = sum(kept.values())
    return {key: weight / total for key, weight in sorted(kept.items(), key=lambda item: -item[1])}


def _shrunk(predicted: Mapping[str, Array], truth: Array, first: str) -> dict[str, float]:
    """Weight by 1 / MAE^4, then towards `first` by how uncertain the gain over it is: by (standard error / gain)^2."""
    if len(truth) < _LEAST:
        return {first: 1.0}
    sizes = {key: float(np.abs(rows - truth).mean()) for key, rows in predicted.items()}
    best = min(sizes.values())
    if best == 0:
        raw = {key: float(size == 0) for key, size in sizes.items()}
    else:
        raw = {key: (best / size) ** _POWER for key, size in sizes.items()}
    total = sum(raw.values())
    raw = {key: weight / total for key, weight in raw.items()}
    combined = np.asarray(sum(weight * predicted[key] for key, weight in raw.items()))
    gains = (np.abs(predicted[first] - truth) - np.abs(combined - truth)).mean(axis=1)
    # Neighbours share half of their rows, which doubles the variance of the mean.
    gain, variance = float(gains.mean()), 2 * float(gains.var(ddof=1)) / len(gains)
    share = max(0.0, 1 - variance / gain**2) if gain > 0 else 0.0
    weights = {key: share * weight for key, weight in raw.items()}
    weights[first] += 1 - share
    return weights


def band(errors: Array) -> Array:
    """Return the half width of an 80 % conformal band per step, ``[horizon]``, from errors ``[origins, horizon]``.

    Of n errors of a step it is the one of rank ceil(0.8 (n + 1)). With fewer than 4, for which there is no such rank,
    all steps share the largest error.
    """
    sizes = np.abs(errors)
    count = len(sizes)
    if count < _LEAST:
        return np.full(errors.shape[1], sizes.max() if count else 0.0)
    rank = min(int(np.ceil(_COVERAGE * (count + 1))), count)
    found: Array = np.sort(sizes, axis=0)[rank - 1]
    return found


def jobs(origins: Sequence[int], season: int) -> Iterator[tuple[str, int]]:
    """Yield what there is to fit: each method that fits the season, and the origins."""
    for key, method in METHODS.items():
        if method.seasons[0] <= season <= method.seasons[1]:
            for origin in origins:
                yield key, origin
