"""Classify sequences of different lengths: noisy rhythms with four different periods.

A batch is padded to its longest sequence, and `lengths` gives the length of each. Steps beyond the end of a sequence
are not computed: y is 0 there, and each direction's final state is that of its last real step.
"""

from __future__ import annotations

import numpy as np

from retrograd import nn

RHYTHMS = (3, 4, 5, 7)


class RhythmClassifier(nn.Module):
    def __init__(self, hidden: int, rng: np.random.Generator) -> None:
        self.lstm = nn.LSTM(1, hidden, bidirectional=True, rng=rng)
        self.norm = nn.LayerNorm(2 * hidden)
        self.head = nn.Linear(2 * hidden, len(RHYTHMS), rng=rng)

    def forward(self, x, lengths):
        self.lstm.forward(x, lengths=lengths)
        forth, back = self.lstm.state.h  # [2, N, H]: the final states of both directions
        return self.head.forward(self.norm.forward(np.concatenate([forth, back], axis=1)))

    def backward(self, dlogits):
        ends = self.norm.backward(self.head.backward(dlogits))
        dh = np.stack(np.split(ends, 2, axis=1))
        self.lstm.backward(None, (dh, None), need_dx=False)


def batch(rng: np.random.Generator, samples: int):
    """Beats at every third, fourth, fifth or seventh step from a random start, in noise; lengths from 15 to 60."""
    lengths, labels = rng.integers(15, 61, samples), rng.integers(0, len(RHYTHMS), samples)
    time = np.arange(60)[:, None]
    beat = (time + rng.integers(0, 7, samples)) % np.take(RHYTHMS, labels) == 0
    x = beat + rng.normal(0, 0.3, beat.shape)
    x[time >= lengths] = np.nan  # padding is never read
    return x[:, :, None].astype(np.float32), lengths, labels


def main() -> None:
    rng = np.random.default_rng(0)
    model, loss = RhythmClassifier(32, rng), nn.SoftmaxCrossEntropy()
    optimizer = nn.AdamW(model, nn.Cosine(1e-2, 1001, warm_up=20), maximum_norm=1.0)
    for step in range(1001):
        x, lengths, labels = batch(rng, 64)
        value = loss.forward(model.forward(x, lengths), labels)
        model.backward(loss.backward())
        optimizer.step()
        if step % 200 == 0:
            print(f"step {step:4d}  loss {value:.3f}")

    model.eval()
    x, lengths, labels = batch(rng, 1000)
    correct = model.forward(x, lengths).argmax(axis=1) == labels
    for name, which in (("shorter than 30", lengths < 30), ("longer", lengths >= 30)):
        print(f"{name}: {np.mean(correct[which]):.1%} of {np.sum(which)} correct")


if __name__ == "__main__":
    main()
