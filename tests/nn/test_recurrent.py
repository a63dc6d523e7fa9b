"""LSTM, GRU and RNN: what they have in common, and what acts inside the recurrence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import graph, nn
from retrograd.nn import recurrent
from support.arrays import assert_same_bits
from support.nn import Array, random

KINDS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
FORWARD: dict[str, Any] = {"lstm": rg.lstm_forward, "gru": rg.gru_forward, "rnn": rg.rnn_forward}
BACKWARD: dict[str, Any] = {"lstm": rg.lstm_backward, "gru": rg.gru_backward, "rnn": rg.rnn_backward}
CELLS, STEPS, SAMPLES, HIDDEN = 4, 7, 3, 4


def made(name: str, /, **options: Any) -> Any:
    return KINDS[name](5, HIDDEN, dtype=np.float64, rng=0, **options)


def weights_of(layer: Any) -> list[Any]:
    found = [cell.weights() for cell in layer.cells()]
    return [type(w)(*(None if p is None else p.value for p in w)) for w in found]


def states_of(layer: Any, final: Any) -> list[Array]:
    return list(final) if isinstance(layer, nn.LSTM) else [final]


class Run(nn.Module):
    """A layer from given states, with a loss of everything that it returns."""

    def __init__(self, layer: Any, x: Array, states: list[Array], **given: Any) -> None:
        self.layer, self.given, self.count = layer, given, len(states)
        self.x = nn.Parameter(x)
        for i, state in enumerate(states):
            setattr(self, f"state{i}", nn.Parameter(state))

    def forward(self, dy: Any, *dstates: Any) -> Any:
        states = [graph.identity(getattr(self, f"state{i}")) for i in range(self.count)]
        y, final = self.layer.run(graph.identity(self.x), states if self.count == 2 else states[0], **self.given)
        loss = graph.sum(y * dy)
        for state, d in zip(states_of(self.layer, final), dstates, strict=True):
            loss = loss + graph.sum(state * d)
        return loss, y, states_of(self.layer, final)


def check_against_the_function(
    kind: str, layer: Any, x: Array, given: dict[str, Any], options: dict[str, Any], widths: tuple[int, ...]
) -> None:
    """Values and gradients of a compiled layer are those of the function of arrays, to the bit."""
    cells = len(layer.cells())
    samples = x.shape[0 if layer.batch_first else 1]
    states = [random(cells, samples, width, seed=i) for i, width in enumerate(widths)]
    expected = FORWARD[kind](x, weights_of(layer), *states, **given, **options)
    dy = random(*expected.y.shape, seed=5)
    dstates = [random(*state.shape, seed=6 + i) for i, state in enumerate(states)]
    both = Run(layer, x, states, **given)
    (_, y, final), gradients = nn.compile(both, None, nn.SGD(both, 0.0)).gradients(dy, *dstates)
    assert_same_bits([y, *final], [expected.y, expected.hn, *([expected.cn] if len(states) == 2 else [])])
    names = ("dhn", "dcn")[: len(states)]
    wanted = BACKWARD[kind](dy, expected.cache, **dict(zip(names, dstates, strict=True)))
    assert_same_bits([gradients["x"], gradients["state0"]], [wanted.dx, wanted.dh0])
    if len(states) == 2:
        assert_same_bits([gradients["state1"]], [wanted.dc0])
    children = [name for name in layer._children if name.startswith("layer")]
    for child, dcell in zip(children, wanted.dweights, strict=True):
        found = {field: array for field, array in dcell._asdict().items() if array is not None}
        assert set(found) == set(getattr(layer, child)._variables)
        for field, array in found.items():
            assert_same_bits([gradients[f"layer.{child}.{field}"]], [array])
    at_once, _ = layer.run(x, states if len(states) == 2 else states[0], **given)
    assert_same_bits([at_once], [expected.y])


def drawn(seed: int, stream: int, shape: tuple[int, ...], rate: float) -> Array:
    return rg.dropout(np.ones(shape), rate, seed=(seed + stream) % 2**64)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lstm", {"activations": rg.LstmActivations(g="softsign"), "coupled": True, "clip": 0.9, "cell_clip": 0.4}),
        ("gru", {"kind": "before", "flip": True, "activations": rg.GruActivations(n="softsign"), "clip": 0.8}),
        ("gru", {}),
        ("rnn", {"activation": "sigmoid", "clip": 0.7}),
    ],
)
def test_every_option_reaches_the_function(kind: str, options: dict[str, Any], batch_first: bool) -> None:
    zoneout = (0.2, 0.4) if kind == "lstm" else 0.2
    layer = made(
        kind, layers=2, bidirectional=True, batch_first=batch_first, dropout=0.3, recurrent_dropout=0.25,
        zoneout=zoneout, **options,
    )  # fmt: skip
    x = random(*((SAMPLES, STEPS) if batch_first else (STEPS, SAMPLES)), 5, seed=9)
    seed = int(layer.stream.saved.sum())
    mask = drawn(seed, recurrent._MASK, (CELLS, SAMPLES, HIDDEN), 0.25)
    assert set(np.unique(mask)) == {0.0, 1 / 0.75}
    given = {"lengths": np.array([7, 2, 5])}
    same: dict[str, Any] = {
        "bidirectional": True, "batch_first": batch_first, "dropout": 0.3, "seed": seed,
        "mask": mask[:, None, :, None] if batch_first else mask[:, None, None],
        "zoneout": zoneout,  # the function draws the same weights from the same seed
    }  # fmt: skip
    check_against_the_function(kind, layer, x, given, same | options, (HIDDEN,) * (2 if kind == "lstm" else 1))
    assert layer.stream.saved[1] == 1  # by the call at once


@pytest.mark.parametrize(
    ("kind", "options", "passed"),
    [
        ("lstm", {"norm": "haste", "norm_eps": 1e-3}, {"norm": "haste", "norm_eps": 1e-3}),
        ("lstm", {"norm": "cell"}, {"norm": "cell"}),
        ("lstm", {"projection": 3, "layers": 2}, {}),
        ("lstm", {"peephole": "diagonal", "output_gate_reads": "old"}, {"output_gate_reads": "old"}),
        ("gru", {"norm": "haste"}, {"norm": "haste"}),
        ("gru", {"bias": False}, {}),
        ("rnn", {"norm": "haste", "activation": "relu"}, {"norm": "haste", "activation": "relu"}),
    ],
)
def test_norms_projections_and_resets(kind: str, options: dict[str, Any], passed: dict[str, Any]) -> None:
    layer = made(kind, **options)
    for name, parameter in layer.parameters().items():
        if "gamma" in name or "beta" in name:
            assert (parameter.value == ("gamma" in name)).all()
            parameter.value[...] += 0.5 * random(*parameter.shape, seed=3)
    x, reset = random(STEPS, SAMPLES, 5, seed=9), np.random.default_rng(1).random((STEPS, SAMPLES)) < 0.3
    widths = (options.get("projection", HIDDEN), HIDDEN)[: 2 if kind == "lstm" else 1]
    check_against_the_function(kind, layer, x, {"reset": reset}, passed, widths)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_blends_the_states_and_draws_nothing(kind: str) -> None:
    zoneout = (0.2, 0.4) if kind == "lstm" else 0.2
    layer = made(kind, layers=2, dropout=0.5, recurrent_dropout=0.5, zoneout=zoneout).eval()
    x = random(STEPS, SAMPLES, 5)
    expected = FORWARD[kind](x, weights_of(layer), zoneout=zoneout, training=False)
    assert_same_bits([layer(x), layer.predict(x)], [expected.y] * 2)
    assert layer.stream.saved[1] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"recurrent_dropout": 0.5}, {"zoneout": 0.5}])
def test_each_call_in_training_draws_anew(kind: str, options: dict[str, Any]) -> None:
    layer, x = made(kind, **options), random(STEPS, SAMPLES, 5)
    first, second = layer(x), layer(x)
    assert not np.array_equal(first, second)
    layer.stream[1] = 0
    assert np.array_equal(layer(x), first)


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_dropout_has_one_mask_for_all_steps(kind: str) -> None:
    """An element that is dropped is read by no gate at any step: the gradient of its column of wh is 0."""
    layer = KINDS[kind](5, 16, recurrent_dropout=0.5, dtype=np.float64, rng=0)
    seed = int(layer.stream.saved.sum())
    mask = drawn(seed, recurrent._MASK, (1, 1, 16), 0.5)[0, 0]
    assert 0 < np.count_nonzero(mask) < 16
    x = random(STEPS, 1, 5)
    step = nn.compile(layer, nn.MeanSquaredError(), nn.SGD(layer, 0.0))
    gradient = step.gradients(x, np.zeros((STEPS, 1, 16)))[1]["layer0.wh"]
    assert np.array_equal(gradient.any(axis=0), mask > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_begins_a_new_sequence(kind: str) -> None:
    layer, x = made(kind, layers=2, batch_first=True), random(2, STEPS, 5)
    reset = np.zeros((2, STEPS), bool)
    reset[:, 3] = True
    y, final = layer.run(x, reset=reset)
    second, last = layer.run(x[:, 3:])
    np.testing.assert_allclose(y, np.concatenate([layer(x[:, :3]), second], 1), rtol=1e-13, atol=1e-15)
    for found, wanted in zip(states_of(layer, final), states_of(layer, last), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-15)
    assert np.array_equal(nn.Sequential(layer)(x, reset=reset), y)
    with pytest.raises(ValueError, match="reset is given, but layers are bidirectional"):
        made(kind, bidirectional=True, batch_first=True)(x, reset=reset)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"layers": 2, "batch_first": True}, {"norm": "haste", "clip": None}])
def test_steps_in_a_loop_are_the_sequence(kind: str, options: dict[str, Any]) -> None:
    layer, x = made(kind, **options), random(3, 3, 5)
    whole, final = layer.run(x)
    time, state = 1 if layer.batch_first else 0, None
    for t in range(3):
        y, state = layer.step(x.take(t, time), state)
        np.testing.assert_allclose(y, whole.take(t, time), rtol=1e-13, atol=1e-15)
    for found, wanted in zip(states_of(layer, state), states_of(layer, final), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-15)
    with pytest.raises(ValueError, match="a single step needs one direction, but bidirectional is True"):
        made(kind, bidirectional=True).step(x[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [None, "haste"])
def test_an_embedding_is_looked_up(kind: str, norm: str | None) -> None:
    embedding = nn.Embedding(6, 5, dtype=np.float64, rng=1)
    both, plain = made(kind, norm=norm, embedding=embedding), made(kind, norm=norm)
    tokens = np.random.default_rng(2).integers(6, size=(STEPS, SAMPLES))
    np.testing.assert_allclose(both(tokens), plain(embedding(tokens)), rtol=1e-13, atol=1e-15)
    with pytest.raises(ValueError, match=rf"{kind.upper()}: x has shape \(7, 3, 5\), must have the axes \(T, N\)"):
        both(embedding(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_last_outputs_of_sequences(kind: str) -> None:
    x, lengths = random(STEPS, SAMPLES, 5), np.array([7, 2, 5])
    y, last = (made(kind, bidirectional=True, last=last)(x, lengths=lengths) for last in (False, True))
    forward = y[lengths - 1, np.arange(SAMPLES), :HIDDEN]
    assert np.array_equal(last, np.concatenate([forward, y[0, :, HIDDEN:]], 1))
    one = made(kind, last=True)(x, lengths=lengths)
    assert np.array_equal(one, made(kind)(x, lengths=lengths)[lengths - 1, np.arange(SAMPLES)])


# ---- parameters ------------------------------------------------------------------------------------------------------


def test_names_and_shapes_of_parameters() -> None:
    def shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
        return {name: p.shape for name, p in layer.parameters().items()}

    assert shapes(nn.GRU(5, 4)) == {"layer0.wx": (12, 5), "layer0.wh": (12, 4), "layer0.b": (12,), "layer0.bh": (12,)}
    assert shapes(nn.GRU(5, 4, kind="before")) == {"layer0.wx": (12, 5), "layer0.wh": (12, 4), "layer0.b": (12,)}
    assert shapes(nn.RNN(5, 4, norm="haste", bias=False)) == {
        "layer0.wx": (4, 5), "layer0.wh": (4, 4), "layer0.gamma_x": (4,), "layer0.gamma_h": (4,),
    }  # fmt: skip
    found = shapes(nn.LSTM(5, 4, projection=3, layers=2, bidirectional=True, bias=False))
    one = {"wx": (16, 5), "wh": (16, 3), "projection": (3, 4)}
    two = one | {"wx": (16, 6)}
    cells = {"layer0": one, "layer0_reverse": one, "layer1": two, "layer1_reverse": two}
    assert found == {f"{cell}.{name}": shape for cell, parts in cells.items() for name, shape in parts.items()}
    names = list(nn.LSTM(5, 4, norm="cell", peephole=None).parameters())
    assert names == [f"layer0.{name}" for name in ("wx", "wh", "b", "gamma_x", "gamma_h", "gamma_c", "beta_c")]


@pytest.mark.parametrize(
    ("init", "wx", "wh", "b"),
    [("pytorch", 0.17691171, -0.65664726, 1.0138463), ("keras", 0.18477824, 0.0469918, 1.0)],
)
def test_a_seed_gives_an_lstm_the_parameters_it_always_gave(init: Any, wx: float, wh: float, b: float) -> None:
    cell: Any = nn.LSTM(3, 2, init=init, rng=7).layer0  # type: ignore[attr-defined]
    found = [cell.wx.value[0, 0], cell.wh.value[0, 0], cell.b.value[2]]
    np.testing.assert_allclose(found, [wx, wh, b], rtol=1e-6)
    # Of later cells, whose values come after those of the optional parameters.
    deep = nn.LSTM(3, 2, layers=2, bidirectional=True, bias=False, peephole="full", init=init, rng=7, dtype=np.float64)
    total = {"pytorch": 2.238546523686122, "keras": 2.7864825265600546}[init]
    assert deep.parameters()["layer1_reverse.wx"].value.sum() == pytest.approx(total, rel=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_follow_pytorch_or_keras(kind: str) -> None:
    layer = KINDS[kind](30, 64, rng=0)
    for parameter in layer.parameters().values():
        values = parameter.value - (0 if parameter.ndim > 1 or kind != "lstm" else np.repeat([0, 1, 0, 0], 64))
        assert 0.115 < np.abs(values).max() <= 0.125
    keras = KINDS[kind](30, 64, init="keras", rng=0, dtype=np.float64).layer0
    np.testing.assert_allclose(keras.wh.value.T @ keras.wh.value, np.eye(64), atol=1e-13)
    assert np.abs(keras.wx.value).max() <= np.sqrt(6 / (30 + len(keras.wx.value)))
    assert kind == "lstm" or not keras.b.value.any()


@pytest.mark.parametrize("kind", ["gru", "rnn"])
def test_checkpoints_resume_to_the_bit(kind: str, tmp_path: Any) -> None:
    x, target = random(STEPS, SAMPLES, 5), random(STEPS, SAMPLES, HIDDEN, seed=1)
    options = {"layers": 2, "recurrent_dropout": 0.3, "zoneout": 0.1, "norm": "haste"}
    layers = [made(kind, **options) for _ in range(2)]
    optimizers = [nn.Adam(layer, 1e-2) for layer in layers]
    steps = [nn.compile(m, nn.MeanSquaredError(), o) for m, o in zip(layers, optimizers, strict=True)]
    steps[0](x, target)
    nn.save(tmp_path / "one.safetensors", layers[0], optimizers[0])
    nn.load(tmp_path / "one.safetensors", layers[1], optimizers[1])
    assert steps[0](x, target) == steps[1](x, target)
    for name, array in layers[0].state_dict().items():
        assert np.array_equal(array, layers[1].state_dict()[name]), name


# ---- use -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"norm": "haste"}, {"recurrent_dropout": 0.05, "zoneout": 0.02}])
def test_a_small_model_learns_to_remember(kind: str, options: dict[str, Any]) -> None:
    """The target is the input of two steps before. A norm keeps its signs, not its size."""
    rng = np.random.default_rng(0)
    model = nn.Sequential(KINDS[kind](2, 24, rng=rng, **options), nn.Linear(24, 2, rng=rng))
    step = nn.compile(model, nn.MeanSquaredError(), nn.Adam(model, 1e-2))
    x = rng.choice(np.array([-1, 1], np.float32), (301, 12, 16, 2))
    for part in x[1:]:
        step(part, np.concatenate([np.zeros_like(part[:2]), part[:-2]]))
    assert np.square(model.predict(x[0])[2:] - x[0][:-2]).mean() < 0.05


def test_a_summary_names_the_cells(capsys: pytest.CaptureFixture[str]) -> None:
    nn.Sequential(nn.GRU(5, 4, rng=0), nn.RNN(4, 3, rng=0)).summary(np.zeros((7, 2, 5)))
    printed = capsys.readouterr().out
    for text in (
        "GRU",
        "GruCell(wx: (12, 5), wh: (12, 4), b: (12,), bh: (12,))",
        "float32[7, 2, 3]",
        "156 param",
    ):
        assert text in printed
    described = repr(nn.LSTM(5, 4, projection=3, recurrent_dropout=0.5))
    assert described.startswith("LSTM(5, 4, layers=1, bidirectional=False, recurrent_dropout=0.5, projection=3")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.GRU(3, 0), "GRU: layers is 1, inputs is 3, hidden is 0"),
        (lambda: nn.GRU(3, 4, kind="between"), "GRU: kind is 'between', must be 'after' or 'before'"),  # type: ignore[arg-type]
        (lambda: nn.GRU(3, 4, norm="cell"), "GRU: norm is 'cell', must be 'haste' or None"),  # type: ignore[arg-type]
        (lambda: nn.GRU(3, 4, norm="haste", kind="before"), "GRU: norm is given, and so is kind='before'"),
        (lambda: nn.GRU(3, 4, zoneout=(0.1, 0.2)), r"GRU: zoneout is \(0.1, 0.2\), must be one rate"),  # type: ignore[arg-type]
        (lambda: nn.LSTM(3, 4, zoneout=(0.1, 1.0)), "LSTM: zoneout is 1.0, must be at least 0 and below 1"),
        (lambda: nn.LSTM(3, 4, zoneout=(0.1, 0.2), peephole="full"), "zoneout of the cell state is 0.2 and peephole"),
        (lambda: nn.LSTM(3, 4, projection=0), "LSTM: projection is 0, must be at least 1, or None"),
        (lambda: nn.LSTM(3, 4, projection=2, norm="haste"), "LSTM: norm is given, and so is a projection"),
        (lambda: nn.RNN(3, 4, recurrent_dropout=-0.5), "RNN: recurrent_dropout is -0.5, must be at least 0"),
        (lambda: nn.RNN(3, 4, clip=0), "RNN: clip is 0.0, must be above 0 and finite"),
        (lambda: nn.RNN(3, 4, activation="tan"), "RNN: activation: activation 'tan' is unknown"),
        (lambda: nn.RNN(3, 4, init="he"), "RNN: init is 'he'; there are 'pytorch' and 'keras'"),  # type: ignore[arg-type]
    ],
)
def test_options_that_do_not_exist(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- the functions of the graph --------------------------------------------------------------------------------------


def test_factors_of_one_column_are_those_of_all_units() -> None:
    x, wx, wh = random(5, 3, 2), random(4, 2, seed=1), random(4, 4, seed=2)
    mask, kept = random(3, 1, seed=3), np.abs(random(5, 3, 1, seed=4))
    found = graph.rnn(x, (wx, wh), mask=mask, zoneout=kept).y
    expected = rg.rnn_forward(x, (wx, wh), mask=np.tile(mask, 4), zoneout=np.tile(kept, 4)).y
    assert np.array_equal(np.asarray(found), expected)


def test_what_the_graph_refuses() -> None:
    x, wx, wh = random(5, 3, 2), random(16, 2, seed=1), random(16, 4, seed=2)
    with pytest.raises(ValueError, match="gamma_x of cell 0 is missing; norm needs it"):
        graph.lstm(x, (wx, wh), norm="haste")
    with pytest.raises(ValueError, match="zoneout has a part for the cell state, and there are full peepholes"):
        graph.lstm(x, (wx, wh, None, wh), zoneout=(None, np.ones(4)))
    with pytest.raises(ValueError, match=r"mask has shape \(2, 4\), which does not broadcast"):
        graph.lstm(x, (wx, wh), mask=np.ones((2, 4)))

    def function(mask: Any) -> Any:
        return graph.gradients(graph.sum(graph.lstm(x, (wx, wh), mask=mask).y), [mask])

    with pytest.raises(ValueError, match="lstm: a gradient of mask or zoneout is wanted, which have none"):
        graph.compile(function, np.ones(4))
