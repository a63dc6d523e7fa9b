"""The rows of ``retrograd bench conv`` that are pooling."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

import retrograd

from ...ops._types import Array
from .images import Steps, TorchSteps

__all__ = ["POOL_CASES", "PoolCase"]


class PoolCase(NamedTuple):
    """Pooling of square images, by largest values or averages."""

    kind: str
    samples: int
    channels: int
    size: int
    kernel: int
    stride: int
    padding: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}_pool_n{self.samples}c{self.channels}s{self.size}k{self.kernel}"

    @property
    def flops(self) -> None:
        """No matrix products."""

    @property
    def small(self) -> PoolCase:
        return self._replace(samples=1, channels=2, size=2 * self.kernel)

    def make(self) -> PoolData:
        rng = np.random.default_rng(0)
        outputs = (self.size + 2 * self.padding - self.kernel) // self.stride + 1
        shapes = ((self.samples, self.channels, size, size) for size in (self.size, outputs))
        return PoolData(*(rng.standard_normal(shape, np.float32) for shape in shapes))

    def ours(self, data: PoolData, threads: int, given: bool = True) -> Steps:
        (x, dy), kernel = data, self.kernel
        y, dx = (np.empty_like(dy), np.empty_like(x)) if given else (None, None)
        options: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "num_threads": threads}
        if self.kind == "max":
            out = retrograd.MaxPoolResult(y, np.empty(dy.shape, np.int32)) if given else None
            return Steps(
                "retrograd",
                lambda: retrograd.max_pool_forward(x, kernel, out=out, **options),
                lambda kept: [retrograd.max_pool_backward(dy, kept.indices, x.shape, out=dx, num_threads=threads)],
                threads,
            )
        return Steps(
            "retrograd",
            lambda: retrograd.average_pool_forward(x, kernel, out=y, **options),
            lambda _: [retrograd.average_pool_backward(dy, x.shape, kernel, out=dx, **options)],
            threads,
        )

    def torch(self, torch: Any, data: PoolData) -> Steps:
        functional = torch.nn.functional
        pool = functional.max_pool2d if self.kind == "max" else functional.avg_pool2d
        windows = self.kernel, self.stride, self.padding
        return TorchSteps(torch, lambda x: pool(x, *windows), [data.x], data.dy)


class PoolData(NamedTuple):
    x: Array
    dy: Array


POOL_CASES: Final = tuple(
    case
    for samples, channels, size in ((32, 64, 56), (32, 32, 20))
    for case in (PoolCase("max", samples, channels, size, 2, 2), PoolCase("average", samples, channels, size, 3, 1, 1))
)
