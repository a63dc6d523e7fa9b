"""A minGRU in a few lines: gates of the input alone, and one linear recurrence. It learns to recall a marked value.

    z = sigmoid(x Wz + bz),  n = x Wn + bn,  h[t] = (1 - z[t]) * h[t-1] + z[t] * n[t]

The recurrence is `graph.scan`, which computes all steps at memory bandwidth; see docs/scan.md. No logarithms are needed
to keep it stable: the factors 1 - z are between 0 and 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retrograd import graph, nn

STEPS = 100


class MinGRU(nn.Module):
    """x [T, N, inputs] to h [T, N, units]. At first, units remember for 1 to `longest` steps."""

    def __init__(self, inputs: int, units: int, longest: int, rng: np.random.Generator) -> None:
        self.gate = nn.Linear(inputs, units, rng=rng)
        self.gate.b[...] = -np.log(np.linspace(1, longest, units))
        self.candidate = nn.Linear(inputs, units, rng=rng)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        z = graph.sigmoid(self.gate(x))
        return graph.scan(1 - z, z * self.candidate(x)).y


class Recall(nn.Module):
    """The last state as one number."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.cell = MinGRU(2, 32, STEPS, rng)
        self.read = nn.Linear(32, 1, rng=rng)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.read(self.cell(x)[-1])


def sequences(count: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Values with a marker at one of the steps; the target is the marked value."""
    values = rng.uniform(-1, 1, (STEPS, count)).astype(np.float32)
    at = rng.integers(0, STEPS, count)
    marks = np.zeros_like(values)
    marks[at, np.arange(count)] = 1
    return np.stack([values, marks], axis=-1), values[at, np.arange(count)][:, None]


def main() -> None:
    rng = np.random.default_rng(0)
    model = Recall(rng)
    step = nn.compile(model, nn.MeanSquaredError(), nn.Adam(model, nn.Cosine(3e-2, 401)))
    for i in range(401):
        loss = step(*sequences(64, rng))
        if i % 80 == 0:
            print(f"step {i:3d}  loss {loss:.4f}")
    x, targets = sequences(500, rng)
    right = np.abs(model.predict(x) - targets) < 0.1
    print(f"500 new sequences: {right.mean():.1%} recalled within 0.1")


if __name__ == "__main__":
    main()
