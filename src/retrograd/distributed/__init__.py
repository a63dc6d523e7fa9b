"""Training on more than one machine, with MPI: gradient sums and synchronised batch norm for ``retrograd.nn``.

A batch is split into a fixed number of shards. Whichever rank computes a shard, the gradients of all shards are added
in a fixed tree: 1, 2, 4 and 8 ranks give the same bits. See ``docs/distributed.md``.
"""

from .ending import RankError
from .group import Group
from .launch import launched_ranks, world
from .norms import SyncBatchNorm, synchronize
from .parallel import DataParallel, Shard

__all__ = ["DataParallel", "Group", "RankError", "Shard", "SyncBatchNorm", "launched_ranks", "synchronize", "world"]
