"""BNNS normalization filters: Apple's printed numbers, the array functions' bits, layouts, statistics, types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import retrograd as rg
from retrograd import bnns
from support.bnns import BF16, F16, F32, TYPES, Descriptor, describe, fails, image, normal, succeeds
from support.bnns_norm import KINDS, Layer, activation, tanh

# ---- the worked example ----------------------------------------------------------------------------------------------

X = np.array([1, 3, 2, -1, -2, 4, 0.5, 2.5], np.float32).reshape(2, 2, 1, 2)
DY = np.array([0.5, -1, 2, 0.25, 1, 0.75, -0.5, 1.5], np.float32).reshape(2, 2, 1, 2)
GAMMA, BETA = np.array([1.5, -0.5], np.float32), np.array([0.25, 1], np.float32)
GAMMA4, BETA4 = np.array([1.5, 1, -0.5, 0.75], np.float32), np.array([0.25, 0, 1, -0.5], np.float32)
# y, dx, dgamma, dbeta, moving mean and variance afterwards, as the specification prints them
WORKED = {
    "batch": (
        "-0.0771420954 0.8431257988 0.5614505476 0.9390679950 -0.9668171710 0.9550647777 0.8282463049 0.4238890401",
        "0.2582416045 -0.2098805154 -0.1169423765 -0.0998495940 -0.0941252185 0.0457641293 0.2042871028 0.0125048677",
        "-0.3255175454 2.3616528698",
        "0.3390386718 2.4725574837",
        "0.15 0.1",
        "1.425 1.0875",
    ),
    "instance": (
        "-0.8480733528 0.9412901832 0.4622045067 0.9051281798 -0.8482602723 0.9413660542 0.9051031006 0.4623135992",
        "0.0001904831 -0.0001904831 -0.0001130763 0.0001130763 0.0000054180 -0.0000054180 0.0003169728 -0.0003169728",
        "-0.4493027106 2.7963678730",
        "0.3922399775 2.7069247478",
        "0.15 0.1",
        "1.4 1.0625",
    ),
    "group": (
        "-0.0034883287 0.9657127562 0.6330632439 0.9425549235 -0.9576240334 0.9694548031 0.8231953403 0.6183008559",
        "0.4858302997 0.0313606393 -0.3657816124 -0.1514093267 0.0153001244 0.1030099837 0.0428698520 -0.1611799601",
        "-0.2288992666 1.1335841364",
        "0.5606692925 1.9917407740",
        "0 0",
        "1 1",
    ),
    "layer": (
        "-0.0034883287 0.8283781679 0.6330632439 -0.9275700169 -0.9576240334 0.8402729930 0.8231953403 -0.0831818280",
        "0.5060641797 -0.0207521779 -0.3098347267 -0.1754772751 -0.0064264177 -0.1662190200 -0.1102723135 0.2829177512",
        "-0.2043088908 -0.1017764586 0.6613118209 0.7743998662",
        "0.5829501264 -0.0933336381 1.0372871426 1.5245246411",
        "0 0",
        "1 1",
    ),
}
# y of batch norm in inference afterwards
LATER = "0.8662115342 0.9990577257 0.0892005622 0.9099385922 -0.9852362822 0.9999235614 0.6686529345 -0.1490641924"


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


@pytest.mark.parametrize("kind", KINDS)
def test_worked_example(kind: str) -> None:
    y, dx, dgamma, dbeta, moved_mean, moved_variance = (numbers(text) for text in WORKED[kind])
    mean, variance = np.zeros(2, np.float32), np.ones(2, np.float32)
    gamma, beta = (GAMMA4, BETA4) if kind == "layer" else (GAMMA, BETA)
    layer = Layer(kind, (2, 1, 2), gamma=gamma, beta=beta, mean=mean, variance=variance, activation=tanh(), groups=1)
    got = layer.forward(X)
    assert np.allclose(got.ravel(), y, rtol=1e-6, atol=1e-7)
    assert np.allclose(mean, moved_mean, rtol=1e-6)
    assert np.allclose(variance, moved_variance, rtol=1e-6)
    for result, expected in zip(layer.gradients(DY, got, gamma.shape), (dx, dgamma, dbeta), strict=True):
        assert np.allclose(result.ravel(), expected, rtol=2e-6, atol=3e-8)
    if kind == "batch":
        assert np.allclose(layer.forward(X, training=False).ravel(), numbers(LATER), rtol=2e-6)


def test_apples_published_check() -> None:
    """Instance norm of 1..9, 10..90, 100..900, epsilon 0, no beta, inference: population variance."""
    x = np.array([[[[10**k * (i + 1) for i in range(9)]] for k in range(3)]], np.float32)
    layer = Layer("instance", (3, 1, 9), gamma=np.ones(3, np.float32), epsilon=0.0)
    expected = [-1.549, -1.162, -0.775, -0.387, 0, 0.387, 0.775, 1.162, 1.549]
    assert np.allclose(layer.forward(x, training=False), np.broadcast_to(expected, (1, 3, 1, 9)), atol=5e-4)


# ---- the array functions, bit for bit --------------------------------------------------------------------------------

FORWARD: dict[str, Callable[..., Any]] = {
    "batch": rg.batch_norm_forward,
    "instance": rg.instance_norm_forward,
    "layer": lambda x, g, b, **k: rg.layer_norm_forward(x, g, b, axis=1, **k),
    "group": lambda x, g, b, **k: rg.group_norm_forward(x, g, b, num_groups=2, **k),
}
BACKWARD: dict[str, Callable[..., Any]] = {kind: getattr(rg, f"{kind}_norm_backward") for kind in KINDS}


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", [(4, 3, 5), (6,)])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_array_functions_bit_for_bit(kind: str, shape: tuple[int, ...], threads: int) -> None:
    x, dy = normal(7, *shape), normal(7, *shape, seed=1)
    parameter = shape if kind == "layer" else shape[:1]
    gamma, beta = normal(*parameter, seed=2), normal(*parameter, seed=3)
    layer = Layer(
        kind,
        shape,
        gamma=gamma,
        beta=beta,
        activation=tanh(),
        groups=2,
        parameters=bnns.BNNSFilterParameters(1, threads),
    )
    y = layer.forward(x)
    expected, cache = FORWARD[kind](x, gamma, beta, eps=float(np.float32(1e-3)), activation="tanh")
    assert np.array_equal(y, expected)
    for got, want in zip(layer.gradients(dy, y, parameter), BACKWARD[kind](dy, cache), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_large_batch_is_kept_by_threads(in_place: bool, isa: str) -> None:
    x, dy = normal(64, 16, 20, 20), normal(64, 16, 20, 20, seed=1)
    layer = Layer("batch", (16, 20, 20))
    memory = x.copy()
    y = layer.forward(memory, y=memory if in_place else None)
    if not in_place:
        memory[:] = np.nan
    expected, cache = rg.batch_norm_forward(x, eps=float(np.float32(1e-3)))
    assert np.array_equal(y, expected)
    assert np.array_equal(layer.gradients(dy, y, (16,))[0], rg.batch_norm_backward(dy, cache).dx)


# ---- shapes, strides, layouts (section 4) ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["ImageCHW", "3DLastMajor", "3DFirstMajor"])
def test_layouts_that_are_images(layout: str) -> None:
    number = getattr(bnns, f"BNNSDataLayout{layout}")
    x = normal(3, 4, 2, 5)
    layer = Layer("batch", (4, 2, 5))
    sample = Descriptor(layout=number, size=(4, 2, 5) if layout == "3DFirstMajor" else (5, 2, 4), data_type=F32)
    layer.parameters.i_desc = layer.parameters.o_desc = sample
    layer.filter = bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, layer.parameters, None)
    assert np.array_equal(layer.forward(x), rg.batch_norm_forward(x, eps=float(np.float32(1e-3)))[0])


def test_vector_entries_are_channels() -> None:
    x = normal(9, 5)
    assert np.array_equal(Layer("batch", (5,)).forward(x), rg.batch_norm_forward(x, eps=float(np.float32(1e-3)))[0])


@given(data=st.data())
def test_batch_and_descriptor_strides(data: st.DataObject) -> None:
    """Any gaps, in any of the four arrays: elements between are neither read nor written."""
    c, h, w, n = (data.draw(st.integers(1, 4)) for _ in range(4))

    def draw() -> tuple[Any, int, np.ndarray, np.ndarray]:
        s0 = data.draw(st.integers(1, 3))
        s1 = s0 * w + data.draw(st.integers(0, 2))
        s2 = s1 * h + data.draw(st.integers(0, 3))
        batch = s2 * c + data.draw(st.integers(0, 5))
        memory = np.full((n - 1) * batch + (w - 1) * s0 + (h - 1) * s1 + (c - 1) * s2 + 1, np.nan, np.float32)
        view = np.lib.stride_tricks.as_strided(memory, (n, c, h, w), [4 * s for s in (batch, s2, s1, s0)])
        return image((c, h, w), memory, stride=(s0, s1, s2)), batch, memory, view

    (i, i_step, x_memory, x), (o, o_step, y_memory, y) = draw(), draw()
    (di, di_step, _, dx), (do, do_step, dy_memory, dy) = draw(), draw()
    kind = data.draw(st.sampled_from(list(KINDS)))
    x[...], dy[...] = normal(n, c, h, w), normal(n, c, h, w, seed=1)
    shape = (c, h, w) if kind == "layer" else (c,)
    step = data.draw(st.integers(1, 3))
    gamma_memory = normal(int(np.prod(shape)) * step, seed=2)
    gamma = gamma_memory[::step][: int(np.prod(shape))].reshape(shape)
    vector = Descriptor(
        layout=bnns.BNNSDataLayoutVector, size=(gamma.size,), stride=(step,), data=gamma_memory, data_type=F32
    )
    parameters = bnns.BNNSLayerParametersNormalization(
        i_desc=i, o_desc=o, gamma_desc=vector, epsilon=0.01, num_groups=1, activation=tanh()
    )
    flags = data.draw(st.sampled_from([0, bnns.BNNSFlagsUseClientPtr]))
    filter = bnns.BNNSFilterCreateLayerNormalization(KINDS[kind], parameters, bnns.BNNSFilterParameters(flags))
    succeeds(bnns.BNNSNormalizationFilterApplyBatch(filter, n, x_memory, i_step, y_memory, o_step, True))
    options = {"num_groups": 1} if kind == "group" else {"axis": 1} if kind == "layer" else {}
    forward = getattr(rg, f"{kind}_norm_forward")
    expected, cache = forward(np.ascontiguousarray(x), gamma, eps=float(np.float32(0.01)), activation="tanh", **options)
    assert np.allclose(y, expected, rtol=1e-5, atol=1e-6)  # other strides may add in another order
    assert np.isnan(y_memory).sum() == y_memory.size - y.size
    dy_before = dy_memory.copy()
    status = bnns.BNNSNormalizationFilterApplyBackwardBatch(
        filter, n, di, di_step, y_memory, o_step, do, do_step, None, None
    )
    assert status == 0, bnns.last_error()
    want = BACKWARD[kind](np.ascontiguousarray(dy), cache).dx
    assert np.allclose(dx, want, rtol=1e-5, atol=1e-6)
    assert np.array_equal(dy_memory, dy_before, equal_nan=True)  # left alone, though Apple may not


@pytest.mark.parametrize("gamma_form", ["none", "full", "short"])
@pytest.mark.parametrize("beta_form", ["none", "full", "short"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_layer_norm_axes_and_parameter_forms(axis: int, gamma_form: str, beta_form: str) -> None:
    """Statistics over C,H,W or H,W or W; parameters of the whole sample or of the normalized axes."""
    shape = (3, 4, 5)
    x, dy = normal(6, *shape), normal(6, *shape, seed=1)
    forms = {"none": None, "full": shape, "short": shape[axis:]}
    gamma, beta = (
        None if forms[form] is None else normal(*forms[form], seed=seed)  # type: ignore[misc]
        for form, seed in ((gamma_form, 2), (beta_form, 3))
    )
    layer = Layer("layer", shape, gamma=gamma, beta=beta, activation=tanh(), axis=axis)
    y = layer.forward(x)
    axes = tuple(range(1 + axis, 4))
    wide = x.astype(np.float64)
    r = 1 / np.sqrt(wide.var(axes, keepdims=True) + np.float64(np.float32(1e-3)))
    xhat = (wide - wide.mean(axes, keepdims=True)) * r
    g = np.ones(shape) if gamma is None else np.broadcast_to(gamma, shape)
    b = np.zeros(shape) if beta is None else np.broadcast_to(beta, shape)
    assert np.allclose(y, np.tanh(g * xhat + b), atol=1e-6)
    dz = dy * (1 - np.tanh(g * xhat + b) ** 2)
    full = (dz * xhat).sum(0), dz.sum(0)
    for deltas in (shape, shape[axis:]):  # of an absent parameter either form may be asked for
        if any(p is not None and p.shape != deltas for p in (gamma, beta)):
            continue
        dx, dgamma, dbeta = layer.gradients(dy, y, deltas)
        inner = g * dz
        mean = inner.mean(axes, keepdims=True), (inner * xhat).mean(axes, keepdims=True)
        assert np.allclose(dx, r * (inner - mean[0] - xhat * mean[1]), atol=3e-6)
        over = tuple(range(3 - len(deltas)))
        assert np.allclose(dgamma, full[0].sum(over), atol=1e-5)
        assert np.allclose(dbeta, full[1].sum(over), atol=1e-5)


@pytest.mark.parametrize(("groups", "channels"), [(1, 6), (2, 6), (3, 6), (6, 6)])
def test_groups_are_blocks_of_consecutive_channels(groups: int, channels: int) -> None:
    x = normal(2, channels, 3, 2)
    y = Layer("group", (channels, 3, 2), groups=groups).forward(x)
    blocks = x.reshape(2, groups, -1).astype(np.float64)
    expected = (blocks - blocks.mean(2, keepdims=True)) / np.sqrt(blocks.var(2, keepdims=True) + 1e-3)
    assert np.allclose(y, expected.reshape(x.shape), atol=1e-6)


# ---- statistics (sections 6 and 7) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_momentum_weighs_the_old_or_the_new_value(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Apple does not say which: a keyword chooses. What never moves is logged, once."""
    x = normal(4, 3, 2, 5)
    moved = {}
    for weighs, momentum in (("old", 0.25), ("new", 0.75)):
        mean, variance = np.full(3, 2, np.float32), np.full(3, 3, np.float32)
        Layer(kind, (3, 2, 5), mean=mean, variance=variance, momentum=momentum, momentum_weighs=weighs).forward(x)
        moved[weighs] = mean, variance
    assert all(map(np.array_equal, moved["old"], moved["new"]))
    with caplog.at_level("WARNING", "retrograd.bnns"):
        for weighs, momentum in (("old", 1.0), ("new", 0.0)):
            mean, variance = np.full(3, 2, np.float32), np.full(3, 3, np.float32)
            layer = Layer(kind, (3, 2, 5), mean=mean, variance=variance, momentum=momentum, momentum_weighs=weighs)
            layer.forward(x)
            layer.forward(x)
            assert (mean == 2).all()
            assert len(caplog.messages) == 1
            assert f"momentum is {momentum:g} and weighs the {weighs} value" in caplog.messages[0]
            caplog.clear()
        Layer(kind, (3, 2, 5), momentum=1).forward(x)  # nothing that could move
        assert not caplog.messages
    assert not Layer(kind, (3, 2, 5), momentum_weighs="other").made
    assert "momentum_weighs is 'other', must be 'old' or 'new'" in (bnns.last_error() or "")


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_moving_statistics_are_weighed_by_momentum(kind: str) -> None:
    mean, variance = normal(3), np.abs(normal(3, seed=5)) + 1
    before = mean.astype(np.float64), variance.astype(np.float64)
    x = normal(4, 3, 2, 5)
    Layer(kind, (3, 2, 5), mean=mean, variance=variance, momentum=0.75).forward(x)
    wide = x.astype(np.float64)
    if kind == "batch":
        batch = wide.mean((0, 2, 3)), wide.var((0, 2, 3))
    else:
        batch = wide.mean((2, 3)).mean(0), wide.var((2, 3)).mean(0)
    assert np.allclose(mean, 0.75 * before[0] + 0.25 * batch[0], rtol=1e-6)
    assert np.allclose(variance, 0.75 * before[1] + 0.25 * batch[1], rtol=1e-6)


