"""The linear recurrence: the engine against the oracle, bits, places in memory, NaN, overlap, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import retrograd as rg
from retrograd import ScanGradients, _core
from retrograd.lab import reference
from support.arrays import MEMORY, assert_same_bits, assert_untouched_around, fenced, placed
from support.scan import check, check_gradients
from support.scan_values import CHECK, fill

Array = npt.NDArray[Any]

FLOATS = (np.float32, np.float64)
# Around lanes (8 and 16), the steps of a register (4), the columns of a transposed block (64) and of a task (1024).
EXTENTS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 33, 63, 64, 65, 67, 129)


def draw(shape: tuple[int, ...], axis: int, dtype: Any, a_shape: tuple[int, ...] | None = None, seed: int = 0) -> Any:
    """a, b, h0, dy, dhn; |a| < 1, so that long recurrences stay finite."""
    rng = np.random.default_rng(seed)
    state = tuple(extent for i, extent in enumerate(shape) if i != axis % len(shape))
    a = rng.uniform(-1, 1, shape if a_shape is None else a_shape)
    rest = (rng.standard_normal(s) for s in (shape, state, shape, state))
    return [np.asarray(v, dtype) for v in (a, *rest)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_check_values(isa: str, dtype: Any) -> None:
    a, b = (0.5 + fill((3, 2, 2), 2)).astype(dtype), fill((3, 2, 2), 6).astype(dtype)
    h0, dy, dhn = (v.astype(dtype) for v in (fill((2, 2), 5), 2 * fill((3, 2, 2), 4), fill((2, 2), 9)))
    y, hn, cache = rg.scan_forward(a, b, h0)
    gradients = rg.scan_backward(dy, cache, dhn=dhn)
    for name, got in {"y": y, **gradients._asdict()}.items():
        np.testing.assert_allclose(got.reshape(-1), CHECK[name], rtol=8 * np.finfo(dtype).eps, atol=1e-7, err_msg=name)
    np.testing.assert_array_equal(hn, y[-1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((7, 5, 3), 0), ((7, 5, 3), 1), ((7, 5, 3), 2), ((1, 6), 0), ((6, 1), 1), ((300,), 0), ((67, 3), 0),
        ((65, 2000), 0), ((130, 70), 1), ((3, 70, 66), -1), ((2, 33, 40), 1), ((5, 1025), 0), ((0, 5), 0), ((5, 0), 0),
        ((4, 3, 0, 2), 1), ((2, 3, 4, 5, 6), 2),
    ],
)  # fmt: skip
def test_against_the_oracle(isa: str, dtype: Any, shape: tuple[int, ...], axis: int) -> None:
    a, b, h0, dy, dhn = draw(shape, axis, dtype)
    for start, given_dy, last in ((h0, dy, dhn), (None, dy, None), (h0, None, dhn)):
        got = rg.scan_forward(a, b, start, axis=axis)
        check(got, a, b, start, axis=axis)
        gradients = rg.scan_backward(given_dy, got.cache, dhn=last, need=("da", "db", "dh0"))
        check_gradients(gradients, given_dy, last, a, got.y, start, axis=axis)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "a_shape", [(), (1,), (6,), (5, 1), (5, 6), (9, 1, 1), (9, 5, 1), (1, 5, 6), (1, 1, 6), (9, 1, 6)]
)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_broadcast_factors(isa: str, dtype: Any, a_shape: tuple[int, ...], axis: int) -> None:
    a, b, h0, dy, dhn = draw((9, 5, 6), axis, dtype, a_shape)
    got = rg.scan_forward(a, b, h0, axis=axis)
    full = np.ascontiguousarray(np.broadcast_to(a, b.shape))
    assert_same_bits(got[:2], rg.scan_forward(full, b, h0, axis=axis)[:2])
    gradients = rg.scan_backward(dy, got.cache, dhn=dhn)
    check_gradients(gradients, dy, dhn, a, got.y, h0, axis=axis)
    start = ScanGradients(*(np.full_like(v, 2) for v in (a, b, h0)))
    added = rg.scan_backward(dy, got.cache, dhn=dhn, out=start, accumulate=True)
    for sum_, part in zip(added, gradients, strict=True):
        np.testing.assert_allclose(sum_, 2 + part, rtol=4 * np.finfo(dtype).eps, atol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reset_shape", [(9, 5, 6), (9, 1, 1), (5, 1), (9, 5, 1), (), (1, 6)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_resets(isa: str, dtype: Any, reset_shape: tuple[int, ...], axis: int) -> None:
    a, b, h0, dy, dhn = draw((9, 5, 6), axis, dtype)
    reset = np.random.default_rng(5).random(reset_shape) < 0.4
    got = rg.scan_forward(a, b, h0, axis=axis, reset=reset)
    masked = np.where(reset, dtype(0), a)
    assert_same_bits(got[:2], rg.scan_forward(masked, b, h0, axis=axis)[:2])
    gradients = rg.scan_backward(dy, got.cache, dhn=dhn)
    check_gradients(gradients, dy, dhn, a, got.y, h0, axis=axis, reset=reset)
    assert gradients.da is not None
    assert not gradients.da[np.broadcast_to(reset, b.shape)].any()


def test_factors_without_axes_of_extent_1(isa: str) -> None:
    a, b, h0, dy, dhn = draw((1, 5, 6), 1, np.float32, (5, 6))
    got = rg.scan_forward(a, b, h0, axis=1)
    gradients = rg.scan_backward(dy, got.cache, dhn=dhn, out={"da": np.empty((5, 6), np.float32)})
    check_gradients(gradients, dy, dhn, a, got.y, h0, axis=1)


def test_a_reset_starts_a_sequence() -> None:
    a, b, h0, *_ = draw((40, 7), 0, np.float32)
    reset = np.zeros((40, 1), bool)
    reset[23] = True
    y = rg.scan_forward(a, b, h0, reset=reset).y
    parts = [rg.scan_forward(a[:23], b[:23], h0).y, rg.scan_forward(a[23:], b[23:]).y]
    assert_same_bits([y], [np.concatenate(parts)])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "axis"), [((300, 1500), 0), ((1200, 300), 1), ((7, 100, 500), 1), ((90, 3, 64, 9), 0)]
)
def test_same_bits_at_any_thread_count_and_cache_size(isa: str, dtype: Any, shape: tuple[int, ...], axis: int) -> None:
    """With tiny caches results are streamed."""
    a, b, h0, dy, dhn = draw(shape, axis, dtype)
    results = []
    try:
        for threads, last_level in ((1, 0), (2, 0), (7, 0), (1, 1 << 16), (2, 1 << 16)):
            _core.override_caches(0, 0, last_level, 1)
            got = rg.scan_forward(a, b, h0, axis=axis, num_threads=threads)
            gradients = rg.scan_backward(dy, got.cache, dhn=dhn, num_threads=threads)
            shared = rg.scan_forward(a[:1], b, axis=axis, num_threads=threads)
            results.append((*got[:2], *gradients, *rg.scan_backward(dy, shared.cache, num_threads=threads)))
    finally:
        _core.restore_caches()
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_columns_do_not_depend_on_each_other(isa: str) -> None:
    a, b, h0, dy, dhn = draw((50, 1100), 0, np.float32)
    whole = rg.scan_forward(a, b, h0)
    gradients = rg.scan_backward(dy, whole.cache, dhn=dhn)
    for part in (slice(0, 1), slice(17, 20), slice(100, 355)):
        some = rg.scan_forward(a[:, part], b[:, part], h0[part])
        assert_same_bits([some.y], [whole.y[:, part]])
        found = rg.scan_backward(dy[:, part], some.cache, dhn=dhn[part])
        assert_same_bits(found, [gradients[0][:, part], gradients[1][:, part], gradients[2][part]])


def test_time_split_in_two(isa: str) -> None:
    a, b, h0, dy, dhn = draw((50, 37), 0, np.float32)
    whole = rg.scan_forward(a, b, h0)
    gradients = rg.scan_backward(dy, whole.cache, dhn=dhn)
    first = rg.scan_forward(a[:21], b[:21], h0)
    second = rg.scan_forward(a[21:], b[21:], first.hn)
    assert_same_bits([np.concatenate([first.y, second.y]), second.hn], whole[:2])
    late = rg.scan_backward(dy[21:], second.cache, dhn=dhn)
    early = rg.scan_backward(dy[:21], first.cache, dhn=late.dh0)
    # The state between the parts is rounded once more on its way back.
    for got, right in zip((*zip(early[:2], late[:2], strict=True), early[2]), gradients, strict=True):
        joined = np.concatenate(got) if isinstance(got, tuple) else got
        np.testing.assert_allclose(joined, right, rtol=1e-4, atol=1e-6)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.sampled_from(EXTENTS),
    rest=st.lists(st.sampled_from((0, 1, 2, 3, 5, 9, 17, 33, 70)), max_size=2),
    where=st.integers(0, 2),
    dtype=st.sampled_from(FLOATS),
    places=st.lists(st.sampled_from(MEMORY), min_size=10, max_size=10),
    accumulate=st.booleans(),
    resets=st.booleans(),
    level=st.sampled_from(_core.isa_levels()),
    threads=st.sampled_from((1, 2)),
    seed=st.integers(0, 99),
)
def test_any_shape_and_strides(
    steps: int,
    rest: list[int],
    where: int,
    dtype: Any,
    places: list[str],
    accumulate: bool,
    resets: bool,
    level: str,
    threads: int,
    seed: int,
) -> None:
    _core.select_isa(level)
    axis = min(where, len(rest))
    shape = (*rest[:axis], steps, *rest[axis:])
    a, b, h0, dy, dhn = draw(shape, axis, dtype, seed=seed)
    reset = np.random.default_rng(seed).random(shape) < 0.3 if resets else None
    plain = rg.scan_forward(a, b, h0, axis=axis, reset=reset)
    check(plain, a, b, h0, axis=axis, reset=reset)
    expected = rg.scan_backward(dy, plain.cache, dhn=dhn)
    check_gradients(expected, dy, dhn, a, plain.y, h0, axis=axis, reset=reset)

    def put(array: Array, place: str) -> Array:
        if not array.ndim:
            return array.copy()
        return placed(array, place, list(np.random.default_rng(seed).permutation(array.ndim)))

    views = [put(v, place) for v, place in zip((a, b, h0, dy, dhn), places, strict=False)]
    out = {"y": put(np.full_like(b, np.nan), places[5]), "hn": put(np.full_like(h0, np.nan), places[6])}
    got = rg.scan_forward(*views[:3], axis=axis, reset=reset, out=out, num_threads=threads)
    assert got.y is out["y"]
    assert got.hn is out["hn"]
    assert_same_bits(got[:2], plain[:2])
    start = [np.ones_like(v) if accumulate else np.full_like(v, np.nan) for v in (a, b, h0)]
    buffers = ScanGradients(*(put(v, place) for v, place in zip(start, places[7:], strict=True)))
    found = rg.scan_backward(views[3], got.cache, dhn=views[4], out=buffers, accumulate=accumulate, num_threads=threads)
    assert all(one is other for one, other in zip(found, buffers, strict=True))
    if accumulate:
        assert_same_bits(found, [np.asarray(1 + v) for v in expected])
    else:
        assert_same_bits(found, expected)
    for view, place in zip((*out.values(), *buffers), places[5:], strict=True):
        if place == "padded" and view.ndim:
            assert_untouched_around(view)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((33, 67), 0), ((67, 33), 1), ((5, 19, 7), 1), ((77,), 0)])
def test_reads_nothing_outside(isa: str, at_end: bool, shape: tuple[int, ...], axis: int) -> None:
    arrays = draw(shape, axis, np.float32)
    a, b, h0, dy, dhn = (fenced(v, at_end) for v in arrays)
    reset = fenced(np.random.default_rng(1).random(shape) < 0.5, at_end)
    got = rg.scan_forward(a, b, h0, axis=axis, reset=reset, out={"y": fenced(b, at_end), "hn": fenced(h0, at_end)})
    out = ScanGradients(*(fenced(v, at_end) for v in (a, b, h0)))
    rg.scan_backward(dy, got.cache, dhn=dhn, out=out)
    expected = rg.scan_forward(*arrays[:3], axis=axis, reset=reset.copy())
    assert_same_bits([*got[:2], *out], [*expected[:2], *rg.scan_backward(dy, expected.cache, dhn=dhn)])


def test_nan_and_infinity_travel(isa: str) -> None:
    a, b, h0, dy, dhn = draw((9, 20), 0, np.float32)
    b[3, 2], b[4, 5], a[5, 7], a[6, 8] = np.nan, np.inf, np.nan, np.inf
    h0[9], dy[4, 3], dhn[11] = -np.inf, np.nan, np.inf
    with np.errstate(invalid="ignore"):
        y, _ = reference.scan_forward(a, b, h0)
        got = rg.scan_forward(a, b, h0)
        gradients = rg.scan_backward(dy, got.cache, dhn=dhn)
        exact = reference.scan_backward(dy, dhn, a, y, h0)
    for one, other in zip((got.y, *gradients), (y, *exact), strict=True):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        np.testing.assert_array_equal(np.isposinf(one), np.isposinf(other))
        np.testing.assert_array_equal(np.isneginf(one), np.isneginf(other))


def test_signed_zeros(isa: str) -> None:
    """A gradient of -0 at the last step stays -0; a zero state and a zero input make +0."""
    one, zero = np.ones((1, 3), np.float32), np.array([[0.0, -0.0, 2.0]], np.float32)
    got = rg.scan_forward(one, zero)
    np.testing.assert_array_equal(np.signbit(got.y), [[False, False, False]])
    db = rg.scan_backward(zero, got.cache).db
    assert db is not None
    np.testing.assert_array_equal(np.signbit(db), [[False, True, False]])


def test_need_and_defaults() -> None:
    a, b, h0, dy, _ = draw((6, 5), 0, np.float32)
    with_state, without = rg.scan_forward(a, b, h0).cache, rg.scan_forward(a, b).cache
    assert rg.scan_backward(dy, with_state).dh0 is not None
    assert rg.scan_backward(dy, without).dh0 is None
    full = rg.scan_backward(dy, with_state)
    for name in ("da", "db", "dh0"):
        only = rg.scan_backward(dy, with_state, need=name)
        assert [field for field in only._fields if getattr(only, field) is not None] == [name]
        assert_same_bits([getattr(only, name)], [getattr(full, name)])


def test_in_place(isa: str) -> None:
    for axis in (0, 1):
        a, b, h0, dy, dhn = draw((33, 70), axis, np.float32)
        expected = rg.scan_forward(a, b, h0, axis=axis)
        gradients = rg.scan_backward(dy, expected.cache, dhn=dhn)
        y = b.copy()
        assert rg.scan_forward(a, y, h0, axis=axis, out=y).y is y
        assert_same_bits([y], [expected.y])
        db = dy.copy()
        found = rg.scan_backward(db, expected.cache, dhn=dhn, out={"db": db})
        assert found.db is db
        assert_same_bits(found, gradients)


def test_overlap_is_refused() -> None:
    a, b, h0, dy, _ = draw((6, 6), 0, np.float32)
    before = [v.copy() for v in (a, b, h0)]
    for out in (a, {"hn": h0}, b[::-1], {"y": b, "hn": b[0]}):
        with pytest.raises(ValueError, match=r"scan_forward: out\.\w+ .*overlaps"):
            rg.scan_forward(a, b, h0, out=out)
    cache = rg.scan_forward(a, b, h0).cache
    shared = rg.scan_forward(a[:1], b, h0).cache
    for out in ({"da": a}, {"db": a}, {"da": dy}, {"db": dy[::-1]}, {"da": cache.y}, {"da": dy, "db": dy}):
        with pytest.raises(ValueError, match=r"scan_backward: out\.\w+ .*overlaps"):
            rg.scan_backward(dy, cache, out=out)
    with pytest.raises(ValueError, match=r"scan_backward: out\.da .*overlaps a"):
        rg.scan_backward(dy, shared, out={"da": a[:1]})
    assert_same_bits([a, b, h0], before)
    rg.scan_backward(dy, cache, out={"da": np.empty((6, 12), np.float32)[:, ::2]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": np.ones((4, 5), np.float32)}, r"a has shape \(4, 5\), which cannot be broadcast to the shape \(6, 5\)"),
        ({"a": np.ones((1, 6, 5), np.float32)}, r"a has shape \(1, 6, 5\), which cannot be broadcast"),
        ({"a": np.ones((6, 5))}, "a has dtype float64, must be float32 as b is"),
        ({"b": np.ones((6, 5), np.int32)}, "b has dtype int32; it must be float32 or float64"),
        ({"h0": np.ones(6, np.float32)}, r"h0 has shape \(6,\), but b of shape \(6, 5\) has \(5,\) without axis 0"),
        ({"h0": np.ones(5)}, "h0 has dtype float64, must be float32 as b is"),
        ({"axis": 2}, "axis is 2, but b has 2 axes"),
        ({"axis": 0.5}, "axis must be an int, not float"),
        ({"b": np.float32(1), "a": np.float32(1), "h0": None}, "axis is 0, but b has 0 axes"),
        ({"reset": np.zeros((6, 5), np.uint8)}, "reset has dtype uint8; it must be bool"),
        ({"reset": np.zeros((7, 5), bool)}, r"reset has shape \(7, 5\), which cannot be broadcast"),
        ({"out": np.ones((5, 6), np.float32)}, r"out\.y has shape \(5, 6\), the result has \(6, 5\)"),
        ({"out": {"cn": None}}, "out has 'cn'; the results are y, hn"),
        ({"out": {"hn": np.ones(4, np.float32)}}, r"out\.hn has shape \(4,\), the result has \(5,\)"),
        ({"num_threads": 0}, "the number of threads is 0, must be at least 1"),
    ],
)  # fmt: skip
def test_forward_refusals(change: dict[str, Any], message: str) -> None:
    a, b, h0, *_ = draw((6, 5), 0, np.float32)
    with pytest.raises((TypeError, ValueError), match=f"^scan_forward: {message}"):
        rg.scan_forward(**{"a": a, "b": b, "h0": h0, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dy": np.ones((5, 6), np.float32)}, r"dy has shape \(5, 6\), but y has shape \(6, 5\)"),
        ({"dy": np.ones((6, 5))}, "dy has dtype float64, must be float32"),
        ({"dhn": np.ones(6, np.float32)}, r"dhn has shape \(6,\), but hn has shape \(5,\)"),
        ({"cache": None}, "cache must be what scan_forward returned, not NoneType"),
        ({"need": "dx"}, "need has 'dx'; the gradients are da, db, dh0"),
        ({"accumulate": True}, "accumulate=True adds to buffers, and out has none for da"),
        ({"out": {"dx": None}}, "out has 'dx'; the gradients are da, db, dh0"),
        ({"out": {"da": np.ones(5, np.float32)}}, r"out\.da has shape \(5,\), the result has \(6, 5\)"),
        ({"need": "db", "out": {"da": np.ones((6, 5), np.float32)}}, "out has a buffer for da, which need"),
    ],
)  # fmt: skip
def test_backward_refusals(change: dict[str, Any], message: str) -> None:
    a, b, h0, dy, _ = draw((6, 5), 0, np.float32)
    cache = rg.scan_forward(a, b, h0).cache
    with pytest.raises((TypeError, ValueError), match=f"^scan_backward: {message}"):
        rg.scan_backward(**{"dy": dy, "cache": cache, **change})


def test_exponential_smoothing_needs_no_memory_for_a(isa: str) -> None:
    """A scalar factor: y = (1 - s) y[t-1] + s x[t]."""
    x = np.random.default_rng(0).standard_normal((500, 3)).astype(np.float32)
    keep = np.float32(0.9)
    y, _, cache = rg.scan_forward(keep, (1 - keep) * x)
    check_y, _ = reference.scan_forward(np.asarray(keep), (1 - keep) * x)
    np.testing.assert_allclose(y, check_y, rtol=1e-5, atol=1e-6)
    da = rg.scan_backward(np.ones_like(y), cache).da
    assert da is not None
    assert da.shape == ()
    check_gradients(rg.scan_backward(np.ones_like(y), cache), np.ones_like(y), None, np.asarray(keep), y)


@pytest.mark.parametrize("reverse", [False, True])
def test_against_jax_and_torch(reverse: bool) -> None:
    """Outsiders: jax.lax.scan with its gradients, and a loop in PyTorch with autograd."""
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    a, b, h0, dy, dhn = draw((30, 4, 5), 0, np.float32)
    view = np.s_[::-1] if reverse else np.s_[:]
    y, hn, cache = rg.scan_forward(a[view], b[view], h0)
    gradients = rg.scan_backward(dy[view], cache, dhn=dhn)

    def step(h: Any, t: Any) -> Any:
        h = t[0] * h + t[1]
        return h, h

    def run(a: Any, b: Any, h0: Any) -> Any:
        last, states = jax.lax.scan(step, h0, (a, b), reverse=reverse)
        return states, last

    states, back = jax.vjp(run, a, b, h0)
    expected = back((jax.numpy.asarray(dy), jax.numpy.asarray(dhn)))
    for got, right in zip((y[view], hn), states, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)
    for got, right in zip((gradients[0][view], gradients[1][view], gradients[2]), expected, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)

    tensors = [torch.tensor(np.ascontiguousarray(v), requires_grad=True) for v in (a[view], b[view], h0)]
    h, rows = tensors[2], []
    for one, other in zip(tensors[0], tensors[1], strict=True):
        h = one * h + other
        rows.append(h)
    total = (torch.stack(rows) * torch.tensor(np.ascontiguousarray(dy[view]))).sum() + (h * torch.tensor(dhn)).sum()
    total.backward()
    np.testing.assert_allclose(y, torch.stack(rows).detach(), rtol=1e-5, atol=1e-6)
    for got, tensor in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(got, tensor.grad, rtol=1e-4, atol=1e-5)


def test_tensors_come_back() -> None:
    torch = pytest.importorskip("torch")
    a, b, h0, dy, _ = (torch.from_numpy(v) for v in draw((6, 5), 0, np.float32))
    y, hn, cache = rg.scan_forward(a, b, h0)
    assert isinstance(y, torch.Tensor)
    assert isinstance(hn, torch.Tensor)
    da = rg.scan_backward(dy, cache).da
    assert isinstance(da, torch.Tensor)
