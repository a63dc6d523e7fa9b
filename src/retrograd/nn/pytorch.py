"""Layers from modules of PyTorch, and back: their options and values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

import retrograd as rg

from .images import AveragePool, Conv, ConvTranspose, MaxPool
from .layers import Activation, Dropout, Embedding, Flatten, Linear, Softmax
from .module import Module, Sequential
from .norms import BatchNorm, GroupNorm, InstanceNorm, LayerNorm
from .recurrent import GRU, LSTM, RNN, Recurrent

__all__ = ["from_torch", "to_torch"]


class _Pair(NamedTuple):
    """Our class, and how options are called: "theirs=ours", or one name if that is the same."""

    ours: type[Module]
    options: str = ""
    only: Mapping[str, Any] = MappingProxyType({})  # options of PyTorch's that can only have this value
    axes: tuple[int, ...] = ()  # PyTorch has a class for each of these numbers of spatial axes, such as Conv1d

    def names(self) -> list[tuple[str, str]]:
        """The names of each option, theirs and ours."""
        return [(name.partition("=")[0], name.rpartition("=")[2]) for name in self.options.split()]


_RUNNING: Final = "num_features=channels eps affine track_running_stats=running momentum=update"
_CONV: Final = "in_channels out_channels kernel_size=kernel stride padding dilation groups bias"
_POOL: Final = "kernel_size=kernel stride padding"
_AVERAGE: Final = f"{_POOL} count_include_pad=count_includes_padding"
_RECURRENT: Final = "input_size=inputs hidden_size=hidden num_layers=layers bias batch_first dropout bidirectional"
_EMBEDDING: Final = "num_embeddings=rows embedding_dim=features padding_idx=padding_index"

# By the name of PyTorch's class.
_PAIRS: Final = {
    "LSTM": _Pair(LSTM, f"{_RECURRENT} proj_size=projection"),
    "GRU": _Pair(GRU, _RECURRENT),
    "RNN": _Pair(RNN, f"{_RECURRENT} nonlinearity=activation"),
    "BatchNorm": _Pair(BatchNorm, _RUNNING, axes=(1, 2, 3)),
    "InstanceNorm": _Pair(InstanceNorm, _RUNNING, axes=(1, 2, 3)),
    "LayerNorm": _Pair(LayerNorm, "normalized_shape=shape eps elementwise_affine=affine"),
    "GroupNorm": _Pair(GroupNorm, "num_groups=groups num_channels=channels eps affine"),
    "Linear": _Pair(Linear, "in_features=inputs out_features=outputs bias"),
    "Embedding": _Pair(Embedding, _EMBEDDING, {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}),
    "Conv": _Pair(Conv, _CONV, {"padding_mode": "zeros"}, (1, 2)),
    "ConvTranspose": _Pair(ConvTranspose, f"{_CONV} output_padding", {"padding_mode": "zeros"}, (1, 2)),
    "MaxPool": _Pair(MaxPool, f"{_POOL} dilation", {"return_indices": False, "ceil_mode": False}, (1, 2)),
    "AvgPool": _Pair(AveragePool, _AVERAGE, {"ceil_mode": False, "divisor_override": None}, (1, 2)),
    "Flatten": _Pair(Flatten, "", {"start_dim": 1, "end_dim": -1}),
    "Dropout": _Pair(Dropout, "p=rate"),
    "Softmax": _Pair(Softmax, "dim=axis"),
}

# Our activations, and PyTorch's class with its names of alpha and beta.
_ACTIVATIONS: Final = {
    "celu": "CELU alpha", "clamp": "Hardtanh min_val max_val", "elu": "ELU alpha", "hard_sigmoid": "Hardsigmoid",
    "hard_swish": "Hardswish", "identity": "Identity", "leaky_relu": "LeakyReLU negative_slope",
    "log_sigmoid": "LogSigmoid", "relu": "ReLU", "relu6": "ReLU6", "selu": "SELU", "sigmoid": "Sigmoid", "silu": "SiLU",
    "softsign": "Softsign", "tanh": "Tanh", "tanh_shrink": "Tanhshrink", "threshold": "Threshold threshold value",
}  # fmt: skip

# Options of our layers that can only have one value in PyTorch, and what to say of another one.
_ONLY: Final = {
    "activation": (None, "it has a fused activation, {}; make that a layer of its own"),
    "activations": (None, "it has {}, PyTorch's {kind} has sigmoid and tanh"),
    "cell_clip": (None, "cell_clip is {}, which PyTorch's {kind} does not have"),
    "channel_axis": (1, "channel_axis is {}, PyTorch's is always 1"),
    "channels_last": (False, "channels_last is {}, PyTorch's has channels first"),
    "clip": (None, "clip is {}, which PyTorch's {kind} does not have"),
    "coupled": (False, "its gates are coupled, those of PyTorch's {kind} are not"),
    "embedding": (None, "it has an embedding; make that a layer of its own"),
    "flip": (False, "flip is {}, z of PyTorch's {kind} is the weight of the old state"),
    "kind": ("after", "kind is {!r}, PyTorch's {kind} resets after the product"),
    "last": (False, "last is {}, PyTorch's {kind} returns all outputs"),
    "norm": (None, "norm is {!r}, which PyTorch's {kind} does not have"),
    "peephole": (False, "it has peepholes, which PyTorch's {kind} does not have"),
    "recurrent_dropout": (0, "recurrent_dropout is {}, which PyTorch's {kind} does not have"),
    "zoneout": ((0, 0), "zoneout is {}, which PyTorch's {kind} does not have"),
}


class _Refused(Exception):
    """Why a layer has no counterpart; the caller knows its name."""


# ---- from PyTorch ----------------------------------------------------------------------------------------------------


def from_torch(module: Any) -> Module:
    """Return a layer with the options and copies of the values of a ``torch.nn`` module, or a Sequential of them.

    A module that has no counterpart here is refused, as is one with an option that has none. A module in several places
    becomes one layer in these places, and one whose parameters are all frozen a frozen layer.
    """
    from ..convert.kinds import Kind
    from ..convert.state import from_torch_state, to_native

    layer = _from_module("", module, {})
    inside = dict(module.named_modules())  # each once
    state: dict[str, Any] = {}
    owners: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name.rpartition(".")[0] in inside:
            if (owner := owners.setdefault(id(tensor), name)) != name:
                raise ValueError(f"from_torch: {owner} and {name} are one parameter, here each layer has its own")
            state[name] = tensor.detach().cpu().numpy()
    kinds = {name: Kind(type(m).__name__.lower()) for name, m in inside.items() if _is(m, "Linear", "Embedding")}
    seeds = {name: buffer.saved for name, buffer in layer.buffers().items() if name.rpartition(".")[2] == "stream"}
    layer.load_state_dict({**to_native(from_torch_state(state, kinds)), **seeds})
    return layer


def _is(module: Any, *kinds: str) -> bool:
    return type(module).__name__ in kinds and type(module).__module__.startswith("torch.nn.")


def _from_module(name: str, module: Any, made: dict[Any, Module]) -> Module:
    if module in made:
        return made[module]
    if _is(module, "Sequential"):
        layers = {key: _from_module(f"{name}.{key}" if name else key, m, made) for key, m in module._modules.items()}
        plain = list(layers) == [str(k) for k in range(len(layers))]
        layer: Module = Sequential(*layers.values()) if plain else Sequential(**layers)
    else:
        title = f"from_torch: {name or 'the module'} ({type(module).__name__})"
        try:
            found = _activation(module) or _layer(module)
        except (_Refused, ValueError) as error:
            raise ValueError(f"{title}: {error}") from None
        if found is None:
            raise TypeError(f"{title}: retrograd.nn has no counterpart of this module")
        layer = found
        if not any(parameter.requires_grad for parameter in module.parameters()):
            layer.freeze()
    layer.training = bool(module.training)
    made[module] = layer
    return layer


def _layer(module: Any) -> Module | None:
    kind, axes = re.fullmatch(r"(.+?)(?:([123])d)?", type(module).__name__).groups()  # type: ignore[union-attr]
    pair = _PAIRS.get(kind) if type(module).__module__.startswith("torch.nn.") else None
    if pair is None or (int(axes) not in pair.axes if axes else pair.axes):
        return None
    for option, only in pair.only.items():
        if (value := getattr(module, option, only)) != only:
            raise _Refused(f"{option} is {value!r}, here it can only be {only!r}")
    given = {ours: _FROM[ours](module) if ours in _FROM else getattr(module, theirs) for theirs, ours in pair.names()}
    dtypes = {str(t.dtype).removeprefix("torch.") for t in module.state_dict().values() if t.is_floating_point()}
    if len(dtypes) > 1 or not dtypes <= {"float32", "float64"}:
        raise _Refused(f"its parameters are {' and '.join(sorted(dtypes))}, must be float32 or float64")
    return pair.ours(**given, **({"dtype": dtypes.pop()} if dtypes else {}))


def _affine(module: Any) -> bool:
    if module.weight is not None and module.bias is None:
        raise _Refused("it has a weight and no bias, here it can only have both or none")
    return module.weight is not None


def _update(module: Any) -> rg.RunningUpdate:
    if module.momentum is None:
        raise _Refused("momentum is None, a cumulative average, which there is not here")
    return rg.RunningUpdate.pytorch(module.momentum)


def _padding(module: Any) -> Any:
    if module.padding == "same":
        spans = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple((span // 2, span - span // 2) for span in spans)
    return 0 if module.padding == "valid" else module.padding


# Our options that are not simply PyTorch's.
_FROM: Final[dict[str, Callable[[Any], Any]]] = {
    "affine": _affine,
    "axis": lambda module: -1 if module.dim is None else module.dim,
    "bias": lambda module: module.bias is not None and module.bias is not False,  # a tensor, or a bool
    "padding": _padding,
    "projection": lambda module: module.proj_size or None,
    "update": _update,
}


def _activation(module: Any) -> Activation | None:
    if _is(module, "GELU"):
        return Activation("gelu_tanh" if module.approximate == "tanh" else "gelu")
    if _is(module, "Softplus"):
        if module.threshold < 20:
            raise _Refused(f"threshold is {module.threshold}, here it has none")
        if not module.beta:
            raise _Refused(f"beta is {module.beta}, must not be 0")
        return Activation(rg.Activation("softplus", alpha=1 / module.beta, beta=module.beta))
    for ours, theirs in _ACTIVATIONS.items():
        kind, *options = theirs.split()
        if _is(module, kind):
            return Activation(rg.Activation(ours, *(getattr(module, option) for option in options)))
    return None


# ---- to PyTorch ------------------------------------------------------------------------------------------------------


def to_torch(layer: Module, *, spatial: int | None = None) -> Any:
    """Return a ``torch.nn`` module with the options and copies of the values of a layer, or a Sequential of them.

    `spatial` is the number of spatial axes of x, from 0 to 3: PyTorch has a norm and a pooling for each. A convolution,
    a kernel with several sizes or a Flatten before them in a Sequential says it as well. A layer that has no
    counterpart in PyTorch is refused, as is one with an option that has none. A layer in several places becomes one
    module in these places, and one whose parameters are all frozen a frozen module.
    """
    import torch

    from ..convert.layers import Gru
    from ..convert.state import from_native, to_torch_state

    if spatial not in (None, 0, 1, 2, 3):
        raise ValueError(f"to_torch: spatial is {spatial}, must be from 0 to 3")
    module = _ToTorch(torch.nn, spatial).module("", layer)
    layers = from_native(layer.state_dict())
    for found in layers.values():
        if isinstance(found, Gru):
            found.kind = "after"  # others were refused; without biases the state does not show it
    state = to_torch_state(layers)
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in state.items()}
    inside = dict(module.named_modules())  # each once
    for name in module.load_state_dict(tensors, strict=False).missing_keys:
        if name.rpartition(".")[0] in inside:
            raise ValueError(
                f"to_torch: {name} is the parameter of another layer as well, PyTorch's would have its own"
            )
    return module


class _ToTorch:
    def __init__(self, nn: Any, spatial: int | None) -> None:
        self._nn, self._spatial = nn, spatial
        self._made: dict[Module, Any] = {}

    def module(self, name: str, layer: Module) -> Any:
        if layer in self._made:
            return self._made[layer]
        if type(layer) is Sequential:
            module = self._nn.Sequential()
            for child, inside in layer._children.items():
                module.add_module(child, self.module(f"{name}.{child}" if name else child, inside))
        else:
            title = f"to_torch: {name or 'the layer'} ({type(layer).__name__})"
            pairs = [(kind, pair) for kind, pair in _PAIRS.items() if pair.ours is type(layer)]
            try:
                if isinstance(layer, Activation) and type(layer).__module__.startswith("retrograd.nn."):
                    module = self._activation(layer.function)
                elif pairs:
                    module = self._layer(layer, *pairs[0])
                else:
                    raise TypeError(f"{title}: PyTorch has no counterpart of this layer")
            except _Refused as error:
                raise ValueError(f"{title}: {error}") from None
            if any(array.dtype == np.float64 for array in layer.state_arrays().values()):
                module = module.double()
            if not any(parameter.trainable for parameter in layer.parameters().values()):
                module.requires_grad_(False)
        module.training = layer.training
        self._made[layer] = module
        return module

    def _layer(self, layer: Module, kind: str, pair: _Pair) -> Any:
        values = _values(layer)
        shared = [ours for _, ours in pair.names()]
        for option, (only, said) in _ONLY.items():
            if option not in shared and (value := values.get(option, only)) != only:
                raise _Refused(said.format(value, kind=kind))
        kernel = values.get("kernel", 1)
        if isinstance(layer, Flatten) or (isinstance(layer, Linear) and self._spatial is None):
            self._spatial = 0
        elif not isinstance(kernel, int):
            self._spatial = len(kernel)
        if pair.axes:
            kind = f"{kind}{self._axes(pair.axes[0], pair.axes[-1])}d"
        options = {theirs: _TO[ours](values) if ours in _TO else values[ours] for theirs, ours in pair.names()}
        return getattr(self._nn, kind)(**options)

    def _axes(self, lowest: int, highest: int) -> int:
        """The number of spatial axes, for a class with this many."""
        if self._spatial is None:
            raise _Refused("PyTorch has one for each number of spatial axes; give it as spatial=2, for example")
        axes = max(self._spatial, lowest)
        if axes > highest:
            raise _Refused(f"there are {axes} spatial axes, PyTorch's has at most {highest}")
        return axes

    def _activation(self, function: rg.Activation) -> Any:
        nn, name, alpha, beta = self._nn, function.name, function.alpha, function.beta
        kind, *options = _ACTIVATIONS.get(name, "").split() or [""]
        if kind and (options or function == rg.Activation(name)):
            return getattr(nn, kind)(*(alpha, beta)[: len(options)])
        if name == "gelu" or function == rg.Activation("gelu_tanh"):
            return nn.GELU(approximate="tanh" if name == "gelu_tanh" else "none")
        if name == "softplus" and math.isclose(alpha * beta, 1.0, rel_tol=2.0**-51):  # alpha is 1 / beta, rounded
            return nn.Softplus(beta)
        raise _Refused(f"PyTorch has no module for {function}")


def _values(layer: Module) -> dict[str, Any]:
    """The options of a layer by the names of its arguments."""
    found = {**vars(layer), **getattr(layer, "options", {})}
    if isinstance(layer, Recurrent):
        weights = layer.cells()[0].weights()
        found.update(bias=weights.b is not None, peephole=getattr(weights, "peephole", None) is not None)
        if found.get("activations") in (rg.LstmActivations(), rg.GruActivations()):
            del found["activations"]
    elif isinstance(layer, Linear):
        found["outputs"], found["inputs"] = layer.w.shape
    elif isinstance(layer, Embedding):
        found["rows"], found["features"] = layer.table.shape
    elif isinstance(layer, Conv):
        found["kernel"] = layer.w.shape[2:]
    elif isinstance(layer, (BatchNorm, InstanceNorm, GroupNorm)):
        (found["channels"],) = layer.shape
    return found


def _momentum(values: Mapping[str, Any]) -> float:
    update = values["update"]
    if values["running"] and not update.unbiased:
        raise _Refused(f"update is {update}, PyTorch's running variance is unbiased")
    return round(1.0 - float(update.keep), 15)  # 0.1, not 0.09999999999999998


def _symmetric(values: Mapping[str, Any]) -> Any:
    """The padding of each axis, if it is the same on both sides."""
    padding = values["padding"]
    if isinstance(padding, int):
        return padding
    sides = [(each, each) if isinstance(each, int) else tuple(each) for each in padding]
    if any(before != after for before, after in sides):
        raise _Refused(f"padding is {padding}, PyTorch's is the same on both sides of an axis")
    return tuple(before for before, _ in sides)


def _nonlinearity(values: Mapping[str, Any]) -> str:
    given = values["activation"]
    for name in ("tanh", "relu"):
        if given in (name, rg.Activation(name)):
            return name
    raise _Refused(f"its activation is {given!r}, PyTorch's RNN has tanh and relu")


# Options of PyTorch that are not simply ours.
_TO: Final[dict[str, Callable[[Mapping[str, Any]], Any]]] = {
    "activation": _nonlinearity,
    "padding": _symmetric,
    "projection": lambda values: values["projection"] or 0,
    "update": _momentum,
}