@pytest.mark.parametrize("flags", [0, bnns.BNNSFlagsUseClientPtr])
def test_moving_statistics_are_written_to_the_client_with_and_without_the_flag(flags: int) -> None:
    mean = np.zeros(3, np.float32)
    Layer(
        "batch", (3, 2, 5), mean=mean, variance=np.ones(3, np.float32), parameters=bnns.BNNSFilterParameters(flags)
    ).forward(normal(4, 3, 2, 5))
    assert mean.all()


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_inference_uses_moving_statistics_and_changes_nothing(kind: str) -> None:
    mean, variance = normal(3), np.abs(normal(3, seed=5)) + 1
    before = mean.copy(), variance.copy()
    x = normal(4, 3, 2, 5)
    y = Layer(kind, (3, 2, 5), mean=mean, variance=variance).forward(x, training=False)
    assert np.allclose(y, (x - mean[:, None, None]) / np.sqrt(variance[:, None, None] + 1e-3), atol=1e-6)
    assert np.array_equal(mean, before[0])
    assert np.array_equal(variance, before[1])


@pytest.mark.parametrize("kind", KINDS)
def test_inference_without_moving_statistics_uses_the_current(kind: str) -> None:
    x = normal(4, 3, 2, 5)
    layer = Layer(kind, (3, 2, 5), groups=1)
    assert np.array_equal(layer.forward(x, training=False), layer.forward(x))


