"""A BNNS multihead attention with its descriptors and arrays, short ways to call it, and its oracle."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from retrograd import bnns
from retrograd.lab import reference

Array = np.ndarray[Any, Any]
Descriptor = bnns.BNNSNDArrayDescriptor
Projection = bnns.BNNSMHAProjectionParameters
F32, BOOLEAN = bnns.BNNSDataTypeFloat32, bnns.BNNSDataTypeBoolean
ROW, COLUMN = bnns.BNNSDataLayoutRowMajorMatrix, bnns.BNNSDataLayoutColumnMajorMatrix
FIRST2, LAST2 = bnns.BNNSDataLayout2DFirstMajor, bnns.BNNSDataLayout2DLastMajor
FIRST3, LAST3, DHK = bnns.BNNSDataLayout3DFirstMajor, bnns.BNNSDataLayout3DLastMajor, bnns.BNNSDataLayoutMHA_DHK
FIRST4, LAST4 = bnns.BNNSDataLayout4DFirstMajor, bnns.BNNSDataLayout4DLastMajor
VECTOR = bnns.BNNSDataLayoutVector
CLIENT = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)
INPUTS = ("query", "key", "value")
PARTS = (*INPUTS, "output")
LETTERS = dict(zip(PARTS, "qkvo", strict=True))
# The axes of the text, slowest first in memory.
ORDERS = {
    VECTOR: (0,),
    ROW: (0, 1),
    COLUMN: (1, 0),
    FIRST2: (0, 1),
    LAST2: (1, 0),
    FIRST3: (0, 1, 2),
    LAST3: (2, 1, 0),
    DHK: (1, 2, 0),
    FIRST4: (0, 1, 2, 3),
    LAST4: (3, 2, 1, 0),
}


class Sizes(NamedTuple):
    """Small primes, so that no two axes can be exchanged unnoticed."""

    batch: int = 2
    targets: int = 3
    sources: int = 5
    d_model: int = 7
    k_dim: int = 11
    v_dim: int = 13
    heads: int = 2
    d_key: int = 3
    d_value: int = 5


class Stored:
    """An array in memory as a layout says. `view` has the axes of Apple's text, and the batch before them."""

    def __init__(
        self, values: Array, layout: int, *, batched: bool = False, gap: int = 0, flags: int = 0, inner: int = 1
    ) -> None:
        order = ORDERS[layout]
        axes = values.shape[1:] if batched else values.shape
        shape = [axes[k] for k in order]
        count = int(np.prod(shape)) * inner
        self.memory = np.full((len(values) if batched else 1) * (count + gap), 77, values.dtype)
        rows = np.lib.stride_tricks.as_strided(
            self.memory,
            (len(values) if batched else 1, *shape),
            [values.itemsize * n for n in (count + gap, *_strides(shape, inner))],
        )
        whole = rows.transpose(0, *(1 + k for k in np.argsort(order)))
        self.view: Array = whole if batched else whole[0]
        self.view[...] = values
        self.descriptor = Descriptor(
            flags=flags,
            layout=layout,
            size=axes[::-1] if layout == ROW else axes,
            stride=(inner,) if inner > 1 else (),
            data=self.memory,
            data_type=Descriptor.from_array(values[..., :1].reshape(-1)[:1]).data_type,
        )
        self.batch_stride = count + gap


def _strides(shape: list[int], inner: int) -> list[int]:
    return [inner * int(np.prod(shape[k + 1 :])) for k in range(len(shape))]


