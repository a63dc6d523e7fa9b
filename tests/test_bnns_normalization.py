"""BNNS normalization filters, section by section of Apple's documented behaviour."""

from __future__ import annotations

import ctypes
import gc
import logging
import re
import sys
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import retrograd as rg
from retrograd import bnns
from retrograd.ops._call import enter
from retrograd.ops.activation import ACTIVATIONS

Descriptor = bnns.BNNSNDArrayDescriptor
KINDS = {
    "batch": bnns.BNNSBatchNorm,
    "instance": bnns.BNNSInstanceNorm,
    "layer": bnns.BNNSLayerNorm,
    "group": bnns.BNNSGroupNorm,
}
F32, F16, BF16 = bnns.BNNSDataTypeFloat32, bnns.BNNSDataTypeFloat16, bnns.BNNSDataTypeBFloat16
TYPES = {F32: np.dtype(np.float32), F16: np.dtype(np.float16), BF16: np.dtype(ml_dtypes.bfloat16)}


def image(shape: tuple[int, ...], data: Any = None, *, flags: int = 0, data_type: int = F32, **fields: Any) -> Any:
    """ImageCHW of a shape (C, H, W), or Vector of (C,)."""
    layout = bnns.BNNSDataLayoutImageCHW if len(shape) == 3 else bnns.BNNSDataLayoutVector
    return Descriptor(flags=flags, layout=layout, size=shape[::-1], data=data, data_type=data_type, **fields)


def described(array: np.ndarray | None, **fields: Any) -> Any:
    return Descriptor() if array is None else Descriptor.from_array(array, **fields)


class Layer:
    """A filter and the arrays around it."""

    def __init__(
        self,
        kind: str,
        shape: tuple[int, ...],
        *,
        gamma: np.ndarray | None = None,
        beta: np.ndarray | None = None,
        mean: np.ndarray | None = None,
        variance: np.ndarray | None = None,
        momentum: float = 0.9,
        epsilon: float = 1e-3,
        activation: Any = None,
        groups: int = 0,
        axis: int = 0,
        parameters: Any = None,
        types: tuple[int, int] = (F32, F32),
        **options: Any,
    ) -> None:
        self.kind, self.shape, self.types = kind, shape, types
        self.size = int(np.prod(shape))
        self.parameters = bnns.BNNSLayerParametersNormalization(
            i_desc=image(shape, data_type=types[0]),
            o_desc=image(shape, data_type=types[1]),
            beta_desc=described(beta),
            gamma_desc=described(gamma),
            moving_mean_desc=described(mean),
            moving_variance_desc=described(variance),
            momentum=momentum,
            epsilon=epsilon,
            activation=activation or bnns.BNNSActivation(),
            num_groups=groups,
            normalization_axis=axis,
        )
        self.filter = bnns.BNNSFilterCreateLayerNormalization(KINDS[kind], self.parameters, parameters, **options)
        self.made = self.filter is not None

    def forward(self, x: np.ndarray, training: bool = True, y: np.ndarray | None = None) -> np.ndarray:
        y = np.empty(x.shape, TYPES[self.types[1]]) if y is None else y
        status = bnns.BNNSNormalizationFilterApplyBatch(self.filter, len(x), x, self.size, y, self.size, training)
        assert status == 0, bnns.last_error()
        return y

    def backward(self, dy: np.ndarray, y: np.ndarray | None, **deltas: Any) -> int:
        """deltas: descriptors in_delta, beta_delta, gamma_delta."""
        out_delta = image(self.shape, dy, data_type=next(t for t, d in TYPES.items() if d == dy.dtype))
        return bnns.BNNSNormalizationFilterApplyBackwardBatch(
            self.filter,
            len(dy),
            deltas.get("in_delta"),
            self.size,
            y,
            self.size,
            out_delta,
            self.size,
            deltas.get("beta_delta"),
            deltas.get("gamma_delta"),
        )

    def gradients(self, dy: np.ndarray, y: np.ndarray, parameter: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        dx = np.full(dy.shape, np.nan, np.float32)
        dbeta, dgamma = np.full(parameter, np.nan, np.float32), np.full(parameter, np.nan, np.float32)
        status = self.backward(
            dy, y, in_delta=image(self.shape, dx), beta_delta=described(dbeta), gamma_delta=described(dgamma)
        )
        assert status == 0, bnns.last_error()
        return dx, dgamma, dbeta


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.3, 1.2, shape).astype(np.float32)


def tanh() -> Any:
    return bnns.BNNSActivation(bnns.BNNSActivationFunctionTanh)


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
    status = bnns.BNNSNormalizationFilterApplyBatch(filter, n, x_memory, i_step, y_memory, o_step, True)
    assert status == 0, bnns.last_error()
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


# ---- parameters, memory, threads (sections 1, 10, 13) ----------------------------------------------------------------


def test_null_parameters_are_one_and_zero() -> None:
    x = normal(4, 3, 2, 5)
    plain = Layer("batch", (3, 2, 5)).forward(x)
    assert np.array_equal(Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32)).forward(x), plain)
    assert np.array_equal(Layer("batch", (3, 2, 5), beta=np.zeros(3, np.float32)).forward(x), plain)


def test_client_memory_is_read_at_every_call_with_the_flag_only() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    for flags in (0, bnns.BNNSFlagsUseClientPtr):
        gamma = np.ones(3, np.float32)
        layer = Layer("batch", (3, 2, 5), gamma=gamma, parameters=bnns.BNNSFilterParameters(flags))
        y, (dx, *_) = layer.forward(x), layer.gradients(dy, x, (3,))
        gamma[:] = 2
        factor = 2 if flags else 1
        assert np.allclose(layer.forward(x), factor * y, rtol=1e-6)
        assert np.allclose(layer.gradients(dy, x, (3,))[0], factor * dx, rtol=1e-6)


def test_parameters_of_any_type_and_stride() -> None:
    x = normal(4, 3, 2, 5)
    gamma = np.array([1.5, -0.25, 2.0], np.float32)
    expected = Layer("batch", (3, 2, 5), gamma=gamma).forward(x)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        assert np.array_equal(Layer("batch", (3, 2, 5), gamma=gamma.astype(dtype)).forward(x), expected)
    dy = normal(4, 3, 2, 5, seed=1)
    plain = Layer("batch", (3, 2, 5), gamma=gamma)
    plain.forward(x)
    wanted = plain.gradients(dy, x, (3,))
    spread = np.zeros(6, np.float32)
    spread[::2] = gamma
    odd = np.frombuffer(bytearray(13), np.uint8)[1:].view(np.float32)
    odd[:] = gamma
    for values in (spread[::2], odd):
        for flags in (0, bnns.BNNSFlagsUseClientPtr):
            layer = Layer("batch", (3, 2, 5), gamma=values, parameters=bnns.BNNSFilterParameters(flags))
            assert np.array_equal(layer.forward(x), expected)
            for got, want in zip(layer.gradients(dy, x, (3,)), wanted, strict=True):
                assert np.array_equal(got, want)


