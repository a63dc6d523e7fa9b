"""A model that is trained by one process, or by two that run this file, each on its part of every batch."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

import retrograd.torch as rt

SAMPLES = 10
# How many samples of every batch the first process gets, and the model.
RUNS = {
    "halves": (5, "synchronised"),
    "unequal parts": (3, "synchronised"),
    "no data": (0, "synchronised"),
    "independent": (5, "independent"),
    "sequences": (4, "sequences"),
}


class _Sequences(torch.nn.Module):
    """A model whose layers do not depend on other samples."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(2, 8, batch_first=True, bidirectional=True)
        self.norms = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.GroupNorm(2, 16))
        self.head = torch.nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.norms(self.lstm(x.unflatten(1, (3, 2)))[0][:, -1]))


def make_model(kind: str) -> Any:
    """A model with batch norms, which are "synchronised" or "independent", or one of "sequences"."""
    torch.manual_seed(0)
    if kind == "sequences":
        sequences = _Sequences().double()
        rt.replace(sequences, fuse=True, verbose=False)
        return sequences
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 8),
        torch.nn.BatchNorm1d(8, momentum=None, affine=False),
        torch.nn.Linear(8, 3),
    ).double()
    rt.replace(model, fuse=True, verbose=False)
    return rt.SyncBatchNorm.convert_sync_batchnorm(model) if kind == "synchronised" else model


def make_batch(step: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(step)
    x, target = (torch.randn(SAMPLES, n, generator=generator, dtype=torch.float64) for n in (6, 3))
    return x + step, target


def train(model: Any, part: slice, processes: int) -> dict[str, Any]:
    """Train on a part of every batch. Gradients are averaged over processes, so a loss is that many times its share."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(5):
        x, target = (t[part] for t in make_batch(step))
        loss = (model(x) - target).square().sum() * (processes / SAMPLES)
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        evaluated = model.eval()(make_batch(99)[0])
    return {
        "losses": torch.stack(losses),
        "gradients": gradients,
        "state": dict(model.state_dict()),
        "evaluated": evaluated,
    }


def main(rank: str, store: str, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    results = {}
    for name, (split, kind) in RUNS.items():
        model = torch.nn.parallel.DistributedDataParallel(make_model(kind))
        results[name] = train(model, slice(0, split) if rank == "0" else slice(split, SAMPLES), 2)
    torch.save(results, output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
