"""retrograd.nn: what the errors say to write exists."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import retrograd
from retrograd import graph, nn
from retrograd.nn import hints, recurrent
from support.nn import random


def objects() -> dict[str, Any]:
    """What the names in the hints stand for."""
    model = nn.Sequential(first=nn.Linear(3, 4, rng=0), second=nn.Linear(4, 2, rng=1))
    loss, optimizer = nn.SoftmaxCrossEntropy(), nn.SGD(model, 0.1)
    layer = model["first"]
    return {
        "nn": nn, "graph": graph, "retrograd": retrograd, "np": np, "model": model, "loss": loss,
        "optimizer": optimizer, "step": nn.compile(model, loss, optimizer), "layer": layer, "parameter": layer.w,
        "lstm": nn.LSTM(3, 2, rng=0),
    }  # fmt: skip


TEXTS = [
    (f"{place} {name}", text)
    for place, texts in hints.hints().items()
    if not place.startswith("options")
    for name, text in texts.items()
]
_NAMES = re.compile(r"\b(?:nn|graph|retrograd|model|loss|optimizer|step|layer|parameter|lstm|np)(?:\.\w+)+")


def calls(text: str) -> Iterator[str]:
    """The calls in a text that are whole: nn.Conv(inputs, outputs, 3)."""
    for found in re.finditer(r"\b(?:nn|graph)\.\w+\(", text):
        for end in range(found.end(), len(text) + 1):
            part = text[found.start() : end]
            if part.count("(") == part.count(")"):
                yield part
                break


@pytest.mark.parametrize(("name", "text"), TEXTS, ids=[name for name, _ in TEXTS])
def test_what_a_hint_names_exists(name: str, text: str) -> None:
    known = objects()
    names = _NAMES.findall(text)
    has_name = bool(names) or re.search(r"x\.\w+|self\.name|step\(|\bdtype=|forward", text) is not None
    assert has_name or text.startswith("nothing")
    for path in names:
        first, *rest = path.split(".")
        value = known[first]
        for part in rest:
            value = getattr(value, part)
    for method in re.findall(r"\bx\.(\w+)", text):
        assert hasattr(graph.Tensor, method)


@pytest.mark.parametrize(
    ("text", "whole"), [(text, part) for _, text in TEXTS for part in calls(text) if "..." not in part]
)
def test_the_calls_in_a_hint_have_the_arguments_of_the_function(text: str, whole: str) -> None:
    tree = ast.parse(whole, mode="eval").body
    assert isinstance(tree, ast.Call)
    function = eval(ast.unparse(tree.func), objects())
    inspect.signature(function).bind(*tree.args, **{k.arg: k.value for k in tree.keywords if k.arg is not None})


@pytest.mark.parametrize("place", ["Module", "Parameter", "Optimizer", "Loss"])
def test_the_hint_is_in_the_error(place: str) -> None:
    known = objects()
    instance = {"Module": known["model"], "Parameter": known["parameter"], "Optimizer": known["optimizer"],
                "Loss": known["loss"]}[place]  # fmt: skip
    for name, text in hints.hints()[place].items():
        with pytest.raises(AttributeError) as caught:
            getattr(instance, name)
        said = text.removeprefix("nothing").lstrip(": ")
        assert str(caught.value).startswith(f"'{type(instance).__name__}' object has no attribute {name!r}; ")
        assert said in str(caught.value)
    with pytest.raises(AttributeError, match=r"object has no attribute 'nonsense'$"):
        _ = instance.nonsense
    assert not hasattr(instance, "nonsense")


def test_the_hint_is_in_the_error_of_the_package() -> None:
    for name, text in hints.hints()["retrograd.nn"].items():
        with pytest.raises(AttributeError, match=rf"module 'retrograd.nn' has no attribute '{name}'; ") as caught:
            getattr(nn, name)
        assert text.removeprefix("nothing").lstrip(": ") in str(caught.value)
    with pytest.raises(AttributeError, match=r"has no attribute 'Nonsense'$"):
        _ = nn.Nonsense


def test_hints_for_options_are_options() -> None:
    """Each option that a hint says to write is taken by some optimizer, and the one it replaces by none."""
    model = nn.Linear(3, 2)
    for wrong, text in hints.hints()["options"].items():
        for kind in (nn.SGD, nn.Adam, nn.AdamW, nn.RMSProp):
            with pytest.raises(TypeError, match=rf"'{wrong}'; write {re.escape(text)}"):
                kind(model, 0.1, **{wrong: 0.5})
        wanted = re.findall(r"(\w+)=", text)
        assert wanted
        for name in wanted:
            value: Any = (-0.5, 0.5) if name == "clip" else 0.5
            assert any(_takes(kind, model, {name: value}) for kind in (nn.SGD, nn.Adam, nn.RMSProp)), name


def test_hints_for_options_of_recurrent_layers_are_options() -> None:
    kinds = (nn.LSTM, nn.GRU, nn.RNN)
    known = {name for kind in kinds for name in inspect.signature(kind).parameters}
    known |= recurrent.RecurrentOptions.__annotations__.keys()
    for wrong, text in hints.hints()["options of recurrent layers"].items():
        refusing = [kind for kind in kinds if wrong not in inspect.signature(kind).parameters]
        for kind in refusing:
            said = text.removeprefix("nothing: ")
            with pytest.raises(TypeError, match=rf"{kind.__name__}: got .* '{wrong}'; .*{re.escape(said)}$"):
                kind(3, 4, **{wrong: 1})
        assert refusing
        wanted = re.findall(r"(\w+)=", text)
        assert wanted or text.startswith("nothing")
        assert set(wanted) <= known, text
    with pytest.raises(TypeError, match=r"GRU: got an unexpected keyword argument 'nonsense'$"):
        nn.GRU(3, 4, nonsense=1)  # type: ignore[call-arg]


LAYERS: dict[type[nn.Module], tuple[Any, ...]] = {
    nn.Linear: (3, 4), nn.Conv: (3, 4, 3), nn.ConvTranspose: (3, 4, 3), nn.MaxPool: (2,), nn.Embedding: (5, 4),
    nn.Dropout: (0.5,), nn.BatchNorm: (4,), nn.LayerNorm: (4,), nn.GroupNorm: (2, 4), nn.InstanceNorm: (4,),
    nn.Softmax: (), nn.ReLU: (), nn.MultiHeadAttention: (8, 2),
}  # fmt: skip


def _arguments(layer: type[nn.Module]) -> set[str]:
    """The names of its arguments, and of those that it passes on."""
    return {name for kind in layer.__mro__[:-1] for name in inspect.signature(kind).parameters}


@pytest.mark.parametrize(("wrong", "text"), hints.hints()["options of layers"].items())
def test_hints_for_options_of_layers_are_options(wrong: str, text: str) -> None:
    hinted = []
    for kind, arguments in LAYERS.items():
        if wrong not in _arguments(kind):
            with pytest.raises(TypeError, match=rf"^{kind.__name__}: got .* keyword argument '{wrong}'") as error:
                kind(*arguments, **{wrong: 1})
            if text.removeprefix("nothing: ") in str(error.value):
                hinted.append(kind)
    assert hinted
    for name in re.findall(r"(\w+)=", text):
        assert all(name in _arguments(kind) for kind in hinted)


def test_a_class_of_a_user_has_its_own_arguments() -> None:
    class Wide(nn.Linear):
        def __init__(self, size: int, **named: float) -> None:
            super().__init__(size, size)
            self.named = named

    assert Wide(3, p=0.5).named == {"p": 0.5}
    assert nn.Sequential(p=nn.ReLU())["p"] is not None
    with pytest.raises(TypeError, match="Flatten takes no arguments, got 1"):
        nn.Flatten(3)


def _takes(kind: Any, model: nn.Module, options: dict[str, Any]) -> bool:
    try:
        kind(model, 0.1, **options)
    except TypeError:
        return False
    return True


def test_what_the_hints_promise_works() -> None:
    """Those that say more than a name, by values."""
    x, known = random(2, 3, 4, 5), objects()
    images = graph.mean(x, (-2, -1))
    np.testing.assert_allclose(images, x.mean((-2, -1)), rtol=1e-13)  # AdaptiveAvgPool2d(1)
    assert nn.Conv(3, 4, (3,))(random(2, 3, 9)).shape == (2, 4, 7)  # Conv1d
    assert nn.Conv(3, 4, 3, channels_last=True)(random(2, 8, 9, 3)).shape == (2, 6, 7, 4)  # Keras's Conv2D
    assert nn.MaxPool(2)(random(2, 3, 8)).shape == (2, 3, 4)  # MaxPool1d
    assert known["model"]["first"] is known["layer"]  # ModuleDict
    p = 1 / (1 + np.exp(-x))
    target = (random(*x.shape, seed=1) > 0).astype(np.float64)
    np.testing.assert_allclose(nn.SigmoidCrossEntropy()(x, target), graph.log_loss(p, target), rtol=1e-6)  # BCELoss
    parameter = known["parameter"]
    copy = parameter.value.copy()
    parameter[...] = 0
    assert copy.any()
    assert not parameter.value.any()
    assert parameter.size == copy.size
