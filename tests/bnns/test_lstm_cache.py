"""Apple's BNNS LSTM: the training cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from support.bnns_lstm import (
    DEFAULT_ACTIVATIONS,
    Layer,
    all_arrays,
    backward,
    forward,
    read_back,
    replace_descriptors,
    spread,
    untouched,
)


@pytest.mark.parametrize("directions", [1, 2])
def test_a_cache_one_byte_short(directions: int) -> None:
    layer = Layer(layers=2, directions=directions)
    cache = layer.run()
    need = len(cache)
    assert "needs" in untouched(layer, lambda: forward(layer.params, None, cache, need - 1), cache)
    untouched(layer, lambda: backward(layer.params, layer.deltas, None, cache, need - 1), cache)
    short = cache[:-1]
    assert "has" in untouched(layer, lambda: forward(layer.params, None, short, need), short)
    untouched(layer, lambda: backward(layer.params, layer.deltas, None, short, need), short)


@pytest.mark.parametrize("capacity", [-1, 2**64, "many", None, 1.5, 0], ids=str)
def test_capacities_that_are_none(capacity: Any) -> None:
    layer = Layer()
    cache = layer.run()
    untouched(layer, lambda: forward(layer.params, None, cache, capacity), cache)
    untouched(layer, lambda: backward(layer.params, layer.deltas, None, cache, capacity), cache)
    assert forward(layer.params, None, None, capacity) == 0  # without a cache it is not looked at
    assert backward(layer.params, layer.deltas, None, None, capacity) == 0


@pytest.mark.parametrize("offset", range(9))
def test_a_cache_at_any_alignment(offset: int) -> None:
    layer = Layer(layers=2)
    buffer = np.full(offset + len(layer.cache()) + 5, 0xAB, np.uint8)
    part = buffer[offset:-5]
    assert layer.forward(part) == 0
    assert layer.backward(part) == 0
    layer.check_gradients(layer.expected_backward())
    assert (buffer[:offset] == 0xAB).all()
    assert (buffer[-5:] == 0xAB).all()
    moved = b"?" * (offset + 1) + part.tobytes()
    layer.fresh_gradients()
    assert layer.backward(memoryview(moved)[offset + 1 :]) == 0
    layer.check_gradients(layer.expected_backward())


def test_a_larger_cache_is_used_no_further_than_needed() -> None:
    layer = Layer()
    need = len(layer.cache())
    cache = bytearray(b"\xab" * (need + 100))
    assert layer.forward(cache) == 0
    assert cache[need:] == b"\xab" * 100
    assert backward(layer.params, layer.deltas, None, cache, need) == 0
    assert layer.backward(cache) == 0
    layer.check_gradients(layer.expected_backward())


def test_backward_only_reads_its_cache() -> None:
    layer = Layer(layers=2, directions=2)
    cache = layer.run()
    kept = bytes(cache)
    assert layer.backward(kept) == 0
    assert cache == kept
    assert "read-only" in untouched(layer, lambda: layer.forward(kept))


@pytest.mark.parametrize("pointer", [17, "cache", object(), 3.0, [1, 2]], ids=type)
def test_caches_that_are_no_buffers(pointer: Any) -> None:
    layer = Layer()
    untouched(layer, lambda: forward(layer.params, None, pointer, 10**6))
    untouched(layer, lambda: backward(layer.params, layer.deltas, None, pointer, 10**6))


def test_a_damaged_or_empty_cache() -> None:
    layer = Layer(layers=2)
    layer.params.dropout = 0.5
    good = bytes(layer.run())
    empty = bytearray(len(good))
    assert "finished" in untouched(layer, lambda: layer.backward(empty), empty)
    for at in range(32):  # the header
        damaged = bytearray(good)
        damaged[at] ^= 0x40
        untouched(layer, lambda cache=damaged: layer.backward(cache), damaged)  # type: ignore[misc]
    assert layer.backward(good) == 0


def test_the_training_cache_is_that_of_the_array_functions() -> None:
    layer = Layer(layers=2, directions=2)
    cache = layer.run()
    size = rg.lstm_cache_size(layer.T, layer.B, layer.I, layer.H, num_layers=2, bidirectional=True)
    assert len(cache) == size
    expected = layer.expected_forward()
    assert expected.cache is not None
    assert expected.cache.buffer is not None
    for cell in range(4):
        for ours, theirs in zip(
            expected.cache.with_buffer(bytes(cache)).gates(cell), expected.cache.gates(cell), strict=True
        ):
            assert np.array_equal(ours, theirs)


def change_activation(layer: Layer) -> None:
    layer.params.lstm_flags &= ~DEFAULT_ACTIVATIONS


CHANGES: dict[str, Callable[[Layer], None]] = {
    "activations": change_activation,
    "dropout": lambda layer: setattr(layer.params, "dropout", 0.25),
    "no dropout": lambda layer: setattr(layer.params, "dropout", 0.0),
    "batch sizes": lambda layer: layer.batch_sizes.__setitem__(0, 1),  # type: ignore[union-attr]
    "no batch sizes": lambda layer: setattr(layer.params.sequence_descriptor, "data", None),
    "a bias less": lambda layer: (
        setattr(layer.params.input_gate.b_desc, "data", None),
        setattr(layer.deltas.input_gate.b_desc, "data", None),
    )[0],
    "a state less": lambda layer: setattr(layer.params.input_descriptor.hidden_desc, "data", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_cache_of_other_parameters(name: str) -> None:
    layer = Layer(layers=2, directions=2, batch_sizes=[2, 2, 1])
    layer.params.dropout = 0.5
    cache = layer.run()
    CHANGES[name](layer)
    assert "training_cache_ptr" in (reason := untouched(layer, lambda: layer.backward(cache), cache)) or (
        "cache is of another problem" in reason
    )
    assert layer.backward(None) == 0


def test_a_cache_of_other_sizes() -> None:
    layer = Layer(steps=4)
    cache = layer.run()
    for options in ({"steps": 3}, {"samples": 1}, {"inputs": 2}, {"units": 3}):
        other = Layer(**{"steps": 4, **options})  # type: ignore[arg-type]
        other.forward()
        untouched(other, lambda other=other: other.backward(cache), cache)  # type: ignore[misc]
    peephole = Layer(steps=4, peephole="g")
    untouched(peephole, lambda: peephole.backward(cache), cache)


def test_weights_changed_in_place_between_steps_of_training() -> None:
    """What is worked out once is where things are, not what is in them."""
    for strides in ((0, 0, 0, 0), (1, 0, 0, 0)):
        layer = Layer(layers=2)
        made = replace_descriptors(layer, lambda array, _, strides=strides: spread(array, strides))  # type: ignore[misc]
        for _ in range(3):
            layer.run()
            read_back(layer, made)
            layer.check_outputs(layer.expected_forward())
            layer.check_gradients(layer.expected_backward())
            for index, array in enumerate(all_arrays(layer.values)):
                array *= np.float32(1.25)
                made[index][1]()[...] = array
