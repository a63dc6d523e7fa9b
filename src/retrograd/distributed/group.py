"""The ranks of a run and the shards of its batches: which rank computes which shard, and how values are exchanged."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np

from .tree import Array, Node, add_nodes, cover

__all__ = ["Group", "RankError"]

_T = TypeVar("_T")


class RankError(RuntimeError):
    """Another rank failed. The message is its error."""


class _Current(threading.local):
    shard: int | None = None


class Group:
    """Ranks that train together, and the number of shards that each batch is split into.

    `comm` is an mpi4py communicator; without one there is one rank. Results depend on the number of shards, not on the
    number of ranks. A rank computes a contiguous range of shards, each in a thread.
    """

    def __init__(self, shards: int, comm: Any = None) -> None:
        self._comm = comm
        self.rank: Final[int] = 0 if comm is None else comm.Get_rank()
        self.size: Final[int] = 1 if comm is None else comm.Get_size()
        if shards < 1:
            raise ValueError(f"Group: shards is {shards}, must be at least 1")
        if self.size > shards:
            raise ValueError(
                f"Group: there are {self.size} ranks, but only {shards} shards: a rank needs at least one shard"
            )
        self.shards: Final = shards
        self.local: Final = self._owned(self.rank)
        self._nodes: Final = [list(cover((0, shards), self._owned(rank))) for rank in range(self.size)]
        self._current: Final = _Current()
        self._pool: ThreadPoolExecutor | None = None
        self._barrier: threading.Barrier | None = None
        self._given: list[Any] = [None] * len(self.local)
        self._all: list[Any] = []
        self._failed: RankError | None = None  # another rank's failure, or this one's, of which all ranks know

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # layers of replicas belong to the same group

    def _owned(self, rank: int) -> range:
        return range(rank * self.shards // self.size, (rank + 1) * self.shards // self.size)

    def with_shards(self, shards: int) -> Group:
        """A group of the same ranks with another number of shards."""
        return Group(shards, self._comm)

    def duplicate(self) -> Group:
        """A group of the same ranks and shards for another thread: its messages do not mix with those of this one."""
        if self._comm is None:
            return Group(self.shards)
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError("Group.duplicate: this MPI cannot be called by several threads (MPI_THREAD_MULTIPLE)")
        return Group(self.shards, self._comm.Dup())

    def part(self, count: int, shard: int) -> slice:
        """The samples of a batch of `count` that belong to a shard."""
        if count < self.shards:
            raise ValueError(f"Group.part: a batch of {count} cannot be split into {self.shards} shards")
        return slice(shard * count // self.shards, (shard + 1) * count // self.shards)

    def rank_part(self, count: int) -> slice:
        """The samples of a batch of `count` that belong to the shards of this rank."""
        return slice(self.part(count, self.local[0]).start, self.part(count, self.local[-1]).stop)

    # ---- values ------------------------------------------------------------------------------------------------------

    def broadcast(self, value: _T) -> _T:
        """Return rank 0's value on every rank."""
        if self._comm is None:
            return value
        result: _T = self._comm.bcast(value)
        return result

    def abort(self, code: int) -> None:
        """End the processes of all ranks at once. mpirun's exit code is `code`."""
        if self._comm is not None:
            self._comm.Abort(code)

    def run(self, work: Callable[[int], _T]) -> list[_T]:
        """Call ``work(shard)`` for every shard, each on its rank, and return all results, in the order of shards.

        If it raises an exception anywhere, every rank raises one: a :class:`RankError` where the failure was on
        another rank.
        """
        if self.shards == 1:
            return [self._as_shard(0, work)]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(self.local), "retrograd-shard")
        self._barrier = threading.Barrier(len(self.local), self._gather)
        self._failed = None
        futures = [self._pool.submit(self._as_shard, shard, work) for shard in self.local]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            # A broken barrier is only what the other threads see of the failure.
            cause = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
            if self._failed is None:
                self._share(None, f"{type(cause).__name__}: {cause}")
            raise cause
        return [result for results in self._share([future.result() for future in futures]) for result in results]

    def _as_shard(self, shard: int, work: Callable[[int], _T]) -> _T:
        self._current.shard = shard
        try:
            return work(shard)
        except BaseException:
            if self._barrier is not None:
                self._barrier.abort()
            raise
        finally:
            self._current.shard = None

    def exchange(self, value: _T) -> list[_T]:
        """Inside :meth:`run`: wait for all shards, and return the values of all, in the order of shards."""
        shard = self._current.shard
        if shard is None:
            raise RuntimeError("Group.exchange: it must be called by the work that Group.run runs")
        if self.shards == 1:
            return [value]
        assert self._barrier is not None
        self._given[shard - self.local.start] = value
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            if self._failed is not None:
                raise self._failed from None
            raise
        # It stays the same until all threads of this rank have reached the next exchange.
        return self._all

    def _gather(self) -> None:
        self._all = [value for values in self._share(list(self._given)) for value in values]

    def _share(self, values: Any, failure: str | None = None) -> list[Any]:
        """Return every rank's values. Inside `run` ranks wait for each other only here, so failures reach them all."""
        answers = [(failure, values)] if self._comm is None else self._comm.allgather((failure, values))
        for rank, (text, _) in enumerate(answers):
            if text is not None:
                self._failed = RankError(f"rank {rank} failed: {text}")
                if failure is None:
                    raise self._failed
        return [values for _, values in answers]

    # ---- sums --------------------------------------------------------------------------------------------------------

    def sum(self, parts: Sequence[Array], out: Array) -> None:
        """Add the arrays of all shards in the fixed tree. `parts` are those of this rank's shards, and are overwritten.

        Each rank adds one slice of the arrays, and then all ranks gather the slices: 2 (R - 1) / R times the size of
        `out` is sent and received by each of R ranks, if R is a power of two, and up to log2(shards) times that
        otherwise.
        """
        mine = [((shard, shard + 1), part) for shard, part in zip(self.local, parts, strict=True)]
        sums = [add_nodes(node, mine) for node in self._nodes[self.rank]]
        if self._comm is None:
            out[...] = sums[0]
            return
        edges = [rank * out.size // self.size for rank in range(self.size + 1)]
        lengths = np.diff(edges)
        # To each rank its slice of every node.
        sent = (
            sums[0] if len(sums) == 1 else np.concatenate([s[a:b] for a, b in itertools.pairwise(edges) for s in sums])
        )
        length = int(lengths[self.rank])
        received = np.empty(length * sum(map(len, self._nodes)), out.dtype)
        self._comm.Alltoallv(
            (sent, (lengths * len(sums)).tolist()), (received, [length * len(nodes) for nodes in self._nodes])
        )
        nodes: list[Node] = [node for nodes in self._nodes for node in nodes]
        shares = [(node, received[i * length : (i + 1) * length]) for i, node in enumerate(nodes)]
        self._comm.Allgatherv(add_nodes((0, self.shards), shares), (out, lengths.tolist()))
