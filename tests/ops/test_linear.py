"""Linear layers and embeddings: the engine against the oracle and PyTorch, bits, places in memory, refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import retrograd as rg
from retrograd import LinearGradients, _core
from retrograd.lab import reference
from support.arrays import assert_same_bits, fenced, placed

Array = npt.NDArray[Any]

THREADS = (1, 2, 3, 7)
# Extents around lanes and panels (8 and 16), tiles (6 and 14), runs of sums (128 and 512), near rows (112).
EXTENTS = (0, 1, 2, 3, 5, 6, 7, 8, 9, 13, 14, 15, 16, 17, 31, 33, 63, 65, 113, 127, 129)


def roundings(terms: int) -> float:
    """Of a sum of products, in half units of the size of its terms; they are as often up as down."""
    return 8 + 2 * math.sqrt(terms)


def assert_close(got: Array, exact: Array, size: Array, count: float) -> None:
    """Within `count` roundings of numbers of that size."""
    info = np.finfo(got.dtype)
    tolerance = np.asarray(count * size, np.longdouble) * info.eps / 2 + info.tiny
    worst = np.max(np.abs(got - exact) / tolerance, initial=0)
    assert worst <= 1, f"{worst} of the tolerance"


def draw(rows: tuple[int, ...], inputs: int, outputs: int, dtype: Any, seed: int = 0) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed)
    shapes = ((*rows, inputs), (outputs, inputs), (outputs,), (*rows, outputs))
    x, w, b, dy = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return x, w, b, dy


def check_linear(x: Array, w: Array, b: Array | None, dy: Array, y: Array, gradients: LinearGradients) -> None:
    sizes = [np.abs(a) for a in (x, w, dy)]
    size_y = reference.linear_forward(sizes[0], sizes[1], None if b is None else np.abs(b))
    size_dx, size_dw, size_db = reference.linear_backward(sizes[2], sizes[0], sizes[1])
    dx, dw, db = reference.linear_backward(dy, x, w)
    assert_close(y, reference.linear_forward(x, w, b), size_y, roundings(w.shape[1]))
    assert gradients.dx is not None
    assert gradients.dw is not None
    assert gradients.db is not None
    assert_close(gradients.dx, dx, size_dx, roundings(w.shape[0]))
    assert_close(gradients.dw, dw, size_dw, roundings(math.prod(x.shape[:-1])))
    # In float64: of float32 there is one rounding, of float64 as many as of any sum.
    assert_close(gradients.db, db, size_db, 1.01 if x.dtype == np.float32 else roundings(math.prod(x.shape[:-1])))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        ((64,), 64, 64),
        ((1,), 64, 64),
        ((300,), 70, 101),
        ((3, 5, 7), 513, 33),
        ((), 9, 4),
        ((1100,), 16, 3),
        ((113,), 1025, 230),
        ((0,), 5, 3),
        ((4,), 0, 3),
        ((4,), 5, 0),
    ],
)
def test_linear_against_the_oracle(isa: str, dtype: Any, rows: tuple[int, ...], inputs: int, outputs: int) -> None:
    x, w, b, dy = draw(rows, inputs, outputs, dtype)
    check_linear(x, w, b, dy, rg.linear_forward(x, w, b), rg.linear_backward(dy, x, w))
    sizes = reference.linear_forward(np.abs(x), np.abs(w))
    assert_close(rg.linear_forward(x, w), reference.linear_forward(x, w), sizes, roundings(inputs))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(700, 100, 130), (40, 1500, 700), (3000, 33, 65), (600, 600, 5)])
def test_linear_same_bits_at_any_number_of_threads(isa: str, dtype: Any, shape: tuple[int, int, int]) -> None:
    if isa == "scalar" and dtype == np.float64:
        shape = (shape[0] // 2, shape[1], shape[2])
    x, w, b, dy = draw((shape[0],), shape[1], shape[2], dtype)
    results = []
    for threads in THREADS:
        y = rg.linear_forward(x, w, b, num_threads=threads)
        results.append((y, *rg.linear_backward(dy, x, w, num_threads=threads)))
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_linear_rows_do_not_depend_on_each_other(isa: str) -> None:
    """The bits of a row's results are the same alone, in a small batch and in a large one."""
    x, w, b, dy = draw((500,), 300, 90, np.float32)
    y, dx = rg.linear_forward(x, w, b), rg.linear_backward(dy, x, w, need="dx").dx
    assert dx is not None
    for part in (slice(0, 1), slice(17, 20), slice(100, 355)):
        assert_same_bits([rg.linear_forward(x[part], w, b)], [y[part]])
        assert_same_bits([rg.linear_backward(dy[part], x[part], w, need="dx").dx], [dx[part]])


