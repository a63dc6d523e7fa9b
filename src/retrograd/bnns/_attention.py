"""Multihead attention, forward and backward.

For each head q = Q Wq + pq, k = [K Wk + pk; bk; 0], v = [V Wv + pv; bv; 0], A = softmax(mask(q k' / sqrt(d_key))) and
head = dropout(A) v; the output is [head_1 head_2 ...] Wo + po. The rows bk and bv, and those of zeros, are optional.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final

import numpy as np

from ..ops.elementwise import dropout
from ..ops.linear import linear_backward, linear_forward
from . import _attention_arrays as _arrays
from . import _filter, _layer
from ._arguments import Given, takes
from ._attention_arrays import BNNSLayerParametersMultiheadAttention, BNNSMHAProjectionParameters
from ._declare import creates
from ._failure import Invalid, Unsupported, advise_once
from ._filter import FLOAT32, BNNSFilter
from ._layer import Parameter, Result
from ._memory import Array, Geometry, as_float, as_size, check_disjoint, check_writable, sized_bytes
from ._products import products, shape_rows_first
from ._structures import BNNSNDArrayDescriptor

_INPUTS: Final = ("query", "key", "value")
# The axes of each projection's weights, in the order of Apple's text. Its bias has all but the first.
_WEIGHTS: Final = {
    "query": ("d_model", "d_key", "heads"),
    "key": ("k_dim", "d_key", "heads"),
    "value": ("v_dim", "d_value", "heads"),
    "output": ("heads * d_value", "d_model"),
}


class AttentionFilter(BNNSFilter):
    """See :func:`BNNSFilterCreateLayerMultiheadAttention`."""

    def __init__(self, layer_params: object, parameters: object) -> None:
        layer = _layer.checked_layer(BNNSLayerParametersMultiheadAttention, layer_params)
        super().__init__(parameters)
        targets = {part: getattr(layer, part).target_desc for part in _WEIGHTS}
        self.targets = {
            part: _arrays.arranged(f"{part}.target_desc", target, _arrays.MATRICES) for part, target in targets.items()
        }
        if self.targets["output"].may_overlap:
            raise _filter.overlapping("output.target_desc", self.targets["output"])
        self.sizes = sizes = self._read_sizes(layer)
        self.slots: dict[str, _arrays.Slot] = {}  # the parameters, by Apple's names
        for part, axes in _WEIGHTS.items():
            fields = {f"{part}.weights": axes, f"{part}.bias": axes[1:]}
            if sizes.biased and part in ("key", "value"):
                fields[f"{part}_attn_bias"] = axes[1:]
            for name, some in fields.items():
                self.slots[name] = _arrays.Slot(name, attrgetter(name)(layer), self, sizes.named(*some))
        rate = as_float("dropout", layer.dropout)
        self.rate = rate if 0 < rate < 1 else 0.0
        if rate != self.rate:
            advise_once(f"dropout is {rate:g}, not between 0 and 1: nothing is dropped")
        self._seeds = np.random.default_rng(as_size("seed", layer.seed) or None)

    def _read_sizes(self, layer: BNNSLayerParametersMultiheadAttention) -> _arrays.Sizes:
        targets, d_model = shape_rows_first(self.targets["query"])
        (sources, k_dim), (length, v_dim) = (shape_rows_first(self.targets[part]) for part in ("key", "value"))
        if length != sources:
            raise Invalid(f"value.target_desc has {length} rows, expected {sources} as in key.target_desc")
        axes = {"target_length": targets, "d_model": d_model}
        _arrays.check_axes("output.target_desc", self.targets["output"], axes)
        heads, d_key, d_value = (
            shape_rows_first(_arrays.arranged(f"{part}.weights", getattr(layer, part).weights, _arrays.WEIGHTS))[axis]
            for part, axis in (("query", 2), ("key", 1), ("value", 1))
        )
        given = {name: getattr(layer, name).data is not None for name in ("key_attn_bias", "value_attn_bias")}
        if len(set(given.values())) > 1:
            missing, present = sorted(given, key=lambda name: given[name])
            raise Invalid(f"{missing}.data is NULL, but {present}.data is not: give both or none")
        biased, zero = given["key_attn_bias"], bool(layer.add_zero_attn)
        return _arrays.Sizes(targets, sources, d_model, k_dim, v_dim, heads, d_key, d_value, biased, zero)

    def _parameters(self) -> list[Parameter]:
        return [slot.parameter for slot in self.slots.values() if slot.parameter is not None]

    def _samples(self, batch: int, given: Given, parts: Sequence[str] = _INPUTS) -> dict[str, Array]:
        """Inputs as they are in memory, slowest axis first."""
        return {
            part: _filter.source_samples(part, self.targets[part], given[part], batch, given[f"{part}_stride"])
            for part in parts
        }

    def _matrices(self, part: str, samples: Array, ignored: Array | None) -> Array:
        """An input in float32, [N, length, width]. Rows that are ignored are 0, whatever they hold."""
        array = _layer.rows_first(_filter.in_shape(samples, samples.shape), self.targets[part].layout)
        if ignored is None or part == "query":
            return array
        return np.where(ignored[:, :, None], np.float32(0), array)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, given: Given) -> None:
        batch = _filter.checked_batch(given["batch_size"])
        kept = _arrays.Cache(self.sizes, batch, self.rate)
        cache_size, cache = given["backprop_cache_size"], given["backprop_cache"]
        if _answered(given, backprop_cache=kept.size, workspace=0):
            return
        y = _filter.target_samples("output", self.targets["output"], given["output"], batch, given["output_stride"])
        samples = self._samples(batch, given)
        masks = _arrays.masks_of(self.sizes, batch, given)
        results: dict[str, Array] = {"output": y}
        if cache is not None:
            if cache_size is None:
                raise Invalid("backprop_cache is given, but backprop_cache_size is NULL")
            memory = sized_bytes("backprop_cache", cache, "backprop_cache_size", cache_size[0], kept.size)
            check_writable("backprop_cache", memory)
            results["backprop_cache"] = memory
            check_disjoint({"backprop_cache": memory}, {**samples, **masks.named()})
        check_disjoint(results, {f"{one.name}.data": one.memory() for one in self._parameters()})
        masks = masks.values()
        seed = int(self._seeds.integers(2**63)) if self.rate else 0
        done = self._attend({part: self._matrices(part, samples[part], masks.keys) for part in _INPUTS}, masks, seed)
        projected = self._projected("output", done.joined)
        _filter.put(y, _layer.stored_rows_first(projected, self.targets["output"].layout), False)
        if cache is not None:
            kept.write(memory, done)

    def _attend(self, arrays: Mapping[str, Array], masks: _arrays.Masks, seed: int) -> _arrays.Pass:
        """Everything but the projection of the output."""
        sizes, threads = self.sizes, self.threads
        q = self._projected("query", arrays["query"])
        k, v = (self._with_rows(part, self._projected(part, arrays[part])) for part in ("key", "value"))
        with np.errstate(all="ignore"):
            q *= np.float32(1 / math.sqrt(sizes.d_key))
            attention = products(self._split(q), self._split(k).swapaxes(-1, -2), threads)
            _mask(attention[..., : sizes.sources], masks)
            _softmax(attention)
        joined = _joined(products(self._dropped(attention, seed), self._split(v), threads))
        ignored = np.zeros((len(q), sizes.sources), np.bool_) if masks.keys is None else masks.keys
        return _arrays.Pass(seed, q, k, v, attention, joined, ignored)

    def _projected(self, part: str, array: Array) -> Array:
        weights, bias = self.slots[f"{part}.weights"], self.slots[f"{part}.bias"]
        return linear_forward(array, weights.weights(), bias.bias(), num_threads=self.threads)

    def _with_rows(self, part: str, rows: Array) -> Array:
        """Projected keys or values, then those that are not in the input."""
        if self.sizes.attended == self.sizes.sources:
            return rows
        whole = np.zeros((len(rows), self.sizes.attended, rows.shape[-1]), np.float32)
        whole[:, : self.sizes.sources] = rows
        if self.sizes.biased:
            whole[:, self.sizes.sources] = self.slots[f"{part}_attn_bias"].bias()
        return whole

    def _split(self, array: Array) -> Array:
        """[N, length, heads * width] as [N, heads, length, width]."""
        batch, length, _ = array.shape
        split: Array = array.reshape(batch, length, self.sizes.heads, -1).swapaxes(1, 2)
        return split

    def _dropped(self, attention: Array, seed: int) -> Array:
        """Attention after dropout; or, from its gradient after dropout, that before it."""
        if not self.rate:
            return attention
        return dropout(attention, self.rate, seed=seed, num_threads=self.threads)

    # ---- backward ---------------------------------------------------------------------------------------------------

    def apply_backward(self, given: Given) -> None:
        batch = _filter.checked_batch(given["batch_size"])
        kept = _arrays.Cache(self.sizes, batch, self.rate)
        if _answered(given, workspace=0):
            return
        self._check_float32()
        wanted = self._wanted(batch, given)
        dy = self._incoming(batch, given["output_param_delta"])
        masks = _arrays.masks_of(self.sizes, batch, given)
        samples = self._samples(batch, given, [part for part in _INPUTS if given[part] is not None])
        cache, cache_size = given["backprop_cache"], given["backprop_cache_size"]
        memory = None
        if cache is not None and as_size("backprop_cache_size", cache_size) > 0:
            memory = sized_bytes("backprop_cache", cache, "backprop_cache_size", cache_size, kept.size)
            check_disjoint({"backprop_cache": memory}, {name: result.array for name, result in wanted.items()})
        elif self.rate:
            raise Invalid("there is no backprop_cache, which holds the mask of dropout")
        for part in _INPUTS:
            weights = f"{part}_param_delta.weights"
            if part not in samples and wanted and (memory is None or weights in wanted):
                by = "the forward pass is recomputed from it" if memory is None else f"{weights} is computed from it"
                raise Invalid(f"{part} is NULL, and {by}")
        if not wanted:
            return
        done = None if memory is None else kept.read(memory)
        masks = masks.values()
        ignored = masks.keys if done is None else done.ignored
        arrays = {part: self._matrices(part, array, ignored) for part, array in samples.items()}
        if done is None:
            done = self._attend(arrays, masks, 0)
        computed = self._gradients(done, arrays, dy, set(wanted))
        _layer.put_sums([(result, computed[name]) for name, result in wanted.items()])

    def _check_float32(self) -> None:
        named = {f"{part}.target_desc": geometry for part, geometry in self.targets.items()}
        named.update((one.name, one.geometry) for one in self._parameters())
        for name, geometry in named.items():
            if geometry.dtype != FLOAT32:
                raise Unsupported(f"{name} of this filter has type {geometry.dtype}; backward needs Float32")

    def _wanted(self, batch: int, arguments: Given) -> dict[str, Result]:
        """The gradients to produce, by Apple's names, with the axes of a linear layer's."""
        wanted: dict[str, Result] = {}
        for part in _WEIGHTS:
            owner = f"{part}_param_delta"
            given = arguments[owner]
            if given is None:
                continue
            if not isinstance(given, BNNSMHAProjectionParameters):
                raise Invalid(f"{owner} is of type {type(given).__name__}, must be BNNSMHAProjectionParameters")
            if part != "output" and given.target_desc.data is not None:
                name, descriptor = f"{owner}.target_desc", given.target_desc
                length, width = shape_rows_first(self.targets[part])
                geometry, stride = _matrix_delta(name, descriptor, {"length": length, "width": width})
                if batch > 1 and 0 < stride < geometry.span:
                    raise Invalid(f"{name}.stride[2] is {stride}, but a sample spans {geometry.span} values")
                array = _filter.target_samples(name, geometry, descriptor.data, batch, stride, ".data")
                wanted[name] = Result(name, descriptor, _layer.rows_first(array, geometry.layout))
            for field in ("weights", "bias"):
                descriptor = getattr(given, field)
                if descriptor.data is not None:
                    name = f"{owner}.{field}"
                    wanted[name] = self.slots[f"{part}.{field}"].delta(name, descriptor)
        for part in ("key", "value"):
            name = f"{part}_attn_bias_delta"
            if arguments[name] is not None:
                if not self.sizes.biased:
                    raise Invalid(f"{name} is given, but {part}_attn_bias.data was NULL")
                wanted[name] = self.slots[f"{part}_attn_bias"].delta(name, arguments[name])
        _check_results(wanted.values())
        return wanted

    def _incoming(self, batch: int, given: BNNSMHAProjectionParameters | None) -> Array:
        """The gradient of the output, [N, T, d_model]."""
        if given is None:
            raise Invalid("output_param_delta is NULL")
        name, descriptor = "output_param_delta.target_desc", given.target_desc
        axes = {"target_length": self.sizes.targets, "d_model": self.sizes.d_model}
        geometry, stride = _matrix_delta(name, descriptor, axes)
        array = _filter.source_samples(name, geometry, descriptor.data, batch, stride, ".data")
        return _layer.rows_first(_filter.in_shape(array, array.shape), geometry.layout)

    def _gradients(
        self, done: _arrays.Pass, arrays: Mapping[str, Array], dy: Array, wanted: set[str]
    ) -> dict[str, Array]:
        """All wanted gradients, those of parameters as of a linear layer's."""
        threads, sources = self.threads, self.sizes.sources
        parts = {part for part in _INPUTS if any(name.startswith(f"{part}_") for name in wanted)}
        fields = {"output_param_delta.target_desc"} if parts else set()
        computed = self._projection_gradients("output", dy, done.joined, wanted | fields)
        if not parts:
            return computed
        dheads = self._split(computed.pop("output_param_delta.target_desc"))
        rows: dict[str, Array] = {}  # gradients of projected inputs, [N, heads, length, width]
        with np.errstate(all="ignore"):
            if "value" in parts:
                dropped = self._dropped(done.attention, done.seed)
                rows["value"] = products(dropped.swapaxes(-1, -2), dheads, threads)
            if "query" in parts or "key" in parts:
                da = self._dropped(products(dheads, self._split(done.v).swapaxes(-1, -2), threads), done.seed)
                # dS = A (dA - sum(A dA)): 0 where there is no attention.
                da -= np.sum(da * done.attention, axis=-1, keepdims=True, dtype=np.float64).astype(np.float32)
                da *= done.attention
                if "query" in parts:
                    rows["query"] = products(da, self._split(done.k), threads)
                    rows["query"] *= np.float32(1 / math.sqrt(self.sizes.d_key))
                if "key" in parts:
                    rows["key"] = products(da.swapaxes(-1, -2), self._split(done.q), threads)
            for part, gradient in rows.items():
                if f"{part}_attn_bias_delta" in wanted:
                    bias = gradient[:, :, sources].sum(axis=0, dtype=np.float64)
                    computed[f"{part}_attn_bias_delta"] = bias.astype(np.float32)
                length = self.sizes.targets if part == "query" else sources
                joined = _joined(gradient[:, :, :length])
                computed.update(self._projection_gradients(part, joined, arrays.get(part), wanted))
        return computed

    def _projection_gradients(self, part: str, g: Array, x: Array | None, wanted: set[str]) -> dict[str, Array]:
        """The gradients of a projection's input and parameters, of those that are wanted."""
        names = {"dx": "target_desc", "dw": "weights", "db": "bias"}
        names = {key: f"{part}_param_delta.{field}" for key, field in names.items()}
        need = [key for key, name in names.items() if name in wanted]
        if not need:
            return {}
        w = self.slots[f"{part}.weights"].weights()
        if x is None:  # only dw is computed from it
            x = np.zeros((*g.shape[:-1], w.shape[1]), np.float32)
        gradients = linear_backward(g, x, w, need=need, num_threads=self.threads)
        return {names[key]: getattr(gradients, key) for key in need}


