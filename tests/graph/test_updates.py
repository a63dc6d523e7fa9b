"""Steps of optimizers as functions of tensors: joined to one call where their results are only assigned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from retrograd import graph
from retrograd.lab import reference
from support.graph_models import check_program

SHAPES = ((3, 5), (7,), (), (2, 0), (4099,))
RNG = np.random.default_rng(0)


def array(*shape: int, dtype: Any = np.float32, positive: bool = False, rng: np.random.Generator = RNG) -> Any:
    found = rng.standard_normal(shape)
    return np.asarray(np.abs(found) if positive else found, dtype)


class Adam:
    """Parameters with their states, and a step that assigns all of them."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: Any = np.float32, largest: bool = False, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)

        def variables(name: str, positive: bool = False) -> list[graph.Variable]:
            return [
                graph.Variable(array(*s, dtype=dtype, positive=positive, rng=rng), name=f"{name} {i}")
                for i, s in enumerate(shapes)
            ]

        self.w, self.m, self.v = variables("w"), variables("m"), variables("v", positive=True)
        self.top = variables("top", positive=True) if largest else [None] * len(shapes)
        self.power = graph.Variable(np.asarray([1], dtype), name="power")

    def hyperparameters(self) -> dict[str, Any]:
        beta = np.asarray([0.9], self.power.dtype)
        now = self.power * beta
        self.power.assign(now)
        rate = 0.01 / (1 - graph.reshape(now, ()))
        return {"learning_rate": rate, "beta1": beta, "beta2": 0.99, "eps": 1e-8}

    def update(self, i: int, gradient: Any, settings: dict[str, Any], assign: str = "wmvt") -> tuple[graph.Tensor, ...]:
        found = graph.adam_update(self.w[i], gradient, self.m[i], self.v[i], self.top[i], **settings)
        for name, variable, value in zip("wmvt", (self.w[i], self.m[i], self.v[i], self.top[i]), found, strict=False):
            if name in assign:
                assert variable is not None
                variable.assign(value)
        return found

    def gradients(self) -> list[graph.Tensor]:
        return graph.gradients([graph.sum(graph.square(w) * w) for w in self.w], self.w)


def count(program: graph.Program) -> dict[str, int]:
    names = [step.operation.name for step in program.plan.steps]
    return {name: names.count(name) for name in ("optimizer_steps", "optimizer_step", "copy")}


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_updates_of_all_parameters_are_one_call(dtype: Any, largest: bool) -> None:
    adam = Adam(dtype=dtype, largest=largest)

    def step() -> graph.Tensor:
        before, settings = graph.sum(adam.w[0]), adam.hyperparameters()
        for i, gradient in enumerate(adam.gradients()):
            adam.update(i, gradient, settings)
        return before

    program = check_program(step, runs=3)
    assert count(program)["optimizer_steps"] == 1
    assert count(program)["optimizer_step"] == 0


def test_bits_do_not_depend_on_threads() -> None:
    found = []
    for threads in (1, 2, 7):
        adam = Adam(((300, 200), (40001,)), seed=1)

        def step(adam: Adam = adam) -> None:
            settings = adam.hyperparameters()
            for i, gradient in enumerate(adam.gradients()):
                adam.update(i, gradient, settings)

        program = graph.compile(step)
        for _ in range(3):
            program(num_threads=threads)
        found.append([v.value.tobytes() for v in (*adam.w, *adam.m, *adam.v)])
    assert found[0] == found[1] == found[2]


def test_sgd_is_one_call_too() -> None:
    adam = Adam()

    def step() -> None:
        for w, gradient in zip(adam.w, adam.gradients(), strict=True):
            w.assign(graph.sgd_update(w, gradient, 0.1))

    assert count(check_program(step)) == {"optimizer_steps": 1, "optimizer_step": 0, "copy": 0}


def old_values_are_outputs(adam: Adam) -> Any:
    old = [graph.identity(v) for v in (*adam.w, *adam.m)]
    settings = adam.hyperparameters()
    for i, gradient in enumerate(adam.gradients()):
        adam.update(i, gradient, settings)
    return old


def new_values_are_outputs(adam: Adam) -> Any:
    settings = adam.hyperparameters()
    return [adam.update(i, gradient, settings) for i, gradient in enumerate(adam.gradients())]


def new_values_are_used(adam: Adam) -> Any:
    settings = adam.hyperparameters()
    found = [adam.update(i, gradient, settings) for i, gradient in enumerate(adam.gradients())]
    return graph.sum(found[0][0]) + graph.sum(found[4][1])


def only_some_are_assigned(adam: Adam) -> Any:
    settings = adam.hyperparameters()
    for i, gradient in enumerate(adam.gradients()):
        adam.update(i, gradient, settings, assign="wm" if i % 2 else "v")


def gradients_are_other_parameters(adam: Adam) -> Any:
    """Of the same shape, which are updated in the same call, and a view of the parameter itself."""
    settings, old = adam.hyperparameters(), [graph.identity(w) for w in adam.w]
    adam.update(0, old[1], settings)
    adam.update(1, old[0], settings)
    adam.update(2, graph.flip(old[2], 0), settings)


