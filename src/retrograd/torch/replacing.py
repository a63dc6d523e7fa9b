"""Replace the layers of an existing PyTorch model, and give PyTorch's classes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from ..ops.activation import Activation
from . import norms, recurrent
from ._leaf import has_hooks
from ._subclass import calls_torchs_forward, class_with, original_class
from .recurrent import DropoutMasks, Layers, Recurrent, check_dropout_masks, unsupported
from .sync import SyncBatchNorm

__all__ = ["Replacements", "replace", "restore"]

REPLACEMENTS: Final[dict[type[torch.nn.Module], type[torch.nn.Module]]] = {
    torch.nn.SyncBatchNorm: SyncBatchNorm,
    **{getattr(torch.nn, name): getattr(recurrent, name) for name in recurrent.__all__},
    **{getattr(torch.nn, name): getattr(norms, name) for name in norms.__all__},
}
_OURS: Final = tuple(REPLACEMENTS.values())
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
_REPLACED_BY: Final = "_fused_activation"  # an attribute of the Identity: the activation and the name of its norm
_FLOATS: Final = (torch.float32, torch.float64)
_NAMES: Final = frozenset(kind.__name__ for kind in REPLACEMENTS)
# Recurrent layers and normalizations, including those that have no replacement.
_RELATED: Final = (
    torch.nn.RNNBase,
    torch.nn.RNNCellBase,
    torch.nn.RMSNorm,
    torch.nn.LocalResponseNorm,
    torch.nn.CrossMapLRN2d,
    *REPLACEMENTS,
)

# What to replace: classes, patterns of names such as "encoder.*", or a function of a name and a layer.
Choice: TypeAlias = type[torch.nn.Module] | str | Callable[[str, torch.nn.Module], bool]
Only: TypeAlias = Choice | Iterable[Choice] | None


class Replacements(NamedTuple):
    """What :func:`replace` did to each layer, and why it left others as they were: both by the layer's name."""

    replaced: dict[str, str]
    left: dict[str, str]

    def __str__(self) -> str:
        return self.described("replaced")

    def described(self, done: str) -> str:
        width = max(map(len, (*self.replaced, *self.left)), default=0)
        lines = [f"{done}: {len(self.replaced)}", *(f"  {n:{width}}  {what}" for n, what in self.replaced.items())]
        if self.left:
            lines += [f"left as they were: {len(self.left)}"]
            lines += [f"  {name:{width}}  {why}" for name, why in self.left.items()]
        return "\n".join(lines)


def replace(
    model: torch.nn.Module,
    *,
    only: Only = None,
    fuse: bool = False,
    dropout_masks: DropoutMasks | None = None,
    verbose: bool = True,
) -> Replacements:
    """Replace the recurrent layers and normalizations of a model by retrograd's, in place, and print which.

    The model and its layers stay the same objects, with their parameters, buffers, hooks, names and modes; only the
    class of a layer changes. Recurrent layers and normalizations that cannot be replaced are listed as left, with the
    reason; so are layers of other packages that have the same names. Layers of other kinds, such as linear ones, are
    not part of the result. `only` selects layers: by class, by a pattern of their names (``"encoder.*"``), by a
    function of name and layer, or by any of several of these.

    A subclass is replaced if it has PyTorch's `forward`, or one that calls ``super().forward``: retrograd's class goes
    before PyTorch's in its method resolution order.

    With `fuse`, where an activation follows a normalization in a `torch.nn.Sequential`, the normalization applies it,
    and the activation becomes a `torch.nn.Identity`. So the normalization returns activated values to any code that
    calls it alone. A hook on it would see them too, so those with hooks are left, as are those in a subclass of
    `Sequential` that has a `forward` of its own. With ``verbose=False`` nothing is printed; the result is the same.

    With ``dropout_masks="torch"`` the recurrent layers draw the masks of dropout between layers that PyTorch's would
    draw, so that losses can be compared. It is also set for selected layers that are retrograd's already.
    """
    _check_model("replace", model)
    result, selected = Replacements({}, {}), as_choice(only)
    if dropout_masks is not None:
        check_dropout_masks("replace", dropout_masks)
    for name, layer in model.named_modules():
        replace_one(name or "(the model)", layer, selected, dropout_masks, result)
    if fuse:
        uses = Counter(id(layer) for _, layer in model.named_modules(remove_duplicate=False))
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Sequential):
                _fuse(f"{name}." if name else "", layer, uses, result)
    if verbose:
        print(result)
    return result


