"""Files that refer to others, never end, or declare more than they have: refused, and nothing outside them is read."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import nn
from retrograd.cli import main
from retrograd.convert import ConvertError, Linear, read, write
from support.arrays import Array
from support.convert import lstm, normal

CANARY = b"CANARY!!" * 8  # 16 numbers
VALUES = np.frombuffer(CANARY, np.float32).reshape(4, 4)
KERNEL = "layers/dense/vars/0"


def refused(path: Path, words: str) -> None:
    with pytest.raises(ConvertError, match=words) as error:
        read(path)
    assert path.name in str(error.value)
    assert "CANARY" not in str(error.value)


# ---- HDF5 ------------------------------------------------------------------------------------------------------------


def external_storage(h5py: Any, file: Any, folder: Path) -> None:
    (folder / "canary").write_bytes(CANARY)
    file.create_dataset(KERNEL, (4, 4), np.float32, external=[(str(folder / "canary"), 0, len(CANARY))])


def external_link(h5py: Any, file: Any, folder: Path) -> None:
    with h5py.File(folder / "other.h5", "w") as other:
        other["x"] = VALUES
    file.create_group("layers/dense/vars")["0"] = h5py.ExternalLink(str(folder / "other.h5"), "/x")


def external_group(h5py: Any, file: Any, folder: Path) -> None:
    with h5py.File(folder / "other.h5", "w") as other:
        other["dense/vars/0"] = VALUES
    file["layers"] = h5py.ExternalLink(str(folder / "other.h5"), "/")


def virtual(h5py: Any, file: Any, folder: Path) -> None:
    with h5py.File(folder / "other.h5", "w") as other:
        other["x"] = VALUES
    layout = h5py.VirtualLayout((4, 4), np.float32)
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "x", (4, 4))
    file.create_virtual_dataset(KERNEL, layout)


def soft_loop(h5py: Any, file: Any, folder: Path) -> None:
    group = file.create_group("layers/dense/vars")
    group["0"], group["1"] = h5py.SoftLink("/layers/dense/vars/1"), h5py.SoftLink("/layers/dense/vars/0")


def hard_loop(h5py: Any, file: Any, folder: Path) -> None:
    group = file.create_group("layers/sequential")
    group["again"] = file["layers"]


def deep(h5py: Any, file: Any, folder: Path) -> None:
    file.create_group("layers/" + "x/" * 1500)


def enormous(h5py: Any, file: Any, folder: Path) -> None:
    file.create_dataset(KERNEL, (10**6, 10**7), np.float32)


def many_times(h5py: Any, file: Any, folder: Path) -> None:
    for layer in range(3000):  # one array that is stored once
        if layer:
            file[f"layers/dense_{layer}/vars/0"] = file["layers/dense/vars/0"]
        else:
            file[KERNEL] = np.zeros((300, 300))


def strings(h5py: Any, file: Any, folder: Path) -> None:
    file.create_dataset(KERNEL, data=["a", "b"], dtype=h5py.string_dtype())


HDF5: list[tuple[Callable[[Any, Any, Path], None], str]] = [
    (external_storage, "layers/dense/vars/0 has external storage, in the file '.*canary'"),
    (external_link, "layers/dense/vars/0 is an external link, to the file '.*other.h5'"),
    (external_group, "layers is an external link"),
    (virtual, "layers/dense/vars/0 is a virtual dataset"),
    (soft_loop, "layers/dense/vars/0 is a soft link, to '/layers/dense/vars/1'"),
    (hard_loop, "layers/sequential/again is a second link to a group"),
    (deep, "groups are nested more than 64 deep"),
    (enormous, "it declares 40,000,000,000,000 bytes in a file of"),
    (many_times, "it declares .* bytes in a file of"),
    (strings, "layers/dense/vars/0 has values of variable length"),
]


@pytest.mark.parametrize("keras", [False, True])
@pytest.mark.parametrize(("make", "words"), HDF5, ids=[make.__name__ for make, _ in HDF5])
def test_hdf5(tmp_path: Path, make: Callable[[Any, Any, Path], None], words: str, keras: bool) -> None:
    h5py = pytest.importorskip("h5py")
    weights = tmp_path / "a.weights.h5"
    with h5py.File(weights, "w") as file:
        make(h5py, file, tmp_path)
    if keras:
        with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
            archive.writestr("config.json", json.dumps({"config": {"layers": []}}))
            archive.write(weights, "model.weights.h5")
    refused(tmp_path / "a.keras" if keras else weights, words)
    assert main(["convert", str(weights), str(tmp_path / "leak.npz")]) == 2
    assert not (tmp_path / "leak.npz").exists()


def test_free_space_without_end(tmp_path: Path) -> None:
    """libhdf5 never returns from a collection of strings with free space of size 0."""
    h5py = pytest.importorskip("h5py")
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file[KERNEL] = normal(4, 4)
        file["layers/dense/vars"].attrs["name"] = "dense"
    whole = content.getvalue()
    (tmp_path / "whole.weights.h5").write_bytes(whole)
    assert list(read(tmp_path / "whole.weights.h5")) == ["dense"]
    heap = whole.index(b"GCOL")
    free = heap + 16 + 16 + 8  # past the header and the only string
    assert whole[free : free + 8] == bytes(8)
    (tmp_path / "a.weights.h5").write_bytes(whole[: free + 8] + bytes(8) + whole[free + 16 :])
    refused(tmp_path / "a.weights.h5", "free space without end")


def test_a_damaged_virtual_dataset(tmp_path: Path) -> None:
    """It is refused before libhdf5 decodes its selections, in which it may crash."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        virtual(h5py, file, tmp_path)
    whole = (tmp_path / "a.weights.h5").read_bytes()
    heap = whole.index(b"GCOL")
    damaged = whole[: heap + 16] + whole[heap + 16 : heap + 512].replace(b"\x02\0\0\0", b"\xff\0\0\x7f")
    (tmp_path / "a.weights.h5").write_bytes(damaged + whole[heap + 512 :])
    refused(tmp_path / "a.weights.h5", "layers/dense/vars/0 is a virtual dataset")


