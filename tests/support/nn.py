"""Small modules and models, and their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd import graph, nn

Array = npt.NDArray[Any]


def random(*shape: int, seed: int = 0, dtype: npt.DTypeLike = np.float64) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Scale(nn.Module):
    """A layer of one's own, as short as it can be."""

    def __init__(self, features: int) -> None:
        self.w = nn.Parameter(np.full(features, 2.0))

    def forward(self, x: Any) -> Any:
        return self.w * x


class Halve(nn.Module):
    def forward(self, x: Any) -> Any:
        return x / 2.0


def model(dtype: npt.DTypeLike = np.float32, seed: int = 0) -> nn.Sequential:
    rng = np.random.default_rng(seed)
    return nn.Sequential(
        embedding=nn.Embedding(7, 4, dtype=dtype, rng=rng),
        lstm=nn.LSTM(4, 3, layers=2, bidirectional=True, dropout=0.2, dtype=dtype, rng=rng),
        norm=nn.LayerNorm(6, dtype=dtype),
        head=nn.Linear(6, 5, dtype=dtype, rng=rng),
    )


class Passes(nn.Module):
    """A layer whose input is a parameter too, so that its gradient can be had; the loss is the sum of ``y * dy``."""

    def __init__(self, layer: nn.Module, x: Array, **keywords: Any) -> None:
        self.layer, self.keywords = layer, keywords
        if np.asarray(x).dtype.kind == "f":
            self.x = nn.Parameter(x)
        else:
            self.indices = x

    def forward(self, dy: Any) -> Any:
        x = self.x if "x" in self._variables else self.indices
        y = self.layer(graph.identity(x) if isinstance(x, nn.Parameter) else x, **self.keywords)
        return graph.sum(y * dy), y


def passes(layer: nn.Module, x: Array, dy: Array, **keywords: Any) -> tuple[Array, dict[str, Array]]:
    """The result of a layer in the mode that it is in, and the gradients of its parameters and of "x"."""
    both = Passes(layer, x, **keywords)
    step = nn.compile(both, None, nn.SGD(both, 0.0))
    (_, y), gradients = step.gradients(dy)
    return y, {name.removeprefix("layer."): gradient for name, gradient in gradients.items()}


def assert_differences(step: nn.Step, *arguments: Any, rtol: float = 1e-6, **keywords: Any) -> None:
    """The gradients of a step in float64 are the differences of its loss, along a random direction in each parameter.

    Truncation is of the order step^2 = 1e-10, rounding of the losses 1e-16 / step = 1e-11.
    """

    def loss() -> float:
        found = step.gradients(*arguments, **keywords)[0]
        return float(found[0] if isinstance(found, tuple) else found)

    _, gradients = step.gradients(*arguments, **keywords)
    size = 1e-5
    parameters = step.model.parameters()
    assert gradients
    for name, gradient in gradients.items():
        array = parameters[name].value
        assert array.dtype == np.float64
        direction = random(*array.shape, seed=17)
        kept = array.copy()
        array += size * direction
        above = loss()
        array[...] = kept - size * direction
        below = loss()
        array[...] = kept
        found = (gradient * direction).sum()
        np.testing.assert_allclose(found, (above - below) / (2 * size), rtol=rtol, atol=1e-9, err_msg=name)
