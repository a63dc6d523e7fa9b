"""The LSTM layer."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import graph
from ..ops.recurrent.types import LstmActivations, LstmWeights
from .init import Rng, generator, glorot_bound, orthogonal, uniform
from .layers import Embedding, new_stream, next_seed
from .module import Buffer, Layer, Module, Parameter

__all__ = ["LSTM", "LstmState"]


class LstmState(NamedTuple):
    """Hidden and cell states of all cells, ``[cells, N, H]`` each."""

    h: Any
    c: Any


class LstmCell(Module):
    """The parameters of one direction of one layer, gates in the order i f g o."""

    wx: Parameter
    wh: Parameter

    def weights(self) -> LstmWeights:
        found: Any = [self._variables.get(name) for name in LstmWeights._fields]
        return LstmWeights(*found)

    def describe(self) -> str:
        return ", ".join(f"{name}: {parameter.shape}" for name, parameter in self._variables.items())


class LSTM(Layer):
    """An LSTM over ``x [T, N, inputs]`` (``[N, T, inputs]`` if `batch_first`); y has ``hidden`` columns per direction.

    The cells are children: ``layer0``, ``layer1`` and so on, with ``layer0_reverse`` next to ``layer0`` if
    `bidirectional`. Each has ``wx [4H, I]``, ``wh [4H, H]``, and optionally ``b [4H]`` and ``peephole``. With
    ``last=True`` y is only the last output of each sequence, ``[N, hidden]``, of the backward direction the first.

    With an `embedding`, which becomes a child, x holds integer indices ``[T, N]`` into its table. The result is the
    same as with an embedding before the LSTM, but each row of the table is multiplied once, however often it occurs.

    `init`: "pytorch" draws all parameters uniformly from ±1/sqrt(hidden); "keras" draws wx from Glorot's uniform
    distribution and wh with orthonormal columns, and sets b = 0 and peephole = 0. Both add `forget_bias` to the bias of
    the forget gate. With `recompute` training keeps nothing for the gradient, but recomputes the sequence.
    """

    stream: Buffer  # if there is dropout

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        embedding: Embedding | None = None,
        layers: int = 1,
        bidirectional: bool = False,
        batch_first: bool = False,
        last: bool = False,
        bias: bool = True,
        peephole: Literal["diagonal", "full"] | None = None,
        output_gate_reads: Literal["new", "old"] = "new",
        activations: LstmActivations | None = None,
        dropout: float = 0.0,
        recompute: bool = False,
        forget_bias: float = 1.0,
        init: Literal["pytorch", "keras"] = "pytorch",
        dtype: npt.DTypeLike = np.float32,
        rng: Rng = None,
    ) -> None:
        if layers < 1 or inputs < 0 or hidden < 1:
            raise ValueError(
                f"LSTM: layers is {layers}, inputs is {inputs}, hidden is {hidden}; the minima are 1, 0 and 1"
            )
        if init not in ("pytorch", "keras"):
            raise ValueError(f"LSTM: init is {init!r}; there are 'pytorch' and 'keras'")
        if peephole not in (None, "diagonal", "full"):
            raise ValueError(f"LSTM: peephole is {peephole!r}; there are 'diagonal' and 'full'")
        if not 0 <= dropout < 1:
            raise ValueError(f"LSTM: dropout is {dropout}, must be at least 0 and below 1")
        if embedding is not None and embedding.table.shape[1] != inputs:
            raise ValueError(f"LSTM: inputs is {inputs}, but the embedding has {embedding.table.shape[1]} features")
        self.embedding = embedding
        self.inputs, self.hidden, self.layers, self.bidirectional = inputs, hidden, layers, bidirectional
        self.dropout, self.recompute, self.last = dropout, recompute, last
        self.batch_first, self.output_gate_reads = batch_first, output_gate_reads
        self.activations = activations or LstmActivations()
        draw = generator(rng)
        directions = ("", "_reverse") if bidirectional else ("",)
        for layer in range(layers):
            for direction in directions:
                columns = inputs if layer == 0 else len(directions) * hidden
                cell = _new_cell(draw, columns, hidden, bias, peephole, forget_bias, init, dtype)
                setattr(self, f"layer{layer}{direction}", cell)
        if dropout:
            self.stream = new_stream(draw)

    def cells(self) -> list[LstmCell]:
        """The cells in the order of their states."""
        return [child for child in self._children.values() if isinstance(child, LstmCell)]

    def forward(self, x: Any, state: Any = None, *, lengths: Any = None) -> Any:
        """Return y of the sequences from the initial `state`, zeros if None. `lengths` [N] are their steps."""
        y, final = self.run(x, state, lengths=lengths)
        if not self.last:
            return y
        if not self.bidirectional:
            return final.h[-1]
        return graph.concatenate([final.h[-2], final.h[-1]], -1)

    def run(self, x: Any, state: Any = None, *, lengths: Any = None) -> tuple[Any, LstmState]:
        """Return y, and the final state, from which the next part of the sequences can go on."""
        axes = ("(N, T)" if self.batch_first else "(T, N)") + ("" if self.embedding is not None else " and inputs")
        if x.ndim != (3 if self.embedding is None else 2) or (self.embedding is None and x.shape[2] != self.inputs):
            size = "" if self.embedding is not None else f" = {self.inputs}"
            raise ValueError(f"LSTM: x has shape {x.shape}, must have the axes {axes}{size}")
        sequence, table = x, None
        # Few indices are looked up, many are multiplied with the whole table.
        if self.embedding is not None and x.size <= len(self.embedding.table):
            sequence = self.embedding(x)
        elif self.embedding is not None:
            table = self.embedding.table
        h0, c0 = state if state is not None else (None, None)
        drops = self.training and self.dropout > 0
        seed = next_seed(self.stream) if drops else 0

        def call(sequence: Any) -> tuple[Any, Any, Any]:
            return graph.lstm(
                sequence,
                [cell.weights() for cell in self.cells()],
                h0,
                c0,
                table=table,
                bidirectional=self.bidirectional,
                batch_first=self.batch_first,
                lengths=lengths,
                activations=self.activations,
                output_gate_reads=self.output_gate_reads,
                dropout=self.dropout if drops else 0.0,
                seed=seed,
            )

        y, h, c = graph.recompute(call)(sequence) if self.recompute else call(sequence)
        return y, LstmState(h, c)

    def describe(self) -> str:
        extra = f", dropout={self.dropout}" if self.dropout else ""
        return f"{self.inputs}, {self.hidden}, layers={self.layers}, bidirectional={self.bidirectional}{extra}"


def _new_cell(
    rng: np.random.Generator,
    inputs: int,
    hidden: int,
    bias: bool,
    peephole: str | None,
    forget_bias: float,
    init: str,
    dtype: npt.DTypeLike,
) -> LstmCell:
    cell, bound = LstmCell(), 1.0 / math.sqrt(hidden)
    wx_shape, wh_shape, b_shape = (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,)
    p_shape = wh_shape if peephole == "full" else b_shape
    if init == "pytorch":
        wx, wh, b, p = (uniform(rng, shape, bound, np.float64) for shape in (wx_shape, wh_shape, b_shape, p_shape))
    else:
        wx = uniform(rng, wx_shape, glorot_bound(inputs, 4 * hidden), np.float64)
        wh = orthogonal(rng, wh_shape, np.float64)
        b, p = np.zeros(b_shape), np.zeros(p_shape)
    b[hidden : 2 * hidden] += forget_bias
    parameters = {"wx": wx, "wh": wh, **({"b": b} if bias else {}), **({"peephole": p} if peephole else {})}
    for name, values in parameters.items():
        setattr(cell, name, Parameter(values.astype(dtype)))
    return cell
