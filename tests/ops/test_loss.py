"""Losses and their gradients: the engine against the oracle and PyTorch, bits, places in memory, refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import retrograd as rg
from retrograd import _core
from retrograd.lab import reference
from support.arrays import assert_same_bits, fenced, placed

Array = npt.NDArray[Any]

THREADS = (1, 2, 3, 7)
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 101, 257)
PLACES = ("contiguous", "fortran", "reversed", "every other", "padded", "in a field")
# In units of the last place: the exponential has about one, the difference before it half of one for each of its own
# size, the sum none in float32 and a few in float64.
ROUNDINGS = 4.0


def draw_logits(shape: tuple[int, ...], dtype: Any, seed: int, spread: float = 3.0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal(shape)).astype(dtype)
    labels = rng.integers(0, shape[-1], shape[:-1])
    return logits, np.where(rng.random(labels.shape) < 0.1, -100, labels)


def check_cross_entropy(
    logits: Array, labels: Array, smoothing: float, reduction: str, loss: float | Array, gradient: Array | None
) -> None:
    """Errors count by the size of the probabilities, and at the label by that of what is left of it: 1 - p."""
    exact, slope = reference.softmax_cross_entropy(logits, labels, label_smoothing=smoothing)
    kept, eps, classes = labels != -100, np.finfo(logits.dtype).eps, logits.shape[-1]
    weight = 1 / max(kept.sum(), 1) if reduction == "mean" else 1.0
    distance = np.abs(logits - logits.max(-1, keepdims=True)).astype(float)
    tolerance = ROUNDINGS * eps * (1 + np.abs(exact) + distance.mean(-1) * smoothing)
    if reduction == "none":
        assert isinstance(loss, np.ndarray)
        assert (loss.shape, loss.dtype) == (labels.shape, logits.dtype)
        assert (np.abs(loss - exact) <= tolerance).all()
    else:
        assert type(loss) is float
        total = (
            exact.sum() / (kept.sum() if reduction == "mean" else 1) if kept.any() or reduction == "sum" else math.nan
        )
        np.testing.assert_allclose(loss, float(total), rtol=0, atol=float(tolerance.sum() * weight))
    if gradient is None:
        return
    one_hot = np.zeros(logits.shape, bool)
    for position in map(tuple, np.argwhere(kept)):
        one_hot[position][labels[position]] = True
    probability = np.asarray(slope, float) + smoothing / classes + (1 - smoothing) * one_hot
    others = np.where(one_hot, 0, probability).sum(-1, keepdims=True)
    reach = np.where(one_hot, others * (1 + distance.max(-1, keepdims=True)), probability * (1 + distance))
    bound = ROUNDINGS * eps * (reach + smoothing) + classes * np.finfo(float).eps
    # Softmax cross entropy of one class is constant: what is left is the rounding of nothing.
    assert (np.abs(gradient - weight * slope) <= weight * bound + np.finfo(logits.dtype).tiny)[kept].all()
    assert (gradient[~kept] == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_against_the_oracle(isa: str, dtype: Any, reduction: Any, smoothing: float) -> None:
    for shape in ((40, 10), (7, 5, 33), (3, 1000), (1,), (17,), (5, 1), (0, 4)):
        logits, labels = draw_logits(shape, dtype, sum(shape))
        options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
        loss, gradient = rg.softmax_cross_entropy(logits, labels, **options)
        check_cross_entropy(logits, labels, smoothing, reduction, loss, gradient)
        without, none = rg.softmax_cross_entropy(logits, labels, want_gradient=False, **options)
        assert none is None
        np.testing.assert_array_equal(without, loss)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.integers(0, 6), max_size=3).map(lambda s: tuple(s)),
    classes=st.sampled_from(COUNTS),
    dtype=st.sampled_from([np.float32, np.float64]),
    places=st.lists(st.sampled_from(PLACES), min_size=2, max_size=2),
    smoothing=st.sampled_from([0.0, 0.2]),
    spread=st.sampled_from([0.1, 3.0, 50.0]),
    level=st.sampled_from(_core.isa_levels()),
    seed=st.integers(0, 99),
)
def test_cross_entropy_any_shape_and_strides(
    rows: tuple[int, ...],
    classes: int,
    dtype: Any,
    places: list[str],
    smoothing: float,
    spread: float,
    level: str,
    seed: int,
) -> None:
    _core.select_isa(level)
    logits, labels = draw_logits((*rows, classes), dtype, seed, spread)
    loss, gradient = rg.softmax_cross_entropy(logits, labels, label_smoothing=smoothing)
    check_cross_entropy(logits, labels, smoothing, "mean", loss, gradient)
    view = placed(logits, places[0])
    out = placed(np.zeros_like(logits), places[1])
    again, elsewhere = rg.softmax_cross_entropy(view, labels.astype(np.int16), label_smoothing=smoothing, out=out)
    assert elsewhere is out
    np.testing.assert_array_equal(again, loss)
    assert_same_bits([elsewhere], [gradient])
    _, in_place = rg.softmax_cross_entropy(view, labels, label_smoothing=smoothing, out=view)
    assert in_place is view
    assert_same_bits([in_place], [gradient])


def test_cross_entropy_same_bits_at_any_number_of_threads(isa: str) -> None:
    logits, labels = draw_logits((700, 101), np.float32, 0)
    results = [rg.softmax_cross_entropy(logits, labels, label_smoothing=0.1, num_threads=t) for t in THREADS]
    for loss, gradient in results[1:]:
        assert loss == results[0][0]
        assert_same_bits([gradient], [results[0][1]])


def test_cross_entropy_of_the_confident_keeps_its_digits(isa: str) -> None:
    """Where p is almost 1, 1 - p is what is learnt from."""
    logits = np.array([[0, 30, 2], [200, 0, 0]], np.float32)
    loss, gradient = rg.softmax_cross_entropy(logits, np.array([1, 0]), reduction="sum")
    assert gradient is not None
    others = math.exp(-30) + math.exp(-28)
    assert loss == pytest.approx(math.log1p(others), rel=1e-3)  # float64 has no more digits of log(1 + 1e-12)
    assert gradient[0, 1] == pytest.approx(-others, rel=1e-3)
    np.testing.assert_array_equal(gradient[1], [0, 0, 0])


def test_cross_entropy_against_torch(torch: Any) -> None:
    logits, labels = draw_logits((50, 37), np.float32, 5)
    for smoothing in (0.0, 0.1):
        for reduction in ("mean", "sum"):
            tensor = torch.from_numpy(logits.copy()).requires_grad_()
            theirs = torch.nn.functional.cross_entropy(
                tensor, torch.from_numpy(labels), label_smoothing=smoothing, reduction=reduction
            )
            theirs.backward()
            loss, gradient = rg.softmax_cross_entropy(logits, labels, label_smoothing=smoothing, reduction=reduction)
            assert loss == pytest.approx(theirs.item(), rel=1e-5)
            np.testing.assert_allclose(np.asarray(gradient), tensor.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_cross_entropy_of_nothing_and_of_poison(isa: str, torch: Any) -> None:
    """All ignored: NaN as in PyTorch, and no gradient. Infinite and NaN logits: as in PyTorch."""
    logits, _ = draw_logits((3, 20), np.float32, 1)
    ignored = np.full(3, -100)
    loss, gradient = rg.softmax_cross_entropy(logits, ignored)
    assert math.isnan(float(loss))
    assert gradient is not None
    assert not gradient.any()
    assert rg.softmax_cross_entropy(logits, ignored, reduction="sum")[0] == 0
    labels = np.array([0, 1, 2])
    logits[0, 5], logits[1, 19], logits[2, 2] = math.nan, -math.inf, -math.inf
    losses, gradient = rg.softmax_cross_entropy(logits, labels, reduction="none")
    assert isinstance(losses, np.ndarray)
    assert gradient is not None
    tensor = torch.from_numpy(logits.copy()).requires_grad_()
    theirs = torch.nn.functional.cross_entropy(tensor, torch.from_numpy(labels), reduction="none")
    theirs.sum().backward()
    np.testing.assert_allclose(losses, theirs.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-4, atol=1e-6)
    assert np.isnan(gradient[0]).all()
    assert gradient[1, 19] == 0
    assert losses[2] == math.inf


def test_cross_entropy_refusals() -> None:
    logits, labels = draw_logits((4, 6), np.float32, 2)
    labels[:] = [0, 1, 2, 3]
    out = np.full((4, 6), 7, np.float32)
    bad = labels.copy()
    bad[2] = 6
    with pytest.raises(ValueError, match=r"softmax_cross_entropy: labels\[2\] is 6, but the classes of logits are 6"):
        rg.softmax_cross_entropy(logits, bad, out=out)
    bad[2] = -100
    with pytest.raises(ValueError, match=r"labels\[2\] is -100, .* and ignore_index is -1"):
        rg.softmax_cross_entropy(logits, bad, ignore_index=-1, out=out)
    with pytest.raises(ValueError, match=r"labels has shape \(3,\), but logits of shape \(4, 6\) need \(4,\)"):
        rg.softmax_cross_entropy(logits, labels[:3], out=out)
    with pytest.raises(TypeError, match="labels has dtype float64; it must be of integers"):
        rg.softmax_cross_entropy(logits, labels.astype(float), out=out)
    with pytest.raises(ValueError, match=r"label_smoothing is 1.5, must be from 0 to 1"):
        rg.softmax_cross_entropy(logits, labels, label_smoothing=1.5, out=out)
    with pytest.raises(ValueError, match="reduction is 'avg'; there are 'mean', 'sum', 'none'"):
        rg.softmax_cross_entropy(logits, labels, reduction="avg", out=out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out is given, but want_gradient is not set"):
        rg.softmax_cross_entropy(logits, labels, want_gradient=False, out=out)
    with pytest.raises(TypeError, match="logits has dtype int64; it must be float32 or float64"):
        rg.softmax_cross_entropy(logits.astype(np.int64), labels, out=out)
    assert (out == 7).all()
    whole = np.zeros((5, 6), np.float32)
    with pytest.raises(ValueError, match=r"out .* overlaps logits"):
        rg.softmax_cross_entropy(whole[:4], labels, out=whole[1:])
    wide = np.zeros((4, 9), np.float32)
    with pytest.raises(ValueError, match=r"out .* overlaps logits"):
        rg.softmax_cross_entropy(wide[:, :6], labels, out=wide[:, 3:])


# ---- differences -----------------------------------------------------------------------------------------------------

DIFFERENCES: list[tuple[str, dict[str, float]]] = [
    ("mean_squared_error", {}),
    ("huber", {}),
    ("huber", {"delta": 0.3}),
]


@pytest.mark.parametrize(("name", "options"), DIFFERENCES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_difference_losses_against_the_oracle(
    isa: str, name: str, options: dict[str, float], dtype: Any, reduction: str
) -> None:
    rng = np.random.default_rng(0)
    for shape in ((), (1,), (5, 7), (257,), (3, 0), (20011,)):
        y, target = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
        loss, gradient = getattr(rg, name)(y, target, reduction=reduction, **options)
        exact, slope = getattr(reference, name)(y, target, **options)
        count = max(y.size, 1)
        weight = 1 / count if reduction == "mean" else 1.0
        unit = np.finfo(dtype).eps
        assert (np.abs(gradient - weight * slope) <= 2 * unit * weight * np.abs(slope)).all()
        if reduction == "none":
            assert (loss.shape, loss.dtype) == (y.shape, y.dtype)
            assert (np.abs(loss - exact) <= 3 * unit * np.abs(exact)).all()
        else:
            assert type(loss) is float
            total = math.nan if reduction == "mean" and not y.size else float(exact.sum() * weight)
            # Sums are in float64 whatever the data.
            np.testing.assert_allclose(loss, total, rtol=3 * unit + math.sqrt(count) * np.finfo(float).eps)
        without, none = getattr(rg, name)(y, target, reduction=reduction, want_gradient=False, **options)
        assert none is None
        np.testing.assert_array_equal(without, loss)


@settings(max_examples=80, deadline=None)
@given(
    case=st.sampled_from(DIFFERENCES),
    shape=st.one_of(
        st.sampled_from(COUNTS).map(lambda n: (n,)),
        st.lists(st.integers(0, 9), min_size=1, max_size=3).map(lambda s: tuple(s)),
    ),
    dtype=st.sampled_from([np.float32, np.float64]),
    places=st.lists(st.sampled_from(PLACES), min_size=3, max_size=3),
    level=st.sampled_from(_core.isa_levels()),
    seed=st.integers(0, 99),
)
def test_difference_losses_any_shape_and_strides(
    case: tuple[str, dict[str, float]], shape: tuple[int, ...], dtype: Any, places: list[str], level: str, seed: int
) -> None:
    _core.select_isa(level)
    rng = np.random.default_rng(seed)
    function, options = getattr(rg, case[0]), case[1]
    y, target = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    loss, gradient = function(y, target, **options)
    views = [placed(a, place) for a, place in zip((y, target, np.zeros_like(y)), places, strict=True)]
    again, out = function(*views[:2], out=views[2], **options)
    assert out is views[2]
    np.testing.assert_array_equal(again, loss)
    assert_same_bits([out], [gradient])
    for k in range(2):  # in the place of y, then of target
        fresh = [placed(a, place) for a, place in zip((y, target), places, strict=False)]
        assert_same_bits([function(*fresh, out=fresh[k], **options)[1]], [gradient])


@pytest.mark.parametrize(("name", "options"), DIFFERENCES)
def test_difference_losses_same_bits_and_torch(isa: str, name: str, options: dict[str, float], torch: Any) -> None:
    rng = np.random.default_rng(3)
    y, target = rng.standard_normal((2, 130, 1031), dtype=np.float32)
    results = [getattr(rg, name)(y, target, num_threads=t, **options) for t in THREADS]
    for loss, gradient in results[1:]:
        assert loss == results[0][0]
        assert_same_bits([gradient], [results[0][1]])
    theirs = {"mean_squared_error": "mse_loss", "huber": "huber_loss"}[name]
    tensor = torch.from_numpy(y.copy()).requires_grad_()
    value = getattr(torch.nn.functional, theirs)(tensor, torch.from_numpy(target), **options)
    value.backward()
    assert results[0][0] == pytest.approx(value.item(), rel=1e-5)
    np.testing.assert_allclose(results[0][1], tensor.grad.numpy(), rtol=1e-5)


@pytest.mark.parametrize("at_end", [False, True])
def test_losses_stay_within_their_arrays(isa: str, at_end: bool) -> None:
    for count in (1, 5, 17, 33):
        logits, labels = draw_logits((3, count), np.float32, count)
        y, x, at, out = (fenced(a, at_end) for a in (2 * logits, logits, labels, np.zeros_like(logits)))
        rg.softmax_cross_entropy(x, at, label_smoothing=0.1, out=out)
        rg.mean_squared_error(y, x, out=out)
        rg.huber(y, x, out=out)
        rg.dropout(x, 0.5, seed=1, out=out)


def test_difference_losses_poison(isa: str) -> None:
    y, target = np.array([math.nan, math.inf, -math.inf, 1], np.float32), np.zeros(4, np.float32)
    losses, gradient = rg.mean_squared_error(y, target, reduction="none")
    np.testing.assert_array_equal(losses, [math.nan, math.inf, math.inf, 1])
    np.testing.assert_array_equal(np.asarray(gradient), [math.nan, math.inf, -math.inf, 2])
    losses, gradient = rg.huber(y, target, reduction="none")
    np.testing.assert_array_equal(losses, [math.nan, math.inf, math.inf, 0.5])
    np.testing.assert_array_equal(np.asarray(gradient), [math.nan, 1, -1, 1])


def test_difference_losses_refusals() -> None:
    y, target = np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32)
    with pytest.raises(ValueError, match=r"huber: target has shape \(3, 3\), but y has shape \(3, 4\)"):
        rg.huber(y, target[:, :3])
    with pytest.raises(TypeError, match="mean_squared_error: target has dtype float64, must be float32 as y is"):
        rg.mean_squared_error(y, target.astype(np.float64))
    for delta in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"huber: delta is .*, must be a finite number above 0"):
            rg.huber(y, target, delta=delta)
    with pytest.raises(ValueError, match="mean_squared_error: reduction is 'max'"):
        rg.mean_squared_error(y, target, reduction="max")  # type: ignore[arg-type]
    whole = np.zeros(20, np.float32)
    with pytest.raises(ValueError, match=r"out .* overlaps y"):
        rg.mean_squared_error(whole[:10], np.ones(10, np.float32), out=whole[5:15])


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("place", PLACES)
def test_dropout_against_the_oracle(isa: str, dtype: Any, place: str) -> None:
    rng = np.random.default_rng(0)
    for shape, rate, seed in (
        ((3, 7), 0.5, 0),
        ((70, 131), 0.1, 2**64 - 1),
        ((5,), 0.0, 3),
        ((), 0.5, 4),
        ((0, 3), 0.5, 5),
    ):
        x = np.asarray(rng.standard_normal(shape)).astype(dtype)
        expected = np.where(reference.dropout_mask(seed, shape, rate) == 0, dtype(0), x * dtype(1 / (1 - rate)))
        view = placed(x, place) if shape else x.copy()
        np.testing.assert_array_equal(rg.dropout(view, rate, seed=seed), expected)
        assert rg.dropout(view, rate, seed=seed, out=view) is view
        np.testing.assert_array_equal(view, expected)


def test_dropout_same_bits_at_any_number_of_threads(isa: str) -> None:
    x = np.random.default_rng(1).standard_normal(300007, dtype=np.float32)
    results = [rg.dropout(x, 0.25, seed=9, num_threads=t) for t in THREADS]
    for result in results[1:]:
        assert_same_bits([result], [results[0]])
    # Backward is the same call, and the mask is an element's own.
    np.testing.assert_array_equal(rg.dropout(x[:5000], 0.25, seed=9), results[0][:5000])
    assert (results[0] == 0).mean() == pytest.approx(0.25, abs=0.01)


def test_dropout_refusals() -> None:
    x = np.ones(8, np.float32)
    for rate in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"dropout: rate is .*, must be at least 0 and below 1"):
            rg.dropout(x, rate, seed=0)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="dropout: seed is"):
            rg.dropout(x, 0.5, seed=seed)
    with pytest.raises(TypeError, match="dropout: x has dtype int64"):
        rg.dropout(np.ones(3, np.int64), 0.5, seed=0)
    with pytest.raises(ValueError, match=r"out .* overlaps x"):
        rg.dropout(x[:4], 0.5, seed=0, out=x[2:6])
    np.testing.assert_array_equal(x, 1)
