"""The rows of ``retrograd bench conv`` that are convolutions."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

import retrograd

from ...ops._types import Array
from .images import Steps, TorchSteps

__all__ = ["CONV_CASES", "ConvCase"]


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

    @property
    def small(self) -> ConvCase:
        return ConvCase(1, 4, self.kernel, 4, self.kernel, groups=1 if self.groups == 1 else 4)

    def make(self) -> ConvData:
        rng = np.random.default_rng(0)
        shapes = (
            (self.samples, self.channels, self.size, self.size),
            (self.outputs, self.channels // self.groups, self.kernel, self.kernel),
            (self.outputs,),
            (self.samples, self.outputs, self.size, self.size),
        )
        return ConvData(*(rng.standard_normal(shape, np.float32) for shape in shapes))

    def ours(self, data: ConvData, threads: int, given: bool = True) -> Steps:
        x, w, b, dy = data
        y = np.empty_like(dy) if given else None
        gradients = retrograd.ConvGradients(*map(np.empty_like, (x, w, b))) if given else None
        options = {**self.options, "num_threads": threads}
        return Steps(
            "retrograd",
            lambda: retrograd.conv_forward(x, w, b, out=y, **options),
            lambda _: retrograd.conv_backward(dy, x, w, out=gradients, **options),
            threads,
        )

    def torch(self, torch: Any, data: ConvData) -> Steps:
        conv, options = torch.nn.functional.conv2d, self.options
        return TorchSteps(torch, lambda x, w, b: conv(x, w, b, **options), data[:3], data.dy)


class ConvData(NamedTuple):
    x: Array
    w: Array
    b: Array
    dy: Array


CONV_CASES: Final = (
    ConvCase(32, 64, 56, 64, 3),
    ConvCase(32, 128, 28, 128, 3),
    ConvCase(16, 256, 14, 256, 3),
    ConvCase(16, 256, 14, 256, 1),
    ConvCase(32, 128, 28, 128, 3, groups=128),
    ConvCase(32, 1, 20, 32, 3),  # Apple's sample that recognizes digits
    ConvCase(64, 1, 8, 16, 3),
)
