"""Which normalizations run PyTorch's kernel, and that they compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.torch_layers import assert_close, gradients_of, rt, same_bits, torch


@pytest.fixture(autouse=True)
def measured_sizes() -> Iterator[None]:
    rt.use_torch_below(None)
    yield
    rt.use_torch_below(0)


def name_of(y: Any) -> str:
    return str(type(y.grad_fn).__name__)


CASES = {
    "LayerNorm": ((48,), (7, 48), (1 << 14, 48)),
    "GroupNorm": ((2, 8), (3, 8, 5), (1 << 10, 8, 513)),
    "BatchNorm1d": ((8,), (3, 8, 5), (1 << 7, 8, 129)),
    "BatchNorm2d": ((8,), (3, 8, 5, 2), (1 << 7, 8, 43, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_small_normalizations_are_pytorchs(name: str) -> None:
    arguments, small, large = CASES[name]
    torch.manual_seed(0)
    ours, theirs = getattr(rt, name)(*arguments), getattr(torch.nn, name)(*arguments)
    x = torch.randn(small, requires_grad=True)
    y, z = ours(x), theirs(x)
    assert name_of(y) == name_of(z) != "_NormBackward"
    assert same_bits(y, z)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert same_bits(a, b)
    x = torch.randn(large, requires_grad=True)
    y, z = ours(x), theirs(x)
    assert name_of(y) == "_NormBackward"
    assert_close(y, z)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    outgoing = [torch.randn_like(y)]
    found, expected = gradients_of([y], [x], outgoing), gradients_of([z], [x], outgoing)
    assert_close(found[0], expected[0])


def test_the_size_can_be_chosen() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    norm = rt.LayerNorm(6)
    for below, name in ((24, "_NormBackward"), (25, "NativeLayerNormBackward0"), (0, "_NormBackward")):
        rt.use_torch_below(below)
        assert name_of(norm(x)) == name
        assert name_of(rt.functional.layer_norm(x, (6,), norm.weight, norm.bias)) == name
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="use_torch_below: elements is"):
            rt.use_torch_below(wrong)


def test_fused_and_compiled_normalizations_are_retrograds() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    assert name_of(rt.LayerNorm(6, activation="tanh")(x)) == "_NormBackward"
    graphs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.code))
        return graph

    torch.compile(rt.LayerNorm(6), backend=backend, fullgraph=True)(x)
    assert "retrograd.norm" in graphs[0]


def test_an_instance_norm_is_retrograds_at_any_size() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    assert name_of(rt.InstanceNorm1d(3)(x)) == "_NormBackward"


def test_a_result_can_be_viewed_and_changed_in_place() -> None:
    """Large results are in reused memory, which must not be a view for autograd."""
    x = torch.randn(1 << 9, 64, 32).transpose(1, 2).requires_grad_()
    y = rt.LayerNorm(64)(x)
    assert y.nbytes >= 1 << 20
    assert y.view(-1, 64).shape == (1 << 14, 64)
    expected = torch.relu(torch.nn.LayerNorm(64)(x))
    assert_close(y.relu_(), expected)
    outgoing = [torch.randn_like(y)]
    assert_close(gradients_of([y], [x], outgoing)[0], gradients_of([expected], [x], outgoing)[0])
