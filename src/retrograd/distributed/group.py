"""The ranks of a run and the shards of its batches: which rank computes which shard, and how values are exchanged."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn, TypeVar

import numpy as np

from .ending import ENDED, Message, RankError, abort, end_together
from .tree import Array, Node, add_nodes, cover

__all__ = ["Group"]

_T = TypeVar("_T")


class _Current(threading.local):
    shard: int | None = None


class Group:
    """Ranks that train together, and the number of shards that each batch is split into.

    `comm` is an mpi4py communicator; without one there is one rank. Results depend on the number of shards, not on the
    number of ranks. A rank computes a contiguous range of shards, each in a thread.

    With several ranks, an uncaught exception of this process, in any thread, is printed with its rank and ends all
    ranks. All ranks make the same calls in the same order, with the same number of shards; where they do not, all
    raise an error.
    """

    def __init__(self, shards: int, comm: Any = None) -> None:
        self._comm = comm
        self.rank: Final[int] = 0 if comm is None else comm.Get_rank()
        self.size: Final[int] = 1 if comm is None else comm.Get_size()
        if self.size > 1:
            end_together()
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
        self._counts: list[set[int]] = [set() for _ in self.local]  # sizes of batches that each shard has split
        self._failed: Exception | None = None  # another rank's failure, or this one's, of which all ranks know

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # layers of replicas belong to the same group

    def _owned(self, rank: int) -> range:
        return range(rank * self.shards // self.size, (rank + 1) * self.shards // self.size)

    def with_shards(self, shards: int) -> Group:
        """A group of the same ranks with another number of shards."""
        return Group(shards, self._comm)

    def part(self, count: int, shard: int) -> slice:
        """The samples of a batch of `count` that belong to a shard."""
        if count < self.shards:
            raise ValueError(f"Group.part: a batch of {count} cannot be split into {self.shards} shards")
        if self._current.shard is not None:
            self._counts[self._current.shard - self.local.start].add(count)
        return slice(shard * count // self.shards, (shard + 1) * count // self.shards)

    def rank_part(self, count: int) -> slice:
        """The samples of a batch of `count` that belong to the shards of this rank."""
        return slice(self.part(count, self.local[0]).start, self.part(count, self.local[-1]).stop)

    # ---- values ------------------------------------------------------------------------------------------------------

    def broadcast(self, value: _T) -> _T:
        """Return rank 0's value on every rank."""
        result: _T = self._share("Group.broadcast", None if self.rank else value)[0]
        return result

    def agree(self, call: str, facts: Mapping[str, str], advice: str = "") -> None:
        """Raise an error on every rank if these facts, such as ``{"parameter w": "is float32"}``, are not the same.

        It is a ValueError on the first rank that differs from most, and a :class:`RankError` on the others. `call` is
        the function that the message starts with, and `advice` its end.
        """
        if self.size == 1:
            return
        digest = hashlib.sha256(repr(list(facts.items())).encode()).digest()
        if len(set(self._share(call, digest))) > 1:
            self.refuse_differences(call, self._share(call, dict(facts)), advice)

    def refuse_differences(self, call: str, facts: Sequence[Mapping[str, str]], advice: str = "") -> None:
        """Like :meth:`agree`, with the facts of every rank: no message is sent."""
        pair = _odd_and_usual([tuple(each.items()) for each in facts])
        if pair is None:
            return
        odd, usual = pair
        known, other = facts[usual], facts[odd]
        name = next(name for name in (*known, *other) if known.get(name) != other.get(name))
        here, there = (each.get(name, "is missing") for each in (other, known))
        if here.split(" ", 1)[0] == there.split(" ", 1)[0]:  # the verb
            there = there.split(" ", 1)[1]
        self._refuse(odd, f"{call}: {name} {here} on rank {odd}, but {there} on rank {usual}{advice}")

    def _refuse(self, odd: int, text: str) -> NoReturn:
        """Raise an error on every rank, because of what rank `odd` does."""
        self._failed = ValueError(text) if odd == self.rank else RankError(text)
        raise self._failed

    def abort(self, code: int) -> None:
        """End the processes of all ranks at once. mpirun's exit code is `code`."""
        if self._comm is not None:
            abort(code)

    def run(self, work: Callable[[int], _T]) -> list[_T]:
        """Call ``work(shard)`` for every shard, each on its rank, and return all results, in the order of shards.

        If it raises an exception anywhere, every rank raises one: a :class:`RankError` where the failure was on
        another rank. So do shards that have split batches of different sizes (:meth:`part`): if a shard has split any,
        all that have must have one size in common.
        """
        for counts in self._counts:
            counts.clear()
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
                self._share("Group.run", None, f"{type(cause).__name__}: {cause}")
            raise cause
        own = [(future.result(), counts) for future, counts in zip(futures, self._counts, strict=True)]
        shards = [shard for rank in self._share("Group.run", own) for shard in rank]
        self._check_counts([counts for _, counts in shards])
        return [result for result, _ in shards]

    def _check_counts(self, counts: list[set[int]]) -> None:
        """Refuse batches of different sizes; `counts` are those that each shard has split."""
        split = [shard for shard, sizes in enumerate(counts) if sizes]
        if not split or set.intersection(*(counts[shard] for shard in split)):
            return
        pair = _odd_and_usual([frozenset(counts[shard]) for shard in split])
        assert pair is not None  # equal sets have an intersection
        odd, usual = (split[at] for at in pair)
        ranks = [next(rank for rank in range(self.size) if shard in self._owned(rank)) for shard in (odd, usual)]
        here, there = (f" on rank {rank}" if self.size > 1 else "" for rank in ranks)
        self._refuse(
            ranks[0],
            f"Group.run: the batch has {_listed(counts[odd])} samples for shard {odd}{here}, "
            f"but {_listed(counts[usual])} for shard {usual}{there}",
        )

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
        self._all = [value for values in self._share("Group.exchange", list(self._given)) for value in values]

    def _share(self, call: str, values: Any, failure: str | None = None) -> list[Any]:
        """Return every rank's values.

        Ranks wait for each other only here, apart from sums, so that all know of a failure, and of a rank that is not
        in the same call.
        """
        if self._comm is None:
            return [values]
        messages: list[Message] = self._comm.allgather(Message(call, self.shards, failure, values))
        if failure is not None:
            self._failed = RankError(f"rank {self.rank} failed: {failure}")
            return []
        for rank, message in enumerate(messages):
            if message.failure is not None:
                self._failed = RankError(f"rank {rank} failed: {message.failure}")
                raise self._failed
            if message.call == ENDED:
                self._failed = RankError(f"{call}: rank {rank} has ended, and the others wait for it")
                raise self._failed
        self.refuse_differences("Group", [{"the call": f"is {message.call}"} for message in messages])
        self.refuse_differences(call, [{"the number of shards": f"is {message.shards}"} for message in messages])
        return [message.values for message in messages]

    # ---- sums --------------------------------------------------------------------------------------------------------

    def sum(self, parts: Sequence[Array], out: Array) -> None:
        """Add the arrays of all shards in the fixed tree. `parts` belong to this rank's shards, and are overwritten.

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


def _odd_and_usual(values: Sequence[Hashable]) -> tuple[int, int] | None:
    """The first position with another value than most, or than the first if as many differ, and the first of those."""
    usual, count = Counter(values).most_common(1)[0]
    if count == len(values):
        return None
    return next(at for at, value in enumerate(values) if value != usual), values.index(usual)


def _listed(numbers: set[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))
