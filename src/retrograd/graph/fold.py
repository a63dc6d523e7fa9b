"""Folding: nodes that the engine computes together with a neighbour, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence

from .tensor import Node


def folded(nodes: Sequence[Node]) -> list[Node]:
    """The nodes with activations folded into normalizations and convolutions."""
    return list(nodes)
