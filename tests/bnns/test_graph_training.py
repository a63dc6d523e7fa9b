"""What Apple's builder lacks: gradients, in-out arguments, parameters, optimizers, step by step as PyTorch; files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd.bnns import BNNSGraph
from support.bnns_graph import Array, executed

torch = pytest.importorskip("torch")
Builder = BNNSGraph.Builder
INOUT = Builder.Intent.inOut


def problem() -> tuple[Array, Array, list[Array]]:
    rng = np.random.default_rng(3)
    x, labels = rng.standard_normal((12, 5)), rng.integers(0, 3, 12)
    return x, labels, [rng.standard_normal(s) * 0.5 for s in ((8, 5), (8,), (3, 8), (3,))]


def network(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    return x.linear(weight=w1, bias=b1).tanh().linear(weight=w2, bias=b2)


def torch_losses(steps: int, make: Any) -> tuple[list[float], list[Array]]:
    x, labels, values = problem()
    parameters = [torch.tensor(v, requires_grad=True) for v in values]
    optimizer, losses = make(parameters), []
    for _ in range(steps):
        w1, b1, w2, b2 = parameters
        hidden = torch.tanh(torch.nn.functional.linear(torch.tensor(x), w1, b1))
        loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, w2, b2), torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [p.detach().numpy() for p in parameters]


OPTIMIZERS = [
    pytest.param(lambda: BNNSGraph.SGD(learningRate=0.3), lambda p: torch.optim.SGD(p, 0.3), id="sgd"),
    pytest.param(
        lambda: BNNSGraph.SGD(learningRate=0.1, momentum=0.9, weightDecay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01),
        id="momentum",
    ),
    pytest.param(lambda: BNNSGraph.Adam(learningRate=0.02), lambda p: torch.optim.Adam(p, 0.02), id="adam"),
    pytest.param(
        lambda: BNNSGraph.Adam(learningRate=0.02, weightDecay=0.1, decoupledWeightDecay=True),
        lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1),
        id="adamw",
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), OPTIMIZERS)
def test_in_out_arguments_are_trained_as_in_pytorch(ours: Any, theirs: Any) -> None:
    x, labels, values = problem()

    def build(builder: Any) -> Any:
        inputs = builder.argument(name="x", dataType=np.float64, shape=x.shape)
        target = builder.argument(name="labels", dataType=int, shape=labels.shape)
        weights = [builder.argument(dataType=np.float64, shape=v.shape, intent=INOUT) for v in values]
        loss = network(inputs, *weights).softmaxCrossEntropy(target=target)
        builder.minimize(loss, parameters=weights, using=ours())
        return [loss]

    context = BNNSGraph.makeContext(build)
    expected, last = torch_losses(20, theirs)
    weights, loss = [v.copy() for v in values], np.zeros(())
    for one in expected:
        context.executeFunction(arguments=[loss, x, labels, *weights])
        assert np.isclose(loss, one, rtol=1e-9)
    for weight, wanted in zip(weights, last, strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-8, atol=1e-10)


def test_parameters_are_kept_by_the_context() -> None:
    x, labels, values = problem()
    names = ("w1", "b1", "w2", "b2")

    def build(builder: Any) -> Any:
        inputs = builder.argument(name="x", dataType=np.float64, shape=[-1, 5])
        target = builder.argument(name="labels", dataType=int, shape=[-1])
        weights = [builder.parameter(name=name, values=v) for name, v in zip(names, values, strict=True)]
        loss = network(inputs, *weights).softmaxCrossEntropy(target=target)
        builder.minimize(loss, parameters=weights, using=BNNSGraph.Adam(learningRate=0.02))
        return [loss]

    context = BNNSGraph.makeContext(build)
    expected, last = torch_losses(15, lambda p: torch.optim.Adam(p, 0.02))
    loss = np.zeros(())
    for one in expected:
        context.executeFunction(arguments=[loss, x, labels])
        assert np.isclose(loss, one, rtol=1e-9)
    for name, wanted in zip(names, last, strict=True):
        np.testing.assert_allclose(context.parameters[name], wanted, rtol=1e-8, atol=1e-10)
    assert context.parameters["step"] == 15
    assert "w1.first_moments" in context.parameters


def test_updates_by_hand_and_running_statistics() -> None:
    x = np.random.default_rng(0).standard_normal((6, 4, 3))

    def build(builder: Any) -> Any:
        inputs = builder.argument(name="x", dataType=np.float64, shape=x.shape)
        w = builder.argument(name="w", dataType=np.float64, shape=[4], intent=INOUT)
        mean = builder.argument(name="mean", dataType=np.float64, shape=[4], intent=INOUT)
        variance = builder.argument(name="variance", dataType=np.float64, shape=[4], intent=INOUT)
        y, m, v = inputs.trainingBatchNorm(weight=w, epsilon=1e-5)
        loss = (y * y * y).sum(axes=[0, 1, 2], keepDimensions=False)
        (dw,) = builder.gradient(of=loss, withRespectTo=[w])
        builder.update(w, w - 0.1 * dw)
        builder.update(mean, mean * 0.9 + m * 0.1)
        builder.update(variance, variance * 0.9 + v * (0.1 * 18 / 17))
        return [y, w + 0]

    context = BNNSGraph.makeContext(build)
    w, mean, variance, y, old = np.full(4, 0.5), np.zeros(4), np.ones(4), np.zeros(x.shape), np.zeros(4)
    layer = torch.nn.BatchNorm1d(4).double()
    layer.weight.data.fill_(0.5)
    for _ in range(3):
        before = w.copy()
        context.executeFunction(arguments=[y, old, x, w, mean, variance])
        assert old.tolist() == before.tolist()  # a run reads the values that it was given
        layer.zero_grad()
        wanted = layer(torch.tensor(x))
        (wanted**3).sum().backward()
        layer.weight.data -= 0.1 * layer.weight.grad
        np.testing.assert_allclose(y, wanted.detach(), rtol=1e-9)
        np.testing.assert_allclose(w, layer.weight.detach(), rtol=1e-9)
        np.testing.assert_allclose(mean, layer.running_mean, rtol=1e-9)
        np.testing.assert_allclose(variance, layer.running_var, rtol=1e-9)


def test_an_argument_is_updated_once() -> None:
    def build(builder: Any) -> Any:
        w = builder.argument(name="w", dataType=float, shape=[2], intent=INOUT)
        builder.update(w, w + 1)
        with pytest.raises(ValueError, match=r"'w'.* is updated twice"):
            builder.update(w, w + 2)
        with pytest.raises(ValueError, match=r"'w'.* is updated twice"):
            builder.minimize(w, parameters=[w], using=BNNSGraph.SGD(learningRate=1))
        return [w * 2]

    w, twice = np.ones(2, np.float32), np.zeros(2, np.float32)
    context = BNNSGraph.makeContext(build)
    context.executeFunction(arguments=[twice, w])
    assert (twice.tolist(), w.tolist()) == ([2, 2], [2, 2])
    with pytest.raises(BNNSGraph.Error, match="w is read-only"):
        context.executeFunction(arguments=[twice, np.broadcast_to(np.float32(1), 2)])


def test_a_failed_run_changes_no_state() -> None:
    def build(builder: Any) -> Any:
        w = builder.argument(name="w", dataType=float, shape=[3], intent=INOUT)
        i = builder.argument(name="i", dataType=np.int32, shape=[1])
        builder.update(w, w * 2)
        return [w.gather(indices=i, axis=0)]

    context, w = BNNSGraph.makeContext(build), np.ones(3, np.float32)
    with pytest.raises(BNNSGraph.Error, match="below 3"):
        context.executeFunction(arguments=[np.zeros(1, np.float32), w, np.array([7], np.int32)])
    assert w.tolist() == [1, 1, 1]


def test_dropout_has_the_mask_of_its_seed() -> None:
    x = np.ones((40, 50), np.float32)

    def build(builder: Any) -> Any:
        inputs = builder.argument(name="x", dataType=float, shape=x.shape)
        seed = builder.argument(name="seed", dataType=np.int64, shape=[], intent=INOUT)
        builder.update(seed, seed + 1)
        y = inputs.dropout(seed=seed, rate=0.25)
        return [y, *builder.gradient(of=y, withRespectTo=[inputs])]

    context, seed = BNNSGraph.makeContext(build), np.array(5)
    y, dx = np.zeros_like(x), np.zeros_like(x)
    context.executeFunction(arguments=[y, dx, x, seed])
    assert seed == 6
    assert 0.2 < (y == 0).mean() < 0.3
    np.testing.assert_array_equal(y, dx)
    first = y.copy()
    context.executeFunction(arguments=[y, dx, x, seed])
    assert not np.array_equal(first, y)
    context.executeFunction(arguments=[y, dx, x, np.array(5)])
    np.testing.assert_array_equal(first, y)


# ---- recurrent layers, to the bit -----------------------------------------------------------------------------------


def gates(a: Array, *order: int) -> Array:
    parts = np.split(a, len(order))
    return np.concatenate([parts[i] for i in order])


def test_recurrent_layers_are_our_functions_to_the_bit() -> None:
    rng = np.random.default_rng(1)
    f = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    x, h, c = f(7, 3, 5), f(3, 6), f(3, 6)
    wx, wh, b, bi = f(24, 5), f(24, 6), f(24), f(24)
    forward, tanh, sigmoid = Builder.Direction.forward, Builder.Activation.tanh, Builder.Activation.sigmoid

    def block(builder: Any, x: Any, h: Any, c: Any, wx: Any, wh: Any, b: Any, bi: Any) -> Any:
        common = {"direction": forward, "activation": tanh, "outputSequence": True, "initialHiddenStates": h}
        rnn = x.rnn(inputHiddenWeight=wx[:6], hiddenHiddenWeight=wh[:6], bias=b[:6], **common)
        lstm = x.lstm(
            initialCellStates=c, inputHiddenWeight=wx, hiddenHiddenWeight=wh, bias=b, recurrentActivation=sigmoid,
            cellActivation=tanh, **common,
        )  # fmt: skip
        gru = x.gru(
            inputHiddenWeight=wx[:18], hiddenHiddenWeight=wh[:18], bias=b[:18], inputBias=bi[:18],
            recurrentActivation=sigmoid, applyResetGateAfterMatMul=True, **common,
        )  # fmt: skip
        assert lstm.cellStates.shape == [3, 6]
        return [*rnn, *lstm, *gru]

    found = executed(block, [x, h, c, wx, wh, b, bi])
    rnn = rg.rnn_forward(x, rg.RnnWeights(wx[:6], wh[:6], b[:6]), h)
    lstm = rg.lstm_forward(x, rg.LstmWeights(*(gates(a, 0, 1, 3, 2) for a in (wx, wh, b))), h, c)
    gru = rg.gru_forward(x, rg.GruWeights(*(gates(a[:18], 0, 2, 1) for a in (wx, wh, bi, b))), h)
    expected = [rnn.y, rnn.hn, lstm.y, lstm.hn, lstm.cn, gru.y, gru.hn]
    for a, e in zip(found, expected, strict=True):
        assert a.tobytes() == np.ascontiguousarray(e).reshape(a.shape).tobytes()


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
def test_recurrent_gradients_are_our_functions_to_the_bit(cell: str) -> None:
    rng = np.random.default_rng(2)
    f = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    order = {"rnn": (0,), "lstm": (0, 1, 3, 2), "gru": (0, 2, 1)}[cell]
    rows = 6 * len(order)
    x, h, c, weights, dy = f(7, 3, 5), f(3, 6), f(3, 6), [f(rows, 5), f(rows, 6), f(rows), f(rows)], f(7, 3, 6)
    sigmoid, tanh = Builder.Activation.sigmoid, Builder.Activation.tanh

    def block(builder: Any, x: Any, h: Any, c: Any, wx: Any, wh: Any, b: Any, bi: Any) -> Any:
        given = {"initialHiddenStates": h, "inputHiddenWeight": wx, "hiddenHiddenWeight": wh, "bias": b}
        given |= {"direction": Builder.Direction.forward, "activation": tanh, "outputSequence": True}
        wrt = [x, wx, wh, b, h]
        if cell != "rnn":
            given["recurrentActivation"] = sigmoid
        if cell == "lstm":
            given |= {"initialCellStates": c, "cellActivation": tanh}
            wrt.append(c)
        if cell == "gru":
            given |= {"inputBias": bi, "applyResetGateAfterMatMul": True}
            wrt.append(bi)
        y = getattr(x, cell)(**given).output
        return builder.gradient(of=(y * builder.constant(values=dy)), withRespectTo=wrt)

    found = executed(block, [x, h, c, *weights])
    wx, wh, b, bi = (gates(a, *order) for a in weights)
    if cell == "rnn":
        g = rg.rnn_backward(dy, rg.rnn_forward(x, rg.RnnWeights(wx, wh, b), h).cache)
        expected = [g.dx, g.dweights.wx, g.dweights.wh, g.dweights.b, g.dh0]
    elif cell == "lstm":
        g = rg.lstm_backward(dy, rg.lstm_forward(x, rg.LstmWeights(wx, wh, b), h, c).cache)
        expected = [g.dx, g.dweights.wx, g.dweights.wh, g.dweights.b, g.dh0, g.dc0]
    else:
        g = rg.gru_backward(dy, rg.gru_forward(x, rg.GruWeights(wx, wh, bi, b), h).cache)
        expected = [g.dx, g.dweights.wx, g.dweights.wh, g.dweights.bh, g.dh0, g.dweights.b]
    back = np.argsort(order)  # gates in Apple's order again
    for place, (a, e) in enumerate(zip(found, expected, strict=True)):
        stacked = place in (1, 2, 3) or (cell == "gru" and place == 5)
        wanted = np.ascontiguousarray(gates(e, *back) if stacked else e)
        assert a.tobytes() == wanted.reshape(a.shape).tobytes(), place


# ---- files ----------------------------------------------------------------------------------------------------------


def inference(builder: Any) -> Any:
    _, _, values = problem()
    x = builder.argument(name="x", dataType=np.float64, shape=[-1, 5])
    names = ("w1", "b1", "w2", "b2")
    return [network(x, *(builder.parameter(name=n, values=v) for n, v in zip(names, values, strict=True)))]


def test_a_saved_graph_is_read_and_fine_tuned(tmp_path: Path) -> None:
    x, labels, _ = problem()
    first, path = BNNSGraph.makeContext(inference), tmp_path / "network.safetensors"
    first.write(to=path)
    assert path.stat().st_mode & 0o777 == 0o600
    second = BNNSGraph.Context(compileFromPath=path)
    outputs = [np.zeros((12, 3)), np.zeros((12, 3))]
    for context, y in zip((first, second), outputs, strict=True):
        context.executeFunction(arguments=[y, x])
    assert outputs[0].tobytes() == outputs[1].tobytes()
    assert second.argumentNames() == ["output_0", "x"]

    def build(builder: Any) -> Any:
        inputs = builder.argument(name="x", dataType=np.float64, shape=[-1, 5])
        target = builder.argument(name="labels", dataType=int, shape=[-1])
        model = builder.model(path)
        (logits,) = model(inputs)
        loss = logits.softmaxCrossEntropy(target=target)
        builder.minimize(loss, parameters=model.parameters.values(), using=BNNSGraph.SGD(learningRate=0.3))
        return [loss]

    context, loss = BNNSGraph.makeContext(build), np.zeros(())
    expected, last = torch_losses(10, lambda p: torch.optim.SGD(p, 0.3))
    for one in expected:
        context.executeFunction(arguments=[loss, x, labels])
        assert np.isclose(loss, one, rtol=1e-9)
    for name, wanted in zip(("w1", "b1", "w2", "b2"), last, strict=True):
        np.testing.assert_allclose(context.parameters[name], wanted, rtol=1e-8)
        second.parameters[name][...] = context.parameters[name]  # and written back
    second.write(to=path)
    trained = BNNSGraph.Context(compileFromPath=path)
    np.testing.assert_array_equal(trained.parameters["w1"], context.parameters["w1"])


def test_every_kind_of_option_and_state_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "graph"
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8), dtype=np.float32)

    def build(builder: Any) -> Any:
        inputs = builder.argument(name="x", dataType=float, shape=[-1, 3, 8, 8])
        w = builder.argument(name="w", dataType=float, shape=[4, 3, 3, 3], intent=INOUT)
        y = inputs.conv(weight=w, strides=[2, 2], padding=Builder.ConvolutionPadding.same, dilations=None)
        y = y.pooling(
            Builder.PoolingFunction.average(includePadding=True), kernelSize=[2, 2], strides=[2, 2],
            padding=Builder.PoolingPadding.custom([0, 0, 0, 0]), ceilingMode=Builder.CeilingMode.ceiling,
        ).pad(Builder.Padding.constant(0.5), padding=[0, 0, 0, 0, 1, 1, 0, 0])  # fmt: skip
        y = y[:, 0, Builder.SliceRange(startIndex=1, endIndex=-1)].cast(to=np.float64).clip(to=(-1, 1))
        (dw,) = builder.gradient(of=y, withRespectTo=[w])
        builder.update(w, w - 0.1 * dw)
        return [y, builder.concatenate([y, y], axis=0)]

    context = BNNSGraph.makeContext(build)
    context.write(to=path)
    results = []
    for one in (context, BNNSGraph.Context(compileFromPath=path)):
        w, y, both = np.full((4, 3, 3, 3), 0.01, np.float32), np.zeros((2, 2, 2)), np.zeros((4, 2, 2))
        one.executeFunction(arguments=[y, both, x, w])
        results.append((w.tobytes(), y.tobytes(), both.tobytes()))
        assert not np.all(w == np.float32(0.01))
    assert results[0] == results[1]


def test_files_that_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    other, broken = tmp_path / "other.safetensors", tmp_path / "broken"
    save_file({"x": np.ones(2, np.float32)}, other)
    broken.write_bytes(b"nothing")
    compiled = tmp_path / "a.mlmodelc"
    compiled.mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    wrong = tmp_path / "wrong"
    save_file({}, wrong, {"retrograd.bnnsgraph": '{"version": 1, "calls": [{"kind": "nothing"}], "functions": []}'})
    for path, message in (
        (other, "has no graph"), (broken, "cannot be read"), (compiled, "compiled Core ML model"),
        (folder, "not a .mlpackage"), (tmp_path / "none", "does not exist"), (wrong, "no operation 'nothing'"),
    ):  # fmt: skip
        with pytest.raises(BNNSGraph.Error, match=message) as error:
            BNNSGraph.Context(compileFromPath=path)
        assert error.value.case == "unableToMakeGraph"


def test_an_optimizer_cannot_be_saved(tmp_path: Path) -> None:
    def build(builder: Any) -> Any:
        w = builder.parameter(name="w", values=np.ones(2))
        builder.minimize(w, parameters=[w], using=BNNSGraph.SGD(learningRate=1))
        return [w * 1.0]

    with pytest.raises(BNNSGraph.Error, match="a graph with SGD cannot be saved"):
        BNNSGraph.makeContext(build).write(to=tmp_path / "x")
    assert not list(tmp_path.iterdir())
