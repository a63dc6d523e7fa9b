"""Swift's namespace ``BNNSGraph``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._graph_builder import SGD, Adam, Builder, Optimizer
from ._graph_context import Context, make_context
from ._graph_values import CompileOptions, GraphError, OptimizationPreference, Shape


class BNNSGraph:
    """Graphs in Swift's spelling: ``BNNSGraph.makeContext(block)``. ``SGD`` and ``Adam`` are retrograd's."""

    Adam, Builder, CompileOptions, Context = Adam, Builder, CompileOptions, Context
    Error, OptimizationPreference, Optimizer, SGD, Shape = GraphError, OptimizationPreference, Optimizer, SGD, Shape

    @staticmethod
    def makeContext(block: Callable[[Builder], Any], *, options: CompileOptions | None = None) -> Context:
        """A context of the graph that a function builds. It gets a builder, and returns the output tensors.

        What the function raises is not changed: errors name the operation and its operands.
        """
        return make_context(block, options)
