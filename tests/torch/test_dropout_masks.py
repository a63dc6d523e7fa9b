"""Dropout between layers with the masks that PyTorch's layers draw."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from support.torch_layers import assert_close, gradients_of, outputs_of, rt, same_bits, torch

nn: Any = torch.nn
rnn: Any = torch.nn.utils.rnn

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LSTM": ("LSTM", {}),
    "LSTM, bidirectional": ("LSTM", {"bidirectional": True, "num_layers": 3}),
    "LSTM, batch first": ("LSTM", {"batch_first": True, "bidirectional": True}),
    "LSTM, projection": ("LSTM", {"proj_size": 3}),
    "LSTM, no bias": ("LSTM", {"bias": False, "num_layers": 4}),
    "GRU": ("GRU", {"num_layers": 3}),
    "GRU, batch first": ("GRU", {"batch_first": True, "bidirectional": True}),
    "RNN": ("RNN", {"nonlinearity": "relu", "bidirectional": True}),
}


def pair(name: str, dtype: Any) -> tuple[Any, Any]:
    """Retrograd's layer and PyTorch's with the same weights."""
    torch.manual_seed(0)
    kind, options = CASES[name]
    options = {"num_layers": 2, "dropout": 0.4, **options}
    theirs = getattr(nn, kind)(5, 7, **options).to(dtype)
    ours = getattr(rt, kind)(5, 7, dropout_masks="torch", **options).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def check_same(ours: Any, theirs: Any, call: Any, inputs: tuple[Any, ...]) -> None:
    """The same results, gradients and state of the generator."""
    found = []
    for layer in (ours, theirs):
        given = tuple(x.clone().requires_grad_() for x in inputs)
        torch.manual_seed(5)
        outputs = outputs_of(call(layer, *given))
        found.append(([*outputs, *gradients_of(outputs, [*given, *layer.parameters()])], torch.get_rng_state()))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert_close(a, b)
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_pytorch(name: str, dtype: Any) -> None:
    ours, theirs = pair(name, dtype)
    for shape in ((6, 4, 5), (9, 5), (1, 1, 5), (64, 33, 5)):
        check_same(ours, theirs, lambda layer, x: layer(x), (torch.randn(shape, dtype=dtype),))


@pytest.mark.parametrize("name", CASES)
def test_packed_sequences(name: str) -> None:
    ours, theirs = pair(name, torch.float64)
    parts = tuple(torch.randn(n, 5, dtype=torch.float64) for n in (4, 9, 1, 9, 2))
    check_same(ours, theirs, lambda layer, *given: layer(rnn.pack_sequence(given, enforce_sorted=False))[0].data, parts)


def test_states() -> None:
    for name, states in (("LSTM, projection", ((2, 4, 3), (2, 4, 7))), ("GRU, batch first", ((4, 6, 7),))):
        ours, theirs = pair(name, torch.float64)
        given = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 6, 5), *states)]
        given[0] = given[0][:, : states[0][1]] if "first" not in name else given[0]
        check_same(ours, theirs, lambda layer, x, *h: layer(x, h if len(h) > 1 else h[0]), tuple(given))


def test_lengths_resets_and_masks_apply_to_every_layer() -> None:
    """As in one call of all layers, with a rate at which nothing is dropped."""
    torch.manual_seed(0)
    x, reset, mask = torch.randn(4, 6, 5).double(), torch.rand(4, 6) < 0.3, (torch.rand(4, 1, 4, 1, 7) < 0.7).double()
    calls: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"num_layers": 4}, {"mask": mask, "reset": reset}),
        ({"num_layers": 2, "bidirectional": True}, {"mask": mask, "lengths": [6, 1, 3, 4]}),
        ({"num_layers": 2}, {"mask": mask[0, 0], "reset": reset}),
    )
    for options, given in calls:
        plain = rt.GRU(5, 7, dropout=1e-15, batch_first=True, **options).double()
        layer = copy.deepcopy(plain)
        layer.dropout_masks = "torch"
        found = []
        for one in (layer, plain.eval()):
            outputs = outputs_of(one(x, **given))
            found.append([*outputs, *gradients_of(outputs, list(one.parameters()))])
        for a, b in zip(*found, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("name", ["LSTM, bidirectional", "GRU"])
def test_compiled(name: str) -> None:
    ours, _ = pair(name, torch.float32)
    x = torch.randn(6, 4, 5)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    results = []
    for call in (ours, compiled):
        torch.manual_seed(3)
        results.append(outputs_of(call(x)))
    torch._dynamo.reset()
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:dropout option adds dropout:UserWarning")
def test_evaluation_and_single_layers_draw_nothing() -> None:
    ours, theirs = pair("LSTM", torch.float32)
    x, state = torch.randn(6, 4, 5), torch.get_rng_state()
    assert_close(ours.eval()(x)[0], theirs.eval()(x)[0])
    assert torch.equal(torch.get_rng_state(), state)
    single = rt.GRU(5, 7, dropout=0.5, dropout_masks="torch")
    state = torch.get_rng_state()
    single(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_models_have_the_losses_of_pytorch() -> None:
    """`replace` and `patch`: the same losses step for step, and another mask without the option."""

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = nn.LSTM(5, 8, 3, dropout=0.3), nn.GRU(8, 6, 2, dropout=0.5, bidirectional=True)

        def forward(self, x: Any) -> Any:
            return self.gru(self.lstm(x)[0])[0].square().mean()

    def losses(model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        torch.manual_seed(1)
        found = []
        for _ in range(5):
            loss = model(torch.randn(7, 3, 5).double())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    plain = Model().double()
    models = [copy.deepcopy(plain) for _ in range(3)]
    rt.replace(models[0], dropout_masks="torch", verbose=False)
    rt.replace(models[1], verbose=False)
    rt.replace(models[1], dropout_masks="torch", verbose=False)  # also of layers that are retrograd's already
    rt.replace(models[2], verbose=False)
    with rt.patch(dropout_masks="torch"):
        models.append(Model().double())
    models[3].load_state_dict(plain.state_dict())
    assert type(models[3].gru) is rt.GRU
    models.append(pickle.loads(pickle.dumps(models[0].lstm)))
    assert models.pop().dropout_masks == "torch"
    expected = losses(plain)
    for index in (0, 1, 3):
        assert losses(models[index]) == pytest.approx(expected, rel=1e-12), index
    assert losses(models[2]) != pytest.approx(expected, rel=1e-6)
    rt.restore(models[0], verbose=False)
    assert type(models[0].lstm) is nn.LSTM
    assert "dropout_masks" not in models[0].lstm.__dict__
    rt.replace(models[0], verbose=False)
    assert models[0].lstm.dropout_masks == "retrograd"


def test_only_selected_layers_get_the_option() -> None:
    model = nn.ModuleDict({"a": nn.LSTM(4, 4, 2), "b": rt.LSTM(4, 4, 2), "c": rt.LSTM(4, 4, 2), "d": nn.LSTMCell(4, 4)})
    rt.replace(model, only=["a", "b", "d"], dropout_masks="torch", verbose=False)
    assert [model[name].dropout_masks for name in "abc"] == ["torch", "torch", "retrograd"]


def test_other_words_are_refused() -> None:
    message = "dropout_masks is 'pytorch', must be 'retrograd' or 'torch'"
    for call in (
        lambda: rt.LSTM(4, 6, 2, dropout_masks="pytorch"),
        lambda: rt.replace(nn.LSTM(4, 6), dropout_masks="pytorch"),
        lambda: rt.patch(dropout_masks="pytorch"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="dropout_masks is not an argument"):
        rt.LSTMCell(4, 6, dropout_masks="torch")
    layer = rt.RNN(4, 6, 2, dropout=0.5)
    assert "dropout_masks" not in repr(layer)
    layer.dropout_masks = "pytorch"
    assert "dropout_masks='pytorch'" in repr(layer)
    with pytest.raises(ValueError, match=f"RNN: {message}"):
        layer(torch.randn(3, 2, 4))