@pytest.mark.parametrize("hint", [0, 1, 2, 5, 2**63, bnns.SIZE_MAX])
def test_the_number_of_threads_is_a_hint(hint: int) -> None:
    x = normal(4, 3, 2, 5)
    y = Layer("batch", (3, 2, 5), parameters=bnns.BNNSFilterParameters(0, hint)).forward(x)
    assert np.array_equal(y, Layer("batch", (3, 2, 5)).forward(x))


class Allocator:
    def __init__(self, limit: int = 100) -> None:
        self.given: list[bytearray] = []
        self.freed: list[Any] = []
        self.limit = limit

    def alloc(self, memptr: Any, alignment: int, size: int) -> int:
        assert alignment >= 8
        assert alignment & (alignment - 1) == 0
        if len(self.given) >= self.limit:
            return 12  # ENOMEM
        self.given.append(bytearray(size))
        memptr[0] = self.given[-1]
        return 0

    def free(self, block: Any) -> None:
        assert any(block is one for one in self.given)
        assert not any(block is one for one in self.freed)
        self.freed.append(block)

    def parameters(self) -> Any:
        return bnns.BNNSFilterParameters(0, 0, self.alloc, self.free)


def test_memory_comes_from_the_clients_allocator_and_goes_back() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    allocator = Allocator()
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), parameters=allocator.parameters())
    assert [len(block) for block in allocator.given] == [12]
    y = layer.forward(x)
    assert len(allocator.given) == 2
    assert len(allocator.given[1]) >= x.nbytes
    layer.forward(x)
    assert len(allocator.given) == 2  # kept from pass to pass
    assert np.array_equal(y, Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32)).forward(x))
    layer.gradients(dy, y, (3,))
    bnns.BNNSFilterDestroy(layer.filter)
    bnns.BNNSFilterDestroy(layer.filter)
    assert len(allocator.freed) == len(allocator.given)


def test_garbage_collection_gives_memory_back() -> None:
    allocator = Allocator()
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), parameters=allocator.parameters())
    layer.forward(normal(4, 3, 2, 5))
    del layer
    gc.collect()
    assert len(allocator.freed) == len(allocator.given) == 2


@pytest.mark.parametrize("limit", [0, 1])
def test_an_allocator_that_fails(limit: int) -> None:
    allocator = Allocator(limit)
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), parameters=allocator.parameters())
    assert layer.made is (limit == 1)
    if layer.made:
        x = normal(4, 3, 2, 5)
        y = np.full_like(x, 7)
        assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 30, y, 30, True) == -1
        assert (y == 7).all()
    assert "alloc_memory returned 12" in (bnns.last_error() or "")
    del layer
    gc.collect()
    assert len(allocator.freed) == len(allocator.given)


@pytest.mark.parametrize(
    "alloc",
    [
        lambda *_: 0,
        lambda *_: 1 / 0,
        lambda m, a, s: m.__setitem__(0, bytes(s)) or 0,
        lambda m, a, s: m.__setitem__(0, bytearray(1)) or 0,
        5,
    ],
    ids=["nothing", "raises", "read-only", "short", "no function"],
)
def test_an_allocator_that_misbehaves(alloc: Any) -> None:
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), parameters=bnns.BNNSFilterParameters(0, 0, alloc))
    assert not layer.made


def test_an_allocator_that_gives_a_block_twice_or_a_bad_one() -> None:
    block, given, freed = bytearray(4096), [], []

    def same(memptr: Any, alignment: int, size: int) -> int:
        memptr[0] = block
        return 0

    twice = bnns.BNNSFilterParameters(0, 0, same, freed.append)
    ones = np.ones(3, np.float32)
    assert not Layer("batch", (3, 2, 5), gamma=ones, beta=ones, parameters=twice).made
    assert "twice" in (bnns.last_error() or "")

    def short(memptr: Any, alignment: int, size: int) -> int:
        given.append(bytearray(size - 1))
        memptr[0] = given[-1]
        return 0

    freed.clear()
    assert not Layer(
        "batch", (3, 2, 5), gamma=ones, parameters=bnns.BNNSFilterParameters(0, 0, short, freed.append)
    ).made
    assert freed == given


def test_an_allocator_of_ctypes_without_a_prototype() -> None:
    """Sizes are passed as size_t, and arrays over the memory keep it."""
    libc = ctypes.CDLL(None)
    sizes = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    def count(memptr: int, alignment: int, size: int) -> int:
        sizes.append(size)
        return 12

    big = Layer("batch", (3, 2**15, 2**15), parameters=bnns.BNNSFilterParameters(0, 0, count))
    big.filter.arena._alloc = count
    with pytest.raises(ValueError, match="returned 12"):
        big.filter.arena.take((2**32 + 16,), np.dtype(np.uint8))
    assert sizes == [2**32 + 16]
    layer = Layer(
        "batch",
        (3, 2, 5),
        gamma=np.ones(3, np.float32),
        parameters=bnns.BNNSFilterParameters(0, 0, libc.posix_memalign, libc.free),
    )
    x = normal(4, 3, 2, 5)
    assert np.array_equal(layer.forward(x), Layer("batch", (3, 2, 5)).forward(x))


def test_a_free_function_of_another_kind_does_no_harm() -> None:
    free = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_double), ctypes.c_int)(lambda *_: None)
    allocator = Allocator()
    parameters = bnns.BNNSFilterParameters(0, 0, allocator.alloc, free)
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), parameters=parameters)
    layer.forward(normal(4, 3, 2, 5))
    bnns.BNNSFilterDestroy(layer.filter)


def test_an_allocator_of_ctypes() -> None:
    libc = ctypes.CDLL(None)
    count = []
    alloc_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)

    @alloc_type
    def alloc(memptr: Any, alignment: int, size: int) -> int:
        count.append(size)
        return int(libc.posix_memalign(memptr, ctypes.c_size_t(alignment), ctypes.c_size_t(size)))

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def free(pointer: int) -> None:
        count.pop()
        libc.free(ctypes.c_void_p(pointer))

    layer = Layer(
        "batch", (3, 2, 5), gamma=np.ones(3, np.float32), parameters=bnns.BNNSFilterParameters(0, 0, alloc, free)
    )
    x = normal(4, 3, 2, 5)
    assert np.array_equal(layer.forward(x), Layer("batch", (3, 2, 5)).forward(x))
    assert len(count) == 2
    bnns.BNNSFilterDestroy(layer.filter)
    assert not count


def test_inference_from_several_threads() -> None:
    layer = Layer("batch", (3, 8, 8), mean=np.zeros(3, np.float32), variance=np.ones(3, np.float32))
    inputs = [normal(4, 3, 8, 8, seed=seed) for seed in range(40)]
    expected = [layer.forward(x, training=False) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(lambda x: layer.forward(x, training=False), inputs), expected, strict=True):
            assert np.array_equal(got, want)


# ---- forward in place, backward (section 8) --------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_in_place(kind: str, training: bool) -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer, other = (Layer(kind, (3, 2, 5), groups=1, activation=tanh()) for _ in range(2))
    y = other.forward(x, training)
    place = x.copy()
    layer.forward(place, training, y=place)
    assert np.array_equal(place, y)
    if training:
        parameter = (3, 2, 5) if kind == "layer" else (3,)
        for got, want in zip(layer.gradients(dy, place, parameter), other.gradients(dy, y, parameter), strict=True):
            assert np.array_equal(got, want)