def test_layer_and_group_norm_ignore_moving_statistics() -> None:
    mean = np.full(3, 7, np.float32)
    for kind in ("layer", "group"):
        x = normal(4, 3, 2, 5)
        y = Layer(kind, (3, 2, 5), mean=mean, variance=mean, groups=1).forward(x)
        assert np.array_equal(y, Layer(kind, (3, 2, 5), groups=1).forward(x, training=False))
    assert np.array_equal(mean, np.full(3, 7))


@pytest.mark.parametrize("present", ["mean", "variance"])
def test_only_one_moving_array(present: str) -> None:
    """It is updated in training; inference ignores it, not to mix statistics."""
    array = np.full(3, 2, np.float32)
    layer = Layer("batch", (3, 2, 5), **{present: array})  # type: ignore[arg-type]
    x = normal(4, 3, 2, 5)
    trained = layer.forward(x)
    wide = x.astype(np.float64)
    batch = wide.mean((0, 2, 3)) if present == "mean" else wide.var((0, 2, 3))
    assert np.allclose(array, 1.8 + 0.1 * batch, rtol=1e-6)
    assert np.array_equal(layer.forward(x, training=False), trained)


# ---- data types (section 12) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("types", [(a, b) for a in TYPES for b in TYPES])
def test_samples_of_every_floating_point_type(types: tuple[int, int], training: bool) -> None:
    x = normal(4, 3, 2, 5).astype(TYPES[types[0]])
    y = Layer("batch", (3, 2, 5), activation=tanh(), types=types).forward(x, training)
    wide, _ = rg.batch_norm_forward(x.astype(np.float32), eps=float(np.float32(1e-3)), activation="tanh")
    assert np.array_equal(y, wide.astype(TYPES[types[1]]))  # arithmetic in float32, rounded once


