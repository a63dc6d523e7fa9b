"""PyTorch's multihead attention in float64, with the weights of the oracle.

Its heads all have the width d / heads. Nothing here may import the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from support.arrays import Array


def torch_names(arrays: Mapping[str, Array | None]) -> dict[str, Array]:
    """Weights of the oracle, or their gradients, by PyTorch's names and in its shapes."""

    def flat(name: str) -> Array:
        """[..., k, heads] with the heads before k, in one axis."""
        array = np.asarray(arrays[name], np.float64)
        return np.moveaxis(array, -1, -2).reshape(*array.shape[:-2], -1)

    found = {f"{letter}_proj_weight": flat(f"w{letter}").T for letter in "qkv"}
    found["in_proj_bias"] = np.concatenate([flat(f"b{letter}") for letter in "qkv"])
    found |= {"out_proj.weight": np.asarray(arrays["wo"], np.float64).T, "out_proj.bias": np.asarray(arrays["bo"])}
    if arrays.get("row_k") is not None:
        found |= {f"bias_{letter}": flat(f"row_{letter}")[None, None] for letter in "kv"}
    return found


def torch_attention(
    torch: Any,
    dy: Array,
    inputs: tuple[Array, Array, Array],
    weights: Mapping[str, Array | None],
    heads: int,
    zero: bool,
    ignored: Array | None = None,
    added: Array | None = None,
) -> tuple[Array, list[Array], dict[str, Array]]:
    """The output, the gradients of the three inputs, and those of the parameters by PyTorch's names."""
    values = torch_names(weights)
    width, k_dim, v_dim = (array.shape[-1] for array in inputs)
    layer = torch.nn.MultiheadAttention(
        width, heads, add_bias_kv="bias_k" in values, add_zero_attn=zero, kdim=k_dim, vdim=v_dim, batch_first=True,
        dtype=torch.float64,
    )  # fmt: skip
    layer.load_state_dict({name: torch.tensor(np.asarray(value, np.float64)) for name, value in values.items()})
    tensors = [torch.tensor(np.asarray(array, np.float64), requires_grad=True) for array in inputs]
    mask = padding = None
    if added is not None:
        mask = torch.tensor(added if added.dtype == np.bool_ else added.astype(np.float64))
        mask = mask.reshape(-1, *mask.shape[-2:]) if mask.ndim == 4 else mask
    if ignored is not None:
        padding = torch.tensor(ignored)
        if mask is not None and mask.dtype != torch.bool:  # PyTorch wants both of one type
            padding = torch.zeros(ignored.shape, dtype=torch.float64).masked_fill(padding, -torch.inf)
    y, _ = layer(*tensors, key_padding_mask=padding, attn_mask=mask)
    y.backward(torch.tensor(np.asarray(dy, np.float64)))
    gradients = {name: parameter.grad.numpy() for name, parameter in layer.named_parameters()}
    return y.detach().numpy(), [tensor.grad.numpy() for tensor in tensors], gradients
