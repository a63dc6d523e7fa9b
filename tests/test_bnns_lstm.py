"""Apple's BNNS LSTM: what its specification says, sentence by sentence, and that it is the array functions' LSTM."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from arrays import fenced
from hypothesis import given, settings
from hypothesis import strategies as st

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNSLayerParametersLSTM, BNNSNDArrayDescriptor
from retrograd.ops.activation import ACTIVATIONS

Array = np.ndarray[Any, np.dtype[Any]]

GATES = ("input_gate", "forget_gate", "candidate_gate", "output_gate")
SIZES = ("input_size", "hidden_size", "batch_size", "num_layers", "seq_len")
DEFAULT_ACTIVATIONS = bnns.BNNSLayerFlagsLSTMDefaultActivations
BIDIRECTIONAL = bnns.BNNSLayerFlagsLSTMBidirectional
SNE, NSE = bnns.BNNSDataLayoutSNE, bnns.BNNSDataLayoutNSE

capacity_of = bnns.BNNSComputeLSTMTrainingCacheCapacity
forward = bnns.BNNSDirectApplyLSTMBatchTrainingCaching
backward = bnns.BNNSDirectApplyLSTMBatchBackward


def describe(array: Array | None, layout: int | None = None, flags: int = 0) -> BNNSNDArrayDescriptor:
    return BNNSNDArrayDescriptor() if array is None else BNNSNDArrayDescriptor.from_array(array, layout, flags=flags)


def nan(*shape: int) -> Array:
    return np.full(shape, np.nan, np.float32)


class Values:
    """All arrays of a layer, or of its gradients."""

    def __init__(self) -> None:
        self.x: Array | None = None
        self.h0: Array | None = None
        self.c0: Array | None = None
        self.y: Array | None = None
        self.hn: Array | None = None
        self.cn: Array | None = None
        self.gates: list[dict[str, Array | None]] = [dict.fromkeys(("iw", "upper", "hw", "b", "cw")) for _ in GATES]

    def every(self) -> Iterator[Array]:
        for array in (self.x, self.h0, self.c0, self.y, self.hn, self.cn, *(a for g in self.gates for a in g.values())):
            if array is not None:
                yield array

    def descriptors(self, params: BNNSLayerParametersLSTM, flags: int = 0) -> None:
        """Put all into a structure: data as SNE, everything else in as many axes as it has."""
        for side, arrays in (
            (params.input_descriptor, (self.x, self.h0, self.c0)),
            (params.output_descriptor, (self.y, self.hn, self.cn)),
        ):
            side.data_desc = describe(arrays[0], SNE, flags)
            side.hidden_desc = describe(arrays[1], None, flags)
            side.cell_state_desc = describe(arrays[2], None, flags)
        for name, arrays in zip(GATES, self.gates, strict=True):
            gate = getattr(params, name)
            gate.iw_desc = [describe(arrays["iw"], None, flags), describe(arrays["upper"], None, flags)]
            gate.hw_desc = describe(arrays["hw"], None, flags)
            gate.b_desc = describe(arrays["b"], None, flags)
            gate.cw_desc = describe(arrays["cw"], None, flags)


class Layer:
    """A layer with random arrays, its structures, and what the array functions say of it."""

    def __init__(
        self,
        steps: int = 3,
        samples: int = 2,
        inputs: int = 3,
        units: int = 4,
        layers: int = 1,
        directions: int = 1,
        bias: str = "ifgo",
        peephole: str = "",
        states: str = "hc",
        batch_sizes: list[int] | None = None,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.T, self.B, self.I, self.H, self.L, self.D = steps, samples, inputs, units, layers, directions
        self.first = layers if inputs == directions * units else 1
        self.batch_sizes = None if batch_sizes is None else np.array(batch_sizes, np.uint32)
        self.activations = rg.LstmActivations()

        def normal(*shape: int) -> Array:
            return rng.normal(0.0, 0.5, shape).astype(np.float32)

        values = self.values = Values()
        values.x = normal(steps, samples, inputs)
        values.h0 = normal(layers, directions, samples, units) if "h" in states else None
        values.c0 = normal(layers, directions, samples, units) if "c" in states else None
        values.y = nan(steps, samples, directions * units)
        values.hn, values.cn = nan(layers, directions, samples, units), nan(layers, directions, samples, units)
        for letter, gate in zip("ifgo", values.gates, strict=True):
            gate["iw"] = normal(self.first, directions, units, inputs)
            if layers > self.first:
                gate["upper"] = normal(layers - self.first, directions, units, directions * units)
            gate["hw"] = normal(layers, directions, units, units)
            gate["b"] = normal(layers, directions, units) if letter in bias else None
            gate["cw"] = normal(layers, directions, units, units) if letter in peephole else None
        self.dy, self.dhn, self.dcn = (normal(*a.shape) for a in (values.y, values.hn, values.cn))
        self.params = self.structure()
        values.descriptors(self.params)
        self.params.lstm_flags = DEFAULT_ACTIVATIONS | (BIDIRECTIONAL if directions == 2 else 0)
        if self.batch_sizes is not None:
            self.params.sequence_descriptor = describe(self.batch_sizes)
        self.gradients = Values()
        self.fresh_gradients()

    def structure(self) -> BNNSLayerParametersLSTM:
        return BNNSLayerParametersLSTM(self.I, self.H, self.B, self.L, self.T)

    def fresh_gradients(self, flags: int = 0, fill: float = np.nan) -> BNNSLayerParametersLSTM:
        """Every gradient that there is, asked for."""
        values, gradients = self.values, self.gradients = self.values, Values()
        assert values.x is not None
        gradients.x = np.full_like(values.x, fill)
        gradients.h0, gradients.c0 = (np.full((self.L, self.D, self.B, self.H), fill, np.float32) for _ in "hc")
        gradients.y, gradients.hn, gradients.cn = self.dy, self.dhn, self.dcn
        for gate, target in zip(values.gates, gradients.gates, strict=True):
            target.update((name, None if a is None else np.full_like(a, fill)) for name, a in gate.items())
        self.deltas = self.structure()
        gradients.descriptors(self.deltas, flags)
        return self.deltas

    # -- calls

    def cache(self) -> bytearray:
        capacity = capacity_of(self.params)
        assert capacity != bnns.SIZE_MAX, bnns.last_error()
        return bytearray(capacity)

    def forward(self, cache: Any = None) -> int:
        return int(forward(self.params, None, cache, 0 if cache is None else len(cache)))

    def backward(self, cache: Any = None) -> int:
        return int(backward(self.params, self.deltas, None, cache, 0 if cache is None else len(cache)))

    def run(self) -> bytearray:
        """Forward and backward, both with success."""
        cache = self.cache()
        assert self.forward(cache) == 0, bnns.last_error()
        assert self.backward(cache) == 0, bnns.last_error()
        return cache

    # -- what the array functions say

    def cells(self, values: Values | None = None) -> list[rg.LstmWeights]:
        gates = (values or self.values).gates
        cells = []
        for layer, direction in itertools.product(range(self.L), range(self.D)):

            def four(name: str, at: int, direction: int = direction) -> Any:
                parts = [None if gate[name] is None else gate[name][at, direction] for gate in gates]  # type: ignore[index]
                return None if all(part is None for part in parts) else tuple(parts)

            wx = four("iw", layer) if layer < self.first else four("upper", layer - self.first)
            cells.append(rg.LstmWeights(wx, four("hw", layer), four("b", layer), four("cw", layer)))
        return cells

    def states(self, array: Array | None) -> Array | None:
        return None if array is None else array.reshape(self.L * self.D, self.B, self.H)

    def expected_forward(self, **options: Any) -> rg.LstmResult:
        values = self.values
        assert values.x is not None
        return rg.lstm_forward(
            values.x,
            self.cells(),
            self.states(values.h0),
            self.states(values.c0),
            bidirectional=self.D == 2,
            batch_sizes=self.batch_sizes,
            activations=self.activations,
            **options,
        )

    def expected_backward(self, **options: Any) -> rg.LstmGradients:
        cache = self.expected_forward(**options).cache
        assert cache is not None
        need = ["dx", "dwx", "dwh", "dh0", "dc0"]
        need += ["db"] if any(g["b"] is not None for g in self.values.gates) else []
        need += ["dpeephole"] if any(g["cw"] is not None for g in self.values.gates) else []
        dhn, dcn = self.states(self.dhn), self.states(self.dcn)
        return rg.lstm_backward(self.dy, cache, dhn=dhn, dcn=dcn, need=need)

    def check_outputs(self, expected: rg.LstmResult) -> None:
        values = self.values
        assert values.y is not None
        assert np.array_equal(values.y, expected.y)
        for found, wanted in ((values.hn, expected.hn), (values.cn, expected.cn)):
            if found is not None:
                assert np.array_equal(found, wanted.reshape(found.shape))

    def check_gradients(self, expected: rg.LstmGradients) -> None:
        gradients = self.gradients
        for found, wanted in ((gradients.x, expected.dx), (gradients.h0, expected.dh0), (gradients.c0, expected.dc0)):
            if found is not None:
                assert wanted is not None
                assert np.array_equal(found, wanted.reshape(found.shape))
        for cell, wanted_cell in zip(self.cells(gradients), expected.dweights, strict=True):
            for part, wanted_part in zip(cell, wanted_cell, strict=True):
                if part is not None:
                    for array, wanted in zip(part, wanted_part, strict=True):
                        assert array is None or np.array_equal(array, wanted)

    def check(self) -> None:
        """One run, bit for bit that of the array functions."""
        self.run()
        self.check_outputs(self.expected_forward())
        self.check_gradients(self.expected_backward())


def untouched(layer: Layer, call: Callable[[], int], *others: Any) -> str:
    """The call fails, says why, and writes nothing. Returns the reason."""
    arrays = [*layer.values.every(), *layer.gradients.every(), *(o for o in others if isinstance(o, np.ndarray))]
    before = [a.copy() for a in arrays]
    buffers = [o for o in others if isinstance(o, bytearray)]
    contents = [bytes(b) for b in buffers]
    assert call() == -1
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)
    assert [bytes(b) for b in buffers] == contents
    reason = bnns.last_error()
    assert reason
    return reason


# ---- worked examples (12) -------------------------------------------------------------------------------------------


def rows(text: str) -> Array:
    return np.array([float(word) for word in text.replace("/", " ").replace("|", " ").split()], np.float32)


def close(found: Array | None, wanted: str) -> None:
    assert found is not None
    np.testing.assert_allclose(found.ravel(), rows(wanted), rtol=3e-6, atol=1.5e-7)


def test_worked_example_one_layer_with_full_peepholes() -> None:
    layer = Layer(steps=2, samples=1, inputs=2, units=2, peephole="ifgo")
    v = layer.values
    assert v.x is not None
    assert v.h0 is not None
    assert v.c0 is not None
    v.x.flat, v.h0.flat, v.c0.flat = rows("1 -.5 .25 2"), rows(".1 -.2"), rows(".3 .4")
    table = {
        "iw": (".1 .2 -.3 .4", ".2 -.4 .1 .3", ".7 .1 -.2 .6", "-.1 .5 .3 .2"),
        "hw": (".5 -.1 .2 .3", "-.2 .1 .4 -.3", ".3 .2 -.1 .5", ".1 .1 -.4 .2"),
        "cw": (".1 .05 -.2 .15", ".05 -.1 .2 .1", ".2 0 .1 -.3", ".3 -.2 .1 .4"),
        "b": (".1 -.1", ".5 .25", "0 .05", "-.2 .3"),
    }
    for name, gates in table.items():
        for gate, text in zip(v.gates, gates, strict=True):
            gate[name].flat = rows(text)  # type: ignore[union-attr]
    layer.dy.flat, layer.dhn.flat, layer.dcn.flat = rows("1 .5 -.25 2"), rows(".1 .2"), rows("-.3 .4")
    layer.run()
    close(v.y, "0.1986063073 0.0261088440 0.3603613254 0.3755197550")
    close(v.hn, "0.3603613254 0.3755197550")
    close(v.cn, "0.5678890604 0.5703981121")
    g = layer.gradients
    close(g.x, "0.0136661452 0.2491605780 -0.2275721051 0.3482006857")
    close(g.h0, "0.0015105466 0.0964365406")
    close(g.c0, "0.1666524158 0.8562528822")
    expected = [
        {
            "iw": "0.0002229401 -0.0854112861 -0.1318328436  0.7567136670",
            "hw": "-0.0069464524 -0.0030996800 0.0432528375  0.0511081121",
            "cw": "-0.0187799228  0.0024130245  0.1130802630 -0.0715527343",
            "b": "-0.0298828774  0.1119779489",
        },
        {
            "iw": "-0.0076839486 -0.0984507278  0.1618403996 -0.0523742353",
            "hw": "-0.0091254105 -0.0021269182 0.0185161621 -0.0313456797",
            "cw": "-0.0249065298 -0.0002867886  0.0548592873  0.0639584735",
            "b": "-0.0437872552  0.1719154459",
        },
        {
            "iw": "-0.0205820154 -0.3703443780  0.4599352573  0.4216746105",
            "hw": "-0.0331550033 -0.0095164059 0.0992307976 -0.0686478809",
            "cw": "-0.0902751472  0.0021369580  0.2819594817  0.1662212176",
            "b": "-0.1549239162  0.6899266358",
        },
        {
            "iw": "0.1013032780 -0.0849555482  0.0635950387  0.4452864894",
            "hw": "0.0073277984 -0.0214892819 0.0453358771  0.0043681981",
            "cw": "0.0481911383 -0.0047723314  0.1315630051  0.1283745913",
            "b": "0.0891960159  0.2319776300",
        },
    ]
    for found, wanted in zip(g.gates, expected, strict=True):
        for name, text in wanted.items():
            close(found[name], text)


def two_directions(batch_sizes: list[int] | None) -> Layer:
    layer = Layer(3, 2, 1, 1, layers=2, directions=2, states="", batch_sizes=batch_sizes)
    assert layer.values.x is not None
    layer.values.x.flat = rows("1 -1 .5 2 -1.5 9")
    table = np.array([[0.5, 0.4, 0.9, -0.3], [-0.6, 0.2, 0.7, 0.8]], np.float32)
    for k, gate in enumerate(layer.values.gates):
        for d in range(2):
            v = table[d, k]
            gate["iw"][0, d] = v  # type: ignore[index]
            gate["upper"][0, d] = [[v, -v / 2]]  # type: ignore[index]
            for depth in range(2):
                gate["hw"][depth, d] = 0.1 * (depth + 1) * (-1) ** d  # type: ignore[index]
                gate["b"][depth, d] = 0.05 * (d + 1)  # type: ignore[index]
    layer.dy[...] = 1
    layer.dhn[...] = layer.dcn[...] = 0
    layer.run()
    return layer


def test_worked_example_two_layers_two_directions() -> None:
    layer = two_directions(None)
    close(
        layer.values.y,
        "0.0423314569 0.0912395484 -0.0133689029 0.0312557218 0.1003589889 0.0929596569 0.0236524099 0.0600009324 "
        "0.0750733821 0.0288204204 0.0405730961 0.0386439635",
    )
    close(
        layer.values.hn,
        "-0.0545077148 0.0605750584 | 0.1361979753 -0.0826238665 || 0.0750733821 0.0405730961 | "
        "0.0912395484 0.0312557218",
    )
    close(
        layer.values.cn,
        "-0.0870118351 1.4904087103 | 0.1935999216 -0.2577661587 || 0.1462500539 0.0798297440 | "
        "0.1690283105 0.0626641918",
    )
    g = layer.gradients
    close(g.x, "0.1098831395 0.0356269635   0.1090778766 0.0177069209  -0.0356912552 -0.0078376853")
    first = (
        "0.3481508335 -0.2373803032",
        "-0.0672038414 0.0317119837",
        "0.0877235428 0.0237464910",
        "0.5910087868 -0.0837861047",
    )
    upper = (
        "0.0267289250 0.0059565346",
        "0.0018793219 -0.0051843720",
        "0.1833052611 0.0499486597",
        "0.0197072594 -0.0017636526",
    )
    for gate, below, above in zip(g.gates, first, upper, strict=True):
        close(gate["iw"], below)
        close(gate["upper"][0, 0], above)  # type: ignore[index]
    close(
        g.h0,
        "0.0279840423 -0.0022272951 | 0.0016752049 0.0002247075 || 0.1117679037 0.0936182513 | "
        "-0.1012268040 -0.0990134486",
    )


def test_worked_example_variable_batch() -> None:
    layer = two_directions([2, 2, 1])
    close(
        layer.values.y,
        "0.0423314569 0.0912395484 -0.0133208993 0.0237249708 0.1003589889 0.0929596569 0.0239605693 0.0423261658 "
        "0.0750733821 0.0288204204 0 0",
    )
    close(
        layer.values.hn,
        "-0.0545077148 0.1712405147 | 0.1361979753 -0.0830386207 || 0.0750733821 0.0239605693 | "
        "0.0912395484 0.0237249708",
    )
    close(layer.gradients.x, "0.1098831395 0.0294832582   0.1090778766 0.0135084295  -0.0356912552 0")
    close(
        layer.gradients.h0,
        "0.0279840423 -0.0020199614 | 0.0016752049 0.0058845483 || 0.1117679037 0.0773357792 | "
        "-0.1012268040 -0.0860976735",
    )


def test_worked_example_scalar_cell() -> None:
    layer = Layer(1, 1, 1, 1, bias="", states="")
    assert layer.values.x is not None
    layer.values.x[...] = 1
    for gate, w in zip(layer.values.gates, (1, 0.5, 1, 2), strict=True):
        gate["iw"][...], gate["hw"][...] = w, 0  # type: ignore[index]
    layer.dy[...] = 1
    layer.dhn[...] = layer.dcn[...] = 0
    layer.run()
    close(layer.values.cn, "0.5567699411")
    close(layer.values.y, "0.4453106840")
    close(layer.gradients.x, "0.4056459889")
    for gate, text in zip(layer.gradients.gates, ("0.0981772853", "0", "0.2013040342", "0.0530823347"), strict=True):
        close(gate["iw"], text)


# ---- agreement with the array functions and with another framework --------------------------------------------------

OPTIONS: dict[str, tuple[Any, ...]] = {
    "layers": (1, 2, 3),
    "directions": (1, 2),
    "inputs": (4, 3),
    "bias": ("ifgo", "", "fo"),
    "peephole": ("", "ifgo", "ig"),
    "states": ("hc", "", "h", "c"),
    "batch_sizes": (None, [2, 2, 1], [1, 0, 2]),
}


def option_pairs() -> list[dict[str, Any]]:
    """Sets of options in which every pair of values of two options occurs."""
    names = list(OPTIONS)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(OPTIONS[a]))
        for j in range(len(OPTIONS[b]))
    }
    rng, found = random.Random(1), []
    while missing:
        candidates = [{name: rng.randrange(len(OPTIONS[name])) for name in names} for _ in range(60)]

        def pairs(candidate: dict[str, int]) -> set[Any]:
            return {((a, candidate[a]), (b, candidate[b])) for a, b in itertools.combinations(names, 2)}

        best = max(candidates, key=lambda candidate: len(pairs(candidate) & missing))
        missing -= pairs(best)
        found.append({name: OPTIONS[name][index] for name, index in best.items()})
    return found


@pytest.mark.parametrize("options", option_pairs(), ids=str)
def test_the_bits_of_the_array_functions(options: dict[str, Any]) -> None:
    layer = Layer(**options)
    layer.check()
    with_cache = [a.copy() for a in layer.gradients.every()]
    layer.fresh_gradients()
    assert layer.backward(None) == 0  # forward is run again
    for again, first in zip(layer.gradients.every(), with_cache, strict=True):
        assert np.array_equal(again, first)


def test_a_stacked_bidirectional_layer_against_torch() -> None:
    torch = pytest.importorskip("torch")
    layer = Layer(5, 3, 4, 6, layers=2, directions=2)
    layer.run()
    v, g = layer.values, layer.gradients
    module = torch.nn.LSTM(4, 6, num_layers=2, bidirectional=True)

    def stacked(values: Values, name: str, at: tuple[int, int]) -> Any:
        return torch.from_numpy(np.concatenate([gate[name][at] for gate in values.gates]))  # type: ignore[index]

    def parameters(values: Values) -> Iterator[tuple[str, Any]]:
        for depth, d in itertools.product(range(2), range(2)):
            suffix = f"l{depth}" + "_reverse" * d
            yield f"weight_ih_{suffix}", stacked(values, "upper" if depth else "iw", (0, d))
            yield f"weight_hh_{suffix}", stacked(values, "hw", (depth, d))
            yield f"bias_ih_{suffix}", stacked(values, "b", (depth, d))

    with torch.no_grad():
        for name, value in parameters(v):
            getattr(module, name).copy_(value)
            if name.startswith("bias"):
                getattr(module, name.replace("ih", "hh")).zero_()
    x, h0, c0 = (torch.from_numpy(a.copy()).requires_grad_() for a in (v.x, layer.states(v.h0), layer.states(v.c0)))  # type: ignore[union-attr]
    y, (hn, cn) = module(x, (h0, c0))
    dhn, dcn = (torch.from_numpy(layer.states(a)) for a in (layer.dhn, layer.dcn))
    torch.autograd.backward((y, hn, cn), (torch.from_numpy(layer.dy), dhn, dcn))

    def same(found: Any, wanted: Any) -> None:
        np.testing.assert_allclose(np.asarray(found).ravel(), wanted.detach().numpy().ravel(), rtol=1e-4, atol=2e-6)

    for found, wanted in ((v.y, y), (v.hn, hn), (v.cn, cn), (g.x, x.grad), (g.h0, h0.grad), (g.c0, c0.grad)):
        same(found, wanted)
    for name, gradient in parameters(g):
        same(gradient, getattr(module, name).grad)


# ---- capacity (3, 6) ------------------------------------------------------------------------------------------------


class Tripwire:
    """Data that must not be looked at."""

    @property
    def __array_interface__(self) -> Any:
        raise AssertionError("data was read")

    def __buffer__(self, flags: int) -> memoryview:
        raise AssertionError("data was read")


def test_capacity_depends_on_the_scalar_fields_alone() -> None:
    layer = Layer(layers=2, directions=2)
    bare = layer.structure()
    bare.lstm_flags = BIDIRECTIONAL
    bare.input_descriptor.data_desc.data = Tripwire()
    assert 0 < capacity_of(bare) == capacity_of(layer.params) < bnns.SIZE_MAX
    assert capacity_of(bare) >= rg.lstm_cache_size(3, 2, 3, 4, num_layers=2, bidirectional=True)
    bare.lstm_flags = 0
    assert capacity_of(bare) < capacity_of(layer.params)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2**64, 2**63, 2**62, "3", None, 1.5, float("nan"), [3]], ids=str)
def test_capacity_refuses_sizes(name: str, value: Any) -> None:
    layer = Layer()
    setattr(layer.params, name, value)
    assert capacity_of(layer.params) == bnns.SIZE_MAX
    assert name in str(bnns.last_error())
    untouched(layer, layer.forward)
    untouched(layer, layer.backward)


def test_capacity_refuses_sizes_whose_product_is_too_large() -> None:
    for sizes in itertools.product((1, 2**20, 2**40), repeat=5):
        found = capacity_of(BNNSLayerParametersLSTM(*sizes))
        assert found == bnns.SIZE_MAX or 0 < found < 2**63
    assert capacity_of(BNNSLayerParametersLSTM(1, 2**20, 2**20, 2**10, 2**20)) == bnns.SIZE_MAX


@pytest.mark.parametrize("params", [None, 3, "params", BNNSNDArrayDescriptor(), object()], ids=type)
def test_structures_of_another_type(params: Any) -> None:
    layer = Layer()
    assert capacity_of(params) == bnns.SIZE_MAX
    assert forward(params, None, None, 0) == -1
    assert backward(params, layer.deltas, None, None, 0) == -1
    assert backward(layer.params, params, None, None, 0) == -1
    assert "BNNSLayerParametersLSTM" in str(bnns.last_error())
    if params is not None:
        assert forward(layer.params, params, None, 0) == -1
        assert backward(layer.params, layer.deltas, params, None, 0) == -1


# ---- data layouts (4.1) ---------------------------------------------------------------------------------------------

THREE = {
    "SNE": SNE,
    "NSE": NSE,
    "none": 0,
    "3DLastMajor": bnns.BNNSDataLayout3DLastMajor,
    "3DFirstMajor": bnns.BNNSDataLayout3DFirstMajor,
    "ImageCHW": bnns.BNNSDataLayoutImageCHW,
}
FOUR = {"4DLastMajor": bnns.BNNSDataLayout4DLastMajor, "4DFirstMajor": bnns.BNNSDataLayout4DFirstMajor}


def sequence(array: Array, layout: str, directions: int = 1) -> tuple[BNNSNDArrayDescriptor, Callable[[], Array]]:
    """The contents of an array [T][B][E] described with a layout, and a function that reads it back."""
    if layout == "NSE":
        memory = np.ascontiguousarray(array.transpose(1, 0, 2))
        return describe(memory, NSE), lambda: memory.transpose(1, 0, 2)
    memory = array.copy()
    if layout in FOUR:
        split = memory.reshape(*array.shape[:2], directions, -1)
        return describe(split, FOUR[layout]), lambda: memory
    desc = describe(memory, THREE[layout] or SNE)
    desc.layout = THREE[layout]
    return desc, lambda: memory


@pytest.mark.parametrize("y_layout", [*THREE, *FOUR])
@pytest.mark.parametrize("x_layout", THREE)
def test_layouts_of_data(x_layout: str, y_layout: str) -> None:
    layer = Layer(directions=2, batch_sizes=[2, 1, 2])
    v = layer.values
    assert v.x is not None
    assert v.y is not None
    params, deltas = layer.params, layer.deltas
    params.input_descriptor.data_desc, _ = sequence(v.x, x_layout)
    params.output_descriptor.data_desc, y = sequence(v.y, y_layout, 2)
    deltas.input_descriptor.data_desc, dx = sequence(v.x, x_layout)
    deltas.output_descriptor.data_desc, _ = sequence(layer.dy, y_layout, 2)
    layer.run()
    v.y, layer.gradients.x = y(), dx()
    layer.check_outputs(layer.expected_forward())
    layer.check_gradients(layer.expected_backward())


def test_sizes_of_data_are_those_of_the_layout() -> None:
    layer = Layer(steps=3, samples=2, inputs=5, units=4, directions=2)
    source, target = layer.params.input_descriptor.data_desc, layer.params.output_descriptor.data_desc
    for layout, x_size, y_size in ((SNE, (5, 2, 3), (8, 2, 3)), (NSE, (5, 3, 2), (8, 3, 2))):
        source.layout = target.layout = layout
        source.size, target.size = x_size, y_size
        assert layer.forward() == 0
        source.size = x_size[:1] + x_size[:0:-1]
        assert "input_descriptor.data_desc" in untouched(layer, layer.forward)
        source.size, target.size = x_size, y_size[:1] + y_size[:0:-1]
        assert "output_descriptor.data_desc" in untouched(layer, layer.forward)
        target.size = y_size


# ---- extents (4.2) --------------------------------------------------------------------------------------------------


def every_descriptor(params: BNNSLayerParametersLSTM) -> dict[str, BNNSNDArrayDescriptor]:
    found = {"sequence_descriptor": params.sequence_descriptor}
    for side in ("input_descriptor", "output_descriptor"):
        for field in ("data_desc", "hidden_desc", "cell_state_desc"):
            found[f"{side}.{field}"] = getattr(getattr(params, side), field)
    for gate in GATES:
        for field in ("hw_desc", "cw_desc", "b_desc"):
            found[f"{gate}.{field}"] = getattr(getattr(params, gate), field)
        found[f"{gate}.iw_desc[0]"], found[f"{gate}.iw_desc[1]"] = getattr(params, gate).iw_desc
    return found


def full_layer() -> Layer:
    """One that uses every descriptor."""
    return Layer(layers=2, directions=2, peephole="ifgo", batch_sizes=[2, 2, 1])


def test_zero_extents_are_filled_in() -> None:
    layer = full_layer()
    for params in (layer.params, layer.deltas):
        for desc in every_descriptor(params).values():
            desc.size = [0] * 8
    layer.check()


def test_single_zero_extents_are_filled_in() -> None:
    layer = full_layer()
    expected = layer.expected_forward()
    for desc in every_descriptor(layer.params).values():
        size = tuple(desc.size)
        for k in range(desc.layout >> 16):
            desc.size[k] = 0
            assert layer.forward() == 0
            layer.check_outputs(expected)
            desc.size = size


def test_every_contradicting_extent_is_refused() -> None:
    layer = full_layer()
    cache = layer.run()
    results = {name for name in every_descriptor(layer.params) if name.startswith("output_descriptor")}
    for params in (layer.params, layer.deltas):
        for name, desc in every_descriptor(params).items():
            if desc.data is None:
                continue
            size = tuple(desc.size)
            for k in range(desc.layout >> 16):
                for wrong in {size[k] + 1, size[k] - 1} - {0}:
                    desc.size[k] = wrong
                    call = layer.forward if params is layer.params and name in results else layer.backward
                    assert name in untouched(layer, lambda call=call: call(cache), cache)  # type: ignore[misc]
                    desc.size = size
    assert layer.backward(cache) == 0


def test_a_single_weight_as_a_plain_matrix_and_other_products() -> None:
    layer = Layer()
    for params, values in ((layer.params, layer.values), (layer.deltas, layer.gradients)):
        for name, arrays in zip(GATES, values.gates, strict=True):
            gate = getattr(params, name)
            gate.iw_desc[0] = describe(arrays["iw"][0, 0])  # type: ignore[index]
            gate.hw_desc = describe(arrays["hw"].reshape(-1))  # type: ignore[union-attr]
            gate.b_desc = describe(arrays["b"].reshape(-1))  # type: ignore[union-attr]
            assert (gate.iw_desc[0].layout, gate.iw_desc[0].size) == (bnns.BNNSDataLayoutRowMajorMatrix, (3, 4))
    layer.check()


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
@pytest.mark.parametrize("given", ["product", "missing", "zeros"])
def test_slow_axes(axes: int, given: str) -> None:
    """The slowest extent given as a product; slow axes left out; slow axes after a product given as 0."""
    layer = Layer(layers=3, directions=2, peephole="ifgo")
    for params in (layer.params, layer.deltas):
        for desc in every_descriptor(params).values():
            if desc.data is None:
                continue
            extents = desc.data.shape[::-1]
            if desc.layout == SNE:
                continue
            first = extents[: axes - 1]
            if given == "missing":
                extents = extents[:axes]
            else:
                extents = (*first, int(np.prod(extents[axes - 1 :]))) if axes < len(extents) else extents
            rank = max(axes, len(extents)) if given != "zeros" else 4
            desc.layout, desc.size = rank << 16 | 0x8000, extents
    layer.check()


def test_more_axes_than_needed() -> None:
    layer = Layer()
    for params in (layer.params, layer.deltas):
        for desc in every_descriptor(params).values():
            if desc.data is not None and desc.layout != SNE:
                desc.layout, desc.size = bnns.BNNSDataLayout7DLastMajor, (*desc.data.shape[::-1], 1, 0, 1)
    layer.check()
    layer.params.input_descriptor.hidden_desc.size[6] = 2
    untouched(layer, layer.forward)


# ---- strides (1, S.1) -----------------------------------------------------------------------------------------------


def spread(
    array: Array, paddings: tuple[int, ...], short: int = 0
) -> tuple[BNNSNDArrayDescriptor, Callable[[], Array], Callable[[], bool]]:
    """The same contents with gaps after every axis (fastest first), in a buffer exactly as long as needed less `short`
    elements; a function that reads it back, and one that says whether the gaps are as they were."""
    extents = array.shape[::-1]
    strides, step = [], 1 + paddings[0]
    for extent, padding in zip(extents, (*paddings[1:], 0), strict=False):
        strides.append(step)
        step = step * extent + padding
    span = 1 + sum((n - 1) * s for n, s in zip(extents, strides, strict=True))
    buffer = np.full(span, 77, np.float32)
    view = np.lib.stride_tricks.as_strided(buffer, array.shape, [4 * s for s in reversed(strides)])
    view[...] = array
    gaps = np.full(span, True)
    np.lib.stride_tricks.as_strided(gaps, array.shape, list(reversed(strides)))[...] = False
    desc = BNNSNDArrayDescriptor(
        layout=array.ndim << 16 | 0x8000,
        size=extents,
        stride=strides,
        data=buffer[: span - short].copy() if short else buffer,
        data_type=bnns.BNNSDataTypeFloat32,
    )
    return desc, lambda: view, lambda: bool((buffer[gaps] == 77).all())


def replace_descriptors(layer: Layer, change: Callable[[Array, int], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Give every array to `change`, with its number; put the descriptor that it returns in its place."""
    counter, made = itertools.count(), []

    def new(array: Array | None) -> BNNSNDArrayDescriptor:
        if array is None:
            return BNNSNDArrayDescriptor()
        made.append(change(array, next(counter)))
        return made[-1][0]  # type: ignore[no-any-return]

    for params, v in ((layer.params, layer.values), (layer.deltas, layer.gradients)):
        source, target = params.input_descriptor, params.output_descriptor
        source.data_desc, source.hidden_desc, source.cell_state_desc = new(v.x), new(v.h0), new(v.c0)
        target.data_desc, target.hidden_desc, target.cell_state_desc = new(v.y), new(v.hn), new(v.cn)
        for name, arrays in zip(GATES, v.gates, strict=True):
            gate = getattr(params, name)
            gate.iw_desc = [new(arrays["iw"]), new(arrays["upper"])]
            gate.hw_desc, gate.b_desc, gate.cw_desc = new(arrays["hw"]), new(arrays["b"]), new(arrays["cw"])
    return made


