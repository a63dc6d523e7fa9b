"""retrograd.mps: recurrent training layers against printed values, the array functions' bits and differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd import (
    GruWeights,
    LstmWeights,
    RnnWeights,
    gru_backward,
    gru_forward,
    lstm_backward,
    lstm_forward,
    rnn_backward,
    rnn_forward,
)
from retrograd.mps import MPSCNNNeuronType, MPSDataType, MPSRNNMatrixId, MPSRNNMatrixTrainingLayer
from support.arrays import Array, assert_same_bits
from support.mps import QUEUE, matrix
from support.mps_rnn import (
    GATES,
    Pass,
    cells,
    descriptor,
    forward,
    gradient,
    hidden,
    layer,
    random_weights,
    run,
    state_of,
    values_of,
)

KINDS = ("rnn", "gru", "lstm")


def fill(shape: tuple[int, ...], s: int, scale: float = 1.0) -> Array:
    k = np.arange(np.prod(shape))
    return (scale * ((7 * k + s) % 19 - 9) / 20).reshape(shape).astype(np.float32)


def checksum(*arrays: Array) -> float:
    """The sum of k * element k of the arrays one after another, counted from 1."""
    whole = np.concatenate([array.ravel() for array in arrays]).astype(np.float64)
    return float((np.arange(1, whole.size + 1) * whole).sum())


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.ravel(got), np.ravel(expected), rtol=2e-6, atol=2e-7)


def by_id(**given: Array) -> dict[MPSRNNMatrixId, Array]:
    return {MPSRNNMatrixId[name]: value for name, value in given.items()}


# ---- printed values --------------------------------------------------------------------------------------------------


def test_printed_gru() -> None:
    values = by_id(
        gruInputGateInputWeights=fill((2, 2), 2),
        gruInputGateRecurrentWeights=fill((2, 2), 11),
        gruInputGateBiasTerms=fill((2,), 3),
        gruRecurrentGateInputWeights=fill((2, 2), 9),
        gruRecurrentGateRecurrentWeights=fill((2, 2), 4),
        gruRecurrentGateBiasTerms=fill((2,), 8),
        gruOutputGateInputWeights=fill((2, 2), 14),
        gruOutputGateRecurrentWeights=fill((2, 2), 6),
        gruOutputGateBiasTerms=fill((2,), 12),
    )
    made, weights = layer(descriptor("gru", values))
    passed = forward(made, weights, list(fill((2, 2, 2), 1, 2)), state_of(made, weights, fill((2, 2), 5)))
    close(passed.y[1], [-0.1061109692, -0.1497163441, 0.0110995856, -0.3124217142])
    assert_same_bits(hidden(passed.states[0]), passed.y[1])
    after = state_of(made, weights, fill((2, 2), 9))
    found = gradient(made, weights, passed, list(fill((2, 2, 2), 4, 2)), after)
    close(hidden(found.states[0]), [-0.1467111046, 0.0019880800, 0.2071470682, -0.0555218848])
    close(
        [checksum(array) for array in found.dweights],
        [
            *(0.0682767362, 0.1010927705, -0.1170986494),
            *(-0.0090742146, 0.0015926801, -0.0044552692),
            *(-0.5356705400, -0.1382612644, 0.4505018926),
        ],
    )


def test_printed_single_gate() -> None:
    values = by_id(
        singleGateInputWeights=fill((2, 2), 2),
        singleGateRecurrentWeights=fill((2, 2), 11),
        singleGateBiasTerms=fill((2,), 3),
    )
    made, weights = layer(descriptor("rnn", values))
    passed = forward(made, weights, list(fill((2, 2, 2), 1, 2)), state_of(made, weights, fill((2, 2), 5)))
    close(passed.y[1], [-0.3774196125, -0.1468528749, -0.0210818285, 0.0011663252])
    after = state_of(made, weights, fill((2, 2), 9))
    found = gradient(made, weights, passed, list(fill((2, 2, 2), 4, 2)), after)
    close(hidden(found.states[0]), [-0.0790520375, -0.1275522820, 0.0929715239, 0.1915106258])
    close([checksum(array) for array in found.dweights], [-1.5276205753, 0.1492938589, 0.6570620994])


# The GRU's values of the reset before the product: y[T-1], dh0, and the checksums of dW, dR and db, gates r z n.
GRU_CASES = {
    False: (
        [0.5101575031, -0.5979814317, 0.2372119938, -0.3866687907],
        [-0.2760533944, -0.0718969854, 0.6104091711, 0.1123095189],
        [-1.2696347968, -0.8810043269, 1.8856120574],
    ),
    True: (
        [0.4988569635, -0.6220777831, 0.2845983948, -0.3878297980],
        [-0.1668387855, -0.0854695433, 0.3976945356, 0.1043486948],
        [0.4692487015, -1.5699977577, 2.4026045486],
    ),
}


@pytest.mark.parametrize("flip", [False, True])
def test_printed_gru_with_flipped_gates(flip: bool) -> None:
    w, r, b = fill((6, 2), 2), fill((6, 2), 11), fill((6,), 3) + fill((6,), 8)  # the two biases are added
    gates = {"r": slice(0, 2), "z": slice(2, 4), "n": slice(4, 6)}
    values = {}
    for _, prefix, _, letter in GATES["gru"]:
        for ending, stacked in (("InputWeights", w), ("RecurrentWeights", r), ("BiasTerms", b)):
            values[MPSRNNMatrixId[prefix + ending]] = stacked[gates[letter]].copy()
    made, weights = layer(descriptor("gru", values, flipOutputGates=flip))
    passed = forward(made, weights, list(fill((3, 2, 2), 1, 2)), state_of(made, weights, fill((2, 2), 5)))
    last, dh0, sums = GRU_CASES[flip]
    close(passed.y[2], last)
    after = state_of(made, weights, fill((2, 2), 9))
    found = gradient(made, weights, passed, list(fill((3, 2, 2), 4, 2)), after)
    close(hidden(found.states[0]), dh0)
    z, r_, n = (dict(zip(("w", "u", "b"), found.dweights[k : k + 3], strict=True)) for k in (0, 3, 6))
    close([checksum(r_[name], z[name], n[name]) for name in "wub"], sums)
    if not flip:
        close(found.dx[0], [0.0463186557, 0.0566460644, -0.2036169596, -0.1000605588])


def test_printed_lstm() -> None:
    w, r, b = fill((8, 2), 2, 2), fill((8, 2), 11, 2), fill((8,), 3, 2)
    values = {}
    for index, (_, prefix, _, _) in enumerate(GATES["lstm"]):
        for ending, stacked in (("InputWeights", w), ("RecurrentWeights", r), ("BiasTerms", b)):
            values[MPSRNNMatrixId[prefix + ending]] = stacked[2 * index : 2 * index + 2].copy()
    made, weights = layer(descriptor("lstm", values))
    before = state_of(made, weights, fill((2, 2), 5), fill((2, 2), 13))
    passed = forward(made, weights, list(fill((3, 2, 2), 1, 2)), before)
    close(passed.y[2], [0.1666716756, -0.4444560647, 0.0142558390, -0.1647895662])
    close(cells(passed.states[0]), [0.4977563147, -0.6593154732, 0.0441883097, -0.2972041363])
    after = state_of(made, weights, fill((2, 2), 9), fill((2, 2), 16))
    found = gradient(made, weights, passed, list(fill((3, 2, 2), 4, 2)), after)
    close(hidden(found.states[0]), [0.0500404664, 0.0533147337, 0.0009270920, 0.0863776896])
    close(cells(found.states[0]), [0.0556489851, -0.0390556246, 0.3066934573, 0.0264402067])
    close(found.dx[0], [-0.0179170567, -0.0514324465, -0.0258786149, -0.0717496499])
    sums = [checksum(*found.dweights[start::3]) for start in range(3)]
    close(sums, [3.9841454852, -1.2972951034, 2.6987320563])


# ---- the array functions ---------------------------------------------------------------------------------------------


def record(kind: str, values: dict[MPSRNNMatrixId, Array]) -> Any:
    """The weights for the array functions, one array for each gate in the engine's order."""
    order = {"rnn": "h", "gru": "rzn", "lstm": "ifgo"}[kind]
    prefixes = {letter: prefix for _, prefix, _, letter in GATES[kind]}
    fields = {"wx": "InputWeights", "wh": "RecurrentWeights", "b": "BiasTerms", "peephole": "MemoryWeights"}
    parts = {}
    for field, ending in fields.items():
        names = [prefixes[letter] + ending for letter in order]
        arrays = tuple(values.get(getattr(MPSRNNMatrixId, name, None)) for name in names)  # type: ignore[arg-type]
        if any(array is not None for array in arrays):
            parts[field] = arrays
    return {"rnn": RnnWeights, "gru": GruWeights, "lstm": LstmWeights}[kind](**parts)


