"""How autograd sees retrograd's functions: as a `torch.autograd.Function`, or as custom operators of `torch.library`.

`torch.compile`, `torch.export`, dispatch modes and tensor subclasses need operators. Calling an operator takes tens of
microseconds longer than calling a Function, so plain tensors in eager mode use a Function. Both run the same code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

_NAMESPACE: Final = "retrograd"
_PLAIN: Final = (Tensor, torch.nn.Parameter)


def is_eager(x: Tensor) -> bool:
    """Whether x is an ordinary CPU tensor, and nothing traces, transforms or intercepts operators."""
    return (
        type(x) in _PLAIN
        and x.is_cpu
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._is_tracing()
    )


def is_plain(tensor: Tensor | None) -> bool:
    """Whether a parameter is an ordinary CPU tensor, or missing."""
    return tensor is None or (type(tensor) in _PLAIN and tensor.is_cpu)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The function's `apply` without its check for transforms, which `is_eager` has made in less time."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def check_device(function: str, x: Tensor) -> None:
    """Raise for a tensor on another device. Those on the meta device have no data, only shapes."""
    if x.device.type not in ("cpu", "meta"):
        raise ValueError(f"{function}: input is on {x.device}, but retrograd computes on the CPU; pass input.cpu()")


def check_traceable(function: str, x: Tensor) -> None:
    """Raise for a tensor that the operators cannot take."""
    check_device(function, x)
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise UseTorch(f"{function}: retrograd has no torch.func transforms; use torch.autograd or torch.nn")


class UseTorch(NotImplementedError):
    """What retrograd does not compute and PyTorch's layer does."""


_warned: Final[set[str]] = set()


def warn_of_torch(reason: UseTorch) -> None:
    """Say once per reason that PyTorch's layer runs instead."""
    if not torch.compiler.is_compiling() and str(reason) not in _warned:
        _warned.add(str(reason))
        warnings.warn(f"{reason}. PyTorch's own computes this call", RuntimeWarning, stacklevel=4)


def differentiate_once(function: str, backward: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """Run a backward pass. If it is recorded itself (create_graph=True), its own derivative is an error."""
    if torch.is_grad_enabled():
        return _Once.apply(function, backward, *tensors)
    return backward(*tensors)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: str, backward: Callable[..., Any], *tensors: Tensor | None) -> Any:
        ctx.function = function
        return backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> NoReturn:
        _refuse_second_derivative(ctx.function)


def _refuse_second_derivative(function: str) -> NoReturn:
    raise NotImplementedError(
        f"{function}: there is no second derivative. Use torch.nn's layer where gradients are differentiated"
    )


def define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an operator: its kernel for CPU tensors, and a function that finds the shapes of its results.

    An operator whose arguments change between releases needs a new name: the compiler's cache on disk has calls of it.
    """
    qualified = f"{_NAMESPACE}::{name}"
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    # The compiler would trace a kernel that runs after a graph break.
    torch.library.impl(qualified, "CPU", torch.compiler.disable(torch.no_grad()(kernel)))
    torch.library.register_fake(qualified, fake)
    return getattr(getattr(torch.ops, _NAMESPACE), name)


def differentiate(name: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Register the gradient of an operator, which another operator computes; that one's gradient is an error."""
    torch.library.register_autograd(f"{_NAMESPACE}::{name}", backward, setup_context=setup)
    torch.library.register_autograd(
        f"{_NAMESPACE}::{name}_backward", lambda ctx, *gradients: _refuse_second_derivative(name)
    )
