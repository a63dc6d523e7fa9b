"""Random and mutated kernels, descriptors, buffers and archives against retrograd.mps.

Whatever is asked for, a call either does it or raises one of the exceptions that docs/mps.md names, before anything has
changed. Buffers lie between guards that are compared after every call. What is done is compared with the oracle, and
nothing outside the window of a result may change. A failure prints the seed that repeats it:

    python tests/fuzz_mps.py --count 500000 --jobs 2
    python tests/fuzz_mps.py --seed 1234 --count 1
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrograd import mps
from retrograd.lab import reference
from retrograd.mps import MPSCNNNeuronType, MPSDataType
from support.fuzz_driver import FLOATS, INTEGERS, STRANGE, Broken, Memory, main, timed
from support.mps_rnn import CREATE, GATES, Source, descriptor, layer, random_weights
from support.mps_rnn import member as source_member

REFUSALS = (TypeError, ValueError, RuntimeError)
DEVICE = mps.MTLCreateSystemDefaultDevice()
QUEUE = DEVICE.makeCommandQueue()
DTYPES = {np.dtype(np.float32): MPSDataType.float32, np.dtype(np.float16): MPSDataType.float16}
WRONG_TYPES = [np.float64, np.int64, np.int32, np.int16, np.uint8, np.dtype(">f4"), np.bool_]
LARGEST = 1 << 20  # bytes of memory that a case may ask for
# The oracle's name of a neuron, and which of its parameters a, b, c are alpha and beta. Those without one are run, too.
NEURONS = {
    MPSCNNNeuronType.none: ("identity", ""),
    MPSCNNNeuronType.reLU: ("leaky_relu", "a"),
    MPSCNNNeuronType.linear: ("linear_with_bias", "ab"),
    MPSCNNNeuronType.sigmoid: ("sigmoid", ""),
    MPSCNNNeuronType.tanH: ("scaled_tanh", "ab"),
    MPSCNNNeuronType.absolute: ("abs", ""),
    MPSCNNNeuronType.softPlus: ("softplus", "ab"),
    MPSCNNNeuronType.softSign: ("softsign", ""),
    MPSCNNNeuronType.elu: ("elu", "a"),
    MPSCNNNeuronType.geLU: ("gelu", ""),
}


class Refused(Exception):
    """A call has raised what it may raise."""


def attempt(tally: Counter[str], memory: Memory, name: str, call: Callable[[], Any]) -> Any:
    """What a call returns; Refused if it raises as it may, with all buffers as they were."""
    before = memory.state()
    try:
        with np.errstate(all="ignore"), timed(name):
            answer = call()
    except REFUSALS as error:
        if not str(error):
            raise Broken(f"{name} gave no reason") from error
        memory.check_guards()
        if memory.state() != before:
            raise Broken(f"{name} was refused and has changed a buffer: {error}") from error
        tally[f"{name} refused"] += 1
        raise Refused from error
    tally[f"{name} done"] += 1
    memory.check_guards()
    return answer


# ---- operands --------------------------------------------------------------------------------------------------------


@dataclass
class Operand:
    """A matrix or a vector before it is made: everything in `fields` may be mutated."""

    kind: str  # "Matrix" or "Vector"
    array: np.ndarray  # the memory, flat
    fields: dict[str, Any]
    made: Any = None

    def make(self, tally: Counter[str], memory: Memory) -> None:
        fields = dict(self.fields)
        source, offset, place = fields.pop("source"), fields.pop("offset"), fields.pop("place")
        described = attempt(
            tally, memory, f"MPS{self.kind}Descriptor", lambda: getattr(mps, f"MPS{self.kind}Descriptor")(**fields)
        )
        cls = getattr(mps, f"MPS{self.kind}")
        if place == "device":
            shape, strides = described._layout("")
            if sum(n * s for n, s in zip(shape, strides, strict=True)) > LARGEST:
                raise Refused
            self.made = attempt(tally, memory, cls.__name__, lambda: cls(device=DEVICE, descriptor=described))
            return
        buffer = attempt(tally, memory, "makeBuffer", lambda: DEVICE.makeBuffer(**{place: source}))
        self.made = attempt(
            tally, memory, cls.__name__, lambda: cls(buffer=buffer, offset=offset, descriptor=described)
        )
        self.check(buffer, described)

    def check(self, buffer: Any, described: Any) -> None:
        """Every element lies in the buffer, where the descriptor says."""
        elements = self.made._elements()
        shape, strides = described._layout("")
        if elements.shape != shape or not elements.size:
            return
        low, high = np.lib.array_utils.byte_bounds(elements)
        if low < buffer._address or high > buffer._address + buffer.length:
            raise Broken(f"{self.made!r} leaves its buffer")
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + self.made.offset
        if high - buffer._address != last + elements.itemsize:
            raise Broken(f"the last element of {self.made!r} is not where its descriptor says")


def matrix(random: np.random.Generator, memory: Memory, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> Operand:
    matrices, rows, columns = shape
    row = columns + int(random.integers(0, 3))
    whole = row * (rows + int(random.integers(0, 2)))
    first = int(random.integers(0, 3))
    array = memory.take(first + matrices * whole, dtype)
    size = dtype.itemsize
    fields = {
        "rows": rows, "columns": columns, "matrices": matrices, "rowBytes": row * size, "matrixBytes": whole * size,
        "dataType": int(DTYPES[dtype]), "offset": first * size, "source": array, "place": place(random),
    }  # fmt: skip
    return Operand("Matrix", array, fields)


def vector(random: np.random.Generator, memory: Memory, shape: tuple[int, int], dtype: np.dtype[Any]) -> Operand:
    vectors, length = shape
    step = length + int(random.integers(0, 3))
    array = memory.take(vectors * step, dtype)
    fields = {
        "length": length, "vectors": vectors, "vectorBytes": step * dtype.itemsize, "dataType": int(DTYPES[dtype]),
        "offset": 0, "source": array, "place": place(random),
    }  # fmt: skip
    return Operand("Vector", array, fields)


def place(random: np.random.Generator) -> str:
    return str(random.choice(["bytesNoCopy"] * 8 + ["bytes", "device"]))


# ---- mutation --------------------------------------------------------------------------------------------------------


def mutate(random: np.random.Generator, memory: Memory, owners: list[dict[str, Any]]) -> None:
    places = [(owner, key) for owner in owners for key in owner if key != "place"]
    for _ in range(int(random.choice([0, 0, 1, 1, 1, 2, 3]))):
        owner, key = places[random.integers(len(places))]
        owner[key] = new_value(random, memory, key, owner[key])


def new_value(random: np.random.Generator, memory: Memory, key: str, old: Any) -> Any:
    def one_of(values: list[Any]) -> Any:
        return values[random.integers(len(values))]

    kind = random.random()
    if kind < 0.06:
        return one_of([*STRANGE, np.zeros((2, 2), np.float32, order="F")])
    if key == "source":
        array = one_of(memory.buffers)
        if kind < 0.25:
            return memoryview(array).cast("B")  # raw: it holds any type
        if kind < 0.4:
            return one_of([bytes(400), bytearray(400), memoryview(bytearray(800))[::2], 4096, array.ctypes])
        if kind < 0.55:
            return array[:: int(random.choice([-1, 2]))]
        if kind < 0.75:
            wrong = np.dtype(one_of(WRONG_TYPES))
            return array[: array.size // 8 * 8].view(np.uint8).view(wrong)
        if kind < 0.8:
            return np.ma.masked_array(array)
        return array
    if key == "dataType":
        return one_of([*map(int, MPSDataType), 0x10000040, 3])
    if key.endswith("Origin"):
        return tuple(one_of([0, 0, 1, 2, *INTEGERS]) for _ in range(3))
    if key in ("epsilon", "a", "b", "c"):
        return one_of(FLOATS)
    if key == "neuron":
        return one_of(list(range(-1, 18)))
    if isinstance(old, bool):
        return one_of([True, False, 0, 1, 2])
    return one_of(INTEGERS) if kind < 0.6 else int(random.integers(0, 9))


# ---- kernels ---------------------------------------------------------------------------------------------------------


def kernel(random: np.random.Generator, memory: Memory, tally: Counter[str]) -> None:
    gradient = bool(random.random() < 0.5)
    dtype = np.dtype(np.float32 if random.random() < 0.7 else np.float16)
    vectors = dtype if random.random() < 0.5 else np.dtype(np.float32)
    matrices, rows, columns = (int(random.integers(1, n)) for n in (4, 8, 8))
    count = matrices if random.random() < 0.7 else 1

    def window(extra: int) -> Operand:
        return matrix(random, memory, (matrices, rows + extra, columns + extra), dtype)

    def parameter(present: float) -> Operand | None:
        return vector(random, memory, (count, columns), vectors) if random.random() < present else None

    x = window(0)
    result = x if random.random() < 0.1 else window(int(random.integers(0, 3)))
    members = {
        "resultMatrixOrigin": (0, 0, 0),
        "batchStart": 0,
        "batchSize": mps.NSUIntegerMax,
        "sourceNumberOfFeatureVectors": mps.NSUIntegerMax,
        "sourceInputFeatureChannels": mps.NSUIntegerMax,
        "epsilon": 0.01,
    }
    operands: list[Operand | None]
    mean, variance = parameter(1.0), parameter(1.0)
    assert variance is not None
    variance.array[:] = np.abs(variance.array) + dtype.type(0.5)
    if gradient:
        dy = result if random.random() < 0.1 else window(int(random.integers(0, 3)))
        operands = [dy, x, mean, variance, parameter(0.6), parameter(0.6), result, parameter(0.6), parameter(0.6)]
        members |= {"primarySourceMatrixOrigin": (0, 0, 0), "secondarySourceMatrixOrigin": (0, 0, 0)}
        members["gradientThroughStatistics"] = bool(random.random() < 0.8)
        name = "MPSMatrixBatchNormalizationGradient"
    else:
        operands = [x, mean, variance, parameter(0.6), parameter(0.6), result]
        members |= {"sourceMatrixOrigin": (0, 0, 0), "computeStatistics": bool(random.random() < 0.5)}
        name = "MPSMatrixBatchNormalization"
    neuron = {"neuron": int(random.choice(list(NEURONS))), "a": 0.5, "b": 0.25, "c": 1.5}
    given = [operand for operand in operands if operand is not None]
    mutate(random, memory, [members, neuron, *(operand.fields for operand in given)])
    made = getattr(mps, name)(device=DEVICE)
    for member, value in members.items():
        attempt(tally, memory, "a member", lambda m=member, v=value: setattr(made, m, v))  # type: ignore[misc]
    attempt(
        tally, memory, "setNeuronType",
        lambda: made.setNeuronType(neuron["neuron"], neuron["a"], neuron["b"], neuron["c"]),
    )  # fmt: skip
    for operand in given:
        if operand.made is None:
            operand.make(tally, memory)
    results = (6, 7, 8) if gradient else (5, 1, 2) if made.computeStatistics else (5,)
    storages = [None if operand is None else operand.made for operand in operands]
    if random.random() < 0.03:
        storages[random.integers(len(storages))] = None
    commands = QUEUE.makeCommandBuffer()
    attempt(tally, memory, f"{name}.encode", lambda: made.encode(commands, *storages))
    before = [None if one is None else one._elements().copy() for one in storages]
    state = memory.state()
    expected = oracle(made, gradient, storages, before)
    with np.errstate(all="ignore"), timed(name):
        commands.commit()
        commands.waitUntilCompleted()
    memory.check_guards()
    if commands.status != mps.MTLCommandBufferStatus.completed:
        raise Broken(f"{name} was accepted and failed: {commands.error}")
    check_results(made, storages, before, results, expected, tally)
    check_others(memory, state, [storages[k] for k in results if storages[k] is not None])


def windows(made: Any, gradient: bool, storages: list[Any]) -> dict[int, tuple[slice, ...]]:
    """What of each operand the kernel uses, by the rules of the documentation."""
    names = ("primarySource", "secondarySource") if gradient else ("source",)
    source = storages[1 if gradient else 0]
    origin = getattr(made, f"{names[-1]}MatrixOrigin")
    rows = min(made.sourceNumberOfFeatureVectors, source.rows - origin[0])
    columns = min(made.sourceInputFeatureChannels, source.columns - origin[1])
    found: dict[int, tuple[slice, ...]] = {}
    matrices = {0: names[0], 1: names[-1], 6: "result"} if gradient else {0: names[0], 5: "result"}
    available = min(storages[k].matrices for k in matrices)
    stop = min(available, made.batchStart + min(made.batchSize, available))
    for k, storage in enumerate(storages):
        if k in matrices:
            row, column, _ = getattr(made, f"{matrices[k]}MatrixOrigin")
            found[k] = (slice(made.batchStart, stop), slice(row, row + rows), slice(column, column + columns))
        elif storage is not None:
            several = (
                slice(made.batchStart, stop) if storage.vectors > 1 else slice(0, 1 if stop > made.batchStart else 0)
            )
            found[k] = (several, slice(0, columns))
    return found


def oracle(made: Any, gradient: bool, storages: list[Any], arrays: list[Any]) -> dict[int, np.ndarray] | None:
    """Results by operand, in float64; None where the oracle does not have the function or arithmetic is extreme."""
    name, used = NEURONS.get(made.neuronType(), (None, ""))
    given = {"a": made.neuronParameterA(), "b": made.neuronParameterB(), "c": made.neuronParameterC()}
    if name is None or not 1e-3 <= made.epsilon <= 10 or not all(abs(value) < 10 for value in given.values()):
        return None
    if name == "softplus" and not given["a"] * given["b"]:
        return None
    alpha, beta_ = ([given[key] for key in used] + [0.0, 0.0])[:2]
    form = {"kind": "batch", "eps": made.epsilon, "activation": name, "alpha": alpha, "act_beta": beta_}
    place = windows(made, gradient, storages)
    parts = [None if a is None else a[place[k]].astype(np.float64) for k, a in enumerate(arrays)]
    dy, x, mean, var, gamma, beta = parts[:6] if gradient else (None, *parts[:5])
    assert x is not None
    found: dict[int, list[Any]] = {6: [], 7: [], 8: []} if gradient else {5: [], 1: [], 2: []}
    for k in range(len(x)):
        p = [None if v is None else v[k if len(v) > 1 else 0] for v in (mean, var, gamma, beta)]
        data = [x[k], *p] if dy is None else [x[k], dy[k], *p]
        if (p[1] < 0).any() or any(v is not None and not (np.abs(v) < 100).all() for v in data):
            return None
        if gradient:
            assert dy is not None
            back = reference.norm_backward(
                dy[k], x[k], None, p[2], p[3], mean=p[0], var=p[1], slope_from="input",
                frozen=not made.gradientThroughStatistics, **form,
            )  # fmt: skip
            for number, value in zip((6, 7, 8), (back.dx, back.dgamma, back.dbeta), strict=True):
                found[number].append(value)
        else:
            own = made.computeStatistics
            forward = reference.norm_forward(
                x[k], p[2], p[3], mean=None if own else p[0], var=None if own else p[1], **form
            )
            for number, value in zip((5, 1, 2), (forward.y, forward.mean, forward.var), strict=True):
                found[number].append(np.asarray(value).reshape(np.shape(value)[-2:] if number == 5 else -1))
    results = {number: np.array(values) for number, values in found.items() if values}
    for number, values in results.items():
        storage = storages[number]
        if storage is not None and values.ndim == 2 and storage.vectors == 1:  # shared: it receives the sum
            results[number] = values.sum(axis=0, keepdims=True)
    return results


def check_results(
    made: Any, storages: list[Any], before: list[Any], results: tuple[int, ...], expected: Any, tally: Counter[str]
) -> None:
    place = windows(made, isinstance(made, mps.MPSMatrixBatchNormalizationGradient), storages)
    for k in results:
        if storages[k] is None:
            continue
        now = storages[k]._elements()
        if expected is not None and k in expected:
            got, want = now[place[k]].astype(np.float64), expected[k]
            close = 0.02 if now.dtype == np.float16 or storages[0]._elements().dtype == np.float16 else 1e-3
            scale = close * (1 + np.abs(want).max(initial=0))
            if got.shape != want.shape or not np.allclose(got, want, rtol=close, atol=scale):
                raise Broken(f"operand {k} is {got}, expected {want}")
            tally["compared with the oracle"] += 1
        # Outside of its window nothing has changed, unless another result lies there.
        if any(
            np.may_share_memory(now, storages[n]._elements()) for n in results if n != k and storages[n] is not None
        ):
            continue
        outside = np.ones(now.shape, bool)
        outside[place[k]] = False
        if now[outside].tobytes() != before[k][outside].tobytes():
            raise Broken(f"operand {k} has changed outside of its window")


def check_others(memory: Memory, state: list[bytes], results: list[Any]) -> None:
    """Buffers that no result lies in are as they were."""
    for buffer, old in zip(memory.buffers, state, strict=True):
        written = any(np.may_share_memory(buffer, result._elements()) for result in results)
        if not written and buffer.tobytes() != old:
            raise Broken("a call has changed an operand that it only reads")


# ---- recurrent layers ------------------------------------------------------------------------------------------------

LETTERS = {"rnn": "h", "gru": "rzn", "lstm": "ifgo"}
ENDINGS = {"wx": "InputWeights", "wh": "RecurrentWeights", "peephole": "MemoryWeights", "b": "BiasTerms"}
RNN_LISTS = ("sourceMatrices", "destinationMatrices", "sourceGradients", "destinationGradients")


def recurrent(random: np.random.Generator, memory: Memory, tally: Counter[str]) -> None:
    """A layer, its forward pass and its gradients."""
    kind = str(random.choice(["rnn", "gru", "lstm"]))
    units, inputs = (int(n) for n in random.integers(1, 6, 2))
    rows = sorted((int(n) for n in random.integers(1, 5, random.integers(1, 5))), reverse=True)
    dtype = np.dtype(np.float32 if random.random() < 0.7 else np.float16)
    members: dict[str, Any] = {
        "useFloat32Weights": bool(random.random() < 0.7),
        "useLayerInputUnitTransformMode": bool(random.random() < 0.1),
    }
    if members["useLayerInputUnitTransformMode"]:
        inputs = units
    if kind == "gru":
        members |= {"flipOutputGates": bool(random.random() < 0.5), "gatePnormValue": 1.0}
    diagonal = kind == "lstm" and bool(random.random() < 0.5)
    if diagonal:
        members["memoryWeightsAreDiagonal"] = True
    for prefix, _, neuron, _ in GATES[kind]:
        shapes: dict[str, tuple[int, ...]] = {"InputWeights": (units, inputs), "RecurrentWeights": (units, units)}
        if kind == "lstm" and random.random() < 0.4:
            shapes["MemoryWeights"] = (units,) if diagonal else (units, units)
        for ending, shape in shapes.items():
            if ending == "InputWeights" or random.random() < 0.9:
                bias = memory.take(units) if ending == "InputWeights" and random.random() < 0.8 else None
                members[source_member(prefix, ending)] = Source(
                    memory.take(math.prod(shape)).reshape(shape), bias, neuron
                )
    lists = {
        name: [matrix(random, memory, (1, count, inputs if name in RNN_LISTS[::3] else units), dtype) for count in rows]
        for name in RNN_LISTS
    }
    flags = {
        name: bool(random.random() < 0.4)
        for name in ("storeAllIntermediateStates", "accumulateWeightGradients", "recurrentOutputIsTemporary")
    }
    channels = {"inputFeatureChannels": inputs, "outputFeatureChannels": units}
    mutate(random, memory, [members, flags, channels, *(one.fields for given in lists.values() for one in given)])
    described = CREATE[kind](1, 1)
    for name, value in (channels | members).items():
        attempt(tally, memory, "a descriptor", lambda n=name, v=value: setattr(described, n, v))  # type: ignore[misc]
    weights: list[Any] = []
    made = attempt(
        tally, memory, "MPSRNNMatrixTrainingLayer",
        lambda: mps.MPSRNNMatrixTrainingLayer(DEVICE, described, weights),
    )  # fmt: skip
    for name, value in flags.items():
        attempt(tally, memory, "a member", lambda n=name, v=value: setattr(made, n, v))  # type: ignore[misc]
    for given in lists.values():
        for one in given:
            one.make(tally, memory)
    x, y, dy, dx = ([one.made for one in given] for given in lists.values())
    if random.random() < 0.05:
        del x[random.integers(len(x))]
    offsets = None
    if random.random() < 0.2:
        offsets = [int(random.choice([0, 0, 0, dtype.itemsize, 1, 64])) for _ in x]
    training: list[Any] = []
    states: list[Any] = []
    gradients: list[Any] = []
    dweights: list[Any] = []
    data_type = MPSDataType.float32 if random.random() < 0.7 else MPSDataType.float16
    made.createWeightGradientMatrices(dweights, data_type)
    for one in dweights:
        one._elements()[0] = 1
    commands = QUEUE.makeCommandBuffer()
    attempt(
        tally, memory, "encodeForwardSequence",
        lambda: made.encodeForwardSequence(commands, x, offsets, y, None, training, None, states, weights),
    )  # fmt: skip
    attempt(
        tally, memory, "encodeGradientSequence",
        lambda: made.encodeGradientSequence(
            commands, x, offsets, dy, None, dx, None, dweights, training, None, gradients, weights
        ),
    )  # fmt: skip
    state = memory.state()
    expected = recurrent_oracle(kind, made, weights, x, offsets, dy)
    # Two encodes may share memory: the second then reads or overwrites the results of the first.
    if any(np.may_share_memory(a._elements(), b._elements()) for a in y for b in (*dy, *dx)):
        expected = None
    with np.errstate(all="ignore"), timed("a recurrent layer"):
        commands.commit()
        commands.waitUntilCompleted()
    memory.check_guards()
    if commands.status != mps.MTLCommandBufferStatus.completed:
        raise Broken(f"a recurrent layer was accepted and failed: {commands.error}")
    check_others(memory, state, [*y, *dx])
    if expected is not None:
        half = any(one.dataType == MPSDataType.float16 for one in (*x, *y, *dy, *dx, *dweights))
        found = {"y": y, "dx": dx, "dweights": dweights, "h": [states[-1].getRecurrentOutputMatrix(0)]}
        found["dh0"] = [gradients[0].getRecurrentOutputMatrix(0)]
        check_recurrent(found, expected, half)
        tally["a recurrent layer compared with the oracle"] += 1


def recurrent_oracle(
    kind: str, made: Any, weights: list[Any], x: list[Any], offsets: list[int] | None, dy: list[Any]
) -> dict[str, list[np.ndarray]] | None:
    """The results in float64; None where values are extreme."""
    cell = made._cell
    slots = cell.slots()
    parts: dict[str, dict[str, np.ndarray]] = {}
    for slot, one in zip(slots, weights, strict=True):
        parts.setdefault(slot.field, {})[slot.letter] = one._elements()[0].astype(np.float64)
    if cell.unit_transform:
        parts["wx"] = {letter: np.eye(cell.units) for letter in LETTERS[kind]}
    stacked = {}
    for field, by_gate in parts.items():
        values = [by_gate.get(letter, np.zeros(next(iter(by_gate.values())).shape)) for letter in LETTERS[kind]]
        is_vector = field == "b" or (field == "peephole" and cell.diagonal)
        stacked[field] = np.stack([value[0] if is_vector else value for value in values])
    record = {"rnn": reference.RnnCell, "gru": reference.GruCell, "lstm": reference.LstmCell}[kind](**stacked)
    rows = [one.rows for one in x]
    whole = np.zeros((len(x), rows[0], cell.inputs))
    slopes = np.zeros((len(x), rows[0], cell.units))
    for step, (one, slope) in enumerate(zip(x, dy, strict=True)):
        elements = one._elements()[0]
        if offsets is not None and offsets[step]:
            start = one.offset + offsets[step]
            elements = np.ndarray(elements.shape, elements.dtype, one.data._bytes, start, elements.strides)
        whole[step, : rows[step]] = elements
        slopes[step, : rows[step]] = slope._elements()[0]
    if not all((np.abs(value) < 20).all() for value in (whole, slopes, *stacked.values())):
        return None
    options: dict[str, Any] = {"active": reference.active_from_batch_sizes(rows, rows[0])}
    if kind == "gru":
        options |= {"kind": "before", "flip": cell.flip}
    neurons = cell.neurons
    if any(neuron[0] not in (MPSCNNNeuronType.sigmoid, MPSCNNNeuronType.tanH) for neuron in neurons):
        return None
    forward = getattr(reference, f"{kind}_forward")(whole, [record], **options)
    after = (None,) * (2 if kind == "lstm" else 1)
    back = getattr(reference, f"{kind}_backward")(slopes, *after, whole, [record], **options)
    base = 1 if made.accumulateWeightGradients else 0
    dweights = [
        np.atleast_2d(getattr(back.cells[0], slot.field)[LETTERS[kind].index(slot.letter)]) + base for slot in slots
    ]
    return {
        "y": [step[:count] for step, count in zip(forward.y, rows, strict=True)],
        "dx": [step[:count] for step, count in zip(back.dx, rows, strict=True)],
        "dweights": dweights,
        "h": [forward.hn[0]],
        "dh0": [back.dh0[0]],
    }


def check_recurrent(found: dict[str, list[Any]], expected: dict[str, list[np.ndarray]], half: bool) -> None:
    close = 0.03 if half else 1e-3
    for name, wanted in expected.items():
        for one, want in zip(found[name], wanted, strict=True):
            got = one._elements()[0].astype(np.float64)
            scale = close * (1 + np.abs(want).max(initial=0))
            if got.shape != want.shape or not np.allclose(got, want, rtol=close, atol=scale):
                raise Broken(f"{name} is {got}, expected {want}")


# ---- archives --------------------------------------------------------------------------------------------------------


def new_layer(random: np.random.Generator) -> Any:
    kind = str(random.choice(list(LETTERS)))
    return layer(descriptor(kind, random_weights(kind, 2, 3, "io" if kind == "lstm" else "")))[0]


def archive(random: np.random.Generator, memory: Memory, tally: Counter[str]) -> None:
    members: dict[str, Any] = {"epsilon": 0.5, "batchStart": 1, "resultMatrixOrigin": (1, 2, 0), "label": "name"}
    made: Any
    if random.random() < 0.3:
        made = new_layer(random)
        members = {"label": "name", "accumulateWeightGradients": True}
    elif random.random() < 0.5:
        made = mps.MPSMatrixBatchNormalization(device=DEVICE)
    else:
        made = mps.MPSMatrixBatchNormalizationGradient(device=DEVICE)
    cls = type(made)
    mutate(random, memory, [members])
    for member, value in members.items():
        attempt(tally, memory, "a member", lambda m=member, v=value: setattr(made, m, v))  # type: ignore[misc]
    data = bytearray(mps.NSKeyedArchiver.archivedData(made))
    changes = int(random.choice([0, 0, 1, 2, 8]))
    for _ in range(changes):
        kind = random.random()
        at = int(random.integers(len(data) or 1))
        if kind < 0.7 and data:
            data[at] = random.integers(256)
        elif kind < 0.85:
            del data[at:]
        else:
            data[at:at] = bytes(random.integers(0, 256, 4, np.uint8))
    restored = attempt(
        tally, memory, "unarchivedObject", lambda: mps.NSKeyedUnarchiver.unarchivedObject(cls, bytes(data))
    )
    if type(restored) is not cls:
        raise Broken(f"an archive made a {type(restored).__name__}")
    if not changes:
        for setting in cls._settings:
            old, new = getattr(made, setting.attribute), getattr(restored, setting.attribute)
            if old != new and not (old != old and new != new):
                raise Broken(f"{setting.name} was {old!r} and has come back as {new!r}")
    again = mps.NSKeyedArchiver.archivedData(restored)
    if mps.NSKeyedArchiver.archivedData(mps.NSKeyedUnarchiver.unarchivedObject(cls, again)) != again:
        raise Broken("an archive changes when it is read and written")


KINDS = [kernel, recurrent, kernel, archive]


def run(seed: int, tally: Counter[str]) -> None:
    random = np.random.default_rng(seed)
    memory = Memory(random)
    with contextlib.suppress(Refused):
        KINDS[seed % len(KINDS)](random, memory, tally)


if __name__ == "__main__":
    logging.getLogger("retrograd.mps").propagate = False
    sys.exit(main("retrograd.mps", run))