class Layer:
    """A filter and the arrays around it. `layouts` may name others than the usual ones, by part and field."""

    def __init__(
        self,
        sizes: Sizes = Sizes(),  # noqa: B008
        *,
        bias: bool = True,
        rows: bool = False,
        zero: bool = False,
        dropout: float = 0.0,
        seed: int = 0,
        layouts: dict[str, int] | None = None,
        dtype: Any = np.float32,
        parameters: Any = CLIENT,
        draw: int = 0,
        gap: int = 0,
    ) -> None:
        n, t, s, d, k_dim, v_dim, heads, d_key, d_value = self.sizes = sizes
        self.bias, self.rows, self.zero, self.dropout, self.gap = bias, rows, zero, dropout, gap
        self.layouts = {"target_desc": ROW, "weights": DHK, "bias": LAST2, **(layouts or {})}
        rng = np.random.default_rng(draw)
        keys, values = (d_key, heads), (d_value, heads)
        shapes = {"wq": (d, *keys), "wk": (k_dim, *keys), "wv": (v_dim, *values), "wo": (heads * d_value, d)}
        if bias:
            shapes |= {"bq": keys, "bk": keys, "bv": values, "bo": (d,)}
        if rows:
            shapes |= {"row_k": keys, "row_v": values}
        self.parameters = {
            name: Stored(rng.normal(0, 0.6, shape).astype(dtype), self.layout(name)) for name, shape in shapes.items()
        }
        self.inputs = {
            name: Stored(rng.normal(0, 1, shape).astype(dtype), self.layout(name), batched=True, gap=gap)
            for name, shape in {"query": (n, t, d), "key": (n, s, k_dim), "value": (n, s, v_dim)}.items()
        }
        self.output = Stored(np.full((n, t, d), -99, dtype), self.layout("output"), batched=True, gap=gap)
        self.dy = Stored(rng.normal(0, 1, (n, t, d)).astype(np.float32), self.layout("output"), batched=True, gap=gap)
        self.structure = bnns.BNNSLayerParametersMultiheadAttention(
            **{part: self._projection(part) for part in PARTS},
            add_zero_attn=zero,
            key_attn_bias=self._described("row_k"),
            value_attn_bias=self._described("row_v"),
            dropout=dropout,
            seed=seed,
        )
        self.filter = bnns.BNNSFilterCreateLayerMultiheadAttention(self.structure, parameters)
        assert self.filter is not None, bnns.last_error()

    def layout(self, name: str) -> int:
        if name in self.layouts:
            return self.layouts[name]
        if name in PARTS:
            return self.layouts["target_desc"]
        if name == "bo":
            return VECTOR
        if name == "wo":
            return ROW
        return self.layouts["weights" if name[0] == "w" else "bias"]

    def _described(self, name: str) -> Descriptor:
        return self.parameters[name].descriptor if name in self.parameters else Descriptor()

    def _projection(self, part: str) -> Projection:
        target = (self.inputs | {"output": self.output})[part].descriptor.copy()
        target.data = None  # a filter ignores it
        letter = LETTERS[part]
        return Projection(target, self._described(f"w{letter}"), self._described(f"b{letter}"))

    # ---- calls -------------------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        size = [0]
        status = bnns.BNNSApplyMultiheadAttention(
            self.filter, self.sizes.batch, None, 0, None, 0, None, 0, None, 0, None, 0, None, size
        )
        assert status == 0, bnns.last_error()
        return size[0]

    def forward(self, cache: Any = None, *, key_mask: Any = None, added: Any = None, **changed: Any) -> int:
        """The call, with the arrays of this layer where `changed` names no others."""
        given = {"batch_size": self.sizes.batch, "key_mask": key_mask, "key_mask_stride": 0}
        for name, array in (self.inputs | {"output": self.output}).items():
            given |= {name: array.memory, f"{name}_stride": array.batch_stride}
        given |= {"add_to_attention": added, "backprop_cache": cache}
        given["backprop_cache_size"] = None if cache is None else [memoryview(cache).nbytes]
        return bnns.BNNSApplyMultiheadAttention(self.filter, **{**given, **changed})

    def run(self, **masks: Any) -> bytearray:
        """Forward with a cache, which is returned."""
        cache = bytearray(self.capacity())
        assert self.forward(cache, **masks) == 0, bnns.last_error()
        return cache

    def deltas(self, *, flags: int = 0, fill: float = -99.0) -> dict[str, Stored]:
        """A gradient for every input and parameter, by name."""
        made = {}
        for name, one in (self.inputs | self.parameters).items():
            values = np.full(one.view.shape, fill, np.float32)
            batched = name in INPUTS
            made[name] = Stored(values, self.layout(name), batched=batched, gap=self.gap if batched else 0, flags=flags)
        return made

    def backward(
        self,
        deltas: dict[str, Stored],
        cache: Any = None,
        *,
        key_mask: Any = None,
        added: Any = None,
        **changed: Any,
    ) -> int:
        given: dict[str, Any] = {"batch_size": self.sizes.batch, "key_mask": key_mask, "key_mask_stride": 0}
        for part in PARTS:
            array = (self.inputs | {"output": self.output})[part]
            given |= {part: array.memory, f"{part}_stride": array.batch_stride}
            given[f"{part}_param_delta"] = self.projection_delta(part, deltas)
        for part in ("key", "value"):
            row = deltas.get(f"row_{LETTERS[part]}")
            given[f"{part}_attn_bias_delta"] = None if row is None else row.descriptor
        given |= {"add_to_attention": added, "backprop_cache": cache}
        given["backprop_cache_size"] = 0 if cache is None else memoryview(cache).nbytes
        return bnns.BNNSApplyMultiheadAttentionBackward(self.filter, **{**given, **changed})

    def projection_delta(self, part: str, deltas: dict[str, Stored]) -> Projection:
        letter = LETTERS[part]
        target = self.dy if part == "output" else deltas.get(part)
        made = Projection()
        if target is not None:
            made.target_desc = target.descriptor
            made.target_desc.stride[2] = target.batch_stride
        for field, name in (("weights", f"w{letter}"), ("bias", f"b{letter}")):
            if name in deltas:
                setattr(made, field, deltas[name].descriptor)
        return made

    # ---- the oracle --------------------------------------------------------------------------------------------------

    def arguments(self) -> tuple[Any, ...]:
        weights = reference.AttentionWeights(**{name: one.view for name, one in self.parameters.items()})
        return (*(self.inputs[name].view for name in INPUTS), weights, self.zero)

    def kept(self, cache: Any) -> Array | None:
        """The factors of dropout, from the seed behind the cache's magic number."""
        if not self.dropout:
            return None
        n, t, s, _, _, _, heads, _, _ = self.sizes
        _, seed = struct.unpack_from("<8sQ", cache)
        return reference.dropout_mask(seed, (n, heads, t, s + self.rows + self.zero), float(np.float32(self.dropout)))

    def expected(self, cache: Any = None, ignored: Any = None, added: Any = None) -> Array:
        return reference.attention_forward(*self.arguments(), ignored, added, self.kept(cache))

    def expected_gradients(self, cache: Any = None, ignored: Any = None, added: Any = None) -> dict[str, Array]:
        kept = self.kept(cache)
        return reference.attention_backward(self.dy.view, *self.arguments(), ignored, added, kept)


