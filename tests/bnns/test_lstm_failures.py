"""Apple's BNNS LSTM: overlaps, calls that must fail, and changes after a first call."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNSLayerParametersLSTM, BNNSNDArrayDescriptor
from support.arrays import Array
from support.bnns_lstm import (
    BIDIRECTIONAL,
    GATES,
    ROLES,
    SIZES,
    SNE,
    Layer,
    activation_of,
    backward,
    describe,
    every_descriptor,
    forward,
    nan,
    result_names,
    spread,
    untouched,
)

# ---- states in place, overlaps (10) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0, 3])
def test_final_states_in_the_place_of_initial_ones(gap: int) -> None:
    """Streaming: pieces of a sequence one after the other, and backward of the last piece from its cache."""
    layer = Layer(layers=2, directions=2)
    source, target = layer.params.input_descriptor, layer.params.output_descriptor
    made = []
    for name, array in (("hidden_desc", layer.values.h0), ("cell_state_desc", layer.values.c0)):
        assert array is not None
        made.append(spread(array, (0, 0, gap, gap)))
        setattr(source, name, made[-1][0])
        setattr(target, name, made[-1][0])
    cache = layer.cache()
    for _ in range(3):
        expected, gradients = layer.expected_forward(), layer.expected_backward()
        assert layer.forward(cache) == 0, bnns.last_error()
        assert np.array_equal(layer.values.y, expected.y)  # type: ignore[arg-type]
        for (_, read, _), state, own in zip(
            made, (expected.hn, expected.cn), (layer.values.h0, layer.values.c0), strict=True
        ):
            assert np.array_equal(read(), state.reshape(2, 2, 2, 4))
            own[...] = read()  # type: ignore[index]
    assert layer.backward(cache) == 0
    layer.check_gradients(gradients)


def test_overlapping_outputs_are_refused() -> None:
    layer = Layer(inputs=4)
    v, target = layer.values, layer.params.output_descriptor
    cache = layer.cache()
    weights = [a for gate in v.gates for a in gate.values() if a is not None]
    pool = np.zeros(64, np.float32)
    cases: list[tuple[str, Array]] = [("data_desc", v.x)]  # type: ignore[list-item]
    cases += [("hidden_desc", v.c0), ("cell_state_desc", v.h0), ("hidden_desc", v.cn)]  # type: ignore[list-item]
    cases += [("hidden_desc", w.reshape(-1)[:8].reshape(1, 1, 2, 4)) for w in weights if w.size >= 8]
    for name, memory in cases:
        kept = getattr(target, name).copy()
        setattr(target, name, describe(memory, SNE if name == "data_desc" else None))
        assert "overlaps" in untouched(layer, lambda: layer.forward(cache), cache)
        setattr(target, name, kept)
    # In part, where the whole would be allowed.
    layer.params.input_descriptor.hidden_desc = describe(pool[:8].reshape(1, 1, 2, 4))
    target.hidden_desc = describe(pool[4:12].reshape(1, 1, 2, 4))
    assert "overlaps" in untouched(layer, lambda: layer.forward(cache), cache, pool)
    target.hidden_desc = describe(pool[:8].reshape(1, 1, 2, 4))
    assert layer.forward(cache) == 0


def test_overlapping_outputs_that_go_by_way_of_temporaries_are_refused() -> None:
    """Directions that lie apart: the engine does not see these places."""
    layer = Layer(layers=2, directions=2, batch_sizes=[2, 2, 1])
    target, cache = layer.params.output_descriptor, layer.cache()
    extents, strides = (4, 2, 2, 2), (1, 4, 12, 40)
    hn, pool = (BNNSNDArrayDescriptor(0, bnns.BNNSDataLayout4DLastMajor, extents, strides) for _ in range(2))
    hn.data_type = pool.data_type = bnns.BNNSDataTypeFloat32
    memory = np.zeros(200, np.float32)
    hn.data, pool.data = memory[:60], memory[40:100]
    target.hidden_desc, target.cell_state_desc = hn, pool
    assert "overlaps" in untouched(layer, lambda: layer.forward(cache), cache, memory)
    target.cell_state_desc.data = memory[100:160]
    assert layer.forward(cache) == 0
    sizes = np.array([2, 2, 1], np.uint32)
    memory[:3] = sizes.view(np.float32)
    layer.params.sequence_descriptor.data = memory[:3].view(np.uint32)
    assert "overlaps sequence_descriptor" in untouched(layer, lambda: layer.forward(cache), cache, memory)


def test_overlapping_gradients_are_refused() -> None:
    layer = Layer(inputs=4)
    cache = layer.run()
    source = layer.deltas.input_descriptor
    v = layer.values
    arrays = [v.h0, v.c0, layer.dhn, layer.dcn, layer.gradients.c0]
    arrays += [gate["hw"].reshape(-1)[:8].reshape(1, 1, 2, 4) for gate in v.gates]  # type: ignore[union-attr]
    for memory in arrays:
        kept = source.hidden_desc.copy()
        source.hidden_desc = describe(memory)
        assert "overlaps" in untouched(layer, lambda: layer.backward(cache), cache)
        untouched(layer, layer.backward)
        source.hidden_desc = kept
    untouched(layer, lambda: backward(layer.params, layer.params, None, cache, len(cache)), cache)


def test_interleaved_arrays_do_not_overlap() -> None:
    """The gates' weights as one array [H][4]...: each has the memory between the others'."""
    layer = Layer()
    for params, v in ((layer.params, layer.values), (layer.deltas, layer.gradients)):
        for field, name in (("hw", "hw_desc"), ("b", "b_desc")):
            shape = v.gates[0][field].shape  # type: ignore[union-attr]
            pool = np.empty((*shape, 4), np.float32)
            for k, (arrays, gate) in enumerate(zip(v.gates, GATES, strict=True)):
                pool[..., k] = arrays[field]
                strides = [step // 4 for step in reversed(pool.strides[:-1])]
                desc = describe(pool[..., k])
                assert desc.geometry().strides == tuple(strides)
                setattr(getattr(params, gate), name, desc)
                arrays[field] = pool[..., k]
    layer.check()


@pytest.mark.parametrize("end", ["first", "last"])
def test_a_cache_over_an_array_is_refused(end: str) -> None:
    """Even if only the first or the last of its bytes are shared."""
    layer = Layer(steps=4, batch_sizes=[2, 2, 2, 1])
    good = layer.run()
    need = len(good)
    pool = np.zeros(need + 4096, np.uint8)
    at = pool.ctypes.data % 4
    start = (4 - at) % 4 + 1024
    flagged = layer.deltas.copy()
    flagged.candidate_gate.hw_desc.flags = bnns.BNNSNDArrayFlagBackpropAccumulate  # others by way of temporaries
    for params, writes in ((layer.params, True), (layer.deltas, False), (flagged, False)):
        if not writes:
            layer.deltas = params
        for name, desc in every_descriptor(params).items():
            if desc.data is None or (not writes and name.startswith(("output", "sequence"))):
                continue
            array = desc.data
            offset = start - array.nbytes + 4 if end == "first" else start + need - 4 & ~3
            shared = pool[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            desc.data = shared
            shared[...] = array
            cache = pool[start : start + need]
            if writes:
                assert "overlaps" in untouched(layer, lambda: layer.forward(cache), pool)  # noqa: B023
            else:
                cache[:] = np.frombuffer(good, np.uint8)
                untouched(layer, lambda: layer.backward(cache), pool)  # noqa: B023
            desc.data = array
    assert layer.forward(cache) == 0


# ---- what must fail (9) ---------------------------------------------------------------------------------------------


def test_unknown_flag_bits_are_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    layer = Layer()
    layer.params.lstm_flags |= 0x80
    with caplog.at_level(logging.INFO, "retrograd.bnns"):
        layer.check()
    assert "0x80" in caplog.text
    layer.params.lstm_flags = "flags"  # type: ignore[assignment]
    assert "lstm_flags" in untouched(layer, layer.forward)


@pytest.mark.parametrize(
    "data_type",
    [0, bnns.BNNSDataTypeFloat16, bnns.BNNSDataTypeBFloat16, bnns.BNNSDataTypeInt32, 0x10000, "float", None],
    ids=str,
)
def test_data_types(data_type: Any) -> None:
    layer = Layer(layers=2, peephole="i")
    cache = layer.run()
    for params in (layer.params, layer.deltas):
        for name, desc in every_descriptor(params).items():
            if desc.data is None:
                continue
            desc.data_type = data_type
            call = layer.forward if name.startswith("output") and params is layer.params else layer.backward
            assert name in untouched(layer, lambda call=call: call(cache), cache)  # type: ignore[misc]
            desc.data_type = bnns.BNNSDataTypeFloat32


@pytest.mark.parametrize(
    "layout", [0x12345, -1, 2**40, bnns.BNNSDataLayoutMHA_DHK, bnns.BNNSDataLayoutFullyConnectedSparse, "SNE", None]
)
def test_layouts_that_are_refused(layout: Any) -> None:
    layer = Layer(layers=2, peephole="i")
    cache = layer.run()
    for params in (layer.params, layer.deltas):
        for name, desc in every_descriptor(params).items():
            if desc.data is None or (layout is None and name.endswith("data_desc")):
                continue
            kept, desc.layout = desc.layout, layout
            call = layer.forward if name.startswith("output") and params is layer.params else layer.backward
            assert name in untouched(layer, lambda call=call: call(cache), cache)  # type: ignore[misc]
            desc.layout = kept


@pytest.mark.parametrize("data", [5, "text", object(), 1.5, np.array([object()]), np.empty(0, np.float32)], ids=type)
def test_data_that_is_no_buffer(data: Any) -> None:
    layer = Layer()
    cache = layer.run()
    for params in (layer.params, layer.deltas):
        for name, desc in every_descriptor(params).items():
            if desc.data is None:
                continue
            kept, desc.data = desc.data, data
            call = layer.forward if name.startswith("output") and params is layer.params else layer.backward
            assert name in untouched(layer, lambda call=call: call(cache), cache)  # type: ignore[misc]
            desc.data = kept


def test_read_only_results() -> None:
    layer = Layer(peephole="ifgo")
    cache = layer.run()
    frozen = dict(every_descriptor(layer.params))
    for name, desc in {**frozen, **result_names(layer)}.items():
        if desc.data is None:
            continue
        kept = desc.data
        desc.data = kept.copy()
        desc.data.flags.writeable = False
        result = not name.startswith(("input_d", "sequence")) or desc in result_names(layer).values()
        if desc is frozen.get(name) and not name.startswith("output_d"):
            result = False
        call = layer.forward if desc is frozen.get(name) and name.startswith("output_d") else layer.backward
        if result:
            assert "read-only" in untouched(layer, lambda call=call: call(cache), cache)  # type: ignore[misc]
        else:
            assert call(cache) == 0
        desc.data = kept


def test_results_made_read_only_after_a_call() -> None:
    layer = Layer()
    cache = layer.run()
    gradient, output = layer.gradients.gates[2]["hw"], layer.values.hn
    assert gradient is not None
    assert output is not None
    gradient.flags.writeable = output.flags.writeable = False
    assert "read-only" in untouched(layer, lambda: layer.forward(cache), cache)
    assert "read-only" in untouched(layer, lambda: layer.backward(cache), cache)
    gradient.flags.writeable = output.flags.writeable = True
    layer.check()


def test_memory_that_is_not_aligned_to_its_numbers() -> None:
    layer = Layer()
    x = layer.values.x
    assert x is not None
    raw = bytearray(x.nbytes + 8)
    start = 1 + (-np.frombuffer(raw, np.uint8).ctypes.data) % 4
    memory = memoryview(raw)[start : start + x.nbytes]
    layer.params.input_descriptor.data_desc.data = memory
    assert "aligned" in untouched(layer, layer.forward)


def test_data_of_other_kinds_of_buffers() -> None:
    layer = Layer(states="")
    x, y = layer.values.x, layer.values.y
    assert x is not None
    assert y is not None
    layer.params.input_descriptor.data_desc.data = x.tobytes()
    out = bytearray(y.nbytes)
    layer.params.output_descriptor.data_desc.data = out
    assert layer.forward() == 0
    layer.values.y = np.frombuffer(out, np.float32).reshape(y.shape)
    layer.check_outputs(layer.expected_forward())


def test_wrong_numbers_of_arguments_are_pythons_affair() -> None:
    with pytest.raises(TypeError):
        forward(Layer().params)


# ---- changes after a first call -------------------------------------------------------------------------------------


def same_as_a_copy(layer: Layer) -> tuple[Any, ...]:
    """What the structures do now, which must be what fresh copies of them do."""
    found = []
    for params, deltas in ((layer.params, layer.deltas), (layer.params.copy(), layer.deltas.copy())):
        targets = [
            desc.data
            for structure, prefix in ((params, "output_descriptor"), (deltas, ("input_descriptor", *GATES)))
            for name, desc in every_descriptor(structure).items()
            if desc.data is not None and name.startswith(prefix)
        ]
        for target in targets:
            target[...] = 0.5
        buffer = bytearray(10**5)
        statuses = forward(params, None, buffer, len(buffer)), backward(params, deltas, None, buffer, len(buffer))
        found.append((statuses, [target.tobytes() for target in targets]))
    assert found[0] == found[1]
    return found[0]


def every_change(layer: Layer) -> Iterator[tuple[str, Callable[[], None]]]:
    """A change of every field of every structure inside, each of which makes a difference."""
    for which, root in (("params", layer.params), ("deltas", layer.deltas)):
        for name in SIZES:
            yield f"{which}.{name}", lambda root=root, name=name: setattr(root, name, 5)
        for name, desc in every_descriptor(root).items():
            if desc.data is None:
                continue
            label = f"{which}.{name}"
            yield f"{label}.layout", lambda desc=desc: setattr(desc, "layout", 77)
            yield f"{label}.size", lambda desc=desc: setattr(desc, "size", (9,) * 8)
            yield f"{label}.size[0]", lambda desc=desc: desc.size.__setitem__(0, 99)
            yield f"{label}.stride", lambda desc=desc: setattr(desc, "stride", (99,))
            yield f"{label}.stride[0]", lambda desc=desc: desc.stride.__setitem__(0, 99)
            yield f"{label}.data_type", lambda desc=desc: setattr(desc, "data_type", 3)
            yield (
                f"{label}.data",
                lambda desc=desc: setattr(
                    desc, "data", np.maximum(desc.data, 1) - 1 if desc.data.dtype.kind == "u" else desc.data * 2 + 1
                ),
            )
            yield f"{label}.data=None", lambda desc=desc: setattr(desc, "data", None)
            if which == "deltas" and not name.startswith("output"):
                yield f"{label}.flags", lambda desc=desc: setattr(desc, "flags", 1)
    params = layer.params
    yield "params.dropout", lambda: setattr(params, "dropout", 2.0)
    yield "params.lstm_flags", lambda: setattr(params, "lstm_flags", 0)
    for role in ROLES:
        activation = activation_of(params, role)
        yield f"{role}.function", lambda a=activation: setattr(a, "function", 17)
        yield f"{role}.alpha", lambda a=activation: setattr(a, "alpha", 0.25)
        yield f"{role}.beta", lambda a=activation: setattr(a, "beta", 0.25)
    other = BNNSNDArrayDescriptor()
    for gate in GATES:
        yield f"{gate}.iw_desc[0]", lambda gate=gate: getattr(params, gate).iw_desc.__setitem__(0, other)
        yield f"{gate}.iw_desc[1]", lambda gate=gate: getattr(params, gate).iw_desc.__setitem__(1, other)
        yield (
            f"{gate}.iw_desc",
            lambda gate=gate: setattr(getattr(params, gate), "iw_desc", getattr(params, gate).iw_desc[::-1]),
        )
        for field in ("hw_desc", "cw_desc", "b_desc"):
            yield (
                f"{gate}.{field}",
                lambda gate=gate, field=field: setattr(getattr(params, gate), field, BNNSNDArrayDescriptor()),
            )
        yield (
            f"{gate}",
            lambda gate=gate: setattr(params, gate, getattr(params, GATES[GATES.index(gate) - 1])),
        )
    for side in ("input_descriptor", "output_descriptor"):
        yield side, lambda side=side: setattr(params, side, bnns.BNNSLSTMDataDescriptor())


@pytest.mark.long
def test_every_change_of_a_field_is_noticed() -> None:
    layer = Layer(layers=2, directions=2, peephole="ifgo", batch_sizes=[2, 2, 1])
    layer.params.lstm_flags = BIDIRECTIONAL
    for role in ROLES:
        activation = activation_of(layer.params, role)
        activation.function = bnns.BNNSActivationFunctionScaledTanh
        activation.alpha, activation.beta = 0.5, 0.75
    original = layer.params, layer.deltas
    before = same_as_a_copy(layer)
    assert before[0] == (0, 0)
    names = [name for name, _ in every_change(layer)]
    assert len(names) == len(set(names)) > 400
    results = ("params.output_d", *(f"deltas.{part}" for part in (*GATES, "input_d")))
    for index, name in enumerate(names):
        layer.params, layer.deltas = (structure.copy() for structure in original)
        assert layer.backward(None) == layer.forward(None) == 0
        _, change = next(itertools.islice(every_change(layer), index, None))
        change()
        moved = name.endswith(".data") and name.startswith(results)  # the same result in another place
        assert (same_as_a_copy(layer) == before) == moved, name


def test_fields_cannot_be_taken_away_and_entries_of_arrays_stay_where_they_are() -> None:
    params = Layer().params
    with pytest.raises(TypeError, match="input_size"):
        del params.input_size
    with pytest.raises(TypeError, match="C array"):
        params.input_gate.iw_desc.reverse()


def test_deltas_go_with_whatever_layer_they_are_used_with() -> None:
    """Sizes and extents of 0 in the deltas: those of the layer of this call."""
    whole, part = Layer(steps=4), Layer(steps=3, seed=1)
    deltas = BNNSLayerParametersLSTM()
    dx, dy = nan(4, 2, 3), np.ones((4, 2, 4), np.float32)
    deltas.input_descriptor.data_desc, deltas.output_descriptor.data_desc = describe(dx, SNE), describe(dy, SNE)
    for desc in (deltas.input_descriptor.data_desc, deltas.output_descriptor.data_desc):
        desc.size = [0] * 8
    for layer in (whole, part, whole, part):
        dx[...] = np.nan
        assert backward(layer.params, deltas, None, None, 0) == 0, bnns.last_error()
        expected = rg.lstm_backward(dy[: layer.T], layer.expected_forward().cache, need=["dx"]).dx  # type: ignore[arg-type]
        assert expected is not None
        assert np.array_equal(dx[: layer.T], expected)
        assert np.isnan(dx[layer.T :]).all()
    whole.params.input_descriptor.hidden_desc = describe(dx.reshape(-1)[:8].reshape(1, 1, 2, 4))
    assert "overlaps" in untouched(whole, lambda: backward(whole.params, deltas, None, None, 0), dx)


def test_structures_can_be_copied_deeply_after_a_call() -> None:
    layer = Layer()
    layer.run()
    twin = copy.deepcopy(layer.params)
    assert twin.input_gate.iw_desc[0].data is not layer.params.input_gate.iw_desc[0].data
    y = twin.output_descriptor.data_desc.data
    y[...] = 0
    assert forward(twin, None, None, 0) == 0
    assert np.array_equal(y, layer.values.y)  # type: ignore[arg-type]
    twin.input_gate.iw_desc[0].data = None
    assert forward(twin, None, None, 0) == -1


class Owned(np.ndarray[Any, Any]):
    """An array that can be referred to weakly."""


def test_nothing_keeps_buffers_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        layer = Layer()
        refs = []
        for params in (layer.params, layer.deltas):
            for desc in every_descriptor(params).values():
                if desc.data is not None:
                    desc.data = desc.data.copy().view(Owned)
                    refs.append(weakref.ref(desc.data))
        cache: Any = np.zeros(len(layer.cache()), np.uint8).view(Owned)
        kept_cache = weakref.ref(cache)
        assert layer.forward(cache) == 0
        assert layer.backward(cache) == 0
        del cache
        assert kept_cache() is None
        old = weakref.ref(layer.params.input_gate.hw_desc.data)
        layer.params.input_gate.hw_desc.data = None
        del desc, params
        assert old() is None  # at once, not at the next call
        part = layer.params.forget_gate  # a part that is still there does not keep the rest
        del layer
        alive = [ref() for ref in refs if ref() is not None]
        assert {id(a) for a in alive} == {id(d.data) for d in (part.iw_desc[0], part.hw_desc, part.b_desc)}
    finally:
        gc.enable()
