"""Core ML packages. They run on a Mac only: here their arrays are compared with those that coremltools reads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.cli import main
from retrograd.convert import ConvertError, Embedding, Layers, Linear, Lstm, Norm, Rnn, convert, read, write
from support.arrays import Array
from support.convert import gru, lstm, normal, rnn
from support.coreml import quiet, save


@pytest.fixture(scope="module")
def coremltools() -> Any:
    with quiet():
        return pytest.importorskip("coremltools")


def operations(coremltools: Any, path: Path) -> Any:
    """The operations of a package, as coremltools reads it."""
    with quiet():
        from coremltools.converters.mil.frontend.milproto.load import load

        model = coremltools.models.MLModel(str(path), skip_model_load=True)
        spec = model.get_spec()
        return load(spec, spec.specificationVersion, model.weights_dir).functions["main"].operations


def options(coremltools: Any, path: Path, kind: str) -> dict[str, Any]:
    """The constant inputs of the only operation of a kind that are not arrays."""
    (operation,) = (one for one in operations(coremltools, path) if one.op_type == kind)
    values = {part: getattr(variable, "val", None) for part, variable in operation.inputs.items()}
    return {part: value for part, value in values.items() if not isinstance(value, np.ndarray)}


def constants(coremltools: Any, path: Path) -> dict[str, Array]:
    """The constant arrays among the inputs of all operations."""
    found = {}
    for operation in operations(coremltools, path):
        for part, variable in operation.inputs.items():
            if isinstance(getattr(variable, "val", None), np.ndarray):
                found[f"{operation.name}.{part}"] = variable.val
    return found


def test_the_arrays_of_an_lstm(tmp_path: Path, torch: Any, coremltools: Any) -> None:
    """Gates in the order i f o z, where PyTorch has i f g o and z is g; one bias."""
    module = torch.nn.LSTM(3, 4, bidirectional=True)
    torch.save({f"rnn.{name}": tensor for name, tensor in module.state_dict().items()}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a.mlpackage")
    found = constants(coremltools, tmp_path / "a.mlpackage")
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    for ours, theirs in (("", ""), ("_back", "_reverse")):
        sources = {
            "weight_ih": state[f"weight_ih_l0{theirs}"],
            "weight_hh": state[f"weight_hh_l0{theirs}"],
            "bias": state[f"bias_ih_l0{theirs}"] + state[f"bias_hh_l0{theirs}"],
        }
        for part, array in sources.items():
            i, f, g, o = np.split(array, 4)
            np.testing.assert_array_equal(found[f"rnn.{part}{ours}"], np.concatenate([i, f, o, g]), part)


def test_the_arrays_of_a_gru(tmp_path: Path, torch: Any, coremltools: Any) -> None:
    """Gates in the order r n z, where PyTorch has r z n; the recurrent bias is `bias`, as in coremltools' own tests."""
    module = torch.nn.GRU(3, 4)
    torch.save({f"rnn.{name}": tensor for name, tensor in module.state_dict().items()}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a.mlpackage")
    found = constants(coremltools, tmp_path / "a.mlpackage")
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    names = {"weight_ih": "weight_ih", "weight_hh": "weight_hh", "input_bias": "bias_ih", "bias": "bias_hh"}
    for ours, theirs in names.items():
        r, z, n = np.split(state[f"{theirs}_l0"], 3)
        np.testing.assert_array_equal(found[f"rnn.{ours}"], np.concatenate([r, n, z]), ours)
    assert options(coremltools, tmp_path / "a.mlpackage", "gru")["reset_after"]


def test_a_gru_that_resets_before_the_product(tmp_path: Path, coremltools: Any) -> None:
    """One bias, and an operation that systems before iOS 18 have, too."""
    layer = gru(kind="before")
    write(tmp_path / "a.mlpackage", {"rnn": layer})
    found = constants(coremltools, tmp_path / "a.mlpackage")
    cell = layer.cells[0][0]
    for ours, array in (("weight_ih", cell.wx), ("weight_hh", cell.wh), ("bias", cell.b)):
        r, z, n = np.split(array, 3)
        np.testing.assert_array_equal(found[f"rnn.{ours}"], np.concatenate([r, n, z]), ours)
    assert "rnn.input_bias" not in found
    assert not options(coremltools, tmp_path / "a.mlpackage", "gru").get("reset_after")


@pytest.mark.parametrize(("ours", "theirs"), [(None, "tanh"), ("relu", "relu"), ("identity", "linear")])
def test_the_arrays_of_an_rnn(tmp_path: Path, coremltools: Any, ours: str | None, theirs: str) -> None:
    layer = rnn(activation=ours)
    write(tmp_path / "a.mlpackage", {"rnn": layer})
    found = constants(coremltools, tmp_path / "a.mlpackage")
    cell = layer.cells[0][0]
    for part, array in (("weight_ih", cell.wx), ("weight_hh", cell.wh), ("bias", cell.b)):
        np.testing.assert_array_equal(found[f"rnn.{part}"], array, part)
    assert options(coremltools, tmp_path / "a.mlpackage", "rnn")["activation"] == theirs
    again = read(tmp_path / "a.mlpackage")["rnn"]
    assert isinstance(again, Rnn)
    assert again.activation == (ours or "tanh")


def test_what_core_ml_cannot_hold(tmp_path: Path, coremltools: Any) -> None:
    for layer in (gru(directions=2), rnn(directions=2)):
        with pytest.raises(ConvertError, match="bidirectional; of Core ML's recurrent operations only lstm can be"):
            write(tmp_path / "a.mlpackage", {"rnn": layer})
    with pytest.raises(ConvertError, match="the activation silu, which Core ML's rnn does not have"):
        write(tmp_path / "a.mlpackage", {"rnn": rnn(activation="silu")})
    assert list(tmp_path.iterdir()) == []


def test_peepholes(tmp_path: Path, coremltools: Any) -> None:
    """In the order i f o."""
    layer = lstm(3, 4, peephole="ifo")
    write(tmp_path / "a.mlpackage", {"rnn": layer})
    assert layer.cells[0][0].peephole is not None
    i, f, _, o = np.split(layer.cells[0][0].peephole, 4)
    np.testing.assert_array_equal(
        constants(coremltools, tmp_path / "a.mlpackage")["rnn.peephole"], np.concatenate([i, f, o])
    )


def test_a_package_that_coremltools_converted(tmp_path: Path, torch: Any, coremltools: Any) -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.rnn = torch.nn.LSTM(3, 4, bidirectional=True)
            self.fc = torch.nn.Linear(8, 5)

        def forward(self, x: Any, h: Any, c: Any) -> Any:
            return self.fc(self.rnn(x, (h, c))[0])

    module = Model().eval()
    example = torch.randn(5, 2, 3), torch.zeros(2, 2, 4), torch.zeros(2, 2, 4)
    with quiet():
        converted = coremltools.convert(
            torch.jit.trace(module, example),
            inputs=[coremltools.TensorType(shape=x.shape) for x in example],
            convert_to="mlprogram",
            compute_precision=coremltools.precision.FLOAT32,
            skip_model_load=True,
        )
        save(converted, tmp_path / "a.mlpackage")
    layers = read(tmp_path / "a.mlpackage")
    (rnn,) = (layer for layer in layers.values() if isinstance(layer, Lstm))
    (fc,) = (layer for layer in layers.values() if isinstance(layer, Linear))
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    for cell, theirs in zip(rnn.cells[0], ("", "_reverse"), strict=True):
        np.testing.assert_array_equal(cell.wx, state[f"rnn.weight_ih_l0{theirs}"])
        np.testing.assert_array_equal(cell.wh, state[f"rnn.weight_hh_l0{theirs}"])
        np.testing.assert_array_equal(cell.b, state[f"rnn.bias_ih_l0{theirs}"] + state[f"rnn.bias_hh_l0{theirs}"])
    np.testing.assert_array_equal(fc.w, state["fc.weight"])
    np.testing.assert_array_equal(fc.b, state["fc.bias"])


def test_the_command_prints_no_progress_bars(
    tmp_path: Path, coremltools: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a.npz", {"fc": Linear(normal(3, 2), normal(3))})
    assert main(["convert", str(tmp_path / "a.npz"), str(tmp_path / "a.mlpackage")]) == 0
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (2, "")


def test_a_package_is_replaced_whole(tmp_path: Path, coremltools: Any) -> None:
    target = tmp_path / "a.mlpackage"
    write(target, {"fc": Linear(normal(3, 2), normal(3))})
    with pytest.raises(ConvertError, match="a peephole of gate g, which Core ML's lstm does not have"):
        write(target, {"rnn": lstm(peephole="ifgo")})
    assert list(read(target)) == ["fc"]
    layers: Layers = {"words": Embedding(normal(5, 2)), "norm": Norm("layer_norm", normal(3), normal(3))}
    write(target, layers)
    assert list(read(target)) == ["words", "norm"]
    assert list(tmp_path.iterdir()) == [target]


def test_nothing_is_left_in_the_folder_for_temporary_files(
    tmp_path: Path, coremltools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even until the interpreter ends: a process that is killed, or forked, would leave it for good."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    write(tmp_path / "a.mlpackage", {"fc": Linear(normal(300, 200), normal(300))})
    assert list(read(tmp_path / "a.mlpackage")) == ["fc"]
    assert list(folder.iterdir()) == []


def test_not_a_package(tmp_path: Path, coremltools: Any) -> None:
    (tmp_path / "a.mlpackage").mkdir()
    with pytest.raises(ConvertError, match="cannot be read as Core ML"):
        read(tmp_path / "a.mlpackage")
    (tmp_path / "b.mlpackage").write_bytes(b"nothing")
    with pytest.raises(ConvertError, match="it is a file; a package of Core ML is a folder"):
        read(tmp_path / "b.mlpackage")
