"""Convolutions, compared with PyTorch and with NumPy's matrix product."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

import retrograd

from ...ops._args import Array
from .sgemm import Gemm, Sgemm
from .timing import Contest, Machine, admit, agree, clock, wake_workers

__all__ = ["CONV_CASES", "ConvCase", "conv_contest", "conv_failures", "make_conv_data"]

_GEMM: Final = Gemm(1024, 1024, 1024)
_PASSES: Final = ("forward", "backward", "step")


class ConvCase(NamedTuple):
    """A convolution of square images that keeps their size, with a bias."""

    samples: int
    channels: int
    size: int
    outputs: int
    kernel: int
    groups: int = 1

    @property
    def name(self) -> str:
        kind = "depthwise" if self.groups == self.channels > 1 else "conv"
        outputs = "" if self.outputs == self.channels else f"o{self.outputs}"
        return f"{kind}_n{self.samples}c{self.channels}{outputs}s{self.size}k{self.kernel}"

    @property
    def options(self) -> dict[str, Any]:
        return {"padding": self.kernel // 2, "groups": self.groups}

    @property
    def flops(self) -> tuple[float, float, float]:
        """Of forward, backward (twice as many) and both."""
        terms = self.channels // self.groups * self.kernel**2
        forward = 2.0 * self.samples * self.outputs * self.size**2 * terms
        return forward, 2 * forward, 3 * forward


CONV_CASES: Final = (
    ConvCase(32, 64, 56, 64, 3),
    ConvCase(32, 128, 28, 128, 3),
    ConvCase(16, 256, 14, 256, 3),
    ConvCase(16, 256, 14, 256, 1),
    ConvCase(32, 128, 28, 128, 3, groups=128),
    ConvCase(32, 1, 20, 32, 3),  # Apple's sample that recognizes digits
    ConvCase(32, 1, 8, 16, 3),
)


class ConvData(NamedTuple):
    x: Array
    w: Array
    b: Array
    dy: Array


def make_conv_data(case: ConvCase) -> ConvData:
    rng = np.random.default_rng(0)
    shapes = (
        (case.samples, case.channels, case.size, case.size),
        (case.outputs, case.channels // case.groups, case.kernel, case.kernel),
        (case.outputs,),
        (case.samples, case.outputs, case.size, case.size),
    )
    return ConvData(*(rng.standard_normal(shape, np.float32) for shape in shapes))


class _OurConv:
    """retrograd with given buffers."""

    name = "retrograd"

    def __init__(self, case: ConvCase, data: ConvData, threads: int) -> None:
        self._data, self._threads = data, threads
        self._options = {**case.options, "num_threads": threads}
        self._y = np.empty_like(data.dy)
        self._gradients = retrograd.ConvGradients(*(np.empty_like(a) for a in data[:3]))

    def wake(self) -> None:
        wake_workers(self._threads)

    def step(self) -> tuple[float, float, float]:
        x, w, b, dy = self._data
        start = clock()
        retrograd.conv_forward(x, w, b, out=self._y, **self._options)
        middle = clock()
        retrograd.conv_backward(dy, x, w, out=self._gradients, **self._options)
        end = clock()
        return middle - start, end - middle, end - start

    def results(self) -> list[Any]:
        self.step()
        return [self._y, *self._gradients]


class _TorchConv:
    """PyTorch as users call it: eager, autograd."""

    name = "torch"

    def __init__(self, torch: Any, case: ConvCase, data: ConvData) -> None:
        self._leaves = [torch.from_numpy(a).requires_grad_() for a in data[:3]]
        self._dy = torch.from_numpy(data.dy)
        self._options = case.options
        self._conv, self._grad = torch.nn.functional.conv2d, torch.autograd.grad

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float, float, float]:
        start = clock()
        y = self._conv(*self._leaves, **self._options)
        middle = clock()
        gradients = self._grad(y, self._leaves, self._dy)
        end = clock()
        del y, gradients  # freed outside the timed section
        return middle - start, end - middle, end - start

    def results(self) -> list[Any]:
        y = self._conv(*self._leaves, **self._options)
        return [y.detach().numpy(), *(g.numpy() for g in self._grad(y, self._leaves, self._dy))]


def conv_failures(case: ConvCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """Yield messages for results that differ from the engine's in float64, which tests compare with the oracle."""
    data = make_conv_data(case)
    wide = _OurConv(case, ConvData(*(a.astype(np.float64) for a in data)), max(threads)).results()
    for number in threads:
        if not agree(_OurConv(case, data, number).results(), wide, 1e-4):
            yield f"float32 and float64 differ, threads {number}"


def conv_contest(
    case: ConvCase, data: ConvData, threads: int, machine: Machine, stack: contextlib.ExitStack
) -> Contest:
    sgemm = Sgemm([_GEMM], case.flops, threads, stack)
    ours = _OurConv(case, data, threads)
    contest = Contest([[ours]], "sgemm", [], _PASSES, case.flops, lambda: sgemm.cpu_seconds)
    if machine.torch is not None:
        machine.torch.set_num_threads(threads)
        peer = _TorchConv(machine.torch, case, data)
        admit(contest, peer, agree(ours.results(), peer.results()))
    contest.slots.append([sgemm])
    return contest
