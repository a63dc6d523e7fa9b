"""Classify sequences of different lengths: noisy rhythms with four different periods.

A batch is padded to its longest sequence, and `lengths` gives the length of each. Steps beyond the end of a sequence
are not computed. With `last=True` the LSTM returns the output of each direction's last real step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd import nn

RHYTHMS = (3, 4, 5, 7)


def batch(rng: np.random.Generator, samples: int) -> tuple[npt.NDArray[Any], ...]:
    """Beats at every third, fourth, fifth or seventh step from a random start, in noise; lengths from 15 to 60."""
    lengths, labels = rng.integers(15, 61, samples), rng.integers(0, len(RHYTHMS), samples)
    time = np.arange(60)[:, None]
    beat = (time + rng.integers(0, 7, samples)) % np.take(RHYTHMS, labels) == 0
    x = beat + rng.normal(0, 0.3, beat.shape)
    x[time >= lengths] = np.nan  # padding is never read
    return x[:, :, None].astype(np.float32), lengths, labels


def main() -> None:
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.LSTM(1, 32, bidirectional=True, last=True, rng=rng), nn.LayerNorm(64), nn.Linear(64, len(RHYTHMS), rng=rng)
    )
    optimizer = nn.AdamW(model, nn.Cosine(1e-2, 1001, warm_up=20), maximum_norm=1.0)
    step = nn.compile(model, nn.SoftmaxCrossEntropy(), optimizer)
    for i in range(1001):
        x, lengths, labels = batch(rng, 64)
        loss = step(x, labels, lengths=lengths)
        if i % 200 == 0:
            print(f"step {i:4d}  loss {loss:.3f}")

    x, lengths, labels = batch(rng, 1000)
    correct = model.predict(x, lengths=lengths).argmax(axis=1) == labels
    for name, which in (("shorter than 30", lengths < 30), ("longer", lengths >= 30)):
        print(f"{name}: {np.mean(correct[which]):.1%} of {np.sum(which)} correct")


if __name__ == "__main__":
    main()