def read_back(layer: Layer, made: list[tuple[Any, ...]]) -> None:
    """What the descriptors hold, into the layer's own arrays."""
    targets = [*all_arrays(layer.values), *all_arrays(layer.gradients)]
    for target, (_, read, *_) in zip(targets, made, strict=True):
        target[...] = read()


def all_arrays(v: Values) -> Iterator[Array]:
    """In the order of replace_descriptors."""
    for array in (v.x, v.h0, v.c0, v.y, v.hn, v.cn):
        if array is not None:
            yield array
    for gate in v.gates:
        for name in ("iw", "upper", "hw", "b", "cw"):
            if gate[name] is not None:
                yield gate[name]  # type: ignore[misc]


@pytest.mark.parametrize(
    "paddings",
    [(0, 0, 0, 0), (0, 3, 0, 0), (0, 0, 5, 0), (0, 0, 0, 7), (1, 0, 0, 0), (1, 2, 3, 4)],
    ids=str,
)
@pytest.mark.parametrize("directions", [1, 2])
def test_strides(paddings: tuple[int, ...], directions: int) -> None:
    """Gaps between rows, samples, directions, layers, and between values; nothing but the array is written."""
    layer = Layer(layers=2, directions=directions, peephole="ifgo")
    made = replace_descriptors(layer, lambda array, _: spread(array, paddings))
    layer.run()
    assert all(gaps() for _, _, gaps in made)
    read_back(layer, made)
    layer.check_outputs(layer.expected_forward())
    layer.check_gradients(layer.expected_backward())


