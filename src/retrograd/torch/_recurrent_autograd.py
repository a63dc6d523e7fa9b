"""Recurrent layers with gradients: a Function for eager tensors, operators for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ..ops._types import Array
from ..ops.recurrent.cache import BareCache
from ..ops.recurrent.problem import problem_of
from ._arrays import array
from ._autograd import apply_of, check_traceable, define, differentiate, differentiate_once, is_eager
from ._recurrent import FUNCTIONS, Recurrent, backward, dtype_of, forward, sums_of_biases

# The number of leading fields of a Recurrent that are tensors with gradients, and that are tensors.
_DIFFERENTIABLE: Final = 4
_TENSORS: Final = 9
# tuple.__new__ takes half the time of the NamedTuple's constructor.
new_recurrent: Final[Callable[[tuple[Any, ...]], Recurrent]] = partial(tuple.__new__, Recurrent)


def is_recorded(*inputs: Tensor | None) -> bool:
    """Whether the gradients of these inputs may be needed. A trace of torch.jit is for both modes.

    It keeps nothing, and a backward pass of it runs forward again.
    """
    return (
        torch.is_grad_enabled()
        and True in [tensor is not None and tensor.requires_grad for tensor in inputs]
        and (torch.compiler.is_compiling() or not torch._C._is_tracing())
    )


def run(given: Recurrent) -> tuple[Tensor, Tensor, Tensor]:
    """Run a layer; returns y, hn and cn. There is no y of a single step, and no cn but an LSTM's."""
    y: Any
    hn: Any
    cn: Any
    if not is_eager(given.x):
        check_traceable(given.layer, given.x)
        y, hn, cn, _ = _operator(*given)
    elif given.keep:
        y, hn, cn = _apply(given, *given[:3], *given.weights)
    else:
        y, hn, cn, _ = forward(given)
    return y, hn, cn


def _save(ctx: Any, given: Recurrent, *others: Tensor | None) -> None:
    """Save the arguments that have gradients, and `others`: the buffer, and the other tensors among the arguments."""
    ctx.options = given[_TENSORS:]
    ctx.save_for_backward(*others, *given[:3], *given.weights)
    ctx.set_materialize_grads(False)


def _saved(options: tuple[Any, ...], tensors: Sequence[Any]) -> tuple[Any, Recurrent]:
    """The buffer and the arguments."""
    buffer, lengths, batch_sizes, reset, mask, seed, x, h0, c0, *weights = tensors
    return buffer, new_recurrent((x, h0, c0, weights, lengths, batch_sizes, reset, mask, seed, *options))


# ---- eager tensors ---------------------------------------------------------------------------------------------------


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Recurrent, *inputs: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor | None]:
        y, hn, cn, cache = forward(given)
        assert cache is not None
        ctx.cache, ctx.layer = cache.without_arrays(), given.layer
        ctx.biases = sums_of_biases(given.plan, cache)
        buffer = None if cache.buffer is None else torch.from_numpy(cache.buffer)
        # The bare cache has copies of the lengths, resets and the seed, which may be overwritten before backward, but
        # not of the mask: as a saved tensor, a changed one is detected.
        _save(ctx, given, buffer, None, None, None, given.mask, None)
        return y, hn, cn

    @staticmethod
    def backward(ctx: Any, *outgoing: Tensor | None) -> tuple[Tensor | None, ...]:
        backward = partial(_backward_eager, ctx.options, ctx.needs_input_grad[1:], ctx.cache, ctx.biases)
        return None, *differentiate_once(ctx.layer, backward, *outgoing, *ctx.saved_tensors)


_apply: Final = apply_of(_Recurrent)


def _backward_eager(
    options: tuple[Any, ...], need: Sequence[bool], bare: BareCache, biases: Sequence[Array], *tensors: Any
) -> tuple[Tensor | None, ...]:
    buffer, given = _saved(options, tensors[3:])
    arrays = given.arrays(given.plan, biases)
    cache = bare.with_arrays(*arrays, None if buffer is None else array(buffer, given.layer, "cache"))
    return tuple(backward(given, need, cache, *tensors[:3]))


# ---- operators -------------------------------------------------------------------------------------------------------

_TENSOR_ARGUMENTS: Final = (
    "Tensor x, Tensor? h0, Tensor? c0, Tensor[] weights, Tensor? lengths, Tensor? batch_sizes, Tensor? reset, "
    "Tensor? mask, Tensor? seed"
)
_OPTIONS: Final = (
    "str layer, str parameters, str options, bool bidirectional, bool batch_first, float dropout, bool recompute"
)


