"""BNNS resize filters."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import BF16, F16, F32, TYPES, all_fail, created, normal, succeeds

Descriptor = bnns.BNNSNDArrayDescriptor
NEAREST, LINEAR = bnns.BNNSInterpolationMethodNearest, bnns.BNNSInterpolationMethodLinear
ROW, IMAGE, VECTOR = bnns.BNNSDataLayoutRowMajorMatrix, bnns.BNNSDataLayoutImageCHW, bnns.BNNSDataLayoutVector
FIRST = {rank: rank << 16 | 0x8001 for rank in range(1, 6)}
LAST = {rank: rank << 16 | 0x8000 for rank in range(1, 6)}


def described(layout: int, shape: tuple[int, ...], data: Any = None, **fields: Any) -> Any:
    """An array of this shape, slowest axis first."""
    size = shape if layout in FIRST.values() else shape[::-1]
    return Descriptor(**{"layout": layout, "size": size, "data": data, "data_type": F32, **fields})


def create(method: int, shape: tuple[int, ...], out: tuple[int, ...], align: bool = False, **fields: Any) -> Any:
    layouts = fields.pop("layouts", (FIRST[len(shape)], FIRST[len(out)]))
    made = [described(layout, s, **fields) for layout, s in zip(layouts, (shape, out), strict=True)]
    return created(bnns.BNNSFilterCreateLayerResize(bnns.BNNSLayerParametersResize(method, *made, align)))


def applied(filter: Any, x: np.ndarray, out: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    y = np.full((len(x), *out), 7, dtype)
    assert bnns.BNNSFilterApplyBatch(filter, len(x), x, 0, y, 0) == 0, bnns.last_error()
    return y


def backward(filter: Any, dx: np.ndarray, dy: np.ndarray, flags: int = 0, **more: Any) -> int:
    """Gradients are vectors: their shape is the layer's."""
    deltas = [described(VECTOR, (one[0].size,), one) for one in (dx, dy)]
    deltas[0].flags = flags
    return bnns.BNNSFilterApplyBackwardBatch(
        filter, len(dy), None, 0, deltas[0], 0, None, 0, deltas[1], 0, more.get("weights"), more.get("bias")
    )


# ---- an oracle -------------------------------------------------------------------------------------------------------


def matrix(method: int, extent: int, count: int, align: bool) -> np.ndarray:
    """The weight of each element of the input in each of the output, [count, extent], by exact fractions."""
    weights = np.zeros((count, extent))
    for i in range(count):
        if align:
            point = Fraction(i * (extent - 1), count - 1) if count > 1 else Fraction(0)
        else:
            point = (i + Fraction(1, 2)) * Fraction(extent, count) - Fraction(1, 2)
        if method == NEAREST:
            weights[i, max(range(extent), key=lambda j, p=point: (-abs(p - j), j))] = 1  # type: ignore[misc]
        else:
            point = min(max(point, Fraction(0)), Fraction(extent - 1))
            for j in range(extent):
                weights[i, j] = max(Fraction(0), 1 - abs(point - j))
    return weights


def resized(x: np.ndarray, out: tuple[int, ...], method: int, align: bool, transposed: bool = False) -> np.ndarray:
    """The output of samples x in float64, or the gradient of a gradient x of the output."""
    values = x.astype(np.float64)
    for axis, (a, b) in enumerate(zip(x.shape[1:], out, strict=True), 1):
        if a != b:
            weights = matrix(method, b, a, align).T if transposed else matrix(method, a, b, align)
            values = np.moveaxis(np.tensordot(weights, values, (1, axis)), 0, axis)
    return values


