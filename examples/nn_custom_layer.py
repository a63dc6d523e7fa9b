"""A custom layer in retrograd.nn: `forward` alone. Check its gradients, then train it.

The layer is a highway connection: a learned gate decides, for each feature, how much of x passes unchanged and how much
goes through a network. Gradients follow from `forward`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retrograd import graph, nn


class Highway(nn.Module):
    """y = gate * inner(x) + (1 - gate) * x, where gate = sigmoid(w x + b), for each feature."""

    def __init__(self, features: int, inner: nn.Sequential, dtype: npt.DTypeLike = np.float32) -> None:
        self.inner = inner
        self.w = nn.Parameter(np.zeros(features, dtype))
        self.b = nn.Parameter(np.full(features, -1.0, dtype))  # initially most of x passes unchanged

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        gate = graph.sigmoid(self.w * x + self.b)
        return gate * self.inner(x) + (1 - gate) * x


def network(rng: np.random.Generator, dtype: npt.DTypeLike = np.float32) -> nn.Sequential:
    def inner() -> nn.Sequential:
        return nn.Sequential(nn.Linear(16, 16, rng=rng, dtype=dtype), nn.Tanh())

    return nn.Sequential(
        nn.Linear(2, 16, rng=rng, dtype=dtype),
        *(Highway(16, inner(), dtype) for _ in range(4)),
        nn.Linear(16, 2, rng=rng, dtype=dtype),
    )


def worst_gradient_error(rng: np.random.Generator) -> float:
    """Compare each gradient with finite differences in float64, along one random direction per parameter."""
    model = network(rng, np.float64)
    step = nn.compile(model, nn.SoftmaxCrossEntropy(), nn.SGD(model, 0.1))
    x, labels = rng.standard_normal((9, 2)), rng.integers(0, 2, 9)
    _, gradients = step.gradients(x, labels)
    worst = 0.0
    for name, parameter in model.parameters().items():
        before, direction, h = parameter.value.copy(), rng.standard_normal(parameter.shape), 1e-5
        losses = []
        for side in (h, -h):
            parameter[...] = before + side * direction
            losses.append(step.evaluate(x, labels))
        parameter[...] = before
        quotient, exact = (losses[0] - losses[1]) / (2 * h), np.sum(gradients[name] * direction)
        worst = max(worst, abs(quotient - exact) / max(abs(exact), 1e-3))
    return worst


def main() -> None:
    rng = np.random.default_rng(0)
    error = worst_gradient_error(rng)
    print(f"gradients agree with finite differences to {error:.1e}")
    assert error < 1e-5

    # Two spirals, one inside the other.
    turn = rng.uniform(0.5, 3.0, 1000) * np.pi
    labels = rng.integers(0, 2, 1000)
    angle = turn + np.pi * labels
    x = (turn * np.stack([np.cos(angle), np.sin(angle)]) / 5 + rng.normal(0, 0.03, (2, 1000))).T

    model = network(rng)
    optimizer = nn.AdamW(model, nn.Cosine(1e-2, 301, warm_up=20))
    step = nn.compile(model, nn.SoftmaxCrossEntropy(), optimizer, metrics={"accuracy": nn.accuracy})
    for i in range(301):
        loss, scores = step(x, labels)
        if i % 60 == 0:
            print(f"step {i:3d}  loss {loss:.3f}  {scores['accuracy']:.0%} of the points classified correctly")


if __name__ == "__main__":
    main()
