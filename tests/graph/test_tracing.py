"""What a user meets while a function is traced: errors that say what is wrong, where, and what to do instead."""

from __future__ import annotations

import math
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import graph
from support.processes import python

HERE = os.path.basename(__file__)
X = graph.spec((4, 3))
SVG = "{http://www.w3.org/2000/svg}"


def line_of_caller() -> int:
    return sys._getframe(1).f_lineno


def raised(kind: type[Exception], function: Callable[..., Any], *specs: graph.Spec) -> str:
    with pytest.raises(kind) as info:
        graph.trace(function, specs)
    return str(info.value)


# ---- errors name the operation, the values and the line --------------------------------------------------------------


def test_shapes_that_do_not_broadcast() -> None:
    lines = []

    def function(x: graph.Tensor) -> graph.Tensor:
        lines.append(line_of_caller() + 1)
        return x + np.ones((4, 2), np.float32)

    message = raised(ValueError, function, X)
    assert message == f"add: shapes (4, 3) and (4, 2) do not broadcast ({HERE}:{lines[0]})"


@pytest.mark.parametrize(
    ("name", "function", "parts"),
    [
        ("matmul", lambda x: x @ np.ones((4, 5), np.float32), ["(4, 3)", "(4, 5)"]),
        ("linear", lambda x: graph.linear(x, np.ones((5, 4), np.float32)), ["(4, 3)", "(5, 4)"]),
        ("linear", lambda x: graph.linear(x, np.ones((5, 3), np.float32), np.ones(4, np.float32)), ["(4,)", "(5, 3)"]),
        ("concatenate", lambda x: graph.concatenate([x, np.ones((4, 3, 1), np.float32)]), ["(4, 3)", "(4, 3, 1)"]),
        ("reshape", lambda x: x.reshape(5, -1), ["(4, 3)", "(5, -1)"]),
        ("broadcast_to", lambda x: graph.broadcast_to(x, (4, 4)), ["(4, 3)", "(4, 4)"]),
        ("sum", lambda x: x.sum(axis=2), ["axis is 2", "2 axes"]),
        ("slice", lambda x: x[:, 5], ["index 5", "(4, 3)"]),
        ("squeeze", lambda x: graph.squeeze(x, 0), ["axis is 0", "(4, 3)"]),
        ("norm", lambda x: graph.layer_norm(x, np.ones(4, np.float32)), ["gamma", "(4,)", "(3,)"]),
        ("conv", lambda x: graph.conv(x.reshape(1, 4, 3, 1), np.ones((2, 5, 1, 1), np.float32)), ["(2, 5, 1, 1)"]),
        ("embedding", lambda x: graph.embedding(x, np.ones((2, 5), np.float32)), ["float32", "int64"]),
        ("softmax_cross_entropy", lambda x: graph.softmax_cross_entropy(x, np.zeros(3, int)), ["[3]", "(4, 3)"]),
        ("mean_squared_error", lambda x: graph.mean_squared_error(x, np.ones((4, 2), np.float32)), ["4, 2", "4, 3"]),
        ("lstm", lambda x: graph.lstm(x, (np.ones((8, 3), np.float32), np.ones((8, 2), np.float32))), ["(4, 3)"]),
        ("transpose", lambda x: graph.transpose(x, (0, 0)), ["(0, 0)", "2 axes"]),
        ("dropout", lambda x: graph.dropout(x, 1.0, seed=1), ["rate is 1.0"]),
        ("clip", lambda x: graph.clip(x), ["low and high"]),
        ("top_k", lambda x: graph.top_k(x, 4), ["k is 4", "(4, 3)"]),
        ("split", lambda x: graph.split(x, 3), ["extent 4", "3"]),
        ("take", lambda x: graph.take(x, np.zeros(2)), ["float64", "integers"]),
    ],
)  # fmt: skip
def test_an_error_names_the_operation_the_values_and_the_line(
    name: str, function: Callable[..., Any], parts: list[str]
) -> None:
    with pytest.raises((TypeError, ValueError, IndexError)) as info:
        graph.trace(function, [X])
    message = str(info.value)
    assert re.match(rf"\w*{name}", message), message
    assert all(part in message for part in parts), message
    assert re.search(rf"\({re.escape(HERE)}:\d+\)$", message), message


def test_arrays_are_refused_in_the_same_words_outside_a_trace() -> None:
    with pytest.raises(ValueError, match=rf"^add: shapes \(4, 3\) and \(2,\) do not broadcast \({HERE}:\d+\)$"):
        graph.add(np.ones((4, 3)), np.ones(2))


