"""Plans: what is left out, joined and shared changes the records and the memory, never a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from retrograd import graph
from support.arrays import Array
from support.graph_models import MODELS, Model, check_program, same_bits

A = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
B = np.random.default_rng(1).standard_normal((6, 5)).astype(np.float32)
V = np.random.default_rng(2).standard_normal(5).astype(np.float32)


def names(program: graph.Program) -> list[str]:
    return [step.name for step in program.plan.steps]


def apart(program: graph.Program) -> None:
    """No two tensors that are needed at the same time share memory, except a result in the place of its input."""
    plan = program.plan
    spans: dict[int, list[int]] = {}  # the first and the last step of each tensor
    tensors = {}
    for i, step in enumerate(plan.steps):
        for tensor in step.results:
            if tensor is not None:
                spans[id(tensor)], tensors[id(tensor)] = [i, i], tensor
        for tensor in step.inputs:
            root = None if tensor is None else plan._root(tensor)
            if id(root) in spans:
                spans[id(root)][1] = i
    for tensor in [*plan.outputs, *(t for _, t in plan.writes)]:
        if id(plan._root(tensor)) in spans:
            spans[id(plan._root(tensor))][1] = len(plan.steps)
    items = [(spans[key], plan.places[key], tensors[key]) for key in spans if plan.places[key].variable is None]
    for n, ((first, last), place, tensor) in enumerate(items):
        for (other_first, other_last), other, other_tensor in items[n + 1 :]:
            meet = (first < other_last and other_first < last) or first == other_first
            overlap = place.offset < other.offset + other.nbytes and other.offset < place.offset + place.nbytes
            assert not (meet and overlap and tensor.spec.nbytes and other_tensor.spec.nbytes), (tensor, other_tensor)


# ---- what is left out ------------------------------------------------------------------------------------------------


def test_dead_code_is_left_out() -> None:
    def function(x: graph.Tensor) -> graph.Tensor:
        graph.exp(x)
        x @ x.T
        graph.softmax(x)
        return x + 1.0

    program = check_program(function, A)
    assert names(program) == ["add"]
    assert len(program.graph.nodes) > 4


def test_gradients_that_nothing_needs_are_not_computed() -> None:
    w = graph.Variable(V[None] * 2)
    program = check_program(lambda x: graph.gradients(graph.linear(x, w).sum(), [w]), A)
    (backward,) = (step for step in program.plan.steps if step.name == "linear_backward")
    assert [r is not None for r in backward.results] == [False, True, False]


def test_common_subexpressions_are_computed_once() -> None:
    def function(x: graph.Tensor, y: graph.Tensor) -> Any:
        return [x @ y.T + (x @ y.T), graph.softmax(x) * 2.0, graph.softmax(x) * 3.0, graph.sum(x, 0) + graph.sum(x, 0)]

    program = check_program(function, A, B)
    assert names(program).count("matmul") == 1
    assert names(program).count("softmax") == 1
    assert names(program).count("sum") == 1
    attributes = graph.compile(lambda x: [graph.sum(x, 0), graph.sum(x, 0, keepdims=True), graph.sum(x, 1)], A)
    assert names(attributes).count("sum") == 3


def test_the_forward_pass_is_not_repeated_by_gradients() -> None:
    def function(x: graph.Tensor) -> Any:
        h = graph.tanh(x @ V)
        return graph.gradients((h * h).sum(), [x]), graph.tanh(x @ V)

    program = check_program(function, A)
    assert sum("tanh" in name.split() for name in names(program)) == 1


# ---- joined elementwise operations -----------------------------------------------------------------------------------


def test_a_chain_is_one_record() -> None:
    def function(x: graph.Tensor, y: graph.Tensor) -> graph.Tensor:
        return graph.where(x > y, graph.tanh(x * 2.0 + y) - 1.0, graph.exp(-x) / (y * y + 3.0)) + V

    program = check_program(function, A, B)
    assert program._core.size == 1
    assert names(program)[0].startswith("map ")


def test_a_chain_with_several_results_is_one_record() -> None:
    def function(x: graph.Tensor) -> Any:
        first = x * 2.0
        second = first + 1.0
        third = graph.tanh(second) * first
        return first, second, third, x - third

    program = check_program(function, A)
    assert program._core.size == 1
    apart(program)


def test_values_of_other_shapes_and_dtypes_are_not_joined_wrongly() -> None:
    def function(x: graph.Tensor, y: graph.Tensor) -> Any:
        row = graph.exp(y[0]) * 2.0  # [5], used as [6, 5]
        wide = x.astype(np.float64) * 3.0
        whole = (x > 0.0) & (y > 0.0)
        count = whole.astype(np.float32).sum(axis=1)
        return x + row, row, wide, wide.astype(np.float32) - x, whole, ~whole, count, (x * 10.0).astype(np.int64) % 7

    check_program(function, A, B)


def test_a_chain_around_a_reduction() -> None:
    def function(x: graph.Tensor) -> Any:
        centered = x - x.mean(axis=1, keepdims=True)
        scaled = centered / graph.sqrt((centered * centered).mean(axis=1, keepdims=True) + 1e-5)
        return scaled * V + 1.0

    program = check_program(function, A)
    assert program._core.size <= 7
    apart(program)


def test_chains_longer_than_a_map_holds() -> None:
    def function(x: graph.Tensor) -> Any:
        kept = []
        for i in range(100):
            x = graph.sin(x) * (1.0 + i / 100) + float(i)
            if i % 7 == 0:
                kept.append(x)
        return kept, x

    program = check_program(function, A)
    assert 7 <= program._core.size < 60
    apart(program)


def test_sums_of_many_operands() -> None:
    arrays = [np.full((6, 5), i, np.float32) for i in range(60)]

    def function(x: graph.Tensor) -> Any:
        total = x
        for array in arrays:
            total = total + array * x
        return total

    apart(check_program(function, A))


def test_a_map_waits_for_what_it_needs() -> None:
    """The sum needs the first part of the chain, and the second part needs the sum."""

    def function(x: graph.Tensor) -> Any:
        a = graph.exp(x)
        b = a * 2.0
        total = b.sum(axis=1, keepdims=True)
        return b / total + a, a * graph.exp(total), graph.tanh(a + b)

    apart(check_program(function, A))


def test_constants() -> None:
    table = np.arange(30, dtype=np.float32).reshape(6, 5)

    def function(x: graph.Tensor) -> Any:
        return [
            x * 0.1, x + table, table, 2.5, -0.0, graph.zeros((2, 3)), graph.full((4,), -0.0) * x[0, :4], table.T @ x,
            graph.constant(table)[1:3].T, x * float("inf"), x * float("nan"), graph.ones((6, 5)) / (x * -0.0),
        ]  # fmt: skip

    program = check_program(function, A)
    table[...] = 0  # a constant is a copy
    assert program(A)[2][1, 0] == 5.0
    assert np.signbit(program(A)[4])
    assert np.signbit(graph.compile(lambda x: x * -0.0, A)(abs(A))).all()


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_of_inference_does_not_grow_with_depth() -> None:
    x = np.random.default_rng(3).standard_normal((64, 32)).astype(np.float32)
    w = graph.Variable(np.eye(32, dtype=np.float32))

    def network(depth: int) -> Callable[..., Any]:
        def function(x: graph.Tensor) -> graph.Tensor:
            for i in range(depth):
                h = graph.relu(graph.linear(x, w) + float(i))
                x = graph.softmax(h) @ w + x
            return x

        return function

    sizes = {graph.compile(network(depth), x).memory for depth in (3, 10, 50)}
    assert len(sizes) == 1
    assert sizes.pop() <= 4 * x.nbytes + 4096


def test_elementwise_results_take_the_place_of_their_inputs() -> None:
    def function(x: graph.Tensor) -> Any:
        for _ in range(5):
            x = graph.softmax(graph.exp(x * 0.1))  # in place, all of them
        return x

    x = np.ones((128, 64), np.float32)
    program = check_program(function, x)
    assert program.memory <= 2 * x.nbytes + 64  # the argument, which stays, and one place for all results


def test_results_never_share_memory() -> None:
    """Two results of one step may not both take the place of its only input."""

    def function(x: graph.Tensor) -> Any:
        h = graph.softmax(x)
        return h * 2.0 + 1.0, h * 2.0

    program = check_program(function, A)
    apart(program)
    first, second = program(A)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_programs_of_models_give_the_bits_of_their_graphs(name: str, dtype: type) -> None:
    model = MODELS[name](dtype)
    adam = graph.Adam(1e-2, maximum_norm=1.0)

    def step(*arguments: graph.Tensor) -> Any:
        loss = model.loss(*arguments)
        return loss, adam.minimize(loss, model.parameters)

    program = check_program(step, *model.batch(0), runs=3)
    apart(program)


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_models_give_the_same_bits(name: str) -> None:
    found = []
    for wrap in (lambda loss: loss, graph.recompute):
        model = MODELS[name](np.float32)
        sgd = graph.SGD(0.05, momentum=0.9)
        again = Model(wrap(model.loss), model.parameters, model.batch, model.others)
        program = again.compiled(sgd)
        apart(program)
        losses = [program(*model.batch(k)) for k in range(3)]
        found.append((losses, [v.tobytes() for v in model.values()]))
    assert found[0] == found[1]


# ---- variables -------------------------------------------------------------------------------------------------------


def test_assign_and_read_again() -> None:
    count = graph.Variable(np.float32(1.0), name="count")

    def function(x: graph.Tensor) -> Any:
        before = count * 1.0
        count.assign(count + x)
        middle = count * 10.0
        count.assign(count * 2.0)
        return before, middle, count

    program = check_program(function, np.float32(3.0))
    count.value = 1.0
    assert program(3.0) == (1.0, 40.0, 8.0)
    assert count.value == 8.0
    assert program(1.0) == (8.0, 90.0, 18.0)
    assert count.value == 18.0


def test_swapped_variables() -> None:
    a, b = graph.Variable(V), graph.Variable(V * 2)

    def function() -> Any:
        old_a, old_b = graph.identity(a), graph.identity(b)
        a.assign(old_b)
        b.assign(old_a)
        return a, b

    program = check_program(function)
    a.value, b.value = V, V * 2
    found = program()
    same_bits(a.value, V * 2)
    same_bits(b.value, V)
    same_bits(found[0], V * 2)
    same_bits(found[1], V)
    program()
    same_bits(a.value, V)


def test_rotated_views_of_variables() -> None:
    a, b, c = (graph.Variable(A[:5, :5] * k) for k in (1, 2, 3))

    def function() -> Any:
        values = [graph.identity(v) for v in (a, b, c)]
        a.assign(values[1].T)
        b.assign(values[2][::-1])
        c.assign(values[0])
        return values[0].T, a

    check_program(function, runs=4)


def test_outputs_that_are_old_values_and_views() -> None:
    w = graph.Variable(A, name="w")
    sgd = graph.SGD(0.5)

    def function(x: graph.Tensor) -> Any:
        old, row, turned = graph.identity(w), w[1], w.T
        sgd.update([w], [x])
        return old, row, turned, w, w[1], w.T

    check_program(function, B)
    w.value = A
    old, row, turned, new, new_row, new_turned = graph.compile(function, B)(B)
    same_bits(old, A)
    same_bits(row, A[1])
    same_bits(turned, np.ascontiguousarray(A.T))
    same_bits(new, A - np.float32(0.5) * B)
    same_bits(new_row, new[1])
    same_bits(new_turned, np.ascontiguousarray(new.T))


def test_old_and_new_values_together() -> None:
    w = graph.Variable(A, name="w")
    sgd = graph.SGD(0.5)

    def function(x: graph.Tensor) -> Any:
        old, turned = graph.identity(w), w.T
        before = w.sum()
        sgd.update([w], [x])
        return w - old, (w @ turned).sum(), before, w.sum() - before, graph.concatenate([old, w])

    check_program(function, B, runs=3)


def test_gradients_that_are_parameters_themselves() -> None:
    """d(a b)/da is b: the update of a must not change what b is updated with."""
    a, b = graph.Variable(3.0), graph.Variable(5.0)
    sgd = graph.SGD(0.5)
    program = graph.compile(lambda: sgd.minimize(a * b, [a, b]))
    found = program()
    assert found == [5.0, 3.0]
    assert (float(a), float(b)) == (3.0 - 2.5, 5.0 - 1.5)
    check_program(lambda: sgd.minimize(a * b + (a * 2.0), [a, b]), runs=3)


def test_copies_and_averages_of_updated_parameters() -> None:
    w, target, average = (
        graph.Variable(A, name="w"),
        graph.Variable(B, name="target"),
        graph.Variable(A, name="average"),
    )
    adam = graph.Adam(0.1)

    def function(x: graph.Tensor) -> Any:
        loss = ((w - x) ** 2).sum()
        adam.minimize(loss, [w])
        target.assign(w)
        average.assign(average * 0.9 + w * 0.1)
        return loss, average

    check_program(function, B, runs=3)
    same_bits(target.value, w.value)
    assert not np.array_equal(target.value, B)


def test_parameters_changed_after_their_update() -> None:
    w = graph.Variable(A, name="w")
    sgd = graph.SGD(1.0)

    def function(x: graph.Tensor) -> Any:
        sgd.update([w], [x])
        w.assign(graph.clip(w, -0.5, 0.5))
        return w

    check_program(function, B, runs=3)
    assert abs(w.value).max() <= 0.5


def test_an_update_twice_is_refused() -> None:
    w = graph.Variable(A, name="w")
    sgd = graph.SGD(1.0)

    def twice(x: graph.Tensor) -> None:
        sgd.update([w], [x])
        sgd.update([w], [x])

    with pytest.raises(ValueError, match=r"update: Variable\(float32\[6, 5\], 'w'\) is updated twice"):
        graph.compile(twice, A)

    def assigned_before(x: graph.Tensor) -> None:
        w.assign(w * 0.5)
        sgd.update([w], [x])

    with pytest.raises(ValueError, match="twice"):
        graph.compile(assigned_before, A)


def test_two_updates_by_one_optimizer_count_once() -> None:
    w, v = graph.Variable(A, name="w"), graph.Variable(B, name="v")
    adam = graph.Adam(0.1)

    def function(x: graph.Tensor) -> None:
        adam.update([w], [x])
        adam.update([v], [x * 2.0])

    check_program(function, B, runs=3)
    assert adam.count.value == 3


def test_a_second_loss_after_the_update() -> None:
    model = MODELS["two_inputs"](np.float32)
    sgd = graph.SGD(0.1)

    def function(*arguments: graph.Tensor) -> Any:
        first = model.loss(*arguments)
        sgd.minimize(first, model.parameters)
        return first, model.loss(*arguments)  # with the new parameters

    program = check_program(function, *model.batch(0), runs=3)
    first, second = program(*model.batch(0))
    assert program(*model.batch(0))[0] == second < first


def test_an_input_as_output_and_an_unused_input() -> None:
    program = check_program(lambda x, y, z: (x, x[1:, ::2], x.T, x + 1.0, z), A, B, V)
    assert program._core.size <= 4


def test_assigning_an_input_or_a_constant() -> None:
    w, u, same = graph.Variable(A), graph.Variable(V), graph.Variable(V, name="same")

    def function(x: graph.Tensor) -> Any:
        w.assign(x)
        u.assign(V * 3)
        same.assign(same)
        return w * 2.0

    check_program(function, B)
    same_bits(w.value, B)
    same_bits(u.value, V * 3)
    same_bits(same.value, V)


def test_empty_tensors() -> None:
    empty = np.zeros((0, 5), np.float32)
    w, gamma = graph.Variable(np.ones((3, 5), np.float32)), graph.Variable(np.ones(5, np.float32))

    def function(x: graph.Tensor) -> Any:
        y = graph.linear(x, w)
        loss = (y * y).sum()
        slopes = graph.gradients(graph.layer_norm(x, gamma).sum(), [gamma])
        ones = graph.exp(slopes[0]) * 3.0  # may take the place of the slopes
        return graph.exp(x) * 2.0, y, loss, graph.gradients(loss, [w]), graph.softmax(x), x.sum(axis=0), x.T @ x, ones

    program = check_program(function, empty)
    assert program(empty)[-1].tolist() == [3.0] * 5


def test_operations_on_constants_are_computed_while_tracing() -> None:
    def function(x: graph.Tensor) -> Any:
        table = graph.exp(graph.constant(np.arange(4, dtype=np.float32)))
        (slope,) = graph.gradients(graph.sum(x**3 * table), [x])
        return slope

    x = np.arange(4, dtype=np.float32)
    program = check_program(function, x)
    names = [step.name for step in program.plan.steps]
    assert len(names) == 1
    assert "exp" not in names[0]
    assert "subtract" not in names[0]


# ---- new values of variables -----------------------------------------------------------------------------------------


def _run_twice(step: Any, variables: Sequence[graph.Variable]) -> tuple[graph.Program, list[Array]]:
    program = graph.compile(step)
    program()
    program()
    return program, [variable.value.copy() for variable in variables]


def test_maps_write_new_values_of_variables_directly() -> None:
    a, b = (graph.Variable(np.arange(1, 38, dtype=np.float32) * k) for k in (1, 2))

    def step() -> None:
        mean = a * 0.5 + b * 0.25
        b.assign(b - mean)
        a.assign(mean)

    program, (got_a, got_b) = _run_twice(step, (a, b))
    assert not program.plan.writes
    assert program.plan.commits == 0
    expected_a, expected_b = (np.arange(1, 38, dtype=np.float32) * k for k in (1, 2))
    for _ in range(2):
        mean = expected_a * np.float32(0.5) + expected_b * np.float32(0.25)
        expected_a, expected_b = mean, expected_b - mean
    np.testing.assert_allclose(got_a, expected_a, rtol=1e-6)
    np.testing.assert_allclose(got_b, expected_b, rtol=1e-6)


def test_variables_that_read_each_other_swap_their_values() -> None:
    a, b = graph.Variable(np.full((3, 5), 2.0, np.float32)), graph.Variable(np.full((5, 3), 7.0, np.float32))

    def step() -> None:
        of_b, of_a = b.T * 1.5, a.T * 2.0
        a.assign(of_b)
        b.assign(of_a)

    _, (got_a, got_b) = _run_twice(step, (a, b))
    np.testing.assert_array_equal(got_a, np.full((3, 5), 6.0, np.float32))
    np.testing.assert_array_equal(got_b, np.full((5, 3), 21.0, np.float32))


def test_a_map_does_not_overwrite_a_variable_that_it_reads_in_another_order() -> None:
    start = np.arange(24, dtype=np.float32).reshape(24)
    a = graph.Variable(start)
    _, (got,) = _run_twice(lambda: a.assign(a[::-1] * 2.0), (a,))
    np.testing.assert_array_equal(got, start * 4)


def test_a_value_of_two_variables_and_of_the_result_is_written_to_all() -> None:
    a, b = graph.Variable(np.ones(5, np.float32)), graph.Variable(np.zeros(5, np.float32))

    def step() -> graph.Tensor:
        doubled = a * 2.0
        a.assign(doubled)
        b.assign(doubled)
        return doubled

    program = graph.compile(step)
    np.testing.assert_array_equal(program(), np.full(5, 2.0, np.float32))
    np.testing.assert_array_equal(program(), np.full(5, 4.0, np.float32))
    np.testing.assert_array_equal(a.value, b.value)
    np.testing.assert_array_equal(b.value, np.full(5, 4.0, np.float32))


def test_an_optimizer_reads_the_old_value_of_a_variable_that_a_map_overwrites() -> None:
    w, scale = graph.Variable(np.ones(7, np.float32)), graph.Variable(np.full(7, 3.0, np.float32))
    sgd = graph.SGD(1.0)

    def step() -> None:
        sgd.update([w], [scale])
        scale.assign(scale * 2.0)

    _, (got_w, got_scale) = _run_twice(step, (w, scale))
    np.testing.assert_array_equal(got_w, np.full(7, 1 - 3 - 6, np.float32))
    np.testing.assert_array_equal(got_scale, np.full(7, 12.0, np.float32))


def test_an_assigned_value_wins_over_an_update() -> None:
    w = graph.Variable(np.ones(7, np.float32))
    sgd = graph.SGD(1.0)

    def step() -> None:
        doubled = w * 2.0
        sgd.update([w], [np.full(7, 5.0, np.float32)])
        w.assign(doubled)

    _, (got,) = _run_twice(step, (w,))
    np.testing.assert_array_equal(got, np.full(7, 4.0, np.float32))
