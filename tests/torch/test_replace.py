"""Replacing the layers of a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import retrograd as rg
from support.torch_layers import assert_close, gradients_of, rt, same_bits, torch

nn: Any = torch.nn


class Model(nn.Module):  # type: ignore[misc]
    """One layer of every kind that is replaced, and some that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(
            nn.InstanceNorm2d(3), nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4)
        )
        self.sequence = nn.LSTM(12, 6, bidirectional=True, batch_first=True)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Any) -> Any:
        y, _ = self.sequence(self.images(x).flatten(2).transpose(1, 2).reshape(len(x), -1, 12))
        return self.head(self.norm(y))


def make() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return Model().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)


def test_layers_are_replaced_in_place() -> None:
    model, x = make()
    plain = copy.deepcopy(model)
    layers, parameters = dict(model.named_modules()), dict(model.named_parameters())
    buffers, state = dict(model.named_buffers()), list(model.state_dict())
    result = rt.replace(model)
    assert dict(model.named_modules()) == layers
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert all(b is buffers[name] for name, b in model.named_buffers())
    assert list(model.state_dict()) == state
    assert result.replaced == {
        "images.0": "InstanceNorm2d",
        "images.2": "BatchNorm2d",
        "images.4": "GroupNorm",
        "sequence": "LSTM",
        "norm": "LayerNorm",
    }
    assert result.left == {}
    assert type(model.sequence) is rt.LSTM
    assert type(model.images[2]) is rt.BatchNorm2d
    assert type(model.images[1]) is nn.Conv2d
    y, z = model(x), plain(x)
    assert_close(y, z)
    for a, b in zip(
        gradients_of([y], list(model.parameters())), gradients_of([z], list(plain.parameters())), strict=True
    ):
        assert_close(a, b)
    assert str(rt.replace(model)) == "replaced: 0"  # nothing is left to do


def test_what_was_done_and_left_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = make()
    model.extra = nn.LSTM(4, 6, 2, dropout=1.0)
    quiet = copy.deepcopy(model)
    result = rt.replace(model, fuse=True)
    text = capsys.readouterr().out
    assert text == f"{result}\n"
    assert rt.replace(quiet, fuse=True, verbose=False) == result
    assert capsys.readouterr().out == ""
    assert text.splitlines()[0] == "replaced: 6"
    assert "  images.3  ReLU, fused with images.2" in text
    assert "left as they were: 1" in text
    assert "extra     LSTM: dropout is 1, must be below 1" in text


def test_modes_hooks_and_flags_stay() -> None:
    model, x = make()
    seen: list[str] = []
    model.norm.register_forward_hook(lambda *_: seen.append("norm"))
    model.images[2].register_forward_pre_hook(lambda *_: seen.append("batch norm"))
    model.images[2].eval()
    model.sequence.weight_ih_l0.requires_grad_(False)
    rt.replace(model)
    model(x).sum().backward()
    assert seen == ["batch norm", "norm"]
    assert not model.images[2].training
    assert int(model.images[2].num_batches_tracked) == 0
    assert model.sequence.weight_ih_l0.grad is None
    assert model.sequence.weight_hh_l0.grad is not None


def test_the_model_itself_may_be_a_layer_and_layers_may_be_shared() -> None:
    norm = nn.LayerNorm(4)
    assert rt.replace(norm).replaced == {"(the model)": "LayerNorm"}
    assert type(norm) is rt.LayerNorm
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared)
    assert rt.replace(model).replaced == {"1": "BatchNorm1d"}
    assert model[1] is model[3]


def test_what_is_left_has_a_reason() -> None:
    class Special(nn.LayerNorm):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.layer_norm(x, self.normalized_shape)

    class Explicit(nn.LSTM):  # type: ignore[misc]
        def forward(self, x: Any, hx: Any = None) -> Any:
            return nn.LSTM.forward(self, x, hx)

    class Synchronized(nn.SyncBatchNorm):  # type: ignore[misc]
        pass

    model = nn.ModuleDict(
        {
            "dropout": nn.LSTM(4, 6, 2, dropout=1.0),
            "low": nn.LSTM(4, 6, dtype=torch.bfloat16),
            "lazy": nn.LazyBatchNorm1d(),
            "subclass": Special(4),
            "explicit": Explicit(4, 6),
            "sync": Synchronized(4),
            "low gru": nn.GRU(4, 6, dtype=torch.bfloat16),
            "low cell": nn.RNNCell(4, 6, dtype=torch.float16),
            "unknown": nn.RNNCell(4, 6, nonlinearity="tan"),
            "low norm": nn.LayerNorm(4, dtype=torch.float16),
        }
    )
    model["patched"] = nn.LayerNorm(4)
    model["patched"].forward = torch.zeros_like
    result = rt.replace(model)
    assert result.replaced == {"low norm": "LayerNorm"}
    assert result.left == {
        "dropout": "LSTM: dropout is 1, must be below 1",
        "low": "LSTM: its weights are torch.bfloat16; retrograd's LSTM is float32 or float64",
        "lazy": "LazyBatchNorm1d: it is not initialized yet; run the model once first",
        "subclass": "Special: its forward does not call that of LayerNorm, and may compute something else",
        "explicit": "Explicit: its forward does not call that of LSTM, and may compute something else",
        "sync": "Synchronized: a subclass of SyncBatchNorm, which retrograd's is not",
        "low gru": "GRU: its weights are torch.bfloat16; retrograd's GRU is float32 or float64",
        "low cell": "RNNCell: its weights are torch.float16; retrograd's RNNCell is float32 or float64",
        "unknown": "RNNCell: nonlinearity is 'tan', must be 'tanh' or 'relu'",
        "patched": "LayerNorm: its forward was assigned to the object, and would be called instead of retrograd's",
    }
    assert type(model["dropout"]) is nn.LSTM
    assert type(model["patched"]) is nn.LayerNorm


