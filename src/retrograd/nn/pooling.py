"""MaxPool, AveragePool and Flatten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import retrograd as rg

from .module import Array, Module

__all__ = ["AveragePool", "Flatten", "MaxPool"]

PerAxis: TypeAlias = int | Sequence[int]
Padding: TypeAlias = int | Sequence[int | Sequence[int]]


class _Pool(Module):
    """What both poolings share: their windows, and the results of the last training pass."""

    def __init__(self, kernel: PerAxis, stride: PerAxis | None, padding: Padding, channels_last: bool) -> None:
        self.kernel, self.stride, self.padding, self.channels_last = kernel, stride, padding, channels_last

    def _options(self) -> dict[str, Any]:
        return {"channels_last": self.channels_last, "num_threads": self.num_threads}

    def _windows(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, **self._options()}

    def _results(self, x: Array) -> Any:
        """The results of the last pass, to be overwritten, if they have the right shape; in training mode."""
        last = self._kept.get("results") if self.training else None
        return last[1] if last is not None and last[0] == (x.shape, x.dtype) else None

    def _keep_results(self, x: Array, results: Any) -> None:
        self.keep(x_shape=x.shape, results=((x.shape, x.dtype), results) if self.training else None)

    def describe(self) -> str:
        options = {"stride": (self.stride, None), "padding": (self.padding, 0), **self._more()}
        options["channels_last"] = (self.channels_last, False)
        return ", ".join(
            [f"{self.kernel}", *(f"{name}={value}" for name, (value, usual) in options.items() if value != usual)]
        )

    def _more(self) -> dict[str, tuple[Any, Any]]:
        """The other options, with their defaults."""
        raise NotImplementedError


class MaxPool(_Pool):
    """The largest value of each window of x, [N, C, W] or [N, C, H, W]; see :func:`retrograd.max_pool_forward`."""

    def __init__(
        self,
        kernel: PerAxis,
        *,
        stride: PerAxis | None = None,
        padding: Padding = 0,
        dilation: PerAxis = 1,
        channels_last: bool = False,
    ) -> None:
        super().__init__(kernel, stride, padding, channels_last)
        self.dilation = dilation

    def forward(self, x: Array) -> Array:
        out = self._results(x)
        results = rg.max_pool_forward(x, self.kernel, dilation=self.dilation, out=out, **self._windows())
        self._keep_results(x, results)
        self.keep(indices=results.indices)
        assert results.y is not None
        return results.y

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array | None:
        shape, indices = self.kept("x_shape"), self.kept("indices")
        if not need_dx:
            return None
        return rg.max_pool_backward(dy, indices, shape, out=self.reuse("dx", shape, dy.dtype), **self._options())

    def _more(self) -> dict[str, tuple[Any, Any]]:
        return {"dilation": (self.dilation, 1)}


class AveragePool(_Pool):
    """The average of each window of x, [N, C, W] or [N, C, H, W]; see :func:`retrograd.average_pool_forward`."""

    def __init__(
        self,
        kernel: PerAxis,
        *,
        stride: PerAxis | None = None,
        padding: Padding = 0,
        count_includes_padding: bool = True,
        channels_last: bool = False,
    ) -> None:
        super().__init__(kernel, stride, padding, channels_last)
        self.count_includes_padding = count_includes_padding

    def forward(self, x: Array) -> Array:
        y = rg.average_pool_forward(
            x,
            self.kernel,
            count_includes_padding=self.count_includes_padding,
            out=self._results(x),
            **self._windows(),
        )
        self._keep_results(x, y)
        return y

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array | None:
        shape = self.kept("x_shape")
        if not need_dx:
            return None
        return rg.average_pool_backward(
            dy,
            shape,
            self.kernel,
            count_includes_padding=self.count_includes_padding,
            out=self.reuse("dx", shape, dy.dtype),
            **self._windows(),
        )

    def _more(self) -> dict[str, tuple[Any, Any]]:
        return {"count_includes_padding": (self.count_includes_padding, True)}


class Flatten(Module):
    """All axes but the first as one: [N, C, H, W] becomes [N, C * H * W]. The result is a view of x where possible."""

    def forward(self, x: Array) -> Array:
        if x.ndim == 0:
            raise ValueError("Flatten: x has no axes, needs at least 1")
        self.keep(shape=x.shape)
        return x.reshape(x.shape[0], math.prod(x.shape[1:]))

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array | None:
        shape: tuple[int, ...] = self.kept("shape")
        return dy.reshape(shape) if need_dx else None
