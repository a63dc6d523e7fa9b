"""Subclasses of PyTorch's layers, models that are built later, and the way back."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
import types
from typing import Any

import pytest

from support.torch_layers import assert_close, gradients_of, rt, same_bits, torch

nn: Any = torch.nn
FAMILY = [
    *("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell", "LayerNorm", "GroupNorm"),
    *(f"{kind}Norm{axes}d" for kind in ("Batch", "Instance") for axes in (1, 2, 3)),
]


class Doubled(nn.LSTM):  # type: ignore[misc]
    """Calls PyTorch's forward by super, and has an attribute of its own."""

    def __init__(self, *arguments: Any, factor: float = 2.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.factor = factor

    def forward(self, input: Any, hx: Any = None) -> Any:
        y, state = super().forward(self.factor * input, hx)
        return y + 1, state


class Named(nn.LayerNorm):  # type: ignore[misc]
    """Has PyTorch's forward."""


class Twice(Named):
    def forward(self, input: Any) -> Any:
        return 2 * super().forward(input)


class Own(nn.LayerNorm):  # type: ignore[misc]
    def forward(self, input: Any) -> Any:
        return nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, 0.1)


LEFT = "Own: its forward does not call that of LayerNorm, and may compute something else"


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.lstm = Doubled(6, 5, factor=0.5)
        self.norms = nn.Sequential(Twice(5), nn.LayerNorm(5), nn.ReLU(), Own(5))

    def forward(self, x: Any) -> Any:
        return self.norms(self.lstm(x)[0])


def make() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return Model().double(), torch.randn(4, 3, 6, dtype=torch.float64)


def compare(ours: Any, theirs: Any, x: Any) -> None:
    y, z = ours(x), theirs(x)
    assert_close(y, z)
    found, expected = gradients_of([y], list(ours.parameters())), gradients_of([z], list(theirs.parameters()))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("name", FAMILY)
def test_layers_are_instances_of_pytorchs(name: str) -> None:
    arguments = (2, 4) if name == "GroupNorm" else (4,) if "Norm" in name else (4, 3)
    assert isinstance(getattr(rt, name)(*arguments), getattr(nn, name))


# ---- subclasses ------------------------------------------------------------------------------------------------------


def test_subclasses_that_call_pytorchs_forward_are_replaced() -> None:
    model, x = make()
    plain = copy.deepcopy(model)
    result = rt.replace(model, verbose=False)
    assert result.replaced == {"lstm": "Doubled", "norms.0": "Twice", "norms.1": "LayerNorm"}
    assert result.left == {"norms.3": LEFT}
    mro = type(model.lstm).__mro__
    assert mro.index(Doubled) < mro.index(rt.LSTM) < mro.index(nn.LSTM)
    assert isinstance(model.norms[0], (Twice, Named, rt.LayerNorm))
    assert model.lstm.factor == 0.5
    compare(model, plain, x)
    assert rt.replace(model, verbose=False).replaced == {}


def test_replaced_subclasses_are_copied_pickled_and_compiled() -> None:
    model, x = make()
    rt.replace(model, verbose=False)
    expected = model(x)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again.lstm) is type(model.lstm)
        assert isinstance(again.lstm, rt.LSTM)
        assert same_bits(again(x), expected)
    assert same_bits(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
    assert same_bits(torch.export.export(model, (x,)).module()(x), expected)


def test_pytorchs_own_lstm_is_not_compiled_because_of_retrograds() -> None:
    with pytest.raises(Exception, match="does not support RNN, GRU, or LSTM"):
        torch.compile(nn.LSTM(4, 3), backend="eager", fullgraph=True)(torch.randn(2, 1, 4))


def test_a_parametrized_layer_is_replaced_and_can_lose_its_parametrization() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 6)
    torch.nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    plain, x = copy.deepcopy(layer), torch.randn(3, 2, 4)
    assert rt.replace(layer, verbose=False).replaced == {"(the model)": "ParametrizedLSTM"}
    y = layer(x)[0]
    assert_close(y, plain(x)[0])
    assert same_bits(copy.deepcopy(layer)(x)[0], y)
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight_hh_l0")
    assert type(layer) is rt.LSTM
    assert_close(layer(x)[0], y)


# ---- selection and the way back --------------------------------------------------------------------------------------


def test_only_some_layers_are_replaced() -> None:
    for only, expected in (
        (nn.LSTM, ["lstm"]),
        (rt.LSTM, ["lstm"]),
        ("norms.*", ["norms.0", "norms.1"]),
        (lambda name, layer: name == "norms.1", ["norms.1"]),
        ((nn.LSTM, "norms.0"), ["lstm", "norms.0"]),
        ((), []),
    ):
        model, _ = make()
        result = rt.replace(model, only=only, verbose=False)
        assert list(result.replaced) == expected
        others = {"lstm": "Doubled", "norms.0": "Twice", "norms.1": "LayerNorm", "norms.3": "Own"}
        expected_left = {n: f"{k}: not selected by only" for n, k in others.items() if n not in expected}
        if only == "norms.*":
            expected_left["norms.3"] = LEFT
        assert result.left == expected_left
    with pytest.raises(TypeError, match="only is 3, must be a class, a pattern, a function or several"):
        rt.replace(nn.LayerNorm(3), only=3)


