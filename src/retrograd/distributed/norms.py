"""Batch norm with the statistics of all shards."""

from __future__ import annotations

from typing import Any

import retrograd as rg

from .. import nn
from .group import Group
from .tree import Array

__all__ = ["SyncBatchNorm", "synchronize"]


class SyncBatchNorm(nn.BatchNorm):
    """Batch norm over all shards of a group. In training it runs inside :meth:`DataParallel.run`.

    Statistics and gradient sums are combined in the order of shards, so they do not depend on the number of ranks.
    Evaluation is that of :class:`retrograd.nn.BatchNorm`.
    """

    def __init__(self, channels: int, group: Group, **options: Any) -> None:
        """Options are those of :class:`retrograd.nn.BatchNorm`."""
        super().__init__(channels, **options)
        self.group = group

    def forward(self, x: Array) -> Array:
        if not self.training:
            return super().forward(x)
        part = rg.batch_norm_statistics(x, channel_axis=self.channel_axis, num_threads=self.num_threads)
        count, mean, var = rg.combine_statistics(self.group.exchange(part))
        result = rg.batch_norm_forward(
            x,
            *self._parameters_of_norm(),
            mean=mean,
            var=var,
            count=count,
            running_mean=self.running_mean if self.running else None,
            running_var=self.running_var if self.running else None,
            update=self.update,
            eps=self.eps,
            channel_axis=self.channel_axis,
            activation=self.activation,
            slope_from="input",
            out=self.reuse("y", x.shape, x.dtype),
            num_threads=self.num_threads,
        )
        return self._result(result)

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array | None:
        if not self.training:
            return super().backward(dy, accumulate=accumulate, need_dx=need_dx)
        cache: rg.NormCache = self.kept("cache")
        own = rg.batch_norm_gradient_sums(dy, cache, num_threads=self.num_threads)
        if self.affine:  # this shard's part of their gradients, which are added up with all others
            self.set_gradient("beta", own.sum_dz.astype(self.beta.dtype), accumulate)
            self.set_gradient("gamma", own.sum_dz_xhat.astype(self.gamma.dtype), accumulate)
        parts = self.group.exchange(own)
        if not need_dx:
            return None
        total = rg.GradientSums(*(sum(fields[1:], fields[0]) for fields in zip(*parts, strict=True)))
        out = rg.NormGradients(self.reuse("dx", cache.shape, cache.dtype))
        return rg.batch_norm_backward(dy, cache, need=("dx",), sums=total, out=out, num_threads=self.num_threads).dx


def synchronize(model: nn.Module, group: Group) -> int:
    """Turn every :class:`retrograd.nn.BatchNorm` of a model into a :class:`SyncBatchNorm`; return how many.

    They stay the same objects with the same parameters, so an optimizer of the model stays valid. Call it before
    :class:`DataParallel` makes its replicas.
    """
    found = [module for _, module in model.modules() if type(module) is nn.BatchNorm]
    for module in found:
        module.__class__ = SyncBatchNorm
        assert isinstance(module, SyncBatchNorm)
        module.group = group
    return len(found)