SHAPES = [
    ((7,), (21,)),
    ((1,), (5,)),
    ((5,), (1,)),
    ((12,), (4,)),
    ((3, 2, 5), (3, 4, 15)),
    ((3, 4, 15), (3, 2, 5)),
    ((2, 6, 3), (2, 6, 3)),
    ((1, 11, 1), (1, 11, 13)),
    ((2, 10), (4, 30)),
    ((8, 2, 9), (4, 2, 3)),
]


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("method", [NEAREST, LINEAR])
@pytest.mark.parametrize(("shape", "out"), SHAPES)
def test_resize_and_its_gradient(shape: tuple[int, ...], out: tuple[int, ...], method: int, align: bool) -> None:
    x, dy = normal(3, *shape), normal(3, *out, seed=1)
    filter = create(method, shape, out, align)
    y = applied(filter, x, out)
    exact = resized(x, out, method, align)
    assert np.abs(y - exact).max() <= np.spacing(np.abs(exact).max().astype(np.float32))
    for flags in (0, 1):
        dx = np.ones_like(x)
        assert backward(filter, dx, dy, flags) == 0, bnns.last_error()
        assert np.allclose(dx, resized(dy, shape, method, align, transposed=True) + flags, rtol=1e-6, atol=1e-6)
    dx = np.empty_like(x)
    assert backward(filter, dx, dy) == 0
    sides = (dy.astype(np.float64) * exact).sum(), (dx.astype(np.float64) * x).sum()
    assert np.isclose(*sides, rtol=1e-6)  # <dy, A x> = <A' dy, x>


@pytest.mark.parametrize(
    ("shape", "out"), [((3, 4), (9, 8)), ((6, 4), (6, 20)), ((6, 4), (2, 1)), ((6, 4), (1, 4)), ((5, 7), (5, 7))]
)
@pytest.mark.parametrize("align", [False, True, None])
def test_resize_against_torch(shape: tuple[int, int], out: tuple[int, int], align: bool | None, torch: Any) -> None:
    """None: the nearest element."""
    x = normal(2, 5, *shape)
    tensor = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    mode: Any = {"mode": "nearest-exact"} if align is None else {"mode": "bilinear", "align_corners": align}
    expected = torch.nn.functional.interpolate(tensor, out, **mode)
    filter = create(NEAREST if align is None else LINEAR, (5, *shape), (5, *out), bool(align))
    assert np.allclose(applied(filter, x, (5, *out)), expected.detach().numpy(), rtol=1e-6, atol=1e-6)
    dy, dx = normal(2, 5, *out, seed=1), np.empty_like(x)
    expected.backward(torch.tensor(dy, dtype=torch.float64))
    assert backward(filter, dx, dy) == 0, bnns.last_error()
    assert np.allclose(dx, tensor.grad.numpy(), rtol=1e-5, atol=1e-5)


def test_nearest_as_apple_prints_it() -> None:
    x = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]], np.float32)
    filter = create(NEAREST, (3, 3), (9, 24), layouts=(ROW, ROW))
    y = np.empty((9, 24), np.float32)
    assert bnns.BNNSFilterApply(filter, x, y) == 0, bnns.last_error()
    assert np.array_equal(y, x.repeat(3, 0).repeat(8, 1))


def test_nearest_copies_any_number_of_axes_exactly() -> None:
    x = normal(2, 2, 1, 3, 2)
    filter = create(NEAREST, (2, 1, 3, 2), (4, 3, 6, 10))
    y = applied(filter, x, (4, 3, 6, 10))
    assert np.array_equal(y, x.repeat(2, 1).repeat(3, 2).repeat(2, 3).repeat(5, 4))
    dx = np.empty_like(x)
    assert backward(filter, dx, np.ones_like(y)) == 0
    assert (dx == 2 * 3 * 2 * 5).all()


def test_points_of_linear_interpolation() -> None:
    """Halves of pixels by default, corners if they are aligned, for one sample with a step of 1."""
    x = np.arange(2, dtype=np.float32)[None]
    assert applied(create(LINEAR, (2,), (4,)), x, (4,)).tolist() == [[0, 0.25, 0.75, 1]]
    assert np.allclose(applied(create(LINEAR, (2,), (4,), True), x, (4,)), [[0, 1 / 3, 2 / 3, 1]], atol=1e-7)
    x = np.arange(6, dtype=np.float32)[None]
    assert applied(create(LINEAR, (6,), (3,)), x, (3,)).tolist() == [[0.5, 2.5, 4.5]]
    assert applied(create(LINEAR, (6,), (2,), True), x, (2,)).tolist() == [[0, 5]]
    assert applied(create(LINEAR, (6,), (1,), True), x, (1,)).tolist() == [[0]]
    assert applied(create(NEAREST, (6,), (3,)), x, (3,)).tolist() == [[1, 3, 5]]  # of two as near, the later
    assert applied(create(NEAREST, (6,), (2,)), x, (2,)).tolist() == [[1, 4]]
    assert applied(create(NEAREST, (6,), (3,), True), x, (3,)).tolist() == [[0, 3, 5]]


