"""BNNS multihead attention: layouts, strides, memory that is shared, and the backprop cache."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from retrograd import bnns
from support.arrays import assert_same_bits
from support.bnns import Allocator, fails
from support.bnns_attention import (
    BACKWARD_STAGES,
    CLIENT,
    COLUMN,
    DHK,
    FIRST2,
    FIRST3,
    FIRST4,
    FORWARD_STAGES,
    INPUTS,
    LAST2,
    LAST3,
    LAST4,
    ROW,
    Layer,
    Sizes,
    Stored,
    assert_close,
    assert_gradients,
    masks,
)

SELF = Sizes(targets=5, d_model=7, k_dim=7, v_dim=7)  # query, key and value of one shape


def views(deltas: dict[str, Stored]) -> list[Any]:
    return [delta.view for delta in deltas.values()]


def every_gradient(layer: Layer, cache: Any = None, **given: Any) -> dict[str, Stored]:
    deltas = layer.deltas()
    assert layer.backward(deltas, cache, **given) == 0, bnns.last_error()
    return deltas


# ---- layouts and strides ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layouts",
    [
        {"target_desc": COLUMN, "weights": FIRST3, "bias": FIRST2, "wo": COLUMN},
        {"target_desc": FIRST2, "weights": LAST3, "bias": ROW, "wo": FIRST2},
        {"target_desc": LAST2, "weights": DHK, "bias": COLUMN, "wo": LAST2},
        {"query": COLUMN, "key": FIRST2, "value": ROW, "output": LAST2, "wq": FIRST3, "wk": LAST3, "bk": ROW},
    ],
)
def test_layouts_of_an_attention(layouts: dict[str, int]) -> None:
    """The same bits in every layout: rows are those of a matrix, and other axes go by ``size``."""
    plain, layer = (Layer(rows=True, layouts=one) for one in (None, layouts))
    caches = plain.run(), layer.run()
    np.testing.assert_array_equal(layer.output.view, plain.output.view)
    assert caches[0] == caches[1]
    deltas = [every_gradient(one, cache) for one, cache in zip((plain, layer), caches, strict=True)]
    assert_same_bits(views(deltas[1]), views(deltas[0]))


def test_gradients_in_a_layout_of_their_own() -> None:
    layer = Layer(rows=True)
    expected = every_gradient(layer)
    others = {DHK: FIRST3, ROW: LAST2, LAST2: ROW, bnns.BNNSDataLayoutVector: bnns.BNNSDataLayoutVector}
    deltas = {
        name: Stored(one.view, others[one.descriptor.layout], batched=name in INPUTS) for name, one in expected.items()
    }
    for delta in deltas.values():
        delta.view[...] = -99
    assert layer.backward(deltas) == 0, bnns.last_error()
    assert_same_bits(views(deltas), views(expected))


@pytest.mark.parametrize(("rank", "layouts"), [(2, (ROW, COLUMN, LAST2)), (3, (FIRST3,)), (4, (LAST4,))])
def test_layouts_of_what_is_added(rank: int, layouts: tuple[int, ...]) -> None:
    layer = Layer()
    given, oracle = masks(layer.sizes, False, str(rank))
    layer.run(**given)
    expected = layer.output.view.copy()
    assert given["added"].layout in (FIRST2, LAST3, FIRST4)
    for layout in layouts:
        layer.run(added=Stored(oracle["added"], layout).descriptor)
        np.testing.assert_array_equal(layer.output.view, expected)


def test_batch_strides_and_gaps_between_elements() -> None:
    plain, layer = Layer(), Layer(gap=3)
    deltas = every_gradient(plain, plain.run())
    strided = layer.deltas()
    for name in ("wq", "bk", "query"):  # every second element
        strided[name] = Stored(strided[name].view.copy(), layer.layout(name), batched=name == "query", inner=2, gap=5)
    assert layer.backward(strided, layer.run()) == 0, bnns.last_error()
    np.testing.assert_array_equal(layer.output.view, plain.output.view)
    assert_same_bits(views(strided), views(deltas))
    for one in (layer.output, *strided.values()):  # and nothing between them is touched
        one.view[...] = 77
        assert (one.memory == 77).all()
    # A batch stride of 0 is packed.
    packed = plain.deltas()
    arguments = {f"{name}_stride": 0 for name in (*INPUTS, "output")}
    expected = plain.output.view.copy()
    plain.output.view[...] = 0
    assert plain.forward(**arguments) == 0, bnns.last_error()
    np.testing.assert_array_equal(plain.output.view, expected)
    given = {f"{name}_param_delta": plain.projection_delta(name, packed) for name in (*INPUTS, "output")}
    for projection in given.values():
        projection.target_desc.stride[2] = 0
    assert plain.backward(packed, **arguments, **given) == 0, bnns.last_error()
    assert_same_bits(views(packed), views(deltas))


def test_other_types_run_forward() -> None:
    for dtype, ulp in ((np.float16, 2.0**-11), (ml_dtypes.bfloat16, 2.0**-8)):
        layer = Layer(rows=True, dtype=dtype)
        assert layer.forward() == 0, bnns.last_error()
        expected = layer.expected()
        np.testing.assert_allclose(
            layer.output.view.astype(np.float64), expected, rtol=ulp, atol=3e-5 * np.abs(expected).max()
        )
        fails(layer.backward({}), "query.target_desc of this filter has type")
        added = np.zeros((layer.sizes.targets, layer.sizes.sources), dtype)
        added[:, 2] = 1.5
        assert layer.forward(added=Stored(added, FIRST2).descriptor) == 0, bnns.last_error()
        expected = layer.expected(added=added.astype(np.float32))
        np.testing.assert_allclose(
            layer.output.view.astype(np.float64), expected, rtol=ulp, atol=3e-5 * np.abs(expected).max()
        )


def test_attention_weights_are_copied_unless_the_client_keeps_them() -> None:
    for parameters, follows in ((CLIENT, True), (None, False)):
        layer = Layer(rows=True, parameters=parameters)
        layer.forward()
        before, expected = layer.output.view.copy(), {}
        for name, one in layer.parameters.items():
            expected[name] = one.view.copy()
            one.view[...] *= 1.5
        assert layer.forward() == 0
        if follows:
            assert_close(layer.output.view, layer.expected(), FORWARD_STAGES)
            assert not np.allclose(layer.output.view, before)
        else:
            np.testing.assert_array_equal(layer.output.view, before)
            for name, value in expected.items():
                layer.parameters[name].view[...] = value
            assert_gradients(every_gradient(layer), layer.expected_gradients())


def test_an_attention_takes_memory_from_the_clients_allocator() -> None:
    allocator = Allocator()
    layer = Layer(rows=True, parameters=allocator.parameters())
    assert allocator.live == len(layer.parameters)
    assert layer.forward() == 0
    bnns.BNNSFilterDestroy(layer.filter)
    assert allocator.live == 0
    fails(layer.forward(), "has been destroyed")


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_each_gradient_alone() -> None:
    """What is NULL is not produced, and the others have the same bits without it."""
    layer = Layer(rows=True, zero=True)
    cache = layer.run()
    expected = every_gradient(layer, cache)
    for name, one in expected.items():
        for kept in (cache, None):
            deltas = {name: layer.deltas()[name]}
            assert layer.backward(deltas, kept) == 0, bnns.last_error()
            assert_same_bits(views(deltas), [one.view])
    assert layer.backward({}, cache) == 0
    nothing = {f"{part}_param_delta": None for part in INPUTS}
    assert layer.backward({}, **nothing) == 0


def test_with_a_cache_only_weights_need_the_inputs() -> None:
    layer = Layer(rows=True)
    cache = layer.run()
    expected = every_gradient(layer, cache)
    names = ("query", "key", "value", "wo", "bq", "bk", "bv", "bo", "row_k", "row_v")
    deltas = {name: layer.deltas()[name] for name in names}
    absent = dict.fromkeys((*INPUTS, "output"))
    assert layer.backward(deltas, cache, **absent) == 0, bnns.last_error()
    assert_same_bits(views(deltas), [expected[name].view for name in names])
    for part, letter in zip(INPUTS, "qkv", strict=True):
        assert layer.backward({f"w{letter}": layer.deltas()[f"w{letter}"]}, cache, **{part: None}) == -1
        wanted = f"{part} is NULL, and {part}_param_delta.weights is computed from it"
        assert wanted in (bnns.last_error() or "")
        assert layer.backward({"bo": layer.deltas()["bo"]}, None, **{part: None}) == -1
        assert f"{part} is NULL, and the forward pass is recomputed from it" in (bnns.last_error() or "")


def test_attention_gradients_are_set_or_accumulated_by_their_flags() -> None:
    layer = Layer(rows=True)
    cache = layer.run()
    expected = every_gradient(layer, cache)
    sets, adds = layer.deltas(fill=3.0), layer.deltas(fill=3.0, flags=1)
    for odd in (0, 1):
        deltas = {name: (adds if k % 2 == odd else sets)[name] for k, name in enumerate(expected)}
        assert layer.backward(deltas, cache) == 0, bnns.last_error()
    for name, one in expected.items():
        np.testing.assert_array_equal(sets[name].view, one.view)
        np.testing.assert_array_equal(adds[name].view, one.view + np.float32(3))


@pytest.mark.parametrize("shared", [("query", "key"), ("key", "value"), ("query", "value"), INPUTS])
@pytest.mark.parametrize("flags", [0, 1])
def test_inputs_that_share_a_gradient_receive_the_sum(shared: tuple[str, ...], flags: int) -> None:
    layer = Layer(SELF)
    for name in shared[1:]:
        layer.inputs[name] = layer.inputs[shared[0]]
    cache = layer.run()
    expected = every_gradient(layer, cache)
    deltas = layer.deltas(flags=flags, fill=2.0)
    for name in shared[1:]:
        deltas[name] = deltas[shared[0]]
    assert layer.backward(deltas, cache) == 0, bnns.last_error()
    total = sum(expected[name].view for name in shared)
    assert_close(deltas[shared[0]].view, total + 2 * flags, 1)
    for name in set(expected) - set(shared):
        np.testing.assert_array_equal(deltas[name].view, expected[name].view + 2 * flags)
    # Against the oracle, as the gradient of one array that is used several times.
    oracle = layer.expected_gradients()
    assert_close(deltas[shared[0]].view - 2 * flags, sum(oracle[name] for name in shared), BACKWARD_STAGES)


def test_gradients_that_overlap_otherwise_are_refused() -> None:
    layer = Layer(SELF, rows=True)
    cache = layer.run()
    whole = np.full(200, 5, np.float32)

    def refused(reason: str, **names: Any) -> None:
        deltas = layer.deltas() | names
        before = [one.memory.copy() for one in deltas.values()]
        fails(layer.backward(deltas, cache), reason)
        assert_same_bits([one.memory for one in deltas.values()], before)

    def moved(name: str, memory: Any, **fields: Any) -> Stored:
        one = layer.deltas(**fields)[name]
        one.memory = one.descriptor.data = memory
        return one

    target = "{}_param_delta.{} overlaps {}_param_delta.{} in memory"
    refused(
        target.format("key", "target_desc", "query", "target_desc"),
        query=moved("query", whole),
        key=moved("key", whole[1:]),
    )
    refused(
        target.format("value", "target_desc", "query", "target_desc"),
        query=moved("query", whole),
        value=moved("value", whole, flags=1),
    )
    refused(target.format("query", "weights", "key", "weights"), wq=moved("wq", whole), wk=moved("wk", whole))
    refused(
        target.format("query", "target_desc", "key", "bias"), query=moved("query", whole), bk=moved("bk", whole[30:])
    )
    refused(
        "key_attn_bias_delta overlaps value_attn_bias_delta", row_k=moved("row_k", whole), row_v=moved("row_v", whole)
    )
    memory = np.frombuffer(cache, np.float32, 200, offset=8)
    refused("backprop_cache overlaps query_param_delta.weights in memory", wq=moved("wq", memory))


def test_gradients_in_the_memory_of_what_a_call_reads() -> None:
    """All of them are computed before the first is written."""
    sizes = Sizes(targets=5, d_model=11, k_dim=11, v_dim=11)
    for place in ("query", "key", "value", "dy", "wq"):
        layer = Layer(sizes)
        expected = every_gradient(layer)
        deltas = layer.deltas()
        name = "wk" if place == "wq" else "value"
        source = layer.dy if place == "dy" else (layer.inputs | layer.parameters)[place]
        one = Stored(source.view, source.descriptor.layout, batched=name == "value")
        one.memory, one.view = source.memory, source.view
        one.descriptor.data = source.memory
        deltas[name] = one
        assert layer.backward(deltas) == 0, bnns.last_error()
        assert_same_bits(views(deltas), [expected[key].view for key in deltas])


def test_an_output_in_the_memory_of_an_input() -> None:
    sizes = Sizes(targets=5, d_model=11, k_dim=11, v_dim=11)
    layer = Layer(sizes)
    layer.forward()
    expected = layer.output.view.copy()
    for name in INPUTS:
        source = layer.inputs[name]
        kept = source.memory.copy()
        assert layer.forward(output=source.memory) == 0, bnns.last_error()
        np.testing.assert_array_equal(source.view, expected)
        source.memory[...] = kept


# ---- the cache and sizes ---------------------------------------------------------------------------------------------


def test_size_queries_compute_nothing() -> None:
    layer = Layer(rows=True)
    cache_size, workspace_size = [-1], [-1]
    assert layer.forward(backprop_cache_size=cache_size, workspace_size=workspace_size) == 0, bnns.last_error()
    assert (layer.output.view == -99).all()
    assert cache_size[0] > 0
    assert workspace_size == [0]  # none is used
    only = [-1]
    assert layer.forward(workspace_size=only) == 0
    assert only == [0]
    assert (layer.output.view == -99).all()
    # Of either of them the query comes first, whatever the other is.
    cache = bytearray(cache_size[0])
    assert layer.forward(cache, workspace_size=only) == 0
    assert not any(cache)
    assert layer.forward(backprop_cache_size=cache_size, workspace_size=[0], workspace=bytearray(4)) == 0
    assert (layer.output.view == -99).all()
    deltas = layer.deltas()
    assert layer.backward(deltas, workspace_size=only) == 0
    assert only == [0]
    assert all((one.memory == -99).all() for one in deltas.values())
    # With its buffer, a workspace is accepted and not used, also where Apple's call refuses the size that it reports.
    workspace = bytearray(16)
    assert layer.forward(cache, workspace_size=[16], workspace=workspace) == 0, bnns.last_error()
    assert (layer.output.view != -99).any()
    assert layer.backward(deltas, cache, workspace_size=[0], workspace=workspace) == 0, bnns.last_error()
    assert not any(workspace)
    assert_gradients(deltas, layer.expected_gradients())
    # The size is that of the batch.
    sizes = []
    for batch in (1, 2, 5):
        size = [0]
        assert layer.forward(batch_size=batch, backprop_cache_size=size) == 0
        sizes.append(size[0])
    assert sizes[2] - sizes[1] == 3 * (sizes[1] - sizes[0])


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_a_cache_of_the_queried_size_at_any_address(shift: int) -> None:
    layer = Layer(rows=True, zero=True, dropout=0.2, seed=1)
    memory = np.full(layer.capacity() + 16, 0xA5, np.uint8)
    cache = memory[8 + shift : 8 + shift + layer.capacity()]
    assert layer.forward(cache) == 0, bnns.last_error()
    assert (memory[: 8 + shift] == 0xA5).all()
    assert (memory[8 + shift + layer.capacity() :] == 0xA5).all()
    assert_gradients(every_gradient(layer, cache), layer.expected_gradients(cache))
    readonly = bytes(cache)
    deltas = layer.deltas()
    assert layer.backward(deltas, readonly) == 0, bnns.last_error()
    fails(layer.forward(readonly), "backprop_cache is read-only")
    # A larger one will do, and so will a size that is smaller than the buffer.
    assert layer.forward(memory, backprop_cache_size=[layer.capacity() + 1]) == 0, bnns.last_error()
    assert layer.backward(layer.deltas(), memory, backprop_cache_size=layer.capacity()) == 0, bnns.last_error()


def test_a_cache_that_is_too_small() -> None:
    layer = Layer()
    capacity = layer.capacity()
    short = f"backprop_cache_size is {capacity - 1}, but this layer needs {capacity}"
    claimed = f"backprop_cache_size is {capacity}, but the buffer has {capacity - 1} bytes"
    for cache, size, reason in (
        (bytearray(capacity - 1), capacity - 1, short),
        (bytearray(capacity), capacity - 1, short),
        (bytearray(capacity - 1), capacity, claimed),
    ):
        deltas = layer.deltas()
        for status in (
            layer.forward(cache, backprop_cache_size=[size]),
            layer.backward(deltas, cache, backprop_cache_size=size),
        ):
            fails(status, reason)
        assert not any(cache)
        assert (layer.output.view == -99).all()
        assert all((one.memory == -99).all() for one in deltas.values())
    assert layer.forward(bytearray(capacity), backprop_cache_size=None) == -1
    assert "backprop_cache is given, but backprop_cache_size is NULL" in (bnns.last_error() or "")
    # As the header says of backward, a size of 0 means that there is none.
    assert layer.backward(layer.deltas(), bytearray(4), backprop_cache_size=0) == 0, bnns.last_error()


def test_a_damaged_cache_is_refused() -> None:
    layer = Layer(Sizes(1, 2, 3, 2, 2, 2, 1, 2, 2), rows=True, dropout=0.5, seed=2)
    cache = layer.run(key_mask=masks(layer.sizes, True, None)[0]["key_mask"])
    deltas = layer.deltas()
    for position in range(len(cache)):
        cache[position] ^= 1 << position % 8
        assert layer.backward(deltas, cache) == -1, position
        assert "backprop_cache" in (bnns.last_error() or "")
        cache[position] ^= 1 << position % 8
    assert all((one.memory == -99).all() for one in deltas.values())
    assert layer.backward(deltas, cache) == 0, bnns.last_error()
    assert layer.backward(deltas, bytearray(len(cache))) == -1


def test_a_cache_of_another_layer_is_refused() -> None:
    layer = Layer(Sizes(2, 3, 5, 7, 7, 7, 2, 3, 3))
    cache = layer.run()
    deltas = layer.deltas()
    others = {
        "heads": Layer(Sizes(2, 3, 5, 7, 7, 7, 3, 2, 2)),
        "dropout": Layer(Sizes(2, 3, 5, 7, 7, 7, 2, 3, 3), dropout=0.5),
        "extra rows": Layer(Sizes(2, 3, 4, 7, 7, 7, 2, 3, 3), rows=True),
        "lengths": Layer(Sizes(2, 5, 3, 7, 7, 7, 2, 3, 3)),
    }
    for name, other in others.items():
        foreign = other.run()
        # Made as long as this layer needs.
        padded = bytearray(foreign) + bytearray(max(0, len(cache) - len(foreign)))
        assert layer.backward(deltas, padded) == -1, name
        assert "backprop_cache" in (bnns.last_error() or "")
    same_size = Layer(Sizes(2, 3, 5, 7, 7, 7, 2, 3, 3), dropout=0.5)
    fails(layer.backward(deltas, same_size.run()), "was filled by a filter with other sizes or dropout")
    # Another batch size.
    assert layer.backward(deltas, cache, batch_size=1) == -1
    assert all((one.memory == -99).all() for one in deltas.values())


def test_with_a_cache_the_masks_are_those_of_forward() -> None:
    layer = Layer()
    given, oracle = masks(layer.sizes, True, "3")
    cache = layer.run(**given)
    expected = every_gradient(layer, cache, **given)
    assert_gradients(expected, layer.expected_gradients(**oracle))
    others, _ = masks(layer.sizes, True, "2", draw=9)
    for masking in ({}, others):
        assert_same_bits(views(every_gradient(layer, cache, **masking)), views(expected))


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_the_same_bits_at_any_number_of_threads() -> None:
    sizes = Sizes(3, 37, 41, 48, 40, 44, 4, 12, 16)
    found = []
    for threads in (1, 2, 3):
        parameters = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr, n_threads=threads)
        layer = Layer(sizes, rows=True, dropout=0.1, seed=1, parameters=parameters)
        cache = layer.run()
        found.append([layer.output.view.copy(), *views(every_gradient(layer, cache))])
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_several_threads_share_an_attention() -> None:
    layer = Layer(Sizes(4, 17, 19, 16, 16, 16, 2, 8, 8), rows=True)
    layer.forward()
    expected = layer.output.view.copy()
    gradients = every_gradient(layer)
    failures: list[str] = []

    def work() -> None:
        output = np.zeros_like(layer.output.memory)
        deltas = layer.deltas()
        cache = bytearray(layer.capacity())
        for _ in range(5):
            statuses = layer.forward(cache, output=output), layer.backward(deltas, cache)
            if statuses != (0, 0) or not np.array_equal(output.reshape(expected.shape), expected):
                failures.append(str(bnns.last_error()))
            if not all(np.array_equal(deltas[name].view, one.view) for name, one in gradients.items()):
                failures.append("other gradients")

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