# ---- archives --------------------------------------------------------------------------------------------------------


def test_an_archive_that_grows(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    with zipfile.ZipFile(tmp_path / "a.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", bytes(100 << 20))
    refused(tmp_path / "a.keras", "it declares 104,857,600 bytes in a file of")
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../a.weights.npy", bytes(100 << 20))
    refused(tmp_path / "a.npz", "it declares 104,857,600 bytes in a file of")
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.weights.npy", bytes(100))
    refused(tmp_path / "a.npz", "a.weights.npy is compressed by method 14, expected 0 or 8")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.weights", b"text")
    refused(tmp_path / "a.npz", "a.weights is not an array")


def test_a_deep_configuration(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
        archive.writestr("config.json", "[" * 100_000)
        archive.writestr("model.weights.h5", b"")
    refused(tmp_path / "a.keras", "cannot be read as Keras 3")


def test_a_deep_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = b'{"a":' + b"[" * 100_000
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(tmp_path / "a.safetensors", "is not a whole safetensors file")
    assert main(["convert", str(tmp_path / "a.safetensors")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_long_names(tmp_path: Path) -> None:
    """Each part of a name may be that of a layer: the time would grow with the square of the length."""
    np.savez(tmp_path / "a.npz", **{f"{'a.' * 30_000}weights": normal(3, 2)})
    refused(tmp_path / "a.npz", r"a\.a.*: the name of an array has 60007 characters, expected up to 1000")


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def test_pickles_run_nothing(tmp_path: Path, torch: Any) -> None:
    torch.save({"fc.weight": Touch(tmp_path / "made")}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "cannot be read as PyTorch")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Touch(tmp_path / "made")))
    refused(tmp_path / "b.pt", "cannot be read as PyTorch")
    assert not (tmp_path / "made").exists()


def test_one_element_that_stands_for_many(tmp_path: Path, torch: Any) -> None:
    torch.save({"fc.weight": torch.zeros(1).expand(10**6, 10**6)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "it declares 4,000,000,000,000 bytes in a file of")


# ---- ONNX ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def onnx() -> Any:
    return pytest.importorskip("onnx")


def saved(onnx: Any, path: Path, nodes: list[Any], *tensors: Any) -> None:
    graph = onnx.helper.make_graph(nodes, "layers", [], [], list(tensors))
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())


def gemm(onnx: Any, w: str) -> Any:
    return onnx.helper.make_node("Gemm", ["x", w], ["y"], name="fc", transB=1)


def tensor(onnx: Any, name: str, array: Array) -> Any:
    return onnx.numpy_helper.from_array(array, name)


def test_a_cycle(tmp_path: Path, onnx: Any) -> None:
    pair = [onnx.helper.make_node("Identity", [a], [b]) for a, b in (("a", "b"), ("b", "a"))]
    saved(onnx, tmp_path / "a.onnx", [*pair, gemm(onnx, "a")], tensor(onnx, "a", normal(3, 2)))
    refused(tmp_path / "a.onnx", "the graph is not valid: a is the output of two nodes, or of a node and a weight")
    itself = onnx.helper.make_node("Identity", ["a"], ["a"])
    saved(onnx, tmp_path / "a.onnx", [itself, gemm(onnx, "a")], tensor(onnx, "a", normal(3, 2)))
    refused(tmp_path / "a.onnx", "the graph is not valid: a is")
    # Not a cycle: a long chain.
    chain = [onnx.helper.make_node("Identity", [f"a{k}"], [f"a{k + 1}"]) for k in range(2000)]
    saved(onnx, tmp_path / "a.onnx", [*chain, gemm(onnx, "a2000")], tensor(onnx, "a0", normal(3, 2)))
    layer = read(tmp_path / "a.onnx")["fc"]
    assert isinstance(layer, Linear)
    np.testing.assert_array_equal(layer.w, normal(3, 2))


def test_no_layer_of_a_stack_is_lost(tmp_path: Path, onnx: Any) -> None:
    names = ["a.layer0", "a_layer0", "a.layer1", "b", "b.layer0", "b.layer1", "c.layer0", "c.layer1"]
    write(tmp_path / "a.onnx", {name: lstm(4, 4) for name in names})
    assert list(read(tmp_path / "a.onnx")) == [*names[:-2], "c"]


def external(onnx: Any, location: str, **entries: int) -> Any:
    made = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4, 4])
    made.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        made.external_data.add(key=key, value=str(value))
    return made