# ---- tensors where elements are needed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda x: 1 if x > 0 else 2, "graph.where"),
        (lambda x: x and x, "graph.where"),
        (lambda x: not x, "graph.where"),
        (lambda x: x in [1.0], "graph.where"),
        (lambda x: 0 < x < 1, "graph.where"),
        (lambda x: float(x), "convert what the program returns"),
        (lambda x: int(x), "convert what the program returns"),
        (lambda x: math.exp(x), "convert what the program returns"),
        (lambda x: [1, 2, 3][x], "convert what the program returns"),
        (lambda x: range(x), "convert what the program returns"),
        (lambda x: np.array(x), "what the program returns"),
        (lambda x: np.asarray(x, np.float64), "what the program returns"),
        (lambda x: np.ones(2)[x], "what the program returns"),
        (lambda x: np.exp(x), "graph.exp"),
        (lambda x: np.maximum(x, 0), "graph.maximum"),
        (lambda x: np.add.reduce(x), "retrograd.graph"),
        (lambda x: np.sum(x), "graph.sum"),
        (lambda x: np.mean(x, axis=0), "graph.mean"),
        (lambda x: np.where(x, 1, 2), "graph.where"),
        (lambda x: np.concatenate([x, x]), "graph.concatenate"),
        (lambda x: np.linalg.norm(x), "retrograd.graph"),
    ],
)
def test_a_tensor_in_python_or_numpy_code_says_what_to_do(use: Callable[..., Any], says: str) -> None:
    assert says in raised(TypeError, use, graph.spec(()))
    assert says in raised(TypeError, lambda x: use(x * 2.0), graph.spec(()))


def test_arrays_may_stand_on_the_left_of_an_operator() -> None:
    rng = np.random.default_rng(1)
    a = rng.standard_normal((4, 3)).astype(np.float32)
    w = rng.standard_normal((2, 4)).astype(np.float32)

    def function(x: Any) -> Any:
        return [
            a + x, a - x, a * x, a / x, abs(a) ** x, w @ x, a == x, a != x, a < x, a <= x, a > x, a >= x, a % x,
            np.float32(2) * x, a[0, 0] - x, (a > 0) & (x > 0), (a > 0) | (x > 0), (a > 0) ^ (x > 0),
        ]  # fmt: skip

    x = rng.standard_normal((4, 3)).astype(np.float32)
    program = graph.compile(function, x)
    for found, expected in zip(program(x), function(x), strict=True):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=4e-6, atol=1e-6)  # a few roundings of float32


def test_an_array_cannot_be_changed_by_a_tensor() -> None:
    def function(x: graph.Tensor) -> Any:
        total = np.zeros((4, 3), np.float32)
        total += x
        return total

    assert "`a = a + tensor`" in raised(TypeError, function, X)


def test_a_tensor_after_its_trace() -> None:
    kept: list[graph.Tensor] = []
    graph.trace(lambda x: kept.append(x * 2.0), [X])
    with pytest.raises(RuntimeError, match="return it from that function"):
        graph.exp(kept[0])
    with pytest.raises(RuntimeError, match="return it from that function"):
        kept[0] + 1.0
    with pytest.raises(RuntimeError, match="another trace"):
        graph.trace(lambda x: x + kept[0], [X])
    assert repr(kept[0]) == "Tensor(float32[4, 3], from multiply)"


def test_a_trace_inside_a_trace() -> None:
    message = raised(RuntimeError, lambda x: graph.compile(lambda y: y, X), X)
    assert "call the function itself" in message
    program = graph.compile(lambda x: x * 2.0, X)
    with pytest.raises(TypeError, match="tensor"):
        graph.trace(lambda x: program(x), [X])
    # Neither leaves a trace behind.
    assert graph.exp(np.zeros(())) == 1.0


def test_a_function_that_fails_leaves_no_trace_behind() -> None:
    def function(x: graph.Tensor) -> graph.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        graph.compile(function, X)
    assert graph.add(np.ones(2), 1.0).tolist() == [2.0, 2.0]
    assert graph.compile(lambda x: x + 1.0, graph.spec(()))(1.0) == 2.0


