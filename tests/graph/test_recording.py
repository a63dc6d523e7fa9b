"""Recordings: graphs that are built call by call and traced when the sizes of their placeholders are known."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from retrograd import graph
from retrograd.graph import Recording, Symbol, Variable

F32 = np.dtype(np.float32)


def run(recording: Recording, feeds: dict[Symbol, Any], targets: list[Symbol], assigns: Any = ()) -> list[Any]:
    specs = {s: graph.spec(a.shape, a.dtype) for s, a in feeds.items()}
    found: list[Any] = recording.program(specs, targets, assigns)(*feeds.values())
    return found


def ramp(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def one(recording: Recording, function: Any, *operands: Symbol, **options: Any) -> Symbol:
    return recording.call(function, operands, options)[0]


def test_unknown_sizes_are_known_when_it_runs() -> None:
    r = Recording()
    x = r.placeholder((-1, 3), F32, "x")
    w = r.variable(Variable(np.ones((3, 2), np.float32)), "w")
    y = one(r, graph.matmul, x, w)
    assert y.shape == (-1, 2)
    assert y.dtype == F32
    for rows in (1, 4):
        np.testing.assert_array_equal(run(r, {x: ramp(rows, 3)}, [y])[0], ramp(rows, 3) @ np.ones((3, 2)))


def test_a_placeholder_without_a_rank() -> None:
    r = Recording()
    x = r.placeholder(None, F32, "x")
    y = one(r, graph.square, x)
    assert y.shape is None
    for shape in ((5,), (2, 3)):
        np.testing.assert_array_equal(run(r, {x: ramp(*shape)}, [y])[0], ramp(*shape) ** 2)


def test_gradients_of_placeholders_variables_and_intermediates() -> None:
    r = Recording()
    x = r.placeholder((2, 3), F32, "x")
    w = r.variable(Variable(ramp(3)), "w")
    h = one(r, graph.multiply, x, w)
    y = one(r, graph.square, h)  # not without axes: the gradient is of its sum
    dx, dw, dh = r.gradients(y, [x, w, h])
    found = run(r, {x: ramp(2, 3)}, [dx, dw, dh])
    slope = 2 * ramp(2, 3) * ramp(3)
    for got, expected in zip(found, (slope * ramp(3), (slope * ramp(2, 3)).sum(0), slope), strict=True):
        np.testing.assert_array_equal(got, expected)
    with pytest.raises(ValueError, match="does not depend on"):
        r.gradients(h, [y])


def test_reads_see_the_start_of_the_run_unless_they_depend_on_the_assign() -> None:
    r = Recording()
    variable = Variable(np.ones(2, np.float32))
    v, step = r.variable(variable, "v"), r.constant(np.full(2, 3, np.float32))
    assign = r.assign(v, one(r, graph.add, v, step))
    before = one(r, graph.negative, v)
    r.dependencies = (assign,)
    after = one(r, graph.negative, v)
    r.dependencies = ()
    assert [a.tolist() for a in run(r, {}, [before, after])] == [[-1, -1], [-4, -4]]
    assert variable.value.tolist() == [4, 4]
    run(r, {}, [before])  # does not assign
    assert variable.value.tolist() == [4, 4]
    run(r, {}, [], [assign])
    assert variable.value.tolist() == [7, 7]


def test_two_assigns_and_other_shapes_are_refused() -> None:
    r = Recording()
    variable = Variable(np.ones(2, np.float32))
    v, c = r.variable(variable, "v"), r.constant(np.zeros(2, np.float32), "c")
    first, second = r.assign(v, c), r.assign(v, v)
    with pytest.raises(ValueError, match=r"variable 'v' .* is assigned twice"):
        run(r, {}, [], [first, second])
    assert variable.value.tolist() == [1, 1]
    with pytest.raises(ValueError, match="another shape"):
        r.assign(v, r.constant(np.zeros(3, np.float32)))
    with pytest.raises(TypeError, match="another data type"):
        r.assign(v, r.constant(np.zeros(2)))
    with pytest.raises(TypeError, match=r"constant 'c' .* is not a variable"):
        r.assign(c, v)


def test_tensors_of_another_graph_are_refused() -> None:
    r, other = Recording(), Recording()
    x, foreign = r.placeholder((2,), F32, "x"), other.placeholder((2,), F32, "foreign")
    with pytest.raises(ValueError, match=r"'foreign' .* belongs to another graph"):
        r.call(graph.add, (x, foreign))
    for feeds, targets in (({x: ramp(2)}, [foreign]), ({foreign: ramp(2)}, [])):
        with pytest.raises(ValueError, match=r"'foreign' .* belongs to another graph"):
            run(r, feeds, targets)


def test_feeds() -> None:
    r = Recording()
    x, unused = r.placeholder((-1, 3), F32, "x"), r.placeholder((2,), F32, "unused")
    y = one(r, graph.negative, x)
    np.testing.assert_array_equal(run(r, {unused: ramp(2), x: ramp(1, 3)}, [y])[0], -ramp(1, 3))
    with pytest.raises(ValueError, match="no feed for placeholder 'x'"):
        run(r, {unused: ramp(2)}, [y])
    with pytest.raises(TypeError, match=r"the feed of placeholder 'x' .* has data type float64"):
        run(r, {x: ramp(1, 3).astype(float)}, [y])
    with pytest.raises(ValueError, match=r"the feed of placeholder 'x' .* has shape \[1, 2\]"):
        run(r, {x: ramp(1, 2)}, [y])
    with pytest.raises(TypeError, match="is not a placeholder"):
        run(r, {x: ramp(1, 3), y: ramp(1, 3)}, [y])


def test_targets_that_are_not_computed() -> None:
    r = Recording()
    x, c = r.placeholder((2,), F32, "x"), r.constant(np.array([5, 6], np.int32))
    v = r.variable(Variable(np.array([7.0, 8.0])), "v")
    assert [a.tolist() for a in run(r, {x: ramp(2)}, [x, c, v, x])] == [[0, 1], [5, 6], [7, 8], [0, 1]]


def test_programs_are_kept_by_their_specs() -> None:
    r = Recording()
    x = r.placeholder((-1,), F32, "x")
    y = one(r, graph.negative, x)
    first = r.program({x: graph.spec(1)}, [y])
    second = r.program({x: graph.spec(2)}, [y])
    assert r.program({x: graph.spec(1)}, [y]) is first
    for size in range(3, 34):
        r.program({x: graph.spec(size)}, [y])
    assert r.program({x: graph.spec(1)}, [y]) is first  # used later than the second
    assert r.program({x: graph.spec(2)}, [y]) is not second
    assert len(r._programs) == 32


def test_errors_name_the_call() -> None:
    r = Recording()
    x = r.placeholder((2, 3), F32, "x")
    with pytest.raises(ValueError, match=r"matmul 'product': .*operands: placeholder 'x'"):
        r.call(graph.matmul, (x, x), name="product")
    y = r.placeholder((-1,), F32, "y")
    z = one(r, graph.add, one(r, graph.reshape, x, shape=(6,)), y)
    with pytest.raises(ValueError, match=r"add .*placeholder 'y'"):
        run(r, {x: ramp(2, 3), y: ramp(5)}, [z])


def test_threads_share_a_recording() -> None:
    r = Recording()
    x = r.placeholder((-1,), F32, "x")
    y = one(r, graph.square, x)
    wrong: list[int] = []

    def work(size: int) -> None:
        for _ in range(50):
            if not np.array_equal(run(r, {x: ramp(size)}, [y])[0], ramp(size) ** 2):
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(1 + k % 3,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_unknown_sizes_of_several_operands_are_independent() -> None:
    """The same stand-in for both would make every valid convolution end in one position."""
    recording = Recording()
    x = recording.placeholder((-1, 3, -1), np.dtype(np.float32), "x")
    w = recording.placeholder((4, 3, -1), np.dtype(np.float32), "w")
    (y,) = recording.call(graph.conv, (x, w))
    assert y.shape == (-1, 4, -1)
    (total,) = recording.call(graph.add, (x, x))
    assert total.shape == (-1, 3, -1)