PLACES = ("contiguous", "fortran", "reversed", "every other", "padded", "in a field")


@settings(max_examples=150, deadline=None)
@given(
    rows=st.one_of(
        st.sampled_from(EXTENTS).map(lambda n: (n,)), st.lists(st.integers(0, 5), max_size=3).map(lambda s: tuple(s))
    ),
    inputs=st.sampled_from(EXTENTS),
    outputs=st.sampled_from(EXTENTS),
    dtype=st.sampled_from([np.float32, np.float64]),
    places=st.lists(st.sampled_from(PLACES), min_size=7, max_size=7),
    accumulate=st.booleans(),
    level=st.sampled_from(_core.isa_levels()),
    seed=st.integers(0, 99),
)
def test_linear_any_shape_and_strides(
    rows: tuple[int, ...],
    inputs: int,
    outputs: int,
    dtype: Any,
    places: list[str],
    accumulate: bool,
    level: str,
    seed: int,
) -> None:
    _core.select_isa(level)
    x, w, b, dy = draw(rows, inputs, outputs, dtype, seed)
    plain_y, plain = rg.linear_forward(x, w, b), rg.linear_backward(dy, x, w)
    check_linear(x, w, b, dy, plain_y, plain)
    views = [placed(a, place) for a, place in zip((x, w, b, dy), places, strict=False)]
    y = placed(np.full_like(plain_y, np.nan), places[4])
    assert rg.linear_forward(*views[:3], out=y) is y
    assert_same_bits([y], [plain_y])
    start = [np.ones_like(a) if accumulate else np.full_like(a, np.nan) for a in (x, w, b)]
    out = LinearGradients(*(placed(a, place) for a, place in zip(start, places[4:], strict=True)))
    got = rg.linear_backward(views[3], *views[:2], out=out, accumulate=accumulate)
    assert all(a is b for a, b in zip(got, out, strict=True))
    if accumulate:
        fresh = LinearGradients(*(a.copy() for a in start))
        assert_same_bits(got, rg.linear_backward(dy, x, w, out=fresh, accumulate=True))
        unit = 2 * np.finfo(dtype).eps
        for sum_, added in zip(got, plain, strict=True):
            assert sum_ is not None
            assert added is not None
            np.testing.assert_allclose(sum_, 1 + added, rtol=200 * unit, atol=200 * unit)
    else:
        assert_same_bits(got, plain)


def test_linear_transposed_weights_are_used_where_they_lie() -> None:
    x, w, b, dy = draw((130,), 60, 75, np.float32)
    stored, stored_dw = np.ascontiguousarray(w.T), np.zeros((60, 75), np.float32)
    assert_same_bits([rg.linear_forward(x, stored.T, b)], [rg.linear_forward(x, w, b)])
    gradients = rg.linear_backward(dy, x, stored.T, out={"dw": stored_dw.T})
    assert_same_bits([stored_dw.T], [rg.linear_backward(dy, x, w).dw])
    assert gradients.dw is not None
    assert np.shares_memory(gradients.dw, stored_dw)


@pytest.mark.parametrize("at_end", [False, True])
def test_linear_and_embedding_stay_within_their_arrays(isa: str, at_end: bool) -> None:
    for rows, inputs, outputs in ((3, 5, 7), (17, 33, 9), (113, 70, 101)):
        arrays = draw((rows,), inputs, outputs, np.float32)
        x, w, b, dy = (fenced(a, at_end) for a in arrays)
        y = fenced(np.zeros((rows, outputs), np.float32), at_end)
        out = LinearGradients(*(fenced(np.zeros_like(a), at_end) for a in arrays[:3]))
        assert_same_bits([rg.linear_forward(x, w, b, out=y)], [rg.linear_forward(*arrays[:3])])
        assert_same_bits(rg.linear_backward(dy, x, w, out=out), rg.linear_backward(arrays[3], *arrays[:2]))
        indices = fenced(np.arange(rows) % outputs, at_end)
        embedded = fenced(np.zeros((rows, inputs), np.float32), at_end)
        rg.embedding_forward(indices, w, out=embedded)
        dtable = fenced(np.zeros((outputs, inputs), np.float32), at_end)
        rg.embedding_backward(embedded, indices, outputs, out=dtable)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_linear_poison_reaches_what_depends_on_it(isa: str, poison: float) -> None:
    x, w, b, dy = draw((20,), 40, 30, np.float32)
    x[3, 7] = poison
    y, gradients = rg.linear_forward(x, w, b), rg.linear_backward(dy, x, w)
    np.testing.assert_array_equal(np.argwhere(~np.isfinite(y).all(1)).ravel(), [3])
    assert not np.isfinite(y[3]).any()
    assert gradients.dx is not None
    assert gradients.dw is not None
    assert np.isfinite(gradients.dx).all()
    np.testing.assert_array_equal(np.argwhere(~np.isfinite(gradients.dw).all(0)).ravel(), [7])


