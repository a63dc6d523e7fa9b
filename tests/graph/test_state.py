"""What stays from run to run: variables and their copies, running statistics, programs that are attempted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import graph
from retrograd.graph.program import MISFIT

# ---- variables -------------------------------------------------------------------------------------------------------


def test_elements_are_set_in_place() -> None:
    variable = graph.Variable(np.zeros((2, 3), np.float32), name="w")
    program = graph.compile(lambda x: variable * x, graph.spec(()))
    memory = variable.value
    variable[...] = [[1, 2, 3], [4, 5, 6]]
    assert program(2.0).tolist() == [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]]
    variable[1] = 0
    variable[0, ::2] = [7.0, 8.0]
    variable[np.array([[False, True, False], [False, False, True]])] = 9.0
    assert program(1.0).tolist() == [[7.0, 9.0, 8.0], [0.0, 0.0, 9.0]]
    assert variable.value is memory
    with pytest.raises(ValueError, match="broadcast"):
        variable[...] = np.ones(4)
    assert memory.tolist() == [[7.0, 9.0, 8.0], [0.0, 0.0, 9.0]]


def test_elements_are_not_set_while_tracing() -> None:
    variable = graph.Variable(np.zeros(3), name="w")

    def write(x: graph.Tensor) -> graph.Tensor:
        variable[0] = 1.0
        return x

    with pytest.raises(TypeError, match=r"elements of variable 'w' are set while a function is traced.*use assign"):
        graph.compile(write, np.ones(3))
    assert variable.value.tolist() == [0.0, 0.0, 0.0]


COPIES: dict[str, Callable[[graph.Variable], graph.Variable]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda variable: pickle.loads(pickle.dumps(variable)),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize(
    "value", [np.arange(7, dtype=np.float32), np.float64(2.5), np.arange(6).reshape(2, 3), np.array([True, False])]
)
def test_copies_are_aligned_and_independent(kind: str, value: Any) -> None:
    variable = graph.Variable(value, name="w")
    before = variable.value.copy()
    copies = [COPIES[kind](variable) for _ in range(5)]  # one of them could be aligned by chance
    for found in copies:
        assert type(found) is graph.Variable
        assert found.name == "w"
        assert found.spec == variable.spec
        assert found.value.ctypes.data % 64 == 0
        assert not np.shares_memory(found.value, variable.value)
        np.testing.assert_array_equal(found.value, before)
        found[...] = 1
        np.testing.assert_array_equal(variable.value, before)
    variable[...] = 0
    np.testing.assert_array_equal(copies[0].value, np.ones_like(before))


def test_a_copy_is_another_variable_of_a_program() -> None:
    first = graph.Variable(np.ones(3, np.float32), name="w")
    second = copy.deepcopy(first)

    def step(x: graph.Tensor) -> graph.Tensor:
        total = first + second
        second.assign(second + x)
        return total

    program = graph.compile(step, np.ones(3, np.float32))
    assert program(np.full(3, 2.0)).tolist() == [2.0] * 3
    assert program(np.full(3, 2.0)).tolist() == [4.0] * 3
    assert first.value.tolist() == [1.0] * 3
    assert second.value.tolist() == [5.0] * 3


def test_a_variable_in_two_places_of_a_copied_structure_stays_one() -> None:
    variable = graph.Variable(np.ones(3))
    for make in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        found = make({"a": variable, "b": [variable]})
        assert found["a"] is found["b"][0]
        assert found["a"] is not variable


def test_a_variable_of_the_wanted_dtype_is_not_cast() -> None:
    variable = graph.Variable(np.arange(3.0), name="w")
    program = graph.compile(lambda: graph.cast(variable, np.float64) * 2.0)
    assert program().tolist() == [0.0, 2.0, 4.0]
    assert "cast" not in repr(program)
    assert "cast" in repr(graph.compile(lambda: graph.cast(variable, np.float32) * 2.0))
    at_once: Any = graph.cast(variable, np.float64)
    variable[...] = 5.0
    assert at_once.tolist() == [0.0, 1.0, 2.0]  # a copy, as of an array


# ---- running statistics ----------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "batch_norm": (graph.batch_norm, rg.batch_norm_forward),
    "instance_norm": (graph.instance_norm, rg.instance_norm_forward),
}
UPDATES = {"pytorch": rg.RunningUpdate.pytorch(0.25), "keras": rg.RunningUpdate.keras(0.9)}


def statistics(channels: int, dtype: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.linspace(-1.0, 1.0, channels).astype(dtype), np.linspace(0.5, 2.0, channels).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_running_statistics_are_those_of_the_functions(name: str, update: str, axis: int, dtype: Any) -> None:
    """In a program and at once, in training and in evaluation: y has the same bits, statistics the same but for one."""
    ours, theirs = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    shape = (4, 5, 6) if axis == 1 else (4, 6, 5)
    gamma, beta = (rng.standard_normal(5).astype(dtype) for _ in range(2))
    options: dict[str, Any] = {"update": UPDATES[update], "channel_axis": axis, "eps": 1e-3, "activation": "tanh"}
    expected = statistics(5, dtype)
    running = [graph.Variable(array) for array in statistics(5, dtype)]
    eager = [graph.Variable(array) for array in statistics(5, dtype)]

    def call(x: Any, training: bool, kept: Any) -> Any:
        return ours(x, gamma, beta, training=training, running_mean=kept[0], running_var=kept[1], **options)

    spec = graph.spec(shape, dtype)
    train = graph.compile(lambda x: call(x, True, running), spec)
    evaluate = graph.compile(lambda x: call(x, False, running), spec)
    close = 4 * np.finfo(dtype).eps
    for _ in range(3):
        x = (rng.standard_normal(shape) * 3 + 1).astype(dtype)
        y = theirs(x, gamma, beta, running_mean=expected[0], running_var=expected[1], **options)[0]
        np.testing.assert_array_equal(train(x), y)
        np.testing.assert_array_equal(call(x, True, eager), y)
        for found in (running, eager):
            for variable, array in zip(found, expected, strict=True):
                np.testing.assert_allclose(variable.value, array, rtol=close, atol=close)
        before = [variable.value.copy() for variable in running]
        fixed = {"training": False, "running_mean": before[0], "running_var": before[1]}
        evaluated = theirs(x, gamma, beta, **fixed, **options)[0]
        np.testing.assert_array_equal(evaluate(x), evaluated)
        np.testing.assert_array_equal(call(x, False, running), evaluated)
        assert [v.value.tobytes() for v in running] == [array.tobytes() for array in before]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_do_not_depend_on_running_statistics_in_training(name: str) -> None:
    ours = FUNCTIONS[name][0]
    x, dy = np.random.default_rng(1).standard_normal((2, 3, 4, 5))
    mean, var = (graph.Variable(array) for array in statistics(4, np.float64))

    def with_them(x: Any, dy: Any) -> Any:
        return graph.gradients(ours(x, running_mean=mean, running_var=var), [x], seed=dy)[0]

    plain = graph.compile(lambda x, dy: graph.gradients(ours(x), [x], seed=dy)[0], x, dy)
    np.testing.assert_array_equal(graph.compile(with_them, x, dy)(x, dy), plain(x, dy))


def test_gradients_of_an_evaluated_instance_norm() -> None:
    """The statistics are constants: y is gamma (x - mean) / sqrt(var + eps) + beta."""
    x, dy = np.random.default_rng(2).standard_normal((2, 3, 4, 5))
    mean, var = (graph.Variable(array) for array in statistics(4, np.float64))
    gamma, beta = graph.Variable(np.array([1.0, -2.0, 0.5, 3.0])), graph.Variable(np.zeros(4))

    def call(x: Any, dy: Any) -> Any:
        y = graph.instance_norm(x, gamma, beta, training=False, running_mean=mean, running_var=var)
        return graph.gradients(y, [x, gamma, beta], seed=dy)

    dx, dgamma, dbeta = graph.compile(call, x, dy)(x, dy)
    rstd = (1 / np.sqrt(var.value + 1e-5))[:, None]
    np.testing.assert_allclose(dx, dy * gamma.value[:, None] * rstd, rtol=1e-13)
    np.testing.assert_allclose(dgamma, (dy * (x - mean.value[:, None]) * rstd).sum((0, 2)), rtol=1e-12)
    np.testing.assert_allclose(dbeta, dy.sum((0, 2)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_samples_change_no_statistics(name: str) -> None:
    mean, var = (graph.Variable(array) for array in statistics(4, np.float32))
    x = np.zeros((0, 4, 5), np.float32)
    program = graph.compile(lambda x: FUNCTIONS[name][0](x, running_mean=mean, running_var=var), x)
    assert program(x).shape == (0, 4, 5)
    for variable, before in zip((mean, var), statistics(4, np.float32), strict=True):
        np.testing.assert_array_equal(variable.value, before)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_statistics_that_are_missing(name: str) -> None:
    mean, var = (graph.Variable(array) for array in statistics(4, np.float32))
    x, function = np.ones((2, 4, 5), np.float32), FUNCTIONS[name][0]
    with pytest.raises(ValueError, match=f"{name}: evaluation needs running_mean and running_var"):
        function(x, training=False)
    for options in ({"running_mean": mean}, {"running_var": var}):
        with pytest.raises(ValueError, match=f"{name}: running_mean and running_var belong together"):
            function(x, **options)


# ---- programs that are attempted -------------------------------------------------------------------------------------


def test_attempts() -> None:
    total = graph.Variable(np.zeros(3, np.float32), name="total")

    def step(x: graph.Tensor, labels: graph.Tensor) -> graph.Tensor:
        total.assign(total + x)
        return graph.sum(graph.take(x, labels))

    x, labels = np.array([1, 2, 4], np.float32), np.array([0, 2])
    program = graph.compile(step, x, labels)
    assert program.attempt((x, labels)) == 5.0
    assert program.attempt((x, labels), 2) == 5.0
    assert total.value.tolist() == [2.0, 4.0, 8.0]
    unfit: list[tuple[Any, ...]] = [
        (x,), (x, labels, labels), (x[:2], labels), (x[None], labels), (x.astype(np.float64), labels),
        (x, labels.astype(np.float32)), (x.tolist(), labels), (1.0, labels), (None, labels), ("text", labels),
    ]  # fmt: skip
    for arguments in unfit:
        assert program.attempt(arguments) is MISFIT
    assert total.value.tolist() == [2.0, 4.0, 8.0]
    with pytest.raises((IndexError, ValueError), match="3"):
        program.attempt((x, np.array([0, 3])))
    assert total.value.tolist() == [2.0, 4.0, 8.0]


def test_an_error_within_an_attempt_is_not_a_misfit() -> None:
    calls = []

    def failing(x: Any) -> Any:
        calls.append(x.tolist())
        raise ValueError("of the function")

    program = graph.compile(lambda x: graph.call(failing, graph.spec((2,)), x), graph.spec((2,)))
    with pytest.raises(ValueError, match="of the function"):
        program.attempt((np.ones(2, np.float32),))
    assert calls == [[1.0, 1.0]]