def test_output_half_over_the_input() -> None:
    memory = np.zeros(150, np.float32)
    x = normal(4, 3, 2, 5)
    for training in (True, False):
        memory[:120] = x.ravel()
        layer = Layer("batch", (3, 2, 5))
        status = bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, memory, 30, memory[15:], 30, training)
        assert status == 0, bnns.last_error()
        assert np.array_equal(memory[15:135].reshape(x.shape), Layer("batch", (3, 2, 5)).forward(x, training))


def test_the_input_may_lie_where_its_copy_goes() -> None:
    """The client knows that memory: its own allocator gave it."""
    allocator = Allocator()
    layer, other = Layer("batch", (3, 2, 5), parameters=allocator.parameters()), Layer("batch", (3, 2, 5))
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer.forward(x)
    (block,) = allocator.given
    for first in (0, 30):  # all of it; its tail, of fewer samples
        memory = np.frombuffer(block, np.float32, 120)[first:].reshape(-1, 3, 2, 5)
        memory[...] = x[: len(memory)]
        y = layer.forward(memory)
        assert np.array_equal(y, other.forward(x[: len(memory)]))
        gradients = (one.gradients(dy[: len(y)], y, (3,)) for one in (layer, other))
        assert all(map(np.array_equal, *gradients))


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_with_gaps_or_unaligned_is_kept(kind: str) -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    parameter = (3, 2, 5) if kind == "layer" else (3,)
    other = Layer(kind, (3, 2, 5), groups=1)
    y = other.forward(x)
    expected = other.gradients(dy, y, parameter)
    gaps = np.full((4, 37), np.nan, np.float32)
    gaps[:, :30] = x.reshape(4, 30)
    unaligned = memoryview(b"\0" + x.tobytes())[1:]
    for memory, stride in ((gaps, 37), (unaligned, 30)):
        layer, out = Layer(kind, (3, 2, 5), groups=1), np.empty_like(y)
        status = bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, memory, stride, out, 30, True)
        assert status == 0, bnns.last_error()
        assert np.array_equal(out, y)
        assert all(map(np.array_equal, layer.gradients(dy, out, parameter), expected))


def test_the_client_may_change_its_input_before_backward() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer, other = Layer("batch", (3, 2, 5)), Layer("batch", (3, 2, 5))
    scratch = x.copy()
    y = layer.forward(scratch)
    scratch[:] = np.nan
    other.forward(x)
    assert np.array_equal(layer.gradients(dy, y, (3,))[0], other.gradients(dy, y, (3,))[0])


def test_gradients_that_are_null_are_not_produced_and_all_null_is_no_error() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), activation=tanh())
    y = layer.forward(x)
    dx, dgamma, dbeta = layer.gradients(dy, y, (3,))
    assert layer.backward(dy, y) == 0
    one = np.empty_like(x)
    assert layer.backward(dy, y, in_delta=image((3, 2, 5), one)) == 0
    assert np.array_equal(one, dx)
    for name, want in (("beta_delta", dbeta), ("gamma_delta", dgamma)):
        small = np.empty(3, np.float32)
        assert layer.backward(dy, y, **{name: described(small)}) == 0
        assert np.array_equal(small, want)


@pytest.mark.parametrize("flags", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_each_gradient_is_set_or_accumulated_by_its_own_flag(flags: tuple[int, int, int]) -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("group", (3, 2, 5), groups=1, activation=tanh())
    y = layer.forward(x)
    plain = layer.gradients(dy, y, (3,))
    results = [np.full_like(x, 10), np.full(3, 10, np.float32), np.full(3, 10, np.float32)]
    status = layer.backward(
        dy,
        y,
        in_delta=image((3, 2, 5), results[0], flags=flags[0]),
        gamma_delta=described(results[1], flags=flags[1]),
        beta_delta=described(results[2], flags=flags[2]),
    )
    assert status == 0
    for got, want, flag in zip(results, plain, flags, strict=True):
        assert np.allclose(got, want + 10 * flag, rtol=1e-6)
        if not flag:
            assert np.array_equal(got, want)


def test_backward_may_run_twice_and_inference_may_come_between() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), activation=tanh())
    y = layer.forward(x)
    first = layer.gradients(dy, y, (3,))
    layer.forward(normal(9, 3, 2, 5), training=False)
    for got, want in zip(layer.gradients(dy, y, (3,)), first, strict=True):
        assert np.array_equal(got, want)


def test_backward_needs_a_training_pass_of_the_same_batch() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5))
    dx = np.full_like(x, 7)
    assert layer.backward(dy, None, in_delta=image((3, 2, 5), dx)) == -1
    layer.forward(x, training=False)
    assert layer.backward(dy, None, in_delta=image((3, 2, 5), dx)) == -1
    assert "no training pass" in (bnns.last_error() or "")
    layer.forward(x)
    assert layer.backward(dy[:3], None, in_delta=image((3, 2, 5), dx)) == -1
    assert "batch_size is 3, but the training pass before had 4" in (bnns.last_error() or "")
    assert (dx == 7).all()


def test_gamma_gradient_of_an_absent_gamma() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    absent, ones = Layer("batch", (3, 2, 5)), Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32))
    y = absent.forward(x)
    ones.forward(x)
    for got, want in zip(absent.gradients(dy, y, (3,)), ones.gradients(dy, y, (3,)), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("shift", [0, 7])
def test_input_gradient_over_the_output_gradient(shift: int) -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), activation=tanh())
    y = layer.forward(x)
    want = layer.gradients(dy, y, (3,))[0]
    memory = np.zeros(140, np.float32)
    memory[:120] = dy.ravel()
    dx = memory[shift:][:120]
    status = bnns.BNNSNormalizationFilterApplyBackwardBatch(
        layer.filter, 4, image((3, 2, 5), dx), 30, y, 30, image((3, 2, 5), memory), 30, None, None
    )
    assert status == 0, bnns.last_error()
    assert np.array_equal(dx.reshape(x.shape), want)


def test_input_gradient_over_the_output() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), activation=tanh())
    y = layer.forward(x)
    want = layer.gradients(dy, y, (3,))[0]
    assert layer.backward(dy, y, in_delta=image((3, 2, 5), y)) == 0
    assert np.array_equal(y, want)


