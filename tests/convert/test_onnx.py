"""ONNX: onnxruntime computes the same with what we write, and we the same as graphs that PyTorch exports."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import nn
from retrograd.convert import Conv, ConvertError, Embedding, Gru, Layers, Linear, Lstm, Norm, convert, read, write
from support.arrays import Array
from support.convert import computed, gru, lstm, normal, rnn

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def run(path: Path, **inputs: Array) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {f"{name}.x": x for name, x in inputs.items()}), strict=True))


def filled(model: nn.Module) -> nn.Module:
    for k, array in enumerate([*model.parameters().values(), *model.buffers().values()]):
        array[...] = np.random.default_rng(k).uniform(0.2, 1.0, array.shape)
    return model.eval()


CASES: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "lstm": (lambda: nn.LSTM(3, 4), (6, 2, 3), ""),
    "plain": (lambda: nn.LSTM(3, 4, bias=False), (6, 2, 3), ""),
    "stack": (lambda: nn.LSTM(3, 4, layers=3, bidirectional=True), (6, 2, 3), ""),
    "peepholes": (lambda: nn.LSTM(3, 4, layers=2, bidirectional=True, peephole="diagonal"), (6, 2, 3), ""),
    "gru": (lambda: nn.GRU(3, 4, layers=2, bidirectional=True), (6, 2, 3), ""),
    "gru_before": (lambda: nn.GRU(3, 4, kind="before"), (6, 2, 3), ""),
    "rnn": (lambda: nn.RNN(3, 4, layers=2), (6, 2, 3), ""),
    "rnn_relu": (lambda: nn.RNN(3, 4, activation="relu"), (6, 2, 3), "rnn_relu"),
    "batch": (lambda: nn.BatchNorm(3), (2, 3, 5), "batch_norm"),
    "layer": (lambda: nn.LayerNorm((3, 5)), (2, 3, 5), "layer_norm"),
    "group": (lambda: nn.GroupNorm(2, 6), (2, 6, 5), "group_norm:2"),
    "instance": (lambda: nn.InstanceNorm(3, affine=True), (2, 3, 5), "instance_norm"),
    "linear": (lambda: nn.Linear(3, 4), (2, 3), ""),
    "product": (lambda: nn.Linear(3, 4, bias=False), (2, 3), ""),
    "conv": (lambda: nn.Conv(4, 4, (3, 2), groups=2), (2, 4, 5, 6), "conv:2"),
    "up": (lambda: nn.ConvTranspose(4, 6, (3,), groups=2), (2, 4, 5), ""),
}


@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_runs_what_we_write(tmp_path: Path, name: str) -> None:
    make, shape, kind = CASES[name]
    model = filled(nn.Sequential(**{name: make()}))
    if name == "peepholes":
        for part, array in model.parameters().items():
            if part.endswith("peephole"):
                array[8:12] = 0  # of gate g
    nn.save(tmp_path / "a.safetensors", model)
    convert(tmp_path / "a.safetensors", tmp_path / "a.onnx", kinds={name: kind} if kind else {})
    x = normal(*shape)
    y = run(tmp_path / "a.onnx", **{name: x})[f"{name}.y"]
    np.testing.assert_allclose(y, model.forward(x), rtol=2e-5, atol=2e-6)


RECURRENT: dict[str, Any] = {
    "gru": gru(),
    "gru_no_bias": gru(bias=False),
    "gru_stack": gru(3, 4, 2, 2),
    "before": gru(kind="before"),
    "before_stack": gru(3, 4, 2, 2, kind="before"),
    "rnn": rnn(),
    "rnn_stack": rnn(3, 4, 2, 2, activation="relu", bias=False),
    "rnn_sigmoid": rnn(activation="sigmoid"),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_runtimes_run_recurrent_layers(tmp_path: Path, name: str) -> None:
    """onnxruntime, and ONNX's reference, which has one direction and no RNN with a sigmoid."""
    layer, x = RECURRENT[name], normal(6, 2, 3)
    write(tmp_path / "a.onnx", {name: layer})
    expected = computed(layer, x)
    np.testing.assert_allclose(run(tmp_path / "a.onnx", **{name: x})[f"{name}.y"], expected, rtol=2e-5, atol=2e-6)
    if layer.directions == 1 and name != "rnn_sigmoid":
        reference = importlib.import_module("onnx.reference")
        (y,) = reference.ReferenceEvaluator(str(tmp_path / "a.onnx")).run(None, {f"{name}.x": x})
        np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(computed(read(tmp_path / "a.onnx")[name], x), expected)


