"""Every loss with weights and reductions: against the oracle and PyTorch, at hard shapes and values, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
PLACES = ("contiguous", "fortran", "reversed", "every other", "padded", "in a field")
REDUCTIONS = ("mean", "sum", "none", "weighted_mean", "nonzero_mean")
SHAPES = ((1,), (7,), (3, 5), (4, 8), (2, 3, 17), (5, 1), (3, 33), (2, 257), (0, 4), (3, 0))
# In units of the last place of the sizes below: exponential, logarithm and quotient have about two each, the sum of
# their products, weight and scale half of one each.
ROUNDINGS = 8.0


def draw_any(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array]:
    return 2 * rng.standard_normal(shape), rng.standard_normal(shape)


def draw_classes(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array]:
    return 3 * rng.standard_normal(shape), np.round(rng.random(shape))


def draw_shares(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array]:
    share = rng.random(shape)
    return 3 * rng.standard_normal(shape), np.where(rng.random(shape) < 0.3, 0, share)


def draw_probabilities(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array]:
    return rng.random(shape) ** 3, rng.random(shape)


def draw_unit(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array]:
    pair = rng.standard_normal((2, *shape))
    pair /= np.maximum(np.linalg.norm(pair, axis=-1, keepdims=True), 1e-9)
    return pair[0], pair[1]


def size_of_difference(y: Array, t: Array) -> tuple[Array, Array]:
    d = np.abs(y - t)
    return d**2 + d, 2 * d + 1


def size_of_margin(y: Array, t: Array) -> tuple[Array, Array]:
    return 1 + np.abs(y), np.ones(y.shape)


def size_of_log(y: Array, t: Array) -> tuple[Array, Array]:
    p, q = y + 1e-7, 1 - y + 1e-7
    return 1 - t * np.log(p) - (1 - t) * np.log(q), t / p + (1 - t) / q


def size_of_rows(y: Array, t: Array) -> tuple[Array, Array]:
    distance = np.abs(y - y.max(-1, keepdims=True, initial=-math.inf)) if y.size else np.abs(y)
    total = np.abs(t).sum(-1, keepdims=True) + 1
    return (total * (1 + distance)).sum(-1), total * (1 + distance) * np.ones(y.shape)


def size_of_product(y: Array, t: Array) -> tuple[Array, Array]:
    return 1 + np.abs(y * t).sum(-1), np.abs(y) + np.abs(t)


class Case(NamedTuple):
    name: str
    draw: Callable[[np.random.Generator, tuple[int, ...]], tuple[Array, Array]]
    sizes: Callable[[Array, Array], tuple[Array, Array]]
    options: dict[str, Any] = {}  # noqa: RUF012
    rows: bool = False
    in_place: tuple[str, ...] = ("y", "target")

    def oracle(self, y: Array, target: Array) -> tuple[Array, Array]:
        name = "soft_cross_entropy" if self.name == "softmax_cross_entropy" else self.name
        found: tuple[Array, Array] = getattr(reference, name)(y, target, **self.options)
        return found


CASES = [
    Case("mean_squared_error", draw_any, size_of_difference),
    Case("huber", draw_any, size_of_difference, {"delta": 0.3}),
    Case("mean_absolute_error", draw_any, size_of_difference),
    Case("hinge", draw_classes, size_of_margin),
    Case("log_loss", draw_probabilities, size_of_log),
    Case("sigmoid_cross_entropy", draw_shares, size_of_margin),
    Case("sigmoid_cross_entropy", draw_shares, size_of_margin, {"label_smoothing": 0.2}),
    Case("softmax_cross_entropy", draw_shares, size_of_rows, {}, True, ("y",)),
    Case("softmax_cross_entropy", draw_shares, size_of_rows, {"label_smoothing": 0.1}, True, ("y",)),
    Case("categorical_cross_entropy", draw_classes, size_of_rows, {}, True, ("y",)),
    Case("categorical_cross_entropy", draw_shares, size_of_rows, {}, True, ("y",)),
    Case("cosine_distance", draw_unit, size_of_product, {}, True),
]
IDS = [f"{case.name}{case.options or ''}" for case in CASES]
each_case = pytest.mark.parametrize("case", CASES, ids=IDS)


def draw(case: Case, shape: tuple[int, ...], dtype: Any, seed: int) -> tuple[Array, Array]:
    y, target = case.draw(np.random.default_rng(seed), shape)
    return y.astype(dtype), target.astype(dtype)


def draw_weights(kind: str, shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Of losses of this shape; some are 0."""
    if kind == "none":
        return None
    if kind == "scalar":
        return 0.75
    rng = np.random.default_rng(seed + 1000)
    chosen = shape if kind == "each" else shape[:1]
    return np.where(rng.random(chosen) < 0.3, 0, rng.random(chosen) + 0.5).astype(dtype)


