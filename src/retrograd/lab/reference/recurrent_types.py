"""The oracle: parameters, options and results of LSTM, GRU and simple RNN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .precision import Array

__all__ = [
    "GRU_ACTIVATIONS",
    "LSTM_ACTIVATIONS",
    "RNN_ACTIVATIONS",
    "GruBackward",
    "GruCell",
    "GruForward",
    "GruOptions",
    "LstmBackward",
    "LstmCell",
    "LstmForward",
    "LstmOptions",
    "RnnBackward",
    "RnnCell",
    "RnnForward",
    "RnnOptions",
    "active_from_batch_sizes",
    "active_from_lengths",
]

Activation = tuple[str, float, float]  # name, alpha, beta
_SIGMOID: Activation = ("sigmoid", 0.0, 0.0)
_TANH: Activation = ("tanh", 0.0, 0.0)
LSTM_ACTIVATIONS: tuple[Activation, ...] = (_SIGMOID, _SIGMOID, _TANH, _SIGMOID, _TANH)  # i f g o, hidden output
GRU_ACTIVATIONS: tuple[Activation, ...] = (_SIGMOID, _SIGMOID, _TANH)  # r z n
RNN_ACTIVATIONS: tuple[Activation, ...] = (_TANH,)


class LstmCell(NamedTuple):
    """The parameters of one direction of one layer, or their gradients. Gates are in the order i f g o."""

    wx: Array  # [4, H, I]
    wh: Array  # [4, H, P]
    b: Array | None = None  # [4, H]
    peephole: Array | None = None  # [4, H]: diagonals; [4, H, H]: full matrices
    projection: Array | None = None  # [P, H]; without it P = H
    gamma_x: Array | None = None  # [4, H]
    gamma_h: Array | None = None  # [4, H]
    gamma_c: Array | None = None  # [H]
    beta_c: Array | None = None  # [H]


class GruCell(NamedTuple):
    """The parameters of one direction of one layer, or their gradients. Gates are in the order r z n."""

    wx: Array  # [3, H, I]
    wh: Array  # [3, H, H]
    b: Array | None = None  # [3, H]
    bh: Array | None = None  # [3, H]
    gamma_x: Array | None = None  # [3, H]
    gamma_h: Array | None = None  # [3, H]


class RnnCell(NamedTuple):
    """The parameters of one direction of one layer, or their gradients."""

    wx: Array  # [1, H, I]
    wh: Array  # [1, H, H]
    b: Array | None = None  # [1, H]
    gamma_x: Array | None = None  # [1, H]
    gamma_h: Array | None = None  # [1, H]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options of all cells.

    `active` [T, N] says which samples are active at which step; None means all. An inactive sample keeps its state and
    has y = 0; x, dy, `reset`, `mask` and zoneout are not read there. `activations` are (name, alpha, beta) per gate.
    """

    directions: int = 1
    active: npt.ArrayLike | None = None  # [T, N]
    activations: Sequence[Activation] = ()
    masks: Sequence[npt.ArrayLike] | None = None  # of dropout between layers: L-1 arrays [T, N, D*P]
    reset: npt.ArrayLike | None = None  # [T, N], bool
    mask: npt.ArrayLike | None = None  # broadcastable to [cells, gates, T, N, P]
    zoneout_h: npt.ArrayLike | None = None  # k, broadcastable to [cells, T, N, P]: 1 takes the new value, 0 keeps h-
    clip: float | None = None
    norm: str | None = None  # "haste" or "cell", which differ only for the LSTM
    eps: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class LstmOptions(_Options):
    """The keyword arguments of `lstm_forward`. `activations` has a fifth element, of the hidden output."""

    activations: Sequence[Activation] = LSTM_ACTIVATIONS
    output_reads: str = "new"  # the cell state that the output gate's peephole reads, or "old"
    zoneout_c: npt.ArrayLike | None = None  # broadcastable to [cells, T, N, H]
    cell_clip: float | None = None
    coupled: bool = False


