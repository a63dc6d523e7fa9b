"""Detect the season of a series from its autocorrelation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .task import Array

__all__ = ["find_season"]


def find_season(values: Array, likely: Sequence[int] = ()) -> int:
    """Return the period of a series in rows, 1 if it has none. `likely` has the calendar periods.

    A random walk drifts and returns, and so looks periodic. Its differences over d rows do not, at lags above d. So
    each lag is tested with the autocorrelation of differences over a quarter to an eighth of it.
    """
    rows = len(values)
    longest = min(rows // 3, 1000)
    season, best, gap = 1, 0.0, 1
    while 4 * gap <= longest or gap == 1:
        correlation = _autocorrelation(values[gap:] - values[:-gap], min(8 * gap + 2, longest + 2, rows - gap))
        # Bartlett: the standard error of the autocorrelation of differences of white noise, or of a random walk.
        lags = np.arange(1, len(correlation) - 1)
        noise = np.sqrt(max(1.5, 2 * gap / 3) / (rows - gap - lags))
        expected = np.array([any(abs(calendar - lag) <= 0.05 * lag for calendar in likely) for lag in lags], bool)
        least = np.maximum(0.3, np.where(expected, 2, 3) * noise)
        here, before, after = correlation[1:-1], correlation[:-2], correlation[2:]
        peaks = lags[(here >= before) & (here >= after) & (here > least) & (lags > gap)]
        candidates = peaks[peaks >= (2 if gap == 1 else 4 * gap)]
        if candidates.size and correlation[candidates].max() > best + 0.1:  # a smaller gain may be a multiple
            best = float(correlation[candidates].max())
            # Multiples of the period correlate as well; take the shortest.
            season = _top(correlation, int(peaks[correlation[peaks] >= 0.9 * best][0]))
        gap *= 2
    for calendar in likely:
        if abs(calendar - season) <= 0.05 * season:
            return calendar
    return season


def _top(correlation: Array, peak: int) -> int:
    """Return the maximum of a parabola fitted to a broad peak, because noise shifts its highest point."""
    reach = min(peak // 8, len(correlation) - 1 - peak)
    if reach < 2:
        return peak
    lags = np.arange(-reach, reach + 1)
    curvature, slope, _ = np.polyfit(lags, correlation[peak - reach : peak + reach + 1], 2)
    return peak + round(float(np.clip(-slope / (2 * curvature), -reach, reach))) if curvature < 0 else peak


def _autocorrelation(values: Array, lags: int) -> Array:
    """Return the autocorrelation at lags 0 to lags - 1, each over the rows that overlap."""
    values = values - values.mean()
    size = 2 ** math.ceil(math.log2(max(2 * len(values), 2)))
    spectrum = np.fft.rfft(values, size)
    sums = np.fft.irfft(spectrum * spectrum.conj(), size)[:lags]
    each = sums / (len(values) - np.arange(lags))
    return each / each[0] if each[0] > 0 else np.zeros(lags)
