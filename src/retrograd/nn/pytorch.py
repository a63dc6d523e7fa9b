"""Layers from modules of PyTorch, and back: their options and values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

import retrograd as rg

from .convolution import Conv, ConvTranspose
from .layers import Activation, Dropout, Embedding, Linear
from .lstm import LSTM
from .module import Module, Sequential
from .norms import BatchNorm, GroupNorm, InstanceNorm, LayerNorm
from .pooling import AveragePool, Flatten, MaxPool

__all__ = ["from_torch", "to_torch"]

# Activations whose modules have no options: the module's class, and our name.
_PLAIN: Final = {
    "Hardsigmoid": "hard_sigmoid",
    "Hardswish": "hard_swish",
    "Identity": "identity",
    "LogSigmoid": "log_sigmoid",
    "ReLU": "relu",
    "ReLU6": "relu6",
    "SELU": "selu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
    "Softsign": "softsign",
    "Tanh": "tanh",
    "Tanhshrink": "tanh_shrink",
}


class _Refused(Exception):
    """Why a layer has no counterpart; the caller knows its name."""


# ---- from PyTorch ----------------------------------------------------------------------------------------------------


def from_torch(module: Any) -> Module:
    """Return a layer with the options and copies of the values of a ``torch.nn`` module, or a Sequential of them.

    A module that has no counterpart here is refused, as is one with an option that has none.
    """
    from ..convert.kinds import Kind
    from ..convert.state import from_torch_state, to_native

    kinds = {}
    for name, inside in module.named_modules():
        kind = {"Linear": "linear", "Embedding": "embedding"}.get(type(inside).__name__)
        if kind is not None:
            kinds[name] = Kind(kind)
    layer = _from_module("", module)
    state = {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}
    seeds = {name: array for name, array in layer.buffers().items() if name.rpartition(".")[2] == "stream"}
    layer.load_state_dict({**to_native(from_torch_state(state, kinds)), **seeds})
    return layer


def _from_module(name: str, module: Any) -> Module:
    kind = type(module)
    if kind.__name__ == "Sequential" and kind.__module__.startswith("torch.nn."):
        names = [key for key, _ in module.named_children()]
        layers = [_from_module(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
        plain = names == [str(k) for k in range(len(names))]
        layer: Module = Sequential(*layers) if plain else Sequential(**dict(zip(names, layers, strict=True)))
    else:
        make = _FROM.get(kind.__name__) if kind.__module__.startswith("torch.nn.") else None
        title = f"from_torch: {name or 'the module'} ({kind.__name__})"
        if make is None:
            raise TypeError(f"{title}: retrograd.nn has no counterpart of this module")
        try:
            layer = make(module)
        except (_Refused, ValueError) as error:
            raise ValueError(f"{title}: {error}") from None
    layer.training = bool(module.training)
    return layer


def _dtype(module: Any) -> Any:
    """The dtype of a module's parameters, float32 if it has none."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in module.parameters()}
    if not dtypes:
        return np.float32
    if len(dtypes) > 1 or not dtypes <= {"float32", "float64"}:
        raise _Refused(f"its parameters are {' and '.join(sorted(dtypes))}, must be float32 or float64")
    return np.dtype(dtypes.pop())


def _refuse(module: Any, **defaults: Any) -> None:
    """Refuse a module with another value of one of these options."""
    for option, default in defaults.items():
        value = getattr(module, option)
        if value != default:
            raise _Refused(f"{option} is {value!r}, here it can only be {default!r}")


def _lstm(module: Any) -> LSTM:
    _refuse(module, proj_size=0)
    return LSTM(
        module.input_size,
        module.hidden_size,
        layers=module.num_layers,
        bidirectional=module.bidirectional,
        batch_first=module.batch_first,
        bias=module.bias,
        dropout=module.dropout,
        dtype=_dtype(module),
    )


def _running(kind: type[BatchNorm] | type[InstanceNorm]) -> Callable[[Any], Module]:
    def make(module: Any) -> Module:
        if module.momentum is None:
            raise _Refused("momentum is None, a cumulative average, which there is not here")
        return kind(
            module.num_features,
            eps=module.eps,
            affine=module.affine,
            running=module.track_running_stats,
            update=rg.RunningUpdate.pytorch(module.momentum),
            dtype=_dtype(module) if module.affine else _dtype_of_buffers(module),
        )

    return make


