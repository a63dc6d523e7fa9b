"""The cells of recurrent layers: their parameters, gates and activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from .._types import Array
from ..activation import Activation

# One array of all gates, [GH, ...] or [G, H, ...], or one array [H, ...] for each gate.
# Also arrays of other libraries, and tensors, with which there are no common types.
GateArrays: TypeAlias = Array | Sequence[Array | None] | Any
Buffer: TypeAlias = Array | bytearray | memoryview


class LstmWeights(NamedTuple):
    """The parameters of one LSTM cell (one layer, one direction), or their gradients. Gates in the order i f g o.

    The shapes are ``wx`` ``[4H, I]``, ``wh`` ``[4H, H]``, ``b`` ``[4H]``, and `peephole` ``[4H]`` for diagonal or
    ``[4H, H]`` for full matrices. Each may also be given as ``[4, H, ...]``, or as four arrays ``[H, ...]``, one per
    gate; those of ``b`` and `peephole` may be None. Strides are arbitrary.

    With a `projection` ``[P, H]`` the hidden state has P elements, and ``wh`` is ``[4H, P]``. With layer normalization
    there are ``gamma_x`` and ``gamma_h`` ``[4H]``, and of the cell state ``gamma_c`` and ``beta_c`` ``[H]``.
    """

    wx: GateArrays | None
    wh: GateArrays | None
    b: GateArrays | None = None
    peephole: GateArrays | None = None
    projection: Array | None = None
    gamma_x: GateArrays | None = None
    gamma_h: GateArrays | None = None
    gamma_c: Array | None = None
    beta_c: Array | None = None


class GruWeights(NamedTuple):
    """The parameters of one GRU cell (one layer, one direction), or their gradients. Gates in the order r z n.

    The shapes are ``wx`` ``[3H, I]``, ``wh`` ``[3H, H]``, and ``b`` and ``bh`` ``[3H]``: the biases of the products
    with x and with the hidden state. Each may also be given as ``[3, H, ...]``, or as three arrays ``[H, ...]``; those
    of the biases may be None. Strides are arbitrary. With layer normalization there are ``gamma_x`` and ``gamma_h``
    ``[3H]``.
    """

    wx: GateArrays | None
    wh: GateArrays | None
    b: GateArrays | None = None
    bh: GateArrays | None = None
    gamma_x: GateArrays | None = None
    gamma_h: GateArrays | None = None


class RnnWeights(NamedTuple):
    """The parameters of one RNN cell (one layer, one direction), or their gradients.

    The shapes are ``wx`` ``[H, I]``, ``wh`` ``[H, H]`` and ``b`` ``[H]``; strides are arbitrary. With layer
    normalization there are ``gamma_x`` and ``gamma_h`` ``[H]``.
    """

    wx: GateArrays | None
    wh: GateArrays | None
    b: GateArrays | None = None
    gamma_x: GateArrays | None = None
    gamma_h: GateArrays | None = None


class LstmActivations(NamedTuple):
    """The activations of the gates i f g o, and `h`, which is applied to the cell state to compute the output."""

    i: str | Activation = "sigmoid"
    f: str | Activation = "sigmoid"
    g: str | Activation = "tanh"
    o: str | Activation = "sigmoid"
    h: str | Activation = "tanh"


class GruActivations(NamedTuple):
    """The activations of the gates r z n."""

    r: str | Activation = "sigmoid"
    z: str | Activation = "sigmoid"
    n: str | Activation = "tanh"


class RnnActivations(NamedTuple):
    """The activation of an RNN."""

    h: str | Activation = "tanh"


WeightsType: TypeAlias = type[LstmWeights] | type[GruWeights] | type[RnnWeights]
ActivationsType: TypeAlias = type[LstmActivations] | type[GruActivations] | type[RnnActivations]
Activations: TypeAlias = LstmActivations | GruActivations | RnnActivations
Weights: TypeAlias = LstmWeights | GruWeights | RnnWeights | Sequence[Any]
# The parameters as the engine takes them: each an array, a tuple of one array (or None) per gate, or None.
Cell: TypeAlias = tuple[Any, ...]

# Parameters that all gates share.
UNGATED: Final = frozenset(("projection", "gamma_c", "beta_c"))


class CellType(NamedTuple):
    """What distinguishes the cells."""

    name: str
    title: str  # in messages
    gates: str
    weights: WeightsType
    activations: ActivationsType
    norms: tuple[str, ...]  # the places of layer normalization, in the order of the engine's codes from 1 on
    has_cells: bool  # a cell state beside the hidden state
    first_norm: int  # the index of the first parameter of layer normalization; they are the last

    @property
    def fields(self) -> tuple[str, ...]:
        return self.weights._fields


LSTM: Final = CellType("lstm", "an LSTM", "ifgo", LstmWeights, LstmActivations, ("haste", "cell"), True, 5)
GRU: Final = CellType("gru", "a GRU", "rzn", GruWeights, GruActivations, ("haste",), False, 4)
RNN: Final = CellType("rnn", "an RNN", "h", RnnWeights, RnnActivations, ("haste",), False, 3)
CELL_TYPES: Final = {cell.name: cell for cell in (LSTM, GRU, RNN)}


class CellOptions(NamedTuple):
    """What a cell computes, besides the shapes: the options of its function, unchecked. Hashable."""

    cell: str  # of CELL_TYPES
    activations: Activations
    kind: str = "after"  # GRU
    flip: bool = False  # GRU
    output_gate_reads: str = "new"  # LSTM
    coupled: bool = False  # LSTM
    clip: float | None = None
    cell_clip: float | None = None  # LSTM
    norm: str | None = None
    norm_eps: float = 1e-5
