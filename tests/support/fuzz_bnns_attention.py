"""Random calls of multihead attention, for fuzz_bnns.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from retrograd import bnns
from support.fuzz_bnns_filters import Buffers, Case, array, filter_parameters, status

PARTS = ("query", "key", "value", "output")


def attention(random: np.random.Generator, memory: Buffers) -> Case:
    batch, targets, sources, heads, d_key, d_value = (int(n) for n in random.integers(1, 4, 6))
    widths = dict(zip(PARTS, (int(n) for n in random.integers(1, 5, 4)), strict=True))
    if random.random() < 0.4:  # of one shape, so that they can share memory
        sources = targets
        widths = dict.fromkeys(PARTS, widths["query"])
    widths["output"] = widths["query"]
    lengths = {"query": targets, "key": sources, "value": sources, "output": targets}
    inner = {"query": d_key, "key": d_key, "value": d_value}
    matrix, weights = int(random.choice([0x28000, 0x28001])), int(random.choice([0x30003, 0x38000, 0x38001]))
    biased, rows = random.random(2) < 0.5

    def projection(part: str, data: bool, wanted: float) -> Any:
        """Targets have data in gradients only, in which each of the arrays may be absent."""
        made = bnns.BNNSMHAProjectionParameters()
        size = lengths[part], widths[part]
        made.target_desc = array(memory, matrix, *size, data=memory.take(batch * size[0] * size[1]))
        keeps_target = data and (part == "output" or random.random() < wanted)
        made.target_desc.data = made.target_desc.data if keeps_target else None
        axes = (inner[part], heads) if part != "output" else (size[1],)
        if random.random() < wanted:
            if part == "output":
                made.weights = array(memory, matrix, heads * d_value, size[1], flags=int(random.integers(0, 2)))
            else:
                made.weights = array(memory, weights, size[1], *axes, flags=int(random.integers(0, 2)))
        if biased and random.random() < wanted:
            made.bias = array(memory, matrix if part != "output" else bnns.BNNSDataLayoutVector, *axes)
        return made

    layer = bnns.BNNSLayerParametersMultiheadAttention(
        **{part: projection(part, False, 2.0) for part in PARTS},
        add_zero_attn=bool(random.random() < 0.3),
        dropout=float(random.choice([0.0, 0.0, 0.5])),
        seed=int(random.integers(0, 3)),
    )
    if rows:
        layer.key_attn_bias = array(memory, matrix, d_key, heads)
        layer.value_attn_bias = array(memory, matrix, d_value, heads)
    a: dict[str, Any] = {
        "batch": batch,
        "key_mask_stride": 0,
        "workspace_size": None,
        "cache": None,
        "cache_size": None,
    }
    for part in PARTS:
        count = lengths[part] * widths[part]
        a |= {part: memory.take(batch * count), f"{part}_stride": 0 if random.random() < 0.3 else count}
    mask = added = None
    if random.random() < 0.4:
        mask = array(memory, bnns.BNNSDataLayoutVector, sources, data=memory.take(batch * sources, np.bool_))
        mask.data_type = bnns.BNNSDataTypeBoolean
    if random.random() < 0.5:
        rank = int(random.integers(2, 5))
        shape = (batch, heads, targets, sources)[4 - rank :]
        boolean = random.random() < 0.4
        data = memory.take(int(np.prod(shape)), np.bool_ if boolean else np.float32)
        added = array(memory, rank << 16 | 0x8001, *shape, data=data)
        added.data_type = bnns.BNNSDataTypeBoolean if boolean else bnns.BNNSDataTypeFloat32
    made = bnns.BNNSFilterCreateLayerMultiheadAttention(layer)
    size = [0]
    if bnns.BNNSApplyMultiheadAttention(
        made, batch, None, 0, None, 0, None, 0, None, 0, None, 0, None, size
    ) == 0 and random.random() < 0.7:  # fmt: skip
        a |= {"cache": memory.take(size[0] + int(random.integers(0, 3)), np.uint8), "cache_size": size}
    deltas = [projection(part, True, 0.8) for part in PARTS]
    if widths["query"] == widths["key"] == widths["value"] and targets == sources and random.random() < 0.5:
        for delta in deltas[1:3]:
            delta.target_desc = deltas[0].target_desc
    row_deltas = [array(memory, matrix, d_key, heads), array(memory, matrix, d_value, heads)] if rows else [None, None]
    roots = [layer, filter_parameters(random), a, mask, added, *deltas, *row_deltas]

    def calls() -> Iterator[Any]:
        layer, parameters, a, mask, added, dq, dk, dv, do, row_k, row_v = roots
        filters: list[Any] = []

        def create() -> Any:
            filters.append(bnns.BNNSFilterCreateLayerMultiheadAttention(layer, parameters))
            return filters[0]

        def source(part: str) -> tuple[Any, Any]:
            return a[part], a[f"{part}_stride"]

        yield "BNNSFilterCreateLayerMultiheadAttention", create, lambda answer: answer is None
        yield (
            "BNNSApplyMultiheadAttention",
            lambda: bnns.BNNSApplyMultiheadAttention(
                filters[0], a["batch"], *source("query"), *source("key"), mask, a["key_mask_stride"], *source("value"),
                *source("output"), added, a["cache_size"], a["cache"], a["workspace_size"], None,
            ),
            status,
        )  # fmt: skip
        if random.random() < 0.2 and a["cache"] is not None:
            with contextlib.suppress(TypeError, ValueError, IndexError):
                a["cache"][random.integers(len(a["cache"]))] ^= 1
        claimed = a["cache_size"][0] if isinstance(a["cache_size"], list) and a["cache_size"] else a["cache_size"]
        yield (
            "BNNSApplyMultiheadAttentionBackward",
            lambda: bnns.BNNSApplyMultiheadAttentionBackward(
                filters[0], a["batch"], *source("query"), dq, *source("key"), mask, a["key_mask_stride"], dk,
                *source("value"), dv, added, row_k, row_v, *source("output"), do, claimed, a["cache"],
                a["workspace_size"], None,
            ),
            status,
        )  # fmt: skip

    return Case(roots, calls)