@pytest.mark.parametrize("place", ["its own", "out", "out_delta", "half of out_delta"])
def test_backward_enters_the_engine_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the gradient goes: it is known before whether the engine can write there."""
    x, memory = normal(4, 3, 2, 5), np.zeros(180, np.float32)
    dy = memory[:120].reshape(x.shape)
    dy[...] = normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), activation=tanh())
    y = layer.forward(x)
    want = layer.gradients(dy.copy(), y, (3,))[0]
    places = {"its own": np.empty_like(x), "out": y, "out_delta": dy}
    dx = places.get(place, memory[60:].reshape(x.shape))
    entered = []

    def counting(engine: Any, *arguments: Any) -> Any:
        def counted(*given: Any) -> Any:
            entered.append(engine)
            return engine(*given)

        return enter(counted, *arguments)

    monkeypatch.setattr("retrograd.ops.normalization.enter", counting)
    assert layer.backward(dy, y, in_delta=image((3, 2, 5), dx)) == 0, bnns.last_error()
    assert np.array_equal(dx, want)
    assert len(entered) == 1


# ---- fused activations (section 9) -----------------------------------------------------------------------------------

PARAMETERS = {"alpha": 0.75, "beta": 1.25}
ELEMENTWISE = {kind.code: name for name, kind in ACTIVATIONS.items() if kind.code <= 35}
REJECTED = ("Softmax", "LogSoftmax", "Gumbel", "GumbelMax", "IntegerLinearSaturate", "IntegerLinearSaturatePerChannel")
CLASS_X = ("Abs", "GELUApproximation", "GELUApproximation2", "SiLU", "GELU", "Erf")


def activation(code: int, alpha: float = 0.75, beta: float = 1.25) -> Any:
    return bnns.BNNSActivation(code, alpha, beta)


@pytest.mark.parametrize("code", ELEMENTWISE)
@pytest.mark.parametrize("training", [True, False])
def test_forward_with_every_elementwise_activation(code: int, training: bool) -> None:
    x = normal(4, 3, 2, 5)
    y = Layer("batch", (3, 2, 5), activation=activation(code)).forward(x, training)
    z = Layer("batch", (3, 2, 5)).forward(x)
    kind = ACTIVATIONS[ELEMENTWISE[code]]
    given_ = {name: value for name, value in PARAMETERS.items() if getattr(kind, name) != 0.0}
    expected = rg.activation_forward(z, rg.Activation(ELEMENTWISE[code], **given_))
    assert np.allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REJECTED)
def test_activations_that_are_not_elementwise_are_rejected(name: str) -> None:
    assert not Layer("batch", (3, 2, 5), activation=activation(getattr(bnns, f"BNNSActivationFunction{name}"))).made


@pytest.mark.parametrize("code", ELEMENTWISE)
def test_backward_with_every_activation_that_its_output_tells(code: int) -> None:
    """Against finite differences of the filter's own forward pass; class X fails."""
    name = ELEMENTWISE[code]
    x, dy = normal(3, 2, 2, 3), normal(3, 2, 2, 3, seed=1)
    layer = Layer("batch", (2, 2, 3), activation=activation(code))
    y = layer.forward(x)
    dx = np.full_like(x, 7)
    status = layer.backward(dy, y, in_delta=image((2, 2, 3), dx))
    trainable = name not in ("abs", "gelu_tanh", "hard_swish", "silu", "erf", "gelu")
    assert status == (0 if trainable else -1), bnns.last_error()
    if not trainable:
        assert (dx == 7).all()
        opted = Layer("batch", (2, 2, 3), activation=activation(code), slopes_from_input=True)
        y = opted.forward(x)
        assert opted.backward(dy, y, in_delta=image((2, 2, 3), dx)) == 0
    kind = ACTIVATIONS[name]
    given_ = {p: v for p, v in PARAMETERS.items() if getattr(kind, p) != 0.0}
    _, cache = rg.batch_norm_forward(
        x, eps=float(np.float32(1e-3)), activation=rg.Activation(name, **given_), slope_from="input"
    )
    assert np.allclose(dx, rg.batch_norm_backward(dy, cache).dx, rtol=2e-3, atol=2e-5)


def test_activation_parameters_that_hide_the_slope() -> None:
    """Leaky ReLUs and ELUs need alpha > 0; alpha 0 of a leaky ReLU is a ReLU."""
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    cases = {
        ("LeakyRectifiedLinear", -0.5): -1,
        ("LeakyRectifiedLinear", 0.0): 0,
        ("ClampedLeakyRectifiedLinear", -0.5): -1,
        ("ClampedLeakyRectifiedLinear", 0.0): 0,
        ("ELU", 0.0): -1,
        ("CELU", -1.0): -1,
        ("Softplus", 0.0): -1,
        ("ScaledTanh", 0.0): -1,
    }
    same = {"LeakyRectifiedLinear": "relu", "ClampedLeakyRectifiedLinear": rg.Activation("clamp", 0.0, 1.25)}
    for (name, alpha), expected in cases.items():
        layer = Layer("batch", (3, 2, 5), activation=activation(getattr(bnns, f"BNNSActivationFunction{name}"), alpha))
        y, dx = layer.forward(x), np.full_like(x, 7)
        assert layer.backward(dy, y, in_delta=image((3, 2, 5), dx)) == expected, (name, alpha)
        if expected:
            assert (dx == 7).all(), (name, alpha)
            continue
        want, cache = rg.batch_norm_forward(x, eps=float(np.float32(1e-3)), activation=same[name])
        assert np.array_equal(y, want), (name, alpha)
        assert np.array_equal(dx, rg.batch_norm_backward(dy, cache).dx), (name, alpha)
        assert y.min() == 0
        assert (y.max() == np.float32(1.25)) == name.startswith("Clamped"), y.max()


def test_leaky_relu_with_alpha_zero_is_relu() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    results = []
    for code in (bnns.BNNSActivationFunctionLeakyRectifiedLinear, bnns.BNNSActivationFunctionRectifiedLinear):
        layer = Layer("batch", (3, 2, 5), activation=activation(code, 0.0))
        y = layer.forward(x)
        results.append((y, *layer.gradients(dy, y, (3,))))
    for got, want in zip(*results, strict=True):
        assert np.array_equal(got, want)


def test_prelu_per_channel_runs_forward_and_does_not_train() -> None:
    x = normal(4, 3, 2, 5)
    layer = Layer("batch", (3, 2, 5), activation=activation(bnns.BNNSActivationFunctionPReLUPerChannel, 0.25))
    z = Layer("batch", (3, 2, 5)).forward(x)
    y = layer.forward(x)
    assert np.allclose(y, np.where(z < 0, 0.25 * z, z), rtol=1e-6)
    assert layer.backward(x, y, in_delta=image((3, 2, 5), np.empty_like(x))) == -1
    assert not Layer("batch", (3,), activation=activation(bnns.BNNSActivationFunctionPReLUPerChannel)).made


def test_backward_needs_the_output_under_an_activation_only() -> None:
    x = normal(4, 3, 2, 5)
    gelu = activation(bnns.BNNSActivationFunctionGELUApproximationSigmoid)
    for act, expected in ((None, 0), (tanh(), -1), (gelu, -1)):
        layer, dx = Layer("batch", (3, 2, 5), activation=act), np.full_like(x, 7)
        layer.forward(x)
        assert layer.backward(x, None, in_delta=image((3, 2, 5), dx)) == expected
        _, cache = rg.batch_norm_forward(x, eps=float(np.float32(1e-3)))
        assert np.array_equal(dx, rg.batch_norm_backward(x, cache).dx if act is None else np.full_like(x, 7))


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
            gamma_delta=described(results[1], flags=flags),
            beta_delta=described(results[2], flags=flags),
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
    assert layer.backward(ones, y, beta_delta=described(dbeta)) == 0
    z = Layer("batch", (3, 2, 5), types=(F16, F32)).forward(x)
    assert np.array_equal(dbeta, (np.abs(z) < np.float16(0.1)).sum((0, 2, 3)))