@pytest.mark.parametrize("layouts", [(FIRST[3], LAST[3]), (LAST[3], FIRST[3]), (IMAGE, LAST[3])])
def test_axes_are_those_of_size(layouts: tuple[int, int]) -> None:
    """The same axis of size is resized, whatever its place in memory."""
    size, new = (2, 3, 4), (2, 9, 8)
    x = normal(2, *size)

    def stored(array: np.ndarray, layout: int) -> np.ndarray:
        return np.ascontiguousarray(array if layout in FIRST.values() else array.transpose(0, 3, 2, 1))

    made = [Descriptor(layout=layout, size=s, data_type=F32) for layout, s in zip(layouts, (size, new), strict=True)]
    filter = bnns.BNNSFilterCreateLayerResize(bnns.BNNSLayerParametersResize(LINEAR, *made, False))
    exact = resized(x, new, LINEAR, False)
    y = np.empty_like(stored(exact, layouts[1]), np.float32)
    assert bnns.BNNSFilterApplyBatch(filter, 2, stored(x, layouts[0]), 0, y, 0) == 0, bnns.last_error()
    assert np.allclose(y, stored(exact, layouts[1]), rtol=1e-6, atol=1e-6)
    dy = normal(2, *new, seed=3)
    dx = np.empty_like(stored(x, layouts[0]))
    assert backward(filter, dx, stored(dy, layouts[1])) == 0, bnns.last_error()
    assert np.allclose(dx, stored(resized(dy, size, LINEAR, False, True), layouts[0]), rtol=1e-5, atol=1e-6)


def test_weights_of_attention_heads_are_resized_by_size() -> None:
    """MHA_DHK: size is (d, k, heads), memory has the heads before k."""
    x, dy = normal(2, 5, 3, 2), normal(2, 5, 6, 2, seed=1)
    made = [Descriptor(layout=bnns.BNNSDataLayoutMHA_DHK, size=s, data_type=F32) for s in ((5, 3, 2), (5, 6, 2))]
    filter = bnns.BNNSFilterCreateLayerResize(bnns.BNNSLayerParametersResize(LINEAR, *made, False))
    memory, y = np.ascontiguousarray(x.transpose(0, 2, 3, 1)), np.empty((2, 6, 2, 5), np.float32)
    assert bnns.BNNSFilterApplyBatch(filter, 2, memory, 0, y, 0) == 0, bnns.last_error()
    assert np.allclose(y.transpose(0, 3, 1, 2), resized(x, (5, 6, 2), LINEAR, False), rtol=1e-6, atol=1e-6)
    dx = np.empty_like(memory)
    assert backward(filter, dx, np.ascontiguousarray(dy.transpose(0, 2, 3, 1))) == 0, bnns.last_error()
    exact = resized(dy, (5, 3, 2), LINEAR, False, transposed=True)
    assert np.allclose(dx.transpose(0, 3, 1, 2), exact, rtol=1e-5, atol=1e-6)


def test_strides_batches_and_gaps() -> None:
    memory, results = normal(2, 30), np.full((2, 60), 7, np.float32)
    source = described(FIRST[2], (2, 3), stride=(2, 9))
    target = described(FIRST[2], (4, 6), stride=(1, 8))
    filter = bnns.BNNSFilterCreateLayerResize(bnns.BNNSLayerParametersResize(LINEAR, source, target, True))
    assert bnns.BNNSFilterApplyBatch(filter, 2, memory, 30, results, 60) == 0, bnns.last_error()
    x = np.stack([memory[:, [0, 2, 4]], memory[:, [9, 11, 13]]], axis=1)
    y = results[:, :32].reshape(2, 4, 8)
    assert np.allclose(y[:, :, :6], resized(x, (4, 6), LINEAR, True), rtol=1e-6, atol=1e-6)
    assert (y[:, :, 6:] == 7).all()
    assert (results[:, 32:] == 7).all()
    dy, dx = normal(2, 24, seed=1), np.full((2, 40), 7, np.float32)
    in_delta, out_delta = described(FIRST[2], (2, 3), dx, stride=(2, 9)), described(FIRST[2], (4, 6), dy)
    succeeds(bnns.BNNSFilterApplyBackwardBatch(filter, 2, None, 0, in_delta, 40, None, 0, out_delta, 0, None, None))
    exact = resized(dy.reshape(2, 4, 6), (2, 3), LINEAR, True, True).reshape(2, 6)
    places = [0, 2, 4, 9, 11, 13]
    assert np.allclose(dx[:, places], exact, rtol=1e-6, atol=1e-6)
    assert (np.delete(dx, places, 1) == 7).all()