def check(case: Case, y: Array, target: Array, weights: Any, reduction: str, scale: float, loss: Any, dy: Any) -> None:
    losses, slopes = case.oracle(y, target)
    exact, gradient = reference.reduced_loss(losses, slopes, weights, reduction)
    sizes, steepness = case.sizes(y.astype(float), target.astype(float))
    unit = ROUNDINGS * float(np.finfo(y.dtype).eps)
    largest = 1.0 if weights is None else float(np.max(weights, initial=0.0))
    share = 1.0
    if reduction.endswith("mean"):  # the divisor is what makes a loss of one everywhere a mean
        whole = float(reference.reduced_loss(np.ones(losses.shape), slopes, weights, "sum")[0])
        mean = float(reference.reduced_loss(np.ones(losses.shape), slopes, weights, reduction)[0])
        share = mean / whole if whole else 0.0
    if reduction == "none":
        assert (loss.shape, loss.dtype) == (losses.shape, y.dtype)
        assert (np.abs(loss - scale * exact) <= unit * largest * abs(scale) * sizes).all()
    else:
        assert type(loss) is float
        np.testing.assert_allclose(
            loss, float(scale * exact), rtol=0, atol=unit * largest * abs(scale) * float(sizes.sum()) * share
        )
    if dy is not None:
        assert (dy.shape, dy.dtype) == (y.shape, y.dtype)
        assert (np.abs(dy - scale * gradient) <= unit * largest * abs(scale) * share * steepness).all()


@each_case
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["none", "scalar", "samples", "each"])
def test_losses_against_the_oracle(isa: str, case: Case, dtype: Any, kind: str) -> None:
    for seed, shape in enumerate(SHAPES):
        y, target = draw(case, shape, dtype, seed)
        weights = draw_weights(kind, shape[:-1] if case.rows else shape, dtype, seed)
        for reduction in REDUCTIONS:
            scale = 1.0 if seed % 2 else -0.4
            options: dict[str, Any] = {"weights": weights, "reduction": reduction, "scale": scale, **case.options}
            loss, dy = getattr(rg, case.name)(y, target, **options)
            check(case, y, target, weights, reduction, scale, loss, dy)
            without, none = getattr(rg, case.name)(y, target, want_gradient=False, **options)
            assert none is None
            np.testing.assert_array_equal(without, loss)


@settings(max_examples=150, deadline=None)
@given(
    case=st.sampled_from(CASES),
    shape=st.one_of(
        st.sampled_from((1, 2, 7, 8, 9, 15, 16, 17, 33, 65)).map(lambda n: (2, n)),
        st.lists(st.integers(0, 9), min_size=1, max_size=3).map(lambda s: tuple(s)),
    ),
    dtype=st.sampled_from([np.float32, np.float64]),
    places=st.lists(st.sampled_from(PLACES), min_size=4, max_size=4),
    level=st.sampled_from(_core.isa_levels()),
    seed=st.integers(0, 99),
)
def test_losses_any_shape_and_strides(
    case: Case, shape: tuple[int, ...], dtype: Any, places: list[str], level: str, seed: int
) -> None:
    _core.select_isa(level)
    function = getattr(rg, case.name)
    y, target = draw(case, shape, dtype, seed)
    weights = draw_weights("each", shape[:-1] if case.rows else shape, dtype, seed)
    options: dict[str, Any] = {"reduction": "weighted_mean", **case.options}
    loss, dy = function(y, target, weights=weights, **options)
    views = [placed(a, place) for a, place in zip((y, target, np.zeros_like(y)), places, strict=False)]
    spread = placed(weights, places[3]) if weights.ndim else weights
    again, out = function(*views[:2], weights=spread, out=views[2], **options)
    assert out is views[2]
    np.testing.assert_array_equal(again, loss)
    assert_same_bits([out], [dy])
    for k, name in enumerate(("y", "target")):
        if name in case.in_place:
            fresh = [placed(a, place) for a, place in zip((y, target), places, strict=False)]
            assert_same_bits([function(*fresh, weights=weights, out=fresh[k], **options)[1]], [dy])


