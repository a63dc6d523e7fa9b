"""The oracle of linear layers, embeddings and losses against finite differences and PyTorch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd.lab import reference

Array = npt.NDArray[Any]


def slope_along(f: Callable[[Array], Any], x: Array, direction: Array, step: float = 1e-4) -> float:
    """The directional derivative by differences of the fourth order."""
    near, far = (float(f(x + h * direction) - f(x - h * direction)) for h in (step, 2 * step))
    return (8 * near - far) / (12 * step)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 6), (0, 3)])
def test_linear_backward_by_differences(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    x, w, b = rng.standard_normal(shape), rng.standard_normal((7, shape[-1])), rng.standard_normal(7)
    dy = rng.standard_normal((*shape[:-1], 7))
    dx, dw, db = reference.linear_backward(dy, x, w)

    def loss(x: Array, w: Array, b: Array) -> Any:
        return (reference.linear_forward(x, w, b) * dy).sum()

    for gradient, at, f in (
        (dx, x, lambda v: loss(v, w, b)),
        (dw, w, lambda v: loss(x, v, b)),
        (db, b, lambda v: loss(x, w, v)),
    ):
        direction = rng.standard_normal(at.shape)
        assert float((gradient * direction).sum()) == pytest.approx(slope_along(f, at, direction), rel=1e-9, abs=1e-9)


def test_embedding_backward_by_differences() -> None:
    rng = np.random.default_rng(0)
    indices, table = rng.integers(0, 5, (4, 3)), rng.standard_normal((5, 6))
    dy, direction = rng.standard_normal((4, 3, 6)), rng.standard_normal((5, 6))
    gradient = reference.embedding_backward(dy, indices, 5)
    difference = slope_along(lambda t: (t[indices] * dy).sum(), table, direction)
    assert float((gradient * direction).sum()) == pytest.approx(difference, rel=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_by_differences_and_torch(smoothing: float, torch: Any) -> None:
    rng = np.random.default_rng(1)
    logits, labels = 3 * rng.standard_normal((5, 4, 9)), rng.integers(0, 9, (5, 4))
    labels[0, 1] = labels[3, 2] = -7
    losses, gradient = reference.softmax_cross_entropy(logits, labels, ignore_index=-7, label_smoothing=smoothing)
    direction = rng.standard_normal(logits.shape)

    def loss(v: Array) -> Any:
        return reference.softmax_cross_entropy(v, labels, ignore_index=-7, label_smoothing=smoothing)[0].sum()

    assert float((gradient * direction).sum()) == pytest.approx(slope_along(loss, logits, direction), rel=1e-8)
    theirs = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits.reshape(20, 9)),
        torch.from_numpy(labels.reshape(20)),
        ignore_index=-7,
        label_smoothing=smoothing,
        reduction="none",
    )
    np.testing.assert_allclose(np.asarray(losses, float).reshape(20), theirs.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("delta", [None, 0.3, 1.0])
def test_difference_losses_by_differences_and_torch(delta: float | None, torch: Any) -> None:
    rng = np.random.default_rng(2)
    y, target = rng.standard_normal((2, 50))
    functional = torch.nn.functional

    def both(v: Array) -> tuple[Array, Array]:
        if delta is None:
            return reference.mean_squared_error(v, target)
        return reference.huber(v, target, delta=delta)

    losses, gradient = both(y)
    direction = rng.standard_normal(y.shape)
    difference = slope_along(lambda v: both(v)[0].sum(), y, direction)
    assert float((gradient * direction).sum()) == pytest.approx(difference, rel=1e-9)
    arrays = torch.from_numpy(y), torch.from_numpy(target)
    if delta is None:
        theirs = functional.mse_loss(*arrays, reduction="none")
    else:
        theirs = functional.huber_loss(*arrays, reduction="none", delta=delta)
    np.testing.assert_allclose(np.asarray(losses, float), theirs.numpy(), rtol=1e-12)


def test_dropout_mask_has_the_share_and_mean_that_it_should() -> None:
    mask = reference.dropout_mask(11, (300, 700), 0.3)
    assert mask.shape == (300, 700)
    assert set(np.unique(mask)) == {0.0, 1 / 0.7}
    assert abs((mask == 0).mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / mask.size)
    # Each element by itself: a longer array begins alike.
    np.testing.assert_array_equal(reference.dropout_mask(11, (9000,), 0.3), mask.reshape(-1)[:9000])
    assert (reference.dropout_mask(12, (300, 700), 0.3) != mask).any()
