"""Baselines: predictors without a network, which a trained model has to beat."""

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
    predictor: str  # what it predicts from, as a row of a table
    counted: str  # what it counts, in a sentence


#: The n-gram models of text, by the number of symbols before the predicted one.
NGRAMS: Final = (
    Ngram("frequency of each symbol", "symbols"),
    Ngram("the symbol before", "pairs of symbols"),
    Ngram("the two symbols before", "triples of symbols"),
)

_MOST_COUNTS: Final = 1 << 24  # in a table: 64 MB
_PRIOR_WEIGHT: Final = 5  # in observations


def count_ngrams(symbols: int, texts: Iterable[Array]) -> list[Array]:
    """Counts of the n-grams of texts, ``[symbols ** n]`` for each n of `NGRAMS` whose table is small enough.

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
    """Bits per symbol of held-out text by each table of `count_ngrams`.

    `held_out` has pieces of text, ``tokens [T, N]`` and the ``labels [T, N]`` that follow them. An n-gram model is
    shrunk towards the one of n - 1, and that of single symbols towards equal probabilities:

        p_n(label | context) = (count(context, label) + 5 p_{n-1}(label)) / (count(context) + 5)
    """
    symbols = len(counts[0])
    bits, predicted = np.zeros(len(counts)), 0
    for tokens, labels in held_out:
        # The first token of a piece stands for the unknown one before it, too.
        contexts = np.zeros_like(tokens), tokens, np.concatenate([tokens[:1], tokens[:-1]]) * symbols + tokens
        probability = np.full(labels.shape, 1 / symbols)
        for order, (table, context) in enumerate(zip(counts, contexts, strict=False)):
            total = counts[order - 1][context] if order else counts[0].sum()
            probability = (table[context * symbols + labels] + _PRIOR_WEIGHT * probability) / (total + _PRIOR_WEIGHT)
            bits[order] -= np.log2(probability).sum()
        predicted += labels.size
    return [float(value) / predicted for value in bits]


# ---- series ----------------------------------------------------------------------------------------------------------

#: The names of the forecasts, by the keys that settings and saved models have.
FORECASTS: Final = {"last": "naive", "season": "seasonal naive", "linear": "linear"}

_MOST_FITTED: Final = 10_000  # windows
_MOST_FEATURES: Final = 1_000


def naive(windows: Windows, origins: Array) -> Array:
    """The last value, repeated, ``[N, horizon, targets]``."""
    return windows.targets_at(origins, np.zeros(windows.horizon, np.intp))


def seasonal_naive(windows: Windows, origins: Array) -> Array:
    """The values of the last season, repeated, ``[N, horizon, targets]``."""
    ahead = np.arange(1, windows.horizon + 1)
    return windows.targets_at(origins, ahead - windows.season * -(-ahead // windows.season))


@dataclass(frozen=True)
class LinearFit:
    """Ridge regression from the last `lags` rows of all columns to how far the next targets are from the last ones."""

    slope: Array  # [horizon * targets, lags * columns], as rg.linear_forward has it
    start: Array
    shrink: float  # what was added to the diagonal
    lags: int

    def forecast(self, windows: Windows, origins: Array) -> Array:
        """The forecast, ``[N, horizon, targets]``."""
        last = naive(windows, origins)
        # By the engine, whose bits do not depend on the number of threads.
        parts = [rg.linear_forward(windows.lagged(part, self.lags), self.slope, self.start) for part in chunks(origins)]
        differences: Array = np.concatenate(parts).reshape(last.shape)
        return last + differences


def fit_linear(windows: Windows, training: Array, validation: Array) -> LinearFit:
    """Fit on the origins of the training part; those of the validation part choose the shrinkage.

    If the window is too large for a solution in seconds, only its last rows are read.
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
    # With the eigenvectors each shrinkage costs two products, not a solution.
    sizes, vectors = np.linalg.eigh(products[:, :features])
    turned = vectors.T @ products[:, features:]
    best, least = None, math.inf
    for share in (1e-6, 1e-4, 1e-2, 1.0):  # of the sum of squares that a scaled column has
        shrink = share * count
        slope = vectors @ (turned / (np.maximum(sizes, 0) + shrink)[:, None])
        fit = LinearFit(np.ascontiguousarray(slope.T), mean[features:] - mean[:features] @ slope, shrink, lags)
        error = relative_error(fit.forecast(windows, validation), windows, validation)
        if error < least:
            best, least = fit, error
    assert best is not None
    return best


def relative_error(predicted: Array, windows: Windows, origins: Array) -> float:
    """The mean absolute error over that of the naive forecast, averaged over targets."""
    truth = windows.truth(origins)
    unit = nonzero(np.abs(naive(windows, origins) - truth).mean(axis=(0, 1)))
    return float((np.abs(predicted - truth).mean(axis=(0, 1)) / unit).mean())


def nonzero(values: Array) -> Array:
    """The values as divisors: 1 in place of 0."""
    return np.where(values > 0, values, 1.0)
