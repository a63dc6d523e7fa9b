"""A plan is reused only while everything that it was made from is as it was: Planned itself, then BNNS and MPS over it.

Front ends are checked by what they compute and refuse: after each kind of change a call must do what it would do if it
were the first one.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns, mps
from retrograd.ops._planned import Planned, Version, Versioned
from support.waiting import PATIENCE

Array = np.ndarray[Any, Any]
Descriptor = bnns.BNNSNDArrayDescriptor
describe = Descriptor.from_array


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- Planned ---------------------------------------------------------------------------------------------------------


class Thing(Versioned):
    def __init__(self, *memory: object) -> None:
        self._version: Version | None = Version()
        self.memory = memory

    def _memory(self) -> Iterable[object]:
        return self.memory


class Plan:
    """Something that can be referred to weakly."""


@Planned
def plan_of(*arguments: object) -> Plan:
    if "refused" in arguments:
        raise ValueError("refused")
    return Plan()


def test_a_plan_is_reused_until_a_version_changes() -> None:
    first, second = Thing(), Thing()
    plan = plan_of(first, second, None, 300)
    assert plan_of(first, second, None, int("300")) is plan
    for changed in (first, second):
        changed._version = Version()
        again = plan_of(first, second, None, 300)
        assert again is not plan
        assert plan_of(first, second, None, 300) is again
        plan = again


@pytest.mark.parametrize(
    "value", [301, None, 300.0, True, np.int64(300), "300", [], object()], ids=lambda value: type(value).__name__
)
def test_other_arguments_make_another_plan(value: object) -> None:
    thing = Thing()
    plan = plan_of(thing, 300)
    assert plan_of(thing, value) is not plan
    if type(value) is not int and value is not None:
        assert plan_of(thing, value) is not plan_of(thing, value)  # nor is it known when two of them are equal
        assert plan_of(thing, 300) is plan


def test_arguments_in_another_order_or_number_make_another_plan() -> None:
    first, second, third = Thing(), Thing(), Thing()
    plan = plan_of(first, second, third)
    assert plan_of(first, third, second) is not plan
    assert plan_of(first, second) is not plan_of(first, second, None)


def test_functions_keep_their_plans_apart() -> None:
    other: Planned[Any, list[object]] = Planned(lambda thing: [thing])
    thing = Thing()
    assert plan_of(thing) is plan_of(thing)
    assert other(thing) == [thing]
    assert other(thing) is other(thing)


def test_a_failure_is_not_kept_and_leaves_the_plan_before() -> None:
    thing = Thing()
    plan = plan_of(thing)
    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            plan_of(thing, "refused")
    assert plan_of(thing) is plan


def test_an_object_without_a_version_has_no_plans() -> None:
    first, second = Thing(), Thing()
    second._version = None
    assert plan_of(first, second) is not plan_of(first, second)
    assert plan_of(second, first) is not plan_of(second, first)
    assert plan_of(None, first) is not plan_of(None, first)


def test_writability_is_part_of_a_plan() -> None:
    array, other = np.zeros(3), np.zeros(3)
    first, second = Thing(array, bytearray(3), None), Thing(other)
    plan = plan_of(first, second)
    assert plan_of(first, second) is plan
    for one in (array, other):
        for writable in (False, True):
            one.flags.writeable = writable
            again = plan_of(first, second)
            assert again is not plan
            plan = again


def test_memory_that_may_move_makes_no_lasting_plan() -> None:
    thing = Thing(np.zeros(3), object())
    assert plan_of(thing) is not plan_of(thing)


@pytest.mark.parametrize("end", ["changes", "is deleted"])
def test_a_plan_ends_at_once_with_its_first_object(end: str) -> None:
    gc.disable()
    try:
        first, second = Thing(), Thing()
        plan = weakref.ref(plan_of(first, second))
        assert plan() is not None
        if end == "changes":
            first._version = Version()
        else:
            del first
        assert plan() is None
    finally:
        gc.enable()


def test_a_plan_keeps_no_object_alive() -> None:
    gc.disable()
    try:
        first, second = Thing(), Thing()
        plan_of(first, second)
        ends: list[weakref.ref[Any]] = [weakref.ref(second), weakref.ref(second._version)]
        del second
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


def test_a_new_object_in_the_place_of_an_old_one_has_another_plan() -> None:
    first, plans = Thing(), []
    for _ in range(100):
        plans.append(plan_of(first, Thing()))  # whose memory the next one gets, as a rule
    assert len(set(plans)) == 100


def test_a_plan_of_an_object_that_changes_meanwhile_is_not_found_again() -> None:
    thing = Thing()

    @Planned
    def slow(thing: Thing) -> int | None:
        value = id(thing._version)
        thing._version = Version()  # as by another thread
        return value

    assert slow(thing) != slow(thing)


def test_threads_share_plans_while_another_changes_the_object() -> None:
    """Whatever they get is of a version that the object had since they began."""

    class Counter(Thing):
        value = 0

    counter, stop = Counter(), threading.Event()
    failures: list[tuple[int, object]] = []
    read: Planned[Any, int] = Planned(lambda counter: counter.value)

    def use() -> None:
        while not stop.is_set():
            least = counter.value  # set before its version
            got = read(counter)
            if got < least - 1:
                failures.append((least, got))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for value in range(1, 3000):
        counter.value = value
        counter._version = Version()
        if read(counter) != value:
            failures.append((value, "own"))
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures


# ---- structures ------------------------------------------------------------------------------------------------------


def lstm_params() -> Any:
    return bnns.BNNSLayerParametersLSTM()


CHANGES: dict[str, Callable[[Any], None]] = {
    "a number": lambda params: setattr(params, "seq_len", 2),
    "a number, to the same": lambda params: setattr(params, "seq_len", params.seq_len),
    "a structure": lambda params: setattr(params, "sequence_descriptor", Descriptor()),
    "a field of a part": lambda params: setattr(params.sequence_descriptor, "data", b"1234"),
    "a number in an array of a part": lambda params: params.sequence_descriptor.size.__setitem__(0, 5),
    "a field of a part of a part": lambda params: setattr(params.input_gate.hw_desc, "flags", 1),
    "a structure in an array": lambda params: params.input_gate.iw_desc.__setitem__(1, Descriptor()),
    "a field of one in an array": lambda params: setattr(params.output_gate.iw_desc[1], "layout", 3),
    "an array of structures": lambda params: setattr(params.input_gate, "iw_desc", [Descriptor(), Descriptor()]),
    "an activation": lambda params: setattr(params.hidden_activation, "alpha", 2.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_structure_is_seen_from_outside_it(change: str) -> None:
    params, other = lstm_params(), lstm_params()
    plan, unchanged = plan_of(params), plan_of(other)
    assert plan_of(params) is plan
    CHANGES[change](params)
    assert plan_of(params) is not plan
    assert plan_of(other) is unchanged


def test_changes_of_what_was_put_in_are_seen_too() -> None:
    params = lstm_params()
    params.input_gate.iw_desc[1] = Descriptor()
    params.output_gate = bnns.BNNSLSTMGateDescriptor()
    for part in (params.input_gate.iw_desc[1], params.output_gate.hw_desc):
        plan = plan_of(params)
        part.layout = 3
        assert plan_of(params) is not plan


def test_copies_have_plans_of_their_own() -> None:
    params = lstm_params()
    plan = plan_of(params)
    for twin in (params.copy(), copy.copy(params), copy.deepcopy(params)):
        assert plan_of(twin) is not plan
        twin.input_gate.hw_desc.flags = 1
    params.output_gate = params.input_gate  # a copy, too
    plan = plan_of(params)
    assert plan_of(params.input_gate) is not plan_of(params.output_gate)
    params.input_gate.hw_desc.flags = 1
    assert params.output_gate.hw_desc.flags == 0
    assert plan_of(params) is not plan


def test_a_part_outlives_the_structure_around_it() -> None:
    part = lstm_params().input_gate
    plan = plan_of(part)
    part.hw_desc.flags = 1
    assert plan_of(part) is not plan


# ---- BNNS: normalization ---------------------------------------------------------------------------------------------


class Backward:
    """A batch norm of 6 channels after a training pass, and the descriptors of its backward call."""

    def __init__(self, batch: int = 4) -> None:
        vector = Descriptor(layout=bnns.BNNSDataLayoutVector, size=(6,), data_type=bnns.BNNSDataTypeFloat32)
        self.gamma = np.linspace(1, 2, 6, dtype=np.float32)
        parameters = bnns.BNNSLayerParametersNormalization(
            i_desc=vector, o_desc=vector, gamma_desc=describe(self.gamma), epsilon=1e-3
        )
        client = bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr)
        self.filter = bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, parameters, client)
        self.vector, self.dy = vector, normal(8, 6, seed=1)
        self.dx, self.dgamma = np.zeros((8, 6), np.float32), np.zeros(6, np.float32)
        self.out_delta, self.in_delta = self.samples(self.dy), self.samples(self.dx)
        self.gamma_delta: Any = describe(self.dgamma)
        self.forward(batch)

    def samples(self, array: Any) -> Any:
        described = self.vector.copy()
        described.data = array
        return described

    def forward(self, batch: int) -> None:
        x = normal(batch, 6)
        assert bnns.BNNSNormalizationFilterApplyBatch(self.filter, batch, x, 6, x.copy(), 6, True) == 0
        _, self.cache = rg.batch_norm_forward(x, self.gamma, None, eps=float(np.float32(1e-3)))

    def call(self, batch: int = 4, stride: int = 6) -> int:
        return bnns.BNNSNormalizationFilterApplyBackwardBatch(
            self.filter, batch, self.in_delta, stride, None, 6, self.out_delta, stride, None, self.gamma_delta
        )

    def check(self, batch: int = 4, stride: int = 6) -> None:
        """The call does what the array function does with what the descriptors point to now."""
        dy, dx = (
            np.lib.stride_tricks.as_strided(d.data, (batch, 6), (4 * stride, 4))
            for d in (self.out_delta, self.in_delta)
        )
        want = rg.batch_norm_backward(dy.copy(), self.cache)
        before = dx.copy() if self.in_delta.flags else 0
        assert self.call(batch, stride) == 0, bnns.last_error()
        assert np.array_equal(dx, before + want.dx)  # type: ignore[operator]
        if self.gamma_delta is not None:
            assert np.array_equal(self.gamma_delta.data, want.dgamma)  # type: ignore[arg-type]


def test_the_same_call_again_reads_what_the_arrays_hold_now() -> None:
    layer = Backward()
    layer.check()
    layer.dy *= 2
    layer.gamma += 1
    layer.cache = layer.cache.with_arrays(None, layer.gamma, None)
    layer.check()


@pytest.mark.parametrize("name", ["out_delta", "in_delta", "gamma_delta"])
def test_another_array_in_a_descriptor(name: str) -> None:
    layer = Backward()
    layer.check()
    descriptor = getattr(layer, name)
    old = descriptor.data
    before, descriptor.data = old.copy(), normal(*old.shape, seed=5)
    layer.check()
    assert np.array_equal(old, before)
    setattr(layer, name, descriptor.copy())
    getattr(layer, name).data = old
    layer.check()


def test_another_batch_size_or_stride() -> None:
    layer = Backward()
    for batch, stride in ((4, 6), (2, 6), (4, 6), (4, 7), (2, 12), (4, 6)):
        layer.forward(batch)
        layer.dx[...] = np.nan
        layer.check(batch, stride)
        assert np.isnan(layer.dx.ravel()[(batch - 1) * stride + 6 :]).all()


def test_another_field_of_a_descriptor() -> None:
    layer = Backward()
    layer.check()
    layer.in_delta.flags = bnns.BNNSNDArrayFlagBackpropAccumulate
    layer.check()
    layer.in_delta.flags = bnns.BNNSNDArrayFlagBackpropSet
    layer.check()
    for name, change in (("size", 5), ("stride", 2)):
        getattr(layer.in_delta, name)[0], before = change, getattr(layer.in_delta, name)[0]
        assert layer.call() == -1
        assert "in_delta" in (bnns.last_error() or "")
        getattr(layer.in_delta, name)[0] = before
        layer.check()
    layer.gamma_delta, dgamma = None, layer.dgamma.copy()
    layer.dgamma[...] = 7
    layer.check()
    assert (layer.dgamma == 7).all()
    layer.gamma_delta = describe(layer.dgamma)
    layer.check()
    assert np.array_equal(layer.dgamma, dgamma)


@pytest.mark.parametrize("name", ["in_delta", "gamma_delta"])
def test_a_gradient_made_read_only_and_writable_again(name: str) -> None:
    layer = Backward()
    layer.check()
    array = getattr(layer, name).data
    for _ in range(2):
        before = array.copy()
        array.flags.writeable = False
        layer.dy += 1
        assert layer.call() == -1
        assert f"{name}.data is read-only" in (bnns.last_error() or "")
        assert np.array_equal(array, before)
        array.flags.writeable = True
        layer.check()


def test_a_descriptor_that_is_part_of_a_structure() -> None:
    layer = Backward()
    part = bnns.BNNSLayerParametersNormalization(gamma_desc=describe(layer.dgamma))
    layer.gamma_delta = part.gamma_desc
    layer.check()
    part.gamma_desc.data = np.zeros(6, np.float32)
    layer.check()
    part.gamma_desc = describe(np.zeros(6, np.float32))
    layer.check()  # the old part, which is still there
    layer.gamma_delta = part.gamma_desc
    layer.check()


def test_new_descriptors_in_the_place_of_old_ones() -> None:
    layer = Backward()
    for seed in range(50):
        layer.out_delta = layer.in_delta = None
        layer.out_delta, layer.in_delta = layer.samples(normal(8, 6, seed=seed)), layer.samples(normal(8, 6))
        layer.check()


def test_descriptors_shared_by_two_filters() -> None:
    one, other = Backward(), Backward()
    other.gamma *= 3
    other.forward(4)
    other.out_delta, other.in_delta, other.gamma_delta = one.out_delta, one.in_delta, one.gamma_delta
    for _ in range(2):
        one.check()
        other.check()
    bnns.BNNSFilterDestroy(one.filter)
    assert one.call() == -1
    other.check()


def test_nothing_keeps_the_arrays_of_a_backward_call_alive() -> None:
    gc.disable()
    try:
        layer = Backward()
        layer.check()
        ends = [weakref.ref(array) for array in (layer.dx, layer.dy, layer.dgamma)]
        del layer.dx, layer.dy, layer.dgamma, layer.in_delta, layer.gamma_delta
        layer.out_delta.data = None
        assert [end() for end in ends] == [None] * 3
    finally:
        gc.enable()


def test_a_filter_shared_by_two_threads() -> None:
    """Each with descriptors of its own, and one descriptor that both use and one of them changes."""
    layer, failures = Backward(), []
    wanted = {}
    for batch_dy in (1, 2):
        wanted[batch_dy] = rg.batch_norm_backward(normal(4, 6, seed=batch_dy), layer.cache).dx
    shared = layer.samples(normal(4, 6, seed=1))

    def use(number: int) -> None:
        try:
            dx = np.zeros((4, 6), np.float32)
            own, result = layer.samples(normal(4, 6, seed=number)), layer.samples(dx)
            for step in range(300):
                if number == 1 and step % 3 == 0:
                    shared.flags = step % 2
                for dy, want in ((own, wanted[number]), (shared, wanted[1])):
                    status = bnns.BNNSNormalizationFilterApplyBackwardBatch(
                        layer.filter, 4, result, 6, None, 6, dy, 6, None, None
                    )
                    assert status == 0, bnns.last_error()
                    assert np.array_equal(dx, want)  # type: ignore[arg-type]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures


# ---- BNNS: LSTM ------------------------------------------------------------------------------------------------------

GATES = ("input_gate", "forget_gate", "candidate_gate", "output_gate")


def lstm_layer(x: Array, y: Array, seed: int) -> Any:
    steps, samples, inputs = x.shape
    units = y.shape[-1]
    layer = bnns.BNNSLayerParametersLSTM(
        inputs, units, samples, 1, steps, lstm_flags=bnns.BNNSLayerFlagsLSTMDefaultActivations
    )
    layer.input_descriptor.data_desc = describe(x, bnns.BNNSDataLayoutSNE)
    layer.output_descriptor.data_desc = describe(y, bnns.BNNSDataLayoutSNE)
    for number, name in enumerate(GATES):
        gate = getattr(layer, name)
        gate.iw_desc[0] = describe(normal(units, inputs, seed=seed + number))
        gate.hw_desc = describe(normal(units, units, seed=seed + 10 + number))
    return layer


class Lstm:
    """3 steps of 2 samples, 4 inputs, 5 units."""

    def __init__(self) -> None:
        self.params = lstm_layer(normal(3, 2, 4), np.zeros((3, 2, 5), np.float32), 20)
        self.deltas = lstm_layer(np.zeros((3, 2, 4), np.float32), normal(3, 2, 5, seed=1), 40)
        self.capacity = bnns.BNNSComputeLSTMTrainingCacheCapacity(self.params)
        self.cache = bytearray(self.capacity)

    def forward(self) -> int:
        return bnns.BNNSDirectApplyLSTMBatchTrainingCaching(self.params, None, self.cache, self.capacity)

    def backward(self) -> int:
        return bnns.BNNSDirectApplyLSTMBatchBackward(self.params, self.deltas, None, self.cache, self.capacity)

    def check(self) -> None:
        """Both passes do what the array functions do with what the structures point to now."""
        assert self.forward() == 0, bnns.last_error()
        assert self.backward() == 0, bnns.last_error()
        gates, dgates = ([getattr(p, gate) for gate in GATES] for p in (self.params, self.deltas))
        weights = rg.LstmWeights(tuple(g.iw_desc[0].data for g in gates), tuple(g.hw_desc.data for g in gates))
        x, y = self.params.input_descriptor.data_desc.data, self.params.output_descriptor.data_desc.data
        want = rg.lstm_forward(x, weights)
        assert np.array_equal(y, want.y)
        gradients = rg.lstm_backward(self.deltas.output_descriptor.data_desc.data, want.cache)  # type: ignore[arg-type]
        assert np.array_equal(self.deltas.input_descriptor.data_desc.data, gradients.dx)  # type: ignore[arg-type]
        dw: Any = gradients.dweights
        dw = dw[0] if isinstance(dw, list) else dw
        for number, gate in enumerate(dgates):
            wx, wh = (np.split(part, 4)[number] if isinstance(part, np.ndarray) else part[number] for part in dw[:2])
            assert np.array_equal(gate.iw_desc[0].data, wx)
            assert np.array_equal(gate.hw_desc.data, wh)


def replace_data(descriptor: Any) -> None:
    descriptor.data = normal(*descriptor.data.shape, seed=77)


LSTM_CHANGES: dict[str, Callable[[Lstm], None]] = {
    "nothing": lambda layer: None,
    "the input": lambda layer: replace_data(layer.params.input_descriptor.data_desc),
    "the output": lambda layer: replace_data(layer.params.output_descriptor.data_desc),
    "weights in an array of descriptors": lambda layer: replace_data(layer.params.forget_gate.iw_desc[0]),
    "recurrent weights": lambda layer: replace_data(layer.params.output_gate.hw_desc),
    "a descriptor of weights": lambda layer: setattr(
        layer.params.input_gate, "hw_desc", describe(normal(5, 5, seed=78))
    ),
    "a gate": lambda layer: setattr(layer.params, "input_gate", layer.params.forget_gate),
    "values in the weights": lambda layer: layer.params.input_gate.hw_desc.data.__imul__(2),
    "the incoming gradient": lambda layer: replace_data(layer.deltas.output_descriptor.data_desc),
    "a gradient of weights": lambda layer: replace_data(layer.deltas.candidate_gate.iw_desc[0]),
    "the structure of the layer": lambda layer: setattr(layer, "params", layer.params.copy()),
    "the structure of the gradients": lambda layer: setattr(layer, "deltas", layer.deltas.copy()),
}


@pytest.mark.parametrize("change", LSTM_CHANGES)
def test_a_change_of_an_lstm(change: str) -> None:
    layer = Lstm()
    layer.check()
    LSTM_CHANGES[change](layer)
    layer.check()
    layer.check()


def test_another_number_of_steps() -> None:
    layer, x = Lstm(), normal(3, 2, 4)
    layer.check()
    for params, width in ((layer.params, 5), (layer.deltas, 4)):
        params.seq_len = 2
        side = params.output_descriptor if params is layer.params else params.input_descriptor
        side.data_desc = describe(np.zeros((2, 2, width), np.float32), bnns.BNNSDataLayoutSNE)
    layer.params.input_descriptor.data_desc = describe(x[:2].copy(), bnns.BNNSDataLayoutSNE)
    layer.deltas.output_descriptor.data_desc = describe(normal(2, 2, 5), bnns.BNNSDataLayoutSNE)
    layer.check()


@pytest.mark.parametrize("which", ["y", "dx", "dw"])
def test_a_result_of_an_lstm_made_read_only(which: str) -> None:
    layer = Lstm()
    layer.check()
    descriptor, call = {
        "y": (layer.params.output_descriptor.data_desc, layer.forward),
        "dx": (layer.deltas.input_descriptor.data_desc, layer.backward),
        "dw": (layer.deltas.input_gate.iw_desc[0], layer.backward),
    }[which]
    before = descriptor.data.copy()
    descriptor.data.flags.writeable = False
    layer.params.input_descriptor.data_desc.data[...] += 1
    assert call() == -1
    assert "read-only" in (bnns.last_error() or "")
    assert np.array_equal(descriptor.data, before)
    descriptor.data.flags.writeable = True
    layer.check()


def test_an_input_of_an_lstm_may_become_read_only() -> None:
    layer = Lstm()
    layer.check()
    layer.params.input_descriptor.data_desc.data.flags.writeable = False
    layer.check()


# ---- BNNS: optimizer -------------------------------------------------------------------------------------------------


class Sgd:
    """Two parameters, updated by their gradients at a rate of 1/2."""

    def __init__(self) -> None:
        self.fields = bnns.BNNSOptimizerSGDMomentumFields(learning_rate=0.5, gradient_scale=1)
        self.parameters = [describe(normal(3)), describe(normal(2, 2))]
        self.gradients = [describe(normal(3, seed=1)), describe(normal(2, 2, seed=2))]

    def call(self, count: int = 2) -> int:
        return bnns.BNNSOptimizerStep(
            bnns.BNNSOptimizerFunctionSGDMomentum, self.fields, count, self.parameters, self.gradients, None
        )

    def check(self, count: int = 2) -> None:
        before = [p.data.copy() for p in self.parameters]
        rate = self.fields.learning_rate
        assert self.call(count) == 0, bnns.last_error()
        for k, (parameter, gradient) in enumerate(zip(self.parameters, self.gradients, strict=True)):
            want = before[k] - np.float32(rate) * gradient.data if k < count else before[k]
            np.testing.assert_allclose(parameter.data, want, rtol=1e-6)


def test_changes_between_the_steps_of_an_optimizer() -> None:
    sgd = Sgd()
    for count in (2, 2, 1, 2):
        sgd.check(count)
    sgd.fields.learning_rate = 0.25
    sgd.check()
    sgd.gradients[1].data = normal(2, 2, seed=5)
    sgd.check()
    sgd.parameters[1] = describe(normal(2, 2, seed=6))
    sgd.check()
    sgd.parameters.reverse()
    sgd.gradients.reverse()
    sgd.check()
    sgd.gradients[0].size[0] = 3
    assert sgd.call() == -1
    sgd.gradients[0].size[0] = 2
    sgd.check()
    array = sgd.parameters[1].data
    before = array.copy()
    array.flags.writeable = False
    assert sgd.call() == -1
    assert "parameters[1].data is read-only" in (bnns.last_error() or "")
    assert np.array_equal(array, before)
    array.flags.writeable = True
    sgd.check()
    sgd.gradients[0] = None  # type: ignore[call-overload]
    assert sgd.call() == -1


# ---- MPS -------------------------------------------------------------------------------------------------------------

DEVICE = mps.MTLCreateSystemDefaultDevice()


def matrix(array: Array) -> mps.MPSMatrix:
    rows, columns = array.shape
    descriptor = mps.MPSMatrixDescriptor(
        rows=rows, columns=columns, rowBytes=4 * columns, dataType=mps.MPSDataType.float32
    )
    return mps.MPSMatrix(buffer=DEVICE.makeBuffer(bytesNoCopy=array), descriptor=descriptor)


def vector(value: float) -> mps.MPSVector:
    descriptor = mps.MPSVectorDescriptor(length=5, dataType=mps.MPSDataType.float32)
    return mps.MPSVector(buffer=DEVICE.makeBuffer(bytes=np.full(5, value, np.float32)), descriptor=descriptor)


def run(kernel: mps.MPSMatrixBatchNormalization, *operands: Any) -> None:
    buffer = DEVICE.makeCommandQueue().makeCommandBuffer()
    kernel.encode(buffer, *operands)
    buffer.commit()
    buffer.waitUntilCompleted()
    assert buffer.error is None


def test_new_operands_in_the_place_of_old_ones() -> None:
    kernel = mps.MPSMatrixBatchNormalization(device=DEVICE)
    kernel.epsilon = 0
    mean, variance = vector(0), vector(1)
    for seed in range(50):
        x, y = normal(3, 5, seed=seed), np.zeros((3, 5), np.float32)
        run(kernel, matrix(x), mean, variance, None, vector(seed), matrix(y))
        assert np.array_equal(y, x + np.float32(seed))


def test_one_other_operand_or_member() -> None:
    kernel = mps.MPSMatrixBatchNormalization(device=DEVICE)
    kernel.epsilon = 0
    x, y = normal(3, 5), np.zeros((3, 5), np.float32)
    operands = [matrix(x), vector(0), vector(1), None, None, matrix(y)]
    run(kernel, *operands)
    assert np.array_equal(y, x)
    for position, other, want in ((4, vector(2), x + 2), (1, vector(1), x - 1 + 2), (4, None, x - 1)):
        operands[position] = other
        run(kernel, *operands)
        np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
    twin = kernel.copy()
    twin.setNeuronType(mps.MPSCNNNeuronType.absolute)
    run(twin, *operands)
    np.testing.assert_allclose(y, abs(x - 1), rtol=1e-6, atol=1e-6)
    run(kernel, *operands)
    np.testing.assert_allclose(y, x - 1, rtol=1e-6, atol=1e-6)
    operands[5] = None
    with pytest.raises(TypeError, match="resultMatrix is missing"):
        run(kernel, *operands)


def test_a_buffer_with_a_deallocator_is_not_kept_by_a_kernel() -> None:
    gc.disable()
    try:
        kernel, released = mps.MPSMatrixBatchNormalization(device=DEVICE), []
        x, y = normal(3, 5), np.zeros((3, 5), np.float32)
        buffer = DEVICE.makeBuffer(bytesNoCopy=x, deallocator=lambda memory, length: released.append(length))
        descriptor = mps.MPSMatrixDescriptor(rows=3, columns=5, rowBytes=20, dataType=mps.MPSDataType.float32)
        source = mps.MPSMatrix(buffer=buffer, descriptor=descriptor)
        for _ in range(2):
            run(kernel, source, vector(0), vector(1), None, None, matrix(y))
        assert not released
        del source, buffer
        assert released == [60]
    finally:
        gc.enable()
