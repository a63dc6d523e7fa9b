"""The order in which the values of shards are added: a binary tree over shard indices, whichever rank computed them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Node", "add_nodes", "cover"]

Array: TypeAlias = npt.NDArray[Any]
Node: TypeAlias = tuple[int, int]  # the sum over shards first to last, last excluded


def _middle(node: Node) -> int:
    return (node[0] + node[1] + 1) // 2


def cover(node: Node, owned: range) -> Iterator[Node]:
    """The largest nodes below this one whose shards are all owned, in order."""
    first, last = node
    if owned.start <= first and last <= owned.stop:
        yield node
    elif first < owned.stop and owned.start < last:
        middle = _middle(node)
        yield from cover((first, middle), owned)
        yield from cover((middle, last), owned)


def add_nodes(node: Node, known: Iterable[tuple[Node, Array]]) -> Array:
    """The sum of a node, from the sums of nodes that cover it. It is computed in the array of the first of them."""
    sums = dict(known)

    def add(node: Node) -> Array:
        if node in sums:
            return sums[node]
        middle = _middle(node)
        left, right = add((node[0], middle)), add((middle, node[1]))
        return np.add(left, right, out=left)

    return add(node)
