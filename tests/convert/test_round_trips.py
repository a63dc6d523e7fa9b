"""Weights through every pair of formats and back, bit by bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.convert import Conv, Layers, Lstm, Norm, convert, read, write
from support.convert import assert_same_bits, every_kind, gru, kinds_of, lstm, normal, rnn

# File names and the packages that they need.
FILES = {
    "nn": ("a.safetensors", None),
    "torch": ("a.pt", "torch"),
    "keras": ("a.weights.h5", "h5py"),
    "onnx": ("a.onnx", "onnx"),
    "bnns": ("a.npz", None),
    "coreml": ("a.mlpackage", "coremltools"),
}


def pairs(*formats: str) -> list[tuple[str, str]]:
    """Each pair once, since weights go there and back; every format is the first to be written in one of them."""
    return [*itertools.combinations(formats, 2), (formats[-1], formats[0])]


PAIRS = pairs(*FILES)  # Core ML is last: it takes longest to write
STATES = ("nn", "torch", "bnns")  # they do not say of what kind all layers are


def file(folder: Path, format: str) -> Path:
    name, package = FILES[format]
    if package is not None:
        pytest.importorskip(package)
    return folder / name


def kinds_for(format: str, layers: Layers) -> dict[str, str]:
    needed = kinds_of(layers)
    if format == "keras":  # which has one kind for two norms, and no options of recurrent layers in .weights.h5
        unsaid = ("group_norm", "instance_norm", "gru", "rnn")
        return {name: kind for name, kind in needed.items() if kind.startswith(unsaid)}
    if format not in STATES:
        return {}
    left_out = ("gru_after",) if format == "torch" else ("linear", "embedding")
    return {name: kind for name, kind in needed.items() if kind not in left_out}


def there_and_back(folder: Path, layers: Layers, first: str, second: str) -> None:
    """Write `layers` in one format, convert the file to another and back, and compare all three."""
    (folder / "back").mkdir()
    start, middle, end = file(folder, first), file(folder, second), file(folder / "back", first)
    write(start, layers, first)
    convert(start, middle, source_format=first, target_format=second, kinds=kinds_for(first, layers))
    assert_same_bits(layers, read(middle, second, kinds=kinds_for(second, layers)))
    convert(middle, end, source_format=second, target_format=first, kinds=kinds_for(second, layers))
    assert_same_bits(layers, read(end, first, kinds=kinds_for(first, layers)))


def held_by(*formats: str) -> Layers:
    layers = every_kind()
    if "coreml" in formats:
        del layers["group"]
    if "keras" in formats:  # names that Keras gives
        kinds = ("lstm", "bidirectional", "batch_normalization", "layer_normalization", "group_normalization")
        others = ("group_normalization_1", "dense", "dense_1", "conv1d", "conv2d", "conv1d_transpose")
        names = dict(zip(every_kind(), (*kinds, *others, "conv2d_transpose", "embedding"), strict=True))
        layers = {names[name]: layer for name, layer in layers.items()}
    return layers


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_every_kind_of_layer(tmp_path: Path, first: str, second: str) -> None:
    there_and_back(tmp_path, held_by(first, second), first, second)


# Keras has no stacks of LSTMs, and no peepholes.
STACKED = [format for format in FILES if format != "keras"]


@pytest.mark.parametrize(("first", "second"), pairs(*STACKED))
@pytest.mark.parametrize("bias", [0, 1])
def test_lstms_of_several_layers(tmp_path: Path, first: str, second: str, bias: int) -> None:
    layers: Layers = {"net.one": lstm(3, 4, 3, halves=bias), "two": lstm(4, 2, 2, 2, halves=bias)}
    there_and_back(tmp_path, layers, first, second)


@pytest.mark.parametrize(("first", "second"), pairs(*(format for format in STACKED if format != "torch")))
def test_peepholes(tmp_path: Path, first: str, second: str) -> None:
    layers: Layers = {"lstm": lstm(3, 4, 2, 2, peephole="ifo"), "one": lstm(2, 3, peephole="ifo")}
    there_and_back(tmp_path, layers, first, second)


@pytest.mark.parametrize("peephole", ["ifgo", "full"])
def test_peepholes_that_only_two_formats_have(tmp_path: Path, peephole: str) -> None:
    layers: Layers = {"lstm": lstm(3, 4, 2, 2, peephole=peephole)}
    there_and_back(tmp_path, layers, "nn", "bnns")


@pytest.mark.parametrize(("first", "second"), pairs("nn", "torch", "keras", "onnx", "coreml"))
def test_grus_that_reset_after_the_product(tmp_path: Path, first: str, second: str) -> None:
    layers: Layers = {"gru": gru(), "gru_1": gru(4, 2)}
    if "coreml" not in (first, second):
        layers["bidirectional"] = gru(3, 2, directions=2)
    there_and_back(tmp_path, layers, first, second)


@pytest.mark.parametrize(("first", "second"), pairs("nn", "keras", "onnx", "coreml"))
@pytest.mark.parametrize("bias", [False, True])
def test_grus_that_reset_before_the_product(tmp_path: Path, first: str, second: str, bias: bool) -> None:
    layers: Layers = {"gru": gru(kind="before", bias=bias)}
    there_and_back(tmp_path, layers, first, second)


@pytest.mark.parametrize(("first", "second"), pairs("nn", "torch", "onnx"))
def test_grus_and_rnns_of_several_layers(tmp_path: Path, first: str, second: str) -> None:
    layers: Layers = {"net.one": gru(3, 4, 3), "two": gru(4, 2, 2, 2), "three": rnn(2, 3, 2, 2)}
    there_and_back(tmp_path, layers, first, second)


def test_stacks_in_core_ml(tmp_path: Path) -> None:
    """Also those whose layers have other options, which stay apart."""
    layers: Layers = {"net.one": gru(3, 4, 3), "two": rnn(4, 2, 2, activation="relu")}
    there_and_back(tmp_path, layers, "nn", "coreml")
    (tmp_path / "more").mkdir()
    mixed: Layers = {"a.layer0": rnn(activation="relu"), "a.layer1": rnn(4, 4, activation="tanh")}
    there_and_back(tmp_path / "more", mixed, "onnx", "coreml")


@pytest.mark.parametrize("directions", [1, 2])
def test_projections(tmp_path: Path, torch: Any, directions: int) -> None:
    layers: Layers = {"lstm": lstm(3, 5, 2, directions, projection=2)}
    there_and_back(tmp_path, layers, "nn", "torch")


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize(("first", "second"), pairs("torch", "keras", "onnx", "bnns"))
def test_other_dtypes(tmp_path: Path, first: str, second: str, dtype: Any) -> None:
    layers: Layers = {"lstm": lstm(3, 2, dtype=dtype), "conv1d": Conv(normal(4, 2, 3, dtype=dtype), None, False, 1)}
    there_and_back(tmp_path, layers, first, second)


def test_float64_in_nn(tmp_path: Path) -> None:
    there_and_back(tmp_path, {"lstm": lstm(3, 2, dtype=np.float64)}, "nn", "bnns")


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin", "a.onnx"])
def test_both_biases_where_a_format_has_two(tmp_path: Path, torch: Any, name: str) -> None:
    pytest.importorskip("onnx")
    layers: Layers = {"lstm": lstm(3, 2, 2, 2, halves=2)}
    write(tmp_path / "a.pt", layers)
    convert(tmp_path / "a.pt", tmp_path / name, target_format=None if name == "a.onnx" else "torch")
    found = read(tmp_path / name)["lstm"]
    assert isinstance(found, Lstm)
    for cells, others in zip(layers["lstm"].cells, found.cells, strict=True):  # type: ignore[union-attr]
        for cell, other in zip(cells, others, strict=True):
            np.testing.assert_array_equal(cell.b, other.b)
            np.testing.assert_array_equal(cell.bh, other.bh)


def test_biases_are_added_where_a_format_has_one(tmp_path: Path) -> None:
    layers: Layers = {"lstm": lstm(3, 2, halves=2)}
    write(tmp_path / "a.npz", layers)
    found = read(tmp_path / "a.npz")["lstm"]
    assert isinstance(found, Lstm)
    (cell,), (first,) = found.cells[0], layers["lstm"].cells[0]  # type: ignore[union-attr]
    assert cell.b is not None
    assert cell.bh is None
    np.testing.assert_array_equal(cell.b, first.b + first.bh)  # type: ignore[operator]


def test_a_bias_beside_zeros_keeps_its_bits(tmp_path: Path, torch: Any) -> None:
    """-0 + 0 would be +0."""
    cell = lstm(3, 2).cells[0][0]
    assert cell.b is not None
    cell.b[:3] = -0.0
    write(tmp_path / "a.npz", {"lstm": Lstm([[cell]])})
    convert(tmp_path / "a.npz", tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.npz")
    assert_same_bits({"lstm": Lstm([[cell]])}, read(tmp_path / "b.npz"))


def test_bfloat16_becomes_float32(tmp_path: Path, torch: Any) -> None:
    from safetensors.torch import save_file

    state = {"fc.weight": torch.randn(3, 2).bfloat16(), "fc.bias": torch.randn(3).bfloat16()}
    torch.save(state, tmp_path / "a.pt")
    save_file(state, tmp_path / "a.safetensors")
    for name in ("a.pt", "a.safetensors"):
        layer = read(tmp_path / name)["fc"]
        np.testing.assert_array_equal(layer.w, state["fc.weight"].float().numpy())  # type: ignore[union-attr]
        assert layer.w.dtype == np.float32  # type: ignore[union-attr]


def test_batches_of_a_running_mean(tmp_path: Path, torch: Any) -> None:
    """PyTorch counts them; other formats do not, and the count starts again at 0."""
    norm = torch.nn.BatchNorm1d(3)
    for _ in range(5):
        norm(torch.randn(4, 3))
    torch.save({f"norm.{name}": value for name, value in norm.state_dict().items()}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pth")
    assert int(torch.load(tmp_path / "b.pth")["norm.num_batches_tracked"]) == 5
    convert(tmp_path / "a.pt", tmp_path / "a.npz")
    convert(tmp_path / "a.npz", tmp_path / "c.pt")
    assert int(torch.load(tmp_path / "c.pt")["norm.num_batches_tracked"]) == 0
    found = read(tmp_path / "c.pt")["norm"]
    assert isinstance(found, Norm)
    np.testing.assert_array_equal(found.mean, norm.running_mean.numpy())


def test_layers_of_any_name(tmp_path: Path) -> None:
    """Even those of LSTM cells, and names that are one in Core ML."""
    pytest.importorskip("coremltools")
    layers: Layers = {
        "layer0": every_kind()["linear"],
        "layer1": every_kind()["lstm"],
        "a.b": every_kind()["linear"],
        "a_b": every_kind()["product"],
        "0": every_kind()["linear"],
    }
    there_and_back(tmp_path, layers, "nn", "coreml")
    (tmp_path / "more").mkdir()
    there_and_back(tmp_path / "more", {"": lstm(3, 2, 2)}, "nn", "bnns")
