"""A minLSTM in a few lines: two gates of the input alone, normalized, and one linear recurrence. It learns flip-flops.

    f = sigmoid(x Wf + bf),  i = sigmoid(x Wi + bi),  F = f / (f + i),  h[t] = F[t] * h[t-1] + (1 - F[t]) * (x Wn + bn)

The recurrence is `graph.scan`; see docs/scan.md. F is computed as sigmoid(softplus(-i') - softplus(-f')) of the gates
f' and i' before their sigmoid, which is exact where both are very small and f / (f + i) would be 0 / 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retrograd import graph, nn


class MinLSTM(nn.Module):
    """x [T, N, inputs] to h [T, N, units]."""

    def __init__(self, inputs: int, units: int, rng: np.random.Generator) -> None:
        self.forget = nn.Linear(inputs, units, rng=rng)
        self.take = nn.Linear(inputs, units, rng=rng)
        self.candidate = nn.Linear(inputs, units, rng=rng)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        keep = graph.sigmoid(graph.softplus(-self.take(x)) - graph.softplus(-self.forget(x)))
        return graph.scan(keep, (1 - keep) * self.candidate(x)).y


def sequences(count: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Three switches over 100 steps: an input of 1 or -1 sets one, 0 leaves it; the target is where each one stands."""
    x = rng.choice([-1.0, 0.0, 1.0], (100, count, 3), p=[0.05, 0.9, 0.05]).astype(np.float32)
    x[0] = rng.choice([-1.0, 1.0], (count, 3))
    last = np.maximum.accumulate(np.where(x != 0, np.arange(100)[:, None, None], 0), axis=0)
    return x, np.take_along_axis(x, last, axis=0)


def main() -> None:
    rng = np.random.default_rng(0)
    # The gates open for both signs of an input: a hidden layer before the cell finds its magnitude.
    model = nn.Sequential(nn.Linear(3, 24, rng=rng), nn.ReLU(), MinLSTM(24, 24, rng), nn.Linear(24, 3, rng=rng))
    step = nn.compile(model, nn.MeanSquaredError(), nn.Adam(model, nn.Cosine(2e-2, 301)))
    for i in range(301):
        loss = step(*sequences(64, rng))
        if i % 60 == 0:
            print(f"step {i:3d}  loss {loss:.4f}")
    x, targets = sequences(200, rng)
    right = np.sign(model.predict(x)) == targets
    print(f"200 new sequences: {right.mean():.1%} of {right.size} switches correct")


if __name__ == "__main__":
    main()