def test_restore_gives_pytorchs_classes_back(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = make()
    model.extra = nn.ModuleList([getattr(nn, name)(4, 3) for name in FAMILY if "Norm" not in name])
    kinds = [type(layer) for layer in model.modules()]
    expected = model(x)
    rt.replace(model, fuse=True, verbose=False)
    assert type(model.norms[2]) is nn.Identity
    model = copy.deepcopy(model)
    result = rt.restore(model)
    assert capsys.readouterr().out.startswith("restored: 10\n")
    assert result.left == {}
    assert [type(layer) for layer in model.modules()] == kinds
    assert same_bits(model(x), expected)
    assert not any(key.startswith("_more") or key == "_encoded" for m in model.modules() for key in m.__dict__)
    with pytest.warns(DeprecationWarning, match="script"):
        torch.jit.script(model.norms[1])
    assert rt.restore(model, verbose=False) == rt.Replacements({}, {})


def test_what_pytorch_has_not_is_not_restored() -> None:
    model = nn.ModuleList(
        [
            rt.LayerNorm(4, activation="tanh"),
            rt.LSTM(4, 3, peephole="full"),
            rt.RNN(4, 3, nonlinearity="silu"),
            rt.GRU(4, 3),
        ]
    )
    result = rt.restore(model, verbose=False)
    assert result.replaced == {"3": "GRU"}
    assert result.left["0"].startswith("LayerNorm: PyTorch's has no activation such as Activation('tanh'")
    assert result.left["1"] == "LSTM: PyTorch's has no peephole such as 'full'"
    assert result.left["2"] == "RNN: PyTorch's has no nonlinearity such as 'silu'"


# ---- models that are built later -------------------------------------------------------------------------------------


def hooks() -> Any:
    return dict(torch.nn.modules.module._global_module_registration_hooks)


def constructors() -> list[Any]:
    return [getattr(nn, name).__dict__.get("__init__") for name in (*FAMILY, "SyncBatchNorm")]


def test_patch_replaces_the_layers_of_models_that_are_built_inside() -> None:
    before = hooks(), constructors()
    plain, x = make()
    with rt.patch() as patched:
        model, _ = make()
        alone = nn.GRU(6, 4)
    assert (hooks(), constructors()) == before
    assert patched.replaced == {
        "Model.lstm": "Doubled",
        "Sequential.0": "Twice",
        "Sequential.1": "LayerNorm",
        "GRU": "GRU",
    }
    assert patched.left == {"Sequential.3": LEFT}
    assert str(patched).splitlines()[0] == "replaced: 4"
    assert type(alone) is rt.GRU
    compare(model, plain, x)
    assert alone(x.float())[0].shape == (4, 3, 4)
    later, _ = make()
    assert not any(isinstance(layer, (rt.LSTM, rt.LayerNorm)) for layer in later.modules())
    assert type(nn.GRU(3, 3)) is nn.GRU


def test_patch_as_a_call_nested_and_after_an_error() -> None:
    before = hooks(), constructors()
    first = rt.patch(only=nn.LayerNorm)
    with contextlib.suppress(ZeroDivisionError), rt.patch(only="Sequential.*") as second:
        norm, gru = nn.LayerNorm(3), nn.GRU(3, 3)
        model = nn.Sequential(nn.GRU(3, 3), nn.GRU(3, 3))
        raise ZeroDivisionError
    assert type(norm) is rt.LayerNorm
    assert type(gru) is nn.GRU
    assert [type(layer) for layer in model] == [rt.GRU] * 2
    assert second.replaced == {"Sequential.0": "GRU", "Sequential.1": "GRU"}
    assert first.replaced == {"LayerNorm": "LayerNorm"}
    assert type(nn.LayerNorm(3)) is rt.LayerNorm
    first.stop()
    first.stop()
    assert type(nn.LayerNorm(3)) is nn.LayerNorm
    assert (hooks(), constructors()) == before


def test_patch_sees_layers_that_were_built_before_or_copied() -> None:
    layer = nn.BatchNorm1d(3)
    with rt.patch() as patched:
        model = nn.Sequential(layer, copy.deepcopy(layer))
    assert [type(one) for one in model] == [rt.BatchNorm1d] * 2
    assert list(patched.replaced) == ["Sequential.0", "Sequential.1"]
    assert rt.LSTM(3, 3)(torch.randn(2, 1, 3))[0].shape == (2, 1, 3)


def test_the_lightning_callback_replaces_and_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a module that has what is used of Lightning's."""
    with pytest.raises(ImportError, match="lightning_callback: needs Lightning"):
        rt.lightning_callback()
    package, module = types.ModuleType("lightning"), types.ModuleType("lightning.pytorch")
    module.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    package.pytorch = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", module)
    callback = pickle.loads(pickle.dumps(rt.lightning_callback(only="norms.*", verbose=False)))
    assert isinstance(callback, module.Callback)
    assert callback.options == {"only": "norms.*", "fuse": False, "dropout_masks": None, "verbose": False}
    model, _ = make()
    callback.setup(None, model, "fit")
    assert isinstance(model.norms[1], rt.LayerNorm)
    assert not isinstance(model.lstm, rt.LSTM)
