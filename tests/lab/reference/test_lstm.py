"""The LSTM oracle against mathematics (finite differences), documents and other people's libraries.

The engine is then checked against the oracle, so nothing here may import the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from retrograd.lab import reference
from retrograd.lab.reference import LstmCell
from support.onnx_cases import OnnxRecurrent, collect_onnx_recurrent_cases
from support.reference import CASES, EPS, LONG_EPS, ORDER, assert_close, derivative, jax_lstm

Array = np.ndarray[Any, Any]

PRINTED = 0.5001e-10  # half a unit of the last digit of a number printed to ten decimals
GATES = "ifgo"


class Network(NamedTuple):
    x: Array
    cells: list[LstmCell]
    h0: Array
    c0: Array

    def backward(self, d: Incoming, **options: Any) -> reference.LstmBackward:
        return reference.lstm_backward(d.dy, d.dhn, d.dcn, self.x, self.cells, self.h0, self.c0, **options)


class Incoming(NamedTuple):
    dy: Array
    dhn: Array
    dcn: Array


def network(
    rng: np.random.Generator,
    *,
    shape: tuple[int, int, int] = (4, 3, 2),
    H: int = 3,
    layers: int = 1,
    directions: int = 1,
    bias: bool = True,
    peephole: str = "",
) -> Network:
    """Random data [T, N, I] and parameters, with states and pre-activations of size 1."""
    cells = []
    for number in range(layers * directions):
        width = shape[2] if number < directions else directions * H
        cells.append(
            LstmCell(
                rng.normal(0, 0.7, size=(4, H, width)),
                rng.normal(0, 0.5, size=(4, H, H)),
                rng.normal(0, 0.5, size=(4, H)) if bias else None,
                {"": None, "diagonal": rng.normal(0, 0.8, (4, H)), "full": rng.normal(0, 0.5, (4, H, H))}[peephole],
            )
        )
    h0, c0 = rng.normal(size=(2, len(cells), shape[1], H))
    return Network(rng.normal(size=shape), cells, h0, c0)


def incoming(rng: np.random.Generator, net: Network, directions: int = 1) -> Incoming:
    T, N, _ = net.x.shape
    H = net.h0.shape[-1]
    return Incoming(rng.normal(size=(T, N, directions * H)), *rng.normal(size=(2, *net.h0.shape)))


def dropout(rng: np.random.Generator, p: float, shape: tuple[int, ...]) -> Array:
    return np.where(rng.random(shape) < p, 0.0, 1 / (1 - p))


def flat(x: Any, cells: list[LstmCell], h0: Any, c0: Any) -> dict[str, Any]:
    """All arrays, or all gradients, by name; absent parameters left out."""
    named = {f"{key}[{n}]": a for n, cell in enumerate(cells) for key, a in cell._asdict().items() if a is not None}
    return {"x": x, "h0": h0, "c0": c0, **named}


def moved(net: Network, name: str, by: Any) -> Network:
    """The network with one array moved, in long double, so that the oracle computes in it."""
    arrays = {key: (a + by if key == name else a.astype(np.longdouble)) for key, a in flat(*net).items()}
    cells = [LstmCell(*(arrays.get(f"{key}[{n}]") for key in LstmCell._fields)) for n in range(len(net.cells))]  # type: ignore[arg-type]
    return Network(arrays["x"], cells, arrays["h0"], arrays["c0"])


# --- finite differences -----------------------------------------------------------------------------------------------


def check_gradients(net: Network, rng: np.random.Generator, **options: Any) -> None:
    """Every array is moved along a random direction; the loss is a random linear functional of y, hn and cn."""
    out = reference.lstm_forward(*net, **options)
    d = incoming(rng, net, options.get("directions", 1))
    back = net.backward(d, **options)
    gradients = flat(back.dx, back.cells, back.dh0, back.dc0)
    arrays = flat(*net)
    assert gradients.keys() == arrays.keys()
    for name, a in arrays.items():
        direction = rng.uniform(-0.5, 0.5, size=a.shape)

        def loss(h: Any, name: str = name, direction: Array = direction) -> Any:
            got = reference.lstm_forward(*moved(net, name, h * direction), **options)
            # Less the values at 0: the sum then rounds in proportion to the step.
            return sum(np.sum(w * (new - old)) for w, new, old in zip(d, got[:3], out[:3], strict=True))

        assert gradients[name].shape == a.shape, name
        slope = np.sum(gradients[name] * direction)
        # Truncation is the fifth derivative over 30 in units of ORDER, and steps and layers multiply what it can be.
        assert_close(slope, derivative(loss), atol=500 * ORDER, rtol=500 * ORDER)
        assert abs(slope) > 1e-6, name


LENGTHS = reference.active_from_lengths([3, 0, 4], 4)
BATCH_SIZES = reference.active_from_batch_sizes([1, 3, 0, 2], 3)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no_bias": ({"bias": False}, {}),
    "diagonal_new": ({"peephole": "diagonal"}, {}),
    "diagonal_old": ({"peephole": "diagonal"}, {"output_reads": "old"}),
    "full_new": ({"peephole": "full"}, {}),
    "full_old": ({"peephole": "full"}, {"output_reads": "old"}),
    "lengths": ({"peephole": "diagonal"}, {"active": LENGTHS}),
    "batch_sizes": ({"peephole": "full"}, {"active": BATCH_SIZES}),
    "bidirectional": ({"directions": 2, "bias": False}, {"directions": 2}),
    "stacked": ({"layers": 3}, {}),
    "two_by_two": ({"layers": 2, "directions": 2}, {"directions": 2}),
    "two_by_two_lengths": (
        {"layers": 2, "directions": 2, "peephole": "diagonal"},
        {"directions": 2, "active": LENGTHS, "output_reads": "old"},
    ),
    "two_by_two_batch_sizes_masks": (
        {"layers": 2, "directions": 2, "peephole": "full"},
        {"directions": 2, "active": BATCH_SIZES, "masks": 1},
    ),
    "stacked_masks": ({"layers": 3, "peephole": "full"}, {"masks": 2}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_the_derivative(variant: str) -> None:
    shape, options = VARIANTS[variant]
    rng = np.random.default_rng([3, list(VARIANTS).index(variant)])
    net = network(rng, **shape)
    if "masks" in options:
        width = options.get("directions", 1) * 3
        options = {**options, "masks": [dropout(rng, 0.3, (4, 3, width)) for _ in range(options["masks"])]}
    check_gradients(net, rng, **options)


def activation(name: str) -> tuple[str, float, float]:
    alpha, beta, _ = CASES[name]
    return name, alpha, beta


def with_clearance(rng: np.random.Generator, activations: list[tuple[str, float, float]], **shape: Any) -> Network:
    """A network whose pre-activations and cell states keep away from the kinks of the activations that see them."""
    while True:
        net = network(rng, **shape)
        out = reference.lstm_forward(*net, activations=activations, directions=shape.get("directions", 1))
        seen = [*np.moveaxis(np.stack(out.z), 3, 0), np.stack(out.cells)]
        if all(
            np.all(np.abs(z - kink) > 0.02)
            for (name, _, _), z in zip(activations, seen, strict=True)
            for kink in CASES[name][2]
        ):
            return net


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("role", range(5), ids=["i", "f", "g", "o", "hidden"])
def test_gradients_with_every_activation(name: str, role: int) -> None:
    activations = list(reference.LSTM_ACTIVATIONS)
    activations[role] = activation(name)
    rng = np.random.default_rng([5, role, list(CASES).index(name)])
    net = with_clearance(rng, activations, shape=(3, 2, 2), H=2, peephole="full")
    check_gradients(net, rng, activations=activations)


@pytest.mark.parametrize(
    "names",
    [
        ("softsign", "hard_sigmoid", "softplus", "log_sigmoid", "scaled_tanh"),
        ("hard_sigmoid", "softsign", "selu", "elu", "identity"),
    ],
    ids="-".join,
)
def test_gradients_with_mixed_activations(names: tuple[str, ...]) -> None:
    activations = [activation(name) for name in names]
    rng = np.random.default_rng(7)
    shape: dict[str, Any] = {"shape": (3, 2, 2), "H": 2, "layers": 2, "directions": 2}
    net = with_clearance(rng, activations, **shape)
    check_gradients(net, rng, directions=2, activations=activations)


# --- documents --------------------------------------------------------------------------------------------------------


def numbers(text: str) -> Array:
    return np.array(text.replace("|", " ").split(), dtype=np.float64)


# The first worked example of the BNNS description: wx, wh, full peephole and bias of each gate.
EXAMPLE_1 = {
    "i": ".1 .2 -.3 .4   .5 -.1 .2 .3   .1 .05 -.2 .15   .1 -.1",
    "f": ".2 -.4 .1 .3   -.2 .1 .4 -.3   .05 -.1 .2 .1   .5 .25",
    "g": ".7 .1 -.2 .6   .3 .2 -.1 .5   .2 0 .1 -.3   0 .05",
    "o": "-.1 .5 .3 .2   .1 .1 -.4 .2   .3 -.2 .1 .4   -.2 .3",
}
EXAMPLE_1_GRADIENTS = {
    "i": """