@pytest.mark.parametrize("answer", ["text", object(), np.array(["a"]), {"a": "b"}])
def test_what_a_function_may_return(answer: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        graph.compile(lambda x: (x, answer), X)


def test_nested_results_keep_their_form() -> None:
    def function(x: graph.Tensor) -> Any:
        return {"a": (x + 1.0, [x.sum()]), "none": None, "top": graph.top_k(x, 2), "number": 3.0}

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    found = graph.compile(function, x)(x)
    assert found["a"][0].tolist() == (x + 1).tolist()
    assert found["a"][1] == [66.0]
    assert found["none"] is None
    assert found["number"] == 3.0
    assert isinstance(found["top"], graph.TopK)
    assert found["top"].indices.tolist() == [[2, 1]] * 4


# ---- variables while tracing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda v: np.asarray(v),
        lambda v: np.exp(v),
        lambda v: np.sum(v),
        lambda v: float(v),
        lambda v: int(v),
        lambda v: math.exp(v),
        lambda v: 1.0 if v else 2.0,
        lambda v: 1.0 if v > 0 else 2.0,
    ],
)
def test_a_variable_in_numpy_code_while_tracing(use: Callable[..., Any]) -> None:
    variable = graph.Variable(1.5, name="rate")
    message = raised(TypeError, lambda x: x * use(variable), graph.spec((), np.float64))
    assert "variable.value" in message or "graph.where" in message


def test_a_variable_outside_a_trace_is_its_array() -> None:
    variable = graph.Variable([1.0, 2.0])
    assert np.asarray(variable).tolist() == [1.0, 2.0]
    assert np.array(variable, np.float32).dtype == np.float32
    assert (variable + 1.0).tolist() == [2.0, 3.0]
    assert (np.ones(2) + variable).tolist() == [2.0, 3.0]
    assert graph.square(variable).tolist() == [1.0, 4.0]
    assert float(graph.Variable(2.5)) == 2.5
    assert int(graph.Variable(3)) == 3
    assert not graph.Variable(0.0)
    with pytest.raises(TypeError, match=r"variable\.value"):
        np.exp(variable)


def test_values_are_set_in_place() -> None:
    variable = graph.Variable(np.zeros(3, np.float32), name="w")
    program = graph.compile(lambda x: variable * x, graph.spec(()))
    memory = variable.value
    variable.value = [1, 2, 3]
    assert variable.value is memory
    assert program(2.0).tolist() == [2.0, 4.0, 6.0]
    variable.value += 1
    assert variable.value is memory
    assert program(1.0).tolist() == [2.0, 3.0, 4.0]
    variable.assign(np.ones(3))
    assert variable.value is memory
    assert program(1.0).tolist() == [1.0, 1.0, 1.0]
    for bad in ([1.0, 2.0], 1.0):
        with pytest.raises(ValueError, match="shape"):
            variable.value = bad
        with pytest.raises(ValueError, match="shape"):
            variable.assign(bad)
    assert memory.tolist() == [1.0, 1.0, 1.0]


def test_assignments_that_do_not_fit() -> None:
    variable = graph.Variable(np.zeros(3, np.float32), name="w")
    for value in (np.zeros(4, np.float32), np.zeros(3), np.zeros(3, int)):
        message = raised(ValueError, lambda x: variable.assign(x), graph.spec(value.shape, value.dtype))
        assert "assign" in message
        assert "w" in message
        assert "float32[3]" in message


@pytest.mark.parametrize("value", [np.zeros(2, np.float16), np.zeros(2, complex), ["a"], np.zeros(2, np.uint8)])
def test_dtypes_of_variables(value: Any) -> None:
    with pytest.raises(TypeError, match="Variable: value has dtype"):
        graph.Variable(value)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_python_numbers_take_on_the_dtype_of_tensors(dtype: type) -> None:
    def function(x: graph.Tensor) -> list[graph.Tensor]:
        return [x + 1, 1 - x, x * 0.1, 2 / x, x**3, graph.maximum(x, 0), graph.where(x > 1, x, 0), x + True]

    found, _ = graph.trace(function, [graph.spec((2,), dtype)])
    assert [t.dtype for t in found.outputs] == [np.dtype(dtype)] * 8