@each_case
def test_losses_same_bits_at_any_number_of_threads(isa: str, case: Case) -> None:
    y, target = draw(case, (301, 1031), np.float32, 1)
    weights = draw_weights("each", y.shape[:-1] if case.rows else y.shape, np.float32, 1)
    results = [
        getattr(rg, case.name)(y, target, weights=weights, reduction="nonzero_mean", num_threads=t, **case.options)
        for t in THREADS
    ]
    for loss, dy in results[1:]:
        assert loss == results[0][0]
        assert_same_bits([dy], [results[0][1]])


@each_case
@pytest.mark.parametrize("at_end", [False, True])
def test_losses_stay_within_their_arrays(isa: str, case: Case, at_end: bool) -> None:
    for count in (1, 5, 17, 33):
        y, target = draw(case, (3, count), np.float32, count)
        weights = draw_weights("each", (3,) if case.rows else (3, count), np.float32, count)
        arrays = [fenced(a, at_end) for a in (y, target, weights, np.zeros_like(y))]
        getattr(rg, case.name)(*arrays[:2], weights=arrays[2], out=arrays[3], **case.options)


def test_soft_labels_of_one_class_are_integer_labels(isa: str) -> None:
    rng = np.random.default_rng(0)
    logits = 10 * rng.standard_normal((20, 37), dtype=np.float32)
    labels = rng.integers(0, 37, 20)
    one_hot = np.eye(37, dtype=np.float32)[labels]
    weights = rng.random(20, dtype=np.float32)
    for smoothing in (0.0, 0.1):
        for reduction in REDUCTIONS:
            options: dict[str, Any] = {"weights": weights, "reduction": reduction, "label_smoothing": smoothing}
            by_index, dlogits = rg.softmax_cross_entropy(logits, labels, **options)
            by_target, soft = rg.softmax_cross_entropy(logits, one_hot, **options)
            np.testing.assert_allclose(by_target, by_index, rtol=1e-6)
            assert dlogits is not None
            np.testing.assert_allclose(soft, dlogits, rtol=2e-6, atol=1e-7 if smoothing else 0)


def test_soft_labels_keep_the_digits_of_the_confident(isa: str) -> None:
    """Where p is almost its target, their difference is what is learnt from."""
    logits = np.array([[0, 30, 2]], np.float32)
    loss, gradient = rg.softmax_cross_entropy(logits, np.array([[0, 1, 0]], np.float32), reduction="sum")
    others = math.exp(-30) + math.exp(-28)
    assert loss == pytest.approx(math.log1p(others), rel=1e-3)
    assert gradient is not None
    assert gradient[0, 1] == pytest.approx(-others, rel=1e-3)


def test_ignored_rows_do_not_count_in_weighted_means(isa: str) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((5, 4), dtype=np.float32)
    labels = np.array([0, 3, -100, 2, -100])
    weights = np.array([1, 0, math.nan, 2, 5], np.float32)
    kept = labels >= 0
    for reduction in ("mean", "weighted_mean", "nonzero_mean", "sum"):
        options: dict[str, Any] = {"reduction": reduction}
        loss, gradient = rg.softmax_cross_entropy(logits, labels, weights=weights, **options)
        only, rows = rg.softmax_cross_entropy(logits[kept], labels[kept], weights=weights[kept], **options)
        assert loss == only
        assert gradient is not None
        np.testing.assert_array_equal(gradient[kept], np.asarray(rows))
        assert not gradient[~kept].any()


