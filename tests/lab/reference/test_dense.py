"""The oracle of linear layers, embeddings and dropout, against finite differences in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd.lab import reference
from support.reference import slope_along

Array = npt.NDArray[Any]


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


def test_dropout_mask_has_the_share_and_mean_that_it_should() -> None:
    mask = reference.dropout_mask(11, (300, 700), 0.3)
    assert mask.shape == (300, 700)
    assert set(np.unique(mask)) == {0.0, 1 / 0.7}
    assert abs((mask == 0).mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / mask.size)
    # Each element by itself: a longer array begins alike.
    np.testing.assert_array_equal(reference.dropout_mask(11, (9000,), 0.3), mask.reshape(-1)[:9000])
    assert (reference.dropout_mask(12, (300, 700), 0.3) != mask).any()
