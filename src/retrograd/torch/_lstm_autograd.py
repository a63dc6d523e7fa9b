"""The LSTM with gradients: a Function for eager tensors, operators for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..ops._types import Array
from ..ops.lstm import LstmCache, lstm_cache, lstm_cache_size
from ..ops.lstm.problem import Inputs, Problem
from ._arrays import array
from ._autograd import apply_of, check_traceable, define, differentiate, differentiate_once, is_eager
from ._lstm import Given, Lstm, backward, cells_of, forward, options_of, states_of


def run(
    lstm: Lstm, x: Tensor, h0: Tensor | None, c0: Tensor | None, weights: Sequence[Tensor], given: Given
) -> tuple[Tensor, Tensor, Tensor]:
    """Run an LSTM; returns y, hn and cn. Weights are listed cell by cell, in PyTorch's order."""
    y: Tensor
    hn: Tensor
    cn: Tensor
    inputs = (x, h0, c0, *weights)
    keep = torch.is_grad_enabled() and True in [tensor is not None and tensor.requires_grad for tensor in inputs]
    if not is_eager(x):
        check_traceable("lstm", x)
        # A trace is for both modes. It keeps nothing, and a backward pass of it runs forward again.
        keep = keep and (torch.compiler.is_compiling() or not torch._C._is_tracing())
        y, hn, cn, _ = _operator(x, h0, c0, weights, *given, keep, *lstm)
    elif keep:
        y, hn, cn = _apply(lstm, given, *inputs)
    else:
        y, hn, cn, _ = forward(lstm, given, False, x, h0, c0, weights)
    return y, hn, cn


# ---- eager tensors ---------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """What backward needs besides tensors."""

    problem: Problem
    biases: list[Array]
    active: Array | None
    order: Array | None
    seed: int


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, lstm: Lstm, given: Given, x: Tensor, h0: Tensor | None, c0: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, hn, cn, cache = forward(lstm, given, True, x, h0, c0, weights)
        assert cache is not None
        inputs, buffer, _ = cache
        biases = [cell[2] for cell in inputs.cells] if lstm.bias else []
        ctx.lstm, ctx.kept = lstm, _Kept(inputs.problem, biases, inputs.active, inputs.order, inputs.seed)
        ctx.save_for_backward(x, h0, c0, None if buffer is None else torch.from_numpy(buffer), *weights)
        ctx.set_materialize_grads(False)
        return y, hn, cn

    @staticmethod
    def backward(ctx: Any, *outgoing: Tensor | None) -> tuple[Tensor | None, ...]:
        backward = partial(_backward_eager, ctx.lstm, ctx.needs_input_grad[2:], ctx.kept)
        return None, None, *differentiate_once("lstm", backward, *outgoing, *ctx.saved_tensors)


_apply: Final = apply_of(_Lstm)


def _backward_eager(
    lstm: Lstm,
    need: Sequence[bool],
    kept: _Kept,
    dy: Tensor | None,
    dhn: Tensor | None,
    dcn: Tensor | None,
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    buffer: Tensor | None,
    *weights: Tensor,
) -> tuple[Tensor | None, ...]:
    problem, biases, active, order, seed = kept
    inputs = Inputs(
        problem,
        problem.sequence(array(x, "LSTM", "input")),
        None,
        list(cells_of(lstm, weights, biases)),
        *states_of(h0, c0),
        active,
        order,
        seed,
    )
    # No stamp: with checkpointing, another pass of the same inputs has filled the buffer.
    cache = LstmCache(inputs, None if buffer is None else array(buffer, "LSTM", "cache"), None)
    return backward(lstm, need, cache, dy, dhn, dcn)


# ---- operators -------------------------------------------------------------------------------------------------------

_GIVEN_SCHEMA: Final = "Tensor? lengths, Tensor? batch_sizes, Tensor? seed"
_LSTM_SCHEMA: Final = (
    "bool bidirectional, bool batch_first, bool bias, bool peephole, str activations, "
    "str output_gate_reads, float dropout, bool recompute"
)


