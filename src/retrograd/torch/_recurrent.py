"""Recurrent layers over tensors by the array functions: forward and backward."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..ops import recurrent as ops
from ..ops._types import FLOATS, Array
from ..ops.activation import Activation
from ..ops.recurrent.cache import RecurrentCache
from ..ops.recurrent.types import GRU, LSTM, RNN, Cell, CellOptions, CellType
from ._arrays import array, num_threads
from ._norm import GRADIENT, fused_activation


class Functions(NamedTuple):
    """The array functions of a cell."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    cache: Callable[..., Any]


FUNCTIONS: Final = {
    "lstm": Functions(ops.lstm_forward, ops.lstm_backward, ops.lstm_cache),
    "gru": Functions(ops.gru_forward, ops.gru_backward, ops.gru_cache),
    "rnn": Functions(ops.rnn_forward, ops.rnn_backward, ops.rnn_cache),
}
# The layers, by PyTorch's names. Those of a single step have a name that ends in Cell.
CELLS: Final = {f"{cell.name.upper()}{suffix}": cell for cell in (LSTM, GRU, RNN) for suffix in ("", "Cell")}
# The fields of PyTorch's parameters, and of one that a cell cannot have under the name of its option. Others have the
# names of their fields.
_FIELDS: Final = {
    "weight_ih": "wx", "weight_hh": "wh", "bias_ih": "b", "bias_hh": "bh", "weight_hr": "projection",
    "weight_peephole": "peephole",
}  # fmt: skip
BIAS: Final = 2  # the place of b among the parameters of all cells
ADDED: Final = -1  # the place of a second bias that is only added to the first


class Plan(NamedTuple):
    """What a layer computes, whatever the sizes."""

    cell: CellType
    single: bool  # one step, one cell
    parameters: tuple[str, ...]  # of a cell, by PyTorch's names
    places: tuple[int, ...]  # of these among the cell's fields
    options: dict[str, Any]  # of the array functions
    zoneout: tuple[float | None, float | None] | None  # rates, of the hidden and the cell state
    has_cells: bool  # an LSTM
    adds_biases: bool  # a second bias to the first

    def cell_options(self) -> CellOptions:
        """The options, as the array functions pass them on."""
        options = dict(self.options)
        functions = options.pop("activations", None)
        if functions is None:  # an RNN has one, the others have standard ones
            functions = self.cell.activations(*([options.pop("activation")] if "activation" in options else []))
        return CellOptions(self.cell.name, functions, **options)


@lru_cache(maxsize=512)
def plan_of(layer: str, parameters: str, options: str) -> Plan:
    cell = CELLS[layer]
    names = tuple(parameters.split())
    fields = [_FIELDS.get(name, name) for name in names]
    places = tuple(cell.fields.index(field) if field in cell.fields else ADDED for field in fields)
    given: dict[str, Any] = json.loads(options) if options else {}
    rates = given.pop("zoneout", None)
    if rates is not None:
        rates = tuple(rates) if isinstance(rates, list) else (rates, None)
    if "activations" in given:
        given["activations"] = cell.activations(*(fused_activation(*function) for function in given["activations"]))
    if "activation" in given:
        given["activation"] = fused_activation(*given["activation"])
    return Plan(cell, layer.endswith("Cell"), names, places, given, rates, cell.has_cells, ADDED in places)


def encoded(options: Mapping[str, Any]) -> str:
    """Options as one argument of an operator; empty for the standard ones."""
    return json.dumps(options, default=lambda f: [f.name, f.alpha, f.beta]) if options else ""


class Recurrent(NamedTuple):
    """The arguments of a recurrent layer: those of the operator, in its order."""

    x: Tensor
    h0: Tensor | None
    c0: Tensor | None  # of an LSTM
    weights: Sequence[Tensor]  # of each cell in turn
    lengths: Tensor | None  # of the samples
    batch_sizes: Tensor | None  # or of the steps
    reset: Tensor | None
    mask: Tensor | None
    seed: Tensor | None  # of dropout and zoneout; None in evaluation
    keep: bool  # what backward needs
    layer: str  # of CELLS
    parameters: str  # PyTorch's names of the weights of a cell
    options: str  # of the cell, encoded
    bidirectional: bool
    batch_first: bool
    dropout: float
    recompute: bool

    @property
    def plan(self) -> Plan:
        return plan_of(self.layer, self.parameters, self.options)

    def arrays(self, plan: Plan, biases: Sequence[Array] = ()) -> tuple[Array, Any, Array | None, Array | None]:
        """x, the weights, h0 and c0. `biases` are the sums of both biases, if they are known already."""
        weights, layer, places, kind = self.weights, self.layer, plan.places, plan.cell.weights
        names = _parameter_names(plan.parameters, plan.single, self.bidirectional, len(weights))
        cells: list[Cell] = []
        for first in range(0, len(weights), len(places)):
            parts: list[Any] = [None] * len(kind._fields)
            for index, place in enumerate(places, first):
                if biases and place in (BIAS, ADDED):
                    parts[BIAS] = biases[len(cells)]
                elif place == ADDED:
                    parts[BIAS] = parts[BIAS] + array(weights[index], layer, names[index])
                else:
                    parts[place] = array(weights[index], layer, names[index])
            cells.append(tuple.__new__(kind, parts))
        x = array(self.x, layer, "input")
        h0, c0 = self.h0, self.c0
        return (
            x[None] if plan.single else x,
            cells[0] if plan.single else cells,
            None if h0 is None else array(h0, layer, "hx[0]" if plan.has_cells else "hx"),
            None if c0 is None else array(c0, layer, "hx[1]"),
        )

    def keywords(self, plan: Plan) -> dict[str, Any]:
        """The options that the array functions have in common."""
        found = {
            "bidirectional": self.bidirectional,
            "batch_first": self.batch_first,
            "dropout": self.dropout,
            "seed": 0 if self.seed is None else int(self.seed),
            **plan.options,
        }
        if self.lengths is not None:
            found["lengths"] = array(self.lengths, self.layer, "lengths")
        if self.batch_sizes is not None:
            found["batch_sizes"] = array(self.batch_sizes, self.layer, "batch_sizes")
        if self.reset is not None:
            reset = array(self.reset, self.layer, "reset")
            found["reset"] = reset[None] if plan.single else reset
        if self.mask is not None:
            found["mask"] = array(self.mask, self.layer, "mask")
        if plan.zoneout is not None:
            found["zoneout"] = plan.zoneout if self.seed is not None else self._expected_zoneout(plan.zoneout)
        return found

    def _expected_zoneout(self, rates: tuple[float | None, float | None]) -> tuple[Array | None, ...]:
        """In evaluation the states are averages, weighted by the rates."""
        dtype = dtype_of(self.x.dtype)
        return tuple(None if rate is None else np.array([1 - rate], dtype) for rate in rates)


