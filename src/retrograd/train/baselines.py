"""Baselines: simple predictors that a trained model should beat."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

import retrograd as rg

from .task import Array
from .windows import Windows, chunks, spread

__all__ = [
    "FORECASTS",
    "NGRAMS",
    "LinearFit",
    "Ngram",
    "count_ngrams",
    "fit_linear",
    "naive",
    "ngram_bits",
    "nonzero",
    "relative_error",
    "seasonal_naive",
]

# ---- text ------------------------------------------------------------------------------------------------------------


class Ngram(NamedTuple):
    predictor: str  # its name in a table
    counted: str  # its name in a sentence


#: The n-gram models of text, by the number of context symbols.
NGRAMS: Final = (
    Ngram("unigram: symbol frequencies", "unigram counts"),
    Ngram("bigram: given the previous symbol", "bigram counts"),
    Ngram("trigram: given the previous two symbols", "trigram counts"),
)

_MOST_COUNTS: Final = 1 << 24  # per table: 64 MB
_PRIOR_WEIGHT: Final = 5  # pseudo-counts


def count_ngrams(symbols: int, texts: Iterable[Array]) -> list[Array]:
    """Count the n-grams of texts: ``[symbols ** n]`` for each n of `NGRAMS` whose table is small enough.

    Texts are sequences of symbol indices. An n-gram across the end of a text is not counted.
    """
    sizes = [symbols ** (order + 1) for order in range(len(NGRAMS))]
    counts: list[Array] = [np.zeros(size, np.int32) for size in sizes if size <= _MOST_COUNTS]
    for text in texts:
        ngrams = text.astype(np.int64)
        for order, table in enumerate(counts):
            if order:
                ngrams = ngrams[:-1] * symbols + text[order:]
            np.add.at(table, ngrams, 1)
    return counts


def ngram_bits(counts: Sequence[Array], held_out: Iterable[tuple[Array, Array]]) -> list[float]:
    """Return the bits per symbol of held-out text for each table of `count_ngrams`.

    `held_out` has chunks of text, ``tokens [T, N]`` and the ``labels [T, N]`` that follow them. An n-gram model is
    smoothed with the (n - 1)-gram model, and the unigram model with the uniform distribution:

        p_n(label | context) = (count(context, label) + 5 p_{n-1}(label)) / (count(context) + 5)
    """
    symbols = len(counts[0])
    bits, predicted = np.zeros(len(counts)), 0
    for tokens, labels in held_out:
        # The symbol before a chunk is not known; its first token is used instead.
        contexts = np.zeros_like(tokens), tokens, np.concatenate([tokens[:1], tokens[:-1]]) * symbols + tokens
        probability = np.full(labels.shape, 1 / symbols)
        for order, (table, context) in enumerate(zip(counts, contexts, strict=False)):
            total = counts[order - 1][context] if order else counts[0].sum()
            probability = (table[context * symbols + labels] + _PRIOR_WEIGHT * probability) / (total + _PRIOR_WEIGHT)
            bits[order] -= np.log2(probability).sum()
        predicted += labels.size
    return [float(value) / predicted for value in bits]


# ---- series ----------------------------------------------------------------------------------------------------------

#: The names of the baselines, by their keys in settings and saved models.
FORECASTS: Final = {"last": "naive", "season": "seasonal naive", "linear": "linear"}

_MOST_FITTED: Final = 10_000  # windows
_MOST_FEATURES: Final = 1_000


def naive(windows: Windows, origins: Array) -> Array:
    """Repeat the last value, ``[N, horizon, targets]``."""
    return windows.targets_at(origins, np.zeros(windows.horizon, np.intp))


def seasonal_naive(windows: Windows, origins: Array) -> Array:
    """Repeat the last season, ``[N, horizon, targets]``."""
    ahead = np.arange(1, windows.horizon + 1)
    return windows.targets_at(origins, ahead - windows.season * -(-ahead // windows.season))


@dataclass(frozen=True)
class LinearFit:
    """Ridge regression from the last `lags` rows of all columns to the differences of the targets from the last row."""

    slope: Array  # [horizon * targets, lags * columns], the w of rg.linear_forward
    start: Array  # [horizon * targets], the b
    shrink: float  # the ridge penalty
    lags: int

    def forecast(self, windows: Windows, origins: Array) -> Array:
        """Return the forecast, ``[N, horizon, targets]``."""
        last = naive(windows, origins)
        # The engine's results are bitwise identical at any thread count.
        parts = [rg.linear_forward(windows.lagged(part, self.lags), self.slope, self.start) for part in chunks(origins)]
        differences: Array = np.concatenate(parts).reshape(last.shape)
        return last + differences


def fit_linear(windows: Windows, training: Array, validation: Array) -> LinearFit:
    """Fit on the training origins; the validation origins select the ridge penalty.

    If the window is too large to solve in seconds, only its last rows are used.
    """
    columns, targets = windows.scaled.shape[1], windows.targets.shape[1]
    lags = min(windows.window, max(1, _MOST_FEATURES // columns))
    features = lags * columns
    training = spread(training, _MOST_FITTED)
    count = len(training)
    sums = np.zeros(features + windows.horizon * targets)
    products = np.zeros((features, len(sums)))
    for part in chunks(training):
        differences = (windows.truth(part) - naive(windows, part)).reshape(len(part), -1)
        both = np.concatenate([windows.lagged(part, lags), differences], axis=1)
        sums += both.sum(axis=0)
        products += both[:, :features].T @ both
    mean = sums / count
    products -= count * np.outer(mean[:features], mean)
    # With an eigendecomposition each penalty costs two products instead of a solve.
    eigenvalues, vectors = np.linalg.eigh(products[:, :features])
    projected = vectors.T @ products[:, features:]
    best, least = None, math.inf
    for share in (1e-6, 1e-4, 1e-2, 1.0):  # relative to the sum of squares of a scaled column
        shrink = share * count
        slope = vectors @ (projected / (np.maximum(eigenvalues, 0) + shrink)[:, None])
        fit = LinearFit(np.ascontiguousarray(slope.T), mean[features:] - mean[:features] @ slope, shrink, lags)
        error = relative_error(fit.forecast(windows, validation), windows, validation)
        if error < least:
            best, least = fit, error
    assert best is not None
    return best


def relative_error(predicted: Array, windows: Windows, origins: Array) -> float:
    """Return MAE / naive MAE, averaged over targets."""
    truth = windows.truth(origins)
    unit = nonzero(np.abs(naive(windows, origins) - truth).mean(axis=(0, 1)))
    return float((np.abs(predicted - truth).mean(axis=(0, 1)) / unit).mean())


def nonzero(values: Array) -> Array:
    """Return the values with 1 in place of 0, as divisors."""
    return np.where(values > 0, values, 1.0)