def restore(model: torch.nn.Module, *, verbose: bool = True) -> Replacements:
    """Give a model's layers PyTorch's classes back, in place, for code that knows only those.

    Fused activations become layers again. Layers with options that PyTorch's have not are left, with the reason. The
    result's `replaced` has the layers that are PyTorch's again.
    """
    _check_model("restore", model)
    result = Replacements({}, {})
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Sequential):
            _unfuse(f"{name}." if name else "", layer, result)
    for name, layer in model.named_modules():
        kind = original_class(type(layer), _ORIGINAL)
        if kind is None:
            continue
        reason = _reason_to_stay(layer)
        if reason:
            result.left[name or "(the model)"] = f"{type(layer).__name__}: {reason}"
            continue
        layer.__class__ = kind
        if isinstance(layer, torch.nn.RNNBase | torch.nn.RNNCellBase):
            for own in ("_encoded", "_more", "_direct", "dropout_masks"):
                layer.__dict__.pop(own, None)
        result.replaced[name or "(the model)"] = kind.__name__
    if verbose:
        print(result.described("restored"))
    return result


_ORIGINAL: Final = {ours: theirs for theirs, ours in REPLACEMENTS.items()}


def _reason_to_stay(layer: torch.nn.Module) -> str:
    if isinstance(layer, Recurrent):
        given = [name for name in layer._names if name in layer.__dict__]
        if getattr(layer, "nonlinearity", "tanh") not in ("tanh", "relu"):
            given.append("nonlinearity")
    else:
        given = ["activation"] if getattr(layer, "activation", None) is not None else []
    return f"PyTorch's has no {' and '.join(given)} such as {getattr(layer, given[0])!r}" if given else ""


def _check_model(function: str, model: object) -> None:
    if isinstance(model, torch.nn.Module):
        return
    if isinstance(model, type):
        raise TypeError(f"{function}: model is the class {model.__name__}, must be a model, an instance of one")
    raise TypeError(f"{function}: model is a {type(model).__name__}, must be a torch.nn.Module")


def as_choice(only: Only, function: str = "replace") -> Callable[[str, torch.nn.Module], bool]:
    """Whether a layer is selected, as a function of its name and the layer."""
    if only is None:
        return lambda name, layer: True
    if isinstance(only, torch.nn.Module):
        raise TypeError(f"{function}: only is a layer, {type(only).__name__}(); give its class, or its name")
    if isinstance(only, type):
        theirs = _ORIGINAL.get(only, only)
        return lambda name, layer: isinstance(layer, (theirs, only))
    if isinstance(only, str):
        return lambda name, layer: fnmatchcase(name, only)
    if callable(only):
        return only
    if not isinstance(only, Iterable) or isinstance(only, bytes):
        raise TypeError(f"{function}: only is {only!r}, must be a class, a pattern, a function or several of these")
    choices = [as_choice(one, function) for one in only]
    return lambda name, layer: any(choice(name, layer) for choice in choices)


