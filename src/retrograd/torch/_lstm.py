"""An LSTM over tensors by the array functions: forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops._types import Array
from ..ops.activation import Activation
from ..ops.recurrent import LstmActivations, LstmCache, LstmWeights, lstm_backward, lstm_forward
from ._arrays import array, num_threads
from ._norm import GRADIENT, fused_activation


class Lstm(NamedTuple):
    """The arguments of an LSTM: those of the operator, in its order."""

    x: Tensor
    h0: Tensor | None
    c0: Tensor | None
    weights: Sequence[Tensor]  # of each cell in turn, in PyTorch's order
    lengths: Tensor | None  # of the samples
    batch_sizes: Tensor | None  # or of the steps
    seed: Tensor | None  # of the dropout
    keep: bool  # what backward needs
    bidirectional: bool
    batch_first: bool
    bias: bool
    peephole: bool
    activations: str  # name, alpha and beta of each; empty: the standard ones
    output_gate_reads: str
    dropout: float
    recompute: bool

    @property
    def tensors_per_cell(self) -> int:
        """The weights of a cell: of the inputs and of the hidden state, two biases, the peephole."""
        return 2 + 2 * self.bias + self.peephole

    def arrays(self, biases: Sequence[Array] = ()) -> tuple[Array, list[LstmWeights], Array | None, Array | None]:
        """x, the weights of every cell, h0 and c0. `biases` are the sums of both biases, if they are known already."""
        weights, per_cell = self.weights, self.tensors_per_cell
        names = _parameter_names(self.bidirectional, self.bias, self.peephole, len(weights))

        def read(index: int) -> Array:
            return array(weights[index], "LSTM", names[index])

        cells: list[LstmWeights] = []
        for first in range(0, len(names), per_cell):
            b = None
            if self.bias:
                b = biases[len(cells)] if biases else read(first + 2) + read(first + 3)
            peephole = read(first + per_cell - 1) if self.peephole else None
            cells.append(LstmWeights(read(first), read(first + 1), b, peephole))
        return (
            array(self.x, "LSTM", "input"),
            cells,
            None if self.h0 is None else array(self.h0, "LSTM", "hx[0]"),
            None if self.c0 is None else array(self.c0, "LSTM", "hx[1]"),
        )

    def options(self) -> dict[str, Any]:
        """The options that the array functions have in common."""
        return {
            "bidirectional": self.bidirectional,
            "batch_first": self.batch_first,
            "lengths": None if self.lengths is None else array(self.lengths, "LSTM", "lengths"),
            "batch_sizes": None if self.batch_sizes is None else array(self.batch_sizes, "LSTM", "batch_sizes"),
            "activations": _activations(self.activations),
            "output_gate_reads": self.output_gate_reads,
            "dropout": self.dropout,
            "seed": 0 if self.seed is None else int(self.seed),
        }


def forward(lstm: Lstm) -> tuple[Tensor, Tensor, Tensor, LstmCache | None]:
    y, hn, cn, cache = lstm_forward(
        *lstm.arrays(),
        training=lstm.keep or lstm.dropout > 0,
        recompute=lstm.recompute or not lstm.keep,
        num_threads=num_threads(),
        **lstm.options(),
    )
    return torch.from_numpy(y), torch.from_numpy(hn), torch.from_numpy(cn), cache


def backward(
    lstm: Lstm, need: Sequence[bool], cache: LstmCache, dy: Tensor | None, dhn: Tensor | None, dcn: Tensor | None
) -> list[Tensor | None]:
    """The gradients of x, h0, c0 and the weights that are needed."""
    dx, dweights, dh0, dc0 = lstm_backward(
        None if dy is None else array(dy, "LSTM", GRADIENT),
        cache,
        dhn=None if dhn is None else array(dhn, "LSTM", "the gradient of h_n"),
        dcn=None if dcn is None else array(dcn, "LSTM", "the gradient of c_n"),
        need=_names(lstm.bias, lstm.peephole, tuple(need)),
        num_threads=num_threads(),
    )
    found: list[Array | None] = [dx, dh0, dc0]
    for dwx, dwh, db, dpeephole, *_ in dweights or ():
        found += dwx, dwh
        if lstm.bias:
            # Both biases have this gradient, each in its own memory, which an optimizer may modify.
            found += db, None if db is None else db.copy()
        if lstm.peephole:
            found.append(dpeephole)
    found += [None] * (len(need) - len(found))
    return [
        None if gradient is None or not needed else torch.from_numpy(gradient)
        for gradient, needed in zip(found, need, strict=True)
    ]


@lru_cache(maxsize=512)
def _names(bias: bool, peephole: bool, need: tuple[bool, ...]) -> tuple[str, ...]:
    """The gradients to compute. Those of the same parameter of all cells are computed together."""
    names = ("dwx", "dwh") + ("db", "db") * bias + ("dpeephole",) * peephole
    of_inputs = ("dx", "dh0", "dc0") + names * (len(need) // len(names))
    return tuple(dict.fromkeys(name for name, needed in zip(of_inputs, need, strict=False) if needed))


@lru_cache(maxsize=512)
def _parameter_names(bidirectional: bool, bias: bool, peephole: bool, count: int) -> tuple[str, ...]:
    """PyTorch's names of the weights."""
    kinds = ("weight_ih", "weight_hh") + ("bias_ih", "bias_hh") * bias + ("peephole",) * peephole
    suffixes = ("", "_reverse") if bidirectional else ("",)
    layers = range(count // len(kinds) // len(suffixes))
    return tuple(f"{kind}_l{layer}{suffix}" for layer in layers for suffix in suffixes for kind in kinds)


def encoded(activations: Iterable[Activation]) -> str:
    """Activations as one argument of an operator."""
    return " ".join(f"{f.name} {f.alpha!r} {f.beta!r}" for f in activations)


@lru_cache(maxsize=512)
def _activations(text: str) -> LstmActivations:
    words = text.split()
    parts = zip(words[::3], words[1::3], words[2::3], strict=True)
    return LstmActivations(*(fused_activation(name, float(alpha), float(beta)) for name, alpha, beta in parts))
