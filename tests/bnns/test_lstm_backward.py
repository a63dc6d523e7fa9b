"""Apple's BNNS LSTM: which results backward writes, and how."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNSNDArrayDescriptor
from support.bnns import Allocator
from support.bnns_lstm import (
    GATES,
    ROLES,
    SIZES,
    Layer,
    Tripwire,
    activation_of,
    backward,
    describe,
    every_descriptor,
    nan,
    result_names,
    spread,
    untouched,
)


def test_accumulate_everywhere_is_the_engines_own() -> None:
    layer = Layer(layers=2, directions=2, peephole="ifgo")
    expected = layer.expected_backward()
    layer.fresh_gradients(bnns.BNNSNDArrayFlagBackpropAccumulate, 0.25)
    base = layer.expected_forward().cache
    assert base is not None
    wanted = copy.deepcopy(expected)
    for array in (
        wanted.dx,
        wanted.dh0,
        wanted.dc0,
        *(a for cell in wanted.dweights for part in cell[:4] for a in part),
    ):
        assert array is not None
        array[...] = 0.25
    dhn, dcn = layer.states(layer.dhn), layer.states(layer.dcn)
    rg.lstm_backward(layer.dy, base, dhn=dhn, dcn=dcn, out=wanted, accumulate=True)
    layer.run()
    layer.check_gradients(wanted)


@pytest.mark.parametrize("seed", range(6))
def test_every_result_obeys_its_own_flag(seed: int) -> None:
    layer = Layer(layers=2, directions=2, peephole="fo", bias="ig", seed=seed)
    layer.run()
    alone = {name: desc.data.copy() for name, desc in result_names(layer).items()}
    layer.fresh_gradients(0, 0.25)
    rng = random.Random(seed)
    missing = set()
    for name, desc in result_names(layer).items():
        desc.flags = rng.choice((bnns.BNNSNDArrayFlagBackpropSet, bnns.BNNSNDArrayFlagBackpropAccumulate))
        if rng.random() < 0.2:
            missing.add(name)
    kept = {name: (desc.data, desc.flags) for name, desc in result_names(layer).items()}
    for name in missing:
        result_names(layer)[name].data = None
    assert layer.backward() == 0, bnns.last_error()
    for name, (array, flag) in kept.items():
        if name in missing:
            assert (array == 0.25).all()
        elif flag == bnns.BNNSNDArrayFlagBackpropSet:
            assert np.array_equal(array, alone[name])
        else:
            np.testing.assert_allclose(array, alone[name] + np.float32(0.25), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("everywhere", [False, True])
def test_accumulate_into_states_whose_directions_lie_apart(everywhere: bool) -> None:
    layer = Layer(layers=2, directions=2)
    cache = layer.run()
    h0 = layer.gradients.h0
    assert h0 is not None
    layer.fresh_gradients(bnns.BNNSNDArrayFlagBackpropAccumulate if everywhere else 0, 0.0)
    desc, read, gaps = spread(np.full_like(h0, 0.25), (0, 0, 3, 2))
    desc.flags = bnns.BNNSNDArrayFlagBackpropAccumulate
    layer.deltas.input_descriptor.hidden_desc = desc
    memory = Allocator().parameters()  # in which nothing of earlier arrays is left
    assert backward(layer.params, layer.deltas, memory, cache, len(cache)) == 0, bnns.last_error()
    np.testing.assert_allclose(read(), h0 + np.float32(0.25), rtol=1e-6, atol=1e-7)
    assert gaps()
    layer.gradients.h0 = None
    layer.check_gradients(layer.expected_backward())


def test_flags_of_arrays_that_are_not_results_are_ignored() -> None:
    layer = Layer()
    for desc in every_descriptor(layer.params).values():
        desc.flags = 12345
    for name in ("data_desc", "hidden_desc", "cell_state_desc"):
        getattr(layer.deltas.output_descriptor, name).flags = 1
    layer.check()


@pytest.mark.parametrize("flags", [2, 3, -1, "set", None], ids=str)
def test_flags_that_are_none(flags: Any) -> None:
    layer = Layer()
    layer.deltas.forget_gate.hw_desc.flags = flags
    assert "flags" in untouched(layer, layer.backward)


@pytest.mark.parametrize("flag", [0, 1])
@pytest.mark.parametrize("layers", [1, 2])
def test_one_gradient_alone(flag: int, layers: int) -> None:
    """Each result by itself, all others NULL: the same bits, and nothing else is written."""
    layer = Layer(layers=layers, directions=2, peephole="ifgo")
    cache = layer.run()
    alone = {name: desc.data.copy() for name, desc in result_names(layer).items()}
    for name in alone:
        layer.fresh_gradients(flag, 0.0)
        arrays = {other: desc.data for other, desc in result_names(layer).items()}
        for other in alone.keys() - {name}:
            result_names(layer)[other].data = None
        assert layer.backward(cache) == 0, bnns.last_error()
        for other, array in arrays.items():
            assert np.array_equal(array, alone[name]) if other == name else not array.any()


def test_no_gradient_at_all() -> None:
    layer = Layer()
    cache = layer.run()
    for desc in result_names(layer).values():
        desc.data = None
    assert layer.backward(cache) == 0
    assert layer.backward(None) == 0


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("field", ["b_desc", "cw_desc"])
@pytest.mark.parametrize("others", ["", "ifgo"])
def test_the_gradient_of_an_absent_parameter(gate: str, field: str, others: str) -> None:
    letters = others.replace("ifgo"[GATES.index(gate)], "")
    layer = Layer(bias=letters, peephole=letters)
    shape = (1, 1, 4) if field == "b_desc" else (1, 1, 4, 4)
    extra = nan(*shape)
    setattr(getattr(layer.deltas, gate), field, describe(extra))
    assert f"{gate}.{field}" in untouched(layer, layer.backward, extra)


@pytest.mark.parametrize("name", SIZES)
def test_scalars_of_the_deltas(name: str) -> None:
    layer = Layer()
    cache = layer.run()
    value = getattr(layer.deltas, name)
    setattr(layer.deltas, name, 0)
    assert layer.backward(cache) == 0
    for wrong in (value + 1, -1, "3", None):
        setattr(layer.deltas, name, wrong)
        assert name in untouched(layer, lambda: layer.backward(cache), cache)


def test_the_deltas_other_fields_are_not_looked_at() -> None:
    layer = Layer(layers=2)
    deltas = layer.deltas
    deltas.dropout, deltas.lstm_flags = "nothing", "nothing"  # type: ignore[assignment]
    deltas.sequence_descriptor = BNNSNDArrayDescriptor(layout=99, data=Tripwire())
    for role in ROLES:
        activation_of(deltas, role).function = 11
    layer.check()