def test_directions_of_the_output_that_lie_apart() -> None:
    layer = Layer(directions=2)
    made = []
    for params, array in ((layer.params, layer.values.y), (layer.deltas, layer.dy)):
        assert array is not None
        made.append(spread(array.reshape(3, 2, 2, 4), (0, 3, 0, 2)))
        params.output_descriptor.data_desc = made[-1][0]
    layer.run()
    layer.values.y = made[0][1]().reshape(3, 2, 8)
    assert made[0][2]()
    layer.check_outputs(layer.expected_forward())
    layer.check_gradients(layer.expected_backward())


def test_read_only_inputs_beside_outputs_that_lie_apart() -> None:
    """Only what is written has to be writable, also where results go by way of temporaries."""
    layer = Layer(directions=2, batch_sizes=[2, 1, 1])
    assert layer.values.y is not None
    assert layer.batch_sizes is not None
    layer.params.output_descriptor.data_desc = spread(layer.values.y.reshape(3, 2, 2, 4), (0, 3, 0, 2))[0]
    layer.batch_sizes.flags.writeable = False
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer.params, None, None, 0) == 0, bnns.last_error()


def test_tensors_that_move_their_memory_are_looked_at_anew(torch: Any) -> None:
    """What speaks only DLPack may put its numbers elsewhere between two calls."""
    layer = Layer()
    assert layer.values.x is not None
    tensor = torch.from_numpy(layer.values.x.copy())
    layer.params.input_descriptor.data_desc.data = tensor
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer.params, None, None, 0) == 0, bnns.last_error()
    assert layer.values.y is not None
    first = layer.values.y.copy()
    tensor.data = 2 * tensor
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer.params, None, None, 0) == 0
    assert not np.array_equal(layer.values.y, first)
    tensor.resize_(1)
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer.params, None, None, 0) == -1


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_layouts_strides_and_zero_extents(data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 3), name) for name in ("T", "B", "I", "H", "L")]
    layer = Layer(
        *sizes,
        directions=data.draw(st.integers(1, 2)),
        bias=data.draw(st.sampled_from(("ifgo", "", "g"))),
        peephole=data.draw(st.sampled_from(("", "ifgo", "fo"))),
        states=data.draw(st.sampled_from(("hc", "", "c"))),
    )

    def change(array: Array, _: int) -> tuple[Any, ...]:
        paddings = tuple(data.draw(st.lists(st.sampled_from((0, 0, 1, 2)), min_size=4, max_size=4)))
        desc, read, gaps = spread(array, paddings)
        if data.draw(st.booleans()):  # extents listed slowest first, strides still fastest first
            desc.layout, desc.size = desc.layout | 1, array.shape
        for k in range(array.ndim):
            if data.draw(st.integers(0, 3)) == 0:
                desc.size[k] = 0
        if not any(paddings) and data.draw(st.booleans()):
            desc.stride = [0] * 8
        return desc, read, gaps

    made = replace_descriptors(layer, change)
    layer.run()
    assert all(gaps() for _, _, gaps in made)
    read_back(layer, made)
    layer.check_outputs(layer.expected_forward())
    layer.check_gradients(layer.expected_backward())