def forward(given: Recurrent) -> tuple[Tensor | None, Tensor, Tensor | None, RecurrentCache | None]:
    """Returns y, hn and cn. A single step has no y, and only an LSTM has cn."""
    plan = given.plan
    arrays = given.arrays(plan)
    result = FUNCTIONS[plan.cell.name].forward(
        *(arrays if plan.has_cells else arrays[:3]),
        training=given.keep or given.seed is not None,
        recompute=given.recompute or not given.keep,
        num_threads=num_threads(),
        **given.keywords(plan),
    )
    return (
        None if plan.single else torch.from_numpy(result[0]),
        torch.from_numpy(result[1]),
        torch.from_numpy(result[2]) if plan.has_cells else None,
        result[-1],
    )


def sums_of_biases(plan: Plan, cache: RecurrentCache) -> list[Array]:
    """The sums that forward has computed, one per cell, if this cell adds its biases."""
    return [cell[BIAS] for cell in cache.cells] if plan.adds_biases else []


def backward(
    given: Recurrent,
    need: Sequence[bool],
    cache: RecurrentCache,
    dy: Tensor | None,
    dhn: Tensor | None,
    dcn: Tensor | None,
) -> list[Tensor | None]:
    """The gradients of x, h0, c0 and the weights that are needed."""
    plan, layer = given.plan, given.layer
    outgoing = {} if dcn is None else {"dcn": array(dcn, layer, "the gradient of c_n")}
    dx, dweights, *dstates = FUNCTIONS[plan.cell.name].backward(
        None if dy is None else array(dy, layer, GRADIENT),
        cache,
        dhn=None if dhn is None else array(dhn, layer, "the gradient of h_n"),
        need=_names(plan, tuple(need)),
        num_threads=num_threads(),
        **outgoing,
    )
    found: list[Array | None] = [dx[0] if plan.single and dx is not None else dx, *dstates]
    if not plan.has_cells:
        found.append(None)
    for dcell in ((dweights,) if plan.single else dweights) if dweights is not None else ():
        for place in plan.places:
            # Added biases have the same gradient, each in its own memory, which an optimizer may modify.
            db = dcell[BIAS] if place == ADDED else None
            found.append(dcell[place] if place != ADDED else None if db is None else db.copy())
    found += [None] * (len(need) - len(found))
    return [
        None if gradient is None or not needed else torch.from_numpy(gradient)
        for gradient, needed in zip(found, need, strict=True)
    ]


def _names(plan: Plan, need: tuple[bool, ...]) -> tuple[str, ...]:
    """The gradients to compute. Those of the same parameter of all cells are computed together."""
    return _gradient_names(plan.cell.fields, plan.places, need)


@lru_cache(maxsize=512)
def _gradient_names(fields: tuple[str, ...], places: tuple[int, ...], need: tuple[bool, ...]) -> tuple[str, ...]:
    names = tuple("d" + fields[BIAS if place == ADDED else place] for place in places)
    of_inputs = ("dx", "dh0", "dc0") + names * (len(need) // len(names))
    return tuple(dict.fromkeys(name for name, needed in zip(of_inputs, need, strict=False) if needed))


@lru_cache(maxsize=512)
def _parameter_names(kinds: tuple[str, ...], single: bool, bidirectional: bool, count: int) -> tuple[str, ...]:
    """PyTorch's names of the weights."""
    if single:
        return kinds
    suffixes = ("", "_reverse") if bidirectional else ("",)
    layers = range(count // len(kinds) // len(suffixes))
    return tuple(f"{kind}_l{layer}{suffix}" for layer in layers for suffix in suffixes for kind in kinds)


def dtype_of(dtype: torch.dtype) -> np.dtype[Any]:
    return FLOATS[dtype is torch.float64]


def as_activation(function: str | Activation) -> Activation:
    return Activation(function) if isinstance(function, str) else function
