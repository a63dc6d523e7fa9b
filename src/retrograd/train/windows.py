"""Windows of a table: the rows up to an origin, which a forecast reads, and the rows after it, which it predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from .task import Array

__all__ = ["Windows", "chunks", "spread"]

_CHUNK: Final = 256  # windows per evaluation batch
_LIMIT: Final = 1e6  # of a scaled input, so that the LSTM does not overflow float32


class Windows:
    """Windows of a table, by their origin, the last known row. They are gathered into reused buffers."""

    def __init__(
        self,
        columns: Mapping[str, Array],
        names: Sequence[str],
        targets: Sequence[str],
        *,
        window: int,
        horizon: int,
        season: int,
        center: Array,
        factor: Array,
        differenced: bool = False,
    ) -> None:
        values = np.stack([columns[name] for name in names], axis=1)
        self.window, self.horizon, self.season = window, horizon, season
        self.differenced = differenced  # whether inputs are differences from the last row of the window
        self.scaled = np.clip((values - center) * factor, -_LIMIT, _LIMIT)
        index = {name: i for i, name in enumerate(names)}
        self.targets = values[:, [index[name] for name in targets]]
        self._single = self.scaled.astype(np.float32)
        self._back = np.arange(1 - window, 1)[:, None]
        self._rows = np.empty((window, 0), np.intp)
        self._x = np.empty((window, 0, len(names)), np.float32)

    def inputs(self, origins: Array) -> Array:
        """Return the network's input, ``[T, N, columns]``. The next call overwrites it."""
        if len(origins) != self._rows.shape[1]:
            self._rows = np.empty((self.window, len(origins)), np.intp)
            self._x = np.empty((self.window, len(origins), self._single.shape[1]), np.float32)
        np.add(self._back, origins, out=self._rows)
        # All rows exist. mode="clip" avoids the buffering that mode="raise" needs with out=.
        np.take(self._single, self._rows, axis=0, out=self._x, mode="clip")
        if self.differenced:
            np.subtract(self._x, self._x[-1:].copy(), out=self._x)
        return self._x

    def lagged(self, origins: Array, lags: int) -> Array:
        """Return the input of the linear regression, ``[N, lags * columns]``."""
        rows: Array = self.scaled[origins[:, None] + np.arange(1 - lags, 1)]
        if self.differenced:
            rows = rows - rows[:, -1:]
        return rows.reshape(len(origins), -1)

    def targets_at(self, origins: Array, steps: Array) -> Array:
        """Return the targets `steps` rows after each origin (before it, if negative), ``[N, steps, targets]``."""
        values: Array = self.targets[origins[:, None] + steps]
        return values

    def truth(self, origins: Array) -> Array:
        """Return the true values of the forecast rows, ``[N, horizon, targets]``."""
        return self.targets_at(origins, np.arange(1, self.horizon + 1))


def chunks(origins: Array) -> list[Array]:
    """Split the origins into evaluation batches."""
    return [origins[first : first + _CHUNK] for first in range(0, len(origins), _CHUNK)]


def spread(origins: Array, most: int) -> Array:
    """Return at most `most` of the origins, evenly spaced."""
    if len(origins) <= most:
        return origins
    some: Array = origins[np.linspace(0, len(origins) - 1, most).round().astype(np.intp)]
    return some
