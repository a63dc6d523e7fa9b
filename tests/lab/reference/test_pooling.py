"""The oracle of pooling against finite differences and PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd.lab import reference

Array = npt.NDArray[Any]
# shape, kernel, stride, padding
WINDOWS: list[tuple[Any, ...]] = [
    ((2, 3, 7, 8), (2, 3), (2, 1), ((0, 0), (1, 1))),
    ((1, 2, 5, 6), (3, 3), (1, 2), ((1, 1), (1, 1))),
    ((2, 2, 11), (4,), (3,), ((2, 2),)),
    ((1, 1, 4, 4), (3, 2), (2, 3), ((2, 0), (0, 2))),
]


def slope_along(f: Callable[[Array], Any], x: Array, direction: Array, step: float = 1e-4) -> float:
    """The directional derivative by differences of the fourth order."""
    near, far = (float(f(x + h * direction) - f(x - h * direction)) for h in (step, 2 * step))
    return (8 * near - far) / (12 * step)


def spread(shape: tuple[int, ...], seed: int) -> Array:
    """Numbers that are far enough apart for differences: none overtakes another."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    return (rng.permutation(count) / count * 4 + 0.1).reshape(shape)


@pytest.mark.parametrize(("shape", "kernel", "stride", "padding"), WINDOWS)
@pytest.mark.parametrize("kind", ["max", "average", "average of elements", "l2", "unpool"])
def test_gradients_by_differences(kind: str, shape: Any, kernel: Any, stride: Any, padding: Any) -> None:
    rng = np.random.default_rng(1)
    x, direction = spread(shape, 0), rng.standard_normal(shape)
    windows = (kernel, stride, padding)
    ones = (1,) * len(kernel)
    if kind == "max":

        def forward(v: Array) -> Array:
            return reference.max_pool_forward(v, *windows, ones)[0]

        dy = rng.standard_normal(forward(x).shape)
        dx = reference.max_pool_backward(dy, reference.max_pool_forward(x, *windows, ones)[1], shape)
    elif kind == "l2":

        def forward(v: Array) -> Array:
            return reference.l2_pool_forward(v, *windows)

        dy = rng.standard_normal(forward(x).shape)
        dx = reference.l2_pool_backward(dy, x, forward(x), *windows)
    elif kind == "unpool":
        indices = np.argsort(rng.random((*shape[:2], int(np.prod(shape[2:])))), -1)[..., :4]
        x, direction = rng.standard_normal(indices.shape), rng.standard_normal(indices.shape)

        def forward(v: Array) -> Array:
            return reference.max_unpool_forward(v, indices, shape)

        dy = rng.standard_normal(shape)
        dx = reference.max_unpool_backward(dy, indices)
    else:
        includes = kind == "average"

        def forward(v: Array) -> Array:
            return reference.average_pool_forward(v, *windows, includes)

        dy = rng.standard_normal(forward(x).shape)
        dx = reference.average_pool_backward(dy, shape, *windows, includes)
    found = float((dx * direction).sum())
    assert found == pytest.approx(slope_along(lambda v: (forward(v) * dy).sum(), x, direction), rel=1e-8, abs=1e-11)


@pytest.mark.parametrize(("shape", "kernel", "stride", "padding"), WINDOWS[:3])
def test_values_against_torch(torch: Any, shape: Any, kernel: Any, stride: Any, padding: Any) -> None:
    axes = len(kernel)
    x = np.random.default_rng(2).standard_normal(shape)
    tensor = torch.from_numpy(x)
    options = {"stride": stride, "padding": tuple(before for before, _ in padding)}
    functional = torch.nn.functional
    for dilation in (1, 2):
        if dilation == 2 and shape[2] < 7:
            continue
        y, indices = reference.max_pool_forward(x, kernel, stride, padding, (dilation,) * axes)
        theirs, at = getattr(functional, f"max_pool{axes}d")(
            tensor, kernel, dilation=dilation, return_indices=True, **options
        )
        np.testing.assert_array_equal(y, theirs.numpy())
        np.testing.assert_array_equal(indices, at.numpy())
    for includes in (True, False):
        y = reference.average_pool_forward(x, kernel, stride, padding, includes)
        theirs = getattr(functional, f"avg_pool{axes}d")(tensor, kernel, count_include_pad=includes, **options)
        np.testing.assert_allclose(np.asarray(y, float), theirs.numpy(), rtol=1e-12, atol=1e-14)


def test_numbers_by_hand() -> None:
    x = np.array([[[[1.0, -2, 3], [4, 5, -6]]]])
    y, indices = reference.max_pool_forward(x, (2, 2), (1, 1), ((0, 0), (1, 0)), (1, 1))
    assert y[0, 0].tolist() == [[4, 5, 5]]
    assert indices[0, 0].tolist() == [[3, 4, 4]]
    dx = reference.max_pool_backward(np.array([[[[1.0, 10, 100]]]]), indices, x.shape)
    assert dx[0, 0].tolist() == [[0, 0, 0], [1, 110, 0]]
    average = reference.average_pool_forward(x, (2, 2), (1, 1), ((0, 0), (1, 0)))
    assert average[0, 0].tolist() == [[1.25, 2, 0]]
    average = reference.average_pool_forward(x, (2, 2), (1, 1), ((0, 0), (1, 0)), False)
    assert average[0, 0].tolist() == [[2.5, 2, 0]]
    assert reference.l2_pool_forward(x, (2, 1), (1, 1), ((0, 0), (0, 0)))[0, 0, 0, 0] == pytest.approx(17**0.5)
    assert reference.max_unpool_forward(y, indices, x.shape)[0, 0].tolist() == [[0, 0, 0], [4, 5, 0]]
    assert reference.max_unpool_backward(x, indices)[0, 0].tolist() == [[4, 5, 5]]