def test_output_and_gradient_in_the_memory_of_the_input() -> None:
    memory = normal(8)
    x = memory[:4].copy()
    filter = create(LINEAR, (4,), (8,))
    assert bnns.BNNSFilterApply(filter, memory[:4], memory) == 0, bnns.last_error()
    assert np.allclose(memory, resized(x[None], (8,), LINEAR, False)[0], rtol=1e-6, atol=1e-6)
    dy = memory.copy()
    in_delta, out_delta = described(VECTOR, (4,), memory), described(VECTOR, (8,), memory)
    succeeds(bnns.BNNSFilterApplyBackwardBatch(filter, 1, None, 0, in_delta, 0, None, 0, out_delta, 0, None, None))
    assert np.allclose(memory[:4], resized(dy[None], (4,), LINEAR, False, True)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_reach_only_what_they_are_part_of(bad: float) -> None:
    x = np.zeros((1, 5), np.float32)
    x[0, 2] = bad
    assert (
        np.isfinite(applied(create(NEAREST, (5,), (15,)), x, (15,))[0]).tolist()
        == [True] * 6 + [False] * 3 + [True] * 6
    )
    weights = matrix(LINEAR, 5, 15, False)[:, 2]
    assert (np.isfinite(applied(create(LINEAR, (5,), (15,)), x, (15,))[0]) == (weights == 0)).all()
    y = applied(create(LINEAR, (5,), (15,)), x, (15,))
    assert np.array_equal(y[0, 7], np.float32(bad), equal_nan=True)  # exactly element 2
    dy, dx = np.zeros((1, 15), np.float32), np.empty((1, 5), np.float32)
    dy[0, 7] = bad
    assert backward(create(LINEAR, (5,), (15,)), dx, dy) == 0
    assert np.array_equal(dx, x, equal_nan=True)


@pytest.mark.parametrize("types", [(F16, F16), (BF16, BF16), (F16, F32), (F32, BF16)])
def test_types_of_a_resize(types: tuple[int, int]) -> None:
    x = normal(2, 3, 4).astype(TYPES[types[0]])
    made = [described(FIRST[2], s, data_type=t) for s, t in zip(((3, 4), (6, 8)), types, strict=True)]
    for method in (NEAREST, LINEAR):
        filter = bnns.BNNSFilterCreateLayerResize(bnns.BNNSLayerParametersResize(method, *made, False))
        y = applied(filter, x, (6, 8), TYPES[types[1]])
        exact = resized(x, (6, 8), method, False)
        epsilon = float(ml_dtypes.finfo(TYPES[types[1]]).eps)
        assert (np.abs(y.astype(np.float64) - exact) <= epsilon / 2 * np.abs(exact) * 1.01 + 1e-7).all()
        assert backward(filter, np.empty((2, 3, 4), np.float32), np.empty((2, 6, 8), np.float32)) == -1
        assert "backward needs Float32" in (bnns.last_error() or "")


def test_a_resize_that_cannot_be_made() -> None:
    def reason(method: int, i_desc: Any, o_desc: Any) -> str:
        assert bnns.BNNSFilterCreateLayerResize(bnns.BNNSLayerParametersResize(method, i_desc, o_desc, False)) is None
        return bnns.last_error() or ""

    small = described(FIRST[3], (2, 3, 4))
    assert "method is 2, which is not a BNNSInterpolationMethod" in reason(2, small, small)
    assert "o_desc has 2 axes, expected 3 as in i_desc" in reason(0, small, described(FIRST[2], (6, 4)))
    assert "o_desc.size is (4, 3, 2) and i_desc.size (2, 3, 4): all axes must grow, or all must shrink" in reason(
        0, small, described(FIRST[3], (4, 3, 2))
    )
    assert "o_desc.size[1] is 7, must be a multiple of i_desc's 3, or divide it" in reason(
        1, small, described(FIRST[3], (2, 7, 4))
    )
    assert "o_desc.size[2] is 3, must be a multiple of i_desc's 4" in reason(0, small, described(FIRST[3], (2, 3, 3)))
    assert "3 axes differ, and BNNSInterpolationMethodLinear resizes 2 at most" in reason(
        1, small, described(FIRST[3], (4, 6, 8))
    )
    integers = described(FIRST[3], (2, 3, 4), data_type=bnns.BNNSDataTypeInt8)
    assert "i_desc.data_type is BNNSDataTypeInt8; it must be Float32, Float16, BFloat16" in reason(0, integers, small)
    rotated = described(bnns.BNNSDataLayoutConvolutionWeightsOIHrWr, (1, 1, 3, 3))
    assert "i_desc.layout is BNNSDataLayoutConvolutionWeightsOIHrWr; kernels must not be rotated" in reason(
        0, rotated, rotated
    )
    assert "o_desc.stride" in reason(0, small, described(FIRST[3], (2, 3, 4), stride=(1, 1, 1)))
    assert bnns.BNNSFilterCreateLayerResize(None) is None  # type: ignore[arg-type]
    assert "layer_params is NULL, must be BNNSLayerParametersResize" in (bnns.last_error() or "")


def test_resize_calls_that_fail_write_nothing() -> None:
    filter, x, y = create(LINEAR, (2, 3), (4, 3)), normal(2, 6), np.full((2, 12), 7, np.float32)
    dx, dy = np.full_like(x, 7), normal(2, 12, seed=1)
    vector = described(VECTOR, (6,), dx)
    calls: list[tuple[Any, str]] = [
        (lambda: bnns.BNNSFilterApplyBatch(filter, 3, x, 0, y, 0), "out has 96 bytes, but 3 samples"),
        (lambda: bnns.BNNSFilterApplyBatch(filter, 2, None, 0, y, 0), "in is NULL"),
        (lambda: bnns.BNNSFilterApplyBatch(filter, 2, x, 0, y, 11), "out_stride is 11, but a sample of out spans 12"),
        (
            lambda: bnns.BNNSFilterApplyBatch(filter, 2, x.astype(np.float64), 0, y, 0),
            "in has elements of type float64",
        ),
        (lambda: backward(filter, dx, dy, flags=2), "in_delta.flags is 2"),
        (lambda: backward(filter, dx, dy[:, :11].copy()), "out_delta has 11 elements, expected 12 as in o_desc"),
        (lambda: backward(filter, dx, dy, weights=vector), "weights_delta is given, but a resize has nothing to train"),
        (lambda: backward(filter, dx, dy, bias=vector), "bias_delta is given, but a resize has nothing to train"),
    ]
    all_fail(calls, dx, y)


def test_swifts_resize_layer() -> None:
    small, large = BNNS.Shape.imageCHW(3, 2, 4), BNNS.Shape.imageCHW(9, 2, 4)
    x, y = normal(2, 4, 2, 3), np.empty((2, 4, 2, 9), np.float32)
    dx, dy = np.empty_like(x), normal(2, 4, 2, 9, seed=1)
    for method, code in (
        (BNNS.InterpolationMethod.nearestNeighbor, NEAREST),
        (BNNS.InterpolationMethod.linear, LINEAR),
    ):
        for align in (False, True):
            with BNNS.ResizeLayer(
                interpolationMethod=method, input=small.descriptor(), output=large.descriptor(), alignsCorners=align
            ) as layer:
                layer.apply(batchSize=2, input=small.descriptor(x), output=large.descriptor(y))
                layer.applyBackward(
                    batchSize=2, outputGradient=large.descriptor(dy), generatingInputGradient=small.descriptor(dx)
                )
            assert np.allclose(y, resized(x, (4, 2, 9), code, align), rtol=1e-6, atol=1e-6)
            assert np.allclose(dx, resized(dy, (4, 2, 3), code, align, True), rtol=1e-5, atol=1e-6)
    with pytest.raises(BNNS.Error, match=r"unableToCreateLayer: .*must be a multiple of"):
        BNNS.ResizeLayer(
            interpolationMethod=BNNS.InterpolationMethod.linear,
            input=small.descriptor(),
            output=BNNS.Shape.imageCHW(4, 2, 4).descriptor(),
            alignsCorners=False,
        )