0.0002229401 -0.0854112861 -0.1318328436  0.7567136670   -0.0069464524 -0.0030996800 0.0432528375  0.0511081121
-0.0187799228  0.0024130245  0.1130802630 -0.0715527343   -0.0298828774  0.1119779489""",
    "f": """
-0.0076839486 -0.0984507278  0.1618403996 -0.0523742353   -0.0091254105 -0.0021269182 0.0185161621 -0.0313456797
-0.0249065298 -0.0002867886  0.0548592873  0.0639584735   -0.0437872552  0.1719154459""",
    "g": """
-0.0205820154 -0.3703443780  0.4599352573  0.4216746105   -0.0331550033 -0.0095164059 0.0992307976 -0.0686478809
-0.0902751472  0.0021369580  0.2819594817  0.1662212176   -0.1549239162  0.6899266358""",
    "o": """
0.1013032780 -0.0849555482  0.0635950387  0.4452864894    0.0073277984 -0.0214892819 0.0453358771  0.0043681981
0.0481911383 -0.0047723314  0.1315630051  0.1283745913    0.0891960159  0.2319776300""",
}
EXAMPLE_1_Z = """
0.22 -0.64   0.835 0.4   0.7 -0.65   -0.4050673891 0.4912945974
0.6782490713 0.5699673072   -0.2640954744 1.0597234739   0.5487064665 1.2350127980   0.8537586108 0.9857273967"""


def test_worked_example_with_full_peepholes() -> None:
    rows = np.stack([numbers(EXAMPLE_1[k]) for k in GATES])
    wx, wh, peephole = (rows[:, k : k + 4].reshape(4, 2, 2) for k in (0, 4, 8))
    cell = LstmCell(wx, wh, rows[:, 12:], peephole)
    net = Network(numbers("1 -.5 .25 2").reshape(2, 1, 2), [cell], np.array([[[0.1, -0.2]]]), np.array([[[0.3, 0.4]]]))
    out = reference.lstm_forward(*net)
    assert_close(out.z[0].ravel(), numbers(EXAMPLE_1_Z), atol=PRINTED)
    assert_close(out.cells[0].ravel(), numbers("0.5445140274 0.0421079866 0.5678890604 0.5703981121"), atol=PRINTED)
    assert_close(out.y.ravel(), numbers("0.1986063073 0.0261088440 0.3603613254 0.3755197550"), atol=PRINTED)
    np.testing.assert_array_equal(out.hn[0], out.y[-1])
    np.testing.assert_array_equal(out.cn[0], out.cells[0][-1])
    back = net.backward(
        Incoming(numbers("1 .5 -.25 2").reshape(2, 1, 2), np.array([[[0.1, 0.2]]]), np.array([[[-0.3, 0.4]]]))
    )
    assert_close(back.dx.ravel(), numbers("0.0136661452 0.2491605780 -0.2275721051 0.3482006857"), atol=PRINTED)
    assert_close(back.dh0.ravel(), numbers("0.0015105466 0.0964365406"), atol=PRINTED)
    assert_close(back.dc0.ravel(), numbers("0.1666524158 0.8562528822"), atol=PRINTED)
    (d,) = back.cells
    assert d.b is not None
    assert d.peephole is not None
    for k, gate in enumerate(GATES):
        got = np.concatenate([a[k].ravel() for a in (d.wx, d.wh, d.peephole, d.b)])
        assert_close(got, numbers(EXAMPLE_1_GRADIENTS[gate]), atol=PRINTED)


EXAMPLE_2 = {
    "constant": {
        "y": """