# ---- arrays ---------------------------------------------------------------------------------------------------------


def _mask(scores: Array, masks: _arrays.Masks) -> None:
    """Apply the masks to scores [N, heads, T, S], in place."""
    for mask in (masks.added, None if masks.keys is None else masks.keys[:, None, None]):
        if mask is not None and mask.dtype == np.bool_:
            np.copyto(scores, np.float32(-np.inf), where=mask)
        elif mask is not None:
            scores += mask


def _softmax(scores: Array) -> None:
    """Softmax over the last axis, in place. Where all scores are -inf, all weights are 0."""
    largest = scores.max(axis=-1, keepdims=True)
    largest[np.isneginf(largest)] = 0
    scores -= largest
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True, dtype=np.float64)
    total[total == 0] = 1
    scores /= total.astype(np.float32)


def _joined(array: Array) -> Array:
    """[N, heads, length, width] as [N, length, heads * width]."""
    batch, _, length, _ = array.shape
    joined: Array = np.ascontiguousarray(array.swapaxes(1, 2)).reshape(batch, length, -1)
    return joined


# ---- descriptors ----------------------------------------------------------------------------------------------------


def _matrix_delta(name: str, descriptor: BNNSNDArrayDescriptor, axes: dict[str, int]) -> tuple[Geometry, int]:
    """The geometry of a gradient of matrices, and the stride of its batch, which is ``stride[2]``."""
    geometry = _layer.float32_delta(name, _arrays.layout_checked(name, descriptor, _arrays.MATRICES))
    _arrays.check_axes(name, geometry, axes)
    return geometry, as_size(f"{name}.stride[2]", descriptor.stride[2])


