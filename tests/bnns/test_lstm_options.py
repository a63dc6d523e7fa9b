"""Apple's BNNS LSTM: activations, batch sizes, dropout and filter parameters."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNSNDArrayDescriptor
from retrograd.ops.activation import ACTIVATIONS
from support.arrays import Array
from support.bnns import Allocator
from support.bnns_lstm import (
    ROLES,
    Layer,
    activation_of,
    backward,
    capacity_of,
    describe,
    forward,
    read_back,
    replace_descriptors,
    spread,
    untouched,
)

# ---- activations (2.4, 8) -------------------------------------------------------------------------------------------

ELEMENTWISE = {kind.code: name for name, kind in ACTIVATIONS.items() if kind.code <= 35}


@pytest.mark.parametrize("code", ELEMENTWISE, ids=ELEMENTWISE.get)
def test_every_elementwise_activation_in_every_role(code: int) -> None:
    layer = Layer()
    layer.params.lstm_flags = 0
    name = ELEMENTWISE[code]
    kind = ACTIVATIONS[name]
    alpha, beta = (0.0, 0.75) if name == "clamp" else (0.5, 0.75)
    function = rg.Activation(name, alpha if kind.alpha != 0 else None, beta if kind.beta != 0 else None)
    for index, role in enumerate(ROLES):
        standard = [("sigmoid", 3), ("sigmoid", 3), ("tanh", 4), ("sigmoid", 3), ("tanh", 4)]
        for other, (_, number) in zip(ROLES, standard, strict=True):
            activation_of(layer.params, other).function = number
        activation = activation_of(layer.params, role)
        activation.function, activation.alpha, activation.beta = code, alpha, beta
        names: list[Any] = [name for name, _ in standard]
        names[index] = function
        layer.activations = rg.LstmActivations(*names)
        layer.check()


def test_stored_activations_without_the_flag_are_the_identity_if_zero() -> None:
    layer = Layer()
    layer.params.lstm_flags = 0
    layer.activations = rg.LstmActivations(*["identity"] * 5)
    layer.check()


def test_the_flag_for_default_activations_ignores_what_is_stored() -> None:
    layer = Layer()
    for role in ROLES:
        activation = activation_of(layer.params, role)
        activation.function, activation.alpha = bnns.BNNSActivationFunctionSoftmax, "nothing"
    layer.check()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("code", [9, 10, 11, 13, 14, 21, 29, 36, -1, 2**32, "tanh", None], ids=str)
def test_activations_that_are_refused(code: Any, role: str) -> None:
    layer = Layer()
    layer.params.lstm_flags = 0
    activation_of(layer.params, role).function = code
    assert role.removesuffix(".activation") in untouched(layer, layer.forward)
    untouched(layer, layer.backward)


# ---- batch sizes (5) ------------------------------------------------------------------------------------------------

INTEGERS = [np.dtype(kind + width).newbyteorder("=") for kind in ("int", "uint") for width in ("8", "16", "32", "64")]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("sizes", [[2, 2, 1], [0, 2, 1], [2, 2, 2], [0, 0, 0], [1, 2, 0]], ids=str)
def test_batch_sizes_of_every_integer_type(dtype: np.dtype[Any], sizes: list[int]) -> None:
    layer = Layer(layers=2, directions=2, batch_sizes=sizes)
    layer.params.sequence_descriptor = describe(np.array(sizes, dtype))
    layer.check()


def test_inactive_samples_carry_their_state_and_have_no_output() -> None:
    layer = Layer(batch_sizes=[2, 0, 1])
    layer.run()
    v, g = layer.values, layer.gradients
    assert v.y is not None
    assert v.hn is not None
    assert g.x is not None
    assert not v.y[1].any()
    assert not v.y[2, 1].any()
    assert np.array_equal(v.hn[0, 0, 1], v.y[0, 1])
    assert not g.x[1].any()
    assert not g.x[2, 1].any()


def test_batch_sizes_are_read_by_every_call_and_may_have_strides() -> None:
    layer = Layer(batch_sizes=[2, 2, 1])
    buffer = np.array([2, 9, 2, 9, 1], np.int16)
    layer.params.sequence_descriptor = BNNSNDArrayDescriptor(
        layout=bnns.BNNSDataLayoutVector, size=(3,), stride=(2,), data=buffer, data_type=bnns.BNNSDataTypeInt16
    )
    layer.check()
    buffer[0] = 1
    layer.batch_sizes = buffer[::2]
    layer.check()


@pytest.mark.parametrize("bad", [3, -1, 2**31 - 1])
def test_batch_sizes_out_of_range(bad: int) -> None:
    layer = Layer(batch_sizes=[2, 2, 1])
    cache = layer.run()
    layer.params.sequence_descriptor = describe(np.array([2, bad, 1], np.int32))
    assert "sequence_descriptor.data has" in untouched(layer, lambda: layer.forward(cache), cache)
    untouched(layer, lambda: layer.backward(cache), cache)
    untouched(layer, layer.backward)


@pytest.mark.parametrize("array", [np.ones(3, np.float32), np.ones(3, bool), np.ones(3, np.float16)], ids=str)
def test_batch_sizes_that_are_no_integers(array: Array) -> None:
    layer = Layer()
    layer.params.sequence_descriptor = describe(array)
    assert "sequence_descriptor" in untouched(layer, layer.forward)


# ---- dropout (5) ----------------------------------------------------------------------------------------------------


def dropping(seed: int = 1) -> Layer:
    layer = Layer(steps=4, units=8, layers=3, directions=2)
    layer.params.dropout = 0.4
    bnns.seed_dropout(seed)
    return layer


def test_dropout_is_that_of_the_array_functions() -> None:
    layer = dropping()
    cache = layer.run()
    options = {"dropout": float(np.float32(0.4)), "seed": random.Random(1).getrandbits(64)}
    layer.check_outputs(layer.expected_forward(**options))
    layer.check_gradients(layer.expected_backward(**options))
    layer.fresh_gradients()
    assert layer.backward(bytes(cache)) == 0  # the mask is in the cache, not in the program
    layer.check_gradients(layer.expected_backward(**options))


def test_dropout_needs_a_cache() -> None:
    layer = dropping()
    assert layer.forward(None) == 0
    assert layer.backward(None) == 0
    layer.check_outputs(layer.expected_forward())
    layer.check_gradients(layer.expected_backward())


def test_every_forward_call_drops_anew_and_a_run_can_be_repeated() -> None:
    layer = dropping()
    y = layer.values.y
    assert y is not None
    cache = layer.cache()

    def three() -> list[bytes]:
        bnns.seed_dropout(7)
        outputs = []
        for _ in range(3):
            assert layer.forward(cache) == 0
            outputs.append(y.tobytes())
        return outputs

    first = three()
    assert len(set(first)) == 3
    assert three() == first


def test_dropout_between_layers_only() -> None:
    layer = Layer()
    for ratio in (0.5, 1.0, -1.0, float("nan"), "nothing"):
        layer.params.dropout = ratio  # type: ignore[assignment]
        assert capacity_of(layer.params) < bnns.SIZE_MAX
        layer.check()


@pytest.mark.parametrize("ratio", [1.0, 1.5, -0.1, float("nan"), float("inf"), "half", None, 1 - 1e-9], ids=str)
def test_dropout_ratios_that_are_refused(ratio: Any) -> None:
    layer = Layer(layers=2)
    layer.params.dropout = ratio
    assert capacity_of(layer.params) == bnns.SIZE_MAX
    assert "dropout" in untouched(layer, layer.forward)
    untouched(layer, layer.backward)


# ---- filter parameters (S.5) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1, 2, 1000])
def test_the_number_of_threads_is_a_hint(threads: int) -> None:
    layer = Layer(steps=8, samples=4, units=32, layers=2)
    filter_params = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr, n_threads=threads)
    cache = layer.cache()
    assert forward(layer.params, filter_params, cache, len(cache)) == 0
    assert backward(layer.params, layer.deltas, filter_params, cache, len(cache)) == 0
    layer.check_outputs(layer.expected_forward())
    layer.check_gradients(layer.expected_backward())


@pytest.mark.parametrize("threads", [-1, 2**64, "two", None], ids=str)
def test_numbers_of_threads_that_are_refused(threads: Any) -> None:
    layer = Layer()
    filter_params = bnns.BNNSFilterParameters(n_threads=threads)
    assert "n_threads" in untouched(layer, lambda: forward(layer.params, filter_params, None, 0))
    untouched(layer, lambda: backward(layer.params, layer.deltas, filter_params, None, 0))


def test_the_clients_allocator_gives_the_memory_of_a_call() -> None:
    layer = Layer(layers=2, directions=2)
    made = replace_descriptors(layer, lambda array, _: spread(array, (0, 0, 2, 3)))  # states need temporaries
    layer.deltas.forget_gate.hw_desc.flags = 1
    made[-1][0].data[...] = 0
    allocator = Allocator()
    assert forward(layer.params, allocator.parameters(), None, 0) == 0
    assert len(allocator.given) == len(allocator.freed) == 2
    layer.deltas.forget_gate.hw_desc.data[...] = 0
    assert backward(layer.params, layer.deltas, allocator.parameters(), None, 0) == 0
    assert len(allocator.given) == len(allocator.freed) > 3
    total = len(allocator.given) - 2
    read_back(layer, made)
    layer.check_outputs(layer.expected_forward())
    layer.check_gradients(layer.expected_backward())
    for limit in range(total):
        allocator = Allocator(limit)
        buffers = [desc.data for desc, _, _ in made]
        parameters = allocator.parameters()
        reason = untouched(
            layer,
            lambda parameters=parameters: backward(layer.params, layer.deltas, parameters, None, 0),  # type: ignore[misc]
            *buffers,
        )
        assert "alloc_memory" in reason
        assert len(allocator.given) == len(allocator.freed) == limit


def test_allocators_that_are_none() -> None:
    layer = Layer()
    for parameters in (
        bnns.BNNSFilterParameters(alloc_memory=3),
        bnns.BNNSFilterParameters(free_memory="free"),
        bnns.BNNSFilterParameters(alloc_memory=lambda *_: 1 / 0),
        bnns.BNNSFilterParameters(alloc_memory=lambda *_: 0),
    ):
        untouched(layer, lambda: backward(layer.params, layer.deltas, parameters, None, 0))  # noqa: B023


def test_a_free_that_raises_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    layer = Layer()
    allocator = Allocator()

    def free(memory: Any) -> None:
        raise RuntimeError("no")

    parameters = bnns.BNNSFilterParameters(alloc_memory=allocator.alloc, free_memory=free)
    with caplog.at_level(logging.INFO, "retrograd.bnns"):
        assert backward(layer.params, layer.deltas, parameters, None, 0) == 0
    assert "free_memory" in caplog.text
    layer.check_gradients(layer.expected_backward())