0.0423314569 0.0912395484 -0.0133689029 0.0312557218
0.1003589889 0.0929596569  0.0236524099 0.0600009324
0.0750733821 0.0288204204  0.0405730961 0.0386439635""",
        "hn": """-0.0545077148 0.0605750584 | 0.1361979753 -0.0826238665 |
0.0750733821 0.0405730961 | 0.0912395484 0.0312557218""",
        "cn": """-0.0870118351 1.4904087103 | 0.1935999216 -0.2577661587 |
0.1462500539 0.0798297440 | 0.1690283105 0.0626641918""",
        "dx": "0.1098831395 0.0356269635   0.1090778766 0.0177069209  -0.0356912552 -0.0078376853",
        "dwx0": """0.3481508335 -0.2373803032 -0.0672038414 0.0317119837
0.0877235428 0.0237464910 0.5910087868 -0.0837861047""",
        "dwx1": """0.0267289250 0.0059565346 0.0018793219 -0.0051843720
0.1833052611 0.0499486597 0.0197072594 -0.0017636526""",
        "dh0": """0.0279840423 -0.0022272951 | 0.0016752049 0.0002247075 |
0.1117679037 0.0936182513 | -0.1012268040 -0.0990134486""",
    },
    "2_2_1": {
        "y": """
0.0423314569 0.0912395484 -0.0133208993 0.0237249708
0.1003589889 0.0929596569  0.0239605693 0.0423261658
0.0750733821 0.0288204204  0 0""",
        "hn": """-0.0545077148 0.1712405147 | 0.1361979753 -0.0830386207 |
0.0750733821 0.0239605693 | 0.0912395484 0.0237249708""",
        "dx": "0.1098831395 0.0294832582   0.1090778766 0.0135084295  -0.0356912552 0",
        "dh0": """0.0279840423 -0.0020199614 | 0.0016752049 0.0058845483 |