def test_weights_against_torch(torch: Any) -> None:
    functional = torch.nn.functional
    y, target = draw(CASES[5], (40, 23), np.float32, 7)
    weights = draw_weights("each", y.shape, np.float32, 7)
    tensor = torch.from_numpy(y.copy()).requires_grad_()
    theirs = functional.binary_cross_entropy_with_logits(
        tensor, torch.from_numpy(target), weight=torch.from_numpy(weights)
    )
    theirs.backward()
    loss, dlogits = rg.sigmoid_cross_entropy(y, target, weights=weights)
    assert loss == pytest.approx(theirs.item(), rel=1e-5)
    np.testing.assert_allclose(np.asarray(dlogits), tensor.grad.numpy(), rtol=1e-4, atol=1e-8)
    tensor = torch.from_numpy(y.copy()).requires_grad_()
    shares = target / np.maximum(target.sum(-1, keepdims=True), 1e-3)
    theirs = functional.cross_entropy(tensor, torch.from_numpy(shares), label_smoothing=0.1)
    theirs.backward()
    loss, dlogits = rg.softmax_cross_entropy(y, shares, label_smoothing=0.1)
    assert loss == pytest.approx(theirs.item(), rel=1e-5)
    np.testing.assert_allclose(np.asarray(dlogits), tensor.grad.numpy(), rtol=1e-3, atol=1e-7)
    tensor = torch.from_numpy(y.copy()).requires_grad_()
    functional.l1_loss(tensor, torch.from_numpy(target)).backward()
    np.testing.assert_allclose(np.asarray(rg.mean_absolute_error(y, target)[1]), tensor.grad.numpy(), rtol=1e-6)


def test_per_class_weights_of_a_categorical_cross_entropy(isa: str) -> None:
    y, target = draw(CASES[9], (6, 11), np.float64, 3)
    weights = draw_weights("each", y.shape, np.float64, 3)
    loss, dlogits = rg.categorical_cross_entropy(y, target, weights=weights, reduction="none")
    counts = np.maximum((target != 0).sum(-1), 1)
    exact, gradient = reference.soft_cross_entropy(y, target * weights / counts[:, None])
    np.testing.assert_allclose(np.asarray(loss), exact.astype(float), rtol=1e-13)
    np.testing.assert_allclose(np.asarray(dlogits), gradient.astype(float), rtol=1e-12, atol=1e-15)
    with pytest.raises(ValueError, match=r"reduction is 'weighted_mean', but weights of the shape of logits"):
        rg.categorical_cross_entropy(y, target, weights=weights, reduction="weighted_mean")


def test_means_over_nothing(isa: str) -> None:
    y = np.ones((2, 3), np.float32)
    zeros = np.zeros((2, 3), np.float32)
    for reduction in ("weighted_mean", "nonzero_mean"):
        loss, dy = rg.mean_squared_error(y, zeros, weights=zeros, reduction=reduction)  # type: ignore[arg-type]
        assert loss == 0
        np.testing.assert_array_equal(np.asarray(dy), zeros)
        assert rg.mean_squared_error(y, zeros, weights=0.0, reduction=reduction)[0] == 0  # type: ignore[arg-type]
    assert rg.mean_squared_error(y, zeros, weights=zeros)[0] == 0
    assert math.isnan(float(rg.hinge(y[:0], zeros[:0])[0]))


def test_kinks_and_poison(isa: str) -> None:
    y = np.array([math.nan, math.inf, -math.inf, 1, 0, 0.5], np.float32)
    one, zero = np.ones(6, np.float32), np.zeros(6, np.float32)
    losses, dy = rg.mean_absolute_error(y, one, reduction="none")
    np.testing.assert_array_equal(losses, [math.nan, math.inf, math.inf, 0, 1, 0.5])
    np.testing.assert_array_equal(np.asarray(dy), [math.nan, 1, -1, 0, -1, -1])
    assert np.asarray(rg.mean_absolute_error(y, one, slope_at_zero=1, reduction="none")[1])[3] == 1
    losses, dy = rg.hinge(y, one, reduction="none")
    np.testing.assert_array_equal(losses, [math.nan, 0, math.inf, 0, 1, 0.5])
    np.testing.assert_array_equal(np.asarray(dy), [math.nan, 0, -1, -1, -1, -1])
    losses, dy = rg.hinge(y, zero, reduction="none")
    np.testing.assert_array_equal(losses, [math.nan, math.inf, 0, 2, 1, 1.5])
    losses, dy = rg.sigmoid_cross_entropy(y, one, reduction="none")
    np.testing.assert_allclose(
        losses, [math.nan, 0, math.inf, math.log1p(math.exp(-1)), math.log(2), 0.474077], rtol=1e-6
    )
    np.testing.assert_allclose(np.asarray(dy)[[0, 1, 2, 4]], [math.nan, 0, -1, -0.5], rtol=1e-6)
    losses, dy = rg.log_loss(y, one, eps=0, reduction="none")
    np.testing.assert_allclose(losses, [math.nan, -math.inf, math.nan, 0, math.inf, math.log(2)], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(dy), [math.nan, 0, 0, -1, -math.inf, -2], rtol=1e-6)
    logits = np.array([[1, -math.inf, 2]], np.float32)
    assert math.isfinite(float(rg.softmax_cross_entropy(logits, np.array([[1, 0, 1]], np.float32))[0]))
    assert rg.softmax_cross_entropy(logits, np.array([[0, 1, 0]], np.float32))[0] == math.inf


