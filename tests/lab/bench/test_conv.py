"""The suite conv: results are verified before they are timed, compared with PyTorch's, and their memory is measured."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retrograd
from retrograd import _core
from retrograd.lab import bench
from retrograd.lab.bench import images, timing
from retrograd.lab.bench.conv import ConvCase
from retrograd.lab.bench.pool import PoolCase

CONVOLUTIONS = [ConvCase(2, 3, 6, 5, 3), ConvCase(2, 4, 5, 4, 3, groups=4), ConvCase(1, 8, 4, 8, 1)]
POOLING = [PoolCase("max", 2, 3, 7, 2, 2), PoolCase("average", 2, 3, 6, 3, 1, 1)]


def machine(torch: Any = None) -> timing.Machine:
    return timing.Machine("a processor", _core.isa(), torch, timing.cache_sizes(), "")


@pytest.mark.parametrize("case", [*CONVOLUTIONS, *POOLING], ids=lambda case: case.name)
def test_results_are_those_of_float64(isa: str, case: images.ImageCase) -> None:
    assert list(images.image_failures(case, isa, [1, 2])) == []


@pytest.mark.parametrize(
    ("case", "name"),
    [(CONVOLUTIONS[0], "conv_backward"), (POOLING[0], "max_pool_backward"), (POOLING[1], "average_pool_backward")],
)
def test_one_wrong_element_is_seen(case: images.ImageCase, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = getattr(retrograd, name)

    def wrong(*arguments: Any, **options: Any) -> object:
        result = compute(*arguments, **options)
        gradient = result.dw if isinstance(result, retrograd.ConvGradients) else result
        if gradient.dtype == np.float32:
            gradient.reshape(-1)[7] += np.float32(0.1)
        return result

    monkeypatch.setattr(retrograd, name, wrong)
    assert list(images.image_failures(case, _core.isa(), [2])) == ["float32 and float64 differ, threads 2"]


def test_rows_and_operations() -> None:
    assert bench.bench_names(["conv"]) == [
        "conv_n32c64s56k3",
        "conv_n32c128s28k3",
        "conv_n16c256s14k3",
        "conv_n16c256s14k1",
        "depthwise_n32c128s28k3",
        "conv_n32c1o32s20k3",
        "conv_n64c1o16s8k3",
        "max_pool_n32c64s56k2",
        "average_pool_n32c64s56k3",
        "max_pool_n32c32s20k2",
        "average_pool_n32c32s20k3",
    ]
    forward, backward, step = ConvCase(2, 3, 6, 5, 3).flops
    assert forward == 2 * 2 * 5 * 36 * 27
    assert (backward, step) == (2 * forward, 3 * forward)
    assert ConvCase(2, 4, 5, 4, 3, groups=4).flops[0] == 2 * 2 * 4 * 25 * 9


@pytest.mark.parametrize("case", [*CONVOLUTIONS, *POOLING], ids=lambda case: case.name)
def test_the_contest_has_torch_and_a_bound_for_convolutions(
    case: images.ImageCase, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "peak_bytes", lambda case, provider, threads: [len(provider), 20, 30])
    bound = ["sgemm"] if isinstance(case, ConvCase) else []
    for module, names in ((None, ["retrograd"]), (torch, ["retrograd", "torch"])):
        with contextlib.ExitStack() as stack:
            contest = images.image_contest(case, case.make(), 1, machine(module), stack)
            assert [slot[0].name for slot in contest.slots] == names + bound
            assert (contest.notes, contest.flops, [contest.bound]) == ([], case.flops, bound or [None])
            assert contest.peaks == {
                (name, pass_): peak
                for name in names
                for pass_, peak in zip(contest.passes, (len(name), 20, 30), strict=True)
            }
            for (stepper,) in contest.slots:
                forward, backward, step = stepper.step()
                if stepper.name != "sgemm":
                    assert forward + backward == pytest.approx(step)


def check_peaks(case: images.ImageCase, provider: str, allowance: float) -> None:
    found = images.peak_bytes(case, provider, 2)
    if not Path("/proc/self/status").exists():
        assert found is None
        return
    assert found is not None
    forward, backward, step = found
    y, *gradients = (array.nbytes for array in case.ours(case.make(), 1).results())
    assert y <= forward <= y + allowance
    assert y + sum(gradients) <= backward <= y + sum(gradients) + allowance
    assert step >= backward


# Results of 2.1 MiB and more do not fit into memory that the process has already.
@pytest.mark.parametrize(
    "case",
    [PoolCase("average", 8, 16, 66, 3, 1, 1), ConvCase(8, 16, 66, 16, 3)],
    ids=lambda case: case.name,
)
def test_peaks_are_those_of_the_results_and_some_scratch(case: images.ImageCase) -> None:
    check_peaks(case, "retrograd", 4 << 20)


@pytest.mark.long
@pytest.mark.usefixtures("torch")
def test_peaks_of_torch() -> None:
    check_peaks(PoolCase("average", 8, 16, 66, 3, 1, 1), "torch", 8 << 20)
