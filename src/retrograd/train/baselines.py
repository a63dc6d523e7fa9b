"""Baselines: predictors without a network, which a trained model has to beat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from .task import Array

__all__ = ["NGRAMS", "Ngram", "count_ngrams", "ngram_bits"]

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