def test_logarithms_are_within_three_units(isa: str) -> None:
    for dtype, lowest in ((np.float32, -149), (np.float64, -1074)):
        powers = np.ldexp(1.0, np.arange(lowest, np.finfo(dtype).maxexp))
        y = np.concatenate([powers, powers * 1.37, 1 + np.linspace(-0.5, 1, 20001)]).astype(dtype)
        y = y[np.isfinite(y) & (y != 1)]
        losses, _ = rg.log_loss(y, np.ones_like(y), eps=0, reduction="none")
        exact = -np.log(y.astype(np.longdouble))
        assert (np.abs(losses - exact) <= 3 * np.spacing(np.abs(exact).astype(dtype))).all()


def test_refusals() -> None:
    y, target = np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32)
    out = np.full((3, 4), 7, np.float32)
    fitting = r"expected \(\), \(3,\), \(3, 4\)"
    with pytest.raises(ValueError, match=r"hinge: weights has shape \(4,\), but there are losses of .* " + fitting):
        rg.hinge(y, target, weights=np.ones(4, np.float32), out=out)
    with pytest.raises(ValueError, match=r"cosine_distance: weights has shape \(3, 4\), .*: expected \(\), \(3,\)$"):
        rg.cosine_distance(y, target, weights=y, out=out)
    with pytest.raises(TypeError, match="huber: weights has dtype float64, must be float32 as the other arrays are"):
        rg.huber(y, target, weights=np.ones(3), out=out)
    with pytest.raises(ValueError, match=r"log_loss: eps is -1.0, must be a finite number of at least 0"):
        rg.log_loss(y, target, eps=-1, out=out)
    with pytest.raises(ValueError, match=r"mean_absolute_error: slope_at_zero is 2.0, must be from -1 to 1"):
        rg.mean_absolute_error(y, target, slope_at_zero=2, out=out)
    with pytest.raises(ValueError, match=r"sigmoid_cross_entropy: label_smoothing is -0.1, must be from 0 to 1"):
        rg.sigmoid_cross_entropy(y, target, label_smoothing=-0.1, out=out)
    with pytest.raises(ValueError, match=r"sigmoid_cross_entropy: target has shape \(3, 3\), but logits has shape"):
        rg.sigmoid_cross_entropy(y, target[:, :3], out=out)
    with pytest.raises(ValueError, match=r"hinge: reduction is 'avg'; there are .*'weighted_mean', 'nonzero_mean'"):
        rg.hinge(y, target, reduction="avg", out=out)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="softmax_cross_entropy: labels has dtype float64, must be float32 as logits is"
    ):
        rg.softmax_cross_entropy(y, target.astype(np.float64), out=out)
    with pytest.raises(
        TypeError, match=r"labels has dtype float32; it must be of integers, or have the shape \(3, 4\)"
    ):
        rg.softmax_cross_entropy(y, target[0], out=out)
    with pytest.raises(ValueError, match="categorical_cross_entropy: logits has no axes"):
        rg.categorical_cross_entropy(np.array(1.0), np.array(1.0))
    with pytest.raises(TypeError, match="scale"):
        rg.hinge(y, target, scale="x", out=out)  # type: ignore[arg-type]
    assert (out == 7).all()
    for loss in (rg.mean_squared_error, rg.cosine_distance):
        shape = (3, 4) if loss is rg.mean_squared_error else (3,)
        weights = out.reshape(-1)[: math.prod(shape)].reshape(shape)
        with pytest.raises(ValueError, match=r"out .* overlaps weights"):
            loss(y, target, weights=weights, out=out)
    with pytest.raises(ValueError, match=r"out .* overlaps labels"):
        rg.softmax_cross_entropy(y, target, out=target)
