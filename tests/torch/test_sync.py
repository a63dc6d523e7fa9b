"""SyncBatchNorm and DistributedDataParallel: two processes over gloo against one with the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.torch_layers import assert_close, rt, same_bits, torch
from support.waiting import PATIENCE

SCRIPT = Path(__file__).parents[1] / "support" / "torch_ranks.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two processes have computed in each run."""
    folder = tmp_path_factory.mktemp("ranks")
    outputs = [folder / f"rank{rank}.pt" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), folder / "store", output],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else None,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, output in enumerate(outputs)
    ]
    errors = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    return [torch.load(output, weights_only=True) for output in outputs]


@pytest.mark.long
@pytest.mark.parametrize("run", ["halves", "unequal parts", "no data", "sequences"])
def test_two_processes_train_as_one_with_the_whole_batch(run: str, ranks: list[Any]) -> None:
    """Losses, gradients and running statistics, however the batch is split, under DistributedDataParallel."""
    from support.torch_ranks import SAMPLES, make_model, train

    kind = "sequences" if run == "sequences" else "independent"
    alone = train(make_model(kind), slice(0, SAMPLES), 1)
    first, second = (results[run] for results in ranks)
    assert_close((first["losses"] + second["losses"]) / 2, alone["losses"])
    for a, b, c in zip(first["gradients"], second["gradients"], alone["gradients"], strict=True):
        assert same_bits(a, b)
        assert_close(a, c)
    for name, value in alone["state"].items():
        a, b = (rank["state"][f"module.{name}"] for rank in (first, second))
        assert same_bits(a, b), name
        if value.is_floating_point():
            assert_close(a, value, name)
        else:
            assert torch.equal(a, value)
    assert same_bits(first["evaluated"], second["evaluated"])
    assert_close(first["evaluated"], alone["evaluated"])


@pytest.mark.long
def test_batch_norms_that_are_not_synchronised(ranks: list[Any]) -> None:
    """Each process has its own statistics. Parameters stay the same in both."""
    first, second = (results["independent"] for results in ranks)
    assert not same_bits(first["losses"], second["losses"])
    for a, b in zip(first["gradients"], second["gradients"], strict=True):
        assert same_bits(a, b)
    for name, value in first["state"].items():
        assert "running" in name or same_bits(value, second["state"][name]), name


def test_one_process_needs_no_group() -> None:
    torch.manual_seed(0)
    sync, plain = rt.SyncBatchNorm(4), rt.BatchNorm1d(4)
    x = torch.randn(5, 4)
    assert same_bits(sync(x), plain(x))
    assert same_bits(sync.running_var, plain.running_var)
    assert same_bits(sync.eval()(x), plain.eval()(x))


def test_conversion_keeps_layers_and_their_tensors() -> None:
    model = torch.nn.Sequential(
        torch.nn.BatchNorm2d(3), rt.BatchNorm1d(4, activation="relu"), torch.nn.SyncBatchNorm(5)
    )
    parameters = list(model.parameters())
    assert rt.SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert [type(layer) for layer in model] == [rt.SyncBatchNorm] * 3
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model[1].activation is not None
    replaced = torch.nn.SyncBatchNorm(5)
    assert rt.replace(replaced).replaced == {"(the model)": "SyncBatchNorm"}
    assert type(replaced) is rt.SyncBatchNorm
