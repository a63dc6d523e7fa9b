"""All named problems for the operations of graphs."""

from __future__ import annotations

from .graph_case import GraphCase
from .graph_layers import LAYER_CASES
from .graph_tensors import TENSOR_CASES

__all__ = ["graph_cases"]


def graph_cases() -> list[GraphCase]:
    return [case for make in (*TENSOR_CASES, *LAYER_CASES) for case in make()]
