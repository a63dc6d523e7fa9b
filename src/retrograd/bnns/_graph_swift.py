"""Swift's namespace ``BNNSGraph``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from . import _graph_builder as builder
from . import _graph_context as context
from . import _graph_values as values


class BNNSGraph:
    """Graphs in Swift's spelling: ``BNNSGraph.makeContext(block)``. The optimizers are retrograd's."""

    Adam: TypeAlias = builder.Adam
    Builder: TypeAlias = builder.Builder
    CompileOptions: TypeAlias = values.CompileOptions
    Context: TypeAlias = context.Context
    Error: TypeAlias = values.GraphError
    OptimizationPreference: TypeAlias = values.OptimizationPreference
    Optimizer: TypeAlias = builder.Optimizer
    SGD: TypeAlias = builder.SGD
    Shape: TypeAlias = values.Shape

    @staticmethod
    def makeContext(block: Callable[[Builder], Any], *, options: CompileOptions | None = None) -> Context:
        """A context of the graph that a function builds. It gets a builder, and returns the output tensors.

        What the function raises is not changed: errors name the operation and its operands.
        """
        return context.make_context(block, options)
