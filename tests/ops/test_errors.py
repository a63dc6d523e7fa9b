"""Errors about arguments carry their data: the argument, the function, and a message in which names can be replaced."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import numpy as np
import pytest

import retrograd as rg
from retrograd.ops._errors import ArgumentError, ArgumentName, ArgumentTypeError, ArgumentValueError, of_function

PACKAGE = Path(rg.__file__).parent


def _layer_norm_error() -> ArgumentError:
    with pytest.raises(ArgumentValueError) as caught:
        rg.layer_norm_forward(np.ones((2, 4), np.float32), np.ones(3, np.float32))
    return caught.value


def test_a_public_function_raises_the_data() -> None:
    error = _layer_norm_error()
    assert (error.argument, error.function) == ("gamma", "layer_norm_forward")
    assert str(error) == "layer_norm_forward: gamma has shape (3,), but x of shape (2, 4) needs (4,)"
    names = {"x": "in", "gamma": "gamma_desc.data"}
    assert error.renamed(names) == "gamma_desc.data has shape (3,), but in of shape (2, 4) needs (4,)"


@pytest.mark.parametrize(
    ("argument", "names", "renamed"),
    [
        ("x", {}, "x"),
        ("x", {"x": "in"}, "in"),
        ("out.dx", {"dx": "in_delta"}, "in_delta"),
        ("out.dx", {"out": "in_delta"}, "out.dx"),
        ("out", {"out": "in_delta"}, "in_delta"),
        ("states[3]", {"states": "s"}, "s[3]"),
        ("states[3]", {"states": lambda index: f"all[{index + 2}]"}, "all[5]"),
        ("states", {"states": lambda index: f"all[{index}]"}, "all[0]"),
        ("weights[3].wx of gate i", {"weights.wx of gate i": lambda _: "iw_desc"}, "iw_desc"),
    ],
)
def test_names_are_looked_up(argument: str, names: dict[str, str], renamed: str) -> None:
    error = ArgumentTypeError(argument, "{argument} is wrong, {} too, not x or out", ArgumentName(argument))
    assert error.renamed(names) == f"{renamed} is wrong, {renamed} too, not x or out"
    assert str(error) == f"{argument} is wrong, {argument} too, not x or out"


def test_values_are_formatted() -> None:
    error = ArgumentValueError("x", "{x} is {!r}, {:g}, {}, {}", "a", 0.5, (1, 2), np.ndarray)
    assert str(error) == "x is 'a', 0.5, (1, 2), ndarray"


def test_errors_can_be_copied_and_sent_to_another_process() -> None:
    error = _layer_norm_error()
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (type(twin), twin.argument, str(twin)) == (ArgumentValueError, "gamma", str(error))


def test_an_error_gets_one_name_per_function() -> None:
    error = of_function("outer", of_function("inner", of_function("inner", ValueError("too large"))))
    assert str(error) == "outer: inner: too large"
    assert isinstance(of_function("f", TypeError("no")), ArgumentTypeError)


def test_what_numpy_refuses_gets_the_name_of_the_function() -> None:
    with pytest.raises(ArgumentValueError, match=r"^embedding_backward: .*too big") as caught:
        rg.embedding_backward(np.ones((1, 4), np.float32), np.zeros(1, int), 1 << 62)
    assert caught.value.__cause__ is not None


def _calls(folder: str, kinds: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        text = path.read_text("utf-8")
        if not any(f"{kind}(" in text for kind in kinds):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def test_every_template_has_as_many_values() -> None:
    count = 0
    for place, call in _calls(".", ("ArgumentTypeError", "ArgumentValueError")):
        template = call.args[1]
        if not isinstance(template, ast.Constant) or any(isinstance(a, ast.Starred) for a in call.args):
            continue
        fields = [field for _, field, _, _ in Formatter().parse(template.value) if field is not None]
        assert fields.count("") == len(call.args) - 2, place
        assert all(field.replace(".", "").isidentifier() for field in fields if field), place
        count += 1
    assert count > 150


def test_the_functions_raise_nothing_else_about_arguments() -> None:
    allowed = {"_buffers.py", "_threads.py"}  # reasons without an argument, and the environment variable
    found = [place for place, _ in _calls("ops", ("ValueError", "TypeError"))]
    assert {place.removeprefix("ops/").partition(":")[0] for place in found} == allowed