def _kernel(
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    batch_sizes: Tensor | None,
    seed: Tensor | None,
    keep: bool,
    *lstm: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, hn, cn, cache = forward(Lstm(*lstm), Given(lengths, batch_sizes, seed), keep, x, h0, c0, weights)
    buffer = None if cache is None else cache.buffer
    return y, hn, cn, torch.empty(0, dtype=torch.uint8) if buffer is None else torch.from_numpy(buffer)


def _shapes(
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    batch_sizes: Tensor | None,
    seed: Tensor | None,
    keep: bool,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lstm = Lstm(*options)
    units = weights[1].shape[1]
    states = (len(weights) // lstm.tensors_per_cell, x.shape[0 if lstm.batch_first else 1], units)
    y = x.new_empty((*x.shape[:2], units * (1 + lstm.bidirectional)))
    size: Any = 0
    if keep and not lstm.recompute:
        if lengths is None and batch_sizes is None and all(isinstance(extent, int) for extent in x.shape):
            size = _cache_bytes(lstm, x, len(weights), units)
        elif not x.is_meta:  # a tensor on the meta device cannot have a size that depends on data
            size = torch.library.get_ctx().new_dynamic_size()
    return y, x.new_empty(states), x.new_empty(states), x.new_empty(size, dtype=torch.uint8)


def _cache_bytes(lstm: Lstm, x: Tensor, weights: int, units: int) -> int:
    steps, samples, inputs = (x.shape[1], x.shape[0], x.shape[2]) if lstm.batch_first else x.shape
    return lstm_cache_size(
        steps,
        samples,
        inputs,
        units,
        num_layers=weights // lstm.tensors_per_cell // (1 + lstm.bidirectional),
        bidirectional=lstm.bidirectional,
        dtype=np.float64 if x.dtype is torch.float64 else np.float32,
    )


def _backward_kernel(
    dy: Tensor | None,
    dhn: Tensor | None,
    dcn: Tensor | None,
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    batch_sizes: Tensor | None,
    seed: Tensor | None,
    buffer: Tensor,
    need: Sequence[bool],
    *options: Any,
) -> list[Tensor]:
    lstm = Lstm(*options)
    cache = lstm_cache(
        array(x, "LSTM", "input"),
        cells_of(lstm, weights),
        *states_of(h0, c0),
        buffer=array(buffer, "LSTM", "cache") if buffer.numel() else None,
        **options_of(lstm, Given(lengths, batch_sizes, seed)),
    )
    return [gradient for gradient in backward(lstm, need, cache, dy, dhn, dcn) if gradient is not None]


def _backward_shapes(
    dy: Tensor | None,
    dhn: Tensor | None,
    dcn: Tensor | None,
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    batch_sizes: Tensor | None,
    seed: Tensor | None,
    buffer: Tensor,
    need: Sequence[bool],
    *options: Any,
) -> list[Tensor]:
    inputs = (x, h0, c0, *weights)
    return [t.new_empty(t.shape) for t, needed in zip(inputs, need, strict=True) if needed and t is not None]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, h0, c0, weights, lengths, batch_sizes, seed, _, *options = inputs
    ctx.lstm = Lstm(*options)
    ctx.save_for_backward(x, h0, c0, lengths, batch_sizes, seed, output[3], *weights)
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Any, dhn: Any, dcn: Any, _: Any) -> tuple[Any, ...]:
    x, h0, c0, lengths, batch_sizes, seed, buffer, *weights = ctx.saved_tensors
    need = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[3]]
    found = iter(
        _backward_operator(dy, dhn, dcn, x, h0, c0, weights, lengths, batch_sizes, seed, buffer, need, *ctx.lstm)
    )
    dx, dh0, dc0, *dweights = [next(found) if needed else None for needed in need]
    return dx, dh0, dc0, dweights, None, None, None, None, *(None,) * len(ctx.lstm)


_operator: Final = define(
    "lstm",
    f"(Tensor x, Tensor? h0, Tensor? c0, Tensor[] weights, {_GIVEN_SCHEMA}, bool keep, {_LSTM_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _kernel,
    _shapes,
)
_backward_operator: Final = define(
    "lstm_backward",
    "(Tensor? dy, Tensor? dhn, Tensor? dcn, Tensor x, Tensor? h0, Tensor? c0, Tensor[] weights, "
    f"{_GIVEN_SCHEMA}, Tensor buffer, bool[] need, {_LSTM_SCHEMA}) -> Tensor[]",
    _backward_kernel,
    _backward_shapes,
)
differentiate("lstm", _set_up, _differentiate)
