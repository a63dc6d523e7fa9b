"""Apple's BNNS LSTM: worked examples, agreement with the array functions and PyTorch, and the capacity of the cache."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNSLayerParametersLSTM, BNNSNDArrayDescriptor
from support.arrays import Array
from support.bnns import fails
from support.bnns_lstm import BIDIRECTIONAL, SIZES, Layer, Tripwire, Values, backward, capacity_of, forward, untouched

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
@pytest.mark.parametrize("value", [-1, 2**64, 2**63, 2**62, "3", None, 1.5, float("nan"), [3]], ids=str)
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
    fails(backward(layer.params, params, None, None, 0), "BNNSLayerParametersLSTM")
    if params is not None:
        assert forward(layer.params, params, None, 0) == -1
        assert backward(layer.params, layer.deltas, params, None, 0) == -1
