"""The layout of an attention's weights, MHA_DHK, in every other function: d fastest, then heads, then k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from support.bnns import created
from support.bnns_attention import DHK, FIRST3, LAST3, Descriptor, Stored

SHAPE = (3, 5, 2)  # d, k, heads
VALUES = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
Made = Callable[[tuple[int, ...]], Stored]


def test_size_view_and_bytes() -> None:
    array = np.arange(30, dtype=np.float32).reshape(5, 2, 3)  # k, heads, d
    descriptor = Descriptor.from_array(array, DHK)
    assert descriptor.size == (3, 5, 2)
    assert np.shares_memory(descriptor.view(), array)
    np.testing.assert_array_equal(descriptor.view(), array)
    assert bnns.BNNSNDArrayGetDataSize(descriptor) == 120
    padded = np.arange(60, dtype=np.float32).reshape(5, 2, 6)[:, :, ::2]
    descriptor = Descriptor.from_array(padded, DHK)
    assert (descriptor.size, descriptor.stride) == ((3, 5, 2), (2, 6, 12))
    np.testing.assert_array_equal(descriptor.view(), padded)
    descriptor.size = (3, 0, 2)
    assert bnns.BNNSNDArrayGetDataSize(descriptor) == 0
    assert "size is (3, 0, 2), and an extent must be at least 1" in (bnns.last_error() or "")
    turned = Descriptor.from_array(array.reshape(2, 5, 3), DHK)
    assert bnns.BNNSCopy(turned, Descriptor.from_array(array.copy(), DHK)) == -1
    assert "dest.size is (3, 2, 5), expected (3, 5, 2) as in src" in (bnns.last_error() or "")


def filtered(create: str, layer: Any, x: Stored, y: Stored) -> None:
    """Forward, and then the gradient of the result in place of the input."""
    filter = created(getattr(bnns, create)(layer))
    assert bnns.BNNSFilterApply(filter, x.memory, y.memory) == 0, bnns.last_error()
    status = bnns.BNNSFilterApplyBackwardBatch(
        filter, 1, x.memory, 0, x.descriptor, 0, y.memory, 0, y.descriptor, 0, None, None
    )
    assert status == 0, bnns.last_error()


def copied(x: Stored, make: Made) -> Stored:
    y = Stored(np.zeros(SHAPE, np.float32), FIRST3)
    assert bnns.BNNSCopy(y.descriptor, x.descriptor) == 0, bnns.last_error()
    np.testing.assert_array_equal(y.view, VALUES)
    z = make(SHAPE)
    assert bnns.BNNSCopy(z.descriptor, y.descriptor) == 0, bnns.last_error()
    return z


def transposed(x: Stored, make: Made) -> Stored:
    y = make((2, 5, 3))
    assert bnns.BNNSTranspose(y.descriptor, x.descriptor, 0, 2) == 0, bnns.last_error()
    np.testing.assert_array_equal(y.view, VALUES.transpose(2, 1, 0))
    return y


def permuted(x: Stored, make: Made) -> Stored:
    y = make((5, 2, 3))
    layer = bnns.BNNSLayerParametersPermute(x.descriptor, y.descriptor, (1, 2, 0))
    filtered("BNNSFilterCreateLayerPermute", layer, x, y)
    np.testing.assert_array_equal(y.view, VALUES.transpose(1, 2, 0))
    return y


def extended(x: Stored, make: Made) -> Stored:
    y = make((4, 7, 2))
    layer = bnns.BNNSLayerParametersPadding(x.descriptor, y.descriptor, ((1, 0), (0, 2), (0, 0)))
    filtered("BNNSFilterCreateLayerPadding", layer, x, y)
    np.testing.assert_array_equal(y.view[1:, :5], VALUES)
    return y


def dropped(x: Stored, make: Made) -> Stored:
    """One decision along k for each d and head."""
    x.view[...] = 1
    y = make(SHAPE)
    layer = bnns.BNNSLayerParametersDropout(x.descriptor, y.descriptor, 0.5, 9, 0b010)
    filtered("BNNSFilterCreateLayerDropout", layer, x, y)
    assert (y.view == y.view[:, :1]).all()
    assert len(np.unique(y.view[:, 0])) == 2
    y.view[...] = 0  # the mask itself is drawn in the order of memory
    x.view[...] = 0
    return y


def softmax(x: Stored, make: Made) -> Stored:
    y = make(SHAPE)
    activation = bnns.BNNSActivation(bnns.BNNSActivationFunctionSoftmax)
    layer = bnns.BNNSLayerParametersActivation(x.descriptor, y.descriptor, activation, 0b100)
    filtered("BNNSFilterCreateLayerActivation", layer, x, y)
    np.testing.assert_allclose(y.view.sum(axis=2), 1, rtol=1e-6)
    return y


def reduced(x: Stored, make: Made) -> Stored:
    y = make((3, 1, 2))
    layer = bnns.BNNSLayerParametersReduction(x.descriptor, y.descriptor, reduce_func=bnns.BNNSReduceFunctionSum)
    filtered("BNNSFilterCreateLayerReduction", layer, x, y)
    np.testing.assert_allclose(y.view[:, 0], VALUES.sum(axis=1), rtol=1e-5)
    return y


def clipped(x: Stored, make: Made) -> Stored:
    y = make(SHAPE)
    assert bnns.BNNSClipByNorm(y.descriptor, x.descriptor, 0.5, 0b010) == 0, bnns.last_error()
    np.testing.assert_allclose(np.linalg.norm(y.view, axis=1), 0.5, rtol=1e-5)
    return y


def looked_up(x: Stored, make: Made) -> Stored:
    """A dictionary whose items are counted by its last axis, that of the heads."""
    y, indices = make((3, 5, 4)), np.array([1, 0, 1, 1], np.int32)
    layer = bnns.BNNSLayerParametersEmbedding(
        i_desc=Descriptor.from_array(indices),
        o_desc=y.descriptor,
        dictionary=x.descriptor,
        padding_idx=bnns.SIZE_MAX,
    )
    filter = created(bnns.BNNSFilterCreateLayerEmbedding(layer))
    assert bnns.BNNSFilterApply(filter, indices, y.memory) == 0, bnns.last_error()
    np.testing.assert_array_equal(y.view, VALUES[:, :, indices])
    status = bnns.BNNSFilterApplyBackwardBatch(
        filter, 1, indices, 0, None, 0, None, 0, y.descriptor, 0, x.descriptor, None
    )
    assert status == 0, bnns.last_error()
    np.testing.assert_allclose(x.view[:, :, 1], 3 * VALUES[:, :, 1], rtol=1e-6)
    return y


@pytest.mark.parametrize(
    "function", [copied, transposed, permuted, extended, dropped, softmax, reduced, clipped, looked_up]
)
def test_other_functions_go_by_size(function: Callable[[Stored, Made], Stored]) -> None:
    """The same values by index as in the generic layouts, for results and for gradients."""
    found = []
    for layout in (DHK, FIRST3, LAST3):
        x = Stored(VALUES, layout)
        y = function(x, lambda shape, layout=layout: Stored(np.zeros(shape, np.float32), layout))  # type: ignore[misc]
        found.append((x.view.copy(), y.view.copy()))
    for values in found[1:]:
        for one, other in zip(values, found[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
