"""Types of the LSTM functions' arguments: the parameters of a cell, and the activations of its gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from .._types import Array
from ..activation import Activation

# One array of all gates, [4H, ...] or [4, H, ...], or four arrays [H, ...]; gates in the order i f g o.
GateArrays: TypeAlias = Array | Sequence[Array | None]
Buffer: TypeAlias = Array | bytearray | memoryview


class LstmWeights(NamedTuple):
    """The parameters of one cell (one layer, one direction), or their gradients. Gates in the order i f g o.

    The shapes are ``wx`` ``[4H, I]``, ``wh`` ``[4H, H]``, ``b`` ``[4H]``, and `peephole` ``[4H]`` for diagonal or
    ``[4H, H]`` for full matrices. Each may also be given as ``[4, H, ...]``, or as four arrays ``[H, ...]``, one per
    gate; those of ``b`` and `peephole` may be None. Strides are arbitrary.
    """

    wx: GateArrays | None
    wh: GateArrays | None
    b: GateArrays | None = None
    peephole: GateArrays | None = None


class LstmActivations(NamedTuple):
    """The activations of the gates i f g o, and `h`, which is applied to the cell state to compute the output."""

    i: str | Activation = "sigmoid"
    f: str | Activation = "sigmoid"
    g: str | Activation = "tanh"
    o: str | Activation = "sigmoid"
    h: str | Activation = "tanh"


Weights: TypeAlias = LstmWeights | Sequence[Any]
# wx, wh, b, peephole as the engine takes them: each an array, a tuple of four (or None), or None.
Cell: TypeAlias = tuple[Any, ...]