def test_data_beside_a_model(tmp_path: Path, onnx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    (folder / "part").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "canary", folder / "w.bin", folder / "part" / "w.bin"):
        path.write_bytes(bytes(8) + CANARY)
    (folder / "link.bin").symlink_to(tmp_path / "canary")
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    path = folder / "a.onnx"
    for location in ("w.bin", "part/w.bin", "./w.bin"):
        saved(onnx, path, [gemm(onnx, "w")], external(onnx, location, offset=8, length=64))
        layer = read(path)["fc"]
        assert isinstance(layer, Linear)
        np.testing.assert_array_equal(layer.w, VALUES)
    for location, words in {
        "../canary": "the array w: it refers to the file '../canary'; only names of files below its own folder",
        str(tmp_path / "canary"): "only names of files below its own folder",
        "..\\canary": "only names of files below",
        "": "only names of files below",
        "link.bin": "'link.bin', a symbolic link; links are not followed",
        "up/canary": "'up/canary', a symbolic link",
        "pipe": "is a pipe, not a file",
        "part": "is a folder, not a file",
        "none.bin": "No such file",
        "canary": "No such file",
    }.items():
        saved(onnx, path, [gemm(onnx, "w")], external(onnx, location))
        with pytest.raises(ConvertError) as error:
            read(path)
        assert words in str(error.value)
    for entries in ({"offset": 80, "length": 64}, {"offset": -8}, {"length": 10**15}, {"length": -1}):
        saved(onnx, path, [gemm(onnx, "w")], external(onnx, "w.bin", **entries))
        refused(path, "the array w: bytes .* are outside of .*w.bin, which has 72")


