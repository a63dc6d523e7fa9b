"""Pooling against the oracle and PyTorch; layouts, buffers, NaN, bits; and what is refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import retrograd as rg
from retrograd import _core
from retrograd.lab import reference
from support.arrays import Array, assert_same_bits, assert_untouched_around, fenced, placed

PLACES = ("contiguous", "fortran", "reversed", "every other", "padded", "in a field")
THREADS = (1, 2, 3)


class Case(NamedTuple):
    """Windows over an array [N, C, ...]; an entry for each spatial axis."""

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @property
    def options(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding}


CASES = [
    Case((2, 3, 8, 8), (2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1)),
    Case((2, 3, 56, 57), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
    Case((1, 17, 9, 40), (3, 2), (1, 1), ((0, 2), (1, 0)), (1, 1)),
    Case((2, 5, 7, 33), (2, 3), (3, 3), ((1, 1), (2, 1)), (1, 1)),
    Case((1, 16, 15, 70), (3, 3), (1, 2), ((2, 0), (1, 3)), (2, 3)),
    Case((1, 4, 5, 6), (5, 6), (1, 1), ((0, 0), (0, 0)), (1, 1)),  # the whole plane
    Case((3, 33, 1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1)),
    Case((1, 2, 3, 2), (3, 3), (1, 4), ((2, 2), (2, 1)), (1, 1)),  # every window reaches into the padding
    Case((2, 3, 41), (3,), (2,), ((1, 0),), (1,)),
    Case((1, 1, 300), (17,), (1,), ((8, 8),), (1,)),
    Case((2, 9, 31), (2,), (5,), ((0, 0),), (4,)),
]
NAMES = [f"{case.shape} {case.kernel} {case.stride}" for case in CASES]


def draw(shape: tuple[int, ...], dtype: Any, seed: int = 0, coarse: bool = False) -> Array:
    """Normal numbers; `coarse`: small integers, many of which are equal."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return (np.round(values) if coarse else values).astype(dtype)


def last(array: Array) -> Array:
    """The same array with its channels last, contiguous."""
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


def first(array: Array) -> Array:
    return np.moveaxis(array, -1, 1)


def check(got: Array, exact: Array, sizes: Array, roundings: float) -> None:
    """The error of each element is below so many roundings of a number of its size."""
    u = np.finfo(got.dtype).eps / 2
    assert got.shape == exact.shape
    error = np.abs(got.astype(exact.dtype) - exact)
    assert (error <= roundings * u * sizes + np.finfo(got.dtype).smallest_subnormal).all()


@functools.cache  # for all levels
def backward_cases(case: Case, dtype: Any) -> tuple[Array, Array, Array, Array]:
    """x, dy and the oracle's y and indices."""
    x = draw(case.shape, dtype, 1, coarse=True)
    y, indices = reference.max_pool_forward(x, case.kernel, case.stride, case.padding, case.dilation)
    return x, draw(y.shape, dtype, 2), y, indices


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_max_pool_against_the_oracle(isa: str, case: Case, dtype: Any) -> None:
    x, dy, y, indices = backward_cases(case, dtype)
    options = {**case.options, "dilation": case.dilation}
    got = rg.max_pool_forward(x, case.kernel, **options)
    assert got.y is not None
    assert got.indices is not None
    assert got.indices.dtype == np.int32
    np.testing.assert_array_equal(got.indices, indices)
    assert_same_bits([got.y], [y])
    without = rg.max_pool_forward(x, case.kernel, return_indices=False, **options)
    assert without.indices is None
    assert_same_bits([without.y], [y])
    dx = rg.max_pool_backward(dy, got.indices, x.shape)
    exact, sizes = (reference.max_pool_backward(d, indices, x.shape) for d in (dy, np.abs(dy)))
    check(dx, exact, sizes, math.prod(case.kernel))


