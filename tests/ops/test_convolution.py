"""Convolutions and transposed ones: the engine against the oracle and PyTorch, bits, places in memory, refusals."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import retrograd as rg
from retrograd import ConvGradients, _core
from retrograd.lab import reference
from support.arrays import MEMORY, assert_same_bits, assert_untouched_around, fenced, placed
from support.onnx_cases import OnnxCase, collect_onnx_cases

Array = npt.NDArray[Any]

THREADS = (1, 2, 3, 7)
KIB = 1024


class Case(NamedTuple):
    """x is [samples, channels, *size], the kernel as in options of the functions; one entry for each spatial axis."""

    samples: int
    channels: int
    size: tuple[int, ...]
    outputs: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def options(self) -> dict[str, Any]:
        return {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }


def case(
    samples: int,
    channels: int,
    size: tuple[int, ...],
    outputs: int,
    kernel: int | tuple[int, ...],
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[tuple[int, int], ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Case:
    axes = len(size)
    each = [(value,) * axes if isinstance(value, int) else value for value in (kernel, stride, dilation)]
    pads = ((padding, padding),) * axes if isinstance(padding, int) else padding
    return Case(samples, channels, size, outputs, each[0], each[1], pads, each[2], groups)


# Outputs up to 4 are summed directly, more are products of panels (16 float32, 8 float64) in runs of 128 or 512.
CASES = {
    "plain": case(2, 3, (7, 9), 6, 3),
    "same": case(2, 8, (14, 14), 17, 3, padding=1),
    "one_pixel": case(3, 5, (1, 1), 7, 1),
    "pointwise": case(2, 33, (5, 7), 40, 1),
    "few_outputs": case(2, 9, (8, 17), 4, 3, padding=1),
    "one_channel": case(3, 1, (20, 20), 32, 3, padding=1),
    "one_output": case(2, 5, (6, 31), 1, (2, 5)),
    "depthwise": case(2, 9, (7, 18), 9, 3, padding=1, groups=9),
    "depthwise_twice": case(2, 6, (7, 8), 12, 3, stride=2, padding=1, groups=6),
    "groups": case(2, 12, (9, 8), 30, (3, 2), groups=3),
    "strides": case(2, 4, (13, 17), 6, 3, stride=(2, 3), padding=1),
    "stride_beyond_kernel": case(2, 4, (17, 19), 5, 2, stride=(5, 4)),
    "stride_beyond_image": case(2, 3, (4, 5), 6, 2, stride=100, padding=1),
    "dilation": case(1, 3, (15, 16), 7, 3, padding=2, dilation=(2, 3)),
    "dilation_and_stride": case(2, 3, (15, 16), 3, 3, stride=2, padding=((4, 1), (0, 5)), dilation=(3, 2)),
    "asymmetric": case(2, 3, (6, 7), 5, (3, 4), padding=((0, 2), (3, 1))),
    "padding_beyond_kernel": case(1, 2, (3, 3), 5, 2, padding=4),
    "surplus": case(1, 2, (10, 11), 6, 3, stride=3),
    # One output pixel, or one along an axis: every tap of dx is another pixel, and some pixels have none.
    "kernel_of_the_image": case(3, 4, (6, 5), 9, (6, 5)),
    "kernel_of_the_padded_image": case(3, 4, (6, 5), 10, (8, 6), padding=((1, 1), (0, 1)), groups=2),
    "kernel_of_the_rows": case(3, 3, (7, 18), 6, (3, 18), stride=(2, 1), padding=((1, 1), (0, 0))),
    "kernel_of_the_columns": case(3, 6, (18, 7), 10, (18, 3), stride=(5, 1), groups=2),
    "kernel_of_few_pixels": case(19, 1, (3,), 6, 3),
    "dilation_over_the_image": case(2, 3, (9, 12), 5, 3, dilation=(4, 5)),
    "small_images": case(37, 5, (3, 2), 7, 3, padding=1),
    "deep": case(1, 70, (6, 6), 8, 3, padding=1),
    "row": case(2, 3, (1, 67), 5, (1, 5), padding=((0, 0), (2, 2))),
    "column": case(2, 3, (67, 1), 5, (5, 1), padding=((2, 2), (0, 0))),
    "one_axis": case(2, 5, (33,), 7, 5, stride=2, padding=2),
    "one_axis_groups": case(2, 6, (19,), 4, 3, dilation=2, groups=2),
    "no_samples": case(0, 3, (5, 5), 6, 3),
    "no_channels": case(2, 0, (5, 5), 6, 3),
    "no_outputs": case(2, 3, (5, 5), 0, 3),
    "no_pixels": case(2, 3, (0, 4), 6, 1, padding=1),
    "only_padding": case(2, 3, (1, 1), 5, 3, stride=6, padding=6),
}


def roundings(terms: int) -> float:
    """Of a sum of products, in half units of the size of its terms; they are as often up as down."""
    return 8 + 2 * math.sqrt(terms)


def assert_close(got: Array | None, exact: Array, size: Array, count: float) -> None:
    """Within `count` roundings of numbers of that size."""
    assert got is not None
    info = np.finfo(got.dtype)
    tolerance = np.asarray(count * size, np.longdouble) * info.eps / 2 + info.tiny
    assert got.shape == exact.shape
    worst = np.max(np.abs(got - exact) / tolerance, initial=0)
    assert worst <= 1, f"{worst} of the tolerance"


def draw(c: Case, dtype: Any, seed: int = 0) -> tuple[Array, Array, Array, Array]:
    """x, w, b and dy of a convolution."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype)

    x, w = normal(c.samples, c.channels, *c.size), normal(c.outputs, c.channels // c.groups, *c.kernel)
    pixels = (
        (size + before + after - d * (k - 1) - 1) // s + 1
        for size, k, s, (before, after), d in zip(c.size, c.kernel, c.stride, c.padding, c.dilation, strict=True)
    )
    return x, w, normal(c.outputs), normal(c.samples, c.outputs, *pixels)


def exact_results(c: Case, x: Array, w: Array, b: Array, dy: Array) -> list[Array]:
    """y, dx, dw and db."""
    return [reference.conv_forward(x, w, b, **c.options), *reference.conv_backward(dy, x, w, **c.options)]


@functools.cache  # for all levels
def oracle(c: Case, dtype: Any, seed: int = 0) -> tuple[list[Array], list[Array]]:
    """The results of what `draw` gives, and the sizes of their terms."""
    arrays = draw(c, dtype, seed)
    return exact_results(c, *arrays), exact_results(c, *(np.abs(a) for a in arrays))


def check(c: Case, dtype: Any, seed: int, y: Array, gradients: ConvGradients) -> None:
    exacts, sizes = oracle(c, dtype, seed)
    taps = c.channels // c.groups * math.prod(c.kernel)
    pixels = y.size // max(1, c.outputs)
    # Of db, which is summed in float64: of float32 there is one rounding, of float64 as many as of any sum.
    counts = (taps, c.outputs * taps, pixels)
    roundings_of = [*map(roundings, counts), 1.01 if dtype == np.float32 else roundings(pixels)]
    for got, exact, size, count in zip((y, *gradients), exacts, sizes, roundings_of, strict=True):
        assert_close(got, exact, size, count)


def transposed(c: Case) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Options of the transposed convolution that has the shapes of this one's gradient, and its output padding."""
    spans = ((size + sum(pad) - d * (k - 1) - 1, s) for size, k, s, pad, d in zip(
        c.size, c.kernel, c.stride, c.padding, c.dilation, strict=True))  # fmt: skip
    return c.options, tuple(span % s for span, s in spans)


def draw_transposed(c: Case, dtype: Any) -> tuple[Array, Array, Array, Array]:
    """x, w, b and dy of the transposed convolution, from the case's result to its input."""
    dy, w, _, x = draw(c, dtype, 3)
    return x, w, np.random.default_rng(4).standard_normal(c.channels).astype(dtype), dy


@functools.cache  # for all levels
def transposed_oracle(c: Case, dtype: Any) -> tuple[list[Array], list[Array]]:
    options, extra = transposed(c)

    def results(x: Array, w: Array, b: Array, dy: Array) -> list[Array]:
        y = reference.conv_transpose_forward(x, w, b, output_padding=extra, **options)
        return [y, *reference.conv_transpose_backward(dy, x, w, **options)]

    arrays = draw_transposed(c, dtype)
    return results(*arrays), results(*(np.abs(a) for a in arrays))


def check_transposed(c: Case, dtype: Any) -> None:
    x, w, b, dy = draw_transposed(c, dtype)
    options, extra = transposed(c)
    y = rg.conv_transpose_forward(x, w, b, output_padding=extra, **options)
    gradients = rg.conv_transpose_backward(dy, x, w, output_padding=extra, **options)
    exacts, sizes = transposed_oracle(c, dtype)
    assert_close(y, exacts[0], sizes[0], roundings(w.size))
    for got, right, size in zip(gradients, exacts[1:], sizes[1:], strict=True):
        assert_close(got, right, size, roundings(max(w.size, x.size)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CASES)
def test_convolutions_against_the_oracle(isa: str, dtype: Any, name: str) -> None:
    c = CASES[name]
    x, w, b, dy = draw(c, dtype)
    y, gradients = rg.conv_forward(x, w, b, **c.options), rg.conv_backward(dy, x, w, **c.options)
    check(c, dtype, 0, y, gradients)
    assert_same_bits([rg.conv_forward(x, w, **c.options)], [rg.conv_forward(x, w, 0 * b, **c.options)])
    # The other layout of images has the same bits: only the order in memory differs.
    last = [np.ascontiguousarray(np.moveaxis(a, 1, -1)) for a in (x, dy)]
    assert_same_bits([np.moveaxis(rg.conv_forward(last[0], w, b, channels_last=True, **c.options), -1, 1)], [y])
    dx, dw, db = rg.conv_backward(last[1], last[0], w, channels_last=True, **c.options)
    assert dx is not None
    assert_same_bits([np.moveaxis(dx, -1, 1), dw], gradients[:2])
    assert gradients.db is not None
    np.testing.assert_allclose(np.asarray(db), gradients.db, rtol=1e-6, atol=1e-6)
    if 0 not in c.size and 0 not in w.shape:
        check_transposed(c, dtype)


LARGE = {
    "products": case(3, 20, (28, 28), 24, 3, padding=1),
    "pointwise": case(3, 70, (14, 14), 50, 1),
    "strided": case(2, 24, (31, 29), 20, 3, stride=2, padding=1),
    "few_channels": case(2, 3, (40, 50), 4, 3, padding=1),
    "depthwise": case(2, 40, (28, 28), 40, 3, padding=1, groups=40),
    "small_images": case(67, 20, (5, 3), 24, 3, padding=1),
    "kernel_of_the_image": case(37, 6, (7, 5), 300, (7, 5)),
}


@pytest.mark.parametrize("name", LARGE)
def test_same_bits_at_any_level_thread_count_and_cache_size(name: str) -> None:
    c = LARGE[name]
    results = []
    x, w, b, dy = draw(c, np.float32)
    sizes = (None, (KIB, 4 * KIB, 16 * KIB, 1), (KIB * KIB, 64 * KIB * KIB, 1024 * KIB * KIB, 1))
    try:
        for level in _core.isa_levels():
            _core.select_isa(level)
            for threads in THREADS:
                for cache in sizes:
                    if cache:
                        _core.override_caches(*cache)
                    else:
                        _core.restore_caches()
                    y = rg.conv_forward(x, w, b, activation="tanh", num_threads=threads, **c.options)
                    gradients = rg.conv_backward(dy, x, w, activation="tanh", y=y, num_threads=threads, **c.options)
                    results.append((y, *gradients))
    finally:
        _core.restore_caches()
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_samples_do_not_depend_on_each_other(isa: str) -> None:
    """The bits of a sample's results are the same alone and in a batch."""
    for c in (LARGE["strided"], LARGE["depthwise"], LARGE["small_images"], LARGE["kernel_of_the_image"]):
        x, w, b, dy = draw(c, np.float32)
        y, dx = rg.conv_forward(x, w, b, **c.options), rg.conv_backward(dy, x, w, need=["dx"], **c.options).dx
        assert dx is not None
        assert_same_bits([rg.conv_forward(x[1:2], w, b, **c.options)], [y[1:2]])
        assert_same_bits([rg.conv_backward(dy[1:2], x[1:2], w, need=["dx"], **c.options).dx], [dx[1:2]])


@st.composite
def any_case(draw_: Any) -> Case:
    axes = draw_(st.integers(1, 2))
    groups = draw_(st.sampled_from([1, 1, 1, 2, 3]))

    def each(values: list[int]) -> tuple[int, ...]:
        return tuple(draw_(st.sampled_from(values)) for _ in range(axes))

    c = Case(
        draw_(st.sampled_from([0, 1, 2, 3])),
        groups * draw_(st.sampled_from([0, 1, 2, 3, 5, 9, 17])),
        each([0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 20]),
        groups * draw_(st.sampled_from([0, 1, 2, 4, 5, 6, 7, 15, 17, 33])),
        each([1, 1, 2, 3, 4, 5]),
        each([1, 1, 2, 3, 7]),
        tuple(zip(each([0, 1, 2, 6]), each([0, 1, 2, 6]), strict=True)),
        each([1, 1, 2, 3]),
        groups,
    )
    spans = zip(c.size, c.kernel, c.padding, c.dilation, strict=True)
    assume(all(size + sum(pad) >= d * (k - 1) + 1 for size, k, pad, d in spans))
    return c


@settings(max_examples=150, deadline=None)
@given(
    c=any_case(),
    dtype=st.sampled_from([np.float32, np.float64]),
    places=st.lists(st.sampled_from([m for m in MEMORY if m != "permuted"] + ["last"]), min_size=8, max_size=8),
    accumulate=st.booleans(),
    level=st.sampled_from(_core.isa_levels()),
    seed=st.integers(0, 99),
)
def test_any_shape_and_strides(c: Case, dtype: Any, places: list[str], accumulate: bool, level: str, seed: int) -> None:
    _core.select_isa(level)

    def put(array: Array, place: str) -> Array:
        if place == "last":  # channels last in memory, as an image [N, C, ...]
            return placed(array, "permuted", (0, *range(2, array.ndim), 1)) if array.ndim > 1 else array.copy()
        return placed(array, place)

    x, w, b, dy = draw(c, dtype, seed)
    plain_y, plain = rg.conv_forward(x, w, b, **c.options), rg.conv_backward(dy, x, w, **c.options)
    check(c, dtype, seed, plain_y, plain)
    views = [put(a, place) for a, place in zip((x, w, b, dy), places, strict=False)]
    y = put(np.full_like(plain_y, np.nan), places[4])
    assert rg.conv_forward(*views[:3], out=y, **c.options) is y
    assert_same_bits([y], [plain_y])
    assert_untouched_around(y)
    start = [np.ones_like(a) if accumulate else np.full_like(a, np.nan) for a in (x, w, b)]
    out = ConvGradients(*(put(a, place) for a, place in zip(start, places[5:], strict=True)))
    got = rg.conv_backward(views[3], *views[:2], out=out, accumulate=accumulate, **c.options)
    assert all(a is b for a, b in zip(got, out, strict=True))
    for array in out:
        assert array is not None
        assert_untouched_around(array)
    expected = plain
    if accumulate:
        fresh = ConvGradients(*(a.copy() for a in start))
        expected = rg.conv_backward(dy, x, w, out=fresh, accumulate=True, **c.options)
        unit = 400 * np.finfo(dtype).eps
        for total, added in zip(expected, plain, strict=True):
            assert total is not None
            assert added is not None
            np.testing.assert_allclose(total, 1 + added, rtol=unit, atol=unit)
    assert_same_bits(got[:2], expected[:2])
    # The order of the sums of db depends on the layout.
    size = 1 + float(np.abs(dy).sum())
    np.testing.assert_allclose(np.asarray(got.db), np.asarray(expected.db), rtol=0, atol=size * np.finfo(dtype).eps)


@pytest.mark.parametrize("at_end", [False, True])
def test_reads_and_writes_stay_within_their_arrays(isa: str, at_end: bool) -> None:
    for name in ("plain", "few_outputs", "depthwise", "strides", "dilation_and_stride", "deep", "one_axis",
                 "kernel_of_the_padded_image", "kernel_of_the_rows", "small_images"):  # fmt: skip
        c = CASES[name]
        for channels_last in (False, True):
            arrays = [np.moveaxis(a, 1, -1).copy() if channels_last and a.ndim > 1 and i in (0, 3) else a
                      for i, a in enumerate(draw(c, np.float32))]  # fmt: skip
            options = {**c.options, "channels_last": channels_last}
            x, w, b, dy = (fenced(a, at_end) for a in arrays)
            y = fenced(np.zeros_like(arrays[3]), at_end)
            out = ConvGradients(*(fenced(np.zeros_like(a), at_end) for a in arrays[:3]))
            assert_same_bits([rg.conv_forward(x, w, b, out=y, **options)], [rg.conv_forward(*arrays[:3], **options)])
            assert_same_bits(
                rg.conv_backward(dy, x, w, out=out, **options), rg.conv_backward(arrays[3], *arrays[:2], **options)
            )


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("outputs", [3, 20])
def test_poison_reaches_what_depends_on_it(isa: str, outputs: int, poison: float) -> None:
    c = case(2, 3, (9, 21), outputs, 3, stride=(1, 2), padding=1)
    x, w, b, dy = draw(c, np.float32)
    x[1, 2, 4, 7] = poison
    y, gradients = rg.conv_forward(x, w, b, **c.options), rg.conv_backward(dy, x, w, **c.options)
    touched = np.zeros(y.shape, bool)
    touched[1, :, 3:6, 3:5] = True  # rows 3 to 5 read row 4; columns 3 and 4 (at 6 and 8) read column 7
    np.testing.assert_array_equal(~np.isfinite(y), touched)
    assert gradients.dx is not None
    assert gradients.dw is not None
    assert np.isfinite(gradients.dx).all()
    touched = np.zeros(w.shape, bool)
    touched[:, 2, :, [0, 2]] = True  # column 7 is odd: the middle tap reads even ones
    np.testing.assert_array_equal(~np.isfinite(gradients.dw), touched)
    x, w, b, dy = draw(c, np.float32)
    dy[0, 1, 2, 3] = poison
    gradients = rg.conv_backward(dy, x, w, **c.options)
    touched = np.zeros(x.shape, bool)
    touched[0, :, 1:4, 5:8] = True
    np.testing.assert_array_equal(~np.isfinite(np.asarray(gradients.dx)), touched)
    np.testing.assert_array_equal(np.isfinite(np.asarray(gradients.db)), np.arange(outputs) != 1)
    np.testing.assert_array_equal(np.isfinite(np.asarray(gradients.dw)).all((1, 2, 3)), np.arange(outputs) != 1)


@pytest.mark.parametrize("name", ["relu", "tanh", "sigmoid", "softplus"])
@pytest.mark.parametrize("size", ["few_outputs", "same", "dilation_over_the_image"])
def test_fused_activation(isa: str, name: str, size: str) -> None:
    c = CASES[size]
    x, w, b, dy = draw(c, np.float32)
    activation = rg.Activation(name, 0.8, 1.4) if name == "softplus" else rg.Activation(name)
    y = rg.conv_forward(x, w, b, activation=activation, **c.options)
    z = rg.conv_forward(x, w, b, **c.options)
    assert_same_bits([y], [rg.activation_forward(z, activation)])
    dz = rg.activation_backward(dy, activation, y=y)
    assert_same_bits(
        rg.conv_backward(dy, x, w, activation=activation, y=y, **c.options), rg.conv_backward(dz, x, w, **c.options)
    )
    small = rg.conv_transpose_forward(y, w, activation=activation, **c.options)
    plain = rg.conv_transpose_forward(y, w, **c.options)
    assert_same_bits([small], [rg.activation_forward(plain, activation)])


def torch_options(c: Case) -> dict[str, Any]:
    return {**c.options, "padding": tuple(before for before, _ in c.padding)}


@pytest.mark.parametrize("name", ["same", "strides", "depthwise_twice", "groups", "one_axis", "stride_beyond_kernel"])
def test_convolutions_against_torch(name: str, torch: Any) -> None:
    c = CASES[name]
    x, w, b, dy = draw(c, np.float32)
    tensors = [torch.from_numpy(a.copy()).requires_grad_() for a in (x, w, b)]
    functional = torch.nn.functional
    y = (functional.conv1d if len(c.size) == 1 else functional.conv2d)(*tensors, **torch_options(c))
    y.backward(torch.from_numpy(dy))
    np.testing.assert_allclose(rg.conv_forward(x, w, b, **c.options), y.detach().numpy(), rtol=1e-5, atol=2e-5)
    for ours, tensor in zip(rg.conv_backward(dy, x, w, **c.options), tensors, strict=True):
        np.testing.assert_allclose(np.asarray(ours), tensor.grad.numpy(), rtol=1e-5, atol=1e-4)
    options, extra = transposed(c)
    b = np.random.default_rng(1).standard_normal(c.channels).astype(np.float32)
    tensors = [torch.from_numpy(a.copy()).requires_grad_() for a in (dy, w, b)]
    function = functional.conv_transpose1d if len(c.size) == 1 else functional.conv_transpose2d
    y = function(*tensors, output_padding=extra, **torch_options(c))
    y.backward(torch.from_numpy(x))
    got = rg.conv_transpose_forward(dy, w, b, output_padding=extra, **options)
    np.testing.assert_allclose(got, y.detach().numpy(), rtol=1e-5, atol=2e-5)
    ours = rg.conv_transpose_backward(x, dy, w, output_padding=extra, **options)
    for mine, tensor in zip(ours, tensors, strict=True):
        np.testing.assert_allclose(np.asarray(mine), tensor.grad.numpy(), rtol=1e-5, atol=1e-4)


def onnx_padding(node: OnnxCase, shape: tuple[int, ...], kernel: tuple[int, ...], stride: Any, dilation: Any) -> Any:
    auto = node.attributes.get("auto_pad", b"NOTSET")
    pads = node.attributes.get("pads")
    if auto in (b"NOTSET", b"VALID"):
        axes = len(kernel)
        return [(pads[i], pads[i + axes]) for i in range(axes)] if pads else 0
    pairs = []
    for size, k, s, d in zip(shape, kernel, stride, dilation, strict=True):
        total = max(0, (-(-size // s) - 1) * s + (k - 1) * d + 1 - size)
        low, high = total // 2, total - total // 2
        pairs.append((low, high) if auto == b"SAME_UPPER" else (high, low))
    return pairs


@pytest.mark.parametrize("node", collect_onnx_cases("conv", ("Conv",)), ids=lambda node: node.name)
def test_onnx_node(node: OnnxCase) -> None:
    x, w, *rest = node.inputs
    assert x is not None
    assert w is not None
    axes = w.ndim - 2
    stride, dilation = (tuple(node.attributes.get(name) or (1,) * axes) for name in ("strides", "dilations"))
    padding = onnx_padding(node, x.shape[2:], w.shape[2:], stride, dilation)
    options = {"stride": stride, "dilation": dilation, "groups": node.attributes.get("group", 1)}
    y = rg.conv_forward(x, w, rest[0] if rest else None, padding=padding, **options)
    np.testing.assert_allclose(y, node.outputs[0], rtol=1e-6, atol=1e-5)


def test_need_and_mapping() -> None:
    c = CASES["groups"]
    x, w, _, dy = draw(c, np.float64)
    whole = rg.conv_backward(dy, x, w, **c.options)
    for name in ConvGradients._fields:
        part = rg.conv_backward(dy, x, w, need=[name], **c.options)
        assert [key for key, value in part._asdict().items() if value is not None] == [name]
        assert_same_bits([getattr(part, name)], [getattr(whole, name)])
    buffer = np.empty_like(w)
    got = rg.conv_backward(dy, x, w, out={"dw": buffer}, **c.options)
    assert got.dw is buffer
    assert_same_bits(got, whole)
    # float32 sums of float64 precision: a small bias gradient among large ones is not lost
    dy32 = np.array([1e8, 1.0, -1e8], np.float32).reshape(1, 1, 3)
    db = rg.conv_backward(dy32, np.ones((1, 2, 3), np.float32), np.ones((1, 2, 1), np.float32)).db
    np.testing.assert_array_equal(np.asarray(db), [1.0])


def test_one_number_stands_for_every_axis() -> None:
    x, w = np.ones((1, 2, 9, 9), np.float32), np.ones((5, 2, 3, 3), np.float32)
    long = rg.conv_forward(x, w, stride=(2, 2), padding=((1, 1), (1, 1)), dilation=(2, 2))
    assert_same_bits([rg.conv_forward(x, w, stride=2, padding=1, dilation=2)], [long])
    assert_same_bits([rg.conv_forward(x, w, stride=2, padding=[1, (1, 1)], dilation=[2, 2])], [long])


BIG = 2**31 - 1


@pytest.mark.parametrize("outputs", [2, 9])
def test_huge_strides_paddings_and_dilations(isa: str, outputs: int) -> None:
    """Only the taps and pixels that meet the image need memory."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 1, 1), np.float32), rng.standard_normal((outputs, 3, 3, 3), np.float32)
    middle = w[:, :, 1:2, 1:2]
    options = {"dilation": BIG, "padding": BIG}
    assert_same_bits([rg.conv_forward(x, w, **options)], [rg.conv_forward(x, middle)])
    dy = rng.standard_normal((2, outputs, 1, 1), np.float32)
    got, small = rg.conv_backward(dy, x, w, **options), rg.conv_backward(dy, x, middle)
    expected = np.zeros_like(w)
    expected[:, :, 1:2, 1:2] = small.dw
    assert_same_bits(got, ConvGradients(small.dx, expected, small.db))
    start = np.ones_like(w)
    rg.conv_backward(dy, x, w, need=["dw"], out={"dw": start}, accumulate=True, **options)
    np.testing.assert_allclose(start, 1 + expected, rtol=1e-6)
    y = rg.conv_transpose_forward(dy, w, **options)
    assert_same_bits([y], [rg.conv_transpose_forward(dy, middle)])
    # A stride beyond the image, and one output pixel.
    image = rng.standard_normal((2, 3, 4, 5), np.float32)
    assert_same_bits([rg.conv_forward(image, w, stride=BIG)], [rg.conv_forward(image[:, :, :3, :3], w)])
    gradients = rg.conv_backward(dy, image, w, stride=BIG)
    corner = rg.conv_backward(dy, image[:, :, :3, :3].copy(), w)
    assert_same_bits(gradients[1:], corner[1:])
    assert gradients.dx is not None
    assert_same_bits([gradients.dx[:, :, :3, :3]], [corner.dx])
    assert not gradients.dx[:, :, 3:].any()
    assert not gradients.dx[:, :, :, 3:].any()
    with pytest.raises((MemoryError, ValueError)):  # 2 x 2 results, but images of 2**62 pixels with their padding
        rg.conv_forward(x, w[:, :, :2, :2], padding=((BIG, 1), (BIG, 1)), dilation=1, stride=BIG)


def test_refusals() -> None:
    x, w, b, dy = draw(CASES["plain"], np.float32)
    y = np.full(dy.shape, 7, np.float32)
    gradients = ConvGradients(*(np.full(a.shape, 7, np.float32) for a in (x, w, b)))

    def refused(error: type[Exception], words: str, *arrays: Any, **options: Any) -> None:
        with pytest.raises(error, match=words):
            rg.conv_forward(*arrays, **{"out": y, **options})
        assert (y == 7).all()

    def refused_back(error: type[Exception], words: str, *arrays: Any, **options: Any) -> None:
        with pytest.raises(error, match=words):
            rg.conv_backward(*arrays, **{"out": gradients, **options})
        assert all((array == 7).all() for array in gradients if array is not None)

    refused(ValueError, r"conv_forward: x has 2 axes, needs 3 or 4, \[N, C, W\] or \[N, C, H, W\]", x[0, 0], w)
    refused(ValueError, r"x has 5 axes, needs 3 or 4, \[N, W, C\] or", x[None], w, channels_last=True)
    refused(ValueError, r"w has shape \(6, 3, 3\), but x of shape \(2, 3, 7, 9\) needs 4 axes", x, w[..., 0])
    refused(ValueError, r"w has shape \(6, 3, 0, 3\), whose kernel has no elements", x, w[:, :, :0])
    refused(ValueError, r"whose 2 inputs in 1 groups are 2 channels, but x has 3", x, w[:, :2])
    refused(ValueError, "groups is 3, which does not divide the 4 outputs of w", x, w[:4, :1], groups=3)
    refused(ValueError, "groups is 0, must be at least 1", x, w, groups=0)
    refused(ValueError, "spans 9 pixels, but spatial axis 0 of x has 7, with padding 0 and 1", x, w,
            dilation=4, padding=((0, 1), (0, 0)))  # fmt: skip
    refused(ValueError, "stride is 0, must be at least 1", x, w, stride=0)
    refused(ValueError, "padding is -1, must be at least 0", x, w, padding=-1)
    refused(ValueError, f"dilation is {2**31}, must be at most {2**31 - 1}", x, w, dilation=2**31)
    refused(ValueError, "stride has 3 entries, but there are 2 spatial axes", x, w, stride=(1, 1, 1))
    refused(ValueError, r"padding of an axis has 3 entries, must be one int or \(before, after\)", x, w,
            padding=((1, 1, 1), 0))  # fmt: skip
    refused(TypeError, "stride", x, w, stride="2")
    refused(TypeError, "stride", x, w, stride=1.5)
    refused(ValueError, r"b has shape \(5,\), but the result has 6 channels and needs \(6,\)", x, w, b[:5])
    refused(TypeError, "w has dtype float64, must be float32 as x is", x, w.astype(np.float64))
    refused(TypeError, "x has dtype float16; it must be float32 or float64", x.astype(np.float16), w)
    refused(TypeError, "channels_last", x, w, channels_last="yes")
    refused(ValueError, "the activation|activation", x, w, activation="none such")
    refused(ValueError, r"out has shape \(2, 6, 5, 7\), the result has \(1, 6, 5, 7\)", x[:1], w)
    refused(ValueError, "threads is 0", x, w, num_threads=0)
    whole = np.zeros((2, 9, 7, 9), np.float32)
    refused(ValueError, "out .* overlaps x", whole[:, :3], w, out=whole[:, 2:8, :5, :7])
    rg.conv_forward(whole[:, :3], w, out=whole[:, 3:, :5, :7])  # beside each other is fine

    refused_back(ValueError, r"dy has shape \(2, 6, 5, 6\), but x of shape \(2, 3, 7, 9\) and w of shape "
                 r"\(6, 3, 3, 3\) need \(2, 6, 5, 7\)", dy[..., :6], x, w)  # fmt: skip
    refused_back(ValueError, "y is missing: the slope of the activation relu is computed", dy, x, w, activation="relu")
    refused_back(ValueError, r"y has shape \(2, 6, 5\), but dy has", dy, x, w, activation="relu", y=y[..., 0])
    refused_back(TypeError, "y has dtype float64", dy, x, w, activation="relu", y=y.astype(np.float64))
    refused_back(ValueError, "silu", dy, x, w, activation="silu", y=y)
    refused_back(ValueError, "out.dx .* overlaps x", dy, x, w, out={"dx": x})
    refused_back(ValueError, "out.dw .* overlaps w", dy, x, w, out={"dw": w})
    refused_back(ValueError, "out.dx .* overlaps y", dy, x[:, :, :5, :7], w[:, :, :1, :1], activation="relu",
                 y=(both := np.full(dy.shape, 7, np.float32)), out={"dx": both[:, :3]})  # fmt: skip
    refused_back(ValueError, "need has 'dy'; the gradients are dx, dw, db", dy, x, w, need=["dy"], out=None)
    refused_back(ValueError, "accumulate=True adds to buffers, and out has none for dx", dy, x, w,
                 accumulate=True, out={"dw": w.copy()})  # fmt: skip
    refused_back(TypeError, "out must be ConvGradients or a mapping, not ndarray", dy, x, w, out=x)


def test_transposed_refusals() -> None:
    x, w = np.ones((1, 4, 5, 5), np.float32), np.ones((4, 3, 3, 3), np.float32)

    def refused(words: str, *arrays: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=words):
            rg.conv_transpose_forward(*arrays, **options)

    refused(r"conv_transpose_forward: w has shape \(3, 3, 3, 3\), whose inputs are 3, but x has 4", x, w[:3])
    refused("groups is 3, which does not divide the 4 channels of x", x, w, groups=3)
    refused("output_padding is 2, must be below the stride 2 or the dilation 1", x, w, stride=2, output_padding=2)
    refused("padding is 4 and 4, which leaves -1 pixels of spatial axis 0", x, w, padding=4)
    refused("spatial axis 1 of x has no pixels", x[..., :0], w)
    refused(r"b has shape \(4,\), but the result has 3 channels", x, w, np.ones(4, np.float32))
    with pytest.raises(ValueError, match=r"conv_transpose_backward: dy has shape .* need \(1, 3, 7, 7\)"):
        rg.conv_transpose_backward(np.ones((1, 3, 6, 7), np.float32), x, w)
