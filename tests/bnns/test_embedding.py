"""BNNS embedding filters."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import BNNS
from retrograd.lab import reference
from support.bnns import CLIENT, Descriptor, created, fails, normal, not_created, sized, succeeds

F32, I32 = bnns.BNNSDataTypeFloat32, bnns.BNNSDataTypeInt32
VECTOR, FIRST2, LAST2 = bnns.BNNSDataLayoutVector, bnns.BNNSDataLayout2DFirstMajor, bnns.BNNSDataLayout2DLastMajor
NONE = bnns.SIZE_MAX


def layer(table: np.ndarray, count: int = 6, **fields: Any) -> Any:
    """Items are contiguous: rows of `table`."""
    items, width = table.shape
    given = {
        "i_desc": sized(VECTOR, count, data_type=I32),
        "o_desc": sized(LAST2, width, count),
        "dictionary": sized(LAST2, width, items, data=table),
        "padding_idx": NONE,
    }
    return bnns.BNNSLayerParametersEmbedding(**{**given, **fields})


def create(table: np.ndarray, parameters: Any = CLIENT, **fields: Any) -> Any:
    return created(bnns.BNNSFilterCreateLayerEmbedding(layer(table, **fields), parameters))


def applied(filter: Any, indices: np.ndarray, width: int) -> np.ndarray:
    y = np.empty((*indices.shape, width), np.float32)
    assert bnns.BNNSFilterApplyBatch(filter, len(indices), indices, 0, y, 0) == 0, bnns.last_error()
    return y


def backward(filter: Any, indices: Any, dy: np.ndarray, delta: Any, **more: Any) -> int:
    out_delta = sized(LAST2, dy.shape[2], dy.shape[1], data=dy)
    return bnns.BNNSFilterApplyBackwardBatch(
        filter, len(dy), indices, 0, more.get("in_delta"), 0, None, 0, out_delta, 0, delta, more.get("bias_delta")
    )


INDICES = np.array([[0, 4, 4, 2, 1, 4], [3, 3, 0, 0, 2, 1]], np.int32)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_items_are_looked_up(dtype: Any) -> None:
    table, indices = normal(5, 7), INDICES.astype(dtype)
    data_type = Descriptor.from_array(indices).data_type
    filter = create(table, i_desc=sized(VECTOR, 6, data_type=data_type))
    assert np.array_equal(applied(filter, indices, 7), table[INDICES])


def test_layouts_go_by_logical_axes() -> None:
    """2DFirstMajor {2, 3} keeps the components apart in memory, and gives {2, n}."""
    components = np.array([[1, 2, 3], [10, 20, 30]], np.float32)
    made = bnns.BNNSLayerParametersEmbedding(
        0,
        sized(VECTOR, 4, data_type=I32),
        sized(FIRST2, 2, 4),
        sized(FIRST2, 2, 3, data=components),
        NONE,
    )
    filter, y = bnns.BNNSFilterCreateLayerEmbedding(made), np.empty((2, 4), np.float32)
    assert bnns.BNNSFilterApply(filter, np.array([2, 0, 1, 1], np.int32), y) == 0, bnns.last_error()
    assert y.tolist() == [[3, 1, 2, 2], [30, 10, 20, 20]]
    # Items of two axes, indices of two axes, of different layouts.
    table = normal(4, 3, 2)  # items, then (fastest last) axes of size 3 and 2
    indices = np.array([[0, 3, 1], [2, 2, 0]], np.int32)
    made = bnns.BNNSLayerParametersEmbedding(
        0,
        sized(FIRST2, 2, 3, data_type=I32),
        sized(bnns.BNNSDataLayout4DLastMajor, 2, 3, 2, 3),
        sized(bnns.BNNSDataLayout3DLastMajor, 2, 3, 4, data=table),
        NONE,
    )
    filter = created(bnns.BNNSFilterCreateLayerEmbedding(made))
    y = np.empty((3, 2, 3, 2), np.float32)  # memory: index axes reversed, then the item
    assert bnns.BNNSFilterApply(filter, indices, y) == 0
    assert np.array_equal(y, table[indices].transpose(1, 0, 2, 3))
    dy, delta = normal(3, 2, 3, 2, seed=1), np.empty_like(table)
    succeeds(bnns.BNNSFilterApplyBackwardBatch(
        filter, 1, indices, 0, None, 0, None, 0, sized(bnns.BNNSDataLayout4DLastMajor, 2, 3, 2, 3, data=dy), 0,
        sized(bnns.BNNSDataLayout3DLastMajor, 2, 3, 4, data=delta), None,
    ))  # fmt: skip
    rows = dy.transpose(1, 0, 2, 3).reshape(6, 6)
    assert np.allclose(delta.reshape(4, 6), reference.embedding_backward(rows, indices.ravel(), 4), rtol=1e-6)


def test_the_gradient_is_scattered_and_added() -> None:
    table, dy = normal(5, 7), normal(2, 6, 7, seed=1)
    expected = reference.embedding_backward(dy, INDICES, 5)
    for flags in (0, 1):
        delta = np.ones_like(table)
        assert backward(create(table), INDICES, dy, sized(LAST2, 7, 5, data=delta, flags=flags)) == 0
        assert np.allclose(delta, expected + flags, rtol=1e-6, atol=1e-6)
    counts = np.bincount(INDICES.ravel(), minlength=5)
    scaled = create(table, flags=bnns.BNNSEmbeddingFlagScaleGradientByFrequency)
    assert backward(scaled, INDICES, dy, sized(LAST2, 7, 5, data=delta)) == 0
    assert np.allclose(delta, expected / counts[:, None], rtol=1e-6, atol=1e-6)
    assert backward(scaled, INDICES[:, :], dy, None) == 0


def test_the_padding_item_is_zero_and_not_trained() -> None:
    table, dy = normal(5, 7), normal(2, 6, 7, seed=1)
    filter = create(table, padding_idx=4)
    y = applied(filter, INDICES, 7)
    assert np.array_equal(y, np.where((INDICES == 4)[..., None], 0, table[INDICES]))
    delta = np.ones_like(table)
    assert backward(filter, INDICES, dy, sized(LAST2, 7, 5, data=delta)) == 0
    assert (delta[4] == 0).all()
    assert (delta[:4] != 0).any(axis=1).all()


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.5, np.inf])
def test_long_items_are_shortened(p: float) -> None:
    table = normal(5, 7) * np.array([[0.01], [1], [2], [1e20], [0]], np.float32)
    y = applied(create(table, max_norm=1.5, norm_type=p), INDICES, 7).astype(np.float64)
    wide = table.astype(np.float64)[INDICES]
    norms = np.linalg.norm(wide, ord=p or 2, axis=2, keepdims=True)
    expected = wide * np.minimum(1, 1.5 / np.maximum(norms, 1e-30))
    assert np.allclose(y, expected, rtol=1e-6)


def test_the_dictionary_is_copied_unless_it_stays_the_clients() -> None:
    for parameters in (None, CLIENT):
        table = normal(5, 7)
        filter = create(table, parameters)
        before = table.copy()
        table += 1
        assert np.array_equal(applied(filter, INDICES, 7), (before if parameters is None else table)[INDICES])


def test_dictionaries_of_other_types() -> None:
    table = normal(5, 7).astype(ml_dtypes.bfloat16)
    data_type = bnns.BNNSDataTypeBFloat16
    filter = create(
        table,
        o_desc=sized(LAST2, 7, 6, data_type=data_type),
        dictionary=sized(LAST2, 7, 5, data=table, data_type=data_type),
    )
    y = np.empty((2, 6, 7), ml_dtypes.bfloat16)
    assert bnns.BNNSFilterApplyBatch(filter, 2, INDICES, 0, y, 0) == 0, bnns.last_error()
    assert np.array_equal(y, table[INDICES])
    assert backward(filter, INDICES, normal(2, 6, 7), sized(LAST2, 7, 5, data=normal(5, 7))) == -1
    assert "o_desc and dictionary have type bfloat16; backward needs Float32" in (bnns.last_error() or "")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"flags": 2}, "flags is 0x2; the only flag is 1"),
        ({"i_desc": sized(VECTOR, 6)}, "i_desc.data_type is BNNSDataTypeFloat32; it must be Int8"),
        ({"o_desc": sized(LAST2, 6, 7)}, "o_desc.size is (6, 7), expected (7, 6): the size of an item, then"),
        ({"dictionary": sized(LAST2, 7, 5)}, "dictionary.data is NULL"),
        (
            {"o_desc": sized(LAST2, 7, 6, data_type=bnns.BNNSDataTypeFloat16)},
            "o_desc.data_type is BNNSDataTypeFloat16, expected BNNSDataTypeFloat32 as in dictionary",
        ),
        ({"max_norm": -1.0}, "max_norm is -1 and norm_type 2"),
        ({"norm_type": -1.0}, "max_norm is 0 and norm_type -1"),
    ],
)
def test_creation_fails(fields: dict[str, Any], reason: str) -> None:
    not_created(bnns.BNNSFilterCreateLayerEmbedding(layer(normal(5, 7), **fields)), reason)
    assert bnns.BNNSFilterCreateLayerEmbedding(None) is None  # type: ignore[arg-type]


def test_calls_fail_and_touch_nothing() -> None:
    table, dy = normal(5, 7), normal(2, 6, 7, seed=1)
    filter = create(table)
    y, delta = np.full((2, 6, 7), 7, np.float32), np.full((5, 7), 7, np.float32)
    for wrong in (5, -1):
        indices = INDICES.copy()
        indices[1, 2] = wrong
        assert bnns.BNNSFilterApplyBatch(filter, 2, indices, 0, y, 0) == -1
        assert f"in has the index {wrong}, but dictionary has 5 items" in (bnns.last_error() or "")
        assert backward(filter, indices, dy, sized(LAST2, 7, 5, data=delta)) == -1
    cases: list[tuple[dict[str, Any], str]] = [
        ({"delta": sized(LAST2, 5, 7, data=delta)}, "weights_delta.size is (5, 7), expected"),
        ({"indices": None}, "in is NULL"),
        ({"in_delta": sized(VECTOR, 6, data=delta)}, "in_delta is given, but indices have no gradient"),
        ({"bias_delta": sized(VECTOR, 6, data=delta)}, "bias_delta is given, but an embedding has no bias"),
    ]
    for given, reason in cases:
        options = {"delta": sized(LAST2, 7, 5, data=delta), "indices": INDICES, **given}
        fails(backward(filter, options.pop("indices"), dy, options.pop("delta"), **options), reason)
    assert bnns.BNNSFilterApplyBatch(filter, 1, INDICES, 0, np.frombuffer(table, np.float32), 0) == -1
    assert (y == 7).all()
    assert (delta == 7).all()


def test_swifts_embedding_layer() -> None:
    table, dy = normal(5, 7), normal(2, 6, 7, seed=1)
    indices, vectors = BNNS.Shape.vector(6), BNNS.Shape.matrixLastMajor(7, 6)
    dictionary = BNNS.Shape.matrixLastMajor(7, 5)
    y, delta = np.empty_like(dy), np.empty_like(table)
    with BNNS.EmbeddingLayer(
        input=indices.descriptor(data_type=I32),
        output=vectors.descriptor(),
        dictionary=dictionary.descriptor(table),
        paddingIndex=2,
        maximumNorm=0.0,
        normType=BNNS.Norm.l2,
        scalesGradientByFrequency=True,
    ) as swift:
        source = indices.descriptor(INDICES, I32)
        swift.apply(batchSize=2, input=source, output=vectors.descriptor(y))
        swift.applyBackward(
            batchSize=2,
            input=source,
            outputGradient=vectors.descriptor(dy),
            generatingWeightsGradient=dictionary.descriptor(delta),
        )
    kept = (INDICES != 2)[..., None]
    assert np.array_equal(y, np.where(kept, table[INDICES], 0))
    counts = np.bincount(INDICES.ravel(), minlength=5)[:, None]
    expected = reference.embedding_backward(dy, INDICES, 5) / counts
    expected[2] = 0
    assert np.allclose(delta, expected, rtol=1e-6, atol=1e-6)
    assert BNNS.Norm.maximum.rawValue == np.inf
    assert BNNS.Norm.taxicab.rawValue == 1
