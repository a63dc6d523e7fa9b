"""The oracle of the losses: gradients by finite differences, values by PyTorch where it has the same loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd.lab import reference
from support.reference import slope_along

Array = npt.NDArray[Any]
Both = Callable[[Array], tuple[Array, Array]]


def check_gradient(both: Both, y: Array, direction: Array, rel: float = 1e-8) -> None:
    _, gradient = both(y)
    difference = slope_along(lambda v: both(v)[0].sum(), y, direction)
    assert float((gradient * direction).sum()) == pytest.approx(difference, rel=rel)


def draw(seed: int, shape: tuple[int, ...] = (5, 4, 9)) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    return 2 * rng.standard_normal(shape), rng.random(shape), rng.standard_normal(shape)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_soft_cross_entropy_by_differences_and_torch(smoothing: float, torch: Any) -> None:
    logits, targets, direction = draw(1)
    check_gradient(lambda v: reference.soft_cross_entropy(v, targets, label_smoothing=smoothing), logits, direction)
    targets /= targets.sum(-1, keepdims=True)  # PyTorch's smoothing is of probabilities
    losses, _ = reference.soft_cross_entropy(logits, targets, label_smoothing=smoothing)
    theirs = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits.reshape(-1, 9)),
        torch.from_numpy(targets.reshape(-1, 9)),
        label_smoothing=smoothing,
        reduction="none",
    )
    np.testing.assert_allclose(np.asarray(losses, float).reshape(-1), theirs.numpy(), rtol=1e-12)


def test_categorical_cross_entropy_by_differences() -> None:
    logits, targets, direction = draw(2)
    targets[targets < 0.5] = 0
    targets[0, 0] = 0
    check_gradient(lambda v: reference.categorical_cross_entropy(v, targets), logits, direction)
    losses, gradient = reference.categorical_cross_entropy(logits, targets)
    assert losses[0, 0] == 0
    assert not gradient[0, 0].any()
    # BNNS's formula of the gradient, for targets 0 and 1: p - 1/m at the targets, p elsewhere.
    ones = (targets != 0).astype(float)
    ones[0, 0, 3] = 1
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    _, gradient = reference.categorical_cross_entropy(logits, ones)
    documented = probability - np.where(ones != 0, 1 / ones.sum(-1, keepdims=True), 0)
    np.testing.assert_allclose(np.asarray(gradient, float), documented, rtol=1e-12, atol=1e-15)


def test_cosine_distance_by_differences_and_torch(torch: Any) -> None:
    """Along directions that keep the length of y; and as the whole gradient of the cosine."""
    y, target, direction = draw(3)
    y /= np.linalg.norm(y, axis=-1, keepdims=True)
    target /= np.linalg.norm(target, axis=-1, keepdims=True)
    tangent = direction - (direction * y).sum(-1, keepdims=True) * y
    check_gradient(lambda v: reference.cosine_distance(v, target), y, tangent)
    losses, gradient = reference.cosine_distance(y, target)
    tensor = torch.from_numpy(y).requires_grad_()
    theirs = 1 - torch.nn.functional.cosine_similarity(tensor, torch.from_numpy(target), dim=-1)
    theirs.sum().backward()
    np.testing.assert_allclose(np.asarray(losses, float), theirs.detach().numpy(), rtol=1e-10)
    np.testing.assert_allclose(np.asarray(gradient, float), tensor.grad.numpy(), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_sigmoid_cross_entropy_by_differences_and_torch(smoothing: float, torch: Any) -> None:
    logits, target, direction = draw(4)
    check_gradient(lambda v: reference.sigmoid_cross_entropy(v, target, label_smoothing=smoothing), logits, direction)
    losses, _ = reference.sigmoid_cross_entropy(logits, target, label_smoothing=smoothing)
    theirs = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(logits), torch.from_numpy(target * (1 - smoothing) + smoothing / 2), reduction="none"
    )
    np.testing.assert_allclose(np.asarray(losses, float), theirs.numpy(), rtol=1e-12)


@pytest.mark.parametrize("eps", [0.0, 1e-7, 0.1])
def test_log_loss_by_differences_and_torch(eps: float, torch: Any) -> None:
    _, target, direction = draw(5)
    y = np.clip(draw(6)[1], 0.01, 0.99)
    check_gradient(lambda v: reference.log_loss(v, target, eps=eps), y, 1e-3 * direction, 1e-6)
    losses, gradient = reference.log_loss(y, target, eps=0)
    theirs = torch.nn.functional.binary_cross_entropy(torch.from_numpy(y), torch.from_numpy(target), reduction="none")
    np.testing.assert_allclose(np.asarray(losses, float), theirs.numpy(), rtol=1e-12)
    # BNNS's formula of the gradient.
    np.testing.assert_allclose(np.asarray(gradient, float), (y - target) / (y * (1 - y)), rtol=1e-9, atol=1e-12)


def test_absolute_error_by_differences_and_torch(torch: Any) -> None:
    y, target, direction = draw(7)
    check_gradient(lambda v: reference.mean_absolute_error(v, target), y, direction)
    losses, _ = reference.mean_absolute_error(y, target)
    theirs = torch.nn.functional.l1_loss(torch.from_numpy(y), torch.from_numpy(target), reduction="none")
    np.testing.assert_allclose(np.asarray(losses, float), theirs.numpy(), rtol=1e-15)
    _, gradient = reference.mean_absolute_error(y, y, slope_at_zero=0.5)
    assert (gradient == 0.5).all()


def test_hinge_by_differences_and_torch(torch: Any) -> None:
    y, target, direction = draw(8)
    target = np.round(target)
    check_gradient(lambda v: reference.hinge(v, target), y, direction)
    losses, _ = reference.hinge(y, target)
    tensor = torch.from_numpy(y)
    theirs = torch.nn.functional.margin_ranking_loss(
        tensor, torch.zeros_like(tensor), torch.from_numpy(2 * target - 1), margin=1.0, reduction="none"
    )
    np.testing.assert_allclose(np.asarray(losses, float), theirs.numpy(), rtol=1e-15)
    # At the kink the slope is that of the side with a loss.
    np.testing.assert_array_equal(reference.hinge(np.ones(1), np.ones(1))[1], [-1])


def test_reductions() -> None:
    losses, gradient = np.array([[1.0, 2.0], [3.0, 4.0]]), np.ones((2, 2))
    weights = np.array([2.0, 0.0])
    assert reference.reduced_loss(losses, gradient, weights, "sum")[0] == 6
    assert reference.reduced_loss(losses, gradient, weights, "mean")[0] == 6 / 4
    assert reference.reduced_loss(losses, gradient, weights, "weighted_mean")[0] == 6 / 4
    assert reference.reduced_loss(losses, gradient, weights, "nonzero_mean")[0] == 6 / 2
    assert reference.reduced_loss(losses, gradient, 0.5, "weighted_mean")[0] == 5 / 2
    np.testing.assert_array_equal(reference.reduced_loss(losses, gradient, weights, "none")[0], [[2, 4], [0, 0]])
    np.testing.assert_array_equal(
        reference.reduced_loss(losses, gradient, weights, "nonzero_mean")[1], [[1, 1], [0, 0]]
    )


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
