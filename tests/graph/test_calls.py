"""Python functions that programs call: values, exceptions, threads that wait for each other, signals, and memory."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from retrograd import graph
from support.arrays import Array
from support.growth import growth
from support.processes import python
from support.waiting import PATIENCE

X = np.arange(6, dtype=np.float32).reshape(2, 3)
LIKE_X = graph.spec((2, 3))


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arrays: Array) -> Any:
        self.calls += 1
        return self.function(*arrays)


# ---- values ----------------------------------------------------------------------------------------------------------


def test_one_result() -> None:
    program = graph.compile(lambda x: graph.call(np.cumsum, graph.spec(6), x * 2.0) + 1.0, X)
    np.testing.assert_array_equal(program(X), np.cumsum(X * 2) + 1)
    np.testing.assert_array_equal(program(-X), np.cumsum(-X * 2) + 1)
    assert isinstance(program(X, copy=False), graph.ResultView)


def test_several_results_of_several_dtypes() -> None:
    specs = [graph.spec((), np.float64), graph.spec(2, np.int32), graph.spec((2, 3), bool)]

    def function(a: Array, b: Array) -> Any:
        assert a.dtype == np.float32
        assert b.dtype == np.int64
        return float(a.sum()), a.argmax(1).astype(np.int32), a > b

    whole = np.arange(3)
    program = graph.compile(lambda x, n: graph.call(function, specs, x, n), X, whole)
    for found in (program(X, whole), graph.call(function, specs, X, whole)):
        assert isinstance(found, tuple)
        assert found[0] == 15
        np.testing.assert_array_equal(found[1], [2, 2])
        np.testing.assert_array_equal(found[2], whole < X)


def test_what_the_function_gets() -> None:
    kept: list[Array] = []
    variable = graph.Variable(np.ones(3))

    def function(*arrays: Array) -> Array:
        kept.extend(arrays)
        for array in arrays:
            assert type(array) is np.ndarray
            assert array.flags.c_contiguous
            assert not array.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
        assert [a.shape for a in arrays] == [(3, 2), (3,), (), (0, 4), (2,)]
        np.testing.assert_array_equal(arrays[0], X.T)
        return np.ones(2, np.float32)

    def step(x: graph.Tensor, none: graph.Tensor) -> Any:
        return graph.call(function, graph.spec(2), x.T, variable, 2.5, none, graph.constant(np.zeros(2)))

    program = graph.compile(step, X, np.ones((0, 4)))
    assert program(X, np.ones((0, 4))).tolist() == [1, 1]
    del program
    gc.collect()
    assert kept[2] == 2.5  # its memory is still there


def test_a_function_may_return_what_it_got() -> None:
    program = graph.compile(lambda x: graph.call(lambda a: a, LIKE_X, x + 1.0) * 2.0, X)
    np.testing.assert_array_equal(program(X), 2 * (X + 1))


def test_many_runs() -> None:
    total = graph.Variable(0.0)
    function = Counted(lambda a: np.float64(a.sum()))

    def step(x: graph.Tensor) -> graph.Tensor:
        total.assign(total + graph.call(function, graph.spec((), np.float64), x))
        return total

    batches = np.stack([X + i for i in range(50)])
    found = graph.compile(step, X).run(batches)
    np.testing.assert_array_equal(found, np.cumsum(batches.sum((1, 2), dtype=np.float64)))
    assert function.calls == 50


# ---- how often it runs -----------------------------------------------------------------------------------------------


def test_it_runs_once_in_every_run() -> None:
    function = Counted(lambda *arrays: np.float64(0.5))
    scalar = graph.spec((), np.float64)

    def step() -> Any:
        first = graph.call(function, scalar)
        same = graph.call(function, scalar)
        of_constants = graph.call(function, scalar, 1.0, np.zeros(3))
        graph.call(function, scalar)  # nothing depends on it
        return first + same, of_constants

    program = graph.compile(step)
    assert function.calls == 0
    assert program() == (1.0, 0.5)
    assert function.calls == 3
    program()
    assert function.calls == 6


def test_calls_are_made_in_the_order_of_the_trace() -> None:
    order: list[int] = []

    def numbered(number: int) -> Any:
        def function(a: Array) -> Array:
            order.append(number)
            return a

        return function

    def step(x: graph.Tensor) -> Any:
        results = [graph.call(numbered(i), LIKE_X, graph.tanh(x) * float(i) if i % 2 else x) for i in range(6)]
        return [graph.exp(r) for r in reversed(results)]

    graph.compile(step, X)(X)
    assert order == list(range(6))


def test_a_recomputed_block_calls_again() -> None:
    function = Counted(lambda a: a)

    def step(x: graph.Tensor) -> Any:
        called = graph.custom_gradient(lambda x: graph.call(function, LIKE_X, x), lambda g, y, x: [g])
        loss = graph.sum(graph.recompute(lambda x: graph.tanh(called(x)) ** 2)(x))
        return loss, graph.gradients(loss, [x])[0]

    program = graph.compile(step, X)
    tanh = np.tanh(X.astype(np.float64))
    np.testing.assert_allclose(program(X)[1], 2 * tanh * (1 - tanh**2), atol=1e-6)
    assert function.calls == 1 + 1


def test_gradients() -> None:
    def step(x: graph.Tensor) -> Any:
        return graph.gradients(graph.sum(graph.call(np.sin, LIKE_X, x)), [x])[0]

    with pytest.raises(TypeError, match=r"call \(.*test_calls.py:\d+\) has no derivative: .*custom_gradient"):
        graph.compile(step, X)
    sine = graph.custom_gradient(lambda x: graph.call(np.sin, LIKE_X, x), lambda g, y, x: [g * graph.cos(x)])
    program = graph.compile(lambda x: graph.gradients(graph.sum(sine(x)), [x])[0], X)
    np.testing.assert_allclose(program(X), np.cos(X), atol=1e-6)


def test_tables() -> None:
    program = graph.compile(lambda x: graph.call(np.sin, LIKE_X, x) + 1.0, X)
    assert "call" in str(program)
    assert "test_calls.py" in str(program)
    assert "call" in str(program.graph)
    profile = program.profile(X, runs=3)
    assert profile.steps == ["call", "add"]
    assert profile.seconds[0] > 0
    assert "call" in str(profile)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "returned", "kind", "message"),
    [
        (LIKE_X, np.zeros((3, 2), np.float32), ValueError, r"result 0 of wrong has shape \(3, 2\), expected \(2, 3\)"),
        (LIKE_X, np.zeros((2, 3)), TypeError, "result 0 of wrong has dtype float64, expected float32"),
        (LIKE_X, None, ValueError, r"result 0 of wrong has shape \(\), expected \(2, 3\)"),
        ([LIKE_X], np.zeros((2, 3), np.float32), TypeError, "wrong returned ndarray, expected a tuple of 1 arrays"),
        ([LIKE_X] * 2, (X,), ValueError, "wrong returned 1 arrays, expected 2"),
        ([LIKE_X] * 2, (X, X[0]), ValueError, r"result 1 of wrong has shape \(3,\), expected \(2, 3\)"),
    ],
)
def test_wrong_results(results: Any, returned: Any, kind: type[Exception], message: str) -> None:
    def wrong(a: Array) -> Any:
        return returned

    wrong.__qualname__ = "wrong"
    count = graph.Variable(0.0)

    def step(x: graph.Tensor) -> Any:
        count.assign(count + 1.0)
        return graph.call(wrong, results, x)

    program = graph.compile(step, X)
    for run in (lambda: program(X), lambda: graph.call(wrong, results, X)):
        with pytest.raises(kind, match=f"^call: {message}"):
            run()
    assert count.value == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("no function", LIKE_X, X), TypeError, "function is str"),
        ((np.sin, (), X), ValueError, "results is empty"),
        ((np.sin, ((2, 3), np.float32), X), TypeError, r"results\[0\] is tuple, must be a Spec"),
        ((np.sin, graph.spec((2, 3), np.float16), X), TypeError, r"results\[0\] has dtype float16"),
        ((np.sin, LIKE_X, X.astype(np.float16)), TypeError, "dtype float16 is not one of"),
    ],
)
def test_wrong_arguments(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"^call: {message}.*\(test_calls.py:\d+\)"):
        graph.call(*arguments)
    with pytest.raises(kind, match=rf"^call: {message}.*\(test_calls.py:\d+\)"):
        graph.compile(lambda: graph.call(*arguments))


def test_a_call_after_an_update_is_refused() -> None:
    """Its exception could not leave the variables as they were."""
    w, sgd = graph.Variable(X), graph.SGD(0.1)

    def step(x: graph.Tensor) -> Any:
        sgd.minimize(graph.sum(w * x), [w])
        return graph.call(np.sin, LIKE_X, w)

    with pytest.raises(ValueError, match=r"call: an input depends on a variable after its update.*test_calls.py:\d+"):
        graph.compile(step, X)


# ---- exceptions ------------------------------------------------------------------------------------------------------


class MineError(BaseException):
    pass


@pytest.mark.parametrize("kind", [ValueError, IndexError, MemoryError, KeyboardInterrupt, SystemExit, MineError])
def test_an_exception_changes_nothing(kind: type[BaseException]) -> None:
    a, w = graph.Variable(0.0), graph.Variable(np.zeros(3, np.float32))
    sgd = graph.SGD(1.0, momentum=0.9)
    mine = kind("mine")

    def function(x: Array) -> Array:
        if x[0, 0] < 0:
            raise mine
        return x

    def step(x: graph.Tensor) -> Any:
        a.assign(a + 1.0)
        loss = graph.sum(w * graph.call(function, LIKE_X, x))
        sgd.minimize(loss, [w])
        return loss

    program = graph.compile(step, X)
    program(X)
    before = [v.value.copy() for v in (a, w, *program.variables)]
    batches = np.stack([X, X, X - 1, X])
    for run in (lambda: program(X - 1), lambda: program(X - 1, copy=False), lambda: program.profile(X - 1)):
        with pytest.raises(kind) as raised:
            run()
        assert raised.value is mine
        for variable, value in zip((a, w, *program.variables), before, strict=True):
            np.testing.assert_array_equal(variable.value, value)
    with pytest.raises(kind) as raised:
        program.run(batches)
    assert raised.value is mine
    assert a.value == 1 + 2  # of the runs before
    program(X)
    assert a.value == 4


def test_the_number_of_arguments_and_errors_of_the_function() -> None:
    def function(x: Array) -> Array:
        raise ValueError("mine")

    program = graph.compile(lambda x: graph.call(function, LIKE_X, x), X)
    with pytest.raises(ValueError, match=r"^mine$"):
        program(X)
    with pytest.raises(TypeError, match="takes 1 arguments"):
        program(X, X)


def test_a_program_within_a_call() -> None:
    inner = graph.compile(lambda x: graph.call(lambda a: a + 1, LIKE_X, x) * 2.0, X)
    outer = graph.compile(lambda x: graph.call(inner, LIKE_X, x) + 1.0, X)
    np.testing.assert_array_equal(outer(X), 2 * (X + 1) + 1)
    np.testing.assert_array_equal(outer(X), 2 * (X + 1) + 1)
    programs: list[Any] = []
    itself = graph.compile(lambda x: graph.call(lambda a: programs[0](a), LIKE_X, x), X)
    programs.append(itself)
    with pytest.raises(RuntimeError, match="called within that run"):
        itself(X)


# ---- threads and signals ---------------------------------------------------------------------------------------------


def test_programs_that_wait_for_each_other() -> None:
    """Each call is a barrier of all programs: none may hold what another one needs."""
    count, runs = 4, 25
    barrier = threading.Barrier(count)
    given: list[Any] = [None] * count

    def program_of(shard: int) -> graph.Program:
        def exchange(a: Array) -> Array:
            given[shard] = a.copy()
            barrier.wait(PATIENCE)
            total: Array = sum(given[1:], given[0])
            barrier.wait(PATIENCE)
            return total

        def step(x: graph.Tensor) -> graph.Tensor:
            for _ in range(3):
                x = graph.call(exchange, LIKE_X, x @ np.eye(3, dtype=np.float32)) / float(count)
            return x

        return graph.compile(step, X)

    programs = [program_of(shard) for shard in range(count)]
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda i: programs[i].run(np.stack([X + i] * runs)), range(count)))
    for each in found:
        np.testing.assert_array_equal(each, np.stack([X + 1.5] * runs))


def test_an_exception_in_one_of_two_that_wait() -> None:
    barrier = threading.Barrier(2)
    steps = graph.Variable(0.0)

    def waits(a: Array) -> Array:
        barrier.wait(PATIENCE)
        return a

    def fails(a: Array) -> Array:
        barrier.abort()
        raise LookupError("mine")

    def step(function: Any) -> Any:
        def traced(x: graph.Tensor) -> Any:
            steps.assign(steps + 1.0)
            return graph.call(function, LIKE_X, x)

        return traced

    programs = [graph.compile(step(f), X) for f in (waits, fails)]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(p, X) for p in programs]
    assert isinstance(futures[0].exception(), threading.BrokenBarrierError)
    assert isinstance(futures[1].exception(), LookupError)
    assert steps.value == 0


def test_threads_that_share_a_program() -> None:
    count = graph.Variable(0.0)
    inside = Counted(lambda a: a)
    busy = threading.Lock()

    def function(a: Array) -> Array:
        assert busy.acquire(blocking=False), "two threads run the program at a time"
        try:
            found: Array = inside(a)
            return found
        finally:
            busy.release()

    def step(x: graph.Tensor) -> Any:
        count.assign(count + 1.0)
        return graph.call(function, LIKE_X, x)

    program = graph.compile(step, X)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda i: (i, program(X + i)), range(200)):
            np.testing.assert_array_equal(found[1], X + found[0])
    assert count.value == inside.calls == 200


def test_ctrl_c_within_a_call() -> None:
    script = """
    import os, signal
    import numpy as np
    from retrograd import graph

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    runs = graph.Variable(0.0)

    def function(a):
        if a == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return a

    def step(x):
        runs.assign(runs + 1.0)
        return graph.call(function, graph.spec((), np.float64), x)

    program = graph.compile(step, 0.0)
    try:
        program.run(np.arange(10.0))
        print("not interrupted")
    except KeyboardInterrupt:
        pass
    assert runs.value == 3, runs.value
    program(0.0)
    assert runs.value == 4
    print("done")
    """
    assert python(script) == "done"


def test_the_process_exits_while_a_call_waits() -> None:
    script = """
    import threading
    import numpy as np
    from retrograd import graph

    inside, never = threading.Event(), threading.Event()

    def function(a):
        inside.set()
        never.wait()
        return a

    program = graph.compile(lambda x: graph.call(function, graph.spec(3, np.float64), x), np.ones(3))
    threading.Thread(target=program, args=(np.ones(3),), daemon=True).start()
    inside.wait()
    print("done")
    """
    assert python(script) == "done"


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_programs_are_freed() -> None:
    """Also one whose function refers to it and keeps its arrays."""

    class Model:
        program: graph.Program
        seen: Array

        def function(self, a: Array) -> Array:
            assert self.program is not None
            self.seen = a
            return a

    def used() -> list[weakref.ref[Any]]:
        model = Model()
        model.program = graph.compile(lambda x: graph.call(model.function, LIKE_X, x + 1.0), X)
        model.program(X)
        return [weakref.ref(model), weakref.ref(model.program), weakref.ref(model.program.graph)]

    gone = used()
    gc.collect()
    assert [g() for g in gone] == [None] * 3


def test_memory_does_not_grow() -> None:
    def function(a: Array) -> Array:
        if a[0, 0] < 0:
            raise LookupError("mine")
        return a

    program = graph.compile(lambda x: graph.call(function, LIKE_X, x), X)

    def runs(count: int) -> None:
        for _ in range(count):
            program(X)
            with pytest.raises(LookupError):
                program(X - 1)

    runs(30)
    grown = growth(runs)
    assert grown < 300 * 16, grown  # less than the smallest object a run
