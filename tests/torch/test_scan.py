"""retrograd.torch.scan: autograd, the compiler, broadcasting, resets, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg

torch = pytest.importorskip("torch")
rt = pytest.importorskip("retrograd.torch")


def draw(*shape: int, dtype: Any = None, grad: bool = True) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    tensor = torch.randn(shape, dtype=dtype or torch.float64, generator=generator)
    return tensor.requires_grad_() if grad else tensor


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("a_shape", [(5, 3, 4), (4,), (5, 1, 1), ()])
@pytest.mark.parametrize("with_state", [False, True])
def test_gradcheck(axis: int, a_shape: tuple[int, ...], with_state: bool) -> None:
    shape = (5, 3, 4)
    state = tuple(extent for i, extent in enumerate(shape) if i != axis % 3)
    arguments = [draw(*a_shape), draw(*shape), *([draw(*state)] if with_state else [])]
    assert torch.autograd.gradcheck(lambda *tensors: rt.scan(*tensors, axis=axis), arguments)
    # Of one result alone, the gradient of the other is None.
    for result in (0, 1):
        assert torch.autograd.gradcheck(lambda *tensors, r=result: rt.scan(*tensors, axis=axis)[r], arguments)


def test_resets() -> None:
    a, b, h0 = draw(6, 4), draw(6, 4), draw(4)
    reset = torch.tensor([False, True, False, False, True, False])[:, None]
    assert torch.autograd.gradcheck(lambda *tensors: rt.scan(*tensors, reset=reset), [a, b, h0])


def test_has_the_bits_of_the_array_functions() -> None:
    a, b, h0 = (draw(*shape, dtype=torch.float32) for shape in ((7, 5), (7, 5), (5,)))
    dy = draw(7, 5, dtype=torch.float32, grad=False)
    y, hn = rt.scan(a, b, h0)
    y.backward(dy)
    result = rg.scan_forward(*(t.detach().numpy() for t in (a, b, h0)))
    gradients = rg.scan_backward(dy.numpy(), result.cache)
    for got, right in zip((y, hn), result[:2], strict=True):
        np.testing.assert_array_equal(got.detach(), right)
    for tensor, right in zip((a, b, h0), gradients, strict=True):
        np.testing.assert_array_equal(tensor.grad, right)


def test_strides_are_not_copied() -> None:
    a, b = draw(5, 7).detach().T, draw(5, 7).detach().T
    y, _ = rt.scan(a, b)
    expected = rg.scan_forward(np.ascontiguousarray(a), np.ascontiguousarray(b)).y
    np.testing.assert_array_equal(y, expected)


def test_compiled() -> None:
    a, b, h0 = (draw(*shape, dtype=torch.float32) for shape in ((6, 4), (6, 4), (4,)))

    def function(a: Any, b: Any, h0: Any) -> Any:
        y, hn = rt.scan(torch.sigmoid(a), b * 2, h0)
        return y.sum() + (hn**2).sum()

    expected = torch.autograd.grad(function(a, b, h0), (a, b, h0))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for got, right in zip(torch.autograd.grad(compiled(a, b, h0), (a, b, h0)), expected, strict=True):
        torch.testing.assert_close(got, right)


def test_operators_pass_pytorchs_checks() -> None:
    a, b, h0 = (draw(*shape, dtype=torch.float32) for shape in ((6, 4), (6, 4), (4,)))
    for arguments in ((a, b, h0, 0), (a, b, None, 0)):
        torch.library.opcheck(torch.ops.retrograd.scan, arguments)


def test_there_is_no_second_derivative() -> None:
    a, b = draw(5, 3), draw(5, 3)
    (da,) = torch.autograd.grad(rt.scan(a, b)[0].sum(), a, create_graph=True)
    with pytest.raises(NotImplementedError, match="scan: there is no second derivative"):
        da.sum().backward()


def test_refusals() -> None:
    a, b = draw(5, 3, grad=False), draw(5, 3, grad=False)
    with pytest.raises(ValueError, match=r"scan: a has shape \(4,\), which cannot be broadcast to the shape \(5, 3\)"):
        rt.scan(draw(4), b)
    with pytest.raises(TypeError, match=r"scan: a has dtype torch.float32, must be torch.float64 as b is"):
        rt.scan(a.float(), b)
    with pytest.raises(TypeError, match=r"scan: b has dtype torch.float16; it must be float32 or float64"):
        rt.scan(a.half(), b.half())
    with pytest.raises(TypeError, match=r"scan: reset has dtype torch.int64; it must be bool"):
        rt.scan(a, b, reset=torch.zeros(5, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"scan: axis is 2, but b has 2 axes"):
        rt.scan(a, b, axis=2)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.vmap(rt.scan)(a[None], b[None])