def replace_one(
    name: str,
    layer: torch.nn.Module,
    selected: Callable[[str, torch.nn.Module], bool],
    dropout_masks: DropoutMasks | None,
    result: Replacements,
) -> None:
    """Replace a layer if it is one of those that can be, and say what was done."""
    kind = type(layer)
    if isinstance(layer, _OURS):
        if isinstance(layer, Layers) and dropout_masks is not None and selected(name, layer):
            layer.dropout_masks = dropout_masks
        return
    if not isinstance(layer, (*_RELATED, torch.nn.modules.lazy.LazyModuleMixin)):
        known = getattr(layer, "original_name", kind.__name__)  # of a compiled layer
        # A model is not its layer, even if it has the layer's name: what is inside is listed.
        if known in _NAMES and not any(isinstance(inner, (*_OURS, *_RELATED)) for inner in layer.modules()):
            where = "compiled by torch.jit" if isinstance(layer, torch.jit.ScriptModule) else f"of {kind.__module__}"
            result.left[name] = f"{known}: it is {where}, not of torch.nn"
        return
    base = next((one for one in kind.__mro__ if one in REPLACEMENTS), None)
    reason = ""
    if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
        if layer.cls_to_become not in REPLACEMENTS:
            return
        reason = "it is not initialized yet; run the model once first"
    elif base is None:
        described = next(one for one in kind.__mro__ if one.__module__.startswith("torch.nn.modules."))
        reason = f"retrograd.torch has no {described.__name__}"
    elif not selected(name, layer):
        reason = "not selected by only"
    else:
        reason = _reason_against(layer, base)
    if reason or base is None:
        result.left[name] = f"{kind.__name__}: {reason}"
        return
    layer.__class__ = class_with(kind, base, REPLACEMENTS[base])
    if isinstance(layer, Recurrent):
        layer.encode_options()
    if isinstance(layer, Layers) and dropout_masks is not None:
        layer.dropout_masks = dropout_masks
    result.replaced[name] = kind.__name__


def _reason_against(layer: torch.nn.Module, base: type[torch.nn.Module]) -> str:
    """Why retrograd cannot run this layer; empty if it can."""
    is_recurrent = isinstance(layer, (torch.nn.RNNBase, torch.nn.RNNCellBase))
    if "forward" in layer.__dict__:
        return "its forward was assigned to the object, and would be called instead of retrograd's"
    if not calls_torchs_forward(type(layer), base):
        return f"its forward does not call that of {base.__name__}, and may compute something else"
    if type(layer) is not base and not issubclass(REPLACEMENTS[base], base):
        return f"a subclass of {base.__name__}, which retrograd's is not"
    for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
        if tensor.device.type not in ("cpu", "meta"):
            return f"it is on {tensor.device}, and retrograd computes on the CPU"
        if is_recurrent and tensor.dtype not in _FLOATS:
            return f"its weights are {tensor.dtype}; retrograd's {base.__name__} is float32 or float64"
    return unsupported(layer) if is_recurrent else ""


def _fuse(prefix: str, sequence: torch.nn.Sequential, uses: Counter[int], result: Replacements) -> None:
    for (name, norm), (next_name, activation) in pairwise(list(sequence._modules.items())):
        if not isinstance(norm, norms.Fused) or norm.activation is not None or type(activation) not in _FUSED:
            continue
        label = f"{prefix}{next_name}"
        reason = ""
        if not _is_plain(sequence):
            reason = f"{type(sequence).__name__} is not a plain Sequential, and may use the normalization alone"
        elif type(norm) not in _OURS:
            reason = "the normalization before it is of a subclass, which may use its result"
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
            identity = torch.nn.Identity().train(activation.training)
            identity.__dict__[_REPLACED_BY] = activation, name
            setattr(sequence, next_name, identity)
            result.replaced[label] = f"{type(activation).__name__}, fused with {prefix}{name}"


def _unfuse(prefix: str, sequence: torch.nn.Sequential, result: Replacements) -> None:
    for name, layer in list(sequence._modules.items()):
        if type(layer) is torch.nn.Identity and _REPLACED_BY in layer.__dict__:
            activation, norm_name = layer.__dict__[_REPLACED_BY]
            norm = sequence._modules.get(norm_name)
            if isinstance(norm, norms.Fused) and norm.activation is not None:
                norm.activation = None
                setattr(sequence, name, activation.train(layer.training))
                result.replaced[f"{prefix}{name}"] = type(activation).__name__


def _is_plain(sequence: torch.nn.Sequential) -> bool:
    """Whether a call runs the layers one after another, and nothing else."""
    kind, plain = type(sequence), torch.nn.Sequential
    return (
        kind.forward is plain.forward
        and kind.__call__ is plain.__call__
        and kind.__iter__ is plain.__iter__
        and "forward" not in sequence.__dict__
    )