@pytest.mark.parametrize("delta", [F32, BF16])
@pytest.mark.parametrize("types", [(F32, F32), (F16, F16), (BF16, BF16), (F16, F32)])
def test_gradients_of_float32_and_bfloat16(types: tuple[int, int], delta: int) -> None:
    x, dy = normal(4, 3, 2, 5).astype(TYPES[types[0]]), normal(4, 3, 2, 5, seed=1).astype(TYPES[delta])
    layer = Layer("batch", (3, 2, 5), activation=tanh(), types=types)
    y = layer.forward(x)
    results = [np.ones((4, 3, 2, 5), TYPES[delta]), np.ones(3, TYPES[delta]), np.ones(3, TYPES[delta])]
    for flags in (0, 1):
        status = layer.backward(
            dy,
            y,
            in_delta=image((3, 2, 5), results[0], data_type=delta, flags=flags),
            gamma_delta=describe(results[1], flags=flags),
            beta_delta=describe(results[2], flags=flags),
        )
        assert status == 0, bnns.last_error()
    _, cache = rg.batch_norm_forward(x.astype(np.float32), eps=float(np.float32(1e-3)), activation="tanh")
    cache = cache._replace(y=y.astype(np.float32))
    wanted = rg.batch_norm_backward(dy.astype(np.float32), cache, need=("dx", "dgamma", "dbeta"))
    for got, want in zip(results, wanted, strict=True):
        assert np.allclose(got.astype(np.float64), 2 * want, rtol=2e-2 if delta == BF16 else 1e-6, atol=1e-7)


