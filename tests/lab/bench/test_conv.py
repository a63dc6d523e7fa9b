"""The suite conv: results are verified before they are timed, and compared with PyTorch's."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from retrograd import _core
from retrograd.lab import bench
from retrograd.lab.bench import conv, timing
from retrograd.lab.bench.conv import ConvCase

SMALL = [ConvCase(2, 3, 6, 5, 3), ConvCase(2, 4, 5, 4, 3, groups=4), ConvCase(1, 8, 4, 8, 1)]


def machine(torch: Any = None) -> timing.Machine:
    return timing.Machine("a processor", _core.isa(), torch, timing.cache_sizes(), "")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_convolutions_are_those_of_float64(isa: str, case: ConvCase) -> None:
    assert list(conv.conv_failures(case, isa, [1, 2])) == []


def test_one_wrong_element_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = conv.retrograd.conv_backward

    def wrong(*arguments: Any, **options: Any) -> object:
        gradients = compute(*arguments, **options)
        if gradients.dw is not None and gradients.dw.dtype == np.float32:
            gradients.dw.reshape(-1)[7] += np.float32(0.1)
        return gradients

    monkeypatch.setattr(conv.retrograd, "conv_backward", wrong)
    assert list(conv.conv_failures(SMALL[0], _core.isa(), [2])) == ["float32 and float64 differ, threads 2"]


def test_rows_and_operations() -> None:
    assert {"conv_n32c64s56k3", "depthwise_n32c128s28k3", "conv_n32c1o32s20k3"} <= set(bench.bench_names(["conv"]))
    forward, backward, step = ConvCase(2, 3, 6, 5, 3).flops
    assert forward == 2 * 2 * 5 * 36 * 27
    assert (backward, step) == (2 * forward, 3 * forward)
    assert ConvCase(2, 4, 5, 4, 3, groups=4).flops[0] == 2 * 2 * 4 * 25 * 9


def test_the_contest_has_a_bound_and_torch_if_there_is_one(torch: Any) -> None:
    for module, names in ((None, ["retrograd", "sgemm"]), (torch, ["retrograd", "torch", "sgemm"])):
        with contextlib.ExitStack() as stack:
            data = conv.make_conv_data(SMALL[0])
            contest = conv.conv_contest(SMALL[0], data, 1, machine(module), stack)
            assert [slot[0].name for slot in contest.slots] == names
            for (stepper,) in contest.slots:
                assert len(stepper.step()) == len(contest.passes) == 3