def test_one_element_less_than_needed_is_refused() -> None:
    """For every array of both structures; with the whole buffer it works."""
    layer = Layer(layers=2, directions=2, peephole="ifgo")
    arrays = [*all_arrays(layer.values), *all_arrays(layer.gradients)]
    made = replace_descriptors(layer, lambda array, _: spread(array, (0, 1, 0, 0)))
    cache = layer.run()
    whole = [desc.data for desc, _, _ in made]
    refused = 0
    for params in (layer.params, layer.deltas):
        for name, desc in every_descriptor(params).items():
            if desc.data is None:
                continue
            buffer = desc.data
            desc.data = buffer[:-1]
            call = layer.forward if name.startswith("output") and params is layer.params else layer.backward
            reason = untouched(layer, lambda call=call: call(cache), cache, *whole)  # type: ignore[misc]
            assert name in reason
            assert "spans" in reason
            desc.data = buffer
            refused += 1
    assert refused == len(arrays)
    assert layer.backward(cache) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("paddings", [(0, 0, 0, 0), (0, 1, 2, 3), (1, 0, 0, 0)], ids=str)
def test_memory_beside_the_arrays_and_the_cache_is_not_even_read(at_end: bool, paddings: tuple[int, ...]) -> None:
    layer = Layer(steps=5, samples=3, inputs=5, units=7, layers=2, directions=2, peephole="ifgo")
    replace_descriptors(layer, lambda array, _: spread(array, paddings))
    for params in (layer.params, layer.deltas):
        for desc in every_descriptor(params).values():
            if desc.data is not None:
                desc.data = fenced(desc.data, at_end)
    cache = fenced(np.zeros(len(layer.cache()), np.uint8), at_end)
    for buffer in (cache, None):
        assert layer.forward(buffer) == 0
        assert layer.backward(buffer) == 0
    assert np.isfinite(layer.params.output_descriptor.data_desc.data).all()


