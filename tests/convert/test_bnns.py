"""BNNS arrays, given to BNNS's LSTM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import nn
from retrograd.bnns import BNNSLayerParametersLSTM
from retrograd.convert import ConvertError, Lstm, convert, read
from support import bnns_lstm as bnns
from support.arrays import Array
from support.convert import normal


def run_bnns(path: Path, name: str, x: Array, layers: int, hidden: int, directions: int) -> Array:
    """The output of BNNSDirectApplyLSTMBatchTrainingCaching with the arrays of a file as they are."""
    steps, samples, inputs = x.shape
    values = bnns.Values()
    values.x, values.y = x, bnns.nan(steps, samples, directions * hidden)
    fields = {"iw": "iw_desc0", "upper": "iw_desc1", "hw": "hw_desc", "b": "b_desc", "cw": "cw_desc"}
    with np.load(path) as file:
        for gate, arrays in zip(bnns.GATES, values.gates, strict=True):
            for part, field in fields.items():
                key = f"{name}.{gate}.{field}"
                arrays[part] = file[key] if key in file.files else None
    params = BNNSLayerParametersLSTM(inputs, hidden, samples, layers, steps)
    values.descriptors(params)
    params.lstm_flags = bnns.DEFAULT_ACTIVATIONS | (bnns.BIDIRECTIONAL if directions == 2 else 0)
    cache = np.empty(bnns.capacity_of(params), np.uint8)
    assert bnns.forward(params, None, cache, cache.size) == 0
    return values.y


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"layers": 3, "bidirectional": True},
        {"layers": 2, "inputs": 4},  # as wide as the hidden size: one array has the input weights of all layers
        {"layers": 2, "bidirectional": True, "peephole": "diagonal"},
        {"layers": 2, "peephole": "full"},
    ],
)
def test_bnns_computes_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    inputs = options.pop("inputs", 3)
    model = nn.Sequential(lstm=nn.LSTM(inputs, 4, rng=0, **options))
    nn.save(tmp_path / "a.safetensors", model)
    convert(tmp_path / "a.safetensors", tmp_path / "a.npz")
    x = normal(6, 2, inputs)
    y = run_bnns(tmp_path / "a.npz", "lstm", x, options.get("layers", 1), 4, 1 + options.get("bidirectional", False))
    # A matrix with zeros outside its diagonal is added up differently.
    tolerance = 1e-6 if options.get("peephole") == "diagonal" else 0
    np.testing.assert_allclose(y, model.eval().forward(x), rtol=0, atol=tolerance)
    # And back, into the same layer.
    convert(tmp_path / "a.npz", tmp_path / "b.safetensors")
    other = nn.Sequential(lstm=nn.LSTM(inputs, 4, rng=1, **options))
    nn.load(tmp_path / "b.safetensors", other)
    np.testing.assert_array_equal(other.eval().forward(x), model.forward(x))


def test_bnns_computes_what_pytorch_computes(tmp_path: Path, torch: Any) -> None:
    module = torch.nn.LSTM(3, 4, 2, bidirectional=True)
    torch.save({f"rnn.{name}": tensor for name, tensor in module.state_dict().items()}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a.npz")
    x = normal(6, 2, 3)
    y, _ = module(torch.from_numpy(x))
    found = run_bnns(tmp_path / "a.npz", "rnn", x, 2, 4, 2)
    np.testing.assert_allclose(found, y.detach().numpy(), rtol=1e-5, atol=1e-6)


def gates(**fields: Array) -> dict[str, Array]:
    return {f"lstm.{gate}.{field}": array for gate in bnns.GATES for field, array in fields.items()}


def test_gates_without_a_bias_or_a_peephole_have_zeros(tmp_path: Path) -> None:
    arrays = gates(iw_desc0=normal(1, 1, 4, 3), hw_desc=normal(1, 1, 4, 4))
    arrays["lstm.forget_gate.b_desc"] = normal(1, 1, 4)
    np.savez(tmp_path / "a.npz", allow_pickle=False, **arrays)
    lstm = read(tmp_path / "a.npz")["lstm"]
    assert isinstance(lstm, Lstm)
    np.testing.assert_array_equal(lstm.cells[0][0].b, np.concatenate([np.zeros(4), normal(1, 1, 4)[0, 0], np.zeros(8)]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lstm.input_gate.hw_desc": None}, "input_gate.hw_desc is missing"),
        ({"lstm.input_gate.hw_desc": normal(1, 1, 5, 5)}, "the gates' hw_desc have shapes"),
        ({"lstm.weights": normal(2, 3)}, "weights"),
        ({f"lstm.{gate}.iw_desc0": None for gate in bnns.GATES}, "iw_desc0 or hw_desc is missing"),
        ({f"lstm.{gate}.hw_desc": normal(2, 1, 4, 4) for gate in bnns.GATES}, "hw_desc has 2 layers"),
    ],
)
def test_refusals(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    arrays: dict[str, Any] = {**gates(iw_desc0=normal(1, 1, 4, 3), hw_desc=normal(1, 1, 4, 4)), **change}
    given = {name: array for name, array in arrays.items() if array is not None}
    np.savez(tmp_path / "a.npz", allow_pickle=False, **given)
    with pytest.raises(ConvertError, match=words):
        read(tmp_path / "a.npz")