def test_recurrent_layers_and_normalizations_of_other_kinds_are_listed() -> None:
    class MyNorm(nn.RMSNorm):  # type: ignore[misc]
        pass

    model = nn.ModuleDict(
        {
            "rms": nn.RMSNorm(4),
            "response": nn.LocalResponseNorm(2),
            "across": nn.CrossMapLRN2d(2),
            "mine": MyNorm(4),
            "linear": nn.Linear(4, 4),
            "activation": nn.ReLU(),
            "ours": nn.ModuleList([rt.LSTM(4, 4), rt.GRUCell(4, 4), rt.LayerNorm(4), rt.SyncBatchNorm(4)]),
        }
    )
    result = rt.replace(model)
    assert result.replaced == {}
    assert result.left == {
        "rms": "RMSNorm: retrograd.torch has no RMSNorm",
        "response": "LocalResponseNorm: retrograd.torch has no LocalResponseNorm",
        "across": "CrossMapLRN2d: retrograd.torch has no CrossMapLRN2d",
        "mine": "MyNorm: retrograd.torch has no RMSNorm",
    }


class Controller(nn.Module):  # type: ignore[misc]
    """All recurrent layers and cells, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.LSTM(6, 8, proj_size=6),
                nn.GRU(6, 6, 2, bias=False),
                nn.RNN(6, 3, bidirectional=True),
                nn.RNN(6, 6, nonlinearity="relu"),
            ]
        )
        self.lstm, self.gru, self.rnn = nn.LSTMCell(6, 6), nn.GRUCell(6, 6), nn.RNNCell(6, 6, nonlinearity="relu")

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x, _ = layer(x)
        h, c = self.lstm(x[-1])
        return self.rnn(x[0], self.gru(c, h))


def test_the_whole_recurrent_family_is_replaced() -> None:
    torch.manual_seed(0)
    model = Controller().double()
    plain, x = copy.deepcopy(model), torch.randn(5, 3, 6, dtype=torch.float64)
    result = rt.replace(model, verbose=False)
    assert list(result.replaced.values()) == ["LSTM", "GRU", "RNN", "RNN", "LSTMCell", "GRUCell", "RNNCell"]
    assert result.left == {}
    assert type(model.layers[1]) is rt.GRU
    y, z = model(x), plain(x)
    assert_close(y, z)
    found, expected = gradients_of([y], list(model.parameters())), gradients_of([z], list(plain.parameters()))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)
    assert rt.replace(model, verbose=False) == rt.Replacements({}, {})
    plain.load_state_dict(model.state_dict())
    again = copy.deepcopy(model)
    assert same_bits(again(x), model(x))


def test_a_lazy_layer_is_replaced_once_it_has_run() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    model(torch.randn(3, 4))
    assert rt.replace(model).replaced == {"0": "BatchNorm1d"}


def test_weights_move_both_ways() -> None:
    model, x = make()
    plain = copy.deepcopy(model)
    rt.replace(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    model(x)
    plain.load_state_dict(model.state_dict())
    assert_close(model.eval()(x), plain.eval()(x))


# ---- fused activations -----------------------------------------------------------------------------------------------

ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.ReLU6(),
    nn.LeakyReLU(0.2),
    nn.ELU(0.7),
    nn.SiLU(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.Hardswish(),
    nn.Sigmoid(),
    nn.Tanh(),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(6), nn.GroupNorm(2, 6), nn.LayerNorm(5), nn.InstanceNorm1d(6)], ids=repr
)
def test_fused_activations_compute_the_same(norm: Any, activation: Any) -> None:
    torch.manual_seed(0)
    model = copy.deepcopy(nn.Sequential(norm, activation, nn.Dropout(0.0)))
    fused = copy.deepcopy(model)
    result = rt.replace(fused, fuse=True)
    assert result.replaced == {"0": type(norm).__name__, "1": f"{type(activation).__name__}, fused with 0"}
    assert type(fused[1]) is nn.Identity
    assert list(fused.state_dict()) == list(model.state_dict())
    x = (3.0 * torch.randn(4, 6, 5)).requires_grad_()
    y, z = fused(x), model(x)
    assert_close(y, z)
    for a, b in zip(
        gradients_of([y], [x, *fused.parameters()]), gradients_of([z], [x, *model.parameters()]), strict=True
    ):
        assert_close(a, b)


def test_activations_are_fused_only_where_nothing_can_tell() -> None:
    shared, hooked, watched, relu = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.ReLU(), nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    watched.register_forward_hook(lambda *_: None)
    model = nn.Sequential(
        nn.Sequential(shared, nn.ReLU()),
        nn.Sequential(shared, nn.Tanh()),
        nn.Sequential(hooked, nn.ReLU()),
        nn.Sequential(nn.LayerNorm(4), watched),
        nn.Sequential(nn.LayerNorm(4), relu, nn.LayerNorm(4), relu),
        nn.Sequential(nn.LayerNorm(4), nn.Softmax(-1)),
        nn.ModuleList([nn.LayerNorm(4), nn.ReLU()]),
    )
    result = rt.replace(model, fuse=True)
    assert {name: why for name, why in result.replaced.items() if "fused" in why} == {
        "4.1": "ReLU, fused with 4.0",
        "4.3": "ReLU, fused with 4.2",
    }
    assert result.left == {
        "0.1": "ReLU: the normalization before it is used more than once",
        "1.1": "Tanh: the normalization before it is used more than once",
        "2.1": "ReLU: it or the normalization before it has hooks",
        "3.1": "ReLU: it or the normalization before it has hooks",
    }
    assert rt.replace(nn.Sequential(nn.LayerNorm(4), nn.ReLU())).replaced == {"0": "LayerNorm"}  # not unless asked
    again = rt.replace(model, fuse=True)
    assert again.replaced == {}


def test_retrograds_own_layers_are_fused_too() -> None:
    model = nn.Sequential(rt.LayerNorm(4), nn.ReLU(), rt.LayerNorm(4, activation="tanh"), nn.ReLU())
    assert rt.replace(model, fuse=True).replaced == {"1": "ReLU, fused with 0"}
    assert model[0].activation == rg.Activation("relu")
    x = torch.randn(3, 4)
    assert same_bits(model(x), torch.relu(rt.LayerNorm(4, activation="tanh")(torch.relu(rt.LayerNorm(4)(x)))))


class Skip(nn.Sequential):  # type: ignore[misc]
    """Uses its normalization alone."""

    def forward(self, x: Any) -> Any:
        return self[1](self[0](x)) + self[0](x)


class Doubled(nn.Sequential):  # type: ignore[misc]
    def __call__(self, x: Any) -> Any:
        return super().__call__(x) + self[0](x)


class Backwards(nn.Sequential):  # type: ignore[misc]
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


class Named(nn.Sequential):  # type: ignore[misc]
    """Computes what a Sequential does."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.LayerNorm(channels), nn.ReLU())


