"""Which arrays share memory: exact where it can be, in bounded time everywhere, and never a result over itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import retrograd as rg
from retrograd import _core, graph, nn
from retrograd.ops import _arrays

Array = np.ndarray[Any, Any]


def addresses(array: Array) -> set[int]:
    """Every byte of every element."""
    found: set[int] = set()
    for index in np.ndindex(array.shape):
        first = array.ctypes.data + sum(i * step for i, step in zip(index, array.strides, strict=True))
        found.update(range(first, first + array.itemsize))
    return found


@st.composite
def views(draw: st.DrawFn, memory: Array) -> Array:
    """A strided view of some bytes, of any layout that stays inside."""
    dtype = np.dtype(draw(st.sampled_from(["u1", "f2", "f4", "f8"])))
    extents = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    strides = [draw(st.integers(-24, 24)) for _ in extents]
    low = sum(min(0, (n - 1) * step) for n, step in zip(extents, strides, strict=True))
    high = sum(max(0, (n - 1) * step) for n, step in zip(extents, strides, strict=True)) + dtype.itemsize
    start = draw(st.integers(-low, max(-low, memory.size - high)))
    return np.ndarray(tuple(extents), dtype, memory, start, strides)


MEMORY = np.zeros(1024, np.uint8)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_overlap_of_two_is_exact(data: st.DataObject) -> None:
    a, b = data.draw(views(MEMORY)), data.draw(views(MEMORY))
    assert _arrays.overlaps(a, b) == (not addresses(a).isdisjoint(addresses(b)))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_overlap_among_many_is_exact(data: st.DataObject) -> None:
    """The way that marks memory, and the way that compares pairs, say the same as a look at every byte."""
    arrays = {str(i): data.draw(views(MEMORY)) for i in range(data.draw(st.integers(1, 24)))}
    results = {name: array for name, array in arrays.items() if data.draw(st.booleans())}
    inputs = {name: array for name, array in arrays.items() if name not in results}
    taken = {name: addresses(array) for name, array in arrays.items()}
    expected = any(not taken[name].isdisjoint(taken[other]) for name in results for other in arrays if name != other)
    found = _arrays.find_overlap(results, inputs)
    assert (found is not None) == expected
    if found is not None:
        assert found[0] in results
        assert not taken[found[0]].isdisjoint(taken[found[1]])


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_self_overlap_is_never_missed(data: st.DataObject) -> None:
    array = data.draw(views(MEMORY))
    if len(addresses(array)) < array.nbytes:
        assert _core.may_overlap_itself(array)


@pytest.mark.parametrize(
    "view",
    [
        np.zeros((5, 7), np.float32),
        np.zeros((5, 7), np.float32).T,
        np.zeros((5, 7), np.float32)[::-2, ::3],
        np.zeros((5, 7, 3, 2))[1:4, :, ::-1].transpose(2, 0, 3, 1),
        np.zeros((5, 1, 7))[:, :, :1],
        np.zeros((0, 3)),
        np.broadcast_to(np.float32(1), (1, 1)),
        as_strided(np.zeros(9), (3, 1), (8, 0)),
    ],
)
def test_ordinary_views_do_not_overlap_themselves(view: Array) -> None:
    assert not _core.may_overlap_itself(view)


def hard_pair() -> tuple[Array, Array]:
    """Two arrays whose strides make an exact answer take minutes."""
    memory = np.zeros(1 << 20, np.uint8)
    steps = (3571, 3581, 3583, 3593, 3607, 3613, 3617, 3623)
    a = as_strided(memory, (9,) * 8, steps)
    b = as_strided(memory[1:], (9,) * 8, tuple(step + 2 for step in steps))
    return a, b


def test_a_hard_pair_counts_as_an_overlap() -> None:
    a, b = hard_pair()
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(a, b, max_work=_arrays._MOST_WORK)
    assert _arrays.overlaps(a, b)
    assert _arrays.find_overlap({"a": a}, {"b": b}) == ("a", "b")


def test_many_interleaved_parameters_are_not_compared_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one matrix: the engine cannot tell them apart by their spans."""
    compared = []
    monkeypatch.setattr(_arrays, "overlaps", lambda a, b: compared.append((a, b)) or True)
    rng = np.random.default_rng(0)
    memory = rng.normal(size=(50, 400)).astype(np.float32)
    gradients = rng.normal(size=(400, 50)).astype(np.float32)
    expected = memory - np.float32(0.5) * gradients.T
    rg.sgd_step([memory[:, i] for i in range(400)], list(gradients), learning_rate=0.5)
    assert not compared
    np.testing.assert_array_equal(memory, expected)


def test_one_overlap_among_many_is_found_and_named() -> None:
    memory = np.ones((50, 400), np.float32)
    parameters = [memory[:, i] for i in range(400)]
    parameters[300] = memory[::-1, 17]
    before = memory.copy()
    with pytest.raises(ValueError, match=r"^sgd_step: parameters\[(17|300)\] .* overlaps parameters\[(17|300)\]"):
        rg.sgd_step(parameters, [np.ones(50, np.float32)] * 400, learning_rate=0.5)
    np.testing.assert_array_equal(memory, before)


