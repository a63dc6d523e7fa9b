"""Every example runs as a user would run it, and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import PATIENCE

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_is_one_for_each_kernel() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        "bnns_digits",
        "bnns_lstm",
        "bnns_normalization",
        "bnns_two_layer_regression",
        "mps_matrix_batch_normalization",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_loss_falls(path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert run.returncode == 0, run.stderr
    losses = [float(number) for number in re.findall(r"loss:? +([0-9.]+)", run.stdout)]
    assert len(losses) >= 4, run.stdout
    assert losses[-1] < 0.5 * losses[0]