def test_onnxruntime_runs_an_embedding(tmp_path: Path) -> None:
    table = normal(7, 3)
    write(tmp_path / "a.onnx", {"words": Embedding(table)})
    indices = np.array([[0, 6, 2]])
    np.testing.assert_array_equal(run(tmp_path / "a.onnx", words=indices)["words.y"], table[indices])


# ---- graphs that PyTorch exports -------------------------------------------------------------------------------------


def exported(torch: Any, module: Any, x: Any, path: Path, dynamo: bool) -> None:
    if dynamo:
        pytest.importorskip("onnxscript")
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(module.eval(), (x,), path, dynamo=dynamo)
    finally:
        logging.disable(level)


def sample_model(torch: Any) -> Any:
    layers = torch.nn

    class Model(layers.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.words = layers.Embedding(7, 4)
            self.both = layers.LSTM(4, 3, 2, bidirectional=True)
            self.one = layers.LSTM(6, 5, 3)
            self.last = layers.LSTM(5, 5, bias=False)
            self.norm = layers.LayerNorm(5)
            self.net = layers.Sequential(layers.Linear(5, 4), layers.ReLU(), layers.Linear(4, 4, bias=False))
            self.conv = layers.Conv1d(4, 6, 2, groups=2)
            self.up = layers.ConvTranspose1d(6, 4, 2)
            self.group = layers.GroupNorm(2, 4)
            self.instance = layers.InstanceNorm1d(4, affine=True)
            self.batch = layers.BatchNorm1d(4)

        def forward(self, x: Any) -> Any:
            y = self.one(self.both(self.words(x))[0])[0]
            y = self.net(self.norm(self.last(y)[0])).permute(1, 2, 0)
            return self.batch(self.instance(self.group(self.up(self.conv(y)))))

    model = Model()
    for index, tensor in enumerate(model.state_dict().values()):
        if tensor.dtype.is_floating_point:
            tensor.copy_(torch.from_numpy(np.random.default_rng(index).uniform(0.2, 1.0, tensor.shape)))
    return model


@pytest.mark.parametrize("dynamo", [False, True])
def test_an_exported_model(tmp_path: Path, torch: Any, dynamo: bool) -> None:
    """Names, options and weights are those of the modules."""
    model = sample_model(torch)
    exported(torch, model, torch.randint(0, 7, (6, 2)), tmp_path / "a.onnx", dynamo)
    layers = read(tmp_path / "a.onnx")
    torch.save(model.state_dict(), tmp_path / "a.pt")
    kinds = {"words": "embedding", "net.2": "linear", "group": "group_norm:2", "instance": "instance_norm"}
    same = read(tmp_path / "a.pt", kinds=kinds | {"norm": "layer_norm", "conv": "conv:2"})
    assert layers.keys() == same.keys()
    for name, layer in layers.items():
        assert type(layer) is type(same[name])
    convert(tmp_path / "a.onnx", tmp_path / "b.pt")
    state = torch.load(tmp_path / "b.pt")
    for name, tensor in model.state_dict().items():
        if "num_batches" not in name:
            np.testing.assert_array_equal(state[name].numpy(), tensor.numpy(), name)
    norm, conv = layers["group"], layers["conv"]
    assert isinstance(norm, Norm)
    assert isinstance(conv, Conv)
    assert (norm.kind, norm.groups, conv.groups) == ("group_norm", 2, 2)


@pytest.mark.parametrize("dynamo", [False, True])
def test_weights_that_would_be_lost(tmp_path: Path, torch: Any, dynamo: bool) -> None:
    class Scale(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(3, 4)
            self.scale = torch.nn.Parameter(torch.rand(4))

        def forward(self, x: Any) -> Any:
            return self.fc(x).relu() * self.scale

    exported(torch, Scale(), torch.randn(2, 3), tmp_path / "a.onnx", dynamo)
    with pytest.raises(ConvertError, match=r"scale \(4,\) belongs to a Mul, which is not a layer .* --skip"):
        read(tmp_path / "a.onnx")


@pytest.mark.parametrize("dynamo", [False, True])
def test_exported_recurrent_modules(tmp_path: Path, torch: Any, dynamo: bool) -> None:
    layers = torch.nn

    class Model(layers.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.both = layers.GRU(4, 3, 2, bidirectional=True)
            self.one = layers.GRU(6, 5, bias=False)
            if not dynamo:  # which exports an RNN as products
                self.plain = layers.RNN(5, 3, 2)
                self.ramp = layers.RNN(3, 3, nonlinearity="relu", bidirectional=True)

        def forward(self, x: Any) -> Any:
            for layer in self.children():
                x = layer(x)[0]
            return x

    model = Model()
    exported(torch, model, torch.randn(6, 2, 4), tmp_path / "a.onnx", dynamo)
    found = read(tmp_path / "a.onnx")
    options = {name: getattr(layer, "kind", None) or layer.activation for name, layer in found.items()}  # type: ignore[union-attr]
    expected = {"both": "after", "one": "after", "plain": "tanh", "ramp": "relu"}
    assert options == {name: option for name, option in expected.items() if hasattr(model, name)}
    convert(tmp_path / "a.onnx", tmp_path / "b.pt")
    state = torch.load(tmp_path / "b.pt")
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(state[name].numpy(), tensor.numpy(), name)


# ---- graphs of one's own ---------------------------------------------------------------------------------------------


def graph(path: Path, kind: str, arrays: dict[str, Array], opset: int = 21, **attributes: Any) -> Path:
    """A model of one node: x, then constants; an empty name leaves an input out."""
    helper = onnx.helper
    inputs = ["x", *("" if name.startswith("_") else name for name in arrays)]
    node = helper.make_node(kind, inputs, ["y"], name="node", **attributes)
    tensors = [onnx.numpy_helper.from_array(a, name) for name, a in arrays.items() if not name.startswith("_")]
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
    made = helper.make_graph([node], "graph", [x], [y], tensors)
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return path


def parts(direction: int = 1) -> dict[str, Array]:
    return {"w": normal(direction, 16, 3), "r": normal(direction, 16, 4), "b": normal(direction, 32)}


def test_lstms_that_are_not_standard(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"direction": "reverse"}, "reads time backwards"),
        ({"clip": 3.0}, "clip or input_forget"),
        ({"input_forget": 1}, "clip or input_forget"),
        ({"activations": ["Relu", "Tanh", "Tanh"]}, "activations"),
    ]
    for attributes, words in cases:
        with pytest.raises(ConvertError, match=words):
            read(graph(path, "LSTM", parts(), hidden_size=4, **attributes))
    states = {**parts(), "_": np.zeros(0), "h": normal(1, 2, 4)}
    with pytest.raises(ConvertError, match=r"h \(1, 2, 4\) belongs to a LSTM"):
        read(graph(path, "LSTM", states, hidden_size=4))
    two = {"direction": "bidirectional", "activations": ["Sigmoid", "Tanh", "Tanh"] * 2}
    found = read(graph(path, "LSTM", parts(2), hidden_size=4, **two))["node"]
    assert isinstance(found, Lstm)
    assert found.directions == 2


def test_grus_and_rnns_that_are_not_standard(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    gates = {"w": normal(1, 12, 3), "r": normal(1, 12, 4)}
    plain = {"w": normal(1, 4, 3), "r": normal(1, 4, 4)}
    cases: list[tuple[str, dict[str, Array], dict[str, Any], str]] = [
        ("GRU", gates, {"direction": "reverse"}, "reads time backwards"),
        ("GRU", gates, {"clip": 3.0}, "clip or input_forget"),
        ("GRU", gates, {"activations": ["Tanh", "Tanh"]}, r"activations .*; only \('Sigmoid', 'Tanh'\) are converted"),
        ("GRU", plain, {}, r"\(1, 4, 4\), expected \[directions, 3H, H\]"),
        ("RNN", plain, {"activations": ["Elu"]}, r"\('Tanh',\) or \('Relu',\) or \('Sigmoid',\) are converted"),
        ("RNN", gates, {}, r"\(1, 12, 4\), expected \[directions, H, H\]"),
    ]
    for kind, arrays, attributes, words in cases:
        with pytest.raises(ConvertError, match=words):
            read(graph(path, kind, arrays, hidden_size=4, **attributes))
    states = {**gates, "_": np.zeros(0), "_s": np.zeros(0), "h": normal(1, 2, 4)}
    with pytest.raises(ConvertError, match=r"h \(1, 2, 4\) belongs to a GRU"):
        read(graph(path, "GRU", states, hidden_size=4))
    for reset, kind in ((0, "before"), (1, "after")):
        found = read(graph(path, "GRU", gates, hidden_size=4, linear_before_reset=reset))["node"]
        assert isinstance(found, Gru)
        assert found.kind == kind
        r, z, n = np.split(found.cells[0][0].wx, 3)
        np.testing.assert_array_equal(np.concatenate([z, r, n]), gates["w"][0])
    with pytest.raises(ConvertError, match="the activation identity, which ONNX's RNN does not have"):
        write(tmp_path / "b.onnx", {"rnn": rnn(activation="identity")})


def test_gemm_as_a_linear_layer(tmp_path: Path) -> None:
    w, b, path = normal(3, 4), normal(4), tmp_path / "a.onnx"
    for transposed in (0, 1):
        found = read(graph(path, "Gemm", {"w": w.T if transposed else w, "b": b}, transB=transposed))["node"]
        assert isinstance(found, Linear)
        np.testing.assert_array_equal(found.w, w.T)
        np.testing.assert_array_equal(found.b, b)
    with pytest.raises(ConvertError, match="a Gemm with alpha, beta or transA"):
        read(graph(path, "Gemm", {"w": w, "b": b}, alpha=0.5))


def test_group_norm_of_an_older_opset(tmp_path: Path) -> None:
    arrays = {"gamma": normal(2), "beta": normal(2)}
    with pytest.raises(ConvertError, match="gamma for each group, as GroupNormalization of opset 18"):
        read(graph(tmp_path / "a.onnx", "GroupNormalization", arrays, opset=18, num_groups=2))
    found = read(graph(tmp_path / "a.onnx", "GroupNormalization", arrays, num_groups=1))["node"]
    assert isinstance(found, Norm)
    assert found.groups == 1


def test_peepholes_that_onnx_does_not_have(tmp_path: Path) -> None:
    for peephole, words in (("ifgo", "a peephole of gate g, which ONNX's LSTM"), ("full", "full matrices")):
        with pytest.raises(ConvertError, match=words):
            write(tmp_path / "a.onnx", {"lstm": lstm(peephole=peephole)})
    layers: Layers = {"norm": Norm("batch_norm", normal(3), None, normal(3), normal(3))}
    with pytest.raises(ConvertError, match="no gamma or no beta, which ONNX's BatchNormalization requires"):
        write(tmp_path / "a.onnx", layers)
    assert list(tmp_path.iterdir()) == []
