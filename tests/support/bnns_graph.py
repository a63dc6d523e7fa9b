"""What tests of BNNSGraph share: graphs of one operation, built and executed on arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from retrograd.bnns import BNNSGraph

Array = np.ndarray[Any, Any]


def executed(block: Callable[..., Any], arrays: Sequence[Array], **options: Any) -> list[Array]:
    """The outputs of a graph that a function ``block(builder, *tensors)`` builds, for these inputs."""
    context = made(block, arrays, **options)
    outputs = [np.zeros(spec.shape, spec.dtype) for spec in context.entry(None).plan([a.shape for a in arrays]).outputs]
    context.executeFunction(arguments=[*outputs, *arrays])
    return outputs


def made(block: Callable[..., Any], arrays: Sequence[Array], **options: Any) -> BNNSGraph.Context:
    """The context of a graph whose arguments are as these arrays."""

    def build(builder: BNNSGraph.Builder) -> Any:
        tensors = [
            builder.argument(name=f"x{i}", dataType=array.dtype, shape=array.shape) for i, array in enumerate(arrays)
        ]
        return block(builder, *tensors)

    return BNNSGraph.makeContext(build, **options)