0.1117679037 0.0773357792 | -0.1012268040 -0.0860976735""",
    },
}


@pytest.mark.parametrize("batch", EXAMPLE_2)
def test_worked_example_of_two_layers_and_directions(batch: str) -> None:
    v = numbers(".5 .4 .9 -.3 | -.6 .2 .7 .8").reshape(2, 4, 1, 1)
    cells = [
        LstmCell(
            v[d] if layer == 0 else np.concatenate([v[d], -v[d] / 2], axis=-1),
            np.full((4, 1, 1), 0.1 * (layer + 1) * (1, -1)[d]),
            np.full((4, 1), 0.05 * (d + 1)),
        )
        for layer in range(2)
        for d in range(2)
    ]
    x = numbers("1 -1 .5 2 -1.5 9").reshape(3, 2, 1)
    active = None if batch == "constant" else reference.active_from_batch_sizes([2, 2, 1], 2)
    out = reference.lstm_forward(x, cells, directions=2, active=active)
    back = reference.lstm_backward(np.ones((3, 2, 2)), None, None, x, cells, directions=2, active=active)
    got = {**out._asdict(), **back._asdict()}
    got["dwx0"] = np.stack([back.cells[0].wx, back.cells[1].wx], axis=1)  # gate by gate, both directions
    got["dwx1"] = back.cells[2].wx
    for name, text in EXAMPLE_2[batch].items():
        assert_close(got[name].ravel(), numbers(text), atol=PRINTED)


def test_worked_example_of_one_unit() -> None:
    wx = numbers("1 .5 1 2").reshape(4, 1, 1)
    cell = LstmCell(wx, np.zeros((4, 1, 1)))
    x = np.ones((1, 1, 1))
    out = reference.lstm_forward(x, [cell])
    back = reference.lstm_backward(np.ones((1, 1, 1)), None, None, x, [cell])
    assert_close(out.cn.item(), 0.5567699411, atol=PRINTED)
    assert_close(out.y.item(), 0.4453106840, atol=PRINTED)
    assert_close(back.cells[0].wx.ravel(), numbers("0.0981772853 0 0.2013040342 0.0530823347"), atol=PRINTED)
    assert_close(back.dx.item(), 0.4056459889, atol=PRINTED)
    assert back.cells[0].b is None
    assert back.cells[0].peephole is None


# --- conventions ------------------------------------------------------------------------------------------------------


def results(out: reference.LstmForward, back: reference.LstmBackward) -> dict[str, Any]:
    gradients = {f"d{key}": a for key, a in flat(back.dx, back.cells, back.dh0, back.dc0).items()}
    return {"y": out.y, "hn": out.hn, "cn": out.cn, **gradients}


def same(got: Mapping[str, Any], expected: Mapping[str, Any], atol: float = 256 * LONG_EPS) -> None:
    assert got.keys() == expected.keys()
    for name, a in expected.items():
        assert_close(got[name], a, atol=atol)


@pytest.mark.parametrize("output_reads", ["new", "old"])
def test_each_sample_sees_its_own_steps_only(output_reads: str) -> None:
    """Any pattern of participation is, sample by sample, a shorter sequence; the parameter gradients add up."""
    rng = np.random.default_rng(11)
    T, N = 6, 5
    net = network(rng, shape=(T, N, 2), layers=2, directions=2, peephole="diagonal")
    d = incoming(rng, net, 2)
    mask = dropout(rng, 0.4, (T, N, 6))
    active = rng.random((T, N)) < 0.6
    active[:, 1] = False
    options: dict[str, Any] = {"directions": 2, "output_reads": output_reads}
    net.x[~active] = math.nan
    d.dy[~active] = math.inf  # neither has any influence
    whole: dict[str, Any] = {**options, "active": active, "masks": [mask]}
    got = results(reference.lstm_forward(*net, **whole), net.backward(d, **whole))
    expected = {name: np.zeros_like(a) for name, a in got.items()}
    for n in range(N):
        on, one = active[:, n], slice(n, n + 1)
        alone = Network(net.x[on, one], net.cells, net.h0[:, one], net.c0[:, one])
        d_alone = Incoming(d.dy[on, one], d.dhn[:, one], d.dcn[:, one])
        options["masks"] = [mask[on, one]]
        for name, a in results(reference.lstm_forward(*alone, **options), alone.backward(d_alone, **options)).items():
            if name in ("y", "dx"):
                expected[name][on, one] = a
            elif name in ("hn", "cn", "dh0", "dc0"):
                expected[name][:, one] = a
            else:
                expected[name] += a
    same(got, expected)
    np.testing.assert_array_equal(got["hn"][:, 1], net.h0[:, 1])
    np.testing.assert_array_equal(got["dc0"][:, 1], d.dcn[:, 1])


@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_time_in_two_parts_is_time_in_one(cut: int) -> None:
    rng = np.random.default_rng(13)
    net = network(rng, shape=(5, 3, 2), layers=2, peephole="full")
    d = incoming(rng, net)
    mask = dropout(rng, 0.3, (5, 3, 3))
    active = rng.random((5, 3)) < 0.7
    first: dict[str, Any] = {"active": active[:cut], "masks": [mask[:cut]]}
    second: dict[str, Any] = {"active": active[cut:], "masks": [mask[cut:]]}
    early = Network(net.x[:cut], *net[1:])
    out = reference.lstm_forward(*early, **first)
    late = Network(net.x[cut:], net.cells, out.hn, out.cn)
    end = reference.lstm_forward(*late, **second)
    late_back = late.backward(Incoming(d.dy[cut:], d.dhn, d.dcn), **second)
    back = early.backward(Incoming(d.dy[:cut], late_back.dh0, late_back.dc0), **first)
    options: dict[str, Any] = {"active": active, "masks": [mask]}
    got = results(reference.lstm_forward(*net, **options), net.backward(d, **options))
    parts, later = results(out, back), results(end, late_back)
    for name in parts:
        if name in ("y", "dx"):
            parts[name] = np.concatenate([parts[name], later[name]])
        elif name in ("hn", "cn"):
            parts[name] = later[name]
        elif name not in ("dh0", "dc0"):
            parts[name] = parts[name] + later[name]
    same(got, parts)


def test_direction_1_reads_time_backwards() -> None:
    rng = np.random.default_rng(17)
    net = network(rng, directions=2, peephole="full")
    d = incoming(rng, net, 2)
    out, back = reference.lstm_forward(*net, directions=2), net.backward(d, directions=2)
    dx = np.zeros_like(back.dx)
    for k, flip in enumerate((slice(None), slice(None, None, -1))):
        half = np.s_[:, :, 3 * k : 3 * k + 3]
        alone = Network(net.x[flip], [net.cells[k]], net.h0[k : k + 1], net.c0[k : k + 1])
        one = reference.lstm_forward(*alone)
        one_back = alone.backward(Incoming(d.dy[half][flip], d.dhn[k : k + 1], d.dcn[k : k + 1]))
        np.testing.assert_array_equal(out.y[half], one.y[flip])
        np.testing.assert_array_equal(out.hn[k], one.hn[0])
        np.testing.assert_array_equal(back.cells[k].wh, one_back.cells[0].wh)
        dx += one_back.dx[flip]
    assert_close(back.dx, dx, atol=64 * LONG_EPS)


@pytest.mark.parametrize("output_reads", ["new", "old"])
def test_diagonal_peepholes_are_diagonal_matrices(output_reads: str) -> None:
    rng = np.random.default_rng(19)
    net = network(rng, layers=2, peephole="diagonal")
    d = incoming(rng, net)
    wide = net._replace(cells=[c._replace(peephole=c.peephole[:, None] * np.eye(3)) for c in net.cells])  # type: ignore[index]
    options: dict[str, Any] = {"output_reads": output_reads}
    got = results(reference.lstm_forward(*net, **options), net.backward(d, **options))
    expected = results(reference.lstm_forward(*wide, **options), wide.backward(d, **options))
    for n in range(2):
        expected[f"dpeephole[{n}]"] = np.diagonal(expected[f"dpeephole[{n}]"], axis1=1, axis2=2)
    same(got, expected)


def test_output_reads_concerns_the_output_gate_alone() -> None:
    rng = np.random.default_rng(23)
    net = network(rng, peephole="full")
    d = incoming(rng, net)
    new, old = (reference.lstm_forward(*net, output_reads=which) for which in ("new", "old"))
    np.testing.assert_array_equal(new.z[0][0, :, :3], old.z[0][0, :, :3])
    peephole = net.cells[0].peephole
    assert peephole is not None
    assert_close((new.z[0] - old.z[0])[0, :, 3], (new.cells[0][0] - net.c0[0]) @ peephole[3].T, atol=64 * LONG_EPS)
    peephole[3] = 0
    a, b = (net.backward(d, output_reads=which) for which in ("new", "old"))
    np.testing.assert_array_equal(a.dx, b.dx)
    assert a.cells[0].peephole is not None
    assert b.cells[0].peephole is not None
    np.testing.assert_array_equal(a.cells[0].peephole[:3], b.cells[0].peephole[:3])
    assert np.abs(a.cells[0].peephole[3] - b.cells[0].peephole[3]).max() > 0.01


def test_absent_means_zero() -> None:
    rng = np.random.default_rng(29)
    net = network(rng, layers=2, bias=False)
    d = incoming(rng, net)
    zero = Network(
        net.x, [c._replace(b=np.zeros((4, 3)), peephole=np.zeros((4, 3))) for c in net.cells], *(0 * net.h0,) * 2
    )
    everyone = np.ones((4, 3), dtype=bool)
    ones = [np.ones((4, 3, 3))]
    for used in range(8):
        dy, dhn, dcn = (a if used >> k & 1 else None for k, a in enumerate(d))
        zeros = [a if used >> k & 1 else 0 * a for k, a in enumerate(d)]
        bare = reference.lstm_backward(dy, dhn, dcn, net.x, net.cells, None, None)
        full = zero.backward(Incoming(*zeros), active=everyone, masks=ones)
        for n in range(2):
            assert bare.cells[n].b is None
            assert full.cells[n].b is not None
            full.cells[n] = full.cells[n]._replace(b=None, peephole=None)
        bare_forward, full_forward = reference.lstm_forward(net.x, net.cells), reference.lstm_forward(*zero)
        same(results(bare_forward, bare), results(full_forward, full))


def test_gradients_add_over_what_comes_in() -> None:
    """y at the last step and hn are the same number: their gradients are interchangeable."""
    rng = np.random.default_rng(31)
    net = network(rng)
    d = incoming(rng, net)
    late = d.dy.astype(np.longdouble)
    late[-1] += d.dhn[0]
    at_the_end = net.backward(Incoming(late, 0 * d.dhn, d.dcn))
    assert_close(net.backward(d).dx, at_the_end.dx, atol=64 * LONG_EPS)


def test_computes_in_a_wider_type_and_leaves_its_arguments_alone() -> None:
    rng = np.random.default_rng(37)
    net = network(rng, layers=2, directions=2, peephole="full")
    d = incoming(rng, net, 2)
    mask = dropout(rng, 0.5, (4, 3, 6))
    options: dict[str, Any] = {"directions": 2, "active": LENGTHS, "masks": [mask]}
    for dtype, work in ((np.float32, np.float64), (np.float64, np.longdouble)):
        rounded = Network(
            net.x.astype(dtype),
            [LstmCell(*(None if p is None else p.astype(dtype) for p in cell)) for cell in net.cells],  # type: ignore[arg-type]
            net.h0.astype(dtype),
            net.c0.astype(dtype),
        )
        arguments = {**flat(*rounded), **d._asdict(), "active": LENGTHS, "mask": mask}
        before = {name: a.copy() for name, a in arguments.items()}
        out, back = reference.lstm_forward(*rounded, **options), rounded.backward(d, **options)
        for name, a in arguments.items():
            np.testing.assert_array_equal(a, before[name])
        for a in (*results(out, back).values(), *out.z, *out.gates, *out.cells, *out.inputs):
            assert a.dtype == work
        wide = rounded._replace(x=rounded.x.astype(np.longdouble))
        expected = results(reference.lstm_forward(*wide, **options), wide.backward(d, **options))
        same(results(out, back), expected, atol=64 * float(np.finfo(work).eps))


@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 0, 2), (4, 3, 0), (1, 1, 1)])
def test_empty_sequences_batches_and_inputs(shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(41)
    net = network(rng, shape=shape, layers=2, directions=2, peephole="full")
    d = incoming(rng, net, 2)
    got = results(reference.lstm_forward(*net, directions=2), net.backward(d, directions=2))
    assert got["y"].shape == (*shape[:2], 6)
    for name, a in flat(*net).items():
        assert got[f"d{name}"].shape == a.shape
        assert np.all(np.isfinite(got[f"d{name}"]))
    if shape[0] == 0:
        np.testing.assert_array_equal(got["hn"], net.h0)
        np.testing.assert_array_equal(got["dh0"], d.dhn)


def test_participation() -> None:
    lengths = reference.active_from_lengths([2, 0, 3], 3)
    np.testing.assert_array_equal(lengths, np.array([[1, 0, 1], [1, 0, 1], [0, 0, 1]], dtype=bool))
    sizes = reference.active_from_batch_sizes([0, 3, 1], 3)
    np.testing.assert_array_equal(sizes, np.array([[0, 0, 0], [1, 1, 1], [1, 0, 0]], dtype=bool))


def test_wrong_arguments_are_refused() -> None:
    x, h = np.ones((4, 3, 2)), np.ones((1, 3, 3))
    good = LstmCell(np.ones((4, 3, 2)), np.ones((4, 3, 3)))
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("x has shape", {"x": x[0]}),
        ("h0 has shape", {"h0": h[:, :2]}),
        ("c0 has shape", {"c0": h[0]}),
        ("wx of cell 0 has shape", {"cells": [good._replace(wx=np.ones((4, 3, 3)))]}),
        ("wx of cell 1 has shape", {"cells": [good, good]}),
        ("wh of cell 0 has shape", {"cells": [good._replace(wh=np.ones((4, 2, 3)))]}),
        ("b of cell 0 has shape", {"cells": [good._replace(b=np.ones(12))]}),
        ("peephole of cell 0 has shape", {"cells": [good._replace(peephole=np.ones((3, 3)))]}),
        ("do not make layers", {"cells": []}),
        ("do not make layers", {"directions": 2}),
        ("do not make layers", {"directions": 3, "cells": [good] * 3}),
        ("active has shape", {"active": np.ones((3, 4))}),
        ("1 masks, expected 0", {"masks": [np.ones((4, 3, 3))]}),
        ("4 activations", {"activations": reference.LSTM_ACTIVATIONS[:4]}),
        ("output_reads", {"output_reads": "both"}),
        ("unknown activation", {"activations": [("step", 0.0, 0.0)] * 5}),
    ]
    for message, change in wrong:
        with pytest.raises(ValueError, match=message):
            reference.lstm_forward(**{"x": x, "cells": [good], **change})
    for name, a in (("dy", x), ("dhn", h[0]), ("dcn", x)):
        wrong_d: dict[str, Any] = {"dy": None, "dhn": None, "dcn": None, name: a}
        with pytest.raises(ValueError, match=f"{name} has shape"):
            reference.lstm_backward(**wrong_d, x=x, cells=[good])


# --- dropout masks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    """The vectors that Random123 publishes for philox4x32 with ten rounds."""
    c, k, words = ([int(word, 16) for word in text.split()] for text in (counter, key, expected))
    assert reference.philox4x32(c, (k[0], k[1])).tolist() == words
    assert reference.philox4x32([[c, c]], (k[0], k[1])).tolist() == [[words, words]]


def test_philox_mask_elements() -> None:
    """Element by element, in plain integers."""
    seed, layer, p = 0x123456789ABCDEF0, 3, 0.4
    T, N, W = 3, 5, 150
    mask = reference.philox_mask(seed, layer, (T, N, W), p)
    assert mask.shape == (T, N, W)
    for t in range(T):
        for n in range(N):
            for j in (0, 1, 15, 16, 17, 47, 63, 64, 79, 80, 127, 128, 149):
                row = t * N + n
                c = [row % 2**32, row // 2**32, 16 * (j // 64) + j % 16, layer]
                k0, k1 = seed % 2**32, seed // 2**32
                for _ in range(10):
                    a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
                    c = [b // 2**32 ^ c[1] ^ k0, b % 2**32, a // 2**32 ^ c[3] ^ k1, a % 2**32]
                    k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
                assert mask[t, n, j] == (0 if c[j % 64 // 16] < math.floor(p * 2**32) else 1 / (1 - p))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
def test_philox_masks_drop_the_right_share(p: float) -> None:
    shape = (16, 32, 200)
    size = math.prod(shape)
    masks = [
        reference.philox_mask(seed, layer, shape, p) for seed, layer in ((1, 0), (1, 1), (2, 0), (1 + (1 << 32), 0))
    ]
    masks += [np.roll(masks[0], 1, axis) for axis in range(3)] + [np.roll(masks[0], 16, 2)]
    kept = [mask > 0 for mask in masks]
    five_sigma = 5 * math.sqrt(p * (1 - p) / size)
    for mask in masks:
        assert set(np.unique(mask)) == {0.0, 1 / (1 - p)}
        assert abs(mask.mean() - 1) < five_sigma / (1 - p)
    for other in kept[1:]:  # as good as independent of the first
        both = (1 - p) ** 2
        assert abs((kept[0] & other).mean() - both) < 5 * math.sqrt(both * (1 - both) / size)


def test_philox_mask_depends_on_row_and_column_alone() -> None:
    mask = reference.philox_mask(7, 0, (4, 6, 200), 0.5)
    np.testing.assert_array_equal(
        reference.philox_mask(7, 0, (2, 12, 70), 0.5).reshape(24, 70), mask.reshape(24, 200)[:, :70]
    )
    np.testing.assert_array_equal(reference.philox_mask(7, 0, (2, 3, 5), 0.0), np.ones((2, 3, 5)))
    assert reference.philox_mask(7, 0, (0, 3, 5), 0.5).shape == (0, 3, 5)


# --- other people's libraries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", collect_onnx_recurrent_cases("LSTM"), ids=lambda case: case.name)
def test_onnx_node_cases(case: OnnxRecurrent) -> None:
    assert case.attributes.keys() <= {"hidden_size", "direction", "layout"}
    direction = case.attributes.get("direction", b"forward").decode()
    batch_first = case.attributes.get("layout", 0)
    H = case.attributes["hidden_size"]
    given = dict(case.inputs)
    if batch_first:
        for name in {"X", "initial_h", "initial_c"} & given.keys():
            given[name] = np.swapaxes(given[name], 0, 1)
    x = given["X"]
    cells = []
    for d in range(len(given["W"])):
        i_f_g_o = [0, 2, 3, 1]  # ONNX: i o f c, and i o f for the peepholes
        cell = LstmCell(*(given[name][d].reshape(4, H, -1)[i_f_g_o] for name in ("W", "R")))
        if "B" in given:
            cell = cell._replace(b=given["B"][d].reshape(2, 4, H).sum(axis=0)[i_f_g_o])
        if "P" in given:
            i, o, f = given["P"][d].reshape(3, H)
            cell = cell._replace(peephole=np.stack([i, f, np.zeros_like(i), o]))
        cells.append(cell)
    state = [given.get(name) for name in ("initial_h", "initial_c")]
    active = reference.active_from_lengths(given["sequence_lens"], len(x)) if "sequence_lens" in given else None
    if direction == "reverse":  # direction 1, beside a direction 0 that nobody looks at
        cells = cells * 2
        state = [None if s is None else np.concatenate([s, s]) for s in state]
    out = reference.lstm_forward(x, cells, *state, directions=len(cells), active=active)
    wanted = slice(1, 2) if direction == "reverse" else slice(None)
    y = out.y.reshape(*x.shape[:2], len(cells), H).transpose(0, 2, 1, 3)
    got = {"Y": y[:, wanted], "Y_h": out.hn[wanted], "Y_c": out.cn[wanted]}
    if batch_first:
        got = {"Y": got["Y"].transpose(2, 0, 1, 3), **{k: np.swapaxes(got[k], 0, 1) for k in ("Y_h", "Y_c")}}
    for name, published in case.outputs.items():
        # The published numbers were computed in float32: a few of its units, 1.2e-7.
        assert_close(got[name], published, atol=5e-7)


def torch_lstm(torch: Any, net: Network, directions: int) -> tuple[Any, list[list[Any]]]:
    """torch.nn.LSTM with these weights, and its parameters cell by cell: wx, wh and two biases, which add."""
    layers = len(net.cells) // directions
    H = net.h0.shape[-1]
    bias = net.cells[0].b is not None
    module = torch.nn.LSTM(net.x.shape[-1], H, layers, bias=bias, bidirectional=directions == 2, dtype=torch.float64)
    parameters = []
    for number, cell in enumerate(net.cells):
        suffix = f"_l{number // directions}{'_reverse' * (number % directions)}"
        names = ["weight_ih", "weight_hh"] + ["bias_ih", "bias_hh"] * bias
        parameters.append([getattr(module, name + suffix) for name in names])
        halves = [] if cell.b is None else [0.25 * cell.b, 0.75 * cell.b]
        with torch.no_grad():
            for p, a in zip(parameters[-1], [cell.wx, cell.wh, *halves], strict=True):
                p.copy_(torch.from_numpy(a).reshape(p.shape))
    return module, parameters


def torch_results(torch: Any, net: Network, d: Incoming, directions: int, lengths: list[int] | None) -> dict[str, Any]:
    module, parameters = torch_lstm(torch, net, directions)
    x, h0, c0 = (torch.tensor(a, requires_grad=True) for a in (net.x, net.h0, net.c0))
    if lengths is None:
        y, (hn, cn) = module(x, (h0, c0))
    else:
        rnn = torch.nn.utils.rnn
        packed, (hn, cn) = module(rnn.pack_padded_sequence(x, lengths, enforce_sorted=False), (h0, c0))
        y, _ = rnn.pad_packed_sequence(packed, total_length=len(net.x))
    leaves = [x, h0, c0, *(p for cell in parameters for p in cell)]
    dx, dh0, dc0, *dp = (g.numpy() for g in torch.autograd.grad([y, hn, cn], leaves, [torch.tensor(a) for a in d]))
    each = len(parameters[0])
    gradients = [
        LstmCell(
            *(a.reshape(p.shape) for a, p in zip(dp[n * each : n * each + each], cell, strict=False) if p is not None)
        )
        for n, cell in enumerate(net.cells)
    ]
    values = {name: a.detach().numpy() for name, a in (("y", y), ("hn", hn), ("cn", cn))}
    return {**values, **{f"d{key}": a for key, a in flat(dx, gradients, dh0, dc0).items()}}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("lengths", [None, [3, 6, 1, 4]], ids=["whole", "packed"])
@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_torch_lstm(torch: Any, layers: int, directions: int, lengths: list[int] | None, bias: bool) -> None:
    rng = np.random.default_rng(43)
    net = network(rng, shape=(6, 4, 3), H=5, layers=layers, directions=directions, bias=bias)
    d = incoming(rng, net, directions)
    active = None if lengths is None else reference.active_from_lengths(lengths, 6)
    options: dict[str, Any] = {"directions": directions, "active": active}
    got = results(reference.lstm_forward(*net, **options), net.backward(d, **options))
    # Sums of up to 24 products, through up to 18 cells.
    same(got, torch_results(torch, net, d, directions, lengths), atol=32 * EPS)


def test_torch_lstm_with_dropout_between_layers(torch: Any) -> None:
    """Two modules of one layer with the mask in between, since PyTorch does not say what its own dropout drew."""
    rng = np.random.default_rng(47)
    net = network(rng, layers=2, directions=2)
    d = incoming(rng, net, 2)
    mask = reference.philox_mask(5, 0, (4, 3, 6), 0.5)
    low, high = (
        Network(np.zeros((4, 3, width)), net.cells[part], net.h0[part], net.c0[part])
        for width, part in ((2, slice(2)), (6, slice(2, 4)))
    )
    below, above = (torch_lstm(torch, part, 2)[0] for part in (low, high))
    x, h0, c0 = (torch.tensor(a, requires_grad=True) for a in (net.x, net.h0, net.c0))
    y, (hn0, cn0) = below(x, (h0[:2], c0[:2]))
    y, (hn1, cn1) = above(y * torch.tensor(mask), (h0[2:], c0[2:]))
    hn, cn = torch.cat([hn0, hn1]), torch.cat([cn0, cn1])
    theirs = torch.autograd.grad([y, hn, cn], [x, h0, c0, below.weight_hh_l0], [torch.tensor(a) for a in d])
    options: dict[str, Any] = {"directions": 2, "masks": [mask]}
    out, back = reference.lstm_forward(*net, **options), net.backward(d, **options)
    for got, expected in zip(out[:3], (y, hn, cn), strict=True):
        assert_close(got, expected.detach().numpy(), atol=32 * EPS)
    for got, expected in zip((back.dx, back.dh0, back.dc0, back.cells[0].wh.reshape(12, 3)), theirs, strict=True):
        assert_close(got, expected.numpy(), atol=32 * EPS)


@pytest.mark.parametrize(
    ("peephole", "output_reads", "layers", "directions"),
    [("", "new", 2, 2), ("diagonal", "old", 1, 2), ("full", "new", 2, 1), ("full", "old", 1, 2)],
)
def test_jax_lstm(jax: Any, peephole: str, output_reads: str, layers: int, directions: int) -> None:
    rng = np.random.default_rng(53)
    net = network(rng, shape=(5, 3, 2), H=4, layers=layers, directions=directions, peephole=peephole)
    d = incoming(rng, net, directions)
    active = rng.random((5, 3)) < 0.8

    def loss(net: Any) -> Any:
        out = jax_lstm(jax, net, active, directions, output_reads)
        return sum((w * a).sum() for w, a in zip(d, out, strict=True)), out

    with jax.enable_x64(True):
        theirs, (y, hn, cn) = jax.jit(jax.grad(loss, has_aux=True))(net)
        assert y.dtype == np.float64
    options: dict[str, Any] = {"directions": directions, "active": active, "output_reads": output_reads}
    got = results(reference.lstm_forward(*net, **options), net.backward(d, **options))
    expected = {f"d{key}": np.asarray(a) for key, a in flat(*theirs).items()}
    same(got, {"y": y, "hn": hn, "cn": cn, **expected}, atol=32 * EPS)
