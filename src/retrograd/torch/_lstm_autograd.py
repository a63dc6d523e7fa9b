"""The LSTM with gradients: a Function for eager tensors, operators for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..ops._types import Array
from ..ops.recurrent import lstm_cache, lstm_cache_size
from ..ops.recurrent.cache import BareCache
from ._arrays import array
from ._autograd import apply_of, check_traceable, define, differentiate, differentiate_once, is_eager
from ._lstm import Lstm, backward, forward

# tuple.__new__ takes half the time of the NamedTuple's constructor.
_new_lstm: Final[Callable[[tuple[Any, ...]], Lstm]] = partial(tuple.__new__, Lstm)


def is_recorded(*inputs: Tensor | None) -> bool:
    """Whether the gradients of these inputs may be needed. A trace of torch.jit is for both modes.

    It keeps nothing, and a backward pass of it runs forward again.
    """
    return (
        torch.is_grad_enabled()
        and True in [tensor is not None and tensor.requires_grad for tensor in inputs]
        and (torch.compiler.is_compiling() or not torch._C._is_tracing())
    )


def run(lstm: Lstm) -> tuple[Tensor, Tensor, Tensor]:
    """Run an LSTM; returns y, hn and cn."""
    y: Tensor
    hn: Tensor
    cn: Tensor
    if not is_eager(lstm.x):
        check_traceable("lstm", lstm.x)
        y, hn, cn, _ = _operator(*lstm)
    elif lstm.keep:
        y, hn, cn = _apply(lstm, *lstm[:3], *lstm.weights)
    else:
        y, hn, cn, _ = forward(lstm)
    return y, hn, cn


def _save(ctx: Any, lstm: Lstm, *others: Tensor | None) -> None:
    """Save the arguments that have gradients, and `others`: the buffer, lengths, batch_sizes and seed."""
    ctx.options = lstm[7:]
    ctx.save_for_backward(*others, *lstm[:3], *lstm.weights)
    ctx.set_materialize_grads(False)


def _saved(options: tuple[Any, ...], tensors: Sequence[Any]) -> tuple[Any, Lstm]:
    """The buffer and the arguments."""
    buffer, lengths, batch_sizes, seed, x, h0, c0, *weights = tensors
    return buffer, _new_lstm((x, h0, c0, weights, lengths, batch_sizes, seed, *options))


# ---- eager tensors ---------------------------------------------------------------------------------------------------


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lstm: Lstm, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        y, hn, cn, cache = forward(lstm)
        assert cache is not None
        ctx.cache = cache.without_arrays()
        ctx.biases = [cell[2] for cell in cache.cells] if lstm.bias else []
        # The bare cache has copies of the lengths and the seed, which may be overwritten before backward.
        _save(ctx, lstm, None if cache.buffer is None else torch.from_numpy(cache.buffer), None, None, None)
        return y, hn, cn

    @staticmethod
    def backward(ctx: Any, *outgoing: Tensor | None) -> tuple[Tensor | None, ...]:
        backward = partial(_backward_eager, ctx.options, ctx.needs_input_grad[1:], ctx.cache, ctx.biases)
        return None, *differentiate_once("lstm", backward, *outgoing, *ctx.saved_tensors)


_apply: Final = apply_of(_Lstm)


def _backward_eager(
    options: tuple[Any, ...], need: Sequence[bool], bare: BareCache, biases: Sequence[Array], *tensors: Any
) -> tuple[Tensor | None, ...]:
    buffer, lstm = _saved(options, tensors[3:])
    cache = bare.with_arrays(*lstm.arrays(biases), None if buffer is None else array(buffer, "LSTM", "cache"))
    return tuple(backward(lstm, need, cache, *tensors[:3]))


# ---- operators -------------------------------------------------------------------------------------------------------

_TENSORS: Final = (
    "Tensor x, Tensor? h0, Tensor? c0, Tensor[] weights, Tensor? lengths, Tensor? batch_sizes, Tensor? seed"
)
_OPTIONS: Final = (
    "bool bidirectional, bool batch_first, bool bias, bool peephole, str activations, "
    "str output_gate_reads, float dropout, bool recompute"
)


def _kernel(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, hn, cn, cache = forward(Lstm(*arguments))
    buffer = None if cache is None else cache.buffer
    return y, hn, cn, torch.empty(0, dtype=torch.uint8) if buffer is None else torch.from_numpy(buffer)


def _shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lstm = Lstm(*arguments)
    x, units, cells = lstm.x, lstm.weights[1].shape[1], len(lstm.weights) // lstm.tensors_per_cell
    steps, samples = (x.shape[1], x.shape[0]) if lstm.batch_first else x.shape[:2]
    size: Any = 0
    if lstm.keep and not lstm.recompute:
        if lstm.lengths is None and lstm.batch_sizes is None and all(isinstance(extent, int) for extent in x.shape):
            layers = cells // (1 + lstm.bidirectional)
            dtype = np.float64 if x.dtype is torch.float64 else np.float32
            sizes = (steps, samples, x.shape[2], units)
            size = lstm_cache_size(*sizes, num_layers=layers, bidirectional=lstm.bidirectional, dtype=dtype)
        elif not x.is_meta:  # a tensor on the meta device cannot have a size that depends on data
            size = torch.library.get_ctx().new_dynamic_size()
    y, state = (*x.shape[:2], units * (1 + lstm.bidirectional)), (cells, samples, units)
    return x.new_empty(y), x.new_empty(state), x.new_empty(state), x.new_empty(size, dtype=torch.uint8)


def _backward_arguments(arguments: Sequence[Any]) -> tuple[Lstm, Tensor, Sequence[bool]]:
    """The arguments of forward, its buffer and the gradients that are needed."""
    buffer, need = arguments[7:9]
    return _new_lstm((*arguments[:7], True, *arguments[9:])), buffer, need


def _backward_kernel(dy: Tensor | None, dhn: Tensor | None, dcn: Tensor | None, *arguments: Any) -> list[Tensor]:
    lstm, filled, need = _backward_arguments(arguments)
    buffer = array(filled, "LSTM", "cache") if filled.numel() else None
    cache = lstm_cache(*lstm.arrays(), buffer=buffer, **lstm.options())
    return [gradient for gradient in backward(lstm, need, cache, dy, dhn, dcn) if gradient is not None]


def _backward_shapes(dy: Tensor | None, dhn: Tensor | None, dcn: Tensor | None, *arguments: Any) -> list[Tensor]:
    lstm, _, need = _backward_arguments(arguments)
    inputs = (*lstm[:3], *lstm.weights)
    return [t.new_empty(t.shape) for t, needed in zip(inputs, need, strict=True) if needed and t is not None]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, Lstm(*inputs), output[3], *inputs[4:7])
    ctx.mark_non_differentiable(output[3])


def _differentiate(ctx: Any, dy: Any, dhn: Any, dcn: Any, _: Any) -> tuple[Any, ...]:
    buffer, lstm = _saved(ctx.options, ctx.saved_tensors)
    need = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[3]]
    found = iter(_backward_operator(dy, dhn, dcn, *lstm[:7], buffer, need, *lstm[8:]))
    dx, dh0, dc0, *dweights = [next(found) if needed else None for needed in need]
    return dx, dh0, dc0, dweights, *(None,) * (len(lstm) - 4)


_operator: Final = define(
    "lstm", f"({_TENSORS}, bool keep, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)", _kernel, _shapes
)
_backward_operator: Final = define(
    "lstm_backward",
    f"(Tensor? dy, Tensor? dhn, Tensor? dcn, {_TENSORS}, Tensor buffer, bool[] need, {_OPTIONS}) -> Tensor[]",
    _backward_kernel,
    _backward_shapes,
)
differentiate("lstm", _set_up, _differentiate)
