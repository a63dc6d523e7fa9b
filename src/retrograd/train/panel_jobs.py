"""The parts of the work on a panel that run in processes of their own: methods on chunks of series, and networks.

A job is a pure function of its arguments and the series, on one thread, so that the results do not depend on how many
processes share the jobs.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .panel_model import Array, Shape, forecasts, train

__all__ = ["METHODS", "Job", "Method", "run"]

_CHUNK: Final = 60  # series of a job


@dataclass(frozen=True)
class Method:
    """A method of statsforecast: its class, and the most values that it is fitted to (the last ones)."""

    name: str
    most: int
    seasons: int = 24  # the longest season that it can be fitted to in little time


METHODS: Final = {
    "ets": Method("AutoETS", 500, 12),
    "ces": Method("AutoCES", 1500),
    "theta": Method("DynamicOptimizedTheta", 500),
    "optimized_theta": Method("OptimizedTheta", 500),
    "arima": Method("AutoARIMA", 120, 4),
}
_PLAIN: Final = ("naive", "seasonal")  # without a library


@dataclass(frozen=True)
class Job:
    """A method on some series (`ids`), or, with a `shape`, a network on all of them.

    The last values of each series, as many as the greatest of `cuts`, are left out when a network is trained; it then
    forecasts from the end of each series without its last `cut` values, for each of the `cuts`.
    """

    key: str
    cuts: tuple[int, ...]
    ids: tuple[int, ...]
    horizon: int
    season: int
    shape: Shape | None = None
    seed: int = 0

    def __call__(self, series: Sequence[Array]) -> tuple[Array, dict[str, Any]]:
        """Return the forecasts [cuts, ids, horizon], and what a network has learned."""
        chosen = [series[i] for i in self.ids]
        if self.shape is not None:
            cut = max(self.cuts)
            shown = [y[: len(y) - cut] for y in chosen]
            network = train(shown, self.shape, self.seed)
            lengths = [len(y) for y in shown]
            found = [forecasts(network, lengths, [y[: len(y) - c] for y in chosen]) for c in self.cuts]
            return np.stack(found), network.state_dict()
        rows = [[self._forecast(y[: len(y) - cut]) for y in chosen] for cut in self.cuts]
        return np.array(rows), {}

    def _forecast(self, y: Array) -> Array:
        season = self.season if len(y) >= 2 * self.season + 3 else 1
        if self.key == "naive" or (season == 1 and self.key == "seasonal"):
            return np.full(self.horizon, y[-1])
        if self.key == "seasonal":
            return np.asarray(np.resize(y[-season:], self.horizon))
        from statsforecast import models

        method = METHODS[self.key]
        recent = np.ascontiguousarray(y[-max(method.most, 5 * season) :], np.float64)
        nothing = np.full(self.horizon, np.nan)
        if np.ptp(recent) == 0:
            return np.full(self.horizon, recent[-1])
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                fitted = getattr(models, method.name)(season_length=season)
                found = np.asarray(fitted.forecast(y=recent, h=self.horizon)["mean"], np.float64)
        except Exception:  # each fails in its own way on series that are constant, short or extreme
            return nothing
        far = 100 * (np.ptp(recent) + abs(recent[-1]))  # an unstable fit can explode
        return found if np.isfinite(found).all() and (np.abs(found) <= far).all() else nothing


def split(ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Cut series into the parts that jobs forecast."""
    for first in range(0, len(ids), _CHUNK):
        yield tuple(ids[first : first + _CHUNK])


# ---- processes -------------------------------------------------------------------------------------------------------

_series: list[Array] = []


def _begin(series: list[Array]) -> None:
    import signal

    import retrograd as rg

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    rg.set_num_threads(1)
    _series[:] = series


def _work(job: Job) -> tuple[Array, dict[str, Any]]:
    return job(_series)


def run(
    jobs: Sequence[Job],
    series: Sequence[Array],
    processes: int,
    deadline: float,
    done: Callable[[int], None] = lambda number: None,
) -> list[tuple[Array, dict[str, Any]] | None]:
    """Run jobs in their order. Return the results; None for a job that had not begun by the `deadline`."""
    found: list[tuple[Array, dict[str, Any]] | None] = [None] * len(jobs)
    if processes == 1 or len(jobs) == 1:
        for number, job in enumerate(jobs):
            if time.monotonic() < deadline:
                found[number] = job(series)
            done(number + 1)
        return found
    pool = ProcessPoolExecutor(min(processes, len(jobs)), multiprocessing.get_context("spawn"), _begin, (list(series),))
    try:
        waiting: dict[Future[tuple[Array, dict[str, Any]]], int] = {}
        following = iter(enumerate(jobs))
        finished = 0
        more = True
        while more or waiting:
            while more and len(waiting) < processes and time.monotonic() < deadline:
                upcoming = next(following, None)
                if upcoming is None:
                    more = False
                else:
                    waiting[pool.submit(_work, upcoming[1])] = upcoming[0]
            if time.monotonic() >= deadline:
                more = False
            if not waiting:
                break
            ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ended:
                found[waiting.pop(future)] = future.result()
                finished += 1
                done(finished)
        return found
    except BaseException:
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
