"""Batch norm with the statistics of all shards."""

from __future__ import annotations

from typing import Any

from .. import graph, nn
from .group import Group

__all__ = ["SyncBatchNorm", "synchronize"]


class SyncBatchNorm(nn.BatchNorm):
    """Batch norm over all shards of a group. In training it runs inside :meth:`DataParallel.run`.

    Statistics and gradient sums are combined in the order of shards, so they do not depend on the number of ranks.
    Evaluation is the same as in :class:`retrograd.nn.BatchNorm`.
    """

    def __init__(self, channels: int, group: Group, **options: Any) -> None:
        """Options are as in :class:`retrograd.nn.BatchNorm`."""
        super().__init__(channels, **options)
        self.group = group

    def forward(self, x: Any) -> Any:
        if not self.training:
            return super().forward(x)
        mean, var = (self.running_mean, self.running_var) if self.running else (None, None)
        return graph.sync_batch_norm(
            x,
            exchange=self.group.exchange,
            running_mean=mean,
            running_var=var,
            update=self.update,
            channel_axis=self.channel_axis,
            **self._common(),
        )


def synchronize(model: nn.Module, group: Group) -> int:
    """Turn every :class:`retrograd.nn.BatchNorm` of a model into a :class:`SyncBatchNorm`; return how many.

    They stay the same objects with the same parameters, so an optimizer of the model stays valid. Call it before
    :class:`DataParallel` is created, which compares the layers of all ranks.
    """
    found = [module for _, module in model.modules() if type(module) is nn.BatchNorm]
    for module in found:
        module.__class__ = SyncBatchNorm
        assert isinstance(module, SyncBatchNorm)
        module.group = group
    return len(found)
