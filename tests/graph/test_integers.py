"""Functions without a derivative against PyTorch: integers, their bits, signs and orders."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from retrograd import graph
from support.arrays import Array

INTEGERS = (np.int32, np.int64)
SPECIAL = np.array([0.0, -0.0, 1.5, -1.5, math.inf, -math.inf, math.nan, 1e-40, -1e-40])


def both_ways(name: str, *arrays: Array) -> Array:
    """What a function of arrays gives, which a program must too."""
    function = getattr(graph, name)
    found = np.asarray(function(*arrays))
    program = graph.compile(lambda *t: [function(*t)], *(graph.spec(a.shape, a.dtype) for a in arrays))
    (compiled,) = program(*arrays)  # one without axes is a Python number
    np.testing.assert_array_equal(compiled, found)
    assert found.shape == () or compiled.dtype == found.dtype
    return found


def integers(dtype: Any, *shape: int, seed: int = 0) -> Array:
    limits = np.iinfo(dtype)
    drawn = np.random.default_rng(seed).integers(limits.min, limits.max, shape, dtype, endpoint=True)
    drawn.flat[: min(4, drawn.size)] = [limits.min, limits.max, 0, -1][: drawn.size]
    return drawn


@pytest.mark.parametrize("shapes", [((0, 3), (3,)), ((), ()), ((17,), (17,)), ((13, 1), (7,))])
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("bitwise_and", "bitwise_and"), ("bitwise_or", "bitwise_or"), ("bitwise_xor", "bitwise_xor"),
        ("add", "add"), ("subtract", "subtract"), ("multiply", "multiply"), ("maximum", "maximum"),
        ("minimum", "minimum"), ("mod", "remainder"), ("less", "less"), ("equal", "eq"),
        ("left_shift", "bitwise_left_shift"), ("right_shift", "bitwise_right_shift"),
    ],
)  # fmt: skip
def test_two_integers(torch: Any, name: str, theirs: str, dtype: Any, shapes: Any) -> None:
    a, b = (integers(dtype, *shape, seed=i) for i, shape in enumerate(shapes))
    if name == "mod":
        b = np.where(b == 0, 5, b).astype(dtype)
    if "shift" in name:  # others are undefined in PyTorch
        b = np.asarray(b % np.iinfo(dtype).bits, dtype)
    expected = getattr(torch, theirs)(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    found = both_ways(name, a, b)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("bitwise_not", "bitwise_not"), ("negative", "neg"), ("absolute", "abs"), ("sign", "sign"),
        ("signbit", "signbit"),
    ],
)  # fmt: skip
def test_one_integer(torch: Any, name: str, theirs: str, dtype: Any) -> None:
    for shape in ((), (0,), (1,), (5, 13)):
        x = integers(dtype, *shape)
        expected = getattr(torch, theirs)(torch.from_numpy(x)).numpy()
        np.testing.assert_array_equal(both_ways(name, x), expected)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_bits_are_counted(torch: Any, dtype: Any) -> None:
    x = integers(dtype, 5, 13)
    given = torch.from_numpy(x)
    expected = sum((given >> bit) & 1 for bit in range(np.iinfo(dtype).bits)).numpy()
    found = both_ways("bitwise_count", x)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sign_bits_of_floats(torch: Any, dtype: Any) -> None:
    x = SPECIAL.astype(dtype)
    np.testing.assert_array_equal(both_ways("signbit", x), torch.signbit(torch.from_numpy(x)).numpy())


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_argsort(torch: Any, axis: int, descending: bool) -> None:
    """Equal elements stay in order, and NaN is the largest."""
    rng = np.random.default_rng(3)
    for shape in ((0, 3, 2), (1, 1, 1), (5, 7, 4)):
        x = np.round(rng.standard_normal(shape)).astype(np.float32)
        x[rng.random(shape) < 0.1] = math.nan
        expected = torch.argsort(torch.from_numpy(x), dim=axis, descending=descending, stable=True).numpy()
        found = np.asarray(graph.argsort(x, axis, descending))
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(np.take_along_axis(x, found, axis), graph.sort(x, axis, descending=descending))
