"""Runs that an earlier release began: what it saved is loaded, and training goes on to the bits it would have reached.

`tests/data` has, of a run of each kind, the checkpoint and the model where it stopped early, and the checkpoint of the
same run that did not stop, after 30 steps. The models have two layers and dropout; AdamW trains them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from retrograd import nn
from retrograd.cli import main

DATA = Path(__file__).resolve().parents[1] / "data"
FILES = {"series": "series.csv", "text": "text.txt"}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", list(FILES))
def test_a_run_of_an_earlier_release_ends_in_the_same_bits(kind: str, threads: int, tmp_path: Path) -> None:
    shutil.copy(DATA / f"{kind}-begun.safetensors", tmp_path / "checkpoint.safetensors")
    shutil.copy(DATA / f"{kind}-model.safetensors", tmp_path / "model.safetensors")
    begun = load_file(tmp_path / "checkpoint.safetensors")
    resume = ["--resume", str(tmp_path), "--patience", "none", "--threads", str(threads)]
    assert main(["train", kind, str(DATA / FILES[kind]), *resume]) == 0
    wanted, found = load_file(DATA / f"{kind}-whole.safetensors"), load_file(tmp_path / "checkpoint.safetensors")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].tobytes() == array.tobytes(), name
    # It had something left to do: every parameter has moved.
    assert int(begun["optimizer.steps"]) < int(found["optimizer.steps"]) == 30
    for name in (name for name in wanted if name.startswith("optimizer.first_moments.")):
        parameter = name.replace("optimizer.first_moments.", "model.")
        assert not np.array_equal(found[parameter], begun[parameter]), parameter
    # The history differs by rounding: losses are computed in float32 now.
    records = [
        nn.read_metadata(path)["records"]
        for path in (DATA / f"{kind}-whole.safetensors", tmp_path / "checkpoint.safetensors")
    ]
    for before, after in zip(*records, strict=True):
        assert before["step"] == after["step"]
        assert before["learning_rate"] == after["learning_rate"]
        assert before["validation"] == pytest.approx(after["validation"], rel=1e-6)
        assert (before["loss"] is None) == (after["loss"] is None) == (before["step"] == 0)
        assert (before["loss"] or 0) == pytest.approx(after["loss"] or 0, rel=1e-6)