def test_clamp_in_float16_knows_its_own_bounds() -> None:
    """0.1 rounds down in float16: an output at the bound must still be seen as clamped."""
    x = normal(4, 3, 2, 5).astype(np.float16)
    layer = Layer("batch", (3, 2, 5), activation=activation(8, -0.1, 0.1), types=(F16, F16))
    y = layer.forward(x)
    dbeta = np.empty(3, np.float32)
    ones = np.ones((4, 3, 2, 5), np.float32)
    assert layer.backward(ones, y, beta_delta=describe(dbeta)) == 0
    z = Layer("batch", (3, 2, 5), types=(F16, F32)).forward(x)
    assert np.array_equal(dbeta, (np.abs(z) < np.float16(0.1)).sum((0, 2, 3)))


# ---- strided samples, NaN, PyTorch -----------------------------------------------------------------------------------


def test_one_sample_of_the_right_shape_with_gaps_between_its_values() -> None:
    layer = Layer("batch", (6,))
    x, y = normal(1, 6), np.full((1, 6), 7, np.float32)
    for part in ("i_desc", "o_desc"):
        parameters = layer.parameters.copy()
        getattr(parameters, part).stride = (2,)
        filter = bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, parameters)
        fails(bnns.BNNSNormalizationFilterApplyBatch(filter, 1, x, 6, y, 6, True), "span 44")
    assert (y == 7).all()


