"""Weights of Keras: each converted layer reproduces the outputs of Keras's layer, and Keras loads what we write."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import nn
from retrograd.convert import Conv, ConvertError, Gru, Linear, Norm, convert, read
from support import keras_models
from support.arrays import Array
from support.waiting import PATIENCE

h5py = pytest.importorskip("h5py")
if importlib.util.find_spec("keras") is None:  # only imported in other processes
    pytest.skip("keras is not installed", allow_module_level=True)
pytest.importorskip("torch")  # Keras computes with it


def run_keras(*arguments: str | Path) -> None:
    command = [sys.executable, keras_models.__file__, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keras")
    run_keras("save", folder)
    return folder


def channels_first(x: Array) -> Array:
    return np.ascontiguousarray(np.moveaxis(x, -1, 1))


def channels_last(y: Array) -> Array:
    return np.moveaxis(y, 1, -1)


# By the name in keras_models: the layers in retrograd.nn, and whether they have channels first.
OURS: dict[str, tuple[Any, bool]] = {
    "lstm": (lambda: nn.Sequential(lstm=nn.LSTM(3, 4, batch_first=True)), False),
    "no_bias": (lambda: nn.Sequential(lstm=nn.LSTM(3, 4, batch_first=True, bias=False)), False),
    "both": (lambda: nn.Sequential(bidirectional=nn.LSTM(3, 4, batch_first=True, bidirectional=True)), False),
    "stack": (
        lambda: nn.Sequential(lstm=nn.LSTM(3, 4, batch_first=True), lstm_1=nn.LSTM(4, 4, batch_first=True)),
        False,
    ),
    "gru": (lambda: nn.Sequential(gru=nn.GRU(3, 4, batch_first=True)), False),
    "gru_before": (lambda: nn.Sequential(gru=nn.GRU(3, 4, batch_first=True, kind="before")), False),
    "gru_no_bias": (lambda: nn.Sequential(gru=nn.GRU(3, 4, batch_first=True, bias=False)), False),
    "gru_both": (lambda: nn.Sequential(bidirectional=nn.GRU(3, 4, batch_first=True, bidirectional=True)), False),
    "gru_stack": (
        lambda: nn.Sequential(gru=nn.GRU(3, 4, batch_first=True), gru_1=nn.GRU(4, 4, batch_first=True)),
        False,
    ),
    "rnn": (lambda: nn.Sequential(simple_rnn=nn.RNN(3, 4, batch_first=True)), False),
    "rnn_relu": (lambda: nn.Sequential(simple_rnn=nn.RNN(3, 4, batch_first=True, activation="relu")), False),
    "rnn_both": (
        lambda: nn.Sequential(bidirectional=nn.RNN(3, 4, batch_first=True, bidirectional=True, bias=False)),
        False,
    ),
    "dense": (lambda: nn.Sequential(dense=nn.Linear(5, 3), dense_1=nn.Linear(3, 4, bias=False)), False),
    "embedding": (lambda: nn.Sequential(embedding=nn.Embedding(7, 3)), False),
    "batch_norm": (lambda: nn.Sequential(batch_normalization=nn.BatchNorm(3, eps=1e-3)), True),
    "layer_norm": (lambda: nn.Sequential(layer_normalization=nn.LayerNorm(3, eps=1e-3)), False),
    "group_norm": (lambda: nn.Sequential(group_normalization=nn.GroupNorm(2, 6, eps=1e-3)), True),
    "instance_norm": (lambda: nn.Sequential(group_normalization=nn.InstanceNorm(3, eps=1e-3, affine=True)), True),
    "conv1d": (lambda: nn.Sequential(conv1d=nn.Conv(3, 4, (2,), stride=2)), True),
    "conv2d": (lambda: nn.Sequential(conv2d=nn.Conv(4, 6, (3, 2), groups=2)), True),
    "up1d": (lambda: nn.Sequential(conv1d_transpose=nn.ConvTranspose(3, 4, (3,), stride=2)), True),
    "up2d": (lambda: nn.Sequential(conv2d_transpose=nn.ConvTranspose(3, 2, (3, 2))), True),
    "nested": (
        lambda: nn.Sequential(
            dense=nn.Linear(5, 3),
            sequential=nn.Sequential(dense=nn.Linear(3, 4), dense_1=nn.Linear(4, 2)),
            dense_1=nn.Linear(2, 3),
        ),
        False,
    ),
    "many": (lambda: nn.Sequential(**{f"dense_{k}" if k else "dense": nn.Linear(3, 3) for k in range(12)}), False),
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("suffix", [".weights.h5", ".keras"])
def test_converted_layers_compute_the_same(saved: Path, tmp_path: Path, name: str, suffix: str) -> None:
    make, first = OURS[name]
    model = make()
    convert(saved / f"{name}{suffix}", tmp_path / "a.safetensors")
    nn.load(tmp_path / "a.safetensors", model)
    with np.load(saved / f"{name}.save.npz") as file:
        x, y = file["x"], file["y"]
    result = model.eval().forward(channels_first(x) if first else x)
    np.testing.assert_allclose(channels_last(result) if first else result, y, rtol=2e-5, atol=2e-6)


def test_the_reset_gate_of_a_gru_without_biases_must_be_known(saved: Path, tmp_path: Path) -> None:
    source = saved / "gru_no_bias.weights.h5"
    layer = read(source)["gru"]
    assert isinstance(layer, Gru)
    assert layer.kind is None
    with pytest.raises(ConvertError, match="say --kind gru=gru_after or --kind gru=gru_before"):
        convert(source, tmp_path / "a.onnx")
    convert(source, tmp_path / "a.onnx", kinds={"gru": "gru_before"})
    again = read(tmp_path / "a.onnx")["gru"]
    assert isinstance(again, Gru)
    assert again.kind == "before"
    with pytest.raises(
        ConvertError, match=r"--kind gru=gru_before: its arrays are .* another kind of layer, gru_after"
    ):
        read(saved / "gru.weights.h5", kinds={"gru": "gru_before"})


@pytest.fixture(scope="module")
def loaded(saved: Path, torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of Keras with weights that went through retrograd.nn, and with those of a stack of PyTorch."""
    folder = tmp_path_factory.mktemp("loaded")
    for name in OURS:
        convert(saved / f"{name}.weights.h5", folder / f"{name}.safetensors")
        kinds = {"conv1d": {"*": "conv"}, "batch_norm": {}, "conv2d": {"*": "conv"}}
        norms = {"layer_norm": "layer_norm", "group_norm": "group_norm", "instance_norm": "instance_norm"}
        kinds |= {name: {"*": kind} for name, kind in norms.items()}
        kinds |= {name: {"*": "conv_transpose"} for name in ("up1d", "up2d")}
        convert(folder / f"{name}.safetensors", folder / f"{name}.weights.h5", kinds=kinds.get(name, {}))
    torch.save(torch.nn.LSTM(3, 4, 2).state_dict(), folder / "torch.pt")
    written = convert(folder / "torch.pt", folder / "pytorch_stack.weights.h5")
    assert written.names == {"": "lstm, lstm_1"}
    run_keras("load", folder, *OURS, "pytorch_stack")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", OURS)
