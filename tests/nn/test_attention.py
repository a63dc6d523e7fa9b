"""retrograd.nn.MultiHeadAttention beside PyTorch's, and by its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd import graph, nn
from support.arrays import Array
from support.nn import Passes, assert_differences, passes, random

NAMES = ("query", "key", "value")


def attention(layer: nn.MultiHeadAttention, x: Array, context: Array, allowed: Array) -> Array:
    """The formula, head by head. `allowed` broadcasts to [N, heads, T, S]."""
    q, k, v = (
        given @ getattr(layer, name).w.value.T + getattr(layer, name).b.value
        for name, given in zip(NAMES, (x, context, context), strict=True)
    )
    width = layer.features // layer.heads
    allowed = np.broadcast_to(allowed, (len(x), layer.heads, x.shape[1], context.shape[1]))
    y = np.zeros_like(q)
    for n in range(len(x)):
        for h in range(layer.heads):
            part = slice(h * width, (h + 1) * width)
            scores = q[n][:, part] @ k[n][:, part].T / np.sqrt(width)
            scores = np.where(allowed[n, h], scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            y[n][:, part] = weights / weights.sum(axis=1, keepdims=True) @ v[n][:, part]
    return y @ layer.out.w.value.T + layer.out.b.value


def layer_of(**options: Any) -> nn.MultiHeadAttention:
    return nn.MultiHeadAttention(6, 3, dtype=np.float64, rng=0, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("crossed", [False, True])
def test_attention_is_its_formula(causal: bool, masked: bool, crossed: bool) -> None:
    layer, x = layer_of(causal=causal), random(2, 5, 6)
    context = random(2, 4, 6, seed=1) if crossed else x
    steps = context.shape[1]
    mask = np.random.default_rng(2).random((2, 1, 5, steps)) < 0.6
    mask[..., 0] = True  # something is attended to
    given: dict[str, Any] = {"context": context} if crossed else {}
    if masked:
        given["mask"] = mask
    allowed = (np.tri(5, steps, dtype=bool) if causal else True) & (mask if masked else np.True_)
    expected = attention(layer, x, context, np.asarray(allowed))
    for call in (layer, layer.predict):
        np.testing.assert_allclose(call(x, **given), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout": 0.3}, {"bias": False}], ids=str)
def test_gradients_by_differences(options: dict[str, Any]) -> None:
    class Crossed(nn.Module):
        """With a context and a mask."""

        def __init__(self) -> None:
            self.attention = layer_of(**options)
            self.x, self.context = nn.Parameter(random(2, 5, 6)), nn.Parameter(random(2, 5, 6, seed=1))

        def forward(self, mask: Any, dy: Any) -> Any:
            y = self.attention(graph.identity(self.x), graph.identity(self.context), mask=mask)
            return graph.sum(y * dy)

    model = Crossed()
    mask = np.random.default_rng(2).random((2, 3, 5, 5)) < 0.6
    mask[..., 0] = True
    assert_differences(nn.compile(model, None, nn.SGD(model, 0.0)), mask, random(2, 5, 6, seed=3))
    both = Passes(layer_of(**options), random(2, 5, 6))
    assert_differences(nn.compile(both, None, nn.SGD(both, 0.0)), random(2, 5, 6, seed=3))


def of_torch(torch: Any, layer: nn.MultiHeadAttention) -> Any:
    theirs = torch.nn.MultiheadAttention(6, 3, batch_first=True, dtype=torch.float64)
    parts = [getattr(layer, name) for name in NAMES]
    state = {f"in_proj_{kind}": np.concatenate([getattr(p, name).value for p in parts])
             for kind, name in (("weight", "w"), ("bias", "b"))}  # fmt: skip
    state |= {"out_proj.weight": layer.out.w.value, "out_proj.bias": layer.out.b.value}
    theirs.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in state.items()})
    return theirs


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "context"])
def test_attention_is_that_of_pytorch(torch: Any, kind: str) -> None:
    """Results and gradients of torch.nn.MultiheadAttention."""
    layer, x, dy = layer_of(causal=kind == "causal"), random(2, 5, 6), random(2, 5, 6, seed=3)
    theirs = of_torch(torch, layer)
    mask = np.random.default_rng(2).random((5, 5)) < 0.6
    mask[:, 0] = True
    context = random(2, 4, 6, seed=1)
    ours = {"mask": {"mask": mask}, "context": {"context": context}}.get(kind, {})
    y, gradients = passes(layer, x, dy, **ours)
    given = torch.from_numpy(x).requires_grad_()
    other = torch.from_numpy(context) if kind == "context" else given
    # PyTorch's mask says what is not attended to.
    left_out = {"mask": ~mask, "causal": ~np.tri(5, dtype=bool)}.get(kind)
    result, _ = theirs(given, other, other, attn_mask=None if left_out is None else torch.from_numpy(left_out))
    (result * torch.from_numpy(dy)).sum().backward()
    np.testing.assert_allclose(y, result.detach().numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(gradients["x"], given.grad.numpy(), rtol=1e-11, atol=1e-13)
    for name in ("w", "b"):
        found = np.concatenate([gradients[f"{part}.{name}"] for part in NAMES])
        wanted = (theirs.in_proj_weight if name == "w" else theirs.in_proj_bias).grad.numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)
        wanted = (theirs.out_proj.weight if name == "w" else theirs.out_proj.bias).grad.numpy()
        np.testing.assert_allclose(gradients[f"out.{name}"], wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_heads_are_scaled_dot_products(torch: Any, causal: bool) -> None:
    """Queries, keys and values as they are: also where there are more queries than keys, and fewer."""
    layer = nn.MultiHeadAttention(6, 3, causal=causal, bias=False, dtype=np.float64, rng=0)
    for name in (*NAMES, "out"):
        getattr(layer, name).w[...] = np.eye(6)
    for steps in (4, 5, 7):
        x, context = random(2, 5, 6), random(2, steps, 6, seed=1)
        q, kv = (torch.from_numpy(a.reshape(2, -1, 3, 2).transpose(0, 2, 1, 3).copy()) for a in (x, context))
        wanted = torch.nn.functional.scaled_dot_product_attention(q, kv, kv, is_causal=causal)
        wanted = wanted.numpy().transpose(0, 2, 1, 3).reshape(2, 5, 6)
        np.testing.assert_allclose(layer(x, context), wanted, rtol=1e-12, atol=1e-14)


def test_the_future_changes_nothing() -> None:
    layer, x = layer_of(causal=True), random(2, 5, 6)
    changed = x.copy()
    changed[:, 3:] = 1e3
    np.testing.assert_array_equal(layer(x)[:, :3], layer(changed)[:, :3])
    assert not np.array_equal(layer(x)[:, 3:], layer(changed)[:, 3:])


def test_what_attention_refuses() -> None:
    x = random(2, 5, 6)
    with pytest.raises(TypeError, match="bool"):  # PyTorch's other kind of mask, which is added
        layer_of()(x, mask=np.zeros((5, 5)))
    with pytest.raises(ValueError, match=r"5.*4|4.*5"):
        layer_of()(x, mask=np.ones((5, 4), bool))
    with pytest.raises(ValueError, match=r"x has shape \(2, 5, 5\), must have the shape \(N, T, 6\)"):
        layer_of()(x[..., :5])