def _check_results(wanted: Iterable[Result]) -> None:
    """Raise if gradients overlap, unless they are those of two inputs in one array, which receives the sum."""
    apart: list[Result] = []
    for result in wanted:
        inputs = [one for one in apart if one.name.endswith("target_desc") and result.name.endswith("target_desc")]
        if not any(_layer.are_one(result, other) for other in inputs):
            apart.append(result)
    _layer.check_apart(apart)


def _answered(given: Given, **sizes: int) -> bool:
    """Whether a call asks for sizes of buffers: a pointer to a size without a buffer. Writes them."""
    asked = []
    for name, size in sizes.items():
        pointer = given[f"{name}_size"]
        if pointer is None:
            continue
        if not isinstance(pointer, list) or not pointer:
            raise Invalid(f"{name}_size is {pointer!r}, must be a list with one size, such as [0]")
        if given[name] is None:
            asked.append((pointer, size))
    for pointer, size in asked:
        pointer[0] = size
    return bool(asked)


# ---- Apple's functions ----------------------------------------------------------------------------------------------

_OTHERWISE: Final = "filter is not a multihead attention filter"
_DESCRIPTORS: Final = ("key_mask", "add_to_attention", "key_attn_bias_delta", "value_attn_bias_delta")
_TYPES: Final = {
    "F": BNNSFilter | None,
    "batch_size": int,
    **dict.fromkeys(_DESCRIPTORS, BNNSNDArrayDescriptor | None),
    **dict.fromkeys((f"{part}_param_delta" for part in _WEIGHTS), BNNSMHAProjectionParameters | None),
    "workspace_size": list[int] | None,
}