@pytest.mark.parametrize("strides", [(4, 4), (8, 4), (4, 8), (196, 4), (0, 4), (-4, 4)])
def test_results_that_overlap_themselves_are_refused(strides: tuple[int, int]) -> None:
    memory = np.full(10_000, 7, np.float32)
    out = as_strided(memory[4000:], (50, 50), strides)
    x = np.ones((50, 50), np.float32)
    indices, w = np.zeros(50, np.int64), np.ones((50, 50), np.float32)
    for call in (
        lambda: rg.layer_norm_forward(x, out=out),
        lambda: rg.activation_forward(x, "relu", out=out),
        lambda: rg.linear_forward(x, w, out=out),
        lambda: rg.embedding_forward(indices, w, out=out),
        lambda: rg.embedding_backward(x, indices, 50, out=out),
        lambda: rg.dropout(x, 0.5, seed=1, out=out),
        lambda: rg.softmax_cross_entropy(x, indices, out=out),
        lambda: rg.mean_squared_error(x, w, out=out),
        lambda: rg.lstm_forward(
            np.ones((1, 50, 3), np.float32),
            rg.LstmWeights(np.ones((200, 3), np.float32), np.ones((200, 50), np.float32)),
            out={"hn": out},
        ),
    ):
        with pytest.raises(ValueError, match=r"^\w+: out(\.hn)? overlaps itself: with shape \(50, 50\) and strides"):
            call()
    with pytest.raises(ValueError, match=r"^sgd_step: parameters\[0\] overlaps itself"):
        rg.sgd_step([out], [x], learning_rate=0.1)
    assert (memory == 7).all()


def test_overlapping_results_of_no_samples_are_refused() -> None:
    """There is nothing to compute, but both buffers are still set to 0."""
    x = np.zeros((0, 3, 4), np.float32)
    _, cache = rg.batch_norm_forward(x, np.ones(3, np.float32), np.zeros(3, np.float32))
    one = np.full(3, 7, np.float32)
    with pytest.raises(ValueError, match=r"out\.dgamma .* overlaps out\.dbeta"):
        rg.batch_norm_backward(x, cache, out=rg.NormGradients(None, one, one))
    assert (one == 7).all()


def test_masked_arrays_are_refused() -> None:
    """NumPy would drop the mask, and the masked numbers would count."""
    masked = np.ma.masked_array(np.ones((4, 3), np.float32), mask=np.eye(4, 3))
    x, w, indices = np.ones((4, 3), np.float32), np.ones((3, 3), np.float32), np.zeros(4, np.int64)
    for call in (
        lambda: rg.batch_norm_forward(masked),
        lambda: rg.batch_norm_forward(x, gamma=masked[0]),
        lambda: rg.layer_norm_forward(x, out=masked),
        lambda: rg.activation_forward(masked, "relu"),
        lambda: rg.linear_forward(masked, w),
        lambda: rg.linear_forward(x, masked),
        lambda: rg.embedding_forward(np.ma.masked_array(indices, mask=[1, 0, 0, 0]), x),
        lambda: rg.dropout(masked, 0.5, seed=1),
        lambda: rg.softmax_cross_entropy(masked, indices),
        lambda: rg.mean_squared_error(x, masked),
        lambda: rg.sgd_step([masked], [x], learning_rate=0.1),
        lambda: rg.sgd_step([x], [masked], learning_rate=0.1),
        lambda: rg.global_norm([x, masked]),
        lambda: graph.linear(masked, w),
        lambda: rg.lstm_forward(
            np.ma.masked_array(np.ones((1, 2, 3), np.float32)),
            rg.LstmWeights(np.ones((16, 3), np.float32), np.ones((16, 4), np.float32)),
        ),
    ):
        with pytest.raises(TypeError, match=r"^\w+: \S+ is a masked array, whose mask would be ignored; pass "):
            call()
    model = nn.Linear(3, 2, rng=0)
    step = nn.compile(model, nn.MeanSquaredError(), nn.SGD(model, 0.1))
    before = model.state_dict()
    for call in (
        lambda: model(masked),
        lambda: model.predict(masked),
        lambda: step(masked, np.ones((4, 2))),
        lambda: step(x, np.ma.masked_array(np.ones((4, 2)))),
        lambda: nn.Embedding(4, 2)(np.ma.masked_array(indices)),
        lambda: graph.embedding(np.ma.masked_array(indices), x),
    ):
        with pytest.raises(TypeError, match=r"x is a masked array, whose mask would be ignored; pass x\.filled"):
            call()
    np.testing.assert_array_equal(model.w, before["w"])
    np.testing.assert_array_equal(masked.data, 1)
    np.testing.assert_array_equal(x, 1)
