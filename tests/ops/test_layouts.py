"""Arrays that NumPy describes in more than one way: dtypes that are equal but not identical, strides without effect."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import retrograd as rg
from support.arrays import Array


def normal(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def with_metadata(array: Array) -> Array:
    described = array.view(np.dtype(array.dtype, metadata={"unit": "m"}))
    assert described.dtype is not array.dtype
    return described


def strides_of_single_axes(array: Array, stride: int) -> Array:
    """The same elements; the axes of extent 1 get any stride."""
    strides = [stride if extent == 1 else step for extent, step in zip(array.shape, array.strides, strict=True)]
    return as_strided(array, array.shape, strides)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_a_dtype_may_be_equal_without_being_identical(dtype: Any) -> None:
    x = normal(6, 5).astype(dtype)
    y, cache = rg.layer_norm_forward(x)
    other_y, other_cache = rg.layer_norm_forward(with_metadata(x))
    assert other_y.tobytes() == y.tobytes()
    dx = rg.layer_norm_backward(x, cache).dx
    assert rg.layer_norm_backward(with_metadata(x), other_cache).dx.tobytes() == dx.tobytes()


def test_indices_may_be_of_any_integer_type() -> None:
    table, indices = normal(7, 3), np.array([[0, 6], [3, 3]])
    for dtype in (np.int64, np.longlong, np.int8, np.uint16, np.uint64):
        assert np.array_equal(rg.embedding_forward(indices.astype(dtype), with_metadata(table)), table[indices])


@pytest.mark.parametrize("stride", [0, 3, -4, 1 << 40])
@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1), (4, 1, 6)])
def test_the_stride_of_an_axis_of_one_element_has_no_effect(shape: tuple[int, ...], stride: int) -> None:
    x, dy = normal(*shape), normal(*shape)[::-1].copy()
    odd_x, odd_dy = strides_of_single_axes(x, stride), strides_of_single_axes(dy, stride)
    y, cache = rg.layer_norm_forward(x)
    out = np.empty_like(x)
    odd_y, odd_cache = rg.layer_norm_forward(odd_x, out=strides_of_single_axes(out, stride))
    assert odd_y.tobytes() == out.tobytes() == y.tobytes()
    dx = rg.layer_norm_backward(dy, cache).dx
    assert rg.layer_norm_backward(odd_dy, odd_cache).dx.tobytes() == dx.tobytes()
    w = normal(1, shape[-1])
    odd_w = strides_of_single_axes(w, stride)
    assert rg.linear_forward(odd_x, odd_w).tobytes() == rg.linear_forward(x, w).tobytes()
    odd, plain = rg.linear_backward(odd_x[..., :1], odd_x, odd_w), rg.linear_backward(x[..., :1], x, w)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(odd, plain, strict=True))


@pytest.mark.parametrize("stride", [0, 3, -4, 1 << 40])
def test_weights_of_one_unit_may_have_any_strides(stride: int) -> None:
    x, gates = normal(3, 2, 1), [normal(1, 1) for _ in range(8)]
    wx, wh = tuple(gates[:4]), tuple(gates[4:])
    odd = [tuple(strides_of_single_axes(w, stride + k) for k, w in enumerate(group)) for group in (wx, wh)]
    plain = rg.lstm_forward(x, rg.LstmWeights(wx, wh))
    assert rg.lstm_forward(x, rg.LstmWeights(*odd)).y.tobytes() == plain.y.tobytes()


def test_an_array_may_get_another_shape_while_others_use_it() -> None:
    """Its shape is memory that NumPy replaces. A call sees one shape or the other, and computes or refuses."""
    x, stop = normal(60, 4), threading.Event()
    wanted = {shape: rg.layer_norm_forward(x.reshape(shape))[0].tobytes() for shape in ((60, 4), (2, 30, 4))}

    def reshape() -> None:
        while not stop.is_set():
            x.shape = (2, 30, 4)
            x.shape = (60, 4)

    thread = threading.Thread(target=reshape)
    thread.start()
    try:
        for _ in range(3000):
            try:
                y, _ = rg.layer_norm_forward(x)
            except ValueError:
                continue
            assert y.tobytes() == wanted[y.shape]
    finally:
        stop.set()
        thread.join()