# ---- what must fail (section 11) -------------------------------------------------------------------------------------


def bad_layers() -> Iterator[tuple[str, Callable[[Any], Any], str]]:
    """(name, what is done to good parameters, reason)"""

    def put(path: str, value: Any) -> Callable[[Any], Any]:
        def change(parameters: Any) -> None:
            *owners, last = path.split(".")
            for owner in owners:
                parameters = getattr(parameters, owner)
            setattr(parameters, last, value)

        return change

    yield "layout", put("i_desc.layout", bnns.BNNSDataLayoutRowMajorMatrix), "layout is BNNSDataLayoutRowMajorMatrix"
    yield "zero extent", put("i_desc.size", (5, 0, 3)), "extent must be at least 1"
    yield "extents differ", put("o_desc.size", (5, 2, 4)), "o_desc"
    yield "decreasing strides", put("o_desc.stride", (4, 1, 30)), r"stride\[1\] is 1, below that"
    yield "overlap", put("o_desc.stride", (1, 2, 30)), "share memory"
    yield "integers", put("i_desc.data_type", bnns.BNNSDataTypeInt8), "BNNSDataTypeInt8"
    yield (
        "gamma size",
        put("gamma_desc", described(np.ones(4, np.float32))),
        r"gamma_desc\.size is \(4,\), expected size=\(3,\)",
    )
    yield "beta type", put("beta_desc", described(np.ones(3, np.int32))), "beta_desc.data_type"
    yield (
        "gamma short",
        put("gamma_desc", image((3,), np.ones(2, np.float32))),
        r"gamma_desc\.data has 8 bytes, but size=\(3,\) spans 12",
    )
    yield "moving size", put("moving_mean_desc", described(np.ones(2, np.float32))), "moving_mean_desc"
    yield "moving type", put("moving_variance_desc", described(np.ones(3, np.float16))), "must be BNNSDataTypeFloat32"
    for value in (-0.1, 1.5, float("nan"), "x", None):
        yield f"momentum {value}", put("momentum", value), "momentum"
    for value in (-1e-3, float("nan"), float("inf")):
        yield f"epsilon {value}", put("epsilon", value), "epsilon"
    yield "activation", put("activation.function", 99), r"activation\.function is 0x63"
    yield "alpha", put("activation", bnns.BNNSActivation(2, float("nan"))), "NaN"
    yield "string", put("i_desc.size", ("a", 1, 1)), "must be an integer"
    yield "address", put("gamma_desc.data", 4096), "address"


@pytest.mark.parametrize(("change", "reason"), [case[1:] for case in bad_layers()], ids=[c[0] for c in bad_layers()])
def test_creation_fails(change: Callable[[Any], Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    parameters = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32)).parameters
    change(parameters)
    with caplog.at_level(logging.INFO, "retrograd.bnns"):
        assert bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, parameters) is None
    assert caplog.records[-1].getMessage() == bnns.last_error()
    assert re.search(reason, bnns.last_error() or ""), bnns.last_error()


@pytest.mark.parametrize(
    ("norm_type", "fields", "reason"),
    [
        (bnns.BNNSGroupNorm, {"num_groups": 0}, "num_groups is 0"),
        (bnns.BNNSGroupNorm, {"num_groups": 2}, "num_groups is 2, which does not divide the 3"),
        (bnns.BNNSLayerNorm, {"normalization_axis": 3}, "normalization_axis is 3"),
        (bnns.BNNSConvolution, {}, "normType is 0"),
        (6, {}, "normType is 6"),
        ("batch", {}, "normType is 'batch'"),
    ],
)
def test_creation_fails_by_type(norm_type: Any, fields: dict[str, int], reason: str) -> None:
    parameters = Layer("batch", (3, 2, 5)).parameters
    for name, value in fields.items():
        setattr(parameters, name, value)
    assert bnns.BNNSFilterCreateLayerNormalization(norm_type, parameters) is None
    assert reason in (bnns.last_error() or "")


def test_layer_norm_of_a_vector_has_axis_0_only() -> None:
    assert Layer("layer", (5,), axis=0).made
    assert not Layer("layer", (5,), axis=1).made


def test_creation_fails_without_parameters() -> None:
    for nothing in (None, 5, bnns.BNNSActivation()):
        assert bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, nothing) is None  # type: ignore[arg-type]
    good = Layer("batch", (3, 2, 5)).parameters
    assert bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, good, "x") is None  # type: ignore[arg-type]


def test_unsupported_combinations_are_logged_as_information(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "retrograd.bnns"):
        Layer("batch", (3, 2, 5), activation=activation(bnns.BNNSActivationFunctionSoftmax))
        Layer("batch", (3, 2, 5), momentum=2)
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.ERROR]


def test_the_last_error_is_kept_per_thread() -> None:
    Layer("batch", (3, 2, 5), momentum=2)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(bnns.last_error).result() is None
    assert "momentum is 2.0" in (bnns.last_error() or "")


def test_too_few_arguments_are_pythons_own_affair() -> None:
    with pytest.raises(TypeError, match="missing"):
        bnns.BNNSNormalizationFilterApplyBatch(None, 3)  # type: ignore[call-arg]