@pytest.mark.parametrize("stride", [(2, 1), (1, 2**63), (2**64 - 1,), (1, 4, 3), ("a",), (1.5,)], ids=str)
def test_strides_that_make_no_sense(stride: tuple[Any, ...]) -> None:
    layer = Layer(layers=2, directions=2)
    for name, desc in every_descriptor(layer.params).items():
        if desc.data is not None and not name.endswith("b_desc"):
            old = tuple(desc.stride)
            desc.stride = stride
            assert name in untouched(layer, layer.forward)
            desc.stride = old
    assert layer.forward() == 0


def test_a_result_whose_elements_share_memory_is_refused() -> None:
    layer = Layer()
    cache = layer.run()
    for params, call in ((layer.params, layer.forward), (layer.deltas, layer.backward)):
        for name, desc in every_descriptor(params).items():
            if desc.data is None or name.startswith("input_d") == (params is layer.params) or name.endswith("b_desc"):
                continue
            if name.startswith("output_d") != (params is layer.params):
                continue
            desc.stride = (1, 1, 1, 1)
            assert "share memory" in untouched(layer, lambda call=call: call(cache), cache)  # type: ignore[misc]
            desc.stride = [0] * 8
    layer.params.input_descriptor.data_desc.stride = (1, 1, 1)  # reading the same twice is no harm
    assert layer.forward() == 0