@pytest.mark.parametrize("kind", [Skip, Doubled, Backwards])
def test_nothing_is_fused_in_a_sequential_that_computes_something_else(kind: Any) -> None:
    torch.manual_seed(0)
    model, x = kind(nn.LayerNorm(6), nn.ReLU()), torch.randn(4, 6)
    expected = model(x)
    result = rt.replace(model, fuse=True)
    assert_close(model(x), expected)
    assert result.replaced == {"0": "LayerNorm"}
    assert result.left == {"1": f"ReLU: {kind.__name__} is not a plain Sequential, and may use the normalization alone"}


def test_nothing_is_fused_around_a_forward_of_an_object() -> None:
    """Such a forward is called instead of the class's."""
    torch.manual_seed(0)
    x = torch.randn(4, 6)

    def patched(part: str) -> Any:
        model = nn.Sequential(nn.LayerNorm(6), nn.ReLU())
        layer = {"sequence": model, "norm": model[0], "activation": model[1]}[part]
        layer.forward = lambda y: 2.0 * type(layer).forward(layer, y)
        return model

    for part in ("sequence", "norm", "activation"):
        model = patched(part)
        expected = model(x)
        result = rt.replace(model, fuse=True)
        assert_close(model(x), expected, part)
        assert type(model[1]) is nn.ReLU
        assert result.left.keys() == ({"0"} if part == "norm" else {"1"})


def test_activations_are_fused_in_a_subclass_with_the_same_forward() -> None:
    torch.manual_seed(0)
    model, x = Named(6), torch.randn(4, 6)
    expected = model(x)
    assert rt.replace(model, fuse=True).replaced == {"0": "LayerNorm", "1": "ReLU, fused with 0"}
    assert_close(model(x), expected)
    assert_close(model[0](x), expected)  # the normalization alone returns activated values