def masks(sizes: Sizes, masked: bool, added: str | None, draw: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the calls, and of the oracle. `added`: the rank of add_to_attention, and whether it is boolean."""
    rng = np.random.default_rng(draw)
    given: dict[str, Any] = {}
    oracle: dict[str, Any] = {}
    if masked:
        ignored = rng.random((sizes.batch, sizes.sources)) < 0.4
        ignored[:, 0] = False
        given["key_mask"] = Descriptor(layout=VECTOR, size=(sizes.sources,), data=ignored, data_type=BOOLEAN)
        oracle["ignored"] = ignored
    if added is not None:
        rank = int(added[0])
        shape = (sizes.batch, sizes.heads, sizes.targets, sizes.sources)[4 - rank :]
        values = rng.normal(0, 1, shape).astype(np.float32)
        if added.endswith("boolean"):
            values = values > 0.5
            values[..., 0] = False
        layout = {2: FIRST2, 3: LAST3, 4: FIRST4}[rank]
        given["added"] = Stored(values, layout).descriptor
        oracle["added"] = values
    return given, oracle


FORWARD_STAGES = 4  # projection, scores, attention, output
BACKWARD_STAGES = 8  # these, and as many back


def assert_close(got: Array, expected: Array, stages: int, like: Array | None = None) -> None:
    """Within the rounding errors of a chain of products in float32.

    A product of k terms errs by at most k / 2 ulp of the sum of their magnitudes, which for these random numbers is
    below 8 times the largest result, or the largest of `like`; k is at most 16 here. A softmax passes the error of its
    scores on, multiplied by a slope of at most 1 / 2.
    """
    assert got.shape == expected.shape
    bound = stages * 16 * 8 * 2.0**-24 * float(np.abs(expected if like is None else like).max())
    np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), rtol=0, atol=bound)


def assert_gradients(deltas: dict[str, Stored], expected: dict[str, Array]) -> None:
    for name, delta in deltas.items():
        # A key's bias changes all scores of a row alike, so its gradient is the sum of numbers that cancel.
        like = expected["key"] if name == "bk" else None
        assert_close(delta.view, expected[name], BACKWARD_STAGES, like)
