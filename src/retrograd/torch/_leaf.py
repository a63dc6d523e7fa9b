"""Layers in models that torch.fx traces, and that torch.jit.script refuses."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch
from torch.fx import Proxy, Tracer

__all__ = ["Leaf", "Proxy", "has_hooks"]


class Leaf(torch.nn.Module):
    """A layer that is one node in a graph of torch.fx, as the layers of `torch.nn` are."""

    def _record(self, input: Proxy, *arguments: Any, **options: Any) -> Any:
        """What `forward` returns for an input that torch.fx traces: the result of the layer's node."""
        tracer, name = input.tracer, type(self).__name__
        assert isinstance(tracer, Tracer)
        path = tracer.path_of_module(self)
        if not path:
            raise NotImplementedError(
                f"{name}: torch.fx can trace a model with this layer, not the layer alone; put it into a Sequential"
            )
        if has_hooks(self):
            raise NotImplementedError(
                f"{name}: it has hooks, which would run twice, in the trace and in the layer; remove them, or use a "
                "torch.fx.Tracer whose is_leaf_module is true for this layer"
            )
        return tracer.create_proxy("call_module", path, (input, *arguments), options)

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}: torch.jit.script cannot compile retrograd's layers; use torch.jit.trace, "
            "torch.compile or torch.export"
        )

    @property
    def qconfig(self) -> Any:
        """What `torch.ao.quantization` sets on every layer of a model."""
        try:
            return self.__dict__["qconfig"]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no attribute qconfig") from None

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        self.__dict__["qconfig"] = value
        if isinstance(self, torch.nn.RNNBase | torch.nn.RNNCellBase):
            warnings.warn(
                f"{type(self).__name__}: torch.ao.quantization finds layers by class, and leaves retrograd's as they "
                "are. Call retrograd.torch.restore(model) before",
                RuntimeWarning,
                stacklevel=2,
            )

    @qconfig.deleter
    def qconfig(self) -> None:
        del self.__dict__["qconfig"]


def has_hooks(layer: torch.nn.Module) -> bool:
    """Whether other code sees the layer's inputs, outputs or gradients."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks)