def _kernel(*arguments: Any) -> tuple[Tensor, ...]:
    given = Recurrent(*arguments)
    y, hn, cn, cache = forward(given)
    buffer = None if cache is None or cache.buffer is None else torch.from_numpy(cache.buffer)
    nothing = given.x.new_empty(0)
    return (
        nothing if y is None else y,
        hn,
        nothing.clone() if cn is None else cn,
        torch.empty(0, dtype=torch.uint8) if buffer is None else buffer,
    )


def _shapes(*arguments: Any) -> tuple[Tensor, ...]:
    given = Recurrent(*arguments)
    plan, x, directions = given.plan, given.x, 1 + given.bidirectional
    first = dict(zip(plan.parameters, given.weights, strict=False))
    outputs = first["weight_hh"].shape[1]
    units = first["weight_hr"].shape[1] if "weight_hr" in first else outputs
    cells = len(given.weights) // len(plan.parameters)
    shape = (1, *x.shape) if plan.single else tuple(x.shape)
    samples = shape[0 if given.batch_first else 1]
    size: Any = 0
    if given.keep and not given.recompute:
        if given.lengths is None and given.batch_sizes is None and all(isinstance(extent, int) for extent in shape):
            peephole, mask = first.get("peephole"), given.mask
            problem = problem_of(
                shape,
                dtype_of(x.dtype),
                cells,
                plan.single,
                units,
                outputs if "weight_hr" in first else 0,
                given.bidirectional,
                given.batch_first,
                0 if peephole is None else peephole.dim(),
                0 if mask is None else 2 if mask.dim() > 3 and mask.shape[-4] > 1 else 1,
                plan.zoneout is not None and plan.zoneout[0] is not None,
                given.dropout,
                True,
                plan.cell_options(),
            )
            size = problem.cache_bytes(None)
        elif not x.is_meta:  # a tensor on the meta device cannot have a size that depends on data
            size = torch.library.get_ctx().new_dynamic_size()
    lead = (samples,) if plan.single else (cells, samples)
    return (
        x.new_empty(0) if plan.single else x.new_empty((*shape[:2], outputs * directions)),
        x.new_empty((*lead, outputs)),
        x.new_empty((*lead, units)) if plan.has_cells else x.new_empty(0),
        x.new_empty(size, dtype=torch.uint8),
    )


def _backward_arguments(arguments: Sequence[Any]) -> tuple[Recurrent, Tensor, Sequence[bool]]:
    """The arguments of forward, its buffer and the gradients that are needed."""
    buffer, need = arguments[_TENSORS : _TENSORS + 2]
    return new_recurrent((*arguments[:_TENSORS], True, *arguments[_TENSORS + 2 :])), buffer, need


def _backward_kernel(dy: Tensor | None, dhn: Tensor | None, dcn: Tensor | None, *arguments: Any) -> list[Tensor]:
    given, filled, need = _backward_arguments(arguments)
    plan = given.plan
    buffer = array(filled, given.layer, "cache") if filled.numel() else None
    arrays = given.arrays(plan)
    cache = FUNCTIONS[plan.cell.name].cache(
        *(arrays if plan.has_cells else arrays[:3]), buffer=buffer, **given.keywords(plan)
    )
    outgoing = None if plan.single else dy, dhn, dcn if plan.has_cells else None
    return [gradient for gradient in backward(given, need, cache, *outgoing) if gradient is not None]


def _backward_shapes(dy: Tensor | None, dhn: Tensor | None, dcn: Tensor | None, *arguments: Any) -> list[Tensor]:
    given, _, need = _backward_arguments(arguments)
    inputs = (*given[:3], *given.weights)
    return [t.new_empty(t.shape) for t, needed in zip(inputs, need, strict=True) if needed and t is not None]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, Recurrent(*inputs), output[3], *inputs[_DIFFERENTIABLE:_TENSORS])
    ctx.mark_non_differentiable(output[3])


def _differentiate(ctx: Any, dy: Any, dhn: Any, dcn: Any, _: Any) -> tuple[Any, ...]:
    buffer, given = _saved(ctx.options, ctx.saved_tensors)
    need = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[3]]
    found = iter(_backward_operator(dy, dhn, dcn, *given[:_TENSORS], buffer, need, *given[_TENSORS + 1 :]))
    dx, dh0, dc0, *dweights = [next(found) if needed else None for needed in need]
    return dx, dh0, dc0, dweights, *(None,) * (len(given) - _DIFFERENTIABLE)


_operator: Final = define(
    "recurrent",
    f"({_TENSOR_ARGUMENTS}, bool keep, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _kernel,
    _shapes,
)
_backward_operator: Final = define(
    "recurrent_backward",
    f"(Tensor? dy, Tensor? dhn, Tensor? dcn, {_TENSOR_ARGUMENTS}, Tensor buffer, bool[] need, {_OPTIONS}) -> Tensor[]",
    _backward_kernel,
    _backward_shapes,
)
differentiate("recurrent", _set_up, _differentiate)