def test_python_integers_stay_integers() -> None:
    found, _ = graph.trace(lambda n: [n + 1, n * 2, -n, n % 3, n > 1], [graph.spec((2,), np.int64)])
    assert [t.dtype.name for t in found.outputs] == ["int64"] * 4 + ["bool"]
    assert "int64 and float64" in raised(TypeError, lambda n: n * 0.5, graph.spec((2,), np.int64))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, y: x + y,
        lambda x, y: y * x,
        lambda x, y: x @ y.T,
        lambda x, y: graph.where(x > 0, x, y),
        lambda x, y: graph.linear(x, y),
        lambda x, y: graph.concatenate([x, y]),
        lambda x, y: graph.mean_squared_error(x, y),
        lambda x, y: graph.layer_norm(x, y[0]),
        lambda x, y: x + np.ones(3),
    ],
)
def test_mixed_dtypes_are_refused(use: Callable[..., Any]) -> None:
    message = raised((TypeError, ValueError), use, X, graph.spec((4, 3), np.float64))  # type: ignore[arg-type]
    assert all(part in message for part in ("float32", "float64", HERE)), message


@pytest.mark.parametrize(
    ("use", "dtype"),
    [
        (graph.exp, np.int64),
        (graph.sum, np.int64),
        (graph.softmax, np.int32),
        (graph.logical_not, np.float32),
        (graph.all, np.float32),
        (graph.divide, np.int64),
        (graph.cumsum, np.int64),
        (graph.gelu, np.int64),
        (graph.argmax, np.bool_),
    ],
)
def test_operands_of_the_wrong_kind(use: Callable[..., Any], dtype: type) -> None:
    two = use is graph.divide
    message = raised(TypeError, lambda x: use(x, x) if two else use(x), graph.spec((4, 3), dtype))
    assert np.dtype(dtype).name in message
    assert HERE in message


@pytest.mark.parametrize("dtype", [np.float16, np.complex64, np.uint8, "U1", object])
def test_dtypes_of_examples(dtype: Any) -> None:
    if np.dtype(dtype) == np.uint8:  # integers become int64
        assert graph.compile(lambda n: n + 1, np.zeros(2, dtype))(np.ones(2, dtype)).tolist() == [2, 2]
        return
    with pytest.raises(TypeError, match="compile: example 0 has dtype"):
        graph.compile(lambda x: x, np.zeros(2, dtype))


def test_indices_that_are_not_slices() -> None:
    for index in (np.array([0, 1]), [0, 1], 1.0, True):
        message = raised(TypeError, lambda x, i=index: x[i], X)
        assert "graph.take" in message
        assert "graph.where" in message
    assert "graph.take" in raised(TypeError, lambda x: x[x > 0], X)
    assert "4 entries" in raised(IndexError, lambda x: x[0, 0, 0, 0], X)


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_that_do_not_exist() -> None:
    scalar, integer = graph.spec(()), graph.spec((), np.int64)
    grad = graph.gradients
    assert "int64" in raised(TypeError, lambda n: grad(n, [n]), integer)
    assert "wrt has a tensor of dtype int64" in raised(TypeError, lambda x, n: grad(x, [n]), scalar, integer)
    assert "take its sum or mean first" in raised(ValueError, lambda x: grad(x * x, [x]), X)
    assert "ndarray" in raised(TypeError, lambda x: grad(x, [np.ones(2)]), scalar)
    message = raised(ValueError, lambda x, y: grad(x * x, [x, y]), scalar, scalar)
    assert "does not depend on wrt[1] (Tensor(float32[], from input))" in message
    assert HERE in message
    variable = graph.Variable(1.0, name="w")
    message = raised(ValueError, lambda x: grad(x * x, [variable]), graph.spec((), np.float64))
    assert "Variable(float64[], 'w')" in message
    message = raised(ValueError, lambda x: grad(graph.stop_gradient(x) * 2.0, [x]), scalar)
    assert "does not depend" in message
    with pytest.raises(RuntimeError, match=r"graph\.compile"):
        grad(np.ones(()), [variable])


def test_comparisons_have_no_derivative() -> None:
    message = raised(ValueError, lambda x: graph.gradients((x > 0.0).astype(np.float32).sum(), [x]), X)
    assert "does not depend on wrt[0]" in message
    assert "no derivative" in message
    message = raised(TypeError, lambda x: graph.gradients((x > 0.0)[0, 0], [x]), X)
    assert "bool" in message


def test_updates_outside_a_trace() -> None:
    with pytest.raises(RuntimeError, match=r"graph\.compile"):
        graph.SGD(0.1).update([graph.Variable(1.0)], [1.0])
    variable = graph.Variable(1.0)
    message = raised(TypeError, lambda x: graph.SGD(0.1).update([x], [x]), graph.spec((), np.float64))
    assert "must be a Variable" in message
    message = raised(ValueError, lambda x: graph.SGD(0.1).update([variable, variable], [x, x]), graph.spec((), float))
    assert "twice" in message