@creates(AttentionFilter, BNNSLayerParametersMultiheadAttention)
def BNNSFilterCreateLayerMultiheadAttention() -> None:
    """Create a filter of a multihead attention. None on failure."""


@takes(
    "F batch_size query+ key+ key_mask+ value+ output+ add_to_attention=None backprop_cache_size=None "
    "backprop_cache=None workspace_size=None workspace=None",
    {**_TYPES, "backprop_cache_size": list[int] | None},
)
def BNNSApplyMultiheadAttention(given: Given) -> None:
    """Apply a multihead attention to a batch. 0, or -1 on failure.

    A pointer to a size is a list with one entry. If it is given without its buffer, the call writes the size of the
    buffer to that entry and computes nothing. The backprop cache is any writable buffer, at any alignment; it is filled
    for backward. The workspace is not used.
    """
    _filter.checked_filter(AttentionFilter, given["F"], _OTHERWISE).apply(given)


@takes(
    "F batch_size query+ query_param_delta key+ key_mask+ key_param_delta value+ value_param_delta add_to_attention "
    "key_attn_bias_delta value_attn_bias_delta output+ output_param_delta backprop_cache_size=0 backprop_cache=None "
    "workspace_size=None workspace=None",
    {**_TYPES, "backprop_cache_size": int},
)
def BNNSApplyMultiheadAttentionBackward(given: Given) -> None:
    """Compute the gradients of a multihead attention, those whose ``data`` is not None. 0, or -1 on failure.

    ``output_param_delta.target_desc`` holds the incoming gradient. Inputs that share a gradient's memory receive the
    sum. Without a cache the forward pass is recomputed, except with dropout, whose mask is in the cache. With a cache
    the masks are those of the forward pass. `output` is not used.
    """
    _filter.checked_filter(AttentionFilter, given["F"], _OTHERWISE).apply_backward(given)