FORWARD: dict[str, Any] = {"rnn": rnn_forward, "gru": gru_forward, "lstm": lstm_forward}
BACKWARD: dict[str, Any] = {"rnn": rnn_backward, "gru": gru_backward, "lstm": lstm_backward}
BEFORE: dict[str, dict[str, Any]] = {"rnn": {}, "gru": {"kind": "before"}, "lstm": {}}


def in_id_order(kind: str, dweights: Any) -> list[Array]:
    order = {"rnn": "h", "gru": "rzn", "lstm": "ifgo"}[kind]
    found = []
    for _, _, _, letter in GATES[kind]:
        for field in ("wx", "wh", "peephole", "b"):
            part = getattr(dweights, field, None)
            if part is not None and part[order.index(letter)] is not None:
                found.append(np.atleast_2d(part[order.index(letter)]))
    return found


def steps(rows: list[int], columns: int, seed: int) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((count, columns)).astype(np.float32) for count in rows]


def padded(parts: list[Array]) -> Array:
    whole = np.zeros((len(parts), *parts[0].shape), np.float32)
    for step, part in zip(whole, parts, strict=True):
        step[: len(part)] = part
    return whole


CASES: list[tuple[str, str, bool, list[int]]] = [
    ("rnn", "", False, [3, 3, 3]),
    ("rnn", "", False, [4, 2, 2, 1]),
    ("gru", "", False, [3, 3, 3]),
    ("gru", "", False, [4, 2, 2, 1]),
    ("lstm", "", False, [3, 3, 3]),
    ("lstm", "ifgo", True, [4, 2, 2, 1]),
    ("lstm", "ifgo", False, [4, 2, 2, 1]),
    ("lstm", "io", True, [5, 5, 1]),
    ("lstm", "f", False, [2, 1]),
    ("lstm", "", False, [1]),
]