def test_keras_loads_what_we_write(saved: Path, loaded: Path, name: str) -> None:
    with np.load(saved / f"{name}.save.npz") as before, np.load(loaded / f"{name}.load.npz") as after:
        np.testing.assert_array_equal(after["y"], before["y"])


@pytest.mark.long
def test_a_stack_of_pytorch_becomes_several_layers(loaded: Path, torch: Any) -> None:
    module = torch.nn.LSTM(3, 4, 2, batch_first=True)
    module.load_state_dict(torch.load(loaded / "torch.pt"))
    with np.load(loaded / "pytorch_stack.load.npz") as file:
        y, _ = module(torch.from_numpy(file["x"]))
        np.testing.assert_allclose(file["y"], y.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_model_of_attributes(saved: Path) -> None:
    source = saved / "subclassed.weights.h5"
    with pytest.raises(ConvertError, match=r"first: retrograd has no layer for .* Keras's first; .*--kind"):
        read(source)
    layers = read(source, kinds={"first": "linear"})
    assert {name: type(layer) for name, layer in layers.items()} == {
        "first": Linear,
        "batch_normalization": Norm,
        "dense_1": Linear,
    }
    assert list(read(source, skip=["first"])) == ["batch_normalization", "dense_1"]


def test_what_a_keras_file_says_and_weights_do_not(saved: Path) -> None:
    norm = read(saved / "group_norm.keras")["group_normalization"]
    assert isinstance(norm, Norm)
    assert (norm.kind, norm.groups, norm.eps) == ("group_norm", 2, 1e-3)
    norm = read(saved / "instance_norm.keras")["group_normalization"]
    assert isinstance(norm, Norm)
    assert (norm.kind, norm.groups) == ("group_norm", 3)  # Keras writes the number for -1
    conv = read(saved / "conv2d.keras")["conv2d"]
    assert isinstance(conv, Conv)
    assert conv.groups == 2
    norm = read(saved / "no_beta.keras")["layer_normalization"]
    assert isinstance(norm, Norm)
    assert norm.beta is None
    assert norm.gamma is not None
    with pytest.raises(ConvertError, match=r"does not say which; use \.keras"):
        read(saved / "no_beta.weights.h5")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("elu_rnn.keras", "simple_rnn has activation 'elu'; those of a SimpleRNN here are tanh, relu, sigmoid, linear"),
        ("relu_gru.keras", "gru has activation 'relu'; weights alone are those of 'tanh'"),
        ("backwards_gru.keras", "reads time backwards"),
        ("depthwise.weights.h5", "no layer for weights of Keras's depthwise_conv2d"),
        ("relu_lstm.keras", "lstm has activation 'relu'"),
        ("backwards.keras", "reads time backwards"),
    ],
)
def test_refusals(saved: Path, name: str, words: str) -> None:
    with pytest.raises(ConvertError, match=words):
        read(saved / name)


