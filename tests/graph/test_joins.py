"""Normalization by a tensor's own mean and variance: one call of the engine in recordings, the same mathematics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd import graph
from retrograd.graph import Recording, Symbol, Variable
from retrograd.graph.joins import add as joined_add
from retrograd.graph.joins import normalize

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
Shape = tuple[int, ...] | None


def array(shape: tuple[int, ...], seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


class Normalized:
    """x, its moments, and y; `targets` are run on float32 or float64 arrays."""

    def __init__(
        self, shape: tuple[int, ...], axes: tuple[int, ...], gamma: Shape, beta: Shape, eps: float, dtype: Any = F32
    ) -> None:
        self.r = r = Recording()
        self.dtype = dtype
        self.arrays = {"x": 3 * array(shape, 0) + 2, "seed": array(shape, 1)}
        for name, given in (("gamma", gamma), ("beta", beta)):
            if given is not None:
                self.arrays[name] = array(given, 2 + len(name))
        self.fed = {name: r.placeholder(a.shape, dtype, name) for name, a in self.arrays.items()}
        self.x = self.fed["x"]
        self.mean = self.call(graph.mean, self.x, axis=axes, keepdims=True)
        self.var = self.call(graph.var, self.x, axis=axes, keepdims=True)
        self.y = self.normalized(self.mean, self.var, eps)

    def call(self, function: Callable[..., Any], *operands: Symbol | None, **options: Any) -> Symbol:
        return self.r.call(function, operands, options)[0]

    def normalized(self, mean: Symbol, var: Symbol, eps: float) -> Symbol:
        return self.call(normalize, self.x, mean, var, self.fed.get("gamma"), self.fed.get("beta"), eps=eps)

    def loss(self) -> Symbol:
        return self.call(graph.multiply, self.y, self.fed["seed"])

    def run(self, *targets: Symbol) -> tuple[list[Any], list[str]]:
        """The values, and the steps of the program."""
        specs = {
            s: graph.spec(a.shape, self.dtype) for s, a in zip(self.fed.values(), self.arrays.values(), strict=True)
        }
        program = self.r.program(specs, targets)
        found = program.arrays(tuple(a.astype(self.dtype) for a in self.arrays.values()))
        assert found is not None
        return [a.copy() for a in found], [step.operation.name for step in program.plan.steps]


def exact(n: Normalized, axes: tuple[int, ...], eps: float) -> list[Any]:
    """y and the gradients of x, gamma and beta, in float64."""
    a = {name: v.astype(n.dtype).astype(np.float64) for name, v in n.arrays.items()}
    x, g = a["x"], a["seed"]
    gamma, beta = a.get("gamma"), a.get("beta")
    rstd = 1 / np.sqrt(x.var(axes, keepdims=True) + eps)
    xhat = (x - x.mean(axes, keepdims=True)) * rstd
    y = xhat if gamma is None else xhat * gamma
    gx = g if gamma is None else g * gamma
    dx = rstd * (gx - gx.mean(axes, keepdims=True) - xhat * (gx * xhat).mean(axes, keepdims=True))
    found = [y if beta is None else y + beta, dx]

    def to(product: Any, shape: tuple[int, ...]) -> Any:
        lead = product.ndim - len(shape)
        summed = product.sum(tuple(range(lead)) + tuple(lead + i for i, s in enumerate(shape) if s == 1))
        return summed.reshape(shape)

    found += [] if gamma is None else [to(g * xhat, gamma.shape)]
    return found + ([] if beta is None else [to(g, beta.shape)])


# shape, axes, gamma, beta, eps; whether the engine has it
CASES: tuple[tuple[Any, ...], ...] = (
    ((32, 6), (0,), (1, 6), (1, 6), 1e-5, True),
    ((32, 6), (0,), (6,), None, 1e-5, True),
    ((32, 6), (0,), None, (6,), 1e-5, True),
    ((4, 3, 5, 7), (0, 2, 3), (1, 3, 1, 1), (3, 1, 1), 1e-3, True),
    ((4, 5, 7, 3), (0, 1, 2), (3,), (1, 1, 1, 3), 1e-5, True),
    ((4, 5, 7, 3), (1, 2), (3,), (3,), 1e-5, True),  # an instance norm, channels last
    ((4, 3, 5, 7), (2, 3), (3, 1, 1), (3, 1, 1), 1e-5, True),  # an instance norm
    ((4, 3, 5, 7), (2, 3), None, None, 1e-5, True),
    ((4, 3, 5, 7), (1, 2, 3), (3, 5, 7), (1, 3, 5, 7), 1e-5, True),  # a layer norm
    ((4, 3, 5, 7), (1, 2, 3), (4, 1, 1, 1), (4, 1, 1, 1), 1e-5, True),  # a batch norm of axis 0
    ((6, 9), (1,), (9,), (9,), 0.1, True),
    ((6, 9), (1,), (6, 1), (6, 1), 0.1, True),
    ((6, 9), (0, 1), (6, 9), (6, 9), 0.1, True),
    ((9,), (0,), (9,), (9,), 0.1, True),
    ((9,), (0,), (1,), (), 0.1, True),
    ((6, 9), (1,), (), (6, 9), 0.1, True),  # gamma and beta outside
    ((6, 9), (1,), (9,), (6, 9), 0.1, True),  # beta outside
    ((6, 9), (1,), (6, 9), (9,), 0.1, True),  # gamma outside, so beta too
    ((2, 3, 2, 3, 2, 3), (0, 2, 3, 4, 5), (3, 1, 1, 1, 1), None, 0.1, True),
    ((1, 4), (0,), (4,), (4,), 0.1, True),  # a variance of one element
    ((4, 3, 5, 7), (0, 2), (3, 1, 1), (3, 1, 1), 1e-5, False),
    ((4, 3, 5, 7), (0,), None, None, 1e-5, False),
    ((6, 9), (1,), (9,), (9,), -1e-9, False),
)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: tuple[Any, ...], dtype: Any) -> None:
    *settings, joined = case
    n = Normalized(*settings, dtype=dtype)
    wrt = [s for name, s in n.fed.items() if name != "seed"]
    found, steps = n.run(n.y, *n.r.gradients(n.loss(), wrt))
    assert ("norm" in steps) == ("norm_backward" in steps) == joined, steps
    for got, expected in zip(found, exact(n, settings[1], settings[4]), strict=True):
        assert got.shape == expected.shape
        scale = 1 + np.abs(expected).max(initial=0)
        np.testing.assert_allclose(got, expected, rtol=0, atol=30 * float(np.finfo(dtype).eps) * scale)


def test_a_large_mean_costs_no_digits() -> None:
    n = Normalized((512, 4), (0,), None, None, 1e-5)
    n.arrays["x"] += 1e5
    (y,), _ = n.run(n.y)
    np.testing.assert_allclose(y, exact(n, (0,), 1e-5)[0], rtol=0, atol=2e-6)


def test_moments_are_still_there_for_others() -> None:
    """They are targets, and are assigned to running statistics."""
    n = Normalized((32, 6), (0,), (6,), (6,), 1e-5)
    running = n.r.variable(Variable(np.zeros((1, 6), np.float32)), "running")
    moved = n.call(lambda old, new: 0.5 * old + 0.5 * new, running, n.mean)
    store = n.r.assign(running, moved)
    (dx,) = n.r.gradients(n.loss(), [n.x])
    specs = {s: graph.spec(a.shape) for s, a in zip(n.fed.values(), n.arrays.values(), strict=True)}
    program = n.r.program(specs, [n.y, dx, n.mean, n.var], [store])
    assert "norm" in [step.operation.name for step in program.plan.steps]
    y, gradient, mean, var = program.arrays(tuple(a.astype(F32) for a in n.arrays.values())) or ()
    x = n.arrays["x"].astype(F32).astype(float)
    np.testing.assert_allclose(mean, x.mean(0, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(var, x.var(0, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(running.call.value.value, 0.5 * x.mean(0, keepdims=True), rtol=1e-6)
    for got, expected in zip((y, gradient), exact(n, (0,), 1e-5), strict=False):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_a_loss_of_y_and_its_moments() -> None:
    n = Normalized((8, 3), (0,), None, None, 0.1, dtype=F64)
    total = n.call(lambda a, b, c: graph.sum(a) + graph.sum(b * c), n.loss(), n.mean, n.var)
    (dx,) = n.r.gradients(total, [n.x])
    (found,), steps = n.run(dx)
    assert "norm_backward" in steps
    x = n.arrays["x"]
    mean, var = x.mean(0), x.var(0)
    expected = exact(n, (0,), 0.1)[1] + var / 8 + mean * 2 * (x - mean) / 8
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_the_moments_are_partial() -> None:
    """They are marked, so nothing is joined."""
    n = Normalized((8, 3), (0,), None, None, 0.1, dtype=F64)
    before, _ = n.run(n.y)
    wrt = [n.x, n.mean, n.var]
    gradients = n.r.gradients(n.loss(), wrt)
    (y, dx, dmean, dvar), steps = n.run(n.y, *gradients)
    assert "norm" not in steps
    x, g = n.arrays["x"], n.arrays["seed"]
    mean, var = x.mean(0), x.var(0)
    rstd = 1 / np.sqrt(var + 0.1)
    np.testing.assert_allclose(y, before[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(dx, exact(n, (0,), 0.1)[1], rtol=1e-11, atol=1e-12)
    dv = (-0.5 * g * (x - mean) * rstd**3).sum(0)
    np.testing.assert_allclose(dvar, dv[None], rtol=1e-11)
    # The variance is computed from the mean of x, not from the tensor whose gradient is taken.
    np.testing.assert_allclose(dmean, -(g * rstd).sum(0)[None], rtol=1e-11)


def test_second_derivatives() -> None:
    n = Normalized((5, 3), (0,), None, None, 0.1, dtype=F64)
    (dx,) = n.r.gradients(n.loss(), [n.x])
    (ddx,) = n.r.gradients(n.call(graph.square, dx), [n.x])
    (found,), steps = n.run(ddx)
    assert "norm" not in steps
    for i in ((0, 0), (3, 2)):
        values = []
        for sign in (1, -1):
            n.arrays["x"][i] += sign * 1e-5
            values.append((exact(n, (0,), 0.1)[1] ** 2).sum())
            n.arrays["x"][i] -= sign * 1e-5
        assert found[i] == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


def _of_other(n: Normalized) -> tuple[Symbol, Symbol]:
    other = n.call(graph.negative, n.x)
    return n.call(graph.mean, other, axis=(0,), keepdims=True), n.call(graph.var, other, axis=(0,), keepdims=True)


def _wider(n: Normalized) -> tuple[Symbol, Symbol]:
    return n.mean, n.call(graph.var, n.x, axis=(0, 1), keepdims=True)


def _around_another(n: Normalized) -> tuple[Symbol, Symbol]:
    def around(x: Any, center: Any) -> Any:
        return graph.mean(graph.square(x - center), (0,), keepdims=True)

    return n.mean, n.call(around, n.x, n.call(graph.mean, n.x, axis=(0, 1), keepdims=True))


def _unbiased(n: Normalized) -> tuple[Symbol, Symbol]:
    return n.mean, n.call(lambda v: v * (8 / 7), n.var)


def _constant(n: Normalized) -> tuple[Symbol, Symbol]:
    return n.mean, n.r.constant(np.full((1, 3), 2.0))


def _stopped(n: Normalized) -> tuple[Symbol, Symbol]:
    return n.call(graph.stop_gradient, n.mean), n.var


@pytest.mark.parametrize("moments", [_of_other, _wider, _around_another, _unbiased, _constant, _stopped])
def test_other_moments_are_not_joined(moments: Callable[[Normalized], tuple[Symbol, Symbol]]) -> None:
    n = Normalized((8, 3), (0,), None, None, 0.1, dtype=F64)
    mean, var = moments(n)
    n.y = n.normalized(mean, var, 0.1)
    (dx,) = n.r.gradients(n.loss(), [n.x])
    (y, found, center, spread), steps = n.run(n.y, dx, mean, var)
    assert "norm" not in steps
    np.testing.assert_allclose(y, (n.arrays["x"] - center) / np.sqrt(spread + 0.1), rtol=1e-12)
    assert np.abs(found - exact(n, (0,), 0.1)[1]).max() > 1e-3


def test_moments_in_another_shape_are_joined() -> None:
    """As builders write them that keep no axes."""
    n = Normalized((8, 3, 2), (0, 2), (3, 1), (3, 1), 0.1, dtype=F64)

    def moments(x: Any) -> Any:
        mean = graph.mean(x, (0, 2))
        return graph.reshape(mean, (1, 3, 1)), graph.mean(graph.square(x - graph.reshape(mean, (3, 1))), (0, 2))

    mean, var = n.r.call(moments, (n.x,), count=2)
    n.y = n.normalized(mean, n.call(graph.reshape, var, shape=(1, 3, 1)), 0.1)
    (y, dx), steps = n.run(n.y, *n.r.gradients(n.loss(), [n.x]))
    assert "norm" in steps
    for got, expected in zip((y, dx), exact(n, (0, 2), 0.1), strict=False):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


def test_programs_of_functions_join_nothing() -> None:
    """Their bits are those of the functions called one after the other."""
    x = array((8, 3), 0).astype(F32)

    def function(x: Any) -> Any:
        return graph.normalize(x, graph.mean(x, 0, keepdims=True), graph.var(x, 0, keepdims=True))

    program = graph.compile(function, x)
    assert "norm" not in [step.operation.name for step in program.plan.steps]
    assert program(x).tobytes() == np.asarray(function(x)).tobytes()


# ---- biases ----------------------------------------------------------------------------------------------------------


class Biased:
    """A layer, its sum with a bias, and a loss."""

    def __init__(self, layer: Callable[..., Any], x: tuple[int, ...], w: tuple[int, ...], b: tuple[int, ...]) -> None:
        self.r = r = Recording()
        shape = layer(array(x, 0), array(w, 1)).shape
        self.arrays = [array(x, 0), array(w, 1), array(b, 2), array(np.broadcast_shapes(shape, b), 3)]
        self.fed = [r.placeholder(a.shape, F64, name) for a, name in zip(self.arrays, "xwbg", strict=True)]
        self.inside = r.call(layer, self.fed[:2])[0]
        self.layer = layer

    def added(self, reverse: bool = False) -> Symbol:
        operands = (self.fed[2], self.inside) if reverse else (self.inside, self.fed[2])
        return self.r.call(joined_add, operands)[0]

    def run(self, *targets: Symbol) -> tuple[list[Any], list[str]]:
        specs = {s: graph.spec(a.shape, F64) for s, a in zip(self.fed, self.arrays, strict=True)}
        program = self.r.program(specs, targets)
        found = program.arrays(tuple(self.arrays))
        assert found is not None
        return [a.copy() for a in found], [step.operation.name for step in program.plan.steps]

    def expected(self) -> list[Any]:
        """y and the gradients, by a program of functions, which joins nothing."""

        def function(x: Any, w: Any, b: Any, g: Any) -> Any:
            y = self.layer(x, w) + b
            return [y, *graph.gradients(y, [x, w, b], seed=g)]

        return [np.asarray(a) for a in graph.compile(function, *self.arrays)(*self.arrays)]


def conv(x: Any, w: Any) -> Any:
    return graph.conv(x, w, padding=1)


def conv_last(x: Any, w: Any) -> Any:
    return graph.conv(x, graph.transpose(w, (3, 2, 0, 1)), padding=1, channels_last=True)


def conv_transpose(x: Any, w: Any) -> Any:
    return graph.conv_transpose(x, w)


LAYERS: tuple[tuple[Any, ...], ...] = (
    (graph.matmul, (5, 7), (7, 3), (3,), "linear"),
    (graph.matmul, (5, 7), (7, 3), (1, 3), "linear"),
    (graph.matmul, (2, 5, 7), (7, 3), (1, 1, 3), "linear"),
    (graph.matmul, (0, 7), (7, 3), (3,), "linear"),
    (conv, (2, 3, 5, 5), (4, 3, 3, 3), (4, 1, 1), "conv"),
    (conv, (2, 3, 5, 5), (4, 3, 3, 3), (1, 4, 1, 1), "conv"),
    (conv_last, (2, 5, 5, 3), (3, 3, 3, 4), (4,), "conv"),
    (conv_transpose, (2, 3, 5, 5), (3, 4, 3, 3), (4, 1, 1), "conv"),
    (graph.matmul, (5, 7), (7, 3), (5, 1), ""),  # none of these is a bias
    (graph.matmul, (5, 7), (7, 3), (5, 3), ""),
    (graph.matmul, (5, 7), (7, 3), (2, 5, 3), ""),
    (graph.matmul, (5, 7), (7, 3), (), ""),
    (graph.matmul, (2, 5, 7), (2, 7, 3), (3,), ""),
    (graph.matmul, (7,), (7, 3), (3,), ""),
    (conv, (2, 3, 5, 5), (4, 3, 3, 3), (5,), ""),
    (conv, (2, 3, 4, 4), (4, 3, 3, 3), (4,), ""),  # along the rows
)


def name_of(case: tuple[Any, ...]) -> str:
    function, *shapes = case
    return f"{function.__name__}-{'-'.join(map(str, shapes))}"


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", LAYERS, ids=name_of)
def test_layers_with_a_bias(case: tuple[Any, ...], reverse: bool) -> None:
    *settings, joined = case
    biased = Biased(*settings)
    y = biased.added(reverse)
    loss = biased.r.call(graph.multiply, (y, biased.fed[3]))[0]
    found, steps = biased.run(y, *biased.r.gradients(loss, biased.fed[:3]))
    apart = biased.expected()
    assert ("add" not in steps) == bool(joined), steps
    assert not joined or f"{joined}_backward" in steps
    for got, expected in zip(found, apart, strict=True):
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", [LAYERS[0], LAYERS[4]], ids=name_of)
def test_a_layer_that_is_read_elsewhere_is_computed_once(case: tuple[Any, ...]) -> None:
    biased = Biased(*case[:4])
    y = biased.added()
    (inside, found), steps = biased.run(biased.inside, y)
    np.testing.assert_allclose(inside + biased.arrays[2], found, rtol=1e-13)
    assert steps.count("matmul") + steps.count("conv") + steps.count("linear") == 1
    biased = Biased(*case[:4])  # it is differentiated
    (slope,) = biased.r.gradients(biased.added(), [biased.inside])
    np.testing.assert_array_equal(biased.run(slope)[0][0], np.ones(inside.shape))


def test_the_operands_of_a_joined_product_are_those_of_the_call() -> None:
    """A variable that is assigned before the product is read has its new value, in the product with the bias too."""
    r = Recording()
    w = r.variable(Variable(np.eye(2, dtype=np.float32)), "w")
    x = r.constant(np.ones((3, 2), np.float32))
    (new,) = r.call(graph.multiply, (w, r.constant(np.float32(5))))
    store = r.assign(w, new)
    r.dependencies = (store,)
    (product,) = r.call(graph.matmul, (x, w))
    (y,) = r.call(joined_add, (product, r.constant(np.asarray([1, 2], np.float32))))
    r.dependencies = ()
    program = r.program({}, [y], [store])
    assert "linear" in [step.operation.name for step in program.plan.steps]
    (found,) = program.arrays(()) or ()
    np.testing.assert_array_equal(found, [[6, 7]] * 3)


def test_second_derivatives_of_a_layer_with_a_bias() -> None:
    biased = Biased(*LAYERS[0][:4])
    y = biased.r.call(graph.square, (biased.added(),))[0]
    (dw,) = biased.r.gradients(y, [biased.fed[1]])
    (ddx,) = biased.r.gradients(biased.r.call(graph.square, (dw,))[0], [biased.fed[0]])
    (found,), steps = biased.run(ddx)
    assert "linear" in steps

    def function(x: Any, w: Any, b: Any) -> Any:
        (dw,) = graph.gradients(graph.sum(graph.square(x @ w + b)), [w])
        return graph.gradients(graph.sum(graph.square(dw)), [x])[0]

    arguments = biased.arrays[:3]
    np.testing.assert_allclose(found, graph.compile(function, *arguments)(*arguments), rtol=1e-11, atol=1e-11)