@dataclass(frozen=True, kw_only=True)
class GruOptions(_Options):
    """The keyword arguments of `gru_forward`."""

    activations: Sequence[Activation] = GRU_ACTIVATIONS
    kind: str = "after"  # the reset gate is applied after the recurrent product, or "before"
    flip: bool = False


@dataclass(frozen=True, kw_only=True)
class RnnOptions(_Options):
    """The keyword arguments of `rnn_forward`."""

    activations: Sequence[Activation] = RNN_ACTIVATIONS


class LstmForward(NamedTuple):
    """The results, then the intermediate values: lists of one array per cell, `inputs` one per layer.

    `gates`, `z` and `cells` are 0 where a sample is inactive; `h_prev` and `c_prev` hold its state before every step,
    also where it is inactive, and after the reset where it is active.
    """

    y: Array  # [T, N, D*P]
    hn: Array  # [L*D, N, P]
    cn: Array  # [L*D, N, H]
    gates: list[Array]  # [T, N, 4, H], the values of i f g o
    z: list[Array]  # [T, N, 4, H], their pre-activations, not clamped
    cells: list[Array]  # [T, N, H], the cell state after the step
    h_prev: list[Array]  # [T, N, P]
    c_prev: list[Array]  # [T, N, H]
    inputs: list[Array]  # [T, N, I] of layer 0, [T, N, D*P] of those above, dropout applied


class LstmBackward(NamedTuple):
    """The gradients in the order of forward's arguments."""

    dx: Array  # [T, N, I]
    cells: list[LstmCell]  # None where the parameter is
    dh0: Array  # [L*D, N, P]
    dc0: Array  # [L*D, N, H]


class GruForward(NamedTuple):
    """As `LstmForward`."""

    y: Array  # [T, N, D*H]
    hn: Array  # [L*D, N, H]
    gates: list[Array]  # [T, N, 3, H], the values of r z n
    z: list[Array]  # [T, N, 3, H], their pre-activations, not clamped
    m: list[Array]  # [T, N, H], what r is multiplied by: wh_n h- + bh_n, or h- if the kind is "before"
    h_prev: list[Array]  # [T, N, H]
    inputs: list[Array]  # [T, N, I] of layer 0, [T, N, D*H] of those above, dropout applied


class GruBackward(NamedTuple):
    """The gradients in the order of forward's arguments."""

    dx: Array  # [T, N, I]
    cells: list[GruCell]  # None where the parameter is
    dh0: Array  # [L*D, N, H]


class RnnForward(NamedTuple):
    """As `LstmForward`."""

    y: Array  # [T, N, D*H]
    hn: Array  # [L*D, N, H]
    gates: list[Array]  # [T, N, 1, H], the value of the one gate, which is h before zoneout
    z: list[Array]  # [T, N, 1, H], its pre-activation, not clamped
    h_prev: list[Array]  # [T, N, H]
    inputs: list[Array]  # [T, N, I] of layer 0, [T, N, D*H] of those above, dropout applied


class RnnBackward(NamedTuple):
    """The gradients in the order of forward's arguments."""

    dx: Array  # [T, N, I]
    cells: list[RnnCell]  # None where the parameter is
    dh0: Array  # [L*D, N, H]


def active_from_lengths(lengths: npt.ArrayLike, T: int) -> npt.NDArray[np.bool_]:
    """Return [T, N]: sample n is active at the steps t < lengths[n]."""
    return np.arange(T)[:, None] < np.asarray(lengths)[None, :]


def active_from_batch_sizes(batch_sizes: npt.ArrayLike, N: int) -> npt.NDArray[np.bool_]:
    """Return [T, N]: the samples n < batch_sizes[t] are active at step t."""
    return np.arange(N)[None, :] < np.asarray(batch_sizes)[:, None]