def test_linear_against_torch(torch: Any) -> None:
    x, w, b, dy = draw((4, 9), 33, 21, np.float32)
    tensors = [torch.from_numpy(a.copy()).requires_grad_() for a in (x, w, b)]
    y = torch.nn.functional.linear(*tensors)
    y.backward(torch.from_numpy(dy))
    np.testing.assert_allclose(rg.linear_forward(x, w, b), y.detach().numpy(), rtol=1e-5, atol=1e-5)
    for ours, tensor in zip(rg.linear_backward(dy, x, w), tensors, strict=True):
        np.testing.assert_allclose(np.asarray(ours), tensor.grad.numpy(), rtol=1e-5, atol=2e-5)


def test_linear_need_and_mapping() -> None:
    x, w, _, dy = draw((6,), 5, 4, np.float64)
    whole = rg.linear_backward(dy, x, w)
    for name in LinearGradients._fields:
        part = rg.linear_backward(dy, x, w, need=[name])
        assert [key for key, value in part._asdict().items() if value is not None] == [name]
        assert_same_bits([getattr(part, name)], [getattr(whole, name)])
    buffer = np.empty_like(w)
    got = rg.linear_backward(dy, x, w, out={"dw": buffer})
    assert got.dw is buffer
    assert_same_bits(got, whole)
    # float32 sums of float64 precision: a small bias gradient among large ones is not lost
    dy32 = np.array([[1e8], [1.0], [-1e8]], np.float32)
    db = rg.linear_backward(dy32, np.ones((3, 2), np.float32), np.ones((1, 2), np.float32)).db
    np.testing.assert_array_equal(np.asarray(db), [1.0])


def test_linear_refusals() -> None:
    x, w, b, dy = draw((6,), 5, 4, np.float32)
    y = np.full((6, 4), 7, np.float32)

    def refused(error: type[Exception], words: str, call: Any) -> None:
        with pytest.raises(error, match=words):
            call()
        assert (y == 7).all()

    refused(ValueError, r"linear_forward: w has shape \(4, 5\), whose inputs are 5, but the last axis of x is 4",
            lambda: rg.linear_forward(x[:, :4], w, out=y))  # fmt: skip
    refused(ValueError, "w has shape .5,., must have 2 axes", lambda: rg.linear_forward(x, w[0], out=y))
    refused(ValueError, r"b has shape \(3,\), but w of shape \(4, 5\) needs \(4,\)",
            lambda: rg.linear_forward(x, w, b[:3], out=y))  # fmt: skip
    refused(TypeError, "w has dtype float64, must be float32 as x is",
            lambda: rg.linear_forward(x, w.astype(np.float64), out=y))  # fmt: skip
    refused(TypeError, "x has dtype float16; it must be float32 or float64",
            lambda: rg.linear_forward(x.astype(np.float16), w, out=y))  # fmt: skip
    refused(TypeError, "x is in non-native byte order", lambda: rg.linear_forward(x.astype(">f4"), w, out=y))
    refused(ValueError, r"out has shape \(6, 4\), the result has \(5, 4\)", lambda: rg.linear_forward(x[:5], w, out=y))
    refused(ValueError, "threads is 0", lambda: rg.linear_forward(x, w, out=y, num_threads=0))
    whole = np.zeros((6, 9), np.float32)
    refused(ValueError, "out .* overlaps x", lambda: rg.linear_forward(whole[:, :5], w, out=whole[:, 3:7]))
    rg.linear_forward(whole[:, :5], w, out=whole[:, 5:])  # beside each other is fine
    refused(ValueError, r"dy has shape \(6, 3\), but x of shape \(6, 5\) and w of shape \(4, 5\) need \(6, 4\)",
            lambda: rg.linear_backward(dy[:, :3], x, w))  # fmt: skip
    refused(
        ValueError, "need has 'dy'; the gradients are dx, dw, db", lambda: rg.linear_backward(dy, x, w, need=["dy"])
    )
    refused(ValueError, "out has 'dy'", lambda: rg.linear_backward(dy, x, w, out={"dy": dy}))
    refused(ValueError, "out has a buffer for dw, which need does not name",
            lambda: rg.linear_backward(dy, x, w, need=["dx"], out={"dw": w.copy()}))  # fmt: skip
    refused(ValueError, "accumulate=True adds to buffers, and out has none for dx",
            lambda: rg.linear_backward(dy, x, w, accumulate=True, out={"dw": w.copy()}))  # fmt: skip
    refused(ValueError, "out.dx .* overlaps x", lambda: rg.linear_backward(dy, x, w, out={"dx": x}))
    refused(TypeError, "out must be LinearGradients or a mapping, not ndarray",
            lambda: rg.linear_backward(dy, x, w, out=x))  # type: ignore[arg-type]  # fmt: skip


