"""A custom layer in retrograd.nn: check its gradients, then train it.

The layer is a highway connection: a learned gate decides, for each feature, how much of x passes unchanged and how much
goes through a network. Both are child layers; forward and backward combine them.
"""

from __future__ import annotations

import numpy as np

import retrograd as rg
from retrograd import nn


class Highway(nn.Module):
    """y = gate * inner(x) + (1 - gate) * x, where gate = sigmoid(W x + b)."""

    def __init__(self, features: int, inner: nn.Module, rng: np.random.Generator, dtype=np.float32) -> None:
        self.inner = inner
        self.choose = nn.Linear(features, features, rng=rng, dtype=dtype)
        self.choose.b[...] = -1.0  # initially most of x passes unchanged

    def forward(self, x):
        gate = rg.activation_forward(self.choose.forward(x), "sigmoid")
        inside = self.inner.forward(x)
        self.keep(x=x, gate=gate, inside=inside)
        return gate * inside + (1 - gate) * x

    def backward(self, dy, *, accumulate=False, need_dx=True):
        x, gate, inside = (self.kept(name) for name in ("x", "gate", "inside"))
        dchoice = dy * (inside - x) * gate * (1 - gate)
        dx = self.inner.backward(dy * gate, accumulate=accumulate).copy()
        dx += self.choose.backward(dchoice, accumulate=accumulate)
        dx += dy * (1 - gate)
        return dx


def network(rng: np.random.Generator, dtype=np.float32) -> nn.Sequential:
    def inner() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16, rng=rng, dtype=dtype), nn.Activation("tanh"))

    return nn.Sequential(
        nn.Linear(2, 16, rng=rng, dtype=dtype),
        *(Highway(16, inner(), rng, dtype) for _ in range(4)),
        nn.Linear(16, 2, rng=rng, dtype=dtype),
    )


def worst_gradient_error(rng: np.random.Generator) -> float:
    """Compare each gradient with finite differences in float64, along one random direction per parameter."""
    model, loss = network(rng, np.float64), nn.SoftmaxCrossEntropy()
    x, labels = rng.standard_normal((9, 2)), rng.integers(0, 2, 9)
    loss.forward(model.forward(x), labels)
    model.backward(loss.backward())
    gradients = {name: gradient.copy() for name, gradient in model.gradients().items()}
    worst = 0.0
    for name, parameter in model.parameters().items():
        before, direction, h = parameter.copy(), rng.standard_normal(parameter.shape), 1e-5
        losses = []
        for side in (h, -h):
            parameter[...] = before + side * direction
            losses.append(loss.forward(model.forward(x), labels, want_gradient=False))
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
    x = (turn * np.stack([np.cos(angle), np.sin(angle)]) / 5 + rng.normal(0, 0.03, (2, 1000))).T.astype(np.float32)

    model, loss = network(rng), nn.SoftmaxCrossEntropy()
    optimizer = nn.AdamW(model, nn.Cosine(1e-2, 201, warm_up=20))
    for step in range(201):
        logits = model.forward(x)
        value = loss.forward(logits, labels)
        if step % 40 == 0:
            accuracy = np.mean(logits.argmax(axis=1) == labels)
            print(f"step {step:3d}  loss {value:.3f}  {accuracy:.0%} of the points classified correctly")
        model.backward(loss.backward())
        optimizer.step()


if __name__ == "__main__":
    main()