@pytest.mark.parametrize(("kind", "memory", "diagonal", "rows"), CASES)
@pytest.mark.parametrize("store_all", [False, True])
def test_bits_of_the_array_functions(kind: str, memory: str, diagonal: bool, rows: list[int], store_all: bool) -> None:
    inputs, units, total = 5, 7, rows[0]
    values = random_weights(kind, inputs, units, memory, diagonal)
    members: dict[str, Any] = {"memoryWeightsAreDiagonal": diagonal} if kind == "lstm" else {}
    made, weights = layer(descriptor(kind, values, **members), storeAllIntermediateStates=store_all)
    x, dy = steps(rows, inputs, 1), steps(rows, units, 2)
    count = 2 if kind == "lstm" else 1
    before, after = ([*steps([total] * count, units, seed)] for seed in (3, 4))
    passed = forward(made, weights, x, state_of(made, weights, *before))
    found = gradient(made, weights, passed, dy, state_of(made, weights, *after))

    expected = FORWARD[kind](padded(x), record(kind, values), *before, batch_sizes=rows, **BEFORE[kind])
    incoming = dict(zip(("dhn", "dcn"), after, strict=False))
    back = BACKWARD[kind](padded(dy), expected.cache, **incoming)
    for step, count_ in enumerate(rows):
        assert_same_bits(passed.y[step], expected.y[step, :count_])
        assert_same_bits(found.dx[step], back.dx[step, :count_])
    assert_same_bits(hidden(passed.states[-1]), expected.hn)
    assert_same_bits(hidden(found.states[0]), back.dh0)
    if kind == "lstm":
        assert_same_bits(cells(passed.states[-1]), expected.cn)
        assert_same_bits(cells(found.states[0]), back.dc0)
    else:
        assert passed.states[0].getMemoryCellMatrix(forLayerIndex=0) is None
    for got, want in zip(found.dweights, in_id_order(kind, back.dweights), strict=True):
        assert_same_bits(got, want)
    assert len(passed.states) == len(found.states) == (len(rows) if store_all else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_all_steps(kind: str) -> None:
    """A state is that of a sequence that ends there; a gradient is that of a sequence that starts there."""
    rows, inputs, units = [4, 4, 2, 1], 3, 5
    made, weights = layer(descriptor(kind, random_weights(kind, inputs, units)), storeAllIntermediateStates=True)
    x, dy = steps(rows, inputs, 1), steps(rows, units, 2)
    passed = forward(made, weights, x)
    found = gradient(made, weights, passed, dy)
    for step in range(1, len(rows)):
        head = forward(made, weights, x[:step])
        assert_same_bits(hidden(passed.states[step - 1]), hidden(head.states[-1]))
        if kind == "lstm":
            assert_same_bits(cells(passed.states[step - 1]), cells(head.states[-1]))
        tail = Pass(passed.y[step:], passed.training[step:], [], passed.sources[step:])
        part = gradient(made, weights, tail, dy[step:])
        assert_same_bits(hidden(found.states[step])[: rows[step]], hidden(part.states[0]))
        assert not hidden(found.states[step])[rows[step] :].any()  # those sequences ended before


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_in_pieces(kind: str) -> None:
    """Forward piece by piece, backward from the last to the first, as the header describes, gives what the whole does.

    Once with a forward encode for each piece, once with gradients of parts of one pass.
    """
    rows, inputs, units, cut = [4, 4, 3, 2, 2], 3, 5, 2
    made, weights = layer(descriptor(kind, random_weights(kind, inputs, units)))
    x, dy = steps(rows, inputs, 1), steps(rows, units, 2)
    whole = forward(made, weights, x)
    expected = gradient(made, weights, whole, dy)
    first = forward(made, weights, x[:cut])
    second = forward(made, weights, x[cut:], first.states[0])
    for got, want in zip([*first.y, *second.y], whole.y, strict=True):
        assert_same_bits(got, want)
    parts = [
        Pass(whole.y[piece], whole.training[piece], [], whole.sources[piece])
        for piece in (slice(0, cut), slice(cut, None))
    ]
    for head, tail in ((first, second), (parts[0], parts[1])):
        made.accumulateWeightGradients = False
        back = gradient(made, weights, tail, dy[cut:])
        assert hidden(back.states[0]).shape == (rows[cut], units)
        targets = [matrix(array) for array in back.dweights]
        made.accumulateWeightGradients = True
        front = gradient(made, weights, head, dy[:cut], back.states[0], targets)
        for got, want in zip([*front.dx, *back.dx], expected.dx, strict=True):
            assert_same_bits(got, want)
        assert_same_bits(hidden(front.states[0]), hidden(expected.states[0]))
        for got, want in zip(front.dweights, expected.dweights, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


# ---- differences -----------------------------------------------------------------------------------------------------


def loss(y: list[Array], dy: list[Array]) -> float:
    return sum(float((a.astype(np.float64) * b).sum()) for a, b in zip(y, dy, strict=True))


@pytest.mark.parametrize(
    ("kind", "members"), [("rnn", {}), ("gru", {}), ("gru", {"flipOutputGates": True}), ("lstm", {})]
)
def test_differences(kind: str, members: dict[str, Any]) -> None:
    """The gradients of all weights and inputs, through the layer's calls, with neurons that have parameters."""
    rows, inputs, units = [3, 2, 2], 2, 3
    types = MPSCNNNeuronType
    neurons = [(types.softSign,), (types.tanH, 1.3, 0.7), (types.softPlus, 0.5, 1.0), (types.linear, 0.5, 0.1)]
    memory = "ifgo" if kind == "lstm" else ""
    values = random_weights(kind, inputs, units, memory)
    described = descriptor(kind, values, neurons, **members)
    if kind == "lstm":
        described.cellToOutputNeuronType = types.softSign
    made, weights = layer(described)
    x, dy = steps(rows, inputs, 1), steps(rows, units, 2)
    passed = forward(made, weights, x)
    found = gradient(made, weights, passed, dy)
    step = 2**-7

    def difference(array: Array, index: Any) -> float:
        """By Richardson's extrapolation: float32 allows no small step."""
        start = float(array[index])
        slopes = []
        for h in (step, 2 * step):
            high, low = (set_and_run(array, index, start + d) for d in (h, -h))
            slopes.append((high - low) / (2 * h))
        array[index] = start
        return (4 * slopes[0] - slopes[1]) / 3

    def set_and_run(array: Array, index: Any, value: float) -> float:
        array[index] = value
        return loss(forward(made, weights, x).y, dy)

    arrays = [*(weight._elements()[0] for weight in weights), *x]
    for array, computed in zip(arrays, [*found.dweights, *found.dx], strict=True):
        for index in list(np.ndindex(array.shape))[:4]:
            assert abs(difference(array, index) - computed[index]) < 2e-3


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_copied_out_and_in_by_id(kind: str) -> None:
    values = random_weights(kind, 4, 3, "io" if kind == "lstm" else "")
    made, weights = layer(descriptor(kind, values))
    assert made.inputFeatureChannels == 4
    assert made.outputFeatureChannels == 3
    assert len(weights) == len(values)
    fresh: list[Any] = []
    made.createWeightMatrices(fresh)
    assert all(not values_of(one).any() for one in fresh)
    for number, value in values.items():
        target = np.full((9, 9), 7, np.float32)
        buffer = QUEUE.makeCommandBuffer()
        made.encodeCopyWeights(buffer, weights, number, matrix(target), True, (2, 1, 0))
        made.encodeCopyWeights(buffer, fresh, number, matrix(target), False, (2, 1, 0))
        run(buffer)
        expected = np.full((9, 9), 7, np.float32)
        rows, columns = np.atleast_2d(value).shape
        expected[2 : 2 + rows, 1 : 1 + columns] = value
        assert_same_bits(target, expected)
    for got, want in zip(fresh, weights, strict=True):
        assert_same_bits(values_of(got), values_of(want))


def test_accumulation_adds_to_any_type() -> None:
    made, weights = layer(descriptor("gru", random_weights("gru", 3, 4)))
    x, dy = steps([2, 2], 3, 1), steps([2, 2], 4, 2)
    passed = forward(made, weights, x)
    plain = gradient(made, weights, passed, dy)
    made.accumulateWeightGradients = True
    for data_type, bound in ((MPSDataType.float32, 1e-6), (MPSDataType.float16, 1e-2)):
        targets: list[Any] = []
        made.createWeightGradientMatrices(targets, data_type)
        for target in targets:
            target._elements()[0] = 1
        found = gradient(made, weights, passed, dy, targets=targets)
        assert_same_bits(found.dx[0], plain.dx[0])
        for got, want in zip(found.dweights, plain.dweights, strict=True):
            np.testing.assert_allclose(got, want + 1, rtol=0, atol=bound * 4)


def test_half_precision_weights_and_matrices() -> None:
    """float16 is storage only: the results are those of float32, rounded once."""
    values = {number: value.astype(np.float16) for number, value in random_weights("lstm", 3, 4).items()}
    rounded = {number: value.astype(np.float32) for number, value in values.items()}
    x, dy = steps([2, 1], 3, 1), steps([2, 1], 4, 2)
    x16, dy16 = ([array.astype(np.float16) for array in part] for part in (x, dy))
    single, weights = layer(descriptor("lstm", rounded))
    passed = forward(single, weights, [array.astype(np.float32) for array in x16])
    expected = gradient(single, weights, passed, [array.astype(np.float32) for array in dy16])
    half, half_weights = layer(descriptor("lstm", rounded, useFloat32Weights=False))
    assert all(weight.dataType == MPSDataType.float16 for weight in half_weights)
    half_passed = forward(half, half_weights, x16)
    found = gradient(half, half_weights, half_passed, dy16)
    for got, want in zip([*half_passed.y, *found.dx], [*passed.y, *expected.dx], strict=True):
        assert got.dtype == np.float16
        assert_same_bits(got, want.astype(np.float16))
    for got, want in zip(found.dweights, expected.dweights, strict=True):
        assert_same_bits(got, want)
    assert_same_bits(hidden(half_passed.states[0]), hidden(passed.states[0]))  # states stay float32


@pytest.mark.parametrize("kind", KINDS)
def test_missing_weights_are_zero_and_unit_transforms_have_none(kind: str) -> None:
    values = random_weights(kind, 3, 3)
    described = descriptor(kind, values, useLayerInputUnitTransformMode=True)
    made, weights = layer(described)
    assert len(weights) == 2 * len(GATES[kind])
    plain = {number: value.copy() for number, value in values.items()}
    for number in plain:
        if number.name.endswith("InputWeights"):
            plain[number] = np.eye(3, dtype=np.float32)
    same, same_weights = layer(descriptor(kind, plain))
    x, dy = steps([2, 2], 3, 1), steps([2, 2], 3, 2)
    passed, expected = forward(made, weights, x), forward(same, same_weights, x)
    assert_same_bits(passed.y[1], expected.y[1])
    found = gradient(made, weights, passed, dy)
    want = gradient(same, same_weights, expected, dy)
    assert_same_bits(found.dx[0], want.dx[0])
    kept = [array for index, array in enumerate(want.dweights) if index % 3]
    for got, one in zip(found.dweights, kept, strict=True):
        assert_same_bits(got, one)

    prefix = GATES[kind][-1][0]
    setattr(described, prefix + "InputWeights" if prefix else "inputWeights", None)
    setattr(described, prefix + "RecurrentWeights" if prefix else "recurrentWeights", None)
    described.useLayerInputUnitTransformMode = False
    made, weights = layer(described)
    assert len(weights) == 3 * len(GATES[kind])
    assert not any(values_of(weight).any() for weight in weights[-3:])
    assert made._cell.neurons[-1 if kind != "lstm" else 3][0] == MPSCNNNeuronType.none


def test_nan_stays_in_its_row() -> None:
    made, weights = layer(descriptor("gru", random_weights("gru", 3, 4)))
    x = steps([3, 3], 3, 1)
    clean = forward(made, weights, x)
    x[0][1, 2] = np.nan
    dirty = forward(made, weights, x)
    assert np.isnan(dirty.y[1][1]).all()
    for row in (0, 2):
        assert_same_bits(dirty.y[1][row], clean.y[1][row])


def test_a_layer_keeps_what_its_descriptor_said() -> None:
    described = descriptor("gru", random_weights("gru", 3, 4))
    made, weights = layer(described)
    described.flipOutputGates = True
    described.inputGateInputWeights = None
    x = steps([2], 3, 1)
    before = forward(made, weights, x).y[0]
    copied = made.copy()
    assert isinstance(copied, MPSRNNMatrixTrainingLayer)
    assert_same_bits(forward(copied, weights, x).y[0], before)
    source = described.inputGateRecurrentWeights
    assert source.calls == ["load", "purge"]