def _dtype_of_buffers(module: Any) -> Any:
    statistics = module.running_mean
    return np.float32 if statistics is None else np.dtype(str(statistics.dtype).removeprefix("torch."))


def _layer_norm(module: Any) -> LayerNorm:
    if module.elementwise_affine and module.bias is None:
        raise _Refused("it has a weight and no bias, here it can only have both or none")
    affine = module.elementwise_affine
    return LayerNorm(tuple(module.normalized_shape), eps=module.eps, affine=affine, dtype=_dtype(module))


def _group_norm(module: Any) -> GroupNorm:
    options = {"eps": module.eps, "affine": module.affine, "dtype": _dtype(module)}
    return GroupNorm(module.num_groups, module.num_channels, **options)


def _linear(module: Any) -> Linear:
    return Linear(module.in_features, module.out_features, bias=module.bias is not None, dtype=_dtype(module))


def _embedding(module: Any) -> Embedding:
    _refuse(module, max_norm=None, scale_grad_by_freq=False, sparse=False)
    rows, features, padding = module.num_embeddings, module.embedding_dim, module.padding_idx
    return Embedding(rows, features, padding_index=padding, dtype=_dtype(module))


def _convolution(module: Any) -> dict[str, Any]:
    """The options of a convolution, transposed or not."""
    _refuse(module, padding_mode="zeros")
    padding: Any = module.padding
    if padding == "valid":
        padding = 0
    elif padding == "same":
        spans = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        padding = tuple((span // 2, span - span // 2) for span in spans)
    return {
        "in_channels": module.in_channels,
        "out_channels": module.out_channels,
        "kernel": tuple(module.kernel_size),
        "stride": tuple(module.stride),
        "padding": padding,
        "dilation": tuple(module.dilation),
        "groups": module.groups,
        "bias": module.bias is not None,
        "dtype": _dtype(module),
    }


def _transposed(module: Any) -> ConvTranspose:
    return ConvTranspose(**_convolution(module), output_padding=tuple(module.output_padding))


def _max_pool(module: Any) -> MaxPool:
    _refuse(module, return_indices=False, ceil_mode=False)
    return MaxPool(module.kernel_size, stride=module.stride, padding=module.padding, dilation=module.dilation)


def _average_pool(module: Any) -> AveragePool:
    _refuse(module, ceil_mode=False)
    if getattr(module, "divisor_override", None) is not None:
        _refuse(module, divisor_override=None)
    options = {"stride": module.stride, "padding": module.padding}
    return AveragePool(module.kernel_size, count_includes_padding=module.count_include_pad, **options)


def _flatten(module: Any) -> Flatten:
    _refuse(module, start_dim=1, end_dim=-1)
    return Flatten()


def _softplus(module: Any) -> Activation:
    if module.threshold < 20:
        raise _Refused(f"threshold is {module.threshold}, here it has none")
    if not module.beta:
        raise _Refused(f"beta is {module.beta}, must not be 0")
    return Activation(rg.Activation("softplus", alpha=1 / module.beta, beta=module.beta))


def _gelu(module: Any) -> Activation:
    return Activation("gelu_tanh" if module.approximate == "tanh" else "gelu")


_FROM: Final[dict[str, Callable[[Any], Module]]] = {
    "LSTM": _lstm,
    **{f"BatchNorm{axes}d": _running(BatchNorm) for axes in (1, 2, 3)},
    **{f"InstanceNorm{axes}d": _running(InstanceNorm) for axes in (1, 2, 3)},
    "LayerNorm": _layer_norm,
    "GroupNorm": _group_norm,
    "Linear": _linear,
    "Embedding": _embedding,
    **{f"Conv{axes}d": lambda module: Conv(**_convolution(module)) for axes in (1, 2)},
    **{f"ConvTranspose{axes}d": _transposed for axes in (1, 2)},
    **{f"MaxPool{axes}d": _max_pool for axes in (1, 2)},
    **{f"AvgPool{axes}d": _average_pool for axes in (1, 2)},
    "Flatten": _flatten,
    "Dropout": lambda module: Dropout(module.p),
    **{kind: lambda _, name=name: Activation(name) for kind, name in _PLAIN.items()},  # type: ignore[misc]
    "LeakyReLU": lambda module: Activation(rg.Activation("leaky_relu", alpha=module.negative_slope)),
    "ELU": lambda module: Activation(rg.Activation("elu", alpha=module.alpha)),
    "CELU": lambda module: Activation(rg.Activation("celu", alpha=module.alpha)),
    "GELU": _gelu,
    "Hardtanh": lambda module: Activation(rg.Activation("clamp", alpha=module.min_val, beta=module.max_val)),
    "Softplus": _softplus,
    "Threshold": lambda module: Activation(rg.Activation("threshold", alpha=module.threshold, beta=module.value)),
}


# ---- to PyTorch ------------------------------------------------------------------------------------------------------


def to_torch(layer: Module, *, spatial: int | None = None) -> Any:
    """Return a ``torch.nn`` module with the options and copies of the values of a layer, or a Sequential of them.

    `spatial` is the number of spatial axes of x, from 0 to 3: PyTorch has a norm and a pooling for each. A convolution,
    a kernel with several sizes or a Flatten before them in a Sequential says it as well. A layer that has no
    counterpart in PyTorch is refused, as is one with an option that has none.
    """
    import torch

    from ..convert.state import from_native, to_torch_state

    if spatial not in (None, 0, 1, 2, 3):
        raise ValueError(f"to_torch: spatial is {spatial}, must be from 0 to 3")
    module = _ToTorch(torch.nn, spatial).module("", layer)
    state = to_torch_state(from_native(layer.state_dict()))
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in state.items()})
    return module


