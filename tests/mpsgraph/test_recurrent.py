"""RNN, LSTM and GRU of MPSGraph: the bits of the array functions, printed values, states, and explicit gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd
from retrograd import GruWeights, LstmWeights, RnnWeights
from retrograd.mpsgraph import (
    MPSGraph,
    MPSGraphGRUDescriptor,
    MPSGraphLSTMDescriptor,
    MPSGraphRNNActivation,
    MPSGraphSingleGateRNNDescriptor,
    MPSGraphTensorData,
    _recurrent,
)
from support.arrays import assert_same_bits
from support.mpsgraph import placeholder

Array = np.ndarray[Any, Any]
T, N, INPUTS, H = 5, 3, 4, 2
GATES = {"singleGateRNN": 1, "LSTM": 4, "GRU": 3}
DESCRIPTORS: dict[str, Any] = {
    "singleGateRNN": MPSGraphSingleGateRNNDescriptor, "LSTM": MPSGraphLSTMDescriptor, "GRU": MPSGraphGRUDescriptor
}  # fmt: skip


def fill(shape: tuple[int, ...], s: int) -> Array:
    k = np.arange(np.prod(shape))
    return (((7 * k + s) % 19 - 9) / 20).reshape(shape)


def tensors(kind: str, directions: int, dtype: Any, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    rows, lead = GATES[kind] * H, (2,) if directions == 2 else ()
    shapes = {
        "x": (T, N, INPUTS), "R": (*lead, rows, H), "W": (directions * rows, INPUTS), "b": (directions * rows,),
        "h0": (N, directions * H),
    }  # fmt: skip
    if kind == "LSTM":
        shapes |= {"c0": (N, directions * H), "p": (*lead, rows)}
    if kind == "GRU":
        shapes["b2"] = (directions * H,)
    return {name: rng.uniform(-1, 1, shape).astype(dtype) for name, shape in shapes.items()}


LABELS = {
    "R": "recurrentWeight", "W": "inputWeight", "b": "bias", "h0": "initState", "c0": "initCell", "mask": "mask",
    "p": "peephole", "b2": "secondaryBias", "dh": "stateGradient", "dc": "cellGradient",
}  # fmt: skip
FORWARD = {"singleGateRNN": "R W b h0 mask", "LSTM": "R W b h0 c0 mask p", "GRU": "R W b h0 mask b2"}
ORDER = {"singleGateRNN": "x R W b h0", "LSTM": "x R W b p h0 c0", "GRU": "x R W b h0 b2"}


def run(kind: str, given: dict[str, Array], descriptor: Any, dy: Array | None = None, **last: Array) -> list[Array]:
    """The results of a layer, and if there is `dy` the explicit gradients."""
    g = MPSGraph()
    fed = {**given, **last} if dy is None else {**given, **last, "dy": dy}
    symbols = {name: placeholder(g, array, name) for name, array in fed.items()}
    arguments = {LABELS[n]: symbols.get(n) for n in FORWARD[kind].split()}
    results = getattr(g, kind)(symbols["x"], **arguments, descriptor=descriptor, name=None)
    if dy is not None:
        more = {"sourceGradient": symbols["dy"], "zState": results[-1], "stateGradient": symbols.get("dh")}
        if kind == "LSTM":
            more |= {"cellOutputFwd": results[1], "cellGradient": symbols.get("dc")}
        if kind == "GRU":
            more["outputFwd"] = results[0]
        results = [
            *results,
            *getattr(g, f"{kind}Gradients")(symbols["x"], **arguments, **more, descriptor=descriptor, name=None),
        ]
    feeds = {symbols[n]: MPSGraphTensorData(a) for n, a in fed.items()}
    found = g.run(feeds=feeds, targetTensors=results, targetOperations=None)
    return [found[t].numpy() for t in results]


def reference(
    kind: str, given: dict[str, Array], both: bool, flip: bool, after: bool, dy: Array
) -> tuple[Array, list[Array]]:
    """y and the gradients x, R, W, b ... of the array functions, for gates in their order."""
    count = 2 if both else 1

    def part(name: str, d: int) -> Any:
        if name not in given:
            return None
        array = given[name]
        stacked = name in ("R", "p") and both
        return array[d] if stacked else np.split(array, count)[d]

    def states(name: str) -> Any:
        return np.stack(np.split(given[name], 2, 1)) if both else given[name]

    if kind == "LSTM":
        weights: Any = [LstmWeights(part("W", d), part("R", d), part("b", d), part("p", d)) for d in range(count)]
        y, _, _, cache = retrograd.lstm_forward(
            given["x"], weights if both else weights[0], states("h0"), states("c0"), bidirectional=both,
            output_gate_reads="old", mask=given.get("mask"),
        )  # fmt: skip
        found: Any = retrograd.lstm_backward(dy, cache)
    elif kind == "GRU":
        zero = np.zeros(2 * H, given["x"].dtype)
        weights = [
            GruWeights(
                part("W", d), part("R", d), part("b", d), np.concatenate([zero, part("b2", d)]) if after else None
            )
            for d in range(count)
        ]
        y, _, cache = retrograd.gru_forward(
            given["x"], weights if both else weights[0], states("h0"), bidirectional=both,
            kind="after" if after else "before", flip=flip, mask=given.get("mask"),
        )  # fmt: skip
        found = retrograd.gru_backward(dy, cache)
    else:
        weights = [RnnWeights(part("W", d), part("R", d), part("b", d)) for d in range(count)]
        y, _, cache = retrograd.rnn_forward(
            given["x"], weights if both else weights[0], states("h0"), bidirectional=both, activation="relu",
            mask=given.get("mask"),
        )  # fmt: skip
        found = retrograd.rnn_backward(dy, cache)
    cells = list(found.dweights) if both else [found.dweights]
    joined = (lambda a: np.concatenate(list(a), 1)) if both else (lambda a: a)
    fields = [(0 if n == "W" else 1 if n == "R" else 2 if n == "b" else 3) for n in ORDER[kind].split()]
    gradients = []
    for name, field in zip(ORDER[kind].split(), fields, strict=True):
        if name not in given:
            continue
        if name == "x":
            gradients.append(found.dx)
        elif name in ("h0", "c0"):
            gradients.append(joined(found.dh0 if name == "h0" else found.dc0))
        elif name == "b2":
            gradients.append(np.concatenate([c[3][2 * H :] for c in cells]))
        else:
            parts = [c[field] for c in cells]
            gradients.append(np.stack(parts) if name in ("R", "p") and both else np.concatenate(parts))
    return y, gradients


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("variant", ["plain", "reverse", "bidirectional", "mask", "flip", "after"])
@pytest.mark.parametrize("kind", list(GATES))
def test_layers_and_gradients_have_the_bits_of_the_array_functions(kind: str, variant: str, dtype: Any) -> None:
    both, turned, flip, after = (variant == v for v in ("bidirectional", "reverse", "flip", "after"))
    given = tensors(kind, 2 if both else 1, dtype)
    if not after:
        given.pop("b2", None)
    if variant == "mask":
        given["mask"] = np.random.default_rng(1).integers(0, 3, (N, H)).astype(dtype)
    settings: dict[str, Any] = {"training": True, "bidirectional": both, "reverse": turned}
    if kind == "GRU":
        settings |= {"resetGateFirst": True, "flipZ": flip, "resetAfter": after}
    dy = np.random.default_rng(2).normal(size=(T, N, (1 + both) * H)).astype(dtype)
    results = run(kind, given, DESCRIPTORS[kind](**settings), dy)
    ours = {**given, "x": given["x"][::-1].copy()} if turned else given
    y, gradients = reference(kind, ours, both, flip, after, dy[::-1].copy() if turned else dy)
    if turned:
        y, gradients[0] = y[::-1], gradients[0][::-1]
    forward = 3 if kind == "LSTM" else 2
    assert_same_bits(results[0], np.ascontiguousarray(y))
    assert len(results) - forward == len(gradients)
    for found, expected in zip(results[forward:], gradients, strict=True):
        assert_same_bits(found, np.ascontiguousarray(expected))


@pytest.mark.parametrize("both", [False, True])
def test_other_orders_of_gates_permute_rows(both: bool) -> None:
    for kind, swapped, setting in (("LSTM", (0, 2, 1, 3), "forgetGateLast"), ("GRU", (1, 0, 2), "resetGateFirst")):
        given = tensors(kind, 1 + both, np.float64)
        given.pop("b2", None)
        gates = GATES[kind]

        def permuted(name: str, array: Array, order: Any = swapped, gates: int = gates) -> Array:
            if name not in ("R", "W", "b", "p"):
                return array
            lead = (2,) if both else ()
            blocks = array.reshape(*lead, gates, H, *array.shape[len(array.shape) - (name in ("R", "W")) :])
            return np.take(blocks, order, len(lead)).reshape(array.shape)

        dy = np.random.default_rng(2).normal(size=(T, N, (1 + both) * H))
        plain = DESCRIPTORS[kind](training=True, bidirectional=both)
        other = DESCRIPTORS[kind](training=True, bidirectional=both, **{setting: True})
        one = run(kind, given, plain, dy)
        two = run(kind, {n: permuted(n, a) for n, a in given.items()}, other, dy)
        np.testing.assert_array_equal(one[0], two[0])
        forward = 3 if kind == "LSTM" else 2
        names = [n for n in ORDER[kind].split() if n in given]
        for name, a, b in zip(names, one[forward:], two[forward:], strict=True):
            np.testing.assert_array_equal(permuted(name, a), b)


def test_printed_values_of_the_lstm_with_mask_and_peepholes() -> None:
    """recurrent cells: every peephole reads the old cell; the state of training is the gates."""
    x, h0, c0 = 2 * fill((3, 2, 2), 1), fill((2, 2), 5), fill((2, 2), 13)
    given = {
        "x": x, "R": 2 * fill((8, 2), 11), "W": 2 * fill((8, 2), 2), "b": 2 * fill((8,), 3), "h0": h0, "c0": c0,
        "p": 2 * fill((8,), 15), "mask": np.array([[2.0, 0], [0, 2]]),
    }  # fmt: skip
    descriptor = MPSGraphLSTMDescriptor(training=True)
    dy, dh, dc = 2 * fill((3, 2, 2), 4), fill((2, 2), 9), fill((2, 2), 16)
    y, c, z, dx, dr, dw, db, dp, dh0, dc0 = run("LSTM", given, descriptor, dy, dh=dh, dc=dc)
    close = {"rtol": 0, "atol": 6e-11}
    np.testing.assert_allclose(y[-1].ravel(), [0.1444054125, -0.4452828620, 0.0011959649, -0.2255457190], **close)
    np.testing.assert_allclose(c[-1].ravel(), [0.6268633766, -0.6866450343, 0.0037860466, -0.3830431461], **close)
    np.testing.assert_allclose(
        z[0, 0],
        [0.5, 0.4875026035, 0.7088901726, 0.3186462662, 0.6804760061, -0.8564849155, 0.4551211076, 0.6615031592],
        **close,
    )
    np.testing.assert_allclose(dh0.ravel(), [0.0801558193, 0, 0, 0.1705724572], **close)
    np.testing.assert_allclose(dc0.ravel(), [0.0589408954, -0.0374913728, 0.2045223051, 0.1513067867], **close)
    sums = [float((np.arange(a.size) + 1) @ a.ravel()) for a in (dw, dr, db, dp)]
    np.testing.assert_allclose(sums, [4.7813513334, -0.0032158499, 3.5149712386, 0.1926284134], rtol=0, atol=1e-9)
    assert dx.shape == x.shape


def test_printed_values_of_the_gru() -> None:
    """The recurrent bias of the other gates is a part of the bias."""
    b, c = fill((6,), 3), fill((6,), 8)
    total = b + np.concatenate([c[:4], [0, 0]])
    given = {
        "x": 2 * fill((3, 2, 2), 1),
        "R": fill((6, 2), 11),
        "W": fill((6, 2), 2),
        "b": total,
        "h0": fill((2, 2), 5),
    }
    after = MPSGraphGRUDescriptor(resetGateFirst=True, resetAfter=True)
    (y,) = run("GRU", {**given, "b2": c[4:]}, after)
    np.testing.assert_allclose(y[2].ravel(), [0.3822359737, -0.5546824454, 0.0624341897, -0.3210634351], atol=6e-11)
    (y,) = run("GRU", {**given, "b2": c[4:]}, MPSGraphGRUDescriptor(resetGateFirst=True, resetAfter=True, flipZ=True))
    np.testing.assert_allclose(y[2].ravel(), [0.3648111049, -0.5682843962, 0.1171822941, -0.3289059665], atol=6e-11)
    given["b"] = b + c
    (y,) = run("GRU", given, MPSGraphGRUDescriptor(resetGateFirst=True))
    np.testing.assert_allclose(y[2].ravel(), [0.5101575031, -0.5979814317, 0.2372119938, -0.3866687907], atol=6e-11)


def test_the_other_reading_of_flip_z(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors("GRU", 1, np.float64)
    given.pop("b2")
    (flipped,) = run("GRU", given, MPSGraphGRUDescriptor(flipZ=True))
    monkeypatch.setattr(_recurrent, "FLIP_Z_AS_THE_PROPERTY_SAYS", True)
    (other,) = run("GRU", given, MPSGraphGRUDescriptor())
    np.testing.assert_array_equal(flipped, other)


@pytest.mark.parametrize("kind", list(GATES))
@pytest.mark.parametrize("variant", ["plain", "reverse", "bidirectional"])
def test_states_of_training_follow_from_the_formulas(kind: str, variant: str) -> None:
    """h is what the formulas make of z: for the GRU and the LSTM the gates, for the RNN the value before."""
    both, turned = variant == "bidirectional", variant == "reverse"
    given = tensors(kind, 1 + both, np.float64)
    given.pop("b2", None)
    settings = {"bidirectional": both, "reverse": turned, "training": True}
    results = run(kind, given, DESCRIPTORS[kind](**settings))
    y, z = results[0], results[-1]
    for d in range(1 + both):
        back = turned or d == 1
        order = slice(None, None, -1) if back else slice(None)
        h, gates = np.split(y, 1 + both, 2)[d][order], np.split(z, 1 + both, 2)[d][order]
        before = np.concatenate([np.split(given["h0"], 1 + both, 1)[d][None], h[:-1]])
        if kind == "singleGateRNN":
            np.testing.assert_allclose(np.maximum(gates, 0), h, atol=1e-14)
        elif kind == "GRU":
            u, _, n = np.split(gates, 3, 2)
            np.testing.assert_allclose(u * before + (1 - u) * n, h, atol=1e-14)
        else:
            i, f, c, o = np.split(gates, 4, 2)
            cells = np.split(results[1], 1 + both, 2)[d][order]
            old = np.concatenate([np.split(given["c0"], 1 + both, 1)[d][None], cells[:-1]])
            np.testing.assert_allclose(f * old + i * c, cells, atol=1e-14)
            np.testing.assert_allclose(o * np.tanh(cells), h, atol=1e-14)


@pytest.mark.parametrize("kind", list(GATES))
def test_automatic_gradients_are_the_explicit_ones(kind: str) -> None:
    given = tensors(kind, 1, np.float64)
    given.pop("b2", None)
    dy = np.random.default_rng(3).normal(size=(T, N, H))
    descriptor = DESCRIPTORS[kind](training=True)
    explicit = run(kind, given, descriptor, dy)[3 if kind == "LSTM" else 2 :]
    g = MPSGraph()
    symbols = {name: placeholder(g, a, name) for name, a in {**given, "dy": dy}.items()}
    arguments = {LABELS[n]: symbols.get(n) for n in FORWARD[kind].split()}
    y = getattr(g, kind)(symbols["x"], **arguments, descriptor=descriptor, name=None)[0]
    loss = g.reductionSum(with_=g.multiplication(y, symbols["dy"], name=None), axes=None, name=None)
    wrt = [symbols[n] for n in ORDER[kind].split() if n in given]
    gradients = g.gradients(of=loss, with_=wrt, name=None)
    feeds = {symbols[n]: MPSGraphTensorData(a) for n, a in {**given, "dy": dy}.items()}
    found = g.run(feeds=feeds, targetTensors=list(gradients.values()), targetOperations=None)
    for tensor, expected in zip(wrt, explicit, strict=True):
        np.testing.assert_allclose(found[gradients[tensor]].numpy(), expected, atol=1e-13)


@pytest.mark.parametrize("both", [False, True])
def test_without_input_weights_the_source_has_the_products(both: bool) -> None:
    for kind in GATES:
        given = tensors(kind, 1 + both, np.float64)
        given.pop("b2", None)
        descriptor = DESCRIPTORS[kind](bidirectional=both)
        (expected, *_) = run(kind, given, descriptor)
        given["x"] = given["x"] @ given.pop("W").T
        (found, *_) = run(kind, given, descriptor)
        np.testing.assert_allclose(found, expected, atol=1e-14)


def test_activations() -> None:
    given = {**tensors("singleGateRNN", 1, np.float64), "x": 10 * fill((T, N, INPUTS), 3)}
    for activation, function in (
        (MPSGraphRNNActivation.none, lambda z: z), (MPSGraphRNNActivation.tanh, np.tanh),
        (MPSGraphRNNActivation.hardSigmoid, lambda z: np.clip(0.2 * z + 0.5, 0, 1)),
    ):  # fmt: skip
        y, z = run("singleGateRNN", given, MPSGraphSingleGateRNNDescriptor(training=True, activation=activation))
        np.testing.assert_allclose(y, function(z), atol=1e-12)


@pytest.mark.parametrize("kind", list(GATES))
def test_wrong_shapes_are_named(kind: str) -> None:
    given = tensors(kind, 1, np.float32)
    if kind == "GRU":
        with pytest.raises(ValueError, match="secondaryBias is given, but the descriptor has resetAfter = False"):
            run(kind, given, DESCRIPTORS[kind]())
        given.pop("b2")
    for name in given:
        wrong = {**given, name: np.zeros((*given[name].shape, 1), np.float32)}
        label = {"x": "source", "mask": "mask"}.get(name) or LABELS[name]
        with pytest.raises(ValueError, match=label):
            run(kind, wrong, DESCRIPTORS[kind]())