APPLY = {"batch": 4, "in": "x", "in_stride": 30, "out": "y", "out_stride": 30}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"filter": None}, "filter is NULL"),
        ({"filter": 3}, "not a filter"),
        ({"in": None}, "in is NULL"),
        ({"out": None}, "out is NULL"),
        ({"batch": 0}, "batch_size is 0"),
        ({"batch": -1}, "batch_size"),
        (
            {"batch": 5},
            "out has 480 bytes, but 5 samples of size=(W, H, C)=(5, 2, 3), with 30 values from one to",
        ),
        ({"batch": 2**62}, "out has 480 bytes"),
        ({"out_stride": 29}, "out_stride is 29, but a sample of out spans 30"),
        ({"in_stride": 31}, "in has 480 bytes"),
        ({"out_stride": bnns.SIZE_MAX}, "out has 480 bytes"),
        ({"in_stride": "x"}, "in_stride is 'x'"),
        ({"out": bytes(480)}, "out is read-only"),
        ({"in": bytes(479)}, "in has 479 bytes"),
        ({"out": bytearray(479)}, "out has 479 bytes"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_apply_fails_and_touches_nothing(changes: dict[str, Any], reason: str, training: bool) -> None:
    mean = np.zeros(3, np.float32)
    layer = Layer("batch", (3, 2, 5), mean=mean, variance=np.ones(3, np.float32))
    x, y = normal(4, 3, 2, 5), np.full((4, 3, 2, 5), 7, np.float32)
    call = {"filter": layer.filter, **APPLY, "in": x, "out": y, **changes}
    status = bnns.BNNSNormalizationFilterApplyBatch(
        call["filter"], call["batch"], call["in"], call["in_stride"], call["out"], call["out_stride"], training
    )
    assert status == -1
    assert reason in (bnns.last_error() or "")
    assert (y == 7).all()
    assert not mean.any()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"out_delta": None}, "out_delta is NULL"),
        ({"out_delta": image((3, 2, 5))}, "out_delta.data is NULL"),
        ({"in_delta": image((3, 2, 5))}, "in_delta.data is NULL"),
        ({"gamma_delta": Descriptor()}, "gamma_delta.data is NULL"),
        (
            {"out_delta": image((3, 2, 4), np.zeros(200, np.float32))},
            "out_delta.size is (4, 2, 3), expected size=(W, H, C)=(5, 2, 3) as in o_desc",
        ),
        (
            {"in_delta": image((3, 5, 2), np.zeros(200, np.float32))},
            "in_delta.size is (2, 5, 3), expected size=(W, H, C)=(5, 2, 3) as in i_desc",
        ),
        (
            {"gamma_delta": described(np.zeros(4, np.float32))},
            "gamma_delta.size is (4,), expected size=(3,) as in gamma_desc",
        ),
        (
            {"beta_delta": described(np.zeros(2, np.float32))},
            "beta_delta.size is (2,), expected size=(3,) as in beta_desc",
        ),
        ({"out_delta": image((3, 2, 5), np.zeros(200, np.float16), data_type=F16)}, "out_delta.data_type"),
        ({"gamma_delta": described(np.zeros(3, np.float16))}, "gamma_delta.data_type"),
        ({"in_delta": image((3, 2, 5), np.zeros(119, np.float32))}, "in_delta.data has 476 bytes"),
        ({"in_delta": image((3, 2, 5), bytes(480))}, "in_delta.data is read-only"),
        ({"in_delta": image((3, 2, 5), bytearray(480), flags=2)}, "in_delta.flags is 2"),
        ({"in_delta": image((3, 2, 5), bytearray(480), stride=(1, 2, 10))}, "share memory"),
        ({"in_delta_stride": 29}, "in_delta_stride is 29"),
        ({"out": None}, "out is NULL"),
        ({"out": np.zeros(119, np.float32)}, "out has 476 bytes"),
        ({"batch": 3}, "batch_size is 3"),
        ({"out_delta": 3}, "out_delta is of type int"),
        ({"filter": None}, "filter is NULL"),
    ],
)
def test_backward_fails_and_touches_nothing(changes: dict[str, Any], reason: str) -> None:
    ones = np.ones(3, np.float32)
    layer = Layer("batch", (3, 2, 5), gamma=ones, beta=ones, activation=tanh())
    x = normal(4, 3, 2, 5)
    y = layer.forward(x)
    results = [np.full_like(x, 7), np.full(3, 7, np.float32), np.full(3, 7, np.float32)]
    call: dict[str, Any] = {
        "filter": layer.filter,
        "batch": 4,
        "in_delta": image((3, 2, 5), results[0]),
        "in_delta_stride": 30,
        "out": y,
        "out_delta": image((3, 2, 5), x),
        "beta_delta": described(results[1]),
        "gamma_delta": described(results[2]),
        **changes,
    }
    status = bnns.BNNSNormalizationFilterApplyBackwardBatch(
        call["filter"],
        call["batch"],
        call["in_delta"],
        call["in_delta_stride"],
        call["out"],
        30,
        call["out_delta"],
        30,
        call["beta_delta"],
        call["gamma_delta"],
    )
    assert status == -1
    assert reason in (bnns.last_error() or "")
    assert all((result == 7).all() for result in results)


def test_every_change_of_a_descriptor_is_noticed_by_the_next_call() -> None:
    """What a call has worked out is kept with its descriptors, and must not outlive a change."""
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), activation=tanh())
    y = layer.forward(x)
    dx, dgamma, dbeta = layer.gradients(dy, y, (3,))
    results = [np.empty_like(x), np.empty(3, np.float32), np.empty(3, np.float32)]
    out_delta, in_delta = image((3, 2, 5), dy), image((3, 2, 5), results[0])
    gamma_delta, beta_delta = described(results[1]), described(results[2])

    def run(out: Any = y, gamma: Any = gamma_delta, beta: Any = beta_delta, stride: int = 30) -> int:
        return bnns.BNNSNormalizationFilterApplyBackwardBatch(
            layer.filter, 4, in_delta, stride, out, 30, out_delta, 30, beta, gamma
        )

    for _ in range(2):  # planned, then remembered
        assert run() == 0
        assert np.array_equal(results[0], dx)
    assert run(gamma=beta_delta, beta=gamma_delta) == 0  # the same descriptors in other places
    assert np.array_equal(results[1], dbeta)
    assert np.array_equal(results[2], dgamma)
    assert run() == 0
    elsewhere = np.empty_like(x)
    in_delta.data = elsewhere
    assert run() == 0
    assert np.array_equal(elsewhere, dx)
    in_delta.flags = 1
    assert run() == 0
    assert np.allclose(elsewhere, 2 * dx, rtol=1e-6)
    in_delta.flags = 0
    out_delta.data = 2 * dy
    assert run() == 0
    assert np.allclose(elsewhere, 2 * dx, rtol=1e-5)
    assert run(out=None) == -1
    assert (
        bnns.BNNSNormalizationFilterApplyBackwardBatch(
            layer.filter,
            4.0,
            in_delta,
            30,
            y,
            30,
            out_delta,
            30,
            beta_delta,
            gamma_delta,  # type: ignore[arg-type]
        )
        == -1
    )
    assert run(out=y.copy()) == 0
    results[1][:] = 7
    assert run(gamma=None) == 0
    assert (results[1] == 7).all()
    assert run() == 0
    assert (results[1] != 7).all()
    assert run(stride=29) == -1
    in_delta.size[0] = 4
    assert run() == -1
    in_delta.size[0] = 5
    assert run() == 0
    results[1].flags.writeable = False
    assert run() == -1
    assert "gamma_delta.data is read-only" in (bnns.last_error() or "")
    results[1].flags.writeable = True
    assert run() == 0
    other = Layer("batch", (3, 2, 5), activation=tanh())
    other.forward(2 * x)
    layer.filter, first = other.filter, layer.filter
    assert run() == 0  # another filter has plans of its own
    layer.filter = first
    layer.forward(x[:3])
    assert run() == -1


@pytest.mark.parametrize("when", ["before", "after"])
def test_read_only_moving_statistics_fail_in_training_only(when: str) -> None:
    mean = np.zeros(3, np.float32)
    mean.flags.writeable = when == "after"
    layer = Layer("batch", (3, 2, 5), mean=mean, variance=np.ones(3, np.float32))
    mean.flags.writeable = False
    x, y = normal(4, 3, 2, 5), np.full((4, 3, 2, 5), 7, np.float32)
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 30, y, 30, True) == -1
    assert (y == 7).all()
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 30, y, 30, False) == 0


