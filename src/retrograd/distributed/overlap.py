"""Sums of gradients, computed while backward still computes others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple

from .. import nn
from .group import Group
from .tree import Array

__all__ = ["EarlySums"]

_BUCKET: Final = 2**18  # bytes at least, because a sum takes several messages whatever its size


class _Bucket(NamedTuple):
    """Consecutive gradients of one dtype, and the modules they belong to, by position in ``model.modules()``."""

    dtype: int
    elements: slice
    modules: frozenset[int]


class EarlySums:
    """Inside ``with``: adds the gradients of all shards in a thread, bucket by bucket, from the last layers on.

    `flat` and `total` have one item per dtype: the gradients of each shard of this rank, and the array for their sum.
    Every rank adds all buckets in the same order, even after a failure, so that no rank waits in vain for another.
    """

    def __init__(
        self, models: Sequence[nn.Module], group: Group, flat: Sequence[Sequence[Array]], total: Sequence[Array]
    ) -> None:
        self._group, self._flat, self._total = group.duplicate(), flat, total
        self._buckets = sorted(_buckets(models[0], total), key=lambda bucket: min(bucket.modules), reverse=True)
        self._all = range(len(list(models[0].modules())))
        self._waiting: list[set[int]] = [set(self._all) for _ in models]  # modules without gradients, by shard
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(1, "retrograd-sums")
        self._sums: Future[None] | None = None
        for shard, model in enumerate(models):
            for position, (name, module) in enumerate(model.modules()):
                inside = range(position, position + len(list(module.modules())))
                module.backward = self._watched(module.backward, shard, inside, name or type(module).__name__)

    def _watched(self, backward: Callable[..., Any], shard: int, inside: range, name: str) -> Callable[..., Any]:
        """A module's backward. After it, the gradients of the module and of all modules inside it are complete."""

        def watched(*arguments: Any, **options: Any) -> Any:
            if inside.start not in self._waiting[shard]:
                raise RuntimeError(
                    f"DataParallel.run: backward of {name} ran twice, but with overlap=True its gradients are sent "
                    "after the first time. Run it once, or use overlap=False"
                )
            dx = backward(*arguments, **options)
            self._complete(shard, inside)
            return dx

        return watched

    def _complete(self, shard: int, modules: range) -> None:
        with self._changed:
            self._waiting[shard].difference_update(modules)
            self._changed.notify()

    def __enter__(self) -> None:
        """Begin to wait for the gradients of all shards of this rank."""
        for waiting in self._waiting:
            waiting.update(self._all)
        self._sums = self._pool.submit(self._add)

    def __exit__(self, *_: object) -> None:
        """Wait for the last sum, but no longer for modules: those left had no backward, or it failed."""
        assert self._sums is not None
        for shard in range(len(self._waiting)):
            self._complete(shard, self._all)
        self._sums.result()

    def _add(self) -> None:
        for dtype, elements, modules in self._buckets:
            with self._changed:
                self._changed.wait_for(partial(self._are_complete, modules))
            self._group.sum([shard[elements] for shard in self._flat[dtype]], self._total[dtype][elements])

    def _are_complete(self, modules: frozenset[int]) -> bool:
        return all(map(modules.isdisjoint, self._waiting))


def _buckets(model: nn.Module, total: Sequence[Array]) -> Iterator[_Bucket]:
    """Cut the gradients of each dtype into buckets, from the last to the first."""
    positions = {name: position for position, (name, _) in enumerate(model.modules())}
    for dtype, array in enumerate(total):
        first = last = array.size
        modules: set[int] = set()
        for name, gradient in reversed(model.gradients().items()):
            if gradient.dtype != array.dtype:
                continue
            first -= gradient.size
            modules.add(positions[name.rpartition(".")[0]])
            if (last - first) * array.itemsize >= _BUCKET or first == 0:
                yield _Bucket(dtype, slice(first, last), frozenset(modules))
                last, modules = first, set()
