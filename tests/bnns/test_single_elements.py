"""Axes of extent 1, where NumPy may return a number instead of an array: all sizes from 1 to 3 of every axis."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from support.bnns import F32, Descriptor, created, first, normal, succeeds

VECTOR = bnns.BNNSDataLayoutVector
CLIENT = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)
SIZES = (1, 2, 3)
BOTH = (False, True)


def close(got: np.ndarray, expected: Any) -> None:
    np.testing.assert_allclose(got, np.reshape(expected, got.shape), rtol=1e-5, atol=1e-6)


def turned(array: np.ndarray, transposed: bool) -> np.ndarray:
    return array.swapaxes(-1, -2) if transposed else array


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (1,), (2,), (1, 3)])
@pytest.mark.parametrize("trans", list(itertools.product(BOTH, BOTH)))
def test_products_of_matrices(trans: tuple[bool, bool], lead: tuple[int, ...]) -> None:
    for m, k, n in itertools.product(SIZES, repeat=3):
        a = turned(normal(*lead, m, k), trans[0]).copy()
        b = turned(normal(*lead, k, n, seed=1), trans[1]).copy()
        y = np.full((*lead, m, n), 7, np.float32)
        succeeds(bnns.BNNSMatMul(*trans, -0.5, first(a.shape, a), first(b.shape, b), first(y.shape, y)))
        close(y, -0.5 * (turned(a, trans[0]) @ turned(b, trans[1])))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("weights", [None, "a", "b"])
def test_product_filters_and_their_gradients(weights: str | None, batch: int) -> None:
    for trans in itertools.product(BOTH, BOTH):
        for m, k, n in itertools.product(SIZES, repeat=3):
            _check_product_filter(weights, batch, trans, m, k, n)


def _check_product_filter(weights: str | None, batch: int, trans: tuple[bool, bool], m: int, k: int, n: int) -> None:
    shapes = {"a": (k, m) if trans[0] else (m, k), "b": (n, k) if trans[1] else (k, n)}
    arrays = {
        name: normal(*(() if name == weights else (batch,)), *shape, seed=seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    descriptors = {name: first(shapes[name], array if name == weights else None) for name, array in arrays.items()}
    layer = bnns.BNNSLayerParametersBroadcastMatMul(
        alpha=2.0, transA=trans[0], transB=trans[1], a_is_weights=weights == "a", b_is_weights=weights == "b",
        iA_desc=descriptors["a"], iB_desc=descriptors["b"], o_desc=first((m, n)),
    )  # fmt: skip
    filter = created(bnns.BNNSFilterCreateLayerBroadcastMatMul(layer, CLIENT))
    y, dy = np.full((batch, m, n), 7, np.float32), normal(batch, m, n, seed=5)
    grads = {name: np.full_like(array, 7) for name, array in arrays.items()}
    deltas = {name: first(shapes[name], array) for name, array in grads.items()}
    if weights is None:
        a, b = arrays["a"], arrays["b"]
        succeeds(bnns.BNNSFilterApplyTwoInputBatch(filter, batch, a, 0, b, 0, y, 0))
        succeeds(
            bnns.BNNSFilterApplyBackwardTwoInputBatch(
                filter, batch, a, 0, deltas["a"], 0, b, 0, deltas["b"], 0, None, 0, first((m, n), dy), 0, None, None
            )
        )
    else:
        other = "b" if weights == "a" else "a"
        x = arrays[other]
        succeeds(bnns.BNNSFilterApplyBatch(filter, batch, x, 0, y, 0))
        succeeds(
            bnns.BNNSFilterApplyBackwardBatch(
                filter, batch, x, 0, deltas[other], 0, None, 0, first((m, n), dy), 0, deltas[weights], None
            )
        )
    left, right = turned(arrays["a"], trans[0]), turned(arrays["b"], trans[1])
    close(y, 2 * (left @ right))
    expected = {"a": 2 * dy @ turned(right, True), "b": 2 * turned(left, True) @ dy}
    for name, transposed in zip("ab", trans, strict=True):
        gradient = turned(expected[name], transposed)
        close(grads[name], gradient.sum(0) if name == weights else gradient)


OPERATIONS = [
    "a_i, b_i -> c_",
    "a_i, w_i -> c_",
    "w_i, a_i -> c_",
    "a_i, b_j -> c_ij",
    "a_i, w_j -> c_ij",
    "a_ij, w_jk -> c_ik",
    "a_ij, w_ij -> c_",
    "a_ij, w_ -> c_ij",
    "w_, a_i -> c_i",
    "w_, a_ -> c_",
    "a_ij -> c_",
    "a_i -> c_",
    "a_ij, b_jk -> c_",
]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_contractions_and_their_gradients(operation: str, batch: int) -> None:
    letters = sorted(set(operation.replace("_", "")) & set("ijk"))
    for sizes in itertools.product(SIZES, repeat=len(letters)):
        _check_contraction(operation, batch, dict(zip(letters, sizes, strict=True)))


def _check_contraction(operation: str, batch: int, sizes: dict[str, int]) -> None:
    left, right = operation.replace(" ", "").split("->")
    names, indices = zip(*(term.split("_") for term in left.split(",")), strict=True)
    out = right.split("_")[1]
    shapes = [tuple(sizes[letter] for letter in one) for one in indices]
    is_weights = [name == "w" for name in names]
    arrays = [
        normal(*(() if constant else (batch,)), *shape, seed=k)
        for k, (shape, constant) in enumerate(zip(shapes, is_weights, strict=True))
    ]
    described = [
        first(shape, array if constant else None)
        for shape, array, constant in zip(shapes, arrays, is_weights, strict=True)
    ]
    out_shape = tuple(sizes[letter] for letter in out)
    layer = bnns.BNNSLayerParametersTensorContraction(
        operation=operation, alpha=-2.0, iA_desc=described[0], iB_desc=described[-1], o_desc=first(out_shape)
    )
    filter = created(bnns.BNNSFilterCreateLayerTensorContraction(layer, CLIENT))
    y, dy = np.full((batch, *(out_shape or (1,))), 7, np.float32), normal(batch, *out_shape, seed=7)
    grads = [np.full_like(array, 7) for array in arrays]
    deltas = [first(shape, array) for shape, array in zip(shapes, grads, strict=True)]
    inputs = [k for k, constant in enumerate(is_weights) if not constant]
    given = [argument for k in inputs for argument in (arrays[k], 0)]
    given_back = [argument for k in inputs for argument in (arrays[k], 0, deltas[k], 0)]
    weights_delta = deltas[is_weights.index(True)] if any(is_weights) else None
    last = None, 0, first(out_shape, dy), 0, weights_delta, None
    if len(inputs) == 2:
        succeeds(bnns.BNNSFilterApplyTwoInputBatch(filter, batch, *given, y, 0))
        succeeds(bnns.BNNSFilterApplyBackwardTwoInputBatch(filter, batch, *given_back, *last))
    else:
        succeeds(bnns.BNNSFilterApplyBatch(filter, batch, *given, y, 0))
        succeeds(bnns.BNNSFilterApplyBackwardBatch(filter, batch, *given_back, *last))
    terms = [("" if constant else "z") + one for one, constant in zip(indices, is_weights, strict=True)]
    close(y, -2 * np.einsum(f"{','.join(terms)}->z{out}", *arrays))
    for k, term in enumerate(terms):
        # Indices that only this operand has are summed: their gradient is the same for all.
        others = [(f"z{out}", dy), *((one, arrays[j]) for j, one in enumerate(terms) if j != k)]
        ones = ("".join(term), np.ones_like(arrays[k]))
        names_of, values = zip(*others, ones, strict=True)
        close(grads[k], -2 * np.einsum(f"{','.join(names_of)}->{term}", *values))


def test_the_gram_matrix_of_one_channel() -> None:
    for channels, pixels in itertools.product(SIZES, SIZES):
        x, y, dy = normal(2, channels, pixels, 1), np.zeros((2, channels, channels), np.float32), None
        layer = bnns.BNNSLayerParametersGram(
            alpha=1.0,
            i_desc=Descriptor(layout=bnns.BNNSDataLayout3DLastMajor, size=(1, pixels, channels), data_type=F32),
            o_desc=Descriptor(layout=bnns.BNNSDataLayout2DLastMajor, size=(channels, channels), data_type=F32),
        )
        filter = created(bnns.BNNSFilterCreateLayerGram(layer))
        succeeds(bnns.BNNSFilterApplyBatch(filter, 2, x, 0, y, 0))
        close(y, np.einsum("nfij,ncij->nfc", x, x))
        dx, dy = np.full_like(x, 7), normal(*y.shape, seed=3)
        out_delta = Descriptor(layout=layer.o_desc.layout, size=(channels, channels), data=dy, data_type=F32)
        in_delta = Descriptor(layout=layer.i_desc.layout, size=(1, pixels, channels), data=dx, data_type=F32)
        succeeds(bnns.BNNSFilterApplyBackwardBatch(filter, 2, x, 0, in_delta, 0, None, 0, out_delta, 0, None, None))
        close(dx, np.einsum("nfc,ncij->nfij", dy + dy.swapaxes(1, 2), x))


# ---- reductions ------------------------------------------------------------------------------------------------------

VALUES: dict[int, Any] = {
    bnns.BNNSReduceFunctionMax: np.max,
    bnns.BNNSReduceFunctionMin: np.min,
    bnns.BNNSReduceFunctionMean: np.mean,
    bnns.BNNSReduceFunctionSum: np.sum,
    bnns.BNNSReduceFunctionProduct: np.prod,
}
SHAPES = list(itertools.product(SIZES, repeat=3))


def reduction(code: int, shape: tuple[int, ...], out: tuple[int, ...], **fields: Any) -> Any:
    layer = bnns.BNNSLayerParametersReduction(i_desc=first(shape), o_desc=first(out, **fields), reduce_func=code)
    return bnns.BNNSFilterCreateLayerReduction(layer)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("code", VALUES)
def test_reductions_and_their_gradients(code: int, batch: int) -> None:
    for shape, reduced in itertools.product(SHAPES, itertools.product(BOTH, repeat=3)):
        x = normal(batch, *shape)
        out = tuple(1 if one else n for n, one in zip(shape, reduced, strict=True))
        axes = tuple(1 + k for k, one in enumerate(reduced) if one)
        filter, y = reduction(code, shape, out), np.full((batch, *out), 7, np.float32)
        assert filter is not None, bnns.last_error()
        succeeds(bnns.BNNSFilterApplyBatch(filter, batch, x, 0, y, 0))
        expected = VALUES[code](x.astype(np.float64), axis=axes, keepdims=True)
        close(y, expected)
        dx, dy = np.full_like(x, 7), normal(batch, *out, seed=1)
        given = x, 0, first(shape, dx), 0, None, 0, first(out, dy), 0, None, None
        succeeds(bnns.BNNSFilterApplyBackwardBatch(filter, batch, *given))
        slope = {
            bnns.BNNSReduceFunctionMean: y.size / x.size,
            bnns.BNNSReduceFunctionSum: 1.0,
            bnns.BNNSReduceFunctionProduct: expected / x,
        }.get(code, x == y)  # of a maximum or minimum
        close(dx, np.broadcast_to(slope * dy, x.shape))


@pytest.mark.parametrize("data_type", [F32, bnns.BNNSDataTypeInt32])
@pytest.mark.parametrize("batch", [1, 2])
def test_indices_of_extrema_along_an_axis_of_extent_1(batch: int, data_type: int) -> None:
    for shape, axis in itertools.product(SHAPES, range(3)):
        out = (*shape[:axis], 1, *shape[axis + 1 :])
        x = normal(batch, *shape)
        for code, find in ((bnns.BNNSReduceFunctionArgMax, np.argmax), (bnns.BNNSReduceFunctionArgMin, np.argmin)):
            filter = created(reduction(code, shape, out, data_type=data_type))
            y = np.full((batch, *out), 7, np.float32 if data_type == F32 else np.int32)
            succeeds(bnns.BNNSFilterApplyBatch(filter, batch, x, 0, y, 0))
            assert np.array_equal(y, find(x, axis=1 + axis, keepdims=True))


def test_an_index_needs_an_axis() -> None:
    for code in (bnns.BNNSReduceFunctionArgMax, bnns.BNNSReduceFunctionArgMin):
        assert reduction(code, (2, 3), (2, 3)) is None
        assert "o_desc.size is (2, 3), the same as that of i_desc, expected 1 along one axis" in bnns.last_error()