def test_a_training_pass_that_fails_leaves_the_one_before() -> None:
    allocator = Allocator(limit=2)
    gamma = np.ones(3, np.float32)
    parameters = allocator.parameters()
    layer = Layer("batch", (3, 2, 5), gamma=gamma, parameters=parameters)
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    y = layer.forward(x)
    before = layer.gradients(dy, y, (3,))
    more = normal(9, 3, 2, 5)
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 9, more, 30, np.empty_like(more), 30, True) == -1
    for got, want in zip(layer.gradients(dy, y, (3,)), before, strict=True):
        assert np.array_equal(got, want)
    client = Layer("batch", (3, 2, 5), gamma=gamma, parameters=bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr))
    y = client.forward(x)
    before = client.gradients(dy, y, (3,))
    memory = np.empty(123, np.float32)
    client.parameters.gamma_desc.data = memory[60:63]
    memory[60:63] = 1
    over = bnns.BNNSFilterCreateLayerNormalization(
        bnns.BNNSBatchNorm, client.parameters, bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr)
    )
    assert bnns.BNNSNormalizationFilterApplyBatch(over, 4, x, 30, memory, 30, True) == -1
    assert "out overlaps gamma_desc" in (bnns.last_error() or "")
    for got, want in zip(client.gradients(dy, y, (3,)), before, strict=True):
        assert np.array_equal(got, want)


def test_results_over_one_another_are_refused() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5))
    layer.forward(x)
    memory = np.full(130, 7, np.float32)
    dx, one, other = memory[:120], memory[118:121], memory[120:123]
    for changed in ({"in_delta": dx, "gamma_delta": one}, {"gamma_delta": other, "beta_delta": memory[121:124]}):
        deltas = {n: image((3, 2, 5), a) if n == "in_delta" else described(a) for n, a in changed.items()}
        assert layer.backward(dy, None, **deltas) == -1
        assert "overlaps" in (bnns.last_error() or "")
        assert (memory == 7).all()
    moving = np.ones(4, np.float32)
    assert not Layer("batch", (3, 2, 5), mean=moving[:3], variance=moving[1:]).made
    layer = Layer("batch", (3, 2, 5), mean=memory[:3], variance=np.ones(3, np.float32))
    for training in (True, False):
        assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 30, memory, 30, training) == -1
    assert (memory == 7).all()


@pytest.mark.parametrize("training", [True, False])
def test_memory_at_any_alignment(training: bool) -> None:
    def odd(array: np.ndarray) -> np.ndarray:
        memory = np.frombuffer(bytearray(array.nbytes + 1), np.uint8)[1:].view(array.dtype).reshape(array.shape)
        memory[...] = array
        return memory

    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer, plain = (Layer("batch", (3, 2, 5), activation=tanh()) for _ in range(2))
    y = plain.forward(x, training)
    out = odd(y)
    out[...] = 0
    layer.forward(odd(x), training, out)
    assert np.array_equal(out, y)
    if training:
        dx = odd(x)
        assert layer.backward(odd(dy), out, in_delta=image((3, 2, 5), dx)) == 0, bnns.last_error()
        assert np.array_equal(dx, plain.gradients(dy, y, (3,))[0])


def test_infinity_is_quiet() -> None:
    """Warnings are errors in these tests: nothing may warn once results have been written."""
    x = normal(4, 3, 2, 5)
    x[0, 0, 0, 0] = np.inf
    Layer("batch", (3, 2, 5), mean=np.zeros(3, np.float32), variance=np.ones(3, np.float32), momentum=1).forward(x)
    assert Layer("batch", (3, 2, 5), activation=activation(8, -1e30, 1e30), types=(F16, F16)).made


def test_all_gradients_null_needs_no_slope() -> None:
    x = normal(4, 3, 2, 5)
    layer = Layer("batch", (3, 2, 5), activation=activation(bnns.BNNSActivationFunctionSiLU))
    layer.forward(x)
    assert layer.backward(x, None) == 0


@pytest.mark.parametrize("strided", [False, True])
def test_beta_is_read_by_backward_where_it_tells_the_slope(strided: bool) -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    memory = np.zeros(6, np.float32)
    beta = memory[::2] if strided else memory[:3]
    flags = bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr)
    silu = activation(bnns.BNNSActivationFunctionSiLU)
    layer = Layer("batch", (3, 2, 5), beta=beta, activation=silu, parameters=flags, slopes_from_input=True)
    y = layer.forward(x)
    beta[:] = 1
    got = layer.gradients(dy, y, (3,))[0]
    other = Layer("batch", (3, 2, 5), beta=np.ones(3, np.float32), activation=silu, slopes_from_input=True)
    other.forward(x)
    assert np.array_equal(got, other.gradients(dy, y, (3,))[0])


def test_destroying_a_filter_releases_its_memory() -> None:
    layer = Layer("batch", (64, 32, 32))
    tracemalloc.start()
    layer.forward(normal(16, 64, 32, 32))
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    bnns.BNNSFilterDestroy(layer.filter)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert before - after >= 16 * 64 * 32 * 32 * 4


def test_nothing_of_a_call_is_kept_alive() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    dx = image((3, 2, 5), np.empty_like(x))
    out_delta = image((3, 2, 5), dy)
    y, counts = bytearray(x.nbytes), set()
    for _ in range(50):
        filter = Layer("batch", (3, 2, 5), activation=tanh()).filter
        assert bnns.BNNSNormalizationFilterApplyBatch(filter, 4, x, 30, y, 30, True) == 0
        status = bnns.BNNSNormalizationFilterApplyBackwardBatch(filter, 4, dx, 30, y, 30, out_delta, 30, None, None)
        assert status == 0
        bnns.BNNSFilterDestroy(filter)
        counts.add(sys.getrefcount(dy))
    y.append(0)  # no one holds its buffer
    assert len(counts) == 1  # one plan, not fifty


def test_tensors_that_move_their_memory_are_looked_at_anew(torch: Any) -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    gamma, result = torch.ones(3), torch.zeros(x.shape)
    parameters = bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr)
    layer = Layer("batch", (3, 2, 5))
    layer.parameters.gamma_desc = image((3,), gamma)
    layer.filter = bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, layer.parameters, parameters)
    in_delta, out_delta = image((3, 2, 5), result), image((3, 2, 5), dy)

    def run() -> np.ndarray:
        y = layer.forward(x)
        status = bnns.BNNSNormalizationFilterApplyBackwardBatch(
            layer.filter, 4, in_delta, 30, y, 30, out_delta, 30, None, None
        )
        assert status == 0, bnns.last_error()
        return y

    y = run()
    dx = result.numpy().copy()
    gamma.data, result.data = torch.full((3,), 2.0), torch.zeros(x.shape)
    assert np.allclose(run(), 2 * y, rtol=1e-6)
    assert np.allclose(result.numpy(), 2 * dx, rtol=1e-6)


def test_arrays_may_be_given_other_shapes_and_types_between_calls() -> None:
    """A plan that is kept has views of its own: of the memory, whatever the client's array says of it by then."""
    x, dy, dx = normal(4, 6), normal(4, 6, seed=1), np.zeros((4, 6), np.float32)
    layer = Layer("batch", (6,), activation=tanh())
    in_delta, out_delta = image((6,), dx), image((6,), dy)
    y = layer.forward(x)

    def run() -> int:
        return bnns.BNNSNormalizationFilterApplyBackwardBatch(
            layer.filter, 4, in_delta, 6, y, 6, out_delta, 6, None, None
        )

    assert run() == 0
    before = dx.copy()
    dx[...] = 0
    dx.shape = (2, 12)
    dx.dtype = dy.dtype = np.dtype(np.int32)
    assert run() == 0
    assert np.array_equal(dx.view(np.float32).reshape(4, 6), before)
    other = np.zeros(24, np.float32)
    x.shape = (24,)  # neither does forward look at the shape
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 6, other, 6, True) == 0
    assert np.array_equal(other.reshape(4, 6), y)


