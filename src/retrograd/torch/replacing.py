"""Replace the layers of an existing PyTorch model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch

from ..ops.activation import Activation
from . import norms, recurrent
from ._leaf import has_hooks
from .recurrent import Recurrent, unsupported
from .sync import SyncBatchNorm

__all__ = ["Replacements", "replace"]

_REPLACEMENTS: Final[dict[type[torch.nn.Module], type[torch.nn.Module]]] = {
    torch.nn.SyncBatchNorm: SyncBatchNorm,
    **{getattr(torch.nn, name): getattr(recurrent, name) for name in recurrent.__all__},
    **{getattr(torch.nn, name): getattr(norms, name) for name in norms.__all__},
}
_FUSED: Final[dict[type[torch.nn.Module], Callable[[Any], Activation]]] = {
    torch.nn.ReLU: lambda layer: Activation("relu"),
    torch.nn.ReLU6: lambda layer: Activation("relu6"),
    torch.nn.LeakyReLU: lambda layer: Activation("leaky_relu", alpha=layer.negative_slope),
    torch.nn.ELU: lambda layer: Activation("elu", alpha=layer.alpha),
    torch.nn.SiLU: lambda layer: Activation("silu"),
    torch.nn.GELU: lambda layer: Activation("gelu_tanh" if layer.approximate == "tanh" else "gelu"),
    torch.nn.Hardswish: lambda layer: Activation("hard_swish"),
    torch.nn.Sigmoid: lambda layer: Activation("sigmoid"),
    torch.nn.Tanh: lambda layer: Activation("tanh"),
}
_FLOATS: Final = (torch.float32, torch.float64)
# Recurrent layers and normalizations, including those that have no replacement.
_RELATED: Final = (
    torch.nn.RNNBase,
    torch.nn.RNNCellBase,
    torch.nn.RMSNorm,
    torch.nn.LocalResponseNorm,
    torch.nn.CrossMapLRN2d,
    *_REPLACEMENTS,
)


class Replacements(NamedTuple):
    """What :func:`replace` did to each layer, and why it left others as they were: both by the layer's name."""

    replaced: dict[str, str]
    left: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, (*self.replaced, *self.left)), default=0)
        lines = [f"replaced: {len(self.replaced)}", *(f"  {n:{width}}  {what}" for n, what in self.replaced.items())]
        if self.left:
            lines += [f"left as they were: {len(self.left)}"]
            lines += [f"  {name:{width}}  {why}" for name, why in self.left.items()]
        return "\n".join(lines)


def replace(model: torch.nn.Module, *, fuse: bool = False, verbose: bool = True) -> Replacements:
    """Replace the recurrent layers and normalizations of a model by retrograd's, in place, and print which.

    The model and its layers stay the same objects, with their parameters, buffers, hooks, names and modes; only the
    class of a layer changes. Recurrent layers and normalizations that cannot be replaced are listed as left, with the
    reason. Layers of other kinds, such as linear ones, are not part of the result.

    With `fuse`, where an activation follows a normalization in a `torch.nn.Sequential`, the normalization applies it,
    and the activation becomes a `torch.nn.Identity`. So the normalization returns activated values to any code that
    calls it alone. A hook on it would see them too, so those with hooks are left, as are those in a subclass of
    `Sequential` that has a `forward` of its own. With ``verbose=False`` nothing is printed; the result is the same.
    """
    result = Replacements({}, {})
    for name, layer in model.named_modules():
        _replace_one(name or "(the model)", layer, result)
    if fuse:
        uses = Counter(id(layer) for _, layer in model.named_modules(remove_duplicate=False))
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Sequential):
                _fuse(f"{name}." if name else "", layer, uses, result)
    if verbose:
        print(result)
    return result


def _replace_one(name: str, layer: torch.nn.Module, result: Replacements) -> None:
    kind = type(layer)
    if kind in _REPLACEMENTS:
        reason = _reason_against(layer)
        if not reason:
            layer.__class__ = _REPLACEMENTS[kind]
            if isinstance(layer, Recurrent):
                layer.encode_options()
            result.replaced[name] = kind.__name__
            return
    elif isinstance(layer, tuple(_REPLACEMENTS.values())):
        return
    elif isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin) and layer.cls_to_become in _REPLACEMENTS:
        reason = "it is not initialized yet; run the model once first"
    elif not isinstance(layer, _RELATED):
        return
    elif kind.__module__.startswith("torch.nn.modules."):
        reason = f"retrograd.torch has no {kind.__name__}"
    else:
        reason = "a subclass, which may compute something else"
    result.left[name] = f"{kind.__name__}: {reason}"


def _reason_against(layer: torch.nn.Module) -> str:
    """Why retrograd cannot run this layer; empty if it can."""
    is_recurrent = isinstance(layer, (torch.nn.RNNBase, torch.nn.RNNCellBase))
    if "forward" in layer.__dict__:
        return "its forward was assigned to the object, and would be called instead of retrograd's"
    for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
        if tensor.device.type not in ("cpu", "meta"):
            return f"it is on {tensor.device}, and retrograd computes on the CPU"
        if is_recurrent and tensor.dtype not in _FLOATS:
            return f"its weights are {tensor.dtype}; retrograd's {type(layer).__name__} is float32 or float64"
    return unsupported(layer) if is_recurrent else ""


def _fuse(prefix: str, sequence: torch.nn.Sequential, uses: Counter[int], result: Replacements) -> None:
    for (name, norm), (next_name, activation) in pairwise(list(sequence._modules.items())):
        if not isinstance(norm, norms.Fused) or norm.activation is not None or type(activation) not in _FUSED:
            continue
        label = f"{prefix}{next_name}"
        reason = ""
        if not _is_plain(sequence):
            reason = f"{type(sequence).__name__} is not a plain Sequential, and may use the normalization alone"
        elif uses[id(norm)] > 1:
            reason = "the normalization before it is used more than once"
        elif has_hooks(norm) or has_hooks(activation):
            reason = "it or the normalization before it has hooks"
        elif "forward" in norm.__dict__ or "forward" in activation.__dict__:
            reason = "its forward or that of the normalization before it was assigned to the object"
        if reason:
            result.left[label] = f"{type(activation).__name__}: {reason}"
        else:
            norm.activation = _FUSED[type(activation)](activation)
            setattr(sequence, next_name, torch.nn.Identity().train(activation.training))
            result.replaced[label] = f"{type(activation).__name__}, fused with {prefix}{name}"


def _is_plain(sequence: torch.nn.Sequential) -> bool:
    """Whether a call runs the layers one after another, and nothing else."""
    kind, plain = type(sequence), torch.nn.Sequential
    return (
        kind.forward is plain.forward
        and kind.__call__ is plain.__call__
        and kind.__iter__ is plain.__iter__
        and "forward" not in sequence.__dict__
    )