def hyperparameters_differ(adam: Adam) -> Any:
    settings = adam.hyperparameters()
    for i, gradient in enumerate(adam.gradients()):
        adam.update(i, gradient, {**settings, "learning_rate": 0.1} if i % 2 else settings)


def parameters_are_exchanged(adam: Adam) -> Any:
    settings = adam.hyperparameters()
    for i, gradient in enumerate(adam.gradients()[:2]):
        found = adam.update(i, gradient, settings, assign="")
        adam.w[1 - i].assign(found[0])
        adam.m[i].assign(found[2])
        adam.v[i].assign(found[1])


def a_result_has_two_variables(adam: Adam) -> Any:
    settings = adam.hyperparameters()
    found = adam.update(0, adam.gradients()[0], settings)
    adam.w[1].assign(found[0])


def the_rate_is_a_variable_that_is_updated(adam: Adam) -> Any:
    rate, other = adam.power, adam.w[0]
    gradients = adam.gradients()
    other.assign(graph.sgd_update(other, gradients[0], rate))
    rate.assign(graph.sgd_update(rate, rate, rate))
    adam.w[1].assign(graph.sgd_update(adam.w[1], gradients[1], rate))


def a_later_step_starts_from_the_new_values(adam: Adam) -> Any:
    for _ in range(2):
        for w, gradient in zip(adam.w, adam.gradients(), strict=True):
            w.assign(graph.sgd_update(w, gradient, 0.1))


USES: tuple[Callable[[Adam], Any], ...] = (
    old_values_are_outputs, new_values_are_outputs, new_values_are_used, only_some_are_assigned,
    gradients_are_other_parameters, hyperparameters_differ, parameters_are_exchanged, a_result_has_two_variables,
    the_rate_is_a_variable_that_is_updated, a_later_step_starts_from_the_new_values,
)  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_every_other_use_gives_the_same_bits(use: Callable[[Adam], Any]) -> None:
    adam = Adam(((3, 5), (3, 5), (4,), (3, 5), (33,)))
    check_program(lambda: use(adam), runs=3)


def test_values_that_are_arguments() -> None:
    """Programs that keep no variables: weights are fed, and their next values are results."""
    w, g, m = (array(4, 3) for _ in range(3))
    v = array(4, 3, positive=True)

    def step(*tensors: Any) -> Any:
        return graph.adam_update(*tensors, learning_rate=0.1, beta1=0.9, beta2=0.99, eps=1e-8)

    found = graph.compile(step, w, g, m, v)(w, g, m, v)
    for one, other in zip(found, step(w, g, m, v), strict=True):
        assert one.tobytes() == other.tobytes()
    p, m, v = reference.adam_step(
        w, g, m, v, step=1, learning_rate=0.1 * (1 - 0.9) / np.sqrt(1 - 0.99), beta2=0.99, epsilon_hat=True, eps=1e-8
    )
    for one, exact in zip(found, (p, m, v), strict=True):
        np.testing.assert_allclose(one, np.asarray(exact, float), rtol=1e-5, atol=1e-6)


def test_a_step_has_second_derivatives() -> None:
    """The loss after a step, differentiated with respect to the learning rate and the gradient."""
    w, g = array(5, dtype=np.float64), array(5, dtype=np.float64)

    def after(rate: Any, g: Any) -> Any:
        return graph.sum(graph.square(graph.sgd_update(w, g, rate)))

    def slopes(rate: Any, g: Any) -> Any:
        first = graph.gradients(after(rate, g), [rate, g])
        return [*first, *graph.gradients(first[0], [rate])]

    rate = np.asarray(0.3)
    by_rate, by_g, second = graph.compile(slopes, rate, g)(rate, g)
    new = w - 0.3 * g
    np.testing.assert_allclose(by_rate, -2 * (new * g).sum(), rtol=1e-12)
    np.testing.assert_allclose(by_g, -0.6 * new, rtol=1e-12)
    np.testing.assert_allclose(second, 2 * (g * g).sum(), rtol=1e-12)


def test_what_is_wrong_is_named() -> None:
    w, m = array(3), array(3)
    settings: dict[str, Any] = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    with pytest.raises(ValueError, match=r"gradient is float32\[4\], but the values are float32\[3\]"):
        graph.sgd_update(w, array(4), 0.1)
    with pytest.raises(TypeError, match=r"momentum is float64\[3\], but the values are float32\[3\]"):
        graph.adam_update(w, w, m.astype(float), m, **settings)
    with pytest.raises(ValueError, match=r"the learning rate has shape \(3,\), must have one element"):
        graph.sgd_update(w, w, w)
    with pytest.raises(TypeError, match="the beta1 has dtype float64, but the values have float32"):
        graph.adam_update(w, w, m, m, **{**settings, "beta1": np.array([0.9])})
    with pytest.raises(TypeError, match="values have dtype int64"):
        graph.sgd_update(np.arange(3), np.arange(3), 1)
