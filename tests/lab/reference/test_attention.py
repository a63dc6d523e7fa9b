"""The oracle of multihead attention, against finite differences and against PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd.lab import reference
from support.reference import assert_close, slope_along
from support.torch_attention import torch_attention, torch_names

Array = npt.NDArray[Any]
N, T, S, HEADS = 2, 3, 5, 2
NAMES = ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "row_k", "row_v")


def problem(
    d: int, k_dim: int, v_dim: int, d_key: int, d_value: int, bias: bool, rows: bool
) -> tuple[tuple[Array, Array, Array], reference.AttentionWeights, Array]:
    rng = np.random.default_rng(d)
    draw = rng.standard_normal
    inputs = draw((N, T, d)), draw((N, S, k_dim)), draw((N, S, v_dim))
    keys, values = (d_key, HEADS), (d_value, HEADS)
    weights = reference.AttentionWeights(
        draw((d, *keys)), draw((k_dim, *keys)), draw((v_dim, *values)), draw((HEADS * d_value, d))
    )
    if bias:
        weights = weights._replace(bq=draw(keys), bk=draw(keys), bv=draw(values), bo=draw(d))
    if rows:
        weights = weights._replace(row_k=draw(keys), row_v=draw(values))
    return inputs, weights, draw((N, T, d))


def options(rows: bool, zero: bool, masked: bool, added: str | None, dropped: bool) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    given: dict[str, Any] = {"zero": zero}
    if masked:
        given["ignored"] = np.array([[False, True, False, False, True], [False] * 5])
    shapes = {"matrix": (T, S), "heads": (HEADS, T, S), "batch": (N, HEADS, T, S)}
    if added is not None:
        given["added"] = rng.standard_normal(shapes[added.split()[0]])
        if added.endswith("boolean"):
            given["added"] = given["added"] > 0.5
    if dropped:
        given["kept"] = rng.integers(0, 2, (N, HEADS, T, S + rows + zero)) * 2.0
    return given


@pytest.mark.parametrize(
    ("added", "rows", "zero", "masked", "dropped"),
    [
        (None, False, False, False, False),
        ("matrix", True, False, True, False),
        ("heads boolean", True, True, False, False),
        ("batch", False, True, True, True),
        ("batch boolean", True, True, True, True),
    ],
)
def test_attention_backward_by_differences(
    added: str | None, rows: bool, zero: bool, masked: bool, dropped: bool
) -> None:
    """Steps of 1e-4 in the fourth order leave errors of about 1e-13 of values of about 100."""
    inputs, weights, dy = problem(5, 3, 4, 3, 2, bias=True, rows=rows)
    given = options(rows, zero, masked, added, dropped)
    found = reference.attention_backward(dy, *inputs, weights, **given)
    rng = np.random.default_rng(2)
    at: dict[str, Array | None] = dict(zip(("query", "key", "value"), inputs, strict=True)) | weights._asdict()

    def loss(name: str, moved: Array) -> Any:
        now = at | {name: moved}
        parts = [now.pop(one) for one in ("query", "key", "value")]
        y = reference.attention_forward(*parts, reference.AttentionWeights(**now), **given)  # type: ignore[arg-type]
        return (y * dy).sum()

    for name, array in at.items():
        if array is None:
            continue
        direction = rng.standard_normal(array.shape)
        difference = slope_along(lambda moved, name=name: loss(name, moved), array, direction)  # type: ignore[misc]
        assert float((found[name] * direction).sum()) == pytest.approx(difference, rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("added", [None, "matrix", "batch", "matrix boolean"])
@pytest.mark.parametrize(("rows", "zero", "masked"), list(itertools.product([False, True], repeat=3)))
def test_attention_is_that_of_torch(added: str | None, rows: bool, zero: bool, masked: bool, torch: Any) -> None:
    """Heads of width d / heads, as PyTorch has them. Both are float64: some tens of roundings of values below 100."""
    d = 2 * HEADS
    inputs, weights, dy = problem(d, 3, 5, 2, 2, bias=True, rows=rows)
    given = options(rows, zero, masked, added, False)
    y, of_inputs, of_weights = torch_attention(torch, dy, inputs, weights._asdict(), HEADS, **given)
    assert_close(reference.attention_forward(*inputs, weights, **given), y, rtol=1e-12, atol=1e-12)
    found = reference.attention_backward(dy, *inputs, weights, **given)
    for name, gradient in zip(("query", "key", "value"), of_inputs, strict=True):
        assert_close(found[name], gradient, rtol=1e-12, atol=1e-11)
    ours = torch_names({name: found[name] for name, array in weights._asdict().items() if array is not None})
    assert set(ours) == set(of_weights)
    for name, gradient in ours.items():
        assert_close(gradient, of_weights[name], rtol=1e-12, atol=1e-11)


def test_values_of_another_width_and_rows_without_keys(torch: Any) -> None:
    """PyTorch's product attention has any d_value, and gives 0 where a boolean mask leaves no key."""
    inputs, weights, dy = problem(5, 3, 4, 3, 7, bias=False, rows=False)
    allowed = np.random.default_rng(3).random((N, HEADS, T, S)) < 0.6
    allowed[0, 1, 2] = allowed[1, 0, 0] = False
    tensors = [torch.tensor(one, requires_grad=True) for one in (*inputs, *weights[:4])]
    projected = [torch.einsum("nld,dkh->nhlk", x, w) for x, w in zip(tensors[:3], tensors[3:6], strict=True)]
    heads = torch.nn.functional.scaled_dot_product_attention(*projected, attn_mask=torch.tensor(allowed))
    y = heads.transpose(1, 2).reshape(N, T, -1) @ tensors[6]
    y.backward(torch.tensor(dy))
    found = reference.attention_forward(*inputs, weights, added=~allowed)
    assert_close(found, y.detach().numpy(), rtol=1e-12, atol=1e-12)
    gradients = reference.attention_backward(dy, *inputs, weights, added=~allowed)
    for name, tensor in zip(("query", "key", "value", *NAMES[:4]), tensors, strict=True):
        assert_close(gradients[name], tensor.grad.numpy(), rtol=1e-12, atol=1e-11)
