"""The oracle of the linear recurrence: finite differences in float64, and values computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd.lab import reference
from support.reference import slope_along
from support.scan_values import CHECK, fill

Array = npt.NDArray[Any]


def test_check_values() -> None:
    a, b = 0.5 + fill((3, 2, 2), 2), fill((3, 2, 2), 6)
    h0, dy, dhn = fill((2, 2), 5), 2 * fill((3, 2, 2), 4), fill((2, 2), 9)
    y, hn = reference.scan_forward(a, b, h0)
    gradients = reference.scan_backward(dy, dhn, a, y, h0)
    for name, got in {"y": y, **gradients._asdict()}.items():
        np.testing.assert_allclose(got.reshape(-1).astype(float), CHECK[name], rtol=1e-13, atol=1e-15, err_msg=name)
    np.testing.assert_array_equal(hn, y[-1])


@pytest.mark.parametrize(
    ("shape", "a_shape", "axis", "resets"),
    [
        ((5, 3, 2), (5, 3, 2), 0, False),
        ((5, 3, 2), (5, 3, 2), 1, True),
        ((4, 7), (7,), -1, False),
        ((4, 7), (4, 1), 0, True),
        ((6, 2, 3), (3,), 0, True),
        ((6, 2, 3), (), 0, False),
        ((1, 4), (1, 4), 0, True),
        ((0, 4), (0, 4), 0, False),
    ],
)
def test_backward_by_differences(shape: tuple[int, ...], a_shape: tuple[int, ...], axis: int, resets: bool) -> None:
    rng = np.random.default_rng(len(shape) + axis)
    state = tuple(extent for i, extent in enumerate(shape) if i != axis % len(shape))
    a, b, h0 = rng.standard_normal(a_shape), rng.standard_normal(shape), rng.standard_normal(state)
    dy, dhn = rng.standard_normal(shape), rng.standard_normal(state)
    reset = rng.random(shape) < 0.3 if resets else None

    def loss(a: Array, b: Array, h0: Array) -> Any:
        y, hn = reference.scan_forward(a, b, h0, axis=axis, reset=reset)
        return (y * dy).sum() + (hn * dhn).sum()

    y, _ = reference.scan_forward(a, b, h0, axis=axis, reset=reset)
    gradients = reference.scan_backward(dy, dhn, a, y, h0, axis=axis, reset=reset)
    for gradient, at, f in (
        (gradients.da, a, lambda v: loss(v, b, h0)),
        (gradients.db, b, lambda v: loss(a, v, h0)),
        (gradients.dh0, h0, lambda v: loss(a, b, v)),
    ):
        direction = rng.standard_normal(at.shape)
        assert gradient.shape == at.shape
        assert float((gradient * direction).sum()) == pytest.approx(slope_along(f, at, direction), rel=1e-8, abs=1e-8)
