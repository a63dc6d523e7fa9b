"""Recurrent layers under `torch.compile`, which refuses every subclass of PyTorch's."""

from __future__ import annotations

from typing import Any

import torch


def allow(kinds: tuple[type[torch.nn.Module], ...]) -> None:
    """Let `torch.compile` trace these classes. PyTorch's own layers stay refused, as its setting says.

    A layer of PyTorch would become a loop over steps; retrograd's are operators.
    """
    from torch._dynamo import config
    from torch._dynamo.variables.builder import VariableBuilder

    wrap_module = VariableBuilder.wrap_module

    def wrap(self: Any, value: torch.nn.Module) -> Any:
        if not isinstance(value, kinds):
            return wrap_module(self, value)
        with config.patch(allow_rnn=True):
            return wrap_module(self, value)

    VariableBuilder.wrap_module = wrap  # type: ignore[method-assign]
