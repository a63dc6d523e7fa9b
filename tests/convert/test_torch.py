"""Weights of PyTorch: each converted layer reproduces the outputs of PyTorch's module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import nn
from retrograd.convert import ConvertError, Layers, convert, read, write
from support.arrays import Array
from support.convert import gru, lstm, rnn

RTOL = 2e-6


def save(module: Any, path: Path) -> Path:
    import torch

    torch.save(module.state_dict(), path)
    return path


def loaded(layer: nn.Module, source: Path, **options: Any) -> nn.Module:
    target = source.with_suffix(".safetensors")
    convert(source, target, **options)
    nn.load(target, layer)
    return layer.eval()


def assert_close(a: Array, b: Array) -> None:
    np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL * float(np.abs(b).max()))


@pytest.mark.parametrize(
    ("layers", "bidirectional", "bias"), [(1, False, True), (1, True, False), (3, False, False), (2, True, True)]
)
@pytest.mark.parametrize("double", [False, True])
def test_lstm(tmp_path: Path, torch: Any, layers: int, bidirectional: bool, bias: bool, double: bool) -> None:
    options = {"bidirectional": bidirectional, "bias": bias}
    module = torch.nn.LSTM(3, 5, layers, **options)
    module = module.double() if double else module
    dtype = np.float64 if double else np.float32
    layer = nn.LSTM(3, 5, layers=layers, dtype=dtype, **options)
    loaded(layer, save(module, tmp_path / "a.pt"))
    x = torch.randn(7, 2, 3, dtype=torch.float64 if double else torch.float32)
    y, (h, c) = module(x)
    ours, state = layer.run(x.numpy())
    assert_close(ours, y.detach().numpy())
    assert_close(state.h, h.detach().numpy())
    assert_close(state.c, c.detach().numpy())


RECURRENT = {
    "GRU(3, 5)": "GRU(3, 5)",
    "GRU(3, 5, 2, bidirectional=True)": "GRU(3, 5, layers=2, bidirectional=True)",
    "GRU(3, 5, 3, bias=False)": "GRU(3, 5, layers=3, bias=False)",
    "RNN(3, 5)": "RNN(3, 5)",
    "RNN(3, 5, 2, bidirectional=True, bias=False)": "RNN(3, 5, layers=2, bidirectional=True, bias=False)",
    "RNN(3, 5, 2, nonlinearity='relu')": "RNN(3, 5, layers=2, activation='relu')",
    "LSTM(3, 5, 2, proj_size=2)": "LSTM(3, 5, layers=2, projection=2)",
    "LSTM(3, 5, proj_size=2, bidirectional=True)": "LSTM(3, 5, projection=2, bidirectional=True)",
}


@pytest.mark.parametrize("theirs", RECURRENT)
def test_recurrent_layers(tmp_path: Path, torch: Any, theirs: str) -> None:
    """Into a layer, and back into the module."""
    module = eval(f"torch.nn.{theirs}", {"torch": torch}).double()
    layer = eval(f"nn.{RECURRENT[theirs][:-1]}, dtype=np.float64)", {"nn": nn, "np": np})
    source = save(torch.nn.ModuleDict({"net": module}), tmp_path / "a.pt")
    whole = loaded(nn.Sequential(net=layer), source)
    x = torch.randn(7, 2, 3, dtype=torch.float64)
    y = module(x)[0].detach().numpy()
    np.testing.assert_allclose(whole.forward(x.numpy()), y, rtol=1e-11, atol=1e-11)
    known = {"net": "gru_after"} if theirs.startswith("GRU") and "bias=False" in theirs else {}
    convert(tmp_path / "a.safetensors", tmp_path / "b.pt", kinds=known)
    state = torch.load(tmp_path / "b.pt")
    assert list(state) == list(torch.load(source))
    module.load_state_dict({name.removeprefix("net."): tensor for name, tensor in state.items()})
    np.testing.assert_allclose(module(x)[0].detach().numpy(), y, rtol=1e-11, atol=1e-11)


CASES: list[tuple[str, str, str, tuple[int, ...]]] = [
    ("BatchNorm2d(3)", "BatchNorm(3)", "", (4, 3, 5, 2)),
    ("LayerNorm((4, 3))", "LayerNorm((4, 3))", "", (5, 4, 3)),
    ("LayerNorm(6)", "LayerNorm(6)", "", (5, 6)),
    ("GroupNorm(2, 6)", "GroupNorm(2, 6)", "", (3, 6, 5)),
    ("InstanceNorm1d(3, affine=True)", "InstanceNorm(3, affine=True)", "", (2, 3, 5)),
    ("Linear(4, 3)", "Linear(4, 3)", "", (2, 4)),
    ("Linear(4, 3, bias=False)", "Linear(4, 3, bias=False)", "linear", (2, 4)),
    ("Conv1d(4, 3, 2)", "Conv(4, 3, (2,))", "", (2, 4, 6)),
    ("Conv2d(4, 4, (3, 2), groups=2)", "Conv(4, 4, (3, 2), groups=2)", "", (2, 4, 6, 5)),
    ("ConvTranspose1d(4, 3, 2)", "ConvTranspose(4, 3, (2,))", "", (2, 4, 6)),
    ("ConvTranspose2d(3, 3, 2, bias=False)", "ConvTranspose(3, 3, 2, bias=False)", "", (2, 3, 4, 5)),
]


@pytest.mark.parametrize(("theirs", "ours", "kind", "shape"), CASES, ids=[case[0] for case in CASES])
def test_layers(tmp_path: Path, torch: Any, theirs: str, ours: str, kind: str, shape: tuple[int, ...]) -> None:
    module = eval(f"torch.nn.{theirs}", {"torch": torch})
    for tensor in module.state_dict().values():
        if tensor.dtype.is_floating_point:
            tensor.copy_(torch.rand(tensor.shape) + 0.5)
    layer = eval(f"nn.{ours}", {"nn": nn})
    source = save(torch.nn.Sequential(module), tmp_path / "a.pt")
    whole = nn.Sequential(layer)
    loaded(whole, source, kinds={"0": kind} if kind else {})
    x = torch.randn(shape)
    assert_close(whole.forward(x.numpy()), module.eval()(x).detach().numpy())


def test_embedding(tmp_path: Path, torch: Any) -> None:
    module = torch.nn.ModuleDict({"words": torch.nn.Embedding(5, 3)})
    source = save(module, tmp_path / "a.pt")
    layer = loaded(nn.Sequential(words=nn.Embedding(5, 3)), source, kinds={"words": "embedding"})
    indices = np.array([[0, 4], [3, 3]])
    np.testing.assert_array_equal(layer.forward(indices), module["words"](torch.tensor(indices)).detach().numpy())


def test_what_we_write_loads_into_modules(tmp_path: Path, torch: Any) -> None:
    model = nn.Sequential(
        words=nn.Embedding(7, 4),
        lstm=nn.LSTM(4, 3, layers=2, bidirectional=True),
        norm=nn.LayerNorm(6),
        head=nn.Linear(6, 5),
    )
    nn.save(tmp_path / "a.safetensors", model)
    convert(tmp_path / "a.safetensors", tmp_path / "a.pt")
    modules = torch.nn.ModuleDict(
        {
            "words": torch.nn.Embedding(7, 4),
            "lstm": torch.nn.LSTM(4, 3, 2, bidirectional=True),
            "norm": torch.nn.LayerNorm(6),
            "head": torch.nn.Linear(6, 5),
        }
    )
    modules.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True))
    indices = torch.randint(0, 7, (6, 2))
    y = modules["head"](modules["norm"](modules["lstm"](modules["words"](indices))[0]))
    assert_close(model.eval().forward(indices.numpy()), y.detach().numpy())


def test_a_state_inside_a_checkpoint(tmp_path: Path, torch: Any) -> None:
    module = torch.nn.Linear(3, 2)
    torch.save({"state_dict": module.state_dict(), "epoch": 3}, tmp_path / "a.pt")
    assert list(read(tmp_path / "a.pt")) == [""]


def test_a_dropout_and_its_state_are_left_out(tmp_path: Path, torch: Any) -> None:
    model = nn.Sequential(nn.LSTM(3, 2, layers=2, dropout=0.5), nn.Dropout(0.5), nn.Linear(2, 2))
    nn.save(tmp_path / "a.safetensors", model)
    assert list(read(tmp_path / "a.safetensors")) == ["0", "2"]


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(torch: Any, folder: Path, state: Any, words: str, **options: Any) -> None:
    torch.save(state, folder / "a.pt")
    with pytest.raises(ConvertError, match=words):
        read(folder / "a.pt", **options)


def test_what_a_state_does_not_say(tmp_path: Path, torch: Any) -> None:
    nothing = torch.zeros(0)
    one = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False)).state_dict()
    refused(torch, tmp_path, one, "0 has a weight of shape \\(2, 3\\) and no bias: .*say --kind 0=linear")
    refused(torch, tmp_path, torch.nn.PReLU(3).state_dict(), "a PReLU's slope; say --kind")
    refused(torch, tmp_path, {"a.bias": nothing.int()}, "int32")
    state = {"weight_ih_l0": torch.zeros(8, 3), "weight_hh_l0": torch.zeros(8, 4)}
    refused(torch, tmp_path, state, "\\(8, 4\\), expected \\[4H, H\\] for an LSTM, \\[3H, H\\] for a GRU or \\[H, H\\]")
    gru = torch.nn.Sequential(torch.nn.GRU(3, 4)).state_dict()
    refused(torch, tmp_path, gru, "--kind 0=gru_before: its arrays are .* gru_after", kinds={"0": "gru_before"})
    refused(torch, tmp_path, gru, "--kind 0=lstm: its arrays are .* gru_after", kinds={"0": "lstm"})
    rnn = torch.nn.Sequential(torch.nn.RNN(3, 4)).state_dict()
    refused(torch, tmp_path, rnn, "--kind 0=gru_after: its arrays are .* rnn", kinds={"0": "gru_after"})
    state = torch.nn.LSTM(3, 4, 2, proj_size=2).state_dict()
    del state["weight_hr_l1"]
    refused(torch, tmp_path, state, "some of its layers and directions have a projection, others have none")
    state = torch.nn.LSTM(3, 4, proj_size=2).state_dict() | {"weight_hr_l0": torch.zeros(3, 4)}
    refused(torch, tmp_path, state, "a projection has shape \\(3, 4\\), expected \\(2, hidden\\)")
    refused(torch, tmp_path, {"cls_token": torch.zeros(3)}, "--skip cls_token leaves it out")
    refused(torch, tmp_path, {}, "no layers in it that retrograd has")
    linear = torch.nn.Sequential(torch.nn.Linear(3, 2)).state_dict()
    refused(torch, tmp_path, linear, "--kind 0=conv: its arrays are those of another kind", kinds={"0": "conv"})
    refused(torch, tmp_path, linear, "--kind 1=conv: no layer has this name; there are 0", kinds={"1": "conv"})
    refused(torch, tmp_path, linear, "--skip fc: no layer has this name; there are 0", skip=["fc"])
    refused(torch, tmp_path, linear, "'plain'; there are linear", kinds={"0": "plain"})
    refused(torch, tmp_path, linear, "'linear:3'; a number of groups", kinds={"0": "linear:3"})
    state = torch.nn.LSTM(3, 4, 2).state_dict()
    del state["weight_hh_l1"]
    refused(torch, tmp_path, state, "has no weight_hh_l1")
    state = torch.nn.LSTM(3, 4, 2).state_dict()
    del state["weight_ih_l0"]
    refused(torch, tmp_path, state, "weight_hh_l0")
    refused(torch, tmp_path, {"a.weight": torch.zeros(3, 2), "a.bias": torch.zeros(4)}, "\\(4,\\).*\\(3,\\)")
    refused(torch, tmp_path, {"a.weight": torch.zeros(3), "a.bias": torch.zeros(4)}, "shapes of a norm's arrays differ")
    mixed = {"a.weight": torch.zeros(3, 2), "a.bias": torch.zeros(3).double()}
    refused(torch, tmp_path, mixed, "float32 and float64; those of one layer must have one dtype")
    refused(torch, tmp_path, [1, 2], "it is not a state_dict")


def test_skipped_layers_are_not_looked_at(tmp_path: Path, torch: Any) -> None:
    state = {"cls_token": torch.zeros(3), "attention.in_proj_weight": torch.zeros(3, 3)}
    state |= {"fc.weight": torch.zeros(3, 2), "fc.bias": torch.zeros(3)}
    torch.save(state, tmp_path / "a.pt")
    assert list(read(tmp_path / "a.pt", skip=["cls_token", "att*"])) == ["fc"]


@pytest.mark.parametrize("target", ["a.onnx", "a.weights.h5", "a.mlpackage"])
def test_convolutions_that_could_be_transposed(tmp_path: Path, torch: Any, target: str) -> None:
    for package in ("onnx", "h5py", "coremltools"):
        pytest.importorskip(package)
    for options in ({}, {"bias": False}):
        source = save(torch.nn.Sequential(torch.nn.Conv1d(3, 3, 2, **options)), tmp_path / "a.pt")
        with pytest.raises(ConvertError, match="say --kind 0=conv or --kind 0=conv_transpose"):
            convert(source, tmp_path / target)
        assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    convert(source, tmp_path / target, kinds={"*": "conv_transpose"})
    layer = read(tmp_path / target)
    assert next(iter(layer.values())).transposed is True  # type: ignore[union-attr]


def test_formats_refuse_what_they_cannot_hold(tmp_path: Path, torch: Any) -> None:
    for package in ("onnx", "h5py", "coremltools"):
        pytest.importorskip(package)
    norm = save(torch.nn.Sequential(torch.nn.GroupNorm(2, 4)), tmp_path / "a.pt")
    for target in ("a.onnx", "a.weights.h5", "a.mlpackage"):
        with pytest.raises(ConvertError, match="norm of an unknown kind; say --kind 0=layer_norm"):
            convert(norm, tmp_path / target)
    with pytest.raises(ConvertError, match="unknown number of groups; say --kind 0=group_norm:8"):
        convert(norm, tmp_path / "a.onnx", kinds={"0": "group_norm"})
    with pytest.raises(ConvertError, match="4 channels cannot be cut into 3 groups"):
        convert(norm, tmp_path / "a.onnx", kinds={"0": "group_norm:3"})
    with pytest.raises(ConvertError, match="a group norm, for which Core ML has no operation"):
        convert(norm, tmp_path / "a.mlpackage", kinds={"0": "group_norm:2"})
    batch = save(torch.nn.Sequential(torch.nn.BatchNorm1d(4, track_running_stats=False)), tmp_path / "a.pt")
    for target in ("a.onnx", "a.weights.h5", "a.mlpackage"):
        with pytest.raises(ConvertError, match="batch norms have running statistics"):
            convert(batch, tmp_path / target, kinds={"0": "batch_norm"})
    double = save(torch.nn.Sequential(torch.nn.Linear(3, 2).double()), tmp_path / "a.pt")
    with pytest.raises(ConvertError, match="float64, which Core ML does not have"):
        convert(double, tmp_path / "a.mlpackage")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_peepholes_have_no_place_in_pytorch(tmp_path: Path, torch: Any) -> None:
    nn.save(tmp_path / "a.safetensors", nn.LSTM(3, 2, peephole="diagonal"))
    with pytest.raises(ConvertError, match="the model has peepholes, which PyTorch's LSTM does not have"):
        convert(tmp_path / "a.safetensors", tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()


def test_a_gru_that_resets_before_the_product_has_no_place_in_pytorch(tmp_path: Path, torch: Any) -> None:
    write(tmp_path / "a.safetensors", {"net": gru(kind="before", bias=False)})
    with pytest.raises(ConvertError, match="say --kind net=gru_after or --kind net=gru_before"):
        convert(tmp_path / "a.safetensors", tmp_path / "a.pt")
    write(tmp_path / "a.safetensors", {"net": gru(kind="before")})
    with pytest.raises(
        ConvertError, match="net is a GRU that resets before the recurrent product; PyTorch's resets aft"
    ):
        convert(tmp_path / "a.safetensors", tmp_path / "a.pt")
    with pytest.raises(ConvertError, match=r"--kind net=gru_after: its arrays are .* gru_before"):
        convert(tmp_path / "a.safetensors", tmp_path / "a.pt", kinds={"net": "gru_after"})
    write(tmp_path / "a.safetensors", {"net": gru(kind="before", bias=False)})
    with pytest.raises(
        ConvertError, match="net is a GRU that resets before the recurrent product; PyTorch's resets aft"
    ):
        convert(tmp_path / "a.safetensors", tmp_path / "a.pt", kinds={"net": "gru_before"})
    assert not (tmp_path / "a.pt").exists()


def test_an_activation_that_pytorch_does_not_have(tmp_path: Path, torch: Any) -> None:
    with pytest.raises(ConvertError, match="net has the activation sigmoid; PyTorch's RNN has tanh or relu"):
        write(tmp_path / "a.pt", {"net": rnn(activation="sigmoid")})


def test_directions_of_a_gru_that_reset_in_different_places(tmp_path: Path) -> None:
    layer = gru(directions=2)
    layer.cells[0][1].bh = None
    with pytest.raises(ConvertError, match="some of its layers and directions have a bh, others have none"):
        write(tmp_path / "a.safetensors", {"net": layer})


@pytest.mark.parametrize("target", ["a.npz", "a.onnx", "a.mlpackage"])
def test_projections_have_a_place_in_pytorch_only(tmp_path: Path, target: str) -> None:
    for package in ("onnx", "coremltools"):
        pytest.importorskip(package)
    with pytest.raises(ConvertError, match=r"net has a projection, which .* does not have"):
        write(tmp_path / target, {"net": lstm(3, 4, projection=2)})


@pytest.mark.parametrize("layer", [gru(), rnn()], ids=["gru", "rnn"])
def test_bnns_has_no_structure_for_them(tmp_path: Path, layer: Any) -> None:
    with pytest.raises(ConvertError, match="for which BNNS has no structure; --skip net leaves it out"):
        write(tmp_path / "a.npz", {"net": layer})


def test_a_norm_inside_the_recurrence_has_no_place_elsewhere(tmp_path: Path) -> None:
    nn.save(tmp_path / "a.safetensors", nn.Sequential(net=nn.RNN(3, 4, norm="haste")))
    with pytest.raises(ConvertError, match="net has layer normalization inside the recurrence"):
        read(tmp_path / "a.safetensors")


def test_a_pickle_runs_no_code(tmp_path: Path, torch: Any) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "touched",)

    torch.save({"fc.weight": torch.zeros(2, 2), "code": Evil()}, tmp_path / "a.pt")
    with pytest.raises(ConvertError, match="cannot be read as PyTorch"):
        read(tmp_path / "a.pt")
    assert not (tmp_path / "touched").exists()
    torch.load(tmp_path / "a.pt", weights_only=False)  # it would have
    assert (tmp_path / "touched").exists()


def test_writing_layers_of_ones_own(tmp_path: Path, torch: Any) -> None:
    layers: Layers = read(save(torch.nn.Linear(3, 2), tmp_path / "a.pt"))
    write(tmp_path / "b.pt", layers)
    module = torch.nn.Linear(3, 2)
    module.load_state_dict(torch.load(tmp_path / "b.pt"))
    np.testing.assert_array_equal(module.weight.detach().numpy(), layers[""].w)  # type: ignore[union-attr]
