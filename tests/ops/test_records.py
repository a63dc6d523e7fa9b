"""The records that the functions pass to the engine have the names of the engine's parameters, in its order."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import retrograd as rg
from retrograd import _core
from retrograd.ops import _records as records

ENGINE: dict[type[Any], Callable[..., Any]] = {
    records.NormForward: _core.NormProblem.forward,
    records.NormBackward: _core.NormProblem.backward,
    records.NormGradientSums: _core.NormProblem.gradient_sums,
    records.LinearForward: _core.linear_forward,
    records.LinearBackward: _core.linear_backward,
    records.EmbeddingForward: _core.embedding_forward,
    records.EmbeddingBackward: _core.embedding_backward,
    records.RecurrentForward: _core.RecurrentProblem.forward,
    records.RecurrentBackward: _core.RecurrentProblem.backward,
    records.Convolve: _core.convolve,
    records.ConvWeights: _core.conv_weights,
    records.ChannelSums: _core.channel_sums,
    records.PoolForward: _core.pool_forward,
    records.PoolBackward: _core.pool_backward,
    records.IndexedPlanes: _core.indexed_planes,
    records.ScanForward: _core.scan_forward,
    records.ScanBackward: _core.scan_backward,
    records.SoftmaxCrossEntropy: _core.softmax_cross_entropy,
    records.CosineDistance: _core.cosine_distance,
    records.ElementLosses: _core.element_losses,
    records.ActivationForward: _core.activation_forward,
    records.ActivationBackward: _core.activation_backward,
    records.Dropout: _core.dropout,
    records.OptimizerStep: _core.OptimizerRule.step,
    records.GlobalNorm: _core.global_norm,
}


@pytest.mark.parametrize("record", ENGINE, ids=lambda record: record.__name__)
def test_fields_are_the_engines_parameters(record: Any) -> None:
    ((signature, *_),) = ENGINE[record].__nb_signature__  # type: ignore[attr-defined]
    (function,) = ast.parse(f"{re.sub(r'retrograd._core.', '', signature)}: ...").body
    assert isinstance(function, ast.FunctionDef)
    names = [argument.arg for argument in function.args.args if argument.arg != "self"]
    assert list(record._fields) == names


def test_every_record_is_compared() -> None:
    defined = {kind for kind in vars(records).values() if inspect.isclass(kind) and hasattr(kind, "_fields")}
    assert defined == set(ENGINE)


def _calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted((Path(rg.__file__).parent / "ops").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                yield f"{path.name}:{node.lineno}", node


def test_the_engine_is_entered_through_one_door() -> None:
    """No function of `ops` calls one of these engine functions but through `enter`."""
    names = {function.__name__ for function in ENGINE.values()}
    for place, call in _calls():
        if isinstance(call.func, ast.Attribute) and call.func.attr in names:
            assert ast.unparse(call.func.value) not in ("_core", "engine", "problem.engine", "rule"), place


def test_every_call_has_the_record_of_its_function() -> None:
    entered = set()
    for place, call in _calls():
        kind = next((kind for kind in ENGINE if call.args and ast.unparse(call.args[0]) == kind.__name__), None)
        if kind is not None:
            assert ast.unparse(call.args[1]).rpartition(".")[2] == ENGINE[kind].__name__, place
            entered.add(kind)
    assert entered == set(ENGINE)