# ---- embeddings ------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), max_size=3).map(lambda s: tuple(s)),
    rows=st.integers(1, 9),
    width=st.sampled_from(EXTENTS),
    dtype=st.sampled_from([np.float32, np.float64]),
    integers=st.sampled_from([np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]),
    places=st.lists(st.sampled_from(PLACES), min_size=3, max_size=3),
    accumulate=st.booleans(),
    seed=st.integers(0, 99),
)
def test_embedding_against_numpy(
    shape: tuple[int, ...],
    rows: int,
    width: int,
    dtype: Any,
    integers: Any,
    places: list[str],
    accumulate: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    indices = np.asarray(rng.integers(0, rows, shape)).astype(integers)
    table = np.asarray(rng.standard_normal((rows, width)), dtype)
    y = placed(np.zeros((*shape, width), dtype), places[0])
    assert rg.embedding_forward(indices, placed(table, places[1]), out=y) is y
    np.testing.assert_array_equal(y, table[indices])
    dy = np.asarray(rng.standard_normal(y.shape), dtype)
    expected = np.ones_like(table) if accumulate else np.zeros_like(table)
    for position in np.ndindex(shape):
        expected[indices[position]] += dy[position]
    out = placed(np.ones_like(table), places[2])
    got = rg.embedding_backward(placed(dy, places[0]), indices, rows, out=out, accumulate=accumulate)
    assert got is out
    assert_same_bits([got], [expected])


@pytest.mark.parametrize("width", [1, 16, 50, 300])
def test_embedding_same_bits_at_any_number_of_threads(isa: str, width: int) -> None:
    rng = np.random.default_rng(width)
    indices, table = rng.integers(0, 50, 5000), rng.standard_normal((50, width), dtype=np.float32)
    dy = rng.standard_normal((5000, width), dtype=np.float32)
    results = [
        (rg.embedding_forward(indices, table, num_threads=t), rg.embedding_backward(dy, indices, 50, num_threads=t))
        for t in THREADS
    ]
    exact = reference.embedding_backward(dy, indices, 50)
    size = reference.embedding_backward(np.abs(dy), indices, 50)
    assert_close(results[0][1], exact, size, roundings(150))
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_embedding_refusals() -> None:
    table = np.ones((5, 3), np.float32)
    y = np.full((2, 2, 3), 7, np.float32)
    for value in (5, -1):
        with pytest.raises(ValueError, match=rf"embedding_forward: indices\[1, 0\] is {value}, but .* table are 5"):
            rg.embedding_forward(np.array([[0, 1], [value, 9]]), table, out=y)
    huge = np.array([[0, 1], [2**64 - 1, 0]], np.uint64)
    with pytest.raises(ValueError, match=r"indices\[1, 0\] is 18446744073709551615"):
        rg.embedding_forward(huge, table, out=y)
    assert (y == 7).all()
    dtable = np.full((5, 3), 7, np.float32)
    with pytest.raises(ValueError, match=r"embedding_backward: indices\[1\] is 5, but rows is 5"):
        rg.embedding_backward(np.ones((2, 3), np.float32), np.array([0, 5]), 5, out=dtable)
    assert (dtable == 7).all()
    with pytest.raises(TypeError, match="indices has dtype float64; it must be of integers"):
        rg.embedding_forward(np.array([1.0]), table)
    with pytest.raises(ValueError, match=r"table has shape \(5,\), must have 2 axes"):
        rg.embedding_forward(np.array([1]), table[:, 0])
    with pytest.raises(ValueError, match=r"dy has shape \(3, 3\), but indices of shape \(2,\)"):
        rg.embedding_backward(np.ones((3, 3), np.float32), np.array([0, 1]), 5)
    with pytest.raises(ValueError, match="accumulate=True adds to out, which is missing"):
        rg.embedding_backward(np.ones((1, 3), np.float32), np.array([0]), 5, accumulate=True)
    with pytest.raises(ValueError, match=r"out .* overlaps table"):
        rg.embedding_forward(np.array([0, 1]), table, out=table[1:3])
    with pytest.raises(ValueError, match=r"out .* overlaps dy"):
        rg.embedding_backward(dtable[:2], np.array([0, 1]), 5, out=dtable)
