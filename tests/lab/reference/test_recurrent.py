"""The oracle of recurrent layers against finite differences, for every cell and option, and its conventions.

Nothing here may import the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

from retrograd.lab import reference
from retrograd.lab.reference import GruCell, LstmCell, RnnCell
from support.reference import CASES, LONG_EPS, ORDER, assert_close, derivative

Array = np.ndarray[Any, Any]


class Kind(NamedTuple):
    cell: Any
    gates: int
    activations: tuple[tuple[str, float, float], ...]
    forward: Any
    backward: Any


KINDS = {
    "lstm": Kind(LstmCell, 4, reference.LSTM_ACTIVATIONS, reference.lstm_forward, reference.lstm_backward),
    "gru": Kind(GruCell, 3, reference.GRU_ACTIVATIONS, reference.gru_forward, reference.gru_backward),
    "rnn": Kind(RnnCell, 1, reference.RNN_ACTIVATIONS, reference.rnn_forward, reference.rnn_backward),
}
T, N, H = 4, 3, 4
INPUTS = 2


class Network(NamedTuple):
    """A network with its options; arrays by name, parameters as `wx[0]`. `d` are the incoming gradients."""

    kind: str
    arrays: dict[str, Array]
    d: dict[str, Array]
    options: dict[str, Any]

    def arguments(self, arrays: Mapping[str, Any]) -> list[Any]:
        """x, cells, h0 and, for an LSTM, c0."""
        cell = KINDS[self.kind].cell
        count = sum(name.startswith("wx[") for name in arrays)
        cells = [cell(*(arrays.get(f"{field}[{n}]") for field in cell._fields)) for n in range(count)]
        return [arrays["x"], cells, *(arrays[name] for name in ("h0", "c0") if name in arrays)]

    def forward(self, arrays: Mapping[str, Any] | None = None) -> Any:
        return KINDS[self.kind].forward(*self.arguments(self.arrays if arrays is None else arrays), **self.options)

    def outputs(self, arrays: Mapping[str, Any] | None = None) -> dict[str, Array]:
        out = self.forward(arrays)
        return {name: getattr(out, name[1:]) for name in self.d}

    def gradients(self) -> dict[str, Array]:
        back = KINDS[self.kind].backward(*self.d.values(), *self.arguments(self.arrays), **self.options)
        found = {"x": back.dx, "h0": back.dh0} | ({"c0": back.dc0} if self.kind == "lstm" else {})
        for n, cell in enumerate(back.cells):
            found |= {f"{field}[{n}]": a for field, a in cell._asdict().items() if a is not None}
        return found


def dropout(rng: np.random.Generator, p: float, shape: tuple[int, ...]) -> Array:
    return np.where(rng.random(shape) < p, 0.0, 1 / (1 - p))


def network(
    layer: str,
    rng: np.random.Generator,
    *,
    layers: int = 1,
    bias: bool = True,
    bh: bool = True,
    peephole: str = "",
    projection: int = 0,
    steps: int = T,
    drop: bool = False,
    **options: Any,
) -> Network:
    """Random data and parameters, with states and pre-activations of size 1."""
    directions, P, G = options.get("directions", 1), projection or H, KINDS[layer].gates
    arrays = {"x": rng.normal(size=(steps, N, INPUTS))}
    for n in range(layers * directions):
        width = INPUTS if n < directions else directions * P
        arrays[f"wx[{n}]"] = rng.normal(0, 0.7, (G, H, width))
        arrays[f"wh[{n}]"] = rng.normal(0, 0.5, (G, H, P))
        if bias:
            arrays[f"b[{n}]"] = rng.normal(0, 0.5, (G, H))
        if bh and layer == "gru":
            arrays[f"bh[{n}]"] = rng.normal(0, 0.5, (G, H))
        if peephole:
            arrays[f"peephole[{n}]"] = rng.normal(0, 0.6, (G, H) if peephole == "diagonal" else (G, H, H))
        if projection:
            arrays[f"projection[{n}]"] = rng.normal(0, 0.7, (P, H))
        if options.get("norm") is not None:
            arrays |= {f"{name}[{n}]": rng.uniform(0.5, 1.5, (G, H)) for name in ("gamma_x", "gamma_h")}
            if layer == "lstm":
                arrays[f"gamma_c[{n}]"] = rng.uniform(0.5, 1.5, H)
                arrays[f"beta_c[{n}]"] = rng.normal(0, 0.5, H)
    count = layers * directions
    arrays["h0"] = rng.normal(size=(count, N, P))
    d = {"dy": rng.normal(size=(steps, N, directions * P)), "dhn": rng.normal(size=(count, N, P))}
    if layer == "lstm":
        arrays["c0"] = rng.normal(size=(count, N, H))
        d["dcn"] = rng.normal(size=(count, N, H))
    if drop:
        options["masks"] = [dropout(rng, 0.3, (steps, N, directions * P)) for _ in range(layers - 1)]
    for name, shape in {
        "mask": (count, G, steps, N, P),
        "zoneout_h": (count, steps, N, P),
        "zoneout_c": (count, steps, N, H),
    }.items():
        match options.get(name):
            case "masked":
                options[name] = dropout(rng, 0.4, shape)
            case "drawn":
                options[name] = (rng.random(shape) < 0.6).astype(float)
    if isinstance(options.get("reset"), str):
        options["reset"] = rng.random((steps, N)) < 0.3
    return Network(layer, arrays, d, options)


def clear_network(layer: str, rng: np.random.Generator, **shape: Any) -> Network:
    """A network that keeps away from the kinks of clamps and activations, where a derivative does not exist."""
    while True:
        net = network(layer, rng, **shape)
        out = net.forward()
        activations = net.options.get("activations", KINDS[layer].activations)
        seen = [*np.moveaxis(np.stack(out.z), 3, 0)]
        kinks = [[*CASES[name][2]] for name, _, _ in activations]
        if layer == "lstm":
            seen.append(np.stack(out.cells))
            kinks[-1] += [-shape["cell_clip"], shape["cell_clip"]] if "cell_clip" in shape else []
        if "clip" in shape:
            kinks = [[*points, -shape["clip"], shape["clip"]] for points in kinks]
        # A cell state that was clamped is exactly at the limit, and was beyond it: see test_the_limits_of_clamps.
        at_limit = shape.get("cell_clip", math.inf)
        if all(
            np.all((np.abs(z - kink) > 0.01) | (np.abs(z) == at_limit))
            for z, points in zip(seen, kinks, strict=True)
            for kink in points
        ):
            return net


def check_gradients(net: Network, rng: np.random.Generator, *, nonzero: bool = True) -> None:
    """Every array is moved along a random direction; the loss is a random linear functional of the outputs."""
    out, gradients = net.outputs(), net.gradients()
    assert gradients.keys() == net.arrays.keys()
    for name, a in net.arrays.items():
        direction = rng.uniform(-0.5, 0.5, size=a.shape)

        def loss(h: Any, name: str = name, direction: Array = direction) -> Any:
            moved = {
                key: b + h * direction if key == name else b.astype(np.longdouble) for key, b in net.arrays.items()
            }
            got = net.outputs(moved)
            # Less the values at 0: the sum then rounds in proportion to the step.
            return sum(np.sum(w * (got[key] - out[key])) for key, w in net.d.items())

        assert gradients[name].shape == a.shape, name
        slope = np.sum(gradients[name] * direction)
        # Truncation is the fifth derivative over 30 in units of ORDER. Steps, layers and 1 / sqrt(var) multiply it.
        assert_close(slope, derivative(loss), atol=5000 * ORDER, rtol=5000 * ORDER)
        assert not nonzero or abs(slope) > 1e-6, name


LENGTHS = reference.active_from_lengths([3, 0, 4], T)
BATCH_SIZES = reference.active_from_batch_sizes([1, 3, 0, 2], N)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False, "bh": False},
    "lengths": {"active": LENGTHS},
    "batch_sizes": {"active": BATCH_SIZES},
    "bidirectional": {"directions": 2},
    "stacked_drop": {"layers": 3, "drop": True},
    "two_by_two": {"layers": 2, "directions": 2, "active": LENGTHS, "drop": True},
}
INSIDE: dict[str, dict[str, Any]] = {
    "reset": {"reset": "drawn"},
    "mask": {"mask": "masked"},
    "zoneout_h": {"zoneout_h": "drawn"},
    "zoneout_inference": {"zoneout_h": 0.8},
    "clip": {"clip": 0.9},
    "haste": {"norm": "haste"},
    "norm_eps": {"norm": "cell", "eps": 0.1},
}
OF_KIND: dict[str, dict[str, dict[str, Any]]] = {
    "lstm": {
        "zoneout_c": {"zoneout_c": "drawn"},
        "zoneout_both": {"zoneout_h": "drawn", "zoneout_c": 0.7},
        "cell_clip": {"cell_clip": 0.7},
        "cell_clip_peephole": {"cell_clip": 0.7, "peephole": "full", "clip": 1.1},
        "coupled": {"coupled": True},
        "coupled_peephole": {"coupled": True, "peephole": "diagonal", "output_reads": "old"},
        "projection": {"projection": 3},
        "wide_projection": {"projection": 6, "layers": 2, "directions": 2},
        "norm_cell": {"norm": "cell"},
    },
    "gru": {
        "before": {"kind": "before"},
        "flip": {"flip": True},
        "before_flip": {"kind": "before", "flip": True},
        "before_mask": {"kind": "before", "mask": "masked"},
        "before_clip": {"kind": "before", "clip": 0.9},
        "before_two_by_two": {"kind": "before", "layers": 2, "directions": 2, "active": LENGTHS},
    },
    "rnn": {},
}
VARIANTS = [(kind, name) for kind in KINDS for name in SHAPES | INSIDE | OF_KIND[kind]]


@pytest.mark.parametrize(("kind", "name"), VARIANTS)
def test_gradients_are_the_derivative(kind: str, name: str) -> None:
    rng = np.random.default_rng([3, VARIANTS.index((kind, name))])
    options = (SHAPES | INSIDE | OF_KIND[kind])[name]
    check_gradients(clear_network(kind, rng, **options), rng)


def combination(kind: str, rng: np.random.Generator) -> dict[str, Any]:
    """Options at random, only those that combine."""

    def some(chance: float, **options: Any) -> dict[str, Any]:
        return options if rng.random() < chance else {}

    found: dict[str, Any] = some(0.3, layers=2, drop=True) | some(0.3, directions=2) | some(0.2, bias=False)
    found |= some(0.4, active=rng.random((T, N)) < 0.7)
    found |= some(0.4, mask="masked") | some(0.4, zoneout_h="drawn")
    if "directions" not in found:
        found |= some(0.5, reset="drawn")
    normalized = rng.random() < 0.3
    if normalized:
        # A large eps: masks can leave no variance, and differences need a function that is smooth within their steps.
        found |= {"norm": str(rng.choice(["haste", "cell"])), "eps": 0.1}
    else:
        found |= some(0.3, clip=1.2)
    if kind == "lstm":
        found |= some(0.3, zoneout_c="drawn") | some(0.3, coupled=True)
        if not normalized:
            found |= some(0.3, cell_clip=0.9) | some(0.4, projection=int(rng.integers(1, 6)))
            found |= some(0.4, peephole=str(rng.choice(["diagonal", "full"])))
            found |= some(0.5, output_reads="old")
    if kind == "gru":
        found |= some(0.5, flip=True) | some(0.3, bh=False)
        if not normalized:
            found |= some(0.5, kind="before")
    return found


@pytest.mark.parametrize("number", range(24))
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_combinations(kind: str, number: int) -> None:
    rng = np.random.default_rng([7, list(KINDS).index(kind), number])
    check_gradients(clear_network(kind, rng, **combination(kind, rng)), rng, nonzero=False)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("role", ["r", "z", "n", "rnn"])
def test_gradients_with_every_activation(name: str, role: str) -> None:
    kind = "rnn" if role == "rnn" else "gru"
    activations = list(KINDS[kind].activations)
    activations[0 if kind == "rnn" else "rzn".index(role)] = (name, *CASES[name][:2])
    rng = np.random.default_rng([5, ["r", "z", "n", "rnn"].index(role), list(CASES).index(name)])
    options: dict[str, Any] = {"kind": str(rng.choice(["after", "before"]))} if kind == "gru" else {}
    # A relu can be 0 everywhere it is read.
    check_gradients(clear_network(kind, rng, activations=activations, steps=2, **options), rng, nonzero=False)


# --- conventions ------------------------------------------------------------------------------------------------------


def results(net: Network) -> dict[str, Array]:
    return net.outputs() | {f"d_{name}": a for name, a in net.gradients().items()}


def same(got: Mapping[str, Any], expected: Mapping[str, Any], atol: float = 1024 * LONG_EPS) -> None:
    assert got.keys() == expected.keys()
    for name, a in expected.items():
        assert_close(got[name], a, atol=atol)


def everything(kind: str) -> dict[str, Any]:
    """Options that say what they say without them."""
    neutral: dict[str, Any] = {
        "active": np.ones((T, N), bool),
        "masks": [np.ones((T, N, H))],
        "reset": np.zeros((T, N), bool),
        "mask": 1.0,
        "zoneout_h": 1.0,
        "clip": 100.0,
    }
    return neutral | ({"zoneout_c": np.ones(H), "cell_clip": 100.0} if kind == "lstm" else {})


@pytest.mark.parametrize("kind", KINDS)
def test_neutral_options_change_nothing(kind: str) -> None:
    net = network(kind, np.random.default_rng(11), layers=2)
    same(results(net._replace(options=everything(kind))), results(net))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_starts_a_sequence(kind: str) -> None:
    """Cut at each reset, sample by sample: the pieces after the first start from 0, and their gradients add up."""
    rng = np.random.default_rng(13)
    net = network(kind, rng, steps=6, reset="drawn", zoneout_h="drawn")
    reset = net.options["reset"]
    reset[0, 0], reset[0, 1], reset[3, 1] = True, False, True
    got = results(net)
    expected = {name: np.zeros_like(a) for name, a in got.items()}
    states = [name for name in ("h0", "c0") if name in net.arrays]
    for n in range(N):
        cuts = sorted({0, 6, *np.flatnonzero(reset[:, n]).tolist()})
        for start, stop in pairwise(cuts):
            part = np.s_[start:stop, n : n + 1]
            arrays = net.arrays | {"x": net.arrays["x"][part]}
            for name in states:
                arrays[name] = net.arrays[name][:, n : n + 1] * (not reset[start, n])
            last = stop == 6
            d = {"dy": net.d["dy"][part]} | {k: net.d[k][:, n : n + 1] * last for k in net.d if k != "dy"}
            keep = net.options["zoneout_h"][:, start:stop, n : n + 1]
            for name, a in results(Network(kind, arrays, d, {"zoneout_h": keep})).items():
                if name in ("dy", "d_x"):
                    expected[name][part] = a
                elif name in ("dhn", "dcn"):
                    if last:
                        expected[name][:, n : n + 1] = a
                elif name in ("d_h0", "d_c0"):
                    if start == 0 and not reset[0, n]:
                        expected[name][:, n : n + 1] = a
                else:
                    expected[name] += a
    same(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_inactive_samples_have_is_not_read(kind: str) -> None:
    rng = np.random.default_rng(17)
    active = rng.random((T, N)) < 0.6
    net = network(kind, rng, active=active, reset="drawn", mask="masked", zoneout_h="drawn")
    expected = results(net)
    net.options["reset"] = net.options["reset"] | ~active
    for name in ("mask", "zoneout_h"):
        net.options[name][..., ~active, :] = math.nan
    net.arrays["x"][~active], net.d["dy"][~active] = math.nan, math.inf
    same(results(net), expected, atol=0.0)


def test_a_mask_of_gates_is_a_mask_of_columns() -> None:
    """One mask for all samples and steps is the same as recurrent matrices with scaled columns."""
    rng = np.random.default_rng(19)
    for kind, (_, gates, *_) in KINDS.items():
        net = network(kind, rng, projection=3 if kind == "lstm" else 0)
        wh = net.arrays["wh[0]"]
        m = rng.uniform(0.5, 2, (gates, 1, 1, wh.shape[-1]))
        got = results(net._replace(options={"mask": m}))
        scaled = wh.astype(np.longdouble) * m[:, :, 0]
        expected = results(net._replace(arrays=net.arrays | {"wh[0]": scaled}))
        expected["d_wh[0]"] = expected["d_wh[0]"] * m[:, :, 0]
        same(got, expected)


def test_flip_negates_the_parameters_of_z() -> None:
    """sigmoid(-a) = 1 - sigmoid(a)."""
    for kind in ("after", "before"):
        net = network("gru", np.random.default_rng(23), kind=kind, layers=2, directions=2)
        got = results(net)
        negated = {
            name: a * np.array([1, -1, 1]).reshape(3, *[1] * (a.ndim - 1)) if "[" in name else a
            for name, a in net.arrays.items()
        }
        expected = results(net._replace(arrays=negated, options=net.options | {"flip": True}))
        for name in net.arrays:
            if "[" in name:
                a = expected[f"d_{name}"]
                expected[f"d_{name}"] = a * np.array([1, -1, 1]).reshape(3, *[1] * (a.ndim - 1))
        same(got, expected)


def test_biases_of_a_gru() -> None:
    """Those of r and z add; so do those of n, unless the reset gate multiplies one of them."""
    rng = np.random.default_rng(29)
    before, after = (network("gru", rng, kind=kind) for kind in ("before", "after"))
    for net in (before, after):
        got = results(net)
        same_gates = slice(3) if net is before else slice(2)
        np.testing.assert_array_equal(got["d_b[0]"][same_gates], got["d_bh[0]"][same_gates])
        arrays = net.arrays | {"b[0]": net.arrays["b[0]"].astype(np.longdouble), "bh[0]": net.arrays["bh[0]"].copy()}
        arrays["b[0]"][same_gates] += arrays["bh[0]"][same_gates]
        arrays["bh[0]"][same_gates] = 0
        same(results(net._replace(arrays=arrays)), got)
    assert np.abs(got["d_b[0]"][2] - got["d_bh[0]"][2]).max() > 0.01


def test_coupled_gates_ignore_the_forget_gate() -> None:
    rng = np.random.default_rng(31)
    net = network("lstm", rng, coupled=True, peephole="full")
    got = results(net)
    for name in ("wx[0]", "wh[0]", "b[0]", "peephole[0]"):
        np.testing.assert_array_equal(got[f"d_{name}"][1], 0)
        assert np.abs(got[f"d_{name}"][[0, 2, 3]]).min() > 0
        net.arrays[name][1] = rng.normal(size=net.arrays[name][1].shape)
    same(results(net), got, atol=0.0)
    out = net.forward()
    np.testing.assert_array_equal(out.gates[0][..., 1, :], 1 - out.gates[0][..., 0, :])


def test_an_identity_is_no_projection() -> None:
    net = network("lstm", np.random.default_rng(37), layers=2, directions=2)
    wide = net._replace(arrays=net.arrays | {f"projection[{n}]": np.eye(H) for n in range(4)})
    expected = results(wide)
    for n in range(4):
        del expected[f"d_projection[{n}]"]
    same(results(net), expected)


def test_the_limits_of_clamps() -> None:
    """The gradient is 1 at the limit and 0 beyond it."""
    one = np.ones((1, 1, 1))
    for x, slope in ((0.5, 1.0), (-0.5, 1.0), (0.5001, 0.0), (-0.5001, 0.0)):
        cell = RnnCell(one, 0 * one)
        options: dict[str, Any] = {"clip": 0.5, "activations": [("identity", 0.0, 0.0)]}
        assert reference.rnn_forward(x * one, [cell], **options).y.item() == np.clip(x, -0.5, 0.5)
        assert reference.rnn_backward(one, None, x * one, [cell], **options).dx.item() == slope
        # f = g = 0 and i = o = 1: the cell state is the candidate x.
        identities = [("linear_with_bias", 0.0, b) for b in (1.0, 0.0)] + [("identity", 0.0, 0.0)] * 3
        identities[3] = ("linear_with_bias", 0.0, 1.0)
        gates = LstmCell(np.array([0.0, 0.0, 1.0, 0.0]).reshape(4, 1, 1), np.zeros((4, 1, 1)))
        options = {"cell_clip": 0.5, "activations": identities}
        out = reference.lstm_forward(x * one, [gates], **options)
        back = reference.lstm_backward(one, None, 2 * one, x * one, [gates], **options)
        assert out.y.item() == out.cn.item() == np.clip(x, -0.5, 0.5)
        assert back.dx.item() == 3 * slope


def test_zoneout_of_the_cell_is_not_read_by_its_own_step() -> None:
    rng = np.random.default_rng(41)
    net = network("lstm", rng, steps=1)
    kept = net._replace(options={"zoneout_c": 0.0})
    got, usual = kept.forward(), net.forward()
    np.testing.assert_array_equal(got.y, usual.y)
    np.testing.assert_array_equal(got.cn, net.arrays["c0"])
    still = net._replace(options={"zoneout_h": 0.0})
    np.testing.assert_array_equal(still.forward().hn, net.arrays["h0"])
    np.testing.assert_array_equal(still.forward().cn, usual.cn)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 0, 2), (4, 3, 0), (1, 1, 1)])
def test_empty_sequences_batches_and_inputs(kind: str, shape: tuple[int, int, int]) -> None:
    steps, samples, inputs = shape
    rng = np.random.default_rng(43)
    net = network(kind, rng, steps=steps, layers=2, directions=2, mask=1.0, zoneout_h=0.5, norm="haste")
    net.arrays["x"] = rng.normal(size=shape)
    for n in range(2):
        net.arrays[f"wx[{n}]"] = net.arrays[f"wx[{n}]"][..., :1].repeat(inputs, axis=-1)
    for arrays, names in ((net.arrays, ("h0", "c0")), (net.d, ("dy", "dhn", "dcn"))):
        for name in names:
            if name in arrays:
                arrays[name] = arrays[name][:, :1].repeat(samples, axis=1)
    got = results(net)
    for name, a in net.arrays.items():
        assert got[f"d_{name}"].shape == a.shape
        assert np.all(np.isfinite(got[f"d_{name}"]))
    if steps == 0:
        np.testing.assert_array_equal(got["dhn"], net.arrays["h0"])
        np.testing.assert_array_equal(got["d_h0"], net.d["dhn"])


@pytest.mark.parametrize("kind", KINDS)
def test_computes_in_a_wider_type_and_leaves_its_arguments_alone(kind: str) -> None:
    rng = np.random.default_rng(47)
    net = network(kind, rng, layers=2, drop=True, reset="drawn", mask="masked", zoneout_h="drawn", norm="cell")
    for dtype, work in ((np.float32, np.float64), (np.float64, np.longdouble)):
        rounded = net._replace(arrays={name: a.astype(dtype) for name, a in net.arrays.items()})
        given = rounded.arrays | net.d | {k: net.options[k] for k in ("reset", "mask", "zoneout_h")}
        before = {name: a.copy() for name, a in given.items()}
        got, out = results(rounded), rounded.forward()
        for name, a in given.items():
            np.testing.assert_array_equal(a, before[name])
        for a in (*got.values(), *out.z, *out.gates, *out.inputs, *out.h_prev):
            assert a.dtype == work


def test_intermediate_values() -> None:
    rng = np.random.default_rng(53)
    net = network("gru", rng, active=LENGTHS, reset="drawn")
    out = net.forward()
    np.testing.assert_array_equal(out.z[0][~LENGTHS], 0)
    on = LENGTHS
    h = np.where(net.options["reset"][..., None] & on[..., None], 0, out.h_prev[0])
    np.testing.assert_array_equal(out.h_prev[0], h)
    product = h @ net.arrays["wh[0]"][2].T + net.arrays["bh[0]"][2]
    assert_close(out.m[0][on], product[on], atol=64 * LONG_EPS)
    r, z, n = np.moveaxis(out.gates[0], 2, 0)
    assert_close(out.y[on], ((1 - z) * n + z * h)[on], atol=64 * LONG_EPS)
    v = out.inputs[0] @ net.arrays["wx[0]"][2].T + net.arrays["b[0]"][2]
    assert_close(np.arctanh(n)[on], (v + r * out.m[0])[on], atol=4096 * LONG_EPS)


def test_refusals() -> None:
    rng = np.random.default_rng(59)
    norm = {"norm": "haste"}
    wrong: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("lstm", "norm is 'haste' and peephole", norm | {"peephole": "full"}, {}),
        ("lstm", "norm is 'haste' and projection", norm | {"projection": 3}, {}),
        ("rnn", "norm is 'haste' and clip", norm, {"clip": 1.0}),
        ("lstm", "norm is 'haste' and cell_clip", norm, {"cell_clip": 1.0}),
        ("gru", "norm is 'haste' and kind 'before'", norm, {"kind": "before"}),
        ("gru", "directions is 2", {"directions": 2}, {"reset": np.zeros((T, N), bool)}),
        ("rnn", "norm is 'batch'", {}, {"norm": "batch"}),
        ("gru", "gamma_x of cell 0 is missing", {}, norm),
        ("rnn", "gamma_x of cell 0 is given", norm, {"norm": None}),
        ("gru", "kind is 'nobias'", {}, {"kind": "nobias"}),
        ("rnn", "clip is 0", {}, {"clip": 0}),
        ("lstm", "cell_clip is -1", {}, {"cell_clip": -1}),
        ("rnn", "reset has shape", {}, {"reset": np.zeros(N)}),
        ("rnn", "does not broadcast to", {}, {"mask": np.ones((2, 1, 1, 1, H))}),
        ("gru", "does not broadcast to", {}, {"zoneout_h": np.ones((1, 1, T, N, H))}),
        ("gru", "5 activations, expected 3", {}, {"activations": reference.LSTM_ACTIVATIONS}),
    ]
    for kind, message, shape, change in wrong:
        net = network(kind, rng, **{k: v for k, v in shape.items() if k not in change})
        if "norm" in shape and change.get("norm", 1) is None:
            net = network(kind, rng, **shape)
        with pytest.raises(ValueError, match=message):
            net._replace(options=net.options | change).forward()
    for kind, name in (("gru", "coupled"), ("rnn", "flip"), ("rnn", "zoneout_c"), ("lstm", "kind")):
        with pytest.raises(TypeError, match=name):
            network(kind, rng)._replace(options={name: 1}).forward()
    net = network("lstm", rng, projection=3, layers=2)
    del net.arrays["projection[1]"]
    with pytest.raises(ValueError, match=r"projection of cell 1 is missing"):
        net.forward()