class _ToTorch:
    def __init__(self, nn: Any, spatial: int | None) -> None:
        self._nn, self._spatial = nn, spatial

    def module(self, name: str, layer: Module) -> Any:
        if type(layer) is Sequential:
            module = self._nn.Sequential()
            for child, inside in layer._children.items():
                module.add_module(child, self.module(f"{name}.{child}" if name else child, inside))
        else:
            title = f"to_torch: {name or 'the layer'} ({type(layer).__name__})"
            make = getattr(self, f"_{type(layer).__name__}", None)
            if make is None or not type(layer).__module__.startswith("retrograd.nn."):
                raise TypeError(f"{title}: PyTorch has no counterpart of this layer")
            try:
                module = make(layer)
            except _Refused as error:
                raise ValueError(f"{title}: {error}") from None
            for array in itertools.chain(layer.parameters().values(), layer.buffers().values()):
                if array.dtype == np.float64:
                    module = module.double()
        module.training = layer.training
        return module

    def _axes(self, lowest: int, highest: int) -> int:
        """The number of spatial axes, for a class with this many."""
        if self._spatial is None:
            raise _Refused("PyTorch has one for each number of spatial axes; give it as spatial=2, for example")
        axes = max(self._spatial, lowest)
        if axes > highest:
            raise _Refused(f"there are {axes} spatial axes, PyTorch's has at most {highest}")
        return axes

    def _LSTM(self, layer: LSTM) -> Any:
        first = layer._weights[0]
        if layer.embedding is not None:
            raise _Refused("it has an embedding; make that a layer of its own")
        if first.peephole is not None:
            raise _Refused("it has peepholes, which PyTorch's LSTM does not have")
        if layer.activations != rg.LstmActivations():
            raise _Refused(f"it has {layer.activations}, PyTorch's LSTM has sigmoid and tanh")
        return self._nn.LSTM(
            layer.inputs,
            layer.hidden,
            layer.layers,
            bias=first.b is not None,
            batch_first=layer.batch_first,
            dropout=layer.dropout,
            bidirectional=layer.bidirectional,
        )

    def _running(self, layer: BatchNorm | InstanceNorm, kind: str) -> Any:
        _check_fused(layer.activation)
        _check_channels(layer.channel_axis)
        if layer.running and not layer.update.unbiased:
            raise _Refused(f"update is {layer.update}, PyTorch's running variance is unbiased")
        return getattr(self._nn, f"{kind}{self._axes(1, 3)}d")(
            layer._shape[0],
            eps=layer.eps,
            momentum=round(1.0 - layer.update.keep, 15),  # 0.1, not 0.09999999999999998
            affine=layer.affine,
            track_running_stats=layer.running,
        )

    def _BatchNorm(self, layer: BatchNorm) -> Any:
        return self._running(layer, "BatchNorm")

    def _InstanceNorm(self, layer: InstanceNorm) -> Any:
        return self._running(layer, "InstanceNorm")

    def _LayerNorm(self, layer: LayerNorm) -> Any:
        _check_fused(layer.activation)
        return self._nn.LayerNorm(layer._shape, eps=layer.eps, elementwise_affine=layer.affine)

    def _GroupNorm(self, layer: GroupNorm) -> Any:
        _check_fused(layer.activation)
        _check_channels(layer.channel_axis)
        return self._nn.GroupNorm(layer.groups, layer._shape[0], eps=layer.eps, affine=layer.affine)

    def _Linear(self, layer: Linear) -> Any:
        self._spatial = 0 if self._spatial is None else self._spatial
        return self._nn.Linear(layer.w.shape[1], layer.w.shape[0], bias=layer.bias)

    def _Embedding(self, layer: Embedding) -> Any:
        return self._nn.Embedding(*layer.table.shape, padding_idx=layer.padding_index)

    def _convolution(self, layer: Conv | ConvTranspose) -> Any:
        _check_fused(layer.activation)
        options = dict(layer.options)
        if options.pop("channels_last"):
            raise _Refused("channels_last is True, PyTorch's has channels first")
        kernel = tuple(layer.w.shape[2:])
        self._spatial = len(kernel)
        options["padding"] = _symmetric(options["padding"])
        make = getattr(self._nn, f"{type(layer).__name__}{len(kernel)}d")
        return make(layer.in_channels, layer.out_channels, kernel, bias=layer.bias, **options)

    _Conv = _ConvTranspose = _convolution

    def _pool(self, layer: MaxPool | AveragePool) -> dict[str, Any]:
        if layer.channels_last:
            raise _Refused("channels_last is True, PyTorch's has channels first")
        if not isinstance(layer.kernel, int):
            self._spatial = len(layer.kernel)
        return {"kernel_size": layer.kernel, "stride": layer.stride, "padding": _symmetric(layer.padding)}

    def _MaxPool(self, layer: MaxPool) -> Any:
        options = self._pool(layer)
        return getattr(self._nn, f"MaxPool{self._axes(1, 2)}d")(**options, dilation=layer.dilation)

    def _AveragePool(self, layer: AveragePool) -> Any:
        options = self._pool(layer)
        counts = layer.count_includes_padding
        return getattr(self._nn, f"AvgPool{self._axes(1, 2)}d")(**options, count_include_pad=counts)

    def _Flatten(self, _: Flatten) -> Any:
        self._spatial = 0
        return self._nn.Flatten()

    def _Dropout(self, layer: Dropout) -> Any:
        return self._nn.Dropout(layer.rate)

    def _Activation(self, layer: Activation) -> Any:
        function, nn = layer.function, self._nn
        name, alpha, beta = function.name, function.alpha, function.beta
        plain = {ours: theirs for theirs, ours in _PLAIN.items()}
        if name in plain and function == rg.Activation(name):
            return getattr(nn, plain[name])()
        if name in ("leaky_relu", "elu", "celu"):
            return {"leaky_relu": nn.LeakyReLU, "elu": nn.ELU, "celu": nn.CELU}[name](alpha)
        if name in ("clamp", "threshold"):
            return {"clamp": nn.Hardtanh, "threshold": nn.Threshold}[name](alpha, beta)
        if name == "gelu" or function == rg.Activation("gelu_tanh"):
            return nn.GELU(approximate="tanh" if name == "gelu_tanh" else "none")
        if name == "softplus" and math.isclose(alpha * beta, 1.0, rel_tol=2.0**-51):  # alpha is 1 / beta, rounded
            return nn.Softplus(beta)
        raise _Refused(f"PyTorch has no module for {function}")


def _check_fused(activation: rg.Activation | None) -> None:
    if activation is not None:
        raise _Refused(f"it has a fused activation, {activation}; make that a layer of its own")


def _check_channels(axis: int) -> None:
    if axis != 1:
        raise _Refused(f"channel_axis is {axis}, PyTorch's is always 1")


def _symmetric(padding: Any) -> Any:
    """The padding of each axis, if it is the same on both sides."""
    if isinstance(padding, int):
        return padding

    def sides() -> Iterator[int]:
        for each in padding:
            before, after = (each, each) if isinstance(each, int) else each
            if before != after:
                raise _Refused(f"padding is {padding}, PyTorch's is the same on both sides of an axis")
            yield before

    return tuple(sides())