# ---- input weights of the layers (4.3) ------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "units", "directions"), [(4, 4, 1), (8, 4, 2)])
def test_one_descriptor_holds_all_layers_if_the_widths_agree(inputs: int, units: int, directions: int) -> None:
    layer = Layer(layers=3, inputs=inputs, units=units, directions=directions)
    for params in (layer.params, layer.deltas):
        for name in GATES:
            gate = getattr(params, name)
            assert gate.iw_desc[0].size[0] == 3  # FirstMajor: layers first
            gate.iw_desc[1] = gate.iw_desc[0]  # as Apple's article does: it is ignored
    layer.check()
    for params in (layer.params, layer.deltas):
        for name in GATES:
            getattr(params, name).iw_desc[1] = BNNSNDArrayDescriptor(size=(9, 9), data=bytearray(1), data_type=3)
    layer.check()


@pytest.mark.parametrize(("inputs", "units", "directions"), [(3, 4, 1), (4, 4, 2), (3, 4, 2)])
def test_the_second_descriptor_holds_the_upper_layers_otherwise(inputs: int, units: int, directions: int) -> None:
    """With two directions even where the input size is the hidden size."""
    layer = Layer(layers=3, inputs=inputs, units=units, directions=directions)
    layer.check()
    for params in (layer.params, layer.deltas):
        gate = params.forget_gate
        kept = gate.iw_desc[1].data
        gate.iw_desc[1].data = None
        if params is layer.params:
            assert "forget_gate.iw_desc[1]" in untouched(layer, layer.forward)
        else:
            assert layer.backward() == 0  # a gradient that is not wanted
        gate.iw_desc[1].data = kept