def test_samples_of_another_step_than_the_arrays_shape_tells() -> None:
    memory = normal(4, 6)
    layer = Layer("batch", (6,))
    y = np.full((4, 6), 7, np.float32)
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, memory, 5, y, 6, True) == 0  # samples overlap
    samples = np.lib.stride_tricks.as_strided(memory, (4, 6), (20, 4))
    assert np.array_equal(y, layer.forward(samples.copy()))
    y[...] = 7
    for stride in (5, 7):
        assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, memory, 6, y, stride, True) == -1
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 3, memory, 6, y, 6, True) == 0
    assert (y[3] == 7).all()
    assert (y[:3] != 7).all()


def test_nan_and_infinity_come_out_as_arithmetic_says() -> None:
    x = normal(4, 3, 2, 5)
    x[0, 0, 0, 0], x[0, 1, 0, 0] = np.nan, np.inf
    y = Layer("batch", (3, 2, 5)).forward(x)
    assert np.isnan(y[:, 0]).all()
    assert np.isnan(y[:, 1]).any()
    assert np.isfinite(y[:, 2]).all()


def test_against_torch(torch: Any) -> None:
    x, dy = normal(5, 6, 3, 4), normal(5, 6, 3, 4, seed=1)
    gamma, beta = normal(6, seed=2), normal(6, seed=3)
    layer = Layer("group", (6, 3, 4), gamma=gamma, beta=beta, groups=3, activation=tanh())
    y = layer.forward(x)
    tx, tg, tb = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, gamma, beta))
    ty = torch.tanh(torch.nn.functional.group_norm(tx, 3, tg, tb, float(np.float32(1e-3))))
    ty.backward(torch.tensor(dy, dtype=torch.float64))
    assert np.allclose(y, ty.detach().numpy(), atol=1e-6)
    for got, want in zip(layer.gradients(dy, y, (6,)), (tx.grad, tg.grad, tb.grad), strict=True):
        assert np.allclose(got, want.numpy(), atol=1e-5)