# ---- looking at graphs and programs ----------------------------------------------------------------------------------


def step() -> tuple[graph.Program, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    w = graph.Variable(rng.standard_normal((5, 3)).astype(np.float32), name="w<1>")
    b = graph.Variable(np.zeros(5, np.float32), name="b")
    adam = graph.Adam(1e-2)

    def function(x: graph.Tensor, labels: graph.Tensor) -> graph.Tensor:
        loss = graph.softmax_cross_entropy(graph.linear(graph.tanh(x) * 2.0, w, b), labels)
        adam.minimize(loss, [w, b])
        return loss

    x = rng.standard_normal((4, 3)).astype(np.float32)
    labels = np.array([0, 1, 4, 2])
    return graph.compile(function, x, labels), x, labels


def test_tables() -> None:
    program, _, _ = step()
    table = str(program.graph)
    lines = table.splitlines()
    assert lines[0].split() == ["operation", "of", "results", "bytes", "flops", "line"]
    assert len(lines) == 2 + len(program.graph.nodes)
    row = next(line for line in lines if " linear " in line)
    assert "float32[4, 5]" in row
    assert f"{HERE}:" in row
    assert "80 B" in row
    assert "120" in row
    table = str(program)
    assert "w<1>" in table
    assert "linear_backward" in table
    assert "assign step" in table
    assert f"{program._core.size} records, arena of {program.memory} B" in table
    assert all(len(line) < 200 for line in table.splitlines())


def test_profiles() -> None:
    program, x, labels = step()
    before = program(x, labels)
    profile = program.profile(x, labels, runs=3)
    assert program(x, labels) < before  # variables change as in any run
    text = str(profile)
    assert "linear_backward" in text
    assert "GFLOPS" in text
    assert "100.0 %" in text
    assert len(profile.seconds) == len(program.plan.steps) + 1
    assert all(t >= 0 for t in profile.seconds)
    assert math.isclose(profile.total, sum(profile.seconds))
    with pytest.raises(TypeError, match="2 arguments"):
        program.profile(x)
    with pytest.raises(TypeError, match="2 arguments"):
        program.profile(x, labels, labels)


def test_pictures(tmp_path: Path) -> None:
    program, _, _ = step()
    program.graph.draw(tmp_path / "step.svg")
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    assert root.tag == f"{SVG}svg"
    boxes = root.findall(f"{SVG}g")
    shown = {id(node) for node in program.graph.nodes if node.operation.name != "constant"}
    shown -= {
        id(node) for node in program.graph.nodes if "moment" in getattr(node.attributes.get("variable"), "name", "")
    }
    nodes = [node for node in program.graph.nodes if id(node) in shown]
    assert len(boxes) == len(nodes)
    assert len(program.graph.nodes) - len(boxes) >= 4  # the states of Adam, and constants
    texts = ["".join(box.itertext()) for box in boxes]
    assert any("variable w<1>" in text and "float32[5, 3]" in text for text in texts)
    assert sum("input" in text for text in texts) == 2
    edges = sum(t is not None and id(t.node) in shown for node in nodes for t in node.inputs)
    assert len(root.findall(f"{SVG}path")) == edges
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    places = set()
    for box in boxes:
        rectangle = box.find(f"{SVG}rect")
        assert rectangle is not None
        x, y = float(rectangle.get("x", -1)), float(rectangle.get("y", -1))
        assert 0 <= x <= width - 150
        assert 0 <= y <= height - 34
        places.add((x, y))
    assert len(places) == len(boxes)


def test_an_empty_graph_can_be_shown(tmp_path: Path) -> None:
    found, _ = graph.trace(lambda: None, [])
    assert "operation" in str(found)
    found.draw(tmp_path / "empty.svg")
    assert ElementTree.parse(tmp_path / "empty.svg").getroot().tag == f"{SVG}svg"


def test_errors_of_a_script_name_its_line() -> None:
    text = python(
        """
        import numpy as np
        from retrograd import graph

        def model(x):
            h = graph.tanh(x)
            return h @ h
        graph.compile(model, np.ones((2, 3)))
        """,
        expect=1,
    )
    assert "matmul: shapes (2, 3) and (2, 3) do not fit" in text
    assert "(<string>:7)" in text