def test_with_one_layer_the_second_descriptor_is_ignored() -> None:
    layer = Layer()
    layer.params.input_gate.iw_desc[1] = BNNSNDArrayDescriptor(size=(9, 9), data=bytearray(1))
    layer.check()


# ---- NULL data (4.5) ------------------------------------------------------------------------------------------------


def test_mandatory_data() -> None:
    layer = Layer(layers=2)
    for name, desc in every_descriptor(layer.params).items():
        if name == "input_descriptor.data_desc" or name.endswith(("iw_desc[0]", "iw_desc[1]", "hw_desc")):
            data = desc.data
            desc.data = None
            assert f"{name}.data is NULL" in untouched(layer, layer.forward)
            untouched(layer, layer.backward)
            desc.data = data


@pytest.mark.parametrize("present", list(itertools.product((False, True), repeat=3)), ids=str)
def test_outputs_without_data_are_not_stored(present: tuple[bool, bool, bool]) -> None:
    layer = Layer(layers=2)
    expected = layer.expected_forward()
    target = layer.params.output_descriptor
    for there, name in zip(present, ("data_desc", "hidden_desc", "cell_state_desc"), strict=True):
        if not there:
            setattr(target, name, BNNSNDArrayDescriptor())
    cache = layer.cache()
    assert layer.forward(cache) == 0
    v = layer.values
    for there, array, wanted in zip(present, (v.y, v.hn, v.cn), (expected.y, expected.hn, expected.cn), strict=True):
        assert array is not None
        assert np.array_equal(array, wanted.reshape(array.shape)) if there else np.isnan(array).all()
    assert layer.backward(cache) == 0
    layer.check_gradients(layer.expected_backward())


