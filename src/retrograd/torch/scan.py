"""The linear recurrence h[t] = a[t] * h[t-1] + b[t] with gradients, for tensors."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from ..ops._call import named
from ..ops._errors import ArgumentTypeError
from ..ops.scan import ScanCache, check_broadcast, check_operands, scan_backward, scan_forward
from ._arrays import array, check_tensor, num_threads
from ._autograd import apply_of, check_traceable, define, differentiate, differentiate_once, is_eager

_FLOATS: Final = (torch.float32, torch.float64)


@named
def scan(
    a: Tensor, b: Tensor, h0: Tensor | None = None, *, axis: int = 0, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``y[t] = a[t] * y[t-1] + b[t]`` along an axis, elementwise over the others; returns y and the last state.

    `a` and `reset` are broadcast to the shape of b. Where `reset` is true, a[t] counts as 0.
    """
    for name, given in (("a", a), ("b", b), ("h0", b if h0 is None else h0)):
        check_tensor("scan", name, given)
    if b.dtype not in _FLOATS:
        raise ArgumentTypeError("b", "{b} has dtype {}; it must be float32 or float64", b.dtype)
    axis = check_operands(a, b, h0, axis)
    if reset is not None:
        if reset.dtype is not torch.bool:
            raise ArgumentTypeError("reset", "{reset} has dtype {}; it must be bool", reset.dtype)
        check_broadcast("reset", tuple(reset.shape), tuple(b.shape))
        a = torch.where(reset, 0, a)
    if a.shape != b.shape:
        a = a.expand(b.shape)  # of stride 0, without memory
    if is_eager(b) and is_eager(a) and (h0 is None or is_eager(h0)):
        y, hn = _apply(a, b, h0, axis)
        return y, hn
    for tensor in (a, b, h0):
        if tensor is not None:
            check_traceable("scan", tensor)
    y, hn = _operator(a, b, h0, axis)
    return y, hn


def _forward(a: Tensor, b: Tensor, h0: Tensor | None, axis: int) -> tuple[Tensor, Tensor]:
    start = None if h0 is None else array(h0, "scan", "h0")
    y, hn, _ = scan_forward(array(a, "scan", "a"), array(b, "scan", "b"), start, axis=axis, num_threads=num_threads())
    return torch.from_numpy(y), torch.from_numpy(hn)


def _backward(
    need: Any, axis: int, dy: Tensor | None, dhn: Tensor | None, a: Tensor, y: Tensor, h0: Tensor | None
) -> list[Tensor | None]:
    wanted = [name for name, want in zip(("da", "db", "dh0"), need, strict=False) if want]
    cache = ScanCache(
        axis, array(a, "scan", "a"), None if h0 is None else array(h0, "scan", "h0"), None, array(y, "scan", "y")
    )
    given = [None if g is None else array(g, "scan", "gradient") for g in (dy, dhn)]
    found = scan_backward(given[0], cache, dhn=given[1], need=wanted, num_threads=num_threads())
    return [None if gradient is None else torch.from_numpy(gradient) for gradient in found]


# ---- eager tensors ---------------------------------------------------------------------------------------------------


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, h0: Tensor | None, axis: int) -> tuple[Tensor, Tensor]:
        y, hn = _forward(a, b, h0, axis)
        ctx.axis = axis
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, y, h0)
        return y, hn

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dhn: Tensor | None) -> tuple[Tensor | None, ...]:
        need, axis = ctx.needs_input_grad[:3], ctx.axis
        if dy is None and dhn is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            found = differentiate_once(
                "scan", lambda *tensors: tuple(_backward(need, axis, *tensors)), dy, dhn, *ctx.saved_tensors
            )
        else:
            found = _backward(need, axis, dy, dhn, *ctx.saved_tensors)
        return *found, None


_apply: Final = apply_of(_Scan)


# ---- operators -------------------------------------------------------------------------------------------------------


def _shapes(a: Tensor, b: Tensor, h0: Tensor | None, axis: int) -> tuple[Tensor, Tensor]:
    state = (*b.shape[:axis], *b.shape[axis + 1 :])
    return torch.empty_like(b, memory_format=torch.contiguous_format), b.new_empty(state)


def _gradients(*arguments: Any) -> list[Tensor]:
    need, axis, *tensors = arguments
    return [gradient for gradient in _backward(need, axis, *tensors) if gradient is not None]


def _gradient_shapes(
    need: list[bool], axis: int, dy: Tensor | None, dhn: Tensor | None, a: Tensor, y: Tensor, h0: Tensor | None
) -> list[Tensor]:
    state = (*y.shape[:axis], *y.shape[axis + 1 :])
    shapes = (y.shape, y.shape, state)
    return [y.new_empty(shape) for shape, want in zip(shapes, need, strict=True) if want]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, _, h0, ctx.axis = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, output[0], h0)


def _differentiate(ctx: Any, dy: Tensor | None, dhn: Tensor | None) -> tuple[Tensor | None, ...]:
    need = list(ctx.needs_input_grad[:3])
    if dy is None and dhn is None:
        return None, None, None, None
    found = iter(_backward_operator(need, ctx.axis, dy, dhn, *ctx.saved_tensors))
    return *(next(found) if want else None for want in need), None


_operator: Final = define("scan", "(Tensor a, Tensor b, Tensor? h0, int axis) -> (Tensor, Tensor)", _forward, _shapes)
_backward_operator: Final = define(
    "scan_backward",
    "(bool[] need, int axis, Tensor? dy, Tensor? dhn, Tensor a, Tensor y, Tensor? h0) -> Tensor[]",
    _gradients,
    _gradient_shapes,
)
differentiate("scan", _set_up, _differentiate)