def test_the_order_of_layers_must_be_known(tmp_path: Path, torch: Any) -> None:
    """Keras finds weights by order; a .safetensors file sorts its arrays by name."""
    model = nn.Sequential(encoder=nn.Linear(2, 3), decoder=nn.Linear(3, 2))
    nn.save(tmp_path / "a.safetensors", model)
    with pytest.raises(ConvertError, match="say --rename decoder=dense --rename encoder=dense_1, in the order"):
        convert(tmp_path / "a.safetensors", tmp_path / "a.weights.h5")
    assert not (tmp_path / "a.weights.h5").exists()
    rename = {"encoder": "dense", "decoder": "dense_1"}
    convert(tmp_path / "a.safetensors", tmp_path / "a.weights.h5", rename=rename)
    with h5py.File(tmp_path / "a.weights.h5") as file:
        assert file["layers/dense/vars/0"].shape == (2, 3)
        assert file["layers/dense_1/vars/0"].shape == (3, 2)
    # A state_dict keeps the order.
    modules = torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 3), "decoder": torch.nn.Linear(3, 2)})
    torch.save(modules.state_dict(), tmp_path / "a.pt")
    written = convert(tmp_path / "a.pt", tmp_path / "b.weights.h5")
    assert written.names == {"encoder": "dense", "decoder": "dense_1"}


def test_what_keras_cannot_hold(saved: Path, tmp_path: Path, torch: Any) -> None:
    torch.save(torch.nn.ConvTranspose1d(4, 6, 2, groups=2).state_dict(), tmp_path / "a.pt")
    with pytest.raises(ConvertError, match="2 groups, which Keras's transposed convolution does not have"):
        convert(tmp_path / "a.pt", tmp_path / "a.weights.h5")
    nn.save(tmp_path / "a.safetensors", nn.LSTM(3, 2, peephole="diagonal"))
    with pytest.raises(ConvertError, match="peepholes, which Keras's LSTM does not have"):
        convert(tmp_path / "a.safetensors", tmp_path / "a.weights.h5")
    torch.save(torch.nn.LSTM(3, 4, proj_size=2).state_dict(), tmp_path / "a.pt")
    with pytest.raises(ConvertError, match="a projection, which Keras's LSTM does not have"):
        convert(tmp_path / "a.pt", tmp_path / "a.weights.h5")
    with pytest.raises(ConvertError, match=r"write \.weights\.h5, for model"):
        convert(saved / "dense.keras", tmp_path / "a.keras")
    shutil.copy(saved / "dense.keras", tmp_path / "cut.keras")
    (tmp_path / "cut.keras").write_bytes((saved / "dense.keras").read_bytes()[:1000])
    with pytest.raises(ConvertError, match="cannot be read as Keras 3"):
        read(tmp_path / "cut.keras")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["data"] = np.zeros(3)
    with pytest.raises(ConvertError, match="not one of weights that Keras 3 saved"):
        read(tmp_path / "other.h5")