@pytest.mark.parametrize("present", list(itertools.product((False, True), repeat=3)), ids=str)
def test_incoming_gradients_without_data_are_zero(present: tuple[bool, bool, bool]) -> None:
    layer = Layer(layers=2)
    cache = layer.cache()
    assert layer.forward(cache) == 0
    names = ("data_desc", "hidden_desc", "cell_state_desc")
    for there, name, array in zip(present, names, (layer.dy, layer.dhn, layer.dcn), strict=True):
        if not there:
            array[...] = 0
            getattr(layer.deltas.output_descriptor, name).data = None
    assert layer.backward(cache) == 0
    layer.check_gradients(layer.expected_backward())
    if not any(present):
        assert not layer.gradients.x.any()  # type: ignore[union-attr]
        assert not any(a.any() for gate in layer.gradients.gates for a in gate.values() if a is not None)


def test_gradients_of_states_that_were_not_given() -> None:
    layer = Layer(layers=2, states="")
    layer.check()
    assert layer.gradients.h0 is not None
    assert np.isfinite(layer.gradients.h0).all()


# ---- activations (2.4, 8) -------------------------------------------------------------------------------------------

ELEMENTWISE = {kind.code: name for name, kind in ACTIVATIONS.items() if kind.code <= 35}
ROLES = (*(f"{gate}.activation" for gate in GATES), "hidden_activation")


def activation_of(params: BNNSLayerParametersLSTM, role: str) -> Any:
    gate, _, rest = role.partition(".")
    return getattr(params, gate).activation if rest else params.hidden_activation


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


# ---- the training cache (3, 6) --------------------------------------------------------------------------------------


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
    for at in (*range(32), *range(len(good) - 56, len(good))):
        damaged = bytearray(good)
        damaged[at] ^= 0x40
        untouched(layer, lambda cache=damaged: layer.backward(cache), damaged)  # type: ignore[misc]
    assert layer.backward(good) == 0


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


# ---- backward's results (7.1) ---------------------------------------------------------------------------------------


def test_accumulate_everywhere_is_the_engines_own() -> None:
    layer = Layer(layers=2, directions=2, peephole="ifgo")
    expected = layer.expected_backward()
    layer.fresh_gradients(bnns.BNNSNDArrayFlagBackpropAccumulate, 0.25)
    base = layer.expected_forward().cache
    assert base is not None
    wanted = copy.deepcopy(expected)
    for array in (wanted.dx, wanted.dh0, wanted.dc0, *(a for cell in wanted.dweights for part in cell for a in part)):
        assert array is not None
        array[...] = 0.25
    dhn, dcn = layer.states(layer.dhn), layer.states(layer.dcn)
    rg.lstm_backward(layer.dy, base, dhn=dhn, dcn=dcn, out=wanted, accumulate=True)
    layer.run()
    layer.check_gradients(wanted)


def result_names(layer: Layer) -> dict[str, BNNSNDArrayDescriptor]:
    return {
        name: desc
        for name, desc in every_descriptor(layer.deltas).items()
        if desc.data is not None and not name.startswith(("output_descriptor", "sequence"))
    }


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


class Allocator:
    """The client's own memory, with a limit."""

    def __init__(self, limit: int = 10**6) -> None:
        self.limit, self.taken, self.given_back = limit, 0, 0
        self.live: list[bytearray] = []

    def parameters(self) -> Any:
        return bnns.BNNSFilterParameters(alloc_memory=self.alloc, free_memory=self.free)

    def alloc(self, memptr: Any, alignment: int, size: int) -> int:
        assert alignment & (alignment - 1) == 0
        if self.taken >= self.limit:
            return 12
        self.taken += 1
        memory = np.full(size + alignment, 0xCD, np.uint8)
        start = -memory.ctypes.data % alignment
        memptr[0] = memory[start : start + size]
        return 0

    def free(self, memory: Any) -> None:
        self.given_back += 1


def test_the_clients_allocator_gives_the_memory_of_a_call() -> None:
    layer = Layer(layers=2, directions=2)
    made = replace_descriptors(layer, lambda array, _: spread(array, (0, 0, 2, 3)))  # states need temporaries
    layer.deltas.forget_gate.hw_desc.flags = 1
    made[-1][0].data[...] = 0
    allocator = Allocator()
    assert forward(layer.params, allocator.parameters(), None, 0) == 0
    assert allocator.taken == allocator.given_back == 2
    layer.deltas.forget_gate.hw_desc.data[...] = 0
    assert backward(layer.params, layer.deltas, allocator.parameters(), None, 0) == 0
    assert allocator.taken == allocator.given_back > 3
    total = allocator.taken - 2
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
        assert allocator.taken == allocator.given_back == limit


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