@functools.cache  # for all levels
def average_oracle(case: Case, includes: bool, dtype: Any) -> tuple[Array, ...]:
    """x and dy, y and dx, and the sizes of their terms."""
    arguments = (case.kernel, case.stride, case.padding, includes)
    x = draw(case.shape, dtype)
    y, y_sizes = (reference.average_pool_forward(v, *arguments) for v in (x, np.abs(x)))
    dy = draw(y.shape, dtype, 2)
    dx, dx_sizes = (reference.average_pool_backward(d, x.shape, *arguments) for d in (dy, np.abs(dy)))
    return x, dy, y, y_sizes, dx, dx_sizes


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("includes", [True, False])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_average_pool_against_the_oracle(isa: str, case: Case, includes: bool, dtype: Any) -> None:
    case = case._replace(dilation=(1,) * len(case.kernel))
    x, dy, y, y_sizes, dx, dx_sizes = average_oracle(case, includes, dtype)
    options = {**case.options, "count_includes_padding": includes}
    terms = math.prod(case.kernel)
    check(rg.average_pool_forward(x, case.kernel, **options), y, y_sizes, 18 + terms / 16)
    check(rg.average_pool_backward(dy, x.shape, case.kernel, **options), dx, dx_sizes, 1 + terms)


@functools.cache  # for all levels
def l2_oracle(case: Case, dtype: Any) -> tuple[Array, Array]:
    """x and y."""
    x = draw(case.shape, dtype)
    x[:, 0] = 0
    return x, reference.l2_pool_forward(x, case.kernel, case.stride, case.padding)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_l2_pool_against_the_oracle(isa: str, case: Case, dtype: Any) -> None:
    x, exact = l2_oracle(case, dtype)
    arguments = (case.kernel, case.stride, case.padding)
    y = rg.l2_pool_forward(x, case.kernel, **case.options)
    terms = math.prod(case.kernel)
    check(y, exact, exact, 2 if dtype == np.float32 else 2 + terms)
    dy = draw(y.shape, dtype, 2)
    dx = rg.l2_pool_backward(dy, x, y, case.kernel, **case.options)
    exact, sizes = (reference.l2_pool_backward(d, v, y, *arguments) for d, v in ((dy, x), (np.abs(dy), np.abs(x))))
    check(dx, exact, sizes, 2 + terms)
    assert (dx[:, 0] == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_unpooling_against_the_oracle(isa: str, case: Case, dtype: Any) -> None:
    x, part, _, indices = backward_cases(case, dtype)
    whole = rg.max_unpool_forward(part, indices, x.shape)
    assert_same_bits([whole], [reference.max_unpool_forward(part, indices, x.shape)])
    assert_same_bits([rg.max_unpool_backward(x, indices)], [reference.max_unpool_backward(x, indices)])


def all_results(x: Array, case: Case, channels_last: bool = False, **options: Any) -> list[Array]:
    """The results of every function; of arrays with their channels last, in the usual order."""
    usual = first if channels_last else np.asarray
    options |= {"channels_last": channels_last}
    windows = case.options
    y, indices = rg.max_pool_forward(x, case.kernel, dilation=case.dilation, **windows, **options)
    assert y is not None
    assert indices is not None
    dy = np.asarray(draw(usual(y).shape, x.dtype, 5))
    dy = last(dy) if channels_last else dy
    results = [y, indices, rg.max_pool_backward(dy, indices, x.shape, **options)]
    results += [rg.max_unpool_forward(dy, indices, x.shape, **options), rg.max_unpool_backward(x, indices, **options)]
    norm = rg.l2_pool_forward(x, case.kernel, **windows, **options)
    dy = dy if dy.shape == norm.shape else np.ones_like(norm)
    results += [norm, rg.l2_pool_backward(dy, x, norm, case.kernel, **windows, **options)]
    for includes in (True, False):
        counted = {"count_includes_padding": includes, **windows, **options}
        results += [rg.average_pool_forward(x, case.kernel, **counted)]
        results += [rg.average_pool_backward(dy, x.shape, case.kernel, **counted)]
    return [usual(result) for result in results]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_layouts_threads_and_levels_have_the_same_bits(case: Case, dtype: Any) -> None:
    x = draw(case.shape, dtype, 3)
    _core.select_isa("scalar")
    expected = all_results(x, case)
    for level in _core.isa_levels():
        _core.select_isa(level)
        for threads in THREADS:
            assert_same_bits(all_results(x, case, num_threads=threads), expected)
            assert_same_bits(all_results(last(x), case, True, num_threads=threads), expected)


def test_results_have_the_layout_of_x() -> None:
    x = draw((2, 8, 6, 6), np.float32)
    stored_last = first(last(x))  # [N, C, H, W], with contiguous channels
    y = rg.average_pool_forward(stored_last, 2)
    assert y.strides[1] == y.itemsize
    assert_same_bits([y], [rg.average_pool_forward(x, 2)])
    assert rg.average_pool_forward(last(x), 2, channels_last=True).flags.c_contiguous


@settings(max_examples=100, deadline=None)
@given(
    axes=st.integers(1, 2),
    data=st.data(),
    dtype=st.sampled_from([np.float32, np.float64]),
    places=st.lists(st.sampled_from(PLACES), min_size=3, max_size=3),
    channels_last=st.booleans(),
    accumulate=st.booleans(),
    level=st.sampled_from(_core.isa_levels()),
)
def test_any_windows_strides_and_buffers(
    axes: int, data: Any, dtype: Any, places: list[str], channels_last: bool, accumulate: bool, level: str
) -> None:
    _core.select_isa(level)
    sizes = st.lists(st.integers(1, 4), min_size=axes, max_size=axes).map(tuple)
    kernel, stride, dilation = data.draw(sizes), data.draw(sizes), data.draw(sizes)
    padding = tuple((data.draw(st.integers(0, k // 2)), data.draw(st.integers(0, k - 1))) for k in kernel)
    spatial = tuple(data.draw(st.integers(1 + (k - 1) * d, 40)) for k, d in zip(kernel, dilation, strict=True))
    shape = (data.draw(st.integers(0, 2)), data.draw(st.sampled_from([1, 2, 15, 17])), *spatial)
    x = draw(shape, dtype, 7, coarse=True)
    order = last if channels_last else np.asarray
    back = first if channels_last else np.asarray
    windows: dict[str, Any] = {"stride": stride, "padding": padding, "channels_last": channels_last}
    behind = [
        (n + sum(p) - (k - 1) * d - 1) // s * s - p[0] >= n
        for n, k, s, p, d in zip(spatial, kernel, stride, padding, dilation, strict=True)
    ]
    if any(behind):  # the last window starts behind the last element
        with pytest.raises(ValueError, match="has no element of x"):
            rg.max_pool_forward(order(x), kernel, dilation=dilation, **windows)
        return
    y, indices = rg.max_pool_forward(order(x), kernel, dilation=dilation, **windows)
    assert y is not None
    assert indices is not None
    exact = reference.max_pool_forward(x, kernel, stride, padding, dilation)
    if x.size:
        np.testing.assert_array_equal(back(y), exact[0])
        np.testing.assert_array_equal(back(indices), exact[1])
    to_y = placed(np.zeros_like(y), places[0])
    to_indices = placed(np.zeros(y.shape), places[1]).astype(np.int32)
    given = rg.MaxPoolResult(to_y, to_indices)
    got = rg.max_pool_forward(placed(order(x), places[2]), kernel, dilation=dilation, out=given, **windows)
    assert got.y is to_y
    assert got.indices is to_indices
    assert_same_bits(got, [y, indices])
    assert_untouched_around(to_y)
    # The gradient in a buffer, set or added to.
    dy = draw(y.shape, dtype, 8)
    start = draw(order(x).shape, dtype, 9)
    options: dict[str, Any] = {"channels_last": channels_last, "accumulate": accumulate}
    dx = rg.max_pool_backward(dy, indices, order(x).shape, channels_last=channels_last)
    out = placed(start, places[0])
    assert rg.max_pool_backward(placed(dy, places[1]), indices, dx.shape, out=out, **options) is out
    assert_same_bits([out], [dx + start if accumulate else dx])
    assert_untouched_around(out)


def test_buffers_of_the_other_gradients(isa: str) -> None:
    x = draw((2, 5, 9, 11), np.float32)
    for channels_last in (False, True):
        array = last(x) if channels_last else x
        options: dict[str, Any] = {"stride": 2, "padding": 1, "channels_last": channels_last}
        y, norm = rg.average_pool_forward(array, 3, **options), rg.l2_pool_forward(array, 3, **options)
        dy, start = draw(y.shape, np.float32, 1), draw(array.shape, np.float32, 2)
        calls: list[Callable[..., Array]] = [
            lambda **o: rg.average_pool_backward(dy, array.shape, 3, **options, **o),  # noqa: B023
            lambda **o: rg.l2_pool_backward(dy, array, norm, 3, **options, **o),  # noqa: B023
        ]
        for call in calls:
            plain = call()
            for place in PLACES:
                for accumulate in (False, True):
                    out = placed(start, place)
                    assert call(out=out, accumulate=accumulate) is out
                    assert_same_bits([out], [plain + start if accumulate else plain])
                    assert_untouched_around(out)


def test_nothing_outside_is_touched(isa: str) -> None:
    """Arrays that end where memory ends: no vector reads or writes beyond them."""
    for width in (1, 2, 3, 15, 16, 17, 31, 32, 33, 34, 35, 63, 64, 65, 67):
        for kernel, stride in ((2, 2), (3, 2), (3, 1), (2, 3)):
            if width < kernel:
                continue
            x = draw((1, 2, 4, width), np.float32)
            y, indices = rg.max_pool_forward(x, (2, kernel), stride=(2, stride))
            assert y is not None
            assert indices is not None
            for at_end in (False, True):
                inside = fenced(x, at_end)
                out = rg.MaxPoolResult(fenced(y, at_end), fenced(indices, at_end))
                rg.max_pool_forward(inside, (2, kernel), stride=(2, stride), out=out)
                dy, dx = fenced(y, at_end), fenced(x, at_end)
                windows: dict[str, Any] = {"stride": (2, stride)}
                rg.max_pool_backward(dy, fenced(indices, at_end), x.shape, out=dx)
                rg.average_pool_forward(inside, (2, kernel), out=dy, **windows)
                rg.average_pool_backward(dy, x.shape, (2, kernel), out=dx, **windows)
                rg.l2_pool_forward(inside, (2, kernel), out=dy, **windows)
                rg.l2_pool_backward(dy, inside, fenced(y, at_end), (2, kernel), out=dx, **windows)


def test_large_images_are_written_past_the_caches(isa: str) -> None:
    """Results that need not stay in a cache are stored otherwise."""
    x = draw((3, 18, 33, 47), np.float32)
    expected = all_results(x, Case(x.shape, (3, 2), (2, 2), ((1, 0), (0, 1)), (1, 1)))
    _core.override_caches(1024, 4096, 16384, 1)
    try:
        for channels_last in (False, True):
            case = Case(x.shape, (3, 2), (2, 2), ((1, 0), (0, 1)), (1, 1))
            assert_same_bits(all_results(last(x) if channels_last else x, case, channels_last), expected)
    finally:
        _core.restore_caches()


# ---- NaN, infinity, ties ---------------------------------------------------------------------------------------------


def test_nan_wins_and_infinity_is_a_number(isa: str) -> None:
    x = np.full((1, 1, 4, 36), -math.inf, np.float32)
    y, indices = rg.max_pool_forward(x, 2)
    assert y is not None
    assert indices is not None
    assert (y == -math.inf).all()
    assert indices[0, 0].tolist() == [
        [2 * w for w in range(18)],
        [72 + 2 * w for w in range(18)],
    ]  # the first of equals
    x = draw((1, 1, 4, 36), np.float32)
    x[0, 0, 0, 5] = x[0, 0, 1, 4] = x[0, 0, 2, 9] = math.nan
    x[0, 0, 3, 0] = math.inf
    y, indices = rg.max_pool_forward(x, 2)
    assert y is not None
    assert indices is not None
    assert np.isnan(y[0, 0]).nonzero()[1].tolist() == [2, 4]
    assert indices[0, 0, 0, 2] == 36 + 4  # the last NaN, as in PyTorch
    assert (y[0, 0, 1, 0], indices[0, 0, 1, 0]) == (math.inf, 3 * 36)
    average = rg.average_pool_forward(x, 2)
    assert np.isnan(average[0, 0]).nonzero()[1].tolist() == [2, 4]
    assert average[0, 0, 1, 0] == math.inf


def test_zeros_of_both_signs_are_equal(isa: str) -> None:
    for values in ([-0.0, 0.0], [0.0, -0.0]):
        x = np.array([[values * 20]], np.float32)
        y, indices = rg.max_pool_forward(x, 2)
        assert y is not None
        assert indices is not None
        assert (np.signbit(y) == np.signbit(values[0])).all()
        np.testing.assert_array_equal(indices[0, 0], np.arange(0, 40, 2))


def test_padding_never_wins(isa: str) -> None:
    x = np.full((1, 3, 5, 20), -7.0, np.float32)
    for channels_last in (False, True):
        array = last(x) if channels_last else x
        y, indices = rg.max_pool_forward(array, 3, stride=1, padding=1, channels_last=channels_last)
        assert (y == -7).all()
        assert indices is not None
        assert indices.min() == 0
        assert indices.max() < 100


def test_l2_of_extreme_numbers(isa: str) -> None:
    """Squares that float cannot hold, and norms so small that dy / y would overflow."""
    for scale in (1e-42, 1e-30, 1e30):
        x = np.full((1, 1, 1, 32), scale, np.float32)
        y = rg.l2_pool_forward(x, (1, 2))
        np.testing.assert_allclose(y, math.sqrt(2) * np.float64(x[0, 0, 0, 0]), rtol=2e-3 if scale < 1e-40 else 1e-6)
        dx = rg.l2_pool_backward(np.full_like(y, 1e3), x, y, (1, 2))
        np.testing.assert_allclose(dx, 1e3 / math.sqrt(2), rtol=2e-3 if scale < 1e-40 else 1e-6)


def test_a_long_average_keeps_its_digits(isa: str) -> None:
    x = (1 + np.random.default_rng(0).random((1, 2, 100, 100))).astype(np.float32)
    got = rg.average_pool_forward(x, 100)
    np.testing.assert_allclose(got[..., 0, 0], x.astype(float).mean((2, 3)), rtol=2e-6)


# ---- other libraries -------------------------------------------------------------------------------------------------


def torch_has(case: Case) -> bool:
    """PyTorch pads both sides alike, by half a kernel at most."""
    return all(p[0] == p[1] and 2 * p[0] <= k for p, k in zip(case.padding, case.kernel, strict=True))


# PyTorch has channels_last in two dimensions only.
@pytest.mark.parametrize(
    ("case", "stored_last"),
    [(case, last) for case in CASES if torch_has(case) for last in (False, True)[: len(case.kernel)]],
    ids=lambda c: str(c[:3]) if isinstance(c, Case) else str(c),
)
def test_against_torch(torch: Any, case: Case, stored_last: bool) -> None:
    axes = len(case.kernel)
    x = draw(case.shape, np.float32, 4, coarse=True)
    x.reshape(-1)[::7] = math.nan
    padding = tuple(p[0] for p in case.padding)
    functional = torch.nn.functional
    tensor = torch.from_numpy(x)
    if stored_last:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    tensor.requires_grad_()
    options = {"stride": case.stride, "padding": padding}
    theirs, at = getattr(functional, f"max_pool{axes}d")(
        tensor, case.kernel, dilation=case.dilation, return_indices=True, **options
    )
    ours = rg.max_pool_forward(tensor.detach().numpy(), case.kernel, dilation=case.dilation, **case.options)
    assert ours.indices is not None
    np.testing.assert_array_equal(ours.y, theirs.detach().numpy())
    np.testing.assert_array_equal(ours.indices, at.numpy())
    dy = draw(theirs.shape, np.float32, 5)
    theirs.backward(torch.from_numpy(dy))
    np.testing.assert_allclose(
        rg.max_pool_backward(dy, ours.indices, x.shape), tensor.grad.numpy(), rtol=1e-5, atol=1e-6
    )
    for includes in (True, False):
        tensor = torch.from_numpy(draw(case.shape, np.float32, 6)).requires_grad_()
        theirs = getattr(functional, f"avg_pool{axes}d")(tensor, case.kernel, count_include_pad=includes, **options)
        counted = {**case.options, "count_includes_padding": includes}
        y = rg.average_pool_forward(tensor.detach().numpy(), case.kernel, **counted)
        np.testing.assert_allclose(y, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)
        dy = draw(y.shape, np.float32, 7)
        theirs.backward(torch.from_numpy(dy))
        dx = rg.average_pool_backward(dy, x.shape, case.kernel, **counted)
        np.testing.assert_allclose(dx, tensor.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_l2_and_unpooling_against_torch(torch: Any) -> None:
    functional = torch.nn.functional
    x = draw((2, 3, 8, 10), np.float32)
    tensor = torch.from_numpy(x).requires_grad_()
    theirs = functional.lp_pool2d(tensor, 2.0, 2)
    dy = draw(tuple(theirs.shape), np.float32, 1)
    theirs.backward(torch.from_numpy(dy))
    y = rg.l2_pool_forward(x, 2)
    np.testing.assert_allclose(y, theirs.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(rg.l2_pool_backward(dy, x, y, 2), tensor.grad.numpy(), rtol=1e-4, atol=1e-6)
    largest, indices = rg.max_pool_forward(x, 2)
    assert indices is not None
    tensor = torch.from_numpy(np.array(largest)).requires_grad_()
    theirs = functional.max_unpool2d(tensor, torch.from_numpy(indices.astype(np.int64)), 2)
    theirs.backward(torch.from_numpy(x))
    np.testing.assert_array_equal(rg.max_unpool_forward(np.array(largest), indices, x.shape), theirs.detach().numpy())
    np.testing.assert_array_equal(rg.max_unpool_backward(x, indices), tensor.grad.numpy())


# ---- sizes of 0, and what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4), (0, 0, 5)])
def test_no_samples_and_no_channels(shape: tuple[int, ...]) -> None:
    case = Case(
        shape, (2,) * (len(shape) - 2), (2,) * (len(shape) - 2), ((0, 0),) * (len(shape) - 2), (1,) * (len(shape) - 2)
    )
    for result in all_results(np.zeros(shape, np.float32), case):
        assert result.size == 0


def test_windows_of_padding_alone() -> None:
    """An average that counts padding, and a norm, are 0 there; the others do not exist."""
    x = np.ones((1, 1, 1, 3), np.float32)
    options: dict[str, Any] = {"padding": ((0, 0), (2, 4))}
    assert rg.average_pool_forward(x, (1, 2), **options)[0, 0, 0].tolist() == [0, 1, 0.5, 0]
    norm = rg.l2_pool_forward(x, (1, 2), **options)
    np.testing.assert_allclose(norm[0, 0, 0], [0, math.sqrt(2), 1, 0])
    assert rg.average_pool_backward(np.ones_like(norm), x.shape, (1, 2), **options)[0, 0, 0].tolist() == [0.5] * 3
    assert np.isfinite(rg.l2_pool_backward(np.ones_like(norm), x, norm, (1, 2), **options)).all()
    for call in (rg.max_pool_forward, lambda *a, **o: rg.average_pool_forward(*a, count_includes_padding=False, **o)):
        with pytest.raises(ValueError, match=r"window 0 of spatial axis 1 has no element of x.*padding is 2 and 4"):
            call(x, (1, 2), **options)
    # Taps that step over all elements, and a window behind the last one.
    with pytest.raises(ValueError, match="window 0 of spatial axis 0 has no element"):
        rg.max_pool_forward(np.ones((1, 1, 1), np.float32), 2, padding=1, dilation=2)
    with pytest.raises(ValueError, match="window 2 of spatial axis 0 has no element"):
        rg.max_pool_forward(np.ones((1, 1, 4), np.float32), 2, padding=((0, 2),))


X = np.zeros((2, 3, 6, 8), np.float32)
DY = np.zeros((2, 3, 3, 4), np.float32)
AT = np.zeros((2, 3, 3, 4), np.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rg.max_pool_forward(X[0, 0], 2), r"max_pool_forward: x has 2 axes, needs 3 or 4, \[N, C, W\]"),
        (lambda: rg.max_pool_forward(X[0, 0], 2, channels_last=True), r"\[N, W, C\] or \[N, H, W, C\]"),
        (lambda: rg.max_pool_forward(X, (2, 2, 2)), "kernel has 3 entries, but there are 2 spatial axes"),
        (lambda: rg.max_pool_forward(X, 0), "kernel is 0, must be at least 1"),
        (lambda: rg.max_pool_forward(X, 2, stride=0), "stride is 0, must be at least 1"),
        (lambda: rg.max_pool_forward(X, 2, padding=-1), "padding is -1, must be at least 0"),
        (lambda: rg.max_pool_forward(X, 2, padding=((0, 1, 2), 0)), "padding of an axis has 3 entries"),
        (lambda: rg.max_pool_forward(X, 2, dilation=(1, 0)), "dilation is 0, must be at least 1"),
        (lambda: rg.max_pool_forward(X, 2**31), f"kernel is {2**31}, must be at most {2**31 - 1}"),
        (
            lambda: rg.max_pool_forward(X, 4, dilation=3),
            r"spans 10 elements, but spatial axis 0 of x has 6, with padding",
        ),
        (lambda: rg.average_pool_forward(X, (2, 9)), "kernel is 9 .* spatial axis 1 of x has 8, with padding 0 and 0"),
        (
            lambda: rg.max_pool_forward(X, 2, out=rg.MaxPoolResult(DY[:1])),
            r"out.y has shape \(1, 3, 3, 4\), the result",
        ),
        (lambda: rg.max_pool_forward(X, 2, out={"y": DY, "indices": AT}, return_indices=False), "return_indices=False"),
        (lambda: rg.max_pool_forward(X, 2, out={"dx": X}), "out has 'dx'; the results are y, indices"),
        (lambda: rg.max_pool_forward(X, 2, out={"y": X[:, :, :3, :4]}), r"out.y .* overlaps x"),
        (lambda: rg.max_pool_backward(DY, AT[:1], X.shape), r"indices has shape \(1, 3, 3, 4\), but dy has shape"),
        (
            lambda: rg.max_pool_backward(DY, AT + 48, X.shape),
            r"indices\[0, 0, 0, 0\] is 48, but the pixels of a plane are 48",
        ),
        (lambda: rg.max_pool_backward(DY, AT - 1, X.shape), r"indices\[0, 0, 0, 0\] is -1"),
        (lambda: rg.max_pool_backward(DY, AT.astype(np.int64) + 2**40, X.shape), rf"is {2**40}, but the pixels"),
        (lambda: rg.max_pool_backward(DY, AT.astype(np.uint64) + np.uint64(2**63), X.shape), rf"is {2**63}, but"),
        (
            lambda: rg.max_pool_backward(DY, AT, (2, 4, 6, 8)),
            r"dy has shape \(2, 3, 3, 4\), but x_shape is \(2, 4, 6, 8\)",
        ),
        (lambda: rg.max_pool_backward(DY, AT, (2, 3, 6)), "the same number of axes, samples and channels"),
        (
            lambda: rg.max_pool_backward(DY, AT, (2, 3, 2**16, 2**16)),
            f"planes of {2**32} pixels, but indices are int32",
        ),
        (lambda: rg.max_pool_backward(DY, AT, X.shape, accumulate=True), "adds to out, which is missing"),
        (lambda: rg.max_pool_backward(DY, AT, (2, 3, -6, 8)), r"x_shape\[2\] is -6, must be at least 0"),
        (
            lambda: rg.average_pool_backward(DY, (2, 3, 6, 6), 2),
            r"dy has shape \(2, 3, 3, 4\), but x of shape .* \(2, 3, 3, 3\)",
        ),
        (lambda: rg.l2_pool_backward(DY, X, DY[:, :2], 2), r"y has shape \(2, 2, 3, 4\), but x of shape"),
        (lambda: rg.max_unpool_backward(X[:1], AT), r"indices has shape \(2, 3, 3, 4\), but dy is \(1, 3, 6, 8\)"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
    assert not X.any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rg.max_pool_forward(X.astype(np.float16), 2), "x has dtype float16; it must be float32 or float64"),
        (lambda: rg.max_pool_forward(X, 2.0), "kernel must be an int, not float"),
        (lambda: rg.max_pool_forward(X, "2"), "kernel must be an int, not str"),
        (lambda: rg.max_pool_backward(DY, AT.astype(np.float32), X.shape), "indices has dtype float32"),
        (lambda: rg.max_pool_backward(DY, AT, 6), "x_shape must be a sequence of ints, not int"),
        (lambda: rg.max_pool_backward(DY, AT, X.shape, channels_last=None), "channels_last must be True or False"),
        (
            lambda: rg.max_pool_forward(X, 2, out={"indices": AT.astype(np.int64)}),
            "out.indices has dtype int64, must be int32",
        ),
        (lambda: rg.l2_pool_backward(DY, X.astype(float), DY, 2), "x has dtype float64, must be float32 as dy is"),
    ],
)
def test_types_that_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_a_wrong_index_leaves_the_result_untouched(isa: str) -> None:
    out = np.full(X.shape, 5, np.float32)
    at = AT.copy()
    at[1, 2, 2, 3] = 48
    for call in (
        lambda: rg.max_pool_backward(DY, at, X.shape, out=out),
        lambda: rg.max_unpool_forward(DY, at, X.shape, out=out),
        lambda: rg.max_unpool_backward(X, at, out=out[:, :, :3, :4]),
    ):
        with pytest.raises(ValueError, match=r"indices\[1, 2, 2, 3\] is 48"):
            call()
    assert (out == 5).all()