# ---- Core ML ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    pytest.importorskip("coremltools")
    write(tmp_path / "a.mlpackage", {"fc": Linear(normal(60, 40), normal(60))})
    return tmp_path / "a.mlpackage"


def test_links_in_a_package(package: Path, tmp_path: Path) -> None:
    weights = package / "Data" / "com.apple.CoreML" / "weights"
    assert list(read(package)) == ["fc"]
    (weights / "weight.bin").rename(tmp_path / "canary")
    (weights / "weight.bin").symlink_to(tmp_path / "canary")
    refused(package, "weights/weight.bin in it is a symbolic link")
    (weights / "weight.bin").unlink()
    os.mkfifo(weights / "weight.bin")
    refused(package, "weights/weight.bin in it is neither a file nor a folder")
    (weights / "weight.bin").unlink()
    weights.rmdir()
    weights.symlink_to(tmp_path)
    refused(package, "weights in it is a symbolic link")


@pytest.mark.parametrize("name", ["model.mlmodel", "weights"])
@pytest.mark.parametrize("place", ["../../outside", "/outside", "com.apple.CoreML/../../../outside"])
def test_paths_out_of_a_package(package: Path, tmp_path: Path, name: str, place: str) -> None:
    (package / "Data" / "com.apple.CoreML" / name).rename(tmp_path / "outside")
    manifest = json.loads((package / "Manifest.json").read_text())
    for entry in manifest["itemInfoEntries"].values():
        if entry["name"] == name:
            entry["path"] = place
    (package / "Manifest.json").write_text(json.dumps(manifest))
    refused(package, "it refers to the file .*outside'; only names of files below its own folder are followed")


def test_programs_are_not_computed(package: Path) -> None:
    """A constant of 10^12 numbers that an operation would make."""
    from coremltools import proto

    path = package / "Data" / "com.apple.CoreML" / "model.mlmodel"
    spec = proto.Model_pb2.Model()
    spec.ParseFromString(path.read_bytes())
    (function,) = spec.mlProgram.functions.values()
    (block,) = function.block_specializations.values()
    fill = block.operations.add(type="fill")
    shape = proto.MIL_pb2.Value()
    shape.type.tensorType.dataType = proto.MIL_pb2.INT32
    shape.type.tensorType.rank = 1
    shape.type.tensorType.dimensions.add().constant.size = 2
    shape.immediateValue.tensor.ints.values.extend([10**6, 10**6])
    fill.inputs["shape"].arguments.add().value.CopyFrom(shape)
    fill.outputs.add(name="filled")
    path.write_bytes(spec.SerializeToString())
    assert list(read(package)) == ["fc"]


# ---- what is printed -------------------------------------------------------------------------------------------------


def test_names_are_printed_without_controls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b]0;title\x07\x9b31m\nb\tc\u202e\u2028[bold]"
    shown = "a␛]0;title␇\ufffd31m␊b␉c\ufffd\ufffd[bold]"
    np.savez(tmp_path / "a.npz", **{f"{name}.weights": normal(3, 2)})
    assert main(["convert", str(tmp_path / "a.npz")]) == 0
    assert capsys.readouterr().out == f"{shown}  linear, 2 inputs, 3 outputs, no bias\n"
    np.savez(tmp_path / "a.npz", **{name: normal(3, 2)})
    assert main(["convert", str(tmp_path / "a.npz")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f": {shown}: no layer that retrograd has keeps an array of this name; --skip {shown} leaves" in err
    assert err.count("\n") == 1
    assert main(["convert", str(tmp_path / "a.npz"), "--skip", name, "--skip", "\x1b[31m"]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
def test_an_output_that_is_full(tmp_path: Path) -> None:
    from support.processes import python

    nn.save(tmp_path / "a.safetensors", nn.Linear(2, 3))
    script = f"""
        import sys
        from retrograd.cli import main
        sys.stdout = open("/dev/full", "w")
        code = main(["convert", {str(tmp_path / "a.safetensors")!r}])
        assert code == 1, code
        sys.exit(3)
    """
    assert python(script, expect=3) == ("retrograd: error: the output could not be written: No space left on device")
