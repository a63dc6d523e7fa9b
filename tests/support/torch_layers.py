"""PyTorch's layers next to retrograd's: the same inputs, parameters and outgoing gradients. Needs PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
rt: Any = pytest.importorskip("retrograd.torch")
torch.set_num_threads(1)
rt.use_torch_below(0)  # the tests are of retrograd's kernels

# Errors relative to the largest element, in units of the dtype's precision. Sums of a few hundred terms, in another
# order than PyTorch's, differ by some ten units; in half precision only the results are rounded. Inputs are of about 1,
# so results of less than LEAST are differences of larger numbers.
UNITS = 64
LEAST = 0.1
# If PyTorch's result is of the same precision, it has errors of its own: of gradients that are 0, for example, some
# units of what cancels, which is 300 times as large as the inputs where a variance is 0.
UNITS_OF_BOTH = 64 * 1024


def assert_close(found: Any, expected: Any, what: str = "") -> None:
    """Compare with a result of PyTorch, which may be of higher precision."""
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape, what
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    units = UNITS_OF_BOTH if found.dtype is expected.dtype is torch.float64 else UNITS
    allowed = units * torch.finfo(found.dtype).eps * max(largest, LEAST)
    error = (found.double() - expected.double()).abs()
    assert bool((error <= allowed).all()), f"{what}: error {float(error.max()):.3g}, allowed {allowed:.3g}"


def same_bits(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and torch.equal(a, b))


def exact(layer: Any) -> Any:
    """A float64 copy."""
    return copy.deepcopy(layer).double()


def outputs_of(result: Any) -> list[Any]:
    """The tensors of a layer's result, which may be nested and packed."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, torch.nn.utils.rnn.PackedSequence):
        return [result.data]
    return [tensor for part in result for tensor in outputs_of(part)]


def outgoing_of(outputs: Sequence[Any], seed: int = 0) -> list[Any]:
    """Gradients of outputs, that depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]


def gradients_of(outputs: Sequence[Any], inputs: Sequence[Any], outgoing: Sequence[Any] | None = None) -> list[Any]:
    return list(torch.autograd.grad(outputs, inputs, outgoing or outgoing_of(outputs)))


def compare(
    ours: Any, theirs: Any, inputs: Sequence[Any], call: Callable[..., Any] = lambda layer, *x: layer(*x)
) -> None:
    """Both layers, whose parameters agree, give the same outputs, gradients and buffers."""
    inputs = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    reference = [x.detach().to(torch.float64).requires_grad_() if x.is_floating_point() else x for x in inputs]
    found, expected = outputs_of(call(ours, *inputs)), outputs_of(call(theirs, *reference))
    for index, (y, z) in enumerate(zip(found, expected, strict=True)):
        assert_close(y, z, f"output {index}")
    ours_inputs = [x for x in inputs if x.requires_grad] + [p for p in ours.parameters() if p.requires_grad]
    their_inputs = [x for x in reference if x.requires_grad] + [p for p in theirs.parameters() if p.requires_grad]
    if ours_inputs:
        outgoing = outgoing_of(found)
        gradients = gradients_of(found, ours_inputs, outgoing)
        references = gradients_of(expected, their_inputs, [dy.to(torch.float64) for dy in outgoing])
        for index, (d, e) in enumerate(zip(gradients, references, strict=True)):
            assert_close(d, e, f"gradient {index}")
    for (name, b), c in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        if b.is_floating_point():
            assert_close(b, c, name)
        else:
            assert torch.equal(b, c)