def test_numbers_that_are_no_integers_are_refused_by_a_remembered_call_too() -> None:
    layer, dx = Layer("batch", (6,)), np.full((4, 6), 7, np.float32)
    layer.forward(normal(4, 6))
    deltas = image((6,), dx), image((6,), normal(4, 6, seed=1))
    for batch, stride, status in ((4, 6, 0), (4.0, 6.0, -1), (4, 6, 0), (4, 6.0, -1), (np.int64(4), np.int64(6), 0)):
        dx[...] = 7
        call: tuple[Any, ...] = (layer.filter, batch, deltas[0], stride, None, stride, deltas[1], stride, None, None)
        assert bnns.BNNSNormalizationFilterApplyBackwardBatch(*call) == status
        assert (dx == 7).all() == (status != 0)


def test_one_sample_of_the_right_shape_with_gaps_between_its_values() -> None:
    layer = Layer("batch", (6,))
    x, y = normal(1, 6), np.full((1, 6), 7, np.float32)
    for part in ("i_desc", "o_desc"):
        parameters = layer.parameters.copy()
        getattr(parameters, part).stride = (2,)
        filter = bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, parameters)
        assert bnns.BNNSNormalizationFilterApplyBatch(filter, 1, x, 6, y, 6, True) == -1
        assert "span 44" in (bnns.last_error() or "")
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


OVERLAPS: dict[str, Callable[[np.ndarray], Any]] = {
    "itself": lambda memory: memory,
    "a view": lambda memory: memory[:].reshape(4, 6),
    "a view of a view": lambda memory: memory.view(np.uint8)[:].view(np.float32),
    "a buffer": memoryview,
    "an array over a buffer": lambda memory: np.frombuffer(memoryview(memory), np.float32).reshape(4, 6),
    "an array over an address": lambda memory: np.ctypeslib.as_array(
        (ctypes.c_float * 24).from_address(memory.ctypes.data)
    ).reshape(4, 6),
}


@pytest.mark.parametrize("part", ["gamma", "beta", "mean", "variance"])
@pytest.mark.parametrize("made", OVERLAPS)
def test_an_output_over_the_clients_own_is_seen_however_it_was_made(part: str, made: str) -> None:
    memory = np.ones(24, np.float32)
    own: dict[str, Any] = {name: np.ones(6, np.float32) for name in ("gamma", "beta", "mean", "variance")}
    own[part] = memory[9:15]
    layer = Layer("batch", (6,), parameters=bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr), **own)
    x, dy = normal(4, 6), normal(4, 6, seed=1)
    y = layer.forward(x)  # one that lies elsewhere
    gradients = layer.gradients(dy, y, (6,))
    before = memory.copy()
    for training in (True, False):
        out = OVERLAPS[made](memory)
        assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 6, out, 6, training) == -1
        assert "out overlaps" in (bnns.last_error() or "")
    assert np.array_equal(memory, before)
    for got, want in zip(layer.gradients(dy, y, (6,)), gradients, strict=True):
        assert np.array_equal(got, want)


def test_an_output_beside_the_clients_own_in_one_array() -> None:
    memory = np.zeros(36, np.float32)
    memory[24:30] = 1
    flags = bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr)
    layer = Layer(
        "batch", (6,), gamma=memory[24:30], mean=memory[30:], variance=np.ones(6, np.float32), parameters=flags
    )
    other = Layer("batch", (6,), gamma=np.ones(6, np.float32))
    x = normal(4, 6)
    assert np.array_equal(layer.forward(x, y=memory[:24].reshape(4, 6)), other.forward(x))
    assert np.array_equal(memory[24:30], np.ones(6))


def test_statistics_made_read_only_and_writable_again_between_passes() -> None:
    mean, variance = np.zeros(3, np.float32), np.ones(3, np.float32)
    layer = Layer("batch", (3, 2, 5), mean=mean, variance=variance)
    x = normal(4, 3, 2, 5)
    layer.forward(x)
    after = mean.copy()
    for array in (mean, variance):
        array.flags.writeable = False
        y = np.full(x.shape, 7, np.float32)
        assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 30, y, 30, True) == -1
        assert "read-only" in (bnns.last_error() or "")
        assert (y == 7).all()
        layer.forward(x, training=False)
        array.flags.writeable = True
    assert np.array_equal(mean, after)
    layer.forward(x)
    assert not np.array_equal(mean, after)


def test_moving_statistics_that_move_are_looked_at_anew(torch: Any) -> None:
    mean, variance = torch.zeros(3), torch.ones(3)
    layer = Layer("batch", (3, 2, 5))
    layer.parameters.moving_mean_desc, layer.parameters.moving_variance_desc = image((3,), mean), image((3,), variance)
    layer.filter = bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, layer.parameters)
    x = normal(4, 3, 2, 5)
    layer.forward(x)
    first = mean.clone()
    mean.data = torch.zeros(3)
    layer.forward(x)
    assert torch.equal(mean, first)


def test_a_filter_keeps_no_array_of_a_forward_pass() -> None:
    x, y = normal(4, 6), np.empty((4, 6), np.float32)
    layer = Layer("batch", (6,), activation=tanh())
    layer.forward(x, y=y)
    references = [weakref.ref(array) for array in (x, y)]
    del x, y
    assert [reference() for reference in references] == [None, None]
    memory = bytearray(96)
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, memory, 6, memory, 6, True) == 0
    memory.extend(b"more")  # which it could not if someone had a view of it
    short = memory[:92]
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, short, 6, short, 6, True) == -1


def test_a_destroyed_filter_fails() -> None:
    layer = Layer("batch", (3, 2, 5))
    bnns.BNNSFilterDestroy(layer.filter)
    x = normal(4, 3, 2, 5)
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 30, x, 30, True) == -1
    assert "destroyed" in (bnns.last_error() or "")
    assert bnns.BNNSFilterDestroy(None) is None


def test_the_general_functions_fail_on_a_normalization_filter() -> None:
    filter = Layer("batch", (3, 2, 5)).filter
    x = normal(4, 3, 2, 5)
    assert bnns.BNNSFilterApply(filter, x, x) == -1
    assert bnns.BNNSFilterApplyBatch(filter, 4, x, 30, x, 30) == -1
    assert "BNNSNormalizationFilterApplyBatch" in (bnns.last_error() or "")
    d = image((3, 2, 5), x)
    assert bnns.BNNSFilterApplyBackwardBatch(filter, 4, x, 30, d, 30, x, 30, d, 30, None, None) == -1
    assert bnns.BNNSGetPointer(filter, bnns.BNNSPointerSpecifierAlpha).data is None


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
