"""Batch normalization over the batches of several processes, for CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._types import Array
from ..ops.normalization import (
    GradientSums,
    NormStatistics,
    batch_norm_backward,
    batch_norm_gradient_sums,
    batch_norm_statistics,
    combine_statistics,
)
from ._arrays import array, empty_like, num_threads
from ._autograd import check_device, differentiate_once
from ._leaf import Proxy
from ._norm import GRADIENT, Norm, Running, Saved, check, check_running, forward, saved_for_backward
from .functional import fused
from .norms import BatchNorm

__all__ = ["SyncBatchNorm"]

_M = TypeVar("_M", bound=torch.nn.Module)


class SyncBatchNorm(BatchNorm):
    """`torch.nn.SyncBatchNorm` for CPU tensors, over a process group such as gloo's, with an optional `activation`.

    In training every process normalizes by the statistics of all batches together, which may differ in size or be
    empty. They are combined in the order of ranks, so all processes compute the same bits. This is not a subclass of
    PyTorch's layer, which DistributedDataParallel refuses on the CPU.
    """

    process_group: dist.ProcessGroup | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm: input has shape {tuple(input.shape)}, needs at least 2 axes: samples and channels"
            )

    def forward(self, input: Tensor | Proxy) -> Any:
        if isinstance(input, Proxy) or not (self.training and dist.is_available() and dist.is_initialized()):
            return super().forward(input)
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        if dist.get_world_size(group) == 1:
            return super().forward(input)
        check_device("SyncBatchNorm", input)
        self._check_input_dim(input)
        norm = Norm(input, self.weight, self.bias, None, None, "batch_norm", 1, 1, self.eps, *fused(self.activation))
        running = None
        if self.running_mean is not None and self.running_var is not None and self.track_running_stats:
            running = Running(self.running_mean, self.running_var, self.momentum, self.num_batches_tracked)
            check_running("batch_norm", input, running.mean, running.var)
        check(norm)
        y: Tensor = _apply(input, self.weight, self.bias, norm, running, group)
        if running is not None and running.batches is not None:
            running.batches.add_(1)
        return y

    @classmethod
    def convert_sync_batchnorm(cls, module: _M, process_group: Any = None) -> _M:
        """Turn every batch norm of the model, PyTorch's or retrograd's, into a SyncBatchNorm in place."""
        for layer in module.modules():
            if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
                layer.__class__ = cls
                layer.process_group = process_group
        return module


class _SyncNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        running: Running | None,
        group: dist.ProcessGroup,
    ) -> Tensor:
        local = batch_norm_statistics(
            array(x, "SyncBatchNorm", "input"), channel_axis=norm.axis, num_threads=num_threads()
        )
        parts = _gathered(np.concatenate(([local.count], local.mean, local.var)), group)
        total = combine_statistics([NormStatistics(int(part[0]), *np.split(part[1:], 2)) for part in parts])
        if total.count == 1:
            raise ValueError("SyncBatchNorm: training needs more than 1 value per channel in all processes together")
        y, dense, ctx.saved = forward(norm, running, total)
        ctx.save_for_backward(*saved_for_backward(norm, dense, y, ctx.saved.problem.needs_y))
        ctx.count, ctx.group = total.count, group
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        again = partial(_backward, ctx.needs_input_grad, ctx.saved, ctx.count, ctx.group)
        return *differentiate_once("SyncBatchNorm", again, dy, *ctx.saved_tensors), None, None, None


# A compiler cannot trace what other processes take part in.
_apply: Callable[..., Any] = torch.compiler.disable(_SyncNorm.apply)


def _backward(
    need: tuple[bool, ...],
    saved: Saved,
    count: int,
    group: dist.ProcessGroup,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
) -> tuple[Tensor | None, ...]:
    cache, threads = saved.cache(x, weight, bias, y), num_threads()
    outgoing = array(dy, "SyncBatchNorm", GRADIENT)
    _, sum_dz, sum_dz_xhat = batch_norm_gradient_sums(outgoing, cache, num_threads=threads)
    dx = None
    if need[0]:
        dx = empty_like(x)
        out = array(dx, "SyncBatchNorm", "dx")
        total = sum(_gathered(np.stack((sum_dz, sum_dz_xhat)), group))  # added in the order of ranks
        sums = GradientSums(max(count, 1), *total)  # type: ignore[misc]
        batch_norm_backward(outgoing, cache, need=["dx"], sums=sums, out={"dx": out}, num_threads=threads)
    # The parameters' gradients are this process's, as for any layer: DistributedDataParallel averages them.
    dweight, dbias = (
        torch.from_numpy(values.astype(saved.problem.arithmetic)) if needed else None
        for values, needed in zip((sum_dz_xhat, sum_dz), need[1:3], strict=True)
    )
    return dx, dweight, dbias


def _gathered(values: Array, group: dist.ProcessGroup) -> list[Array]:
    """The values of every process, in the order of ranks."""
    mine = torch.from_numpy(values)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [part.numpy() for part in parts]
