"""Gradients: what stops them, replaces them, repeats their forward pass, and differentiates them again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd import graph

ROUNDED = 1e-12  # a few dozen roundings of float64, of values of about 1


def evaluated(function: Callable[..., Any], *arrays: np.ndarray) -> Any:
    return graph.compile(function, *arrays)(*arrays)


def normal(*shape: int, seed: int = 0, dtype: type = np.float64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def differences(function: Callable[..., Any], *arrays: np.ndarray, step: float = 1e-6) -> list[np.ndarray]:
    """Central differences of a function of float64 arrays that returns a number."""
    found = []
    for i, array in enumerate(arrays):
        slope = np.zeros_like(array)
        for at in np.ndindex(*array.shape):
            values = []
            for sign in (1, -1):
                moved = [a.copy() for a in arrays]
                moved[i][at] += sign * step
                values.append(float(function(*moved)))
            slope[at] = (values[0] - values[1]) / (2 * step)
        found.append(slope)
    return found


# ---- stop_gradient ---------------------------------------------------------------------------------------------------


def test_stop_gradient_is_a_constant_to_gradients() -> None:
    x = normal(5)
    y, dx = evaluated(lambda x: ((s := (x * graph.stop_gradient(x)).sum()), graph.gradients(s, [x])[0]), x)
    np.testing.assert_allclose(y, (x * x).sum(), rtol=ROUNDED)
    assert dx.tolist() == x.tolist()  # half of 2 x


def test_stop_gradient_of_a_part() -> None:
    def function(x: graph.Tensor, w: graph.Tensor) -> Any:
        h = graph.tanh(x @ w)
        return graph.gradients((graph.stop_gradient(h) * h + h).sum(), [x, w])

    x, w = normal(3, 4), normal(4, 2, seed=1)
    h = np.tanh(x @ w)
    dh = (h + 1) * (1 - h * h)
    dx, dw = evaluated(function, x, w)
    np.testing.assert_allclose(dx, dh @ w.T, rtol=ROUNDED, atol=ROUNDED)
    np.testing.assert_allclose(dw, x.T @ dh, rtol=ROUNDED, atol=ROUNDED)
    assert graph.stop_gradient(x) is x or np.shares_memory(graph.stop_gradient(x), x)


# ---- functions of steps ----------------------------------------------------------------------------------------------

STEPS = ("floor", "ceil", "round", "round_away", "trunc", "sign")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", STEPS)
def test_the_gradient_of_steps_is_zero(name: str, dtype: Any) -> None:
    """Alone it is 0, even for a gradient that is not finite; in a product it adds nothing."""
    f = getattr(graph, name)
    x = np.array([-1.5, -0.5, -0.0, 0.0, 0.5, 1.5, 2.25, 1e30, math.inf, math.nan], dtype)
    seed = np.array([1, 2, math.inf, math.nan, 3, 4, 5, 6, 7, 8], dtype)
    (alone,) = evaluated(lambda x, seed: graph.gradients(f(x), [x], seed=seed), x, seed)
    assert alone.dtype == dtype
    assert alone.tolist() == [0.0] * 10
    y, dx = evaluated(lambda x: (f(x), graph.gradients((f(x) * x).sum(), [x])[0]), x)
    np.testing.assert_array_equal(dx, y)


def test_the_second_derivative_of_a_corner_is_zero() -> None:
    def function(x: graph.Tensor) -> Any:
        (first,) = graph.gradients(graph.absolute(x).sum(), [x])
        return first, graph.gradients((first * x).sum(), [x])[0], graph.gradients(first.sum(), [x])[0]

    x = normal(6)
    first, product, alone = evaluated(function, x)
    np.testing.assert_array_equal(first, np.sign(x))
    np.testing.assert_array_equal(product, np.sign(x))
    assert not alone.any()


def test_the_sign_bit_is_a_constant_to_gradients() -> None:
    """As comparisons: nothing passes through its bools, and a result that has no other way to x is refused."""
    x = np.array([-2.0, -0.0, 0.0, 3.0])
    (dx,) = evaluated(lambda x: graph.gradients((graph.signbit(x).astype(np.float64) * x).sum(), [x]), x)
    assert dx.tolist() == [1, 1, 0, 0]
    with pytest.raises(ValueError, match="does not depend on wrt"):
        evaluated(lambda x: graph.gradients(graph.signbit(x).astype(np.float64).sum(), [x]), x)


# ---- custom gradients ------------------------------------------------------------------------------------------------


def test_a_straight_through_gradient() -> None:
    rounded = graph.custom_gradient(graph.round, lambda g, y, x: [g])
    x = normal(6) * 3
    y, dx = evaluated(lambda x: (rounded(x), graph.gradients((rounded(x) * x).sum(), [x])[0]), x)
    assert y.tolist() == np.rint(x).tolist()
    np.testing.assert_allclose(dx, np.rint(x) + x, rtol=ROUNDED)
    assert rounded(x).tolist() == np.rint(x).tolist()  # computes, with arrays


def test_a_custom_gradient_of_several_inputs_of_other_shapes() -> None:
    def norm(x: graph.Tensor, scale: graph.Tensor) -> graph.Tensor:
        return graph.sqrt(graph.sum(x * x)) * scale

    def rule(g: graph.Tensor, y: graph.Tensor, x: graph.Tensor, scale: graph.Tensor) -> Any:
        return [g * scale * scale * x / y * 10.0, None]  # ten times too large, to tell it from the usual one

    custom = graph.custom_gradient(norm, rule)
    x, scale = normal(4, 3), np.array(1.5)
    y, dx, dscale = evaluated(
        lambda x, s: (
            custom(x, s),
            graph.gradients(custom(x, s), [x])[0],
            graph.gradients(custom(x, s) + s * s, [s])[0],
        ),
        x, scale,
    )  # fmt: skip
    length = np.sqrt((x * x).sum())
    np.testing.assert_allclose(y, length * 1.5, rtol=ROUNDED)
    np.testing.assert_allclose(dx, 10 * 1.5 * x / length, rtol=ROUNDED)
    np.testing.assert_allclose(dscale, 3.0, rtol=ROUNDED)  # None is zero


def test_custom_gradients_can_be_differentiated_again() -> None:
    cube = graph.custom_gradient(lambda x: x * x * x, lambda g, y, x: [g * x * x])  # a third of the slope

    def function(x: graph.Tensor) -> Any:
        (first,) = graph.gradients(cube(x).sum(), [x])
        (second,) = graph.gradients(first.sum(), [x])
        return first, second

    x = normal(4)
    first, second = evaluated(function, x)
    np.testing.assert_allclose(first, x * x, rtol=ROUNDED)
    np.testing.assert_allclose(second, 2 * x, rtol=ROUNDED)


def test_custom_gradients_that_do_not_fit() -> None:
    x = graph.spec((4,))

    def refused(rule: Callable[..., Any]) -> str:
        custom = graph.custom_gradient(graph.exp, rule)
        with pytest.raises((TypeError, ValueError)) as info:
            graph.trace(lambda x: graph.gradients(custom(x).sum(), [x]), [x])
        return str(info.value)

    assert "2 gradients for 1 inputs" in refused(lambda g, y, x: [g, g])
    message = refused(lambda g, y, x: [g.sum()])
    assert "float32[]" in message
    assert "float32[4]" in message
    assert "float64[4]" in refused(lambda g, y, x: [np.ones(4)])


# ---- seeds, and tensors used twice -----------------------------------------------------------------------------------


def test_seeds() -> None:
    x, seed = normal(3, 4), normal(3, 4, seed=2)
    (dx,) = evaluated(lambda x, s: graph.gradients(graph.tanh(x), [x], seed=s), x, seed)
    np.testing.assert_allclose(dx, seed * (1 - np.tanh(x) ** 2), rtol=ROUNDED)
    (fixed,) = evaluated(lambda x: graph.gradients(graph.tanh(x), [x], seed=seed), x)
    assert fixed.tobytes() == dx.tobytes()
    for bad in (graph.spec((3,), float), graph.spec((3, 4))):
        with pytest.raises(ValueError, match="seed is"):
            graph.trace(lambda x, s: graph.gradients(graph.tanh(x), [x], seed=s), [graph.spec((3, 4), float), bad])


def test_a_seed_of_a_number() -> None:
    (dx,) = evaluated(lambda x: graph.gradients((x * x).sum(), [x], seed=3.0), normal(3))
    np.testing.assert_allclose(dx, 6 * normal(3), rtol=ROUNDED)


def test_tensors_used_many_times() -> None:
    def function(x: Any, w: Any) -> Any:
        h = graph.tanh(x @ w)
        return ((h * h) @ w.T + x * graph.exp(h @ w.T) + h.sum() * h.mean()).sum()

    x, w = normal(3, 4) / 4, normal(4, 2, seed=1) / 4
    found = evaluated(lambda x, w: graph.gradients(function(x, w), [x, w]), x, w)
    for one, expected in zip(found, differences(function, x, w), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6, atol=1e-7)  # of central differences


def test_gradients_of_intermediate_tensors_and_of_the_result_itself() -> None:
    def function(x: graph.Tensor) -> Any:
        h = x * x
        loss = (h * 3.0).sum()
        return graph.gradients(loss, [h, loss, x, h])

    x = normal(4)
    dh, dloss, dx, again = evaluated(function, x)
    assert dh.tolist() == [3.0] * 4 == again.tolist()
    assert dloss == 1.0
    np.testing.assert_allclose(dx, 6 * x, rtol=ROUNDED)


def test_gradients_of_several_results() -> None:
    def function(x: graph.Tensor) -> Any:
        top = graph.top_k(x, 2)
        parts = graph.split(x, 2, axis=1)
        return graph.gradients((top.values * top.values).sum() + (parts[1] * 5.0).sum(), [x])

    x = normal(3, 4)
    (dx,) = evaluated(function, x)
    expected = np.zeros_like(x)
    order = np.argsort(-x, axis=1)[:, :2]
    np.put_along_axis(expected, order, 2 * np.take_along_axis(x, order, 1), 1)
    expected[:, 2:] += 5
    np.testing.assert_allclose(dx, expected, rtol=ROUNDED)


def test_sums_of_contributions_have_one_order() -> None:
    rng = np.random.default_rng(4)
    scales = [float(s) for s in 10.0 ** rng.uniform(-6, 6, 12)]

    def function(x: graph.Tensor) -> Any:
        total = x.sum()
        for scale in scales:  # twelve uses, with sums that depend on their order
            total = total + (graph.sin(x * scale) * scale).sum()
        return graph.gradients(total, [x])[0]

    x = rng.standard_normal(64).astype(np.float32)
    bits = {graph.compile(function, x)(x).tobytes() for _ in range(20)}
    assert len(bits) == 1


# ---- recompute -------------------------------------------------------------------------------------------------------


def deep(blocks: int, wrap: Callable[..., Any]) -> tuple[Callable[..., Any], list[graph.Variable]]:
    rng = np.random.default_rng(7)
    weights = [
        graph.Variable((rng.standard_normal((32, 32)) / 6).astype(np.float32), name=f"w{i}") for i in range(3 * blocks)
    ]
    seed = graph.Variable(np.int64(5))

    def block(x: graph.Tensor, a: graph.Variable, b: graph.Variable, c: graph.Variable) -> graph.Tensor:
        h = graph.gelu(graph.linear(graph.layer_norm(x), a))
        h = graph.dropout(graph.tanh(graph.linear(h, b)) * graph.sigmoid(h), 0.2, seed=seed)
        return x + graph.linear(graph.softmax(h) * h, c)

    def model(x: graph.Tensor) -> Any:
        for i in range(blocks):
            x = wrap(block)(x, *weights[3 * i : 3 * i + 3])
        loss = (x * x).mean()
        return loss, graph.gradients(loss, weights)

    return model, weights


def test_recompute_gives_the_same_bits_with_less_memory() -> None:
    x = normal(64, 32, dtype=np.float32)
    programs = [graph.compile(deep(6, wrap)[0], x) for wrap in (lambda block: block, graph.recompute)]
    (loss, found), (loss_again, found_again) = (program(x) for program in programs)
    assert loss == loss_again
    for one, other in zip(found, found_again, strict=True):
        assert one.tobytes() == other.tobytes()
    kept, recomputed = (program.memory for program in programs)
    # Of each of six blocks one tensor remains instead of about ten; the gradients of the weights are in both.
    gradients = 18 * 32 * 32 * 4
    assert recomputed - gradients < 0.45 * (kept - gradients), (recomputed, kept, gradients)


def test_recompute_computes_again() -> None:
    x = normal(8, 32, dtype=np.float32)
    plain, again = (graph.compile(deep(2, wrap)[0], x) for wrap in (lambda block: block, graph.recompute))

    def count(program: graph.Program) -> int:
        return sum(step.name == "linear" for step in program.plan.steps)

    # The last product of a block is not needed again.
    assert count(plain) == 6
    assert count(again) == 6 + 4


def test_recompute_of_variables_constants_and_several_results() -> None:
    w = graph.Variable(normal(3, 3, seed=3), name="w")
    table = normal(3, seed=4)

    @graph.recompute
    def part(x: graph.Tensor, *, scale: float) -> Any:
        h = graph.tanh(x @ w + table)  # the variable is first read here
        return {"sum": (h * scale).sum(), "rest": (h, x)}

    def function(x: graph.Tensor) -> Any:
        found = part(x, scale=2.0)
        loss = found["sum"] + (found["rest"][0] * found["rest"][1]).sum()
        return graph.gradients(loss, [x, w])

    x = normal(4, 3)
    h = np.tanh(x @ w.value + table)
    dh = (2 + x) * (1 - h * h)
    dx, dw = evaluated(function, x)
    np.testing.assert_allclose(dx, dh @ w.value.T + h, rtol=ROUNDED, atol=ROUNDED)
    np.testing.assert_allclose(dw, x.T @ dh, rtol=ROUNDED, atol=ROUNDED)
    assert part(x, scale=2.0)["sum"].shape == ()  # computes, with arrays


def test_recompute_inside_recompute() -> None:
    inner = graph.recompute(lambda x: graph.tanh(graph.sin(x) * x))
    outer = graph.recompute(lambda x: inner(graph.cos(x)) * inner(x))
    plain = lambda x: (lambda f: f(graph.cos(x)) * f(x))(lambda v: graph.tanh(graph.sin(v) * v))  # noqa: E731
    x = normal(7)
    bits = [evaluated(lambda x, f=f: graph.gradients(f(x).sum(), [x])[0], x).tobytes() for f in (outer, plain)]
    assert bits[0] == bits[1]


# ---- second derivatives ----------------------------------------------------------------------------------------------

TWICE: dict[str, Callable[[Any], Any]] = {
    "tanh": graph.tanh,
    "exp": lambda x: graph.exp(x * 0.5),
    "softmax": lambda x: graph.softmax(x) * x,
    "log_softmax": lambda x: graph.log_softmax(x) * x,
    "matmul": lambda x: graph.matmul(x, graph.transpose(x)) @ graph.sin(x),
    "linear": lambda x: graph.sin(graph.linear(x, x[:3], x[0, :3])) * 2.0,
    "conv": lambda x: graph.square(graph.conv(x.reshape(1, 2, 2, 4), graph.sin(x[:3, :2]).reshape(3, 2, 1, 1))),
    "embedding": lambda x: graph.square(graph.embedding(np.array([0, 2, 2]), x)),
    "take": lambda x: graph.take(x, np.array([1, 1, 0]), axis=1) ** 3,
    "slices": lambda x: x[1:, ::2] ** 3 * 2.0,
    "concatenate": lambda x: graph.concatenate([x, x * x]) ** 2,
    "logsumexp": lambda x: graph.logsumexp(x, 1) * x[:, 0],
    "norm": lambda x: graph.sqrt(graph.sum_of_squares(x, 1)),
    "power": lambda x: graph.power(graph.exp(x), 1.7) / (x * x + 1.0),
    "prod": lambda x: graph.prod(x, 1),
    "cumsum": lambda x: graph.cumsum(x * x, 1) * x,
    "where": lambda x: graph.where(x > 0, x * x * x, graph.sin(x)),
    "var": lambda x: graph.var(x, 1),
}


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(name: str) -> None:
    use = TWICE[name]
    x = normal(4, 4, seed=5) / 2

    def slope(x: Any) -> Any:  # the product of the gradient with a fixed direction
        return (graph.gradients(use(x).sum(), [x])[0] * DIRECTION).sum()

    program = graph.compile(slope, x)
    (found,) = evaluated(lambda x: graph.gradients(slope(x), [x]), x)
    (expected,) = differences(program, x, step=1e-5)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-7)  # of central differences of analytic slopes
    assert np.abs(found).max() > 0.01


DIRECTION = normal(4, 4, seed=6)


def test_several_results_with_seeds() -> None:
    """The gradients of a sum of products, one of whose factors is given."""

    def of_sum(x: graph.Tensor, w: graph.Tensor, dy: graph.Tensor, dc: graph.Tensor) -> Any:
        y, hn, cn = graph.lstm(x, (w, w))
        return graph.gradients((y * dy).sum() + (cn * dc).sum() + hn.sum(), [x, w])

    def of_seeds(x: graph.Tensor, w: graph.Tensor, dy: graph.Tensor, dc: graph.Tensor) -> Any:
        y, hn, cn = graph.lstm(x, (w, w))
        return graph.gradients([y, cn, hn.sum()], [x, w], seed=[dy, dc, None])

    arrays = normal(5, 2, 3), normal(12, 3), normal(5, 2, 3), normal(2, 3)
    for got, expected in zip(evaluated(of_seeds, *arrays), evaluated(of_sum, *arrays), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)

    def twice(x: graph.Tensor) -> Any:
        y = x * 3.0
        return graph.gradients([y, y], [x], seed=[graph.ones((4,), float), graph.full((4,), 2.0, float)])

    np.testing.assert_array_equal(evaluated(twice, normal(4))[0], np.full(4, 9.0))


@pytest.mark.parametrize(
    ("of", "seed", "message"),
    [
        (lambda x: [x, x], lambda x: x, "seed must be a sequence"),
        (lambda x: [x, x], lambda x: [x], "of has 2 tensors, and seed 1"),
        (lambda x: [], lambda x: None, "of has 0 tensors"),
        (lambda x: [x, x.sum()], lambda x: None, r"of has shape \(4,\)"),
        (lambda x: [x], lambda x: [x[:2]], r"seed is float64\[2\], but the tensor is float64\[4\]"),
    ],
)
def test_seeds_that_do_not_fit(of: Callable[..., Any], seed: Callable[..., Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        graph.trace(lambda x: graph.gradients(of(x), [x], seed=seed(x)), [graph.spec((4,), float)])


def test_third_derivatives() -> None:
    def function(x: graph.Tensor) -> Any:
        found = [(x**4).sum()]
        for _ in range(4):
            (slope,) = graph.gradients(found[-1], [x])
            found.append(slope.sum())
        return found

    x = normal(3)
    for k, value in enumerate(evaluated(function, x)):
        factor = [1, 4, 12, 24, 24][k]
        np.testing.assert_allclose(value, (factor * x ** (4 - k)).sum(), rtol=ROUNDED)


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda x: graph.gelu(x), "activation_backward"),
        (lambda x: graph.layer_norm(x), "norm_backward"),
        (lambda x: graph.l2_pool(x.reshape(1, 1, 4, 4), 2) * x[0, 0], "pool_backward"),
        (lambda x: graph.lstm(x.reshape(4, 1, 4), (np.ones((4, 4)), np.ones((4, 1)))).y, "lstm_backward"),
    ],
)
def test_second_derivatives_that_do_not_exist(use: Callable[..., Any], name: str) -> None:
    def function(x: graph.Tensor) -> Any:
        (dx,) = graph.gradients((use(x) ** 2).sum(), [x])
        return graph.gradients((dx * dx).sum(), [x])

    with pytest.raises(
        TypeError, match=rf"gradients: {name} \(.*test_gradients.py:\d+\) has no derivative: .*single call"
    ):
        graph.trace(function, [graph.spec((4, 4), float)])


def test_a_second_derivative_of_a_loss_that_does_not_exist() -> None:
    def function(x: graph.Tensor, labels: graph.Tensor) -> Any:
        (dx,) = graph.gradients(graph.softmax_cross_entropy(x, labels), [x])
        return graph.gradients((dx * dx).sum(), [x])

    def both(x: graph.Tensor, target: graph.Tensor) -> Any:
        loss = graph.mean_squared_error(x, target)
        (dx,) = graph.gradients(loss, [x])
        return graph.gradients(loss + (dx * dx).sum(), [x])

    with pytest.raises(TypeError, match=r"softmax_cross_entropy \(.*:\d+\) has no second derivative"):
        graph.trace(function, [graph.spec((4, 3), float), graph.spec((4,), np.int64)])
    with pytest.raises(TypeError, match=r"element_losses \(.*:\d+\) has no second derivative"):
        graph.trace(both, [graph.spec((4, 3), float)] * 2)


def test_a_gradient_penalty_trains() -> None:
    """The norm of a critic's slope, pulled to 1: what second derivatives are for."""
    w1, w2 = (graph.Variable(normal(*s, seed=i) / 3) for i, s in enumerate([(16, 4), (1, 16)]))
    adam = graph.Adam(0.02)

    def step(x: graph.Tensor) -> Any:
        (dx,) = graph.gradients(graph.linear(graph.tanh(graph.linear(x, w1)), w2).sum(), [x])
        penalty = graph.square(graph.sqrt(graph.sum(dx * dx, 1)) - 1.0).mean()
        adam.minimize(penalty, [w1, w2])
        return penalty

    x = normal(32, 4, seed=9)
    program = graph.compile(step, x)
    penalties = program.run(np.broadcast_to(x, (200, *x.shape)))
    assert penalties[-1] < 0.01 * penalties[0]
