"""BNNS multihead attention: what is refused, and touches nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from support.bnns import fails, sized
from support.bnns_attention import DHK, FIRST2, FIRST3, FIRST4, INPUTS, LAST2, Descriptor, Layer, Projection

ONES = np.ones(1000, np.float32)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("query.target_desc.layout", DHK, "query.target_desc.layout is BNNSDataLayoutMHA_DHK; it must be RowMajor"),
        ("query.target_desc.data_type", 0x20008, "query.target_desc.data_type is BNNSDataTypeInt8"),
        ("query.target_desc.size", (0, 3), "an extent must be at least 1"),
        ("value.target_desc.size", (13, 4), "value.target_desc has 4 rows, expected 5 as in key.target_desc"),
        ("output.target_desc.size", (8, 3), "output.target_desc is 3 x 8, expected target_length x d_model = 3 x 7"),
        ("output.target_desc.stride", (1, 2), "output.target_desc.stride is (1, 2), with which elements of"),
        ("query.weights.size", (6, 3, 2), "query.weights is 6 x 3 x 2, expected d_model x d_key x heads = 7 x 3 x 2"),
        ("key.weights.size", (11, 4, 2), "query.weights is 7 x 3 x 2, expected d_model x d_key x heads = 7 x 4 x 2"),
        ("value.weights.size", (13, 5, 1), "value.weights is 13 x 5 x 1, expected v_dim x d_value x heads"),
        (
            "query.weights.layout",
            bnns.BNNSDataLayoutSNE,
            "query.weights.layout is BNNSDataLayoutSNE; it must be MHA_DHK",
        ),
        ("key.weights.data", None, "key.weights.data is NULL"),
        ("key.weights.data", ONES[:10], "key.weights.data has 40 bytes, but size=(d, k, heads)=(11, 3, 2) spans 264"),
        ("key.weights.data", np.ones(66), "key.weights.data has elements of type float64"),
        ("query.bias.size", (2, 3), "query.bias is 2 x 3, expected d_key x heads = 3 x 2"),
        ("query.bias.layout", bnns.BNNSDataLayoutVector, "query.bias.layout is BNNSDataLayoutVector; it must be"),
        ("output.weights.size", (7, 9), "output.weights is 9 x 7, expected heads * d_value x d_model = 10 x 7"),
        ("output.bias.size", (6,), "output.bias is 6, expected d_model = 7"),
        ("key_attn_bias.data", None, "key_attn_bias.data is NULL, but value_attn_bias.data is not: give both or none"),
        (
            "value_attn_bias.data",
            None,
            "value_attn_bias.data is NULL, but key_attn_bias.data is not: give both or none",
        ),
        ("value_attn_bias.size", (3, 2), "value_attn_bias is 3 x 2, expected d_value x heads = 5 x 2"),
        ("dropout", "some", "dropout is 'some', must be a number"),
        ("seed", -1, "seed is -1, which a size_t cannot hold"),
    ],
)
def test_attention_layers_that_cannot_be_made(path: str, value: Any, reason: str) -> None:
    structure: Any = Layer(rows=True).structure
    *parents, field = path.split(".")
    owner = structure
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, field, value)
    assert bnns.BNNSFilterCreateLayerMultiheadAttention(structure) is None
    message = bnns.last_error() or ""
    assert message.startswith("BNNSFilterCreateLayerMultiheadAttention: ")
    assert reason in message


def test_what_is_no_attention_layer() -> None:
    for strange in (None, Projection(), bnns.BNNSLayerParametersEmbedding(), 5):
        assert bnns.BNNSFilterCreateLayerMultiheadAttention(strange) is None  # type: ignore[arg-type]
        assert "must be BNNSLayerParametersMultiheadAttention" in (bnns.last_error() or "")
    assert bnns.BNNSFilterCreateLayerMultiheadAttention(bnns.BNNSLayerParametersMultiheadAttention()) is None


FLAGS = np.zeros(64, np.bool_)


def vector(data: Any = None, size: int = 5, data_type: int = bnns.BNNSDataTypeBoolean) -> Descriptor:
    return sized(bnns.BNNSDataLayoutVector, size, data=data, data_type=data_type)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2**62}, "would not fit in a 64-bit address space"),
        ({"batch_size": 3}, "bytes, but 3 samples of"),
        ({"query": None}, "query is NULL"),
        ({"key": None}, "key is NULL"),
        ({"value": None}, "value is NULL"),
        ({"output": None}, "output is NULL"),
        ({"query": ONES[:20]}, "query has 80 bytes, but 2 samples of size=(columns, rows)=(7, 3)"),
        ({"query": np.ones(42)}, "query has elements of type float64"),
        ({"query_stride": -1}, "query_stride is -1"),
        ({"output_stride": 5}, "output_stride is 5, but a sample of output spans 21 values"),
        ({"output": bytes(4 * 42)}, "output is read-only"),
        ({"key_mask": vector(FLAGS, 4)}, "key_mask is 4, expected source_length = 5"),
        ({"key_mask": vector(ONES, 5, 0x10020)}, "key_mask.data_type is BNNSDataTypeFloat32; it must be Boolean"),
        ({"key_mask": vector(ONES)}, "key_mask.data has elements of type float32"),
        ({"key_mask": vector(FLAGS[:9])}, "key_mask.data has 9 bytes, but 2 samples of size=(5,)"),
        ({"key_mask": vector()}, "key_mask.data is NULL"),
        ({"key_mask": FLAGS}, "key_mask is of type ndarray, not BNNSNDArrayDescriptor"),
        ({"added": sized(FIRST2, 3, 4, data=ONES)}, "is 3 x 4, expected target_length x source_length = 3 x 5"),
        ({"added": sized(FIRST3, 3, 3, 5, data=ONES)}, "is 3 x 3 x 5, expected heads x target_length x source"),
        ({"added": sized(FIRST4, 1, 2, 3, 5, data=ONES)}, "expected batch_size x heads x target_length x source"),
        ({"added": sized(DHK, 2, 3, 5, data=ONES)}, "add_to_attention.layout is BNNSDataLayoutMHA_DHK; it must"),
        ({"added": sized(FIRST2, 3, 5)}, "add_to_attention.data is NULL"),
        ({"added": sized(FIRST2, 3, 5, data=ONES, data_type=0x20020)}, "data_type is BNNSDataTypeInt32; it must"),
        ({"backprop_cache_size": 5}, "backprop_cache_size is 5, must be a list with one size, such as [0]"),
        ({"backprop_cache_size": []}, "backprop_cache_size is [], must be a list with one size"),
        ({"workspace_size": (0,)}, "workspace_size is (0,), must be a list with one size"),
        ({"backprop_cache": "text", "backprop_cache_size": [5000]}, "backprop_cache is of type str"),
        ({"backprop_cache": bytearray(9000), "backprop_cache_size": [-4]}, "backprop_cache_size is -4"),
    ],
)
def test_attention_calls_that_fail_write_nothing(changed: dict[str, Any], reason: str) -> None:
    layer = Layer(rows=True)
    cache = layer.run()
    layer.output.memory[...] = -99
    before = bytes(cache)
    changed = {"cache": cache, **changed}
    fails(layer.forward(changed.pop("cache"), **changed), reason)
    assert (bnns.last_error() or "").startswith("BNNSApplyMultiheadAttention: ")
    assert (layer.output.memory == -99).all()
    assert bytes(cache) == before
    if "output" in changed or "output_stride" in changed or "backprop_cache_size" in changed:
        return  # backward reads no output, and takes the size itself
    deltas = layer.deltas()
    fails(layer.backward(deltas, **changed), reason)
    assert all((one.memory == -99).all() for one in deltas.values())


@pytest.mark.parametrize(
    ("owner", "field", "value", "reason"),
    [
        ("query_param_delta.target_desc", "layout", DHK, ".layout is BNNSDataLayoutMHA_DHK; it must be RowMajorMatrix"),
        ("query_param_delta.target_desc", "size", (6, 3), " is 3 x 6, expected length x width = 3 x 7"),
        ("query_param_delta.target_desc", "data_type", 0x10010, ".data_type is BNNSDataTypeFloat16, must be"),
        ("query_param_delta.target_desc", "stride", (1, 7, 20), ".stride[2] is 20, but a sample spans 21 values"),
        ("query_param_delta.target_desc", "stride", (1, 7, -1), ".stride[2] is -1"),
        ("query_param_delta.target_desc", "stride", (1, 7, 50), ".data has 168 bytes, but 2 samples of"),
        ("query_param_delta.target_desc", "flags", 2, ".flags is 2, must be 0 (set) or 1 (accumulate)"),
        ("query_param_delta.target_desc", "data", bytes(168), ".data is read-only"),
        ("key_param_delta.weights", "size", (11, 3, 3), " is 11 x 3 x 3, expected k_dim x d_key x heads = 11 x 3 x 2"),
        ("key_param_delta.weights", "data", ONES[:9], ".data has 36 bytes"),
        ("key_param_delta.weights", "data", bytes(264), ".data is read-only"),
        ("key_param_delta.weights", "stride", (1, 1, 1), ".stride is (1, 1, 1), with which elements of"),
        ("value_param_delta.bias", "layout", DHK, ".layout is BNNSDataLayoutMHA_DHK; it must be"),
        ("output_param_delta.weights", "size", (9, 7), " is 7 x 9, expected heads * d_value x d_model = 10 x 7"),
        ("output_param_delta.bias", "size", (8,), " is 8, expected d_model = 7"),
        ("output_param_delta.target_desc", "data", None, ".data is NULL"),
        ("output_param_delta.target_desc", "size", (3, 7), " is 7 x 3, expected target_length x d_model = 3 x 7"),
        ("output_param_delta.target_desc", "stride", (1, 7, 30), ".data has 168 bytes, but 2 samples of"),
        ("output_param_delta", "", None, " is NULL"),
        (
            "query_param_delta",
            "",
            Descriptor(),
            " is of type BNNSNDArrayDescriptor, must be BNNSMHAProjectionParameters",
        ),
        ("key_attn_bias_delta", "", sized(LAST2, 3, 2), ".data is NULL"),
        ("key_attn_bias_delta", "", sized(LAST2, 2, 3, data=ONES), " is 2 x 3, expected d_key x heads = 3 x 2"),
        ("key_attn_bias_delta", "", 4, " is of type int, not BNNSNDArrayDescriptor"),
        ("backprop_cache_size", "", -1, " is -1"),
    ],
)
def test_attention_gradients_that_fail_write_nothing(owner: str, field: str, value: Any, reason: str) -> None:
    layer = Layer(rows=True)
    cache = layer.run()
    deltas = layer.deltas()
    given: dict[str, Any] = {}
    for part in (*INPUTS, "output"):
        given[f"{part}_param_delta"] = layer.projection_delta(part, deltas)
    if field:
        argument, descriptor = owner.split(".")
        setattr(getattr(given[argument], descriptor), field, value)
    else:
        given[owner] = value
    assert layer.backward(deltas, cache, **given) == -1
    message = bnns.last_error() or ""
    assert message.startswith(f"BNNSApplyMultiheadAttentionBackward: {owner}{reason}")
    assert all((one.memory == -99).all() for one in deltas.values())


def test_more_failures_of_an_attention() -> None:
    layer = Layer()
    weights, cache = layer.parameters["wq"].memory, bytearray(layer.capacity())
    fails(layer.forward(output=weights), "output overlaps query.weights.data in memory")
    whole = np.zeros(layer.capacity() // 4 + 1, np.float32)
    bytes_of_whole = whole.view(np.uint8)
    for name in (*INPUTS, "output"):
        assert layer.forward(bytes_of_whole, **{name: whole}) == -1
        reason = "output overlaps backprop_cache" if name == "output" else f"backprop_cache overlaps {name}"
        assert f"{reason} in memory" in (bnns.last_error() or "")
    mask = vector(bytes_of_whole.view(np.bool_))
    fails(layer.forward(bytes_of_whole, key_mask=mask), "backprop_cache overlaps key_mask.data in memory")
    assert layer.forward(bytes_of_whole, added=sized(FIRST2, 3, 5, data=whole)) == -1
    assert "backprop_cache overlaps add_to_attention.data in memory" in (bnns.last_error() or "")
    assert not whole.any()
    row = layer.deltas()["bk"].descriptor
    assert layer.backward({}, cache, key_attn_bias_delta=row) == -1
    assert "key_attn_bias_delta is given, but key_attn_bias.data was NULL" in (bnns.last_error() or "")
    for filter in (None, 5):
        layer.filter = filter
        assert layer.forward() == -1
        assert layer.backward({}) == -1
