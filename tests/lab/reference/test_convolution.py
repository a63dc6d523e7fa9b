"""The oracle of convolutions: by the definition pixel by pixel, by finite differences, and against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd.lab import reference

Array = npt.NDArray[Any]

# x without samples, w, options
CASES = {
    "one_axis": ((4, 9), (6, 4, 3), {"stride": (2,), "padding": ((1, 2),), "dilation": (2,), "groups": 1}),
    "plain": ((3, 5, 6), (2, 3, 3, 2), {"stride": (1, 1), "padding": ((0, 0),) * 2, "dilation": (1, 1), "groups": 1}),
    "groups": (
        (4, 7, 8),
        (6, 2, 3, 3),
        {"stride": (2, 3), "padding": ((1, 0), (2, 1)), "dilation": (1, 2), "groups": 2},
    ),
    "depthwise": (
        (3, 4, 5),
        (3, 1, 2, 2),
        {"stride": (1, 1), "padding": ((1, 1),) * 2, "dilation": (1, 1), "groups": 3},
    ),
    "long_stride": (
        (2, 9, 9),
        (1, 2, 2, 2),
        {"stride": (4, 5), "padding": ((0, 0),) * 2, "dilation": (1, 1), "groups": 1},
    ),
}


def slope_along(f: Callable[[Array], Any], x: Array, direction: Array) -> float:
    """The directional derivative of a polynomial of the second degree: exact but for roundings."""
    return float(f(x + direction) - f(x - direction)) / 2


def draw(case: str, seed: int = 0) -> tuple[Array, Array, dict[str, Any], np.random.Generator]:
    x_shape, w_shape, options = CASES[case]
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, *x_shape)), rng.standard_normal(w_shape), dict(options), rng


def check_gradients(
    gradients: tuple[Array, ...], at: tuple[Array, ...], forward: Callable[..., Array], dy: Array, rng: Any
) -> None:
    for i, (gradient, value) in enumerate(zip(gradients, at, strict=True)):
        direction = rng.standard_normal(value.shape)

        def loss(v: Array, i: int = i) -> Any:
            return (forward(*at[:i], v, *at[i + 1 :]) * dy).sum()

        assert float((gradient * direction).sum()) == pytest.approx(slope_along(loss, value, direction), rel=1e-11)


@pytest.mark.parametrize("case", CASES)
def test_convolution_by_its_definition_and_differences(case: str) -> None:
    x, w, options, rng = draw(case)
    b = rng.standard_normal(len(w))
    y = reference.conv_forward(x, w, b, **options)
    outputs, groups = len(w), options["groups"]
    for n, o, *pixel in np.ndindex(y.shape):
        total = b[o]
        for i, *tap in np.ndindex(w.shape[1:]):
            at = [
                p * s + k * d - before
                for p, s, k, d, (before, _) in zip(
                    pixel, options["stride"], tap, options["dilation"], options["padding"], strict=True
                )
            ]
            if all(0 <= a < size for a, size in zip(at, x.shape[2:], strict=True)):
                total += w[(o, i, *tap)] * x[(n, o // (outputs // groups) * w.shape[1] + i, *at)]
        assert float(y[(n, o, *pixel)]) == pytest.approx(total, rel=1e-12, abs=1e-12)
    dy = rng.standard_normal(y.shape)
    gradients = reference.conv_backward(dy, x, w, **options)
    check_gradients(gradients, (x, w, b), lambda x, w, b: reference.conv_forward(x, w, b, **options), dy, rng)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("extra", [0, 1])
def test_transposed_convolution_is_the_gradient_of_one(case: str, extra: int) -> None:
    large, w, options, rng = draw(case)
    axes = w.ndim - 2
    extras = tuple(min(extra, max(s, d) - 1) for s, d in zip(options["stride"], options["dilation"], strict=True))
    x = rng.standard_normal(reference.conv_forward(large, w, None, **options).shape)
    b = rng.standard_normal(w.shape[1] * options["groups"])

    def forward(x: Array, w: Array, b: Array) -> Array:
        return reference.conv_transpose_forward(x, w, b, output_padding=extras, **options)

    y = forward(x, w, b)
    # <transposed(x), large> = <x, conv(large)>
    direction = rng.standard_normal(y.shape)
    products = (x * reference.conv_forward(direction, w, None, **options)).sum()
    assert float(((y - b.reshape(-1, *(1,) * axes)) * direction).sum()) == pytest.approx(float(products), rel=1e-11)
    gradients = reference.conv_transpose_backward(direction, x, w, **options)
    check_gradients(gradients, (x, w, b), forward, direction, rng)


@pytest.mark.parametrize("case", ["one_axis", "plain", "depthwise", "long_stride"])
def test_convolutions_against_torch(case: str, torch: Any) -> None:
    x, w, options, rng = draw(case)
    options["padding"] = tuple((max(p), max(p)) for p in options["padding"])
    theirs = {key: options[key] for key in ("stride", "dilation", "groups")}
    theirs["padding"] = tuple(p[0] for p in options["padding"])
    rank = "1d" if x.ndim == 3 else "2d"
    both = torch.from_numpy(x), torch.from_numpy(w)
    expected = getattr(torch.nn.functional, f"conv{rank}")(*both, **theirs)
    np.testing.assert_allclose(np.float64(reference.conv_forward(x, w, None, **options)), expected.numpy(), atol=1e-12)
    small = rng.standard_normal(expected.shape)
    expected = getattr(torch.nn.functional, f"conv_transpose{rank}")(torch.from_numpy(small), both[1], **theirs)
    got = reference.conv_transpose_forward(small, w, None, output_padding=(0,) * (x.ndim - 2), **options)
    np.testing.assert_allclose(np.float64(got), expected.numpy(), atol=1e-12)
