"""``retrograd convert``: what it prints, and files that it refuses."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import nn
from retrograd.cli import main
from retrograd.convert import ConvertError, read
from support.convert import every_kind, normal


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = nn.Sequential(
        words=nn.Embedding(7, 3, rng=0),
        lstm=nn.LSTM(3, 4, layers=2, rng=0),
        norm=nn.LayerNorm(4),
        fc=nn.Linear(4, 2, rng=0),
    )
    nn.save(tmp_path / "model.safetensors", model)
    return tmp_path / "model.safetensors"


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["convert", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_listing(capsys: pytest.CaptureFixture[str], source: Path) -> None:
    code, out, err = run(capsys, source)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "fc     linear, 4 inputs, 2 outputs",
        "lstm   LSTM, 3 inputs, 4 units, 2 layers",
        "norm   norm 4",
        "words  embedding, 7 items, 3 features",
    ]


def test_converting(capsys: pytest.CaptureFixture[str], source: Path) -> None:
    target = source.with_suffix(".npz")
    options = ("--rename", "fc=head", "--skip", "words", "--kind", "n*=layer_norm")
    code, out, err = run(capsys, source, target, *options)
    assert (code, err) == (0, "")
    assert out.splitlines()[-2:] == ["norm  layer norm 4", f"written to {target}"]
    assert list(read(target)) == ["head", "lstm", "norm"]
    before = target.read_bytes()
    code, _, err = run(capsys, source, target)
    assert (code, err) == (2, f"retrograd: error: {target} exists already; --overwrite replaces it\n")
    assert target.read_bytes() == before
    assert run(capsys, source, target, "--overwrite")[0] == 0
    assert list(read(target)) == ["fc", "lstm", "norm", "words"]


def test_safetensors_to_safetensors_changes_the_names(capsys: pytest.CaptureFixture[str], source: Path) -> None:
    there, back = source.with_name("torch.safetensors"), source.with_name("back.safetensors")
    assert run(capsys, source, there)[0] == 0
    from safetensors.numpy import load_file

    assert "lstm.weight_ih_l1" in load_file(there)
    assert run(capsys, there, back, "--kind", "words=embedding")[0] == 0
    model = nn.Sequential(
        words=nn.Embedding(7, 3), lstm=nn.LSTM(3, 4, layers=2), norm=nn.LayerNorm(4), fc=nn.Linear(4, 2)
    )
    nn.load(back, model)
    other = nn.Sequential(
        words=nn.Embedding(7, 3), lstm=nn.LSTM(3, 4, layers=2), norm=nn.LayerNorm(4), fc=nn.Linear(4, 2)
    )
    nn.load(source, other)
    for name, array in other.parameters().items():
        np.testing.assert_array_equal(model.parameters()[name], array)
    again = source.with_name("again.safetensors")
    assert run(capsys, there, again, "--to", "torch", "--kind", "words=embedding")[0] == 0
    assert load_file(again).keys() == load_file(there).keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.npz"], "missing.npz: No such file or directory"),
        (["model.safetensors", "a.txt"], "its format is not known; files end in .bin"),
        (["model.txt"], "its format is not known"),
        (["model.safetensors", "none/a.npz"], "the folder none does not exist"),
        (["folder.npz"], "folder.npz is a folder, not a file"),
        (["pipe.safetensors"], "pipe.safetensors is a pipe, not a file"),
        (["pipe.onnx"], "pipe.onnx is a pipe, not a file"),
        (["model.safetensors", "--kind", "fc"], "--kind fc: it must be LAYER=KIND"),
        (["model.safetensors", "--kind", "fc=attention"], "the kind of fc is 'attention'; there are linear"),
        (["model.safetensors", "--skip", "none"], "--skip none: no layer has this name; there are fc, lstm"),
        (["model.safetensors", "a.npz", "--rename", "a=b"], "--rename a=b: no layer has this name"),
        (["model.safetensors", "a.npz", "--rename", "fc=lstm"], "two layers would be named lstm"),
        (["model.safetensors", "--rename", "fc=a"], "--rename needs a TARGET"),
        (["model.safetensors", "folder.npz", "--overwrite"], "it is a folder, not a file"),
        (["cut.safetensors"], "cut.safetensors"),
        (["cut.npz"], "cut.npz cannot be read as arrays named as BNNS's fields"),
        (["pickled.npz"], "pickled.npz cannot be read"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], source: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(source.parent)
    Path("folder.npz").mkdir()
    for name in ("pipe.safetensors", "pipe.onnx"):
        os.mkfifo(name)
    Path("cut.safetensors").write_bytes(source.read_bytes()[:-10])
    np.savez("whole.npz", **{"a.weights": normal(3, 2)})
    Path("cut.npz").write_bytes(Path("whole.npz").read_bytes()[:100])
    np.savez("pickled.npz", **{"a.weights": np.array([{}], object)})
    before = sorted(os.listdir())
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("retrograd: error: ")
    assert err.count("\n") == 1
    assert words in err
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("name", "package"),
    [("a.pt", "torch"), ("a.weights.h5", "h5py"), ("a.onnx", "onnx"), ("a.mlpackage", "coremltools")],
)
def test_packages_that_are_not_installed(
    capsys: pytest.CaptureFixture[str], source: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    original = builtins.__import__

    def without(module: str, *arguments: Any, **options: Any) -> Any:
        if module.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return original(module, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    target = source.with_name(name)
    options = ("--kind", "norm=layer_norm")
    code, _, err = run(capsys, source, target, *options)
    assert code == 2
    assert f"needs the package {package}: pip install {package}" in err
    assert not target.exists()
    target.write_bytes(b"")
    code, _, err = run(capsys, target)
    assert code == 2
    assert f"needs the package {package}: pip install {package}" in err


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a.weights.h5", "a.keras", "a.onnx", "a.npz"])
def test_damaged_files(tmp_path: Path, name: str) -> None:
    for package in ("torch", "h5py", "onnx"):
        pytest.importorskip(package)
    for content in (b"", b"\x00" * 100, b"PK\x03\x04 nothing", bytes(range(256)) * 4):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConvertError, match=name):
            read(tmp_path / name)


def test_every_kind_is_described(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from retrograd.convert import write

    write(tmp_path / "a.onnx", every_kind())
    code, out, _ = run(capsys, tmp_path / "a.onnx")
    assert code == 0
    assert out.splitlines() == [
        "lstm      LSTM, 3 inputs, 4 units",
        "both      LSTM, 3 inputs, 2 units, bidirectional",
        "batch     batch norm 3, running statistics",
        "layer     layer norm 5",
        "instance  instance norm 6",
        "group     group norm 8, 4 groups",
        "linear    linear, 2 inputs, 3 outputs",
        "product   linear, 3 inputs, 4 outputs, no bias",
        "conv1     convolution 4x2x3",
        "conv2     convolution 5x2x3x2",
        "up        transposed convolution 3x4x2",
        "up2       transposed convolution 3x5x2x2",
        "table     embedding, 7 items, 3 features",
    ]
